"""The ledger of a producer: how much it has published, where each message lies, and who takes part from where."""

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
    LEDGER_MAGIC,
    VERSION,
    LedgerShape,
    check_version,
)


class Ledger:
    """One producer's ledger, mapped. `locks` is the description on whose byte `seq` messages are leased and claimed."""

    __slots__ = ("device", "history", "locks", "mask", "name", "shape", "uid", "words")

    def __init__(self, name: str, uid: int, words: memoryview, shape: LedgerShape, locks: LockFile) -> None:
        self.name, self.uid, self.words, self.shape, self.locks = name, uid, words, shape, locks
        self.mask = shape.order_size - 1
        self.history = words[L_HISTORY]
        self.device = words[L_DEVICE] == 1  # the data of its rings lie in device memory

    @classmethod
    def create(
        cls, name: str, uid: int, *, capacity: int, order_size: int, history: int, device: bool = False
    ) -> Ledger:
        """Make the ledger of a new producer."""
        shape = LedgerShape(capacity, order_size)
        with shm.create(name, shape.nbytes, "close other channels") as segment:
            words = segment.map(writable=True).words
            store(words, L_VERSION, VERSION)
            store(words, L_UID, uid)
            store(words, L_CAPACITY, capacity)
            store(words, L_ORDER, order_size)
            store(words, L_HISTORY, history)
            store(words, L_DEVICE, device)
            store(words, L_MAGIC, LEDGER_MAGIC)
            return cls(name, uid, words, shape, segment.locks())

    @classmethod
    def attach(cls, name: str, uid: int, capacity: int) -> Ledger:
        """Map another producer's ledger. `FileNotFoundError` if it is gone, `WireError` if it is not one."""
        with shm.attach(name) as segment:
            if segment.nbytes < 8 * L_MEMBERS:
                raise WireError(f"ledger {name} has {segment.nbytes} bytes only")
            words = segment.map(writable=True).words
            if words[L_MAGIC] != LEDGER_MAGIC:
                raise WireError(f"segment {name} is not the ledger of producer {uid:016x}")
            check_version(f"ledger {name}", words[L_VERSION])
            if words[L_UID] != uid:
                raise WireError(f"segment {name} is not the ledger of producer {uid:016x}")
            shape = LedgerShape(words[L_CAPACITY], words[L_ORDER])
            if shape.capacity != capacity or shape.nbytes != segment.nbytes:
                raise WireError(f"ledger {name} has {segment.nbytes} bytes, its header says {shape.nbytes}")
            return cls(name, uid, words, shape, segment.locks())

    @property
    def published(self) -> int:
        """Sequence number of the newest message."""
        return self.words[L_PUBLISHED]

    @property
    def closed(self) -> bool:
        """Whether the producer said that nothing follows."""
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
        """Drop the locks; the mapping goes with the last reference."""
        self.locks.close()
