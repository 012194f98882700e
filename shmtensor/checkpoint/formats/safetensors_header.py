"""The header of one safetensors file, read by somebody who trusts nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ...wire.spec import MAX_BYTES, MAX_NDIM
from ..limits import MAX_TENSORS
from ..texts import parse_object

MAX_HEADER: Final = 100_000_000  # bytes, as in safetensors itself

# name in safetensors -> (name in the dtype table, bits of an element); only those that its older readers know, too
DTYPES: Final = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "I16": ("int16", 16), "U16": ("uint16", 16), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I32": ("int32", 32), "U32": ("uint32", 32), "F32": ("float32", 32),
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64),
}  # fmt: skip
# what is read, but not written
NEWER: Final = {
    "F8_E8M0": ("float8_e8m0fnu", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "C64": ("complex64", 64), "F4": ("float4_e2m1fn_x2", 4),
}  # fmt: skip


class StoredTensor(NamedTuple):
    """One tensor of a header: `dtype` as in safetensors, shape in elements, offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What one file says about itself."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any]
    file_bytes: int


def read_header(path: Path) -> Header:
    """The header of a file. `CheckpointError` unless tensors fill the file exactly: no holes, no overlap."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: its header should have {length} bytes, the file has {size} "
                f"(at most {MAX_HEADER} are allowed): it is truncated, or no safetensors file"
            )
        parts = parse_object(file.read(length), str(path))
    metadata = parts.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: its __metadata__ are not strings")
    if len(parts) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(parts)} tensors, at most {MAX_TENSORS} are allowed")
    tensors = {name: _tensor(part, name, 8 + length, path) for name, part in parts.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {name!r:.80} begins at offset {tensor.offset}, {end} was expected")
        end += tensor.nbytes
    if end != size:
        name = max(tensors, key=lambda name: tensors[name].offset, default="")
        raise CheckpointError(
            f"{path}: the last tensor {name!r:.80} ends at offset {end}, the file has {size} bytes: it is "
            + ("truncated" if size < end else "longer than it says")
        )
    return Header(tensors, metadata, size)


def _tensor(part: Any, name: str, start: int, path: Path) -> StoredTensor:
    match part:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int() as low, int() as high]}:
            numbers = [*shape, low, high]
            if (
                len(part) == 3
                and len(shape) <= MAX_NDIM
                and all(type(n) is int and 0 <= n <= MAX_BYTES for n in numbers)
                and low <= high
            ):
                kind = DTYPES.get(dtype) or NEWER.get(dtype)
                if kind is None:
                    raise CheckpointError(f"{path}: tensor {name!r:.80} has the unknown dtype {dtype!r:.40}")
                bits = kind[1]
                for length in shape:
                    bits *= length
                    if bits > 8 * MAX_BYTES:
                        break
                if bits != 8 * (high - low):
                    raise CheckpointError(
                        f"{path}: tensor {name!r:.80} of dtype {dtype} and shape {shape!r:.80} has {high - low} bytes "
                        f"at offset {start + low}"
                    )
                return StoredTensor(dtype, tuple(shape), start + low, high - low)
    raise CheckpointError(f"{path}: invalid entry of tensor {name!r:.80}: {part!r:.80}")
