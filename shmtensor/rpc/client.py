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
from .call import AutoResetEvent, Call, RequestFuture
from .driver import Driver, Notifier
from .mapping import mapped
from .notes import FOREVER, ONCE, check_service, reply_channel

_Value = Any
_AT_ONCE = (False,)
"""The argument of a lock's `acquire` that does not wait."""


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
        self._followers: deque[AutoResetEvent] = deque()
        self._received: list[Message] = []
        """Replies whose calls have not been looked for. Of the thread that receives."""
        self._ended: list[tuple[Call, Any, BaseException | None]] = []
        """Calls that were taken out of the table and do not know their end yet. They are put here by the C call that
        takes them, so that whoever is interrupted then leaves them to the next caller."""
        self._given_up: list[Call] = []
        """Calls that no thread waits for any more, and that may be in the table."""
        self._driver, self._notifier = Driver(self), Notifier(self)
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
            RemoteError: the server's handler raised, or dropped the request.
            PeerDied: the server died and `retry=False`, or as many servers in a row as one request may cost.
            ArgumentTypeError, ResourceError: as for `Publisher.send`.
            ClosedError, ForkedError: the client is closed, or was made by this process's parent.
        """
        call = self._call(timeout, retry)
        try:
            self._requests.post(call, value, meta, timeout)
            return self._wait(call)
        finally:
            if not call.done:
                self._given_up.append(call)  # the first call: whatever is raised from here on, it is noted
                self._cancel_given_up()

    def submit(
        self, value: _Value, meta: Any = None, *, timeout: float | None = None, retry: bool = True
    ) -> RequestFuture:
        """Send a request; returns a future of its reply. Blocks only while there is no room for the request.

        Arguments and errors are those of `request`; the future raises what `request` raises after it was sent.
        """
        call = self._call(timeout, retry)
        try:
            future = call.future = RequestFuture(self, call)
            self._has_submitted = True
            if call.deadline and (call.deadline < self._nearest or not self._nearest):
                self._nearest = call.deadline
            self._requests.post(call, value, meta, timeout)
            self._driver.wake()
            return future
        except BaseException:
            self._given_up.append(call)
            self._cancel_given_up()
            raise

    def map(
        self, values: Iterable[_Value], *, timeout: float | None = None, retry: bool = True, window: int | None = None
    ) -> Iterator[_Value]:
        """The replies to many requests, in their order, with up to `window` (as many as slots) on their way at once.

        `timeout` counts for each request on its own, from when it is sent. The first error ends the iteration;
        requests that are still on their way then, or when the iterator is closed, are cancelled.
        """
        check_timeout(timeout)
        if window is not None:
            check_count("window", window, 1, 1 << 16)
        timeout = None if timeout is None else float(min(timeout, FOREVER))  # a float needs no second check
        return mapped(self, values, timeout, retry, window)

    def _call(self, timeout: float | None, retry: bool) -> Call:
        """A call that is to be posted now. What interrupted calls have left is finished first."""
        if self._given_up or self._ended:
            self._cancel_given_up()
        if retry is not True and retry is not False:
            raise ArgumentTypeError(f"retry must be True or False, not {retry!r}")
        if timeout is None:
            return Call(0, 0 if retry else ONCE)
        if type(timeout) is not float or not timeout >= 0:
            check_timeout(timeout)
        return Call(monotonic_ns() + int(timeout * 1e9) if timeout < FOREVER else 0, 0 if retry else ONCE)

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
        if self._ended:
            self._finish_ended()
        while not call.done:
            leads: list[bool] = []
            try:
                leads.extend(map(self._leading.acquire, _AT_ONCE))  # taken and noted in one C call
                while leads[0] and not call.done and monotonic() < ends:
                    self._receive(ends)
            finally:
                if leads and leads[0]:
                    self._leading.release()  # the first call
                    self._after_leading()
            if not leads[0] and (now := monotonic()) < ends:
                self._follow(call, min(TICK, ends - now))
            if not call.done and (now := monotonic()) >= ends:
                if now >= until:
                    return
                self._expire()
                self._finish_ended()

    def _follow(self, call: Call, seconds: float) -> None:
        """Wait until the thread that receives has got this call's reply, or makes this one its successor."""
        event = call.event
        if event is None:
            event = call.event = AutoResetEvent()
        try:
            self._followers.append(event)
            if not call.done and self._leading.locked():  # else who stopped receiving may not have seen us
                event.wait(seconds)
        finally:
            try:
                self._followers.remove(event)
            except ValueError:
                pass
            if call.done and not self._leading.locked():  # we may have been made the successor
                self._promote()

    def _after_leading(self) -> None:
        """This thread has stopped receiving: another one goes on."""
        if self._followers or self._has_submitted:
            self._promote()

    def _promote(self) -> None:
        """The thread that received has what it wanted: another one goes on. A tick later it would by itself."""
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
        if self._received or self._ended:  # by a thread that was interrupted
            self._hand_out()
            return
        try:
            message = self._answers.recv(timeout=min(TICK, max(0.0, until - monotonic())))
            self._received[:] = (message,)  # no call since it was taken
        except TimedOut:
            self._look_around()
            return
        except ClosedError as error:  # by another thread, or in a signal handler of this one
            self._end_all(error)
            return
        del message
        self._hand_out()
        if monotonic() >= self._look_due:
            self._look_around()

    def _hand_out(self) -> None:
        """Give the replies that were received to their calls."""
        received = self._received
        while received:
            message = received[0]
            seq = self._answers.request_of(message._lease)
            failed = message.meta is not None
            value, error = (None, failures.from_reply(message.value)) if failed else (message.value, None)
            if not self._end(seq, value, error):
                self._duplicates += 1
            del received[0]
        self._finish_ended()

    def _end(self, seq: int, value: Any, error: BaseException | None) -> bool:
        """The call of that number has ended, if it has not yet; `_finish_ended` tells it."""
        try:
            end = zip(map(self._calls.pop, (seq,)), (value,), (error,), strict=False)
            self._ended.extend(end)  # out of the table and into the list in one C call
        except KeyError:
            return False
        return True

    def _finish_ended(self) -> None:
        """Tell calls that they have ended. Several threads may be at it, and each of them may be interrupted."""
        ended = self._ended
        while ended:
            try:
                end = ended[0]
            except IndexError:
                break
            call, value, error = end
            if not call.done:
                if error is None:
                    self._replied += 1
                elif isinstance(error, CancelledError):
                    self._cancelled += 1
                elif not isinstance(error, ClosedError):
                    self._failed += 1
                    self._late += isinstance(error, TimedOut)
                call.finish(value, error)
            try:
                ended.remove(end)
            except ValueError:  # by another thread
                pass
            del call, value, error, end
        if self._notifier.futures:
            self._notifier.wake()

    def _look_around(self) -> None:
        """What nobody tells: requests that expired, that no server will answer, or that died with theirs."""
        self._look_due = monotonic() + TICK
        requests = self._requests
        self._cancel_given_up()
        self._expire()
        done = []
        for call in list(self._calls.values()):
            if requests.is_done(call) or (call.bits & ONCE and requests.was_taken(call) and requests.withdraw(call)):
                done.append(call)
        if done:
            try:
                while True:  # a reply comes before its `done`: those that are there now have none, or are among these
                    message = self._answers.recv(timeout=0)
                    self._received[:] = (message,)
                    del message
                    self._hand_out()
            except (TimedOut, ClosedError):
                pass
        for call in done:
            if not call.done:
                self._end(call.seq, None, failures.unanswered(requests, call, self._answers.unread()))
        self._finish_ended()

    def _expire(self) -> None:
        for call in list(self._calls.values()):
            if call.deadline and monotonic_ns() >= call.deadline:
                error = failures.late(self._requests, call)  # before `cancel`, which may finish it
                self._requests.cancel(call)
                self._end(call.seq, None, error)
        self._nearest = min((call.deadline for call in list(self._calls.values()) if call.deadline), default=0)

    # --- giving up

    def _drop(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self._given_up.append(call)
        self._cancel_given_up()

    def _cancel_given_up(self) -> None:
        """Take back the requests that nobody waits for any more, and finish what an interrupted call has left."""
        given_up = self._given_up
        while given_up:
            try:
                call = given_up[0]
            except IndexError:
                break
            if call.seq and self._calls.get(call.seq) is call:
                if not self._requests._state:
                    self._requests.cancel(call)
                self._end(call.seq, None, CancelledError())
            try:
                given_up.remove(call)
            except ValueError:
                pass
        self._finish_ended()

    def _end_all(self, error: BaseException) -> None:
        for call in list(self._calls.values()):
            self._end(call.seq, None, ClosedError(str(error)))
        self._finish_ended()

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
        self._notifier.stop()

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
            outstanding=len(self._calls), servers=self._requests.count_living(), request_bytes=sent.sent_bytes,
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
