"""The files through which the ranks of a run communicate: the record of the run, and their votes.

The record, `.shmtensor.run`, is a JSON document that is replaced as a whole, by the process that holds byte 2 of the
lock file:

| key | value |
|---|---|
| `run` | number of the run, larger than that of any before |
| `world_size` | how many ranks it has |
| `writers` | per rank that has opened its `CheckpointWriter` the id of that writer |
| `begun` | the ranks that have begun a save |
| `ended` | `[run, rank]` of ranks whose parts are all there: their trainers close or have died, no more will come |
| `outcomes` | the last decisions: `[run, key, name, reason]`, name "" where the checkpoint was given up |
| `uploaded` | the last checkpoints that are at their URL, `[run, name, time]` as the list has them; some are deleted |

A vote is what a rank says of its part of a checkpoint: a file `rank-00003.vote` in the hidden directory of that.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import index
from .index import Saved
from .locations import read_regular
from .manifest import MAX_RANKS

RUN: Final = ".shmtensor.run"
MAX_RUN: Final = 1 << 45
"""A run's number is the time of its beginning in milliseconds, so that no number is repeated if the file is lost."""
_LAST: Final = 256
"""How many outcomes, and uploads, are kept."""
_VERSION: Final = 1


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
    ended: frozenset[tuple[int, int]] = frozenset()
    outcomes: tuple[Outcome, ...] = ()
    uploaded: tuple[tuple[str, str, int], ...] = ()

    def outcome(self, run: int, key: str) -> Outcome | None:
        """The decision about one checkpoint of a run, or None."""
        return next((each for each in reversed(self.outcomes) if (each.run, each.key) == (run, key)), None)

    def decided(self, outcome: Outcome) -> Run:
        """The run with one more decision, which replaces an earlier one about the same checkpoint."""
        others = [each for each in self.outcomes if (each.run, each.key) != (outcome.run, outcome.key)]
        return replace(self, outcomes=(*others, outcome)[-_LAST:])

    def with_upload(self, saved: Saved) -> Run:
        """The run with one more checkpoint that is at its URL."""
        return replace(self, uploaded=(*self.uploaded, upload_mark(saved))[-_LAST:])


def upload_mark(saved: Saved) -> tuple[str, str, int]:
    """What `Run.uploaded` has of a checkpoint."""
    return saved.writer, saved.name, saved.files[0][2]


def read(directory: str) -> Run | None:
    """The file's contents, None if there is none. `OSError` if it cannot be read."""
    try:
        found = json.loads(read_regular(Path(directory, RUN), index.MAX_LIST))
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r:.40}")
        run = Run(
            found["run"], found["world_size"], {int(rank): writer for rank, writer in found["writers"].items()},
            frozenset(found["begun"]), frozenset((run, rank) for run, rank in found.get("ended", [])),
            tuple(Outcome(*each) for each in found["outcomes"]),
            tuple((run, name, at) for run, name, at in found.get("uploaded", [])),
        )  # fmt: skip
        numbers = [
            run.number,
            run.world_size,
            *run.writers,
            *run.begun,
            *itertools.chain(*run.ended),
            *(each.run for each in run.outcomes),
        ]
        texts = [*run.writers.values(), *(text for each in run.outcomes for text in (each.key, each.name, each.reason))]
        if not all(type(n) is int and 0 <= n < MAX_RUN for n in numbers) or not all(type(t) is str for t in texts):
            raise ValueError("it has other types")
        if not all((type(writer), type(name), type(at)) == (str, str, int) for writer, name, at in run.uploaded):
            raise ValueError("it has other uploads")
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
        "begun": sorted(run.begun), "ended": sorted(run.ended),
        "outcomes": [[each.run, each.key, each.name, each.reason] for each in run.outcomes],
        "uploaded": run.uploaded,
    }  # fmt: skip
    index.replace(os.path.join(directory, RUN), json.dumps(document).encode())


_NAME: Final = re.compile(r"rank-(\d{5})\.vote")
_MAX_BYTES: Final = 256 << 10
"""The most bytes of a vote, most of which are metrics."""


class Vote(NamedTuple):
    """A rank's statement about its part: the file's size, time and digest, and the options of `save`.

    fixed:  the user gave the name; otherwise another one is chosen if it exists
    upload: which URL it is to be uploaded to (`upload.mark_of`), "" for none
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
    upload: str = ""


class VoteFiles:
    """Reads the votes of checkpoints again and again, and only those whose file has been replaced since."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[index.Version, Vote]]] = {}  # by hidden directory and file

    def read(self, pending: str) -> dict[int, Vote]:
        """The votes of a checkpoint whose parts are there, by rank."""
        before, seen = self._seen.pop(pending, {}), {}
        try:
            names = os.listdir(pending)
        except FileNotFoundError:
            return {}
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            version, known = index.version(os.path.join(pending, name)), before.get(name)  # the version first
            vote = known[1] if known is not None and known[0] == version else read_vote(pending, int(match[1]))
            if vote is not None:
                seen[name] = version, vote
        self._seen[pending] = seen
        return {vote.rank: vote for _, vote in seen.values() if is_part(pending, vote)}

    def forget_others(self, pending: Container[str]) -> None:
        """Forget the votes of checkpoints that are not among these."""
        self._seen = {path: seen for path, seen in self._seen.items() if path in pending}


def vote_name(rank: int) -> str:
    """The name of a rank's vote."""
    return f"rank-{rank:05d}.vote"


def write_vote(pending: str, vote: Vote) -> None:
    """Write a vote, or replace it. Raises OSError."""
    fields = {**vote._asdict(), "metrics": index.json_metrics(vote.metrics)}
    index.replace(os.path.join(pending, vote_name(vote.rank)), json.dumps(fields).encode())


def read_vote(pending: str, rank: int) -> Vote | None:
    """A rank's vote; None if there is none, or it cannot be read."""
    try:
        found: Any = json.loads(read_regular(Path(pending, vote_name(rank)), _MAX_BYTES))
        vote = Vote(**found)._replace(metrics=index.metrics_of(found["metrics"]))
        numbers = (vote.rank, vote.world_size, vote.number, vote.nbytes, vote.changed, vote.step)
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers) or type(vote.fixed) is not bool:
            return None
        if vote.rank != rank or not rank < vote.world_size <= MAX_RANKS or not index.is_file_name(vote.file):
            return None
        if not (vote.alias == "" or index.is_file_name(vote.alias)) or not re.fullmatch(r"[0-9a-f]{16}", vote.digest):
            return None
        if not re.fullmatch(r"(?:[0-9a-f]{16})?", vote.upload):
            return None
        return vote
    except index.UNREADABLE:
        return None


def is_part(pending: str, vote: Vote) -> bool:
    """Whether the part is there, with the size and time of the vote."""
    try:
        info = os.lstat(os.path.join(pending, vote.file))
    except OSError:
        return False
    return (info.st_size, info.st_mtime_ns) == (vote.nbytes, vote.changed)
