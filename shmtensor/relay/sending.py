"""How items are sent: in order, small ones together in a frame, large ones in parts, as far as there is credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

from .frames import MOST_BODY, MOST_ITEMS, Item, Items, Part
from .window import Outgoing

BATCH: Final = 256 << 10
"""Bytes of small items that go into one frame."""
_SMALL: Final = 256 << 10
"""An item with more bytes goes alone, in parts."""
PART: Final = MOST_BODY // 2


T = TypeVar("T")


class ItemSender(Generic[T]):
    """Sends items of a window, in one attempt. What waits here leaves when it was sent, in order: none is passed over
    but what nobody wants any more.

    Args:
        ids: of the frames: near relay, far relay, attempt.
        after: the number of the item that the other side has received last.
        waiting: numbers and items that are to be sent first.
        window: what is under way; what leaves it meanwhile is not sent.
        lock: of the window.
        read: payload and description of an item that is about to be sent; None: it has ended, and leaves the window.
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
        read: Callable[[T], tuple[Any, Any] | None],
        origin: Callable[[T], int],
        claim: Callable[[int], bool],
        put: Callable[[bytes, bytes], None],
    ) -> None:
        self._ids, self.after, self._window = ids, after, window
        self._waiting = deque(waiting)
        self._offset = 0  # how much of the first one was sent
        self._lock, self._read_item, self._origin, self._claim, self._put = lock, read, origin, claim, put

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entries: Iterable[tuple[int, T]]) -> None:
        """Items to be sent behind those that wait."""
        self._waiting.extend(entries)

    def send(self) -> None:
        """Send what waits, as far as there is credit."""
        while self._waiting:
            number, item = self._waiting[0]
            found = self._read(number, item)
            if found is None:
                self._pop(1)
            elif not (self._send_part(number, item, *found) if _size(*found) > _SMALL else self._send_small()):
                return

    def _read(self, number: int, item: T) -> tuple[Any, Any] | None:
        """Payload and description; None if it was acknowledged meanwhile, and is released, or has ended."""
        with self._lock:
            found = self._read_item(item) if number in self._window else None
            if found is None:
                self._window.drop(number)
            return found

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()
        self._offset = 0

    def _send_small(self) -> bool:
        """Send the small items in front, together."""
        items: list[Item] = []
        nbytes = count = 0
        for number, item in self._waiting:
            found = self._read(number, item)
            if found is None and not items:  # what is behind it may be large
                self._pop(1)
                return True
            if found is not None:
                payload, description = found
                nbytes += _size(payload, description)
                if items and (nbytes > BATCH or len(items) == MOST_ITEMS):
                    break
                items.append(Item(number, self._origin(item), description, payload))
            count += 1
        if items:
            frame = Items(*self._ids, self.after, items)
            body = frame.body()
            if not self._claim(len(body)):
                return False
            self._put(frame.head(body), body)
            self.after = items[-1].number
            # crash: relay.sent
        self._pop(count)
        return True

    def _send_part(self, number: int, item: T, payload: Any, described: Any) -> bool:
        """Send the next part of an item, read from the slot when there is credit for it."""
        total = len(payload)
        end = min(total, self._offset + PART)
        part, description = payload[self._offset : end], b"" if self._offset else described
        body = b"".join((description, part))
        if not self._claim(len(body)):
            return False
        frame = Part(*self._ids, self.after, number, self._origin(item), self._offset, total, description, part)
        self._put(frame.head(body), body)
        # crash: relay.parted
        self._offset = end
        if end == total:
            self.after = number
            self._pop(1)
            # crash: relay.sent
        return True


def _size(payload: Any, description: Any) -> int:
    return len(payload) + len(description)
