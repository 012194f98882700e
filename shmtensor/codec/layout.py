"""The layout of a payload: the offset of each leaf.

Leaves that overlap in memory (the same tensor twice, views of one storage) lie in one group:

    memory    ....|----- weight -----------------|....      one run of bytes, copied once as it is
                       |-- weight[2:].T --|
    payload   |64   |16: group .................|64: next leaf
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..wire import spec
from ..wire.spec import LeafSpec
from .leaf import Leaf, overlapping
from .libraries import device_job, is_cuda_name, torch_views

if TYPE_CHECKING:
    import numpy as np

# a copy that NumPy or torch makes: (payload) -> None
Job = Callable[["np.ndarray[Any, Any]"], None]


class Layout:
    """Offsets, shared storages, size and copies of the leaves of a value.

    entries:   one per leaf
    storages:  (offset, bytes) of each storage that several tensors share
    nbytes:    bytes of the payload
    runs:      (address, offset, size) of plain copies of memory
    jobs:      the other copies
    """

    __slots__ = ("entries", "jobs", "nbytes", "runs", "storages")

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.runs: list[tuple[int, int, int]] = []
        self.jobs: list[Job] = []
        self.storages: list[tuple[int, int]] = []
        self.nbytes = 0
        placed: dict[int, LeafSpec] = {}
        for members in _groups(leaves):
            offset, start = self._place_group([leaves[i] for i in members]), min(leaves[i].start for i in members)
            if sum(leaves[i].torch for i in members) > 1:
                low = offset - offset % spec.GROUP_ALIGNMENT
                self.storages.append((low, self.nbytes - low))
                storage = len(self.storages)
            else:
                storage = 0
            for i in members:
                leaf = leaves[i]
                strides = None if leaf.address and leaf.strides is None else leaf.raw
                placed[i] = leaf.entry(offset + leaf.start - start, strides, storage if leaf.torch else 0)
        alone: dict[tuple[object, ...], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if index not in placed:
                alone.setdefault(identity(leaf) if leaf.extent else (index,), []).append(index)
        for members in alone.values():
            leaf = leaves[members[0]]
            offset = self._place(leaf)
            if leaf.torch and len(members) > 1:
                self.storages.append((offset, leaf.nbytes))
            for i in members:
                placed[i] = leaf.entry(
                    offset, leaf.strides, len(self.storages) if leaf.torch and len(members) > 1 else 0
                )
        self.entries = [placed[index] for index in range(len(leaves))]

    def _place(self, leaf: Leaf) -> int:
        size = leaf.nbytes
        if not size:
            return 0
        offset = -(-self.nbytes // spec.ALIGNMENT) * spec.ALIGNMENT
        self.nbytes = offset + size
        if leaf.address:
            self.runs.append((leaf.address, offset, size))
        else:
            self.jobs.append(job_of(leaf, offset))
        return offset

    def _place_group(self, members: Sequence[Leaf]) -> int:
        start = min(leaf.start for leaf in members)
        extent = max(leaf.start + leaf.extent for leaf in members) - start
        # the same offset modulo 16 as in the source, so that every member stays aligned
        offset = -(-self.nbytes // spec.ALIGNMENT) * spec.ALIGNMENT + start % spec.GROUP_ALIGNMENT
        self.nbytes = offset + extent
        if members[0].device == "cpu":
            self.runs.append((start, offset, extent))
        else:
            source = members[0].source
            at = start - source.untyped_storage().data_ptr()
            if is_cuda_name(members[0].device):
                self.jobs.append(device_job(source, offset, extent, at))
            else:
                copy = torch_views().device_run(members[0], start, extent)
                self.jobs.append(lambda payload: copy(payload, offset))
        return offset


def job_of(leaf: Leaf, offset: int) -> Job:
    """The copy of a leaf whose bytes do not lie in host memory as they are sent."""
    if is_cuda_name(leaf.device):
        found: Job = device_job(leaf.source, offset, leaf.nbytes)
        return found
    return lambda payload: leaf.copy(leaf, payload, offset)


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups of indices of leaves whose byte ranges overlap and that can be sent as that memory."""
    plain = [index for index, leaf in enumerate(leaves) if leaf.raw is not None and leaf.extent]
    found = overlapping([(leaves[index].device, leaves[index].start, leaves[index].extent) for index in plain])
    groups = [[plain[each] for each in group] for group in found if len(group) > 1]
    return [group for group in groups if _reachable([leaves[index] for index in group])]


def identity(leaf: Leaf) -> tuple[object, ...]:
    """A key that is equal for equal views: views that cannot be sent as memory (expanded, reversed) share one copy."""
    strides = leaf.source.stride() if leaf.torch else leaf.source.strides
    return (leaf.device, leaf.start, leaf.extent, leaf.shape, strides, leaf.torch, leaf.dtype, str(leaf.description))


def _reachable(members: Sequence[Leaf]) -> bool:
    first = members[0]
    if first.device == "cpu":
        return True
    start = min(leaf.start for leaf in members)
    extent = max(leaf.start + leaf.extent for leaf in members) - start
    return bool(torch_views().reaches(first, start, extent))
