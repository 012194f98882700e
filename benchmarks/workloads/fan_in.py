"""Several senders, one receiver."""

from __future__ import annotations

from functools import partial

from ..measure import RowSpec
from ..sizes import KIB
from ..transports import FAN_IN, SHMTENSOR, Transport, that_can
from .base import Case, Workload
from .throughput import measure

NBYTES = 64 * KIB
SENDERS = (1, 2, 4)
GROUP = "thousand messages/s at the receiver"


def _case(transport: Transport, senders: int) -> str:
    return f"{transport.name}, {senders}"


WORKLOAD = Workload(
    name="fan-in",
    title="Fan-in of 64 KiB tensors",
    what=(
        "1, 2 or 4 sending processes and one that receives from all of them; otherwise as throughput. All "
        "senders send as many, as fast as they can. shmtensor: a Publisher each and one Subscriber; the "
        "queues are shared by the senders."
    ),
    cases=tuple(
        Case(
            _case(transport, senders), transport, partial(measure, transport, nbytes=NBYTES, senders=senders),
            quick=senders == 2 and transport.name in ("shmtensor", "pyzmq ipc", "multiprocessing.Queue"),
        )
        for senders in SENDERS
        for transport in that_can(FAN_IN)
    ),
    rows=tuple(
        RowSpec(
            _case(transport, senders), transport.name, _case(transport, senders), "rate", "k msg/s", 1e-3,
            None if transport is SHMTENSOR else _case(SHMTENSOR, senders),
            GROUP, transport.name, f"{senders}", senders,
        )
        for transport in that_can(FAN_IN)
        for senders in SENDERS
    ),
    rounds={"full": 1},
    heading="senders",
)  # fmt: skip
