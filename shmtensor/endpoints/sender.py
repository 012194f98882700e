"""The sending end of a channel: find a slot, copy, publish, wake. Subclasses define who must get a message."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from ..channel import control as ctl
from ..channel import membership
from ..channel.membership import Member
from ..channel.names import ring_name, sequence_table_name
from ..channel.wakeup import Doorbells
from ..codec.encode import Encoded
from ..errors import RingFull
from ..memory.semaphores import Sleeper
from ..memory.words import store
from ..options import format_bytes, parse_bytes
from ..ring.layout import L_CLOSED, L_PUBLISHED, MAX_SLOTS, R_RECORDS, RECORD_WORDS, round_slot
from ..ring.pool import Sizing
from ..ring.ring import Ring
from ..ring.sequence_table import SequenceTable
from ..ring.writer import SlotRange
from . import traceparent
from .base import CLOSED, CLOSING, LIVENESS_INTERVAL, AsleepWord, check_choice, check_count, check_label, check_timeout
from .devices import Devices, Sending
from .implementation import make_writer
from .loan import Loan
from .peers import Peers
from .reports import Wait
from .spinning import DEFAULT_S, Spin
from .traits import SenderTraits

_FULL = ("block", "grow", "drop", "error")
_BATCH_S = 1e-3  # a sender without a slot waits at most so long for room for a batch, then for any slot
_LEAST_BATCHED = 8  # messages in flight from which on there are batches


class Sender(Peers):
    """Base of `Publisher` and `Producer`."""

    _traits: SenderTraits
    _carries_context = False

    def __init__(
        self,
        channel: str,
        *,
        slots: int | None,
        slot_bytes: int | str | None,
        full: Literal["block", "grow", "drop", "error"],
        max_bytes: int | str | None,
        history: int = 0,
        pin: bool | Literal["auto"] = "auto",
        label: str | None = None,
    ) -> None:
        label = check_label(label)
        self._devices = Devices(self, pin)
        self._sizing = self._traits.sizing
        if slots is not None:
            check_count("slots", slots, 1, MAX_SLOTS)
            self._sizing = Sizing.exactly(slots)
        check_choice("full", full, _FULL)
        self._full = full
        self._slot_bytes = None if slot_bytes is None else round_slot(parse_bytes(slot_bytes, "slot_bytes"))
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._history = history
        self._spin = Spin(DEFAULT_S if full == "block" else 0.0)
        self._ending = False  # the process ends: a `close` that lingers in another thread gives up
        try:
            super().__init__()
            membership.join(channel, self._traits.channel, membership.Part(ctl.SENDER, 0, label), self._prepare)
            self._control_words = self._member.control.words
            self._bells = Doorbells(self._member.directory)
            if self._slot_bytes is not None:
                self._pool.add(self._slot_bytes)
        except BaseException:
            self._abandon()
            raise

    def _drop_in_child(self) -> None:
        super()._drop_in_child()
        if hasattr(self, "_writer"):  # not if the fork came while it was joining
            self._writer.retire()

    def _prepare(self, member: Member) -> None:
        self._member = member
        order = 1 << 16 if self._full == "grow" else max(1024, 1 << (4 * self._sizing.most - 1).bit_length())
        name = sequence_table_name(member.channel, member.uid)
        self._sequences = SequenceTable.create(
            name, member.uid, capacity=member.control.capacity, order_size=order, history=self._history,
            device=self._device is not None,
        )  # fmt: skip
        traits = self._traits
        if traits.carries_context and traceparent.is_wanted():
            self._describe = traceparent.carrying(self._describe)
            self._describe_empty = traceparent.carrying(self._describe_empty)
            self._carries_context = True
        self._words, self._mask, self._order = self._sequences.words, self._sequences.mask, self._sequences.shape.order
        self._writer = make_writer(
            member, self._sequences, kind=traits.kind, encode=self._describe, locked=self._mutex.locked,
            checks_verdicts=traits.checks_verdicts, widest=traits.widest, share=self._sizing.share,
        )  # fmt: skip
        self._pool = traits.pool(
            self._sequences, member.channel, lambda index: ring_name(member.channel, member.uid, index),
            kind=traits.kind, sizing=self._sizing, slot_bytes=self._slot_bytes, max_bytes=self._max_bytes,
            writer=self._writer, make=self._make_ring,
        )  # fmt: skip
        self._rings = self._pool.rings
        # crash: join.sequences
        self._sleeper = Sleeper(name, create=True)
        self._asleep = ctl.asleep_word(member.index)
        self._counters = ctl.Counters(member.control.words, member.index)
        self._asleep_word = AsleepWord(member.control.words, self._asleep, self._counters)

    @property
    def _published(self) -> int:
        return self._words[L_PUBLISHED]

    # --- sending

    def send(self, value: Any, meta: Any = None, *, timeout: float | None = None) -> int:
        """Copy a value into the ring and publish it.

        Args:
            value: a tensor, an ndarray, bytes, or a dict, list or tuple of these with JSON scalars at the other
                leaves. It is copied before `send` returns: changing it afterwards changes nothing that was sent. CUDA
                tensors are copied on a stream of the sender's own, after what the calling thread's current stream
                holds, and the message is published when that is done: docs/guide/cuda.md.
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
        if self._state:
            self._refuse()
        sent = self._writer.send(value, meta, 0 if timeout == 0 else self._spin.burst_ns)
        if type(sent) is int:
            return sent if sent > 0 else self._wake_late(-sent)
        return self._run(self._put, sent, timeout)  # type: ignore[no-any-return]

    def _put(self, out: Encoded, timeout: float | None, *beside: Any) -> int:
        """Do what the writer could not do at once: wait for a slot, copy, publish. `beside`: see ring/writer.py."""
        if self._state or self._stop:
            self._refuse()
        if self._events is not None:
            self._writer.seek()
        # crash: send.described
        place = self._place(out.total, timeout)
        return 0 if place is None else self._fill(out, *place, *beside)

    def _fill(self, out: Encoded, ring: Ring, slot: int, *beside: Any) -> int:
        """Copy a described value into free slots and publish it."""
        # crash: send.acquired
        if out.device_jobs:
            return self._send_from_devices(out, ring, slot, *beside)
        out.write(ring.buffer, slot * ring.slot_bytes)
        # crash: send.copied
        return self._publish(ring, slot, out, None, *beside)

    def _send_from_devices(self, out: Encoded, ring: Ring, slot: int, *beside: Any) -> int:
        """Copy a described value from its devices into free slots, wait until that is done, publish.

        A copy that fails, or is interrupted, is not published.
        """
        sending = self._devices.send(self._writer, self._rings, out, ring, slot, *beside)
        try:
            sending.wait()
            return self._publish_copied(sending)
        finally:
            sending.release()
            self._devices.poll()

    def _publish_copied(self, sending: Sending) -> int:
        """Publish a message whose copies are done, for the members that are there now."""
        # crash: copy.done
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        return self._publish(sending.ring, sending.slot, sending.out, None, *sending.beside)

    def _wake_late(self, seq: int) -> int:
        """Wake a receiver that fell asleep while its message was being published."""
        self._run(self._wake_if_open, seq)
        return seq

    def _wake_if_open(self, seq: int) -> None:
        if not self._state:
            self._wake_for(seq)

    def _wake_for(self, seq: int) -> None:
        place = self._words[self._order + (seq & self._mask)]
        self._wake(self._rings[place >> 32], place & 0xFFFFFFFF)

    def loan(self, shape: int | Sequence[int], dtype: Any, meta: Any = None, *, timeout: float | None = None) -> Loan:
        """Borrow a slot to compute into: no copy at all. Sent on leaving the `with` block; an exception discards it.

        Args:
            shape: the tensor's shape; an int is one dimension.
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
        return self._run(self._loan_inside, shape, dtype, meta, timeout)  # type: ignore[no-any-return]

    def _loan_inside(self, shape: tuple[int, ...], dtype: Any, meta: Any, timeout: float | None) -> Loan:
        if self._state or self._stop:
            self._refuse()
        if self._events is not None:
            self._writer.seek()
        out = self._describe_empty(shape, dtype, meta)
        place = self._place(out.total, timeout)
        if place is None:
            raise RingFull(self._no_loan_text())
        return self._lend(out, *place, dtype, shape)

    def _lend(self, out: Encoded, ring: Ring, slot: int, dtype: Any, shape: int | Sequence[int]) -> Loan:
        array = ring.block(slot, out.total)
        self._writer.lend(ring.index, slot, weakref.ref(array))
        return Loan(self._commit, self._decode_empty, ring, slot, out, array, dtype, shape)

    def _no_loan_text(self) -> str:
        return f'channel "{self.name}": no slot is free for a loan, and full="drop" does not wait'

    def _commit(self, ring: Ring, slot: int, out: Encoded, array: Any) -> int:
        """Publish a loan. Returns its sequence number."""
        return self._run(self._commit_inside, ring, slot, out, array)  # type: ignore[no-any-return]

    def _commit_inside(self, ring: Ring, slot: int, out: Encoded, array: Any) -> int:
        seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
        if 0 < seq <= self._published:
            return seq  # an exception came when it was published already
        if self._state or self._stop:
            self._refuse()
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        out.write(ring.buffer, slot * ring.slot_bytes)
        return self._publish(ring, slot, out, weakref.ref(array))

    def _publish(self, ring: Ring, slot: int, out: Encoded, guard: weakref.ref[Any] | None, *beside: Any) -> int:
        """Publish, and wake receivers that sleep, also if an exception comes between the two."""
        writer, published = self._writer, self._words[L_PUBLISHED]
        try:
            seq = writer.publish(ring.index, slot, out.description, out.nbytes, out.spilled, guard, *beside)
        except BaseException:
            if self._words[L_PUBLISHED] > published:
                self._wake(ring, slot)
            raise
        self._wake(ring, slot)
        # crash: publish.notified
        return seq  # type: ignore[no-any-return]

    # --- slots

    def _find(self, nbytes: int) -> SlotRange | None:
        """Free slots for a message of so many bytes, or None."""
        return self._pool.find(nbytes)

    def _place(self, nbytes: int, timeout: float | None) -> SlotRange | None:
        """Free slots for `nbytes`, after what `full=` asks for; None: drop the message."""
        check_timeout(timeout)
        if self._full == "block" and timeout != 0:
            self._devices.poll()
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            self._pool.make_room(nbytes)
            return self._find(nbytes) or self._wait_for_slot(nbytes, timeout)
        place = self._place_at_once(nbytes)
        if place is not None:
            return place
        if self._full == "drop":
            self._counters.add(ctl.C_DROPPED)
            return None
        if self._full == "error" or timeout == 0:
            raise RingFull(self._full_text(nbytes))
        return self._wait_for_slot(nbytes, timeout)

    def _place_at_once(self, nbytes: int) -> SlotRange | None:
        """Free slots for `nbytes` without waiting, or None."""
        self._devices.poll()  # a copy that was given up keeps its slot until it is done
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

    def _wait_for_slot(self, nbytes: int, timeout: float | None) -> SlotRange:
        """Sleep on the semaphore until a slot is given back: docs/internals/protocols.md, section 4."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._counters.add(ctl.C_WAITS)
        wait = Wait(self._full_text, self._member)
        if self._published:  # another thread's `_wake_late` may be waiting for our mutex
            self._wake_for(self._published)
        place = self._spin.wait(lambda _: None if self._stop else self._find(nbytes), timeout)
        if place is None and (target := self._batch_end()):
            seconds = _BATCH_S if deadline is None else min(_BATCH_S, deadline - time.monotonic())
            woken = self._sleep(max(0.0, seconds), lambda: self._find(nbytes), target)
            place = woken if isinstance(woken, tuple) else self._find(nbytes)
        if place is None and not self._stop:
            place = self._place_at_once(nbytes)
        while place is None:
            if self._stop:
                self._refuse()
            remaining = LIVENESS_INTERVAL if deadline is None else min(LIVENESS_INTERVAL, deadline - time.monotonic())
            if remaining <= 0:
                raise RingFull(self._full_text(nbytes))
            wait.check(nbytes)
            woken = self._sleep(remaining, lambda: self._find(nbytes))
            if isinstance(woken, tuple):
                place = woken
                break
            if self._control_words[ctl.W_EPOCH] != self._epoch:
                self._refresh()
            if not woken:
                self._devices.poll()
                self._drop_dead()
            place = self._find(nbytes)
        if self._stop:  # closed meanwhile, which may be what gave the slot back
            self._refuse()
        return place

    def _batch_end(self) -> int:
        """The message whose end leaves room for a batch, a quarter of those in flight; 0 if those are few."""
        oldest = self._writer.oldest()
        count = self._published + 1 - oldest
        return oldest + count // 4 - 1 if oldest and count >= _LEAST_BATCHED else 0

    def _full_text(self, nbytes: int) -> str:
        holders = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners)
        if not holders:
            return (
                f'channel "{self.name}": no room for {format_bytes(nbytes)} in {self._pool.slots} slots, and nobody '
                'receives there: start a receiver, or pass slots=, timeout= or full="grow", "drop"'
            )
        return (
            f'channel "{self.name}": no room for {format_bytes(nbytes)}, all {self._pool.slots} slots wait for their '
            f'receivers ({holders}): receive faster, release messages, or pass slots=, timeout= or full="grow", "drop"'
        )

    # --- leaving

    def _is_settled(self) -> bool:
        """Whether everything sent was taken (fan-out) or done (work queue), and device memory unmapped: for `close`."""
        return bool(self._writer.is_settled(()))

    def close(self, linger: float | None = 0) -> None:
        """Say that nothing follows, and leave. Idempotent.

        Messages that receivers have not taken yet stay readable for the members that are there; the last of them
        removes the rings. Without such members they are dropped.

        Called by a signal handler or a finalizer that interrupts a call of this very thread, it takes effect when that
        call ends; one that waits ends with `ClosedError`.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever.
        """
        check_timeout(linger)
        if self._state and self._state != CLOSING:
            return
        self._leave(linger)

    def _leave(self, linger: float | None) -> None:
        self._stop = True
        self._close(lambda: self._run(self._finish, linger))

    def _finish(self, linger: float | None) -> None:
        """Close. Every step may be repeated: the next `close` finishes what an exception cut short."""
        if self._state and self._state != CLOSING:
            return
        self._state = CLOSING
        self._writer.retire()
        self._devices.finish()
        if self._wait_queue is not None:
            self._wait_queue.end()
        try:
            store(self._words, L_CLOSED, 1)
            # crash: close.said
            if not self._member.has_left:
                self._linger(linger)
        finally:
            # crash: close.leaving
            self._depart()
        # crash: close.done

    def _depart(self) -> None:
        """Leave the channel, and wake its receivers to notice it."""
        if not self._member.has_left:
            self._member.leave(keep=not self._is_settled(), lost=self._lose if self._traits.counts_lost else None)
        self._wake_all()
        self._bells.close()
        self._sleeper.close()
        self._sequences.close()
        self._state = CLOSED

    def _lose(self, count: int) -> None:
        """Called when it has left as the last member of its channel: so many messages are lost unfinished."""
        self._lost = count

    def _linger(self, linger: float | None) -> None:
        """Wait until everything sent was taken, or done."""
        deadline = None if linger is None else time.monotonic() + linger
        self._refresh()
        while not self._is_settled() and not (self._drop_dead() and self._is_settled()):
            remaining = LIVENESS_INTERVAL if deadline is None else min(LIVENESS_INTERVAL, deadline - time.monotonic())
            if remaining <= 0 or self._ending:
                return
            self._sleep(remaining, self._is_settled)
            self._refresh()

    def _at_exit(self) -> None:
        self._ending = True
        self._leave(0)
