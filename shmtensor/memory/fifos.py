"""How a sender is woken that waits on an event loop: by a byte in a FIFO, which, unlike a semaphore, is a descriptor.

The sender makes its FIFO before it first waits that way, and says in its `asleep` word (`BY_FIFO`) which of the two it
sleeps on. Nothing of a `Rouser` is open but the semaphore: a FIFO is opened, written to and closed by each wake-up,
so that any thread may give one, the garbage collector's included.
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
            # for writing too: a FIFO that nobody writes to counts as ended, and would always be readable
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
        """Forget wake-ups that came after their sleep had ended."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._file.fd, 4096)) == 4096:
                pass


class Rouser:
    """The receivers' end: what wakes a sender, whichever way it sleeps. `FileNotFoundError` if the sender is gone."""

    __slots__ = ("_fifo", "_semaphore")

    def __init__(self, semaphore: str, fifo: str) -> None:
        self._semaphore, self._fifo = Sleeper(semaphore, create=False), fifo

    def rouse(self, asleep: int) -> None:
        """Wake the sender whose word is `asleep`. Never waits: a full FIFO wakes its reader anyway.

        Where there is no descriptor to be had, and where the sender has died, nothing happens; a sender that was not
        woken looks for itself at the next tick.
        """
        if not asleep & BY_FIFO:
            self._semaphore.post()
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, b"\1")
            finally:
                os.close(fd)

    def close(self) -> None:
        """Forget the semaphore in this process. Idempotent."""
        self._semaphore.close()
