"""Where each leaf lies in the payload.

Leaves that overlap in memory (the same tensor twice, views of one storage) lie in one group:

    memory    ....|----- weight -----------------|....      one run of bytes, copied once as it is
                       |-- weight[2:].T --|
    payload   |64   |16: group .................|64: next leaf
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import add, gt
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, WireError
from ..wire import spec, tree
from ..wire.spec import LeafSpec
from .leaf import Leaf
from .walk import Walk, device_job, is_cuda_name, torch_views

if TYPE_CHECKING:
    import numpy as np

# what remains to be done by NumPy or torch: (payload) -> None
Job = Callable[["np.ndarray[Any, Any]"], None]


class Layout:
    """The plan for values that look the same.

    static:     the static part
    nbytes:     of the payload
    offsets:    in the payload, one per leaf
    sizes:      bytes to copy
    extents:    bytes of memory that each leaf spans
    shapes, dtypes: of the walk it was made from, to compare with
    tied:       the last plan for such a value with ties, and the addresses it holds for
    """

    __slots__ = ("dtypes", "extents", "nbytes", "offsets", "shapes", "sizes", "static", "tied")

    def __init__(self, walk: Walk, leaves: Sequence[Leaf]) -> None:
        placed: list[LeafSpec] = []
        descriptions = _Descriptions()
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        end = 0
        for leaf in leaves:
            size = leaf.nbytes
            offset = -(-end // spec.ALIGNMENT) * spec.ALIGNMENT if size else 0
            end = max(end, offset + size)
            self.offsets.append(offset)
            self.sizes.append(size)
            placed.append(leaf.entry(offset, leaf.strides, descriptions.index(leaf)))
        self.extents = [leaf.extent for leaf in leaves]
        self.nbytes = end
        self.static = encode(placed, walk.tokens, descriptions)
        self.tied: tuple[Sequence[int], Tied] | None = None
        self.dtypes = walk.dtypes
        self.shapes = walk.shapes


class _Descriptions:
    """Distinct dtype descriptions, in the order of their first use."""

    def __init__(self) -> None:
        self.table: list[object] = []
        self._index: dict[str, int] = {}

    def index(self, leaf: Leaf) -> int:
        if leaf.description is None:
            return 0
        index = self._index.setdefault(str(leaf.description), len(self.table))
        if index == len(self.table):
            self.table.append(leaf.description)
        return index


def encode(placed: Sequence[LeafSpec], tokens: Sequence[object], descriptions: _Descriptions) -> bytes:
    """The static part; `ArgumentError` if it is beyond the limits."""
    if len(placed) > spec.MAX_LEAVES:
        raise ArgumentError(
            f"value has {len(placed)} tensors, at most {spec.MAX_LEAVES} are allowed: "
            "stack some, or send several values"
        )
    for entry in placed:
        try:
            spec.check_extent(entry, 0 if entry.dtype is None else entry.dtype.itemsize)
        except WireError as error:
            raise ArgumentError(f"value is too large to send: {error}") from None
    single = len(tokens) == 1 and tokens[0] == tree.LEAF
    static = spec.encode(placed, None if single else tokens, descriptions.table)
    if len(static) > spec.MAX_STATIC:
        raise ArgumentError(
            f"structure of the value takes {len(static)} bytes, at most {spec.MAX_STATIC} are allowed: "
            "stack some tensors, or send several values"
        )
    return static


_MAX_LAYOUTS = 512
_MAX_SAME_TOKENS = 8
_MAX_CACHED = 20_000  # tokens
_layouts: dict[tuple[Any, ...], list[Layout]] = {}


def layout_of(walk: Walk) -> Layout:
    """The layout of the walk's value as if no two leaves overlapped, from the cache if one like it was there."""
    tokens = tuple(walk.tokens)
    same = _layouts.get(tokens)
    if same is not None:
        for layout in same:
            if layout.dtypes == walk.dtypes and layout.shapes == walk.shapes:
                return layout
    layout = Layout(walk, [walk.leaf_at(index) for index in range(len(walk.sources))])
    if len(tokens) <= _MAX_CACHED:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        # a new list, so that another thread never sees one change
        _layouts[tokens] = [layout, *(same or ())][:_MAX_SAME_TOKENS]
    return layout


def overlaps(starts: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether any two byte ranges may overlap; also true for an empty range inside another one.

    Sorted starts and sorted ends: the ranges are disjoint if each end comes before the next start.
    """
    ordered = sorted(starts)
    ends = sorted(map(add, starts, extents))
    return any(map(gt, ends, islice(ordered, 1, None)))


def tied_of(walk: Walk, layout: Layout, starts: Sequence[int]) -> Tied:
    """The plan for a value in which leaves overlap; sent again from the same memory it costs nothing more."""
    last = layout.tied
    if last is not None and last[0] == starts:
        return last[1]
    tied = Tied(walk)
    if not tied.jobs:  # they hold on to the leaves
        layout.tied = (list(starts), tied)
    return tied


class Tied:
    """Static part, size and copies of a value in which leaves may share memory.

    runs:  (address, offset, size) of memory to copy as it is
    jobs:  the other copies
    """

    __slots__ = ("jobs", "nbytes", "runs", "static")

    def __init__(self, walk: Walk) -> None:
        leaves = [walk.leaf_at(index) for index in range(len(walk.sources))]
        self.runs: list[tuple[int, int, int]] = []
        self.jobs: list[Job] = []
        self.nbytes = 0
        placed: list[LeafSpec | None] = [None] * len(leaves)
        descriptions = _Descriptions()
        group = 0
        for members in _groups(leaves):
            group += 1
            offset = self._place_group([leaves[i] for i in members])
            start = min(leaves[i].start for i in members)
            shared = sum(leaves[i].torch for i in members) > 1
            for i in members:
                leaf = leaves[i]
                strides = None if leaf.address and leaf.strides is None else leaf.raw
                extra = (group if shared else 0) if leaf.torch else descriptions.index(leaf)
                placed[i] = leaf.entry(offset + leaf.start - start, strides, extra)
        alone: dict[tuple[object, ...], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if placed[index] is None:
                alone.setdefault(_identity(leaf, index), []).append(index)
        for members in alone.values():
            leaf = leaves[members[0]]
            offset = self._place(leaf)
            shared = leaf.torch and len(members) > 1
            group += shared
            for i in members:
                extra = (group if shared else 0) if leaf.torch else descriptions.index(leaf)
                placed[i] = leaf.entry(offset, leaf.strides, extra)
        self.static = encode([entry for entry in placed if entry is not None], walk.tokens, descriptions)

    def _place(self, leaf: Leaf) -> int:
        size = leaf.nbytes
        if not size:
            return 0
        offset = -(-self.nbytes // spec.ALIGNMENT) * spec.ALIGNMENT
        self.nbytes = offset + size
        if leaf.address:
            self.runs.append((leaf.address, offset, size))
        elif is_cuda_name(leaf.device):
            self.jobs.append(device_job(leaf.source, offset, size))
        else:
            self.jobs.append(lambda payload: leaf.copy(leaf, payload, offset))
        return offset

    def _place_group(self, members: Sequence[Leaf]) -> int:
        start = min(leaf.start for leaf in members)
        extent = max(leaf.start + leaf.extent for leaf in members) - start
        # the same place within 16 bytes as in the source, so that every member stays aligned
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


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Indices of leaves whose byte ranges overlap, of those that can be shared as they are."""
    order = sorted(
        (leaf.device, leaf.start, index) for index, leaf in enumerate(leaves) if leaf.raw is not None and leaf.extent
    )
    groups: list[list[int]] = []
    device, end = "", 0
    for where, start, index in order:
        if where == device and start < end:
            groups[-1].append(index)
            end = max(end, start + leaves[index].extent)
        else:
            groups.append([index])
            device, end = where, start + leaves[index].extent
    return [group for group in groups if len(group) > 1 and _reachable([leaves[i] for i in group])]


def _identity(leaf: Leaf, index: int) -> tuple[object, ...]:
    """Equal for equal views of memory that cannot be shared as it is (expanded, reversed): they share one copy."""
    if not leaf.extent:
        return (index,)
    strides = leaf.source.stride() if leaf.torch else leaf.source.strides
    return (leaf.device, leaf.start, leaf.extent, leaf.shape, strides, leaf.torch, leaf.dtype, str(leaf.description))


def _reachable(members: Sequence[Leaf]) -> bool:
    first = members[0]
    if first.device == "cpu":
        return True
    start = min(leaf.start for leaf in members)
    extent = max(leaf.start + leaf.extent for leaf in members) - start
    return bool(torch_views().reaches(first, start, extent))
