"""What `block=` and `timeout=` of the standard library's queues mean as a moment; a lock that is waited for until then.

An exception from outside (Ctrl-C, a signal's handler, another thread) arrives at a function's entry, the end of a call
or a jump back: never inside a call of a C function. So what takes something and what notes that it was taken are one
such call, here as everywhere in the drop-ins.
"""

from __future__ import annotations

import time
from typing import Any, Final

ONCE: Final = ((),)
"""`record += starmap(call, ONCE)` calls a C function and appends what it returns, with nothing in between."""


def deadline_of(block: bool, timeout: float | None) -> float | None:
    """The moment, monotonic, until which to wait; None for ever."""
    if not block:
        return 0.0
    return None if timeout is None else time.monotonic() + max(0.0, timeout)


def remaining(deadline: float | None, most: float) -> float:
    """Seconds until then, at most `most`."""
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def locked(lock: Any, deadline: float | None) -> Any:
    """For `with`: hold a lock that is written in C. Raises `StopIteration` if it cannot be had until then."""
    return lock if deadline is None else _Timed(lock, remaining(deadline, 1e6))


class _Timed:
    """A context manager both of whose methods are C functions."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, timeout: float) -> None:
        self.__enter__ = filter(None, map(lock.acquire, (True,), (timeout,))).__next__
        self.__exit__ = lock.__exit__
