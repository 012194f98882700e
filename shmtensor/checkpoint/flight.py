"""The saves of one writer that are not over yet, and what was told about them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from typing import Any, Final

from ..errors import PeerDied, ResourceError, TimedOut
from .bar import Bar
from .handle import DURABLE, FAILED, REPLACED, WRITING, Durable, SaveHandle

ATTEMPTS: Final = 3
"""A save at which the writing process died so often is given up."""

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
        self.counts = {DURABLE: 0, FAILED: 0, REPLACED: 0}
        self.deleted = 0

    def add(self, handle: SaveHandle) -> None:
        """A save begins."""
        with self._changed:
            self._handles[handle.number] = handle
            self._next = handle.number + 1

    @property
    def handles(self) -> list[SaveHandle]:
        """Those in flight, oldest first."""
        with self._changed:
            return list(self._handles.values())

    def settle(self, number: int, status: str, result: Durable | BaseException | None = None) -> None:
        """A save is over."""
        with self._changed:
            handle = self._handles.pop(number, None)
            self._deaths.pop(number, None)
            if handle is not None and handle._settle(status, result):
                self.counts[status] += 1
                if status == FAILED:
                    self._failed.append(handle)
            self._changed.notify_all()
        if handle is not None:
            self._bar.update(handle)

    def wait(self, deadline: float | None) -> None:
        """Wait until none is in flight; `TimedOut` at the deadline (monotonic)."""
        with self._changed:
            while self._handles:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(f"{len(self._handles)} checkpoints are still being written")
                self._changed.wait(1.0 if left is None else min(left, 1.0))

    def untold(self) -> list[tuple[SaveHandle, BaseException]]:
        """Failed saves whose error nobody has asked for; from now on it counts as told."""
        with self._changed:
            failed, self._failed = self._failed, []
        found = [(handle, handle.durable.looked, handle.durable.exception()) for handle in failed]
        return [(handle, error) for handle, looked, error in found if error is not None and not looked]

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
            result = Durable(report["path"], report["nbytes"], report["seconds"], report["digest"])
            self.settle(number, DURABLE, result)
        elif kind == "error":
            text = f"checkpoint {handle.path} was not written: {report['text']}"
            self.settle(number, FAILED, ResourceError(report["errno"] or errno.EIO, text))
        elif kind == "replaced":
            self.settle(number, REPLACED)

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
