"""The command: `python -m benchmarks.run [--quick] [--only NAME] [--json FILE]`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import crossover, machine, report, targets
from .measure import PERCENTILES, Row
from .runner import rounds_of, run_workload
from .transports import TRANSPORTS
from .workloads import WORKLOADS, Workload

app = typer.Typer(add_completion=False)

WIDTH = 150
"""Columns when the output is no terminal."""
BUSY = 0.25
"""Load per core above which figures mean little."""
CROSSOVERS = (
    ("round-trip", "median round trip", False, "Round trip awake: times shmtensor's time"),
    ("throughput", "thousand messages/s", True, "One way: times shmtensor's messages/s"),
)
"""Workload, matrix, whether more is better, title."""


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few cases, rounds and iterations: two minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this workload alone; `cuda`: all of cuda-.")] = None,
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
        "command": " ".join(["python -m benchmarks.run", *(Path(word).name for word in sys.argv[1:])]),
        "scale": scale,
        "rounds": {workload.name: rounds_of(workload, scale, rounds) for workload in workloads},
        "machine": machine.describe_machine(gpu=any(each.name.startswith("cuda-") for each in workloads)),
        "versions": machine.describe_versions(),
        "percentiles": PERCENTILES,
    }
    _print_place(console, result["machine"], result["versions"])
    began = time.monotonic()
    rows: list[Row] = []
    samples: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    case_seconds: dict[str, float] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=_steps(workloads, scale, rounds, transports))

        def step(text: str) -> None:  # drawn between measurements only: a redraw costs CPU
            progress.update(task, description=text)
            progress.refresh()
            progress.advance(task)

        for workload in workloads:
            start = time.monotonic()
            its_rows, outcomes = run_workload(workload, scale, rounds=rounds, transports=transports, step=step)
            seconds[workload.name] = round(time.monotonic() - start, 1)
            case_seconds |= {f"{workload.name}: {case}": round(out.seconds, 1) for case, out in outcomes.items()}
            rows += its_rows
            samples += report.summarize_samples(workload.name, outcomes)
            failures |= {f"{workload.name}: {case}": out.failed for case, out in outcomes.items() if out.failed}
            report.print_rows(console, workload, its_rows)
            report.print_failures(console, outcomes)
            console.print(f"[dim]{workload.name}: {seconds[workload.name]:.0f} s[/dim]\n")
            if json_file is not None:  # a run that is ended before its end has what it had measured
                result |= {
                    "seconds": seconds,
                    "case_seconds": case_seconds,
                    "texts": {
                        each.name: {"title": each.title, "what": each.what, "heading": each.heading}
                        for each in workloads
                    },
                    "targets": [asdict(verdict) for verdict in targets.judge(rows)],
                    "rows": [asdict(row) for row in rows],
                    "samples": samples,
                    "failures": failures,
                }
                json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    verdicts = targets.judge(rows)
    for name, group, more, title in CROSSOVERS:
        its_rows = [row for row in rows if row.workload == name]
        report.print_crossovers(console, title, crossover.find(its_rows, group, more=more))
    report.print_verdicts(console, verdicts)
    if json_file is not None:
        console.print(f"written to {json_file}")
    judged = [verdict for verdict in verdicts if verdict.met is not None]
    console.print(
        f"{sum(verdict.met is True for verdict in judged)} of {len(judged)} targets met, "
        f"{len(failures)} cases failed, {time.monotonic() - began:.0f} s"
    )
    if failures:
        raise typer.Exit(1)


def _steps(workloads: tuple[Workload, ...], scale: str, rounds: int | None, transports: frozenset[str] | None) -> int:
    """How many cases will be run, rounds counted, if nothing fails; those that are measured together count once."""
    together = [workload for workload in workloads if workload.by_turns is not None]
    return len(together) + sum(
        min(rounds_of(workload, scale, rounds), case.rounds or sys.maxsize)
        for workload in workloads
        if workload not in together
        for case in workload.cases
        if (scale == "full" or case.quick)
        and (transports is None or case.transport.name in transports)
        and not case.transport.skip_reason()
        and not case.needs()
    )


def _print_place(console: Console, place: dict[str, Any], versions: dict[str, str | None]) -> None:
    load = place["load_average"][0]
    if place["gpu"]:
        console.print("{name}, CUDA {cuda}".format(**place["gpu"]))
    console.print(f"{place['cpu']}, {place['cores_allowed']} cores, Linux {place['kernel']}, load {load:.1f}")
    if place["two_at_once"]:
        console.print(f"two processes at once do {place['two_at_once']:.2f} x what one does")
    console.print(", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()) + "\n")
    if load > BUSY * place["cores_allowed"]:
        console.print(
            "[yellow]The machine is busy: processes that poll wait for their turn, in milliseconds.[/yellow]\n"
        )


def _choose(names: list[str] | None) -> tuple[Workload, ...]:
    """By name, or by the first words of it: `cuda` is every workload `cuda-...`."""
    if names is None:
        return WORKLOADS
    chosen: dict[str, Workload] = {}
    for name in names:
        found = [each for each in WORKLOADS if each.name == name or each.name.startswith(f"{name}-")]
        if not found:
            _refuse_unknown("--only", [name], [workload.name for workload in WORKLOADS])
        chosen |= {workload.name: workload for workload in found}
    return tuple(chosen.values())


def _choose_transports(names: list[str]) -> frozenset[str]:
    _refuse_unknown("--transport", names, [transport.name for transport in TRANSPORTS])
    return frozenset(names)


def _refuse_unknown(option: str, names: list[str] | None, known: list[str]) -> None:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"no {name!r}; there is {', '.join(known)}", param_hint=option)


if __name__ == "__main__":
    app()
