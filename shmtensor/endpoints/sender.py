"""The sending end of a channel: find a slot, copy, publish, wake. Subclasses say who must get a message."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from typing import Any

from .. import hot
from ..channel import control as ctl
from ..channel import membership
from ..channel.doorbells import Doorbells
from ..channel.membership import Member
from ..channel.names import ledger_name, ring_name
from ..errors import RingFull
from ..memory.semaphores import Sleeper
from ..memory.words import store
from ..ring.layout import L_CLOSED, L_PUBLISHED, MAX_SLOTS, R_RECORDS, RECORD_WORDS, round_slot
from ..ring.ledger import Ledger
from ..ring.pool import Place, Pool
from ..ring.ring import Busy, Ring
from ..units import format_bytes, parse_bytes
from ..views import moves, outgoing
from ..views.outgoing import Outgoing
from . import usual
from .audience import Audience, Peer
from .base import CLOSED, CLOSING, SPIN_NS, TICK, check_choice, check_count, check_timeout
from .devices import check_pin, send
from .loan import Loan

_FULL = ("block", "grow", "drop", "error")
_SPIN = 100e-6  # seconds that a sender without a slot looks for one before it sleeps


class Sender(Audience):
    """Base of `Publisher` and `Producer`."""

    _kind: int
    _budget: int | None = None  # bytes of a ring whose number of slots nobody has asked for

    def __init__(
        self,
        channel: str,
        *,
        slots: int,
        slot_bytes: int | str | None,
        full: str,
        max_bytes: int | str | None,
        history: int = 0,
        pin: bool | str = "auto",
    ) -> None:
        check_pin(pin)
        self._pin = pin
        check_count("slots", slots, 1, MAX_SLOTS)
        check_choice("full", full, _FULL)
        self._slots, self._full = slots, full
        self._slot_bytes = None if slot_bytes is None else round_slot(parse_bytes(slot_bytes, "slot_bytes"))
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._sent_bytes = self._dropped = self._waits = 0
        self._recipients: tuple[Peer, ...] = ()
        self._history, self._locked = history, history > 0
        self._outbox: Any = None
        self._patience = SPIN_NS if full == "block" else 0
        self._ending = False  # the process ends: whoever lingers in another thread gives up
        super().__init__()
        self._member = membership.join(channel, self._channel_kind, ctl.SENDER, 0, self._prepare)
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
            name, member.uid, capacity=member.control.capacity, order_size=order, history=self._history,
            device=self._device is not None,
        )  # fmt: skip
        self._words, self._mask, self._order = self._ledger.words, self._ledger.mask, self._ledger.shape.order
        self._pool = Pool(
            self._ledger, member.channel, lambda index: ring_name(member.channel, member.uid, index), kind=self._kind,
            slots=self._slots, slot_bytes=self._slot_bytes, max_bytes=self._max_bytes, budget=self._budget,
            make=self._make_ring,
        )  # fmt: skip
        self._rings = self._pool.rings
        # crash: join.ledger
        self._sleeper = Sleeper(name, create=True)
        self._asleep = ctl.asleep_word(member.index)

    @property
    def _published(self) -> int:
        return self._words[L_PUBLISHED]

    # --- sending

    def send(self, value: Any, meta: Any = None, *, timeout: float | None = None) -> int:
        """Copy a value into the ring and publish it.

        Args:
            value: a tensor, an ndarray, or a dict, list or tuple of these with JSON scalars at the other leaves. It
                is copied before `send` returns: changing it afterwards changes nothing that was sent. CUDA tensors
                are copied on a stream of the sender's own, after what the calling thread's current stream holds, and
                the message is published when that is done: docs/cuda.md.
            meta: a small JSON-able dict that travels along.
            timeout: seconds to wait for a slot with `full="block"` or `"grow"`; None waits for ever, 0 does not wait.

        Returns:
            The message's sequence number, from 1; 0 if `full="drop"` threw it away.

        Raises:
            RingFull: no slot was given back in time, or at once with `full="error"`.
            ArgumentTypeError: the value holds something that cannot be sent; the message names where.
            ResourceError: a ring is needed and `/dev/shm` or `max_bytes` has no room for it.
            CudaError: a copy from a CUDA device failed; nothing was published.
            ClosedError, ForkedError: the sender is closed, or was made by this process's parent.
        """
        outbox = self._outbox
        if meta is None and outbox is not None:
            seq: int | None = outbox.send(value, 0 if timeout == 0 else self._patience)
            if seq is not None:
                return seq if seq > 0 else self._wake_late(-seq)
        return self._send(value, meta, timeout)

    def _send(self, value: Any, meta: Any, timeout: float | None) -> int:
        """`send` by the Python code, which comes by `_publish`."""
        with self._mutex:
            if self._state:
                self._refuse()
            out = self._describe(value, meta)
            # crash: send.described
            place = self._usual_place(out.total) or self._place(out.total, timeout)
            if place is None:
                return 0
            ring, slot = place
            # crash: send.acquired
            if out.on_device:
                return send(self, out, ring, slot)
            outgoing.write(out, value, ring.buffer, ring.address, slot * ring.slot_bytes)
            # crash: send.copied
            seq = self._publish(ring, slot, out, None)
            if out.is_plan and hot.BUILT:
                self._learn(value, out, ring, slot)
            return seq

    def _learn(self, value: Any, out: Outgoing, ring: Ring, slot: int) -> None:
        """From now on, tensors like this one go by the compiled module, if there is one and nothing is unusual."""
        if self._locked or len(self._rings) != 1 or out.nbytes > min(moves.ALONE, ring.slot_bytes) or not out.is_tensor:
            return
        if self._outbox is None:
            self._outbox = usual.outbox(self, ring)
        if self._outbox is not None:
            self._outbox.learn(value, out, usual.constant_of(ring, slot, out), out.nbytes)

    def _unlearn(self) -> None:
        """Something changed that the outbox was told: the next message goes by the Python code and makes another."""
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.retire()
            self._sent_bytes += outbox.sent_bytes
            self._rung += outbox.doorbells

    def _wake_late(self, seq: int) -> int:
        """A receiver fell asleep while its message was being published."""
        with self._mutex:
            if not self._state:
                self._wake_for(seq)
        return seq

    def _wake_for(self, seq: int) -> None:
        place = self._words[self._order + (seq & self._mask)]
        self._wake(self._rings[place >> 32], place & 0xFFFFFFFF)

    def _usual_place(self, nbytes: int) -> Place | None:
        """What `_place` mostly finds: a slot of the only ring, if the message fits it."""
        if self._control_words[ctl.W_EPOCH] == self._epoch and len(self._rings) == 1:
            ring = self._rings[0]
            slot = ring.take(self._is_free) if nbytes <= ring.slot_bytes else -1
            if slot >= 0:
                # nobody may take the old record for a new one
                store(ring.words, R_RECORDS + slot * RECORD_WORDS, 0)
                return ring, slot
        return None

    def loan(self, shape: tuple[int, ...], dtype: Any, meta: Any = None, *, timeout: float | None = None) -> Loan:
        """Borrow a slot to compute into: no copy at all. Sent on leaving the `with` block; an exception discards it.

        Args:
            shape: the tensor's shape.
            dtype: a torch dtype, for `loan.tensor`, or anything that `numpy.dtype` takes, for `loan.array`.
            meta, timeout: as for `send`.

        The memory belongs to the loan until the block is left, then to the receivers: do not write to it any more. If
        a view of it is kept nevertheless, its slot is not used again while that view lives.

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
            out = self._describe_empty(shape, dtype, meta)
            place = self._place(out.total, timeout)
            if place is None:
                raise RingFull(self._no_loan_text())
            return self._lend(out, *place, dtype, shape)

    def _lend(self, out: Outgoing, ring: Ring, slot: int, dtype: Any, shape: tuple[int, ...]) -> Loan:
        array, span = ring.block(slot, out.total), ring.span(out.total)
        ring.busy[slot : slot + span] = [(0, slot, span, (), False, weakref.ref(array))] * span
        return Loan(self, ring, slot, out, array, dtype, shape)

    def _no_loan_text(self) -> str:
        return f'channel "{self.name}": no slot is free for a loan, and full="drop" does not wait'

    def _commit(self, ring: Ring, slot: int, out: Outgoing, guard: weakref.ref[Any]) -> int:
        with self._mutex:
            if self._state:
                self._refuse()
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            outgoing.write(out, None, ring.buffer, ring.address, slot * ring.slot_bytes)
            return self._publish(ring, slot, out, guard)

    def _publish(self, ring: Ring, slot: int, out: Outgoing, guard: weakref.ref[Any] | None) -> int:
        """Record, order, `published`: a death before the last store leaves nothing visible."""
        words, record = self._words, R_RECORDS + slot * RECORD_WORDS
        seq = words[L_PUBLISHED] + 1
        span = 1 if out.total <= ring.slot_bytes else ring.span(out.total)
        entry = (seq, slot, span, self._recipients, self._locked, guard)
        try:
            if ring.described[slot] is out:
                store(ring.words, record + 1, time.monotonic_ns())
            else:
                ring.described[slot] = None
                self._pool.write_record(ring, slot, out)
            # crash: publish.record
            store(ring.words, record, seq)
            store(words, self._order + (seq & self._mask), ring.index << 32 | slot)
            # crash: publish.ordered
            if span == 1:
                ring.busy[slot] = entry
            else:
                ring.busy[slot : slot + span] = [entry] * span
            store(words, L_PUBLISHED, seq)  # pairs with the position check of the receivers' feeds
        except BaseException:
            if words[L_PUBLISHED] < seq:  # nobody may find the record: its sequence number goes to another message
                store(ring.words, record, 0)
                ring.forget(entry)
            raise
        self._sent_bytes += out.nbytes
        # crash: publish.published
        self._wake(ring, slot)
        # crash: publish.rung
        return seq

    # --- slots

    @abstractmethod
    def _is_free(self, ring: Ring, entry: Busy) -> bool:
        """Whether the slots of a message may be used again."""

    def _find(self, nbytes: int) -> Place | None:
        """Free slots, for a message that is sent now."""
        return self._pool.find(nbytes, self._is_free)

    def _place(self, nbytes: int, timeout: float | None) -> Place | None:
        """A free place for `nbytes`, after whatever `full=` says; None: drop the message."""
        check_timeout(timeout)
        place = self._place_at_once(nbytes)
        if place is not None:
            return place
        if self._full == "drop":
            self._dropped += 1
            return None
        if self._full == "error" or timeout == 0:
            raise RingFull(self._full_text(nbytes))
        return self._wait_for_slot(nbytes, timeout)

    def _place_at_once(self, nbytes: int) -> Place | None:
        """A free place for `nbytes` that can be had without waiting."""
        self._copying()  # a copy that was given up holds its slot
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        pool = self._pool
        pool.make_room(nbytes)
        place = self._find(nbytes)
        if place is None and self._drop_dead():
            place = self._find(nbytes)
        if place is None and self._full == "grow" and pool.may_grow(nbytes):
            pool.add(nbytes)
            place = self._find(nbytes)
        return place

    def _wait_for_slot(self, nbytes: int, timeout: float | None) -> Place:
        """Sleep on the semaphore until a slot is given back: docs/protocols.md, section 4."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waits += 1
        if self._published:  # another thread's `_wake_late` may be waiting for our mutex
            self._wake_for(self._published)
        awake_until = time.monotonic() + (_SPIN if timeout is None else min(_SPIN, timeout))
        while time.monotonic() < awake_until and not self._stop:
            if (place := self._find(nbytes)) is not None:
                return place
        while True:
            remaining = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            if remaining <= 0:
                raise RingFull(self._full_text(nbytes))
            woken = self._sleep(remaining, lambda: self._find(nbytes))
            if isinstance(woken, tuple):
                return woken
            if self._stop:
                self._refuse()
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            if not woken:
                self._copying()
                self._drop_dead()
            if (place := self._find(nbytes)) is not None:
                return place

    def _full_text(self, nbytes: int) -> str:
        holders = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners) or "nobody"
        return (
            f'channel "{self.name}": no room for {format_bytes(nbytes)}, all {self._pool.slots} slots wait for their '
            f'receivers ({holders}): receive faster, release messages, or pass slots=, timeout= or full="grow", "drop"'
        )

    # --- leaving

    @abstractmethod
    def _is_settled(self) -> bool:
        """Closing: whether everything sent was taken (fan-out) or done (work queue), and device memory unmapped."""

    def close(self, linger: float | None = 0) -> None:
        """Say that nothing follows, and leave. Idempotent.

        Messages that receivers have not taken yet stay readable for the members that are there; the last of them
        removes the rings. With nobody there they are dropped.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever.
        """
        check_timeout(linger)
        if self._state and self._state != CLOSING:
            return
        self._leave(linger)

    def _leave(self, linger: float | None) -> None:
        self._stop = True
        with self._mutex:
            if self._state and self._state != CLOSING:
                return
            self._unlearn()
            self._finish_copies()
            if self._crowd is not None:
                self._crowd.end()
            try:
                store(self._words, L_CLOSED, 1)
                # crash: close.said
                self._linger(linger)
            finally:
                self._state = CLOSED
                # crash: close.leaving
                self._depart()
        # crash: close.done

    def _depart(self) -> None:
        self._member.leave(keep=not self._is_settled())
        self._rouse()
        self._bells.close()
        self._sleeper.close()
        self._ledger.close()

    def _linger(self, linger: float | None) -> None:
        deadline = None if linger is None else time.monotonic() + linger
        self._refresh()
        while not self._is_settled() and not (self._drop_dead() and self._is_settled()):
            remaining = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            if remaining <= 0 or self._ending:
                return
            self._sleep(remaining, self._is_settled)
            self._refresh()

    def _at_exit(self) -> None:
        self._ending = True
        self._leave(0)
