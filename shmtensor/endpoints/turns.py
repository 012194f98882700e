"""What the calls for event loops share: how an attempt ends, whose turn it is, `async with`. Imports no asyncio."""

from __future__ import annotations

import time
import types
from abc import abstractmethod
from collections.abc import Generator
from typing import Final, TypeVar

from .base import Endpoint

TURN_S: Final = 0.005
"""Seconds after which a task that always finds what it asks for lets the loop's other tasks run."""
_RETRY_S: Final = 0.001

_A = TypeVar("_A", bound="AsyncEndpoint")
clock = time.monotonic


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Let the loop's other tasks run, once."""
    yield


class AsyncEndpoint(Endpoint):
    """An endpoint with calls that an event loop can wait for."""

    _turn_due = 0.0

    async def _take_turns(self) -> None:
        """A task that always finds what it asks for must not starve the others."""
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
