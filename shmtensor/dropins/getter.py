"""A process's getting end of a queue: a consumer that takes the oldest item of all putters and never sees an end."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from ..channel import control as ctl
from ..endpoints.consumer import Consumer
from ..endpoints.message import Message
from ..errors import WireError
from ..ring.competing import CompetingFeed
from ..ring.feed import ARRAY, Found
from ..ring.layout import R_RECORDS, RECORD_WORDS
from . import pickling

_NOTHING = 1 << 64


class Getter(Consumer):
    """The consumer of one process's gets. `abandoned` is called when an item is dropped after too many attempts."""

    def __init__(self, channel: str, abandoned: Callable[[], None]) -> None:
        self._when_abandoned = abandoned
        super().__init__(channel, acknowledge="release")

    def _poll(self, patience: int = 0) -> Message | None:
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        if len(self._feeds) > 1:
            self._feeds.sort(key=_age)
            self._turn = 0
        return super()._poll(patience)

    def _is_over(self) -> bool:
        """A queue has no end: whoever holds it may put."""
        self._retire_drained()
        return False

    def _deliver(self, feed: CompetingFeed, found: Found, seq: int) -> Message | None:
        before = self._abandoned
        message = super()._deliver(feed, found, seq)
        # crash: get.delivered
        if self._abandoned != before:
            self._when_abandoned()
        if message is not None and found.kind == ARRAY and pickling.is_stream(message.value):
            self._learn(feed, found, None)
        return message

    def pop(self, missing: object) -> Any:
        """The next item if it is one that the compiled module can unpickle from its slot, else `missing`.

        The item is its getter's then, also if unpickling raises.
        """
        inlet = self._inlet
        return missing if inlet is None else inlet.pop(pickle.loads, missing)

    def is_empty(self) -> bool:
        """Whether there is nothing to get now, be it new or given back by a getter that died."""
        if self._mutex.acquire(blocking=False):  # else a thread that gets is looking around itself
            try:
                if not self._state and self._control_words[ctl.W_EPOCH] != self._epoch:
                    self._refresh()
            finally:
                self._mutex.release()
        return not any(_has_open(feed) for feed in list(self._feeds))


def _age(feed: CompetingFeed) -> int:
    """When the next message of a putter was published, on the host's monotonic clock; passes over what others have."""
    while seq := feed.next():
        try:
            ring, slot = _place(feed, seq)
        except (WireError, FileNotFoundError):
            return 0  # for the walk to report
        at = R_RECORDS + slot * RECORD_WORDS
        stamp: int = ring.words[at + 1]
        if ring.words[at] == seq and feed.is_open(ring, slot, seq, walking=True):
            return stamp
        feed.position = seq
    return _NOTHING


def _place(feed: CompetingFeed, seq: int) -> tuple[Any, int]:
    place = feed.words[feed.order + (seq & feed.mask)]
    ring, slot = feed.ring(place >> 32), place & 0xFFFFFFFF
    if slot >= ring.slots:
        raise WireError(f"order entry of message {seq} names slot {slot} of {ring.slots}")
    return ring, slot


def _has_open(feed: CompetingFeed) -> bool:
    """Whether a putter has an item that is not done and that no living getter has."""
    return any(seq not in feed.leases and not feed.ledger.locks.held_by_other(seq) for _, _, seq in feed.unfinished())
