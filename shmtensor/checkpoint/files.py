"""The open files of a checkpoint, read by position: from the page cache what it has, the rest with direct I/O.

Direct I/O (O_DIRECT) brings bytes from the disk straight into the tensors' memory: there is no second copy, it takes
half the CPU time, and no other pages are evicted for a file that is read once. A file that is read several times should
be in the page cache all the same. So each stretch that is read with direct I/O leaves one page in the cache, as a mark:
the next reader finds the mark and reads the stretch through the page cache, where later ones find it whole. However
many processes load a file, it is read from the disk about twice.

It needs memory and file offset to be equal modulo the page size, and is given up for a file whose file system refuses
it. Only speed depends on it: any byte may be read either way, with the same result (the kernel writes dirty pages back
first).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from ..codec.numpy import Array
from ..errors import CheckpointError
from ..memory.mapped_file import is_cached
from .envelope import DATA, SealedFile
from .limits import PAGE
from .locations import InputFile, LocalFile, Location, open_input

DIRECT_MIN: Final = 1 << 20
"""Reads of at least so many bytes use direct I/O: shorter ones would not keep a disk busy."""
STRETCH: Final = 64 << 20
"""Bytes per mark. A mark for each read would take a tenth of the time; one per stretch costs nothing."""
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class Files:
    """The open files of a checkpoint. Close it; what was mapped stays.

    sealed: per file how to decrypt it, None for a plain one; empty if all are plain

    Raises `CheckpointError` if a file does not have the size that it had when its description was read.
    """

    def __init__(
        self, paths: Sequence[Location], sizes: Sequence[int], sealed: Sequence[SealedFile | None] = ()
    ) -> None:
        self.paths = list(paths)
        self._sealed = sealed or [None] * len(self.paths)
        self._inputs: list[InputFile] = []
        self._direct: dict[int, int] = {}  # for direct I/O, opened at first use
        self._sizes = list(sizes)
        self._lock = threading.Lock()
        self._cached: dict[tuple[int, int], bool] = {}  # by file and number of a stretch; checked once
        self._refuses = [False] * len(paths)  # direct I/O; set by any reader, never reset
        try:
            for path, size in zip(paths, sizes, strict=True):
                self._inputs.append(open_input(path))
                now = self._inputs[-1].nbytes
                if now != size:
                    raise CheckpointError(f"{path} had {size} bytes and has {now}: it changed while it was opened")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._inputs:
            opened = self._inputs.pop()
            opened.drop()
            opened.close()
        while self._direct:
            os.close(self._direct.popitem()[1])

    def fd(self, file: int) -> int:
        """The descriptor of a file of this machine."""
        found = self._inputs[file]
        if not isinstance(found, LocalFile):
            raise TypeError(f"{self.paths[file]} is at a URL, and has no descriptor")
        return found.fd

    def check(self, file: int) -> None:
        """Raise `CheckpointError` if a file at a URL has become another one: for what is not compared with a digest."""
        self._inputs[file].check()

    def is_remote(self, file: int) -> bool:
        """Whether it is read through the network, by few long requests."""
        return not isinstance(self._inputs[file], LocalFile)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return not self._inputs

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, memory: Array, file: int, offset: int, names: str) -> None:
        """Fill uint8 memory with the bytes at `offset`. Callable from several threads at once.

        names: of the tensors, for the `CheckpointError` that is raised if the file ends before, or if what is there is
        not authentic.
        """
        sealed = self._sealed[file]
        if sealed is not None:
            try:
                sealed.read(self._inputs[file], DATA, offset, memory)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {names}: {error}") from None
            return
        while len(memory):
            count = self._read(memory, file, offset)
            if not count:
                raise CheckpointError(
                    f"{self.paths[file]}: the file ends at offset {offset}, inside tensor {names}: it is truncated"
                )
            memory, offset = memory[count:], offset + count

    def fill_together(self, parts: Sequence[tuple[Array, int, str]], file: int) -> None:
        """The same for several (memory, offset, names) of a file at a URL that follow each other, by one request."""
        views: list[Any] = []
        start = at = parts[0][1]
        for memory, offset, _ in parts:
            views += [bytearray(offset - at), memory]
            at = offset + len(memory)
        count = self._inputs[file].preadv(views, start)
        for memory, offset, names in parts:
            if offset + len(memory) > start + count:
                self.fill(memory, file, offset, names)  # which says that it is truncated

    def joins(self, file: int) -> bool:
        """Whether neighbours in the file are better read together: each read is a request."""
        return self.is_remote(file) and self._sealed[file] is None

    def _read(self, memory: Any, file: int, offset: int) -> int:
        """Read some of it; returns how many bytes, as `preadv`."""
        if self.reads_directly(memory, file, offset):
            lead = -offset % PAGE
            if lead:
                memory = memory[:lead]  # through the cache up to the next page, where direct I/O begins
            else:
                try:
                    return os.preadv(self._direct[file], [memory[: len(memory) // PAGE * PAGE]], offset)
                except OSError:  # if it is a real error, the plain read raises it too
                    self._refuses[file] = True  # the descriptor stays open: another reader may be using it
        return self._inputs[file].preadv([memory], offset)

    def reads_directly(self, memory: Any, file: int, offset: int) -> bool:
        """Whether `fill` would read this with direct I/O."""
        return (
            len(memory) >= DIRECT_MIN
            and self._sealed[file] is None
            and not self._refuses[file]
            and not self.is_remote(file)
            and not (memory.__array_interface__["data"][0] - offset) % PAGE
            and not self._is_cached(file, offset // STRETCH)
        )

    def _is_cached(self, file: int, stretch: int) -> bool:
        """Whether the page cache has a stretch, judged by one page of it. If not, that page is read in, as a mark.

        It is the page in the middle: opening a file reads its beginning or its end.
        """
        with self._lock:
            found = self._cached.get((file, stretch))
            if found is None:
                fd, start = self.fd(file), stretch * STRETCH
                at = (start + min(start + STRETCH, self._sizes[file])) // 2
                found = is_cached(fd, at)
                if not found and file not in self._direct:
                    direct = _open_direct(fd)
                    if direct < 0:
                        self._refuses[file] = found = True
                    else:
                        self._direct[file] = direct
                if not found:
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(fd, at, 1, os.POSIX_FADV_WILLNEED)  # the page around it
                self._cached[file, stretch] = found
            return found


def _open_direct(fd: int) -> int:
    """Open the same file again for direct I/O, whatever has its path now; -1 if that is impossible."""
    if not _DIRECT:
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
    except OSError:
        return -1
