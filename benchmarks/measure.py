"""From samples to rows: medians, spread, ratios. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Samples = dict[str, list[float]]
"""What one run of a case measured: metric -> values, in seconds or in the metric's own unit."""

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True)
class Summary:
    """A list of samples in few numbers."""

    count: int
    median: float
    p10: float
    p90: float
    least: float
    most: float
    percentiles: tuple[float, ...]
    """One for each of `PERCENTILES`."""


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
    group: str | None = None
    """The matrix that this row is a cell of: its title. None: a line of the table."""
    line: str | None = None
    """Of the matrix."""
    column: str | None = None
    """Of the matrix."""
    x: float | None = None
    """What the column stands for (bytes, subscribers), for plots."""
    published: float | None = None
    """The figure that others published for the same, in `unit`."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Further columns: heading -> text."""


@dataclass(frozen=True)
class Row:
    """One line or cell of a table: `median`, `p10`, `p90` over all samples, `rounds` the medians of the rounds."""

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
    group: str | None = None
    line: str | None = None
    column: str | None = None
    x: float | None = None
    published: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None


@dataclass
class Outcome:
    """What became of one case: samples of each round, or why there are none."""

    rounds: list[Samples] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None
    seconds: float = 0.0
    """How long all its rounds took, start-up included."""


def summarize(values: Sequence[float]) -> Summary:
    """The numbers of a list that is not empty."""
    percentiles = tuple(float(value) for value in np.percentile(values, PERCENTILES))
    named = dict(zip(PERCENTILES, percentiles, strict=True))
    return Summary(len(values), named[50], named[10], named[90], named[0], named[100], percentiles)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round; rounds that only one of them has do not count."""
    return [a / b for a, b in zip(above, below, strict=False) if b]


def make_rows(workload: str, specs: Sequence[RowSpec], outcomes: Mapping[str, Outcome]) -> list[Row]:
    """One row per spec."""
    medians = {spec.name: _round_medians(spec, outcomes.get(spec.case)) for spec in specs}
    return [_make_row(workload, spec, outcomes.get(spec.case), medians) for spec in specs]


def _rounds_with(spec: RowSpec, outcome: Outcome | None) -> list[list[float]]:
    if outcome is None or outcome.failed or outcome.skipped:
        return []
    return [samples[spec.metric] for samples in outcome.rounds if samples.get(spec.metric)]


def _round_medians(spec: RowSpec, outcome: Outcome | None) -> list[float]:
    return [summarize(values).median * spec.factor for values in _rounds_with(spec, outcome)]


def _make_row(workload: str, spec: RowSpec, outcome: Outcome | None, medians: Mapping[str, list[float]]) -> Row:
    mine = medians[spec.name]
    place = {
        "against": spec.against, "group": spec.group, "line": spec.line, "column": spec.column, "x": spec.x,
        "published": spec.published, "notes": dict(spec.notes),
    }  # fmt: skip
    if outcome is None or not mine:
        why = "not run" if outcome is None else outcome.skipped or (outcome.failed and "failed") or "not run"
        return Row(workload, spec.name, spec.transport, spec.unit, skipped=why, **place)
    total = summarize([value * spec.factor for values in _rounds_with(spec, outcome) for value in values])
    against = [] if spec.against is None else ratios(mine, medians[spec.against])
    ratio = summarize(against).median if against else None
    return Row(
        workload, spec.name, spec.transport, spec.unit, total.median, total.p10, total.p90, mine, total.count,
        ratio, against, **place,
    )  # fmt: skip
