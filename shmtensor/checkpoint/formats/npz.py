"""npz: the archive of `numpy.savez`, which `numpy.load(path)` opens without `allow_pickle`.

| member | what |
|---|---|
| `<name>.npy` | one region each, under the name of the tensor that shows all of it; its data at a multiple of 64 |
| `shmtensor.json` | the description, with the digests; `numpy.load` gives it as bytes |

Types that NumPy lacks are integers of the same size; a region of which no tensor shows all, and a dtype that the
header of an npy cannot say, are bytes.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentError, ArgumentTypeError, CheckpointError
from ...views.numpy import MAX_NDIM
from ..plan import Entry, Plan, plan, stored_shape
from ..texts import Described
from .base import Format, Layout, Opened
from .zip_directory import Directory, locate, read_directory
from .zips import ALIGNMENT, DESCRIPTION, Archive

_MOST_DEFLATED = 1032  # times its own size: deflate cannot do more


class Npz(Format):
    """Files for `numpy.load`."""

    name = "npz"
    suffix = ".npz"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        if max_shard is not None:
            raise ArgumentError('max_shard= is for format="safetensors": an npz is one file')
        archive = Archive(plan)
        taken = {DESCRIPTION}
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

    def recognizes(self, path: Path, start: bytes) -> bool:
        if start[:4] == b"PK\x05\x06":
            return path.suffix == self.suffix
        if start[:4] != b"PK\x03\x04":
            return False
        members = read_directory(path).members
        return DESCRIPTION in members or any(name.endswith(".npy") for name in members)

    def open(self, path: Path) -> Opened:
        directory = read_directory(path)
        member = directory.members.get(DESCRIPTION)
        if member is not None:
            described, places = locate(path, directory, member)
            return Opened(
                self.name, described.plan, [path], [directory.file_bytes], places, described.digests, native=True
            )
        return Opened(self.name, plan(_load(path, directory)), [path], [directory.file_bytes], None, None, native=False)


def _member(name: str, taken: set[str]) -> str:
    """A name that no other member has, and that leads to no other folder when somebody unpacks the archive."""
    name = name.replace("/", "|")
    unique, count = f"{name}.npy", 1
    while unique in taken:
        count += 1
        unique = f"{name}#{count}.npy"
    taken.add(unique)
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


def _load(path: Path, directory: Directory) -> dict[str, Any]:
    """The arrays of an archive that somebody else wrote; packed ones as well."""
    arrays = {}
    name = ""
    try:
        with zipfile.ZipFile(path) as archive:
            for name, member in directory.members.items():
                if not name.endswith(".npy"):
                    continue
                if member.nbytes > max(member.packed, 1) * _MOST_DEFLATED:
                    raise CheckpointError(
                        f"{path}: member {name!r:.80} says {member.nbytes} bytes, and has {member.packed}"
                    )
                with archive.open(name) as file:
                    _check_size(file, member.nbytes)
                with archive.open(name) as file:
                    arrays[name[:-4]] = np.lib.format.read_array(file, allow_pickle=False)
    except CheckpointError:
        raise
    except (ValueError, EOFError, KeyError, OSError, MemoryError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: member {name!r:.80}: {error}") from None
    except Exception as error:  # zlib.error, struct.error, tokenize.TokenError: whatever a crafted header brings about
        raise CheckpointError(f"{path}: member {name!r:.80}: {type(error).__name__}: {error}") from None
    return arrays


def _check_size(file: Any, nbytes: int) -> None:
    """`ValueError` unless the array that a header speaks of has the size of its member."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"an npy of version {version}")
    shape, _, dtype = read(file)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size != nbytes - file.tell() and not dtype.hasobject:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} in {nbytes} bytes")
