"""`decode`: from a description and the payload to a value and its meta. The reference; `native/` has the same in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DependencyError, WireError
from ..wire import spec
from ..wire.spec import LeafSpec
from .leaf import is_tensor
from .libraries import torch_views, without_torch
from .numpy import CARRIER, MAX_NDIM, AnyDType, Array, build

MakeLeaf = Callable[[LeafSpec, Any, tuple[int, int]], Any]
"""(leaf, its description if the dtype is described, (offset, bytes) of its shared storage or zeros) -> leaf"""
Compose = Callable[[str, Sequence[int], list[Any], list[Any]], Any]
"""(kind, parameters, leaves, scalars) -> the value of a composite"""


def decode(description: bytes, payload: Array, *, readonly: bool) -> tuple[Any, Any]:
    """The value and the meta of a message.

    `payload` is a uint8 array [bytes], flagged writable, whose base is no array itself. The value's leaves are views
    of it: each of them keeps `payload` alive, and nothing else does. Composites may make private copies of their small
    parts. With `readonly`, NumPy arrays are not writable and cannot be made so; torch tensors always appear writable.
    Imports torch if a leaf is a torch tensor. Raises `WireError` for anything invalid, `DependencyError` if torch is
    missing, `MemoryError` if there is no memory for a copy.
    """
    return Tree(description, Views(payload, readonly)).read()


class Views:
    """Makes the leaves of one message: views of its payload."""

    __slots__ = ("_payload", "_readonly", "_shown", "_storages")

    def __init__(self, payload: Array, readonly: bool) -> None:
        self._payload, self._readonly = payload, readonly
        self._shown: Array | None = None if readonly else payload
        self._storages: dict[tuple[int, int], Any] = {}

    def __call__(self, leaf: LeafSpec, described: Any, storage: tuple[int, int]) -> Any:
        dtype = CARRIER[leaf.dtype.code] if leaf.dtype is not None else build(described)
        extent = spec.check_extent(leaf, dtype.itemsize)
        nbytes = self._payload.nbytes
        if extent and leaf.offset + extent > nbytes:
            raise WireError(f"payload has {nbytes} bytes, the message needs {leaf.offset + extent}")
        if not leaf.torch:
            return self._array(leaf, dtype, extent)
        try:
            views = torch_views()
        except ImportError:
            raise without_torch() from None
        row: Any = leaf.dtype
        view_as = views.view_dtype(row)
        if not extent:
            return views.empty(row, leaf.shape)
        if leaf.storage:
            at, size = storage
            if leaf.offset < at or leaf.offset + extent > at + size or at + size > nbytes:
                raise WireError(f"leaf at {leaf.offset} lies outside its shared storage of {size} bytes at {at}")
            tensor = views.storage_view(self._shared(storage), leaf.offset - at, row, leaf.shape, leaf.strides)
        else:
            tensor = views.carrier_view(self._payload, leaf.offset, row, leaf.shape, leaf.strides)
        return tensor if view_as is None else tensor.view(view_as)

    def _array(self, leaf: LeafSpec, dtype: AnyDType, extent: int) -> Array:
        if len(leaf.shape) > MAX_NDIM:
            raise WireError(f"array has {len(leaf.shape)} dimensions, this NumPy allows {MAX_NDIM}")
        array: Array
        if extent:
            array = np.ndarray(leaf.shape, dtype, self._to_show(), leaf.offset, leaf.strides)
        else:
            array = np.ndarray(leaf.shape, dtype)  # holds no bytes, so it needs no payload
        if self._readonly:
            array.flags.writeable = False
        return array

    def _to_show(self) -> Array:
        """The payload as arrays see it: with `readonly`, an array of no base that NumPy could write to."""
        if self._shown is None:
            self._shown = np.frombuffer(self._payload.data.toreadonly(), np.uint8)
        return self._shown

    def _shared(self, storage: tuple[int, int]) -> Any:
        found = self._storages.get(storage)
        if found is None:
            at, size = storage
            part: Array = np.ndarray((size,), np.uint8, self._payload, at)
            found = self._storages[storage] = torch_views().torch.from_numpy(part).untyped_storage()
        return found


class Tree:
    """Reads the nodes of a description; `make` makes each leaf, `compose` each composite: by default, what was sent."""

    __slots__ = ("_compose", "_cursor", "_make", "_memo")

    def __init__(self, description: bytes, make: MakeLeaf, compose: Compose | None = None) -> None:
        self._cursor, self._make, self._compose = spec.Cursor(description), make, compose
        self._memo: dict[Any, Any] = {}  # of composites

    def read(self) -> tuple[Any, Any]:
        """The value and the meta. Raises `WireError`, `DependencyError`, `MemoryError`."""
        try:
            value = self._value(0)
            return value, self._cursor.meta()
        except (WireError, DependencyError, MemoryError):  # a shortage says nothing of the bytes: they stay
            raise
        except Exception as error:  # an error of NumPy or torch comes from invalid bytes as well
            raise WireError(f"invalid message: {type(error).__name__}: {error}") from error

    def _value(self, depth: int) -> Any:
        cursor = self._cursor
        tag = cursor.tag()
        if tag == spec.LEAF:
            return self._leaf()
        if tag in (spec.LIST, spec.TUPLE):
            values = [self._value(depth + 1) for _ in range(cursor.count(depth))]
            return values if tag == spec.LIST else tuple(values)
        if tag == spec.DICT:
            count = cursor.count(depth)
            found, big_keys = {}, spec.BigKeys()
            for _ in range(count):
                name = cursor.key()
                if not big_keys.add(name):
                    raise WireError(f"dict has more than {spec.MAX_EQUAL_HASHES} int keys of one hash")
                found[name] = self._value(depth + 1)
            if len(found) != count:
                raise WireError("dict has a key twice")
            return found
        if tag == spec.COMPOSITE:
            return self._composite()
        return cursor.scalar(tag)

    def _leaf(self) -> Any:
        leaf = self._cursor.leaf()
        described = self._cursor.plain() if leaf.dtype is None else None
        return self._make(leaf, described, self._cursor.storages[leaf.storage - 1] if leaf.storage else (0, 0))

    def _composite(self) -> Any:
        kind, parameters = self._cursor.composite()
        row = spec.COMPOSITES[kind]
        leaves = []
        for _ in range(row.leaves):
            if self._cursor.tag() != spec.LEAF:
                raise WireError(f"composite {kind!r} has a part that is no leaf")
            leaves.append(self._leaf())
        scalars = [self._cursor.scalar(self._cursor.tag()) for _ in range(row.scalars)]
        if self._compose is not None:
            return self._compose(kind, parameters, leaves, scalars)
        return compose(kind, parameters, leaves, scalars, self._memo)


def compose(
    kind: str, parameters: Sequence[int], leaves: Sequence[Any], scalars: Sequence[Any], memo: dict[Any, Any]
) -> Any:
    """The value of a composite. `memo` lives as long as one message. Invalid parts may raise any exception."""
    if kind not in spec.OF_ARRAYS:
        if not all(map(is_tensor, leaves)):
            raise WireError(f"composite {kind!r} has a part that is no torch tensor")
        from .composites import rebuild

        return rebuild(kind, tuple(parameters), list(leaves), scalars, memo)
    # scalars of NumPy, and bytes, are private copies: they hold no lease
    if kind == "str":
        if not isinstance(scalars[0], str):
            raise WireError("numpy.str_ is no string")
        return np.str_(scalars[0])
    array = leaves[0]
    if not isinstance(array, np.ndarray) or array.ndim != (kind != "generic"):
        raise WireError(f"composite {kind!r} has a part that is no array, or of another shape")
    if kind == "generic":
        return array.copy()[()]
    if array.dtype != np.uint8:
        raise WireError(f"composite {kind!r} is no array of bytes")
    return np.bytes_(array.tobytes()) if kind == "bytes" else array.tobytes()
