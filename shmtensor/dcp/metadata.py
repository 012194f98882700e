"""DCP's `Metadata`, from the chunks and objects that files say they have, checked as a whole; and what files say.

A rank's part says it in JSON, in the part's `meta`, under the key `dcp`:

| key | value |
|---|---|
| `version` | 1 |
| `tensors` | per tensor of the part, in their order, `[fqn, path, size, offsets]` |
| `objects` | per object `[fqn, path, bytes]`, in their order in the tensor `objects`, the last one of the part |

`fqn` is the name that DCP's planner gave the item, and `path` where it was in the state dict, a list of strings and
ints (null if the planner does not flatten). `size` is of the whole tensor; this part has the chunk at `offsets`, whose
shape and dtype are those of the tensor in the part. DCP's metadata is the union over the parts of all ranks.

Checkpoints of DCP's `FileSystemWriter` have a pickle, `.metadata`. It is not unpickled: `read_pickle` runs the opcodes
of a pickle of DCP's metadata over plain values: a class or function is its name, an object is its name with arguments
and state, a dict is a list of pairs. Nothing is called, imported or hashed, so that a pickle costs what its bytes do.
What comes out is then taken apart by the names that DCP's classes and fields have; anything else is a
`CheckpointError`.
"""

from __future__ import annotations

import math
import operator
import pickletools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from ..checkpoint.locations import Location, read_regular
from ..checkpoint.plan import Entry, Plan
from ..checkpoint.selection import stored_nbytes
from ..checkpoint.structure import MAX_TENSORS
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..options import shown
from ..wire.spec import MAX_BYTES, MAX_NDIM

Where = Any
"""Where an item is stored, as the source of the items knows it."""


class Items:
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
                if not _tile(found.size, found.chunks):
                    raise CheckpointError(f"{self._label}: chunks of item {fqn!r:.80} overlap")
        paths = self._paths if len(self._paths) == len(self._items) else None
        _check_lists(self._paths.values(), len(self._items), self._label)
        return Metadata(self._items, planner_data=paths, storage_data=self._stored)


def _tile(size: Sequence[int], chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Whether chunks cover each element of a tensor exactly once; in time linear in their number, wherever they are.

    Along each dimension every edge gets a random number. A chunk's product of the differences of its edges, written
    out, is the sum of its corners with signs, each corner the product of its coordinates' numbers. In the sum over the
    chunks the corners inside of the tensor cancel out, and what remains is the same product of the whole tensor, if,
    and but for one chance in 2**55 only if, the chunks do.
    """
    numbers = random.Random()  # seeded by the kernel, so that no file can be made for them
    edges: list[dict[int, int]] = [{} for _ in size]

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for known, start, length in zip(edges, offsets, sizes, strict=True):
            low, high = (
                known[at] if at in known else known.setdefault(at, numbers.randrange(_PRIME))
                for at in (start, start + length)
            )
            found = found * (low - high) % _PRIME
        return found

    whole = product([0] * len(size), size)
    return sum(product(chunk.offsets, chunk.sizes) for chunk in chunks) % _PRIME == whole


_PRIME: Final = (1 << 61) - 1


_LONG: Final = 1024
_MOST_LONGER: Final = 64


def _check_lists(paths: Iterable[ItemPath], items: int, label: str) -> None:
    """`CheckpointError` if the lists that DCP's planner makes of the numbers in paths would be much longer than there
    are items."""
    longest: dict[int, int] = {}  # by what is before the number
    for path in paths:
        for at, step in enumerate(path):
            if type(step) is int and step >= _LONG:
                before = hash(repr(path[:at]))
                longest[before] = max(step, longest.get(before, 0))
    total = sum(longest.values())
    if total > _MOST_LONGER * items:
        raise CheckpointError(f"{label}: the paths of its {items} items are those of lists of {total} elements")


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


def render(items: Iterable[TensorItem | ObjectItem]) -> list[tuple[Any, ...]]:
    """The JSON values of items."""
    return [tuple(item) for item in items]


def describe(tensors: list[tuple[Any, ...]], objects: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The JSON value of a description, of those of its items."""
    return {"version": VERSION, "tensors": tensors, "objects": objects}


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
            f"the planner says {shown(path)} of item {fqn!r:.80}: paths of strings and ints are stored, as those of "
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
            f"{label} has version {shown(found.get('version'), 20)} of items, this library reads {VERSION}"
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
                raise CheckpointError(f"{label}: item {fqn!r:.80} has size {shown(size)} and offsets {shown(offsets)}")
            if any(at + count > total for at, count, total in zip(offsets, entry.shape, size, strict=True)):
                raise CheckpointError(
                    f"{label}: item {fqn!r:.80} of size {shown(size)} has a chunk of shape {shown(list(entry.shape))} "
                    f"at {shown(offsets)}"
                )
            if not entry.torch or stored_nbytes(entry) != entry.nbytes:
                raise CheckpointError(f"{label}: item {fqn!r:.80} is {entry.name!r:.80}, which is no dense tensor")
            check_bytes(fqn, size, entry.itemsize, label)
            return TensorItem(fqn, _path(fqn, path, label), tuple(size), tuple(offsets))
    raise CheckpointError(f"{label}: invalid item {shown(found)}")


def _object(found: Any, label: str) -> ObjectItem:
    match found:
        case [str() as fqn, path, int() as nbytes] if _naturals([nbytes]):
            return ObjectItem(fqn, _path(fqn, path, label), nbytes)
    raise CheckpointError(f"{label}: invalid item {shown(found)}")


def _path(fqn: str, path: Any, label: str) -> ItemPath | None:
    if path is None and len(fqn) <= _MAX_FQN:
        return None
    if (
        len(fqn) > _MAX_FQN
        or not isinstance(path, list)
        or not 1 <= len(path) <= _MAX_PATH
        or not all(type(step) is str or (type(step) is int and 0 <= step < MAX_BYTES) for step in path)
    ):
        raise CheckpointError(f"{label}: item {fqn!r:.80} has the path {shown(path)}")
    return tuple(path)


def _naturals(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)


def check_bytes(fqn: str, size: Sequence[int], itemsize: int, label: str) -> None:
    """`CheckpointError` if a tensor of this size is larger than any can be."""
    if math.prod(max(1, length) for length in size) * itemsize > MAX_BYTES:
        raise CheckpointError(f"{label}: item {fqn!r:.80} has size {shown(list(size))}, more than {MAX_BYTES} bytes")


_DCP: Final = "torch.distributed.checkpoint.metadata."
_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MAX_TEXT: Final = 4096  # characters of a name


class Chunk(NamedTuple):
    """A chunk of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor: its size and dtype, and the chunks that it is stored in."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]


class Range(NamedTuple):
    """Where an item is: a range of bytes of a file; and whether extensions have changed the bytes."""

    file: str
    offset: int
    nbytes: int
    transforms: bool


class Found(NamedTuple):
    """What a `.metadata` says: per item its tensor, None for an object; its path; and per item and chunk its range."""

    items: dict[str, Tensor | None]
    paths: dict[str, ItemPath]
    ranges: dict[tuple[str, tuple[int, ...] | None], Range]


def read_pickle(path: Location, most: int) -> Found:
    """The contents of a `.metadata` of at most so many bytes. Raises `FileNotFoundError`, `CheckpointError`."""
    try:
        return _found(_run(read_regular(path, most)))
    except _Invalid as error:
        raise CheckpointError(f"{path} is no metadata of DCP's FileSystemWriter: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no metadata of DCP's FileSystemWriter: {text:.200}") from None


class _Invalid(Exception):
    """What is wrong with a pickle."""


# --- the pickle as plain values


@dataclass
class _Global:
    name: str


@dataclass
class _Dict:
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass
class _Object:
    name: str
    arguments: tuple[Any, ...]
    state: Any = None


_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS: Final = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES".split()  # noqa: SIM905
)


def _run(data: bytes) -> Any:
    """The value of a pickle, of `_Object`, `_Dict` and `_Global` besides lists, tuples, strings and numbers."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, marks.pop()
        return items

    for opcode, argument, at in pickletools.genops(data):
        name = opcode.name
        match name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                if len(stack) != 1 or marks:
                    raise _Invalid("it ends with other values than one")
                return stack[0]
            case "MARK":
                marks.append(stack)
                stack = []
            case "POP":
                stack.pop()
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[_int(argument)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[_int(argument)])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[name])
            case "EMPTY_DICT":
                stack.append(_Dict())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                items = to_mark()
                stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                items = stack[-count:]
                if len(items) != count:
                    raise _Invalid(f"a tuple of values that are not there, at byte {at}")
                stack[-count:] = [tuple(items)]
            case "APPEND":
                value = stack.pop()
                _list(stack[-1]).append(value)
            case "APPENDS":
                items = to_mark()
                _list(stack[-1]).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _pairs(stack[-1]).append((key, value))
            case "SETITEMS":
                items = to_mark()
                _pairs(stack[-1]).extend(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_Global(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                value, module = stack.pop(), stack.pop()
                stack.append(_Global(f"{_text(module)}.{_text(value)}"))
            case "NEWOBJ" | "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, _Global) or not isinstance(arguments, tuple):
                    raise _Invalid(f"a call of {shown(function, 40)} at byte {at}")
                made = _Dict() if function.name == "collections.OrderedDict" else _Object(function.name, arguments)
                stack.append(made)
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Object):
                    raise _Invalid(f"the state of {shown(stack[-1], 40)} at byte {at}")
                stack[-1].state = state
            case _ if name in _LITERALS:
                stack.append(argument)
            case _:
                raise _Invalid(f"opcode {name} at byte {at}")
    raise _Invalid("it has no end")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Invalid(f"{shown(value, 40)} in place of a list")
    return value


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, _Dict):
        raise _Invalid(f"{shown(value, 40)} in place of a dict")
    return value.pairs


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise _Invalid(f"{shown(value, 40)} in place of a name")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise _Invalid(f"{shown(value, 40)} in place of a number")
    return value


# --- DCP's classes


def _found(value: Any) -> Found:
    fields = _fields(value, _DCP + "Metadata")
    items: dict[str, Tensor | None] = {}
    made: dict[int, Chunk] = {}
    count = 0
    for key, each in _pairs(fields["state_dict_metadata"]):
        if isinstance(each, _Object) and each.name == _DCP + "BytesStorageMetadata":
            items[_text(key)] = None
            count += 1
            continue
        about = _fields(each, _DCP + "TensorStorageMetadata")
        chunks = _list(about["chunks"])
        count += 1 + len(chunks)  # before they are walked: objects may be shared
        if count > MAX_TENSORS:
            raise _Invalid(f"it has more than {MAX_TENSORS} chunks")
        size = _size(about["size"])
        if math.prod(max(1, length) for length in size) > MAX_BYTES:
            raise _Invalid(f"a tensor of size {shown(size)}")
        for chunk in chunks:
            if id(chunk) not in made:  # thousands may be one object
                made[id(chunk)] = _chunk(chunk)
            if not len(made[id(chunk)].offsets) == len(made[id(chunk)].sizes) == len(size):
                raise _Invalid(f"{shown(tuple(made[id(chunk)]))} of a tensor of {len(size)} dimensions")
        items[_text(key)] = Tensor(size, _dtype(about["properties"]), [made[id(chunk)] for chunk in chunks])
    if count > MAX_TENSORS:
        raise _Invalid(f"it has more than {MAX_TENSORS} items")
    paths = fields.get("planner_data")
    return Found(items, {} if paths is None else _paths(paths), _ranges(fields["storage_data"], items))


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The fields of an object of a dataclass."""
    if not isinstance(value, _Object) or value.name != name or value.arguments:
        raise _Invalid(f"{shown(value)} in place of a {name.rpartition('.')[2]}")
    return {_text(key): each for key, each in _pairs(value.state)}


def _size(value: Any) -> tuple[int, ...]:
    match value:
        case _Object(name="torch.Size", arguments=(tuple() as size,)) if len(size) <= MAX_NDIM:
            return tuple(_int(length) for length in size)
    raise _Invalid(f"{shown(value)} in place of a torch.Size")


def _chunk(value: Any) -> Chunk:
    fields = _fields(value, _DCP + "ChunkStorageMetadata")
    return Chunk(_size(fields["offsets"]), _size(fields["sizes"]))


def _dtype(value: Any) -> torch.dtype:
    match value:
        case _Object(name=name, state=(_Global(name=dtype), *_)) if name == _DCP + "TensorProperties":
            found = getattr(torch, dtype.removeprefix("torch."), None) if dtype.isascii() else None
            if isinstance(found, torch.dtype):
                return found
    raise _Invalid(f"{shown(value)} in place of the properties of a tensor")


def _paths(value: Any) -> dict[str, ItemPath]:
    paths = {}
    for key, path in _pairs(value):
        if not isinstance(path, tuple) or not 1 <= len(path) <= _MAX_PATH:
            raise _Invalid(f"item {shown(key, 40)} has the path {shown(path)}")
        paths[_text(key)] = tuple(_int(step) if type(step) is int else _text(step) for step in path)
    return paths


def _ranges(value: Any, items: Mapping[str, Tensor | None]) -> dict[tuple[str, tuple[int, ...] | None], Range]:
    """The ranges of objects, and of chunks inside of tensors: other offsets may be chosen so that all share a hash."""
    ranges = {}
    for key, info in _pairs(value):
        index, about = _fields(key, _DCP + "MetadataIndex"), _fields(info, _INFO)
        fqn, offset = _text(index["fqn"]), index.get("offset")
        at, item = None if offset is None else _size(offset), items.get(fqn)
        if at is not None and (item is None or len(at) != len(item.size) or not all(map(operator.le, at, item.size))):
            continue
        ranges[fqn, at] = Range(
            _text(about["relative_path"]), _int(about["offset"]), _int(about["length"]),
            bool(about.get("transform_descriptors")),
        )  # fmt: skip
    return ranges
