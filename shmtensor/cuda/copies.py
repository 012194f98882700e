"""Copies between host and device without waiting: pinned mappings, and what copies in progress need.

Pinned mappings: a device copies from and to them directly, and the host does not wait. A mapping is registered piece by
piece, each at the first copy that touches it, and unregistered before it is unmapped.

    mapping   |page ........................................|     anchor: what every view of it keeps alive
    pieces    |0: at most PIECE |1: at most PIECE |2 ....... |     copies are cut where pieces meet

A mapping that this process may only read (fan-out) is registered as read-only where the device can; where CUDA refuses
that, a second mapping of the same pages, writable and used by the copies alone, is registered instead.

Copies in progress: what they read or write stays alive, and its slot leased, until the event after them. No thread
waits for the events: the owner's next calls poll them. An owner that closes, and a process that ends, waits.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..errors import CudaError
from ..memory import lifecycle
from ..memory.segment import PAGE, Alias
from .runtime import runtime

PIECE: Final = 1 << 30
"""Bytes that are registered at once, at most."""

Part = tuple[memoryview, int, int]
"""(buffer, offset, bytes) of one copy's end in host memory."""


class Pinning:
    """The registered pieces of one mapping. Thread-safe; it does not keep the mapping alive."""

    def __init__(self, buffer: memoryview, address: int, *, writable: bool) -> None:
        self.failure = ""
        """Why copies are pageable, if they are."""
        self._address, self._nbytes, self._writable = address, buffer.nbytes, writable
        self._registered: dict[int, tuple[int, int, int]] = {}  # piece -> address, bytes, device whose context did it
        self._alias: Alias | None = None
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(buffer.obj, self.release)
        self._finalizer.atexit = False  # `finish_all` waits for the copies in progress first
        lifecycle.track(self, type(self).drop_in_child)
        _pinnings.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(nbytes for _, nbytes, _ in self._registered.values())

    def parts(self, buffer: memoryview, offset: int, nbytes: int, device: int) -> list[Part]:
        """Cut the bytes of a copy into parts that lie within one piece each, and register these if possible."""
        found = []
        end = offset + nbytes
        while offset < end:
            piece = offset // PIECE
            until = min(end, (piece + 1) * PIECE)
            pinned = self._register(piece, device)
            alias = self._alias
            through = buffer if alias is None or not pinned else alias.buffer
            found.append((through, offset, until - offset))
            offset = until
        return found

    def _register(self, piece: int, device: int) -> bool:
        """Whether a piece is registered, after trying to."""
        if piece in self._registered:
            return True
        if self.failure:
            return False
        with self._lock:
            if piece not in self._registered and not self.failure:
                start = piece * PIECE
                nbytes = (min(PIECE, self._nbytes - start) + PAGE - 1) & -PAGE
                try:
                    self._registered[piece] = self._pin(start, nbytes, device), nbytes, device
                except OSError as error:
                    self.failure = error.strerror or str(error)
            return piece in self._registered

    def _pin(self, start: int, nbytes: int, device: int) -> int:
        """Register a piece; returns the address by which it is registered."""
        cuda = runtime()
        if self._alias is None and (self._writable or cuda.supports_read_only(device)):
            try:
                cuda.register_host(self._address + start, nbytes, device, read_only=not self._writable)
                return self._address + start
            except CudaError:
                if self._writable or self._registered:  # pieces that are registered are not moved
                    raise
        if self._alias is None:
            self._alias = Alias(self._address, self._nbytes)
        cuda.register_host(self._alias.address + start, nbytes, device)
        return self._alias.address + start

    def release(self) -> None:
        """Unregister everything, before the mapping is unmapped. What an exception of a signal handler leaves, the next
        call does."""
        with self._lock:
            for piece, (address, _, device) in list(self._registered.items()):
                try:
                    runtime().unregister_host(address, device)
                except Exception:  # of any kind: the other pieces must be unregistered as well
                    pass  # the device is gone, and with it the registration; or it was unregistered before
                del self._registered[piece]
            self._alias = None

    def drop_in_child(self) -> None:
        """In a forked child: forget the registrations, which are the parent's."""
        self._registered.clear()
        self._lock = threading.Lock()


_pinnings: weakref.WeakSet[Pinning] = weakref.WeakSet()
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
        """Release what completed copies held, of this owner and of owners that are not used any more. Returns how many
        copies of this owner are left."""
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


@atexit.register
def finish_all() -> None:
    """At exit: wait for all copies, since a device reads or writes memory of the process."""
    for pending in {*_busy.values()}:
        pending.finish()
    for pinning in list(_pinnings):
        pinning.release()


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
