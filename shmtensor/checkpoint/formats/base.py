"""The interface of a format: where the regions of a plan are in files, and the other bytes of the files.

    Format.layout(plan) -> Layout       for writing: sizes and places first, digests last
    Format.open(path)   -> Opened       for reading: places and digests, checked against the sizes of the files

A writer writes each file of a layout piece after piece (`Layout.pieces`), and computes the digest of each region on the
way; `Layout.finish` then returns the bytes that remain to be written, at places and of sizes that do not depend on the
digests. A format is one module with a subclass of `Format`, listed in `shmtensor.checkpoint.formats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..locations import Location
from ..plan import Plan

if TYPE_CHECKING:
    from ..envelope import SealedFile

Place = tuple[int, int]  # (file, offset)
Write = tuple[int, int, bytes]  # (file, offset, bytes)


class FileSpec(NamedTuple):
    """One file of a layout: its name inside the checkpoint's directory ("" for the only file), and its size."""

    name: str
    nbytes: int


class Piece(NamedTuple):
    """A run of bytes of one file: of a region (from `start` in it), or `data`, or zeros until `finish`.

    offset: from the start of the file
    region: index, or -1
    """

    offset: int
    nbytes: int
    region: int
    start: int
    data: bytes | None


class Layout:
    """Where everything is in the files.

    single:    one file (`<name>.<suffix>`); else the files of a directory `<name>/`
    files:     their names and exact sizes
    places:    per region (file, offset); regions never overlap, and lie in one file each
    fill:      bytes that are known beforehand
    needs_crc: whether `finish` needs the CRC-32 of each region as well
    holds:     `holds(description)`: whether another plan with this description, of the same tensors and regions, has
               the same files and places (`finish` is always this plan's). None: no other has
    """

    def __init__(
        self,
        files: Sequence[FileSpec],
        places: Sequence[Place],
        sizes: Sequence[int],
        fill: Sequence[Write],
        finish: Callable[[Sequence[int], Sequence[int]], list[Write]],
        *,
        needs_crc: bool = False,
        holds: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.files = list(files)
        self.places = list(places)
        self.fill = list(fill)
        self.needs_crc = needs_crc
        self.holds = holds
        self._sizes = list(sizes)
        self._finish = finish

    @property
    def single(self) -> bool:
        """Whether the checkpoint is one file."""
        return len(self.files) == 1 and not self.files[0].name

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def pieces(self, file: int) -> Iterator[Piece]:
        """The bytes of one file, in order and without gaps."""
        parts = [
            Piece(offset, self._sizes[region], region, 0, None)
            for region, (where, offset) in enumerate(self.places)
            if where == file
        ]
        parts += [Piece(offset, len(data), -1, 0, data) for where, offset, data in self.fill if where == file]
        parts.sort()
        at = 0
        for piece in [*parts, Piece(self.files[file].nbytes, 0, -1, 0, b"")]:
            if piece.offset > at:
                yield Piece(at, piece.offset - at, -1, 0, None)
            if piece.nbytes:
                yield piece
            at = piece.offset + piece.nbytes

    def finish(self, digests: Sequence[int], crcs: Sequence[int] = ()) -> list[Write]:
        """The last writes, (file, offset, bytes): headers and tables with the regions' digests and CRCs."""
        return self._finish(digests, crcs)


class Stored(NamedTuple):
    """The place of a region that a file has unpacked.

    strides: bytes, of the region's only tensor, if the file has it in another order than the plan; else None
    """

    file: int
    offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Opened:
    """A checkpoint on disk.

    format:  name of the format
    made:    its plan, or a function that makes it; its regions have bytes only if `places` is None
    files:   paths
    sizes:   bytes of each file
    places:  per region (file, offset), inside the files; None: read by the format's own library, into memory
    digests: per region, None if the file has none
    native:  written by this library, so that the state is restored; else a flat dict, or what the file has
    state:   `state(map)`: the state as the format's own library loads it; None: it is built from the plan
    parts:   if `places` is None: per region where a part of it can be read all the same, or None
    sealed:  per file how to decrypt it, None for a plain one; empty if all are plain
    locked:  it is encrypted and was opened without a key: the plan has the readable names, and no structure
    shown:   the path to show, if `files` are others
    keeps:   what must live as long as this
    decrypted: `files` are decrypted copies in memory
    """

    format: str
    made: Plan | Callable[[], Plan]
    files: list[Location]
    sizes: list[int]
    places: list[Place] | None
    digests: list[int] | None
    native: bool
    state: Callable[[bool], Any] | None = None
    parts: list[Stored | None] | None = None
    sealed: Sequence[SealedFile | None] = ()
    locked: bool = False
    shown: Location | None = None
    keeps: Any = None
    decrypted: bool = False

    @property
    def encrypted(self) -> bool:
        """Whether it is encrypted on disk."""
        return self.locked or self.decrypted or any(self.sealed)

    @property
    def mappable(self) -> bool:
        """Whether its bytes can be mapped: they are plain, in files of this machine."""
        return not self.encrypted and all(isinstance(file, Path) for file in self.files)

    @property
    def main(self) -> Location:
        """Path of its file, or of the directory of its files."""
        if self.shown is not None:
            return self.shown
        return self.files[0] if len(self.files) == 1 else self.files[0].parent

    @property
    def stored(self) -> list[Stored | None]:
        """The place of each region in the files; None if it can only be read whole."""
        if self.places is not None:
            return [Stored(file, offset) for file, offset in self.places]
        return self.parts or [None] * len(self.plan.regions)

    @cached_property
    def plan(self) -> Plan:
        """Its contents. Raises `CheckpointError` for a state of another program that a plan cannot describe."""
        return self.made if isinstance(self.made, Plan) else self.made()


class Format(ABC):
    """One kind of file.

    name:   what `format=` calls it
    suffix: of a single file, with its dot
    """

    name: str
    suffix: str

    @abstractmethod
    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        """Lay out the plan's regions. With `max_shard` (bytes), in several files of about at most that size.

        The plan may have come as a description. Raises `ArgumentError` if the format has no shards, or cannot hold
        the plan.
        """

    @abstractmethod
    def recognizes(self, path: Location, start: bytes) -> bool:
        """Whether a path (a directory, or a file that begins with these up to 16 bytes) looks like this format."""

    @abstractmethod
    def open(self, path: Location) -> Opened:
        """Read the description of a checkpoint, not its tensors. Raises `CheckpointError` if it is invalid."""


def align(value: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-value // to) * to
