"""Work queue, the sending end: every message goes to exactly one consumer."""

from __future__ import annotations

from ..errors import ArgumentError
from ..ring.competing import state_word
from ..ring.layout import DONE, RELEASED, WORK_QUEUE
from ..ring.ring import Busy, Ring
from .asend import AsyncSender


class Producer(AsyncSender):
    """Sends each message to exactly one consumer of the channel, now or later.

    Without consumers, messages wait in the ring.

    Args:
        channel: the channel's name, 1 to 64 of `A-Za-z0-9._-`.
        slots, slot_bytes, full, max_bytes, pin: as for `Publisher`.

    >>> import shmtensor, torch
    >>> tx, rx = shmtensor.Producer("doc"), shmtensor.Consumer("doc")
    >>> tx.send(torch.ones(2))
    1
    >>> with rx.recv(timeout=5) as msg:
    ...     msg.value.sum().item()
    2.0
    >>> tx.close(); rx.close()
    """

    _kind = WORK_QUEUE

    def __init__(
        self,
        channel: str,
        *,
        slots: int = 16,
        slot_bytes: int | str | None = None,
        full: str = "block",
        max_bytes: int | str | None = None,
        pin: bool | str = "auto",
        device: None = None,
    ) -> None:
        if device is not None:
            raise ArgumentError(
                f"device={device!r}: the rings of a work queue lie in host memory, since a message may have to be "
                "delivered again after its consumer, and what it had queued on the device, died: use a Publisher"
            )
        self._next_listener = 0
        super().__init__(channel, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes, pin=pin)

    def wait_for_consumers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living consumers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_receivers(count, timeout, "consumers")

    def _wake(self, ring: Ring, slot: int) -> None:
        """One sleeper per message; it rings another if it finds more."""
        listeners, words = self._listeners, self._control_words
        count = len(listeners)
        for step in range(count):
            turn = self._next_listener + step
            peer = listeners[turn % count]
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.rung:
                self._next_listener = turn + 1
                self._ring_bell(peer, asleep, ring, slot)
                return

    def _is_free(self, ring: Ring, entry: Busy) -> bool:
        seq, slot, _, _, _, guard = entry
        if guard is not None and guard() is not None:
            return False
        if not seq:
            return True
        released: int = ring.words[ring.state + 8 * slot + RELEASED]
        return bool(released == seq)

    def _drop_dead(self) -> bool:
        """A consumer may have died after `done` and before `released`: then nobody holds the message's lock."""
        freed = False
        for ring, entry in self._pool.messages():
            seq, slot, _, _, _, guard = entry
            if guard is not None and guard() is not None:
                continue
            # `done` before the lock: the other way round, it could be claimed, and done with views alive, in between
            if ring.words[state_word(ring, slot) + DONE] == seq and not self._ledger.locks.held_by_other(seq):
                ring.forget(entry)
                freed = True
        return super()._drop_dead() or freed

    def _is_settled(self) -> bool:
        return all(ring.words[state_word(ring, slot) + DONE] == seq for ring, (seq, slot, *_) in self._pool.messages())
