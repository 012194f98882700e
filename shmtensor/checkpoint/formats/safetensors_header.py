"""Read the header of an untrusted safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ...wire.spec import MAX_BYTES, MAX_NDIM
from ..digests import Summer, text
from ..json_pieces import JsonPieces
from ..limits import MAX_TENSORS
from ..locations import Location, open_input

MAX_HEADER: Final = 100_000_000  # bytes, as in safetensors itself

# name in safetensors -> (name in the dtype table, bits of an element)
DTYPES: Final = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "I16": ("int16", 16), "U16": ("uint16", 16), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I32": ("int32", 32), "U32": ("uint32", 32), "F32": ("float32", 32),
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64),
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
    """The header of one file. `metadata` has only the short texts; `described` is the computed digest of the text under
    `DESCRIBED`, None if there is none."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    described: str | None
    header_bytes: int
    file_bytes: int


DESCRIBED: Final = "shmtensor"
"""The key of the description, in the metadata of a file or of an index."""
SHORT: Final = 1000  # characters of a text that is kept
_COUNTED: Final = 1 << 22  # bytes of a header, from which on its tensors are counted before they are kept


def read_header(path: Location) -> Header:
    """Read the header of a file. `CheckpointError` unless its tensors fill the file exactly: no gaps, no overlap."""
    with open_input(path) as file:
        size = file.nbytes
        length = int.from_bytes(file.pread(8, 0), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: its header should have {length} bytes, the file has {size} "
                f"(at most {MAX_HEADER} are allowed): it is truncated, or no safetensors file"
            )
        start = 8 + length
        if length > _COUNTED:
            count = filled = 0
            for _, tensor in _entries(JsonPieces(file, 8, length, str(path)), start, path, None):
                count, filled = count + 1, filled + tensor.nbytes
                if count > MAX_TENSORS:
                    raise CheckpointError(f"{path}: more than {MAX_TENSORS} tensors")
            if filled != size - start:
                raise CheckpointError(f"{path}: its tensors have {filled} bytes, {size - start} come after its header")
        metadata = Metadata(str(path))
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in _entries(JsonPieces(file, 8, length, str(path)), start, path, metadata):
            if name in tensors:
                raise CheckpointError(f"{path}: invalid JSON of {length} bytes: a key appears twice, {name!r:.80}")
            tensors[name] = tensor
            if len(tensors) > MAX_TENSORS:
                raise CheckpointError(f"{path}: more than {MAX_TENSORS} tensors")
    end = start
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
    return Header(tensors, metadata.short, metadata.described, length, size)


def _entries(
    pieces: JsonPieces, start: int, path: Location, metadata: Metadata | None
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a header, in order; other entries go to `metadata`."""
    met = False
    for name in pieces.entries():
        if name != "__metadata__":
            yield name, _tensor(pieces.value(), name, start, path)
            continue
        if met:
            raise CheckpointError(f"{path}: invalid JSON: a key appears twice, {name!r}")
        met = True
        if pieces.peek() == "n":  # null, which safetensors takes for none
            if pieces.value() is not None:
                raise CheckpointError(f"{path}: its __metadata__ are not strings")
        elif pieces.peek() == "{":
            (metadata or Metadata(str(path))).take(pieces, only_texts=True)
        else:
            raise CheckpointError(f"{path}: its __metadata__ are not strings")
    pieces.finish()


class Metadata:
    """The texts of an object that are not tensors. Only short ones are kept."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.short: dict[str, str] = {}
        self.described: str | None = None

    def take(self, pieces: JsonPieces, *, only_texts: bool) -> None:
        """Read the next object."""
        for count, key in enumerate(pieces.entries()):
            if count >= _MOST_TEXTS:
                raise CheckpointError(f"{self._label}: more than {_MOST_TEXTS} texts are in its metadata")
            if pieces.peek() != '"':
                if only_texts:
                    raise CheckpointError(f"{self._label}: its __metadata__ are not strings")
                pieces.skip()
                continue
            summer, start, size = Summer(), "", 0

            def sink(piece: str, key: str = key, summer: Summer = summer) -> None:
                nonlocal start, size
                size += len(piece)
                start += piece[: SHORT + 1 - len(start)]
                if key == DESCRIBED:
                    if not piece.isascii():
                        raise CheckpointError(f"{self._label}: its description is no ASCII text")
                    summer.update(piece.encode("ascii"))

            pieces.text(sink)
            if key == DESCRIBED:
                if self.described is not None:
                    raise CheckpointError(f"{self._label}: invalid JSON: a key appears twice, {key!r}")
                self.described = text(summer.digest)
            elif size <= SHORT and (key.startswith(DESCRIBED) or len(self.short) < _MOST_SHORT):
                if key in self.short and key.startswith(DESCRIBED):
                    raise CheckpointError(f"{self._label}: invalid JSON: a key appears twice, {key!r:.80}")
                self.short[key] = start


_MOST_SHORT: Final = 1000  # texts that are kept
_MOST_TEXTS: Final = 100_000  # that there may be


def read_description(path: Location, offset: int, nbytes: int) -> str:
    """The text under `DESCRIBED`, in an object inside the object at this place of a file."""
    with open_input(path) as file:
        pieces = JsonPieces(file, offset, nbytes, str(path))
        parts: list[str] = []
        for _ in pieces.entries():
            if pieces.peek() != "{":
                pieces.skip()
                continue
            for key in pieces.entries():
                if key == DESCRIBED and pieces.peek() == '"' and not parts:
                    pieces.text(parts.append)
                else:
                    pieces.skip()
            if parts:
                break
    return "".join(parts)


def _tensor(part: Any, name: str, start: int, path: Location) -> StoredTensor:
    match part:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int() as low, int() as high]}:
            numbers = [*shape, low, high]
            if (
                len(part) == 3
                and len(shape) <= MAX_NDIM
                and all(type(n) is int and 0 <= n <= MAX_BYTES for n in numbers)
                and low <= high
            ):
                kind = DTYPES.get(dtype)
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
