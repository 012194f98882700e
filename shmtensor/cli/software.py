"""Checks of the software: the interpreter and the packages that the library needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from .. import native
from ..channel.names import PREFIX
from ..codec.libraries import EXTRA
from ..cuda.pinning import Pinning
from ..cuda.runtime import runtime
from ..errors import CudaError
from ..memory import segment as shm
from .output import FAIL, OK, WARN, Finding

_NEEDED = (("NumPy", "numpy", "numpy"), ("pyzmq", "pyzmq", "zmq"), ("posix_ipc", "posix_ipc", "posix_ipc"))


def python() -> Iterator[Finding]:
    """The interpreter and the platform."""
    system = f"{platform.system()} {platform.machine()}"
    version = f"{platform.python_implementation()} {platform.python_version()}, {system}"
    works = sys.platform == "linux" and sys.version_info >= (3, 10) and sys.implementation.name == "cpython"
    yield Finding("Python", OK if works else FAIL, version, "needs CPython 3.10 or newer on Linux")


def packages() -> Iterator[Finding]:
    """Versions of the required packages, each imported."""
    for label, distribution, module in _NEEDED:
        try:
            importlib.import_module(module)
            yield Finding(label, OK, importlib.metadata.version(distribution), "imports")
        except Exception as error:
            yield Finding(label, FAIL, f"{type(error).__name__}: {error}", f"pip install {distribution}")


def codec() -> Iterator[Finding]:
    """Whether messages are sent and received by the compiled module."""
    if native.module is not None:
        yield Finding("compiled core", OK, "in use", "messages are sent and received without Python code")
        return
    if native.switched_off():
        yield Finding("compiled core", OK, "switched off", "by SHMTENSOR_PURE")
        return
    yield Finding(
        "compiled core", WARN, "not in use",
        f"{native.why_not}; the Python code does the same, forty times slower for small messages: {native.remedy}",
    )  # fmt: skip


def torch() -> Iterator[Finding]:
    """torch, which only tensors need, and CUDA, which is optional."""
    try:
        module = importlib.import_module("torch")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        value = "not installed" if missing else f"{type(error).__name__}: {error}"
        yield Finding("torch", WARN, value, f"NumPy arrays work without it, tensors do not: {EXTRA}")
        return
    yield Finding(
        "torch", OK, str(module.__version__), "imports; imported by the library when the first tensor arrives"
    )
    yield from _cuda(module)


def _cuda(torch: Any) -> Iterator[Finding]:
    try:
        cuda = runtime()
    except CudaError as error:
        yield Finding("CUDA", OK, "not available", f"optional, host tensors need none; {error.strerror}")
        return
    value = f"{torch.version.cuda}, {cuda.device_count()} devices"
    yield Finding("CUDA", OK, value, "tensors are copied to devices from pinned slots, and from devices into them")
    for what, writable in (("rings of senders and work queues", True), ("fan-out rings, read-only", False)):
        failure = _pins(writable)
        yield Finding(
            "CUDA pinning", WARN if failure else OK, failure or "works",
            f"{what}: " + ("copies are pageable, slower, and the host waits for them" if failure else "one page tried"),
        )  # fmt: skip


def _pins(writable: bool) -> str:
    """Why a page of shared memory cannot be pinned; empty if it can."""
    name = f"{PREFIX}doctor-pin-{secrets.token_hex(8)}"
    with shm.create(name, shm.PAGE, "free some") as segment:
        shm.unlink(name)
        mapping = segment.map(writable=writable)
    pinning = Pinning(mapping.buffer, mapping.address, writable=writable)
    pinning.parts(mapping.buffer, 0, shm.PAGE, runtime().current_device())
    failure = pinning.failure
    pinning.release()
    return failure


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (python, packages, codec, torch)
