"""The record of a message, in shared memory; behind a 16-byte envelope it is also the doorbell, on a socket.

A record is 256 bytes, little-endian:

| offset | type | field | meaning |
|---|---|---|---|
| 0 | u64 | `seq` | the message's sequence number, and the slot's generation; 0: no message |
| 8 | u64 | `sent_ns` | CLOCK_MONOTONIC at publication, nanoseconds |
| 16 | u16 | `version` | `VERSION` |
| 18 | u16 | `flags` | bit 0 (`SPILLED`): the description lies behind the payload |
| 20 | u32 | `ring` | number of the ring among its producer's rings |
| 24 | u32 | `slot` | first slot of the message |
| 28 | u32 | `span` | consecutive slots taken |
| 32 | u32 | `length` | bytes of the description (`wire/spec.py`) |
| 36 | u32 | reserved | 0 |
| 40 | u64 | `nbytes` | payload bytes from the start of the first slot |
| 48 | 208 bytes | `inline` | the description, unless `SPILLED` |

A spilled description starts at the first multiple of 64 at or after `nbytes` in the message's slots.

A doorbell is `b"SHMTBELL"`, the producer's uid (u64), then the record as it stands in shared memory (256 bytes).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from ..errors import WireError

VERSION: Final = 2
SIZE: Final = 256
SPILLED: Final = 1
ALIGNMENT: Final = 64

_HEAD = struct.Struct("<QQHHIIIIIQ")
BODY: Final = struct.Struct("<QHHIIIIIQ")
"""The head without `seq`, which is stored on its own, last."""
BODY_OFFSET: Final = 8
CONSTANT_OFFSET: Final = 16
"""Here begins what depends on the message's structure and slot, but not on its number and time."""
INLINE_OFFSET: Final = _HEAD.size
INLINE: Final = SIZE - INLINE_OFFSET

EMPTY_RECORD: Final = bytes(BODY_OFFSET) + BODY.pack(0, VERSION, 0, 0, 0, 1, 0, 0, 0).ljust(SIZE - BODY_OFFSET, b"\0")
"""The record of no message, for a doorbell that makes its receiver check the members."""

_BELL = struct.Struct("<8sQ")
_BELL_MAGIC: Final = b"SHMTBELL"
BELL_HEAD: Final = _BELL.size
BELL_SIZE: Final = BELL_HEAD + SIZE

unpack_head = _HEAD.unpack_from
"""`unpack_head(buffer, offset)` -> the ten fields in the order of the table."""
unpack_constant = struct.Struct("<HHIIIIIQ").unpack_from
"""`unpack_constant(buffer, offset)` -> the eight fields from `version` on."""


class Bell(NamedTuple):
    """A validated doorbell: which producer published which message where."""

    uid: int
    seq: int
    ring: int
    slot: int


def padded(nbytes: int) -> int:
    """The first multiple of 64 at or after `nbytes`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def check_head(head: tuple[int, ...], ring: int, slot: int, slots: int, slot_bytes: int) -> None:
    """Raise `WireError` unless a head (from `version` on) is valid at `slot` of a ring with these sizes."""
    version, flags, its_ring, its_slot, span, length, reserved, nbytes = head
    if version != VERSION:
        raise WireError(f"record version {version}, this library reads {VERSION}")
    if its_ring != ring or its_slot != slot:
        raise WireError(f"record of ring {its_ring} slot {its_slot} stands at ring {ring} slot {slot}")
    if flags & ~SPILLED or reserved:
        raise WireError(f"record has unknown flags {flags:#x}, {reserved:#x}")
    if not 1 <= span <= slots - slot:
        raise WireError(f"record spans {span} slots from slot {slot} of {slots}")
    if not flags and length > INLINE:
        raise WireError(f"inline description of {length} bytes, at most {INLINE} fit")
    end = padded(nbytes) + length if flags else nbytes
    if end > span * slot_bytes:
        raise WireError(f"message of {end} bytes in {span} slots of {slot_bytes} bytes")


def pack_bell(uid: int, record: bytes) -> bytes:
    """The doorbell for a record."""
    return _BELL.pack(_BELL_MAGIC, uid) + record


def parse_bell(data: bytes) -> Bell:
    """Validate a message that arrived in an inbox. Raises `WireError`."""
    if len(data) != BELL_SIZE:
        raise WireError(f"doorbell of {len(data)} bytes, expected {BELL_SIZE}")
    magic, uid = _BELL.unpack_from(data)
    if magic != _BELL_MAGIC:
        raise WireError(f"doorbell starts with {magic!r}")
    seq, _, version, _, ring, slot, *_ = unpack_head(data, _BELL.size)
    if version != VERSION or uid == 0:
        raise WireError(f"doorbell of producer {uid:#x} with record version {version}")
    return Bell(uid, seq, ring, slot)
