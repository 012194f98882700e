"""A member of the cast as the test sees it: a process, and what it has told so far."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import wait

import pytest

from ..forkservers import stop_forkserver
from . import build, points, roles

PATIENCE = 120.0


@contextlib.contextmanager
def crash_server(*modules: str, compiled: bool = False) -> Iterator[multiprocessing.context.ForkServerContext]:
    """A context whose processes have the package with its crash points, and these modules, loaded.

    `compiled`: by the compiled module, as a test build with crash points; else by the Python code alone.
    """
    with crash_servers(*modules) as of:
        yield of(compiled)


@contextlib.contextmanager
def crash_servers(*modules: str) -> Iterator[Callable[[bool], multiprocessing.context.ForkServerContext]]:
    """Such a context of either implementation. There is one at a time: cases of one shall follow each other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.cast", *modules, "tests.faults.loaded"])
    running: bool | None = None

    def of(compiled: bool) -> multiprocessing.context.ForkServerContext:
        nonlocal running
        if running is not compiled:
            stop_forkserver()  # also one that another test has left running
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(points.BUILD, build.module_path() if compiled else "")
                forkserver.ensure_running()
            running = compiled
        return context

    yield of
    stop_forkserver()
    context.set_forkserver_preload(["__main__"])  # the default


class Process:
    """A member of the cast."""

    def __init__(self, context, role, *args, **options):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=roles.play, args=(role, theirs, options, *args))
        self.process.start()
        self._pid = self.process.pid
        theirs.close()
        self.told = []
        self.over = False

    def listen(self, until: str | None = None) -> None:
        """Collect what the process tells, until it says `until` or ends."""
        while not self.over:
            if not wait([self.pipe], PATIENCE):
                raise AssertionError(f"{self.process.name} is silent after {self.told[-3:]}")
            if self.listen_once() == until and until is not None:
                return
        self.process.join(PATIENCE)

    def listen_once(self) -> str | None:
        """Collect the next thing that it tells, which is there; None at its end."""
        try:
            self.told.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.over = True
            return None
        return self.told[-1][0]

    def all(self, what: str) -> list:
        return [message[1] for message in self.told if message[0] == what]

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def died(self) -> bool:
        return not self.all("end")

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send("go")

    def finish(self) -> None:
        self.listen()
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "hangs"
        self.process.close()
        self.pipe.close()
