"""CUDA: how long a trainer stands still while a state leaves the device, beside DCP's `async_save`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import savers
from ..gpu import GPU, Gpu, lacks
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, patience, run_roles
from ..sizes import MIB
from ..states import TENSORS
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload
from .saving import lacks_room

SMALL, LARGE = "1 GB", "10 GB"
_BYTES = {SMALL: 10**9, LARGE: 10**10}
TINY = 1 * MIB
PATIENCE = 600.0
SAVES, SAVES_LARGE = 3, 2
OURS, THEIRS = "shmtensor", "DCP async_save, pinned staging"


def measure(effort: Effort, *, way: str, what: str) -> Samples:
    """Seconds until `save` returns, until the state may be changed, until it is durable; the first one not counted."""
    nbytes = TINY if effort.scale == "tiny" else _BYTES[what]
    function = save_ours if way == OURS else save_theirs
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, patience(PATIENCE):
        return run_roles([Role(function, (Path(folder), nbytes, GPU), DEFAULT_THREADS, forked=False)])[0]


def _saves(nbytes: int) -> int:
    return SAVES_LARGE if nbytes == _BYTES[LARGE] else SAVES


def _state(gpu: Gpu, nbytes: int) -> dict[str, Any]:
    return {f"layer.{index}": gpu.random(nbytes // TENSORS // 4) for index in range(TENSORS)}


def save_ours(meet: Callable[[], object], folder: Path, nbytes: int, gpu: Gpu) -> Samples:
    import torch

    import shmtensor

    state, clock = _state(gpu, nbytes), time.perf_counter
    pinned = gpu.pinned(torch.empty(nbytes // TENSORS // 4))
    samples: Samples = {metric: [] for metric in ("stall", "staged", "durable", "link")}

    def leave() -> None:
        for tensor in state.values():
            pinned.copy_(tensor, non_blocking=True)

    with shmtensor.CheckpointWriter(folder, keep_last=1) as writer:
        writer.start(state)
        for number in range(1 + _saves(nbytes)):
            link = gpu.seconds(leave)
            start = clock()
            handle = writer.save(state, ordered=False)
            stall = clock() - start
            handle.staged.result(PATIENCE)
            staged = clock() - start
            done = handle.durable.result(PATIENCE)
            found = {"stall": stall, "staged": staged, "durable": done.seconds, "link": link}
            for metric, seconds in found.items() if number else ():
                samples[metric].append(seconds)
        back = shmtensor.load_checkpoint(done.path, verify="all")
        if not all(torch.equal(back[name], gpu.host(tensor)) for name, tensor in state.items()):
            raise AssertionError("other values were saved")
    return samples


def save_theirs(meet: Callable[[], object], folder: Path, nbytes: int, gpu: Gpu) -> Samples:
    import torch.distributed.checkpoint as dcp

    state, clock = _state(gpu, nbytes), time.perf_counter
    samples: Samples = {metric: [] for metric in ("stall", "staged", "durable")}
    stager = savers.make_stager(use_shared_memory=False)
    try:
        with savers.silence():
            for number in range(1 + _saves(nbytes)):
                path = folder / str(number)
                gpu.synchronize()
                start = clock()
                response: Any = dcp.async_save(
                    state, storage_writer=savers.files(path), async_stager=stager, no_dist=True
                )
                stall = clock() - start
                response.staging_completion.result(PATIENCE)
                staged = clock() - start
                response.upload_completion.result(PATIENCE)
                savers.sync(path)
                found = {"stall": stall, "staged": staged, "durable": clock() - start}
                for metric, seconds in found.items() if number else ():
                    samples[metric].append(seconds)
    finally:
        stager.close()
    return samples


def _needs(what: str, way: str) -> str | None:
    why = lacks()
    if why is None and way == THEIRS:
        why = savers.lacks_stager()
    return why or lacks_room(_BYTES[what])


_LINES = {
    "stall": "save returns", "staged": "the state may be changed", "durable": "it is durable",
    "link": "bare copies to pinned memory",
}  # fmt: skip


def row_name(metric: str, way: str, what: str) -> str:
    return f"{_LINES[metric]}: {way}, state of {what}"


def _rows(way: str, what: str) -> tuple[RowSpec, ...]:
    transport = SHMTENSOR if way == OURS else TORCH_DESCRIPTOR
    metrics = _LINES if way == OURS else ("stall", "staged", "durable")
    against = {
        **({metric: row_name(metric, THEIRS, what) for metric in ("stall", "durable")} if way == OURS else {}),
        "staged": row_name("link", OURS, what),
    }
    return tuple(
        RowSpec(
            row_name(metric, way, what), transport.name, f"{way}, {what}", metric, "ms", 1e3, against.get(metric)
        )
        for metric in metrics
    )  # fmt: skip


WORKLOAD = Workload(
    name="cuda-saving",
    title="CUDA: saving a state that lies on the device",
    what=(
        f"A state of {TENSORS} float32 tensors on the device, warm slots or staging buffers, files in the directory "
        "for temporary files; one save that is not counted, then three (of 10 GB two). Save returns: what the caller "
        "waits for. The state may be changed: h.staged with ordered=False; DCP's staging_completion. DCP: async_save "
        "in a thread with DefaultStager's pinned memory, asynchronous staging and non-blocking copies. Bare copies: "
        "the same bytes to one pinned buffer, until the device is idle."
    ),
    cases=tuple(
        Case(
            f"{way}, {what}", SHMTENSOR if way == OURS else TORCH_DESCRIPTOR, partial(measure, way=way, what=what),
            quick=what == SMALL, rounds=1 if what == LARGE else None, needs=partial(_needs, what, way),
        )
        for what in _BYTES
        for way in (OURS, THEIRS)
    ),
    rows=tuple(row for what in _BYTES for way in (OURS, THEIRS) for row in _rows(way, what)),
    rounds={"full": 2},
)  # fmt: skip
