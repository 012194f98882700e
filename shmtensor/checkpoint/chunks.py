"""A layout cut into chunks: consecutive runs of one file, each of which fills a slot.

    file     |-header-|---- region 2 ----|-- region 0 --|pad|------ region 1 ------|
    chunks   |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|- 5 -|        offsets: multiples of the size

Trainer and writing process cut the same layout in the same way, so that the number of a chunk says all about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .formats import Layout


class Run(NamedTuple):
    """Bytes of a chunk: of a region (from `start` in it), or `data`, or zeros."""

    at: int
    nbytes: int
    region: int
    start: int
    data: bytes | None


class Chunk:
    """One slot's worth of one file. `index` counts over all files."""

    __slots__ = ("file", "index", "nbytes", "offset", "runs")

    def __init__(self, index: int, file: int, offset: int) -> None:
        self.index, self.file, self.offset, self.nbytes = index, file, offset, 0
        self.runs: list[Run] = []


def cut(layout: Layout, size: int) -> list[Chunk]:
    """All chunks of a layout, `size` bytes each but for the last one of a file; a multiple of the page size."""
    chunks: list[Chunk] = []
    for file in range(len(layout.files)):
        chunks += _cut_file(layout, file, size, len(chunks))
    return chunks


def _cut_file(layout: Layout, file: int, size: int, first: int) -> Iterator[Chunk]:
    chunk = Chunk(first, file, 0)
    for piece in layout.pieces(file):
        done = 0
        while done < piece.nbytes:
            if chunk.nbytes == size:
                yield chunk
                chunk = Chunk(chunk.index + 1, file, chunk.offset + size)
            count = min(piece.nbytes - done, size - chunk.nbytes)
            data = None if piece.data is None else piece.data[done : done + count]
            chunk.runs.append(Run(chunk.nbytes, count, piece.region, piece.start + done, data))
            chunk.nbytes += count
            done += count
    if chunk.nbytes:
        yield chunk
