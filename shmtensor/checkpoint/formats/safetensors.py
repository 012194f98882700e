"""safetensors: a header of JSON, then the tensors without gaps; and shards with an index.

| bytes | what |
|---|---|
| 8 | size of the header |
| | the header: JSON, padded with spaces so that the data begin at a multiple of 4096 |
| rest | the regions: those of whole pages first, then of whole cache lines (64 bytes), then the others |

Besides `format` = `pt`, the header's `__metadata__` has what restores the whole state:

| key | value |
|---|---|
| `shmtensor` | JSON `{"plan": description, "stored": [name per region], "xxh3": [16 hex digits per region]}` |
| `shmtensor.xxh3` | digest of that text, 16 hex digits |

A region is stored under the name of the tensor that covers it; aliased and overlapping views of it are in the
description only. A dtype that safetensors lacks is stored as U8 with the bytes of an element as last dimension; a
region that no tensor covers is stored as U8 under `<name>#storage`. With `max_shard`, the same two keys are in the
index's `metadata` instead, `stored` names tensors of any shard, and each shard has `shmtensor.index`, the index's name.

Shards of other programs are found by any index (`*.safetensors.index*.json`), or by names (`-00001-of-00003`) alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, CheckpointError
from ...options import shown
from ...wire.spec import MAX_BYTES, MAX_NDIM
from ..description import Described, Summer, read_described, text
from ..json_pieces import JsonPieces
from ..locations import LINE, PAGE, Location, Stamp, open_input, stamp, stamp_of
from ..plan import Entry, Plan, Region, stored_shape
from ..structure import MAX_TENSORS
from .base import (
    INDEX,
    MAX_SHARDS,
    FileSpec,
    Format,
    Layout,
    Opened,
    Place,
    Write,
    align,
    all_of,
    check_shard_names,
    is_index,
    read_index,
    shard_names,
    shard_of,
)

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

DESCRIBED: Final = "shmtensor"
"""The key of the description, in the metadata of a file or of an index."""
SHORT: Final = 1000  # characters of a text that is kept
_COUNTED: Final = 1 << 22  # bytes of a header, from which on its tensors are counted before they are kept
_MOST_SHORT: Final = 1000  # texts that are kept
_MOST_TEXTS: Final = 100_000  # that there may be
_MOST_INDEXES: Final = 32  # in a directory of shards
_SUM: Final = "shmtensor.xxh3"
"""The key of its digest."""
_INDEXED: Final = "shmtensor.index"
"""In each shard: the name of the index, which has the description."""
_STARTS: Final = (b"{", b" ", b"\t", b"\n", b"\r")
_encode_json = json.JSONEncoder(separators=(",", ":")).encode

_OF_TABLE: Final = {name: key for key, (name, _) in DTYPES.items()}


class Safetensors(Format):
    """The default format: any safetensors reader sees the tensors by their dotted names."""

    name = "safetensors"
    suffix = ".safetensors"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        draft = _Draft(plan)
        if max_shard is None:
            return draft.single()
        if max_shard <= 0:
            raise ArgumentError(f"max_shard must be positive, not {max_shard}")
        return draft.shards(max_shard)

    def recognizes(self, path: Location, start: bytes) -> bool:
        if path.is_dir():
            return (path / INDEX).is_file()
        if is_index(path.name):
            return ".safetensors.index" in path.name
        return len(start) > 8 and 2 <= int.from_bytes(start[:8], "little") <= MAX_HEADER and start[8:9] in _STARTS

    def describes(self, path: Location) -> bool:
        return not (path.is_dir() or is_index(path.name)) and read_header(path).described is not None

    def open(self, path: Location) -> Opened:
        """Open a checkpoint; for a shard, all of its shards: by the index that names it, or else by their names. A file
        that has its own description is no shard, although it may have the name of one."""
        if path.is_dir():
            path = path / INDEX
        if is_index(path.name):
            return self._open_index(path)
        header = read_header(path)
        if shard_of(path.name) is not None and header.described is None:
            index = _index_of(path)
            return self._open_group(path) if index is None else self._open_index(index)
        stored = {name: (0, tensor) for name, tensor in header.tensors.items()}
        described = partial(read_description, path, 8, header.header_bytes) if header.described else None
        return _opened(self.name, path, [path], [header], stored, header, described)

    def _open_group(self, path: Location) -> Opened:
        """Open shards without an index: all that their names count must be there."""
        files = all_of(path)
        headers = [read_header(file) for file in files]
        stored: dict[str, tuple[int, StoredTensor]] = {}
        for number, (file, header) in enumerate(zip(files, headers, strict=True)):
            if header.described is not None:
                raise CheckpointError(f"{file} is named as a shard of {path.name}, and is a checkpoint of its own")
            if _INDEXED in header.metadata:
                raise CheckpointError(
                    f"{file} is a shard whose structure is in {header.metadata[_INDEXED]!r:.80}, which is not beside it"
                )
            for name, tensor in header.tensors.items():
                if name in stored:
                    raise CheckpointError(f"tensor {name!r:.80} is in {files[stored[name][0]].name} and in {file.name}")
                stored[name] = (number, tensor)
        return _opened(self.name, path, files, headers, stored, None, None)

    def _open_index(self, index: Location) -> Opened:
        before = stamp(index)
        names = shard_names(index)
        files = check_shard_names(index, names)
        headers = [read_header(file) for file in files]
        numbers = {name: number for number, name in enumerate(names)}
        metadata = Metadata(str(index))
        stored = {}
        for name, file in read_index(index, partial(metadata.take, only_texts=False)):
            number = numbers.get(file, -1)
            if number < 0 or name not in headers[number].tensors:
                raise CheckpointError(f"tensor {name!r:.80} is not in the shard {file}, where the index says it is")
            if name in stored:
                raise CheckpointError(f"{index}: invalid JSON: a key appears twice, {name!r:.80}")
            stored[name] = (number, headers[number].tensors[name])
        if not metadata.described:
            _warn_of_unnamed(index, files, headers, stored)
        described = partial(read_description, index, 0, before.nbytes) if metadata.described else None
        says = Header({}, metadata.short, metadata.described, 0, before)
        if not files:  # a state without tensors: what there is of it is in the index
            if described is None:
                raise CheckpointError(f"{index} names no shards")
            return _opened(self.name, index, [index], [says], {}, says, described)
        return _opened(self.name, index, files, headers, stored, says, described)


def _warn_of_unnamed(
    index: Location, files: Sequence[Location], headers: Sequence[Header], stored: Container[str]
) -> None:
    """Warn of tensors that the shards have and the index does not name: they are left out."""
    count, first = 0, ""
    for file, header in zip(files, headers, strict=True):
        for name in header.tensors:
            if name not in stored:
                first = first or f"{name!r:.80} in {file.name}"
                count += 1
    if count:
        others = f" and {count - 1} others" if count > 1 else ""
        text = f"{index} does not name the tensor {first}{others}: left out"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _index_of(shard: Location) -> Location | None:
    """The index beside a shard that names it."""
    names = sorted(path.name for path in shard.parent.iterdir() if ".safetensors.index" in path.name)
    indexes = [shard.parent / name for name in names if is_index(name)]
    if len(indexes) > _MOST_INDEXES:  # of each checkpoint in the directory all are read
        raise CheckpointError(f"{shard.parent} has {len(indexes)} indexes of shards: name the one that is meant")
    return next((index for index in indexes if any(file == shard.name for _, file in read_index(index))), None)


def _opened(
    name: str,
    path: Location,
    files: list[Location],
    headers: Sequence[Header],
    stored: dict[str, tuple[int, StoredTensor]],
    says: Header | None,
    read: Callable[[], str] | None,
) -> Opened:
    """`says` has the description's digest, `read` returns the description itself."""
    stamps = [header.stamp for header in headers]
    checksum = says.metadata.get(_SUM) if says is not None else None
    if read is None and checksum is None:
        plan, places = _plan_of(stored)
        return Opened(name, plan, files, stamps, places, None, native=False)
    if read is None or says is None or says.described != checksum:
        raise CheckpointError(f"{path}: its description is damaged: it does not have the digest {checksum!r:.20}")
    described = read_described(read(), checksum, str(path))
    places = []
    for region, where in enumerate(described.stored):
        if where not in stored:
            raise CheckpointError(f"{path}: region {region} should lie under {where!r:.80}, which is not there")
        file, tensor = stored[where]
        nbytes = described.plan.regions[region].nbytes
        if tensor.nbytes != nbytes:
            raise CheckpointError(
                f"{files[file]}: tensor {where!r:.80} has {tensor.nbytes} bytes at offset {tensor.offset}, "
                f"its description says {nbytes}"
            )
        places.append((file, tensor.offset))
    return Opened(name, described.plan, files, stamps, places, described.digests, native=True)


def _plan_of(stored: dict[str, tuple[int, StoredTensor]]) -> tuple[Plan, list[Place]]:
    """The plan of files of another program: a flat dict of torch tensors."""
    tensors: list[Entry] = []
    regions: list[Region] = []
    places: list[Place] = []
    for name, (file, tensor) in stored.items():
        dtype, bits = DTYPES[tensor.dtype]
        shape = tensor.shape
        if bits == 4:  # torch counts two of them as one
            if not shape or shape[-1] % 2:
                raise CheckpointError(f"tensor {name!r:.80} of dtype {tensor.dtype} has the shape {shape}")
            shape = (*shape[:-1], shape[-1] // 2)
        region = -1
        if tensor.nbytes:
            region = len(regions)
            regions.append(Region(tensor.nbytes, max(bits // 8, 1)))
            places.append((file, tensor.offset))
        tensors.append(Entry(name, True, dtype, shape, None, region, 0))
    tree = {"d": {entry.name: {"x": number} for number, entry in enumerate(tensors)}}
    return Plan(tree, tensors, regions, None), places


class _Draft:
    """The layout of a plan in safetensors files."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sizes = [region.nbytes for region in plan.regions]
        taken = {entry.name for entry in plan.tensors}
        self.stored = [_stored(plan, region, taken) for region in range(len(plan.regions))]
        self.described = Described(plan.describe(), [name for name, _, _ in self.stored])
        # The largest alignment first, and sizes that would break the alignment of the next last; whole pages before
        # whole cache lines before the rest, so that large regions are placed for direct I/O.
        self.order = sorted(
            range(len(self.sizes)),
            key=lambda index: (
                self.sizes[index] % plan.regions[index].align != 0,
                self.sizes[index] % PAGE != 0,
                self.sizes[index] % LINE != 0,
                -plan.regions[index].align,
            ),
        )
        self.empties = {
            entry.name: _entry(*_as_stored(entry, entry.shape), 0, 0) for entry in plan.tensors if entry.region < 0
        }

    def metadata(self, digests: Sequence[int] | None) -> dict[str, str]:
        data, checksum = self.described.text(digests)
        return {DESCRIBED: data, _SUM: checksum}

    def header(self, regions: Sequence[int], *, first: bool) -> tuple[dict[str, Any], dict[int, int]]:
        """The header of a file with these regions, and their offsets in its data."""
        header = dict(self.empties) if first else {}
        at = 0
        offsets = {}
        for region in regions:
            name, dtype, shape = self.stored[region]
            header[name] = _entry(dtype, shape, at, at + self.sizes[region])
            offsets[region] = at
            at += self.sizes[region]
        return header, offsets

    def single(self) -> Layout:
        tensors, offsets = self.header(self.order, first=True)
        header = _render(tensors, self.metadata(None))
        start, bare = len(header), len(header.rstrip(b" "))
        return Layout(
            [FileSpec("", start + sum(self.sizes))],
            [(0, start + offsets[region]) for region in range(len(self.sizes))],
            self.sizes,
            [],
            lambda digests, _: [(0, 0, _render(tensors, self.metadata(digests)))],
            holds=partial(_holds, start, bare - _escaped(self.plan.describe())),
        )

    def shards(self, limit: int) -> Layout:
        parts = self.split(limit)
        if len(parts) > MAX_SHARDS:
            raise ArgumentError(f"max_shard={limit} makes {len(parts)} files, at most {MAX_SHARDS} are allowed")
        files: list[FileSpec] = []
        fill: list[Write] = []
        places: list[Place] = [(0, 0)] * len(self.sizes)
        weight_map: dict[str, str] = {}
        for index, part in enumerate(parts):
            tensors, offsets = self.header(part, first=not index)
            start = _render(tensors, {_INDEXED: INDEX})
            fill.append((index, 0, start))
            name = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
            files.append(FileSpec(name, len(start) + sum(self.sizes[region] for region in part)))
            weight_map |= dict.fromkeys(tensors, name)
            for region in part:
                places[region] = (index, len(start) + offsets[region])
        total = sum(self.sizes)

        def render(digests: Sequence[int] | None) -> bytes:
            metadata = {"total_size": total, **self.metadata(digests)}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            return json.dumps(index, indent=2).encode("ascii") + b"\n"

        bare = len(render(None))
        nbytes, last = align(bare, PAGE), len(files)  # with spaces at the end, as a header
        files.append(FileSpec(INDEX, nbytes))
        return Layout(
            files, places, self.sizes, fill, lambda digests, _: [(last, 0, render(digests).ljust(nbytes))],
            holds=partial(_holds, nbytes, bare - _escaped(self.plan.describe())),
        )  # fmt: skip

    def split(self, limit: int) -> list[list[int]]:
        """The regions of each shard; a region larger than the limit gets a shard to itself."""
        parts: list[list[int]] = [[]]
        used = 0
        for region in self.order:
            if parts[-1] and used + self.sizes[region] > limit:
                parts.append([])
                used = 0
            parts[-1].append(region)
            used += self.sizes[region]
        return parts


def _stored(plan: Plan, region: int, taken: set[str]) -> tuple[str, str, list[int]]:
    """Name, dtype and shape under which a region is stored."""
    entry = plan.covering(region)
    if entry is None:
        name = plan.tensors[plan.members[region][0]].name + "#storage"
        while name in taken:
            name += "_"
        taken.add(name)
        return name, "U8", [plan.regions[region].nbytes]
    return (entry.name, *_as_stored(entry, stored_shape(entry)))


def _as_stored(entry: Entry, shape: Sequence[int]) -> tuple[str, list[int]]:
    dtype = _OF_TABLE.get(entry.dtype) if isinstance(entry.dtype, str) else None
    if dtype is not None and DTYPES[dtype][1] == 4:  # torch counts two of them as one
        return (dtype, [*shape[:-1], 2 * shape[-1]]) if shape else ("U8", [entry.itemsize])
    return ("U8", [*shape, entry.itemsize]) if dtype is None else (dtype, list(shape))


def _entry(dtype: str, shape: Sequence[int], low: int, high: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [low, high]}


def _escaped(description: bytes) -> int:
    """Bytes that a description takes as part of a JSON string: quotes and backslashes get a backslash each."""
    return len(description) + description.count(b'"') + description.count(b"\\")


def _holds(start: int, rest: int, description: bytes) -> bool:
    """Whether a header or index of `start` bytes, `rest` of which are used by the tensors, is that of another
    description."""
    return align(rest + _escaped(description), PAGE) == start


def _render(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """The start of a file, up to its data."""
    data = _encode_json({"__metadata__": {"format": "pt", **metadata}, **tensors}).encode("ascii")
    length = align(8 + len(data), PAGE) - 8
    if length > MAX_HEADER:
        raise ArgumentError(
            f"the header takes {length} bytes, safetensors allows {MAX_HEADER}: save many numbers as tensors"
        )
    return length.to_bytes(8, "little") + data.ljust(length)


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
    stamp: Stamp


def read_header(path: Location) -> Header:
    """Read the header of a file. `CheckpointError` unless its tensors fill the file exactly: no gaps, no overlap."""
    with open_input(path) as file:
        found = stamp_of(file)
        size = found.nbytes
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
    return Header(tensors, metadata.short, metadata.described, length, found)


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
                        f"{path}: tensor {name!r:.80} of dtype {dtype} and shape {shown(shape)} has {high - low} bytes "
                        f"at offset {start + low}"
                    )
                return StoredTensor(dtype, tuple(shape), start + low, high - low)
    raise CheckpointError(f"{path}: invalid entry of tensor {name!r:.80}: {shown(part)}")
