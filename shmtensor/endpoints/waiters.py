"""The two kinds of wait queues: tasks that wait for a message, and tasks that wait for a slot."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from typing import Any

from ..channel.control import C_SLEEPS
from ..channel.inbox import PAUSE_S, Inbox
from ..channel.membership import Member
from ..channel.names import socket_path
from ..memory import shortage
from ..memory.fifos import BY_FIFO, Fifo
from ..memory.semaphores import COUNT
from ..memory.words import barrier, store
from .base import AsleepWord
from .wait_queue import WaitQueue


class MessageWaiters(WaitQueue):
    """Tasks at a receiver. They are woken through its inbox, as a sleeping `recv` is.

    Args:
        inbox: the receiver's.
        note_doorbell: method of the receiver that is called with each doorbell.
        after_sleep: method that is called when the receiver is awake again.
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
        after_sleep: Callable[[], None],
        pass_on: Callable[[], None],
    ) -> None:
        super().__init__(loop, word, try_run)
        self._inbox = inbox
        self._note_doorbell, self._after_sleep = _weak(note_doorbell), _weak(after_sleep)
        self._pass_on_wakeup = _weak(pass_on)

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
            self.loop.call_later(PAUSE_S, self._notify_first)
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
        self._after_sleep()

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
