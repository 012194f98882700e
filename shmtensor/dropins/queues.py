"""`Queue`, `JoinableQueue` and `SimpleQueue`: the interface of `multiprocessing`'s queues on top of a work queue.

How they differ from the standard library's, and why, is listed in docs/queues.md.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from multiprocessing import context, synchronize, util
from queue import Empty, Full
from types import GenericAlias
from typing import Any, Final

import numpy as np

from ..endpoints.base import TICK
from ..endpoints.message import Message
from ..errors import ArgumentTypeError, TimedOut
from ..units import parse_bytes
from . import pickling
from .arrivals import Arrivals
from .deadlines import deadline_of, remaining
from .link import Link
from .startmethod import context_of

_EXIT_PRIORITY: Final = -10
"""Of the finalizers: after `multiprocessing` has joined its children, as the last one to let go removes the queue."""

_UNLIMITED: Final[int] = synchronize.SEM_VALUE_MAX  # type: ignore[attr-defined]

_SPIN: Final = 50e-6
"""Seconds that a getter stays awake before it sleeps: waking it costs its putter a system call, and itself more."""

_MISSING: Final = object()

_queues: weakref.WeakSet[SimpleQueue] = weakref.WeakSet()
_links: dict[int, tuple[weakref.ref[Any], Link]] = {}
"""Of every queue: by its identity, the weak reference to `_hold`, and the link.

The end of a hold is the end of its queue. It is an array because the garbage collector does not track arrays: it dies
after every `__del__` that may still use the queue. torch's DataLoader iterator tells its workers there to end.
"""


class SimpleQueue:
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
        self._open(context_of(ctx), None if max_bytes is None else parse_bytes(max_bytes, "max_bytes"))
        self._arrivals = arrivals

    def _open(self, ctx: Any, max_bytes: int | None) -> None:
        """Make a new queue."""
        self._items = ctx.Semaphore(0)
        self._start(Link.create(max_bytes, self._when_abandoned()))

    def _start(self, link: Link) -> None:
        """Begin to use a link in this process."""
        self._link = link
        self._hold = np.empty(0)
        hold = weakref.ref(self._hold, _let_go)
        _links[id(hold)] = hold, link
        self._closed = False
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        """What belongs to one process; again in a forked child."""
        self._putting, self._getting = threading.Lock(), threading.Lock()
        self._arrivals = None

    def _when_abandoned(self) -> Any:
        """What to call, without a reference to the queue, when an item is dropped after too many attempts."""
        return _nothing

    # --- into children

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        self._check_open()
        return self._link.name, self._link.max_bytes, self._link.keeper_for_child(), self._items

    def __setstate__(self, state: Any) -> None:
        name, max_bytes, keeper, self._items = state
        descriptor = keeper.detach()
        os.set_inheritable(descriptor, False)
        self._start(Link(name, descriptor, max_bytes, self._when_abandoned()))

    # --- items

    def put(self, obj: Any) -> None:
        """Put any object that pickles; its tensors and arrays are copied before `put` returns.

        Raises:
            Exception: whatever pickling the object raises.
            ResourceError: the item is larger than `max_bytes`, or tensors that were got keep all of it.
            ValueError: the queue is closed.
        """
        self._check_open()
        self._send(pickling.pack(obj), None)

    def get(self) -> Any:
        """The oldest item; waits until there is one."""
        return self._take(None)

    def empty(self) -> bool:
        """Whether there is nothing to get just now; others may put or get at any time."""
        self._check_open()
        return self._link.getter.is_empty()

    def _send(self, value: Any, deadline: float | None) -> None:
        if not (self._putting.acquire(False) or self._putting.acquire(timeout=remaining(deadline))):
            raise Full("another thread of this process waits for memory")
        try:
            self._link.putter.put(value, deadline)
        finally:
            self._putting.release()
        self._items.release()

    def _take(self, deadline: float | None) -> Any:
        self._check_open()
        posted = self._items.acquire(False)
        while True:
            if posted:
                item = self._pop()
                if item is not _MISSING:
                    return item
            message = self._receive(deadline, posted)
            if message is not None:
                break
            posted = True
        self._note(message)
        try:
            if self._arrivals is not None:
                return self._arrivals.unpack(message, self._link.getter)
            return pickling.unpack(message.value)
        finally:  # not before: whoever is killed in here has got nothing
            self._settle(message)

    def _pop(self) -> Any:
        """The next item, if it is a small plain object that came the compiled way, or `_MISSING`."""
        try:
            item = self._link.getter.pop(_MISSING)
        except BaseException:
            self._popped()
            raise
        if item is not _MISSING:
            self._popped()
        return item

    def _popped(self) -> None:
        """An item is its getter's, without a message."""

    def _note(self, message: Message) -> None:
        """An item has come, and is about to be unpickled."""

    def _settle(self, message: Message) -> None:
        """The item is its getter's."""
        message.release()

    def _receive(self, deadline: float | None, posted: bool) -> Message | None:
        """The next message; None if there is one, and it may be one to pop."""
        if not (self._getting.acquire(False) or self._getting.acquire(timeout=remaining(deadline))):
            if posted:
                self._items.release()
            raise Empty
        try:
            return self._await(deadline, posted)
        finally:
            self._getting.release()

    def _await(self, deadline: float | None, posted: bool) -> Message | None:
        """`_items` wakes who waits, once per item, but shared memory is the truth: what a killed getter gives back has
        no post of its own, and is found by looking around once per tick."""
        getter, items = self._link.getter, self._items
        if not posted and deadline != 0 and _comes_soon(items):
            return None
        while True:
            try:
                return getter.recv(timeout=0)
            except TimedOut:
                pass
            if not posted and deadline is not None and time.monotonic() >= deadline:
                raise Empty
            pause = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            posted = items.acquire(True, max(0.0, pause))
            if posted:
                return None

    # --- the end

    def close(self) -> None:
        """Say that this process puts and gets no more. Idempotent; tensors that were got stay valid."""
        self._closed = True
        self._link.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{type(self).__name__} {self!r} is closed")

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self._link.name}" {"closed" if self._closed else "open"}>'

    __class_getitem__: Any = classmethod(GenericAlias)


class Queue(SimpleQueue):
    """`multiprocessing.Queue` through shared memory; the interface and the meaning of all its methods.

    Args:
        maxsize: how many items it holds at most; 0 or less for no limit but that of memory.
        ctx, max_bytes, device: as for `SimpleQueue`.

    An item is its getter's once `get` has returned. A getter that is killed before gives it back, and another one
    gets it.

    >>> import shmtensor, torch
    >>> queue = shmtensor.Queue(maxsize=2)
    >>> queue.put([torch.arange(3), "three"], timeout=1)
    >>> tensor, name = queue.get(timeout=5)
    >>> tensor += 1  # writable, and nobody else's
    >>> tensor.tolist(), name, queue.empty()
    ([1, 2, 3], 'three', True)
    >>> queue.close()
    """

    def __init__(
        self, maxsize: int = 0, *, ctx: Any = None, max_bytes: int | str | None = None, device: Any = None
    ) -> None:
        if not isinstance(maxsize, int):
            raise ArgumentTypeError(f"maxsize must be an int, not {type(maxsize).__name__}")
        self._maxsize = maxsize if maxsize > 0 else _UNLIMITED
        super().__init__(ctx=ctx, max_bytes=max_bytes, device=device)

    def _open(self, ctx: Any, max_bytes: int | None) -> None:
        self._room = ctx.BoundedSemaphore(self._maxsize)
        super()._open(ctx, max_bytes)

    def _when_abandoned(self) -> Any:
        return functools.partial(_give_room, self._room)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._maxsize, self._room

    def __setstate__(self, state: Any) -> None:
        link, self._maxsize, self._room = state
        super().__setstate__(link)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
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
        value = pickling.pack(obj)
        deadline = deadline_of(block, timeout)
        if not self._room.acquire(block, timeout):
            raise Full
        try:
            self._send(value, deadline)
        except BaseException:
            self._give_room()
            raise

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The oldest item.

        Args:
            block: whether to wait for one.
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            queue.Empty: there was none.
            Exception: whatever unpickling the item raises; it is gone then.
            ValueError: the queue is closed.
        """
        return self._take(deadline_of(block, timeout))

    def _settle(self, message: Message) -> None:
        message.release()
        self._give_room()

    def _popped(self) -> None:
        self._give_room()

    def _give_room(self) -> None:
        _give_room(self._room)

    def put_nowait(self, obj: Any) -> None:
        """`put(obj, block=False)`."""
        self.put(obj, False)

    def get_nowait(self) -> Any:
        """`get(block=False)`."""
        return self.get(False)

    def qsize(self) -> int:
        """How many items there are just now; others may put or get at any time."""
        return int(self._maxsize - self._room.get_value())

    def full(self) -> bool:
        """Whether there are `maxsize` items just now."""
        return bool(self._room.get_value() == 0)

    def join_thread(self) -> None:
        """Nothing to wait for: `put` has copied its item when it returns, there is no thread.

        Raises `ValueError` unless the queue was closed, as the standard library's requires.
        """
        if not self._closed:
            raise ValueError(f"{type(self).__name__} {self!r} is not closed")

    def cancel_join_thread(self) -> None:
        """Nothing to cancel: no thread keeps the process from ending, and what was put is not lost by its end."""


def _comes_soon(items: Any) -> bool:
    """Whether an item is put, and taken from the semaphore, before it pays to sleep."""
    until = time.monotonic() + _SPIN
    while time.monotonic() < until:
        if items.acquire(False):
            return True
    return False


def _nothing() -> None:
    """Nobody counts the items."""


def _give_room(room: Any) -> None:
    try:
        room.release()
    except ValueError:
        pass  # full already: whoever put or got one item less was killed in between


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
os.register_at_fork(after_in_child=_after_fork)
