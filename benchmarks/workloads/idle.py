"""Waiting for nothing: what consumers cost while no message comes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..measure import RowSpec, Samples, Target
from ..processes import NO_TORCH, Role, fresh_name, run_roles
from ..transports import SHMTENSOR
from .base import Case, Workload

CONSUMERS = 4


def measure(seconds: float) -> Samples:
    """Percent of one core that all idle consumers take together, and the publisher that sends nothing."""
    name = fresh_name()
    roles = [Role(_publish, (name, seconds), NO_TORCH)]
    roles += [Role(_wait, (name, seconds), NO_TORCH)] * CONSUMERS
    publisher, *consumers = run_roles(roles)
    return {"consumers": [sum(consumers)], "publisher": [publisher]}


def _publish(meet: Callable[[], object], name: str, seconds: float) -> float:
    import shmtensor

    with shmtensor.Publisher(name, slot_bytes=4096) as pub:
        meet()
        pub.wait_for_subscribers(CONSUMERS, timeout=60)
        meet()
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
        meet()
    return percent


def _wait(meet: Callable[[], object], name: str, seconds: float) -> float:
    import shmtensor

    with shmtensor.Subscriber(name) as sub:
        meet()
        meet()
        cpu, wall = time.process_time(), time.monotonic()
        try:
            sub.recv(timeout=seconds)
        except TimeoutError:
            percent = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
        else:
            raise AssertionError("nobody sent anything, but something came")
        meet()
    return percent


WORKLOAD = Workload(
    name="idle",
    title="4 idle consumers: CPU together",
    what=(
        "Four processes, each one Subscriber in recv(), and a Publisher that sends nothing. User and "
        "system time of each process, all its threads, from entering recv() to its time-out, divided by "
        "the wall time; the four are added. One core is 100 %."
    ),
    counts={"full": 10, "quick": 5, "tiny": 1},
    cases=(Case("shmtensor", SHMTENSOR, lambda count: measure(float(count))),),
    rows=(
        RowSpec("4 consumers", "shmtensor", "shmtensor", "consumers", "% of a core", target=Target("<=", 1.0)),
        RowSpec("publisher", "shmtensor", "shmtensor", "publisher", "% of a core"),
    ),
)
