"""Digests: xxh3 of 64 bits, of each region of a checkpoint and of its description.

They find damage (a flipped bit, a lost page, a mixed-up shard); they do not prove who wrote a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import xxhash

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
