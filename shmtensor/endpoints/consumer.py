"""Work queue, the receiving end: every message goes to exactly one consumer; a dead one's messages go to another."""

from __future__ import annotations

import time
from typing import Any

from ..channel import control as ctl
from ..channel.doorbells import Doorbells
from ..channel.membership import Member
from ..errors import ResourceError, WireError
from ..memory.words import barrier
from ..ring.competing import CompetingFeed
from ..ring.feed import TENSOR, Found
from ..ring.layout import L_PUBLISHED, WORK_QUEUE
from ..ring.lease import Claim
from ..views import outgoing, pack
from ..wire.record import pack_bell
from . import usual
from .ahead import check as check_ahead
from .arecv import AsyncReceiver
from .audience import Peer
from .base import FORKED, TICK, check_choice, check_count
from .message import Message
from .receiver import Receiver
from .sources import log


class Consumer(AsyncReceiver[CompetingFeed]):
    """Takes messages off a work queue, each one that no other consumer has.

    A message is done when you say so: by `release()`, by leaving its `with` block without an exception, by asking
    this consumer for the next one (`recv` or iteration), or by `close()`. A message that is not done when its
    consumer dies, or whose `with` block raises, is delivered again, with `attempt` raised.

    Args:
        channel: the channel's name.
        acknowledge: `"next"`, as above; `"release"`, asking for the next message says nothing about the one before:
            for consumers that work on several messages at once.
        max_attempts: a message that was delivered so often and never done is dropped and logged, so that one that
            kills its consumer cannot kill them all.
        spin: seconds that `recv` stays awake before it sleeps.
        device, prefetch, pin: as for `Subscriber`. A message that is copied ahead is claimed, and counts as an
            attempt; if this consumer closes or dies before it was handed out, it goes to another.

    Its values are writable: their consumer is the only one that maps them.
    """

    _kind = WORK_QUEUE
    _abandoned_text = "channel %s: message %d of producer %016x dropped after %d attempts that did not finish it"

    def __init__(
        self,
        channel: str,
        *,
        acknowledge: str = "next",
        max_attempts: int = 5,
        spin: float = 100e-6,
        device: Any = None,
        prefetch: int = 0,
        pin: bool | str = "auto",
    ) -> None:
        check_ahead(device, prefetch)
        check_choice("acknowledge", acknowledge, ("next", "release"))
        check_count("max_attempts", max_attempts, 1, 250)
        self._by_next = acknowledge == "next"
        self._max_attempts = max_attempts
        self._current: tuple[Claim, Any] | None = None
        self._scan_due, self._scan_wanted = 0.0, True
        self._siblings: dict[int, Peer] = {}
        self._siblings_asleep: tuple[int, ...] = ()
        self._inlets: dict[tuple[int, int], Any] = {}  # by sender and ring
        super().__init__(channel, spin=spin, device=device, prefetch=prefetch, pin=pin)

    def _prepare(self, member: Member) -> None:
        self._bells = Doorbells(member.directory)
        super()._prepare(member)

    def _make_feed(self, *args: Any) -> CompetingFeed:
        return CompetingFeed(*args)

    def recv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        self._settle_last()
        message = super().recv(timeout=timeout, copy=copy)
        if self._by_next:  # only now: a message that the caller never got is not acknowledged
            self._current = message._lease, message._hold
        self._share()
        return message

    recv.__doc__ = Receiver.recv.__doc__

    async def arecv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        self._settle_last()
        message = await super().arecv(timeout=timeout, copy=copy)
        if self._by_next:
            self._current = message._lease, message._hold
        self._share()
        return message

    arecv.__doc__ = AsyncReceiver.arecv.__doc__

    def _settle_last(self) -> None:
        """By asking for the next message, the one before is done."""
        if self._state:
            return  # closing has told, and a forked child has no part in it
        current = self._current  # keeps its memory, and with it the lock, until `done` is told
        self._current = None
        if current is not None:
            current[0].acknowledge()

    def _before_next(self) -> None:
        self._settle_last()
        now = time.monotonic()
        if now >= self._scan_due:
            self._scan_due, self._scan_wanted = now + TICK, True

    def _poll(self, patience: int = 0) -> Message | None:
        if self._scan_wanted:
            message = self._scan()
            if message is not None:
                return message
            self._scan_wanted = False
        return super()._poll(patience)

    def _tick(self) -> None:
        super()._tick()
        self._scan_wanted = True

    def _refresh(self) -> None:
        super()._refresh()
        peers = {entry.uid: entry for entry in self._member.peers() if entry.role == ctl.RECEIVER and not entry.leaving}
        for uid in [uid for uid in self._siblings if uid not in peers]:
            del self._siblings[uid]
            self._bells.forget(uid)
        for uid, entry in peers.items():
            if uid not in self._siblings:
                self._siblings[uid] = Peer(entry)
        self._siblings_asleep = tuple(peer.asleep for peer in self._siblings.values())

    def _sleep(self, seconds: float) -> bool:
        rung = super()._sleep(seconds)
        barrier()  # what somebody published who still saw us asleep is visible now, for `_take` to ring another sleeper
        return rung

    def _after_sleep(self) -> None:
        barrier()  # as in `_sleep`

    def _pass_on(self) -> None:
        if self._has_more():
            self._ring_sibling(self._member.uid, None)

    def _take(self, feed: CompetingFeed) -> Message | None:
        message = None if feed.inlet is None else self._take_usual(feed)
        if message is not None:
            if self._siblings and self._has_more():
                self._ring_sibling(feed.uid, None)
            return message
        while seq := feed.next():
            feed.position = seq
            try:
                found = feed.locate(seq)
            except (WireError, FileNotFoundError) as error:
                self._blame(feed, seq, error)
                feed.skip(seq)
                continue
            except ResourceError:  # its ring cannot be mapped now: the next call tries again
                feed.position = seq - 1
                raise
            if found is None or not feed.is_open(found.ring, found.slot, seq, walking=True):
                continue
            if not feed.claim(found.ring, found.slot, seq):
                continue
            message = self._deliver(feed, found, seq)
            if message is not None:
                if found.kind == TENSOR:
                    self._learn(feed, found, message.value)
                if self._siblings and self._has_more():
                    self._ring_sibling(feed.uid, found)
                return message
        return None

    def _learn(self, feed: CompetingFeed, found: Found, value: Any) -> None:
        """From now on, records like this one go by the compiled module, if there is one and nothing is unusual.

        `value` is a tensor, or None for a stream: see `Inlet.learn`."""
        if not found.raw:
            return
        index = feed.uid, found.ring.index
        inlet = self._inlets.get(index)
        if inlet is None:
            inlet = usual.inlet(self, feed, found, self._siblings_asleep)
        if inlet is not None:
            inlet.learn(found.slot, found.raw, found.nbytes, value)
            feed.inlet = self._inlets[index] = inlet  # the next messages are mostly in the same ring
            if len(self._feeds) == 1:
                self._inlet = inlet

    def _unlearn(self) -> None:
        inlets, self._inlets = self._inlets, {}
        for inlet in inlets.values():
            self._inlet = inlet
            super()._unlearn()

    def _compiled(self) -> list[Any]:
        return list(self._inlets.values())

    def _share(self) -> None:
        """If the compiled module took a message while there was more to take and a sibling slept: ring it."""
        inlet = self._inlet
        if inlet is not None and inlet.more and self._mutex.acquire(False):  # else a thread of ours is taking more
            inlet.more = False
            self._ring_if_more()

    def _share_others(self) -> None:
        """The same where there are several senders, and a sibling sleeps."""
        if self._mutex.acquire(False):
            self._ring_if_more()

    def _ring_if_more(self) -> None:
        """Under the mutex, which is let go."""
        try:
            if not self._state and self._has_more():
                self._ring_sibling(self._member.uid, None)
        finally:
            self._mutex.release()

    def _scan(self) -> Message | None:
        """A look through all records, for messages that somebody claimed and did not finish."""
        for feed in self._feeds:
            for ring, slot, seq in feed.unfinished():
                if seq > feed.position:
                    break  # the walk gets there
                if not feed.is_open(ring, slot, seq, walking=False) or not feed.claim(ring, slot, seq):
                    continue
                try:
                    found = feed.read(ring, slot, seq)
                except WireError as error:
                    self._blame(feed, seq, error)
                    found = None
                if found is None:
                    feed.drop(ring, slot, seq)
                    continue
                message = self._deliver(feed, found, seq)
                if message is not None:
                    return message
        return None

    def _deliver(self, feed: CompetingFeed, found: Found, seq: int) -> Message | None:
        """Make a message of a claimed record, or finish it: it is damaged, or was never finished too often."""
        attempt = feed.attempt
        if attempt > self._max_attempts:
            self._abandoned += 1
            log.error(self._abandoned_text, self.name, seq, feed.uid, attempt - 1)
            feed.drop(found.ring, found.slot, seq)
            return None
        try:
            array = self._array(found)
            claim = feed.take(array, found, seq)
        except WireError as error:
            self._blame(feed, seq, error)
            feed.drop(found.ring, found.slot, seq)
            return None
        except BaseException:
            feed.ledger.locks.unlock(seq)
            raise
        try:
            value, meta = self._value(found, array, False)
        except WireError as error:
            self._blame(feed, seq, error)
            claim.acknowledge()
            return None
        self._redelivered += attempt > 1
        return Message(value, meta, seq, found.nbytes, attempt, 0, array, claim, self)

    def _has_more(self) -> bool:
        """Whether something is published that this consumer has not looked at."""
        return any(feed.words[L_PUBLISHED] > feed.position for feed in self._feeds)

    def _ring_sibling(self, sender: int, found: Found | None) -> None:
        """There is more to do: ring another sleeper, as the sender would have."""
        words = self._control_words
        for peer in self._siblings.values():
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.rung:
                peer.rung = asleep
                record = outgoing.EMPTY_RECORD if found is None else found.record()
                self._bells.ring(peer.uid, pack_bell(sender, record))
                return

    def _make_private(self, message: Message) -> None:
        if self._ahead is None:
            message.value = pack.copy_value(message.value)

    def _acknowledge(self, lease: Any) -> None:
        if self._state == FORKED:
            return
        if self._current is not None:
            self._forget_current(lease)
        lease.acknowledge()

    def _reject(self, lease: Any) -> None:
        self._forget_current(lease)

    def _forget_current(self, lease: Any) -> None:
        current = self._current
        if current is not None and current[0] is lease:
            self._current = None

    def _settle_current(self, acknowledge: bool) -> None:
        self._pass_on()  # perhaps we were rung for it
        self._bells.close()
        if self._current is not None and acknowledge:
            self._acknowledge(self._current[0])
        self._current = None

    def _is_drained(self, feed: CompetingFeed) -> bool:
        """Nothing is left to claim, and nobody holds what could come back."""
        return not feed.next() and next(feed.unfinished(), None) is None

    def _is_over(self) -> bool:
        """Also over, for now, when this consumer holds messages itself and only others' unfinished ones are left: to
        wait for each other's would be for ever."""
        return super()._is_over() or (
            bool(self._feeds) and all(feed.gone and not feed.next() for feed in self._feeds) and self._holds_claims()
        )

    def _holds_claims(self) -> bool:
        claims = (claim for feed in self._feeds for claim in list(feed.leases.values()))
        return any(not getattr(claim, "acknowledged", True) for claim in claims)
