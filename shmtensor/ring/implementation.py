"""Choose the receiving end: the compiled one, or the reference if nothing was compiled, and for device memory."""

from __future__ import annotations

from typing import Any

from .. import native
from .broadcast import BroadcastReader, LatestReader
from .competing import CompetingReader, GroupReader
from .reader import ALL, COMPETING, GROUP, LATEST, Reader, Reception, ReferenceReader
from .reader import Counts as Counts
from .reader import Received as Received
from .sequence_table import SequenceTable

if native.module is not None:
    from .compiled import CompiledReader

    Counts = native.module.Counts  # type: ignore[misc]
    Received = native.module.Received  # type: ignore[misc]


_REFERENCES: dict[int, type[ReferenceReader]] = {
    ALL: BroadcastReader, LATEST: LatestReader, COMPETING: CompetingReader, GROUP: GroupReader,
}  # fmt: skip


def make_reader(reception: Reception, sequences: SequenceTable, *args: Any) -> Reader:
    """The reader of a receiver for a new sender; `args` are the rest of those of `Reader`."""
    if native.module is not None and reception.codec is not None and not sequences.device:
        return CompiledReader(reception, sequences, *args)
    return _REFERENCES[reception.mode](reception, sequences, *args)
