"""Where the names of segments and semaphores are: files in `/dev/shm`, or a segment server (`served.py`).

A name leads to memory of its own; whoever finds it opens a description of its own. The files of a channel have the same
names in both places. `placement.py` says which of them is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

from .shortage import SHM_DIR, explain

SOCKET: Final = "segments"
"""The socket of a segment server, in the directory that it shares."""
LOCKS: Final = "segments.lock"
"""Beside it: the file on which the server and its clients prove that they live."""
NEW_SOCKET: Final = "segments.new"
"""The socket before it has its name."""


class Found(NamedTuple):
    """What a name leads to, for `os.open`."""

    path: str
    flags: int
    leads_to: str
    """The real path, as `/proc/self/fd` shows it."""
    hold: Any
    """Keeps `path` valid; for as long as it lives, the segment outlives a server. None for a file."""


class Place(Protocol):
    """A place of names. A name has no slash."""

    def find(self, name: str, flags: int, *, held: bool = True) -> Found:
        """What a name leads to; made if `flags` says so (`O_CREAT`, `O_EXCL`). Raises what `os.open` raises.

        held: whether the process will map it; else it will only be looked at.
        """

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name, without following a link; None if there is none."""

    def scan(self) -> Iterator[tuple[str, os.stat_result | None]]:
        """Every name with its status."""

    def listing(self) -> list[str]:
        """Every name."""

    def exists(self, name: str) -> bool:
        """Whether there is such a name, as far as that can be found out at once."""

    def unlink(self, name: str) -> None:
        """Remove a name, if that can be done at once. Does nothing if it is gone, or another user's."""

    def room(self, name: str, fd: int, start: int, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Within, `nbytes` of a segment may be reserved from byte `start` on. Raises `OSError` (`ENOSPC`) if there is
        no room for them."""

    def free_bytes(self) -> int:
        """Bytes that segments may still take."""

    def total_bytes(self) -> int:
        """Bytes that all segments together may take."""

    def path(self, name: str) -> str:
        """How a name is shown to people."""

    def identity(self) -> str:
        """Differs between places of one host whose names lead to different memory."""

    def more_room(self) -> str:
        """How to give it more room, for errors."""


class Files:
    """Files in `/dev/shm`."""

    _real: Final = os.path.realpath(SHM_DIR)

    def __str__(self) -> str:
        return SHM_DIR

    def find(self, name: str, flags: int, *, held: bool = True) -> Found:
        return Found(f"{SHM_DIR}/{name}", flags | os.O_NOFOLLOW, f"{self._real}/{name}", None)

    def status(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(f"{SHM_DIR}/{name}")
        except (OSError, ValueError):
            return None

    def scan(self) -> Iterator[tuple[str, os.stat_result | None]]:
        return ((name, self.status(name)) for name in self.listing())

    def listing(self) -> list[str]:
        try:
            return os.listdir(SHM_DIR)
        except OSError as error:
            raise explain(error, f"cannot list {SHM_DIR}") from None

    def exists(self, name: str) -> bool:
        return os.path.exists(f"{SHM_DIR}/{name}")

    def unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{SHM_DIR}/{name}")

    def room(self, name: str, fd: int, start: int, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        space = os.statvfs(SHM_DIR)
        return space.f_bavail * space.f_frsize

    def total_bytes(self) -> int:
        space = os.statvfs(SHM_DIR)
        return space.f_blocks * space.f_frsize

    def path(self, name: str) -> str:
        return f"{SHM_DIR}/{name}"

    def identity(self) -> str:
        return str(os.stat(SHM_DIR).st_dev)

    def more_room(self) -> str:
        return f"give {SHM_DIR} more room (containers: --shm-size)"


FILES: Final = Files()
