"""Checkpoints that `StorageWriter` saved: DCP's metadata from the parts, and the bytes that a load plan asks for.

A chunk that is read whole is compared with its digest. Of a part of a chunk exactly its bytes are read:

    dense in the file              one run, by several threads
    rows of at least 1 KiB         one read for each row
    shorter rows                   copied out of the mapped file

so that a rank reads what it needs, whatever the number of ranks was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoint import manifest
from ..checkpoint.build import build_state
from ..checkpoint.files import Files
from ..checkpoint.formats import Opened
from ..checkpoint.limits import MAX_TENSORS
from ..checkpoint.load import map_files, raise_damage
from ..checkpoint.plan import Entry, Plan
from ..checkpoint.reading import default_readers, private, read_regions
from ..checkpoint.regions import Region
from ..checkpoint.slicing import Span, narrow, packed, read_part, stored_nbytes
from ..codec.libraries import torch_views
from ..codec.numpy import Array
from ..errors import CheckpointError
from ..wire.spec import extent
from .description import Description, parse
from .metadata import Chunks

_ROW: Final = 1 << 10
"""Bytes of a row, from which on it is worth a read of its own."""


class Stored(NamedTuple):
    """Where an item is: the part, the number of its tensor, and the bytes of it (of an object; all for a tensor)."""

    part: int
    number: int
    start: int
    stop: int


class StoredParts:
    """An open checkpoint, in a directory that is no link. Its files are opened as they are read, one part at a time."""

    def __init__(self, directory: Path, *, verify: bool) -> None:
        self.name = str(directory)
        """Which checkpoint it is."""
        self._verify = verify
        self._parts = [manifest.open_part(directory, rank) for rank in range(len(manifest.read(directory).parts))]
        if sum(len(opened.plan.tensors) for opened in self._parts) > MAX_TENSORS:
            raise CheckpointError(f"{directory} has more than {MAX_TENSORS} tensors")
        self._files: tuple[int, Files] | None = None

    def metadata(self) -> Metadata:
        """DCP's metadata, the union of what the parts say. Raises `CheckpointError` if they contradict each other."""
        chunks = Chunks(self.name)
        for number, opened in enumerate(self._parts):
            description = parse(opened.plan.meta, opened.plan, str(opened.files[0]))
            self._add(chunks, number, opened, description)
        return chunks.metadata()

    @staticmethod
    def _add(chunks: Chunks, part: int, opened: Opened, description: Description) -> None:
        entries = opened.plan.tensors
        for number, (item, entry) in enumerate(zip(description.tensors, entries, strict=False)):
            chunks.add_tensor(
                item.fqn, item.size, item.offsets, entry.shape, _dtype(entry), item.path,
                Stored(part, number, 0, entry.nbytes),
            )  # fmt: skip
        start = 0
        for found in description.objects:
            stop = start + found.nbytes
            chunks.add_object(found.fqn, found.path, Stored(part, len(entries) - 1, start, stop))
            start = stop

    def order(self, where: Stored) -> tuple[int, int, int]:
        """Sorts items by where they are in the files."""
        opened = self._parts[where.part]
        region = opened.plan.tensors[where.number].region
        return where.part, (opened.places or [])[region][1] if region >= 0 else 0, where.start

    def read_object(self, where: Stored) -> bytes:
        """The bytes of an object."""
        if where.start == where.stop:
            return b""
        data: bytes = self._read(where, np.s_[where.start : where.stop]).tobytes()
        return data

    def read_tensor(self, where: Stored, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a chunk, in memory of its own or mapped."""
        index = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
        tensor: torch.Tensor = self._read(where, index)
        return tensor

    def _read(self, where: Stored, index: Any) -> Any:
        opened = self._parts[where.part]
        plan = opened.plan
        whole = plan.tensors[where.number]
        part = narrow(whole, index)
        if part.region < 0:
            return build_state(Plan({"x": 0}, [part], [], None), _no_bytes, arrays=False)
        region = plan.regions[part.region]
        nbytes = stored_nbytes(part)
        files = self._open(where.part)
        file, start = (opened.places or [])[part.region]
        if nbytes == region.nbytes:
            memory, entry = self._read_region(opened, files, part.region), part
        elif nbytes == extent(part.shape, part.strides, part.itemsize) or whole.strides is not None:
            memory, entry = read_part(files, Span(file, start, part), default_readers()), packed(part)
        elif (rows := _rows(whole, index)).nbytes >= _ROW:
            memory = private(nbytes)
            for number, at in enumerate(rows.starts):
                row = memory[number * rows.nbytes : (number + 1) * rows.nbytes]
                files.fill(row, file, start + whole.offset + at, f'"{whole.name}"')
            entry = part._replace(strides=None, offset=0)
        else:
            memory, entry = map_files(opened, [part.region])[part.region], part
        made = Plan({"x": 0}, [entry._replace(region=0)], [Region(memory.nbytes, region.align)], None)
        return build_state(made, lambda _: memory, arrays=False)

    def _read_region(self, opened: Opened, files: Files, region: int) -> Array:
        memory = private(opened.plan.regions[region].nbytes, (opened.places or [])[region][1])
        raise_damage(
            read_regions(opened, files, [region], lambda _: memory, readers=default_readers(), verify=self._verify)
        )
        return memory

    def _open(self, part: int) -> Files:
        if self._files is None or self._files[0] != part:
            self.close()
            opened = self._parts[part]
            self._files = part, Files(opened.files, opened.sizes)
        return self._files[1]

    def close(self) -> None:
        """Close the files. Idempotent; what is read later opens them again."""
        files, self._files = self._files, None
        if files is not None:
            files[1].close()


class _Rows(NamedTuple):
    """The runs of bytes of a part: `nbytes` at each of the offsets `starts`, in C order of the part."""

    nbytes: int
    starts: list[int]


def _rows(entry: Entry, index: tuple[slice, ...]) -> _Rows:
    """The runs of a part of a tensor in C order: the last dimensions that are whole, and the one before them."""
    inner = len(entry.shape)
    while inner and index[inner - 1] == slice(0, entry.shape[inner - 1]):
        inner -= 1
    step = math.prod(entry.shape[inner:]) * entry.itemsize
    starts = np.zeros(1, np.int64)
    nbytes = step
    for axis in reversed(range(inner)):
        at = index[axis]
        if axis == inner - 1:
            nbytes = (at.stop - at.start) * step
            starts += at.start * step
        else:
            starts = (np.arange(at.start, at.stop, dtype=np.int64)[:, None] * step + starts[None, :]).reshape(-1)
        step *= entry.shape[axis]
    return _Rows(nbytes, starts.tolist())


def _dtype(entry: Entry) -> torch.dtype:
    """The torch dtype of a tensor. `CheckpointError` if this torch has none that can be filled."""
    row = entry.row
    found = None if row is None or row.quantized else torch_views().DTYPE.get(row.code)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"tensor {entry.name!r:.80} has dtype {entry.dtype!r:.40}, which no tensor is filled with"
        )
    return found


def _no_bytes(region: int) -> NoReturn:
    raise AssertionError("a tensor without elements has no region")
