"""Pinned mappings: a device copies from and to them directly, and the host does not wait.

A mapping is registered piece by piece, each at the first copy that touches it, and unregistered before it is unmapped.

    mapping   |page ........................................|     anchor: what every view of it keeps alive
    pieces    |0: at most PIECE |1: at most PIECE |2 ....... |     copies are cut where pieces meet

A mapping that this process may only read (fan-out) is registered as read-only where the device can; where CUDA refuses
that, a second mapping of the same pages, writable and used by the copies alone, is registered instead.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from ..errors import CudaError
from ..memory import lifecycle
from ..memory.segment import PAGE, Alias
from .pending import at_end
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
        self._finalizer.atexit = False  # `at_end` waits for the copies in progress first
        lifecycle.track(self, type(self).drop_in_child)
        at_end(self)

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
