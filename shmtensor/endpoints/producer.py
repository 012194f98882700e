"""Work queue, the sending end: every message goes to exactly one consumer."""

from __future__ import annotations

import contextlib
from typing import Literal

from ..errors import ArgumentError
from ..ring.layout import WORK_QUEUE
from ..ring.ring import Ring
from .async_sender import AsyncSender
from .base import CLOSED
from .peers import Peer
from .reports import report_lost
from .traits import SenderTraits


class Producer(AsyncSender):
    """Sends each message to exactly one consumer of the channel, now or later.

    Without consumers, messages wait in the ring, as long as the channel has a member. If this producer is its last one,
    unfinished messages end with it, and `close()` says how many: a `ResourceWarning`, and a warning of the logger
    `shmtensor`.

    Args:
        channel: the channel's name, 1 to 64 of `A-Za-z0-9._-`.
        slots, slot_bytes, full, max_bytes, pin, label: as for `Publisher`.

    >>> import shmtensor, torch
    >>> tx, rx = shmtensor.Producer("doc"), shmtensor.Consumer("doc")
    >>> tx.send(torch.ones(2))
    1
    >>> with rx.recv(timeout=5) as msg:
    ...     msg.value.sum().item()
    2.0
    >>> tx.close(); rx.close()
    """

    _traits = SenderTraits(WORK_QUEUE, counts_lost=True, carries_context=True)

    def __init__(
        self,
        channel: str,
        *,
        slots: int | None = None,
        slot_bytes: int | str | None = None,
        full: Literal["block", "grow", "drop", "error"] = "block",
        max_bytes: int | str | None = None,
        pin: bool | Literal["auto"] = "auto",
        device: None = None,
        label: str | None = None,
    ) -> None:
        if device is not None:
            raise ArgumentError(
                f"device={device!r}: the rings of a work queue lie in host memory, since a message may have to be "
                "delivered again after its consumer, and what it had queued on the device, died: use a Publisher"
            )
        self._next_listener = 0
        super().__init__(
            channel, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes, pin=pin, label=label
        )

    def _finish(self, linger: float | None) -> None:
        try:
            super()._finish(linger)
        finally:
            self._warn_lost()

    def _lose(self, count: int) -> None:
        super()._lose(count)
        if self._state == CLOSED:  # it left later than `close`, which warns otherwise
            with contextlib.suppress(ResourceWarning):  # where warnings are errors; it is in the log
                self._warn_lost()

    def _warn_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            report_lost(self, lost)

    def wait_for_consumers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living consumers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_receivers(count, timeout, "consumers")

    def _wake(self, ring: Ring, slot: int) -> None:
        """Notify one sleeping consumer per message; it notifies another if it finds more."""
        listeners, words = self._listeners, self._control_words
        count = len(listeners)
        for step in range(count):
            turn = self._next_listener + step
            peer = listeners[turn % count]
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified:
                self._next_listener = turn + 1
                self._ring_bell(peer, asleep, ring, slot)
                return

    def _waits_for(self, peer: Peer) -> bool:
        return False  # a slot's own words say which consumer has its message, if one has

    def _drop_dead(self) -> bool:
        """As for every sender; and free the slots of consumers that died after `done` and before `released`."""
        freed = self._writer.reclaim()
        return super()._drop_dead() or freed
