"""Checkpoints of several files: the index of a directory, and shards that belong together (`-00001-of-00003`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import CheckpointError
from ..json_pieces import JsonPieces
from ..limits import MAX_TENSORS
from ..locations import Location, open_input

INDEX: Final = "model.safetensors.index.json"
MAX_SHARDS: Final = 99_999
MAX_INDEX: Final = 200_000_000  # bytes

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


def check_shard_names(index: Location, names: Sequence[str]) -> list[Location]:
    """The files that an index names. `CheckpointError` if one is not beside the index, or missing."""
    for name in names:
        if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{index} names the shard {name!r:.80}, which is not beside it")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{index} names {len(missing)} shards that are missing: {missing[0]}")
    return files
