"""The receiving end of a channel: take messages of every sender, sleep while there are none, give slots back.

A receiver has a `Reader` for each sender (ring/reader.py); a `Spin` for its waits; `Claims` (claims.py), if it shares
its messages with others; and a `Prefetch` (devices.py), if they are received on a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeVar

from ..channel import control as ctl
from ..channel import membership
from ..channel.control import Entry
from ..channel.membership import Member
from ..codec.implementation import codec, decode
from ..errors import ClosedError, DependencyError, EndOfStream, ReleasedError, TimedOut, WireError
from ..memory.segment import Unreadable
from ..memory.shortage import Unserved
from ..memory.words import acquire_fence, barrier, store
from ..options import check_choice, check_timeout, waits
from ..ring.implementation import Counts, make_set
from ..ring.layout import FAN_OUT, L_PUBLISHED, OtherVersion
from ..ring.reader import ALL, ATTACH, GIVEN_UP, GROUP, LATEST, OTHER, UNREADABLE, Reader, Reception
from ..ring.ring import Ring
from ..statistics import ReceiverStatistics
from ..wire.record import BELL_HEAD, BELL_SIZE, parse_bell
from .base import (
    BUSY,
    CLOSED,
    CLOSING,
    FORKED,
    LEAVING,
    LIVENESS_INTERVAL,
    NOTHING,
    OPEN,
    AsleepWord,
    Endpoint,
    ReceiverTraits,
    check_label,
    lingering,
    local_members,
)
from .claims import Claims
from .devices import Devices, Prefetch
from .message import Message, drop_all
from .senders import attach, clear_words, wake_senders
from .spinning import Spin

log = logging.getLogger("shmtensor.endpoints")

_R = TypeVar("_R", bound="Receiver")

_FLAGS: Final = {LATEST: ctl.LATEST, GROUP: ctl.MEMBER}
"""What a member's entry says of its mode."""


class Receiver(Endpoint):
    """Base of `Subscriber` and `Consumer`."""

    _traits: ReceiverTraits
    _prefetch: Any = None  # a `Prefetch` if messages are received on a device
    _when_given_up: Callable[[], object] = bool
    """Called when a message was delivered too often, and dropped."""
    _direct: Any = None
    """The object that takes messages without the mutex (`make_set`), or None."""

    def __init__(
        self,
        channel: str,
        *,
        spin: float,
        device: Any = None,
        prefetch: int = 0,
        pin: bool | Literal["auto"] = "auto",
        until: Literal["drained", "closed"] = "drained",
        label: str | None = None,
        mode: int = ALL,
        depth: int = 1,
        group: str = "",
        claims: Claims | None = None,
    ) -> None:
        # mode, depth: of its readers, see `Reception`; claims: if it shares its messages with others
        label = check_label(label)
        check_choice("until", until, ("drained", "closed"))
        self._waits_for_more = until == "closed"  # the stream does not end with its senders: others may come
        self._mode, self._depth, self._claims = mode, depth, claims
        self._hands = None if claims is None else claims.hands
        self._devices = Devices(self, pin)
        # taken and not returned yet, with what `Prefetch` knows of its copy: the thread that removes one returns it
        self._undelivered: dict[Message, Any] = {}
        if device is not None:
            self._prefetch = Prefetch(
                device, prefetch, self._undelivered, poll=self._poll, wait=self._wait, copy_out=self._copy_out,
                keeps_leases=claims is not None,
            )  # fmt: skip
        self._spin = Spin(spin)
        self._is_announced = False  # closed with views alive: other members know that it takes nothing more
        self._unread_doorbell: bytes | None = None
        self._turns: dict[bytes, int] = {}  # index of a reader in `_readers`, by the head of its sender's doorbells
        self._liveness_check_due = 0.0
        self._turn = self._abandoned = self._bad_records = self._bad_doorbells = self._ticks = 0
        try:
            super().__init__()
            self._counts = Counts()
            self._readers: list[Any] = []  # of `Reader`
            self._retired: list[Any] = []  # read to the end, but others may still need what their senders left
            self._epoch = -1
            self._unattached: dict[int, tuple[Entry, str | None]] = {}  # and why; "": no table, None: no segment server
            self._strangers: dict[int, str] = {}  # of another version, by uid, and why: never attached again
            part = membership.Part(ctl.RECEIVER, _FLAGS.get(mode, 0) | self._flags, label, group)
            membership.join(channel, self._traits.channel, part, self._prepare)
            if claims is not None:
                claims.join(self._member)
            self._control_words, self._asleep = self._member.control.words, ctl.asleep_word(self._member.index)
            self._counters = ctl.Counters(self._control_words, self._member.index)
            self._asleep_word = AsleepWord(self._control_words, self._asleep, self._counters)
        except BaseException:
            self._abandon()
            raise

    def _prepare(self, member: Member) -> None:
        self._member = member
        control = member.control  # locked: nobody joins between the two looks
        self._senders_before = control.senders - sum(entry.role == ctl.SENDER for entry in control.members())
        self._inbox = self._traits.inbox(member.directory, member.uid)
        # crash: join.inbox
        if self._traits.kind == FAN_OUT and member.is_first:
            clear_words(member)

    def _drop_in_child(self) -> None:
        super()._drop_in_child()
        self._direct = None
        if hasattr(self, "_inbox"):  # not if the fork came while it was joining
            self._inbox.close()

    # --- receiving

    def recv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        """The next message.

        Args:
            timeout: seconds to wait; None waits for ever, 0 does not wait.
            copy: give private, writable memory instead of a view of the slot, and give the slot back at once
                (work queue: the message is still not done before you say so).

        Raises:
            TimedOut: nothing came in time (also a `TimeoutError`).
            EndOfStream: every sender has closed or died, and everything they sent is received. With `until="closed"`
                it is never raised: the next sender is waited for.
            MemoryError: there is no memory for what is copied of the next message, such as bytes. It stays there.
            DependencyError: the next message has torch tensors, and torch is not installed here. Work queue: it stays
                for a consumer that has torch, and this one raises as long as it is there. Fan-out: it is passed over.
            WireError: a sender that is left lives and cannot be read: of another version, or with other permissions.
            PeerDied, CudaError: a publisher of device memory died with messages that were not received; its memory
                cannot be reached from here (docs/guide/device-memory.md).
            ClosedError, ForkedError: this receiver is closed, or was made by this process's parent.
        """
        direct, spin = self._direct, self._spin
        patience = spin.burst_ns if timeout is None or (type(timeout) is float and timeout > 0) or waits(timeout) else 0
        if direct is not None and not copy:
            hands = self._hands
            message: Message | None = direct[self, self._undelivered, hands and hands.hand, patience]
            if message is not None:  # no boundary from the load to the return
                return message
        return self._recv(timeout, copy, patience)

    def _recv(self, timeout: float | None, copy: bool, patience: int) -> Message:
        """`recv` of a message that cannot go straight to the caller, or is not there yet."""
        hand = None
        if self._hands is not None and not self._state:  # else `close` has acknowledged it, or it is the parent's
            hand = self._hands.hand
            hand.acknowledge()
        undelivered = self._undelivered
        while True:
            message: Message | None = None
            direct = self._direct
            if copy and direct is not None and not undelivered:
                message = direct.recv(self, undelivered, patience)
            if message is None:
                message = self._run_within(timeout, self._too_late, self._next)
            elif direct.more:
                self._share()
            private = NOTHING
            if copy and self._prefetch is None:  # on a device it is private
                try:
                    private = message.copy()
                except ReleasedError:  # another thread returned it meanwhile, or the receiver is closed
                    continue
            if message in undelivered:  # no boundary from here to the return: this call returns it, or the next
                if message.meta.__class__ is DependencyError and self._traits.raises_unreadable:
                    self._pass_over(message)
                try:
                    del undelivered[message]
                except KeyError:  # CPython 3.10 switches threads here, too: another one returns it
                    continue
                if hand is not None:
                    hand.last = message._lease, message._hold, None, hand.last
                if private is not NOTHING:  # last: what this drops wakes a sender, and lets other threads run
                    message.value = private
                    if self._claims is None:  # else it is not done
                        message._hold = message._lease = None
                return message

    def _pass_over(self, message: Message) -> None:
        """Fan-out: give back a message that only a missing package can read, count it, and raise the error."""
        self._undelivered.pop(message, None)
        self._bad_records += 1
        message.release()
        raise self._unreadable(message.seq, str(message.meta))

    def _unreadable(self, seq: int, why: str) -> DependencyError:
        """The error for a message that only a missing package can read."""
        return DependencyError(f'channel "{self.name}": message {seq}: {why}', name="torch")

    def _next(self, timeout: float | None) -> Message:
        """The next message. It is in `_undelivered`, and stays there until the caller returns it."""
        if self._state:
            self._refuse()
        if time.monotonic() >= self._liveness_check_due:  # while others keep it awake
            self._check_liveness()
        self._devices.poll()
        if self._prefetch is not None:
            return self._prefetch.next(timeout)  # type: ignore[no-any-return]
        return self._left_over() or self._poll() or self._wait(timeout)

    def _left_over(self) -> Message | None:
        """A message that was taken and not returned: an exception ended that call, or another is returning it."""
        return next(iter(list(self._undelivered)), None)

    def __iter__(self: _R) -> _R:
        return self

    def __next__(self) -> Message:
        try:
            return self.recv()
        except EndOfStream:
            raise StopIteration from None
        except ClosedError:
            if self._ends_iteration():
                raise StopIteration from None
            raise

    def _ends_iteration(self) -> bool:
        """Whether a `ClosedError` ends a loop over this receiver, as it does with `until="closed"`."""
        return self._waits_for_more and self._state != FORKED

    def _share(self) -> None:
        """Wake a sleeping receiver that shares the messages: `Reader.recv` took one, and more are there."""
        if (direct := self._direct) is not None and self._try_run(lambda: self._state or self._pass_on()) is not BUSY:
            direct.more = False  # BUSY: another thread of this receiver is taking more

    def _pass_on(self) -> bool:
        """Wake a sleeping receiver that shares the messages that are there. Returns whether there was one."""
        return self._claims is not None and self._has_more() and self._claims.wake_sibling(self._member.uid)

    def _has_more(self) -> bool:
        """Whether a message is published that this receiver has not examined yet."""
        return any(reader.words[L_PUBLISHED] > reader.position for reader in self._readers)

    def _poll(self, patience: int = 0) -> Message | None:
        """A message that is there now, or within `patience` nanoseconds, or None."""
        if self._claims is not None and self._claims.scan_wanted:
            if (message := self._scan()) is not None:
                return message
            self._claims.scan_wanted = False
        if self._control_words[ctl.W_EPOCH] != self._epoch:  # without a call: most messages come by here
            self._refresh()
        readers = self._readers
        count = len(readers)
        if count == 1:
            return self._take(readers[0], patience)
        if self._traits.by_age:
            readers.sort(key=Reader.next_sent_ns)
            self._turn = 0
        for step in range(count):
            turn = self._turn + step
            reader = readers[turn % count]
            if (message := self._take(reader)) is not None:
                self._turn = turn + 1
                return message
        return None

    def _scan(self) -> Message | None:
        """A message that a receiver claimed and did not finish, found by a scan of all records; or None."""
        for reader in self._readers:
            reader.map_all()
            if (message := self._taken(reader, reader.take_unfinished)) is not None:
                return message
        return None

    def _take(self, reader: Any, patience: int = 0) -> Message | None:
        """The next message of one sender that is there now, or within `patience` nanoseconds, or None."""
        message = self._taken(reader, reader.take, patience)
        claims = self._claims
        if message is not None and claims is not None and claims.siblings and self._has_more():
            claims.wake_sibling(reader.uid)
        return message

    def _taken(self, reader: Any, take: Callable[..., Any], *patience: int) -> Message | None:
        """Call `take`, a method of the reader, and handle events, until it returns a message or None."""
        claims = self._claims
        try:
            if claims is not None and claims.refused is not None and claims.refused[0] is reader:
                if claims.is_still_refused():
                    raise self._unreadable(*claims.refused[1][1:])
                claims.refused, self._epoch = None, -1  # `_refresh` sets `_direct` again
            found = take(self, self._undelivered, *patience)
            return self._after(found, reader, take, patience) if type(found) is tuple else found
        except BaseException:
            reader.abandon()
            if claims is not None:
                claims.scan_wanted = True  # the reader may have passed it already
            raise

    def _after(self, found: Any, reader: Any, take: Callable[..., Any], patience: tuple[int, ...]) -> Message | None:
        while type(found) is tuple:
            self._handle(reader, found)
            found = None if reader.closing else take(self, self._undelivered, *patience)
        return found  # type: ignore[no-any-return]

    def _handle(self, reader: Any, event: Any) -> None:
        """Handle what a reader returned in place of a message: ring/reader.py has the list of events."""
        code, seq, detail = event
        if code == ATTACH:
            try:
                reader.ring(detail)
            except OtherVersion as error:
                self._disown(reader, str(error))
            except (WireError, FileNotFoundError) as error:
                if self._claims is None or isinstance(error, WireError):  # else it was removed: all is done
                    self._blame(reader, seq, str(error))
                reader.position = seq
        elif code == OTHER:
            self._disown(reader, reader.explain(event))
        elif code == GIVEN_UP:
            self._abandoned += 1
            log.error(self._traits.given_up, self.name, seq, reader.uid, detail)
            reader.wake_sender()
            self._when_given_up()
        elif code == UNREADABLE:
            if self._claims is not None:
                self._claims.refuse(reader, event)
                self._direct = None  # the next calls go by `_taken`
            raise self._unreadable(seq, detail)
        else:
            self._blame(reader, seq, reader.explain(event))
            reader.wake_sender()

    def _blame(self, reader: Reader, seq: int, why: str) -> None:
        """Count and log a message that cannot be read."""
        self._bad_records += 1
        log.error("channel %s: message %d of producer %016x passed over: %s", self.name, seq, reader.uid, why)

    # --- sleeping

    def _count_senders(self) -> int:
        """How many senders are there now."""
        if time.monotonic() >= self._liveness_check_due:
            self._check_liveness()
        self._refresh_if_stale()
        return sum(not reader.gone for reader in self._readers)

    def _wait(self, timeout: float | None) -> Message:
        """Stay awake as long as that pays, then sleep: docs/internals/protocols.md, section 3."""
        check_timeout(timeout)
        self._waits = timeout != 0
        now = time.monotonic
        deadline = None if timeout is None else now() + timeout
        if (message := self._spin.wait(self._poll_if_open, timeout)) is not None:
            return message
        while True:
            if self._stop:
                self._refuse()
            if self._is_over():
                raise EndOfStream(self._over_text())
            interval = self._devices.interval(LIVENESS_INTERVAL)
            remaining = interval if deadline is None else min(interval, deadline - now())
            if remaining <= 0:
                return self._last_attempt(timeout)
            woken = self._sleep(remaining)
            message = self._poll()
            if message is None and not woken:
                self._check_liveness()
                message = self._poll()
                if message is not None and remaining == interval:  # else the caller's time was up
                    self._counters.add(ctl.C_LATE)
            if message is not None:
                return message

    def _poll_if_open(self, patience: int) -> Message | None:
        if self._stop:
            self._refuse()
        return self._poll(patience)

    def _last_attempt(self, timeout: float | None) -> Message:
        """Poll once more when the time is up, after a liveness check if one is due: a caller may never sleep."""
        if time.monotonic() >= self._liveness_check_due:
            self._check_liveness()
        if (message := self._poll()) is not None:
            return message
        if self._is_over():
            raise EndOfStream(self._over_text())
        raise self._too_late(timeout)

    def _too_late(self, timeout: float | None) -> TimedOut:
        return TimedOut(f'channel "{self.name}": no message within {timeout:g} s ({self._attached_text()})')

    def _attached_text(self) -> str:
        text = f"senders attached: {len(self._readers)}"
        pids = ", ".join(str(entry.pid) for entry, why in self._unattached.values() if why)
        return f"{text}; of process {pids} nothing can be read, see the log" if pids else text

    def _over_text(self) -> str:
        text = f'channel "{self.name}": every sender has left, and everything they sent is received'
        if count := sum(reader.unacknowledged for reader in self._readers):
            text += f" ({count} that are here are not done: they come again once nothing refers to their values)"
            log.warning("%s", text)
        return text

    def _sleep(self, seconds: float) -> bool:
        """Sleep once in the inbox. True if something was there or a doorbell came, False if the time was up."""
        word = self._asleep_word
        if self._unread_doorbell is not None:
            self._read_doorbell()
        if word.has_late_doorbells:
            for doorbell in self._inbox.drain():  # for earlier sleeps
                self._note_doorbell(doorbell)
        word.has_late_doorbells = True
        if not self._inbox.can_accept():
            self._inbox.pause(seconds)
            return False
        words = word.words
        word.number = (word.number + 1) | 1
        try:
            store(words, word.at, word.number)
            # crash: sleep.asleep
            barrier()  # from here on every sender sees that we sleep, or we see what it published
            if words[ctl.W_EPOCH] != self._epoch or self._has_more():
                return True
            word.counters.add(ctl.C_SLEEPS)
            data = self._inbox.wait(seconds)
        finally:
            word.number = (word.number | 1) + 1
            store(words, word.at, word.number)
            if self._claims is not None:
                barrier()  # what a sender published that saw us asleep is visible now: `_take` may wake another
            if self._wait_queue is not None:
                self._wait_queue.disturb()
        # crash: sleep.awake
        if data is None:
            self._ticks += 1
            return False
        # each sender notifies once per sleep; of two, the other may cause a wake-up more, which costs less than a drain
        word.has_late_doorbells = len(self._readers) > 2
        if len(self._readers) > 1:
            self._note_doorbell(data)
        else:
            self._unread_doorbell = data  # there is only one sender: it is checked later, off the path of the message
        return True

    def _read_doorbell(self) -> None:
        data, self._unread_doorbell = self._unread_doorbell, None
        if data is not None:
            self._note_doorbell(data)

    def _note_doorbell(self, data: bytes) -> None:
        """Poll the doorbell's sender first. Count anything else that comes into the inbox."""
        head = data[:BELL_HEAD]
        if head not in self._turns or len(data) != BELL_SIZE:
            try:
                uid = parse_bell(data).uid
            except WireError as error:
                self._bad_doorbells += 1
                log.error("channel %s: bad doorbell: %s", self.name, str(error))
                return
            turn = next((turn for turn, reader in enumerate(self._readers) if reader.uid == uid), None)
            if turn is None:
                return
            self._turns[head] = turn
        self._turn = self._turns.get(head, self._turn)

    def _check_liveness(self) -> None:
        """Find dead senders, which cannot announce their death, and release what they left."""
        self._liveness_check_due = time.monotonic() + LIVENESS_INTERVAL
        if self._claims is not None:
            self._claims.scan_wanted = True
        self._end_dead_leases()
        if self._unattached or self._is_stale:
            self._refresh()
        control = self._member.control
        for reader in self._readers:
            if not reader.gone and (reader.sequences.closed or not control.is_alive(reader.index)):
                reader.gone = True  # the entry may be a newcomer's by now; then `_refresh` has noticed
        self._retire_drained()
        if self._retired or (self._claims is not None and self._claims.has_dead_sibling()):
            self._member.reap()  # those read to the end: another receiver may have died before finishing with them

    # --- giving messages back

    def _acknowledge(self, lease: Any) -> None:
        """Called by `release()` of a message."""
        if self._claims is not None and self._state != FORKED:
            lease.acknowledge()
            if self._hands is not None:
                self._claims.forget(lease)

    def _reject(self, lease: Any) -> None:
        """Called when a `with` block over a message was left by an exception."""
        if self._claims is not None and self._hands is not None:
            lease.done_at_end = False
            self._claims.forget(lease)

    def _to_device(self, value: Any, device: Any, non_blocking: bool) -> Any:
        """`Message.to` a CUDA device."""
        return self._devices.to_device(value, self._mapped_rings(), device, non_blocking)

    def _copy_out(self, value: Any, device: int) -> tuple[Any, Any, Any]:
        """Start to copy a value to a device, on the receiver's own stream: see `Devices.copy_out`."""
        devices = self._devices
        return devices.copy_out(value, self._mapped_rings(), device, devices.stream(device))

    def _leases(self) -> int:
        """How many messages are leased."""
        return sum(reader.lease_count for reader in (*self._readers, *self._retired))

    def _end_dead_leases(self) -> None:
        for reader in (*self._readers, *self._retired):
            reader.end_dead()

    def _lease_emptied(self) -> None:
        """Leave if all leases have ended. Called after close, in any thread, when the last lease of a reader ends."""
        if self._state == LEAVING and not self._leases():
            self._closing = self._lease_emptied  # a thread that is inside a call sees to it when that ends
            self._try_run(self._depart)

    def _depart(self) -> None:
        """Leave the channel, and release the senders' memory: no lease is left."""
        for reader in (*self._readers, *self._retired):
            reader.forget_emptied()
            reader.trace(None, reader.uid)  # its area of the trace may be another's from here on
        self._member.leave(lost=self._report_lost if self._traits.counts_lost and self in lingering else None)
        self._readers, self._retired, self._state = [], [], CLOSED  # last: what an exception cuts short is repeated
        lingering.discard(self)

    def _depart_if_last(self) -> None:
        """Leave at exit if this is the last member, since its views end with the process."""
        if self._state == LEAVING and not self._member.control.anybody_alive():
            self._depart()

    def _report_lost(self, count: int) -> None:
        """Log the messages that are lost: it was closed with views alive, and leaves now as the last member."""
        log.warning(
            'channel "%s": %d messages that no consumer has finished end with this closed %s, whose views were all '
            "that kept the channel: start another consumer before they die",
            self.name, count, type(self).__name__,
        )  # fmt: skip

    # --- the senders of the channel, from attaching to them until they have left

    @property
    def _is_stale(self) -> bool:
        """Whether members have joined or left since `_refresh` read the table of members."""
        return bool(self._control_words[ctl.W_EPOCH] != self._epoch)

    def _refresh_if_stale(self) -> None:
        """`_refresh` if it is due, and this receiver is open."""
        if not self._state and self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()

    def _refresh(self) -> None:
        """Read the table of members: attach new senders, mark those that left."""
        self._turns = {}
        control = self._member.control
        epoch = control.epoch
        acquire_fence()
        entries = list(control.members())
        present = {entry.uid: entry for entry in entries if entry.role == ctl.SENDER}
        for reader in self._readers:
            if reader.uid not in present or reader.sequences.closed:
                reader.gone = True
            present.pop(reader.uid, None)
        for reader in list(self._retired):
            if reader.uid in present:
                del present[reader.uid]
            else:
                reader.close()
                self._retired.remove(reader)
        unattached: dict[int, tuple[Entry, str | None]] = {}
        self._strangers = {uid: why for uid, why in self._strangers.items() if uid in present}
        for entry in present.values():
            if entry.uid in self._strangers:
                unattached[entry.uid] = entry, self._strangers[entry.uid]
                continue
            try:
                self._readers.append(self._attach(entry))
            except (FileNotFoundError, Unserved) as error:
                unattached[entry.uid] = entry, None if isinstance(error, Unserved) else ""
            except (WireError, Unreadable) as error:
                unattached[entry.uid] = entry, str(error)
                if entry.uid not in self._unattached:
                    self._report(entry.uid, str(error))
        self._unattached = unattached
        events = self._tracing.follow(self._member, entries)
        for reader in (*self._readers, *self._retired):
            reader.trace(events, reader.uid)
        # crash: attach.done
        claims = self._claims
        if claims is not None:
            siblings = claims.update_siblings(entries)
            for reader in self._readers:
                reader.set_siblings(siblings)
        self._epoch = epoch
        for reader in self._readers:
            reader.epoch = epoch
        self._retire_drained()
        self._direct = make_set(self._readers, by_age=self._traits.by_age) if self._prefetch is None else None
        if claims is not None and claims.refused is not None:
            if claims.refused[0] in self._readers:
                self._direct = None
            else:
                claims.refused = None

    def _report(self, uid: int, why: str) -> None:
        """Count and log a sender that cannot be attached."""
        self._bad_records += 1
        log.error("channel %s: cannot attach to producer %016x: %s", self.name, uid, why)

    def _disown(self, reader: Reader, why: str) -> None:
        """Detach a sender whose first message is of another version.

        Its messages are not taken: on a work queue, other consumers may be able to read them.
        """
        self._report(reader.uid, why)
        self._strangers[reader.uid] = why
        reader.abandon()
        self._direct = None
        self._epoch = -1  # the next `_refresh` lists it as unattached
        if self._member.group is None:  # another member of the group may be able to read it
            reader.sequences.finish(*self._member.recipient)  # what it leaves need not stay for this receiver
        # a new list: a caller may iterate over the old one
        self._readers = [other for other in self._readers if other is not reader]
        reader.close()

    def _attach(self, entry: Entry) -> Reader:
        """A reader of the sender of that entry."""
        return attach(self._member, entry, self._reception())

    def _mapped_rings(self) -> list[Ring]:
        """Every ring that is attached."""
        return [ring for reader in (*self._readers, *self._retired) for ring in reader.rings]

    def _reception(self) -> Reception:
        """What readers need to know about this receiver."""
        member = self._member
        return Reception(
            mode=self._mode, decode=decode, codec=codec, message=Message, counts=self._counts,
            is_locked=self._mutex.locked, control=member.control.words, epoch_at=ctl.W_EPOCH, member=member.index,
            recipient=member.recipient, owner=member, readonly=not self._traits.maps_writable,
            max_attempts=0 if self._claims is None else self._claims.max_attempts, depth=self._depth,
            shown_at=ctl.counters_word(member.index) + ctl.C_MISSED,
        )  # fmt: skip

    def _retire_drained(self) -> None:
        """Detach senders that are gone and read to the end; the last receiver to do so removes what they left."""
        drained = [reader for reader in self._readers if reader.gone and reader.is_drained()]
        if not drained:
            return
        for reader in drained:
            self._readers.remove(reader)
            self._retired.append(reader)
            reader.unmap()
            reader.sequences.finish(*self._member.recipient)
            # crash: drain.finished
        self._member.reap()  # moves the epoch; the next refresh forgets them

    def _is_over(self) -> bool:
        """Whether at least one sender has been there since this receiver joined, and all are gone and drained.

        Also, for now, if this receiver holds claims itself and only others' unfinished messages are left: if two waited
        for each other's, they would wait for ever.
        """
        if any(reader.gone for reader in self._readers):
            self._retire_drained()
        if self._waits_for_more:
            return False
        if self._readers and self._claims is not None:
            return all(reader.gone and not reader.next() for reader in self._readers) and any(
                reader.unacknowledged for reader in self._readers
            )
        if self._readers or self._member.control.senders <= self._senders_before:
            return False
        acquire_fence()  # the epoch is advanced before a sender is counted
        self._refresh_if_stale()
        if self._readers:
            return False
        if (unread := self.unread()) is not None:
            raise unread
        return not any(self._living_strangers())

    def unread(self) -> WireError | None:
        """The error that says which living sender cannot be attached, and why; None if all can be."""
        for entry, why in self._living_strangers():
            if why:
                return WireError(f'channel "{self.name}": process {entry.pid} sends what cannot be read here: {why}')
        return None

    def _living_strangers(self) -> Iterator[tuple[Entry, str | None]]:
        control = self._member.control
        return (it for it in self._unattached.values() if it[1] is None or control.is_alive(it[0].index))

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
        """Close. Every step may be repeated: the next `close` finishes what an exception cut short."""
        if self._state in (CLOSED, FORKED):
            return
        if self._state != LEAVING:
            # crash: close.said
            self._state = CLOSING
            self._direct = None
            self._devices.finish()
            self._pass_on()  # this receiver may have been woken for it
            for reader in (*self._readers, *self._retired):
                reader.emptied, reader.closing = self._lease_emptied, True  # a call without the mutex gives nothing now
            if self._claims is not None:
                self._claims.close(acknowledge=acknowledge)
            drop_all(self._undelivered)
            if self._wait_queue is not None:
                self._wait_queue.end()
            self._inbox.close()
            for reader in (*self._readers, *self._retired):
                reader.close()
        try:
            if self._leases() and not self._is_announced:
                lingering.add(self)
                # crash: close.leaving
                self._member.set_leaving()
                self._member.reap()
            self._is_announced = True
        finally:
            self._state = LEAVING
        self._end_dead_leases()
        if not self._leases():
            self._depart()
        wake_senders(self._member)
        if self._claims is not None:
            self._claims.leave()
        # crash: close.done

    def _at_exit(self) -> None:
        if self._state in (OPEN, CLOSING):
            self._leave(acknowledge=False)
        if self._state == LEAVING:
            self._run(self._depart_if_last)

    def _outlast(self) -> None:
        """At exit, with views that will not be dropped, such as a daemon thread's: leave, if no other process is left.

        Otherwise the kernel drops this member's lock when the process ends, and the others sweep what it leaves.
        """
        control, local = self._member.control, local_members()
        if not any(control.is_alive(entry.index) for entry in control.members() if entry.uid not in local):
            self._run(self._depart)

    def statistics(self) -> ReceiverStatistics:
        """A frozen snapshot of this receiver's counters since it was created."""
        if self._state == FORKED:
            self._refuse()
        self._read_doorbell()
        devices = self._devices.statistics(self._mapped_rings())  # first: copies that are done release leases
        counts, kept = self._counts, list(self._undelivered)
        return ReceiverStatistics(
            received=counts.received - len(kept),
            received_bytes=counts.received_bytes - sum(message.nbytes for message in kept),
            missed=counts.missed, redelivered=counts.redelivered, abandoned=self._abandoned,
            bad_records=self._bad_records, bad_doorbells=self._bad_doorbells, sleeps=self._counters[ctl.C_SLEEPS],
            ticks=self._ticks, late=self._counters[ctl.C_LATE], senders=len(self._readers),
            behind=sum(max(0, reader.behind) for reader in self._readers), leases=self._leases(),
            **devices,
        )  # fmt: skip

    def __repr__(self) -> str:
        received = self._counts.received - len(self._undelivered)
        return f"{super().__repr__()[:-1]} received={received} senders={len(self._readers)} leases={self._leases()}>"
