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
from dataclasses import dataclass
from typing import Any, Final

from ..errors import CheckpointError
from . import index
from .description import digest, text
from .formats.distcp import MAX_METADATA, METADATA
from .locations import Location, read_regular
from .remote import is_outage
from .stamps import is_shortage

MANIFEST: Final = "shmtensor.ranks.json"
MAX_RANKS: Final = 1 << 16
_MAX_BYTES: Final = 16 << 20
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
        return _parse(json.loads(read_regular(path, _MAX_BYTES)))
    except FileNotFoundError:
        raise
    except index.UNREADABLE as error:
        if is_outage(path, error) or is_shortage(error):
            raise
        raise CheckpointError(f"{path} is no manifest of the ranks' parts: {error}") from None


def _parse(found: Any) -> Manifest:
    if found["version"] != _VERSION:
        raise ValueError(f"it has version {found['version']!r:.20}, this library reads {_VERSION}")
    parts = found["parts"]
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_RANKS or found["world_size"] != len(parts):
        raise ValueError(f"it says {found['world_size']!r:.40} ranks, and has other parts")
    made = []
    for rank, each in enumerate(parts):
        match each:
            case [str() as file, int() as nbytes, str() as checksum] if named := _PART.fullmatch(file):
                if int(named[1]) == rank and 0 <= nbytes < 1 << 62 and len(checksum) <= 64:
                    made.append(Part(file, nbytes, checksum))
                    continue
        raise ValueError(f"its part {rank} is {each!r:.80}")
    others = []
    for each in found.get("others", []):
        match each:
            case [str() as file, int() as nbytes, str() as checksum] if file == METADATA and nbytes <= MAX_METADATA:
                others.append(Part(file, nbytes, checksum))
                continue
        raise ValueError(f"its other file is {each!r:.80}")
    step, alias = found["step"], found["alias"]
    if type(step) is not int or not 0 <= step < 1 << 62 or (alias != "" and not index.is_file_name(alias)):
        raise ValueError(f"its step is {step!r:.40} and its alias {alias!r:.40}")
    return Manifest(step, index.metrics_of(found["metrics"]), alias, tuple(made), tuple(others))


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
