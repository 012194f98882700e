"""The readers in Python, the reference, one for each mode: docs/internals/protocols.md.

Sections 1, 2 and 6: of a subscriber for one publisher. Section 5: of a consumer. Section 13: of a member of a group.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..errors import DependencyError, WireError
from ..memory.words import store
from .layout import (
    ATTEMPT,
    ATTEMPT_SHIFT,
    CLAIMED,
    DONE,
    GROUP_DONE,
    L_PUBLISHED,
    LEASE,
    RELEASED,
    OtherVersion,
    lease_word,
    state_word,
)
from .reader import GIVEN_UP, OTHER, PASSED_OVER, UNREADABLE, Claim, Found, Lease, LockedLease, ReferenceReader
from .states import State, of_queue, of_recipient

if TYPE_CHECKING:
    import numpy as np

    from .ring import Ring


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
                value, meta = None, DependencyError(str(error))  # a new error: the frames of `error` refer to the array
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


NOTHING = (1 << 64) - 1
"""The result of `age` if there is no message."""

_UNDONE = (State.PUBLISHED, State.LEASED)


class CompetingReader(ReferenceReader):
    """Each message goes to the consumer that locks its byte first."""

    __slots__ = ("attempt",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attempt = 0
        self.begin_queue()

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
        for ring, slot, seq in sorted(self.unfinished(), key=lambda each: each[2]):
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
        begun = 0 if self.events is None else time.monotonic_ns()
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
        if self.events is not None:
            self.note_taken(seq, begun, attempt, found.nbytes)
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
                return found.ring.sent_ns[found.slot]
            self.position = seq
        return NOTHING

    @property
    def unacknowledged(self) -> int:
        """How many messages are held and not done."""
        return sum(not getattr(claim, "acknowledged", True) for claim in list(self.leases.values()))

    def set_siblings(self, words: tuple[int, ...]) -> None:
        """Set the `asleep` words of the other consumers. Only the compiled `recv` needs them."""

    def is_open(self, ring: Ring, slot: int, seq: int, *, walking: bool) -> bool:
        """Whether to try the lock of a message: when walking, of those that nobody has claimed."""
        state = self.state(ring, slot, seq)
        return state is State.PUBLISHED if walking else state in _UNDONE

    def claim(self, ring: Ring, slot: int, seq: int) -> bool:
        """Lock the message and count the attempt (`self.attempt`); False if another has it or it is done."""
        locks, byte = self.sequences.locks, self.claim_byte(seq)
        if seq in self.leases:  # the kernel would grant our own lock again
            return False
        # crash: claim.found
        self.taking = seq, ring, slot, None
        if not locks.try_exclusive(byte):
            self.taking = None
            return False
        # crash: claim.locked
        # the state before `seq`: else the slot could be reused, and done for its next message, in between
        if not self.may_claim(ring, slot, seq) or ring.seqs[slot] != seq or not self.keep(ring, slot, seq):
            locks.unlock(byte)
            self.taking = None
            return False
        before = self.attempts(ring, slot, seq)
        self.attempt = before + 1
        self.taking = seq, ring, slot, before  # from here on `abandon` restores the attempt
        self.store_attempts(ring, slot, seq, self.attempt)
        # crash: claim.stored
        return True

    def keep(self, ring: Ring, slot: int, seq: int) -> bool:
        """Make sure that the sender keeps a claimed message; False if it takes it back."""
        return True

    def lease(self, array: np.ndarray[Any, Any], found: Found, seq: int) -> Claim:
        """Begin the lease of a claimed message."""
        claim = Claim(array, self._ended)
        claim.seq, claim.words = seq, found.ring.words
        self.place(claim, found.ring, found.slot)
        claim.acknowledged = claim.released = claim.done_at_end = False
        self.hold(claim)
        return claim

    def abandon(self) -> None:
        if self.taking is None:
            return
        seq, ring, slot, attempts = self.taking
        self.leases.pop(seq, None)
        if attempts is not None and self.state(ring, slot, seq) in _UNDONE:
            self.store_attempts(ring, slot, seq, attempts)  # this one does not count
        self.taking = seq, ring, slot, None  # from here on only the lock is left
        self.unlock(seq)
        self.taking = None

    def skip(self, seq: int) -> None:
        """Finish a message whose record is damaged, so that its slot is not lost."""
        index, slot = self.sequences.place(seq)
        if index < len(self.rings):
            ring = self.rings[index]
            if slot < ring.slots and self.is_open(ring, slot, seq, walking=False) and self.claim(ring, slot, seq):
                self.drop(ring, slot, seq)

    def drop(self, ring: Ring, slot: int, seq: int) -> None:
        """Finish a claimed message without delivering it."""
        self.store_released(ring, slot, seq)
        self.unlock(seq)
        self.taking = None
        self.wake_sender()

    def unlock(self, seq: int) -> None:
        """Drop what locks message `seq`."""
        self.sequences.locks.unlock(self.claim_byte(seq))

    def give_back(self, lease: Claim) -> None:
        # crash: release.ended
        if lease.done_at_end:
            lease.acknowledge()
        if lease.acknowledged and not lease.released:
            lease.released = True
            self.end(lease)
            # crash: release.stored
        self.unlock(lease.seq)  # if it is not acknowledged, others may claim it from here on

    # --- the words of a slot

    def state(self, ring: Ring, slot: int, seq: int) -> State:
        """What they say of message `seq`. LEASED: a consumer has claimed it, which may have died since."""
        return of_queue(ring.words, state_word(ring, slot), seq)

    def may_claim(self, ring: Ring, slot: int, seq: int) -> bool:
        """With the lock: whether the message is not done."""
        return self.state(ring, slot, seq) in _UNDONE

    def attempts(self, ring: Ring, slot: int, seq: int) -> int:
        """How often the message was claimed."""
        before = ring.words[state_word(ring, slot) + ATTEMPT]
        return before & 0xFF if before >> 8 == seq else 0

    def store_attempts(self, ring: Ring, slot: int, seq: int, count: int) -> None:
        """Store that it was claimed so often; 0: that nobody has had it."""
        at = state_word(ring, slot)
        store(ring.words, at + ATTEMPT, seq << 8 | min(count, 255))
        store(ring.words, at + CLAIMED, seq if count else 0)

    def store_released(self, ring: Ring, slot: int, seq: int) -> None:
        """Store that a claimed message is done and given back."""
        at = state_word(ring, slot)
        store(ring.words, at + DONE, seq)
        store(ring.words, at + RELEASED, seq)

    def place(self, claim: Claim, ring: Ring, slot: int) -> None:
        """Set which of the words are those of a claim's message."""
        claim.word = state_word(ring, slot)
        claim.done = claim.word + DONE, claim.seq

    def end(self, claim: Claim) -> None:
        """Store that an acknowledged message is given back."""
        store(claim.words, claim.word + RELEASED, claim.seq)


class GroupReader(CompetingReader):
    """Reads a fan-out for a group: each message goes to the member that locks its byte first (protocols.md, section
    13).

    Until the publisher has stored the group's `start`, messages (of `history=`) are taken under a shared lock, too.
    """

    __slots__ = ("shared",)

    def begin_queue(self) -> None:
        self.shared: set[int] = set()  # messages that this member holds by a shared lock as well
        self.begin()

    def next(self) -> int:
        published = self.newest()
        if not self.start and not self.has_started() and not self.sequences.history:
            self.position = published  # all of these were sent before the publisher saw this group
        return super().next()

    def is_open(self, ring: Ring, slot: int, seq: int, *, walking: bool) -> bool:
        state = self.state(ring, slot, seq)
        return state is State.PUBLISHED if walking else state is not State.RELEASED

    def may_claim(self, ring: Ring, slot: int, seq: int) -> bool:
        state = self.state(ring, slot, seq)
        if state is State.DONE:  # the member that had it has died with a view: no other process frees the slot
            self.store_released(ring, slot, seq)
            self.wake_sender()
        return state in _UNDONE

    def keep(self, ring: Ring, slot: int, seq: int) -> bool:
        if self.start:
            return True
        locks = self.sequences.locks
        self.shared.add(seq)  # first: `unlock` may be called from here on
        if not locks.try_shared(seq):
            self.shared.discard(seq)
            return False
        # crash: take.shared
        if ring.seqs[slot] == seq:
            return True
        self.unlock(seq)
        self.wake_sender()  # our lock may have made it fail
        return False

    def unlock(self, seq: int) -> None:
        if seq in self.shared:
            self.sequences.locks.unlock(seq)
            self.shared.discard(seq)
        super().unlock(seq)

    def state(self, ring: Ring, slot: int, seq: int) -> State:
        return of_recipient(ring.words[self.group_word(ring, slot)], seq)

    def attempts(self, ring: Ring, slot: int, seq: int) -> int:
        word = ring.words[self.group_word(ring, slot)]
        return word >> ATTEMPT_SHIFT if word & LEASE == 2 * seq else 0

    def store_attempts(self, ring: Ring, slot: int, seq: int, count: int) -> None:
        word = min(count, GROUP_DONE - 1) << ATTEMPT_SHIFT | 2 * seq if count else 0
        store(ring.words, self.group_word(ring, slot), word)
        store(ring.words, self._own_word(ring, slot), 2 * seq if count else 0)

    def store_released(self, ring: Ring, slot: int, seq: int) -> None:
        store(ring.words, self.group_word(ring, slot), 2 * seq + 1)

    def place(self, claim: Claim, ring: Ring, slot: int) -> None:
        claim.word, claim.own = self.group_word(ring, slot), self._own_word(ring, slot)
        claim.done = claim.word, GROUP_DONE << ATTEMPT_SHIFT | 2 * claim.seq

    def give_back(self, lease: Claim) -> None:
        store(lease.words, lease.own, 2 * lease.seq + 1)
        super().give_back(lease)

    def end(self, claim: Claim) -> None:
        store(claim.words, claim.word, 2 * claim.seq + 1)

    def _own_word(self, ring: Ring, slot: int) -> int:
        """Index of this member's own word for a slot: it shows who holds a message, and no sender waits for it."""
        return lease_word(ring, self.member, slot)
