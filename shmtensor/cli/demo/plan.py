"""What every process of a demo must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

CORRUPT: Final = "SHMTENSOR_DEMO_CORRUPT"
"""Environment variable for the tests: the named role (`worker`, `subscriber`, `main`) gets its third checksum wrong."""


@dataclass(frozen=True)
class Plan:
    """The shape of a run. Travels to every process."""

    run: str
    """First part of every channel name."""
    workers: int
    subscribers: int
    source: str | None
    """Path of the user's files; None: the images that ship with scikit-image."""
    slots: int
    """Messages that may be under way on each path: slots of a ring, `maxsize` of a queue."""


@dataclass(frozen=True)
class Lines:
    """The rivals' queues, made once by the main process and inherited by the others."""

    jobs: Any
    results: Any
    fans: tuple[Any, ...]

    def all(self) -> tuple[Any, ...]:
        return (self.jobs, self.results, *self.fans)
