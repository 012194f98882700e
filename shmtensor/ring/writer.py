"""The sending end of one producer: free slots, records, publication. The reference of `native/writer.c`.

    slot:   FREE -> acquire -> WRITING -> publish -> PUBLISHED -> every receiver has given it back -> FREE
                            -> lend -> its array dies -> FREE

docs/internals/core.md says what each call does, and who writes which word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..memory.words import store
from ..wire.record import BODY, BODY_OFFSET, INLINE_OFFSET, SIZE, SPILLED, VERSION
from .layout import (
    DEADLINE,
    DONE,
    L_PUBLISHED,
    NOTE,
    R_RECORDS,
    RECORD_WORDS,
    RELEASED,
    STATE_WORDS,
    VERDICT,
)

if TYPE_CHECKING:
    import weakref

    from .ledger import Ledger
    from .ring import Ring

Place = tuple["Ring", int]
"""A ring and a slot of it: the first of those that a message is put into."""

Beside = tuple[int, int, dict[int, Any] | None, Any]
"""What goes beside a message (rpc/notes.py): note, deadline, and the table that an entry is put into under the number
of the message, before anybody can see that. The entry's `words`, `at` and `seq` say where it is."""


class _Flight:
    """A message in the producer's slots, or one that is being written there.

    seq:      0: not published
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
    """Owned by one sender, which calls it from one thread at a time."""

    def __init__(
        self, *, ledger: Ledger, member: int, competing: bool, history: int, heeds_verdicts: bool,
        encode: Callable[[Any, Any], Any],
    ) -> None:  # fmt: skip
        """
        member:         index of the producer: its own row of a fan-out's lease words holds the notes
        competing:      a work queue, else a fan-out
        history:        how many of the newest messages are kept for receivers that join later
        heeds_verdicts: work queue: a slot whose verdict names its message is kept until `judge`
        """
        self._ledger, self._words, self._member, self._encode = ledger, ledger.words, member, encode
        self._competing, self._heeds_verdicts, self.history = competing, heeds_verdicts, history
        self.rings: list[Ring] = []
        self._flights: dict[int, list[_Flight | None]] = {}  # by ring and slot
        self._cursors: dict[int, int] = {}
        self._recipients = self._leaving = 0
        self._lockable = False
        self.sent_bytes = self.notified = 0

    def send(self, value: Any, meta: Any, patience: int, *beside: Any) -> Any:
        """What there is to send; the endpoint does the rest."""
        return self._encode(value, meta)

    def add_ring(self, ring: Ring) -> None:
        """Messages go into that ring, too."""
        self._flights[ring.index], self._cursors[ring.index] = [None] * ring.slots, 0
        self.rings.append(ring)

    # --- members

    def address(
        self, recipients: Iterable[int], leaving: Iterable[int], lockable: bool, listeners: Sequence[Any],
        asleep: Sequence[int], epoch: int,
    ) -> None:  # fmt: skip
        """Who gets what is published from now on.

        recipients: members whose lease words count
        leaving:    of those, who takes nothing more
        lockable:   fan-out: there is history, or a receiver that takes the newest only

        The others are for the compiled `send`: whom to wake, where they sleep, and as of which epoch that holds.
        """
        self._recipients, self._leaving, self._lockable = _bits(recipients), _bits(leaving), lockable

    def retire(self) -> None:
        """Leave every message to the endpoint from now on, as this one does anyhow."""

    def forget(self, member: int) -> None:
        """A receiver has left or died: nothing waits for it any more."""
        keep = ~(1 << member)
        self._recipients &= keep
        self._leaving &= keep
        for _, flight in self._all():
            flight.waits &= keep

    def welcome(self, member: int, start: int) -> None:
        """Fan-out with history: messages that are kept, from `start` on, wait for it as well."""
        for _, flight in self._all():
            if flight.seq >= start:
                flight.waits |= 1 << member

    # --- slots

    def acquire(self, nbytes: int, ring: int = -1) -> Place | None:
        """Consecutive free slots, in that ring or in the one that fits best. Until they are published or lent, they
        count as free for the next call."""
        # receivers of the newest only keep what they may still take, unless a newer message takes its place
        if self._lockable and not self.has_room(nbytes, ring):
            return None
        for index in self._fitting(nbytes) if ring < 0 else (ring,):
            found, span = self.rings[index], self.rings[index].span(nbytes)
            slot = self._find(index, span, look=False)
            if slot >= 0:
                self._flights[index][slot : slot + span] = [_Flight(slot, span)] * span
                store(found.words, R_RECORDS + slot * RECORD_WORDS, 0)  # nobody may take the old record for a new one
                return found, slot
        return None

    def has_room(self, nbytes: int, ring: int = -1) -> bool:
        """Whether `acquire` would find some. Takes nothing back."""
        return any(
            self._find(index, self.rings[index].span(nbytes), look=True) >= 0
            for index in (self._fitting(nbytes) if ring < 0 else (ring,))
        )

    def lend(self, ring: int, slot: int, array: weakref.ref[Any]) -> None:
        """Acquired slots belong to whoever has this array, before and after the message is published."""
        self._acquired(ring, slot).array = array

    def publish(
        self, ring: int, slot: int, description: bytes, nbytes: int, spilled: bool, array: Any, *beside: Any
    ) -> int:
        """Record, entry, `published`, in this order: a death before the last store leaves nothing visible.

        `spilled`: the description lies behind the payload. `array`: a weak reference to what a loan's owner may still
        write to, or None. Returns the sequence number.
        """
        place, words = self.rings[ring], self._words
        record, seq = R_RECORDS + slot * RECORD_WORDS, words[L_PUBLISHED] + 1
        flight = self._acquired(ring, slot)
        if array is not None:
            flight.array = array
        try:
            if beside:
                self._enter(place, slot, seq, *beside)
            at = place.records + slot * SIZE
            place.view[at + BODY_OFFSET : at + INLINE_OFFSET] = BODY.pack(
                time.monotonic_ns(),
                VERSION,
                SPILLED if spilled else 0,
                ring,
                slot,
                flight.span,
                len(description),
                0,
                nbytes,
            )
            if not spilled:
                place.view[at + INLINE_OFFSET : at + INLINE_OFFSET + len(description)] = description
            # crash: publish.record
            store(place.words, record, seq)
            store(words, self._ledger.shape.order + (seq & self._ledger.mask), ring << 32 | slot)
            # crash: publish.ordered
            flight.waits, flight.lockable, flight.seq = self._recipients, self._lockable, seq
            store(words, L_PUBLISHED, seq)  # pairs with the position check of the receivers' feeds
        except BaseException:
            if words[L_PUBLISHED] < seq:  # nobody may find the record: its number goes to another message
                store(place.words, record, 0)
                flight.seq = 0
                if beside and beside[2] is not None:
                    beside[3].seq = 0
                    beside[2].pop(seq, None)
            raise
        self.sent_bytes += nbytes
        # crash: publish.published
        return seq

    def _enter(self, ring: Ring, slot: int, seq: int, note: int, deadline: int, table: Any, entry: Any) -> None:
        if not self._competing:
            store(ring.words, ring.state + self._member * ring.row + slot, note)  # its own row is no receiver's
            # crash: publish.noted
            return
        at = ring.state + STATE_WORDS * slot
        if table is not None:
            entry.words, entry.at, entry.seq = ring.words, at, seq
            table[seq] = entry
        store(ring.words, at + DEADLINE, deadline)
        store(ring.words, at + NOTE, seq << 8 | note)
        # crash: publish.noted

    # --- events, and looking

    def messages(self) -> list[tuple[Ring, int, int, int]]:
        """(ring, slot, seq, span) of everything that is published and not known to be given back."""
        return [(ring, flight.first, flight.seq, flight.span) for ring, flight in self._all() if flight.seq]

    def judge(self, ring: int, slot: int) -> None:
        """The verdict on the message there was read: its slot may be used again."""
        self._acquired(ring, slot).judged = True

    def reclaim(self) -> bool:
        """Work queue: give back what a consumer had done, and died before it said so. Whether there was any."""
        freed = False
        for ring, flight in list(self._all()):
            if not flight.seq or flight.lent or self._is_unjudged(ring, flight):
                continue
            # `done` before the lock: the other way round, it could be claimed, and done with views alive, in between
            done = ring.words[ring.state + STATE_WORDS * flight.first + DONE] == flight.seq
            if done and not self._ledger.locks.held_by_other(flight.seq):
                self._forget(ring.index, flight)
                freed = True
        return freed

    def is_settled(self, local: Iterable[int]) -> bool:
        """Whether everything sent is done (work queue), or taken, `local` members not counted (fan-out)."""
        uncounted = self._leaving | _bits(local)
        for ring, flight in self._all():
            if self._competing:
                if flight.seq and ring.words[ring.state + STATE_WORDS * flight.first + DONE] != flight.seq:
                    return False
                continue
            for member in _members(flight.waits & ~uncounted):
                if ring.words[ring.state + member * ring.row + flight.first] < 2 * flight.seq:
                    return False
        return True

    def free_slots(self, ring: int) -> int:
        """How many slots of that ring can be had now."""
        flights, place = self._flights[ring], self.rings[ring]
        return sum(flight is None or self._is_free(place, flight, look=True) for flight in flights)

    def oldest(self) -> int:
        """The message in the slot of the newest ring that is looked at next; 0: none, or one that locks may hold."""
        newest = len(self.rings) - 1
        flight = self._flights[newest][self._cursors[newest]] if self.rings else None
        return 0 if flight is None or self._lockable else flight.seq

    @property
    def busy(self) -> int:
        """Slots that are not known to be free."""
        return sum(flight.span for _, flight in self._all() if flight.seq or flight.lent)

    # --- which slots are free

    def _acquired(self, ring: int, slot: int) -> _Flight:
        flight = self._flights[ring][slot]
        if flight is None or flight.first != slot:
            raise ValueError("no slot that was acquired")
        return flight

    def _all(self) -> Iterator[tuple[Ring, _Flight]]:
        for ring in self.rings:
            for slot, flight in enumerate(self._flights[ring.index]):
                if flight is not None and flight.first == slot:
                    yield ring, flight

    def _fitting(self, nbytes: int) -> list[int]:
        """The rings that may hold a message, the one that fits best first."""
        order = []
        for ring in self.rings:
            span = ring.span(nbytes)
            if span == 1 or (
                span <= ring.slots and not self.history
            ):  # retained: one slot each, so that one stays free
                order.append((ring.slot_bytes < nbytes, abs(ring.slot_bytes - nbytes), ring.index))
        return [index for _, _, index in sorted(order)]

    def _is_free(self, ring: Ring, flight: _Flight, look: bool) -> bool:
        """Whether a message's slots may be used again. One that receivers may hold by a shared lock is taken back from
        those that have not taken it yet: unless `look`, which takes nothing."""
        seq, slot, words = flight.seq, flight.first, ring.words
        if flight.lent:
            return False
        if not seq:
            return True
        if self._competing:
            at = ring.state + STATE_WORDS * slot
            return words[at + RELEASED] == seq and not self._is_unjudged(ring, flight)
        for member in _members(flight.waits):
            said = words[ring.state + member * ring.row + slot]  # pairs with the store that ends a lease
            if said != 2 * seq + 1 and (said == 2 * seq or not self._leaving >> member & 1):
                return False
            flight.waits &= ~(1 << member)
        if self.history and seq > self._words[L_PUBLISHED] - self.history:
            return False
        if not flight.lockable:
            return True
        locks = self._ledger.locks
        if look:
            return not locks.held_by_other(seq)
        if not locks.try_exclusive(seq):
            return False
        store(words, R_RECORDS + slot * RECORD_WORDS, 0)  # under the lock: who takes it next finds nothing
        # crash: takeback.cleared
        locks.unlock(seq)
        return True

    def _is_unjudged(self, ring: Ring, flight: _Flight) -> bool:
        """Work queue: whether the sender has yet to read the verdict on a message."""
        if not self._heeds_verdicts or flight.judged:
            return False
        return ring.words[ring.state + STATE_WORDS * flight.first + VERDICT] >> 8 == flight.seq

    def _first_look(self, index: int) -> int:
        """The slot to look at first: slot 0 if it is free, since caches still hold the first few where receivers keep
        up; else the next one. Where messages can be taken back, the oldest comes first."""
        flight = self._flights[index][0]
        if flight is None or (not flight.lockable and self._is_free(self.rings[index], flight, look=True)):
            return 0
        return self._cursors[index]

    def _find(self, index: int, span: int, *, look: bool) -> int:
        """The first of `span` consecutive free slots at or after the first look, wrapping once; -1: there are none."""
        ring, flights, slots = self.rings[index], self._flights[index], self.rings[index].slots
        run, slot = 0, self._first_look(index)
        if slot + span > slots:
            slot = 0
        for _ in range(slots + span):
            if slot == slots:
                slot = run = 0
            flight = flights[slot]
            if flight is not None:
                if not self._is_free(ring, flight, look):
                    run, slot = 0, slot + 1
                    continue
                if not look:
                    self._forget(index, flight)
            run, slot = run + 1, slot + 1
            if run == span:
                if not look:
                    self._cursors[index] = slot if slot < slots else 0
                return slot - span
        return -1

    def _forget(self, index: int, flight: _Flight) -> None:
        self._flights[index][flight.first : flight.first + flight.span] = [None] * flight.span


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
