"""The thread that receives a client's replies while there are futures and no thread that waits for one."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from ..endpoints.base import TICK

if TYPE_CHECKING:
    from .client import Client


_LOOK_S: Final = 0.005


class Driver:
    """Started by the first future; asleep while there is nothing to receive, or somebody else receives."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """There may be something to do: there is a future, or the thread that received has stopped."""
        client = self._client()
        if client is None or self._stopped:
            return
        if self._thread is None:
            if not _has_futures(client):
                return
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=_drive, args=(self,), name="shmtensor replies", daemon=True)
                    thread.start()
                    self._thread = thread
        self._wanted.set()

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


def _drive(driver: Driver) -> None:
    while not driver._stopped:
        driver._wanted.wait()
        driver._wanted.clear()
        while not driver._stopped and _receive_once(driver):
            pass


def _receive_once(driver: Driver) -> bool:
    """Receive a little, if there are futures and nobody else receives; False: wait until there is something to do."""
    client = driver._client()
    if client is None:
        driver._stopped = True
        return False
    client._ended.tell()
    if not _has_futures(client):
        client._promote_follower()
        return False
    if not client._leading.acquire(blocking=False):
        return False  # who releases it wakes us
    try:
        client._receive(time.monotonic() + client._until_nearest())
    finally:
        client._leading.release()
    client._ended.tell()
    return True


def _has_futures(client: Client) -> bool:
    return bool(client._ended.futures) or any(call.future is not None for call in list(client._calls.values()))
