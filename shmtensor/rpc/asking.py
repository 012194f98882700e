"""A client's two endpoints: the producer of its requests and the subscriber of its replies."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..endpoints.base import FORKED, TICK
from ..endpoints.message import Message
from ..endpoints.producer import Producer
from ..endpoints.pubsub import Subscriber
from ..errors import ClosedError, ForkedError, RingFull
from ..memory.words import store
from ..ring.competing import state_word
from ..ring.layout import (
    ATTEMPT,
    CLAIMED,
    DEADLINE,
    DONE,
    L_PUBLISHED,
    NOTE,
    R_RECORDS,
    RECORD_WORDS,
    RELEASED,
    SERVICE,
    VERDICT,
)
from ..ring.ring import Busy, Ring
from ..units import format_bytes
from ..views.outgoing import Outgoing
from .notes import BUDGET, CANCELLED, FOREVER
from .posting import Posting

if TYPE_CHECKING:
    from .call import Call


class Requests(Posting, Producer):
    """Publishes requests with their notes, and takes back what nobody has started."""

    @property
    def _channel_kind(self) -> int:
        return SERVICE

    def __init__(self, service: str, *, slots: int | None, **options: Any) -> None:
        self.calls: dict[
            int, Call
        ] = {}  # by sequence number: entered before they are published, as a reply may be fast
        self._withdrawing = threading.Lock()  # our lock on a request would be granted to each of our threads
        self._budget = BUDGET if slots is None else None
        super().__init__(service, slots=16 if slots is None else slots, **options)

    @property
    def window(self) -> int:
        """How many requests have room at once."""
        return min(self._slots, self._pool.slots) if self._rings else self._slots

    @property
    def uid(self) -> int:
        return self._member.uid

    def drop_in_child(self) -> None:
        super().drop_in_child()
        self._withdrawing = threading.Lock()

    def post(self, call: Call, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a request."""
        outbox = self._outbox
        if meta is None and outbox is not None:
            sent = outbox.ask(value, self.calls, call)
            if sent is not None:
                if sent < 0:
                    self._wake_late(-sent)
                return
        if not self._posting.acquire(timeout=-1 if timeout is None or timeout >= FOREVER else timeout):
            raise RingFull(f'service "{self.name}": another thread waits for room for its request')
        try:
            self._note = call
            self._send(value, meta, timeout)
        except BaseException:
            self._withhold(call)
            raise
        finally:
            self._posting.release()

    async def apost(self, call: Call, value: Any, meta: Any, timeout: float | None) -> None:
        """`post` for an event loop, which waits for no thread."""
        outbox = self._outbox
        if meta is None and outbox is not None and (self._crowd is None or self._crowd.is_empty):
            sent = outbox.ask(value, self.calls, call)
            if sent is not None:
                if sent < 0:
                    self._wake_soon(-sent)
                return
        await super().apost(call, value, meta, timeout)

    def _full_text(self, nbytes: int) -> str:
        servers = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners) or "none is there"
        return (
            f'service "{self.name}": no room for a request of {format_bytes(nbytes)}, all {self._pool.slots} slots '
            f'wait for their servers ({servers}): start more of them, or pass slots=, timeout= or full="grow"'
        )

    def _withhold(self, note: Call) -> None:
        super()._withhold(note)
        if note.seq > self._words[L_PUBLISHED]:
            self.calls.pop(note.seq, None)
            note.seq = 0

    def _publish(self, ring: Ring, slot: int, out: Outgoing, guard: Any) -> int:
        call: Call = self._note
        self._note = None
        seq, at = self._words[L_PUBLISHED] + 1, state_word(ring, slot)
        call.seq, call.words, call.at = seq, ring.words, at
        self.calls[seq] = call
        store(ring.words, at + DEADLINE, call.deadline)
        store(ring.words, at + NOTE, seq << 8 | call.bits)
        # crash: request.noted
        seq = super()._publish(ring, slot, out, guard)
        # crash: request.posted
        return seq

    def cancel(self, call: Call) -> None:
        """Say that nobody waits for the reply any more; whoever has not started the request will not start it."""
        seq, words, at = call.seq, call.words, call.at
        if words[at + NOTE] >> 8 == seq:  # else the slot is another message's by now
            store(words, at + NOTE, seq << 8 | call.bits | CANCELLED)
        # crash: cancel.noted
        self.withdraw(call)

    def withdraw(self, call: Call) -> bool:
        """Finish a request that no server holds, as a server would that drops it. False: one has it, or it is done."""
        seq, words, at = call.seq, call.words, call.at
        with self._withdrawing:
            if self._state or words[at + DONE] >= seq or not self._ledger.locks.try_exclusive(seq):
                return False
            # who sends in another thread may free the slot as soon as it is done: then `released` is not ours to store
            alone = self._mutex.acquire(False)
            try:
                # crash: withdraw.locked
                if words[at + DONE] >= seq:
                    return False
                store(words, at + DONE, seq)
                # crash: withdraw.done
                if alone:
                    store(words, at + RELEASED, seq)
                return True
            finally:
                self._ledger.locks.unlock(seq)
                if alone:
                    self._mutex.release()

    @staticmethod
    def is_done(call: Call) -> bool:
        """Whether no server will work on it any more: its reply is sent, or there is none."""
        return call.words[call.at + DONE] >= call.seq

    def is_held(self, call: Call) -> bool:
        """Whether a living server has it now."""
        return not self._state and self._ledger.locks.held_by_other(call.seq)

    @staticmethod
    def was_taken(call: Call) -> bool:
        """Whether a server has ever taken it."""
        return call.words[call.at + CLAIMED] >= call.seq

    def _is_free(self, ring: Ring, entry: Busy) -> bool:
        """The next request in the slot may overwrite why this one has no reply, before anybody has looked."""
        is_free = super()._is_free(ring, entry)
        call = self.calls.get(entry[0]) if is_free else None
        if call is not None:
            call.verdict = self.verdict(call)
        return is_free

    @staticmethod
    def verdict(call: Call) -> tuple[int, int]:
        """Why a request that is done has no reply: (code or 0, how often it was taken, as far as that is known)."""
        seq, words, at = call.seq, call.words, call.at
        verdict, attempt = words[at + VERDICT], words[at + ATTEMPT]
        seen = verdict & 0xFF if verdict >> 8 == seq else 0, attempt & 0xFF if attempt >> 8 == seq else 0
        return call.verdict or seen  # it is kept before another request may have overwritten what was seen

    def _refuse(self) -> None:
        refuse(self, "Client")


class Answers(Subscriber):
    """Receives the replies to one client. They are nobody else's, so that they may be written."""

    def __init__(self, channel: str, *, spin: float) -> None:
        self._rows: dict[int, tuple[memoryview, int, int]] = {}
        self._in_vain = False  # the last wait lasted longer than we stay awake
        self._since = 0.0  # when the wait began that is not judged yet
        self._last: Any = None  # the inlet that was asked last
        self._rows_epoch = -1
        super().__init__(channel, spin=spin)

    @property
    def _maps_writable(self) -> bool:
        return True

    def _value(self, found: Any, array: Any, readonly: bool) -> tuple[Any, Any]:
        return super()._value(found, array, False)

    def _is_over(self) -> bool:
        if any(feed.gone for feed in self._feeds):
            self._retire_drained()
        return False  # another server may come

    def take_soon(self, calls: dict[int, Call]) -> Call | bool | None:
        """The call that the next reply is for, taken out of `calls`, with its value; False for a reply to none of
        them; None if no usual tensor is there (of a single server: comes very soon)."""
        inlet = self._inlet
        if inlet is not None:
            self._last = inlet
            return inlet.answer(calls, 0 if self._in_vain else self._patience)  # type: ignore[no-any-return]
        feeds, turn = self._feeds, self._turn
        for feed in feeds[turn:] + feeds[:turn]:
            inlet = feed.inlet
            if inlet is not None and (ended := inlet.answer(calls, 0)) is not None:
                self._last, self._turn = inlet, turn + 1 if turn < len(feeds) else 0
                return ended  # type: ignore[no-any-return]
            if feed.words[L_PUBLISHED] > feed.position:  # something unusual: the others wait for their turn
                return None
        return None

    def take(self, calls: dict[int, Call], until: float) -> Call | bool | None:
        """The same; where it would be in vain to stay awake for it, asleep until then or for a tick at most.

        After None `recv` is to look: there may be something unusual, or the client is closed."""
        ended = self.take_soon(calls)
        if ended is not None or not self._in_vain:
            return ended
        now = monotonic()
        if not self._since:
            self._since = now
        with self._mutex:
            if self._state or self._stop or now >= until:
                return None
            if not self._sleep(min(TICK, until - now)):
                self._tick()
                return None
        ended = self.take_soon(calls)
        if ended is not None:
            self._judge(self._last.sent_ns)
        return ended

    def recv(self, *, timeout: float | None = None, copy: bool = False) -> Message:
        message = super().recv(timeout=timeout, copy=copy)
        if self._since:
            self._judge(self._sent_ns(message._lease))
        return message

    recv.__doc__ = Subscriber.recv.__doc__

    def _wait(self, timeout: float | None) -> Message:
        """Stays awake only where that would have brought the reply before: a thread that waits for a busy server's
        reply would take the processor that the server needs."""
        spin = self._spin
        if not self._since:
            self._since = monotonic()
        if self._in_vain:
            self._spin = 0.0
        self._in_vain = True
        try:
            return super()._wait(timeout)
        except BaseException:
            self._since = 0.0
            raise
        finally:
            self._spin = spin

    def _judge(self, sent_ns: int) -> None:
        """A wait has ended, with a reply that was published then: would it have found us awake?"""
        self._in_vain, self._since = sent_ns * 1e-9 - self._since > self._spin, 0.0

    def _sent_ns(self, lease: Any) -> int:
        """When a reply was published."""
        words, _, first = self._row_of(lease)
        sent: int = words[R_RECORDS + (lease.word - first) * RECORD_WORDS + 1]
        return sent

    def request_of(self, lease: Any) -> int:
        """Which request a reply is for."""
        words, shift, _ = self._row_of(lease)
        request: int = words[lease.word + shift]
        return request

    def _row_of(self, lease: Any) -> tuple[memoryview, int, int]:
        """A ring's words, how many there are from our row to its publisher's own, and where ours begins."""
        words = lease.words
        if self._rows_epoch != self._epoch:
            self._rows.clear()
            self._rows_epoch = self._epoch
        row = self._rows.get(id(words))
        if row is None:
            row = self._rows[id(words)] = self._find_row(words)
        return row

    def _find_row(self, words: memoryview) -> tuple[memoryview, int, int]:
        own = self._member.index
        for feed in (*self._feeds, *self._retired):
            for ring in feed.rings:
                if ring.words is words:
                    return words, (feed.index - own) * ring.row, ring.state + own * ring.row
        raise LookupError("a reply of an unknown server")

    def _refuse(self) -> None:
        refuse(self, "Client")


def refuse(endpoint: Any, what: str) -> None:
    """Raise what says that this end of the service is closed or somebody else's."""
    service = endpoint.name.rsplit(".", 1)[0] if isinstance(endpoint, Answers) else endpoint.name
    if endpoint._state == FORKED:
        raise ForkedError(
            f'{what} of service "{service}" belongs to process {endpoint._pid}, which forked this one: create a new '
            "one here"
        )
    raise ClosedError(f'{what} of service "{service}" is closed')
