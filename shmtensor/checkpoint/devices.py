"""Load files onto a CUDA device through a few pinned buffers, so that host memory never has the whole checkpoint.

    file --read, decrypt, digest--> | half 0 | half 1 |  --copies on a stream--> tensors on the device
                                       a lane, one per reading thread

A lane has two halves. While the copies out of one are in progress, the other is filled; before a half is filled again,
the lane waits for the event after its copies. So a load takes `readers * 2 * PIECE` bytes of host memory, however large
the checkpoint is, and a piece is digested where it lies before it is copied.

Sparse, quantized and nested tensors, parts of tensors, and files that only torch can read are made in host memory, one
after the other, and then copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..codec.libraries import device_views, import_torch
from ..codec.numpy import Array
from ..cuda.copies import Pinning
from ..cuda.runtime import device_of, runtime
from ..errors import ArgumentError, ArgumentTypeError, CudaError
from ..memory.mapped_file import not_inherited
from .locations import DIRECT_MIN, PAGE

PIECE: Final = 8 << 20
"""Bytes that are read at once on their way to a device, at most."""
_SLACK: Final = 32 * PAGE  # pieces that direct I/O may read begin at the same place of a page as in the file


def check_device(device: Any) -> int | None:
    """The number of the CUDA device that `device=` names; None for the CPU.

    Raises `ArgumentTypeError` or `ArgumentError` for what names neither, `CudaError` where CUDA cannot be used.
    """
    if device is None:
        return None
    torch = import_torch()
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise ArgumentTypeError(f'device={device!r:.80}: pass "cpu", "cuda", "cuda:<number>", or a torch.device')
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"device={device!r:.80}: {str(error).partition(chr(10))[0]}") from None
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ArgumentError(
            f'device={device!r:.80}: checkpoints are loaded into host memory ("cpu") or onto a CUDA device ("cuda", '
            '"cuda:<number>"): load it there, and move it with .to()'
        )
    return int(runtime().device(device))


class Blocks:
    """Memory on a device for some regions of a plan.

    Allocated for the caller's current stream, which nothing that `Lanes` or `fill` copies overtakes.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._cuda = runtime()
        self._stream = self._cuda.current_stream(device)
        self._blocks: dict[int, Any] = {}

    def __getitem__(self, region: int) -> Any:
        return self._blocks[region]

    def __contains__(self, region: int) -> bool:
        return region in self._blocks

    def add(self, region: int, nbytes: int) -> None:
        """Allocate the memory of a region. `CudaError` if there is not enough."""
        with self._cuda.on(self._stream):
            self._blocks[region] = self._cuda.empty((nbytes,), import_torch().uint8, self.device)

    def fill(self, region: int, data: Array) -> None:
        """The memory of a region whose bytes are in host memory, copied when this returns."""
        self.add(region, data.nbytes)
        data = data if data.flags.writeable else data.copy()  # torch warns about memory that is read-only
        with self._cuda.on(self._stream):
            self._cuda.copy(self._blocks[region], import_torch().from_numpy(data))
        self._cuda.synchronize(self._stream)

    def empty(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A tensor without elements."""
        with self._cuda.on(self._stream):
            return self._cuda.empty(shape, dtype, self.device)

    def view(self, region: int, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """A tensor over the memory of a region; offset in bytes, strides in elements."""
        return self._cuda.view(self._blocks[region], offset, dtype, shape, strides)

    def move(self, tensor: Any) -> Any:
        """A tensor of host memory on the device, copied when this returns."""
        with self._cuda.on(self._stream):
            moved = self._cuda.move(tensor, self.device)
        self._cuda.synchronize(self._stream)  # what it was made of may be freed now
        return moved


class Lanes:
    """The pinned buffers of one load, and the copies out of them.

    memory_of: the memory on a device of each region
    nbytes:    of the whole load: buffers are not made larger than it
    """

    def __init__(self, memory_of: Callable[[int], Any], regions: Iterable[int], nbytes: int) -> None:
        cuda = runtime()
        self.memory_of = memory_of
        self.half = -(-min(PIECE, nbytes) // PAGE) * PAGE + _SLACK
        self.ready: dict[int, Any] = {}  # the caller's work on each device, which no copy may overtake
        for device in {device_of(memory_of(region)) for region in regions}:
            self.ready[device] = cuda.new_event(device)
            cuda.record(self.ready[device], cuda.current_stream(device))

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for one thread. On leaving, all its copies are complete."""
        lane = Lane(self)
        try:
            yield lane
            lane.finish()
        finally:
            lane.close()


class Lane:
    """Two halves of pinned memory, used in turn by one thread."""

    def __init__(self, lanes: Lanes) -> None:
        self._cuda = runtime()
        self._lanes = lanes
        self._buffer = not_inherited(2 * lanes.half)
        self._memory = np.frombuffer(self._buffer, np.uint8)
        address = self._memory.__array_interface__["data"][0]
        self._pinning = Pinning(self._buffer, address, writable=True)
        self._streams: dict[int, Any] = {}
        for device, ready in lanes.ready.items():
            self._pinning.parts(self._buffer, 0, len(self._memory), device)  # pinned now, all of it
            self._streams[device] = self._cuda.new_stream(device)
            self._cuda.stream_waits(self._streams[device], ready)
        self._half = self._at = 0
        self._copied: list[dict[int, Any]] = [{}, {}]  # per half, the event after its copies on each device

    def take(self, wanted: Sequence[tuple[int, int]]) -> list[Array]:
        """Memory for some (offset in the file, bytes), `PIECE` bytes together at most; waits until it is free.

        It is valid until the next call.
        """
        starts, end = self._places(self._at, wanted)
        if end > self._lanes.half:
            self._half, self._at = 1 - self._half, 0
            events, self._copied[self._half] = self._copied[self._half], {}
            for event in events.values():
                self._cuda.wait(event)
            starts, end = self._places(0, wanted)
        self._at = end
        base = self._half * self._lanes.half
        return [
            self._memory[base + start : base + start + nbytes]
            for start, (_, nbytes) in zip(starts, wanted, strict=True)
        ]

    @staticmethod
    def _places(at: int, wanted: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
        starts = []
        for offset, nbytes in wanted:
            if nbytes >= DIRECT_MIN:
                at = -(-at // PAGE) * PAGE + offset % PAGE
            starts.append(at)
            at += nbytes
        return starts, at

    def put(self, region: int, start: int, data: Array) -> None:
        """Start to copy what was read into memory that `take` returned to byte `start` of a region."""
        block = self._lanes.memory_of(region)
        device = device_of(block)
        stream = self._streams[device]
        with self._cuda.on(stream):
            self._cuda.copy(block[start : start + len(data)], import_torch().from_numpy(data))
        event = self._copied[self._half].get(device)
        if event is None:
            event = self._copied[self._half][device] = self._cuda.new_event(device, sleeps=True)
        self._cuda.record(event, stream)

    def finish(self) -> None:
        """Wait for all copies. `CudaError` if one failed."""
        for events in self._copied:
            for event in events.values():
                self._cuda.wait(event)

    def close(self) -> None:
        """Unpin the memory, when no copy reads it any more."""
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):  # a device that failed reads nothing
                self._cuda.synchronize(stream)
        self._pinning.release()


def move_state(state: Any, device: int) -> Any:
    """A state as another library has loaded it, with its tensors on a device; those that share memory share it there.

    Tensors in dicts, lists, tuples, namedtuples and sets are moved, and a container that occurs twice is made once.
    Objects of other classes are kept as they are.
    """
    torch = import_torch()
    leaves: dict[int, Any] = {}

    def note(leaf: Any) -> Any:
        leaves[id(leaf)] = leaf
        return leaf

    _with_tensors(state, note, {})
    cuda, held = runtime(), list[Any]()
    stream = cuda.current_stream(device)
    try:
        with cuda.on(stream):
            moved, _ = device_views().copy_out(
                [leaf.detach() for leaf in leaves.values()], device, lambda *_: None, held
            )
    finally:
        cuda.synchronize(stream)  # `held` is read until then
    found = {}
    for (number, leaf), other in zip(leaves.items(), moved, strict=True):
        if isinstance(leaf, torch.nn.Parameter):
            other = torch.nn.Parameter(other, leaf.requires_grad)
        elif leaf.requires_grad:
            other = other.requires_grad_()
        found[number] = other
    return _with_tensors(state, lambda leaf: found[id(leaf)], {})


def _with_tensors(value: Any, function: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """A state with `function` applied to its tensors. done: what has been made of each object, by its `id`."""
    if id(value) in done:
        return done[id(value)]
    made = value
    if isinstance(value, import_torch().Tensor):
        made = function(value)
    elif isinstance(value, dict):
        made = copy.copy(value)  # a dict of the same class, with torch's `_metadata`
        for key, child in value.items():
            made[key] = _with_tensors(child, function, done)
    else:
        make = type(value) if type(value) in (set, frozenset) else sequence_of(type(value))
        if make is not None:
            made = make([_with_tensors(child, function, done) for child in value])
    done[id(value)] = made
    return made


def sequence_of(kind: type[Any]) -> Callable[[list[Any]], Any] | None:
    """What makes a list, tuple or namedtuple of its items; None for other classes."""
    if kind in (list, tuple):
        return kind
    make: Callable[[list[Any]], Any] | None = getattr(kind, "_make", None) if issubclass(kind, tuple) else None
    return make
