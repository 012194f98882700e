"""Where each byte of a producer's segments lies. All offsets in bytes, all words 64-bit.

The sequence table, one per producer (`/shmtensor.<channel>,<uid>`):

    0        magic  version  uid  capacity  order_size  history  device  written once, magic last
    128      published                                                    producer; pairs with the readers' check
    192      closed   rings                                               producer
    4096     members: capacity x (start, start_uid)                       producer
             finished: capacity x uid                                     word r: the receiver at member index r
             order: order_size x (ring << 32 | slot)                      producer

A ring, any number per producer (`/shmtensor.<channel>,<uid>,<k>`):

    0        magic  version  uid  kind  index  slots  slot_bytes  capacity     written once, magic last
    64       device                                                            1: the data lie in device memory
    72       freed                                                        producer: it frees the device memory
    128      identity of the device, 64 bytes   handle of the memory, 64  producer, before its table names the ring
    2048     mapped: 256 x uid                                            word r: the receiver at member index r
    4096     records: slots x 256                                         producer
             state, fan-out: capacity rows x slots words                  row r: the receiver at member index r;
                                                                          a group's row: holder of its lock for seq;
                                                                          the producer's own row: producer (rpc/)
             state, work queue: slots x (claimed, done, released, attempt,     holder of lock(seq)
                                         note, deadline,                       producer (rpc/)
                                         verdict, -)                           holder of lock(seq) (rpc/)
             data: slots x slot_bytes, page aligned          producer; receivers of a fan-out map it read-only
             data of a device ring: slots x DEVICE_SLOT      handle of the slot's event, 64 bytes; then, of a message
                                                             with SPILLED, its description. The payload: slot x
                                                             slot_bytes from the start of the device memory
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..errors import WireError
from ..memory.segment import PAGE
from ..wire.record import SIZE as RECORD

HEADER: Final = 4096
SEQUENCE_TABLE_MAGIC: Final = int.from_bytes(b"SHMTLEDG", "little")
RING_MAGIC: Final = int.from_bytes(b"SHMTRING", "little")
VERSION: Final = 1

FAN_OUT: Final = 1
WORK_QUEUE: Final = 2
SERVICE: Final = 3
"""A kind of channel, not of rings: a work queue whose messages are requests. Its rings have the kind `WORK_QUEUE`."""
KINDS: Final = {
    FAN_OUT: "fan-out (Publisher, Subscriber)",
    WORK_QUEUE: "work queue (Producer, Consumer)",
    SERVICE: "service (Client, Server)",
}

# word indices in a sequence table
L_MAGIC, L_VERSION, L_UID, L_CAPACITY, L_ORDER, L_HISTORY, L_DEVICE = range(7)
L_PUBLISHED: Final = 16
MOST_MESSAGES: Final = 1 << 56  # of a producer: some words hold a byte of other data beside the number
# a word of a fan-out's row: 2 * seq while it is leased, 2 * seq + 1 when it is given back; of a group's row, above
# those bits, the number of the attempt, or `GROUP_DONE`
LEASE: Final = (1 << 57) - 1
ATTEMPT_SHIFT: Final = 57
GROUP_DONE: Final = 127
# lock bytes of a group's claims, in the file of the sequence table: (member index of the group + 1) << 54 | seq
GROUP_LOCK_SHIFT: Final = 54
L_CLOSED: Final = 24
L_RINGS: Final = 25
L_MEMBERS: Final = HEADER // 8

# word indices in a ring
R_MAGIC, R_VERSION, R_UID, R_KIND, R_INDEX, R_SLOTS, R_SLOT_BYTES, R_CAPACITY, R_DEVICE, R_FREED = range(10)
R_MAPPED: Final = 256
# byte offsets in a device ring's header, and of its slots in the segment
IDENTITY_AT: Final = 128
HANDLE_AT: Final = 192
HANDLE: Final = 64
DEVICE_SLOT: Final = 64 << 10
DEVICE_BLOCK: Final = 2 << 20
R_RECORDS: Final = HEADER // 8
RECORD_WORDS: Final = RECORD // 8
CLAIMED, DONE, RELEASED, ATTEMPT, NOTE, DEADLINE, VERDICT = range(7)
STATE_WORDS: Final = 8

MAX_RINGS: Final = 255
MAX_SLOTS: Final = 1 << 20
MAX_SLOT_BYTES: Final = 1 << 44
MAX_RING_BYTES: Final = 1 << 62  # of a file, whose size is a signed word
MAX_DEVICE_SLOTS: Final = 256
MAX_DEVICE_MEMBERS: Final = 256


@dataclass(frozen=True)
class SequenceTableShape:
    """Word offsets of a sequence table, from its capacity (members) and order size (a power of two)."""

    capacity: int
    order_size: int

    def __post_init__(self) -> None:
        if not (1 <= self.capacity <= 4096 and 1 <= self.order_size <= 1 << 24):
            raise WireError(f"sequences for {self.capacity} members with {self.order_size} order entries")
        if self.order_size & (self.order_size - 1):
            raise WireError(f"sequences order size {self.order_size} is not a power of two")

    @functools.cached_property
    def finished(self) -> int:
        return L_MEMBERS + 2 * self.capacity

    @functools.cached_property
    def order(self) -> int:
        return self.finished + self.capacity

    @property
    def nbytes(self) -> int:
        return 8 * (self.order + self.order_size)


@dataclass(frozen=True)
class RingShape:
    """Offsets of a ring, from its kind, slots, bytes per slot and member capacity."""

    kind: int
    slots: int
    slot_bytes: int
    capacity: int
    device: bool = False

    def __post_init__(self) -> None:
        if self.kind not in (FAN_OUT, WORK_QUEUE):
            raise WireError(f"ring of unknown kind {self.kind}")
        if not (
            1 <= self.slots <= MAX_SLOTS and 64 <= self.slot_bytes <= MAX_SLOT_BYTES and 1 <= self.capacity <= 4096
        ):
            raise WireError(f"ring of {self.slots} slots of {self.slot_bytes} bytes for {self.capacity} members")
        if self.slot_bytes % 64:
            raise WireError(f"ring with slots of {self.slot_bytes} bytes, not a multiple of 64")
        if self.device and (self.slots > MAX_DEVICE_SLOTS or self.capacity > MAX_DEVICE_MEMBERS):
            raise WireError(f"device ring of {self.slots} slots for {self.capacity} members")

    @functools.cached_property
    def row(self) -> int:
        """Words of one receiver's row; rows do not share cache lines."""
        return (self.slots + 7) & -8

    @functools.cached_property
    def state(self) -> int:
        """Word index of the state area."""
        return R_RECORDS + self.slots * RECORD_WORDS

    @property
    def data(self) -> int:
        """Byte offset of slot 0."""
        words = self.capacity * self.row if self.kind == FAN_OUT else STATE_WORDS * self.slots
        return (8 * (self.state + words) + PAGE - 1) & -PAGE

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.data + self.slots * (DEVICE_SLOT if self.device else self.slot_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: whole blocks, the unit in which the driver shares memory between processes."""
        return -(-self.slots * self.slot_bytes // DEVICE_BLOCK) * DEVICE_BLOCK if self.device else 0


class Slots(Protocol):
    """A ring or its shape: where the words of its slots are."""

    @property
    def state(self) -> int: ...
    @property
    def row(self) -> int: ...


def record_word(slot: int) -> int:
    """Index of the first word of a slot's record: its `seq`."""
    return R_RECORDS + slot * RECORD_WORDS


def state_word(ring: Slots, slot: int) -> int:
    """Work queue: index of the first state word of a slot."""
    return ring.state + STATE_WORDS * slot


def lease_word(ring: Slots, member: int, slot: int) -> int:
    """Fan-out: index of a member's word for a slot."""
    return ring.state + member * ring.row + slot


class OtherVersion(WireError):
    """The data of a sender were written by another version of the library: none of them can be read."""


def check_version(what: str, version: int, known: int = VERSION) -> None:
    """Raise `OtherVersion` unless a sequence table, a ring or a record has the version that this library reads."""
    if version != known:
        raise OtherVersion(
            f"{what} has layout version {version}, this library reads {known}: use the same version everywhere"
        )


_table_shape = functools.lru_cache(64)(SequenceTableShape)
_ring_shape = functools.lru_cache(64)(RingShape)


def table_shape(name: str, words: Sequence[int], uid: int) -> SequenceTableShape:
    """The shape of a sequence table, from its first words. Raises `WireError` unless it is that of producer `uid`."""
    if words[L_MAGIC] == SEQUENCE_TABLE_MAGIC:
        check_version(f"sequences {name}", words[L_VERSION])
        if words[L_UID] == uid:
            return _table_shape(words[L_CAPACITY], words[L_ORDER])
    raise WireError(f"segment {name} is not the sequence table of producer {uid:016x}")


def ring_shape(name: str, words: Sequence[int], uid: int, index: int | None, kind: int) -> RingShape:
    """The shape of a ring, from its first words. Raises `WireError` unless it is ring `index` of producer `uid`.

    `index`: None if any of its rings will do.
    """
    if words[R_MAGIC] != RING_MAGIC:
        raise WireError(f"segment {name} is not a ring")
    check_version(f"ring {name}", words[R_VERSION])
    if (words[R_UID], words[R_KIND]) != (uid, kind) or index not in (None, words[R_INDEX]):
        raise WireError(f"ring {name} is not {'a ring' if index is None else f'ring {index}'} of producer {uid:016x}")
    return _ring_shape(kind, words[R_SLOTS], words[R_SLOT_BYTES], words[R_CAPACITY], words[R_DEVICE] == 1)


def round_slot(nbytes: int) -> int:
    """Round `nbytes` up to the bytes of a slot: to pages for large messages, to cache lines for small ones."""
    step = 64 if nbytes <= PAGE // 2 else PAGE
    return max(64, (nbytes + step - 1) // step * step)
