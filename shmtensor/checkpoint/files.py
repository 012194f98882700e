"""The open files of a checkpoint, read by position: what the page cache holds from there, the rest past it.

Reading past the page cache (O_DIRECT) brings bytes from the disk straight into the tensors' memory: there is no second
copy, half of the CPU's time is saved, and nobody's pages are driven out for a file that is read once. What several
processes read, or one reads again and again, belongs into the page cache all the same. So of each stretch of a file
that is read past it, one page is left there, as a mark: whoever comes next finds the mark, and reads the stretch
through the page cache, where those after find it whole. However many processes load a file, it comes from the disk
about twice.

It is done where memory and file lie alike within a page, and given up for a file whose file system refuses it. Nothing
depends on it but time: any byte may be read either way, and the two do not disagree (the kernel writes dirty pages back
first).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..memory.mapped_file import is_cached
from ..views.numpy import Array
from .limits import PAGE

PAST_CACHE: Final = 1 << 20
"""Bytes from which on a read goes past the page cache: shorter ones would not keep a disk busy."""
STRETCH: Final = 64 << 20
"""Bytes with one mark: looking for it and leaving it takes a tenth of the time if each read does so, here none."""
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class Files:
    """The open files of a checkpoint. Close it; what was mapped stays.

    Raises `CheckpointError` if a file does not have the size that it had when its description was read.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        self.paths = list(paths)
        self.fds: list[int] = []
        self._past: dict[int, int] = {}  # opened when there is something to be read past the cache
        self._sizes = list(sizes)
        self._lock = threading.Lock()
        self._cached: dict[tuple[int, int], bool] = {}  # file and number of a stretch; looked at once
        self._refuses = [False] * len(paths)  # set by any reader, never taken back
        try:
            for path, size in zip(paths, sizes, strict=True):
                self.fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                now = os.fstat(self.fds[-1]).st_size
                if now != size:
                    raise CheckpointError(f"{path} had {size} bytes and has {now}: it changed while it was opened")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())
        while self._past:
            os.close(self._past.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, memory: Array, file: int, offset: int, names: str) -> None:
        """Read what lies at `offset` into uint8 memory, all of it. Any number of threads may, each into its own.

        names: what is read, for the `CheckpointError` that a file which ends before raises.
        """
        while len(memory):
            count = self._read(memory, file, offset)
            if not count:
                raise CheckpointError(
                    f"{self.paths[file]}: the file ends at offset {offset}, inside tensor {names}: it is truncated"
                )
            memory, offset = memory[count:], offset + count

    def _read(self, memory: Any, file: int, offset: int) -> int:
        """Some bytes of it, as `preadv`."""
        if self.reads_past(memory, file, offset):
            lead = -offset % PAGE
            if lead:
                memory = memory[:lead]  # through the cache to the next page, with which the rest begins
            else:
                try:
                    return os.preadv(self._past[file], [memory[: len(memory) // PAGE * PAGE]], offset)
                except OSError:  # whatever it is: if the plain way has it too, it says so
                    self._refuses[file] = True  # the descriptor stays: another reader may be using it
        return os.preadv(self.fds[file], [memory], offset)

    def reads_past(self, memory: Any, file: int, offset: int) -> bool:
        """Whether `fill` would read this past the page cache, as far as anybody can tell."""
        return (
            len(memory) >= PAST_CACHE
            and not self._refuses[file]
            and not (memory.__array_interface__["data"][0] - offset) % PAGE
            and not self._is_cached(file, offset // STRETCH)
        )

    def _is_cached(self, file: int, stretch: int) -> bool:
        """Whether the page cache has a stretch, as far as one page of it says; if it does not, it has that page now.

        The page is in the middle of what is there: whoever opens a file reads its beginning or its end.
        """
        with self._lock:
            found = self._cached.get((file, stretch))
            if found is None:
                fd, start = self.fds[file], stretch * STRETCH
                at = (start + min(start + STRETCH, self._sizes[file])) // 2
                found = is_cached(fd, at)
                if not found and file not in self._past:
                    past = _open_past(fd)
                    if past < 0:
                        self._refuses[file] = found = True
                    else:
                        self._past[file] = past
                if not found:
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(fd, at, 1, os.POSIX_FADV_WILLNEED)  # the page around it
                self._cached[file, stretch] = found
            return found


def _open_past(fd: int) -> int:
    """The same file once more, whatever has its path now, for reading past the page cache; -1 if it cannot be."""
    if not _DIRECT:
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
    except OSError:
        return -1
