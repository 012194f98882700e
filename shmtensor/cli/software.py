"""What is installed: the interpreter and the packages that the library stands on."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from .. import hot
from .finding import FAIL, OK, WARN, Finding

_NEEDED = (("NumPy", "numpy", "numpy"), ("pyzmq", "pyzmq", "zmq"), ("posix_ipc", "posix_ipc", "posix_ipc"))


def python() -> Iterator[Finding]:
    """The interpreter and the platform."""
    system = f"{platform.system()} {platform.machine()}"
    version = f"{platform.python_implementation()} {platform.python_version()}, {system}"
    works = sys.platform == "linux" and sys.version_info >= (3, 10) and sys.implementation.name == "cpython"
    yield Finding("Python", OK if works else FAIL, version, "needs CPython 3.10 or newer on Linux")


def packages() -> Iterator[Finding]:
    """Installed versions, each one imported."""
    for label, distribution, module in _NEEDED:
        try:
            importlib.import_module(module)
            yield Finding(label, OK, importlib.metadata.version(distribution), "imports")
        except Exception as error:
            yield Finding(label, FAIL, f"{type(error).__name__}: {error}", f"pip install {distribution}")


def _hot() -> Finding:
    if hot.module() is not None:
        return Finding("compiled hot path", OK, "in use", "plain tensors are sent and received without Python code")
    if os.environ.get("SHMTENSOR_PURE"):
        return Finding("compiled hot path", OK, "switched off", "by SHMTENSOR_PURE")
    why = "not built" if not hot.BUILT else "this torch lacks the DLPack exchange interface"
    remedy = "optional, x86-64 only: small tensors go two to four times faster with a C compiler at pip install"
    return Finding("compiled hot path", WARN, why, remedy)


def torch() -> Iterator[Finding]:
    """torch, which only tensors need, and CUDA, which nothing needs."""
    try:
        module = importlib.import_module("torch")
    except Exception as error:
        yield Finding(
            "torch", WARN, f"{type(error).__name__}: {error}",
            "NumPy arrays work without it, tensors do not: pip install torch",
        )  # fmt: skip
        return
    yield Finding(
        "torch", OK, str(module.__version__), "imports; imported by the library when the first tensor arrives"
    )
    yield _hot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        available = bool(module.cuda.is_available())
        value = f"{module.version.cuda}, {module.cuda.device_count()} devices" if available else "not available"
    yield Finding(
        "CUDA", OK, value, "tensors are moved through host memory" if available else "optional: host tensors need none"
    )


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (python, packages, torch)
