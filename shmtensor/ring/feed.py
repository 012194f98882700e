"""A receiver's end of one producer: its ledger, its rings, how far it has read, and the leases it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..errors import WireError
from ..memory import forks
from ..memory.fifos import Rouser
from ..memory.words import WEAKLY_ORDERED, settle
from ..wire.record import CONSTANT_OFFSET, INLINE_OFFSET, SIZE, SPILLED, check_head, padded, unpack_constant
from .layout import DEVICE_SLOT, L_PUBLISHED, MAX_RINGS, R_RECORDS, RECORD_WORDS
from .lease import Lease
from .ledger import Ledger
from .ring import Ring

TREE, ARRAY, TENSOR = range(3)


class Found:
    """A validated record, kept per slot: one that stands there again unchanged needs no second look."""

    __slots__ = (
        "arguments", "dynamic", "end", "kind", "nbytes", "offset", "raw", "ring", "slot", "static", "unpacker",
        "view_dtype",
    )  # fmt: skip

    def __init__(self, ring: Ring, slot: int, raw: bytes, static: bytes, dynamic: bytes, nbytes: int) -> None:
        self.ring, self.slot, self.raw = ring, slot, raw
        self.static, self.dynamic, self.nbytes = static, dynamic, nbytes
        self.offset = slot * ring.slot_bytes
        self.end = CONSTANT_OFFSET + len(raw)
        # made from `static` by the endpoint: how to build the array, and what of it the value is
        self.unpacker: Any = None
        self.arguments: tuple[Any, ...] = ()
        self.kind = TREE
        self.view_dtype: Any = None

    def record(self) -> bytes:
        """The 256 bytes as they stand in the slot now, for a doorbell."""
        at = self.ring.records + self.slot * SIZE
        return bytes(self.ring.view[at : at + SIZE])


held: set[Feed] = set()
"""Feeds with leases, kept although nobody else may refer to them: a receiver that was dropped goes to the garbage
collector, which clears the weak references among what it frees and closes its files before anything can be said about
views that live on. The compiled module keeps them, too (hot/inlet.h, hot/grip.h)."""


class Feed(ABC):
    """One attached producer. Subclasses say how a message is taken and given back."""

    __slots__ = (
        "__weakref__", "_asleep", "_control", "_posted", "_rouser", "attach_ring", "closing", "device", "emptied",
        "gone", "index", "inlet", "leases", "ledger", "mask", "member", "order", "owner", "position", "rings", "uid",
        "words",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, index: int, member: int, control: memoryview, asleep: int, rouser: Rouser | None,
        attach_ring: Callable[[int], Ring], owner: object,
    ) -> None:  # fmt: skip
        """`owner` is kept as long as the feed: it has the lock that says that the receiver is there. Nothing here may
        refer to the receiver itself, which leaves when it is collected."""
        self.ledger, self.uid, self.index, self.member = ledger, ledger.uid, index, member
        self.words, self.mask, self.order = ledger.words, ledger.mask, ledger.shape.order
        self.device = ledger.device  # its messages lie in device memory: `endpoints/resident.py` takes them
        self._control, self._asleep, self._rouser, self._posted = control, asleep, rouser, 0
        self.attach_ring, self.owner = attach_ring, owner
        self.emptied: Callable[[], None] = _nobody  # the receiver, once it waits for the end of the leases
        self.rings: list[Ring] = []
        self.position = 0
        self.inlet: Any = None  # of the compiled module, for the ring that the last message was in: endpoints/usual.py
        self.leases: dict[int, Lease] = {}  # by sequence number
        self.gone = False  # the producer is closed or dead: nothing follows what is published
        self.closing = False  # this receiver reads no more; `emptied` is told when the last lease ends
        forks.track(self)

    def drop_in_child(self) -> None:
        """A forked child holds no lease: forgetting the references keeps their ends from being told."""
        self.leases.clear()
        held.discard(self)

    def settle(self) -> None:
        """Nobody waits for the end of the leases any more: without this, feed and receiver would keep each other."""
        self.emptied = _nobody

    @property
    def behind(self) -> int:
        """Messages published and not yet looked at."""
        return self.words[L_PUBLISHED] - self.position

    def ring(self, index: int) -> Ring:
        """Ring `index` of the producer, attached at first use."""
        while index >= len(self.rings):
            if index >= min(self.ledger.rings, MAX_RINGS):
                raise WireError(
                    f"producer {self.uid:016x} has {self.ledger.rings} rings, its order table names ring {index}"
                )
            self.rings.append(self.attach_ring(len(self.rings)))
        return self.rings[index]

    def locate(self, seq: int) -> Found | None:
        """The record of message `seq`; None if its slot holds another message by now."""
        place = self.words[self.order + (seq & self.mask)]
        index = place >> 32
        ring = self.rings[index] if index < len(self.rings) else self.ring(index)
        return self.read(ring, place & 0xFFFFFFFF, seq)

    def read(self, ring: Ring, slot: int, seq: int) -> Found | None:
        """The validated record in a slot; None if it is not message `seq`'s."""
        if slot >= ring.slots:
            raise WireError(f"order entry of message {seq} names slot {slot} of {ring.slots}")
        at = ring.records + slot * SIZE
        if WEAKLY_ORDERED:
            settle()
        if ring.words[at >> 3] != seq:
            return None
        found: Found | None = ring.found[slot]
        if found is not None and found.raw == ring.map[at + CONSTANT_OFFSET : at + found.end]:
            return found
        try:
            found = self._parse(ring, slot, ring.map[at + CONSTANT_OFFSET : at + SIZE])
        except WireError:
            if self.holds(ring, slot, seq):
                raise
            return None  # read while the producer was reusing the slot
        ring.found[slot] = found if found.raw else None
        return found

    def _parse(self, ring: Ring, slot: int, raw: bytes) -> Found:
        head = unpack_constant(raw)
        device = ring.device
        _, flags, _, _, _, static_len, dynamic_len, nbytes = head
        check_head(head, ring.index, slot, ring.slots, ring.slot_bytes + (device is not None) * DEVICE_SLOT)
        if device is not None and nbytes > head[4] * ring.slot_bytes:
            raise WireError(f"message of {nbytes} bytes in {head[4]} device slots of {ring.slot_bytes} bytes")
        if flags & SPILLED:
            if device is not None:
                text = device.text(slot, static_len + dynamic_len)
                return Found(ring, slot, b"", text[:static_len], text[static_len:], nbytes)
            at = slot * ring.slot_bytes + padded(nbytes)
            text = bytes(ring.buffer[at : at + static_len + dynamic_len])
            return Found(ring, slot, b"", text[:static_len], text[static_len:], nbytes)
        at = INLINE_OFFSET - CONSTANT_OFFSET
        static, dynamic = raw[at : at + static_len], raw[at + static_len : at + static_len + dynamic_len]
        return Found(ring, slot, raw[: at + static_len + dynamic_len], static, dynamic, nbytes)

    def holds(self, ring: Ring, slot: int, seq: int) -> bool:
        """Whether a slot still holds message `seq`."""
        return ring.words[R_RECORDS + slot * RECORD_WORDS] == seq

    def is_current(self, seq: int) -> bool:
        """Whether message `seq` still stands where the order table says, so far as that can be told."""
        place = self.words[self.order + (seq & self.mask)]
        index, slot = place >> 32, place & 0xFFFFFFFF
        known = index < len(self.rings) and slot < self.rings[index].slots
        return not known or self.holds(self.rings[index], slot, seq)

    def wake_sender(self) -> None:
        """After giving back: wake the producer if it sleeps, once per sleep."""
        asleep = self._control[self._asleep]
        if asleep & 1 and asleep != self._posted and self._rouser is not None:
            self._posted = asleep
            self._rouser.rouse(asleep)

    def _ended(self, lease: Any) -> None:
        """The storage died: give the slot back. Runs wherever the last reference was dropped; takes no lock."""
        if self.leases.pop(lease.seq, None) is None:
            return  # a forked child's copy of its parent's lease
        if not self.leases:
            held.discard(self)
            if self.leases:  # another thread took a message just now
                held.add(self)
        self.give_back(lease)
        if self._control[self._asleep] & 1:
            self.wake_sender()
        if self.closing and not self.leases:
            self.close()
            self.emptied()

    def unmap(self) -> None:
        """Take nothing more from device memory: it is unmapped when the last view of it has died."""
        for ring in self.rings:
            if ring.device is not None:
                ring.device.unmap()

    def hold(self, lease: Lease) -> None:
        """A lease has begun."""
        self.leases[lease.seq] = lease
        held.add(self)

    @abstractmethod
    def give_back(self, lease: Lease) -> None:
        """Store what says that this receiver no longer needs the slot."""

    def close(self) -> None:
        """Read no more. Leases live on, and the locks with them, until the last one ends."""
        self.closing = True
        self.unmap()
        if not self.leases:
            self.ledger.close()
            if self._rouser is not None:
                self._rouser.close()


def _nobody() -> None:
    """Nobody waits for the end of the leases."""
