"""`JoinableQueue`: a queue that knows which items are done."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from functools import partial
from typing import Any

from ..endpoints.base import LIVENESS_INTERVAL
from ..endpoints.message import Message
from ..memory.counters import MOST, Counter
from .queue import PendingGet, Queue, T
from .queue_handle import ONCE, QueueHandle


class JoinableQueue(Queue[T]):
    """`multiprocessing.JoinableQueue` through shared memory: a `Queue` with `task_done` and `join`.

    An item is done when `task_done` was called for it. If a process ends before that, however it ends, its
    unfinished items are delivered to others: `join` does not wait for a worker that was killed.

    >>> import shmtensor
    >>> queue = shmtensor.JoinableQueue()
    >>> queue.put("work")
    >>> queue.get()
    'work'
    >>> queue.task_done()
    >>> queue.join()
    >>> queue.close()
    """

    def _counts(self) -> tuple[tuple[int, int], ...]:
        return *super()._counts(), (0, MOST), (0, MOST), (0, MOST)

    def _start(self, handle: QueueHandle, counters: list[Counter]) -> None:
        self._tasks = _Tasks(*counters[2:])
        super()._start(handle, counters)

    def _begin(self) -> None:
        self._held = _Held()
        super()._begin()

    def _when_abandoned(self) -> Any:
        return self._tasks.forget

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        super()._reserve(reserved, deadline)
        reserved += itertools.starmap(self._tasks.begin, ONCE)  # before any process can get it and call `task_done`

    def _undo(self, reserved: list[Any]) -> None:
        if len(reserved) > 1:
            self._tasks.forget()
        super()._undo(reserved)

    def _pop(self) -> bool:
        return False  # an item is held as a message until its task is done

    def _take(self, pending: PendingGet) -> None:
        if pending.steps[0].attempt == 1 and not pending.gave:
            # before it is unpickled, and only at the first attempt: after a death the room is not given back again
            try:
                pending.gave += itertools.starmap(self._room.release, ONCE)
            except ValueError:
                pending.gave.append(None)
        super()._take(pending)

    def _steps(self, message: Message) -> tuple[Any, ...]:
        return (self._held.adding(message),)

    def _complete(self, pending: PendingGet) -> None:
        super()._complete(pending)
        self._held.trim(self._tasks)

    def task_done(self) -> None:
        """Mark an item as done: the oldest one that this thread has got, else the oldest that this process has.

        Raises `ValueError` if it is called more often than items were put. If an asynchronous exception ends it, the
        item may be done or not.
        """
        if not self._held.finish(self._tasks):
            raise ValueError("task_done() called too many times")
        self._tasks.notify()

    def join(self) -> None:
        """Wait until every item that was put is done."""
        open_before = not self._closed
        before = self._tasks.rounds()
        while self._tasks.unfinished and self._tasks.rounds() == before:
            self._tasks.sleep()
            if open_before:
                self._check_open()
        self._tasks.wake()

    def close(self) -> None:
        """As `Queue.close`; items that this process got and has not marked as done are given back."""
        self._finish_pending()
        self._held.complete()
        self._undelivered.clear()  # their messages are in `_held`
        self._held = _Held()
        super().close()


class _Tasks:
    """How many items are not done, across processes.

    There is no lock. A process that brings `unfinished` to 0 adds one to `rounds`, so that a waiter sees it even if
    more was put since, and posts `wakeups`. A waiter that wakes, by a post or every `LIVENESS_INTERVAL`, checks the
    other two, and posts `wakeups` again for the next waiter. (After 2 ** 31 rounds a waiter has to see the 0.)
    """

    def __init__(self, unfinished: Counter, rounds: Counter, wakeups: Counter) -> None:
        self._unfinished, self._rounds, self._wakeups = unfinished, rounds, wakeups
        self.begin = unfinished.release
        """Count one more."""
        self.rounds = rounds.value

    @property
    def unfinished(self) -> int:
        return int(self._unfinished.value())

    def finishing(self) -> Any:
        """A function that counts one less; it returns False if there is none."""
        return partial(self._unfinished.acquire, False)

    def notify(self) -> None:
        """After counting one less: wake waiters if it was the last one."""
        if not self._unfinished.value():
            self._rounds.give()
            self.wake()

    def forget(self) -> None:
        """Count one less, for an item that was not put after all or was dropped."""
        if self._unfinished.acquire(False):
            self.notify()

    def sleep(self) -> None:
        self._wakeups.acquire(True, LIVENESS_INTERVAL)

    def wake(self) -> None:
        if not self._wakeups.value():
            self._wakeups.release()


class _Held:
    """Items that this process got and has not marked as done: (thread, message), oldest first. They are given back when
    this object dies."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._messages: collections.deque[tuple[int, Message]] = collections.deque()
        self._finishing: list[Any] = []
        """The entry that is being counted as done, then whether it was counted."""

    def adding(self, message: Message) -> Any:
        """A function that adds a message that this thread got."""
        return partial(self._messages.append, (threading.get_ident(), message))

    def finish(self, tasks: _Tasks) -> bool:
        """Mark one as done; False if no process has any."""
        with self._lock:
            self.complete()
            mine = threading.get_ident()
            entry = next((entry for entry in self._messages if entry[0] == mine), None)
            if entry is None and self._messages:
                entry = self._messages[0]
            finishing = tasks.finishing()
            try:
                self._finishing = [entry]
                self._finishing += itertools.starmap(finishing, ONCE)
                return self.complete()
            except BaseException:
                self.complete()
                raise

    def complete(self) -> bool:
        """Release the entry that was counted as done; whether there was one."""
        with self._lock:
            entry, *counted = self._finishing or (None,)
            if any(counted) and entry is not None:
                entry[1].release()
                with contextlib.suppress(ValueError):
                    self._messages.remove(entry)
            self._finishing = []
            return any(counted)

    def trim(self, tasks: _Tasks) -> None:
        """Release those beyond the number of unfinished items: other processes called `task_done` for them."""
        with self._lock:
            held = len(self._messages)  # before the count, which includes what another thread gets now
            for _ in range(held - tasks.unfinished):
                self._messages[0][1].release()
                self._messages.popleft()
