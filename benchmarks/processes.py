"""Every measurement runs in fresh processes: start them, let them meet, collect what they found.

Processes that use torch are forked from a server that has imported it and done nothing else (`forkserver`): as fresh
as spawned ones, without the seconds that the import takes. Those that need no torch are spawned without it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.multiprocessing", "benchmarks.workloads", "rich.progress", "typer"]
FORKS.set_forkserver_preload(PRELOADED)

NO_TORCH = 0
DEFAULT_THREADS = -1

_names = itertools.count()
_patience = [120.0]


@dataclass(frozen=True)
class Role:
    """What one process does: `function(meet, *args)`; `meet()` waits until every role has called it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    threads: int = 1
    """torch's threads in this process; `NO_TORCH`: do not import it; `DEFAULT_THREADS`: do not set them."""
    forked: bool = True
    """Whether it may come from the server that has torch imported: forked children copy with one thread."""


class RoleFailed(RuntimeError):
    """A process of a run raised, died or took too long."""


def fresh_name() -> str:
    """A channel or service name that nobody else uses."""
    return f"bench-{os.getpid()}-{time.time_ns() & 0xFFFFFF:x}-{next(_names)}"


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """How long `run_roles` waits, in a `with` block."""
    before, _patience[0] = _patience[0], seconds
    try:
        yield
    finally:
        _patience[0] = before


@contextmanager
def pipes(count: int, *, duplex: bool = True) -> Iterator[list[tuple[Connection, Connection]]]:
    """So many pipes by which roles tell each other what to do, in a `with` block."""
    made: list[tuple[Connection, Connection]] = []
    try:
        for _ in range(count):
            made.append(CONTEXT.Pipe(duplex))
        yield made
    finally:
        for pair in made:
            for end in pair:
                end.close()


def run_roles(roles: Sequence[Role]) -> list[Any]:
    """Run each role in a process of its own; returns what they returned, in order.

    Raises `RoleFailed` if one raises or dies, or if not all have finished in time (`patience`); all of them, and
    all processes that they have started, are killed then.
    """
    timeout = _patience[0]
    barrier = CONTEXT.Barrier(len(roles))
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for role in roles:
            context: Any = FORKS if role.forked and role.threads != NO_TORCH else CONTEXT
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_play, args=(role, barrier, timeout, there), daemon=False)
            pipes.append(here)
            processes.append(process)
            process.start()
            there.close()
        return _collect(roles, pipes, time.monotonic() + timeout)
    except BaseException:
        barrier.abort()
        for process in processes:
            if process.pid is not None:
                _kill_all(process.pid)
        raise
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(20)
                if process.is_alive():
                    process.kill()
                    process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _collect(roles: Sequence[Role], pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(roles[pipes.index(pipe)].function.__name__ for pipe in waiting)
            raise RoleFailed(f"not finished in time: {late}")
        for pipe in ready:
            name = roles[pipes.index(pipe)].function.__name__
            try:
                succeeded, result = pipe.recv()
            except (EOFError, ConnectionError):
                raise RoleFailed(f"{name} died") from None
            if not succeeded:
                raise RoleFailed(f"{name} raised:\n{result}")
            results[pipe] = result
    return [results[pipe] for pipe in pipes]


def _play(role: Role, barrier: Any, timeout: float, pipe: Connection) -> None:
    os.setpgid(0, 0)  # a group of its own: what the role starts can be killed with it
    try:
        if role.threads != NO_TORCH:
            import torch

            if role.threads != DEFAULT_THREADS:
                torch.set_num_threads(role.threads)
        result = role.function(lambda: barrier.wait(timeout), *role.args)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, result))


def _descendants(root: int) -> list[int]:
    """Process ids below `root`, children after their own children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))

    def below(pid: int) -> list[int]:
        return [found for child in children.get(pid, ()) for found in (*below(child), child)]

    return below(root)


def _kill_all(root: int) -> None:
    """Kill a role and what it has started.

    First the role, so that it starts no more, then its group at one stroke: a child that was born after the list of
    descendants was made is in it. The list is for those that have left the group.
    """
    below = _descendants(root)
    for kill, pid in ((os.kill, root), (os.killpg, root), *((os.kill, pid) for pid in below)):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
