"""Doorbells: a sleeping receiver's inbox (ZeroMQ PULL over ipc) and the senders that ring it (PUSH).

A doorbell carries the descriptor of a message. It may arrive after its sleeper woke by itself, twice, or never: the
truth is in shared memory, and a lost doorbell costs one tick.
"""

from __future__ import annotations

import os
from typing import Final

import zmq

from .names import socket_path

_HIGH_WATER: Final = 1000
_MAX_BYTES: Final = 4096
_LINGER_MS: Final = 200

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context, made at first use and again in a forked child."""
    global _context, _context_pid
    if _context is None or _context_pid != os.getpid():
        _context, _context_pid = zmq.Context(), os.getpid()
    return _context


def close_context() -> None:
    """The process ends: let the last doorbells out."""
    if _context is not None and _context_pid == os.getpid():
        _context.destroy(linger=_LINGER_MS)


class Inbox:
    """Where a receiver sleeps. Owns the bound socket; its path is removed with the member."""

    __slots__ = ("_socket", "_timeout_ms", "path")

    def __init__(self, directory: str, uid: int) -> None:
        self.path = socket_path(directory, uid)
        self._socket = context().socket(zmq.PULL)
        self._timeout_ms = -1
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            self._socket.bind(f"ipc://{self.path}")
        except BaseException:
            self._socket.close()
            raise

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


class Doorbells:
    """Sockets to the inboxes of sleepers, opened when one is first rung."""

    __slots__ = ("_directory", "_sockets")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def ring(self, uid: int, bell: bytes) -> None:
        """Send a doorbell without ever waiting; a full inbox wakes its sleeper anyway."""
        socket = self._sockets.get(uid)
        if socket is None:
            socket = self._sockets[uid] = context().socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            socket.connect(f"ipc://{socket_path(self._directory, uid)}")
        try:
            socket.send(bell, zmq.NOBLOCK)
        except zmq.Again:
            pass

    def forget(self, uid: int) -> None:
        """Close the socket to a member that is gone."""
        socket = self._sockets.pop(uid, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
