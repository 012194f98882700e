"""A producer's rings: how many slots of which size they have, and when another one is added."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import ResourceError
from ..memory.segment import free_bytes, unlink
from ..memory.words import store
from ..options import format_bytes
from .layout import L_RINGS, MAX_RING_BYTES, MAX_RINGS, MAX_SLOT_BYTES, RingShape, round_slot
from .ring import Ring
from .writer import SlotRange

if TYPE_CHECKING:
    from .ring import SequenceTable


@dataclass(frozen=True)
class Sizing:
    """How many slots a ring gets: as many as fit into `nbytes` of data, from `least` to `most`. `slot`: the least size.

    If `least` and `most` differ, the caller did not set a number: then a ring also gets fewer slots if `max_bytes`
    or `/dev/shm` leaves no room for more.
    """

    most: int
    least: int
    nbytes: int
    slot: int = 1

    @classmethod
    def exactly(cls, slots: int) -> Sizing:
        """The number that the caller has set."""
        return cls(slots, slots, 0)

    @property
    def is_exact(self) -> bool:
        return self.most == self.least

    def slots(self, slot_bytes: int) -> int:
        """How many slots of `slot_bytes` a ring gets."""
        return max(self.least, min(self.most, self.nbytes // slot_bytes))

    @property
    def share(self) -> int:
        """A message that fits into a ring fewer than `share` times gets a ring with larger slots.

        `share` is three (or the number of slots, if that is smaller): a loop over a receiver holds its last message
        while it waits for the next one, and only if three fit is there surely room for that one before or behind it.
        """
        return min(_LEAST_TOGETHER, self.least) if self.is_exact else max(1, self.least // 2)


_LEAST_TOGETHER: Final = 3

_ENOUGH: Final = 16
"""Slots that every ring should have; more are for speed alone."""

SIZED: Final = Sizing(most=1024, least=_ENOUGH, nbytes=1 << 20, slot=1 << 10)
"""For a sender without `slots=`: many slots if messages are small, and room for messages larger than the first."""


class Pool:
    """The rings of one producer. Rings never move and never shrink; a producer that needs more room adds one."""

    __slots__ = (
        "_capacity",
        "_channel",
        "_fewest",
        "_kind",
        "_make",
        "_max_bytes",
        "_name",
        "_sequences",
        "_single",
        "_sizing",
        "_slot_bytes",
        "_writer",
        "rings",
    )  # fmt: skip

    def __init__(
        self,
        sequences: SequenceTable,
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
        """`writer`: see ring/writer.py; it owns the list of rings."""
        self._sequences, self._channel, self._name, self._kind = sequences, channel, name, kind
        self._sizing, self._slot_bytes, self._max_bytes = sizing, slot_bytes, max_bytes
        self._capacity, self._make = sequences.shape.capacity, make
        self._fewest = sequences.history + 1  # slots of a ring that `max_bytes` makes smaller
        self._single = sequences.history > 0  # each message takes one slot, so that retained messages leave a slot free
        self._writer, self.rings = writer, writer.rings

    @property
    def slots(self) -> int:
        """How many slots all rings have."""
        return sum(ring.slots for ring in self.rings)

    @property
    def nbytes(self) -> int:
        """Bytes of all rings, device memory included."""
        return sum(ring.nbytes for ring in self.rings)

    def make_room(self, nbytes: int) -> None:
        """Add a ring if a message of `nbytes` fits into no ring, or would take too large a part of it."""
        if self._holds(nbytes, self._sizing.share):
            return
        is_needed = not self._holds(nbytes, 1)
        if is_needed or (self.may_grow(nbytes) and self.shape(nbytes).nbytes <= free_bytes()):
            try:
                self.add(nbytes)
            except ResourceError:
                if is_needed:
                    raise

    def _holds(self, nbytes: int, count: int) -> bool:
        """Whether a ring, if empty, has room for `count` messages of `nbytes`."""
        if self._single:
            return any(nbytes <= ring.slot_bytes for ring in self.rings)
        return any(nbytes <= ring.slot_bytes * max(1, ring.slots // count) for ring in self.rings)

    def find(self, nbytes: int) -> SlotRange | None:
        """Consecutive free slots for a message, in the ring that fits it best."""
        return self._writer.acquire(nbytes)  # type: ignore[no-any-return]

    def has_room(self, nbytes: int) -> bool:
        """Whether `find` would find something. Changes nothing."""
        return self._writer.has_room(nbytes)  # type: ignore[no-any-return]

    def may_grow(self, nbytes: int) -> bool:
        """Whether `max_bytes` and the sequence table admit another ring."""
        return not self.limit(nbytes)

    def limit(self, nbytes: int) -> str:
        """What keeps another ring from being added, as text for errors; empty if nothing does."""
        shape = self.shape(nbytes)
        if self._max_bytes is not None and self.nbytes + _all(shape) > self._max_bytes:
            return f"max_bytes={format_bytes(self._max_bytes)}"
        if len(self.rings) >= MAX_RINGS:
            return f"the most rings, {MAX_RINGS}"
        most = self._sequences.mask
        return f"the most slots of a sender, {most}" if self.slots + shape.slots > most else ""

    def add(self, nbytes: int) -> None:
        """Make another ring, for messages of `nbytes`."""
        shape, index, used = self.shape(nbytes), len(self.rings), self.nbytes
        what = f'ring {index} of channel "{self._channel}" ({shape.slots} slots of {format_bytes(shape.slot_bytes)})'
        if self._max_bytes is not None and used + _all(shape) > self._max_bytes:
            raise ResourceError(
                errno.ENOMEM,
                f"{what} needs {format_bytes(_all(shape))}, {format_bytes(used)} of max_bytes="
                f"{format_bytes(self._max_bytes)} are used: pass a larger max_bytes, fewer slots or a smaller message",
            )
        if index == MAX_RINGS or self.slots + shape.slots > self._sequences.mask:
            raise ResourceError(
                errno.ENOMEM,
                f"{what} would be more than {MAX_RINGS} rings or {self._sequences.mask} slots: pass slots= and "
                "slot_bytes= for the largest message",
            )
        fewer = f"pass fewer slots (slots={shape.slots}) or a smaller slot_bytes"
        remedy = fewer if self._sizing.is_exact else "send smaller messages"
        if _all(shape) > MAX_RING_BYTES:
            raise ResourceError(errno.ENOMEM, f"{what} needs {format_bytes(_all(shape))}: {remedy}")
        # crash: grow.before
        unlink(self._name(index))  # an interrupted attempt may have left it
        ring = self._make(self._name(index), self._sequences.uid, index, shape, remedy)
        # crash: grow.created
        try:
            self._writer.add_ring(ring)
        finally:  # even after an exception, `add_ring` may have taken effect: then messages go there
            store(self._sequences.words, L_RINGS, len(self.rings))
        # crash: grow.published

    def shape(self, nbytes: int) -> RingShape:
        """How many slots of which size a ring gets that is added for a message of `nbytes`.

        Raises `ResourceError` if no ring has slots as large.
        """
        sizing, slot_bytes = self._sizing, round_slot(max(nbytes, self._slot_bytes or self._sizing.slot))
        if slot_bytes > MAX_SLOT_BYTES:
            raise ResourceError(
                errno.ENOMEM,
                f'a slot of channel "{self._channel}" has at most {format_bytes(MAX_SLOT_BYTES)}: pass a smaller '
                "slot_bytes or a smaller message",
            )

        def of(slots: int) -> RingShape:
            return RingShape(self._kind, slots, slot_bytes, self._capacity, self._sequences.device)

        slots = sizing.slots(slot_bytes)
        if sizing.is_exact:
            return of(slots)
        if slots > _ENOUGH:  # leave entries of the sequence table, and memory, to rings of other sizes
            slots = _ENOUGH if self._single and self.rings else slots
            slots = max(_ENOUGH, min(slots, (self._sequences.mask - self.slots) // 2))
            while slots > _ENOUGH and self._max_bytes is not None and of(slots).nbytes > self._max_bytes // 4:
                slots -= 1
        while slots > self._fewest and self._max_bytes is not None and self.nbytes + of(slots).nbytes > self._max_bytes:
            slots -= 1
        free, together = free_bytes(), min(_LEAST_TOGETHER, sizing.share)
        # other senders need a ring, too: take at most a quarter of what is free, but have room for `together` slots
        while slots > max(self._fewest, together - 1) and of(slots).nbytes > (free // 4 if slots > together else free):
            slots -= 1
        return of(slots)


def _all(shape: RingShape) -> int:
    """Bytes of the segment and of the device memory."""
    return shape.nbytes + shape.device_bytes
