"""Snapshots in shared memory that are not on disk yet, read from outside: to continue after a trainer's crash.

It never joins a channel, locks or writes. A slot may be released and reused while it is copied; the `seq` of its
descriptor is cleared before the first byte changes. So every `seq` is read again after the copy, which counts only if
none has changed.
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
from ..channel.names import parse_file, ring_name, sequence_table_name
from ..codec.implementation import decode
from ..codec.numpy import Array
from ..errors import ArgumentError, CheckpointError, ResourceError, WireError
from ..memory import segment as shm
from ..memory.words import acquire_fence
from ..ring.layout import DONE, R_RECORDS, RECORD_WORDS, WORK_QUEUE, state_word
from ..ring.reader import COMPETING, Reception
from ..ring.reference import CompetingReader
from ..ring.ring import Ring, SequenceTable
from .formats import get_format
from .index import LATEST
from .names import channels_of, check_local
from .opening import Opener, open_path
from .plan import Plan
from .reading import private
from .slots import CHUNK, END, HEAD, Chunk, cut

_NO_WORDS = memoryview(bytes(8)).cast("Q")


class _SlotMessage(NamedTuple):
    """A message in a slot, as long as the slot's descriptor has this `seq`."""

    ring: Ring
    slot: int
    seq: int
    offset: int
    nbytes: int

    @property
    def is_unchanged(self) -> bool:
        """Whether the slot was not reused. Reads of the slot before this call are complete."""
        acquire_fence()
        return bool(self.ring.words[R_RECORDS + self.slot * RECORD_WORDS] == self.seq)

    @property
    def is_done(self) -> bool:
        """Whether the writing process has finished with it."""
        return bool(self.ring.words[state_word(self.ring, self.slot) + DONE] == self.seq)

    @property
    def bytes(self) -> Array:
        """The slot's memory, mapped read-only."""
        return np.ndarray((self.nbytes,), np.uint8, self.ring.buffer, self.offset)


class Staged:
    """A snapshot that was complete in the slots when it was found. `plan` has its contents."""

    def __init__(
        self, directory: Path, name: str, plan: Plan, chunks: Sequence[Chunk], messages: list[_SlotMessage]
    ) -> None:
        self.directory, self.name, self.plan = directory, name, plan
        self._chunks, self._slots = chunks, messages

    def read(self, regions: Sequence[int]) -> dict[int, Array]:
        """Copy the bytes of some regions. `FileNotFoundError` if a slot was reused meanwhile."""
        memory = {region: private(self.plan.regions[region].nbytes) for region in regions}
        for chunk, message in zip(self._chunks, self._slots, strict=True):
            data = message.bytes
            for at, nbytes, region, start, _ in chunk.runs:
                if region in memory:
                    copy(memory[region][start : start + nbytes], data[at : at + nbytes])
        if not all(message.is_unchanged for message in self._slots):
            raise _not_found(self.directory, f"the slots of {self.name} were given back while they were copied")
        return memory


def copy(target: Array, source: Array) -> None:
    """Copy bytes out of a slot."""
    target[:] = source


def open_staged(path: str | os.PathLike[str]) -> Staged:
    """The newest snapshot that was staged to its end and whose writing process has not finished with it.

    path: the directory of a `CheckpointWriter`, or `latest` in it. `FileNotFoundError`, which says why and what there
    is on disk, if there is none.
    """
    check_local(path, "from_memory= takes the directory of a CheckpointWriter")
    directory = Path(path)
    if directory.name == LATEST:
        directory = directory.parent
    if not directory.is_dir():
        raise ArgumentError(f"from_memory= takes the directory of a CheckpointWriter, {directory} is none")
    found: list[tuple[float, dict[str, Any], Staged | None]] = []
    for channel, uid in _sequence_tables(directory):
        with contextlib.suppress(FileNotFoundError, WireError), _reader(channel, uid) as reader:
            found += _snapshots(directory, reader)
    found.sort(key=lambda each: each[0], reverse=True)
    for _, _, staged in found:
        if staged is not None:
            return staged
    if not found:
        raise _not_found(directory, "no writing process has anything left to write")
    options = found[0][1]
    if options["streams"]:
        raise _not_found(
            directory, f"{options['name']} was larger than memory=, and is not in shared memory as a whole"
        )
    raise _not_found(directory, f"{options['name']} was not copied to its end when its trainer died")


def _not_found(directory: Path, why: str) -> FileNotFoundError:
    try:
        opened = open_path(directory, Opener(locked=True))
        there = f"on disk there is {os.path.realpath(str(opened.main))}: load it without from_memory="
    except (FileNotFoundError, CheckpointError):
        there = "on disk there is no complete checkpoint either"
    return FileNotFoundError(errno.ENOENT, f"no checkpoint in shared memory: {why}; {there}", str(directory))


def _sequence_tables(directory: Path) -> list[tuple[str, int]]:
    """(channel, uid) of every trainer of a directory, dead or alive, that has this user's shared memory."""
    prefix = channels_of(str(directory))
    sequence_tables = []
    for name in shm.listing():
        channel, uid = parse_file(name) or ("", None)
        if uid is not None and channel.startswith(prefix) and f"/{name}" == sequence_table_name(channel, uid):
            info = shm.status(f"/{name}")
            if info is not None and info.st_uid == os.geteuid():
                sequence_tables.append((channel, uid))
    return sequence_tables


@contextlib.contextmanager
def _reader(channel: str, uid: int) -> Iterator[CompetingReader]:
    """A trainer's rings, to look at. The reports' channel has such, too; nothing in there looks like a snapshot."""
    sequences = SequenceTable.attach(sequence_table_name(channel, uid), uid, CAPACITY)
    try:

        def attach(index: int) -> Ring:
            name = ring_name(channel, uid, index)
            return Ring.attach(name, uid, index, kind=WORK_QUEUE, capacity=CAPACITY, writable=False)

        yield CompetingReader(Reception(COMPETING, _NO_WORDS), sequences, 0, 0, None, attach)
    finally:
        sequences.close()


def _snapshots(directory: Path, reader: CompetingReader) -> Iterator[tuple[float, dict[str, Any], Staged | None]]:
    """(time of its beginning, options, the snapshot or None if it is incomplete) of all that are not written."""
    heads: list[tuple[dict[str, Any], bytes]] = []
    ended: set[int] = set()
    chunks: dict[int, dict[int, _SlotMessage]] = {}
    for message, meta, value in _messages(reader):
        kind, number = meta.get("k"), meta.get("n", 0)
        if kind == HEAD and not message.is_done:
            described = value.tobytes()
            if message.is_unchanged:
                heads.append((meta, described))
        elif kind == END:
            ended.add(number)
        elif kind == CHUNK:
            chunks.setdefault(number, {})[meta["i"]] = message
    for options, described in heads:
        number, there = options["n"], chunks.get(options["n"], {})
        staged = None
        if number in ended:
            plan = Plan.from_description(described)
            needed = cut(get_format(options["format"]).layout(plan, options["max_shard"]), options["chunk"])
            if len(needed) == len(there):
                messages = [there[chunk.index] for chunk in needed]
                staged = Staged(directory, options["name"], plan, needed, messages)
        yield options["began"], options, staged


def _messages(reader: CompetingReader) -> Iterator[tuple[_SlotMessage, dict[str, Any], Any]]:
    """(message, meta, value) of every message that is in a slot, done or not."""
    published = reader.sequences.published
    for ring in reader.rings:
        for slot in range(ring.slots):
            seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
            if not 0 < seq <= published:
                continue
            with contextlib.suppress(WireError, ResourceError):  # read while it was used again
                found = reader.read(ring, slot, seq)
                if found is None:
                    continue
                message = _SlotMessage(ring, slot, seq, found.offset, found.nbytes)
                value, meta = decode(found.description, message.bytes, readonly=True)
                if isinstance(meta, dict) and message.is_unchanged:
                    yield message, meta, value
