"""What a server gets: a request, to be answered once."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any

from ..endpoints.base import Local
from ..errors import ClosedError, ReleasedError

if TYPE_CHECKING:
    from .taken import TakenRequest, TakenRequests

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
        """How often the request was taken, this time included; above 1 after another server died with it."""
        return self._record.message.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the reply is no longer needed: the client cancelled the request, closed or died."""
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
        until the client's time-out.

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
        """It can no longer be answered. May run in any thread: stores two words, which its client checks."""
        record = getattr(self, "_record", None)  # its constructor may have been interrupted
        if record is not None and not record.is_released:
            self._taken.forget(record)

    def __repr__(self) -> str:
        state = "answered" if self.answered else "cancelled" if self.cancelled else "open"
        return f"<Request seq={self.seq} attempt={self.attempt} {state}>"


def record_of(request: Request) -> TakenRequest:
    """What the server knows of a request."""
    return request._record


def describe(error: BaseException | str) -> dict[str, str]:
    """An error as the value of an error reply."""
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
