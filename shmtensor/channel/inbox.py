"""Where a receiver sleeps: a ZeroMQ PULL socket over ipc, which senders ring (`doorbells.py`)."""

from __future__ import annotations

import errno
import os
import time
from typing import Final

import zmq

from ..errors import ResourceError
from ..memory import shortage
from .names import socket_path

HIGH_WATER: Final = 1000
_MAX_BYTES: Final = 4096
LINGER_MS: Final = 200
_FIRST_FILES: Final = 8
"""What a process's first socket opens, with its context: libzmq ends the process where it can open only some."""
_CALLER_FILES: Final = 4
"""libzmq also ends the process where it cannot accept a connection: so many must be possible while others may ring."""
_CALLERS_S: Final = 0.25
DEAF_S: Final = 0.01
"""Seconds that a receiver sleeps at a time while it may not be rung."""

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context, made at first use and again in a forked child."""
    global _context, _context_pid
    if _context is None or _context_pid != os.getpid():
        _context, _context_pid = zmq.Context(), os.getpid()
    return _context


def make_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket of this process's context; `ResourceError` if it cannot be had."""
    shortage.need_files(_FIRST_FILES, "a socket")
    try:
        return context().socket(kind)
    except zmq.ZMQError as error:
        raise ResourceError(error.errno, f"cannot make a socket: {error.strerror}: raise ulimit -n") from None


def close_context() -> None:
    """The process ends: let the last doorbells out."""
    if _context is not None and _context_pid == os.getpid():
        _context.destroy(linger=LINGER_MS)


class Inbox:
    """Where a receiver sleeps. Owns the bound socket; its path is removed with the member."""

    __slots__ = ("_callers_due", "_socket", "_timeout_ms", "path")

    def __init__(self, directory: str, uid: int) -> None:
        self.path = socket_path(directory, uid)
        self._socket = make_socket(zmq.PULL)
        self._timeout_ms = -1
        self._callers_due = 0.0
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            self._socket.bind(f"ipc://{self.path}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ResourceError(
                error.errno,
                f"cannot make a socket in directory {directory}: {os.strerror(error.errno or errno.EIO)}: "
                "make that possible, or set SHMTENSOR_DIR to another directory",
            ) from None
        except BaseException:
            self._socket.close()
            raise

    def may_be_rung(self) -> bool:
        """Whether senders may connect now. Else the receiver sleeps a little at a time, and does not say so to them."""
        now = time.monotonic()
        if now < self._callers_due:
            return True
        if not shortage.may_open(_CALLER_FILES):
            return False
        self._callers_due = now + _CALLERS_S
        return True

    def fileno(self) -> int:
        """The descriptor that becomes readable when a doorbell comes after `drain` has taken all there were.

        ZeroMQ signals by edges: being readable says only that `drain` should be called.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def doze(self, seconds: float) -> None:
        """Sleep a little, deaf to doorbells."""
        time.sleep(min(seconds, DEAF_S))

    def wait(self, seconds: float) -> bytes | None:
        """Sleep until a doorbell arrives, or None after `seconds`."""
        milliseconds = max(1, int(seconds * 1000))
        if milliseconds != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, milliseconds)
            self._timeout_ms = milliseconds
        try:
            return self._socket.recv()
        except zmq.Again:
            return None

    def drain(self) -> list[bytes]:
        """Take whatever has arrived, without waiting."""
        taken = []
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than a receive that raises
            taken.append(self._socket.recv(zmq.NOBLOCK))
        return taken

    def close(self) -> None:
        self._socket.close()
