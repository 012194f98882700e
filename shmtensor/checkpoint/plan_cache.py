"""`PlanCache`: reuses plan and layout of the last save for a state with the same tensors at the same addresses.

What is reused depends on *marks* alone: each leaf's name, address, shape, strides, dtype and device. A save computes
the marks of its state. If they are equal, the table of tensors, the regions and the JSON text of both are reused; the
structure around the tensors, with every scalar in it, and the plan's references to memory are always made anew, so that
the cache keeps no tensor alive. The layout is reused if it has room for the new description (`Layout.holds`). In any
other case the state is planned from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.leaf import Leaf, Refused, is_tensor
from ..codec.libraries import torch_views
from ..codec.numpy import ROW, Array, address_of, array_at, array_leaf
from ..errors import ArgumentError, ArgumentTypeError
from .formats import Format, Layout
from .json_values import check_meta
from .plan import Plan, assemble
from .regions import Region, lone
from .structure import Encoder
from .transfer import Chunk, cut

Marks = list[Any]
_ATTRIBUTES: Final = attrgetter("dtype", "layout", "shape", "device")


class Prepared(NamedTuple):
    """A plan with its bytes, its description, and the layout of the files."""

    plan: Plan
    described: bytes
    geometry: Geometry


class Geometry:
    """The part of a layout that does not depend on digests; cut into chunks once for each size."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._size = layout, 0
        self._chunks: list[Chunk] = []
        self.single, self.nbytes = layout.single, layout.nbytes

    def chunks(self, size: int) -> list[Chunk]:
        """The layout in chunks of so many bytes."""
        if size != self._size:
            self._chunks, self._size = cut(self._layout, size), size
        return self._chunks

    def holds(self, description: bytes) -> bool:
        """Whether a plan of this description, of the same tensors and regions, is laid out in the same way."""
        return self._layout.holds is not None and self._layout.holds(description)


class PlanCache:
    """The cache of one writer. Thread-safe, and consistent after any exception: a thread takes the memory out, and puts
    it back when it is complete again. A thread that finds none plans from scratch."""

    def __init__(self, format: Format, max_shard: int | None) -> None:
        self._make = partial(_Memory, format, max_shard)
        self._kept: list[_Memory] = []

    @property
    def hits(self) -> int:
        """How often a state was planned from memory."""
        return self._kept[-1].hits if self._kept else 0

    def prepare(self, state: object, meta: dict[str, Any] | None) -> Prepared:
        """Plan a state. Raises as `plan` does."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = self._make()
        prepared = memory.prepare(state, meta)
        if not self._kept:
            self._kept.append(memory)
        return prepared


class _Memory:
    """The last plan. For one thread at a time."""

    def __init__(self, format: Format, max_shard: int | None) -> None:
        self._format, self._max_shard = format, max_shard
        self._marks: Marks | None = None
        self._plan = Plan(None, [], [], None)
        self._spots: list[_Spot] = []
        self._described = b""
        self._geometry: Geometry | None = None
        self.hits = 0
        """How often a state was planned from memory."""

    def prepare(self, state: object, meta: dict[str, Any] | None) -> Prepared:
        """Plan a state. Raises as `plan` does."""
        if meta is not None:
            check_meta(meta)
        made = self._again(state, meta)
        if made is None:
            made = self._anew(state, meta)
        described = made.describe()
        if self._geometry is None or not (described == self._described or self._geometry.holds(described)):
            # of a plan without memory: a layout keeps its plan
            bare = made.renewed(made.tree, [Region(region.nbytes, region.align) for region in made.regions], meta)
            self._geometry = Geometry(self._format.layout(bare, self._max_shard))
        self._described = described
        return Prepared(made, described, self._geometry)

    def _again(self, state: object, meta: dict[str, Any] | None) -> Plan | None:
        if self._marks is None:
            return None
        outline = _Outline()
        try:
            tree = outline.encode(state)
            sources = [source for _, source in outline.leaves]
            marks = _marks([name for name, _ in outline.leaves], sources)
        except (ArgumentError, ArgumentTypeError, RuntimeError, NotImplementedError):
            return None  # a full plan reports the error, or can do it
        if marks is None or marks != self._marks:
            return None
        self.hits += 1
        return self._plan.renewed(tree, [spot.region(sources) for spot in self._spots], meta)

    def _anew(self, state: object, meta: dict[str, Any] | None) -> Plan:
        self._marks = self._geometry = None  # nothing is reused after an error
        encoder = Encoder()
        made = assemble(encoder.encode(state), encoder.leaves, meta)
        leaves = [leaf for _, leaf in encoder.leaves]
        if all(map(_is_usual, leaves)) and all(region.address or region.leaf >= 0 for region in made.regions):
            self._spots = [_Spot(each.nbytes, each.align, each.address, each.leaf) for each in made.regions]
            bare = [Region(each.nbytes, each.align) for each in made.regions]
            self._plan = made.renewed(None, bare, None)
            self._marks = _marks([name for name, _ in encoder.leaves], [leaf.source for leaf in leaves])
        return made


class _Spot(NamedTuple):
    """How to find a region again: at an address, or as the only leaf in it."""

    nbytes: int
    align: int
    address: int
    leaf: int

    def region(self, sources: Sequence[Any]) -> Region:
        """The region in a state with the same marks, whose sources it keeps alive."""
        nbytes, align, address, number = self
        if address:
            return Region(nbytes, align, partial(_memory, sources, address, nbytes), address)
        source = sources[number]
        return lone(array_leaf(source) if isinstance(source, np.ndarray) else torch_views().tensor_leaf(source))


def _memory(owners: Sequence[Any], address: int, nbytes: int) -> Array:
    """Host memory that belongs to some of the owners."""
    return array_at(address, nbytes)


class _Outline(Encoder):
    """A walk that collects tensors and arrays themselves instead of leaves. Refuses unusual types."""

    leaves: list[tuple[str, Any]]

    def _tensor(self, tensor: Any, name: str) -> Any:
        if type(tensor) not in torch_views().tensor_types():
            raise Refused(ArgumentTypeError, "of another type")
        # a tensor of our own: it keeps this memory even if the state's tensor is given other memory meanwhile
        return {"x": self._leaf(name, tensor.detach())}

    def _array(self, array: Array, name: str) -> int:
        return self._leaf(name, array)


def _is_usual(leaf: Leaf) -> bool:
    """Whether the marks describe a leaf completely: not so for parts of quantized tensors, and structured arrays."""
    if not leaf.torch:
        return leaf.dtype is not None and ROW.get(leaf.source.dtype) is leaf.dtype
    return torch_views().ROW.get(leaf.source.dtype) is leaf.dtype


def _marks(names: list[str], sources: Sequence[Any]) -> Marks | None:
    """What the plan depends on, without references to memory; None if it depends on more."""
    tensors = [source for source in sources if is_tensor(source)]
    kinds = [source.dtype if isinstance(source, np.ndarray) else None for source in sources]
    marks: Marks = [names, kinds]
    if tensors:
        views = torch_views()
        if any(map(views.is_neg, tensors)) or any(map(views.is_conj, tensors)):
            return None  # what is saved is a copy of their own memory
        marks += [
            list(map(views.data_ptr, tensors)), list(map(views.stride, tensors)), list(map(_ATTRIBUTES, tensors)),
        ]  # fmt: skip
    marks.append([
        (address_of(source), source.shape, source.strides) for source in sources if isinstance(source, np.ndarray)
    ])  # fmt: skip
    return marks
