"""The receivers of one sender: which of them get its messages, waking them, and handling their deaths.

A sender has one object of these: `Subscribers` if every receiver gets every message, `Consumers` if one of them does.
It is used under the sender's mutex.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.membership import Member, Tracing
from ..channel.wakeup import Doorbells
from ..channel.zmtp import Push
from ..memory.words import acquire_fence
from ..ring.events import EventLog
from ..ring.layout import L_PUBLISHED
from ..ring.ring import Ring, SequenceTable
from ..wire.record import EMPTY_RECORD, SIZE, pack_bell

if TYPE_CHECKING:
    from .device_fanout import DeviceMemory

log = logging.getLogger("shmtensor.endpoints")

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Peer:
    """A receiver as a sender sees it, or a group of receivers, which is one recipient and has no inbox."""

    __slots__ = ("asleep", "connection", "entry", "gone", "group", "index", "leaving", "notified", "uid", "welcome")

    def __init__(self, entry: Entry) -> None:
        self.entry, self.index, self.uid, self.group = entry, entry.index, entry.uid, entry.group
        self.asleep = ctl.asleep_word(entry.index)
        self.notified = 0
        self.connection: Push | None = None
        self.gone = self.welcome = False  # `welcome`: from which message on it is a recipient was announced
        self.leaving = entry.leaving


class Recipients(ABC):
    """Base of the recipients of a publisher and of a producer.

    Args:
        member, sequences, writer, tracing: the sender's.
        history: how many of the newest messages a newcomer gets first.
    """

    def __init__(
        self, member: Member, sequences: SequenceTable, writer: Any, tracing: Tracing, history: int = 0
    ) -> None:
        self._member, self._sequences, self._writer, self._tracing = member, sequences, writer, tracing
        self._history = history
        self._words = member.control.words
        self._bells = Doorbells(member.directory)
        self._peers: dict[int, Peer] = {}
        self.listeners: tuple[Peer, ...] = ()
        """The receivers that take messages now."""
        self.epoch = -1
        """The epoch of the table of members that was read last."""
        self.events: EventLog | None = None
        """The event log of the sender while it is traced; else None."""
        self.excludes: Callable[[Entry], bool] | None = None
        """A function that says which receivers are excluded: they get nothing, and the sender neither waits for them
        nor wakes them. A relay's senders exclude relays that lead back. Set it before the first message."""
        self.notified = self.deaths = 0
        self._dead: set[int] = set()  # they were dropped, and are in the table until somebody has the channel's lock
        self.local: frozenset[int] = frozenset()
        """The endpoints of this process, once it ends: a publisher does not wait for these."""

    # --- the table of members

    @property
    def is_stale(self) -> bool:
        """Whether members have joined or left since the table of members was read."""
        return bool(self._words[ctl.W_EPOCH] != self.epoch)

    def refresh_if_stale(self) -> None:
        """Read the table of members if it has changed."""
        if self._words[ctl.W_EPOCH] != self.epoch:
            self.refresh()

    def refresh(self) -> None:
        """Read the table of members, which decides who gets the messages that are sent from now on."""
        control = self._member.control
        epoch = self._words[ctl.W_EPOCH]
        acquire_fence()
        entries = list(control.members())
        present = {entry.uid: entry for entry in entries if entry.role in (ctl.RECEIVER, ctl.GROUP)}
        self._dead &= present.keys()
        for uid in self._dead:
            del present[uid]
        if self.excludes is not None:
            present = {uid: entry for uid, entry in present.items() if not self.excludes(entry)}
        for uid in [uid for uid in self._peers if uid not in present]:
            self._forget(self._peers[uid])
        for uid, entry in present.items():
            peer = self._peers.get(uid)
            if peer is None:
                peer = Peer(entry)
                self._peers[uid] = peer
            if not peer.welcome:
                if not entry.leaving:
                    self._welcome(peer)
                peer.welcome = True
            peer.leaving = entry.leaving
        # crash: refresh.started
        self.events = self._tracing.follow(self._member, entries)
        self._writer.trace(self.events)
        self.listeners = tuple(
            peer for peer in self._peers.values() if not peer.leaving and peer.entry.role == ctl.RECEIVER
        )
        self._address(epoch)
        self.epoch = epoch

    def _forget(self, peer: Peer) -> None:
        """Remove a receiver that is gone. `_peers` and `gone` change last: after an exception all of it is repeated."""
        self._bells.forget(peer.uid)
        self._writer.forget(peer.index)
        peer.gone = True
        del self._peers[peer.uid]

    def _welcome(self, peer: Peer) -> None:
        """Store the first message for which a new receiver is a recipient; with history, this includes the kept
        messages."""
        start = max(1, self._sequences.words[L_PUBLISHED] + 1 - self._history)
        if self._history and self._waits_for(peer):
            self._writer.welcome(peer.index, start)
        self._sequences.set_start(peer.index, peer.uid, start)

    def end_history(self) -> None:
        """Keep no more messages for receivers that join later."""
        self._history = self._writer.history = 0

    def _address(self, epoch: int) -> None:
        """Tell the writer who gets what is published from now on."""
        listeners = self.listeners
        recipients = tuple(peer.index for peer in self._peers.values() if self._waits_for(peer))
        leaving = tuple(peer.index for peer in self._peers.values() if peer.leaving)
        # receivers may hold messages by a shared lock: newcomers, those that are kept; latest-only ones, any
        lockable = self._history > 0 or any(peer.entry.flags & ctl.LATEST for peer in listeners)
        self._writer.address(
            tuple(index for index in recipients if index not in leaving), leaving, lockable, listeners,
            tuple(peer.asleep for peer in listeners), tuple(peer.group for peer in listeners), epoch,
        )  # fmt: skip

    @abstractmethod
    def _waits_for(self, peer: Peer) -> bool:
        """Whether the lease words of a peer count."""

    def drop_dead(self) -> bool:
        """Check by the receivers' locks which of them live; remove the dead. True if that may have freed slots."""
        control = self._member.control
        dead = [peer for peer in self._peers.values() if not control.is_alive(peer.index)]
        if not dead and not self._dead:
            return False
        self._member.reap()
        for peer in dead:
            if peer.uid in self._peers:
                self.deaths += peer.entry.role == ctl.RECEIVER
                self._dead.add(peer.uid)
                self._forget(peer)
        self.listeners = tuple(peer for peer in self.listeners if not peer.gone)
        self._address(self.epoch)
        return bool(dead)

    def count(self) -> int:
        """How many receivers there are now."""
        self.refresh()
        self.drop_dead()
        return len(self.listeners)

    @abstractmethod
    def is_settled(self) -> bool:
        """Whether everything sent was taken (fan-out) or done (work queue), and device memory unmapped: for `close`."""

    def have_unread(self) -> bool:
        """Whether anything that was sent is still to be read once this sender has left."""
        return not self.is_settled()

    def report_lost(self, sender: Any, count: int) -> None:  # noqa: B027
        """Report that `count` messages are lost unfinished: the sender has left as the last member of its channel."""

    # --- waking receivers

    @abstractmethod
    def wake(self, ring: Ring, slot: int) -> None:
        """Notify sleeping receivers of a message."""

    def _notify(self, peer: Peer, asleep: int, ring: Ring, slot: int) -> None:
        """Notify one receiver of a message, at most once in its sleep of number `asleep`."""
        peer.notified = asleep
        self.notified += 1
        peer.connection = self._bells.notify(peer.uid, self._bell(ring, slot))

    def _bell(self, ring: Ring, slot: int) -> bytes:
        """The doorbell of a message."""
        record = ring.records + slot * SIZE
        return pack_bell(self._member.uid, bytes(ring.view[record : record + SIZE]))

    def wake_all(self) -> None:
        """Wake every sleeping receiver, to check its senders: there may be nothing more to wait for."""
        doorbell = pack_bell(self._member.uid, EMPTY_RECORD)
        for peer in self.listeners:
            if self._words[peer.asleep] & 1:
                self._bells.notify(peer.uid, doorbell)

    def close(self) -> None:
        """Close the connections to their inboxes. Idempotent."""
        self._bells.close()


class Subscribers(Recipients):
    """The recipients of a publisher: each gets every message. `memory`: the device memory of the messages, if they are
    not in host memory."""

    def __init__(self, *args: Any, memory: DeviceMemory | None) -> None:
        super().__init__(*args)
        self._memory = memory

    def _waits_for(self, peer: Peer) -> bool:
        # a group takes nothing from device memory
        return peer.entry.is_recipient and (self._memory is None or peer.entry.role != ctl.GROUP)

    def is_settled(self) -> bool:
        local = tuple(peer.index for peer in self._peers.values() if peer.uid in self.local)
        settled: bool = self._writer.is_settled(local)
        return settled and (self._memory is None or self._memory.is_unmapped(self._writer.rings, self._member.control))

    def have_unread(self) -> bool:
        """Also what newest-only receivers are to get, for which nothing waits: see channel/cleanup.py."""
        if super().have_unread():
            return True
        has_sent = self._memory is None and self._sequences.words[L_PUBLISHED] > 0
        return has_sent and any(peer.entry.flags & ctl.LATEST for peer in self.listeners)

    def wake(self, ring: Ring, slot: int) -> None:
        """Notify every sleeping receiver, but only one of each group."""
        words = self._words
        sleepers, groups = [], set()
        for peer in self.listeners:
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified and peer.group not in groups:
                sleepers.append((peer, asleep))
                if peer.group:
                    groups.add(peer.group)
        if len(sleepers) == 1:
            self._notify(*sleepers[0], ring, slot)
        elif sleepers:
            doorbell = self._bell(ring, slot)
            for peer, asleep in sleepers:
                peer.notified = asleep
            self.notified += len(sleepers)
            self._bells.notify_all([peer for peer, _ in sleepers], doorbell)


class Consumers(Recipients):
    """The recipients of a producer: one of them gets each message."""

    wakes = True
    """Whether `wake` does so."""
    _next = 0

    def _waits_for(self, peer: Peer) -> bool:
        return False  # a slot's own words say which consumer has its message, if one has

    def drop_dead(self) -> bool:
        """Also free the slots of consumers that died after `done` and before `released`."""
        freed: bool = self._writer.reclaim()
        return super().drop_dead() or freed

    def is_settled(self) -> bool:
        return self._writer.is_settled(())  # type: ignore[no-any-return]

    def wake(self, ring: Ring, slot: int) -> None:
        """Notify one sleeping consumer; it notifies another if it finds more messages."""
        listeners, words = self.listeners, self._words
        count = len(listeners) if self.wakes else 0
        for step in range(count):
            turn = self._next + step
            peer = listeners[turn % count]
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified:
                self._next = turn + 1
                self._notify(peer, asleep, ring, slot)
                return

    def report_lost(self, sender: Any, count: int) -> None:
        """Warn of the lost messages, in the log and by a `ResourceWarning`."""
        text = (
            f'channel "{sender.name}": {count} message{"s" if count > 1 else ""} that no consumer has finished '
            f"end{'' if count > 1 else 's'} with this Producer, the last member of the channel: start a Consumer "
            "before close(), and let close(linger=seconds) wait until everything is done (linger=None: for ever)"
        )
        log.warning("%s", text)
        warnings.warn(text, ResourceWarning, stacklevel=_depth(), source=sender)


def _depth() -> int:
    """The `stacklevel` of the nearest frame outside this package."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth
