"""`StorageReader`: DCP's loads, from this library's checkpoints and from those of DCP's `FileSystemWriter`.

Of checkpoints that `StorageWriter` saved (`StoredParts`) the parts have DCP's metadata, and the bytes that a load plan
asks for. A chunk that is read whole is compared with its digest. Of a part of a chunk exactly its bytes are read:

    dense in the file              one run, by several threads
    rows of at least 1 KiB         one read for each row
    shorter rows                   copied out of the mapped file

so that a rank reads what it needs, whatever the number of ranks was. From a URL, rows that are near each other come by
one request with the gaps between them, several requests at once.

Checkpoints of `FileSystemWriter` (`FileSystemFiles`) are `.metadata` and files in which each item is an archive of
torch. Each item's range must lie in its file, ranges do not overlap, and a chunk has at least as many bytes as its
elements take; so what the metadata promises is there before memory is spent. Archives are opened by
`torch.load(weights_only=True)` alone, after the check of what their pickles would cost
(`shmtensor.checkpoint.formats.pickles`). The library's reading of such files works on paths, and needs the archive to
end where the file does. So an archive that lies inside a file is copied into a file in memory first: its size is that
of bytes that are really there.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..checkpoint.formats import Opened, get_format
from ..checkpoint.formats.base import is_beside
from ..checkpoint.formats.distcp import MAX_METADATA, METADATA
from ..checkpoint.load import map_files, read
from ..checkpoint.locations import (
    InputFile,
    LocalFile,
    Location,
    MemoryFile,
    copy_range,
    fresh,
    location,
    open_input,
    write_all,
)
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.opening import open_parts, persistently, resolve
from ..checkpoint.plan import Entry, build_tensor
from ..checkpoint.reading import Files, default_readers, private
from ..checkpoint.remote import GAP, is_url
from ..checkpoint.selection import Span, narrow, packed, read_part, stored_nbytes
from ..checkpoint.structure import MAX_TENSORS
from ..codec.libraries import torch_views
from ..errors import ArgumentError, CheckpointError
from ..wire.spec import MAX_BYTES, extent
from .metadata import Chunk, Description, Items, Range, Tensor, parse, read_pickle


class Source(Protocol):
    """An open checkpoint: `StoredParts` or `FileSystemFiles`. `where` is what its metadata's `storage_data` has."""

    name: str

    def metadata(self) -> Metadata:
        """DCP's metadata. Raises `CheckpointError`."""

    def order(self, where: Any) -> Any:
        """A key that sorts items by where they are in the files."""

    def read_object(self, where: Any) -> bytes:
        """The bytes of a pickled object."""

    def read_tensor(self, where: Any, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a chunk."""

    def check(self) -> None:
        """Raise `CheckpointError` if what was read without digests has become another file since it was opened."""

    def close(self) -> None:
        """Close the files; idempotent."""


class StorageReader(storage.StorageReader):
    """Loads checkpoints by `torch.distributed.checkpoint.load`: those of `StorageWriter`, and of `FileSystemWriter`.

    Any number of ranks may load what any number has saved. Of a checkpoint of `StorageWriter` each rank reads the bytes
    that its state dict needs; of one of `FileSystemWriter` the whole archive of each chunk that it needs.

    Args:
        path: a checkpoint, or a directory of `StorageWriter`, which means its `latest`; or the URL of one (`s3://`,
            `https://`, whatever fsspec has). `checkpoint_id=` of `load` replaces it: a path, a URL, or the name of a
            checkpoint in that directory.
        verify: compare chunks of `StorageWriter` that are read whole with their digests.
        weights_only: objects that are no tensors are loaded only if `torch.load(weights_only=True)` does so; types that
            you trust are allowed by `torch.serialization.add_safe_globals`. False: DCP's planner unpickles them
            freely, which runs whatever code the file says.

    Metadata is never unpickled. Ranks that find different checkpoints, because `latest` has moved between them, get a
    `CheckpointError`.

    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shmtensor.dcp import StorageReader
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as path:
    ...     metadata = dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)  # by FileSystemWriter
    ...     state = {"w": torch.zeros(3)}
    ...     dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    ...     state
    {'w': tensor([1., 1., 1.])}
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, weights_only: bool = True) -> None:
        super().__init__()
        self._path = self._base = location(path)
        self._verify, self._weights_only = verify, weights_only
        self._source: Source | None = None
        self._stored: dict[Any, Any] = {}

    # --- what DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load another checkpoint: a path, or a name in the reader's directory."""
        self._source = None
        if checkpoint_id is not None:
            self._path = self._named(checkpoint_id)

    def _named(self, checkpoint_id: str | os.PathLike[str]) -> Location:
        if not is_url(checkpoint_id) and not os.path.isabs(checkpoint_id):
            named = fresh(self._base) / os.fspath(checkpoint_id)
            if named.is_symlink() or named.exists() or not isinstance(named, Path):
                return named
        return location(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint. Raises `FileNotFoundError`, `CheckpointError`."""
        if kwargs.get("rank") is not None:  # DCP's second attempt, for ranks that saved without each other
            raise CheckpointError(f"{self._path} has no metadata of single ranks, only of all together")
        return persistently(self._path, self._read_metadata)

    def _read_metadata(self) -> Metadata:
        self._source = self._open()
        return self._source.metadata()

    def _open(self) -> Source:
        path = fresh(self._path)
        if (path / METADATA).is_file() and not (path / MANIFEST).is_file():
            return FileSystemFiles(path.resolve())
        found = resolve(path)
        directory = (found.files[0].parent if isinstance(found, Opened) else found).resolve()
        if not (directory / MANIFEST).is_file():
            raise CheckpointError(
                f"{directory} was saved neither by shmtensor.dcp nor by FileSystemWriter: it has no {MANIFEST} and no "
                f"{METADATA}"
            )
        return StoredParts(directory, verify=self._verify)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take where the items are from the metadata that `read_metadata` has returned."""
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which checkpoint this rank has opened."""
        return dataclasses.replace(plan, storage_data=self._opened.name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint. `CheckpointError` if not."""
        names = [os.path.basename(plan.storage_data) for plan in plans]
        other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if other is not None:
            raise CheckpointError(
                f"rank 0 has opened {names[0]!r:.80} and rank {other} {names[other]!r:.80}: the newest one has changed "
                "meanwhile, name the checkpoint by checkpoint_id="
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors. Raises `CheckpointError` for what is damaged."""
        source = self._opened
        repacked = Repacked(source.name) if self._weights_only else None
        try:
            for item in sorted(plan.items, key=lambda item: source.order(self._stored[item.storage_index])):
                where = self._stored[item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    data = source.read_object(where)
                    if repacked is not None:
                        data = repacked(data, item.storage_index.fqn)
                    planner.load_bytes(item, io.BytesIO(data))
                else:
                    _fill(item, planner, source.read_tensor(where, tuple(item.storage_offsets), tuple(item.lengths)))
            source.check()
        finally:
            source.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint may be there: any path or URL."""
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path that is loaded."""
        return str(self._path)

    @property
    def _opened(self) -> Source:
        if self._source is None:
            raise ArgumentError("read_metadata comes first, as DCP's load calls it")
        return self._source

    def __repr__(self) -> str:
        return f"<StorageReader {str(self._path)!r}>"


def _fill(item: ReadItem, planner: LoadPlanner, tensor: torch.Tensor) -> None:
    """Copy a tensor to where the planner wants it."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ArgumentError(
            f"item {item.storage_index.fqn!r:.80}: the state dict has a place of {list(target.size())}, the plan reads "
            f"{list(tensor.size())}"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


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

    def __init__(self, directory: Location, *, verify: bool) -> None:
        self.name = str(directory)
        """Which checkpoint it is."""
        self._verify = verify
        self._parts = open_parts(directory)
        if sum(len(opened.plan.tensors) for opened in self._parts) > MAX_TENSORS:
            raise CheckpointError(f"{directory} has more than {MAX_TENSORS} tensors")
        self._files: tuple[int, Files] | None = None

    def metadata(self) -> Metadata:
        """DCP's metadata, the union of what the parts say. Raises `CheckpointError` if they contradict each other."""
        items = Items(self.name)
        for number, opened in enumerate(self._parts):
            description = parse(opened.plan.meta, opened.plan, str(opened.files[0]))
            self._add(items, number, opened, description)
        return items.metadata()

    @staticmethod
    def _add(items: Items, part: int, opened: Opened, description: Description) -> None:
        entries = opened.plan.tensors
        for number, (item, entry) in enumerate(zip(description.tensors, entries, strict=False)):
            items.add_tensor(
                item.fqn, item.size, item.offsets, entry.shape, _dtype(entry), item.path,
                Stored(part, number, 0, entry.nbytes),
            )  # fmt: skip
        start = 0
        for found in description.objects:
            stop = start + found.nbytes
            items.add_object(found.fqn, found.path, Stored(part, len(entries) - 1, start, stop))
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
            return build_tensor(part, arrays=False)
        region = plan.regions[part.region]
        nbytes = stored_nbytes(part)
        files = self._open(where.part)
        file, start = (opened.places or [])[part.region]
        if nbytes == region.nbytes:
            memory = read(opened, files, [part.region], readers=default_readers(), verify=self._verify)[part.region]
            entry = part
        elif (
            nbytes == extent(part.shape, part.strides, part.itemsize)
            or whole.strides is not None
            or files.is_remote(file)
        ):
            memory, entry = read_part(files, Span(file, start, part), default_readers(), GAP), packed(part)
        elif (rows := _rows(whole, index)) is not None:
            memory = private(nbytes)
            for number, at in enumerate(rows.starts):
                row = memory[number * rows.nbytes : (number + 1) * rows.nbytes]
                files.fill(row, file, start + whole.offset + at, f'"{whole.name}"')
            entry = part._replace(strides=None, offset=0)
        else:
            memory, entry = map_files(opened, files, [part.region])[part.region], part
        return build_tensor(entry, memory, region.align, arrays=False)

    def check(self) -> None:
        """Each tensor was checked as it was read: by its digest, or `Files.check`."""

    def _open(self, part: int) -> Files:
        if self._files is None or self._files[0] != part:
            self.close()
            opened = self._parts[part]
            self._files = part, Files.of(opened)
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


def _rows(entry: Entry, index: tuple[slice, ...]) -> _Rows | None:
    """The runs of a part of a tensor in C order: the last dimensions that are whole, and the one before them. None if
    they are too short, and perhaps too many, to be read one by one."""
    inner = len(entry.shape)
    while inner and index[inner - 1] == slice(0, entry.shape[inner - 1]):
        inner -= 1
    step = math.prod(entry.shape[inner:]) * entry.itemsize
    nbytes = (index[inner - 1].stop - index[inner - 1].start) * step if inner else step
    if nbytes < _ROW:
        return None
    starts = np.zeros(1, np.int64)
    for axis in reversed(range(inner)):
        at = index[axis]
        if axis == inner - 1:
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


class Archive(NamedTuple):
    """Where an item of `FileSystemWriter` is: a file, a range of it, and the shape and dtype that the metadata
    says; None for an object."""

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
        items = Items(self.name)
        ranges: dict[str, list[tuple[int, int]]] = {}
        for fqn, item in found.items.items():
            path = found.paths.get(fqn)
            if item is None:
                items.add_object(fqn, path, self._place(fqn, None, None, found.ranges, ranges))
                continue
            for chunk in item.chunks:
                where = self._place(fqn, item, chunk, found.ranges, ranges)
                items.add_tensor(fqn, item.size, chunk.offsets, chunk.sizes, item.dtype, path, where)
        self._check_ranges(ranges)
        return items.metadata()

    def _place(
        self, fqn: str, item: Tensor | None, chunk: Chunk | None,
        stored: Mapping[tuple[str, tuple[int, ...] | None], Range], ranges: dict[str, list[tuple[int, int]]],
    ) -> Archive:  # fmt: skip
        offsets = None if chunk is None else chunk.offsets
        found = stored.get((fqn, offsets))
        if found is None:
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} at {offsets!r:.80} is in no file")
        if found.transforms:
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} was changed by extensions of DCP ({found.transforms!r:.80}), which are "
                "not supported: load it by FileSystemReader"
            )
        if not is_beside(found.file):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} is in {found.file!r:.80}, which is no name of a file")
        ranges.setdefault(found.file, []).append((found.offset, found.nbytes))
        if item is None or chunk is None:
            return Archive(found.file, found.offset, found.nbytes, None, None)
        needed = math.prod(chunk.sizes) * item.dtype.itemsize
        if any(at + n > size for at, n, size in zip(chunk.offsets, chunk.sizes, item.size, strict=True)):
            raise CheckpointError(f"{self.name}: item {fqn!r:.80} has a chunk {chunk!r:.120} beyond its size")
        if needed > min(found.nbytes, MAX_BYTES):
            raise CheckpointError(
                f"{self.name}: item {fqn!r:.80} has a chunk of {needed} bytes in a range of {found.nbytes}"
            )
        return Archive(found.file, found.offset, found.nbytes, chunk.sizes, item.dtype)

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

    def order(self, where: Archive) -> tuple[str, int]:
        """Sorts items by where they are in the files."""
        return where.file, where.offset

    def read_object(self, where: Archive) -> bytes:
        """The bytes of an object."""
        data = self._open(where.file).pread(where.nbytes, where.offset)
        if len(data) != where.nbytes:
            raise CheckpointError(f"{self._directory / where.file} is truncated at offset {where.offset + len(data)}")
        return data

    def read_tensor(self, where: Archive, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
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
