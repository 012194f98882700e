"""The usual message, done in C: optional, x86-64 only, and never needed.

A plain CPU tensor that looks like one sent before is published by an `Outbox`; its record, on a receiver with one
sender, becomes a tensor by an `Inlet`. The bytes that a queue pickles an object to (a stream) go the same way. Both
answer None, having done nothing, to whatever is not that case, and the Python code goes on. The compiled module is left
out where it cannot be built, and unused with `SHMTENSOR_PURE=1`; what is promised is the same either way.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_module: Any = None
if os.environ.get("SHMTENSOR_PURE", "") in ("", "0"):
    try:
        _module = importlib.import_module("._hot", __name__)
    except ImportError:
        pass

BUILT = _module is not None
"""Whether the compiled module is there and wanted."""

_usable: bool | None = None


def module(*, tensors: bool = True) -> Any:
    """The compiled module, or None; for tensors only once torch is imported and offers what it needs."""
    return _with_tensors() or (None if tensors else _module)


def _with_tensors() -> Any:
    global _usable
    if _module is None or _usable is False:
        return None
    if _usable is None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        _usable = bool(_module.use(torch.Tensor))
    return _module if _usable else None


def settle(fd: int) -> None:
    """Before a line's descriptor is closed: wait until what another thread is to write to lines is written."""
    if _module is not None:
        _module.settle(fd)
