"""The run: which ranks save together, and the outcomes of their checkpoints.

`.shmtensor.run` is a JSON document that is replaced as a whole, by the process that holds byte 2 of the lock file:

| key | value |
|---|---|
| `run` | number of the run, larger than that of any before |
| `world_size` | how many ranks it has |
| `writers` | per rank that has opened its `CheckpointWriter` the id of that writer |
| `begun` | the ranks that have begun a save |
| `outcomes` | the last decisions: `[run, key, name, reason]`, name "" where the checkpoint was given up |

A run begins with the first rank that opens a writer while no trainer of the run before is alive. Other ranks can join
as long as all that have joined are alive. So a checkpoint never mixes parts of two starts of the training. (A rank that
has gone before its first save counts as not joined.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import ResourceError
from ..memory.locks import LockFile
from . import index
from .directory import Directory, remove
from .locations import read_regular

RUN: Final = ".shmtensor.run"
MAX_RUN: Final = 1 << 45
"""A run's number is the time of its beginning in milliseconds, so that no number is repeated if the file is lost."""

_TRAINER, _WRITER, _MUTEX = 0, 1, 2
_TRAINERS: Final = 1 << 17
"""Byte of rank 0's trainer in the lock file; each further rank has the next byte."""
_WRITERS: Final = 1 << 17
"""Byte of the writing process of rank 0 of run n: `(n + 1) * _WRITERS`, above those of the trainers."""
_OUTCOMES: Final = 256
_VERSION: Final = 1
_PATIENCE: Final = 60.0
"""Seconds to wait for the mutex, which is held while old checkpoints are deleted."""
_OPENING: Final = 10.0
"""Seconds that a rank waits for the trainers of the run before to end."""
_PAUSE: Final = 0.02


@dataclass(frozen=True)
class Outcome:
    """A decision: the name of the checkpoint, or "" and the reason why there is none."""

    run: int
    key: str
    name: str
    reason: str


@dataclass(frozen=True)
class Run:
    """The contents of the file."""

    number: int
    world_size: int
    writers: dict[int, str]
    begun: frozenset[int] = frozenset()
    outcomes: tuple[Outcome, ...] = ()

    def outcome(self, run: int, key: str) -> Outcome | None:
        """The decision about one checkpoint of a run, or None."""
        return next((each for each in reversed(self.outcomes) if (each.run, each.key) == (run, key)), None)

    def decided(self, outcome: Outcome) -> Run:
        """The run with one more decision, which replaces an earlier one about the same checkpoint."""
        others = [each for each in self.outcomes if (each.run, each.key) != (outcome.run, outcome.key)]
        return replace(self, outcomes=(*others, outcome)[-_OUTCOMES:])


def read(directory: str) -> Run | None:
    """The file's contents, None if there is none. `OSError` if it cannot be read."""
    try:
        found = json.loads(read_regular(Path(directory, RUN), index.MAX_LIST))
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r:.40}")
        run = Run(
            found["run"], found["world_size"], {int(rank): writer for rank, writer in found["writers"].items()},
            frozenset(found["begun"]), tuple(Outcome(*each) for each in found["outcomes"]),
        )  # fmt: skip
        numbers = [run.number, run.world_size, *run.writers, *run.begun, *(each.run for each in run.outcomes)]
        texts = [*run.writers.values(), *(text for each in run.outcomes for text in (each.key, each.name, each.reason))]
        if not all(type(n) is int and 0 <= n < MAX_RUN for n in numbers) or not all(type(t) is str for t in texts):
            raise ValueError("it has other types")
        if not all(
            index.is_file_name(each.key) and (not each.name or index.is_file_name(each.name)) for each in run.outcomes
        ):
            raise ValueError("it has other names")
        return run
    except FileNotFoundError:
        return None
    except index.UNREADABLE as error:
        if isinstance(error, OSError):
            raise
        raise OSError(errno.EIO, f"{os.path.join(directory, RUN)} is damaged: {error}: remove it") from None


def write(directory: str, run: Run) -> None:
    """Replace the file, durably. Needs the mutex. Raises OSError."""
    document = {
        "version": _VERSION, "run": run.number, "world_size": run.world_size,
        "writers": {str(rank): writer for rank, writer in sorted(run.writers.items())},
        "begun": sorted(run.begun),
        "outcomes": [[each.run, each.key, each.name, each.reason] for each in run.outcomes],
    }  # fmt: skip
    index.replace(os.path.join(directory, RUN), json.dumps(document).encode())


class RankDirectory(Directory):
    """An open directory of checkpoints, of one rank's trainer or writing process.

    Locks, besides those of `Directory`, whose two bytes the ranks share:

        2                   the mutex: to change the run, decide about a checkpoint or delete one
        131072 + r          the trainer of rank r
        (n+1)*131072 + r    the writing process of rank r in run n
    """

    def __init__(self, path: str, rank: int, world_size: int, writer: str, run: int = 0) -> None:
        super().__init__(path)
        self.rank, self.world_size, self.writer, self.run = rank, world_size, writer, run

    # --- the trainer

    def _own(self, locks: LockFile, is_abandoned: Callable[[], bool]) -> None:
        if not locks.try_shared(_TRAINER):
            raise ResourceError(
                errno.EBUSY,
                f"a CheckpointWriter without rank= is open on {self.path}: close it, or use another directory",
            )
        deadline = time.monotonic() + _OPENING
        while (others := self._join(locks)) is not None:
            if time.monotonic() >= deadline or is_abandoned():
                raise ResourceError(
                    errno.EBUSY,
                    f"rank {self.rank} of {self.world_size} cannot join the run on {self.path}: {others}. All ranks "
                    "open their CheckpointWriter anew when one of them does: close the others, or end their processes",
                )
            time.sleep(_PAUSE)

    def _join(self, locks: LockFile) -> str | None:
        """Join the run or begin one; returns why neither is possible now, or None. Raises `ResourceError`."""
        try:
            return self._join_now(locks)
        except ResourceError:
            raise
        except OSError as error:
            raise ResourceError(error.errno, f"the run on {self.path}: {error.strerror or error}") from None

    def _join_now(self, locks: LockFile) -> str | None:
        locks.wait_exclusive(_MUTEX, _PATIENCE, f"the run of {self.path}")
        joined = False
        try:
            if not locks.try_exclusive(_TRAINERS + self.rank):
                raise ResourceError(
                    errno.EBUSY, f"another CheckpointWriter of rank {self.rank} is open on {self.path}: close it first"
                )
            found = read(self.path)
            members, alive = self._members(locks, found)
            joins = found is not None and found.world_size == self.world_size and self.rank not in members
            if found is not None and joins and len(alive) == len(members):
                write(self.path, replace(found, writers={**members, self.rank: self.writer}))
                self.run = found.number
                joined = True
                return None
            if alive and found is not None:
                return (
                    f"ranks {some(alive)} of a run of {found.world_size} ranks are open, "
                    f"{'which this rank had joined before' if self.rank in members else 'and others of it not'}"
                )
            number = max(time.time_ns() // 1_000_000, 1 if found is None else found.number + 1)
            # crash: run.begun
            write(
                self.path,
                Run(
                    number, self.world_size, {self.rank: self.writer},
                    outcomes=found.outcomes if found is not None else (),
                ),
            )  # fmt: skip
            self.run = number
            joined = True
            return None
        finally:
            if not joined:  # who waits is not alive: else two who wait for each other's end would wait in vain
                locks.unlock(_TRAINERS + self.rank)
            locks.unlock(_MUTEX)

    def _members(self, locks: LockFile, found: Run | None) -> tuple[dict[int, str], list[int]]:
        """The writers of a run by rank, and which of these ranks are alive, without our own; without writers that have
        gone before their first save."""
        if found is None:
            return {}, []
        alive = [rank for rank in found.writers if rank != self.rank and self._has_trainer(locks, rank)]
        there = found.begun.union(alive)
        return {rank: writer for rank, writer in found.writers.items() if rank in there}, alive

    def begin(self) -> None:
        """Note the trainer's first save: from now on this rank belongs to the run for good. Raises `ResourceError`."""
        if self._locks is None:
            return
        with self.deciding(_PATIENCE) as mine:
            try:
                found = read(self.path) if mine else None
                if found is None or (found.number, found.writers.get(self.rank)) != (self.run, self.writer):
                    raise OSError(errno.EBUSY, "this writer is not one of it any more: all ranks open new ones")
                write(self.path, replace(found, begun=found.begun | {self.rank}))
            except OSError as error:
                raise ResourceError(error.errno, f"the run on {self.path}: {error.strerror or error}") from None

    # --- the writing process

    def _try_write(self, locks: LockFile) -> bool:
        return locks.try_shared(_WRITER) and locks.try_exclusive((self.run + 1) * _WRITERS + self.rank)

    def sweep(self, writer: str, is_over: Callable[[int], bool]) -> None:
        """Remove temporary files of this writer's ended saves. `Votes.finish_older_runs` removes those of others."""
        for path, owner, number in list(self.leftovers()):
            if owner == writer and is_over(number):
                with contextlib.suppress(OSError):
                    remove(path)

    @contextlib.contextmanager
    def deciding(self, patience: float = 0.0) -> Iterator[bool]:
        """Acquire the mutex within `patience` seconds; yields whether it is held."""
        locks = self._locks
        deadline = time.monotonic() + patience
        while not (mine := locks is not None and locks.try_exclusive(_MUTEX)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        try:
            yield mine
        finally:
            if mine and locks is not None:
                locks.unlock(_MUTEX)

    def is_alive(self, rank: int, run: Run) -> bool:
        """Whether a rank of our run has a trainer or a writing process. In this order: trainers start processes."""
        locks = self._locks
        if locks is None or rank == self.rank:
            return True
        if run.number == self.run and rank in run.writers and self._has_trainer(locks, rank):
            return True
        return locks.held_by_other((self.run + 1) * _WRITERS + rank)

    def has_older_writers(self) -> bool:
        """Whether a writing process of an earlier run is still at work."""
        locks = self._locks
        return self.run > 1 and locks is not None and locks.held_by_other(2 * _WRITERS, (self.run - 1) * _WRITERS)

    @staticmethod
    def _has_trainer(locks: LockFile, rank: int) -> bool:
        return locks.held_by_other(_TRAINERS + rank)


def some(ranks: list[int]) -> str:
    """The first ranks of a list, for messages."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
