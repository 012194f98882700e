"""What is about to be sent: its description, how much room it takes, and how it gets into a slot.

One plain contiguous tensor or array is the common message; its description is made once per (class, dtype, shape) and
its bytes go by one `memmove`. Everything else goes through `views/pack.py`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import numpy as np

from ..errors import ArgumentTypeError
from ..wire.record import BODY, BODY_OFFSET, INLINE, SIZE, VERSION, padded
from . import moves, pack
from .group import PackedGroup
from .numpy import address_of

_PACKED, _TENSOR, _ARRAY, _EMPTY, DEVICE = range(5)  # DEVICE: `views/resident.py`, for a device ring
_PLANS_MOST: Final = 4096

SMALL: Final = moves.SMALL

EMPTY_RECORD: Final = bytes(BODY_OFFSET) + BODY.pack(0, VERSION, 0, 0, 0, 1, 0, 0, 0).ljust(SIZE - BODY_OFFSET, b"\0")
"""The record of no message, for a doorbell that only says: look around."""


class Outgoing:
    """The description of a value and the room it takes. Shared by all sends of an equal-looking plain value.

    is_plan, is_tensor: whether it describes every tensor or array, every tensor, of this dtype and shape
    on_device: whether some of it lies on a CUDA device
    """

    __slots__ = (
        "dynamic",
        "is_plan",
        "is_tensor",
        "kind",
        "nbytes",
        "on_device",
        "source",
        "spilled",
        "static",
        "total",
    )

    def __init__(self, kind: int, static: bytes, dynamic: bytes, nbytes: int, source: Any = None) -> None:
        self.kind, self.static, self.dynamic, self.nbytes, self.source = kind, static, dynamic, nbytes, source
        self.is_tensor = kind == _TENSOR
        self.is_plan = self.is_tensor or kind == _ARRAY
        self.on_device = kind == _PACKED and bool(source.device_jobs)
        description = len(static) + len(dynamic)
        self.spilled = description > INLINE
        self.total = padded(nbytes) + description if self.spilled else nbytes


_plans: dict[tuple[Any, Any, Any], Outgoing] = {}


def describe(value: Any, meta: Any) -> Outgoing:
    """Describe a value; raises `ArgumentTypeError` for what cannot be sent."""
    if meta is None:
        try:
            plan = _plans.get((value.__class__, value.dtype, value.shape))
            if plan is not None:
                if plan.kind == _TENSOR:
                    if value.is_contiguous() and value.is_cpu and not value.is_neg():
                        return plan
                elif value.flags.c_contiguous:
                    return plan
        except (AttributeError, TypeError, RuntimeError):
            pass  # no plain tensor: a sparse one cannot say whether it is contiguous
    packed = pack.pack(value, meta)
    if meta is None and not packed.dynamic:
        _remember(value, packed)
    return Outgoing(_PACKED, packed.static, packed.dynamic, packed.nbytes, packed)


def describe_empty(shape: tuple[int, ...], dtype: Any, meta: Any) -> Outgoing:
    """Describe a tensor or array that is yet to be computed into a slot."""
    if not type(dtype).__module__.startswith("torch"):
        try:
            dtype = np.dtype(dtype)
        except TypeError as error:
            raise ArgumentTypeError(f"dtype={dtype!r} is neither a torch dtype nor a NumPy dtype: {error}") from None
    static, unpacker = _empty_spec(dtype, (shape,) if isinstance(shape, int) else tuple(shape))
    dynamic = b"" if meta is None else pack.pack(np.empty(0, np.uint8), meta).dynamic
    return Outgoing(_EMPTY, static, dynamic, unpacker.nbytes, unpacker)


@functools.lru_cache(maxsize=1024)
def _empty_spec(dtype: Any, shape: tuple[int, ...]) -> tuple[bytes, pack.Unpacker]:
    static = pack.single_spec(dtype, shape)
    return static, pack.Unpacker(static)


def write(out: Outgoing, value: Any, buffer: Any, address: int, offset: int) -> None:
    """The one copy: put a described value at `offset` of a ring's data (mapped at `address`)."""
    kind = out.kind
    if kind == _TENSOR:
        source = value.data_ptr()
        if not source and out.nbytes:  # it only stands for zeros, or its storage was freed: the general way tells
            pack.pack(value).copy_into(np.ndarray((out.nbytes,), np.uint8, buffer, offset))
            return
        if out.nbytes <= moves.ALONE:
            moves.move_small(address + offset, source, out.nbytes)
            return
        if not moves.goes_by_threads(out.nbytes):
            (moves.move_far if out.nbytes >= moves.FAR else moves.move)(address + offset, source, out.nbytes)
            return
        target = sys.modules["torch"].from_numpy(np.ndarray((out.nbytes,), np.uint8, buffer, offset))
        source = value.detach()
        target.view(source.dtype).view(source.shape).copy_(source)
        return
    if kind == _ARRAY:
        if out.nbytes >= moves.FAR:
            moves.move_far(address + offset, address_of(value), out.nbytes)
            return
        np.ndarray(value.shape, value.dtype, buffer, offset)[...] = value
        return
    if kind == DEVICE:
        out.source.copy_into(buffer, offset // buffer.slot_bytes, out)
        return
    if kind == _PACKED:
        out.source.copy_into(np.ndarray((out.nbytes,), np.uint8, buffer, offset))
    _write_description(out, buffer, offset)


def write_host_part(out: Outgoing, buffer: memoryview, offset: int) -> None:
    """Of a described value, everything that does not lie on a CUDA device: the rest is `out.source.device_jobs`."""
    out.source.copy_into(np.ndarray((out.nbytes,), np.uint8, buffer, offset), on_device=False)
    _write_description(out, buffer, offset)


def _write_description(out: Outgoing, buffer: memoryview, offset: int) -> None:
    if out.spilled:
        start = offset + padded(out.nbytes)
        end = start + len(out.static)
        buffer[start:end] = out.static
        buffer[end : end + len(out.dynamic)] = out.dynamic


def _remember(value: Any, packed: pack.Packed | PackedGroup) -> None:
    """Make a plan if the next value of this class, dtype and shape may be copied as it stands."""
    if len(packed.static) > INLINE:
        return
    torch = sys.modules.get("torch")
    if type(value) is np.ndarray and not value.dtype.hasobject and value.flags.c_contiguous:
        kind = _ARRAY
    elif torch is not None and type(value) is torch.Tensor:
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.is_nested:
            return
        if not (value.is_cpu and value.is_contiguous() and not value.is_neg()):
            return
        kind = _TENSOR
    else:
        return
    if packed.static != pack.single_spec(value.dtype, tuple(value.shape)):
        return
    if len(_plans) >= _PLANS_MOST:
        _plans.clear()
    _plans[value.__class__, value.dtype, value.shape] = Outgoing(kind, packed.static, b"", packed.nbytes)
