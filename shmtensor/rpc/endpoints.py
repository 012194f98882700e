"""The endpoints of a service: those of a client, and those of a server, for requests and replies.

Some words of the ring belong to a request or a reply. The message itself is the value alone.

A service is a work queue: a request is a message of its client, known by (client's uid, seq). Three words of its slot
that a work queue leaves free belong to it:

    note      seq << 8 | bits     the client: before it publishes the request, and again to cancel it
    deadline  CLOCK_MONOTONIC, ns; 0: none      the client, before `note`
    verdict   seq << 8 | code     the holder of lock(seq), before `done`: the request is finished without a reply

The replies to a client come on a fan-out channel of its own, `<service>.<client's uid>`, whose only subscriber it is.
In a publisher's ring the row of its own member index belongs to no receiver. There it stores, at the reply's slot and
before it publishes the reply, the sequence number of the request that the reply is for.

docs/internals/protocols.md, section 8, says why nothing else is needed.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ..channel import control as ctl
from ..channel.names import check_channel
from ..endpoints.asyncio import AsyncEndpoint, AsyncSender
from ..endpoints.base import BUSY, FORKED, NOTHING, ReceiverTraits, SenderTraits
from ..endpoints.devices import Sending
from ..endpoints.message import Message, words_of
from ..endpoints.pubsub import Publisher, Subscriber
from ..endpoints.spinning import Spin
from ..endpoints.workqueue import Consumer, Producer
from ..errors import ArgumentError, ClosedError
from ..memory.words import store
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
    RingShape,
    state_word,
)
from ..ring.pool import Pool, Sizing
from ..ring.reader import Reader
from ..ring.writer import Registration, SlotRange

if TYPE_CHECKING:
    from .calls import Call


ONCE: Final = 1
"""Bit of a note: the request is not tried again after a server died with it."""
CANCELLED: Final = 2
"""Bit of a note: the reply is not wanted any more."""

DROPPED, DIED, NO_ROOM = 1, 2, 3
"""Codes of a verdict: the server dropped the request; a server died with a request that is tried once; there was no
room for the reply."""

FAILED: Final = "error"
"""The only key of the meta of an error reply, whose value is a dict of `type`, `text` and `traceback`."""

FOREVER: Final = 1e9
"""Seconds (32 years) from which on a time-out is no limit: more fits neither a deadline's word nor a lock's wait."""

ROOM_S: Final = 1.0
"""Seconds that replies to a client wait for it to release others, where it may have no more memory."""

BUDGET: Final = 256 << 20
"""Bytes of a ring of requests or replies for which no `slots=` was given; it has at least 2 slots."""

MAX_NAME: Final = 64 - 17
"""Characters of a service's name: a channel's, less those that `reply_channel` appends."""


def check_service(name: object) -> str:
    """Return a service's name, or raise `ArgumentError` if no channel of replies can be named after it."""
    service = check_channel(name)
    if len(service) > MAX_NAME:
        raise ArgumentError(f"service name {service!r} has {len(service)} characters: use at most {MAX_NAME}")
    return service


class ServiceEndpoint(AsyncEndpoint):
    """Base of the endpoints of a client and of a server."""

    @property
    def service(self) -> str:
        """The service's name."""
        return self.name

    @property
    def state(self) -> str:
        """`open`, or how it has ended."""
        return self._state or "open"

    @property
    def is_forked(self) -> bool:
        """Whether it belongs to this process's parent."""
        return self._state == FORKED

    def check_open(self) -> None:
        """Raise `ClosedError` or `ForkedError` unless the endpoint is open."""
        if self._state:
            self._refuse()

    def refuse_calls(self) -> None:
        """Make calls that wait, and calls that begin, raise `ClosedError`: the endpoint closes soon."""
        self._stop = True

    async def until_idle(self) -> None:
        """Wait until no thread is inside a call."""
        await self._until_idle()


class Posting(ServiceEndpoint, AsyncSender):
    """Base of `RequestSender` and `ReplySender`: a sender whose messages have notes."""

    @abstractmethod
    def _registration(self, note: Any) -> Registration:
        """The words of a note, as the writer stores them."""

    def post(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a message with its note; raises what `send` raises."""
        if self._state:  # as `check_open`, without a call
            self._refuse()
        registration = self._registration(note)
        sent = self._writer.send(value, meta, 0, *registration)
        if type(sent) is not int:
            self._post(sent, timeout, registration)
        elif sent < 0:
            self._wake_late(-sent)

    def _post(self, out: Any, timeout: float | None, registration: Registration) -> None:
        self._run_within(timeout, self._too_late, self._put, out, *registration)

    async def apost(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """`post` for asyncio: other tasks run while this one waits."""
        sent = await self._asend(value, meta, timeout, *self._registration(note))
        if isinstance(sent, Sending):
            await self._when_copied(sent)


class RequestPool(Pool):
    """Slots for requests. The verdict on a request is read before its slot is used again."""

    __slots__ = ("calls",)

    calls: dict[int, Call]
    """The calls whose requests are in flight, by sequence number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls = {}

    def find(self, nbytes: int) -> SlotRange | None:
        return super().find(nbytes) or (super().find(nbytes) if self._judge() else None)

    def has_room(self, nbytes: int) -> bool:
        self._judge()
        return super().has_room(nbytes)

    def _judge(self) -> bool:
        """Read the verdicts of requests before their slots are used again; whether there were any."""
        found = False
        for ring, slot, seq, _ in self._writer.messages():
            if ring.words[state_word(ring, slot) + VERDICT] >> 8 == seq:
                call = self.calls.get(seq)
                if call is not None and call.verdict is None:
                    call.verdict = RequestSender.verdict(call)
                self._writer.judge(ring.index, slot)
                found = True
        return found


_NO_ROOM: Final = (
    'service "{{0.name}}": no room for a request of {{nbytes}}, all {{slots}} slots wait for servers ({})'
    "{{grown}}: start more of them, or pass slots= or timeout={{grow}}"
)


class RequestSender(Posting, Producer):
    """Publishes requests with their notes, and withdraws those that no server has started."""

    _called = 'Client of service "{0.service}"'
    _traits = SenderTraits(
        WORK_QUEUE, SERVICE, sizing=Sizing(most=16, least=2, nbytes=BUDGET), pool=RequestPool, checks_verdicts=True,
        carries_context=True, full=_NO_ROOM.format("there: {there}"), full_alone=_NO_ROOM.format("none is there"),
    )  # fmt: skip
    _pool: RequestPool

    def __init__(self, service: str, *, slots: int | None, **options: Any) -> None:
        # a lock on a request is granted to each thread of its process; a signal handler may close while one withdraws
        self._withdrawing = threading.RLock()
        super().__init__(service, slots=slots, **options)
        self.calls = self._pool.calls
        """By sequence number. A call is entered before it is published, as its reply may be fast."""

    @property
    def window(self) -> int:
        """How many requests may be in flight at once."""
        return min(self._sizing.most, self._pool.slots or self._sizing.most)  # read once: a thread may close meanwhile

    @property
    def uid(self) -> int:
        """The client's uid."""
        return self._member.uid

    def _registration(self, call: Call) -> Registration:
        return call.bits, call.deadline, self.calls, call

    def _post(self, out: Any, timeout: float | None, registration: Registration) -> None:
        super()._post(out, timeout, registration)
        # crash: request.posted

    def count_living(self) -> int:
        """How many servers live now, by their locks: a killed server stays in the table until a process cleans up."""
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

        `taken`: return False also if no server has had it. (A server without torch takes a request with tensors, and
        undoes that.)
        """
        if self._state:  # in a forked child, a thread of the parent may have the lock for ever
            return False
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

    def _depart(self) -> None:
        with self._withdrawing:  # another thread may have a lock on a request, which goes with their file
            super()._depart()

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
        """Whether no server will work on it any more: its reply was sent, or there will be none."""
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


class ReplyReceiver(ServiceEndpoint, Subscriber):
    """Receives the replies to one client, which is their only receiver: their values are writable."""

    _called = 'Client of service "{0.service}"'
    _traits = ReceiverTraits(FAN_OUT, is_only_reader=True, raises_unreadable=False)

    def __init__(self, channel: str, *, spin: float) -> None:
        self._rows: dict[int, tuple[memoryview, int]] = {}
        self._rows_epoch = -1
        super().__init__(channel, spin=spin, until="closed")  # another server may come

    @property
    def service(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def close(self) -> None:
        """Leave, and release the rings."""
        super().close()
        self._rows.clear()

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
        words, at = words_of(message)
        _, shift = self._row_of(words)
        return words[at + shift]

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


class Source:
    """A ring of a client, and the publisher of replies to that client once there is one."""

    __slots__ = ("reader", "replies", "words")

    def __init__(self, reader: Reader, words: memoryview) -> None:
        self.reader = reader
        self.words = words  # kept, so that its `id` stays its own
        self.replies: ReplySender | None = None


class RequestReceiver(ServiceEndpoint, Consumer):
    """Takes requests; several may be open at once."""

    _called = 'Server of service "{0.service}"'
    _traits = ReceiverTraits(
        WORK_QUEUE,
        SERVICE,
        given_up='service "%s": request %d of client %016x dropped after %d servers that did not finish it',
    )

    def __init__(self, service: str, *, max_attempts: int, spin: float, label: str | None = None) -> None:
        self._sources: dict[int, Source] = {}  # by the id of their rings' words
        # until="closed": another client may come
        super().__init__(
            service, acknowledge="release", max_attempts=max_attempts, spin=spin, until="closed", label=label
        )

    @property
    def epoch(self) -> int:
        """Changes when clients have come or gone."""
        return self._epoch

    def source_of(self, words: memoryview) -> Source:
        """The source of a request in the ring of these words."""
        source = self._sources.get(id(words))
        if source is None:
            source = self._sources[id(words)] = Source(self._find(words), words)
        return source

    def forget_sources(self) -> None:
        """Release the rings: their clients may have left."""
        self._sources = {}

    def close(self) -> None:
        """Leave, and release the rings."""
        super().close()
        self.forget_sources()

    def _find(self, words: memoryview) -> Reader:
        for reader in (*self._readers, *self._retired):
            if any(ring.words is words for ring in reader.rings):
                return reader  # type: ignore[no-any-return]
        raise LookupError("a request of an unknown client")

    def has_left(self, reader: Reader) -> bool:
        """Whether a client has left or died. Asks the kernel: while a handler runs, no call checks who lives."""
        if reader.gone or reader.sequences.closed:
            return True
        if self._state:
            return False
        control = self._member.control
        try:
            return control.words[ctl.base(reader.index)] != reader.uid or not control.is_alive(reader.index)
        except ClosedError:  # by another thread
            return False

    def clients(self) -> dict[int, bool]:
        """The uids of the clients that are attached, and whether each has left."""
        return {reader.uid: reader.gone for reader in (*self._readers, *self._retired)}


class ReplyPool(Pool):
    """Slots for replies. A client may keep as many replies as memory and `_MOST_REPLIES` allow. An added ring has a
    quarter as many slots as there are, at most 32, so that the maximum number of rings holds that many replies."""

    __slots__ = ()

    def shape(self, nbytes: int) -> RingShape:
        shape = super().shape(nbytes)
        slots = max(shape.slots, min(32, self.slots // 4, BUDGET // shape.slot_bytes))
        while slots > shape.slots:
            larger = replace(shape, slots=slots)
            if self._max_bytes is None or self.nbytes + larger.nbytes <= self._max_bytes:
                return larger
            slots -= 1
        return shape


_MOST_REPLIES: Final = 1 << 13
_NO_MEMORY: Final = (
    'service "{0.service}": no room for a reply of {nbytes}: its client keeps earlier ones in all {slots} slots, and '
    "has reached {limit}: copy there what is kept and drop the replies, or make the server with a larger max_bytes= or "
    "slots="
)


class ReplySender(Posting, Publisher):
    """Publishes replies to one client, each with the number of the request that it is for."""

    _called = 'Server of service "{0.service}"'
    _traits = SenderTraits(
        FAN_OUT, sizing=Sizing(most=8, least=2, nbytes=BUDGET), pool=ReplyPool, entries=_MOST_REPLIES, full=_NO_MEMORY,
        full_alone=_NO_MEMORY,
    )  # fmt: skip

    def __init__(self, channel: str, *, slots: int | None, max_bytes: int | str | None) -> None:
        super().__init__(channel, slots=slots, max_bytes=max_bytes)
        # set afterwards, so that the sequence table stays small: more rings are made for a client that keeps replies
        self._full, self._spin = "grow", Spin(0.0)
        self._seen, self._waits_until = -1, 0.0

    @property
    def service(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def _registration(self, seq: int) -> Registration:
        """`seq`: of the request that the reply is for."""
        return seq, 0, None, None

    def _post(self, out: Any, timeout: float | None, registration: Registration) -> None:
        super()._post(out, self._patience(timeout), registration)

    async def apost(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        await super().apost(note, value, meta, self._patience(timeout))

    def _patience(self, timeout: float | None) -> float:
        """How much of `timeout` a reply may wait for room: consecutive replies that are not published share `ROOM_S`.
        Otherwise a client that keeps its replies would delay the server, and its other clients, for each reply.
        """
        now, published = time.monotonic(), self._published
        if self._seen != published:
            self._seen, self._waits_until = published, now + ROOM_S
        left = self._waits_until - now
        return max(0.0, left if timeout is None else min(timeout, left))
