"""A directory of checkpoints: whose it is, names, `latest`, what is kept, what dead writers left.

Two bytes of `.shmtensor.lock` say who is at work, by locks that the kernel drops at any death:

    0   the trainer: one `CheckpointWriter` per directory
    1   the process that writes; it may outlive its trainer, and the next trainer's waits for it

Whoever holds byte 1 is the only one to write here, so that temporary files of others were left by the dead. Several
ranks that save together share both bytes, and have more: `run.py`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ..errors import ResourceError
from ..memory.locks import LockFile
from . import index
from .index import Saved

LOCK: Final = ".shmtensor.lock"
LATEST: Final = "latest"
_TRAINER, _WRITER = 0, 1
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<writer>[0-9a-f]{16})-(?P<number>\d+)\.(?:tmp|log|old)", re.DOTALL)
_NEW_LINK: Final = ".shmtensor.latest"
_NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


Best = tuple[str, str, int]
"""Name of a metric, "min" or "max", and how many of the best stay."""


class Directory:
    """An open directory of checkpoints, of the trainer or of the writing process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._locks: LockFile | None = None

    # --- who is at work

    def own(self, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """The trainer's part: make the directory if it is missing, and be the only `CheckpointWriter` there.

        is_given_up: whether nobody waits for it any more

        Raises `ResourceError` if another one is, or if the directory cannot be made or written.
        """
        try:
            _make(self.path)
            locks = self._open_locks()
        except OSError as error:
            raise ResourceError(
                error.errno, f"checkpoint directory {self.path}: {error.strerror}: pass one that can be written"
            ) from None
        try:
            self._own(locks, is_given_up)
        except BaseException:
            locks.close()
            raise
        self._locks = locks

    def _own(self, locks: LockFile, is_given_up: Callable[[], bool]) -> None:
        if not locks.try_exclusive(_TRAINER):
            raise ResourceError(
                errno.EBUSY,
                f"another CheckpointWriter is open on {self.path}: close it, use a directory for each, or pass rank= "
                "and world_size= to each",
            )

    def try_write(self) -> bool:
        """The writing process's part: become the one that writes here; False while another one does. Raises OSError."""
        if self._locks is None or not self._is_still():
            self.close()
            self._locks = self._open_locks()
        return self._try_write(self._locks)

    def _try_write(self, locks: LockFile) -> bool:
        return locks.try_exclusive(_WRITER)

    def close(self) -> None:
        """Let go of the lock. Idempotent."""
        locks, self._locks = self._locks, None
        if locks is not None:
            locks.close()

    def _open_locks(self) -> LockFile:
        return LockFile(os.path.join(self.path, LOCK), os.O_CREAT, mode=0o644)

    def _is_still(self) -> bool:
        """Whether our lock file is still the directory's: somebody may have removed the directory and made another."""
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
        """What lies in the directory; nothing if it is gone: the writing process will say so."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def temporary(self, name: str, writer: str, number: int, ending: str = "tmp") -> str:
        """Path of a save's file or directory before it is complete (`tmp`), or of its log (`log`)."""
        return self.at(f".{name}.{writer}-{number}.{ending}")

    def leftovers(self) -> Iterator[tuple[str, str, int]]:
        """(path, writer, number) of everything that a save has under a temporary name."""
        for found in os.listdir(self.path):
            match = _TEMPORARY.fullmatch(found)
            if match is not None:
                yield self.at(found), match["writer"], int(match["number"])

    def sweep(self, writer: str, is_over: Callable[[int], bool]) -> None:
        """Remove the temporary files of other writers, and of those saves of this one that are over. Needs byte 1."""
        for path, owner, number in list(self.leftovers()):
            if owner != writer or is_over(number):
                with contextlib.suppress(OSError):  # it stays for the next writer: no save fails for it
                    remove(path)
                # crash: ckptsweep.removed

    # --- after a save

    def sync(self) -> None:
        """Make renames and removals in the directory durable. Raises OSError."""
        sync(self.path)

    def record(self, saved: Saved) -> None:
        """Note what is about to get its final name, as the newest."""
        entries = [entry for entry in index.read(self.path) if entry.name != saved.name]
        index.write(self.path, [*entries, saved])

    def recorded(self, writer: str, number: int) -> Saved | None:
        """The entry of a save that went so far, if there is one."""
        return next(
            (entry for entry in index.read(self.path) if (entry.writer, entry.number) == (writer, number)), None
        )

    def point_latest(self, name: str) -> str:
        """Let `latest` lead to a checkpoint, durably; what could not be done, or "": raises nothing.

        A link that would go on leading to an older one is removed: without it, the newest in the list is meant.
        """
        return self._point(LATEST, name)

    def point_aliases(self) -> str:
        """Let each second name lead to the checkpoint that it belongs to by the list: also those that somebody who died
        has left where they were. What could not be done, or "": raises nothing."""
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

    def retain(
        self, keep_last: int | None, keep_every: int | None, keep_best: Best | None = None
    ) -> tuple[list[str], list[str]]:
        """Delete old checkpoints of ours; the names of the deleted, and what could not be done: raises nothing.

        What was changed, or is not in the list, stays, and so does what a link leads to. What cannot be deleted stays
        in the list, for the next time.
        """
        deleted: list[str] = []
        failed: list[str] = []
        if keep_last is None:
            return deleted, failed
        entries = index.read(self.path)
        present = [entry for entry in entries if entry.is_there(self.path)]
        links = [LATEST, *{entry.alias for entry in entries if entry.alias}]
        kept = {os.path.basename(os.path.realpath(self.at(link))) for link in links}
        kept |= {entry.name for entry in index.aliases(present, self.path).values()}
        kept |= {entry.name for entry in _best(present, keep_best)}
        doomed = [
            entry
            for entry in present[: max(0, len(present) - keep_last)]
            if entry.name not in kept and not (keep_every and entry.step % keep_every == 0)
        ]
        for entry in doomed:
            # crash: retain.before
            try:
                self._delete(entry)
            except OSError as error:
                failed.append(f"{self.at(entry.name)}: {error}")
                continue
            # crash: retain.deleted
            deleted.append(entry.name)
        try:
            if deleted or len(present) != len(entries):
                index.write(self.path, [entry for entry in present if entry.name not in deleted])
                self.sync()
        except OSError as error:  # the list names what is gone: the next time it is left out
            failed.append(f"{self.at(index.INDEX)}: {error}")
        return deleted, failed

    def _delete(self, entry: Saved) -> None:
        """Remove what an entry names. A directory loses its name first, so that nobody finds half of it."""
        path = self.at(entry.name)
        if entry.files[0][0]:
            doomed = self.temporary(entry.name, entry.writer, entry.number, "old")
            os.rename(path, doomed)
            # crash: retain.renamed
            path = doomed
        remove(path)


def target(link: str) -> str | None:
    """What a link says; None if there is none."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def _best(entries: Sequence[Saved], keep: Best | None) -> list[Saved]:
    """Those with the best value of a metric, of equal ones the older."""
    if keep is None:
        return []
    name, mode, count = keep
    known = [entry for entry in entries if not math.isnan(entry.metrics.get(name, math.nan))]
    return sorted(known, key=lambda entry: entry.metrics[name] * (1 if mode == "min" else -1))[:count]


def sync(path: str) -> None:
    """Make what was renamed, made and removed in a directory durable. Raises OSError.

    Some file systems cannot be asked to: they write such changes by themselves, or know no durability.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def _make(path: str) -> None:
    """Make a directory and those above it that are missing, durably. Raises OSError."""
    made = []
    at = path
    while not os.path.isdir(at):
        made.append(at)
        at = os.path.dirname(at)
    os.makedirs(path, exist_ok=True)
    for each in [*made, at] if made else []:
        with contextlib.suppress(PermissionError):  # one that we may write and not read
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
