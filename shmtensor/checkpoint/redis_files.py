"""Files in a Redis server, as a file system of fsspec: `RedisFileSystem`, for `redis://`, `rediss://`, `redis+unix://`.

A file `a/b` of a database is these keys, whose values are at most `PART` bytes:

    a/b                 string  b"shmtensor file 1 <bytes> <time in ns> <bytes of a part> <id>", at most 200 bytes
    a/b:<id>:<number>   string  a part: all but the last have the header's number of bytes
    a/                  set     the names in the directory: `b`, or `c/` for a directory; `/` is the root's

    written:    the parts of a new id, which expire after `_EXPIRES` seconds unless they are renewed
    committed:  one transaction makes them stay and writes the header and the names in the directories
    cleaned:    the parts of the id that the header had before are deleted

So a file appears, and is replaced, as a whole. A process that dies before the commit leaves parts that expire; one that
dies after it may leave parts of an old id, which the same transaction has made to expire. If two write one file, the
later commit wins, and each deletes the parts of the one that it found. A reader whose parts are deleted meanwhile gets
an error that is no end of the file, reads the new header when it asks again, and sees another tag.

A directory is there as long as its set has names, as Redis deletes empty sets; its own name may stay in its parent's
set, where listings leave it out.

Texts of errors are of this module: what redis-py or the server says may have names of users in it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import redis
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from .remote import TIMEOUT

PART: Final = 8 << 20
"""Bytes of a part. Redis takes values of up to 512 MiB."""
_LARGEST: Final = 512 << 20
_MOST_PARTS: Final = 1 << 20
"""Of a file: their keys are listed when it is deleted."""
_EXPIRES: Final = 3600
"""Seconds that parts stay for without having been committed or renewed."""
_RENEWED: Final = 600.0
_CONNECT: Final = 10.0
"""Seconds for a connection."""
_AT_ONCE: Final = 1000
"""Commands of a pipeline."""
_LISTED: Final = 1_000_000
"""Most names in a directory."""
_HEADER: Final = re.compile(rb"shmtensor file 1 (\d{1,18}) (\d{1,19}) (\d{1,9}) ([0-9a-f]{32})")
_MOST: Final = 200
_LATE: Final = errno.ETIMEDOUT
"""The error of a server that does not answer; it is sent no further request."""
_OF_FSSPEC: Final = (
    "skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous", "loop",
)  # fmt: skip


class _Header(NamedTuple):
    nbytes: int
    time: int
    part: int
    id: str

    def encode(self) -> bytes:
        return f"shmtensor file 1 {self.nbytes} {self.time} {self.part} {self.id}".encode()

    @property
    def parts(self) -> int:
        return -(-self.nbytes // self.part)


def _parse(path: str, data: bytes) -> _Header:
    found = _HEADER.fullmatch(data)
    header = None if found is None else _Header(int(found[1]), int(found[2]), int(found[3]), found[4].decode())
    if header is None or not 65536 <= header.part <= _LARGEST or header.parts > _MOST_PARTS:
        raise ValueError(f"the value of the key {path!r} is no file of shmtensor's")
    return header


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors of redis-py as OSError, without what it or the server says, which may name users."""
    try:
        yield
        return
    except (AuthenticationError, AuthorizationError):
        raised: Exception = PermissionError(13, "the server refuses the user and password, or that there are none")
    except NoPermissionError:
        raised = PermissionError(13, "the user may not do this: the server's access control lists forbid a command")
    except OutOfMemoryError:
        raised = OSError(errno.ENOMEM, "the server is out of memory (maxmemory)")
    except redis.TimeoutError:
        raised = OSError(_LATE, "no answer in time")
    except redis.BusyLoadingError:
        raised = OSError(errno.EAGAIN, "the server is loading its data")
    except redis.ConnectionError:
        raised = OSError(errno.ECONNRESET, "no connection, or it was lost")
    except ResponseError as error:
        said = str(error)
        if said.startswith("WRONGTYPE"):
            raised = ValueError("a key of this name has a value of another type, and is no file of shmtensor's")
        elif "DB index is out of range" in said:
            raised = ValueError("the server has no database of this number")
        elif said.startswith(("NOAUTH", "WRONGPASS")):
            raised = PermissionError(13, "the server refuses the user and password, or that there are none")
        else:
            raised = OSError(5, f"the server answers with an error: {said.split(' ')[0][:40]}")
    except (RedisError, UnicodeError) as error:
        raised = OSError(5, f"redis-py fails: {type(error).__name__}")
    raise raised


def split_url(url: str) -> tuple[dict[str, Any], str]:
    """The server and the path (`db/name`) that a URL means. Raises `ValueError`, without secrets in its text."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return {}, url.strip("/")
    if "?" in rest or "#" in rest:
        raise ValueError("options are no part of a URL of Redis: fsspec's configuration has them, such as "
                         "FSSPEC_REDIS_SOCKET_TIMEOUT in the environment")  # fmt: skip
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the host and port cannot be read") from None
    server: dict[str, Any] = {}
    path = parts.path.strip("/")
    if scheme == "redis+unix":
        folders = path.split("/")
        at = next((at for at, name in enumerate(folders) if name.endswith(".sock")), None)
        if at is None:
            raise ValueError("a name that ends in .sock is missing: redis+unix:///run/redis.sock/0/name")
        server["unix_socket_path"] = "/" + unquote("/".join(folders[: at + 1]))
        path = "/".join(folders[at + 1 :])
    else:
        server.update({"host": host or "localhost", "port": port or 6379})
        if scheme == "rediss":
            server["ssl"] = True
    if not re.fullmatch(r"\d{1,9}", path.partition("/")[0]):
        raise ValueError("the number of a database is missing after the server: redis://host:6379/0/name")
    if parts.username:
        server["username"] = unquote(parts.username)
    if parts.password:
        server["password"] = unquote(parts.password)
    return server, path


def _watch(pipeline: Any, *keys: str) -> None:
    """Make the transaction fail if one of the keys changes from now on. (redis-py has no types for it.)"""
    pipeline.watch(*keys)


class RedisFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files in the databases of a Redis server. Thread-safe, and safe to use in a forked process.

    A path is `db/name`, such as `0/runs/a`.

    Args:
        host, port, username, password, ssl, unix_socket_path: the server, as the URL has it
        socket_timeout: seconds without a byte until a request has failed
        options: for `redis.Redis`, such as `ssl_ca_certs`

    Raises: methods raise OSError, `PermissionError`, `FileNotFoundError`, and `ValueError` for what is no file.
    """

    protocol = ("redis", "rediss", "redis+unix")
    root_marker = ""
    is_thread_safe = True
    """Read by several threads at once, unlike other file systems that are not asynchronous."""

    def __init__(self, *, socket_timeout: float | str = TIMEOUT, **options: Any) -> None:
        super().__init__(socket_timeout=socket_timeout, **options)
        known = {name: value for name, value in options.items() if name not in _OF_FSSPEC}
        timeout = float(socket_timeout)
        self._options = {
            **known, "socket_timeout": timeout, "socket_connect_timeout": min(timeout, _CONNECT),
            "retry": Retry(NoBackoff(), 0),  # who calls asks again
        }  # fmt: skip
        self._clients: dict[int, redis.Redis] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return split_url(os.fspath(path))[1]

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return split_url(path)[0]

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path, without user and password."""
        options, name = self._options, str(self._strip_protocol(name))
        if "unix_socket_path" in options:
            return f"redis+unix://{options['unix_socket_path']}/{name}"
        host = str(options.get("host", "localhost"))
        host = f"[{host}]" if ":" in host else host
        return f"{'rediss' if options.get('ssl') else 'redis'}://{host}:{options.get('port', 6379)}/{name}"

    def _at(self, path: Any) -> tuple[redis.Redis, str]:
        number, _, name = str(self._strip_protocol(path)).partition("/")
        if not number.isdecimal():
            raise ValueError("the number of a database is missing: 0/name")
        found = self._clients.get(int(number))
        if found is None:
            found = self._clients.setdefault(int(number), redis.Redis(**{**self._options, "db": int(number)}))
        return found, name.strip("/")

    # --- reading

    def _header(self, client: redis.Redis, name: str) -> _Header:
        with _errors():
            data: Any = client.getrange(name, 0, _MOST) if name else b""
        if not data:
            raise FileNotFoundError(2, "there is no such file")
        return _parse(name, data)

    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        """Size, type, time (`mtime`) and tag (`ETag`) of a name."""
        client, name = self._at(path)
        with _errors(), client.pipeline(transaction=False) as pipeline:
            pipeline.getrange(name or "/", 0, _MOST)
            pipeline.scard(f"{name}/")
            header, names = pipeline.execute(raise_on_error=False)
            for found in (header, names) if name else (names,):
                if isinstance(found, Exception):
                    raise found
        return self._entry(str(self._strip_protocol(path)), header if name else b"", names)

    @staticmethod
    def _entry(path: str, header: bytes, names: int) -> dict[str, Any]:
        if header:
            found = _parse(path.partition("/")[2], header)
            return {
                "name": path, "size": found.nbytes, "type": "file", "mtime": found.time / 1e9, "ETag": found.id,
            }  # fmt: skip
        if not names:
            raise FileNotFoundError(2, "there is no such file")
        return {"name": path, "size": 0, "type": "directory"}

    def ls(self, path: Any, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a directory; of a file, itself. Keys that are no files of this module's are left out."""
        own = self.info(path)
        if own["type"] == "file":
            return [own] if detail else [own["name"]]
        client, name = self._at(path)
        base, entries = own["name"], list[dict[str, Any]]()
        with _errors():
            if int(client.scard(f"{name}/")) > _LISTED:
                raise ValueError(f"more than {_LISTED} names are in the directory")
            names = sorted({bytes(each) for each in client.sscan_iter(f"{name}/", count=_AT_ONCE)})
        for at in range(0, len(names), _AT_ONCE):
            some = [each.decode("utf-8", "replace") for each in names[at : at + _AT_ONCE]]
            with _errors(), client.pipeline(transaction=False) as pipeline:
                for each in some:
                    inner = f"{name}/{each}" if name else each
                    if each.endswith("/"):
                        pipeline.scard(inner)
                    else:
                        pipeline.getrange(inner, 0, _MOST)
                answers = pipeline.execute(raise_on_error=False)
            for each, answer in zip(some, answers, strict=True):
                inner = f"{base}/{each.rstrip('/')}"
                is_directory = each.endswith("/")
                with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                    entries.append(self._entry(inner, b"" if is_directory else answer, answer if is_directory else 0))
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file from `start` to `end`. Raises OSError if a part of it is missing."""
        client, name = self._at(path)
        header = self._header(client, name)
        start, end, _step = slice(start, end).indices(header.nbytes)
        wanted = [
            (number, max(start - number * header.part, 0), min(end - number * header.part, header.part))
            for number in range(start // header.part, -(-end // header.part))
        ] if end > start else []  # fmt: skip
        with _errors(), client.pipeline(transaction=False) as pipeline:
            for number, first, last in wanted:
                pipeline.getrange(f"{name}:{header.id}:{number}", first, last - 1)
            found = pipeline.execute()
        for (number, first, last), data in zip(wanted, found, strict=True):
            if len(data) != last - first:
                raise OSError(5, f"part {number} of {header.parts} is missing or too short, or was replaced meanwhile")
        return b"".join(found)

    def _open(self, path: Any, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError("files in Redis are written as a whole: by put_file or pipe_file")
        return _Reading(self, path, mode, block_size or PART, **options)

    # --- writing

    def pipe_file(self, path: Any, value: Any, mode: str = "overwrite", **_: Any) -> None:
        """Write a file of these bytes, as a whole."""
        self._write(path, io.BytesIO(value), len(value), DEFAULT_CALLBACK)

    def put_file(
        self, lpath: Any, rpath: Any, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **_: Any
    ) -> None:
        """Copy a file of this machine, as a whole."""
        if os.path.isdir(lpath):
            return
        with open(lpath, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            callback.set_size(nbytes)
            self._write(rpath, file, nbytes, callback)

    def put_stream(self, reader: Any, path: Any, nbytes: int, progress: Any) -> None:
        """Write a file of the bytes that `reader.read(count)` gives, as a whole. progress: gets counts of bytes."""
        callback = Callback()
        callback.relative_update = progress
        self._write(path, reader, nbytes, callback)

    def _write(self, path: Any, file: Any, nbytes: int, callback: Any) -> None:
        client, name = self._at(path)
        if not name:
            raise IsADirectoryError(21, "it is the root of a database")
        header = _Header(nbytes, time.time_ns(), PART, secrets.token_hex(16))
        keys = [f"{name}:{header.id}:{number}" for number in range(header.parts)]
        written, renewed = 0, time.monotonic()
        try:
            for key in keys:
                data = file.read(min(PART, nbytes - written * PART))
                if len(data) != min(PART, nbytes - written * PART):
                    raise OSError(5, "the file became shorter while it was copied")
                if time.monotonic() - renewed > _RENEWED:
                    self._renew(client, keys[:written])
                    renewed = time.monotonic()
                with _errors():
                    client.set(key, data, ex=_EXPIRES)
                written += 1
                callback.relative_update(len(data))
            self._renew(client, keys)
            with _errors():
                self._commit(client, name, header, keys)
        except BaseException as error:  # the caller's order to stop, too
            if keys and getattr(error, "errno", None) != _LATE:
                with contextlib.suppress(Exception):
                    self._drop(client, name, header, keys[: written + 1])
            raise

    @staticmethod
    def _renew(client: redis.Redis, keys: list[str]) -> None:
        """Begin the time again that parts stay for. Raises OSError if one is missing."""
        for at in range(0, len(keys), _AT_ONCE):
            with _errors(), client.pipeline(transaction=False) as pipeline:
                for key in keys[at : at + _AT_ONCE]:
                    pipeline.expire(key, _EXPIRES)
                if not all(pipeline.execute()):
                    raise OSError(5, "the server has lost parts before the file was complete")

    def _commit(self, client: redis.Redis, name: str, header: _Header, keys: list[str]) -> None:
        """Make the parts stay and the name lead to them, at once."""
        with client.pipeline(transaction=True) as pipeline:
            _watch(pipeline, name, *keys)  # a part that is evicted or expires from here on fails the transaction
            before: Any = pipeline.getrange(name, 0, _MOST)
            try:
                old = _parse(name, before) if before else None
            except ValueError:
                raise ValueError(f"the key {name!r} has a value that is no file of shmtensor's") from None
            if int(pipeline.exists(*keys) if keys else 0) != len(keys):
                raise OSError(5, "the server has lost parts before the file was complete")
            folders, folder = list[tuple[str, str]](), name
            while folder:
                folder, _, last = folder.rpartition("/")
                folders.append((f"{folder}/", last if not _is_folder(name, folder, last) else f"{last}/"))
            for each, _ in folders:  # a transaction carries out the rest if one of its commands fails
                kind: Any = pipeline.type(each)
                if kind not in (b"none", b"set"):
                    raise ValueError(f"the key {each!r} has a value of the type {kind.decode()}, and is no directory")
            pipeline.multi()
            for key in keys:
                pipeline.persist(key)
            pipeline.set(name, header.encode())
            for each, last in folders:
                pipeline.sadd(each, last)
            gone = [f"{name}:{old.id}:{number}" for number in range(old.parts)] if old else []
            for key in gone:
                pipeline.expire(key, _EXPIRES)
            pipeline.execute()
        with contextlib.suppress(RedisError):  # they expire
            for at in range(0, len(gone), _AT_ONCE):
                client.unlink(*gone[at : at + _AT_ONCE])

    @staticmethod
    def _drop(client: redis.Redis, name: str, header: _Header, keys: list[str]) -> None:
        """Delete the parts of a file that was not committed.

        The answer to the commit may have been lost, or the server may come to it later than to this: either of the two
        transactions fails then, as the one sees the name change and the other one the parts.
        """
        with client.pipeline(transaction=True) as pipeline:
            _watch(pipeline, name)
            if pipeline.getrange(name, 0, _MOST) != header.encode():
                pipeline.multi()
                pipeline.unlink(*keys)
                pipeline.execute()

    def rm_file(self, path: Any) -> None:
        """Delete a file."""
        client, name = self._at(path)
        header = self._header(client, name)
        folder, _, last = name.rpartition("/")
        gone = [f"{name}:{header.id}:{number}" for number in range(header.parts)]
        with _errors(), client.pipeline(transaction=True) as pipeline:
            _watch(pipeline, name)
            if pipeline.getrange(name, 0, _MOST) != header.encode():
                raise OSError(errno.EAGAIN, "it was replaced meanwhile")
            pipeline.multi()
            pipeline.delete(name)
            pipeline.srem(f"{folder}/", last)
            for key in gone:
                pipeline.expire(key, _EXPIRES)
            pipeline.execute()
            for at in range(0, len(gone), _AT_ONCE):
                client.unlink(*gone[at : at + _AT_ONCE])

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files, and with `recursive` directories with all that is in them."""
        for each in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            try:
                self.rm_file(each)
            except FileNotFoundError:
                self.rmdir(each)

    def rmdir(self, path: Any) -> None:
        """Take an empty directory's name out of its parent."""
        client, name = self._at(path)
        folder, _, last = name.rpartition("/")
        with _errors(), client.pipeline(transaction=True) as pipeline:
            _watch(pipeline, f"{name}/")
            if pipeline.exists(f"{name}/"):
                raise OSError(errno.ENOTEMPTY, "the directory is not empty")
            pipeline.multi()
            pipeline.srem(f"{folder}/", f"{last}/")
            pipeline.execute()

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        """Directories are there with their first file."""

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Directories are there with their first file."""

    def modified(self, path: Any) -> Any:
        """When a file was written, as a `datetime` in UTC."""
        from datetime import datetime, timezone

        return datetime.fromtimestamp(self.info(path)["mtime"], timezone.utc)


def _is_folder(name: str, folder: str, last: str) -> bool:
    return name != (f"{folder}/{last}" if folder else last)


class _Reading(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is open for reading."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data
