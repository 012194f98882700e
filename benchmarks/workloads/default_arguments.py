"""What people run: default arguments, small messages; alone, beside a busy process, and on one core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import shmtensor

from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import KIB
from ..transports import PAIR, PICKLE, SHMTENSOR, SHMTENSOR_QUEUE, WORK_QUEUE, ZMQ, Link, LinkSettings, Receiver, Sender
from ..transports.base import Transport
from ..transports.zmq_pair import ZmqLink
from . import round_trip, throughput
from .base import Case, Effort, Workload

TWO, BUSY, ONE = "two cores", "two cores, one busy loop beside", "one core"
RATE, TRIP = "one way", "round trip"
IN_FLIGHT = 2048
"""At most so many messages of 1 KiB lie between the two ends of a channel, whose ring has 1,024 slots, or of pyzmq's
sockets: their two queues have room for 1,000 each, and what is between them for some."""


class Ours(Link):
    """A channel whose ends are made with default arguments, but for those that a row names."""

    def __init__(self, settings: LinkSettings, slots: int | None = None, **receiving: Any) -> None:
        super().__init__(settings)
        self.sending = {} if slots is None else {"slots": slots}
        self.receiving = receiving

    def sender(self, index: int = 0) -> Sender:
        kind: Any = shmtensor.Producer if self.settings.pattern == WORK_QUEUE else shmtensor.Publisher
        sender = kind(self.settings.name, **self.sending)
        return Sender(sender.send, sender.close)

    def receiver(self, index: int = 0) -> Receiver:
        kind: Any = shmtensor.Consumer if self.settings.pattern == WORK_QUEUE else shmtensor.Subscriber
        receiver = kind(self.settings.name, **self.receiving)
        recv = receiver.recv
        return Receiver(lambda: recv().value, receiver.close, lambda: int(receiver.statistics().sleeps))


class Bare(ZmqLink):
    """PUSH and PULL with pyzmq's defaults."""

    def sender(self, index: int = 0) -> Sender:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(self.address)
        return Sender(self.sending(socket), lambda: context.destroy(linger=1000))

    def receiver(self, index: int = 0) -> Receiver:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.PULL)
        socket.bind(self.address)
        return Receiver(self.receiving(socket), lambda: context.destroy(linger=0))

    def sending(self, socket: Any) -> Callable[[Any], object]:
        """What sends one payload."""
        send: Callable[[Any], object] = socket.send
        return send

    def receiving(self, socket: Any) -> Callable[[], Any]:
        """What waits for one payload."""
        recv: Callable[[], Any] = socket.recv
        return recv


@dataclass(frozen=True)
class Kind:
    """A line of the tables: who carries what."""

    name: str
    transport: Transport
    link: Callable[[LinkSettings], Link]
    pattern: str = PAIR
    in_flight: int = IN_FLIGHT
    """At most so many messages lie between the two ends."""

    @property
    def form(self) -> str:
        """Of the payload."""
        return self.transport.form


FAN_OUT = Kind("Publisher, Subscriber", SHMTENSOR, Ours)
JOBS = Kind("Producer, Consumer", SHMTENSOR, Ours, WORK_QUEUE)
SIXTEEN = Kind("Publisher, Subscriber, slots=16", SHMTENSOR, partial(Ours, slots=16))
GROUP = Kind("Publisher, Subscriber in a group", SHMTENSOR, partial(Ours, group="them"))
SPINNING = Kind("Publisher, Subscriber, spin=1", SHMTENSOR, partial(Ours, spin=1.0))
SOCKETS = Kind("pyzmq PUSH, PULL", ZMQ, Bare)
QUEUE = Kind("shmtensor.Queue", SHMTENSOR_QUEUE, SHMTENSOR_QUEUE.link, in_flight=64)
STANDARD = Kind("multiprocessing.Queue", PICKLE, PICKLE.link, in_flight=64)

ROWS: tuple[tuple[str, str, Kind, Kind | None], ...] = (
    (TWO, RATE, SOCKETS, None),
    (TWO, RATE, FAN_OUT, SOCKETS),
    (TWO, RATE, JOBS, SOCKETS),
    (TWO, RATE, SIXTEEN, SOCKETS),
    (TWO, RATE, GROUP, SOCKETS),
    (BUSY, RATE, SOCKETS, None),
    (BUSY, RATE, FAN_OUT, SOCKETS),
    (BUSY, RATE, JOBS, SOCKETS),
    (ONE, RATE, SOCKETS, None),
    (ONE, RATE, FAN_OUT, SOCKETS),
    (ONE, RATE, JOBS, SOCKETS),
    (ONE, RATE, STANDARD, None),
    (ONE, RATE, QUEUE, STANDARD),
    (ONE, TRIP, SOCKETS, None),
    (ONE, TRIP, FAN_OUT, SOCKETS),
    (ONE, TRIP, SPINNING, SOCKETS),
)
"""Where, what, who, and beside whom."""


def measure(effort: Effort, *, where: str, what: str, kind: Kind) -> Samples:
    """Messages per second, or seconds of a trip there and back, of 1 KiB."""
    cpus = _cpus(where)
    form = "numpy" if kind is QUEUE else kind.form
    with _neighbour(cpus) if where == BUSY else nullcontext(), pipes(1) as [(ours, theirs)]:
        names = (fresh_name(),) if what == RATE else (fresh_name(), fresh_name())
        links = [kind.link(LinkSettings(name, KIB, kind.in_flight, pattern=kind.pattern)) for name in names]
        try:
            if what == RATE:
                roles = [
                    Role(_pinned, (cpus, throughput.receive, form, *links, effort, [ours])),
                    Role(_pinned, (cpus, throughput.send, form, *links, 0, 1, theirs)),
                ]
            else:
                roles = [
                    Role(_pinned, (cpus, round_trip.ping, form, *links, KIB, effort, 0.0, ours)),
                    Role(_pinned, (cpus, round_trip.pong, *links, theirs)),
                ]
            found: Samples = run_roles(roles)[0]
            return found
        finally:
            for link in links:
                link.close()


def _pinned(meet: Callable[[], object], cpus: frozenset[int], role: Callable[..., Any], *args: Any) -> Any:
    os.sched_setaffinity(0, cpus)
    return role(meet, *args)


def _cpus(where: str) -> frozenset[int]:
    """The processors of a row: the first ones that this process may use."""
    return frozenset(sorted(os.sched_getaffinity(0))[: 1 if where == ONE else 2])


@contextmanager
def _neighbour(cpus: frozenset[int]) -> Iterator[None]:
    """A process that never rests, on the same processors."""
    program = f"import os\nos.sched_setaffinity(0, {set(cpus)})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _needs(where: str) -> str | None:
    return "one CPU only" if where != ONE and len(os.sched_getaffinity(0)) < 2 else None


def case_name(where: str, what: str, kind: Kind) -> str:
    """Of a case, and of its row."""
    return f"{where}, {what}: {kind.name}"


WORKLOAD = Workload(
    name="default-arguments",
    title="1 KiB with default arguments: alone, beside a busy process, on one core",
    what=(
        "Two processes, 1 KiB, nothing passed to the constructors but what a row names (queues: maxsize=64). One way: "
        "messages a second at the receiver, as many in flight as the transport itself allows, over stretches of at "
        "least 8,192 (queues: 256), counted as in the table of one way. Beside: a process in an endless loop on the "
        "same two CPUs. One core: both processes on one CPU (`sched_setaffinity`, before the ends "
        "are made). Queues carry NumPy arrays, pyzmq bytes. The ratio is to pyzmq or multiprocessing.Queue in the same "
        "round."
    ),
    cases=tuple(
        Case(
            case_name(where, what, kind), kind.transport, partial(measure, where=where, what=what, kind=kind),
            needs=partial(_needs, where),
        )
        for where, what, kind, _ in ROWS
    ),
    rows=tuple(
        RowSpec(
            case_name(where, what, kind), kind.transport.name, case_name(where, what, kind),
            *(("rate", "k msg/s", 1e-3) if what == RATE else ("round trip", "µs", 1e6)),
            None if beside is None else case_name(where, what, beside),
        )
        for where, what, kind, beside in ROWS
    ),
    rounds={"full": 10, "quick": 2},
)  # fmt: skip
