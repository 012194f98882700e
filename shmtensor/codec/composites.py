"""Tensors that are no plain leaf (sparse, quantized, nested): to their parts, and back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..wire.dtypes import BY_NAME, DType
from ..wire.spec import MAX_NDIM
from .leaf import Leaf, Refused
from .torch import CPU, ROW, copy_strided, is_jagged, silence, tensor_leaf

_COMPRESSED = {
    torch.sparse_csr: ("csr", torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: ("csc", torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsr: ("bsr", torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsc: ("bsc", torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_COMPRESSED_LAYOUT = {name: layout for layout, (name, _, _) in _COMPRESSED.items()}
_make_compressed: Any = torch.sparse_compressed_tensor  # its stub knows no size
_OF_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
_OF_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)

Parts = tuple[tuple[object, ...], list[object], list[Any]]


def take_apart(tensor: torch.Tensor) -> Parts | None:
    """Token, scalars and parts of a tensor that is no plain leaf; None for a plain one. Parts are tensors or leaves.

    Raises `Refused` for a tensor that `rebuild` would not make of them: the checks are the same there.
    """
    if is_jagged(tensor):
        return _take_jagged(tensor.detach())
    if tensor.is_nested:
        return _take_nested(tensor.detach())
    if tensor.is_quantized:
        return _take_quantized(tensor.detach())
    if tensor.layout == torch.strided:
        return None
    if tensor.device.type == "meta":
        raise Refused(ArgumentTypeError, "meta tensors hold no data: send their shape and dtype instead")
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        leaves = _checked(_check_coo, tensor, [tensor._indices(), tensor._values()])
        return ("coo", int(tensor.is_coalesced()), *tensor.shape), [], leaves
    if tensor.layout in _COMPRESSED:
        silence("compressed")
        name, compressed, plain = _COMPRESSED[tensor.layout]
        indices = [_in_rows(compressed(tensor)), _in_rows(plain(tensor))]
        return (name, *tensor.shape), [], _checked(_check_compressed, tensor, [*indices, tensor.values()])
    raise Refused(ArgumentTypeError, f"layout {tensor.layout} is not sent: send tensor.to_dense()")


def _checked(check: Callable[..., object], tensor: torch.Tensor, parts: list[torch.Tensor]) -> list[Leaf]:
    """The leaves of the parts of a sparse tensor, which are checked as they are on arrival."""
    leaves = [tensor_leaf(part) for part in parts]
    try:
        check(tensor.layout, _size(tensor.shape), *[leaf.source for leaf in leaves])
    except MemoryError:
        raise
    except Exception as error:  # whatever torch objects to
        raise Refused(ArgumentError, f"sparse tensor is not valid: {error}") from error
    return leaves


def _in_rows(indices: torch.Tensor) -> torch.Tensor:
    """Indices as torch's operations read them: those of a batch lie next to each other."""
    return indices if indices.ndim and indices.stride(-1) == 1 else indices.contiguous()


def _take_nested(tensor: torch.Tensor) -> Parts:
    silence("nested")
    tensor = tensor.contiguous()
    sizes = tensor._nested_tensor_size()
    if sizes.ndim != 2:  # without any parts, torch returns no table
        sizes = torch.empty((0, 0), dtype=torch.int64, device=CPU)
    return ("nested",), [], [tensor.values(), sizes]


def _take_jagged(tensor: torch.Tensor) -> Parts:
    inner: Any = tensor
    lengths = inner.lengths()
    bounds = [inner._metadata_cache.get(name) for name in ("min_seqlen", "max_seqlen")]
    # torch keeps these two numbers as the first dimension of an empty tensor
    numbers = [-1 if b is None else int(b.shape[0]) if isinstance(b, torch.Tensor) else int(b) for b in bounds]
    parts = [inner.values(), inner.offsets()] + ([] if lengths is None else [lengths])
    parameters = int(inner._ragged_idx), *numbers
    leaves = [tensor_leaf(part) for part in parts]
    try:
        _check_jagged(parameters, *[leaf.source for leaf in leaves])
    except WireError as error:
        raise Refused(ArgumentError, str(error)) from None
    return ("jagged" if lengths is None else "jagged_lengths", *parameters), [], leaves


def _take_quantized(tensor: torch.Tensor) -> Parts:
    tensor = tensor.cpu()
    row = ROW.get(tensor.dtype)
    if row is None or row.name == "quint2x4":
        raise Refused(ArgumentTypeError, f"quantized dtype {tensor.dtype} is not sent: send tensor.dequantize()")
    if tensor.ndim > MAX_NDIM:
        raise Refused(ArgumentError, f"tensor has {tensor.ndim} dimensions, at most {MAX_NDIM} are allowed")
    scheme = tensor.qscheme()
    if row.name == "quint4x2":
        # two elements share a byte, so shape and strides do not count bytes
        tensor = tensor.contiguous()
        nbytes = (tensor.numel() + 1) // 2
        leaf = Leaf(tensor, BY_NAME["uint8"], 1, (nbytes,), None, tensor.data_ptr(), copy_strided, torch=True)
    else:
        leaf = _quantized_leaf(tensor, row)
    if scheme == torch.per_tensor_affine and row.name != "quint4x2":
        return ("quantized",), [tensor.q_scale(), tensor.q_zero_point()], [leaf]
    if scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        axis = tensor.q_per_channel_axis()
        parts = [leaf, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        if row.name == "quint4x2":
            return ("quantized_packed", axis, *tensor.shape), [], parts
        return ("quantized_channels", axis), [], parts
    raise Refused(ArgumentTypeError, f"quantization scheme {scheme} is not sent: send tensor.dequantize()")


def _quantized_leaf(tensor: torch.Tensor, row: DType) -> Leaf:
    for source in (tensor, tensor.contiguous()):
        strides = None if source.is_contiguous() else tuple([s * row.itemsize for s in source.stride()])
        leaf = Leaf(
            source, row, row.itemsize, tuple(source.shape), strides, source.data_ptr(), copy_strided, torch=True
        )
        if leaf.address or not leaf.nbytes:
            break  # only contiguous memory is sent: a strided copy of quantized data would convert it
    return leaf


def rebuild(
    kind: str, parameters: tuple[int, ...], parts: list[Any], scalars: Sequence[object], memo: dict[Any, Any]
) -> torch.Tensor:
    """The tensor of a composite. `memo` lives as long as one message. Invalid parts may raise any exception."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise WireError(f"composite {kind!r} has a part that is no torch tensor")
    if kind == "coo":
        return _coo(parameters, *parts)
    if kind in _COMPRESSED_LAYOUT:
        silence("compressed")
        layout, size = _COMPRESSED_LAYOUT[kind], _size(parameters)
        _check_compressed(layout, size, *parts)
        made: torch.Tensor = _make_compressed(*parts, size, layout=layout, device=CPU, check_invariants=False)
        return made
    if kind == "nested":
        return _nested(*parts)
    if kind in ("jagged", "jagged_lengths"):
        return _jagged(parameters, memo, *parts)
    silence("quantized")
    if kind == "quantized":
        return _quantized(*parts, *scalars)
    return _channels(kind, parameters, *parts)


def _size(parameters: Sequence[int]) -> tuple[int, ...]:
    if len(parameters) > MAX_NDIM or min(parameters, default=0) < 0:
        raise WireError(f"it has size {tuple(parameters)!s:.80}, at most {MAX_NDIM} dimensions are allowed")
    return tuple(parameters)


def _coo(parameters: Sequence[int], indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if parameters[0] not in (0, 1):
        raise WireError("COO tensor has an invalid flag")
    made = _check_coo(torch.sparse_coo, _size(parameters[1:]), indices, values)
    return made._coalesced_(bool(parameters[0]))  # as its maker has marked it, which is not checked


def _check_coo(
    layout: torch.layout, size: tuple[int, ...], indices: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The tensor of its parts. torch raises an exception if they do not fit, or an index is out of range."""
    return torch.sparse_coo_tensor(indices, values, size, device=values.device, check_invariants=True)


def _check_compressed(
    layout: torch.layout, size: tuple[int, ...], compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor
) -> None:
    """Raise an exception if the parts do not fit each other, or an index is out of range.

    The order of the plain indices is not checked, nor whether they are distinct: torch's products have them unsorted.
    """
    batch = compressed.ndim - 1
    # without elements: torch checks dimensions, dtypes and sizes, and would check the order of plain indices
    parts = torch.zeros_like(compressed), plain[..., :0], values.narrow(batch, 0, 0)
    _make_compressed(*parts, size, layout=layout, device=values.device, check_invariants=True)
    count = plain.shape[-1]
    if values.shape[: batch + 1] != plain.shape or any(
        part.stride(-1) != 1 < part.shape[-1] for part in (compressed, plain)
    ):
        raise WireError("its parts do not fit each other")
    if (
        bool((compressed[..., 0] != 0).any())
        or bool((compressed[..., -1] != count).any())
        or bool((compressed[..., 1:] < compressed[..., :-1]).any())
    ):
        raise WireError(f"its compressed indices do not rise from 0 to {count}")
    axis = int(layout not in _OF_COLUMNS)
    room = size[batch + axis] // (values.shape[batch + 1 + axis] if layout in _OF_BLOCKS else 1)
    if plain.numel() and not 0 <= int(plain.min()) <= int(plain.max()) < room:
        raise WireError(f"its plain indices are not below {room}")


def _nested(buffer: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    silence("nested")
    sizes = part.clone()  # the checked values must not change afterwards
    if sizes.dtype != torch.int64 or sizes.ndim != 2 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise WireError("nested tensor has invalid parts")
    if not sizes.shape[1] and sizes.shape[0] != buffer.numel():  # empty rows take no bytes, so check their number here
        raise WireError("nested tensor has invalid sizes")
    if not sizes.shape[0]:
        return torch.nested.nested_tensor([], dtype=buffer.dtype, device=CPU)
    rows: list[list[int]] = sizes.tolist()
    strides, offsets, total = [], [], 0
    for row in rows:
        if min(row, default=1) < 0:
            raise WireError("nested tensor has invalid sizes")
        offsets.append(total)
        count = 1
        steps = []
        for length in reversed(row):
            steps.append(count)
            count *= length
        strides.append(steps[::-1])
        total += count
        if max([*row, *steps, total]) > buffer.numel() and total:
            raise WireError("nested tensor has sizes beyond its buffer")
    if total != buffer.numel():
        raise WireError(f"nested tensor has sizes of {total} elements, its buffer has {buffer.numel()}")
    return torch._nested_view_from_buffer(
        buffer,
        sizes,
        torch.tensor(strides, dtype=torch.int64, device=CPU),
        torch.tensor(offsets, dtype=torch.int64, device=CPU),
    )


def _jagged(
    parameters: Sequence[int],
    memo: dict[Any, Any],
    values: torch.Tensor,
    part: torch.Tensor,
    more: torch.Tensor | None = None,
) -> torch.Tensor:
    ragged, low, high = parameters
    # Two jagged tensors have the same shape only if they share the very object of their offsets.
    key = (part.data_ptr(), part.shape, part.dtype, None if more is None else more.data_ptr())
    if key not in memo:
        memo[key] = (part.clone(), None if more is None else more.clone())  # private: checked once, small
    offsets, lengths = memo[key]
    _check_jagged(parameters, values, offsets, lengths)
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets,
        lengths=lengths,
        jagged_dim=ragged,
        min_seqlen=None if low < 0 else low,
        max_seqlen=None if high < 0 else high,
    )


def _check_jagged(
    parameters: Sequence[int], values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None = None
) -> None:
    ragged, low, high = parameters
    if not 1 <= ragged <= values.ndim or min(low, high) < -1:
        raise WireError("jagged tensor has invalid parameters")
    if offsets.ndim != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise WireError("jagged tensor has invalid offsets")
    starts, room = offsets[:-1], values.shape[ragged - 1]
    if int(offsets[0]) < 0 or int(offsets[-1]) > room or bool((offsets[1:] < starts).any()):
        raise WireError("jagged tensor has offsets beyond its values")
    if lengths is not None:
        if lengths.dtype not in (torch.int64, torch.int32) or lengths.shape != starts.shape:
            raise WireError("jagged tensor has invalid lengths")
        if bool((lengths < 0).any()) or bool((lengths > room - starts).any()):  # without a sum, which may overflow
            raise WireError("jagged tensor has lengths beyond its values")


def _quantized(data: torch.Tensor, scale: object, zero_point: object) -> torch.Tensor:
    row = ROW[data.dtype]
    if not row.quantized or type(scale) is not float or type(zero_point) is not int or row.name in _PACKED:
        raise WireError("quantized tensor has invalid parts")
    result = torch._empty_affine_quantized([0], scale=scale, zero_point=zero_point, dtype=data.dtype, device=CPU)
    return result.set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())


_PACKED = ("quint4x2", "quint2x4")


def _channels(
    kind: str, parameters: Sequence[int], data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    axis, packed = parameters[0], kind == "quantized_packed"
    row = ROW[data.dtype]
    size = _size(parameters[1:]) if packed else tuple(data.shape)
    dtype = torch.quint4x2 if packed else data.dtype
    plain = row.name == "uint8" and data.ndim == 1 if packed else row.quantized and row.name not in _PACKED
    if not plain or not 0 <= axis < len(size) or scales.shape != (size[axis],) or zeros.shape != scales.shape:
        raise WireError("quantized tensor has invalid parts")
    if scales.dtype not in (torch.float64, torch.float32) or zeros.dtype not in (torch.int64, torch.float32):
        raise WireError("quantized tensor has invalid parameters")
    if packed and (not data.is_contiguous() or data.numel() != (math.prod(size) + 1) // 2):
        raise WireError("quantized tensor has a wrong number of bytes")
    # set_ sets the memory and the shape; until then only the axis has to exist
    shape = size if packed else tuple([n if i == axis else 0 for i, n in enumerate(size)])
    result = torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=CPU
    )
    if packed:  # torch counts a byte per element there and refuses a smaller storage: a private copy
        ctypes.memmove(result.data_ptr(), data.data_ptr(), data.numel())
        return result
    return result.set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())
