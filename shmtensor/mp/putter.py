"""The end of a queue with which a process puts: a producer whose memory grows with the queue, up to a limit."""

from __future__ import annotations

import errno
import os
import time
from queue import Full
from typing import Any, Final

import numpy as np

from ..channel.membership import Member
from ..endpoints.producer import Producer
from ..endpoints.spinning import Spin
from ..endpoints.traits import SenderTraits
from ..errors import ResourceError, RingFull
from ..memory.segment import SHM_DIR, NameTaken, free_bytes
from ..options import format_bytes
from ..ring.competing import state_word
from ..ring.layout import DONE, RECORD_WORDS, RELEASED, WORK_QUEUE, RingShape, round_slot
from ..ring.pool import Pool
from ..ring.ring import Ring
from ..ring.writer import SlotRange

PATIENCE: Final = 30.0
"""Seconds after which a waiting put fails if every item was got and no memory has come back."""

_CHECK_INTERVAL: Final = 0.5
"""Seconds after which a put that waits checks again who holds the memory."""

_GRACE: Final = 5e-3
"""Seconds to wait for a slot before a ring is added: a getter that keeps up is faster than fresh pages of a ring."""

_FIRST_BYTES: Final = 4 << 20
_FIRST_SLOTS: Final = (4, 1024)
_GROWTH_BYTES: Final = 256 << 20
_WIDE: Final = 4
"""Messages do not use a ring whose slots are more than this many times too large."""


def default_limit() -> int:
    """Half of `/dev/shm`: what one putting process may use by default."""
    space = os.statvfs(SHM_DIR)
    return space.f_blocks * space.f_frsize // 2


def _slot_of(nbytes: int) -> int:
    """Bytes of a slot for messages of about `nbytes`: a few sizes, so that rings are shared by similar messages."""
    if nbytes <= 64 << 10:
        return round_slot(1 << max(6, (nbytes - 1).bit_length()))
    step = 1 << (nbytes.bit_length() - 4)
    return round_slot((nbytes + step - 1) // step * step)


class GrowingPool(Pool):
    """Rings of several slot sizes; each ring that is added for a size is as large as all before it, within bounds.

    No fixed number of slots fits a queue: it may hold a few huge batches or many thousand numbers, and a put does not
    wait as long as there is memory.
    """

    __slots__ = ("eager",)

    eager: bool
    """Whether to add a ring rather than wait."""

    def find(self, nbytes: int) -> SlotRange | None:
        rings = self._of_size(_slot_of(nbytes))
        for ring in rings:
            place = self._writer.acquire(nbytes, ring.index)
            if place is not None:
                return place  # type: ignore[no-any-return]
        if self.may_grow(nbytes):
            try:
                self.add(nbytes)
            except ResourceError:
                if not self.rings:
                    raise
            else:
                return self._writer.acquire(nbytes, len(self.rings) - 1)  # type: ignore[no-any-return]
        return super().find(nbytes)

    def make_room(self, nbytes: int) -> None:
        if not self._of_size(_slot_of(nbytes)) and not self.may_grow(nbytes):
            super().make_room(nbytes)

    def may_grow(self, nbytes: int) -> bool:
        if not self.eager and self._of_size(_slot_of(nbytes)):
            return False
        return super().may_grow(nbytes) and self.shape(nbytes).nbytes <= free_bytes()

    def add(self, nbytes: int) -> None:
        try:
            super().add(nbytes)
        except NameTaken:
            raise
        except ResourceError as error:
            limit = self._max_bytes or 0
            raise ResourceError(
                error.errno or errno.ENOMEM,
                f"an item of {format_bytes(nbytes)} does not fit into the queue: of max_bytes={format_bytes(limit)} "
                f"for this process {format_bytes(self.nbytes)} are used, {SHM_DIR} has {format_bytes(free_bytes())} "
                "free: put smaller items, pass a larger max_bytes=, or give it more room (containers: --shm-size)",
            ) from error

    def _of_size(self, slot_bytes: int) -> list[Ring]:
        return [ring for ring in self.rings if slot_bytes <= ring.slot_bytes <= _WIDE * slot_bytes]

    def shape(self, nbytes: int) -> RingShape:
        slot_bytes = _slot_of(nbytes)
        least, most = _FIRST_SLOTS
        before = sum(ring.slots for ring in self._of_size(slot_bytes))
        slots = max(least, min(most, _FIRST_BYTES // slot_bytes), min(before, _GROWTH_BYTES // slot_bytes))
        slots = min(slots, self._sequences.mask - self.slots)
        if self._max_bytes is not None:
            one = RingShape(self._kind, 1, slot_bytes, self._capacity).nbytes
            slots = min(slots, 1 + (self._max_bytes - self.nbytes - one) // (slot_bytes + 8 * RECORD_WORDS + 64))
        return RingShape(self._kind, max(1, slots), slot_bytes, self._capacity)


class Putter(Producer):
    """The producer of one process. Its `max_bytes` is always set."""

    _traits = SenderTraits(WORK_QUEUE, pool=GrowingPool, widest=_WIDE)
    _pool: GrowingPool

    def __init__(self, channel: str, max_bytes: int | None) -> None:
        super().__init__(channel, full="grow", max_bytes=default_limit() if max_bytes is None else max_bytes)
        self._spin = Spin()  # a getter that keeps up is faster than another ring

    def _prepare(self, member: Member) -> None:
        super()._prepare(member)
        self._pool.eager = False

    @property
    def published(self) -> int:
        """How many items were put."""
        return self._published

    def put(self, value: Any, deadline: float | None) -> None:
        """Send what `pickling.pack` made, waiting for memory.

        Args:
            value: the packed item.
            deadline: when to give up, in monotonic seconds; None waits as long as it takes.

        Raises:
            queue.Full: the deadline has passed.
            ResourceError: the value is larger than the limit; or everything that this process put was got, the
                getters' tensors fill the memory, and for `PATIENCE` seconds none of them died.
        """
        if type(value) is bytes:
            value = np.frombuffer(value, np.uint8)
        grace = _GRACE if deadline is None else max(0.0, min(_GRACE, deadline - time.monotonic()))
        self._pool.eager = not grace
        # crash: put.begun
        try:
            self.send(value, timeout=grace)
            # crash: put.sent
            return
        except RingFull:
            self._pool.eager = True
        wait, held_since, given_back = 0.0, 0.0, -1
        while True:
            try:
                self.send(value, timeout=wait)
                return
            except RingFull:
                # crash: put.waits
                unread, held, nbytes = self._holders()
            now = time.monotonic()
            if unread or held != given_back:
                held_since, given_back = now, held
            elif now - held_since >= PATIENCE:
                raise ResourceError(errno.ENOMEM, self._held_text(held, nbytes))
            if deadline is not None and now >= deadline:
                text = f"{unread} items wait to be got" if unread else self._held_text(held, nbytes)
                raise Full(f"no memory for the item: {text}")
            wait = _CHECK_INTERVAL if deadline is None else min(_CHECK_INTERVAL, deadline - now)

    def end(self) -> None:
        """Leave at the end of the process."""
        self._at_exit()

    def _holders(self) -> tuple[int, int, int]:
        """(items not got yet, items got whose memory is still in use, bytes of the latter)"""
        unread = held = nbytes = 0
        for ring, slot, seq, span in self._writer.messages():
            state = state_word(ring, slot)
            if ring.words[state + DONE] != seq:
                unread += 1
            elif ring.words[state + RELEASED] != seq:
                held += 1
                nbytes += span * ring.slot_bytes
        return unread, held, nbytes

    def _held_text(self, held: int, nbytes: int) -> str:
        pids = ", ".join(str(pid) for pid in sorted({peer.entry.pid for peer in self._listeners})) or "none alive"
        return (
            f"tensors of {held} items that were got hold {format_bytes(nbytes)} of max_bytes="
            f"{format_bytes(self._max_bytes or 0)} (processes with this queue: {pids}): drop tensors that are not "
            "needed, keep clones of those that are (one kept tensor holds its whole item), or pass a larger max_bytes="
        )
