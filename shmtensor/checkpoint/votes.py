"""The votes of ranks about their parts of a checkpoint: files `rank-00003.vote` in its hidden directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import index
from .locations import read_regular
from .manifest import MAX_RANKS

_NAME: Final = re.compile(r"rank-(\d{5})\.vote")
_MAX_BYTES: Final = 256 << 10
"""Of a vote, most of which are metrics."""


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
        self._seen: dict[str, dict[str, tuple[_Stamp, Vote]]] = {}  # by hidden directory and file

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
            stamp, known = _stamp(os.path.join(pending, name)), before.get(name)  # the stamp before the file
            vote = known[1] if known is not None and known[0] == stamp else read_vote(pending, int(match[1]))
            if vote is not None:
                seen[name] = stamp, vote
        self._seen[pending] = seen
        return {vote.rank: vote for _, vote in seen.values() if is_part(pending, vote)}

    def forget_others(self, pending: Container[str]) -> None:
        """Forget the votes of checkpoints that are not among these."""
        self._seen = {path: seen for path, seen in self._seen.items() if path in pending}


_Stamp = tuple[int, int, int]


def _stamp(path: str) -> _Stamp:
    """The version of a file that is replaced as a whole; zeros if it is gone."""
    try:
        info = os.lstat(path)
    except OSError:
        return 0, 0, 0
    return info.st_ino, info.st_size, info.st_mtime_ns


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
        if not isinstance(vote.alias, str) or not re.fullmatch(r"[0-9a-f]{16}", vote.digest):
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
