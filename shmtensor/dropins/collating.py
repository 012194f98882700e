"""Batches in warm memory: what `torch.utils.data.default_collate` stacks into, in worker processes of this context.

By itself it makes new shared memory for each batch, because the standard queue can pass that on without a copy; the
kernel then zeroes every page of it, which costs more than the stacking. Our queue copies a batch into a slot and needs
no shared memory, so the same few buffers serve all batches: one is used again when the last tensor over it has died.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any, Final

import numpy as np

_LEAST: Final = 64 << 10
"""Bytes from which on a buffer is kept; smaller batches are ordinary memory."""

_KEPT: Final = 8
"""Buffers that wait for their next use, at most."""

_spare: dict[int, Any] = {}
"""By identity, buffers that wait; taking one out is one step, so that no two threads get the same."""

_uses: dict[int, weakref.ref[Any]] = {}
"""By identity, the arrays that the tensors of living batches are views of."""


def install() -> None:
    """Stack into warm memory from now on, if this process has torch's data loading at all."""
    collate: Any = sys.modules.get("torch.utils.data._utils.collate")
    if collate is not None:  # a documented table, made to be changed
        collate.default_collate_fn_map[sys.modules["torch"].Tensor] = _collate


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    torch: Any = sys.modules["torch"]
    first = batch[0]
    plain = type(first) is torch.Tensor and first.is_cpu and first.layout is torch.strided and not first.is_nested
    if not plain or torch.utils.data.get_worker_info() is None:
        return sys.modules["torch.utils.data._utils.collate"].collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    shape = (len(batch), *first.shape)
    nbytes = math.prod(shape) * first.element_size()
    if nbytes < _LEAST or any(tensor.requires_grad for tensor in batch):
        return torch.stack(batch)
    return torch.stack(batch, out=torch.from_numpy(_warm(nbytes)).view(first.dtype).view(shape))


def _warm(nbytes: int) -> Any:
    """A uint8 array [nbytes], with any contents."""
    buffer = _take_spare(nbytes)
    if buffer is None:
        torch: Any = sys.modules["torch"]
        buffer = torch.empty(nbytes, dtype=torch.uint8).numpy()  # 64-byte aligned
    array = np.ndarray((nbytes,), np.uint8, memoryview(buffer))

    def spare(use: weakref.ref[Any], key: int = id(array)) -> None:
        del _uses[key]
        _spare[id(buffer)] = buffer
        if len(_spare) > _KEPT:
            _spare.pop(next(iter(_spare), 0), None)

    _uses[id(array)] = weakref.ref(array, spare)
    return array


def _take_spare(nbytes: int) -> Any:
    for key, buffer in list(_spare.items()):
        if nbytes <= buffer.nbytes <= 2 * nbytes and _spare.pop(key, None) is not None:
            return buffer
    return None
