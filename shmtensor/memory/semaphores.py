"""The semaphore on which a sender sleeps until a slot is given back."""

from __future__ import annotations

import contextlib
import errno
import os

import posix_ipc

from ..errors import ResourceError
from . import shortage
from .segment import SHM_DIR

_PREFIX = SHM_DIR + "/sem."


class Sleeper:
    """A named POSIX semaphore: its owner waits, anybody posts. Closing forgets it; `unlink` removes the name."""

    __slots__ = ("_semaphore",)

    def __init__(self, name: str, *, create: bool) -> None:
        try:
            flags = posix_ipc.O_CREX if create else 0
            self._semaphore = posix_ipc.Semaphore(name, flags, mode=0o600)
        except posix_ipc.ExistentialError as error:
            raise FileNotFoundError(errno.ENOENT, f"semaphore {name}: {error}") from None
        except posix_ipc.PermissionsError as error:
            raise ResourceError(errno.EACCES, f"semaphore {name}: {error}") from None
        except OSError as error:
            raise shortage.explain(error, f"cannot {'make' if create else 'open'} semaphore {name}") from None

    def close(self) -> None:
        """Forget the semaphore in this process. Idempotent."""
        with contextlib.suppress(posix_ipc.Error, ValueError):
            self._semaphore.close()

    def post(self) -> None:
        """Wake the owner. Safe in any context; a full counter means that it is awake already."""
        with contextlib.suppress(ValueError, posix_ipc.Error):
            self._semaphore.release()

    def drain(self) -> None:
        """Forget posts that came after their sleep had ended."""
        with contextlib.suppress(posix_ipc.BusyError):
            while True:
                self._semaphore.acquire(0)

    def wait(self, timeout: float) -> bool:
        """Sleep until posted (True) or for `timeout` seconds (False). Signals are handled, then it returns False."""
        try:
            self._semaphore.acquire(timeout)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        return True


def unlink_semaphore(name: str) -> None:
    """Remove a semaphore's name; no error if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_PREFIX + name.lstrip("/"))
