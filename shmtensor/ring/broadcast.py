"""The reader of a subscriber for one publisher, the reference: docs/internals/protocols.md, sections 1, 2 and 6."""

from __future__ import annotations

import time
from typing import Any

from ..errors import DependencyError, WireError
from ..memory.words import store
from .layout import L_PUBLISHED, OtherVersion, lease_word
from .reader import OTHER, PASSED_OVER, Found, Lease, LockedLease, ReferenceReader


class BroadcastReader(ReferenceReader):
    """Takes every message from `start` on.

    Until the publisher has stored `start`, messages (those of `history=`) are taken under a shared lock.
    """

    __slots__ = ()

    counted = True
    """Whether the publisher waits until this receiver has taken its messages."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begin()

    def next(self) -> int:
        published = self.newest()
        if not self.start and not self.has_started() and not self.sequences.history:
            self.position = published  # all of these were sent before the publisher saw this receiver
        self.position = max(self.position, published - self.mask)  # a larger distance means damage
        return self.position + 1 if published > self.position else 0

    def take(self, receiver: Any, undelivered: dict[Any, Any], patience: int) -> Any:
        reception = self.reception
        while seq := self.next():
            missed = seq - self.position - 1
            begun = 0 if self.events is None else time.monotonic_ns()
            found = array = lease = None
            try:
                found = self.locate(seq)
                if found is not None:
                    array = found.array()
                    lease = self.lease(array, found, seq)
            except (WireError, FileNotFoundError) as error:
                if self.is_current(seq):
                    if isinstance(error, OtherVersion):
                        return OTHER, seq, str(error)
                    self.position = seq
                    self.skip(seq)
                    return PASSED_OVER, seq, str(error)
                lease = None  # read while the publisher was reusing the slot
            if found is None or array is None or lease is None:
                self.pass_by(seq)
                continue
            try:
                value, meta = reception.decode(found.description, array, readonly=reception.readonly)
            except WireError as error:
                self.position, self.taking = seq, None
                return PASSED_OVER, seq, str(error)  # the array dies here, and the slot is given back
            except DependencyError as error:
                value, meta = None, DependencyError(str(error))  # the frames of that one refer to the array
            message = reception.message(
                value, meta, seq, self.sender, found.sent_ns, found.nbytes, 1, missed, array, lease, receiver
            )
            undelivered[message] = None  # no boundary between these two lines: the message is taken, or not at all
            self.position, self.taking = seq, None
            self.count(found.nbytes, missed=missed, is_readable=meta.__class__ is not DependencyError)
            if self.events is not None:
                self.note_taken(seq, begun, 1, found.nbytes)
            # crash: take.delivered
            return message
        return None

    def pass_by(self, seq: int) -> None:
        """Skip message `seq`: the publisher took it back."""
        self.position, self.taking = seq, None

    def lease(self, array: Any, found: Found, seq: int) -> Lease | None:
        """Lease message `seq`; None if it is older than this receiver and the publisher took it back."""
        if not self.start:
            return self._take_locked(array, found, seq)
        ring = found.ring
        word = lease_word(ring, self.member, found.slot)
        # crash: take.found
        self.taking = seq, word, ring.words
        store(ring.words, word, 2 * seq)
        # crash: take.leased
        lease = Lease(array, self._ended)
        lease.seq, lease.word, lease.words = seq, word, ring.words
        self.hold(lease)
        return lease

    def abandon(self) -> None:
        if self.taking is None:
            return
        seq, word, words = self.taking
        self.taking = None
        self.leases.pop(seq, None)
        if words is not None:
            store(words, word, 0)  # as before: neither leased nor given back
        self.sequences.locks.unlock(seq)  # if there was a lock; the byte belongs to this message alone
        self.wake_sender()

    def unmap_if_unneeded(self) -> bool:
        """Device memory: unmap it once its publisher has closed and this receiver needs nothing more from it.

        Returns True when no further call is needed.
        """
        if self.closing:
            return True
        if self.sequences.closed and not self.leases and (self.behind <= 0 or not self.counted):
            self.unmap()
            return True
        return False

    def skip(self, seq: int) -> None:
        """Give back, unread, the slot of a message whose record is damaged, so that the publisher can reuse it."""
        index, slot = self.sequences.place(seq)
        if self.start and index < len(self.rings):
            ring = self.rings[index]
            if slot < ring.slots:
                store(ring.words, lease_word(ring, self.member, slot), 2 * seq + 1)
                self.wake_sender()

    def _take_locked(self, array: Any, found: Found, seq: int) -> Lease | None:
        """Take a message that the publisher may take back.

        The lease word is stored as well, since the publisher may begin to count this receiver at any moment.
        """
        ring = found.ring
        word = lease_word(ring, self.member, found.slot)
        self.taking = seq, word, None
        if not self._lock(found, seq):
            return None
        lease = LockedLease(array, self._ended)
        lease.seq, lease.word, lease.words = seq, word, ring.words
        self.taking = seq, word, ring.words
        store(ring.words, word, 2 * seq)
        self.hold(lease)
        return lease

    def _lock(self, found: Found, seq: int) -> bool:
        """Take a shared lock on message `seq`; False if its publisher takes it back or has done so."""
        locks = self.sequences.locks
        if not locks.try_shared(seq):
            return False
        # crash: take.shared
        if found.ring.seqs[found.slot] == seq:
            return True
        locks.unlock(seq)
        self.wake_sender()  # our lock may have made it fail
        return False

    def give_back(self, lease: Lease) -> None:
        # crash: release.ended
        store(lease.words, lease.word, 2 * lease.seq + 1)
        # crash: release.stored
        if lease.locked:
            self.sequences.locks.unlock(lease.seq)


class LatestReader(BroadcastReader):
    """Takes the newest messages, under shared locks. It is no recipient: the publisher never waits for it."""

    __slots__ = ("lost",)

    counted = False

    def __init__(self, *args: Any) -> None:
        self.lost = 0  # the newest message that the publisher took back before it was taken
        super().__init__(*args)

    def next(self) -> int:
        published = self.newest()
        if not self.start:
            self.has_started()
        if published <= self.position:
            return 0
        if not self.sequences.history and (not self.start or published < self.start):
            self.position = published  # the publisher reuses their slots without trying the lock
            return 0
        lost = self.lost if self.lost < published else 0
        return max(self.position, published - self.reception.depth, lost) + 1

    def pass_by(self, seq: int) -> None:
        self.taking, self.lost = None, seq
        if self.words[L_PUBLISHED] == seq:  # and nothing newer is published
            self.count(0, missed=seq - self.position, is_readable=False)
            self.position = seq

    def lease(self, array: Any, found: Found, seq: int) -> Lease | None:
        self.taking = seq, 0, None
        if not self._lock(found, seq):
            return None
        lease = LockedLease(array, self._ended)
        lease.seq = seq
        self.hold(lease)
        return lease

    def skip(self, seq: int) -> None:
        """Do nothing: the publisher does not wait for this reader."""

    def give_back(self, lease: Lease) -> None:
        self.sequences.locks.unlock(lease.seq)
