"""The copy that a trainer waits for: the bytes of some chunks into their slots.

Host memory that is one run is moved by address, with as many threads of our own as torch would use. torch's own copy
waits at a barrier of all its threads after each tensor, so that a core that is busy with something else holds up all
of them, every time: these threads meet once, in the end. A state that is larger than the caches goes past them: what
is in a slot is not read before the disk takes it. Everything else (views with gaps, device memory) is copied by the
caller, region after region.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..views.moves import mover
from ..views.numpy import Array, address_of
from .chunks import Chunk
from .copying import Regions, copy
from .limits import PAGE
from .plan import Plan

ALONE: Final = 4 << 20
"""Bytes up to which another thread costs more than it saves."""
_MOST_THREADS: Final = 16

Move = tuple[int, int, int]  # (to, from, bytes)


class Transfer:
    """The copy of one plan, any number of chunks at a time."""

    def __init__(self, plan: Plan, copy: Callable[[Array, Any], None] = copy) -> None:
        """`copy(target, source)` is for what is no run of host memory."""
        self._plan, self._copy = plan, copy
        self._addresses = [region.address for region in plan.regions]
        self._source = Regions(plan)

    def fill(self, chunks: Sequence[Chunk], slots: Sequence[Array]) -> None:
        """Write chunks into slots (uint8, at least their size), up to the end of the page."""
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

    Each thread keeps the `owners` alive until it is done, also if an exception ends the wait for it; the exception's
    own frames do not.
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
            except RuntimeError:  # no more threads may be made
                _move(move, share)
                continue
            helpers.append(helper)
        del owners
        _move(move, first)
    finally:
        for helper in helpers:
            helper.join()


def _add(moves: list[Move], to: int, source: int, nbytes: int) -> None:
    """Note a run; one that goes on where the last one ended is part of that."""
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
    """The same bytes in lists of `size` bytes each but for the last."""
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
    """As many as torch uses, which the user may have set; without torch one per core, at most 4."""
    torch = sys.modules.get("torch")
    if torch is None:
        return min(4, len(os.sched_getaffinity(0)))
    return min(_MOST_THREADS, int(torch.get_num_threads()))
