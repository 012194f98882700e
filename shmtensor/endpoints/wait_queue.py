"""The tasks of one event loop that wait at one endpoint: first come, first served, woken by a descriptor, no threads.

The tasks form a queue, and only the state of the first one matters:

    busy    the first waiter has been notified, or is looking: `asleep` is even
    asleep  `asleep` is odd, the loop watches the descriptor, a liveness check is due: docs/internals/protocols.md,
            section 8

What a task waits for is taken by that task itself, in the same step in which it leaves the queue and returns; nothing
is ever handed to it through a future. So a cancelled task has taken nothing. A waiter that leaves the queue, for
whatever reason, notifies the next one or puts the queue to sleep on its behalf.

The endpoint's mutex is never waited for. A thread that is inside a call keeps it for as long as that lasts; the queue
tries again after 1 ms, rising to `LIVENESS_INTERVAL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from ..channel.control import C_SLEEPS
from ..channel.membership import Member
from ..channel.names import socket_path
from ..channel.wakeup import PAUSE_S, Inbox
from ..memory import shortage
from ..memory.descriptors import OpenFile
from ..memory.semaphores import BY_FIFO, COUNT, Fifo
from ..memory.words import barrier, store
from .base import BUSY, LIVENESS_INTERVAL, NOTHING, AsleepWord

RETRY_S: Final = 0.001
"""Seconds until the first new attempt, while a thread is inside a call of the endpoint."""


class Waiter:
    """A task that waits in the queue."""

    __slots__ = ("_notified", "expired", "look", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], Any]) -> None:
        self.look = look
        self.expired = self.woken = False
        self._notified: asyncio.Future[None] = loop.create_future()

    def notify(self) -> None:
        """Let the task make an attempt, if it is the first in the queue."""
        if not self._notified.done():
            self._notified.set_result(None)

    def wake(self) -> None:
        """Let the task make an attempt, even if it is not the first."""
        self.woken = True
        self.notify()

    def expire(self) -> None:
        """Let the task make a last attempt: its time is up."""
        self.expired = True
        self.wake()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until notified."""
        await self._notified
        self._notified = loop.create_future()


class LoopEvent:
    """Stands in for an event of threads where a task waits: any thread may set it."""

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


class WaitQueue(ABC):
    """Base of `MessageWaiters` and `SlotWaiters`: the queue, the watched descriptor, the liveness checks.

    Args:
        word: the endpoint's `asleep` word.
        try_run: the endpoint's `_try_run`. The queue does not keep the endpoint alive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, word: AsleepWord, try_run: Callable[..., Any]) -> None:
        self.loop = loop
        self._word = word
        self._try_run = weakref.WeakMethod(try_run)
        self._descriptor = OpenFile()  # its own: closing the endpoint in another thread takes nothing from the loop
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._asleep = self._watched = self._ended = False
        self.liveness_check_due = False  # no wake-up has come for a while: the next attempt checks for the dead
        self._asleep_since = 0.0
        self._liveness_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_S

    # --- what differs between receivers and senders; all of it is called under the mutex

    @abstractmethod
    def _open(self) -> None:
        """Open the descriptor: one that is readable after a wake-up."""

    @abstractmethod
    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        """Forget late wake-ups, `asleep` := odd, barrier, look once more; False, and awake, if something is there."""

    @abstractmethod
    def _wake_up(self) -> None:
        """`asleep` := even."""

    @abstractmethod
    def _pass_on(self) -> None:
        """Wake another process: the last task has left without taking what the endpoint may have been woken for."""

    @abstractmethod
    def _take_wakeups(self) -> bool:
        """Read the wake-ups that have arrived; called when the descriptor is readable. Returns whether there were
        any."""

    # --- the queue

    @property
    def is_empty(self) -> bool:
        """Whether no task waits."""
        return not self._waiters

    async def attend(
        self,
        attempt: Callable[[], Any],
        look: Callable[[], Any],
        timeout: float | None,
        waiter: Waiter | None = None,
    ) -> Any:
        """Wait in the queue until `attempt()` returns something, and return that; `NOTHING` if the time is up.

        `attempt` is called with nothing awaited between it and the return, whenever this task is the first one and
        there may be something for it, or its `waiter` was woken. `look`, under the mutex, says whether there is
        something for the first one. The caller keeps the endpoint alive.
        """
        loop, served = self.loop, False
        waiter = waiter or Waiter(loop, look)
        timer = None if timeout is None else loop.call_later(timeout, waiter.expire)
        self._waiters[waiter] = None
        try:
            while True:
                if self._first() is waiter or waiter.woken:
                    waiter.woken = False
                    found = attempt()
                    if found is not NOTHING and found is not BUSY:
                        served = True
                        return found
                    if waiter.expired:
                        return NOTHING
                    if found is BUSY:
                        self._retry_later()
                    elif self._first() is waiter and not self._sleep(waiter):
                        await asyncio.sleep(0)
                        continue
                await waiter.wait(loop)
        finally:
            if timer is not None:
                timer.cancel()
            first = self._first() is waiter
            del self._waiters[waiter]
            if first:
                self._after_first(served)

    def _first(self) -> Waiter | None:
        return next(iter(self._waiters), None)

    def notify_first(self) -> None:
        """Notify the first task, since there may be something for the tasks; each that leaves notifies the next."""
        first = self._first()
        if first is not None:
            first.notify()

    def _after_first(self, served: bool) -> None:
        """Notify the next task, since the first has left the queue."""
        following = self._first()
        if following is None or self.loop.is_closed():  # what waits in a closed loop is garbage, with its loop
            self._after_last(served)
        elif not served or not self._sleep(following):
            following.notify()

    def _sleep(self, first: Waiter) -> bool:
        """Fall asleep for the first task; False if there is something for it."""

        def fall_asleep() -> bool:
            self._asleep = False
            if self._ended:
                return False
            if self._descriptor.fd < 0:
                self._open()
            return self._fall_asleep(first.look)

        fell_asleep = self._run_at_once(fall_asleep)
        if fell_asleep is BUSY:
            self._retry_later()
            return True
        if not fell_asleep or self._descriptor.fd < 0:
            return False
        self._asleep, self._asleep_since, self._retry_s = True, self.loop.time(), RETRY_S
        if not self._watched:
            self.loop.add_reader(self._descriptor.fd, _readable, weakref.ref(self))
            self._watched = True
        if self._liveness_timer is None:
            self._liveness_timer = self.loop.call_later(LIVENESS_INTERVAL, self._check_liveness)
        return True

    def _after_last(self, served: bool) -> None:
        """Wake up, since no task waits any more, and pass on what no task here will take."""
        if served and not self._asleep:
            return

        def wake_up() -> None:
            if self._asleep and not self._ended:
                self._wake_up()
            self._asleep = False
            if not served and not self._ended:
                self._pass_on()

        if self._run_at_once(wake_up) is BUSY:
            self._retry_later()

    def _run_at_once(self, call: Callable[[], Any]) -> Any:
        """`call()` under the endpoint's mutex; `BUSY` if a thread has it, None if the endpoint is gone."""
        try_run = self._try_run()
        return None if try_run is None else try_run(call)

    # --- events of the loop

    def on_readable(self) -> None:
        """The descriptor is readable."""
        if not self._waiters or self._try_run() is None:
            self._unwatch()  # a late wake-up; the next sleep reads it and watches again
            return

        def wake_up() -> bool:
            if self._ended or not self._take_wakeups():
                return False
            self._asleep = False
            self._wake_up()
            return True

        woken = self._run_at_once(wake_up)
        if woken is BUSY:
            self._unwatch()
            self._retry_later()
        elif woken:
            self.notify_first()

    def _check_liveness(self) -> None:
        """Called by a timer: have the first task check which peers live, if no wake-up has come for
        `LIVENESS_INTERVAL`."""
        self._liveness_timer = None
        if not self._waiters or self._try_run() is None:
            return
        wait = self._asleep_since + LIVENESS_INTERVAL - self.loop.time() if self._asleep else LIVENESS_INTERVAL
        if wait > 0:
            self._liveness_timer = self.loop.call_later(wait, self._check_liveness)
            return

        def wake_up() -> None:
            if self._asleep and not self._ended:
                self._wake_up()
            self._asleep, self.liveness_check_due = False, True

        if self._run_at_once(wake_up) is BUSY:
            self._retry_later()
        else:
            self.notify_first()

    def _retry_later(self) -> None:
        if self._retry_timer is None and not self.loop.is_closed():
            self._retry_timer = self.loop.call_later(self._retry_s, self._retry)
            self._retry_s = min(2 * self._retry_s, LIVENESS_INTERVAL)

    def _retry(self) -> None:
        self._retry_timer = None
        if self._waiters:
            self.notify_first()
        else:
            self._after_last(True)

    def disturb(self) -> None:
        """Note that a thread has slept at the same endpoint, so that the queue is not asleep now. Called from any
        thread, under the mutex."""
        if self._waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                self.loop.call_soon_threadsafe(self.notify_first)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            if self._descriptor.fd >= 0 and not self.loop.is_closed():
                self.loop.remove_reader(self._descriptor.fd)

    # --- the end

    def end(self) -> None:
        """Wake all tasks: the endpoint is closed. Called from any thread, under the mutex."""
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
        for timer in (self._liveness_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._liveness_timer = self._retry_timer = None
        self._descriptor.close()
        self._asleep = False
        self.notify_first()

    def drop_in_child(self) -> None:
        """Drop the queue in a forked child: the loop, and what its selector watches, belong to the parent."""
        self._ended = True
        self._descriptor.close()


def _readable(wait_queue: weakref.ref[WaitQueue]) -> None:
    found = wait_queue()
    if found is not None:
        found.on_readable()


class MessageWaiters(WaitQueue):
    """Tasks at a receiver. They are woken through its inbox, as a sleeping `recv` is.

    Args:
        inbox: the receiver's.
        note_doorbell: method of the receiver that is called with each doorbell.
        is_shared: whether other receivers take the same messages, one of which may have to be woken.
        pass_on: method that wakes another receiver, if there is a message that no task here will take.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        word: AsleepWord,
        try_run: Callable[..., Any],
        *,
        inbox: Inbox,
        note_doorbell: Callable[[bytes], None],
        is_shared: bool,
        pass_on: Callable[[], object],
    ) -> None:
        super().__init__(loop, word, try_run)
        self._inbox = inbox
        self._is_shared = is_shared
        self._note_doorbell, self._pass_on_wakeup = _weak(note_doorbell), _weak(pass_on)

    def _open(self) -> None:
        try:
            self._descriptor.open(os.dup, self._inbox.fileno())
        except OSError as error:
            raise shortage.explain(error, "cannot wait on an event loop") from None

    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        word = self._word
        if look():
            return False
        self._take_wakeups()  # late doorbells of earlier sleeps
        if not self._inbox.can_accept():
            self.loop.call_later(PAUSE_S, self.notify_first)
            return True
        word.has_late_doorbells = True
        word.number = (word.number + 1) | 1
        store(word.words, word.at, word.number)
        # crash: sleep.asleep
        barrier()  # from here on every sender sees that we sleep, or we see what it published
        if look():
            self._wake_up()
            return False
        word.counters.add(C_SLEEPS)
        return True

    def _wake_up(self) -> None:
        word = self._word
        word.number = (word.number | 1) + 1
        store(word.words, word.at, word.number)
        # crash: sleep.awake
        if self._is_shared:
            barrier()  # what a sender published that saw us asleep is visible now: `_take` may wake another

    def _pass_on(self) -> None:
        self._pass_on_wakeup()

    def _take_wakeups(self) -> bool:
        doorbells = self._inbox.drain()
        for doorbell in doorbells:
            self._note_doorbell(doorbell)
        return bool(doorbells) or not self._inbox.can_accept()


class SlotWaiters(WaitQueue):
    """Tasks at a sender. They are woken through a FIFO of its own, which receivers find where its socket would be."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, word: AsleepWord, try_run: Callable[..., Any], *, member: Member
    ) -> None:
        super().__init__(loop, word, try_run)
        self._path = socket_path(member.directory, member.uid)

    def _open(self) -> None:
        self._fifo = Fifo(self._path, self._descriptor)

    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        word = self._word
        self._fifo.drain()
        word.number = (word.number + 1 | 1) & COUNT
        store(word.words, word.at, word.number | BY_FIFO)
        # crash: wait.asleep
        barrier()
        if look():
            self._wake_up()
            return False
        return True

    def _wake_up(self) -> None:
        word = self._word
        word.number = (word.number | 1) + 1 & COUNT
        store(word.words, word.at, word.number)

    def _pass_on(self) -> None:
        """Do nothing: a slot that no task here takes is the next caller's."""

    def _take_wakeups(self) -> bool:
        return True


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive; it does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
