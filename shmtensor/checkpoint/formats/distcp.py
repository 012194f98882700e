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
the description, `archives`, has per tensor `[offset, bytes]` of its archive. `shmtensor.checkpoint.dcp_metadata` makes
of these the `.metadata` that DCP's reader needs.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, CheckpointError
from ..description import Described, read_described_file
from ..digests import digest, text
from ..limits import MAX_DESCRIPTION, PAGE
from ..locations import Location, open_input
from ..plan import Entry, Plan
from ..regions import Region
from .base import FileSpec, Format, Layout, Opened, Place, Write, align
from .torch_pickle import Pickler
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
        size, data = _read(path)
        described = read_described_file(data, str(path))
        places = []
        for stored, region in zip(described.stored, described.plan.regions, strict=True):
            if not _OFFSET.fullmatch(stored) or not _START <= int(stored) <= size - region.nbytes:
                raise CheckpointError(f"{path}: it has a region of {region.nbytes} bytes at {stored!r:.40}, of {size}")
            places.append((0, int(stored)))
        return Opened(self.name, described.plan, [path], [size], places, described.digests, native=True)


def read_table(path: Location) -> dict[str, Any]:
    """The description of a file as it is, with `plan`, `stored` and `archives`; only its digest is checked. Raises
    OSError, `CheckpointError`."""
    _, data = _read(path)
    checksum, _, rest = data.partition(b"\n")
    if checksum != text(digest(rest)).encode("ascii"):
        raise CheckpointError(f"{path}: its description is damaged: it does not have the digest {checksum!r:.20}")
    return dict(json.loads(rest))


def _read(path: Location) -> tuple[int, bytes]:
    """The size of a file, and the bytes of its description."""
    with open_input(path) as file:
        size = file.nbytes
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
        return size, file.pread(nbytes, start)


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
