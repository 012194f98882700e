"""Which checkpoint a path means: a file, a directory of shards, `latest`, the newest complete one."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .formats import FORMATS, Opened, detect
from .formats.safetensors import INDEX

LATEST = "latest"
_PATIENCE = 3


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Open what a path means; reads what describes the state, not the tensors.

    A file or a directory of shards is itself. Any other directory means its `latest`, and if there is no `latest`, or
    what it led to is gone, the newest checkpoint in it that is complete. Raises `FileNotFoundError`, or
    `CheckpointError` for what is damaged or no checkpoint.
    """
    for attempt in range(_PATIENCE):
        try:
            found = resolve(path)
            return found if isinstance(found, Opened) else detect(found).open(found)
        except FileNotFoundError:
            # a writer that keeps few checkpoints may delete one between two of our steps
            if attempt == _PATIENCE - 1 or not Path(path).exists():
                raise
    raise AssertionError("unreachable")


def resolve(path: str | os.PathLike[str]) -> Path | Opened:
    """The file or directory that a path means; already opened if it was found as the newest complete one."""
    path = Path(path)
    if path.is_symlink() and not path.exists():
        return newest(path.parent)
    if path.is_dir():
        if is_sharded(path):
            return path
        latest = path / LATEST
        if latest.exists():
            return resolve(latest)
        return newest(path)
    if not path.exists():
        for each in FORMATS.values():
            named = path.with_name(path.name + each.suffix)
            if path.name and named.is_file():
                return named
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))
    return path


def is_sharded(path: Path) -> bool:
    """Whether a directory is one checkpoint of several files."""
    return (path / INDEX).is_file()


def candidates(directory: Path) -> Iterator[tuple[int, Path]]:
    """(time of the last change in ns, path) of what may be checkpoints in a directory; hidden names are unfinished."""
    suffixes = tuple(each.suffix for each in FORMATS.values())
    for path in directory.iterdir():
        if path.name.startswith(".") or path.is_symlink():
            continue
        try:
            if path.is_dir():
                if is_sharded(path):
                    yield (path / INDEX).stat().st_mtime_ns, path
            elif path.name.endswith(suffixes):
                yield path.stat().st_mtime_ns, path
        except FileNotFoundError:
            continue


def newest(directory: Path) -> Opened:
    """The newest checkpoint of a directory that is complete; a warning for each newer one that is not."""
    for _, path in sorted(candidates(directory), reverse=True):
        try:
            return detect(path).open(path)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=4)
    raise FileNotFoundError(errno.ENOENT, "there is no complete checkpoint in this directory", str(directory))
