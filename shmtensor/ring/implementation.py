"""Choose the receiving end: the compiled one, or the reference if nothing was compiled, and for device memory."""

from __future__ import annotations

from typing import Any

from .. import native
from .broadcast import BroadcastReader, LatestReader
from .competing import CompetingReader
from .reader import COMPETING, LATEST, Reader, Reception
from .reader import Counts as Counts
from .reader import Received as Received
from .sequence_table import SequenceTable

if native.module is not None:
    from .compiled import CompiledReader

    Counts = native.module.Counts  # type: ignore[misc]
    Received = native.module.Received  # type: ignore[misc]


def make_reader(reception: Reception, sequences: SequenceTable, *args: Any) -> Reader:
    """The reader of a receiver for a new sender; `args` are the rest of those of `Reader`."""
    if native.module is not None and reception.codec is not None and not sequences.device:
        return CompiledReader(reception, sequences, *args)
    if reception.mode == COMPETING:
        return CompetingReader(reception, sequences, *args)
    return (LatestReader if reception.mode == LATEST else BroadcastReader)(reception, sequences, *args)
