"""torch, and the modules that handle its tensors, imported when they are first needed."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from ..errors import DependencyError
from ..options import how_to_install

EXTRA: Final = how_to_install("torch")


def import_torch() -> Any:
    """The module `torch`; `DependencyError` where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return torch


def torch_views() -> Any:
    """The module `shmtensor.codec.torch`; imports torch, `DependencyError` where it is not installed."""
    try:
        from . import torch
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return torch


@functools.cache  # for each message: an import statement that finds its module takes as long as ten calls
def device_views() -> Any:
    """The module `shmtensor.codec.device`; imports torch, `DependencyError` where it is not installed."""
    try:
        from . import device
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return device


def without_torch() -> DependencyError:
    """The error to raise for a message that only torch can read."""
    return DependencyError(f"the message has torch tensors, but torch is not installed: {EXTRA}", name="torch")


def _explained(error: ModuleNotFoundError) -> ImportError:
    """The error to raise: it names the command to run, if torch itself is missing."""
    if error.name != "torch":
        return error
    return DependencyError(f"this needs torch, which is not installed: {EXTRA}", name="torch")


def is_cuda_name(device: str) -> bool:
    """Whether `codec/device.py` copies the leaves of this device: CUDA's, but not ROCm's, which have the same name."""
    return device.startswith("cuda") and sys.modules["torch"].version.hip is None


def device_job(source: Any, offset: int, nbytes: int, at: int | None = None) -> Any:
    """The copy of a CUDA tensor, or of a run of its storage, into a payload: see `codec/device.py`."""
    return device_views().job_of(source, offset, nbytes, at)
