"""Batches: requests of the same look that were taken within a short time, stacked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError, ReleasedError, ShmTensorError, TimedOut
from . import stacking
from .request import Request

if TYPE_CHECKING:
    from .server import Server


class Batch:
    """Requests that are answered together. Its value is theirs, stacked along a new first dimension.

    The value is private memory, filled by one copy from the clients' slots: yours to keep.

    >>> import shmtensor, torch
    >>> with shmtensor.Server("doc", max_batch=8) as server, shmtensor.Client("doc") as client:
    ...     futures = [client.submit(torch.full((2,), number)) for number in range(3)]
    ...     batch = server.recv(timeout=5)
    ...     batch.value.shape, len(batch)
    ...     batch.reply(batch.value.sum(1))
    ...     [future.result(timeout=5).item() for future in futures]
    (torch.Size([3, 2]), 3)
    [0, 2, 4]
    """

    __slots__ = ("_value", "requests")

    requests: Sequence[Request]
    """The requests, in the order of the first dimension; each may be answered on its own."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._value: Any = stacking.stack([request.value for request in requests])

    @property
    def value(self) -> Any:
        """The requests' values, stacked; what is no tensor or array is equal in all of them, and stays as it is."""
        return self._value

    def reply(self, value: Any) -> None:
        """Answer every request that has no answer yet with its part of the value, along the first dimension.

        Raises `ArgumentError` if a tensor or array in it has another first dimension; nothing is answered then.
        """
        open_ = [(index, request) for index, request in enumerate(self.requests) if not request.answered]
        if not open_:
            raise ReleasedError("every request of this batch was answered already")
        parts = stacking.split(value, len(self.requests))
        for index, request in open_:
            request.reply(parts[index])

    def fail(self, error: BaseException | str) -> None:
        """Answer every request that has no answer yet with an error."""
        for request in self.requests:
            if not request.answered:
                request.fail(error)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            with contextlib.suppress(ClosedError):
                self.fail(error)

    def __repr__(self) -> str:
        return f"<Batch of {len(self.requests)}>"


class Collector:
    """Takes requests for a server and puts those of the same look together.

    A batch is given out when it is full, or `max_wait` after its first request was taken; the oldest first. Requests
    of other looks wait for their own turn here, at most twice `max_batch` of all looks together.
    """

    def __init__(self, server: Server, max_batch: int, max_wait: float) -> None:
        self._server, self._max_batch, self._max_wait = server, max_batch, max_wait
        self._groups: dict[Any, tuple[float, list[Request]]] = {}  # look -> when it is due, requests; oldest first

    def collect(self, deadline: float | None) -> Batch:
        """The next batch; `TimedOut` if nothing came until the deadline, `ClosedError` once there will be none."""
        while True:
            batch = self._fill(deadline)
            if batch is not None:
                return batch

    def _fill(self, deadline: float | None) -> Batch | None:
        groups, waiting = self._groups, sum(len(requests) for _, requests in self._groups.values())
        while waiting < 2 * self._max_batch:
            until = next((due for due, _ in groups.values()), deadline)
            try:
                request = self._server._take(until)
            except (TimedOut, ClosedError):
                if not groups:
                    raise
                break
            look, alone = _look(request)
            _, requests = groups.setdefault(look, (time.monotonic() + self._max_wait, []))
            requests.append(request)
            waiting += 1
            if alone or len(requests) == self._max_batch:
                return self._make(look)
        return self._make(next(iter(groups)))

    def _make(self, look: Any) -> Batch | None:
        _, requests = self._groups.pop(look)
        requests = [request for request in requests if self._server._may_start(request)]
        if not requests:
            return None
        try:
            return Batch(requests)
        except (ShmTensorError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            for request in requests:
                request.fail(error)
            return None


def _look(request: Request) -> tuple[Any, bool]:
    look = stacking.look_of(request.value)
    if stacking.is_stackable(look):
        return look, False
    return (request.seq, id(request)), True
