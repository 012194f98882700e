"""What writers of a directory still hold in shared memory, seen from outside: to go on after a trainer's crash.

Never joins, never locks, never stores a word. A slot may be given back and used again while it is copied; its record's
`seq` tells: whoever uses a slot again clears it before the first byte changes. So every `seq` is read again after the
copy, and what was copied counts only if all of them still stand.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..channel.control import CAPACITY
from ..channel.names import ledger_name, parse_file, ring_name
from ..errors import ArgumentError, CheckpointError, ResourceError, WireError
from ..memory import segment as shm
from ..memory.words import settle
from ..ring.competing import CompetingFeed, state_word
from ..ring.feed import COMPETING, Reception
from ..ring.layout import DONE, R_RECORDS, RECORD_WORDS, WORK_QUEUE
from ..ring.ledger import Ledger
from ..ring.ring import Ring
from ..views.implementation import decode
from ..views.numpy import Array
from .chunks import Chunk, cut
from .formats import get_format
from .names import channels_of, check_source
from .plan import Plan
from .reading import private
from .resolving import LATEST, open_path
from .slots import CHUNK, END, HEAD

_NO_WORDS = memoryview(bytes(8)).cast("Q")


class _Place(NamedTuple):
    """A message in a slot, as long as `seq` stands in its record."""

    ring: Ring
    slot: int
    seq: int
    offset: int
    nbytes: int

    @property
    def stands(self) -> bool:
        settle()  # what was read of the slot was read before
        return bool(self.ring.words[R_RECORDS + self.slot * RECORD_WORDS] == self.seq)

    @property
    def is_done(self) -> bool:
        """Whether the writing process has finished with it."""
        return bool(self.ring.words[state_word(self.ring, self.slot) + DONE] == self.seq)

    @property
    def bytes(self) -> Array:
        """The slot's own memory, mapped for reading only."""
        return np.ndarray((self.nbytes,), np.uint8, self.ring.buffer, self.offset)


class Staged:
    """A snapshot of which every chunk was in the slots when it was found. `plan` is what it consists of."""

    def __init__(self, directory: Path, name: str, plan: Plan, chunks: Sequence[Chunk], places: list[_Place]) -> None:
        self.directory, self.name, self.plan = directory, name, plan
        self._chunks, self._places = chunks, places

    def read(self, regions: Sequence[int]) -> dict[int, Array]:
        """A copy of some regions' bytes. `FileNotFoundError` if a slot was given back and used again meanwhile."""
        memory = {region: private(self.plan.regions[region].nbytes) for region in regions}
        for chunk, place in zip(self._chunks, self._places, strict=True):
            data = place.bytes
            for at, nbytes, region, start, _ in chunk.runs:
                if region in memory:
                    copy(memory[region][start : start + nbytes], data[at : at + nbytes])
        if not all(place.stands for place in self._places):
            raise _nothing(self.directory, f"the slots of {self.name} were given back while they were copied")
        return memory


def copy(target: Array, source: Array) -> None:
    """Copy bytes out of a slot."""
    target[:] = source


def open_staged(path: str | os.PathLike[str]) -> Staged:
    """The newest snapshot that was staged to its end and whose writing process has not finished with it.

    path: the directory of a `CheckpointWriter`, or `latest` in it. `FileNotFoundError`, which says why and what there
    is on disk, if there is none.
    """
    check_source(path)
    directory = Path(path)
    if directory.name == LATEST:
        directory = directory.parent
    if not directory.is_dir():
        raise ArgumentError(f"from_memory= takes the directory of a CheckpointWriter, {directory} is none")
    found: list[tuple[float, dict[str, Any], Staged | None]] = []
    for channel, uid in _ledgers(directory):
        with contextlib.suppress(FileNotFoundError, WireError), _feed(channel, uid) as feed:
            found += _snapshots(directory, feed)
    found.sort(key=lambda each: each[0], reverse=True)
    for _, _, staged in found:
        if staged is not None:
            return staged
    if not found:
        raise _nothing(directory, "no writing process has anything left to write")
    options = found[0][1]
    if options["streams"]:
        raise _nothing(directory, f"{options['name']} was larger than memory=, and is not in shared memory as a whole")
    raise _nothing(directory, f"{options['name']} was not copied to its end when its trainer died")


def _nothing(directory: Path, why: str) -> FileNotFoundError:
    try:
        opened = open_path(directory)
        path = opened.files[0] if len(opened.files) == 1 else opened.files[0].parent
        there = f"on disk there is {os.path.realpath(path)}: load it without from_memory="
    except (FileNotFoundError, CheckpointError):
        there = "on disk there is no complete checkpoint either"
    return FileNotFoundError(errno.ENOENT, f"no checkpoint in shared memory: {why}; {there}", str(directory))


def _ledgers(directory: Path) -> list[tuple[str, int]]:
    """(channel, uid) of every trainer of a directory that left, or has, anything of this user's in shared memory."""
    prefix = channels_of(str(directory))
    ledgers = []
    for name in shm.listing():
        channel, uid = parse_file(name) or ("", None)
        if uid is not None and channel.startswith(prefix) and f"/{name}" == ledger_name(channel, uid):
            with contextlib.suppress(OSError):
                if os.stat(f"{shm.SHM_DIR}/{name}").st_uid == os.geteuid():
                    ledgers.append((channel, uid))
    return ledgers


@contextlib.contextmanager
def _feed(channel: str, uid: int) -> Iterator[CompetingFeed]:
    """A trainer's rings, to look at. The reports' channel has such, too; nothing in there looks like a snapshot."""
    ledger = Ledger.attach(ledger_name(channel, uid), uid, CAPACITY)
    try:

        def attach(index: int) -> Ring:
            name = ring_name(channel, uid, index)
            return Ring.attach(name, uid, index, kind=WORK_QUEUE, capacity=CAPACITY, writable=False)

        yield CompetingFeed(Reception(COMPETING, _NO_WORDS), ledger, 0, 0, None, attach)
    finally:
        ledger.close()


def _snapshots(directory: Path, feed: CompetingFeed) -> Iterator[tuple[float, dict[str, Any], Staged | None]]:
    """(when it began, options, the snapshot or None if it is not complete) of all that are not finished with."""
    heads: list[tuple[dict[str, Any], bytes]] = []
    ended: set[int] = set()
    chunks: dict[int, dict[int, _Place]] = {}
    for place, meta, value in _messages(feed):
        kind, number = meta.get("k"), meta.get("n", 0)
        if kind == HEAD and not place.is_done:
            described = value.tobytes()
            if place.stands:
                heads.append((meta, described))
        elif kind == END:
            ended.add(number)
        elif kind == CHUNK:
            chunks.setdefault(number, {})[meta["i"]] = place
    for options, described in heads:
        number, there = options["n"], chunks.get(options["n"], {})
        staged = None
        if number in ended:
            plan = Plan.from_description(described)
            needed = cut(get_format(options["format"]).layout(plan, options["max_shard"]), options["chunk"])
            if len(needed) == len(there):
                places = [there[chunk.index] for chunk in needed]
                staged = Staged(directory, options["name"], plan, needed, places)
        yield options["began"], options, staged


def _messages(feed: CompetingFeed) -> Iterator[tuple[_Place, dict[str, Any], Any]]:
    """(place, meta, value) of every message whose record stands in a slot, done or not."""
    published = feed.ledger.published
    for ring in feed.rings:
        for slot in range(ring.slots):
            seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
            if not 0 < seq <= published:
                continue
            with contextlib.suppress(WireError, ResourceError):  # read while it was used again
                found = feed.read(ring, slot, seq)
                if found is None:
                    continue
                place = _Place(ring, slot, seq, found.offset, found.nbytes)
                value, meta = decode(found.description, place.bytes, readonly=True)
                if isinstance(meta, dict) and place.stands:
                    yield place, meta, value
