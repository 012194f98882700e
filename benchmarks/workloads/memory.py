"""How much memory a pair of endpoints takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import NO_TORCH, Role, fresh_name, run_roles
from ..sizes import MIB
from ..transports import PAIR, Link, LinkSettings, Transport, that_can
from .base import Case, Effort, Workload

NBYTES = MIB
IN_FLIGHT = 16
MESSAGES = 3 * IN_FLIGHT


def proportional() -> dict[str, float]:
    """MiB of this process: all of it, shared pages divided among those that share them, and the private part."""
    found = {}
    with open("/proc/self/smaps_rollup", encoding="utf-8") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if rest.endswith("kB\n"):
                found[name] = int(rest.split()[0]) / 1024
    return {"all": found["Pss"], "private": found["Private_Clean"] + found["Private_Dirty"]}


def measure(transport: Transport, effort: Effort) -> Samples:
    """MiB that both processes grow by: from before the ends are opened until 48 messages have been carried."""
    link = transport.link(LinkSettings(fresh_name(), NBYTES, IN_FLIGHT, awake=False))
    try:
        threads = NO_TORCH  # share no server's pages
        if effort.scale == "tiny":  # only shows that it runs: without the seconds of an import
            threads = 1
        roles = [Role(role, (transport.form, link), threads) for role in (_receive, _send)]
        receiver, sender = run_roles(roles)
    finally:
        link.close()
    return {key: [receiver[key] + sender[key]] for key in receiver}


def _grown(before: dict[str, float]) -> dict[str, float]:
    return {key: value - before[key] for key, value in proportional().items()}


def _receive(meet: Callable[[], object], form: str, link: Link) -> dict[str, float]:
    expected = payloads.make(form, NBYTES)
    meet()
    before = proportional()
    receiver = link.receiver()
    meet()
    meet()
    for _ in range(MESSAGES):
        value = receiver.recv()
    payloads.check(form, value, expected)
    del value
    meet()  # both are still open: what they share is divided by two
    grown = _grown(before)
    meet()
    receiver.close()
    return grown


def _send(meet: Callable[[], object], form: str, link: Link) -> dict[str, float]:
    payload = payloads.make(form, NBYTES)
    meet()
    before = proportional()
    meet()
    sender = link.sender()
    meet()
    for _ in range(MESSAGES):
        sender.send(payload)
    meet()
    grown = _grown(before)
    meet()
    sender.close()
    return grown


RIVALS = that_can(PAIR)

WORKLOAD = Workload(
    name="memory",
    title="Resident memory of a pair of endpoints, 16 messages of 1 MiB in flight",
    what=(
        "What sending and receiving process together grow by, from before their ends are opened until 48 "
        "messages of 1 MiB have passed and both ends are still open; MiB of Pss (pages of shared memory are "
        "divided among the processes that map them, so each counts once), and the private part. Modules that "
        "are imported on opening are in it; NumPy was there before, and torch where tensors are sent."
    ),
    cases=tuple(
        Case(transport.name, transport, partial(measure, transport), quick=transport.name == "shmtensor", rounds=1)
        for transport in RIVALS
    ),
    rows=tuple(
        RowSpec(
            f"{line}, {transport.name}", transport.name, transport.name, metric, "MiB",
            group="MiB, both processes", line=transport.name, column=line,
        )
        for transport in RIVALS
        for metric, line in (("all", "resident"), ("private", "of it private"))
    ),
    rounds={"full": 1},
)  # fmt: skip
