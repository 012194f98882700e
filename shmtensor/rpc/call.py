"""One request as its client sees it, until its reply is there."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client


class Call:
    """A request that is being posted, or was. Ends once: with a value, an error, or because nobody waits any more.

    deadline: on CLOCK_MONOTONIC, nanoseconds; 0: none
    bits:     of its note
    seq:      once it is posted, its place in the ring of requests: `words` and the index `at` of its slot's state
    """

    __slots__ = ("at", "bell", "bits", "deadline", "done", "error", "future", "seq", "value", "verdict", "words")

    words: memoryview
    at: int
    value: Any
    error: BaseException | None
    bell: threading.Event | None  # of the thread that waits for it while another one receives
    future: RequestFuture | None
    verdict: tuple[int, int] | None  # why it has no reply, once its slot may be another request's

    def __init__(self, deadline: int, bits: int) -> None:
        self.deadline, self.bits, self.seq, self.done = deadline, bits, 0, False
        self.value = self.error = self.bell = self.future = self.verdict = None

    def finish(self, value: Any, error: BaseException | None = None) -> None:
        """Its end. Called once, by whoever took it out of the client's table."""
        future = self.future
        if future is None:
            self.value, self.error = value, error
        else:
            self.future = None  # the future owns it
            future._end(value, error)
        self.done = True
        if self.bell is not None:  # looked at only now: who sets it looks at `done` afterwards
            self.bell.set()

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


class RequestFuture(Future[Any]):
    """What `submit` returns: a `concurrent.futures.Future` whose waiting thread receives replies itself if it can.

    `cancel()` works until the reply is there: a request that no server has started is never started; of one that a
    server has started, the handler may ask (`req.cancelled`), and its reply is dropped. `running()` is never true.
    """

    def __init__(self, client: Client, call: Call) -> None:
        super().__init__()
        self._way: tuple[Client, Call] | None = client, call  # until it is done
        self._outcome: list[tuple[Any, BaseException | None]] = []  # from its end until it is told

    def result(self, timeout: float | None = None) -> Any:
        """The reply's value; raises what the request ended with, `TimeoutError` after `timeout` seconds."""
        try:
            return super().result(self._help(timeout))
        finally:
            self = None  # type: ignore[assignment]  # an error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the request ended with, or None; `TimeoutError` after `timeout` seconds."""
        return super().exception(self._help(timeout))

    def _help(self, timeout: float | None) -> float | None:
        """Wait, receiving if no other thread does; returns how long to wait then."""
        way = self._way
        if way is None:  # it is done, or is being settled at this moment
            return timeout
        way[0]._help(way[1], timeout)
        if not way[1].done:
            return 0
        self._settle()  # who received it may be inside the callback of another one
        return timeout

    def cancel(self) -> bool:
        """Give the request up. False if its reply is there already."""
        way = self._way
        if way is not None:
            way[0]._drop(way[1])
            self._settle()
        return self.cancelled()

    def _end(self, value: Any, error: BaseException | None) -> None:
        """How it ends. Whoever ended it tells so once it does not receive any more: callbacks may do anything."""
        self._outcome.append((value, error))
        if self._way is not None:
            self._way[0]._ended.futures.append(self)

    def _settle(self) -> None:
        """Tell whoever waits, if it has ended and nobody else has told; callbacks run here."""
        try:
            value, error = self._outcome.pop()
        except IndexError:
            return
        self._way = None
        try:
            if isinstance(error, CancelledError):
                super().cancel()
                self.set_running_or_notify_cancel()
            elif error is not None:
                self.set_exception(error)
            else:
                self.set_result(value)
        except InvalidStateError:  # somebody else set it, against the rules: theirs stays
            pass


class Ended:
    """The futures of a client that have ended and do not know it yet.

    Their callbacks may ask this client again, so that nobody tells them while it receives (`leading`); and as each of
    those may receive the end of others, a thread that is inside a callback tells no more: the loop around it does.
    """

    def __init__(self) -> None:
        self.futures: deque[RequestFuture] = deque()
        self._telling: set[int] = set()

    def is_telling(self) -> bool:
        """Whether this thread is inside a callback."""
        return threading.get_ident() in self._telling

    def tell(self) -> None:
        """Tell those that are there, and those that end meanwhile."""
        here = threading.get_ident()
        if here in self._telling:
            return
        self._telling.add(here)
        try:
            while True:
                try:
                    future = self.futures.popleft()
                except IndexError:
                    return
                future._settle()
                del future
        finally:
            self._telling.discard(here)
