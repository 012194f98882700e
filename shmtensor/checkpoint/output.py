"""The files of one save while they are written: under a temporary name, at offsets, with direct I/O if possible.

Large pieces are written straight from the slots, whose pages are aligned for O_DIRECT. If the file system refuses that,
the same calls use the page cache. Small pieces (headers) always do, after everything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from .directory import remove, sync
from .limits import PAGE

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Output:
    """Files (name, bytes) below `path`; a single file with the name "" is `path` itself.

    resume: continue with the existing files. They had their full sizes: `OSError` if one is shorter, because bytes are
            lost.
    """

    def __init__(self, path: str, files: Sequence[tuple[str, int]], *, resume: bool = False) -> None:
        self.path, self.files = path, tuple(files)
        self.is_directory = bool(self.files[0][0])
        self._plain: list[int] = []
        self._direct: list[int] = []
        self._refuses: list[bool] = []  # direct I/O; set by any writing thread, never reset
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
                else:  # to its full size: writes that extend a file wait for each other
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
        """Write whole pages of a slot at a page's offset; `finish` cuts off what is beyond the file's end.

        Callable from several threads at once, at different offsets.
        """
        if not self._refuses[index] and not offset % PAGE and not len(view) % PAGE:
            try:
                _write(self._direct[index], view, offset)
                return
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._refuses[index] = True  # its descriptor stays open: another thread may be using it
        _write(self._plain[index], view, offset)

    def patch(self, index: int, offset: int, data: Any) -> None:
        """Write a small piece at any offset."""
        _write(self._plain[index], memoryview(data), offset)

    def read(self, index: int, offset: int, into: memoryview) -> None:
        """Read back what was written. `OSError` if it is not there."""
        while into:
            count = os.preadv(self._plain[index], [into], offset)
            if not count:
                raise OSError(errno.EIO, "the file under its temporary name is shorter than what was written")
            into, offset = into[count:], offset + count

    def describe(self, digests: Sequence[int]) -> None:
        """Plain files describe themselves in their own format: nothing to do."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes in self.files)

    def finish(self) -> list[tuple[str, int, int]]:
        """Set the exact size of each file and sync it; returns (name, bytes, mtime in ns) of each."""
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


class _Call(NamedTuple):
    done: Future[None]
    function: Callable[..., None]
    args: tuple[Any, ...]


class Disk:
    """`count` writing threads, started at once; they end with the process.

    Not a `ThreadPoolExecutor`: its `submit` raises if a thread cannot be started, and may still run the call later,
    when the files are closed.
    """

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self.threads = 0
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"shmtensor disk {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads may be started
                return
            self.threads += 1

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call the function in one of the threads; if there is none, here. Returns a future."""
        call = _Call(Future(), function, args)
        if self.threads:
            self._calls.put(call)
        else:
            _run(*call)
        return call.done

    def _work(self) -> None:
        while True:
            _run(*self._calls.get())


def _run(done: Future[None], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
