"""DCP's `Metadata`, from the chunks and objects that files say they have, checked as a whole; and what a rank's part
says of its items: JSON in the part's `meta`, under the key `dcp`.

| key | value |
|---|---|
| `version` | 1 |
| `tensors` | per tensor of the part, in their order, `[fqn, path, size, offsets]` |
| `objects` | per object `[fqn, path, bytes]`, in their order in the tensor `objects`, the last one of the part |

`fqn` is the name that DCP's planner gave the item, and `path` where it was in the state dict, a list of strings and
ints (null if the planner does not flatten). `size` is of the whole tensor; this part has the chunk at `offsets`, whose
shape and dtype are those of the tensor in the part. DCP's metadata is the union over the parts of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..checkpoint.formats.distcp import KEY, VERSION
from ..checkpoint.plan import Entry, Plan
from ..checkpoint.selection import stored_nbytes
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..wire.spec import MAX_BYTES

Where = Any
"""Where an item is stored, as the source of the items knows it."""


class Chunks:
    """The items of a checkpoint. Replicas of one chunk count once."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._paths: dict[str, ItemPath] = {}
        self._stored: dict[MetadataIndex, Where] = {}

    def add_tensor(
        self, fqn: str, size: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype,
        path: ItemPath | None, where: Where,
    ) -> None:  # fmt: skip
        """Add the chunk of `shape` at `offsets`. Raises `CheckpointError` if it is another tensor than before."""
        check_bytes(fqn, size, dtype.itemsize, self._label)
        found = self._items.get(fqn)
        if found is None:
            found = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [])
            self._items[fqn] = found
        elif not isinstance(found, TensorStorageMetadata) or found.size != size or found.properties.dtype != dtype:
            raise self._differs(fqn)
        self._note(fqn, path)
        index = MetadataIndex(fqn, offsets)
        if index not in self._stored and (0 in size or 0 not in shape):
            found.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            self._stored[index] = where

    def add_object(self, fqn: str, path: ItemPath | None, where: Where) -> None:
        """Add an object; of several with this name the first one counts."""
        found = self._items.setdefault(fqn, BytesStorageMetadata())
        if not isinstance(found, BytesStorageMetadata):
            raise self._differs(fqn)
        self._note(fqn, path)
        self._stored.setdefault(MetadataIndex(fqn), where)

    def _differs(self, fqn: str) -> CheckpointError:
        return CheckpointError(f"{self._label}: item {fqn!r:.80} is of two kinds, sizes or dtypes")

    def _note(self, fqn: str, path: ItemPath | None) -> None:
        if path is not None:
            self._paths.setdefault(fqn, path)

    def metadata(self) -> Metadata:
        """The metadata; `storage_data` has where each item is. `CheckpointError` if the chunks of a tensor are not all
        of it: a load would leave the rest as it was."""
        for fqn, found in self._items.items():
            if isinstance(found, TensorStorageMetadata):
                has = sum(math.prod(chunk.sizes) for chunk in found.chunks)
                if has != math.prod(found.size):
                    raise CheckpointError(
                        f"{self._label}: item {fqn!r:.80} has {math.prod(found.size)} elements, its chunks have {has}"
                    )
                if _overlap([(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]):
                    raise CheckpointError(f"{self._label}: chunks of item {fqn!r:.80} overlap")
        paths = self._paths if len(self._paths) == len(self._items) else None
        return Metadata(self._items, planner_data=paths, storage_data=self._stored)


def _overlap(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two chunks (offsets, shape) have an element in common: a sweep along the dimension that is cut most
    often, where few are open at a time."""
    if len(chunks) < 2:
        return False
    count = len(chunks[0][0])
    along = max(range(count), key=lambda dim: len({offsets[dim] for offsets, _ in chunks}), default=0)
    opened: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, shape in sorted(chunks, key=lambda chunk: chunk[0][along : along + 1]):
        opened = [(at, size) for at, size in opened if count and at[along] + size[along] > offsets[along]]
        for at, size in opened:
            if all(a < b + m and b < a + n for a, n, b, m in zip(at, size, offsets, shape, strict=True)):
                return True
        opened.append((offsets, shape))
    return False


OBJECTS: Final = "objects"
_MAX_FQN: Final = 4096  # characters
_MAX_PATH: Final = 64  # steps
_MOST_SHARED: Final = 64
"""Times that the tensors of a part may be larger than its bytes: tied tensors are stored once."""

ItemPath = tuple[str | int, ...]


class TensorItem(NamedTuple):
    """A chunk of a tensor: the chunk at `offsets` of a tensor of `size` elements per dimension."""

    fqn: str
    path: ItemPath | None
    size: tuple[int, ...]
    offsets: tuple[int, ...]


class ObjectItem(NamedTuple):
    """An object, pickled by DCP's planner into `nbytes` bytes."""

    fqn: str
    path: ItemPath | None
    nbytes: int


class Description(NamedTuple):
    """The items of one part."""

    tensors: list[TensorItem]
    objects: list[ObjectItem]

    def render(self) -> dict[str, Any]:
        """The JSON value."""
        return {
            "version": VERSION,
            "tensors": [list(t) for t in self.tensors],
            "objects": [list(o) for o in self.objects],
        }


def check_item(fqn: str, planner_data: object) -> ItemPath | None:
    """The path of an item, from what DCP's planner says of the state dict. `ArgumentTypeError`, `ArgumentError`."""
    if len(fqn) > _MAX_FQN:
        raise ArgumentError(f"item {fqn!r:.80} has a name of {len(fqn)} characters, at most {_MAX_FQN} are allowed")
    if planner_data is None:
        return None
    path = planner_data.get(fqn) if isinstance(planner_data, dict) else planner_data
    if path is None:
        return None
    if not isinstance(path, (tuple, list)) or not all(type(step) in (str, int) for step in path):
        raise ArgumentTypeError(
            f"the planner says {path!r:.80} of item {fqn!r:.80}: paths of strings and ints are stored, as those of "
            "DefaultSavePlanner"
        )
    if len(path) > _MAX_PATH:
        raise ArgumentError(f"item {fqn!r:.80} is {len(path)} levels deep, at most {_MAX_PATH} are allowed")
    return tuple(path)


def parse(meta: dict[str, Any] | None, plan: Plan, label: str) -> Description:
    """The description in a part's `meta`, checked against the part's tensors. Raises `CheckpointError`."""
    found = None if meta is None else meta.get(KEY)
    if not isinstance(found, dict):
        raise CheckpointError(f"{label} was not saved by shmtensor.dcp: load it by shmtensor.load_checkpoint")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{label} has version {found.get('version')!r:.20} of items, this library reads {VERSION}"
        )
    tensors, objects = found.get("tensors"), found.get("objects")
    if not isinstance(tensors, list) or not isinstance(objects, list):
        raise CheckpointError(f"{label}: invalid items: tensors and objects are no lists")
    entries = plan.tensors
    if len(tensors) + bool(objects) != len(entries):
        raise CheckpointError(f"{label}: invalid items: {len(tensors)} of {len(entries)} tensors")
    made = Description(
        [_tensor(each, entry, label) for each, entry in zip(tensors, entries, strict=False)],
        [_object(each, label) for each in objects],
    )
    if sum(entry.nbytes for entry in entries) > _MOST_SHARED * max(1, plan.nbytes):
        raise CheckpointError(f"{label}: its tensors are more than {_MOST_SHARED} times as large as its bytes")
    if objects:
        last = entries[-1]
        if last.torch or last.itemsize != 1 or last.strides is not None or len(last.shape) != 1:
            raise CheckpointError(f"{label}: invalid items: the objects are in tensor {last.name!r:.80}")
        if last.nbytes != sum(item.nbytes for item in made.objects):
            raise CheckpointError(f"{label}: invalid items: the objects have {last.nbytes} bytes")
    return made


def _tensor(found: Any, entry: Entry, label: str) -> TensorItem:
    match found:
        case [str() as fqn, path, list() as size, list() as offsets]:
            if not (_naturals(size) and _naturals(offsets) and len(size) == len(offsets) == len(entry.shape)):
                raise CheckpointError(f"{label}: item {fqn!r:.80} has size {size!r:.80} and offsets {offsets!r:.80}")
            if any(at + count > total for at, count, total in zip(offsets, entry.shape, size, strict=True)):
                raise CheckpointError(
                    f"{label}: item {fqn!r:.80} of size {size!r:.80} has a chunk of shape {list(entry.shape)!r:.80} at "
                    f"{offsets!r:.80}"
                )
            if not entry.torch or stored_nbytes(entry) != entry.nbytes:
                raise CheckpointError(f"{label}: item {fqn!r:.80} is {entry.name!r:.80}, which is no dense tensor")
            check_bytes(fqn, size, entry.itemsize, label)
            return TensorItem(fqn, _path(fqn, path, label), tuple(size), tuple(offsets))
    raise CheckpointError(f"{label}: invalid item {found!r:.80}")


def _object(found: Any, label: str) -> ObjectItem:
    match found:
        case [str() as fqn, path, int() as nbytes] if _naturals([nbytes]):
            return ObjectItem(fqn, _path(fqn, path, label), nbytes)
    raise CheckpointError(f"{label}: invalid item {found!r:.80}")


def _path(fqn: str, path: Any, label: str) -> ItemPath | None:
    if path is None and len(fqn) <= _MAX_FQN:
        return None
    if (
        len(fqn) > _MAX_FQN
        or not isinstance(path, list)
        or not 1 <= len(path) <= _MAX_PATH
        or not all(type(step) is str or (type(step) is int and 0 <= step < MAX_BYTES) for step in path)
    ):
        raise CheckpointError(f"{label}: item {fqn!r:.80} has the path {path!r:.80}")
    return tuple(path)


def _naturals(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)


def check_bytes(fqn: str, size: Sequence[int], itemsize: int, label: str) -> None:
    """`CheckpointError` if a tensor of this size is larger than any can be."""
    if math.prod(max(1, length) for length in size) * itemsize > MAX_BYTES:
        raise CheckpointError(f"{label}: item {fqn!r:.80} has size {list(size)!r:.80}, more than {MAX_BYTES} bytes")
