"""Receiving on a device: the next messages are copied there while the current one is computed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..cuda.runtime import runtime
from ..errors import ArgumentError
from .base import check_count

if TYPE_CHECKING:
    from .message import Message
    from .receiver import Receiver

_MOST = 1024


class Ahead:
    """The messages of one receiver that are taken and not handed out (`_undelivered`), each with the event after its
    copies and its memory on the device, or None before they are started. All of it under the receiver's mutex."""

    def __init__(self, receiver: Receiver, device: Any, prefetch: int) -> None:
        self._receiver, self._prefetch = receiver, prefetch
        self._device = runtime().device(device)

    def next(self, timeout: float | None) -> Message:
        """`recv`."""
        receiver, stream = self._receiver, self._stream()
        while True:
            if not self._is_ready():
                self._start(receiver._poll() or receiver._wait(timeout))
            message = self._top_up(stream)
            if message is not None:
                return message

    def poll(self) -> Message | None:
        """The next message if it is there."""
        stream = self._stream()
        if not self._is_ready():
            message = self._receiver._poll()
            if message is None:
                return None
            self._start(message)
        return self._top_up(stream)

    def push(self, message: Message) -> Message | None:
        """This one was taken while there was none: hand it out."""
        self._start(message)
        return self._top_up(self._stream())

    def _stream(self) -> Any:
        """The caller's. Asked for first: while a graph is captured there it raises, and nothing is taken by then."""
        return runtime().current_stream(self._device)

    def _is_ready(self) -> bool:
        """Whether a message is there. A copy that could not be started is tried again."""
        undelivered = self._receiver._undelivered
        for message, copy in list(undelivered.items()):
            if copy is None:
                self._start(message)
        return bool(undelivered)

    def _top_up(self, stream: Any) -> Message | None:
        cuda, undelivered = runtime(), self._receiver._undelivered
        while len(undelivered) <= self._prefetch:
            message = self._receiver._poll()
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
        receiver = self._receiver
        devices = receiver._devices()
        stream = devices.stream(self._device)
        value, event, blocks = devices.copy_out(message.value, receiver._mapped_rings(), self._device, stream)
        message.value = value
        receiver._undelivered[message] = event, blocks
        if not receiver._maps_writable:  # a claim is needed until the message is done
            message._hold = message._lease = None


def check(device: Any, prefetch: int, *, latest: bool = False) -> None:
    """The arguments `device=` and `prefetch=`."""
    check_count("prefetch", prefetch, 0, _MOST)
    if prefetch and device is None:
        raise ArgumentError(f'prefetch={prefetch} copies ahead to a device: pass device="cuda" as well')
    if prefetch and latest:
        raise ArgumentError(f'prefetch={prefetch} would hand out old messages with delivery="latest": leave it 0')
