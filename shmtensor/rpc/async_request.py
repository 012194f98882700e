"""`Client.arequest`: a request that an event loop can wait for.

The tasks that wait for replies stand in a queue. The first of them receives, and dispatches the replies of other calls
to them, as a thread that waits in `request` does. No reply is handed to a task that could lose it by being cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..endpoints.async_endpoint import wait_queue_of
from ..endpoints.base import BUSY, NOTHING
from ..endpoints.wait_queue import Waiter

if TYPE_CHECKING:
    from .call import Call
    from .in_flight import CallsInFlight


class LoopEvent:
    """Stands in for a call's `AutoResetEvent` where a task waits: any thread may set it."""

    __slots__ = ("_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, waiter: Waiter) -> None:
        self._loop, self._waiter = loop, waiter

    def set(self) -> None:
        """Wake the task."""
        if asyncio._get_running_loop() is self._loop:
            self._waiter.wake()
        else:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                self._loop.call_soon_threadsafe(self._waiter.wake)


async def arequest(in_flight: CallsInFlight, value: Any, meta: Any, timeout: float | None, retry: bool) -> Any:
    """See `Client.arequest`."""
    call = in_flight.begin(timeout, retry)
    try:
        await in_flight.requests.apost(call, value, meta, timeout)
        if not call.done:
            await _wait(in_flight, call)
        return call.result()
    finally:
        if not call.done:
            in_flight.given_up.append(call)
            in_flight.cancel_given_up()


async def _wait(in_flight: CallsInFlight, call: Call) -> None:
    """Wait until the call has ended."""
    answers = in_flight.answers
    wait_queue = wait_queue_of(answers)
    waiter = Waiter(wait_queue.loop, answers.has_news)
    call.event = LoopEvent(wait_queue.loop, waiter)  # type: ignore[assignment]
    timeout = None if not call.deadline else max(0.0, (call.deadline - time.monotonic_ns()) * 1e-9)
    ended = await wait_queue.attend(_attempt(in_flight, call), answers.has_news, timeout, waiter)
    if ended is NOTHING:
        in_flight.expire(call)
        in_flight.finish_ended()


def _attempt(in_flight: CallsInFlight, call: Call) -> Callable[[], Any]:
    """What the task does at its turn. It returns the call if that has ended; else `NOTHING`, or `BUSY` to retry."""

    def attempt() -> Any:
        if call.done:
            return call
        leads: list[bool] = []
        try:
            leads.extend(map(in_flight.leading.acquire, (False,)))
            if not leads[0]:
                return BUSY  # a thread receives, and sets this call's event
            in_flight.dispatch()  # what an interrupted thread has left
            found = in_flight.answers.take_all(in_flight.received, in_flight.dispatch)
            if not call.done and time.monotonic() >= in_flight.check_due:
                in_flight.check_calls()
        finally:
            if leads and leads[0]:
                in_flight.leading.release()
                if in_flight.followers or in_flight.driver.is_started:
                    in_flight.promote()
        return call if call.done else found

    return attempt
