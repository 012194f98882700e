"""Counting semaphores that the processes of a queue share.

They are POSIX semaphores of `multiprocessing`'s own C type, whose `acquire` and `release` are one C call each and
handle signals while they wait. Only the name differs: it belongs to the queue's channel, so that the channel's clean-up
removes it after any death. The names of those that forked children inherit are removed as soon as they are open.
"""

from __future__ import annotations

import _multiprocessing
import contextlib
import ctypes
import errno
from multiprocessing import context
from typing import Any, Final

from ..errors import PlatformError, ResourceError
from . import placement, shortage
from .semaphores import MappedSemaphore, create_semaphore, find_semaphore, unlink_semaphore

MOST: Final[int] = _multiprocessing.SemLock.SEM_VALUE_MAX
_SEMAPHORE: Final = 1  # `multiprocessing.synchronize.SEMAPHORE`


class Counter:
    """A semaphore with a limit.

    Args:
        name: its name, one of a channel's.
        value: what it counts from.
        most: `release` beyond this raises `ValueError`.
        named: whether to keep the name, so that spawned processes can open it; forked ones inherit the semaphore.
    """

    __slots__ = ("__weakref__", "_name", "_semaphore", "acquire", "release", "value")

    def __init__(self, name: str, value: int, most: int = MOST, *, named: bool) -> None:
        create_semaphore(name, value)
        made = _open(name, most)
        if not named:
            unlink_semaphore(name)
        self._use(name if named else None, made)

    def _use(self, name: str | None, semaphore: Any) -> None:
        self._name, self._semaphore = name, semaphore
        self.acquire = semaphore.acquire
        """`acquire(block=True, timeout=None)`: one less; False if that would be below 0."""
        self.release = semaphore.release
        """Add one."""
        self.value = semaphore._get_value
        """The current count."""

    def give(self) -> None:
        """`release`, unless the count is at its limit already, which the death of a process may have caused."""
        with contextlib.suppress(ValueError):
            self.release()

    # --- sending it to child processes

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        if self._name is None:
            raise RuntimeError(
                "A SemLock created in a fork context is being shared with a process in a spawn context: "
                "a queue of a fork context cannot be passed to a process that is spawned: make it with "
                'ctx="spawn", or with the context of that process'
            )
        return self._name, self._semaphore.maxvalue

    def __setstate__(self, state: Any) -> None:
        name, most = state
        self._use(name, _open(name, most, ": its queue is gone"))


class _Mapped(_multiprocessing.SemLock):  # type: ignore[misc]
    """A semaphore in memory that a segment server has passed. Bound methods of it keep that memory, too."""

    __slots__ = ("memory",)


def _open(name: str, most: int, cause: str = "") -> Any:
    try:
        if placement.current() is placement.FILES:
            return _multiprocessing.SemLock._rebuild(0, _SEMAPHORE, most, name)
        if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
            raise PlatformError(errno.ENOSYS, "queues whose segments a segment server keeps need glibc")
        memory = MappedSemaphore(find_semaphore(name))
        # without a name, it takes the address of a semaphore; when it dies it has glibc close that, which glibc, not
        # having opened it, refuses
        made = _Mapped._rebuild(memory.address, _SEMAPHORE, most, None)
        made.memory = memory
        return made
    except (ResourceError, PlatformError):
        raise
    except OSError as error:
        raise shortage.explain(error, f"cannot open semaphore {name}{cause}") from None
