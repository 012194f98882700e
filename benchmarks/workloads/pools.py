"""`Pool` and `Pipe` of `shmtensor.get_context()`, beside the standard library's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import Role, run_roles
from ..sizes import KIB, MIB
from ..transports import PICKLE, SHMTENSOR, Transport
from .base import Case, Effort, Workload

WORKERS = 2
WARM = 20
PATIENCE_S = 60.0

KINDS: dict[str, Callable[[], Any]] = {
    "a number": lambda: 7,
    "a 1 KiB array": lambda: np.arange(KIB // 4, dtype=np.float32),
    "a 1 MiB array": lambda: np.arange(MIB // 4, dtype=np.float32),
}
COUNTS = {"full": {MIB: 300, 0: 3000}, "quick": {MIB: 60, 0: 500}, "tiny": {MIB: 4, 0: 8}}
"""Tasks, or round trips, of one run: of large values, and of others."""
OURS, STANDARD = "shmtensor", "multiprocessing"
LIBRARIES: dict[str, Transport] = {STANDARD: PICKLE, OURS: SHMTENSOR}

APPLY, IMAP, ROUND_TRIP = "apply", "imap", "round trip"


def _context(library: str) -> Any:
    if library == STANDARD:
        return multiprocessing.get_context("fork")
    import shmtensor

    return shmtensor.get_context("fork")


def _count(scale: str, value: Any) -> int:
    return COUNTS[scale][MIB if getattr(value, "nbytes", 0) >= MIB else 0]


def _same(value: Any) -> Any:
    return value


def _check(found: Any, value: Any) -> None:
    if not np.array_equal(np.asarray(found), np.asarray(value)):
        raise AssertionError("something else came back")


def measure_pool(library: str, effort: Effort, *, kind: str) -> Samples:
    """Seconds of one `apply`, and tasks per second of `imap`; each task returns what it was given."""
    return run_roles([Role(_run_pool, (library, kind, effort.scale))])[0]  # type: ignore[no-any-return]


def _run_pool(meet: Callable[[], object], library: str, kind: str, scale: str) -> Samples:
    value = KINDS[kind]()
    count = _count(scale, value)
    with _context(library).Pool(WORKERS) as pool:
        for _ in range(WARM):
            _check(pool.apply(_same, (value,)), value)
        trips = []
        for _ in range(count):
            start = time.perf_counter()
            found = pool.apply(_same, (value,))
            trips.append(time.perf_counter() - start)
        _check(found, value)
        start = time.perf_counter()
        for result in pool.imap(_same, [value] * count):
            found = result
        rate = count / (time.perf_counter() - start)
        _check(found, value)
        del found, result  # they may lie in the pool's memory
    return {"apply": trips, "imap": [rate]}


def measure_pipe(library: str, effort: Effort, *, kind: str) -> Samples:
    """Seconds from `send` to `recv` of the same value, which another process has received and sent back."""
    return run_roles([Role(_run_pipe, (library, kind, effort.scale))])[0]  # type: ignore[no-any-return]


def _run_pipe(meet: Callable[[], object], library: str, kind: str, scale: str) -> Samples:
    value = KINDS[kind]()
    count = _count(scale, value)
    context = _context(library)
    here, there = context.Pipe()
    echo = context.Process(target=_echo, args=(there, WARM + count), daemon=True)
    echo.start()
    there.close()
    trips = []
    for _ in range(WARM + count):
        start = time.perf_counter()
        here.send(value)
        found = here.recv()
        trips.append(time.perf_counter() - start)
    _check(found, value)
    del found
    echo.join(PATIENCE_S)
    here.close()
    return {"trip": trips[WARM:]}


def _echo(connection: Any, count: int) -> None:
    for _ in range(count):
        connection.send(connection.recv())
    connection.close()


def pool_name(library: str, kind: str) -> str:
    """Of a case."""
    return f"{library} Pool, {kind}"


def pipe_name(library: str, kind: str) -> str:
    """Of a case, and of its row."""
    return f"{library} Pipe, {ROUND_TRIP}, {kind}"


def row_name(library: str, way: str, kind: str) -> str:
    """Of a row of `Pool`, and of `Pipe`."""
    return pipe_name(library, kind) if way == ROUND_TRIP else f"{library} Pool, {way}, {kind}"


def _rows(library: str, kind: str) -> tuple[RowSpec, ...]:
    def against(way: str) -> str | None:
        return row_name(STANDARD, way, kind) if library == OURS else None

    name, pool, pipe = LIBRARIES[library].name, pool_name(library, kind), pipe_name(library, kind)
    return (
        RowSpec(row_name(library, APPLY, kind), name, pool, "apply", "µs", 1e6, against(APPLY)),
        RowSpec(row_name(library, IMAP, kind), name, pool, "imap", "k tasks/s", 1e-3, against(IMAP)),
        RowSpec(pipe, name, pipe, "trip", "µs", 1e6, against(ROUND_TRIP)),
    )


WORKLOAD = Workload(
    name="pools",
    title="Pool and Pipe",
    what=(
        f"Pool({WORKERS}), forked: a task returns what it was given. `apply`: one at a time, until its result is "
        "there; `imap`: tasks a second, one result after the other. Pipe: two processes send a value to and fro, the "
        "second one forked. Default arguments; the last value that comes back is compared."
    ),
    cases=tuple(
        Case(name(library, kind), transport, partial(measure, library, kind=kind))
        for library, transport in LIBRARIES.items()
        for kind in KINDS
        for name, measure in ((pool_name, measure_pool), (pipe_name, measure_pipe))
    ),
    rows=tuple(row for kind in KINDS for library in LIBRARIES for row in _rows(library, kind)),
    rounds={"full": 3, "quick": 2},
)
