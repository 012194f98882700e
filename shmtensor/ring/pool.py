"""A producer's rings: where the next message goes, and what is written there.

What the producer remembers of a message in a slot (`Busy`) is a tuple (seq, first slot, span, recipients, locked,
guard). `recipients` are the peers whose lease words count, `locked` says that readers may hold it by a shared
lock, and `guard` is a weak reference to a loan's array: its owner could still write, so the slot is not used again
while it lives.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import ResourceError
from ..memory.segment import unlink
from ..memory.words import store
from ..units import format_bytes
from ..wire.record import BODY, BODY_OFFSET, INLINE_OFFSET, SIZE, SPILLED, VERSION
from .layout import L_RINGS, MAX_RINGS, R_RECORDS, RECORD_WORDS, RingShape, round_slot
from .ring import Busy, Ring

if TYPE_CHECKING:
    from ..views.outgoing import Outgoing
    from .ledger import Ledger

Place = tuple[Ring, int]


class Pool:
    """The rings of one producer. Rings never move and never shrink; a producer that needs more room adds one."""

    __slots__ = (
        "_budget", "_capacity", "_channel", "_kind", "_ledger", "_make", "_max_bytes", "_name", "_single",
        "_slot_bytes", "_slots", "rings",
    )  # fmt: skip

    def __init__(
        self,
        ledger: Ledger,
        channel: str,
        name: Callable[[int], str],
        *,
        kind: int,
        slots: int,
        slot_bytes: int | None,
        max_bytes: int | None,
        budget: int | None = None,
        make: Callable[[str, int, int, RingShape, str], Ring] = Ring.create,
    ) -> None:
        self._ledger, self._channel, self._name, self._kind = ledger, channel, name, kind
        self._slots, self._slot_bytes, self._max_bytes = slots, slot_bytes, max_bytes
        self._budget = budget  # bytes of a ring that may have fewer slots, at least 2; 1 where max_bytes wants it
        self._capacity, self._make = ledger.shape.capacity, make
        self._single = ledger.history > 0  # each message in one slot, so that what is retained leaves a slot free
        self.rings: list[Ring] = []

    @property
    def slots(self) -> int:
        """Slots of all rings."""
        return sum(ring.slots for ring in self.rings)

    @property
    def nbytes(self) -> int:
        """Memory of all rings, that on a device included."""
        return sum(ring.nbytes for ring in self.rings)

    @property
    def busy(self) -> int:
        """Slots that hold a message not yet known to be given back."""
        return sum(entry is not None for ring in self.rings for entry in ring.busy)

    def messages(self) -> list[tuple[Ring, Busy]]:
        """Every message that is published and not yet known to be given back."""
        return [
            (ring, entry)
            for ring in self.rings
            for slot, entry in enumerate(ring.busy)
            if entry is not None and entry[0] and entry[1] == slot
        ]

    def make_room(self, nbytes: int) -> None:
        """Add a ring if a message of `nbytes` fits none, however empty."""
        if not any(nbytes <= ring.slot_bytes * (1 if self._single else ring.slots) for ring in self.rings):
            self.add(nbytes)

    def find(self, nbytes: int, is_free: Callable[[Ring, Busy], bool]) -> Place | None:
        """Consecutive free slots for a message, tried in the ring that fits it best first."""
        for ring, span in self._fitting(nbytes):
            slot = ring.find(span, is_free)
            if slot >= 0:
                # nobody may take the old record for a new one
                store(ring.words, R_RECORDS + slot * RECORD_WORDS, 0)
                return ring, slot
        return None

    def has_room(self, nbytes: int, is_free: Callable[[Ring, Busy], bool]) -> bool:
        """Whether `find` would find something. Changes nothing if `is_free` does not."""
        return any(ring.find(span, is_free, look=True) >= 0 for ring, span in self._fitting(nbytes))

    def _fitting(self, nbytes: int) -> Iterator[tuple[Ring, int]]:
        """The rings that may hold a message, and how many slots it takes there."""
        rings = self.rings
        if len(rings) > 1:
            rings = sorted(rings, key=lambda ring: (ring.slot_bytes < nbytes, abs(ring.slot_bytes - nbytes)))
        for ring in rings:
            span = ring.span(nbytes)
            if span == 1 or (span <= ring.slots and not self._single):
                yield ring, span

    def may_grow(self, nbytes: int) -> bool:
        """Whether `max_bytes` and the order table admit another ring."""
        shape = self._shape(nbytes)
        fits = self._max_bytes is None or self.nbytes + _all(shape) <= self._max_bytes
        return fits and self.slots + shape.slots <= self._ledger.mask and len(self.rings) < MAX_RINGS

    def add(self, nbytes: int) -> None:
        """Make another ring, for messages of `nbytes`."""
        shape, index, used = self._shape(nbytes), len(self.rings), self.nbytes
        what = f'ring {index} of channel "{self._channel}" ({shape.slots} slots of {format_bytes(shape.slot_bytes)})'
        if self._max_bytes is not None and used + _all(shape) > self._max_bytes:
            raise ResourceError(
                errno.ENOMEM,
                f"{what} needs {format_bytes(_all(shape))}, {format_bytes(used)} of max_bytes="
                f"{format_bytes(self._max_bytes)} are used: pass a larger max_bytes, fewer slots or a smaller message",
            )
        if index == MAX_RINGS or self.slots + shape.slots > self._ledger.mask:
            raise ResourceError(
                errno.ENOMEM,
                f"{what} would be more than {MAX_RINGS} rings or {self._ledger.mask} slots: pass slots= and "
                "slot_bytes= for the largest message",
            )
        # crash: grow.before
        remedy = f"pass fewer slots (slots={shape.slots}) or a smaller slot_bytes"
        unlink(self._name(index))  # left by an attempt that was interrupted
        ring = self._make(self._name(index), self._ledger.uid, index, shape, remedy)
        # crash: grow.created
        self.rings.append(ring)
        store(self._ledger.words, L_RINGS, index + 1)
        # crash: grow.published

    def write_record(self, ring: Ring, slot: int, out: Outgoing) -> None:
        """Everything of a record but `seq`, which is 0 meanwhile: whoever reads these bytes now, of the message that
        stood here before, looks at `seq` again before it believes them."""
        record = ring.records + slot * SIZE
        static, dynamic = out.static, out.dynamic
        ring.view[record + BODY_OFFSET : record + INLINE_OFFSET] = BODY.pack(
            time.monotonic_ns(), VERSION, SPILLED if out.spilled else 0, ring.index, slot, ring.span(out.total),
            len(static), len(dynamic), out.nbytes,
        )  # fmt: skip
        if not out.spilled:
            start = record + INLINE_OFFSET
            end = start + len(static)
            ring.view[start:end] = static
            ring.view[end : end + len(dynamic)] = dynamic
        ring.described[slot] = out if out.source is None else None

    def _shape(self, nbytes: int) -> RingShape:
        least = max((ring.slot_bytes for ring in self.rings), default=self._slot_bytes or 1)
        slots, slot_bytes = self._slots, round_slot(max(nbytes, least))
        shape = RingShape(self._kind, slots, slot_bytes, self._capacity, self._ledger.device)
        if self._budget is None:
            return shape
        if slots > 2 and shape.nbytes > self._budget:
            slots = min(slots, max(2, self._budget // slot_bytes))
            shape = RingShape(self._kind, slots, slot_bytes, self._capacity)
        while slots > 1 and self._max_bytes is not None and self.nbytes + shape.nbytes > self._max_bytes:
            slots -= 1
            shape = RingShape(self._kind, slots, slot_bytes, self._capacity)
        return shape


def _all(shape: RingShape) -> int:
    return shape.nbytes + shape.device_bytes
