"""The child processes of a demo: started by spawn, watched all the time, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from ...channel import sweep
from ...channel.names import socket_dir
from ...errors import ShmTensorError
from .frames import InputError
from .plan import Lines, Plan

_GRACE = 3.0


class CrewError(Exception):
    """A child process failed or died."""


class Crew:
    """The processes by name (`"worker 0"`), each with a pipe. Leaving the `with` block ends them all and cleans up."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._context = multiprocessing.get_context("spawn")
        queue = self._context.Queue
        self.lines = Lines(queue(plan.slots), queue(64), tuple(queue(plan.slots) for _ in range(plan.subscribers)))
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection[Any, Any]] = {}

    def __enter__(self) -> Crew:
        try:
            with _no_interrupts():  # inherited: Ctrl-C is the main process's to handle
                self._start("producer", 0)
                for index in range(self.plan.workers):
                    self._start("worker", index)
                for index in range(self.plan.subscribers):
                    self._start("subscriber", index)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._processes)

    def _start(self, role: str, index: int) -> None:
        name = f"{role} {index}"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self.plan, role, index, self.lines), name=name, daemon=True
        )
        process.start()
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def order(self, *order: Any) -> None:
        """Tell every process to play a round."""
        for name, pipe in self._pipes.items():
            try:
                pipe.send(order)
            except OSError:
                raise CrewError(self._died(name)) from None

    def reports(self, seconds: float = 0.0) -> dict[str, Any]:
        """What processes have said, by name, waiting at most so long. Raises at once if one failed or died."""
        sentinels = {process.sentinel: name for name, process in self._processes.items()}
        pipes = {id(pipe): name for name, pipe in self._pipes.items()}
        said = {}
        ready = wait([*self._pipes.values(), *sentinels], seconds)
        for pipe in ready:
            if isinstance(pipe, Connection):
                name = pipes[id(pipe)]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    raise CrewError(self._died(name)) from None
                if kind == "input":
                    raise InputError(value)
                if kind == "error":
                    raise CrewError(f"{name} (pid {self._processes[name].pid}) failed: {value}")
                said[name] = value
        for sentinel in ready:
            if isinstance(sentinel, int) and sentinels[sentinel] not in said:
                raise CrewError(self._died(sentinels[sentinel]))
        return said

    def gather(self, patience: float) -> dict[str, Any]:
        """One report of every process."""
        deadline, said = time.monotonic() + patience, dict[str, Any]()
        while len(said) < len(self._processes):
            if time.monotonic() > deadline:
                missing = ", ".join(name for name in self._processes if name not in said)
                raise CrewError(f"not ready within {patience:g} s: {missing}")
            said.update(self.reports(0.2))
        return said

    def _died(self, name: str) -> str:
        process = self._processes[name]
        process.join(1)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return f"{name} (pid {process.pid}) {how} in the middle of the work"

    def _stop(self) -> None:
        with _no_interrupts():
            for process in self._processes.values():
                process.terminate()
            deadline = time.monotonic() + _GRACE
            for process in self._processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in self._pipes.values():
                pipe.close()
            for line in self.lines.all():
                line.cancel_join_thread()
                line.close()
            with contextlib.suppress(OSError, ShmTensorError):
                directory = socket_dir()
                for channel in sweep.channels():
                    if channel.startswith(f"{self.plan.run}-"):
                        sweep.sweep_channel(channel, directory, patience=1.0)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection[Any, Any], plan: Plan, role: str, index: int, lines: Lines) -> None:
    """A child process: make the role, then play the rounds that are ordered. Ends by SIGTERM, or with its parent."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_follow_parent, daemon=True).start()
    for line in lines.all():
        line.cancel_join_thread()  # whatever is still in a queue when we are told to end is nobody's
    try:
        import torch

        from .roles import ROLES, play_round

        torch.set_num_threads(1)
        play, about = ROLES[role](plan, index)
        pipe.send(("said", about))
        while True:
            name, number, seconds = pipe.recv()
            pipe.send(("said", play_round(play, plan, lines, name, number, seconds)))
    except InputError as error:
        pipe.send(("input", str(error)))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)  # the exception was raised where Python swallows it, in a destructor; the next user sweeps
