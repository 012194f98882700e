"""A worker process of a pool: one server, one handler, until it is told to stop or its pool is gone."""

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
    told: Connection,
    ours: Connection | None,
) -> None:
    """Serve until SIGTERM, or until the pool's end of `told` is closed, and finish what was taken.

    `ours` is the pool's own end, which a forked worker inherits: it must not keep that open.
    """
    if ours is not None:
        ours.close()
    sys.path[:] = safe_path(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: the pool says what to do
    stopping: list[Server] = []
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        for server in stopping:
            server.stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=_outlive_nobody, args=(told, stop), name="shmtensor pool watch", daemon=True).start()
    try:
        function = load(handler)
    except (ArgumentError, ArgumentTypeError) as error:  # another try would end alike
        told.send(str(error))
        return
    log_to_stderr(number)
    with Server(service, **options) as server:
        stopping.append(server)
        if stopped.is_set():
            server.stop()
        told.send(None)
        server.run(function)


def log_to_stderr(number: int) -> None:
    """What the library logs in this worker goes to stderr, unless the handler's module has set up logging."""
    log = logging.getLogger("shmtensor")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s worker {number}: %(message)s"))
        log.addHandler(handler)


def load(handler: Handler | str) -> Handler:
    """The function itself: of its name, or of a class, of which one is made here."""
    found = resolve(handler) if isinstance(handler, str) else handler
    check_handler(found, f"the handler {handler!r}")
    return found() if isinstance(found, type) else found


def check(path: str) -> None:
    """Raise `ArgumentError` unless there is such a module, so far as that can be told without importing it."""
    module_name, _ = _parts(path)
    look_last(os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ArgumentError(f"handler {path!r}: there is no module {module_name!r} here or on sys.path")


def _parts(path: str) -> tuple[str, str]:
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"handler {path!r}: name it as module:function")
    return module_name, name


def resolve(path: str) -> Any:
    """What `module:name` names; the module may lie in the current directory, where it is looked for last.

    Raises `ArgumentError`.
    """
    module_name, name = _parts(path)
    look_last(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # it is there, and lacks something itself
        raise ArgumentError(f"handler {path!r}: there is no module {error.name!r} here or on sys.path") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"handler {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def _outlive_nobody(told: Connection, stop: Callable[[], None]) -> None:
    """The pool never says anything: its end closes when it dies."""
    try:
        told.recv_bytes()
    except (EOFError, OSError):
        pass
    stop()
