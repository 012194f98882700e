"""One process's handle of a queue: it keeps the channel alive, and has the process's two endpoints on it.

A queue must live as long as any process has it, whether or not that process has put or got anything yet. So there is
one more member of its channel, the keeper, which neither sends nor receives. Its life lock belongs to an open file
description, and the descriptor goes to every process that has the queue: forked children inherit it, others get it
from `multiprocessing` with the queue. The kernel drops the lock when the last of them has closed it or died.

    process A                          process B (forked or spawned)
    QueueHandle: keeper ---+--- QueueHandle: keeper            one description, one lock: the queue exists
          Putter, Getter   |                 Putter, Getter    each made at the first put or get
                     channel "queue-..."

A process that closes its handle removes the channel if no other process has it. The two ends of a pipe have such
handles as well, with endpoints of their own kind (`connection.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction, resource_sharer, util
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..channel import cleanup, membership
from ..channel import control as ctl
from ..channel.control_lock import defer
from ..channel.membership import Member
from ..channel.names import semaphore_name, socket_dir
from ..errors import ClosedError, ShmTensorError
from ..memory import lifecycle
from ..memory.counters import Counter
from ..memory.descriptors import InheritedFile
from ..ring.layout import WORK_QUEUE
from . import pickling
from .getter import Getter
from .putter import Putter

if TYPE_CHECKING:
    from typing_extensions import Self


class QueueHandle:
    """A process's handle of a queue's channel.

    Args:
        name: the channel.
        keeper: an open file with the keeper's life lock; owned, and closed with the handle.
        max_bytes: shared memory that the putter may use; None for half of `/dev/shm`.

    The queue sets `abandoned`, which is called when an item is dropped after too many attempts.
    """

    abandoned: Callable[[], None]
    _kind = "queue"
    """How the channel's name begins."""
    _left = True  # until `__init__` is through

    def __init__(self, name: str, keeper: InheritedFile, max_bytes: int | None) -> None:
        self.name, self.max_bytes = name, max_bytes
        self._keeper = keeper
        self._directory = socket_dir()
        self.start_anew()

    @classmethod
    def create(cls, max_bytes: int | None, values: tuple[tuple[int, int], ...], named: bool) -> tuple[Self, Any]:
        """Create a channel with a new name, its keeper and its semaphores.

        Args:
            max_bytes: as for the handle.
            values: first value and limit of each semaphore.
            named: whether spawned processes will have the queue.
        """
        name = f"{cls._kind}-{os.getpid()}-{secrets.token_hex(6)}"
        member = membership.join(name, WORK_QUEUE, membership.Part(ctl.RECEIVER), _prepare_nothing)
        keeper = InheritedFile()
        try:
            counters = [
                Counter(semaphore_name(name, member.uid, number), value, most, named=named)
                for number, (value, most) in enumerate(values)
            ]
            handle = cls(name, keeper.duplicate(member.control.locks.fd), max_bytes)
            member.control.locks.close()
        except BaseException:
            keeper.close()
            member.leave()
            raise
        # crash: handle.made
        return handle, counters

    def start_anew(self) -> None:
        """Begin without endpoints. A forked child calls it too: it inherits the keeper, and the endpoints are its
        parent's."""
        self._joining = threading.Lock()
        self._maker = 0
        """The thread that creates an endpoint and holds `_joining`."""
        self._leave_when_made: Callable[[Any], None] | None = None
        """How to leave once the endpoint is created, if the queue was closed meanwhile."""
        self._putter: Any = None
        self._getter: Any = None
        self._left = self._keeper.fd < 0
        self._undelivered: list[Any] = []
        self._make_room: Callable[[], object] = bool

    def keep(self, undelivered: list[Any], make_room: Callable[[], object]) -> None:
        """Remember objects to put back when the handle is closed, after calling `make_room` for each."""
        self._undelivered, self._make_room = undelivered, make_room

    @property
    def putter(self) -> Any:
        """This process's putter, created at first use."""
        return self._putter or self._make("_putter", self.make_putter)

    @property
    def getter(self) -> Any:
        """This process's getter, created at first use."""
        return self._getter or self._make("_getter", self.make_getter)

    def make_putter(self) -> Any:
        """Create the sending end."""
        return Putter(self.name, self.max_bytes)

    def make_getter(self) -> Any:
        """Create the receiving end."""
        return Getter(self.name, self.abandoned)

    def _make(self, which: str, make: Callable[[], Any]) -> Any:
        """Create an endpoint; one thread at a time."""
        leave = None
        try:
            with self._joining:
                if self._keeper.fd < 0:  # another thread has closed it meanwhile
                    raise ClosedError(f'queue "{self.name}" is closed')
                self._maker = threading.get_ident()
                try:
                    if getattr(self, which) is None:
                        setattr(self, which, make())
                    return getattr(self, which)
                finally:
                    self._maker, leave, self._leave_when_made = 0, self._leave_when_made, None
        finally:
            if leave is not None:
                self._leave(leave)

    def keeper_for_child(self) -> Any:
        """The keeper, to be pickled for a child that is being spawned, or for a process that runs."""
        if context.get_spawning_popen() is None:
            return _Sent(self.another_keeper(), self.name, self._directory)
        return reduction.DupFd(self._keeper.fd)

    def another_keeper(self) -> InheritedFile:
        """The keeper again, for another handle of this process."""
        return InheritedFile().duplicate(self._keeper.fd)

    def close(self) -> None:
        """Leave the channel. Items stay for other processes with the queue; the last one removes it. Idempotent.

        Tensors that were got stay valid; while they live, this process's getter stays a member of the channel.
        """
        self._leave(lambda endpoint: endpoint.close())

    def end(self) -> None:
        """As `close`, at the end of the process: clean up memory even though tensors that were got may be alive."""
        self._leave(lambda endpoint: endpoint.end())

    def _leave(self, leave: Callable[[Any], None]) -> None:
        if self._left or defer(lambda: self._leave(leave)):
            return
        if self._maker == threading.get_ident():  # deferred until this thread's join has ended
            self._leave_when_made = leave
            return
        if self._undelivered:
            self._put_back()
        with self._joining:
            self._keeper.close()  # first: the endpoint that leaves last removes the channel
        # crash: handle.released
        for endpoint in (self._putter, self._getter):
            if endpoint is not None:
                with contextlib.suppress(ShmTensorError, OSError):
                    leave(endpoint)
        # crash: handle.left
        _sweep(self.name, self._directory)
        self._left = True

    def _put_back(self) -> None:
        """Put back objects that were taken from the queue and not returned by `get`."""
        while self._undelivered:
            with contextlib.suppress(Exception):  # an object that cannot be put is lost: no call is left to raise it
                self._make_room()
                self.putter.put(pickling.pack(self._undelivered[0]), 0.0)
            del self._undelivered[0]

    def __del__(self) -> None:
        self.close()


def _sweep(name: str, directory: str) -> None:
    """Remove a channel that no process has any more; what dead members left if one has it."""
    with contextlib.suppress(ShmTensorError, OSError):
        cleanup.sweep_channel(name, directory, patience=membership.LOCK_TIMEOUT)


def _prepare_nothing(member: Member) -> None:
    """A keeper has neither a sequence table nor an inbox."""


class _Sent(resource_sharer.DupFd):
    """A keeper on its way to a process that already runs: `multiprocessing` sends it from a thread of this one.

    That thread may have it longer than any process has the queue, so it sweeps afterwards; at exit, what nobody has
    fetched is closed. (`DupFd` is the standard library's way to do that. It leaves no place for an action, so its
    `__init__`, four lines, is here again.)
    """

    def __init__(self, keeper: InheritedFile, name: str, directory: str) -> None:
        owner = os.getpid()

        def send(connection: Any, pid: int) -> None:
            reduction.send_handle(connection, keeper.fd, pid)

        def close() -> None:  # also in a forked child, of its copy
            _sent.pop(keeper, None)
            keeper.close()
            if os.getpid() == owner:
                _sweep(name, directory)

        _sent[keeper] = close
        self._id = resource_sharer._resource_sharer.register(send, close)  # type: ignore[attr-defined]


_sent: dict[InheritedFile, Callable[[], None]] = {}
"""Keepers that nobody has fetched yet, and how to close each."""


# --- handles and the objects that use them


_EXIT_PRIORITY: Final = -10
"""Of the finalizers: after `multiprocessing` has joined its children. The last process to leave removes the queue."""


class _Hold(weakref.ref[Any]):
    """A weak reference to the hold of a queue or connection, with its handle."""

    __slots__ = ("handle",)
    handle: QueueHandle


_holds: dict[int, _Hold] = {}
"""Of every queue and connection, by identity (an array cannot be hashed, nor can a reference to it)."""


def hold(handle: QueueHandle) -> Any:
    """An object to keep as long as the handle is used: when it dies the handle is closed.

    It is an array because the garbage collector does not track arrays: it dies after every `__del__` that may still use
    the queue. torch's DataLoader iterator stops its workers in one.
    """
    held = np.empty(0)
    reference = _Hold(held, _close_handle)
    reference.handle = handle
    _holds[id(reference)] = reference
    return held


def _close_handle(reference: _Hold) -> None:
    """Close the handle of an object that was garbage collected."""
    _holds.pop(id(reference), None)  # None: `hold` was interrupted before it was there
    reference.handle.close()


def _watch(*_: object) -> None:
    """Have every handle closed when this process ends."""
    util.Finalize(None, _end_all, exitpriority=_EXIT_PRIORITY)


def _end_all() -> None:
    for reference in list(_holds.values()):
        reference.handle.end()
    for close in list(_sent.values()):
        close()


def _after_fork() -> None:
    for reference in list(_holds.values()):
        reference.handle.start_anew()
    _watch()


_watch()
util.register_after_fork(_watch, _watch)  # children of `multiprocessing` drop finalizers as they start
lifecycle.call_in_child(_after_fork)


ONCE: Final = ((),)
"""`record += starmap(call, ONCE)` calls a C function and appends what it returns, with nothing in between."""


# Deadlines from `block=` and `timeout=` of the standard library's queues, and locks that are acquired until then. An
# asynchronous exception (Ctrl-C, a signal handler, another thread) arrives at a function's entry, after a call or at a
# jump back, never inside a call of a C function: taking something and recording it are therefore one such call.


def deadline_of(block: bool, timeout: float | None) -> float | None:
    """The deadline in monotonic seconds; None: wait for ever."""
    if not block:
        return 0.0
    return None if timeout is None else time.monotonic() + max(0.0, timeout)


def remaining(deadline: float | None, most: float) -> float:
    """Seconds until the deadline, at most `most`."""
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def locked(lock: Any, deadline: float | None) -> Any:
    """For `with`: hold a lock that is written in C. Raises `StopIteration` if the deadline passes before."""
    return lock if deadline is None else _Timed(lock, remaining(deadline, 1e6))


class _Timed:
    """A context manager both of whose methods are C functions."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, timeout: float) -> None:
        self.__enter__ = filter(None, map(lock.acquire, (True,), (timeout,))).__next__
        self.__exit__ = lock.__exit__
