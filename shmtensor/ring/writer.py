"""The sending end of one producer: free slots, records, publication. The reference for `native/writer.c`.

    slot:   FREE -> acquire -> WRITING -> publish -> PUBLISHED -> every receiver has given it back -> FREE
                            -> lend -> its array dies -> FREE

docs/internals/core.md says what each call does, and who writes which word.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..memory.words import store
from ..wire.record import BODY, BODY_OFFSET, INLINE_OFFSET, SIZE, SPILLED, VERSION
from .events import SEND, EventLog
from .layout import (
    ATTEMPT_SHIFT,
    DEADLINE,
    DONE,
    GROUP_DONE,
    L_PUBLISHED,
    LEASE,
    MAX_SLOT_BYTES,
    NOTE,
    RELEASED,
    VERDICT,
    lease_word,
    state_word,
)

if TYPE_CHECKING:
    import weakref

    from .ring import Ring, SequenceTable

SlotRange = tuple["Ring", int]
"""A ring, and the first slot in it of a message."""

_FEW: Final = 4
"""Busy slots of a ring that are checked before other rings are tried."""

Registration = tuple[int, int, dict[int, Any] | None, Any]
"""What is stored with a message (rpc/endpoints.py): note, deadline, and a table with the entry to add to it.

The entry is added under the message's number before the message is visible; its `words`, `at` and `seq` are set to the
words of the message's slot, their index, and the number."""


class _InFlight:
    """A message in the producer's slots, or one that is being written there.

    seq:      0: not published yet
    waits:    fan-out: a bit for each receiver that is not known to have given it back
    lockable: fan-out: a receiver may hold it by a shared lock on byte `seq`
    array:    a weak reference to what a loan's owner, or a device, can still write to
    judged:   work queue: the sender has read its verdict
    """

    __slots__ = ("array", "first", "judged", "lockable", "seq", "span", "waits")

    def __init__(self, first: int, span: int) -> None:
        self.first, self.span, self.seq, self.waits = first, span, 0, 0
        self.lockable = self.judged = False
        self.array: weakref.ref[Any] | None = None

    @property
    def lent(self) -> bool:
        return self.array is not None and self.array() is not None


class Writer:
    """The writer of one sender, which calls it from one thread at a time."""

    def __init__(
        self, *, sequences: SequenceTable, member: int, competing: bool, history: int, checks_verdicts: bool,
        encode: Callable[[Any, Any], Any],
    ) -> None:  # fmt: skip
        """
        member:         index of the producer: its own row of a fan-out's lease words holds the notes
        competing:      True for a work queue, False for a fan-out
        history:        how many of the newest messages are kept for receivers that join later
        checks_verdicts: work queue: a slot whose verdict names its message is not reused before `judge`
        """
        self._sequences, self._words, self._member, self._encode = sequences, sequences.words, member, encode
        self._competing, self._checks_verdicts, self.history = competing, checks_verdicts, history
        self.rings: list[Ring] = []
        self._in_flight: dict[int, list[_InFlight | None]] = {}  # by ring and slot
        self._cursors: dict[int, int] = {}
        self._last = 0  # the ring that was used last
        self._recipients = self._leaving = 0
        self._lockable = False
        self.sent_bytes = self.notified = 0
        self._events: EventLog | None = None
        self._begun = self._found = 0
        """When a traced message began to look for slots; when it had them, if it `_waited`."""
        self._waited = False

    def send(self, value: Any, meta: Any, patience: int, *registration: Any) -> Any:
        """Encode the value; the endpoint does the rest."""
        return self._encode(value, meta)

    def add_ring(self, ring: Ring) -> None:
        """Use that ring for messages as well."""
        self._in_flight[ring.index], self._cursors[ring.index] = [None] * ring.slots, 0
        self.rings.append(ring)

    # --- what a tracer sees

    def trace(self, log: EventLog | None) -> None:
        """Write events there from now on; None: none."""
        if log is None:
            self._begun, self._found, self._waited = 0, 0, False
        self._events = log

    def seek(self) -> None:
        """Note, for the trace, that the endpoint begins to look for slots for a message.

        The compiled writer does nothing if its `send` has already noted that for the message."""
        self._begun = time.monotonic_ns()

    def _note_search(self, has_found: bool) -> None:
        """Note, for the trace, the end of a search for slots."""
        if not self._begun:  # a loan's
            self._begun = time.monotonic_ns()
        if not has_found:
            self._waited = True
        elif self._waited:
            self._found = time.monotonic_ns()

    def _note_sent(self, log: EventLog, ring: Ring, slot: int, seq: int, nbytes: int) -> None:
        """A message was published: its record has the time."""
        end = ring.sent_ns[slot]
        begun = self._begun or end
        log.add(SEND, seq, log.member, begun, self._found or begun, end, nbytes)
        self._begun, self._found, self._waited = 0, 0, False

    # --- members

    def address(
        self, recipients: Iterable[int], leaving: Iterable[int], lockable: bool, listeners: Sequence[Any],
        asleep: Sequence[int], groups: Sequence[int], epoch: int,
    ) -> None:  # fmt: skip
        """Set the receivers of the messages that are published from now on.

        recipients: members whose lease words count
        leaving:    those of them that take no more messages
        lockable:   fan-out: there is history, or a receiver that takes the newest only

        The others are for the compiled `send`: the peers to wake, their `asleep` words, the uids of their groups (one
        of each is woken; 0: in none), and the epoch of this table.
        """
        self._recipients, self._leaving, self._lockable = _bits(recipients), _bits(leaving), lockable

    def retire(self) -> None:
        """Leave every message to the endpoint from now on. The reference always does."""

    def release(self) -> None:
        """Drop the rings: the sender has left. Loans and messages that are not given back keep their memory."""
        self.rings.clear()
        self._in_flight.clear()
        self._cursors.clear()

    def forget(self, member: int) -> None:
        """A receiver has left or died: no message waits for it any more."""
        keep = ~(1 << member)
        self._recipients &= keep
        self._leaving &= keep
        for _, message in self._all():
            message.waits &= keep

    def welcome(self, member: int, start: int) -> None:
        """Fan-out with history: the kept messages, from `start` on, wait for this receiver as well."""
        for _, message in self._all():
            if message.seq >= start:
                message.waits |= 1 << member

    # --- slots

    def acquire(self, nbytes: int, least: int = 0, most: int = MAX_SLOT_BYTES) -> SlotRange | None:
        """Find consecutive free slots, in the ring that fits best of those with slots of `least` to `most` bytes.

        Until they are published or lent, they count as free for the next call.
        """
        # a message that latest-only receivers may still take is dropped only if a newer one replaces it
        if self._lockable and not self.has_room(nbytes, least, most):
            return None
        place = self._search(nbytes, least, most, look=False)
        if self._events is not None:
            self._note_search(place is not None)
        if place is not None:
            (ring, slot), span = place, place[0].span(nbytes)
            self._last = ring.index
            self._in_flight[ring.index][slot : slot + span] = [_InFlight(slot, span)] * span
            store(ring.seqs, slot, 0)  # no receiver may take the old record for a new one
        return place

    def has_room(self, nbytes: int, least: int = 0, most: int = MAX_SLOT_BYTES) -> bool:
        """Whether `acquire` would find slots. Takes nothing back."""
        return self._search(nbytes, least, most, look=True) is not None

    def _search(self, nbytes: int, least: int, most: int, *, look: bool) -> SlotRange | None:
        """Search the rings for consecutive free slots. Most of several rings may be full: all slots are checked only if
        the first ones are busy in the ring that fits best, and in an equally good ring that was used last."""
        rings = self._fitting(nbytes, least, most)
        tries = [(ring, sys.maxsize) for ring in rings]
        if len(rings) > 1:
            last = self.rings[self._last]
            if last is not rings[0] and last.slot_bytes == rings[0].slot_bytes:
                tries.insert(0, (last, _FEW))
            tries.insert(0, (rings[0], _FEW))
        for ring, busy in tries:
            slot = self._find(ring, ring.span(nbytes), look, busy)
            if slot >= 0:
                return ring, slot
        return None

    def lend(self, ring: int, slot: int, array: weakref.ref[Any]) -> None:
        """Keep acquired slots while this array lives, before and after the message is published."""
        self._acquired(ring, slot).array = array

    def publish(
        self, ring: int, slot: int, description: bytes, nbytes: int, spilled: bool, array: Any, *registration: Any
    ) -> int:
        """Store record, order entry and `published`, in this order: a death before the last leaves nothing visible.

        `spilled`: the description lies behind the payload. `array`: a weak reference to the memory to which a loan's
        owner may still write, or None. Returns the sequence number.
        """
        place, words = self.rings[ring], self._words
        seq, message = words[L_PUBLISHED] + 1, self._acquired(ring, slot)
        if array is not None:
            message.array = array
        try:
            if registration:
                self._enter(place, slot, seq, *registration)
            at = place.records + slot * SIZE
            place.view[at + BODY_OFFSET : at + INLINE_OFFSET] = BODY.pack(
                time.monotonic_ns(),
                VERSION,
                SPILLED if spilled else 0,
                ring,
                slot,
                message.span,
                len(description),
                0,
                nbytes,
            )
            if not spilled:
                place.view[at + INLINE_OFFSET : at + INLINE_OFFSET + len(description)] = description
            # crash: publish.record
            store(place.seqs, slot, seq)
            store(words, self._sequences.order + (seq & self._sequences.mask), ring << 32 | slot)
            # crash: publish.ordered
            message.waits, message.lockable, message.seq = self._recipients, self._lockable, seq
            store(words, L_PUBLISHED, seq)  # pairs with the position check of the receivers' readers
        except BaseException:
            if words[L_PUBLISHED] < seq:  # no receiver may find the record: another message will get its number
                store(place.seqs, slot, 0)
                message.seq = 0
                if registration and registration[2] is not None:
                    registration[3].seq = 0
                    registration[2].pop(seq, None)
            raise
        self.sent_bytes += nbytes
        # crash: publish.published
        if self._events is not None:
            self._note_sent(self._events, place, slot, seq, nbytes)
        return seq

    def _enter(self, ring: Ring, slot: int, seq: int, note: int, deadline: int, table: Any, entry: Any) -> None:
        """Store what goes with a message: see `Registration`."""
        if not self._competing:
            store(ring.words, lease_word(ring, self._member, slot), note)  # the sender's own row: no receiver's
            # crash: publish.noted
            return
        at = state_word(ring, slot)
        if table is not None:
            entry.words, entry.at, entry.seq = ring.words, at, seq
            table[seq] = entry
        store(ring.words, at + DEADLINE, deadline)
        store(ring.words, at + NOTE, seq << 8 | note)
        # crash: publish.noted

    # --- events and queries

    def messages(self) -> list[tuple[Ring, int, int, int]]:
        """(ring, slot, seq, span) of every message that is published and not known to be given back."""
        return [(ring, message.first, message.seq, message.span) for ring, message in self._all() if message.seq]

    def judge(self, ring: int, slot: int) -> None:
        """Note that the sender has read the verdict on the message there: its slot may be used again."""
        self._acquired(ring, slot).judged = True

    def reclaim(self) -> bool:
        """Work queue: free the slots of messages that are done and whose consumer died before it released them.

        Returns whether there were any.
        """
        freed = False
        for ring, message in list(self._all()):
            if not message.seq or message.lent or self._is_unjudged(ring, message):
                continue
            # `done` before the lock: the other way round, it could be claimed, and done with views alive, in between
            done = ring.words[state_word(ring, message.first) + DONE] == message.seq
            if done and not self._sequences.locks.held_by_other(message.seq):
                self._forget(ring.index, message)
                freed = True
        return freed

    def is_settled(self, local: Iterable[int]) -> bool:
        """Whether every message is done (work queue, group), or taken by all members but `local` ones (fan-out)."""
        uncounted = self._leaving | _bits(local)
        for ring, message in self._all():
            if self._competing:
                if message.seq and ring.words[state_word(ring, message.first) + DONE] != message.seq:
                    return False
                continue
            for member in _members(message.waits & ~uncounted):
                word = ring.words[lease_word(ring, member, message.first)]
                if word & LEASE < 2 * message.seq or 0 < word >> ATTEMPT_SHIFT < GROUP_DONE:
                    return False
        return True

    def free_slots(self, ring: int) -> int:
        """How many slots of that ring are free now."""
        messages, mapped = self._in_flight[ring], self.rings[ring]
        return sum(message is None or self._is_free(mapped, message, look=True) for message in messages)

    def oldest(self) -> int:
        """The message in the slot of the newest ring that is tried next; 0: none, or one that locks may hold."""
        newest = len(self.rings) - 1
        message = self._in_flight[newest][self._cursors[newest]] if self.rings else None
        return 0 if message is None or self._lockable else message.seq

    @property
    def busy(self) -> int:
        """How many slots have messages that are still needed."""
        used = [(ring, message) for ring, message in self._all() if message.seq or message.lent]
        return sum(message.span for ring, message in used if not self._is_free(ring, message, look=True))

    # --- which slots are free

    def _acquired(self, ring: int, slot: int) -> _InFlight:
        message = self._in_flight[ring][slot]
        if message is None or message.first != slot:
            raise ValueError("no slot that was acquired")
        return message

    def _all(self) -> Iterator[tuple[Ring, _InFlight]]:
        for ring in self.rings:
            for slot, message in enumerate(self._in_flight[ring.index]):
                if message is not None and message.first == slot:
                    yield ring, message

    def _fitting(self, nbytes: int, least: int, most: int) -> list[Ring]:
        """The rings with slots of such sizes that can hold a message, the one that fits best first."""
        order = []
        for ring in self.rings:
            span = ring.span(nbytes)
            # with history each message takes one slot, so that one stays free
            if least <= ring.slot_bytes <= most and (span == 1 or (span <= ring.slots and not self.history)):
                order.append((ring.slot_bytes < nbytes, abs(ring.slot_bytes - nbytes), ring.index))
        return [self.rings[index] for _, _, index in sorted(order)]

    def _is_free(self, ring: Ring, message: _InFlight, look: bool) -> bool:
        """Whether a message's slots may be used again.

        A message that receivers may hold by a shared lock is taken back, from those that have not taken it yet; with
        `look` it is not, and only whether that is possible is returned.
        """
        seq, slot, words = message.seq, message.first, ring.words
        if message.lent:
            return False
        if not seq:
            return True
        if self._competing:
            at = state_word(ring, slot)
            return words[at + RELEASED] == seq and not self._is_unjudged(ring, message)
        for member in _members(message.waits):
            word = words[lease_word(ring, member, slot)]  # pairs with the store that ends a lease
            if word != 2 * seq + 1 and (word & LEASE == 2 * seq or not self._leaving >> member & 1):
                return False
            message.waits &= ~(1 << member)
        if self.history and seq > self._words[L_PUBLISHED] - self.history:
            return False
        if not message.lockable:
            return True
        locks = self._sequences.locks
        if look:
            return not locks.held_by_other(seq)
        if not locks.try_exclusive(seq):
            return False
        store(ring.seqs, slot, 0)  # under the lock: a receiver that locks it next finds no message
        # crash: takeback.cleared
        locks.unlock(seq)
        return True

    def _is_unjudged(self, ring: Ring, message: _InFlight) -> bool:
        """Work queue: whether the sender has yet to read the verdict on a message."""
        if not self._checks_verdicts or message.judged:
            return False
        return ring.words[state_word(ring, message.first) + VERDICT] >> 8 == message.seq

    def _first_look(self, ring: Ring) -> int:
        """The slot at which a search begins: slot 0 if it is free, else the one after the last used.

        If receivers keep up, few slots are used, which stay in the caches. If messages can be taken back, the oldest
        comes first.
        """
        message = self._in_flight[ring.index][0]
        if message is None or (not message.lockable and self._is_free(ring, message, look=True)):
            return 0
        return self._cursors[ring.index]

    def _find(self, ring: Ring, span: int, look: bool, busy: int) -> int:
        """The first of `span` consecutive free slots from `_first_look` on, wrapping once, after at most so many busy
        ones; -1 if there are none."""
        messages, slots = self._in_flight[ring.index], ring.slots
        run, slot = 0, self._first_look(ring)
        if slot + span > slots:
            slot = 0
        for _ in range(slots + span):
            if slot == slots:
                slot = run = 0
            message = messages[slot]
            if message is not None:
                if not self._is_free(ring, message, look):
                    if not busy:
                        break
                    run, slot, busy = 0, slot + 1, busy - 1
                    continue
                if not look:
                    self._forget(ring.index, message)
            run, slot = run + 1, slot + 1
            if run == span:
                if not look:
                    self._cursors[ring.index] = slot if slot < slots else 0
                return slot - span
        return -1

    def _forget(self, index: int, message: _InFlight) -> None:
        self._in_flight[index][message.first : message.first + message.span] = [None] * message.span


def _bits(members: Iterable[int]) -> int:
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
