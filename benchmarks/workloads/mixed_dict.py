"""A dict of many small tensors in one message, beside copying the same tensors one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ..measure import RowSpec, Samples, summarize
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import MIB
from ..transports import (
    PICKLE,
    PIPE,
    SHMTENSOR,
    TORCH_DESCRIPTOR,
    TORCH_FILE_SYSTEM,
    LinkSettings,
    Transport,
    opened,
)  # fmt: skip
from .base import Case, Effort, Workload

COUNTS = (3, 30, 300)
SHAPES = ((), (3,), (16,), (8, 8), (4, 16, 3), (256,), (2, 17), (64, 4))
DTYPES = ("float32", "int64", "uint8", "float16", "bool")
SLOTS = 16


def make_dict(count: int, seed: int = 0) -> dict[str, Any]:
    """`count` CPU tensors of 5 dtypes and 8 shapes, 1 to 256 elements, named like a model's parameters."""
    import torch

    torch.manual_seed(seed)
    tensors = {}
    for number in range(count):
        dtype = getattr(torch, DTYPES[number % len(DTYPES)])
        values = torch.randint(0, 2 if dtype == torch.bool else 100, SHAPES[number % len(SHAPES)])
        tensors[f"layers.{number // 10}.part{number % 10}"] = values.to(dtype)
    return tensors


def check(value: Any, expected: Any) -> None:
    """Raise unless both have the same keys in order, and equal tensors or arrays of the same type."""
    import torch

    if list(value) != list(expected):
        raise AssertionError("the dict that arrived has other keys")
    for key, tensor in expected.items():
        if type(value[key]) is not type(tensor) or value[key].dtype != tensor.dtype:
            raise AssertionError(f"{key}: another type")
        if not torch.equal(torch.as_tensor(value[key]), torch.as_tensor(tensor)):
            raise AssertionError(f"{key}: other values")


def measure_here(effort: Effort, *, count: int) -> Samples:
    """In one process: seconds of `send`, of `send` and `recv`, and of one `copy_` for each tensor, by turns."""
    return run_roles([Role(_here, (fresh_name(), effort, count))])[0]


def _here(meet: Callable[[], object], name: str, effort: Effort, count: int) -> Samples:
    import shmtensor

    source = make_dict(count)
    buffers = [value.clone() for value in source.values()]
    pairs = list(zip(buffers, source.values(), strict=True))
    clock = time.perf_counter
    samples: Samples = {"send": [], "both": [], "copy": []}
    with shmtensor.Publisher(name, slots=SLOTS, slot_bytes=MIB) as pub, shmtensor.Subscriber(name) as sub:

        def turn() -> None:
            start = clock()
            pub.send(source)
            sent = clock()
            value = sub.recv().value
            end = clock()
            samples["send"].append(sent - start)
            samples["both"].append(end - start)
            del value
            start = clock()
            for buffer, tensor in pairs:
                buffer.copy_(tensor)
            samples["copy"].append(clock() - start)

        for _ in range(3 * SLOTS):
            turn()
        each = summarize(samples["both"]).median + summarize(samples["copy"]).median
        for values in samples.values():
            values.clear()
        for _ in range(effort.count(each)):
            turn()
        other = make_dict(count, 1)
        pub.send(other)
        check(sub.recv(timeout=60).value, other)
    return samples


def measure(transport: Transport, effort: Effort, *, count: int) -> Samples:
    """Seconds of each round trip of the dict between two processes that are awake."""
    settings = [LinkSettings(f"{fresh_name()}-{way}", MIB) for way in ("there", "back")]
    with opened(transport, *settings) as links, pipes(1) as [(ours, theirs)]:
        return run_roles(
            [
                Role(_ping, (transport.form, *links, effort, count, ours)),
                Role(_pong, (*links, theirs)),
            ]
        )[0]


def _ping(
    meet: Callable[[], object], form: str, there: Any, back: Any, effort: Effort, count: int, control: Connection
) -> Samples:
    receiver = back.receiver()
    meet()
    sender = there.sender()
    meet()
    sources = [make_dict(count), make_dict(count, 1)]
    if form == "numpy":
        sources = [{key: tensor.numpy() for key, tensor in source.items()} for source in sources]
    clock, send, recv = time.perf_counter, sender.send, receiver.recv

    def trips(number: int, source: Any) -> tuple[list[float], Any]:
        control.send(number)
        times = []
        for _ in range(number):
            start = clock()
            send(source)
            value = recv()
            times.append(clock() - start)
        return times, value

    warm, value = trips(3, sources[0])
    check(value, sources[0])
    del value
    times, _ = trips(effort.count(summarize(warm).median), sources[0])
    del _
    _, value = trips(1, sources[1])
    check(value, sources[1])
    del value
    control.send(0)
    meet()
    sender.close()
    receiver.close()
    return {"round trip": times}


def _pong(meet: Callable[[], object], there: Any, back: Any, control: Connection) -> None:
    receiver = there.receiver()
    meet()
    sender = back.sender()
    meet()
    while number := control.recv():
        for _ in range(number):
            value = receiver.recv()
            sender.send(value)
        del value
    meet()
    sender.close()
    receiver.close()


RIVALS = (SHMTENSOR, PIPE, PICKLE, TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM)
HERE = "shmtensor, one process"
TRIPS = "round trip between two processes, µs"
ALONE = "in one process, µs"
_LINES = (("send", "send"), ("both", "send + recv"), ("copy", "copy_ one by one"))

WORKLOAD = Workload(
    name="dict",
    title="A dict of 3, 30 and 300 small tensors in one message",
    what=(
        "Tensors of 5 dtypes and 8 shapes, 1 to 256 elements, with names like parameters'. In one process, by turns: "
        "send of the dict, recv of it (the value is there, all tensors made), and one copy_ per tensor into buffers "
        "that are warm (its loop over the tensors included). Round trip: as the workload round-trip; the "
        "multiprocessing rows carry the same as NumPy arrays, torch's queues send copies, in new shared memory."
    ),
    cases=tuple(
        case
        for count in COUNTS
        for case in (
            Case(f"{HERE}, {count}", SHMTENSOR, partial(measure_here, count=count), quick=count == 300),
            *(
                Case(
                    f"{transport.name}, {count}", transport, partial(measure, transport, count=count),
                    quick=count == 300 and transport in (SHMTENSOR, TORCH_DESCRIPTOR),
                )
                for transport in RIVALS
            ),
        )
    ),
    rows=(
        *(
            RowSpec(
                f"{line}, {count}", "torch" if metric == "copy" else SHMTENSOR.name, f"{HERE}, {count}", metric,
                "µs", 1e6, None if metric == "copy" else f"copy_ one by one, {count}", ALONE, line, f"{count}", count,
            )
            for metric, line in _LINES
            for count in COUNTS
        ),
        *(
            RowSpec(
                f"round trip, {transport.name}, {count}", transport.name, f"{transport.name}, {count}", "round trip",
                "µs", 1e6, None if transport is SHMTENSOR else f"round trip, {SHMTENSOR.name}, {count}",
                TRIPS, transport.name, f"{count}", count,
            )
            for transport in RIVALS
            for count in COUNTS
        ),
    ),
    rounds={"full": 2},
    heading="tensors",
)  # fmt: skip
