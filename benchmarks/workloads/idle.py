"""Waiting for nothing: what receivers cost while no message comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, run_roles
from ..sizes import KIB
from ..transports import PAIR, SHMTENSOR, Link, LinkSettings, Transport, that_can
from .base import Case, Effort, Workload

CONSUMERS = 4
NBYTES = KIB
SECONDS = {"full": 2.0, "quick": 2.0, "tiny": 0.5}


def measure_four(effort: Effort) -> Samples:
    """Percent of one core that 4 idle subscribers take together, and the publisher that sends nothing."""
    name, seconds = fresh_name(), SECONDS[effort.scale]
    roles = [Role(_publish, (name, seconds))]
    roles += [Role(_wait, (name, seconds))] * CONSUMERS
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


def measure_one(transport: Transport, effort: Effort) -> Samples:
    """Percent of one core that one receiver takes which waits for a message that comes late."""
    link = transport.link(LinkSettings(fresh_name(), NBYTES, awake=False))
    try:
        roles = [
            Role(_receive_late, (transport.form, link)),
            Role(_send_late, (transport.form, link, SECONDS[effort.scale])),
        ]
        return {"receiver": [run_roles(roles)[0]]}
    finally:
        link.close()


def _receive_late(meet: Callable[[], object], form: str, link: Link) -> float:
    receiver = link.receiver()
    meet()
    meet()
    receiver.recv()  # the first message opens what opens late
    meet()
    cpu, wall = time.process_time(), time.monotonic()
    value = receiver.recv()
    percent = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
    payloads.check(form, value, payloads.make(form, NBYTES))
    del value
    meet()
    receiver.close()
    return percent


def _send_late(meet: Callable[[], object], form: str, link: Link, seconds: float) -> None:
    meet()
    sender = link.sender()
    payload = payloads.make(form, NBYTES)
    meet()
    sender.send(payload)
    meet()
    time.sleep(seconds)
    sender.send(payload)
    meet()
    sender.close()


RIVALS = that_can(PAIR)

WORKLOAD = Workload(
    name="idle",
    title="Idle receivers: CPU",
    what=(
        "4 consumers: four processes, each one Subscriber in recv(), and a Publisher that sends nothing; "
        "user and system time of each process, all its threads, from entering recv() to its time-out, "
        "divided by the wall time; the four are added. The other rows: one receiver that waits some seconds "
        "for one message, that message included. One core is 100 %."
    ),
    cases=(
        Case("4 consumers", SHMTENSOR, measure_four),
        *(
            Case(
                transport.name,
                transport,
                partial(measure_one, transport),
                quick=transport.name == "pyzmq ipc",
                rounds=1,
            )
            for transport in RIVALS
        ),
    ),
    rows=(
        RowSpec("4 consumers", SHMTENSOR.name, "4 consumers", "consumers", "% of a core"),
        RowSpec("publisher", SHMTENSOR.name, "4 consumers", "publisher", "% of a core"),
        *(
            RowSpec(f"1 receiver, {transport.name}", transport.name, transport.name, "receiver", "% of a core")
            for transport in RIVALS
        ),
    ),
    rounds={"full": 1},
)
