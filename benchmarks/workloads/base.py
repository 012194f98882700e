"""What a workload is: cases that are run in rounds, and the rows that are made of their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..measure import RowSpec, Samples
from ..transports import Transport


@dataclass(frozen=True)
class Effort:
    """How long one run of a case should take: `seconds` of the timed part, but at most `most` samples."""

    scale: str
    seconds: float
    most: int = 20_000
    least: int = 5

    def count(self, seconds_each: float) -> int:
        """How many samples fit."""
        return max(self.least, min(self.most, int(self.seconds / max(seconds_each, 1e-9))))


@dataclass(frozen=True)
class Scale:
    """How thorough a whole run is."""

    rounds: int
    """In each, every case runs once, in fresh processes, one case after the other."""
    effort: Effort
    patience: float
    """Seconds after which a case counts as hung."""


SCALES: Mapping[str, Scale] = {
    "full": Scale(3, Effort("full", 0.3), 90.0),
    "quick": Scale(1, Effort("quick", 0.1, 5_000), 40.0),
    "tiny": Scale(1, Effort("tiny", 0.0, least=3), 120.0),
}


@dataclass(frozen=True)
class Case:
    """One configuration. `measure(effort)` runs it once, in processes of its own, and returns its samples; None if the
    workload measures all of its cases itself (`by_turns`)."""

    name: str
    transport: Transport
    measure: Callable[[Effort], Samples] | None
    quick: bool = True
    """Whether it is part of a quick run."""
    rounds: int | None = None
    """At most so many, where one takes long."""
    needs: Callable[[], str | None] = lambda: None
    """Why it cannot run here, beside its transport's own reason; None if it can."""


@dataclass(frozen=True)
class Workload:
    """A question to measure."""

    name: str
    """For `--only`."""
    title: str
    what: str
    """Who fills, who reads every byte, warm or cold, what the clock covers: printed under the table."""
    cases: tuple[Case, ...]
    rows: tuple[RowSpec, ...]
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Per scale, instead of the scale's own number."""
    by_turns: Callable[[Effort, Sequence[str], int], Mapping[str, list[Samples]]] | None = None
    """Measures the cases of these names together, in so many rounds: each runs once in a round, right after the other.
    For what depends on the state of the machine so much that only neighbours in time can be compared; the cases have no
    `measure` then. Returns each one's rounds."""
    heading: str = ""
    """What the columns of its matrices are."""
