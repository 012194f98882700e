"""Batches: requests of the same look that were taken within a short time, stacked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..errors import ClosedError, ReleasedError, ShmTensorError
from . import stacking
from .request import Request

DEFAULT_WAIT: Final = 0.002
_FIRST: Final = (0,)
"""The argument of a list's `pop`."""


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
        for request, part in self._open_with(value):
            if not request.answered:
                request.reply(part)

    async def areply(self, value: Any) -> None:
        """`reply` for asyncio: other tasks run where it has to wait for room.

        If it is cancelled, those that have no answer yet are still yours to answer, by the same call if you like.
        """
        for request, part in self._open_with(value):
            if not request.answered:
                await request.areply(part)

    def _open_with(self, value: Any) -> list[tuple[Request, Any]]:
        """The requests that have no answer yet, with their parts of a value."""
        open_ = [(index, request) for index, request in enumerate(self.requests) if not request.answered]
        if not open_:
            raise ReleasedError("every request of this batch was answered already")
        parts = stacking.split(value, len(self.requests))
        return [(request, parts[index]) for index, request in open_]

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


class Group:
    """Requests of the same look that are to be a batch."""

    __slots__ = ("due", "most", "requests")

    def __init__(self, due: float, most: int) -> None:
        self.due, self.most = due, most
        self.requests: list[Request] = []


class Collector:
    """Puts requests of the same look together.

    A batch is given out when it is full, or `max_wait` after its first request was taken; the oldest first. Requests
    of other looks wait for their own turn here, at most twice `max_batch` of all looks together. However many full
    batches come, one that is due is passed over by one of them, not by all. Several threads may be at it, and each of
    them may be interrupted: a request or a group is moved from one list to another in one C call.
    """

    def __init__(self, max_batch: int, max_wait: float | None) -> None:
        self._max_batch, self._max_wait = max_batch, DEFAULT_WAIT if max_wait is None else max_wait
        self._groups: dict[Any, Group] = {}  # by look; oldest first
        self._passed = False  # a younger batch was given out before the oldest
        self._unsorted = False  # a request was added, and perhaps not looked at whether its group is full
        self._lock = threading.Lock()

    def until(self, deadline: float | None) -> float | None:
        """How long to wait for another request."""
        with self._lock:
            return self._due_first() if self._groups else deadline

    def add(self, taken: list[Any]) -> None:
        """Move the first of what was taken, a request, to those of its look; take what is to be given out now."""
        look, alone = _look(taken[0])
        with self._lock:
            self._unsorted = True
            group = self._groups.get(look)
            if group is None:
                group = Group(time.monotonic() + self._max_wait, 1 if alone else self._max_batch)
                self._groups[look] = group
            group.requests.extend(map(taken.pop, _FIRST))
            self._sort(taken)

    def take_full(self, taken: list[Any]) -> None:
        """Take what `add` was to give out, if it was interrupted."""
        if self._unsorted:
            with self._lock:
                self._sort(taken)

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def take_oldest(self, taken: list[Any], *, due: bool) -> None:
        """Take the requests whose turn it is when no others come; with `due`, only those that wait for no more."""
        with self._lock:
            if self._groups and not (due and time.monotonic() < self._due_first()):
                self._pop(next(iter(self._groups)), taken)

    def _sort(self, taken: list[Any]) -> None:
        for look, group in self._groups.items():
            if len(group.requests) >= group.most:
                self._pop(look, taken)
                return
        waiting = sum(len(group.requests) for group in self._groups.values())
        if waiting >= 2 * self._max_batch or (self._passed and waiting and time.monotonic() >= self._due_first()):
            self._pop(next(iter(self._groups)), taken)
            return
        self._unsorted = False

    def _due_first(self) -> float:
        return next(iter(self._groups.values())).due

    def _pop(self, look: Any, taken: list[Any]) -> None:
        self._passed = look != next(iter(self._groups))
        taken.extend(map(self._groups.pop, (look,)))


def batch_of(requests: list[Request]) -> Batch | None:
    """Requests that somebody waits for, as a batch; None, and they are answered, if they cannot be one."""
    try:
        return Batch(requests) if requests else None
    except (ShmTensorError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        for request in requests:
            request.fail(error)
        return None


def _look(request: Request) -> tuple[Any, bool]:
    """What it may be stacked with; whether it goes alone, as one does that a server has died with or given back: that
    may have been its fault, and would be the end of those beside it."""
    look = stacking.look_of(request.value)
    if request.attempt == 1 and stacking.is_stackable(look):
        return look, False
    return (request.seq, id(request)), True
