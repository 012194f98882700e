"""`Queue` in place of the standard library's and torch's: a tensor of 1 MiB, and plain Python objects."""

from __future__ import annotations

from functools import partial

from ..measure import RowSpec, Samples
from ..sizes import MIB
from ..transports import ANY_OBJECT, PICKLE, SHMTENSOR_QUEUE, TORCH_FILE_SYSTEM, Transport, that_can
from . import round_trip, throughput
from .base import Case, Effort, Workload

TENSOR, OBJECTS = "1 MiB tensor", "plain objects"
PLAIN_BYTES = 128
"""About what the objects are as a pickle."""
RATE, TRIP = "items/s, one way", "round trip, µs"
RIVALS = that_can(ANY_OBJECT)


def measure(transport: Transport, effort: Effort, *, item: str) -> Samples:
    """Items per second one way, and seconds of a round trip through two queues."""
    form, nbytes = ("objects", PLAIN_BYTES) if item == OBJECTS else (transport.form, MIB)
    one_way = throughput.measure(transport, effort, nbytes=nbytes, form=form)
    both_ways = round_trip.measure(transport, effort, nbytes=nbytes, form=form)
    return {"rate": one_way["rate"], "cpu": one_way["cpu"], "round trip": both_ways["round trip"]}


_CELLS = [
    (transport, item)
    for item in (TENSOR, OBJECTS)
    for transport in RIVALS
    if item == TENSOR or transport in (SHMTENSOR_QUEUE, PICKLE)  # torch's is the standard one for plain objects
]
_METRICS = ((RATE, "rate", "items/s", 1.0), (TRIP, "round trip", "µs", 1e6), ("CPU, µs per item", "cpu", "µs", 1e6))


def _case(transport: Transport, item: str) -> str:
    return f"{transport.name}, {item}"


WORKLOAD = Workload(
    name="queue",
    title="Queue: a tensor of 1 MiB, and plain Python objects",
    what=(
        "Two processes, each queue made for `spawn`, at most 64 items in it. One way: counted at the getter after a "
        "warm-up; CPU is that of both processes. Round trip: there through one queue and back through another. The "
        "tensor is a NumPy array for multiprocessing.Queue and a torch tensor for the others; torch's queues put "
        "copies in new shared memory. shmtensor copies it into a slot and gets a view of that; no byte is read. A "
        "plain object is a dict of a number, a path, a list of four floats and None: its columns show what a queue "
        "costs that has nothing to gain."
    ),
    cases=tuple(
        Case(
            _case(transport, item), transport, partial(measure, transport, item=item),
            quick=transport is not TORCH_FILE_SYSTEM,
        )
        for transport, item in _CELLS
    ),
    rows=tuple(
        RowSpec(
            f"{metric}, {_case(transport, item)}", transport.name, _case(transport, item), metric, unit, factor,
            None if transport is SHMTENSOR_QUEUE else f"{metric}, {_case(SHMTENSOR_QUEUE, item)}",
            group, transport.name, item,
        )
        for group, metric, unit, factor in _METRICS
        for transport, item in _CELLS
    ),
)  # fmt: skip
