"""The two kinds of crowds: tasks that wait for a message, and tasks that wait for a slot."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..channel.inbox import DEAF_S
from ..channel.names import socket_path
from ..errors import LoopError
from ..memory import shortage
from ..memory.fifos import BY_FIFO, Fifo
from ..memory.semaphores import COUNT
from ..memory.words import barrier, store
from .crowd import Crowd

if TYPE_CHECKING:
    from .receiver import Receiver
    from .sender import Sender

_C = TypeVar("_C", bound=Crowd)
_making = threading.Lock()


class Listeners(Crowd):
    """Tasks at a receiver. They are woken through its inbox, as a sleeping `recv` is."""

    def __init__(self, receiver: Receiver, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(receiver, loop)
        self._receiver = weakref.proxy(receiver)

    def _open(self) -> None:
        try:
            self._descriptor.open(os.dup, self._receiver._inbox.fileno())
        except OSError as error:
            raise shortage.explain(error, "cannot wait on an event loop") from None

    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        receiver = self._receiver
        if look():
            return False
        self._was_rung()  # late doorbells of earlier sleeps
        if not receiver._inbox.may_be_rung():
            self.loop.call_later(DEAF_S, self._call_first)
            return True
        receiver._late_bells = True
        receiver._nap = (receiver._nap + 1) | 1
        store(receiver._control_words, receiver._asleep, receiver._nap)
        # crash: sleep.asleep
        barrier()  # from here on every sender sees that we sleep, or we see what it published
        if look():
            self._wake_up()
            return False
        receiver._sleeps += 1
        return True

    def _wake_up(self) -> None:
        receiver = self._receiver
        receiver._nap = (receiver._nap | 1) + 1
        store(receiver._control_words, receiver._asleep, receiver._nap)
        # crash: sleep.awake
        receiver._after_sleep()

    def _pass_on(self) -> None:
        self._receiver._pass_on()

    def _was_rung(self) -> bool:
        inbox = self._receiver._inbox
        bells = inbox.drain()
        for bell in bells:
            self._receiver._hear(bell)
        return bool(bells) or not inbox.may_be_rung()


class Customers(Crowd):
    """Tasks at a sender. They are woken through a FIFO of its own, which receivers find where its socket would be."""

    def __init__(self, sender: Sender, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(sender, loop)
        self._sender = weakref.proxy(sender)

    def _open(self) -> None:
        member = self._sender._member
        self._fifo = Fifo(socket_path(member.directory, member.uid), self._descriptor)

    def _fall_asleep(self, look: Callable[[], Any]) -> bool:
        sender = self._sender
        self._fifo.drain()
        sender._nap = (sender._nap + 1 | 1) & COUNT
        store(sender._control_words, sender._asleep, sender._nap | BY_FIFO)
        # crash: wait.asleep
        barrier()
        if look():
            self._wake_up()
            return False
        return True

    def _wake_up(self) -> None:
        sender = self._sender
        sender._nap = (sender._nap | 1) + 1 & COUNT
        store(sender._control_words, sender._asleep, sender._nap)

    def _pass_on(self) -> None:
        """A slot that nobody here takes is the next caller's."""

    def _was_rung(self) -> bool:
        return True


def crowd_of(endpoint: Any, kind: Callable[[Any, asyncio.AbstractEventLoop], _C]) -> _C:
    """The crowd of an endpoint in the running loop. Raises `LoopError` if tasks of another loop wait there."""
    loop = asyncio.get_running_loop()
    with _making:
        crowd: _C | None = endpoint._crowd
        if crowd is not None and crowd.loop is loop:
            return crowd
        if crowd is not None:
            if not crowd.is_empty and not crowd.loop.is_closed():
                raise LoopError(
                    f"tasks of another event loop wait at {endpoint!r}: use an endpoint from one loop at a time, or "
                    "make one for each"
                )
            crowd.end()
        made: _C = kind(endpoint, loop)
        endpoint._crowd = made
        return made
