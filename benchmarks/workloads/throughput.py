"""One way, as fast as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import NO_TORCH, Role, fresh_name, run_roles
from ..transports import ICEORYX2, PICKLE, SHMTENSOR, ZMQ, Link, LinkSettings, Transport
from .base import Case, Workload

NBYTES = 1024
IN_FLIGHT = 64
CHUNKS = 20


def measure(transport: Transport, count: int) -> Samples:
    """Messages per second at the receiver, for each of up to 20 stretches of a run of `count` messages."""
    link = transport.link(LinkSettings(fresh_name(), NBYTES, in_flight=IN_FLIGHT))
    threads = 1 if transport.form == "torch" else NO_TORCH
    chunk = max(1, count // CHUNKS)
    chunks = count // chunk
    args = (transport.form, link, chunk, chunks)
    try:
        return run_roles([Role(_receive, args, threads), Role(_send, args, threads)])[0]
    finally:
        link.close()


def _send(meet: Callable[[], object], form: str, link: Link, chunk: int, chunks: int) -> None:
    meet()
    sender = link.sender()
    meet()
    payload, last = payloads.make(form, NBYTES), payloads.make(form, NBYTES, 1)
    send = sender.send
    for _ in range(chunk * (chunks + 1)):
        send(payload)
    send(last)
    meet()
    sender.close()


def _receive(meet: Callable[[], object], form: str, link: Link, chunk: int, chunks: int) -> Samples:
    receiver = link.receiver()
    meet()
    meet()
    expected, last = payloads.make(form, NBYTES), payloads.make(form, NBYTES, 1)
    recv, rates = receiver.recv, []
    for _ in range(chunk):  # warm up
        value = recv()
    payloads.check(form, value, expected)
    start = time.perf_counter()
    for _ in range(chunks):
        for _ in range(chunk):
            value = recv()
        end = time.perf_counter()
        rates.append(chunk / (end - start))
        start = end
    payloads.check(form, value, expected)
    value = recv()
    payloads.check(form, value, last)  # nothing was lost and nothing came twice
    del value
    meet()
    receiver.close()
    return {"rate": rates}


_RIVALS = (SHMTENSOR, ICEORYX2, PICKLE, ZMQ)

WORKLOAD = Workload(
    name="throughput",
    title="One way, 1 KiB messages per second",
    what=(
        "Two processes, 64 messages in flight at most (pyzmq: 64 at each end and what its socket holds). "
        "Counted at the receiver, after a warm-up; each value is received, usable, and dropped; no bytes "
        "are read. The sender copies 1 KiB each time. shmtensor spins for up to 1 s, iceoryx2 polls, the "
        "others block."
    ),
    counts={"full": 200000, "quick": 40000, "tiny": 20},
    cases=tuple(Case(transport.name, transport, partial(measure, transport)) for transport in _RIVALS),
    rows=tuple(
        RowSpec(
            transport.name, transport.name, transport.name, "rate", "k msg/s", 1e-3,
            None if transport is SHMTENSOR else SHMTENSOR.name,
        )
        for transport in _RIVALS
    ),
)  # fmt: skip
