"""There and back between two processes that are awake."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples, Target
from ..processes import NO_TORCH, Role, fresh_name, run_roles
from ..transports import (
    ICEORYX2,
    PICKLE,
    SHMTENSOR,
    TORCH_DESCRIPTOR,
    TORCH_FILE_SYSTEM,
    Link,
    LinkSettings,
    Receiver,
    Sender,
    Transport,
)
from .base import Case, Workload

NBYTES = 1024
CHECKS = 2
"""Round trips before and after the timed ones whose bytes are compared."""


def measure(
    transport: Transport, count: int, *, nbytes: int = NBYTES, awake: bool = True, pause: float = 0.0
) -> Samples:
    """Seconds of each of `count` round trips, after a warm-up; sleeps `pause` seconds before each."""
    there = transport.link(LinkSettings(f"{fresh_name()}-there", nbytes, awake=awake))
    back = transport.link(LinkSettings(f"{fresh_name()}-back", nbytes, awake=awake))
    warm = count // 10 + 20
    trips = warm + count + 2 * CHECKS
    threads = 1 if transport.form == "torch" else NO_TORCH
    try:
        samples, sleeps = run_roles(
            [
                Role(_ping, (transport.form, there, back, nbytes, warm, count, pause), threads),
                Role(_pong, (there, back, trips), threads),
            ]
        )
    finally:
        there.close()
        back.close()
    samples["sleeps"] = [min(samples["sleeps"][0], sleeps / trips)]
    return samples


def _ping(
    meet: Callable[[], object],
    form: str,
    there: Link,
    back: Link,
    nbytes: int,
    warm: int,
    count: int,
    pause: float,
) -> Samples:
    receiver = back.receiver()
    meet()
    sender = there.sender()
    meet()
    payload = payloads.make(form, nbytes)
    _check_trips(form, sender, receiver, nbytes)
    _time_trips(sender, receiver, payload, warm, pause)
    sleeps = receiver.sleeps() if receiver.sleeps else 0
    times = _time_trips(sender, receiver, payload, count, pause)
    sleeps = (receiver.sleeps() if receiver.sleeps else 0) - sleeps
    _check_trips(form, sender, receiver, nbytes)
    meet()
    sender.close()
    receiver.close()
    return {"round trip": times, "sleeps": [sleeps / count]}


def _time_trips(sender: Sender, receiver: Receiver, payload: Any, count: int, pause: float) -> list[float]:
    clock, sleep = time.perf_counter, time.sleep
    send, recv = sender.send, receiver.recv
    times = []
    for _ in range(count):
        if pause:
            sleep(pause)
        start = clock()
        send(payload)
        value = recv()  # and the value before it dies here: giving back is part of the round trip
        times.append(clock() - start)
    del value
    return times


def _check_trips(form: str, sender: Sender, receiver: Receiver, nbytes: int) -> None:
    for seed in range(1, CHECKS + 1):
        payload = payloads.make(form, nbytes, seed)
        sender.send(payload)
        payloads.check(form, receiver.recv(), payload)


def _pong(meet: Callable[[], object], there: Link, back: Link, trips: int) -> int:
    receiver = there.receiver()
    meet()
    sender = back.sender()
    meet()
    send, recv = sender.send, receiver.recv
    for _ in range(trips):
        value = recv()
        send(value)
    del value
    sleeps = receiver.sleeps() if receiver.sleeps else 0
    meet()
    sender.close()
    receiver.close()
    return sleeps


_RIVALS = (SHMTENSOR, ICEORYX2, TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM, PICKLE)
_AGAINST: dict[Transport, tuple[str | None, Target | None]] = {
    SHMTENSOR: (ICEORYX2.name, Target("<=", 0.75)),
    ICEORYX2: (SHMTENSOR.name, None),
    TORCH_DESCRIPTOR: (SHMTENSOR.name, Target(">=", 5)),
    TORCH_FILE_SYSTEM: (SHMTENSOR.name, Target(">=", 5)),
    PICKLE: (SHMTENSOR.name, None),
}
_SHARES = {TORCH_DESCRIPTOR: 10, TORCH_FILE_SYSTEM: 10, PICKLE: 4}
"""Slow transports make so many times fewer trips."""


def _measure_share(transport: Transport, share: int, count: int) -> Samples:
    return measure(transport, max(5, count // share))


WORKLOAD = Workload(
    name="round-trip",
    title="Round trip of a 1 KiB float32 tensor, both sides awake",
    what=(
        "Two processes. The clock covers send, the other side's receive and send of the value it got, "
        "receive, and the death of the value before. Each send copies 1 KiB; both sides get a tensor "
        "(multiprocessing.Queue: an ndarray) over the received bytes and read none of them. shmtensor "
        "spins for up to 1 s, iceoryx2 polls, the queues block in a read; torch's queues send clones, "
        "which they would otherwise not copy."
    ),
    counts={"full": 20000, "quick": 3000, "tiny": 5},
    cases=tuple(
        Case(transport.name, transport, partial(_measure_share, transport, _SHARES.get(transport, 1)))
        for transport in _RIVALS
    ),
    rows=tuple(
        RowSpec(transport.name, transport.name, transport.name, "round trip", "µs", 1e6, *_AGAINST[transport])
        for transport in _RIVALS
    ),
)
