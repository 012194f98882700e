"""Choose `encode` and `decode`: the compiled ones, or the reference if nothing was compiled.

This module gives the compiled ones, once, the dtype table, the reference, and the Python functions for leaves of types
that they do not know. They read torch's tensors themselves as soon as the program has imported torch and they have met
a first tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import native
from ..errors import ArgumentError, WireError
from ..wire import spec
from ..wire.dtypes import TABLE
from ..wire.record import INLINE
from . import copies
from .decode import Tree, Views
from .decode import decode as reference_decode
from .encode import encode as reference_encode
from .encode import identity, job_of, parts_of
from .leaf import Leaf, Refused
from .libraries import torch_views
from .numpy import CARRIER, MAX_NDIM, Array, address_of

__all__ = ["Compiled", "codec", "copy_value", "decode", "encode"]


def _rows() -> tuple[Any, ...]:
    """(code, item size, NumPy's numbers of the type) of each row of the table."""
    types = [np.dtype(char) for char in np.typecodes["All"]]
    return tuple(
        (row.code, row.itemsize, tuple(sorted({t.num for t in types if row.numpy and t == CARRIER[row.code]})))
        for row in TABLE
    )


def _big_bytes(number: int) -> bytes:
    return int.to_bytes(number, int.bit_length(number) // 8 + 1, "little", signed=True)


def _payload(buffer: Any, offset: int, nbytes: int) -> Array:
    return np.ndarray((nbytes,), np.uint8, buffer, offset)


SHARES, COPIED, ASKS, ON_DEVICE = range(4)
"""How a leaf is sent together with others that overlap it in memory: as in native/encode.c."""


def _leaf(leaf: Leaf) -> tuple[Any, ...]:
    entry = leaf.entry(0, leaf.strides)
    try:
        spec.check_extent(entry, leaf.itemsize)
    except WireError as error:
        raise Refused(ArgumentError, str(error)) from None
    sharing, other = _sharing(leaf)
    return (
        _node(leaf, entry), leaf.source, leaf.address, leaf.start, leaf.extent, leaf.nbytes,
        lambda offset: job_of(leaf, offset), sharing, other,
    )  # fmt: skip


def _node(leaf: Leaf, entry: spec.LeafSpec) -> bytes:
    return spec.leaf(entry) + (spec.plain(leaf.description) if leaf.dtype is None else b"")


def _sharing(leaf: Leaf) -> tuple[int, Any]:
    """How a leaf is sent together with others, and: for SHARES its node among them, for COPIED a key of equal views."""
    if leaf.device != "cpu":
        return ON_DEVICE, None
    if not leaf.extent or (leaf.raw is not None and leaf.address):
        return SHARES, None
    if leaf.raw is None:
        return COPIED, identity(leaf)
    entry = leaf.entry(0, leaf.raw)
    try:
        spec.check_extent(entry, leaf.itemsize)
    except WireError:
        return ASKS, None
    return SHARES, _node(leaf, entry)


class _Message(Tree):
    """The reference's reader of one message, for the nodes that the compiled `decode` does not know."""

    __slots__ = ("_show_torch",)

    def __init__(self, description: bytes, payload: Array, readonly: bool, show_torch: Callable[[], None]) -> None:
        super().__init__(description, Views(payload, readonly))
        self._show_torch = show_torch

    def node_at(self, at: int) -> tuple[Any, int]:
        """The leaf, composite or scalar that starts at this offset, and the offset of its end."""
        self._cursor.at = at
        value = self._value(0)
        self._show_torch()
        return value, self._cursor.at


class Compiled:
    """A compiled `codec`, with `encode` and `decode`, and the Python functions that it calls."""

    def __init__(self, *, exchange: bool = True) -> None:
        """`exchange`: read tensors through torch's DLPack exchange interface, if torch has it."""
        self._exchange, self._knows_torch = exchange, False
        self.codec = native.module.Codec(
            encode=reference_encode, decode=reference_decode, parts=self._parts, tree=self._tree, big_bytes=_big_bytes,
            move_large=copies.move_large, payload=_payload, argument_error=ArgumentError, alone=copies.ALONE,
            small=copies.SMALL, inline_bytes=INLINE, max_ndim=MAX_NDIM, rows=_rows(),
        )  # fmt: skip

    def _parts(self, value: Any) -> tuple[bytes, tuple[Any, ...], tuple[Any, ...]]:
        """The parts of a value of unknown type, for the compiled `encode`: head of a composite, leaves, scalars.

        A leaf is (its node with offset 0, source, address, start, extent, size, offset -> job, and the two results of
        `_sharing`).
        """
        self._show_torch()
        kind, parameters, leaves, scalars = parts_of(value)
        head = b"" if kind is None else spec.composite(kind, parameters)
        return head, tuple([_leaf(leaf) for leaf in leaves]), tuple(scalars)

    def _tree(self, description: bytes, payload: Array, readonly: bool) -> _Message:
        return _Message(description, payload, readonly, self._show_torch)

    def _show_torch(self) -> None:
        """Let the codec read torch's tensors, once torch is imported completely."""
        if self._knows_torch or "torch" not in sys.modules:
            return
        torch: Any = sys.modules["torch"]
        if getattr(sys.modules.get("torch.nn"), "Parameter", None) is None:
            return  # another thread is importing it
        views = torch_views()
        samples = {row.code: views.empty(row, (1,)) for row in views.ROW.values() if not row.quantized}
        self.codec.use_torch(
            torch.Tensor, torch.nn.Parameter, samples, torch.strided,
            getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if self._exchange else None,
            torch._C._to_dlpack, torch._C._from_dlpack,
        )  # fmt: skip
        self._knows_torch = True


codec: Any = None
"""The compiled one, or None."""
encode: Any = reference_encode
decode: Any = reference_decode
if native.module is not None:
    codec = Compiled().codec
    encode, decode = codec.encode, codec.decode


def copy_value(value: object) -> object:
    """A deep, private, writable copy of a value, on the CPU; leaves that share memory share it in the copy as well.

    The leaves of a tree are views of one new block of memory, which lives as long as any of them.
    """
    encoded = encode(value)
    block = np.empty(encoded.nbytes + 64, np.uint8)
    skip = -address_of(block) % 64
    payload = block[skip : skip + encoded.nbytes]
    encoded.copy_into(payload)
    return decode(encoded.description, payload, readonly=False)[0]
