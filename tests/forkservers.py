"""The server that `multiprocessing` forks children from is one per process; a test stops it when done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from multiprocessing import forkserver

PATIENCE = 20.0


def stop_forkserver() -> None:
    """Ask the running server, if there is one, to end, and wait for it; one that does not is killed, with a warning.

    It ends when nobody holds the pipe that it watches any more, so a process that this one forked and that has
    outlived its test would keep it.
    """
    server = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None:
        return
    pipe = os.readlink(f"/proc/self/fd/{server._forkserver_alive_fd}")

    def kill() -> None:
        warnings.warn(f"the fork server does not end; who holds its pipe: {_holders(pipe)}", stacklevel=1)
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(PATIENCE, kill)
    timer.start()
    try:
        server._stop()
    finally:
        timer.cancel()
        timer.join()


def _holders(pipe: str) -> dict[int, str]:
    """The processes that have this pipe open, with their command lines."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if any(os.readlink(f"/proc/{name}/fd/{fd}") == pipe for fd in os.listdir(f"/proc/{name}/fd")):
                    with open(f"/proc/{name}/cmdline") as line:
                        found[int(name)] = line.read().replace("\0", " ")
    return found
