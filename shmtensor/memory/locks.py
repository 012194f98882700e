"""Open-file-description byte-range locks: proof that a member lives, and arbiter between two processes.

Such a lock belongs to the open file description, not to the process: two endpoints of one process exclude each
other as two processes do, threads make no difference, and the kernel drops the lock when the last descriptor
of it is closed, at any death. (Linux `fcntl(2)`, "Open file description locks".) A description that is also
mapped would live on in a forked child, so a `LockFile` is opened on its own and never mapped, and is closed in
forked children (`memory/descriptors.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

from ..errors import ClosedError, TimedOut
from .descriptors import Descriptor

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid; native alignment, 64-bit off_t
_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
_GETLK = getattr(fcntl, "F_OFD_GETLK", 36)
_BUSY = (errno.EAGAIN, errno.EACCES)
_WRITE, _NONE, _FROM_START = fcntl.F_WRLCK, struct.pack("h", fcntl.F_UNLCK), os.SEEK_SET


def question(byte: int, length: int = 1) -> tuple[Callable[[int, int, bytes], bytes], int, bytes]:
    """A C function and its arguments after a descriptor (which may be read-only), to find out whether another
    description than the descriptor's holds a lock within `[byte, byte + length)`."""
    return fcntl.fcntl, _GETLK, _FLOCK.pack(_WRITE, _FROM_START, byte, length, 0)


def says_locked(answer: bytes) -> bool:
    """Whether the answer to such a question says that there is a lock."""
    return not answer.startswith(_NONE)


def is_locked(fd: int, byte: int, length: int = 1) -> bool:
    """Whether any description but that of `fd`, which may be read-only, holds a lock within `[byte, byte + length)`."""
    ask, command, where = question(byte, length)
    return says_locked(ask(fd, command, where))


def locked_bytes(fd: int, start: int, end: int) -> set[int]:
    """The first bytes of all locks that other descriptions than that of `fd` hold within `[start, end)`."""
    found, todo = set(), [(start, end)]
    while todo:
        first, after = todo.pop()
        if first >= after:
            continue
        answer = fcntl.fcntl(fd, _GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, after - first, 0))
        kind, _, at, length, _ = _FLOCK.unpack(answer)
        if kind != fcntl.F_UNLCK:
            found.add(at)
            todo += [(first, at), (at + length, after) if length else (after, after)]
    return found


class LockFile(Descriptor):
    """One open file description of a segment, used for locks only. Closing it drops every lock that it holds."""

    __slots__ = ()

    def is_at(self, path: str) -> bool:
        """Whether `path` still leads to the file that is locked: it was not removed, or replaced."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fd))
        except OSError:
            return False

    def try_exclusive(self, byte: int) -> bool:
        """Lock one byte for this description alone; False if another description holds it in any mode."""
        return self._set(fcntl.F_WRLCK, byte)

    def try_shared(self, byte: int) -> bool:
        """Lock one byte together with other sharers; False if another description holds it exclusively."""
        return self._set(fcntl.F_RDLCK, byte)

    def unlock(self, byte: int) -> None:
        """Drop this description's lock on one byte. Does nothing once the file is closed (closing dropped it)."""
        lock = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)  # before the descriptor is looked at, as below
        if self.fd >= 0:
            fcntl.fcntl(self.fd, _SETLK, lock)

    def held_by_other(self, byte: int, length: int = 1) -> bool:
        """Whether any other description holds a lock within `[byte, byte + length)`."""
        if self.fd < 0:
            raise ClosedError("this lock file is closed")
        return is_locked(self.fd, byte, length)

    def wait_exclusive(self, byte: int, timeout: float, what: str) -> None:
        """Lock one byte, trying again for up to `timeout` seconds; `TimedOut` then.

        Holders keep such a lock for microseconds, so that trying again beats a blocking call that a stopped holder
        could keep for ever.
        """
        pause, deadline = 50e-6, time.monotonic() + timeout
        while not self.try_exclusive(byte):
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"{what} is locked by another process for over {timeout:g} s; that process is probably stopped "
                    "(SIGSTOP, a debugger): continue it or kill it"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def _set(self, kind: int, byte: int) -> bool:
        lock = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        if self.fd < 0:
            raise ClosedError("this lock file is closed")
        try:
            fcntl.fcntl(self.fd, _SETLK, lock)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True
