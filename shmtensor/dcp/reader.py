"""`StorageReader`: DCP's loads, from this library's checkpoints and from those of DCP's `FileSystemWriter`."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..checkpoint.dcp_metadata import METADATA
from ..checkpoint.formats import Opened
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.names import check_local
from ..checkpoint.remote import is_url
from ..checkpoint.resolving import resolve
from ..errors import ArgumentError, CheckpointError
from .archives import Repacked
from .filesystem import FileSystemFiles
from .stored_parts import StoredParts

_PATIENCE: Final = 3
_LOCAL: Final = "shmtensor.dcp reads from mounted file systems only"


class Source(Protocol):
    """An open checkpoint: `StoredParts` or `FileSystemFiles`. `where` is what its metadata's `storage_data` has."""

    name: str

    def metadata(self) -> Metadata:
        """DCP's metadata. Raises `CheckpointError`."""

    def order(self, where: Any) -> Any:
        """A key that sorts items by where they are in the files."""

    def read_object(self, where: Any) -> bytes:
        """The bytes of a pickled object."""

    def read_tensor(self, where: Any, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a chunk."""

    def close(self) -> None:
        """Close the files; idempotent."""


class StorageReader(storage.StorageReader):
    """Loads checkpoints by `torch.distributed.checkpoint.load`: those of `StorageWriter`, and of `FileSystemWriter`.

    Any number of ranks may load what any number has saved. Of a checkpoint of `StorageWriter` each rank reads the bytes
    that its state dict needs; of one of `FileSystemWriter` the whole archive of each chunk that it needs.

    Args:
        path: a checkpoint, or a directory of `StorageWriter`, which means its `latest`. `checkpoint_id=` of `load`
            replaces it: a path, or the name of a checkpoint in that directory.
        verify: compare chunks of `StorageWriter` that are read whole with their digests.
        weights_only: objects that are no tensors are loaded only if `torch.load(weights_only=True)` does so; types that
            you trust are allowed by `torch.serialization.add_safe_globals`. False: DCP's planner unpickles them
            freely, which runs whatever code the file says.

    Metadata is never unpickled. Ranks that find different checkpoints, because `latest` has moved between them, get a
    `CheckpointError`.

    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shmtensor.dcp import StorageReader
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as path:
    ...     metadata = dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)  # by FileSystemWriter
    ...     state = {"w": torch.zeros(3)}
    ...     dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    ...     state
    {'w': tensor([1., 1., 1.])}
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, weights_only: bool = True) -> None:
        super().__init__()
        check_local(path, _LOCAL)
        self._path = self._base = Path(path)
        self._verify, self._weights_only = verify, weights_only
        self._source: Source | None = None
        self._stored: dict[Any, Any] = {}

    # --- what DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load another checkpoint: a path, or a name in the reader's directory."""
        self._source = None
        if checkpoint_id is not None:
            check_local(checkpoint_id, _LOCAL)
            named = self._base / checkpoint_id
            self._path = named if os.path.lexists(named) else Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint. Raises `FileNotFoundError`, `CheckpointError`."""
        if kwargs.get("rank") is not None:  # DCP's second attempt, for ranks that saved without each other
            raise CheckpointError(f"{self._path} has no metadata of single ranks, only of all together")
        for attempt in range(_PATIENCE):
            try:
                self._source = self._open()
                return self._source.metadata()
            except FileNotFoundError:
                # a writer with a small keep_last may have deleted it between two of our steps
                if attempt == _PATIENCE - 1 or not self._path.exists():
                    raise
        raise AssertionError("unreachable")

    def _open(self) -> Source:
        if (self._path / METADATA).is_file() and not (self._path / MANIFEST).is_file():
            return FileSystemFiles(self._path)
        found = resolve(self._path)
        directory = Path(os.path.realpath(found.files[0].parent if isinstance(found, Opened) else found))
        if not (directory / MANIFEST).is_file():
            raise CheckpointError(
                f"{directory} was saved neither by shmtensor.dcp nor by FileSystemWriter: it has no {MANIFEST} and no "
                f"{METADATA}"
            )
        return StoredParts(directory, verify=self._verify)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take where the items are from the metadata that `read_metadata` has returned."""
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which checkpoint this rank has opened."""
        return dataclasses.replace(plan, storage_data=self._opened.name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint. `CheckpointError` if not."""
        names = [os.path.basename(plan.storage_data) for plan in plans]
        other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if other is not None:
            raise CheckpointError(
                f"rank 0 has opened {names[0]!r:.80} and rank {other} {names[other]!r:.80}: the newest one has changed "
                "meanwhile, name the checkpoint by checkpoint_id="
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors. Raises `CheckpointError` for what is damaged."""
        source = self._opened
        repacked = Repacked(source.name) if self._weights_only else None
        try:
            for item in sorted(plan.items, key=lambda item: source.order(self._stored[item.storage_index])):
                where = self._stored[item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    data = source.read_object(where)
                    if repacked is not None:
                        data = repacked(data, item.storage_index.fqn)
                    planner.load_bytes(item, io.BytesIO(data))
                else:
                    _fill(item, planner, source.read_tensor(where, tuple(item.storage_offsets), tuple(item.lengths)))
        finally:
            source.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint may be there: not at a URL."""
        return not is_url(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path that is loaded."""
        return str(self._path)

    @property
    def _opened(self) -> Source:
        if self._source is None:
            raise ArgumentError("read_metadata comes first, as DCP's load calls it")
        return self._source

    def __repr__(self) -> str:
        return f"<StorageReader {str(self._path)!r}>"


def _fill(item: ReadItem, planner: LoadPlanner, tensor: torch.Tensor) -> None:
    """Copy a tensor to where the planner wants it."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ArgumentError(
            f"item {item.storage_index.fqn!r:.80}: the state dict has a place of {list(target.size())}, the plan reads "
            f"{list(tensor.size())}"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)
