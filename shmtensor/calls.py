"""Calls that run on a thread of their own, one after the other, where no asynchronous exception arrives.

Ctrl-C, a signal handler that raises, a time-out library: such an exception is raised in the thread that makes a public
call, between any two steps of it. What a call does there is therefore only to put a `Call` into a queue and to wait for
its end, both without a lock that could be left behind. All effects (locks, slots, processes, files) are made by the
queue's thread. A caller who is thrown out of its wait abandons the call: it is not begun any more, or ends soon, and
what it has done is taken back or stands as a whole.

A handler that calls while its thread is inside a call of the same writer waits in the same queue: nothing is held that
it could wait for.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import starmap
from operator import attrgetter
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any, Final, Generic, TypeVar

from .errors import TimedOut

_T = TypeVar("_T")
_ONCE: Final = ((),)
"""`record += starmap(call, _ONCE)` calls a C function and appends what it returns, with nothing in between."""
_TICK: Final = 0.25
"""Seconds of one wait at most: a signal that comes just before it is handled after it."""
_THREAD: Final = "thread"
_CALLER: Final = "caller"


class Condition(threading.Condition):
    """For the futures of the standard library: entered, left and waited on without a lock that could be left behind.

    `with` enters and leaves it in one C call each. (The methods in between there, which are Python functions, can be
    interrupted when the lock is taken and before anybody knows of it.)
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    _waiters: deque[_thread.LockType]
    _release_save: Callable[[], Any]
    _acquire_restore: Callable[[Any], None]
    _is_owned: Callable[[], bool]

    def wait(self, timeout: float | None = None) -> bool:
        """As for the standard one. Whatever is raised, the lock is held again."""
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        waiter = _thread.allocate_lock()
        waiter.acquire()
        released: list[Any] = []
        self._waiters.append(waiter)
        try:
            released += starmap(self._release_save, _ONCE)
            return waiter.acquire(True, -1 if timeout is None else max(0.0, timeout))
        finally:
            if released:
                self._acquire_restore(released[0])
            try:
                self._waiters.remove(waiter)
            except ValueError:  # it was notified
                pass


class Flag:
    """`threading.Event` without a lock: an exception in the middle of a wait leaves nothing behind."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[_thread.LockType] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while True:
            try:
                waiter = self._waiters.popleft()
            except IndexError:
                return
            waiter.release()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, after at most `timeout` seconds."""
        if self._is_set:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)  # before the look: who sets it afterwards finds us
        left: float = _TICK
        while not self._is_set:
            if deadline is not None and (left := deadline - time.monotonic()) <= 0:
                break
            if waiter.acquire(True, min(left, _TICK)):
                return True
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it has just been set
            pass
        return self._is_set


class Call(Generic[_T]):
    """One call: `function(call)` is what its thread does."""

    def __init__(self, function: Callable[[Call[_T]], _T]) -> None:
        self._function: Callable[[Call[_T]], _T] | None = function
        self._claim: dict[str, str] = {}  # whoever comes first: the thread, to begin, or the caller, to call it off
        self._replied, self._over = Flag(), Flag()
        self._result: Any = None
        self._error: BaseException | None = None
        self.abandoned = False
        """The caller was thrown out of its wait."""

    def run(self) -> None:
        """The thread's part."""
        function, self._function = self._function, None
        if function is None or not self._claimed_by(_THREAD):
            return
        try:
            self.reply(function(self))
        except BaseException as error:
            self._error = error
        finally:
            del function
            self._replied.set()
            self._over.set()

    def reply(self, result: _T) -> None:
        """Let the caller go on, while this call does the rest. Only the first reply counts."""
        if not self._replied.is_set():
            self._result = result
            self._replied.set()

    def wait(self, deadline: float | None, busy: Callable[[], str]) -> _T:
        """The caller's part: the result, or the error. `TimedOut` at the deadline if it has not begun; once it has, it
        looks at the clock itself. `busy()` says what it waits for."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._replied.wait(left):
            if self._claimed_by(_CALLER):
                raise TimedOut(busy())
            self._replied.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        result: _T = self._result
        return result

    def abandon(self) -> None:
        """After an exception: call it off, or wait until it has ended, which it does soon."""
        self.abandoned = True
        if not self._claimed_by(_CALLER):
            self._over.wait()

    def _claimed_by(self, who: str) -> bool:
        return self._claim.setdefault("first", who) == who  # one C call, and may be asked again


class OwnThread(Thread):
    """One of the library's own, which no other code knows: no exception is set in it."""


class CallQueue:
    """Calls and the thread that runs them. It `stays` from the first call until `stop`, or ends when it has nothing to
    do, and another one is started for the next call."""

    def __init__(self, name: str, *, stays: bool = True, daemon: bool = True) -> None:
        self._name, self._stays, self._daemon = name, stays, daemon
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._serving = _thread.allocate_lock()
        self._ident = 0

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the queue's own: it must not wait for its own calls."""
        return self._serving.locked() and self._ident == get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether there is no thread, and nothing for it to do."""
        return not self._serving.locked() and self._queue.empty()

    def put(self, function: Callable[[], None] | None) -> None:
        """Have the function called. Where no thread may be started, it is called here and now."""
        self._queue.put(function)
        if not self._serving.locked():
            try:
                _thread.start_new_thread(self._begin, ())  # one C call; two threads at once do no harm
            except RuntimeError:  # no more threads may be started, or the interpreter ends
                self._serve(stays=False)

    def stop(self) -> None:
        """End the thread when everything before is done."""
        if not self.is_idle:
            self.put(None)

    def _begin(self) -> None:
        """A thread that the caller started by one C call starts the one that `threading` knows."""
        try:
            OwnThread(target=self._serve, args=(self._stays,), name=self._name, daemon=self._daemon).start()
        except RuntimeError:
            self._serve(self._stays)

    def _serve(self, stays: bool) -> None:
        while self._serving.acquire(False):
            self._ident = get_ident()
            try:
                go_on = not self._queue.empty()  # else another thread came first, and has ended
                while go_on:
                    function = self._queue.get()
                    if function is not None:
                        function()
                    go_on = function is not None and (stays or not self._queue.empty())
                    del function
            finally:
                self._ident = 0
                self._serving.release()
            if self._queue.empty():  # else somebody has put something in before the lock was given back
                return


def aside(function: Callable[[], _T], name: str, *, wait: bool = True, complete: bool = True) -> _T | None:
    """Have the function called on a thread of its own; returns what it returns, raises what it raises.

    Args:
        wait: otherwise returns None at once.
        complete: an exception from outside is raised when the function has ended, or was not begun and will not be;
            otherwise it is raised at once, and the function goes on.

    Where the current thread is such a one already, or no thread may be started, it is called here and now. Threads that
    the function starts are daemons only if they say so.
    """
    if isinstance(threading.current_thread(), OwnThread):
        return function()
    call: Call[_T] = Call(lambda _: function())
    try:
        CallQueue(name, stays=False, daemon=False).put(call.run)
        return call.wait(None, str) if wait else None
    except BaseException:
        if complete:
            call.abandon()
        raise
