"""The first message: what a ring of 256 MiB costs before it can carry anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, run_roles
from ..sizes import MIB
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

SLOTS = 4
PATIENCE = 60.0
WARM = 8
RING, SMALL_RING = 256 * MIB, 4 * MIB


def measure(effort: Effort, *, ring: int, ahead: bool) -> Samples:
    """Seconds of opening, of the first `send`, of the first `recv`, and of both when everything is warm."""
    return run_roles([Role(_start, (fresh_name(), ring // SLOTS, ahead))])[0]


def _start(meet: Callable[[], object], name: str, nbytes: int, ahead: bool) -> Samples:
    import shmtensor

    clock, payload = time.perf_counter, payloads.make("torch", nbytes)
    start = clock()
    pub = shmtensor.Publisher(name, slots=SLOTS, slot_bytes=nbytes if ahead else None)
    opened = clock() - start
    sub = shmtensor.Subscriber(name)
    start = clock()
    pub.send(payload)
    sent = clock()
    value = sub.recv(timeout=PATIENCE).value
    received = clock()
    samples: Samples = {"open": [opened], "first send": [sent - start], "first recv": [received - sent]}
    samples["start"] = [opened + received - start]
    payloads.check("torch", value, payload)
    del value
    for _ in range(WARM):
        start = clock()
        pub.send(payload)
        sub.recv(timeout=PATIENCE).release()
        samples["warm"] = [clock() - start]
    sub.close()
    pub.close()
    return samples


_CASES = (
    ("ring of 256 MiB, slot_bytes given", RING, True),
    ("ring of 256 MiB, made at the first send", RING, False),
    ("ring of 4 MiB, slot_bytes given", SMALL_RING, True),
)
_METRICS = (
    ("start", "open + first send + first recv"),
    ("open", "open"),
    ("first send", "first send"),
    ("first recv", "first recv"),
    ("warm", "send + recv, warm"),
)

WORKLOAD = Workload(
    name="cold",
    title="Cold start: the first message, ms",
    what=(
        "One process holds both ends of a ring of 4 slots and sends messages that fill one. Opening reserves "
        "and touches every page of the ring; without slot_bytes the first send does. open: the Publisher "
        "alone. warm: the ninth message. How the first message of other transports compares with their later "
        "ones is in the tables of round-trip."
    ),
    cases=tuple(Case(name, SHMTENSOR, partial(measure, ring=ring, ahead=ahead)) for name, ring, ahead in _CASES),
    rows=tuple(
        RowSpec(f"{line}: {name}", SHMTENSOR.name, name, metric, "ms", 1e3, group="ms", line=line, column=name)
        for metric, line in _METRICS
        for name, _, _ in _CASES
    ),
)
