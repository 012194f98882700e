"""Read regions of files into memory with several threads, and compute their digests on the way.

The regions, in the order of the files, are divided into one run per reader, and into chunks. Each reader reads its own
run, so that the disk and the kernel's read-ahead see few long sequential streams, and digests each chunk while it is in
the cache. A reader that has finished helps with the longest remaining run: then chunks of one region are read
concurrently, and digested in order.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.numpy import Array
from ..memory.mapped_file import fresh, populate
from .digests import Summer, text
from .files import Files
from .formats import Opened
from .limits import LINE, PAGE
from .locations import Location
from .remote import GAP, Stopped, stop_by

CHUNK: Final = 4 << 20  # bytes; small enough to be in the cache when it is digested
REQUEST_MIN: Final = 8 << 20  # bytes of a request to a server, if the tensor has so many
REQUEST_MAX: Final = 64 << 20
CHUNK_DIRECT: Final = 16 << 20  # bytes; with direct I/O the disk wants long reads
MAX_READERS: Final = 64
_LARGE: Final = 4 << 20  # bytes


def default_readers() -> int:
    """One reader for each core that this process may use; at least 4, so that a disk is kept busy, and at most 8."""
    return min(8, max(4, len(os.sched_getaffinity(0))))


class _Target:
    """A region that is read into memory, in chunks that end where pages of the file do; not those of a server.

    request: bytes of a request to the server, 0 if the file is of this machine
    joins:   whether one request may bring its neighbours as well
    """

    def __init__(
        self, region: int, memory: Array, file: int, offset: int, summer: Summer | None = None, *,
        is_direct: bool = False, request: int = 0, joins: bool = False,
    ) -> None:  # fmt: skip
        self.region, self.memory, self.file, self.offset = region, memory, file, offset
        self._summer, self.is_direct, self.joins = summer, is_direct, joins
        self.request = request
        self._size = request or (CHUNK_DIRECT if is_direct else CHUNK)
        self._before = 0 if request else offset % PAGE  # bytes of the first page that are not ours
        self._lock = threading.Lock()
        self._ready: set[int] = set()
        self._next = 0
        self._busy = False

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-(self._before + len(self.memory)) // self._size) if len(self.memory) else 0

    def span(self, chunk: int) -> tuple[int, Array]:
        """(offset in the file, memory) of a chunk."""
        start, end = max(0, chunk * self._size - self._before), (chunk + 1) * self._size - self._before
        return self.offset + start, self.memory[start:end]

    def arrived(self, chunk: int) -> None:
        """Digest this chunk and those after it that have arrived, unless another reader does so."""
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
                chunk = self._next
                self._next += 1
            self._summer.update(self.span(chunk)[1])

    @property
    def digest(self) -> int:
        return 0 if self._summer is None else self._summer.digest


class _Job(NamedTuple):
    target: _Target
    chunk: int
    lock: threading.Lock
    """Held by the thread that touches its memory or reads into it."""


_Run = deque[list[_Job]]
"""Consecutive chunks of the files; taken from the left. Those in one list are read by one request to a server."""


def _request(nbytes: int, share: int) -> int:
    """Bytes of a request to a server: equal parts of a region, about a reader's share of all. Each request costs a
    round trip, and on some servers the reading of the whole file; what it brings goes straight into the memory."""
    most = min(max(share, REQUEST_MIN), REQUEST_MAX)
    return -(-nbytes // max(1, -(-nbytes // most)))


def _cut(targets: Sequence[_Target], readers: int) -> list[_Run]:
    """At most `readers` runs of similar size. A region is not divided, because its digest is computed in order."""
    share = max(1, -(-sum(target.memory.nbytes for target in targets) // readers))
    runs: list[_Run] = []
    before = 0
    for target in targets:
        if min(before // share, readers - 1) >= len(runs):  # empty regions at the end are in the last run
            runs.append(deque())
        before += target.memory.nbytes
        for chunk in range(len(target)):
            job = _Job(target, chunk, threading.Lock())
            if runs[-1] and _joins(runs[-1][-1], job):
                runs[-1][-1].append(job)
            else:
                runs[-1].append([job])
    return runs


def _joins(jobs: list[_Job], job: _Job) -> bool:
    """Whether a chunk is read by the same request as those before it: of a region by several, so that they are read at
    once."""
    if not job.target.joins or job.target.file != jobs[-1].target.file or job.target is jobs[-1].target:
        return False
    first, _ = jobs[0].target.span(jobs[0].chunk)
    before, last = jobs[-1].target.span(jobs[-1].chunk)
    offset, memory = job.target.span(job.chunk)
    return 0 <= offset - before - len(last) <= GAP and offset + len(memory) - first <= REQUEST_MAX


def _next(own: _Run | None, runs: list[_Run]) -> list[_Job] | None:
    """The next chunks of a reader's own run; when it is empty, of the longest one."""
    run = own or max(runs, key=len, default=None)
    while run:
        try:
            return run.popleft()
        except IndexError:  # another reader has taken the last one
            run = max(runs, key=len)
    return None


def _ahead(runs: Sequence[_Run]) -> list[_Job]:
    """The chunks to be read with direct I/O, in the order in which the readers reach them."""
    together = (jobs[0] for each in zip_longest(*runs) for jobs in each if jobs is not None)
    return [job for job in together if job.target.is_direct]


def _touch(jobs: Sequence[_Job], runs: Sequence[_Run]) -> None:
    """Touch the memory of these chunks in advance, so that readers do not wait for fresh pages while the disk idles.

    Never touch memory that is being read into: if the process forks meanwhile, older kernels would copy the page, and
    the rest of the bytes would go to the other copy.
    """
    for job in jobs:
        if not any(runs):
            return
        if job.lock.acquire(blocking=False):
            try:
                populate(job.target.span(job.chunk)[1])
            finally:
                job.lock.release()


class Damage(NamedTuple):
    """A region whose digest is wrong. As text it is the error message."""

    region: int
    names: str
    path: Location
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
    """Read some regions from the files; with `verify`, returns the damaged ones.

    `memory_of(region)` returns a writable uint8 array of the region's size. `progress` is called with numbers of bytes,
    from any reader. Raises `CheckpointError` if a file ends early.
    """
    places = opened.places or []
    digests = opened.digests if verify else None
    targets = []
    share = -(-sum(opened.plan.regions[region].nbytes for region in regions) // readers)
    for region in sorted(regions, key=places.__getitem__):
        memory, (file, offset) = memory_of(region), places[region]
        targets.append(
            _Target(
                region, memory, file, offset, Summer() if digests is not None else None,
                is_direct=files.reads_directly(memory, file, offset),
                request=_request(len(memory), share) if files.is_remote(file) else 0, joins=files.joins(file),
            )
        )  # fmt: skip
    runs = _cut(targets, readers)

    def work(number: int) -> None:
        own = runs[number] if number < len(runs) else None
        while True:
            jobs = _next(own, runs)
            if jobs is None:
                return
            parts = []
            for job in jobs:
                offset, memory = job.target.span(job.chunk)
                parts.append((memory, offset, opened.plan.names(job.target.region)))
                if job.target.request:
                    populate(memory)  # else the only thread that receives would wait for fresh pages
            if len(jobs) > 1:
                files.fill_together(parts, jobs[0].target.file)
            else:
                with jobs[0].lock:
                    files.fill(parts[0][0], jobs[0].target.file, *parts[0][1:])
            for job in jobs:
                job.target.arrived(job.chunk)
            if progress is not None:
                progress(sum(memory.nbytes for memory, *_ in parts))

    count = max(1, min(readers, sum(map(len, runs))))
    ahead = _ahead(runs)
    if count == 1:
        work(0)
    else:
        stop, at_work = threading.Event(), []
        with ThreadPoolExecutor(count + bool(ahead), "shmtensor-read", stop_by, (stop,)) as pool:
            try:
                at_work = [pool.submit(work, number) for number in range(count)]
                if ahead:
                    at_work.append(pool.submit(_touch, ahead, runs))
                wait(at_work, return_when=FIRST_EXCEPTION)
                if any(done.done() and done.exception() is not None for done in at_work):
                    stop.set()
            except BaseException:
                stop.set()
                raise
            finally:
                for run in runs:
                    run.clear()  # after an error or Ctrl-C no reader begins another chunk
            errors = [error for done in at_work if (error := done.exception()) is not None]
            for error in errors:
                if not isinstance(error, Stopped) or error is errors[-1]:
                    raise error
    if digests is None:
        for file in {target.file for target in targets}:
            files.check(file)
        return []
    return [
        Damage(each.region, opened.plan.names(each.region), files.paths[each.file], each.offset,
               digests[each.region], each.digest)
        for each in targets
        if each.digest != digests[each.region]
    ]  # fmt: skip


def private(nbytes: int, offset: int = 0) -> Array:
    """Fresh memory. If it is large, in huge pages, and with the same position in its page as `offset`, so that direct
    I/O is possible; unless tensors would then not be aligned to a cache line."""
    return fresh(nbytes, 0 if offset % LINE else offset % PAGE) if nbytes >= _LARGE else np.empty(nbytes, np.uint8)
