"""A stand-in for CUDA that works with host memory, late, and that notices what a real device would suffer in silence.

`StandIn` has the methods of `shmtensor.cuda.runtime.Runtime`. "Device" tensors are `DeviceTensor`s. Streams are queues
whose operations run late: when the host waits, when an event was asked for `polls` times, or when a test says so, in
any order that streams and events allow. So what is published, freed or reused too early is seen with wrong bytes.

What breaks a rule of CUDA silently is a *violation*: the `standin` fixture fails the test for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from shmtensor.cuda import keeper
from shmtensor.cuda.runtime import HANDLE_BYTES, Runtime, failure
from shmtensor.errors import ArgumentError

from ..waiting import wait_until

PAGE = mmap.PAGESIZE
GARBAGE = 0xA5  # what new device memory holds
_numbers = itertools.count()


class DeviceTensor(torch.Tensor):
    """A tensor that says that it lies on device 0, and so do its views."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


class Stream:
    """Operations in order: functions, events to record, and (event, count) to wait for."""

    def __init__(self, device: int, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[Any] = deque()

    def __repr__(self) -> str:
        return f"<Stream {self.name}, {len(self.queue)} waiting>"


class Event:
    """How often it was recorded, and how many of these have happened. Two words, shared with other processes."""

    def __init__(self, path: str | None = None, *, create: bool = False) -> None:
        self.path, self.polls, self.error = path, 0, None
        self.stream: Stream | None = None
        self.mine = create or path is None
        if path is None:
            self.words: Any = [0, 0]
        else:
            with open(path, "w+b" if create else "r+b") as file:
                if create:
                    file.truncate(PAGE)
                self.words = memoryview(mmap.mmap(file.fileno(), PAGE)).cast("Q")

    @property
    def happened(self) -> bool:
        return self.words[1] >= self.words[0]

    def __del__(self) -> None:
        if self.path is not None and self.mine:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class StandIn:
    """See the module. `polls`: how often an event is asked for before it happens; None: only waiting makes it."""

    def __init__(self, *, polls: int | None = 2, devices: int = 1, read_only: bool = False) -> None:
        self.pid, self.polls, self.devices, self.read_only = os.getpid(), polls, devices, read_only
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.defaults = [self._stream(device, f"default {device}") for device in range(devices)]
        self.here = threading.local()
        self.registered: dict[int, int] = {}  # address -> bytes
        self.flying: list[tuple[int, int]] = []  # host ranges (address, bytes) of copies that have not run
        self.device_memory: dict[int, tuple[int, str, Any]] = {}  # address -> bytes, path, map
        self.opened: dict[int, tuple[int, str, Any]] = {}
        self.violations: list[str] = []
        self.pinned_copies = self.pageable_copies = self.registrations = self.host_waits = 0
        # failures to order: a CUDA error's number
        self.refuse_registration = 0
        self.refuse_memory = 0
        self.fail_copies = 0
        self.refuse_read_only = 0
        self.capturing: set[Stream] = set()  # streams of which a CUDA graph is being captured

    # --- for tests

    def tensor(self, values: Any) -> DeviceTensor:
        """A tensor on the device, there at once."""
        return torch.as_tensor(values).clone().as_subclass(DeviceTensor)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a device tensor holds now, without waiting for anything."""
        return tensor.detach().as_subclass(torch.Tensor).clone()

    def enqueue(self, function: Any, stream: Stream | None = None) -> None:
        """Work for a stream (the current one): a kernel, so to speak."""
        self._put(stream or self.current_stream(0), function)

    def run_all(self) -> None:
        """Let the device do everything that can be done."""
        with self.lock:
            while any(self._step(stream) for stream in list(self.streams)):
                pass

    @property
    def waiting(self) -> int:
        """Operations that have not run."""
        return sum(len(stream.queue) for stream in self.streams)

    def check(self) -> None:
        """Fail on violations, and on what is left registered though it is not mapped any more."""
        for address, nbytes in self.registered.items():
            if not _mapped(address, nbytes):
                self.violations.append(f"{address:#x} was unmapped while it was registered")
        assert not self.violations, self.violations

    # --- devices

    def device_count(self) -> int:
        return self.devices

    def device(self, device: Any) -> int:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type != "cuda":
            raise ArgumentError(f'device={device!r} is no CUDA device: pass "cuda" or "cuda:<number>"')
        index = found.index or 0
        if index >= self.devices:
            raise ArgumentError(f"device={device!r}: there are {self.devices} CUDA devices here")
        return index

    def current_device(self) -> int:
        return 0

    def device_of(self, tensor: Any) -> int:
        return 0 if isinstance(tensor, DeviceTensor) else -1

    def torch_device(self, device: int) -> Any:
        return torch.device("cuda", device)

    def identity(self, device: int) -> str:
        return f"stand-in {device}"

    # --- streams

    def _stream(self, device: int, name: str) -> Stream:
        stream = Stream(device, name)
        self.streams.append(stream)
        return stream

    def _usable(self) -> None:
        if os.getpid() != self.pid:
            raise failure("CUDA in a forked process", 3)

    def current_stream(self, device: int, *, captured: bool = False) -> Stream:
        self._usable()
        stream = getattr(self.here, "stream", None) or self.defaults[device]
        if stream in self.capturing and not captured:
            raise failure("a CUDA graph is being captured on the current stream", 900)
        return stream

    def is_capturing(self, stream: Stream) -> bool:
        self._usable()
        return stream in self.capturing

    def new_stream(self, device: int) -> Stream:
        self._usable()
        return self._stream(device, f"{next(_numbers)}")

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Any:
        before = getattr(self.here, "stream", None)
        self.here.stream = stream
        try:
            yield stream
        finally:
            self.here.stream = before

    def stream_waits(self, stream: Stream, event: Event) -> None:
        self._usable()
        self._put(stream, (event, event.words[0]))

    def used_on(self, tensor: Any, stream: Stream) -> None:
        self._usable()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise failure("record_stream", 0, "torch has it for plain tensors only")
        storage = tensor.untyped_storage()  # alive until what is in the stream now has passed
        self._put(stream, lambda: storage.nbytes())

    def synchronize(self, stream: Stream) -> None:
        self._usable()
        self.host_waits += 1
        self._drain(stream, 0)

    def _put(self, stream: Stream, operation: Any) -> None:
        if stream in self.capturing:  # it would run whenever the graph is replayed, and not now
            self.violations.append(f"{operation} became a part of a CUDA graph")
        with self.lock:
            stream.queue.append(operation)

    def _step(self, stream: Stream) -> bool:
        """Do the next operation of a stream, if it can be done."""
        if not stream.queue:
            return False
        operation = stream.queue[0]
        if isinstance(operation, tuple):
            event, count = operation
            if event.words[1] < count:
                return False
            stream.queue.popleft()
        elif isinstance(operation, Event):
            stream.queue.popleft()
            operation.words[1] += 1
        else:
            stream.queue.popleft()
            operation()
        return True

    def _drain(self, stream: Stream, leave: int) -> None:
        """Do what is in a stream but the last `leave` operations, and what these wait for, and nothing else."""
        deadline = time.monotonic() + 60
        while True:
            with self.lock:
                if len(stream.queue) <= leave:
                    return
                if self._step(stream):
                    continue
                event, count = stream.queue[0]
                if event.stream is not None:
                    self._until(event, count)
                    continue
            assert time.monotonic() < deadline, f"{stream} waits for another process"
            time.sleep(0.001)

    def _until(self, event: Event, count: int) -> None:
        while event.words[1] < count:
            assert event.stream is not None
            assert event.stream.queue, "an event that nothing records"
            self._drain(event.stream, len(event.stream.queue) - 1)

    # --- events

    def new_event(self, device: int, *, interprocess: bool = False, sleeps: bool = False) -> Event:
        self._usable()
        path = f"/tmp/cuda-standin-{os.getpid()}-{next(_numbers)}" if interprocess else None
        return Event(path, create=interprocess)

    def record(self, event: Event, stream: Stream) -> None:
        self._usable()
        event.stream, event.polls, event.error = stream, 0, getattr(stream, "error", None)
        event.words[0] += 1
        self._put(stream, event)

    def is_done(self, event: Event) -> bool:
        self._usable()
        event.polls += 1
        if not event.happened and event.stream is not None and self.polls is not None and event.polls > self.polls:
            with self.lock:
                self._until(event, event.words[0])
        if event.happened and event.error:
            raise failure("work on a CUDA device failed", event.error)
        return event.happened

    def wait(self, event: Event) -> None:
        self._usable()
        self.host_waits += 1
        if event.stream is None:
            wait_until(lambda: event.happened)
        else:
            with self.lock:
                self._until(event, event.words[0])
        if event.error:
            raise failure("work on a CUDA device failed", event.error)

    def event_handle(self, event: Event) -> bytes:
        assert event.path is not None, "made without interprocess=True"
        return event.path.encode().ljust(HANDLE_BYTES, b"\0")

    def open_event(self, handle: bytes, device: int) -> Event:
        self._usable()
        path = handle.rstrip(b"\0").decode()
        if _maker(path) == os.getpid():
            raise failure("cannot open another process's CUDA event", 400)
        try:
            return Event(path)
        except OSError:
            raise failure("cannot open another process's CUDA event", 400) from None

    # --- host memory

    def supports_read_only(self, device: int) -> bool:
        return self.read_only

    def register_host(self, address: int, nbytes: int, device: int, *, read_only: bool = False) -> None:
        self._usable()
        what = f"cannot pin {nbytes} bytes of shared memory"
        if self.refuse_registration or (read_only and self.refuse_read_only):
            raise failure(what, self.refuse_registration or self.refuse_read_only)
        if read_only and not self.read_only:
            raise failure(what, 801)
        if not nbytes or address % PAGE or nbytes % PAGE or not _mapped(address, nbytes, writable=not read_only):
            raise failure(what, 1)
        if any(address < at + size and at < address + nbytes for at, size in self.registered.items()):
            raise failure(what, 712)
        self.registered[address] = nbytes
        self.registrations += 1

    def unregister_host(self, address: int, device: int) -> None:
        self._usable()
        nbytes = self.registered.pop(address, 0)
        if not nbytes:
            raise failure("cannot unpin shared memory", 713)
        if not _mapped(address, nbytes):
            self.violations.append(f"{address:#x} was unmapped before it was unregistered")
        if any(address < at + size and at < address + nbytes for at, size in self.flying):
            self.violations.append(f"{address:#x} was unregistered while a copy was on its way")

    def _is_pinned(self, address: int, nbytes: int) -> bool:
        inside = [
            at <= address and address + nbytes <= at + size
            for at, size in self.registered.items()
            if address < at + size and at < address + nbytes
        ]
        if inside and not all(inside):
            raise failure("cannot start a CUDA copy", 1, "cudaErrorInvalidValue: it leaves a registered range")
        return bool(inside)

    # --- copies and memory

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> DeviceTensor:
        self._usable()
        if self.refuse_memory:
            raise failure("cannot allocate on a CUDA device", self.refuse_memory)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor.untyped_storage().fill_(GARBAGE)
        return tensor.as_subclass(DeviceTensor)

    def copy(self, target: Any, source: Any) -> None:
        stream = self.current_stream(0, captured=True)
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        if not target.numel():
            return
        hosts = [tensor for tensor in (target, source) if not isinstance(tensor, DeviceTensor)]
        assert len(hosts) < 2, "a copy within the host"
        ends = [_range(host) for host in hosts]
        pinned = all(self._is_pinned(*end) for end in ends)
        number, self_ = self.fail_copies, self
        targets, sources = target.detach().as_subclass(torch.Tensor), source.detach().as_subclass(torch.Tensor)

        def run() -> None:
            for end in ends:
                if pinned:
                    self_.flying.remove(end)
                if not _mapped(end[0] // PAGE * PAGE, end[1], writable=hosts[0] is target):
                    self_.violations.append(f"{end[0]:#x} was unmapped while a copy was on its way")
                    return
            if not number:
                targets.copy_(sources)

        if number:
            stream.error = number
        if pinned:
            self.pinned_copies += bool(hosts)
            with self.lock:
                self.flying.extend(ends)
            self._put(stream, run)
            return
        self.pageable_copies += 1
        self._put(stream, run)
        self._drain(stream, 0)  # as CUDA does, more or less: what is not pinned is gone through while the host waits

    def dense(self, tensor: Any) -> Any:
        if tensor.is_contiguous():
            return tensor
        result = self.empty(tuple(tensor.shape), tensor.dtype, 0)
        self.copy(result, tensor)
        return result

    def move(self, tensor: Any, device: int) -> Any:
        self.pageable_copies += 1
        self._drain(self.current_stream(device, captured=True), 0)
        if isinstance(tensor, DeviceTensor):
            return tensor
        moved = tensor.clone()  # torch makes no subclass of a tensor without a storage
        return moved.as_subclass(DeviceTensor) if moved.layout is torch.strided else moved

    def view(self, block: Any, at: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        flat = torch.empty(0, dtype=dtype).set_(block.untyped_storage(), at // dtype.itemsize, shape, strides)
        return flat.as_subclass(DeviceTensor)

    def run(self, storage_of: Any, at: int, extent: int) -> Any:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage_of.untyped_storage(), at, (extent,), (1,))
        return flat.as_subclass(DeviceTensor)

    def allocate(self, nbytes: int, device: int) -> int:
        self._usable()
        if self.refuse_memory:
            raise failure(f"cannot allocate {nbytes} bytes on device {device}", self.refuse_memory)
        path = f"/tmp/cuda-standin-{os.getpid()}-{next(_numbers)}"
        with open(path, "w+b") as file:
            file.truncate(max(nbytes, 1))
            block = mmap.mmap(file.fileno(), max(nbytes, 1))
        address = _address(block)
        self.device_memory[address] = nbytes, path, block
        return address

    def free(self, address: int, device: int) -> None:
        self._usable()
        found = self.device_memory.pop(address, None)
        if found is None:
            raise failure("cannot free device memory", 1)
        os.unlink(found[1])

    def memory_handle(self, address: int, device: int) -> bytes:
        self._usable()
        return self.device_memory[address][1].encode().ljust(HANDLE_BYTES, b"\0")

    def open_memory(self, handle: bytes, device: int) -> int:
        self._usable()
        what, path = "cannot map another process's device memory", handle.rstrip(b"\0").decode()
        if _maker(path) == os.getpid():
            raise failure(what, 201)
        if any(path == other for _, other, _ in self.opened.values()):
            raise failure(what, 208)
        try:
            with open(path, "r+b") as file:
                block = mmap.mmap(file.fileno(), 0)
        except OSError:
            raise failure(what, 400) from None
        address = _address(block)
        self.opened[address] = len(block), path, block
        return address

    def close_memory(self, address: int, device: int) -> None:
        self._usable()
        if self.opened.pop(address, None) is None:
            raise failure("cannot unmap another process's device memory", 1)

    def tensor_at(self, address: int, nbytes: int, device: int, owner: Any) -> DeviceTensor:
        self._usable()
        block = (self.device_memory.get(address) or self.opened.get(address) or (0, "", None))[2]
        memory = type("Memory", (ctypes.c_char * nbytes,), {}).from_address(address)
        memory.owner, memory.block = owner, block  # the block: so that a test that is wrong does not crash
        return torch.frombuffer(memoryview(memory).cast("B"), dtype=torch.uint8).as_subclass(DeviceTensor)


def _range(host: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a host tensor."""
    last = sum((n - 1) * s for n, s in zip(host.shape, host.stride(), strict=True)) * host.element_size()
    return host.data_ptr(), last + host.element_size()


def _address(block: mmap.mmap) -> int:
    return int(np.frombuffer(block, np.uint8).__array_interface__["data"][0])


def _maker(path: str) -> int:
    return int(path.split("-")[2])


def _mapped(address: int, nbytes: int, *, writable: bool = False) -> bool:
    """Whether all of a range is mapped, to be read, or written."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high and rights[0] == "r" and (rights[1] == "w" or not writable):
                if address + nbytes <= high:
                    return True
                nbytes -= high - address
                address = high
    return False


def keeper_is_idle() -> bool:
    """Whether nothing is left that the library asks the device about."""
    keeper.release_finished()
    with keeper._busy:  # its thread may be at the last one
        return not (keeper._ended or keeper._waiting)


MISSING = {name for name in vars(Runtime) if not name.startswith("_")} - set(vars(StandIn))
"""What the real runtime can do and the stand-in cannot: nothing, a test says."""


@contextlib.contextmanager
def installed(**options: Any) -> Any:
    """Let the library use a stand-in, and look for violations at the end."""
    from shmtensor.codec import torch as views
    from shmtensor.cuda import runtime

    stand_in, types = StandIn(**options), views.known_types
    runtime.substitute(stand_in)
    views.known_types = types | {DeviceTensor}
    try:
        yield stand_in
    finally:
        runtime.substitute(None)
        views.known_types = types
