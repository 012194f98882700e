"""Read the messages of a channel from outside, without taking any, holding a slot, or joining.

What was read may have been overwritten meanwhile, so each part is checked after it was read:

- The record, with structure, scalars, dtypes, shapes and meta: its sequence number is the same before and after. A
  sender stores 0 there before it writes the next record.
- The payload, for the digest, the values of NumPy scalars, and a description that lies behind it: besides, the message
  is known to be needed still, so that its sender may not reuse its slots (a receiver has not given it back, or it is
  kept by `history=`); or no message can have begun in its slots or in those before them. Else there is no digest, and
  no such value. Consumers, servers, and clients that received a reply, may write to a value: there, only messages that
  no receiver has taken have a digest.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

from ..channel import control as ctl
from ..channel.control import Control
from ..channel.inspect import Inspector, is_of_replies
from ..channel.names import control_name, ring_name, sequence_table_name
from ..codec.outline import Outline
from ..errors import WireError
from ..memory import segment as shm
from ..memory.words import barrier
from ..ring import layout as lay
from ..wire.record import INLINE_OFFSET, SIZE, SPILLED, check_head, padded, unpack_constant

_CHUNK: Final = 1 << 20
_SCALARS: Final = 1000
"""NumPy scalars of a message whose values are read, at most: each is a read of its own."""
_LIST_S: Final = 0.25
"""Seconds between two looks at the table of members."""


@dataclass(frozen=True)
class Seen:
    """A message that was read."""

    sender: int
    """The uid of the member that sent it."""
    pid: int
    seq: int
    sent_ns: int
    """On CLOCK_MONOTONIC."""
    nbytes: int
    value: Any
    """An outline of the value: `codec/outline.py`."""
    meta: Any
    digest: str | None
    """xxh3 (64 bits, hexadecimal) of the bytes of all leaves; None if they may have been overwritten meanwhile."""
    missed: int
    """Messages of this sender before it that could not be read in time."""


@dataclass
class _Sender:
    uid: int
    pid: int
    table: shm.Glance
    shape: lay.SequenceTableShape
    history: int
    position: int
    missed: int = 0
    rings: dict[int, _Ring] = field(default_factory=dict)

    def published(self) -> int:
        return self.table.read(lay.L_PUBLISHED, 1)[0]

    def close_rings(self) -> None:
        while self.rings:
            self.rings.popitem()[1].source.close()


@dataclass(frozen=True)
class _Ring:
    source: shm.Glance
    shape: lay.RingShape


class Messages:
    """Follows a channel: first the messages that are needed still, then each new one that can be read in time.

    Raises `FileNotFoundError` if there is no channel, `ResourceError` or `WireError` if it cannot be read.
    """

    def __init__(self, channel: str, *, digests: bool = True) -> None:
        self._channel, self._digests = channel, digests
        self._senders: dict[int, _Sender] = {}
        self._listed = 0.0
        info = Inspector(messages=True).channel(channel)
        needed: dict[int, int] = {}
        for it in info.held if info is not None else ():
            needed[it.sender] = min(needed.get(it.sender, it.seq), it.seq)
        self._control = shm.look_at(control_name(channel))
        try:
            if self._control.nbytes != Control.nbytes():
                raise WireError(f"segment {self._control.name} is not a control segment of this version")
            head = self._control.read(0, 8)
            if head[ctl.W_MAGIC] != ctl.MAGIC or head[ctl.W_VERSION] != ctl.VERSION:
                raise WireError(f"segment {self._control.name} is not a control segment of this version")
            self._kind = ctl.ring_kind(head[ctl.W_KIND])
            self._is_writable = is_of_replies(channel)
            self._list(needed)
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the channel has ended, or was created anew."""
        info = shm.status(control_name(self._channel))
        return info is None or not os.path.samestat(info, self._control.info)

    def close(self) -> None:
        """Close what is open. Idempotent."""
        self._control.close()
        for sender in self._senders.values():
            sender.close_rings()
            sender.table.close()
        self._senders.clear()

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new(self) -> list[Seen]:
        """The messages since the last call that can be read, the oldest first."""
        if time.monotonic() - self._listed >= _LIST_S:
            self._list({})
        found: list[Seen] = []
        for sender in self._senders.values():
            try:
                found += self._read_new(sender)
            except (OSError, WireError):
                pass  # it is gone: the next list is without it
            finally:
                sender.close_rings()
        return sorted(found, key=lambda it: it.sent_ns)

    def _list(self, needed: dict[int, int]) -> None:
        """Find the senders. `needed`: the first message to read of each; by default the next one of a known sender."""
        first = not self._listed
        self._listed = time.monotonic()
        words, members = self._control.read(0, Control.nbytes() // 8), set()
        for index in range(ctl.CAPACITY):
            at = ctl.base(index)
            if words[at] and words[at + ctl.M_ROLE] == ctl.SENDER and self._control.read(at, 1)[0] == words[at]:
                members.add(words[at])
                if words[at] not in self._senders:
                    with contextlib.suppress(OSError, WireError):
                        sender = self._open(words[at], words[at + ctl.M_PID])
                        if first:
                            sender.position = max(sender.position, needed.get(sender.uid, sender.published() + 1) - 1)
                        self._senders[sender.uid] = sender
        for uid in self._senders.keys() - members:
            self._senders.pop(uid).table.close()

    def _open(self, uid: int, pid: int) -> _Sender:
        table = shm.look_at(sequence_table_name(self._channel, uid))
        words = table.read(0, lay.L_MEMBERS)
        shape = lay.table_shape(table.name, words, uid)
        return _Sender(uid, pid, table, shape, words[lay.L_HISTORY], 0)

    def _read_new(self, sender: _Sender) -> Iterator[Seen]:
        published = sender.published()
        if published >= lay.MOST_MESSAGES:
            raise WireError("the sequence table is damaged")
        oldest = max(sender.position, published - sender.shape.order_size + 1)
        sender.missed += oldest - sender.position
        sender.position = oldest
        while sender.position < published:
            sender.position += 1
            try:
                seen = self._read(sender, sender.position)
            except (OSError, WireError):
                seen = None  # damaged, or overwritten while it was read
            if seen is None:
                sender.missed += 1
            else:
                sender.missed = 0
                yield seen

    def _ring(self, sender: _Sender, index: int) -> _Ring:
        ring = sender.rings.get(index)
        if ring is None:
            source = shm.look_at(ring_name(self._channel, sender.uid, index))
            head = source.read(0, lay.R_DEVICE + 1)
            shape = lay.ring_shape(source.name, head, sender.uid, index, self._kind)
            ring = sender.rings[index] = _Ring(source, shape)
        return ring

    def _read(self, sender: _Sender, seq: int) -> Seen | None:
        """Message `seq`; None if it was overwritten before it was read."""
        entry = sender.table.read(sender.shape.order + seq % sender.shape.order_size, 1)[0]
        index, slot = entry >> 32, entry & 0xFFFFFFFF
        ring = self._ring(sender, index)
        shape, source = ring.shape, ring.source
        if slot >= shape.slots:
            raise WireError(f"order entry of message {seq} names slot {slot} of {shape.slots}")
        raw = source.read_bytes(lay.HEADER + SIZE * slot, SIZE)
        if int.from_bytes(raw[:8], "little") != seq:
            return None
        head = unpack_constant(raw, 16)
        room = shape.slot_bytes + shape.device * lay.DEVICE_SLOT
        check_head(head, index, slot, shape.slots, room)
        _, flags, _, _, span, length, _, nbytes = head
        if not flags & SPILLED:
            description = raw[INLINE_OFFSET : INLINE_OFFSET + length]
        elif shape.device:
            description = source.read_bytes(shape.data + slot * lay.DEVICE_SLOT + lay.HANDLE, length)
        else:
            description = source.read_bytes(shape.data + slot * shape.slot_bytes + padded(nbytes), length)
        if not self._holds(ring, slot, seq):
            return None
        try:
            outline = Outline(description)
        except WireError:
            if flags & SPILLED and not self._is_whole(sender, ring, slot, span, seq):
                return None
            raise
        digest, scalars = None, []
        if not shape.device:
            at = shape.data + slot * shape.slot_bytes
            scalars = self._scalars(source, at, nbytes, outline)
            digest = self._digest(source, at, nbytes, outline) if self._digests else None
        if (flags & SPILLED or digest is not None or scalars) and not self._is_whole(sender, ring, slot, span, seq):
            digest, scalars = None, []
            if flags & SPILLED:
                return None
        for scalar, data in zip(outline.scalars, scalars, strict=False):
            scalar.hold(data)
        sent = int.from_bytes(raw[8:16], "little")
        return Seen(
            sender.uid, sender.pid, seq, sent, nbytes, outline.value, outline.meta, digest, sender.missed
        )  # fmt: skip

    @staticmethod
    def _scalars(source: shm.Glance, at: int, nbytes: int, outline: Outline) -> list[bytes]:
        """The bytes of the first NumPy scalars."""
        found = []
        for it in outline.scalars[:_SCALARS]:
            if it.offset + it.dtype.itemsize > nbytes:
                raise WireError(f"payload has {nbytes} bytes, the message needs {it.offset + it.dtype.itemsize}")
            found.append(source.read_bytes(at + it.offset, it.dtype.itemsize))
        return found

    @staticmethod
    def _digest(source: shm.Glance, at: int, nbytes: int, outline: Outline) -> str:
        found = xxhash.xxh3_64()
        for start, end in outline.extents():
            if end > nbytes:
                raise WireError(f"payload has {nbytes} bytes, the message needs {end}")
            while start < end:
                count = min(_CHUNK, end - start)
                found.update(source.read_bytes(at + start, count))
                start += count
        return found.hexdigest()

    @staticmethod
    def _holds(ring: _Ring, slot: int, seq: int) -> bool:
        """Whether a slot still holds the record that was read. The barrier: what its sender stored before is seen."""
        barrier()
        return ring.source.read(lay.record_word(slot), 1)[0] == seq

    def _is_whole(self, sender: _Sender, ring: _Ring, slot: int, span: int, seq: int) -> bool:
        """Whether the payload that was read is known to be that of message `seq`."""
        if self._kind == lay.WORK_QUEUE:
            state = ring.source.read(lay.state_word(ring.shape, slot), lay.STATE_WORDS)
            taken = seq in (state[lay.CLAIMED], state[lay.DONE], state[lay.RELEASED])
            return not taken and self._holds(ring, slot, seq)
        is_needed = self._is_needed(sender, ring, slot, seq)
        if is_needed or self._is_writable or not self._holds(ring, slot, seq):
            return is_needed and self._holds(ring, slot, seq)
        words = ring.source.read(lay.R_RECORDS, (slot + span) * lay.RECORD_WORDS)
        others = np.delete(np.frombuffer(words, np.uint64)[:: lay.RECORD_WORDS], slot)
        return bool(((others > 0) & (others < np.uint64(seq))).all())  # 0: being written, perhaps; larger: newer

    def _is_needed(self, sender: _Sender, ring: _Ring, slot: int, seq: int) -> bool:
        """Fan-out: whether the sender may not reuse the slots of a message, and no receiver writes there."""
        if seq > sender.published() - sender.history:
            return True
        words, shape = self._control.read(0, Control.nbytes() // 8), ring.shape
        rows = sender.table.read(lay.L_MEMBERS, 2 * min(sender.shape.capacity, ctl.CAPACITY))
        for index in range(min(len(rows) // 2, shape.capacity)):
            at = ctl.base(index)
            uid = words[at]
            if (
                not uid
                or rows[2 * index + 1] != uid
                or rows[2 * index] > seq
                or words[at + ctl.M_FLAGS] & ctl.NO_RECIPIENT
            ):
                continue
            word = ring.source.read(lay.lease_word(shape, index, slot), 1)[0] & lay.LEASE
            if (
                ((word == 2 * seq and not self._is_writable) or (word < 2 * seq and not words[at + ctl.M_LEAVING]))
                and self._control.is_locked(ctl.LIFE + index)
                and self._control.read(at, 1)[0] == uid
            ):
                return True
        return False
