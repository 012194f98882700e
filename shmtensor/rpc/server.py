"""`Server`: takes requests one by one or in batches, and sends each client its replies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, TypeVar

from ..endpoints.base import FORKED, TICK, check_timeout
from ..endpoints.message import Message
from ..errors import ClosedError, ReleasedError, ResourceError, RingFull, TimedOut
from ..ring.layout import DEADLINE, NOTE
from ..statistics import ServerStatistics
from .answering import Intake, Replies
from .aserver import AsyncServer
from .batching import Batch, Collector, batch_of
from .checks import check_handler, check_options
from .notes import CANCELLED, DIED, DROPPED, FAILED, NO_ROOM, check_service, reply_channel
from .request import Request, describe

log = logging.getLogger("shmtensor")

_S = TypeVar("_S", bound="Server")


class Server(AsyncServer):
    """Answers the requests of a service: takes one whenever it asks for one, so that a busy server gets none.

    Args:
        service: the service's name, 1 to 47 of `A-Za-z0-9._-`.
        max_batch: at most so many requests at once: `recv` and iteration then give a `Batch`. None: one by one.
        max_wait: seconds that a batch waits for more after its first request was taken; None: 0.002. Needs `max_batch`.
        max_attempts: so many servers may die with a request; then it fails with `PeerDied`.
        slots: slots of the first ring of replies to a client; a client that keeps its replies makes rings be added.
            None: 8, or as many of large replies as take 256 MiB, at least 2; fewer where `max_bytes` is less.
        max_bytes: most shared memory for the replies to one client; None: as much as `/dev/shm` gives.
        spin: seconds that a server without work stays awake before it sleeps.

    Many servers of a service may come and go at any time. A server's own death costs nothing but time: what it had
    taken and not answered goes to another one, unless it was asked for with `retry=False`.

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
        self._reply_options: dict[str, Any] = {"slots": slots, "max_bytes": max_bytes}
        self._collector = None if max_batch is None else Collector(max_batch, max_wait)
        self._replies: dict[int, Replies] = {}
        self._replies_epoch = -1
        self._opening = threading.Lock()
        self._open: dict[int, Message] = {}  # of what is taken and not answered; by id of the request
        self._left: list[Any] = []
        """What interrupted calls had taken and could not return, for the next ones: messages, requests and batches."""
        self._unfinished: list[Request | Batch] = []
        """Whose handlers were interrupted: they go to other servers, or come again."""
        self._stopping = False
        self._taken = self._replied = self._failed = self._expired = self._cancelled = 0
        self._dropped = self._retried = 0
        self._intake = Intake(service, max_attempts=max_attempts, spin=spin)

    # --- taking

    def recv(self, *, timeout: float | None = None) -> Any:
        """The next request, or the next `Batch` if the server was made with `max_batch`.

        Requests that have expired, were cancelled, or whose client has left are passed over.

        Raises:
            TimedOut: none came within `timeout` seconds.
            ClosedError, ForkedError: the server is closed or was stopped, or was made by this process's parent.
        """
        check_timeout(timeout)
        return self._next(None if timeout is None else time.monotonic() + timeout)

    def _next(self, deadline: float | None) -> Any:
        """The next request or batch; `AsyncServer.arecv` does the same. What is told apart here is told there, too.

        What is taken lies in `taken` until this returns: every step moves it there, or within it, in one C call."""
        intake, taken = self._intake, list[Any]()
        try:
            while True:
                try:
                    if self._left or self._unfinished or self._collector is not None:
                        self._take_left(taken)
                    if taken:
                        found = self._give_out(taken)
                    else:
                        message = intake.recv(timeout=self._patience(deadline))
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
        """Take what an interrupted call has left."""
        if self._unfinished:
            self._give_back()
        if self._collector is not None:
            self._collector.take_full(taken)
        if self._left and not taken:
            with contextlib.suppress(IndexError):  # another thread was first
                taken.extend(map(self._left.pop, (0,)))

    def _patience(self, deadline: float | None) -> float:
        """Seconds to wait before looking around; `ClosedError` once there is nothing to wait for."""
        if self._stopping:
            raise ClosedError(f'Server of service "{self.name}" was stopped')
        if self._collector is not None:
            deadline = self._collector.until(deadline)
        return TICK if deadline is None else max(0.0, min(TICK, deadline - time.monotonic()))

    def _nothing_came(self, error: Exception, deadline: float | None, taken: list[Any]) -> Any:
        """Inside `except`: the batch that waits for no more; `TimedOut` at the deadline, `ClosedError` at the end."""
        collector, ended = self._collector, isinstance(error, ClosedError)
        if collector is not None and not taken:
            collector.take_oldest(taken, due=not ended)
        if taken:
            return self._give_out(taken)
        if ended:
            raise
        if deadline is not None and time.monotonic() >= deadline and (collector is None or collector.is_empty):
            raise TimedOut(f'service "{self.name}": no request in time') from None
        self._let_clients_go()
        return None

    def _give_out(self, taken: list[Any]) -> Request | Batch | None:
        """What is to be given out now: the request that was taken, if somebody waits for it, or its batch.

        It stays in `taken`. Where this is None, nothing does."""
        each = taken[0]
        if not isinstance(each, (Message, Request)):
            return self._batch(taken)
        request = self._accept(each, taken) if isinstance(each, Message) else self._look_again(each)
        if request is None:
            del taken[:]
            return None
        return request if self._collector is None else self._collect(taken)

    def _collect(self, taken: list[Any]) -> Batch | None:
        """Put the request that was taken to others; a batch, if one is to be given out now."""
        if self._collector is not None:
            self._collector.add(taken)
        return self._batch(taken) if taken else None

    def _batch(self, taken: list[Any]) -> Batch | None:
        """Of the requests that were taken together, those that somebody waits for, as a batch."""
        batch = batch_of([each for each in taken[0].requests if self._may_start(each)])
        if batch is None:
            del taken[:]
        return batch

    def _look_again(self, request: Request) -> Request | None:
        """A request that was taken by a call that was interrupted, if somebody waits for it still."""
        if request.answered:
            return None
        self._open[id(request)] = request._message
        return request if self._should_start(request) else None

    def _accept(self, message: Message, taken: list[Any]) -> Request | None:
        """The request that a message is, if somebody waits for it, in its place in `taken`."""
        # crash: request.taken
        if self._intake._epoch != self._replies_epoch:
            self._let_clients_go()
        source = self._intake.source_of(message._lease)
        request = Request(self, message, source)
        taken[0] = request
        self._taken += 1
        self._open[id(request)] = message
        words, at = source.words, request._at
        if (
            words[at + NOTE] == request.seq << 8
            and message.attempt == 1
            and not source.feed.gone
            and (not (deadline := words[at + DEADLINE]) or monotonic_ns() < deadline)
        ) or self._should_start(request):
            return request
        return None

    def _should_start(self, request: Request) -> bool:
        """Whether somebody waits for a request that may still be started; else it is finished here."""
        words, at = request._words, request._at
        note = words[at + NOTE]
        if note >> 8 != request.seq:
            request._finish(DROPPED)  # not of a client
            self._dropped += 1
        elif note & CANCELLED or request._source.feed.gone:
            request._finish()
            self._cancelled += 1
        elif (deadline := words[at + DEADLINE]) and monotonic_ns() >= deadline:
            request._finish()
            self._expired += 1
        elif request.attempt > 1 and request._once:
            request._finish(DIED)
            self._failed += 1
        else:
            self._retried += request.attempt > 1
            return True
        return False

    def _may_start(self, request: Request) -> bool:
        """Whether somebody still waits for a request that was taken a while ago; else it is finished here."""
        if request.answered:
            return False
        if request.cancelled:
            self._cancelled += 1
        elif request.expired:
            self._expired += 1
        else:
            return True
        request._finish()
        return False

    def __iter__(self: _S) -> _S:
        return self

    def __next__(self) -> Any:
        try:
            return self._next(None)
        except ClosedError:  # also where the process ends: then only the endpoint below is closed
            if self._intake._state == FORKED:
                raise
            raise StopIteration from None

    def run(self, handler: Callable[[Any], Any]) -> None:
        """Answer requests with `handler(value)` until `stop()` or `close()`; an exception of it becomes an error reply.

        What is no `Exception`, as `KeyboardInterrupt`, ends it: the request in hand comes again, to this or another
        server.

        With `max_batch` the handler gets the stacked value of a batch and returns what is split for the replies.

        Raises `ArgumentTypeError` at once for what cannot be called, and for an async function.
        """
        check_handler(handler)
        for request in self:
            begun: list[bool] = []
            try:
                self._answer(request, handler, begun)
            except BaseException:
                (self._unfinished if begun else self._left).append(request)  # the first call
                self._give_back()
                raise

    def answer(self, request: Request | Batch, handler: Callable[[Any], Any]) -> None:
        """Answer one request or batch with what the handler returns, or with the error that it raises."""
        self._answer(request, handler, [])

    def _answer(self, request: Request | Batch, handler: Callable[[Any], Any], begun: list[bool]) -> None:
        try:
            value = request.value
            begun[:] = (True,)
            request.reply(handler(value))
        except Exception as error:
            if self._intake._state and isinstance(error, (ClosedError, ReleasedError)):  # another server gets it
                return
            text = describe(error)  # of the error itself, a log that is kept would keep the request's slot
            log.warning(
                'service "%s": the handler raised %s\n%s', self.name, type(error).__name__, text["traceback"].rstrip()
            )
            with contextlib.suppress(ClosedError):
                request.fail(error)

    def _give_back(self) -> None:
        """Requests whose handlers were interrupted are for other servers, as if this one had died with them."""
        while self._unfinished:
            try:
                interrupted = self._unfinished[0]
            except IndexError:
                return
            for request in (interrupted,) if isinstance(interrupted, Request) else interrupted.requests:
                if self._open.pop(id(request), None) is not None:
                    request._message._empty()
            with contextlib.suppress(ValueError):
                self._unfinished.remove(interrupted)

    def stop(self) -> None:
        """Take no more requests: iteration ends, once what was taken is answered. Safe in a signal handler."""
        self._stopping = True

    # --- answering

    def _reply(self, request: Request, value: Any, error: BaseException | str | None) -> None:
        replies, sent = self._replies_for(request), False
        meta = None if error is None else {FAILED: True}
        try:
            if replies is not None:
                replies.post(request.seq, value, meta, request._patience)
                sent = True
        except ClosedError:
            self._check_open(replies)
        except (ResourceError, RingFull):
            if error is None:
                raise
            self._dropped += 1
            request._finish(NO_ROOM)
            return
        self._settle(request, sent, error is not None)

    async def _areply(self, request: Request, value: Any) -> None:
        replies, sent = self._replies_for(request), False
        try:
            if replies is not None:
                await replies.apost(request.seq, value, None, request._patience)
                sent = True
        except ClosedError:
            self._check_open(replies)
        self._settle(request, sent, False)

    def _replies_for(self, request: Request) -> Replies | None:
        """Where the reply to a request goes; None if nobody waits for it."""
        if request._message._receiver is None:
            raise ReleasedError("this request was answered already, or its server has closed")
        if self._intake._state:
            self._intake._refuse()
        source = request._source
        if source.feed.gone or (request._words[request._at + NOTE] != request.seq << 8 and request.cancelled):
            return None
        replies = source.replies
        if replies is None or replies._state:
            replies = source.replies = self._replies_to(source.feed.uid)
        return replies

    def _check_open(self, replies: Replies | None) -> None:
        """Inside `except`: raise again unless it was a client's leaving that closed its publisher."""
        if self._intake._state or replies is None or not replies.closed:
            raise

    def _settle(self, request: Request, sent: bool, failed: bool) -> None:
        """A request is answered, or nobody waits for its answer."""
        # crash: reply.sent
        if not sent:
            self._cancelled += 1
        elif failed:
            self._failed += 1
        else:
            self._replied += 1
        request._finish()

    def _replies_to(self, uid: int) -> Replies:
        replies = self._replies.get(uid)
        if replies is None:
            with self._opening:
                replies = self._replies.get(uid)
                if replies is None:
                    replies = Replies(reply_channel(self.name, uid), **self._reply_options)
                    # crash: reply.opened
                    self._replies[uid] = replies
                    if self._stopping and self._intake._state:  # closed meanwhile, by a signal handler of this thread
                        replies.close()
        return replies

    def _let_clients_go(self) -> None:
        """Close the publishers to clients that have left."""
        if self._replies_epoch != self._intake._epoch:
            self._replies_epoch = self._intake._epoch
            self._intake.forget_sources()
        if not self._replies:
            return
        here = self._intake.clients()
        for uid in [uid for uid in list(self._replies) if here.get(uid, True)]:
            with self._opening:
                replies = self._replies.pop(uid, None)
            if replies is not None:
                replies.close()

    def _forget(self, request: Request) -> None:
        """A request was dropped without an answer."""
        if self._intake._state:
            self._open.pop(id(request), request._message)._empty()  # not done: another server gets it
        elif id(request) in self._open:  # else it was never given out, or was given back
            self._dropped += 1
            request._finish(DROPPED)

    # --- leaving

    def close(self) -> None:
        """Leave the service. Idempotent. Requests that were taken and not answered go to other servers."""
        self._stopping = True
        del self._left[:]
        while self._open:
            self._open.popitem()[1]._empty()
        self._intake.close()
        for uid in list(self._replies):
            replies = self._replies.pop(uid, None)
            if replies is not None:
                replies.close()

    @property
    def name(self) -> str:
        """The service's name."""
        return self._intake.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return bool(self._intake._state)

    @property
    def stopping(self) -> bool:
        """Whether `stop()` or `close()` was called."""
        return self._stopping

    def statistics(self) -> ServerStatistics:
        """Counters since this server was made."""
        self._intake.statistics()
        return ServerStatistics(
            taken=self._taken, replied=self._replied, failed=self._failed, expired=self._expired,
            cancelled=self._cancelled, dropped=self._dropped, retried=self._retried,
            unfinished=len(self._open), clients=len(self._replies),
        )  # fmt: skip

    def __enter__(self: _S) -> _S:
        if self._intake._state:
            self._intake._refuse()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f'<Server "{self.name}" {self._intake._state or "open"} taken={self._taken} replied={self._replied}>'
