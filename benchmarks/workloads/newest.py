"""A subscriber that wants the newest messages only: what it costs the publisher, and how many it gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import CONTEXT, Role, fresh_name, run_roles
from ..sizes import KIB
from ..transports import ICEORYX2, SHMTENSOR, Link, LinkSettings, Transport
from ..transports.iceoryx2_pubsub import Overwriting
from .base import Case, Effort, Workload
from .default_arguments import Ours

DEPTHS = (1, 4, 16)
CHUNKS = 20
CALIBRATE = 2000
FASTEST = 1_000_000
"""Messages a second for which a run's length is chosen: no transport here is faster."""
SENT, RECEIVED = "thousand messages/s sent", "thousand messages/s received"
ALL = "every message, shmtensor"


def _link(transport: Transport, depth: int | None) -> Link:
    settings = LinkSettings(fresh_name(), KIB, depth or 1)
    if transport is ICEORYX2:
        return Overwriting(settings)
    return Ours(settings) if depth is None else Ours(settings, delivery="latest", depth=depth)


def measure(transport: Transport, effort: Effort, *, depth: int | None) -> Samples:
    """Messages per second that are sent, for each of 20 stretches, and that are received meanwhile. Without a depth,
    the subscriber gets every message."""
    count = max(CHUNKS, min(int(effort.seconds * FASTEST), 20 * effort.most))
    link = _link(transport, depth)
    try:
        over = CONTEXT.RawArray("b", 1)
        sent, received = run_roles([Role(_send, (link, count, over)), Role(_receive, (transport.form, link, over))])
    finally:
        link.close()
    return {"sent": sent["sent"], "received": received["received"]}


def _send(meet: Callable[[], object], link: Link, count: int, over: Any) -> Samples:
    meet()
    sender = link.sender()
    meet()
    payload, last = payloads.make("torch", KIB), payloads.make("torch", KIB, 1)
    send, clock, rates = sender.send, time.perf_counter, []
    for _ in range(CALIBRATE):
        send(payload)
    for _ in range(CHUNKS):
        start = clock()
        for _ in range(count // CHUNKS):
            send(payload)
        rates.append(count // CHUNKS / (clock() - start))
    over[0] = 1
    send(last)
    meet()
    sender.close()
    return {"sent": rates}


def _receive(meet: Callable[[], object], form: str, link: Link, over: Any) -> Samples:
    receiver = link.receiver()
    meet()
    meet()
    recv, clock = receiver.recv, time.perf_counter
    value = recv()
    start, received = clock(), 1
    while not over[0]:
        value = recv()
        received += 1
    seconds = clock() - start
    expected = payloads.read(form, payloads.make(form, KIB, 1))
    while payloads.read(form, value) != expected:
        value = recv()
    del value
    meet()
    receiver.close()
    return {"received": [received / seconds]}


def _name(transport: Transport, depth: int | None) -> str:
    return ALL if depth is None else f"{transport.name}, newest {depth}"


_CASES: tuple[tuple[Transport, int | None], ...] = (
    (SHMTENSOR, None),
    *((transport, depth) for transport in (SHMTENSOR, ICEORYX2) for depth in DEPTHS),
)


def row_name(metric: str, transport: Transport, depth: int | None) -> str:
    """Of the rows of a metric."""
    return f"{metric}: {_name(transport, depth)}"


WORKLOAD = Workload(
    name="newest",
    title="The newest n messages of 1 KiB",
    what=(
        "One publisher that sends as fast as it can, one subscriber that wants the newest 1, 4 or 16 messages, or "
        "every one; default arguments. Counted at the publisher for each of 20 stretches, and at the subscriber over "
        "all; the last message has to come. iceoryx2: a buffer of that size that is overwritten, and a subscriber that "
        "polls. The ratio is to every message, that of iceoryx2 to shmtensor."
    ),
    cases=tuple(
        Case(
            _name(transport, depth), transport, partial(measure, transport, depth=depth),
            quick=transport is SHMTENSOR and depth != 1,
        )
        for transport, depth in _CASES
    ),
    rows=tuple(
        RowSpec(
            row_name(metric, transport, depth), transport.name, _name(transport, depth), sample, "k msg/s", 1e-3,
            None
            if depth is None
            else row_name(metric, SHMTENSOR, None if transport is SHMTENSOR else depth),
            metric, transport.name if depth is not None else ALL, f"{depth or 'all'}", depth or 0,
        )
        for metric, sample in ((SENT, "sent"), (RECEIVED, "received"))
        for transport, depth in _CASES
    ),
    rounds={"full": 3},
    heading="newest",
)  # fmt: skip
