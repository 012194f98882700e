"""Batches: requests with values of the same layout that were taken within a short time, stacked.

Values are stacked along a new first dimension, and results are split again. Stacking copies each leaf once, from where
it lies straight into the batch. Values can be stacked if their *layouts* are equal: the structure, every dtype, every
shape, and every leaf that is not a tensor or array.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..codec.leaf import is_tensor
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, ReleasedError, ResourceError, RingFull
from .request import Request

log = logging.getLogger("shmtensor.rpc")

Layout = Any


def layout_of(value: Any) -> Layout:
    """A hashable description of a value. Values of equal layouts can be stacked.

    Raises `ArgumentTypeError` for a value that is not stacked with others: with a sparse, quantized or nested tensor.
    """
    if isinstance(value, np.ndarray):
        return "a", value.dtype, value.shape
    if is_tensor(value):
        if str(value.layout) != "torch.strided" or value.is_quantized or value.is_nested:
            raise ArgumentTypeError("sparse, quantized and nested tensors are not stacked with others")
        return "T", value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return "d", tuple((type(key), key, layout_of(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return "l" if isinstance(value, list) else "t", tuple(layout_of(child) for child in value)
    # by its text: NaN does not equal itself. Of an `int` with thousands of digits Python makes no text
    return "s", type(value), value if isinstance(value, (bytes, int)) else repr(value)


def stack(values: Sequence[Any]) -> Any:
    """One value whose tensors and arrays have a new first dimension. Other leaves are those of the first value."""
    first = values[0]
    if isinstance(first, np.ndarray):
        # into an array of this dtype: of the values' common one, byte order, gaps and alignment may be others
        return np.stack(values, out=np.empty((len(values), *first.shape), first.dtype))
    if is_tensor(first):
        return _stack_tensors(values)
    if isinstance(first, dict):
        return {key: stack([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        children = [stack([value[index] for value in values]) for index in range(len(first))]
        return children if isinstance(first, list) else tuple(children)
    return first


def _stack_tensors(tensors: Sequence[Any]) -> Any:
    import torch

    try:
        return torch.stack(list(tensors))
    except RuntimeError as error:
        raise ArgumentTypeError(
            f"torch cannot stack tensors of layout {tensors[0].layout} for a batch ({error}): ask a server without "
            "max_batch=, or send the parts of such a tensor"
        ) from None


def split(value: Any, count: int) -> list[Any]:
    """Split a handler's result for a batch into `count` parts. Leaves that are not tensors or arrays go to each part.

    Raises `ArgumentError` for a leaf whose first dimension is not `count`.
    """
    if isinstance(value, np.ndarray) or is_tensor(value):
        if not len(value.shape) or value.shape[0] != count:
            raise ArgumentError(
                f"reply of shape {tuple(value.shape)} to a batch of {count}: its first dimension must be {count}"
            )
        return [value[index, ...] for index in range(count)] if isinstance(value, np.ndarray) else list(value.unbind(0))
    if isinstance(value, dict):
        parts = {key: split(child, count) for key, child in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(count)]
    if isinstance(value, (list, tuple)):
        children = [split(child, count) for child in value]
        made = [[child[index] for child in children] for index in range(count)]
        return made if isinstance(value, list) else [tuple(each) for each in made]
    return [value] * count


DEFAULT_WAIT: Final = 0.002
_FIRST: Final = (0,)
"""The argument of a list's `pop`."""


class Batch:
    """Requests that are answered together. Its value has the values of all requests, stacked along a new first
    dimension.

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
        self._value: Any = stack([request.value for request in requests])

    @property
    def value(self) -> Any:
        """The requests' values, stacked. Other leaves than tensors and arrays are equal in all, and are kept."""
        return self._value

    def reply(self, value: Any) -> None:
        """Answer every request that has no answer yet with its part of the value, along the first dimension.

        A request whose part finds no room, as its client keeps earlier replies, fails; the others are answered.

        Raises `ArgumentError` if a tensor or array in it has another first dimension; nothing is answered then.
        """
        for request, part in self._open_with(value):
            if not request.answered:
                try:
                    request.reply(part)
                except (ResourceError, RingFull) as error:
                    _fail_alone(request, error)

    async def areply(self, value: Any) -> None:
        """`reply` for asyncio: other tasks run where it has to wait for room.

        If it is cancelled, requests that have no answer yet can still be answered, for instance by the same call.
        """
        for request, part in self._open_with(value):
            if not request.answered:
                try:
                    await request.areply(part)
                except (ResourceError, RingFull) as error:
                    _fail_alone(request, error)

    def _open_with(self, value: Any) -> list[tuple[Request, Any]]:
        """The requests that have no answer yet, with their parts of a value."""
        open_ = [(index, request) for index, request in enumerate(self.requests) if not request.answered]
        if not open_:
            raise ReleasedError("every request of this batch was answered already")
        parts = split(value, len(self.requests))
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


def _fail_alone(request: Request, error: Exception) -> None:
    """Fail a request of a batch whose reply has no room."""
    log.warning("%s", str(error))  # not the error itself: its traceback would keep the request's slot
    request.fail(error)


class Group:
    """Requests that will be one batch. `due`: the time at which it stops waiting for more; `most`: how many it may
    have."""

    __slots__ = ("due", "most", "requests")

    def __init__(self, due: float, most: int) -> None:
        self.due, self.most = due, most
        self.requests: list[Request] = []


class Collector:
    """Groups requests whose values can be stacked.

    A group is given out when it is full, or `max_wait` after its first request was taken; the oldest first. At most
    twice `max_batch` requests wait here, of all groups together. Of full groups only one is given out before an older
    one that is due. Several threads may call, and each may be interrupted: a request or a group is moved from one list
    to another in one C call.
    """

    def __init__(self, max_batch: int, max_wait: float | None) -> None:
        self._max_batch, self._max_wait = max_batch, DEFAULT_WAIT if max_wait is None else max_wait
        self._groups: dict[Any, Group] = {}  # by the layout of their values; oldest first
        self._passed = False  # the last group that was given out was not the oldest
        self._unsorted = False  # a request was added, and perhaps not checked whether its group is full
        self._lock = threading.Lock()

    def until(self, deadline: float | None) -> float | None:
        """When to stop waiting for another request: the time at which the oldest group is due, else `deadline`."""
        with self._lock:
            return self._due_first() if self._groups else deadline

    def add(self, taken: list[Any]) -> None:
        """Move the request that was taken to its group; into `taken`, the group that is to be given out now, if any."""
        key, alone = _key(taken[0])
        with self._lock:
            self._unsorted = True
            group = self._groups.get(key)
            if group is None:
                group = Group(time.monotonic() + self._max_wait, 1 if alone else self._max_batch)
                self._groups[key] = group
            group.requests.extend(map(taken.pop, _FIRST))
            self._sort(taken)

    def take_full(self, taken: list[Any]) -> None:
        """Take the group that an interrupted `add` was to give out."""
        if self._unsorted:
            with self._lock:
                self._sort(taken)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits here."""
        return not self._groups

    def take_oldest(self, taken: list[Any], *, due: bool) -> None:
        """Take the oldest group though it is not full; with `due`, only if it waits for no more requests."""
        with self._lock:
            if self._groups and not (due and time.monotonic() < self._due_first()):
                self._pop(next(iter(self._groups)), taken)

    def _sort(self, taken: list[Any]) -> None:
        """Take the group that is to be given out now, if there is one."""
        for key, group in self._groups.items():
            if len(group.requests) >= group.most:
                self._pop(key, taken)
                return
        waiting = sum(len(group.requests) for group in self._groups.values())
        if waiting >= 2 * self._max_batch or (self._passed and waiting and time.monotonic() >= self._due_first()):
            self._pop(next(iter(self._groups)), taken)
            return
        self._unsorted = False

    def _due_first(self) -> float:
        return next(iter(self._groups.values())).due

    def _pop(self, key: Any, taken: list[Any]) -> None:
        self._passed = key != next(iter(self._groups))
        taken.extend(map(self._groups.pop, (key,)))


def batch_of(requests: list[Request]) -> Batch | None:
    """A batch of these requests. None if there are none, or if they cannot be stacked: they fail then."""
    try:
        return Batch(requests) if requests else None
    except Exception as error:
        for request in requests:
            request.fail(error)
        return None


def _key(request: Request) -> tuple[Any, bool]:
    """The key of a request's group, and whether the request must be a batch of its own.

    It must if its value cannot be stacked, or if it was taken before: a server that dies with it must lose no others.
    """
    value = request.value
    if request.attempt == 1:
        with contextlib.suppress(Exception):  # whatever a value is, it must not end the server
            return layout_of(value), False
    return (request.seq, id(request)), True
