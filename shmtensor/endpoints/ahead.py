"""Receiving on a device: the next messages are copied there while the current one is computed on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..cuda.runtime import runtime
from ..errors import ArgumentError
from .base import check_count

if TYPE_CHECKING:
    from .message import Message
    from .receiver import Receiver

_MOST = 1024


class Ahead:
    """The messages of one receiver that are taken and not handed out. All of it under the receiver's mutex."""

    def __init__(self, receiver: Receiver[Any], device: Any, prefetch: int) -> None:
        self._receiver, self._prefetch = receiver, prefetch
        self._device = runtime().device(device)
        self._line: deque[tuple[Message, Any, Any]] = deque()  # message, event after its copies, memory on the device
        self._raw: Message | None = None  # taken, but its copy could not be started: the next call tries again

    def next(self, timeout: float | None) -> Message:
        """`recv`."""
        receiver, stream = self._receiver, self._stream()
        if not self._line:
            self._start(self._raw or receiver._poll() or receiver._wait(timeout))
        return self._top_up(stream)

    def poll(self) -> Message | None:
        """The next message if it is there."""
        stream = self._stream()
        if not self._line:
            message = self._raw or self._receiver._poll()
            if message is None:
                return None
            self._start(message)
        return self._top_up(stream)

    def push(self, message: Message) -> Message:
        """This one was taken while there was none: hand it out."""
        self._start(message)
        return self._top_up(self._stream())

    def _stream(self) -> Any:
        """The caller's. Asked for first: while a graph is captured there it raises, and nothing is taken by then."""
        return runtime().current_stream(self._device)

    def _top_up(self, stream: Any) -> Message:
        cuda = runtime()
        while len(self._line) <= self._prefetch:
            message = self._raw or self._receiver._poll()
            if message is None:
                break
            self._start(message)
        message, event, blocks = self._line[0]
        cuda.stream_waits(stream, event)
        for block in blocks:
            cuda.used_on(block, stream)
        self._line.popleft()  # last: what raises leaves the message to the next call
        return message

    def _start(self, message: Message) -> None:
        receiver, self._raw = self._receiver, message
        devices = receiver._devices()
        stream = devices.stream(self._device)
        message.value, event, blocks = devices.copy_out(message.value, receiver._mapped_rings(), self._device, stream)
        self._raw = None
        if not receiver._maps_writable:  # a claim is needed until the message is done
            message._hold = message._lease = None
        self._line.append((message, event, blocks))

    def drop(self) -> None:
        """The receiver closes: what was not handed out is not done, and goes to another consumer."""
        messages = [message for message, _, _ in self._line]
        if self._raw is not None:
            messages.append(self._raw)
        self._line.clear()
        self._raw = None
        for message in messages:
            message._empty()


def check(device: Any, prefetch: int, *, latest: bool = False) -> None:
    """The arguments `device=` and `prefetch=`."""
    check_count("prefetch", prefetch, 0, _MOST)
    if prefetch and device is None:
        raise ArgumentError(f'prefetch={prefetch} copies ahead to a device: pass device="cuda" as well')
    if prefetch and latest:
        raise ArgumentError(f'prefetch={prefetch} would hand out old messages with delivery="latest": leave it 0')
