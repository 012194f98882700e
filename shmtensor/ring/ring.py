"""A ring: one segment of slots. The producer's end finds free slots; the receivers' end maps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..cuda.pinning import Pinning
from ..errors import WireError
from ..memory import segment as shm
from ..memory.words import store
from .device import DeviceSlots
from .layout import (
    HEADER,
    R_CAPACITY,
    R_DEVICE,
    R_INDEX,
    R_KIND,
    R_MAGIC,
    R_SLOT_BYTES,
    R_SLOTS,
    R_UID,
    R_VERSION,
    RING_MAGIC,
    VERSION,
    RingShape,
)

Busy = tuple[Any, ...]
"""What the producer remembers of a message: (seq, first slot, span, ...); `ring/pool.py` says what the rest is."""


class Ring:
    """A mapped ring. `words`, `view` and `map` cover header, records and states; `buffer`, at `address`, the data.

    The data of a device ring are reached by `device`, which is its `buffer` as well; else `device` is None.
    """

    __slots__ = (
        "address", "buffer", "busy", "cursor", "described", "device", "found", "index", "map", "name", "nbytes",
        "pinning",
        "records", "row", "shape", "slot_bytes", "slots", "state", "view", "words",
    )  # fmt: skip

    def __init__(self, name: str, index: int, shape: RingShape, segment: shm.Segment, *, writable: bool) -> None:
        head = segment.map(0, shape.data, writable=True)
        data = segment.map(shape.data, shape.nbytes - shape.data, writable=writable)
        self.name, self.index, self.shape = name, index, shape
        self.slots, self.slot_bytes, self.nbytes = shape.slots, shape.slot_bytes, shape.nbytes
        self.records, self.state, self.row = HEADER, shape.state, shape.row
        self.words, self.view, self.map = head.words, head.view, head.map
        self.buffer: Any = data.buffer
        self.address = data.address
        self.device: DeviceSlots | None = None
        if shape.device:
            self.device = self.buffer = DeviceSlots(head, data.view, shape)
            self.address = 0  # the bytes of its messages are nowhere in this process's memory
            self.nbytes += shape.device_bytes
        self.pinning = Pinning(data.buffer, data.address, writable=writable)
        head.populate(write=True)
        data.populate(write=writable)
        self.found: list[Any] = [None] * shape.slots  # the receiver's memory of its slots, see `ring/feed.py`
        # the producer's memory of its slots
        self.busy: list[Busy | None] = [None] * shape.slots
        self.described: list[object] = [None] * shape.slots  # whose description a record still holds
        self.cursor = 0

    @classmethod
    def create(cls, name: str, uid: int, index: int, shape: RingShape, remedy: str) -> Ring:
        """Make a new ring with every page reserved and entered into the producer's page table."""
        with shm.create(name, shape.nbytes, remedy) as segment:
            try:
                ring = cls(name, index, shape, segment, writable=True)
            except BaseException:
                shm.unlink(name)
                raise
        words = ring.words
        for at, value in (
            (R_VERSION, VERSION), (R_UID, uid), (R_KIND, shape.kind), (R_INDEX, index), (R_SLOTS, shape.slots),
            (R_SLOT_BYTES, shape.slot_bytes), (R_CAPACITY, shape.capacity), (R_DEVICE, shape.device),
            (R_MAGIC, RING_MAGIC),
        ):  # fmt: skip
            store(words, at, value)
        return ring

    @classmethod
    def attach(cls, name: str, uid: int, index: int, *, kind: int, capacity: int, writable: bool) -> Ring:
        """Map another producer's ring. `FileNotFoundError` if it is gone, `WireError` if it is not one."""
        with shm.attach(name) as segment:
            if segment.nbytes < HEADER:
                raise WireError(f"ring {name} has {segment.nbytes} bytes only")
            words = segment.map(0, HEADER, writable=False).words
            if words[R_MAGIC] != RING_MAGIC or words[R_VERSION] != VERSION:
                raise WireError(f"segment {name} is not a version {VERSION} ring")
            if (words[R_UID], words[R_INDEX], words[R_KIND], words[R_CAPACITY]) != (uid, index, kind, capacity):
                raise WireError(f"ring {name} is not ring {index} of producer {uid:016x}")
            shape = RingShape(kind, words[R_SLOTS], words[R_SLOT_BYTES], capacity, words[R_DEVICE] == 1)
            if shape.nbytes != segment.nbytes:
                raise WireError(f"ring {name} has {segment.nbytes} bytes, its header says {shape.nbytes}")
            return cls(name, index, shape, segment, writable=writable)

    def block(self, slot: int, nbytes: int) -> Any:
        """What a loan of `nbytes` from `slot` is made from: while it lives, its owner may write there."""
        if self.device is not None:
            return self.device.block(slot, nbytes)
        return np.ndarray((nbytes,), np.uint8, self.buffer, slot * self.slot_bytes)

    def span(self, nbytes: int) -> int:
        """Slots that a message of `nbytes` takes."""
        return 1 if nbytes <= self.slot_bytes else -(-nbytes // self.slot_bytes)

    def first(self, is_free: Callable[[Ring, Busy], bool]) -> int:
        """The slot to look at first: slot 0 if it was given back, since caches still hold the first few slots where
        receivers keep up; else the next one. Where free slots' messages can be taken back, the oldest comes first.
        """
        entry = self.busy[0]
        return 0 if entry is None or (not entry[4] and is_free(self, entry)) else self.cursor

    def take(self, is_free: Callable[[Ring, Busy], bool]) -> int:
        """A slot as `find(1, is_free)` would find it if it need not search, else -1."""
        slot, entry = 0, self.busy[0]
        if entry is not None and (entry[4] or entry[2] > 1 or not is_free(self, entry)):
            slot = self.cursor
            entry = self.busy[slot]
            if entry is not None and (entry[2] > 1 or not is_free(self, entry)):
                return -1
        self.busy[slot] = None
        self.cursor = slot + 1 if slot + 1 < self.slots else 0
        return slot

    def find(self, span: int, is_free: Callable[[Ring, Busy], bool], *, look: bool = False) -> int:
        """The first of `span` consecutive free slots at or after `first`, wrapping once; -1 if there are none.

        A mere `look` remembers nothing of what it has found.
        """
        busy, slots = self.busy, self.slots
        run, slot = 0, self.first(is_free)
        if slot + span > slots:
            slot = 0
        for _ in range(slots + span):
            if slot == slots:
                slot = run = 0
            entry = busy[slot]
            if entry is not None:
                if not is_free(self, entry):
                    run, slot = 0, slot + 1
                    continue
                if not look:
                    self.forget(entry)
            run, slot = run + 1, slot + 1
            if run == span:
                if not look:
                    self.cursor = slot if slot < slots else 0
                return slot - span
        return -1

    def forget(self, entry: Busy) -> None:
        """Free every slot of a message."""
        first, span = entry[1], entry[2]
        if span == 1:
            self.busy[first] = None
        else:
            self.busy[first : first + span] = [None] * span
