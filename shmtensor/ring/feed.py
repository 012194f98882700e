"""A receiver's end of one producer: its ledger, its rings, how far it has read, and the leases it holds.

`Feed` is the interface; docs/internals/core.md has it as a table. It is implemented twice: by the reference
(`ReferenceFeed` with `broadcast.py` and `competing.py`), and by the compiled module (`compiled.py`, `native/reader.c`).
`implementation.py` says which one is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import WireError
from ..memory import forks
from ..memory.fifos import Rouser
from ..memory.semaphores import is_woken_by
from ..memory.words import WEAKLY_ORDERED, settle
from ..wire import record, spec
from ..wire.record import CONSTANT_OFFSET, INLINE_OFFSET, SIZE, SPILLED, check_head, padded, unpack_constant
from .layout import (
    DEVICE_SLOT,
    DONE,
    L_PUBLISHED,
    MAX_RINGS,
    MOST_MESSAGES,
    R_RECORDS,
    RECORD_WORDS,
    OtherVersion,
    check_version,
)
from .lease import Lease
from .ledger import Ledger
from .ring import Ring

ALL, LATEST, COMPETING = range(3)
"""How a receiver reads: every message; the newest one; each that no other consumer has."""

ATTACH, OTHER, PASSED_OVER, GIVEN_UP = range(1, 5)
"""Events, each (code, sequence number, detail): what `take` answers where there is no message to be had yet.

ATTACH: ring `detail` has to be mapped first, nothing was done. OTHER: the sender is of another version, nothing was
done. PASSED_OVER: the message cannot be read. GIVEN_UP: it was delivered `detail` times, and nobody has finished it.
"""


class Reception(NamedTuple):
    """What the feeds of one receiver have in common."""

    mode: int
    control: memoryview
    """The words of the control segment."""
    decode: Any = None
    """(description, payload, readonly=) -> value, meta: `views/implementation.py`."""
    codec: Any = None
    """The compiled one, or None."""
    message: Any = None
    """The class of its messages."""
    counts: Any = None
    """What it counts: a `Counts`."""
    is_locked: Any = None
    """() -> whether somebody has its mutex."""
    epoch_at: int = 0
    member: int = 0
    member_uid: int = 0
    owner: object = None
    """Kept as long as the feeds: it has the lock that says that the receiver is there."""
    readonly: bool = True
    max_attempts: int = 0


class Feed(ABC):
    """One attached producer."""

    if not TYPE_CHECKING:  # subclasses have them: the base of the compiled one has a layout of its own
        __slots__ = ()

    SLOTS = (
        "__weakref__", "_asleep", "_control", "_rouser", "attach_ring", "device", "emptied", "gone", "index", "ledger",
        "mask", "member", "order", "reception", "rings", "uid", "words",
    )  # fmt: skip
    """Of every implementation."""

    direct = False
    """Whether `recv` is there: `take` for a caller without the receiver's mutex."""

    rings: list[Ring]
    position: int
    """The newest message that was looked at."""
    closing: bool
    """This receiver reads no more; `emptied` is called when the last lease ends."""
    gone: bool
    """The producer is closed or dead: nothing follows what is published."""
    emptied: Callable[[], None]
    epoch: int
    """The members that the receiver knows of; for `recv`."""
    more: bool
    """Work queue: `recv` has left something while another consumer slept."""
    _posted: int
    """The sleep of the producer that it was woken in last."""

    def _set_up(
        self, reception: Reception, ledger: Ledger, index: int, asleep: int, rouser: Rouser | None,
        attach_ring: Callable[[int], Ring],
    ) -> None:  # fmt: skip
        """Nothing here may refer to the receiver, which leaves when it is collected."""
        self.reception, self.ledger, self.uid, self.index = reception, ledger, ledger.uid, index
        self.member, self.words, self.mask, self.order = (
            reception.member, ledger.words, ledger.mask, ledger.shape.order,
        )  # fmt: skip
        self.device = ledger.device  # its messages lie in device memory: `endpoints/resident.py` takes them
        self._control, self._asleep, self._rouser = reception.control, asleep, rouser
        self.attach_ring = attach_ring
        self.emptied = _nobody  # the receiver, once it waits for the end of the leases
        self.rings = []
        self.gone = False
        forks.track(self)

    # --- receiving

    @abstractmethod
    def take(self, receiver: Any, undelivered: dict[Any, Any], patience: int) -> Any:
        """The next message, which is in `undelivered` from then on; an event; or None.

        `patience`: nanoseconds to look for one, as far as the implementation can without letting other threads run.
        """

    @abstractmethod
    def next(self) -> int:
        """The sequence number to look at next; 0 if there is none."""

    def abandon(self) -> None:  # noqa: B027
        """An exception came between: the message that was being taken is not, and comes again."""

    def newest(self) -> int:
        """The newest message; 0 where there cannot be so many."""
        published = self.words[L_PUBLISHED]
        return published if published < MOST_MESSAGES else 0

    @property
    def behind(self) -> int:
        """Messages published and not yet looked at."""
        return self.words[L_PUBLISHED] - self.position

    def explain(self, event: Any) -> str:
        """Why the message of an event cannot be read."""
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
        """Ring `index` of the producer, attached at first use."""
        while index >= len(self.rings):
            self._check_index(index)
            self._mapped(self.attach_ring(len(self.rings)))
        return self.rings[index]

    def _check_index(self, index: int) -> None:
        if index >= min(self.ledger.rings, MAX_RINGS):
            raise WireError(
                f"producer {self.uid:016x} has {self.ledger.rings} rings, its order table names ring {index}"
            )

    def _mapped(self, ring: Ring) -> None:
        """A ring of the producer was mapped: it is the next of `rings`."""
        self.rings.append(ring)

    def map_all(self) -> None:
        """Map every ring that is there. What is not was removed by its producer, since everything in it is done."""
        try:
            for index in range(self.ledger.rings):
                self.ring(index)
        except (FileNotFoundError, WireError):  # a damaged one is `take`'s to report
            pass

    def unmap(self) -> None:
        """Take nothing more from device memory: it is unmapped when the last view of it has died."""
        for ring in self.rings:
            if ring.device is not None:
                ring.device.unmap()

    # --- work queue

    def _begin_queue(self) -> None:
        """Begin before the oldest message that nobody has finished."""
        published = self.words[L_PUBLISHED]
        if self.ledger.rings:
            try:
                self.ring(0)
            except OtherVersion:
                raise
            except (FileNotFoundError, WireError):
                pass  # damage is `take`'s to report; if it is gone, all is done
        self.position = next((seq - 1 for _, _, seq in self.unfinished()), published)

    def unfinished(self) -> Iterator[tuple[Ring, int, int]]:
        """(ring, slot, seq) of every published message that is not done, oldest first: a look through all records."""
        published = self.newest()
        self.map_all()
        found = []
        for index, ring in enumerate(self.rings):
            words, state = ring.words, ring.state
            for slot in range(ring.slots):
                seq = words[R_RECORDS + slot * RECORD_WORDS]
                if 0 < seq <= published and words[state + 8 * slot + DONE] != seq:
                    found.append((seq, index, slot))
        found.sort()
        return ((self.rings[index], slot, seq) for seq, index, slot in found)

    # --- leases

    @property
    @abstractmethod
    def lease_count(self) -> int:
        """Messages that views hold."""

    def end_dead(self) -> None:  # noqa: B027
        """End the leases whose views died while an exception kept that from being told."""

    def wake_sender(self) -> None:
        """After giving back: wake the producer if it sleeps, once per sleep."""
        asleep = self._control[self._asleep]
        if asleep & 1 and asleep != self._posted and self._rouser is not None:
            self._posted = asleep
            self._rouser.rouse(asleep)

    def settle(self) -> None:
        """Nobody waits for the end of the leases any more: without this, feed and receiver would keep each other."""
        self.emptied = _nobody

    @abstractmethod
    def drop_in_child(self) -> None:
        """A forked child holds no lease: their ends are not its to tell."""

    def close(self) -> None:
        """Read no more. Leases live on, and the locks with them, until the last one ends."""
        self.closing = True
        self.unmap()
        if not self.lease_count:
            self.ledger.close()
            if self._rouser is not None:
                self._rouser.close()


def _nobody() -> None:
    """Nobody waits for the end of the leases."""


# --- the reference


class Found(NamedTuple):
    """A validated record."""

    ring: Ring
    slot: int
    description: bytes
    nbytes: int

    @property
    def offset(self) -> int:
        """Where its payload starts in the ring's data."""
        return self.slot * self.ring.slot_bytes

    def array(self) -> np.ndarray[Any, Any]:
        """The one array over a message's bytes: its death is the end of the lease."""
        return np.ndarray((self.nbytes,), np.uint8, self.ring.buffer, self.offset)


held: set[ReferenceFeed] = set()
"""Feeds with leases, kept although nobody else may refer to them: a receiver that was dropped goes to the garbage
collector, which clears the weak references among what it frees and closes its files before anything can be said about
views that live on."""


class ReferenceFeed(Feed):
    """The reference. Subclasses say how a message is taken and given back."""

    __slots__ = (*Feed.SLOTS, "_posted", "closing", "epoch", "known", "leases", "more", "position", "taking")

    leases: dict[int, Lease]
    """By sequence number."""
    known: bool
    """Whether one of its records was read: what follows is of this version, or damaged."""
    taking: Any
    """What `abandon` needs to know of the message that is being taken."""

    def __init__(self, *args: Any) -> None:
        self.leases, self.known, self.taking, self.closing, self.position = {}, False, None, False, 0
        self.epoch, self.more, self._posted = 0, False, 0
        self._set_up(*args)

    @property
    def lease_count(self) -> int:
        return len(self.leases)

    def drop_in_child(self) -> None:
        self.leases.clear()
        held.discard(self)

    # --- records

    def locate(self, seq: int) -> Found | None:
        """The record of message `seq`; None if its slot holds another message by now."""
        place = self.words[self.order + (seq & self.mask)]
        return self.read(self.ring(place >> 32), place & 0xFFFFFFFF, seq)

    def read(self, ring: Ring, slot: int, seq: int) -> Found | None:
        """The validated record in a slot; None if it is not message `seq`'s."""
        if slot >= ring.slots:
            raise WireError(f"order entry of message {seq} names slot {slot} of {ring.slots}")
        if WEAKLY_ORDERED:
            settle()
        if not self.holds(ring, slot, seq):
            return None
        at = ring.records + slot * SIZE
        try:
            found = self._parse(ring, slot, ring.map[at + CONSTANT_OFFSET : at + SIZE])
            if not self.known:
                check_version("its first description", found.description[0] if found.description else 0, spec.VERSION)
                self.known = True
        except WireError:
            if self.holds(ring, slot, seq):
                raise
            return None  # read while the producer was reusing the slot
        return found

    def _parse(self, ring: Ring, slot: int, raw: bytes) -> Found:
        head = unpack_constant(raw)
        device = ring.device
        version, flags, _, _, _, length, _, nbytes = head
        if not self.known:
            check_version("its first record", version, record.VERSION)
        check_head(head, ring.index, slot, ring.slots, ring.slot_bytes + (device is not None) * DEVICE_SLOT)
        if device is not None and nbytes > head[4] * ring.slot_bytes:
            raise WireError(f"message of {nbytes} bytes in {head[4]} device slots of {ring.slot_bytes} bytes")
        if not flags & SPILLED:
            at = INLINE_OFFSET - CONSTANT_OFFSET
            return Found(ring, slot, raw[at : at + length], nbytes)
        if device is not None:
            return Found(ring, slot, device.text(slot, length), nbytes)
        at = slot * ring.slot_bytes + padded(nbytes)
        return Found(ring, slot, bytes(ring.buffer[at : at + length]), nbytes)

    def holds(self, ring: Ring, slot: int, seq: int) -> bool:
        """Whether a slot still holds message `seq`."""
        return ring.words[R_RECORDS + slot * RECORD_WORDS] == seq

    def is_current(self, seq: int) -> bool:
        """Whether message `seq` still stands where the order table says, so far as that can be told."""
        place = self.words[self.order + (seq & self.mask)]
        index, slot = place >> 32, place & 0xFFFFFFFF
        known = index < len(self.rings) and slot < self.rings[index].slots
        return not known or self.holds(self.rings[index], slot, seq)

    # --- leases

    def hold(self, lease: Lease) -> None:
        """A lease has begun."""
        lease.ending = False
        self.leases[lease.seq] = lease
        held.add(self)

    def _ended(self, lease: Any) -> None:
        """The storage died: give the slot back. Runs wherever the last reference was dropped; takes no lock.

        The interpreter swallows an exception that arrives in here: what it cut short is repeated, by `end_dead` if it
        arrived at the very entry.
        """
        try:
            self._end(lease)
        except BaseException:
            self._end(lease)
            raise

    def _end(self, lease: Any) -> None:
        seq: int = lease.seq
        leases = self.leases
        is_held = leases.get(seq) is lease
        if is_held:  # else a forked child's copy of its parent's lease, or abandoned, or repeated
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
    def give_back(self, lease: Lease) -> None:
        """Store what says that this receiver no longer needs the slot."""
