"""multiprocessing's queue, which pickles, and torch.multiprocessing's, which shares storages."""

from __future__ import annotations

import multiprocessing
from typing import Any

from .base import Link, LinkSettings, Receiver, Sender, Transport


class QueueLink(Link):
    """Over a queue of either kind."""

    def __init__(self, settings: LinkSettings, queue: Any) -> None:
        super().__init__(settings)
        self.queue = queue

    def sender(self) -> Sender:
        return Sender(self.queue.put, self._leave)

    def receiver(self) -> Receiver:
        return Receiver(self.queue.get, self._leave)

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self.queue.close()
        self.queue.join_thread()


class TorchQueueLink(QueueLink):
    """Sends clones: a tensor that was sent once stays shared, and sending it again would copy nothing."""

    def __init__(self, settings: LinkSettings, queue: Any, strategy: str) -> None:
        super().__init__(settings, queue)
        self.strategy = strategy

    def sender(self) -> Sender:
        self._choose()
        put = self.queue.put
        return Sender(lambda tensor: put(tensor.clone()), self._leave)

    def receiver(self) -> Receiver:
        self._choose()
        return super().receiver()

    def _choose(self) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(self.strategy)


class PickleQueue(Transport):
    name = "multiprocessing.Queue"
    form = "numpy"
    work = "pickle, write to a pipe; read, unpickle a NumPy array"

    def link(self, settings: LinkSettings) -> Link:
        return QueueLink(settings, multiprocessing.get_context("spawn").Queue(settings.in_flight))


class TorchQueueDescriptor(Transport):
    name = "torch Queue, file_descriptor"
    package = "torch"
    work = "clone, move to shared memory, pass its descriptor; map it as a torch tensor"
    strategy = "file_descriptor"

    def link(self, settings: LinkSettings) -> Link:
        import torch.multiprocessing

        queue = torch.multiprocessing.get_context("spawn").Queue(settings.in_flight)
        return TorchQueueLink(settings, queue, self.strategy)


class TorchQueueFileSystem(TorchQueueDescriptor):
    name = "torch Queue, file_system"
    work = "clone, move to shared memory, pass its file name; map it as a torch tensor"
    strategy = "file_system"
