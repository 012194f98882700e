"""What a forked child lets go of: locks, so that it keeps no dead parent alive, and leases: its parent's.

All that the library does in a forked child starts here, in the order in which it was asked for: first the owners of
what the child must not have, then the functions. Each is on its own: one that fails is reported, and the rest goes on.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("shmtensor")


class Forkable(Protocol):
    """Something that owns lock descriptors or words, and can let go of them in a forked child."""

    def drop_in_child(self) -> None:
        """Called in a forked child, perhaps once more where something interrupted it."""


_owners: set[weakref.ref[Forkable]] = set()
_functions: list[Callable[[], None]] = []
inherited: set[int] = set()
"""Descriptors of locks that forked children are to have as well: they keep a queue alive for as long as one is open."""


def track(owner: Forkable) -> None:
    """Call `owner.drop_in_child()` in every child that is forked from now on, for as long as `owner` lives."""
    _owners.add(weakref.ref(owner, _owners.discard))


def call_in_child(function: Callable[[], None]) -> None:
    """Call a function of a module in every child that is forked from now on."""
    _functions.append(function)


def _after_fork() -> None:
    owners = [owner for reference in _owners.copy() if (owner := reference()) is not None]
    _owners.clear()
    left: list[Callable[[], None]] = [owner.drop_in_child for owner in owners] + _functions
    left.reverse()
    again = False  # an exception of a signal handler may come between any two calls: each has two tries
    while left:
        try:
            while left:
                left[-1]()
                left.pop()
                again = False
        except BaseException:
            if again:
                log.exception("in a forked child, %r failed: what it owns may still belong to its parent", left.pop())
            again = not again


os.register_at_fork(after_in_child=_after_fork)
