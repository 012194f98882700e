"""The window of a relay, without I/O: the items in flight, and what may follow. docs/internals/relay.md."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from ..errors import WireError

T = TypeVar("T")


class Outgoing(Generic[T]):
    """The items of a near relay that are not acknowledged, by number, and the credit that is left.

    An item enters with `add`, which gives it its number; it leaves when it is acknowledged, or with `clear`.
    """

    def __init__(self) -> None:
        self.newest = 0
        """The number of the newest item; each is sent at least once after it was added."""
        self._items: OrderedDict[int, T] = OrderedDict()
        self.messages = self.nbytes = 0
        """The window: 0 while there is no connection."""
        self.sent_bytes = self.consumed = 0
        """Of this attempt."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def get(self, number: int) -> T | None:
        """The item of that number, if it is under way."""
        return self._items.get(number)

    def numbered(self) -> list[tuple[int, T]]:
        """What is under way with its numbers, the oldest first."""
        return list(self._items.items())

    def items(self) -> list[T]:
        """What is under way, the oldest first."""
        return list(self._items.values())

    @property
    def oldest(self) -> int:
        """The number of the oldest item that is not acknowledged, or of the next new one."""
        return next(iter(self._items), self.newest + 1)

    def begin(self, messages: int, nbytes: int, received: int) -> list[tuple[int, T]]:
        """A connection begins with that window: the items to be sent again, in order.

        Raises `WireError` if the far relay has received what was never sent.
        """
        if received > self.newest:
            raise WireError(f"item {received} was received there, the newest sent is {self.newest}")
        self.messages, self.nbytes, self.sent_bytes, self.consumed = messages, nbytes, 0, 0
        return [(number, item) for number, item in self._items.items() if number > received]

    def end(self) -> None:
        """There is no connection: no credit."""
        self.messages = self.nbytes = 0

    def may_add(self, most: int = 1 << 62) -> bool:
        """Whether there is credit for one more message."""
        return len(self._items) < min(self.messages, most)

    def may_send(self, nbytes: int) -> bool:
        """Whether there is credit for so many bytes. If nothing is under way, there is, however many they are."""
        return bool(self.nbytes) and (
            self.sent_bytes == self.consumed or self.sent_bytes - self.consumed + nbytes <= self.nbytes
        )

    def add(self, items: Iterable[T]) -> list[tuple[int, T]]:
        """Number new items. Returns them with their numbers."""
        numbered = list(enumerate(items, self.newest + 1))
        self._items.update(numbered)
        self.newest += len(numbered)
        return numbered

    def note_sent(self, nbytes: int) -> None:
        """Bytes of a body were sent."""
        self.sent_bytes += nbytes

    def acknowledge(self, acknowledged: int, ranges: Iterable[tuple[int, int]], consumed: int) -> list[T]:
        """What a far relay reports: the items that need not be kept any more.

        Raises `WireError` for what cannot be true.
        """
        ranges = list(ranges)
        newest = max([acknowledged, *(last for _, last in ranges)])
        if newest > self.newest or consumed > self.sent_bytes:
            raise WireError(
                f"item {newest} and {consumed} bytes acknowledged, of {self.newest} and {self.sent_bytes} sent"
            )
        self.consumed = max(self.consumed, consumed)
        items, done = self._items, []
        for first, last in ((self.oldest, acknowledged), *ranges):
            found: Iterable[int] = range(first, last + 1)
            if last - first > len(items):
                found = [it for it in items if first <= it <= last]
            done += [items.pop(it) for it in found if it in items]
        return done

    def count_beyond(self, number: int) -> int:
        """How many items have a higher number."""
        count = 0
        for it in reversed(self._items):
            if it <= number:
                break
            count += 1
        return count

    def drop(self, number: int) -> None:
        """Drop an item that is not needed any more, though it was not acknowledged."""
        self._items.pop(number, None)

    def clear(self, beyond: int = 0) -> list[tuple[int, T]]:
        """Forget every item of a higher number than that. Returns them with their numbers."""
        found = [it for it in self._items.items() if it[0] > beyond]
        for number, _ in found:
            del self._items[number]
        return found


class Gap(Exception):
    """Items are missing."""


class Incoming:
    """What a far relay has received from one near relay: numbers received and acknowledged, bytes consumed.

    Items are received in order. They are acknowledged in any order.
    """

    def __init__(self) -> None:
        self.received = self.acknowledged = 0
        self.consumed = 0
        """Of this attempt."""
        self._beyond: list[tuple[int, int]] = []  # runs, in order, with a gap before each

    def start_at(self, number: int) -> None:
        """The first item of a near relay that is not known has this number: what was before it is not needed."""
        self.received = self.acknowledged = number - 1

    def accept(self, after: int, number: int) -> bool:
        """An item comes that was sent behind item `after`: whether it is the next one. Else it was received before.

        Numbers between the two are not needed by anybody. Raises `Gap` if something is missing in front of it.
        """
        if number <= self.received:
            return False
        if after > self.received:
            raise Gap(f"item {number} came behind {after}, the newest received is {self.received}")
        if number - 1 > self.received:
            self._acknowledge(self.received + 1, number - 1)
            self.received = (
                number - 1
            )  # what is acknowledged was received: STATE says so while `number` waits for a slot
        return True

    def receive(self, number: int, *, is_done: bool = False) -> None:
        """The item that `accept` allowed is whole; `is_done`: and need not be kept by the near relay any more."""
        self.received = number
        if is_done:
            self._acknowledge(number, number)

    def acknowledge(self, number: int) -> None:
        """An item needs not be kept by the near relay any more."""
        self._acknowledge(number, number)

    def _acknowledge(self, first: int, last: int) -> None:
        if not self._beyond and first <= self.acknowledged + 1:
            self.acknowledged = max(self.acknowledged, last)
            return
        if last <= self.acknowledged:
            return
        at = bisect.bisect_left(self._beyond, (first, 0))
        if at and self._beyond[at - 1][1] >= first - 1:  # joins the run in front of it
            at -= 1
            first = self._beyond[at][0]
        end = at
        while end < len(self._beyond) and self._beyond[end][0] <= last + 1:  # and those behind it
            last = max(last, self._beyond[end][1])
            end += 1
        self._beyond[at:end] = [(first, last)]
        if self._beyond[0][0] <= self.acknowledged + 1:
            self.acknowledged = max(self.acknowledged, self._beyond.pop(0)[1])

    def ranges(self, most: int) -> list[tuple[int, int]]:
        """First and last of the runs of numbers that are acknowledged beyond `acknowledged`, the oldest first."""
        return self._beyond[:most]


class Unfinished:
    """Published messages of a work queue that no consumer has done, with where that is stored."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, memoryview, int, int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, words: memoryview, at: int, seq: int) -> None:
        """Item `number` is message `seq`, which is done when `words[at]` is that or more."""
        self._waiting.append((number, words, at, seq))

    def __iter__(self) -> Iterator[tuple[int, memoryview, int, int]]:
        """What `add` was given, in that order."""
        return iter(self._waiting)

    def drop(self, number: int) -> None:
        """Drop an item that is not needed any more."""
        self._waiting = deque(it for it in self._waiting if it[0] != number)

    def done(self) -> Iterator[int]:
        """The numbers of the items that are done since the last call."""
        waiting, found = self._waiting, []
        kept: deque[tuple[int, memoryview, int, int]] = deque()
        for it in waiting:
            if it[1][it[2]] >= it[3]:
                found.append(it[0])
            else:
                kept.append(it)
        self._waiting = kept
        return iter(found)
