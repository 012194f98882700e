"""Doorbells: what a sender writes to the inboxes of receivers that sleep.

A doorbell carries the descriptor of a message. It may arrive after its sleeper woke by itself, twice, or never: the
truth is in shared memory, and a lost doorbell costs one tick.
"""

from __future__ import annotations

from typing import Final

import zmq

from ..errors import ResourceError, WireError
from .inbox import HIGH_WATER, LINGER_MS, make_socket
from .names import socket_path
from .zmtp import Push

_GREETING_S: Final = 0.02
"""The longest that the first doorbell to a receiver waits for its I/O thread, which answers in a fraction of it."""


class Doorbells:
    """Connections to the inboxes of sleepers, opened when one is first rung.

    A single sleeper is rung by a line, which wakes it soonest. Where several are to be rung at once, each thread that a
    line wakes may take the sender's core from it: then they are rung by sockets, whose thread does that.
    """

    __slots__ = ("_directory", "_lines", "_sockets")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lines: dict[int, Push] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def ring(self, uid: int, bell: bytes) -> Push | None:
        """Send a doorbell; a full inbox wakes its sleeper anyway. Returns where it can be rung from now on, if it can.

        Where it cannot be sent its sleeper wakes at the next tick: what it is rung for is published already.
        """
        try:
            line = self._lines.get(uid)
            if line is None:
                line = self._lines[uid] = Push(socket_path(self._directory, uid))
            return line if line.send(bell, _GREETING_S) else None
        except (OSError, WireError):
            line = self._lines.pop(uid, None)  # the next doorbell makes another connection
            if line is not None:
                line.close()
            return None

    def ring_by_socket(self, uid: int, bell: bytes) -> None:
        """The same by ZeroMQ's thread: returns before the sleeper is woken, and never waits."""
        try:
            socket = self._sockets.get(uid) or self._connect(uid)
            socket.send(bell, zmq.NOBLOCK)
        except (zmq.ZMQError, ResourceError):
            pass

    def _connect(self, uid: int) -> zmq.Socket[bytes]:
        socket = make_socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
            socket.connect(f"ipc://{socket_path(self._directory, uid)}")
        except BaseException:
            socket.close(linger=0)
            raise
        self._sockets[uid] = socket
        return socket

    def forget(self, uid: int) -> None:
        """Close the connections to a member that is gone."""
        line, socket = self._lines.pop(uid, None), self._sockets.pop(uid, None)
        if line is not None:
            line.close()
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Close every connection. Doorbells that were sent still arrive."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
