"""The command that writes a run's figures into the documentation: `python -m benchmarks.document RUN.json`.

It makes the page of benchmarks (of `document.md`) and the page of all tables (of `tables.md`), where a line like
`<!-- targets -->` is replaced by what the run found, and the table of `README.md`, between its two marks.

Of several runs on one machine, which measured different workloads: `python -m benchmarks.document ONE.json OTHER.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from . import crossover, plots, report
from .measure import Row
from .run import CROSSOVERS
from .sizes import MIB
from .targets import judge

PROJECT = Path(__file__).parents[1]
PAGES = {"document.md": "docs/benchmarks/results.md", "tables.md": "docs/internals/benchmark-tables.md"}
"""Template beside this file -> page."""
PLOTS = "docs/benchmarks/results"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
FIGURES = (  # the README's lines: what, a target's text, the beginning of the row that it is compared with, its name
    (
        "Round trip of 1 KiB, both sides awake (`spin=1`)",
        "1 KiB round trip, awake",
        "iceoryx2",
        "iceoryx2, which polls",
    ),
    ("Round trip of 1 KiB, both sides asleep (`spin=0`)", "1 KiB round trip, asleep", "pyzmq ipc", "ZeroMQ"),
    ("`{tensor, id}` of 1 KiB, one way", "tensor and id, one way", "", "`pickle` over ZeroMQ"),
    (
        "Frame of 6 MiB with `meta=`, one way",
        "6 MiB frame with meta, one way",
        "one way, 6 MiB frame with meta: pickle over ZeroMQ, out of band",
        "`pickle` over ZeroMQ, out of band",
    ),
    ("Frame of 6 MiB to 8 readers (`spin=0`), sender's CPU", "fan-out of 6 MiB to 8, CPU", "", "to 1 reader"),
    ("`Queue`, dict with a small array", "Queue, dict with a small array", "", "`multiprocessing`"),
    ("`Queue`, tensor of 1 MiB", "Queue, tensor of 1 MiB, one way", "rate, torch", "torch queue"),
    ("`DataLoader`, 2 workers, 32 MiB a batch", "DataLoader, 2 workers, batches of 32 MiB", "", "default"),
    ("Request and reply of 1 KiB (`spin=1`)", "request of 1 KiB, awake", "pyzmq", "`torch.save` over ZeroMQ"),
    ("Checkpoint of 1 GiB, trainer waits", "save of 1 GiB into warm slots", "the caller", "DCP `async_save`"),
    ("Checkpoint of 1 GiB, from disk", "checkpoint of 1 GiB mapped and used, disk", "", "safetensors"),
)
_MARK = re.compile(r"^<!-- ([a-z-]+(?: [a-z-]+)*) -->$", re.MULTILINE)

app = typer.Typer(add_completion=False)


@app.command()
def main(
    run_files: Annotated[list[Path], typer.Argument(help="What `python -m benchmarks.run --json` wrote.")],
    project: Annotated[Path, typer.Option(help="Where README.md and docs/ are.")] = PROJECT,
) -> None:
    """Write the pages, the plots (if matplotlib is installed), and the README's table."""
    runs = [json.loads(run_file.read_text(encoding="utf-8")) for run_file in run_files]
    for run_file, each in zip(run_files, runs, strict=True):
        if each.get("schema") != report.SCHEMA:
            raise typer.BadParameter(f"{run_file} has schema {each.get('schema')}, this program reads {report.SCHEMA}")
    try:
        run = joined(runs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        drawn = plots.draw(run, project / PLOTS)
    except ModuleNotFoundError:
        typer.echo("matplotlib is not installed: no plots (pip install -e '.[rivals]')", err=True)
        drawn = {}
    for template, page in PAGES.items():
        text = Path(__file__).with_name(template).read_text(encoding="utf-8")
        (project / page).write_text(render(text, run, drawn, Path(PLOTS).name), encoding="utf-8")
    readme = project / "README.md"
    readme.write_text(with_figures(readme.read_text(encoding="utf-8"), run), encoding="utf-8")
    plotted = f", {len(drawn)} plots in {PLOTS}" if drawn else ""
    typer.echo(f"written: {', '.join(PAGES.values())}, README.md{plotted}")


def joined(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One run of several: of each workload what the last of them found that measured it.

    Raises `ValueError` if they are not of one machine, the same versions and the same scale. What was absent from a run
    has no version in it, and none of the rows that it brings.
    """
    whole = dict(runs[0])
    for run in runs[1:]:
        places = [{**each["machine"], "load_average": None, "two_at_once": None} for each in (whole, run)]
        versions = [{name: version for name, version in each["versions"].items() if version} for each in (whole, run)]
        alike = all(versions[0].get(name, version) == version for name, version in versions[1].items())
        if places[0] != places[1] or whole["scale"] != run["scale"] or not alike:
            raise ValueError("the runs are of different machines, versions or scales: make a page of each")
        whole["versions"] = {**whole["versions"], **versions[1]}
        fresh = run["seconds"]
        whole["command"] += f"` and `{run['command']}"
        whole["rows"] = [row for row in whole["rows"] if row["workload"] not in fresh] + [
            row for row in run["rows"] if row["workload"] in fresh
        ]
        for key in ("rounds", "seconds", "texts"):
            whole[key] = {**whole[key], **{name: value for name, value in run[key].items() if name in fresh}}
        failures = {case: text for case, text in whole["failures"].items() if case.split(":")[0] not in fresh}
        whole["failures"] = {**failures, **run["failures"]}
    if len(runs) > 1:  # some may be older than a target
        whole["targets"] = [asdict(verdict) for verdict in judge(Row(**row) for row in whole["rows"])]
    return whole


def render(template: str, run: Mapping[str, Any], drawn: Mapping[str, str], folder: str) -> str:
    """The page. `ValueError` if the template asks for a part that there is none of."""
    rows = [Row(**row) for row in run["rows"]]

    def part(match: re.Match[str]) -> str:
        name, _, argument = match[1].partition(" ")
        if name == "run":
            return _about(run)
        if name == "summary":
            return _summary(run["targets"])
        if name == "targets":
            if not argument:
                return _targets(run["targets"])
            mine = [one for one in run["targets"] if one["workload"] in argument.split()]
            return _targets([one for one in mine if one["met"] is not None] or mine)
        if name == "crossover":
            return _crossovers(rows)
        if name == "plot":
            return f"![{drawn[argument]}]({folder}/{argument}.png)" if argument in drawn else ""
        if name == "workload":
            return _workload(argument, run, rows)
        if name == "failures":
            return _failures(run["failures"])
        raise ValueError(f"the template asks for {match[0]}, which is not known")

    return re.sub(r"\n{3,}", "\n\n", _MARK.sub(part, template)).rstrip() + "\n"


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in (headings, *lines)]
    return "\n".join([rows[0], f"|{'---|' * len(headings)}", *rows[1:]])


def _about(run: Mapping[str, Any]) -> str:
    place, versions = run["machine"], run["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if not version)
    rounds, two = sorted(set(run["rounds"].values())), place.get("two_at_once")
    together = f"; two processes at once do {two:.2f} x what one does" if two else ""
    lines = [
        f"Generated by `python -m benchmarks.document` from the JSON of `{run['command']}`, run on {run['date'][:10]}:",
        f"{place['cpu']}, {place['cores_allowed']} cores, {place['memory_bytes'] / (1 << 30):.0f} GiB of memory, "
        f"Linux {place['kernel']}, load {place['load_average'][0]:.1f} before the run{together};",
        f"{known}.",
        "{name}, CUDA {cuda}.".format(**place["gpu"]) if place.get("gpu") else "",
        f"{'Not installed, so without rows: ' + absent + '.' if absent else ''}",
        f"Scale `{run['scale']}`, {' or '.join(str(each) for each in rounds)} rounds, "
        f"{sum(run['seconds'].values()) / 60:.0f} minutes.",
    ]
    return "\n".join(line for line in lines if line)


def _targets(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """A table of targets. What is compared with several is one row, with a line for each in its cells."""

    def line(one: Mapping[str, Any]) -> list[str]:
        beside = f"{one['against']} {report.number(one['beside'])}" if one["against"] else ""
        ratio = ""
        if one["against"] and one["value"] is not None:
            ratio = f"{report.number(one['value'])} {_in_brackets(one['rounds'])}".strip()
        met = {True: "met", False: "**missed**", None: ""}[one["met"]]
        measured = f"{report.number(one['measured'])} {one['unit']}" if one["measured"] is not None else ""
        return [one["what"], measured, beside, ratio, one["target"], f"open: {one['open']}" if one["open"] else met]

    def together(lines: list[list[str]]) -> list[str]:
        first, *_ = lines
        return [*first[:2], *("<br>".join(cells) for cells in zip(*(each[2:] for each in lines), strict=True))]

    headings = ("what", "shmtensor", "beside", "ratio (rounds)", "target", "")
    groups = groupby(map(line, verdicts), lambda cells: cells[:2])
    return table(headings, (together(list(lines)) for _, lines in groups))


def _summary(verdicts: Sequence[Mapping[str, Any]]) -> str:
    judged = [one for one in verdicts if one["met"] is not None]
    missed = [one for one in judged if not one["met"]]
    said = f"{len(judged) - len(missed)} of the {len(judged)} targets that this run could judge are met"
    if not missed:
        return f"{said}."
    lines = []
    for what, each in groupby(missed, lambda one: one["what"]):
        found = []
        for one in each:
            beside = f" beside {one['against']}" if one["against"] else ""
            found.append(f"{report.number(one['value'])}{beside}, wanted {one['target']}")
        lines.append(f"- {what}: {'; '.join(found)}")
    return f"{said}; the others, and what is only reported, are in the tables. Missed:\n\n" + "\n".join(lines)


def with_figures(readme: str, run: Mapping[str, Any]) -> str:
    """The README with the table of this run between its marks. `ValueError` if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN.strip()} and {END.strip()}")
    lines = []
    for text, what, beside, name in FIGURES:
        found = (one for one in run["targets"] if one["what"] == what and (one["against"] or "").startswith(beside))
        one = next(found, None)
        if one is not None and one["value"]:
            value = one["value"]
            ratio = f"{report.number(value)} ×" if value >= 1 else f"1 / {report.number(1 / value)}"
            mine, other = (f"{report.number(one[key])} {one['unit']}" for key in ("measured", "beside"))
            lines.append([text, mine, f"{other}, {name}", ratio])
    place = run["machine"]
    about = (
        "default arguments but those named and the sizes of rings and queues, "
        f"{place['cpu']}, {place['cores_allowed']} cores, {run['date'][:10]}"
    )
    shown = table(("", "shmtensor", "beside it", "ratio"), lines)
    return f"{before}{BEGIN}{shown}\n\nMedians of one run ({about}).\n{END}{after}"


def _in_brackets(values: Sequence[float]) -> str:
    text = report.span(values)
    return f"({text})" if text else ""


def _crossovers(rows: Sequence[Row]) -> str:
    parts = []
    for name, group, more, title in CROSSOVERS:
        found = crossover.find([row for row in rows if row.workload == name], group, more=more)
        if not found:
            continue
        columns = list(dict.fromkeys(column for one in found for column in one.ratios))
        lines = [
            [one.rival, *(report.number(one.ratios.get(column)) for column in columns), one.verdict] for one in found
        ]
        parts.append(f"{title}.\n\n{table((('rival'), *columns, ''), lines)}")
    return "\n\n".join(parts)


def _workload(name: str, run: Mapping[str, Any], rows: Sequence[Row]) -> str:
    if name not in run["texts"]:
        return "Not part of this run."
    text = run["texts"][name]
    its = [row for row in rows if row.workload == name]
    parts = [text["what"]]
    lines = [row for row in its if row.group is None and row.median is not None]
    if lines:
        parts.append(_lines(lines))
    for group in dict.fromkeys(row.group for row in its if row.group is not None):
        cells = [row for row in its if row.group == group]
        if any(row.median is not None for row in cells):
            parts.append(f"{group[0].upper()}{group[1:]}:\n\n{_matrix(cells, text['heading'])}")
    return "\n\n".join(parts)


def _lines(rows: Sequence[Row]) -> str:
    def line(row: Row) -> list[str]:
        ratio = "" if row.ratio is None else f"{report.number(row.ratio)} × {row.against}"
        spread = f"({report.number(row.p10)}–{report.number(row.p90)})" if row.samples > 1 else ""
        return [row.name, f"{report.number(row.median)} {spread}".strip(), row.unit, ratio]

    return table(("", "median (10th–90th percentile)", "unit", "ratio"), map(line, rows))


def _matrix(cells: Sequence[Row], heading: str) -> str:
    columns = list(dict.fromkeys(row.column for row in cells if row.median is not None))
    notes = list(dict.fromkeys(note for row in cells for note in row.notes))
    published = any(row.published is not None for row in cells)
    lines = []
    for line in dict.fromkeys(row.line for row in cells):
        its = {row.column: row for row in cells if row.line == line}
        if not any(row.median is not None or row.skipped == "failed" for row in its.values()):
            continue
        texts = [_cell(its.get(column)) for column in columns]
        said = next(iter(its.values())).notes
        lines.append([line or "", *texts, *(said.get(note, "") for note in notes)])
    explained = "\n\nIn brackets: the published figure." if published else ""
    return table((heading, *(column or "" for column in columns), *notes), lines) + explained


def _cell(row: Row | None) -> str:
    text = report.cell(row)
    if row is None or row.published is None or not text:
        return _with_speed(row, text)
    return f"{_with_speed(row, text)} ({_with_speed(row, report.number(row.published), row.published)})"


def _with_speed(row: Row | None, text: str, value: float | None = None) -> str:
    """Serialization rows are shown in MB/s too, as the published ones are: MiB of tensor per second."""
    value = value or (row.median if row else None)
    if row is None or row.workload != "serialize-tensor" or row.unit != "ms" or not value or not row.x:
        return text
    return f"{text} ms = {report.number(row.x / MIB / value * 1e3)} MB/s"


def _failures(failures: Mapping[str, str]) -> str:
    if not failures:
        return "No case failed."
    return "\n".join(f"- {case}: {text.strip().splitlines()[-1]}" for case, text in failures.items())


if __name__ == "__main__":
    app()
