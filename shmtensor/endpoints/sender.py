"""The sending end of a channel: find a slot, copy, publish, wake.

A sender has `Recipients` (recipients.py), who must get a message, and are woken for it; a `Pool` (ring/pool.py), which
decides how many slots of which size there are; and a `Spin` for its waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from .. import native
from ..channel import control as ctl
from ..channel import membership
from ..channel.membership import Member
from ..channel.names import ring_name, sequence_table_name
from ..channel.zmtp import frame_head
from ..codec.encode import Encoded, encode_empty
from ..codec.implementation import codec, decode, encode
from ..errors import ClosedError, RingFull
from ..memory.semaphores import COUNT, Sleeper, batched
from ..memory.words import barrier, store
from ..options import check_choice, check_count, check_timeout, format_bytes, parse_bytes
from ..ring.layout import FAN_OUT, L_CLOSED, L_PUBLISHED, MAX_SLOTS, R_RECORDS, RECORD_WORDS, round_slot
from ..ring.pool import Sizing
from ..ring.ring import Ring, SequenceTable
from ..ring.writer import SlotRange, Writer
from ..shielded import Flag
from ..statistics import SenderStatistics
from ..wire.record import BELL_SIZE, pack_bell
from .base import (
    CLOSED,
    CLOSING,
    FORKED,
    LEAVING,
    LIVENESS_INTERVAL,
    NOTHING,
    AsleepWord,
    Endpoint,
    SenderTraits,
    check_label,
    lingering,
    local_members,
)
from .device_fanout import DeviceMemory
from .devices import Devices, Sending
from .loan import Loan
from .recipients import Consumers, Recipients, Subscribers
from .spinning import DEFAULT_S, Spin
from .traceparent import carrying_traceparent, wants_traceparent

log = logging.getLogger("shmtensor.endpoints")

SLOW_S: Final = 5.0
"""Seconds of waiting for a slot after which a sender logs who holds the slots."""


class Wait:
    """One wait for a slot. Logs once, after `SLOW_S` seconds, who holds the slots.

    Args:
        full_text: the sender's description of what it waits for, for a message of so many bytes.
        sender: who waits.
    """

    __slots__ = ("_due", "_full_text", "_sender")

    def __init__(self, full_text: Callable[[int], str], sender: Member) -> None:
        self._full_text, self._sender = full_text, sender
        self._due = time.monotonic() + SLOW_S

    def check(self, nbytes: int) -> None:
        """Called each time when there is still no slot for a message of so many bytes."""
        if time.monotonic() >= self._due:
            self._due = float("inf")
            holders = holders_text(self._sender.channel, self._sender.uid)
            log.warning("a send has waited %g s for a slot: %s%s", SLOW_S, self._full_text(nbytes), holders)


def holders_text(channel: str, sender: int) -> str:
    """Text that says which members hold how many messages of a sender, and how; empty if that is unknown."""
    from ..channel.inspect import Inspector

    with contextlib.suppress(OSError, ValueError, LookupError, ArithmeticError):
        info = Inspector(messages=True).channel(channel)
        if info is not None:
            members = {member.uid: member for member in info.members}
            found: dict[str, Counter[str]] = {}
            for message in info.held:
                for it in message.holders if message.sender == sender else ():
                    member = members.get(it.uid)
                    what = filter(None, (member.process, member.label)) if member is not None else ()
                    who = f"group {it.group}" if it.group else " ".join((f"pid {it.pid}", *what))
                    found.setdefault(who, Counter())[it.how] += 1
            if found:
                texts = [f"{who}: {', '.join(f'{n} {how}' for how, n in hows.items())}" for who, hows in found.items()]
                return f"; held by {'; '.join(texts)}"
    return ""


def _loan_ended(reference: weakref.ref[Sender], _: object) -> None:
    """Handle the end of the memory of a loan that was not published."""
    sender = reference()
    if sender is not None:
        sender._wake_waiting()


def make_writer(
    member: Member, sequences: SequenceTable, *, kind: int, encode: Callable[[Any, Any], Any],
    locked: Callable[[], bool], checks_verdicts: bool, widest: int, share: int,
) -> Any:  # fmt: skip
    """The writer of a new sender, docs/internals/core.md.

    locked: whether a call of the endpoint is in progress: then `send` leaves the message to the endpoint
    widest: `send` uses only rings whose slots are at most so many times larger than the message needs; 0: any; -1: none
    share: `send` uses at most 1 / `share` of a ring for one message
    """
    competing, history = kind != FAN_OUT, sequences.history
    if native.module is None:
        return Writer(
            sequences=sequences, member=member.index, competing=competing, history=history,
            checks_verdicts=checks_verdicts, encode=encode,
        )  # fmt: skip
    return native.module.Writer(
        codec=codec, locked=locked, encode=None if encode == codec.encode else encode, lock_file=sequences.locks,
        control=member.control.words, epoch_at=ctl.W_EPOCH, table=sequences.words, order=sequences.shape.order,
        mask=sequences.mask, capacity=sequences.shape.capacity, member=member.index, competing=competing,
        history=history, checks_verdicts=checks_verdicts, widest=widest, share=share,
        bell=frame_head(BELL_SIZE) + pack_bell(member.uid, b""),
    )  # fmt: skip


_FULL = ("block", "grow", "drop", "error")
_BATCH_S = 1e-3  # a sender without a slot waits at most so long for room for a batch, then for any slot
_PAUSE_S = 0.01  # between two checks of a process that ends
_LEAST_BATCHED = 8  # messages in flight from which on there are batches


class _Waits(Exception):
    """Raised when the thread that has the mutex is waiting for other processes."""


class _Offer:
    """A loan that a thread wants to publish, while another one has the mutex and waits for a slot."""

    __slots__ = ("is_over", "loan")

    def __init__(self, loan: tuple[Ring, int, Encoded, Any]) -> None:
        self.loan = loan
        self.is_over = Flag()


class Sender(Endpoint):
    """Base of `Publisher` and `Producer`."""

    _traits: SenderTraits
    _carries_context = False
    _describe: Any = staticmethod(encode)
    _describe_empty: Any = staticmethod(encode_empty)
    _decode_empty: Any = staticmethod(decode)
    _lost = 0  # messages that were lost unfinished, after close; see `Traits.counts_lost`

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
        memory: DeviceMemory | None = None,
    ) -> None:
        # memory: where the data of the rings lie, if not in host memory
        label = check_label(label)
        self._memory = memory
        if memory is not None:
            self._describe, self._describe_empty = memory.describe, memory.describe_empty
            self._decode_empty = memory.decode_empty
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
        self._last_statistics: SenderStatistics | None = None  # of one that is closed
        self._offers: deque[_Offer] = deque()
        self._linger_ends: list[float] = []
        """The time until which each `close` lingers, in monotonic seconds: the earliest counts."""
        try:
            super().__init__()
            membership.join(
                channel, self._traits.channel, membership.Part(ctl.SENDER, self._flags, label), self._prepare
            )
            self._control_words = self._member.control.words
            ends = self._member, self._sequences, self._writer, self._tracing, history
            fans_out = self._traits.kind == FAN_OUT
            self._recipients: Recipients = Subscribers(*ends, memory=memory) if fans_out else Consumers(*ends)
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
        least = 1 << 16 if self._full == "grow" else self._traits.entries
        order = max(least, 1 << (4 * self._sizing.most - 1).bit_length())
        name = sequence_table_name(member.channel, member.uid)
        self._sequences = SequenceTable.create(
            name, member.uid, capacity=member.control.capacity, order_size=order, history=self._history,
            device=self._memory is not None,
        )  # fmt: skip
        traits = self._traits
        if traits.carries_context and wants_traceparent():
            self._describe = carrying_traceparent(self._describe)
            self._describe_empty = carrying_traceparent(self._describe_empty)
            self._carries_context = True
        self._words, self._mask, self._order = self._sequences.words, self._sequences.mask, self._sequences.shape.order
        self._writer = make_writer(
            member, self._sequences, kind=traits.kind, encode=self._describe, locked=self._mutex.locked,
            checks_verdicts=traits.checks_verdicts, widest=traits.widest, share=self._sizing.share,
        )  # fmt: skip
        self._pool = traits.pool(
            self._sequences, member.channel, lambda index: ring_name(member.channel, member.uid, index),
            kind=traits.kind, sizing=self._sizing, slot_bytes=self._slot_bytes, max_bytes=self._max_bytes,
            writer=self._writer, make=Ring.create if self._memory is None else self._memory.make_ring,
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
                The time spent waiting for another thread's call counts.

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
        patience = self._spin.burst_ns
        if timeout is not None:
            if type(timeout) is not float or not timeout >= 0:
                check_timeout(timeout)
            patience = patience if timeout else 0
        sent = self._writer.send(value, meta, patience)
        if type(sent) is int:
            return sent if sent > 0 else self._wake_late(-sent)
        return self._run_within(timeout, self._too_late, self._put, sent)  # type: ignore[no-any-return]

    def _too_late(self, _: float) -> RingFull:
        if self._state:
            self._refuse()
        return RingFull(f"{self._called.format(self)}: another thread waits for room")

    def _put(self, timeout: float | None, out: Encoded, *registration: Any) -> int:
        """Send a message that the writer could not send at once: wait for a slot, copy, publish. `registration`: see
        ring/writer.py."""
        if self._state or self._stop:
            self._refuse()
        self._seek()
        # crash: send.described
        place = self._place(out.total, timeout)
        return 0 if place is None else self._fill(out, *place, *registration)

    def _fill(self, out: Encoded, ring: Ring, slot: int, *registration: Any) -> int:
        """Copy a described value into free slots and publish it."""
        # crash: send.acquired
        if out.device_jobs:
            return self._send_from_devices(out, ring, slot, *registration)
        out.write(ring.buffer, slot * ring.slot_bytes)
        # crash: send.copied
        return self._publish(ring, slot, out, None, *registration)

    def _send_from_devices(self, out: Encoded, ring: Ring, slot: int, *registration: Any) -> int:
        """Copy a described value from its devices into free slots, wait until that is done, publish.

        A copy that fails, or is interrupted, is not published.
        """
        sending = self._devices.send(self._writer, self._rings, out, ring, slot, *registration, aside=False)
        try:
            self._devices.wait(sending)
            return self._publish_copied(sending)
        finally:
            sending.release()
            self._devices.poll()

    def _publish_copied(self, sending: Sending) -> int:
        """Publish a message whose copies are done, for the members that are there now."""
        # crash: copy.done
        self._recipients.refresh_if_stale()
        return self._publish(sending.ring, sending.slot, sending.out, None, *sending.registration)

    def _wake_late(self, seq: int) -> int:
        """Wake a receiver that fell asleep while its message was being published."""
        with contextlib.suppress(RingFull, ClosedError):  # a thread that waits for room has woken it
            self._run_within(0, self._too_late, lambda _: self._wake_if_open(seq))
        return seq

    def _wake_if_open(self, seq: int) -> None:
        if not self._state:
            self._wake_for(seq)

    def _wake_for(self, seq: int) -> None:
        place = self._words[self._order + (seq & self._mask)]
        self._recipients.wake(self._rings[place >> 32], place & 0xFFFFFFFF)

    def loan(self, shape: int | Sequence[int], dtype: Any, meta: Any = None, *, timeout: float | None = None) -> Loan:
        """Borrow a slot to compute into: no copy at all. Sent on leaving the `with` block; an exception discards it.

        Args:
            shape: the tensor's shape; an int is one dimension.
            dtype: a torch dtype, for `loan.tensor`, or anything that `numpy.dtype` takes, for `loan.array`.
            meta, timeout: as for `send`.

        The memory belongs to the loan until the block is left, then to the receivers: do not write to it afterwards. If
        a view of it is kept, its slot is not used again while that view lives.

        >>> import shmtensor, torch
        >>> with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
        ...     with pub.loan((2, 3), torch.float32) as loan:
        ...         _ = loan.tensor.fill_(1.5)
        ...     sub.recv(timeout=5).value.sum().item()
        9.0
        """
        if self._state:
            self._refuse()
        return self._run_within(  # type: ignore[no-any-return]
            timeout, self._too_late, self._loan_inside, shape, dtype, meta
        )

    def _loan_inside(self, timeout: float | None, shape: tuple[int, ...], dtype: Any, meta: Any) -> Loan:
        if self._state or self._stop:
            self._refuse()
        self._seek()
        out = self._describe_empty(shape, dtype, meta)
        place = self._place(out.total, timeout)
        if place is None:
            raise RingFull(self._no_loan_text())
        return self._lend(out, *place, dtype, shape)

    def _lend(self, out: Encoded, ring: Ring, slot: int, dtype: Any, shape: int | Sequence[int]) -> Loan:
        array = ring.block(slot, out.total)
        self._writer.lend(ring.index, slot, weakref.ref(array, functools.partial(_loan_ended, weakref.ref(self))))
        return Loan(self._commit, self._decode_empty, ring, slot, out, array, dtype, shape)

    def _wake_waiting(self) -> None:
        """Wake the thread or task that waits for a slot: one that was on loan is free. Callable from any thread."""
        if not self._state:
            if self._waits:
                self._sleeper.post()
            if self._wait_queue is not None:
                self._wait_queue.disturb()

    def _no_loan_text(self) -> str:
        return f'channel "{self.name}": no slot is free for a loan, and full="drop" does not wait'

    def _commit(self, ring: Ring, slot: int, out: Encoded, array: Any) -> int:
        """Publish a loan. Returns its sequence number.

        The thread that has the mutex may be waiting for a slot, perhaps for this very one: then it publishes the loan.
        """
        offer = _Offer((ring, slot, out, array))
        try:
            while True:
                with contextlib.suppress(_Waits):
                    return self._run_within(0, _Waits, self._commit_inside, *offer.loan)  # type: ignore[no-any-return]
                if offer not in self._offers:
                    self._offers.append(offer)
                self._sleeper.post()
                offer.is_over.wait(LIVENESS_INTERVAL)
                if offer.is_over.is_set():
                    break
        finally:
            with contextlib.suppress(ValueError):
                self._offers.remove(offer)
        return self._commit_inside(0, *offer.loan)  # it is published: this finds its number

    def _take_offers(self) -> None:
        """Publish the loans of threads that wait for the mutex. An error is for them: they try it themselves."""
        while True:
            if not self._offers:
                break
            offer = self._offers[0]
            with contextlib.suppress(Exception):
                self._commit_inside(0, *offer.loan)
                offer.is_over.set()
            with contextlib.suppress(IndexError, ValueError):
                self._offers.remove(offer)

    def _commit_inside(self, _: float | None, ring: Ring, slot: int, out: Encoded, array: Any) -> int:
        seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
        if 0 < seq <= self._published:
            return seq  # an exception came when it was published already
        if self._state or self._stop:
            self._refuse()
        self._recipients.refresh_if_stale()
        out.write(ring.buffer, slot * ring.slot_bytes)
        return self._publish(ring, slot, out, weakref.ref(array))

    def _publish(self, ring: Ring, slot: int, out: Encoded, guard: weakref.ref[Any] | None, *registration: Any) -> int:
        """Publish, and wake receivers that sleep, also if an exception comes between the two."""
        writer, published = self._writer, self._words[L_PUBLISHED]
        try:
            seq = writer.publish(ring.index, slot, out.description, out.nbytes, out.spilled, guard, *registration)
        except BaseException:
            if self._words[L_PUBLISHED] > published:
                self._recipients.wake(ring, slot)
            raise
        self._recipients.wake(ring, slot)
        # crash: publish.notified
        return seq  # type: ignore[no-any-return]

    # --- slots

    def _seek(self) -> None:
        """Note, for a trace, that a search for slots begins."""
        if self._recipients.events is not None:
            self._writer.seek()

    def _place(self, nbytes: int, timeout: float | None) -> SlotRange | None:
        """Free slots for `nbytes`, after what `full=` asks for; None: drop the message."""
        check_timeout(timeout)
        if self._full == "block" and timeout != 0:  # after an unproductive spin, a liveness check follows
            self._devices.poll()
            self._recipients.refresh_if_stale()
            self._pool.make_room(nbytes)
            return self._pool.find(nbytes) or self._wait_for_slot(nbytes, timeout)
        place = self._place_or_refuse(nbytes, timeout)
        return self._wait_for_slot(nbytes, timeout) if place is NOTHING else place

    def _place_or_refuse(self, nbytes: int, timeout: float | None) -> Any:
        """Free slots for `nbytes` without waiting. If there are none, what `full=` asks for: None: drop the message;
        NOTHING: wait for a slot, which `timeout` allows. Else raise `RingFull`."""
        place = self._place_at_once(nbytes)
        if place is not None:
            return place
        if self._full == "drop":
            self._counters.add(ctl.C_DROPPED)
            return None
        if self._full == "error" or timeout == 0:
            raise RingFull(self._full_text(nbytes))
        return NOTHING

    def _place_at_once(self, nbytes: int) -> SlotRange | None:
        """Free slots for `nbytes` without waiting, or None."""
        self._devices.poll()  # a copy that was given up keeps its slot until it is done
        self._recipients.refresh_if_stale()
        pool = self._pool
        pool.make_room(nbytes)
        place = self._pool.find(nbytes)
        if place is None and self._recipients.drop_dead():
            place = self._pool.find(nbytes)
        if place is None and self._full == "grow" and pool.may_grow(nbytes):
            pool.add(nbytes)
            place = self._pool.find(nbytes)
        return place

    def _wait_for_slot(self, nbytes: int, timeout: float | None) -> SlotRange:
        """Sleep on the semaphore until a slot is given back: docs/internals/protocols.md, section 4."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waits = True
        self._counters.add(ctl.C_WAITS)
        wait = Wait(self._full_text, self._member)
        if self._published:  # another thread's `_wake_late` may be waiting for our mutex
            self._wake_for(self._published)

        def find() -> SlotRange | None:
            self._take_offers()
            return self._pool.find(nbytes)

        place = self._spin.wait(lambda _: None if self._stop else find(), timeout)
        if place is None and (target := self._batch_end()):
            seconds = _BATCH_S if deadline is None else min(_BATCH_S, deadline - time.monotonic())
            woken = self._sleep(max(0.0, seconds), find, target)
            place = woken if isinstance(woken, tuple) else self._pool.find(nbytes)
        if place is None and not self._stop:
            place = self._place_at_once(nbytes)
        while place is None:
            if self._stop:
                self._refuse()
            remaining = LIVENESS_INTERVAL if deadline is None else min(LIVENESS_INTERVAL, deadline - time.monotonic())
            if remaining <= 0:
                raise RingFull(self._full_text(nbytes))
            wait.check(nbytes)
            woken = self._sleep(remaining, find)
            if isinstance(woken, tuple):
                place = woken
                break
            self._recipients.refresh_if_stale()
            if not woken:
                self._devices.poll()
                self._recipients.drop_dead()
            place = self._pool.find(nbytes)
        if self._stop:  # closed meanwhile, which may be what gave the slot back
            self._refuse()
        self._waits = False
        return place

    def _batch_end(self) -> int:
        """The message whose end leaves room for a batch, a quarter of those in flight; 0 if those are few."""
        oldest = self._writer.oldest()
        count = self._published + 1 - oldest
        return oldest + count // 4 - 1 if oldest and count >= _LEAST_BATCHED else 0

    def _full_text(self, nbytes: int) -> str:
        """The text for errors and the log while there is no slot for a message of `nbytes`."""
        there = ", ".join(dict.fromkeys(f"pid {peer.entry.pid}" for peer in self._recipients.listeners))
        text = self._traits.full if there else self._traits.full_alone
        grow, grown, limit = ' or full="grow"', "", ""
        if self._full == "grow":
            limit = self._pool.limit(max(1, nbytes))
            grow, grown = "", f', full="grow" has reached {limit}' if limit else ""
        return text.format(
            self, nbytes=format_bytes(nbytes), slots=self._pool.slots, there=there, grow=grow, grown=grown, limit=limit
        )

    # --- waiting

    def _wait_for_receivers(self, count: int, timeout: float | None, what: str) -> None:
        recipients = self._recipients
        due = 0.0

        def look() -> int:
            nonlocal due
            if (now := time.monotonic()) < due and not recipients.is_stale:
                return len(recipients.listeners)
            due = now + LIVENESS_INTERVAL
            return recipients.count()

        self._wait_for_members(count, timeout, what, look)

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

    # --- leaving

    def close(self, linger: float | None = 0) -> None:
        """Say that nothing follows, and leave. Idempotent.

        Messages that receivers have not taken yet stay readable for the members that are there; the last of them
        removes the rings. Without such members they are dropped.

        Called by a signal handler or a finalizer that interrupts a call of this very thread, it takes effect when that
        call ends; one that waits ends with `ClosedError`.

        While one `close` lingers, others may be called, in other threads, tasks and signal handlers: the one that asks
        for the earliest end decides for all. So `close()` ends a `close(linger=None)`.

        Args:
            linger: seconds to wait until everything sent was taken (work queue: is done); None waits for ever.
        """
        check_timeout(linger)
        if self._state and self._state != CLOSING:
            return
        self._leave(linger)

    def _leave(self, linger: float | None) -> None:
        self._announce_close(linger)
        self._close(lambda: self._run(self._finish))

    def _announce_close(self, linger: float | None) -> None:
        """Another thread that is inside a call ends it: at once, or, if it lingers, after so many seconds."""
        self._linger_ends.append(math.inf if linger is None else time.monotonic() + linger)
        self._stop = True
        self._sleeper.post()

    def _finish(self) -> None:
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
                self._linger()
        finally:
            # crash: close.leaving
            try:
                self._depart()
            finally:
                self._report_lost()
        # crash: close.done

    def _depart(self) -> None:
        """Leave the channel, and wake its receivers to notice it.

        Device memory ends with this process: if it is still needed there, stay a member until it is not.
        """
        recipients = self._recipients
        if self._memory is not None and self._state == CLOSING:
            recipients.end_history()
            if not recipients.is_settled():
                self._state = LEAVING
                lingering.add(self)
                # crash: device.lent
                self._member.set_leaving()
                recipients.wake_all()
                self._memory.when_unneeded(self._has_left)
                return
        if not self._member.has_left:
            lost = self._lose if self._traits.counts_lost else None
            self._member.leave(keep=recipients.have_unread(), lost=lost)
        recipients.wake_all()
        recipients.close()
        self._sleeper.close()
        self._last_statistics = self.statistics()  # before: it asks for locks
        self._sequences.close()
        self._writer.release()  # else a closed sender that is still referred to would keep the memory
        self._state = CLOSED

    def _has_left(self) -> bool:
        """With device memory, after close: leave as soon as no subscriber needs the memory. Returns whether it has
        left."""
        return self._try_run(self._leave_if_settled) is True

    def _leave_if_settled(self) -> bool:
        if self._state != LEAVING:
            return True
        self._recipients.refresh()
        if not self._is_settled():
            return False
        self._depart()
        lingering.discard(self)
        return True

    def _outlast(self) -> None:
        self._recipients.local = local_members()
        while not self._has_left():
            time.sleep(_PAUSE_S)

    def _is_settled(self) -> bool:
        """Whether nothing that was sent is needed any more, by the receivers that live."""
        recipients = self._recipients
        return recipients.is_settled() or (recipients.drop_dead() and recipients.is_settled())

    def _lose(self, count: int) -> None:
        """Report the messages that are lost unfinished, since it has left as the last member of its channel."""
        self._lost = count
        if self._state == CLOSED:  # it left later than `close`, which reports them otherwise
            with contextlib.suppress(ResourceWarning):  # where warnings are errors; it is in the log
                self._report_lost()

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            self._recipients.report_lost(self, lost)

    def _linger(self) -> None:
        """Wait until everything sent was taken, or done."""
        self._waits = True
        self._recipients.refresh()
        while not self._is_settled():
            remaining = min(LIVENESS_INTERVAL, self._left())
            if remaining <= 0:
                return
            self._sleep(remaining, lambda: self._left() <= 0 or self._recipients.is_settled())
            self._recipients.refresh()

    def _left(self) -> float:
        """Seconds that it may linger now; `inf` for ever."""
        return min(self._linger_ends) - time.monotonic()

    def _at_exit(self) -> None:
        self._leave(0)

    def statistics(self) -> SenderStatistics:
        """A frozen snapshot of this sender's counters since it was created."""
        if self._state == FORKED:
            self._refuse()
        if self._last_statistics is not None:
            return self._last_statistics
        devices, writer = self._devices.statistics(self._rings), self._writer
        return SenderStatistics(
            sent=self._published, sent_bytes=writer.sent_bytes,
            dropped=self._counters[ctl.C_DROPPED], waits=self._counters[ctl.C_WAITS],
            doorbells=self._recipients.notified + writer.notified,
            rings=len(self._rings), slots=self._pool.slots, slots_busy=writer.busy, ring_bytes=self._pool.nbytes,
            receivers=len(self._recipients.listeners), dead_receivers=self._recipients.deaths,
            **devices,
        )  # fmt: skip

    def __repr__(self) -> str:
        last = self._last_statistics
        rings, slots = (len(self._rings), self._pool.slots) if last is None else (last.rings, last.slots)
        receivers = len(self._recipients.listeners)
        return f"{super().__repr__()[:-1]} sent={self._published} rings={rings} slots={slots} receivers={receivers}>"
