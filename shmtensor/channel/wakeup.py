"""Doorbells: the messages that a sender writes to the inboxes of receivers that sleep.

A doorbell carries the record of a message. It may arrive after its receiver woke by itself, twice, or never: shared
memory holds the truth, and a lost doorbell costs one liveness interval.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

import zmq

from .. import native
from ..errors import ResourceError
from ..memory import shortage
from .names import socket_path
from .zmtp import Push, frame_head

_HIGH_WATER: Final = 1000
_LINGER_MS: Final = 200
_FIRST_FILES: Final = 8
"""Files that a process's first socket opens, with its context: libzmq aborts the process if it can open only some."""

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


class Notified(Protocol):
    """A receiver that is notified."""

    uid: int
    connection: Push | None
    """The connection to its inbox."""


class Doorbells:
    """Connections to the inboxes of receivers, opened when one is first notified.

    A single receiver is notified by this thread, which wakes it soonest. If several are, each thread that wakes up may
    take the core of the thread that wakes it: so another thread does that, the compiled module's, or else ZeroMQ's.
    """

    __slots__ = ("_connections", "_directory", "_sockets")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._connections: dict[int, Push] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def notify(self, uid: int, bell: bytes) -> Push | None:
        """Send a doorbell; a full inbox wakes its receiver anyway. Returns the connection, None if there can be none.

        If it cannot be sent, the receiver wakes at its next liveness check: the message is published already.
        """
        while True:
            connection = self._connections.get(uid)
            is_new = connection is None
            try:
                if connection is None:
                    connection = self._connections[uid] = Push(socket_path(self._directory, uid))
                connection.send(bell)
                return connection
            except OSError:
                connection = self._connections.pop(uid, None)
                if connection is not None:
                    connection.close()
                if is_new:
                    return None

    def notify_all(self, peers: Sequence[Notified], bell: bytes) -> None:
        """Send a doorbell to several receivers, by another thread if possible: returns before they are woken."""
        module = native.module
        if module is None:
            for peer in peers:
                self.notify_by_zeromq(peer.uid, bell)
        elif not module.notify(peers, frame_head(len(bell)) + bell):
            for peer in peers:
                peer.connection = self.notify(peer.uid, bell)

    def notify_by_zeromq(self, uid: int, bell: bytes) -> None:
        """Send a doorbell by ZeroMQ's thread: never waits."""
        try:
            socket = self._sockets.get(uid) or self._connect(uid)
            socket.send(bell, zmq.NOBLOCK)
        except (zmq.ZMQError, ResourceError):
            pass

    def _connect(self, uid: int) -> zmq.Socket[bytes]:
        socket = _make_socket()
        try:
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # a receiver answers when it sleeps again, however late that is
            socket.connect(f"ipc://{socket_path(self._directory, uid)}")
        except BaseException:
            socket.close(linger=0)
            raise
        self._sockets[uid] = socket
        return socket

    def forget(self, uid: int) -> None:
        """Close the connections to a member that is gone."""
        connection, socket = self._connections.pop(uid, None), self._sockets.pop(uid, None)
        if connection is not None:
            connection.close()
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Close every connection. Doorbells that were sent still arrive."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _make_socket() -> zmq.Socket[bytes]:
    """A PUSH socket of this process's context, which is made at first use and again in a forked child."""
    global _context, _context_pid
    shortage.need_files(_FIRST_FILES, "a socket")
    if _context is None or _context_pid != os.getpid():
        _context, _context_pid = zmq.Context(), os.getpid()
    return _context.socket(zmq.PUSH)


def close_context() -> None:
    """At the end of the process: give the last doorbells time to be sent."""
    if _context is not None and _context_pid == os.getpid():
        _context.destroy(linger=_LINGER_MS)
