"""Fan-out: every subscriber gets every message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..channel import control as ctl
from ..channel.membership import Member
from ..channel.names import ledger_name, ring_name
from ..errors import WireError
from ..memory.words import store
from ..ring.broadcast import BroadcastFeed, LatestFeed
from ..ring.feed import TENSOR, Found
from ..ring.layout import FAN_OUT, MAX_RINGS, R_RECORDS, RECORD_WORDS
from ..ring.ledger import Ledger
from ..ring.pool import Place
from ..ring.ring import Busy, Ring
from . import usual
from .ahead import check as check_ahead
from .arecv import AsyncReceiver
from .audience import Peer
from .base import check_choice, check_count
from .message import Message
from .resident import DeviceSender, take_from_device


class Publisher(DeviceSender):
    """Sends every message to every subscriber of the channel that exists before `send` is called.

    Args:
        channel: the channel's name, 1 to 64 of `A-Za-z0-9._-`.
        slots: slots of a ring; a message takes as many consecutive ones as it needs.
        slot_bytes: bytes of a slot, an int or a string like `"8MiB"`; None makes the ring at the first `send`,
            to fit it.
        full: what `send` does when no slot is free: `"block"`, `"grow"` (add a ring), `"drop"` (the new message,
            counted), `"error"` (raise `RingFull`).
        history: how many of the newest messages a subscriber that joins later gets first.
        max_bytes: most memory that all rings together may take; None: as much as `/dev/shm`, or the device, gives.
        device: a CUDA device, `"cuda"` or `"cuda:1"`: the messages lie in its memory, and its subscribers get CUDA
            tensors that *are* the slots. See docs/cuda-ipc.md. None: host memory.
        pin: whether CUDA copies find the rings pinned: `"auto"`, if it can be done, `True`, else it is an error,
            `False`, never. Nothing is pinned before the first such copy. docs/cuda.md

    >>> import shmtensor, torch
    >>> pub, sub = shmtensor.Publisher("doc"), shmtensor.Subscriber("doc")
    >>> pub.send(torch.arange(3))
    1
    >>> sub.recv(timeout=5).value
    tensor([0, 1, 2])
    >>> pub.close(); sub.close()
    """

    _kind = FAN_OUT

    def __init__(
        self,
        channel: str,
        *,
        slots: int = 16,
        slot_bytes: int | str | None = None,
        full: str = "block",
        history: int = 0,
        max_bytes: int | str | None = None,
        pin: bool | str = "auto",
        device: Any = None,
    ) -> None:
        check_count("slots", slots, 1, 1 << 20)
        check_count("history", history, 0, slots - 1)
        if device is not None:
            self._use_device(device, slots)
        super().__init__(
            channel, slots=slots, slot_bytes=slot_bytes, full=full, max_bytes=max_bytes, history=history, pin=pin
        )

    def wait_for_subscribers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` living subscribers are there; `TimedOut` after `timeout` seconds."""
        self._wait_for_receivers(count, timeout, "subscribers")

    def _choose_recipients(self) -> None:
        self._recipients = tuple(peer for peer in self._listeners if not peer.entry.flags & ctl.LATEST)
        self._locked = self._history > 0 or len(self._recipients) < len(self._listeners)

    def _welcome(self, peer: Peer) -> None:
        """With `history`, the newcomer becomes a recipient of the messages that are kept for it, too."""
        start = max(1, self._published + 1 - self._history)
        if self._history and not peer.entry.flags & ctl.LATEST:
            for ring, entry in self._pool.messages():
                seq, slot, span, recipients, locked, guard = entry
                if seq >= start:
                    ring.busy[slot : slot + span] = [(seq, slot, span, (*recipients, peer), locked, guard)] * span
        self._ledger.set_start(peer.index, peer.uid, start)

    def _is_free(self, ring: Ring, entry: Busy) -> bool:
        seq, slot, _, recipients, locked, guard = entry
        if guard is not None and guard() is not None:
            return False
        if not seq:
            return True  # a loan that was dropped
        words, at, row = ring.words, ring.state + slot, ring.row
        for peer in recipients:
            word = words[at + peer.index * row]
            if word != 2 * seq + 1 and not peer.gone and (word == 2 * seq or not peer.leaving):
                return False
        if self._history and seq > self._published - self._history:
            return False
        if locked:
            locks = self._ledger.locks
            if not locks.try_exclusive(seq):
                return False
            store(words, R_RECORDS + slot * RECORD_WORDS, 0)  # under the lock: who takes it next finds nothing
            # crash: takeback.cleared
            locks.unlock(seq)
        return True

    def _seems_free(self, ring: Ring, entry: Busy) -> bool:
        """`_is_free`, but takes nothing back."""
        seq, slot, span, recipients, locked, guard = entry
        if locked and self._ledger.locks.held_by_other(seq):
            return False
        return self._is_free(ring, (seq, slot, span, recipients, False, guard))

    def _has_room(self, nbytes: int) -> bool:
        return self._pool.has_room(nbytes, self._seems_free)

    def _find(self, nbytes: int) -> Place | None:
        """Latest-only readers keep what they may still take, unless a newer message takes its place."""
        return super()._find(nbytes) if not self._locked or self._has_room(nbytes) else None

    def _is_settled(self) -> bool:
        for ring, (seq, slot, _, recipients, _, _) in self._pool.messages():
            for peer in recipients:
                taken = ring.words[ring.state + peer.index * ring.row + slot] >= 2 * seq
                if not (taken or peer.gone or peer.leaving or peer.uid in self._local):
                    return False
        return self._device is None or self._is_unmapped()


class Subscriber(AsyncReceiver[BroadcastFeed]):
    """Receives every message that is sent to the channel while it exists, in order per publisher.

    Args:
        channel: the channel's name.
        delivery: `"all"`, every message, so that a slow subscriber holds its publishers back; `"latest"`, always the
            newest one, never holding anybody back (`msg.missed` counts what was passed over).
        spin: seconds that `recv` stays awake before it sleeps: lower latency for CPU time.
        device: a CUDA device: values come with their tensors there, copied on a stream of the receiver's own and
            safe to use on the calling thread's current stream. They hold no slot.
        prefetch: with `device`: how many messages are copied ahead. Not with `delivery="latest"`.
        pin: as for `Publisher`.

    Its values are read-only: see `Message`.
    """

    _kind = FAN_OUT

    def __init__(
        self,
        channel: str,
        *,
        delivery: str = "all",
        spin: float = 100e-6,
        device: Any = None,
        prefetch: int = 0,
        pin: bool | str = "auto",
    ) -> None:
        check_choice("delivery", delivery, ("all", "latest"))
        check_ahead(device, prefetch, latest=delivery == "latest")
        self._latest = delivery == "latest"
        self._flags = ctl.LATEST if self._latest else 0
        super().__init__(channel, spin=spin, device=device, prefetch=prefetch, pin=pin)

    def _prepare(self, member: Member) -> None:
        super()._prepare(member)
        for ring in _retaining_rings(member):
            # the words of a former member at this index must not count for the messages that are kept for us
            row = ring.state + member.index * ring.row
            for word in range(row, row + ring.slots):
                store(ring.words, word, 0)

    def _make_feed(self, *args: Any) -> BroadcastFeed:
        return (LatestFeed if self._latest else BroadcastFeed)(*args, member_uid=self._member.uid)

    def _take(self, feed: BroadcastFeed) -> Message | None:
        if feed.device:
            return take_from_device(self, feed)
        message = None if feed.inlet is None else self._take_usual(feed)
        if message is not None:
            return message
        while seq := feed.next():
            missed = seq - feed.position - 1
            found = array = lease = None
            try:
                found = feed.locate(seq)
                if found is not None:
                    array = self._array(found)
                    lease = feed.take(array, found, seq)
            except (WireError, FileNotFoundError) as error:
                if feed.is_current(seq):
                    self._blame(feed, seq, error)
                    feed.position = seq
                    feed.skip(seq)
                    continue
                lease = None  # read while the publisher was reusing the slot
            if found is None or array is None or lease is None:  # not ours: the publisher took it back
                if not self._latest:
                    feed.position = seq
                elif feed.behind == missed + 1:  # and has published nothing newer
                    feed.position = seq
                    self._missed += missed + 1
                continue
            feed.position = seq
            self._missed += missed
            try:
                value, meta = self._value(found, array, True)
            except WireError as error:
                self._blame(feed, seq, error)
                continue  # the array dies here, and the slot goes back
            if found.kind == TENSOR:
                self._learn(feed, found, value)
            return Message(value, meta, seq, found.nbytes, 1, missed, array, lease, self)
        return None

    def _learn(self, feed: BroadcastFeed, found: Found, value: Any) -> None:
        """From now on, records like this one go by the compiled module, if there is one and nothing is unusual."""
        if self._latest or not feed.started or found.ring.index or not found.raw:
            return
        if feed.inlet is None:
            feed.inlet = usual.inlet(self, feed, found)
            if len(self._feeds) == 1:
                self._inlet = feed.inlet
        if feed.inlet is not None:
            feed.inlet.learn(found.slot, found.raw, found.nbytes, value)

    def _make_private(self, message: Message) -> None:
        if self._ahead is not None:
            return  # it is
        message.value = message.copy()
        message._hold = message._lease = None

    def _is_drained(self, feed: BroadcastFeed) -> bool:
        return not feed.next()


def _retaining_rings(member: Member) -> Iterator[Ring]:
    """The rings of every publisher with `history=`, as far as they can be attached."""
    control = member.control
    for entry in control.members():
        if entry.role != ctl.SENDER:
            continue
        try:
            ledger = Ledger.attach(ledger_name(control.channel, entry.uid), entry.uid, control.capacity)
        except (FileNotFoundError, WireError):
            continue
        ledger.close()
        for index in range(min(ledger.rings, MAX_RINGS) if ledger.history else 0):
            with contextlib.suppress(FileNotFoundError, WireError):
                yield Ring.attach(
                    ring_name(control.channel, entry.uid, index), entry.uid, index,
                    kind=FAN_OUT, capacity=control.capacity, writable=False,
                )  # fmt: skip
