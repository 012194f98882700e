"""A worker process of a pool: one server and one handler, until the pool stops it or ends."""

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
from multiprocessing.connection import Connection
from typing import Any, Final

from ..children import ParentWatch, look_last, safe_path
from ..errors import ArgumentError, ArgumentTypeError
from .batching import Batch
from .board import Counting, Row
from .checks import check_handler, takes_argument, takes_context
from .context import BatchContext, RequestContext
from .request import Request, describe
from .server import Server
from .sidecar import FOREVER

log = logging.getLogger("shmtensor.serve")

Handler = Callable[..., Any]

READY, REFUSED, FAILED = "ready", "refused", "failed"
"""What a worker reports: it takes requests; it could never serve; it could not start, this time."""
UNSTARTED: Final = 1
"""Exit code of a worker that could not start, or whose `teardown` raised."""


@dataclass(frozen=True)
class Job:
    """What a worker does: functions, or their names. Also how long it may take to end, seconds; None: no limit."""

    handler: Handler | str
    setup: Handler | str | None
    teardown: Handler | str | None
    options: dict[str, Any]
    grace: float | None


class _Stop:
    """Whether the worker is to stop, and what is done then: by SIGTERM, or because the pool is dead."""

    def __init__(self) -> None:
        self.is_set = False
        self.server: Server | None = None
        self.interrupts = True
        """Whether a signal ends what runs now: while the worker starts. Afterwards it finishes what it has taken."""

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
    """Serve until SIGTERM, or until the pool's end of `pipe` is closed, and finish what was taken.

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
    threading.Thread(target=_watch_pool, args=(pipe, stop, job.grace), name="shmtensor pool watch", daemon=True).start()
    counting = row.open()
    state: Any = None
    is_set_up = False
    try:
        try:
            if stop.is_set:
                return
            setup, teardown = (None if each is None else _found(each, what) for each, what in _around(job))
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


def _around(job: Job) -> tuple[tuple[Handler | str | None, str], ...]:
    return (job.setup, "setup"), (job.teardown, "teardown")


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


def load(handler: Handler | str) -> Handler:
    """Return the function to call: imported if `handler` is a name, an instance if it is a class."""
    found = resolve(handler) if isinstance(handler, str) else handler
    check_handler(found, f"the handler {handler!r}", 2)
    return found() if isinstance(found, type) else found


def _found(function: Handler | str, what: str) -> Any:
    """A function, imported if it is a name."""
    found = resolve(function, what) if isinstance(function, str) else function
    if not callable(found):
        raise ArgumentTypeError(f"the {what} {function!r} is a {type(found).__name__}, which cannot be called")
    return found


def check(path: str, what: str = "handler") -> None:
    """Raise `ArgumentError` unless there is such a module, as far as is known without importing it."""
    module_name, _ = _parts(path, what)
    look_last(os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ArgumentError(f"{what} {path!r}: there is no module {module_name!r} here or on sys.path")


def _parts(path: str, what: str) -> tuple[str, str]:
    """Split `module:name`."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"{what} {path!r}: name it as module:function")
    return module_name, name


def resolve(path: str, what: str = "handler") -> Any:
    """Import what `module:name` names. The module may be in the current directory, which is searched last.

    Raises `ArgumentError`.
    """
    module_name, name = _parts(path, what)
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
    """Stop when the pool has died, or closes its end of the pipe: it never sends anything. Nobody else would kill this
    process then if it does not end within `grace`."""
    ParentWatch(pipe).wait()
    stop.set()
    if stop.interrupts:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    if grace is not None:
        time.sleep(min(grace, FOREVER))
        os.kill(os.getpid(), signal.SIGKILL)
