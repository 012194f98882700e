"""One way, as fast as it goes: messages, bytes, and the CPU time that they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import HUGE, KIB, MIB, SIZES, in_flight, label
from ..transports import FAN_IN, PAIR, RAY, SHMTENSOR, VLLM, Link, LinkSettings, Transport, opened, that_can
from .base import Case, Effort, Workload

IN_FLIGHT = 64
STRETCHES = 3
LONGER = 1.5
"""So many times `Effort.seconds` all stretches take."""
FILLINGS = 4
"""So many times what may lie between the two ends is sent in a stretch at least: the wait for room is part of it."""
MORE = 20
"""So many times `Effort.most` messages are sent at most: each is cheaper than a round trip."""


def rates_of(take: Callable[[int], float], effort: Effort, in_flight: int, senders: int = 1) -> list[float]:
    """Messages per second of some stretches.

    Args:
        take: has so many messages sent, receives all of them, and returns the seconds since they were asked for.
            Nothing lies between the two ends before or after, and a stretch counts as a whole: the median of parts
            that are shorter than what may lie there shows how fast the receiver is alone.
        effort: how long all stretches take.
        in_flight: so many messages of a sender may lie between the two ends, at most.
        senders: those who send, each as many.
    """
    count, most = 2 * in_flight * senders, min(effort.most * MORE, 1 << 20)  # every slot, buffer and queue is used
    while (seconds := take(count)) < effort.seconds / 10 and count < most:
        count *= 4  # the first ones are cold, and few take less time than their order
    count = min(most, int(effort.seconds * LONGER * count / seconds)) // STRETCHES
    count = max(FILLINGS * in_flight, count // senders) * senders
    return [count / take(count) for _ in range(STRETCHES if effort.seconds else 1)]


def measure(transport: Transport, effort: Effort, *, nbytes: int, senders: int = 1, form: str | None = None) -> Samples:
    """At the receiver: messages per second of each of 3 stretches, and CPU seconds of all per message.

    `form` is that of the payload, where a transport takes several.
    """
    form = form or transport.form
    settings = LinkSettings(
        fresh_name(), nbytes, in_flight(nbytes, IN_FLIGHT), pattern=PAIR if senders == 1 else FAN_IN, peers=senders
    )
    with opened(transport, settings) as [link], pipes(senders) as ends:
        return run_roles(
            [
                Role(receive, (form, link, effort, [ours for ours, _ in ends])),
                *(Role(send, (form, link, index, senders, theirs)) for index, (_, theirs) in enumerate(ends)),
            ]
        )[0]


def send(meet: Callable[[], object], form: str, link: Link, index: int, senders: int, control: Connection) -> None:
    """The sender's role: as many messages as `control` asks for."""
    meet()
    for turn in range(senders):  # one after the other: some transports cannot be opened by two at once
        if turn == index:
            sender = link.sender(index)
        meet()
    nbytes = link.settings.nbytes
    payload, last = payloads.make(form, nbytes), payloads.make(form, nbytes, 1)
    push, cpu = sender.send, time.process_time
    while count := control.recv():
        start = cpu()
        for _ in range(count):
            push(payload)
        control.send(cpu() - start)
    if index == 0:
        push(last)
    meet()
    sender.close()


def receive(meet: Callable[[], object], form: str, link: Link, effort: Effort, controls: list[Connection]) -> Samples:
    """The receiver's role, with its samples."""
    receiver = link.receiver()
    meet()
    for _ in controls:
        meet()
    nbytes = link.settings.nbytes
    expected, last = payloads.make(form, nbytes), payloads.make(form, nbytes, 1)
    recv, clock, cpu = receiver.recv, time.perf_counter, time.process_time

    spent: list[tuple[int, float]] = []

    def take(count: int) -> float:
        each, before = count // len(controls), cpu()
        start = clock()
        for control in controls:
            control.send(each)
        for _ in range(count):
            value = recv()
        seconds = clock() - start
        spent.append((count, cpu() - before + sum(control.recv() for control in controls)))
        payloads.check(form, value, expected)
        return seconds

    rates = rates_of(take, effort, link.settings.in_flight, len(controls))
    for control in controls:
        control.send(0)
    value = recv()
    payloads.check(form, value, last)  # nothing was lost and nothing came twice
    del value
    meet()
    receiver.close()
    return {"rate": rates, "cpu": [seconds / count for count, seconds in spent[-len(rates) :]]}


def measure_ray(effort: Effort, sizes: tuple[int, ...] = SIZES) -> Samples:
    """All sizes through one actor: a cluster takes too long to start for one each."""
    return run_roles([Role(_ray, (effort, sizes))])[0]


def _ray(meet: Callable[[], object], effort: Effort, sizes: tuple[int, ...]) -> Samples:
    peer, samples = RAY.peer(), Samples()
    try:
        for nbytes in sizes:
            payload, flying = payloads.make(RAY.form, nbytes), in_flight(nbytes, IN_FLIGHT)
            start = time.perf_counter()
            peer.push(payload, flying, flying)
            count = effort.count((time.perf_counter() - start) / flying)
            start = time.perf_counter()
            peer.push(payload, count, flying)
            samples[f"rate {label(nbytes)}"] = [count / (time.perf_counter() - start)]
            payloads.check(RAY.form, peer.trip(payload), payload)
    finally:
        peer.close()
    return samples


RIVALS = that_can(PAIR)
MEASURED = tuple(size for size in SIZES if size <= HUGE)
QUICK_LARGE = ("shmtensor", "iceoryx2", "shared_memory + Pipe", "pyzmq ipc")
"""Transports whose 4 MiB are part of a quick run. vLLM, which starts as slowly as all others together, has no part."""
MESSAGES, BYTES = "thousand messages/s", "GB/s"
CPU_MESSAGES, CPU_BYTES = "CPU seconds per million messages, both sides", "CPU seconds per GB, both sides"


def _case(transport: Transport, nbytes: int) -> str:
    return f"{transport.name}, {label(nbytes)}"


def _rows(group: str, metric: str, factor_of: Callable[[int], float], unit: str) -> tuple[RowSpec, ...]:
    return tuple(
        RowSpec(
            f"{group}: {_case(transport, nbytes)}", transport.name,
            RAY.name if transport is RAY else _case(transport, nbytes),
            f"{metric} {label(nbytes)}" if transport is RAY else metric, unit, factor_of(nbytes),
            None if transport is SHMTENSOR else f"{group}: {_case(SHMTENSOR, nbytes)}",
            group, transport.name, label(nbytes), nbytes,
        )
        for transport in (*RIVALS, *((RAY,) if metric == "rate" else ()))
        for nbytes in MEASURED
    )  # fmt: skip


WORKLOAD = Workload(
    name="throughput",
    title="One way, as fast as it goes",
    what=(
        "Two processes, 64 messages in flight at most, and 64 MiB (pyzmq: as many at each end and what its "
        "socket holds; Pipe: what the pipe holds). Counted at the receiver, after a warm-up, over stretches of at "
        "least four times as many: from the order to send them until the last one is there, with nothing in "
        "flight before; each value is received, usable, and dropped; no byte is read. The sender copies the payload "
        "each time (pyzmq copy=False: the kernel does). shmtensor spins for up to 1 s, iceoryx2 and vLLM poll, the "
        "others block; CPU seconds are user and system time of both processes, polling included. Ray: calls of an "
        "actor that return a number."
    ),
    cases=(
        *(
            Case(
                _case(transport, nbytes), transport, partial(measure, transport, nbytes=nbytes),
                quick=transport.name in QUICK_LARGE if nbytes == 4 * MIB else nbytes == KIB and transport is not VLLM,
                rounds=None if nbytes == KIB else 1,
            )
            for nbytes in MEASURED
            for transport in RIVALS
        ),
        Case(RAY.name, RAY, partial(measure_ray, sizes=MEASURED), quick=False, rounds=1),
    ),
    rows=(
        *_rows(MESSAGES, "rate", lambda nbytes: 1e-3, "k msg/s"),
        *_rows(BYTES, "rate", lambda nbytes: nbytes * 1e-9, "GB/s"),
        *_rows(CPU_MESSAGES, "cpu", lambda nbytes: 1e6, "s"),
        *_rows(CPU_BYTES, "cpu", lambda nbytes: 1e9 / nbytes, "s"),
    ),
    heading="payload",
)  # fmt: skip
