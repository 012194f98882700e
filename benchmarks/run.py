"""The command: `python -m benchmarks.run [--quick] [--only NAME] [--json FILE]`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import machine, report
from .measure import Row
from .runner import run_workload
from .transports import TRANSPORTS
from .workloads import ROUNDS, WORKLOADS, Workload

app = typer.Typer(add_completion=False)

WIDTH = 130
"""Columns when the output is no terminal."""


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and iterations: about two minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this workload alone (repeatable).")] = None,
    transport: Annotated[list[str] | None, typer.Option(help="Run this transport alone (repeatable).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the scale's number.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole run there.")] = None,
) -> None:
    """Measure shmtensor and its rivals, by turns, and compare them with the targets."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    workloads = _choose(only)
    transports = None if transport is None else _choose_transports(transport)
    scale = "quick" if quick else "full"
    result: dict[str, Any] = {
        "schema": report.SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "scale": scale,
        "rounds": rounds or ROUNDS[scale],
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
    }
    _print_place(console, result["machine"], result["versions"])
    rows: list[Row] = []
    samples: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    steps = sum(len(workload.cases) for workload in workloads) * (rounds or ROUNDS[scale])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=steps)  # drawn between measurements only: a redraw costs CPU

        def step(text: str) -> None:
            progress.update(task, description=text)
            progress.refresh()
            progress.advance(task)

        for workload in workloads:
            its_rows, outcomes = run_workload(workload, scale, rounds=rounds, transports=transports, step=step)
            rows += its_rows
            samples += report.summarize_samples(workload.name, outcomes)
            failures |= {f"{workload.name}: {case}": out.failed for case, out in outcomes.items() if out.failed}
            report.print_rows(console, workload, its_rows)
            report.print_failures(console, outcomes)
    if json_file is not None:
        result |= {"rows": [asdict(row) for row in rows], "samples": samples, "failures": failures}
        json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written to {json_file}")
    judged = [row for row in rows if row.met is not None]
    console.print(f"{sum(row.met is True for row in judged)} of {len(judged)} targets met")
    if failures:
        raise typer.Exit(1)


def _print_place(console: Console, place: dict[str, Any], versions: dict[str, str | None]) -> None:
    load = place["load_average"][0]
    console.print(f"{place['cpu']}, {place['cores_allowed']} cores, Linux {place['kernel']}, load {load:.1f}")
    console.print(", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()) + "\n")


def _choose(names: list[str] | None) -> tuple[Workload, ...]:
    known = {workload.name: workload for workload in WORKLOADS}
    _refuse_unknown("--only", names, list(known))
    return WORKLOADS if names is None else tuple(known[name] for name in names)


def _choose_transports(names: list[str]) -> frozenset[str]:
    _refuse_unknown("--transport", names, [transport.name for transport in TRANSPORTS])
    return frozenset(names)


def _refuse_unknown(option: str, names: list[str] | None, known: list[str]) -> None:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"no {name!r}; there is {', '.join(known)}", param_hint=option)


if __name__ == "__main__":
    app()
