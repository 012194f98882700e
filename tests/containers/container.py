"""Containers as this library sees them: user, mount, IPC and pid namespaces and a `/dev/shm` of their own."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from ..waiting import PATIENCE, wait_until
from .servers import ROOT, children

_UNSHARE = ("unshare", "-m", "-i", "-p", "-U", "--map-root-user", "--fork", "--kill-child", "--mount-proc")


class Refused(Exception):
    """The code that a member of a container ran has raised: the name of the error's class, and its text."""


@functools.cache
def refusal() -> str:
    """Why no test here can make a container; empty if it can."""
    command = [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return "" if tried.returncode == 0 else f"{shlex.join(command)}: {tried.stderr.strip()}"


class Container:
    """A container. It shares the file system, and so the directory of a segment server, but no `/dev/shm`. Its
    processes are root inside, and outside who runs the tests."""

    def __init__(self) -> None:
        if refusal():
            pytest.skip(f"no containers here: {refusal()}")
        mounts = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo up && exec cat"
        self._holder = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", mounts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self.init = children(self._holder.pid)[0]
        self.enter = (
            "nsenter", "-t", str(self.init), "-U", "--preserve-credentials", "-m", "-i", "-p", f"--wd={ROOT}", "--",
        )  # fmt: skip

    def python(self, directory: str, *crash: str, uid: int | None = None, **environment: str) -> Member:
        """A process that runs what it is told; with `uid` in a further user namespace, where it has that number."""
        enter = self.enter if uid is None else (*self.enter, "unshare", "-U", f"--map-user={uid}", "--")
        return Member(enter, directory, crash, environment)

    def run(self, directory: str, *arguments: str) -> str:
        """The output of `shmtensor ...`."""
        done = subprocess.run(
            [*self.enter, sys.executable, "-m", "shmtensor", *arguments],
            cwd=ROOT, env=_environment(directory), capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def left(self) -> list[str]:
        """What lies in its `/dev/shm`."""
        return os.listdir(f"/proc/{self.init}/root/dev/shm")

    def close(self) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(PATIENCE)
        self._holder.stdout.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment(directory: str, more: dict[str, str] | None = None) -> dict[str, str]:
    mine = {"PYTHONPATH": str(ROOT), "SHMTENSOR_DIR": directory, "COLUMNS": "200"}
    return {**os.environ, **mine, **(more or {})}


class Member:
    """A process in a container, or, without one, of this very host."""

    def __init__(
        self, enter: tuple[str, ...], directory: str, crash: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._entered = bool(enter)
        self.process = subprocess.Popen(
            [*enter, sys.executable, "-W", "error", "-X", "faulthandler", "-m", "tests.containers.role", *crash],
            cwd=ROOT, env=_environment(directory, environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self("None")  # it runs

    def __del__(self) -> None:
        if self.process.poll() is None:  # its test has failed
            self.kill()

    @property
    def pid(self) -> int:
        """Its number on this host."""
        return children(self.process.pid)[0] if self._entered else self.process.pid

    def start(self, code: str) -> None:
        """Have it run code; `result` waits for that."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """The value of the code; `Refused` if it has raised."""
        assert self.process.stdout is not None
        watch = threading.Timer(PATIENCE, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        assert line, f"it has ended, or hangs: {self.process.poll()}"
        kind, value = json.loads(line)
        if kind != "ok":
            raise Refused(f"{kind}: {value}")
        return value

    def __call__(self, code: str) -> Any:
        """Run code in it: the value of an expression, else None."""
        self.start(code)
        return self.result()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number in (signal.SIGCONT, signal.SIGKILL) and self._entered:  # what has entered stops with what it runs
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """`kill -9`, to the end."""
        self.signal(signal.SIGKILL)
        self._over()

    def wait_for_death(self) -> None:
        """It kills itself at a crash point."""
        assert self.process.wait(PATIENCE) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        self._over()

    def end(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        self._over()

    def _over(self) -> None:
        self.process.wait(PATIENCE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for file in (self.process.stdin, self.process.stdout):
            try:
                file.close()
            except BrokenPipeError:
                pass

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process.poll() is None:
            if kind is None:
                self.end()
            else:
                self.kill()
        self._over()


def names(member: Member) -> list[str]:
    """The names that the segment server keeps, as a member sees them."""
    found = member("__import__('shmtensor.memory.segment', fromlist=['x']).listing()")
    assert isinstance(found, list)
    return found


def nothing_left(member: Member) -> None:
    """Wait until the server keeps no name."""
    wait_until(lambda: not names(member), lambda: names(member))
