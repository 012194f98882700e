"""Device memory that several processes use: allocated by one, mapped by the others, once per process.

CUDA lets a process map another one's allocation (`cudaIpcOpenMemHandle`), but not its own, and freeing an allocation
that others still have mapped is undefined behaviour. So a process finds here what it has mapped already, and the owner
frees only what no other process has mapped (docs/internals/protocols.md, section 11).
"""

from __future__ import annotations

import errno
import threading
import weakref
from typing import Any

from ..errors import CudaError
from ..memory import lifecycle
from ..memory.words import store
from .runtime import runtime

Key = tuple[int, int]
"""The uid of a publisher and the number of its ring."""

_known: weakref.WeakValueDictionary[Key, SharedMemory] = weakref.WeakValueDictionary()
_opening = threading.Lock()


class SharedMemory:
    """A ring's device memory as this process reaches it, and the events of its slots.

    `mine`: this process allocated it. It is freed, or unmapped, with the last reference.
    """

    __slots__ = ("__weakref__", "_closed", "_events", "_runtime", "address", "device", "handle", "mine", "nbytes")

    def __init__(self, device: int, address: int, nbytes: int, handle: bytes, *, mine: bool) -> None:
        self._runtime = runtime()
        self.device, self.address, self.nbytes, self.handle, self.mine = device, address, nbytes, handle, mine
        self._events: dict[int, Any] = {}
        self._closed = False
        lifecycle.track(self, type(self).drop_in_child)

    def drop_in_child(self) -> None:
        """In a forked child, which has no CUDA context: close nothing."""
        self._closed = True

    def make_event(self, slot: int) -> bytes:
        """Make the event of a slot, in the process that allocated the memory. Returns its handle, 64 bytes."""
        used = self._runtime
        with used.on(used.current_stream(self.device)):  # torch makes the event where this thread is
            event = self._events[slot] = used.new_event(self.device, interprocess=True)
            return bytes(used.event_handle(event))

    def event(self, slot: int, handle: bytes) -> Any:
        """The event of a slot, opened at its first use."""
        event = self._events.get(slot)
        if event is None:
            with _opening:
                event = self._events.get(slot)
                if event is None:
                    event = self._events[slot] = self._runtime.open_event(handle, self.device)
        return event

    def __del__(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._events.clear()  # before the memory: the owner may free both as soon as that is unmapped
        try:
            if self.mine:
                self._runtime.free(self.address, self.device)
            else:
                self._runtime.close_memory(self.address, self.device)
        except Exception:  # the context is broken, or the interpreter ends: CUDA frees it
            pass


def allocate(key: Key, device: int, nbytes: int) -> SharedMemory:
    """Allocate device memory that other processes may map. Raises `CudaError` if there is too little."""
    used = runtime()
    address = used.allocate(nbytes, device)
    try:
        memory = SharedMemory(device, address, nbytes, used.memory_handle(address, device), mine=True)
    except BaseException:
        used.free(address, device)
        raise
    _known[key] = memory
    return memory


def known(key: Key) -> SharedMemory | None:
    """The memory of a ring, if this process has allocated or mapped it already."""
    memory = _known.get(key)
    return None if memory is None or memory._closed else memory


def map_memory(key: Key, device: int, nbytes: int, handle: bytes) -> SharedMemory:
    """The memory of a ring, mapped now if it was not before. Raises `CudaError`."""
    with _opening:
        memory = known(key)
        if memory is None:
            address = runtime().open_memory(handle, device)
            memory = _known[key] = SharedMemory(device, address, nbytes, handle, mine=False)
        return memory


def device_called(identity: str) -> int:
    """The number of a device in this process. Raises `CudaError` if this process does not see the device."""
    used = runtime()
    seen = [str(used.identity(number)) for number in range(used.device_count())]
    if identity not in seen:
        raise CudaError(
            errno.ENODEV,
            f"the message lies in the memory of CUDA device {identity}, which this process cannot see (it sees "
            f"{', '.join(seen)}): set CUDA_VISIBLE_DEVICES, or the container's --gpus, so that it can, or use a "
            "publisher without device=",
        )
    return seen.index(identity)


class Hold:
    """One member's use of such memory. With the last reference, it stores in the member's word that it has unmapped it.

    at: index of that word; -1: the memory is this process's own, and there is no such word
    """

    __slots__ = ("__weakref__", "_at", "_words", "memory")

    def __init__(self, memory: SharedMemory, words: memoryview, at: int) -> None:
        self.memory = memory
        self._words, self._at = words, at
        lifecycle.track(self, type(self).drop_in_child)

    def drop_in_child(self) -> None:
        """In a forked child: the word is the parent's."""
        self._at = -1

    def __del__(self) -> None:
        del self.memory  # unmapped if this was the last use in the process; before the store
        if self._at >= 0:
            store(self._words, self._at, 0)
