"""The files of one save while they are written: under a temporary name, at positions, past the page cache if possible.

Large pieces come straight from the slots, whose pages are aligned as O_DIRECT wants it. Where the file system refuses
that, the same calls go through the page cache. Small pieces (headers) always do, after everything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Final

from .directory import remove, sync
from .limits import PAGE

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Output:
    """Files (name, bytes) below `path`; a single file with the name "" is `path` itself.

    resume: go on with the files that are there, instead of new ones. Something was written into them, so that all had
            their sizes: `OSError` if one is shorter, for what was there is lost.
    """

    def __init__(self, path: str, files: Sequence[tuple[str, int]], *, resume: bool = False) -> None:
        self.path, self.files = path, tuple(files)
        self.is_directory = bool(self.files[0][0])
        self._plain: list[int] = []
        self._direct: list[int] = []
        self._refuses: list[bool] = []  # set by any writing thread, never taken back
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            if not resume:
                remove(path)
                if self.is_directory:
                    os.mkdir(path)
                flags |= os.O_CREAT | os.O_EXCL
            for index, (_, nbytes) in enumerate(self.files):
                self._plain.append(os.open(self.at(index), flags, 0o644))
                if resume:
                    self._check_size(index)
                else:  # as long as it becomes: writes that make a file longer wait for each other
                    os.ftruncate(self._plain[-1], -(-nbytes // PAGE) * PAGE)
                self._direct.append(self._open_direct(self.at(index)))
                self._refuses.append(self._direct[-1] < 0)
        except BaseException:
            self.close()
            raise

    def at(self, index: int) -> str:
        """Path of a file."""
        name = self.files[index][0]
        return os.path.join(self.path, name) if name else self.path

    def _check_size(self, index: int) -> None:
        expected, found = self.files[index][1], os.fstat(self._plain[index]).st_size
        if found < expected:
            raise OSError(errno.EIO, f"{self.at(index)} was truncated by somebody, from {expected} bytes to {found}")

    @staticmethod
    def _open_direct(path: str) -> int:
        if not _DIRECT:
            return -1
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError as error:
            if error.errno in _REFUSED:
                return -1
            raise

    def write(self, index: int, offset: int, view: memoryview) -> None:
        """Write whole pages of a slot at a page's offset; what lies beyond the file's end is cut off by `finish`.

        Several threads may do so at once, at different offsets.
        """
        if not self._refuses[index] and not offset % PAGE and not len(view) % PAGE:
            try:
                _write(self._direct[index], view, offset)
                return
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._refuses[index] = True  # its descriptor stays: another thread may be using it
        _write(self._plain[index], view, offset)

    def patch(self, index: int, offset: int, data: bytes) -> None:
        """Write a small piece, at any position."""
        _write(self._plain[index], memoryview(data), offset)

    def read(self, index: int, offset: int, into: memoryview) -> None:
        """Read back what was written. `OSError` if it is not there."""
        while into:
            count = os.preadv(self._plain[index], [into], offset)
            if not count:
                raise OSError(errno.EIO, "the file under its temporary name is shorter than what was written")
            into, offset = into[count:], offset + count

    def finish(self) -> list[tuple[str, int, int]]:
        """Give each file its exact size and make it durable; (name, bytes, mtime in ns) of each."""
        found = []
        for fd, (name, nbytes) in zip(self._plain, self.files, strict=True):
            os.ftruncate(fd, nbytes)
            # crash: write.sized
            os.fsync(fd)
            found.append((name, nbytes, os.fstat(fd).st_mtime_ns))
        # crash: write.synced
        if self.is_directory:
            sync(self.path)
        return found

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in (*self._plain, *self._direct):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._plain, self._direct, self._refuses = [], [], []

    def discard(self) -> None:
        """Close and remove the files."""
        self.close()
        with contextlib.suppress(OSError):
            remove(self.path)


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
