"""The writing process: receives snapshots and makes durable files of them, one after the other.

Started by `process_handle.py`, once per `CheckpointWriter`, and again if it dies. It outlives its trainer until
everything that was staged is written. Never imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any, Final

from ..endpoints.message import Message
from ..endpoints.workqueue import Producer
from ..errors import RingFull, ShmTensorError, TimedOut
from . import index
from .directory import Directory, Keep
from .index import UPLOADED, Saved
from .keys import MasterKey
from .output import Disk
from .process_handle import Orders, results_channel
from .ranks import RankDirectory, Votes, finish_older_runs
from .remote import url_of, without_secrets
from .run_record import Outcome
from .slots import ABANDON, HEAD, Taker
from .snapshot import WRITES, PartSnapshot, Snapshot, UrlSnapshot, reason_of
from .upload import Ended, RankUploads, Target, Uploads, explained, sweep_marks

_CHECK_INTERVAL: Final = 1.0
_PAUSE: Final = 0.05
"""Seconds between two checks whether the writing process of an earlier trainer has finished."""
_LEAVING_INTERVAL: Final = 0.005
"""Seconds between two checks whether the trainer has left."""
_LAST_REPORTS_TIMEOUT: Final = 10.0
"""Seconds to wait at the end for a trainer that lives and does not receive reports."""
_BLOCKED: Final = 30.0
"""Seconds to wait for the writing process of an earlier trainer before it is reported."""
_VOTES_INTERVAL: Final = 0.02
"""Seconds between two checks of the votes of other ranks."""
_REFUSED_INTERVAL: Final = 0.5
"""Seconds between two attempts to note that a checkpoint is given up."""
_AWAITED_INTERVAL: Final = 1.0
"""Seconds between two reports of the ranks whose parts are missing."""
_PROGRESS_INTERVAL: Final = 0.05
"""Seconds between two reports of the progress of a save."""
_PATIENCE: Final = 10.0
"""Seconds to wait for the ranks' mutex."""


_MOST_RECORDS: Final = 100
_MOST_TEXT: Final = 2000


class Records(logging.Handler):
    """Collects log records and warnings of all threads of this process until they are reported: the trainer logs them.

    Only records of the library's loggers: those of other libraries may contain requests with their signatures. Of many
    records the newest are kept, and of long ones the beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_RECORDS)

    def install(self) -> None:
        """Receive records from now on."""
        logging.captureWarnings(capture=True)
        for name in ("shmtensor", "py.warnings"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = without_secrets(self.format(record)).strip()
            self._kept.append({"logger": record.name, "level": record.levelno, "text": text[:_MOST_TEXT]})
        except Exception:
            self.handleError(record)

    def take(self) -> dict[str, Any] | None:
        """The oldest record, or None."""
        return self._kept.popleft() if self._kept else None


class _Reports(Producer):
    """The sender of reports to the trainer, which may have left."""

    _traits = replace(Producer._traits, counts_lost=False)


class Worker:
    """The state of the writing process."""

    def __init__(self, settings: dict[str, Any], orders: Orders, master: MasterKey | None = None) -> None:
        self._settings, self._orders, self._master = settings, orders, master
        self._records = Records()
        self._records.install()
        self._writer: str = settings["writer"]
        self._keep = Keep(settings["keep_last"], settings["keep_every"], settings["keep_best"])
        self._directory, self._votes = self._open(settings, self._keep)
        self._voted: list[PartSnapshot] = []  # durable parts that wait for other ranks, oldest first
        self._awaited = self._refused = 0.0
        self._has_all = False  # the trainer has closed or died, and all that it staged is written
        self._snapshots: dict[int, Snapshot] = {}
        self._strays: dict[int, list[Message]] = {}  # chunks of snapshots whose head has not come yet
        self._dropped: set[int] = set()
        self._unsent: list[dict[str, Any]] = []
        self._swept = False
        self._uploads: Uploads | RankUploads | None = None
        self._awaited_uploads: dict[Any, int] = {}  # numbers of saves whose upload the trainer waits for; 0: no more
        self._target: Target | None = None  # of saves without a local copy, once one is sent
        if settings["upload"] and settings["local"]:
            self._directory.spares_pending = True
            keep = self._keep._replace(last=settings["upload_keep_last"])
            if isinstance(self._directory, RankDirectory):
                self._uploads = RankUploads(settings["upload"], self._directory, keep)
            else:
                self._uploads = Uploads(settings["upload"], self._directory.path, keep)
        self._progress_reported = 0.0
        self._blocked = 0  # how often it has waited for the process of an earlier trainer
        self._disk = Disk(WRITES)
        self._reports = _Reports(results_channel(settings["channel"]), slots=64, slot_bytes=64, full="block")
        self._taker = Taker(settings["channel"])

    @staticmethod
    def _open(settings: dict[str, Any], keep: Keep) -> tuple[Directory, Votes | None]:
        """The directory, and the votes if several ranks save into it."""
        if "run" not in settings:
            return Directory(settings["directory"]), None
        directory = RankDirectory(
            settings["directory"], settings["rank"], settings["world_size"], settings["writer"], settings["run"]
        )
        return directory, Votes(directory, keep)

    def run(self) -> None:
        """Work until the trainer has closed or died and everything that it staged is finished."""
        with contextlib.suppress(OSError):  # if it fails, each save reports why
            self._may_write()
        self._report(r="ready")
        # crash: worker.ready
        messages = self._taker.take_first()
        while True:
            for message in messages:
                self._take_in(message)
            messages.clear()
            self._flush()
            self._report_records()
            snapshot = self._current()
            if snapshot is not None:
                self._work_on(snapshot)
            elif self._is_sending():
                if self._taker.over:  # then it does not wait for messages below
                    time.sleep(_VOTES_INTERVAL)
            elif self._taker.over or self._is_alone():
                messages = [] if self._taker.over else self._taker.take_first()  # all that a dead trainer has left
                if messages:
                    continue
                self._drop_all()
                self._has_all = True
                if not self._voted and not self._uploads_alone():
                    break
                if not self._voted:
                    self._end_parts()  # uploads may take long
                time.sleep(_VOTES_INTERVAL)
            self._check_votes()
            self._refuse_again()
            self._check_uploads()
            is_polling = self._voted or self._is_sending() or (self._uploads is not None and self._uploads.busy)
            messages = self._taker.take(
                0 if self._current() is not None else _VOTES_INTERVAL if is_polling else _CHECK_INTERVAL
            )
        self._drop_all()
        with contextlib.suppress(OSError):
            if self._directory.try_write():
                self._directory.sweep(self._writer, lambda number: True)
        self._report_records()
        # crash: worker.finished
        self._report(r="over")  # the trainer leaves when it receives this, and then waits for our end
        deadline = time.monotonic() + _LAST_REPORTS_TIMEOUT
        while self._unsent and self._trainer_is_connected() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            self._flush()
        # crash: worker.over
        self._wait_to_be_last(deadline)
        self._reports.close()
        self._taker.close()
        if not self._settings["upload"]:
            self._directory.close()  # else its lock ends with the process, and with it the thread that uploads

    def _wait_to_be_last(self, deadline: float) -> None:
        """Wait until this process is the last member of both channels: the last one removes them.

        The trainer leaves them before it waits for our end. If it dies instead, the kernel drops its locks one by one,
        so that it may seem dead on one channel and alive on the other.
        """
        while self._trainer_is_connected() or not self._taker.is_alone:
            if time.monotonic() > deadline:
                return
            time.sleep(_LEAVING_INTERVAL)

    def _trainer_is_connected(self) -> bool:
        """Whether the trainer is still a member of the channel of reports."""
        try:
            self._reports.wait_for_consumers(1, timeout=0)
        except TimedOut:
            return False
        return True

    def _is_alone(self) -> bool:
        """Whether the trainer closes, or died before this process could join its channel."""
        return self._orders.is_closing or not self._trainer_is_connected()

    def _current(self) -> Snapshot | None:
        """The oldest snapshot, if there is something to do for it now."""
        oldest = self._snapshots.get(min(self._snapshots, default=0))
        return oldest if oldest is not None and oldest.can_step else None

    def _is_sending(self) -> bool:
        """Whether a thread sends the oldest snapshot to its URL."""
        oldest = self._snapshots.get(min(self._snapshots, default=0))
        if not isinstance(oldest, UrlSnapshot) or not oldest.is_sending:
            return False
        self._report_progress(oldest)
        return True

    def _snapshot_of(self, head: Message) -> Snapshot:
        if self._votes is not None:
            return PartSnapshot(head, self._votes, self._master)
        if not self._settings["local"]:
            return UrlSnapshot(head, self._open_target, self._settings["upload"], self._disk)
        return Snapshot(head, self._master)

    def _open_target(self) -> Target:
        """The URL of saves without a local copy. Called in the thread that sends."""
        if self._target is None:
            self._target = Target(self._settings["upload"], lambda: False, self._keep)
        return self._target

    def _take_in(self, message: Message) -> None:
        """Add a received message to its snapshot, or carry out an `abandon`."""
        kind, number = message.meta["k"], message.meta["n"]
        if kind == ABANDON:
            self._abandon(number, force=message.meta["force"])
            # crash: abandon.done
            message.release()
        elif self._is_over(number):
            message.release()
        elif kind == HEAD:
            snapshot = self._snapshots[number] = self._snapshot_of(message)
            if message.attempt > 1:
                snapshot.staged = snapshot.was_recorded(self._directory, self._writer)
            for stray in self._strays.pop(number, ()):
                snapshot.add(stray)
        elif number in self._snapshots:
            self._snapshots[number].add(message)
        else:
            self._strays.setdefault(number, []).append(message)

    def _is_over(self, number: int) -> bool:
        """Whether a save has ended, in this process or, as the trainer reported, in an earlier one."""
        if number in self._dropped:
            return True
        return number < self._settings["next"] and number not in self._settings["live"]

    def _abandon(self, number: int, *, force: bool) -> None:
        """Drop a snapshot. Without `force`, one that is being written already goes on."""
        snapshot = self._snapshots.get(number)
        if snapshot is not None and (force or not snapshot.begun):
            self._report(r="replaced", n=number)  # first: if we die at the next step, the next process finds it ended
            self._refuse(snapshot, "its save was taken back")
            self._drop(snapshot)
        elif snapshot is None and force:
            self._dropped.add(number)
            for stray in self._strays.pop(number, ()):
                stray.release()

    def _drop_all(self) -> None:
        """Drop the snapshots that the trainer was copying when it died."""
        for snapshot in list(self._snapshots.values()):
            self._refuse(snapshot, "its trainer died inside save")
            self._drop(snapshot)

    def _refuse(self, snapshot: Snapshot, reason: str) -> None:
        """Give up the checkpoint of a part that does not count."""
        if self._votes is None:
            return
        with contextlib.suppress(OSError):
            if self._may_write() and self._votes.refuse(snapshot.name, reason, _PATIENCE) is not None:
                return
        self._votes.refuse_later(snapshot.name, reason)

    def _refuse_again(self) -> None:
        """Try again what had no room. If this process ends before, others see that this rank is gone."""
        if self._votes is None or not self._votes.refused or time.monotonic() - self._refused < _REFUSED_INTERVAL:
            return
        self._refused = time.monotonic()
        with contextlib.suppress(OSError):
            if self._may_write():
                self._votes.refuse_again()

    def _drop(self, snapshot: Snapshot) -> None:
        self._dropped.add(snapshot.number)
        del self._snapshots[snapshot.number]
        snapshot.discard()

    def _work_on(self, snapshot: Snapshot) -> None:
        """One step: begin, write a chunk, or finish."""
        try:
            if not snapshot.begun:
                if not self._may_write():
                    self._wait_for_predecessor()
                    return
                self._report(r="begun", n=snapshot.number)
                entry = snapshot.begin(self._directory, self._writer)
                if entry is None:
                    return
            elif not snapshot.is_written:
                snapshot.write_next(self._disk)
                self._report_progress(snapshot)
                return
            else:
                entry = snapshot.complete()
                if entry is None:
                    return
            snapshot.commit(entry)
        except (OSError, ShmTensorError) as error:
            self._fail(snapshot, error)
            return
        if isinstance(snapshot, PartSnapshot):
            self._wait_for_others(snapshot)
            return
        # crash: finish.before
        snapshot.release_chunks()  # before the report, after which the trainer expects room for the next one
        # crash: finish.released
        deleted, failed = snapshot.retain(self._keep)
        unsynced = snapshot.unsynced
        more: dict[str, Any] = {}
        if isinstance(snapshot, UrlSnapshot):  # no death between `durable` and `uploaded`
            more = {"url": snapshot.url_of(snapshot.name), "unlisted": snapshot.unlisted}
        if unsynced is None:
            self._report(
                r="durable", n=snapshot.number, path=self._directory.at(snapshot.name), nbytes=entry.nbytes,
                digest=entry.digest, seconds=snapshot.seconds, deleted=len(deleted), undeleted="; ".join(failed[:3]),
                unlinked=snapshot.unlinked, **more,
            )  # fmt: skip
        else:
            self._report(r="complete", n=snapshot.number, errno=unsynced.errno or 0, text=str(unsynced))
        # crash: finish.reported
        del self._snapshots[snapshot.number]
        self._dropped.add(snapshot.number)
        snapshot.release()
        # crash: finish.done
        self._begin_upload(entry)

    def _wait_for_predecessor(self) -> None:
        """Pause while the writing process of an earlier trainer is at work; say so once if that lasts."""
        self._blocked += 1
        if self._blocked == round(_BLOCKED / _PAUSE):
            self._report(r="blocked", seconds=_BLOCKED, by=self._directory.predecessor())
        time.sleep(_PAUSE)

    def _fail(self, snapshot: Snapshot, error: OSError | ShmTensorError) -> None:
        snapshot.discard_files()
        if isinstance(snapshot, PartSnapshot) and snapshot.entry is not None:
            snapshot.fail(error)  # reported once its part does not count
            self._hold(snapshot)
            return
        self._report_error(snapshot, error)
        self._refuse(snapshot, reason_of(error))
        self._drop(snapshot)

    def _report_error(self, snapshot: Snapshot, error: OSError | ShmTensorError) -> None:
        self._report(r="error", n=snapshot.number, errno=getattr(error, "errno", None) or 0, text=reason_of(error))

    # --- several ranks

    def _wait_for_others(self, snapshot: PartSnapshot) -> None:
        # crash: part.before
        self._hold(snapshot)
        self._report(r="voted", n=snapshot.number)
        self._check_votes()

    def _hold(self, snapshot: PartSnapshot) -> None:
        """Keep the head alone, until there is an outcome."""
        snapshot.release_chunks()
        # crash: part.released
        snapshot.drop_log()
        del self._snapshots[snapshot.number]
        self._voted.append(snapshot)

    def _check_votes(self) -> None:
        """Check the oldest first: a decision about a checkpoint follows those about earlier ones."""
        for snapshot in list(self._voted):
            try:
                found = snapshot.poll(alone=self._taker.over or self._is_alone())
            except (OSError, ShmTensorError) as error:
                if not snapshot.fail(error):
                    snapshot.refuse_later()
                    self._conclude(snapshot, None)
                return
            if isinstance(found, Outcome):
                self._conclude(snapshot, found)
                continue
            if found is not None and found.missing and self._has_all:
                self._end_parts()  # others may wait for one, too
            if found is not None and time.monotonic() - self._awaited >= _AWAITED_INTERVAL and not self._unsent:
                self._awaited = time.monotonic()
                older = "" if found.missing or self._votes is None else self._votes.older_writers()
                self._report(
                    r="awaited", n=snapshot.number, ranks=sorted(found.missing.items()), older=older,
                    instead=sorted(found.instead.items()),
                )  # fmt: skip
            return

    def _end_parts(self) -> None:
        """Record once that no further part of this rank will come."""
        if isinstance(self._directory, RankDirectory) and not self._directory.has_ended:
            with contextlib.suppress(OSError):  # tried again
                self._directory.end()

    def _conclude(self, snapshot: PartSnapshot, outcome: Outcome | None) -> None:
        """Report the outcome, or its own failure; None: others may still commit it."""
        votes, entry = self._votes, snapshot.entry
        name = "" if outcome is None else outcome.name
        if name and votes is not None and entry is not None:
            deleted, votes.deleted = len(votes.deleted), []
            self._report(
                r="durable", n=snapshot.number, path=self._directory.at(name), nbytes=entry.nbytes,
                digest=entry.digest, seconds=snapshot.seconds, deleted=deleted,
                undeleted="; ".join(votes.undeleted[:3]), unlinked=votes.unlinked,
            )  # fmt: skip
        elif snapshot.failure is not None:
            self._report_error(snapshot, snapshot.failure)
        elif outcome is not None:
            self._report_error(snapshot, OSError(errno.ECANCELED, outcome.reason))
        # crash: part.reported
        self._voted.remove(snapshot)
        self._dropped.add(snapshot.number)
        snapshot.release()
        # crash: part.done
        if name and self._uploads is not None:
            entries = index.read(self._directory.path)
            self._uploads.add(entries)
            self._await_upload(snapshot.number, self._entry_of(name, entries), name)

    def _may_write(self) -> bool:
        """Become the only process that writes in the directory; False while that of an earlier trainer does."""
        if not self._directory.try_write():
            return False
        if not self._swept:
            self._directory.sweep(self._writer, self._is_over)
            if self._votes is not None:
                self._votes.finish_older_runs()
            else:
                finish_older_runs(self._directory, self._writer)
            sweep_marks(self._directory)
            self._swept = True
            self._resume_uploads()
        return True

    # --- uploads

    def _resume_uploads(self) -> None:
        """Continue the uploads of an earlier process: report the finished ones, and upload what is pending."""
        if self._uploads is None:
            return
        entries = index.read(self._directory.path)
        own = {entry.number: entry for entry in entries if entry.writer == self._writer}
        for number, name in self._settings["uploading"]:
            entry = own.get(number) if self._votes is None else self._entry_of(name, entries)
            self._await_upload(number, entry, name)
        live = {(self._writer, number) for number in self._settings["live"]}  # committed first, and uploaded then
        self._uploads.add([each for each in entries if (each.writer, each.number) not in live])

    def _begin_upload(self, entry: Saved) -> None:
        """Upload what has become durable, and what is pending from before."""
        if self._uploads is None:
            return
        entries = index.read(self._directory.path)
        self._uploads.add(entries)
        found = next((each for each in entries if each.identity == entry.identity), None)
        self._await_upload(entry.number, found, entry.name)

    def _entry_of(self, name: str, entries: list[Saved]) -> Saved | None:
        """The entry of a checkpoint of this run."""
        run = f"{self._settings['run']:016x}"
        return next((each for each in entries if (each.name, each.writer) == (name, run)), None)

    def _await_upload(self, number: int, entry: Saved | None, name: str) -> None:
        """Report the upload of this save, for which the trainer waits, when it has ended, or now if it has."""
        if self._uploads is None:
            return
        is_noted = entry is None and isinstance(self._directory, RankDirectory) and self._directory.was_uploaded(name)
        if is_noted or (entry is not None and entry.upload == UPLOADED):
            self._report(r="uploaded", n=number, url=url_of(self._uploads.url, name))
        elif entry is None or not entry.is_there(self._directory.path):
            text = f"{name} is durable, and was deleted or changed before it was uploaded"
            self._report(r="unuploaded", n=number, text=text)
        else:
            self._awaited_uploads[entry.identity] = number

    def _uploads_alone(self) -> bool:
        """Without a trainer: whether there is anything to upload. What is left goes to the process of the next trainer,
        if there is one, and of this one, if it is closing: it has waited for its own uploads, not for earlier ones'."""
        if self._uploads is None:
            return False
        self._check_uploads()
        if not self._directory.has_trainer:
            return self._uploads.busy
        self._uploads.stop()
        return False

    def _check_uploads(self) -> None:
        """Note and report the uploads that have ended."""
        if self._uploads is None:
            return
        if not self._swept:  # the process of an earlier trainer was there
            try:
                self._may_write()
            except OSError as error:
                for number, _ in self._settings["uploading"]:
                    self._report(r="unuploaded", n=number, text=f"a durable checkpoint was not uploaded: {error}")
                self._settings["uploading"] = []
        while (ended := self._uploads.take()) is not None:
            failed = ended.error
            with self._directory.deciding(_PATIENCE) as mine:
                if failed is None and not ended.noted:
                    try:
                        if not mine:
                            raise OSError(errno.EBUSY, "another rank's process does not let go of the directory")
                        self._directory.record_uploaded(ended.entry)
                    except OSError as error:
                        failed = error
                # crash: upload.recorded
                self._uploads.release(ended)
                self._report_upload(ended, failed)
                if failed is not None or ended.noted:
                    continue
                # crash: upload.reported
                deleted, _ = self._directory.retain(self._keep)
            if deleted:
                self._report(r="retained", deleted=len(deleted))
            # crash: upload.retained

    def _report_upload(self, ended: Ended, failed: BaseException | None) -> None:
        entry, uploads = ended.entry, self._uploads
        number = self._awaited_uploads.pop(entry.identity, None)
        if uploads is None or (number is None and self._is_reported_later(ended)):
            return
        if failed is None:
            self._report(r="uploaded", n=number or 0, url=ended.url)
        else:
            self._awaited_uploads[entry.identity] = 0
            self._report(r="unuploaded", n=number or 0, text=explained(entry, uploads.url, failed))

    def _is_reported_later(self, ended: Ended) -> bool:
        """Whether this save, which the trainer waits for, or another rank's process reports what has ended."""
        return self._votes is not None and (ended.noted or ended.entry.writer == f"{self._settings['run']:016x}")

    # --- reports

    def _report(self, **report: Any) -> None:
        self._unsent.append(report)
        self._flush()

    def _report_progress(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if now - self._progress_reported >= _PROGRESS_INTERVAL and not self._unsent:
            self._progress_reported = now
            self._report(r="progress", n=snapshot.number, written=snapshot.written)

    def _report_records(self) -> None:
        while not self._unsent and (record := self._records.take()) is not None:
            self._report(r="record", **record)

    def _flush(self) -> None:
        """Send pending reports, without waiting for a trainer that is stopped or dead."""
        while self._unsent:
            try:
                self._reports.send({}, self._unsent[0], timeout=0)
            except RingFull:
                return
            del self._unsent[0]


def main() -> None:
    """The program of the writing process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself, after its trainer
    orders = Orders(0, closefd=False)
    settings, secret = orders.read_all()
    orders.forget()
    os.nice(settings["nice"])
    Worker(settings, orders, MasterKey.load(secret) if secret else None).run()
    sys.stderr.flush()
