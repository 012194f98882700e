"""Loading data formats in SPDL's pipeline, as its example does: loaders x threads or processes x workers."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import Role, run_roles
from ..transports import SHMTENSOR, SPDL_POOL
from ..transports.spdl_arena import ArenaExecutor, TwoWayArenaExecutor, quiet_arenas
from .base import Case, Effort, Workload

FORK = multiprocessing.get_context("fork")
"""Of the workers: the process that starts them is fresh and has one thread, and a server for each takes two seconds."""
IMAGE, LABEL = (3, 640, 480), (640, 480)
SINK_BUFFER = 1
WORKERS = (1, 2, 4, 8, 16, 32)
REPEATS = 1000
"""Samples of one run, unless it has taken `LONG` before."""
LONG = 1.0
"""Seconds."""
QUICK_REPEATS = 40
TINY_REPEATS = 4
BEST = {
    "torch": (607, 1008),
    "npy": (586, 1040),
    "npy, SPDL": (586, 1791),
    "npz": (584, 717),
    "npz compressed": (580, 524),
    "npz, SPDL": (592, 1667),
    "npz compressed, SPDL": (584, 1368),
}
"""Published: arrays per second of the best number of workers, with processes and with threads."""


def _sample() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"image": random.integers(0, 256, IMAGE, np.uint8), "label": random.integers(0, 256, LABEL, np.uint8)}


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def encode(loader: str) -> Any:
    """What the loader is given: bytes, or for npy one bytes for each array."""
    sample, file = _sample(), io.BytesIO()
    if loader == "torch":
        import torch

        torch.save({key: torch.from_numpy(array) for key, array in sample.items()}, file)
    elif loader.startswith("npz compressed"):
        np.savez_compressed(file, **sample)
    elif loader.startswith("npz"):
        np.savez(file, **sample)
    else:
        return _npy(sample["image"]), _npy(sample["label"])
    return file.getvalue()


def _load_torch(data: bytes) -> Any:
    import torch

    found = torch.load(io.BytesIO(data), weights_only=True)
    return found["image"], found["label"]


def _load_npy(data: tuple[bytes, bytes]) -> Any:
    return tuple(np.load(io.BytesIO(part), allow_pickle=False) for part in data)


def _load_npy_spdl(data: tuple[bytes, bytes]) -> Any:
    import spdl.io

    return tuple(spdl.io.load_npy(part) for part in data)


def _load_npz(data: bytes) -> Any:
    found = np.load(io.BytesIO(data), allow_pickle=False)
    return found["image"], found["label"]


def _load_npz_spdl(data: bytes) -> Any:
    import spdl.io

    found = spdl.io.load_npz(data)
    return found["image"], found["label"]


LOADERS: dict[str, Callable[[Any], Any]] = {
    "torch": _load_torch,
    "npy": _load_npy,
    "npy, SPDL": _load_npy_spdl,
    "npz": _load_npz,
    "npz compressed": _load_npz,
    "npz, SPDL": _load_npz_spdl,
    "npz compressed, SPDL": _load_npz_spdl,
}


def make_executor(kind: str, workers: int, samples: int = 1) -> Executor:
    """An executor of this kind, whose calls return so many samples at most."""
    if kind == "threads":
        return ThreadPoolExecutor(workers)
    if kind == "shmtensor":
        import shmtensor

        return shmtensor.ProcessPoolExecutor(workers, mp_context=FORK)
    if kind in (ONE_WAY, TWO_WAY):
        units = ARENA_UNITS if samples == 1 else ARENA_UNITS // 2
        pools = [_make_arena("segment pool", units, samples) for _ in range(workers * (1 + (kind == TWO_WAY)))]
        results, calls = pools[:workers], pools[workers:]
        return TwoWayArenaExecutor(results, calls) if calls else ArenaExecutor(results)
    return ProcessPoolExecutor(workers, mp_context=FORK)


def measure(loader: str, kind: str, workers: int, effort: Effort) -> Samples:
    """Samples per second that leave the pipeline's sink, once all workers have started."""
    return run_roles([Role(_run, (loader, kind, workers, repeats(effort)))])[0]


def repeats(effort: Effort) -> int:
    return {"full": REPEATS, "quick": QUICK_REPEATS}.get(effort.scale, TINY_REPEATS)


def _run(meet: Callable[[], object], loader: str, kind: str, workers: int, count: int) -> Samples:
    from spdl.pipeline import PipelineBuilder

    data, load = encode(loader), LOADERS[loader]
    with make_executor(kind, workers) as executor:
        executor.submit(len, ()).result()  # workers are forked before the pipeline has threads
        pipeline = (
            PipelineBuilder()
            .add_source(_source(data, 4 * workers + count))
            .pipe(load, executor=executor, concurrency=workers)
            .add_sink(SINK_BUFFER)
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            items = iter(pipeline)
            check(next(items))
            for _ in range(4 * workers - 1):  # all workers have started and loaded something
                next(items)
            start = time.perf_counter()
            taken, spent = 0, 0.0
            while taken < count and spent < LONG:
                next(items)
                taken += 1
                spent = time.perf_counter() - start
    return {"rate": [taken / spent]}


def _source(data: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        yield data


def check(found: Any) -> None:
    """Raise unless these are the sample's arrays."""
    sample = _sample()
    for array, expected in zip(found, (sample["image"], sample["label"]), strict=True):
        if not np.array_equal(np.asarray(array), expected):
            raise AssertionError("the pipeline gave other arrays")


def through_arena(source: Callable[[], Any], arena: str) -> Any:
    """What an iterable of samples gives in a process of its own, as SPDL's `iterate_in_subprocess` brings it here."""
    import spdl.pipeline

    quiet_arenas()
    memory = _make_arena(arena, ARENA_SAMPLES)
    memory._space_cv = FORK.Condition()  # its own is of the default context and refuses any other
    return spdl.pipeline.iterate_in_subprocess(source, buffer_size=4, mp_context="fork", timeout=60, arena=memory)


def _make_arena(arena: str, units: int, samples: int = 1) -> Any:
    """One of SPDL's, for so many messages of so many samples, loaded or encoded."""
    import spdl.pipeline

    nbytes = samples * ((int(np.prod(IMAGE)) + int(np.prod(LABEL)) + 4096) & ~63)
    if arena == "segment pool":
        return spdl.pipeline.SharedMemorySegmentPool(nbytes, units)
    return spdl.pipeline.SharedMemoryRingBuffer(units * nbytes)


def measure_arena(loader: str, arena: str, effort: Effort) -> Samples:
    """Samples per second from SPDL's `iterate_in_subprocess`, which loads in one process, through an arena."""
    return run_roles([Role(_run_arena, (loader, arena, repeats(effort)))])[0]


def _run_arena(meet: Callable[[], object], loader: str, arena: str, count: int) -> Samples:
    warm = 8
    items = iter(through_arena(partial(_Loaded, loader, warm + count), arena))
    check(next(items))
    for _ in range(warm - 1):
        next(items)
    start = time.perf_counter()
    for _ in range(count):
        item = next(items)
    spent = time.perf_counter() - start
    check(item)
    del item
    for _ in items:
        pass
    return {"rate": [count / spent]}


class _Loaded:
    """The loaded samples, one after the other."""

    def __init__(self, loader: str, count: int) -> None:
        quiet_arenas()  # in the process that SPDL starts, too
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        data, load = encode(self.loader), LOADERS[self.loader]
        for _ in range(self.count):
            yield load(data)


def no_spdl() -> str | None:
    for module in ("spdl.pipeline", "spdl.io"):
        try:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        except ModuleNotFoundError:
            return f"{module} is not installed"
    return None


KINDS = {
    "threads": "ThreadPoolExecutor",
    "processes": "ProcessPoolExecutor",
    "shmtensor": "shmtensor.ProcessPoolExecutor",
}
ARENAS = ("segment pool", "ring buffer")
ARENA_SAMPLES = 8
"""As many as an arena holds."""
ONE_WAY, TWO_WAY = "arenas for results", "arenas for calls and results"
"""Kinds of executor."""
ARENA_UNITS = 6
"""Messages that each of their arenas holds, half as many of larger ones: with fewer, workers wait; more leave the
caches."""
QUICK = ("npy",)
GROUPS = {kind: f"samples/s, {title}" for kind, title in KINDS.items()}


def _case(loader: str, kind: str, workers: int) -> str:
    return f"{loader}, {kind}, {workers}"


def _published(loader: str, kind: str) -> float | None:
    """The best of the published numbers of workers."""
    return {"processes": BEST[loader][0], "threads": BEST[loader][1]}.get(kind)


WORKLOAD = Workload(
    name="pipeline",
    title="SPDL's pipeline: loading data formats, samples/s",
    what=(
        "A sample is a random uint8 image (3, 640, 480) and label (640, 480), encoded once; the loader decodes "
        "it in an executor with 1 to 32 forked workers, sink buffer 1; samples per second at the sink over 1000 "
        "samples, or as many as come in 1 s, in one round, after each worker has loaded some. shmtensor: the same "
        "pipeline under its ProcessPoolExecutor. Arenas: SPDL's iterate_in_subprocess with one process that loads, and "
        "is given nothing. Published: the best number of workers on that machine; it stands beside every number."
    ),
    cases=(
        *(
            Case(
                _case(loader, kind, workers), SHMTENSOR if kind == "shmtensor" else SPDL_POOL,
                partial(measure, loader, kind, workers),
                quick=loader in QUICK and workers == 2,
                rounds=1,
                needs=no_spdl,
            )
            for loader in LOADERS
            for workers in WORKERS
            for kind in KINDS
        ),
        *(
            Case(f"npy, {arena}", SPDL_POOL, partial(measure_arena, "npy", arena), quick=False, rounds=1, needs=no_spdl)
            for arena in ARENAS
        ),
    ),
    rows=(
        *(
            RowSpec(
                _case(loader, kind, workers), SHMTENSOR.name if kind == "shmtensor" else "SPDL",
                _case(loader, kind, workers), "rate", "samples/s", 1.0,
                _case(loader, "processes", workers) if kind == "shmtensor" else None,
                GROUPS[kind], loader, f"{workers}", workers, published=_published(loader, kind),
            )
            for kind in KINDS
            for loader in LOADERS
            for workers in WORKERS
        ),
        *(
            RowSpec(
                f"npy, {arena}", "SPDL", f"npy, {arena}", "rate", "samples/s", 1.0,
                None, "samples/s, iterate_in_subprocess with an arena", f"npy, {arena}", "1", 1,
            )
            for arena in ARENAS
        ),
    ),
    rounds={"full": 1},
    heading="workers",
)  # fmt: skip
