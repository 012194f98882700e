"""Zip archives: written with stored, aligned members, whose sizes and places are known before their bytes.

    [header | padding][member] [header | padding][member] ... [description] [table of contents] [end]
                      ^ a multiple of 64                      '------ written by finish ------'

The headers of members with regions are written at the end as well, because they have the CRC-32.

The table of contents of an untrusted archive is read piece by piece, and only members that are asked for are kept, so
that neither a long table nor one with large numbers takes memory. The unpacked sizes of packed members are limited.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...errors import CheckpointError
from ..description import Described, ReadDescription, Summer, digest, read_described_file, text
from ..locations import PAGE, PIECE, InputFile, Location, Stamp, open_input, stamp_of
from ..plan import MAX_DESCRIPTION, Plan
from ..structure import MAX_TENSORS
from .base import FileSpec, Layout, Place, Write, align

ALIGNMENT: Final = 64  # bytes, as torch has it
DESCRIPTION: Final = "shmtensor.json"

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_EXTRA = struct.Struct("<HH")
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_DATE = 0x21  # 1 January 1980: a time would make two saves of one state differ
_UTF8 = 0x800


class Member(NamedTuple):
    """One member: `data`, followed by the bytes of a region if there is one (else -1)."""

    name: str
    data: bytes
    region: int
    nbytes: int


class Placed(NamedTuple):
    """A member, and where its header and its bytes begin in the archive."""

    member: Member
    header: int
    start: int


def place(member: Member, at: int, alignment: int = 1) -> Placed:
    """Place a member whose header begins at `at`."""
    return Placed(member, at, align(at + _LOCAL.size + len(member.name.encode()) + _extra_room(member), alignment))


class Archive:
    """The members of an archive, in order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.members: list[Member] = []

    def add(self, name: str, data: bytes) -> None:
        """Add a member whose bytes are known."""
        self.members.append(Member(name, data, -1, len(data)))

    def add_region(self, name: str, region: int, data: bytes = b"") -> None:
        """Add a member that is a region, preceded by known bytes."""
        self.members.append(Member(name, data, region, len(data) + self._plan.regions[region].nbytes))

    def layout(self, described: Described, description: str) -> Layout:
        """The layout of the archive; `description` is the name of the description's member."""
        placed = []
        at = 0
        places: list[Place] = [(0, 0)] * len(self._plan.regions)
        fill: list[Write] = []
        for member in self.members:
            placed.append(place(member, at, ALIGNMENT))
            start = placed[-1].start
            if member.region >= 0:
                places[member.region] = (0, start + len(member.data))
                if member.data:
                    fill.append((0, start, member.data))
            else:
                fill.append((0, at, local_header(placed[-1], zlib.crc32(member.data)) + member.data))
            at = start + member.nbytes
        nbytes = at + len(_tail(placed, at, [0] * len(placed), described.file(None), description))

        def finish(digests: Sequence[int], crcs: Sequence[int]) -> list[Write]:
            writes: list[Write] = []
            sums = []
            for each in placed:
                region, data = each.member.region, each.member.data
                crc = zlib.crc32(data)
                if region >= 0:
                    crc = combine_crc(crc, crcs[region], self._plan.regions[region].nbytes)
                    writes.append((0, each.header, local_header(each, crc)))
                sums.append(crc)
            writes.append((0, at, _tail(placed, at, sums, described.file(digests), description)))
            return writes

        sizes = [region.nbytes for region in self._plan.regions]
        return Layout([FileSpec("", nbytes)], places, sizes, fill, finish, needs_crc=True)


def _extra_room(member: Member) -> int:
    """Least number of bytes of the header's extra fields."""
    return (20 if member.nbytes >= _MAX32 else 0) + 4


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else _UTF8


def local_header(placed: Placed, crc: int) -> bytes:
    """The header before a member, with padding up to its bytes."""
    member, header, start = placed
    name = member.name.encode()
    extra = b""
    size = member.nbytes
    if size >= _MAX32:
        extra = _EXTRA.pack(1, 16) + struct.pack("<QQ", size, size)
        size = _MAX32
    padding = start - header - _LOCAL.size - len(name) - len(extra) - _EXTRA.size
    extra += _EXTRA.pack(0x4246, padding) + b"Z" * padding  # "FB", the field that torch pads with
    version = 45 if size == _MAX32 else 20
    return (
        _LOCAL.pack(0x04034B50, version, _flags(name), 0, 0, _DATE, crc, size, size, len(name), len(extra))
        + name
        + extra
    )


def _central(placed: Placed, crc: int) -> bytes:
    member, header, _ = placed
    name = member.name.encode()
    size = member.nbytes
    large = [size, size] if size >= _MAX32 else []
    if header >= _MAX32:
        large.append(header)
    extra = _EXTRA.pack(1, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
    version = 45 if large else 20
    size, header = min(size, _MAX32), min(header, _MAX32)
    return (
        _CENTRAL.pack(
            0x02014B50, version, version, _flags(name), 0, 0, _DATE, crc, size, size, len(name), len(extra), 0, 0, 0, 0,
            header,
        )
        + name
        + extra
    )  # fmt: skip


def _tail(placed: Sequence[Placed], at: int, crcs: Sequence[int], data: bytes, name: str) -> bytes:
    """The description as the last member, the table of contents, and the end."""
    member = Member(name, data, -1, len(data))
    last = place(member, at, ALIGNMENT)
    crc = zlib.crc32(data)
    body = local_header(last, crc) + data
    return body + contents([*placed, last], [*crcs, crc], at + len(body))


def contents(placed: Sequence[Placed], crcs: Sequence[int], offset: int) -> bytes:
    """The table of contents that begins at `offset`, and the end of the archive."""
    table = b"".join([_central(each, crc) for each, crc in zip(placed, crcs, strict=True)])
    count = len(placed)
    end = b""
    if count >= _MAX16 or offset >= _MAX32 or len(table) >= _MAX32:
        end = _END64.pack(0x06064B50, 44, 45, 45, 0, 0, count, count, len(table), offset)
        end += _LOCATOR.pack(0x07064B50, 0, offset + len(table), 1)
    short = min(count, _MAX16)
    end += _END.pack(0x06054B50, 0, 0, short, short, min(len(table), _MAX32), min(offset, _MAX32), 0)
    return table + end


_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32, bits reflected."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & _MAX32
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _powers() -> list[int]:
    """x to the power of 8, 16, 32, ...: appending 1, 2, 4, ... bytes."""
    power = 0x00800000
    powers = []
    for _ in range(63):
        powers.append(power)
        power = _multiply(power, power)
    return powers


_POWERS = _powers()


def combine_crc(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two concatenated byte strings, from the CRC-32 of each; the second has `nbytes`.

    >>> combine_crc(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    for bit, power in enumerate(_POWERS):
        if nbytes >> bit & 1:
            first = _multiply(power, first)
    return first ^ second


_LOCAL_FIELDS = struct.Struct("<I22xHH")
_SIZES = struct.Struct("<I2xH10xIIHH")  # the same with flags and sizes
_CENTRAL_FIELDS = struct.Struct("<I4xHH4xIIIHHH8xI")
_END_FIELDS = struct.Struct("<I4xHHIIH")
_END64_FIELDS = struct.Struct("<I28xQQQ")
_LOCATOR_FIELDS = struct.Struct("<8sQ4x")
_LOCATOR_BYTES = _LOCATOR_FIELDS.size
_UNKNOWN = 0x8  # sizes follow the member
_STORED, _DEFLATED = 0, 8
_MAX_MEMBERS: Final = MAX_TENSORS + 16
_MOST_DEFLATED: Final = 1032  # times its own size: deflate cannot do more
FREELY_UNPACKED: Final = 32 << 20  # bytes that packed members may always unpack to
MOST_UNPACKED: Final = 100  # times the file's size that they may unpack to in addition


class ZipMember(NamedTuple):
    """One member.

    offset: where its bytes lie if it is stored as it is, else None
    nbytes: when unpacked
    packed: bytes in the file, from `start`
    """

    name: str
    offset: int | None
    nbytes: int
    packed: int
    start: int
    crc: int


class Directory(NamedTuple):
    """The members of an archive that were asked for."""

    members: dict[str, ZipMember]
    stamp: Stamp


class _Table(NamedTuple):
    """Where the table of contents is."""

    start: int
    nbytes: int
    members: int


def read_directory(path: Location, wanted: Callable[[str], bool], *, any_case: bool = False) -> Directory:
    """The members of an archive whose names are wanted, after a check of all: each is inside the file, none overlaps
    another or has its name, with `any_case` whatever the case. `CheckpointError` for what is no zip archive, or
    damaged."""
    with open_input(path) as file:
        found = stamp_of(file)
        size = found.nbytes
        members: dict[str, ZipMember] = {}
        names, starts, ends, unpacked = array("Q"), array("Q"), array("Q"), 0
        file.prefetch((entry.header, _LOCAL_FIELDS.size + len(entry.raw_name)) for entry in _entries(file, path, size))
        for member, header in _members(file, path, size):
            name = member.name.encode("utf-8", "replace")
            names.append(digest(name.lower() if any_case else name))
            starts.append(header)
            ends.append(member.start + member.packed)
            if member.offset is None:
                unpacked += member.nbytes
            if wanted(member.name):
                if member.name in members:
                    raise CheckpointError(f"{path}: it has two members named {member.name!r:.80}")
                members[member.name] = member
    if len(np.unique(np.asarray(names))) != len(names):
        raise CheckpointError(f"{path}: it has two members of one name")
    order = np.argsort(np.asarray(starts), kind="stable")
    if (np.asarray(ends)[order][:-1] > np.asarray(starts)[order][1:]).any():
        raise CheckpointError(f"{path}: two of its members are in one place: it is damaged")
    if unpacked > FREELY_UNPACKED + MOST_UNPACKED * size:
        raise CheckpointError(
            f"{path}: its packed members unpack to {unpacked} bytes, the file has {size}: at most {FREELY_UNPACKED} "
            f"and {MOST_UNPACKED} times the file are allowed: unpack it by other means if you trust it"
        )
    return Directory(members, found)


def has_member(path: Location, wanted: Callable[[str], bool]) -> bool:
    """Whether the table of contents names a member that is wanted."""
    with open_input(path) as file:
        size = file.nbytes
        return any(wanted(entry.name) for entry in _entries(file, path, size))


class _Entry(NamedTuple):
    """One entry of the table of contents."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    nbytes: int
    header: int


def _find_table(file: InputFile, path: Location, size: int) -> _Table:
    """The record at the end of an archive, which says where its table of contents is."""
    for room in (PAGE, _MAX16 + _END_FIELDS.size):  # a comment after it may be long, but is rare
        first = max(0, size - room)
        tail = file.pread(room, first)
        at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END_FIELDS.size + 4))
        if at >= _LOCATOR_BYTES + _END64_FIELDS.size:
            break
    if at < 0:
        raise CheckpointError(_cut_off(path) or f"{path}: no zip archive, truncated or damaged: it has no end record")
    _, _, count, nbytes, start, _ = _END_FIELDS.unpack_from(tail, at)
    end = first + at
    at -= _LOCATOR_BYTES
    if at >= 0 and tail[at : at + 4] == b"PK\x06\x07":  # other readers go by it
        at -= _END64_FIELDS.size
        end = first + at
        if at < 0 or tail[at : at + 4] != b"PK\x06\x06" or _LOCATOR_FIELDS.unpack_from(tail, at + 56)[1] != end:
            raise CheckpointError(f"{path}: its end record of 64 bits is not at {end}: it is damaged")
        _, count, nbytes, start = _END64_FIELDS.unpack_from(tail, at)
    if start + nbytes != end:
        raise CheckpointError(
            f"{path}: its table of contents should lie at bytes {start} to {start + nbytes}, its end record is at "
            f"{end}: no zip archive, truncated or damaged"
        )
    if count > _MAX_MEMBERS:
        raise CheckpointError(f"{path}: {count} members, at most {MAX_TENSORS} are allowed")
    return _Table(start, nbytes, count)


def _entries(file: InputFile, path: Location, size: int) -> Iterator[_Entry]:
    """The table of contents, entry by entry."""
    table = _find_table(file, path, size)
    at, end, found = table.start, table.start + table.nbytes, 0
    window, base = b"", at
    while at < end:
        if base + len(window) < min(end, at + _CENTRAL_FIELDS.size + 3 * _MAX16):
            base, window = at, file.pread(min(PIECE, end - at), at)
        here = at - base
        if len(window) - here < _CENTRAL_FIELDS.size or window[here : here + 4] != b"PK\x01\x02":
            raise CheckpointError(f"{path}: no zip archive, truncated or damaged: there is no member at offset {at}")
        _, flags, method, crc, packed, nbytes, name, extra, comment, header = _CENTRAL_FIELDS.unpack_from(window, here)
        here += _CENTRAL_FIELDS.size
        raw_name = window[here : here + name]
        at += _CENTRAL_FIELDS.size + name + extra + comment
        found += 1
        if at > end or found > table.members:
            break
        fields = _large(window[here + name : here + name + extra])
        numbers = []
        for number in (nbytes, packed, header):
            if number == _MAX32:
                if not fields:
                    raise CheckpointError(
                        f"{path}: member {raw_name!r:.80} does not say how large it is: it is damaged"
                    )
                number = fields.pop(0)
            numbers.append(number)
        text = _decode(raw_name, flags, path)
        yield _Entry(text, raw_name, flags, method, crc, numbers[1], numbers[0], numbers[2])
    if at != end or found != table.members:
        raise CheckpointError(
            f"{path}: its table of contents should name {table.members} members, and names {found}: it is damaged"
        )


def _decode(name: bytes, flags: int, path: Location) -> str:
    try:
        text = name.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise CheckpointError(f"{path}: it has a member with the name {name!r:.80}: it is damaged")
    return text


def _large(extra: bytes) -> list[int]:
    """The 64-bit numbers that a member's extra fields have, in the order of those that they stand for."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += 4
        if kind == 1:
            length = min(length, len(extra) - at) // 8
            return list(struct.unpack_from(f"<{length}Q", extra, at))
        at += length
    return []


def _cut_off(path: Location) -> str | None:
    """The error text for an archive that is truncated inside a member, by the headers before the members; None if these
    have no sizes."""
    with open_input(path) as file:
        size, at = file.nbytes, 0
        for _ in range(MAX_TENSORS):
            start = file.pread(_SIZES.size, at)
            if len(start) < _SIZES.size or start[:4] != b"PK\x03\x04":
                return f"{path}: it ends at offset {size}, in its table of contents: it is truncated" if at else None
            _, flags, packed, _, name, extra = _SIZES.unpack(start)
            label = file.pread(name, at + _SIZES.size).decode("utf-8", "replace")
            begin = at + _SIZES.size + name + extra
            if packed == _MAX32:
                packed = [*_large(file.pread(extra, at + _SIZES.size + name)), _MAX32, _MAX32][1]
            if flags & _UNKNOWN:
                return None
            if begin + packed > size:
                return f"{path}: it ends at offset {size}, inside member {label!r:.80} at offset {at}: it is truncated"
            at = begin + packed
    return None


def _members(file: InputFile, path: Location, size: int) -> Iterator[tuple[ZipMember, int]]:
    """Each member, checked against its local header, and the offset of that header."""
    for entry in _entries(file, path, size):
        label = f"{path}: member {entry.name!r:.80} at offset {entry.header}"
        if entry.flags & 1:
            raise CheckpointError(f"{label} is encrypted")
        start = file.pread(_LOCAL_FIELDS.size + len(entry.raw_name), entry.header) if entry.header < size else b""
        if len(start) < _LOCAL_FIELDS.size or start[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{label} is not there: the file is truncated or damaged")
        _, name, extra = _LOCAL_FIELDS.unpack_from(start)
        own_name = start[_LOCAL_FIELDS.size :]
        if name != len(entry.raw_name) or own_name != entry.raw_name:
            raise CheckpointError(f"{label} calls itself {own_name!r:.80}: the file is damaged")
        begin = entry.header + _LOCAL_FIELDS.size + name + extra
        if begin + entry.packed > size:
            raise CheckpointError(f"{label} has {entry.packed} bytes, the file has {size}: it is truncated")
        if entry.method not in (_STORED, _DEFLATED):
            raise CheckpointError(f"{label} is packed by method {entry.method}: store or deflate it")
        if entry.method == _STORED and entry.packed != entry.nbytes:
            raise CheckpointError(f"{label} is stored in {entry.packed} bytes and should have {entry.nbytes}")
        if entry.nbytes > max(entry.packed, 1) * _MOST_DEFLATED:
            raise CheckpointError(f"{label} says {entry.nbytes} bytes, and has {entry.packed}")
        offset = begin if entry.method == _STORED else None
        yield ZipMember(entry.name, offset, entry.nbytes, entry.packed, begin, entry.crc), entry.header


def read_pieces(file: InputFile, member: ZipMember, label: str, size: int = PIECE) -> Iterator[bytes]:
    """The unpacked bytes of a member, at most `size` at a time. `CheckpointError` if its size is another one."""
    inflate = None if member.offset is not None else zlib.decompressobj(-zlib.MAX_WBITS)
    at, end, done = member.start, member.start + member.packed, 0
    data = b""
    while done < member.nbytes:
        if not data and at < end:
            data = file.pread(min(size, end - at), at)
            at += len(data)
        if inflate is None:
            piece, data = data, b""
        else:
            try:
                piece = inflate.decompress(data, size)
            except zlib.error as error:
                raise CheckpointError(f"{label}: member {member.name!r:.80} cannot be unpacked: {error}") from None
            data = inflate.unconsumed_tail
        if not piece and not data and at >= end:
            break
        done += len(piece)
        if done > member.nbytes:
            break
        if piece:
            yield piece
    if done != member.nbytes:
        raise CheckpointError(f"{label}: member {member.name!r:.80} has {done} bytes, and says {member.nbytes}")


def check_crcs(path: Location, progress: Callable[[int], object] | None = None) -> None:
    """Compare every member with its CRC-32; `CheckpointError` names one that is damaged."""
    with open_input(path) as file:
        size = file.nbytes
        for member, _ in _members(file, path, size):
            crc = 0
            for piece in read_pieces(file, member, str(path)):
                crc = zlib.crc32(piece, crc)
                if progress is not None:
                    progress(len(piece))
            if crc != member.crc:
                raise damaged(path, member)


def damaged(path: Location, member: ZipMember) -> CheckpointError:
    return CheckpointError(f"{path}: member {member.name!r:.80} is damaged: it does not have the CRC-32 that is noted")


def locate(path: Location, member: ZipMember) -> tuple[ReadDescription, list[tuple[int, int]]]:
    """The description in an archive, and the places of its regions: at the end of the members that it names."""
    described = read_described_file(_read_signed(path, member), str(path))
    stored = frozenset(described.stored)
    members = read_directory(path, stored.__contains__).members
    places = []
    for region, name in enumerate(described.stored):
        member_of = members.get(name)
        if member_of is None or member_of.offset is None:
            raise CheckpointError(f"{path}: region {region} should be the member {name!r:.80}, which is not there")
        nbytes = described.plan.regions[region].nbytes
        if member_of.nbytes < nbytes:
            raise CheckpointError(
                f"{path}: member {name!r:.80} at offset {member_of.offset} has {member_of.nbytes} bytes, its "
                f"description says {nbytes}"
            )
        places.append((0, member_of.offset + member_of.nbytes - nbytes))
    return described, places


def _read_signed(path: Location, member: ZipMember) -> bytes:
    """The bytes of a description, after comparing it with the digest at its beginning."""
    if member.offset is None or member.nbytes > 4 * MAX_DESCRIPTION:
        raise CheckpointError(f"{path}: member {member.name!r:.80} is packed, or has {member.nbytes} bytes")
    with open_input(path) as file:
        summer, checksum = Summer(), b""
        for number, piece in enumerate(read_pieces(file, member, str(path))):
            if not number:
                checksum, _, piece = piece.partition(b"\n")
            summer.update(piece)
        if checksum != text(summer.digest).encode("ascii"):
            raise CheckpointError(
                f"{path}: its description is damaged: it does not have the digest {checksum.decode('latin1')!r:.20}"
            )
        return b"".join(read_pieces(file, member, str(path)))
