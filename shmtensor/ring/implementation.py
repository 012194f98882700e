"""Choose the receiving end: the compiled one, or the reference if nothing was compiled."""

from __future__ import annotations

from typing import Any

from .. import native
from ..errors import DependencyError, WireError
from ..memory.words import barrier
from ..wire import spec
from .reader import ALL, COMPETING, GROUP, LATEST, Reader, Reception, ReferenceReader
from .reader import Counts as Counts
from .reader import Received as Received
from .reference import BroadcastReader, CompetingReader, GroupReader, LatestReader
from .ring import Ring, SequenceTable

if native.module is not None:
    Counts = native.module.Counts  # type: ignore[misc]
    Received = native.module.Received  # type: ignore[misc]
    _Base: Any = native.module.Reader

    class CompiledReader(_Base, Reader):  # type: ignore[misc]
        """The compiled reader, for all modes: `native/reader.c` takes messages, holds them and gives them back.

        Its leases refer to it, so that it lives as long as they do.
        """

        __slots__ = Reader.SLOTS

        def __init__(self, *args: Any) -> None:
            self._set_up(*args)
            reception, sequences = self.reception, self.sequences
            super().__init__(
                codec=reception.codec, lease=native.module.Lease, message=reception.message, counts=reception.counts,
                wire_error=WireError, dependency_error=DependencyError, is_locked=reception.is_locked,
                control=reception.control, table=sequences.words, order=self.order, mask=self.mask,
                lock_fd=sequences.locks.fd, mode=reception.mode, depth=reception.depth, history=sequences.history,
                member=reception.member, recipient=reception.recipient[0], recipient_uid=reception.recipient[1],
                asleep_at=self._asleep,
                epoch_at=reception.epoch_at, shown_at=reception.shown_at, max_attempts=reception.max_attempts,
                description_version=spec.VERSION, readonly=reception.readonly,
            )  # fmt: skip
            if reception.mode == COMPETING:
                self.begin_queue()
            else:
                barrier()  # what is published from here on: its publisher has read the epoch after this receiver joined
                self.begin()

        def hold_ring(self, ring: Ring) -> None:
            self.add_ring(ring.words, ring.buffer, ring.slots, ring.slot_bytes, ring.state, ring.row, ring, self.rings)

        def drop_in_child(self) -> None:
            self.detach()

        def close(self) -> None:
            self.closing = True
            if not self.lease_count:
                self.detach()
            Reader.close(self)


_REFERENCES: dict[int, type[ReferenceReader]] = {
    ALL: BroadcastReader, LATEST: LatestReader, COMPETING: CompetingReader, GROUP: GroupReader,
}  # fmt: skip


def make_set(readers: list[Any], *, by_age: bool) -> Any:
    """The object that takes messages of these readers without the receiver's mutex (docs/internals/core.md), or None.

    `by_age`: the oldest message first. Else the readers take turns.
    """
    if native.module is None or not readers or not all(isinstance(each, CompiledReader) for each in readers):
        return None
    return native.module.ReaderSet(readers, by_age)


def make_reader(reception: Reception, sequences: SequenceTable, *args: Any) -> Reader:
    """The reader of a receiver for a new sender; `args` are the rest of those of `Reader`."""
    if native.module is not None and reception.codec is not None:
        return CompiledReader(reception, sequences, *args)
    return _REFERENCES[reception.mode](reception, sequences, *args)
