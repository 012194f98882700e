"""Fan-out: every subscriber gets every message."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Literal

from ..channel import control as ctl
from ..channel.membership import Member
from ..channel.names import check_group, ring_name, sequence_table_name
from ..errors import ArgumentError, WireError
from ..memory.words import store
from ..ring.layout import FAN_OUT, MAX_RINGS, MAX_SLOTS
from ..ring.pool import SIZED
from ..ring.reader import ALL, GROUP, LATEST
from ..ring.ring import Ring
from ..ring.sequence_table import SequenceTable
from .base import NOTHING, check_choice, check_count
from .claiming import DEFAULT_ATTEMPTS, ClaimingReceiver
from .device_fanout import DeviceReceiver, DeviceSender
from .devices import Devices
from .message import Message
from .peers import Peer
from .traits import ReceiverTraits, SenderTraits


class Publisher(DeviceSender):
    """Sends every message to every subscriber of the channel that exists before `send` is called.

    Args:
        channel: the channel's name, 1 to 64 of `A-Za-z0-9._-`.
        slots: slots of a ring; a message takes as many consecutive ones as it needs. None: as many as 1 MiB holds, 16
            at least and 1024 at most; 16 on a device.
        slot_bytes: bytes of a slot, an int or a string like `"8MiB"`; None makes the ring at the first `send`,
            to fit it.
        full: what `send` does when no slot is free: `"block"`, `"grow"` (add a ring), `"drop"` (the new message,
            counted), `"error"` (raise `RingFull`).
        history: how many of the newest messages a subscriber that joins later gets first.
        max_bytes: most memory that all rings together may take; None: as much as `/dev/shm`, or the device, gives.
        device: (experimental) a CUDA device, `"cuda"` or `"cuda:1"`: the messages lie in its memory, and its
            subscribers get CUDA tensors that *are* the slots. See docs/guide/device-memory.md. None: host memory.
        pin: whether CUDA copies find the rings pinned: `"auto"`, if it can be done, `True`, else it is an error,
            `False`, never. Nothing is pinned before the first such copy. docs/guide/cuda.md
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
        if device is not None:
            slots = SIZED.least if slots is None else slots
            self._use_device(device, slots)
        super().__init__(
            channel,
            slots=slots,
            slot_bytes=slot_bytes,
            full=full,
            max_bytes=max_bytes,
            history=history,
            pin=pin,
            label=label,
        )

    def wait_for_subscribers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living subscribers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_receivers(count, timeout, "subscribers")

    def _waits_for(self, peer: Peer) -> bool:
        # a group takes nothing from device memory
        return peer.entry.is_recipient and (self._device is None or peer.entry.role != ctl.GROUP)

    def _is_lockable(self) -> bool:
        return self._history > 0 or any(peer.entry.flags & ctl.LATEST for peer in self._listeners)

    def _welcome(self, peer: Peer) -> None:
        """As for every sender; with `history`, it becomes a recipient of the messages that are kept for it, too."""
        start = max(1, self._published + 1 - self._history)
        if self._history and self._waits_for(peer):
            self._writer.welcome(peer.index, start)
        self._sequences.set_start(peer.index, peer.uid, start)

    def _is_settled(self) -> bool:
        local = tuple(peer.index for peer in self._peers.values() if peer.uid in self._local)
        return self._writer.is_settled(local) and (self._device is None or self._is_unmapped())


class Subscriber(DeviceReceiver):
    """Receives every message that is sent to the channel while it exists, in order per publisher.

    Args:
        channel: the channel's name.
        delivery: `"all"`, every message, so that a slow subscriber holds its publishers back; `"latest"`, the newest
            ones, never holding anybody back (`msg.missed` counts what was passed over).
        depth: with `delivery="latest"`: of how many of each publisher's newest messages the oldest comes next. They
            come in order, as far as the publisher has not reused their slots: it keeps about as many as its ring
            has slots.
        group: the name of a group of subscribers, in any processes, that share the messages: each goes to one of them,
            by the rules of a work queue. It is done when its `Message` is released, or with the next `recv`; if its
            receiver dies before that, it goes to another (see `Consumer`). Other groups, and subscribers in none, get
            every message as well, and all read the same bytes. A group begins with its first member, and ends with the
            last one that lives. docs/guide/groups.md
        acknowledge, max_attempts: with `group`, as for `Consumer`: `"next"` and 5 if they are not given.
        until: `"drained"`, the stream ends when every publisher has left, and everything they sent is received;
            `"closed"`, it goes on with the next publisher, and a loop over it ends when this subscriber is closed.
        spin: seconds that `recv` stays awake before it sleeps: lower latency for CPU time.
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
        self._latest = delivery == "latest"
        if depth > 1 and not self._latest:
            raise ArgumentError(f'depth={depth} goes with delivery="latest": every message is delivered otherwise')
        self._depth = depth
        if group is not None:
            self.__class__ = _of_groups(type(self))
        self._join_group(group, acknowledge, max_attempts)
        super().__init__(
            channel, spin=spin, device=device, prefetch=prefetch, pin=pin, until=until, label=label, group=group or ""
        )

    def _join_group(self, group: str | None, acknowledge: str | None, max_attempts: int | None) -> None:
        """Called before the constructor of the base: whether, and how, messages are shared with others."""
        for name, value in (("acknowledge", acknowledge), ("max_attempts", max_attempts)):
            if value is not None:
                raise ArgumentError(f"{name}={value!r} goes with group=: without one, nothing has to be acknowledged")
        self._mode = LATEST if self._latest else ALL
        self._flags = ctl.LATEST if self._latest else 0

    def wait_for_publishers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living publishers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_senders(count, timeout, "publishers")

    def _prepare(self, member: Member) -> None:
        super()._prepare(member)
        if not member.is_first:
            return
        for ring in _retaining_rings(member):
            # the words of a former member at this index must not count for the messages that are kept for us
            row = ring.state + member.recipient[0] * ring.row
            for word in range(row, row + ring.slots):
                store(ring.words, word, 0)

    def _copy_of(self, message: Message) -> Any:
        return NOTHING if self._prefetch is not None else message.copy()  # on a device it is private

    def _is_drained(self, reader: Any) -> bool:
        return not reader.next()


class GroupSubscriber(ClaimingReceiver):
    """What a `Subscriber` does differently in a group."""

    _traits = ReceiverTraits(FAN_OUT, keeps_claims=True)
    _mode, _flags = GROUP, ctl.MEMBER
    _most_attempts = 100
    _latest: bool

    def _join_group(self, group: str, acknowledge: str | None, max_attempts: int | None) -> None:
        check_group(group)
        if self._latest:
            raise ArgumentError('delivery="latest" does not go with group=: a group gets every message')
        self._use_claims(
            "next" if acknowledge is None else acknowledge, DEFAULT_ATTEMPTS if max_attempts is None else max_attempts
        )


@functools.cache
def _of_groups(cls: type[Subscriber]) -> type[Subscriber]:
    """The class, `Subscriber` or one derived from it, of subscribers in groups."""
    return type(cls.__name__, (GroupSubscriber, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _retaining_rings(member: Member) -> Iterator[Ring]:
    """The rings of every publisher with `history=`, as far as they can be attached."""
    control = member.control
    for entry in control.members():
        if entry.role != ctl.SENDER:
            continue
        try:
            sequences = SequenceTable.attach(
                sequence_table_name(control.channel, entry.uid), entry.uid, control.capacity
            )
        except (FileNotFoundError, WireError):
            continue
        sequences.close()
        for index in range(min(sequences.rings, MAX_RINGS) if sequences.history else 0):
            with contextlib.suppress(FileNotFoundError, WireError):
                yield Ring.attach(
                    ring_name(control.channel, entry.uid, index), entry.uid, index,
                    kind=FAN_OUT, capacity=control.capacity, writable=False,
                )  # fmt: skip
