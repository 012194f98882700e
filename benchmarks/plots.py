"""Plots of one run, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .sizes import KIB, label

FORMATS = ("png", "svg")
OURS = "shmtensor"
Lines = dict[str, list[tuple[float, float]]]
"""Line -> points."""


KINDS = "Messages a second, one way, default arguments: times those of pickle over ZeroMQ"


def draw(run: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write every plot that the run has figures for: file name without its ending -> title. Needs matplotlib.

    Args:
        run: what `python -m benchmarks.run --json` wrote.
        folder: made if it is not there; each plot becomes a `.png` and a `.svg` file in it.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shmtensor"  # the same run gives the same file
    folder.mkdir(parents=True, exist_ok=True)
    plots = (
        ("latency", "Round trip, both sides awake", _lines(run, "round-trip", "median round trip"),
         "payload", "µs", True, True),
        ("latency-asleep", "Round trip, both sides asleep", _lines(run, "asleep", "median round trip"),
         "payload", "µs", True, True),
        ("messages", "One way, messages", _lines(run, "throughput", "thousand messages/s"),
         "payload", "thousand messages/s", True, True),
        ("throughput", "One way, bytes", _lines(run, "throughput", "GB/s"), "payload", "GB/s", True, True),
        ("fan-out", "Fan-out of 6 MiB: the publisher's CPU per frame",
         _lines(run, "fan-out", "CPU of the publisher per frame, µs"), "subscribers", "µs", False, True),
        ("percentiles", "Round trip of 1 KiB, both sides awake", _percentiles(run, "round-trip", label(KIB)),
         "percentile", "µs", False, True),
        ("percentiles-asleep", "Round trip of 1 KiB, both sides asleep", _percentiles(run, "asleep", label(KIB)),
         "percentile", "µs", False, True),
    )  # fmt: skip
    drawn = {}
    for name, title, lines, x_label, y_label, x_log, y_log in plots:
        if any(len(points) > 1 for points in lines.values()):
            _draw(folder / name, title, lines, x_label, y_label, x_log, y_log)
            drawn[name] = title
    kinds = {
        row["name"].removeprefix("one way, ").removesuffix(": shmtensor"): row["ratio"]
        for row in run["rows"]
        if row["workload"] == "messages" and row["ratio"] is not None and row["unit"] == "k msg/s"
    }
    if kinds:
        _draw_bars(folder / "kinds", KINDS, kinds)
        drawn["kinds"] = KINDS
    return drawn


def _lines(run: Mapping[str, Any], workload: str, group: str) -> Lines:
    lines: Lines = {}
    for row in run["rows"]:
        if row["workload"] == workload and row["group"] == group and row["median"] is not None:
            lines.setdefault(row["line"], []).append((row["x"], row["median"]))
    return {line: sorted(points) for line, points in lines.items()}


def _percentiles(run: Mapping[str, Any], workload: str, size: str) -> Lines:
    """Per transport, the median over the rounds of each percentile but the largest sample."""
    found: dict[str, list[list[float]]] = {}
    for entry in run["samples"]:
        if entry["workload"] == workload and entry["metric"] == "round trip" and entry["case"].endswith(f", {size}"):
            found.setdefault(entry["case"].removesuffix(f", {size}"), []).append(entry["percentiles"])
    lines: Lines = {}
    for line, rounds in found.items():
        middles = [sorted(values)[len(values) // 2] * 1e6 for values in zip(*rounds, strict=True)]
        lines[line] = [(x, y) for x, y in zip(run["percentiles"], middles, strict=True) if x < 100]
    return lines


def _draw(path: Path, title: str, lines: Lines, x_label: str, y_label: str, x_log: bool, y_log: bool) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    colours = plt.get_cmap("tab20")
    for number, (line, points) in enumerate(_ours_last(lines)):
        mine = line == OURS
        axes.plot(
            *zip(*points, strict=True), label=line, marker="o", markersize=4 if mine else 3,
            linewidth=3 if mine else 1.2, color="black" if mine else colours(number % 20),
        )  # fmt: skip
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if x_log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [label(int(tick)) for tick in ticks], rotation=30)
    else:
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points if x_label != "percentile"}) or
                        [0, 10, 25, 50, 75, 90, 99])  # fmt: skip
    if y_log:
        axes.set_yscale("log")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    for kind in FORMATS:
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(path.with_suffix(f".{kind}"), dpi=110, metadata=metadata)
    plt.close(figure)


def _draw_bars(path: Path, title: str, bars: Mapping[str, float]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.6))
    names = list(reversed(bars))
    drawn = axes.barh(names, [bars[name] for name in names], color="black")
    axes.bar_label(drawn, fmt="%.1f ×", padding=3)
    axes.axvline(1, color="tab:red", linewidth=1.2)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    for kind in FORMATS:
        figure.savefig(path.with_suffix(f".{kind}"), dpi=110, metadata={"Date": None} if kind == "svg" else {})
    plt.close(figure)


def _ours_last(lines: Lines) -> Iterable[tuple[str, list[tuple[float, float]]]]:
    """So that it is drawn on top."""
    return sorted(lines.items(), key=lambda item: item[0] == OURS)
