"""A client's two endpoints: the producer of its requests and the subscriber of its replies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..channel import control as ctl
from ..endpoints.base import BUSY, FORKED
from ..endpoints.producer import Producer
from ..endpoints.pubsub import Subscriber
from ..errors import ClosedError, ForkedError, RingFull
from ..memory.words import store
from ..ring.competing import state_word
from ..ring.layout import (
    ATTEMPT,
    CLAIMED,
    DONE,
    NOTE,
    RELEASED,
    SERVICE,
    VERDICT,
)
from ..ring.pool import Sizing
from ..ring.ring import Ring
from ..ring.writer import Beside, Place
from ..units import format_bytes
from ..views.encode import Encoded
from .notes import BUDGET, CANCELLED, FOREVER
from .posting import Posting

if TYPE_CHECKING:
    from .call import Call


class Requests(Posting, Producer):
    """Publishes requests with their notes, and takes back what nobody has started."""

    _counts_lost = False
    _heeds_verdicts = True

    @property
    def _channel_kind(self) -> int:
        return SERVICE

    def __init__(self, service: str, *, slots: int | None, **options: Any) -> None:
        self.calls: dict[
            int, Call
        ] = {}  # by sequence number: entered before they are published, as a reply may be fast
        # our lock on a request would be granted to each of our threads; a signal handler may close while one withdraws
        self._withdrawing = threading.RLock()
        self._posting = threading.Lock()  # whoever has no room keeps others out: they wait no longer than they want to
        self._sizing = Sizing(most=16, least=2, nbytes=BUDGET)
        super().__init__(service, slots=slots, **options)

    @property
    def window(self) -> int:
        """How many requests have room at once."""
        return min(self._sizing.most, self._pool.slots) if self._rings else self._sizing.most

    @property
    def uid(self) -> int:
        return self._member.uid

    def drop_in_child(self) -> None:
        super().drop_in_child()
        self._withdrawing, self._posting = threading.RLock(), threading.Lock()

    def _beside(self, call: Call) -> Beside:
        return call.bits, call.deadline, self.calls, call

    def _post(self, out: Any, timeout: float | None, beside: Beside) -> None:
        taken: list[bool] = []
        wait = -1 if timeout is None or timeout >= FOREVER else timeout
        try:
            taken.extend(map(self._posting.acquire, (True,), (wait,)))  # taken and noted in one C call
            if not taken[0]:
                raise RingFull(f'service "{self.name}": another thread waits for room for its request')
            super()._post(out, timeout, beside)
        finally:
            if taken and taken[0]:
                self._posting.release()

    def _full_text(self, nbytes: int) -> str:
        servers = ", ".join(f"pid {peer.entry.pid}" for peer in self._listeners) or "none is there"
        return (
            f'service "{self.name}": no room for a request of {format_bytes(nbytes)}, all {self._pool.slots} slots '
            f'wait for their servers ({servers}): start more of them, or pass slots=, timeout= or full="grow"'
        )

    def _publish(self, ring: Ring, slot: int, out: Encoded, guard: Any, *beside: Any) -> int:
        seq = super()._publish(ring, slot, out, guard, *beside)
        # crash: request.posted
        return seq

    def _find(self, nbytes: int) -> Place | None:
        return super()._find(nbytes) or (super()._find(nbytes) if self._judge() else None)

    def _has_room(self, nbytes: int) -> bool:
        self._judge()
        return super()._has_room(nbytes)

    def _judge(self) -> bool:
        """Keep why requests have no reply, before the next ones in their slots overwrite it. Whether there were any."""
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
        """How many servers live now: the kernel is asked, for the table keeps a killed one until somebody sweeps."""
        if self._state:
            return 0
        control = self._member.control
        servers = [entry for entry in control.members() if entry.role == ctl.RECEIVER and not entry.leaving]
        try:
            return sum(control.is_alive(entry.index) for entry in servers)
        except ClosedError:  # by another thread
            return 0

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
        locks = self._ledger.locks
        with self._withdrawing:
            if self._state or words[at + DONE] >= seq:
                return False
            try:
                if not locks.try_exclusive(seq):
                    return False
                # who sends in another thread may free the slot as soon as it is done: `released` is not ours to store
                finished = self._try_run(self._finish_request, call, True)
                return self._finish_request(call, False) if finished is BUSY else finished
            finally:
                locks.unlock(seq)  # ours, if we have it

    @staticmethod
    def _finish_request(call: Call, alone: bool) -> bool:
        """A request that we have locked is done, unless its server has finished it before."""
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
        return not self._state and self._ledger.locks.held_by_other(call.seq)

    @staticmethod
    def was_taken(call: Call) -> bool:
        """Whether a server has ever taken it."""
        return call.words[call.at + CLAIMED] >= call.seq

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
        self._rows: dict[int, tuple[memoryview, int]] = {}
        self._rows_epoch = -1
        super().__init__(channel, spin=spin)

    @property
    def _maps_writable(self) -> bool:
        return True

    def _is_over(self) -> bool:
        if any(feed.gone for feed in self._feeds):
            self._retire_drained()
        return False  # another server may come

    def request_of(self, lease: Any) -> int:
        """Which request a reply is for."""
        words, shift = self._row_of(lease)
        request: int = words[lease.word + shift]
        return request

    def _row_of(self, lease: Any) -> tuple[memoryview, int]:
        """A ring's words, and how many there are from our row to its publisher's own."""
        words = lease.words
        if self._rows_epoch != self._epoch:
            self._rows.clear()
            self._rows_epoch = self._epoch
        row = self._rows.get(id(words))
        if row is None:
            row = self._rows[id(words)] = self._find_row(words)
        return row

    def _find_row(self, words: memoryview) -> tuple[memoryview, int]:
        own = self._member.index
        for feed in (*self._feeds, *self._retired):
            for ring in feed.rings:
                if ring.words is words:
                    return words, (feed.index - own) * ring.row
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
