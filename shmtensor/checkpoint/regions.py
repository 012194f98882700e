"""The bytes of memory of a state, each once.

    memory    ....|------- weight -------|.....|--- a ---|......     tensors that overlap: one region
                       |-- weight[8:] --|           |--- b ---|
    region 0      |----------------------|
    region 1                                   |--------------|

The rule: a tensor that overlaps no other is stored dense in C order, whatever its strides and the size of its storage;
a repeated dimension (`expand`) is stored once. Equal views are stored once. Tensors that overlap in another way are
stored as the range of memory from the first to the last byte of any of them, if that is at most `MAX_SPREAD` times
their own bytes; otherwise each is stored alone, and they no longer share memory when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.leaf import Leaf, c_strides, overlapping
from ..codec.libraries import torch_views
from ..codec.numpy import Array
from ..cuda.runtime import device_of, runtime
from ..wire.spec import extent

MAX_SPREAD: Final = 2
_GROUP_ALIGNMENT: Final = 16

Strides = tuple[int, ...] | None
Source = Callable[[], Any]


class Place(NamedTuple):
    """Where a leaf is: `strides` in bytes (None: C order), `region` -1 for a leaf without bytes."""

    region: int
    offset: int
    strides: Strides


class Region:
    """One range of bytes in a checkpoint.

    nbytes:  its size, never 0
    align:   power of two: alignment of its offset in a file
    address: of its bytes, if they are contiguous host memory of the state that its leaves cover; else 0
    device:  where its bytes are
    leaf:    number of its only leaf, as for `lone`; -1 if several share it
    """

    __slots__ = ("_source", "address", "align", "device", "leaf", "nbytes")

    def __init__(
        self, nbytes: int, align: int, source: Source | None = None, address: int = 0, device: str = "cpu"
    ) -> None:
        self.nbytes, self.align, self._source, self.address, self.device = nbytes, align, source, address, device
        self.leaf = -1

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes>"

    @property
    def has_source(self) -> bool:
        """Whether the bytes are in this process: not for a plan that came as a description."""
        return self._source is not None

    def bytes(self) -> Any:
        """The bytes now, in one dimension: a NumPy `uint8` array in host memory, a torch `uint8` tensor on a device.

        A view of the state's own memory if that is contiguous; otherwise (views with gaps) this call makes a copy: call
        it once, and drop the result soon.
        """
        if self._source is None:
            raise RuntimeError("a plan made from a description has no bytes")
        return self._source()


def place(leaves: Sequence[Leaf]) -> tuple[list[Place], list[Region]]:
    """The regions of some leaves, and the place of each leaf in them."""
    places: list[Place | None] = [None] * len(leaves)
    regions: list[Region] = []
    same: dict[tuple[object, ...], Place] = {}
    for members in _clusters(leaves):
        group = [leaves[index] for index in members]
        if len(members) == 1:
            region, strides = _dense(group[0])
            region.leaf = members[0]
            places[members[0]] = Place(len(regions), 0, strides)
            regions.append(region)
            continue
        raw = None if len({_view(leaf) for leaf in group}) == 1 else _Run.of(group)
        if raw is not None:
            regions.append(Region(raw.nbytes, _GROUP_ALIGNMENT, raw.bytes, raw.address, group[0].device))
            for index, leaf in zip(members, group, strict=True):
                strides = None if _is_plain(leaf.shape, leaf.raw or (), leaf.itemsize) else leaf.raw
                places[index] = Place(len(regions) - 1, leaf.start - raw.start, strides)
            continue
        for index, leaf in zip(members, group, strict=True):
            key = _view(leaf)
            if key not in same:
                region, strides = _dense(leaf)
                region.leaf = index
                same[key] = Place(len(regions), 0, strides)
                regions.append(region)
            places[index] = same[key]
    return [Place(-1, 0, None) if it is None else it for it in places], regions


def lone(leaf: Leaf) -> Region:
    """The region of a leaf that shares its bytes with no leaf, or only with equal views."""
    return _dense(leaf)[0]


def _clusters(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups of leaves (indices) whose memory overlaps, in order of their first leaf; only leaves with bytes."""
    filled = [index for index, leaf in enumerate(leaves) if leaf.extent]
    # a leaf without memory of its own (implied zeros) starts at 0 and overlaps nothing
    ranges = [(leaf.device, leaf.start, leaf.extent if leaf.start else 0) for leaf in map(leaves.__getitem__, filled)]
    return sorted(sorted(filled[each] for each in group) for group in overlapping(ranges))


def _view(leaf: Leaf) -> tuple[object, ...]:
    """A key that is equal for leaves that are equal views of the same bytes."""
    if not leaf.start:
        return (id(leaf),)
    return (leaf.device, leaf.start, leaf.shape, _source_strides(leaf), leaf.itemsize, leaf.extent)


def _source_strides(leaf: Leaf) -> tuple[int, ...]:
    """Strides in bytes of the source; packed types, whose elements share bytes, are always contiguous."""
    if leaf.raw is not None:
        return leaf.raw
    if leaf.torch:
        return tuple([stride * leaf.itemsize for stride in leaf.source.stride()])
    strides: tuple[int, ...] = leaf.source.strides
    return strides


def _is_plain(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the strides are those of C order; the stride of a dimension of 1 does not count."""
    return all(n == 1 or s == c for n, s, c in zip(shape, strides, c_strides(shape, itemsize), strict=True))


class _Run:
    """The range of memory from the first to the last byte of some overlapping leaves."""

    def __init__(self, start: int, nbytes: int, first: Leaf, *, covered: bool) -> None:
        self.start, self.nbytes, self._first = start, nbytes, first
        self.address = start if covered and first.device == "cpu" else 0

    @classmethod
    def of(cls, group: Sequence[Leaf]) -> _Run | None:
        """The range of some leaves; None if they are stored apart: spread too far, or strides that a file lacks."""
        if any(leaf.raw is None for leaf in group):
            return None
        first = min(group, key=lambda leaf: leaf.start)
        start = first.start
        end = max(leaf.start + leaf.extent for leaf in group)
        if end - start > MAX_SPREAD * sum({_view(leaf): leaf.nbytes for leaf in group}.values()):
            return None
        if any((leaf.start - start) % leaf.itemsize for leaf in group if leaf.torch):
            first = next((leaf for leaf in group if leaf.torch), first)
            base = first.source.untyped_storage().data_ptr()
            start -= start % _GROUP_ALIGNMENT
            if start < base:
                return None
        # the leaves overlap, so they cover all of it but what was added before the first one
        return cls(start, end - start, first, covered=start == min(leaf.start for leaf in group))

    def bytes(self) -> Any:
        first = self._first
        if first.torch:
            return storage_bytes(first.source, self.start, self.nbytes)
        one = first.source[tuple([slice(0, 1)] * len(first.shape))].reshape(1).view(np.uint8)
        return np.lib.stride_tricks.as_strided(one, (self.nbytes,), (1,), writeable=False)


def _dense(leaf: Leaf) -> tuple[Region, Strides]:
    """The region of a single leaf, and the leaf's strides in it."""
    align = min(leaf.itemsize & -leaf.itemsize, _GROUP_ALIGNMENT)
    if leaf.address and leaf.strides is None:  # the usual case
        return Region(leaf.nbytes, align, lambda: _whole(leaf), leaf.start), None  # in host memory
    strides = _source_strides(leaf)
    if _is_plain(leaf.shape, strides, leaf.itemsize):
        if leaf.start:
            address = leaf.start if leaf.device == "cpu" else 0
            return Region(leaf.nbytes, align, lambda: _whole(leaf), address, leaf.device), None
        return Region(leaf.nbytes, align, lambda: _gather(leaf, ()), 0, leaf.device), None  # implied zeros
    repeated = tuple([axis for axis, (n, s) in enumerate(zip(leaf.shape, strides, strict=True)) if n > 1 and not s])
    kept = tuple([1 if axis in repeated else n for axis, n in enumerate(leaf.shape)])
    stored: Strides = None
    if repeated:
        stored = tuple([0 if axis in repeated else s for axis, s in enumerate(c_strides(kept, leaf.itemsize))])
    return Region(extent(kept, None, leaf.itemsize), align, lambda: _gather(leaf, repeated), 0, leaf.device), stored


def _whole(leaf: Leaf) -> Any:
    if leaf.torch:
        return storage_bytes(leaf.source, leaf.start, leaf.nbytes)
    return _array_bytes(leaf.source)


def _gather(leaf: Leaf, repeated: Sequence[int]) -> Any:
    source = leaf.source
    for axis in repeated:
        source = source[(slice(None),) * axis + (slice(0, 1),)]
    if not leaf.torch:
        # as whole items: the padding of a structured type is part of them
        whole = source.view(np.dtype((np.void, leaf.itemsize))) if source.dtype.names is not None else source
        return _array_bytes(np.ascontiguousarray(whole))
    import torch

    # as its carrier type: torch cannot copy all of the small types; clone() also makes memory of implied zeros
    dtype: Any = leaf.dtype
    carrier = torch_views().carrier(dtype)
    if source.dtype != carrier:
        source = source.view(carrier)
    if device_of(source) >= 0:
        cuda = runtime()
        dense = cuda.dense(source, cuda.current_stream(device_of(source)))
    else:
        dense = source.clone(memory_format=torch.contiguous_format)
    return storage_bytes(dense, dense.data_ptr(), dense.numel() * leaf.itemsize)


def _array_bytes(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat.view(np.uint8)


def storage_bytes(tensor: Any, address: int, nbytes: int) -> Any:
    """Bytes of a tensor's storage, as `Region.bytes` gives them."""
    import torch

    storage = tensor.untyped_storage()
    if device_of(tensor) >= 0:
        return runtime().run(tensor, address - storage.data_ptr(), nbytes)
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage, address - storage.data_ptr(), (nbytes,), (1,))
    return view.numpy() if view.is_cpu else view
