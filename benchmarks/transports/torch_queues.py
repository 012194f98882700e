"""torch.multiprocessing.Queue, which shares storages, with both of its sharing strategies."""

from __future__ import annotations

from typing import Any

from .base import ANY_OBJECT, FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Copies, Link, LinkSettings, Receiver, Sender, Transport
from .queues import QueueLink


class TorchQueueLink(QueueLink):
    """Sends copies, since a tensor that was sent once stays shared, and sending it again would copy nothing."""

    def __init__(self, settings: LinkSettings, queue: Any, strategy: str) -> None:
        super().__init__(settings, queue)
        self.strategy = strategy

    def sender(self, index: int = 0) -> Sender:
        self._choose()
        put = self.queue.put
        return Sender(lambda value: put(_copy(value)), self._leave)

    def receiver(self, index: int = 0) -> Receiver:
        self._choose()
        return super().receiver(index)

    def _choose(self) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(self.strategy)


def _copy(value: Any) -> Any:
    """Of a tensor, or a dict of tensors, in new shared memory, so that `put` has nothing left to move: torch's
    DataLoader collates into such memory, too."""
    if isinstance(value, dict):
        return {key: _copy(tensor) for key, tensor in value.items()}
    import torch

    memory = torch.UntypedStorage._new_shared(value.nbytes)
    return torch.empty(0, dtype=value.dtype).set_(memory, 0, value.shape).copy_(value)  # type: ignore[call-overload]


class TorchQueueDescriptor(Transport):
    name = "torch Queue, file_descriptor"
    package = "torch"
    work = "copy into new shared memory, pass its descriptor; map it as a torch tensor"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN, WORK_QUEUE, ANY_OBJECT})
    strategy = "file_descriptor"

    def link(self, settings: LinkSettings) -> Link:
        import torch.multiprocessing

        if settings.pattern == FAN_OUT:
            return Copies(settings, self.link)
        queue = torch.multiprocessing.get_context("spawn").Queue(settings.in_flight)
        return TorchQueueLink(settings, queue, self.strategy)


class TorchQueueFileSystem(TorchQueueDescriptor):
    name = "torch Queue, file_system"
    work = "copy into new shared memory, pass its file name; map it as a torch tensor"
    strategy = "file_system"
