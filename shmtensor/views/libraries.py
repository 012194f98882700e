"""torch without importing it before the program does: what is a tensor, and the modules that deal with tensors."""

from __future__ import annotations

import sys
from typing import Any


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor of any type; does not import torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def torch_views() -> Any:
    """The module `shmtensor.views.torch`; imports torch."""
    from . import torch

    return torch


def device_views() -> Any:
    """The module `shmtensor.views.device`; imports torch."""
    from . import device

    return device


def is_cuda_name(device: str) -> bool:
    """Whether the leaves of this device are copied by `views/device.py`: CUDA's, not those that ROCm calls so too."""
    return device.startswith("cuda") and sys.modules["torch"].version.hip is None


def device_job(source: Any, offset: int, nbytes: int, at: int | None = None) -> Any:
    """What copies a tensor of a CUDA device, or a run of its storage, into a payload: see `views/device.py`."""
    return device_views().job_of(source, offset, nbytes, at)
