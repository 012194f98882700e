"""`Client.arequest`: a request that an event loop can wait for.

The tasks that wait for replies stand in line at the client's inbox. The first of them receives, and hands replies for
others to them, as a thread that waits in `request` does; none is handed anything that it could lose by being cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..endpoints.crowd import Place
from ..endpoints.crowds import Listeners, crowd_of
from ..endpoints.turns import BUSY, NOTHING
from . import failures

if TYPE_CHECKING:
    from .call import Call
    from .client import Client


class LoopBell:
    """In place of a waiting thread's event: a reply came, by whoever received it."""

    __slots__ = ("_loop", "_place")

    def __init__(self, loop: asyncio.AbstractEventLoop, place: Place) -> None:
        self._loop, self._place = loop, place

    def set(self) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._place.summon()
        else:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                self._loop.call_soon_threadsafe(self._place.summon)


async def arequest(client: Client, value: Any, meta: Any, timeout: float | None, retry: bool) -> Any:
    """See `Client.arequest`."""
    call = client._call(timeout, retry)
    try:
        await client._requests.apost(call, value, meta, timeout)
        if not call.done:
            await _reply(client, call)
        return call.result()
    finally:
        if not call.done:
            client._drop(call)


async def _reply(client: Client, call: Call) -> None:
    """Wait until the call has ended."""
    answers = client._answers
    crowd = crowd_of(answers, Listeners)
    place = Place(crowd.loop, answers._has_news)
    call.bell = LoopBell(crowd.loop, place)  # type: ignore[assignment]
    timeout = None if not call.deadline else max(0.0, (call.deadline - time.monotonic_ns()) * 1e-9)
    ended = await crowd.attend(answers, _attempt(client, call), answers._has_news, timeout, place)
    if ended is NOTHING:
        client._requests.cancel(call)
        client._late += 1
        client._end(call, failures.late(client._requests, call))


def _attempt(client: Client, call: Call) -> Callable[[], Any]:
    def attempt() -> Any:
        if call.done:
            return call
        if not client._leading.acquire(False):
            return BUSY  # a thread receives, and rings this call's bell
        try:
            take = client._answers._attempt()
            while (message := take()) is not NOTHING and message is not BUSY:
                client._hand_out(message)
            if not call.done and time.monotonic() >= client._look_due:
                client._look_around()
        finally:
            client._leading.release()
            if client._followers or client._driver._thread is not None:
                client._promote()
        if client._ended.futures:
            client._ended.tell()
        if call.done:
            return call
        return message

    return attempt
