"""The wake-up of a sender that waits on an event loop: a byte in a FIFO, which, unlike a semaphore, is a descriptor.

The sender makes its FIFO before it first waits that way, and marks in its `asleep` word (`BY_FIFO`) which of the two it
sleeps on. A `SenderWaker` keeps only the semaphore open: each wake-up opens the FIFO, writes to it and closes it, so
that it may come from any thread, the garbage collector's included.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from ..errors import ResourceError
from . import shortage
from .descriptors import OpenFile
from .semaphores import Sleeper

BY_FIFO: Final = 1 << 63
"""In a sender's `asleep` word: it waits on its FIFO, not on its semaphore."""


class Fifo:
    """The sender's end. Made at first use; a second one of the same path reads from the same FIFO.

    Args:
        path: where receivers find it.
        file: opened here, to read from it; the caller's to close.
    """

    __slots__ = ("_file", "path")

    def __init__(self, path: str, file: OpenFile) -> None:
        self.path, self._file = path, file
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # crash: wait.made
            # for writing too: a FIFO without a writer is at its end, and would always be readable
            file.open(os.open, path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            code = error.errno or errno.EIO
            if code in (errno.EMFILE, errno.ENFILE):
                raise shortage.explain(error, "cannot open a FIFO to wait on") from None
            raise ResourceError(
                code,
                f"cannot make a FIFO in directory {os.path.dirname(path)}: {os.strerror(code)}: make that possible, or "
                "set SHMTENSOR_DIR to another directory",
            ) from None

    def drain(self) -> None:
        """Discard wake-ups that came after their sleep had ended."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._file.fd, 4096)) == 4096:
                pass


class SenderWaker:
    """The receivers' end: wakes a sender that sleeps either way. Raises `FileNotFoundError` if the sender is gone."""

    __slots__ = ("_fifo", "_semaphore")

    def __init__(self, semaphore: str, fifo: str) -> None:
        self._semaphore, self._fifo = Sleeper(semaphore, create=False), fifo

    def wake(self, asleep: int) -> None:
        """Wake the sender whose word is `asleep`. Never waits: a full FIFO wakes its reader anyway.

        If no descriptor is left, or the sender has died, nothing happens; a living sender then finds the free slot at
        its next liveness check.
        """
        if not asleep & BY_FIFO:
            self._semaphore.post()
            return
        file = OpenFile()
        with contextlib.suppress(OSError):
            file.open(os.open, self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.write(file.fd, b"\1")
        file.close()

    def close(self) -> None:
        """Close the semaphore in this process. Idempotent."""
        self._semaphore.close()
