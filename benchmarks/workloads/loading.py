"""Loading a checkpoint of float32 tensors: mapped and read, from the page cache and from the disk."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import processes
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, run_roles
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

TENSORS = 64
SMALL, LARGE = 16 * MIB, 1024 * MIB
TINY = 1 * MIB
BLOCK = 16 * MIB
SETTLING = 0.05
"""Seconds until those that have been told whose turn it is sleep again: they would run beside a call of few ms."""
PATIENCE = 600.0
"""Seconds for all rounds: a first touch of memory that the host has to find again takes seconds per GiB."""


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


def _dd(path: Path, *flags: str) -> None:
    """The file, read once by a process that keeps nothing of it."""
    subprocess.run(["dd", f"if={path}", "of=/dev/null", f"bs={BLOCK}", *flags], check=True, capture_output=True)


def _dd_direct(path: Path) -> None:
    _dd(path, "iflag=direct")


OURS, THEIRS = "a.safetensors", "a.tensors"
WAYS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "shmtensor, mapped": (OURS, _load_ours),
    "shmtensor, read": (OURS, partial(_load_ours, map=False)),
    "shmtensor, read, no digests": (OURS, partial(_load_ours, map=False, verify=False)),
    "safetensors load_file": (OURS, _load_safetensors),
    "safetensors load_file, cloned": (OURS, _load_cloned),
    "tensorizer": (THEIRS, _load_tensorizer),
    "dd": (OURS, _dd),
    "dd, direct": (OURS, _dd_direct),
}
"""Which file, and how it is loaded."""


# --- the files


def _make_files(folder: Path, nbytes: int, others: bool) -> dict[str, float]:
    """A file of ours, which others load as well, and one of tensorizer's; the sums of the tensors.

    Both are copied in the same way then, so that they lie on the disk alike, however they were written.
    """
    import torch

    import shmtensor

    folder.mkdir()
    made = folder / "made"
    state = {f"layer.{index}": torch.randn(nbytes // TENSORS // 4) for index in range(TENSORS)}
    with shmtensor.CheckpointWriter(made, memory=64 * MIB) as writer:
        writer.save(state, name="a")
    if others:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(made / THEIRS))
        serializer.write_state_dict(state)
        serializer.close()
    for name in (OURS, THEIRS) if others else (OURS,):
        with (made / name).open("rb", buffering=0) as source, (folder / name).open("wb", buffering=0) as copy:
            while block := source.read(BLOCK):
                copy.write(block)
            os.fsync(copy.fileno())
        (made / name).unlink()
    return {name: tensor.sum().item() for name, tensor in state.items()}


def _forget(path: Path) -> None:
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read(path: Path) -> None:
    """Have the file in the page cache, and read just now: who is the first to touch it after seconds pays for that.

    By plain reading, in whatever pages the kernel takes for that: a mapping that is touched, or asked for, may fill the
    cache with others.
    """
    block = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


class HeldMemory:
    """Memory that is there: touched, and held until somebody is to load something into it.

    A virtual machine may give memory that is free for some seconds back to its host, and pays for it when it is touched
    again: more than loading costs, and who pays depends on who has freed what before.
    """

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def hold(self, nbytes: int) -> None:
        """Touch so many bytes, and keep them."""
        self._held = memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1

    def free(self) -> None:
        """Give them up: who asks for memory next gets them."""
        if self._held is not None:
            self._held.close()
            self._held = None


def _trim() -> None:
    """Give what the C library keeps of freed memory back to the kernel, so that each load finds what a first one does.

    Whether it keeps the memory of the load before is chance, and a load into memory that exists needs half of the time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


# --- by turns


def measure(effort: Effort, names: Sequence[str], rounds: int) -> Mapping[str, list[Samples]]:
    """Seconds of the call, and until every element was added up; of a file in the page cache, and of one that is not.

    A process for each case; in each round every case has its turn, first with all files in the page cache, then with
    the own file dropped from it, in an order that differs from round to round and is the same in each run.
    """
    cases = [CASES[name] for name in names]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # nothing stays if a process is killed
        processes.patience(PATIENCE),
    ):
        sizes = {size: TINY if effort.scale == "tiny" else size for size in {*(size for _, size in cases), TINY}}
        others = any(way == "tensorizer" for way, _ in cases)
        [sums] = run_roles([Role(_prepare, (Path(folder), sizes, others), DEFAULT_THREADS)])
        found = run_roles(
            [
                Role(_take_turns, (number, len(cases), rounds, way, Path(folder), size, sizes, sums),
                     DEFAULT_THREADS)
                for number, (way, size) in enumerate(cases)
            ]
        )  # fmt: skip
    return dict(zip(names, found, strict=True))


def _prepare(meet: Callable[[], object], folder: Path, sizes: Mapping[int, int], others: bool) -> dict[int, Any]:
    return {size: _make_files(folder / str(size), nbytes, others) for size, nbytes in sizes.items()}


def _take_turns(
    meet: Callable[[], object],
    number: int,
    count: int,
    rounds: int,
    way: str,
    folder: Path,
    size: int,
    sizes: Mapping[int, int],
    sums: Mapping[int, Mapping[str, float]],
) -> list[Samples]:
    name, load = WAYS[way]
    path = folder / str(size) / name
    _time(load, folder / str(TINY) / name, sums[TINY])  # imports, threads
    found: list[Samples] = [{} for _ in range(rounds)]
    memory, most = HeldMemory(), max(sizes.values())
    for turn in range(rounds):
        for heat in ("warm", "cold"):
            room = most * (5 if heat == "warm" else 9) // 4  # for the tensors; and for the page cache; and some more
            meet()  # nobody loads any more
            memory.free()
            if number == 0:
                for file in folder.glob("*/a.*") if heat == "warm" else ():
                    _forget(file)
                    _read(file)
                memory.hold(room)
            order = random.Random(f"{turn} {heat}").sample(range(count), count)
            for mine in (place == number for place in order):
                if mine:
                    (_forget if heat == "cold" else _read)(path)
                meet()
                memory.free()
                meet()
                if not mine:
                    continue
                time.sleep(SETTLING)
                if heat == "cold" or not way.startswith("dd"):
                    times = _time(load, path, sums[size])
                    found[turn] |= {f"{what}, {heat}": [seconds] for what, seconds in times.items()}
                if heat == "cold":
                    _forget(path)
                _trim()
                memory.hold(room)
    meet()
    return found


def _time(load: Callable[[Path], Any], path: Path, sums: Mapping[str, float]) -> dict[str, float]:
    start = time.perf_counter()
    loaded = load(path)
    called = time.perf_counter()
    if loaded is None:
        return {"call": called - start}
    if {name: tensor.sum().item() for name, tensor in loaded.items()} != sums:
        raise AssertionError("other values were loaded")
    return {"call": called - start, "used": time.perf_counter() - start}


def _needs(way: str) -> str | None:
    if way.startswith("dd"):
        return None if shutil.which("dd") else "dd is not installed"
    module = way.split()[0] if way.startswith(("safetensors", "tensorizer")) else None
    if module is not None and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return None


_METRICS = (
    ("call, warm", "call, page cache"), ("call, cold", "call, disk"),
    ("used, warm", "call + sum of every element, page cache"), ("used, cold", "call + sum of every element, disk"),
)  # fmt: skip


def _name(way: str, nbytes: int) -> str:
    return f"{way}, {nbytes // MIB} MiB"


def _transport(way: str) -> Any:
    return SHMTENSOR if way.startswith("shmtensor") else TORCH_DESCRIPTOR


_CHOSEN = [("shmtensor, mapped", SMALL), *((way, LARGE) for way in WAYS)]
CASES = {_name(way, nbytes): (way, nbytes) for way, nbytes in _CHOSEN}

WORKLOAD = Workload(
    name="loading",
    title="Loading a checkpoint of 64 float32 tensors, ms",
    what=(
        "A process for each row, all alive at once. In each round every one has its turn, right after the other, in "
        "an order that differs from round to round: first with the files in the page cache, filled by plain reading "
        "and read once more before each turn, then with the file dropped from it by posix_fadvise. Until its turn "
        "somebody holds memory enough for it, because free memory may be given back to a machine's host after 2 s, "
        "and touching it again takes longer than loading; what the C library keeps of freed memory is given back "
        "(malloc_trim), so that each load finds what a first one does. All load the same file, but tensorizer, whose "
        "format is its own; both were copied in the same way, into the directory for temporary files. The call, and "
        "the call with a sum over every tensor: a mapped file is read only then. load_file maps as well, so that from"
        " the page cache it copies nothing, which a reading row does, and so does the row that clones what was "
        "mapped: their tensors have memory of their own. shmtensor's reading rows compare digests, but for one; "
        "tensorizer's do not (its default), and it has as many readers as there are cores. torch has its usual number"
        " of threads. dd: the file, read once in blocks of 16 MiB by a process that keeps nothing of it, through the "
        "page cache and past it: what the disk gives. A target judges the median of the ratios of the rounds."
    ),
    cases=tuple(
        Case(name, _transport(way), None, quick=nbytes == SMALL, needs=partial(_needs, way))
        for name, (way, nbytes) in CASES.items()
    ),
    rows=tuple(
        RowSpec(
            f"{line}: {name}", _transport(way).name, name, metric, "ms", 1e3, group="ms", line=name, column=line
        )
        for name, (way, _) in CASES.items()
        for metric, line in _METRICS
        if metric == "call, cold" or not way.startswith("dd")
    ),
    rounds={"full": 7, "quick": 3},
    by_turns=measure,
)  # fmt: skip
