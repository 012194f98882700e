"""The calls of the CUDA runtime library, over a library whose functions have the types of CUDA's own header.

It is called through the C calling convention, and is strict: a context is made where a thread calls, an error stays
until it is asked for, and what asks, waits or allocates ends the capture that another thread is at, as with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import threading
from types import SimpleNamespace

import pytest
import torch

import shmtensor
from shmtensor.cuda import copies, runtime

HANDLE = bytes(range(64))
FAR = 0x7F12_3456_7000
MANY = 5 << 30
GLOBAL, RELAXED = 0, 2


class IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t` of `driver_types.h`."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


INT, UINT, SIZE, POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
PROTOTYPES = {  # of `cuda_runtime_api.h`, CUDA 12.9 and 13.0
    "cudaHostRegister": (POINTER, SIZE, UINT),
    "cudaHostUnregister": (POINTER,),
    "cudaMalloc": (ctypes.POINTER(POINTER), SIZE),
    "cudaFree": (POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcHandle), POINTER),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(POINTER), IpcHandle, UINT),
    "cudaIpcCloseMemHandle": (POINTER,),
    "cudaDeviceGetAttribute": (ctypes.POINTER(INT), INT, INT),
    "cudaDeviceGetPCIBusId": (ctypes.POINTER(ctypes.c_char), INT, INT),
    "cudaStreamIsCapturing": (POINTER, ctypes.POINTER(INT)),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(INT),),
    "cudaGetLastError": (),
}
NEED_NO_CONTEXT = {"cudaGetLastError", "cudaDeviceGetAttribute", "cudaDeviceGetPCIBusId"}
LEAVE_CAPTURES = NEED_NO_CONTEXT | {"cudaThreadExchangeStreamCaptureMode", "cudaStreamIsCapturing"}
TEXTS = {0: "no error", 1: "invalid argument", 700: "an illegal memory access was encountered"}


class Cudart:
    """`libcudart`, and what torch has of it."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.contexts: set[int] = set()
        self.calls: list[tuple] = []
        self.fail: dict[str, int] = {}
        self.capturing: dict[int, int] = {}  # stream -> status; a negative one: the error of the question
        self.broken_captures = self.last = 0
        self.cudaGetErrorName = self._text(lambda number: runtime.NAMES.get(number, "cudaErrorOther"))
        self.cudaGetErrorString = self._text(lambda number: TEXTS.get(number, f"text of {number}"))
        inner = {name: self._checked(name, getattr(self, f"_{name}", self._plain(name))) for name in PROTOTYPES}
        for name, types in PROTOTYPES.items():
            setattr(self, name, ctypes.CFUNCTYPE(INT, *types)(inner[name]))

    @staticmethod
    def _text(function):
        kept = {}

        def call(number):
            return ctypes.addressof(kept.setdefault(number, ctypes.create_string_buffer(function(number).encode())))

        return ctypes.CFUNCTYPE(POINTER, INT)(call)

    @property
    def device(self) -> int:
        return getattr(self.here, "device", 0)

    @property
    def mode(self) -> int:
        return getattr(self.here, "mode", GLOBAL)

    def enter(self, name: str) -> int:
        """What any call that needs a context does."""
        if name not in NEED_NO_CONTEXT:
            self.contexts.add(self.device)
        if self.capturing and self.mode != RELAXED and name not in LEAVE_CAPTURES:
            self.broken_captures += 1
            return 900
        return self.fail.get(name, 0)

    def _checked(self, name, function):
        def call(*arguments):
            number = self.enter(name) or function(*arguments)
            if name != "cudaGetLastError":
                self.last = number or self.last
            return number

        return call

    def _plain(self, name):
        def call(*arguments):
            self.calls.append((name, self.device, *arguments))
            return 0

        return call

    def _cudaMalloc(self, pointer, nbytes):
        pointer[0] = FAR
        self.calls.append(("cudaMalloc", self.device, nbytes))
        return 0

    def _cudaIpcGetMemHandle(self, handle, address):
        ctypes.memmove(handle, HANDLE, 64)
        self.calls.append(("cudaIpcGetMemHandle", self.device, address))
        return 0

    def _cudaIpcOpenMemHandle(self, pointer, handle, flags):
        pointer[0] = FAR + 4096
        self.calls.append(("cudaIpcOpenMemHandle", self.device, ctypes.string_at(ctypes.addressof(handle), 64), flags))
        return 0

    def _cudaDeviceGetAttribute(self, value, attribute, device):
        value[0] = int((attribute, device) == (113, 1))
        return 0 if device < 2 else 101

    def _cudaDeviceGetPCIBusId(self, text, length, device):
        found = f"0000:0{device}:00.0\0".encode()
        assert length >= len(found)
        ctypes.memmove(text, found, len(found))
        return 0

    def _cudaStreamIsCapturing(self, stream, status):
        found = self.capturing.get(stream or 0, 0)
        if found < 0:
            return -found
        status[0] = found
        return 0

    def _cudaThreadExchangeStreamCaptureMode(self, mode):
        before = self.mode
        self.here.mode, mode[0] = mode[0], before
        return 0

    def _cudaGetLastError(self):
        number, self.last = self.last, 0
        return number

    # --- what torch.cuda has

    @contextlib.contextmanager
    def on(self, device):
        before, self.here.device = self.device, int(device)
        self.contexts.add(self.device)
        try:
            yield
        finally:
            self.here.device = before  # torch makes no context on the way back

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here.device = self.device, stream.device.index
        self.contexts.add(self.device)
        try:
            yield
        finally:
            self.here.device = before
            self.contexts.add(before)  # torch.cuda.set_stream sets the device, which makes a context

    def is_current_stream_capturing(self):
        self.enter("cudaStreamIsCapturing")
        found = self.capturing.get(0x5000 + self.device, 0)
        if found < 0:
            raise RuntimeError(f"CUDA error: {TEXTS.get(-found, f'text of {-found}')}\nmore")
        return bool(found)

    def as_tensor(self, memory, device):
        self.enter("cudaPointerGetAttributes")
        return memory.__cuda_array_interface__, device

    def torch(self):
        cuda = SimpleNamespace(
            device=self.on, current_device=lambda: self.device, device_count=lambda: 2, Event=Event, stream=self.stream,
            current_stream=lambda device: Stream(self, device),
            get_device_properties=lambda device: SimpleNamespace(name="x"),
            is_current_stream_capturing=self.is_current_stream_capturing,
        )  # fmt: skip
        return SimpleNamespace(
            cuda=cuda, version=SimpleNamespace(cuda="13.0"), device=torch.device, as_tensor=self.as_tensor
        )


class Event:
    def __init__(self, cudart=None, device=None, error=None, **flags):
        self.cudart, self.error, self.flags = cudart, error, flags
        self.device = None if device is None else torch.device("cuda", device)

    def query(self):
        number = self.cudart.enter("cudaEventQuery")
        if self.error is not None:
            raise self.error
        if number:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        return True

    synchronize = query


class Stream:
    def __init__(self, cudart, device):
        self.cudart, self.device, self.cuda_stream = cudart, torch.device("cuda", device), 0x5000 + device

    def synchronize(self):
        if self.cudart.enter("cudaStreamSynchronize"):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart()
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(runtime, "_usable_torch", made.torch)
    return made


@pytest.fixture
def used(cudart):
    return runtime.Runtime()


CALLS = [
    "register", "unregister", "allocate", "free", "handle", "open", "close", "is_done", "wait", "synchronize",
    "is_capturing", "tensor_at", "on",
]  # fmt: skip


def calls_of(used):
    """Every call that reaches the driver, about device 1."""
    return {
        "register": lambda: used.register_host(FAR, MANY, 1),
        "unregister": lambda: used.unregister_host(FAR, 1),
        "allocate": lambda: used.allocate(MANY, 1),
        "free": lambda: used.free(FAR, 1),
        "handle": lambda: used.memory_handle(FAR, 1),
        "open": lambda: used.open_memory(HANDLE, 1),
        "close": lambda: used.close_memory(FAR, 1),
        "is_done": lambda: used.is_done(Event(used._torch.cuda.current_stream(0).cudart, 1)),
        "wait": lambda: used.wait(Event(used._torch.cuda.current_stream(0).cudart, 1)),
        "synchronize": lambda: used.synchronize(used.current_stream(1, captured=True)),
        "is_capturing": lambda: used.is_capturing(used.current_stream(1, captured=True)),
        "tensor_at": lambda: used.tensor_at(FAR, MANY, 1, None),
        "on": lambda: within(used.on(used.current_stream(1, captured=True))),
    }


def within(manager):
    with manager:
        pass


def test_arguments_and_results_are_those_of_cuda(cudart, used):
    used.register_host(FAR, MANY, 0)
    used.register_host(FAR, MANY, 1, read_only=True)
    used.unregister_host(FAR, 1)
    assert used.allocate(MANY, 1) == FAR
    assert used.tensor_at(FAR, MANY, 1, None) == (
        {"shape": (MANY,), "typestr": "|u1", "data": (FAR, False), "version": 3}, torch.device("cuda", 1),
    )  # fmt: skip
    used.free(FAR, 0)
    assert used.memory_handle(FAR, 1) == HANDLE
    assert used.open_memory(HANDLE, 0) == FAR + 4096
    used.close_memory(FAR, 0)
    assert cudart.calls == [
        ("cudaHostRegister", 0, FAR, MANY, 1), ("cudaHostRegister", 1, FAR, MANY, 9), ("cudaHostUnregister", 1, FAR),
        ("cudaMalloc", 1, MANY), ("cudaFree", 0, FAR), ("cudaIpcGetMemHandle", 1, FAR),
        ("cudaIpcOpenMemHandle", 0, HANDLE, 1), ("cudaIpcCloseMemHandle", 0, FAR),
    ]  # fmt: skip
    assert [used.supports_read_only(device) for device in (0, 1, 2)] == [False, True, False]
    assert cudart.last == 0
    assert used.identity(1) == "0000:01:00.0"
    assert used.new_event(1, interprocess=True).flags == {"blocking": False, "interprocess": True}
    assert used.new_event(1, sleeps=True).flags == {"blocking": True, "interprocess": False}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_makes_no_context_on_another_device(cudart, used, name):
    """In a thread that has used none, as in a destructor or in a thread of the library's."""
    thread = threading.Thread(target=calls_of(used)[name])
    thread.start()
    thread.join()
    assert cudart.contexts == {1}
    assert cudart.device == 0


def test_what_a_thread_has_chosen_stays(cudart, used):
    with cudart.on(0):
        for call in calls_of(used).values():
            call()
            assert (cudart.device, cudart.mode) == (0, GLOBAL)


def test_a_capture_of_another_thread_goes_on(cudart, used):
    cudart.capturing = {0x9000: 1}
    calls = calls_of(used)
    assert list(calls) == CALLS
    for name in CALLS[:-2]:
        calls[name]()
    assert (cudart.broken_captures, cudart.mode) == (0, GLOBAL)
    with pytest.raises(RuntimeError):
        Event(cudart, 1).query()  # without the other mode, as CUDA does
    assert cudart.broken_captures == 1


def test_the_current_stream_is_refused_while_it_is_captured(cudart, used):
    stream = 0x5001
    for status, captured in ((0, False), (1, True), (2, True), (-906, True), (-3, False)):
        cudart.capturing = {stream: status}
        assert used.is_capturing(used.current_stream(1, captured=True)) == captured, status
        assert cudart.last == 0
        if captured:
            with pytest.raises(shmtensor.CudaError, match="graph is being captured") as raised:
                used.current_stream(1)
            assert raised.value.number == 900
        else:
            assert used.current_stream(1).cuda_stream == stream
        assert used.current_stream(0).cuda_stream == 0x5000


def test_an_error_has_its_number_and_is_not_found_again(cudart, used):
    cudart.fail = {"cudaHostRegister": 1}
    with pytest.raises(shmtensor.CudaError, match=r"cannot pin .*error 1 \(cudaErrorInvalidValue: invalid") as raised:
        used.register_host(FAR, 4096, 0)
    assert raised.value.number == 1
    assert (cudart.last, cudart.mode) == (0, GLOBAL)


def test_an_error_of_torch_has_cudas_number(cudart, used):
    told = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    numbered = RuntimeError("CUDA error: some text\nmore")
    numbered.error_code = 719
    for error, number in ((told, 700), (numbered, 719), (RuntimeError("not CUDA's"), 0)):
        with pytest.raises(shmtensor.CudaError) as raised:
            used.is_done(Event(cudart, 1, error))
        assert raised.value.number == number
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_cannot_be_used_is_an_error_of_ours(cudart, used, name):
    """After a kernel has failed, every call on its device does, also that which names it."""
    call = calls_of(used)[name]

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    used._torch.cuda.device = lost
    used._torch.cuda.stream = lost
    with pytest.raises(shmtensor.CudaError, match="illegal memory access") as raised:
        call()
    assert raised.value.number == 700
    assert (cudart.device, cudart.mode) == (0, GLOBAL)
    used._torch.cuda.current_device = lost
    with pytest.raises(shmtensor.CudaError, match="illegal memory access"):
        call()


def test_a_device_that_cannot_be_used_is_copied_to_without_pinning(used, monkeypatch):
    """So that the copy itself says what is wrong."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runtime, "_substitute", used)
    used._torch.cuda.device = lost
    buffer = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    held = copies.Pinning(buffer, FAR, writable=True)
    assert held.parts(buffer, 8, 16, 1) == [(buffer, 8, 16)]
    assert "illegal memory access" in held.failure


@pytest.mark.parametrize(("major", "found"), [("13", "/b/libcudart.so.13"), ("12", "/a/libcudart.so.12"),
                                              ("11", "/a/libcudart.so.12")])  # fmt: skip
def test_of_two_libraries_the_one_of_torch_is_taken(monkeypatch, major, found):
    lines = "7f00-7f01 r-xp 0 00:00 1   /lib/libc.so\n7f02-7f03 r-xp 0 00:00 2   /a/libcudart.so.12\n"
    lines += "7f04-7f05 r-xp 0 00:00 3   /b/libcudart.so.13\n"
    monkeypatch.setattr(runtime, "open", lambda path: io.StringIO(lines), raising=False)
    assert runtime._loaded(major) == found


def test_every_call_has_the_types_of_the_header():
    ours = {name: [kind.__name__ for kind in kinds] for name, kinds in runtime._SIGNATURES.items()}
    theirs = {name: [kind.__name__ for kind in kinds] for name, kinds in PROTOTYPES.items()}
    theirs["cudaIpcGetMemHandle"][0], theirs["cudaIpcOpenMemHandle"][1] = "LP_Handle", "Handle"
    theirs["cudaDeviceGetPCIBusId"][0] = "c_char_p"
    assert ours == theirs
    assert ctypes.sizeof(runtime.Handle) == 64
