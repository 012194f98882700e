"""Bytes to values: `Unpacker`, compiled once per static part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import hot
from ..errors import WireError
from ..wire import spec, tree
from ..wire.spec import LeafSpec
from ..wire.tree import Node
from .numpy import CARRIER, MAX_NDIM, AnyDType, Array, build
from .walk import torch_views

# (payload, readonly) -> leaf, and (leaves, scalars, memo) -> value
_Make = Callable[[Array, bool], Any]
_Assemble = Callable[[Sequence[Any], Sequence[object], dict[object, Any]], Any]

_NUMPY_COMPOSITES = ("generic", "bytes")


class Unpacker:
    """The reader of every message that has this static part.

    nbytes: bytes of the payload
    single: (shape, NumPy dtype, strides in bytes or None, torch dtype to view as or None, is torch) if the value is
            one plain leaf at offset 0 that NumPy can make, else None. The value is then
            `ndarray(shape, dtype, payload, 0, strides)`, through `torch.from_numpy` and `.view` for torch.

    Raises `WireError` on anything invalid. Imports torch if there is a torch tensor among the leaves.
    """

    __slots__ = ("_assemble", "_batch", "_groups", "_leaves", "_makes", "_scalars", "nbytes", "single")

    def __init__(self, static: bytes) -> None:
        self.nbytes = 0
        self.single: tuple[tuple[int, ...], AnyDType, tuple[int, ...] | None, Any, bool] | None = None
        try:
            self._compile(static)
        except WireError:
            raise
        except Exception as error:  # whatever else NumPy and torch object to comes from the bytes as well
            raise WireError(f"invalid static part: {type(error).__name__}: {error}") from error

    def _compile(self, static: bytes) -> None:
        leaves, tokens, descriptions = spec.decode(static)
        dtypes = [build(description) for description in descriptions]
        node, self._scalars = tree.parse([tree.LEAF] if tokens is None else tokens, len(leaves))
        self._leaves = leaves
        self._groups: dict[int, tuple[int, int]] = {}
        for leaf in leaves:
            itemsize = dtypes[leaf.extra].itemsize if leaf.dtype is None else leaf.dtype.itemsize
            extent = spec.check_extent(leaf, itemsize)
            if extent:
                self.nbytes = max(self.nbytes, leaf.offset + extent)
                if leaf.torch and leaf.extra:
                    low, high = self._groups.get(leaf.extra, (leaf.offset, 0))
                    self._groups[leaf.extra] = (min(low, leaf.offset), max(high, leaf.offset + extent))
        for group, (low, high) in self._groups.items():
            self._groups[group] = (low - low % spec.GROUP_ALIGNMENT, high)
        self._batch: Any = None  # makes the leaves in C; False: it cannot
        self._makes = [self._torch(leaf) if leaf.torch else self._numpy(leaf, dtypes) for leaf in leaves]
        self._assemble = assembler(node)
        self._check_parts(node, leaves)
        if node.kind == "leaf":
            self._set_single(leaves[0], dtypes)

    def __repr__(self) -> str:
        return f"<Unpacker of {len(self._leaves)} leaves, {self.nbytes} bytes>"

    def _set_single(self, leaf: LeafSpec, dtypes: Sequence[AnyDType]) -> None:
        if leaf.offset or 0 in leaf.shape or not self.nbytes or len(leaf.shape) > MAX_NDIM:
            return
        if leaf.torch and leaf.extra:
            return
        dtype = dtypes[leaf.extra] if leaf.dtype is None else CARRIER[leaf.dtype.code]
        view = None
        if leaf.torch and leaf.dtype is not None:
            view = torch_views().view_dtype(leaf.dtype)
        self.single = (leaf.shape, dtype, leaf.strides, view, leaf.torch)

    @staticmethod
    def _check_parts(node: Node, leaves: Sequence[LeafSpec]) -> None:
        for child in node.children:
            Unpacker._check_parts(child, leaves)
        if node.kind in tree.COMPOSITES:
            of_torch = node.kind not in _NUMPY_COMPOSITES
            parts = leaves[node.leaf : node.leaf + tree.COMPOSITES[node.kind].leaves]
            if any(part.torch != of_torch for part in parts):
                raise WireError(f"composite {node.kind!r} has a part of the wrong library")
            if node.kind == "generic" and parts[0].shape:
                raise WireError("NumPy scalar has dimensions")
            if node.kind == "bytes" and (len(parts[0].shape) != 1 or parts[0].dtype is None):
                raise WireError("NumPy bytes have a wrong shape")

    @staticmethod
    def _numpy(leaf: LeafSpec, dtypes: Sequence[AnyDType]) -> _Make:
        dtype = dtypes[leaf.extra] if leaf.dtype is None else CARRIER[leaf.dtype.code]
        shape, offset, strides = leaf.shape, leaf.offset, leaf.strides
        if len(shape) > MAX_NDIM:
            raise WireError(f"array has {len(shape)} dimensions, this NumPy allows {MAX_NDIM}")
        empty = 0 in shape or not dtype.itemsize

        def make(payload: Array, readonly: bool) -> Array:
            if empty:  # holds no bytes, so it needs no payload
                array: Array = np.ndarray(shape, dtype)
            else:
                array = np.ndarray(shape, dtype, payload, offset, strides)
            if readonly:
                array.flags.writeable = False
            return array

        return make

    def _torch(self, leaf: LeafSpec) -> _Make:
        try:
            views = torch_views()
        except ImportError:
            raise WireError("the message has torch tensors, but torch is not installed: pip install torch") from None
        import torch

        row: Any = leaf.dtype
        shape, offset, strides = leaf.shape, leaf.offset, leaf.strides
        dtype = views.view_dtype(row)
        carrier = CARRIER[row.code]
        from_numpy, ndarray = torch.from_numpy, np.ndarray
        if 0 in shape:
            return lambda payload, readonly: views.empty(row, shape)
        if leaf.extra:
            low = self._groups[leaf.extra][0]
            group = leaf.extra

            # `payload` is here the dict of the message's shared storages, see __call__
            def shared(storages: Any, readonly: bool) -> Any:
                tensor = views.storage_view(storages[group], offset - low, row, shape, strides)
                return tensor if dtype is None else tensor.view(dtype)

            return shared
        if len(shape) > MAX_NDIM:

            def deep(payload: Array, readonly: bool) -> Any:
                tensor = views.carrier_view(payload, offset, row, shape, strides)
                return tensor if dtype is None else tensor.view(dtype)

            return deep
        if dtype is None:
            return lambda payload, readonly: from_numpy(ndarray(shape, carrier, payload, offset, strides))
        return lambda payload, readonly: from_numpy(ndarray(shape, carrier, payload, offset, strides)).view(dtype)

    def __call__(self, payload: Array, dynamic: bytes, *, readonly: bool) -> tuple[object, object]:
        """The value and the meta of one message.

        `payload` is a uint8 array [>= nbytes], flagged writable, whose base is no array itself. The value's leaves
        are views of it: each of them keeps exactly `payload` alive, and nothing else does. Composites may make
        private copies of their small parts. With `readonly`, NumPy arrays are not writable; torch tensors always look
        writable. Raises `WireError` if the dynamic part is invalid or the payload is too small or inconsistent.
        """
        if payload.nbytes < self.nbytes:
            raise WireError(f"payload has {payload.nbytes} bytes, the message needs {self.nbytes}")
        scalars, meta = tree.decode_dynamic(dynamic, self._scalars)
        try:
            if self._groups:
                leaves = self._make_shared(payload, readonly)
            elif self._batch:
                leaves = self._batch.make(payload)
            else:
                leaves = [make(payload, readonly) for make in self._makes]
                if self._batch is None and len(leaves) > 1:
                    self._batch = _batch(payload, leaves)
            return self._assemble(leaves, scalars, {}), meta
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"invalid message: {type(error).__name__}: {error}") from error

    def _make_shared(self, payload: Array, readonly: bool) -> list[Any]:
        from torch import from_numpy

        storages = {
            group: from_numpy(np.ndarray((high - low,), np.uint8, payload, low)).untyped_storage()
            for group, (low, high) in self._groups.items()
        }
        return [
            make(storages if leaf.torch and leaf.extra and 0 not in leaf.shape else payload, readonly)  # type: ignore[arg-type]
            for make, leaf in zip(self._makes, self._leaves, strict=True)
        ]


def _batch(payload: Array, leaves: list[Any]) -> Any:
    """What makes leaves like these of another payload, if they are plain tensors and the compiled module is there."""
    module = hot.module()
    if module is None:
        return None if hot.BUILT and "torch" not in sys.modules else False
    try:
        return module.Batch(payload, leaves)
    except ValueError:
        return False


def assembler(node: Node) -> _Assemble:
    """The function that puts a value together from the message's leaves and scalars."""
    leaf, scalar, kind = node.leaf, node.scalar, node.kind
    if kind == "leaf":
        return lambda leaves, scalars, memo: leaves[leaf]
    if kind == "scalar":
        return lambda leaves, scalars, memo: scalars[scalar]
    if kind in tree.COMPOSITES:
        return _composite(node)
    values = _children(node)
    if kind == "l":
        return values
    if kind == "t":
        return lambda leaves, scalars, memo: tuple(values(leaves, scalars, memo))
    keys = node.keys
    return lambda leaves, scalars, memo: dict(zip(keys, values(leaves, scalars, memo), strict=True))


def _children(node: Node) -> Callable[[Sequence[Any], Sequence[object], dict[object, Any]], list[Any]]:
    count = len(node.children)
    if all(child.kind == "leaf" for child in node.children):
        first = node.leaf
        return lambda leaves, scalars, memo: list(leaves[first : first + count])
    children = [assembler(child) for child in node.children]
    return lambda leaves, scalars, memo: [child(leaves, scalars, memo) for child in children]


def _composite(node: Node) -> _Assemble:
    shape = tree.COMPOSITES[node.kind]
    leaf, scalar = node.leaf, node.scalar

    # scalars of NumPy are private copies: they hold no lease
    if node.kind == "generic":
        return lambda leaves, scalars, memo: leaves[leaf].copy()[()]
    if node.kind == "bytes":
        return lambda leaves, scalars, memo: np.bytes_(leaves[leaf].tobytes())
    if node.kind == "str":

        def text(leaves: Sequence[Any], scalars: Sequence[object], memo: dict[object, Any]) -> np.str_:
            if not isinstance(scalars[scalar], str):
                raise WireError("numpy.str_ is no string")
            return np.str_(scalars[scalar])

        return text
    from .composites import rebuild

    def parts(leaves: Sequence[Any], scalars: Sequence[object], memo: dict[object, Any]) -> Any:
        return rebuild(node, list(leaves[leaf : leaf + shape.leaves]), scalars[scalar : scalar + shape.scalars], memo)

    return parts
