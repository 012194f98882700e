"""Rows as tables for people, and as JSON for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .measure import Outcome, Row, summarize
from .workloads import Workload

SCHEMA = 1


def print_rows(console: Console, workload: Workload, rows: Sequence[Row]) -> None:
    """One table per workload, and under it what was measured."""
    table = Table(
        title=workload.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "median", "p10 … p90", "rounds", "unit", "ratio", "rounds", "against", "target", ""):
        table.add_column(heading, justify="right" if heading in ("median", "ratio") else "left", overflow="fold")
    for row in rows:
        if row.skipped:
            cells = [
                row.name,
                "",
                f"[dim]{row.skipped}[/dim]",
                "",
                "",
                "",
                "",
                row.against or "",
                row.target or "",
                "",
            ]
            table.add_row(*cells)
            continue
        met = "" if row.met is None else "[green]met[/green]" if row.met else "[red]missed[/red]"
        spread = f"{number(row.p10)} … {number(row.p90)}"
        table.add_row(
            row.name, number(row.median), spread, _span(row.rounds), row.unit,
            number(row.ratio), _span(row.ratio_rounds), row.against or "", row.target or "", met,
        )  # fmt: skip
    console.print(table)
    console.print(f"[dim]{workload.what}[/dim]\n")


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
    ]


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _span(values: Sequence[float]) -> str:
    return f"{number(min(values))}–{number(max(values))}" if len(values) > 1 else ""
