"""Being watched: what `shmtensor top` takes of a core, a trace of the throughput, and how soon a death is seen."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import NO_TORCH, Role, fresh_name, pipes, run_roles
from ..sizes import KIB, MIB, in_flight, label
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

CHANNELS = 50
INTERVAL = {"full": 1.0, "quick": 1.0, "tiny": 0.1}
READINGS = {"full": 10, "quick": 3, "tiny": 1}
KILLS = {"full": 5, "quick": 2, "tiny": 1}
TURNS = {"full": 20, "quick": 5, "tiny": 1}
"""Pairs of stretches, one with a trace and one without."""
IN_FLIGHT = 64
POLL_S, TRACED_S, MOST = 0.02, 5.0, 500_000
"""As `shmtensor trace` by default."""
EVENTS_EACH = 3
"""A send, a take, a release."""


@contextlib.contextmanager
def _top(*arguments: str) -> Iterator[Any]:
    command = [sys.executable, "-m", "shmtensor", "top", *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def measure_top(effort: Effort, *, active: bool) -> Samples:
    """Percent of one core that `top` takes for 50 channels with a publisher, a subscriber and 4 messages that wait.

    `active`: between two readings each subscriber takes one of them, and each publisher sends another.
    """
    role = Role(_watch, (fresh_name(), effort.scale, active), threads=NO_TORCH)
    return run_roles([role])[0]  # type: ignore[no-any-return]


def _watch(meet: Callable[[], object], name: str, scale: str, active: bool) -> Samples:
    import numpy as np

    import shmtensor

    with contextlib.ExitStack() as stack:
        meet()
        ends = []
        for number in range(CHANNELS):
            pub = stack.enter_context(shmtensor.Publisher(f"{name}-{number}", slots=8, slot_bytes=4096))
            ends.append((pub, stack.enter_context(shmtensor.Subscriber(pub.name))))
            for _ in range(4):
                pub.send(np.zeros(100))
        found = []
        with _top(f"{name}-*", "--interval", str(INTERVAL[scale])) as process:
            _reading(process)  # it has started
            cpu, wall = _cpu_seconds(process.pid), time.monotonic()
            for _ in range(READINGS[scale]):
                for pub, sub in ends if active else ():
                    sub.recv().release()
                    pub.send(np.zeros(100))
                assert len(_reading(process)["channels"]) == CHANNELS
                now, at = _cpu_seconds(process.pid), time.monotonic()
                found.append(100 * (now - cpu) / (at - wall))
        return {"cpu": [found[-1]]}  # of all readings: the clock of a process ticks in hundredths of a second


def _reading(process: Any) -> Any:
    return json.loads(process.stdout.readline())


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


HOLDER = """
import sys, shmtensor
with shmtensor.Subscriber(sys.argv[1]) as sub:
    print("joined", flush=True)
    sys.stdin.readline()
"""


def measure_deaths(effort: Effort) -> Samples:
    """Seconds from the kill of a subscriber until `top` has printed a reading without it."""
    name = fresh_name()
    return run_roles([Role(_kill, (name, effort.scale), threads=NO_TORCH)])[0]  # type: ignore[no-any-return]


def _kill(meet: Callable[[], object], name: str, scale: str) -> Samples:
    import shmtensor

    found = []
    meet()
    with shmtensor.Publisher(name, slots=4), _top(name) as process:
        for _ in range(KILLS[scale]):
            command = [sys.executable, "-c", HOLDER, name]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
                assert victim.stdout is not None
                victim.stdout.readline()
                while victim.pid not in _pids(_reading(process)):
                    pass
                start = time.monotonic()
                victim.kill()
                while victim.pid in _pids(_reading(process)):
                    pass
                found.append(time.monotonic() - start)
    return {"seconds": found}


def _pids(reading: Any) -> set[int]:
    return {member["pid"] for channel in reading["channels"] for member in channel["members"]}


def measure_traced(effort: Effort, *, nbytes: int) -> Samples:
    """Messages per second one way, in stretches without a trace, with one as the command makes it (of so many messages
    as fit into its file), and with one of each message; and what part of events was lost.

    The tracer is a process of its own, as the command is.
    """
    name = fresh_name()
    with pipes(2) as [(to_sender, sender), (to_tracer, tracer)]:
        roles = [
            Role(_receive, (name, nbytes, effort, to_sender, to_tracer)),
            Role(_send, (name, nbytes, sender)),
            Role(_trace, (name, tracer), threads=NO_TORCH),
        ]
        return run_roles(roles)[0]  # type: ignore[no-any-return]


def _send(meet: Callable[[], object], name: str, nbytes: int, control: Connection) -> None:
    import shmtensor

    payload = payloads.make(SHMTENSOR.form, nbytes)
    with shmtensor.Publisher(name, slots=in_flight(nbytes, IN_FLIGHT), slot_bytes=nbytes) as pub:
        meet()
        pub.wait_for_subscribers(1, timeout=60)
        while count := control.recv():
            for _ in range(count):
                pub.send(payload)
        meet()


def _receive(
    meet: Callable[[], object], name: str, nbytes: int, effort: Effort, sender: Connection, tracer: Connection
) -> Samples:
    import shmtensor

    rates: dict[str, list[float]] = {"off": [], "on": [], "each": []}
    with shmtensor.Subscriber(name, spin=1.0) as sub:
        meet()

        def stretch(count: int) -> float:
            """Messages per second."""
            sender.send(count)
            start = time.perf_counter()
            for _ in range(count):
                value = sub.recv().value
            rate = count / (time.perf_counter() - start)
            payloads.check(SHMTENSOR.form, value, payloads.make(SHMTENSOR.form, nbytes))
            return rate

        warm = 2 * in_flight(nbytes, IN_FLIGHT)
        each = max(warm, min(1 << 20, int(effort.seconds * stretch(warm))))
        fitting = max(1, math.ceil(TRACED_S * stretch(each) * EVENTS_EACH / MOST))
        for _ in range(TURNS[effort.scale]):
            for traced, every in (("off", 0), ("on", fitting), ("each", 1)):
                tracer.send(every)
                tracer.recv()
                stretch(warm)  # the members have seen it
                rates[traced].append(stretch(each))
        tracer.send(None)
        events, lost = tracer.recv()
        sender.send(0)
        meet()
    assert events, "nothing was traced"
    return {**rates, "every": [fitting], "lost": [100 * lost / (events + lost)]}


def _trace(meet: Callable[[], object], name: str, control: Connection) -> None:
    from shmtensor.observe.trace import Tracer

    meet()
    running: Tracer | None = None
    events = lost = 0
    while (wanted := _next(control, running)) is not None:
        if running is not None:
            running.close()
            events, lost = events + running.trace.count, lost + running.trace.lost
        running = Tracer(name, every=wanted) if wanted else None
        control.send(True)
    if running is not None:
        running.close()
        events, lost = events + running.trace.count, lost + running.trace.lost
    control.send((events, lost))
    meet()


def _next(control: Connection, running: Any) -> int | None:
    """Which messages to trace next, 0: none; meanwhile, read events."""
    while running is not None and not control.poll(POLL_S):
        running.poll()
    return control.recv()  # type: ignore[no-any-return]


SIZES = (KIB, MIB)


def plain(nbytes: int) -> str:
    """The row of a size without a trace."""
    return f"one way, {label(nbytes)}"


def traced(nbytes: int) -> str:
    """The row of a size with a trace by default arguments."""
    return f"{plain(nbytes)}, traced"


def traced_whole(nbytes: int) -> str:
    """The row of a size with a trace of each message."""
    return f"{plain(nbytes)}, each message traced"


TOP = f"top of {CHANNELS} channels, every second"
TOP_ACTIVE = f"{TOP}, each with a message in between"
DEATH = "a killed process is gone from top"

WORKLOAD = Workload(
    name="observing",
    title="Being watched",
    what=(
        f"`shmtensor top --json` of {CHANNELS} channels, each with a publisher, a subscriber and 4 messages: CPU time "
        "of that process between two readings, by the kernel's clock; in between, nothing happens, or each channel "
        "carries a message. One way: a publisher and a subscriber that "
        f"spins, {IN_FLIGHT} messages in flight at most, counted at the subscriber; stretches by turns without a "
        "trace, with one as `shmtensor trace` makes it (of one of N messages, so that 5 s fit into 500,000 events), "
        "and with one of each message; a third process reads it every 20 ms. Lost: events that were overwritten before "
        "they were read. The kill: from the signal to the reading that no longer names the process."
    ),
    cases=(
        Case(TOP, SHMTENSOR, partial(measure_top, active=False)),
        Case(TOP_ACTIVE, SHMTENSOR, partial(measure_top, active=True)),
        *(Case(plain(nbytes), SHMTENSOR, partial(measure_traced, nbytes=nbytes)) for nbytes in SIZES),
        Case(DEATH, SHMTENSOR, measure_deaths),
    ),
    rows=(
        RowSpec(TOP, SHMTENSOR.name, TOP, "cpu", "% of a core"),
        RowSpec(TOP_ACTIVE, SHMTENSOR.name, TOP_ACTIVE, "cpu", "% of a core"),
        *(
            row
            for nbytes in SIZES
            for row in (
                RowSpec(plain(nbytes), SHMTENSOR.name, plain(nbytes), "off", "k msg/s", 1e-3),
                RowSpec(
                    traced(nbytes), SHMTENSOR.name, plain(nbytes), "on", "k msg/s", 1e-3, against=plain(nbytes)
                ),
                RowSpec(
                    traced_whole(nbytes), SHMTENSOR.name, plain(nbytes), "each", "k msg/s", 1e-3, against=plain(nbytes)
                ),
                RowSpec(f"{traced(nbytes)}: one of", SHMTENSOR.name, plain(nbytes), "every", "messages"),
                RowSpec(f"{traced_whole(nbytes)}: lost", SHMTENSOR.name, plain(nbytes), "lost", "% of the events"),
            )
        ),
        RowSpec(DEATH, SHMTENSOR.name, DEATH, "seconds", "s"),
    ),
)  # fmt: skip
