"""Upload what several ranks have saved together: each writing process its part, and one completes: `RankUploads`.

    part uploaded -> mark `.done` -> all parts are marked -> manifest and list at the URL -> the local list says "done"
                     mark `.failed`: the upload has failed for every rank

The marks of a checkpoint are in `.<name>.<run>.uploads` in the directory of the checkpoints, a file for each part. One
process at a time completes, by a byte of the lock file. docs/internals/checkpoint-protocol.md has the deaths.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from . import index, run_record
from .directory import Directory, remove
from .index import PENDING, UPLOADED, Saved
from .locations import read_regular
from .manifest import MANIFEST
from .ranks import RankDirectory
from .remote import Stopped, without_secrets
from .upload import Ended, Keep, Target

_MARKS: Final = re.compile(r"\.(?P<name>[A-Za-z0-9_][A-Za-z0-9._=+-]{0,254})\.(?P<run>[0-9a-f]{16})\.uploads")
_PART: Final = re.compile(r"rank-(\d{5})\.")
_DONE: Final = ".done"
_FAILED: Final = ".failed"
_MAX_MARK: Final = 4096  # bytes
_DEAD: Final = 3.0
"""Seconds for which a rank must look dead before another one uploads its part."""
_POLLS: Final = (0.02, 1.0)
"""Seconds between two looks at the marks: the first, plus a twentieth of the time waited so far; at most the last."""
_IDLE: Final = 0.05


class Marks:
    """Which parts of one checkpoint are uploaded, and which could not be."""

    def __init__(self, directory: str, entry: Saved) -> None:
        self._path = os.path.join(directory, f".{entry.name}.{entry.writer}.uploads")
        self._parts = {name: (nbytes, changed) for name, nbytes, changed in entry.files}

    def is_done(self, name: str) -> bool:
        """Whether this part, as it is now, is uploaded."""
        nbytes, changed = self._parts[name]
        try:
            return read_regular(Path(self._path, name + _DONE), _MAX_MARK) == b"%d %d" % (nbytes, changed)
        except (OSError, ValueError):
            return False

    def failures(self, attempt: str) -> dict[str, str]:
        """The reasons by part, of this attempt."""
        found = {}
        for name in self._parts:
            with contextlib.suppress(OSError, ValueError):
                data = read_regular(Path(self._path, name + _FAILED), _MAX_MARK)
                which, _, reason = data.decode("utf-8", "replace").partition("\n")
                if which == attempt:
                    found[name] = reason
        return found

    def begin(self, name: str) -> None:
        """An earlier failure counts no more. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, name + _FAILED))

    def done(self, name: str) -> None:
        """The part is uploaded. Raises OSError."""
        self._write(name + _DONE, b"%d %d" % self._parts[name])

    def failed(self, name: str, attempt: str, reason: str) -> None:
        """The part was not uploaded in this attempt. Raises OSError."""
        self._write(name + _FAILED, f"{attempt}\n{reason}".encode()[:2000])

    def _write(self, name: str, data: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._path)
        with contextlib.suppress(FileExistsError):  # another process, which takes us for dead, writes the same
            index.replace(os.path.join(self._path, name), data)


def sweep_marks(directory: Directory) -> None:
    """Remove the marks of what is uploaded, or gone."""
    pending = {(entry.name, entry.writer) for entry in index.read(directory.path) if entry.upload == PENDING}
    for found in directory.names():
        match = _MARKS.fullmatch(found)
        if match is not None and (match["name"], match["run"]) not in pending:
            with contextlib.suppress(OSError):
                remove(directory.at(found))


class _Upload:
    """One checkpoint that is being uploaded.

    own:     this rank's parts that are not uploaded yet
    attempt: the run and the newest checkpoint, as with each new one all that is pending is tried again
    """

    attempt = ""

    def __init__(self, directory: str, entry: Saved, rank: int, world_size: int) -> None:
        self.entry, self.marks = entry, Marks(directory, entry)
        self.owners = {
            name: int(match[1]) % world_size for name, _, _ in entry.files if (match := _PART.match(name)) is not None
        }
        self.own = deque(name for name, owner in self.owners.items() if owner == rank)
        self.others = sorted(
            (name for name, _, _ in entry.files if name not in self.owners), key=lambda name: name == MANIFEST
        )
        self.since, self.next = time.monotonic(), 0.0


class RankUploads:
    """The uploads of one rank's writing process, by a thread that begins with the first of them. As `Uploads`."""

    def __init__(self, url: str, directory: RankDirectory, keep: Keep) -> None:
        self.url, self._directory, self._keep = url, directory, keep
        self._changed = threading.Condition()
        self._uploads: list[_Upload] = []  # the oldest first
        self._ended: deque[Ended] = deque()
        self._completing = False  # byte 3 is ours
        self._dead: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._stop = False

    def add(self, entries: Sequence[Saved]) -> None:
        """Upload what is pending of the local list and there, unless that goes on already."""
        directory = self._directory
        pending = [entry for entry in entries if entry.upload == PENDING and entry.is_there(directory.path)]
        with self._changed:
            known = {upload.entry.identity for upload in self._uploads}
            known |= {ended.entry.identity for ended in self._ended if ended.error is None}
            for entry in pending:
                if entry.identity not in known and not self._stop:
                    self._uploads.append(_Upload(directory.path, entry, directory.rank, directory.world_size))
            places = {entry.identity: at for at, entry in enumerate(entries)}
            self._uploads = sorted(self._uploads, key=lambda upload: places.get(upload.entry.identity, -1))
            for upload in self._uploads:
                upload.attempt = f"{directory.run} {entries[-1].writer} {entries[-1].name}"
            if self._uploads and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shmtensor upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def url_of(self, name: str) -> str:
        """Where a checkpoint is uploaded to, as it is shown."""
        return f"{without_secrets(self.url).rstrip('/')}/{name}"

    def take(self) -> Ended | None:
        """One that has ended; None if there is none now. What is not `noted` is to be noted, and then `settled`."""
        with self._changed:
            return self._ended.popleft() if self._ended else None

    def settled(self, ended: Ended) -> None:
        """What has ended is noted in the local list, or cannot be: other processes may complete others."""
        if ended.error is None and not ended.noted:
            with contextlib.suppress(OSError):
                remove(self._directory.at(f".{ended.entry.name}.{ended.entry.writer}.uploads"))
            # crash: upload.cleared
            self._give_back()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        with self._changed:
            return bool(self._uploads or self._ended)

    def stop(self) -> None:
        """Leave what is not uploaded to other ranks, or to the next run."""
        with self._changed:
            self._stop = True

    # --- the thread

    def _work(self) -> None:
        target: Target | None = None
        while True:
            with self._changed:
                while not self._uploads or self._stop:
                    self._changed.wait()
                uploads = list(self._uploads)
            for upload in uploads:
                if upload not in self._uploads:  # it has ended with another one
                    continue
                try:
                    target = target or Target(self.url, lambda: self._stop, self._keep)
                    self._look(upload, target)
                except BaseException as error:
                    self._fail(upload, error, target)
            behind = next((upload for upload in self._uploads if upload.own), None)
            if behind is not None and target is not None:
                self._put_own(behind, target)
                continue
            with self._changed:
                if not self._stop:
                    self._changed.wait(_IDLE)

    def _put_own(self, upload: _Upload, target: Target) -> None:
        """Upload a part of this rank's."""
        name = upload.own[0]
        try:
            if not upload.marks.is_done(name):
                target.check_free(upload.entry)
                upload.marks.begin(name)
                # crash: upload.own
                target.put_file(self._directory.path, upload.entry, name)
                upload.marks.done(name)
                # crash: upload.part
        except BaseException as error:  # asyncio's CancelledError, too: nobody else ends this upload
            if not isinstance(error, Stopped):
                with contextlib.suppress(OSError):
                    upload.marks.failed(name, upload.attempt, without_secrets(f"{error}"))
            self._fail(upload, error, target)
            return
        upload.own.popleft()

    def _fail(self, upload: _Upload, error: BaseException, target: Target | None) -> None:
        """End an upload with an error; if the server is away, with it all others, each of which would take as long to
        find that out. Other ranks learn it from the marks of this one's parts."""
        others = [each for each in self._uploads if each is not upload]
        self._end(upload, error)
        if target is None or not others or isinstance(error, Stopped) or not target.is_away():
            return
        for each in others:
            if each.own:
                with contextlib.suppress(OSError):
                    each.marks.failed(each.own[0], each.attempt, without_secrets(f"{error}"))
            self._end(each, error)

    def _look(self, upload: _Upload, target: Target) -> None:
        """See whether an upload has ended, or complete it if it is the oldest and that is possible now."""
        now = time.monotonic()
        if now < upload.next:
            return
        first, last = _POLLS
        upload.next = now + min(last, first + (now - upload.since) / 20)
        if self._is_settled(upload):
            return
        for name, reason in upload.marks.failures(upload.attempt).items():
            raise OSError(5, f"{name} was not uploaded: {reason}")
        if upload is not self._uploads[0]:
            return
        missing = [name for name in upload.owners if not upload.marks.is_done(name)]
        if missing and not all(self._is_gone(upload.owners[name]) for name in missing):
            return
        with self._changed:
            if self._completing or self._stop or not self._directory.try_complete():
                return
            self._completing = True
        try:
            if self._is_settled(upload):  # by the one who had the byte
                self._give_back()
                return
            target.check_free(upload.entry)
            for name in missing:
                target.put_file(self._directory.path, upload.entry, name)
                upload.marks.done(name)
            for name in upload.others:
                target.put_file(self._directory.path, upload.entry, name)
            # crash: upload.manifest
            target.add(self._directory.path, upload.entry, index.read(self._directory.path))
        except BaseException:
            self._give_back()
            raise
        self._end(upload, None)  # `settled` gives the byte back

    def _is_settled(self, upload: _Upload) -> bool:
        """Whether another process has completed it; ends it then. Raises OSError if it is not to be uploaded."""
        entry, directory = upload.entry, self._directory
        found = next((each for each in index.read(directory.path) if each.identity == entry.identity), None)
        if directory.is_uploaded(entry) if found is None else found.upload == UPLOADED:  # `keep_last` may be quick
            self._end(upload, None, noted=True)
            return True
        if found is None or found.upload != PENDING:
            raise FileNotFoundError(2, "it was deleted or changed before it was uploaded", entry.name)
        return False

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank is dead, or will not open any more, so that another one uploads its part."""
        directory, now = self._directory, time.monotonic()
        if rank == directory.rank:
            return False
        record = run_record.read(directory.path)
        if record is None or directory.is_alive(rank, record):
            self._dead.pop(rank, None)
            return False
        if record.number == directory.run and rank not in record.writers and directory.has_own_trainer:
            return False  # it will open
        return now - self._dead.setdefault(rank, now) >= _DEAD

    def _give_back(self) -> None:
        with self._changed:
            self._completing = False
            self._directory.end_complete()
            for upload in self._uploads[:1]:  # it is its turn
                upload.next = 0.0

    def _end(self, upload: _Upload, error: BaseException | None, *, noted: bool = False) -> None:
        with self._changed:
            self._uploads.remove(upload)
            if not isinstance(error, Stopped):
                self._ended.append(Ended(upload.entry, self.url_of(upload.entry.name), error, noted))
