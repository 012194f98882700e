"""The receiving end of a channel: attach to every sender, take messages awake or asleep, give slots back.

`Subscriber` and `Consumer` say which feed they read with and what becomes of a message that was taken.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, TypeVar

from ..channel import control as ctl
from ..channel import membership
from ..channel.inbox import Inbox
from ..channel.membership import Member
from ..errors import ArgumentError, ArgumentTypeError, EndOfStream, TimedOut, WireError
from ..memory.words import barrier, store
from ..ring.layout import L_PUBLISHED
from ..statistics import ReceiverStatistics
from ..wire.record import BELL_HEAD, BELL_SIZE, parse_bell
from .ahead import Ahead
from .base import CLOSED, FORKED, LEAVING, OPEN, SPIN_NS, TICK, check_timeout, lingering
from .devices import LOOK_S, check_pin, pinned
from .message import Message
from .opening import Opening
from .sources import _F, log

_R = TypeVar("_R", bound="Receiver[Any]")


class Receiver(Opening[_F]):
    """Base of `Subscriber` and `Consumer`."""

    _kind: int
    _flags = 0

    def __init__(
        self, channel: str, *, spin: float, device: Any = None, prefetch: int = 0, pin: bool | str = "auto"
    ) -> None:
        check_pin(pin)
        self._pin = pin
        self._ahead = None if device is None else Ahead(self, device, prefetch)
        if isinstance(spin, bool) or not isinstance(spin, (int, float)):
            raise ArgumentTypeError(f"spin is in seconds (int or float), not {type(spin).__name__}")
        if not 0 <= spin <= 3600:
            raise ArgumentError(f"spin must be between 0 and 3600 seconds, not {spin!r}")
        self._spin = spin
        self._patience = min(int(spin * 1e9), SPIN_NS)
        self._turn = self._nap = 0
        self._stop = self._late_bells = False
        self._unheard: bytes | None = None
        self._turns: dict[bytes, int] = {}  # of the feeds whose doorbells came, by how those begin
        self._inlet: Any = None
        self._look_around_due = 0.0
        self._received = self._received_bytes = self._missed = self._redelivered = self._abandoned = 0
        self._bad_doorbells = self._sleeps = self._ticks = self._late = 0
        super().__init__()
        self._member = membership.join(channel, self._channel_kind, ctl.RECEIVER, self._flags, self._prepare)
        control = self._member.control
        self._control_words, self._asleep = control.words, ctl.asleep_word(self._member.index)
        self._senders_before = control.senders - sum(1 for entry in self._member.peers() if entry.role == ctl.SENDER)
        self._wake_senders()

    def _prepare(self, member: Member) -> None:
        self._inbox = Inbox(member.directory, member.uid)
        # crash: join.inbox

    def drop_in_child(self) -> None:
        super().drop_in_child()
        inbox: Inbox | None = getattr(self, "_inbox", None)  # it may have been joining just then
        if inbox is not None:
            inbox.close()

    # --- receiving

    def recv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        """The next message.

        Args:
            timeout: seconds to wait; None waits for ever, 0 does not wait.
            copy: give private, writable memory instead of a view of the slot, and give the slot back at once
                (work queue: the message is still not done before you say so).

        Raises:
            TimedOut: nothing came in time (also a `TimeoutError`).
            EndOfStream: every sender has closed or died, and everything they sent is received.
            PeerDied, CudaError: a publisher of device memory died with messages that were not received; its memory
                cannot be reached from here (docs/cuda-ipc.md).
            ClosedError, ForkedError: this receiver is closed, or was made by this process's parent.
        """
        inlet = self._inlet
        if inlet is not None:
            message = inlet.recv(self, self._patience if timeout is None or timeout else 0)
            if message is not None:
                if copy:
                    self._make_private(message)
                return message  # type: ignore[no-any-return]
        with self._mutex:
            if self._state:
                self._refuse()
            self._before_next()
            if self._gpu is not None:
                self._gpu.pending.look()
            if self._ahead is not None:
                message = self._ahead.next(timeout)
            else:
                message = self._poll()
                if message is None:
                    message = self._wait(timeout)
            self._received += 1
            self._received_bytes += message.nbytes
        if copy:
            self._make_private(message)
        return message

    def __iter__(self: _R) -> _R:
        return self

    def __next__(self) -> Message:
        try:
            return self.recv()
        except EndOfStream:
            raise StopIteration from None

    def _before_next(self) -> None:
        """Called before each look for a message."""

    @abstractmethod
    def _make_private(self, message: Message) -> None:
        """`recv(copy=True)`: put a private copy of the value into the message."""

    def _poll(self, patience: int = 0) -> Message | None:
        """A message that is there now, or within `patience` nanoseconds at most, or None. The senders take turns."""
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        elif self._inlet is not None:
            message = self._inlet.poll(self, patience)
            if message is not None:
                return message  # type: ignore[no-any-return]
        feeds = self._feeds
        count = len(feeds)
        if count == 1:
            return self._take(feeds[0])
        for step in range(count):
            turn = self._turn + step
            feed = feeds[turn % count]
            message = self._take(feed)
            if message is not None:
                self._turn = turn + 1
                return message
        return None

    @abstractmethod
    def _take(self, feed: _F) -> Message | None:
        """The next message of one sender, or None."""

    def _blame(self, feed: _F, seq: int, error: Exception) -> None:
        self._bad_records += 1
        log.error("channel %s: message %d of producer %016x passed over: %s", self.name, seq, feed.uid, str(error))

    def _unlearn(self) -> None:
        """Something changed that the inlet was told: the next message goes by the Python code and makes another."""
        self._turns = {}
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.retire()
            self._received += inlet.received
            self._received_bytes += inlet.received_bytes
        for feed in (*self._feeds, *self._retired):
            if feed.inlet is not None:
                feed.inlet.retire()
                feed.inlet = None

    def _take_usual(self, feed: _F) -> Message | None:
        """The next message of one sender of several, if it is like one before."""
        inlet = feed.inlet
        return None if inlet is None or self._inlet is not None else inlet.poll(self, 0)

    def _compiled(self) -> list[Any]:
        """Every inlet that messages may have come by."""
        return [] if self._inlet is None else [self._inlet]

    # --- sleeping

    def _wait(self, timeout: float | None) -> Message:
        """Stay awake for `spin` seconds, then sleep: docs/protocols.md, section 3."""
        check_timeout(timeout)
        now = time.monotonic
        start = now()
        deadline = None if timeout is None else start + timeout
        awake_until = start + self._spin if timeout is None else start + min(self._spin, timeout)
        look_until = awake_until
        while True:
            while now() < look_until and not self._stop:
                message = self._poll(SPIN_NS)
                if message is not None:
                    return message
            if self._stop:
                self._refuse()
            if self._is_over():
                raise EndOfStream(self._over_text())
            tick = LOOK_S if self._copying() else TICK
            remaining = tick if deadline is None else min(tick, deadline - now())
            if remaining <= 0:
                return self._last_look(timeout)
            rung = self._sleep(remaining)
            message = self._poll()
            if message is None and not rung:
                self._tick()
                message = self._poll()
                self._late += message is not None
            if message is not None:
                return message

    def _last_look(self, timeout: float | None) -> Message:
        """The time is up. Who polls without ever sleeping must notice the dead all the same."""
        if time.monotonic() >= self._look_around_due:
            self._tick()
        message = self._poll()
        if message is not None:
            return message
        if self._is_over():
            raise EndOfStream(self._over_text())
        raise self._too_late(timeout)

    def _too_late(self, timeout: float | None) -> TimedOut:
        return TimedOut(f'channel "{self.name}": no message within {timeout:g} s ({len(self._feeds)} senders attached)')

    def _over_text(self) -> str:
        return f'channel "{self.name}": every sender has left, and everything they sent is received'

    def _sleep(self, seconds: float) -> bool:
        """One sleep in the inbox. True if something was there or a doorbell came, False if the time was up."""
        if self._unheard is not None:
            self._hear_late()
        if self._late_bells:
            for bell in self._inbox.drain():  # late doorbells of earlier sleeps
                self._hear(bell)
        self._late_bells = True
        if not self._inbox.may_be_rung():
            self._inbox.doze(seconds)
            return False
        words = self._control_words
        self._nap = (self._nap + 1) | 1
        try:
            store(words, self._asleep, self._nap)
            # crash: sleep.asleep
            barrier()  # from here on every sender sees that we sleep, or we see what it published
            if words[ctl.W_EPOCH] != self._epoch:
                return True
            for feed in self._feeds:
                if feed.words[L_PUBLISHED] > feed.position:
                    return True
            self._sleeps += 1
            data = self._inbox.wait(seconds)
        finally:
            self._nap = (self._nap | 1) + 1
            store(words, self._asleep, self._nap)
            if self._crowd is not None:
                self._crowd.disturb()
        # crash: sleep.awake
        if data is None:
            self._ticks += 1
            return False
        # each sender rings once per sleep; of two, the other's bell wakes us once more, which costs less than to look
        self._late_bells = len(self._feeds) > 2
        if len(self._feeds) > 1:
            self._hear(data)
        else:
            self._unheard = data  # whose it is tells nothing now: it is looked at when there is time
        return True

    def _hear_late(self) -> None:
        data, self._unheard = self._unheard, None
        if data is not None:
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        """A doorbell: look at its sender first. Anything else that lands in the inbox is counted."""
        head = data[:BELL_HEAD]
        if head not in self._turns or len(data) != BELL_SIZE:
            try:
                uid = parse_bell(data).uid
            except WireError as error:
                self._bad_doorbells += 1
                log.error("channel %s: bad doorbell: %s", self.name, str(error))
                return
            turn = next((turn for turn, feed in enumerate(self._feeds) if feed.uid == uid), None)
            if turn is None:
                return
            self._turns[head] = turn
        self._turn = self._turns.get(head, self._turn)

    def _tick(self) -> None:
        """Look around without having been rung: who died, and what did they leave?"""
        self._look_around_due = time.monotonic() + TICK
        if self._incomplete or self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        control = self._member.control
        for feed in self._feeds:
            if not feed.gone and (feed.ledger.closed or not control.is_alive(feed.index)):
                feed.gone = True
                # the entry may be a newcomer's by now; then the table has told already
        self._retire_drained()
        if self._retired:  # somebody may have died before finishing with them
            self._member.reap()

    # --- giving back

    def _acknowledge(self, lease: Any) -> None:
        """`release()` of a message."""

    def _reject(self, lease: Any) -> None:
        """A `with` block over a message was left by an exception."""

    def _leases(self) -> int:
        return sum(len(feed.leases) for feed in (*self._feeds, *self._retired))

    def _lease_emptied(self) -> None:
        """The last lease of a feed ended after close."""
        if self._state == LEAVING and not self._leases():
            self._depart()

    def _depart(self) -> None:
        self._state = CLOSED
        lingering.discard(self)
        for feed in (*self._feeds, *self._retired):
            feed.settle()
        self._member.leave()

    # --- leaving

    def close(self) -> None:
        """Leave the channel. Views that are alive stay valid, and this member holds their leases until they die."""
        self._leave(acknowledge=True)

    def _leave(self, *, acknowledge: bool) -> None:
        self._stop = True
        with self._mutex:
            if self._state:
                return
            # crash: close.said
            self._unlearn()
            self._finish_copies()
            if self._ahead is not None:
                self._ahead.drop()
            self._settle_current(acknowledge)
            if self._crowd is not None:
                self._crowd.end()
            self._inbox.close()
            for feed in (*self._feeds, *self._retired):
                feed.emptied = self._lease_emptied
                feed.close()
            try:
                if self._leases():
                    lingering.add(self)
                    # crash: close.leaving
                    self._member.set_leaving()
                    self._member.reap()
            finally:
                self._state = LEAVING
                self._lease_emptied()
            self._wake_senders()
        # crash: close.done

    def _settle_current(self, acknowledge: bool) -> None:
        """Closing: what becomes of the message that was taken last."""

    def _at_exit(self) -> None:
        if self._state == OPEN:
            self._leave(acknowledge=False)
        if self._state == LEAVING and not self._member.control.anybody_alive():
            self._depart()  # the last one out, and its views die with the process

    def statistics(self) -> ReceiverStatistics:
        """Counters since this receiver was made."""
        if self._state == FORKED:
            self._refuse()
        self._hear_late()
        copying = self._copying()
        return ReceiverStatistics(
            received=self._received + sum(inlet.received for inlet in self._compiled()),
            received_bytes=self._received_bytes + sum(inlet.received_bytes for inlet in self._compiled()),
            missed=self._missed, redelivered=self._redelivered, abandoned=self._abandoned,
            bad_records=self._bad_records, bad_doorbells=self._bad_doorbells, sleeps=self._sleeps, ticks=self._ticks,
            late=self._late, senders=len(self._feeds),
            behind=sum(max(0, feed.behind) for feed in self._feeds), leases=self._leases(), copying=copying,
            **pinned(self._mapped_rings()),
        )  # fmt: skip

    def _about(self) -> str:
        return f" received={self._received} senders={len(self._feeds)} leases={self._leases()}"
