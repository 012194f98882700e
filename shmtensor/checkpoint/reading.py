"""Read regions of files into memory, with several readers, and sum them up on the way.

The regions, in the order of the files, are cut into as many runs as there are readers, and into chunks. Each reader
goes through its own run, so that the disk and the kernel's read-ahead see few long sequential streams, and sums each
chunk up while it is in the cache. Who has finished helps with the run that has most left: chunks of one region are read
at the same time then, and summed up one after the other.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..memory.mapped_file import fresh
from ..views.numpy import Array
from .digests import Summer, text
from .formats import Opened

CHUNK: Final = 4 << 20  # bytes; small enough to be in the cache when it is summed up, large enough for the disk
MAX_READERS: Final = 64
_LARGE: Final = 4 << 20  # bytes


class Files:
    """The open files of a checkpoint. Close it; what was mapped stays."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        self.paths = list(paths)
        self.fds: list[int] = []
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

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_readers() -> int:
    """One reader for each core that this process may use; at least 4, so that a disk is kept busy, and at most 8."""
    return min(8, max(4, len(os.sched_getaffinity(0))))


class _Target:
    """A region on its way into memory."""

    def __init__(self, region: int, memory: Array, summer: Summer | None) -> None:
        self.region, self.memory, self._summer = region, memory, summer
        self._lock = threading.Lock()
        self._ready: set[int] = set()
        self._next = 0
        self._busy = False

    def arrived(self, chunk: int) -> None:
        """Sum up this chunk and those after it that are here, unless another reader is at it."""
        if self._summer is None:
            return
        with self._lock:
            self._ready.add(chunk)
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                if self._next not in self._ready:
                    self._busy = False
                    return
                at = self._next * CHUNK
                self._next += 1
            self._summer.update(self.memory[at : at + CHUNK])

    @property
    def digest(self) -> int:
        return 0 if self._summer is None else self._summer.digest


class _Job(NamedTuple):
    target: _Target
    chunk: int
    file: int
    offset: int


_Run = deque[_Job]
"""Chunks that follow each other in the files; taken from the left."""


def _cut(targets: Sequence[_Target], places: Sequence[tuple[int, int]], readers: int) -> list[_Run]:
    """At most `readers` runs of whole regions, alike in size as far as the regions allow: none is cut, because it is
    summed up from its beginning to its end."""
    share = max(1, -(-sum(target.memory.nbytes for target in targets) // readers))
    runs: list[_Run] = []
    before = 0
    for target in targets:
        file, offset = places[target.region]
        if min(before // share, readers - 1) >= len(runs):  # what is empty at the end is in the last one
            runs.append(deque())
        before += target.memory.nbytes
        count = -(-target.memory.nbytes // CHUNK)
        runs[-1].extend(_Job(target, chunk, file, offset + chunk * CHUNK) for chunk in range(count))
    return runs


def _next(own: _Run | None, runs: list[_Run]) -> _Job | None:
    """The next chunk of one's own run; when there is none left, of the run that has most."""
    run = own or max(runs, key=len, default=None)
    while run:
        try:
            return run.popleft()
        except IndexError:  # somebody else has taken the last one
            run = max(runs, key=len)
    return None


class Damage(NamedTuple):
    """A region whose bytes are not what was written: the message, and where it is."""

    region: int
    names: str
    path: Path
    offset: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.path}: tensor {self.names} at offset {self.offset} is damaged: its digest is {text(self.found)}, "
            f"{text(self.expected)} was written"
        )


def read_regions(
    opened: Opened,
    files: Files,
    regions: Sequence[int],
    memory_of: Callable[[int], Array],
    *,
    readers: int,
    verify: bool,
    progress: Callable[[int], Any] | None = None,
) -> list[Damage]:
    """Fill the memory of some regions from the files; the damaged ones, if their digests are to be verified.

    `memory_of(region)` gives a writable uint8 array of the region's size. `progress` is called with bytes as they
    come, from any reader. Raises `CheckpointError` where a file ends early.
    """
    places = opened.places or []
    digests = opened.digests if verify else None
    targets = [
        _Target(region, memory_of(region), Summer() if digests is not None else None)
        for region in sorted(regions, key=places.__getitem__)
    ]
    runs = _cut(targets, places, readers)

    def work(number: int) -> None:
        own = runs[number] if number < len(runs) else None
        while True:
            job = _next(own, runs)
            if job is None:
                return
            at = job.chunk * CHUNK
            view = job.target.memory[at : at + CHUNK]
            fill(files, job.file, job.offset, view, opened.plan.names(job.target.region))
            job.target.arrived(job.chunk)
            if progress is not None:
                progress(view.nbytes)

    count = max(1, min(readers, sum(map(len, runs))))
    if count == 1:
        work(0)
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="shmtensor-read") as pool:
            at_work = [pool.submit(work, number) for number in range(count)]
            try:
                wait(at_work, return_when=FIRST_EXCEPTION)
            finally:
                for run in runs:
                    run.clear()  # after an error or Ctrl-C nobody begins another chunk
            for done in at_work:
                done.result()
    if digests is None:
        return []
    return [
        Damage(each.region, opened.plan.names(each.region), files.paths[places[each.region][0]],
               places[each.region][1], digests[each.region], each.digest)
        for each in targets
        if each.digest != digests[each.region]
    ]  # fmt: skip


def fill(files: Files, file: int, offset: int, view: Any, names: str) -> None:
    """Read the bytes of a view from a place. `CheckpointError` if the file ends before."""
    rest = memoryview(view)
    while rest:
        count = os.preadv(files.fds[file], [rest], offset)
        if not count:
            raise CheckpointError(
                f"{files.paths[file]}: the file ends at offset {offset}, inside tensor {names}: it is truncated"
            )
        rest, offset = rest[count:], offset + count


def private(nbytes: int) -> Array:
    """Fresh memory: in huge pages what is larger than a few of them."""
    return fresh(nbytes) if nbytes >= _LARGE else np.empty(nbytes, np.uint8)
