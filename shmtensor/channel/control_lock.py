"""Holding a channel's control lock, also when a signal handler or a finalizer needs it in a thread that holds it.

The last view of a closed receiver may die anywhere, and a signal handler may close an endpoint anywhere, also in a
thread that holds a control lock at that moment: waiting for the lock would be a deadlock. A departure returns nothing,
so it is put off until the thread holds no lock; everything else is refused at once. Other threads just wait.

An exception of a signal handler may come between any two calls, also at the entry of a function that undoes something.
So an `except` clause undoes it once more: doing it twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ..errors import ReentrantError, ShmTensorError
from ..memory import lifecycle
from ..memory.locks import LockFile

log = logging.getLogger("shmtensor.channel")

LOCK: Final = 0
"""The control byte of a control segment."""

_T = TypeVar("_T")
_holders: dict[LockFile, tuple[int, str]] = {}
"""Locks that are held or waited for: the thread, and the name of what they lock."""
_deferred: list[Callable[[], None]] = []


def exclusively(locks: LockFile, timeout: float, what: str, action: Callable[[], _T]) -> _T:
    """Run `action` while holding the control byte, and return its result.

    Raises `TimedOut` if another process holds the byte for longer than `timeout` seconds, and `ReentrantError` at once
    if this very thread holds it: then it was interrupted while it did.
    """
    me = threading.get_ident()
    if (me, what) in list(_holders.values()):
        raise ReentrantError(
            f"{what} is locked by this very thread: a signal handler or a finalizer has interrupted it while an "
            "endpoint of that channel was being made or closed; an endpoint may be closed there, but none be made"
        )
    try:
        try:
            _holders[locks] = me, what
            locks.wait_exclusive(LOCK, timeout, what)
            return action()
        finally:
            _release(locks)
    except BaseException:
        _release(locks)
        raise


def _release(locks: LockFile) -> None:
    locks.unlock(LOCK)
    _holders.pop(locks, None)  # None: a child that was forked meanwhile has no entry
    _run_deferred()


def is_held() -> bool:
    """Whether this thread holds a control lock: then a signal handler or a finalizer has called this."""
    me = threading.get_ident()
    return any(thread == me for thread, _ in list(_holders.values()))


def defer(departure: Callable[[], None]) -> bool:
    """Put a departure off until this thread holds no control lock. False if it holds none: then do it now.

    Departures are carried out in order. One that was interrupted is run again: doing it twice must change nothing.
    """
    if not is_held():
        return False
    _deferred.append(departure)
    return True


def _run_deferred() -> None:
    taken: list[Callable[[], None]] = []
    try:
        while _deferred and not is_held():
            try:
                taken.extend(map(_deferred.pop, (0,)))  # one call: another thread has it, or this one
            except IndexError:
                return
            try:
                taken[-1]()
            except ShmTensorError:
                log.exception("a departure that was put off has failed")
            taken.clear()
    except BaseException:
        _deferred.extend(taken)
        raise


def _forget() -> None:
    """In a forked child: forget the parent's locks and departures."""
    _holders.clear()
    _deferred.clear()


lifecycle.call_in_child(_forget)
