"""Three ways to send the same tensors to several processes: this library, and the two standard queues.

Readers get torch tensors; they use each and drop it before they ask for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import shmtensor

Meta = dict[str, Any]
Send = Callable[[Any, Meta], None]
Frames = Iterator[tuple[Any, Meta]]
Queues = tuple[Any, ...]
"""A `multiprocessing.Queue` for each reader, made by the main process and inherited by the others."""

_PATIENCE: Final = 60.0


class Transport(Protocol):
    """One transport, for one round. The `meta` of a message has the time at which it was sent as `"t"`."""

    def sender(self, readers: int) -> AbstractContextManager[Send]:
        """The sender's end, which sends to every reader. Leaving it ends their streams."""

    def reader(self, index: int) -> AbstractContextManager[Frames]:
        """A reader's end."""


class ShmTransport:
    """`Publisher` and `Subscriber`."""

    def __init__(self, channel: str, slots: int, queues: Queues) -> None:
        self._channel, self._slots = channel, slots

    @contextmanager
    def sender(self, readers: int) -> Iterator[Send]:
        with shmtensor.Publisher(self._channel, slots=self._slots) as pub:
            pub.wait_for_subscribers(readers, timeout=_PATIENCE)

            def send(frame: Any, meta: Meta) -> None:
                pub.send(frame, stamped(meta), timeout=_PATIENCE)

            yield send

    @contextmanager
    def reader(self, index: int) -> Iterator[Frames]:
        with shmtensor.Subscriber(self._channel) as sub:
            yield _frames(sub)


def _frames(sub: shmtensor.Subscriber) -> Frames:
    for msg in sub:
        yield msg.value, msg.meta
        msg.release()  # before waiting for the next one


class QueueTransport:
    """`multiprocessing.Queue`, one for each reader: a NumPy array is pickled into each."""

    def __init__(self, channel: str, slots: int, queues: Queues) -> None:
        self._queues = queues

    def pack(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        """The object to put for a tensor."""
        import torch

        try:
            return frame.numpy(), meta
        except TypeError:  # bfloat16 and other types that NumPy does not have
            meta = {**meta, "dtype": str(frame.dtype).removeprefix("torch."), "shape": tuple(frame.shape)}
            return frame.reshape(-1).view(torch.uint8).numpy(), meta

    def unpack(self, value: Any, meta: Meta) -> Any:
        """The tensor of an object that was got."""
        import torch

        tensor = torch.from_numpy(value)
        return tensor.view(getattr(torch, meta["dtype"])).reshape(meta["shape"]) if "dtype" in meta else tensor

    @contextmanager
    def sender(self, readers: int) -> Iterator[Send]:
        def send(frame: Any, meta: Meta) -> None:
            value, packed = self.pack(frame, stamped(meta))
            for queue in self._queues:
                queue.put((value, packed), timeout=_PATIENCE)

        yield send
        for queue in self._queues:
            queue.put(None, timeout=_PATIENCE)

    @contextmanager
    def reader(self, index: int) -> Iterator[Frames]:
        yield self._frames(self._queues[index])

    def _frames(self, queue: Any) -> Frames:
        while (item := queue.get()) is not None:
            value, meta = item
            del item
            yield self.unpack(value, meta), meta
            del value


class TorchTransport(QueueTransport):
    """`torch.multiprocessing.Queue`: the tensor is copied into shared memory once, each queue carries its handle."""

    def pack(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        import torch

        storage = torch.UntypedStorage._new_shared(frame.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=frame.dtype).set_(storage, 0, frame.shape, frame.stride()).copy_(frame), meta

    def unpack(self, value: Any, meta: Meta) -> Any:
        return value


def stamped(meta: Meta) -> Meta:
    """The meta with the time of sending in it."""
    return {**meta, "t": time.monotonic_ns()}


TRANSPORTS: Final[dict[str, Callable[[str, int, Queues], Transport]]] = {
    "shmtensor": ShmTransport,
    "multiprocessing.Queue": QueueTransport,
    "torch.multiprocessing.Queue": TorchTransport,
}
"""By name; the others are compared with the first."""
