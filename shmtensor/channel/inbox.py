"""Where a receiver sleeps: a socket that senders connect to and ring (`doorbells.py`), by ZeroMQ's wire protocol."""

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
"""Senders that may have connected since the receiver slept last; who finds no room cannot ring."""
DEAF_S: Final = 0.01
"""Seconds that a receiver sleeps at a time while it cannot accept who rings it."""


class Inbox:
    """Where a receiver sleeps. Owns the sockets; its path is removed with the member.

    Connections are accepted by the one who sleeps, so that nothing happens here while it is awake.
    """

    __slots__ = ("_bells", "_callers", "_deaf_until", "_listener", "_poll", "path")

    # of a socket that may not be initialised yet; at the interpreter's end the module's names are gone before an inbox
    _close_socket = staticmethod(socket.SocketType.close)

    def __init__(self, directory: str, uid: int) -> None:
        self.path = socket_path(directory, uid)
        self._bells: deque[bytes] = deque()
        self._callers: dict[int, Pull] = {}
        self._deaf_until = 0.0
        # before anything is opened: who is interrupted in between closes it all the same
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

    def may_be_rung(self) -> bool:
        """Whether senders can connect now. Else the receiver sleeps a little at a time, and does not say so to them."""
        if not self._deaf_until:
            return True
        if time.monotonic() < self._deaf_until:
            return False
        self._poll.modify(self._listener, select.EPOLLIN)
        self._deaf_until = 0.0
        return True

    def fileno(self) -> int:
        """The descriptor that is readable while there is something for `drain` to take, be it a doorbell or not."""
        return self._poll.fileno()

    def doze(self, seconds: float) -> None:
        """Sleep a little, deaf to doorbells."""
        time.sleep(min(seconds, DEAF_S))

    def wait(self, seconds: float) -> bytes | None:
        """Sleep until a doorbell arrives. None after `seconds`, or if whoever wants to ring cannot be accepted."""
        end = time.monotonic() + seconds
        while not self._bells:
            if seconds <= 0 or not self._serve(seconds) or self._deaf_until:
                return None
            seconds = end - time.monotonic()
        return self._bells.popleft()

    def drain(self) -> list[bytes]:
        """Take what has arrived, without waiting. A sender's doorbells beyond the first few are left for later."""
        self._serve(0)
        taken = list(self._bells)
        self._bells.clear()
        return taken

    def _serve(self, seconds: float) -> int:
        """Wait for connections, doorbells and ends of connections, and deal with them. How many there were."""
        ready = self._poll.poll(seconds)
        for fd, _ in ready:
            caller = self._callers.get(fd) or self._accept()
            if caller is not None:
                self._hear(caller)
        return len(ready)

    def _accept(self) -> Pull | None:
        fds: list[int] = []
        connection = unopened()
        try:
            # accepted and noted in one C call
            fds.extend(map(operator.itemgetter(0), map(_accept, (self._listener,))))
            connection.__init__(fileno=fds[0])  # type: ignore[misc]
            self._poll.register(connection, select.EPOLLIN)
            caller = self._callers[fds[0]] = Pull(connection)
        except BaseException as error:
            self._hang_up(connection, fds)  # whoever it is calls again
            if isinstance(error, BlockingIOError):  # it has given up
                return None
            if not isinstance(error, OSError):
                raise
            # no descriptors or no memory: whoever calls stays in line, which would wake us over and over
            self._deaf_until = time.monotonic() + DEAF_S
            self._poll.modify(self._listener, 0)
            return None
        return caller

    def _hang_up(self, connection: socket.SocketType, fds: list[int]) -> None:
        """What was being accepted when an exception came."""
        for fd in fds:
            self._callers.pop(fd, None)
            if connection.fileno() < 0:
                os.close(fd)
                continue
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)  # as in `_hear`
            connection.close()

    def _hear(self, caller: Pull) -> None:
        try:
            if caller.take(self._bells):
                return
        except (OSError, WireError):
            pass
        try:
            del self._callers[caller.fd]
            self._poll.unregister(caller.fd)  # closing is not enough where a forked child has the descriptor too
        finally:
            caller.close()

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._close_socket(self._listener)
        if hasattr(self, "_poll"):
            self._poll.close()
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()

    def __del__(self) -> None:
        if hasattr(self, "_listener"):
            self.close()
