"""distcp: an archive of torch for each tensor, so that the `FileSystemReader` of torch's distributed checkpoint (DCP)
reads a tensor by `torch.load` from a range of the file.

| bytes | what |
|---|---|
| 16 | `shmtensor.distcp` |
| 8, 8 | offset and size of the description, little-endian |
| | zeros up to byte 64 |
| | the archives, those of regions in their order, then those of tensors without bytes |
| | zeros up to a multiple of 4096 |
| | the description, and zeros up to a multiple of 4096 |

An archive is an uncompressed zip of `archive/data.pkl`, `archive/byteorder`, `archive/version` and `archive/data/0`,
whose bytes are those of the region, at a multiple of 64 in the file. If several tensors share a region, the archives of
all share its bytes: each has a pickle and a table of contents of its own, and what is between belongs to the others.

    one tensor     [data.pkl|byteorder|version|data/0 ... bytes ...][table]
    two of them    [data.pkl][data.pkl|byteorder|version|data/0 ... bytes ...][table][table]
                   ^ the second one                                                       ^

The headers of `archive/data/0` have 0 in place of a CRC-32, as those of `torch.save` have if `set_crc32_options(False)`
is set: torch does not read it, and it would take longer than all else that a save does to the bytes.

This library reads the description alone. A region is stored under its offset in the file, in decimal. One more key of
the description, `archives`, has per tensor `[offset, bytes]` of its archive. `metadata_of` makes of these the
`.metadata` that DCP's reader needs.

`.metadata` is what that reader unpickles, composed without torch. The process that commits a checkpoint of several
ranks writes it beside the parts, if all of them are of the format distcp and say what DCP's items they have
(`shmtensor.dcp.metadata`). No trainer has to be there, and the file is on disk before the checkpoint gets its name.
This library never reads it: the manifest and the parts say the same.

The pickle has protocol 2 and is written opcode by opcode: instances of the classes of
`torch.distributed.checkpoint.metadata` and of `_StorageInfo`, with the fields that DCP pickles itself, and nothing of
the user's but strings and numbers.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, CheckpointError
from ...wire.dtypes import BY_NAME
from ..description import Described, digest, read_described_file, text
from ..locations import PAGE, Location, Stamp, open_input, stamp_of
from ..plan import MAX_DESCRIPTION, Entry, Plan, Region
from ..structure import MAX_TENSORS
from .base import FileSpec, Format, Layout, Opened, Place, Write, align, check_apart
from .pickles import Pickler
from .zips import ALIGNMENT, Member, Placed, contents, local_header, place

_MAGIC: Final = b"shmtensor.distcp"
_HEAD: Final = struct.Struct("<16sQQ")
_START: Final = 64
_OFFSET: Final = re.compile(r"[1-9][0-9]{1,18}")
_SMALL: Final = {"archive/byteorder": b"little", "archive/version": b"3\n"}


class Distcp(Format):
    """Files for DCP's `FileSystemReader`, which needs `.metadata` beside them."""

    name = "distcp"
    suffix = ".distcp"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        if max_shard is not None:
            raise ArgumentError('max_shard= is for format="safetensors": a .distcp is one file')
        draft = _Draft(plan)
        stored = [str(offset) for _, offset in draft.places]
        described = Described(plan.describe(), stored, archives=draft.archives)
        start, nbytes = align(draft.end, PAGE), len(described.file(None))
        rest = nbytes - len(plan.describe())
        size = align(start + nbytes, PAGE)

        def finish(digests: Sequence[int], crcs: Sequence[int]) -> list[Write]:
            data = described.file(digests)
            return [(0, start, data), (0, 0, _HEAD.pack(_MAGIC, start, len(data)))]

        return Layout(
            [FileSpec("", size)], draft.places, [region.nbytes for region in plan.regions], draft.fill, finish,
            holds=lambda description: align(start + rest + len(description), PAGE) == size,
        )  # fmt: skip

    def recognizes(self, path: Location, start: bytes) -> bool:
        return start[: len(_MAGIC)] == _MAGIC

    def open(self, path: Location) -> Opened:
        found, data = _read(path)
        size = found.nbytes
        described = read_described_file(data, str(path))
        places = []
        for stored, region in zip(described.stored, described.plan.regions, strict=True):
            if not _OFFSET.fullmatch(stored) or not _START <= int(stored) <= size - region.nbytes:
                raise CheckpointError(f"{path}: it has a region of {region.nbytes} bytes at {stored!r:.40}, of {size}")
            places.append((0, int(stored)))
        check_apart(path, described.plan, places)
        return Opened(self.name, described.plan, [path], [found], places, described.digests, native=True)


def read_table(path: Location) -> dict[str, Any]:
    """The description of a file as it is, with `plan`, `stored` and `archives`; only its digest is checked. Raises
    OSError, `CheckpointError`."""
    _, data = _read(path)
    checksum, _, rest = data.partition(b"\n")
    if checksum != text(digest(rest)).encode("ascii"):
        raise CheckpointError(f"{path}: its description is damaged: it does not have the digest {checksum!r:.20}")
    return dict(json.loads(rest))


def _read(path: Location) -> tuple[Stamp, bytes]:
    """The stamp of a file, and the bytes of its description."""
    with open_input(path) as file:
        found = stamp_of(file)
        size = found.nbytes
        head = file.pread(_HEAD.size, 0)
        if not head.startswith(_MAGIC):
            raise CheckpointError(f"{path} is no distcp file: it begins with {head[:16]!r}")
        if len(head) < _HEAD.size:
            raise CheckpointError(f"{path} has {size} bytes, less than its head: it is truncated")
        _, start, nbytes = _HEAD.unpack(head)
        if align(start + nbytes, PAGE) != size:
            fault = "it is truncated" if align(start + nbytes, PAGE) > size else "it is longer than it says"
            raise CheckpointError(f"{path} has {size} bytes, its description is at {start} and has {nbytes}: {fault}")
        if start < _START or nbytes > 4 * MAX_DESCRIPTION:
            raise CheckpointError(f"{path}: its description is at {start} and has {nbytes} bytes: it is damaged")
        return found, file.pread(nbytes, start)


class _Group(NamedTuple):
    """Archives that share the bytes of a region: what is before the bytes and after them, and the range of each."""

    head: bytes
    tail: bytes
    ranges: list[tuple[int, int]]


class _Draft:
    """The archives of a plan: `places` of the regions, `archives` of the tensors, and what is known beforehand."""

    def __init__(self, plan: Plan) -> None:
        self.places: list[Place] = []
        self.archives = [(0, 0)] * len(plan.tensors)
        self.end = _START
        self.fill: list[Write] = []
        self._groups: dict[Hashable, _Group] = {}  # a model has many tensors of few shapes
        tensors = plan.tensors
        for region, numbers in zip(plan.regions, plan.members, strict=True):
            views: dict[_View, list[int]] = {}
            for number in numbers:
                views.setdefault(_View.of(tensors[number]), []).append(number)
            ranges = self._add(tuple(views), region.nbytes)
            self.places.append((0, self.fill[-2][1] + len(self.fill[-2][2])))
            for same, found in zip(views.values(), ranges, strict=True):
                for number in same:
                    self.archives[number] = found
        empty: dict[_View, tuple[int, int]] = {}
        for number, entry in enumerate(tensors):
            if entry.region < 0:
                view = _View.of(entry)
                if view not in empty:
                    [empty[view]] = self._add((view,), 0)
                self.archives[number] = empty[view]

    def _add(self, views: tuple[_View, ...], nbytes: int) -> list[tuple[int, int]]:
        """Add the archives of different tensors of one region; returns the range of each."""
        group = self._groups.get((views, nbytes))
        if group is None:
            group = self._groups[views, nbytes] = _archives([view.pickle(nbytes) for view in views], nbytes)
        begin = align(self.end, ALIGNMENT)
        after = begin + len(group.head) + nbytes
        self.fill += (0, begin, group.head), (0, after, group.tail)
        self.end = after + len(group.tail)
        return [(begin + at, size) for at, size in group.ranges]


def _archives(pickles: Sequence[bytes], nbytes: int) -> _Group:
    """Archives of one region, whose offsets are from a multiple of `ALIGNMENT` on."""
    at = 0
    heads = []

    def add(member: Member) -> Placed:
        nonlocal at
        placed = place(member, at)
        heads.append(local_header(placed, zlib.crc32(member.data)) + member.data)
        at = placed.start + len(member.data)
        return placed

    tops = [add(Member("archive/data.pkl", pickle, -1, len(pickle))) for pickle in reversed(pickles)]
    small = [add(Member(name, data, -1, len(data))) for name, data in _SMALL.items()]
    last = place(Member(f"archive/data/{_storage(nbytes)}", b"", 0, nbytes), at, ALIGNMENT)
    heads.append(local_header(last, 0))
    at = last.start + nbytes
    tails, ranges = [], []
    for top in reversed(tops):
        members = [each._replace(header=each.header - top.header) for each in (top, *small, last)]
        tails.append(contents(members, [zlib.crc32(each.member.data) for each in members], at - top.header))
        at += len(tails[-1])
        ranges.append((top.header, at - top.header))
    return _Group(b"".join(heads), b"".join(tails), ranges)


def _storage(nbytes: int) -> str:
    """What `Pickler` calls the storage of the only tensor of a plan."""
    return "0" if nbytes else "empty0"


class _View(NamedTuple):
    """What is the same in tensors of one region that have one archive."""

    torch: bool
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int

    @classmethod
    def of(cls, entry: Entry) -> _View:
        dtype = entry.dtype if isinstance(entry.dtype, str) else json.dumps(["", entry.dtype])
        return cls(entry.torch, dtype, entry.shape, entry.strides, entry.offset)

    def pickle(self, nbytes: int) -> bytes:
        """The pickle of such a tensor, of a region of so many bytes."""
        dtype = self.dtype if self.dtype[:1] != "[" else json.loads(self.dtype)[1]
        entry = Entry("", self.torch, dtype, self.shape, self.strides, 0 if nbytes else -1, self.offset)
        return Pickler(Plan({"x": 0}, [entry], [Region(nbytes, 1)] if nbytes else [], None)).dump()


METADATA: Final = ".metadata"
MAX_METADATA: Final = 512 << 20  # bytes
KEY: Final = "dcp"
"""The key of a part's `meta` that has the description of its items."""
VERSION: Final = 1

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_DCP_VERSION: Final = "1.0.0"

Sizes = tuple[int, ...]


def metadata_of(directory: str, files: Sequence[str]) -> bytes | None:
    """The `.metadata` of the parts in a directory, in the order of the ranks; None if DCP has not saved them in this
    format. Raises OSError, and `CheckpointError` if the parts do not agree."""
    if not all(file.endswith(Distcp.suffix) for file in files):
        return None
    items = _Items()
    for file in files:
        path = Path(os.path.join(directory, file))
        table = read_table(path)
        meta = table["plan"]["meta"]
        if not isinstance(meta, dict) or not isinstance(meta.get(KEY), dict) or meta[KEY].get("version") != VERSION:
            return None
        try:
            items.add(file, table, meta[KEY])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{path}: invalid items: {type(error).__name__}: {error}") from None
    try:
        return _Pickle(items).dump()
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{directory}: invalid items: {type(error).__name__}: {error}") from None


class _Tensor:
    """A tensor of all ranks: its chunks by offsets, each with its shape and the range of its archive."""

    __slots__ = ("chunks", "dtype", "size")

    def __init__(self, size: Sizes, dtype: str) -> None:
        self.size, self.dtype = size, dtype
        self.chunks: dict[Sizes, tuple[Sizes, str, int, int]] = {}


class _Items:
    """The items of all parts, by name. Of replicas the first one counts."""

    def __init__(self) -> None:
        self.tensors: dict[str, _Tensor] = {}
        self.objects: dict[str, tuple[str, int, int]] = {}
        self.paths: dict[str, Sequence[str | int]] = {}
        self._count = 0

    def add(self, file: str, table: dict[str, Any], described: dict[str, Any]) -> None:
        """Add the items of a part."""
        entries = table["plan"]["tensors"]
        self._count += len(entries)
        if self._count > MAX_TENSORS:
            raise CheckpointError(f"the parts have more than {MAX_TENSORS} tensors, which no reader takes")
        for (fqn, path, size, offsets), entry, (at, nbytes) in zip(
            described["tensors"], entries, table["archives"], strict=False
        ):
            _, _, dtype, shape, *_ = entry
            found = self.tensors.get(fqn)
            if not isinstance(fqn, str) or dtype not in BY_NAME:  # it becomes a name in the pickle
                raise CheckpointError(f"item {fqn!r:.80} has dtype {dtype!r:.40}")
            if found is None:
                found = self.tensors[fqn] = _Tensor(tuple(size), dtype)
            elif found.dtype != dtype or found.size != tuple(size):
                raise CheckpointError(f"item {fqn!r:.80} is of two sizes or dtypes: {file} has another than before")
            if fqn not in self.paths and path is not None:
                self.paths[fqn] = path
            if 0 in size or 0 not in shape:
                found.chunks.setdefault(tuple(offsets), (tuple(shape), file, at, nbytes))
        if not described["objects"]:
            return
        *_, region, offset = entries[-1]
        at = offset + int(table["stored"][region]) if region >= 0 else 0
        for fqn, path, nbytes in described["objects"]:
            if fqn not in self.paths and path is not None:
                self.paths[fqn] = path
            self.objects.setdefault(fqn, (file, at, nbytes))
            at += nbytes


_GLOBALS: Final = (
    *(
        f"{_MODULE}\n{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
            "BytesStorageMetadata", "MetadataIndex",
        )
    ),
    "torch.distributed.checkpoint.filesystem\n_StorageInfo", "torch\nSize", "torch.serialization\n_get_layout",
)  # fmt: skip
_TEXTS: Final = (
    "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "properties", "size", "chunks",
    "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length", "torch.strided",
)  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


_VALUES: Final = [f"c{name}\n".encode() for name in _GLOBALS] + [_text(text) for text in _TEXTS]
_PICKLE_START: Final = b"\x80\x02" + b"".join([value + b"q%c0" % number for number, value in enumerate(_VALUES)])
"""Protocol 2; each class and each name of a field is noted once (BINPUT) and dropped (POP)."""
_GET: Final = {name.rpartition("\n")[2]: b"h%c" % number for number, name in enumerate(_GLOBALS + _TEXTS)}
"""What takes them from there."""


def _new(name: str) -> bytes:
    """An instance, and the beginning of the dict of its fields, which `ub` ends."""
    return _GET[name] + b")\x81}("


_TENSOR: Final = _new("TensorStorageMetadata") + _GET["properties"] + _GET["TensorProperties"] + b")\x81("
_DENSE: Final = (
    _GET["_get_layout"] + _GET["torch.strided"] + b"\x85R\x89" + _GET["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R\x89tb"
)
"""The properties of a tensor after its dtype: strided, without gradient, contiguous, not pinned."""
_CHUNK: Final = _new("ChunkStorageMetadata") + _GET["offsets"]
_INDEX: Final = _new("MetadataIndex") + _GET["index"] + b"N" + _GET["fqn"]
_INFO: Final = _new("_StorageInfo") + _GET["relative_path"]


class _Pickle:
    """The pickle of DCP's `Metadata`. A value that comes again is taken from the memo."""

    def __init__(self, items: _Items) -> None:
        self._items = items
        self._out = [_PICKLE_START]
        self._memo: dict[str | Sizes, bytes] = {}

    def dump(self) -> bytes:
        """The pickle. Raises `CheckpointError` if an item is an object on one rank and a tensor on another."""
        items, out = self._items, self._out
        both = items.tensors.keys() & items.objects.keys()
        if both:
            raise CheckpointError(f"item {min(both)!r:.80} is an object on one rank and a tensor on another")
        out += _new("Metadata"), _GET["state_dict_metadata"], b"}("
        for fqn, tensor in items.tensors.items():
            self._tensor(fqn, tensor)
        for fqn in items.objects:
            out += self._name(fqn), _GET["BytesStorageMetadata"], b")\x81"
        out += b"u", _GET["planner_data"]
        self._paths()
        out += _GET["storage_data"], b"}("
        for fqn, tensor in items.tensors.items():
            for offsets, (_, file, at, nbytes) in tensor.chunks.items():
                out += _INDEX, self._name(fqn), _GET["offset"], self._size(offsets), b"ub"
                self._range(file, at, nbytes)
        for fqn, (file, at, nbytes) in items.objects.items():
            out += _INDEX, self._name(fqn), b"ub"
            self._range(file, at, nbytes)
        out += b"u", _GET["storage_meta"], b"N", _GET["version"], _text(_DCP_VERSION), b"ub."
        return b"".join(out)

    def _tensor(self, fqn: str, tensor: _Tensor) -> None:
        out = self._out
        out += self._name(fqn), _TENSOR, f"ctorch\n{tensor.dtype}\n".encode(), _DENSE
        out += _GET["size"], self._size(tensor.size), _GET["chunks"], b"]("
        for offsets, (shape, *_) in tensor.chunks.items():
            out += _CHUNK, self._size(offsets), _GET["sizes"], self._size(shape), b"ub"
        out += (b"eub",)

    def _paths(self) -> None:
        """The paths of all items in the state dict, or None if some have none."""
        items, out = self._items, self._out
        if len(items.paths) < len(items.tensors) + len(items.objects):
            out += (b"N",)
            return
        out += (b"}(",)
        for fqn, path in items.paths.items():
            steps = [self._name(step) if isinstance(step, str) else _int(step) for step in path]
            out += self._name(fqn), b"(", *steps, b"t"
        out += (b"u",)

    def _range(self, file: str, at: int, nbytes: int) -> None:
        self._out += _INFO, self._name(file), _GET["offset"], _int(at), _GET["length"], _int(nbytes), b"ub"

    # --- values that come more than once

    def _name(self, text: str) -> bytes:
        return self._memo.get(text) or self._note(text, _text(text))

    def _size(self, values: Sizes) -> bytes:
        """A `torch.Size`. It cannot be changed, so that equal ones are one object."""
        found = self._memo.get(values)
        return found or self._note(values, _GET["Size"] + b"((" + b"".join(map(_int, values)) + b"ttR")

    def _note(self, key: str | Sizes, data: bytes) -> bytes:
        number = struct.pack("<I", len(_VALUES) + len(self._memo))
        self._memo[key] = b"j" + number
        return data + b"r" + number


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
