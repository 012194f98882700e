"""`Client`: sends requests, and gives each call its reply. `arequest` is a request that an event loop can wait for.

The tasks that wait for replies stand in a queue. The first of them receives, and dispatches the replies of other calls
to them, as a thread that waits in `request` does. No reply is handed to a task that could lose it by being cancelled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from ..channel.names import reply_channel
from ..endpoints.asyncio import wait_queue_of
from ..endpoints.base import BUSY, NOTHING, Local
from ..errors import ArgumentError
from ..options import check_count, check_timeout
from ..statistics import ClientStatistics
from .calls import Call, CallsInFlight, RequestFuture
from .endpoints import FOREVER, ReplyReceiver, RequestSender, check_service

_Value = Any
_C = TypeVar("_C", bound="Client")


class Client(Local):
    """Sends requests to the servers of a service, each to an idle one if possible, and receives their replies.

    Args:
        service: the service's name, 1 to 47 of `A-Za-z0-9._-`: the one that its servers have.
        slots: requests that may be in flight; further ones wait for room (`full=`). None: 16, or as many large ones as
            fit in 256 MiB, at least 2; fewer where `max_bytes` is less.
        slot_bytes: bytes of a slot, an int or a string like `"8MiB"`; None: as the first request needs.
        full: what a call does when no slot is free: `"block"` (wait), `"grow"` (add a ring), `"error"` (raise
            `RingFull`).
        max_bytes: most shared memory for requests, an int (bytes) or a string like `"1GiB"`; None: no limit but
            `/dev/shm`.
        spin: most seconds that a waiting thread stays awake before it sleeps.

    A request is copied before the call returns. A reply's tensors and arrays are the server's slot itself, writable
    and yours: the slot is used again when their last view has died.

    May be used from several threads. In a forked child it raises `ForkedError`: create a new one there.

    >>> import shmtensor, threading, torch
    >>> with shmtensor.Server("doc") as server, shmtensor.Client("doc") as client:
    ...     threading.Thread(target=server.run, args=(torch.neg,), daemon=True).start()
    ...     client.request(torch.arange(3), timeout=5)
    ...     server.stop()
    tensor([ 0, -1, -2])
    """

    def __init__(
        self,
        service: str,
        *,
        slots: int | None = None,
        slot_bytes: int | str | None = None,
        full: Literal["block", "grow", "error"] = "block",
        max_bytes: int | str | None = None,
        spin: float = 100e-6,
    ) -> None:
        check_service(service)
        if str(full) == "drop":
            raise ArgumentError('full="drop" would lose requests: choose one of "block", "grow", "error"')
        self._requests = RequestSender(service, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes)
        try:
            self._answers = ReplyReceiver(reply_channel(service, self._requests.uid), spin=spin)
        except BaseException:
            self._requests.close()
            raise
        self._in_flight = CallsInFlight(self._requests, self._answers)

    # --- requests

    def request(self, value: _Value, meta: Any = None, *, timeout: float | None = None, retry: bool = True) -> _Value:
        """Send a request and wait for its reply.

        Args:
            value, meta: as for `Publisher.send`.
            timeout: seconds until the request expires; a server that has not started it by then never will.
            retry: whether another server gets the request when one dies with it; if False, the request then fails with
                `PeerDied`.

        Returns:
            The reply's value.

        Raises:
            TimedOut: there was no reply in time, or no room for the request.
            RemoteError: the server's handler raised, or dropped the request.
            DependencyError: the reply has torch tensors, and torch is not installed here.
            WireError: the server cannot read the request, or its reply cannot be read here: one of them is damaged, or
                the library of one process is newer.
            PeerDied: the server died and `retry=False`, or as many servers died with the request as their
                `max_attempts` allows.
            ArgumentTypeError, ResourceError: as for `Publisher.send`.
            ClosedError, ForkedError: the client is closed, or was made by this process's parent.
            ReentrantError: a signal handler or finalizer called it inside the thread that receives the replies.
        """
        in_flight = self._in_flight
        call = in_flight.begin(timeout, retry)
        try:
            self._requests.post(call, value, meta, timeout)
            in_flight.wait(call)
            return call.result()
        finally:
            if not call.done:
                in_flight.given_up.append(call)  # the first call: whatever is raised from here on, it is recorded
                in_flight.cancel_given_up()

    def submit(
        self, value: _Value, meta: Any = None, *, timeout: float | None = None, retry: bool = True
    ) -> RequestFuture:
        """Send a request; returns a future of its reply. Blocks only while there is no room for the request.

        Arguments and errors are those of `request`; the future raises what `request` raises after it was sent.
        """
        in_flight = self._in_flight
        call = in_flight.begin(timeout, retry)
        try:
            future = call.future = RequestFuture(in_flight, call)
            in_flight.has_submitted = True
            if call.deadline and (call.deadline < in_flight.nearest or not in_flight.nearest):
                in_flight.nearest = call.deadline
            self._requests.post(call, value, meta, timeout)
            in_flight.driver.wake()
            return future
        except BaseException:
            in_flight.given_up.append(call)
            in_flight.cancel_given_up()
            raise

    def map(
        self, values: Iterable[_Value], *, timeout: float | None = None, retry: bool = True, window: int | None = None
    ) -> Iterator[_Value]:
        """Yield the replies to many requests, in their order, with up to `window` (default: `slots`) in flight at once.

        `timeout` counts for each request on its own, from when it is sent. The first error ends the iteration;
        requests that are still in flight then, or when the iterator is closed, are cancelled.
        """
        check_timeout(timeout)
        if window is not None:
            check_count("window", window, 1, 1 << 16)
        timeout = None if timeout is None else float(min(timeout, FOREVER))  # a float needs no second check
        return _mapped(self._in_flight, values, timeout, retry, window)

    async def arequest(self, value: Any, meta: Any = None, *, timeout: float | None = None, retry: bool = True) -> Any:
        """`request` for asyncio: other tasks run while this one waits, and no thread is used.

        Any number of tasks may wait for replies at once. Cancelling a task cancels its request: a server that has not
        started it never will; if a server has, its reply is dropped.

        Arguments and errors are those of `request`; also `LoopError`, if tasks of another event loop wait at this
        client.

        >>> import asyncio, shmtensor, threading, torch
        >>> async def main():
        ...     with shmtensor.Client("doc") as client:
        ...         return await asyncio.gather(*(client.arequest(torch.tensor(n), timeout=5) for n in range(3)))
        >>> with shmtensor.Server("doc") as server:
        ...     threading.Thread(target=server.run, args=(torch.neg,), daemon=True).start()
        ...     asyncio.run(main())
        ...     server.stop()
        [tensor(0), tensor(-1), tensor(-2)]
        """
        return await arequest(self._in_flight, value, meta, timeout, retry)

    # --- closing

    def close(self) -> None:
        """Leave the service. Idempotent; works while values of replies are alive.

        Requests without a reply fail with `ClosedError`; those that no server has started never are.
        """
        self._in_flight.close()

    async def aclose(self) -> None:
        """`close` for asyncio: other tasks run while threads that are inside a call of this client come out of it."""
        await self._in_flight.aclose()

    # --- state

    @property
    def name(self) -> str:
        """The service's name."""
        return self._requests.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return self._requests.closed

    def wait_for_servers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living servers are there; raise `TimedOut` after `timeout` seconds (None:
        never)."""
        self._requests.wait_for_servers(count, timeout)

    def statistics(self) -> ClientStatistics:
        """A frozen snapshot of this client's counters since it was created."""
        sent, received, in_flight = self._requests.statistics(), self._answers.statistics(), self._in_flight
        return ClientStatistics(
            requests=sent.sent, replies=in_flight.replied, errors=in_flight.failed - in_flight.late,
            cancelled=in_flight.cancelled, expired=in_flight.late, duplicates=in_flight.duplicates,
            outstanding=len(in_flight.calls), servers=self._requests.count_living(), request_bytes=sent.sent_bytes,
            reply_bytes=received.received_bytes,
        )  # fmt: skip

    def __enter__(self: _C) -> _C:
        self._requests.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self: _C) -> _C:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f'<Client "{self.name}" {self._requests.state} outstanding={len(self._in_flight.calls)}>'


def _mapped(
    in_flight: CallsInFlight, values: Iterable[Any], timeout: float | None, retry: bool, window: int | None
) -> Iterator[Any]:
    """See `Client.map`."""
    requests = in_flight.requests
    waiting: deque[Call] = deque()
    try:
        for value in values:
            while True:
                if len(waiting) < (window or requests.window):
                    break
                yield _first(in_flight, waiting)
            waiting.append(in_flight.begin(timeout, retry))
            requests.post(waiting[-1], value, None, timeout)
        while True:
            if not waiting:
                break
            yield _first(in_flight, waiting)
    finally:
        in_flight.given_up.extend(waiting)
        in_flight.cancel_given_up()


def _first(in_flight: CallsInFlight, waiting: deque[Call]) -> Any:
    """The value of the first call, which stays in `waiting` until it has ended: if interrupted, it is given up."""
    if not waiting[0].done:
        in_flight.wait(waiting[0])
    return waiting.popleft().result()


async def arequest(in_flight: CallsInFlight, value: Any, meta: Any, timeout: float | None, retry: bool) -> Any:
    """See `Client.arequest`."""
    call = in_flight.begin(timeout, retry)
    try:
        await in_flight.requests.apost(call, value, meta, timeout)
        if not call.done:
            await _wait(in_flight, call)
        return call.result()
    finally:
        if not call.done:
            in_flight.given_up.append(call)
            in_flight.cancel_given_up()


async def _wait(in_flight: CallsInFlight, call: Call) -> None:
    """Wait until the call has ended."""
    from ..endpoints.wait_queue import LoopEvent, Waiter  # imports asyncio

    answers = in_flight.answers
    wait_queue = wait_queue_of(answers)
    waiter = Waiter(wait_queue.loop, answers.has_news)
    call.event = LoopEvent(wait_queue.loop, waiter)  # type: ignore[assignment]
    if call.done:  # a thread has finished it before it saw the event
        return
    timeout = None if not call.deadline else max(0.0, (call.deadline - time.monotonic_ns()) * 1e-9)
    ended = await wait_queue.attend(_attempt(in_flight, call), answers.has_news, timeout, waiter)
    if ended is NOTHING:
        in_flight.expire(call)
        in_flight.finish_ended()


def _attempt(in_flight: CallsInFlight, call: Call) -> Callable[[], Any]:
    """What the task does at its turn. It returns the call if that has ended; else `NOTHING`, or `BUSY` to retry."""

    def attempt() -> Any:
        if call.done:
            return call
        leads: list[None] = []
        try:
            in_flight.lead(leads)
            if not leads:
                return BUSY  # a thread receives, and sets this call's event
            in_flight.dispatch()  # what an interrupted thread has left
            found = in_flight.answers.take_all(in_flight.received, in_flight.dispatch)
            if not call.done and time.monotonic() >= in_flight.check_due:
                in_flight.check_calls()
        finally:
            if leads:
                in_flight.leading.release()
                if in_flight.followers or in_flight.driver.is_started:
                    in_flight.promote()
        return call if call.done else found

    return attempt
