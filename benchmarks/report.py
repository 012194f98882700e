"""Rows as tables for people, and as JSON for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .crossover import Crossover
from .measure import Outcome, Row, summarize
from .targets import Verdict
from .workloads import Workload

SCHEMA = 2
_REASONS = ("full run only", "not asked for")


def print_rows(console: Console, workload: Workload, rows: Sequence[Row]) -> None:
    """The tables of a workload, and under them what was measured."""
    console.print(f"[bold]{workload.title}[/bold]")
    lines = [row for row in rows if row.group is None]
    if lines:
        console.print(_list(lines))
    for group in dict.fromkeys(row.group for row in rows if row.group is not None):
        cells = [row for row in rows if row.group == group]
        if any(row.median is not None for row in cells):
            console.print(_matrix(group, cells, workload.heading))
    for why, names in _skipped(rows).items():
        console.print(f"[dim]{why}: {', '.join(names)}[/dim]")
    console.print(f"[dim]{workload.what}[/dim]\n")


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _list(rows: Sequence[Row]) -> Table:
    table = _table()
    for heading in ("", "median", "p10 … p90", "rounds", "unit", "ratio", "rounds", "against"):
        table.add_column(heading, justify="right" if heading in ("median", "ratio") else "left", overflow="fold")
    for row in rows:
        if row.median is None:
            if row.skipped not in _REASONS:
                table.add_row(row.name, "", f"[dim]{row.skipped}[/dim]", "", "", "", "", row.against or "")
            continue
        table.add_row(
            row.name, number(row.median), f"{number(row.p10)} … {number(row.p90)}", span(row.rounds), row.unit,
            number(row.ratio), span(row.ratio_rounds), row.against or "",
        )  # fmt: skip
    return table


def _matrix(group: str, cells: Sequence[Row], heading: str) -> Table:
    table = _table(group)
    columns = list(dict.fromkeys(row.column for row in cells if row.median is not None))
    table.add_column(heading)
    for column in columns:
        table.add_column(column or "", justify="right")
    published = any(row.published is not None for row in cells)
    if published:
        table.add_column("published", justify="right")
    for line in dict.fromkeys(row.line for row in cells):
        its = {row.column: row for row in cells if row.line == line}
        if not any(row.median is not None or row.skipped == "failed" for row in its.values()):
            continue
        texts = [cell(its.get(column)) for column in columns]
        if published:
            known = [row.published for row in its.values() if row.published is not None]
            texts.append(span(sorted(set(known))) or number(known[0]) if known else "")
        table.add_row(line, *texts)
    return table


def cell(row: Row | None) -> str:
    """The median, why it failed, or nothing."""
    if row is None or (row.median is None and row.skipped != "failed"):
        return ""
    return "failed" if row.median is None else number(row.median)


def _skipped(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Why -> transports of matrices that have no figure at all."""
    reasons: dict[str, list[str]] = {}
    for line in dict.fromkeys(row.line for row in rows if row.group is not None):
        its = [row for row in rows if row.line == line]
        if all(row.median is None for row in its):
            why = its[0].skipped or ""
            if line and why != "failed":
                reasons.setdefault(why, []).append(line)
    return reasons


def print_crossovers(console: Console, title: str, found: Sequence[Crossover]) -> None:
    """Where a rival is faster."""
    if not found:
        return
    table = _table(title)
    columns = list(dict.fromkeys(column for one in found for column in one.ratios))
    for heading in ("", *columns, ""):
        table.add_column(heading, justify="right" if heading in columns else "left")
    for one in found:
        texts = [number(one.ratios[column]) if column in one.ratios else "" for column in columns]
        table.add_row(one.rival, *texts, one.verdict)
    console.print(table)


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """The targets, and whether they are met."""
    table = _table("Targets")
    for heading in ("", "measured", "unit", "against", "", "ratio", "rounds", "target", ""):
        table.add_column(heading, justify="right" if heading in ("measured", "ratio") else "left", overflow="fold")
    for one in verdicts:
        met = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[one.met]
        table.add_row(
            one.what, number(one.measured), one.unit, one.against or "", number(one.beside),
            number(one.value) if one.against else "", span(one.rounds), one.target,
            f"[dim]open: {one.open}[/dim]" if one.open else met,
        )  # fmt: skip
    console.print(table)


def print_failures(console: Console, outcomes: Mapping[str, Outcome]) -> None:
    """Why cases have no rows."""
    for case, outcome in outcomes.items():
        if outcome.failed:
            console.print(f"[red]{case} failed:[/red]")
            console.print(outcome.failed, markup=False, highlight=False)


def summarize_samples(workload: str, outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """One entry per case, round and metric, in the samples' own units (seconds where it is time)."""
    return [
        {"workload": workload, "case": case, "round": turn, "metric": metric, **asdict(summarize(values))}
        for case, outcome in outcomes.items()
        for turn, samples in enumerate(outcome.rounds, 1)
        for metric, values in samples.items()
        if values
    ]


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    if value and abs(value) < 0.01:
        digits = 5
    return f"{value:,.{digits}f}"


def span(values: Sequence[float]) -> str:
    """`least–most`, where there are several."""
    return f"{number(min(values))}–{number(max(values))}" if len(values) > 1 else ""
