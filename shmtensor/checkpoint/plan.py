"""`plan`: the contents of a checkpoint of a state, before any byte is copied.

A plan is a structure (JSON, `shmtensor.checkpoint.structure`), a table of tensors, and the regions that have their
bytes. In the process of the state each region has access to its bytes; other processes get the plan as a description:

| key | value |
|---|---|
| `version` | 1 |
| `tree` | structure of the state |
| `tensors` | per tensor `[name, of torch (1, 0), dtype, shape, strides or null, region or -1, offset]` |
| `regions` | per region `[bytes, alignment]` |
| `meta` | the user's dict, or null |

Strides and offset are in bytes; strides are null for C order. The dtype is a name of `shmtensor.wire.dtypes`, or a
description of `shmtensor.codec.numpy`.

Regions are the bytes of memory of a state, each once:

    memory    ....|------- weight -------|.....|--- a ---|......     tensors that overlap: one region
                       |-- weight[8:] --|           |--- b ---|
    region 0      |----------------------|
    region 1                                   |--------------|

A tensor that overlaps no other is stored dense in C order, whatever its strides and the size of its storage; a repeated
dimension (`expand`) is stored once. Equal views are stored once. Tensors that overlap in another way are stored as the
range of memory from the first to the last byte of any of them, if that is at most `MAX_SPREAD` times their own bytes;
otherwise each is stored alone, and they no longer share memory when they are loaded.

`build_state` makes a state of a plan and the bytes of its regions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.leaf import MAX_SPREAD, Leaf, c_strides, overlapping
from ..codec.libraries import torch_views
from ..codec.numpy import CARRIER, AnyDType, Array, address_of
from ..cuda.runtime import device_of, runtime
from ..errors import ArgumentError, CheckpointError, CudaError, WireError
from ..options import shown
from ..wire.dtypes import BY_NAME, DType
from ..wire.spec import MAX_BYTES, MAX_NDIM, OF_ARRAYS, extent
from .devices import Blocks
from .structure import (
    MAX_DEPTH,
    MAX_TENSORS,
    Decoder,
    Encoder,
    ForeignEncoder,
    check_meta,
    is_deep,
    numpy_dtype,
    read_json,
)  # fmt: skip

VERSION: Final = 1
MAX_DESCRIPTION: Final = 48 << 20  # bytes of JSON: it must fit into a safetensors header, which others limit to 100 MB
MAX_NAME: Final = 400  # characters of a tensor's name in a file
_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Entry(NamedTuple):
    """One tensor or array of a state.

    name:    unique dotted path, as files show it
    torch:   torch tensor, else NumPy array
    dtype:   name in the dtype table, else a description (JSON) of a NumPy dtype
    shape:   elements
    strides: bytes, None for C order; 0 in a dimension that only repeats
    region:  index of its region, -1 if it has no bytes
    offset:  bytes from the start of the region
    """

    name: str
    torch: bool
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    region: int
    offset: int

    @property
    def row(self) -> DType | None:
        """The row of the dtype table; None for NumPy's other types."""
        return BY_NAME.get(self.dtype) if isinstance(self.dtype, str) else None

    @property
    def numpy(self) -> AnyDType:
        """The NumPy dtype; for a type that NumPy lacks an integer type of the same size."""
        return numpy_dtype(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        row = self.row
        return self.numpy.itemsize if row is None else row.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; repeated ones count each time."""
        return extent(self.shape, None, self.itemsize)


class Plan:
    """The contents of a checkpoint.

    tree:    structure of the state, JSON
    tensors: every tensor and array, by number
    regions: every stretch of bytes, each once
    meta:    the user's dict, or None
    """

    def __init__(self, tree: Any, tensors: Sequence[Entry], regions: Sequence[Region], meta: Any) -> None:
        self.tree = tree
        self.tensors = list(tensors)
        self.regions = list(regions)
        self.meta = meta

    def __repr__(self) -> str:
        return f"<Plan of {len(self.tensors)} tensors, {self.nbytes} bytes>"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)

    @cached_property
    def members(self) -> list[list[int]]:
        """Per region the numbers of its tensors, the one that covers all of it in C order first if there is one."""
        members: list[list[int]] = [[] for _ in self.regions]
        for number, entry in enumerate(self.tensors):
            if entry.region >= 0:
                members[entry.region].append(number)
        for region, numbers in zip(self.regions, members, strict=True):
            numbers.sort(key=lambda number: not _covers(self.tensors[number], region.nbytes))
        return members

    def covering(self, region: int) -> Entry | None:
        """The first tensor that covers a region in C order (without repeated dimensions); None if there is none."""
        entry = self.tensors[self.members[region][0]]
        return entry if _covers(entry, self.regions[region].nbytes) else None

    @property
    def devices(self) -> list[str]:
        """The CUDA devices that have bytes of it."""
        return sorted({region.device for region in self.regions if region.device.startswith("cuda")})

    def names(self, region: int) -> str:
        """The names of a region's tensors, for messages."""
        members = self.members[region]
        shown = ", ".join(f'"{self.tensors[number].name}"' for number in members[:3])
        return shown + (f" and {len(members) - 3} more" if len(members) > 3 else "")

    def describe(self) -> bytes:
        """The plan as JSON, without bytes of tensors. `ArgumentError` if it is larger than a file may hold."""
        return self._description

    @cached_property
    def _description(self) -> bytes:
        tree, meta = _encode_json(self.tree), _encode_json(self.meta)
        data = f'{{"version":{VERSION},"tree":{tree},{self._table},"meta":{meta}}}'.encode("ascii")
        if len(data) > MAX_DESCRIPTION:
            raise ArgumentError(
                f"structure of the state takes {len(data)} bytes, at most {MAX_DESCRIPTION} are allowed: "
                "save many numbers as tensors or arrays"
            )
        return data

    @cached_property
    def _table(self) -> str:
        """The part of a description about tensors and regions."""
        tensors = [(*entry[:1], int(entry.torch), *entry[2:]) for entry in self.tensors]
        regions = [(region.nbytes, region.align) for region in self.regions]
        return f'"tensors":{_encode_json(tensors)},"regions":{_encode_json(regions)}'

    def renewed(self, tree: Any, regions: Sequence[Region], meta: Any) -> Plan:
        """A plan of the same tensors, with another structure around them and regions of the same sizes elsewhere."""
        other = Plan(tree, self.tensors, regions, meta)
        other.__dict__["_table"] = self._table  # as `cached_property` keeps it
        return other

    @classmethod
    def from_description(cls, data: bytes) -> Plan:
        """The plan of a description; its regions have no bytes. `CheckpointError` on anything invalid."""
        if len(data) > MAX_DESCRIPTION:
            raise CheckpointError(f"description has {len(data)} bytes, at most {MAX_DESCRIPTION} are allowed")
        try:
            parts = read_json(data)
        except WireError as error:
            raise CheckpointError(f"invalid description: {error}") from None
        return cls.from_parts(parts)

    @classmethod
    def from_parts(cls, parts: Any) -> Plan:
        """As `from_description`, from parsed JSON."""
        try:
            return cls._parse(parts)
        except CheckpointError:
            raise
        except WireError as error:  # of a NumPy dtype
            raise CheckpointError(f"invalid description: {error}") from None

    @classmethod
    def _parse(cls, parts: Any) -> Plan:
        if not isinstance(parts, dict) or set(parts) != {"version", "tree", "tensors", "regions", "meta"}:
            raise CheckpointError("invalid description: not the keys of a plan")
        if parts["version"] != VERSION:
            raise CheckpointError(
                f"description has version {shown(parts['version'], 20)}, this library reads {VERSION}"
            )
        meta = parts["meta"]
        if meta is not None and not isinstance(meta, dict):
            raise CheckpointError("invalid description: meta is neither a dict nor null")
        if is_deep(meta):
            raise CheckpointError(f"invalid description: meta is nested more than {MAX_DEPTH} deep")
        if not (isinstance(parts["tensors"], list) and isinstance(parts["regions"], list)):
            raise CheckpointError("invalid description: tensors and regions are no lists")
        if max(len(parts["tensors"]), len(parts["regions"])) > MAX_TENSORS:
            raise CheckpointError(f"description has {len(parts['tensors'])} tensors, at most {MAX_TENSORS} are allowed")
        regions = [_region(part) for part in parts["regions"]]
        names: set[str] = set()
        tensors = []
        for part in parts["tensors"]:
            entry = _entry(part, regions)
            if entry.name in names:
                raise CheckpointError(f"description has two tensors named {entry.name!r:.80}")
            names.add(entry.name)
            tensors.append(entry)
        result = cls(parts["tree"], tensors, regions, meta)
        for region, members in enumerate(result.members):
            if not members:
                raise CheckpointError(f"region {region} belongs to no tensor")
        return result


def plan(state: object, meta: dict[str, Any] | None = None, *, most: int | None = None) -> Plan:
    """Describe a state and say where its bytes are; copies nothing.

    `state` is a nested dict, list or tuple of torch tensors (on any device), NumPy arrays and plain Python values, or
    an `nn.Module` (its `state_dict()`); `meta` is a dict that JSON can express. `most` is for states that another
    library has loaded: it limits how many values are written out, and meta tensors are allowed. Raises
    `ArgumentTypeError` or `ArgumentError`, with the path of what cannot be saved.

    >>> import numpy as np
    >>> weight = np.ones((2, 3), np.float32)
    >>> made = plan({"weight": weight, "tied": weight, "step": 7})
    >>> [entry.name for entry in made.tensors], made.nbytes
    (['weight', 'tied'], 24)
    """
    if meta is not None:
        check_meta(meta)
    encoder = Encoder() if most is None else ForeignEncoder(most)
    return assemble(encoder.encode(state), encoder.leaves, meta)


def assemble(tree: Any, named: Sequence[tuple[str, Leaf]], meta: dict[str, Any] | None) -> Plan:
    """The plan of a structure and its named leaves."""
    leaves = [leaf for _, leaf in named]
    places, regions = place(leaves)
    tensors = []
    for name, leaf, (region, offset, strides) in zip(
        unique_names(name for name, _ in named), leaves, places, strict=True
    ):
        dtype = leaf.description if leaf.dtype is None else leaf.dtype.name
        tensors.append(Entry(name, leaf.torch, dtype, tuple(leaf.shape), strides, region, offset))
    return Plan(tree, tensors, regions, meta)


def unique_names(wanted: Iterable[str]) -> list[str]:
    """Unique names that any format can hold: two tensors `a.b` become `a.b` and `a.b#2`."""
    taken = {"__metadata__"}
    counts: dict[str, int] = {}  # the last number that each name was given
    names = []
    for name in wanted:
        if not name.isprintable():
            name = name.encode("unicode_escape").decode("ascii")
        if len(name) > MAX_NAME:
            name = name[:MAX_NAME]
        unique = name
        while unique in taken:
            counts[name] = counts.get(name, 1) + 1
            unique = f"{name}#{counts[name]}"
        taken.add(unique)
        names.append(unique)
    return names


def _covers(entry: Entry, nbytes: int) -> bool:
    if entry.offset:
        return False
    if entry.strides is None:
        return entry.nbytes == nbytes
    kept = stored_shape(entry)
    itemsize = entry.itemsize
    expected = itemsize
    for length, stride in zip(reversed(kept), reversed(entry.strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return expected == nbytes


def stored_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of a covering tensor in a file: 1 for a repeated dimension."""
    if entry.strides is None:
        return entry.shape
    return tuple([n if s or n <= 1 else 1 for n, s in zip(entry.shape, entry.strides, strict=True)])


def _natural(value: Any, what: str, limit: int = MAX_BYTES) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise CheckpointError(f"invalid description: {what} is {shown(value, 40)}")
    return value


def _region(part: Any) -> Region:
    if not (isinstance(part, list) and len(part) == 2):
        raise CheckpointError(f"invalid description: region {shown(part, 40)}")
    align = _natural(part[1], "an alignment", 4096)
    if not align or align & align - 1:
        raise CheckpointError(f"invalid description: alignment {align}")
    if not _natural(part[0], "a region's size"):
        raise CheckpointError("invalid description: a region without bytes")
    return Region(part[0], align)


def _entry(part: Any, regions: Sequence[Region]) -> Entry:
    if not (isinstance(part, list) and len(part) == 7 and isinstance(part[0], str)):
        raise CheckpointError(f"invalid description: tensor {shown(part)}")
    name, torch, dtype, shape, strides, region, offset = part
    label = f"tensor {name!r:.80}"
    if len(name) > MAX_NAME + 20 or torch not in (0, 1):
        raise CheckpointError(f"invalid description: {label}")
    row = BY_NAME.get(dtype) if isinstance(dtype, str) else None
    if (torch and (row is None or not row.torch)) or (row is not None and not torch and not row.numpy):
        raise CheckpointError(f"{label} has the unknown dtype {shown(dtype, 40)}")
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or not isinstance(strides, (list, type(None))):
        raise CheckpointError(f"{label} has the shape {shown(shape)}")
    sizes = tuple([_natural(n, f"a dimension of {label}") for n in shape])
    steps = None if strides is None else tuple([_natural(s, f"a stride of {label}") for s in strides])
    entry = Entry(name, bool(torch), dtype, sizes, steps, -1, 0)
    itemsize = entry.itemsize
    size = itemsize
    for length in sizes:
        size *= max(length, 1)
        if size > MAX_BYTES:
            raise CheckpointError(f"{label} has the shape {shown(shape)}, more than {MAX_BYTES} bytes")
    span = 0 if 0 in sizes or not itemsize else itemsize
    if steps is not None and len(steps) != len(sizes):
        raise CheckpointError(f"{label} has {len(sizes)} dimensions and {len(steps)} strides")
    if span:
        span = extent(sizes, steps, itemsize)
    if not span:
        if region != -1 or offset != 0:
            raise CheckpointError(f"{label} has no bytes, and a place")
        return entry
    _natural(region, f"the region of {label}", len(regions) - 1)
    _natural(offset, f"the offset of {label}")
    if offset + span > regions[region].nbytes:
        raise CheckpointError(
            f"{label} ends at byte {offset + span} of region {region}, which has {regions[region].nbytes}"
        )
    if torch and (offset % itemsize or any(s % itemsize for s in steps or ())):
        raise CheckpointError(f"{label} of item size {itemsize} has offset {offset} and strides {steps}")
    return entry._replace(region=region, offset=offset)


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
        with cuda.on(cuda.current_stream(device_of(source))):
            dense = cuda.dense(source)
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


# (region) -> its bytes, a uint8 array of exactly its size
BytesOf = Callable[[int], Array]

_FREE: Final = 1 << 20  # bytes that may be copied, however few are stored
_MOST_COPIED: Final = 16
"""Times the bytes of a checkpoint that its long `bytes`, and the parts of sparse, quantized and nested tensors may
have."""


def build_state(
    plan: Plan, bytes_of: BytesOf, *, tree: Any = None, arrays: bool = False, blocks: Blocks | None = None
) -> Any:
    """The state of a plan (or of a part of its tree), over the bytes of its regions: nothing is copied.

    `bytes_of` is called once for each region that is needed; tensors keep its array alive. With `arrays`, everything is
    NumPy, and torch is not imported. With `blocks`, torch tensors are on that device: plain ones over its memory, the
    others made on the host and moved. Raises `CheckpointError` for an invalid plan.
    """
    builder = _Builder(plan, bytes_of, arrays=arrays, blocks=blocks)
    decoder = Decoder(builder.leaf, builder.composite, torch=not arrays)
    return decoder.decode(plan.tree if tree is None else tree)


def build_tensor(
    entry: Entry, memory: Any = None, align: int = 1, *, arrays: bool, blocks: Blocks | None = None
) -> Any:
    """One tensor or array, over the bytes of its region, if it has any; with `blocks`, a torch tensor over those of
    region 0 there. Otherwise as `build_state`."""
    regions = [] if entry.region < 0 else [Region(memory.nbytes, align)]
    alone = Plan({"x": 0}, [entry._replace(region=min(0, entry.region))], regions, None)
    return build_state(alone, lambda _: memory, arrays=arrays, blocks=blocks)


class _Builder:
    def __init__(self, plan: Plan, bytes_of: BytesOf, *, arrays: bool, blocks: Blocks | None) -> None:
        self._plan, self._bytes_of, self._only_arrays, self._blocks = plan, bytes_of, arrays, blocks
        self._arrays: dict[int, Array] = {}
        self._storages: dict[int, Any] = {}
        self._memo: dict[object, Any] = {}
        self._copied = 0

    def leaf(self, number: int, copied: bool, *, part: bool = False) -> Any:
        """The tensor or array of a number. `part`: it is a part of a composite, where quantized types are allowed."""
        if number >= len(self._plan.tensors):
            raise CheckpointError(f"invalid structure: tensor {number} of {len(self._plan.tensors)}")
        entry = self._plan.tensors[number]
        if copied or part:
            self._copied += entry.nbytes
            if self._copied > _FREE and self._copied > _MOST_COPIED * self._plan.nbytes + _FREE:
                raise CheckpointError(
                    f"tensor {entry.name!r:.80}: {self._copied} bytes would be copied, of the {self._plan.nbytes} that "
                    "are stored: it repeats them too often"
                )
        try:
            if not entry.torch:
                return self._array(entry, entry.numpy)
            if self._only_arrays:
                return self._array(entry, array_dtype(entry))
            if entry.row is not None and entry.row.quantized and not part:
                raise CheckpointError(f"tensor {entry.name!r:.80} is quantized, and has no parameters")
            return self._tensor(entry) if part or self._blocks is None else self._on_device(entry, self._blocks)
        except (CheckpointError, CudaError):
            raise
        except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"tensor {entry.name!r:.80} cannot be made: {error}") from None

    def _region(self, region: int) -> Array:
        if region not in self._arrays:
            data = self._bytes_of(region)
            if address_of(data) % self._plan.regions[region].align:
                aligned = np.empty(data.nbytes, np.uint8)  # in a file of another program
                aligned[:] = data
                data = aligned
            self._arrays[region] = data
        return self._arrays[region]

    def _array(self, entry: Entry, dtype: AnyDType) -> Array:
        if entry.region < 0:
            return np.ndarray(entry.shape, dtype)  # np.empty makes of items without bytes some of one
        return np.ndarray(entry.shape, dtype, self._region(entry.region), entry.offset, entry.strides)

    def _tensor(self, entry: Entry) -> Any:
        views = torch_views()
        row: Any = entry.row
        if entry.region < 0:
            return views.empty(row, entry.shape)
        if entry.region not in self._storages:
            from torch import from_numpy

            self._storages[entry.region] = from_numpy(self._region(entry.region)).untyped_storage()
        tensor = views.storage_view(self._storages[entry.region], entry.offset, row, entry.shape, entry.strides)
        dtype = views.view_dtype(row)
        return tensor if dtype is None else tensor.view(dtype)

    def _on_device(self, entry: Entry, blocks: Blocks) -> Any:
        views = torch_views()
        row: Any = entry.row
        carrier, dtype = views.carrier(row), views.view_dtype(row)
        if entry.region < 0:
            tensor = blocks.empty(carrier, entry.shape)
        else:
            strides = c_strides(entry.shape, row.itemsize) if entry.strides is None else entry.strides
            steps = tuple([stride // row.itemsize for stride in strides])
            tensor = blocks.view(entry.region, entry.offset, carrier, entry.shape, steps)
        return tensor if dtype is None else tensor.view(dtype)

    def composite(self, kind: str, parameters: tuple[int, ...], scalars: list[Any], numbers: list[int]) -> Any:
        """A sparse, quantized or nested tensor, made of its parts."""
        if kind in OF_ARRAYS:
            raise CheckpointError(f"invalid structure: composite {kind!r}")
        if kind == "meta":
            raise CheckpointError(
                "a tensor is on the device meta, without data: use load_checkpoint, or keys= to leave it out"
            )
        if self._only_arrays:
            name = self._plan.tensors[numbers[0]].name if numbers[0] < len(self._plan.tensors) else ""
            raise CheckpointError(
                f"tensor {name.partition('#')[0]!r:.80} is {kind}, which NumPy lacks: use load_checkpoint, or keys= to "
                "leave it out"
            )
        from ..codec.composites import rebuild

        parts = [self.leaf(number, False, part=True) for number in numbers]
        try:
            made = rebuild(kind, parameters, parts, scalars, self._memo)
            return made if self._blocks is None else self._blocks.move(made)
        except CudaError:
            raise
        except Exception as error:  # whatever torch objects to comes from the file
            raise CheckpointError(
                f"tensor {self._plan.tensors[numbers[0]].name.partition('#')[0]!r:.80} ({kind}) cannot be made: {error}"
            ) from None


def array_dtype(entry: Entry) -> AnyDType:
    """The NumPy dtype of an array, or of a torch tensor: NumPy's own, or that of `ml_dtypes`."""
    if not entry.torch:
        return entry.numpy
    row: Any = entry.row
    if row.numpy:
        return CARRIER[row.code]
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(
            f"tensor {entry.name!r:.80} is {row.name}, which NumPy lacks: install ml_dtypes, or use load_checkpoint"
        ) from None
    kind = getattr(ml_dtypes, row.name, None)
    if kind is None or np.dtype(kind).itemsize != row.itemsize:
        raise CheckpointError(f"tensor {entry.name!r:.80} is {row.name}, which NumPy lacks: use load_checkpoint")
    found: AnyDType = np.dtype(kind)
    return found


def check_structure(plan: Plan) -> None:
    """`CheckpointError` unless the tree is a valid structure whose tensors exist. Call it before walking the tree."""

    def leaf(number: int, copied: bool = False) -> Array:
        if number >= len(plan.tensors):
            raise CheckpointError(f"invalid structure: tensor {number} of {len(plan.tensors)}")
        return _NOTHING

    def composite(kind: str, parameters: tuple[int, ...], scalars: list[Any], numbers: list[int]) -> None:
        for number in numbers:
            leaf(number)

    Decoder(leaf, composite, torch=False).decode(plan.tree)


_NOTHING = np.empty(0, np.uint8)


def tensor_numbers(tree: Any, *, only_read: bool = False) -> set[int]:
    """The numbers of all tensors of a tree; with `only_read`, of those whose bytes are read when it is built: long
    `bytes`, parts of composites."""
    found: list[Any] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            for tag, body in node.items():
                if tag == "B" or (tag == "x" and not only_read):
                    found.append(body)
                elif tag == "z" and isinstance(body, list) and len(body) == 4 and isinstance(body[3], list):
                    found += body[3]
                elif tag == "d" and isinstance(body, dict):
                    stack.extend(body.values())
                elif tag in ("k", "o", "c", "t", "m", "a", "e", "E"):
                    stack.append(body)
    return {number for number in found if type(number) is int}


def regions_of(plan: Plan, numbers: Iterable[int]) -> list[int]:
    """The regions of some tensors, in order."""
    found = {plan.tensors[number].region for number in numbers if 0 <= number < len(plan.tensors)}
    return sorted(found - {-1})
