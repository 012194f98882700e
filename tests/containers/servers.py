"""A segment server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ..waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def children(pid: int) -> list[int]:
    """The children of a process that has one thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Server:
    """`shmtensor share` in a process, perhaps within a container. It is ready when this returns.

    `enter`: a command that runs the server as its child, such as that of a container. `files`: how many it may open.
    """

    def __init__(
        self, directory: str, *, limit: str = "4GiB", enter: tuple[str, ...] = (), crash: str = "", files: int = 0
    ) -> None:
        program = ["-m", "shmtensor", "share", directory, "--limit", limit]
        if crash:
            program = ["-m", "tests.containers.crashing", crash, *program[2:]]
        self.directory, self._entered = directory, bool(enter)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        few = ("sh", "-c", f'ulimit -n {files}; exec "$@"', "sh") if files else ()
        self.process = subprocess.Popen(
            [*enter, *few, sys.executable, "-W", "error", *program],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        assert "is ready" in self.said, self.said + self.process.stderr.read()

    def __del__(self) -> None:
        if self.process.poll() is None:  # its test has failed
            self.signal(signal.SIGKILL)
            self._end()

    def signal(self, number: int) -> None:
        os.kill(children(self.process.pid)[0] if self._entered else self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._end() in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def next_line(self) -> str:
        """What it says next."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def stop(self) -> str:
        """SIGTERM; what it said at its end."""
        assert self.process.stderr is not None
        self.signal(signal.SIGTERM)
        said = self.process.stderr.read()
        assert self._end() == 0, said
        return said

    def wait_for_death(self) -> None:
        """It kills itself at a crash point."""
        assert self.process.wait(PATIENCE) == -signal.SIGKILL
        self._end()

    def _end(self) -> int:
        code = self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
        elif self.process.stderr is not None:
            self.process.stderr.close()


@contextlib.contextmanager
def serving(directory: str) -> Iterator[Server]:
    """Within, a server in this directory."""
    server = Server(directory)
    try:
        yield server
    finally:
        server.close()
