"""vLLM's MessageQueue (`vllm.distributed.device_communicators.shm_broadcast`), when vLLM is importable."""

from __future__ import annotations

import multiprocessing
from typing import Any

from .base import FAN_OUT, PAIR, Link, LinkSettings, Receiver, Sender, Transport

OVERHEAD = 4096
"""Bytes that the pickle of an array has beside its data, at most."""


class VllmLink(Link):
    """The writer makes the queue and passes its handle; both sides then shake hands, which each first call does."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        context = multiprocessing.get_context("spawn")
        self.handles = [context.Pipe(duplex=False) for _ in range(settings.peers)]

    def sender(self, index: int = 0) -> Sender:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        settings = self.settings
        queue = MessageQueue(
            settings.peers,
            settings.peers,
            max_chunk_bytes=settings.nbytes + OVERHEAD,
            max_chunks=settings.in_flight,
        )
        for _, writing in self.handles:
            writing.send(queue.export_handle())
        waited: list[bool] = []
        enqueue = queue.enqueue

        def send(array: Any) -> None:
            if not waited:
                queue.wait_until_ready()
                waited.append(True)
            enqueue(array)

        return Sender(send, lambda: None)

    def receiver(self, index: int = 0) -> Receiver:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        opened: list[Any] = []
        reading, _ = self.handles[index]

        def recv() -> Any:
            if not opened:
                queue = MessageQueue.create_from_handle(reading.recv(), index)
                queue.wait_until_ready()
                opened.append(queue.dequeue)
            return opened[0]()

        return Receiver(recv, opened.clear)

    def close(self) -> None:
        for reading, writing in self.handles:
            reading.close()
            writing.close()


class VllmMessageQueue(Transport):
    name = "vLLM MessageQueue"
    package = "vllm"
    form = "numpy"
    work = "pickle into a ring in shared memory; poll, unpickle a NumPy array"
    patterns = frozenset({PAIR, FAN_OUT})
    sleeps = False

    def link(self, settings: LinkSettings) -> Link:
        return VllmLink(settings)
