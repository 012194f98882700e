"""The saves of one writer: their records, which the writer's threads change, the handles that
`CheckpointWriter.save` returns, the saves that have not ended with what the writing process reports about them, and
a progress bar.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ..endpoints.base import Local
from ..errors import ArgumentError, ForkedError, PeerDied, ResourceError, TimedOut
from ..shielded import CallQueue, Flag
from .ranks import by_state

if TYPE_CHECKING:
    from .slots import Offload

_T = TypeVar("_T")
WAITING: Final = "waiting"
WRITING: Final = "writing"
VOTED: Final = "voted"
DURABLE: Final = "durable"
COMPLETE: Final = "complete"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
REPLACED: Final = "replaced"
_OPEN: Final = (WAITING, WRITING, VOTED)

log = logging.getLogger("shmtensor.checkpoint")


class Durable(NamedTuple):
    """A checkpoint that is safe on disk: the result of `SaveHandle.durable`."""

    path: str
    """Path of the file, or of the directory of shards."""
    nbytes: int
    """Bytes of its files."""
    seconds: float
    """From the beginning of `save` until it was durable; old ones are deleted after that."""
    digest: str
    """xxh3-64 over the digests of its tensors' bytes, hexadecimal; zeros if it is encrypted."""


class Progress(NamedTuple):
    """How far a save is."""

    written: int
    """Bytes of the files that were handed to the kernel."""
    total: int
    """Bytes of the files."""


class _Mutex(_thread.RLock):  # type: ignore[misc]  # final only in typeshed
    """A future's condition whose lock is acquired and released in one C call each. `threading.Condition` does so in
    Python code, where an asynchronous exception could leave it locked for ever."""

    def notify_all(self) -> None:
        """Do nothing: no thread waits on it, see `_Result._wait`."""


class _Result(Local, Future[_T]):
    """A future that a thread of the writer ends. Its callbacks are called in another thread, which may block, and
    without any lock. An exception that ends a wait leaves nothing locked."""

    def __init__(self, callbacks: CallQueue | None) -> None:
        super().__init__()
        self._condition: Any = _Mutex()
        self._callbacks = callbacks
        self._ended = Flag()
        self._pid = os.getpid()

    def _instead(self) -> str:
        return "pass its result"

    def result(self, timeout: float | None = None) -> _T:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _check_here(self) -> None:
        """Raise `ForkedError` in a child that was forked before the future had ended, since it never ends there."""
        if not self.done():
            check_pid(self._pid)

    def _wait(self, timeout: float | None) -> None:
        self._check_here()
        # a callback may ask before `_ended` is set
        if not self.done() and not self._ended.wait(timeout if timeout is None else max(0.0, timeout)):
            raise TimeoutError

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function(future)` when it is done: in the writer's thread for callbacks, one after the other; at once,
        in this thread, if it is done already."""
        self._check_here()
        if self._callbacks is None or self._ended.is_set():
            super().add_done_callback(function)
        else:
            super().add_done_callback(partial(_call_later, self._callbacks, function))

    def set_result(self, result: _T) -> None:
        super().set_result(result)
        self._ended.set()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._ended.set()

    def cancel(self) -> bool:
        """Always fail: a save that was staged cannot be cancelled. True only if it was skipped or replaced."""
        return self.cancelled()

    def give_up(self) -> None:
        """Cancel the future: this save is not written, and `result()` raises `CancelledError`."""
        super().cancel()
        self.set_running_or_notify_cancel()
        self._ended.set()


def check_pid(pid: int) -> None:
    """Raise `ForkedError` unless this is the process that saves."""
    if os.getpid() != pid:
        raise ForkedError(f"this save belongs to process {pid}, which forked this one before it had ended: ask there")


def _call_later(callbacks: CallQueue, function: Callable[[Any], object], future: _Result[Any]) -> None:
    callbacks.put(partial(_call_back, function, future))


def _call_back(function: Callable[[Any], object], future: _Result[Any]) -> None:
    try:
        function(future)
    except BaseException:  # SystemExit, too: it would end the thread, and later callbacks would not be called
        log.exception("a callback of %r failed", future)


class Outcome(_Result[Durable]):
    """A future that knows whether the caller has seen its error."""

    def __init__(self, callbacks: CallQueue | None = None) -> None:
        super().__init__(callbacks)
        self.error_seen = False
        """Whether the caller got the error, by `result`, `exception` or a callback."""

    def result(self, timeout: float | None = None) -> Durable:
        try:
            return super().result(timeout)
        except BaseException as error:
            if error is self._exception:  # else it is asynchronous, or a time-out
                self.error_seen = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.error_seen = True
        return error

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        super().add_done_callback(function)
        self.error_seen = True

    @property
    def error(self) -> BaseException | None:
        """The exception, if it has failed. Reading it does not set `error_seen`."""
        return self._exception if self._ended.is_set() else None


class Save:
    """One save as its writer's threads know it. `SaveHandle` shows it to the caller.

    callbacks: the thread that calls `add_done_callback` functions; None: the thread in which the future ends.
    """

    def __init__(
        self, name: str, path: str, total: int, alias: str = "", callbacks: CallQueue | None = None, *,
        uploads: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.path, self.total, self.alias = name, path, total, alias
        self.uploads = uploads
        """Whether it is uploaded when it is durable."""
        self.number = 0
        """Which save of its writer it is, from 1; 0 until it has begun."""
        self.staged: _Result[int] = _Result(callbacks)
        self.durable = Outcome(callbacks)
        self.uploaded: _Result[str] = _Result(callbacks)
        self.asked_to_yield: list[Save] = []
        """With `busy="replace"`: earlier saves that the writing process was asked to drop for this one."""
        self.offload: Offload | None = None
        """The copies from devices, if there are any."""
        self.waited = 0.0
        """Seconds that it waited for room."""
        self.written = 0
        """Bytes of the files that were handed to the kernel."""
        self.last_missing: dict[int, str] = {}
        """Ranks whose parts were missing in the last report, with the reason for each."""
        self.status = WAITING
        self.pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def missing(self) -> dict[int, str]:
        """Ranks whose parts are missing, as last reported; empty unless this rank's part is durable."""
        return dict(self.last_missing) if self.status == VOTED else {}

    def advance(self, written: int) -> None:
        """Note how many bytes are written."""
        with self._lock:
            if self.status in (WAITING, WRITING):
                self.status, self.written = WRITING, written

    def vote(self) -> None:
        """Note that this rank's part is durable."""
        with self._lock:
            if self.status in (WAITING, WRITING):
                self.status, self.written = VOTED, self.total

    def finish(self, status: str, result: Durable | BaseException | None = None) -> bool:
        """End the save: set the status and the futures. False if it had ended before. Call it without holding any lock.

        result: of `durable`, a value or an exception; None cancels the futures that are not done.
        """
        with self._lock:
            if self.status not in _OPEN:
                return False
            self.status = status
        if isinstance(result, Durable):
            self.written = self.total
            self.path, self.name = result.path, os.path.basename(result.path)
            self.durable.set_result(result)
        elif result is not None:
            self.durable.set_exception(result)
            self.uploaded.set_exception(result)
        else:
            for future in (self.staged, self.durable, self.uploaded):
                if not future.done():
                    future.give_up()
        return True

    def end_upload(self, result: str | Exception) -> None:
        """End the upload, with the URL or the error."""
        if isinstance(result, str):
            self.uploaded.set_result(result)
        else:
            self.uploaded.set_exception(result)


class SaveHandle(Local):
    """One save.

    `staged` is done when the state may be changed again: when `save` returns, or, if part of the state lies on a
    device, when the copies from there are complete; its result is the number of bytes that were copied. `durable` is
    done when the checkpoint is safe on disk; its result is a `Durable`, its exception says what went wrong. A save
    that was skipped or replaced (`busy=`) has cancelled futures: `status` says which. In a child that was forked before
    the save had ended, what would wait or be out of date raises `ForkedError`.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path, shmtensor.CheckpointWriter(path) as writer:
    ...     handle = writer.save({"w": np.ones(1000), "step": 7})
    ...     handle.staged.done(), handle.durable.result(60).path == handle.path, handle.status
    (True, True, 'durable')
    """

    def __init__(self, save: Save) -> None:
        self._save = save

    @property
    def _now(self) -> Save:
        """The current state of the save. Raises `ForkedError` in a forked child, which does not see it."""
        if self._save.status in _OPEN:
            check_pid(self._save.pid)
        return self._save

    @property
    def name(self) -> str:
        """The checkpoint's name in its directory. With `rank=`, `-2` may be added until it is durable."""
        return self._save.name

    @property
    def path(self) -> str:
        """Where it is once it is durable."""
        return self._save.path

    @property
    def number(self) -> int:
        """Which save of its writer it is, from 1; 0 if it was skipped."""
        return self._save.number

    @property
    def waited(self) -> float:
        """With `busy="block"` or `"replace"`: seconds that `save` waited for room."""
        return self._save.waited

    @property
    def staged(self) -> Future[int]:
        """Done when the state may be changed; its result is the number of bytes that were copied."""
        return self._save.staged

    @property
    def durable(self) -> Future[Durable]:
        """Done when the checkpoint is safe on disk, or has failed."""
        return self._save.durable

    @property
    def uploaded(self) -> Future[str]:
        """With `upload=`: done when the checkpoint is at its URL, and listed there; its result is that URL. If it
        failed, the checkpoint is durable nevertheless, and is uploaded after the next save, or by the next
        `CheckpointWriter` of the directory. Raises `ArgumentError` without `upload=`."""
        if not self._save.uploads:
            raise ArgumentError("this CheckpointWriter uploads nothing: pass upload=, the URL of a directory")
        return self._save.uploaded

    @property
    def status(self) -> str:
        """`"waiting"`, `"writing"`, `"durable"`, `"complete"`, `"failed"`, `"skipped"` or `"replaced"`.

        `"voted"`, with `rank=`: this rank's part is durable, and other ranks' are not yet: `missing` has those.
        `"complete"`: it has its name and can be loaded, but the disk did not confirm it: `durable` has the error.
        """
        return self._now.status

    @property
    def replaced(self) -> tuple[str, ...]:
        """With `busy="replace"`: names of the saves that were dropped for this one."""
        return tuple(save.name for save in self._save.asked_to_yield if save.status == REPLACED)

    @property
    def missing(self) -> dict[int, str]:
        """With `rank=`, once this rank's part is durable: the ranks whose parts are missing, as last seen. Each is
        `"late"` (its processes live), `"not open"` (it has not opened its `CheckpointWriter`), `"closed"` (its
        writer is being closed, and saves no more) or `"dead"` (it has no process any more)."""
        return self._now.missing

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait until the state was copied from the device; the host does not wait.

        Call it after `save(..., ordered=False)`, before the state is changed on that stream. For a state in host memory
        it does nothing.

        Args:
            stream: a `torch.cuda.Stream`; None: the current one of each device that the state lies on.
        """
        if self._save.offload is not None:
            self._save.offload.follow(stream)

    @property
    def progress(self) -> Progress:
        """Bytes written and bytes in all. If the writing process is restarted, it may start again from 0."""
        save = self._now
        return Progress(save.total if save.status in (DURABLE, COMPLETE) else save.written, save.total)

    def _instead(self) -> str:
        return "pass its path"

    def __repr__(self) -> str:
        save = self._save
        return f"<SaveHandle {save.name!r} {save.status} {save.written} of {save.total} bytes>"


__all__ = ["CancelledError", "Durable", "Outcome", "Progress", "Save", "SaveHandle"]


ATTEMPTS: Final = 3
"""Deaths of the writing process during a save after which the save fails."""

_CHECK_INTERVAL: Final = 0.25
"""Seconds after which a wait checks again whether its caller has abandoned it."""
_LATE: Final = 30.0
"""Seconds after which the log names the ranks whose parts are missing."""


def _is_unseen(save: Save) -> bool:
    return not save.durable.error_seen


class SavesInFlight:
    """Saves by number. Thread-safe; the thread of `ProcessHandle` calls the methods named `on_...`."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._changed = threading.Condition()
        self._saves: dict[int, Save] = {}
        self._deaths: dict[int, int] = {}
        self._failed: list[Save] = []
        self._next = 1
        self._older = ""  # processes of an earlier run that the oldest waits for
        self._instead: dict[int, str] = {}  # what ranks have saved whose parts it waits for
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
            self._older, self._instead = "", {}
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
            while True:
                if not holds():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    uploads = f" and {len(self._uploading)} uploaded" if self._uploading else ""
                    raise TimedOut(f"{len(self._saves)} checkpoints are still being written{uploads}{self._awaited()}")
                if is_abandoned():
                    return False
                self._changed.wait(_CHECK_INTERVAL if left is None else min(left, _CHECK_INTERVAL))

    def _awaited(self) -> str:
        """Text for messages: the ranks whose parts are missing."""
        missing: dict[int, str] = {}
        for save in self._saves.values():
            missing |= save.missing
        if missing:
            return f": the parts of other ranks are missing ({by_state(missing, self._instead)})"
        return f": processes of an earlier run are still at work: {self._older}" if self._older else ""

    def unreported(self) -> list[tuple[Save, BaseException]]:
        """Failed saves whose error the caller has not seen (`Outcome.error_seen`), with the error."""
        with self._changed:
            self._failed = failed = list(filter(_is_unseen, self._failed))
        return [(save, error) for save in failed if (error := save.durable.error) is not None]

    def live_numbers(self) -> dict[str, Any]:
        """For a new writing process: which of the numbers below `next` have not ended."""
        with self._changed:
            uploading = sorted((number, save.name) for number, save in self._uploading.items())
            return {"next": self._next, "live": sorted(self._saves), "uploading": uploading}

    @property
    def uploading(self) -> int:
        """How many saves are durable and not uploaded yet."""
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
        if kind == "record":
            logging.getLogger(report["logger"]).log(report["level"], "%s", report["text"])
            return
        if kind == "retained":
            self.deleted += report["deleted"]
            return
        if kind == "blocked":
            log.warning(
                "saves wait since %g s for the process of an earlier CheckpointWriter, which writes or uploads: %s",
                report["seconds"],
                report["by"] or "it cannot be seen from here",
            )
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
            url = report.get("url")  # without a local copy: it is uploaded, too
            if url and report["unlisted"]:
                log.warning("%s is durable, but its directory does not list it: %s", url, report["unlisted"])
            result = Durable(url or report["path"], report["nbytes"], report["seconds"], report["digest"])
            self.finish(number, DURABLE, result)
            if url:
                self.uploaded += 1
                self._end_upload(number, url)
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
            self._older, self._instead = report["older"], dict(report["instead"])
            if time.monotonic() - self._voted.get(number, math.inf) >= _LATE:
                self._voted[number] = math.inf
                log.warning("%s waits%s", save.path, self._awaited())

    def on_death(self, code: int) -> dict[str, Any]:
        """Note that the writing process died: a save that it was writing is tried again, `ATTEMPTS` times in all.

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
        """Fail every save: there is no writing process, and no other one will be started."""
        for save in self.in_flight:
            self.finish(save.number, FAILED, PeerDied(f"checkpoint {save.path} was not written: {error}"))
        for number, save in list(self._uploading.items()):
            self._end_upload(number, PeerDied(f"checkpoint {save.path} is durable, and was not uploaded: {error}"))


class Bar:
    """A line per save in flight, on standard error. Does nothing unless `shown`, or once nothing can be written
    there: a terminal that is gone fails no save."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._progress: Any = None
        self._tasks: dict[int, Any] = {}

    def update(self, save: Save) -> None:
        """Draw how far a save is; remove its line when it has ended."""
        if not self._shown:
            return
        with self._drawing():
            over = save.status not in (WAITING, WRITING)
            if not over:
                self._draw(save)
            elif self._tasks.pop(save.number, None) is not None and not self._tasks:
                self._stop()

    def close(self) -> None:
        """Remove every line."""
        with self._drawing():
            self._tasks.clear()
            self._stop()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (OSError, ValueError):  # ValueError: it was closed
                self._shown = False

    def _draw(self, save: Save) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._progress.start()
        if save.number not in self._tasks:
            self._tasks[save.number] = self._progress.add_task(save.name, total=save.total)
        self._progress.update(self._tasks[save.number], completed=save.written, refresh=True)

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
