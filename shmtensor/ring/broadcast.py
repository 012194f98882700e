"""A subscriber's end of one publisher: docs/protocols.md, sections 1, 2 and 6."""

from __future__ import annotations

from typing import Any

from ..memory.words import barrier, settle, store
from .feed import Feed, Found
from .layout import L_PUBLISHED
from .lease import Lease, LockedLease


class BroadcastFeed(Feed):
    """Every message from `start` on is this receiver's.

    Until the publisher has said so, older ones (`history=`) are taken under a shared lock.
    """

    __slots__ = ("member_uid", "start", "started")

    counted = True
    """Whether the publisher waits for this receiver to take what it has published."""

    def __init__(self, *args: Any, member_uid: int) -> None:
        super().__init__(*args)
        self.member_uid = member_uid
        self.started, self.start = False, 1 << 63
        self.position = 0
        barrier()  # what is published from here on, its publisher has looked at the table for
        published = self.words[L_PUBLISHED]
        if not self._has_started():
            self.position = max(0, published - self.ledger.history)

    def next(self) -> int:
        """The sequence number to read next; 0 if there is none."""
        published = self.words[L_PUBLISHED]
        if not self.started and not self._has_started() and not self.ledger.history:
            self.position = published  # all of it was sent before the publisher saw this receiver
        return self.position + 1 if published > self.position else 0

    def _has_started(self) -> bool:
        """Whether the publisher counts this receiver; asked after reading `published`: docs/protocols.md, section 2."""
        settle()
        start = self.ledger.start(self.member, self.member_uid)
        if start is not None:
            self.started, self.start = True, start
            self.position = max(self.position, start - 1) if self.ledger.history else start - 1
        return self.started

    def take(self, array: Any, found: Found, seq: int) -> Lease | None:
        """Lease message `seq`; None if it is older than this receiver and the publisher took it back."""
        if not self.started:
            return self._take_locked(array, found, seq)
        ring = found.ring
        word = ring.state + self.member * ring.row + found.slot
        # crash: take.found
        store(ring.words, word, 2 * seq)
        # crash: take.leased
        lease = Lease(array, self._ended)
        lease.seq, lease.word, lease.words = seq, word, ring.words
        self.hold(lease)
        return lease

    def look_after(self) -> bool:
        """Device memory: unmap it once its publisher has closed and nothing of it is needed here. True: no more."""
        if self.closing:
            return True
        if self.ledger.closed and not self.leases and (self.behind <= 0 or not self.counted):
            self.unmap()
            return True
        return False

    def skip(self, seq: int) -> None:
        """Give back, unread, the slot of a message whose record is damaged, so that it holds nobody up."""
        place = self.words[self.order + (seq & self.mask)]
        if self.started and place >> 32 < len(self.rings):
            ring, slot = self.rings[place >> 32], place & 0xFFFFFFFF
            if slot < ring.slots:
                store(ring.words, ring.state + self.member * ring.row + slot, 2 * seq + 1)
                self.wake_sender()

    def _take_locked(self, array: Any, found: Found, seq: int) -> Lease | None:
        """Take a message that the publisher may take back. The lease word is stored too: it may count any time now."""
        if not self._lock(found, seq):
            return None
        ring = found.ring
        lease = LockedLease(array, self._ended)
        lease.seq, lease.word, lease.words = seq, ring.state + self.member * ring.row + found.slot, ring.words
        store(ring.words, lease.word, 2 * seq)
        self.hold(lease)
        return lease

    def _lock(self, found: Found, seq: int) -> bool:
        locks = self.ledger.locks
        if not locks.try_shared(seq):
            return False
        # crash: take.shared
        if self.holds(found.ring, found.slot, seq):
            return True
        locks.unlock(seq)
        self.wake_sender()  # it may have met our lock
        return False

    def give_back(self, lease: Lease) -> None:
        # crash: release.ended
        store(lease.words, lease.word, 2 * lease.seq + 1)
        if lease.locked:
            self.ledger.locks.unlock(lease.seq)
        # crash: release.stored


class LatestFeed(BroadcastFeed):
    """Always the newest message, under a shared lock: never a recipient, never in the publisher's way."""

    __slots__ = ()

    counted = False

    def next(self) -> int:
        published = self.words[L_PUBLISHED]
        if not self.started:
            self._has_started()
        if published <= self.position:
            return 0
        if published < self.start and not self.ledger.history:
            self.position = published  # the publisher takes these back without asking
            return 0
        return published

    def take(self, array: Any, found: Found, seq: int) -> Lease | None:
        if not self._lock(found, seq):
            return None
        lease = LockedLease(array, self._ended)
        lease.seq = seq
        self.hold(lease)
        return lease

    def skip(self, seq: int) -> None:
        """A damaged record of a latest-only reader holds nobody up."""

    def give_back(self, lease: Lease) -> None:
        self.ledger.locks.unlock(lease.seq)
