"""The list of saves of a directory: which files are this library's own, and in which order they were saved.

`.shmtensor.index` is a JSON document that is replaced as a whole. An entry is written before its files get their final
name, so that after a death the next process can distinguish a finished save from a foreign file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..memory.descriptors import open_file
from .locations import Location, is_shortage, read_regular, write_all
from .remote import RemotePath, is_outage

INDEX: Final = ".shmtensor.index"
LATEST: Final = "latest"
"""The link to the newest checkpoint of a directory."""
MAX_LIST: Final = 8 << 20
"""Bytes of a list: about 30,000 saves of one file, or 1,000 of a hundred shards."""
MAX_METRICS: Final = 100  # of one save
_NOT_FINITE: Final = ("nan", "inf", "-inf")
_VERSION: Final = 1
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,254}")
_METADATA: Final = ".metadata"  # the only name with a dot before it that a file of a checkpoint may have
_WRITER: Final = re.compile(r"[0-9a-f]{16}")
UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)

PENDING: Final = "pending"
UPLOADED: Final = "done"

log = logging.getLogger("shmtensor.checkpoint")


@dataclass(frozen=True)
class Saved:
    """One checkpoint that a writer has saved.

    files:   (name below `name`, or "", bytes, mtime in ns)
    metrics: numbers by name
    alias:   the second name that it was given, or ""
    upload:  whether it is to be uploaded: "" no, `PENDING`, `UPLOADED`
    """

    name: str
    writer: str
    number: int
    step: int
    nbytes: int
    digest: str
    files: tuple[tuple[str, int, int], ...]
    metrics: dict[str, float] = field(default_factory=dict)
    alias: str = ""
    upload: str = ""

    @property
    def identity(self) -> tuple[str, str, int, tuple[tuple[str, int, int], ...]]:
        """A value that distinguishes it from every other save, even one of the same name, or of the same step of
        several ranks."""
        return self.name, self.writer, self.number, self.files

    @property
    def save(self) -> tuple[str, int, int]:
        """Which save it is: the same for the two names that it has while one is exchanged for the other."""
        return self.writer, self.number, self.files[-1][2]

    def is_there(self, directory: str | Location) -> bool:
        """Whether the files under the name are those that were saved, and no others: same names, sizes and times; at a
        URL, where times are others, same names and sizes."""
        if isinstance(directory, RemotePath):
            return self._is_at_url(directory / self.name)
        return self.is_at(os.path.join(directory, self.name))

    def is_alike(self, directory: str | Location) -> bool:
        """Whether the files under the name have the names and sizes of those that were saved. This is true for a copy,
        whose times may differ."""
        if isinstance(directory, RemotePath):
            return self._is_at_url(directory / self.name)
        return self.is_at(os.path.join(directory, self.name), times=False)

    def is_unnamed(self, directory: str | Location) -> bool:
        """Whether its files have a temporary name still, where they get theirs by renaming."""
        if isinstance(directory, RemotePath):
            return False
        hidden = os.path.join(directory, f".{self.name}.{self.writer}")
        return os.path.lexists(f"{hidden}-{self.number}.tmp") or os.path.lexists(f"{hidden}.ranks")

    def _is_at_url(self, path: RemotePath) -> bool:
        try:
            if self.files[0][0] and _shown(name for name, _, _ in self.files) != _shown(
                each.name for each in path.iterdir()
            ):
                return False
            return all((path / name if name else path).stat().st_size == nbytes for name, nbytes, _ in self.files)
        except (FileNotFoundError, NotADirectoryError, CheckpointError):
            return False

    def is_at(self, path: str, *, times: bool = True) -> bool:
        """Whether they are at `path`, which may be a temporary name."""
        try:
            if os.path.islink(path):
                return False
            if self.files[0][0] and {name for name, _, _ in self.files} != set(os.listdir(path)):
                return False
            for name, nbytes, changed in self.files:
                info = os.lstat(os.path.join(path, name) if name else path)
                if info.st_size != nbytes or (times and info.st_mtime_ns != changed):
                    return False
        except OSError:
            return False
        return True


def _shown(names: Iterable[str]) -> set[str]:
    """The file names that a server's listing contains: many servers leave out hidden ones."""
    return {name for name in names if not name.startswith(".")}


def read(directory: str) -> list[Saved]:
    """Every entry, oldest first. A list that is damaged counts as empty: then no file counts as ours. Raises OSError if
    this process lacks a resource to read it: otherwise the next write would lose the whole list."""
    try:
        return _read(Path(directory))
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        if is_shortage(error):
            raise
        path = os.path.join(directory, INDEX)
        log.warning("%s cannot be read and is begun anew, older checkpoints are kept for ever: %s", path, error)
        return []


def order(directory: Location) -> dict[str, int]:
    """The position of each name in the list; later saves have larger ones. For readers, as `entries`."""
    return {entry.name: place for place, entry in enumerate(entries(directory))}


def entries(directory: Location) -> list[Saved]:
    """Every entry, oldest first, for readers; none if there is no list, or it is damaged. Raises `ResourceError` if a
    server fails or refuses it, OSError if this process lacks what it needs to read it: without its list, another
    checkpoint would be taken for the newest."""
    try:
        return _read(directory)
    except (*UNREADABLE, CheckpointError) as error:
        if is_outage(directory, error) or is_shortage(error):
            raise
        return []


def aliases(entries: Iterable[Saved], directory: str | Location) -> dict[str, Saved]:
    """The checkpoint of each alias: the newest one that was given it. If its files are gone or changed, the alias has
    none, and no older one gets it. A checkpoint counts from when its files have their name."""
    found: dict[str, Saved] = {}
    newest: dict[str, tuple[str, int, int]] = {}
    for entry in reversed(list(entries)):
        if not entry.alias or entry.alias in found or newest.get(entry.alias, entry.save) != entry.save:
            continue
        if entry.is_unnamed(directory):  # asked first: it may get its name meanwhile
            continue
        newest[entry.alias] = entry.save
        if entry.is_alike(directory):
            found[entry.alias] = entry
    return found


def without(entries: Iterable[Saved], gone: Callable[[Saved], bool]) -> list[Saved]:
    """A list without the entries whose files are gone. The newest one that was given an alias stays: otherwise an older
    one would have it."""
    entries = list(entries)
    newest = {entry.alias: entry for entry in entries if entry.alias}
    return [entry for entry in entries if newest.get(entry.alias) is entry or not gone(entry)]


def before(entries: Iterable[Saved], saved: Saved) -> list[Saved]:
    """A list for an entry that is to be added: without one of its name, whose files are gone. Nothing has the alias
    any more that this was the newest one to be given."""
    entries = list(entries)
    newest = {entry.alias: entry for entry in entries if entry.alias}
    lost = {alias for alias, entry in newest.items() if entry.name == saved.name} - {saved.alias}
    left = [entry for entry in entries if entry.name != saved.name]
    return [dataclasses.replace(entry, alias="") if entry.alias in lost else entry for entry in left]


def _read(directory: Location) -> list[Saved]:
    return parse(read_regular(directory / INDEX, MAX_LIST))


def parse(data: bytes) -> list[Saved]:
    """The entries of a list's bytes. Raises one of the exceptions `UNREADABLE`."""
    document = json.loads(data)
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']!r:.40}")
    return [_entry(found) for found in document["saves"]]


def is_file_name(name: object) -> bool:
    """Whether a checkpoint, or a file of one, may have this name."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def _entry(found: dict[str, Any]) -> Saved:
    """Parse an entry, strictly: the files that it names will be deleted one day."""
    files = tuple((name, nbytes, changed) for name, nbytes, changed in found["files"])
    entry = Saved(
        found["name"], found["writer"], found["number"], found["step"], found["nbytes"], found["digest"], files,
        metrics_of(found.get("metrics", {})), found.get("alias", ""), found.get("upload", ""),
    )  # fmt: skip
    numbers = [entry.number, entry.step, entry.nbytes, *(each for _, *both in files for each in both)]
    if not all(type(number) is int and abs(number) < 1 << 63 for number in numbers):
        raise ValueError(f"numbers {numbers!r:.80}")
    inner = [name for name, _, _ in files]
    names = [entry.name] if inner == [""] else [entry.name, *(name for name in inner if name != _METADATA)]
    names += [entry.alias] if entry.alias != "" else []
    if not inner or not all(_FILE.fullmatch(name) for name in names):
        raise ValueError(f"names {names!r:.80}")
    if entry.upload not in ("", PENDING, UPLOADED):
        raise ValueError(f"upload {entry.upload!r:.40} of {entry.name!r:.40}")
    if not _WRITER.fullmatch(entry.writer) or not isinstance(entry.digest, str):
        raise ValueError(f"the writer {entry.writer!r:.40} or the digest of {entry.name!r:.40}")
    return entry


def json_metrics(metrics: dict[str, float]) -> dict[str, float | str]:
    """Metrics for JSON, which has no `nan`."""
    return {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}


def metrics_of(found: Any) -> dict[str, float]:
    """Metrics from what `json_metrics` made; `ValueError` for anything else."""
    if not isinstance(found, dict) or len(found) > MAX_METRICS:
        raise ValueError(f"metrics {found!r:.80}")
    if not all(type(value) in (int, float) or value in _NOT_FINITE for value in found.values()):
        raise ValueError(f"metrics {found!r:.80}")
    return {name: float(value) for name, value in found.items()}


def write(directory: str, entries: Sequence[Saved]) -> None:
    """Replace the list and sync the file; the caller syncs the directory."""
    path = os.path.join(directory, INDEX)
    replace(path, fitting(entries, path))


def fitting(entries: Sequence[Saved], path: str) -> bytes:
    """The bytes of a list that readers take: if it were too long, without the oldest entries."""
    data = _render(entries)
    while len(data) > MAX_LIST and len(entries) > 1:
        left = len(entries) // 8 or 1
        log.warning("%s would have %d bytes: the oldest %d checkpoints are kept for ever", path, len(data), left)
        entries = entries[left:]
        data = _render(entries)
    return data


def replace(path: str, data: bytes) -> None:
    """Replace a small file as a whole and sync it, but not its directory. Raises OSError, and leaves it as it was."""
    temporary = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with contextlib.closing(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as file:
        try:
            write_all(file.fd, data)
            os.fsync(file.fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


Version = tuple[int, int, int]


def version(path: str) -> Version:
    """A value that distinguishes a file written by `replace` from the previous one; zeros if there is none."""
    try:
        info = os.lstat(path)
    except OSError:
        return 0, 0, 0
    return info.st_ino, info.st_size, info.st_mtime_ns


def _render(entries: Sequence[Saved]) -> bytes:
    saves = []
    for entry in entries:
        saves.append({**asdict(entry), "metrics": json_metrics(entry.metrics)})
    return json.dumps({"version": _VERSION, "saves": saves}).encode()
