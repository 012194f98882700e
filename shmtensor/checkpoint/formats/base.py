"""The interface of a format: where the regions of a plan are in files, and the other bytes of the files.

    Format.layout(plan) -> Layout       for writing: sizes and places first, digests last
    Format.open(path)   -> Opened       for reading: places and digests, checked against the sizes of the files

A writer writes each file of a layout piece after piece (`Layout.pieces`), and computes the digest of each region on the
way; `Layout.finish` then returns the bytes that remain to be written, at places and of sizes that do not depend on the
digests. A format is one module with a subclass of `Format`, listed in `shmtensor.checkpoint.formats`.

Formats of several files share the index of a directory, and shards that belong together (`-00001-of-00003`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...errors import CheckpointError
from ..json_pieces import JsonPieces
from ..locations import Location, Stamp, open_input
from ..plan import Plan
from ..structure import MAX_TENSORS

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
    stamps:  of each file, taken when its description was read
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
    stamps: list[Stamp]
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
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        return [stamp.nbytes for stamp in self.stamps]

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

    def describes(self, path: Location) -> bool:
        """Whether a file of this format has the description of a whole checkpoint, so that it is no shard of another
        one, whatever its name is. Raises `CheckpointError` if it is invalid."""
        return False

    @abstractmethod
    def open(self, path: Location) -> Opened:
        """Read the description of a checkpoint, not its tensors. Raises `CheckpointError` if it is invalid."""


def check_apart(path: Location, plan: Plan, places: Sequence[Place]) -> None:
    """`CheckpointError` if regions of a file overlap: together they would be larger than it."""
    before, end = -1, 0
    for region in sorted(range(len(places)), key=places.__getitem__):
        file, offset = places[region]
        if file == before and offset < end:
            raise CheckpointError(f"{path}: two of its regions are at offset {offset}: it is damaged")
        before, end = file, offset + plan.regions[region].nbytes


def align(value: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-value // to) * to


INDEX: Final = "model.safetensors.index.json"
MAX_SHARDS: Final = 99_999
MAX_INDEX: Final = 200_000_000  # bytes
_LONGEST_NAME: Final = 255  # bytes, of any file system

# "model.safetensors.index.json"; with the name of a variant "model.fp16.safetensors.index.json" or
# "model.safetensors.index.fp16.json"; of torch's own pickles "pytorch_model.bin.index.json"
_INDEX = re.compile(r"[^.].*\.(?:safetensors|bin|pt|pth)\.index(?P<variant>(?:\.[^.]+)*)\.json")
_SHARD = re.compile(r"(?P<stem>[^.].*)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<rest>(?:\.[^.]+)*\.[A-Za-z0-9]+)")
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")


class Shard(NamedTuple):
    """The parts of a shard's name: it is number `number` of `total` files with the same stem, total and rest."""

    stem: str
    number: int
    total: str
    rest: str

    @property
    def group(self) -> tuple[str, str, str]:
        return self.stem, self.total, self.rest


def is_index(name: str) -> bool:
    """Whether this is the name of an index of shards."""
    return _INDEX.fullmatch(name) is not None


def shard_of(name: str) -> Shard | None:
    """The parts of a shard's name; None if it is no shard."""
    match = _SHARD.fullmatch(name)
    if match is None or not match["rest"].endswith(_SUFFIXES):
        return None
    return Shard(match["stem"], int(match["number"]), match["count"], match["rest"])


def find_index(directory: Location) -> Location | None:
    """The index of a directory; of several, `model.safetensors.index.json`, or else the only one without a variant and
    of safetensors. `CheckpointError` if it is ambiguous."""
    found = sorted(path for path in directory.iterdir() if is_index(path.name) and path.is_file())
    if (directory / INDEX) in found:
        return directory / INDEX
    for rule in (_is_of_safetensors, _is_plain):
        found = [path for path in found if rule(path.name)] or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise CheckpointError(f"{directory} has {len(found)} indexes of shards ({names}): name the one that is meant")
    return found[0] if found else None


def _is_of_safetensors(name: str) -> bool:
    return ".safetensors.index" in name


def _is_plain(name: str) -> bool:
    """Whether no variant is in the name: `model.fp16.safetensors.index.json` has one before, others after "index"."""
    match = _INDEX.fullmatch(name)
    return match is not None and not match["variant"] and name.count(".") == 3


def find_groups(names: Iterable[str]) -> dict[tuple[str, str, str], list[str]]:
    """The shards among some names, grouped, each group in the order of its numbers."""
    groups: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for name in names:
        shard = shard_of(name)
        if shard is not None:
            groups.setdefault(shard.group, []).append((shard.number, name))
    return {group: [name for _, name in sorted(found)] for group, found in groups.items()}


def all_of(path: Location) -> list[Location]:
    """Every file of the checkpoint that a shard belongs to, in order. `CheckpointError` names what is missing."""
    shard = shard_of(path.name)
    if shard is None:
        return [path]
    count = int(shard.total)
    if not 1 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{path} is named as one of {count} shards: at most {MAX_SHARDS} are allowed")
    there = find_groups(each.name for each in path.parent.iterdir()).get(shard.group, [])
    numbers = {found.number for name in there if (found := shard_of(name)) is not None}
    missing = [number for number in range(1, count + 1) if number not in numbers]
    if missing:
        width = len(shard.total)
        first = f"{shard.stem}-{missing[0]:0{width}}-of-{shard.total}{shard.rest}"
        raise CheckpointError(
            f"{path} is one of {count} shards, and {len(missing)} of them are missing: {first}"
            f"{' and others' if len(missing) > 1 else ''}"
        )
    files = [path.parent / name for name in there]
    if len(files) != count:  # "a-0001-of-0002" and "a-00001-of-0002", or a number 0
        raise CheckpointError(f"{path} is one of {count} shards, and {len(files)} files are named so")
    return files


def read_index(index: Location, metadata: Callable[[JsonPieces], object] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the names in an index's `weight_map`, and the file of each.

    `metadata` is called for any other object in the index, wherever it is: if a description were overlooked, the state
    would be loaded as a flat dict. `CheckpointError` for what is no index.
    """
    with open_input(index) as file:
        size = file.nbytes
        if size > MAX_INDEX:
            raise CheckpointError(f"{index} has more than {MAX_INDEX} bytes")
        pieces = JsonPieces(file, 0, size, str(index))
        met = 0
        for key in pieces.entries():
            if key != "weight_map":
                pieces.skip() if metadata is None or pieces.peek() != "{" else metadata(pieces)
                continue
            met += 1
            if met > 1 or pieces.peek() != "{":
                raise CheckpointError(f"{index} has no weight_map of names")
            for count, name in enumerate(pieces.entries()):
                where = pieces.value() if pieces.peek() == '"' else None
                if not isinstance(where, str):
                    raise CheckpointError(f"{index} has no weight_map of names")
                if count >= MAX_TENSORS:
                    raise CheckpointError(f"{index} names more than {MAX_TENSORS} tensors")
                yield name, where
        pieces.finish()
    if not met:
        raise CheckpointError(f"{index} has no weight_map of names")


def shard_names(index: Location) -> list[str]:
    """The files that an index names, in order."""
    names: set[str] = set()
    for _, name in read_index(index):
        names.add(name)
        if len(names) > MAX_SHARDS:
            raise CheckpointError(f"{index} names more than {MAX_SHARDS} shards")
    return sorted(names)


def is_beside(name: str) -> bool:
    """Whether this is a name that a file of the same directory can have."""
    try:
        room = len(name.encode("utf-8", "surrogateescape")) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False
    return room and name == Path(name).name and name not in ("", ".", "..") and "\0" not in name


def check_shard_names(index: Location, names: Sequence[str]) -> list[Location]:
    """The files that an index names. `CheckpointError` if one is not beside the index, or missing."""
    for name in names:
        if not is_beside(name):
            raise CheckpointError(f"{index} names the shard {name!r:.80}, which is not beside it")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{index} names {len(missing)} shards that are missing: {missing[0]}")
    return files
