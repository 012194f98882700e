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

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from . import index
from .dcp_metadata import MAX_METADATA, METADATA
from .digests import digest, text
from .envelope import SealedFile
from .formats import Opened
from .formats.base import Place
from .limits import MAX_TENSORS
from .locations import Location, read_regular
from .opening import PLAIN, Opener
from .plan import Entry, Plan
from .regions import Region
from .remote import is_outage

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
    """Files that this library does not read: `.metadata` (`dcp_metadata`). Their digests are of all bytes."""

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
        if is_outage(path, error):
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


def open_part(directory: Location, rank: int, opener: Opener = PLAIN) -> Opened:
    """Open the checkpoint file of one rank. `ArgumentError` if there is no such rank."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ArgumentTypeError(f"rank must be an int, not {type(rank).__name__}")
    manifest = read(directory)
    if not 0 <= rank < len(manifest.parts):
        raise ArgumentError(f"rank={rank}: {directory} has the parts of {len(manifest.parts)} ranks, from 0 on")
    return _open(directory, manifest.parts[rank], opener)


def _open(directory: Location, part: Part, opener: Opener) -> Opened:
    path = directory / part.file
    if not path.is_file():
        raise CheckpointError(f"{directory}: {part.file} is missing, which its manifest names")
    opened = opener.open(path)
    if opened.locked:
        return opened
    if opened.state is not None or opened.places is None:
        raise CheckpointError(f"{path} was written by another program")
    if sum(opened.sizes) != part.nbytes:
        raise CheckpointError(f"{path} has {sum(opened.sizes)} bytes, {part.nbytes} were written")
    return opened


def open_ranks(directory: Location, opener: Opener = PLAIN) -> Opened:
    """Open all parts as one checkpoint."""
    manifest = read(directory)
    tree: list[Any] = []
    tensors: list[Entry] = []
    regions: list[Region] = []
    files: list[Location] = []
    sizes: list[int] = []
    places: list[Place] = []
    digests: list[int] | None = []
    sealed: list[SealedFile | None] = []
    locked = False
    for rank, part in enumerate(manifest.parts):
        opened = _open(directory, part, opener)
        plan = opened.plan
        if len(tensors) + len(plan.tensors) > MAX_TENSORS:
            raise CheckpointError(f"{directory} has more than {MAX_TENSORS} tensors: read its parts, with rank=")
        try:
            tree.append([["i", hex(rank)], _shifted(plan.tree, len(tensors), len(plan.tensors))])
        except RecursionError:
            raise CheckpointError(f"{opened.files[0]}: invalid structure: it is too deep") from None
        tensors += [
            entry._replace(name=f"{rank}.{entry.name}", region=entry.region + len(regions) if entry.region >= 0 else -1)
            for entry in plan.tensors
        ]
        regions += plan.regions
        places += [(file + len(files), offset) for file, offset in opened.places or ()]
        digests = None if digests is None or opened.digests is None else digests + opened.digests
        sealed += opened.sealed or [None] * len(opened.files)
        locked = locked or opened.locked
        files += opened.files
        sizes += opened.sizes
    rest = [path for other in manifest.others if (path := directory / other.file).is_file()]
    rest.append(directory / MANIFEST)
    meta = plan.meta if len(manifest.parts) == 1 else None
    made = Plan({"k": tree}, tensors, regions, meta)
    return Opened(
        opened.format, made, [*files, *rest], [*sizes, *(path.stat().st_size for path in rest)],
        None if locked else places, digests, native=True, sealed=[*sealed, *[None] * len(rest)], locked=locked,
    )  # fmt: skip


def _shifted(node: Any, by: int, count: int) -> Any:
    """A tree of `count` tensors with `by` added to their numbers; an invalid number becomes -1."""
    if isinstance(node, list):
        return [_shifted(each, by, count) for each in node]
    if not isinstance(node, dict):
        return node

    def number(found: Any) -> Any:
        return found if type(found) is not int else found + by if 0 <= found < count else -1

    made: dict[str, Any] = {}
    for tag, body in node.items():
        if tag in ("x", "B"):
            made[tag] = number(body)
        elif tag == "z" and isinstance(body, list) and len(body) == 4 and isinstance(body[3], list):
            made[tag] = [*body[:3], [number(each) for each in body[3]]]
        elif tag == "d" and isinstance(body, dict):
            made[tag] = {key: _shifted(each, by, count) for key, each in body.items()}
        else:
            made[tag] = _shifted(body, by, count) if tag in ("k", "o", "c", "t", "m", "a", "e", "E") else body
    return made
