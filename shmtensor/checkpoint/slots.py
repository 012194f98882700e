"""The slots between a trainer and its writing process: a work queue with rings for snapshots.

A snapshot is a `head` message (description of the plan and the options), one message per chunk and an `end`; `abandon`
takes one back. A chunk fills a slot of a ring of chunks; the other messages use a ring of small slots.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..channel.membership import Member
from ..cuda.runtime import runtime
from ..endpoints.consumer import Consumer
from ..endpoints.loan import Loan
from ..endpoints.message import Message
from ..endpoints.producer import Producer
from ..endpoints.traits import SenderTraits
from ..errors import ArgumentError, EndOfStream, ResourceError, RingFull, TimedOut
from ..memory.segment import PAGE, free_bytes
from ..options import format_bytes
from ..ring.layout import WORK_QUEUE, RingShape
from ..ring.pool import Pool
from ..ring.ring import Ring
from ..ring.writer import SlotRange
from .envelope import SEGMENT
from .offload import Offload
from .plan import Plan

HEAD: Final = "head"
CHUNK: Final = "chunk"
END: Final = "end"
ABANDON: Final = "abandon"

LEAST_MEMORY: Final = 1 << 20
_AROUND: Final = 384 << 10
"""Bytes of shared memory besides the rings: the tables of members and messages of both channels."""
_SMALL_SLOT: Final = 4096
_SMALL_SLOTS: Final = 64
_LEAST_CHUNK: Final = 64 << 10
_USUAL_CHUNK: Final = 16 << 20
_MOST_CHUNKS: Final = 4000
_NOTHING: Final = np.empty(0, np.uint8)


def chunk_size(total: int, memory: int) -> int:
    """Bytes of a chunk for states of about `total` bytes in `memory`: large for the disk, with several in flight."""
    size = min(max(total // 8, memory // _MOST_CHUNKS, _LEAST_CHUNK), max(_USUAL_CHUNK, memory // _MOST_CHUNKS))
    size = min(size, max(_LEAST_CHUNK, memory // 8))
    return -(-size // PAGE) * PAGE


class ChunkPool(Pool):
    """A ring of small slots, and rings of chunks that are added as snapshots need them, up to `max_bytes`."""

    __slots__ = ("_wanted", "chunk")

    chunk: int
    """Bytes of a chunk; 0 until the first state is known."""

    def setup(self) -> None:
        self.chunk = self._wanted = 0

    def _fits(self, ring: Ring, nbytes: int) -> bool:
        return (ring.slot_bytes == self.chunk) == (nbytes == self.chunk) and nbytes <= ring.slots * ring.slot_bytes

    def make_room(self, nbytes: int) -> None:
        if not any(self._fits(ring, nbytes) for ring in self.rings):
            self._wanted = 1
            self.add(nbytes)

    def find(self, nbytes: int) -> SlotRange | None:
        fitting = (ring.index for ring in self.rings if self._fits(ring, nbytes))
        return next(filter(None, (self._writer.acquire(nbytes, index) for index in fitting)), None)

    def has_room(self, nbytes: int) -> bool:
        return any(self._writer.has_room(nbytes, ring.index) for ring in self.rings if self._fits(ring, nbytes))

    def chunks(self) -> int:
        """Slots for chunks."""
        return sum(ring.slots for ring in self.rings if ring.slot_bytes == self.chunk)

    def free_chunks(self) -> int:
        """Free slots for chunks."""
        return sum(self._writer.free_slots(ring.index) for ring in self.rings if ring.slot_bytes == self.chunk)

    def possible(self) -> int:
        """How many more slots for chunks `max_bytes` allows."""
        left = (self._max_bytes or 0) - self.nbytes
        count = min(max(0, left) // self.chunk, self._sequences.mask - self.slots)
        while count and self._chunk_shape(count).nbytes > left:
            count -= 1
        return count

    def provide(self, count: int) -> int:
        """Add a ring of `count` chunks, or of as many as `max_bytes` and `/dev/shm` allow; returns how many."""
        self._wanted = min(count, self.possible())
        while self._wanted > 0:
            if self._chunk_shape(self._wanted).nbytes <= free_bytes():
                self.add(self.chunk)
                return self._wanted
            self._wanted //= 2
        return 0

    def _chunk_shape(self, count: int) -> RingShape:
        return RingShape(self._kind, count, self.chunk, self._capacity)

    def shape(self, nbytes: int) -> RingShape:
        if nbytes == self.chunk:
            return self._chunk_shape(self._wanted)
        slots = max(_SMALL_SLOTS, 4 * -(-nbytes // _SMALL_SLOT))
        return RingShape(self._kind, slots, _SMALL_SLOT, self._capacity)


class Stager(Producer):
    """The trainer's end. `memory` limits all shared memory of a writer, both channels together."""

    _traits = SenderTraits(WORK_QUEUE, pool=ChunkPool, widest=-1)  # the pool chooses a ring
    _pool: ChunkPool

    def __init__(self, channel: str, memory: int, *, whole_segments: bool = False) -> None:
        """`whole_segments`: each chunk can be encrypted without its neighbours."""
        self._wakes, self._whole_segments = True, whole_segments
        super().__init__(channel, slots=_MOST_CHUNKS, full="block", max_bytes=memory - _AROUND)

    def _prepare(self, member: Member) -> None:
        super()._prepare(member)
        self._pool.setup()

    @property
    def chunk(self) -> int:
        """Bytes of a chunk."""
        return self._pool.chunk

    def provide(self, head: int, total: int) -> None:
        """Add rings for a head of `head` bytes and chunks of `total` bytes, as far as `max_bytes` allows. Called before
        each snapshot. `ResourceError` if not even one chunk fits.
        """
        self._run(self._provide_inside, head, total)

    def _provide_inside(self, head: int, total: int) -> None:
        if self._state or self._stop:
            self._refuse()
        pool = self._pool
        if not pool.chunk:
            pool.chunk = chunk_size(total, self._max_bytes or 0)
            if self._whole_segments:
                pool.chunk = max(1, pool.chunk // SEGMENT) * SEGMENT
        if head:
            pool.make_room(head)
        missing = -(-total // pool.chunk) - pool.free_chunks()
        if missing > 0 and not pool.provide(missing) and not pool.chunks():
            raise ResourceError(
                errno.ENOMEM,
                f"not even one chunk of {format_bytes(pool.chunk)} fits into memory="
                f"{format_bytes(self._max_bytes or 0)} and the {format_bytes(free_bytes())} that /dev/shm has "
                "free: pass a larger memory=, or give /dev/shm more room (containers: --shm-size)",
            )

    def fits(self, count: int) -> bool:
        """Whether so many chunks fit into the rings that `provide` has added."""
        return bool(self._run(lambda: count <= self._pool.chunks()))

    def has_room(self, count: int) -> bool:
        """Whether so many chunks fit now, beside those in flight."""
        return bool(self._run(self._has_room_inside, count))

    def _has_room_inside(self, count: int) -> bool:
        self._drop_dead()
        return count <= self._pool.free_chunks()

    @property
    def memory(self) -> int:
        """Bytes of shared memory in use, at most the limit."""
        return self._pool.nbytes + _AROUND

    def send_small(
        self, kind: str, number: int, data: Any = _NOTHING, *, timeout: float, wake: bool = True, **more: Any
    ) -> None:
        """Send a head, end or abandon. Waits for a small slot as `lend` does for a chunk."""
        self._wakes = wake
        try:
            self.send(data, {"k": kind, "n": number, **more}, timeout=timeout)
        finally:
            self._wakes = True

    def lend(self, number: int, index: int, *, timeout: float) -> Loan:
        """A slot for a chunk; `RingFull` if none is free in time."""
        return self.loan((self._pool.chunk,), np.uint8, {"k": CHUNK, "n": number, "i": index}, timeout=timeout)

    def lend_more(self, number: int, indices: Sequence[int]) -> list[Loan]:
        """Slots for these chunks, in order, for as many as are free now."""
        loans: list[Loan] = []
        try:
            for index in indices:
                more = {"k": CHUNK, "n": number, "i": index}
                loans.append(self.loan((self._pool.chunk,), np.uint8, more, timeout=0))
        except RingFull:
            pass
        return loans

    def publish(self, loan: Loan, *, wake: bool) -> None:
        """Publish a chunk. With `wake`, wake the writing process."""
        self._wakes = wake
        try:
            loan.send()
        finally:
            self._wakes = True

    def offload(self, plan: Plan, after: dict[int, Any]) -> Offload:
        """The copies of a state from its devices into slots of this writer, after these events."""
        return Offload(plan, self._devices, list(self._rings), after)

    def pin(self, devices: list[str]) -> None:
        """Pin all slots now, for copies from some devices, instead of at their first use."""
        for device in devices:
            self._run(self._pin_inside, device)

    def _pin_inside(self, device: str) -> None:
        parts = self._devices.parts(list(self._rings), runtime().device(device))
        for ring in self._rings:
            parts(ring.address, ring.buffer.nbytes)

    def _wake(self, ring: Ring, slot: int) -> None:
        if self._wakes:
            super()._wake(ring, slot)


class Taker(Consumer):
    """The writing process's end. It holds any number of messages, and releases each when it is done with it."""

    _traits = replace(Consumer._traits, counts_lost=False)

    def __init__(self, channel: str) -> None:
        self.over = False
        """Whether the trainer has closed or died, and everything is received."""
        super().__init__(channel, acknowledge="release", max_attempts=250)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other member in the channel."""
        return not self._member.control.anybody_alive()

    def take(self, timeout: float) -> list[Message]:
        """Receive all messages that are there; if there are none, wait for the first one."""
        taken: list[Message] = []
        try:
            while True:
                taken.append(self.recv(timeout=0 if taken else timeout))
        except TimedOut:
            pass
        except EndOfStream:
            self.over = not taken and not self._take_left(taken)
        return taken

    def take_first(self) -> list[Message]:
        """Receive all messages at the start of the process, also those that an earlier process had taken."""
        taken = self.take(0)
        self._take_left(taken)
        return taken

    def _take_left(self, taken: list[Message]) -> bool:
        """Receive what an earlier process had claimed, which only a scan of all slots finds."""
        self._scan_wanted = True
        try:
            while True:
                taken.append(self.recv(timeout=0))
        except (TimedOut, EndOfStream):
            return bool(taken)


def check_memory(memory: int) -> int:
    """Check the limit of shared memory; `ArgumentError` if it is too small."""
    if memory < LEAST_MEMORY:
        raise ArgumentError(f"memory={memory}: at least {format_bytes(LEAST_MEMORY)} are needed")
    return memory
