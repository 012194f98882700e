"""Up to which size a rival is faster, and from where on it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .measure import Row


@dataclass(frozen=True)
class Crossover:
    """One rival in one matrix: ratios of its figure to ours, by size, and what they say."""

    workload: str
    rival: str
    ratios: dict[str, float]
    """Column -> how many times as long (as fast, if `more` is better) the rival is."""
    verdict: str


def find(rows: Sequence[Row], group: str, *, more: bool = False) -> list[Crossover]:
    """From the rows of one workload's matrix; `more`: higher figures are better."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.group == group and row.ratio is not None and row.line and row.column:
            lines.setdefault(row.line, []).append(row)
    found = []
    for line, cells in lines.items():
        cells = sorted(cells, key=lambda row: row.x or 0)
        lost = [cell for cell in cells if cell.ratio is not None and (cell.ratio > 1 if more else cell.ratio < 1)]
        ratios = {cell.column or "": cell.ratio or 0.0 for cell in cells}
        found.append(Crossover(cells[0].workload, line, ratios, _verdict(cells, lost)))
    return found


def _verdict(cells: list[Row], lost: list[Row]) -> str:
    if not lost:
        return "shmtensor is faster at every size measured"
    if len(lost) == len(cells):
        return "the rival is faster at every size measured"
    if lost == cells[: len(lost)]:
        return f"the rival is faster up to {lost[-1].column}"
    return f"the rival is faster at {', '.join(cell.column or '' for cell in lost)}"
