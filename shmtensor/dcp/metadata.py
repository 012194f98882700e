"""DCP's `Metadata`, from the chunks and objects that files say they have, checked as a whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import CheckpointError
from .description import Path, check_bytes

Where = Any
"""Where an item is stored, as the source of the items knows it."""


class Chunks:
    """The items of a checkpoint. Replicas of one chunk count once."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._paths: dict[str, Path] = {}
        self._stored: dict[MetadataIndex, Where] = {}

    def add_tensor(
        self, fqn: str, size: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype,
        path: Path | None, where: Where,
    ) -> None:  # fmt: skip
        """Add the chunk of `shape` at `offsets`. Raises `CheckpointError` if it is another tensor than before."""
        check_bytes(fqn, size, dtype.itemsize, self._label)
        found = self._items.get(fqn)
        if found is None:
            found = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [])
            self._items[fqn] = found
        elif not isinstance(found, TensorStorageMetadata) or found.size != size or found.properties.dtype != dtype:
            raise self._differs(fqn)
        self._note(fqn, path)
        index = MetadataIndex(fqn, offsets)
        if index not in self._stored and (0 in size or 0 not in shape):
            found.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            self._stored[index] = where

    def add_object(self, fqn: str, path: Path | None, where: Where) -> None:
        """Add an object; of several with this name the first one counts."""
        found = self._items.setdefault(fqn, BytesStorageMetadata())
        if not isinstance(found, BytesStorageMetadata):
            raise self._differs(fqn)
        self._note(fqn, path)
        self._stored.setdefault(MetadataIndex(fqn), where)

    def _differs(self, fqn: str) -> CheckpointError:
        return CheckpointError(f"{self._label}: item {fqn!r:.80} is of two kinds, sizes or dtypes")

    def _note(self, fqn: str, path: Path | None) -> None:
        if path is not None:
            self._paths.setdefault(fqn, path)

    def metadata(self) -> Metadata:
        """The metadata; `storage_data` has where each item is. `CheckpointError` if the chunks of a tensor are not all
        of it: a load would leave the rest as it was."""
        for fqn, found in self._items.items():
            if isinstance(found, TensorStorageMetadata):
                has = sum(math.prod(chunk.sizes) for chunk in found.chunks)
                if has != math.prod(found.size):
                    raise CheckpointError(
                        f"{self._label}: item {fqn!r:.80} has {math.prod(found.size)} elements, its chunks have {has}"
                    )
        paths = self._paths if len(self._paths) == len(self._items) else None
        return Metadata(self._items, planner_data=paths, storage_data=self._stored)
