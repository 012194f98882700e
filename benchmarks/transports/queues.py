"""multiprocessing.Queue, which pickles, and shmtensor.Queue in its place."""

from __future__ import annotations

import multiprocessing
from typing import Any

from .base import ANY_OBJECT, FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Copies, Link, LinkSettings, Receiver, Sender, Transport


class QueueLink(Link):
    """Over a queue with `put` and `get`."""

    def __init__(self, settings: LinkSettings, queue: Any) -> None:
        super().__init__(settings)
        self.queue = queue

    def sender(self, index: int = 0) -> Sender:
        return Sender(self.queue.put, self._leave)

    def receiver(self, index: int = 0) -> Receiver:
        return Receiver(self.queue.get, self._leave)

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self.queue.close()
        self.queue.join_thread()


class PickleQueue(Transport):
    name = "multiprocessing.Queue"
    form = "numpy"
    work = "pickle, write to a pipe; read, unpickle a NumPy array"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN, WORK_QUEUE, ANY_OBJECT})

    def link(self, settings: LinkSettings) -> Link:
        if settings.pattern == FAN_OUT:
            return Copies(settings, self.link)
        return QueueLink(settings, multiprocessing.get_context("spawn").Queue(settings.in_flight))


class ShmTensorQueue(Transport):
    name = "shmtensor.Queue"
    package = "shmtensor"
    work = "copy into a slot; receive a torch tensor that is the slot"
    patterns = frozenset({ANY_OBJECT})

    def link(self, settings: LinkSettings) -> Link:
        import shmtensor

        return QueueLink(settings, shmtensor.get_context("spawn").Queue(settings.in_flight))
