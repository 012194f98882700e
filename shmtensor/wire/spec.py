"""The static part of a message: what every leaf looks like and where it lies.

All integers are little-endian. The static part is the same for messages that look the same, so that both sides can
keep what they computed from it.

| bytes | field | meaning |
|---|---|---|
| 1 | version | 1 |
| 1 | flags | 0 |
| 2 | reserved | 0 |
| 4 | count | number of leaves |
| | *leaf table* | `count` entries, in the order of the walk: |
| 1 | code | of `shmtensor.wire.dtypes`, 255: described in the tail |
| 1 | flags | bit 0: torch tensor (else NumPy array); bit 1: strides follow |
| 1 | ndim | 0..64 |
| 1 | reserved | 0 |
| 4 | extra | torch: group that shares one storage, or 0; described: index of its description; else 0 |
| 8 | offset | bytes from the start of the payload |
| 8 x ndim | shape | elements |
| 8 x ndim | strides | bytes, only with flag bit 1; else the leaf is dense in C order |
| rest | tail | absent for a single plain leaf; else JSON `[tokens, descriptions]` |

The tokens are explained in `shmtensor.wire.tree`, the descriptions in `shmtensor.views.numpy`. One contiguous
`float32` tensor of 3 dimensions takes 8 + 16 + 3 x 8 = 48 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from ..errors import WireError
from .dtypes import BY_CODE, DESCRIBED, DType

VERSION = 1
ALIGNMENT = 64  # bytes; every leaf starts at a multiple, so that any vector load is aligned
GROUP_ALIGNMENT = 16  # bytes; a shared storage starts at a multiple, so that any item size divides it
MAX_STATIC = 16 << 20
MAX_LEAVES = 1_000_000
MAX_NDIM = 64
MAX_BYTES = 1 << 62  # no shape or stride may speak of more, so that no C integer overflows

_HEADER = Struct("<BBHI")
_LEAF = Struct("<BBBBIQ")
_TORCH, _STRIDES = 1, 2
_WORDS = [Struct(f"<{n}Q") for n in range(2 * MAX_NDIM + 1)]
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().decode


class LeafSpec(NamedTuple):
    """One entry of the leaf table.

    `dtype` is None for a described leaf, whose `extra` is the index of its description. `shape` counts elements,
    `strides` bytes (None: dense, C order), `offset` bytes from the start of the payload.
    """

    dtype: DType | None
    torch: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    extra: int


def encode(leaves: Sequence[LeafSpec], tokens: Sequence[object] | None, descriptions: Sequence[object]) -> bytes:
    """The static part; `tokens` is None for a single plain leaf."""
    parts = [_HEADER.pack(VERSION, 0, 0, len(leaves))]
    for leaf in leaves:
        flags = (_TORCH if leaf.torch else 0) | (0 if leaf.strides is None else _STRIDES)
        code = DESCRIBED if leaf.dtype is None else leaf.dtype.code
        words = leaf.shape if leaf.strides is None else leaf.shape + leaf.strides
        parts.append(_LEAF.pack(code, flags, len(leaf.shape), 0, leaf.extra, leaf.offset))
        parts.append(_WORDS[len(words)].pack(*words))
    if tokens is not None or descriptions:
        parts.append(_encode_json([[0] if tokens is None else tokens, descriptions]).encode("ascii"))
    return b"".join(parts)


def decode(static: bytes) -> tuple[list[LeafSpec], list[object] | None, list[object]]:
    """Leaves, tokens (None for a single plain leaf) and descriptions. Raises `WireError` on anything invalid.

    Of a described leaf only the caller can check the extent, with `check_extent`, because only NumPy knows its size.
    """
    if len(static) > MAX_STATIC:
        raise WireError(f"static part has {len(static)} bytes, at most {MAX_STATIC} are allowed")
    try:
        version, flags, reserved, count = _HEADER.unpack_from(static)
        if version != VERSION:
            raise WireError(f"static part has version {version}, this library reads version {VERSION}")
        if flags or reserved:
            raise WireError(f"static part has unknown flags {flags:#x}, {reserved:#x}")
        if count > MAX_LEAVES:
            raise WireError(f"message has {count} leaves, at most {MAX_LEAVES} are allowed")
        leaves = []
        at = _HEADER.size
        for _ in range(count):
            leaf, at = _decode_leaf(static, at)
            leaves.append(leaf)
    except StructError:
        raise WireError(f"static part ends early, after {len(static)} bytes") from None
    tokens: list[object] | None = None
    descriptions: list[object] = []
    if at < len(static):
        tail = read_json(static[at:])
        if not (isinstance(tail, list) and len(tail) == 2 and all(isinstance(part, list) for part in tail)):
            raise WireError("tail of the static part is not [tokens, descriptions]")
        tokens, descriptions = tail
    elif count != 1:
        raise WireError(f"static part of {count} leaves has no tail")
    for leaf in leaves:
        if leaf.dtype is None and leaf.extra >= len(descriptions):
            raise WireError(f"leaf names description {leaf.extra} of {len(descriptions)}")
    return leaves, tokens, descriptions


def _decode_leaf(static: bytes, at: int) -> tuple[LeafSpec, int]:
    code, flags, ndim, reserved, extra, offset = _LEAF.unpack_from(static, at)
    at += _LEAF.size
    if flags & ~(_TORCH | _STRIDES) or reserved:
        raise WireError(f"leaf has unknown flags {flags:#x}, {reserved:#x}")
    if ndim > MAX_NDIM:
        raise WireError(f"leaf has {ndim} dimensions, at most {MAX_NDIM} are allowed")
    is_torch = bool(flags & _TORCH)
    row = BY_CODE.get(code)
    if row is None:
        if code != DESCRIBED or is_torch:
            raise WireError(f"leaf has unknown dtype code {code}")
    elif not (row.torch if is_torch else row.numpy):
        raise WireError(f"leaf has dtype {row.name}, which {'torch' if is_torch else 'NumPy'} lacks")
    if extra and row is not None and not is_torch:
        raise WireError("NumPy leaf of a plain dtype has an unknown field")
    words = _WORDS[ndim]
    shape = words.unpack_from(static, at)
    at += words.size
    strides: tuple[int, ...] | None = None
    if flags & _STRIDES:
        strides = words.unpack_from(static, at)
        at += words.size
    leaf = LeafSpec(row, is_torch, shape, strides, offset, extra)
    if row is not None:
        check_extent(leaf, row.itemsize)
    return leaf, at


def check_extent(leaf: LeafSpec, itemsize: int) -> int:
    """Bytes from the leaf's offset to its end; `WireError` if shape, strides or offset cannot be."""
    size = itemsize
    for length in leaf.shape:
        size *= max(length, 1)  # a dimension of 0 must not hide an absurd other one
        if size > MAX_BYTES:
            raise WireError(f"leaf has shape {leaf.shape}, more than {MAX_BYTES} bytes")
    if leaf.offset > MAX_BYTES:
        raise WireError(f"leaf has offset {leaf.offset}")
    if leaf.torch and leaf.offset % itemsize:
        raise WireError(f"leaf of item size {itemsize} has offset {leaf.offset}")
    if leaf.strides is not None:
        for length, stride in zip(leaf.shape, leaf.strides, strict=True):
            if stride > MAX_BYTES or (length > 1 and not stride) or (leaf.torch and stride % itemsize):
                raise WireError(f"leaf of item size {itemsize} and shape {leaf.shape} has strides {leaf.strides}")
    return extent(leaf.shape, leaf.strides, itemsize)


def extent(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> int:
    """Bytes from the first byte of the first element to the last byte of the last; strides are not negative."""
    size = itemsize
    if strides is None:
        for length in shape:
            size *= length
        return size
    if 0 in shape or not itemsize:
        return 0
    for length, stride in zip(shape, strides, strict=True):
        size += (length - 1) * stride
    return size


def read_json(data: bytes) -> object:
    """The value of a JSON text in UTF-8; `WireError` for anything else."""
    try:
        return _decode_json(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"invalid JSON of {len(data)} bytes: {type(error).__name__}") from None
