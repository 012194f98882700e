"""Find the checkpoint that a path means: a file, a directory of shards, `latest`, the newest complete one."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import ArgumentError, CheckpointError
from . import index
from .envelope import SUFFIX
from .formats import FORMATS, Opened
from .formats.shards import INDEX, find_groups, find_index, shard_of
from .keys import WrongKey
from .locations import Location, fresh, open_input
from .manifest import MANIFEST, open_part, open_ranks
from .opening import PLAIN, Opener
from .remote import RemotePath, is_outage

LATEST = "latest"
_PATIENCE = 3
_PLAIN: Final = tuple(each.suffix for each in FORMATS.values())
_SUFFIXES: Final = (*_PLAIN, *(suffix + SUFFIX for suffix in _PLAIN))
_ENCRYPTED_INDEX: Final = INDEX + SUFFIX
_MODEL: Final = re.compile(
    r"(?:pytorch_|adapter_|diffusion_pytorch_)?model(?P<variant>(?:\.[\w-]+)*)\.(?:safetensors|bin|pt|pth|npz)"
)
"""Names of the model's file in a directory to which other programs save a training. Files beside it (`optimizer.pt`,
`scheduler.pt`) are parts of the same checkpoint."""


def open_path(path: str | os.PathLike[str], opener: Opener = PLAIN) -> Opened:
    """Open the checkpoint that a path means; reads its description, not the tensors.

    A file or a directory of shards means itself. Any other directory means its `latest`; if there is no `latest`, or
    its target is gone, the newest complete checkpoint in it. Raises `FileNotFoundError`, or `CheckpointError` for what
    is damaged or no checkpoint.
    """
    for attempt in range(_PATIENCE):
        try:
            found = resolve(fresh(path), opener)
            return found if isinstance(found, Opened) else open_found(found, opener)
        except FileNotFoundError:
            # a writer with a small keep_last may have deleted it between two of our steps
            if attempt == _PATIENCE - 1 or not fresh(path).exists():
                raise
    raise AssertionError("unreachable")


def open_found(path: Location, opener: Opener = PLAIN) -> Opened:
    """Open a file, or a directory that is one checkpoint."""
    if path.is_dir():
        if (path / MANIFEST).exists():
            return open_ranks(path, opener)
        path = whole(path) or path
    return opener.open(path)


def open_rank(path: str | os.PathLike[str], rank: int, opener: Opener = PLAIN) -> Opened:
    """Open one rank's part. Raises what `open_path` does, and `ArgumentError` if there is no such part."""
    for attempt in range(_PATIENCE):
        try:
            found = resolve(fresh(path), opener)
            directory = found.files[0].parent if isinstance(found, Opened) else found
            if not (directory / MANIFEST).exists():
                raise ArgumentError(f"rank={rank}: {directory} was not saved by several ranks: leave out rank=")
            return open_part(directory, rank, opener)
        except FileNotFoundError:
            if attempt == _PATIENCE - 1 or not fresh(path).exists():
                raise
    raise AssertionError("unreachable")


def resolve(path: Location, opener: Opener = PLAIN) -> Location | Opened:
    """The file or directory that a path means; already opened if it was found as the newest complete one."""
    is_remote = isinstance(path, RemotePath)  # where links were copied as files, which do not move
    if is_remote and path.name == LATEST and (path.parent / index.INDEX).exists():
        return newest(path.parent, opener)
    is_copy = is_remote and not path.name.endswith(_SUFFIXES) and path.is_file()
    if (is_copy or not path.exists()) and (second := _by_alias(path)) is not None:
        return second
    if isinstance(path, Path) and path.is_symlink() and not path.exists():
        # a file of another program, as in an incomplete cache; or an alias, which means no other checkpoint
        if path.name.endswith(_SUFFIXES) or path.name in _known_aliases(path.parent):
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {os.readlink(path)}, which is not there", str(path))
        return newest(path.parent, opener)
    if path.is_dir():
        if (path / MANIFEST).exists() or (path / _ENCRYPTED_INDEX).exists() or find_index(path) is not None:
            return path
        latest = path / LATEST
        if not (is_remote and (path / index.INDEX).exists()) and latest.exists() and not _is_note(latest):
            return resolve(latest, opener)
        snapshot = _snapshot(path)
        if snapshot is not None:
            return resolve(snapshot, opener)
        return path if whole(path) is not None else newest(path, opener)
    if not path.exists():
        if path.name == LATEST and path.parent.is_dir():  # a file system without links
            return newest(path.parent, opener)
        for suffix in _SUFFIXES:
            named = path.with_name(path.name + suffix)
            if path.name and named.is_file():
                return named
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))
    return path


def _by_alias(path: Location) -> Location | None:
    """The checkpoint of an alias by the list of saves, for aliases whose link could not be made."""
    if not _known_aliases(path.parent):
        return None
    entry = index.aliases(index.entries(path.parent), path.parent).get(path.name)
    return None if entry is None else path.with_name(entry.name)


def _known_aliases(directory: Location) -> set[str]:
    return {entry.alias for entry in index.entries(directory) if entry.alias}


def whole(directory: Location) -> Location | None:
    """The main file of a directory that is one checkpoint: its index, the first of its shards, or the model's file.

    None for any other directory, such as one that a `CheckpointWriter` writes to, whose files are a checkpoint each.
    """
    if (directory / MANIFEST).exists():
        return directory / MANIFEST
    if (directory / _ENCRYPTED_INDEX).exists():
        return directory / _ENCRYPTED_INDEX
    found = find_index(directory)
    if found is not None or (directory / index.INDEX).exists():
        return found
    names = [found.name for found in directory.iterdir() if not found.name.startswith(".")]
    groups = list(find_groups(names).values())
    models = sorted(
        (match["variant"], not name.endswith(".safetensors"), name)
        for name in names
        if (match := _MODEL.fullmatch(name)) and shard_of(name) is None and (directory / name).is_file()
    )
    if models and (not models[0][0] or len({variant for variant, _, _ in models}) == 1):
        return directory / models[0][2]
    return directory / groups[0][0] if len(groups) == 1 and not models else None


def candidates(directory: Location) -> Iterator[tuple[int, Location]]:
    """(mtime in ns, path) of what may be checkpoints in a directory; hidden names are unfinished ones."""
    there = [path for path in directory.iterdir() if not path.name.startswith(".") and path.name != LATEST]
    groups = find_groups(path.name for path in there)
    first = {name: group[0] for group in groups.values() for name in group}
    for path in there:
        try:
            if path.is_symlink() and path.resolve().parent == directory.resolve():
                continue  # an alias of one that is listed itself
            if path.is_dir():
                main = whole(path)
                if main is not None:
                    yield main.stat().st_mtime_ns, path
            elif path.name.endswith(_SUFFIXES) and first.get(path.name, path.name) == path.name:
                yield path.stat().st_mtime_ns, path
        except FileNotFoundError:
            continue
        except CheckpointError:  # reported when it is opened
            yield _time_of(path), path


def _time_of(path: Location) -> int:
    try:
        return path.stat().st_mtime_ns
    except CheckpointError:
        return 0


def newest_first(directory: Location) -> list[tuple[int, Location]]:
    """The candidates: first those in the list of saves, the last saved first, whatever their mtime; then the others by
    their mtime."""
    order = index.order(directory)
    return sorted(candidates(directory), key=lambda found: (order.get(found[1].name, -1), found), reverse=True)


def newest(directory: Location, opener: Opener = PLAIN) -> Opened:
    """Open the newest complete checkpoint of a directory; warn of each newer one that is not complete."""
    found = newest_first(directory)
    for _, path in found:
        try:
            return open_found(path, opener)
        except FileNotFoundError:
            continue
        except WrongKey:  # an older one is not what the caller wants
            raise
        except Exception as error:  # whatever the error is, try the others
            if is_outage(path, error):
                raise
            if len(found) == 1 and isinstance(error, CheckpointError):
                raise  # there is no other one
            warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=4)
    raise FileNotFoundError(errno.ENOENT, "there is no complete checkpoint in this directory", str(directory))


def _is_note(latest: Location) -> bool:
    """Whether `latest` is a file of one line that another program wrote, such as the name of a directory."""
    if latest.is_symlink() or not latest.is_file():
        return False
    with open_input(latest) as file:
        text = file.pread(257, 0)
    return len(text) <= 256 and text.isascii() and text.decode("ascii").strip().isprintable()


def _snapshot(directory: Location) -> Location | None:
    """The directory of revision `main` in a repository of Hugging Face's cache; None if it is no such cache."""
    main = directory / "refs" / "main"
    if not main.is_file() or not (directory / "snapshots").is_dir():
        return None
    with open_input(main) as file:
        revision = file.pread(257, 0).decode("utf-8", "replace").strip()
    found = directory / "snapshots" / revision
    if not re.fullmatch(r"[0-9A-Za-z]{1,128}", revision) or not found.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"revision {revision!r:.80} is not in this cache", str(directory))
    return found
