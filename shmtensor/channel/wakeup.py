"""How a receiver that sleeps is woken: doorbells, the messages that a sender writes to its inbox.

A doorbell carries the record of a message. It may arrive after its receiver woke by itself, twice, or never: shared
memory holds the truth, and a lost doorbell costs one liveness interval.

The inbox is the socket at which the receiver sleeps, by ZeroMQ's wire protocol (`zmtp.py`).
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq

from .. import native
from ..errors import ResourceError, WireError
from ..memory import shortage
from ..memory.descriptors import unopened
from .names import socket_path
from .zmtp import Pull, Push, frame_head

_HIGH_WATER: Final = 1000
_LINGER_MS: Final = 200
_FIRST_FILES: Final = 8
"""Files that a process's first socket opens, with its context: libzmq aborts the process if it can open only some."""

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


class Notified(Protocol):
    """A receiver's state for notifications."""

    uid: int
    connection: Push | None
    """The connection to its inbox."""


class Doorbells:
    """Connections to the inboxes of receivers, opened when one is first notified.

    A single receiver is notified by the calling thread, which is fastest. With several, each receiver that wakes up may
    take the core of the thread that wakes it: so another thread notifies them, that of the compiled module, or else
    ZeroMQ's.
    """

    __slots__ = ("_connections", "_directory", "_sockets")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._connections: dict[int, Push] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def notify(self, uid: int, bell: bytes) -> Push | None:
        """Send a doorbell; if the inbox is full, its receiver wakes anyway. Returns the connection, or None if it
        cannot be opened.

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
        connection, made = self._connections.pop(uid, None), self._sockets.pop(uid, None)
        if connection is not None:
            connection.close()
        if made is not None:
            made.close(linger=0)

    def close(self) -> None:
        """Close every connection. Doorbells that were sent still arrive."""
        for each in self._sockets.values():
            each.close()
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


_accept: Final[Callable[[socket.socket], tuple[int, object]]] = operator.methodcaller("_accept")
_BACKLOG: Final = 1024
"""Connections that may wait to be accepted; a sender that finds no room cannot notify the receiver."""
PAUSE_S: Final = 0.01
"""Seconds that a receiver sleeps at a time while it cannot accept connections."""


class Inbox:
    """A receiver's listening socket and its connections. Owns them; the path is removed with the member.

    Connections are accepted only when the receiver sleeps or drains, so that they cost nothing while it is awake.
    """

    __slots__ = ("_bells", "_connections", "_listener", "_paused_until", "_poll", "path")

    # for a socket that may not be initialised yet; a class attribute outlives the module's names at interpreter exit
    _close_socket = staticmethod(socket.SocketType.close)

    def __init__(self, directory: str, uid: int) -> None:
        self.path = socket_path(directory, uid)
        self._bells: deque[bytes] = deque()
        self._connections: dict[int, Pull] = {}
        self._paused_until = 0.0
        # made before it is opened, so that an interrupted constructor can close it
        self._listener = socket.socket.__new__(socket.socket)
        try:
            self._poll = select.epoll(select.EPOLL_CLOEXEC)
            socket.socket.__init__(self._listener, socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.setblocking(False)
            self._listener.bind(self.path)
            self._listener.listen(_BACKLOG)
            self._poll.register(self._listener, select.EPOLLIN)
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise  # a signal handler's
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise shortage.explain(error, "cannot make a socket") from None
            raise ResourceError(
                error.errno,
                f"cannot make a socket in directory {directory}: {os.strerror(error.errno or errno.EIO)}: "
                "make that possible, or set SHMTENSOR_DIR to another directory",
            ) from None
        except BaseException:
            self.close()
            raise

    def can_accept(self) -> bool:
        """Whether senders can connect now. If not, the receiver sleeps only briefly, and does not mark itself as
        asleep."""
        if not self._paused_until:
            return True
        if time.monotonic() < self._paused_until:
            return False
        self._poll.modify(self._listener, select.EPOLLIN)
        self._paused_until = 0.0
        return True

    def fileno(self) -> int:
        """The descriptor that is readable while `drain` has something to read: a doorbell, a connection or its end."""
        return self._poll.fileno()

    def pause(self, seconds: float) -> None:
        """Sleep for at most `PAUSE_S` seconds; doorbells do not end this sleep."""
        time.sleep(min(seconds, PAUSE_S))

    def wait(self, seconds: float) -> bytes | None:
        """Sleep until a doorbell arrives, and return it. None after `seconds`, or if accepting fails."""
        end = time.monotonic() + seconds
        while not self._bells:
            if seconds <= 0 or not self._serve(seconds) or self._paused_until:
                return None
            seconds = end - time.monotonic()
        return self._bells.popleft()

    def drain(self) -> list[bytes]:
        """Return the doorbells that have arrived, without waiting. Many from one sender are read in several calls."""
        self._serve(0)
        taken = list(self._bells)
        self._bells.clear()
        return taken

    def _serve(self, seconds: float) -> int:
        """Wait for connections, doorbells and disconnections, and handle them. Returns how many there were."""
        ready = self._poll.poll(seconds)
        for fd, _ in ready:
            sender = self._connections.get(fd) or self._accept()
            if sender is not None:
                self._receive(sender)
        return len(ready)

    def _accept(self) -> Pull | None:
        fds: list[int] = []
        connection = unopened()
        try:
            # accepted and recorded in one C call
            fds.extend(map(operator.itemgetter(0), map(_accept, (self._listener,))))
            connection.__init__(fileno=fds[0])  # type: ignore[misc]
            self._poll.register(connection, select.EPOLLIN)
            sender = self._connections[fds[0]] = Pull(connection)
        except BaseException as error:
            self._hang_up(connection, fds)  # the sender will connect again
            if isinstance(error, BlockingIOError):  # the sender has disconnected
                return None
            if not isinstance(error, OSError):
                raise
            # no descriptors or no memory: the connection stays in the backlog, which would wake us over and over
            self._paused_until = time.monotonic() + PAUSE_S
            self._poll.modify(self._listener, 0)
            return None
        return sender

    def _hang_up(self, connection: socket.SocketType, fds: list[int]) -> None:
        """Close a connection whose acceptance was interrupted."""
        for fd in fds:
            self._connections.pop(fd, None)
            if connection.fileno() < 0:
                os.close(fd)
                continue
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)  # as in `_receive`
            connection.close()

    def _receive(self, sender: Pull) -> None:
        """Read from a connection; close it if it has ended or is broken."""
        try:
            if sender.take(self._bells):
                return
        except (OSError, WireError):
            pass
        try:
            del self._connections[sender.fd]
            self._poll.unregister(sender.fd)  # closing is not enough where a forked child has the descriptor too
        finally:
            sender.close()

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._close_socket(self._listener)
        if hasattr(self, "_poll"):
            self._poll.close()
        for sender in self._connections.values():
            sender.close()
        self._connections.clear()

    def __del__(self) -> None:
        if hasattr(self, "_listener"):
            self.close()
