"""A context whose locks are those of one process, for queues of the standard library that no other process has.

The standard pool makes such a queue, and the standard executor two that are replaced at once. With a context as it is,
each of their locks is a named semaphore: it would stay in `/dev/shm`, under a name of no channel, when the process and
its resource tracker are killed.
"""

from __future__ import annotations

import threading
from multiprocessing import queues
from typing import Any


class ThreadLocks:
    """All that `context` offers, but for its locks and simple queues."""

    Lock = staticmethod(threading.Lock)
    BoundedSemaphore = staticmethod(threading.BoundedSemaphore)

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def SimpleQueue(self) -> queues.SimpleQueue[Any]:
        """A standard queue between threads, with a pipe that can be waited for."""
        return queues.SimpleQueue(ctx=self)
