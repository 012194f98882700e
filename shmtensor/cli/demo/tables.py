"""What a demo prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ...units import format_bytes
from .tally import PATHS, Tally, ratios


def show(out: Console, tallies: list[Tally], slots: int) -> None:
    """Our paths in detail, then everybody in comparison."""
    ours = tallies[0]
    out.print(_detail(ours))
    out.print(_comparison(tallies))
    out.print(
        f"Latency is from send to receive at full load, waiting behind up to {slots} earlier messages included. GB/s "
        "is all bytes that arrived, by the wall clock, with the model run and every byte checksummed on every path: "
        "moving bytes alone is faster.",
        style="dim",
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), header_style="dim"
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def _detail(ours: Tally) -> Table:
    table = _table("shmtensor", "path", "messages", "GB/s", "p50", "p90", "p99", "verified")
    for name in PATHS:
        path = ours.paths[name]
        table.add_row(
            name, str(path.messages), f"{path.nbytes / max(ours.seconds, 1e-9) / 1e9:.2f}",
            *(_ms(path.percentile(percent)) for percent in (50, 90, 99)), format_bytes(path.verified),
        )  # fmt: skip
    return table


def _comparison(tallies: list[Tally]) -> Table:
    ours = tallies[0]
    table = _table("the same work", "transport", "frames/s", "GB/s", "queue p50", "fan p50", "speed-up")
    for tally in tallies:
        ratio = "" if tally is ours else f"{ratios(ours, tally)['frames_per_second']:.1f} x"
        table.add_row(
            tally.name, f"{tally.frames_per_second:.0f}", f"{tally.gigabytes_per_second:.2f}",
            _ms(tally.paths["work queue"].percentile(50)), _ms(tally.paths["fan-out"].percentile(50)), ratio,
        )  # fmt: skip
    return table
