"""What a server gets: a request, to be answered once."""

from __future__ import annotations

import contextlib
import time
import traceback
from typing import TYPE_CHECKING, Any

from ..endpoints.local import Local
from ..errors import ClosedError, ReleasedError
from ..memory.words import store
from ..ring.layout import DEADLINE, NOTE, VERDICT
from .notes import CANCELLED, ONCE

if TYPE_CHECKING:
    from ..endpoints.message import Message
    from .answering import Source
    from .server import Server

ROOM_S = 1.0
"""Seconds that a reply waits for its client to let go of others, where it may have no more memory."""
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

    __slots__ = ("_at", "_message", "_server", "_source", "_words", "seq")

    seq: int
    """The client's number of this request."""

    def __init__(self, server: Server, message: Message, source: Source) -> None:
        self._server, self._message, self._source = server, message, source
        self._words, self._at, self.seq = source.words, message._lease.word, message.seq

    def _instead(self) -> str:
        return "pass req.value, copied, and answer it here"

    @property
    def value(self) -> Any:
        """What the client sent: a tensor, an ndarray, or a dict, list or tuple of these, bytes and JSON scalars."""
        message = self._message
        if message._receiver is None:
            raise ReleasedError("this request was answered, or its server closed: take req.value before")
        return message.value

    @property
    def meta(self) -> Any:
        """What the client passed as `meta=`, or None."""
        return self._message.meta

    @property
    def attempt(self) -> int:
        """How often the request was taken, this time included; above 1 after another server died with it."""
        return self._message.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the reply is no longer needed: the client cancelled the request, closed or died."""
        if self._source.feed.gone:
            return True
        note = self._words[self._at + NOTE]
        return bool(note & CANCELLED) if note >> 8 == self.seq else True

    @property
    def expired(self) -> bool:
        """Whether the client's time-out is over."""
        remaining = self.remaining
        return remaining is not None and remaining <= 0

    @property
    def remaining(self) -> float | None:
        """Seconds until the client's time-out, below 0 after it; None if it has none."""
        if self._words[self._at + NOTE] >> 8 != self.seq:
            return 0.0
        deadline = self._words[self._at + DEADLINE]
        return (deadline - time.monotonic_ns()) * 1e-9 if deadline else None

    @property
    def _patience(self) -> float:
        """Seconds that its reply may wait for room."""
        deadline = self._words[self._at + DEADLINE]
        return min(ROOM_S, max(0.0, (deadline - time.monotonic_ns()) * 1e-9)) if deadline else ROOM_S

    @property
    def answered(self) -> bool:
        """Whether it was answered, or given up by its server."""
        return self._message._receiver is None

    @property
    def _once(self) -> bool:
        note = self._words[self._at + NOTE]
        return note >> 8 == self.seq and bool(note & ONCE)

    def reply(self, value: Any) -> None:
        """Answer with a value, which is copied before this returns: as for `Publisher.send`.

        Waits only where `max_bytes` leaves no room beside replies that the client has not let go of: for a second, or
        until the client's time-out.

        Raises `RingFull` if there is no room then, `ArgumentTypeError` or `ResourceError` if the value cannot be sent;
        then the request is still yours to answer. `ReleasedError` if it was answered already.
        """
        self._server._reply(self, value, None)

    async def areply(self, value: Any) -> None:
        """`reply` for asyncio: other tasks run if it has to wait for room.

        If it is cancelled, nothing is sent, and the request is still yours to answer.
        """
        await self._server._areply(self, value)

    def fail(self, error: BaseException | str) -> None:
        """Answer with an error: the client's call raises `RemoteError` with its type's name, text and traceback."""
        self._server._reply(self, describe(error), error)

    def _finish(self, verdict: int = 0) -> None:
        """The request is over for this server: it is done, and nobody else will get it."""
        unfinished, key = self._server._open, id(self)
        if key not in unfinished:
            return
        if verdict:
            store(self._words, self._at + VERDICT, self.seq << 8 | verdict)
            # crash: verdict.stored
        try:
            self._message.release()
        finally:  # no boundary: what an exception cut short before it was done is done again
            if self._message._receiver is None and key in unfinished:
                del unfinished[key]

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self.answered:
            with contextlib.suppress(ClosedError):
                self.fail(error)

    def __del__(self) -> None:
        """Nobody can answer it any more. Runs anywhere: it stores two words, and its client looks at them."""
        message = getattr(self, "_message", None)  # its constructor may have been interrupted
        if message is not None and message._receiver is not None:
            self._server._forget(self)

    def __repr__(self) -> str:
        state = "answered" if self.answered else "cancelled" if self.cancelled else "open"
        return f"<Request seq={self.seq} attempt={self.attempt} {state}>"


def describe(error: BaseException | str) -> dict[str, str]:
    """An error as text."""
    if isinstance(error, str):
        return {"type": "Failed", "text": error[:MOST_TEXT], "traceback": ""}
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text cannot be made: {type(failure).__name__})"
    trace = "".join(traceback.format_exception(kind, error, error.__traceback__)) if error.__traceback__ else ""
    return {"type": name[:MOST_TEXT], "text": text[:MOST_TEXT], "traceback": trace[-MOST_TEXT:]}
