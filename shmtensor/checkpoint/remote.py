"""Checkpoints at URLs, through fsspec: `RemotePath`, the part of `pathlib.Path` that loading needs, and `RemoteFile`.

Everything that one call of the library reads has one `_Store`: what the file system says of a name is asked for once,
and small reads share blocks. A request is repeated after errors that may pass; where the file system is asynchronous
(those for S3, GCS and HTTP, for instance) it has a time-out, and ends at once when its thread is told to stop. Other
file systems are called by one thread at a time. What is read is compared with digests by the callers, as of local ones.

Bodies of HTTP and S3 servers are read here, in pieces that go straight into the memory that is to be filled, and with
limits: fsspec would keep whatever comes, as a whole. An error keeps what has come before it, and the rest is asked for.

Credentials come from fsspec's configuration, or from the environment. Error texts show URLs without user, password and
query.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import os
import random
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote

from ..errors import AccessDenied, ArgumentError, CheckpointError, DependencyError, ResourceError
from ..memory.lifecycle import track
from ..options import how_to_install
from .answers import (
    Met,
    Replaced,
    Sink,
    TooLong,
    between,
    changed_at,
    has_no_bucket,
    http_answer,
    is_beyond,
    is_missing,
    linked,
    may_pass,
    quoted,
    receive,
    receive_small,
    s3_answer,
    scatter,
    status_of,
    tag_of,
)
from .threads import Stopped, at_once, check, pause, waiting

ATTEMPTS: Final = 5
"""How often a request is made before it is an error."""
TIMEOUT: Final = 60.0
"""Seconds for one request, besides those that its bytes take at `_SLOW`; of a body that is read in pieces, for as many
bytes as come in this time at `_SLOW`."""
_SLOW: Final = 100_000
"""The least bytes per second of a request that is not too slow."""
_PAUSE: Final = 0.1
"""Seconds before the second attempt; twice as many before each further one, and up to half of it by chance."""
BLOCK: Final = 256 << 10
"""Bytes that a small read, of less than two blocks, fetches: headers and small tensors come several at a time."""
_BLOCKS: Final = 64
"""Blocks of one file that are kept."""
_WHOLE: Final = 8 << 20
"""Most bytes of a request to a file system that only returns them as a whole."""
OBJECT_STORES: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
ONLY_READ: Final = ("http", "https", "data", "zip", "tar", "github", "git")
_WITH_HOST: Final = (*OBJECT_STORES, "http", "https")
_WITH_BUCKET: Final = ("s3", "s3a", "gs", "gcs")
_LISTED: Final = 1_000_000
"""Most names in a directory."""
_PAGE: Final = 64 << 20
"""Most bytes of an HTTP server's listing."""
_SPAN: Final = 1 << 20
"""Most bytes of the request for several short ranges."""
GAP: Final = 8 << 10
"""Bytes between two ranges that are fetched as well, so that one request brings both."""
_URL: Final = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*:)(/+)")
REDIS: Final = ("redis", "rediss", "redis+unix")
"""Schemes of `redis_files.RedisFileSystem`, which is imported when one of them is used."""
_NOT_QUOTED: Final = r"(?!arn:)[^/\s@:]*:(?!:|\d*(?:[/?#\s]|$))(?:\S*|[^@\n]*)@"
"""A user and a password with characters that end them in a URL: what stands there is no number of a port."""
_SECRET: Final = re.compile(rf"(?<=:/)(/?)(?:[^/\s]*@|{_NOT_QUOTED})|(?<=[^\s'\"])\?\S*")
_AMBIGUOUS: Final = re.compile(rf"://(?![^/?#\s]*@){_NOT_QUOTED}")
_REFUSED: Final = (401, 403)  # answers of HTTP

_B = TypeVar("_B")
_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
"""Locks of file systems that are not asynchronous: few of these can be called by several threads at once."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL. (`pathlib` turns two slashes into one.)"""
    found = _URL.match(os.fsdecode(path))
    return found is not None and (len(found[2]) > 1 or not os.path.exists(found[1]))


def register() -> None:
    """Register the URLs of Redis with fsspec, unless another file system is registered for them. Raises
    `ImportError`."""
    from fsspec import register_implementation

    needs = f"URLs of Redis need redis-py: {how_to_install('redis')}"
    for protocol in REDIS:
        with suppress(ValueError):
            register_implementation(protocol, "shmtensor.checkpoint.redis_files.RedisFileSystem", errtxt=needs)


def url_of(url: str, name: str) -> str:
    """The URL of a checkpoint below that of its directory, as it is shown."""
    return f"{without_secrets(url).rstrip('/')}/{name}"


def without_secrets(text: str) -> str:
    """The text with users, passwords and queries removed from the URLs in it."""
    return _SECRET.sub(r"\1", text)


class NoAnswer(OSError):
    """A server did not answer in time."""


def within(nbytes: int, call: Callable[[], _B]) -> _B:
    """Run `call` in a thread and return its result: for calls that may never return. Raises what it raises; `NoAnswer`
    if it takes longer than a request that moves `nbytes` may; and `Stopped`. In these two cases the thread goes on, and
    no other thread waits for it, so `call` must use nothing that may be gone by then."""
    done: Future[_B] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="shmtensor request", daemon=True).start()
    limit = TIMEOUT + nbytes / _SLOW
    end = time.monotonic() + limit
    while not wait([done], min(0.1, max(0.0, end - time.monotonic()))).done:
        check()
        if time.monotonic() >= end:
            raise NoAnswer(f"no answer within {limit:.0f} s")
    return done.result()


class Stat(NamedTuple):
    """What a file system reports about a file: bytes, and when it was written, 0 if that is not known."""

    st_size: int
    st_mtime_ns: int


class RemoteFile:
    """A file read by ranges. Thread-safe.

    It is the file that the first answer is of, by its size and tag: reading raises `Replaced` if another one has come
    under the name. What answers do not say, the file system is asked for at the end (`check`).

    tag: what the file system says to tell this file from another one, None if it says nothing
    """

    def __init__(self, store: _Store, key: str, nbytes: int, tag: object) -> None:
        self.nbytes = nbytes
        self._store, self._key, self._tag = store, key, tag
        self._met: object = None  # the tag of the answers
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Future[bytes | None]] = OrderedDict()
        self._spans: list[tuple[int, bytes]] = []  # of `prefetch`, in order
        self._whole: bytes | None = None  # from a server that does not know ranges

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Bytes at an offset; fewer at the end of the file. Raises OSError."""
        end = min(offset + nbytes, self.nbytes)
        if offset >= end:
            return b""
        kept = self._kept(offset, nbytes)
        if kept is not None:
            return kept
        if end - offset >= 2 * BLOCK:
            return self._fetch(offset, end)
        parts = [self._block(number) for number in range(offset // BLOCK, (end - 1) // BLOCK + 1)]
        start = offset % BLOCK
        return b"".join(parts)[start : start + end - offset]

    def preadv(self, views: Sequence[Any], offset: int, *, alone: bool = False) -> int:
        """Fill views with consecutive bytes; returns how many there were. Raises OSError.

        alone: what lies around them is not read soon, so that no whole block is fetched
        """
        memory = [memoryview(view).cast("B") for view in views]
        total = min(sum(map(len, memory)), self.nbytes - offset)
        if (total < 2 * BLOCK and not alone) or self._kept(offset, total) is not None:
            data = self.pread(total, offset)
            scatter(data, memory)
            return len(data)
        self._fill(between(memory, 0, total), offset)
        return total

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch many short ranges (offset, bytes), several at once and neighbours together, for `pread` of each."""
        spans: list[list[int]] = []
        for offset, nbytes in sorted(each for each in ranges if self._kept(*each) is None):
            end = min(offset + nbytes, self.nbytes)
            if offset >= end:
                continue
            if spans and offset - spans[-1][1] < GAP and end - spans[-1][0] <= _SPAN:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([offset, end])
        found = at_once(lambda span: (span[0], self._fetch(*span)), spans)
        self._spans = sorted([*self._spans, *found])

    def _kept(self, offset: int, nbytes: int) -> bytes | None:
        at = bisect.bisect_right(self._spans, offset, key=lambda span: span[0]) - 1
        if at < 0:
            return None
        start, data = self._spans[at]
        end = min(offset + nbytes, self.nbytes)
        return data[offset - start : end - start] if end <= start + len(data) else None

    def drop(self) -> None:
        """Forget the bytes that are kept for further small reads."""
        with self._lock:
            self._blocks.clear()
        self._spans, self._whole = [], None

    def check(self) -> None:
        """Raise `Replaced` if another file has got the name while it was read, as far as the server or the file system
        reports that."""
        self._store.fs.invalidate_cache()
        now = self._store.ask(self._key)
        if now is None or now.get("size") != self.nbytes or tag_of(now) != self._tag:
            raise self._store.replaced(self._key)

    def _meet(self, nbytes: int, tag: object) -> None:
        if nbytes not in (-1, self.nbytes) or (None not in (tag, self._met) and tag != self._met):
            raise self._store.replaced(self._key)
        self._met = tag or self._met

    def renew(self) -> None:
        """In a forked child: what threads of the parent were fetching never comes."""
        self._lock, self._blocks = threading.Lock(), OrderedDict()

    def close(self) -> None:
        """Do nothing: no descriptor is open, and further reads of the same call reuse the blocks."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, number: int) -> bytes:
        while True:
            mine: Future[bytes | None] = Future()
            try:
                with self._lock:
                    block = self._blocks.setdefault(number, mine)
                    self._blocks.move_to_end(number)
                    if len(self._blocks) > _BLOCKS:
                        self._blocks.popitem(last=False)
                if block is mine:
                    data = self._fetch(number * BLOCK, min((number + 1) * BLOCK, self.nbytes))
                    block.set_result(data)
                    return data
            finally:
                if not mine.done():  # it was not needed, or failed: who waits for it fetches it
                    with self._lock:
                        if self._blocks.get(number) is mine:
                            del self._blocks[number]
                    mine.set_result(None)
            with waiting():
                found = block.result()
            if found is not None:
                return found

    def _fetch(self, start: int, end: int) -> bytes:
        data = bytearray(end - start)
        self._fill([memoryview(data)], start)
        return bytes(data)

    def _fill(self, views: list[memoryview], start: int) -> None:
        whole = self._whole
        if whole is None:
            whole = self._store.fill(self._key, views, start, self.nbytes, self._meet)
        if whole is not None:
            self._whole = whole
            scatter(memoryview(whole)[start:], views)


class _Store:
    """The cached state of a file system, for one call of the library."""

    def __init__(self, fs: Any) -> None:
        from fsspec.asyn import AsyncFileSystem

        self._fs, self._is_inherited = fs, False
        protocol = fs.protocol
        self.protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        self.is_http = "http" in self.protocols
        self._is_s3 = "s3" in self.protocols and hasattr(fs, "_call_s3")
        self._is_async = isinstance(fs, AsyncFileSystem) and "dir" not in self.protocols
        self._lock = threading.Lock()
        self._calls: AbstractContextManager[Any] = nullcontext()
        if not getattr(fs, "is_thread_safe", False):
            self._calls = _locks.setdefault(fs, threading.Lock())
        self._infos: dict[str, dict[str, Any] | None] = {}
        self._listed: dict[str, list[str]] = {}
        self._small: dict[str, bytes | None] = {}
        self._files: dict[str, RemoteFile] = {}
        track(self, _Store.renew)

    @property
    def fs(self) -> Any:
        """The file system. That of a forked child is a new one, as connections and event loop are its parent's."""
        if self._is_inherited:
            self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._is_inherited = False
        return self._fs

    def renew(self) -> None:
        """In a forked child: threads of the parent may have held the locks."""
        self._is_inherited = self._is_async
        self._lock = threading.Lock()
        if not isinstance(self._calls, nullcontext):
            found = _locks.get(self._fs)
            if found is None or found.locked():
                found = _locks[self._fs] = threading.Lock()
            self._calls = found
        for file in self._files.values():
            file.renew()

    def url(self, key: str) -> str:
        """The URL of a key, as it is shown."""
        return without_secrets(str(self.fs.unstrip_protocol(key)))

    def replaced(self, key: str) -> Replaced:
        """The error for a file that has been replaced."""
        return Replaced(f"{self.url(key)} was replaced or deleted while it was read: load again")

    def call(self, key: str, what: str, function: Callable[[], Any]) -> Any:
        """Call the function and return its result; it is called again after errors that may pass. Raises OSError,
        `Stopped`."""
        return _call(self.url(key), what, function)

    def ask_server(self, name: str, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system, with a time-out if it has a coroutine for it."""
        if not self._is_async:
            with waiting(), self._calls:
                return getattr(self.fs, name)(*args, **kwargs)
        return self._run(getattr(self.fs, f"_{name}")(*args, **kwargs), nbytes)

    def _run(self, coroutine: Any, nbytes: int, arrived: Callable[[], int] = lambda: 0) -> Any:
        """Run a coroutine in fsspec's event loop.

        nbytes:  that are moved: they have their share of the time-out
        arrived: called meanwhile; returns how many bytes have come: the time-out begins anew with so many of them
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.fs.loop)
        began, counted, limit = time.monotonic(), 0, TIMEOUT + nbytes / _SLOW
        try:
            while True:
                try:
                    return future.result(min(0.1, max(0.0, began + limit - time.monotonic())))
                except FutureTimeout:  # ours, or the coroutine's own
                    if future.done():
                        return future.result()
                check()
                count, now = arrived(), time.monotonic()
                if count - counted >= TIMEOUT * _SLOW:
                    began, counted = now, count
                elif now >= began + limit:
                    raise OSError(f"{f'{count - counted} bytes' if count else 'no answer'} within {limit:.0f} s")
        finally:
            future.cancel()

    def fill(self, key: str, views: list[memoryview], start: int, size: int, met: Met) -> bytes | None:
        """Fill views with the bytes from `start` of a file of `size` bytes; returns the whole file instead if the
        server ignores ranges. Raises OSError, `Stopped`, `Replaced`.

        What has come before an error is kept; if that was a block or more, the attempts at the rest begin anew.
        """
        done, total = 0, sum(map(len, views))
        end = start + total
        whole: bytes | None = None

        def once() -> None:
            nonlocal done, whole
            sink = Sink(between(views, done, total))
            try:
                whole = self._request(key, start + done, end, size, sink, met)
                if whole is None and sink.count < min(total - done, BLOCK):
                    raise OSError(f"{sink.count} bytes came")
            except Exception as error:
                if is_beyond(error):
                    raise self.replaced(key) from None
                if sink.count < BLOCK or isinstance(error, Stopped) or not may_pass(error):
                    raise
            finally:
                sink.close()  # before the caller goes on, or another request fills the same memory
                done += sink.count

        while whole is None and done < total:
            self.call(key, f"bytes {start + done} to {end} of {size} cannot be read", once)
        return whole

    def _request(self, key: str, start: int, end: int, size: int, sink: Sink, met: Met) -> bytes | None:
        """Ask for a range once. It goes into the sink, but from a server that ignores it the whole file is returned."""
        data: bytes | None
        if self.is_http or self._is_s3:
            answer = (http_answer if self.is_http else s3_answer)(self.fs, key, start, end)
            data = self._run(receive(answer, sink, size, met), 0, lambda: sink.arrived)
        else:
            end = min(end, start + _WHOLE)
            data = self.ask_server("cat_file", key, nbytes=end - start, start=start, end=end)
            if len(data) == end - start:
                sink.write(data)
                return None
        if data is not None and len(data) != size:
            raise OSError(f"{len(data)} bytes came")
        return data

    def read_whole(self, key: str, most: int) -> bytes:
        """All bytes of a small file, which may be replaced at any time: by one request, without its size. Raises
        OSError, and `ValueError` if it has more than `most`."""

        def once() -> Any:
            if not (self.is_http or self._is_s3):
                return self.ask_server("cat_file", key, nbytes=most, start=0, end=most + 1)
            nowhere = Sink([])
            answer = (http_answer if self.is_http else s3_answer)(self.fs, key, 0, most + 1)
            try:
                return self._run(receive_small(answer, nowhere, most), 0, lambda: nowhere.arrived)
            except TooLong:
                return None
            except Exception as error:
                if is_beyond(error):  # an empty file has no ranges
                    return b""
                raise

        if key not in self._small:
            self._small[key] = self.call(key, "it cannot be read", once)
        found = self._small[key]
        if found is None or len(found) > most:
            raise ValueError(f"it has more than {most} bytes")
        return found

    def info(self, key: str) -> dict[str, Any] | None:
        """The properties of a name, from the file system; None if there is no such file."""
        if key not in self._infos:
            self._infos[key] = self.ask(key)
        return self._infos[key]

    def ask(self, key: str) -> dict[str, Any] | None:
        """The same, without the cache."""
        try:
            found: dict[str, Any] = self.call(
                key, "the server does not say whether it is there", lambda: self.ask_server("info", key)
            )
        except FileNotFoundError:
            return None
        if self.is_http and str(found.get("mimetype", "")).startswith("text/html"):
            found = {**found, "type": "directory"}
        return found

    def is_missing(self, parent: str, key: str) -> bool:
        """Whether a listing of the directory shows that the name is not there."""
        if key in self._infos:
            return self._infos[key] is None
        if self.is_http and key.rpartition("/")[2].startswith("."):
            return False  # servers' listings leave out hidden names
        known = self._infos.get(parent)
        if parent in self._listed or (known is not None and known.get("type") == "directory"):
            return key not in self.list(parent)
        return False

    def list(self, key: str) -> list[str]:
        """The keys of what is in a directory."""
        if key not in self._listed:
            what, found = "the directory cannot be listed", dict[str, dict[str, Any]]()
            try:
                if self.is_http:

                    def page() -> Any:
                        nowhere = Sink([])
                        answer = http_answer(self.fs, key + "/", 0, 0)
                        return self._run(receive(answer, nowhere, _PAGE), 0, lambda: nowhere.arrived)

                    found = {name: {} for name in linked(key, self.call(key, what, page))}
                else:
                    for entry in self.call(key, what, lambda: self.ask_server("ls", key, detail=True)):
                        name = str(entry["name"]).rstrip("/")
                        if name.rpartition("/")[0].rstrip("/") == key.rstrip("/") and name != key.rstrip("/"):
                            found[name] = entry
            except (FileNotFoundError, NotADirectoryError):
                pass
            if len(found) > _LISTED:
                raise CheckpointError(f"{self.url(key)}: {len(found)} names are in it: name the checkpoint itself")
            for name, entry in found.items():
                if entry:
                    self._infos.setdefault(name, entry)
            self._listed[key] = list(found)
        return self._listed[key]

    def file(self, key: str, nbytes: int, info: dict[str, Any]) -> RemoteFile:
        """The file of a key, the same for all that read it."""
        with self._lock:
            if key not in self._files:
                self._files[key] = RemoteFile(self, key, nbytes, tag_of(info))
            return self._files[key]


def _call(shown: str, what: str, function: Callable[[], Any]) -> Any:
    failed: Exception = OSError("never asked")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except (Stopped, Replaced):
            raise
        except Exception as error:
            failed = error
        if not may_pass(failed):
            break
        if attempt == ATTEMPTS:
            what += f", tried {ATTEMPTS} times"
        else:
            pause(_PAUSE * 2 ** (attempt - 1) * (1 + random.random() / 2))
    raised = _explained(failed, shown, what)
    del failed, function  # nothing of it, which may name secrets, is left in a traceback
    raise raised


def _explained(error: BaseException, shown: str, what: str) -> Exception:
    """The error to raise: with a text of ours, and without the one that caused it, which may name secrets."""
    refused = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    if has_no_bucket(error.__cause__ or error):  # a typing error, not an empty directory
        return ResourceError(2, f"{shown}: there is no such bucket: make it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        if is_missing(error):
            return FileNotFoundError(2, "there is no such file", shown)
        error = error.__cause__ or error
    for kind in (NotADirectoryError, IsADirectoryError):
        if isinstance(error, kind):
            return kind(error.errno or 20, what, shown)
    text = " ".join(without_secrets(str(error)).split())
    said = f"{shown}: {what}: {type(error).__name__}{f': {text:.300}' if text else ''}"
    if status_of(error.__cause__) == 400:
        said += ": with S3, the credentials have expired, or the bucket is in another region"
    if refused or status_of(error) in _REFUSED:
        return AccessDenied(13, said)
    return ResourceError(getattr(error, "errno", None) or 5, said)


def is_outage(path: object, error: BaseException) -> bool:
    """Whether an error says only that a server failed or refused, and nothing about the files."""
    return isinstance(path, RemotePath) and isinstance(error, ResourceError)


@functools.total_ordering
class RemotePath:
    """A path in a file system of fsspec. As text it is the URL, without credentials.

    It has the methods and attributes of `pathlib.Path` that loading uses; there are no links.
    """

    __slots__ = ("_key", "_store")

    def __init__(self, store: _Store, key: str) -> None:
        self._store, self._key = store, key

    def __str__(self) -> str:
        return self._store.url(self._key)

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._key == other._key

    def __lt__(self, other: RemotePath) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def fs(self) -> Any:
        """The file system."""
        return self._store.fs

    @property
    def key(self) -> str:
        """What the file system calls it."""
        return self._key

    @property
    def protocols(self) -> tuple[str, ...]:
        """The schemes of the file system's URLs."""
        return self._store.protocols

    def ask(self, name: str, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system, with a time-out if it is asynchronous.

        nbytes: that are moved
        """
        return self._store.ask_server(name, *args, nbytes=nbytes, **kwargs)

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """What the function returns; it is called again after errors that may pass. Raises OSError, `ResourceError`.

        what: the text of the error, after the URL
        """
        return self._store.call(self._key, what, function)

    @property
    def _bare(self) -> str:
        """The key without a query, which is of this very file."""
        return (self._key.partition("?")[0] if self._store.is_http else self._key).rstrip("/")

    @property
    def name(self) -> str:
        """The last part."""
        name = self._bare.rpartition("/")[2]
        return unquote(name) if self._store.is_http else name

    @property
    def suffix(self) -> str:
        """The name's last suffix, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The directory that it is in."""
        return RemotePath(self._store, self._bare.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        if self._store.is_http:
            name = quoted(name, "/")
        return RemotePath(self._store, f"{self._bare}/{name}")

    def fresh(self) -> RemotePath:
        """The same path without cached information."""
        self.fs.invalidate_cache()
        return RemotePath(_Store(self.fs), self._key)

    def with_name(self, name: str) -> RemotePath:
        """Another name in the same directory."""
        return self.parent / name

    def _info(self) -> dict[str, Any] | None:
        if self._store.is_missing(self.parent._key, self._key):
            return None
        return self._store.info(self._key)

    def exists(self) -> bool:
        """Whether it is a file or a directory."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether it is a file."""
        found = self._info()
        return found is not None and found.get("type") != "directory"

    def is_dir(self) -> bool:
        """Whether it is a directory, or a prefix of names."""
        found = self._info()
        return found is not None and found.get("type") == "directory"

    def is_symlink(self) -> bool:
        """There are no links."""
        return False

    def resolve(self) -> RemotePath:
        """Itself: there are no links."""
        return self

    def iterdir(self) -> Iterator[RemotePath]:
        """What is in the directory. Raises `FileNotFoundError`, `NotADirectoryError`."""
        found = self._info()
        if found is None:
            raise FileNotFoundError(2, "there is no such directory", str(self))
        if found.get("type") != "directory":
            raise NotADirectoryError(20, "it is a file", str(self))
        return (RemotePath(self._store, key) for key in self._store.list(self._key))

    def stat(self) -> Stat:
        """Its size and time. Raises `FileNotFoundError`, `CheckpointError` if the server does not say its size."""
        found = self._info()
        if found is None:
            raise FileNotFoundError(2, "there is no such file", str(self))
        size = found.get("size")
        if found.get("type") == "directory":
            return Stat(0, changed_at(found))
        if type(size) is not int or size < 0:
            raise CheckpointError(f"{self}: the server does not say how many bytes it has, which are read by ranges")
        return Stat(size, changed_at(found))

    def read_whole(self, most: int) -> bytes:
        """All bytes of a small file, by one request. Raises OSError, and `ValueError` if it has more than `most`."""
        if self._store.is_missing(self.parent._key, self._key):
            raise FileNotFoundError(2, "there is no such file", str(self))
        return self._store.read_whole(self._key, most)

    def open_input(self) -> RemoteFile:
        """Open it for reading by position. Raises OSError."""
        return self._store.file(self._key, self.stat().st_size, self._info() or {})


def check_host(url: str) -> None:
    """Raise `ArgumentError` if a URL that begins with a bucket or host has none, as `s3:///bucket/run`, or if an empty
    name follows the bucket, as in `s3://bucket//run`: the library for S3 writes to both, and finds nothing there. And
    if a password has characters that end it: libraries would take its beginning for a port, and say so in errors."""
    protocol, _, rest = url.partition("://")
    if _AMBIGUOUS.search(url):
        raise ArgumentError(
            f"{without_secrets(url)!r} has a user or password with one of the characters /?# or a space: "
            "percent-encode these, / as %2F"
        )
    if protocol in _WITH_HOST and (not rest or rest.startswith("/")):
        raise ArgumentError(f"{without_secrets(url)!r} names no bucket or host: it comes after two slashes")
    if protocol in OBJECT_STORES and rest.partition("/")[2].startswith("/"):
        raise ArgumentError(
            f"{without_secrets(url)!r} has two slashes after the bucket: nothing is found there, pass one"
        )
    if protocol in _WITH_BUCKET and "@" in rest.partition("/")[0]:  # what S3's library says of such a bucket names them
        raise ArgumentError(
            f"{without_secrets(url)!r}: a URL of {protocol} has a bucket and no credentials: set these in the "
            "environment or in fsspec's configuration"
        )


def open_url(path: str | os.PathLike[str]) -> RemotePath | str:
    """The path of a URL; a `str` if it is a file of this machine. Raises `ArgumentError`, `DependencyError`."""
    url = os.fsdecode(path)
    match = _URL.match(url)
    if match is not None and not isinstance(path, str):  # `pathlib` has merged the slashes
        local = match[1] in ("file:", "local:")
        url = f"{match[1]}{'///' if local else '//'}{url[match.end() :]}"
    check_host(url)
    shown = without_secrets(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise DependencyError(
            f"{shown}: checkpoints at URLs are read by fsspec: {how_to_install('remote')}", name="fsspec"
        ) from None
    register()
    raised: Exception | None = None

    def opened() -> Any:  # of a chain, such as zip://...::https://..., it reads the archive
        nonlocal raised
        try:
            return url_to_fs(url)
        except ImportError as error:
            raised = DependencyError(f"{shown}: {error}", name=error.name)
        except ValueError as error:
            raised = ArgumentError(f"{shown}: {without_secrets(str(error))}")
        return None, ""

    fs, key = _call(shown, "it cannot be opened", opened)
    if raised is not None:
        raise raised
    if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        return str(key)
    fs.invalidate_cache()  # what was listed before: another process may have saved since
    store = _Store(fs)
    if store.is_http:  # names are quoted as those in listings are
        base, mark, query = key.partition("?")
        head, slash, name = base.rstrip("/").rpartition("/")
        return RemotePath(store, f"{head}{slash}{quoted(unquote(name))}{mark}{query}")
    return RemotePath(store, key.rstrip("/"))
