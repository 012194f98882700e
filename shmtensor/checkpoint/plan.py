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
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ..codec.leaf import Leaf
from ..codec.numpy import AnyDType
from ..errors import ArgumentError, CheckpointError, WireError
from ..wire.dtypes import BY_NAME, DType
from ..wire.spec import MAX_BYTES, MAX_NDIM, extent
from .json_values import check_meta, read_json
from .limits import MAX_DESCRIPTION, MAX_NAME, MAX_TENSORS, VERSION
from .regions import Region, place
from .structure import Encoder, ForeignEncoder, numpy_dtype

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

    @property
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
        names = [self.tensors[number].name for number in self.members[region]]
        return ", ".join(f'"{name}"' for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

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
            raise CheckpointError(f"description has version {parts['version']!r:.20}, this library reads {VERSION}")
        meta = parts["meta"]
        if meta is not None and not isinstance(meta, dict):
            raise CheckpointError("invalid description: meta is neither a dict nor null")
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
    names = []
    for name in wanted:
        if not name.isprintable():
            name = name.encode("unicode_escape").decode("ascii")
        if len(name) > MAX_NAME:
            name = name[:MAX_NAME]
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}#{count}"
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
        raise CheckpointError(f"invalid description: {what} is {value!r:.40}")
    return value


def _region(part: Any) -> Region:
    if not (isinstance(part, list) and len(part) == 2):
        raise CheckpointError(f"invalid description: region {part!r:.40}")
    align = _natural(part[1], "an alignment", 4096)
    if not align or align & align - 1:
        raise CheckpointError(f"invalid description: alignment {align}")
    if not _natural(part[0], "a region's size"):
        raise CheckpointError("invalid description: a region without bytes")
    return Region(part[0], align)


def _entry(part: Any, regions: Sequence[Region]) -> Entry:
    if not (isinstance(part, list) and len(part) == 7 and isinstance(part[0], str)):
        raise CheckpointError(f"invalid description: tensor {part!r:.80}")
    name, torch, dtype, shape, strides, region, offset = part
    label = f"tensor {name!r:.80}"
    if len(name) > MAX_NAME + 20 or torch not in (0, 1):
        raise CheckpointError(f"invalid description: {label}")
    row = BY_NAME.get(dtype) if isinstance(dtype, str) else None
    if (torch and (row is None or not row.torch)) or (row is not None and not torch and not row.numpy):
        raise CheckpointError(f"{label} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or not isinstance(strides, (list, type(None))):
        raise CheckpointError(f"{label} has the shape {shape!r:.80}")
    sizes = tuple([_natural(n, f"a dimension of {label}") for n in shape])
    steps = None if strides is None else tuple([_natural(s, f"a stride of {label}") for s in strides])
    entry = Entry(name, bool(torch), dtype, sizes, steps, -1, 0)
    itemsize = entry.itemsize
    size = itemsize
    for length in sizes:
        size *= max(length, 1)
        if size > MAX_BYTES:
            raise CheckpointError(f"{label} has the shape {shape!r:.80}, more than {MAX_BYTES} bytes")
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
