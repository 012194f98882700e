"""`Server`: takes requests one by one or in batches, and sends each client its replies.

The checks of the arguments of servers and pools raise at once for what could never work.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ..endpoints.base import LIVENESS_INTERVAL, Local
from ..endpoints.message import Message
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, ReleasedError, TimedOut
from ..options import check_count, check_timeout, parse_bytes
from ..statistics import ServerStatistics
from .batching import Batch, Collector, batch_of
from .endpoints import RequestReceiver, check_service
from .request import Request, TakenRequests, describe, record_of

MOST_SLOTS = 1 << 16


def check_options(
    max_batch: int | None, max_wait: float | None, max_attempts: int, slots: int | None, max_bytes: int | str | None
) -> None:
    """Raise `ArgumentError` or `ArgumentTypeError` for options that no server can have."""
    if max_batch is not None:
        check_count("max_batch", max_batch, 1, 1 << 16)
    elif max_wait is not None:
        raise ArgumentError("max_wait= is how long a batch waits: it needs max_batch=")
    check_timeout(max_wait, "max_wait")
    check_count("max_attempts", max_attempts, 1, 250)
    if slots is not None:
        check_count("slots", slots, 1, MOST_SLOTS)
    if max_bytes is not None:
        parse_bytes(max_bytes, "max_bytes")


def check_handler(handler: Any, what: str = "the handler", arguments: int = 1) -> None:
    """Raise `ArgumentTypeError` unless `handler` is a plain callable or a class of such.

    `arguments`: how many it may need, at most.
    """
    if isinstance(handler, type):
        call = next((vars(base)["__call__"] for base in handler.__mro__ if "__call__" in vars(base)), None)
        if call is None:
            raise ArgumentTypeError(f"{what} is a class whose instances cannot be called: give it a method __call__")
    elif not callable(handler):
        raise ArgumentTypeError(f"{what} is a {type(handler).__name__}, which cannot be called")
    else:
        call = handler
    check_plain(call, what, "handler(value)")
    needed = sum(each.default is each.empty for each in _positional(call)) - isinstance(handler, type)  # `self`
    if needed > arguments > 1:
        raise ArgumentTypeError(
            f"{what} needs {needed} arguments, and workers pass the value, and the context to one that takes two: give "
            "the others defaults, or bind them with functools.partial"
        )
    named = [each for each in _parameters(call) if each.kind is each.KEYWORD_ONLY]
    by_name = [each.name for each in named if each.default is each.empty]
    if by_name:
        raise ArgumentTypeError(
            f"{what} needs {by_name[0]!r} by name, and is not called so: remove the * before it, give it a "
            "default, or bind it with functools.partial"
        )
    is_bound = isinstance(call, functools.partial) and "context" in call.keywords
    if arguments > 1 and not is_bound and any(each.name == "context" for each in named):
        raise ArgumentTypeError(
            f"{what} takes 'context' by name only, and workers pass it by position: remove the * before it"
        )


def check_plain(function: Any, what: str, call: str) -> None:
    """Raise `ArgumentTypeError` for an async function. `call`: how it is called."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(vars(type(function)).get("__call__")):
        raise ArgumentTypeError(
            f"{what} is an async function, and servers call plain ones: wrap it in a function that returns "
            f"asyncio.run({call})"
        )


def takes_context(handler: Any) -> bool:
    """Whether a handler takes a second argument: one without a default, or called `context`."""
    positional = _positional(handler)
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "context")


def takes_argument(function: Any) -> bool:
    """Whether a function takes a first argument that has no default."""
    positional = _positional(function)
    return bool(positional) and positional[0].default is inspect.Parameter.empty


def _positional(function: Any) -> list[inspect.Parameter]:
    """The positional ones of its `_parameters`."""
    return [each for each in _parameters(function) if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function. Of a decorator's `*args`, those of the function that it wraps."""
    try:
        found = inspect.signature(function, follow_wrapped=False)
        if any(each.kind is each.VAR_POSITIONAL for each in found.parameters.values()):
            found = inspect.signature(function)
    except (TypeError, ValueError):  # of a C function that does not say
        return []
    return list(found.parameters.values())


log = logging.getLogger("shmtensor.rpc")

_S = TypeVar("_S", bound="Server")


class Server(Local):
    """Answers the requests of a service. It takes a request when it is ready for one, so that a busy server gets none.

    Args:
        service: the service's name, 1 to 47 of `A-Za-z0-9._-`.
        max_batch: most requests in a batch: `recv` and iteration then return a `Batch`. None: requests one by one.
        max_wait: seconds that a batch waits for more after its first request was taken; None: 0.002. Needs `max_batch`.
        max_attempts: how many servers may die with a request; then it fails with `PeerDied` when another server finds
            it.
        slots: slots of the first ring of replies to a client; rings are added if a client keeps its replies.
            None: 8, or as many large replies as fit in 256 MiB, at least 2; fewer where `max_bytes` is less.
        max_bytes: most shared memory for the replies to one client, an int (bytes) or a string like `"1GiB"`; None: no
            limit but `/dev/shm`.
        spin: most seconds that a server without work stays awake before it sleeps.

    Many servers of a service may come and go at any time. The requests that a server had taken and not answered when
    it died go to another one, unless they were sent with `retry=False`.

    >>> import shmtensor, threading, numpy as np
    >>> def serve(server):
    ...     for req in server:
    ...         req.reply(req.value + 1)
    >>> with shmtensor.Server("doc") as server, shmtensor.Client("doc") as client:
    ...     threading.Thread(target=serve, args=(server,), daemon=True).start()
    ...     client.request(np.arange(3), timeout=5)
    ...     server.stop()
    array([1, 2, 3])
    """

    def __init__(
        self,
        service: str,
        *,
        max_batch: int | None = None,
        max_wait: float | None = None,
        max_attempts: int = 3,
        slots: int | None = None,
        max_bytes: int | str | None = None,
        spin: float = 100e-6,
    ) -> None:
        check_service(service)
        check_options(max_batch, max_wait, max_attempts, slots, max_bytes)
        self._collector = None if max_batch is None else Collector(max_batch, max_wait)
        self._left: list[Any] = []
        """What interrupted calls had taken and could not return, for the next ones: messages, requests and batches."""
        self._unfinished: list[Request | Batch] = []
        """Requests whose handlers were interrupted: other servers get them, or this one again."""
        self._stopping = self._closing = False
        self._receiver = RequestReceiver(service, max_attempts=max_attempts, spin=spin)
        self._taken = TakenRequests(self._receiver, slots=slots, max_bytes=max_bytes)

    # --- taking

    def recv(self, *, timeout: float | None = None) -> Any:
        """The next request, or the next `Batch` if the server was made with `max_batch`.

        Requests that have expired, were cancelled, or whose client has left are passed over.

        Raises:
            TimedOut: none came within `timeout` seconds.
            DependencyError: the next request has torch tensors, and torch is not installed here. It stays for a server
                that has torch, and this one raises as long as it is there.
            ClosedError, ForkedError: the server is closed or was stopped, or was made by this process's parent.
        """
        check_timeout(timeout)
        return self._next(None if timeout is None else time.monotonic() + timeout)

    def _next(self, deadline: float | None) -> Any:
        """The next request or batch. `arecv` takes the same steps.

        What was taken stays in `taken` until this returns: every step moves it there, or within it, in one C call.
        """
        receiver, taken = self._receiver, list[Any]()
        try:
            while True:
                try:
                    if self._left or self._unfinished or self._collector is not None:
                        self._take_left(taken)
                    if taken:
                        found = self._give_out(taken)
                    else:
                        message = receiver.recv(timeout=self._patience(deadline))
                        taken[:] = (message,)  # no call since it was taken
                        del message
                        found = self._give_out(taken)
                except (TimedOut, ClosedError) as error:
                    found = self._nothing_came(error, deadline, taken)
                if found is not None:
                    return found
        except BaseException:
            self._left.extend(taken)  # the first call
            raise

    def _take_left(self, taken: list[Any]) -> None:
        """Take what an interrupted call has left, if there is any."""
        if self._unfinished:
            self._give_back()
        if self._collector is not None:
            self._collector.take_full(taken)
        if self._left and not taken:
            with contextlib.suppress(IndexError):  # another thread was first
                taken.extend(map(self._left.pop, (0,)))

    def _patience(self, deadline: float | None) -> float:
        """Seconds to wait for a request; raises `ClosedError` once the server is stopped."""
        if self._stopping:
            raise ClosedError(f'Server of service "{self.name}" was stopped')
        if self._collector is not None:
            deadline = self._collector.until(deadline)
        return LIVENESS_INTERVAL if deadline is None else max(0.0, min(LIVENESS_INTERVAL, deadline - time.monotonic()))

    def _nothing_came(self, error: Exception, deadline: float | None, taken: list[Any]) -> Any:
        """Inside `except`: a batch that waits for no more requests, or None to wait on.

        Raises `TimedOut` at the deadline, and `ClosedError` where the server is closed or stopped.
        """
        collector, ended = self._collector, isinstance(error, ClosedError)
        if self._closing:
            self._taken.give_back_open()  # what this thread has taken since `close` looked
        elif collector is not None and not taken:
            collector.take_oldest(taken, due=not ended)
        if taken:
            return self._give_out(taken)
        if ended:
            raise
        if deadline is not None and time.monotonic() >= deadline and (collector is None or collector.is_empty):
            raise TimedOut(f'service "{self.name}": no request in time') from None
        self._taken.drop_clients()
        return None

    def _give_out(self, taken: list[Any]) -> Request | Batch | None:
        """The request or batch to return now: the request that was taken if its reply is wanted, or its batch.

        It stays in `taken`, which is empty where this is None.
        """
        each = taken[0]
        if not isinstance(each, (Message, Request)):
            return self._batch(taken)
        request = self._taken.accept(each, taken) if isinstance(each, Message) else self._taken.accept_again(each)
        if request is None:
            del taken[:]
            return None
        if self._collector is None:
            record_of(request).is_begun = True
            return request
        self._collector.add(taken)
        return self._batch(taken) if taken else None

    def _batch(self, taken: list[Any]) -> Batch | None:
        """A batch of those requests of the group that was taken whose replies are wanted."""
        batch = batch_of([each for each in taken[0].requests if self._taken.is_wanted(each)])
        if batch is None:
            del taken[:]
            return None
        for request in batch.requests:
            record_of(request).is_begun = True
        return batch

    async def arecv(self, *, timeout: float | None = None) -> Any:
        """`recv` for asyncio: other tasks run while this one waits, and no thread is used.

        Several tasks may wait at one server. A task that is cancelled while it waits has taken nothing; what it had put
        aside for a batch is in the next one.

        Arguments and errors are those of `recv`; also `LoopError`, if tasks of another event loop wait at this server.

        >>> import asyncio, shmtensor, torch
        >>> async def main():
        ...     async with shmtensor.Server("doc") as server, shmtensor.Client("doc") as client:
        ...         asking = asyncio.create_task(client.arequest(torch.arange(3), timeout=5))
        ...         req = await server.arecv(timeout=5)
        ...         req.reply(-req.value)
        ...         return await asking
        >>> asyncio.run(main())
        tensor([ 0, -1, -2])
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        taken: list[Any] = []
        try:
            while True:
                try:
                    self._take_left(taken)
                    if not taken:
                        message = await self._receiver.arecv(timeout=self._patience(deadline))
                        taken[:] = (message,)
                        del message
                    found = self._give_out(taken)
                except (TimedOut, ClosedError) as error:
                    found = self._nothing_came(error, deadline, taken)
                if found is not None:
                    return found
        except BaseException:
            self._left.extend(taken)
            raise

    def __iter__(self: _S) -> _S:
        return self

    def __next__(self) -> Any:
        try:
            return self._next(None)
        except ClosedError:  # also where the process ends: then only the endpoint below is closed
            if self._receiver.is_forked:
                raise
            raise StopIteration from None

    def __aiter__(self: _S) -> _S:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.arecv()
        except ClosedError:
            if self._receiver.is_forked:
                raise
            raise StopAsyncIteration from None

    def run(self, handler: Callable[[Any], Any]) -> None:
        """Answer requests with `handler(value)` until `stop()` or `close()`; an exception of it becomes an error reply.

        An exception that is not an `Exception`, such as `KeyboardInterrupt`, ends `run`; its request is delivered
        again, to this or another server. With `max_batch` the handler gets the stacked value of a batch, and its result
        is split for the replies.

        Raises `ArgumentTypeError` at once if the handler cannot be called, or is an async function, and
        `DependencyError` as `recv` does.
        """
        check_handler(handler)
        for request in self:
            begun: list[bool] = []
            try:
                self._answer(request, handler, begun)
            except BaseException as error:
                (self._unfinished if begun else self._left).append(request)  # the first call
                self._give_back(error)
                raise
            del request  # while this waits for the next one

    def run_each(self, answer: Callable[[Any], object]) -> None:
        """As `run`, but give each `Request` or `Batch` itself to `answer(request)`, which answers it.

        One that it leaves unanswered is dropped, with an error for its client. Whatever it raises ends `run_each`; the
        request is delivered again, to this or another server.
        """
        for request in self:
            try:
                answer(request)
            except BaseException as error:
                self._unfinished.append(request)  # the first call
                self._give_back(error)
                raise
            del request

    def answer(self, request: Request | Batch, handler: Callable[[Any], Any]) -> str | None:
        """Answer one request or batch with what the handler returns, or with the error that it raises.

        Returns the error's type and text; None if there was none.
        """
        return self._answer(request, handler, [])

    def _answer(self, request: Request | Batch, handler: Callable[[Any], Any], begun: list[bool]) -> str | None:
        try:
            value = request.value
            begun[:] = (True,)
            request.reply(handler(value))
            return None
        except Exception as error:
            if self._receiver.closed and isinstance(error, (ClosedError, ReleasedError)):  # another server gets it
                return None
            text = describe(error)  # a log record with the error itself would keep the request's slot
            log.warning(
                'service "%s": the handler raised %s\n%s', self.name, type(error).__name__, text["traceback"].rstrip()
            )
            with contextlib.suppress(ClosedError):
                request.fail(error)
            return f"{text['type']}: {text['text']}" if text["text"] else text["type"]

    def _give_back(self, error: BaseException | None = None) -> None:
        """Leave requests whose handlers were interrupted to other servers, as if this one had died with them.

        `error`: the exception that interrupted a handler. Its traceback refers to the handler's local variables, whose
        views would hold the request as long as the exception is kept. So they are cleared.
        """
        while self._unfinished:
            try:
                interrupted = self._unfinished[0]
            except IndexError:
                return
            for request in (interrupted,) if isinstance(interrupted, Request) else interrupted.requests:
                self._taken.give_back(request)
            with contextlib.suppress(ValueError):
                self._unfinished.remove(interrupted)
        if error is not None:
            traceback.clear_frames(error.__traceback__)

    def stop(self) -> None:
        """Take no more requests: iteration ends, once what was taken is answered. Safe in a signal handler."""
        self._stopping = True

    # --- closing

    def close(self) -> None:
        """Leave the service. Idempotent. Requests that were taken and not answered go to other servers; for those that
        waited for their batch, as if this one had not taken them."""
        self._closing = self._stopping = True
        self._taken.close()
        del self._left[:]  # afterwards: a request that is dropped by an open server fails

    async def aclose(self) -> None:
        """`close` for asyncio: tasks that wait here get a `ClosedError`, and so do threads."""
        self._closing = self._stopping = True
        self._receiver.refuse_calls()
        try:
            await self._receiver.until_idle()
        finally:
            self.close()

    # --- state

    @property
    def name(self) -> str:
        """The service's name."""
        return self._receiver.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return self._receiver.closed

    @property
    def stopping(self) -> bool:
        """Whether `stop()` or `close()` was called."""
        return self._stopping

    def statistics(self) -> ServerStatistics:
        """A frozen snapshot of this server's counters since it was created."""
        self._receiver.statistics()
        taken = self._taken
        return ServerStatistics(
            taken=taken.taken, replied=taken.replied, failed=taken.failed, expired=taken.expired,
            cancelled=taken.cancelled, dropped=taken.dropped, retried=taken.retried, unfinished=len(taken.open),
            clients=len(taken.replies),
        )  # fmt: skip

    def __enter__(self: _S) -> _S:
        self._receiver.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self: _S) -> _S:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        taken = self._taken
        return f'<Server "{self.name}" {self._receiver.state} taken={taken.taken} replied={taken.replied}>'
