"""Every measurement runs in fresh processes: start them, let them meet, collect what they found."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")

NO_TORCH = 0
DEFAULT_THREADS = -1

_names = itertools.count()


@dataclass(frozen=True)
class Role:
    """What one process does: `function(meet, *args)`; `meet()` waits until every role has called it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    threads: int = 1
    """torch's threads in this process; `NO_TORCH`: do not import it; `DEFAULT_THREADS`: do not set them."""


class RoleFailed(RuntimeError):
    """A process of a run raised, died or took too long."""


def fresh_name() -> str:
    """A channel or service name that nobody else uses."""
    return f"bench-{os.getpid()}-{time.time_ns() & 0xFFFFFF:x}-{next(_names)}"


def run_roles(roles: Sequence[Role], *, timeout: float = 300.0) -> list[Any]:
    """Run each role in a process of its own; returns what they returned, in order. Raises `RoleFailed`."""
    barrier = CONTEXT.Barrier(len(roles))
    processes, pipes = [], []
    try:
        for role in roles:
            here, there = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_play, args=(role, barrier, timeout, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        return _collect(roles, pipes, time.monotonic() + timeout)
    except BaseException:
        barrier.abort()
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join(10)
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
            except EOFError:
                raise RoleFailed(f"{name} died") from None
            if not succeeded:
                raise RoleFailed(f"{name} raised:\n{result}")
            results[pipe] = result
    return [results[pipe] for pipe in pipes]


def _play(role: Role, barrier: Any, timeout: float, pipe: Connection) -> None:
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
