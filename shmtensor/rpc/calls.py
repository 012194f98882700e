"""The calls of a client: each one, its future, and all that have not ended, with their replies and time-outs.

A thread that waits for its own reply receives, and dispatches the replies of other calls to them (leader and
followers), so that a single thread's `request` costs no switch of threads. A thread of the library's own receives only
while there are futures and no other thread does.

Any thread that calls may be interrupted by an asynchronous exception: a call, a reply or a lock is taken from one place
and recorded in another in one C call, and the next caller finishes what an interrupted one has recorded.

A client that has futures has two threads: one receives where no other thread does, one notifies waiting threads. No
asynchronous exception arrives in these two: signal handlers run in the main thread. What must not be interrupted
halfway is done there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import compress
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any, Final

from ..endpoints.base import LIVENESS_INTERVAL
from ..endpoints.message import Message
from ..errors import (
    ArgumentTypeError,
    ClosedError,
    DependencyError,
    PeerDied,
    ReentrantError,
    RemoteError,
    TimedOut,
    WireError,
)
from ..options import check_timeout
from ..shielded import Condition
from .endpoints import DIED, DROPPED, FOREVER, NO_ROOM, ONCE, ReplyReceiver, RequestSender

log = logging.getLogger("shmtensor.rpc")


class AutoResetEvent:
    """An event that is reset when a waiting thread returns.

    A raw lock: each of its calls is one C call, so that an asynchronous exception leaves it set or not set. With a
    `threading.Event` it could leave the event set and no thread woken, or the event's own lock locked.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the one that waits next."""
        try:
            self._lock.release()
        except RuntimeError:  # it is set
            pass

    def wait(self, seconds: float) -> bool:
        """Wait until it is set; False if it is not after `seconds`. Below 0 there is no limit."""
        return self._lock.acquire(timeout=seconds if seconds >= 0 else -1)


class Call:
    """A request that is being posted, or was. It ends once: with a value, an error, or a cancellation.

    deadline:  on CLOCK_MONOTONIC, nanoseconds; 0: none
    bits:      of its note
    seq:       its sequence number; 0 until it is posted
    words, at: the words of its ring and the index of its slot's state, once it is posted
    """

    __slots__ = (
        "at", "bits", "deadline", "done", "error", "event", "future", "seq", "value", "verdict", "withdrawn", "words",
    )  # fmt: skip

    words: memoryview
    at: int
    value: Any
    error: BaseException | None
    event: AutoResetEvent | None  # of the thread that waits for this call while another one receives
    future: RequestFuture | None
    verdict: tuple[int, int] | None  # why it has no reply: read before another request may take its slot
    withdrawn: BaseException | None  # the same, if a thread of this client withdraws its request

    def __init__(self, deadline: int, bits: int) -> None:
        self.deadline, self.bits, self.seq, self.done = deadline, bits, 0, False
        self.value = self.error = self.event = self.future = self.verdict = self.withdrawn = None

    def finish(self, value: Any, error: BaseException | None) -> None:
        """End the call. If it is interrupted it may be called again, also by several threads: it does what is left."""
        if self.done:
            return
        future = self.future
        if future is None:
            self.value, self.error = value, error
        else:
            future._finish(value, error)
            self.future = None  # the future owns it
        self.withdrawn = None  # its traceback may refer to this call soon
        self.done = True
        event = self.event
        if event is not None:  # read after `done` is set: a thread that creates one reads `done` afterwards
            event.set()

    def result(self) -> Any:
        """Return the value, without keeping it, or raise the error."""
        value, self.value = self.value, None
        if self.error is not None:
            try:
                raise self.error
            finally:
                del value
                self.error = None  # its traceback refers to this frame
        return value


_PENDING = ("PENDING", "RUNNING")


class RequestFuture(Future[Any]):
    """What `submit` returns: a `concurrent.futures.Future` whose waiting thread receives replies itself if it can.

    `cancel()` works until the reply is there: a request that no server has started is never started; of one that a
    server has started, the handler may ask (`req.cancelled`), and its reply is dropped. `running()` is never true.
    """

    _state: str
    _waiters: list[Any]

    def __init__(self, in_flight: CallsInFlight, call: Call) -> None:
        super().__init__()
        self._condition = Condition()
        self._source: tuple[CallsInFlight, Call] | None = in_flight, call  # until it is done
        self._notified = False  # those that wait by `concurrent.futures.wait`, and the callbacks

    def result(self, timeout: float | None = None) -> Any:
        """The reply's value; raises what the request ended with, `TimeoutError` after `timeout` seconds."""
        try:
            self._help(timeout)
            return super().result(0)
        finally:
            self = None  # type: ignore[assignment]  # an error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the request ended with, or None; `TimeoutError` after `timeout` seconds."""
        self._help(timeout)
        return super().exception(0)

    def _help(self, timeout: float | None) -> None:
        """Wait until it is done, receiving if no other thread does."""
        source = self._source
        if source is not None:
            in_flight, call = source
            in_flight.wait(call, timeout)
            if not call.done and not self.done():  # a callback may ask before the call has ended
                raise FutureTimeout

    def cancel(self) -> bool:
        """Cancel the request. False if its reply has arrived already."""
        source = self._source
        if source is not None:
            in_flight, call = source
            in_flight.give_up(call)
        return self.cancelled()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        """Set the result. May be called again, as `Call.finish`: a result that is set does not change.

        Other waiting threads and callbacks are notified by a thread of the library's own: in this one an asynchronous
        exception could come between one and the next.
        """
        source = self._source
        with self._condition:
            if self._state in _PENDING:  # else it is done, or the user set a result, which stays
                if source is not None and (self._waiters or self._done_callbacks):  # type: ignore[attr-defined]
                    source[0].notifier.due.append(self._notify)
                if error is None:
                    self._result = value
                    self._state = "FINISHED"
                elif isinstance(error, CancelledError):
                    self._state = "CANCELLED_AND_NOTIFIED"
                else:
                    self._exception = error
                    self._state = "FINISHED"
        self._source = None

    def _notify(self) -> None:
        """Notify the threads that wait, and run the callbacks, once."""
        with self._condition:
            if self._notified or self._state in _PENDING:  # `_finish` was interrupted, and is called again
                return
            self._notified = True
            for waiter in self._waiters:
                if self._state == "CANCELLED_AND_NOTIFIED":
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]


def from_reply(value: Any, meta: Any) -> Exception:
    """The error that an error reply carries, or the error that says why the reply cannot be read."""
    if isinstance(meta, DependencyError):
        return DependencyError(f"the reply cannot be read: {meta}", name="torch")
    try:
        return RemoteError(str(value["type"]), str(value["text"]), str(value["traceback"]))
    except Exception:  # whatever a peer has sent
        return WireError("a reply says that it is an error, and is none")


def closed(requests: RequestSender) -> ClosedError:
    """The error of a request whose client is closed."""
    return ClosedError(f'Client of service "{requests.name}" is closed')


def unanswered(requests: RequestSender, answers: ReplyReceiver, call: Call, lost: bool) -> BaseException:
    """The error of a request that is done and has no reply.

    `lost`: the client has taken it back from a server that has died.
    """
    if call.withdrawn is not None:
        return call.withdrawn
    if requests.closed:  # a server saw that this client has left
        return closed(requests)
    code, attempt = requests.verdict(call)
    what = f'service "{requests.name}": '
    if code == DROPPED:
        return RemoteError("Unanswered", what + "the server dropped this request without an answer")
    if code == NO_ROOM:
        return RemoteError(
            "NoRoom",
            what + "the server found no room for the reply beside those that this client keeps: copy what you keep and "
            "drop the replies, or give the server more (max_bytes=, slots=, /dev/shm); its log has the numbers",
        )
    if not code and (unread := answers.unread()) is not None:  # a living server's, of which no reply can be read
        return unread
    if code == DIED or lost or not attempt or (call.bits & ONCE and attempt > 1):
        return PeerDied(what + "the server that had this request died, or closed before it answered")
    if attempt == 1:  # no server has died with it
        return WireError(
            what + "the server cannot read this request, or its reply cannot be read here: the log of the one that "
            "passed it over says why"
        )
    deaths = attempt - 1  # a server that takes it after the last allowed death does not start it
    each = f"each of the {deaths} servers that had this request" if deaths > 1 else "the server that had this request"
    return PeerDied(what + f"{each} died (max_attempts={deaths})")


def late(requests: RequestSender, call: Call) -> TimedOut:
    """The error of a request that has expired."""
    if not requests.was_taken(call):
        state = "no server took it: none runs, or all are busy"
    elif requests.is_done(call):  # its lock may still be held
        state = "its server has just finished with it"
    elif requests.is_held(call):
        state = "a server has it"
    else:
        state = "the server that had it died or closed, and no other has taken it since"
    return TimedOut(f'service "{requests.name}": no reply in time ({state})')


_POLL_S: Final = 0.005


class _ClientThread(ABC):
    """A thread that is started when it is first needed, and ends with its client."""

    _name: str

    def __init__(self, in_flight: CallsInFlight) -> None:
        wanted = self._wanted = AutoResetEvent()
        self._in_flight = weakref.ref(in_flight, lambda _: wanted.set())
        self._stopped = False
        self._thread: threading.Thread | None = None  # set by the thread itself: its starter may be interrupted
        self._starting, self._beginning = threading.Lock(), threading.Lock()

    @property
    def is_started(self) -> bool:
        """Whether the thread was ever started."""
        return self._thread is not None

    def _wake(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._wanted.set()

    def _run(self) -> None:
        with self._beginning:
            if self._thread is not None:  # it was started twice, by a thread that did not see the first one yet
                return
            self._thread = threading.current_thread()
        said = ""
        while not self._stopped and self._in_flight() is not None:
            self._wanted.wait(self._patience())
            try:
                self._work()
                said = ""
            except BaseException as error:  # a shortage, or a callback's: other calls need this thread all the same
                if said != (said := f"{self._name}: {error!r}"):
                    where = "".join(traceback.format_exception(error))  # text: a record would keep the frames
                    log.warning("thread %s; it goes on\n%s", said, where)
                self._wanted.set()
                time.sleep(_POLL_S)

    @abstractmethod
    def _patience(self) -> float:
        """Seconds to wait for a wake-up before `_work` is called without one; below 0 there is no limit."""

    @abstractmethod
    def _work(self) -> None:
        """Do what there is to do."""

    def stop(self, *, wait: bool = True) -> None:
        """End the thread, and wait for its end if `wait`: the client is closed."""
        self._stopped = True
        self._wanted.set()
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(2 * LIVENESS_INTERVAL)

    async def ended(self) -> None:
        """Wait until the stopped thread has ended, at most `2 * LIVENESS_INTERVAL`."""
        import asyncio

        until = time.monotonic() + 2 * LIVENESS_INTERVAL
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)


class Driver(_ClientThread):
    """Receives a client's replies while there are futures and no other thread receives."""

    _name = "shmtensor replies"

    def wake(self) -> None:
        """Wake the thread, since there may be work: there is a future, or the thread that received has stopped."""
        in_flight = self._in_flight()
        if in_flight is not None and not self._stopped and (self._thread is not None or in_flight.has_futures):
            self._wake()

    def _patience(self) -> float:
        in_flight = self._in_flight()
        if in_flight is not None and (in_flight.notifier.due or in_flight.has_futures):
            return LIVENESS_INTERVAL  # the thread that was to wake this one may have been interrupted
        return -1.0

    def _work(self) -> None:
        while not self._stopped and self._receive_once():
            pass

    def _receive_once(self) -> bool:
        """Receive for a while, if there are futures and no other thread receives; False: wait for a wake-up."""
        in_flight = self._in_flight()
        if in_flight is None:
            return False
        in_flight.finish_ended()
        if not in_flight.has_futures:
            in_flight.promote_follower()
            return False
        leads: list[None] = []
        in_flight.lead(leads)
        if not leads:
            return False  # the thread that releases it wakes this one
        try:
            in_flight.receive(time.monotonic() + in_flight.until_nearest())
        finally:
            in_flight.leading.release()
        return True


class Notifier(_ClientThread):
    """Notifies those that wait for a future by `concurrent.futures.wait`, and runs callbacks."""

    _name = "shmtensor callbacks"

    def __init__(self, in_flight: CallsInFlight) -> None:
        super().__init__(in_flight)
        self.due: deque[Callable[[], None]] = deque()
        """Functions that notify the waiting threads and run the callbacks, one for each future that has ended."""

    def wake(self) -> None:
        """Notify for the futures that have ended."""
        if self._stopped:
            self._work()  # the thread may have ended before
        else:
            self._wake()

    def stop(self, *, wait: bool = True) -> None:
        super().stop(wait=wait)
        if self._thread is not threading.current_thread():
            self._work()

    def _patience(self) -> float:
        return -1.0

    def _work(self) -> None:
        while True:
            try:
                notify = self.due.popleft()
            except IndexError:
                return
            notify()
            del notify  # it refers to the future


_NO_WAIT = (False,)
"""The argument of a lock's `acquire` that does not wait."""


class CallsInFlight:
    """A client's calls from their start to their end, and the threads that wait for them."""

    def __init__(self, requests: RequestSender, answers: ReplyReceiver) -> None:
        self.requests, self.answers = requests, answers
        self.calls = requests.calls
        """Calls that were posted and have not ended, by sequence number."""
        self.leading = threading.Lock()
        """The lock of the thread that receives."""
        self.leader = deque((0,), maxlen=1)
        """The thread that took `leading` last."""
        self.followers: deque[AutoResetEvent] = deque()
        """Events of the threads that wait while another one receives."""
        self.received: list[Message] = []
        """Replies whose calls have not been looked up. Of the thread that receives."""
        self.ended: list[tuple[Call, Any, BaseException | None]] = []
        """Calls that were taken out of `calls`, with their ends. The C call that takes them out puts them here, so that
        a thread that is interrupted then leaves them to the next caller."""
        self.given_up: list[Call] = []
        """Calls that no thread waits for any more, and that may still be in `calls`."""
        self.driver, self.notifier = Driver(self), Notifier(self)
        self.check_due = 0.0
        self.nearest = 0  # no call of a future expires before
        self.has_submitted = False  # there are futures, or were
        self.replied = self.failed = self.cancelled = self.late = self.duplicates = 0

    def begin(self, timeout: float | None, retry: bool) -> Call:
        """Create the call of a request that is posted next. First finishes what interrupted calls have left."""
        if self.given_up or self.ended:
            self.cancel_given_up()
        if retry is not True and retry is not False:
            raise ArgumentTypeError(f"retry must be True or False, not {retry!r}")
        if timeout is None:
            return Call(0, 0 if retry else ONCE)
        if type(timeout) is not float or not timeout >= 0:
            check_timeout(timeout)
        return Call(monotonic_ns() + int(timeout * 1e9) if timeout < FOREVER else 0, 0 if retry else ONCE)

    # --- waiting

    def lead(self, leads: list[None]) -> None:
        """Become the thread that receives, if there is none: then `leads` gets an element. Release `leading` then."""
        leads.extend(map(self.leader.append, compress((get_ident(),), map(self.leading.acquire, _NO_WAIT))))

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Wait until the call has ended, at most `timeout` seconds; receive meanwhile if no other thread does.

        Raises `ReentrantError` if it is this thread that receives: it would wait for itself.
        """
        until = math.inf if timeout is None else monotonic() + timeout
        ends = min(until, call.deadline * 1e-9) if call.deadline else until
        if self.ended:
            self.finish_ended()
        while not call.done:
            leads: list[None] = []
            try:
                self.lead(leads)
                while True:  # a loop of this form is within the `try` to its last jump: tests/package/test_jumps.py
                    if not leads or call.done:
                        break
                    if monotonic() >= ends:
                        self.drain()  # this thread may come late: replies that are there are in time
                        break
                    self.receive(ends)
            finally:
                if leads:
                    self.leading.release()  # the first call
                    if self.followers or self.has_submitted:
                        self.promote()
            if call.done:
                break
            now = monotonic()
            if not leads and now < ends:
                if self.requests.is_forked:  # the thread that receives is the parent's
                    self.requests.check_open()
                if self.leader[0] == get_ident() and self.leading.locked():
                    raise ReentrantError(
                        f'service "{self.requests.name}": a signal handler or finalizer would wait for a reply in the '
                        "middle of a call of its own thread that receives the replies of this client: submit() there, "
                        "or set a flag"
                    )
                self._follow(call, min(LIVENESS_INTERVAL, ends - now))
            elif now >= until:
                return
            else:
                self._expire()
                self.finish_ended()

    def _follow(self, call: Call, seconds: float) -> None:
        """Wait until the thread that receives has this call's reply, or makes this thread its successor."""
        event = call.event
        if event is None:
            event = call.event = AutoResetEvent()
        try:
            self.followers.append(event)
            if not call.done and self.leading.locked():  # else the thread that received may not have seen this one
                event.wait(seconds)
        finally:
            try:
                self.followers.remove(event)
            except ValueError:
                pass
            if call.done and not self.leading.locked():  # this thread may have been made the successor
                self.promote()

    def promote(self) -> None:
        """Let another thread receive, since this one has stopped. Without this call, one would begin within
        `LIVENESS_INTERVAL`."""
        if not self.promote_follower():
            self.driver.wake()

    def promote_follower(self) -> bool:
        """Let the thread that has waited longest receive; False if none waits."""
        with contextlib.suppress(IndexError):
            self.followers[0].set()
            return True
        return False

    @property
    def has_futures(self) -> bool:
        """Whether any of the calls is a future's."""
        return any(call.future is not None for call in list(self.calls.values()))

    def until_nearest(self) -> float:
        """Seconds to receive before the next call may expire, at most `LIVENESS_INTERVAL`."""
        nearest = self.nearest
        return min(LIVENESS_INTERVAL, max(0.0, (nearest - monotonic_ns()) * 1e-9)) if nearest else LIVENESS_INTERVAL

    # --- receiving: one thread at a time

    def receive(self, until: float) -> None:
        """Wait for a reply and dispatch it to its call; check the other calls when that is due.

        Returns at `until`, on the clock of `monotonic`, at the latest.
        """
        if self.received or self.ended:  # by a thread that was interrupted
            self.dispatch()
            return
        try:
            message = self.answers.recv(timeout=min(LIVENESS_INTERVAL, max(0.0, until - monotonic())))
            self.received[:] = (message,)  # no call since it was taken
        except TimedOut:
            self.check_calls()
            return
        except ClosedError:  # by another thread, or in a signal handler of this one
            self.end_all()
            return
        del message
        self.dispatch()
        if monotonic() >= self.check_due:
            self.check_calls()

    def dispatch(self) -> None:
        """Give the replies that were received to their calls."""
        received = self.received
        while received:
            message = received[0]
            seq = self.answers.request_of(message)
            failed = message.meta is not None
            value, error = (None, from_reply(message.value, message.meta)) if failed else (message.value, None)
            if not self.end(seq, value, error):
                self.duplicates += 1
            del received[0]
        self.finish_ended()

    def end(self, seq: int, value: Any, error: BaseException | None) -> bool:
        """Move a call from `calls` to `ended`, for `finish_ended`; False if it has ended before."""
        try:
            end = zip(map(self.calls.pop, (seq,)), (value,), (error,), strict=False)
            self.ended.extend(end)  # out of the dict and into the list in one C call
        except KeyError:
            return False
        return True

    def finish_ended(self) -> None:
        """Finish the calls that have ended. Several threads may do so at once, and each may be interrupted."""
        ended = self.ended
        while ended:
            try:
                end = ended[0]
            except IndexError:
                break
            call, value, error = end
            if not call.done:
                if error is None:
                    self.replied += 1
                elif isinstance(error, CancelledError):
                    self.cancelled += 1
                elif not isinstance(error, ClosedError):
                    self.failed += 1
                    self.late += isinstance(error, TimedOut)
                call.finish(value, error)
            try:
                ended.remove(end)
            except ValueError:  # by another thread
                pass
            del call, value, error, end
        if self.notifier.due:
            self.notifier.wake()

    def drain(self) -> None:
        """Dispatch every reply that is there. Of the thread that receives."""
        self.dispatch()
        try:
            while True:
                message = self.answers.recv(timeout=0)
                self.received[:] = (message,)
                del message
                self.dispatch()
        except (TimedOut, ClosedError):
            pass

    def check_calls(self) -> None:
        """End calls for which no reply will come: expired, refused by every server, or lost with their server."""
        self.check_due = monotonic() + LIVENESS_INTERVAL
        requests = self.requests
        self.cancel_given_up()
        self.drain()  # this process may have been stopped: replies that are there are in time
        self._expire()
        done = []
        for call in list(self.calls.values()):
            if requests.is_done(call):
                done.append((call, False))
            elif call.bits & ONCE and requests.was_taken(call) and requests.withdraw(call, taken=True):
                done.append((call, True))
        if done:
            self.drain()  # a reply comes before its `done`: those that are there now have none, or are among these
        for call, lost in done:
            if call.done:
                continue
            # since `_expire`: its server may have refused it as late
            if call.deadline and monotonic_ns() >= call.deadline:
                self.expire(call)
            else:
                self.end(call.seq, None, unanswered(requests, self.answers, call, lost))
        self.finish_ended()

    def expire(self, call: Call) -> None:
        """End a call whose time is up, without finishing it."""
        self.withdraw(call, late(self.requests, call))

    def _expire(self) -> None:
        """End the calls whose time is up, without finishing them."""
        for call in list(self.calls.values()):
            if call.deadline and monotonic_ns() >= call.deadline:
                self.expire(call)
        self.nearest = min((call.deadline for call in list(self.calls.values()) if call.deadline), default=0)

    # --- giving up

    def withdraw(self, call: Call, error: BaseException) -> None:
        """Withdraw a request, and end its call with `error`, without finishing it. Every step may be repeated."""
        call.withdrawn = error  # first: another thread may find the request done before the call has ended
        if not self.requests.closed:
            self.requests.cancel(call)
        self.end(call.seq, None, error)

    def give_up(self, call: Call) -> None:
        """Cancel a call for which no thread or task waits any more. Callers that raise append to `given_up`
        themselves."""
        self.given_up.append(call)
        self.cancel_given_up()

    def cancel_given_up(self) -> None:
        """Withdraw the requests of calls that were given up, and finish what interrupted calls have left."""
        given_up = self.given_up
        while given_up:
            try:
                call = given_up[0]
            except IndexError:
                break
            if call.seq and self.calls.get(call.seq) is call:
                self.withdraw(call, CancelledError())
            try:
                given_up.remove(call)
            except ValueError:
                pass
        self.finish_ended()

    def end_all(self) -> None:
        """Withdraw every request, and end and finish its call with `ClosedError`."""
        for call in list(self.calls.values()):
            self.withdraw(call, closed(self.requests))
        self.finish_ended()

    # --- closing

    def close(self) -> None:
        """Close both endpoints, end every call with `ClosedError`, and stop the threads. Every step may be repeated."""
        self.end_all()
        self.requests.close()
        self.answers.close()
        self.driver.stop()
        self.end_all()  # those that began meanwhile
        self.promote()
        self.notifier.stop()

    async def aclose(self) -> None:
        """`close` for asyncio: the loop does not wait for threads that are inside a call."""
        ends = self.requests, self.answers
        self.end_all()
        self.driver.stop(wait=False)
        for end in ends:
            end.refuse_calls()
        try:
            for end in ends:
                await end.until_idle()
            await self.driver.ended()
        finally:
            self.close()
