"""CUDA: a tensor from process to process on one GPU, without leaving it, beside torch.multiprocessing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..gpu import GPU, Gpu, lacks
from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, run_roles
from ..sizes import KIB, MIB, label
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

SIZES = (KIB, 256 * MIB)
SLOTS = 4
PATIENCE = 60.0
TRIPS = {"tiny": 3, "quick": 100, "full": 400}
WARM = 10
OURS, THEIRS = "shmtensor", "torch.multiprocessing"


def measure_ours(effort: Effort, *, nbytes: int) -> Samples:
    """Seconds of round trips through two rings in device memory."""
    names = fresh_name(), fresh_name()
    return _run(effort, nbytes, partial(_rings, *names, nbytes), partial(_rings, *reversed(names), nbytes))


def measure_theirs(effort: Effort, *, nbytes: int) -> Samples:
    """Seconds of round trips through two of torch's queues."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    return _run(effort, nbytes, partial(_queues, there, back), partial(_queues, back, there))


def _run(effort: Effort, nbytes: int, ping: Callable[..., Any], pong: Callable[..., Any]) -> Samples:
    trips = TRIPS[effort.scale]
    roles = [Role(lead, (ping, nbytes, trips, GPU), forked=False), Role(answer, (pong, trips), forked=False)]
    return run_roles(roles)[0]


class _rings:
    """Two ends of this library's, in a `with` block."""

    def __init__(self, out: str, into: str, nbytes: int) -> None:
        self._out, self._into, self._nbytes = out, into, nbytes

    def __enter__(self) -> tuple[Callable[[Any], object], Callable[[], Any]]:
        import shmtensor

        self._sub = shmtensor.Subscriber(self._into)
        self._pub = shmtensor.Publisher(self._out, device="cuda", slots=SLOTS, slot_bytes=self._nbytes)
        self._pub.wait_for_subscribers(1, timeout=PATIENCE)
        return self._pub.send, lambda: self._sub.recv(timeout=PATIENCE).value

    def __exit__(self, *_: object) -> None:
        self._pub.close()
        self._sub.close()


class _queues:
    """Two ends of torch's, in a `with` block."""

    def __init__(self, out: Any, into: Any) -> None:
        self._out, self._into = out, into

    def __enter__(self) -> tuple[Callable[[Any], object], Callable[[], Any]]:
        return self._out.put, self._into.get

    def __exit__(self, *_: object) -> None:
        pass


def lead(meet: Callable[[], object], ends: Callable[[], Any], nbytes: int, trips: int, gpu: Gpu) -> Samples:
    source = payloads.make("torch", nbytes)
    tensor, samples = gpu.upload(source), []
    with ends() as (send, recv):
        for trip in range(-WARM, trips):
            gpu.synchronize()
            start = time.perf_counter()
            send(tensor)
            back = recv()
            back[-1].item()  # waits until it is there
            if trip >= 0:
                samples.append(time.perf_counter() - start)
            if trip < trips - 1:
                del back
        payloads.check("torch", gpu.host(back), source)
        del back
        meet()  # torch's receiver must let go of the memory before its sender ends
    return {"trip": samples}


def answer(meet: Callable[[], object], ends: Callable[[], Any], trips: int) -> None:
    with ends() as (send, recv):
        for _ in range(WARM + trips):
            tensor = recv()
            tensor[-1].item()
            send(tensor.clone())  # what came belongs to the other process: torch does not send it on
            del tensor
        meet()


def row_name(way: str, nbytes: int) -> str:
    return f"round trip on one GPU: {way}, {label(nbytes)}"


def _case(way: str, nbytes: int) -> Case:
    ours = way == OURS
    return Case(
        f"{way}, {label(nbytes)}", SHMTENSOR if ours else TORCH_DESCRIPTOR,
        partial(measure_ours if ours else measure_theirs, nbytes=nbytes), needs=lacks,
    )  # fmt: skip


WORKLOAD = Workload(
    name="cuda-handover",
    title="CUDA: from process to process on one GPU",
    what=(
        "Two processes on one device; a float32 tensor goes there and a clone of what came goes back, each side reads "
        "the last element (and so waits for the device) before it goes on. shmtensor: Publisher(device='cuda') "
        "copies the tensor into its ring in device memory; the receiver's tensor is that. torch.multiprocessing: "
        "SimpleQueue of the spawn context passes the tensor's own memory, which its sender must leave alone. Both "
        "sides are warm."
    ),
    cases=tuple(_case(way, nbytes) for nbytes in SIZES for way in (OURS, THEIRS)),
    rows=tuple(
        RowSpec(
            row_name(way, nbytes), SHMTENSOR.name if way == OURS else TORCH_DESCRIPTOR.name, f"{way}, {label(nbytes)}",
            "trip", "µs", 1e6, row_name(THEIRS, nbytes) if way == OURS else None,
        )
        for nbytes in SIZES
        for way in (OURS, THEIRS)
    ),
)  # fmt: skip
