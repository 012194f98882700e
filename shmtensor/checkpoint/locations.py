"""Where a checkpoint is read from: a local path, or a URL; its files, which are read by position; and which file a path
leads to.

A trainer that saves meanwhile moves `latest`, replaces files and deletes them. So a file has a stamp, taken when its
description is read, and is compared whenever its path is opened again.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, TypeVar, cast

from ..errors import ArgumentError, CheckpointError
from ..memory.descriptors import OpenFile, open_file
from ..memory.shortage import explain
from .answers import Replaced
from .remote import RemotePath, is_url, open_url
from .threads import at_once

Location = Path | RemotePath

PAGE: Final = 4096  # bytes; data areas begin at a multiple, for direct I/O
LINE: Final = 64  # bytes of a cache line
PIECE: Final = 1 << 20  # bytes of untrusted data that are read at once
DIRECT_MIN: Final = 1 << 20
"""Reads of at least so many bytes use direct I/O: shorter ones would not keep a disk busy."""
_COPIED: Final = 8 << 20  # bytes of a file at a URL that are copied by one request


class LocalPath(PosixPath):
    """A path of this machine. A link to a name that is too long for any file leads nowhere, as other dangling links."""

    __slots__ = ()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        try:
            return super().stat(follow_symlinks=follow_symlinks)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise FileNotFoundError(errno.ENOENT, "a name in it is too long", str(self)) from None


def location(path: str | os.PathLike[str] | RemotePath) -> Location:
    """The location that a user's path or URL means. Raises `ArgumentError`, `DependencyError`."""
    if isinstance(path, RemotePath):
        return path
    if not os.fspath(path):
        raise ArgumentError('the path is empty: pass "." for the current directory')
    if not is_url(path):
        return LocalPath(path)
    found = open_url(path)
    return found if isinstance(found, RemotePath) else LocalPath(found)


def fresh(path: str | os.PathLike[str] | RemotePath) -> Location:
    """The same location without cached information about a URL, whose directory may have changed."""
    return path.fresh() if isinstance(path, RemotePath) else location(path)


class InputFile(Protocol):
    """A file that is open for reading. Callable from several threads at once.

    nbytes: its size
    """

    @property
    def nbytes(self) -> int: ...

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Bytes at an offset; fewer at the end of the file. Raises OSError."""
        ...

    def preadv(self, views: Sequence[Any], offset: int, *, alone: bool = False) -> int:
        """Fill views with some consecutive bytes; returns how many, 0 at the end. Raises OSError.

        alone: what lies around them is not read soon
        """
        ...

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce many short ranges (offset, bytes) that are read next. Raises OSError."""
        ...

    def drop(self) -> None:
        """Drop what is kept for small reads: no more of them follow."""
        ...

    def check(self) -> None:
        """Raise `CheckpointError` if it is another file by now than the one that was opened."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> InputFile: ...

    def __exit__(self, *_: object) -> None: ...


class LocalFile:
    """An open file of this machine.

    owner: closes the descriptor, when this is closed; None if that is left to others
    """

    def __init__(self, fd: int, owner: OpenFile | None = None) -> None:
        self.fd, self._owner = fd, owner

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def pread(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self.fd, nbytes, offset)

    def preadv(self, views: Sequence[Any], offset: int, *, alone: bool = False) -> int:
        return os.preadv(self.fd, views, offset)  # the kernel knows by itself

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the kernel reads ahead."""

    def drop(self) -> None:
        """Do nothing: nothing is kept."""

    def check(self) -> None:
        """Do nothing: a descriptor leads to the same file as long as it is open."""

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._owner is not None:
            self._owner.close()
            self.fd = -1

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_input(path: Location) -> InputFile:
    """Open a file for reading by position. Raises OSError, which is a `ResourceError` if too many files are open, and
    `CheckpointError` if it is no regular file: a FIFO would be waited for."""
    if isinstance(path, RemotePath):
        return path.open_input()
    try:
        file = open_file(str(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise explain(error, f"cannot open {path}") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no regular file")
    return LocalFile(file.fd, file)


class _Stream(io.RawIOBase):
    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.nbytes)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        count = self._file.preadv([into], self._at)
        self._at += count
        return count


def as_stream(file: InputFile) -> BinaryIO:
    """A stream of an open file's bytes."""
    return cast(BinaryIO, io.BufferedReader(_Stream(file)))


class MemoryFile:
    """A file in memory that has a path while this lives."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(f"shmtensor.{name}"[:200], os.MFD_CLOEXEC)

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self.fd}")

    def __del__(self) -> None:
        os.close(self.fd)


def write_all(fd: int, data: bytes | memoryview, offset: int = 0) -> None:
    """Write all of it at an offset. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def copy_to_memory(path: RemotePath) -> MemoryFile:
    """Read a whole file into memory, for libraries that read only local files. Raises OSError, `Replaced`."""
    memory = MemoryFile(path.name)
    with path.open_input() as file:
        copy_range(file, 0, file.nbytes, memory.fd)
        file.check()
    return memory


def copy_range(file: InputFile, offset: int, nbytes: int, fd: int) -> int:
    """Copy a range of a file at a URL to the beginning of another file; returns how much of it was there."""

    def copy(at: int) -> int:
        return os.pwrite(fd, file.pread(min(_COPIED, nbytes - at), offset + at), at)

    return sum(at_once(copy, range(0, nbytes, _COPIED)))


def read_regular(path: Location, most: int) -> bytes:
    """All bytes of a small file. Others may write into its directory, so it neither waits for a FIFO nor reads more
    than `most` bytes. Raises OSError, and `ValueError` for a file that is too large or not regular."""
    if isinstance(path, RemotePath):
        return path.read_whole(most)
    with open_input(path) as file:
        data = as_stream(file).read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


T = TypeVar("T")

_DAMAGED: Final = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA}
_GONE: Final = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class Stamp(NamedTuple):
    """The properties that distinguish a file from another one at its path. For a file at a URL it is only the size;
    there, the entity tag is compared with each request."""

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
    """Call `step` and return its result; raise `Replaced` if another file has got the path meanwhile, whatever `step`
    raises."""
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
    """Whether an error does not concern a file's contents: this process lacks memory or descriptors, or may not open
    the file."""
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _DAMAGED | _GONE
    return isinstance(error, MemoryError)
