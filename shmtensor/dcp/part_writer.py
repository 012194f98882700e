"""One rank's `CheckpointWriter` behind DCP: opened with the first save, closed after one that failed.

DCP's plan of a rank becomes a flat state: a dict of its chunks, and the pickled objects as one array.

A rank that fails must not keep the others waiting:

    it cannot open its writer      before the ranks plan: DCP, or the stager, tells all, and no rank saves
    it cannot save its part        it closes its writer, whereupon the others' give the checkpoint up
    the checkpoint is given up     every rank closes its writer before DCP tells anything, and opens a new one next time

"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ..checkpoint.dcp_metadata import KEY
from ..checkpoint.handle import SaveHandle
from ..checkpoint.names import step_of
from ..checkpoint.writer import CheckpointWriter
from ..errors import ArgumentTypeError
from .description import OBJECTS, Description, ObjectItem, TensorItem, check_item

_NUMBER: Final = re.compile(r"(?:.*\D)?(\d{1,18})")


class Place(NamedTuple):
    """Which rank of how many."""

    rank: int
    world_size: int


class Saving(NamedTuple):
    """A save of this rank's part: its handle, what DCP calls the results, and the name that it was given, or None."""

    handle: SaveHandle
    results: list[WriteResult]
    name: str | None


class PartWriter:
    """Saves parts of checkpoints, with the options of a `CheckpointWriter`. For one thread at a time."""

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        self._directory, self._options = directory, options
        self.place: Place | None = None
        """Of the writer that is open, or was open last."""
        self._writer: CheckpointWriter | None = None

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
            state, description, results = _resolve(plan, planner)
            meta: dict[str, Any] = {KEY: description.render()}
            step = _step(planner, name)
            if step is not None:
                meta["step"] = step
            return Saving(self.open(place).save(state, name, meta), results, name)
        except BaseException:
            self.close()
            raise

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


def _resolve(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, Any], Description, list[WriteResult]]:
    """The state of a part, its description, and the results for DCP."""
    tensors: dict[str, torch.Tensor] = {}
    objects: list[bytes] = []
    description = Description([], [])
    results = []
    for item in plan.items:
        fqn, path = item.index.fqn, check_item(item.index.fqn, plan.planner_data)
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            objects.append(bytes(data.getbuffer()))
            description.objects.append(ObjectItem(fqn, path, len(objects[-1])))
            nbytes = len(objects[-1])
        else:
            tensor, offsets, size = _chunk(item, data)
            description.tensors.append(TensorItem(fqn, path, size, offsets))
            tensors[_key(item.index, offsets, tensors)] = tensor
            nbytes = tensor.nbytes
        results.append(WriteResult(item.index, nbytes, None))
    state: dict[str, Any] = {"tensors": tensors}
    if objects:
        state[OBJECTS] = np.frombuffer(b"".join(objects), np.uint8)
    return state, description, results


def _chunk(item: WriteItem, data: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """The chunk of an item, its offsets, and the size of the whole tensor."""
    about = item.tensor_data
    tensor = data.to_local() if isinstance(data, DTensor) else data
    if about is None or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ArgumentTypeError(
            f"item {item.index.fqn!r:.80} is a {type(data).__name__} that is no dense tensor: only those are saved here"
        )
    if tuple(tensor.shape) != tuple(about.chunk.sizes):
        raise ArgumentTypeError(
            f"item {item.index.fqn!r:.80} has shape {list(tensor.shape)}, its plan says {list(about.chunk.sizes)}"
        )
    tensor = tensor.detach()
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor = tensor.contiguous()  # a checkpoint would have one element in place of the repeated ones
    return tensor, tuple(about.chunk.offsets), tuple(about.size)


def _key(index: MetadataIndex, offsets: tuple[int, ...], taken: dict[str, torch.Tensor]) -> str:
    """The name of a chunk in the part."""
    key = f"{index.fqn}[{','.join(map(str, offsets))}]" if any(offsets) else index.fqn
    while key in taken:
        key += "'"
    return key
