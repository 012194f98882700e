"""The calls for event loops: `asend`, `aloan`, `arecv`, `async for`, `aclose`. Imports asyncio at the first wait only.

Tasks wait for a message in a `MessageWaiters`, for a slot in a `SlotWaiters` (`wait_queue.py`).
"""

from __future__ import annotations

import contextvars
import functools
import math
import threading
import time
import types
import weakref
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..channel import control as ctl
from ..codec.encode import Encoded
from ..errors import ClosedError, DependencyError, EndOfStream, LoopError, ReleasedError, RingFull
from ..memory.words import store
from ..options import check_timeout
from ..ring.layout import L_CLOSED
from ..ring.ring import Ring
from .base import BUSY, CLOSING, NOTHING, OPEN, Endpoint
from .devices import Sending
from .loan import Loan
from .message import Message
from .receiver import Receiver
from .sender import Sender, Wait

if TYPE_CHECKING:
    import asyncio

    from .claims import Hand
    from .wait_queue import WaitQueue


TURN_S: Final = 0.005
"""Seconds after which a task that always finds what it asks for lets the loop's other tasks run."""

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

    def _loop_error(self) -> LoopError:
        """The error of a call from this loop while tasks of another event loop wait."""
        return LoopError(
            f"{self._called.format(self)}: tasks of another event loop wait there: use it from one loop at a time, or "
            "make one for each"
        )

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

        from .wait_queue import RETRY_S

        seconds = RETRY_S
        while self._mutex.locked() and self._state in (OPEN, CLOSING):
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
                raise endpoint._loop_error()
            wait_queue.end()
        made = endpoint._wait_queue = endpoint._make_wait_queue(loop)
        return made


_R = TypeVar("_R", bound="AsyncReceiver")


class AsyncReceiver(Receiver, AsyncEndpoint):
    """A receiver with the calls that an event loop can wait for."""

    def _make_wait_queue(self, loop: asyncio.AbstractEventLoop) -> WaitQueue:
        from .wait_queue import MessageWaiters

        return MessageWaiters(
            loop, self._asleep_word, self._try_run, inbox=self._inbox, note_doorbell=self._note_doorbell,
            is_shared=self._claims is not None, pass_on=self._pass_on,
        )  # fmt: skip

    def arecv(self, *, timeout: float | None = None, copy: bool = False) -> Coroutine[Any, Any, Message]:
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
        return self._arecv(self._ask(), timeout, copy)

    def _ask(self) -> Hand | None:
        """Acknowledge what the task or thread that asks for its next message had received. Returns its `Hand`.

        The task is the one that calls, not the one that runs the coroutine: up to Python 3.11 `asyncio.wait_for`
        creates a task for that, which has ended when the message is being worked on.
        """
        if self._claims is None or self._hands is None or self._state or self._stop:
            return None
        hand = self._claims.hand_of_caller(self._hands)
        hand.acknowledge()
        return hand

    async def _arecv(self, hand: Hand | None, timeout: float | None, copy: bool) -> Message:
        check_timeout(timeout)
        if clock() >= self._turn_due:
            await self._take_turns()
        if self._state or self._stop:
            self._refuse()
        undelivered = self._undelivered
        while True:
            message = await self._anext(timeout)
            direct = self._direct
            if direct is not None and direct.more:
                self._share()
            private = NOTHING
            if copy and self._prefetch is None:
                try:
                    private = message.copy()
                except ReleasedError:
                    continue
            reference = None if hand is None else weakref.ref(message)
            if message in undelivered:  # as in `recv`
                if message.meta.__class__ is DependencyError and self._traits.raises_unreadable:
                    self._pass_over(message)
                if private is not NOTHING:
                    message.value = private
                    if self._claims is None:
                        message._hold = message._lease = None
                if hand is not None:
                    hand.last = message._lease, message._hold, reference, hand.last
                del undelivered[message]
                return message

    async def _anext(self, timeout: float | None) -> Message:
        """The next message. It is in `_undelivered`, and stays there until the caller returns it."""
        message: Any = NOTHING
        due = None if timeout is None else clock() + timeout
        attempt = self._attempt()
        if self._wait_queue is None or self._wait_queue.is_empty or timeout == 0:
            direct, undelivered = self._direct, self._undelivered
            message = None if direct is None or undelivered else direct.recv(self, undelivered, 0)
            if message is None:
                message = attempt()
        if message is NOTHING and timeout != 0 and self._devices.poll():
            message = await self._while_copying(attempt, due)
        if (message is NOTHING or message is BUSY) and timeout != 0:
            left = None if due is None else max(0.0, due - clock())
            message = await wait_queue_of(self).attend(attempt, self._has_news, left)
        if message is NOTHING or message is BUSY:
            raise self._too_late(timeout)
        return message  # type: ignore[no-any-return]

    def _attempt(self) -> Callable[[], Any]:
        """A function that makes one attempt of a call to take a message: it returns one, NOTHING, or BUSY."""
        begun = False

        def attempt() -> Any:
            nonlocal begun
            if self._state or self._stop:
                self._refuse()
            if not begun:
                begun = True
                if clock() >= self._liveness_check_due:  # while others keep it awake
                    self._check_liveness()
            prefetch = self._prefetch
            if prefetch is None and (message := self._left_over()) is not None:
                return message
            message = self._poll() if prefetch is None else prefetch.poll()
            if message is None and (message := self._check_senders()) is None:
                return NOTHING
            return message

        return lambda: self._try_run(attempt)

    async def _while_copying(self, attempt: Callable[[], Any], due: float | None) -> Any:
        """Stay awake until copies to a device are done, since their slots are given back then."""
        message = NOTHING
        while (message is NOTHING or message is BUSY) and self._devices.poll() and (due is None or clock() < due):
            await self._devices.pause()
            message = attempt()
        return message

    def _check_senders(self) -> Message | None:
        """When no message is there, and a liveness check is due: find dead senders, and take what they left. Raises
        `EndOfStream`."""
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
            (self._claims is not None and self._claims.scan_wanted)
            or bool(self._undelivered)
            or self._is_stale
            or self._has_more()
        )

    def __aiter__(self: _R) -> _R:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        return self._iterate(self._ask())

    async def _iterate(self, hand: Hand | None) -> Message:
        try:
            return await self._arecv(hand, None, False)
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


_WAKE_S = 0.001  # how long the loop waits at most for a thread that is inside a call, before it wakes a receiver


class AsyncSender(Sender, AsyncEndpoint):
    """A sender with the calls that an event loop can wait for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._sendings: dict[Sending, asyncio.AbstractEventLoop] = {}
        """Messages that a device is copying into their slots, in order, by the event loops of their tasks."""
        super().__init__(*args, **options)

    def _make_wait_queue(self, loop: asyncio.AbstractEventLoop) -> WaitQueue:
        from .wait_queue import SlotWaiters

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

    async def _asend(self, value: Any, meta: Any, timeout: float | None, *registration: Any) -> int | Sending | None:
        """Send, or start the copies from devices: a number, the message to be published after them, or None: dropped.

        registration: see ring/writer.py
        """
        if self._state:
            self._refuse()
        if self._wait_queue is None or self._wait_queue.is_empty:
            seq = self._writer.send(value, meta, 0, *registration)
            if type(seq) is int:
                if seq < 0:
                    self._wake_soon(-seq)
                return abs(seq)

        def begin(out: Encoded, ring: Ring, slot: int) -> int | Sending:
            if out.device_jobs:
                return self._devices.send(self._writer, self._rings, out, ring, slot, *registration, aside=True)
            return self._fill(out, ring, slot, *registration)

        return await self._with_slot(lambda: self._describe(value, meta), begin, timeout)  # type: ignore[no-any-return]

    async def _when_copied(self, sending: Sending) -> int:
        """Publish a message when a device has copied it into its slot, after those that other tasks began earlier."""
        import asyncio

        sendings = self._sendings
        sendings[sending] = asyncio.get_running_loop()

        def attempt() -> int:
            if self._state or self._stop:
                self._refuse()
            return self._publish_copied(sending)

        try:
            while True:
                if sending.is_done() and self._is_first(sending) and (sent := self._try_run(attempt)) is not BUSY:
                    return sent  # type: ignore[no-any-return]
                await self._devices.pause()
        finally:
            sendings.pop(sending, None)
            sending.release()

    def _is_first(self, sending: Sending) -> bool:
        """Whether no living task began to send before this one. What tasks of a closed loop began is never sent."""
        for other, loop in list(self._sendings.items()):
            if other is sending or not loop.is_closed():
                return other is sending
            self._sendings.pop(other, None)
            other.release()
        return True

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
            place = self._place_or_refuse(out.total, timeout)
            if place is NOTHING:
                if wait is not None:
                    wait.check(out.total)
                return NOTHING
            return None if place is None else use(out, *place)

        def is_roomy() -> bool:
            return not wanted or self._recipients.is_stale or self._pool.has_room(wanted)

        if self._state or self._stop:
            self._refuse()
        found = NOTHING
        if self._wait_queue is None or self._wait_queue.is_empty or timeout == 0:
            self._seek()
            found = self._try_run(attempt)
        if (found is NOTHING or found is BUSY) and timeout != 0:
            self._counters.add(ctl.C_WAITS)
            wait = Wait(self._full_text, self._member)
            found = await wait_queue_of(self).attend(lambda: self._try_run(attempt), is_roomy, timeout)
        if found is NOTHING or found is BUSY:
            raise RingFull(self._full_text(wanted))
        return found

    def _wake_soon(self, seq: int) -> None:
        """Wake a receiver that fell asleep while its message was being published."""
        until = clock() + _WAKE_S
        while self._try_run(self._wake_if_open, seq) is BUSY and clock() < until:
            pass  # a thread is inside, and wakes for what is published if it waits

    async def aclose(self, linger: float | None = 0) -> None:
        """`close` for asyncio: other tasks run while it lingers. As with `close`, the earliest end that any of several
        calls asks for counts; each returns when the sender is closed.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever. A task
                that is cancelled meanwhile closes at once.
        """
        check_timeout(linger)
        if self._state not in (OPEN, CLOSING):
            return
        self._announce_close(linger)
        try:
            await self._until_idle()
            await self._alinger()
        finally:
            self.close()

    async def _alinger(self) -> None:
        """Begin to close, and wait until everything sent was taken, or done."""
        remaining = self._left()
        if remaining <= 0:
            return

        def begin() -> bool:
            if self._state not in (OPEN, CLOSING):
                return False
            self._writer.retire()
            self._state = CLOSING
            store(self._words, L_CLOSED, 1)
            return True

        def attempt() -> Any:
            if self._state != CLOSING:
                return True
            self._recipients.refresh()
            return True if self._is_settled() else NOTHING

        if not self._run(begin):
            return
        wait_queue = wait_queue_of(self)
        wait_queue.notify_first()  # they find that nothing can be sent any more

        def look() -> bool:
            return self._recipients.is_stale or self._recipients.is_settled()

        await wait_queue.attend(lambda: self._try_run(attempt), look, None if remaining == math.inf else remaining)
