"""`AsyncStager`: what `async_save` waits for is one copy into shared memory.

DCP stages a state before it plans, in the trainer's thread, and plans afterwards, in a thread of its own. Here the
ranks plan first, by a small exchange in `stage`: each rank knows then which items are its own, and copies exactly those
into its writer's slots. From there on no trainer is needed. DCP's thread plans once more, over the same tensors, for
the metadata that it returns; it copies nothing, and waits until the checkpoint is durable.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ..errors import ArgumentError, ResourceError
from .part_writer import Place
from .writer import StorageWriter

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
        process_group: the ranks that save together; None: all. The stager makes a gloo group of them for itself.
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
        self._group: Any = None
        self._place = Place(0, 1)
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=process_group is not None)
            self._place = Place(dist.get_rank(self._group), len(ranks))
        self._local: bytes | None = None
        self._plan: SavePlan | None = None
        self._closed = False

    def stage(self, state_dict: State) -> State:
        """Copy this rank's items of a state dict into shared memory. Returns a state dict of the same tensors."""
        if self._closed:
            raise ArgumentError("the AsyncStager is closed: make a new one")
        planner = self._make_planner()
        planner.set_up_planner(state_dict=state_dict, storage_meta=None, is_coordinator=self._place.rank == 0)
        local = planner.create_local_plan()
        if not local.usable:
            raise ArgumentError("planner= makes planners that cache their plans: leave that out, the stager does it")
        plan = planner.finish_plan(self._agreed(planner, local))
        saving = self._writer.save_ahead(plan, planner, self._place)
        staged = {key: _frame(value) for key, value in state_dict.items()}
        key = next(iter(staged), "")  # of an empty state dict: DCP notes one more object, in what it returns
        staged[key] = _Staged(staged.get(key), partial(self._writer.announce, saving))
        return staged

    def _agreed(self, planner: SavePlanner, local: SavePlan) -> SavePlan:
        """This rank's items: those of the last save if no rank's plan has changed, else the coordinator decides. Also
        opens the writers, before any rank saves: if one cannot, every rank raises."""
        if self._group is None:
            self._writer.open(self._place)
            return planner.create_global_plan([local])[0][0]
        digest = hashlib.sha256(pickle.dumps(local)).digest()
        problem, votes = None, [(False, "")] * self._place.world_size
        try:
            self._writer.open(self._place)
        except Exception as error:
            problem = error
        mine = self._plan is not None and digest == self._local, "" if problem is None else str(problem)
        dist.all_gather_object(votes, mine, self._group)
        if problem is not None:
            raise problem
        for rank, (_, text) in enumerate(votes):
            if text:
                raise ResourceError(errno.ECANCELED, f"rank {rank} cannot save: {text}")
        if self._plan is None or not all(same for same, _ in votes):
            self._local = None  # until the exchange is over
            self._plan = self._exchange(planner, local)
            self._local = digest
        return self._plan

    def _exchange(self, planner: SavePlanner, local: SavePlan) -> SavePlan:
        """Gather the plans of all ranks at the first one, and scatter what its planner makes of them, or its error."""
        rank, count = self._place
        first = dist.get_global_rank(self._group, 0)
        plans: list[Any] = [None] * count
        dist.gather_object(local, plans if rank == 0 else None, first, self._group)
        answers: list[Any] = [None] * count
        if rank == 0:
            try:
                answers = list(planner.create_global_plan(plans)[0])
            except Exception as error:
                answers = [str(error)] * count
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, answers if rank == 0 else None, first, self._group)
        if not isinstance(mine[0], SavePlan):
            raise ArgumentError(f"the planner of rank 0 refuses the plans of all ranks: {mine[0]}")
        return dataclasses.replace(mine[0], planner_data=local.planner_data)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` has copied."""

    def close(self) -> None:
        """Leave the stager's group. The writer stays open. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None


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
