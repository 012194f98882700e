"""The manifest of a multi-rank checkpoint, `shmtensor.ranks.json`: which file has the part of which rank.

| key | value |
|---|---|
| `version` | 1 |
| `world_size` | number of parts |
| `step` | of the checkpoint |
| `metrics`, `alias` | what `save` was given |
| `parts` | per rank `[file, bytes, digest]`, in the order of the ranks |
| `others` | if there are any: files for other programs, `[file, bytes, digest]` each |

Each part is a checkpoint file of its own. Readers see one checkpoint: a dict of the ranks' states by rank, in which a
tensor's name begins with the rank: `3.model.weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..errors import CheckpointError
from . import index
from .description import digest, text
from .formats.distcp import MAX_METADATA, METADATA
from .json_pieces import JsonPieces
from .locations import Location, is_shortage, read_regular
from .remote import is_outage

MANIFEST: Final = "shmtensor.ranks.json"
MAX_RANKS: Final = 1 << 16
_MAX_BYTES: Final = 16 << 20
_MOST_OTHERS: Final = 16
_VERSION: Final = 1
_PART: Final = re.compile(r"rank-(\d{5})(?:\.[a-z]{1,20}){1,2}")


@dataclass(frozen=True)
class Part:
    """One rank's file: its name, bytes, and the digest over those of its tensors."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `shmtensor.ranks.json`."""

    step: int
    metrics: dict[str, float]
    alias: str
    parts: tuple[Part, ...]
    others: tuple[Part, ...] = ()
    """Files that this library does not read: `.metadata` (`formats.distcp`). Their digests are of all bytes."""

    def render(self) -> bytes:
        """The bytes of the file."""
        return json.dumps(
            {
                "version": _VERSION, "world_size": len(self.parts), "step": self.step,
                "metrics": index.json_metrics(self.metrics), "alias": self.alias,
                "parts": [[part.file, part.nbytes, part.digest] for part in self.parts],
                **({"others": [[part.file, part.nbytes, part.digest] for part in self.others]} if self.others else {}),
            }
        ).encode()  # fmt: skip


def part_name(rank: int, suffix: str) -> str:
    """The name of a rank's file in the directory of a checkpoint."""
    return f"rank-{rank:05d}{suffix}"


def read(directory: Location) -> Manifest:
    """The manifest of a directory. Raises `FileNotFoundError`, `CheckpointError` if it is invalid."""
    path = directory / MANIFEST
    try:
        return _parse(read_regular(path, _MAX_BYTES), str(path))
    except FileNotFoundError:
        raise
    except index.UNREADABLE as error:
        if is_outage(path, error) or is_shortage(error):
            raise
        raise CheckpointError(f"{path} is no manifest of the ranks' parts: {error}") from None


class _Bytes(NamedTuple):
    data: bytes

    def pread(self, nbytes: int, offset: int) -> bytes:
        return self.data[offset : offset + nbytes]


def _parse(data: bytes, label: str) -> Manifest:
    pieces = JsonPieces(_Bytes(data), 0, len(data), label)
    found: dict[str, Any] = {}
    made: list[Part] = []
    others: list[Part] = []
    seen: set[str] = set()
    for key in pieces.entries():
        if key in seen:
            raise ValueError(f"it has the key {key!r:.40} twice")
        seen.add(key)
        if key == "parts":
            made = list(_parts(pieces, MAX_RANKS, _is_part))
        elif key == "others":
            others = list(_parts(pieces, _MOST_OTHERS, lambda _, part: part.file == METADATA))
        elif key in ("version", "world_size", "step", "metrics", "alias"):
            found[key] = pieces.value()
        else:
            pieces.skip()
    pieces.finish()
    if found["version"] != _VERSION:
        raise ValueError(f"it has version {found['version']!r:.20}, this library reads {_VERSION}")
    if not made or found["world_size"] != len(made):
        raise ValueError(f"it says {found['world_size']!r:.40} ranks, and has other parts")
    if any(other.nbytes > MAX_METADATA for other in others):
        raise ValueError(f"its other files have more than {MAX_METADATA} bytes")
    step, alias = found["step"], found["alias"]
    if type(step) is not int or not 0 <= step < 1 << 62 or (alias != "" and not index.is_file_name(alias)):
        raise ValueError(f"its step is {step!r:.40} and its alias {alias!r:.40}")
    return Manifest(step, index.metrics_of(found["metrics"]), alias, tuple(made), tuple(others))


def _parts(pieces: JsonPieces, most: int, is_one: Callable[[int, Part], bool]) -> Iterator[Part]:
    """The files of an array, one after the other: more than there may be, or what is none, takes no memory."""
    for number, _ in enumerate(pieces.items()):
        each = pieces.value()
        match each:
            case [str() as file, int() as nbytes, str() as checksum] if number < most and len(checksum) <= 64:
                part = Part(file, nbytes, checksum)
                if 0 <= nbytes < 1 << 62 and is_one(number, part):
                    yield part
                    continue
        raise ValueError(f"its part {number} is {each!r:.80}, at most {most} are allowed")


def _is_part(rank: int, part: Part) -> bool:
    named = _PART.fullmatch(part.file)
    return named is not None and int(named[1]) == rank


def check_others(directory: Location) -> None:
    """Compare the files for other programs with their digests; `CheckpointError` names one that is damaged."""
    for other in read(directory).others:
        path = directory / other.file
        try:
            found = read_regular(path, MAX_METADATA)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}, and {MANIFEST} names it: DCP's own reader needs it") from None
        if text(digest(found)) != other.digest:
            raise CheckpointError(f"{path} is damaged: it does not have the digest {other.digest!r:.20}")
