"""Sending on an event loop: `asend`, `aloan`, `aclose`. Tasks wait for a slot in a `SlotWaiters`."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..channel import control as ctl
from ..codec.encode import Encoded
from ..errors import RingFull
from ..memory.words import store
from ..ring.layout import L_CLOSED
from ..ring.ring import Ring
from .async_endpoint import AsyncEndpoint, clock, wait_queue_of
from .base import BUSY, CLOSING, NOTHING, check_timeout
from .devices import Sending
from .loan import Loan
from .reports import Wait
from .sender import Sender

if TYPE_CHECKING:
    import asyncio

    from .wait_queue import WaitQueue

_WAKE_S = 0.001  # how long the loop waits at most for a thread that is inside a call, before it wakes a receiver


class AsyncSender(Sender, AsyncEndpoint):
    """A sender with the calls that an event loop can wait for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._sendings: list[Sending] = []  # of tasks, in order: a device is copying them into their slots
        super().__init__(*args, **options)

    def _make_wait_queue(self, loop: asyncio.AbstractEventLoop) -> WaitQueue:
        from .waiters import SlotWaiters

        return SlotWaiters(loop, self._asleep_word, self._try_run, member=self._member)

    async def asend(self, value: Any, meta: Any = None, *, timeout: float | None = None) -> int:
        """`send` for asyncio: other tasks run while this one waits for a slot, and no thread is used.

        The copy itself is made by the loop's thread. Several tasks may wait at one sender; their messages are sent in
        the order in which they came. A task that is cancelled while it waits has sent nothing and holds no slot. What
        is sent is `value` as it is when a slot is free: do not change it before `asend` returns. CUDA tensors are
        copied as by `send`, and other tasks run meanwhile; a task that is cancelled then has sent nothing either, and
        its slot is free when the device has finished with it.

        Args:
            value, meta, timeout: as for `send`.

        Returns:
            The message's sequence number, from 1; 0 if `full="drop"` threw it away.

        Raises:
            RingFull, ArgumentTypeError, ResourceError, ClosedError, ForkedError: as for `send`.
            LoopError: tasks of another event loop wait at this sender.

        >>> import asyncio, shmtensor, torch
        >>> async def main():
        ...     async with shmtensor.Producer("doc") as tx, shmtensor.Consumer("doc") as rx:
        ...         await tx.asend(torch.ones(2))
        ...         with await rx.arecv(timeout=5) as msg:
        ...             return msg.value.sum().item()
        >>> asyncio.run(main())
        2.0
        """
        check_timeout(timeout)
        if clock() >= self._turn_due:
            await self._take_turns()
        sent = await self._asend(value, meta, timeout)
        return await self._when_copied(sent) if isinstance(sent, Sending) else sent or 0

    async def _asend(self, value: Any, meta: Any, timeout: float | None, *beside: Any) -> int | Sending | None:
        """Send, or start the copies from devices: a number, the message to be published after them, or None: dropped.

        beside: see ring/writer.py
        """
        if self._state:
            self._refuse()
        if self._wait_queue is None or self._wait_queue.is_empty:
            seq = self._writer.send(value, meta, 0, *beside)
            if type(seq) is int:
                if seq < 0:
                    self._wake_soon(-seq)
                return abs(seq)

        def begin(out: Encoded, ring: Ring, slot: int) -> int | Sending:
            if out.device_jobs:
                return self._devices.send(self._writer, self._rings, out, ring, slot, *beside)
            return self._fill(out, ring, slot, *beside)

        return await self._with_slot(lambda: self._describe(value, meta), begin, timeout)  # type: ignore[no-any-return]

    async def _when_copied(self, sending: Sending) -> int:
        """Publish a message when a device has copied it into its slot, after those that other tasks began earlier."""
        sendings = self._sendings
        sendings.append(sending)

        def attempt() -> int:
            if self._state or self._stop:
                self._refuse()
            return self._publish_copied(sending)

        try:
            while True:
                if sending.is_done() and sendings[0] is sending and (sent := self._try_send(attempt)) is not BUSY:
                    return sent  # type: ignore[no-any-return]
                await self._devices.pause()
        finally:
            sendings.remove(sending)
            sending.release()

    async def aloan(
        self, shape: int | Sequence[int], dtype: Any, meta: Any = None, *, timeout: float | None = None
    ) -> Loan:
        """`loan` for asyncio: waits for the slot like `asend`, and returns an ordinary `Loan`.

        >>> import asyncio, shmtensor, torch
        >>> async def main():
        ...     with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
        ...         with await pub.aloan((2, 3), torch.float32) as loan:
        ...             _ = loan.tensor.fill_(1.5)
        ...         return (await sub.arecv(timeout=5)).value.sum().item()
        >>> asyncio.run(main())
        9.0
        """
        check_timeout(timeout)
        if clock() >= self._turn_due:
            await self._take_turns()

        def lend(out: Encoded, ring: Ring, slot: int) -> Loan:
            return self._lend(out, ring, slot, dtype, shape)

        loan = await self._with_slot(lambda: self._describe_empty(shape, dtype, meta), lend, timeout)
        if loan is None:
            raise RingFull(self._no_loan_text())
        return loan  # type: ignore[no-any-return]

    async def _with_slot(
        self,
        describe: Callable[[], Encoded],
        use: Callable[[Encoded, Any, int], Any],
        timeout: float | None,
    ) -> Any:
        """Wait for free slots and return `use(what is to be sent, ring, slot)`; None: the message was dropped."""
        if self._carries_context:  # of this task: while it waits, other tasks make the attempts
            describe = functools.partial(contextvars.copy_context().run, describe)
        wanted = 0  # bytes; 0: not known yet
        wait: Wait | None = None

        def attempt() -> Any:
            nonlocal wanted
            if self._state or self._stop:
                self._refuse()
            out = describe()
            # crash: send.described
            wanted = max(1, out.total)
            place = self._place_at_once(out.total)
            if place is not None:
                return use(out, *place)
            if self._full == "drop":
                self._counters.add(ctl.C_DROPPED)
                return None
            if self._full == "error" or timeout == 0:
                raise RingFull(self._full_text(out.total))
            if wait is not None:
                wait.check(out.total)
            return NOTHING

        def is_roomy() -> bool:
            return not wanted or self._has_moved() or self._has_room(wanted)

        if self._state or self._stop:
            self._refuse()
        found = NOTHING
        if self._wait_queue is None or self._wait_queue.is_empty or timeout == 0:
            if self._events is not None:
                self._writer.seek()
            found = self._try_send(attempt)
        if (found is NOTHING or found is BUSY) and timeout != 0:
            self._counters.add(ctl.C_WAITS)
            wait = Wait(self._full_text, self._member)
            found = await wait_queue_of(self).attend(lambda: self._try_send(attempt), is_roomy, timeout)
        if found is NOTHING or found is BUSY:
            raise RingFull(self._full_text(wanted))
        return found

    def _has_room(self, nbytes: int) -> bool:
        """Whether `_find` would find something."""
        return self._pool.has_room(nbytes)

    def _try_send(self, attempt: Callable[[], Any]) -> Any:
        """`attempt()` while no thread sends; `BUSY` at once if one does."""
        return self._try_run(attempt)

    def _has_moved(self) -> bool:
        """Whether members have joined or left since the last `_refresh`."""
        return bool(self._control_words[ctl.W_EPOCH] != self._epoch)

    def _wake_soon(self, seq: int) -> None:
        """Wake a receiver that fell asleep while its message was being published."""
        until = clock() + _WAKE_S
        while self._try_run(self._wake_if_open, seq) is BUSY and clock() < until:
            pass  # a thread is inside, and wakes for what is published if it waits

    async def aclose(self, linger: float | None = 0) -> None:
        """`close` for asyncio: other tasks run while it lingers.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever. A task
                that is cancelled meanwhile closes at once.
        """
        check_timeout(linger)
        if self._state:
            return
        self._stop = True
        try:
            await self._until_idle()
            if linger != 0:
                await self._alinger(linger)
        finally:
            self.close()

    async def _alinger(self, linger: float | None) -> None:
        """Begin to close, and wait until everything sent was taken, or done."""

        def begin() -> bool:
            if self._state:
                return False
            self._writer.retire()
            self._state = CLOSING
            store(self._words, L_CLOSED, 1)
            return True

        def attempt() -> Any:
            if self._state != CLOSING:
                return True
            self._refresh()
            return True if self._is_settled() or (self._drop_dead() and self._is_settled()) else NOTHING

        if not self._run(begin):
            return
        wait_queue = wait_queue_of(self)
        wait_queue.notify_all()  # they find that nothing can be sent any more
        await wait_queue.attend(lambda: self._try_run(attempt), lambda: self._has_moved() or self._is_settled(), linger)
