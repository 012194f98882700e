"""torch without importing it before the program does: what is a tensor, and the modules that deal with tensors."""

from __future__ import annotations

import sys
from typing import Any, Final

from ..errors import DependencyError

EXTRA: Final = "pip install 'shmtensor[torch]'"
"""The command that installs torch as this package wants it."""


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor of any type; does not import torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def import_torch() -> Any:
    """The module `torch`; `DependencyError` where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return torch


def torch_views() -> Any:
    """The module `shmtensor.views.torch`; imports torch, `DependencyError` where it is not installed."""
    try:
        from . import torch
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return torch


def device_views() -> Any:
    """The module `shmtensor.views.device`; imports torch, `DependencyError` where it is not installed."""
    try:
        from . import device
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    return device


def _explained(error: ModuleNotFoundError) -> ImportError:
    """What to raise for it: what to install, if it is torch itself that is missing."""
    if error.name != "torch":
        return error
    return DependencyError(f"this needs torch, which is not installed: {EXTRA}", name="torch")


def is_cuda_name(device: str) -> bool:
    """Whether the leaves of this device are copied by `views/device.py`: CUDA's, not those that ROCm calls so too."""
    return device.startswith("cuda") and sys.modules["torch"].version.hip is None


def device_job(source: Any, offset: int, nbytes: int, at: int | None = None) -> Any:
    """What copies a tensor of a CUDA device, or a run of its storage, into a payload: see `views/device.py`."""
    return device_views().job_of(source, offset, nbytes, at)
