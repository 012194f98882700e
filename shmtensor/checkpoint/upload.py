"""Upload what is durable to a URL: `Uploads`, in the writing process, and the checks of `upload=` in the trainer.

    saved:     the entry in the list of saves says `upload = "pending"`, before the files get their name
    copied:    every file is at the URL, with its size; a file appears there as a whole
    listed:    the list of saves at the URL names it: only now does a reader take it for the newest
    uploaded:  the local list says `upload = "done"`, and `keep_last` may delete the local copy

Each step may be repeated, so that whoever dies in between leaves an entry that is pending, and the next writing process
begins with the oldest of them. One thread copies, one checkpoint after the other, and only reads; the writing process's
main thread changes the local list, as the holder of the directory's lock.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, DependencyError, ResourceError
from . import index
from .index import PENDING, UPLOADED, Saved
from .locations import location
from .remote import RemotePath, Stopped, is_url, without_secrets

PART: Final = 8 << 20
"""Bytes of a part, where the file system uploads in parts."""
AT_ONCE: Final = 4
"""Parts that are on their way at once: 32 MiB are in memory."""
_PARTS: Final = 10_000
"""Most parts of a file, on S3."""
_RENAMED: Final = ("sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "webhdfs", "ftp", "dir")
"""File systems where a file is visible while it is written: it gets its name afterwards."""
_ONLY_READ: Final = ("http", "https", "data", "zip", "tar", "github", "git")

log = logging.getLogger("shmtensor.checkpoint")


def check_upload(url: object) -> str | None:
    """The URL that `upload=` means. Raises `ArgumentError`, `ArgumentTypeError`, `DependencyError`."""
    if url is None:
        return None
    if not isinstance(url, str):
        raise ArgumentTypeError(f"upload must be a URL, such as 's3://bucket/runs/a', not {type(url).__name__}")
    if not is_url(url):
        raise ArgumentError(f"upload={url!r} is no URL, such as 's3://bucket/runs/a'")
    shown = without_secrets(url)
    protocol = url.partition("::")[0].partition(":")[0]
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)  # without a connection: that is the writing process's business
    except ImportError as error:
        raise DependencyError(
            f"upload={shown!r}: {error}: pip install 'shmtensor[remote]', and fsspec's package for {protocol}",
            name=error.name,
        ) from None
    except ValueError as error:
        raise ArgumentError(f"upload={shown!r}: {error}") from None
    if protocol in ("file", "local"):
        raise ArgumentError(f"upload={shown!r} is a directory of this machine: let the CheckpointWriter save there")
    if protocol in (*_ONLY_READ, "memory"):
        raise ArgumentError(
            f"upload={shown!r}: nothing can be uploaded there by another process: pass the URL of an object store"
        )
    return url


def check_writable(path: RemotePath) -> None:
    """Raise `ArgumentError` if nothing can be written where a URL leads to."""
    if set(path.protocols) & set(_ONLY_READ):
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
    told = 0

    def tell(count: int) -> None:
        nonlocal told
        if progress is not None and told < count <= nbytes:
            count, told = count - told, count
            progress(count)

    def put(hidden: RemotePath) -> None:
        callback = _Callback(is_stopped, tell).made
        remote.ask("put_file", local, hidden.key, nbytes=nbytes, callback=callback, **more)

    def put_and_compare() -> None:
        if is_stopped():
            raise Stopped
        _replace(remote, put)
        fs.invalidate_cache()
        size = remote.ask("info", remote.key)["size"]
        if size != nbytes:
            raise OSError(f"{size} of {nbytes} bytes arrived")

    remote.call("it cannot be uploaded", put_and_compare)
    tell(nbytes)


def _replace(remote: RemotePath, put: Callable[[RemotePath], object]) -> None:
    """Have a file made by `put`, as a whole: where it is seen while it is written, under another name first."""
    if not set(remote.protocols) & set(_RENAMED):
        put(remote)
        return
    hidden = remote.with_name(f".{remote.name}.part")
    put(hidden)
    with contextlib.suppress(FileNotFoundError):  # not every file system renames onto an existing name
        remote.fs.rm_file(remote.key)
    remote.fs.mv(hidden.key, remote.key)


class Target:
    """The URL of a directory that checkpoints are uploaded to."""

    def __init__(self, url: str, is_stopped: Callable[[], bool]) -> None:
        found = location(url)
        if not isinstance(found, RemotePath):
            raise ArgumentError(f"{without_secrets(url)!r} is a path of this machine")
        self.path, self._is_stopped = found, is_stopped

    def put(self, directory: str, entry: Saved, entries: list[Saved]) -> None:
        """Copy a checkpoint, and list it there. Raises OSError, `Stopped`.

        entries: the local list
        """
        if not entry.is_there(directory):
            raise FileNotFoundError(2, "it was deleted or changed before it was uploaded", entry.name)
        for name, nbytes, _ in entry.files:
            inner = f"{entry.name}/{name}" if name else entry.name
            put_file(os.path.join(directory, inner), self.path / inner, nbytes, self._is_stopped)
            # crash: upload.file
        if not entry.is_there(directory):
            raise FileNotFoundError(2, "it was deleted or changed while it was uploaded", entry.name)
        self._list(entry, entries)
        # crash: upload.listed

    def _list(self, entry: Saved, entries: list[Saved]) -> None:
        """Add it to the list there, in the order of the local list; names that are only there are older.

        What the local list calls uploaded is in it again, if a request that came late has undone that.
        """
        path = self.path / index.INDEX
        path.fs.invalidate_cache()
        try:
            there = index.parse(path.call("it cannot be read", lambda: path.ask("cat_file", path.key)))
        except FileNotFoundError:
            there = []
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            log.warning("%s cannot be read and is begun anew: %s", path, error)
            there = []
        listed = {each.name for each in there} | {entry.name}
        ours = {each.name for each in entries}
        found = [each for each in there if each.name not in ours]
        found += [replace(each, upload="") for each in entries if each.upload == UPLOADED or each.name in listed]
        data = index.fitting(found, str(path))
        path.call("it cannot be written", lambda: _replace(path, lambda at: at.ask("pipe_file", at.key, data)))


class _Callback:
    """A callback of fsspec that reports how many bytes have been sent, and ends the call when it is told to stop."""

    def __init__(self, is_stopped: Callable[[], bool], tell: Callable[[int], object]) -> None:
        from fsspec.callbacks import Callback

        class Made(Callback):  # type: ignore[misc]
            def call(self, *args: Any, **kwargs: Any) -> None:
                if is_stopped():
                    raise Stopped
                tell(self.value)

        self.made = Made()


class Ended(NamedTuple):
    """An upload that has ended: the URL, or the error."""

    entry: Saved
    url: str
    error: BaseException | None


class Uploads:
    """The uploads of one writing process, by a thread that begins with the first of them."""

    def __init__(self, url: str, directory: str) -> None:
        self.url, self._directory = url, directory
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
            numbers = {(entry.writer, entry.number) for entry in known}
            self._waiting.extend(entry for entry in pending if (entry.writer, entry.number) not in numbers)
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shmtensor upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def url_of(self, entry: Saved) -> str:
        """Where a checkpoint is uploaded to, as it is shown."""
        return f"{without_secrets(self.url).rstrip('/')}/{entry.name}"

    def take(self) -> Ended | None:
        """One that has ended; None if there is none now."""
        with self._changed:
            return self._ended.popleft() if self._ended else None

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        with self._changed:
            return bool(self._waiting or self._current or self._ended)

    def stop(self) -> None:
        """Leave what is not uploaded to the next writing process."""
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
                target = target or Target(self.url, lambda: self._stop)
                # crash: upload.begun
                target.put(self._directory, entry, entries)
            except BaseException as caught:  # asyncio's CancelledError, too: nobody else ends this upload
                error = caught
            with self._changed:
                self._current = None
                if not isinstance(error, Stopped):
                    self._ended.append(Ended(entry, self.url_of(entry), error))


def explained(entry: Saved, url: str, error: BaseException) -> str:
    """The text of an upload's error."""
    if not isinstance(error, (OSError, CheckpointError)):
        error = ResourceError(5, without_secrets(f"{type(error).__name__}: {error}"))
    return f"{entry.name} is durable, and was not uploaded to {without_secrets(url)}: {error}"
