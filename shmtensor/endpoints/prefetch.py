"""Receiving on a device: the next messages are copied there while the program computes on the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..cuda.runtime import runtime
from ..errors import ArgumentError
from .base import check_count

if TYPE_CHECKING:
    from .message import Message

_MOST = 1024


class Prefetch:
    """Copies the messages of one receiver to a device before they are returned. Used under the receiver's mutex.

    Args:
        device: the CUDA device.
        count: how many messages are copied beside the one that is returned next.
        undelivered: the receiver's messages that are taken and not returned, each with the event after its copies and
            its memory on the device, or None before they are started.
        poll, wait: the receiver's ways to take a message: one that is there or None; one that comes in time.
        copy_out: starts the copies of a value: (value on the device, event, memory).
        keeps_leases: whether a message needs its lease after it was copied: on a work queue, until it is done.
    """

    def __init__(
        self,
        device: Any,
        count: int,
        undelivered: dict[Message, Any],
        *,
        poll: Callable[[], Message | None],
        wait: Callable[[float | None], Message],
        copy_out: Callable[[Any, int], tuple[Any, Any, Any]],
        keeps_leases: bool,
    ) -> None:
        self._device, self._count, self._undelivered = runtime().device(device), count, undelivered
        self._poll, self._wait, self._copy_out, self._keeps_leases = poll, wait, copy_out, keeps_leases

    def next(self, timeout: float | None) -> Message:
        """The next message; waits for it as `recv` does."""
        stream = self._stream()
        while True:
            if not self._is_ready():
                self._start(self._poll() or self._wait(timeout))
            message = self._top_up(stream)
            if message is not None:
                return message

    def poll(self) -> Message | None:
        """The next message if it is there."""
        stream = self._stream()
        if not self._is_ready():
            message = self._poll()
            if message is None:
                return None
            self._start(message)
        return self._top_up(stream)

    def push(self, message: Message) -> Message | None:
        """Copy this message, which was taken while there was none, and return the next."""
        self._start(message)
        return self._top_up(self._stream())

    def _stream(self) -> Any:
        """The caller's stream. Called before anything is taken: it raises while a CUDA graph is captured there."""
        return runtime().current_stream(self._device)

    def _is_ready(self) -> bool:
        """Whether a message is there. Starts again the copies that could not be started."""
        for message, copy in list(self._undelivered.items()):
            if copy is None:
                self._start(message)
        return bool(self._undelivered)

    def _top_up(self, stream: Any) -> Message | None:
        """Take and copy as many messages as wanted; the first of all, usable on `stream`, or None."""
        cuda, undelivered = runtime(), self._undelivered
        while len(undelivered) <= self._count:
            message = self._poll()
            if message is None:
                break
            self._start(message)
        first = next(iter(list(undelivered.items())), None)
        if first is None:
            return None  # another thread has returned it
        message, (event, blocks) = first
        cuda.stream_waits(stream, event)
        for block in blocks:
            cuda.used_on(block, stream)
        return message

    def _start(self, message: Message) -> None:
        value, event, blocks = self._copy_out(message.value, self._device)
        message.value = value
        self._undelivered[message] = event, blocks
        if not self._keeps_leases:
            message._hold = message._lease = None


def check(device: Any, prefetch: int, *, latest: bool = False) -> None:
    """Check the arguments `device=` and `prefetch=`."""
    check_count("prefetch", prefetch, 0, _MOST)
    if prefetch and device is None:
        raise ArgumentError(f'prefetch={prefetch} copies ahead to a device: pass device="cuda" as well')
    if prefetch and latest:
        raise ArgumentError(f'prefetch={prefetch} would hand out old messages with delivery="latest": leave it 0')
