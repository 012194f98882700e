"""A result computed into the slot, beside one that is computed and then sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .. import payloads
from ..measure import RowSpec, Samples, summarize
from ..processes import Role, fresh_name, run_roles
from ..sizes import KIB, MIB, label
from ..transports import SHMTENSOR
from .base import Case, Effort, Workload

SIZES = (KIB, 64 * KIB, 6 * MIB, 64 * MIB)
SLOTS = 4
PATIENCE = 60.0


def measure(effort: Effort, *, nbytes: int) -> Samples:
    """Seconds of `torch.neg` and publication, both ways, by turns in one process."""
    return run_roles([Role(_both, (fresh_name(), nbytes, effort))])[0]


def _both(meet: Callable[[], object], name: str, nbytes: int, effort: Effort) -> Samples:
    import torch

    import shmtensor

    source = payloads.make("torch", nbytes).view(torch.int64)
    result, expected = torch.empty_like(source), -source
    shape, dtype, clock = tuple(source.shape), source.dtype, time.perf_counter
    samples: Samples = {"loan": [], "copy": [], "compute": []}
    with shmtensor.Publisher(name, slots=SLOTS, slot_bytes=nbytes) as pub, shmtensor.Subscriber(name) as sub:

        def turn() -> None:
            start = clock()
            with pub.loan(shape, dtype) as loan:
                torch.neg(source, out=loan.tensor)
            samples["loan"].append(clock() - start)
            del loan
            sub.recv(timeout=PATIENCE).release()
            start = clock()
            torch.neg(source, out=result)
            samples["compute"].append(clock() - start)
            pub.send(result)
            samples["copy"].append(clock() - start)
            sub.recv(timeout=PATIENCE).release()

        for _ in range(2 * SLOTS):
            turn()
        each = summarize(samples["loan"]).median + summarize(samples["copy"]).median
        for values in samples.values():
            values.clear()
        for _ in range(effort.count(each)):
            turn()
        with pub.loan(shape, dtype) as loan:
            torch.neg(source, out=loan.tensor)
        del loan
        payloads.check("torch", sub.recv(timeout=PATIENCE).value, expected)
    return samples


_LINES = (
    ("loan", "compute into a loan, send it"),
    ("copy", "compute, then send (one copy)"),
    ("compute", "compute alone"),
)

WORKLOAD = Workload(
    name="loan",
    title="Loan against copy: torch.neg of a tensor, published",
    what=(
        "One process holds both ends, one thread. loan: from asking for the slot until the message is "
        "published, with torch.neg(source, out=loan.tensor) in between; copy: torch.neg into a warm buffer "
        "and send of that. By turns; messages are received and released outside the clock."
    ),
    cases=tuple(
        Case(label(nbytes), SHMTENSOR, partial(measure, nbytes=nbytes), quick=nbytes == 6 * MIB) for nbytes in SIZES
    ),
    rows=tuple(
        RowSpec(
            f"{metric}, {label(nbytes)}", "torch" if metric == "compute" else SHMTENSOR.name, label(nbytes), metric,
            "µs", 1e6, f"copy, {label(nbytes)}" if metric == "loan" else None, "µs", line, label(nbytes), nbytes,
        )
        for metric, line in _LINES
        for nbytes in SIZES
    ),
    rounds={"full": 2},
    heading="payload",
)  # fmt: skip
