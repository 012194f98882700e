"""faster-fifo: pickles into a ring in shared memory, behind a lock."""

from __future__ import annotations

from collections import deque
from queue import Empty
from typing import Any

from .base import FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Copies, Link, LinkSettings, Receiver, Sender, Transport

PATIENCE = 1e6
"""Seconds: `put` and `get` take no None."""
OVERHEAD = 512
"""Bytes that the pickle of an array has beside its data, at most."""


class FasterFifoLink(Link):
    def __init__(self, settings: LinkSettings) -> None:
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  teaches multiprocessing to pickle the queue

        super().__init__(settings)
        size = settings.in_flight * (settings.nbytes + OVERHEAD)
        self.queue = faster_fifo.Queue(max_size_bytes=size, maxsize=settings.in_flight)

    def sender(self, index: int = 0) -> Sender:
        put = self.queue.put
        return Sender(lambda array: put(array, timeout=PATIENCE), self.queue.close)

    def receiver(self, index: int = 0) -> Receiver:
        get, get_many = self.queue.get, self.queue.get_many

        def take_one() -> Any:
            while True:
                try:
                    return get(timeout=PATIENCE)
                except Empty:  # another consumer was woken as well, and was faster
                    continue

        if self.settings.pattern == WORK_QUEUE:  # a batch would take jobs away from the others
            return Receiver(take_one, self.queue.close)
        waiting: deque[Any] = deque()

        def recv() -> Any:  # as its documentation recommends: take whatever is there at once
            if not waiting:
                waiting.extend(get_many(timeout=PATIENCE))
            return waiting.popleft()

        return Receiver(recv, self.queue.close)


class FasterFifo(Transport):
    name = "faster-fifo"
    package = "faster_fifo"
    distribution = "faster-fifo"
    form = "numpy"
    work = "pickle into a ring in shared memory; get_many, unpickle NumPy arrays"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN, WORK_QUEUE})

    def link(self, settings: LinkSettings) -> Link:
        return Copies(settings, self.link) if settings.pattern == FAN_OUT else FasterFifoLink(settings)
