"""The sending end of a ZeroMQ connection, spoken by the thread that sends.

A `zmq.PUSH` socket hands each message to an I/O thread, which has to be woken before the receiver's can be. A doorbell
is worth neither the time nor the thread: it may be lost, and nobody waits for it to be written. So the sender writes
ZeroMQ's wire protocol to the receiver's socket itself, one system call per message. The receiver is an ordinary
`zmq.PULL` socket.

Source: ZMTP 3.0 with the NULL mechanism, https://rfc.zeromq.org/spec/23/ .
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from ..errors import WireError

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = _SIGNATURE + bytes([3, 0]) + _NULL + bytes(32)  # not as a server, then a filler
_VERSION_AT: Final = len(_SIGNATURE)
_MECHANISM_AT: Final = _VERSION_AT + 2
_READY: Final = b"\x05READY"
_COMMAND, _LONG_MESSAGE = 4, 2
_LONG: Final = struct.Struct(">BQ")
_GREETING_BYTES: Final = 64
_MOST: Final = _GREETING_BYTES + 2 + 255  # a READY command is short


def _command(name: bytes, **properties: bytes) -> bytes:
    body = name
    for key, value in properties.items():
        word = key.replace("_", "-").encode()
        body += bytes([len(word)]) + word + struct.pack(">I", len(value)) + value
    return bytes([_COMMAND, len(body)]) + body


_HELLO: Final = _GREETING + _command(_READY, Socket_Type=b"PUSH", Identity=b"")


def frame_head(nbytes: int) -> bytes:
    """What a message of so many bytes follows."""
    return _LONG.pack(_LONG_MESSAGE, nbytes)


class Push:
    """A connection to a PULL socket that is bound to a path.

    Raises `OSError` where it cannot connect at once: nobody listens, or too many wait to be accepted.
    """

    __slots__ = ("_heard", "_socket", "fd")

    fd: int
    """The descriptor, once the other side is ready for messages; else -1."""

    def __init__(self, path: str) -> None:
        self._heard = b""
        self.fd = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(path)
            self._socket.send(_HELLO, socket.MSG_NOSIGNAL)
        except BaseException:
            self._socket.close()
            raise

    def send(self, body: bytes, patience: float) -> bool:
        """Send a message; the first one waits up to `patience` seconds for the other side's greeting.

        Returns:
            False if the greeting has not come, or the receiver takes nothing more for now.

        Raises:
            OSError: the connection is broken.
            WireError: the other side speaks another protocol.
        """
        try:
            if self.fd < 0:
                self._greet(patience)
            data = frame_head(len(body)) + body
            if self._socket.send(data, socket.MSG_NOSIGNAL) < len(data):  # a small one goes whole or not at all
                raise ConnectionError("half a message was sent")
        except (BlockingIOError, TimeoutError):
            return False
        return True

    def _greet(self, patience: float) -> None:
        """Hear the other side out: before it is ready it takes a message for an error."""
        self._socket.settimeout(patience)
        try:
            while not _is_greeting(self._heard):
                data = self._socket.recv(_MOST)
                if not data:
                    raise ConnectionResetError("closed during the greeting")
                self._heard += data
        finally:
            self._socket.setblocking(False)
        self.fd, self._heard = self._socket.fileno(), b""

    def close(self) -> None:
        """Close the connection. What was sent still arrives. Idempotent."""
        self.fd = -1
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()  # a forked child drops its parent's endpoints without closing them


def _is_greeting(heard: bytes) -> bool:
    """Whether the other side's greeting and READY are complete. Raises `WireError` if they never will be."""
    signature, version = heard[:_VERSION_AT], heard[_VERSION_AT : _VERSION_AT + 1]
    if signature[:1] not in (b"", b"\xff") or signature[9:] not in (b"", b"\x7f") or (version and version[0] < 3):
        raise WireError(f"no ZMTP 3 greeting: {heard[:12]!r}")
    if len(heard) < _GREETING_BYTES + 2:
        return False
    flags, length = heard[_GREETING_BYTES], heard[_GREETING_BYTES + 1]
    if heard[_MECHANISM_AT : _MECHANISM_AT + 20] != _NULL or flags != _COMMAND:
        raise WireError(f"no ZMTP greeting without security: {heard[: _GREETING_BYTES + 2]!r}")
    if len(heard) < _GREETING_BYTES + 2 + length:
        return False
    if not heard.startswith(_READY, _GREETING_BYTES + 2):
        raise WireError(f"the other side is not ready: {heard[_GREETING_BYTES + 2 :]!r}")
    return True
