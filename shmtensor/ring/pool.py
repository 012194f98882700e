"""A producer's rings: how many slots of which size, and which of them a message goes into."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import ResourceError
from ..memory.segment import unlink
from ..memory.words import store
from ..units import format_bytes
from .layout import L_RINGS, MAX_RINGS, RingShape, round_slot
from .ring import Ring
from .writer import Place

if TYPE_CHECKING:
    from .ledger import Ledger


@dataclass(frozen=True)
class Sizing:
    """How many slots a ring gets: as many as fit into `nbytes` of data, from `least` to `most`; and how large they are
    at least.

    Where the two differ, nobody has asked for a number: then a ring has fewer, too, where `max_bytes` has no room.
    """

    most: int
    least: int
    nbytes: int
    slot: int = 1

    @classmethod
    def exactly(cls, slots: int) -> Sizing:
        """What the caller has asked for."""
        return cls(slots, slots, 0)

    @property
    def is_exact(self) -> bool:
        return self.most == self.least

    def slots(self, slot_bytes: int) -> int:
        """For slots of so many bytes."""
        return max(self.least, min(self.most, self.nbytes // slot_bytes))

    @property
    def share(self) -> int:
        """A message of which fewer fit into a ring together gets a ring of its own size."""
        return 1 if self.is_exact else max(1, self.least // 2)


_ENOUGH: Final = 16
"""Slots that any ring may have; more are for speed alone."""

SIZED: Final = Sizing(most=1024, least=_ENOUGH, nbytes=1 << 20, slot=1 << 10)
"""Of a sender with no `slots=`: many slots where messages are small, and room for larger ones than the first."""


class Pool:
    """The rings of one producer. Rings never move and never shrink; a producer that needs more room adds one."""

    __slots__ = (
        "_capacity", "_channel", "_fewest", "_kind", "_ledger", "_make", "_max_bytes", "_name", "_single",
        "_sizing", "_slot_bytes", "_writer", "rings",
    )  # fmt: skip

    def __init__(
        self,
        ledger: Ledger,
        channel: str,
        name: Callable[[int], str],
        *,
        kind: int,
        sizing: Sizing,
        slot_bytes: int | None,
        max_bytes: int | None,
        writer: Any,
        make: Callable[[str, int, int, RingShape, str], Ring] = Ring.create,
    ) -> None:
        """`writer`: see ring/writer.py; it has the rings."""
        self._ledger, self._channel, self._name, self._kind = ledger, channel, name, kind
        self._sizing, self._slot_bytes, self._max_bytes = sizing, slot_bytes, max_bytes
        self._capacity, self._make = ledger.shape.capacity, make
        self._fewest = ledger.history + 1  # slots of a ring that `max_bytes` makes smaller
        self._single = ledger.history > 0  # each message in one slot, so that what is retained leaves a slot free
        self._writer, self.rings = writer, writer.rings

    @property
    def slots(self) -> int:
        """Slots of all rings."""
        return sum(ring.slots for ring in self.rings)

    @property
    def nbytes(self) -> int:
        """Memory of all rings, that on a device included."""
        return sum(ring.nbytes for ring in self.rings)

    def make_room(self, nbytes: int) -> None:
        """Add a ring if a message of `nbytes` fits none, however empty, or would fill too much of it."""
        if self._holds(nbytes, self._sizing.share):
            return
        is_needed = not self._holds(nbytes, 1)
        if is_needed or self.may_grow(nbytes):
            try:
                self.add(nbytes)
            except ResourceError:
                if is_needed:
                    raise

    def _holds(self, nbytes: int, count: int) -> bool:
        """Whether a ring, if empty, has room for so many messages of `nbytes`."""
        if self._single:
            return any(nbytes <= ring.slot_bytes for ring in self.rings)
        return any(nbytes <= ring.slot_bytes * (ring.slots // count) for ring in self.rings)

    def find(self, nbytes: int) -> Place | None:
        """Consecutive free slots for a message, in the ring that fits it best."""
        return self._writer.acquire(nbytes)  # type: ignore[no-any-return]

    def has_room(self, nbytes: int) -> bool:
        """Whether `find` would find something. Changes nothing."""
        return self._writer.has_room(nbytes)  # type: ignore[no-any-return]

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
        try:
            self._writer.add_ring(ring)
        finally:  # from here on messages go there, whatever comes between
            store(self._ledger.words, L_RINGS, len(self.rings))
        # crash: grow.published

    def _shape(self, nbytes: int) -> RingShape:
        least = max((ring.slot_bytes for ring in self.rings), default=self._slot_bytes or self._sizing.slot)
        sizing, slot_bytes = self._sizing, round_slot(max(nbytes, least))

        def of(slots: int) -> RingShape:
            return RingShape(self._kind, slots, slot_bytes, self._capacity, self._ledger.device)

        slots = sizing.slots(slot_bytes)
        if sizing.is_exact:
            return of(slots)
        if slots > _ENOUGH:  # leave entries of the order table, and memory, to rings of other sizes
            slots = _ENOUGH if self._single and self.rings else slots
            slots = max(_ENOUGH, min(slots, (self._ledger.mask - self.slots) // 2))
            while slots > _ENOUGH and self._max_bytes is not None and of(slots).nbytes > self._max_bytes // 4:
                slots -= 1
        while slots > self._fewest and self._max_bytes is not None and self.nbytes + of(slots).nbytes > self._max_bytes:
            slots -= 1
        return of(slots)


def _all(shape: RingShape) -> int:
    return shape.nbytes + shape.device_bytes
