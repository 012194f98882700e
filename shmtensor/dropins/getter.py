"""A process's getting end of a queue: a consumer that takes the oldest item of all putters and never sees an end."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from ..channel import control as ctl
from ..endpoints.consumer import Consumer
from ..endpoints.message import Message
from ..ring.feed import GIVEN_UP

_age = methodcaller("age")


class Getter(Consumer):
    """The consumer of one process's gets. `abandoned` is called when an item is dropped after too many attempts."""

    _counts_lost = False

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
        """A queue has no end: whoever holds it may put. Raises `WireError` if whoever does cannot be read."""
        self._retire_drained()
        if not self._feeds:
            self._refresh_if_moved()
        if not self._feeds and (unread := self.unread()) is not None:
            raise unread
        return False

    def _take(self, feed: Any, patience: int = 0) -> Message | None:
        message = super()._take(feed, patience)
        if message is None:
            return None
        # crash: get.delivered
        return message

    def _handle(self, feed: Any, event: Any) -> None:
        super()._handle(feed, event)
        if event[0] == GIVEN_UP:
            self._when_abandoned()

    def pop(self, make: Callable[[Any], object], made: list[Any], settled: Callable[[], object] | None) -> bool:
        """Append what `make` makes of the next item to `made`, say that it is done and call `settled`: in one call.

        False, and nothing done, if there is none, or something is to be done first. An item that `make` refuses is
        gone, and `settled` is called. What a first try raises and a second does not arrived there from outside: then
        the item is appended, and the exception raised.
        """
        direct = self._direct
        if direct is None or self._undelivered or self._scan_wanted:  # what an interrupted call has taken comes first
            return False
        taken = direct.consume(make, made, settled) is True
        if direct.more:
            self._share()
        return taken

    def is_empty(self) -> bool:
        """Whether there is nothing to get now, be it new or given back by a getter that died."""
        self._try_run(self._refresh_if_moved)  # else a thread that gets is looking around itself
        return not self._undelivered and not any(_has_open(feed) for feed in list(self._feeds))

    def _refresh_if_moved(self) -> None:
        if not self._state and self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()


def _has_open(feed: Any) -> bool:
    """Whether a putter has an item that is not done and that no living getter has."""
    return any(
        not feed.has_lease(ring.index, slot, seq) and not feed.ledger.locks.held_by_other(seq)
        for ring, slot, seq in feed.unfinished()
    )
