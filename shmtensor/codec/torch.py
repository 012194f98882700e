"""torch tensors to leaves, and back. Imported only when a torch tensor is first sent or received."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..wire.dtypes import TABLE, DType
from ..wire.spec import MAX_NDIM
from .leaf import Leaf, Refused, steps_of
from .numpy import CARRIER, Array
from .numpy import MAX_NDIM as NUMPY_MAX_NDIM

ROW: dict[torch.dtype, DType] = {
    dtype: row for row in TABLE if row.torch and isinstance(dtype := getattr(torch, row.name, None), torch.dtype)
}
DTYPE: dict[int, torch.dtype] = {row.code: dtype for dtype, row in ROW.items()}
_CARRIER_NAME = {"|u1": torch.uint8, "<i2": torch.int16, "<i4": torch.int32}

# Types whose contiguous tensors on the CPU are plain memory; True: if the neg bit is not set.
PLAIN: dict[torch.dtype, bool] = {
    dtype: dtype.is_floating_point for dtype, row in ROW.items() if not dtype.is_complex and not row.quantized
}

# Called with map: a method descriptor costs half as much as an attribute and a call.
is_neg = torch.Tensor.is_neg
is_conj = torch.Tensor.is_conj
stride = torch.Tensor.stride
data_ptr = torch.Tensor.data_ptr
untyped_storage = torch.Tensor.untyped_storage

CPU = torch.device("cpu")


known_types: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors that are sent as tensors, without the jagged one."""


def tensor_types() -> frozenset[type]:
    """The types of tensors that are sent as tensors, without the jagged one."""
    return frozenset((torch.Tensor, torch.nn.Parameter))


def is_jagged(value: object) -> bool:
    """Whether the value is a nested tensor of jagged layout, the one subclass that is sent."""
    layout = getattr(torch, "jagged", None)
    return (
        isinstance(value, torch.Tensor)
        and layout is not None
        and type(value).__module__ == "torch.nested._internal.nested_tensor"
        and value.layout == layout
    )


def refuse(value: torch.Tensor) -> Refused:
    """The error for a tensor subclass that is not sent."""
    kind = type(value)
    remedy = (
        "DTensor: send tensor.to_local() or tensor.full_tensor()"
        if kind.__name__ == "DTensor"
        else "send tensor.as_subclass(torch.Tensor), or its parts"
    )
    return Refused(ArgumentTypeError, f"tensor subclass {kind.__module__}.{kind.__qualname__} is not sent: {remedy}")


def tensor_leaf(tensor: torch.Tensor) -> Leaf:
    """The leaf of a strided tensor, not quantized and not nested."""
    tensor = tensor.detach()
    if tensor.data_ptr() and not has_memory(tensor):
        raise Refused(
            ArgumentError,
            "the tensor has no memory: its storage was made smaller than the tensor, which a copy would read beyond",
        )
    if tensor.is_conj() or tensor.is_neg():
        if tensor.dtype == getattr(torch, "complex32", None):
            silence("complex32")
        tensor = tensor.resolve_conj().resolve_neg()
    row = ROW.get(tensor.dtype)
    if row is None:
        raise Refused(ArgumentTypeError, f"dtype {tensor.dtype} is not known here")
    if tensor.device.type == "meta":
        raise Refused(ArgumentTypeError, "meta tensors hold no data: send their shape and dtype instead")
    if tensor.ndim > MAX_NDIM:
        raise Refused(
            ArgumentError, f"tensor has {tensor.ndim} dimensions, at most {MAX_NDIM} are allowed: send tensor.flatten()"
        )
    if tensor.numel() and tensor.is_cpu and not tensor.data_ptr() and not tensor._is_zerotensor():
        raise Refused(
            ArgumentError,
            "the tensor has no memory: its storage was freed, or torch only traces it (functionalize, FakeTensorMode)",
        )
    size = row.itemsize
    strides = None if tensor.is_contiguous() else tuple([stride * size for stride in tensor.stride()])
    return Leaf(
        tensor, row, size, tuple(tensor.shape), strides, tensor.data_ptr(), copy_strided,
        torch=True, device=str(tensor.device),
    )  # fmt: skip


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage has all of a tensor's elements: it may have been made smaller since."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    held: int = tensor.untyped_storage().nbytes()
    return not count or (tensor.storage_offset() + count) * tensor.element_size() <= held


def copy_strided(leaf: Leaf, payload: Array, offset: int) -> None:
    dtype: Any = leaf.dtype
    source: torch.Tensor = leaf.source
    # as carriers: torch does not copy all of the small types
    target = carrier_view(payload, offset, dtype, leaf.shape, leaf.strides)
    if dtype.name == "bool":  # a bool may be any byte: copied as bool it would become 1
        target = target.view(torch.uint8)
    target.copy_(source if source.dtype == target.dtype else source.view(target.dtype))


def copy_run(payload: Array, offset: int, address: int, nbytes: int) -> None:
    """Copy bytes of host memory with torch's threads."""
    source = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
    torch.from_numpy(payload[offset : offset + nbytes]).copy_(torch.from_numpy(source))


def reaches(leaf: Leaf, start: int, extent: int) -> bool:
    """Whether the storage of the leaf contains all of these bytes."""
    storage = leaf.source.untyped_storage()
    at = start - int(storage.data_ptr())
    return at >= 0 and at + extent <= int(storage.nbytes())


def device_run(leaf: Leaf, start: int, extent: int) -> Callable[[Array, int], None]:
    """A function that copies raw device memory from `start` on, which lies in the storage of the leaf."""
    storage = leaf.source.untyped_storage()
    at = start - storage.data_ptr()
    source = torch.empty(0, dtype=torch.uint8, device=leaf.source.device).set_(storage, at, (extent,), (1,))

    def copy(payload: Array, offset: int) -> None:
        torch.from_numpy(payload[offset : offset + extent]).copy_(source)

    return copy


def storage_view(
    storage: torch.UntypedStorage, offset: int, row: DType, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    """A tensor of the row's carrier over a storage; offset and strides in bytes."""
    view = torch.empty(0, dtype=carrier(row), device=CPU)
    return view.set_(storage, offset // row.itemsize, tuple(shape), steps_of(shape, strides, row.itemsize))


def carrier(row: DType) -> torch.dtype:
    """The torch dtype in which memory of this row is read and copied."""
    return DTYPE[row.code] if row.numpy else _CARRIER_NAME[row.carrier]


def carrier_view(
    payload: Array, offset: int, row: DType, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    """A tensor of the row's carrier over the payload; strides in bytes."""
    if len(shape) > NUMPY_MAX_NDIM:
        storage = torch.from_numpy(payload[offset:]).untyped_storage()
        return storage_view(storage, 0, row, shape, strides)
    return torch.from_numpy(np.ndarray(shape, CARRIER[row.code], payload, offset, strides))


def view_dtype(row: DType) -> torch.dtype | None:
    """The dtype to view a carrier as; None if the carrier is the dtype itself. Raises `WireError` if torch lacks it."""
    dtype = DTYPE.get(row.code)
    if dtype is None:
        raise WireError(f"tensor of dtype {row.name}, which torch {torch.__version__} lacks")
    return None if row.numpy else dtype


def empty(row: DType, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without elements."""
    tensor = torch.empty(tuple(shape), dtype=carrier(row), device=CPU)
    if row.name == "complex32":
        silence("complex32")
    dtype = view_dtype(row)
    return tensor if dtype is None else tensor.view(dtype)


_silent: set[str] = set()
_silence_lock = threading.Lock()


def silence(kind: str) -> None:
    """Make torch issue its once-per-process warning about a kind of tensor now, while warnings are suppressed.

    Warning filters belong to the whole process, so they are changed once per kind and not once per message.
    """
    if kind in _silent:
        return
    with _silence_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "compressed":
            index = torch.zeros(1, dtype=torch.int64, device=CPU)
            torch.sparse_csr_tensor(index, index[:0], index[:0], (0, 0), device=CPU)
        elif kind == "nested":
            torch.nested.nested_tensor([torch.zeros(1, device=CPU)])
        elif kind == "quantized":
            torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=torch.quint8, device=CPU)
        else:
            torch.empty(1, dtype=torch.complex32, device=CPU)
        _silent.add(kind)
