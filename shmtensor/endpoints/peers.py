"""The receivers of a sender: how they are woken, and how a sender sleeps until they give a slot back."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.wakeup import Doorbells
from ..channel.zmtp import Push
from ..codec.encode import encode_empty
from ..codec.implementation import decode, encode
from ..errors import TimedOut
from ..memory.semaphores import COUNT, Sleeper, batched
from ..memory.words import acquire_fence, barrier, store
from ..ring.events import EventLog
from ..ring.pool import Pool
from ..ring.ring import Ring
from ..ring.sequence_table import SequenceTable
from ..statistics import SenderStatistics
from ..wire.record import EMPTY_RECORD, SIZE, pack_bell
from .base import FORKED, LIVENESS_INTERVAL, AsleepWord, Endpoint, check_count, check_timeout


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


class Peers(Endpoint):
    """The part of a sender that deals with its receivers."""

    # where the data of the rings lie, if not in host memory: endpoints/device_fanout.py has its own of these
    _device: Any = None
    _make_ring: Any = staticmethod(Ring.create)
    _describe: Any = staticmethod(encode)
    _describe_empty: Any = staticmethod(encode_empty)
    _decode_empty: Any = staticmethod(decode)
    _lost = 0  # messages that were lost unfinished, after close; see `Traits.counts_lost`
    _sequences: SequenceTable
    _bells: Doorbells
    _sleeper: Sleeper
    _asleep: int
    _asleep_word: AsleepWord
    _control_words: memoryview
    _pool: Pool
    _rings: list[Ring]
    _writer: Any
    _counters: ctl.Counters
    _events: EventLog | None = None
    """What it writes down for a tracer."""

    @property
    @abstractmethod
    def _published(self) -> int:
        """The newest sequence number."""

    def __init__(self) -> None:
        super().__init__()
        self._rung = self._deaths = 0
        self._stop = False  # another thread wants to close: a call that waits gives up
        self._epoch = -1
        self._peers: dict[int, Peer] = {}
        self._listeners: tuple[Peer, ...] = ()

    def _refresh(self) -> None:
        """Read the table of members: who gets what is sent from now on."""
        control = self._member.control
        epoch = self._control_words[ctl.W_EPOCH]
        acquire_fence()
        entries = list(control.members())
        present = {entry.uid: entry for entry in entries if entry.role in (ctl.RECEIVER, ctl.GROUP)}
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
        self._events = self._tracing.follow(self._member, entries)
        self._writer.trace(self._events)
        self._listeners = tuple(
            peer for peer in self._peers.values() if not peer.leaving and peer.entry.role == ctl.RECEIVER
        )
        self._address(epoch)
        self._epoch = epoch

    def _forget(self, peer: Peer) -> None:
        """Remove a receiver that is gone. `_peers` and `gone` change last: after an exception all of it is repeated."""
        self._bells.forget(peer.uid)
        self._writer.forget(peer.index)
        peer.gone = True
        del self._peers[peer.uid]

    def _welcome(self, peer: Peer) -> None:
        """Announce from which message on a newcomer is a recipient."""
        self._sequences.set_start(peer.index, peer.uid, self._published + 1)

    def _address(self, epoch: int) -> None:
        """Tell the writer who gets what is published from now on."""
        listeners = self._listeners
        recipients = tuple(peer.index for peer in self._peers.values() if self._waits_for(peer))
        leaving = tuple(peer.index for peer in self._peers.values() if peer.leaving)
        self._writer.address(
            tuple(index for index in recipients if index not in leaving), leaving, self._is_lockable(), listeners,
            tuple(peer.asleep for peer in listeners), tuple(peer.group for peer in listeners), epoch,
        )  # fmt: skip

    @abstractmethod
    def _waits_for(self, peer: Peer) -> bool:
        """Whether its lease words count."""

    def _is_lockable(self) -> bool:
        """Whether receivers may hold messages by a shared lock."""
        return False

    def _drop_dead(self) -> bool:
        """Ask the kernel about the receivers; remove those that died. True if there were any."""
        control = self._member.control
        dead = [peer for peer in self._peers.values() if not control.is_alive(peer.index)]
        if not dead:
            return False
        self._member.reap()
        for peer in dead:
            if peer.uid in self._peers:
                self._deaths += peer.entry.role == ctl.RECEIVER
                self._forget(peer)
        self._listeners = tuple(peer for peer in self._listeners if not peer.gone)
        self._address(self._epoch)
        return True

    def _wait_for_receivers(self, count: int, timeout: float | None, what: str) -> None:
        check_count("count", count, 0, ctl.CAPACITY)
        check_timeout(timeout)
        self._run(self._wait_inside, count, timeout, what)

    def _wait_inside(self, count: int, timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._state or self._stop:
                self._refuse()
            self._refresh()
            self._drop_dead()
            here = len(self._listeners)
            if here >= count:
                return
            remaining = LIVENESS_INTERVAL if deadline is None else min(LIVENESS_INTERVAL, deadline - time.monotonic())
            if remaining <= 0:
                raise TimedOut(f'channel "{self.name}" has {here} {what} after {timeout:g} s, {count} were expected')
            self._sleep(remaining, lambda: self._control_words[ctl.W_EPOCH] != self._epoch)

    def _wake(self, ring: Ring, slot: int) -> None:
        """Notify receivers that sleep: all of them, of a group one; a producer overrides this to notify one."""
        words = self._control_words
        sleepers, groups = [], set()
        for peer in self._listeners:
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified and peer.group not in groups:
                sleepers.append((peer, asleep))
                if peer.group:
                    groups.add(peer.group)
        if len(sleepers) == 1:
            self._ring_bell(*sleepers[0], ring, slot)
        elif sleepers:
            doorbell = self._bell(ring, slot)
            for peer, asleep in sleepers:
                peer.notified = asleep
            self._rung += len(sleepers)
            self._bells.notify_all([peer for peer, _ in sleepers], doorbell)

    def _ring_bell(self, peer: Peer, asleep: int, ring: Ring, slot: int) -> None:
        """Notify one receiver of a message, once in its sleep of number `asleep`."""
        peer.notified = asleep
        self._rung += 1
        peer.connection = self._bells.notify(peer.uid, self._bell(ring, slot))

    def _bell(self, ring: Ring, slot: int) -> bytes:
        """The doorbell of a message."""
        record = ring.records + slot * SIZE
        return pack_bell(self._member.uid, bytes(ring.view[record : record + SIZE]))

    def _wake_all(self) -> None:
        """Wake every sleeping receiver, to check its senders: there may be nothing more to wait for."""
        words = self._control_words
        doorbell = pack_bell(self._member.uid, EMPTY_RECORD)
        for peer in self._listeners:
            if words[peer.asleep] & 1:
                self._bells.notify(peer.uid, doorbell)

    def _sleep(self, seconds: float, look: Any, target: int = 0) -> Any:
        """Sleep once. Returns what `look()` found just before, else whether a receiver woke this sender.

        With `target`, no receiver does before that message has ended: such a sleep must be short.
        """
        word = self._asleep_word
        self._sleeper.drain()
        word.number = (word.number + 1 | 1) & COUNT
        try:
            store(word.words, word.at, batched(word.number, target) if target else word.number)
            # crash: wait.asleep
            barrier()
            found = look()
            if found:
                return found
            return self._sleeper.wait(seconds)
        finally:
            word.number = (word.number | 1) + 1 & COUNT
            store(word.words, word.at, word.number)
            if self._wait_queue is not None:
                self._wait_queue.disturb()

    def statistics(self) -> SenderStatistics:
        """Counters since this sender was made."""
        if self._state == FORKED:
            self._refuse()
        devices, writer = self._devices.statistics(self._rings), self._writer
        return SenderStatistics(
            sent=self._published, sent_bytes=writer.sent_bytes,
            dropped=self._counters[ctl.C_DROPPED], waits=self._counters[ctl.C_WAITS],
            doorbells=self._rung + writer.notified,
            rings=len(self._rings), slots=self._pool.slots, slots_busy=writer.busy, ring_bytes=self._pool.nbytes,
            receivers=len(self._listeners), dead_receivers=self._deaths,
            **devices,
        )  # fmt: skip

    def _about(self) -> str:
        slots = self._pool.slots
        return f" sent={self._published} rings={len(self._rings)} slots={slots} receivers={len(self._listeners)}"
