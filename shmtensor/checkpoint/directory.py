"""A directory of checkpoints: its locks, names, `latest`, which checkpoints stay, and leftovers of dead writers.

Locks on two bytes of `.shmtensor.lock` say which processes are at work; the kernel drops them at any death:

    0   the trainer: one `CheckpointWriter` per directory
    1   the writing process; it may outlive its trainer, and that of the next trainer waits for it

Only the holder of byte 1 writes here, so temporary files of other writers are leftovers of dead ones. Ranks that save
together share both bytes, and have more: `ranks.py`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ..channel.processes import holders
from ..errors import ResourceError
from ..memory.locks import LockFile
from . import index
from .index import LATEST, PENDING, UPLOADED, Saved

LOCK: Final = ".shmtensor.lock"
NOTE: Final = "url"
"""Ending of the note of what a save has at a URL: see `snapshot.py`."""
_TRAINER, _WRITER = 0, 1
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<writer>[0-9a-f]{16})-(?P<number>\d+)\.(?P<ending>tmp|log|old|url\.tmp|url)", re.DOTALL
)
_NEW_LINK: Final = ".shmtensor.latest"
_NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


Best = tuple[str, str, int]
"""Name of a metric, "min" or "max", and how many of the best stay."""


class Keep(NamedTuple):
    """The rules which checkpoints are kept: `keep_last`, `keep_every` and `keep_best`. None for `last`: all."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None


Save = tuple[str, str, int]
"""Name, writer and number of a save."""


class Leftover(NamedTuple):
    """A file or directory of a save under a temporary name. `is_unnamed`: it has the files that do not have their final
    name yet."""

    path: str
    save: Save
    is_unnamed: bool


class Directory:
    """An open directory of checkpoints, of the trainer or of the writing process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.spares_pending = False
        """Whether checkpoints that are to be uploaded, and are not yet, are kept."""
        self._locks: LockFile | None = None

    # --- locks

    def own(self, is_abandoned: Callable[[], bool] = lambda: False) -> None:
        """For the trainer: create the directory if it is missing, and become its only `CheckpointWriter`.

        is_abandoned: whether the caller has given up

        Raises `ResourceError` if there is another one, or if the directory cannot be created or written.
        """
        try:
            _make(self.path)
            locks = self._open_locks()
        except OSError as error:
            raise ResourceError(
                error.errno, f"checkpoint directory {self.path}: {error.strerror}: pass one that can be written"
            ) from None
        try:
            self._own(locks, is_abandoned)
        except BaseException:
            locks.close()
            raise
        self.close()
        self._locks = locks

    def own_again(self) -> None:
        """For the trainer: own a directory that was removed and made again. Does nothing while it is gone: the writing
        process reports that. Raises as `own`."""
        if self._locks is not None and not self._is_still() and os.path.isdir(self.path):
            self.own()

    def _own(self, locks: LockFile, is_abandoned: Callable[[], bool]) -> None:
        if not locks.try_exclusive(_TRAINER):
            raise ResourceError(
                errno.EBUSY,
                f"another CheckpointWriter is open on {self.path}: close it, use a directory for each, or pass rank= "
                "and world_size= to each",
            )

    def try_write(self) -> bool:
        """For the writing process: become the only one that writes here; False if another one does. Raises OSError."""
        if self._locks is None or not self._is_still():
            self.close()
            self._locks = self._open_locks()
        return self._try_write(self._locks)

    def _try_write(self, locks: LockFile) -> bool:
        return locks.try_exclusive(_WRITER)

    def check_idle(self) -> None:
        """Raise `ResourceError` if a writing process is at work. `own` does not check this, since that process soon
        ends."""
        locks = self._open_locks()
        try:
            if locks.held_by_other(_WRITER):
                by = self.predecessor() or "it cannot be seen from here"
                raise ResourceError(errno.EBUSY, f"a writing process is at work in {self.path}, wait for its end: {by}")
        finally:
            locks.close()

    def predecessor(self) -> str:
        """Which process keeps `try_write` from succeeding, for messages; "" if it cannot be found."""
        return self._holders(_WRITER, _WRITER + 1)

    def _holders(self, first: int, end: int) -> str:
        """The other processes that hold locks on these bytes, for messages; "" if none can be found."""
        found = holders(self.at(LOCK), first, end)
        return ", ".join(f"pid {each.pid} ({each.name})" for each in found[:8]) + (
            " and more" if len(found) > 8 else ""
        )

    @property
    def has_trainer(self) -> bool:
        """For the writing process: whether a trainer has the directory open."""
        return self._locks is not None and self._locks.held_by_other(_TRAINER)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        locks, self._locks = self._locks, None
        if locks is not None:
            locks.close()

    def _open_locks(self) -> LockFile:
        return LockFile(os.path.join(self.path, LOCK), os.O_CREAT, mode=0o644)

    def _is_still(self) -> bool:
        """Whether our lock file is still the directory's: the directory may have been removed and created again."""
        try:
            there = os.stat(os.path.join(self.path, LOCK))
        except OSError:
            return False
        return self._locks is not None and os.path.samestat(there, os.fstat(self._locks.fd))

    # --- names

    def at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def is_taken(self, name: str) -> bool:
        return os.path.lexists(self.at(name))

    def names(self) -> list[str]:
        """The names in the directory; none if it is gone, which the writing process reports."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def temporary(self, name: str, writer: str, number: int, ending: str = "tmp") -> str:
        """Path of a save's file or directory before it is complete (`tmp`), of its log (`log`), or of the note of what
        it has at a URL (`url`)."""
        return self.at(f".{name}.{writer}-{number}.{ending}")

    def leftovers(self) -> Iterator[Leftover]:
        """Everything that a save has here under a temporary name."""
        for found in os.listdir(self.path):
            match = _TEMPORARY.fullmatch(found)
            if match is not None and match["ending"] != NOTE:
                yield Leftover(
                    self.at(found), (match["name"], match["writer"], int(match["number"])), match["ending"] == "tmp"
                )

    def notes(self) -> list[str]:
        """Paths of the notes of what saves have at a URL."""
        found = [(self.at(name), _TEMPORARY.fullmatch(name)) for name in os.listdir(self.path)]
        return [path for path, match in found if match is not None and match["ending"] == NOTE]

    def sweep(self, writer: str, is_over: Callable[[int], bool]) -> None:
        """Remove temporary files of other writers, and of this writer's saves that have ended. Needs byte 1."""
        found = [each for each in self.leftovers() if each.save[1] != writer or is_over(each.save[2])]
        with contextlib.suppress(OSError):  # left for the next writer: no save fails for it
            self.withdraw({each.save for each in found if each.is_unnamed})
        for each in found:
            with contextlib.suppress(OSError):
                remove(each.path)
            # crash: ckptsweep.removed

    @contextlib.contextmanager
    def deciding(self, patience: float = 0.0) -> Iterator[bool]:
        """Be the only one that changes the list, within `patience` seconds; yields whether that is so."""
        yield True  # byte 1

    # --- after a save

    def sync(self) -> None:
        """Make renames and removals in the directory durable. Raises OSError."""
        sync(self.path)

    def record(self, saved: Saved) -> None:
        """Add a save to the list, as the newest, before its files get their final name."""
        index.write(self.path, [*index.before(index.read(self.path), saved), saved])

    def withdraw(self, saves: Collection[Save]) -> None:
        """Remove saves that will never get their final name from the list, before their files are removed: their
        aliases stay where they were. Raises OSError."""
        entries = index.read(self.path)
        left = [
            entry
            for entry in entries
            if (entry.name, entry.writer, entry.number) not in saves or entry.is_there(self.path)
        ]
        if len(left) != len(entries):
            index.write(self.path, left)

    def record_uploaded(self, saved: Saved) -> None:
        """Note in the list that a checkpoint is at its URL, durably. Raises OSError."""
        entries = index.read(self.path)
        places = [at for at, each in enumerate(entries) if each.identity == saved.identity]
        if not places:
            raise FileNotFoundError(errno.ENOENT, "it was deleted before its upload was noted", saved.name)
        entries[places[0]] = replace(saved, upload=UPLOADED)
        index.write(self.path, entries)
        self.sync()

    def recorded(self, writer: str, number: int) -> Saved | None:
        """The entry of a save, if it was recorded."""
        return next(
            (entry for entry in index.read(self.path) if (entry.writer, entry.number) == (writer, number)), None
        )

    def recorded_as(self, saved: Saved) -> Saved | None:
        """The entry of a save that may have been recorded before, with another state of its upload."""
        return next((entry for entry in index.read(self.path) if entry.identity == saved.identity), None)

    def point_latest(self, name: str) -> str:
        """Make `latest` lead to a checkpoint, durably. Returns the text of an error instead of raising it, or "".

        A link that would still lead to an older one is removed: without it, the newest in the list is meant.
        """
        return self._point(LATEST, name)

    def point_aliases(self) -> str:
        """Make each alias lead to its checkpoint by the list, also if a process died before it moved the link. Raises
        nothing; returns what failed, or ""."""
        failed = []
        for alias, entry in index.aliases(index.read(self.path), self.path).items():
            if target(self.at(alias)) != entry.name:
                failed.append(self._point(alias, entry.name))
        return "; ".join(filter(None, failed))

    def _point(self, link: str, name: str) -> str:
        path, temporary = self.at(link), self.at(_NEW_LINK)
        try:
            if os.path.lexists(path) and not os.path.islink(path):
                raise FileExistsError(errno.EEXIST, "it is somebody's file", path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.symlink(name, temporary)
            # crash: latest.made
            os.replace(temporary, path)
            # crash: latest.moved
            self.sync()
        except OSError as error:
            failed = f"{path}: {error}"
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            try:
                if target(path) not in (None, name):
                    os.unlink(path)
            except OSError as stale:
                failed += f"; it leads to an older one and cannot be removed: {stale}"
            return failed
        return ""

    def succeed(self, old: str, new: str, file: str, digest: str) -> None:
        """Give the place of a checkpoint in the list to another one: `file`, which is renamed to `new` afterwards. Both
        are in the list until `end_of`. Raises OSError."""
        entries, info = index.read(self.path), os.stat(file)
        had = next((each for each in entries if each.name == old and each.is_alike(self.path)), None)
        if had is None:
            return
        made = replace(
            had, name=new, nbytes=info.st_size, digest=digest, files=(("", info.st_size, info.st_mtime_ns),),
            upload=PENDING if had.upload == PENDING else "",
        )  # fmt: skip
        entries = index.before(entries, made)
        entries.insert(entries.index(had) + 1, made)
        index.write(self.path, entries)

    def end_of(self, old: str, new: str) -> None:
        """Let the names of a checkpoint lead to the one that has its place, and remove it. Raises OSError."""
        place = os.path.realpath(self.at(old))
        for name in self.names():
            link = self.at(name)
            if os.path.islink(link) and os.path.realpath(link) == place and (failed := self._point(name, new)):
                raise ResourceError(errno.EIO, f"{self.at(old)} stays: {failed}")
        # crash: exchange.pointed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.at(old))
        # crash: exchange.removed
        entries = index.read(self.path)
        if any(each.name == old for each in entries):
            index.write(self.path, index.without(entries, lambda each: each.name == old))
        self.sync()

    def retain(self, keep: Keep) -> tuple[list[str], list[str]]:
        """Delete old checkpoints. Raises nothing; returns the names of the deleted, and what failed.

        Checkpoints stay if they were changed (also copies without the original times), if they are not in the list, or
        if a link leads to them. Every existing checkpoint stays in the list, with its metrics, even if it cannot be
        deleted.
        """
        deleted: list[str] = []
        failed: list[str] = []
        if keep.last is None:
            return deleted, failed
        entries = index.read(self.path)
        alike = [entry for entry in entries if entry.is_alike(self.path)]
        links = [LATEST, *{entry.alias for entry in entries if entry.alias}]
        kept = {os.path.basename(os.path.realpath(self.at(link))) for link in links}
        kept |= {entry.name for entry in index.aliases(entries, self.path).values()}
        if self.spares_pending:
            kept |= {entry.name for entry in alike if entry.upload == PENDING}
        for entry in superfluous(alike, keep, kept):
            if not entry.is_there(self.path):
                continue
            # crash: retain.before
            try:
                self._delete(entry)
            except OSError as error:
                failed.append(f"{self.at(entry.name)}: {error}")
                continue
            # crash: retain.deleted
            deleted.append(entry.name)
        try:
            left = index.without(entries, self._is_gone)
            if len(left) != len(entries):
                index.write(self.path, left)
                self.sync()
        except OSError as error:  # the list still names deleted ones; the next save leaves them out
            failed.append(f"{self.at(index.INDEX)}: {error}")
        return deleted, failed

    def _is_gone(self, entry: Saved) -> bool:
        """Whether no file has the name of a save any more."""
        return not (self.is_taken(entry.name) or entry.is_unnamed(self.path))

    def _delete(self, entry: Saved) -> None:
        """Remove the files of an entry. A directory is renamed first, so that no reader finds half of it."""
        path = self.at(entry.name)
        if entry.files[0][0]:
            doomed = self.temporary(entry.name, entry.writer, entry.number, "old")
            os.rename(path, doomed)
            # crash: retain.renamed
            path = doomed
        remove(path)


def target(link: str) -> str | None:
    """The target of a link; None if there is no link."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def superfluous(entries: Sequence[Saved], keep: Keep, kept: set[str]) -> list[Saved]:
    """Those of the entries, the oldest first, that may be deleted. kept: names that stay in any case."""
    if keep.last is None:
        return []
    kept = kept | {entry.name for entry in _best(entries, keep.best)}
    return [
        entry
        for entry in entries[: max(0, len(entries) - keep.last)]
        if entry.name not in kept and not (keep.every and entry.step % keep.every == 0)
    ]


def _best(entries: Sequence[Saved], keep: Best | None) -> list[Saved]:
    """The entries with the best values of a metric; of equal ones the older."""
    if keep is None:
        return []
    name, mode, count = keep
    known = [entry for entry in entries if not math.isnan(entry.metrics.get(name, math.nan))]
    return sorted(known, key=lambda entry: entry.metrics[name] * (1 if mode == "min" else -1))[:count]


def sync(path: str) -> None:
    """Make renames, new names and removals in a directory durable. Raises OSError.

    Some file systems do not support this: they write such changes by themselves, or have no durability.
    """
    opened: list[int] = []
    try:
        opened.extend(
            map(os.open, (path,), (os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,))
        )  # opened and recorded at once
        os.fsync(opened[0])
    except OSError as error:
        if not opened or error.errno not in _NO_SYNC:
            raise
    finally:
        for fd in opened:
            os.close(fd)


def _make(path: str) -> None:
    """Create a directory and its missing parents, durably. Raises OSError."""
    made = []
    at = path
    while not os.path.isdir(at):
        made.append(at)
        at = os.path.dirname(at)
    os.makedirs(path, exist_ok=True)
    for each in [*made, at] if made else []:
        with contextlib.suppress(PermissionError):  # a directory that we may write but not read
            sync(each)


def remove(path: str) -> None:
    """Remove a temporary file, or a temporary directory of files."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.unlink(path)


def highest_number(names: Iterable[str], prefix: str) -> int:
    """The largest number that follows `prefix` in any of the names; 0 if there is none."""
    pattern = re.compile(re.escape(prefix) + r"(\d{1,18})(?:\.|\Z)")  # longer ones are not ours: see MAX_STEP
    return max((int(match[1]) for name in names if (match := pattern.match(name))), default=0)
