"""Loading a checkpoint of float32 tensors: mapped and read, from the page cache and from the disk."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..measure import RowSpec, Samples
from ..processes import Role, run_roles
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

TENSORS = 64
SMALL, LARGE = 16 * MIB, 1024 * MIB
TINY = 1 * MIB
MOST = 3


def _save_ours(state: Any, folder: Path) -> Path:
    import shmtensor

    with shmtensor.CheckpointWriter(folder, memory=64 * MIB) as writer:
        writer.save(state, name="a")
    return folder / "a.safetensors"


def _save_safetensors(state: Any, folder: Path) -> Path:
    import safetensors.torch

    safetensors.torch.save_file(state, folder / "a.safetensors")
    return folder / "a.safetensors"


def _save_tensorizer(state: Any, folder: Path) -> Path:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(folder / "a.tensors"))
    serializer.write_state_dict(state)
    serializer.close()
    return folder / "a.tensors"


def _load_ours(path: Path, **options: Any) -> Any:
    import shmtensor

    return shmtensor.load_checkpoint(path, **options)


def _load_safetensors(path: Path) -> Any:
    import safetensors.torch

    return safetensors.torch.load_file(path)


def _load_cloned(path: Path) -> Any:
    return {name: tensor.clone() for name, tensor in _load_safetensors(path).items()}


def _load_tensorizer(path: Path) -> Any:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(path), device="cpu", num_readers=os.cpu_count() or 1) as tensors:
        return dict(tensors.items())


_Save, _Load = Callable[[Any, Path], Path], Callable[[Path], Any]
WAYS: dict[str, tuple[_Save, _Load]] = {
    "shmtensor, mapped": (_save_ours, _load_ours),
    "shmtensor, read": (_save_ours, partial(_load_ours, map=False)),
    "shmtensor, read, no digests": (_save_ours, partial(_load_ours, map=False, verify=False)),
    "safetensors load_file": (_save_safetensors, _load_safetensors),
    "safetensors load_file, cloned": (_save_safetensors, _load_cloned),
    "tensorizer": (_save_tensorizer, _load_tensorizer),
}


def measure(effort: Effort, *, way: str, nbytes: int) -> Samples:
    """Seconds of the call, and until every element was added up; warm, and after the file left the page cache."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # nothing stays if the process is killed
        nbytes = TINY if effort.scale == "tiny" else nbytes
        return run_roles([Role(_measure, (Path(folder), way, nbytes, effort))])[0]


def _measure(meet: Callable[[], object], folder: Path, way: str, nbytes: int, effort: Effort) -> Samples:
    import torch

    save, load = WAYS[way]
    state = {f"layer.{index}": torch.randn(nbytes // TENSORS // 4) for index in range(TENSORS)}
    expected = {name: tensor.sum().item() for name, tensor in state.items()}
    samples: Samples = {f"{what}, {heat}": [] for what in ("call", "used") for heat in ("warm", "cold")}
    path = save(state, folder)
    del state
    _forget(path)
    for number in range(2 * min(effort.least, MOST) + 2):
        heat = "cold" if number % 2 else "warm"
        if heat == "cold":
            _forget(path)
        start = time.perf_counter()
        loaded = load(path)
        called = time.perf_counter()
        sums = {name: tensor.sum().item() for name, tensor in loaded.items()}
        used = time.perf_counter()
        if sums != expected:
            raise AssertionError("other values were loaded")
        del loaded
        if number > 1:  # imports, and the first fill of the page cache
            samples[f"call, {heat}"].append(called - start)
            samples[f"used, {heat}"].append(used - start)
    return samples


def _forget(path: Path) -> None:
    """Write the file to the disk and drop it from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _needs(way: str) -> str | None:
    module = way.split()[0] if way.startswith(("safetensors", "tensorizer")) else None
    if module is not None and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return None


_CASES = [*((way, LARGE) for way in WAYS), ("shmtensor, mapped", SMALL)]
_METRICS = (
    ("call, warm", "call, page cache"), ("call, cold", "call, disk"),
    ("used, warm", "call + sum of every element, page cache"), ("used, cold", "call + sum of every element, disk"),
)  # fmt: skip


def _name(way: str, nbytes: int) -> str:
    return f"{way}, {nbytes // MIB} MiB"


def _transport(way: str) -> Any:
    return SHMTENSOR if way.startswith("shmtensor") else TORCH_DESCRIPTOR


WORKLOAD = Workload(
    name="loading",
    title="Loading a checkpoint of 64 float32 tensors, ms",
    what=(
        "One process. Each library loads the file that it wrote, in the directory for temporary files. The call, and "
        "the call with a sum over every tensor: a mapped file is read only then. load_file maps as well, so that from "
        "the page cache it copies nothing, which a reading row does, and so does the row that clones what was mapped: "
        "their tensors have memory of their own. Disk: the file was dropped from the page cache by "
        "posix_fadvise before; what the disk itself caches is not under control. shmtensor's reading rows compare "
        "digests, but for one; tensorizer's do not (its default). tensorizer has as many readers as there are cores."
    ),
    cases=tuple(
        Case(
            _name(way, nbytes), _transport(way), partial(measure, way=way, nbytes=nbytes), quick=nbytes == SMALL,
            needs=partial(_needs, way),
        )
        for way, nbytes in _CASES
    ),
    rows=tuple(
        RowSpec(
            f"{line}: {_name(way, nbytes)}", _transport(way).name, _name(way, nbytes), metric, "ms", 1e3, group="ms",
            line=_name(way, nbytes), column=line,
        )
        for way, nbytes in _CASES
        for metric, line in _METRICS
    ),
    rounds={"full": 2, "quick": 1},
)  # fmt: skip
