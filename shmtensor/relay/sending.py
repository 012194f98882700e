"""Sends items in order, small ones together in a frame, large ones in parts, as far as there is credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

from .frames import MOST_BODY, MOST_ITEMS, Item, Items, Part, Sender
from .window import Outgoing

BATCH: Final = 512 << 10
"""Bytes of small items that go into one frame. An item with more goes alone, in parts."""
PART: Final = MOST_BODY // 2


T = TypeVar("T")


class ItemSender(Generic[T]):
    """Sends items of a window, in one attempt. Waiting items leave when they are sent, in order; only items that are
    not wanted any more are skipped.

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
        self._lock, self._read, self._origin, self._claim, self._put = lock, read, origin, claim, put

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entries: Iterable[tuple[int, T]]) -> None:
        """Items to be sent behind those that wait."""
        self._waiting.extend(entries)

    def send(self) -> None:
        """Send what waits, as far as there is credit."""
        while self._waiting:
            items, count = self._front()
            if items and not (self._send_part(items[0]) if _size(items[0]) > BATCH else self._send_small(items)):
                return
            if not self._offset:
                self._pop(count)

    def _front(self) -> tuple[list[Item], int]:
        """What the next frame has: small items, or a large one; and how many leave with it. Of what waits, those that
        were acknowledged meanwhile are released, and others have ended: they leave the window."""
        with self._lock:
            items, count, ended = self._fitting()
        if ended:
            self._pop(ended)
        return items, count - ended

    def _fitting(self) -> tuple[list[Item], int, int]:
        """Under the lock: the items of the next frame, how many of what waits they are with those that have ended, and
        how many of these are before the first item."""
        items: list[Item] = []
        nbytes = count = ended = 0
        window, read, origin = self._window, self._read, self._origin
        for number, item in self._waiting:
            found = read(item) if number in window else None
            if found is None:
                window.drop(number)
                ended += not items
            else:
                payload, description = found
                nbytes += len(payload) + len(description)
                if items and (nbytes > BATCH or len(items) == MOST_ITEMS):
                    break
                items.append(Item(number, origin(item), description, payload))
            count += 1
            if nbytes >= BATCH:
                break
        return items, count, ended

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()
        self._offset = 0

    def _send_small(self, items: list[Item]) -> bool:
        """Send small items together."""
        frame = Items(*self._ids, self.after, items)
        body = frame.body()
        if not self._claim(len(body)):
            return False
        self._put(frame.head(body), body)
        self.after = items[-1].number
        # crash: relay.sent
        return True

    def _send_part(self, item: Item) -> bool:
        """Send the next part of an item, read from the slot when there is credit for it."""
        number, origin, described, payload = item
        total = len(payload)
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
            self.after, self._offset = number, 0
            # crash: relay.sent
        return True


def _size(item: Item) -> int:
    return len(item.payload) + len(item.description)


def announced(there: list[Sender], needed: set[Sender], most: int) -> list[Sender]:
    """The senders that a STATUS names: those of what is under way, needed, and of the others that are there, as many as
    there is room for. They have to wait until some that have left are forgotten."""
    others = [it for it in there if it not in needed][: max(0, most - len(needed))]
    allowed = needed.union(others)
    return [it for it in there if it in allowed] + list(needed.difference(there))
