"""`.metadata`, which DCP's `FileSystemWriter` has pickled, read without unpickling it.

The opcodes of a pickle of DCP's metadata are run over plain values: a class or function is its name, an object is its
name with arguments and state, a dict is a list of pairs. Nothing is called, imported or hashed, so that a pickle costs
what its bytes do. What comes out is then taken apart by the names that DCP's classes and fields have; anything else is
a `CheckpointError`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final, NamedTuple

import torch

from ..checkpoint.limits import MAX_TENSORS
from ..checkpoint.locations import read_regular
from ..errors import CheckpointError
from ..wire.spec import MAX_BYTES, MAX_NDIM
from .description import Path

_DCP: Final = "torch.distributed.checkpoint.metadata."
_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MAX_TEXT: Final = 4096  # characters of a name, steps of a path


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
    paths: dict[str, Path]
    ranges: dict[tuple[str, tuple[int, ...] | None], Range]


def read_pickle(path: FilePath, most: int) -> Found:
    """The contents of a `.metadata` of at most so many bytes. Raises `FileNotFoundError`, `CheckpointError`."""
    try:
        return _found(_run(read_regular(path, most)))
    except _Invalid as error:
        raise CheckpointError(f"{path} is no metadata of DCP's FileSystemWriter: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
                    raise _Invalid(f"a call of {function!r:.40} at byte {at}")
                made = _Dict() if function.name == "collections.OrderedDict" else _Object(function.name, arguments)
                stack.append(made)
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Object):
                    raise _Invalid(f"the state of {stack[-1]!r:.40} at byte {at}")
                stack[-1].state = state
            case _ if name in _LITERALS:
                stack.append(argument)
            case _:
                raise _Invalid(f"opcode {name} at byte {at}")
    raise _Invalid("it has no end")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Invalid(f"{value!r:.40} in place of a list")
    return value


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, _Dict):
        raise _Invalid(f"{value!r:.40} in place of a dict")
    return value.pairs


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise _Invalid(f"{value!r:.40} in place of a name")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise _Invalid(f"{value!r:.40} in place of a number")
    return value


# --- DCP's classes


def _found(value: Any) -> Found:
    fields = _fields(value, _DCP + "Metadata")
    items: dict[str, Tensor | None] = {}
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
        items[_text(key)] = Tensor(size, _dtype(about["properties"]), [_chunk(chunk, len(size)) for chunk in chunks])
    if count > MAX_TENSORS:
        raise _Invalid(f"it has more than {MAX_TENSORS} items")
    paths = fields.get("planner_data")
    return Found(items, {} if paths is None else _paths(paths), _ranges(fields["storage_data"]))


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The fields of an object of a dataclass."""
    if not isinstance(value, _Object) or value.name != name or value.arguments:
        raise _Invalid(f"{value!r:.80} in place of a {name.rpartition('.')[2]}")
    return {_text(key): each for key, each in _pairs(value.state)}


def _size(value: Any) -> tuple[int, ...]:
    match value:
        case _Object(name="torch.Size", arguments=(tuple() as size,)) if len(size) <= MAX_NDIM:
            return tuple(_int(length) for length in size)
    raise _Invalid(f"{value!r:.80} in place of a torch.Size")


def _chunk(value: Any, ndim: int) -> Chunk:
    fields = _fields(value, _DCP + "ChunkStorageMetadata")
    chunk = Chunk(_size(fields["offsets"]), _size(fields["sizes"]))
    if len(chunk.offsets) != ndim or len(chunk.sizes) != ndim:
        raise _Invalid(f"{chunk!r:.80} of a tensor of {ndim} dimensions")
    return chunk


def _dtype(value: Any) -> torch.dtype:
    match value:
        case _Object(name=name, state=(_Global(name=dtype), *_)) if name == _DCP + "TensorProperties":
            found = getattr(torch, dtype.removeprefix("torch."), None) if dtype.isascii() else None
            if isinstance(found, torch.dtype):
                return found
    raise _Invalid(f"{value!r:.80} in place of the properties of a tensor")


def _paths(value: Any) -> dict[str, Path]:
    paths = {}
    for key, path in _pairs(value):
        if not isinstance(path, tuple) or not 1 <= len(path) <= _MAX_TEXT:
            raise _Invalid(f"item {key!r:.40} has the path {path!r:.80}")
        paths[_text(key)] = tuple(_int(step) if type(step) is int else _text(step) for step in path)
    return paths


def _ranges(value: Any) -> dict[tuple[str, tuple[int, ...] | None], Range]:
    ranges = {}
    for key, info in _pairs(value):
        index, about = _fields(key, _DCP + "MetadataIndex"), _fields(info, _INFO)
        offset = index.get("offset")
        ranges[_text(index["fqn"]), None if offset is None else _size(offset)] = Range(
            _text(about["relative_path"]), _int(about["offset"]), _int(about["length"]),
            bool(about.get("transform_descriptors")),
        )  # fmt: skip
    return ranges
