"""Answers of servers: file properties, errors, bodies (read in pieces straight into the memory that is to be filled),
and the listings of HTTP servers, which are pages of links."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urljoin

from ..errors import CheckpointError

_FINAL: Final = (PermissionError, IsADirectoryError, NotADirectoryError, TypeError, ValueError, NotImplementedError)
"""Errors that another attempt does not mend."""
_NOT_FOUND: Final = (FileNotFoundError, KeyError)
_GONE: Final = (404, 410)
_TIMES: Final = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "modified", "created")
_TAGS: Final = ("ETag", "etag", "generation", "md5Hash", "Last-Modified", "mtime", "LastModified")


class Replaced(CheckpointError):
    """Another file has replaced the one at a path."""


def tag_of(info: Mapping[str, Any]) -> object:
    """A tag that distinguishes a file from another one under its name, from the properties that a file system or server
    reports; None if it reports none."""
    found = [(name, str(info[name])) for name in _TAGS if info.get(name)]
    return found[0] if found else None


def _as_ns(found: Any) -> int:
    """A time in ns. Raises `ValueError`, `OverflowError`."""
    if isinstance(found, str):
        try:
            found = parsedate_to_datetime(found)
        except ValueError:
            found = datetime.fromisoformat(found)
    if not isinstance(found, (datetime, int, float)):
        raise ValueError("no time")
    return int((found.timestamp() if isinstance(found, datetime) else found) * 1e9)


def changed_at(info: dict[str, Any]) -> int:
    """When a file was written, in ns; 0 if the file system does not say."""
    for name in _TIMES:
        with contextlib.suppress(ValueError, OverflowError):  # what a server says may be no time, or none that there is
            return _as_ns(info.get(name))
    return 0


def status_of(error: BaseException | None) -> int:
    """The status of an HTTP answer that an error stands for; 0 if there is none."""
    answer = getattr(error, "response", None)
    found = [getattr(error, "status" if hasattr(error, "status") else "code", None)]
    if isinstance(answer, dict):  # botocore's
        found.append(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = next((each for each in found if isinstance(each, int) and each >= 400), 0)
    if not status and type(error) is OSError and str(error).startswith("Forbidden"):  # gcsfs
        return 403
    return status


def is_beyond(error: BaseException) -> bool:
    """Whether a server says that the file ends before the range that it was asked for."""
    return 416 in (status_of(error), status_of(error.__cause__))


def has_no_bucket(error: BaseException) -> bool:
    """Whether S3 says that the bucket does not exist. (Other stores answer as for a missing file.)"""
    return _code_of(error) == "NoSuchBucket"


def _code_of(error: BaseException | None) -> object:
    """The code of an error of S3; None if it is another kind of error."""
    answer = getattr(error, "response", None)
    return answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None


def _has_no_upload(error: BaseException) -> bool:
    """Whether S3 says that there is no such multipart upload. Its client aborts one to whose last request no answer
    came, and which is complete; or somebody else has ended it."""
    return _code_of(error.__cause__ or error) == "NoSuchUpload"


def is_missing(error: FileNotFoundError) -> bool:
    """Whether a server says that there is no such file. fsspec's for HTTP raises this for whatever the server says, and
    for URLs that cannot be asked for."""
    cause = error.__cause__
    gone = cause is None or isinstance(cause, _NOT_FOUND) or status_of(cause) in _GONE
    return gone and not _has_no_upload(error)


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    cause = error.__cause__
    status = status_of(error)
    if _has_no_upload(error):  # another one may be complete
        return True
    if not status and type(error) is OSError:  # s3fs's for what is no file's matter
        status = status_of(cause)
    if status:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, FileNotFoundError):  # fsspec's for HTTP hides what the server said, or that there is none
        return cause is not None and not isinstance(cause, _NOT_FOUND) and may_pass(cause)
    return not isinstance(error, (*_FINAL, ImportError)) and "Credentials" not in type(error).__name__


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
    """A body is longer than the limit."""


class Answer(NamedTuple):
    """The answer of a server.

    read:     reads some bytes of the body, at most so many
    is_range: whether it is the range asked for
    nbytes:   of the file; -1 if the server does not say them with a range
    tag:      what tells the file from another one under its name; None if the server does not say
    """

    read: Callable[[int], Awaitable[bytes]]
    is_range: bool
    nbytes: int
    tag: object


_Coming = contextlib.AbstractAsyncContextManager[Answer]
Met = Callable[[int, object], object]
"""Called with the bytes and the tag of the file that an answer is of. Raises if it is another one than before."""


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
        total = _total(answer.headers.get("Content-Range"))
        yield Answer(answer.content.read, answer.status == 206, total, tag_of(answer.headers))


@contextlib.asynccontextmanager
async def s3_answer(fs: Any, key: str, start: int, end: int) -> AsyncIterator[Any]:
    """The answer of an S3 server that is asked for a range."""
    bucket, name, version = fs.split_path(key)
    more = {**fs.req_kw, **({"VersionId": version} if version else {})}
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=name, Range=f"bytes={start}-{end - 1}", **more)
    try:
        _check_range(answer.get("ContentRange"), start)
        is_range = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        yield Answer(answer["Body"].read, is_range, _total(answer.get("ContentRange")), tag_of(answer))
    finally:
        answer["Body"].close()


def _check_range(sent: str | None, start: int) -> None:
    """Raise `OSError` if a server says that it sends another range: parts of tensors have no digest that would show
    that."""
    if sent is not None and not sent.startswith(f"bytes {start}-"):
        raise OSError(f"the server sends {sent!r:.60} in place of the bytes from {start}")


def _total(sent: str | None) -> int:
    total = (sent or "").rpartition("/")[2]
    return int(total) if total.isdecimal() and len(total) < 20 else -1


async def receive(coming: _Coming, sink: Sink, most: int, met: Met = lambda *_: None) -> bytes | None:
    """Read an answer's body into the sink, or return it, if it is not the range asked for; an error beyond `most`."""
    async with coming as answer:
        met(answer.nbytes, answer.tag)
        if answer.is_range:
            while piece := await answer.read(_PIECE):
                sink.write(piece)
            return None
        return await _collect(answer.read, sink, most)


async def receive_small(coming: _Coming, sink: Sink, most: int) -> bytes:
    """The body of an answer to the request for a file's first `most` bytes and one more, which is all of a smaller
    file. The sink counts. Raises `TooLong`, and OSError if less comes than the server says."""
    async with coming as answer:
        data = await _collect(answer.read, sink, most)
    if len(data) < answer.nbytes:
        raise OSError(f"{len(data)} of {answer.nbytes} bytes came")
    return data


async def _collect(read: Callable[[int], Awaitable[bytes]], sink: Sink, most: int) -> bytes:
    data = bytearray()
    while piece := await read(_PIECE):
        data += piece
        sink.arrived = len(data)
        if len(data) > most:
            raise TooLong(f"more than {most} bytes came")
    return bytes(data)


_PLAIN: Final = " =+,@!$&'()*;:~"
"""Characters of names that URLs have as they are."""


def quoted(name: str, also: str = "") -> str:
    """A name as URLs have it. also: further characters that stay, such as the slash between names"""
    return quote(name, safe=_PLAIN + also)


_LINK: Final = re.compile(r"<a\s([^<>]{1,8192})", re.IGNORECASE)
_HREF: Final = re.compile(r"""(?:^|[\s"'])href\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""", re.IGNORECASE)
"""Attributes of a link; html.parser takes minutes for some pages, and fails for others."""


def linked(key: str, page: bytes) -> list[str]:
    """The keys of the files and directories that a page of links names as lying in it."""
    keys = dict[str, None]()
    base = key.rstrip("/") + "/"
    bare = base.partition("://")[2].rpartition("@")[2]
    for tag in _LINK.finditer(page.decode("utf-8", "replace")):
        href = _HREF.search(tag[1])
        link = html.unescape("".join(filter(None, href.groups()))) if href is not None else ""
        if not link:
            continue
        try:
            target = urljoin(f"http://{bare}", link).partition("#")[0].partition("?")[0].partition("://")[2]
        except ValueError:
            continue
        name = target.removeprefix(bare).removesuffix("/") if target.startswith(bare) else ""
        if name and "/" not in name:
            keys[base + quoted(unquote(name))] = None
    return list(keys)
