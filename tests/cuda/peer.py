"""Another process with a CUDA stand-in of its own, which does what a test tells it, line by line."""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import os
import signal
import tempfile
from multiprocessing.connection import wait
from typing import Any

PATIENCE = 100.0


def play(pipe: Any, stacks: str, options: dict[str, Any]) -> None:
    """Run in a child of the fork server, where the package is loaded with its crash points.

    SIGUSR1 writes the stacks of its threads into the file `stacks`.
    """
    faulthandler.register(signal.SIGUSR1, os.open(stacks, os.O_WRONLY))
    import torch

    import shmtensor

    from ..faults import points
    from .standin import installed

    with installed(**options) as cuda:
        known = {"shmtensor": shmtensor, "torch": torch, "cuda": cuda, "points": points, "run": cuda.run_all}
        known |= {"number": lambda tensor: _number(cuda.host(tensor)), "filled": lambda n: cuda.tensor(_filled(n))}
        pipe.send("here")
        while True:
            try:
                kind, code = pipe.recv()
            except EOFError:
                break
            if kind == "end":
                break
            try:
                answer = eval(code, known) if kind == "ask" else exec(code, known)
            except Exception as error:
                pipe.send(("raised", type(error).__name__, str(error)))
                del error
            else:
                pipe.send(("said", answer))
                del answer


WORDS = 256


def _filled(number: int) -> Any:
    import torch

    return torch.full((WORDS,), number, dtype=torch.int64)


def _number(tensor: Any) -> int:
    assert tensor.shape == (WORDS,), tensor.shape
    values = set(tensor.tolist())
    return values.pop() if len(values) == 1 else -1


class Peer:
    """The test's end."""

    def __init__(self, context: Any, **options: Any) -> None:
        self.pipe, theirs = context.Pipe()
        fd, self._stacks = tempfile.mkstemp(prefix="cuda-peer-")
        os.close(fd)
        self.process = context.Process(target=play, args=(theirs, self._stacks, options))
        self.process.start()
        theirs.close()
        assert self._answer() == "here"

    def _answer(self) -> Any:
        if not wait([self.pipe, self.process.sentinel], PATIENCE):
            raise AssertionError(f"the peer is silent:\n{self._kill_and_tell()}")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return ("dead",)

    def start(self, code: str) -> None:
        """Let it do something, without waiting for the answer."""
        self.pipe.send(("do", code))

    def result(self) -> Any:
        """The answer to `start`; None if it died."""
        kind, *rest = self._answer()
        if kind == "raised":
            raise AssertionError(f"in the peer: {rest[0]}: {rest[1]}")
        return rest[0] if rest else None

    def do(self, code: str) -> None:
        """Let it do something."""
        self.start(code)
        self.result()

    def ask(self, code: str) -> Any:
        """What an expression is there."""
        self.pipe.send(("ask", code))
        return self.result()

    def fails(self, code: str) -> tuple[str, str]:
        """Name and text of the exception that something raises there."""
        self.start(code)
        kind, *rest = self._answer()
        assert kind == "raised", (kind, rest)
        return rest[0], rest[1]

    @property
    def is_dead(self) -> bool:
        """Whether it died of what it was told."""
        self.process.join(PATIENCE)
        return self.process.exitcode not in (0, None)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    def _kill_and_tell(self) -> str:
        """Kill a process that hangs; what its threads were at."""
        os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(2)
        self.kill()
        with open(self._stacks) as text:
            return text.read()

    def end(self) -> None:
        """Let the process end in good order, without waiting for it."""
        with contextlib.suppress(OSError):
            self.pipe.send(("end", ""))

    def finish(self) -> None:
        self.end()
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"hangs:\n{self._kill_and_tell()}"
        for path in glob.glob(f"/tmp/cuda-standin-{self.process.pid}-*"):  # what the stand-in of a killed one has left
            os.unlink(path)
        self.process.close()
        self.pipe.close()
        os.unlink(self._stacks)
