"""What a forked child must let go of: locks, so that it keeps no dead parent alive, and leases: its parent's."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that owns lock descriptors or words, and can let go of them in a forked child."""

    def drop_in_child(self) -> None: ...


_owners: weakref.WeakSet[Forkable] = weakref.WeakSet()


def track(owner: Forkable) -> None:
    """Call `owner.drop_in_child()` in every child that is forked from now on, for as long as `owner` lives."""
    _owners.add(owner)


def _after_fork() -> None:
    for owner in list(_owners):
        owner.drop_in_child()
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork)
