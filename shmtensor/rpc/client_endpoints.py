"""A client's two endpoints: the producer of its requests and the subscriber of its replies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..channel import control as ctl
from ..codec.encode import Encoded
from ..endpoints.base import BUSY, NOTHING
from ..endpoints.message import Message
from ..endpoints.producer import Producer
from ..endpoints.pubsub import Subscriber
from ..endpoints.traits import ReceiverTraits, SenderTraits
from ..errors import ClosedError, RingFull
from ..memory.words import store
from ..options import format_bytes
from ..ring.competing import state_word
from ..ring.layout import (
    ATTEMPT,
    CLAIMED,
    DONE,
    FAN_OUT,
    NOTE,
    RELEASED,
    SERVICE,
    VERDICT,
    WORK_QUEUE,
)
from ..ring.pool import Sizing
from ..ring.ring import Ring
from ..ring.writer import Registration, SlotRange
from .service_endpoint import Posting, ServiceEndpoint
from .sidecar import BUDGET, CANCELLED, FOREVER

if TYPE_CHECKING:
    from .call import Call


class Requests(Posting, Producer):
    """Publishes requests with their notes, and withdraws those that no server has started."""

    _owner = "Client"
    _traits = SenderTraits(
        WORK_QUEUE, SERVICE, sizing=Sizing(most=16, least=2, nbytes=BUDGET), checks_verdicts=True, carries_context=True
    )

    def __init__(self, service: str, *, slots: int | None, **options: Any) -> None:
        self.calls: dict[int, Call] = {}
        """By sequence number. A call is entered before it is published, as its reply may be fast."""
        # a lock on a request is granted to each thread of its process; a signal handler may close while one withdraws
        self._withdrawing = threading.RLock()
        self._posting = threading.Lock()  # of the thread that waits for room: others then wait here, with time-outs
        super().__init__(service, slots=slots, **options)

    @property
    def window(self) -> int:
        """How many requests may be in flight at once."""
        return min(self._sizing.most, self._pool.slots) if self._rings else self._sizing.most

    @property
    def uid(self) -> int:
        """The client's uid."""
        return self._member.uid

    def _drop_in_child(self) -> None:
        super()._drop_in_child()
        self._withdrawing, self._posting = threading.RLock(), threading.Lock()

    def _registration(self, call: Call) -> Registration:
        return call.bits, call.deadline, self.calls, call

    def _post(self, out: Any, timeout: float | None, registration: Registration) -> None:
        taken: list[bool] = []
        wait = -1 if timeout is None or timeout >= FOREVER else timeout
        try:
            taken.extend(map(self._posting.acquire, (True,), (wait,)))  # taken and recorded in one C call
            if not taken[0]:
                raise RingFull(f'service "{self.name}": another thread waits for room for its request')
            super()._post(out, timeout, registration)
        finally:
            if taken and taken[0]:
                self._posting.release()

    def _full_text(self, nbytes: int) -> str:
        servers = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners) or "none is there"
        return (
            f'service "{self.name}": no room for a request of {format_bytes(nbytes)}, all {self._pool.slots} slots '
            f'wait for their servers ({servers}): start more of them, or pass slots=, timeout= or full="grow"'
        )

    def _publish(self, ring: Ring, slot: int, out: Encoded, guard: Any, *registration: Any) -> int:
        seq = super()._publish(ring, slot, out, guard, *registration)
        # crash: request.posted
        return seq

    def _find(self, nbytes: int) -> SlotRange | None:
        return super()._find(nbytes) or (super()._find(nbytes) if self._judge() else None)

    def _has_room(self, nbytes: int) -> bool:
        self._judge()
        return super()._has_room(nbytes)

    def _judge(self) -> bool:
        """Read the verdicts of requests before their slots are used again; whether there were any."""
        found = False
        for ring, slot, seq, _ in self._writer.messages():
            if ring.words[state_word(ring, slot) + VERDICT] >> 8 == seq:
                call = self.calls.get(seq)
                if call is not None and call.verdict is None:
                    call.verdict = self.verdict(call)
                self._writer.judge(ring.index, slot)
                found = True
        return found

    def count_living(self) -> int:
        """How many servers live now. The kernel is asked: a killed one stays in the table until a process cleans up."""
        if self._state:
            return 0
        control = self._member.control
        servers = [entry for entry in control.members() if entry.role == ctl.RECEIVER and not entry.leaving]
        try:
            return sum(control.is_alive(entry.index) for entry in servers)
        except ClosedError:  # by another thread
            return 0

    def cancel(self, call: Call) -> None:
        """Note that the reply is not wanted; a server that has not started the request will not start it."""
        seq, words, at = call.seq, call.words, call.at
        if words[at + NOTE] >> 8 == seq:  # else the slot is another message's by now
            store(words, at + NOTE, seq << 8 | call.bits | CANCELLED)
        # crash: cancel.noted
        self.withdraw(call)

    def withdraw(self, call: Call, *, taken: bool = False) -> bool:
        """Finish a request, as a server that drops it would. False: a server has it, or it is done.

        `taken`: also False if no server has had it. A server without torch takes a request with tensors, and undoes it.
        """
        seq, words, at = call.seq, call.words, call.at
        locks = self._sequences.locks
        with self._withdrawing:
            if self._state or words[at + DONE] >= seq:
                return False
            try:
                if not locks.try_exclusive(seq) or (taken and not self.was_taken(call)):
                    return False
                # another thread that sends may free the slot as soon as it is done, and `released` must not be stored
                # after that: it is only where no other thread is inside a call
                finished = self._try_run(self._finish_request, call, True)
                return self._finish_request(call, False) if finished is BUSY else finished
            finally:
                locks.unlock(seq)  # only this process's lock

    @staticmethod
    def _finish_request(call: Call, alone: bool) -> bool:
        """Mark a request that this process has locked as done; False if its server has finished it before.

        `alone`: whether no other thread is inside a call.
        """
        seq, words, at = call.seq, call.words, call.at
        # crash: withdraw.locked
        if words[at + DONE] >= seq:
            return False
        store(words, at + DONE, seq)
        # crash: withdraw.done
        if alone:
            store(words, at + RELEASED, seq)
        return True

    @staticmethod
    def is_done(call: Call) -> bool:
        """Whether no server will work on it any more: its reply is sent, or there is none."""
        return call.words[call.at + DONE] >= call.seq

    def is_held(self, call: Call) -> bool:
        """Whether a living server has it now."""
        return not self._state and self._sequences.locks.held_by_other(call.seq)

    @staticmethod
    def was_taken(call: Call) -> bool:
        """Whether a server has ever taken it."""
        return call.words[call.at + CLAIMED] >= call.seq

    @staticmethod
    def verdict(call: Call) -> tuple[int, int]:
        """Why a request that is done has no reply: (code or 0, how often it was taken or 0 if that is not known)."""
        seq, words, at = call.seq, call.words, call.at
        verdict, attempt = words[at + VERDICT], words[at + ATTEMPT]
        seen = verdict & 0xFF if verdict >> 8 == seq else 0, attempt & 0xFF if attempt >> 8 == seq else 0
        return call.verdict or seen  # `_judge` kept it before the words read here can have been overwritten

    def wait_for_servers(self, count: int, timeout: float | None) -> None:
        """Wait until at least `count` living servers are there; raises `TimedOut`."""
        self._wait_for_receivers(count, timeout, "servers")


class Answers(ServiceEndpoint, Subscriber):
    """Receives the replies to one client, which is their only receiver: their values are writable."""

    _owner = "Client"
    _traits = ReceiverTraits(FAN_OUT, is_only_reader=True, raises_unreadable=False)

    def __init__(self, channel: str, *, spin: float) -> None:
        self._rows: dict[int, tuple[memoryview, int]] = {}
        self._rows_epoch = -1
        super().__init__(channel, spin=spin)

    def _is_over(self) -> bool:
        if any(reader.gone for reader in self._readers):
            self._retire_drained()
        return False  # another server may come

    @property
    def service(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def has_news(self) -> bool:
        """Whether there may be a reply to take."""
        return self._has_news()

    def take_all(self, received: list[Message], dispatch: Callable[[], None]) -> Any:
        """Take the replies that are there, without waiting: each into `received`, then call `dispatch`.

        Returns `NOTHING`, or `BUSY` if another thread is inside a call.
        """
        take, undelivered = self._attempt(), self._undelivered
        while (message := take()) is not NOTHING and message is not BUSY:
            received[:] = (message,)
            if message in undelivered:  # no call since it was recorded in `received`
                del undelivered[message]
            dispatch()
        return message

    def request_of(self, message: Message) -> int:
        """The sequence number of the request that a reply is for."""
        lease = message._lease
        words, shift = self._row_of(lease.words)
        request: int = words[lease.word + shift]
        return request

    def _row_of(self, words: memoryview) -> tuple[memoryview, int]:
        """A ring's words, and the distance from this member's row in them to the publisher's own."""
        if self._rows_epoch != self._epoch:
            self._rows.clear()
            self._rows_epoch = self._epoch
        row = self._rows.get(id(words))
        if row is None:
            row = self._rows[id(words)] = self._find_row(words)
        return row

    def _find_row(self, words: memoryview) -> tuple[memoryview, int]:
        own = self._member.index
        for reader in (*self._readers, *self._retired):
            for ring in reader.rings:
                if ring.words is words:
                    return words, (reader.index - own) * ring.row
        raise LookupError("a reply of an unknown server")
