"""The tasks of one event loop that wait at one endpoint: in line, without threads, woken by a descriptor.

They stand in the order in which they came, and only the first one has a say:

    busy    the first in line has been called, or is looking: `asleep` is even
    asleep  `asleep` is odd, the loop watches the descriptor, a tick is due: docs/internals/protocols.md, section 8

What a task waits for is taken by that task itself, in the same step in which it leaves the line and returns; nothing is
ever handed to it through a future. So a cancelled task has taken nothing. Whoever leaves the line, however it leaves,
sees to the next: calls it, or puts the crowd to sleep on its behalf.

The endpoint's mutex is never waited for. A thread that is inside a call keeps it for as long as that lasts; the crowd
tries again after 1 ms, rising to a tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from ..memory.descriptors import OpenFile
from .base import BUSY, NOTHING, TICK, Endpoint

_RETRY_S: Final = 0.001


class Place:
    """A task's place in the line."""

    __slots__ = ("_called", "expired", "look", "summoned")

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], Any]) -> None:
        self.look = look
        self.expired = self.summoned = False
        self._called: asyncio.Future[None] = loop.create_future()

    def call(self) -> None:
        """Let the task look."""
        if not self._called.done():
            self._called.set_result(None)

    def summon(self) -> None:
        """Let the task look, wherever it stands."""
        self.summoned = True
        self.call()

    def expire(self) -> None:
        """Its time is up: let the task look a last time."""
        self.expired = True
        self.summon()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until called."""
        await self._called
        self._called = loop.create_future()


class Crowd(ABC):
    """Base of `Listeners` and `Customers`: the line, the watched descriptor, the tick."""

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._endpoint = weakref.ref(endpoint)
        self._descriptor = OpenFile()  # its own: closing the endpoint in another thread takes nothing from the loop
        self._line: OrderedDict[Place, None] = OrderedDict()
        self._asleep = self._watched = self._ended = False
        self.ticked = False  # nobody has called for a while: whoever looks next looks around as well
        self._asleep_since = 0.0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._patience = _RETRY_S

    # --- what the kinds of endpoints do differently; all of it under the mutex

    @abstractmethod
    def _open(self) -> None:
        """Let the descriptor be one that is readable when somebody has rung."""

    @abstractmethod
    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        """Forget late wake-ups, `asleep` := odd, barrier, look once more; False, and awake, if something is there."""

    @abstractmethod
    def _wake_up(self) -> None:
        """`asleep` := even."""

    @abstractmethod
    def _pass_on(self) -> None:
        """Nobody is left in line, and what the endpoint may have been woken for is not taken."""

    @abstractmethod
    def _was_rung(self) -> bool:
        """The descriptor is readable: whether somebody rang."""

    # --- the line

    @property
    def is_empty(self) -> bool:
        return not self._line

    async def attend(
        self,
        endpoint: Endpoint,
        attempt: Callable[[], Any],
        look: Callable[[], Any],
        timeout: float | None,
        place: Place | None = None,
    ) -> Any:
        """Stand in line until `attempt()` returns something, and return that; `NOTHING` if the time is up.

        `attempt` is called without anything awaited between it and the return, whenever this task is the first in line
        and there may be something for it, or is summoned to its `place`. `look`, under the mutex, says whether there is
        something for the first.
        """
        loop, served = self.loop, False
        place = place or Place(loop, look)
        timer = None if timeout is None else loop.call_later(timeout, place.expire)
        self._line[place] = None
        try:
            while True:
                if self._first() is place or place.summoned:
                    place.summoned = False
                    found = attempt()
                    if found is not NOTHING and found is not BUSY:
                        served = True
                        return found
                    if place.expired:
                        return NOTHING
                    if found is BUSY:
                        self._retry_later()
                    elif self._first() is place and not self._sleep(endpoint, place):
                        await asyncio.sleep(0)
                        continue
                await place.wait(loop)
        finally:
            if timer is not None:
                timer.cancel()
            first = self._first() is place
            del self._line[place]
            if first:
                self._after(endpoint, served)

    def _first(self) -> Place | None:
        return next(iter(self._line), None)

    def call_all(self) -> None:
        """Something has changed for everybody in line: each sees to the next."""
        self._call_first()

    def _call_first(self) -> None:
        first = self._first()
        if first is not None:
            first.call()

    def _after(self, endpoint: Endpoint, served: bool) -> None:
        """The first has left the line."""
        following = self._first()
        if following is None or self.loop.is_closed():  # those in line end with their loop: they are garbage, as it is
            self._rest(endpoint, served)
        elif not served or not self._sleep(endpoint, following):
            following.call()

    def _sleep(self, endpoint: Endpoint, first: Place) -> bool:
        """Fall asleep for the first in line; False if there is something for it."""

        def fall_asleep() -> bool:
            self._asleep = False
            if self._ended:
                return False
            if self._descriptor.fd < 0:
                self._open()
            return self._fall_asleep(first.look)

        fell_asleep = endpoint._try_run(fall_asleep)
        if fell_asleep is BUSY:
            self._retry_later()
            return True
        if not fell_asleep or self._descriptor.fd < 0:
            return False
        self._asleep, self._asleep_since, self._patience = True, self.loop.time(), _RETRY_S
        if not self._watched:
            self.loop.add_reader(self._descriptor.fd, _readable, weakref.ref(self))
            self._watched = True
        if self._tick_timer is None:
            self._tick_timer = self.loop.call_later(TICK, self._tick)
        return True

    def _rest(self, endpoint: Endpoint, served: bool) -> None:
        """Nobody is in line: be awake, and let others have what nobody here will take."""
        if served and not self._asleep:
            return

        def wake_up() -> None:
            if self._asleep and not self._ended:
                self._wake_up()
            self._asleep = False
            if not served and not self._ended:
                self._pass_on()

        if endpoint._try_run(wake_up) is BUSY:
            self._retry_later()

    # --- events of the loop

    def _rung(self) -> None:
        endpoint = self._endpoint()
        if endpoint is None or not self._line:
            self._unwatch()  # a late wake-up; the next sleep forgets it and watches again
            return

        def wake_up() -> bool:
            if self._ended or not self._was_rung():
                return False
            self._asleep = False
            self._wake_up()
            return True

        woken = endpoint._try_run(wake_up)
        if woken is BUSY:
            self._unwatch()
            self._retry_later()
        elif woken:
            self._call_first()

    def _tick(self) -> None:
        self._tick_timer = None
        endpoint = self._endpoint()
        if endpoint is None or not self._line:
            return
        wait = self._asleep_since + TICK - self.loop.time() if self._asleep else TICK
        if wait > 0:
            self._tick_timer = self.loop.call_later(wait, self._tick)
            return

        def wake_up() -> None:
            if self._asleep and not self._ended:
                self._wake_up()
            self._asleep, self.ticked = False, True

        if endpoint._try_run(wake_up) is BUSY:
            self._retry_later()
        else:
            self._call_first()

    def _retry_later(self) -> None:
        if self._retry_timer is None and not self.loop.is_closed():
            self._retry_timer = self.loop.call_later(self._patience, self._retry)
            self._patience = min(2 * self._patience, TICK)

    def _retry(self) -> None:
        self._retry_timer = None
        endpoint = self._endpoint()
        if self._line:
            self._call_first()
        elif endpoint is not None:
            self._rest(endpoint, True)

    def disturb(self) -> None:
        """From any thread, under the mutex: it has slept at the same endpoint, so that the crowd is awake now."""
        if self._line:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                self.loop.call_soon_threadsafe(self._call_first)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            if self._descriptor.fd >= 0 and not self.loop.is_closed():
                self.loop.remove_reader(self._descriptor.fd)

    # --- the end

    def end(self) -> None:
        """From any thread, under the mutex: the endpoint is closed. Whoever is in line finds that out."""
        self._ended = True
        if self.loop.is_closed():
            self._descriptor.close()
        elif asyncio._get_running_loop() is self.loop or not self.loop.is_running():
            self._end()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._unwatch()
        for timer in (self._tick_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._tick_timer = self._retry_timer = None
        self._descriptor.close()
        self._asleep = False
        self._call_first()

    def drop_in_child(self) -> None:
        """A forked child: the loop is the parent's, and so is what its selector watches."""
        self._ended = True
        self._descriptor.close()


def _readable(crowd: weakref.ref[Crowd]) -> None:
    found = crowd()
    if found is not None:
        found._rung()
