"""Saving a checkpoint of float32 tensors: how long the caller stands still, and until when it is safe on disk."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, run_roles
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

TENSORS = 64
SMALL, LARGE = 64 * MIB, 1024 * MIB
TINY = 1 * MIB
MOST = 5
PATIENCE = 300.0

Times = dict[str, float]


def _synced(path: Path) -> None:
    """Make a file, or the files of a directory, durable."""
    for each in (*(path.rglob("*") if path.is_dir() else ()), path, path.parent):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _timed(save: Callable[[Any, Path], object], state: Any, path: Path) -> Times:
    start = time.perf_counter()
    save(state, path)
    stall = time.perf_counter() - start
    _synced(path)
    return {"stall": stall, "durable": time.perf_counter() - start}


def _torch_save(state: Any, path: Path) -> None:
    import torch

    torch.save(state, path)


def _safetensors(state: Any, path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(state, path)


def _tensorizer(state: Any, path: Path) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    serializer.write_state_dict(state)
    serializer.close()


def _dcp(state: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path, no_dist=True)


def _dcp_async(state: Any, path: Path) -> Times:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path)
    stall = time.perf_counter() - start
    future.result()  # type: ignore[union-attr]
    _synced(path)
    return {"stall": stall, "durable": time.perf_counter() - start}


RIVALS: dict[str, tuple[Callable[[Any, Path], Times], str]] = {
    "torch.save": (partial(_timed, _torch_save), "torch"),
    "safetensors save_file": (partial(_timed, _safetensors), "safetensors"),
    "tensorizer": (partial(_timed, _tensorizer), "tensorizer"),
    "DCP save": (partial(_timed, _dcp), "torch"),
    "DCP async_save, threads": (_dcp_async, "torch"),
}


def measure_rival(effort: Effort, *, way: str, nbytes: int) -> Samples:
    """Seconds that the caller stands still, and until the files are durable, in a process of its own."""
    size = TINY if effort.scale == "tiny" else nbytes
    return run_roles([Role(_rival, (way, size, effort), DEFAULT_THREADS, forked=False)])[0]


def _rival(meet: Callable[[], object], way: str, nbytes: int, effort: Effort) -> Samples:
    state, samples = _state(nbytes), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(min(effort.least, MOST) + 1):
            for what, seconds in RIVALS[way][0](state, Path(folder) / str(number)).items():
                if number:  # imports, and whatever else happens once
                    samples.setdefault(what, []).append(seconds)
    return samples


def measure_ours(effort: Effort, *, nbytes: int) -> Samples:
    """The same of `save` into warm slots, by turns with a bare copy and with dd of as many bytes."""
    size = TINY if effort.scale == "tiny" else nbytes
    return run_roles([Role(_ours, (size, effort), DEFAULT_THREADS, forked=False)])[0]


def _ours(meet: Callable[[], object], nbytes: int, effort: Effort) -> Samples:
    import torch

    import shmtensor

    state, clock = _state(nbytes), time.perf_counter
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    samples: Samples = {"stall": [], "durable": [], "copy": [], "dd": []}
    with tempfile.TemporaryDirectory() as folder, shmtensor.CheckpointWriter(folder, keep_last=1) as writer:
        writer.start(state)
        for number in range(min(effort.least, MOST) + 1):
            start = clock()
            for name, tensor in state.items():
                copies[name].copy_(tensor)
            copied = clock() - start
            start = clock()
            handle = writer.save(state)
            stall = clock() - start
            done = handle.durable.result(PATIENCE)
            found = {"copy": copied, "stall": stall, "durable": done.seconds, "dd": _dd(Path(folder), nbytes)}
            for what, seconds in found.items() if number else ():
                samples[what].append(seconds)
        back = shmtensor.load_checkpoint(done.path, verify="all")
        if not all(torch.equal(back[name], tensor) for name, tensor in state.items()):
            raise AssertionError("other values were saved")
    return samples


def _dd(folder: Path, nbytes: int) -> float:
    """Seconds that dd takes to write as many zeros, past the page cache where it can be passed."""
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={nbytes // MIB}"]
    for flag in ("oflag=direct", "conv=fsync"):
        start = time.perf_counter()
        if subprocess.run([*command, flag], capture_output=True).returncode == 0:
            seconds = time.perf_counter() - start
            target.unlink()
            return seconds
    raise RuntimeError("dd cannot write here")


def _state(nbytes: int) -> dict[str, Any]:
    import torch

    return {f"layer.{index}": torch.randn(nbytes // TENSORS // 4) for index in range(TENSORS)}


def _needs(way: str) -> str | None:
    module = RIVALS[way][1]
    return None if importlib.util.find_spec(module) is not None else f"{module} is not installed"


_SIZES = (SMALL, LARGE)
_LINES = {
    "stall": "the caller stands still", "durable": "until it is durable", "copy": "bare copy", "dd": "dd oflag=direct",
}  # fmt: skip


def _label(way: str, nbytes: int) -> str:
    return f"{way}, {nbytes // MIB} MiB"


def _rows(way: str, nbytes: int, transport: str, metrics: tuple[str, ...]) -> tuple[RowSpec, ...]:
    label = _label(way, nbytes)
    against = {"stall": f"{_LINES['copy']}: {label}", "durable": f"{_LINES['dd']}: {label}"} if "dd" in metrics else {}
    return tuple(
        RowSpec(f"{_LINES[metric]}: {label}", transport, label, metric, "ms", 1e3, against.get(metric))
        for metric in metrics
    )


WORKLOAD = Workload(
    name="saving",
    title="Saving a checkpoint of 64 float32 tensors, ms",
    what=(
        "One process per row's library, with torch's usual number of threads, into the directory for temporary files. "
        "The caller stands still: until the call returns. Until it is durable: shmtensor's own figure; the others' "
        "files and directory are synced afterwards. shmtensor saves into slots that exist (start(state)), by turns "
        "with a bare copy_ of the same tensors and with dd of as many zeros; what it wrote last is loaded and "
        "compared. The first of each is not counted."
    ),
    cases=(
        *(
            Case(_label("shmtensor", n), SHMTENSOR, partial(measure_ours, nbytes=n), quick=n == SMALL) for n in _SIZES
        ),
        *(
            Case(
                _label(way, n), TORCH_DESCRIPTOR, partial(measure_rival, way=way, nbytes=n), quick=n == SMALL,
                needs=partial(_needs, way),
            )
            for way in RIVALS
            for n in _SIZES
        ),
    ),
    rows=(
        *(row for n in _SIZES for row in _rows("shmtensor", n, SHMTENSOR.name, ("stall", "copy", "durable", "dd"))),
        *(
            row
            for way in RIVALS
            for n in _SIZES
            for row in _rows(way, n, TORCH_DESCRIPTOR.name, ("stall", "durable"))
        ),
    ),
    rounds={"full": 2, "quick": 1},
)  # fmt: skip
