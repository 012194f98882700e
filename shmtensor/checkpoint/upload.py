"""Upload durable checkpoints to a URL: `Uploads`, in the writing process.

    saved:     the entry in the list of saves says `upload = "pending"`, before the files get their name
    copied:    every file is at the URL, with its size; a file appears there as a whole
    listed:    the list of saves at the URL names it: only now does a reader take it for the newest
    pruned:    what `upload_keep_last` does not keep is deleted at the URL
    uploaded:  the local list says `upload = "done"`, and `keep_last` may delete the local copy

Each step may be repeated, so that a death in between leaves an entry that is pending, and the next writing process
begins with the oldest of them. One thread copies, one checkpoint after the other, and only reads; the writing process's
main thread changes the local list, as the holder of the directory's lock.

Of a checkpoint that several ranks save, each writing process uploads its part, and one completes: `RankUploads`.

    part uploaded -> mark `.done` -> all parts are marked -> manifest and list at the URL -> the local list says "done"
                     mark `.failed`: the upload has failed for every rank

The marks of a checkpoint are in `.<name>.<run>.uploads` in the directory of the checkpoints, a file for each part. One
process at a time completes, by a byte of the lock file. docs/internals/checkpoint-protocol.md has the deaths.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ..errors import ArgumentError, CheckpointError, ResourceError
from . import index, run_record
from .description import digest, text
from .directory import Directory, Keep, remove, superfluous
from .index import PENDING, UPLOADED, Saved
from .locations import location, read_regular
from .manifest import MANIFEST
from .ranks import RankDirectory
from .remote import ONLY_READ, REDIS, NoAnswer, RemotePath, url_of, within, without_secrets
from .threads import Stopped

PART: Final = 8 << 20
"""Bytes of a part, where the file system uploads in parts."""
AT_ONCE: Final = 4
"""Parts that are on their way at once: 32 MiB are in memory."""
_PARTS: Final = 10_000
"""Most parts of a file, on S3."""
_RENAMED: Final = ("sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "webhdfs", "ftp", "dir")
"""File systems where a file is visible while it is written: it gets its name afterwards."""

log = logging.getLogger("shmtensor.checkpoint")


def check_writable(path: RemotePath) -> None:
    """Raise `ArgumentError` if nothing can be written where a URL leads to."""
    if set(path.protocols) & set(ONLY_READ):
        raise ArgumentError(f"{path}: nothing can be written there: pass the URL of an object store, such as s3://")


def put_file(
    local: str,
    remote: RemotePath,
    nbytes: int,
    is_stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Copy a file to a URL, where it appears as a whole, and compare its size. Raises OSError, `Stopped`.

    progress: called with numbers of bytes, which the file system may report all at once
    """
    fs = remote.fs
    known = inspect.signature(getattr(fs, "_put_file", fs.put_file)).parameters
    part = max(PART, -(-nbytes // _PARTS))
    more = {"chunksize": part, "max_concurrency": AT_ONCE, "overwrite": True}
    more = {name: value for name, value in more.items() if name in known}
    reported = 0

    def report(count: int) -> None:
        nonlocal reported
        if progress is not None and reported < count <= nbytes:
            count, reported = count - reported, count
            progress(count)

    def put(hidden: RemotePath) -> None:
        if is_stopped():
            raise Stopped
        callback = _Callback(is_stopped, report).made
        remote.ask("put_file", local, hidden.key, nbytes=nbytes, callback=callback, **more)

    remote.call("it cannot be uploaded", lambda: _put_and_compare(remote, nbytes, put))
    report(nbytes)


class Reader(Protocol):
    """The bytes of a file in order."""

    def read(self, nbytes: int) -> bytes:
        """As many bytes as are asked for, or all that are left."""

    def rewind(self) -> None:
        """Begin anew."""


def put_stream(
    reader: Reader, remote: RemotePath, nbytes: int, progress: Callable[[int], Any] = lambda count: None
) -> None:
    """Write a file at a URL, where it appears as a whole, and compare its size. Raises OSError.

    progress: called with numbers of bytes; a negative one if it begins anew
    """
    sent = 0

    def report(count: int) -> None:
        nonlocal sent
        sent += count
        progress(count)

    def put(hidden: RemotePath) -> None:
        reader.rewind()
        report(-sent)
        if set(remote.protocols) & set(REDIS):
            hidden.fs.put_stream(reader, hidden.key, nbytes, report)
        else:
            _write(hidden, reader, nbytes, report)

    remote.call("it cannot be written", lambda: _put_and_compare(remote, nbytes, put))


def _put_and_compare(remote: RemotePath, nbytes: int, put: Callable[[RemotePath], object]) -> None:
    """Have a file made by `put`, as a whole. OSError if it has another size than `nbytes`."""
    _replace(remote, put)
    remote.fs.invalidate_cache()
    size = remote.ask("info", remote.key)["size"]
    if size != nbytes:
        raise OSError(f"{size} of {nbytes} bytes arrived")


def _write(remote: RemotePath, reader: Reader, nbytes: int, report: Callable[[int], None]) -> None:
    """Write a file by the file system's own object, which sends parts. The libraries below may wait for an answer for
    ever, so each call has the limit of a request."""
    part = max(PART, -(-nbytes // _PARTS))
    file = within(0, partial(remote.fs.open, remote.key, "wb", block_size=part))
    try:
        while True:
            data = reader.read(PART)
            if not data:
                break
            within(part, partial(file.write, data))
            report(len(data))
        within(part, file.close)
    except BaseException as error:
        with contextlib.suppress(Exception):
            if not isinstance(error, NoAnswer):
                within(0, file.discard)  # what was sent so far; to close it would make a file of it
        with contextlib.suppress(Exception):
            file.closed = True
        raise


def _replace(remote: RemotePath, put: Callable[[RemotePath], object]) -> None:
    """Have a file made by `put`, as a whole: where it is seen while it is written, under another name first."""
    if not set(remote.protocols) & set(_RENAMED):
        put(remote)
        return
    hidden = _hidden(remote)
    put(hidden)
    with contextlib.suppress(FileNotFoundError):  # not every file system renames onto an existing name
        remote.fs.rm_file(remote.key)
    remote.fs.mv(hidden.key, remote.key)


def _hidden(remote: RemotePath) -> RemotePath:
    """The temporary name of a file, on file systems that show incomplete files."""
    return remote.with_name(f".{remote.name}.part")


def mark_of(url: str | None) -> str:
    """A text that ranks compare to find out whether they upload to the same URL; "" for none. It contains no
    secrets."""
    return "" if url is None else text(digest(without_secrets(url).encode()))


class Target:
    """The URL of a directory that checkpoints are uploaded to.

    keep: which of those that it lists stay there
    """

    def __init__(self, url: str, is_stopped: Callable[[], bool], keep: Keep = Keep()) -> None:  # noqa: B008
        found = location(url)
        if not isinstance(found, RemotePath):
            raise ArgumentError(f"{without_secrets(url)!r} is a path of this machine")
        self.path, self._is_stopped, self._keep = found, is_stopped, keep
        self._renames = bool(set(found.protocols) & set(_RENAMED))

    def put(self, directory: str, entry: Saved, entries: list[Saved]) -> None:
        """Copy a checkpoint, list it there, and delete what is not kept. Raises OSError, `Stopped`.

        entries: the local list
        """
        self.check_free(entry)
        for name in sorted((name for name, _, _ in entry.files), key=lambda name: name == MANIFEST):
            self.put_file(directory, entry, name)
        self.add(directory, entry, entries)

    def check_free(self, entry: Saved) -> None:
        """Raise `FileExistsError` if another save has the name there, such as one of an earlier directory: it is not
        overwritten. What no list names is the rest of an upload that did not end. Raises OSError."""
        other = next((each for each in self.read_list() if each.name == entry.name), None)
        if other is None or _save_of(other) == _save_of(entry) or not self.is_taken(entry.name):
            return
        raise FileExistsError(
            17, f"{self.path / entry.name} is another checkpoint of this name, which is not overwritten: pass another "
            "URL as upload=, save under another name, or remove it there"
        )  # fmt: skip

    def is_away(self) -> bool:
        """Whether the server fails to answer one small request, or refuses it."""
        path = self.path / index.INDEX
        path.fs.invalidate_cache()
        try:
            path.ask("info", path.key)
        except FileNotFoundError:
            return False
        except BaseException:  # asyncio's CancelledError, too
            return True
        return False

    def put_file(self, directory: str, entry: Saved, name: str) -> None:
        """Copy one file of a checkpoint."""
        if not entry.is_there(directory):
            raise FileNotFoundError(2, "it was deleted or changed before it was uploaded", entry.name)
        nbytes = next(nbytes for each, nbytes, _ in entry.files if each == name)
        inner = f"{entry.name}/{name}" if name else entry.name
        put_file(os.path.join(directory, inner), self.path / inner, nbytes, self._is_stopped)
        # crash: upload.file

    def add(self, directory: str, entry: Saved, entries: list[Saved]) -> None:
        """List a checkpoint whose files are all there, and delete what is not kept."""
        if not entry.is_there(directory):
            raise FileNotFoundError(2, "it was deleted or changed while it was uploaded", entry.name)
        self.prune(self.add_to_list(entry, entries))
        # crash: upload.listed

    def put_stream(self, inner: str, reader: Reader, nbytes: int, progress: Callable[[int], Any]) -> None:
        """Write a file there: `name`, or `name/file`. Raises OSError."""
        put_stream(reader, self.path / inner, nbytes, progress)

    def is_taken(self, name: str) -> bool:
        """Whether anything has this name there. Raises OSError."""
        return (self.path / name).fresh().exists()

    def delete(self, inner: str) -> None:
        """Delete a file there, or what a dead process has of it, if it is there. Raises OSError."""
        path = (self.path / inner).fresh()
        for each in (path, _hidden(path)) if self._renames else (path,):
            with contextlib.suppress(FileNotFoundError):
                each.call("it cannot be deleted", partial(each.ask, "rm_file", each.key))

    def prune(self, listed: list[Saved]) -> list[Saved]:
        """Delete the old checkpoints there that are in the list and are not kept; returns the list that is left. What
        cannot be deleted is in the log, and is tried again after the next one.

        A file that has another size than the list says was changed by somebody, and stays with its checkpoint. What is
        deleted in part is in the list until the rest is gone, and no reader takes it: a file of it is missing.
        """
        aliases = {entry.alias: entry.name for entry in listed if entry.alias}
        deleted = []
        for entry in superfluous(listed, self._keep, set(aliases.values())):
            # crash: prune.before
            try:
                self._delete(entry)
            except (OSError, CheckpointError) as error:
                log.warning("%s was not deleted at %s: %s", entry.name, self.path, error)
                continue
            # crash: prune.deleted
            deleted.append(entry.identity)
        if not deleted:
            return listed
        left = [entry for entry in listed if entry.identity not in deleted]
        try:
            self._write(left)
        except OSError as error:
            log.warning("%s still names checkpoints that were deleted: %s", self.path / index.INDEX, error)
        # crash: prune.listed
        return left

    def _delete(self, entry: Saved) -> None:
        """Delete the files of an entry; that which readers open first goes first."""
        base = (self.path / entry.name).fresh()
        for name, nbytes, _ in sorted(entry.files, key=lambda file: file[0] != MANIFEST):
            path = base / name if name else base
            if self._is_stopped():
                raise Stopped
            try:
                if path.stat().st_size != nbytes:
                    raise OSError(f"somebody has changed {path}")
                path.call("it cannot be deleted", lambda path=path: path.ask("rm_file", path.key))  # type: ignore[misc]
            except FileNotFoundError:
                continue
        with contextlib.suppress(Exception):  # where directories exist
            if entry.files[0][0]:
                base.ask("rmdir", base.key)

    def read_list(self) -> list[Saved]:
        """The list there, the oldest first; empty if there is none, or it cannot be parsed. Raises OSError."""
        path = self.path / index.INDEX
        path.fs.invalidate_cache()
        try:
            return index.parse(self._read_whole(path))
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            log.warning("%s cannot be read and is begun anew: %s", path, error)
            return []

    def _read_whole(self, path: RemotePath) -> bytes:
        """The bytes of a file, or of the one that was about to take its place when a process died."""
        found: bytes
        try:
            found = path.call("it cannot be read", lambda: path.ask("cat_file", path.key))
        except FileNotFoundError:
            if not self._renames:
                raise
            path = _hidden(path)
            found = path.call("it cannot be read", lambda: path.ask("cat_file", path.key))
        return found

    def _write(self, entries: list[Saved]) -> None:
        path = self.path / index.INDEX
        data = index.fitting(entries, str(path))
        path.call("it cannot be written", lambda: _replace(path, lambda at: at.ask("pipe_file", at.key, data)))

    def add_to_list(self, entry: Saved, entries: list[Saved]) -> list[Saved]:
        """Add it to the list there, in the order of the local list. Returns it. What is only there, because `keep_last`
        has deleted it here or an earlier directory had it, is older than the newest here; among the others its place
        is by what every list has of it: see `_is_later`.

        What the local list calls uploaded is in it again, if a request that came late has undone that; of these only
        as many as `upload_keep_last` keeps there.
        """
        there = self.read_list()
        uploaded = [_save_of(each) for each in entries if each.upload == UPLOADED]
        listed = {*map(_save_of, there), _save_of(entry), *uploaded[-(self._keep.last or 0) :]}
        ours = {each.name: replace(each, upload="") for each in entries if _save_of(each) in listed}
        found = [
            ours.get(each.name, each)
            for each in there
            if each.name not in ours or _save_of(each) == _save_of(ours[each.name])
        ]
        at = len(found)
        for each in reversed(ours.values()):  # what is not there comes before the next one of the local list
            if each in found:
                at = found.index(each)
                continue
            if each.name != entries[-1].name:
                while at and found[at - 1].name not in ours and _is_later(found[at - 1], each):
                    at -= 1
            found.insert(at, each)
        self._write(found)
        return found


def _save_of(entry: Saved) -> tuple[str, str, int]:
    """Which save of which writer an entry is of, also where the times of its files are others."""
    return entry.name, entry.writer, entry.number


def _is_later(one: Saved, other: Saved) -> bool:
    """Whether a save is later than another one: of one writer by their numbers, of others by the times of their files.
    (The number of a checkpoint of several ranks is its step, which may go back.)"""
    if one.writer == other.writer and one.files[0][0] != MANIFEST:
        return one.number > other.number
    return max(changed for _, _, changed in one.files) > max(changed for _, _, changed in other.files)


class _Callback:
    """A callback of fsspec that reports how many bytes have been sent, and ends the call when it is told to stop."""

    def __init__(self, is_stopped: Callable[[], bool], report: Callable[[int], object]) -> None:
        from fsspec.callbacks import Callback

        class Made(Callback):  # type: ignore[misc]
            def call(self, *args: Any, **kwargs: Any) -> None:
                if is_stopped():
                    raise Stopped
                report(self.value)

        self.made = Made()


class Ended(NamedTuple):
    """An upload that has ended: the URL, or the error.

    noted: another process has noted in the local list that it is uploaded
    """

    entry: Saved
    url: str
    error: BaseException | None
    noted: bool = False


class Uploads:
    """The uploads of one writing process, by a thread that begins with the first of them."""

    def __init__(self, url: str, directory: str, keep: Keep) -> None:
        self.url, self._directory, self._keep = url, directory, keep
        self._changed = threading.Condition()
        self._waiting: deque[Saved] = deque()
        self._current: Saved | None = None
        self._ended: deque[Ended] = deque()
        self._entries: list[Saved] = []
        self._thread: threading.Thread | None = None
        self._stop = False

    def add(self, entries: list[Saved]) -> None:
        """Upload what is pending of the local list and there, unless it is waiting already."""
        pending = [entry for entry in entries if entry.upload == PENDING and entry.is_there(self._directory)]
        with self._changed:
            self._entries = entries
            known = [*self._waiting, *(ended.entry for ended in self._ended if ended.error is None)]
            known += [self._current] if self._current is not None else []
            same = {entry.identity for entry in known}
            self._waiting.extend(entry for entry in pending if entry.identity not in same)
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shmtensor upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self) -> Ended | None:
        """One that has ended; None if there is none now."""
        with self._changed:
            return self._ended.popleft() if self._ended else None

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        with self._changed:
            return bool(self._waiting or self._current or self._ended)

    def release(self, ended: Ended) -> None:
        """Do nothing: an ended upload, which is recorded in the local list or cannot be, holds no resource."""

    def stop(self) -> None:
        """Stop: checkpoints that are not uploaded are left to the next writing process."""
        with self._changed:
            self._stop = True
            self._waiting.clear()

    def _work(self) -> None:
        target: Target | None = None
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                entry = self._current = self._waiting.popleft()
                entries = self._entries
            error: BaseException | None = None
            try:
                target = target or Target(self.url, lambda: self._stop, self._keep)
                # crash: upload.begun
                target.put(self._directory, entry, entries)
            except BaseException as caught:  # asyncio's CancelledError, too: nobody else ends this upload
                error = caught
            is_away = error is not None and target is not None and bool(self._waiting) and target.is_away()
            with self._changed:
                self._current, ended = None, [entry]
                if is_away:  # each of the others would take as long to find that out
                    ended += self._waiting
                    self._waiting.clear()
                if not isinstance(error, Stopped):
                    self._ended.extend(Ended(each, url_of(self.url, each.name), error) for each in ended)


def explained(entry: Saved, url: str, error: BaseException) -> str:
    """The text of an upload's error."""
    if not isinstance(error, (OSError, CheckpointError)):
        error = ResourceError(5, without_secrets(f"{type(error).__name__}: {error}"))
    return f"{entry.name} is durable, and was not uploaded to {without_secrets(url)}: {error}"


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
    """Remove the marks of checkpoints that are uploaded, or gone."""
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

    def take(self) -> Ended | None:
        """One that has ended; None if there is none now. What is not `noted` is to be noted, and then released."""
        with self._changed:
            return self._ended.popleft() if self._ended else None

    def release(self, ended: Ended) -> None:
        """What has ended is noted in the local list, or cannot be: its marks are removed, and other processes may
        complete others."""
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
        if self._is_completed(upload):
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
            if self._is_completed(upload):  # by the one who had the byte
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
        self._end(upload, None)  # `release` gives the byte back

    def _is_completed(self, upload: _Upload) -> bool:
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
                self._ended.append(Ended(upload.entry, url_of(self.url, upload.entry.name), error, noted))
