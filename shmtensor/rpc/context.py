"""What a worker's handler gets beside the value: who asks, how long the reply is wanted, and what `setup` returned."""

from __future__ import annotations

from typing import Any

from .batching import Batch
from .request import Request


class RequestContext:
    """The second argument of a `WorkerPool` handler that takes two: what is known of the request beside its value.

    Valid until the handler returns. With `max_batch` the handler gets a `BatchContext` instead.

    >>> import shmtensor
    >>> def predict(value, context: shmtensor.RequestContext):
    ...     for layer in context.state:
    ...         if context.cancelled:
    ...             return None  # nobody waits for it
    ...         value = layer(value)
    ...     return value
    """

    __slots__ = ("_request", "state", "worker")

    state: Any
    """What `setup` returned in this worker; None without `setup`."""
    worker: int
    """Index of this worker in its pool, from 0: a device's number, for instance."""

    def __init__(self, request: Request, state: Any, worker: int) -> None:
        self._request, self.state, self.worker = request, state, worker

    @property
    def meta(self) -> Any:
        """What the client passed as `meta=`, or None."""
        return self._request.meta

    @property
    def remaining(self) -> float | None:
        """Seconds until the client's time-out, below 0 after it; None if it has none."""
        return self._request.remaining

    @property
    def cancelled(self) -> bool:
        """Whether the reply is no longer needed: the client cancelled the request, closed or died. Cheap to ask."""
        return self._request.cancelled

    @property
    def attempt(self) -> int:
        """How often the request was taken, this time included; above 1 after another worker died with it."""
        return self._request.attempt

    def __repr__(self) -> str:
        return f"<RequestContext of {self._request!r} worker={self.worker}>"


class BatchContext:
    """As `RequestContext`, for a handler of batches: each of its tuples has one item for each request.

    The items are in the order of the requests along the first dimension of the value.

    >>> import shmtensor
    >>> def predict(values, context: shmtensor.BatchContext):
    ...     if all(context.cancelled):
    ...         return values
    ...     return context.state(values)
    """

    __slots__ = ("_batch", "state", "worker")

    state: Any
    """What `setup` returned in this worker; None without `setup`."""
    worker: int
    """Index of this worker in its pool, from 0."""

    def __init__(self, batch: Batch, state: Any, worker: int) -> None:
        self._batch, self.state, self.worker = batch, state, worker

    @property
    def meta(self) -> tuple[Any, ...]:
        """What the clients passed as `meta=`, or None."""
        return tuple(request.meta for request in self._batch.requests)

    @property
    def remaining(self) -> tuple[float | None, ...]:
        """Seconds until the clients' time-outs, below 0 after them; None if there is none."""
        return tuple(request.remaining for request in self._batch.requests)

    @property
    def cancelled(self) -> tuple[bool, ...]:
        """Whether the replies are no longer needed."""
        return tuple(request.cancelled for request in self._batch.requests)

    @property
    def attempt(self) -> tuple[int, ...]:
        """How often the requests were taken. One that is above 1 is in a batch of its own."""
        return tuple(request.attempt for request in self._batch.requests)

    def __len__(self) -> int:
        return len(self._batch)

    def __repr__(self) -> str:
        return f"<BatchContext of {len(self)} requests worker={self.worker}>"
