"""The copy that a trainer waits for: the bytes of some chunks into their slots.

Contiguous host memory is copied by address, with as many threads of our own as torch would use. torch's own copy waits
for all its threads after each tensor, so that one busy core delays all of them every time; these threads are joined
once, at the end. A state larger than the caches is copied with non-temporal stores: slots are not read before the disk
takes them. The rest (views with gaps, device memory) is copied in the caller's thread, region after region.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec import copies
from ..codec.copies import mover
from ..codec.numpy import Array, address_of
from .formats import Layout
from .limits import PAGE
from .plan import Plan

ALONE: Final = 4 << 20
"""Bytes up to which one thread copies alone: another costs more than it saves."""
_MOST_THREADS: Final = 16

Move = tuple[int, int, int]  # (to, from, bytes)


class Run(NamedTuple):
    """Bytes of a chunk: of a region (from `start` in it), or `data`, or zeros."""

    at: int
    nbytes: int
    region: int
    start: int
    data: bytes | None


class Chunk:
    """One slot's worth of one file. `index` counts over all files.

        file     |-header-|---- region 2 ----|-- region 0 --|pad|------ region 1 ------|
        chunks   |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|- 5 -|   offsets: multiples of the size

    Trainer and writing process cut a layout in the same way, so that the index of a chunk identifies its bytes.
    """

    __slots__ = ("file", "index", "nbytes", "offset", "runs")

    def __init__(self, index: int, file: int, offset: int) -> None:
        self.index, self.file, self.offset, self.nbytes = index, file, offset, 0
        self.runs: list[Run] = []


def cut(layout: Layout, size: int) -> list[Chunk]:
    """All chunks of a layout: `size` bytes each, a multiple of the page size, but for the last one of a file."""
    chunks: list[Chunk] = []
    for file in range(len(layout.files)):
        chunks += _cut_file(layout, file, size, len(chunks))
    return chunks


def _cut_file(layout: Layout, file: int, size: int, first: int) -> Iterator[Chunk]:
    chunk = Chunk(first, file, 0)
    for piece in layout.pieces(file):
        done = 0
        while done < piece.nbytes:
            if chunk.nbytes == size:
                yield chunk
                chunk = Chunk(chunk.index + 1, file, chunk.offset + size)
            count = min(piece.nbytes - done, size - chunk.nbytes)
            data = None if piece.data is None else piece.data[done : done + count]
            chunk.runs.append(Run(chunk.nbytes, count, piece.region, piece.start + done, data))
            chunk.nbytes += count
            done += count
    if chunk.nbytes:
        yield chunk


class Regions:
    """The bytes of a plan's regions. Keeps only the last: in a layout they follow each other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._region = -1
        self._bytes: Any = None

    def __call__(self, region: int) -> Any:
        if region != self._region:
            self._bytes = None  # before the next one: both may be copies
            self._bytes = self._plan.regions[region].bytes()
            self._region = region
        return self._bytes


def copy(target: Array, source: Any) -> None:
    """Copy bytes into a slot, with torch's threads if it is large, or from a device other than CUDA."""
    if isinstance(source, np.ndarray):
        torch = sys.modules.get("torch")
        if torch is None or len(target) < copies.LARGE or not source.flags.writeable:
            target[:] = source
            return
        source = torch.from_numpy(source)
    else:
        torch = sys.modules["torch"]
    torch.from_numpy(target).copy_(source)


class Transfer:
    """The copy of one plan, any number of chunks at a time."""

    def __init__(self, plan: Plan, copy: Callable[[Array, Any], None] = copy) -> None:
        """`copy(target, source)` copies what is not contiguous host memory."""
        self._plan, self._copy = plan, copy
        self._addresses = [region.address for region in plan.regions]
        self._source = Regions(plan)

    def fill(self, chunks: Sequence[Chunk], slots: Sequence[Array]) -> None:
        """Write chunks into slots (uint8, at least their size), with zeros up to the end of the page."""
        moves: list[Move] = []
        for chunk, slot in zip(chunks, slots, strict=True):
            base = address_of(slot)
            for at, nbytes, region, start, data in chunk.runs:
                address = self._addresses[region] if region >= 0 else 0
                if address:
                    _add(moves, base + at, address + start, nbytes)
                elif region >= 0:
                    self._copy(slot[at : at + nbytes], self._source(region)[start : start + nbytes])
                else:
                    slot[at : at + nbytes] = 0 if data is None else np.frombuffer(data, np.uint8)
            slot[chunk.nbytes : -(-chunk.nbytes // PAGE) * PAGE] = 0
        move_all(moves, (self._plan, *slots))


def move_all(moves: Sequence[Move], owners: object) -> None:
    """Copy runs of host memory.

    Each thread keeps `owners` alive until it is done, even if an exception ends the wait for it; the frames of the
    exception's traceback do not.
    """
    total = sum(nbytes for _, _, nbytes in moves)
    count = _threads() if total > ALONE else 1
    move = mover(total)
    first, *rest = _shares(moves, -(-total // count)) if count > 1 else [moves]
    helpers = []
    try:
        for share in rest:
            helper = threading.Thread(target=_move, args=(move, share, owners), name="shmtensor-copy", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads can be started
                _move(move, share)
                continue
            helpers.append(helper)
        del owners
        _move(move, first)
    finally:
        for helper in helpers:
            helper.join()


def _add(moves: list[Move], to: int, source: int, nbytes: int) -> None:
    """Add a run, merged with the last one if it continues it."""
    if moves:
        last_to, last_source, last = moves[-1]
        if (last_to + last, last_source + last) == (to, source):
            to, source, nbytes = last_to, last_source, last + nbytes
            del moves[-1]
    moves.append((to, source, nbytes))


def _move(move: Callable[[int, int, int], object], moves: Sequence[Move], owners: object = None) -> None:
    for to, source, nbytes in moves:
        move(to, source, nbytes)


def _shares(moves: Sequence[Move], size: int) -> Iterator[list[Move]]:
    """The same bytes in lists of `size` bytes each, but for the last."""
    share: list[Move] = []
    room = size
    for to, source, nbytes in moves:
        while nbytes >= room:
            yield [*share, (to, source, room)]
            to, source, nbytes = to + room, source + room, nbytes - room
            share, room = [], size
        if nbytes:
            share.append((to, source, nbytes))
            room -= nbytes
    if share:
        yield share


def _threads() -> int:
    """The number of threads: torch's, which the user may have set; without torch one per core, at most 4."""
    torch = sys.modules.get("torch")
    if torch is None:
        return min(4, len(os.sched_getaffinity(0)))
    return min(_MOST_THREADS, int(torch.get_num_threads()))
