"""Leases: a slot is given back when the storage of the view that maps it dies.

A lease is a weak reference to the one array that every view of a message is made from. NumPy arrays refer to it as
their base, a tensor's storage holds it until the storage is freed. So it dies with the last view, and the weak
reference's callback runs at once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..memory.words import store

if TYPE_CHECKING:
    import numpy as np

    _Ref = weakref.ref[np.ndarray]
else:
    _Ref = weakref.ref


class Lease(_Ref):
    """A weak reference to a message's array. `seq` is the message, `words[word]` is where its end is stored."""

    __slots__ = ("ending", "seq", "word", "words")

    words: memoryview
    word: int
    seq: int
    ending: bool
    """Whether a thread is giving its slot back."""
    locked = False
    """Fan-out: whether a shared lock on byte `seq` holds the message."""


class LockedLease(Lease):
    """A fan-out lease that is a shared lock: a latest-only reader's, or one on a message older than its reader."""

    __slots__ = ()
    locked = True


class Claim(Lease):
    """A lease of a work queue or in a group: the exclusive lock on the byte of message `seq`."""

    __slots__ = ("acknowledged", "done", "own", "released")

    acknowledged: bool
    """Whether it is stored that the message is done."""
    done: tuple[int, int]
    """Which of the words says so, and its value then."""
    own: int
    """In a group: which of the words shows that this member has it."""
    released: bool
    """Whether it is stored that the slot is given back: it may be another message's since."""

    def acknowledge(self) -> None:
        """Mark the message as done: it is not delivered again. Its bytes stay while views of them live."""
        if not self.acknowledged:
            self.acknowledged = True
            # crash: done.before
            store(self.words, *self.done)
            # crash: done.stored
