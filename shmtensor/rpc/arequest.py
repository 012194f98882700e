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

from ..endpoints.base import BUSY, NOTHING
from ..endpoints.crowd import Place
from ..endpoints.crowds import Listeners, crowd_of
from . import failures

if TYPE_CHECKING:
    from .call import Call
    from .client import Client


class LoopEvent:
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
            client._given_up.append(call)
            client._cancel_given_up()


async def _reply(client: Client, call: Call) -> None:
    """Wait until the call has ended."""
    answers = client._answers
    crowd = crowd_of(answers, Listeners)
    place = Place(crowd.loop, answers._has_news)
    call.event = LoopEvent(crowd.loop, place)  # type: ignore[assignment]
    timeout = None if not call.deadline else max(0.0, (call.deadline - time.monotonic_ns()) * 1e-9)
    ended = await crowd.attend(answers, _attempt(client, call), answers._has_news, timeout, place)
    if ended is NOTHING:
        error = failures.late(client._requests, call)
        client._requests.cancel(call)
        client._end(call.seq, None, error)
        client._finish_ended()


def _attempt(client: Client, call: Call) -> Callable[[], Any]:
    def attempt() -> Any:
        if call.done:
            return call
        leads: list[bool] = []
        try:
            leads.extend(map(client._leading.acquire, (False,)))
            if not leads[0]:
                return BUSY  # a thread receives, and sets this call's event
            client._hand_out()  # what an interrupted thread has left
            take, undelivered = client._answers._attempt(), client._answers._undelivered
            while (message := take()) is not NOTHING and message is not BUSY:
                client._received[:] = (message,)
                if message in undelivered:  # no call since it was noted: it has changed hands
                    del undelivered[message]
                client._hand_out()
            if not call.done and time.monotonic() >= client._look_due:
                client._look_around()
        finally:
            if leads and leads[0]:
                client._leading.release()
                if client._followers or client._driver._thread is not None:
                    client._promote()
        return call if call.done else message

    return attempt
