"""`Queue`, `JoinableQueue` and `SimpleQueue`: the interface of `multiprocessing`'s queues on top of a work queue.

How they differ from the standard library's, and why, is listed in docs/guide/queues.md.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import context
from queue import Empty, Full
from typing import TYPE_CHECKING, Any, Final, Generic

from ..endpoints.base import LIVENESS_INTERVAL, has_left
from ..endpoints.message import Message
from ..endpoints.spinning import Spin
from ..errors import ArgumentError, ArgumentTypeError, DependencyError, ReentrantError, TimedOut, WireError
from ..memory import lifecycle
from ..memory.descriptors import InheritedFile
from ..memory.semaphores import MOST, Counter
from ..options import context_of, parse_bytes
from ..shielded import ONCE
from . import pickling
from .pickling import Transfers
from .queue_handle import ClosedQueueError, QueueHandle, ReentrantQueueError, deadline_of, hold, locked, remaining

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default, so that `Queue()` needs no annotation

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

_MISSING: Final = object()

_ROOM_CHECK: Final = 0.01
"""Seconds after which a put that may not wait for room checks again whether another thread's put does."""

_queues: weakref.WeakSet[SimpleQueue[Any]] = weakref.WeakSet()


class PendingGet:
    """An item that is being received by the call that holds its lock, or that a call left when an exception ended
    it."""

    __slots__ = ("gave", "lock", "steps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: list[Any] = []
        """Its message, its object, and one more entry for each step that is done."""
        self.gave: list[Any] = []
        """`JoinableQueue`: one entry, once its room in the queue is given back."""


class SimpleQueue(Generic[T]):
    """`multiprocessing.SimpleQueue` through shared memory: put, get, empty, close.

    Args:
        ctx: a `multiprocessing` context or a start method's name; None for the default one. It must
            be that of the processes that get the queue.
        max_bytes: shared memory that each putting process may use, in bytes or like `"4GiB"`; None for half of
            `/dev/shm`.
        device: (experimental) such as `"cuda"`: tensors that the process which creates the queue gets from it are CUDA
            tensors, safe on the current stream. Arrays, and items that other processes get, stay in host memory.

    Tensors and arrays in an item, however deep, are copied once, into a slot; what `get` returns are writable views
    of the slot, which belong to the getter alone, and which hold the memory of their whole item as long as they live.

    >>> import shmtensor, torch
    >>> queue = shmtensor.SimpleQueue()
    >>> queue.put({"image": torch.ones(2, 2), "name": "a"})
    >>> queue.get()["image"].sum().item()
    4.0
    >>> queue.close()
    """

    _handle: QueueHandle

    _transfers: Transfers | None = None
    """Copies tensors to a device; only in the process that created the queue, so that no other one uses CUDA."""

    def __init__(self, *, ctx: Any = None, max_bytes: int | str | None = None, device: Any = None) -> None:
        transfers = Transfers.to(device)
        spawns = context_of(ctx, "ctx").get_start_method() != "fork"
        limit = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._start(*QueueHandle.create(limit, self._counts(), named=spawns))
        self._transfers = transfers

    def _counts(self) -> tuple[tuple[int, int], ...]:
        """First value and limit of each of the queue's semaphores."""
        return ((0, MOST),)

    def _start(self, handle: QueueHandle, counters: list[Counter]) -> None:
        """Begin to use a handle in this process."""
        self._handle, self._counters = handle, counters
        self._items = counters[0]
        """Posted once per item, to wake a getter."""
        handle.abandoned = self._when_abandoned()
        self._hold = hold(handle)
        self._closed = False
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        """Set the state of this process; a forked child calls it again."""
        self._putting = threading.Lock()
        self._putter_thread = 0
        """The thread that holds `_putting`."""
        self._waits_for_room = False
        """Whether it waits for room. Another put may not overtake it, so there is none for that either."""
        self._transfers = None
        self._spin, self._spin_for_room = Spin(), Spin()
        self._pending: list[PendingGet] = []
        """Items being got. No lock is held over all of them: unpickling an item may get others, in any thread."""
        self._undelivered: list[Any] = []
        """Objects of items that this process has taken. The next `get` returns what an interrupted one left."""
        self._handle.keep(self._undelivered, self._room_for_returned())

    def _when_abandoned(self) -> Any:
        """A function, without a reference to the queue, that is called when an item is dropped after too many
        attempts."""
        return _do_nothing

    def _room_for_returned(self) -> Any:
        """A function, without a reference to the queue, that is called for each undelivered object that is put back."""
        return _do_nothing

    # --- pickling for child processes

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        self._check_open()
        return self._handle.name, self._handle.max_bytes, self._handle.keeper_for_child(), self._counters

    def __setstate__(self, state: Any) -> None:
        name, max_bytes, keeper, counters = state
        self._start(QueueHandle(name, InheritedFile().adopt(keeper.detach()), max_bytes), counters)

    # --- items

    def put(self, obj: T) -> None:
        """Put any object that pickles; its tensors and arrays are copied before `put` returns.

        Raises:
            Exception: whatever pickling the object raises.
            ResourceError: the item is larger than `max_bytes`, or tensors that were got keep all of it.
            ClosedError: the queue is closed (a `ValueError`, and an `OSError`).
        """
        self._check_open()
        self._send(pickling.pack(obj), None)

    def get(self) -> T:
        """The oldest item; waits until there is one.

        Raises:
            Exception: whatever unpickling the item raises; it is gone then.
            WireError: the only putters left run another version of the library, and cannot be read; their items stay.
            DependencyError: the item has torch tensors, and torch is not installed here; it stays for another process.
            ClosedError: the queue is closed (a `ValueError`, and an `OSError`).
        """
        self._check_open()
        while True:
            undelivered: list[T] = self._undelivered
            if undelivered:  # from here to the return there is no interrupt and no thread switch
                item = undelivered[0]
                del undelivered[0]
                return item
            self._fetch(None)

    def empty(self) -> bool:
        """Whether the queue is empty now; other processes may put or get at any time."""
        self._check_open()
        left = any(pending.steps and not pending.lock.locked() for pending in self._pending)
        if left or self._undelivered:
            return False
        try:
            return bool(self._handle.getter.is_empty())
        except ReentrantQueueError:  # this thread is making the getter: every item but those of the dead is posted
            return not self._items.value()

    def _send(self, value: Any, deadline: float | None) -> None:
        if has_left():  # called by a finalizer at exit: as the standard queue once its feeder thread has ended
            return
        me = threading.get_ident()
        while self._putter_thread != me:
            if self._waits_for_room and deadline is not None and time.monotonic() >= deadline:
                raise Full("another thread of this process waits for room")
            entered = False
            try:
                # a thread that only copies its item makes no queue full
                with locked(self._putting, None if deadline is None else max(deadline, time.monotonic() + _ROOM_CHECK)):
                    self._putter_thread, entered = me, True  # no boundary before it, nor from the reset to the release
                    try:
                        self._check_open()
                        self._put(value, deadline)
                        return
                    finally:
                        self._putter_thread, self._waits_for_room = 0, False
            except StopIteration:
                if entered:
                    raise
        raise Full("called by a signal handler or a finalizer that interrupted a put of this thread")

    def _wait_for_room(self) -> None:
        """Called when a put finds no room and begins to wait."""
        self._waits_for_room = True

    def _put(self, value: Any, deadline: float | None) -> None:
        """Put an item and count it. Whatever exception is raised, both steps are done, or neither."""
        try:
            putter = self._handle.putter
        except ReentrantQueueError as error:
            raise Full(str(error)) from None
        before, reserved = putter.published, []  # type: ignore[var-annotated]
        try:
            self._reserve(reserved, deadline)
            self._waits_for_room = False
            putter.put(value, deadline, self._wait_for_room)
        except BaseException:
            if putter.published == before:
                self._undo(reserved)
            else:
                self._items.release()
            raise
        self._items.release()

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        """Count an item before it is sent. Each count and its entry in `reserved` are made by one C call."""

    def _undo(self, reserved: list[Any]) -> None:
        """Undo `_reserve`: the item was not sent."""

    def _fetch(self, deadline: float | None) -> None:
        """Fill `_undelivered`, or raise `Empty`; `WireError` if there are only items that cannot be read here, and
        `DependencyError` if the next one cannot, since a package is missing; `ReentrantQueueError` in place of an
        endless wait for the call of this thread that this one has interrupted.

        `_items` wakes a getter for each item, but shared memory decides: the item of a killed getter is not posted
        again, and is found by a look at least every `LIVENESS_INTERVAL`.
        """
        items = self._items
        posted = items.acquire(False) or (deadline != 0 and _comes_soon(self._spin, items))
        while True:
            try:
                if not self._pending and self._pop():
                    return
                received = self._receive()
            except (WireError, DependencyError):
                if posted:
                    items.release()  # for a getter that can read it
                raise
            except ReentrantQueueError as error:
                if posted:
                    items.release()
                if deadline is None:
                    raise
                raise Empty(str(error)) from None
            if received:
                return
            if not posted and deadline is not None and time.monotonic() >= deadline:
                raise Empty
            posted = items.acquire(True, remaining(deadline, LIVENESS_INTERVAL))
            self._check_open()

    def _pop(self) -> bool:
        """Take the next item in one uninterruptible call, if the compiled module is there."""
        return self._transfers is None and self._handle.getter.pop(pickling.unpack, self._undelivered, self._when_got())

    def _when_got(self) -> Callable[[], object] | None:
        """A function that is called when an item is received."""
        return None

    def _receive(self) -> bool:
        """Take an item that an interrupted call has left, else the next one; False if there is none."""
        new = PendingGet()
        for pending in (*self._pending, new):
            entered = False
            try:
                with locked(pending.lock, 0.0):
                    entered = True
                    if pending is new:
                        self._pending.append(new)
                    elif pending not in self._pending:  # got meanwhile
                        continue
                    if not self._fill(pending):
                        continue
                    self._take(pending)
                    return True
            except StopIteration:
                if entered:
                    raise  # else another call holds it
        return False

    def _fill(self, pending: PendingGet) -> bool:
        """Receive its message, if it has none; False if there is no message, and then it is removed."""
        try:
            if not pending.steps:
                pending.steps += itertools.starmap(partial(self._handle.getter.recv, timeout=0), ONCE)
            # crash: get.delivered
        except TimedOut:
            self._handle.getter.check_readable()
        except ReentrantError as error:
            raise ReentrantQueueError(str(error)) from None
        finally:
            if not pending.steps:
                self._pending.remove(pending)
        return bool(pending.steps)

    def _take(self, pending: PendingGet) -> None:
        """Unpickle the message's object, and continue with the steps from where an exception stopped them."""
        steps = pending.steps
        if len(steps) == 1:
            try:
                steps.append(self._unpack(steps[0]))
            except BaseException:
                # its own error, or an asynchronous exception: a second try shows which
                try:
                    if len(steps) == 1:
                        steps.append(self._unpack(steps[0]))
                except KeyboardInterrupt:
                    pass  # twice: it stays pending
                except BaseException:
                    steps.append(_MISSING)
                    self._complete(pending)
                raise
        self._complete(pending)

    def _complete(self, pending: PendingGet) -> None:
        """Make the item this process's own: the remaining steps, then `_undelivered`."""
        steps = pending.steps
        for step in self._steps(steps[0])[len(steps) - 2 :]:
            try:
                steps += itertools.starmap(step, ONCE)
            except ValueError:  # the counter is at its limit: a process that was killed left it one too high
                steps.append(None)
        if steps[1] is not _MISSING:  # from here on there is no interrupt
            self._undelivered += [steps[1]]
        self._pending.remove(pending)

    def _steps(self, message: Message) -> tuple[Any, ...]:
        """The steps that make an item this process's own. Each is done once, or does nothing when repeated."""
        return (message.release,)

    def _unpack(self, message: Message) -> Any:
        if self._transfers is not None:
            return self._transfers.unpack(message, self._handle.getter)
        return pickling.unpack(message.value)

    # --- the end

    def close(self) -> None:
        """Close the queue in this process. Idempotent; tensors that were got stay valid."""
        self._closed = True
        self._finish_pending()
        self._handle.close()

    def _finish_pending(self) -> None:
        """Finish items that interrupted calls have left. Those that are this process's own become undelivered, and are
        put back with the others; the rest goes back with its message."""
        for pending in list(self._pending):
            with contextlib.suppress(StopIteration), locked(pending.lock, 0.0):  # else a call holds it
                if pending in self._pending and len(pending.steps) > 2:
                    self._complete(pending)
                elif pending in self._pending:
                    self._pending.remove(pending)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedQueueError(f"{type(self).__name__} {self!r} is closed")

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self._handle.name}" {"closed" if self._closed else "open"}>'


class Queue(SimpleQueue[T]):
    """`multiprocessing.Queue` through shared memory; the interface and the meaning of all its methods.

    Args:
        maxsize: how many items it holds at most; 0 or less for no limit but that of memory.
        ctx, max_bytes, device: as for `SimpleQueue`.

    An item belongs to the process in which `get` has returned. If a process is killed inside `get`, another gets it.

    >>> import shmtensor, torch
    >>> queue = shmtensor.Queue(maxsize=2)
    >>> queue.put([torch.arange(3), "three"], timeout=1)
    >>> tensor, name = queue.get(timeout=5)
    >>> tensor += 1  # writable, and seen by no other process
    >>> tensor.tolist(), name, queue.empty()
    ([1, 2, 3], 'three', True)
    >>> queue.close()
    """

    def __init__(
        self, maxsize: int = 0, *, ctx: Any = None, max_bytes: int | str | None = None, device: Any = None
    ) -> None:
        if not isinstance(maxsize, int):
            raise ArgumentTypeError(f"maxsize must be an int, not {type(maxsize).__name__}")
        if maxsize > MOST:
            raise ArgumentError(f"maxsize must be <= {MOST}, not {maxsize}: 0 is no limit")
        self._maxsize = maxsize if maxsize > 0 else MOST
        super().__init__(ctx=ctx, max_bytes=max_bytes, device=device)

    def _counts(self) -> tuple[tuple[int, int], ...]:
        return *super()._counts(), (self._maxsize, self._maxsize)

    def _start(self, handle: QueueHandle, counters: list[Counter]) -> None:
        self._room = counters[1]
        super()._start(handle, counters)

    def _when_abandoned(self) -> Any:
        return self._room.give

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._maxsize

    def __setstate__(self, state: Any) -> None:
        handle, self._maxsize = state
        super().__setstate__(handle)

    def put(self, obj: T, block: bool = True, timeout: float | None = None) -> None:
        """Put any object that pickles; its tensors and arrays are copied before `put` returns.

        Args:
            obj: the item.
            block: whether to wait for room.
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            queue.Full: there was no room, by `maxsize` or by `max_bytes`.
            Exception: whatever pickling the object raises; nothing is put.
            ResourceError: the item is larger than `max_bytes`, or tensors that were got keep all of it.
            ClosedError: the queue is closed (a `ValueError`, and an `OSError`).
        """
        self._check_open()
        self._send(pickling.pack(obj), deadline_of(block, timeout))

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """The oldest item.

        Args:
            block: whether to wait for one.
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            queue.Empty: there was none.
            Exception: whatever unpickling the item raises; it is gone then.
            WireError, DependencyError: as for `SimpleQueue.get`.
            ClosedError: the queue is closed (a `ValueError`, and an `OSError`).
            ReentrantError: without `timeout`, in a signal handler that interrupted a `get` or `put` of this thread.
        """
        self._check_open()
        deadline = deadline_of(block, timeout)
        while True:
            undelivered: list[T] = self._undelivered
            if undelivered:  # as in `SimpleQueue.get`
                item = undelivered[0]
                del undelivered[0]
                return item
            self._fetch(deadline)

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        def take(_: int) -> bool | None:
            reserved[:] = map(self._room.acquire, (False,))  # acquired and recorded in one C call
            return reserved[0] or None

        if take(0) or (deadline != 0 and self._spin_for_room.wait(take)):
            return
        self._wait_for_room()
        while True:
            reserved[:] = map(self._room.acquire, (True,), (remaining(deadline, LIVENESS_INTERVAL),))
            if reserved[0]:
                return
            self._check_open()
            if deadline is not None and time.monotonic() >= deadline:
                raise Full

    def _undo(self, reserved: list[Any]) -> None:
        if reserved and reserved[0]:
            self._room.give()

    def _when_got(self) -> Callable[[], object] | None:
        return self._room.release  # type: ignore[no-any-return]

    def _steps(self, message: Message) -> tuple[Any, ...]:
        return message.release, self._room.release

    def _room_for_returned(self) -> Any:
        return partial(self._room.acquire, False)

    def put_nowait(self, obj: T) -> None:
        """`put(obj, block=False)`."""
        self.put(obj, False)

    def get_nowait(self) -> T:
        """`get(block=False)`."""
        return self.get(False)

    def qsize(self) -> int:
        """The number of items in the queue now; other processes may put or get at any time."""
        return int(self._maxsize - self._room.value())

    def full(self) -> bool:
        """Whether the queue has `maxsize` items now; other processes may put or get at any time."""
        return bool(self._room.value() == 0)

    def join_thread(self) -> None:
        """Do nothing: `put` has copied its item when it returns, there is no thread.

        Raises `ValueError` unless the queue is closed, as the standard library does.
        """
        if not self._closed:
            raise ValueError(f"{type(self).__name__} {self!r} is not closed")

    def cancel_join_thread(self) -> None:
        """Do nothing: no thread keeps the process from ending, and items that were put are not lost."""


def _comes_soon(spin: Spin, semaphore: Any) -> bool:
    """Whether the semaphore was acquired by spinning, before it pays to sleep."""
    return spin.wait(lambda _: semaphore.acquire(False) or None) is not None


def _do_nothing() -> None:
    """Do nothing: used where items are not counted."""


def _after_fork() -> None:
    for queue in list(_queues):  # their handles have begun anew
        queue._begin()


lifecycle.call_in_child(_after_fork)


class JoinableQueue(Queue[T]):
    """`multiprocessing.JoinableQueue` through shared memory: a `Queue` with `task_done` and `join`.

    An item is done when `task_done` was called for it. If a process ends before that, however it ends, its
    unfinished items are delivered to others: `join` does not wait for a worker that was killed.

    >>> import shmtensor
    >>> queue = shmtensor.JoinableQueue()
    >>> queue.put("work")
    >>> queue.get()
    'work'
    >>> queue.task_done()
    >>> queue.join()
    >>> queue.close()
    """

    def _counts(self) -> tuple[tuple[int, int], ...]:
        return *super()._counts(), (0, MOST), (0, MOST), (0, MOST)

    def _start(self, handle: QueueHandle, counters: list[Counter]) -> None:
        self._tasks = _Tasks(*counters[2:])
        super()._start(handle, counters)

    def _begin(self) -> None:
        self._held = _Held()
        super()._begin()

    def _when_abandoned(self) -> Any:
        return self._tasks.forget

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        super()._reserve(reserved, deadline)
        reserved += itertools.starmap(self._tasks.begin, ONCE)  # before any process can get it and call `task_done`

    def _undo(self, reserved: list[Any]) -> None:
        if len(reserved) > 1:
            self._tasks.forget()
        super()._undo(reserved)

    def _pop(self) -> bool:
        return False  # an item is held as a message until its task is done

    def _take(self, pending: PendingGet) -> None:
        if pending.steps[0].attempt == 1 and not pending.gave:
            # before it is unpickled, and only at the first attempt: after a death the room is not given back again
            try:
                pending.gave += itertools.starmap(self._room.release, ONCE)
            except ValueError:
                pending.gave.append(None)
        super()._take(pending)

    def _steps(self, message: Message) -> tuple[Any, ...]:
        return (self._held.adding(message),)

    def _complete(self, pending: PendingGet) -> None:
        super()._complete(pending)
        self._held.trim(self._tasks)

    def task_done(self) -> None:
        """Mark an item as done: the oldest unfinished one that this thread received, else the oldest of this process.

        Raises `ValueError` if it is called more often than items were put. If an asynchronous exception ends it, the
        item may be done or not.
        """
        if not self._held.finish(self._tasks):
            raise ValueError("task_done() called too many times")
        self._tasks.notify()

    def join(self) -> None:
        """Wait until every item that was put is done."""
        open_before = not self._closed
        before = self._tasks.rounds()
        while self._tasks.unfinished and self._tasks.rounds() == before:
            self._tasks.sleep()
            if open_before:
                self._check_open()
        self._tasks.wake()

    def close(self) -> None:
        """As `Queue.close`; items that this process got and has not marked as done are given back."""
        self._finish_pending()
        self._held.complete()
        self._undelivered.clear()  # their messages are in `_held`
        self._held = _Held()
        super().close()


class _Tasks:
    """The number of items that are not done, shared by the processes of a queue.

    There is no lock. A process that brings `unfinished` to 0 adds one to `rounds`, so that a waiter sees it even if
    more was put since, and posts `wakeups`. A waiter that wakes, by a post or every `LIVENESS_INTERVAL`, checks the
    other two, and posts `wakeups` again for the next waiter. (After 2 ** 31 rounds a waiter has to see the 0.)
    """

    def __init__(self, unfinished: Counter, rounds: Counter, wakeups: Counter) -> None:
        self._unfinished, self._rounds, self._wakeups = unfinished, rounds, wakeups
        self.begin = unfinished.release
        """Count one more."""
        self.rounds = rounds.value

    @property
    def unfinished(self) -> int:
        return int(self._unfinished.value())

    def finishing(self) -> Any:
        """A function that counts one less; it returns False if there is none."""
        return partial(self._unfinished.acquire, False)

    def notify(self) -> None:
        """After counting one less: wake waiters if it was the last one."""
        if not self._unfinished.value():
            self._rounds.give()
            self.wake()

    def forget(self) -> None:
        """Count one less, for an item that was not put after all or was dropped."""
        if self._unfinished.acquire(False):
            self.notify()

    def sleep(self) -> None:
        self._wakeups.acquire(True, LIVENESS_INTERVAL)

    def wake(self) -> None:
        if not self._wakeups.value():
            self._wakeups.release()


class _Held:
    """Items that this process got and has not marked as done: (thread, message), oldest first. They are given back when
    this object dies.

    Whatever marks one as done holds the lock. A signal handler or finalizer that interrupts such a call, in the same
    thread, counts its item only; the interrupted call releases both. So nobody else removes an item meanwhile.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._messages: collections.deque[tuple[int, Message]] = collections.deque()
        self._finishing: list[list[Any]] = []
        """Of each `finish` that has not ended: its thread, whether it has counted one, the entry that is released."""

    def adding(self, message: Message) -> Any:
        """A function that adds a message that this thread got."""
        return partial(self._messages.append, (threading.get_ident(), message))

    def finish(self, tasks: _Tasks) -> bool:
        """Mark one as done; False if no process has any."""
        record: list[Any] = [threading.get_ident()]
        if self._lock._is_owned():
            return self._count(record, tasks)
        try:
            with self._lock:
                return self._count(record, tasks)
        finally:
            self.complete()

    def _count(self, record: list[Any], tasks: _Tasks) -> bool:
        finishing = tasks.finishing()
        self._finishing.append(record)
        record += itertools.starmap(finishing, ONCE)
        return bool(record[1])

    def complete(self) -> None:
        """Release an entry for each item that was counted as done."""
        if self._lock._is_owned():
            return
        while self._finishing:  # also what a handler adds as the lock is released
            with self._lock:
                self._release_counted()

    def _release_counted(self) -> None:
        while self._finishing:
            record = self._finishing[0]
            if len(record) == 2 and record[1]:
                entries = list(self._messages)
                record.append(next((entry for entry in entries if entry[0] == record[0]), (*entries, None)[0]))
            if len(record) > 2 and record[2] is not None:
                self._release(record[2])
            del self._finishing[0]

    def _release(self, entry: tuple[int, Message]) -> None:
        entry[1].release()
        with contextlib.suppress(ValueError):  # an exception came after it was removed
            self._messages.remove(entry)

    def trim(self, tasks: _Tasks) -> None:
        """Release those beyond the number of unfinished items: other processes called `task_done` for them."""
        if self._lock._is_owned():
            return
        with self._lock:
            self._trim(tasks)
        self.complete()

    def _trim(self, tasks: _Tasks) -> None:
        while True:
            self._release_counted()
            held = len(self._messages)  # before the count, which includes what another thread gets now
            surplus = held - tasks.unfinished
            if self._finishing:  # a handler's, which the surplus includes
                continue
            if surplus <= 0:
                break
            self._release(self._messages[0])
