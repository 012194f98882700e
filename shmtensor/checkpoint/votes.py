"""Votes: how the ranks of a run make one checkpoint of their parts, and none if a part is missing.

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
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import CheckpointError
from . import dcp_metadata, index, manifest, ranks
from .digests import combine, digest, text
from .directory import LATEST, Best, Directory, highest_number, remove, sync, target
from .index import Saved
from .locations import read_regular
from .manifest import MANIFEST, MAX_RANKS, Manifest, Part
from .ranks import Outcome, RankDirectory, Run

_PENDING: Final = re.compile(r"\.(?P<key>[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199})\.(?P<run>[0-9a-f]{16})\.ranks")
_VOTE: Final = re.compile(r"rank-(\d{5})\.vote")
_MAX_VOTE: Final = 256 << 10  # bytes, most of which are metrics
_DEAD: Final = 3.0
"""Seconds for which a rank must look dead: a writing process that is starting holds no lock yet."""
_PATIENCE: Final = 10.0
NOT_OPEN: Final = "not open"
LATE: Final = "late"
DEAD: Final = "dead"


class Vote(NamedTuple):
    """A rank's statement about its part: the file's size, time and digest, and the options of `save`.

    fixed: the user gave the name; otherwise another one is chosen if it exists
    """

    rank: int
    world_size: int
    number: int
    file: str
    nbytes: int
    changed: int
    digest: str
    step: int
    metrics: dict[str, float]
    alias: str
    fixed: bool


class Waiting(NamedTuple):
    """No decision yet. `missing`: the ranks whose parts are missing, with the state of each; empty if processes of an
    earlier run have something to finish, or another process decides."""

    missing: dict[int, str]


class Votes:
    """The votes of one rank's writing process. keep: `keep_last`, `keep_every` and `keep_best`."""

    def __init__(self, directory: RankDirectory, keep: tuple[int | None, int | None, Best | None]) -> None:
        self._directory, self._keep = directory, keep
        self._dead: dict[int, float] = {}  # when each rank was first found dead
        self.deleted: list[str] = []
        """Names of old checkpoints that were deleted."""
        self.undeleted: list[str] = []
        self.unlinked = ""

    # --- a rank's own part

    def outcome(self, key: str) -> Outcome | None:
        """The decision about a checkpoint. Raises OSError."""
        found = ranks.read(self._directory.path)
        return None if found is None else found.outcome(self._directory.run, key)

    def pending(self, key: str, number: int | None = None) -> str:
        """The hidden directory of a checkpoint that is not decided."""
        return self._directory.at(f".{key}.{self._directory.run if number is None else number:016x}.ranks")

    def find(self, key: str) -> Vote | None:
        """This rank's vote, if there is one already."""
        return _read_vote(self.pending(key), self._directory.rank)

    def prepare(self, key: str, vote: Vote) -> None:
        """Write the vote, before `add` adds the part. Raises OSError."""
        pending = self.pending(key)
        with contextlib.suppress(FileExistsError):
            os.mkdir(pending)
            sync(self._directory.path)
        # crash: vote.begun
        fields = {**vote._asdict(), "metrics": index.json_metrics(vote.metrics)}
        index.replace(os.path.join(pending, _vote_name(vote.rank)), json.dumps(fields).encode())
        # crash: vote.written

    def add(self, key: str, vote: Vote, path: str) -> None:
        """Add the part, which counts from then on. May be repeated. Raises OSError."""
        pending = self.pending(key)
        if not _is_part(pending, vote):
            os.rename(path, os.path.join(pending, vote.file))
        # crash: vote.added
        sync(pending)
        # crash: vote.durable

    def refuse(self, key: str, reason: str) -> None:
        """Give the checkpoint up, because this rank's part will not come. Raises OSError."""
        with self._directory.deciding(_PATIENCE) as mine:
            record = ranks.read(self._directory.path) if mine else None
            if record is not None and record.outcome(self._directory.run, key) is None:
                self._give_up(record, self._directory.run, key, f"rank {self._directory.rank}: {reason}")

    # --- the decision

    def poll(self, key: str, *, alone: bool) -> Outcome | Waiting:
        """The outcome, decided here if possible, or the ranks that are missing. Raises OSError.

        alone: this rank's trainer is gone, so that no further rank can join the run
        """
        record = self._record()
        if record.outcome(self._directory.run, key) is None and os.path.isdir(self.pending(key)):
            missing = self._missing(record, key)
            if missing and not self._is_hopeless(missing, alone=alone):
                return Waiting(missing)
        with self._directory.deciding() as mine:
            return self._decide(key, alone=alone) if mine else Waiting({})

    def finish_older_runs(self) -> bool:
        """Finish or remove what earlier runs have left; False while a process of theirs is at work, or another process
        holds the mutex. Raises OSError."""
        with self._directory.deciding() as mine:
            return mine and self._finish_older_runs()

    def _record(self) -> Run:
        record = ranks.read(self._directory.path)
        if record is None:
            raise FileNotFoundError(2, f"{self._directory.at(ranks.RUN)} is gone: somebody removed it")
        return record

    def _missing(self, record: Run, key: str) -> dict[int, str]:
        """The ranks whose parts are missing, with the state of each."""
        there = _votes(self.pending(key))
        missing = {}
        for rank in range(self._directory.world_size):
            if rank in there:
                continue
            if self._directory.is_alive(rank, record):
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
        return gone or (alone and NOT_OPEN in missing.values())

    def _decide(self, key: str, *, alone: bool) -> Outcome | Waiting:
        """Decide, if possible, and carry it out. Needs the mutex, as all methods below."""
        record, number = self._record(), self._directory.run
        outcome = record.outcome(number, key)
        if outcome is None:
            if not os.path.isdir(self.pending(key)):
                return Outcome(number, key, "", f"{self.pending(key)} is gone: somebody removed it")
            missing = self._missing(record, key)
            if missing:
                if not self._is_hopeless(missing, alone=alone):
                    return Waiting(missing)
                gone = [rank for rank, state in missing.items() if state != LATE]
                reason = f"the parts of {len(gone)} of {self._directory.world_size} ranks are missing, whose processes "
                return self._give_up(record, number, key, f"{reason}are gone: ranks {ranks.some(gone)}")
            if not self._finish_older_runs():
                return Waiting({})
            votes = _votes(self.pending(key))
            self._decide_older(key, votes)
            outcome = self._commit(self._record(), number, key, votes)
        elif outcome.name:
            return self._complete(outcome)
        else:
            self._remove(self.pending(key))
        return outcome

    def _decide_older(self, key: str, votes: dict[int, Vote]) -> None:
        """Decide about checkpoints that a rank voted on before this one. A rank's saves are written in order, so a part
        that is missing there never comes."""
        older = []
        for pending, other, number in self._all_pending():
            there = _votes(pending)
            is_older = any(vote.number < votes[rank].number for rank, vote in there.items() if rank in votes)
            if number == self._directory.run and other != key and is_older:
                older.append((min(vote.number for vote in there.values()), other, there))
        for _, other, there in sorted(older, key=lambda each: each[:2]):
            record = self._record()
            outcome = record.outcome(self._directory.run, other)
            missing = [rank for rank in range(self._directory.world_size) if rank not in there]
            if outcome is not None:
                self._complete(outcome)
            elif missing:
                reason = f"ranks {ranks.some(missing)} have not saved it, and have saved {key} since"
                self._give_up(record, self._directory.run, other, reason)
            else:
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
            record, votes = self._record(), _votes(pending)
            outcome = record.outcome(number, key)
            if outcome is not None:
                self._complete(outcome)
            elif votes and all(vote.world_size == len(votes) for vote in votes.values()):
                self._commit(record, number, key, votes)
            else:
                self._remove(pending)
        record = self._record()
        if record.number <= directory.run:  # no later run has begun: a writer that is not in it is gone
            for path, owner, _ in list(directory.leftovers()):
                if owner not in record.writers.values():
                    with contextlib.suppress(OSError):
                        remove(path)
        return True

    def _all_pending(self) -> Iterator[tuple[str, str, int]]:
        """(path, key, run) of every hidden directory of a checkpoint."""
        for found in os.listdir(self._directory.path):
            match = _PENDING.fullmatch(found)
            if match is not None:
                yield self._directory.at(found), match["key"], int(match["run"], 16)

    def _give_up(self, record: Run, number: int, key: str, reason: str) -> Outcome:
        outcome = Outcome(number, key, "", reason)
        # crash: giveup.before
        ranks.write(self._directory.path, record.decided(outcome))
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
        parts = tuple(Part(vote.file, vote.nbytes, vote.digest) for _, vote in sorted(votes.items()))
        alias = next((vote.alias for _, vote in sorted(votes.items()) if vote.alias), "")
        metrics = {
            name: value for _, vote in sorted(votes.items(), reverse=True) for name, value in vote.metrics.items()
        }
        # crash: ranks.counted
        try:
            others = self._write_metadata(pending, [part.file for part in parts])
        except CheckpointError as error:
            return self._give_up(record, number, key, f"its parts do not fit together: {error}")
        # crash: ranks.metadata
        made = Manifest(first.step, dict(list(metrics.items())[: index.MAX_METRICS]), alias, parts, others)
        index.replace(os.path.join(pending, MANIFEST), made.render())
        sync(pending)
        # crash: ranks.manifest
        outcome = Outcome(number, key, name, "")
        ranks.write(self._directory.path, record.decided(outcome))
        sync(self._directory.path)
        # crash: ranks.decided
        return self._complete(outcome)

    @staticmethod
    def _write_metadata(pending: str, parts: list[str]) -> tuple[Part, ...]:
        """Write `.metadata` for DCP's own reader, if the parts are for it."""
        data = dcp_metadata.metadata_of(pending, parts)
        if data is None:
            return ()
        index.replace(os.path.join(pending, dcp_metadata.METADATA), data)
        return (Part(dcp_metadata.METADATA, len(data), text(digest(data))),)

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
        self._directory.record(entry)
        # crash: ranks.recorded
        for name in set(os.listdir(pending)) - {name for name, _, _ in files}:
            os.unlink(os.path.join(pending, name))
        # crash: ranks.cleared
        if self._directory.is_taken(outcome.name):
            raise FileExistsError(17, f"{self._directory.at(outcome.name)} exists: somebody made it meanwhile")
        os.rename(pending, self._directory.at(outcome.name))
        # crash: ranks.renamed

    def _follow(self) -> None:
        """Update `latest` and aliases by the list of saves, and delete what is not kept. May be repeated."""
        directory = self._directory
        there = [entry for entry in index.read(directory.path) if entry.is_there(directory.path)]
        unlinked = []
        if there and target(directory.at(LATEST)) != there[-1].name:
            unlinked.append(directory.point_latest(there[-1].name))
        unlinked.append(directory.point_aliases())
        self.unlinked = "; ".join(filter(None, unlinked))
        deleted, failed = directory.retain(*self._keep)
        self.deleted += deleted
        self.undeleted = failed


def _vote_name(rank: int) -> str:
    return f"rank-{rank:05d}.vote"


def _as_saved(pending: str, name: str) -> tuple[str, int, int]:
    info = os.lstat(os.path.join(pending, name))
    return name, info.st_size, info.st_mtime_ns


def _votes(pending: str) -> dict[int, Vote]:
    """The votes whose parts are there, by rank."""
    try:
        names = os.listdir(pending)
    except FileNotFoundError:
        return {}
    found = {}
    for name in names:
        match = _VOTE.fullmatch(name)
        vote = None if match is None else _read_vote(pending, int(match[1]))
        if vote is not None and _is_part(pending, vote):
            found[vote.rank] = vote
    return found


def _is_part(pending: str, vote: Vote) -> bool:
    """Whether the part is there, with the size and time of the vote."""
    try:
        info = os.lstat(os.path.join(pending, vote.file))
    except OSError:
        return False
    return (info.st_size, info.st_mtime_ns) == (vote.nbytes, vote.changed)


def _read_vote(pending: str, rank: int) -> Vote | None:
    """A rank's vote; None if there is none, or it cannot be read."""
    try:
        found: Any = json.loads(read_regular(Path(pending, _vote_name(rank)), _MAX_VOTE))
        vote = Vote(**found)._replace(metrics=index.metrics_of(found["metrics"]))
        numbers = (vote.rank, vote.world_size, vote.number, vote.nbytes, vote.changed, vote.step)
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers) or type(vote.fixed) is not bool:
            return None
        if vote.rank != rank or not rank < vote.world_size <= MAX_RANKS or not index.is_file_name(vote.file):
            return None
        if not isinstance(vote.alias, str) or not re.fullmatch(r"[0-9a-f]{16}", vote.digest):
            return None
        return vote
    except index.UNREADABLE:
        return None


def finish_older_runs(directory: Directory) -> None:
    """Finish or remove what ranks have left in a directory in which now one process writes alone."""
    record = ranks.read(directory.path)
    if record is None:
        return
    seat = RankDirectory(directory.path, 0, 1, "", ranks.MAX_RUN)
    votes = Votes(seat, (None, None, None))
    votes._finish_older_runs()  # no other process is there to take the mutex
