"""`Queue`, `JoinableQueue` and `SimpleQueue`: the interface of `multiprocessing`'s queues on top of a work queue.

How they differ from the standard library's, and why, is listed in docs/guide/queues.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import context, util
from queue import Empty, Full
from typing import TYPE_CHECKING, Any, Final, Generic

import numpy as np

from ..endpoints.base import TICK
from ..endpoints.message import Message
from ..endpoints.spinning import Spin
from ..errors import ArgumentTypeError, TimedOut, WireError
from ..memory import forks
from ..memory.counters import MOST, Counter
from ..startmethod import context_of
from ..units import parse_bytes
from . import pickling
from .arrivals import Arrivals
from .deadlines import ONCE, deadline_of, locked, remaining
from .link import Link

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default, so that `Queue()` needs no annotation

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

_EXIT_PRIORITY: Final = -10
"""Of the finalizers: after `multiprocessing` has joined its children, as the last one to let go removes the queue."""

_MISSING: Final = object()

_queues: weakref.WeakSet[SimpleQueue[Any]] = weakref.WeakSet()
_links: dict[int, tuple[weakref.ref[Any], Link]] = {}
"""Of every queue: by its identity, the weak reference to `_hold`, and the link.

The end of a hold is the end of its queue. It is an array because the garbage collector does not track arrays: it dies
after every `__del__` that may still use the queue. torch's DataLoader iterator tells its workers there to end.
"""


class Hand:
    """An item that is being got: by the call that has its lock, or left by one that an exception ended."""

    __slots__ = ("gave", "lock", "steps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: list[Any] = []
        """Its message, its object, and one entry more for each step done."""
        self.gave: list[Any] = []
        """`JoinableQueue`: one entry, once it has given room."""


class SimpleQueue(Generic[T]):
    """`multiprocessing.SimpleQueue` through shared memory: put, get, empty, close.

    Args:
        ctx: a `multiprocessing` context or a start method's name; None for the default one. It must
            be that of the processes that get the queue.
        max_bytes: shared memory that each putting process may use, in bytes or like `"4GiB"`; None for half of
            `/dev/shm`.
        device: such as `"cuda"`: tensors that the process which makes the queue gets from it are CUDA tensors, safe on
            the stream that is current. Arrays, and what other processes get, stay in host memory.

    Tensors and arrays in an item, however deep, are copied once, into a slot; what `get` returns are writable views
    of the slot, which belong to the getter alone, and which hold the memory of their whole item as long as they live.

    >>> import shmtensor, torch
    >>> queue = shmtensor.SimpleQueue()
    >>> queue.put({"image": torch.ones(2, 2), "name": "a"})
    >>> queue.get()["image"].sum().item()
    4.0
    >>> queue.close()
    """

    _link: Link

    _arrivals: Arrivals | None = None
    """Brings tensors to a device; only in the process that made the queue, so that no other touches CUDA."""

    def __init__(self, *, ctx: Any = None, max_bytes: int | str | None = None, device: Any = None) -> None:
        arrivals = Arrivals.to(device)
        spawns = context_of(ctx, "ctx").get_start_method() != "fork"
        limit = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._start(*Link.create(limit, self._counts(), named=spawns))
        self._arrivals = arrivals

    def _counts(self) -> tuple[tuple[int, int], ...]:
        """What the queue's semaphores count from, and up to."""
        return ((0, MOST),)

    def _start(self, link: Link, counters: list[Counter]) -> None:
        """Begin to use a link in this process."""
        self._link, self._counters = link, counters
        self._items = counters[0]
        """Posted once per item: what wakes a getter."""
        link.abandoned = self._when_abandoned()
        self._hold = np.empty(0)
        hold = weakref.ref(self._hold, _let_go)
        _links[id(hold)] = hold, link
        self._closed = False
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        """What belongs to one process; again in a forked child."""
        self._putting = threading.Lock()
        self._arrivals = None
        self._spin, self._spin_for_room = Spin(), Spin()
        self._hands: list[Hand] = []
        """What is being got. No lock is held over all of them: unpickling an item may get others, in any thread."""
        self._undelivered: list[Any] = []
        """Objects of items that are taken for good: what an interrupted `get` left, the next one returns."""
        self._link.keep(self._undelivered, self._room_for_returned())

    def _when_abandoned(self) -> Any:
        """What to call, without a reference to the queue, when an item is dropped after too many attempts."""
        return _nothing

    def _room_for_returned(self) -> Any:
        """What to call, without a reference to the queue, for each undelivered object that is put back."""
        return _nothing

    # --- into children

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        self._check_open()
        return self._link.name, self._link.max_bytes, self._link.keeper_for_child(), self._counters

    def __setstate__(self, state: Any) -> None:
        name, max_bytes, keeper, counters = state
        descriptor = keeper.detach()
        os.set_inheritable(descriptor, False)
        self._start(Link(name, descriptor, max_bytes), counters)

    # --- items

    def put(self, obj: T) -> None:
        """Put any object that pickles; its tensors and arrays are copied before `put` returns.

        Raises:
            Exception: whatever pickling the object raises.
            ResourceError: the item is larger than `max_bytes`, or tensors that were got keep all of it.
            ValueError: the queue is closed.
        """
        self._check_open()
        self._send(pickling.pack(obj), None)

    def get(self) -> T:
        """The oldest item; waits until there is one.

        Raises:
            Exception: whatever unpickling the item raises; it is gone then.
            WireError: processes that put live and cannot be read, being of another version of the library, and no
                others are left; their items stay.
            ValueError: the queue is closed.
        """
        self._check_open()
        while True:
            undelivered: list[T] = self._undelivered
            if undelivered:  # from here to the return nothing can be interrupted, nor another thread run
                item = undelivered[0]
                del undelivered[0]
                return item
            self._fetch(None)

    def empty(self) -> bool:
        """Whether there is nothing to get just now; others may put or get at any time."""
        self._check_open()
        left = any(hand.steps and not hand.lock.locked() for hand in self._hands)
        return not left and not self._undelivered and self._link.getter.is_empty()

    def _send(self, value: Any, deadline: float | None) -> None:
        entered = False
        try:
            with locked(self._putting, deadline):
                entered = True
                self._check_open()
                self._put(value, deadline)
        except StopIteration:
            if entered:
                raise
            raise Full("another thread of this process waits for room") from None

    def _put(self, value: Any, deadline: float | None) -> None:
        """Whatever is raised, wherever: the item is there whole, and counted, or it is neither."""
        putter = self._link.putter
        before, reserved = putter.published, []  # type: ignore[var-annotated]
        try:
            self._reserve(reserved, deadline)
            putter.put(value, deadline)
        except BaseException:
            if putter.published == before:
                self._undo(reserved)
            else:
                self._items.release()
            raise
        self._items.release()

    def _reserve(self, reserved: list[Any], deadline: float | None) -> None:
        """Count an item before it is there; each count and its entry in `reserved` are one."""

    def _undo(self, reserved: list[Any]) -> None:
        """It did not come."""

    def _fetch(self, deadline: float | None) -> None:
        """Have something undelivered, or raise `Empty`; `WireError` if there are only items that cannot be read here.

        `_items` wakes who waits, once per item, but shared memory is the truth: what a killed getter gives back has no
        post of its own, and is found by looking around once per tick.
        """
        items = self._items
        posted = items.acquire(False) or (deadline != 0 and _comes_soon(self._spin, items))
        while True:
            if not self._hands and self._pop():
                return
            try:
                received = self._receive()
            except WireError:
                if posted:
                    items.release()  # whoever can read it may get it
                raise
            if received:
                return
            if not posted and deadline is not None and time.monotonic() >= deadline:
                raise Empty
            posted = items.acquire(True, remaining(deadline, TICK))
            self._check_open()

    def _pop(self) -> bool:
        """Take the next item, in one call that nothing interrupts, where the compiled module does that."""
        return self._arrivals is None and self._link.getter.pop(pickling.unpack, self._undelivered, self._when_got())

    def _when_got(self) -> Callable[[], object] | None:
        """Called when an item is got."""
        return None

    def _receive(self) -> bool:
        """Take what an interrupted call has left, else the next item; False if there is none."""
        new = Hand()
        for hand in (*self._hands, new):
            entered = False
            try:
                with locked(hand.lock, 0.0):
                    entered = True
                    if hand is new:
                        self._hands.append(new)
                    elif hand not in self._hands:  # got meanwhile
                        continue
                    if not self._fill(hand):
                        continue
                    self._take(hand)
                    return True
            except StopIteration:
                if entered:
                    raise  # else another call has it
        return False

    def _fill(self, hand: Hand) -> bool:
        """Have a message in it; False, and it is gone, if there is none."""
        try:
            if not hand.steps:
                hand.steps += itertools.starmap(partial(self._link.getter.recv, timeout=0), ONCE)
        except TimedOut:
            pass
        finally:
            if not hand.steps:
                self._hands.remove(hand)
        return bool(hand.steps)

    def _take(self, hand: Hand) -> None:
        """Make the object of the message in hand, and go on with its steps from where an exception stopped them."""
        steps = hand.steps
        if len(steps) == 1:
            try:
                steps.append(self._unpack(steps[0]))
            except BaseException:
                # its own error, or an exception that arrived there from outside: which of the two a second try tells
                try:
                    if len(steps) == 1:
                        steps.append(self._unpack(steps[0]))
                except KeyboardInterrupt:
                    pass  # twice: it stays in hand
                except BaseException:
                    steps.append(_MISSING)
                    self._settle(hand)
                raise
        self._settle(hand)

    def _settle(self, hand: Hand) -> None:
        """The item is its getter's."""
        steps = hand.steps
        for step in self._steps(steps[0])[len(steps) - 2 :]:
            try:
                steps += itertools.starmap(step, ONCE)
            except ValueError:  # a counter at its limit already: a process that was killed left it one too high
                steps.append(None)
        if steps[1] is not _MISSING:  # from here on nothing can be interrupted
            self._undelivered += [steps[1]]
        self._hands.remove(hand)

    def _steps(self, message: Message) -> tuple[Any, ...]:
        """What makes an item its getter's; each is done once, or does nothing when repeated."""
        return (message.release,)

    def _unpack(self, message: Message) -> Any:
        if self._arrivals is not None:
            return self._arrivals.unpack(message, self._link.getter)
        return pickling.unpack(message.value)

    # --- the end

    def close(self) -> None:
        """Say that this process puts and gets no more. Idempotent; tensors that were got stay valid."""
        self._closed = True
        self._finish_hands()
        self._link.close()

    def _finish_hands(self) -> None:
        """What calls that an exception ended have left: an item that is this process's is undelivered then, and is put
        back with the others; any other one is given back with its message."""
        for hand in list(self._hands):
            with contextlib.suppress(StopIteration), locked(hand.lock, 0.0):  # else a call has it
                if hand in self._hands and len(hand.steps) > 2:
                    self._settle(hand)
                elif hand in self._hands:
                    self._hands.remove(hand)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{type(self).__name__} {self!r} is closed")

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self._link.name}" {"closed" if self._closed else "open"}>'


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
        self._maxsize = maxsize if maxsize > 0 else MOST
        super().__init__(ctx=ctx, max_bytes=max_bytes, device=device)

    def _counts(self) -> tuple[tuple[int, int], ...]:
        return *super()._counts(), (self._maxsize, self._maxsize)

    def _start(self, link: Link, counters: list[Counter]) -> None:
        self._room = counters[1]
        super()._start(link, counters)

    def _when_abandoned(self) -> Any:
        return self._room.give

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._maxsize

    def __setstate__(self, state: Any) -> None:
        link, self._maxsize = state
        super().__setstate__(link)

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
            ValueError: the queue is closed.
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
            WireError: as for `SimpleQueue.get`.
            ValueError: the queue is closed.
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
            reserved[:] = map(self._room.acquire, (False,))  # taken and noted in one C call
            return reserved[0] or None

        if take(0) or (deadline != 0 and self._spin_for_room.wait(take)):
            return
        while True:
            reserved[:] = map(self._room.acquire, (True,), (remaining(deadline, TICK),))
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
        """How many items there are just now; others may put or get at any time."""
        return int(self._maxsize - self._room.value())

    def full(self) -> bool:
        """Whether there are `maxsize` items just now."""
        return bool(self._room.value() == 0)

    def join_thread(self) -> None:
        """Nothing to wait for: `put` has copied its item when it returns, there is no thread.

        Raises `ValueError` unless the queue was closed, as the standard library's requires.
        """
        if not self._closed:
            raise ValueError(f"{type(self).__name__} {self!r} is not closed")

    def cancel_join_thread(self) -> None:
        """Nothing to cancel: no thread keeps the process from ending, and what was put is not lost by its end."""


def _comes_soon(spin: Spin, semaphore: Any) -> bool:
    """Whether it is posted, and taken, before it pays to sleep."""
    return spin.wait(lambda _: semaphore.acquire(False) or None) is not None


def _nothing() -> None:
    """Nobody counts the items."""


def _watch(*_: object) -> None:
    """Let go of every link when this process ends."""
    util.Finalize(None, _end_all, exitpriority=_EXIT_PRIORITY)


def _let_go(hold: weakref.ref[Any]) -> None:
    """A queue is garbage."""
    _, link = _links.pop(id(hold))
    link.close()


def _end_all() -> None:
    for _, link in list(_links.values()):
        link.end()


def _after_fork() -> None:
    for queue in list(_queues):
        queue._link.start_anew()
        queue._begin()
    _watch()


_watch()
util.register_after_fork(_watch, _watch)  # children of `multiprocessing` forget finalizers as they start
forks.call_in_child(_after_fork)
