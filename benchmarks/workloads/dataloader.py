"""torch's `DataLoader` with 2 workers: this library's context beside the default, and beside the memory's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..measure import RowSpec, Samples
from ..processes import Role, run_roles
from ..sizes import KIB, MIB, label
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR, Transport
from .base import Case, Effort, Workload

WORKERS = 2
SAMPLES = 32
"""In a batch."""
BATCHES = (32 * MIB, 256 * KIB)
COUNTS = {"full": 96, "quick": 20, "tiny": 4}
"""Batches of one run; small ones are more."""
MORE = 4
WARM = 6


class Images:
    """Samples that lie in memory, `nbytes / 32` each: loading one costs nothing. Each says which one it is."""

    def __init__(self, nbytes: int, batches: int) -> None:
        import torch

        self.batches = batches
        self.base = torch.arange(SAMPLES * (nbytes // SAMPLES // 4), dtype=torch.int32).view(SAMPLES, -1)

    def __len__(self) -> int:
        return SAMPLES * self.batches

    def __getitem__(self, index: int) -> Any:
        return self.base[index % SAMPLES]


def measure(context: str, nbytes: int, effort: Effort) -> Samples:
    """Batches per second that the loop over a DataLoader gets, once its workers are warm."""
    return run_roles([Role(_load, (context, nbytes, _count(nbytes, effort)))])[0]


def _count(nbytes: int, effort: Effort) -> int:
    return COUNTS[effort.scale] * (1 if nbytes >= MIB else MORE)


def _load(meet: Callable[[], object], context: str, nbytes: int, count: int) -> Samples:
    import torch
    from torch.utils.data import DataLoader

    import shmtensor

    how: Any = shmtensor.get_context("fork") if context == "shmtensor" else context
    data: Any = Images(nbytes, WARM + count + 1)
    items = iter(DataLoader(data, batch_size=SAMPLES, num_workers=WORKERS, multiprocessing_context=how))

    def check(batch: Any) -> None:
        if not torch.equal(batch, data.base):
            raise AssertionError("the DataLoader gave other samples")

    for _ in range(WARM):
        check(next(items))
    start = time.perf_counter()
    for _ in range(count):
        next(items)
    spent = time.perf_counter() - start
    check(next(items))
    del items
    return {"rate": [count / spent]}


def measure_bound(nbytes: int, effort: Effort) -> Samples:
    """Batches per second that the workers could make at most, with everything but the copies left out."""
    count = _count(nbytes, effort) // WORKERS
    samples: Samples = {}
    for metric, copies in (("stack", False), ("stack and copy", True)):
        found = run_roles([Role(_copy, (nbytes, count, copies))] * WORKERS)
        samples[metric] = [sum(rate for rate in found)]
    return samples


def _copy(meet: Callable[[], object], nbytes: int, count: int, copies: bool) -> float:
    import torch

    batch = list(Images(nbytes, 1).base)
    stacked, slot = (torch.zeros(SAMPLES, batch[0].numel(), dtype=torch.int32) for _ in range(2))

    def make() -> None:
        torch.stack(batch, out=stacked)
        if copies:
            slot.copy_(stacked)

    for _ in range(WARM):
        make()
    meet()
    start = time.perf_counter()
    for _ in range(count):
        make()
    return count / (time.perf_counter() - start)


KINDS: tuple[tuple[str, str, Transport], ...] = (
    ("shmtensor.get_context", "shmtensor", SHMTENSOR),
    ("default", "fork", TORCH_DESCRIPTOR),
)
BOUNDS = (("stack and one copy", "stack and copy"), ("stack alone", "stack"))
GROUP = "batches/s"
BOUND = "copies alone"


def row_name(line: str, nbytes: int) -> str:
    return f"{line}, {label(nbytes)}"


WORKLOAD = Workload(
    name="dataloader",
    title="DataLoader with 2 workers, batches/s",
    what=(
        "One process iterates over a torch DataLoader with 2 forked workers, batches of 32 samples that lie in the "
        "workers' memory, default collation, prefetch_factor 2; every batch is dropped at once and no byte of it is "
        "read; counted after 6 batches, whose bytes are checked. The only difference is multiprocessing_context. "
        "Copies alone, the bound by memory: two processes that do nothing but stack the same samples into a warm "
        "buffer and copy that into another one, as this library's workers do (the least that any DataLoader does is "
        "the stacking). With 2 cores the loop itself takes time from the workers."
    ),
    cases=(
        *(
            Case(row_name(line, nbytes), transport, partial(measure, context, nbytes))
            for nbytes in BATCHES
            for line, context, transport in KINDS
        ),
        *(Case(row_name(BOUND, nbytes), TORCH_DESCRIPTOR, partial(measure_bound, nbytes)) for nbytes in BATCHES),
    ),
    rows=(
        *(
            RowSpec(
                row_name(line, nbytes), transport.name, row_name(line, nbytes), "rate", "batches/s", 1.0,
                row_name("default", nbytes) if transport is SHMTENSOR else None,
                GROUP, line, label(nbytes), nbytes,
            )
            for line, _, transport in KINDS
            for nbytes in BATCHES
        ),
        *(
            RowSpec(
                row_name(line, nbytes), "torch", row_name(BOUND, nbytes), metric, "batches/s", 1.0,
                None, GROUP, line, label(nbytes), nbytes,
            )
            for line, metric in BOUNDS
            for nbytes in BATCHES
        ),
    ),
    heading="batch",
)  # fmt: skip
