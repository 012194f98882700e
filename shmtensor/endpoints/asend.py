"""Sending on an event loop: `asend`, `aloan`, `aclose`. What waits for a slot is a `Customers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..channel import control as ctl
from ..errors import RingFull
from ..memory.words import store
from ..ring.layout import L_CLOSED
from ..ring.ring import Ring
from ..views import outgoing
from .base import CLOSING, check_timeout
from .devices import LOOK_S, Sending, publish, send
from .loan import Loan
from .sender import Sender
from .turns import BUSY, NOTHING, AsyncEndpoint, clock

if TYPE_CHECKING:
    from .crowds import Customers

_WAKE_S = 0.001  # how long the loop waits at most for a thread that is inside a call, to wake a receiver


class AsyncSender(Sender, AsyncEndpoint):
    """A sender with the calls that an event loop can wait for."""

    _crowd: Customers | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._sendings: list[Sending] = []  # of tasks: their devices' copies are not done
        super().__init__(*args, **options)

    async def asend(self, value: Any, meta: Any = None, *, timeout: float | None = None) -> int:
        """`send` for asyncio: other tasks run while this one waits for a slot, and no thread is used.

        The copy itself is made by the loop's thread. Several tasks may wait at one sender; their messages are sent in
        the order in which they came. A task that is cancelled while it waits has sent nothing and holds no slot. What
        is sent is `value` as it is when a slot is free: do not change it before `asend` returns. CUDA tensors are
        copied as by `send`, and other tasks run meanwhile; a task that is cancelled then has sent nothing either, and
        its slot is free when the device has let go of it.

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
        outbox = self._outbox
        if meta is None and outbox is not None and (self._crowd is None or self._crowd.is_empty):
            seq: int | None = outbox.send(value, 0)
            if seq is not None:
                if seq < 0:
                    self._wake_soon(-seq)
                return abs(seq)

        sent = await self._with_slot(
            lambda: self._describe(value, meta), lambda out, ring, slot: self._begin(out, value, ring, slot), timeout
        )
        return await self._when_copied(sent) if isinstance(sent, Sending) else sent or 0

    async def _when_copied(self, sending: Sending) -> int:
        """Publish what a device copies into its slot when that is done, and not before what was begun earlier."""
        import asyncio

        line, pause = self._sendings, 0.0
        line.append(sending)
        try:
            while True:
                if sending.is_done() and line[0] is sending and self._try_enter():
                    try:
                        if self._state or self._stop:
                            self._refuse()
                        return publish(self, sending)
                    finally:
                        self._exit()
                await asyncio.sleep(pause)
                pause = LOOK_S
        finally:
            line.remove(sending)
            sending.let_go()

    def _begin(self, out: outgoing.Outgoing, value: Any, ring: Ring, slot: int) -> int | Sending:
        return (
            self._devices().send(out, self._rings, ring, slot) if out.on_device else self._fill(out, value, ring, slot)
        )

    def _fill(self, out: outgoing.Outgoing, value: Any, ring: Ring, slot: int) -> int:
        # crash: send.acquired
        if out.on_device:
            return send(self, out, ring, slot)
        outgoing.write(out, value, ring.buffer, ring.address, slot * ring.slot_bytes)
        # crash: send.copied
        seq = self._publish(ring, slot, out, None)
        if out.is_plan:
            self._learn(value, out, ring, slot)
        return seq

    async def aloan(
        self, shape: tuple[int, ...], dtype: Any, meta: Any = None, *, timeout: float | None = None
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

        def lend(out: outgoing.Outgoing, ring: Ring, slot: int) -> Loan:
            return self._lend(out, ring, slot, dtype, shape)

        loan = await self._with_slot(lambda: self._describe_empty(shape, dtype, meta), lend, timeout)
        if loan is None:
            raise RingFull(self._no_loan_text())
        return loan  # type: ignore[no-any-return]

    async def _with_slot(
        self,
        describe: Callable[[], outgoing.Outgoing],
        use: Callable[[outgoing.Outgoing, Any, int], Any],
        timeout: float | None,
    ) -> Any:
        """`use(what is to be sent, ring, slot)` in a free place, now or in line; None: drop the message."""
        wanted = 0  # bytes; 0: not known yet

        def attempt() -> Any:
            nonlocal wanted
            if not self._try_enter():
                return BUSY
            try:
                if self._state or self._stop:
                    self._refuse()
                out = describe()
                # crash: send.described
                wanted = max(1, out.total)
                place = self._usual_place(out.total) or self._place_at_once(out.total)
                if place is not None:
                    return use(out, *place)
                if self._full == "drop":
                    self._dropped += 1
                    return None
                if self._full == "error" or timeout == 0:
                    raise RingFull(self._full_text(out.total))
                return NOTHING
            finally:
                self._exit()

        def is_roomy() -> bool:
            return not wanted or self._has_moved() or self._has_room(wanted)

        if self._state or self._stop:
            self._refuse()
        found = NOTHING
        if self._crowd is None or self._crowd.is_empty or timeout == 0:
            found = attempt()
        if (found is NOTHING or found is BUSY) and timeout != 0:
            from .crowds import Customers, crowd_of

            self._waits += 1
            found = await crowd_of(self, Customers).attend(self, attempt, is_roomy, timeout)
        if found is NOTHING or found is BUSY:
            raise RingFull(self._full_text(wanted))
        return found

    def _has_room(self, nbytes: int) -> bool:
        """Whether `_find` would find something."""
        return self._find(nbytes) is not None

    def _try_enter(self) -> bool:
        """Take what keeps other senders out, if it is free."""
        return self._mutex.acquire(blocking=False)

    def _exit(self) -> None:
        self._mutex.release()

    def _has_moved(self) -> bool:
        """Whether members have come or gone."""
        return bool(self._control_words[ctl.W_EPOCH] != self._epoch)

    def _wake_soon(self, seq: int) -> None:
        """A receiver fell asleep while its message was being published."""
        if self._mutex.acquire(timeout=_WAKE_S):  # else a thread is inside, and wakes for what is published if it waits
            try:
                if not self._state:
                    self._wake_for(seq)
            finally:
                self._mutex.release()

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
                await self._settle(linger)
        finally:
            self.close()

    async def _settle(self, linger: float | None) -> None:
        from .crowds import Customers, crowd_of

        with self._mutex:
            if self._state:
                return
            self._unlearn()
            self._state = CLOSING
            store(self._words, L_CLOSED, 1)

        def attempt() -> Any:
            if not self._mutex.acquire(blocking=False):
                return BUSY
            try:
                if self._state != CLOSING:
                    return True
                self._refresh()
                return True if self._is_settled() or (self._drop_dead() and self._is_settled()) else NOTHING
            finally:
                self._mutex.release()

        crowd = crowd_of(self, Customers)
        crowd.call_all()  # they find that nothing can be sent any more
        await crowd.attend(self, attempt, lambda: self._has_moved() or self._is_settled(), linger)
