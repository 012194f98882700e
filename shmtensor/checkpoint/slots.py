"""The slots between a trainer and its writing process: a work queue with rings for snapshots.

A snapshot is a `head` message (description of the plan and the options), one message per chunk and an `end`; `abandon`
takes one back. A chunk fills a slot of a ring of chunks; the other messages use a ring of small slots.

`Transfer` is the copy that a trainer waits for: the bytes of some chunks into their slots. Contiguous host memory is
copied by address, with as many threads of our own as torch would use. torch's own copy waits for all its threads after
each tensor, so that one busy core delays all of them every time; these threads are joined once, at the end. A state
larger than the caches is copied with non-temporal stores: slots are not read before the disk takes them. The rest
(views with gaps, device memory) is copied in the caller's thread, region after region.

`Offload` has the copies of one save from devices: on streams of the writer's own, each chunk published after its event.

    caller's stream   ... step |  save                                    | next step ... (ordered: after the wait)
                               '- event -> wait                 event --> wait
    writer's stream                         copy, copy | copy, copy |-----'
                                                chunk's event '-> publish

The writer's thread starts the copies and, if it needs room, waits for the first events; then `save` returns, and the
thread waits in the driver for the remaining events. The next save waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec import copies
from ..codec.copies import mover
from ..codec.numpy import Array, address_of
from ..cuda.runtime import device_of, runtime
from ..endpoints.base import SenderTraits
from ..endpoints.devices import Devices
from ..endpoints.loan import Loan
from ..endpoints.message import Message
from ..endpoints.recipients import Consumers
from ..endpoints.workqueue import Consumer, Producer
from ..errors import ArgumentError, CudaError, EndOfStream, ResourceError, RingFull, TimedOut
from ..memory.segment import PAGE as MEMORY_PAGE
from ..memory.segment import free_bytes, more_room, where
from ..options import format_bytes
from ..ring.layout import MAX_SLOT_BYTES, WORK_QUEUE, RingShape
from ..ring.pool import Pool
from ..ring.ring import Ring
from ..ring.writer import SlotRange
from .envelope import SEGMENT
from .formats import Layout
from .locations import PAGE
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
_DEVICE_CHUNK: Final = 256 << 20
"""Of a state on a device: `save` returns when all copies are started. To start those of a chunk took 0.26 ms beside an
H200, which copies 14 MB meanwhile."""
_MOST_CHUNKS: Final = 4000
_NOTHING: Final = np.empty(0, np.uint8)


def chunk_size(total: int, memory: int, *, on_device: bool = False) -> int:
    """Bytes of a chunk for states of about `total` bytes in `memory`: large for the disk, with several in flight."""
    usual = _DEVICE_CHUNK if on_device else _USUAL_CHUNK
    size = min(max(total // 8, memory // _MOST_CHUNKS, _LEAST_CHUNK), max(usual, memory // _MOST_CHUNKS))
    size = min(size, max(_LEAST_CHUNK, memory // 8))
    return -(-size // MEMORY_PAGE) * MEMORY_PAGE


class ChunkPool(Pool):
    """A ring of small slots, and rings of chunks that are added as snapshots need them, up to `max_bytes`."""

    __slots__ = ("_wanted", "chunk")

    chunk: int
    """Bytes of a chunk; 0 until the first state is known."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chunk = self._wanted = 0

    def _sizes(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Of the rings that such a message may use: the least and most bytes of a slot."""
        chunk = self.chunk
        return ((chunk, chunk),) if nbytes == chunk else ((0, max(0, chunk - 1)), (chunk + 1, MAX_SLOT_BYTES))

    def make_room(self, nbytes: int) -> None:
        large = [ring for ring in self.rings if nbytes <= ring.slots * ring.slot_bytes]
        if not any(least <= ring.slot_bytes <= most for ring in large for least, most in self._sizes(nbytes)):
            self._wanted = 1
            self.add(nbytes)

    def find(self, nbytes: int) -> SlotRange | None:
        return next(filter(None, (self._writer.acquire(nbytes, *sizes) for sizes in self._sizes(nbytes))), None)

    def has_room(self, nbytes: int) -> bool:
        return any(self._writer.has_room(nbytes, *sizes) for sizes in self._sizes(nbytes))

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
    _recipients: Consumers

    def __init__(self, channel: str, memory: int, *, whole_segments: bool = False, on_device: bool = False) -> None:
        """`whole_segments`: each chunk can be encrypted without its neighbours. `on_device`: states come from there."""
        self._whole_segments, self._on_device = whole_segments, on_device
        super().__init__(channel, slots=_MOST_CHUNKS, full="block", max_bytes=memory - _AROUND)

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
            pool.chunk = chunk_size(total, self._max_bytes or 0, on_device=self._on_device)
            if self._whole_segments:
                pool.chunk = max(1, pool.chunk // SEGMENT) * SEGMENT
        if head:
            pool.make_room(head)
        missing = -(-total // pool.chunk) - pool.free_chunks()
        if missing > 0 and not pool.provide(missing) and not pool.chunks():
            raise ResourceError(
                errno.ENOMEM,
                f"not even one chunk of {format_bytes(pool.chunk)} fits into memory="
                f"{format_bytes(self._max_bytes or 0)} and the {format_bytes(free_bytes())} that {where()} has "
                f"free: pass a larger memory=, or {more_room()}",
            )

    def fits(self, count: int) -> bool:
        """Whether so many chunks fit into the rings that `provide` has added."""
        return bool(self._run(lambda: count <= self._pool.chunks()))

    def may_fit(self, count: int) -> bool:
        """Whether so many would fit by `memory=`, if `/dev/shm` had the room."""
        return bool(self._run(lambda: count <= self._pool.chunks() + self._pool.possible()))

    def has_room(self, count: int) -> bool:
        """Whether so many chunks fit now, beside those in flight."""
        return bool(self._run(self._has_room_inside, count))

    def _has_room_inside(self, count: int) -> bool:
        self._recipients.drop_dead()
        return count <= self._pool.free_chunks()

    @property
    def memory(self) -> int:
        """Bytes of shared memory in use, at most the limit."""
        return self._pool.nbytes + _AROUND

    def send_small(
        self, kind: str, number: int, data: Any = _NOTHING, *, timeout: float, wake: bool = True, **more: Any
    ) -> None:
        """Send a head, end or abandon. Waits for a small slot as `lend` does for a chunk."""
        self._recipients.wakes = wake
        try:
            self.send(data, {"k": kind, "n": number, **more}, timeout=timeout)
        finally:
            self._recipients.wakes = True

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
        self._recipients.wakes = wake
        try:
            loan.send()
        finally:
            self._recipients.wakes = True

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
        if self._claims is not None:
            self._claims.scan_wanted = True
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


def marks(plan: Plan) -> dict[int, Any]:
    """Record an event on the current stream of each device of a plan. Call it in the caller's thread."""
    found = {}
    for number in map(runtime().device, plan.devices):
        event = found[number] = runtime().new_event(number)
        runtime().record(event, runtime().current_stream(number))
    return found


class Offload:
    """The copies of one save. It keeps the state alive until the last of them is complete.

    devices, rings: of the endpoint that lends the slots
    after:          the events of `marks`, which the copies wait for
    """

    def __init__(self, plan: Plan, devices: Devices, rings: list[Ring], after: dict[int, Any]) -> None:
        self._cuda = runtime()
        numbers = [self._cuda.device(device) for device in plan.devices]
        self._streams = {device: devices.stream(device) for device in numbers}
        self._parts = {device: devices.parts(rings, device) for device in numbers}
        self._plan: Plan | None = plan
        self._pending: collections.deque[tuple[Loan, list[Any]]] = collections.deque()
        self._last: dict[int, Any] = {}
        for device, stream in self._streams.items():  # after the caller's work on the state
            self._cuda.stream_waits(stream, after[device])

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A context manager in which work, such as gathering views with gaps, runs on the writer's streams."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(self._cuda.on(stream))
            yield

    def copy(self, target: Array, source: Any) -> None:
        """Copy bytes into a slot: from host memory now, from a device on its stream."""
        if isinstance(source, np.ndarray) or device_of(source) < 0:
            copy(target, source)
        else:
            device, done = device_of(source), 0
            address = target.__array_interface__["data"][0]
            with self._cuda.on(self._streams[device]):
                for buffer, offset, nbytes in self._parts[device](address, len(target)) or ():
                    host = sys.modules["torch"].from_numpy(np.ndarray((nbytes,), np.uint8, buffer, offset))
                    self._cuda.copy(host, source[done : done + nbytes])
                    done += nbytes

    def note(self, loan: Loan) -> None:
        """Note that all copies into this slot are started."""
        # crash: offload.started
        for device, stream in self._streams.items():
            self._last[device] = self._cuda.new_event(device, sleeps=True)
            self._cuda.record(self._last[device], stream)
        self._pending.append((loan, list(self._last.values())))

    def hold(self, loan: Loan) -> None:
        """Keep a slot whose copies could not all be started, for `abandon`."""
        self._pending.append((loan, []))

    @property
    def pending(self) -> bool:
        """Whether there are slots whose copies may not be complete."""
        return bool(self._pending)

    def complete(self, *, wait: bool) -> Iterator[Loan]:
        """Slots whose copies are complete, oldest first; with `wait`, all of them. `CudaError` if a copy has failed."""
        while self._pending:
            loan, events = self._pending[0]
            for event in events:
                if wait:
                    self._cuda.wait(event)
                elif not self._cuda.is_done(event):
                    return
            # crash: offload.copied
            self._pending.popleft()
            yield loan

    def follow(self, stream: Any = None) -> None:
        """Make a stream of the caller wait for the copies; None: the current one of each device."""
        for device, event in self._last.items():
            self._cuda.stream_waits(self._cuda.current_stream(device) if stream is None else stream, event)

    def abandon(self) -> None:
        """Free the slots without sending them, once no device writes into them."""
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):  # a device that failed writes nothing
                self._cuda.synchronize(stream)
        while self._pending:
            self._pending.popleft()[0].discard()
        self.forget()

    def forget(self) -> None:
        """Drop the reference to the state, when everything is copied."""
        self._plan = None
