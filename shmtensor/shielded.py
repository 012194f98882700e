"""Calls that run on a thread of their own, one after the other, where no asynchronous exception arrives.

An asynchronous exception (Ctrl-C, a signal handler that raises, a time-out library) is raised in the thread that makes
a public call, between any two steps of it. So there a call only puts a `Call` into a queue and waits for its end, both
without a lock that could stay held. The queue's thread makes all effects (locks, slots, processes, files). A caller
whose wait is interrupted abandons the call: it is not begun any more, or it ends soon, and its effects are undone or
complete.

A signal handler that makes a call while its thread is inside one waits in the same queue. No deadlock: the interrupted
call holds nothing.
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
ONCE: Final = ((),)
"""`record += starmap(call, ONCE)` calls a C function and appends what it returns, with nothing in between."""
_LIVENESS_INTERVAL: Final = 0.25
"""Longest single wait, seconds: the handler of a signal that comes just before the wait runs after it."""
_THREAD: Final = "thread"
_CALLER: Final = "caller"


class Timed:
    """For `with`: hold a lock that is implemented in C. Raises `StopIteration` if it is not free within `seconds`.

    Both of its methods are C functions: the lock is held when the block has begun, and only then.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, seconds: float) -> None:
        self.__enter__ = filter(None, map(lock.acquire, (True,), (seconds,))).__next__
        self.__exit__ = lock.__exit__


class Condition(threading.Condition):
    """A condition for the standard library's futures whose lock no asynchronous exception leaves held.

    `with` enters and leaves it in one C call each. (The standard methods are Python functions, and can be interrupted
    after the lock is acquired and before the `with` statement has begun.)
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    _waiters: deque[_thread.LockType]
    _release_save: Callable[[], Any]
    _acquire_restore: Callable[[Any], None]
    _is_owned: Callable[[], bool]

    def wait(self, timeout: float | None = None) -> bool:
        """As the standard library's. Whatever is raised, the lock is held afterwards."""
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        waiter = _thread.allocate_lock()
        waiter.acquire()
        released: list[Any] = []
        self._waiters.append(waiter)
        try:
            released += starmap(self._release_save, ONCE)
            return waiter.acquire(True, -1 if timeout is None else max(0.0, timeout))
        finally:
            if released:
                self._acquire_restore(released[0])
            try:
                self._waiters.remove(waiter)
            except ValueError:  # it was notified
                pass


class Flag:
    """`threading.Event` without a lock that an exception in a wait could leave held."""

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
        self._waiters.append(waiter)  # before the check below: a later `set` finds this waiter
        left: float = _LIVENESS_INTERVAL
        while not self._is_set:
            if deadline is not None and (left := deadline - time.monotonic()) <= 0:
                break
            if waiter.acquire(True, min(left, _LIVENESS_INTERVAL)):
                return True
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it has just been set
            pass
        return self._is_set


class Call(Generic[_T]):
    """One call: it is put into a `CallQueue`, whose thread runs `function(call)`."""

    def __init__(self, function: Callable[[Call[_T]], _T]) -> None:
        self._function: Callable[[Call[_T]], _T] | None = function
        self._claim: dict[str, str] = {}  # of the first: the thread, to begin, or the caller, to cancel
        self._replied, self._over = Flag(), Flag()
        self._result: Any = None
        self._error: BaseException | None = None
        self.abandoned = False
        """The caller's wait was ended by an exception."""

    def __call__(self) -> None:
        """Run the function, unless the caller has cancelled the call. Called by the queue's thread."""
        function, self._function = self._function, None
        if function is None or not self._claimed_by(_THREAD):
            return
        try:
            self.reply(function(self))
        except BaseException as error:
            self._error = error
        finally:
            del function
            self._over.set()  # first: whoever has the reply finds that it is over
            self._replied.set()

    def reply(self, result: _T) -> None:
        """Return a result to the caller before the function has ended. Only the first reply counts."""
        if not self._replied.is_set():
            self._result = result
            self._replied.set()

    def wait(self, deadline: float | None, busy: Callable[[], str], queue: CallQueue) -> _T:
        """Wait for the result, and return it or raise the error. For the caller, who has put it into the queue.

        Raises `TimedOut(busy())` at the deadline if another call is before it. If none is, it begins, although its time
        is up; the function checks the time itself.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._replied.wait(left):
            if not queue.is_next(self) and self._claimed_by(_CALLER):
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
        """After an exception in the caller: cancel the call, or, if it has begun, wait until it has ended, which is
        soon."""
        self.abandoned = True
        if not self._claimed_by(_CALLER):
            self._over.wait()

    @property
    def is_over(self) -> bool:
        """Whether the function has ended."""
        return self._over.is_set()

    def _claimed_by(self, who: str) -> bool:
        return self._claim.setdefault("first", who) == who  # one C call; gives the same answer when repeated


class OwnThread(Thread):
    """A thread of the library that no other code knows, so that no exception is set in it."""


class CallQueue:
    """A queue of calls and the thread that runs them. With `stays` the thread lives from the first call until `stop`;
    without, it ends when the queue is empty, and the next call starts another one."""

    def __init__(self, name: str, *, stays: bool = True, daemon: bool = True) -> None:
        self._name, self._stays, self._daemon = name, stays, daemon
        self._calls: deque[Callable[[], None] | None] = deque()  # the first is being made
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # one for each call, if the thread stays
        self._serving = _thread.allocate_lock()
        self._ident = 0

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the queue's own: it must not wait for its own calls."""
        return self._serving.locked() and self._ident == get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether there is no thread, and the queue is empty."""
        return not self._serving.locked() and not self._calls

    def is_next(self, call: Call[Any]) -> bool:
        """Whether every call that was put in before this one is over."""
        for each in self._calls.copy():
            if each is call:
                break
            if not (isinstance(each, Call) and each.is_over):
                return False
        return True

    def put(self, function: Callable[[], None] | None) -> None:
        """Have the function called by the thread. If no thread can be started, it is called here, now."""
        self._calls.append(function)
        if self._stays:
            self._wakeups.put(None)
        if not self._serving.locked():
            try:
                _thread.start_new_thread(self._begin, ())  # one C call; two threads at once do no harm
            except RuntimeError:  # no more threads can be started, or the interpreter exits
                self._serve(stays=False)

    def stop(self) -> None:
        """End the thread when all calls before are done."""
        if not self.is_idle:
            self.put(None)

    def _begin(self) -> None:
        """Run in a thread that the caller started by one C call: start a thread that `threading` knows."""
        try:
            OwnThread(target=self._serve, args=(self._stays,), name=self._name, daemon=self._daemon).start()
        except RuntimeError:
            self._serve(self._stays)

    def _serve(self, stays: bool) -> None:
        while self._serving.acquire(False):
            self._ident = get_ident()
            try:
                go_on = bool(self._calls)  # else another thread has made all
                while go_on:
                    go_on = self._make_first() and (bool(self._calls) or (stays and self._wait()))
            finally:
                self._ident = 0
                self._serving.release()
            if not self._calls:  # else a call was put in before the lock was released
                return

    def _make_first(self) -> bool:
        """Make the first call; False for the end of the thread."""
        function = self._calls[0]
        try:
            if function is not None:
                function()
        finally:
            self._calls.popleft()
        return function is not None

    def _wait(self) -> bool:
        """Wait for a call."""
        while not self._calls:
            self._wakeups.get()
        return True


def aside(function: Callable[[], _T], name: str, *, wait: bool = True, complete: bool = True) -> _T | None:
    """Call the function on a thread of its own; return what it returns, raise what it raises.

    Args:
        wait: otherwise returns None at once.
        complete: an asynchronous exception is raised when the function has ended or will not begin; otherwise it is
            raised at once, and the function goes on.

    If this is such a thread already, or no thread can be started, the function is called in this thread. Threads that
    the function starts are not daemons by default.
    """
    if isinstance(threading.current_thread(), OwnThread):
        return function()
    call: Call[_T] = Call(lambda _: function())
    queue = CallQueue(name, stays=False, daemon=False)
    try:
        queue.put(call)
        return call.wait(None, str, queue) if wait else None
    except BaseException:
        if complete:
            call.abandon()
        raise
