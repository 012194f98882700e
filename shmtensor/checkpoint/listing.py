"""List the checkpoints of a directory, and load the newest one to resume from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError, CheckpointError, CudaError, WrongKey
from . import index
from .answers import Replaced
from .devices import check_device
from .formats import Opened
from .index import LATEST, UPLOADED, Saved
from .keys import Key
from .load import Verify, check_options, load_checkpoint
from .locations import Location, T, fresh, is_shortage, location
from .opening import Opener, each_newest_first, newest_first, open_listed, whole
from .remote import RemotePath, is_outage

_PATIENCE: Final = 3  # times that a directory is listed while its checkpoints are being deleted


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a directory, as `list_checkpoints` gives it."""

    name: str
    """Name of its file or directory of shards."""
    path: str
    """Path of its file or directory of shards."""
    step: int | None
    """The step that was saved with it, or which save of its writer it was; None for a file that is not in the list of
    saves and has no step."""
    time: float
    """When it was written, seconds since 1970."""
    nbytes: int
    """Bytes of its files; 0 if it cannot be opened."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics that `save` was given; empty for a file that is not in the list of saves."""
    aliases: tuple[str, ...] = ()
    """The links that lead to it, including `"latest"`."""
    format: str | None = None
    """`"safetensors"`, `"torch"` or `"npz"`; None if it cannot be opened."""
    error: str | None = None
    """Why it is not complete; None if it is, judged by its description: tensors are not read."""
    encrypted: bool = False
    """Whether it is encrypted. Without `key=`, it counts as complete by the size of its file."""
    uploaded: bool | None = None
    """Whether it is at the URL of `upload=`; None if it was saved without."""


def list_checkpoints(directory: str | os.PathLike[str], *, key: Key | None = None) -> list[CheckpointInfo]:
    """The checkpoints of a directory, the newest first, including those that are not complete.

    The description of each is read and checked, but no tensors. Raises `NotADirectoryError`, `FileNotFoundError`.

    Encrypted checkpoints are listed without `key=` as well, as far as they are readable. With `key=` their descriptions
    are decrypted, and those that do not open, or are not encrypted, have an `error`.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with shmtensor.CheckpointWriter(path) as writer:
    ...         for step in (1, 2):
    ...             handle = writer.save({"w": np.ones(3), "step": step}, metrics={"loss": 1 / step})
    ...     [(found.step, found.metrics, found.aliases) for found in shmtensor.list_checkpoints(path)]
    [(2, {'loss': 0.5}, ('latest',)), (1, {'loss': 1.0}, ())]
    """
    return listed(directory, Opener(key, locked=key is None), lambda info, _: info)


def listed(
    directory: str | os.PathLike[str], opener: Opener, take: Callable[[CheckpointInfo, Opened | None], T]
) -> list[T]:
    """As `list_checkpoints`, what `take` makes of each checkpoint while it is open, None if it cannot be opened. Only
    one is open at a time."""
    root = location(directory)
    saved = {entry.name: entry for entry in index.entries(root)}
    links = _links(root, saved.values())
    found: list[T] = []
    for changed, path in newest_first(root):
        entry = saved.get(path.name)
        aliases = tuple(sorted(links.get(path.name, ()), key=lambda name: (name != LATEST, name)))
        try:
            opened = open_listed(path, opener)
        except FileNotFoundError:
            if not (path.is_symlink() or path.exists()):
                continue  # deleted meanwhile
            found.append(take(_info(path, entry, changed, aliases, error="one of its files is gone"), None))
        except (CheckpointError, OSError) as error:
            if is_shortage(error) and not isinstance(path, RemotePath) and not isinstance(error, PermissionError):
                raise  # of the others nothing would be known either
            found.append(take(_info(path, entry, changed, aliases, error=str(error)), None))
        else:
            found.append(take(_info(path, entry, changed, aliases, opened), opened))
            del opened  # before the next one is opened: it may have its files in memory
    return found


def _info(
    path: Location, entry: Saved | None, changed: int, aliases: tuple[str, ...], opened: Opened | None = None, *,
    error: str | None = None,
) -> CheckpointInfo:  # fmt: skip
    nbytes = 0 if opened is None else sum(opened.sizes)
    saved = sum(size for _, size, _ in entry.files) if entry is not None else 0
    if opened is not None and opened.locked and entry is not None and entry.files[0][0]:
        nbytes = saved  # of several files, only one was opened
    if opened is not None and nbytes != saved:
        entry = None  # another file under the same name
    step = None if entry is None else entry.step
    if entry is None and opened is not None and opened.state is None:
        step = _step(opened)
    return CheckpointInfo(
        path.name, str(path), step, (changed if entry is None else entry.files[-1][2]) / 1e9, nbytes,
        {} if entry is None else entry.metrics, aliases, None if opened is None else opened.format, error,
        opened is not None and opened.encrypted,
        None if entry is None or not entry.upload else entry.upload == UPLOADED,
    )  # fmt: skip


def _step(opened: Opened) -> int | None:
    """The step in a file itself: in its meta, or at the top of its state."""
    tree = opened.plan.tree
    top = tree.get("d") if isinstance(tree, dict) else None
    for place in (opened.plan.meta, top):
        step = place.get("step") if isinstance(place, dict) else None
        if type(step) is int and step >= 0:
            return step
    return None


def _links(directory: Location, saved: Iterable[Saved]) -> dict[str, set[str]]:
    """The names that lead to each checkpoint: links, and aliases in the list of saves whose links could not be made."""
    found: dict[str, set[str]] = {}
    for alias, entry in index.aliases(saved, directory).items():
        if not ((directory / alias).is_symlink() or (directory / alias).exists()):
            found.setdefault(entry.name, set()).add(alias)
    for path in directory.iterdir():
        if path.is_symlink() and path.exists() and path.resolve().parent == directory.resolve():
            found.setdefault(path.resolve().name, set()).add(path.name)
    return found


def load_newest(
    directory: str | os.PathLike[str],
    *,
    map: bool = True,
    keys: Iterable[str] | str | None = None,
    verify: Verify = True,
    rank: int | None = None,
    key: Key | None = None,
    device: Any = None,
) -> Any:
    """The newest complete state of a directory, to resume from; None if there is none, or no such directory.

    Args:
        map, keys, verify, rank, key, device: as for `load_checkpoint`. A missing or wrong `key=`, or one for a newest
            checkpoint that is not encrypted, is an error: no older checkpoint is loaded instead.

    A state that the writing process of a dead trainer still has in shared memory is newer than any file, and is copied
    from there. Otherwise it is the newest complete file, whatever `latest` leads to; its tensors are compared with
    their digests with `map=False`, and with `verify="all"` also if it is mapped. Newer files that are damaged or
    truncated are skipped with a `RuntimeWarning`. Errors that do not concern a file's contents (no memory, no
    descriptors, no permission) are raised, and nothing older is loaded instead. Call it before the `CheckpointWriter`
    of this run saves.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     shmtensor.load_newest(path) is None
    ...     with shmtensor.CheckpointWriter(path) as writer:
    ...         handle = writer.save({"w": np.ones(3), "step": 7})
    ...     shmtensor.load_newest(path)["step"]
    True
    7
    """
    check_options(None, verify)
    check_device(device)
    root = location(directory)
    if not root.exists():
        return None
    if not root.is_dir():
        raise ArgumentError(f"{root} is a file: pass the directory of a CheckpointWriter, or use load_checkpoint")
    if whole(root) is not None:
        return load_checkpoint(root, map=map, keys=keys, verify=verify, rank=rank, key=key, device=device)
    try:
        if rank is None and isinstance(root, Path):  # of several ranks nothing is complete before it is on disk
            return load_checkpoint(root, keys=keys, from_memory=True, verify=bool(verify), device=device)
    except FileNotFoundError:
        pass
    except CheckpointError as error:
        warnings.warn(f"passed over in shared memory: {error}", RuntimeWarning, stacklevel=2)
    for _ in range(_PATIENCE):
        gone = False
        for path in each_newest_first(fresh(root)):
            try:
                return load_checkpoint(path, map=map, keys=keys, verify=verify, rank=rank, key=key, device=device)
            except (FileNotFoundError, Replaced):
                gone = True
            except (WrongKey, CudaError):
                raise
            except (CheckpointError, OSError) as error:
                if is_outage(path, error) or is_shortage(error):
                    raise
                warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=2)
        if not gone:
            break
    return None
