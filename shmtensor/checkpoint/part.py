"""One rank's part of a save in its writing process: from messages to a voted file, and then to an outcome.

    gathering -> writing -> voted -> committed | given up

The file is written as that of any save. Then it is renamed into the directory of the checkpoint of all ranks
(`votes.py`), and its chunks are released. The head is released with the outcome: if the process dies before, the next
one receives the head again and finds the vote.
"""

from __future__ import annotations

import time

from ..endpoints.message import Message
from .directory import Directory
from .envelope import SUFFIX
from .formats import get_format
from .index import Saved
from .keys import MasterKey
from .manifest import part_name
from .ranks import Outcome
from .snapshot import Snapshot
from .votes import Vote, Votes, Waiting

POLLS = (0.02, 0.5)
"""Seconds between two checks of the votes: the first, plus a twentieth of the time waited so far; at most the last."""


class PartSnapshot(Snapshot):
    """The messages of one rank's save. `name` is the key that the parts of all ranks have in common."""

    def __init__(self, head: Message, votes: Votes, master: MasterKey | None = None) -> None:
        super().__init__(head, master)
        self._votes = votes
        self.since = self._next_poll = 0.0
        self.entry: Saved | None = None

    def was_recorded(self, directory: Directory, writer: str) -> bool:
        """Whether an earlier process had voted, or the outcome is known."""
        return self._votes.find(self.name) is not None or self._votes.outcome(self.name) is not None

    def _recorded(self) -> Saved | None:
        outcome = self._votes.outcome(self.name)
        if outcome is not None and not outcome.name:
            raise OSError(125, outcome.reason)  # ECANCELED
        vote = self._votes.find(self.name)
        if vote is not None:
            entry = self._entry(vote)
            if outcome is not None or entry.is_at(self._path) or entry.is_at(self._place(vote)):
                return entry
        if outcome is not None:  # committed: the directory with this rank's vote was renamed
            return self._entry(None)
        if not self.streams and len(self._chunks) < len(self.chunks):  # an earlier process had voted, and released them
            raise FileNotFoundError(2, f"{self._path} is gone: somebody removed it")
        return None

    def _place(self, vote: Vote) -> str:
        return f"{self._votes.pending(self.name)}/{vote.file}"

    def _entry(self, vote: Vote | None) -> Saved:
        files = (("", vote.nbytes, vote.changed),) if vote else (("", self.layout.nbytes, 0),)
        digest = vote.digest if vote else ""
        return Saved(self.name, self._writer, self.number, self.options["step"], files[0][1], digest, files)

    def _record(self, entry: Saved) -> None:
        self._votes.prepare(self.name, self._vote(entry))

    def _vote(self, entry: Saved) -> Vote:
        _, nbytes, changed = entry.files[0]
        rank, world_size = self.options["rank"], self.options["world_size"]
        suffix = get_format(self.options["format"]).suffix + (SUFFIX if self._master else "")
        file = part_name(rank, suffix)
        metrics = {name: float(value) for name, value in self.options["metrics"].items()}
        return Vote(
            rank, world_size, self.number, file, nbytes, changed, entry.digest, self.options["step"], metrics,
            self.options["alias"], self.options["fixed"],
        )  # fmt: skip

    def commit(self, entry: Saved) -> None:
        """Add the part to those of the other ranks. Raises OSError, with the reason if the checkpoint was given up."""
        self.entry = entry
        self.since = time.monotonic()
        if self._votes.outcome(self.name) is None:
            try:
                self._votes.add(self.name, self._vote(entry), self._path)
            except OSError:
                outcome = self._votes.outcome(self.name)
                if outcome is None:
                    raise
                if not outcome.name:
                    raise OSError(125, outcome.reason) from None

    def poll(self, *, alone: bool) -> Outcome | Waiting | None:
        """The outcome, or the missing ranks; None if it is not time to check. Raises OSError."""
        now = time.monotonic()
        if now < self._next_poll:
            return None
        found = self._votes.poll(self.name, alone=alone)
        first, last = POLLS
        self._next_poll = now + min(last, first + (now - self.since) / 20)
        if isinstance(found, Outcome):
            self.seconds = now - float(self.options["began"])
        return found

    def refuse(self, reason: str) -> None:
        """Give the checkpoint up: this part will not come."""
        self._votes.refuse(self.name, reason)
