"""`ProcessPoolExecutor` on the SPDL example's npy sample, beside the standard executor and SPDL's own arena."""

from __future__ import annotations

import collections
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, run_roles
from ..transports import PICKLE, SHMTENSOR, SPDL_POOL, Transport
from ..transports.spdl_arena import quiet_arenas
from . import pipeline
from .base import Case, Effort, Workload

WORKERS = 2
UNDER_WAY = 8
"""Calls of the plain loop that run or wait at a time."""
CHUNK = 8
"""Calls in one of `map`."""
SINK_BUFFER = 1
WARM = 40
COUNTS = {"full": 300, "quick": 80, "tiny": 8}
"""Samples of one run."""

PATHS, BYTES = "given paths", "given bytes"
LOOP, PIPELINE = "submit and result", "SPDL's pipeline"
LOOPS: dict[str, str] = {LOOP: "plain loop: submit, result", PIPELINE: "inside SPDL's pipeline"}


def _write_files(folder: str) -> tuple[str, str]:
    """The sample as two `.npy` files."""
    image, label = Path(folder, "image.npy"), Path(folder, "label.npy")
    for path, data in zip((image, label), pipeline.encode("npy"), strict=True):
        path.write_bytes(data)
    return str(image), str(label)


def _load_files(paths: tuple[str, str]) -> Any:
    return tuple(np.load(path, allow_pickle=False) for path in paths)


def _job(job: str, folder: str) -> tuple[Callable[[Any], Any], Any]:
    """What a worker calls, and with what."""
    if job == BYTES:
        return pipeline.LOADERS["npy"], pipeline.encode("npy")
    return _load_files, _write_files(folder)


def measure(kind: str, way: str, job: str, effort: Effort) -> Samples:
    """Samples per second, and the CPU seconds of one, of the parent and its workers together."""
    return run_roles([Role(_run, (kind, way, job, COUNTS[effort.scale]))])[0]


def _run(meet: Callable[[], object], kind: str, way: str, job: str, count: int) -> Samples:
    with tempfile.TemporaryDirectory() as folder, pipeline.make_executor(kind, WORKERS) as executor:
        load, given = _job(job, folder)
        executor.submit(len, ()).result()  # workers are forked before there are threads
        if way == LOOP:
            return _time(_submit_and_take(executor, load, given, WARM + count), count)
        return _time_pipeline(lambda stage: stage(load, executor=executor, concurrency=WORKERS), given, count)


def _submit_and_take(executor: Any, load: Callable[[Any], Any], given: Any, count: int) -> Iterator[Any]:
    waiting: collections.deque[Any] = collections.deque()
    for _ in range(count):
        if len(waiting) == UNDER_WAY:
            yield waiting.popleft().result()
        waiting.append(executor.submit(load, given))
    while waiting:
        yield waiting.popleft().result()


def measure_map(kind: str, way: str, job: str, effort: Effort) -> Samples:
    """Samples per second of `map` with `chunksize`, in the plain loop."""
    return run_roles([Role(_run_map, (kind, job, COUNTS[effort.scale]))])[0]


def _run_map(meet: Callable[[], object], kind: str, job: str, count: int) -> Samples:
    with tempfile.TemporaryDirectory() as folder, pipeline.make_executor(kind, WORKERS, CHUNK) as executor:
        load, given = _job(job, folder)
        executor.submit(len, ()).result()
        # objects of their own for each call of a chunk: the same one would be sent once
        alike = [tuple(bytes(bytearray(part)) if job == BYTES else part for part in given) for _ in range(CHUNK)]
        for found in executor.map(load, itertools.islice(itertools.cycle(alike), WARM), chunksize=CHUNK):
            pipeline.check(found)
        start = time.perf_counter()  # before the first call, since workers go on while this process does not
        for found in executor.map(load, itertools.islice(itertools.cycle(alike), count), chunksize=CHUNK):
            found[0][0, 0, 0]
        spent = time.perf_counter() - start
        pipeline.check(found)
        del found  # it may lie in the executor's memory
    return {"rate": [count / spent]}


def _time_pipeline(add_stage: Callable[[Any], Any] | None, source: Any, count: int) -> Samples:
    """Through a pipeline: a source that gives the same thing again and again, and a stage; or only a source."""
    from spdl.pipeline import PipelineBuilder

    if add_stage is None:
        builder = PipelineBuilder().add_source(source)
    else:
        builder = add_stage(PipelineBuilder().add_source(source for _ in range(WARM + count)).pipe)
    built = builder.add_sink(SINK_BUFFER).build(num_threads=1)
    with built.auto_stop():
        return _time(iter(built), count)


def _time(items: Iterator[Any], count: int) -> Samples:
    """The first samples are not counted; one byte of each is read."""
    for _ in range(WARM):
        item = next(items)
        pipeline.check(item)
    start = time.perf_counter()
    for _ in range(count):
        item = next(items)
        item[0][0, 0, 0]
    spent = time.perf_counter() - start
    pipeline.check(item)
    del item
    for _ in items:
        pass
    return {"rate": [count / spent]}


def measure_arena(arena: str, way: str, job: str, effort: Effort) -> Samples:
    """Samples per second from one process that loads them, through an arena of SPDL's."""
    return run_roles([Role(_run_arena, (arena, way, job, COUNTS[effort.scale]))])[0]


def _run_arena(meet: Callable[[], object], arena: str, way: str, job: str, count: int) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        source = pipeline.through_arena(partial(_Loaded, *_job(job, folder), WARM + count), arena)
        samples = _time(iter(source), count) if way == LOOP else _time_pipeline(None, source, count)
        del source
        gc.collect()  # SPDL ends its process when the iterable is garbage; at this one's end that takes seconds
    return samples


def measure_producer(kind: str, way: str, job: str, effort: Effort) -> Samples:
    """Samples per second from one process that loads them and sends them through this library's work queue."""
    return run_roles([Role(_run_producer, (way, job, COUNTS[effort.scale]))])[0]


def _run_producer(meet: Callable[[], object], way: str, job: str, count: int) -> Samples:
    import shmtensor

    channel = fresh_name()
    with tempfile.TemporaryDirectory() as folder:
        sender = pipeline.FORK.Process(target=_produce, args=(channel, _Loaded(*_job(job, folder), WARM + count)))
        sender.start()
        with shmtensor.Consumer(channel) as receiver:
            source = (message.value for message in receiver)
            samples = _time(source, count) if way == LOOP else _time_pipeline(None, source, count)
        sender.join()
    return samples


def _produce(channel: str, source: _Loaded) -> None:
    import shmtensor

    with shmtensor.Producer(channel, slots=pipeline.ARENA_SAMPLES) as sender:
        for sample in source:
            sender.send(sample)


def measure_bound(effort: Effort) -> Samples:
    """Samples per second of a pipeline whose executor has the sample at once: what SPDL's pipeline itself takes."""
    return run_roles([Role(_run_bound, (COUNTS[effort.scale],))])[0]


def _run_bound(meet: Callable[[], object], count: int) -> Samples:
    found = pipeline.LOADERS["npy"](pipeline.encode("npy"))
    return _time_pipeline(lambda stage: stage(lambda _: found, executor=_AtOnce(), concurrency=WORKERS), None, count)


class _AtOnce(Executor):
    """Runs a call while it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


class _Loaded:
    """The loaded samples, one after the other."""

    def __init__(self, load: Callable[[Any], Any], given: Any, count: int) -> None:
        quiet_arenas()  # in the process that SPDL starts, too
        self.load, self.given, self.count = load, given, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield self.load(self.given)


EXECUTORS: tuple[tuple[str, str, Transport], ...] = (
    ("shmtensor.ProcessPoolExecutor", "shmtensor", SHMTENSOR),
    ("ProcessPoolExecutor", "processes", PICKLE),
    ("ProcessPoolExecutor, results by SPDL's pools", pipeline.ONE_WAY, SPDL_POOL),
    ("executors of 1 worker, calls and results by SPDL's pools", pipeline.TWO_WAY, SPDL_POOL),
)
OURS, STANDARD, RESULTS_BY_POOLS, ALL_BY_POOLS = (line for line, _, _ in EXECUTORS)
PRODUCER = "shmtensor Producer, one process"
JOBS = (PATHS, BYTES)
BOUND = "SPDL's pipeline: an executor that does nothing"


def arena_line(arena: str) -> str:
    return f"SPDL {arena}, one process, asked for nothing"


def map_line(line: str) -> str:
    return f"{line}, map in chunks of {CHUNK}"


def row_name(way: str, line: str, job: str) -> str:
    return f"{way}: {line}, {job}"


def _jobs(line: str) -> tuple[str, ...]:
    """Paths need no arena to go through."""
    return (BYTES,) if line in (ALL_BY_POOLS, map_line(ALL_BY_POOLS)) else JOBS


def _rows(way: str, line: str, transport: Transport) -> tuple[RowSpec, ...]:
    return tuple(
        RowSpec(
            row_name(way, line, job), transport.name, row_name(way, line, job), "rate", "samples/s", 1.0,
            None if line == OURS else row_name(way, OURS, job), f"samples/s, {LOOPS[way]}", line, job,
        )
        for job in _jobs(line)
    )  # fmt: skip


_SLOWER = {
    RESULTS_BY_POOLS, ALL_BY_POOLS, PRODUCER, arena_line("ring buffer"), *(map_line(line) for line, _, _ in EXECUTORS),
}  # fmt: skip
"""Left out of a quick run."""


def _cases(way: str, line: str, transport: Transport, run: Callable[..., Samples], kind: str) -> tuple[Case, ...]:
    return tuple(
        Case(row_name(way, line, job), transport, partial(run, kind, way, job),
             quick=line not in _SLOWER, needs=pipeline.no_spdl)
        for job in _jobs(line)
    )  # fmt: skip


_LINES: tuple[tuple[str, Transport, Callable[..., Samples], str], ...] = (
    *((line, transport, measure, kind) for line, kind, transport in EXECUTORS),
    (PRODUCER, SHMTENSOR, measure_producer, ""),
    *((arena_line(arena), SPDL_POOL, measure_arena, arena) for arena in pipeline.ARENAS),
)
_MAPS: tuple[tuple[str, Transport, Callable[..., Samples], str], ...] = tuple(
    (map_line(line), transport, measure_map, kind) for line, kind, transport in EXECUTORS
)
_LINES_OF = {LOOP: (*_LINES, *_MAPS), PIPELINE: _LINES}

WORKLOAD = Workload(
    name="executor",
    title="ProcessPoolExecutor with 2 workers: SPDL's npy sample, samples/s",
    what=(
        "Each call makes the sample of the SPDL example, a uint8 image (3, 640, 480) and label (640, 480), of two .npy "
        "encodings, and returns both arrays. Given paths: the worker reads the files (in the page cache). Given bytes, "
        "as in the example: the encoded sample goes to the worker as an argument. Plain loop: 8 calls under way, the "
        "oldest result is taken, one byte of it read, and dropped. SPDL's pipeline: the executor is that of a stage "
        "with concurrency 2, sink buffer 1. Forked workers; counted after 40 samples, which are checked. SPDL's arena "
        "under the same calls: its segment pools, one for each worker, whose own offload and restore the standard "
        "executor's result queue calls as it pickles and unpickles; results are views. Arguments go as the standard "
        "executor sends them, or by further pools, which takes an executor for each worker, as a pool has one reader. "
        "SPDL itself brings only what one process of iterate_in_subprocess loads by itself: it is asked for nothing "
        "and given nothing (with bytes it has them already); in the pipeline that is the source. What is like that "
        "here is a Producer in one process that loads by itself, and a Consumer. Map in chunks: "
        "map(chunksize=8), no bytes twice in a chunk, timed from the call to the last sample. An executor "
        "that does nothing gives the same arrays in submit: what the pipeline itself takes, which bounds its rows."
    ),
    cases=(
        *(case for way in LOOPS for line in _LINES_OF[way] for case in _cases(way, *line)),
        Case(BOUND, SPDL_POOL, measure_bound, needs=pipeline.no_spdl),
    ),
    rows=(
        *(row for way in LOOPS for line, transport, _, _ in _LINES_OF[way] for row in _rows(way, line, transport)),
        RowSpec(
            BOUND, "SPDL", BOUND, "rate", "samples/s", 1.0, None,
            f"samples/s, {LOOPS[PIPELINE]}", "an executor that does nothing", PATHS,
        ),
    ),
    rounds={"full": 2},
    heading="executor",
)  # fmt: skip
