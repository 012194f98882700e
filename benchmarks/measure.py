"""From samples to rows: medians, spread, ratios, targets. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Samples = dict[str, list[float]]
"""What one run of a case measured: metric -> values, in seconds or in the metric's own unit."""


@dataclass(frozen=True)
class Summary:
    """A list of samples in five numbers."""

    count: int
    median: float
    p10: float
    p90: float
    least: float
    most: float


@dataclass(frozen=True)
class Target:
    """What a row should reach: its ratio if it is compared with another row, else its median."""

    relation: str
    limit: float

    def met(self, value: float) -> bool:
        return value <= self.limit if self.relation == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.relation == '<=' else '≥'} {self.limit:g}"


@dataclass(frozen=True)
class RowSpec:
    """Which metric of which case a row shows, and what it is compared with."""

    name: str
    transport: str
    case: str
    metric: str
    unit: str
    factor: float = 1.0
    """From the samples' unit to `unit`."""
    against: str | None = None
    """Name of the row that this one is divided by, round by round."""
    target: Target | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table: `median`, `p10`, `p90` over all samples, `rounds` the medians of the rounds."""

    workload: str
    name: str
    transport: str
    unit: str
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    rounds: list[float] = field(default_factory=list)
    samples: int = 0
    ratio: float | None = None
    """Median over the rounds of this row's median divided by the other row's."""
    ratio_rounds: list[float] = field(default_factory=list)
    against: str | None = None
    target: str | None = None
    met: bool | None = None
    skipped: str | None = None


@dataclass
class Outcome:
    """What became of one case: samples of each round, or why there are none."""

    rounds: list[Samples] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None


def summarize(values: Sequence[float]) -> Summary:
    """The five numbers of a list that is not empty."""
    least, p10, median, p90, most = (float(value) for value in np.percentile(values, [0, 10, 50, 90, 100]))
    return Summary(len(values), median, p10, p90, least, most)


def make_rows(workload: str, specs: Sequence[RowSpec], outcomes: Mapping[str, Outcome]) -> list[Row]:
    """One row per spec."""
    medians = {spec.name: _round_medians(spec, outcomes.get(spec.case)) for spec in specs}
    return [_make_row(workload, spec, outcomes.get(spec.case), medians) for spec in specs]


def _round_medians(spec: RowSpec, outcome: Outcome | None) -> list[float]:
    if outcome is None or outcome.failed or outcome.skipped:
        return []
    return [summarize(samples[spec.metric]).median * spec.factor for samples in outcome.rounds]


def _make_row(workload: str, spec: RowSpec, outcome: Outcome | None, medians: Mapping[str, list[float]]) -> Row:
    target = None if spec.target is None else str(spec.target)
    mine = medians[spec.name]
    if outcome is None or not mine:
        why = "not run" if outcome is None else outcome.skipped or (outcome.failed and "failed") or "not run"
        return Row(workload, spec.name, spec.transport, spec.unit, against=spec.against, target=target, skipped=why)
    total = summarize([value * spec.factor for samples in outcome.rounds for value in samples[spec.metric]])
    ratio, ratios = None, []
    if spec.against is not None:
        ratios = [a / b for a, b in zip(mine, medians[spec.against], strict=False) if b]
        ratio = summarize(ratios).median if ratios else None
    judged = ratio if spec.against is not None else total.median
    met = None if spec.target is None or judged is None else spec.target.met(judged)
    return Row(
        workload, spec.name, spec.transport, spec.unit, total.median, total.p10, total.p90, mine, total.count,
        ratio, ratios, spec.against, target, met,
    )  # fmt: skip
