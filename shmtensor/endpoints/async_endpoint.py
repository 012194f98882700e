"""What the calls for event loops share: wait queue, turns, `async with`. Imports asyncio at the first wait only."""

from __future__ import annotations

import threading
import time
import types
from abc import abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..errors import LoopError
from .base import Endpoint

if TYPE_CHECKING:
    import asyncio

    from .wait_queue import WaitQueue

TURN_S: Final = 0.005
"""Seconds after which a task that always finds what it asks for lets the loop's other tasks run."""
_RETRY_S: Final = 0.001

_A = TypeVar("_A", bound="AsyncEndpoint")
_making = threading.Lock()
clock = time.monotonic


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Let the loop's other tasks run, once."""
    yield


class AsyncEndpoint(Endpoint):
    """An endpoint with calls that an event loop can wait for."""

    _turn_due = 0.0
    _wait_queue: Any
    """The `WaitQueue` of the event loop whose tasks wait here, once one has; see `wait_queue_of`."""

    @abstractmethod
    def _make_wait_queue(self, loop: asyncio.AbstractEventLoop) -> WaitQueue:
        """A new wait queue for tasks of `loop`."""

    async def _take_turns(self) -> None:
        """Let the loop's other tasks run: a task that always finds what it asks for must not starve them."""
        await pause()
        self._turn_due = clock() + TURN_S

    @abstractmethod
    async def aclose(self) -> None:
        """`close` for asyncio."""

    async def __aenter__(self: _A) -> _A:
        if self._state:
            self._refuse()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            self._at_exit()

    async def _until_idle(self) -> None:
        """Wait until no thread is inside a call, so that the loop does not wait for it when it closes the endpoint."""
        import asyncio

        seconds = _RETRY_S
        while self._mutex.locked() and not self._state:
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, 0.05)


def wait_queue_of(endpoint: AsyncEndpoint) -> WaitQueue:
    """The wait queue of an endpoint in the running loop. Raises `LoopError` if tasks of another loop wait there."""
    import asyncio

    loop = asyncio.get_running_loop()
    with _making:
        wait_queue: WaitQueue | None = endpoint._wait_queue
        if wait_queue is not None and wait_queue.loop is loop:
            return wait_queue
        if wait_queue is not None:
            if not wait_queue.is_empty and not wait_queue.loop.is_closed():
                raise LoopError(
                    f"tasks of another event loop wait at {endpoint!r}: use an endpoint from one loop at a time, or "
                    "make one for each"
                )
            wait_queue.end()
        made = endpoint._wait_queue = endpoint._make_wait_queue(loop)
        return made
