"""The saves of one writer that are not over yet, and what was told about them."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ..errors import PeerDied, ResourceError, TimedOut
from .bar import Bar
from .handle import COMPLETE, DURABLE, FAILED, REPLACED, VOTED, WRITING, Durable, SaveHandle
from .run import some

ATTEMPTS: Final = 3
"""A save at which the writing process died so often is given up."""

_LOOK: Final = 0.25
"""Seconds between two looks whether a wait was given up."""
_LATE: Final = 30.0
"""Seconds after which ranks that are waited for are named in the log."""

log = logging.getLogger("shmtensor")


class Flight:
    """Handles by number. Methods named `on_...` are called by the link's thread."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._changed = threading.Condition()
        self._handles: dict[int, SaveHandle] = {}
        self._deaths: dict[int, int] = {}
        self._failed: list[SaveHandle] = []
        self._next = 1
        self._voted: dict[int, float] = {}  # since when other ranks' parts are waited for; infinity once that is logged
        self.counts = {DURABLE: 0, COMPLETE: 0, FAILED: 0, REPLACED: 0}
        self.deleted = 0

    def add(self, handle: SaveHandle) -> None:
        """A save begins."""
        with self._changed:
            self._handles[handle.number] = handle
            self._next = handle.number + 1

    def __len__(self) -> int:
        """How many are in flight. Takes no lock."""
        return len(self._handles)

    @property
    def handles(self) -> list[SaveHandle]:
        """Those in flight, oldest first."""
        with self._changed:
            return list(self._handles.values())

    def settle(self, number: int, status: str, result: Durable | BaseException | None = None) -> None:
        """A save is over. Its futures end without a lock; they have when it is in flight no more."""
        with self._changed:
            handle = self._handles.get(number)
        is_first = handle is not None and handle._settle(status, result)
        with self._changed:
            self._handles.pop(number, None)
            self._deaths.pop(number, None)
            self._voted.pop(number, None)
            if handle is not None and is_first:
                self.counts[status] += 1
                if status in (COMPLETE, FAILED):
                    self._failed.append(handle)
            self._changed.notify_all()
        if handle is not None:
            self._bar.update(handle)

    def wait(self, deadline: float | None, is_given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until none is in flight, False if the wait was given up; `TimedOut` at the deadline (monotonic)."""
        return self._wait_while(lambda: bool(self._handles), deadline, is_given_up)

    def wait_for_votes(self, most: int, deadline: float | None, is_given_up: Callable[[], bool]) -> bool:
        """The same, until fewer than `most` wait for the parts of other ranks."""

        def too_many() -> bool:
            return sum(handle.status == VOTED for handle in self._handles.values()) >= most

        return self._wait_while(too_many, deadline, is_given_up)

    def _wait_while(self, holds: Callable[[], bool], deadline: float | None, is_given_up: Callable[[], bool]) -> bool:
        with self._changed:
            while holds():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(f"{len(self._handles)} checkpoints are still being written{self._awaited()}")
                if is_given_up():
                    return False
                self._changed.wait(_LOOK if left is None else min(left, _LOOK))
        return True

    def _awaited(self) -> str:
        """Which ranks are waited for, for messages."""
        missing: dict[str, list[int]] = {}
        for handle in self._handles.values():
            for rank, state in handle.missing.items():
                if rank not in missing.setdefault(state, []):
                    missing[state].append(rank)
        found = "; ".join(f"{state}: rank {some(sorted(ranks))}" for state, ranks in sorted(missing.items()))
        return f": the parts of other ranks are missing ({found})" if found else ""

    def untold(self) -> list[tuple[SaveHandle, BaseException]]:
        """Failed saves whose error nobody has asked for: `SaveHandle.durable.looked` says so once somebody has."""
        with self._changed:
            self._failed = [handle for handle in self._failed if not handle.durable.looked]
            return [(handle, error) for handle in self._failed if (error := handle.durable.error) is not None]

    def alive(self) -> dict[str, Any]:
        """What a new writing process must know: which numbers below `next` are not over."""
        with self._changed:
            return {"next": self._next, "live": sorted(self._handles)}

    # --- the link's thread

    def on_report(self, report: dict[str, Any]) -> None:
        kind, number = report["r"], report.get("n", 0)
        with self._changed:
            handle = self._handles.get(number)
        if handle is None:
            return
        if kind in ("begun", "progress"):
            handle._advance(report.get("written", 0))
            self._bar.update(handle)
        elif kind == "durable":
            self.deleted += report["deleted"]
            if report["undeleted"]:
                log.warning("%s is durable, but old ones were not deleted: %s", report["path"], report["undeleted"])
            if report["unlinked"]:
                log.warning("%s is durable, but a name does not lead to it: %s", report["path"], report["unlinked"])
            result = Durable(report["path"], report["nbytes"], report["seconds"], report["digest"])
            self.settle(number, DURABLE, result)
        elif kind == "error":
            text = f"checkpoint {handle.path} was not written: {report['text']}"
            self.settle(number, FAILED, ResourceError(report["errno"] or errno.EIO, text))
        elif kind == "complete":
            text = (
                f"checkpoint {handle.path} is complete and can be loaded, but is not known to be durable, since its "
                f"directory could not be synced: {report['text']}; no older one was deleted: look at the disk"
            )
            self.settle(number, COMPLETE, ResourceError(report["errno"] or errno.EIO, text))
        elif kind == "replaced":
            self.settle(number, REPLACED)
        elif kind == "voted":
            handle._vote()
            self._voted.setdefault(number, time.monotonic())
        elif kind == "awaited":
            for each in self.handles:  # a rank that has no part in one has none in those after it
                if each.number >= number:
                    each._missing = dict(report["ranks"])
            if time.monotonic() - self._voted.get(number, math.inf) >= _LATE:
                self._voted[number] = math.inf
                log.warning("%s waits for its other parts%s", handle.path, self._awaited())

    def on_death(self, code: int) -> dict[str, Any]:
        """The writing process died: what was being written gets another attempt, but not for ever."""
        for handle in self.handles:
            if handle.status == WRITING:
                deaths = self._deaths[handle.number] = self._deaths.get(handle.number, 0) + 1
                if deaths >= ATTEMPTS:
                    text = f"checkpoint {handle.path} was not written: the writing process died {deaths} times at it"
                    self.settle(handle.number, FAILED, PeerDied(f"{text}, last with exit code {code}"))
        return self.alive()

    def on_lost(self, error: PeerDied) -> None:
        """There is no writing process any more."""
        for handle in self.handles:
            self.settle(handle.number, FAILED, PeerDied(f"checkpoint {handle.path} was not written: {error}"))
