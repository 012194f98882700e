"""The near side of a channel: it takes messages, sends them, and keeps each until the far side has acknowledged it.

    SEEKING -> WELCOME -> OPEN -> gap, BYE, token gone, silence -> SEEKING
            -> REFUSE  -> REFUSED -> (as SEEKING)

docs/internals/relay.md.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal

from ..endpoints.message import Message, store_attempts, words_of
from ..errors import ClosedError, ResourceError, ShmTensorError, TimedOut, WireError
from ..shielded import Condition
from .endpoints import NearConsumer, NearSubscriber
from .frames import (
    FAN_OUT,
    LATEST,
    LOSSLESS,
    MOST_ITEMS,
    NOBODY,
    SERVICE,
    WORK_QUEUE,
    Bye,
    Cancel,
    Frame,
    Hello,
    Items,
    OtherProtocol,
    Part,
    Refuse,
    Sender,
    State,
    Status,
    Welcome,
    parse,
)
from .keys import Keys, path_hash
from .near_requests import NearService, Replying, Sent, Taken, origin_of, read
from .refusal import Refusal
from .sending import BATCH, ItemSender, announced
from .session import Sender as KeySender
from .session import Session, why_silent
from .threads import RelayThread, join
from .window import Outgoing

log = logging.getLogger("shmtensor.relay")

SEEKING, REFUSED, OPEN, FAILED, CLOSED = "seeking", "refused", "open", "failed", "closed"

_TICK_S: Final = 0.25
_IDLE_S: Final = 1.0
_HELLO_S: Final = 0.25
_HELLO_REFUSED_S: Final = 5.0
_HELLO_LAST_S: Final = 1.0
"""The same while it drains: items that are refused until the end are lost, or done twice."""
_STATUS_S: Final = 1.0
_SHORT_S: Final = 0.25
"""Seconds after which a step that failed for lack of a resource is tried again."""
_SILENCE_S: Final = 3.0
"""Seconds without STATE, which comes each second, after which a far relay is looked for anew."""
_EXPLAIN_S: Final = 2.0
"""Seconds without an answer after which it is said why, as far as that can be found out."""
_LOOK_S: Final = 0.01
"""Seconds between two checks of the requests in flight: a client that cancels one does not notify the relay."""
_MOST_LATEST: Final = 8
"""Messages under way at most while old ones are dropped for new ones."""
_RECALL_S: Final = 2.0
"""Seconds without a consumer there after which a queue's messages that wait there go to others."""
_LOST_S: Final = 30.0
"""Seconds without the far relay after which a queue's messages go to others; the far relay keeps their senders as long.
Also seconds without a far consumer while another relay there has messages, and does the same."""
_MOST_ATTEMPTS: Final = 250
_MOST_ANNOUNCED: Final = 240
"""Senders at most: each is a member there, of 256. One that has left is until all that it sent is acknowledged."""


@dataclass(frozen=True)
class _Gone:
    """Raised when the far relay of this attempt is not there any more."""

    attempt: int


_End = NearSubscriber | NearConsumer | NearService
_sender_of: Final = attrgetter("sender")


class Outbound:
    """One channel of a near relay. It has a thread, which takes and sends; acknowledgements come in Zenoh's.

    It joins a fan-out when it has first found its peer, so that no publisher waits for one that was never reached; a
    queue at once, whose messages nobody has to wait for. A service has another thread, for replies; and its end in the
    channel is there only while there are servers for it.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        remote: str,
        pattern: int,
        *,
        delivery: Literal["auto", "all", "latest"],
        user: str,
        transit: bool = True,
    ) -> None:
        self.name, self._pattern, self._delivery, self._user = name, pattern, delivery, user
        self._transit = transit
        self._session, self._keys = session, Keys(remote)
        self._id, self._attempt, self._far, self._path = secrets.randbits(63) | 1, 1, 0, path_hash(name)
        self._window: Outgoing[Sent] = Outgoing()
        self._changed = Condition()
        self._state, self.reason = SEEKING, ""
        self._shortage = ""  # what is short now, and was told
        self._refusal = Refusal()
        self._events: deque[Frame | _Gone | str] = deque()
        self._sending: ItemSender[Sent] | None = None  # of this attempt
        self._far_path = 0
        self._heard = self._hello_due = self._status_due = 0.0
        self._explain_due: float | None = time.monotonic() + _EXPLAIN_S
        self._told: list[Sender] = []
        self._here: list[int] | None = None  # the senders that were there then; None: others were told of as well
        self._said = 0  # so many STATUS
        self._audience, self._gap = 0, False
        self._is_latest = delivery == "latest"
        self._stop = self._is_draining = False
        self.messages = self.nbytes = self.resent = self.connections = self.bad_frames = self.acknowledged = 0
        self._last_far = self._servers = 0  # of a service
        self._credit = (0, 0)  # the newest item received there, second; of a service, how many may be sent beyond it
        self._begun = 0  # of a queue: the newest item that a consumer there has begun with, at most
        self._look_due = self._ask_due = self._cancel_due = 0.0
        self._alone_since = 0.0  # of a queue: since when no consumer is there for what is under way; 0: one is
        self._taken_back: list[int] = []  # of a queue: items that went to others while the far relay was away
        self._endpoint: _End | None = None
        self._replying: Replying | None = None
        self._held: list[Sent] = []  # taken, and to be sent when their senders can be announced
        self._to_all = session.sender(self._keys.hello)
        self._data: KeySender | None = None
        if pattern == SERVICE:
            self._replying = Replying(name, self._find, self._put, self._note_gap, self._count_bad)
        self._thread = RelayThread(self._run, f"shmtensor relay {name}")

    def start(self) -> None:
        """Begin. Whatever ends this early, `close` ends the rest."""
        session = self._session
        session.receive(self._keys.near(self._id), self._on_frame)
        session.appear(self._keys.alive_near(self._id))
        session.watch(self._keys.alive_far("*"), self._on_token)
        if self._pattern == WORK_QUEUE:
            self._endpoint = self._join(0)
        if self._replying is not None:
            self._replying.start()
        self._thread.start()

    def _join(self, avoided: int, before: NearSubscriber | None = None, *, is_latest: bool = False) -> _End:
        if self._pattern == SERVICE:
            return NearService(self.name, avoided, self._transit)
        if self._pattern == WORK_QUEUE:
            return NearConsumer(
                self.name, avoided, self._transit, acknowledge="release", max_attempts=_MOST_ATTEMPTS, until="closed"
            )
        delivery: Literal["all", "latest"] = "latest" if is_latest else "all"
        passed = self._endpoint.passed() if isinstance(self._endpoint, NearSubscriber) else None
        return NearSubscriber(self.name, avoided, self._transit, before, passed, delivery=delivery, until="closed")

    # --- what comes, in Zenoh's threads

    def _on_frame(self, head: bytes, body: Any) -> None:
        try:
            frame = parse(head, body.to_bytes())
            if frame.near != self._id:
                raise WireError(f"frame for relay {frame.near:016x}")
            if isinstance(frame, State):
                self._on_state(frame)
                return
            if isinstance(frame, (Items, Part, Status)) and self._replying is not None:
                self._replying.feed(frame, len(body))
                return
        except OtherProtocol as error:
            self._post(f"the far relay there: {error}")
            return
        except WireError as error:
            self._count_bad(error)
            return
        self._post(frame)

    def _on_state(self, frame: State) -> None:
        """What is acknowledged is so in whichever attempt: the end of one may overtake its last STATE."""
        with self._changed:
            if frame.far != self._last_far or frame.attempt > self._attempt:
                return
            is_current = self._state == OPEN and frame.attempt == self._attempt
            done = self._window.acknowledge(frame.acknowledged, frame.ranges, frame.consumed if is_current else 0)
            self.acknowledged += len(done)
            is_over = is_current and self._note_state(frame)
            self._changed.notify_all()
        if is_over:
            log.info("relay of channel %s is not refused any more", self.name)
        # crash: relay.acknowledged
        for it in done:
            it.release()

    def _note_state(self, frame: State) -> bool:
        """What the far relay says in this attempt. Returns whether that ends a refusal."""
        self._heard = time.monotonic()
        self._audience = frame.audience
        self._gap = self._gap or frame.gap
        self._servers, self._credit = frame.servers, (frame.credit, frame.received)
        if self._pattern == WORK_QUEUE:
            self._begun = max(self._begun, frame.acknowledged + frame.credit)
        return self._refusal.note_state(frame, self._heard)

    def _on_token(self, key: str, is_there: bool) -> None:
        with self._changed:
            if not is_there and self._far and key == self._keys.alive_far(self._far):
                self._events.append(_Gone(self._attempt))
            elif is_there and self._state != OPEN:
                self._hello_due = 0.0
            self._changed.notify_all()

    def _find(self, number: int) -> Taken | None:
        with self._changed:
            found = self._window.get(number)
        return found if isinstance(found, Taken) else None

    def _note_gap(self) -> None:
        with self._changed:
            self._gap = True
            self._changed.notify_all()

    def _post(self, event: Frame | str) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _count_bad(self, error: WireError) -> None:
        with self._changed:
            self.bad_frames += 1
        log.error("relay of channel %s: a frame is dropped: %s", self.name, str(error))

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stop:
                self._round()
        except ClosedError as error:
            if not self._stop:
                self._fail(str(error))
        except ShmTensorError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("relay of channel %s: stopped by an error", self.name)
            self._fail(repr(error))

    def _round(self) -> None:
        try:
            self._handle_events()
            if self._state == OPEN:
                self._pass_on()
            else:
                self._seek()
        except (ResourceError, TimedOut) as error:  # it has changed nothing, and may be gone soon
            self._hold_up(str(error))

    def _hold_up(self, why: str) -> None:
        """Pause and then retry, because this host lacks a resource."""
        with self._changed:
            is_new = self._shortage != why
            self._shortage = self.reason = why
        if is_new:
            log.error("relay of channel %s is held up, and goes on trying: %s", self.name, why)
        until = time.monotonic() + _SHORT_S
        with self._changed:
            while True:
                remaining = until - time.monotonic()
                if self._stop or remaining <= 0:
                    return
                self._changed.wait(remaining)

    def _note_supply(self) -> None:
        """Note that the lacking resource is available again."""
        if self._shortage:
            with self._changed:
                self._shortage = self.reason = ""
            log.info("relay of channel %s goes on", self.name)

    def _fail(self, why: str) -> None:
        log.error("relay of channel %s ends: %s", self.name, why)
        with self._changed:
            self._state, self.reason = FAILED, why
            self._changed.notify_all()
        if self._far:
            self._put(Bye(self._id, self._far, self._attempt, True).head())
        self._leave()

    def _handle_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, _Gone):
                if self._state == OPEN and event.attempt == self._attempt:
                    self._begin_anew("the far relay is gone, or cannot be reached", pause=_HELLO_S)
            elif isinstance(event, str):
                if self._state != OPEN:
                    self._note_refusal(event)
            elif isinstance(event, Welcome):
                self._on_welcome(event)
            elif event.attempt == self._attempt and isinstance(event, Refuse):
                if self._state == OPEN and event.far == self._far:
                    self._begin_anew("refused", is_told=True)
                if self._state != OPEN:  # a WELCOME of this attempt, by another far relay, may still come
                    self._note_refusal(event.why)
            elif isinstance(event, Bye):
                if (event.far, event.attempt) == (self._far, self._attempt) and self._state == OPEN:
                    self._begin_anew("the far relay has left" if event.ends else "the far relay begins anew")
            elif not isinstance(event, (Refuse, Bye)):
                self._count_bad(WireError(f"{type(event).__name__} is not for a near relay"))

    def _note_refusal(self, why: str) -> None:
        with self._changed:
            now = time.monotonic()
            is_new = self._refusal.begin(why, now)
            self._state, self.reason, self._hello_due = REFUSED, why, now + self._pause()
            self._changed.notify_all()
        if is_new:
            log.error("relay of channel %s is refused, and will ask again: %s", self.name, why)

    def _pause(self) -> float:
        """Seconds until a refused relay asks again."""
        return min(_HELLO_REFUSED_S, _HELLO_LAST_S) if self._is_draining else _HELLO_REFUSED_S

    def _begin_anew(self, why: str, *, is_told: bool = False, pause: float = 0.0) -> None:
        """Another attempt begins. `is_told`: why is logged otherwise. `pause`: before HELLO; a STATE may still come."""
        with self._changed:
            if self._state == OPEN and not is_told:
                log.warning("relay of channel %s looks for its peer: %s", self.name, why)
                self._refusal.forget_audience()
            self._state, self.reason, self._far = SEEKING, why, 0
            self._attempt += 1
            self._gap = False
            self._servers, self._credit = 0, (0, 0)
            if self._pattern == WORK_QUEUE:
                self._audience, self._alone_since = NOBODY, 0.0
            self._window.end()
            self._sending = None
            self._hello_due = time.monotonic() + pause
            self._explain_due = time.monotonic() + _EXPLAIN_S
            self._changed.notify_all()

    def _explain(self, attempt: int) -> None:
        """Say why no far relay answers. In a thread of its own: to look up a host's name may take long."""
        to = self._session.to
        why = "; ".join(map(why_silent, to)) if to else "none was found by multicast"
        with self._changed:
            if self._stop or self._state != SEEKING or attempt != self._attempt:
                return
            self.reason = f"no far relay has answered: {why}"
        log.warning("relay of channel %s goes on trying: %s", self.name, self.reason)

    def _seek(self) -> None:
        now = time.monotonic()
        if self._explain_due is not None and now >= self._explain_due:
            self._explain_due = None
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                RelayThread(self._explain, f"shmtensor relay {self.name}, why", self._attempt).start()
        if self._pattern == SERVICE:
            self._attend(now)
        self._show_audience()
        if self._pattern == WORK_QUEUE and now - self._heard > _LOST_S:
            self._take_back()
        if now >= self._hello_due:
            with self._changed:  # a late STATE may change it
                oldest = self._window.oldest
            hello = Hello(self._id, 0, self._attempt, self._pattern, self._user, oldest, self._path)
            self._hello_due = now + (self._pause() if self._state == REFUSED else _HELLO_S)
            self._to_all.send(hello.head())
        with self._changed:
            if not self._events and not self._stop:
                tick = _LOOK_S if self._pattern == SERVICE and len(self._window) else _TICK_S
                self._changed.wait(max(0.0, min(tick, self._hello_due - time.monotonic())))

    def _on_welcome(self, frame: Welcome) -> None:
        if self._state == OPEN and frame.far != self._far:
            log.warning("relay of channel %s: a second far relay answers, and is not used", self.name)
            self._session.answer(self._keys.far(frame.far), Bye(self._id, frame.far, frame.attempt, True).head())
            return
        if self._state == OPEN or frame.attempt != self._attempt:
            return
        self._explain_due = None
        if frame.knows and frame.far == self._last_far:
            if self._state == REFUSED:  # so it does nothing with what it was sent, and `received` stays as it is
                self._pass_over(frame.received)
        elif self._pattern == SERVICE:
            self._give_up()  # what had them is gone
        try:
            with self._changed:
                again = self._window.begin(frame.messages, frame.nbytes, frame.received)
        except WireError as error:
            self._count_bad(error)
            return
        if self._data is None or frame.far != self._last_far:  # the one before ends when no thread sends by it any more
            self._data = self._session.sender(self._keys.far(frame.far))
        if self._pattern == SERVICE:
            again = self._begin_service(frame, again)
        elif self._endpoint is None or frame.path != self._endpoint.avoided:
            if self._pattern == WORK_QUEUE:  # it may take messages of these senders already: a release would end them
                self._replace(self._join(frame.path))
            else:
                before = self._endpoint
                self._endpoint = self._join(
                    frame.path, before if isinstance(before, NearSubscriber) else None, is_latest=self._is_latest
                )
        if frame.far == self._last_far:
            self._cancel(frame.far, self._attempt, self._taken_back)
        self._taken_back.clear()
        with self._changed:
            self._far, self._state, self.reason, self._shortage = frame.far, OPEN, "", ""
            self._last_far, self._far_path = frame.far, frame.path
            self._sending = ItemSender(
                (self._id, frame.far, self._attempt), frame.received, again, self._window, lock=self._changed,
                read=read, origin=origin_of, claim=self._claim, put=self._put,
            )  # fmt: skip
            self._heard = time.monotonic()
            self._refusal.begin_attempt(frame.received, self._heard)
            self._status_due = 0.0
            self.connections += 1
            self.resent += len(again)
            self._changed.notify_all()
        if not self._refusal.why:
            log.info("relay of channel %s is connected%s", self.name, f", sends {len(again)} again" if again else "")

    # --- while it is connected

    def _pass_on(self) -> None:
        now = time.monotonic()
        if self._is_over(now):
            return
        self._report(now)
        if self._pattern == SERVICE:
            self._attend(now)
        if self._recalls(now):
            return
        sending = self._sending
        if sending is None or len(sending):
            if sending is not None:
                sending.send()
            return
        if self._pattern == FAN_OUT and self._delivery == "auto" and (self._audience == LATEST) != self._is_latest:
            self._join_again()
        most = _MOST_LATEST if self._is_latest else 1 << 62
        if self._pattern == WORK_QUEUE and self._refusal.why:  # to see whether it is taken
            most = 1
        endpoint = self._endpoint
        with self._changed:
            tick, idle = _TICK_S, _IDLE_S
            if self._pattern == SERVICE:
                tick = idle = _LOOK_S if len(self._window) else _TICK_S
            room = self._room(most)
            if endpoint is None or self._is_draining or room <= 0:
                if not self._events:
                    self._changed.wait(tick)
                return
        messages, self._held = self._held[:room], self._held[room:]
        if not messages:
            messages += endpoint.take(idle, min(room, MOST_ITEMS), BATCH)
            self._note_supply()
        if endpoint.refusal:
            raise WireError(f'channel "{self.name}": {endpoint.refusal}')
        self._add(sending, messages)

    def _is_over(self, now: float) -> bool:
        """Whether this attempt is over, for what the far relay says or does not say: then another one has begun."""
        if self._gap:
            self._begin_anew("messages were lost on the way")
        elif now - self._heard > _SILENCE_S:
            self._begin_anew(f"the far relay has been silent for {_SILENCE_S:g} s")
        else:
            return False
        return True

    def _recalls(self, now: float) -> bool:
        """Whether a queue's messages were taken back, as no consumer is there any more: others get them.

        That none is there is believed of a far relay that has received what is under way, so that it knows the senders.
        """
        if self._pattern != WORK_QUEUE:
            return False
        with self._changed:
            is_known = len(self._window) > 0 and self._credit[1] >= self._window.oldest
            audience = self._audience
        if not is_known or audience == LOSSLESS:
            self._alone_since = 0.0
            return False
        self._alone_since = self._alone_since or now
        if now - self._alone_since < (_RECALL_S if audience == NOBODY else 2 * _LOST_S):
            return False
        far, attempt = self._far, self._attempt
        self._begin_anew("no consumer is there for what was sent")
        kept = self._clear()  # first: what CANCEL ends there is acknowledged, too, and was not done
        self._cancel(far, attempt, [number for number, _ in kept])
        self._put(Bye(self._id, far, attempt, True).head())
        self._give_back(kept)
        return True

    def _cancel(self, far: int, attempt: int, numbers: list[int]) -> None:
        for at in range(0, len(numbers), MOST_ITEMS):
            self._put(Cancel(self._id, far, attempt, numbers[at : at + MOST_ITEMS]).head())

    def _take_back(self) -> None:
        """The far relay has been away for long: a queue's messages go to others here. If it comes back, consumers there
        get none of those that they have not begun with."""
        kept = self._clear()
        if not kept and not self._held:
            return
        log.warning(
            "relay of channel %s has not heard of the far relay for %g s: %d messages go to consumers here",
            self.name, _LOST_S, len(kept) + len(self._held),
        )  # fmt: skip
        self._taken_back += [number for number, _ in kept]
        self._give_back(kept)

    def _pass_over(self, received: int) -> None:
        """The far relay, which refuses what is behind item `received`, is asked again: of a queue, if that lasts, or
        nobody is there for it, it goes to others here. None of it is in a ring there, or will be."""
        with self._changed:
            count = self._window.count_beyond(received) + len(self._held)
            if self._pattern != WORK_QUEUE or not count or not self._refusal.is_long(time.monotonic()):
                return
            is_new = self._refusal.note_told()
        if is_new:
            log.warning("relay of channel %s is refused for long: %d messages go to consumers here", self.name, count)
        self._give_back(self._clear(received))

    def _show_audience(self) -> None:
        """Tell the relays that bring messages of a queue here whether somebody there takes them on."""
        is_there = self._audience == LOSSLESS
        if isinstance(self._endpoint, NearConsumer) and self._endpoint.is_onward != is_there:
            self._endpoint.show_onward(is_there)

    def _clear(self, received: int = 0) -> list[tuple[int, Sent]]:
        """Take what is behind item `received` out of the window, to be given back: nothing acknowledges it any more."""
        with self._changed:
            return self._window.clear(received)

    def _give_back(self, kept: list[tuple[int, Sent]]) -> None:
        """End the leases of what left the window so, and of what waits: a queue's messages go to other consumers here.

        A message that a consumer there has begun with may have ended that one: this counts as an attempt, so that it
        does not end one consumer after the other on all hosts. What was only sent does not count.
        """
        untried = [it for number, it in kept if number > self._begun] + self._held
        self._held = []
        for it in untried:
            if self._pattern == WORK_QUEUE and isinstance(it, Message):
                store_attempts(*words_of(it), it.seq, it.attempt - 1)
        # crash: relay.returned

    def _room(self, most: int) -> int:
        """For how many more messages there is credit; of a service also for how many more requests; for none of a queue
        while nobody is there to take it."""
        room = min(self._window.messages, most) - len(self._window)
        if self._pattern == SERVICE:
            credit, received = self._credit
            return min(room, credit - self._window.count_beyond(received))
        return room if self._pattern == FAN_OUT or self._audience == LOSSLESS else 0

    def _add(self, sending: ItemSender[Sent], messages: list[Sent]) -> None:
        """Number messages and send them."""
        # crash: relay.taken
        if not {int(it.id, 16) for it in set(map(_sender_of, messages))} <= {it.uid for it in self._told}:
            messages = self._announceable(messages)
        if messages:
            with self._changed:
                sending.add(self._window.add(messages))  # numbered: from here on they are not passed over
            self.messages += len(messages)
            self.nbytes += sum(it.nbytes for it in messages)
            self._report(time.monotonic())
            sending.send()
        elif self._held:
            with self._changed:
                self._changed.wait(_TICK_S)

    def _announceable(self, messages: list[Sent]) -> list[Sent]:
        """Of messages of new senders, those that can be sent: what is of too many has to wait until others that have
        left are forgotten, and what is behind it."""
        with self._changed:
            origins = set(map(_sender_of, self._window.items()))
        self._status_due = 0.0
        for at, it in enumerate(messages):
            if it.sender not in origins and len(origins) >= _MOST_ANNOUNCED:
                self._held = messages[at:] + self._held
                return messages[:at]
            origins.add(it.sender)
        return messages

    def _join_again(self) -> None:
        """The far subscribers are all latest now, or not any more: join as they do."""
        is_latest = not self._is_latest
        self._replace(self._join(self._far_path, is_latest=is_latest))
        self._is_latest = is_latest

    def _replace(self, endpoint: _End | None) -> None:
        before, self._endpoint = self._endpoint, endpoint
        if before is not None:
            before.close()  # what is under way keeps its leases

    # --- requests

    def _begin_service(self, frame: Welcome, again: list[tuple[int, Sent]]) -> list[tuple[int, Sent]]:
        """Of what is to be sent again, that which has not ended: the rest needs not be known there."""
        found = []
        for number, taken in again:
            if isinstance(taken, Taken) and taken.is_ended:
                with self._changed:
                    self._window.drop(number)
            else:
                found.append((number, taken))
        if self._endpoint is not None and self._endpoint.avoided != frame.path:
            self._replace(None)  # nothing is under way: it is another far relay
        if self._replying is not None:
            self._replying.begin((self._id, frame.far, self._attempt), frame.nbytes)
        self._cancel_due = 0.0
        return found

    def _requests(self) -> list[tuple[int, Taken]]:
        with self._changed:
            return [(number, it) for number, it in self._window.numbered() if isinstance(it, Taken)]

    def _attend(self, now: float) -> None:
        """Look after requests: those that are not wanted any more, who could take them, and whether to be here."""
        is_needed = bool(self._servers) or (self._endpoint is not None and len(self._window) > 0)
        if is_needed and self._endpoint is None and not self._is_draining:
            self._endpoint = self._join(self._far_path)
        if now < self._look_due and is_needed:
            return
        self._look_due = now + _LOOK_S
        requests = self._requests()
        asks = now >= self._ask_due
        if asks:
            self._ask_due = now + _TICK_S
        unwanted = []
        for number, taken in requests:
            if taken.finish_if_unwanted(asks=asks) and taken.is_unwanted:
                unwanted.append(number)
            if taken.is_ended and not taken.is_sent:
                with self._changed:
                    self._window.drop(number)
        if self._state == OPEN:
            if now >= self._cancel_due:  # again: a frame may be lost
                self._cancel_due = now + _STATUS_S
                unwanted = [number for number, taken in requests if taken.is_unwanted]
            self._cancel(self._far, self._attempt, unwanted)
        elif asks:
            self._leave_to_others(requests)
        if not self._servers and self._endpoint is not None and all(it.is_ended for _, it in requests):
            self._replace(None)  # clients need not wait for this relay, nor count it

    def _leave_to_others(self, requests: list[tuple[int, Taken]]) -> None:
        """The far relay cannot be reached: servers of this host that are idle get what may be tried again."""
        endpoint = self._endpoint
        if isinstance(endpoint, NearService):
            idle = endpoint.idle_servers()
            for _, taken in [it for it in requests if not (it[1].is_ended or it[1].is_tried_once)][:idle]:
                taken.is_unwanted = True
                taken.give_back(None if taken.is_sent else taken.attempts_before)

    def _give_up(self) -> None:
        """The far relay that had the requests is gone: others get them."""
        for it in [*(taken for _, taken in self._requests()), *self._held]:
            if isinstance(it, Taken):
                it.give_up()
        self._held = []
        self._clear()

    def _report(self, now: float) -> None:
        """Send STATUS if the senders have changed, and every second. Those of what is under way are named, also if they
        have left already: so each is announced before its messages."""
        self._show_audience()
        endpoint, sending = self._endpoint, self._sending
        if sending is None:
            return
        here = [] if endpoint is None else endpoint.uids()
        if now < self._status_due and here == self._here:
            return
        senders = [] if endpoint is None else endpoint.senders()
        with self._changed:
            under_way = set(map(_sender_of, self._window.items()))
        needed = {Sender(int(it.id, 16), it.pid, it.name) for it in under_way}
        named = announced(senders, needed, _MOST_ANNOUNCED)
        self._here, senders = here if named == senders else None, named
        if now >= self._status_due or senders != self._told:
            self._told, self._status_due = senders, now + _STATUS_S
            self._said += 1
            with self._changed:
                nbytes = self._window.sent_bytes
            status = Status(self._id, self._far, self._attempt, self._said, sending.after, nbytes, senders)
            self._put(status.head())
            if self._replying is not None:
                self._replying.say()

    def _put(self, head: bytes, body: bytes = b"") -> None:
        if self._data is not None:
            self._data.send(head, body)

    def _claim(self, nbytes: int) -> bool:
        """Wait for credit for so many bytes. False: the connection is over."""
        attempt, is_service = self._attempt, self._pattern == SERVICE
        while True:
            if is_service:
                self._attend(time.monotonic())
            with self._changed:
                if not self._stop and self._window.may_send(nbytes):
                    self._window.note_sent(nbytes)
                    return True
                if not (self._stop or self._events or self._gap):
                    self._changed.wait(_LOOK_S if is_service else _TICK_S)
            self._handle_events()
            now = time.monotonic()
            if self._stop or attempt != self._attempt or self._is_over(now) or self._recalls(now):
                return False
            self._report(now)

    # --- outside

    @property
    def state(self) -> str:
        return self._state

    @property
    def in_flight(self) -> int:
        return len(self._window)

    def wait(self, deadline: float | None) -> None:
        """Wait until it is connected. Raises `WireError` if it is refused or has failed, `TimedOut`."""
        with self._changed:
            while True:
                if self._state == OPEN:
                    return
                if self._state in (REFUSED, FAILED):
                    raise WireError(f'relay of channel "{self.name}": {self.reason}')
                if self._state == CLOSED:
                    raise ClosedError(f'relay of channel "{self.name}" is closed')
                remaining = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
                if remaining <= 0:
                    why = self.reason if self._state == SEEKING and self.reason else "no far relay has answered"
                    raise TimedOut(f'relay of channel "{self.name}": {why}')
                self._changed.wait(remaining)

    def drain(self, deadline: float) -> None:
        """Take nothing more; wait until everything under way is acknowledged, the time is up, or `stop` is called."""
        with self._changed:
            if self._state == REFUSED and not self._is_draining:
                self._hello_due = 0.0
                self._changed.notify_all()
            self._is_draining = True
            while True:
                is_over = self._stop or not len(self._window) or self._state in (FAILED, CLOSED)
                if is_over or time.monotonic() >= deadline:
                    return
                self._changed.wait(min(_TICK_S, max(0.0, deadline - time.monotonic())))

    def stop(self) -> None:
        """Take and send nothing more: `close` follows, and waits for the thread."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the channel. What is not acknowledged: a queue's goes to others here. Idempotent."""
        self.stop()
        join(self._thread)
        if self._replying is not None:
            self._replying.stop()
        if self._state not in (CLOSED, FAILED):
            far = self._far or (self._last_far if self._state == REFUSED else 0)  # which keeps the senders for this one
            if far:
                self._put(Bye(self._id, far, self._attempt, True).head())
            self._leave()
            with self._changed:
                self._state = CLOSED
                self._changed.notify_all()

    def _leave(self) -> None:
        if self._pattern == SERVICE:
            self._give_up()
        with self._changed:
            self._window.end()
        self._sending = None
        self._give_back(self._clear())
        self._replace(None)
