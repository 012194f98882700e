"""Receivers that share messages: each one goes to one of them, and a dead one's go to another."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..channel import control as ctl
from ..channel.membership import Member
from ..channel.wakeup import Doorbells
from ..codec.implementation import copy_value
from ..memory.words import barrier
from ..ring.layout import L_PUBLISHED
from ..ring.reader import UNREADABLE
from ..wire.record import EMPTY_RECORD, pack_bell
from .async_receiver import AsyncReceiver
from .base import BUSY, FORKED, LIVENESS_INTERVAL, NOTHING, check_choice, check_count
from .message import Message
from .peers import Peer


class _Hand:
    """The claim of the message that one thread or task received last, and the array over its slot; or None."""

    __slots__ = ("__weakref__", "message")

    def __init__(self) -> None:
        self.message: tuple[Any, Any] | None = None


class _Hands(threading.local):
    """The `_Hand` of each thread. One ends with its thread, and its message goes to another consumer."""

    def __init__(self, all_hands: set[weakref.ref[_Hand]]) -> None:
        self.hand = _Hand()
        all_hands.add(weakref.ref(self.hand, all_hands.discard))


DEFAULT_ATTEMPTS: Final = 5


class ClaimingReceiver(AsyncReceiver):
    """Takes each message that no other one of its kind has: a consumer, or a member of a group of subscribers."""

    _refused: tuple[Any, Any, float] | None = None
    """The message that cannot be read here, as its reader and the event, and until when it is not claimed again."""
    _most_attempts = 250

    def _use_claims(self, acknowledge: str, max_attempts: int) -> None:
        """Called before the constructor of the base."""
        check_choice("acknowledge", acknowledge, ("next", "release"))
        check_count("max_attempts", max_attempts, 1, self._most_attempts)
        self._max_attempts = max_attempts
        self._all_hands: set[weakref.ref[_Hand]] = set()
        self._of_tasks: dict[Any, _Hand] = {}
        if acknowledge == "next":
            self._hands = _Hands(self._all_hands)
        self._scan_due, self._scan_wanted = 0.0, True
        self._siblings: dict[int, Peer] = {}

    def _prepare(self, member: Member) -> None:
        self._bells = Doorbells(member.directory)
        super()._prepare(member)

    def _begin(self, hand: _Hand) -> _Hand:
        """Acknowledge the message in hand: its thread or task asks for the next one."""
        message = hand.message  # keeps its memory, and with it the lock, until `done` is stored
        if message is not None and not self._state:  # `close` has acknowledged it; in a forked child it is the parent's
            message[0].acknowledge()
            hand.message = None
        return hand

    def _hand_of_task(self) -> _Hand:
        """The hand of the current task. Ends those of finished tasks."""
        import asyncio

        task, hands = asyncio.current_task(), self._of_tasks
        for other in [other for other in hands if other is not task and other.done()]:
            # the message of a finished task is done with this call, as it would be with a call of its own; a task that
            # failed had not finished with its message
            if not other.cancelled() and getattr(other, "_exception", None) is None:
                self._begin(hands[other])
            hands.pop(other, None)
        hand = hands.get(task)
        if hand is None:
            hand = hands[task] = _Hand()
            self._all_hands.add(weakref.ref(hand, self._all_hands.discard))
        return hand

    def _before_next(self) -> None:
        now = time.monotonic()
        if now >= self._scan_due:
            self._scan_due, self._scan_wanted = now + LIVENESS_INTERVAL, True

    def _poll(self, patience: int = 0) -> Message | None:
        if self._scan_wanted:
            message = self._scan()
            if message is not None:
                return message
            self._scan_wanted = False
        return super()._poll(patience)

    def _check_liveness(self) -> None:
        super()._check_liveness()
        self._scan_wanted = True

    def _refresh(self) -> None:
        super()._refresh()
        group = 0 if self._member.group is None else self._member.group[1]
        peers = {
            entry.uid: entry
            for entry in self._member.peers()
            if entry.role == ctl.RECEIVER and entry.group == group and not entry.leaving
        }
        for uid in [uid for uid in self._siblings if uid not in peers]:
            del self._siblings[uid]
            self._bells.forget(uid)
        for uid, entry in peers.items():
            if uid not in self._siblings:
                self._siblings[uid] = Peer(entry)
        if self._refused is not None:
            if self._refused[0] in self._readers:
                self._direct = None
            else:
                self._refused = None
        for reader in self._readers:
            reader.set_siblings(tuple(peer.asleep for peer in self._siblings.values()))

    def _sleep(self, seconds: float) -> bool:
        woken = super()._sleep(seconds)
        barrier()  # what was published by a sender that saw us asleep is visible now: `_take` may wake another consumer
        return woken

    def _after_sleep(self) -> None:
        barrier()  # as in `_sleep`

    def _pass_on(self) -> None:
        if self._has_more():
            self._notify_sibling(self._member.uid)

    def _take(self, reader: Any, patience: int = 0) -> Message | None:
        try:
            message = super()._take(reader, patience)
        except BaseException:
            self._scan_wanted = True  # its position may be passed already
            raise
        if message is not None and self._siblings and self._has_more():
            self._notify_sibling(reader.uid)
        return message

    def _taken(self, reader: Any, take: Callable[..., Any], *patience: int) -> Message | None:
        """As for every receiver; a message that cannot be read here raises again, without being claimed again."""
        if self._refused is not None and self._refused[0] is reader:
            _, event, until = self._refused
            if time.monotonic() < until and _is_free(reader, event[1]):
                super()._handle(reader, event)
            self._refused, self._epoch = None, -1  # `_refresh` sets `_direct` again
        return super()._taken(reader, take, *patience)

    def _handle(self, reader: Any, event: Any) -> None:
        if event[0] == UNREADABLE:
            # a program that asks again at once must not hold the claim whenever another consumer tries it
            self._refused = reader, event, time.monotonic() + LIVENESS_INTERVAL
            self._direct = None  # the next calls go by `_taken`
        super()._handle(reader, event)

    def _share(self) -> None:
        direct = self._direct
        if direct is not None and self._try_run(self._notify_if_more) is not BUSY:
            direct.more = False  # BUSY: another thread of this consumer is taking more

    def _notify_if_more(self) -> None:
        if not self._state and self._has_more():
            self._notify_sibling(self._member.uid)

    def _scan(self) -> Message | None:
        """A message that a consumer claimed and did not finish, found by a scan of all records; or None."""
        for reader in self._readers:
            reader.map_all()
            message = self._taken(reader, reader.take_unfinished)
            if message is not None:
                return message
        return None

    def _has_more(self) -> bool:
        """Whether a message is published that this consumer has not examined yet."""
        return any(reader.words[L_PUBLISHED] > reader.position for reader in self._readers)

    def _notify_sibling(self, sender: int) -> None:
        """Wake another sleeping consumer, as `sender` would have: there are more messages."""
        words = self._control_words
        for peer in self._siblings.values():
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified:
                peer.notified = asleep
                self._bells.notify(peer.uid, pack_bell(sender, EMPTY_RECORD))
                return

    def _copy_of(self, message: Message) -> Any:
        return NOTHING if self._prefetch is not None else copy_value(message.value)

    def _acknowledge(self, lease: Any) -> None:
        if self._state == FORKED:
            return
        lease.acknowledge()
        self._reject(lease)

    def _reject(self, lease: Any) -> None:
        if self._hands is not None:
            hand = self._hands.hand
            if hand.message is not None and hand.message[0] is lease:
                hand.message = None
            elif len(self._all_hands) > 1:  # another thread, or a task, received it
                for each in self._all_hands.copy():
                    other = each()
                    if other is not None and other.message is not None and other.message[0] is lease:
                        other.message = None

    def _end_current(self, acknowledge: bool) -> None:
        self._pass_on()  # this consumer may have been woken for it
        self._bells.close()
        if self._hands is not None and acknowledge:
            message = self._own_hand().message
            if message is not None:
                message[0].acknowledge()
        for each in self._all_hands.copy():
            hand = each()
            if hand is not None:
                hand.message = None

    def _own_hand(self) -> _Hand:
        """The hand of the calling task, or else of its thread."""
        if self._of_tasks:
            import asyncio

            with contextlib.suppress(RuntimeError):  # no loop runs in this thread
                if asyncio.current_task() is not None:
                    return self._hand_of_task()
        hand: _Hand = self._hands.hand
        return hand

    def _is_drained(self, reader: Any) -> bool:
        """Whether nothing is left to claim, and no consumer holds a message that could come back."""
        return not reader.next() and next(reader.unfinished(), None) is None

    def _is_over(self) -> bool:
        """Also over, for now, if this consumer holds messages itself and only others' unfinished ones are left: if two
        consumers waited for each other's, they would wait for ever."""
        return super()._is_over() or (
            bool(self._readers)
            and all(reader.gone and not reader.next() for reader in self._readers)
            and self._holds_claims()
        )

    def _holds_claims(self) -> bool:
        """Whether this consumer has messages that it has not acknowledged."""
        return any(reader.unacknowledged for reader in self._readers)


def _is_free(reader: Any, seq: int) -> bool:
    """Whether a message is not done, and no other consumer has it."""
    return any(seq == other for _, _, other in reader.unfinished()) and not reader.sequences.locks.held_by_other(
        reader.claim_byte(seq)
    )
