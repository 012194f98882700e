"""`StorageWriter`: DCP's saves through this library's checkpoints of several ranks.

`PartWriter` is one rank's `CheckpointWriter` behind DCP: opened with the first save, closed after one that failed.
DCP's plan of a rank becomes a flat state: a dict of its chunks, and the pickled objects as one array.

A rank that fails must not keep the others waiting:

    it cannot open its writer      before the ranks plan: DCP, or the stager, tells all, and no rank saves
    it cannot save its part        it closes its writer, whereupon the others' give the checkpoint up
    the checkpoint is given up     every rank closes its writer before DCP tells anything, and opens a new one next time

With `AsyncStager`, what `async_save` waits for is one copy into shared memory. DCP stages a state before it plans, in
the trainer's thread, and plans afterwards, in a thread of its own. Here the ranks plan first, by a small exchange in
`stage`: each rank knows then which items are its own, and copies exactly those into its writer's slots. Then they
exchange whether that succeeded, or why not: if one failed, `async_save` raises on all of them. From then on no trainer
is needed. DCP's thread plans once more, over the same tensors, for the metadata that it returns; it copies nothing,
and waits until the checkpoint is durable.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import staging, storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..checkpoint.formats import get_format
from ..checkpoint.formats.distcp import KEY
from ..checkpoint.handle import SaveHandle
from ..checkpoint.names import check_directory, check_name, check_upload, step_of
from ..checkpoint.remote import is_url
from ..checkpoint.writer import CheckpointWriter
from ..endpoints.base import Local
from ..errors import ArgumentError, ArgumentTypeError, ForkedError, ResourceError
from .metadata import OBJECTS, ItemPath, ObjectItem, TensorItem, check_item, describe, render

_T = TypeVar("_T")


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
        upload, upload_keep_last: the URL to which each checkpoint is copied when it is durable, and how many stay
            there, as for `CheckpointWriter`; the same on every rank. `close` waits for the uploads.
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
        upload: str | None = None,
        upload_keep_last: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_upload(upload)
        self.directory = check_directory(directory)
        """The directory's absolute path."""
        get_format(format)
        self._parts = PartWriter(
            self.directory,
            {
                "memory": memory, "format": format, "keep_last": keep_last, "keep_every": keep_every, "nice": nice,
                "ionice": ionice, "upload": upload, "upload_keep_last": upload_keep_last,
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
        future.set_result([])  # `finish` needs none
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the checkpoint is durable, with its metadata; the trainer may be gone by then."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint may have this name or path."""
        try:
            check_name(os.path.basename(os.fspath(checkpoint_id).rstrip(os.sep)))
        except (ArgumentError, ArgumentTypeError):
            return False
        return not is_url(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint that `reset` named, or else the directory."""
        return self.directory if self._name is None else os.path.join(self.directory, self._name)

    def _name_of(self, checkpoint_id: str | os.PathLike[str]) -> str:
        path = os.fspath(checkpoint_id).rstrip(os.sep)
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


_NUMBER: Final = re.compile(r"(?:.*\D)?(\d{1,18})")


class Place(NamedTuple):
    """Which rank of how many."""

    rank: int
    world_size: int


class Saving(NamedTuple):
    """A save of this rank's part: its handle, and the name that it was given, or None."""

    handle: SaveHandle
    name: str | None


class PartWriter:
    """Saves parts of checkpoints, with the options of a `CheckpointWriter`. For one thread at a time."""

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        self._directory, self._options = directory, options
        self.place: Place | None = None
        """Of the writer that is open, or was open last."""
        self._writer: CheckpointWriter | None = None
        self._layout: _Layout | None = None
        self._objects = np.empty(0, np.uint8)

    def open(self, place: Place) -> CheckpointWriter:
        """The writer, opened if it is not open. Raises as `CheckpointWriter` does."""
        if self.place != place:
            self.close()
        if self._writer is None:
            self._writer = CheckpointWriter(
                self._directory, rank=place.rank, world_size=place.world_size, on_error="warn", **self._options
            )
            self.place = place
        return self._writer

    def save(self, plan: SavePlan, planner: SavePlanner, place: Place, name: str | None) -> Saving:
        """Copy the items of a plan into shared memory, as this rank's part of the checkpoint.

        After an error no part of this checkpoint comes from this rank: its writer is closed.
        """
        try:
            if self._layout is None or not self._layout.is_of(plan):
                self._layout = _Layout(plan)
            tensors, objects, description = self._layout.resolve(planner)
            state: dict[str, Any] = {"tensors": tensors}
            if objects:
                state[OBJECTS] = self._in_place(b"".join(objects))
            meta: dict[str, Any] = {KEY: description}
            step = _step(planner, name)
            if step is not None:
                meta["step"] = step
            return Saving(self.open(place).save(state, name, meta), name)
        except BaseException:
            self.close()
            raise

    def _in_place(self, data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes in the memory of the last save's, if they are as many: a state whose memory is where it was is
        planned from memory. That save has copied them."""
        if len(data) != len(self._objects):
            self._objects = np.empty(len(data), np.uint8)
        self._objects[:] = np.frombuffer(data, np.uint8)
        return self._objects

    def close(self) -> None:
        """Wait until everything that was staged is durable or has failed, and close the writer. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _step(planner: SavePlanner, name: str | None) -> int | None:
    """The step of a checkpoint: the number at the end of its name, or an int `step` in the state dict."""
    if name is not None:
        found = _NUMBER.fullmatch(name)
        return int(found[1]) if found else None
    return step_of(getattr(planner, "state_dict", None), None)


class _Layout:
    """What a plan says of a part, whatever its items hold: their order and names, and the rows of its description."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan, self._items = plan, list(plan.items)
        self._keys: list[str | None] = []
        """Per item the name of its tensor in the part; None for an object."""
        self._objects: list[tuple[str, ItemPath | None]] = []
        tensors: list[TensorItem] = []
        taken: set[str] = set()
        for item in plan.items:
            fqn, path = item.index.fqn, check_item(item.index.fqn, plan.planner_data)
            key = None
            if item.type == WriteItemType.BYTE_IO:
                self._objects.append((fqn, path))
            else:
                about = _about(item)
                offsets = tuple(about.chunk.offsets)
                tensors.append(TensorItem(fqn, path, tuple(about.size), offsets))
                key = _key(item.index, offsets, taken)
                taken.add(key)
            self._keys.append(key)
        self._rows = render(tensors)

    def is_of(self, plan: SavePlan) -> bool:
        """Whether it is the layout of this plan: of the same object, with the same items."""
        return plan is self._plan and plan.items == self._items

    def resolve(self, planner: SavePlanner) -> tuple[dict[str, torch.Tensor], list[bytes], dict[str, Any]]:
        """The tensors of the part, its objects as bytes, and its description."""
        tensors: dict[str, torch.Tensor] = {}
        objects: list[bytes] = []
        for item, key in zip(self._items, self._keys, strict=True):
            data: Any = planner.resolve_data(item)
            if key is None:
                objects.append(bytes(data.getbuffer()))
            else:
                tensors[key] = _chunk(item, data)
        sizes = map(len, objects)
        rows = render(ObjectItem(*each, nbytes) for each, nbytes in zip(self._objects, sizes, strict=True))
        return tensors, objects, describe(self._rows, rows)


def _about(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise ArgumentTypeError(f"item {item.index.fqn!r:.80} is a tensor of which its plan says nothing")
    return item.tensor_data


def _chunk(item: WriteItem, data: Any) -> torch.Tensor:
    """The chunk of an item."""
    tensor = data.to_local() if isinstance(data, DTensor) else data
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ArgumentTypeError(
            f"item {item.index.fqn!r:.80} is a {type(data).__name__} that is no dense tensor: only those are saved here"
        )
    sizes = _about(item).chunk.sizes  # of a planner of others it may be a list
    if tensor.shape != tuple(sizes):
        raise ArgumentTypeError(
            f"item {item.index.fqn!r:.80} has shape {list(tensor.shape)}, its plan says {list(sizes)}"
        )
    tensor = tensor.detach()
    if not tensor.is_contiguous() and any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        tensor = tensor.contiguous()  # a checkpoint would have one element in place of the repeated ones
    return tensor


def _key(index: MetadataIndex, offsets: tuple[int, ...], taken: set[str]) -> str:
    """The name of a chunk in the part."""
    key = f"{index.fqn}[{','.join(map(str, offsets))}]" if any(offsets) else index.fqn
    while key in taken:
        key += "'"
    return key


State = dict[str, Any]


class AsyncStager(staging.AsyncStager):
    """The `async_stager=` of `torch.distributed.checkpoint.async_save`, together with a `StorageWriter`.

    When `async_save` returns, each rank's items are in shared memory (or, from a CUDA device, on their way there, in
    stream order), and the state may be changed. From then on the checkpoint becomes durable although every trainer is
    killed. The future of `async_save` is done when it is durable.

    Every rank makes one, at the same time, and uses it for all saves. It is for `AsyncCheckpointerType.THREAD`, the
    default: this library has a process that writes already.

    Args:
        writer: the `storage_writer=` of the same calls.
        process_group: the ranks that save together; None: all. The stager makes a gloo group of them for itself, in
            which forked children are not.
        planner: a function that makes a planner like the `planner=` of the same calls.

    The checkpoint is named when it is staged: by an int `step` in the state dict, or by `writer.reset(name)` before
    `async_save`. `checkpoint_id=` comes too late, and is refused if it is another name.

    >>> import tempfile, torch, warnings
    >>> import torch.distributed as dist, torch.distributed.checkpoint as dcp
    >>> from shmtensor.dcp import AsyncStager, StorageWriter
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as runs, StorageWriter(runs) as writer:
    ...     stager, w = AsyncStager(writer), torch.ones(3)
    ...     future = dcp.async_save({"w": w, "step": 7}, storage_writer=writer, async_stager=stager, no_dist=True)
    ...     w.zero_()  # does not reach the file
    ...     metadata = future.result(60)
    ...     stager.close()
    tensor([0., 0., 0.])
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        writer: StorageWriter,
        *,
        process_group: dist.ProcessGroup | None = None,
        planner: Callable[[], SavePlanner] = DefaultSavePlanner,
    ) -> None:
        self._writer, self._make_planner = writer, planner
        self._group: _Group | None = None
        if dist.is_available() and dist.is_initialized():
            self._group = _Group(process_group)
        self._place = Place(0, 1) if self._group is None else self._group.place
        self._pid = os.getpid()
        self._last: _Planned | None = None
        self._closed = False

    def stage(self, state_dict: State) -> State:
        """Copy this rank's items of a state dict into shared memory. Returns a state dict of the same tensors."""
        if os.getpid() != self._pid:
            raise ForkedError(
                f"the AsyncStager belongs to process {self._pid}: make one in a process group of this one"
            )
        if self._closed:
            raise ArgumentError("the AsyncStager is closed: make a new one")
        (planner, planned), same = self._together(partial(self._prepare, state_dict))
        plan = planned.plan
        if plan is None or not same:
            self._last = None  # until the exchange is over
            plan = self._exchange(planner, planned.local)
            self._last = planned._replace(plan=plan)
        try:
            (saving, staged), _ = self._together(partial(self._copy, state_dict, planner, plan))
        except BaseException:
            self._writer.close()  # some rank's part of this checkpoint never comes
            raise
        key = next(iter(staged), "")  # of an empty state dict: DCP notes one more object, in what it returns
        staged[key] = _Staged(staged.get(key), partial(self._writer.announce, saving))
        return staged

    def _prepare(self, state_dict: State) -> tuple[tuple[SavePlanner, _Planned], bool]:
        """Open the writer, and plan; and whether the plan is that of the last save."""
        planner, planned = self._make_planner(), self._last
        last = planned
        planner.set_up_planner(state_dict=state_dict, storage_meta=None, is_coordinator=self._place.rank == 0)
        signature: Any = _signature(planner)
        if planned is None or signature != planned.signature:
            local = planner.create_local_plan()
            if not local.usable:
                raise ArgumentError(
                    "planner= makes planners that cache their plans: leave that out, the stager does it"
                )
            signature = signature or hashlib.sha256(pickle.dumps(local)).digest()
            if planned is None or signature != planned.signature:
                planned = _Planned(local, signature)
        self._writer.open(self._place)
        return (planner, planned), planned is last

    def _copy(self, state_dict: State, planner: SavePlanner, plan: SavePlan) -> tuple[tuple[Saving, State], bool]:
        """Copy this rank's items into shared memory."""
        saving = self._writer.save_ahead(planner.finish_plan(plan), planner, self._place)
        return (saving, {key: _frame(value) for key, value in state_dict.items()}), True

    def _together(self, action: Callable[[], tuple[_T, bool]]) -> tuple[_T, bool]:
        """Do something on every rank. Returns what it makes here, and whether what it says is true on all ranks; raises
        on every rank if it does on one."""
        if self._group is None:
            return action()
        try:
            made, says = action()
        except BaseException as error:
            self._group.all_gather((False, str(error) or repr(error)))
            raise
        found = self._group.all_gather((says, ""))
        for rank, (_, text) in enumerate(found):
            if text:
                raise ResourceError(errno.ECANCELED, f"rank {rank} cannot save: {text}")
        return made, all(says for says, _ in found)

    def _exchange(self, planner: SavePlanner, local: SavePlan) -> SavePlan:
        """Gather the plans of all ranks at the first one, and scatter what its planner makes of them, or its error."""
        if self._group is None:
            return planner.create_global_plan([local])[0][0]
        group, others = self._group, range(1, self._place.world_size)
        mine: Any
        answers: list[Any]
        if self._place.rank:
            group.send(local, 0)
            mine = group.receive(0)
        else:
            plans = [local, *map(group.receive, others)]
            try:
                mine, *answers = planner.create_global_plan(plans)[0]
            except Exception as error:
                mine, *answers = [str(error)] * self._place.world_size
            for rank, answer in zip(others, answers, strict=True):
                group.send(answer, rank)
        if not isinstance(mine, SavePlan):
            raise ArgumentError(f"the planner of rank 0 refuses the plans of all ranks: {mine}")
        return dataclasses.replace(mine, planner_data=local.planner_data)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` has copied."""

    def close(self) -> None:
        """Leave the stager's group. The writer stays open. Idempotent."""
        self._closed = True
        if os.getpid() == self._pid:  # a forked child has none of the group's threads, for which its end would wait
            self._group = None


class _Group:
    """The ranks that save together, in a gloo group of their own: DCP's thread uses the other one.

    `dist.new_group(use_local_synchronization=True)` names a group after its ranks and the number of groups that this
    process is in. So it waits for ever if that is not the same on all ranks, and a second group with the name of one
    that is gone finds the addresses of that one. Here ranks count, in the store of their group, those that they make.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        group: Any = process_group or dist.group.WORLD
        self.place = Place(group.rank(), group.size())
        store = group.get_group_store()
        count = store.add(f"shmtensor/{self.place.rank}", 1)
        c10d: Any = dist  # whose type hints lack these
        self._gloo = c10d.ProcessGroupGloo(c10d.PrefixStore(f"shmtensor/{count}", store), *self.place)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        data = _pickled(value)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.place.world_size)]
        self._gloo.allgather(sizes, torch.tensor([len(data)])).wait()
        most = max(map(int, sizes))
        found = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
        self._gloo.allgather(found, torch.nn.functional.pad(data, (0, most - len(data)))).wait()
        return [_unpickled(each) for each in found]

    def send(self, value: Any, rank: int) -> None:
        """Send a value to a rank that receives it."""
        data = _pickled(value)
        for each in torch.tensor([len(data)]), data:
            self._gloo.send([each], rank, 0).wait()

    def receive(self, rank: int) -> Any:
        """The next value from a rank."""
        size = torch.empty(1, dtype=torch.int64)
        self._gloo.recv([size], rank, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._gloo.recv([data], rank, 0).wait()
        return _unpickled(data)


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().data)  # of a rank of this program; what follows its end is padding


class _Planned(NamedTuple):
    """A plan, and what it follows from: one record, so that a thread never takes one without the other."""

    local: SavePlan
    """Of this rank."""
    signature: Any
    """What the local plan follows from: of any planner that is the plan itself, as a digest."""
    plan: SavePlan | None = None
    """What the planner of the first rank has made of it; None before the exchange."""


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATTRIBUTES: Final = attrgetter("shape", "dtype")


def _signature(planner: SavePlanner) -> tuple[Any, ...] | None:
    """What the local plan of `DefaultSavePlanner` follows from, as far as a part depends on it: where each item is in
    the state, and size, dtype and distribution of each tensor. None of another planner, or of items that plan
    themselves.
    """
    if type(planner) is not DefaultSavePlanner or getattr(planner, "_enable_plan_caching", False):
        return None
    tensors, distributed = [], []
    kinds: list[type[Any] | None] = []
    for value in planner.state_dict.values():
        kind: type[Any] | None = type(value)
        if kind in _PLAIN:
            tensors.append(value)
        elif kind is DTensor and _local_kind(value) in _PLAIN:
            tensors.append(value)
            # the types, too: in versions of torch a _StridedShard equals the Shard of its dimension
            distributed.append((value.device_mesh, value.placements, list(map(type, value.placements))))
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            kind = None
        kinds.append(kind)
    return list(planner.state_dict), kinds, planner.mappings, list(map(_ATTRIBUTES, tensors)), distributed


def _local_kind(tensor: DTensor) -> type[Any]:
    with torch.no_grad():  # otherwise it notes the call for a gradient
        return type(tensor.to_local())


class _Staged:
    """A value of a staged state dict. DCP asks it for its state at the beginning of the save, in the thread that saves:
    so the writer knows which save that is, whatever has become of others."""

    def __init__(self, value: Any, announce: Callable[[], None]) -> None:
        self._value, self._announce = value, announce

    def state_dict(self) -> Any:
        """The value."""
        self._announce()
        return self._value

    def load_state_dict(self, state: Any) -> None:
        """DCP takes only objects that have this for stateful; it is not called by a save."""


def _frame(value: Any) -> Any:
    """The dicts and lists of a state anew, around the same tensors: the trainer may add to its own meanwhile."""
    if isinstance(value, dict):
        return {key: _frame(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_frame(each) for each in value]
    return value
