"""Saving checkpoints: how long the caller stands still, until when it is safe on disk, what it costs besides."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import savers, states
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, run_roles
from ..savers import SAVERS
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

SMALL, LARGE, MODEL = "64 MiB", "1024 MiB", "GPT-2 + Adam"
_BYTES = {SMALL: 64 * MIB, LARGE: 1024 * MIB, MODEL: 1430 * MIB}
TINY = 1 * MIB
STREAMED = 256 * MIB
PATIENCE = 300.0
STEPS = 10
OURS = "shmtensor"


def _state(what: str, effort: Effort) -> Any:
    if what == MODEL:
        return states.gpt2(states.TOY if effort.scale == "tiny" else states.GPT2)
    return states.flat(TINY if effort.scale == "tiny" else _BYTES[what])


def _run(
    function: Callable[..., Samples], *args: Any, effort: Effort, threads: int = DEFAULT_THREADS, copies: bool = True
) -> Samples:
    """In a process of its own, a spawned one where torch copies: it does so with one thread in a forked one.

    The directory for what is saved is made here, so that nothing is left if the process must be killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        forked = not copies or effort.scale == "tiny"
        return run_roles([Role(function, (Path(folder), *args, effort), threads, forked=forked)])[0]


def lacks_room(nbytes: int) -> str | None:
    """Why there is no room for a state of so many bytes: two files of it, and two copies of it in shared memory."""
    for place, factor in ((tempfile.gettempdir(), 3), ("/dev/shm", 2.5)):
        if shutil.disk_usage(place).free < factor * nbytes:
            return f"less than {factor * nbytes / MIB:.0f} MiB are free in the directory for " + (
                "shared memory" if place == "/dev/shm" else "temporary files"
            )
    return None


# --- rivals


def measure_rival(effort: Effort, *, way: str, what: str) -> Samples:
    """Seconds of two saves, after one that is not counted: of a small state, or of the same where buffers are kept."""
    return _run(_rival, way, what, effort=effort, copies=SAVERS[way].background)


def _rival(meet: Callable[[], object], folder: Path, way: str, what: str, effort: Effort) -> Samples:
    saver, state = SAVERS[way], _state(what, effort)
    first = state if saver.background and way != "tensorizer, subprocess" else states.flat(TINY)
    with savers.silence():
        saver.save(first, folder / "first")
    _remove(folder / "first")
    samples: Samples = {}
    for _ in range(2):
        for metric, seconds in saver.save(state, folder / "next").items():
            samples.setdefault(metric, []).append(seconds)
        _remove(folder / "next")
    return samples


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- shmtensor


def measure_ours(effort: Effort, *, what: str) -> Samples:
    """`save` into warm slots, by turns with a bare copy and with dd of as many bytes."""
    return _run(_ours, what, effort=effort)


def _ours(meet: Callable[[], object], folder: Path, what: str, effort: Effort) -> Samples:
    import torch

    import shmtensor

    state, clock = _state(what, effort), time.perf_counter
    sources, nbytes = states.storages(state), states.size(state)
    copies = [torch.zeros_like(tensor) for tensor in sources]
    samples: Samples = {metric: [] for metric in ("stall", "durable", "after", "copy", "dd")}
    with shmtensor.CheckpointWriter(folder, keep_last=1) as writer:
        writer.start(state)
        for number in range(4 if what == SMALL else 3):
            if "step" in state:
                state["step"] += 1  # as in a training: no two states have the same description
            start = clock()
            for copy, tensor in zip(copies, sources, strict=True):
                copy.copy_(tensor)
            copied = clock() - start
            start = clock()
            handle = writer.save(state)
            stall = clock() - start
            done = handle.durable.result(PATIENCE)
            found = {
                "copy": copied, "stall": stall, "durable": done.seconds, "after": done.seconds - stall,
                "dd": savers.dd(folder, nbytes) * done.nbytes / nbytes,
            }  # fmt: skip
            for metric, seconds in found.items() if number else ():
                samples[metric].append(seconds)
        del copies
        _compare(shmtensor.load_checkpoint(done.path, verify="all"), state)
    return samples


def _compare(back: Any, state: Any) -> None:
    import torch

    found, expected = list(states.tensors(back)), list(states.tensors(state))
    if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
        raise AssertionError("other values were saved")


# --- through DCP, and encrypted


def measure_dcp(effort: Effort, *, what: str) -> Samples:
    """DCP's `async_save` with this library's writer and stager, by turns with a bare copy; into warm slots."""
    return _run(_dcp, what, effort=effort)


def _dcp(meet: Callable[[], object], folder: Path, what: str, effort: Effort) -> Samples:
    import torch
    import torch.distributed.checkpoint as dcp

    from shmtensor.dcp import AsyncStager, StorageReader, StorageWriter

    state, clock = _state(what, effort), time.perf_counter
    sources = states.storages(state)
    copies = [torch.zeros_like(tensor) for tensor in sources]
    samples: Samples = {metric: [] for metric in ("stall", "durable", "copy")}
    savers.one_rank()
    with savers.silence(), StorageWriter(folder, keep_last=1) as writer:
        stager = AsyncStager(writer)
        for number in range(4 if what == SMALL else 3):
            state["step"] = number + 1
            start = clock()
            for copy, tensor in zip(copies, sources, strict=True):
                copy.copy_(tensor)
            copied = clock() - start
            start = clock()
            future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            stall = clock() - start
            future.result(PATIENCE)  # type: ignore[union-attr]
            found = {"copy": copied, "stall": stall, "durable": clock() - start}
            for metric, seconds in found.items() if number else ():
                samples[metric].append(seconds)
        stager.close()
        expected = [copy.clone() for copy in copies]
        for tensor in sources:
            tensor.zero_()
        dcp.load(state, storage_reader=StorageReader(folder))
        if not all(map(torch.equal, sources, expected)):
            raise AssertionError("other values were saved")
    return samples


def measure_encrypted(effort: Effort) -> Samples:
    """An encrypted save and a plain one by turns, and which share of their files a slice of 1 % reads."""
    return _run(_encrypted, effort=effort)


def _encrypted(meet: Callable[[], object], folder: Path, effort: Effort) -> Samples:
    import shmtensor

    state = _state(LARGE, effort)
    samples: Samples = {}
    keys: dict[str, Any] = {"encrypted": {"key": bytes(range(32))}, "plain": {}}
    with contextlib.ExitStack() as stack:
        writers = {
            way: stack.enter_context(shmtensor.CheckpointWriter(folder / way, keep_last=1, **key))
            for way, key in keys.items()
        }
        for number in range(3):
            for way, writer in writers.items():
                done = writer.save(state).durable.result(PATIENCE)
                if number:
                    samples.setdefault(way, []).append(done.seconds)
    name, tensor = next(iter(state.items()))
    some = {name: slice(tensor.numel() - round(states.size(state) / tensor.itemsize * 0.01), None)}
    each = {name: slice(0, round(tensor.numel() * 0.01)) for name, tensor in state.items()}
    for way, key in keys.items():
        path = next((folder / way).glob("*.safetensors*"))
        for metric, slices in (("slice", some), ("slices", each)):
            for counted in (False, True):
                before = _bytes_read()
                part = shmtensor.load_checkpoint(path, keys=list(slices), slices=slices, map=False, **key)
                share = (_bytes_read() - before) / path.stat().st_size
                _compare(part, {name: state[name][where] for name, where in slices.items()})
                if counted:  # the first time modules are read as well
                    samples[f"{metric}, {way}"] = [share]
    return samples


def _bytes_read() -> int:
    """Bytes that this process has read so far, from the page cache or the disk."""
    with open("/proc/self/io", encoding="utf-8") as lines:
        return int(next(lines).split()[1])


# --- training goes on


def measure_steps(effort: Effort) -> Samples:
    """Seconds of ten steps of training, by turns alone and right after a save; with one torch thread."""
    return _run(_steps, effort=effort, threads=1, copies=False)


def _steps(meet: Callable[[], object], folder: Path, effort: Effort) -> Samples:
    import shmtensor

    training = states.Training(states.TOY if effort.scale == "tiny" else states.TRAINED, batch=2, length=63)
    samples: Samples = {"alone": [], "beside": [], "with": []}
    clock = time.perf_counter
    with shmtensor.CheckpointWriter(folder, keep_last=1) as writer:
        for _ in range(2):
            training.step()
        writer.start(training.state)
        writer.save(training.state).durable.result(PATIENCE)
        for saves in (False, True, True, False):
            start = clock()
            handle = writer.save(training.state) if saves else None
            saved = clock()
            for _ in range(STEPS):
                training.step()
            end = clock()
            if handle is None:
                samples["alone"].append(end - start)
                continue
            samples["beside"].append(end - saved)
            samples["with"].append(end - start)
            handle.durable.result(PATIENCE)
    return samples


# --- memory


def measure_memory(effort: Effort) -> Samples:
    """Bytes that trainer and writing process take above the idle writer while a state streams through `memory=`."""
    return _run(_memory, effort=effort)


def _memory(meet: Callable[[], object], folder: Path, effort: Effort) -> Samples:
    import shmtensor

    state = _state(LARGE, effort)
    memory = 2 * MIB if effort.scale == "tiny" else STREAMED
    with shmtensor.CheckpointWriter(folder, memory=memory) as writer:
        writer.start()
        pids = os.getpid(), writer.statistics().pid
        idle, rings = sum(map(own_memory, pids)), _shared()
        most, done = [idle], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                most.append(sum(map(own_memory, pids)))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            writer.save(state).durable.result(PATIENCE)
        finally:
            done.set()
            watching.join()
        most.append(sum(map(own_memory, pids)))
        shared = _shared() - rings
    return {"all": [max(most) - idle + shared], "rings": [shared], "processes": [max(most) - idle]}


def own_memory(pid: int) -> int:
    """Bytes of resident memory of a process without shared memory."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssFile:"))) << 10


def _shared() -> int:
    """Bytes that the files in `/dev/shm` take which this process maps."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if " /dev/shm/" in line}
    return sum(os.stat(path).st_blocks * 512 for path in paths if os.path.exists(path))


# --- the table

_LINES = {
    "stall": "the caller stands still", "copy": "bare copy", "durable": "until it is durable",
    "after": "from the return of save until it is durable", "dd": "dd oflag=direct",
    "written": "until it is written, not synced",
}  # fmt: skip
DCP = "DCP async_save, shmtensor"
ENCRYPTED = f"encrypted, {LARGE}"
_ENCRYPTED: dict[str, tuple[str, str, float, str | None]] = {
    "encrypted": ("until it is durable: shmtensor", "ms", 1e3, "plain"),
    "plain": ("the same without a key", "ms", 1e3, None),
    "slice, encrypted": ("one slice of 1 %, read of the file", "%", 100, None),
    "slice, plain": ("the same without a key, one slice", "%", 100, None),
    "slices, encrypted": ("1 % of each of 64 tensors, read of the file", "%", 100, None),
    "slices, plain": ("the same without a key, slices", "%", 100, None),
}  # fmt: skip
_STEPS, _MEMORY = "ten training steps", "memory, 1024 MiB through 256 MiB"


def row_name(metric: str, way: str, what: str) -> str:
    return f"{_LINES[metric]}: {way}, {what}"


def encrypted_row(metric: str) -> str:
    return f"{_ENCRYPTED[metric][0]}: {ENCRYPTED}"


def _encrypted_rows() -> tuple[RowSpec, ...]:
    return tuple(
        RowSpec(
            encrypted_row(metric), SHMTENSOR.name, ENCRYPTED, metric, unit, factor,
            encrypted_row(against) if against else None,
        )
        for metric, (_, unit, factor, against) in _ENCRYPTED.items()
    )  # fmt: skip


def _dcp_rows(what: str) -> tuple[RowSpec, ...]:
    return tuple(
        RowSpec(
            row_name(metric, DCP, what), SHMTENSOR.name, f"{DCP}, {what}", metric, "ms", 1e3,
            row_name("copy", DCP, what) if metric == "stall" else None,
        )
        for metric in ("stall", "copy", "durable")
    )  # fmt: skip


def _rows(way: str, what: str) -> tuple[RowSpec, ...]:
    name, transport = f"{way}, {what}", SHMTENSOR if way == OURS else TORCH_DESCRIPTOR
    metrics = ("stall", "durable") if way != OURS else ("stall", "copy", "durable", "after", "dd")
    if way != OURS and SAVERS[way].background:
        metrics = ("stall", "written", "durable")
    against = {"stall": "copy", "durable": "dd", "after": "dd"} if way == OURS else {}
    return tuple(
        RowSpec(
            row_name(metric, way, what), transport.name, name, metric, "ms", 1e3,
            row_name(against[metric], way, what) if metric in against else None,
        )
        for metric in metrics
    )  # fmt: skip


_QUICK = {"torch.save", "safetensors save_file", savers.THREADS}
_PAIRS = [
    *((way, SMALL) for way in SAVERS if way in _QUICK),
    *((way, LARGE) for way in SAVERS),
    *((way, MODEL) for way, saver in SAVERS.items() if saver.judged or way == "torch.save"),
]


def _needs(what: str, way: str | None = None) -> str | None:
    return (SAVERS[way].lacks() if way else None) or lacks_room(_BYTES[what])


def _encrypted_needs() -> str | None:
    missing = importlib.util.find_spec("cryptography") is None
    return "cryptography is not installed" if missing else lacks_room(2 * _BYTES[LARGE])


WORKLOAD = Workload(
    name="saving",
    title="Saving a checkpoint",
    what=(
        "States: so many MiB of float32 in 64 tensors; a module of GPT-2's size (124 million parameters, tied output) "
        "with the state of AdamW after a real step. One process per row's library, with torch's usual number of "
        "threads, into the directory for temporary files. The caller stands still: until the call returns. Until it "
        "is durable: from the call; the others' files and directory are synced afterwards, and what returns in the "
        "background also has the time when its files were complete, without fsync (of the others that is the call "
        "itself). shmtensor saves into slots that exist (start(state)), by turns with a bare copy_ of the same "
        "tensors into memory that was written before, with as many threads, and with dd of as many zeros in blocks "
        "of 16 MiB in the same directory; the first turn is not counted; what it wrote last is loaded and compared. "
        "Its save is durable when the file is synced under its name; the one before is deleted after that. "
        "DCP async_save with shmtensor: its StorageWriter and AsyncStager, one rank, by turns with a bare copy; "
        "until the future is done, the file is synced and the list names it; loaded by DCP and compared. "
        "Encrypted: the same state with and without key= by turns; then one slice of 1 % of the state's bytes, and 1 % "
        "of each tensor, are read, and the bytes that the process read (rchar) are divided by the file's. "
        "DCP async_save saved the same state once before, the others a small one; it copies a state into fresh memory, "
        "as it does by default, or, with its DefaultStager kept from save to save, into memory that is there. "
        "tensorizer's subprocess is spawned for each save, which is most of it; it shares the caller's tensors, which "
        "must not change until it is done. "
        "Ten training steps: a transformer of 11 million parameters (128 MiB with AdamW's state), one torch thread, "
        "alone and after a save by turns; the writing process needs a second core to leave them alone. Memory: 1 GiB "
        "through memory=256 MiB; what the files in /dev/shm take, and the most that both processes' resident memory "
        "without shared memory (RssAnon + RssFile, looked at every 5 ms) grew by, above the writer that was started "
        "and had nothing to do."
    ),
    cases=(
        *(
            Case(
                f"{OURS}, {what}", SHMTENSOR, partial(measure_ours, what=what), quick=what == SMALL,
                needs=partial(_needs, what),
            )
            for what in _BYTES
        ),
        *(
            Case(
                f"{DCP}, {what}", SHMTENSOR, partial(measure_dcp, what=what), quick=what == SMALL,
                needs=partial(_needs, what, savers.PROCESS),
            )
            for what in _BYTES
        ),
        Case(ENCRYPTED, SHMTENSOR, measure_encrypted, quick=False, needs=_encrypted_needs),
        Case(_STEPS, SHMTENSOR, measure_steps, quick=False, rounds=1),
        Case(_MEMORY, SHMTENSOR, measure_memory, quick=False, rounds=1, needs=partial(_needs, LARGE)),
        *(
            Case(
                f"{way}, {what}", TORCH_DESCRIPTOR, partial(measure_rival, way=way, what=what), quick=what == SMALL,
                rounds=None if what == LARGE and SAVERS[way].judged else 1, needs=partial(_needs, what, way),
            )
            for way, what in _PAIRS
        ),
    ),
    rows=(
        *(row for what in _BYTES for row in _rows(OURS, what)),
        *(row for what in _BYTES for row in _dcp_rows(what)),
        *_encrypted_rows(),
        RowSpec(f"{_STEPS} after a save", SHMTENSOR.name, _STEPS, "beside", "ms", 1e3, f"{_STEPS} alone"),
        RowSpec(f"{_STEPS} and the save", SHMTENSOR.name, _STEPS, "with", "ms", 1e3, f"{_STEPS} alone"),
        RowSpec(f"{_STEPS} alone", SHMTENSOR.name, _STEPS, "alone", "ms", 1e3),
        RowSpec(f"above the idle writer: {_MEMORY}", SHMTENSOR.name, _MEMORY, "all", "MiB", 1 / MIB),
        RowSpec(f"of it shared: {_MEMORY}", SHMTENSOR.name, _MEMORY, "rings", "MiB", 1 / MIB),
        RowSpec(f"of it the processes' own: {_MEMORY}", SHMTENSOR.name, _MEMORY, "processes", "MiB", 1 / MIB),
        *(row for way, what in _PAIRS for row in _rows(way, what)),
    ),
    rounds={"full": 2},
)  # fmt: skip
