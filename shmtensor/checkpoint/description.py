"""The description in a checkpoint, the same in every format: the plan, the names of its regions, the digests.

Digests are xxh3 of 64 bits, of each region of a checkpoint and of its description.

They find damage (a flipped bit, a lost page, a mixed-up shard); they do not prove who wrote a file.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from ..errors import CheckpointError
from .json_pieces import parse_object
from .plan import MAX_DESCRIPTION, Plan

_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Described:
    """The description of a plan that is being written. Its size does not depend on the digests.

    more: further keys, JSON, of the format
    """

    def __init__(self, plan: bytes, stored: Sequence[str], **more: Any) -> None:
        others = "".join([f'"{key}":{_encode_json(value)},' for key, value in more.items()])
        self._start = f'{{"plan":{plan.decode("ascii")},"stored":{_encode_json(stored)},{others}"xxh3":"'
        self._regions = len(stored)

    def text(self, digests: Sequence[int] | None) -> tuple[str, str]:
        """The text and its own digest. Without digests it has zeros, to know the size."""
        if digests is None:
            digests = [0] * self._regions
        whole = f'{self._start}{"".join(map(text, digests))}"}}'
        return whole, text(digest(whole.encode("ascii")))

    def file(self, digests: Sequence[int] | None) -> bytes:
        """The same as one file: the digest, a newline, the text."""
        whole, checksum = self.text(digests)
        return f"{checksum}\n{whole}".encode("ascii")


class ReadDescription(NamedTuple):
    """A description that was read. `stored` has the name of each region in the format."""

    plan: Plan
    stored: list[str]
    digests: list[int]


def read_described(data: Any, checksum: Any, label: str) -> ReadDescription:
    """Read a description. `CheckpointError` if it is invalid, or does not have its digest."""
    if not isinstance(data, str) or not data.isascii():
        raise CheckpointError(f"{label}: its description is no ASCII text")
    if text(digest(data.encode("ascii"))) != checksum:
        raise CheckpointError(f"{label}: its description is damaged: it does not have the digest {checksum!r:.20}")
    if len(data) > 3 * MAX_DESCRIPTION:
        raise CheckpointError(f"{label}: its description has {len(data)} bytes")
    parts = parse_object(data.encode("ascii"), label)
    stored, sums = parts.get("stored"), parts.get("xxh3")
    if not isinstance(stored, list) or not all(isinstance(name, str) for name in stored):
        raise CheckpointError(f"{label}: its description does not say where the regions are")
    if not isinstance(sums, str) or not re.fullmatch(r"([0-9a-f]{16})*", sums) or len(sums) != 16 * len(stored):
        raise CheckpointError(f"{label}: its description has no digests")
    if len(set(stored)) != len(stored):
        raise CheckpointError(f"{label}: two regions are stored under one name")
    plan = Plan.from_parts(parts.get("plan"))
    if len(plan.regions) != len(stored):
        raise CheckpointError(f"{label}: {len(plan.regions)} regions, {len(stored)} are stored")
    return ReadDescription(plan, stored, [int(sums[at : at + 16], 16) for at in range(0, len(sums), 16)])


def read_described_file(data: bytes, label: str) -> ReadDescription:
    """Read a file that `Described.file` made."""
    checksum, _, rest = data.partition(b"\n")
    try:
        return read_described(rest.decode("ascii"), checksum.decode("ascii"), label)
    except UnicodeDecodeError:
        raise CheckpointError(f"{label}: its description is no ASCII text") from None


Buffer = Any
_ONE_PIECE = 1 << 20  # bytes that stay in the cache between digest and CRC


class Summer:
    """Digest, and CRC-32 if a format needs it, of one region whose pieces come in order.

    >>> summer = Summer(crc=True)
    >>> summer.update(b"abc"); summer.update(b"def")
    >>> summer.digest == digest(b"abcdef"), hex(summer.crc)
    (True, '0x4b8e39ef')
    """

    __slots__ = ("_crc", "_hash", "crc")

    def __init__(self, *, crc: bool = False) -> None:
        self._hash = xxhash.xxh3_64()
        self._crc = crc
        self.crc = 0

    def update(self, piece: Buffer) -> None:
        """Add the next bytes; the GIL is released for large ones."""
        if not self._crc:
            self._hash.update(piece)
            return
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), _ONE_PIECE):
            part = view[at : at + _ONE_PIECE]
            self._hash.update(part)
            self.crc = zlib.crc32(part, self.crc)

    @property
    def digest(self) -> int:
        """The digest of all bytes so far."""
        return int(self._hash.intdigest())


def digest(data: Buffer) -> int:
    """The digest of some bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


def text(value: int) -> str:
    """A digest as text: always 16 hex digits, so that a header's size is known beforehand."""
    return f"{value:016x}"


def combine(digests: Sequence[int]) -> str:
    """The digest of a whole checkpoint, from those of its regions in order."""
    return text(digest(struct.pack(f"<{len(digests)}Q", *digests)))
