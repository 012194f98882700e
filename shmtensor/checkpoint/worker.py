"""The writing process: takes snapshots out of their slots and makes durable files of them, one after the other.

Started by `link.py`, once per `CheckpointWriter`, and again if it dies. It outlives its trainer until everything that
was staged is written. Never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from typing import Any, Final

from ..endpoints.message import Message
from ..endpoints.producer import Producer
from ..errors import RingFull, ShmTensorError, TimedOut
from .directory import Directory
from .disk import Disk
from .link import results_channel
from .part import PartSnapshot
from .run import Outcome, RankDirectory
from .slots import ABANDON, HEAD, Taker
from .snapshot import WRITES, Snapshot
from .votes import Votes, settle_all

_TICK: Final = 1.0
_OTHER: Final = 0.05
"""Seconds between two looks whether the writer of an earlier trainer has finished."""
_LEAVING: Final = 0.005
"""Seconds between two looks whether the trainer has left."""
_LAST_WORDS: Final = 10.0
"""Seconds that a trainer who lives and listens to nothing is waited for at the end."""
_LOOK: Final = 0.02
"""Seconds between two looks whether it is time to look at the votes of other ranks."""
_AWAITED: Final = 1.0
"""Seconds between two reports of which ranks are waited for."""
_PROGRESS: Final = 0.05
"""Seconds between two reports of how far a save is."""


class _Reports(Producer):
    """What is told to a trainer, who may have left."""

    _counts_lost = False


class Worker:
    """Everything that the writing process knows."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._writer: str = settings["writer"]
        self._directory, self._votes = self._open(settings)
        self._voted: list[PartSnapshot] = []  # those of which other ranks' parts are waited for, oldest first
        self._awaited = 0.0
        self._snapshots: dict[int, Snapshot] = {}
        self._strays: dict[int, list[Message]] = {}  # of snapshots whose head has not come yet
        self._dropped: set[int] = set()
        self._unsent: list[dict[str, Any]] = []
        self._swept = False
        self._told = 0.0
        self._disk = Disk(WRITES)
        self._reports = _Reports(results_channel(settings["channel"]), slots=64, slot_bytes=64, full="block")
        self._taker = Taker(settings["channel"])

    @staticmethod
    def _open(settings: dict[str, Any]) -> tuple[Directory, Votes | None]:
        """The directory, and the votes if several ranks save into it."""
        if "run" not in settings:
            return Directory(settings["directory"]), None
        directory = RankDirectory(
            settings["directory"], settings["rank"], settings["world_size"], settings["writer"], settings["run"]
        )
        return directory, Votes(directory, (settings["keep_last"], settings["keep_every"], settings["keep_best"]))

    def run(self) -> None:
        """Work until the trainer has closed or died and everything it staged is finished."""
        with contextlib.suppress(OSError):  # if it fails, each save will say why
            self._may_write()
        self._report(r="ready")
        # crash: worker.ready
        messages = self._taker.take_first()
        while True:
            for message in messages:
                self._sort(message)
            messages.clear()
            self._flush()
            snapshot = self._current()
            if snapshot is not None:
                self._work_on(snapshot)
            elif self._taker.over:
                self._drop_all()
                if not self._voted:
                    break
                time.sleep(_LOOK)
            elif self._is_alone():
                messages = self._taker.take_first()  # what the trainer left is there by now
                if messages:
                    continue
                self._drop_all()
                if not self._voted:
                    break
                time.sleep(_LOOK)
            self._look_at_votes()
            messages = self._taker.take(0 if self._current() is not None else _LOOK if self._voted else _TICK)
        self._drop_all()
        with contextlib.suppress(OSError):
            if self._directory.try_write():
                self._directory.sweep(self._writer, lambda number: True)
        # crash: worker.finished
        self._report(r="over")  # the trainer leaves when it hears this, and then waits for our end
        deadline = time.monotonic() + _LAST_WORDS
        while self._unsent and self._is_heard() and time.monotonic() < deadline:
            time.sleep(_OTHER)
            self._flush()
        # crash: worker.over
        self._outlast(deadline)
        self._reports.close()
        self._taker.close()
        self._directory.close()

    def _outlast(self, deadline: float) -> None:
        """Be the last one on both channels, for the last one removes what the dead left.

        The trainer leaves them before it waits for our end. If it dies instead, the kernel drops its locks one after
        the other, so that it may seem to be dead on one channel and to live on the other.
        """
        while self._is_heard() or not self._taker.is_alone:
            if time.monotonic() > deadline:
                return
            time.sleep(_LEAVING)

    def _is_heard(self) -> bool:
        """Whether the trainer still listens to reports."""
        try:
            self._reports.wait_for_consumers(1, timeout=0)
        except TimedOut:
            return False
        return True

    def _is_alone(self) -> bool:
        """Whether the trainer has said that it is over, or died before this process could join its channel."""
        return bool(_ending) or not self._is_heard()

    def _current(self) -> Snapshot | None:
        """The oldest snapshot, if something can be done for it now."""
        oldest = self._snapshots.get(min(self._snapshots, default=0))
        return oldest if oldest is not None and oldest.can_step else None

    def _sort(self, message: Message) -> None:
        kind, number = message.meta["k"], message.meta["n"]
        if kind == ABANDON:
            self._abandon(number, force=message.meta["force"])
            # crash: abandon.done
            message.release()
        elif self._is_over(number):
            message.release()
        elif kind == HEAD:
            snapshot = Snapshot(message) if self._votes is None else PartSnapshot(message, self._votes)
            self._snapshots[number] = snapshot
            if message.attempt > 1:
                snapshot.staged = snapshot.was_recorded(self._directory, self._writer)
            for stray in self._strays.pop(number, ()):
                snapshot.add(stray)
        elif number in self._snapshots:
            self._snapshots[number].add(message)
        else:
            self._strays.setdefault(number, []).append(message)

    def _is_over(self, number: int) -> bool:
        """Whether a save was finished or given up, by this process or, as the trainer knows, by an earlier one."""
        if number in self._dropped:
            return True
        return number < self._settings["next"] and number not in self._settings["live"]

    def _abandon(self, number: int, *, force: bool) -> None:
        """Take a snapshot back, unless it is being written already and that is allowed to go on."""
        snapshot = self._snapshots.get(number)
        if snapshot is not None and (force or not snapshot.begun):
            self._report(r="replaced", n=number)  # first: if we die at the next step, it is over for who comes after
            self._refuse(snapshot, "its save was taken back")
            self._drop(snapshot)
        elif snapshot is None and force:
            self._dropped.add(number)
            for stray in self._strays.pop(number, ()):
                stray.release()

    def _drop_all(self) -> None:
        """What the trainer was copying when it died."""
        for snapshot in list(self._snapshots.values()):
            self._refuse(snapshot, "its trainer died inside save")
            self._drop(snapshot)

    def _refuse(self, snapshot: Snapshot, reason: str) -> None:
        if isinstance(snapshot, PartSnapshot):
            with contextlib.suppress(OSError):  # the others see then that this rank is gone, or has saved another since
                if self._may_write():
                    snapshot.refuse(reason)

    def _drop(self, snapshot: Snapshot) -> None:
        self._dropped.add(snapshot.number)
        del self._snapshots[snapshot.number]
        snapshot.discard()

    def _work_on(self, snapshot: Snapshot) -> None:
        """One step: begin, write a chunk, or finish."""
        try:
            if not snapshot.begun:
                if not self._may_write():
                    time.sleep(_OTHER)
                    return
                self._report(r="begun", n=snapshot.number)
                entry = snapshot.begin(self._directory, self._writer)
                if entry is None:
                    return
            elif not snapshot.is_written:
                snapshot.write_next(self._disk)
                self._tell_progress(snapshot)
                return
            else:
                entry = snapshot.complete()
            snapshot.commit(entry)
        except (OSError, ShmTensorError) as error:
            self._fail(snapshot, error)
            return
        if isinstance(snapshot, PartSnapshot):
            self._wait_for_others(snapshot)
            return
        # crash: finish.before
        snapshot.release_chunks()  # before it is told: who hears of it finds room for the next one
        # crash: finish.released
        keep = self._settings
        deleted, failed = snapshot.retain(keep["keep_last"], keep["keep_every"], keep["keep_best"])
        unsynced = snapshot.unsynced
        if unsynced is None:
            self._report(
                r="durable", n=snapshot.number, path=self._directory.at(snapshot.name), nbytes=entry.nbytes,
                digest=entry.digest, seconds=snapshot.seconds, deleted=len(deleted), undeleted="; ".join(failed[:3]),
                unlinked=snapshot.unlinked,
            )  # fmt: skip
        else:
            self._report(r="complete", n=snapshot.number, errno=unsynced.errno or 0, text=str(unsynced))
        # crash: finish.reported
        del self._snapshots[snapshot.number]
        self._dropped.add(snapshot.number)
        snapshot.release()
        # crash: finish.done

    def _fail(self, snapshot: Snapshot, error: OSError | ShmTensorError) -> None:
        snapshot.discard_files()
        text = error.strerror if isinstance(error, OSError) and error.errno == errno.ECANCELED else str(error)
        self._report(r="error", n=snapshot.number, errno=getattr(error, "errno", None) or 0, text=text)
        self._refuse(snapshot, str(text))
        self._drop(snapshot)

    # --- several ranks

    def _wait_for_others(self, snapshot: PartSnapshot) -> None:
        # crash: part.before
        snapshot.release_chunks()
        # crash: part.released
        snapshot.drop_log()
        del self._snapshots[snapshot.number]
        self._voted.append(snapshot)
        self._report(r="voted", n=snapshot.number)
        self._look_at_votes()

    def _look_at_votes(self) -> None:
        """The oldest first: whoever decides about a checkpoint has decided about those before it."""
        for snapshot in list(self._voted):
            try:
                found = snapshot.look(alone=self._taker.over or bool(_ending) or not self._is_heard())
            except (OSError, ShmTensorError) as error:
                self._voted.remove(snapshot)
                self._snapshots[snapshot.number] = snapshot
                self._fail(snapshot, error)
                return
            if isinstance(found, Outcome):
                self._conclude(snapshot, found)
                continue
            if found is not None and time.monotonic() - self._awaited >= _AWAITED and not self._unsent:
                self._awaited = time.monotonic()
                self._report(r="awaited", n=snapshot.number, ranks=sorted(found.missing.items()))
            return

    def _conclude(self, snapshot: PartSnapshot, outcome: Outcome) -> None:
        votes, entry = self._votes, snapshot.entry
        if outcome.name and votes is not None and entry is not None:
            deleted, votes.deleted = len(votes.deleted), []
            self._report(
                r="durable", n=snapshot.number, path=self._directory.at(outcome.name), nbytes=entry.nbytes,
                digest=entry.digest, seconds=snapshot.seconds, deleted=deleted,
                undeleted="; ".join(votes.undeleted[:3]), unlinked=votes.unlinked,
            )  # fmt: skip
        else:
            self._report(r="error", n=snapshot.number, errno=errno.ECANCELED, text=outcome.reason)
        # crash: part.reported
        self._voted.remove(snapshot)
        self._dropped.add(snapshot.number)
        snapshot.release()
        # crash: part.done

    def _may_write(self) -> bool:
        """Whether no other process writes in the directory; an earlier trainer's may still have something to finish."""
        if not self._directory.try_write():
            return False
        if not self._swept:
            self._directory.sweep(self._writer, self._is_over)
            if self._votes is not None:
                self._votes.settle()
            else:
                settle_all(self._directory)
            self._swept = True
        return True

    # --- reports

    def _report(self, **report: Any) -> None:
        self._unsent.append(report)
        self._flush()

    def _tell_progress(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if now - self._told >= _PROGRESS and not self._unsent:
            self._told = now
            self._report(r="progress", n=snapshot.number, written=snapshot.written)

    def _flush(self) -> None:
        """Send what was to be told. A trainer that is stopped, or dead, holds nobody up."""
        while self._unsent:
            try:
                self._reports.send({}, self._unsent[0], timeout=0)
            except RingFull:
                return
            del self._unsent[0]


_ending: list[int] = []


def main(settings: str) -> None:
    """The program of the writing process."""
    options = json.loads(settings)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself, after its trainer
    signal.signal(signal.SIGUSR1, lambda number, _: _ending.append(number))
    os.nice(options["nice"])
    Worker(options).run()
    sys.stderr.flush()
