"""CUDA: from a slot to the device and back, beside pageable memory, `pin_memory()` and the link's own limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import payloads
from ..gpu import GPU, Gpu, lacks
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, fresh_name, run_roles
from ..sizes import MIB, label
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

SIZES = (4 * MIB, 64 * MIB, 256 * MIB)
QUICK = 64 * MIB
SLOTS = 4
PATIENCE = 60.0
LONGER = 4
LINK, SLOT, PAGEABLE = "link", "slot", "pageable"


def measure(effort: Effort, *, way: str, nbytes: int) -> Samples:
    """GB/s of every way to copy so many bytes, by turns in one process."""
    function = {"receive": receive, "send": send}[way]
    return run_roles([Role(function, (fresh_name(), nbytes, effort, GPU), DEFAULT_THREADS, forked=False)])[0]


def receive(meet: Callable[[], object], name: str, nbytes: int, effort: Effort, gpu: Gpu) -> Samples:
    import shmtensor

    source = payloads.make("torch", nbytes)
    pinned, target = gpu.pinned(source), gpu.upload(source)
    with (
        shmtensor.Publisher(f"{name}-a", slots=SLOTS, slot_bytes=nbytes) as pub,
        shmtensor.Publisher(f"{name}-b", slots=SLOTS, slot_bytes=nbytes) as plain_pub,
        shmtensor.Subscriber(f"{name}-a", pin=True) as sub,
        shmtensor.Subscriber(f"{name}-b", pin=False) as plain_sub,
    ):

        def from_slot(publisher: Any, subscriber: Any, copy: Callable[[Any], Any]) -> float:
            publisher.send(source)
            with subscriber.recv(timeout=PATIENCE) as message:
                kept: list[Any] = []
                spent = gpu.seconds(lambda: kept.append(copy(message)))
                payloads.check("torch", gpu.host(kept[0]), source)
            return spent

        def by_pin_memory(message: Any) -> Any:
            return gpu.upload(gpu.pinned(message.value))

        return _by_turns(
            nbytes,
            effort,
            {
                LINK: lambda: gpu.seconds(lambda: target.copy_(pinned, non_blocking=True)),
                SLOT: lambda: from_slot(pub, sub, lambda message: message.to(gpu.device, non_blocking=True)),
                PAGEABLE: lambda: from_slot(plain_pub, plain_sub, lambda message: message.to(gpu.device)),
                "pin_memory": lambda: from_slot(plain_pub, plain_sub, by_pin_memory),
            },
        )


def send(meet: Callable[[], object], name: str, nbytes: int, effort: Effort, gpu: Gpu) -> Samples:
    import shmtensor

    source = payloads.make("torch", nbytes)
    pinned, held = gpu.pinned(source), gpu.upload(source)
    with (
        shmtensor.Publisher(f"{name}-a", slots=SLOTS, slot_bytes=nbytes, pin=True) as pub,
        shmtensor.Publisher(f"{name}-b", slots=SLOTS, slot_bytes=nbytes, pin=False) as plain_pub,
        shmtensor.Subscriber(f"{name}-a") as sub,
        shmtensor.Subscriber(f"{name}-b") as plain_sub,
    ):

        def to_slot(publisher: Any, subscriber: Any, value: Callable[[], Any]) -> float:
            gpu.synchronize()
            start = time.perf_counter()
            publisher.send(value())
            message = subscriber.recv(timeout=PATIENCE)
            spent = time.perf_counter() - start
            payloads.check("torch", message.value, source)
            message.release()
            return spent

        return _by_turns(
            nbytes,
            effort,
            {
                LINK: lambda: gpu.seconds(lambda: pinned.copy_(held, non_blocking=True)),
                SLOT: lambda: to_slot(pub, sub, lambda: held),
                PAGEABLE: lambda: to_slot(plain_pub, plain_sub, lambda: held),
                "cpu": lambda: to_slot(plain_pub, plain_sub, lambda: gpu.host(held)),
            },
        )


def _by_turns(nbytes: int, effort: Effort, ways: Mapping[str, Callable[[], float]]) -> Samples:
    """GB/s; the first turns, in which memory is made and pinned, do not count."""
    for _ in range(2 * SLOTS):
        each = sum(way() for way in ways.values())
    samples: Samples = {way: [] for way in ways}
    for _ in range(max(effort.least, min(500, int(LONGER * effort.seconds / max(each, 1e-9))))):
        for way, run in ways.items():
            samples[way].append(nbytes / run() / 1e9)
    return samples


_TEXTS = {
    "receive": {
        LINK: "host to device, bare copy of pinned memory",
        SLOT: "host to device, msg.to(non_blocking=True), pinned slot",
        PAGEABLE: "host to device, msg.to, pin=False",
        "pin_memory": "host to device, value.pin_memory().to(non_blocking=True)",
    },
    "send": {
        LINK: "device to host, bare copy to pinned memory",
        SLOT: "device to slot, send, pinned slot",
        PAGEABLE: "device to slot, send, pin=False",
        "cpu": "device to slot, send(tensor.cpu())",
    },
}


def row_name(way: str, metric: str, nbytes: int) -> str:
    return f"{_TEXTS[way][metric]}, {label(nbytes)}"


def _rows(way: str, nbytes: int) -> tuple[RowSpec, ...]:
    link = row_name(way, LINK, nbytes)
    return tuple(
        RowSpec(
            row_name(way, metric, nbytes), "torch" if metric == LINK else SHMTENSOR.name, f"{way}, {label(nbytes)}",
            metric, "GB/s", against=None if metric == LINK else link,
        )
        for metric in _TEXTS[way]
    )  # fmt: skip


WORKLOAD = Workload(
    name="cuda-copies",
    title="CUDA: from a slot to the device, and from the device into a slot",
    what=(
        "One process holds both ends and copies one float32 tensor in every way by turns. Host to device: the message "
        "is there; the clock covers the copy until the device is idle, the memory that it makes on the device "
        "included. Device to slot: from send until recv has returned. The bare copy of the same size between the "
        "device and memory of torch's pin_memory is the link's own limit. Every slot was used before; every copy is "
        "compared outside the clock."
    ),
    cases=tuple(
        Case(
            f"{way}, {label(nbytes)}", SHMTENSOR, partial(measure, way=way, nbytes=nbytes), quick=nbytes == QUICK,
            needs=lacks,
        )
        for way in _TEXTS
        for nbytes in SIZES
    ),
    rows=tuple(row for way in _TEXTS for nbytes in SIZES for row in _rows(way, nbytes)),
)  # fmt: skip
