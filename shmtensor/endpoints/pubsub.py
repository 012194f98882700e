"""Fan-out: every subscriber gets every message."""

from __future__ import annotations

from typing import Any, Literal

from ..channel.names import check_group
from ..errors import ArgumentError
from ..options import check_choice, check_count
from ..ring.layout import FAN_OUT, MAX_SLOTS
from ..ring.pool import SIZED
from ..ring.reader import ALL, GROUP, LATEST
from .asyncio import AsyncReceiver, AsyncSender
from .base import ReceiverTraits, SenderTraits
from .claims import DEFAULT_ATTEMPTS, Claims
from .device_fanout import DeviceMemory
from .devices import Devices


class Publisher(AsyncSender):
    """Sends every message to every subscriber of the channel that exists before `send` is called.

    Args:
        channel: the channel's name, 1 to 64 of `A-Za-z0-9._-`.
        slots: slots of a ring; a message takes as many consecutive ones as it needs. None: as many as 1 MiB holds, 16
            at least and 1024 at most; 16 on a device.
        slot_bytes: bytes of a slot, an int or a string like `"8MiB"`; None makes the ring at the first `send`,
            to fit it.
        full: what `send` does when no slot is free: `"block"`, `"grow"` (add a ring; `ResourceError` if
            `/dev/shm` has no room for it), `"drop"` (the new message, counted), `"error"` (raise `RingFull`).
        history: how many of the newest messages are kept for subscribers that join later, which get them first.
        max_bytes: most memory that all rings together may take, an int (bytes) or a string like `"4GiB"`; None: as much
            as `/dev/shm`, or the device, has.
        device: (experimental) a CUDA device, `"cuda"` or `"cuda:1"`: the messages lie in its memory, and its
            subscribers get CUDA tensors that *are* the slots. See docs/guide/device-memory.md. None: host memory.
        pin: whether rings are pinned for CUDA copies: `"auto"`: if possible; `True`: a copy raises `CudaError` if it is
            not possible; `False`: never. Nothing is pinned before the first such copy. See docs/guide/cuda.md.
        label: a name for people, such as `"left camera"`: in `Message.sender` and `shmtensor ls`. At most 64 bytes.

    >>> import shmtensor, torch
    >>> pub, sub = shmtensor.Publisher("doc"), shmtensor.Subscriber("doc")
    >>> pub.send(torch.arange(3))
    1
    >>> sub.recv(timeout=5).value
    tensor([0, 1, 2])
    >>> pub.close(); sub.close()
    """

    _traits = SenderTraits(FAN_OUT, carries_context=True)

    def __init__(
        self,
        channel: str,
        *,
        slots: int | None = None,
        slot_bytes: int | str | None = None,
        full: Literal["block", "grow", "drop", "error"] = "block",
        history: int = 0,
        max_bytes: int | str | None = None,
        pin: bool | Literal["auto"] = "auto",
        device: Any = None,
        label: str | None = None,
    ) -> None:
        if slots is not None:
            check_count("slots", slots, 1, MAX_SLOTS)
        check_count("history", history, 0, (slots or SIZED.least) - 1)
        memory = None
        if device is not None:
            slots = SIZED.least if slots is None else slots
            memory = DeviceMemory(device, slots)
        super().__init__(
            channel,
            slots=slots,
            slot_bytes=slot_bytes,
            full=full,
            max_bytes=max_bytes,
            history=history,
            pin=pin,
            label=label,
            memory=memory,
        )

    def wait_for_subscribers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living subscribers are there; raise `TimedOut` after `timeout` seconds (None:
        never)."""
        self._wait_for_receivers(count, timeout, "subscribers")


class Subscriber(AsyncReceiver):
    """Receives every message that is sent to the channel while it exists, in order per publisher.

    Args:
        channel: the channel's name.
        delivery: `"all"`, every message, so that a slow subscriber holds its publishers back; `"latest"`, the newest
            ones, without ever holding a publisher back (`msg.missed` counts those that were skipped).
        depth: with `delivery="latest"`: a queue of the newest `depth` messages of each publisher, in order; older ones
            are dropped. The publisher's ring needs at least `depth` slots, and should have a few more.
        group: the name of a group of subscribers, in any processes, that share the messages: each goes to one of them,
            by the rules of a work queue. It is done when its `Message` is released, or with the next `recv`; if its
            receiver dies before that, it goes to another (see `Consumer`). Other groups, and subscribers in none, get
            every message as well, and all read the same bytes. A group begins with its first member, and ends with the
            last one that lives. docs/guide/groups.md
        acknowledge, max_attempts: with `group`, as for `Consumer`: `"next"` and 5 if they are not given.
        until: `"drained"`, the stream ends when every publisher has left, and everything they sent is received;
            `"closed"`, it goes on with the next publisher, and a loop over it ends when this subscriber is closed.
        spin: most seconds that `recv` stays awake before it sleeps: lower latency for CPU time.
        device: (experimental) a CUDA device: values come with their tensors there, copied on a stream of the receiver's
            own and safe to use on the calling thread's current stream. They hold no slot.
        prefetch: with `device`: how many messages are copied ahead. Not with `delivery="latest"`.
        pin, label: as for `Publisher`.

    Its values are read-only: see `Message`.
    """

    _traits = ReceiverTraits(FAN_OUT)

    def __init__(
        self,
        channel: str,
        *,
        group: str | None = None,
        delivery: Literal["all", "latest"] = "all",
        spin: float = 100e-6,
        device: Any = None,
        prefetch: int = 0,
        pin: bool | Literal["auto"] = "auto",
        depth: int = 1,
        until: Literal["drained", "closed"] = "drained",
        label: str | None = None,
        acknowledge: Literal["next", "release"] | None = None,
        max_attempts: int | None = None,
    ) -> None:
        check_choice("delivery", delivery, ("all", "latest"))
        check_count("depth", depth, 1, MAX_SLOTS)
        Devices.check_prefetch(device, prefetch, latest=delivery == "latest")
        if depth > 1 and delivery != "latest":
            raise ArgumentError(f'depth={depth} goes with delivery="latest": every message is delivered otherwise')
        claims: Claims | None = None
        mode = LATEST if delivery == "latest" else ALL
        if group is not None:
            check_group(group)
            if mode == LATEST:
                raise ArgumentError('delivery="latest" does not go with group=: a group gets every message')
            attempts = DEFAULT_ATTEMPTS if max_attempts is None else max_attempts
            claims = Claims("next" if acknowledge is None else acknowledge, attempts, most_attempts=100)
            mode = GROUP
        for name, value in (("acknowledge", acknowledge), ("max_attempts", max_attempts)):
            if group is None and value is not None:
                raise ArgumentError(f"{name}={value!r} goes with group=: without one, nothing has to be acknowledged")
        super().__init__(
            channel, spin=spin, device=device, prefetch=prefetch, pin=pin, until=until, label=label, mode=mode,
            depth=depth, group=group or "", claims=claims,
        )  # fmt: skip

    def wait_for_publishers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living publishers are there; raise `TimedOut` after `timeout` seconds (None:
        never)."""
        self._wait_for_members(count, timeout, "publishers", self._count_senders)
