"""One process's handle of a queue: it keeps the channel alive, and has the process's two endpoints on it.

`Putter` is a producer whose memory grows with the queue, up to a limit; `Getter` is a consumer that takes the oldest
item of all putters.

A queue must live as long as any process has it, whether or not that process has put or got anything yet. So there is
one more member of its channel, the keeper, which neither sends nor receives. Its life lock belongs to an open file
description, and the descriptor goes to every process that has the queue: forked children inherit it, others get it
from `multiprocessing` with the queue. The kernel drops the lock when the last of these processes has closed it or died.

    process A                          process B (forked or spawned)
    QueueHandle: keeper ---+--- QueueHandle: keeper            one description, one lock: the queue exists
          Putter, Getter   |                 Putter, Getter    each made at the first put or get
                     channel "queue-..."

A process that closes its handle removes the channel if no other process has it. The two ends of a pipe have such
handles as well, with endpoints of their own kind (`connection.py`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import context, reduction, resource_sharer, util
from queue import Full
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..channel import cleanup, membership
from ..channel import control as ctl
from ..channel.control import defer
from ..channel.membership import Member
from ..channel.names import semaphore_name, socket_dir
from ..endpoints.base import SenderTraits
from ..endpoints.sender import Wait
from ..endpoints.spinning import Spin
from ..endpoints.workqueue import Producer
from ..errors import ArgumentError, ClosedError, ReentrantError, ResourceError, RingFull, ShmTensorError
from ..memory import lifecycle
from ..memory.descriptors import InheritedFile
from ..memory.segment import NameTaken, free_bytes, more_room, total_bytes, where
from ..memory.semaphores import Counter
from ..options import format_bytes
from ..ring.layout import DONE, RECORD_WORDS, RELEASED, WORK_QUEUE, RingShape, round_slot, state_word
from ..ring.pool import Pool
from ..ring.ring import Ring
from ..ring.writer import SlotRange
from ..shielded import ONCE, Timed
from . import pickling
from .pickling import DeviceConsumer

if TYPE_CHECKING:
    from typing_extensions import Self


class ClosedQueueError(ClosedError, OSError):
    """The error of a closed queue. It is a `ValueError` and an `OSError`, since the standard library raises one or the
    other."""


class ReentrantQueueError(ReentrantError):
    """A call of a queue's handle has interrupted another one of its thread and would wait for it."""


_INTERRUPTED: Final = (
    "a signal handler or a finalizer has interrupted another call of this thread, and would wait for its end"
)


class Getter(DeviceConsumer):
    """The consumer of one process. `abandoned` is called when an item is dropped after too many attempts."""

    _traits = replace(DeviceConsumer._traits, counts_lost=False, by_age=True)

    def __init__(self, channel: str, abandoned: Callable[[], None]) -> None:
        super().__init__(channel, acknowledge="release", until="closed")  # any process with the queue may put
        self._when_given_up = abandoned

    def check_readable(self) -> None:
        """Raise `WireError` if the only putters left cannot be read here."""
        if not self._readers:
            self._try_run(self._refresh_if_stale)
            if not self._readers and (unread := self.unread()) is not None:
                raise unread

    def pop(self, make: Callable[[Any], object], made: list[Any], when_got: Callable[[], object] | None) -> bool:
        """In one C call: append `make(next item)` to `made`, mark the item as done and call `when_got`.

        Returns False and does nothing if there is no item, or an interrupted call or a scan comes first. If `make`
        raises, it is called again: if it raises again, the item is lost and `when_got` is called; if not, the exception
        was asynchronous, and the item is appended. The exception is raised in both cases.
        """
        direct = self._direct
        if direct is None or self._undelivered or self._claims is None or self._claims.scan_wanted:
            return False  # an interrupted call's item first
        taken = direct.consume(make, made, when_got) is True
        if direct.more:
            self._share()
        return taken

    def is_empty(self) -> bool:
        """Whether there is nothing to get now, neither new nor given back by a getter that died."""
        self._try_run(self._refresh_if_stale)  # else another thread is inside a get, which refreshes as well
        return not self._undelivered and not any(_has_open(reader) for reader in list(self._readers))

    def end(self) -> None:
        """Leave at the end of the process: clean up, even though views of items are alive."""
        self._at_exit()


def _has_open(reader: Any) -> bool:
    """Whether a putter has an item that is not done and that no living getter has taken."""
    return any(
        not reader.has_lease(ring.index, slot, seq) and not reader.sequences.locks.held_by_other(seq)
        for ring, slot, seq in reader.unfinished()
    )


PATIENCE: Final = 30.0
"""Seconds after which a waiting put fails if every item was received and no memory has come back."""

_CHECK_INTERVAL: Final = 0.5
"""Seconds after which a put that waits checks again who holds the memory."""

_GRACE: Final = 5e-3
"""Seconds to wait for a slot before a ring is added: a getter that keeps up is faster than fresh pages of a ring."""

_FIRST_BYTES: Final = 4 << 20
_FIRST_SLOTS: Final = (4, 1024)
_GROWTH_BYTES: Final = 256 << 20
_WIDE: Final = 4
"""Messages do not use a ring whose slots are more than this many times larger than necessary."""


def default_limit() -> int:
    """Half of `/dev/shm`: what one putting process may use by default."""
    return total_bytes() // 2


def _slot_of(nbytes: int) -> int:
    """Bytes of a slot for messages of about `nbytes`: a few sizes, so that rings are shared by similar messages."""
    if nbytes <= 64 << 10:
        return round_slot(1 << max(6, (nbytes - 1).bit_length()))
    step = 1 << (nbytes.bit_length() - 4)
    return round_slot((nbytes + step - 1) // step * step)


class GrowingPool(Pool):
    """Rings of several slot sizes; each ring that is added for a size is as large as all before it, within bounds.

    No fixed number of slots fits a queue: it may hold a few huge batches or many thousand numbers, and a put does not
    wait as long as there is memory.
    """

    __slots__ = ("eager", "lacking")

    eager: bool
    """Whether to add a ring instead of waiting."""
    lacking: int
    """Bytes of the ring that the last message needs, if others have the room for it; else 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eager, self.lacking = False, 0

    def find(self, nbytes: int) -> SlotRange | None:
        size = _slot_of(nbytes)
        place = self._writer.acquire(nbytes, size, _WIDE * size)
        if place is None and self.may_grow(nbytes):
            try:
                self.add(nbytes)
            except (ResourceError, RingFull):
                if not self.rings:
                    raise
            else:
                place = self._writer.acquire(nbytes, size, _WIDE * size)
        return place or super().find(nbytes)

    def make_room(self, nbytes: int) -> None:
        self.lacking = 0
        if not self._of_size(_slot_of(nbytes)) and not self.may_grow(nbytes):
            if self._others_have_room(nbytes):
                self.lacking = self.shape(nbytes).nbytes
            else:
                super().make_room(nbytes)

    def _others_have_room(self, nbytes: int) -> bool:
        """Whether there would be room for a ring if other processes gave back their rings: then a put waits for
        that."""
        return super().may_grow(nbytes) and self.shape(nbytes).nbytes <= total_bytes()

    def may_grow(self, nbytes: int) -> bool:
        if not self.eager and self._of_size(_slot_of(nbytes)):
            return False
        return super().may_grow(nbytes) and self.shape(nbytes).nbytes <= free_bytes()

    def add(self, nbytes: int) -> None:
        try:
            super().add(nbytes)
        except NameTaken:
            raise
        except ResourceError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._others_have_room(nbytes):
                raise RingFull("another process has taken the room that there was") from error
            limit = self._max_bytes or 0
            raise ResourceError(
                error.errno or errno.ENOMEM,
                f"an item of {format_bytes(nbytes)} does not fit into the queue: of max_bytes={format_bytes(limit)} "
                f"for this process {format_bytes(self.nbytes)} are used, {where()} has {format_bytes(free_bytes())} "
                f"free: put smaller items, pass a larger max_bytes=, or {more_room()}",
            ) from error

    def _of_size(self, slot_bytes: int) -> list[Ring]:
        return [ring for ring in self.rings if slot_bytes <= ring.slot_bytes <= _WIDE * slot_bytes]

    def shape(self, nbytes: int) -> RingShape:
        slot_bytes = _slot_of(nbytes)
        least, most = _FIRST_SLOTS
        before = sum(ring.slots for ring in self._of_size(slot_bytes))
        slots = max(least, min(most, _FIRST_BYTES // slot_bytes), min(before, _GROWTH_BYTES // slot_bytes))
        slots = min(slots, self._sequences.mask - self.slots)
        if self._max_bytes is not None:
            one = RingShape(self._kind, 1, slot_bytes, self._capacity).nbytes
            slots = min(slots, 1 + (self._max_bytes - self.nbytes - one) // (slot_bytes + 8 * RECORD_WORDS + 64))
        # no more than a quarter of what is free: other putters want a ring just now, too, and rings never shrink
        slots = min(slots, free_bytes() // 4 // (slot_bytes + 8 * RECORD_WORDS + 64))
        return RingShape(self._kind, max(1, slots), slot_bytes, self._capacity)


class Putter(Producer):
    """The producer of one process. Its `max_bytes` is always set."""

    _traits = SenderTraits(WORK_QUEUE, pool=GrowingPool, widest=_WIDE)
    _pool: GrowingPool

    def __init__(self, channel: str, max_bytes: int | None) -> None:
        super().__init__(channel, full="grow", max_bytes=default_limit() if max_bytes is None else max_bytes)
        self._spin = Spin()  # a getter that keeps up is faster than another ring

    @property
    def published(self) -> int:
        """How many items were put."""
        return self._published

    def put(self, value: Any, deadline: float | None, when_full: Callable[[], object]) -> None:
        """Send what `pickling.pack` made, waiting for memory.

        Args:
            value: the packed item.
            deadline: when to give up, in monotonic seconds; None waits as long as it takes.
            when_full: called when there is no memory at once.

        Raises:
            queue.Full: the deadline has passed.
            ResourceError: the value is larger than the limit; or everything that was put was got, the getters' tensors
                or others fill the memory, and for `PATIENCE` seconds none of them gave any back.
        """
        if type(value) is bytes:
            value = np.frombuffer(value, np.uint8)
        grace = _GRACE if deadline is None else max(0.0, min(_GRACE, deadline - time.monotonic()))
        self._pool.eager = not grace
        # crash: put.begun
        try:
            self.send(value, timeout=grace)
            # crash: put.sent
            return
        except RingFull:
            self._pool.eager = True
        when_full()
        wait, held_since, given_back, slow = 0.0, 0.0, -1, Wait(self._why_full, self._member)
        while True:
            try:
                self.send(value, timeout=wait)
                return
            except RingFull:
                # crash: put.waits
                unread, held, nbytes = self._holders()
            slow.check(0)
            now = time.monotonic()
            if unread or held != given_back:
                held_since, given_back = now, held
            elif now - held_since >= PATIENCE:
                if not (self._pool.lacking and cleanup.count_undone(self._member.control)):
                    raise ResourceError(errno.ENOMEM, self._held_text(held, nbytes))
                held_since = now  # others' items wait to be got, and their rings go when these putters end
            if deadline is not None and now >= deadline:
                raise Full(self._why_full())
            wait = _CHECK_INTERVAL if deadline is None else min(_CHECK_INTERVAL, deadline - now)

    def end(self) -> None:
        """Leave at the end of the process."""
        self._at_exit()

    def _holders(self) -> tuple[int, int, int]:
        """(items not got yet, items got whose memory is still in use, bytes of the latter)"""
        unread = held = nbytes = 0
        for ring, slot, seq, span in self._writer.messages():
            state = state_word(ring, slot)
            if ring.words[state + DONE] != seq:
                unread += 1
            elif ring.words[state + RELEASED] != seq:
                held += 1
                nbytes += span * ring.slot_bytes
        return unread, held, nbytes

    def _why_full(self, _: int = 0) -> str:
        unread, held, nbytes = self._holders()
        why = f"{unread} items wait to be got" if unread else self._held_text(held, nbytes)
        return f"no memory for the item: {why}"

    def _held_text(self, held: int, nbytes: int) -> str:
        if lacking := self._pool.lacking:
            return (
                f"it needs a ring of {format_bytes(lacking)}, {where()} has {format_bytes(free_bytes())} free: the "
                f"rings of other putters and channels hold the rest until they close (this process has "
                f"{format_bytes(self._pool.nbytes)}): use fewer processes or smaller items, or {more_room()}"
            )
        pids = (
            ", ".join(str(pid) for pid in sorted({peer.entry.pid for peer in self._recipients.listeners}))
            or "none alive"
        )
        return (
            f"tensors of {held} items that were got hold {format_bytes(nbytes)} of max_bytes="
            f"{format_bytes(self._max_bytes or 0)} (processes with this queue: {pids}): drop tensors that are not "
            "needed, keep clones of those that are (one kept tensor holds its whole item), or pass a larger max_bytes="
        )


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
        """Begin without endpoints. A forked child calls this, too: it inherits the keeper, but the endpoints belong to
        its parent."""
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
        """Remember objects to put back when the handle is closed. `make_room`, called for each, returns whether it made
        room that `abandoned` gives back."""
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
        """Create an endpoint; one thread at a time. Raises `ReentrantQueueError` if this thread is doing it already."""
        leave, me = None, threading.get_ident()
        if self._maker == me:
            raise ReentrantQueueError(f'queue "{self.name}": {_INTERRUPTED}')
        try:
            with self._joining:
                self._maker = me  # no boundary before it, nor from the reset to the release
                try:
                    if self._keeper.fd < 0:  # another thread has closed it meanwhile
                        raise ClosedQueueError(f'queue "{self.name}" is closed')
                    if getattr(self, which) is None:
                        setattr(self, which, make())
                    return getattr(self, which)
                except ReentrantError as error:  # it holds a lock of the channel
                    raise ReentrantQueueError(f'queue "{self.name}": {_INTERRUPTED}') from error
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
        """Another descriptor of the keeper, for another handle of this process."""
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
        """Put back objects that were taken from the queue and not returned by `get`.

        Each is moved out in one step, so that neither a `get` of another thread nor another `close` has it as well.
        """
        while self._undelivered:
            moved: list[Any] = []
            made: list[Any] = []
            before = self._published
            try:
                moved.extend(map(self._undelivered.pop, (0,)))
                made.extend(itertools.starmap(self._make_room, ONCE))
                self.putter.put(pickling.pack(moved[0]), 0.0, bool)
            except BaseException as error:
                # an `Exception`: another thread has it; or it cannot be put and is lost: no call is left to raise it
                is_lost = isinstance(error, Exception)
                if self._published == before:
                    if any(made):
                        self.abandoned()
                    if not is_lost:
                        self._undelivered[:0] = moved
                if not is_lost:
                    raise

    @property
    def _published(self) -> int:
        """How many items this process has put."""
        return 0 if self._putter is None else self._putter.published

    def __del__(self) -> None:
        self.close()


def _sweep(name: str, directory: str) -> None:
    """Remove a channel that no process has any more. If a process has it, that process removes it later; what dead
    members left is removed at the next join. Each child calls this as it ends, for every queue that it inherited."""
    with contextlib.suppress(ShmTensorError, OSError):
        if not cleanup.has_members(name):
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
"""Keepers that no process has fetched yet, and a function that closes each."""


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
    """Register that every handle is closed when this process ends."""
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


# Deadlines from `block=` and `timeout=` of the standard library's queues, and locks that are acquired until then. An
# asynchronous exception (Ctrl-C, a signal handler, another thread) arrives at a function's entry, after a call or at a
# jump back, never inside a call of a C function: taking something and recording it are therefore one such call.


def deadline_of(block: bool, timeout: float | None) -> float | None:
    """The deadline in monotonic seconds; None: wait for ever."""
    if not block:
        return 0.0
    if timeout is not None and timeout != timeout:
        raise ArgumentError("timeout must be seconds or None, not nan")
    return None if timeout is None else time.monotonic() + max(0.0, timeout)


def remaining(deadline: float | None, most: float) -> float:
    """Seconds until the deadline, at most `most`."""
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def locked(lock: Any, deadline: float | None) -> Any:
    """For `with`: hold a lock that is written in C. Raises `StopIteration` if the deadline passes before."""
    return lock if deadline is None else Timed(lock, remaining(deadline, 1e6))
