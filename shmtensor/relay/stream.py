"""The items of one near relay, on the far side: a thread puts them into rings of the far channel.

The thread parses, checks, copies into slots and publishes. Zenoh's threads only append to its queue.
docs/internals/relay.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..codec import raw
from ..errors import ArgumentError, ClosedError, ResourceError, RingFull, ShmTensorError, TimedOut, WireError
from .endpoints import FarProducer, FarPublisher, path_of, relayed_label, was_claimed
from .far_requests import FarClient, FarService
from .frame_queue import FrameQueue
from .frames import (
    CANCEL,
    FAN_OUT,
    LATEST,
    LOSSLESS,
    MOST_CREDIT,
    MOST_FRAME,
    MOST_RANGES,
    NOBODY,
    NOTE,
    SERVICE,
    STATE,
    STATUS,
    WORK_QUEUE,
    Bye,
    Cancel,
    Frame,
    Hello,
    Item,
    Items,
    Part,
    State,
    Status,
    Welcome,
    parse,
)
from .session import Sender as KeySender
from .threads import RelayThread
from .window import Gap, Incoming, Unfinished

if TYPE_CHECKING:
    from .inbound import Inbound

log = logging.getLogger("shmtensor.relay")

_TICK_S: Final = 0.25
_IDLE_S: Final = 1.0
_BUSY_S: Final = 0.001
_SLOW_S: Final = 0.01
_PROGRESS_S: Final = 0.05
_FULL_S: Final = 0.2
_SHORT_S: Final = 0.2
_PATIENCE_S: Final = 5.0
"""Seconds for which something that is short is waited for, before the near relay is told."""
_STATE_S: Final = 1.25
"""Seconds after which STATE is sent again if no STATUS has asked for it, as one does each second unless it waits on a
slow link behind what comes before it: a sign of life."""

_KIND_AT: Final = 13


@dataclass(frozen=True)
class Terms:
    """The limits that a far relay offers each near one, and the options of its senders."""

    messages: int
    nbytes: int
    away: float
    slots: int | None
    max_bytes: int | str | None
    user: str


class _OfBefore(Exception):
    """Raised when the attempt of a frame, or its stream, is over: nothing more of it is taken."""


class _Refused(Exception):
    """Raised when the items of a near relay cannot be taken now: another attempt may succeed."""


_Far = FarPublisher | FarProducer | FarClient


def _kind_of(error: Exception) -> tuple[type, int | None]:
    """The kind of a shortage, regardless of details in the text such as the number of free bytes."""
    return type(error), getattr(error, "errno", None)


class Stream:
    """The stream of one near relay."""

    def __init__(self, inbound: Inbound, hello: Hello) -> None:
        self._inbound, self._terms = inbound, inbound.terms
        self.near, self.attempt, self._pattern, self._path = hello.near, 0, hello.pattern, hello.path
        self._to_near: KeySender | None = None  # of the threads
        self._lock = threading.Lock()
        self._incoming = Incoming()
        self._incoming.start_at(max(hello.oldest, inbound.known(hello) + 1))
        # a body may exceed the window if nothing else is under way; what an attempt before has sent may be here too
        self._queue = FrameQueue(2 * (self._terms.nbytes + MOST_FRAME), 2 * self._terms.messages)
        self._gap = False
        self._newest = 0, 0  # number and offset of what this attempt has sent last
        self._newest_status = 0
        self._audience = NOBODY
        self._senders: dict[int, _Far] = {}
        self._labels: dict[int, str] = {}
        self._begun = 0  # of a queue: the newest item that a consumer has, or had
        self._leaving: set[int] = set()
        self._unfinished: dict[int, Unfinished] = {}
        self._filling: tuple[int, int, Any, int] | None = None  # attempt, number, a `Filling`, sender
        self._away_since: float | None = None
        self._is_over = self._stop = False
        self._refusal = ""  # why this attempt was refused: nothing more of it is taken
        self._shortage: tuple[Any, str, float] | None = None  # what is short, as it was told; since when
        self._lacking: tuple[Any, str] | None = None  # why senders cannot be made, as it was told
        self._is_told = False
        self._progress = self._audience_due = self._state_due = 0.0
        self._due = True  # something has changed that STATE has not said yet
        self._said = (0, 0)
        self._first_attempt, self._credit = hello.attempt, (0, 0)
        self._service: FarService | None = None
        if hello.pattern == SERVICE:
            self._service = FarService(
                inbound.name, hello.near, inbound.id, self._terms.nbytes, hello.path, self._send,
                self._acknowledge,
            )  # fmt: skip
        self._thread = RelayThread(self._run, f"shmtensor relay {inbound.name}")

    def start(self) -> None:
        """Begin. Raises `RuntimeError` if there is no thread for it: then nothing is left."""
        self._thread.start()

    # --- in Zenoh's threads

    def welcome(self, frame: Hello, is_there: bool) -> None:
        """A near relay begins, or begins anew: what is under way from before is not taken any more.

        `is_there`: whether its token is. One without counts as away until it comes, or until it sends something.
        """
        with self._lock:
            if frame.attempt < self.attempt:
                return
            knows, self._refusal = frame.attempt > self._first_attempt, ""
            if frame.attempt != self.attempt:
                self.attempt, self._gap, self._incoming.consumed, self._said = frame.attempt, False, 0, (0, 0)
                self._newest, self._newest_status = (0, 0), 0
            if is_there:
                self._away_since = None
            elif self._away_since is None:
                self._away_since = time.monotonic()
            welcome = Welcome(
                self.near, self._inbound.id, self.attempt, self._terms.messages, self._terms.nbytes,
                self._incoming.received, knows, self._inbound.path,
            )  # fmt: skip
        self._inbound.session.answer(self._inbound.keys.near(self.near), welcome.head())

    def feed(self, head: bytes, body: Any) -> None:
        """A frame has come. One that asks for a sign of life gets it at once, whatever the thread does."""
        if self._service is not None and len(head) > _KIND_AT and head[_KIND_AT] in (STATE, CANCEL):
            self._hear(self._service, head, body)
            return
        status: tuple[int, ...] = ()
        if len(head) > _KIND_AT and head[_KIND_AT] == STATUS:
            status = self._place_of(head, body)
            if not status:
                return
        if not self._queue.put(head, body, status=status):
            self._inbound.count_bad(WireError("more bytes than the window allows"))
            return
        with self._lock:
            if self._away_since is not None:  # it sends, though its token is not there, or the thread waits for a slot
                self._away_since = time.monotonic()
        if status:
            with self._lock:
                refusal = self._refusal if status[0] == self.attempt else ""
            if refusal:  # it has not heard that
                self._inbound.refuse(self.near, status[0], refusal)
                return
            self._state_due = time.monotonic() + _STATE_S
            self._inbound.session.answer(self._inbound.keys.near(self.near), self._state().head())

    def _place_of(self, head: bytes, body: Any) -> tuple[int, ...]:
        """What a STATUS tells of; empty if it is none, or not for this relay, which is counted."""
        try:
            frame = parse(head, body.to_bytes())
            if not isinstance(frame, Status) or frame.far != self._inbound.id:
                raise WireError(f"frame for relay {frame.far:016x}")
        except WireError as error:
            self._inbound.count_bad(error)
            return ()
        return frame.attempt, frame.number

    def _hear(self, service: FarService, head: bytes, body: Any) -> None:
        """What the near relay says of requests and replies, whatever the thread does."""
        try:
            frame = parse(head, body.to_bytes())
            if frame.far != self._inbound.id:
                raise WireError(f"frame for relay {frame.far:016x}")
            with self._lock:
                is_current, received = frame.attempt == self.attempt, self._incoming.received
            if is_current and isinstance(frame, State):
                service.confirm(frame)
            elif is_current and isinstance(frame, Cancel):
                service.cancel(frame, received)
        except WireError as error:
            self._inbound.count_bad(error)

    def _acknowledge(self, numbers: Sequence[int]) -> None:
        """Acknowledge these items of a service: the near relay needs them no more."""
        with self._lock:
            for number in numbers:
                self._incoming.acknowledge(number)
        self._inbound.acknowledged += len(numbers)
        self._due = True
        self._queue.wake()

    def note_presence(self, is_there: bool) -> None:
        """Note that the near relay's token has appeared or disappeared."""
        with self._lock:
            self._away_since = None if is_there else time.monotonic()

    # --- the thread

    def _send(self, head: bytes, body: bytes = b"") -> None:
        if self._to_near is not None:
            self._to_near.send(head, body)

    def _run(self) -> None:
        while not self._stop and not self._is_over:
            self._step()
        try:
            if self._stop:  # what was published, or is done, is not to be sent again to a successor
                self._collect()
            self._inbound.forget(self)
            if self._stop:
                self._send(self._state().head())
            self._finish()
        finally:
            if self._to_near is not None:
                self._to_near.close()
            self._inbound.note_end(self)

    def _step(self) -> None:
        """Take the next frame, if one comes, and look after the senders. What fails ends the attempt, not the stream:
        its senders stay, as what they have sent is not to be sent again, and nobody is to take them for gone."""
        try:
            if self._to_near is None:
                self._to_near = self._inbound.session.sender(self._inbound.keys.near(self.near))  # may wait
            if self._service is not None:
                self._service.start()
            got = self._queue.get(self._interval())
            if got is not None:
                self._take(*got)
            del got
            self._tick()
            self._collect()
            self._say_if_due()
        except _Refused as error:
            self._refuse(str(error))
        except Exception as error:
            if self._refuse(repr(error)):
                log.exception("relay of channel %s: a near relay is refused for an error", self._inbound.name)
            time.sleep(_SHORT_S)

    def _refuse(self, why: str) -> bool:
        """Take nothing more of this attempt. Returns whether that reason is a new one."""
        with self._lock:
            if self._refusal or self._stop or self._is_over:
                return False
            self._refusal, attempt = why, self.attempt
        self._filling, self._is_told = None, True
        # crash: relay.refused
        return self._inbound.refuse(self.near, attempt, why)

    def _interval(self) -> float:
        if self._service is not None:
            return _BUSY_S if self._service.has_untaken else _TICK_S
        if not any(map(len, self._unfinished.values())):
            return _IDLE_S
        return _BUSY_S if time.monotonic() - self._progress < _PROGRESS_S else _SLOW_S

    def _tick(self) -> None:
        now = time.monotonic()
        with self._lock:
            away = self._away_since
        if away is not None and now - away > self._terms.away:
            log.warning(
                "relay of channel %s: near relay %016x has been away for %g s, its senders leave",
                self._inbound.name, self.near, self._terms.away,
            )  # fmt: skip
            self._is_over = True
        if self._service is not None:
            with self._lock:
                if not self._gap and self._service.is_unheard(self.attempt):
                    self._gap = self._due = True
        if now >= self._audience_due:
            self._audience_due = now + _TICK_S
            self._look_at_audience()

    def _look_at_audience(self) -> None:
        if self._service is not None:
            try:
                self._service.look_for_servers()
            except ArgumentError as error:
                raise _Refused(str(error)) from None
            return
        senders = [it for it in self._senders.values() if not isinstance(it, FarClient)]
        try:
            found = {it.audience() for it in senders}
        except (ResourceError, TimedOut):  # it is the same as before while that cannot be found out
            return
        audience = LOSSLESS if LOSSLESS in found else LATEST if LATEST in found else NOBODY
        if audience != self._audience:
            self._audience, self._due = audience, True
        begun = [it[0] for waiting in self._unfinished.values() for it in waiting if was_claimed(*it[1:])]
        if max(begun, default=0) > self._begun:
            self._begun, self._due = max(begun), True

    def _take(self, head: bytes, body: Any) -> None:
        try:
            data = body.to_bytes()
            frame = parse(head, data)
            if frame.far != self._inbound.id:
                raise WireError(f"frame for relay {frame.far:016x}")
            self._handle(frame, len(data))
        except WireError as error:
            self._inbound.count_bad(error)
        finally:
            self._queue.note_done(head, body)

    def _handle(self, frame: Frame, nbytes: int) -> None:
        if isinstance(frame, Cancel) and self._pattern == WORK_QUEUE:  # of whichever attempt: the next one has begun
            self._withdraw(frame.numbers)
            return
        with self._lock:
            if isinstance(frame, Bye) and frame.attempt > self.attempt:  # that of a relay which was refused, and ends
                self._is_over = frame.ends
            if frame.attempt != self.attempt or (self._refusal and not isinstance(frame, Bye)):
                return
            if isinstance(frame, (Items, Part, Status)):
                self._note_newest(frame)
        # crash: relay.received
        if self._service is not None:
            self._service.arrived_ns = time.monotonic_ns()
        try:
            if isinstance(frame, Items):
                after = frame.after
                for item in frame.items:
                    if self._accept(frame, after, item.number):
                        self._pass_on(frame, item)
                    after = item.number
            elif isinstance(frame, Part):
                self._add(frame)
            elif isinstance(frame, Status):
                self._note_senders(frame)
                if frame.sent > self._incoming.received or frame.nbytes > self._incoming.consumed:
                    raise Gap
                if self._service is not None:
                    self._service.open(frame.attempt)
            elif isinstance(frame, Bye):
                self._is_over = frame.ends
            else:
                raise WireError(f"{type(frame).__name__} is not for a far relay")
        except _OfBefore:
            return
        except Gap:
            with self._lock:
                if frame.attempt == self.attempt:  # else what is missing is sent again already
                    self._gap = self._due = True
        with self._lock:
            if frame.attempt == self.attempt:
                self._incoming.consumed += nbytes
                self._due = True

    def _note_newest(self, frame: Items | Part | Status) -> None:
        """Within an attempt, each frame of its kind is newer than the one before: another one is a replay."""
        if isinstance(frame, Status):
            if frame.number <= self._newest_status:
                raise WireError(f"STATUS {frame.number} comes again, behind {self._newest_status}")
            self._newest_status = frame.number
            return
        place = (frame.number, frame.offset) if isinstance(frame, Part) else (frame.items[0].number, 0)
        if place <= self._newest:
            raise WireError(f"item {place[0]} at {place[1]} comes again, behind {self._newest[0]} at {self._newest[1]}")
        self._newest = (frame.items[-1].number, 0) if isinstance(frame, Items) else place

    def _accept(self, frame: Frame, after: int, number: int) -> bool:
        """Whether an item is new. Raises `_OfBefore` if the near relay has begun anew, and sends this again."""
        self._filling = None  # what was begun before is not gone on with: a request that has ended
        with self._lock:
            if frame.attempt != self.attempt:
                raise _OfBefore
            is_new = self._incoming.accept(after, number)
        if not is_new:
            self._inbound.duplicates += 1
        return is_new

    def _pass_on(self, frame: Frame, item: Item) -> None:
        """Publish one whole item."""
        number, uid, description, payload = item
        nbytes, senders = len(payload), self._senders
        if not self._is_sound(number, description, nbytes):
            return
        if uid not in senders:
            self._check_announced(uid)
        while True:
            try:
                seq = (senders.get(uid) or self._sender(uid)).forward(item, _FULL_S)
                break
            except ShmTensorError as error:
                if not self._waits(frame, number, uid, error):
                    return
        self._note_published(number, uid, seq, nbytes)

    def _add(self, frame: Part) -> None:
        """Copy a part of an item into its slot; publish it with the last one."""
        if frame.offset == 0:
            if not self._accept(frame, frame.after, frame.number):
                return
            if not self._is_sound(frame.number, frame.description, frame.nbytes):
                return
            self._check_announced(frame.sender)
            while True:
                try:
                    filling = self._sender(frame.sender).fill(frame, _FULL_S)
                    break
                except ShmTensorError as error:
                    if not self._waits(frame, frame.number, frame.sender, error):
                        return
            self._filling = frame.attempt, frame.number, filling, frame.sender
        elif self._filling is None or self._filling[:2] != (frame.attempt, frame.number):
            if frame.number <= self._incoming.received:
                return  # the rest of one that was received before, or passed over
            raise Gap
        _, _, filling, uid = self._filling
        if frame.offset != filling.filled or frame.nbytes != filling.nbytes:
            self._filling = None
            raise Gap
        filling.add(frame.payload)
        if filling.filled == filling.nbytes:
            # crash: relay.filled
            while True:
                try:
                    seq = filling.finish()
                    break
                except ShmTensorError as error:
                    if not self._waits(frame, frame.number, uid, error):
                        self._filling = None
                        return
            self._filling = None
            self._note_published(frame.number, uid, seq, filling.nbytes)

    def _is_sound(self, number: int, description: bytes, nbytes: int) -> bool:
        """Whether receivers can read an item. One that they cannot read is skipped, as they would skip it."""
        try:
            if self._service is not None:
                self._service.begin(number, description)
                description = description[NOTE:]
            raw.check(description, nbytes)
        except WireError as error:
            self._inbound.count_bad(WireError(f"item {number} is passed over: {error}"))
            with self._lock:
                self._incoming.receive(number)
                self._incoming.acknowledge(number)
            self._due = True
            return False
        return True

    def _waits(self, frame: Frame, number: int, uid: int, error: ShmTensorError) -> bool:
        """There is no slot for an item: whether to try again. Meanwhile, what consumers have done is reported.

        False: there is no room for it, which is what its client gets to know, as it would here.
        """
        if isinstance(error, RingFull):
            self._shortage = None
        elif isinstance(error, (ResourceError, TimedOut)):
            if self._service is not None:
                self._decline(self._service, number, str(error))
                return False
            self._hold_up(error)
        else:
            if isinstance(error, (ClosedError, WireError)):
                self._retire(uid)
            raise _Refused(str(error)) from None
        self._tick()
        self._collect()
        self._say_if_due()
        with self._lock:
            if self._stop or self._is_over or frame.attempt != self.attempt:
                raise _OfBefore
        return True

    def _hold_up(self, error: ShmTensorError) -> None:
        """Something is short: a pause, then the same again. If that lasts, the near relay is told, and tries again.

        The text is that of the first error of its kind: it may say what is free just now, and is not logged each time.
        """
        kind, now = _kind_of(error), time.monotonic()
        if self._shortage is None or self._shortage[0] != kind:
            since = now if self._shortage is None else self._shortage[2]
            self._shortage, self._is_told = (kind, str(error), since), True
            self._inbound.note_shortage(self.near, str(error))
        _, why, since = self._shortage
        if now - since >= _PATIENCE_S:
            raise _Refused(why)
        time.sleep(_SHORT_S)

    def _decline(self, service: FarService, number: int, why: str) -> None:
        """A request ends with an error: what one client asks for holds up no other one."""
        with self._lock:
            self._incoming.receive(number)
        # crash: relay.declined
        service.decline(number, why)
        self._due = True

    def _note_published(self, number: int, uid: int, seq: int, nbytes: int) -> None:
        # crash: relay.published
        inbound, sender = self._inbound, self._senders[uid]
        place = sender.done_word(seq) if isinstance(sender, FarProducer) else None  # if this fails, it is sent again
        with self._lock:
            self._incoming.receive(number, is_done=self._pattern == FAN_OUT)
        if place is not None:
            self._unfinished[uid].add(number, *place, seq)
            self._progress = time.monotonic()
        if self._is_told:
            self._shortage, self._is_told = None, False
            inbound.note_supply(self.near)
        if self._pattern == FAN_OUT:
            inbound.acknowledged += 1
        inbound.messages += 1
        inbound.nbytes += nbytes
        self._due = True

    # --- its senders

    def _check_announced(self, uid: int) -> None:
        """Raise `WireError` if no STATUS has named that sender."""
        if uid not in self._senders and uid not in self._labels:
            raise WireError(f"an item of sender {uid:016x}, which no STATUS has announced")

    def _sender(self, uid: int) -> _Far:
        """The sender of the far channel for one of the near channel, made when STATUS has announced it."""
        found = self._senders.get(uid)
        if found is not None:
            return found
        terms, label = self._terms, relayed_label(self._labels.get(uid, ""), self._path)
        if self._service is not None:
            found = FarClient(
                self._service, self._inbound.name, slots=terms.slots, max_bytes=terms.max_bytes, label=label
            )
        elif self._pattern == WORK_QUEUE:
            found = FarProducer(self._inbound.name, slots=terms.slots, max_bytes=terms.max_bytes, label=label)
        else:
            found = FarPublisher(self._inbound.name, slots=terms.slots, max_bytes=terms.max_bytes, label=label)
        self._senders[uid], self._unfinished[uid] = found, Unfinished()
        return found

    def _note_senders(self, frame: Status) -> None:
        """Those that have come there appear here, those that have left there leave."""
        there = {it.uid: it.label for it in frame.senders}
        self._labels = there
        if self._service is not None:  # a client's comes with its first request
            self._service.note_paths(path_of(label) for label in there.values())
        else:
            if there.keys() - self._senders.keys():
                self._audience_due = 0.0
            self._make_senders(there)
        self._leaving = self._senders.keys() - there.keys()
        if self._filling is not None and self._filling[3] in self._leaving:
            self._filling = None  # the rest was given up: while it comes, its sender is named

    def _make_senders(self, uids: Iterable[int]) -> None:
        """Make those that are not here yet. One for which there is no room comes with the first item that it sends:
        until then, it holds up no other one."""
        try:
            for uid in uids:
                self._sender(uid)
        except ShmTensorError as error:
            kind, is_short = _kind_of(error), isinstance(error, (ResourceError, TimedOut))
            is_new = self._lacking is None or self._lacking[0] != kind
            if self._lacking is None or is_new:
                self._lacking = kind, str(error)
            if not (is_short and self._senders):
                raise _Refused(self._lacking[1]) from None
            if is_new:
                log.error(
                    "relay of channel %s: a sender of near relay %016x cannot join yet: %s",
                    self._inbound.name, self.near, error,
                )  # fmt: skip
        else:
            if self._lacking is not None and self._shortage is None and self._is_told:
                self._is_told = False
                self._inbound.note_supply(self.near)
            self._lacking = None

    def _retire(self, uid: int) -> None:
        """A sender that can send no more leaves when what it has sent is done; another one comes in its place."""
        if uid in self._senders:
            key = min(0, *self._senders) - 1  # which is no uid
            self._senders[key], self._unfinished[key] = self._senders.pop(uid), self._unfinished.pop(uid)
            self._leaving.add(key)

    def _withdraw(self, numbers: Sequence[int]) -> None:
        """Withdraw messages that the near relay has taken back, except those that a consumer has."""
        wanted = set(numbers)
        for uid, waiting in self._unfinished.items():
            sender = self._senders[uid]
            for number, words, at, seq in [it for it in waiting if it[0] in wanted]:
                if isinstance(sender, FarProducer) and sender.withdraw(words, at, seq):
                    waiting.drop(number)
                    with self._lock:
                        self._incoming.acknowledge(number)
        self._due = True

    def _collect(self) -> None:
        """Find out what consumers have done, and let those senders leave that have nothing more to wait for."""
        for waiting in self._unfinished.values():
            done = list(waiting.done()) if len(waiting) else []
            if done:
                # crash: relay.done
                self._progress, self._due = time.monotonic(), True
                with self._lock:
                    for number in done:
                        self._incoming.acknowledge(number)
                self._inbound.acknowledged += len(done)
        if self._service is not None:
            credit = self._service.servers, self._service.credit()
            if credit != self._credit:
                self._credit, self._due = credit, True
        for uid in [uid for uid in self._leaving if not len(self._unfinished[uid]) and self._filling is None]:
            self._leaving.discard(uid)
            self._unfinished.pop(uid)
            self._senders.pop(uid).close()

    def _finish(self) -> None:
        """Let the senders leave, since the near relay is gone (those of a queue when all is done), or this relay
        ends."""
        self._filling = None
        if self._service is not None:
            self._service.stop()
        self._leaving = set(self._senders)
        while self._senders and not self._stop:
            self._collect()
            if self._senders:
                time.sleep(_SLOW_S)
        while self._senders:
            self._senders.popitem()[1].close()
        self._unfinished.clear()

    # --- what it says

    def _say_if_due(self) -> None:
        if not self._due and time.monotonic() < self._state_due:
            return
        with self._lock:
            consumed, received = self._incoming.consumed, self._incoming.received
        far_on = (
            consumed - self._said[0] >= self._terms.nbytes // 4 or received - self._said[1] >= self._terms.messages // 4
        )
        if far_on or self._queue.empty():
            self._due = False
            self._said, self._state_due = (consumed, received), time.monotonic() + _STATE_S
            self._send(self._state().head())
            # crash: relay.stated

    def _state(self) -> State:
        service = self._service
        servers, credit = (0, 0) if service is None else (service.servers, service.credit())
        with self._lock:
            incoming = self._incoming
            if self._pattern == WORK_QUEUE:
                credit = min(max(0, self._begun - incoming.acknowledged), MOST_CREDIT)
            return State(
                self.near, self._inbound.id, self.attempt, incoming.received, incoming.acknowledged, incoming.consumed,
                self._gap, self._audience, [it for it in incoming.ranges(MOST_RANGES) if it[1] <= incoming.received],
                servers, credit,
            )  # fmt: skip

    # --- outside

    @property
    def pattern(self) -> int:
        return self._pattern

    @property
    def received(self) -> int:
        """The newest item that is received."""
        with self._lock:
            return self._incoming.received

    @property
    def in_flight(self) -> int:
        return sum(map(len, list(self._unfinished.values())))

    def stop(self) -> None:
        """Take nothing more."""
        self._stop = True

    def join(self) -> None:
        """Wait until it has left the channel."""
        self._thread.join()
        with contextlib.suppress(Exception):
            self._inbound.session.answer(
                self._inbound.keys.near(self.near), Bye(self.near, self._inbound.id, self.attempt, True).head()
            )
