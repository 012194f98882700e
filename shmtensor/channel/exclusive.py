"""Holding a channel's control lock, and departures that a garbage collection asks for meanwhile.

The last view of a closed receiver may die anywhere, also in a thread that holds a control lock right now: that member's
departure cannot wait for the lock, so it is put off until the holder is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ..memory import forks
from ..memory.locks import LockFile

LOCK: Final = 0
"""The control byte of a control segment."""


class _Turns:
    """This process's holders of control locks, and the departures that wait for them."""

    def __init__(self) -> None:
        self.holders: list[LockFile] = []
        self.deferred: list[Callable[[], None]] = []
        forks.track(self)

    def drop_in_child(self) -> None:
        self.holders.clear()
        self.deferred.clear()

    def run(self) -> None:
        while not self.holders and self.deferred:
            self.deferred.pop()()


_turns = _Turns()


@contextmanager
def exclusive(locks: LockFile, timeout: float, what: str) -> Iterator[None]:
    """Hold the control byte; `TimedOut` if another process holds it for longer than `timeout` seconds."""
    _turns.holders.append(locks)
    try:
        locks.wait_exclusive(LOCK, timeout, what)
        yield
    finally:
        locks.unlock(LOCK)
        if locks in _turns.holders:  # not in a child that was forked meanwhile
            _turns.holders.remove(locks)
        _turns.run()


def defer(departure: Callable[[], None]) -> bool:
    """Put a departure off if this process holds a control lock, perhaps in this very thread. False: do it now."""
    if not _turns.holders:
        return False
    _turns.deferred.append(departure)
    _turns.run()  # the holder may have finished in between
    return True
