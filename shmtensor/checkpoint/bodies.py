"""The bodies of HTTP and S3 servers' answers: read in pieces that go straight into the memory that is to be filled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

_PIECE: Final = 1 << 20
"""Most bytes of a body that are taken from its connection at once."""


def scatter(data: bytes | memoryview, views: Sequence[memoryview]) -> None:
    """Copy consecutive bytes into views, as far as there are bytes."""
    for view in views:
        part = data[: len(view)]
        view[: len(part)] = part
        data = data[len(part) :]


def between(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The memory from one byte of some views to another."""
    found, at = [], 0
    for view in views:
        found.append(view[max(0, start - at) : max(0, end - at)])
        at += len(view)
    return [view for view in found if len(view)]


class Sink:
    """Memory that the body of one request goes into, in the event loop's thread, until this is closed.

    count:   bytes that are in the memory
    arrived: bytes that have come, also those of a server that ignores ranges, which do not go into the memory
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.count = self.arrived = 0
        self._room = sum(map(len, views))
        self._views = deque(views)
        self._closed = False
        self._lock = threading.Lock()

    def write(self, piece: bytes) -> None:
        """Add the next bytes. Raises `ValueError` if there is no room for them, `CancelledError` once it is closed."""
        with self._lock:
            if self._closed:
                raise asyncio.CancelledError
            if self.count + len(piece) > self._room:
                raise ValueError(f"more than {self._room} bytes came")
            left = memoryview(piece)
            while len(left):
                view = self._views.popleft()
                part = left[: len(view)]
                view[: len(part)] = part
                left = left[len(part) :]
                if len(part) < len(view):
                    self._views.appendleft(view[len(part) :])
            self.count += len(piece)
            self.arrived = self.count

    def close(self) -> None:
        """Write nothing from now on: a request that was given up may still run for a moment."""
        with self._lock:
            self._closed = True
            self._views.clear()


class TooLong(ValueError):
    """A body is longer than may come."""


_Answer = contextlib.AbstractAsyncContextManager[tuple[Callable[[int], Awaitable[bytes]], bool, int]]
"""Of a server: a function that reads some bytes of the body, at most so many; whether it is the range asked for; and
the bytes of the file, -1 if the server does not say them with a range."""


@contextlib.asynccontextmanager
async def http_answer(fs: Any, url: str, start: int, end: int) -> AsyncIterator[Any]:
    """The answer of an HTTP server that is asked for a range, or for all if that is empty."""
    options = dict(fs.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if end > start:
        headers["Range"] = f"bytes={start}-{end - 1}"
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        if answer.status == 206:
            _check_range(answer.headers.get("Content-Range"), start)
        yield answer.content.read, answer.status == 206, _total(answer.headers.get("Content-Range"))


@contextlib.asynccontextmanager
async def s3_answer(fs: Any, key: str, start: int, end: int) -> AsyncIterator[Any]:
    """The answer of an S3 server that is asked for a range."""
    bucket, name, version = fs.split_path(key)
    more = {**fs.req_kw, **({"VersionId": version} if version else {})}
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=name, Range=f"bytes={start}-{end - 1}", **more)
    try:
        _check_range(answer.get("ContentRange"), start)
        is_range = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        yield answer["Body"].read, is_range, _total(answer.get("ContentRange"))
    finally:
        answer["Body"].close()


def _check_range(sent: str | None, start: int) -> None:
    """`OSError` if a server says that it sends another range: parts of tensors have no digest that would tell."""
    if sent is not None and not sent.startswith(f"bytes {start}-"):
        raise OSError(f"the server sends {sent!r:.60} in place of the bytes from {start}")


def _total(sent: str | None) -> int:
    total = (sent or "").rpartition("/")[2]
    return int(total) if total.isdecimal() and len(total) < 20 else -1


async def receive(answer: _Answer, sink: Sink, most: int) -> bytes | None:
    """Read an answer's body into the sink, or return it, if it is not the range asked for; an error beyond `most`."""
    async with answer as (read, is_range, _):
        if is_range:
            while piece := await read(_PIECE):
                sink.write(piece)
            return None
        return await _collect(read, sink, most)


async def receive_small(answer: _Answer, sink: Sink, most: int) -> bytes:
    """The body of an answer to the request for a file's first `most` bytes and one more, which is all of a smaller
    file. The sink counts. Raises `TooLong`, and OSError if less comes than the server says."""
    async with answer as (read, _, total):
        data = await _collect(read, sink, most)
    if len(data) < total:
        raise OSError(f"{len(data)} of {total} bytes came")
    return data


async def _collect(read: Callable[[int], Awaitable[bytes]], sink: Sink, most: int) -> bytes:
    data = bytearray()
    while piece := await read(_PIECE):
        data += piece
        sink.arrived = len(data)
        if len(data) > most:
            raise TooLong(f"more than {most} bytes came")
    return bytes(data)
