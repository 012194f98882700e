"""The sending end of a channel: find a slot, copy, publish, wake. Subclasses say who must get a message."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np

from ..channel import control as ctl
from ..channel import membership
from ..channel.control import Entry
from ..channel.inbox import Doorbells
from ..channel.membership import Member
from ..channel.names import ledger_name, ring_name
from ..errors import RingFull, TimedOut
from ..memory.semaphores import Sleeper
from ..memory.words import barrier, settle, store
from ..ring.layout import L_CLOSED, L_PUBLISHED, MAX_SLOTS, R_RECORDS, RECORD_WORDS, round_slot
from ..ring.ledger import Ledger
from ..ring.pool import Place, Pool
from ..ring.ring import Busy, Ring
from ..statistics import SenderStatistics
from ..units import format_bytes, parse_bytes
from ..views import outgoing
from ..views.outgoing import Outgoing
from ..wire.record import SIZE, pack_bell
from .base import CLOSED, TICK, Endpoint, check_choice, check_count, check_timeout
from .loan import Loan

_FULL = ("block", "grow", "drop", "error")


class Peer:
    """A receiver as a sender sees it."""

    __slots__ = ("asleep", "entry", "gone", "index", "leaving", "rung", "uid")

    def __init__(self, entry: Entry) -> None:
        self.entry, self.index, self.uid = entry, entry.index, entry.uid
        self.asleep = ctl.asleep_word(entry.index)
        self.rung = 0
        self.gone = False
        self.leaving = entry.leaving


class Sender(Endpoint):
    """Base of `Publisher` and `Producer`."""

    _kind: int

    def __init__(
        self,
        channel: str,
        *,
        slots: int,
        slot_bytes: int | str | None,
        full: str,
        max_bytes: int | str | None,
        history: int = 0,
    ) -> None:
        check_count("slots", slots, 1, MAX_SLOTS)
        check_choice("full", full, _FULL)
        self._slots, self._full = slots, full
        self._slot_bytes = None if slot_bytes is None else round_slot(parse_bytes(slot_bytes, "slot_bytes"))
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._history = history
        self._published = self._sent_bytes = self._dropped = self._waits = self._rung = self._deaths = 0
        self._nap = 0
        self._stop = False  # another thread wants to close: whoever waits gives up
        self._epoch = -1
        self._peers: dict[int, Peer] = {}
        self._listeners: tuple[Peer, ...] = ()
        self._recipients: tuple[Peer, ...] = ()
        self._locked = history > 0
        super().__init__()
        self._member = membership.join(channel, self._kind, ctl.SENDER, 0, self._prepare)
        self._control_words = self._member.control.words
        self._bells = Doorbells(self._member.directory)
        if self._slot_bytes is not None:
            try:
                self._pool.add(self._slot_bytes)
            except BaseException:
                self.close()
                raise

    def _prepare(self, member: Member) -> None:
        order = 1 << 16 if self._full == "grow" else max(1024, 1 << (4 * self._slots - 1).bit_length())
        name = ledger_name(member.channel, member.uid)
        self._ledger = Ledger.create(
            name, member.uid, capacity=member.control.capacity, order_size=order, history=self._history
        )
        self._words, self._mask, self._order = self._ledger.words, self._ledger.mask, self._ledger.shape.order
        self._pool = Pool(
            self._ledger, member.channel, lambda index: ring_name(member.channel, member.uid, index),
            kind=self._kind, slots=self._slots, slot_bytes=self._slot_bytes, max_bytes=self._max_bytes,
        )  # fmt: skip
        self._rings = self._pool.rings
        # crash: join.ledger
        self._sleeper = Sleeper(name, create=True)
        self._asleep = ctl.asleep_word(member.index)

    # --- sending

    def send(self, value: Any, meta: Any = None, *, timeout: float | None = None) -> int:
        """Copy a value into the ring and publish it.

        Args:
            value: a tensor, an ndarray, or a dict, list or tuple of these with JSON scalars at the other leaves. It
            is copied
                before `send` returns: changing it afterwards changes nothing that was sent.
            meta: a small JSON-able dict that travels along.
            timeout: seconds to wait for a slot with `full="block"` or `"grow"`; None waits for ever, 0 does not wait.

        Returns:
            The message's sequence number, from 1; 0 if `full="drop"` threw it away.

        Raises:
            RingFull: no slot was given back in time, or at once with `full="error"`.
            ArgumentTypeError: the value holds something that cannot be sent; the message names where.
            ResourceError: a ring is needed and `/dev/shm` or `max_bytes` has no room for it.
            ClosedError, ForkedError: the sender is closed, or was made by this process's parent.
        """
        with self._mutex:
            if self._state:
                self._refuse()
            out = outgoing.describe(value, meta)
            # crash: send.described
            place = self._usual_place(out.total) or self._place(out.total, timeout)
            if place is None:
                return 0
            ring, slot = place
            # crash: send.acquired
            outgoing.write(out, value, ring.buffer, ring.address, slot * ring.slot_bytes)
            # crash: send.copied
            return self._publish(ring, slot, out, None)

    def _usual_place(self, nbytes: int) -> Place | None:
        """The next slot of the only ring, if the message fits it and it is free: what `_place` nearly always finds."""
        if self._control_words[ctl.W_EPOCH] == self._epoch and len(self._rings) == 1:
            ring = self._rings[0]
            slot = ring.cursor
            if nbytes <= ring.slot_bytes:
                entry = ring.busy[slot]
                if entry is None or (entry[2] == 1 and self._is_free(ring, entry)):
                    ring.busy[slot] = None
                    ring.cursor = slot + 1 if slot + 1 < ring.slots else 0
                    store(
                        ring.words, R_RECORDS + slot * RECORD_WORDS, 0
                    )  # nobody may take the old record for a new one
                    return ring, slot
        return None

    def loan(self, shape: tuple[int, ...], dtype: Any, meta: Any = None, *, timeout: float | None = None) -> Loan:
        """Borrow a slot to compute into: no copy at all. Sent on leaving the `with` block; an exception discards it.

        Args:
            shape: the tensor's shape.
            dtype: a torch dtype, for `loan.tensor`, or anything that `numpy.dtype` takes, for `loan.array`.
            meta, timeout: as for `send`.

        The memory belongs to the loan until the block is left, then to the receivers: do not write to it any more.
        If a view of it
        is kept nevertheless, its slot is not used again while that view lives.

        >>> import shmtensor, torch
        >>> with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
        ...     with pub.loan((2, 3), torch.float32) as loan:
        ...         _ = loan.tensor.fill_(1.5)
        ...     sub.recv(timeout=5).value.sum().item()
        9.0
        """
        with self._mutex:
            if self._state:
                self._refuse()
            out = outgoing.describe_empty(shape, dtype, meta)
            place = self._place(out.total, timeout)
            if place is None:
                raise RingFull(f'channel "{self.name}": no slot is free for a loan, and full="drop" does not wait')
            ring, slot = place
            array = np.ndarray((out.total,), np.uint8, ring.buffer, slot * ring.slot_bytes)
            span = ring.span(out.total)
            ring.busy[slot : slot + span] = [(0, slot, span, (), False, weakref.ref(array))] * span
            return Loan(self, ring, slot, out, array, dtype, shape)

    def _commit(self, ring: Ring, slot: int, out: Outgoing, guard: weakref.ref[Any]) -> int:
        with self._mutex:
            if self._state:
                self._refuse()
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            outgoing.write(out, None, ring.buffer, ring.address, slot * ring.slot_bytes)
            return self._publish(ring, slot, out, guard)

    def _discard(self, ring: Ring, slot: int) -> None:
        with self._mutex:
            entry = ring.busy[slot]
            if entry is not None:
                ring.forget(entry)

    def _publish(self, ring: Ring, slot: int, out: Outgoing, guard: weakref.ref[Any] | None) -> int:
        """Record, order, `published`: a death before the last store leaves nothing visible."""
        seq = self._published + 1
        record = R_RECORDS + slot * RECORD_WORDS
        if ring.described[slot] is out:
            store(ring.words, record + 1, time.monotonic_ns())
        else:
            self._pool.write_record(ring, slot, out)
        # crash: publish.record
        store(ring.words, record, seq)
        store(self._words, self._order + (seq & self._mask), ring.index << 32 | slot)
        # crash: publish.ordered
        span = 1 if out.total <= ring.slot_bytes else ring.span(out.total)
        entry = (seq, slot, span, self._recipients, self._locked, guard)
        if span == 1:
            ring.busy[slot] = entry
        else:
            ring.busy[slot : slot + span] = [entry] * span
        store(self._words, L_PUBLISHED, seq)  # pairs with the position check of the receivers' feeds
        self._published = seq
        self._sent_bytes += out.nbytes
        # crash: publish.published
        self._wake(ring, slot)
        # crash: publish.rung
        return seq

    def _wake(self, ring: Ring, slot: int) -> None:
        """Ring receivers that sleep. A publisher rings all of them; a producer overrides this to ring one."""
        words = self._control_words
        for peer in self._listeners:
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.rung:
                self._ring_bell(peer, asleep, ring, slot)

    def _ring_bell(self, peer: Peer, asleep: int, ring: Ring, slot: int) -> None:
        peer.rung = asleep
        self._rung += 1
        record = ring.records + slot * SIZE
        self._bells.ring(peer.uid, pack_bell(self._member.uid, bytes(ring.view[record : record + SIZE])))

    # --- slots

    def _is_free(self, ring: Ring, entry: Busy) -> bool:
        raise NotImplementedError

    def _place(self, nbytes: int, timeout: float | None) -> Place | None:
        """A free place for `nbytes`, after whatever `full=` says; None: drop the message."""
        check_timeout(timeout)
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        pool = self._pool
        pool.make_room(nbytes)
        place = pool.find(nbytes, self._is_free)
        if place is None and self._drop_dead():
            place = pool.find(nbytes, self._is_free)
        if place is not None:
            return place
        if self._full == "drop":
            self._dropped += 1
            return None
        if self._full == "error" or timeout == 0:
            raise RingFull(self._full_text(nbytes))
        if self._full == "grow" and pool.may_grow(nbytes):
            pool.add(nbytes)
            return pool.find(nbytes, self._is_free)
        return self._wait_for_slot(nbytes, timeout)

    def _wait_for_slot(self, nbytes: int, timeout: float | None) -> Place:
        """Sleep on the semaphore until a slot is given back: docs/protocols.md, section 4."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waits += 1
        while True:
            remaining = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            if remaining <= 0:
                raise RingFull(self._full_text(nbytes))
            woken = self._sleep(remaining, lambda: self._pool.find(nbytes, self._is_free))
            if isinstance(woken, tuple):
                return woken
            if self._stop:
                self._refuse()
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            if not woken:
                self._drop_dead()
            place = self._pool.find(nbytes, self._is_free)
            if place is not None:
                return place

    def _sleep(self, seconds: float, look: Any) -> Any:
        """One sleep: what `look()` found at the second look, else whether somebody posted."""
        words, member = self._control_words, self._asleep
        self._sleeper.drain()
        self._nap += 1
        store(words, member, self._nap)
        # crash: wait.asleep
        try:
            barrier()
            found = look()
            if found:
                return found
            return self._sleeper.wait(seconds)
        finally:
            self._nap += 1
            store(words, member, self._nap)

    def _full_text(self, nbytes: int) -> str:
        slots = self._pool.slots
        holders = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners) or "nobody"
        return (
            f'channel "{self.name}": no room for {format_bytes(nbytes)}, all {slots} slots wait for their receivers '
            f'({holders}): receive faster, release messages, or pass slots=, timeout= or full="grow", "drop"'
        )

    # --- members

    def _refresh(self) -> None:
        """Read the table: who gets what is sent from now on."""
        control = self._member.control
        epoch = self._control_words[ctl.W_EPOCH]
        settle()
        present = {entry.uid: entry for entry in control.members() if entry.role == ctl.RECEIVER}
        for uid in list(self._peers):
            if uid not in present:
                self._peers.pop(uid).gone = True
                self._bells.forget(uid)
        for uid, entry in present.items():
            peer = self._peers.get(uid)
            if peer is None:
                peer = self._peers[uid] = Peer(entry)
                if not entry.leaving:
                    self._welcome(peer)
            peer.leaving = entry.leaving
        # crash: refresh.started
        self._listeners = tuple(peer for peer in self._peers.values() if not peer.leaving)
        self._choose_recipients()
        self._epoch = epoch

    def _welcome(self, peer: Peer) -> None:
        """Say from which message on a newcomer is a recipient."""
        self._ledger.set_start(peer.index, peer.uid, self._published + 1)

    def _choose_recipients(self) -> None:
        """From `_listeners`: who must give a slot back, and whether locks may hold one."""

    def _drop_dead(self) -> bool:
        """Ask the kernel about the receivers; remove those that died. True if there were any."""
        control = self._member.control
        dead = [peer for peer in self._peers.values() if not control.is_alive(peer.index)]
        if not dead:
            return False
        self._member.reap()
        for peer in dead:
            if self._peers.pop(peer.uid, None) is not None:
                peer.gone = True
                self._deaths += 1
                self._bells.forget(peer.uid)
        self._listeners = tuple(peer for peer in self._listeners if not peer.gone)
        self._choose_recipients()
        return True

    def _wait_for_receivers(self, count: int, timeout: float | None, what: str) -> None:
        check_count("count", count, 0, ctl.CAPACITY)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._mutex:
            while True:
                if self._state or self._stop:
                    self._refuse()
                self._refresh()
                self._drop_dead()
                here = len(self._listeners)
                if here >= count:
                    return
                remaining = TICK if deadline is None else min(TICK, deadline - time.monotonic())
                if remaining <= 0:
                    raise TimedOut(
                        f'channel "{self.name}" has {here} {what} after {timeout:g} s, {count} were expected'
                    )
                self._sleep(remaining, lambda: self._control_words[ctl.W_EPOCH] != self._epoch)

    # --- leaving

    def _is_settled(self) -> bool:
        """Whether everything sent has been taken (fan-out) or done (work queue) by those who should."""
        raise NotImplementedError

    def close(self, linger: float | None = 0) -> None:
        """Say that nothing follows, and leave. Idempotent.

        Messages that receivers have not taken yet stay readable for the members that are there; the last of them
        removes the
        rings. With nobody there they are dropped.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever.
        """
        check_timeout(linger)
        if self._state:
            return
        self._leave(linger)

    def _leave(self, linger: float | None) -> None:
        self._stop = True
        with self._mutex:
            if self._state:
                return
            try:
                store(self._words, L_CLOSED, 1)
                # crash: close.said
                self._linger(linger)
            finally:
                self._state = CLOSED
                # crash: close.leaving
                self._member.leave(keep=not self._is_settled())
                self._rouse()
                self._bells.close()
                self._sleeper.close()
                self._ledger.close()
        # crash: close.done

    def _linger(self, linger: float | None) -> None:
        deadline = None if linger is None else time.monotonic() + linger
        self._refresh()
        while not self._is_settled() and not (self._drop_dead() and self._is_settled()):
            remaining = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            if remaining <= 0:
                return
            self._sleep(remaining, self._is_settled)
            self._refresh()

    def _rouse(self) -> None:
        """Wake every sleeping receiver so that it looks around: there may be nothing more to wait for."""
        words = self._control_words
        bell = pack_bell(self._member.uid, outgoing.EMPTY_RECORD)
        for peer in self._listeners:
            if words[peer.asleep] & 1:
                self._bells.ring(peer.uid, bell)

    def _at_exit(self) -> None:
        self._leave(0)

    def statistics(self) -> SenderStatistics:
        """Counters since this sender was made."""
        return SenderStatistics(
            sent=self._published, sent_bytes=self._sent_bytes, dropped=self._dropped, waits=self._waits,
            doorbells=self._rung,
            rings=len(self._rings), slots=self._pool.slots, slots_busy=self._pool.busy, ring_bytes=self._pool.nbytes,
            receivers=len(self._listeners), dead_receivers=self._deaths,
        )  # fmt: skip

    def _about(self) -> str:
        slots = self._pool.slots
        return f" sent={self._published} rings={len(self._rings)} slots={slots} receivers={len(self._listeners)}"
