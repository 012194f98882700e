"""The sequence table of a producer: what is published, where each message lies, and each receiver's first message."""

from __future__ import annotations

from ..errors import WireError
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..memory.words import store
from .layout import (
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
    SEQUENCE_TABLE_MAGIC,
    VERSION,
    SequenceTableShape,
    check_version,
)


class SequenceTable:
    """One producer's sequence table, mapped. Messages are leased and claimed on byte `seq` of `locks`."""

    __slots__ = ("device", "history", "locks", "mask", "name", "shape", "uid", "words")

    def __init__(self, name: str, uid: int, words: memoryview, shape: SequenceTableShape, locks: LockFile) -> None:
        self.name, self.uid, self.words, self.shape, self.locks = name, uid, words, shape, locks
        self.mask = shape.order_size - 1
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
            if words[L_MAGIC] != SEQUENCE_TABLE_MAGIC:
                raise WireError(f"segment {name} is not the sequence table of producer {uid:016x}")
            check_version(f"sequences {name}", words[L_VERSION])
            if words[L_UID] != uid:
                raise WireError(f"segment {name} is not the sequence table of producer {uid:016x}")
            shape = SequenceTableShape(words[L_CAPACITY], words[L_ORDER])
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
