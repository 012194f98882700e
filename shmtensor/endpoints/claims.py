"""What a receiver has that shares its messages with others: a consumer, or a subscriber in a group.

Each message is claimed by one of them. It is done when its thread or task says so, or asks for the next one; what is
not done when its receiver dies, another one finds by a scan. Used under the receiver's mutex, but for what threads have
in hand.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Final

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.membership import Member
from ..channel.wakeup import Doorbells
from ..options import check_choice, check_count
from ..wire.record import EMPTY_RECORD, pack_bell
from .base import LIVENESS_INTERVAL
from .recipients import Peer

DEFAULT_ATTEMPTS: Final = 5


class Hand:
    """The claim of the message that one thread or task received last, and the array over its slot; or None."""

    __slots__ = ("__weakref__", "message")

    def __init__(self) -> None:
        self.message: tuple[Any, Any] | None = None

    def acknowledge(self) -> None:
        """Its thread or task asks for the next message: the one in hand is done."""
        message = self.message  # keeps its memory, and with it the lock, until `done` is stored
        if message is not None:
            message[0].acknowledge()
            self.message = None


class Hands(threading.local):
    """The `Hand` of each thread. One ends with its thread, and its message goes to another receiver."""

    def __init__(self, all_hands: set[weakref.ref[Hand]]) -> None:
        self.hand = Hand()
        all_hands.add(weakref.ref(self.hand, all_hands.discard))


class Claims:
    """How one receiver shares messages with its siblings: the other consumers, or the other members of its group.

    Args:
        acknowledge: `"next"` or `"release"`, as for `Consumer`.
        max_attempts: how often a message is delivered; at most `most_attempts`.
    """

    def __init__(self, acknowledge: str, max_attempts: int, *, most_attempts: int = 250) -> None:
        check_choice("acknowledge", acknowledge, ("next", "release"))
        check_count("max_attempts", max_attempts, 1, most_attempts)
        self.max_attempts = max_attempts
        self._all: set[weakref.ref[Hand]] = set()
        self._of_tasks: dict[Any, Hand] = {}
        self.hands = Hands(self._all) if acknowledge == "next" else None
        """What each thread has in hand: asking for the next message acknowledges it. None: only `release` does."""
        self.scan_wanted = True
        """Whether to look for messages that a receiver claimed and did not finish, before others are taken."""
        self._scan_due = 0.0
        self.refused: tuple[Any, Any, float] | None = None
        """The message that cannot be read here, as its reader and the event, and until when it is not claimed again."""
        self.siblings: dict[int, Peer] = {}

    def join(self, member: Member) -> None:
        """The receiver has become a member."""
        self._member, self._bells = member, Doorbells(member.directory)

    # --- who else takes messages

    def update_siblings(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        """Note who the siblings are, among all members. Returns their `asleep` words."""
        member = self._member
        group = 0 if member.group is None else member.group[1]
        present = {
            entry.uid: entry
            for entry in entries
            if entry.role == ctl.RECEIVER and entry.group == group and not entry.leaving and entry.uid != member.uid
        }
        for uid in [uid for uid in self.siblings if uid not in present]:
            del self.siblings[uid]
            self._bells.forget(uid)
            self.scan_wanted = True  # it may have left messages that it had not finished
        for uid, entry in present.items():
            if uid not in self.siblings:
                self.siblings[uid] = Peer(entry)
        return tuple(peer.asleep for peer in self.siblings.values())

    def wake_sibling(self, sender: int) -> bool:
        """Wake one that sleeps, as `sender` would have: there are more messages. Returns whether there was one."""
        words = self._member.control.words
        for peer in self.siblings.values():
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified:
                peer.notified = asleep
                self._bells.notify(peer.uid, pack_bell(sender, EMPTY_RECORD))
                return True
        return False

    # --- what was claimed and not finished

    def schedule_scan(self) -> None:
        """A call for a message begins: scan if the last scan is long ago."""
        now = time.monotonic()
        if now >= self._scan_due:
            self._scan_due, self.scan_wanted = now + LIVENESS_INTERVAL, True

    def refuse(self, reader: Any, event: Any) -> None:
        """A message cannot be read here: do not claim it again for a while, or whenever another receiver tries it, this
        one would hold it."""
        self.refused = reader, event, time.monotonic() + LIVENESS_INTERVAL

    def is_still_refused(self) -> bool:
        """Whether it is too early to claim the message again that was refused, and no other receiver has it."""
        if self.refused is None:
            return False
        reader, (_, seq, _), until = self.refused
        if time.monotonic() >= until or reader.sequences.locks.held_by_other(reader.claim_byte(seq)):
            return False
        return any(seq == other for _, _, other in reader.unfinished())

    # --- what each thread and task has in hand

    def hand_of_task(self) -> Hand:
        """The hand of the current task, or else of the thread. Acknowledges what finished tasks had in hand."""
        task, hands = _current_task(), self._of_tasks
        for other in [other for other in hands if other is not task and other.done()]:
            # the message of a finished task is done with this call, as it would be with a call of its own; a task that
            # failed had not finished with its message
            if not other.cancelled() and getattr(other, "_exception", None) is None:
                hands[other].acknowledge()
            hands.pop(other, None)
        if task is None and self.hands is not None:  # a coroutine that something else than a task runs
            return self.hands.hand
        hand = hands.get(task)
        if hand is None:
            hand = hands[task] = Hand()
            self._all.add(weakref.ref(hand, self._all.discard))
        return hand

    def forget(self, lease: Any) -> None:
        """A message was released, or given back, by its user: no hand has it."""
        hand = self.hands.hand if self.hands is not None else None
        if hand is not None and hand.message is not None and hand.message[0] is lease:
            hand.message = None
        elif len(self._all) > 1:  # another thread, or a task, received it
            for each in self._all.copy():
                other = each()
                if other is not None and other.message is not None and other.message[0] is lease:
                    other.message = None

    def leave(self) -> None:
        """The receiver has left: wake all siblings that sleep. One of them may take what it had not finished, or they
        waited for that alone, since no sender is there any more."""
        while self.wake_sibling(self._member.uid):
            pass
        self._bells.close()

    def close(self, *, acknowledge: bool) -> None:
        """The receiver closes. `acknowledge`: what the caller has in hand is done. All else goes to others."""
        hand = self._own_hand() if acknowledge else None
        if hand is not None and hand.message is not None:
            hand.message[0].acknowledge()
        for each in self._all.copy():
            other = each()
            if other is not None:
                other.message = None
        self._of_tasks.clear()  # a task's result may be a message, which keeps the receiver

    def _own_hand(self) -> Hand | None:
        """The hand of the calling task, or else of its thread."""
        if self.hands is None:
            return None
        if self._of_tasks and (task := _current_task()) is not None:
            return self._of_tasks.get(task)
        return self.hands.hand


def _current_task() -> Any:
    """The task that runs in this thread, or None."""
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
