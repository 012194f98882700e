"""A receiver's end of one producer: its sequence table, its rings, the position in them, and the leases.

`Reader` is the interface; docs/internals/core.md has it as a table. It is implemented twice: by the reference
(`ReferenceReader` here, and its subclasses in `reference.py`), and by the compiled module (`native/reader.c`).
`implementation.py` chooses.

A lease is a weak reference to the one array that every view of a message is made from: NumPy arrays refer to that array
as their base, a tensor's storage holds it until the storage is freed. So the array dies with the last view, and the
weak reference's callback gives the slot back at once.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import WireError
from ..memory import lifecycle
from ..memory.semaphores import SenderWaker, is_woken_by
from ..memory.words import WEAKLY_ORDERED, acquire_fence, barrier, store
from ..wire import record, spec
from ..wire.record import CONSTANT_OFFSET, INLINE_OFFSET, SIZE, SPILLED, check_head, padded, unpack_constant
from .events import RELEASE, TAKE, EventLog
from .layout import (
    ATTEMPT_SHIFT,
    DEVICE_SLOT,
    DONE,
    GROUP_DONE,
    GROUP_LOCK_SHIFT,
    L_PUBLISHED,
    LEASE,
    MAX_RINGS,
    MOST_MESSAGES,
    OtherVersion,
    check_version,
    lease_word,
    state_word,
)
from .ring import Ring, SequenceTable

if TYPE_CHECKING:
    _Ref = weakref.ref[np.ndarray]
else:
    _Ref = weakref.ref


ALL, LATEST, COMPETING, GROUP = range(4)
"""Modes: a receiver takes every message; the newest ones; each one that no other consumer has; of a fan-out, each one
that no other member of its group has."""

ATTACH, OTHER, PASSED_OVER, GIVEN_UP, UNREADABLE = range(1, 6)
"""Events, each (code, sequence number, detail): what `take` returns if something else has to be done first.

ATTACH: ring `detail` has to be mapped first, nothing was done. OTHER: the sender is of another version, nothing was
done. PASSED_OVER: the message cannot be read and was skipped. GIVEN_UP: it was delivered `detail` times without being
finished, and is dropped. UNREADABLE: a package is missing here that can read it; the take was undone.
"""


class Reception(NamedTuple):
    """What the readers of one receiver share."""

    mode: int
    control: memoryview
    """The words of the control segment."""
    decode: Any = None
    """(description, payload, readonly=) -> value, meta: `codec/implementation.py`."""
    codec: Any = None
    """The compiled one, or None."""
    message: Any = None
    """The class of its messages."""
    counts: Any = None
    """Its counters: a `Counts`."""
    is_locked: Any = None
    """() -> whether a thread holds the receiver's mutex."""
    epoch_at: int = 0
    shown_at: int = 0
    """Where in `control` other processes see `counts.missed`, and `counts.redelivered` behind it. 0: nowhere."""
    member: int = 0
    recipient: tuple[int, int] = (0, 0)
    """The index and uid that senders know: the group's, or the receiver's own."""
    owner: Any = None
    """Kept alive by the readers: it holds the receiver's life lock."""
    readonly: bool = True
    max_attempts: int = 0
    depth: int = 1
    """Of mode `LATEST`: how many of the newest messages it takes."""


class Reader(ABC):
    """One attached producer."""

    if not TYPE_CHECKING:  # subclasses declare them: the base of the compiled one has a layout of its own
        __slots__ = ()

    SLOTS = (
        "__weakref__", "_asleep", "_control", "_waker", "attach_ring", "device", "emptied", "gone", "index", "mask",
        "member", "order", "reception", "rings", "sequences", "uid", "words",
    )  # fmt: skip
    """The slots of every implementation."""

    rings: list[Ring]
    sender: Any
    """The `sender` of its messages; the endpoint sets it."""
    position: int
    """The newest message that was taken or skipped."""
    closing: bool
    """This receiver reads no more; `emptied` is called when the last lease ends."""
    gone: bool
    """The producer is closed or dead: nothing follows what is published."""
    emptied: Callable[[], None]
    age: Callable[[], int]
    """Work queue: when the next message was published, on CLOCK_MONOTONIC, nanoseconds; 0 if `take` has to tell,
    2**64 - 1 if there is none."""
    epoch: int
    """The epoch whose members the receiver has read; for callers without the mutex."""
    _posted: int
    """The producer's `asleep` word for which this reader has woken it last."""

    def _set_up(
        self, reception: Reception, sequences: SequenceTable, index: int, asleep: int, waker: SenderWaker | None,
        attach_ring: Callable[[int], Ring],
    ) -> None:  # fmt: skip
        """Set the attributes. None may refer to the receiver, which leaves its channel when it is collected."""
        self.reception, self.sequences, self.uid, self.index = reception, sequences, sequences.uid, index
        self.member, self.words, self.mask, self.order = (
            reception.member, sequences.words, sequences.mask, sequences.order,
        )  # fmt: skip
        self.device = sequences.device  # its messages lie in device memory: see `endpoints/device_fanout.py`
        self._control, self._asleep, self._waker = reception.control, asleep, waker
        self.attach_ring = attach_ring
        self.emptied = _do_nothing  # replaced once the receiver waits for the end of the leases
        self.rings = []
        self.gone = False
        lifecycle.track(self, type(self).drop_in_child)

    # --- receiving

    @abstractmethod
    def take(self, receiver: Any, undelivered: dict[Any, Any], patience: int) -> Any:
        """Take the next message and put it into `undelivered`. Returns it, or an event, or None.

        `patience`: nanoseconds to spin for one, if the implementation can do so without letting other threads run.

        Where a package is missing that can read the value, a message of a fan-out is taken nevertheless: its value is
        None, and its meta a `DependencyError`.
        """

    @abstractmethod
    def next(self) -> int:
        """The sequence number of the next message; 0 if there is none."""

    @property
    def unacknowledged(self) -> int:
        """With claims: how many of its messages are here and not done."""
        return 0

    def next_sent_ns(self) -> int:
        """Its `age`; rings are attached for that, or 0 would put this sender before all others."""
        found = self.age()
        if not found:
            self.map_all()
            found = self.age()
        return found

    def is_drained(self) -> bool:
        """Of a sender that is gone: whether nothing is left to take, nor claimed by a receiver whose death would bring
        it back."""
        if self.next():
            return False
        return self.reception.mode not in (COMPETING, GROUP) or next(self.unfinished(), None) is None

    @abstractmethod
    def trace(self, log: EventLog | None, sender: int) -> None:
        """Write events there from now on, None: none. `sender`: the uid of the sender."""

    def abandon(self) -> None:  # noqa: B027
        """Undo a take that an exception interrupted: the message will be taken again."""

    def newest(self) -> int:
        """The newest message; 0 if the number is impossible."""
        published = self.words[L_PUBLISHED]
        return published if published < MOST_MESSAGES else 0

    @property
    def behind(self) -> int:
        """How many messages are published and not yet taken or skipped."""
        return self.words[L_PUBLISHED] - self.position

    def explain(self, event: Any) -> str:
        """The text that says why the message of an event cannot be read."""
        code, _, detail = event
        if isinstance(detail, str):
            return detail
        index, slot, head, first = detail
        head = unpack_constant(head)
        try:
            if code == OTHER:
                check_version("its first record", head[0], record.VERSION)
                check_version("its first description", first, spec.VERSION)
            self._check_index(index)
            ring = self.rings[index]
            if slot >= ring.slots:
                raise WireError(f"its order entry names slot {slot} of {ring.slots}")
            check_head(head, index, slot, ring.slots, ring.slot_bytes)
        except WireError as error:
            return str(error)
        return "its record was overwritten while it was claimed"

    # --- rings

    def ring(self, index: int) -> Ring:
        """Ring `index` of the producer, mapped at first use."""
        while index >= len(self.rings):
            self._check_index(index)
            self.hold_ring(self.attach_ring(len(self.rings)))
        return self.rings[index]

    def _check_index(self, index: int) -> None:
        if index >= min(self.sequences.rings, MAX_RINGS):
            raise WireError(
                f"producer {self.uid:016x} has {self.sequences.rings} rings, its sequence table names ring {index}"
            )

    def hold_ring(self, ring: Ring) -> None:
        """Append a ring that was mapped to `rings`."""
        self.rings.append(ring)

    def map_all(self) -> None:
        """Map every ring that exists. A missing one was removed by its producer, since everything in it is done."""
        try:
            for index in range(self.sequences.rings):
                self.ring(index)
        except (FileNotFoundError, WireError):  # a damaged one is `take`'s to report
            pass

    def unmap(self) -> None:
        """Take no more messages from device memory. It is unmapped when the last view of it has died."""
        for ring in self.rings:
            if ring.device is not None:
                ring.device.unmap()

    # --- claims: of a work queue, or in a group

    def claim_byte(self, seq: int) -> int:
        """The byte of the lock file that is locked to claim message `seq`."""
        if self.reception.mode == COMPETING:
            return seq
        return (self.reception.recipient[0] + 1) << GROUP_LOCK_SHIFT | seq & (1 << GROUP_LOCK_SHIFT) - 1

    def group_word(self, ring: Ring, slot: int) -> int:
        """Index of a group's word for a slot."""
        return lease_word(ring, self.reception.recipient[0], slot)

    def _first(self, published: int) -> int:
        """The first message that may be this receiver's."""
        if self.reception.mode == COMPETING:
            return 1
        start = self.sequences.start(*self.reception.recipient)
        return max(1, published + 1 - self.sequences.history) if start is None else start

    def _is_finished(self, ring: Ring, slot: int, seq: int) -> bool:
        """Whether no receiver needs to do anything with a message: it is done. In a group, the member that had it must
        also be alive until its views die; if it is dead, another member gives the slot back."""
        if self.reception.mode == COMPETING:
            return ring.words[state_word(ring, slot) + DONE] == seq
        word = ring.words[self.group_word(ring, slot)]
        if word != GROUP_DONE << ATTEMPT_SHIFT | 2 * seq:
            return word & LEASE > 2 * seq
        return self.has_lease(ring.index, slot, seq) or self.sequences.locks.held_by_other(self.claim_byte(seq))

    def begin_queue(self) -> None:
        """Begin at the oldest message that is not done."""
        published = self.words[L_PUBLISHED]
        if self.sequences.rings:
            try:
                self.ring(0)
            except OtherVersion:
                raise
            except (FileNotFoundError, WireError):
                pass  # `take` reports damage; if the ring is gone, all its messages are done
        self.position = min((seq - 1 for _, _, seq in self.unfinished()), default=published)

    def unfinished(self) -> Iterator[tuple[Ring, int, int]]:
        """Scan all records: (ring, slot, seq) of every published message that is not done, in no order."""
        published = self.newest()
        first = self._first(published)
        self.map_all()
        for ring in list(self.rings):
            for slot, seq in enumerate(ring.seqs):
                if first <= seq <= published and not self._is_finished(ring, slot, seq):
                    yield ring, slot, seq

    # --- leases

    @property
    @abstractmethod
    def lease_count(self) -> int:
        """How many messages are leased."""

    @abstractmethod
    def has_lease(self, ring: int, slot: int, seq: int) -> bool:
        """Whether this receiver holds that message."""

    def end_dead(self) -> None:  # noqa: B027
        """End the leases whose views are dead but whose callback an exception interrupted."""

    def wake_sender(self) -> None:
        """Wake the producer if it sleeps, once per sleep; to be called after a slot was given back."""
        asleep = self._control[self._asleep]
        if asleep & 1 and asleep != self._posted and self._waker is not None:
            self._posted = asleep
            self._waker.wake(asleep)

    def forget_emptied(self) -> None:
        """Drop `emptied` when no caller waits for the end of the leases any more; otherwise reader and receiver would
        keep each other alive."""
        self.emptied = _do_nothing

    @abstractmethod
    def drop_in_child(self) -> None:
        """In a forked child: forget the leases, which are the parent's to end."""

    def close(self) -> None:
        """Take no more messages. Leases, and the lock file with them, live on until the last one ends."""
        self.closing = True
        self.unmap()
        if not self.lease_count:
            self.sequences.close()
            if self._waker is not None:
                self._waker.close()


def _do_nothing() -> None:
    """Do nothing: the value of `emptied` while no caller waits for the end of the leases."""


# --- the reference


class Lease(_Ref):
    """A weak reference to a message's array. `seq` is the message, `words[word]` is where its end is stored."""

    __slots__ = ("ending", "seq", "word", "words")

    words: memoryview
    word: int
    seq: int
    ending: bool
    """Whether a thread is giving its slot back."""
    locked = False
    """Fan-out: whether a shared lock on byte `seq` holds the message."""


class LockedLease(Lease):
    """A fan-out lease that is a shared lock: a latest-only reader's, or one on a message older than its reader."""

    __slots__ = ()
    locked = True


class Claim(Lease):
    """A lease of a work queue or in a group: the exclusive lock on the byte of message `seq`."""

    __slots__ = ("acknowledged", "done", "done_at_end", "own", "released")

    acknowledged: bool
    """Whether it is stored that the message is done."""
    done: tuple[int, int]
    """Which of the words says so, and its value then."""
    done_at_end: bool
    """Whether the end of the lease says so."""
    own: int
    """In a group: which of the words shows that this member has it."""
    released: bool
    """Whether it is stored that the slot is given back: it may be another message's since."""

    def acknowledge(self) -> None:
        """Mark the message as done: it is not delivered again. Its bytes stay while views of them live."""
        if not self.acknowledged:
            self.acknowledged = True
            # crash: done.before
            store(self.words, *self.done)
            # crash: done.stored


class Found(NamedTuple):
    """A validated record."""

    ring: Ring
    slot: int
    description: bytes
    nbytes: int
    sent_ns: int
    """When it was published, on CLOCK_MONOTONIC."""

    @property
    def offset(self) -> int:
        """Where its payload starts in the ring's data."""
        return self.slot * self.ring.slot_bytes

    def array(self) -> np.ndarray[Any, Any]:
        """The one array over a message's bytes: when it dies, the lease ends."""
        return np.ndarray((self.nbytes,), np.uint8, self.ring.buffer, self.offset)


held: set[ReferenceReader] = set()
"""Readers with leases, kept alive although nothing else may refer to them. If the garbage collector freed such a reader
with its dropped receiver, it would clear the weak references and close the lock file while views live on."""


class ReferenceReader(Reader):
    """The reference. Subclasses implement how a message is taken and given back."""

    __slots__ = (
        *Reader.SLOTS,
        "_posted",
        "closing",
        "epoch",
        "events",
        "known",
        "leases",
        "position",
        "sender",
        "start",
        "taking",
    )

    leases: dict[int, Lease]
    """By sequence number."""
    known: bool
    """Whether a record of this producer was read: all others are of this version, or damaged."""
    start: int
    """Fan-out: the first message that waits for this receiver or its group; 0: the publisher does not count it yet."""
    taking: Any
    """What `abandon` needs to undo the current take; None if there is none."""

    def __init__(self, *args: Any) -> None:
        self.leases, self.known, self.taking, self.closing, self.position, self.start = {}, False, None, False, 0, 0
        self.epoch, self._posted, self.sender = 0, 0, None
        self.events: EventLog | None = None
        self._set_up(*args)

    def begin(self) -> None:
        """Fan-out: begin at `start`; before that, at the oldest message that is kept for newcomers."""
        barrier()  # whatever is published from here on, its publisher has read the epoch after this receiver joined
        published = self.words[L_PUBLISHED]
        if not self.has_started():
            self.position = max(0, published - self.sequences.history)

    def has_started(self) -> bool:
        """Fan-out: whether the publisher counts this receiver or its group.

        Call it after reading `published`: protocols.md, section 2.
        """
        if self.start:
            return True
        acquire_fence()
        start = self.sequences.start(*self.reception.recipient)
        if not start:
            return False
        position = max(self.position, start - 1) if self.sequences.history else start - 1
        self.start, self.position = start, position
        return True

    @property
    def lease_count(self) -> int:
        return len(self.leases)

    def has_lease(self, ring: int, slot: int, seq: int) -> bool:
        return seq in self.leases

    def drop_in_child(self) -> None:
        self.leases.clear()
        held.discard(self)

    def trace(self, log: EventLog | None, sender: int) -> None:
        self.events = log

    def note_taken(self, seq: int, begun: int, attempt: int, nbytes: int) -> None:
        """Write down that a message was taken and decoded; `begun`: when that began, 0 if it was not traced then."""
        if self.events is not None:
            end = time.monotonic_ns()
            self.events.add(TAKE, seq, self.uid, begun or end, attempt, end, nbytes)

    def count(self, nbytes: int, *, missed: int = 0, redelivered: bool = False, is_readable: bool = True) -> None:
        """Count a message that was taken."""
        reception = self.reception
        counts, shown = reception.counts, reception.shown_at
        if missed:
            counts.missed += missed
            if shown:
                store(reception.control, shown, counts.missed)
        if redelivered:
            counts.redelivered += 1
            if shown:
                store(reception.control, shown + 1, counts.redelivered)
        if is_readable:
            counts.received += 1
            counts.received_bytes += nbytes

    # --- records

    def locate(self, seq: int) -> Found | None:
        """The record of message `seq`; None if its slot holds another message by now."""
        index, slot = self.sequences.place(seq)
        return self.read(self.ring(index), slot, seq)

    def read(self, ring: Ring, slot: int, seq: int) -> Found | None:
        """The validated record in a slot; None if the slot does not hold message `seq`."""
        if slot >= ring.slots:
            raise WireError(f"order entry of message {seq} names slot {slot} of {ring.slots}")
        if WEAKLY_ORDERED:
            acquire_fence()
        if ring.seqs[slot] != seq:
            return None
        at = ring.records + slot * SIZE
        try:
            found = self._parse(ring, slot, ring.map[at + CONSTANT_OFFSET : at + SIZE])
            if not self.known:
                check_version("its first description", found.description[0] if found.description else 0, spec.VERSION)
                self.known = ring.seqs[slot] == seq  # else the bytes may be a newer message's
                return found if self.known else None
        except WireError:
            if ring.seqs[slot] == seq:
                raise
            return None  # read while the producer was reusing the slot
        return found

    def _parse(self, ring: Ring, slot: int, raw: bytes) -> Found:
        head = unpack_constant(raw)
        device = ring.device
        version, flags, _, _, _, length, _, nbytes = head
        sent_ns = ring.sent_ns[slot]
        if not self.known:
            check_version("its first record", version, record.VERSION)
        check_head(head, ring.index, slot, ring.slots, ring.slot_bytes + (device is not None) * DEVICE_SLOT)
        if device is not None and nbytes > head[4] * ring.slot_bytes:
            raise WireError(f"message of {nbytes} bytes in {head[4]} device slots of {ring.slot_bytes} bytes")
        if not flags & SPILLED:
            at = INLINE_OFFSET - CONSTANT_OFFSET
            return Found(ring, slot, raw[at : at + length], nbytes, sent_ns)
        if device is not None:
            return Found(ring, slot, device.text(slot, length), nbytes, sent_ns)
        at = slot * ring.slot_bytes + padded(nbytes)
        return Found(ring, slot, bytes(ring.buffer[at : at + length]), nbytes, sent_ns)

    def is_current(self, seq: int) -> bool:
        """Whether message `seq` still lies where the sequence table says; True as well if that cannot be checked."""
        index, slot = self.sequences.place(seq)
        known = index < len(self.rings) and slot < self.rings[index].slots
        return not known or self.rings[index].seqs[slot] == seq

    # --- leases

    def hold(self, lease: Lease) -> None:
        """Record a lease that begins."""
        lease.ending = False
        self.leases[lease.seq] = lease
        held.add(self)

    def _ended(self, lease: Any) -> None:
        """The storage died: give the slot back. Runs in the thread that drops the last reference; takes no lock.

        The interpreter swallows an exception that arrives in here. So an interrupted step is repeated here, or by
        `end_dead` if the exception arrived at the very entry.
        """
        try:
            self._end(lease)
        except BaseException:
            self._end(lease)
            raise

    def _end(self, lease: Any) -> None:
        seq: int = lease.seq
        leases = self.leases
        ended = 0 if self.events is None else time.monotonic_ns()  # before: the sender may use the slot at once
        is_held = leases.get(seq) is lease
        if is_held:  # False for a forked child's copy of its parent's lease, one that was abandoned, and a repetition
            if lease.ending:
                return  # another thread gives it back
            lease.ending = True  # no boundary since the test
            try:
                self.give_back(lease)
                if seq in leases and leases[seq] is lease:  # given back unfinished, it may be this receiver's again
                    del leases[seq]
            except BaseException:
                lease.ending = False
                raise
            if ended and self.events is not None:  # what is interrupted from here on is not given back again
                self.events.add(RELEASE, seq, self.uid, ended, 0, ended, 0)
        if not leases:
            held.discard(self)
            if leases:  # another thread took a message just now
                held.add(self)
        asleep = self._control[self._asleep]
        if asleep & 1 and is_woken_by(asleep, seq):
            self.wake_sender()
        if self.closing and not leases:
            self.close()
            self.emptied()

    def end_dead(self) -> None:
        for lease in list(self.leases.values()):
            if not lease.ending and lease() is None:
                self._ended(lease)

    @abstractmethod
    def give_back(self, lease: Any) -> None:
        """Store that this receiver no longer needs the slot."""


class Received:
    """The base of messages."""

    __slots__ = (
        "_hold", "_lease", "_receiver", "_sent_ns", "attempt", "meta", "missed", "nbytes", "sender", "seq", "value",
    )  # fmt: skip

    def __init__(
        self, value: Any, meta: Any, seq: int, sender: Any, sent_ns: int, nbytes: int, attempt: int, missed: int,
        hold: Any, lease: Any, receiver: Any,
    ) -> None:  # fmt: skip
        self.value, self.meta, self.seq, self.nbytes = value, meta, seq, nbytes
        self.sender, self._sent_ns = sender, sent_ns
        self.attempt, self.missed, self._hold, self._lease, self._receiver = attempt, missed, hold, lease, receiver


class Counts:
    """A receiver's counters: of messages."""

    __slots__ = ("missed", "received", "received_bytes", "redelivered")

    def __init__(self) -> None:
        self.received = self.received_bytes = self.missed = self.redelivered = 0
