"""The table of contents of a zip archive, read by somebody who trusts nobody."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError
from ..limits import MAX_DESCRIPTION, MAX_TENSORS
from ..texts import ReadDescription, read_described_file

_LOCAL = struct.Struct("<I22xHH")
_SIZES = struct.Struct("<I2xH10xIIHH")  # the same with flags and sizes
_END = struct.Struct("<I6xH10x")  # of the last record
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UNKNOWN = 0x8  # sizes follow the member
_UTF8 = 0x800


class ZipMember(NamedTuple):
    """One member: its bytes lie at `offset` if it is stored as it is (else None), `nbytes` when unpacked."""

    name: str
    offset: int | None
    nbytes: int
    packed: int


class Directory(NamedTuple):
    """What one archive holds."""

    members: dict[str, ZipMember]
    file_bytes: int


def read_directory(path: Path) -> Directory:
    """The members of an archive, each inside the file. `CheckpointError` for what is no zip archive, or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
        raise CheckpointError(_cut_off(path) or f"{path}: no zip archive, truncated or damaged: {error}") from None
    if len(infos) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(infos)} members, at most {MAX_TENSORS} are allowed")
    members: dict[str, ZipMember] = {}
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_count(file.fileno(), len(infos), size, path)
        for info in infos:
            if info.filename in members:
                raise CheckpointError(f"{path}: it has two members named {info.filename!r:.80}")
            members[info.filename] = _member(file.fileno(), info, size, path)
    return Directory(members, size)


def _check_count(fd: int, found: int, size: int, path: Path) -> None:
    """The end of an archive says how many members there are: one whose entry claims to be longer than it is would hide
    those after it."""
    tail = os.pread(fd, _MAX16 + _END.size, max(0, size - _MAX16 - _END.size))
    at = tail.rfind(b"PK\x05\x06", 0, len(tail) - _END.size + 4)
    said = _END.unpack_from(tail, at)[1] if at >= 0 else found
    if said not in (found, _MAX16):  # which means that another record has the number
        raise CheckpointError(
            f"{path}: its table of contents should name {said} members, and names {found}: it is damaged"
        )


def _cut_off(path: Path) -> str | None:
    """Which member an archive without its table of contents ends in, by the headers before the members; None if they do
    not say: they need not know the sizes."""
    with path.open("rb") as file:
        fd, size, at = file.fileno(), os.fstat(file.fileno()).st_size, 0
        for _ in range(MAX_TENSORS):
            start = os.pread(fd, _SIZES.size, at)
            if len(start) < _SIZES.size or start[:4] != b"PK\x03\x04":
                return f"{path}: it ends at offset {size}, in its table of contents: it is truncated" if at else None
            _, flags, packed, _, name, extra = _SIZES.unpack(start)
            label = os.pread(fd, name, at + _SIZES.size).decode("utf-8", "replace")
            begin = at + _SIZES.size + name + extra
            if packed == _MAX32:
                packed = _large(os.pread(fd, extra, at + _SIZES.size + name))
            if flags & _UNKNOWN:
                return None
            if begin + packed > size:
                return f"{path}: it ends at offset {size}, inside member {label!r:.80} at offset {at}: it is truncated"
            at = begin + packed
    return None


def _large(extra: bytes) -> int:
    """The packed size of a member of 4 GiB or more, from the field after its name that has it."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1 and length >= 16 and len(extra) >= 20:
            return int(struct.unpack_from("<Q", extra, 12)[0])
        extra = extra[4 + length :]
    return _MAX32


def _member(fd: int, info: zipfile.ZipInfo, size: int, path: Path) -> ZipMember:
    label = f"{path}: member {info.filename!r:.80} at offset {info.header_offset}"
    if info.flag_bits & 1:
        raise CheckpointError(f"{label} is encrypted")
    start = os.pread(fd, _LOCAL.size, info.header_offset) if 0 <= info.header_offset < size else b""
    if len(start) < _LOCAL.size or start[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{label} is not there: the file is truncated or damaged")
    _, name, extra = _LOCAL.unpack(start)
    own_name = os.pread(fd, name, info.header_offset + _LOCAL.size)
    if own_name.decode("utf-8" if info.flag_bits & _UTF8 else "cp437", "replace") != info.orig_filename:
        raise CheckpointError(f"{label} calls itself {own_name!r:.80}: the file is damaged")
    offset = info.header_offset + _LOCAL.size + name + extra
    if offset + info.compress_size > size:
        raise CheckpointError(f"{label} has {info.compress_size} bytes, the file has {size}: it is truncated")
    if info.compress_type != zipfile.ZIP_STORED:
        return ZipMember(info.filename, None, info.file_size, info.compress_size)
    if info.compress_size != info.file_size:
        raise CheckpointError(f"{label} is stored in {info.compress_size} bytes and should have {info.file_size}")
    return ZipMember(info.filename, offset, info.file_size, info.compress_size)


def read_member(path: Path, member: ZipMember) -> bytes:
    """The bytes of a small member that is stored as it is."""
    if member.offset is None or member.nbytes > 4 * MAX_DESCRIPTION:
        raise CheckpointError(f"{path}: member {member.name!r:.80} is packed, or has {member.nbytes} bytes")
    with path.open("rb") as file:
        data = os.pread(file.fileno(), member.nbytes, member.offset)
    if len(data) != member.nbytes:
        raise CheckpointError(f"{path}: member {member.name!r:.80} is truncated at offset {member.offset + len(data)}")
    return data


def locate(path: Path, directory: Directory, description: ZipMember) -> tuple[ReadDescription, list[tuple[int, int]]]:
    """The description in an archive, and where its regions lie: at the end of the members that it names."""
    described = read_described_file(read_member(path, description), str(path))
    places = []
    for region, name in enumerate(described.stored):
        member = directory.members.get(name)
        if member is None or member.offset is None:
            raise CheckpointError(f"{path}: region {region} should be the member {name!r:.80}, which is not there")
        nbytes = described.plan.regions[region].nbytes
        if member.nbytes < nbytes:
            raise CheckpointError(
                f"{path}: member {name!r:.80} at offset {member.offset} has {member.nbytes} bytes, its description "
                f"says {nbytes}"
            )
        places.append((0, member.offset + member.nbytes - nbytes))
    return described, places
