"""`.metadata`: what the `FileSystemReader` of torch's distributed checkpoint (DCP) unpickles, composed without torch.

The process that commits a checkpoint of several ranks writes it beside the parts, if all of them are of the format
distcp and say what DCP's items they have (`shmtensor.dcp.description`). No trainer has to be there, and the file is on
disk before the checkpoint gets its name. This library never reads it: the manifest and the parts say the same.

The pickle has protocol 2 and is written opcode by opcode: instances of the classes of
`torch.distributed.checkpoint.metadata` and of `_StorageInfo`, with the fields that DCP pickles itself, and nothing of
the user's but strings and numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..wire.dtypes import BY_NAME
from .formats.distcp import Distcp, read_table
from .limits import MAX_TENSORS

METADATA: Final = ".metadata"
MAX_METADATA: Final = 512 << 20  # bytes
KEY: Final = "dcp"
"""The key of a part's `meta` that has the description of its items."""
VERSION: Final = 1

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_DCP_VERSION: Final = "1.0.0"

Sizes = tuple[int, ...]


def metadata_of(directory: str, files: Sequence[str]) -> bytes | None:
    """The `.metadata` of the parts in a directory, in the order of the ranks; None if DCP has not saved them in this
    format. Raises OSError, and `CheckpointError` if the parts do not agree."""
    if not all(file.endswith(Distcp.suffix) for file in files):
        return None
    items = _Items()
    for file in files:
        path = Path(os.path.join(directory, file))
        table = read_table(path)
        meta = table["plan"]["meta"]
        if not isinstance(meta, dict) or not isinstance(meta.get(KEY), dict) or meta[KEY].get("version") != VERSION:
            return None
        try:
            items.add(file, table, meta[KEY])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{path}: invalid items: {type(error).__name__}: {error}") from None
    return _Pickle(items).dump()


class _Tensor:
    """A tensor of all ranks: its chunks by offsets, each with its shape and the range of its archive."""

    __slots__ = ("chunks", "dtype", "size")

    def __init__(self, size: Sizes, dtype: str) -> None:
        self.size, self.dtype = size, dtype
        self.chunks: dict[Sizes, tuple[Sizes, str, int, int]] = {}


class _Items:
    """The items of all parts, by name. Of replicas the first one counts."""

    def __init__(self) -> None:
        self.tensors: dict[str, _Tensor] = {}
        self.objects: dict[str, tuple[str, int, int]] = {}
        self.paths: dict[str, Sequence[str | int]] = {}
        self._count = 0

    def add(self, file: str, table: dict[str, Any], described: dict[str, Any]) -> None:
        """Add the items of a part."""
        entries = table["plan"]["tensors"]
        self._count += len(entries)
        if self._count > MAX_TENSORS:
            raise CheckpointError(f"the parts have more than {MAX_TENSORS} tensors, which no reader takes")
        for (fqn, path, size, offsets), entry, (at, nbytes) in zip(
            described["tensors"], entries, table["archives"], strict=False
        ):
            _, _, dtype, shape, *_ = entry
            found = self.tensors.get(fqn)
            if not isinstance(fqn, str) or dtype not in BY_NAME:  # it becomes a name in the pickle
                raise CheckpointError(f"item {fqn!r:.80} has dtype {dtype!r:.40}")
            if found is None:
                found = self.tensors[fqn] = _Tensor(tuple(size), dtype)
            elif found.dtype != dtype or found.size != tuple(size):
                raise CheckpointError(f"item {fqn!r:.80} is of two sizes or dtypes: {file} has another than before")
            if fqn not in self.paths and path is not None:
                self.paths[fqn] = path
            if 0 in size or 0 not in shape:
                found.chunks.setdefault(tuple(offsets), (tuple(shape), file, at, nbytes))
        if not described["objects"]:
            return
        *_, region, offset = entries[-1]
        at = offset + int(table["stored"][region]) if region >= 0 else 0
        for fqn, path, nbytes in described["objects"]:
            if fqn not in self.paths and path is not None:
                self.paths[fqn] = path
            self.objects.setdefault(fqn, (file, at, nbytes))
            at += nbytes


_GLOBALS: Final = (
    *(
        f"{_MODULE}\n{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
            "BytesStorageMetadata", "MetadataIndex",
        )
    ),
    "torch.distributed.checkpoint.filesystem\n_StorageInfo", "torch\nSize", "torch.serialization\n_get_layout",
)  # fmt: skip
_TEXTS: Final = (
    "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "properties", "size", "chunks",
    "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length", "torch.strided",
)  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


_VALUES: Final = [f"c{name}\n".encode() for name in _GLOBALS] + [_text(text) for text in _TEXTS]
_START: Final = b"\x80\x02" + b"".join([value + b"q%c0" % number for number, value in enumerate(_VALUES)])
"""Protocol 2; each class and each name of a field is noted once (BINPUT) and dropped (POP)."""
_GET: Final = {name.rpartition("\n")[2]: b"h%c" % number for number, name in enumerate(_GLOBALS + _TEXTS)}
"""What takes them from there."""


def _new(name: str) -> bytes:
    """An instance, and the beginning of the dict of its fields, which `ub` ends."""
    return _GET[name] + b")\x81}("


_TENSOR: Final = _new("TensorStorageMetadata") + _GET["properties"] + _GET["TensorProperties"] + b")\x81("
_DENSE: Final = (
    _GET["_get_layout"] + _GET["torch.strided"] + b"\x85R\x89" + _GET["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R\x89tb"
)
"""The properties of a tensor after its dtype: strided, without gradient, contiguous, not pinned."""
_CHUNK: Final = _new("ChunkStorageMetadata") + _GET["offsets"]
_INDEX: Final = _new("MetadataIndex") + _GET["index"] + b"N" + _GET["fqn"]
_INFO: Final = _new("_StorageInfo") + _GET["relative_path"]


class _Pickle:
    """The pickle of DCP's `Metadata`. A value that comes again is taken from the memo."""

    def __init__(self, items: _Items) -> None:
        self._items = items
        self._out = [_START]
        self._memo: dict[str | Sizes, bytes] = {}

    def dump(self) -> bytes:
        """The pickle. Raises `CheckpointError` if an item is an object on one rank and a tensor on another."""
        items, out = self._items, self._out
        both = items.tensors.keys() & items.objects.keys()
        if both:
            raise CheckpointError(f"item {min(both)!r:.80} is an object on one rank and a tensor on another")
        out += _new("Metadata"), _GET["state_dict_metadata"], b"}("
        for fqn, tensor in items.tensors.items():
            self._tensor(fqn, tensor)
        for fqn in items.objects:
            out += self._name(fqn), _GET["BytesStorageMetadata"], b")\x81"
        out += b"u", _GET["planner_data"]
        self._paths()
        out += _GET["storage_data"], b"}("
        for fqn, tensor in items.tensors.items():
            for offsets, (_, file, at, nbytes) in tensor.chunks.items():
                out += _INDEX, self._name(fqn), _GET["offset"], self._size(offsets), b"ub"
                self._range(file, at, nbytes)
        for fqn, (file, at, nbytes) in items.objects.items():
            out += _INDEX, self._name(fqn), b"ub"
            self._range(file, at, nbytes)
        out += b"u", _GET["storage_meta"], b"N", _GET["version"], _text(_DCP_VERSION), b"ub."
        return b"".join(out)

    def _tensor(self, fqn: str, tensor: _Tensor) -> None:
        out = self._out
        out += self._name(fqn), _TENSOR, f"ctorch\n{tensor.dtype}\n".encode(), _DENSE
        out += _GET["size"], self._size(tensor.size), _GET["chunks"], b"]("
        for offsets, (shape, *_) in tensor.chunks.items():
            out += _CHUNK, self._size(offsets), _GET["sizes"], self._size(shape), b"ub"
        out += (b"eub",)

    def _paths(self) -> None:
        """The paths of all items in the state dict, or None if some have none."""
        items, out = self._items, self._out
        if len(items.paths) < len(items.tensors) + len(items.objects):
            out += (b"N",)
            return
        out += (b"}(",)
        for fqn, path in items.paths.items():
            steps = [self._name(step) if isinstance(step, str) else _int(step) for step in path]
            out += self._name(fqn), b"(", *steps, b"t"
        out += (b"u",)

    def _range(self, file: str, at: int, nbytes: int) -> None:
        self._out += _INFO, self._name(file), _GET["offset"], _int(at), _GET["length"], _int(nbytes), b"ub"

    # --- values that come more than once

    def _name(self, text: str) -> bytes:
        return self._memo.get(text) or self._note(text, _text(text))

    def _size(self, values: Sizes) -> bytes:
        """A `torch.Size`. It cannot be changed, so that equal ones are one object."""
        found = self._memo.get(values)
        return found or self._note(values, _GET["Size"] + b"((" + b"".join(map(_int, values)) + b"ttR")

    def _note(self, key: str | Sizes, data: bytes) -> bytes:
        number = struct.pack("<I", len(_VALUES) + len(self._memo))
        self._memo[key] = b"j" + number
        return data + b"r" + number


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
