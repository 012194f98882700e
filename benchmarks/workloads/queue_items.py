"""Kinds of items that people put into a queue: `Queue` beside the standard library's, and tensors beside torch's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import fresh_name
from ..sizes import KIB, MIB
from ..transports import PICKLE, SHMTENSOR_QUEUE, TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM, LinkSettings, Transport, opened
from .base import Case, Effort, Workload
from .messages import rate_of

IN_FLIGHT = 64


def _array(nbytes: int) -> Any:
    return np.arange(nbytes // 4, dtype=np.float32)


def _tensor(nbytes: int) -> Any:
    import torch

    return torch.arange(nbytes // 4).float()


KINDS: dict[str, Callable[[], Any]] = {
    "small array": lambda: _array(KIB),
    "large array": lambda: _array(MIB),
    "dict with a small array": lambda: {"i": 1, "a": _array(KIB), "n": "abc"},
    "dict with a large array": lambda: {"i": 1, "a": _array(MIB), "n": "abc"},
    "tuple of arrays": lambda: (_array(KIB), _array(KIB), 7),
    "bytes": lambda: bytes(KIB),
    "large bytes": lambda: bytes(MIB),
    "plain objects": lambda: {"step": 3, "path": "/data/a.jpg", "box": [0.1, 0.2, 0.3, 0.4], "label": None},
}
"""Name -> the item; small ones hold 1 KiB, large ones 1 MiB."""
TENSORS: dict[str, Callable[[], Any]] = {
    "small tensor": lambda: _tensor(KIB),
    "large tensor": lambda: _tensor(MIB),
}
TORCHS = (TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM)
WAITING = 20_000
BACKLOG = f"small arrays, of which {WAITING:,} wait"
"""In place of a kind: all are put before the first one is got."""


def items(kind: str) -> list[Any]:
    """What is put, one after the other."""
    return [{**KINDS, **TENSORS}[kind]()]


def measure(transport: Transport, effort: Effort, *, kind: str) -> Samples:
    """Items per second at the getter."""
    if kind == BACKLOG:
        return {"rate": [_backlog(transport) for _ in range(2)]}
    with opened(transport, LinkSettings(fresh_name(), KIB, IN_FLIGHT)) as [link]:
        return rate_of(link, partial(items, kind), kind, effort)


def _backlog(transport: Transport) -> float:
    """Items per second of one process that puts all, and then gets all."""
    import shmtensor

    context: Any = multiprocessing if transport is PICKLE else shmtensor
    queue, item = context.get_context("spawn").Queue(), _array(KIB)
    start = time.perf_counter()
    for _ in range(WAITING):
        queue.put(item)
    for _ in range(WAITING):
        found = queue.get()
    rate = WAITING / (time.perf_counter() - start)
    np.testing.assert_array_equal(found, item)
    queue.close()
    queue.join_thread()
    return rate


CELLS: tuple[tuple[str, Transport], ...] = (
    *((kind, transport) for kind in (*KINDS, BACKLOG) for transport in (PICKLE, SHMTENSOR_QUEUE)),
    *((kind, transport) for kind in TENSORS for transport in (*TORCHS, SHMTENSOR_QUEUE)),
)


def row_name(kind: str, transport: Transport) -> str:
    """Of a case, and of its row."""
    return f"{kind}, {transport.name}"


def _rival(kind: str, transport: Transport) -> str | None:
    if transport is not SHMTENSOR_QUEUE:
        return None
    return row_name(kind, TORCH_DESCRIPTOR if kind in TENSORS else PICKLE)


WORKLOAD = Workload(
    name="queue-items",
    title="Kinds of items in a queue",
    what=(
        "Items a second at the getter of a queue between two processes, each queue made for `spawn`, at most 64 items "
        "in it, counted as in the table of one way; the last item of each stretch is compared outside the clock. Small "
        "ones hold 1 KiB, large ones 1 MiB. Tensors are compared with torch's queues, which put copies in new shared "
        "memory: they would send the same memory again otherwise. Where items wait, one process puts all, and then "
        "gets them all: items a second of both together."
    ),
    cases=tuple(
        Case(row_name(kind, transport), transport, partial(measure, transport, kind=kind)) for kind, transport in CELLS
    ),
    rows=tuple(
        RowSpec(
            row_name(kind, transport), transport.name, row_name(kind, transport), "rate", "k items/s", 1e-3,
            _rival(kind, transport),
        )
        for kind, transport in CELLS
    ),
    rounds={"full": 5, "quick": 2},
)  # fmt: skip
