"""Jobs of uneven length, several workers: how well a queue keeps all of them busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import CONTEXT, Role, fresh_name, run_roles
from ..sizes import KIB
from ..transports import SHMTENSOR, WORK_QUEUE, Link, LinkSettings, Transport, that_can
from .base import Case, Effort, Workload

NBYTES = 64 * KIB
WORKERS = 4
LENGTHS = (0.2e-3, 0.5e-3, 1e-3, 2e-3, 20e-3)
"""Seconds of a job; the last is rare."""
CHANCES = (0.3, 0.3, 0.25, 0.1, 0.05)
DONE = -1.0


def lengths(count: int) -> Any:
    """How long each job takes, in seconds: always the same list."""
    return np.random.default_rng(7).choice(LENGTHS, count, p=CHANCES)


def measure(transport: Transport, effort: Effort) -> Samples:
    """Wall seconds from the first send to the last job's end, and the share of them that the jobs explain."""
    count = max(2 * WORKERS, int(effort.seconds * 1500))
    settings = LinkSettings(fresh_name(), NBYTES, 2 * WORKERS, pattern=WORK_QUEUE, peers=WORKERS, awake=False)
    link, done = transport.link(settings), CONTEXT.Semaphore(0)
    try:
        results = run_roles(
            [
                Role(_produce, (transport.form, link, count, done)),
                *(Role(_work, (transport.form, link, index, done)) for index in range(WORKERS)),
            ]
        )
    finally:
        link.close()
    if sum(results[1:]) != count:
        raise ValueError(f"{count} jobs were sent, {sum(results[1:])} were done")
    wall = results[0]
    return {"wall": [wall], "efficiency": [100 * float(lengths(count).sum()) / WORKERS / wall]}


def _job(form: str, length: float) -> Any:
    """A payload whose first float says how long it takes."""
    payload = np.array(payloads.make("numpy", NBYTES))
    payload[0] = length
    if form == "bytes":
        return payload.tobytes()
    if form == "numpy":
        return payload
    import torch

    return torch.from_numpy(payload)


def _produce(meet: Callable[[], object], form: str, link: Link, count: int, done: Any) -> float:
    meet()
    sender = link.sender()
    jobs = {length: _job(form, length) for length in LENGTHS}
    last = _job(form, DONE)
    meet()
    for _ in range(WORKERS):  # every worker is there and has done one job
        sender.send(_job(form, 0.0))
    for _ in range(WORKERS):
        done.acquire()
    start = time.perf_counter()
    for length in lengths(count):
        sender.send(jobs[float(length)])
    for _ in range(count):
        done.acquire()
    wall = time.perf_counter() - start
    for _ in range(WORKERS):
        sender.send(last)
    meet()
    sender.close()
    return wall


def _work(meet: Callable[[], object], form: str, link: Link, index: int, done: Any) -> int:
    receiver = link.receiver(index)
    meet()
    meet()
    jobs = 0
    while True:
        value = receiver.recv()
        length = float(np.frombuffer(value, np.float32, 1)[0] if form == "bytes" else value[0])
        del value
        if length == DONE:
            break
        if length:
            time.sleep(length)
            jobs += 1
        done.release()
    meet()
    receiver.close()
    return jobs


RIVALS = that_can(WORK_QUEUE)

WORKLOAD = Workload(
    name="work-queue",
    title="Work queue: uneven jobs, 4 workers",
    what=(
        "One producer, 4 worker processes. A job is a 64 KiB tensor that says how long it takes, 0.2 to 2 ms "
        "and one in 20 20 ms, always the same list; its worker sleeps that long, as one that waits for a "
        "device would. At most 8 jobs wait. Efficiency: the jobs' own time over 4 workers, divided by the "
        "wall time from the first send to the end of the last job. pyzmq deals the jobs out in turn "
        "to whoever has room; its queues hold one at each end of each connection."
    ),
    cases=tuple(
        Case(
            transport.name, transport, partial(measure, transport),
            quick=transport.name in ("shmtensor", "multiprocessing.Queue"),
        )
        for transport in RIVALS
    ),
    rows=tuple(
        RowSpec(
            f"{metric}, {transport.name}", transport.name, transport.name, metric, unit, factor,
            None if transport is SHMTENSOR else f"{metric}, {SHMTENSOR.name}",
        )
        for metric, unit, factor in (("efficiency", "%", 1.0), ("wall", "ms", 1e3))
        for transport in RIVALS
    ),
    rounds={"full": 2},
)  # fmt: skip
