"""Copies that are on their way: what they read or write stays alive, and its slot leased, until their event.

Nobody waits and no thread looks: the owner's next calls look through the list. Whoever ends waits for the rest.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import CudaError
from ..memory import forks
from .runtime import runtime

_busy: dict[int, Pending] = {}  # by copy: so that a list lives while one is on its way
_numbers = itertools.count()


class Pending:
    """The copies of one owner that are on their way. Thread-safe.

    Each keeps the owner alive: the garbage collector would forget its leases before their ends are told.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._copies: dict[int, tuple[Any, Any, Callable[[], None] | None, object]] = {}
        self.failed = 0
        """Copies that the device did not complete."""

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, event: Any, holds: Any, done: Callable[[], None] | None = None) -> None:
        """Keep `holds` alive until a recorded event has happened, then call `done`, in whichever thread looks."""
        number = next(_numbers)
        _busy[number] = self  # first: another thread may let go of the copy as soon as it is listed
        self._copies[number] = event, holds, done, None if self._owner is None else self._owner()

    def look(self) -> int:
        """Let go of what is done, here and of owners that nobody uses any more. How many are left here."""
        self._look()
        for other in {*_busy.values()}:
            if other is not self:
                other._look()
        return len(self._copies)

    def _look(self) -> None:
        if self._copies:
            cuda = runtime()
            for number in list(self._copies):
                event = self._event(number)
                try:
                    if event is not None and not cuda.is_done(event):
                        continue
                except CudaError:
                    self.failed += 1
                self._let_go(number)

    def finish(self) -> None:
        """Wait for all of them."""
        while self._copies:
            number = next(iter(self._copies), -1)
            event = self._event(number)
            try:
                if event is not None:
                    runtime().wait(event)
            except CudaError:
                self.failed += 1
            self._let_go(number)

    def _event(self, number: int) -> Any:
        """None: another thread was faster. (What else there is to the copy must not be held here.)"""
        copy = self._copies.get(number)
        return None if copy is None else copy[0]

    def _let_go(self, number: int) -> None:
        _, holds, done, owner = self._copies.pop(number, (None, None, None, None))
        _busy.pop(number, None)
        del holds  # before the owner, which leaves when nobody else has it: its leases have ended by then
        if done is not None:
            done()
        del owner


class Releasable(Protocol):
    """Something that must be undone when no copy is on its way any more."""

    def release(self) -> None: ...


_ends: weakref.WeakSet[Releasable] = weakref.WeakSet()


def at_end(owner: Releasable) -> None:
    """Call `owner.release()` when the process ends, after every copy."""
    _ends.add(owner)


@atexit.register
def finish_all() -> None:
    """The process ends: its memory must not go while a device reads or writes it."""
    for pending in {*_busy.values()}:
        pending.finish()
    for owner in list(_ends):
        owner.release()


def _drop() -> None:
    """A forked child has no copies on their way: they are its parent's, and so are the leases.

    What they hold is kept, since the destructors of tensors and events on a device would call CUDA, which a child of
    a process that uses it cannot.
    """
    for pending in {*_busy.values()}:
        _inherited.append(pending._copies)
        pending._copies = {}
    _busy.clear()


_inherited: list[object] = []


forks.call_in_child(_drop)
