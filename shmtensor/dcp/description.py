"""What a rank's part says of its items: JSON in the part's `meta`, under the key `dcp`.

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

from ..checkpoint.dcp_metadata import KEY, VERSION
from ..checkpoint.plan import Entry, Plan
from ..checkpoint.slicing import stored_nbytes
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..wire.spec import MAX_BYTES

OBJECTS: Final = "objects"
_MAX_FQN: Final = 4096  # characters
_MAX_PATH: Final = 64  # steps
_MOST_SHARED: Final = 64
"""Times that the tensors of a part may be larger than its bytes: tied tensors are stored once."""

Path = tuple[str | int, ...]


class TensorItem(NamedTuple):
    """A chunk of a tensor: the chunk at `offsets` of a tensor of `size` elements per dimension."""

    fqn: str
    path: Path | None
    size: tuple[int, ...]
    offsets: tuple[int, ...]


class ObjectItem(NamedTuple):
    """An object, pickled by DCP's planner into `nbytes` bytes."""

    fqn: str
    path: Path | None
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


def check_item(fqn: str, planner_data: object) -> Path | None:
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


def _path(fqn: str, path: Any, label: str) -> Path | None:
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
