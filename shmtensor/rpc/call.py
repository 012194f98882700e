"""A call as its client sees it, the future of one, and the errors that it can end with."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from ..errors import DependencyError, PeerDied, RemoteError, TimedOut, WireError
from ..shielded import Condition
from .sidecar import DIED, DROPPED, NO_ROOM, ONCE

if TYPE_CHECKING:
    from .client_endpoints import Requests
    from .in_flight import CallsInFlight


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

    __slots__ = ("at", "bits", "deadline", "done", "error", "event", "future", "seq", "value", "verdict", "words")

    words: memoryview
    at: int
    value: Any
    error: BaseException | None
    event: AutoResetEvent | None  # of the thread that waits for this call while another one receives
    future: RequestFuture | None
    verdict: tuple[int, int] | None  # why it has no reply: read before another request may take its slot

    def __init__(self, deadline: int, bits: int) -> None:
        self.deadline, self.bits, self.seq, self.done = deadline, bits, 0, False
        self.value = self.error = self.event = self.future = self.verdict = None

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
        """Give the request up. False if its reply is there already."""
        source = self._source
        if source is not None:
            in_flight, call = source
            in_flight.give_up(call)
        return self.cancelled()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        """Set the result. May be called again, as `Call.finish`: a result that is set stays.

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
    """The error that an error reply carries, or why the reply cannot be read."""
    if isinstance(meta, DependencyError):
        return DependencyError(f"the reply cannot be read: {meta}", name="torch")
    try:
        return RemoteError(str(value["type"]), str(value["text"]), str(value["traceback"]))
    except (KeyError, TypeError, IndexError):
        return WireError("a reply says that it is an error, and is none")


def unanswered(requests: Requests, call: Call, unread: WireError | None = None) -> Exception:
    """The error of a request that is done and has no reply.

    `unread` is the error of a living server whose replies cannot be read, if there is one.
    """
    code, attempt = requests.verdict(call)
    what = f'service "{requests.name}": '
    if code == DROPPED:
        return RemoteError("Unanswered", what + "the server let go of this request without an answer")
    if code == NO_ROOM:
        return RemoteError(
            "NoRoom", what + "the server found no room for the reply: let go of earlier replies, or give it more"
        )
    if not code and unread is not None:
        return unread
    if code == DIED or call.bits & ONCE or not attempt:
        return PeerDied(what + "the server that had this request died")
    deaths = attempt - 1  # a server that takes it after the last allowed death does not start it
    each = f"each of the {deaths} servers that had this request" if deaths > 1 else "the server that had this request"
    return PeerDied(what + f"{each} died (max_attempts={deaths})")


def late(requests: Requests, call: Call) -> TimedOut:
    """The error of a request that has expired."""
    if not requests.was_taken(call):
        state = "no server took it"
    elif requests.is_done(call):  # its lock may still be held
        state = "its server has just finished with it"
    elif requests.is_held(call):
        state = "a server has it"
    else:
        state = "the server that had it died or closed, and no other has taken it since"
    return TimedOut(f'service "{requests.name}": no reply in time ({state})')
