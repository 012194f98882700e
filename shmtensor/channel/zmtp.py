"""Both ends of a ZeroMQ connection, without I/O threads.

A ZeroMQ socket hands each message to an I/O thread, which has to be woken before the receiver's can be, and that one
before the receiver. A doorbell needs neither: it may be lost, and no thread waits for it to be
written. So the sender writes ZeroMQ's wire protocol to the receiver's socket itself, one system call per message, and
the receiver sleeps at that socket. `Pull` accepts `zmq.PUSH` sockets as well; `Push` connects to a `Pull` only, since
it does not wait for the other side's greeting before it sends.

Source: ZMTP 3.0 with the NULL mechanism, https://rfc.zeromq.org/spec/23/ .
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import MutableSequence
from typing import Final

from .. import native
from ..errors import WireError
from ..memory.descriptors import unopened

MOST: Final = 4096
"""Bytes of the longest message that is accepted; a longer one ends the connection."""

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = _SIGNATURE + bytes([3, 0]) + _NULL + bytes(32)  # not as a server, then a filler
_VERSION_AT: Final = len(_SIGNATURE)
_MECHANISM_AT: Final = _VERSION_AT + 2
_READY: Final = b"\x05READY"
_LONG_FLAG, _COMMAND = 2, 4
_LONG: Final = struct.Struct(">BQ")


def _hello(kind: bytes) -> bytes:
    """The greeting and the READY command of a socket of this type."""
    body = _READY
    for name, value in ((b"Socket-Type", kind), (b"Identity", b"")):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return _GREETING + bytes([_COMMAND, len(body)]) + body


_PUSH_HELLO: Final = _hello(b"PUSH")
_PULL_HELLO: Final = _hello(b"PULL")


def frame_head(nbytes: int) -> bytes:
    """The head of a frame with a message of `nbytes`."""
    return _LONG.pack(_LONG_FLAG, nbytes)


class Push:
    """The sending end of a connection to an inbox that listens at a path.

    Raises `OSError` if it cannot connect at once: no process listens, or too many connections wait to be accepted.
    """

    __slots__ = ("_socket", "fd")

    fd: int
    """The descriptor to which frames may be written; -1 once it is closed."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self._socket = unopened()
        try:
            self._socket.__init__(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)  # type: ignore[misc]
            self._socket.connect(path)
            self._socket.send(_PUSH_HELLO, socket.MSG_NOSIGNAL)
        except BaseException:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    def send(self, body: bytes) -> bool:
        """Send a message. False if the socket is full; raises `OSError` if the connection is broken."""
        data = frame_head(len(body)) + body
        try:
            if self._socket.send(data, socket.MSG_NOSIGNAL) < len(data):  # a small one is sent whole or not at all
                raise ConnectionError("half a message was sent")
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the connection. Messages that were sent still arrive. Idempotent."""
        self.fd = -1
        fd = self._socket.fileno()  # not -1 while another thread closes it: then this one has to wait as well
        try:
            if fd >= 0 and native.module is not None:
                native.module.wait_written(fd)  # the notifier's thread may have frames to write there
        finally:
            self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # else the constructor was interrupted before it made one
            self.close()  # a forked child drops its parent's endpoints without closing them


class Pull:
    """The receiving end of a connection that was accepted. Owns the socket."""

    __slots__ = ("_greeted", "_received", "_socket", "fd")

    def __init__(self, accepted: socket.SocketType) -> None:
        self.fd = accepted.fileno()
        self._socket = accepted
        self._received = b""
        self._greeted = False
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # it has disconnected; what it sent before can be read
            accepted.send(_PULL_HELLO, socket.MSG_NOSIGNAL)

    def take(self, bodies: MutableSequence[bytes]) -> bool:
        """Read up to 4 KiB, and append the messages that are complete to `bodies`. False if the connection has ended.

        Raises:
            OSError: the connection is broken.
            WireError: the other side speaks another protocol, or sends a message longer than `MOST`.
        """
        try:
            data = self._socket.recv(MOST)
        except BlockingIOError:
            return True
        if not data:
            return False
        rest = len(data) - _LONG.size
        if self._greeted and not self._received and rest > 0 and data.startswith(_LONG.pack(_LONG_FLAG, rest)):
            bodies.append(data[_LONG.size :])  # exactly one message, as nearly always
            return True
        received = self._received + data
        if not self._greeted:
            self._greeted = _is_greeted(received)
            received = received[len(_GREETING) :] if self._greeted else received
        at = 0
        while self._greeted and (frame := _frame(received, at)) is not None:
            flags, start, end = frame
            if not flags & _COMMAND:
                bodies.append(received[start:end])
            at = end
        self._received = received[at:]
        return True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()


def _frame(received: bytes, at: int) -> tuple[int, int, int] | None:
    """The flags of the frame at `at`, the start and the end of its body; None if it is not complete."""
    if len(received) < at + 2:
        return None
    flags, length, start = received[at], received[at + 1], at + 2
    if flags & _LONG_FLAG:
        if len(received) < at + _LONG.size:
            return None
        length, start = _LONG.unpack_from(received, at)[1], at + _LONG.size
    if length > MOST:
        raise WireError(f"a message of {length} bytes: at most {MOST} are taken")
    return (flags, start, start + length) if len(received) >= start + length else None


def _is_greeted(received: bytes) -> bool:
    """Whether the other side's greeting is complete. Raises `WireError` if it is not a greeting."""
    signature, version = received[:_VERSION_AT], received[_VERSION_AT : _VERSION_AT + 1]
    if signature[:1] not in (b"", b"\xff") or signature[9:] not in (b"", b"\x7f") or (version and version[0] < 3):
        raise WireError(f"no ZMTP 3 greeting: {received[:12]!r}")
    if len(received) < len(_GREETING):
        return False
    if received[_MECHANISM_AT : _MECHANISM_AT + len(_NULL)] != _NULL:
        raise WireError(f"no ZMTP greeting without security: {received[: len(_GREETING)]!r}")
    return True
