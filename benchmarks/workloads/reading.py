"""A reader that reads every byte, beside one that only maps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from .. import payloads
from ..measure import RowSpec, Samples, summarize
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import MIB
from ..transports import PAIR, SHMTENSOR, Link, LinkSettings, Transport, opened, that_can
from .base import Case, Effort, Workload

NBYTES = 6 * MIB
SLOTS = 4
WARM = 2 * SLOTS


def measure(transport: Transport, effort: Effort, *, nbytes: int = NBYTES) -> Samples:
    """Seconds from before `send` in one process until the other has the value, and has read all of it."""
    settings = LinkSettings(fresh_name(), nbytes, SLOTS)
    with opened(transport, settings) as [link], pipes(1) as [(ours, theirs)]:
        return run_roles(
            [
                Role(_receive, (transport.form, link, effort, ours)),
                Role(_send, (transport.form, link, theirs)),
            ]
        )[0]


def _send(meet: Callable[[], object], form: str, link: Link, control: Connection) -> None:
    meet()
    sender = link.sender()
    meet()
    payload = payloads.make(form, link.settings.nbytes)
    while control.recv():
        start = time.perf_counter()  # of the machine, not of the process
        sender.send(payload)
        control.send(start)
    meet()
    sender.close()


def _receive(meet: Callable[[], object], form: str, link: Link, effort: Effort, control: Connection) -> Samples:
    receiver = link.receiver()
    meet()
    meet()
    clock, recv = time.perf_counter, receiver.recv
    expected = payloads.make(form, link.settings.nbytes)
    total = payloads.read(form, expected)

    def trip(reads: bool) -> float:
        control.send(True)
        value = recv()
        if reads and payloads.read(form, value) != total:
            raise AssertionError("the value that arrived has other bytes than the one that was sent")
        end = clock()
        start = control.recv()
        del value
        return end - start

    warm = summarize([trip(reads) for _ in range(WARM) for reads in (False, True)]).median
    samples: Samples = {"map": [], "read": []}
    for _ in range(effort.count(2 * warm)):
        samples["map"].append(trip(False))
        samples["read"].append(trip(True))
    control.send(False)
    meet()
    receiver.close()
    return samples


RIVALS = that_can(PAIR)

WORKLOAD = Workload(
    name="reading",
    title="6 MiB one way: the reader only maps it, or reads every byte",
    what=(
        "Two processes, one message at a time, by turns only received and received and read: the sum of its "
        "64-bit words, one thread. From before send in one process until the other has the value or its sum. "
        "Warm: 16 messages before. A transport that has copied the bytes on the reader's side has them in its "
        "caches already."
    ),
    cases=tuple(
        Case(
            transport.name, transport, partial(measure, transport),
            quick=transport.name in ("shmtensor", "pyzmq ipc, copy=False"),
        )
        for transport in RIVALS
    ),
    rows=tuple(
        RowSpec(
            f"{metric}, {transport.name}", transport.name, transport.name, metric, "µs", 1e6,
            None if transport is SHMTENSOR else f"{metric}, {SHMTENSOR.name}",
            "µs from send until", transport.name, "it is mapped" if metric == "map" else "every byte is read",
        )
        for transport in RIVALS
        for metric in ("map", "read")
    ),
    rounds={"full": 2},
)  # fmt: skip
