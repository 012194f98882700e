"""How items are sent: in order, small ones together in a frame, large ones in parts, as far as there is credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, Protocol, TypeVar

from .frames import MOST_BODY, MOST_ITEMS, Item, Items, Part
from .window import Outgoing

BATCH: Final = 256 << 10
"""Bytes of small items that go into one frame."""
_SMALL: Final = 256 << 10
"""An item with more bytes goes alone, in parts."""
PART: Final = MOST_BODY // 2


class Sendable(Protocol):
    """What is sent: a message as it is."""

    @property
    def value(self) -> Any:
        """The payload."""

    @property
    def meta(self) -> Any:
        """The description."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""


T = TypeVar("T", bound=Sendable)


class ItemSender(Generic[T]):
    """Sends items of a window, in one attempt. What waits here leaves when it was sent, in order: none is passed over.

    Args:
        ids: of the frames: near relay, far relay, attempt.
        after: the number of the item that the other side has received last.
        waiting: numbers and items that are to be sent first.
        window: what is under way; what leaves it meanwhile is not sent.
        lock: of the window.
        origin: the sender of an item, as frames name it.
        claim: waits for credit for so many bytes; False: there is none, and what waits is to wait.
        put: sends a frame.
    """

    def __init__(
        self,
        ids: tuple[int, int, int],
        after: int,
        waiting: Iterable[tuple[int, T]],
        window: Outgoing[T],
        *,
        lock: AbstractContextManager[Any],
        origin: Callable[[T], int],
        claim: Callable[[int], bool],
        put: Callable[[bytes, bytes], None],
    ) -> None:
        self._ids, self.after, self._window = ids, after, window
        self._waiting = deque(waiting)
        self._offset = 0  # how much of the first one was sent
        self._lock, self._origin, self._claim, self._put = lock, origin, claim, put

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entries: Iterable[tuple[int, T]]) -> None:
        """Items to be sent behind those that wait."""
        self._waiting.extend(entries)

    def send(self) -> None:
        """Send what waits, as far as there is credit."""
        while self._waiting:
            number, item = self._waiting[0]
            with self._lock:
                is_wanted = number in self._window  # else it was acknowledged meanwhile, and is released
            if not is_wanted:
                self._pop(1)
            elif not (self._send_large(number, item) if _size(item) > _SMALL else self._send_small()):
                return

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()
        self._offset = 0

    def _send_small(self) -> bool:
        """Send the small items in front, together."""
        entries: list[tuple[int, T]] = []
        nbytes = 0
        for number, item in self._waiting:
            nbytes += _size(item)
            if entries and (nbytes > BATCH or len(entries) == MOST_ITEMS):
                break
            entries.append((number, item))
        with self._lock:
            items = [
                Item(number, self._origin(it), it.meta, it.value) for number, it in entries if number in self._window
            ]
        if items:
            frame = Items(*self._ids, self.after, items)
            body = frame.body()
            if not self._claim(len(body)):
                return False
            self._put(frame.head(body), body)
            self.after = items[-1].number
            # crash: relay.sent
        self._pop(len(entries))
        return True

    def _send_large(self, number: int, item: T) -> bool:
        """Send an item in parts, each read from the slot when there is credit for it."""
        with self._lock:
            if number not in self._window:
                return True
            payload, described, total = item.value, item.meta, item.nbytes
        origin = self._origin(item)
        while True:
            end = min(total, self._offset + PART)
            part, description = payload[self._offset : end], b"" if self._offset else described
            body = b"".join((description, part))
            if not self._claim(len(body)):
                return False
            frame = Part(*self._ids, self.after, number, origin, self._offset, total, description, part)
            self._put(frame.head(body), body)
            # crash: relay.parted
            self._offset = end
            if end == total:
                break
        self.after = number
        self._pop(1)
        # crash: relay.sent
        return True


def _size(item: Sendable) -> int:
    return item.nbytes + len(item.meta)
