"""64 MiB: what sending costs beside the bare copy, and what must not depend on the size at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, fresh_name, run_roles
from ..sizes import KIB, MIB
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

LARGE = 64 * MIB
TINY = 2 * MIB
SMALL = KIB
SLOTS = 4
PATIENCE = 60.0
LONGER = 4
"""So many times `Effort.seconds`: a copy takes milliseconds."""


def _large(effort: Effort) -> int:
    """The smallest form, which only shows that it runs, does with less."""
    return TINY if effort.scale == "tiny" else LARGE


def measure_send(threads: int, effort: Effort) -> Samples:
    """Seconds of sends and of as many bare copies of the same bytes, by turns in one process; cores in use."""
    nbytes = _large(effort)
    forked = effort.scale == "tiny"  # only shows that it runs: without the seconds of an import
    return run_roles([Role(_send, (fresh_name(), nbytes, effort), threads, forked)])[0]


def _send(meet: Callable[[], object], name: str, nbytes: int, effort: Effort) -> Samples:
    import torch

    import shmtensor

    clock, cpu = time.perf_counter, time.process_time
    source = payloads.make("torch", nbytes)
    buffer = torch.zeros_like(source)
    sends: list[float] = []
    copies: list[float] = []
    spent = 0.0
    with shmtensor.Publisher(name, slots=SLOTS, slot_bytes=nbytes) as pub, shmtensor.Subscriber(name) as sub:
        for _ in range(2 * SLOTS):  # every slot and the buffer are touched, by writer and reader
            pub.send(source)
            with sub.recv(timeout=PATIENCE) as message:
                message.value.sum()
            start = clock()
            buffer.copy_(source)
            each = clock() - start
        for _ in range(max(effort.least, int(LONGER * effort.seconds / each / 2))):
            spent -= cpu()
            start = clock()
            pub.send(source)
            sends.append(clock() - start)
            spent += cpu()
            sub.recv(timeout=PATIENCE).release()
            start = clock()
            buffer.copy_(source)
            copies.append(clock() - start)
        pub.send(source)
        payloads.check("torch", sub.recv(timeout=PATIENCE).value, source)
        payloads.check("torch", buffer, source)
    return {"send": sends, "copy": copies, "cores": [spent / sum(sends)]}


def measure_sizes(effort: Effort) -> Samples:
    """Seconds of `recv` and of `loan`, for both sizes by turns in one process."""
    return run_roles([Role(_sizes, (fresh_name(), _large(effort), effort))])[0]


def _sizes(meet: Callable[[], object], name: str, large: int, effort: Effort) -> Samples:
    import shmtensor

    samples: Samples = {}
    ends: list[tuple[str, int, Any, Any]] = []
    for label, nbytes in (("small", SMALL), ("large", large)):
        pub = shmtensor.Publisher(f"{name}-{label}", slots=SLOTS, slot_bytes=nbytes)
        sub = shmtensor.Subscriber(f"{name}-{label}", spin=1.0)
        ends.append((label, nbytes, pub, sub))
        for seed in range(SLOTS):
            payload = payloads.make("torch", nbytes, seed)
            pub.send(payload)
            payloads.check("torch", sub.recv(timeout=PATIENCE).value, payload)
    for step in range(-50, effort.count(200e-6)):
        for label, nbytes, pub, sub in ends:
            loan_time, recv_time = _loan_and_recv(pub, sub, nbytes // 4)
            if step >= 0:
                samples.setdefault(f"loan {label}", []).append(loan_time)
                samples.setdefault(f"recv {label}", []).append(recv_time)
    for _, _, pub, sub in ends:
        pub.close()
        sub.close()
    return samples


def _loan_and_recv(pub: Any, sub: Any, elements: int) -> tuple[float, float]:
    import torch

    clock, shape, dtype = time.perf_counter, (elements,), torch.float32
    start = clock()
    with pub.loan(shape, dtype):
        pass
    loan_time = clock() - start
    start = clock()
    value = sub.recv().value
    recv_time = clock() - start
    if len(value) != elements:
        raise AssertionError("another shape arrived")
    return loan_time, recv_time


_SIZES = "sizes"


def _size_rows(verb: str) -> tuple[RowSpec, RowSpec]:
    small, large = f"{verb} 1 KiB", f"{verb} 64 MiB"
    return (
        RowSpec(small, "shmtensor", _SIZES, f"{verb} small", "µs", 1e6),
        RowSpec(large, "shmtensor", _SIZES, f"{verb} large", "µs", 1e6, small),
    )


def _send_rows(threads: str) -> tuple[RowSpec, ...]:
    send, copy = f"send, {threads}", f"bare copy_, {threads}"
    return (
        RowSpec(send, "shmtensor", threads, "send", "ms", 1e3, copy),
        RowSpec(copy, "torch", threads, "copy", "ms", 1e3),
        RowSpec(f"cores that send uses, {threads}", "shmtensor", threads, "cores", "cores"),
    )


WORKLOAD = Workload(
    name="large",
    title="64 MiB: send beside one bare copy; recv and loan whatever the size",
    what=(
        "One process holds both ends. send: 64 MiB float32 into a ring of 4 slots that were all written "
        "and read before, by turns with dst.copy_(src) of the same bytes into a warm buffer; the message "
        "is received and released outside the clock. Cores: CPU seconds of the whole process in send() by "
        "its wall time. recv: recv() and .value of a message that is there already; loan: entering and "
        "leaving the with block, nothing written (so that no copy empties the caches between the two "
        "sizes). These two pass pointers: no byte is read."
    ),
    cases=(
        Case("1 thread", SHMTENSOR, partial(measure_send, 1)),
        Case("2 threads", SHMTENSOR, partial(measure_send, 2)),
        Case("default threads", SHMTENSOR, partial(measure_send, DEFAULT_THREADS), quick=False),
        Case(_SIZES, SHMTENSOR, measure_sizes),
    ),
    rows=(
        *_send_rows("1 thread"),
        *_send_rows("2 threads"),
        *_send_rows("default threads"),
        *_size_rows("recv"),
        *_size_rows("loan"),
    ),
)
