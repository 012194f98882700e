"""Copies in progress: what they read or write stays alive, and its slot leased, until the event after them.

No thread waits for the events: the owner's next calls poll them. An owner that closes, and a process that ends, waits.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import CudaError
from ..memory import lifecycle
from .runtime import runtime

_busy: dict[int, Pending] = {}  # by number of the copy: keeps a `Pending` alive while it has copies in progress
_numbers = itertools.count()


class Pending:
    """The copies of one owner that are in progress. Thread-safe.

    Each keeps the owner alive, which must not be garbage before the leases of the copies have ended.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._copies: dict[int, tuple[Any, Any, Callable[[], None] | None, object]] = {}
        self.failed = 0
        """Copies that the device did not complete."""

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, event: Any, holds: Any, done: Callable[[], None] | None = None) -> int:
        """Keep `holds` alive until a recorded event has happened, then call `done`, in the thread that finds out.

        Returns the number of the copy.
        """
        number = next(_numbers)
        _busy[number] = self  # first: another thread may release the copy as soon as it is in `_copies`
        self._copies[number] = event, holds, done, None if self._owner is None else self._owner()
        return number

    def poll(self) -> int:
        """Release what is done, here and of owners that may not be used any more. How many copies are left here."""
        self._poll()
        for other in {*_busy.values()}:
            if other is not self:
                other._poll()
        return len(self._copies)

    def _poll(self) -> None:
        if self._copies:
            cuda = runtime()
            for number in list(self._copies):
                event = self._event(number)
                try:
                    if event is not None and not cuda.is_done(event):
                        continue
                except CudaError:
                    self.failed += 1
                self.let_go(number)

    def finish(self) -> None:
        """Wait for all copies."""
        while self._copies:
            number = next(iter(self._copies), -1)
            event = self._event(number)
            try:
                if event is not None:
                    runtime().wait(event)
            except CudaError:
                self.failed += 1
            self.let_go(number)

    def _event(self, number: int) -> Any:
        """The event of a copy; None: another thread has released it. (Nothing else of it may be referred to here.)"""
        copy = self._copies.get(number)
        return None if copy is None else copy[0]

    def let_go(self, number: int) -> None:
        """Release what a copy held, which is done. Idempotent."""
        _, holds, done, owner = self._copies.pop(number, (None, None, None, None))
        _busy.pop(number, None)
        del holds  # before the owner, which may leave its channel with this last reference: its leases must have ended
        if done is not None:
            done()
        del owner


class Releasable(Protocol):
    """Something that must be undone when no copy is in progress any more."""

    def release(self) -> None: ...


_ends: weakref.WeakSet[Releasable] = weakref.WeakSet()


def at_end(owner: Releasable) -> None:
    """Call `owner.release()` when the process ends, after every copy."""
    _ends.add(owner)


@atexit.register
def finish_all() -> None:
    """At exit: wait for all copies, since a device reads or writes memory of the process."""
    for pending in {*_busy.values()}:
        pending.finish()
    for owner in list(_ends):
        owner.release()


def _drop() -> None:
    """In a forked child: forget the copies in progress. They are its parent's, and so are the leases.

    What they hold is kept, since the destructors of tensors and events on a device would call CUDA, which a child of
    a process that uses it cannot.
    """
    for pending in {*_busy.values()}:
        _inherited.append(pending._copies)
        pending._copies = {}
    _busy.clear()


_inherited: list[object] = []


lifecycle.call_in_child(_drop)
