"""The numbers of a demo: what arrived, how fast, whether every byte was right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PATHS = ("work queue", "results", "fan-out")


@dataclass
class Path:
    """One leg of the work, summed over rounds and receivers."""

    messages: int = 0
    nbytes: int = 0
    verified: int = 0
    latencies: list[int] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        self.messages += report["messages"]
        self.nbytes += report["bytes"]
        self.verified += report["verified"]
        self.latencies += report["latencies"]

    def percentile(self, percent: float) -> float:
        """Milliseconds from send to receive; 0 if nothing arrived."""
        ordered = sorted(self.latencies)
        if not ordered:
            return 0.0
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1e6


@dataclass
class Tally:
    """One transport's rounds."""

    name: str
    sent: int = 0
    seconds: float = 0.0
    lost: int = 0
    damaged: int = 0
    paths: dict[str, Path] = field(default_factory=lambda: {name: Path() for name in PATHS})

    def add_round(self, reports: dict[str, Any], results: dict[str, Any]) -> list[str]:
        """Add a round; returns what was wrong with it."""
        made = reports["producer 0"]
        workers = [report for name, report in reports.items() if name.startswith("worker")]
        readers = {name: report for name, report in reports.items() if name.startswith("subscriber")}
        self.sent += made["sent"]
        last = max(report["last_ns"] for report in (*workers, *readers.values(), results))
        self.seconds += max(1, last - made["first_ns"]) / 1e9
        errors = []
        for path, receivers in (("work queue", workers), ("results", [results]), ("fan-out", list(readers.values()))):
            for report in receivers:
                self.paths[path].add(report)
                if report["damaged"]:
                    self.damaged += len(report["damaged"])
                    errors.append(
                        f"{self.name}, {path}: wrong bytes in, or a second copy of, messages {report['damaged'][:5]}"
                    )
        for what, got in (
            ("work queue", sum(report["messages"] for report in workers)), ("results", results["messages"]),
            *((name, report["messages"]) for name, report in readers.items()),
        ):  # fmt: skip
            if got != made["sent"]:
                self.lost += abs(made["sent"] - got)
                errors.append(f"{self.name}, {what}: {made['sent']} messages were sent, {got} arrived")
        return errors

    @property
    def nbytes(self) -> int:
        return sum(path.nbytes for path in self.paths.values())

    @property
    def verified(self) -> int:
        return sum(path.verified for path in self.paths.values())

    @property
    def frames_per_second(self) -> float:
        return self.sent / self.seconds if self.seconds else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "frames": self.sent,
            "seconds": self.seconds,
            "frames_per_second": self.frames_per_second,
            "gb_per_second": self.gigabytes_per_second,
            "bytes": self.nbytes,
            "verified_bytes": self.verified,
            "lost": self.lost,
            "damaged": self.damaged,
            "paths": {
                name: {
                    "messages": path.messages,
                    "bytes": path.nbytes,
                    "verified_bytes": path.verified,
                    "gb_per_second": path.nbytes / self.seconds / 1e9 if self.seconds else 0.0,
                    "p50_ms": path.percentile(50),
                    "p90_ms": path.percentile(90),
                    "p99_ms": path.percentile(99),
                }
                for name, path in self.paths.items()
            },
        }


def ratios(ours: Tally, rival: Tally) -> dict[str, float]:
    """How many times faster, and how many times sooner, than a rival."""

    def over(a: float, b: float) -> float:
        return a / b if b else 0.0

    return {
        "frames_per_second": over(ours.frames_per_second, rival.frames_per_second),
        **{
            f"{name.replace(' ', '_').replace('-', '_')}_p50": over(
                rival.paths[name].percentile(50), ours.paths[name].percentile(50)
            )
            for name in PATHS
        },
    }
