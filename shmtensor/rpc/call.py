"""One request as its client sees it, until its reply is there."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from ..calls import Condition

if TYPE_CHECKING:
    from .client import Client


class AutoResetEvent:
    """An event that the thread that waited for it has reset.

    A raw lock: each of its calls is one C call, so that an asynchronous exception leaves it set or not set. It leaves
    a `threading.Event` set with nobody woken, or its lock locked.
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
        """Until it is set (True), or for so long; below 0: for ever."""
        return self._lock.acquire(timeout=seconds if seconds >= 0 else -1)


class Call:
    """A request that is being posted, or was. Ends once: with a value, an error, or because nobody waits any more.

    deadline: on CLOCK_MONOTONIC, nanoseconds; 0: none
    bits:     of its note
    seq:      once it is posted, its place in the ring of requests: `words` and the index `at` of its slot's state
    """

    __slots__ = ("at", "bits", "deadline", "done", "error", "event", "future", "seq", "value", "verdict", "words")

    words: memoryview
    at: int
    value: Any
    error: BaseException | None
    event: AutoResetEvent | None  # of the thread that waits for it while another one receives
    future: RequestFuture | None
    verdict: tuple[int, int] | None  # why it has no reply, once its slot may be another request's

    def __init__(self, deadline: int, bits: int) -> None:
        self.deadline, self.bits, self.seq, self.done = deadline, bits, 0, False
        self.value = self.error = self.event = self.future = self.verdict = None

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Its end. May be called again, also by several threads, until it has returned once: it does the rest."""
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
        if event is not None:  # looked at only now: who makes one looks at `done` afterwards
            event.set()

    def result(self) -> Any:
        """The value, which is the caller's from now on, or the error."""
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

    def __init__(self, client: Client, call: Call) -> None:
        super().__init__()
        self._condition = Condition()
        self._way: tuple[Client, Call] | None = client, call  # until it is done
        self._notified = False  # whoever waits by `concurrent.futures.wait`, and the callbacks

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
        way = self._way
        if way is not None:
            client, call = way
            client._help(call, timeout)
            if not call.done:
                raise FutureTimeout

    def cancel(self) -> bool:
        """Give the request up. False if its reply is there already."""
        way = self._way
        if way is not None:
            client, call = way
            client._given_up.append(call)
            client._cancel_given_up()
        return self.cancelled()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        """How it ends. May be called again, as `Call.finish`: what is set is left as it is.

        Others that wait, and callbacks, are notified by a thread of the library's own: in this one an asynchronous
        exception could come between one and the next.
        """
        way = self._way
        with self._condition:
            if self._state in _PENDING:  # else it is done, or somebody else set it, against the rules: theirs stays
                if way is not None and (self._waiters or self._done_callbacks):  # type: ignore[attr-defined]
                    way[0]._notifier.futures.append(self)
                if error is None:
                    self._result = value
                    self._state = "FINISHED"
                elif isinstance(error, CancelledError):
                    self._state = "CANCELLED_AND_NOTIFIED"
                else:
                    self._exception = error
                    self._state = "FINISHED"
        self._way = None

    def _notify(self) -> None:
        """Tell others that it has ended, once; callbacks run here."""
        with self._condition:
            if self._notified or self._state in _PENDING:  # `_finish` was interrupted, and does it once more
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
