"""The threads of a client that has futures: one receives where no other thread does, one notifies those that wait.

Signal handlers run in the main thread, and nobody sets exceptions in these two: what must not be interrupted halfway
is done here.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

from ..endpoints.base import TICK
from .call import AutoResetEvent, RequestFuture

if TYPE_CHECKING:
    from .client import Client


_LOOK_S: Final = 0.005


class _ClientThread(ABC):
    """A thread that is started when it is first needed, and ends with its client."""

    _name: str

    def __init__(self, client: Client) -> None:
        wanted = self._wanted = AutoResetEvent()
        self._client = weakref.ref(client, lambda _: wanted.set())
        self._stopped = False
        self._thread: threading.Thread | None = None  # set by the thread itself: who starts it may be interrupted
        self._starting, self._beginning = threading.Lock(), threading.Lock()

    def _wake(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._wanted.set()

    def _run(self) -> None:
        with self._beginning:
            if self._thread is not None:  # who started it did not know yet, and started it once more
                return
            self._thread = threading.current_thread()
        while not self._stopped and self._client() is not None:
            self._wanted.wait(self._patience())
            self._work()

    @abstractmethod
    def _patience(self) -> float:
        """Seconds to wait before looking without having been woken; below 0: for ever."""

    @abstractmethod
    def _work(self) -> None:
        """Do what there is to do."""

    def stop(self, *, wait: bool = True) -> None:
        """The client is closed."""
        self._stopped = True
        self._wanted.set()
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(2 * TICK)

    async def ended(self) -> None:
        """Until the thread that was told to stop has ended, two ticks at most."""
        import asyncio

        until = time.monotonic() + 2 * TICK
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)


class Driver(_ClientThread):
    """Receives a client's replies while there are futures, and no thread that waits for one."""

    _name = "shmtensor replies"

    def wake(self) -> None:
        """There may be something to do: there is a future, or the thread that received has stopped."""
        client = self._client()
        if client is not None and not self._stopped and (self._thread is not None or _has_futures(client)):
            self._wake()

    def _patience(self) -> float:
        client = self._client()  # with futures it looks by itself: who was to wake it may have been interrupted
        return TICK if client is not None and (client._notifier.futures or _has_futures(client)) else -1.0

    def _work(self) -> None:
        while not self._stopped and self._receive_once():
            pass

    def _receive_once(self) -> bool:
        """Receive a little, if there are futures and no other thread receives; False: wait until there is more."""
        client = self._client()
        if client is None:
            return False
        client._finish_ended()
        if not _has_futures(client):
            client._promote_follower()
            return False
        if not client._leading.acquire(blocking=False):
            return False  # who releases it wakes us
        try:
            client._receive(time.monotonic() + client._until_nearest())
        finally:
            client._leading.release()
        return True


class Notifier(_ClientThread):
    """Notifies those that wait for a future by `concurrent.futures.wait`, and runs callbacks."""

    _name = "shmtensor callbacks"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.futures: deque[RequestFuture] = deque()
        """Those that have ended and that somebody is to be told of."""

    def wake(self) -> None:
        """There are futures that have ended."""
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
                future = self.futures.popleft()
            except IndexError:
                return
            future._notify()
            del future


def _has_futures(client: Client) -> bool:
    return any(call.future is not None for call in list(client._calls.values()))
