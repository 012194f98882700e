"""The server that `multiprocessing` forks children from is one per process; a test stops it when done."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import context, forkserver, get_context
from pathlib import Path

PATIENCE = 120.0


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[context.ForkServerContext]:
    """Within, children of the fork server have these modules loaded: with PyTorch, importing takes each 1.6 s.

    What a fork server loads is set for the whole process, so whoever depends on it says it with this.
    """
    before = forkserver._forkserver._preload_modules
    stop_forkserver()
    forks = get_context("forkserver")
    forks.set_forkserver_preload(list(modules))
    try:
        yield forks
    finally:
        stop_forkserver()
        forks.set_forkserver_preload(before)


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


def run_program(
    forks: context.ForkServerContext, code: str, *arguments: str, directory: Path, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", code, *arguments])` that captures, without its imports."""
    out, err = directory / "stdout", directory / "stderr"
    process = forks.Process(target=_play, args=(code, arguments, dict(os.environ), str(out), str(err)))
    process.start()
    process.join(timeout)
    ended = process.exitcode
    if ended is None:
        process.kill()
        process.join()
    process.close()
    texts = [path.read_text() if path.exists() else "" for path in (out, err)]
    if ended is None:
        raise subprocess.TimeoutExpired(code, timeout, *texts)
    return subprocess.CompletedProcess(code, ended, *texts)


def _play(code: str, arguments: tuple[str, ...], environment: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
