"""Archives of `torch.save` that DCP has stored in its files: opened by `torch.load(weights_only=True)` alone, after the
check of what their pickles would cost (`shmtensor.checkpoint.formats.pickle_check`).

The library's reading of such files works on paths, and needs the archive to end where the file does. So an archive that
lies inside a file is copied into a file in memory first: its size is that of bytes that are really there.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.formats import get_format
from ..errors import CheckpointError


def load_archive(data: bytes, label: str) -> Any:
    """The value of an archive, from its bytes. Raises `CheckpointError`."""
    fd = os.memfd_create("shmtensor-archive", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        return _load(fd, label)
    finally:
        os.close(fd)


def load_archive_at(source: int, offset: int, nbytes: int, label: str) -> Any:
    """The value of an archive that lies in an open file. Raises `CheckpointError`."""
    fd = os.memfd_create("shmtensor-archive", os.MFD_CLOEXEC)
    try:
        left = nbytes
        while left:
            count = os.sendfile(fd, source, offset, left)
            if not count:
                raise CheckpointError(f"{label}: the file ends at offset {offset}, inside it: it is truncated")
            offset, left = offset + count, left - count
        return _load(fd, label)
    finally:
        os.close(fd)


def _load(fd: int, label: str) -> Any:
    path = f"/proc/self/fd/{fd}"
    try:
        opened = get_format("torch").open(Path(path))
        if opened.state is None:
            raise CheckpointError(f"{label} is no archive of torch.save")
        return opened.state(True)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(path, label)) from None


class Repacked:
    """Pickled objects, loaded without code of theirs and pickled again: what DCP's planner unpickles freely is then
    this process's own. `label` names the checkpoint in errors."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._made: dict[bytes, bytes] = {}  # thousands of objects of an optimizer are a few different ones

    def __call__(self, data: bytes, fqn: str) -> bytes:
        """The bytes for an object's bytes. Raises `CheckpointError`."""
        made = self._made.get(data)
        if made is None:
            try:
                value = load_archive(data, f"{self._label}: item {fqn!r:.80}")
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}: if you trust this file, allow the type by torch.serialization.add_safe_globals, or pass "
                    "weights_only=False to StorageReader"
                ) from None
            buffer = io.BytesIO()
            torch.save(value, buffer)
            made = self._made[data] = buffer.getvalue()
        return made
