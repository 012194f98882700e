"""What a producer owns: its sequence table, and rings, each a segment of slots.

The table says what is published, where each message lies, and each receiver's first message. Of a ring, the producer's
end finds free slots; the receivers' end maps them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cuda.copies import Pinning
from ..errors import WireError
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..memory.segment import guard
from ..memory.words import store
from .device import DeviceSlots
from .layout import (
    FAN_OUT,
    HEADER,
    L_CAPACITY,
    L_CLOSED,
    L_DEVICE,
    L_HISTORY,
    L_MAGIC,
    L_MEMBERS,
    L_ORDER,
    L_PUBLISHED,
    L_RINGS,
    L_UID,
    L_VERSION,
    R_CAPACITY,
    R_DEVICE,
    R_INDEX,
    R_KIND,
    R_MAGIC,
    R_RECORDS,
    R_SLOT_BYTES,
    R_SLOTS,
    R_UID,
    R_VERSION,
    RECORD_WORDS,
    RING_MAGIC,
    SEQUENCE_TABLE_MAGIC,
    VERSION,
    RingShape,
    SequenceTableShape,
    ring_shape,
    table_shape,
)


class SequenceTable:
    """One producer's sequence table, mapped. Messages are leased and claimed on byte `seq` of `locks`."""

    __slots__ = ("device", "history", "locks", "mask", "name", "order", "shape", "uid", "words")

    def __init__(self, name: str, uid: int, words: memoryview, shape: SequenceTableShape, locks: LockFile) -> None:
        self.name, self.uid, self.words, self.shape, self.locks = name, uid, words, shape, locks
        self.order, self.mask = shape.order, shape.order_size - 1
        self.history = words[L_HISTORY]
        self.device = words[L_DEVICE] == 1  # the data of its rings lie in device memory

    @classmethod
    def create(
        cls, name: str, uid: int, *, capacity: int, order_size: int, history: int, device: bool = False
    ) -> SequenceTable:
        """Make the sequence table of a new producer."""
        shape = SequenceTableShape(capacity, order_size)
        with shm.create(name, shape.nbytes, "close other channels") as segment:
            words = segment.map(writable=True).words
            store(words, L_VERSION, VERSION)
            store(words, L_UID, uid)
            store(words, L_CAPACITY, capacity)
            store(words, L_ORDER, order_size)
            store(words, L_HISTORY, history)
            store(words, L_DEVICE, device)
            store(words, L_MAGIC, SEQUENCE_TABLE_MAGIC)
            return cls(name, uid, words, shape, segment.locks())

    @classmethod
    def attach(cls, name: str, uid: int, capacity: int) -> SequenceTable:
        """Map another producer's sequence table. `FileNotFoundError` if it is gone, `WireError` if it is not one."""
        with shm.attach(name) as segment:
            if segment.nbytes < 8 * L_MEMBERS:
                raise WireError(f"sequences {name} has {segment.nbytes} bytes only")
            words = segment.map(writable=True).words
            shape = table_shape(name, words, uid)
            if shape.capacity != capacity or shape.nbytes != segment.nbytes:
                raise WireError(f"sequences {name} has {segment.nbytes} bytes, its header says {shape.nbytes}")
            return cls(name, uid, words, shape, segment.locks())

    @property
    def published(self) -> int:
        """Sequence number of the newest message."""
        return self.words[L_PUBLISHED]

    @property
    def closed(self) -> bool:
        """Whether the producer has closed: nothing follows."""
        return self.words[L_CLOSED] != 0

    @property
    def rings(self) -> int:
        """How many rings the producer has added."""
        return self.words[L_RINGS]

    def place(self, seq: int) -> tuple[int, int]:
        """The ring and the slot that the table names for message `seq`; another's, once that is overwritten."""
        entry = self.words[self.order + (seq & self.mask)]
        return entry >> 32, entry & 0xFFFFFFFF

    def start(self, index: int, uid: int) -> int | None:
        """The first message that counts member (index, uid) as a recipient; None while the producer has not seen it."""
        at = L_MEMBERS + 2 * index
        return self.words[at] if self.words[at + 1] == uid else None

    def set_start(self, index: int, uid: int, seq: int) -> None:
        """Producer: member (index, uid) is a recipient from message `seq` on."""
        at = L_MEMBERS + 2 * index
        store(self.words, at, seq)
        store(self.words, at + 1, uid)  # after the start: pairs with the test in `start`

    def finish(self, index: int, uid: int) -> None:
        """Receiver: member (index, uid) needs nothing more from a producer that is gone."""
        store(self.words, self.shape.finished + index, uid)

    def finished(self, index: int) -> int:
        """The uid that last finished at a member index."""
        return self.words[self.shape.finished + index]

    def close(self) -> None:
        """Drop the locks. The mapping ends with the last reference to it."""
        self.locks.close()


class Ring:
    """A mapped ring. `words`, `view` and `map` cover header, records and states; `buffer`, at `address`, the data.

    `seqs[slot]` and `sent_ns[slot]` are the first words of a slot's record: which message it holds, and since when. The
    data of a device ring are reached by `device`, which is its `buffer` as well; else `device` is None.
    """

    __slots__ = (
        "address", "buffer", "device", "index", "map", "name", "nbytes", "pinning",
        "records", "row", "sent_ns", "seqs", "shape", "slot_bytes", "slots", "state", "view", "words",
    )  # fmt: skip

    def __init__(self, name: str, index: int, shape: RingShape, segment: shm.Segment, *, writable: bool) -> None:
        head = segment.map(0, shape.data, writable=True)
        data = segment.map(shape.data, shape.nbytes - shape.data, writable=writable, values=not shape.device)
        self.name, self.index, self.shape = name, index, shape
        self.slots, self.slot_bytes, self.nbytes = shape.slots, shape.slot_bytes, shape.nbytes
        self.records, self.state, self.row = HEADER, shape.state, shape.row
        self.words, self.view, self.map = head.words, head.view, head.map
        self.seqs, self.sent_ns = (self.words[R_RECORDS + at : shape.state : RECORD_WORDS] for at in range(2))
        self.buffer: Any = data.buffer
        self.address = data.address
        self.device: DeviceSlots | None = None
        if shape.device:
            self.device = self.buffer = DeviceSlots(head, data.view, shape)
            self.address = 0  # the payload does not lie in this process's memory
            self.nbytes += shape.device_bytes
        elif shape.kind == FAN_OUT and not writable:
            guard(data, head, HEADER, shape.slots, shape.slot_bytes, name.partition(",")[0].removeprefix("/shmtensor."))
        self.pinning = Pinning(data.buffer, data.address, writable=writable)
        head.populate(write=True)
        data.populate(write=writable)

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
            shape = ring_shape(name, segment.map(0, HEADER, writable=False).words, uid, index, kind)
            if shape.capacity != capacity:
                raise WireError(f"ring {name} is not ring {index} of producer {uid:016x}")
            if shape.nbytes != segment.nbytes:
                raise WireError(f"ring {name} has {segment.nbytes} bytes, its header says {shape.nbytes}")
            return cls(name, index, shape, segment, writable=writable)

    def block(self, slot: int, nbytes: int) -> Any:
        """The memory of a loan of `nbytes` from `slot` on: while it lives, the loan's owner may write there."""
        if self.device is not None:
            self.device.begin()
            return self.device.block(slot, nbytes)
        return np.ndarray((nbytes,), np.uint8, self.buffer, slot * self.slot_bytes)

    def span(self, nbytes: int) -> int:
        """How many slots a message of `nbytes` takes."""
        return 1 if nbytes <= self.slot_bytes else -(-nbytes // self.slot_bytes)
