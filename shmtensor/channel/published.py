"""The messages in the slots of a ring, as they are seen from outside, and who holds which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..ring import layout as lay
from .answers import Source
from .info import HeldMessage, Holder

_CHUNK: Final = 4096
FEW: Final = 32
"""Records to read one by one rather than with all others."""
# word indices in a record (of `_SPAN`, the upper half), and how many words of it are read
SEQ, SENT, _SPAN, NBYTES, HEAD = 0, 1, 3, 5, 6
Words = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Used = list[tuple[Mask, Holder, "Words | None"]]
"""Of the messages of a ring: which a holder holds, and how often each was delivered."""


@dataclass
class Messages:
    """The published messages in some slots of a ring, newest first. One array for each of their properties."""

    seq: Any
    slot: Any
    span: Any
    nbytes: Any
    sent: Any
    """On CLOCK_MONOTONIC, in nanoseconds."""

    @classmethod
    def read(cls, shape: lay.RingShape, source: Source, published: int, wanted: list[int] | None) -> Messages | None:
        """Those in the wanted slots, in all if `wanted` is None; None if there is none."""
        if wanted is not None and len(wanted) <= FEW:
            heads = [(*source.read(lay.record_word(slot), HEAD), slot) for slot in wanted]
            heads = sorted([it for it in heads if 0 < it[SEQ] <= published], reverse=True)
            if not heads:
                return None
            records = np.array(heads, np.uint64)
            slots = records[:, HEAD].astype(np.int64)
        else:
            records = np.empty((shape.slots, HEAD), np.uint64)
            for start in range(0, shape.slots, _CHUNK):
                count = min(_CHUNK, shape.slots - start)
                words = source.read(lay.record_word(start), lay.RECORD_WORDS * count)
                part = np.frombuffer(words, np.uint64).reshape(-1, lay.RECORD_WORDS)
                records[start : start + count] = part[:, :HEAD]
            slots = np.arange(shape.slots) if wanted is None else np.array(wanted)
            records = records if wanted is None else records[slots]
            seq = records[:, SEQ]
            chosen = (seq - 1 < np.uint64(published)).nonzero()[0]  # 0, of one that is being written, wraps around
            if not len(chosen):
                return None
            chosen = chosen[np.argsort(seq[chosen])[::-1]]
            records, slots = records[chosen], slots[chosen]
        span = np.maximum(records[:, _SPAN] >> 32, 1).astype(np.int64)
        if np.count_nonzero(span > 1):
            span = np.minimum(span, shape.slots - slots)
            covered = bytearray(shape.slots)  # by a newer message: a record inside its span is stale
            keep = []
            for number, (first, length) in enumerate(zip(slots.tolist(), span.tolist(), strict=True)):
                if not covered[first]:
                    covered[first : first + length] = b"\1" * length
                    keep.append(number)
            records, slots, span = records[keep], slots[keep], span[keep]
        nbytes = np.minimum(records[:, NBYTES], shape.slots * shape.slot_bytes).astype(np.int64)
        return cls(records[:, SEQ], slots, span, nbytes, records[:, SENT])

    def first_sent(self, mask: Mask) -> int:
        """When the oldest of these, at least one, was sent."""
        return int(self.sent[mask.nonzero()[0][-1]])

    def held(self, sender: int, ring: int, used: Used, now: int) -> list[HeldMessage]:
        """Each message that is held, newest first."""
        holders: dict[int, list[Holder]] = {}
        attempts: dict[int, int] = {}
        for mask, holder, attempt in used:
            for number in np.flatnonzero(mask).tolist():
                holders.setdefault(number, []).append(holder)
                attempts[number] = 1 if attempt is None else int(attempt[number])
        return [
            HeldMessage(
                sender, ring, int(self.slot[at]), int(self.span[at]), int(self.seq[at]), int(self.nbytes[at]),
                age_of(int(self.sent[at]), now), _state(by), attempts[at],
                tuple(one for one in by if one.group or one.how not in NOBODY),
            )
            for at, by in sorted(holders.items())
        ]  # fmt: skip


def age_of(sent: int | None, now: int) -> float:
    """Seconds since a message was sent; both on CLOCK_MONOTONIC, in nanoseconds. 0 if there is none."""
    return 0.0 if sent is None else max(0.0, (now - sent) / 1e9)


NOBODY: Final = ("waiting", "abandoned", "history")
"""`how` of messages that no member holds."""


def _state(holders: list[Holder]) -> str:
    hows = [holder.how for holder in holders]
    return next((how for how in ("leased", "unread") if how in hows), hows[0])
