"""Ranks that save together: their run, and how they make one checkpoint of their parts, or none if a part is missing.

A run begins with the first rank that opens a writer while no trainer of the run before is alive. Other ranks can join
as long as all that have joined are alive. So a checkpoint never mixes parts of two starts of the training. (A rank that
has gone before its first save counts as not joined.)

At first a checkpoint is a hidden directory, `.<key>.<run>.ranks`, to which each rank's writing process adds a file
`rank-00003.vote` and then, by a rename, its part. Both are durable before any process counts them. The process that
finds all parts there decides, alone, because it holds the mutex of the run:

    vote, part ...  all parts  -> manifest -> outcome in `.shmtensor.run` -> list of saves -> rename -> `latest`
    no part of a rank that is dead, or that has failed  -> outcome "given up" in `.shmtensor.run` -> removed

Before the manifest comes `.metadata` for DCP's own reader, if the parts are those of `shmtensor.dcp`.

The outcome is the decision. It is one atomic replacement of a file: before it the checkpoint can be given up, after it
any process may repeat the steps that follow. docs/internals/checkpoint-protocol.md has the states and the deaths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CheckpointError, ResourceError
from ..memory.locks import LockFile
from . import index, manifest
from .description import combine, digest, text
from .directory import Directory, Keep, highest_number, remove, sync, target
from .formats import distcp
from .index import LATEST, PENDING, Saved
from .manifest import MANIFEST, Manifest, Part, part_name
from .run_record import (
    MAX_RUN,
    RUN,
    Outcome,
    Run,
    Vote,
    VoteFiles,
    is_part,
    read,
    read_vote,
    upload_mark,
    vote_name,
    write,
    write_vote,
)

_TRAINER, _WRITER, _MUTEX, _COMPLETING = 0, 1, 2, 3
_TRAINERS: Final = 1 << 17
"""Byte of rank 0's trainer in the lock file; each further rank has the next byte."""
_WRITERS: Final = 1 << 17
"""Byte of the writing process of rank 0 of run n: `(n + 1) * _WRITERS`, above those of the trainers."""
_PATIENCE: Final = 60.0
"""Seconds to wait for the mutex, which is held while old checkpoints are deleted."""
_OPENING: Final = 10.0
"""Seconds that a rank waits for the trainers of the run before to end."""
_PAUSE: Final = 0.02


class RankDirectory(Directory):
    """An open directory of checkpoints, of one rank's trainer or writing process.

    Locks, besides those of `Directory`, whose two bytes the ranks share:

        2                   the mutex: to change the run, decide about a checkpoint or delete one
        3                   the right to complete a checkpoint at the URL of `upload=`
        131072 + r          the trainer of rank r
        (n+1)*131072 + r    the writing process of rank r in run n
    """

    def __init__(self, path: str, rank: int, world_size: int, writer: str, run: int = 0) -> None:
        super().__init__(path)
        self.rank, self.world_size, self.writer, self.run = rank, world_size, writer, run
        self.has_ended = False

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
                reason = "and others of it are gone"
                if found.world_size != self.world_size:
                    reason = f"and this one has world_size={self.world_size}"
                elif self.rank in members:
                    reason = "which this rank had joined before"
                return f"a run of {found.world_size} ranks is open (by {some(alive)}), {reason}"
            number = max(time.time_ns() // 1_000_000, 1 if found is None else found.number + 1)
            # crash: run.begun
            write(
                self.path,
                Run(
                    number, self.world_size, {self.rank: self.writer},
                    outcomes=found.outcomes if found is not None else (),
                    uploaded=found.uploaded if found is not None else (),
                    ended=found.ended if found is not None else frozenset(),
                ),
            )  # fmt: skip
            self.run = number
            joined = True
            return None
        finally:
            if not joined:  # a waiting rank must not count as alive: two would wait for each other for ever
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
        """Note the trainer's first save, or that it goes on after `end`: from now on this rank belongs to the run for
        good. Raises `ResourceError`."""
        if self._locks is None:
            return
        with self.deciding(_PATIENCE) as mine:
            try:
                found = read(self.path) if mine else None
                if found is None or (found.number, found.writers.get(self.rank)) != (self.run, self.writer):
                    raise OSError(errno.EBUSY, "this writer is not one of it any more: all ranks open new ones")
                write(
                    self.path,
                    replace(found, begun=found.begun | {self.rank}, ended=found.ended - {(self.run, self.rank)}),
                )
                self.has_ended = False
            except OSError as error:
                raise ResourceError(error.errno, f"the run on {self.path}: {error.strerror or error}") from None

    def end(self) -> None:
        """Record that every part of this rank is there, and no further one will come, since its trainer closes or is
        dead. So other ranks need not wait. Raises OSError."""
        with self.deciding(_DECIDING) as mine:
            found = read(self.path) if mine else None
            if found is not None:  # perhaps that of the next run, which waits for this one
                write(self.path, replace(found, ended=found.ended | {(self.run, self.rank)}))
                # crash: ranks.ended
                self.has_ended = True

    def record_uploaded(self, saved: Saved) -> None:
        """As for one process. First in the run, from which the other ranks learn it when it is deleted by then."""
        found = read(self.path)
        if found is not None:
            write(self.path, found.with_upload(saved))
        # crash: upload.noted
        super().record_uploaded(saved)

    def is_uploaded(self, saved: Saved) -> bool:
        """Whether a rank has noted that it is uploaded."""
        found = read(self.path)
        return found is not None and upload_mark(saved) in found.uploaded

    def was_uploaded(self, name: str) -> bool:
        """The same of a checkpoint of this run, by its name."""
        found, run = read(self.path), f"{self.run:016x}"
        return found is not None and any(each[:2] == (run, name) for each in found.uploaded)

    # --- the writing process

    def _try_write(self, locks: LockFile) -> bool:
        return locks.try_shared(_WRITER) and locks.try_exclusive((self.run + 1) * _WRITERS + self.rank)

    def sweep(self, writer: str, is_over: Callable[[int], bool]) -> None:
        """Remove temporary files of this writer's ended saves. `Votes.finish_older_runs` removes those of others."""
        for path, (_, owner, number), _ in list(self.leftovers()):
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

    def older_writers(self) -> str:
        """Which processes these are, for messages; "" if there are none, or they cannot be found."""
        return self._holders(2 * _WRITERS, (self.run + 1) * _WRITERS) if self.has_older_writers() else ""

    def try_complete(self) -> bool:
        """Get the right to complete a checkpoint at the URL."""
        locks = self._locks
        return locks is not None and locks.try_exclusive(_COMPLETING)

    def end_complete(self) -> None:
        """Give the right back."""
        if self._locks is not None:
            self._locks.unlock(_COMPLETING)

    @property
    def has_own_trainer(self) -> bool:
        """For the writing process: whether this rank's trainer has the directory open."""
        return self._locks is not None and self._has_trainer(self._locks, self.rank)

    @property
    def has_trainer(self) -> bool:
        """For the writing process: whether this rank's trainer has the directory open, or those of another run, or one
        that saves alone: its writing process waits for the end of ours."""
        locks = self._locks
        if locks is None:
            return False
        if self._has_trainer(locks, self.rank):
            return True
        try:
            found = read(self.path)
        except OSError:  # damaged: whoever comes next has to look at it
            return True
        if found is None or found.number != self.run:
            return True
        return locks.held_by_other(_TRAINER) and not locks.held_by_other(_TRAINERS, self.world_size)

    @staticmethod
    def _has_trainer(locks: LockFile, rank: int) -> bool:
        return locks.held_by_other(_TRAINERS + rank)


def some(ranks: Iterable[int]) -> str:
    """The first of these ranks, for messages."""
    found = sorted(ranks)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found[:8]))}{more}"


def by_state(missing: dict[int, str], instead: dict[int, str]) -> str:
    """Ranks whose parts are missing by the state of each, and what they have saved instead, for messages."""
    states = sorted(set(missing.values()))
    texts = [f"{state}: {some(rank for rank in missing if missing[rank] == state)}" for state in states]
    return "; ".join(texts + [f"rank {rank} saved {name}" for rank, name in sorted(instead.items())[:8]])


_PENDING: Final = re.compile(r"\.(?P<key>[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199})\.(?P<run>[0-9a-f]{16})\.ranks")
_DEAD: Final = 3.0
"""Seconds for which a rank must look dead: a writing process that is starting holds no lock yet."""
_DECIDING: Final = 10.0
NOT_OPEN: Final = "not open"
LATE: Final = "late"
DEAD: Final = "dead"
CLOSED: Final = "closed"


class Waiting(NamedTuple):
    """The state of a checkpoint that is not decided yet.

    missing: the ranks whose parts are missing, with the state of each; empty if processes of an earlier run have
             something to finish, or another process decides
    instead: checkpoints of which such ranks have parts, by rank
    """

    missing: dict[int, str]
    instead: dict[int, str]


class Votes:
    """The votes of one rank's writing process. keep: which checkpoints stay"""

    def __init__(self, directory: RankDirectory, keep: Keep) -> None:
        self._directory, self._keep = directory, keep
        self._dead: dict[int, float] = {}  # when each rank was first found dead
        self.refused: dict[str, str] = {}
        """What is to be given up, with the reason: there was no room to write it."""
        self._files = VoteFiles()
        self.deleted: list[str] = []
        """Names of old checkpoints that were deleted."""
        self.undeleted: list[str] = []
        self.unlinked = ""

    # --- a rank's own part

    def outcome(self, key: str) -> Outcome | None:
        """The decision about a checkpoint. Raises OSError."""
        found = read(self._directory.path)
        return None if found is None else found.outcome(self._directory.run, key)

    def pending(self, key: str, number: int | None = None) -> str:
        """The hidden directory of a checkpoint that is not decided."""
        return self._directory.at(f".{key}.{self._directory.run if number is None else number:016x}.ranks")

    def find(self, key: str) -> Vote | None:
        """This rank's vote, if there is one already."""
        return read_vote(self.pending(key), self._directory.rank)

    def prepare(self, key: str, vote: Vote) -> None:
        """Write the vote, before `add` adds the part. Raises OSError."""
        pending = self.pending(key)
        with contextlib.suppress(FileExistsError):
            os.mkdir(pending)
            sync(self._directory.path)
        # crash: vote.begun
        write_vote(pending, vote)
        # crash: vote.written

    def add(self, key: str, vote: Vote, path: str) -> None:
        """Add the part, which counts from then on. May be repeated. Raises OSError."""
        pending = self.pending(key)
        if not is_part(pending, vote):
            os.rename(path, os.path.join(pending, vote.file))
        # crash: vote.added
        sync(pending)
        # crash: vote.durable

    def refuse(self, key: str, reason: str, patience: float = 0.0) -> Outcome | None:
        """Give the checkpoint up, because this rank's part will not come. Returns the outcome, which may differ, or
        None if other processes hold the mutex for longer than `patience`.

        This rank's part is removed first, so that no process can commit the checkpoint, and there is room for the
        outcome. If that still cannot be written, `refuse_again` does it later. OSError: neither is done.
        """
        with self._directory.deciding(patience) as mine:
            return self._refuse(key, f"rank {self._directory.rank}: {reason}") if mine else None

    def refuse_again(self) -> None:
        """Write what could not be written before, if possible now."""
        for key, reason in list(self.refused.items()):
            with contextlib.suppress(OSError), self._directory.deciding() as mine:
                if mine:
                    self._refuse(key, reason)

    def refuse_later(self, key: str, reason: str) -> None:
        """Leave it to `refuse_again` to give the checkpoint up."""
        self.refused.setdefault(key, f"rank {self._directory.rank}: {reason}")

    def _refuse(self, key: str, reason: str) -> Outcome:
        number = self._directory.run
        try:
            record = self._record()
            outcome = record.outcome(number, key)
            if outcome is None:
                self._take_back(key)
                # crash: refuse.taken
                outcome = self._give_up(record, number, key, reason)
            else:
                outcome = self._complete(outcome)
        except OSError:
            if not self._take_back(key):
                raise
            self.refused[key] = reason
            return Outcome(number, key, "", reason)
        self.refused.pop(key, None)
        return outcome

    def _take_back(self, key: str) -> bool:
        """Remove this rank's part of a checkpoint that has not got its name; False if there is no such checkpoint. The
        vote stays: it tells a process that is started again that there was one."""
        pending = self.pending(key)
        try:
            names = os.listdir(pending)
        except FileNotFoundError:
            return False
        for name in names:
            if name.startswith(part_name(self._directory.rank, ".")) and name != vote_name(self._directory.rank):
                os.unlink(os.path.join(pending, name))
        return True

    # --- the decision

    def poll(self, key: str, *, alone: bool) -> Outcome | Waiting:
        """The outcome, decided here if possible, or the ranks that are missing. Raises OSError.

        alone: this rank's trainer is gone, so that no further rank can join the run
        """
        record = self._record()
        if record.outcome(self._directory.run, key) is None and os.path.isdir(self.pending(key)):
            missing = self._missing(record, key)
            others = self._others(record, key) if missing else {}
            if missing and not self._is_hopeless(missing, alone=alone) and self._left_out(key, others) is None:
                return Waiting(missing, _instead(others, missing))
        with self._directory.deciding() as mine:
            return self._decide(key, alone=alone) if mine else Waiting({}, {})

    def finish_older_runs(self) -> bool:
        """Finish or remove what earlier runs have left; False while a process of theirs is at work, or another process
        holds the mutex. Raises OSError."""
        with self._directory.deciding() as mine:
            return mine and self._finish_older_runs()

    def older_writers(self) -> str:
        """The processes of earlier runs that keep `finish_older_runs` from it, for messages."""
        return self._directory.older_writers()

    def _record(self) -> Run:
        record = read(self._directory.path)
        if record is None:
            raise FileNotFoundError(2, f"{self._directory.at(RUN)} is gone: somebody removed it")
        return record

    def _missing(self, record: Run, key: str) -> dict[int, str]:
        """The ranks whose parts are missing, with the state of each."""
        there = self._files.read(self.pending(key))
        missing = {}
        for rank in range(self._directory.world_size):
            if rank in there:
                continue
            if (self._directory.run, rank) in record.ended:  # which was read before the parts
                missing[rank] = CLOSED
            elif self._directory.is_alive(rank, record):
                missing[rank] = LATE
            elif record.number == self._directory.run and rank not in record.writers:
                missing[rank] = NOT_OPEN
            else:
                missing[rank] = DEAD
        return missing

    def _is_hopeless(self, missing: dict[int, str], *, alone: bool) -> bool:
        """Whether a part will never come."""
        now = time.monotonic()
        self._dead = {rank: self._dead.get(rank, now) for rank, state in missing.items() if state == DEAD}
        gone = any(now - since >= _DEAD for since in self._dead.values())
        return gone or CLOSED in missing.values() or (alone and NOT_OPEN in missing.values())

    def _decide(self, key: str, *, alone: bool) -> Outcome | Waiting:
        """Decide, if possible, and carry it out. Needs the mutex, as all methods below."""
        record, number = self._record(), self._directory.run
        outcome = record.outcome(number, key)
        if outcome is None:
            if not os.path.isdir(self.pending(key)):
                return Outcome(number, key, "", f"{self.pending(key)} is gone: somebody removed it")
            while (found := self._left_out(key, self._others(record, key))) is not None:
                outcome = self._give_up(record, number, *found)
                if outcome.key == key:
                    return outcome
                record = self._record()
            missing = self._missing(record, key)
            if missing:
                if not self._is_hopeless(missing, alone=alone):
                    return Waiting(missing, {})
                gone = {rank: state for rank, state in missing.items() if state != LATE}
                reason = f"the parts of {len(gone)} of {self._directory.world_size} ranks will never come"
                return self._give_up(
                    record, number, key, f"{reason} ({by_state(gone, _instead(self._others(record, key), gone))})"
                )
            if not self._finish_older_runs():
                return Waiting({}, {})
            votes = self._files.read(self.pending(key))
            self._decide_older(key, votes)
            outcome = self._commit(self._record(), number, key, votes)
        elif outcome.name:
            return self._complete(outcome)
        else:
            self._remove(self.pending(key))
        return outcome

    def _others(self, record: Run, key: str) -> dict[str, dict[int, Vote]]:
        """The votes of every other checkpoint of the run that is not decided."""
        return {
            other: self._files.read(path)
            for path, other, run in self._all_pending()
            if run == self._directory.run and other != key and record.outcome(run, other) is None
        }

    def _left_out(self, key: str, others: dict[str, dict[int, Vote]]) -> tuple[str, str] | None:
        """A checkpoint that some rank has left out, this one or another, and the reason to give it up; None if all
        ranks may still save the same in the same order. key: the oldest in which this rank's part waits for others.

        A rank's parts come in its order: one that is missing here when a later one is there never comes. Which of the
        two is later, a rank shows that has parts of both. The others were listed first: parts may come meanwhile, and
        what is here by then was not left out.
        """
        me = self._directory.rank
        here = self._files.read(self.pending(key)) if others else {}
        if me not in here:
            return None
        for other, there in others.items():
            ahead = there.keys() - here.keys()
            order = [there[rank].number - here[rank].number for rank in there.keys() & here.keys()]
            if me not in there and min(order, default=0) < 0:
                return other, _why({me}, other, key)
            if ahead and max(order, default=0) > 0:
                return key, _why(ahead, key, other)
        return None

    def _decide_older(self, key: str, votes: dict[int, Vote]) -> None:
        """Carry out what is decided about checkpoints that a rank voted on before this one, and commit those whose
        parts are all there: `latest` never goes back."""
        older = []
        for pending, other, number in self._all_pending():
            there = self._files.read(pending)
            is_older = any(vote.number < votes[rank].number for rank, vote in there.items() if rank in votes)
            if number == self._directory.run and other != key and is_older:
                older.append((min(vote.number for vote in there.values()), other, there))
        for _, other, there in sorted(older, key=lambda each: each[:2]):
            record = self._record()
            outcome = record.outcome(self._directory.run, other)
            if outcome is not None:
                self._complete(outcome)
            elif len(there) == self._directory.world_size:
                self._commit(record, self._directory.run, other, there)

    def _finish_older_runs(self) -> bool:
        """Finish complete, undecided checkpoints of earlier runs; remove their other parts and temporary files."""
        directory = self._directory
        if directory.has_older_writers():
            return False
        for pending, key, number in sorted(self._all_pending(), key=lambda each: each[2]):
            if number >= directory.run:
                continue
            # crash: finish.older
            record, votes = self._record(), self._files.read(pending)
            outcome = record.outcome(number, key)
            if outcome is not None:
                self._complete(outcome)
            elif votes and all(vote.world_size == len(votes) for vote in votes.values()):
                self._commit(record, number, key, votes)
            else:
                self._remove(pending)
        record = self._record()
        if any(run < directory.run for run, _ in record.ended):  # whom nobody waits for any more
            record = replace(record, ended=frozenset(each for each in record.ended if each[0] >= directory.run))
            write(directory.path, record)
        if record.number <= directory.run:  # no later run has begun: a writer that is not in it is gone
            for path, (_, owner, _), _ in list(directory.leftovers()):
                if owner not in (directory.writer, *record.writers.values()):
                    with contextlib.suppress(OSError):
                        remove(path)
        return True

    def _all_pending(self) -> Iterator[tuple[str, str, int]]:
        """(path, key, run) of every hidden directory of a checkpoint."""
        matches = list(filter(None, map(_PENDING.fullmatch, os.listdir(self._directory.path))))
        there = {self._directory.at(match[0]): match for match in matches}
        self._files.forget_others(there)
        for path, match in there.items():
            yield path, match["key"], int(match["run"], 16)

    def _give_up(self, record: Run, number: int, key: str, reason: str) -> Outcome:
        outcome = Outcome(number, key, "", reason)
        # crash: giveup.before
        write(self._directory.path, record.decided(outcome))
        # crash: giveup.decided
        self._remove(self.pending(key, number))
        return outcome

    def _remove(self, pending: str) -> None:
        with contextlib.suppress(OSError):  # a part that was added just now is removed when its rank checks
            remove(pending)

    def _commit(self, record: Run, number: int, key: str, votes: dict[int, Vote]) -> Outcome:
        """Decide that a checkpoint whose parts are all there is made, and carry it out."""
        pending, first = self.pending(key, number), votes[0]
        name = self._free_name(key, first)
        if not name:
            return self._give_up(record, number, key, f"{self._directory.at(key)} exists: somebody made it meanwhile")
        others = sorted(rank for rank, vote in votes.items() if vote.upload != first.upload)
        if others:
            reason = f"upload= is not the same on all ranks: that of rank 0 is another one than that of {some(others)}"
            return self._give_up(record, number, key, reason)
        parts = tuple(Part(vote.file, vote.nbytes, vote.digest) for _, vote in sorted(votes.items()))
        alias = next((vote.alias for _, vote in sorted(votes.items()) if vote.alias), "")
        metrics = {
            name: value for _, vote in sorted(votes.items(), reverse=True) for name, value in vote.metrics.items()
        }
        # crash: ranks.counted
        try:
            more = self._write_metadata(pending, [part.file for part in parts])
        except CheckpointError as error:
            return self._give_up(record, number, key, f"its parts do not fit together: {error}")
        # crash: ranks.metadata
        made = Manifest(first.step, dict(list(metrics.items())[: index.MAX_METRICS]), alias, parts, more)
        index.replace(os.path.join(pending, MANIFEST), made.render())
        sync(pending)
        # crash: ranks.manifest
        outcome = Outcome(number, key, name, "")
        write(self._directory.path, record.decided(outcome))
        sync(self._directory.path)
        # crash: ranks.decided
        return self._complete(outcome)

    @staticmethod
    def _write_metadata(pending: str, parts: list[str]) -> tuple[Part, ...]:
        """Write `.metadata` for DCP's own reader, if the parts are for it."""
        data = distcp.metadata_of(pending, parts)
        if data is None:
            return ()
        index.replace(os.path.join(pending, distcp.METADATA), data)
        return (Part(distcp.METADATA, len(data), text(digest(data))),)

    def _free_name(self, key: str, vote: Vote) -> str:
        directory = self._directory
        if not directory.is_taken(key):
            return key
        if vote.fixed:
            return ""
        if key.startswith("save-"):
            return f"save-{highest_number(directory.names(), 'save-') + 1:08d}"
        again = 2
        while directory.is_taken(f"{key}-{again}"):
            again += 1
        return f"{key}-{again}"

    def _complete(self, outcome: Outcome) -> Outcome:
        """Carry out a decision, from any step on; another outcome if the checkpoint cannot get its name. Raises OSError
        if a later step fails."""
        pending = self.pending(outcome.key, outcome.run)
        if not outcome.name:
            self._remove(pending)
            return outcome
        if os.path.isdir(pending):
            try:
                self._rename(outcome, pending)
            except (OSError, CheckpointError) as error:
                return self._give_up(self._record(), outcome.run, outcome.key, f"it cannot get its name: {error}")
        self._directory.sync()
        # crash: ranks.durable
        self._follow()
        return outcome

    def _rename(self, outcome: Outcome, pending: str) -> None:
        made = manifest.read(Path(pending))
        files = [_as_saved(pending, name) for name in (MANIFEST, *(part.file for part in (*made.others, *made.parts)))]
        entry = Saved(
            outcome.name, f"{outcome.run:016x}", made.step, made.step, sum(size for _, size, _ in files),
            combine([int(part.digest, 16) for part in made.parts]), tuple(files), made.metrics, made.alias,
        )  # fmt: skip
        before = self._directory.recorded_as(entry)
        uploads = any(vote.upload for vote in self._files.read(pending).values()) if before is None else before.upload
        self._directory.record(replace(entry, upload=PENDING if uploads else ""))
        # crash: ranks.recorded
        for name in set(os.listdir(pending)) - {name for name, _, _ in files}:
            os.unlink(os.path.join(pending, name))
        # crash: ranks.cleared
        try:
            if self._directory.is_taken(outcome.name):
                raise FileExistsError(17, f"{self._directory.at(outcome.name)} exists: somebody made it meanwhile")
            os.rename(pending, self._directory.at(outcome.name))
        except OSError:
            self._directory.withdraw({(entry.name, entry.writer, entry.number)})
            raise
        # crash: ranks.renamed

    def _follow(self) -> None:
        """Update `latest` and aliases by the list of saves, and delete what is not kept. May be repeated."""
        directory = self._directory
        there = [entry for entry in index.read(directory.path) if entry.is_alike(directory.path)]
        unlinked = []
        if there and target(directory.at(LATEST)) != there[-1].name:
            unlinked.append(directory.point_latest(there[-1].name))
        unlinked.append(directory.point_aliases())
        self.unlinked = "; ".join(filter(None, unlinked))
        deleted, failed = directory.retain(self._keep)
        self.deleted += deleted
        self.undeleted = failed


def _instead(others: dict[str, dict[int, Vote]], missing: Iterable[int]) -> dict[int, str]:
    """For each of these ranks, a checkpoint that is not decided and has a part of that rank, if there is one."""
    return {rank: key for key, there in others.items() for rank in there if rank in missing}


def _why(ranks: Iterable[int], key: str, other: str) -> str:
    return f"{some(ranks)} saved {other}, and not {key}: all ranks save the same names in the same order"


def _as_saved(pending: str, name: str) -> tuple[str, int, int]:
    info = os.lstat(os.path.join(pending, name))
    return name, info.st_size, info.st_mtime_ns


def finish_older_runs(directory: Directory, writer: str) -> None:
    """Finish or remove what ranks have left in a directory in which now this writer alone writes."""
    record = read(directory.path)
    if record is None:
        return
    votes = Votes(RankDirectory(directory.path, 0, 1, writer, MAX_RUN), Keep())
    votes._finish_older_runs()  # no other process is there to take the mutex
