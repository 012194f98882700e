"""What a workload is: cases that are run in rounds, and the rows that are made of their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..measure import RowSpec, Samples
from ..transports import Transport

ROUNDS: Mapping[str, int] = {"full": 7, "quick": 2, "tiny": 1}
"""Rounds per scale: in each, every case runs once, in fresh processes, one case after the other."""


@dataclass(frozen=True)
class Case:
    """One configuration. `measure(count)` runs it once, in processes of its own, and returns its samples."""

    name: str
    transport: Transport
    measure: Callable[[int], Samples]


@dataclass(frozen=True)
class Workload:
    """A question to measure."""

    name: str
    """For `--only`."""
    title: str
    what: str
    """Who fills, who reads every byte, warm or cold, what the clock covers: printed under the table."""
    counts: Mapping[str, int]
    """Iterations of one run, per scale."""
    cases: tuple[Case, ...]
    rows: tuple[RowSpec, ...]
