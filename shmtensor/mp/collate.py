"""Memory that `torch.utils.data.default_collate` stacks batches into, in worker processes of this context.

By itself it allocates new shared memory for each batch, because the standard queue can pass that on without a copy; the
kernel then zeroes every page, which costs more than the stacking. Our queue copies a batch into a slot and needs no
shared memory, so a few buffers serve all batches: one is reused when no tensor uses it any more.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any, Final

import numpy as np

_LEAST: Final = 64 << 10
"""Batches of fewer bytes get ordinary memory; buffers of others are kept."""

_KEPT: Final = 8
"""Spare buffers at most."""

_spare: dict[int, Any] = {}
"""Spare buffers by identity. Taking one out is atomic, so that no two threads get the same."""

_uses: dict[int, weakref.ref[Any]] = {}
"""Arrays that tensors of living batches are views of, by identity."""


def install() -> None:
    """Stack into reused buffers from now on, if this process has imported torch's data loading."""
    collate: Any = sys.modules.get("torch.utils.data._utils.collate")
    if collate is not None:  # a documented table that users may change
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
    return torch.stack(batch, out=torch.from_numpy(_buffer(nbytes)).view(first.dtype).view(shape))


def _buffer(nbytes: int) -> Any:
    """A uint8 array [nbytes] with any contents, over a reused buffer if one fits."""
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
