"""The threads of a client that has futures: one receives where no other thread does, one notifies waiting threads.

No asynchronous exception arrives in these two: signal handlers run in the main thread. What must not be interrupted
halfway is done here.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..endpoints.base import LIVENESS_INTERVAL
from .call import AutoResetEvent

if TYPE_CHECKING:
    from .in_flight import CallsInFlight

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
        while not self._stopped and self._in_flight() is not None:
            self._wanted.wait(self._patience())
            self._work()

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
        """There may be something to do: there is a future, or the thread that received has stopped."""
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
        if not in_flight.leading.acquire(blocking=False):
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
        """What notifies the waiting threads and runs the callbacks of each future that has ended."""

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
