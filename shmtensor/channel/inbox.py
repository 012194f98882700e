"""The socket at which a receiver sleeps and senders send it doorbells (`wakeup.py`), by ZeroMQ's wire protocol."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ..errors import ResourceError, WireError
from ..memory import shortage
from .names import socket_path
from .zmtp import Pull, unopened

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
        """Whether senders can connect now. Else the receiver sleeps for short times, without announcing it to them."""
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
