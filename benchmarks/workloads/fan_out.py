"""One camera, many readers: what a further subscriber costs the publisher."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples, Target
from ..processes import CONTEXT, NO_TORCH, Role, fresh_name, run_roles
from ..transports import SHMTENSOR
from .base import Case, Workload

NBYTES = 6 << 20
SLOTS = 8
SETTLE = 2e-3
"""Seconds between the last subscriber's release and the next send: by then they all sleep in `recv`."""


def measure(subscribers: int, count: int, nbytes: int = NBYTES) -> Samples:
    """The publisher's wall and CPU seconds per send, with that many subscribers."""
    name, released, warm = fresh_name(), CONTEXT.Semaphore(0), 2 * SLOTS
    roles = [Role(_publish, (name, subscribers, nbytes, warm, count, released), NO_TORCH)]
    roles += [Role(_subscribe, (name, nbytes, warm + count, released), NO_TORCH)] * subscribers
    return run_roles(roles)[0]


def _publish(
    meet: Callable[[], object], name: str, subscribers: int, nbytes: int, warm: int, count: int, released: Any
) -> Samples:
    import shmtensor

    frame = payloads.make("numpy", nbytes)
    with shmtensor.Publisher(name, slots=SLOTS, slot_bytes=nbytes) as pub:
        meet()
        pub.wait_for_subscribers(subscribers, timeout=60)
        _send_paced(pub, frame, warm, released, subscribers)
        threads = time.process_time() - time.thread_time()
        walls, cpus = _send_paced(pub, frame, count, released, subscribers)
        threads = (time.process_time() - time.thread_time() - threads) / count
        meet()
    return {"wall": walls, "cpu": [cpu + threads for cpu in cpus], "I/O thread": [threads]}


def _send_paced(pub: Any, frame: Any, count: int, released: Any, subscribers: int) -> tuple[list[float], list[float]]:
    walls, cpus = [], []
    wall, cpu = time.perf_counter, time.thread_time
    for _ in range(count):
        time.sleep(SETTLE)
        wall_start, cpu_start = wall(), cpu()
        pub.send(frame)
        cpus.append(cpu() - cpu_start)
        walls.append(wall() - wall_start)
        for _ in range(subscribers):
            if not released.acquire(timeout=60):
                raise TimeoutError("a subscriber did not release its frame")
    return walls, cpus


def _subscribe(meet: Callable[[], object], name: str, nbytes: int, frames: int, released: Any) -> None:
    import shmtensor

    expected = payloads.make("numpy", nbytes)
    with shmtensor.Subscriber(name) as sub:
        meet()
        for number in range(frames):
            with sub.recv(timeout=60) as message:
                value = message.value
            if number in (0, frames - 1):
                payloads.check("numpy", value, expected)
            del value, message
            released.release()
        meet()


_ONE, _FOUR, _LIMIT = "1 subscriber", "4 subscribers", Target("<=", 1.3)

WORKLOAD = Workload(
    name="fan-out",
    title="Fan-out of 6 MiB frames: the publisher's cost per send",
    what=(
        "One publisher and 1 or 4 subscribers, each a process of its own (NumPy only). The next frame is "
        "sent 2 ms after all have released the one before, so all are asleep and each has to be woken. "
        "wall: send() alone. CPU: of the sending thread in send(), and of ZeroMQ's I/O thread over the "
        "whole run, per frame. Subscribers receive and release; they read no bytes but those of the first"
        " and the last frame."
    ),
    counts={"full": 400, "quick": 100, "tiny": 3},
    cases=(
        Case(_ONE, SHMTENSOR, partial(measure, 1)),
        Case(_FOUR, SHMTENSOR, partial(measure, 4)),
    ),
    rows=(
        RowSpec(f"CPU, {_ONE}", "shmtensor", _ONE, "cpu", "µs", 1e6),
        RowSpec(f"CPU, {_FOUR}", "shmtensor", _FOUR, "cpu", "µs", 1e6, f"CPU, {_ONE}", _LIMIT),
        RowSpec(f"wall, {_ONE}", "shmtensor", _ONE, "wall", "µs", 1e6),
        RowSpec(f"wall, {_FOUR}", "shmtensor", _FOUR, "wall", "µs", 1e6, f"wall, {_ONE}", _LIMIT),
    ),
)
