"""`StorageWriter`: DCP's saves through this library's checkpoints of several ranks."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..checkpoint.formats import get_format
from ..checkpoint.names import check_directory, check_name
from ..checkpoint.remote import is_url
from ..endpoints.base import Local
from ..errors import ArgumentError, ArgumentTypeError
from .part_writer import PartWriter, Place, Saving


class _Ahead(threading.local):
    """Of one thread: what `AsyncStager` has copied for the save that begins next, and for the one that has begun."""

    announced: Saving | None = None
    current: Saving | None = None


class StorageWriter(Local, storage.StorageWriter):
    """Saves the checkpoints of `torch.distributed.checkpoint.save` and `async_save`, as parts of all ranks.

    Each rank's bytes are copied into shared memory, from which a process of its own writes them. A checkpoint gets its
    name, and `latest` leads to it, when every rank's part is durable. `save` returns after that. Every rank makes one
    `StorageWriter` on the same directory, uses it for all saves, and closes it.

    Args:
        directory: where the checkpoints are written; created if it is missing.
        memory: bytes of shared memory of this rank at most, as for `CheckpointWriter`.
        format: of each rank's file. `"distcp"`: DCP's own `FileSystemReader` reads the checkpoint as well, without this
            library. `"safetensors"`, `"torch"` or `"npz"`: the file of a rank is for other programs, and the checkpoint
            is read by `StorageReader` alone.
        keep_last, keep_every: which checkpoints stay, as for `CheckpointWriter`; the same on every rank.
        nice, ionice: of the writing process, as for `CheckpointWriter`.
        process_group: that of the saves, `process_group=`; None: all ranks.

    `checkpoint_id=` of `save` is the name of the checkpoint, or its path in the directory; a number at its end is its
    step. Without one the name is `step-00000007` if the state dict has an int `step`, else `save-00000001` and so on.
    A name that exists is refused.

    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shmtensor.dcp import StorageReader, StorageWriter
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     with StorageWriter(runs) as writer:
    ...         metadata = dcp.save({"w": torch.ones(3), "step": 7}, storage_writer=writer, no_dist=True)
    ...     state, same = {"w": torch.zeros(3), "step": 0}, {"w": torch.zeros(3), "step": 0}
    ...     dcp.load(state, storage_reader=StorageReader(runs), no_dist=True)
    ...     dcp.load(same, checkpoint_id=f"{runs}/step-00000007", no_dist=True)  # by torch's own reader
    ...     state, same["w"]
    ({'w': tensor([1., 1., 1.]), 'step': 7}, tensor([1., 1., 1.]))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        memory: int | str | None = None,
        format: Literal["distcp", "safetensors", "torch", "npz"] = "distcp",
        keep_last: int | None = None,
        keep_every: int | None = None,
        nice: int = 10,
        ionice: Literal["idle", "low"] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.directory = check_directory(directory)
        """The directory's absolute path."""
        get_format(format)
        self._parts = PartWriter(
            self.directory,
            {
                "memory": memory, "format": format, "keep_last": keep_last, "keep_every": keep_every, "nice": nice,
                "ionice": ionice,
            },
        )  # fmt: skip
        self._group = process_group
        self._rank = 0
        self._name: str | None = None
        self._ahead = _Ahead()
        self._lock = threading.Lock()

    # --- what DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Name the next checkpoint. `ArgumentError` if the name is not allowed, or its path is in another directory."""
        self._name = None if checkpoint_id is None else self._name_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """None. DCP calls it at the beginning of each save, after it has taken the state dict."""
        self._ahead.current, self._ahead.announced = self._ahead.announced, None
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note the rank, and check that all ranks save together."""
        if not kwargs.get("use_collectives", True):
            raise ArgumentError("use_collectives=False: all ranks save one checkpoint here, leave it out")
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is. Opens this rank's writer: if that fails, DCP tells all ranks, and none waits for it."""
        if self._ahead.current is None:
            self.open(self._parts.place or self._expected())
        return plan

    def _expected(self) -> Place:
        """Which rank of how many this will be. `write_data` knows."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank(self._group) == self._rank:
            return Place(self._rank, dist.get_world_size(self._group))
        return Place(0, 1)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Note in each plan which rank it is for."""
        count = len(plans)
        return [dataclasses.replace(plan, storage_data=Place(rank, count)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items into shared memory, and wait until the checkpoint of all ranks is durable."""
        saving, self._ahead.current = self._ahead.current, None
        with self._lock:
            name, self._name = self._name, None
            if saving is None:
                saving = self._parts.save(plan, planner, plan.storage_data, name)
            elif name not in (None, saving.name):
                raise ArgumentError(
                    f"checkpoint_id={name!r}: the state was staged as {saving.handle.name!r} before async_save gave "
                    "the name: call writer.reset(name) before async_save, or have an int `step` in the state dict"
                )
        try:
            saving.handle.durable.result()
        except Exception:
            if saving.handle.status != "complete":
                with self._lock:
                    self._parts.close()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(saving.results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the checkpoint is durable, with its metadata; the trainer may be gone by then."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint may have this name or path."""
        try:
            check_name(os.path.basename(os.fspath(checkpoint_id)))
        except (ArgumentError, ArgumentTypeError):
            return False
        return not is_url(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint that `reset` named, or else the directory."""
        return self.directory if self._name is None else os.path.join(self.directory, self._name)

    def _name_of(self, checkpoint_id: str | os.PathLike[str]) -> str:
        path = os.fspath(checkpoint_id)
        if os.sep in path and os.path.dirname(check_directory(path)) != self.directory:
            raise ArgumentError(
                f"checkpoint_id={path!r} is not in {self.directory}: pass a name, or a StorageWriter of its directory"
            )
        return check_name(os.path.basename(path))

    # --- for AsyncStager

    def open(self, place: Place) -> None:
        """Open this rank's writer now. Raises as `CheckpointWriter` does."""
        with self._lock:
            self._parts.open(place)

    def save_ahead(self, plan: SavePlan, planner: SavePlanner, place: Place) -> Saving:
        """Copy this rank's items into shared memory now."""
        with self._lock:
            name, self._name = self._name, None
            return self._parts.save(plan, planner, place, name)

    def announce(self, saving: Saving) -> None:
        """The save that DCP begins next in this thread is of a state that `save_ahead` has copied: its `write_data`
        copies nothing, and waits until that checkpoint is durable."""
        self._ahead.announced = saving

    # --- the end

    def close(self) -> None:
        """Wait until every checkpoint is durable or has failed, and end this rank's writing process. Idempotent."""
        with self._lock:
            self._parts.close()

    def _instead(self) -> str:
        return (
            "use AsyncCheckpointerType.THREAD, this library has a process that writes; or make one in the other process"
        )

    def __enter__(self) -> StorageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StorageWriter {self.directory!r}>"
