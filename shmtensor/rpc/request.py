"""Requests as a server gets them, each to be answered once; those that it has taken, and the replies to their
clients."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from ..channel.names import reply_channel
from ..endpoints.base import Local
from ..endpoints.message import Message, Released, give_back, store_attempts, words_of
from ..errors import ClosedError, ReleasedError, ResourceError, RingFull
from ..memory.words import store
from ..ring.layout import DEADLINE, NOTE, VERDICT
from .endpoints import CANCELLED, DIED, DROPPED, FAILED, NO_ROOM, ONCE, ReplySender, RequestReceiver, Source

MOST_TEXT = 100_000
"""Characters of an error's text and of its traceback that reach the client; the end of a traceback says most."""


class Request(Local):
    """A request that this server has taken. Answer it once: with `reply(value)` or `fail(error)`.

    Its value's tensors and arrays are the client's slot itself, writable, and yours until the last view of them has
    died. A request that is dropped without an answer fails in its client. One that is unanswered when its server dies
    or closes goes to another server.

    As a context manager it answers with an error if its block raises; the exception goes on.

    >>> import shmtensor, torch
    >>> with shmtensor.Server("doc") as server, shmtensor.Client("doc") as client:
    ...     future = client.submit(torch.ones(2), meta={"scale": 3})
    ...     req = server.recv(timeout=5)
    ...     req.reply(req.value * req.meta["scale"])
    ...     future.result(timeout=5)
    tensor([3., 3.])
    """

    __slots__ = ("_record", "_taken", "seq")

    seq: int
    """The client's sequence number of this request."""

    def __init__(self, taken: TakenRequests, record: TakenRequest) -> None:
        self._taken, self._record, self.seq = taken, record, record.seq

    def _instead(self) -> str:
        return "pass req.value, copied, and answer it here"

    @property
    def value(self) -> Any:
        """What the client sent: a tensor, an ndarray, or a dict, list or tuple of these, bytes and JSON scalars."""
        if self._record.is_released:
            raise ReleasedError("this request was answered, or its server closed: take req.value before")
        return self._record.message.value

    @property
    def meta(self) -> Any:
        """What the client passed as `meta=`, or None."""
        return self._record.message.meta

    @property
    def attempt(self) -> int:
        """How often the request was taken, this time included; above 1 after a server died with it or gave it back."""
        return self._record.message.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the reply is no longer needed: the client cancelled the request or gave it up at its time-out, closed
        or died."""
        return self._taken.is_cancelled(self._record)

    @property
    def expired(self) -> bool:
        """Whether the client's time-out is over."""
        remaining = self.remaining
        return remaining is not None and remaining <= 0

    @property
    def remaining(self) -> float | None:
        """Seconds until the client's time-out, below 0 after it; None if it has none."""
        return self._record.remaining

    @property
    def answered(self) -> bool:
        """Whether it was answered, or goes to another server because this one has closed."""
        return self._record.is_released

    def reply(self, value: Any) -> None:
        """Answer with a value, which is copied before this returns: as for `Publisher.send`.

        Waits only where `max_bytes` leaves no room beside replies that the client has not released: for a second, or
        until the client's time-out. Replies to that client which follow do not wait again until there was room for one.

        Raises `RingFull` if there is no room then, `ArgumentTypeError` or `ResourceError` if the value cannot be sent;
        then the request is still yours to answer. `ReleasedError` if it was answered already.
        """
        self._taken.reply(self._record, value)

    async def areply(self, value: Any) -> None:
        """`reply` for asyncio: other tasks run if it has to wait for room.

        If it is cancelled, nothing is sent, and the request is still yours to answer.
        """
        await self._taken.areply(self._record, value)

    def fail(self, error: BaseException | str) -> None:
        """Answer with an error: the client's call raises `RemoteError` with its type's name, text and traceback."""
        self._taken.reply(self._record, None, error)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self.answered:
            with contextlib.suppress(ClosedError):
                self.fail(error)

    def __del__(self) -> None:
        """Finish a request that was dropped without an answer. May run in any thread: it stores two words, which the
        client checks."""
        record = getattr(self, "_record", None)  # its constructor may have been interrupted
        if record is not None and not record.is_released:
            self._taken.forget(record)

    def __repr__(self) -> str:
        state = "answered" if self.answered else "cancelled" if self.cancelled else "open"
        return f"<Request seq={self.seq} attempt={self.attempt} {state}>"


def record_of(request: Request) -> TakenRequest:
    """The server's record of a request."""
    return request._record


def describe(error: BaseException | str) -> dict[str, str]:
    """An error as the value of an error reply."""
    if isinstance(error, str):
        return {"type": "Failed", "text": error[:MOST_TEXT], "traceback": ""}
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = _made("text", lambda: str(error))
    trace = ""
    if error.__traceback__:
        trace = _made("traceback", lambda: "".join(traceback.format_exception(kind, error, error.__traceback__)))
    return {"type": name[:MOST_TEXT], "text": text[:MOST_TEXT], "traceback": trace[-MOST_TEXT:]}


def _made(what: str, make: Callable[[], str]) -> str:
    """A text about an error; if a method of the error raises, a text that says so."""
    try:
        return make()
    except Exception as failure:
        return f"(its {what} cannot be made: {type(failure).__name__})"


class TakenRequest:
    """The server's record of a `Request`: its message, and the words and the index of its slot's state.

    is_begun: whether it was returned to the user; until then it waits for its batch, or an interrupted call has left it
    """

    __slots__ = ("at", "is_begun", "message", "seq", "source", "words")

    def __init__(self, message: Message, source: Source, at: int) -> None:
        self.is_begun = False
        self.message, self.source, self.words, self.at, self.seq = message, source, source.words, at, message.seq

    @property
    def is_released(self) -> bool:
        """Whether it was finished by this server, or given back."""
        return self.message.__class__ is Released

    def give_back(self) -> None:
        """Drop the message without acknowledging it: another server gets it. It counts as an attempt if it was returned
        to the user."""
        if not self.is_begun and not self.is_released:
            store_attempts(self.words, self.at, self.seq, self.message.attempt - 1)
        give_back(self.message)

    @property
    def is_cancelled(self) -> bool:
        """Whether the reply is no longer needed, as far as the words say."""
        if self.source.reader.gone:
            return True
        note = self.words[self.at + NOTE]
        return bool(note & CANCELLED) if note >> 8 == self.seq else True

    @property
    def is_tried_once(self) -> bool:
        """Whether it fails after a server died with it."""
        note = self.words[self.at + NOTE]
        return note >> 8 == self.seq and bool(note & ONCE)

    @property
    def remaining(self) -> float | None:
        """See `Request.remaining`."""
        if self.words[self.at + NOTE] >> 8 != self.seq:
            return 0.0
        deadline = self.words[self.at + DEADLINE]
        return (deadline - monotonic_ns()) * 1e-9 if deadline else None


class TakenRequests:
    """A server's requests from when they were taken to their end, and the publishers of replies to their clients."""

    def __init__(
        self,
        receiver: RequestReceiver,
        *,
        slots: int | None,
        max_bytes: int | str | None,
        publisher: type[ReplySender] = ReplySender,
    ) -> None:
        self.receiver, self._publisher = receiver, publisher
        self.open: set[TakenRequest] = set()
        """Requests that have not ended on this server."""
        self.replies: dict[int, ReplySender] = {}
        """Publishers of replies, by the client's uid."""
        self._reply_options: dict[str, Any] = {"slots": slots, "max_bytes": max_bytes}
        self._epoch = -1
        self._opening = threading.Lock()
        self.taken = self.replied = self.failed = self.expired = self.cancelled = self.dropped = self.retried = 0

    # --- taking

    def accept(self, message: Message, taken: list[Any]) -> Request | None:
        """The request of a message that was taken, which it replaces in `taken`; None if it is not to be started."""
        # crash: request.taken
        if self.receiver.epoch != self._epoch:
            self.drop_clients()
        words, at = words_of(message)
        source = self.receiver.source_of(words)
        record = TakenRequest(message, source, at)
        request = Request(self, record)
        taken[0] = request
        self.taken += 1
        self.open.add(record)
        if (
            words[at + NOTE] == record.seq << 8
            and message.attempt == 1
            and not source.reader.gone
            and (not (deadline := words[at + DEADLINE]) or monotonic_ns() < deadline)
        ) or self._should_start(record):
            return request
        return None

    def accept_again(self, request: Request) -> Request | None:
        """A request that an interrupted call has taken; None if it is not to be started."""
        record = record_of(request)
        if record.is_released:
            return None
        self.open.add(record)
        return request if self._should_start(record) else None

    def _should_start(self, record: TakenRequest) -> bool:
        """Whether a request is to be started: its reply is wanted. Else finish it."""
        words, at, attempt = record.words, record.at, record.message.attempt
        note = words[at + NOTE]
        if note >> 8 != record.seq:
            self.finish(record, DROPPED)  # not sent by a client
            self.dropped += 1
        elif note & CANCELLED or record.source.reader.gone:
            self.finish(record)
            self.cancelled += 1
        elif (deadline := words[at + DEADLINE]) and monotonic_ns() >= deadline:
            self.finish(record)
            self.expired += 1
        elif attempt > 1 and record.is_tried_once:
            self.finish(record, DIED)
            self.failed += 1
        else:
            self.retried += attempt > 1
            return True
        return False

    def is_wanted(self, request: Request) -> bool:
        """Whether the reply to a request that has waited for its batch is still wanted. Else finish it."""
        if request.answered:
            return False
        if record_of(request).is_cancelled:
            self.cancelled += 1
        elif request.expired:
            self.expired += 1
        else:
            return True
        self.finish(record_of(request))
        return False

    def is_cancelled(self, record: TakenRequest) -> bool:
        """See `Request.cancelled`."""
        return record.is_cancelled or (not record.is_released and self.receiver.has_left(record.source.reader))

    # --- answering

    def reply(self, record: TakenRequest, value: Any, error: BaseException | str | None = None) -> None:
        """Send a reply and finish its request. With `error`, the reply describes that, and `value` is not used."""
        replies, sent = self.replies_for(record), False
        meta = None if error is None else {FAILED: True}
        patience = 0.0 if isinstance(error, RingFull) else record.remaining  # the reply has waited for room before
        try:
            if replies is not None:
                replies.post(record.seq, value if error is None else describe(error), meta, patience)
                sent = True
        except ClosedError:
            self._check_open(replies)
        except (ResourceError, RingFull):
            if error is None:
                raise
            self.dropped += 1
            self.finish(record, NO_ROOM)
            return
        self.count_and_finish(record, sent, error is not None)

    async def areply(self, record: TakenRequest, value: Any) -> None:
        """`reply` for asyncio."""
        replies, sent = self.replies_for(record), False
        try:
            if replies is not None:
                await replies.apost(record.seq, value, None, record.remaining)
                sent = True
        except ClosedError:
            self._check_open(replies)
        self.count_and_finish(record, sent, False)

    def replies_for(self, record: TakenRequest) -> ReplySender | None:
        """The publisher of the reply to a request; None if the reply is not wanted."""
        if record.is_released:
            raise ReleasedError("this request was answered already, or its server has closed")
        self.receiver.check_open()
        source = record.source
        if source.reader.gone or (record.words[record.at + NOTE] != record.seq << 8 and record.is_cancelled):
            return None
        replies = source.replies
        if replies is None or replies.closed:
            replies = source.replies = self._replies_to(source.reader.uid)
        return replies

    def _replies_to(self, uid: int) -> ReplySender:
        """The publisher of replies to a client, created if there is none."""
        replies = self.replies.get(uid)
        if replies is None:
            with self._opening:
                replies = self.replies.get(uid)
                if replies is None:
                    replies = self._publisher(reply_channel(self.receiver.name, uid), **self._reply_options)
                    # crash: reply.opened
                    self.replies[uid] = replies
                    if self.receiver.closed:  # meanwhile, by a signal handler of this thread
                        replies.close()
        return replies

    def _check_open(self, replies: ReplySender | None) -> None:
        """Inside `except`: raise again unless the publisher was closed because its client has left."""
        if self.receiver.closed or replies is None or not replies.closed:
            raise

    def count_and_finish(self, record: TakenRequest, sent: bool, failed: bool) -> None:
        """Count and finish a request that is answered, or (not `sent`) whose reply is not wanted."""
        # crash: reply.sent
        if not sent:
            self.cancelled += 1
        elif failed:
            self.failed += 1
        else:
            self.replied += 1
        self.finish(record)

    # --- ending

    def finish(self, record: TakenRequest, verdict: int = 0) -> None:
        """Mark a request as done, so that no server gets it again. `verdict` tells its client why it has no reply."""
        if record not in self.open:
            return
        message = record.message
        if verdict:
            store(record.words, record.at + VERDICT, record.seq << 8 | verdict)
            # crash: verdict.stored
        try:
            message.release()
        finally:  # no boundary before it is out of `open`; what was interrupted before it was done is done again
            if message.__class__ is Released:
                self.open.discard(record)

    def forget(self, record: TakenRequest) -> None:
        """A `Request` was dropped without an answer."""
        if self.receiver.closed:
            self.open.discard(record)
            record.give_back()
        elif record in self.open:  # else it was never given out, or was given back
            self.dropped += 1
            self.finish(record, DROPPED)

    def give_back(self, request: Request) -> None:
        """Leave a request to other servers, as if this one had died with it."""
        record = record_of(request)
        if record in self.open:
            record.give_back()
            self.open.discard(record)

    def give_back_open(self) -> None:
        """Leave every request that has not ended here to other servers."""
        while self.open:  # out of it once it is given back: what an exception cuts short is done by the next `close`
            for record in list(self.open):
                record.give_back()
                self.open.discard(record)

    def drop_clients(self) -> None:
        """Close the publishers to clients that have left."""
        if self._epoch != self.receiver.epoch:
            self._epoch = self.receiver.epoch
            self.receiver.forget_sources()
        if not self.replies:
            return
        here = self.receiver.clients()
        self._close_replies([uid for uid in list(self.replies) if here.get(uid, True)])

    def close(self) -> None:
        """Give back what is open, and close every endpoint."""
        self.give_back_open()
        self.receiver.close()
        self.give_back_open()  # a thread that waited may have taken more just before
        self._close_replies(list(self.replies))

    def _close_replies(self, uids: list[int]) -> None:
        for uid in uids:
            replies = self.replies.get(uid)
            if replies is not None:
                replies.close()
                self.replies.pop(uid, None)
