"""Read regions of files into memory with several threads, and compute their digests on the way.

The regions, in the order of the files, are divided into one run per reader, and into chunks. Each reader reads its own
run, so that the disk and the kernel's read-ahead see few long sequential streams, and digests each chunk while it is in
the cache. A reader that has finished helps with the longest remaining run: then chunks of one region are read
concurrently, and digested in order.

What goes to a device is read into pinned buffers (`devices.py`), which are used again at once: there a reader that has
read a chunk waits until those before it are digested. Readers take chunks of a run in order, each has a buffer before
it takes one, and so the first of those that were taken never waits.

`Files` are the open files of a checkpoint, read by position: from the page cache what it has, the rest with direct I/O.
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
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.numpy import Array
from ..errors import CheckpointError
from ..memory.descriptors import OpenFile, open_file
from ..memory.lifecycle import track
from ..memory.mapped_file import fresh, is_cached, populate
from .description import Summer, text
from .devices import PIECE, Lane, Lanes
from .envelope import DATA, SealedFile
from .formats import Opened
from .locations import DIRECT_MIN, LINE, PAGE, InputFile, LocalFile, Location, Stamp, check_same, open_input, stamp_of
from .remote import GAP
from .threads import check, in_threads, stopped

CHUNK: Final = 4 << 20  # bytes; small enough to be in the cache when it is digested
REQUEST_MIN: Final = 8 << 20  # bytes of a request to a server, if the tensor has so many
REQUEST_MAX: Final = 256 << 20
CHUNK_DIRECT: Final = 16 << 20  # bytes; with direct I/O the disk wants long reads
MAX_READERS: Final = 64
_LOOK: Final = 0.1  # seconds between two checks whether a reader that waits should stop
_LARGE: Final = 4 << 20  # bytes
_NOTHING: Final = np.empty(0, np.uint8)


def default_readers() -> int:
    """One reader for each core that this process may use; at least 4, so that a disk is kept busy, and at most 8."""
    return min(8, max(4, len(os.sched_getaffinity(0))))


class _Target:
    """A region that is read in chunks; they end where pages of the file do, except requests to a server.

    memory:  where all of it goes; empty if it goes to a device, chunk after chunk through memory of the readers
    size:    bytes of a chunk
    request: whether a chunk is one request to a server
    joins:   whether one request may bring its neighbours as well
    """

    def __init__(
        self, region: int, nbytes: int, file: int, offset: int, memory: Array, summer: Summer | None = None, *,
        size: int = CHUNK, is_direct: bool = False, request: bool = False, joins: bool = False,
    ) -> None:  # fmt: skip
        self.region, self.nbytes, self.memory, self.file, self.offset = region, nbytes, memory, file, offset
        self._summer, self.is_direct, self.joins = summer, is_direct, joins
        self.request = request
        self._size = size
        self._before = 0 if request else offset % PAGE  # bytes of the first page that are not ours
        self._lock = threading.Lock()
        self._ready: set[int] = set()
        self._next = 0
        self._busy = False

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-(self._before + self.nbytes) // self._size) if self.nbytes else 0

    def span(self, chunk: int) -> tuple[int, int]:
        """The first byte of a chunk in the region, and the one after its last."""
        return max(0, chunk * self._size - self._before), min((chunk + 1) * self._size - self._before, self.nbytes)

    def slice(self, chunk: int) -> Array:
        """The memory of a chunk."""
        start, end = self.span(chunk)
        return self.memory[start:end]

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
            self._summer.update(self.slice(chunk))

    def digest_in_turn(self, chunk: int, data: Array, turns: _Turns) -> None:
        """Digest a chunk whose memory is used again afterwards, when those before it are digested."""
        if self._summer is None:
            return
        turns.wait_for(lambda: self._next == chunk)
        self._summer.update(data)
        with turns.moved():
            self._next += 1

    @property
    def digest(self) -> int:
        return 0 if self._summer is None else self._summer.digest


class _Turns:
    """Lets a reader wait for another reader's chunk, until the readers are told to stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait_for(self, is_my_turn: Callable[[], bool]) -> None:
        with self._changed:
            self._wait(is_my_turn)

    def _wait(self, is_my_turn: Callable[[], bool]) -> None:
        while not is_my_turn():
            self._changed.wait(_LOOK)
            check()

    @contextlib.contextmanager
    def moved(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()


class _Job(NamedTuple):
    target: _Target
    chunk: int
    lock: threading.Lock
    """Held by the thread that touches its memory or reads into it."""

    @property
    def places(self) -> tuple[int, int]:
        """Where its bytes begin and end in the file."""
        start, end = self.target.span(self.chunk)
        return self.target.offset + start, self.target.offset + end


_Run = deque[list[_Job]]
"""Consecutive chunks of the files; taken from the left. Those in one list are read by one request to a server."""


def _request(nbytes: int, share: int, limit: int = REQUEST_MAX) -> int:
    """Bytes of a request to a server: equal parts of a region, about a reader's share of all. Each request costs a
    round trip, and on some servers the reading of the whole file; what it brings goes straight into the memory."""
    most = min(max(share, REQUEST_MIN), limit)
    return -(-nbytes // max(1, -(-nbytes // most)))


def _cut(targets: Sequence[_Target], readers: int, limit: int = REQUEST_MAX) -> list[_Run]:
    """At most `readers` runs of similar size. A region is not divided, because its digest is computed in order.

    limit: bytes of one request, at most
    """
    share = max(1, -(-sum(target.nbytes for target in targets) // readers))
    runs: list[_Run] = []
    before = 0
    for target in targets:
        if min(before // share, readers - 1) >= len(runs):  # empty regions at the end are in the last run
            runs.append(deque())
        before += target.nbytes
        for chunk in range(len(target)):
            job = _Job(target, chunk, threading.Lock())
            if runs[-1] and _joins(runs[-1][-1], job, limit):
                runs[-1][-1].append(job)
            else:
                runs[-1].append([job])
    return runs


def _joins(jobs: list[_Job], job: _Job, limit: int) -> bool:
    """Whether a chunk is read by the same request as those before it: of a region by several, so that they are read at
    once."""
    if not job.target.joins or job.target.file != jobs[-1].target.file or job.target is jobs[-1].target:
        return False
    first, end = jobs[0].places[0], jobs[-1].places[1]
    offset, last = job.places
    return 0 <= offset - end <= GAP and last - first <= limit


def _next(own: _Run | None, runs: list[_Run]) -> list[_Job] | None:
    """The next chunks of a reader's own run; when it is empty, of the longest one; None when all are taken."""
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
        if stopped() or not any(runs):
            return
        if job.lock.acquire(blocking=False):
            try:
                populate(job.target.slice(job.chunk))
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


def damaged(opened: Opened, found: Mapping[int, int]) -> list[Damage]:
    """Those of some regions whose bytes have another digest than the file says; none if it says none."""
    digests, places = opened.digests, opened.places
    if digests is None or places is None:
        return []
    return [
        Damage(region, opened.plan.names(region), opened.files[places[region][0]], places[region][1],
               digests[region], value)
        for region, value in found.items()
        if value != digests[region]
    ]  # fmt: skip


def read_regions(
    opened: Opened,
    files: Files,
    regions: Sequence[int],
    memory_of: Callable[[int], Array],
    *,
    readers: int,
    verify: bool,
    progress: Callable[[int], Any] | None = None,
    device: bool = False,
) -> list[Damage]:
    """Read some regions from the files; with `verify`, returns the damaged ones.

    `memory_of(region)` returns a writable uint8 array of the region's size, or with `device` such a tensor on a CUDA
    device. `progress` is called with numbers of bytes, from any reader. Raises `CheckpointError` if a file ends early.
    """
    places = opened.places or []
    digests = opened.digests if verify else None
    targets = []
    total = sum(opened.plan.regions[region].nbytes for region in regions)
    limit = PIECE if device else REQUEST_MAX
    for region in sorted(regions, key=places.__getitem__):
        (file, offset), nbytes = places[region], opened.plan.regions[region].nbytes
        memory = _NOTHING if device else memory_of(region)
        is_direct = files.reads_directly(memory, file, offset)
        size = PIECE if device else CHUNK_DIRECT if is_direct else CHUNK
        is_remote = files.is_remote(file)
        targets.append(
            _Target(
                region, nbytes, file, offset, memory, Summer() if digests is not None else None, is_direct=is_direct,
                size=_request(nbytes, -(-total // readers), limit) if is_remote else size, request=is_remote,
                joins=files.joins(file),
            )
        )  # fmt: skip
    if not targets:
        return []
    runs = _cut(targets, readers, limit)
    turns = _Turns()

    def work_off(own: Any, lane: Lane | None) -> None:
        while not stopped() and (jobs := _next(own, runs)):
            read_jobs(jobs, lane)

    def work(number: int) -> None:
        own = runs[number] if number < len(runs) else None
        with contextlib.ExitStack() as stack:
            lane = None if lanes is None else stack.enter_context(lanes.lane())
            work_off(own, lane)

    def read_jobs(jobs: list[_Job], lane: Lane | None) -> None:
        file, places = jobs[0].target.file, [job.places for job in jobs]
        if lane is not None:
            memories = lane.take([(start, end - start) for start, end in places])
        else:
            memories = [job.target.slice(job.chunk) for job in jobs]
            for job, memory in zip(jobs, memories, strict=True):
                if job.target.request:
                    populate(memory)  # else the only thread that receives would wait for fresh pages
        names = [opened.plan.names(job.target.region) for job in jobs]
        if len(jobs) > 1:
            files.fill_together([(m, at, name) for m, (at, _), name in zip(memories, places, names, strict=True)], file)
        else:
            with jobs[0].lock:
                files.fill(memories[0], file, places[0][0], names[0])
        for job, memory in zip(jobs, memories, strict=True):
            if lane is None:
                job.target.arrived(job.chunk)
            else:
                lane.put(job.target.region, job.target.span(job.chunk)[0], memory)
                job.target.digest_in_turn(job.chunk, memory, turns)
        if progress is not None:
            progress(sum(memory.nbytes for memory in memories))

    lanes = Lanes(memory_of, regions, total) if device else None
    count = max(1, min(readers, sum(map(len, runs))))
    ahead = _ahead(runs)
    works = [partial(work, number) for number in range(count)]
    if ahead and count > 1:
        works.append(partial(_touch, ahead, runs))
    in_threads(works, len(works))
    if digests is None:
        for file in {target.file for target in targets}:
            files.check(file)
        return []
    return damaged(opened, {each.region: each.digest for each in targets})


def private(nbytes: int, offset: int = 0) -> Array:
    """Fresh memory. If it is large, in huge pages, and with the same position in its page as `offset`, so that direct
    I/O is possible; unless tensors would then not be aligned to a cache line."""
    return fresh(nbytes, 0 if offset % LINE else offset % PAGE) if nbytes >= _LARGE else np.empty(nbytes, np.uint8)


STRETCH: Final = 64 << 20
"""Bytes per mark. A mark for each read would take a tenth of the time; one per stretch costs nothing."""
_MOST_OPEN: Final = 256
"""Files of a checkpoint that are open at a time; of a process that may have few, a quarter of these."""
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class Files:
    """The open files of a checkpoint. Close it; what was mapped stays.

    stamps: of the files whose description was read; another file is a `Replaced`, a `CheckpointError`
    sealed: per file how to decrypt it, None for a plain one; empty if all are plain

    Files are opened at once, so that they may be renamed or deleted afterwards; of more than 256, some are opened when
    they are read, and those that were not read for longest are closed for them.
    """

    def __init__(
        self, paths: Sequence[Location], stamps: Sequence[Stamp], sealed: Sequence[SealedFile | None] = ()
    ) -> None:
        self.paths = list(paths)
        self._sealed = sealed or [None] * len(self.paths)
        self._stamps = list(stamps)
        self._most = min(_MOST_OPEN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._inputs: OrderedDict[int, InputFile] = OrderedDict()  # those that were read last come last
        self._direct: dict[int, OpenFile] = {}  # for direct I/O, opened at first use
        self._closed = False
        self._lock = threading.RLock()
        self._cached: dict[tuple[int, int], bool] = {}  # by file and number of a stretch; checked once
        self._refuses = [False] * len(paths)  # direct I/O; set by any reader, never reset
        track(self, Files._renew)
        try:
            for file in range(min(len(self.paths), self._most)):
                self._input(file)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, opened: Opened) -> Files:
        """The files of a checkpoint that was opened. Raises `FileNotFoundError`, `Replaced`."""
        return cls(opened.files, opened.stamps, opened.sealed)

    def _renew(self) -> None:
        """In a forked child: threads of the parent may have held the lock."""
        self._lock = threading.RLock()

    def _input(self, file: int) -> InputFile:
        """An open file. It stays open for as long as the caller refers to it, even if others take its place."""
        with self._lock:
            found = self._inputs.get(file)
            if found is not None:
                self._inputs.move_to_end(file)
                return found
            if self._closed:
                raise ValueError(f"{self.paths[file]} is closed")
            if len(self._inputs) == self._most:
                last, _ = self._inputs.popitem(last=False)
                self._direct.pop(last, None)
            opened = open_input(self.paths[file])
            check_same(self.paths[file], self._stamps[file], stamp_of(opened))
            self._inputs[file] = opened
            return opened

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        self._closed = True
        while self._inputs:
            _, opened = self._inputs.popitem()
            opened.drop()
            opened.close()
        while self._direct:
            self._direct.popitem()[1].close()

    def local(self, file: int) -> LocalFile:
        """An open file of this machine. Use its descriptor while you refer to it."""
        found = self._input(file)
        if not isinstance(found, LocalFile):
            raise TypeError(f"{self.paths[file]} is at a URL, and has no descriptor")
        return found

    def check(self, file: int) -> None:
        """Raise `CheckpointError` if a file at a URL has become another one: for what is not compared with a digest."""
        if self.is_remote(file):
            self._input(file).check()

    def is_remote(self, file: int) -> bool:
        """Whether it is read through the network, by few long requests."""
        return not isinstance(self.paths[file], Path)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, memory: Array, file: int, offset: int, names: str, *, alone: bool = False) -> None:
        """Fill uint8 memory with the bytes at `offset`. Callable from several threads at once.

        names: of the tensors, for the `CheckpointError` that is raised if the file ends too early, or if its bytes are
               not authentic.
        alone: the bytes around it will not be read soon
        """
        sealed = self._sealed[file]
        if sealed is not None:
            try:
                sealed.read(self._input(file), DATA, offset, memory)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {names}: {error}") from None
            return
        while len(memory):
            count = self._read(memory, file, offset, alone=alone)
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
        count = self._input(file).preadv(views, start)
        for memory, offset, names in parts:
            if offset + len(memory) > start + count:
                self.fill(memory, file, offset, names)  # which says that it is truncated

    def joins(self, file: int) -> bool:
        """Whether neighbours in the file are better read together: each read is a request."""
        return self.is_remote(file) and self._sealed[file] is None

    def _read(self, memory: Any, file: int, offset: int, *, alone: bool) -> int:
        """Read some of it; returns how many bytes, as `preadv`."""
        if self.reads_directly(memory, file, offset):
            lead = -offset % PAGE
            direct = self._direct.get(file)  # None if other files have just taken its place
            if lead:
                memory = memory[:lead]  # through the cache up to the next page, where direct I/O begins
            elif direct is not None:
                try:
                    return os.preadv(direct.fd, [memory[: len(memory) // PAGE * PAGE]], offset)
                except OSError:  # if it is a real error, the plain read raises it too
                    self._refuses[file] = True  # the descriptor stays open: another reader may be using it
        return self._input(file).preadv([memory], offset, alone=alone)

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
            local, found = self.local(file), self._cached.get((file, stretch))
            is_new, start = found is None, stretch * STRETCH
            at = (start + min(start + STRETCH, self._stamps[file].nbytes)) // 2
            if found is None:
                found = is_cached(local.fd, at)
            if not found and file not in self._direct:
                direct = _open_direct(local.fd)
                if direct is None:
                    self._refuses[file] = found = True
                else:
                    self._direct[file] = direct
            if not found and is_new:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(local.fd, at, 1, os.POSIX_FADV_WILLNEED)  # the page around it
            self._cached[file, stretch] = found
            return found


def _open_direct(fd: int) -> OpenFile | None:
    """Open the same file again for direct I/O, whatever has its path now; None if that is impossible."""
    if not _DIRECT:
        return None
    try:
        return open_file(f"/proc/self/fd/{fd}", os.O_RDONLY | _DIRECT)
    except OSError:
        return None
