"""A consumer's end of one producer: docs/protocols.md, section 5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import WireError
from ..memory.words import store
from .feed import Feed, Found
from .layout import ATTEMPT, CLAIMED, DONE, L_PUBLISHED, R_RECORDS, RECORD_WORDS, RELEASED
from .lease import Claim, Lease

if TYPE_CHECKING:
    import numpy as np

    from .ring import Ring


def state_word(ring: Ring, slot: int) -> int:
    """Index of a slot's four state words."""
    return ring.state + 8 * slot


class CompetingFeed(Feed):
    """Each message goes to whoever locks its byte first."""

    __slots__ = ("attempt",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attempt = 0
        published = self.words[L_PUBLISHED]
        self.position = next((seq - 1 for _, _, seq in self.unfinished()), published)

    def next(self) -> int:
        """The sequence number to walk to next; 0 if there is none."""
        published = self.words[L_PUBLISHED]
        if published <= self.position:
            return 0
        if published - self.position > self.mask:  # the order entries are overwritten: others took what was there
            self.position = published - self.mask
        return self.position + 1

    def is_open(self, ring: Ring, slot: int, seq: int, *, walking: bool) -> bool:
        """Whether a message may be worth locking: not done, and on the walk not claimed by another either."""
        at, words = state_word(ring, slot), ring.words
        return words[at + DONE] != seq and not (walking and words[at + CLAIMED] == seq)

    def claim(self, ring: Ring, slot: int, seq: int) -> bool:
        """Lock the message and count the attempt (`self.attempt`); False if another has it or it is done."""
        words, at = ring.words, state_word(ring, slot)
        locks = self.ledger.locks
        if seq in self.leases:  # a lock of our own would be granted again
            return False
        # crash: claim.found
        if not locks.try_exclusive(seq):
            return False
        # crash: claim.locked
        # `done` before `seq`: the other way round, the slot could be reused, and done for its next message, in between
        if words[at + DONE] >= seq or words[R_RECORDS + slot * RECORD_WORDS] != seq:
            locks.unlock(seq)
            return False
        before = words[at + ATTEMPT]
        self.attempt = (before & 0xFF if before >> 8 == seq else 0) + 1
        store(words, at + ATTEMPT, seq << 8 | min(self.attempt, 255))
        store(words, at + CLAIMED, seq)
        # crash: claim.stored
        return True

    def take(self, array: np.ndarray[Any, Any], found: Found, seq: int) -> Claim:
        """Watch the view of a claimed message."""
        claim = Claim(array, self._ended)
        claim.seq, claim.word, claim.words = seq, state_word(found.ring, found.slot), found.ring.words
        claim.acknowledged = False
        self.hold(claim)
        return claim

    def skip(self, seq: int) -> None:
        """Finish a message whose record is damaged, so that its slot is not lost."""
        place = self.words[self.order + (seq & self.mask)]
        if place >> 32 < len(self.rings):
            ring, slot = self.rings[place >> 32], place & 0xFFFFFFFF
            if slot < ring.slots and self.is_open(ring, slot, seq, walking=False) and self.claim(ring, slot, seq):
                self.drop(ring, slot, seq)

    def drop(self, ring: Ring, slot: int, seq: int) -> None:
        """Finish a claimed message without delivering it."""
        at = state_word(ring, slot)
        store(ring.words, at + DONE, seq)
        store(ring.words, at + RELEASED, seq)
        self.ledger.locks.unlock(seq)
        self.wake_sender()

    def give_back(self, lease: Lease) -> None:
        # crash: release.ended
        if lease.acknowledged:  # type: ignore[attr-defined]
            store(lease.words, lease.word + RELEASED, lease.seq)
            # crash: release.stored
        self.ledger.locks.unlock(lease.seq)  # not acknowledged: others may claim it from here on

    def unfinished(self) -> Iterator[tuple[Ring, int, int]]:
        """(ring, slot, seq) of every published message that is not done, oldest first: a look through all records."""
        published = self.words[L_PUBLISHED]
        found = []
        for index in range(self.ledger.rings):
            try:
                ring = self.ring(index)
            except (FileNotFoundError, WireError):
                break  # its producer removed it: everything is done (a damaged one is the walk's to report)
            words, state = ring.words, ring.state
            for slot in range(ring.slots):
                seq = words[R_RECORDS + slot * RECORD_WORDS]
                if 0 < seq <= published and words[state + 8 * slot + DONE] != seq:
                    found.append((seq, index, slot))
        found.sort()
        return ((self.rings[index], slot, seq) for seq, index, slot in found)
