"""Receiving on an event loop: `arecv`, `async for`. Tasks wait in a `MessageWaiters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..channel import control as ctl
from ..errors import ClosedError, DependencyError, EndOfStream, ReleasedError
from .async_endpoint import AsyncEndpoint, clock, wait_queue_of
from .base import BUSY, NOTHING, check_timeout
from .message import Message
from .receiver import Receiver

if TYPE_CHECKING:
    import asyncio

    from .wait_queue import WaitQueue

_A = TypeVar("_A", bound="AsyncReceiver")


class AsyncReceiver(Receiver, AsyncEndpoint):
    """A receiver with the calls that an event loop can wait for."""

    _scan_wanted = False

    def _make_wait_queue(self, loop: asyncio.AbstractEventLoop) -> WaitQueue:
        from .waiters import MessageWaiters

        return MessageWaiters(
            loop, self._asleep_word, self._try_run, inbox=self._inbox, note_doorbell=self._note_doorbell,
            after_sleep=self._after_sleep, pass_on=self._pass_on,
        )  # fmt: skip

    async def arecv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        """`recv` for asyncio: other tasks run while this one waits, and no thread is used.

        Several tasks may wait at one receiver; they are served in the order in which they came. A task that is
        cancelled while it waits has taken nothing: the message goes to another task, or to the next call.

        Args:
            timeout, copy: as for `recv`.

        Raises:
            TimedOut, EndOfStream, DependencyError, ClosedError, ForkedError: as for `recv`.
            LoopError: tasks of another event loop wait at this receiver.

        >>> import asyncio, shmtensor, torch
        >>> async def main():
        ...     with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
        ...         waiting = asyncio.create_task(sub.arecv(timeout=5))
        ...         await pub.asend(torch.arange(3))
        ...         return (await waiting).value
        >>> asyncio.run(main())
        tensor([0, 1, 2])
        """
        check_timeout(timeout)
        if clock() >= self._turn_due:
            await self._take_turns()
        if self._state or self._stop:
            self._refuse()
        hand = None if self._hands is None else self._begin(self._hand_of_task())
        undelivered = self._undelivered
        while True:
            message = await self._anext(timeout)
            direct = self._direct
            if direct is not None and direct.more:
                self._share()
            private = NOTHING
            if copy:
                try:
                    private = self._copy_of(message)
                except ReleasedError:
                    continue
            if message in undelivered:  # as in `recv`
                if message.meta.__class__ is DependencyError and self._traits.raises_unreadable:
                    self._pass_over(message)
                if private is not NOTHING:
                    message.value = private
                    if not self._traits.keeps_claims:
                        message._hold = message._lease = None
                if hand is not None:
                    hand.message = message._lease, message._hold
                del undelivered[message]
                return message

    async def _anext(self, timeout: float | None) -> Message:
        """The next message. It is in `_undelivered`, and stays there until the caller returns it."""
        message: Any = NOTHING
        attempt = self._attempt()
        if self._wait_queue is None or self._wait_queue.is_empty or timeout == 0:
            direct, undelivered = self._direct, self._undelivered
            message = None if direct is None or undelivered else direct.recv(self, undelivered, 0)
            if message is None:
                message = attempt()
        if message is NOTHING and timeout != 0 and self._devices.poll():
            message = await self._while_copying(attempt, timeout)
        if (message is NOTHING or message is BUSY) and timeout != 0:
            message = await wait_queue_of(self).attend(attempt, self._has_news, timeout)
        if message is NOTHING or message is BUSY:
            raise self._too_late(timeout)
        return message  # type: ignore[no-any-return]

    def _hand_of_task(self) -> Any:
        """The message that the current task received last. Only a work queue has it."""
        return None

    def _attempt(self) -> Callable[[], Any]:
        """A function that makes one attempt of a call to take a message: it returns one, NOTHING, or BUSY."""
        begun = False

        def attempt() -> Any:
            nonlocal begun
            if self._state or self._stop:
                self._refuse()
            if not begun:
                begun = True
                self._before_next()
            prefetch = self._prefetch
            if prefetch is None and (message := self._left_over()) is not None:
                return message
            message = self._poll() if prefetch is None else prefetch.poll()
            if message is None and (message := self._check_senders()) is None:
                return NOTHING
            return message

        return lambda: self._try_run(attempt)

    async def _while_copying(self, attempt: Callable[[], Any], timeout: float | None) -> Any:
        """Stay awake until copies to a device are done, since their slots are given back then."""
        due = None if timeout is None else clock() + timeout
        message = NOTHING
        while (message is NOTHING or message is BUSY) and self._devices.poll() and (due is None or clock() < due):
            await self._devices.pause()
            message = attempt()
        return message

    def _check_senders(self) -> Message | None:
        """No message is there: if it is time, find out who died, and take what they left. Raises `EndOfStream`."""
        message, wait_queue = None, self._wait_queue
        due = wait_queue is not None and wait_queue.liveness_check_due
        if due or clock() >= self._liveness_check_due:
            self._ticks += due
            self._check_liveness()
            message = self._poll()
            if due and message is not None:
                self._counters.add(ctl.C_LATE)
            if message is not None and self._prefetch is not None:
                message = self._prefetch.push(message)
        if wait_queue is not None:
            wait_queue.liveness_check_due = False
        if message is None and self._is_over():
            raise EndOfStream(self._over_text())
        return message

    def _has_news(self) -> bool:
        """Whether there may be something for the next attempt."""
        return (
            self._scan_wanted
            or bool(self._undelivered)
            or self._control_words[ctl.W_EPOCH] != self._epoch
            or any(reader.behind > 0 for reader in self._readers)
        )

    def _after_sleep(self) -> None:
        """Called when `asleep` is even again."""

    def _pass_on(self) -> None:
        """Called when no task here will take the message that this receiver may have been woken for."""

    def __aiter__(self: _A) -> _A:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.arecv()
        except EndOfStream:
            raise StopAsyncIteration from None
        except ClosedError:
            if self._ends_iteration():
                raise StopAsyncIteration from None
            raise

    async def aclose(self) -> None:
        """`close` for asyncio: tasks that wait here get a `ClosedError`, and so do threads."""
        self._stop = True
        try:
            await self._until_idle()
        finally:
            self.close()
