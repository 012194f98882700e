"""Work queue: every message goes to exactly one consumer; a dead one's messages go to another."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import ArgumentError
from ..ring.layout import WORK_QUEUE
from ..ring.reader import COMPETING
from .asyncio import AsyncReceiver, AsyncSender
from .base import ReceiverTraits, SenderTraits
from .claims import DEFAULT_ATTEMPTS, Claims
from .devices import Devices


class Producer(AsyncSender):
    """Sends each message to exactly one consumer of the channel, now or later.

    Without consumers, messages wait in the ring, as long as the channel has a member. If this producer leaves as the
    last member, unfinished messages are lost, and `close()` warns how many: by a `ResourceWarning`, and by a warning of
    the logger `shmtensor.endpoints`.

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
        super().__init__(
            channel, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes, pin=pin, label=label
        )

    def wait_for_consumers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living consumers are there; raise `TimedOut` after `timeout` seconds (None:
        never)."""
        self._wait_for_receivers(count, timeout, "consumers")


class Consumer(AsyncReceiver):
    """Takes messages from a work queue; each message goes to one consumer.

    A message is done when you say so: by `release()`, by leaving its `with` block without an exception, by asking
    this consumer for the next one (`recv` or iteration), or by `close()`. A message that is not done when its
    consumer dies, or whose `with` block raises, is delivered again, with `attempt` raised.

    Threads and tasks may share a consumer. A message belongs to the one that called `recv` or `arecv`: only that one's
    next call, or its `close()`, says that it is done; messages of the others are delivered again after a `close()`.
    What a task received is also done when it ends without an exception and nobody refers to it any more.

    Args:
        channel: the channel's name.
        acknowledge: `"next"`: as above; `"release"`: asking for the next message does not acknowledge the previous one,
            for consumers that work on several messages at once. In a task of asyncio, use `arecv`: `recv` there asks
            for its thread, and so for all of its tasks.
        max_attempts: a message that was delivered so often (1 to 250) and never done is dropped and logged, so that one
            that kills its consumer cannot kill them all.
        spin: most seconds that `recv` stays awake before it sleeps.
        until, label: as for `Subscriber`.
        device, prefetch, pin: as for `Subscriber`. A message that is copied ahead is claimed, and counts as an
            attempt; if this consumer closes or dies before it was handed out, it goes to another.

    Its values are writable: their consumer is the only one that maps them.
    """

    _traits = ReceiverTraits(WORK_QUEUE, counts_lost=True)

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
        super().__init__(
            channel, spin=spin, device=device, prefetch=prefetch, pin=pin, until=until, label=label, mode=COMPETING,
            claims=Claims(acknowledge, max_attempts),
        )  # fmt: skip

    def wait_for_producers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living producers are there; raise `TimedOut` after `timeout` seconds (None:
        never)."""
        self._wait_for_members(count, timeout, "producers", self._count_senders)
