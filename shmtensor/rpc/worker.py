"""A worker process of a pool: one server and one handler, until the pool stops it or ends."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..children import look_last, safe_path
from ..errors import ArgumentError, ArgumentTypeError
from .checks import check_handler
from .server import Server

Handler = Callable[[Any], Any]


def main(
    service: str,
    number: int,
    handler: Handler | str,
    options: dict[str, Any],
    pipe: Connection,
    pool_end: Connection | None,
) -> None:
    """Serve until SIGTERM, or until the pool's end of `pipe` is closed, and finish what was taken.

    Sends None through `pipe` when the server takes requests, or the text of the error if the handler cannot serve.
    `pool_end` is the other end, which a forked worker inherits: it must not stay open here.
    """
    if pool_end is not None:
        pool_end.close()
    sys.path[:] = safe_path(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: the pool decides
    servers: list[Server] = []
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        for server in servers:
            server.stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=_watch_pool, args=(pipe, stop), name="shmtensor pool watch", daemon=True).start()
    try:
        function = load(handler)
    except (ArgumentError, ArgumentTypeError) as error:  # a restarted worker would fail in the same way
        pipe.send(str(error))
        return
    log_to_stderr(number)
    with Server(service, **options) as server:
        servers.append(server)
        if stopped.is_set():
            server.stop()
        pipe.send(None)
        server.run(function)


def log_to_stderr(number: int) -> None:
    """Send the library's log to stderr, unless the handler's module has set up logging."""
    log = logging.getLogger("shmtensor")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s worker {number}: %(message)s"))
        log.addHandler(handler)


def load(handler: Handler | str) -> Handler:
    """Return the function to call: imported if `handler` is a name, an instance if it is a class."""
    found = resolve(handler) if isinstance(handler, str) else handler
    check_handler(found, f"the handler {handler!r}")
    return found() if isinstance(found, type) else found


def check(path: str) -> None:
    """Raise `ArgumentError` unless there is such a module, as far as is known without importing it."""
    module_name, _ = _parts(path)
    look_last(os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ArgumentError(f"handler {path!r}: there is no module {module_name!r} here or on sys.path")


def _parts(path: str) -> tuple[str, str]:
    """Split `module:name`."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"handler {path!r}: name it as module:function")
    return module_name, name


def resolve(path: str) -> Any:
    """Import what `module:name` names. The module may be in the current directory, which is searched last.

    Raises `ArgumentError`.
    """
    module_name, name = _parts(path)
    look_last(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module exists, and imports one that does not
        raise ArgumentError(f"handler {path!r}: there is no module {error.name!r} here or on sys.path") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"handler {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def _watch_pool(pipe: Connection, stop: Callable[[], None]) -> None:
    """Call `stop` when the pool has ended. It never sends anything: its end of the pipe closes when it dies."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        pass
    stop()
