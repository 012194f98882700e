"""npz: the archive of `numpy.savez`, which `numpy.load(path)` opens without `allow_pickle`.

| member | what |
|---|---|
| `<name>.npy` | one region each, under the name of the tensor that covers it; its data at a multiple of 64 |
| `shmtensor.json` | the description, with the digests; `numpy.load` gives it as bytes |

Types that NumPy lacks are integers of the same size; a region that no tensor covers, and a dtype that an npy header
cannot have, are bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...codec.leaf import Refused, c_strides
from ...codec.numpy import MAX_NDIM, Array
from ...errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..description import Described
from ..locations import PAGE, InputFile, Location, Stamp, check_same, open_input, stamp_of
from ..plan import Entry, Plan, Region, stored_shape, unique_names
from ..structure import dtype_name
from .base import Format, Layout, Opened, Stored
from .zips import (
    ALIGNMENT,
    DESCRIPTION,
    Archive,
    Directory,
    ZipMember,
    damaged,
    has_member,
    locate,
    read_directory,
    read_pieces,
)

_MAGIC: Final = b"\x93NUMPY"
_MAX_VERSION: Final = 12  # bytes of an npy up to its header
_SHOWN: Final = 5
_MAX_NPY_HEADER: Final = 1 << 17  # bytes; NumPy itself reads at most 10,000 without being told to
_FREELY_PACKED: Final = 1 << 20  # bytes that packed headers may always unpack to
_MOST_PACKED: Final = 4  # times the file's size that they may unpack to in addition


# the open archive, for a `with` block
_Opens = Callable[[], contextlib.AbstractContextManager[InputFile]]


class Npz(Format):
    """Files for `numpy.load`."""

    name = "npz"
    suffix = ".npz"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        if max_shard is not None:
            raise ArgumentError('max_shard= is for format="safetensors": an npz is one file')
        archive = Archive(plan)
        taken = {DESCRIPTION: 1}
        names = []
        for entry in plan.tensors:
            if entry.region < 0:
                archive.add(_member(entry.name, taken), _header(entry, entry.shape))
        for region, contents in enumerate(plan.regions):
            covering = plan.covering(region)
            if covering is None:
                name = plan.tensors[plan.members[region][0]].name + "#storage"
                header = _npy(np.dtype(np.uint8), (contents.nbytes,))
            else:
                name, header = covering.name, _header(covering, stored_shape(covering))
            names.append(_member(name, taken))
            archive.add_region(names[-1], region, header)
        return archive.layout(Described(plan.describe(), names), DESCRIPTION)

    def recognizes(self, path: Location, start: bytes) -> bool:
        if start[:4] == b"PK\x05\x06":
            return path.suffix == self.suffix
        return start[:4] == b"PK\x03\x04" and has_member(path, _is_ours)

    def open(self, path: Location) -> Opened:
        directory = read_directory(path, _is_any)
        member = directory.members.get(DESCRIPTION)
        if member is not None:
            described, places = locate(path, member)
            return Opened(self.name, described.plan, [path], [directory.stamp], places, described.digests, native=True)
        made, parts = _plan_of(path, directory)
        return Opened(self.name, made, [path], [directory.stamp], None, None, native=False, parts=parts)


def _is_any(name: str) -> bool:
    return True


def _is_ours(name: str) -> bool:
    return name == DESCRIPTION or name.endswith(".npy")


def _member(name: str, taken: dict[str, int]) -> str:
    """A unique name of a member, without slashes, so that it unpacks into the same folder. taken: the names before it,
    each with the last number that was added to it"""
    name = name.replace("/", "|").encode("utf-8", "backslashreplace").decode("utf-8")  # without half surrogates
    unique = first = f"{name}.npy"
    while unique in taken:
        taken[first] += 1
        unique = f"{name}#{taken[first]}.npy"
    taken[unique] = 1
    return unique


def _header(entry: Entry, shape: tuple[int, ...]) -> bytes:
    dtype: Any = entry.numpy
    if not dtype.itemsize or dtype.type.__module__ == "ml_dtypes" or len(shape) > min(MAX_NDIM, 32):
        return _npy(np.dtype(np.uint8), (math.prod(shape) * dtype.itemsize,))
    return _npy(dtype, shape)


def _npy(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of an npy, a multiple of 64 bytes."""
    try:
        descr: Any = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) != dtype:
            raise ValueError
        repr(descr).encode("latin1")  # as the header is
    except (ValueError, TypeError):
        shape, descr = (*shape, dtype.itemsize), "|u1"
    file = io.BytesIO()
    header: Any = {"descr": descr, "fortran_order": False, "shape": shape}
    try:
        np.lib.format.write_array_header_1_0(file, header)
    except ValueError:
        np.lib.format.write_array_header_2_0(file, header)
    data = file.getvalue()
    if len(data) % ALIGNMENT:
        raise ArgumentTypeError(f"this NumPy writes headers of {len(data)} bytes, which are not aligned")
    return data


def _plan_of(path: Location, directory: Directory) -> tuple[Plan, list[Stored | None]]:
    """The plan of an archive of another program, a flat dict of arrays, each read when its bytes are needed; and the
    places of those that are not packed."""
    tensors: list[Entry] = []
    regions: list[Region] = []
    parts: list[Stored | None] = []
    held = open_input(path)  # of this machine: may be renamed, deleted or replaced from now on
    check_same(path, directory.stamp, stamp_of(held))
    opens = (lambda: contextlib.nullcontext(held)) if isinstance(path, Path) else partial(open_input, path)
    members = _arrays_of(path, held, directory)
    keys = [_key_of(member) for member in members]
    packed = 0
    (key, count), *_ = [*Counter(keys).most_common(1), ("", 0)]
    if count > 1:
        raise CheckpointError(f"{path}: it has two arrays of the name {key!r:.80}, with and without .npy")
    for name, member in zip(unique_names(keys), members, strict=True):
        header = _read_header(path, held, member, f"{path}: member {member.name!r:.80}")
        packed += header.nbytes if member.offset is None else 0
        if packed > _FREELY_PACKED + _MOST_PACKED * directory.stamp.nbytes:
            raise CheckpointError(f"{path}: the headers of its arrays unpack to {packed} bytes, much more than it has")
        region = -1
        if member.nbytes > header.nbytes:
            region = len(regions)
            source = partial(_read_array, path, opens, directory.stamp, member, header)
            regions.append(Region(member.nbytes - header.nbytes, header.dtype.alignment, source))
            strides = _fortran_strides(header) if header.fortran else None
            parts.append(None if member.offset is None else Stored(0, member.offset + header.nbytes, strides))
        tensors.append(Entry(name, False, header.description, header.shape, None, region, 0))
    return Plan({"d": {key: {"x": number} for number, key in enumerate(keys)}}, tensors, regions, None), parts


def _key_of(member: ZipMember) -> str:
    """The name of an array, as `numpy.load` has it."""
    return member.name.removesuffix(".npy")


def _arrays_of(path: Location, file: InputFile, directory: Directory) -> list[ZipMember]:
    """The members that `numpy.load` gives as arrays: those that begin as an npy does, whatever their name is. Warns of
    the others; one that is called an npy is an error later on."""
    arrays: list[ZipMember] = []
    others: list[ZipMember] = []
    for member in directory.members.values():
        is_array = member.name.endswith(".npy") or _start_of(path, file, member, len(_MAGIC)).startswith(_MAGIC)
        (arrays if is_array else others).append(member)
    left = [member.name for member in others if not member.name.endswith("/")]
    if left:
        warnings.warn(
            f"{path}: {len(left)} members are no arrays, and left out: "
            + ", ".join(f"{name!r:.80}" for name in left[:_SHOWN])
            + (", ..." if len(left) > _SHOWN else ""),
            RuntimeWarning,
            stacklevel=2,
        )
    return arrays


def _start_of(path: Location, file: InputFile, member: ZipMember, nbytes: int) -> bytes:
    """The first unpacked bytes of a member, at least `nbytes` of them if it has as many."""
    start = b""
    for piece in read_pieces(file, member, str(path), PAGE):
        start += piece
        if len(start) >= nbytes:
            break
    return start


class _Header(NamedTuple):
    """The header of an npy; `nbytes` is its own size."""

    dtype: Any
    description: Any
    shape: tuple[int, ...]
    fortran: bool
    nbytes: int


def _read_header(path: Location, file: InputFile, member: ZipMember, label: str) -> _Header:
    """Read the header of a member. `CheckpointError` unless the member has the size of its array."""
    try:
        start = _start_of(path, file, member, _MAX_VERSION)
        header_bytes = _npy_header_bytes(start)
        if len(start) < header_bytes:
            start = _start_of(path, file, member, min(header_bytes, _MAX_NPY_HEADER))
        data = io.BytesIO(start[:_MAX_NPY_HEADER])
        version = np.lib.format.read_magic(data)
        if version == (3, 0):  # as version 2, but in UTF-8
            text = data.read()[4 : header_bytes - 8].decode("utf-8").encode("ascii", "backslashreplace")
            data, version = io.BytesIO(len(text).to_bytes(4, "little") + text), (2, 0)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"an npy of version {version}")
        shape, fortran, dtype = read(data)
        description = dtype_name(dtype)
    except CheckpointError:
        raise
    except Refused as refused:
        raise CheckpointError(f"{label}: {refused.reason}") from None
    except Exception as error:  # tokenize.TokenError, SyntaxError: whatever a crafted header causes
        raise CheckpointError(f"{label}: {type(error).__name__}: {error}") from None
    size = dtype.itemsize
    for length in shape:
        size *= length
    if len(shape) > MAX_NDIM or any(length < 0 for length in shape) or size != member.nbytes - header_bytes:
        raise CheckpointError(
            f"{label}: an array of shape {shape!r:.80} and dtype {dtype!s:.40} in {member.nbytes} bytes"
        )
    return _Header(dtype, description, shape, fortran, header_bytes)


def _npy_header_bytes(start: bytes) -> int:
    """The size of an npy's header, by its own length field."""
    size = 2 if start[6:7] == b"\1" else 4
    return 8 + size + int.from_bytes(start[8 : 8 + size], "little")


def _fortran_strides(header: _Header) -> tuple[int, ...]:
    return c_strides(header.shape[::-1], header.dtype.itemsize)[::-1]


def _read_array(path: Location, opens: _Opens, before: Stamp, member: ZipMember, header: _Header) -> Array:
    """The bytes of an array, in C order."""
    data = np.empty(member.nbytes - header.nbytes, np.uint8)
    at, crc = -header.nbytes, 0
    with opens() as file:
        check_same(path, before, stamp_of(file))
        for piece in read_pieces(file, member, str(path)):
            crc = zlib.crc32(piece, crc)
            part = np.frombuffer(piece, np.uint8)[max(0, -at) :]
            data[max(0, at) : max(0, at) + len(part)] = part
            at += len(piece)
    if crc != member.crc:
        raise damaged(path, member)
    if header.fortran and len(header.shape) > 1:
        transposed = np.ndarray(header.shape, header.dtype, data, order="F")
        data = np.ascontiguousarray(transposed).reshape(-1).view(np.uint8)
    return data
