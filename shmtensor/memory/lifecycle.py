"""Hooks for forked children: they drop the parent's leases, and its locks, so that no child keeps a dead parent alive.

Everything that the library does in a forked child starts here: first the drop functions of the owners of locks and
leases, then the registered functions, in the order of registration. If one fails, the error is logged, and the others
still run.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

log = logging.getLogger("shmtensor.memory")


_Owner = TypeVar("_Owner")

_owners: dict[weakref.ref[Any], Callable[[Any], None]] = {}
_functions: list[Callable[[], None]] = []
inherited: set[int] = set()
"""Descriptors of locks that forked children keep: a queue lives as long as one of them is open."""


def track(owner: _Owner, drop: Callable[[_Owner], None]) -> None:
    """Call `drop(owner)` in every child that is forked from now on, and in its children, for as long as `owner` lives.

    owner: something that owns lock descriptors or leases
    drop:  drops them; called once more if an exception interrupted it, and again in a child's child, which may have
           got others in between
    """
    _owners[weakref.ref(owner, _owners.pop)] = drop


def call_in_child(function: Callable[[], None]) -> None:
    """Call a function of a module in every child that is forked from now on."""
    _functions.append(function)


def _drop() -> None:
    global _dropped_in
    found = [(reference(), drop) for reference, drop in _owners.copy().items()]
    left = [functools.partial(drop, owner) for owner, drop in found if owner is not None]
    left += [functools.partial(function) for function in _functions]
    left.reverse()
    again = False  # an exception of a signal handler may come between any two calls: each call gets a second try
    while left:
        try:
            while True:
                if not left:
                    break
                left[-1]()
                left.pop()
                again = False
        except BaseException:
            if again:
                log.exception("in a forked child, %r failed: what it owns may still belong to its parent", left.pop())
            again = not again
    _dropped_in = os.getpid()


def _drop_after_all() -> None:
    """As an exception may come before the first call there."""
    if _dropped_in != os.getpid():
        _drop()


_dropped_in = 0
in_child: Final = (_drop, _drop_after_all)
"""The functions that the interpreter calls in each child, each even if the one before failed."""
for function in in_child:
    os.register_at_fork(after_in_child=function)
