"""Parcels: one process to one other, through the rings of a work queue.

A work queue gives a message to whichever consumer takes it first. An executor knows better: each call is one worker's,
each result is its parent's. So nobody walks these queues and nobody sleeps on them: what a process sends, it names in
what wakes the receiver anyway (`Parcel`), and the receiver claims exactly that message. Everything else is the work
queue's: the lock that is the claim, the lease that ends with the last view, the clean-up after any death.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..channel.doorbells import Doorbells
from ..channel.membership import Member
from ..endpoints.base import TICK
from ..endpoints.consumer import Consumer
from ..endpoints.message import Message
from ..endpoints.producer import Producer
from ..errors import PeerDied, ResourceError, RingFull, WireError
from ..memory.segment import PAGE, free_bytes
from ..ring.competing import state_word
from ..ring.feed import ATTACH, GIVEN_UP
from ..ring.layout import CLAIMED, DONE, R_RECORDS, RECORD_WORDS, RingShape, round_slot
from ..ring.pool import Pool, Sizing
from ..units import format_bytes
from .streams import nbytes_of

_RING_BYTES: Final = 8 << 20
"""The first rings of a sender are about so large; later ones a quarter of what it has."""
_MOST_SLOTS: Final = 1024


class Parcel(NamedTuple):
    """Names one message: small enough for any message."""

    sender: int
    """The sending endpoint's uid."""
    seq: int


def check_fits(value: list[Any], max_bytes: int | None, what: str) -> None:
    """Raise `ResourceError` for a value that no ring within `max_bytes` could ever hold."""
    nbytes = nbytes_of(value)
    if max_bytes is not None and nbytes > max_bytes:
        raise ResourceError(
            errno.ENOMEM,
            f"{what} of {format_bytes(nbytes)} is larger than max_bytes={format_bytes(max_bytes)}: "
            "pass a larger max_bytes= or send less at a time",
        )


class _FittedPool(Pool):
    """Makes each ring to fit the message that needed it, so that a few huge messages do not make all slots huge."""

    __slots__ = ()

    def _shape(self, nbytes: int) -> RingShape:
        # sizes that differ a little share slots: at most an eighth is given away
        step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
        slot_bytes = round_slot(nbytes if nbytes <= PAGE // 2 else (nbytes + step - 1) // step * step)
        room = min(max(_RING_BYTES, self.nbytes // 4), free_bytes() // 2)
        if self._max_bytes is not None:
            room = min(room, self._max_bytes - self.nbytes)
        slots = max(1, min(room // slot_bytes, _MOST_SLOTS, self._ledger.mask - self.slots))
        shape = RingShape(self._kind, slots, slot_bytes, self._capacity)
        if slots == 1 and shape.nbytes > room:
            return RingShape(self._kind, 1, round_slot(nbytes), self._capacity)
        while shape.slots > 1 and shape.nbytes > room:
            shape = RingShape(self._kind, shape.slots - (shape.slots + 7) // 8, slot_bytes, self._capacity)
        return shape

    def may_grow(self, nbytes: int) -> bool:
        """Growth leaves half of what `/dev/shm` has to others: they may not expect that it is full."""
        return super().may_grow(nbytes) and self._shape(nbytes).nbytes <= free_bytes() // 2


class Outbox(Producer):
    """Sends parcels. Its rings grow up to `max_bytes`, or as far as `/dev/shm` allows."""

    _counts_lost = False
    _pool_type = _FittedPool
    _sizing = Sizing.exactly(1)

    def __init__(self, channel: str, max_bytes: int | None) -> None:
        super().__init__(channel, full="grow", max_bytes=max_bytes)

    def post(self, value: list[Any], hope: Callable[[], bool], what: str, holder: str) -> Parcel:
        """Send a value that `streams.dumps` made.

        Waits for room as long as `hope()` says that some may come; then raises `ResourceError`, which says that there
        is none for `what` and that `holder` has it.
        """
        check_fits(value, self._max_bytes, what)
        while True:
            try:
                return Parcel(self._member.uid, self.send(value, timeout=TICK))
            except RingFull:
                if not hope():
                    raise ResourceError(errno.ENOMEM, self._shortage(nbytes_of(value), what, holder)) from None

    def post_now(self, value: list[Any]) -> Parcel:
        """As `post`, but raises `RingFull` instead of waiting."""
        return Parcel(self._member.uid, self.send(value, timeout=0))

    def _shortage(self, nbytes: int, what: str, holder: str) -> str:
        now = self.statistics()
        limit = "none" if self._max_bytes is None else format_bytes(self._max_bytes)
        return (
            f"no room for {what} of {format_bytes(nbytes)}: {now.slots_busy} of {now.slots} slots "
            f"({format_bytes(now.ring_bytes)} of shared memory) are held by {holder}; max_bytes={limit}, /dev/shm has "
            f"{format_bytes(free_bytes())} free: drop tensors, copy those that you keep, or pass a larger max_bytes="
        )

    @property
    def index(self) -> int:
        """This member's place in the channel's table, by which others ask whether it lives."""
        return self._member.index

    def is_settled(self) -> bool:
        """Whether every parcel was taken and finished with; views of them may be alive."""
        return bool(self._run(self._is_settled))

    def was_lost(self, parcel: Parcel) -> bool:
        """Whether somebody took the parcel and is gone: died with it, or finished and then died."""
        place = self._words[self._order + (parcel.seq & self._mask)]
        ring, slot = self._rings[place >> 32], place & 0xFFFFFFFF
        words, state = ring.words, state_word(ring, slot)
        if words[R_RECORDS + slot * RECORD_WORDS] != parcel.seq or words[state + DONE] == parcel.seq:
            return True
        return words[state + CLAIMED] == parcel.seq and not self._ledger.locks.held_by_other(parcel.seq)


class _NoInbox:
    """Nobody sleeps on parcels, so there is no socket for doorbells."""

    def close(self) -> None:
        """Nothing to close."""


class Inbox(Consumer):
    """Takes parcels by name. `recv` is not for it."""

    _counts_lost = False

    def __init__(self, channel: str) -> None:
        super().__init__(channel, acknowledge="release")

    def _prepare(self, member: Member) -> None:
        self._member = member
        self._bells = Doorbells(member.directory)
        self._inbox = _NoInbox()  # type: ignore[assignment]

    def take(self, parcel: Parcel) -> Message:
        """The message of a parcel; `release()` says that it is done, its slot is given back when the last view dies.

        Raises `PeerDied` if it is not there, `WireError` if its bytes are not valid.
        """
        return self._run(self._take_inside, parcel)  # type: ignore[no-any-return]

    def _take_inside(self, parcel: Parcel) -> Message:
        if self._state:
            self._refuse()
        if (now := time.monotonic()) >= self._look_around_due:  # nobody waits here, and so nobody else looks
            self._look_around_due = now + TICK
            self._end_dead_leases()
        feed = self._feed(parcel.sender)
        if feed is not None:
            try:
                while type(found := feed.take_named(parcel.seq, self, self._undelivered)) is tuple:
                    if found[0] == ATTACH:
                        feed.ring(found[2])
                    elif found[0] == GIVEN_UP:
                        self._handle(feed, found)
                    else:
                        raise WireError(feed.explain(found))
                if found is not None:
                    self._undelivered.clear()
                    return found  # type: ignore[no-any-return]
            except BaseException:
                feed.abandon()
                found = None
                self._undelivered.clear()  # it may be taken again
                raise
        raise PeerDied(f'channel "{self.name}": message {parcel.seq} of member {parcel.sender:016x} is gone')

    def _feed(self, sender: int) -> Any:
        feed = next((feed for feed in self._feeds if feed.uid == sender), None)
        if feed is None:
            self._refresh()
            feed = next((feed for feed in self._feeds if feed.uid == sender), None)
        return feed

    def is_alive(self, index: int) -> bool:
        """Whether the member at a place of the channel's table lives. May be called from any thread."""
        return self._member.control.is_alive(index)
