"""Checkpoints of DCP's `FileSystemWriter`: `.metadata`, a pickle, and files in which each item is an archive of torch.

The pickle is not unpickled. Each item's range must lie in its file, ranges do not overlap, and a chunk has at least as
many bytes as its elements take; so what the metadata promises is there before memory is spent.

`read_pickle` reads it: the opcodes of a pickle of DCP's metadata are run over plain values: a class or function is its
name, an object is its name with arguments and state, a dict is a list of pairs. Nothing is called, imported or hashed,
so that a pickle costs what its bytes do. What comes out is then taken apart by the names that DCP's classes and fields
have; anything else is a `CheckpointError`.

Archives of `torch.save` are opened by `torch.load(weights_only=True)` alone, after the check of what their pickles
would cost (`shmtensor.checkpoint.formats.pickles`). The library's reading of such files works on paths, and needs the
archive to end where the file does. So an archive that lies inside a file is copied into a file in memory first: its
size is that of bytes that are really there.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoint.formats import get_format
from ..checkpoint.formats.distcp import MAX_METADATA, METADATA
from ..checkpoint.locations import (
    InputFile,
    LocalFile,
    Location,
    MemoryFile,
    copy_range,
    open_input,
    read_regular,
    write_all,
)
from ..checkpoint.structure import MAX_TENSORS
from ..errors import CheckpointError
from ..wire.spec import MAX_BYTES, MAX_NDIM
from .metadata import Chunks, ItemPath

_FILE: Final = re.compile(r"[^/\0]{1,255}")


class Stored(NamedTuple):
    """Where an item is: a file, a range of it, and the shape and dtype that the metadata says; None for an object."""

    file: str
    offset: int
    nbytes: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


class FileSystemFiles:
    """An open checkpoint of `FileSystemWriter`, whose files are opened as they are read."""

    def __init__(self, directory: Location) -> None:
        self.name = str(directory)
        """Which checkpoint it is."""
        self._directory = directory
        self._open_file: tuple[str, InputFile] | None = None

    def metadata(self) -> Metadata:
        """DCP's metadata. Raises `CheckpointError` if it is not the metadata of these files."""
        found = read_pickle(self._directory / METADATA, MAX_METADATA)
        chunks = Chunks(self.name)
        ranges: dict[str, list[tuple[int, int]]] = {}
        for fqn, item in found.items.items():
            path = found.paths.get(fqn)
            if item is None:
                chunks.add_object(fqn, path, self._place(fqn, None, None, found.ranges, ranges))
                continue
            for chunk in item.chunks:
                where = self._place(fqn, item, chunk, found.ranges, ranges)
                chunks.add_tensor(fqn, item.size, chunk.offsets, chunk.sizes, item.dtype, path, where)
        self._check_ranges(ranges)
        return chunks.metadata()

    def _place(
        self, fqn: str, item: Tensor | None, chunk: Chunk | None,
        stored: Mapping[tuple[str, tuple[int, ...] | None], Range], ranges: dict[str, list[tuple[int, int]]],
    ) -> Stored:  # fmt: skip
        offsets = None if chunk is None else chunk.offsets
        found = stored.get((fqn, offsets))
        if found is None:
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} at {offsets!r:.80} is in no file")
        if found.transforms:
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} was changed by extensions of DCP ({found.transforms!r:.80}), which are "
                "not supported: load it by FileSystemReader"
            )
        if not _FILE.fullmatch(found.file) or found.file in (".", ".."):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} is in {found.file!r:.80}, which is no name of a file")
        ranges.setdefault(found.file, []).append((found.offset, found.nbytes))
        if item is None or chunk is None:
            return Stored(found.file, found.offset, found.nbytes, None, None)
        needed = math.prod(chunk.sizes) * item.dtype.itemsize
        if any(at + n > size for at, n, size in zip(chunk.offsets, chunk.sizes, item.size, strict=True)):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} has a chunk {chunk!r:.120} beyond its size")
        if needed > min(found.nbytes, MAX_BYTES):
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} has a chunk of {needed} bytes in a range of {found.nbytes}"
            )
        return Stored(found.file, found.offset, found.nbytes, chunk.sizes, item.dtype)

    def _check_ranges(self, ranges: Mapping[str, list[tuple[int, int]]]) -> None:
        for file, found in ranges.items():
            path = self._directory / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, which {METADATA} names")
            size, end = path.stat().st_size, 0
            for offset, nbytes in sorted(found):
                if offset < end:
                    raise CheckpointError(f"{path}: two items overlap at offset {offset}")
                end = offset + nbytes
                if end > size:
                    raise CheckpointError(f"{path} has {size} bytes, an item ends at {end}: it is truncated")

    def order(self, where: Stored) -> tuple[str, int]:
        """Sorts items by where they are in the files."""
        return where.file, where.offset

    def read_object(self, where: Stored) -> bytes:
        """The bytes of an object."""
        data = self._open(where.file).pread(where.nbytes, where.offset)
        if len(data) != where.nbytes:
            raise CheckpointError(f"{self._directory / where.file} is truncated at offset {where.offset + len(data)}")
        return data

    def read_tensor(self, where: Stored, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a chunk, whose archive is read whole."""
        label = f"{self._directory / where.file}: the archive at offset {where.offset}"
        tensor = load_archive_at(self._open(where.file), where.offset, where.nbytes, label)
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or (tuple(tensor.shape), tensor.dtype) != (where.shape, where.dtype)
        ):
            raise CheckpointError(f"{label} is not the tensor of shape {where.shape} that {METADATA} says")
        for axis, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(axis, at, length)
        return tensor

    def check(self) -> None:
        """Raise `CheckpointError` if the file that is open has become another one: there are no digests."""
        if self._open_file is not None:
            self._open_file[1].check()

    def _open(self, file: str) -> InputFile:
        if self._open_file is None or self._open_file[0] != file:
            self.check()
            self.close()
            self._open_file = file, open_input(self._directory / file)
        return self._open_file[1]

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        opened, self._open_file = self._open_file, None
        if opened is not None:
            opened[1].close()


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
    paths: dict[str, ItemPath]
    ranges: dict[tuple[str, tuple[int, ...] | None], Range]


def read_pickle(path: Location, most: int) -> Found:
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


def _paths(value: Any) -> dict[str, ItemPath]:
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


def load_archive(data: bytes, label: str) -> Any:
    """The value of an archive, from its bytes. Raises `CheckpointError`."""
    memory = MemoryFile("archive")
    write_all(memory.fd, data)
    return _load(memory.path, label)


def _send_range(source: LocalFile, offset: int, nbytes: int, fd: int) -> int:
    """As `copy_range`, within the kernel."""
    copied = 0
    while copied < nbytes and (count := os.sendfile(fd, source.fd, offset + copied, nbytes - copied)):
        copied += count
    return copied


def load_archive_at(source: InputFile, offset: int, nbytes: int, label: str) -> Any:
    """The value of an archive that lies in an open file. Raises `CheckpointError`."""
    memory = MemoryFile("archive")
    if isinstance(source, LocalFile):
        copied = _send_range(source, offset, nbytes, memory.fd)
    else:
        copied = copy_range(source, offset, nbytes, memory.fd)
    if copied < nbytes:
        raise CheckpointError(f"{label}: the file ends at offset {offset + copied}, inside it: it is truncated")
    return _load(memory.path, label)


def _load(path: Path, label: str) -> Any:
    try:
        opened = get_format("torch").open(path)
        if opened.state is None:
            raise CheckpointError(f"{label} is no archive of torch.save")
        return opened.state(True)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(path), label)) from None


class Repacked:
    """Pickled objects, loaded without code of theirs and pickled again: what DCP's planner unpickles freely is then
    this process's own. `label` names the checkpoint in errors."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._made: dict[bytes, bytes] = {}  # thousands of objects of an optimizer are a few different ones

    def __call__(self, data: bytes, fqn: str) -> bytes:
        """The bytes for an object's bytes. Raises `CheckpointError`."""
        made = self._made.get(data)
        if made is None:
            try:
                value = load_archive(data, f"{self._label}: item {fqn!r:.80}")
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}: if you trust this file, allow the type by torch.serialization.add_safe_globals, or pass "
                    "weights_only=False to StorageReader"
                ) from None
            buffer = io.BytesIO()
            torch.save(value, buffer)
            made = self._made[data] = buffer.getvalue()
        return made
