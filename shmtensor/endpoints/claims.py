"""The claims of a receiver that shares its messages with others: a consumer, or a subscriber in a group.

Each message is claimed by one of them. It is done when its thread or task acknowledges it, or asks for the next one. A
message that is not done when its receiver dies is found by another receiver, by a scan. Used under the receiver's
mutex, except for the unacknowledged messages of threads (`Hand`).
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.membership import Member
from ..channel.wakeup import Doorbells
from ..options import check_choice, check_count
from ..wire.record import EMPTY_RECORD, pack_bell
from .base import LIVENESS_INTERVAL
from .message import give_back
from .recipients import Peer

if TYPE_CHECKING:
    import asyncio

DEFAULT_ATTEMPTS: Final = 5


class Hand:
    """The messages that one thread or task has received and not acknowledged."""

    __slots__ = ("__weakref__", "last")

    def __init__(self) -> None:
        self.last: Any = None
        """The last message, or None: its claim, the array over its slot, a weak reference to it (None if `recv` took
        it), and the same of the one before, if calls for both ran at the same time. A plain tuple, since an exception
        could arrive where another one is made."""

    def acknowledge(self) -> None:
        """Mark these messages as done: their thread or task asks for the next one."""
        each = last = self.last  # keeps their memory, and with it the locks, until `done` is stored
        if last is not None:
            while each is not None:
                each[0].acknowledge()
                each = each[3]
            self.last = None

    def forget(self, lease: Any) -> bool:
        """Remove a message that was released or given back. Returns whether it was in this hand."""
        last = self.last
        if last is not None and last[0] is lease:  # no boundary from here on: a thread may be receiving the next one
            self.last = last[3]
            return True
        each, others = last, []
        while each is not None and each[0] is not lease:
            others.append(each)
            each = each[3]
        if each is None:
            return False
        rest = each[3]
        while others:
            rest = (*others.pop()[:3], rest)
        self.last = rest
        return True

    def end(self, *, done: bool) -> None:
        """Handle the end of the task. `done`: it ended regularly, and its messages are done once nothing refers to them
        any more; else they go to another receiver, as after a `with` block that an exception has left."""
        each = self.last
        while each is not None:
            lease, _, reference, before = each
            if done:
                lease.done_at_end = True
            elif (message := reference()) is not None:
                give_back(message)
            each = before
        self.last = None


class Hands(threading.local):
    """The `Hand` of each thread. It ends with its thread, and its message goes to another receiver."""

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
        self._of_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], Hand] = weakref.WeakKeyDictionary()
        self.hands = Hands(self._all) if acknowledge == "next" else None
        """The `Hand` of each thread: asking for the next message acknowledges what is in it. None: only `release`
        acknowledges."""
        self.scan_wanted = True
        """Whether to look for messages that a receiver claimed and did not finish, before others are taken."""
        self.refused: tuple[Any, Any, float] | None = None
        """The message that cannot be read here, as its reader and the event, and until when it is not claimed again."""
        self.siblings: dict[int, Peer] = {}

    def join(self, member: Member) -> None:
        """The receiver has become a member."""
        self._member, self._bells = member, Doorbells(member.directory)

    # --- other receivers of the same messages

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
        """Wake a sleeping sibling, as `sender` would, since there are more messages. Returns whether one was asleep."""
        words = self._member.control.words
        for peer in self.siblings.values():
            asleep = words[peer.asleep]
            if asleep & 1 and asleep != peer.notified:
                peer.notified = asleep
                self._bells.notify(peer.uid, pack_bell(sender, EMPTY_RECORD))
                return True
        return False

    def has_dead_sibling(self) -> bool:
        """Whether a sibling has died and is still in the table of members: it may look asleep, so that each message
        would wake it."""
        control = self._member.control
        return not all(control.is_alive(peer.index) for peer in self.siblings.values())

    # --- messages that were claimed and not finished

    def refuse(self, reader: Any, event: Any) -> None:
        """Note that a message cannot be read here: do not claim it again for a while. Otherwise this receiver would
        hold it whenever another one tries to claim it."""
        self.refused = reader, event, time.monotonic() + LIVENESS_INTERVAL

    def is_still_refused(self) -> bool:
        """Whether it is too early to claim the message again that was refused, and no other receiver has it."""
        if self.refused is None:
            return False
        reader, (_, seq, _), until = self.refused
        if time.monotonic() >= until or reader.sequences.locks.held_by_other(reader.claim_byte(seq)):
            return False
        return any(seq == other for _, _, other in reader.unfinished())

    # --- unacknowledged messages of each thread and task

    def hand_of_caller(self, hands: Hands) -> Hand:
        """The `Hand` of the current task, or, outside of tasks, of the thread."""
        task = _current_task()
        if task is None:
            return hands.hand
        hand = self._of_tasks.get(task)
        if hand is None:
            task.add_done_callback(functools.partial(_task_ended, weakref.ref(self)))
            hand = self._of_tasks[task] = Hand()
            self._all.add(weakref.ref(hand, self._all.discard))
        return hand

    def settle(self, task: asyncio.Task[Any]) -> None:
        """Handle the end of a task: what it had received is done, or given back."""
        hand = self._of_tasks.get(task)
        if hand is not None:
            failed = task.cancelled() or getattr(task, "_exception", None) is not None  # looking does not retrieve it
            hand.end(done=not failed)
            self._of_tasks.pop(task, None)  # last: what an exception cuts short, `close` does

    def forget(self, lease: Any) -> None:
        """Remove a message that its user has released or given back from its `Hand`."""
        hand = self.hands.hand if self.hands is not None else None
        if (hand is None or not hand.forget(lease)) and len(self._all) > 1:  # another thread, or a task, received it
            for each in self._all.copy():
                other = each()
                if other is not None and other.forget(lease):
                    return

    def leave(self) -> None:
        """Wake all sleeping siblings, since the receiver has left: one of them may take what it had not finished. If no
        sender is left, they may have waited for that alone."""
        while self.wake_sibling(self._member.uid):
            pass
        self._bells.close()

    def close(self, *, acknowledge: bool) -> None:
        """Close, with the receiver. `acknowledge`: what the caller has received is done. All other messages go to other
        receivers."""
        for task in list(self._of_tasks):
            if task.done():
                self.settle(task)  # its callback has not run yet
        hand = self._own_hand() if acknowledge else None
        if hand is not None:
            hand.acknowledge()
        for each in self._all.copy():
            other = each()
            if other is not None:
                other.last = None
        self._of_tasks.clear()  # a task's result may be a message, which keeps the receiver

    def _own_hand(self) -> Hand | None:
        """The hand of the calling task, or else of its thread."""
        if self.hands is None:
            return None
        if self._of_tasks and (task := _current_task()) is not None:
            return self._of_tasks.get(task)
        return self.hands.hand


def _task_ended(reference: weakref.ref[Claims], task: asyncio.Task[Any]) -> None:
    claims = reference()
    if claims is not None:
        claims.settle(task)


def _current_task() -> asyncio.Task[Any] | None:
    """The task that runs in this thread, or None."""
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
