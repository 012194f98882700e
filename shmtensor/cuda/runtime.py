"""The one place where CUDA is called: through torch where torch has it, else through its runtime library.

Streams and events are torch's own and opaque to other modules. Nothing here waits for a device but `wait` and
`synchronize`, and both release the interpreter lock.

In a thread that has used no device, a driver call creates a context on device 0, which costs some hundred megabytes
there, whatever device it concerns. So each call is made on its own device, also in destructors and the library's
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..errors import ArgumentError, CudaError
from ..memory import lifecycle
from ..options import how_to_install

HANDLE_BYTES: Final = 64
"""Size of an inter-process handle, of memory or of an event."""

NAMES: Final = {
    1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation", 3: "cudaErrorInitializationError",
    4: "cudaErrorCudartUnloading", 35: "cudaErrorInsufficientDriver", 100: "cudaErrorNoDevice",
    201: "cudaErrorDeviceUninitialized", 205: "cudaErrorMapBufferObjectFailed", 208: "cudaErrorAlreadyMapped",
    400: "cudaErrorInvalidResourceHandle", 700: "cudaErrorIllegalAddress",
    712: "cudaErrorHostMemoryAlreadyRegistered", 713: "cudaErrorHostMemoryNotRegistered",
    719: "cudaErrorLaunchFailure", 800: "cudaErrorNotPermitted", 801: "cudaErrorNotSupported",
    900: "cudaErrorStreamCaptureUnsupported", 901: "cudaErrorStreamCaptureInvalidated",
    905: "cudaErrorStreamCaptureIsolation", 906: "cudaErrorStreamCaptureImplicit", 907: "cudaErrorCapturedEvent",
    999: "cudaErrorUnknown",
}  # fmt: skip
"""The names of the errors that these calls can return, for use where the library itself cannot be called."""

_POINTER = ctypes.c_void_p
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cudaHostRegister": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostUnregister": (_POINTER,),
    "cudaMalloc": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cudaFree": (_POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(Handle), _POINTER),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(_POINTER), Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cudaDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cudaStreamIsCapturing": (_POINTER, ctypes.POINTER(ctypes.c_int)),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cudaGetLastError": (),
}
_NOTHING: Final = contextlib.nullcontext()
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_CAPTURE_IMPLICIT: Final = 906  # of the legacy stream, while a stream that it waits for is captured


class Library:
    """The CUDA runtime library that torch has loaded, by ctypes: the few calls that torch has no Python for.

    Errors are exceptions. Its calls release the interpreter lock.
    """

    def __init__(self, version: str) -> None:
        major = version.split(".")[0]
        path = _loaded(major) or f"libcudart.so.{major}"
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            self._library.cudaGetErrorName.argtypes = self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
            self._library.cudaGetErrorName.restype = self._library.cudaGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise CudaError(
                errno.ENOENT, f"cannot use the CUDA runtime library {path}: {error}: install the one of CUDA {version}"
            ) from None

    def call(self, name: str, *arguments: Any, what: str, remedy: str = "") -> None:
        """Call a function; an error is raised as `what`, its name and number, and the remedy."""
        number: int = getattr(self._library, name)(*arguments)
        if number:
            self._library.cudaGetLastError()  # else torch would find it later, and blame another call
            title = self._library.cudaGetErrorName(number).decode()
            text = self._library.cudaGetErrorString(number).decode()
            raise failure(what, number, f"{title}: {text}", remedy)

    def texts(self) -> dict[str, int]:
        """The numbers of the errors that these calls can return, by the text that torch has for them."""
        return {self._library.cudaGetErrorString(number).decode(): number for number in NAMES}

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured on a stream."""
        status = ctypes.c_int()
        number: int = self._library.cudaStreamIsCapturing(stream, ctypes.byref(status))
        if number:
            self._library.cudaGetLastError()
        return bool(status.value) or number == _CAPTURE_IMPLICIT

    def exchange_capture_mode(self, mode: ctypes.c_int) -> None:
        """Set this thread's mode for captures of CUDA graphs, and store the one before it in its place."""
        self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def failure(what: str, number: int, text: str = "", remedy: str = "") -> CudaError:
    """The error of a call that returned `number`."""
    said = text or NAMES.get(number, "unknown error")
    error = CudaError(errno.ENOMEM if number == 2 else errno.EIO, f"{what}: CUDA error {number} ({said})" + (
        f": {remedy}" if remedy else ""
    ))  # fmt: skip
    error.number = number
    return error


def _loaded(major: str) -> str | None:
    """The path of the runtime library that this process has loaded already: of that version, if there are several."""
    found: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")[2]
                if path.rpartition("/")[2].startswith("libcudart"):
                    found.append(f"/{path}")
    except OSError:
        pass
    return next((path for path in found if f".so.{major}" in path), found[0] if found else None)


PORTABLE: Final = 1  # cudaHostRegisterPortable
READ_ONLY: Final = 8  # cudaHostRegisterReadOnly
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess
_ATTRIBUTE_READ_ONLY: Final = 113  # cudaDevAttrHostRegisterReadOnlySupported


def _translated(what: str) -> Callable[[_Function], _Function]:
    """Have a method's errors of torch raised as `CudaError`, which begins with `what`."""

    def decorate(method: _Function) -> _Function:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            except RuntimeError as error:
                raise _failed(what, error) from error

        return call  # type: ignore[return-value]

    return decorate


def _failed(what: str, error: RuntimeError) -> CudaError:
    """The error of a call of torch's that raised; its out-of-memory error is a RuntimeError as well."""
    text = str(error).partition("\n")[0]
    if type(error).__name__ == "OutOfMemoryError":
        return failure(what, 2, text, "free device memory, or keep fewer messages on the device")
    told = CudaError(errno.EIO, f"{what}: {text}")
    told.number = getattr(error, "error_code", 0) or _numbers.get(text.removeprefix("CUDA error: "), 0)
    return told


class Runtime:
    """This process's CUDA. Devices are numbers; every error is a `CudaError`."""

    def __init__(self) -> None:
        self._torch: Any = _usable_torch()
        self._library = Library(str(self._torch.version.cuda))
        self._devices = int(self._torch.cuda.device_count())
        _numbers.update(self._library.texts())

    def _there(self, device: int | None) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which the thread is on this device."""
        cuda = self._torch.cuda
        if self._devices == 1 or device is None or device == cuda.current_device():
            return _NOTHING
        return cuda.device(device)  # type: ignore[no-any-return]

    def _aside(self, device: int | None) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which the thread is on this device, and its calls do not break a capture of a CUDA
        graph."""
        return _Aside(self._there(device), self._library)

    def _call(self, device: int, name: str, *arguments: Any, what: str, remedy: str = "") -> None:
        try:
            with self._aside(device):
                self._library.call(name, *arguments, what=what, remedy=remedy)
        except RuntimeError as error:  # of naming the device
            raise _failed(what, error) from error

    # --- devices

    def device_count(self) -> int:
        """The number of devices."""
        return self._devices

    def device(self, device: Any) -> int:
        """The number of the device `"cuda"` (the current one), `"cuda:1"`, a `torch.device` or an int."""
        try:
            found = self._torch.device("cuda", device) if isinstance(device, int) else self._torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r}: {error}") from None
        if found.type != "cuda":
            raise ArgumentError(f'device={device!r} is no CUDA device: pass "cuda" or "cuda:<number>"')
        index = self.current_device() if found.index is None else int(found.index)
        if index >= self._devices:
            raise ArgumentError(f"device={device!r}: there are {self._devices} CUDA devices here")
        return index

    @_translated("cannot tell the current CUDA device")
    def current_device(self) -> int:
        """The number of the device that this thread uses when none is named."""
        return int(self._torch.cuda.current_device())

    def device_of(self, tensor: Any) -> int:
        """The number of the device where a tensor lies; -1 if it lies on none."""
        return int(tensor.device.index) if tensor.is_cuda else -1

    def torch_device(self, device: int) -> Any:
        """The `torch.device` of a number."""
        return self._torch.device("cuda", device)

    def identity(self, device: int) -> str:
        """A text that identifies this device in every process that sees it, whatever its number there."""
        uuid = getattr(self._torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            return str(uuid)
        text = ctypes.create_string_buffer(64)
        self._library.call("cudaDeviceGetPCIBusId", text, len(text), device, what=f"cannot identify device {device}")
        return text.value.decode()

    # --- streams

    def current_stream(self, device: int, *, captured: bool = False) -> Any:
        """The stream that this thread's work on a device goes to.

        `CudaError` if a CUDA graph is being captured there, unless `captured`: the graph would be replayed with slots
        that hold other messages by then.
        """
        stream = self._torch.cuda.current_stream(device)
        if not captured and self._is_captured(device):
            raise failure(
                "a CUDA graph is being captured on the current stream", 900, "",
                "send and receive outside of it, and copy what was received into the graph's own input",
            )  # fmt: skip
        return stream

    def _is_captured(self, device: int) -> bool:
        """`is_capturing` of the thread's stream of a device: for each message, so without ctypes."""
        try:
            with self._there(device):
                return bool(self._torch.cuda.is_current_stream_capturing())
        except RuntimeError as error:
            return _failed("cannot ask about a CUDA stream", error).number == _CAPTURE_IMPLICIT

    @_translated("cannot ask about a CUDA stream")
    def is_capturing(self, stream: Any) -> bool:
        """Whether a CUDA graph is being captured on a stream."""
        with self._there(_index(stream)):
            return self._library.is_capturing(int(stream.cuda_stream))

    @_translated("cannot make a CUDA stream")
    def new_stream(self, device: int) -> Any:
        """A new stream."""
        return self._torch.cuda.Stream(device)

    @_translated("cannot use a CUDA stream")
    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which the thread's work goes to this stream. If it does so already, this costs almost
        nothing."""
        device = _index(stream)
        return _On(stream, self._there(device), self._torch.cuda, device)

    @_translated("cannot order a CUDA stream")
    def stream_waits(self, stream: Any, event: Any) -> None:
        """Make work that is queued on the stream from now on wait for the event; the host does not wait."""
        stream.wait_event(event)

    @_translated("cannot tell that device memory is in use")
    def used_on(self, tensor: Any, stream: Any) -> None:
        """Do not reuse a plain tensor's memory before what is in the stream now is done (`record_stream`)."""
        tensor.record_stream(stream)

    @_translated("work on a CUDA stream failed")
    def synchronize(self, stream: Any) -> None:
        """Wait for everything in a stream."""
        with self._aside(_index(stream)):
            stream.synchronize()

    # --- events

    @_translated("cannot make a CUDA event")
    def new_event(self, device: int, *, interprocess: bool = False, sleeps: bool = False) -> Any:
        """A new event, not recorded yet.

        A thread that waits for it does so as in `torch.cuda.synchronize`, which spins by default; with `sleeps` it lets
        others have the core, and is woken some 0.1 to 0.4 ms late.
        """
        with self._there(device):
            return self._torch.cuda.Event(blocking=sleeps, interprocess=interprocess)

    @_translated("cannot record a CUDA event")
    def record(self, event: Any, stream: Any) -> None:
        """Let the event happen when all that is in the stream now is done."""
        event.record(stream)

    @_translated("work on a CUDA device failed")
    def is_done(self, event: Any) -> bool:
        """Whether a recorded event has happened. `CudaError` if what came before it failed."""
        with self._aside(_index(event)):
            return bool(event.query())

    @_translated("work on a CUDA device failed")
    def wait(self, event: Any) -> None:
        """Wait for a recorded event. `CudaError` if what came before it failed."""
        with self._aside(_index(event)):
            event.synchronize()

    @_translated("cannot share a CUDA event")
    def event_handle(self, event: Any) -> bytes:
        """64 bytes by which another process opens an event that was made with `interprocess=True`."""
        return bytes(event.ipc_handle())

    @_translated("cannot open another process's CUDA event")
    def open_event(self, handle: bytes, device: int) -> Any:
        """Open another process's event, by its handle."""
        return self._torch.cuda.Event.from_ipc_handle(self.torch_device(device), handle)

    # --- host memory

    def supports_read_only(self, device: int) -> bool:
        """Whether a mapping that this process may only read can be registered."""
        value = ctypes.c_int()
        try:
            self._library.call(
                "cudaDeviceGetAttribute", ctypes.byref(value), _ATTRIBUTE_READ_ONLY, device, what="cannot ask a device"
            )
        except CudaError:  # before CUDA 11.1 there is no such attribute
            return False
        return bool(value.value)

    def register_host(self, address: int, nbytes: int, device: int, *, read_only: bool = False) -> None:
        """Pin host memory, page-aligned, for all devices, by the context of one, until `unregister_host`."""
        self._call(
            device, "cudaHostRegister", address, nbytes, PORTABLE | (READ_ONLY if read_only else 0),
            what=f"cannot pin {nbytes} bytes of shared memory", remedy="free memory of the host, or pass pin=False",
        )  # fmt: skip

    def unregister_host(self, address: int, device: int) -> None:
        """Undo `register_host`; no copy may be in progress."""
        self._call(device, "cudaHostUnregister", address, what="cannot unpin shared memory")

    # --- copies and memory: as in torch, on the thread's current stream of that device; see `on`

    @_translated("cannot allocate on a CUDA device")
    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        """A tensor on a device, in C order and not initialised."""
        return self._torch.empty(shape, dtype=dtype, device=self.torch_device(device))

    @_translated("cannot start a CUDA copy")
    def copy(self, target: Any, source: Any) -> None:
        """Start a copy between two tensors of one shape and dtype. They must not change or end before it is done.

        From or to host memory that is not registered, CUDA copies by way of its own buffers, and the host may wait.
        """
        target.copy_(source, non_blocking=True)

    @_translated("cannot start a CUDA copy")
    def dense(self, tensor: Any) -> Any:
        """The tensor itself if its elements stand in C order, else a copy where they do."""
        return tensor.contiguous()

    @_translated("cannot start a CUDA copy")
    def move(self, tensor: Any, device: int) -> Any:
        """The tensor on a device, moved by torch: for what is no plain memory (sparse, quantized, nested)."""
        return tensor.to(self.torch_device(device), non_blocking=True)

    def view(self, block: Any, at: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """A tensor over device memory, `at` bytes into the storage of `block`; strides in elements."""
        flat = self._torch.empty(0, dtype=dtype, device=block.device)
        return flat.set_(block.untyped_storage(), at // dtype.itemsize, shape, strides)

    def run(self, storage_of: Any, at: int, extent: int) -> Any:
        """`extent` bytes from byte `at` of a device tensor's storage, as a tensor of uint8."""
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=storage_of.device)
        return flat.set_(storage_of.untyped_storage(), at, (extent,), (1,))

    def allocate(self, nbytes: int, device: int) -> int:
        """Allocate device memory that can be shared: outside torch's own pools. Returns its address."""
        pointer = ctypes.c_void_p()
        self._call(
            device, "cudaMalloc", ctypes.byref(pointer), nbytes,
            what=f"cannot allocate {nbytes} bytes on device {device}",
            remedy="free device memory (torch.cuda.empty_cache()), or ask for less",
        )  # fmt: skip
        return int(pointer.value or 0)

    def free(self, address: int, device: int) -> None:
        """Free what `allocate` returned; waits for the device."""
        self._call(device, "cudaFree", address, what="cannot free device memory")

    def memory_handle(self, address: int, device: int) -> bytes:
        """64 bytes by which another process opens what `allocate` returned here."""
        handle = Handle()
        self._call(
            device, "cudaIpcGetMemHandle", ctypes.byref(handle), address, what="cannot share device memory",
            remedy="this machine may not allow CUDA IPC (containers: same IPC namespace and device)",
        )  # fmt: skip
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_memory(self, handle: bytes, device: int) -> int:
        """Map another process's device memory: once per handle, and never one's own. Returns its address here."""
        pointer = ctypes.c_void_p()
        self._call(
            device, "cudaIpcOpenMemHandle", ctypes.byref(pointer), Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS,
            what="cannot map another process's device memory",
            remedy="both processes need the same device and driver, and CUDA IPC must be allowed",
        )  # fmt: skip
        return int(pointer.value or 0)

    def close_memory(self, address: int, device: int) -> None:
        """Undo `open_memory`; no work on the device may use it any more."""
        self._call(device, "cudaIpcCloseMemHandle", address, what="cannot unmap another process's device memory")

    @_translated("cannot make a tensor of device memory")
    def tensor_at(self, address: int, nbytes: int, device: int, owner: Any) -> Any:
        """Device memory as a tensor of uint8. Its storage keeps `owner` alive."""
        with self._there(device):
            return self._torch.as_tensor(_Memory(address, nbytes, owner), device=self.torch_device(device))


class _Memory:
    """Device memory in the form that torch accepts."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


# Context managers as classes: a generator takes several times as long to enter.


class _Aside:
    """A context manager in which the thread is on a device, and its calls that wait, query or allocate break no capture
    in another thread.

    In the default mode of threads, `cudaEventQuery` fails while another thread captures "globally", as torch does, and
    makes that capture fail.
    """

    __slots__ = ("_library", "_mode", "_there")

    def __init__(self, there: contextlib.AbstractContextManager[Any], library: Library) -> None:
        self._there, self._library = there, library

    def __enter__(self) -> None:
        self._there.__enter__()
        self._mode = ctypes.c_int(_RELAXED)
        self._library.exchange_capture_mode(self._mode)

    def __exit__(self, *raised: Any) -> None:
        try:
            self._library.exchange_capture_mode(self._mode)
        finally:
            self._there.__exit__(*raised)


class _On:
    """A context manager in which the thread is on a device, and its work there goes to a stream."""

    __slots__ = ("_cuda", "_device", "_entered", "_stream", "_there")

    def __init__(self, stream: Any, there: contextlib.AbstractContextManager[Any], cuda: Any, device: Any) -> None:
        self._stream, self._there, self._cuda, self._device = stream, there, cuda, device

    @_translated("cannot use a CUDA stream")
    def __enter__(self) -> Any:
        self._there.__enter__()  # torch's own for streams would go back to device 0
        try:
            self._entered = None
            if self._cuda.current_stream(self._device) != self._stream:
                entered = self._cuda.stream(self._stream)
                entered.__enter__()
                self._entered = entered
        except BaseException:
            self._there.__exit__(None, None, None)
            raise
        return self._stream

    def __exit__(self, *raised: Any) -> None:
        try:
            if self._entered is not None:
                self._entered.__exit__(*raised)
        finally:
            self._there.__exit__(*raised)


def _index(thing: Any) -> int | None:
    """The number of the device of a stream or an event; None if it was neither recorded nor opened."""
    device = thing.device
    return None if device is None else int(device.index)


_numbers: Final[dict[str, int]] = {}  # the runtime's text of an error -> its number


def _usable_torch() -> Any:
    """torch, with a device that works; `CudaError` says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise CudaError(
            errno.ENOENT, f"CUDA needs torch, which cannot be imported ({error}): {how_to_install('torch')}"
        ) from None
    if torch.version.cuda is None:
        raise CudaError(
            errno.ENODEV,
            f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, or keep to the CPU",
        )
    if torch.cuda._is_in_bad_fork():
        raise CudaError(
            errno.ENODEV,
            "CUDA was in use when this process was forked, and cannot be used here: start it with "
            'multiprocessing\'s "spawn" or "forkserver"',
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if not works:
        reason = str(said[-1].message).partition("\n")[0] if said else "no NVIDIA driver or no device is visible"
        raise CudaError(
            errno.ENODEV,
            f"torch {torch.__version__} finds no usable CUDA device ({reason}): look at nvidia-smi and at "
            "CUDA_VISIBLE_DEVICES, and update a driver that is older than CUDA "
            f"{torch.version.cuda} wants",
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise CudaError(errno.ENODEV, f"CUDA does not start: {str(error).partition(chr(10))[0]}") from error
    return torch


_found: Any = None
_substitute: Any = None


def runtime() -> Any:
    """This process's `Runtime`; `CudaError` says what is missing. Imports torch."""
    global _found
    if _substitute is not None:
        return _substitute
    if _found is None:
        _found = Runtime()
    return _found


def device_of(tensor: Any) -> int:
    """The number of the CUDA device where a tensor lies; -1 if on none. Starts no CUDA for tensors of the host."""
    if _substitute is not None:
        return int(_substitute.device_of(tensor))
    return int(tensor.device.index) if tensor.is_cuda else -1


def substitute(stand_in: Any) -> None:
    """For tests: `runtime()` returns this object, None: the real one."""
    global _substitute
    _substitute = stand_in


def _forget() -> None:
    global _found
    _found = None


lifecycle.call_in_child(_forget)
