"""The receiving end of a channel: attach to every sender, take messages awake or asleep, give slots back.

`Subscriber` and `Consumer` say how they read and what becomes of a message that was taken.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from ..channel import control as ctl
from ..channel import membership
from ..channel.inbox import Inbox
from ..channel.membership import Member
from ..errors import ArgumentError, ArgumentTypeError, EndOfStream, ReleasedError, TimedOut, WireError
from ..memory.words import barrier, store
from ..ring.feed import ATTACH, GIVEN_UP, OTHER, Feed
from ..ring.layout import FAN_OUT, L_PUBLISHED, OtherVersion
from ..statistics import ReceiverStatistics
from ..wire.record import BELL_HEAD, BELL_SIZE, parse_bell
from .ahead import Ahead
from .base import CLOSED, CLOSING, FORKED, LEAVING, NOTHING, OPEN, TICK, check_timeout, lingering
from .devices import LOOK_S, check_pin, pinned
from .message import Message
from .sources import Sources, log
from .spinning import Spin

_R = TypeVar("_R", bound="Receiver")


class Receiver(Sources):
    """Base of `Subscriber` and `Consumer`."""

    _kind: int
    _flags = 0
    _counts_lost = False  # whether it says how many messages end with it if it leaves after its last view
    _keeps_claims = False  # whether `recv(copy=True)` leaves the message what it needs to say that it is done
    _abandoned_text = "channel %s: message %d of producer %016x dropped after %d attempts that did not finish it"
    _hands: Any = None
    """What each thread has in hand: a work queue's, where asking for the next message says that it is done."""

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
        self._spin = Spin(spin)
        self._turn = self._nap = 0
        self._stop = self._late_bells = False
        self._is_said = False  # that nothing more is for this member: closed with views alive
        # taken and not returned yet, with what `Ahead` knows of its copy: whoever removes one has it
        self._undelivered: dict[Message, Any] = {}
        self._unheard: bytes | None = None
        self._turns: dict[bytes, int] = {}  # of the feeds whose doorbells came, by how those begin
        self._look_around_due = 0.0
        self._abandoned = 0
        self._bad_doorbells = self._sleeps = self._ticks = self._late = 0
        try:
            super().__init__()
            membership.join(channel, self._channel_kind, ctl.RECEIVER, self._flags, self._prepare)
            control, peers = self._member.control, self._member.peers()
            self._control_words, self._asleep = control.words, ctl.asleep_word(self._member.index)
            self._senders_before = control.senders - sum(1 for entry in peers if entry.role == ctl.SENDER)
            self._wake_senders()
        except BaseException:
            self._abandon()
            raise

    def _prepare(self, member: Member) -> None:
        self._member = member
        self._inbox = Inbox(member.directory, member.uid)
        # crash: join.inbox

    def drop_in_child(self) -> None:
        super().drop_in_child()
        self._direct = None
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
            WireError: a sender that is left lives and cannot be read: of another version, or with other permissions.
            PeerDied, CudaError: a publisher of device memory died with messages that were not received; its memory
                cannot be reached from here (docs/guide/device-memory.md).
            ClosedError, ForkedError: this receiver is closed, or was made by this process's parent.
        """
        hand = None if self._hands is None else self._begin(self._hands.hand)
        undelivered = self._undelivered
        while True:
            message: Message | None = None
            direct = self._direct
            if direct is not None and not undelivered:
                patience = self._spin.burst_ns if timeout is None or timeout else 0
                message = direct.recv(self, undelivered, patience)
            if message is None:
                message = self._run(self._next, timeout)
            elif direct.more:
                self._share()
            private = NOTHING
            if copy:
                try:
                    private = self._copy_of(message)
                except ReleasedError:  # another thread returned it meanwhile, or the receiver is closed
                    continue
            if message in undelivered:  # no boundary from here to the return: this call has it, or the next one gets it
                if private is not NOTHING:
                    message.value = private
                    if not self._keeps_claims:
                        message._hold = message._lease = None
                if hand is not None:
                    hand.message = message._lease, message._hold
                del undelivered[message]
                return message

    def _next(self, timeout: float | None) -> Message:
        """The next message, which is in `_undelivered` and stays there."""
        if self._state:
            self._refuse()
        self._before_next()
        if self._gpu is not None:
            self._gpu.pending.look()
        if self._ahead is not None:
            message = self._ahead.next(timeout)
        else:
            left = self._left_over()
            if left is not None:
                return left
            message = self._poll() or self._wait(timeout)
        return message  # type: ignore[no-any-return]

    def _left_over(self) -> Message | None:
        """A message that a call took which an exception kept from returning it, or that another thread is about to
        return and finds gone."""
        return next(iter(list(self._undelivered)), None)

    def __iter__(self: _R) -> _R:
        return self

    def __next__(self) -> Message:
        try:
            return self.recv()
        except EndOfStream:
            raise StopIteration from None

    def _before_next(self) -> None:
        """Called before each look for a message."""

    def _begin(self, hand: Any) -> Any:
        """A thread or task asks for the next message. Only a work queue has `_hands`."""
        return hand

    def _share(self) -> None:
        """`Feed.recv` took a message while there was more to take and another consumer slept."""

    @abstractmethod
    def _copy_of(self, message: Message) -> Any:
        """`recv(copy=True)`: a private copy of the value, before it is known whose the message is; or `NOTHING`."""

    def _poll(self, patience: int = 0) -> Message | None:
        """A message that is there now, or within `patience` nanoseconds at most, or None. The senders take turns."""
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        feeds = self._feeds
        count = len(feeds)
        if count == 1:
            return self._take(feeds[0], patience)
        for step in range(count):
            turn = self._turn + step
            feed = feeds[turn % count]
            message = self._take(feed)
            if message is not None:
                self._turn = turn + 1
                return message
        return None

    def _take(self, feed: Any, patience: int = 0) -> Message | None:
        """The next message of one sender, there now or within so many nanoseconds, or None."""
        return self._taken(feed, feed.take, patience)

    def _taken(self, feed: Any, take: Callable[..., Any], *patience: int) -> Message | None:
        """What `take`, a method of the feed, takes; events that it answers with are handled until there are no more."""
        try:
            while type(found := take(self, self._undelivered, *patience)) is tuple:
                self._handle(feed, found)
                if feed.closing:
                    return None
            return found  # type: ignore[no-any-return]
        except BaseException:
            feed.abandon()
            raise

    def _handle(self, feed: Any, event: Any) -> None:
        """What a feed has answered in place of a message: ring/feed.py has the list of events."""
        code, seq, detail = event
        if code == ATTACH:
            try:
                feed.ring(detail)
            except OtherVersion as error:
                self._disown(feed, str(error))
            except (WireError, FileNotFoundError) as error:
                if self._kind == FAN_OUT or isinstance(error, WireError):  # else all in it was done, and it was removed
                    self._blame(feed, seq, str(error))
                feed.position = seq
        elif code == OTHER:
            self._disown(feed, feed.explain(event))
        elif code == GIVEN_UP:
            self._abandoned += 1
            log.error(self._abandoned_text, self.name, seq, feed.uid, detail)
            feed.wake_sender()
        else:
            self._blame(feed, seq, feed.explain(event))
            feed.wake_sender()

    def _blame(self, feed: Feed, seq: int, why: str) -> None:
        self._bad_records += 1
        log.error("channel %s: message %d of producer %016x passed over: %s", self.name, seq, feed.uid, why)

    # --- sleeping

    def _wait(self, timeout: float | None) -> Message:
        """Stay awake as long as that pays, then sleep: docs/internals/protocols.md, section 3."""
        check_timeout(timeout)
        now = time.monotonic
        deadline = None if timeout is None else now() + timeout
        message = self._spin.wait(self._poll_if_open, timeout)
        if message is not None:
            return message
        while True:
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

    def _poll_if_open(self, patience: int) -> Message | None:
        if self._stop:
            self._refuse()
        return self._poll(patience)

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
        return TimedOut(f'channel "{self.name}": no message within {timeout:g} s ({self._attached_text()})')

    def _attached_text(self) -> str:
        text = f"{len(self._feeds)} senders attached"
        pids = ", ".join(str(entry.pid) for entry, why in self._unattached.values() if why)
        return f"{text}; of process {pids} nothing can be read, see the log" if pids else text

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
        self._end_dead_leases()
        if self._unattached or self._control_words[ctl.W_EPOCH] != self._epoch:
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
        return sum(feed.lease_count for feed in (*self._feeds, *self._retired))

    def _end_dead_leases(self) -> None:
        for feed in (*self._feeds, *self._retired):
            feed.end_dead()

    def _lease_emptied(self) -> None:
        """The last lease of a feed ended after close."""
        if self._state == LEAVING and not self._leases():
            self._depart()

    def _depart(self) -> None:
        for feed in (*self._feeds, *self._retired):
            feed.settle()
        self._member.leave(lost=self._report_lost if self._counts_lost and self in lingering else None)
        self._state = CLOSED  # last: a departure that an exception cut short is repeated by the next `close`
        lingering.discard(self)

    def _report_lost(self, count: int) -> None:
        """It was closed with views alive, and has left now as the last member, with messages that nobody finished."""
        log.warning(
            'channel "%s": %d messages that no consumer has finished end with this closed %s, whose views were all '
            "that kept the channel: start another consumer before they die",
            self.name, count, type(self).__name__,
        )  # fmt: skip

    # --- leaving

    def close(self) -> None:
        """Leave the channel. Idempotent.

        Views that are alive stay valid, and this member holds their leases until they die. Called by a signal handler
        or a finalizer that interrupts a call of this very thread, it takes effect when that call ends, with
        `ClosedError`.
        """
        self._leave(acknowledge=True)

    def _leave(self, *, acknowledge: bool) -> None:
        self._stop = True
        self._close(lambda: self._run(self._finish, acknowledge))

    def _finish(self, acknowledge: bool) -> None:
        """Every step may be repeated, so that a `close` that an exception cut short is finished by the next one."""
        if self._state in (CLOSED, FORKED):
            return
        if self._state != LEAVING:
            # crash: close.said
            self._state = CLOSING
            self._direct = None
            self._finish_copies()
            self._settle_current(acknowledge)
            self._drop_undelivered()
            if self._crowd is not None:
                self._crowd.end()
            self._inbox.close()
            for feed in (*self._feeds, *self._retired):
                feed.emptied = self._lease_emptied
                feed.close()
        try:
            if self._leases() and not self._is_said:
                lingering.add(self)
                # crash: close.leaving
                self._member.set_leaving()
                self._member.reap()
            self._is_said = True
        finally:
            self._state = LEAVING
        self._end_dead_leases()
        self._lease_emptied()
        self._wake_senders()
        # crash: close.done

    def _drop_undelivered(self) -> None:
        """What was taken and never returned: a fan-out's is given back, a work queue's goes to another consumer."""
        while self._undelivered:
            try:
                message, _ = self._undelivered.popitem()  # whoever removes one has it
            except KeyError:
                return
            message._empty()

    def _settle_current(self, acknowledge: bool) -> None:
        """Closing: what becomes of the message that was taken last."""

    def _at_exit(self) -> None:
        if self._state in (OPEN, CLOSING):
            self._leave(acknowledge=False)
        if self._state == LEAVING and not self._member.control.anybody_alive():
            self._depart()  # the last one out, and its views die with the process

    def statistics(self) -> ReceiverStatistics:
        """Counters since this receiver was made."""
        if self._state == FORKED:
            self._refuse()
        self._hear_late()
        copying, counts, kept = self._copying(), self._counts, list(self._undelivered)
        return ReceiverStatistics(
            received=counts.received - len(kept),
            received_bytes=counts.received_bytes - sum(message.nbytes for message in kept),
            missed=counts.missed, redelivered=counts.redelivered, abandoned=self._abandoned,
            bad_records=self._bad_records, bad_doorbells=self._bad_doorbells, sleeps=self._sleeps, ticks=self._ticks,
            late=self._late, senders=len(self._feeds),
            behind=sum(max(0, feed.behind) for feed in self._feeds), leases=self._leases(), copying=copying,
            **pinned(self._mapped_rings()),
        )  # fmt: skip

    def _about(self) -> str:
        received = self._counts.received - len(self._undelivered)
        return f" received={received} senders={len(self._feeds)} leases={self._leases()}"
