"""Work queue, the receiving end: every message goes to exactly one consumer; a dead one's messages go to another."""

from __future__ import annotations

from typing import Any, Literal

from ..ring.layout import WORK_QUEUE
from ..ring.reader import COMPETING
from .claiming import DEFAULT_ATTEMPTS, ClaimingReceiver
from .devices import Devices
from .traits import ReceiverTraits


class Consumer(ClaimingReceiver):
    """Takes messages off a work queue, each one that no other consumer has.

    A message is done when you say so: by `release()`, by leaving its `with` block without an exception, by asking
    this consumer for the next one (`recv` or iteration), or by `close()`. A message that is not done when its
    consumer dies, or whose `with` block raises, is delivered again, with `attempt` raised.

    Threads and tasks may share a consumer. A message belongs to the one that received it: only that one's next
    `recv`, or its `close()`, says that it is done; messages of the others are delivered again after a `close()`.

    Args:
        channel: the channel's name.
        acknowledge: `"next"`, as above; `"release"`, asking for the next message says nothing about the one before:
            for consumers that work on several messages at once.
        max_attempts: a message that was delivered so often and never done is dropped and logged, so that one that
            kills its consumer cannot kill them all.
        spin: seconds that `recv` stays awake before it sleeps.
        until, label: as for `Subscriber`.
        device, prefetch, pin: as for `Subscriber`. A message that is copied ahead is claimed, and counts as an
            attempt; if this consumer closes or dies before it was handed out, it goes to another.

    Its values are writable: their consumer is the only one that maps them.
    """

    _traits = ReceiverTraits(WORK_QUEUE, counts_lost=True, keeps_claims=True)
    _mode = COMPETING

    def __init__(
        self,
        channel: str,
        *,
        acknowledge: Literal["next", "release"] = "next",
        max_attempts: int = DEFAULT_ATTEMPTS,
        spin: float = 100e-6,
        device: Any = None,
        prefetch: int = 0,
        pin: bool | Literal["auto"] = "auto",
        until: Literal["drained", "closed"] = "drained",
        label: str | None = None,
    ) -> None:
        Devices.check_prefetch(device, prefetch)
        self._use_claims(acknowledge, max_attempts)
        super().__init__(channel, spin=spin, device=device, prefetch=prefetch, pin=pin, until=until, label=label)

    def wait_for_producers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living producers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_senders(count, timeout, "producers")
