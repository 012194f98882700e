"""The CUDA runtime library that torch has loaded, by ctypes: the few calls that torch has no Python for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterator
from typing import Any, Final

from ..errors import CudaError

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
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_CAPTURE_IMPLICIT: Final = 906  # of the legacy stream, while a stream that it waits for is captured


class Library:
    """`libcudart`, with errors as exceptions. Its calls release the interpreter lock."""

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

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within it, calls of this thread that wait, query or allocate do not break a capture of another thread.

        In the default mode of threads, `cudaEventQuery` fails while another thread captures "globally", as torch does,
        and makes that capture fail.
        """
        mode = ctypes.c_int(_RELAXED)
        self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
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
