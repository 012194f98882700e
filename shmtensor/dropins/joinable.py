"""`JoinableQueue`: a queue that knows which items are done."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from functools import partial
from typing import Any

from ..endpoints.base import TICK
from ..endpoints.message import Message
from ..memory.counters import MOST, Counter
from .deadlines import ONCE
from .link import Link
from .queues import Hand, Queue, T


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

    def _start(self, link: Link, counters: list[Counter]) -> None:
        self._tasks = _Tasks(*counters[2:])
        super()._start(link, counters)

    def _begin(self) -> None:
        self._held = _Held()
        super()._begin()

    def _when_abandoned(self) -> Any:
        return self._tasks.forget

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        super()._reserve(reserved, deadline)
        reserved += itertools.starmap(self._tasks.begin, ONCE)  # before anybody can get it and call `task_done`

    def _undo(self, reserved: list[Any]) -> None:
        if len(reserved) > 1:
            self._tasks.forget()
        super()._undo(reserved)

    def _pop(self) -> bool:
        return False  # an item is held as a message until its task is done

    def _take(self, hand: Hand) -> None:
        if hand.steps[0].attempt == 1 and not hand.gave:
            # before it is unpickled: who gets it again after a death gives no room, as its first getter has
            try:
                hand.gave += itertools.starmap(self._room.release, ONCE)
            except ValueError:
                hand.gave.append(None)
        super()._take(hand)

    def _steps(self, message: Message) -> tuple[Any, ...]:
        return (self._held.adding(message),)

    def _settle(self, hand: Hand) -> None:
        super()._settle(hand)
        self._held.trim(self._tasks)

    def task_done(self) -> None:
        """Say that an item that was got is done: the oldest one that this thread has got, else that this process has.

        Raises `ValueError` if it is called more often than items were put. If an exception from outside ends it, the
        item may be done.
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
        self._tasks.ring()

    def close(self) -> None:
        """As `Queue.close`; items that this process got and has not done are given back."""
        self._finish_hands()
        self._held.complete()
        self._undelivered.clear()  # their messages are held
        self._held = _Held()
        super().close()


class _Tasks:
    """How many items are not done, across processes.

    There is no lock. `unfinished` is the truth. Who brings it to 0 makes one more of `rounds`, so that a waiter learns
    of it though more was put since, and rings `bell`, from which waiters only wake: they look at the other two, and
    every `TICK` by themselves, and pass the ringing on. (Once there were 2 ** 31 rounds, a waiter has to see the 0.)
    """

    def __init__(self, unfinished: Counter, rounds: Counter, bell: Counter) -> None:
        self._unfinished, self._rounds, self._bell = unfinished, rounds, bell
        self.begin = unfinished.release
        """One more."""
        self.rounds = rounds.value

    @property
    def unfinished(self) -> int:
        return int(self._unfinished.value())

    def finishing(self) -> Any:
        """To be called: one less; False if there is none."""
        return partial(self._unfinished.acquire, False)

    def notify(self) -> None:
        """After one less: wake who waits if it was the last one."""
        if not self._unfinished.value():
            self._rounds.give()
            self.ring()

    def forget(self) -> None:
        """One less, of an item that was not put after all or is given up."""
        if self._unfinished.acquire(False):
            self.notify()

    def sleep(self) -> None:
        self._bell.acquire(True, TICK)

    def ring(self) -> None:
        if not self._bell.value():
            self._bell.release()


class _Held:
    """What this process has got and not done: (thread, message), oldest first. Dropping it gives the items back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._messages: collections.deque[tuple[int, Message]] = collections.deque()
        self._finishing: list[Any] = []
        """The entry whose task is being counted as done, then whether it was."""

    def adding(self, message: Message) -> Any:
        """To be called: add a message, got by this thread."""
        return partial(self._messages.append, (threading.get_ident(), message))

    def finish(self, tasks: _Tasks) -> bool:
        """One is done; False if there is none, in any process."""
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
        """What was counted as done is done. Whether there was something."""
        with self._lock:
            entry, *counted = self._finishing or (None,)
            if any(counted) and entry is not None:
                entry[1].release()
                with contextlib.suppress(ValueError):
                    self._messages.remove(entry)
            self._finishing = []
            return any(counted)

    def trim(self, tasks: _Tasks) -> None:
        """No more can be not done than are unfinished: `task_done` was called by other processes for the rest."""
        with self._lock:
            held = len(self._messages)  # before the count: what another thread gets now may be counted there
            for _ in range(held - tasks.unfinished):
                self._messages[0][1].release()
                self._messages.popleft()
