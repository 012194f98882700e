"""There and back between two processes that are awake."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples, summarize
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import HUGE, KIB, LARGEST, MIB, SIZES, in_flight, label
from ..transports import (
    PAIR,
    RAY,
    SHMTENSOR,
    Link,
    LinkSettings,
    Receiver,
    Sender,
    Transport,
    opened,
    that_can,
)
from .base import Case, Effort, Workload

WARM = 10
"""Trips before the timed ones, which also tell how many of those fit; none from 64 MiB on."""


def measure(
    transport: Transport,
    effort: Effort,
    *,
    nbytes: int,
    awake: bool = True,
    pause: float = 0.0,
    form: str | None = None,
) -> Samples:
    """Seconds of each round trip, after a warm-up; sleeps `pause` seconds before each. `first`: the very first.

    `form` is that of the payload, where a transport takes several.
    """
    names = f"{fresh_name()}-there", f"{fresh_name()}-back"
    flying = in_flight(nbytes, 16)
    settings = [LinkSettings(name, nbytes, flying, awake) for name in names]
    with opened(transport, *settings) as links, pipes(1) as [(ours, theirs)]:
        return run_roles(
            [
                Role(ping, (form or transport.form, *links, nbytes, effort, pause, ours)),
                Role(pong, (*links, theirs)),
            ]
        )[0]


def ping(
    meet: Callable[[], object],
    form: str,
    there: Link,
    back: Link,
    nbytes: int,
    effort: Effort,
    pause: float,
    control: Connection,
) -> Samples:
    """The side that measures."""
    receiver = back.receiver()
    meet()
    sender = there.sender()
    meet()
    payload = payloads.make(form, nbytes)

    def order(trips: int) -> int:
        """Tell the other side to make so many; returns how often it has slept."""
        control.send(trips)
        return control.recv()

    order(1)
    first = _time_trips(sender, receiver, payload, 1, pause, check=(form, payload))
    if nbytes < HUGE:
        order(WARM)
        count = effort.count(summarize(_time_trips(sender, receiver, payload, WARM, pause)).median + pause)
    else:
        count = 2 if nbytes >= LARGEST else 3
    slept = order(count)
    own = _sleeps(receiver)
    times = _time_trips(sender, receiver, payload, count, pause, check=(form, payload))
    own = _sleeps(receiver) - own
    if nbytes < HUGE:
        other = payloads.make(form, nbytes, 1)
        slept = order(1) - slept
        _time_trips(sender, receiver, other, 1, pause, check=(form, other))
    else:
        slept = own  # one trip more, only to learn it, would take too long
    control.send(0)
    meet()
    sender.close()
    receiver.close()
    return {"round trip": times, "first": first, "sleeps": [min(own, slept) / count]}


def _time_trips(
    sender: Sender, receiver: Receiver, payload: Any, count: int, pause: float, check: tuple[str, Any] | None = None
) -> list[float]:
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
    if check is not None:
        payloads.check(check[0], value, check[1])
    del value
    return times


def pong(meet: Callable[[], object], there: Link, back: Link, control: Connection) -> None:
    """The side that answers."""
    receiver = there.receiver()
    meet()
    sender = back.sender()
    meet()
    send, recv = sender.send, receiver.recv
    while trips := control.recv():
        control.send(_sleeps(receiver))
        for _ in range(trips):
            value = recv()
            send(value)
        del value
    meet()
    sender.close()
    receiver.close()


def _sleeps(receiver: Receiver) -> int:
    return receiver.sleeps() if receiver.sleeps else 0


def measure_ray(effort: Effort, sizes: tuple[int, ...]) -> Samples:
    """All sizes through one actor: a cluster takes too long to start for one each."""
    return run_roles([Role(_ray, (effort, sizes))])[0]


def _ray(meet: Callable[[], object], effort: Effort, sizes: tuple[int, ...]) -> Samples:
    peer, samples = RAY.peer(), Samples()
    receiver = Receiver(lambda: answers.pop(), lambda: None)
    answers: list[Any] = []
    try:
        for nbytes in sizes:
            payload = payloads.make(RAY.form, nbytes)
            sender = Sender(lambda value: answers.append(peer.trip(value)), lambda: None)
            check = (RAY.form, payload)
            samples[f"first {label(nbytes)}"] = _time_trips(sender, receiver, payload, 1, 0.0, check)
            warm = summarize(_time_trips(sender, receiver, payload, 3, 0.0)).median
            samples[f"round trip {label(nbytes)}"] = _time_trips(
                sender, receiver, payload, effort.count(warm), 0.0, check
            )
    finally:
        peer.close()
    return samples


RIVALS = that_can(PAIR)
QUICK = (KIB,)
QUICK_LARGE = ("shmtensor", "iceoryx2", "shared_memory + Pipe", "pyzmq ipc")
"""Transports whose round trip of 4 MiB is part of a quick run."""
GROUP = "median round trip"


def case_name(transport: Transport, nbytes: int) -> str:
    return f"{transport.name}, {label(nbytes)}"


def make_cases(transports: tuple[Transport, ...], quick: tuple[int, ...], **options: Any) -> tuple[Case, ...]:
    """One for each transport and size, the sizes outside, so that the rivals take turns quickly."""
    return tuple(
        Case(
            case_name(transport, nbytes),
            transport,
            partial(measure, transport, nbytes=nbytes, **options),
            quick=nbytes in quick or (nbytes == 4 * MIB and transport.name in QUICK_LARGE and not options),
            rounds=None if nbytes == KIB else 1 if options or nbytes >= HUGE else 2,
        )
        for nbytes in SIZES
        for transport in transports
    )


def make_row(transport: Transport, nbytes: int, group: str, case: str, metric: str) -> RowSpec:
    against = None if transport is SHMTENSOR else case_name(SHMTENSOR, nbytes)
    return RowSpec(
        case_name(transport, nbytes), transport.name, case, metric, "µs", 1e6, against,
        group, transport.name, label(nbytes), nbytes,
    )  # fmt: skip


WORKLOAD = Workload(
    name="round-trip",
    title="Round trip of one tensor, both sides awake, µs",
    what=(
        "Two processes. The clock covers send, the other side's receive and send of the value it got, receive, and the "
        "death of the value before. Each send copies the payload (pyzmq copy=False: its caller must not touch it); "
        "both sides get a tensor (form of each transport: README.md) and read no byte of it. shmtensor spins for up to "
        "1 s, iceoryx2 and vLLM poll, the others block in a read; torch's queues send copies in new shared memory, as "
        "they copy nothing of a tensor that was sent before. Warm: after 11 trips (from 64 MiB on after one, and 3 or "
        "2 samples). Ray: one actor and one cluster for all sizes; its actor returns what it was sent."
    ),
    cases=(
        *make_cases(RIVALS, QUICK),
        Case(RAY.name, RAY, partial(measure_ray, sizes=SIZES), quick=False, rounds=1),
    ),
    rows=(
        *(
            make_row(transport, nbytes, GROUP, case_name(transport, nbytes), "round trip")
            for transport in RIVALS
            for nbytes in SIZES
        ),
        *(make_row(RAY, nbytes, GROUP, RAY.name, f"round trip {label(nbytes)}") for nbytes in SIZES),
        *(
            RowSpec(
                f"first, {case_name(transport, nbytes)}", transport.name, case_name(transport, nbytes), "first",
                "µs", 1e6, None, "first round trip after both ends were opened (cold)", transport.name,
                label(nbytes), nbytes,
            )
            for transport in RIVALS
            for nbytes in SIZES
        ),
    ),
    heading="payload",
)  # fmt: skip
