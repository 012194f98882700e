"""The packets between a segment server and its clients: bytes in, values out. docs/internals/segment-server.md.

    request   magic "SHMTSEGS"  version u16  operation u16  length of the name u32  value u64  | name
    reply     magic "SHMTSEGS"  version u16  operation u16  errno u32  seven u64                 | text, or a listing
    listed    length of the name u16  six u64 of the status  | name

A descriptor travels beside a packet, never in it.
"""

from __future__ import annotations

import enum
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..errors import WireError

MAGIC: Final = b"SHMTSEGS"
VERSION: Final = 1
MOST: Final = 60_000
"""Bytes of the longest packet."""
SOCKET: Final = "segments"
"""The socket of a server, in the directory that it shares."""
NEW_SOCKET: Final = "segments.new"
"""The socket before it has its name."""
LOCKS: Final = "segments.lock"
"""Beside it: the file on which the server and its clients prove that they live."""
VALUES: Final = 1 << 63
"""The value of each request is below this one."""

_REQUEST: Final = struct.Struct("<8sHHIQ")
_REPLY: Final = struct.Struct("<8sHHI7Q")
_LISTED: Final = struct.Struct("<H6Q")
_FILE: Final = re.compile(r"[A-Za-z0-9._,-]{1,200}")


class Op(enum.IntEnum):
    """The operation that a request asks for."""

    OPEN = 1
    STATUS = 2
    UNLINK = 3
    LIST = 4
    SPACE = 5
    RESERVE = 6
    GIVE = 7
    PRESENT = 8


EXISTING: Final = 0
EXCLUSIVE: Final = 1
EITHER: Final = 2
"""How `OPEN` opens: what exists; what does not exist yet; either."""


class Status(NamedTuple):
    """The status of a segment. All segments belong to the user of the server."""

    device: int
    inode: int
    nbytes: int
    blocks: int
    """Blocks of 512 bytes, as in `stat`."""
    mode: int
    changed_ns: int


class Space(NamedTuple):
    """The room of a segment server."""

    limit: int
    """Bytes that all segments together may take."""
    used: int
    """Bytes that they take, with those that are being reserved."""
    names: int
    most_names: int
    awaited: int
    """Processes that have not given back what they have mapped."""
    pid: int
    """The pid of one of these processes, in its own namespace; 0 if there is none."""


@dataclass(frozen=True)
class Request:
    """One request. What `value` is depends on `op`: see the table in docs/internals/segment-server.md."""

    op: Op
    name: str = ""
    value: int = 0

    def pack(self) -> bytes:
        """The bytes of the packet."""
        name = self.name.encode()
        return _REQUEST.pack(MAGIC, VERSION, self.op, len(name), self.value) + name

    @classmethod
    def unpack(cls, packet: bytes) -> Request:
        """Read a packet. Raises `WireError` if it is none of this version, or its name or value makes no sense."""
        if len(packet) < _REQUEST.size:
            raise WireError(f"a request of {len(packet)} bytes")
        magic, version, number, length, value = _REQUEST.unpack_from(packet)
        if magic != MAGIC or version != VERSION:
            raise WireError(f"a request of version {version}, this segment server reads {VERSION}")
        raw = packet[_REQUEST.size :]
        try:
            op = Op(number)
        except ValueError:
            raise WireError(f"request {number} is unknown") from None
        if len(raw) != length:
            raise WireError(f"a name of {len(raw)} bytes that should have {length}")
        name = raw.decode("ascii", "replace")
        if (name or op in _NAMED) and not _FILE.fullmatch(name):
            raise WireError(f"{name[:80]!r} is not the name of a segment")
        if value >= VALUES:
            raise WireError(f"request {op.name} of {value}")
        return cls(op, name, value)


_NAMED: Final = (Op.OPEN, Op.STATUS, Op.UNLINK, Op.RESERVE, Op.GIVE)


@dataclass(frozen=True)
class Reply:
    """The reply to a request; `error` is an errno, 0 for none."""

    op: int
    error: int = 0
    values: tuple[int, ...] = ()
    """Up to seven numbers: `Status` and a serial number, or `Space`."""
    text: bytes = b""

    def pack(self) -> bytes:
        """The bytes of the packet."""
        values = (*self.values, *(0,) * (7 - len(self.values)))
        return _REPLY.pack(MAGIC, VERSION, self.op, self.error, *values) + self.text

    @classmethod
    def unpack(cls, packet: bytes) -> Reply:
        """Read a packet. Raises `WireError` if it is none of this version."""
        if len(packet) < _REPLY.size:
            raise WireError(f"a reply of {len(packet)} bytes")
        magic, version, op, error, *values = _REPLY.unpack_from(packet)
        if magic != MAGIC or version != VERSION:
            raise WireError(f"a reply of version {version}, this library reads {VERSION}")
        return cls(op, error, tuple(values), packet[_REPLY.size :])

    @property
    def status(self) -> Status:
        """Of the reply to `OPEN` and `STATUS`."""
        return Status(*self.values[:6])

    @property
    def serial(self) -> int:
        """Of the reply to `OPEN`: the number that the server gave this name."""
        return self.values[6]

    @property
    def space(self) -> Space:
        """Of the reply to `SPACE`, and of one that says that others are awaited."""
        return Space(*self.values[:6])


def pack_listing(found: Iterable[tuple[str, Status]]) -> bytes:
    """A packet with as many names and their status as it has room for; a packet without names ends the listing."""
    parts: list[bytes] = []
    room = MOST - _REPLY.size
    for name, status in found:
        raw = name.encode()
        room -= _LISTED.size + len(raw)
        if room < 0:
            break
        parts += _LISTED.pack(len(raw), *status), raw
    return b"".join(parts)


def listing(text: bytes) -> Iterator[tuple[str, Status]]:
    """The names in a packet, in their order. Raises `WireError` if it is cut."""
    at = 0
    while at < len(text):
        if len(text) - at < _LISTED.size:
            raise WireError("a listing of a segment server is cut")
        length, *status = _LISTED.unpack_from(text, at)
        at += _LISTED.size
        if length > len(text) - at:
            raise WireError("a listing of a segment server is cut")
        yield text[at : at + length].decode("ascii", "replace"), Status(*status)
        at += length


def as_stat(status: Status, uid: int) -> os.stat_result:
    """The status as `os.stat` would have it, for a user who knows the owner as `uid`."""
    seconds = status.changed_ns / 1e9
    ten = (status.mode, status.inode, status.device, 1, uid, 0, status.nbytes, seconds, seconds, seconds)
    return os.stat_result(ten, {"st_blocks": status.blocks, "st_mtime_ns": status.changed_ns})
