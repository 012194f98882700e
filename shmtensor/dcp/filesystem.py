"""Checkpoints of DCP's `FileSystemWriter`: `.metadata`, a pickle, and files in which each item is an archive of torch.

The pickle is not unpickled (`metadata_pickle`). Each item's range must lie in its file, ranges do not overlap, and a
chunk has at least as many bytes as its elements take; so what the metadata promises is there before memory is spent.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoint.dcp_metadata import MAX_METADATA, METADATA
from ..errors import CheckpointError
from ..wire.spec import MAX_BYTES
from .archives import load_archive_at
from .metadata import Chunks
from .metadata_pickle import Chunk, Range, Tensor, read_pickle

_FILE: Final = re.compile(r"[^/\0]{1,255}")


class Stored(NamedTuple):
    """Where an item is: a file, a range of it, and the shape and dtype that the metadata says; None for an object."""

    file: str
    offset: int
    nbytes: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


class FileSystemFiles:
    """An open checkpoint of `FileSystemWriter`, whose files are opened as they are read."""

    def __init__(self, directory: Path) -> None:
        self.name = os.path.realpath(directory)
        """Which checkpoint it is."""
        self._directory = directory
        self._fd = -1
        self._file = ""

    def metadata(self) -> Metadata:
        """DCP's metadata. Raises `CheckpointError` if it is not the metadata of these files."""
        found = read_pickle(self._directory / METADATA, MAX_METADATA)
        chunks = Chunks(self.name)
        ranges: dict[str, list[tuple[int, int]]] = {}
        for fqn, item in found.items.items():
            path = found.paths.get(fqn)
            if item is None:
                chunks.add_object(fqn, path, self._place(fqn, None, None, found.ranges, ranges))
                continue
            for chunk in item.chunks:
                where = self._place(fqn, item, chunk, found.ranges, ranges)
                chunks.add_tensor(fqn, item.size, chunk.offsets, chunk.sizes, item.dtype, path, where)
        self._check_ranges(ranges)
        return chunks.metadata()

    def _place(
        self, fqn: str, item: Tensor | None, chunk: Chunk | None,
        stored: Mapping[tuple[str, tuple[int, ...] | None], Range], ranges: dict[str, list[tuple[int, int]]],
    ) -> Stored:  # fmt: skip
        offsets = None if chunk is None else chunk.offsets
        found = stored.get((fqn, offsets))
        if found is None:
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} at {offsets!r:.80} is in no file")
        if found.transforms:
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} was changed by extensions of DCP ({found.transforms!r:.80}), which are "
                "not supported: load it by FileSystemReader"
            )
        if not _FILE.fullmatch(found.file) or found.file in (".", ".."):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} is in {found.file!r:.80}, which is no name of a file")
        ranges.setdefault(found.file, []).append((found.offset, found.nbytes))
        if item is None or chunk is None:
            return Stored(found.file, found.offset, found.nbytes, None, None)
        needed = math.prod(chunk.sizes) * item.dtype.itemsize
        if any(at + n > size for at, n, size in zip(chunk.offsets, chunk.sizes, item.size, strict=True)):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} has a chunk {chunk!r:.120} beyond its size")
        if needed > min(found.nbytes, MAX_BYTES):
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} has a chunk of {needed} bytes in a range of {found.nbytes}"
            )
        return Stored(found.file, found.offset, found.nbytes, chunk.sizes, item.dtype)

    def _check_ranges(self, ranges: Mapping[str, list[tuple[int, int]]]) -> None:
        for file, found in ranges.items():
            path = self._directory / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, which {METADATA} names")
            size, end = path.stat().st_size, 0
            for offset, nbytes in sorted(found):
                if offset < end:
                    raise CheckpointError(f"{path}: two items overlap at offset {offset}")
                end = offset + nbytes
                if end > size:
                    raise CheckpointError(f"{path} has {size} bytes, an item ends at {end}: it is truncated")

    def order(self, where: Stored) -> tuple[str, int]:
        """Sorts items by where they are in the files."""
        return where.file, where.offset

    def read_object(self, where: Stored) -> bytes:
        """The bytes of an object."""
        fd = self._open(where.file)
        data = os.pread(fd, where.nbytes, where.offset)
        if len(data) != where.nbytes:
            raise CheckpointError(f"{self._directory / where.file} is truncated at offset {where.offset + len(data)}")
        return data

    def read_tensor(self, where: Stored, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a chunk, whose archive is read whole."""
        label = f"{self._directory / where.file}: the archive at offset {where.offset}"
        tensor = load_archive_at(self._open(where.file), where.offset, where.nbytes, label)
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or (tuple(tensor.shape), tensor.dtype) != (where.shape, where.dtype)
        ):
            raise CheckpointError(f"{label} is not the tensor of shape {where.shape} that {METADATA} says")
        for axis, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(axis, at, length)
        return tensor

    def _open(self, file: str) -> int:
        if self._file != file:
            self.close()
            self._fd = os.open(self._directory / file, os.O_RDONLY | os.O_CLOEXEC)
            self._file = file
        return self._fd

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        if self._file:
            self._file = ""
            os.close(self._fd)
