"""One camera, many readers: what a further subscriber costs the publisher."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples, summarize
from ..processes import CONTEXT, Role, fresh_name, pipes, run_roles
from ..sizes import MIB
from ..transports import FAN_OUT, SHMTENSOR, Link, LinkSettings, Transport, opened, that_can
from .base import Case, Effort, Workload

NBYTES = 6 * MIB
SLOTS = 8
SETTLE = 2e-3
"""Seconds between the last subscriber's release and the next send: by then they all sleep in `recv`."""
PATIENCE = 60.0
SUBSCRIBERS = (1, 2, 4, 8)
MOST = 200
LONGER = 2
"""So many times `Effort.seconds`: a frame takes milliseconds."""


def measure(transport: Transport, effort: Effort, *, subscribers: int, nbytes: int = NBYTES) -> Samples:
    """The publisher's wall and CPU seconds per send, with that many subscribers."""
    settings = LinkSettings(fresh_name(), nbytes, SLOTS, awake=False, pattern=FAN_OUT, peers=subscribers)
    released = CONTEXT.Semaphore(0)
    with opened(transport, settings) as [link], pipes(subscribers, duplex=False) as ends:
        orders = [writing for _, writing in ends]
        return run_roles(
            [
                Role(_publish, (transport.form, link, effort, orders, released)),
                *(
                    Role(_subscribe, (transport.form, link, index, reading, released))
                    for index, (reading, _) in enumerate(ends)
                ),
            ]
        )[0]


def _publish(
    meet: Callable[[], object], form: str, link: Link, effort: Effort, orders: list[Connection], released: Any
) -> Samples:
    frame = payloads.make(form, link.settings.nbytes)
    meet()
    sender = link.sender()
    meet()
    peers = len(orders)

    def order(frames: int) -> int:
        for pipe in orders:
            pipe.send(frames)
        return frames

    warm = 3 if effort.seconds else 1
    start = time.perf_counter()
    _send_paced(sender.send, frame, order(warm), released, peers)
    each = (time.perf_counter() - start) / warm
    count = order(max(effort.least, min(MOST, int(LONGER * effort.seconds / each))))
    threads = time.process_time() - time.thread_time()
    walls, cpus = _send_paced(sender.send, frame, count, released, peers)
    threads = (time.process_time() - time.thread_time() - threads) / count
    order(0)
    meet()
    sender.close()
    return {"wall": walls, "cpu": [summarize(cpus).median + threads], "other threads": [threads]}


def _send_paced(
    send: Callable[[Any], object], frame: Any, count: int, released: Any, peers: int
) -> tuple[list[float], list[float]]:
    walls, cpus = [], []
    wall, cpu = time.perf_counter, time.thread_time
    for _ in range(count):
        time.sleep(SETTLE)
        wall_start, cpu_start = wall(), cpu()
        send(frame)
        cpus.append(cpu() - cpu_start)
        walls.append(wall() - wall_start)
        for _ in range(peers):
            if not released.acquire(timeout=PATIENCE):
                raise TimeoutError("a subscriber did not release its frame")
    return walls, cpus


def _subscribe(
    meet: Callable[[], object], form: str, link: Link, index: int, orders: Connection, released: Any
) -> None:
    expected = payloads.make(form, link.settings.nbytes)
    receiver = link.receiver(index)
    meet()
    meet()
    recv = receiver.recv
    while frames := orders.recv():
        for number in range(frames):
            value = recv()
            if number == frames - 1:
                payloads.check(form, value, expected)
            del value
            released.release()
    meet()
    receiver.close()


RIVALS = that_can(FAN_OUT)
CPU, WALL = "CPU of the publisher per frame, µs", "wall time of send per frame, µs"


def _case(transport: Transport, subscribers: int) -> str:
    return f"{transport.name}, {subscribers}"


def _row(transport: Transport, subscribers: int, group: str, metric: str) -> RowSpec:
    name = f"{metric}, {_case(transport, subscribers)}"
    against = None if subscribers == 1 else f"{metric}, {_case(transport, 1)}"
    return RowSpec(
        name, transport.name, _case(transport, subscribers), metric, "µs", 1e6, against,
        group, transport.name, f"{subscribers}", subscribers,
    )  # fmt: skip


WORKLOAD = Workload(
    name="fan-out",
    title="Fan-out of 6 MiB frames: the publisher's cost per send",
    what=(
        "One publisher and 1 to 8 subscribers, each a process of its own. The next frame is sent 2 ms after "
        "all have given back the one before, so all that can sleep are asleep and each has to be woken. "
        "wall: send() alone. CPU: of the sending thread in send(), and of all its other threads (ZeroMQ's, a "
        "queue's feeder) over the whole run, per frame. Subscribers receive and give back; they read no "
        "bytes but those of the last frame of a series. Transports without a fan-out send the frame once to "
        "each subscriber. With more processes than cores, those that poll take the publisher's time. The "
        "ratio is to one subscriber."
    ),
    cases=tuple(
        Case(
            _case(transport, subscribers), transport, partial(measure, transport, subscribers=subscribers),
            quick=subscribers in (1, 8) and (transport is SHMTENSOR or (transport.name == "pyzmq ipc")),
            rounds=None if transport is SHMTENSOR else 1,
        )
        for subscribers in SUBSCRIBERS
        for transport in RIVALS
    ),
    rows=tuple(
        _row(transport, subscribers, group, metric)
        for group, metric in ((CPU, "cpu"), (WALL, "wall"))
        for transport in RIVALS
        for subscribers in SUBSCRIBERS
    ),
    heading="subscribers",
)  # fmt: skip
