"""Where the names of segments and semaphores are kept: as files in `/dev/shm`, or by a segment server (`served.py`).

A name leads to memory; each process that finds it opens an open file description of its own. The segments of a channel
have the same names in both places. A process decides once for each directory that `SHMTENSOR_DIR` names.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final, Protocol

from ..errors import ArgumentError, ResourceError
from ..wire.segment_packets import SOCKET
from .descriptors import Found
from .shortage import SHM_DIR, explain


class Place(Protocol):
    """A place that keeps names. A name has no slash.

    If a segment server keeps them, calls that need it wait up to 10 s for one that serves, then raise `ResourceError`.
    `exists` and `unlink` do not wait for a server where there is none.
    """

    def at_once(self) -> contextlib.AbstractContextManager[None]:
        """A context manager in which this thread does not wait for a server: `Unserved` is raised at once if none
        serves."""

    def find(self, name: str, flags: int, *, held: bool = True) -> Found:
        """What a name leads to, for `os.open`, which the caller calls next. Raises the errors of `os.open`.

        flags: such as `O_CREAT`; a segment server carries them out, for files `os.open` does.
        held: whether the process will map it; otherwise it will only be read.
        """

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name, without following a link; None if there is none."""

    def scan(self) -> Iterator[tuple[str, os.stat_result | None]]:
        """Every name with its status."""

    def listing(self) -> list[str]:
        """Every name."""

    def exists(self, name: str) -> bool:
        """Whether there is such a name, as far as that can be found out at once."""

    def unlink(self, name: str) -> bool:
        """Remove a name, if that can be done at once. Does nothing if it is gone, or another user's.

        Returns False if it may still be there, and be removed later: a server has no time or no descriptor for it now.
        """

    def room(self, name: str, fd: int, start: int, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """A context manager in which `nbytes` of a segment may be reserved from byte `start` on. Raises `OSError`
        (`ENOSPC`) if there is no room for them."""

    def free_bytes(self) -> int:
        """Bytes that segments may still take."""

    def total_bytes(self) -> int:
        """Bytes that all segments together may take."""

    def path(self, name: str) -> str:
        """How a name is shown to people."""

    def identity(self) -> str:
        """A text that differs between places of one host whose names lead to different memory."""

    def more_room(self) -> str:
        """How to give the place more room, as text for errors."""


class Files:
    """Files in `/dev/shm`."""

    _real: Final = os.path.realpath(SHM_DIR)

    def __str__(self) -> str:
        return SHM_DIR

    def at_once(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

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

    def unlink(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            os.unlink(f"{SHM_DIR}/{name}")
        return True

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

# Threads and signal handlers decide side by side: each works its decision out for itself, and stores it in one step.
_decided: dict[str, Place] = {}
_servers: dict[str, Place] = {}
"""Directories in which this process has seen a server, and what asks it."""
_by_files: set[str] = set()
"""Directories with which this process has joined channels by files."""


def current() -> Place:
    """The place of this process's names.

    Raises `ArgumentError` if the environment is contradictory.
    """
    get = os.environb.get  # half as long as `environ`
    raw = get(b"SHMTENSOR_DIR")
    if raw:
        directory = os.fsdecode(raw)
        return _decided.get(directory) or _decided.setdefault(directory, _look(directory))
    return _without_directory() if get(b"SHMTENSOR_SEGMENTS") else FILES


def at_once() -> contextlib.AbstractContextManager[None]:
    """A context manager in which this thread does not wait for a segment server: see `Place.at_once`."""
    return current().at_once()


def check_for_server() -> None:
    """Check before a join whether a server has appeared where names were files. Costs one `lstat`.

    Raises `ResourceError` if this process has joined channels by files already: they would be cut off from the others.
    """
    directory = os.environ.get("SHMTENSOR_DIR")
    if not directory:
        _without_directory()
        return
    found = _servers.get(directory) or _look(directory)
    if found is FILES:
        if _decided.setdefault(directory, FILES) is FILES:
            _by_files.add(directory)
        return
    if directory in _by_files:  # the open channels are files
        raise ResourceError(
            errno.EBUSY,
            f"a segment server has been started in {directory}, but this process has opened channels in {SHM_DIR} "
            "before: start this process again, the server first, and set SHMTENSOR_SEGMENTS=server to make sure of it",
        )
    _decided[directory] = found  # from now on this process uses no files


def _without_directory() -> Place:
    if _is_required():
        raise ArgumentError("SHMTENSOR_SEGMENTS=server needs SHMTENSOR_DIR, the directory of the segment server")
    return FILES


def _look(directory: str) -> Place:
    """The place that asks the server of a directory, always the same object; `Files` if there is no server and none is
    required."""
    if not _is_required() and not os.path.lexists(f"{directory}/{SOCKET}"):
        return FILES
    from .served import Served

    return _servers.setdefault(directory, Served(directory))


def _is_required() -> bool:
    value = os.environ.get("SHMTENSOR_SEGMENTS", "")
    if value not in ("", "auto", "server"):
        raise ArgumentError(f'SHMTENSOR_SEGMENTS={value!r}: "server" or "auto"')
    return value == "server"
