"""Which file a path leads to, and what an error says of it.

A trainer that saves meanwhile moves `latest`, replaces files and deletes them. So a file has a stamp, taken when its
description is read, and whoever opens its path again compares them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ..errors import CheckpointError
from .locations import InputFile, LocalFile, Location
from .remote import RemotePath

T = TypeVar("T")

_DAMAGED: Final = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA}
_GONE: Final = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class Replaced(CheckpointError):
    """Another file than before is at a path."""


class Stamp(NamedTuple):
    """What tells a file from another one at its path. Of a file at a URL it is only the size; there, the entity tag is
    compared with each request."""

    nbytes: int
    device: int = 0
    inode: int = 0
    mtime_ns: int = 0


def stamp_of(file: InputFile) -> Stamp:
    """The stamp of an open file."""
    return _stamp(os.fstat(file.fd)) if isinstance(file, LocalFile) else Stamp(file.nbytes)


def stamp(path: Location) -> Stamp:
    """The stamp of the file or directory that is at a path now. Raises OSError."""
    return Stamp(path.stat().st_size) if isinstance(path, RemotePath) else _stamp(path.stat())


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns)


def check_same(path: Location, before: Stamp, now: Stamp) -> None:
    """Raise `Replaced` if it is another file."""
    if now == before:
        return
    if now.nbytes != before.nbytes:
        raise Replaced(f"{path} had {before.nbytes} bytes and has {now.nbytes}: it changed while it was opened")
    raise Replaced(f"{path} changed while it was opened")


def unchanged(path: Location, step: Callable[[], T]) -> T:
    """What `step` returns; raises `Replaced` if another file has got its path meanwhile, whatever `step` says of it."""
    if not isinstance(path, Path):
        return step()
    before = stamp(path)
    try:
        made = step()
    except CheckpointError:
        check_same(path, before, stamp(path))
        raise
    check_same(path, before, stamp(path))
    return made


def is_shortage(error: BaseException) -> bool:
    """Whether an error says nothing of any file: this process lacks memory or descriptors, or may not open the file."""
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _DAMAGED | _GONE
    return isinstance(error, MemoryError)
