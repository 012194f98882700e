"""The reader of a consumer for one producer, the reference: docs/internals/protocols.md, section 5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import DependencyError, WireError
from ..memory.words import store
from .layout import ATTEMPT, CLAIMED, DONE, R_RECORDS, RECORD_WORDS, RELEASED, OtherVersion
from .lease import Claim, Lease
from .reader import GIVEN_UP, OTHER, PASSED_OVER, UNREADABLE, Found, ReferenceReader

if TYPE_CHECKING:
    import numpy as np

    from .ring import Ring

NOTHING = (1 << 64) - 1
"""The result of `age` if there is no message."""


def state_word(ring: Ring, slot: int) -> int:
    """Index of the first state word of a slot."""
    return ring.state + 8 * slot


class CompetingReader(ReferenceReader):
    """Each message goes to the consumer that locks its byte first."""

    __slots__ = ("attempt",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attempt = 0
        self._begin_queue()

    def next(self) -> int:
        published = self.newest()
        if published <= self.position:
            return 0
        if published - self.position > self.mask:  # the order entries are overwritten: others took those messages
            self.position = published - self.mask
        return self.position + 1

    def take(self, receiver: Any, undelivered: dict[Any, Any], patience: int) -> Any:
        while seq := self.next():
            try:
                found = self.locate(seq)
            except OtherVersion as error:
                return OTHER, seq, str(error)
            except WireError as error:
                self.position = seq
                self.skip(seq)
                return PASSED_OVER, seq, str(error)
            except FileNotFoundError:  # the producer and its ring are gone: all messages in it were done
                found = None
            self.position = seq
            if found is None or not self.is_open(found.ring, found.slot, seq, walking=True):
                continue
            if self.claim(found.ring, found.slot, seq):
                return self._deliver(found, seq, receiver, undelivered)
        return None

    def take_unfinished(self, receiver: Any, undelivered: dict[Any, Any]) -> Any:
        """As `take`, for the oldest message that a consumer claimed and did not finish."""
        for ring, slot, seq in self.unfinished():
            if seq > self.position:
                break  # `take` will reach it
            if not self.is_open(ring, slot, seq, walking=False) or not self.claim(ring, slot, seq):
                continue
            try:
                found = self.read(ring, slot, seq)
            except OtherVersion as error:
                self.abandon()
                return OTHER, seq, str(error)
            except WireError as error:
                self.drop(ring, slot, seq)
                return PASSED_OVER, seq, str(error)
            if found is not None:
                return self._deliver(found, seq, receiver, undelivered)
            self.drop(ring, slot, seq)
        return None

    def take_named(self, seq: int, receiver: Any, undelivered: dict[Any, Any]) -> Any:
        """As `take`, for message `seq`."""
        try:
            found = self.locate(seq)
        except (WireError, FileNotFoundError) as error:
            return PASSED_OVER, seq, str(error)
        if found is None or not self.claim(found.ring, found.slot, seq):
            return None
        self.position = max(self.position, seq)
        return self._deliver(found, seq, receiver, undelivered)

    def _deliver(self, found: Found, seq: int, receiver: Any, undelivered: dict[Any, Any]) -> Any:
        """Return the message of a claimed record; finish it and return an event if it is damaged or tried too often."""
        attempt, reception = self.attempt, self.reception
        if attempt > reception.max_attempts:
            self.drop(found.ring, found.slot, seq)
            return GIVEN_UP, seq, attempt - 1
        array = found.array()
        claim = self.lease(array, found, seq)
        try:
            value, meta = reception.decode(found.description, array, readonly=reception.readonly)
        except WireError as error:
            claim.acknowledge()
            self.taking = None
            return PASSED_OVER, seq, str(error)
        except DependencyError as error:
            self.abandon()  # if it is interrupted, the caller repeats it
            return UNREADABLE, seq, str(error)
        message = reception.message(
            value, meta, seq, self.sender, found.sent_ns, found.nbytes, attempt, 0, array, claim, receiver
        )
        undelivered[message] = None  # no boundary between these two lines: the message is taken, or not at all
        self.taking = None
        self.count(found.nbytes, redelivered=attempt > 1)
        # crash: take.delivered
        return message

    def age(self) -> int:
        """When the next unclaimed message was published, on CLOCK_MONOTONIC, nanoseconds. Skips claimed ones.

        0 if only `take` can tell, `NOTHING` if there is none.
        """
        while seq := self.next():
            try:
                found = self.locate(seq)
            except (WireError, FileNotFoundError):
                return 0
            if found is not None and self.is_open(found.ring, found.slot, seq, walking=True):
                return found.ring.words[R_RECORDS + found.slot * RECORD_WORDS + 1]
            self.position = seq
        return NOTHING

    def has_lease(self, ring: int, slot: int, seq: int) -> bool:
        """Whether this consumer holds that message."""
        return seq in self.leases

    @property
    def unacknowledged(self) -> int:
        """How many messages are held and not done."""
        return sum(not getattr(claim, "acknowledged", True) for claim in list(self.leases.values()))

    def set_siblings(self, words: tuple[int, ...]) -> None:
        """Set the `asleep` words of the other consumers. Only the compiled `recv` needs them."""

    def is_open(self, ring: Ring, slot: int, seq: int, *, walking: bool) -> bool:
        """Whether to try the lock of a message: it is not done and, when walking, not claimed by another consumer."""
        at, words = state_word(ring, slot), ring.words
        return words[at + DONE] != seq and not (walking and words[at + CLAIMED] == seq)

    def claim(self, ring: Ring, slot: int, seq: int) -> bool:
        """Lock the message and count the attempt (`self.attempt`); False if another has it or it is done."""
        words, at = ring.words, state_word(ring, slot)
        locks = self.sequences.locks
        if seq in self.leases:  # the kernel would grant our own lock again
            return False
        # crash: claim.found
        self.taking = seq, at, words, None
        if not locks.try_exclusive(seq):
            self.taking = None
            return False
        # crash: claim.locked
        # `done` before `seq`: the other way round, the slot could be reused, and done for its next message, in between
        if words[at + DONE] >= seq or words[R_RECORDS + slot * RECORD_WORDS] != seq:
            locks.unlock(seq)
            self.taking = None
            return False
        before = words[at + ATTEMPT]
        self.attempt = (before & 0xFF if before >> 8 == seq else 0) + 1
        counted = seq << 8 | min(self.attempt, 255)
        self.taking = seq, at, words, before  # from here on `abandon` restores the attempt
        store(words, at + ATTEMPT, counted)
        store(words, at + CLAIMED, seq)
        # crash: claim.stored
        return True

    def lease(self, array: np.ndarray[Any, Any], found: Found, seq: int) -> Claim:
        """Begin the lease of a claimed message."""
        claim = Claim(array, self._ended)
        claim.seq, claim.word, claim.words = seq, state_word(found.ring, found.slot), found.ring.words
        claim.acknowledged = claim.released = False
        self.hold(claim)
        return claim

    def abandon(self) -> None:
        if self.taking is None:
            return
        seq, at, words, attempt = self.taking
        self.leases.pop(seq, None)
        if attempt is not None and words[at + DONE] != seq:
            store(words, at + ATTEMPT, attempt)  # this one does not count
            if attempt >> 8 != seq:
                store(words, at + CLAIMED, 0)  # no consumer has had it
        self.taking = seq, at, words, None  # from here on only the lock is left
        self.sequences.locks.unlock(seq)
        self.taking = None

    def skip(self, seq: int) -> None:
        """Finish a message whose record is damaged, so that its slot is not lost."""
        entry = self.words[self.order + (seq & self.mask)]
        if entry >> 32 < len(self.rings):
            ring, slot = self.rings[entry >> 32], entry & 0xFFFFFFFF
            if slot < ring.slots and self.is_open(ring, slot, seq, walking=False) and self.claim(ring, slot, seq):
                self.drop(ring, slot, seq)

    def drop(self, ring: Ring, slot: int, seq: int) -> None:
        """Finish a claimed message without delivering it."""
        at = state_word(ring, slot)
        store(ring.words, at + DONE, seq)
        store(ring.words, at + RELEASED, seq)
        self.sequences.locks.unlock(seq)
        self.taking = None
        self.wake_sender()

    def give_back(self, lease: Lease) -> None:
        # crash: release.ended
        if lease.acknowledged and not lease.released:  # type: ignore[attr-defined]
            lease.released = True  # type: ignore[attr-defined]
            store(lease.words, lease.word + RELEASED, lease.seq)
            # crash: release.stored
        self.sequences.locks.unlock(lease.seq)  # if it is not acknowledged, others may claim it from here on
