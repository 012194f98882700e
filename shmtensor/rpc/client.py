"""`Client`: requests go out, replies come back, each to the call it is for.

Whoever waits for a reply receives, and hands replies for others to them (leader and followers), so that a single
thread's `request` costs no hop between threads. A thread of the library's own receives only while there are futures
that nobody may be waiting for.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from time import monotonic, monotonic_ns
from typing import Any

from ..endpoints.base import TICK, check_count, check_timeout
from ..endpoints.message import Message
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, TimedOut
from ..statistics import ClientStatistics
from . import failures
from .aclient import AsyncClient
from .asking import Answers, Requests
from .call import Call, Ended, RequestFuture
from .driver import Driver
from .mapping import mapped
from .notes import FOREVER, ONCE, check_service, reply_channel

_Value = Any


class Client(AsyncClient):
    """Sends requests to the servers of a service, each to one that is idle if there is one, and gets their replies.

    Args:
        service: the service's name, 1 to 47 of `A-Za-z0-9._-`: what its servers are called by.
        slots: requests that may be on their way or with a server; further ones wait for room (`full=`). None: 16, or as
            many of large ones as take 256 MiB, at least 2; fewer where `max_bytes` is less.
        slot_bytes: bytes of a slot, an int or a string like `"8MiB"`; None: as the first request needs.
        full: what happens when no slot is free: `"block"`, `"grow"`, `"error"`.
        max_bytes: most shared memory for requests; None: as much as `/dev/shm` gives.
        spin: seconds that a waiting thread stays awake before it sleeps.

    A request is copied before the call returns. A reply's tensors and arrays are the server's slot itself, writable
    and yours: the slot is used again when the last view of them has died.

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
        full: str = "block",
        max_bytes: int | str | None = None,
        spin: float = 100e-6,
    ) -> None:
        check_service(service)
        if full == "drop":
            raise ArgumentError('full="drop" would lose requests: choose one of "block", "grow", "error"')
        self._requests = Requests(service, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes)
        try:
            self._answers = Answers(reply_channel(service, self._requests.uid), spin=spin)
        except BaseException:
            self._requests.close()
            raise
        self._calls = self._requests.calls
        self._leading = threading.Lock()
        self._followers: deque[threading.Event] = deque()
        self._driver = Driver(self)
        self._ended = Ended()
        self._look_due = 0.0
        self._nearest = 0  # no future expires before
        self._has_submitted = False  # there are futures, or were
        self._replied = self._failed = self._cancelled = self._late = self._duplicates = 0

    # --- asking

    def request(self, value: _Value, meta: Any = None, *, timeout: float | None = None, retry: bool = True) -> _Value:
        """Send a request and wait for its reply.

        Args:
            value, meta: as for `Publisher.send`.
            timeout: seconds until the request expires; a server that has not started it by then never will.
            retry: whether another server gets the request when one dies with it. Without, it then fails.

        Returns:
            The reply's value.

        Raises:
            TimedOut: there was no reply in time, or no room for the request.
            RemoteError: the server's handler raised, or let go of the request.
            PeerDied: the server died and `retry=False`, or as many servers in a row as one request may cost.
            ArgumentTypeError, ResourceError: as for `Publisher.send`.
            ClosedError, ForkedError: the client is closed, or was made by this process's parent.
        """
        call = self._call(timeout, retry)
        try:
            answers, requests = self._answers, self._requests
            inlet, outbox = answers._inlet, requests._outbox
            ended = None
            if meta is None and inlet is not None and outbox is not None and not answers._in_vain:
                ended = inlet.ask(outbox, value, self._calls, call, answers._patience)
                if ended is call:  # nobody else knows of it
                    self._replied += 1
                    return call.value
            if ended is None:
                requests.post(call, value, meta, timeout)
            elif type(ended) is not int:
                self._settle(ended)
                self._ended.tell()
            elif ended < 0:
                requests._wake_late(-ended)
            return self._wait(call)
        finally:
            if not call.done:
                self._drop(call)

    def submit(
        self, value: _Value, meta: Any = None, *, timeout: float | None = None, retry: bool = True
    ) -> RequestFuture:
        """Send a request; returns a future of its reply. Blocks only while there is no room for the request.

        Arguments and errors are those of `request`; the future raises what `request` raises after it was sent.
        """
        call = self._call(timeout, retry)
        future = call.future = RequestFuture(self, call)
        self._has_submitted = True
        if call.deadline and (call.deadline < self._nearest or not self._nearest):
            self._nearest = call.deadline
        self._post(call, value, meta, timeout)
        self._driver.wake()
        return future

    def map(
        self, values: Iterable[_Value], *, timeout: float | None = None, retry: bool = True, window: int | None = None
    ) -> Iterator[_Value]:
        """The replies to many requests, in their order, with up to `window` (as many as slots) on their way at once.

        `timeout` counts for each request on its own, from when it is sent. The first error ends the iteration;
        requests that are still on their way then, or when the iterator is closed, are cancelled. Where servers are busy
        with the others a reply may be seen up to 10 ms late (docs/rpc.md).
        """
        check_timeout(timeout)
        if window is not None:
            check_count("window", window, 1, 1 << 16)
        timeout = None if timeout is None else float(min(timeout, FOREVER))  # a float needs no second check
        return mapped(self, values, timeout, retry, window)

    def _call(self, timeout: float | None, retry: bool) -> Call:
        """A call that is to be posted now, which is refused if the client is closed."""
        if retry is not True and retry is not False:
            raise ArgumentTypeError(f"retry must be True or False, not {retry!r}")
        if timeout is None:
            return Call(0, 0 if retry else ONCE)
        if type(timeout) is not float or not timeout >= 0:
            check_timeout(timeout)
        return Call(monotonic_ns() + int(timeout * 1e9) if timeout < FOREVER else 0, 0 if retry else ONCE)

    def _post(self, call: Call, value: _Value, meta: Any, timeout: float | None) -> None:
        """Send a request; if that is interrupted, nobody waits for it."""
        try:
            self._requests.post(call, value, meta, timeout)
        except BaseException:
            self._drop(call)
            raise

    # --- waiting

    def _wait(self, call: Call) -> _Value:
        """Wait for a call's end; its value, or raise its error."""
        if not call.done:
            self._help(call, None)
        return call.result()

    def _help(self, call: Call, timeout: float | None) -> None:
        """Receive replies, this call's among them, or let another thread; returns at its end or after `timeout`."""
        until = math.inf if timeout is None else monotonic() + timeout
        ends = min(until, call.deadline * 1e-9) if call.deadline else until
        while not call.done:
            if self._leading.acquire(False):
                try:
                    while not call.done and monotonic() < ends:
                        self._receive(ends)
                        if self._ended.futures and not self._ended.is_telling():
                            break
                finally:
                    self._stop_leading()
            elif (now := monotonic()) < ends:
                self._follow(call, min(TICK, ends - now))
            if not call.done and (now := monotonic()) >= ends:
                if now >= until:
                    return
                self._expire()
                self._ended.tell()

    def _follow(self, call: Call, seconds: float) -> None:
        """Wait until the thread that receives has got this call's reply, or makes this one its successor."""
        bell = call.bell
        if bell is None:
            bell = call.bell = threading.Event()
        self._followers.append(bell)
        try:
            if not call.done and self._leading.locked():  # else who stopped receiving may not have seen us
                bell.wait(seconds)
                bell.clear()
        finally:
            with contextlib.suppress(ValueError):
                self._followers.remove(bell)
            if call.done and not self._leading.locked():  # we may have been made the successor
                self._promote()

    def _stop_leading(self) -> None:
        """This thread stops receiving: another one goes on, and the callbacks of what has ended run here."""
        self._leading.release()
        if self._followers or self._has_submitted:
            self._promote()
            self._ended.tell()

    def _promote(self) -> None:
        """The thread that received has what it wanted: another one goes on."""
        if not self._promote_follower():
            self._driver.wake()

    def _promote_follower(self) -> bool:
        with contextlib.suppress(IndexError):
            self._followers[0].set()
            return True
        return False

    def _until_nearest(self) -> float:
        """Seconds to receive before the next call may expire, at most a tick."""
        nearest = self._nearest
        return min(TICK, max(0.0, (nearest - monotonic_ns()) * 1e-9)) if nearest else TICK

    # --- receiving: one thread at a time

    def _receive(self, until: float) -> None:
        """Wait until then, at most, for a reply and hand it to its call; look around when it is time."""
        ended = self._answers.take(self._calls, until)
        if ended is not None:
            self._settle(ended)
        else:
            try:
                message = self._answers.recv(timeout=min(TICK, max(0.0, until - monotonic())))
            except TimedOut:
                self._look_around()
                return
            except ClosedError as error:  # by another thread
                self._end_all(error)
                return
            self._hand_out(message)
        if monotonic() >= self._look_due:
            self._look_around()

    def _hand_out(self, message: Message) -> None:
        seq = self._answers.request_of(message._lease)
        if message.meta is not None:
            call = self._calls.get(seq)
            if call is not None:
                self._end(call, failures.from_reply(message.value))
                return
        else:
            call = self._calls.pop(seq, None)
            if call is not None:
                call.value = message.value
                self._settle(call)
                return
        self._settle(False)

    def _settle(self, call: Call | bool) -> None:
        """A reply came: of this call, which has its value, or of none."""
        if isinstance(call, bool):  # it was given up, or a server died between its reply and saying that it had replied
            self._duplicates += 1
        else:
            self._replied += 1
            if call.future is not None:
                call.finish(call.value)
            else:
                call.done = True
                if call.bell is not None:
                    call.bell.set()

    def _end(self, call: Call, error: BaseException) -> None:
        """A call ends with an error, if nobody else has ended it."""
        if self._calls.pop(call.seq, None) is not None:
            self._failed += 1
            call.finish(None, error)

    def _look_around(self) -> None:
        """What nobody tells: requests that expired, that no server will answer, or that died with theirs."""
        self._look_due = monotonic() + TICK
        requests = self._requests
        self._expire()
        done = []
        for call in list(self._calls.values()):
            if requests.is_done(call) or (call.bits & ONCE and requests.was_taken(call) and requests.withdraw(call)):
                done.append(call)
        if not done:
            return
        with contextlib.suppress(TimedOut, ClosedError):
            while True:  # a reply comes before its `done`: those that are there now have none, or are among these
                self._hand_out(self._answers.recv(timeout=0))
        for call in done:
            if not call.done:
                self._end(call, failures.unanswered(requests, call))

    def _expire(self) -> None:
        for call in list(self._calls.values()):
            if call.deadline and monotonic_ns() >= call.deadline:
                self._requests.cancel(call)
                self._late += 1
                self._end(call, failures.late(self._requests, call))
        self._nearest = min((call.deadline for call in list(self._calls.values()) if call.deadline), default=0)

    # --- giving up

    def _drop(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        if not call.seq or self._calls.pop(call.seq, None) is None:
            return
        self._cancelled += 1
        if not self._requests._state:
            self._requests.cancel(call)
        call.finish(None, CancelledError())
        self._ended.tell()

    def _end_all(self, error: BaseException) -> None:
        for call in list(self._calls.values()):
            if self._calls.pop(call.seq, None) is not None:
                call.finish(None, ClosedError(str(error)))

    def _cancel_all(self) -> None:
        if not self._requests._state:
            for call in list(self._calls.values()):
                self._requests.cancel(call)

    def close(self) -> None:
        """Leave the service. Idempotent; works while values of replies are alive.

        Requests without a reply fail with `ClosedError`; those that no server has started never are.
        """
        requests, answers = self._requests, self._answers
        self._cancel_all()
        requests.close()
        answers.close()
        self._driver.stop()
        self._end_all(ClosedError(f'Client of service "{requests.name}" is closed'))
        self._promote()
        self._ended.tell()

    # --- looking

    @property
    def name(self) -> str:
        """The service's name."""
        return self._requests.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return bool(self._requests._state)

    def wait_for_servers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living servers are there; `TimedOut` after `timeout` seconds."""
        self._requests._wait_for_receivers(count, timeout, "servers")

    def statistics(self) -> ClientStatistics:
        """Counters since this client was made."""
        sent, received = self._requests.statistics(), self._answers.statistics()
        return ClientStatistics(
            requests=self._requests._published, replies=self._replied, errors=self._failed - self._late,
            cancelled=self._cancelled, expired=self._late, duplicates=self._duplicates,
            outstanding=len(self._calls), servers=sent.receivers, request_bytes=sent.sent_bytes,
            reply_bytes=received.received_bytes,
        )  # fmt: skip

    def __enter__(self) -> Client:
        if self._requests._state:
            self._requests._refuse()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f'<Client "{self.name}" {self._requests._state or "open"} outstanding={len(self._calls)}>'
