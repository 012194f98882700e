"""The list of what was saved in a directory: which files are this library's own, and in which order they came.

`.shmtensor.index`, a JSON document that is replaced as a whole. An entry is written before its files get their final
name, so that whoever comes after a death can tell a finished save from somebody else's file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

INDEX: Final = ".shmtensor.index"
_VERSION: Final = 1

log = logging.getLogger("shmtensor")


@dataclass(frozen=True)
class Saved:
    """One checkpoint that a writer has made. `files`: (name below `name`, or "", bytes, mtime in ns)."""

    name: str
    writer: str
    number: int
    step: int
    nbytes: int
    digest: str
    files: tuple[tuple[str, int, int], ...]

    def is_there(self, directory: str) -> bool:
        """Whether what lies under the name is what was saved: same files, no others, same sizes and times of change."""
        return self.is_at(os.path.join(directory, self.name))

    def is_at(self, path: str) -> bool:
        """Whether these files lie at `path`, perhaps not yet their final name."""
        try:
            if os.path.islink(path):
                return False
            if self.files[0][0] and {name for name, _, _ in self.files} != set(os.listdir(path)):
                return False
            for name, nbytes, changed in self.files:
                info = os.lstat(os.path.join(path, name) if name else path)
                if (info.st_size, info.st_mtime_ns) != (nbytes, changed):
                    return False
        except OSError:
            return False
        return True


def read(directory: str) -> list[Saved]:
    """Every entry, oldest first. A list that cannot be read is an empty one: then nothing counts as ours."""
    path = os.path.join(directory, INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        return [_entry(found) for found in document["saves"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read and is begun anew, older checkpoints are kept for ever: %s", path, error)
        return []


def _entry(found: dict[str, Any]) -> Saved:
    files = tuple((str(name), int(nbytes), int(changed)) for name, nbytes, changed in found["files"])
    names = [found["name"], *(name for name, _, _ in files if name)]
    if not files or any(os.path.basename(name) != name or name in ("", ".", "..") for name in names):
        raise ValueError(f"names {names}")
    return Saved(
        found["name"], str(found["writer"]), int(found["number"]), int(found["step"]), int(found["nbytes"]),
        str(found["digest"]), files,
    )  # fmt: skip


def write(directory: str, entries: Sequence[Saved]) -> None:
    """Replace the list, durably but for the directory's own entry: the caller syncs the directory."""
    path = os.path.join(directory, INDEX)
    data = json.dumps({"version": _VERSION, "saves": [asdict(entry) for entry in entries]}).encode()
    fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(path + ".tmp", path)
