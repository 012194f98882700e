"""A worker process of a pool: one server and one handler, until the pool stops it or ends.

Its counters lie in memory that the pool reads also while a worker is busy, stuck or dead.

A file in memory without a name, whose descriptor a worker inherits: nothing of it is left after any death. Each process
of a worker has a row of 512 bytes, which it alone writes while it lives:

    0    busy      CLOCK_MONOTONIC, ns: when the request that it works on was begun; 0: none
    8    handled   requests that were answered
    16   errors    of these, with an error
    24   failed    CLOCK_MONOTONIC, ns: when the last error was noted
    32   version   of the error's text: odd while it is written
    40   length    of the text, bytes
    64   text      UTF-8, cut to 448 bytes
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from time import monotonic_ns
from typing import Any, Final

from ..children import ParentWatch, look_last, safe_path
from ..errors import ArgumentError, ArgumentTypeError
from ..memory import shortage
from ..memory.descriptors import OpenFile
from ..memory.segment import Mapping
from ..memory.words import store
from .batching import Batch
from .endpoints import FOREVER
from .request import Request, describe
from .server import Server, check_handler, check_plain, takes_argument, takes_context

_BUSY, _HANDLED, _ERRORS, _FAILED, _VERSION, _LENGTH, _TEXT = 0, 1, 2, 3, 4, 5, 8
_ROW: Final = 512
_WORDS: Final = _ROW // 8
_MOST_TEXT: Final = _ROW - 8 * _TEXT
_TRIES: Final = 100


@dataclass(frozen=True)
class Counts:
    """A row, as it was read. `busy_ns` and `failed_ns` are on CLOCK_MONOTONIC; 0: not busy, no error."""

    busy_ns: int = 0
    handled: int = 0
    errors: int = 0
    failed_ns: int = 0
    error: str = ""


class Row:
    """A row of the board, passed to the process that writes it."""

    def __init__(self, file: OpenFile, index: int) -> None:
        self._file, self.index = file, index

    def open(self) -> Counting:
        """In the process that writes it."""
        mapping = Mapping(self._file.fd, 0, os.fstat(self._file.fd).st_size, writable=True)
        self._file.close()
        return Counting(mapping, self.index)

    def __reduce__(self) -> Any:
        return _row, (reduction.DupFd(self._file.fd), self.index)


def _row(descriptor: Any, index: int) -> Row:
    file = OpenFile()
    file.open(int, descriptor.detach())
    return Row(file, index)


class Counting:
    """A row, as its process writes it."""

    def __init__(self, mapping: Mapping, index: int) -> None:
        at = index * _WORDS
        self._words = mapping.words[at : at + _WORDS]
        self._text = mapping.view[8 * (at + _TEXT) : _ROW * (index + 1)]
        self._handled = self._errors = 0

    def begin(self) -> None:
        """Note that a request is begun."""
        store(self._words, _BUSY, monotonic_ns())

    def end(self, count: int, error: str | None) -> None:
        """Note that `count` requests were answered, with an error if there is one."""
        words = self._words
        self._handled += count
        store(words, _HANDLED, self._handled)
        if error is not None:
            self._errors += count
            store(words, _ERRORS, self._errors)
            self._note(error)
        store(words, _BUSY, 0)

    def _note(self, error: str) -> None:
        words, data = self._words, error.encode(errors="replace")[:_MOST_TEXT]
        store(words, _VERSION, words[_VERSION] + 1)
        self._text[: len(data)] = data
        store(words, _LENGTH, len(data))
        store(words, _FAILED, monotonic_ns())
        store(words, _VERSION, words[_VERSION] + 1)


class Board:
    """The rows, as the pool sees them."""

    def __init__(self, rows: int) -> None:
        self._file = OpenFile()
        try:
            self._file.open(os.memfd_create, "shmtensor.pool", os.MFD_CLOEXEC)
            os.posix_fallocate(self._file.fd, 0, rows * _ROW)
        except OSError as error:
            self._file.close()
            raise shortage.explain(error, "cannot make the memory of a pool's counters") from None
        self._mapping: Mapping | None = Mapping(self._file.fd, 0, rows * _ROW, writable=True)
        self._free = list(range(rows))

    def take(self) -> Row:
        """Take a row that no process uses, cleared."""
        index = self._free.pop(0)
        if self._mapping is not None:
            for at in range(index * _WORDS, index * _WORDS + _TEXT):
                store(self._mapping.words, at, 0)
        return Row(self._file, index)

    def give_back(self, row: Row) -> None:
        """Return a row whose process has ended."""
        self._free.append(row.index)

    def read(self, row: Row) -> Counts:
        """What the row's process has written so far."""
        if self._mapping is None:
            return Counts()
        at, words = row.index * _WORDS, self._mapping.words
        text = b""
        for _ in range(_TRIES):  # else the process is stopped, or died, in the midst of writing it
            version = words[at + _VERSION]
            start = 8 * (at + _TEXT)
            text = bytes(self._mapping.view[start : start + min(words[at + _LENGTH], _MOST_TEXT)])
            if not version & 1 and words[at + _VERSION] == version:
                break
        error = text.decode(errors="ignore")
        return Counts(words[at + _BUSY], words[at + _HANDLED], words[at + _ERRORS], words[at + _FAILED], error)

    def close(self) -> None:
        """Give the memory back."""
        self._mapping = None
        self._file.close()


class RequestContext:
    """The second argument of a `WorkerPool` handler that takes two: the properties of the request besides its value.

    Valid until the handler returns. With `max_batch` the handler gets a `BatchContext` instead.

    >>> import shmtensor
    >>> def predict(value, context: shmtensor.RequestContext):
    ...     for layer in context.state:
    ...         if context.cancelled:
    ...             return None  # nobody waits for it
    ...         value = layer(value)
    ...     return value
    """

    __slots__ = ("_request", "state", "worker")

    state: Any
    """What `setup` returned in this worker; None without `setup`."""
    worker: int
    """Index of this worker in its pool, from 0: a device's number, for instance."""

    def __init__(self, request: Request, state: Any, worker: int) -> None:
        self._request, self.state, self.worker = request, state, worker

    @property
    def meta(self) -> Any:
        """What the client passed as `meta=`, or None."""
        return self._request.meta

    @property
    def remaining(self) -> float | None:
        """Seconds until the client's time-out, below 0 after it; None if it has none."""
        return self._request.remaining

    @property
    def cancelled(self) -> bool:
        """Whether the reply is no longer needed: the client cancelled the request or gave it up at its time-out, closed
        or died. Cheap to ask."""
        return self._request.cancelled

    @property
    def attempt(self) -> int:
        """How often the request was taken, this time included; above 1 after another worker died with it
        or gave it back."""
        return self._request.attempt

    def __repr__(self) -> str:
        return f"<RequestContext of {self._request!r} worker={self.worker}>"


class BatchContext:
    """As `RequestContext`, for a handler of batches: each of its tuples has one item for each request.

    The items are in the order of the requests along the first dimension of the value.

    >>> import shmtensor
    >>> def predict(values, context: shmtensor.BatchContext):
    ...     if all(context.cancelled):
    ...         return values
    ...     return context.state(values)
    """

    __slots__ = ("_batch", "state", "worker")

    state: Any
    """What `setup` returned in this worker; None without `setup`."""
    worker: int
    """Index of this worker in its pool, from 0."""

    def __init__(self, batch: Batch, state: Any, worker: int) -> None:
        self._batch, self.state, self.worker = batch, state, worker

    @property
    def meta(self) -> tuple[Any, ...]:
        """What the clients passed as `meta=`, or None."""
        return tuple(request.meta for request in self._batch.requests)

    @property
    def remaining(self) -> tuple[float | None, ...]:
        """Seconds until the clients' time-outs, below 0 after them; None if there is none."""
        return tuple(request.remaining for request in self._batch.requests)

    @property
    def cancelled(self) -> tuple[bool, ...]:
        """Whether the replies are no longer needed, each as in `RequestContext`."""
        return tuple(request.cancelled for request in self._batch.requests)

    @property
    def attempt(self) -> tuple[int, ...]:
        """How often the requests were taken. One that is above 1 is in a batch of its own."""
        return tuple(request.attempt for request in self._batch.requests)

    def __len__(self) -> int:
        return len(self._batch)

    def __repr__(self) -> str:
        return f"<BatchContext of {len(self)} requests worker={self.worker}>"


log = logging.getLogger("shmtensor.serve")

Handler = Callable[..., Any]

READY, REFUSED, FAILED = "ready", "refused", "failed"
"""Reports of a worker: it takes requests; it can never serve; it could not start this time."""
STOP: Final = b"stop"
"""The order of the pool to finish what was taken, and end."""
UNSTARTED: Final = 1
"""Exit code of a worker that could not start, or whose `teardown` raised."""


@dataclass(frozen=True)
class Job:
    """The work of a worker: functions, or their names. Also how many seconds it may take to end; None: no limit."""

    handler: Handler | str
    setup: Handler | str | None
    teardown: Handler | str | None
    options: dict[str, Any]
    grace: float | None


class _Stop:
    """Whether the worker should stop, on SIGTERM or because the pool says so or is dead, and the actions on
    stopping."""

    def __init__(self) -> None:
        self.is_set = False
        self.server: Server | None = None
        self.interrupts = True
        """Whether a signal interrupts the running code, as while the worker starts. Afterwards it finishes what it has
        taken."""

    def set(self) -> None:
        """From any thread."""
        self.is_set = True
        if self.server is not None:
            self.server.stop()

    def on_signal(self, *_: object) -> None:
        """In the main thread."""
        self.set()
        if self.interrupts:
            self.interrupts = False  # once: what it interrupts may clean up
            raise SystemExit(0)


def main(service: str, number: int, job: Job, pipe: Connection, row: Row, pool_ends: list[Connection]) -> None:
    """Serve until SIGTERM, until the pool sends `STOP` or until it ends, and finish what was taken.

    Reports through `pipe` when the server takes requests, or why it cannot, with the text of the error and its
    traceback. `pool_ends` are the pool's ends of such pipes, which a forked worker inherits: they must not stay open
    here.
    """
    for end in pool_ends:
        end.close()
    sys.path[:] = safe_path(sys.path)
    for each in (signal.SIGINT, signal.SIGHUP):  # they reach every process of a terminal: the pool decides
        signal.signal(each, signal.SIG_IGN)
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # inherited, if the pool's process blocks it
    threading.Thread(target=_watch_pool, args=(pipe, stop, job.grace), name="shmtensor pool watch", daemon=True).start()
    counting = row.open()
    state: Any = None
    is_set_up = False
    try:
        try:
            if stop.is_set:
                return
            around = (job.setup, "setup"), (job.teardown, "teardown")
            setup, teardown = (None if each is None else _found(each, what) for each, what in around)
            check_plain(setup, f"the setup {job.setup!r}", "setup(...)")
            check_plain(teardown, f"the teardown {job.teardown!r}", "teardown(...)")
            handler = _found(job.handler, "handler")
            check_handler(handler, f"the handler {job.handler!r}", 2)
        except (ArgumentError, ArgumentTypeError) as error:  # a restarted worker would fail in the same way
            _report(pipe, REFUSED, str(error), "")
            return
        if setup is not None:
            state = setup(number) if takes_argument(setup) else setup()
        is_set_up = True
        if isinstance(handler, type):
            handler = handler()
        log_to_stderr(number)
        signal.signal(signal.SIGTERM, stop.on_signal)  # what was imported, or `setup`, may have another one
        with Server(service, **job.options) as server:
            stop.server, stop.interrupts = server, False
            if stop.is_set:
                server.stop()
            _report(pipe, READY, "", "")
            server.run_each(_Answering(server, handler, state, number, counting))
    except BaseException as error:
        if stop.server is not None:
            raise
        if not stop.is_set:
            text = describe(error)
            _report(pipe, FAILED, f"{text['type']}: {text['text']}", text["traceback"])
            raise SystemExit(UNSTARTED) from None
    finally:
        stop.interrupts = False
        if is_set_up and teardown is not None:
            _tear_down(teardown, state, number)


def _tear_down(teardown: Handler, state: Any, number: int) -> None:
    try:
        teardown(state) if takes_argument(teardown) else teardown()
    except Exception:
        log.exception("worker %d: teardown raised", number)
        raise SystemExit(UNSTARTED) from None


def _report(pipe: Connection, kind: str, text: str, trace: str) -> None:
    with contextlib.suppress(OSError):  # the pool has died, which another thread notices
        pipe.send((kind, text, trace))


class _Answering:
    """Answers requests with the handler, and counts them."""

    def __init__(self, server: Server, handler: Handler, state: Any, number: int, counting: Counting) -> None:
        self._server, self._handler, self._state, self._number = server, handler, state, number
        self._takes_context, self._counting = takes_context(handler), counting

    def __call__(self, request: Request | Batch) -> None:
        counting, handler = self._counting, self._handler
        counting.begin()
        count = 1 if isinstance(request, Request) else len(request)
        if self._takes_context:
            context = self._context(request)
            error = self._server.answer(request, lambda value: handler(value, context))
        else:
            error = self._server.answer(request, handler)
        counting.end(count, error)

    def _context(self, request: Request | Batch) -> RequestContext | BatchContext:
        kind: Any = RequestContext if isinstance(request, Request) else BatchContext
        context: RequestContext | BatchContext = kind(request, self._state, self._number)
        return context


def log_to_stderr(number: int) -> None:
    """Send the library's log to stderr, unless the handler's module has set up logging."""
    log = logging.getLogger("shmtensor")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s worker {number}: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # else it is logged there
        log.addHandler(handler)


def _found(function: Handler | str, what: str) -> Any:
    """A function, imported if it is a name."""
    found = resolve(function, what) if isinstance(function, str) else function
    if not callable(found):
        raise ArgumentTypeError(f"the {what} {function!r} is a {type(found).__name__}, which cannot be called")
    return found


def check(path: str, what: str = "handler") -> None:
    """Raise `ArgumentError` unless there is such a module, as far as is known without importing it."""
    module_name, _ = split_path(path, what)
    look_last(os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ArgumentError(f"{what} {path!r}: there is no module {module_name!r} here or on sys.path")


def split_path(path: str, what: str) -> tuple[str, str]:
    """Split `module:name`. Raises `ArgumentError` for other texts."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"{what} {path!r}: name it as module:function")
    return module_name, name


def resolve(path: str, what: str = "handler") -> Any:
    """Import what `module:name` names. The module may be in the current directory, which is searched last.

    Raises `ArgumentError`.
    """
    module_name, name = split_path(path, what)
    look_last(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module exists, and imports one that does not
        raise ArgumentError(f"{what} {path!r}: there is no module {error.name!r} here or on sys.path") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{what} {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def _watch_pool(pipe: Connection, stop: _Stop, grace: float | None) -> None:
    """Stop when the pool says so, or has died. A pool that has died cannot kill a worker that does not end within
    `grace`, so this process kills itself then."""
    watch = ParentWatch(pipe)
    watch.wait()
    stop.set()
    if stop.interrupts:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    with contextlib.suppress(EOFError, OSError):  # the pool has died
        while pipe.poll():  # it says so, perhaps again, and lives
            pipe.recv_bytes()
            watch.wait()
    if grace is not None:
        time.sleep(min(grace, FOREVER))
        os.kill(os.getpid(), signal.SIGKILL)
