"""The threads of one call, which read, digest or write for it.

After an error, or an exception in the caller (Ctrl-C), no further piece of work begins, and the caller goes on as soon
as no thread touches its memory any more. The caller does not wait for threads that wait for a server (`waiting`); these
touch nothing of it afterwards, even if the server answers late. So the threads are daemons. They are made for each
call: a forked child inherits none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from ..shielded import Condition

_A = TypeVar("_A")
_B = TypeVar("_B")
_AT_ONCE: Final = 8
_LOOK: Final = 0.1
"""Seconds between two looks whether the thread was told to stop."""


class Stopped(Exception):
    """Raised in a thread that must stop."""


class _Group:
    """The threads of one call of `in_threads`.

    over:   no piece of work begins any more
    there:  how many threads have not ended
    inside: how many of them may touch memory of the caller
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.results: list[Any] = [None] * len(calls)
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.there = self.inside = 0
        self._changed = Condition()
        self._calls = enumerate(calls)

    def work(self) -> None:
        """Make the calls, one after the other. `count(1, 1)` was called before."""
        _own.group = self
        try:
            self._work()
        except BaseException as error:
            if self.error is None or isinstance(self.error, Stopped):
                self.error = error
            self.over.set()
        finally:
            self.count(-1, -1)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            self.results[found[0]] = found[1]()

    def _next(self) -> tuple[int, Callable[[], object]] | None:
        with self._changed:
            return None if self.over.is_set() else next(self._calls, None)

    def count(self, there: int, inside: int) -> None:
        """Change the numbers of threads that have not ended, and of those that may touch the caller's memory."""
        with self._changed:
            self.there += there
            self.inside += inside
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all threads have ended, or until it is over and none touches the caller's memory."""
        while not self._is_done():
            if stopped():  # the caller is itself a thread of another group
                self.over.set()

    def _is_done(self) -> bool:
        with self._changed:
            if self.there and (self.inside or not self.over.is_set()):
                self._changed.wait(_LOOK)
            return not self.there or (self.over.is_set() and not self.inside)


_own = threading.local()


def stopped() -> bool:
    """Whether this thread must stop."""
    group: _Group | None = getattr(_own, "group", None)
    return group is not None and group.over.is_set()


def check() -> None:
    """Raise `Stopped` if this thread must stop."""
    if stopped():
        raise Stopped


def pause(seconds: float) -> None:
    """Wait for so long. Raises `Stopped`."""
    group: _Group | None = getattr(_own, "group", None)
    (group.over if group is not None else threading.Event()).wait(seconds)
    check()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """For `with`: this thread waits for others, perhaps for ever, and touches no memory of its caller. Raises `Stopped`
    at the end, if that is how it has ended for the caller."""
    group: _Group | None = getattr(_own, "group", None)
    if group is None:
        yield
        return
    group.count(0, -1)
    try:
        yield
    finally:
        group.count(0, 1)
        check()


def in_threads(calls: Sequence[Callable[[], _B]], threads: int) -> list[_B]:
    """What some functions return, called in so many threads. Raises what the first that fails raises; the others are
    told to stop."""
    if min(threads, len(calls)) == 1:
        return [call() for call in calls]
    group, started = _Group(calls), list[threading.Thread]()
    try:
        for _ in range(min(threads, len(calls))):
            started.append(threading.Thread(target=group.work, name="shmtensor checkpoint call", daemon=True))
            group.count(1, 1)
            try:
                started[-1].start()
            except RuntimeError:  # no more threads may be started
                started.pop()
                _work_here(group)
        group.wait()
    except BaseException:
        group.over.set()
        group.wait()
        raise
    if group.error is None:
        for thread in started:
            thread.join()
        return group.results
    error, group.error = group.error, None
    try:
        raise error
    finally:
        del error  # its traceback has this frame


def _work_here(group: _Group) -> None:
    before = getattr(_own, "group", None)
    try:
        group.work()
    finally:
        _own.group = before


def at_once(call: Callable[[_A], _B], each_of: Iterable[_A]) -> list[_B]:
    """The results of requests, several of which are made at once."""
    return in_threads([partial(call, each) for each in each_of], _AT_ONCE)
