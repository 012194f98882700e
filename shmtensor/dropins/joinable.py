"""`JoinableQueue`: a queue that knows which items are done."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any

from ..endpoints.message import Message
from .queues import _MISSING, Queue


class JoinableQueue(Queue):
    """`multiprocessing.JoinableQueue` through shared memory: a `Queue` with `task_done` and `join`.

    An item is done when `task_done` was called for it. A getter that ends before that, however it ends, gives back what
    it had got and not done, and others get it again: `join` does not wait in vain for a worker that was killed.

    >>> import shmtensor
    >>> queue = shmtensor.JoinableQueue()
    >>> queue.put("work")
    >>> queue.get()
    'work'
    >>> queue.task_done()
    >>> queue.join()
    >>> queue.close()
    """

    def _open(self, ctx: Any, max_bytes: int | None) -> None:
        self._tasks = _Tasks(ctx)
        super()._open(ctx, max_bytes)

    def _begin(self) -> None:
        self._held = _Held()
        super()._begin()

    def _when_abandoned(self) -> Any:
        return self._tasks.forget

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._tasks

    def __setstate__(self, state: Any) -> None:
        queue, self._tasks = state
        super().__setstate__(queue)

    def _send(self, value: Any, deadline: float | None) -> None:
        self._tasks.begin()  # before anybody can get it and call `task_done`
        try:
            super()._send(value, deadline)
        except BaseException:
            self._tasks.forget()
            raise

    def _pop(self) -> Any:
        return _MISSING  # an item is held as a message until its task is done

    def _note(self, message: Message) -> None:
        if message.attempt == 1:  # else it gave room when it came to its first getter
            self._give_room()

    def _settle(self, message: Message) -> None:
        self._held.add(message)
        self._held.keep(self._tasks.unfinished)

    def task_done(self) -> None:
        """Say that an item that was got is done: the oldest one that this thread has got, else that this process has.

        Raises `ValueError` if it is called more often than items were put.
        """
        self._tasks.finish()
        self._held.release()

    def join(self) -> None:
        """Wait until every item that was put is done."""
        self._tasks.wait()

    def close(self) -> None:
        """As `Queue.close`; items that this process got and has not done are given back."""
        self._held = _Held()
        super().close()


class _Tasks:
    """How many items are not done, across processes."""

    def __init__(self, ctx: Any) -> None:
        self._unfinished, self._changed = ctx.Semaphore(0), ctx.Condition()

    @property
    def unfinished(self) -> int:
        return int(self._unfinished.get_value())

    def begin(self) -> None:
        """One more."""
        self._unfinished.release()

    def finish(self) -> None:
        """One less; `ValueError` if there is none."""
        with self._changed:
            if not self._unfinished.acquire(False):
                raise ValueError("task_done() called too many times")
            if not self._unfinished.get_value():
                self._changed.notify_all()

    def forget(self) -> None:
        """One less, of an item that was not put after all or is given up."""
        with contextlib.suppress(ValueError):
            self.finish()

    def wait(self) -> None:
        with self._changed:
            if self._unfinished.get_value():
                self._changed.wait()


class _Held:
    """What this process has got and not done: (thread, message), oldest first. Dropping it gives the items back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: collections.deque[tuple[int, Message]] = collections.deque()

    def add(self, message: Message) -> None:
        self._messages.append((threading.get_ident(), message))

    def release(self) -> None:
        """One is done."""
        with self._lock:
            mine = threading.get_ident()
            found = next((entry for entry in self._messages if entry[0] == mine), None)
            if found is None and self._messages:
                found = self._messages[0]
            if found is not None:
                self._messages.remove(found)
                found[1].release()

    def keep(self, count: int) -> None:
        """At most `count` can be not done: `task_done` was called by others for the rest."""
        with self._lock:
            while len(self._messages) > count:
                self._messages.popleft()[1].release()
