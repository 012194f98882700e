"""Three ways to move the same tensors: this library, and the two queues that everybody has.

Each is a work queue (`jobs`, `results`) and a fan-out (`fan`). Values that come out are torch tensors; they are
used and dropped before the next one is asked for.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import shmtensor

from .plan import Lines, Plan

Meta = dict[str, Any]
Send = Callable[[Any, Meta], None]
Received = tuple[Any, Meta]

_JOIN = 60.0
_STUCK = 60.0


class Transport(Protocol):
    """One way, for one round."""

    def producer(self) -> AbstractContextManager[Send]:
        """The producer's end: what is sent goes to a worker and to all subscribers. Leaving it ends their streams."""

    def worker(self) -> AbstractContextManager[tuple[Iterator[Received], Send]]:
        """A worker's end: what comes in, and where results go."""

    def subscriber(self, index: int) -> AbstractContextManager[Iterator[Received]]:
        """A subscriber's end."""

    def results(self) -> AbstractContextManager[Callable[[float], Received | None]]:
        """The main process's end: a function that waits so many seconds for a result. `EOFError` after the last one."""


class ShmTransport:
    """Producer and Consumer, Publisher and Subscriber."""

    def __init__(self, plan: Plan, number: int, lines: Lines) -> None:
        self.plan = plan
        self.jobs, self.back, self.fan = (f"{plan.run}-{number}-{what}" for what in ("jobs", "results", "fan"))

    @contextmanager
    def producer(self) -> Iterator[Send]:
        slots = self.plan.slots
        with shmtensor.Producer(self.jobs, slots=slots) as tx, shmtensor.Publisher(self.fan, slots=slots) as pub:
            tx.wait_for_consumers(self.plan.workers, timeout=_JOIN)
            pub.wait_for_subscribers(self.plan.subscribers, timeout=_JOIN)

            def send(frame: Any, meta: Meta) -> None:
                tx.send(frame, stamped(meta), timeout=_STUCK)
                pub.send(frame, stamped(meta), timeout=_STUCK)

            yield send

    @contextmanager
    def worker(self) -> Iterator[tuple[Iterator[Received], Send]]:
        with shmtensor.Producer(self.back, slots=64) as tx, shmtensor.Consumer(self.jobs) as rx:
            yield _drain(rx), lambda result, meta: void(tx.send(result, stamped(meta), timeout=_STUCK))

    @contextmanager
    def subscriber(self, index: int) -> Iterator[Iterator[Received]]:
        with shmtensor.Subscriber(self.fan) as rx:
            yield _drain(rx)

    @contextmanager
    def results(self) -> Iterator[Callable[[float], Received | None]]:
        with shmtensor.Consumer(self.back) as rx:

            def take(seconds: float) -> Received | None:
                try:
                    with rx.recv(timeout=seconds, copy=True) as msg:
                        return msg.value, msg.meta
                except shmtensor.TimedOut:
                    return None

            yield take


def _drain(rx: Any) -> Iterator[Received]:
    for msg in rx:
        yield msg.value, msg.meta
        msg.release()


class QueueTransport:
    """`multiprocessing.Queue`. Subclasses say what becomes of a tensor on the way in and out."""

    def __init__(self, plan: Plan, number: int, lines: Lines) -> None:
        self.plan, self.lines = plan, lines

    def fill(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        """What is put for a tensor: the NumPy array, which the queue pickles."""
        import torch

        try:
            return frame.numpy(), meta
        except TypeError:  # bfloat16 and other types that NumPy does not have
            meta = {**meta, "dtype": str(frame.dtype).removeprefix("torch."), "shape": tuple(frame.shape)}
            return frame.reshape(-1).view(torch.uint8).numpy(), meta

    def open(self, value: Any, meta: Meta) -> Any:
        """The tensor of what came out."""
        import torch

        tensor = torch.from_numpy(value)
        return tensor.view(getattr(torch, meta["dtype"])).reshape(meta["shape"]) if "dtype" in meta else tensor

    @contextmanager
    def producer(self) -> Iterator[Send]:
        def send(frame: Any, meta: Meta) -> None:
            value, filled = self.fill(frame, meta)
            for line in (self.lines.jobs, *self.lines.fans):
                line.put((value, stamped(filled)), timeout=_STUCK)

        yield send
        for _ in range(self.plan.workers):
            self.lines.jobs.put(None, timeout=_STUCK)
        for line in self.lines.fans:
            line.put(None, timeout=_STUCK)

    @contextmanager
    def worker(self) -> Iterator[tuple[Iterator[Received], Send]]:
        def send(result: Any, meta: Meta) -> None:
            value, meta = self.fill(result, meta)
            self.lines.results.put((value, stamped(meta)), timeout=_STUCK)

        yield self._drain(self.lines.jobs), send

    @contextmanager
    def subscriber(self, index: int) -> Iterator[Iterator[Received]]:
        yield self._drain(self.lines.fans[index])

    def _drain(self, line: Any) -> Iterator[Received]:
        while (item := line.get()) is not None:
            value, meta = item
            del item
            yield self.open(value, meta), meta
            del value

    @contextmanager
    def results(self) -> Iterator[Callable[[float], Received | None]]:
        def take(seconds: float) -> Received | None:
            with contextlib.suppress(queue.Empty):
                value, meta = self.lines.results.get(timeout=seconds)
                return self.open(value, meta), meta
            return None

        yield take


class TorchTransport(QueueTransport):
    """`torch.multiprocessing.Queue`: tensors in shared memory of their own, one file descriptor each."""

    def fill(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        """The tensor, copied once into new shared memory, as a DataLoader's collation does it."""
        import torch

        storage = torch.UntypedStorage._new_shared(frame.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=frame.dtype).set_(storage, 0, frame.shape, frame.stride()).copy_(frame), meta

    def open(self, value: Any, meta: Meta) -> Any:
        return value


def stamped(meta: Meta) -> Meta:
    """The meta with the time of sending in it."""
    return {**meta, "t": time.monotonic_ns()}


def void(_: object) -> None:
    """Drop a return value."""


OURS: Final = "shmtensor"
TRANSPORTS: Final[dict[str, type[ShmTransport] | type[QueueTransport]]] = {
    OURS: ShmTransport,
    "multiprocessing.Queue": QueueTransport,
    "torch.multiprocessing.Queue": TorchTransport,
}


def make_transport(name: str, plan: Plan, number: int, lines: Lines) -> Transport:
    """A transport for one round."""
    return TRANSPORTS[name](plan, number, lines)
