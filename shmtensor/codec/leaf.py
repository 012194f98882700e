"""The leaves of a value, tensors and arrays: how to find them, and one as it is before it is placed and copied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..wire import spec
from ..wire.dtypes import DType


class Refused(Exception):
    """A value cannot be sent. On the way out, each container appends its key or index to `path`, innermost first."""

    def __init__(self, error: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.error = error
        self.reason = reason
        self.path: list[str] = []

    def public(self) -> Exception:
        """The error to raise, which names the path."""
        steps = self.path if len(self.path) <= 12 else [*self.path[:4], "[...]", *self.path[-4:]]
        return self.error(f"value{''.join(reversed(steps))}: {self.reason}")


class Leaf:
    """One tensor or array that is to be sent.

    dtype:       row of the table; None: see `description`
    torch:       torch tensor, else NumPy array
    shape:       elements
    strides:     bytes, for a leaf that is sent alone: None for C order
    itemsize:    bytes
    source:      the tensor or array, which keeps the memory alive until it is copied
    address:     of the bytes in host memory if one memmove copies the leaf alone, else 0
    device:      the device of `start`
    start:       address of the leaf's first byte, 0 if it has none
    extent:      bytes from `start` to the end of the last element
    raw:         strides in bytes for a leaf that is sent in memory shared with others; None if they cannot be sent
    copy:        writes the leaf's elements alone to (payload, offset), for a leaf without `address`
    """

    __slots__ = (
        "address", "copy", "description", "device", "dtype", "extent", "itemsize", "raw", "shape", "source", "start",
        "strides", "torch",
    )  # fmt: skip

    def __init__(
        self,
        source: Any,
        dtype: DType | None,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        pointer: int,
        copy: Callable[[Leaf, np.ndarray[Any, Any], int], None],
        *,
        torch: bool,
        description: object = None,
        device: str = "cpu",
    ) -> None:
        """`strides` (bytes, None: C order) and `pointer` describe the source; strides may have any value."""
        self.source = source
        self.dtype = dtype
        self.description = description
        self.torch = torch
        self.itemsize = itemsize
        self.shape = shape
        self.device = device
        self.copy = copy
        self.strides: tuple[int, ...] | None = None
        self.raw: tuple[int, ...] | None = None
        self.start = self.extent = self.address = 0
        if 0 in shape or not itemsize:
            return
        if strides is None:
            self.start = pointer
            self.extent = spec.extent(shape, None, itemsize)
            self.raw = c_strides(shape, itemsize)
            dense = True
        else:
            # the stride of a dimension of length 1 has no meaning: keep it if it is valid
            strides = tuple([s if n > 1 or s >= 0 else itemsize for n, s in zip(shape, strides, strict=True)])
            self.start = pointer + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
            self.extent = spec.extent(shape, [abs(s) for s in strides], itemsize)
            if all(s > 0 for n, s in zip(shape, strides, strict=True) if n > 1):
                self.raw = strides
            dense = is_dense(shape, strides, itemsize)
            self.strides = strides if dense else None
        if not pointer or (torch and pointer % itemsize):
            self.raw = None
        if dense and device == "cpu":
            self.address = pointer

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf sent alone."""
        return spec.extent(self.shape, None, self.itemsize)

    def entry(self, offset: int, strides: tuple[int, ...] | None, storage: int = 0) -> spec.LeafSpec:
        """The leaf's entry in a description, at an offset of the payload."""
        return spec.LeafSpec(self.dtype, self.torch, self.shape, strides, offset, storage)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array in C order."""
    strides = []
    stride = itemsize
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def steps_of(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> tuple[int, ...]:
    """Strides in elements, as torch counts them, of strides in bytes (None: C order)."""
    return c_strides(shape, 1) if strides is None else tuple([stride // itemsize for stride in strides])


def is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the elements fill one run of memory, each byte once, in any order of dimensions."""
    expected = itemsize
    for stride, length in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor of any type; does not import torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


MAX_SPREAD: Final = 2
"""Leaves that overlap are stored as one range of memory if it has at most this many times their own bytes, equal views
counted once."""


def overlapping(ranges: Sequence[tuple[str, int, int]]) -> list[list[int]]:
    """Which byte ranges overlap: groups of their indices, each by start, one for each range that overlaps no other.

    ranges: (device, start, nbytes) of each; one of no bytes overlaps nothing
    """
    groups: list[list[int]] = []
    where, end = "", 0
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index][:2]):
        device, start, nbytes = ranges[index]
        if groups and device == where and start < end:
            groups[-1].append(index)
            end = max(end, start + nbytes)
        else:
            groups.append([index])
            where, end = device, start + nbytes
    return groups


def map_leaves(function: Callable[[Any], Any], value: object) -> object:
    """The value with `function` applied to each tensor and array; an object that occurs twice is mapped once.

    Dicts, lists and tuples are made anew, everything else is kept.
    """
    return _map(function, value, {})


def _map(function: Callable[[Any], Any], node: Any, done: dict[int, Any]) -> Any:
    # no closure: a recursive one is a reference cycle, which would keep leases until the garbage collector runs
    if isinstance(node, dict):
        return {key: _map(function, child, done) for key, child in node.items()}
    if isinstance(node, list):
        return [_map(function, child, done) for child in node]
    if isinstance(node, tuple):
        return tuple([_map(function, child, done) for child in node])
    if isinstance(node, np.ndarray) or is_tensor(node):
        if id(node) not in done:
            done[id(node)] = function(node)
        return done[id(node)]
    return node
