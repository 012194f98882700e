"""The saves of one writer that have not ended, and what its writing process reports about them."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ..errors import PeerDied, ResourceError, TimedOut
from .handle import COMPLETE, DURABLE, FAILED, REPLACED, VOTED, WRITING, Durable, Save
from .progress_bar import Bar
from .ranks import some

ATTEMPTS: Final = 3
"""A save fails when the writing process has died so often while writing it."""

_CHECK_INTERVAL: Final = 0.25
"""Seconds after which a wait checks again whether its caller has abandoned it."""
_LATE: Final = 30.0
"""Seconds after which the log names the ranks whose parts are missing."""

log = logging.getLogger("shmtensor.checkpoint")


class SavesInFlight:
    """Saves by number. Thread-safe; the thread of `ProcessHandle` calls the methods named `on_...`."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._changed = threading.Condition()
        self._saves: dict[int, Save] = {}
        self._deaths: dict[int, int] = {}
        self._failed: list[Save] = []
        self._next = 1
        self._voted: dict[int, float] = {}  # when the wait for other ranks began; infinity once it was logged
        self.counts = {DURABLE: 0, COMPLETE: 0, FAILED: 0, REPLACED: 0}
        self.deleted = self.uploaded = 0
        self._uploading: dict[int, Save] = {}  # durable, and not uploaded yet

    def add(self, save: Save) -> None:
        """Add a save that begins."""
        with self._changed:
            self._saves[save.number] = save
            self._next = save.number + 1

    def __len__(self) -> int:
        """How many saves are in flight. Takes no lock."""
        return len(self._saves)

    @property
    def in_flight(self) -> list[Save]:
        """The saves in flight, oldest first."""
        with self._changed:
            return list(self._saves.values())

    def finish(self, number: int, status: str, result: Durable | BaseException | None = None) -> None:
        """End a save. Its futures are set without a lock, and before it leaves the saves in flight."""
        with self._changed:
            save = self._saves.get(number)
        is_first = save is not None and save.finish(status, result)
        with self._changed:
            self._saves.pop(number, None)
            self._deaths.pop(number, None)
            self._voted.pop(number, None)
            if save is not None and is_first:
                self.counts[status] += 1
                if status == DURABLE and save.uploads:
                    self._uploading[number] = save
                if status in (COMPLETE, FAILED):
                    self._failed.append(save)
            self._changed.notify_all()
        if save is not None:
            self._bar.update(save)

    def wait(self, deadline: float | None, is_abandoned: Callable[[], bool] = lambda: False) -> bool:
        """Wait until none is in flight or being uploaded; False if the caller has given up. `TimedOut` at the deadline
        (monotonic)."""
        return self._wait_while(lambda: bool(self._saves or self._uploading), deadline, is_abandoned)

    def wait_for_votes(self, most: int, deadline: float | None, is_abandoned: Callable[[], bool]) -> bool:
        """As `wait`, until fewer than `most` saves wait for the parts of other ranks."""

        def too_many() -> bool:
            return sum(save.status == VOTED for save in self._saves.values()) >= most

        return self._wait_while(too_many, deadline, is_abandoned)

    def _wait_while(self, holds: Callable[[], bool], deadline: float | None, is_abandoned: Callable[[], bool]) -> bool:
        with self._changed:
            while holds():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    uploads = f" and {len(self._uploading)} uploaded" if self._uploading else ""
                    raise TimedOut(f"{len(self._saves)} checkpoints are still being written{uploads}{self._awaited()}")
                if is_abandoned():
                    return False
                self._changed.wait(_CHECK_INTERVAL if left is None else min(left, _CHECK_INTERVAL))
        return True

    def _awaited(self) -> str:
        """Text for messages: the ranks whose parts are missing."""
        missing: dict[str, list[int]] = {}
        for save in self._saves.values():
            for rank, state in save.missing.items():
                if rank not in missing.setdefault(state, []):
                    missing[state].append(rank)
        found = "; ".join(f"{state}: rank {some(sorted(ranks))}" for state, ranks in sorted(missing.items()))
        return f": the parts of other ranks are missing ({found})" if found else ""

    def unreported(self) -> list[tuple[Save, BaseException]]:
        """Failed saves whose error the caller has not seen (`Outcome.error_seen`), with the error."""
        with self._changed:
            self._failed = [save for save in self._failed if not save.durable.error_seen]
            return [(save, error) for save in self._failed if (error := save.durable.error) is not None]

    def live_numbers(self) -> dict[str, Any]:
        """For a new writing process: which of the numbers below `next` have not ended."""
        with self._changed:
            return {"next": self._next, "live": sorted(self._saves), "uploading": sorted(self._uploading)}

    @property
    def uploading(self) -> int:
        """How many are durable and not uploaded yet."""
        return len(self._uploading)

    def _end_upload(self, number: int, result: str | Exception) -> None:
        with self._changed:
            save = self._uploading.get(number)
        if save is not None:
            save.end_upload(result)
        with self._changed:
            self._uploading.pop(number, None)
            self._changed.notify_all()

    # --- called by the thread of `ProcessHandle`

    def on_report(self, report: dict[str, Any]) -> None:
        """Note what the writing process reports about one save."""
        kind, number = report["r"], report.get("n", 0)
        if kind == "retained":
            self.deleted += report["deleted"]
            return
        if kind == "uploaded":
            self.uploaded += 1
            self._end_upload(number, report["url"])
            return
        if kind == "unuploaded":
            log.warning("%s; it is tried again after the next save, and by the next CheckpointWriter", report["text"])
            self._end_upload(number, ResourceError(errno.EIO, report["text"]))
            return
        with self._changed:
            save = self._saves.get(number)
        if save is None:
            return
        if kind in ("begun", "progress"):
            save.advance(report.get("written", 0))
            self._bar.update(save)
        elif kind == "durable":
            self.deleted += report["deleted"]
            if report["undeleted"]:
                log.warning("%s is durable, but old ones were not deleted: %s", report["path"], report["undeleted"])
            if report["unlinked"]:
                log.warning("%s is durable, but a name does not lead to it: %s", report["path"], report["unlinked"])
            result = Durable(report["path"], report["nbytes"], report["seconds"], report["digest"])
            self.finish(number, DURABLE, result)
        elif kind == "error":
            text = f"checkpoint {save.path} was not written: {report['text']}"
            self.finish(number, FAILED, ResourceError(report["errno"] or errno.EIO, text))
        elif kind == "complete":
            text = (
                f"checkpoint {save.path} is complete and can be loaded, but is not known to be durable, since its "
                f"directory could not be synced: {report['text']}; no older one was deleted: look at the disk"
            )
            self.finish(number, COMPLETE, ResourceError(report["errno"] or errno.EIO, text))
        elif kind == "replaced":
            self.finish(number, REPLACED)
        elif kind == "voted":
            save.vote()
            self._voted.setdefault(number, time.monotonic())
        elif kind == "awaited":
            for each in self.in_flight:  # a rank without a part in this save has none in later ones
                if each.number >= number:
                    each.last_missing = dict(report["ranks"])
            if time.monotonic() - self._voted.get(number, math.inf) >= _LATE:
                self._voted[number] = math.inf
                log.warning("%s waits for its other parts%s", save.path, self._awaited())

    def on_death(self, code: int) -> dict[str, Any]:
        """The writing process died: a save that it was writing is tried again, `ATTEMPTS` times in all.

        code: its exit code. Returns `live_numbers()`, for the next process.
        """
        for save in self.in_flight:
            if save.status == WRITING:
                deaths = self._deaths[save.number] = self._deaths.get(save.number, 0) + 1
                if deaths >= ATTEMPTS:
                    text = f"checkpoint {save.path} was not written: the writing process died {deaths} times at it"
                    self.finish(save.number, FAILED, PeerDied(f"{text}, last with exit code {code}"))
        return self.live_numbers()

    def on_lost(self, error: PeerDied) -> None:
        """There is no writing process, and no other will be started: every save fails."""
        for save in self.in_flight:
            self.finish(save.number, FAILED, PeerDied(f"checkpoint {save.path} was not written: {error}"))
        for number, save in list(self._uploading.items()):
            self._end_upload(number, PeerDied(f"checkpoint {save.path} is durable, and was not uploaded: {error}"))
