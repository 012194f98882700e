"""Requests over a relay, the near side: a server on the clients' host, whose replies come from the far relay.

taken -> sent -> ended (replied to, a verdict, cancelled, given back) -> acknowledged; docs/internals/relay.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..codec import raw
from ..endpoints.message import Message, SenderInfo, store_attempts
from ..errors import ClosedError, ReleasedError, ResourceError, RingFull, WireError
from ..rpc.endpoints import ONCE
from ..rpc.request import Request, TakenRequests, record_of
from .endpoints import Batches, Filling, NearReplySender, NearRequestReceiver
from .frames import (
    DIED,
    DROPPED,
    EXPIRED,
    MOST_FRAME,
    NO_ROOM,
    NOTE,
    REPLY,
    WORN,
    Item,
    Items,
    Part,
    ReplyNote,
    RequestNote,
    Sender,
    State,
    Status,
    reply_note,
)
from .threads import RelayThread, join
from .window import Gap

log = logging.getLogger("shmtensor.relay")


class Taken:
    """A request that a near relay has taken, as an item to send."""

    def __init__(self, service: NearService, request: Request) -> None:
        self._service, self._request = service, request
        self._record = record_of(request)
        self.sender: SenderInfo = self._record.message.sender
        self.is_sent = False
        """Whether the far side may have it."""
        self.is_ended = self.is_unwanted = self.is_late = False
        """It has ended here; so that the far side shall cancel it; its time is up there, and will be here."""

    @property
    def nbytes(self) -> int:
        return self._record.message.nbytes

    def read(self) -> tuple[Any, bytes] | None:
        """Payload and description, to be sent: from now on the far side may have it. None: it has ended."""
        with self._service.ending:  # the other thread may be about to end it, which releases its message
            if self.is_ended or self._record.is_released:
                return None
            self.is_sent = True
            record = self._record
            remaining = record.remaining
            left = 0 if remaining is None else max(1, int(remaining * 1e9))
            note = RequestNote(left, ONCE if record.is_tried_once else 0, self.attempts_before)
            return record.message.value, note.pack() + record.message.meta

    # --- its end: once

    def finish(self, verdict: int = 0, attempts: int | None = None) -> None:
        """Mark it as done; `verdict` says why it has no reply. `attempts`: how many servers have had it."""
        self._end(attempts, lambda: self._service.requests.finish(self._record, verdict))

    def finish_if_unwanted(self, *, asks: bool) -> bool:
        """Finish it if the client has cancelled it, or its time is up there and here. Returns whether it was so.

        `asks`: ask the kernel whether the client lives.
        """
        record = self._record
        if self.is_ended:
            return False
        if self.is_late and (record.remaining or 0) <= 0:
            self.finish()
            return True
        if record.is_cancelled or (asks and self._service.requests.is_cancelled(record)):
            self.is_unwanted = True
            self.finish()
            return True
        return False

    def give_back(self, attempts: int | None = None) -> None:
        """Give it back, for another server. `attempts`: how many servers have had it; None: this relay counts as
        one."""
        self._end(attempts, lambda: self._service.requests.give_back(self._request))

    def _end(self, attempts: int | None, end: Callable[[], object]) -> None:
        """End it on this host, once."""
        with self._service.ending:
            record, self.is_ended = self._record, True
            if record.is_released:
                return
            if attempts is not None:
                store_attempts(record.words, record.at, record.seq, attempts)
            end()

    def give_up(self) -> None:
        """Give it back because the far side that had it is gone: another server gets it, if it may be tried again."""
        if self.is_ended:
            return
        if not self.is_sent:
            self.give_back(self.attempts_before)
        elif self._record.is_tried_once:
            self.finish(DIED)
        else:
            self.give_back()

    @property
    def attempts_before(self) -> int:
        """How many servers had it before this relay."""
        return self._record.message.attempt - 1

    @property
    def is_tried_once(self) -> bool:
        """Whether it may not be tried again."""
        return self._record.is_tried_once

    # --- its reply

    def publisher(self) -> NearReplySender | None:
        """Publishes the reply; None if it is not wanted."""
        try:
            found = self._service.requests.replies_for(self._record)
        except (ReleasedError, ClosedError):
            return None
        return found  # type: ignore[return-value]

    @property
    def seq(self) -> int:
        """The client's number of it."""
        return self._record.seq

    def finish_replied(self) -> None:
        """Finish it: its reply is published."""
        # crash: relay.answered
        with self._service.ending:
            self.is_ended = True
            if not self._record.is_released:
                self._service.requests.count_and_finish(self._record, True, False)

    def release(self) -> None:
        """Release it: the far side has ended it. If it did not say how, it has dropped the request."""
        if not self.is_ended:
            self.finish(DROPPED)


Sent = Message | Taken
"""What a near relay sends: a message as it is, or a request."""


def origin_of(item: Sent) -> int:
    """The uid of its sender."""
    return _uid(item.sender.id)


@functools.lru_cache(1024)
def _uid(name: str) -> int:
    return int(name, 16)


def read(item: Sent) -> tuple[Any, Any] | None:
    """Payload and description. None: it has ended."""
    return item.read() if isinstance(item, Taken) else (item.value, item.meta)


class NearService(Batches[Taken]):
    """A near relay's end in a service: takes requests that no server of this host is about to take."""

    refusal = ""

    def __init__(self, name: str, avoided: int, transit: bool) -> None:
        self.avoided = avoided
        self._receiver = NearRequestReceiver(name, avoided, transit)
        self.requests = TakenRequests(self._receiver, slots=None, max_bytes=None, publisher=NearReplySender)
        self.ending = threading.Lock()

    def next(self, timeout: float) -> Taken | None:
        """The next request, or None."""
        message = self._receiver.next(timeout)
        if message is None:
            self.requests.drop_clients()
            return None
        request = self.requests.accept(message, [message])
        if request is None:
            return None
        record_of(request).is_begun = True
        return Taken(self, request)

    def uids(self) -> list[int]:
        return self._receiver.uids()

    def senders(self) -> list[Sender]:
        """The clients that are here."""
        return self._receiver.senders()

    def idle_servers(self) -> int:
        """How many living servers of this host wait for a request."""
        return self._receiver.idle_servers()

    def close(self) -> None:
        """Leave the service: what has not ended goes to other servers."""
        with self.ending:
            self.requests.close()


Ids = tuple[int, int, int]


class Replying:
    """The replies that come to a near relay: published to their clients, and confirmed. It has a thread.

    Args:
        find: the request of that number, if it is under way.
        put: sends a frame to the far relay.
        note_gap: replies are missing.
        count_bad: counts and logs what is dropped.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[int], Taken | None],
        put: Callable[[bytes], None],
        note_gap: Callable[[], None],
        count_bad: Callable[[WireError], None],
    ) -> None:
        self._find, self._put, self._note_gap, self._count_bad = find, put, note_gap, count_bad
        self._queue: queue.SimpleQueue[tuple[Items | Part | Status, int] | tuple[Ids, int, None] | None]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued, self._most = 0, MOST_FRAME
        self._ids: Ids = (0, 0, 0)
        self._received = self._consumed = self._said = 0
        self._gap = False
        # number; bytes of the payload, and how many have come
        self._filling: tuple[int, Taken | None, Filling | None, int, int] | None = None
        self._thread = RelayThread(self._run, f"shmtensor relay {name} replies")

    def start(self) -> None:
        """Begin to take them."""
        self._thread.start()

    def begin(self, ids: Ids, nbytes: int) -> None:
        """An attempt begins, with that window of bytes."""
        self._queue.put((ids, nbytes, None))

    def feed(self, frame: Items | Part | Status, nbytes: int) -> None:
        """Handle a frame that has come. Called in Zenoh's threads."""
        with self._lock:
            is_allowed = self._queued <= 2 * (self._most + MOST_FRAME)
            if is_allowed:
                self._queued += nbytes
        if is_allowed:
            self._queue.put((frame, nbytes))
        else:
            self._count_bad(WireError("more bytes of replies than the window allows"))

    def stop(self) -> None:
        """Publish nothing more."""
        self._queue.put(None)
        join(self._thread)

    def _run(self) -> None:
        while (got := self._queue.get()) is not None:
            if len(got) == 3:
                with self._lock:
                    self._ids, self._most = got[0], got[1]
                    self._received = self._consumed = self._said = 0
                self._gap, self._filling = False, None
                continue
            frame, nbytes = got
            try:
                self._take(frame, nbytes)
            except Exception:
                log.exception("relay: a reply was lost by an error")
                self._lose()
            finally:
                with self._lock:
                    self._queued -= nbytes
                del frame, got

    def _take(self, frame: Items | Part | Status, nbytes: int) -> None:
        if (frame.near, frame.far, frame.attempt) != self._ids or self._gap:
            return
        try:
            if isinstance(frame, Status):
                if frame.sent > self._received or frame.nbytes > self._consumed:
                    raise Gap
            elif isinstance(frame, Items):
                for item in frame.items:
                    self._expect(item.number)
                    self._answer(item)
                    self._received = item.number
            else:
                self._add(frame)
        except Gap:
            self._lose()
            return
        except WireError as error:
            self._count_bad(error)
            return
        self._consumed += nbytes
        if self._queue.empty() or self._consumed - self._said >= self._most // 4:
            self._said = self._consumed
            self.say()

    def say(self) -> None:
        """Report what has been received: after replies, and with each STATUS."""
        with self._lock:
            ids, received, consumed = self._ids, self._received, self._consumed
        if ids[0]:
            self._put(State(*ids, received, received, consumed, False, 0).head())

    def _lose(self) -> None:
        self._gap, self._filling = True, None
        self._note_gap()

    def _expect(self, number: int) -> None:
        if number <= self._received:
            raise WireError(f"reply {number} comes again, behind {self._received}")
        if number != self._received + 1 or self._filling is not None:
            raise Gap

    def _answer(self, item: Item) -> None:
        """A whole reply, or why there is none."""
        taken = self._find(item.sender)
        if taken is None or taken.is_ended:
            return
        note = self._sound(taken, item.description, len(item.payload))
        if note is None:
            return
        if note.end != REPLY:
            self._end(taken, note)
            return
        try:
            replies = taken.publisher()
            if replies is None:
                return
            replies.post_reply(taken.seq, item.payload, item.description[NOTE:])
        except ClosedError:  # its client has left
            return
        except (ResourceError, RingFull):
            taken.finish(NO_ROOM)
            return
        taken.finish_replied()

    def _end(self, taken: Taken, note: ReplyNote) -> None:
        if note.end in (DROPPED, DIED, NO_ROOM):
            taken.finish(note.end)
        elif note.end == WORN:
            taken.finish(attempts=max(1, note.attempts))
        elif note.end == EXPIRED:
            taken.is_late = True
        else:
            taken.give_back(note.attempts)

    def _sound(self, taken: Taken, description: bytes, nbytes: int) -> ReplyNote | None:
        """The note of a reply that its client can read. Of another one, the request has no reply."""
        try:
            note = reply_note(description)
            if note.end == REPLY:
                raw.check(description[NOTE:], nbytes)
            return note
        except WireError as error:
            taken.finish(DROPPED)
            self._count_bad(WireError(f"a reply is passed over: {error}"))
            return None

    def _add(self, frame: Part) -> None:
        """A part of a large reply, copied into its slot; published with the last one."""
        if frame.offset == 0:
            self._expect(frame.number)
            taken = self._find(frame.sender)
            if taken is not None and (taken.is_ended or not self._sound(taken, frame.description, frame.nbytes)):
                taken = None
            filling = None
            if taken is not None:
                try:
                    replies = taken.publisher()
                    if replies is not None:
                        filling = replies.fill_reply(taken.seq, frame.description[NOTE:], frame.nbytes)
                except ClosedError:
                    pass
                except (ResourceError, RingFull):
                    taken.finish(NO_ROOM)
            self._filling = frame.number, taken, filling, frame.nbytes, 0
        elif self._filling is None or (self._filling[0], *self._filling[3:]) != (
            frame.number, frame.nbytes, frame.offset
        ):  # fmt: skip
            raise Gap
        number, taken, filling, total, filled = self._filling
        filled += len(frame.payload)
        if filling is not None:
            filling.add(frame.payload)
        self._filling = number, taken, filling, total, filled
        if filled < total:
            return
        self._filling, self._received = None, number
        if filling is not None and taken is not None:
            # crash: relay.filled
            with contextlib.suppress(ClosedError):
                filling.finish()
                taken.finish_replied()
