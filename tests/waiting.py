"""Waiting for what another process or thread does, where nothing tells of it: bounded, never for a time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE = 120.0


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds: Callable[[], object], instead: Callable[[], object] = str, *, patience: float = PATIENCE) -> None:
    """Look again and again until it holds; an error after `patience` seconds, which says what there is `instead`."""
    deadline, pause = time.monotonic() + patience, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"it never came to hold {instead()}"
        pause.wait(0.005)


@contextlib.contextmanager
def once(holds: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Within, as soon as it holds, another thread calls `act()`."""
    thread = threading.Thread(target=lambda: (wait_until(holds), act()))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def wait_for_end(pid: int) -> None:
    """Wait for the end of any process, be it a child or not."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([descriptor], [], [], PATIENCE)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} does not end"


def stop(pid: int) -> None:
    """Stop a process, a child or not. A signal takes effect some time after `kill` has returned."""
    os.kill(pid, signal.SIGSTOP)
    wait_for_stop(pid)


def wait_for_stop(pid: int) -> None:
    """Wait until each thread of a process, a child or not, is stopped."""

    def is_stopped() -> bool:
        states = set(_states(pid))
        assert not states & set("ZX"), f"process {pid} has ended"
        return states == {"T"}

    wait_until(is_stopped)


def _states(pid: int) -> list[str]:
    """Of each of its threads."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as line:
            found.append(line.read().rpartition(")")[2].split()[0])
    return found


def complaints(stderr: str) -> str:
    """What a program has said on standard error but that a `send` waited long, as it may on a slow machine."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("a send has waited "))
