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
from typing import Any

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
    process = forks.Process(target=_play, args=(code, arguments, dict(os.environ), {1: str(out), 2: str(err)}))
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


class Program:
    """As `subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=PIPE, stdout=PIPE, text=True)`.

    Without its imports, and without the end of an interpreter: no `atexit`, nothing is torn down.
    """

    def __init__(self, forks: context.ForkServerContext, code: str, *arguments: str) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = forks.Pipe(duplex=False), forks.Pipe(duplex=False)
        ends = {0: theirs_in, 1: theirs_out}
        self._process = forks.Process(target=_play, args=(code, arguments, dict(os.environ), ends))
        self._process.start()
        self.pid = self._process.pid
        self.stdin = os.fdopen(os.dup(ours_in.fileno()), "w")
        self.stdout = os.fdopen(os.dup(ours_out.fileno()))
        for end in (theirs_in, ours_in, ours_out, theirs_out):
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        ended = self._process.exitcode
        if ended is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return ended

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for its end: of a test that failed, by killing it."""
        if sys.exc_info()[0] is not None:
            self.kill()
        self.stdin.close()
        self.wait()
        self.stdout.close()


def _play(code: str, arguments: tuple[str, ...], environment: dict[str, str], ends: dict[int, Any]) -> None:
    """`ends`: by descriptor, the pipe's end or the path of the file that it shall be."""
    os.environ.clear()
    os.environ.update(environment)
    for number, end in ends.items():
        fd = os.open(end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if isinstance(end, str) else end.fileno()
        os.dup2(fd, number)
        os.close(fd) if isinstance(end, str) else end.close()
    if 0 in ends:
        sys.stdin = os.fdopen(0, closefd=False)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
