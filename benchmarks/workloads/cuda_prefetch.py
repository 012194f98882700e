"""CUDA: how much of the copies `Subscriber(prefetch=2)` hides behind what is computed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..gpu import GPU, Gpu, lacks
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, fresh_name, run_roles
from ..sizes import MIB, label
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

NBYTES = 64 * MIB
MESSAGES = 16
"""All of them are sent before the clock starts: a producer's own copy into the slot would be slower than the link."""
AHEAD = 2
PATIENCE = 60.0
FACTOR = 1.5
"""So much longer is a step computed on than its message is copied."""
IDEAL, AHEAD_OF, ONE_BY_ONE = "ideal", "prefetch", "one by one"


def measure(effort: Effort, *, nbytes: int) -> Samples:
    """Steps per second: prefetched, one by one, and if all but the first copy were hidden."""
    return run_roles([Role(consume, (fresh_name(), nbytes, effort, GPU), DEFAULT_THREADS, forked=False)])[0]


def consume(meet: Callable[[], object], name: str, nbytes: int, effort: Effort, gpu: Gpu) -> Samples:
    import shmtensor

    source = payloads.make("torch", nbytes)
    work, tensor = gpu.work(), gpu.upload(source)
    samples: Samples = {IDEAL: [], AHEAD_OF: [], ONE_BY_ONE: []}
    with (
        shmtensor.Publisher(name, slots=MESSAGES, slot_bytes=nbytes) as pub,
        shmtensor.Subscriber(name, pin=True, device=gpu.device, prefetch=AHEAD) as sub,
        shmtensor.Subscriber(name, pin=True) as plain,
    ):

        def fill() -> None:
            for each in (sub, plain):  # the device is idle: a look gives back the slots of the last copies
                each.statistics()
            for _ in range(MESSAGES):
                pub.send(source)

        def drop(subscriber: Any) -> None:
            for _ in range(MESSAGES):
                subscriber.recv(timeout=PATIENCE).release()

        def copy_alone() -> None:
            for _ in range(MESSAGES):
                with plain.recv(timeout=PATIENCE) as message:
                    message.to(gpu.device, non_blocking=True)

        def prefetched(count: int) -> None:
            for _ in range(MESSAGES):
                with sub.recv(timeout=PATIENCE) as message:
                    work(count, message.value)

        def one_by_one(count: int) -> None:
            for _ in range(MESSAGES):
                with plain.recv(timeout=PATIENCE) as message:
                    value = message.to(gpu.device)
                    work(count, value)
                    gpu.synchronize()

        def computed(count: int) -> None:
            for _ in range(MESSAGES):
                work(count, tensor)

        for _ in range(2):  # the second time everything is warm
            fill()
            copies = gpu.seconds(copy_alone)
            drop(sub)
            products = gpu.seconds(lambda: computed(1))
        count = max(1, round(FACTOR * copies / max(products, 1e-9)))
        for _ in range(max(effort.least, 5)):
            alone = gpu.seconds(lambda: computed(count))
            fill()
            samples[AHEAD_OF].append(MESSAGES / gpu.seconds(lambda: prefetched(count)))
            samples[ONE_BY_ONE].append(MESSAGES / gpu.seconds(lambda: one_by_one(count)))
            samples[IDEAL].append(MESSAGES / (alone + copies / MESSAGES))
        fill()
        with sub.recv(timeout=PATIENCE) as message:
            payloads.check("torch", gpu.host(message.value), source)
    return samples


_CASE = f"steps on {label(NBYTES)}"


def row_name(way: str) -> str:
    return f"{_CASE}: {way}"


WORKLOAD = Workload(
    name="cuda-prefetch",
    title="CUDA: copies that are hidden behind computing",
    what=(
        f"One process. {MESSAGES} messages of 64 MiB lie in pinned slots; each step reads its tensor on the device and "
        f"multiplies matrices for about {FACTOR:g} times as long as its copy takes. prefetch: "
        f"Subscriber(device='cuda', prefetch={AHEAD}). One by one: recv, a blocking to, compute, wait. Ideal: the "
        "same computing on a tensor that is there, measured by turns, and the first copy, which nothing can hide."
    ),
    cases=(Case(_CASE, SHMTENSOR, partial(measure, nbytes=NBYTES), needs=lacks),),
    rows=(
        RowSpec(row_name(AHEAD_OF), SHMTENSOR.name, _CASE, AHEAD_OF, "steps/s", against=row_name(IDEAL)),
        RowSpec(row_name(ONE_BY_ONE), SHMTENSOR.name, _CASE, ONE_BY_ONE, "steps/s", against=row_name(IDEAL)),
        RowSpec(row_name(IDEAL), "torch", _CASE, IDEAL, "steps/s"),
    ),
)  # fmt: skip
