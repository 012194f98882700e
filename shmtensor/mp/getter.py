"""The end of a queue with which a process gets: a consumer that takes the oldest item of all putters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..channel import control as ctl
from ..endpoints.message import Message
from ..ring.reader import GIVEN_UP
from .to_device import DeviceConsumer


def _age(reader: Any) -> int:
    """When a putter's next item was put; its rings are attached for that, or 0 would put it before all others."""
    found: int = reader.age()
    if not found:
        reader.map_all()
        found = reader.age()
    return found


class Getter(DeviceConsumer):
    """The consumer of one process. `abandoned` is called when an item is dropped after too many attempts."""

    _traits = replace(DeviceConsumer._traits, counts_lost=False)

    def __init__(self, channel: str, abandoned: Callable[[], None]) -> None:
        self._when_abandoned = abandoned
        super().__init__(channel, acknowledge="release")

    def _poll(self, patience: int = 0) -> Message | None:
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        if len(self._readers) > 1:
            self._readers.sort(key=_age)
            self._turn = 0
        return super()._poll(patience)

    def _is_over(self) -> bool:
        """Always False: any process with the queue may put. `WireError` if the only putters left cannot be read."""
        self._retire_drained()
        if not self._readers:
            self._refresh_if_moved()
        if not self._readers and (unread := self.unread()) is not None:
            raise unread
        return False

    def _take(self, reader: Any, patience: int = 0) -> Message | None:
        message = super()._take(reader, patience)
        if message is None:
            return None
        # crash: get.delivered
        return message

    def _handle(self, reader: Any, event: Any) -> None:
        super()._handle(reader, event)
        if event[0] == GIVEN_UP:
            self._when_abandoned()

    def pop(self, make: Callable[[Any], object], made: list[Any], when_got: Callable[[], object] | None) -> bool:
        """In one C call: append `make(next item)` to `made`, mark the item as done and call `when_got`.

        Returns False and does nothing if there is no item, or an interrupted call or a scan comes first. If `make`
        raises, it is called again: if it raises again, the item is lost and `when_got` is called; if not, the exception
        was asynchronous, and the item is appended. The exception is raised in both cases.
        """
        direct = self._direct
        if direct is None or self._undelivered or self._scan_wanted:  # an interrupted call's item first
            return False
        taken = direct.consume(make, made, when_got) is True
        if direct.more:
            self._share()
        return taken

    def is_empty(self) -> bool:
        """Whether there is nothing to get now, neither new nor given back by a getter that died."""
        self._try_run(self._refresh_if_moved)  # else another thread is inside a get, which refreshes as well
        return not self._undelivered and not any(_has_open(reader) for reader in list(self._readers))

    def end(self) -> None:
        """Leave at the end of the process: clean up, even though views of items are alive."""
        self._at_exit()

    def _refresh_if_moved(self) -> None:
        if not self._state and self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()


def _has_open(reader: Any) -> bool:
    """Whether a putter has an item that is not done and that no living getter has taken."""
    return any(
        not reader.has_lease(ring.index, slot, seq) and not reader.sequences.locks.held_by_other(seq)
        for ring, slot, seq in reader.unfinished()
    )
