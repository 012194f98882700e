"""How long a wait spins before it sleeps: the one policy of receivers, senders, clients and queues.

On a single processor it does not spin. How many there are is the affinity, and the CPU quotas of the control groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import ArgumentError, ArgumentTypeError
from ..memory.control_groups import GROUPS, OWN, groups_of, read_text


def usable_processors() -> int:
    """How many processors the calling thread may use at the same time, at least 1.

    That is the smaller of its affinity and, rounded down, the quota of the process's control group and its parents.
    """
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed == 1 else max(1, int(min(allowed, processor_quota())))


def processor_quota(own: Path = OWN, groups: Path = GROUPS) -> float:
    """Seconds of processor time that the control groups grant per second; infinity if there is no known limit."""
    return min((_quota(version, group) for version, group in groups_of("cpu", own, groups)), default=float("inf"))


def _quota(version: int, group: Path) -> float:
    try:
        if version == 2:
            limit, period = read_text(group / "cpu.max").split()[:2]
        else:
            limit, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        return float("inf") if limit == "max" or int(limit) < 0 else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


BURST_NS: Final = 20_000
"""Nanoseconds that the compiled module may poll for a message or a slot without letting other threads run."""

DEFAULT_S: Final = 100e-6
"""Seconds that a wait spins by default."""

LONG_YIELD_S: Final = 500e-6
"""If a yield takes longer than this, another process needs the processor, and sleeping costs less than spinning."""

MOST_SKIPPED: Final = 64
"""The most waits in a row that sleep at once after unproductive spins."""

LOOK_S: Final = 1.0
"""Seconds after which the number of usable processors is determined again."""

_T = TypeVar("_T")


class Spin:
    """Whether and how long one waiter spins.

    - On a single processor, by affinity or quota, there is no spin: a waiter yields once and polls again.
    - A spin polls in bursts and yields the processor between two of them. If a yield takes long, another process needs
      the processor: the spin ends as unproductive, since a sleeper that is woken gets the processor sooner.
    - If what is waited for is there right after a yield, the next spin begins with one: the other side needs this
      processor.
    - After two unproductive spins in a row the next wait sleeps at once; after each further one twice as many do, up
      to `MOST_SKIPPED`. A productive spin ends that.

    Args:
        seconds: how long a wait spins at most; 0: never. What a user has passed as `spin=` is checked here.
        clock, processors, give_way: time, the number of usable processors, and how one is yielded; for tests.
    """

    __slots__ = (
        "_alone",
        "_clock",
        "_due",
        "_give_way",
        "_gives_way_first",
        "_limit_ns",
        "_processors",
        "_seconds",
        "_skips",
        "_unproductive",
        "burst_ns",
    )

    burst_ns: int
    """Nanoseconds that a caller may poll before it calls `wait`; 0 unless the last spin was productive."""

    def __init__(
        self,
        seconds: float = DEFAULT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        processors: Callable[[], int] = usable_processors,
        give_way: Callable[[], Any] = os.sched_yield,
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise ArgumentTypeError(f"spin is in seconds (int or float), not {type(seconds).__name__}")
        if not 0 <= seconds <= 3600:
            raise ArgumentError(f"spin must be between 0 and 3600 seconds, not {seconds!r}")
        self._seconds, self._clock, self._processors, self._give_way = seconds, clock, processors, give_way
        self._unproductive = self._skips = 0
        self._gives_way_first = False  # the last spin found something as soon as it had yielded
        self._limit_ns = min(int(seconds * 1e9), BURST_NS)
        self._count_processors()

    def _count_processors(self) -> None:
        """Determine how many processors there are now."""
        self._alone = not self._seconds or self._processors() == 1
        self._due = self._clock() + LOOK_S
        self._set_burst()

    def wait(self, look: Callable[[int], _T | None], most: float | None = None) -> _T | None:
        """Spin as the policy says, for at most `most` seconds.

        Args:
            look: returns what is waited for, or None; its argument is how many nanoseconds it may poll for.

        Returns:
            What `look` found, or None: then the caller sleeps.
        """
        clock = self._clock
        start = clock()
        if start >= self._due:
            self._count_processors()
        if (most is not None and most <= 0) or not self._seconds:
            return None
        if self._skips:
            self._skips -= 1
            return None
        if self._alone:
            self._give_way()
            found = look(0)
            self._note(found is not None)
            return found
        return self._spin(look, start + (self._seconds if most is None else min(most, self._seconds)))

    def _spin(self, look: Callable[[int], _T | None], until: float) -> _T | None:
        clock, give_way = self._clock, self._give_way
        found = None if self._gives_way_first else look(self._limit_ns)
        while found is None and (before := clock()) < until:
            give_way()
            if clock() - before > LONG_YIELD_S:
                self._note(False)
                return look(0)
            found = look(0)
            self._gives_way_first = found is not None
            if found is None:
                found = look(self._limit_ns)
        self._note(found is not None)
        return found

    def _note(self, productive: bool) -> None:
        if productive:
            self._unproductive = 0
        else:
            self._unproductive += 1
            self._skips = min(1 << self._unproductive - 2, MOST_SKIPPED) if self._unproductive > 1 else 0
        self._set_burst()

    def _set_burst(self) -> None:
        self.burst_ns = 0 if self._alone or self._unproductive or self._gives_way_first else self._limit_ns
