"""A subscriber's end of one publisher: docs/protocols.md, sections 1, 2 and 6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..memory.words import settle, store
from .feed import Feed, Found
from .layout import L_PUBLISHED
from .lease import Lease, LockedLease

if TYPE_CHECKING:
    import numpy as np


class BroadcastFeed(Feed):
    """Every message from `start` on is this receiver's; older ones (`history=`) it takes under a shared lock."""

    __slots__ = ("member_uid", "start", "started")

    always_locked = False

    def __init__(self, *args: Any, member_uid: int) -> None:
        super().__init__(*args)
        self.member_uid = member_uid
        self.started, self.start = False, 1 << 63
        self.position = max(0, self.ledger.published - self.ledger.history)

    def next(self) -> int:
        """The sequence number to read next; 0 if there is none."""
        published = self.words[L_PUBLISHED]
        if not self.started:
            settle()
            start = self.ledger.start(
                self.member, self.member_uid
            )  # after `published`: see docs/protocols.md, section 2
            if start is not None:
                self.started, self.start = True, start
                self.position = min(self.position, start - 1) if self.ledger.history else start - 1
            elif not self.ledger.history:
                self.position = published
        return self.position + 1 if published > self.position else 0

    def take(self, array: np.ndarray[Any, Any], found: Found, seq: int) -> Lease | None:
        """Lease message `seq`; None if it is older than this receiver and the publisher took it back."""
        ring = found.ring
        if seq < self.start or self.always_locked:
            return self._take_locked(array, found, seq)
        word = ring.state + self.member * ring.row + found.slot
        # crash: take.found
        store(ring.words, word, 2 * seq)
        # crash: take.leased
        lease = Lease(array, self._ended)
        lease.seq, lease.word, lease.words = seq, word, ring.words
        self.leases[seq] = lease
        return lease

    def skip(self, seq: int) -> None:
        """Give back, unread, the slot of a message whose record is damaged, so that it holds nobody up."""
        place = self.words[self.order + (seq & self.mask)]
        if seq >= self.start and not self.always_locked and place >> 32 < len(self.rings):
            ring, slot = self.rings[place >> 32], place & 0xFFFFFFFF
            if slot < ring.slots:
                store(ring.words, ring.state + self.member * ring.row + slot, 2 * seq + 1)
                self.wake_sender()

    def _take_locked(self, array: np.ndarray[Any, Any], found: Found, seq: int) -> Lease | None:
        if not self.ledger.locks.try_shared(seq):
            return None
        # crash: take.shared
        if not self.holds(found.ring, found.slot, seq):
            self.ledger.locks.unlock(seq)
            return None
        lease = LockedLease(array, self._ended)
        lease.seq = seq
        self.leases[seq] = lease
        return lease

    def give_back(self, lease: Lease) -> None:
        # crash: release.ended
        if lease.locked:
            self.ledger.locks.unlock(lease.seq)
        else:
            store(lease.words, lease.word, 2 * lease.seq + 1)
        # crash: release.stored


class LatestFeed(BroadcastFeed):
    """Always the newest message, under a shared lock: never a recipient, never in the publisher's way."""

    __slots__ = ()

    always_locked = True

    def next(self) -> int:
        published = self.words[L_PUBLISHED]
        if not self.started:
            settle()
            start = self.ledger.start(self.member, self.member_uid)
            if start is not None:
                self.started, self.start = True, start
                self.position = min(self.position, start - 1)
        if published <= self.position:
            return 0
        if published < self.start and not self.ledger.history:
            self.position = published  # the publisher takes these back without asking
            return 0
        return published
