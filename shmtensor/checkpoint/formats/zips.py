"""Write zip archives of stored, aligned members, whose sizes and places are known before their bytes.

    [header | padding][member] [header | padding][member] ... [description] [table of contents] [end]
                      ^ a multiple of 64                      '------ written by finish ------'

The headers of members with regions are written at the end as well, because they have the CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..description import Described
from ..plan import Plan
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
