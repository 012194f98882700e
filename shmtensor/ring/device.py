"""The slots of a ring in device memory: their parts in the segment, and the memory on the device.

The segment holds, per slot, the handle of the slot's event and room for a description; the payload lies in one
allocation on the device, slot by slot. Its owner, a publisher, makes the events and keeps the memory until no other
member has it mapped; a reader maps it once per process, when it takes its first message from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..cuda import keeper, shared
from ..cuda.runtime import runtime
from ..cuda.shared import Hold
from ..errors import ClosedError, WireError
from ..memory.words import barrier, store
from .layout import (
    DEVICE_SLOT,
    HANDLE,
    HANDLE_AT,
    IDENTITY_AT,
    MAX_DEVICE_MEMBERS,
    R_FREED,
    R_INDEX,
    R_MAPPED,
    R_UID,
)

if TYPE_CHECKING:
    from ..memory.segment import Mapping
    from .layout import RingShape

_IDENTITY = HANDLE_AT - IDENTITY_AT
TEXT = DEVICE_SLOT - HANDLE
"""Bytes of the longest description that a message may have."""


class DeviceSlots:
    """A device ring's `buffer`. `hold` is this member's use of the memory, None while it has none."""

    __slots__ = ("_head", "_last", "_texts", "_words", "hold", "nbytes", "slot_bytes", "slots")

    def __init__(self, head: Mapping, texts: memoryview, shape: RingShape) -> None:
        self._head, self._words, self._texts = head.view, head.words, texts
        self.nbytes, self.slots, self.slot_bytes = shape.device_bytes, shape.slots, shape.slot_bytes
        self.hold: Hold | None = None
        self._last = -1  # owner: the slot of the last write

    @property
    def key(self) -> shared.Key:
        return self._words[R_UID], self._words[R_INDEX]

    # --- the owner

    def allocate(self, device: int) -> None:
        """Owner: allocate the memory, and write its handles into the segment. Raises `CudaError`."""
        memory = shared.allocate(self.key, device, self.nbytes)
        identity = str(runtime().identity(device)).encode()
        self._head[IDENTITY_AT:HANDLE_AT] = identity[:_IDENTITY].ljust(_IDENTITY, b"\0")
        self._head[HANDLE_AT : HANDLE_AT + HANDLE] = memory.handle
        for slot in range(self.slots):
            at = slot * DEVICE_SLOT
            self._texts[at : at + HANDLE] = memory.make_event(slot)
        self.hold = Hold(memory, self._words, -1)

    def free(self, is_member: Callable[[int, int], bool]) -> bool:
        """Owner: free the memory if no other member has it mapped. Returns whether it is freed.

        `is_member(index, uid)`: whether that member still lives. Once freed, the memory is not mapped again.
        """
        if self.hold is None:
            return True
        words = self._words
        store(words, R_FREED, 1)
        barrier()  # pairs with the one in `open`: its store of `mapped` is seen here, or it sees `freed`
        for index in range(MAX_DEVICE_MEMBERS):
            uid = words[R_MAPPED + index]
            if uid and is_member(index, uid):
                store(words, R_FREED, 0)
                return False
        self.hold = None
        return True

    def put_text(self, slot: int, text: bytes) -> None:
        """Owner: store the description of a message that does not fit the record."""
        at = slot * DEVICE_SLOT + HANDLE
        self._texts[at : at + len(text)] = text

    def begin(self) -> Any:
        """Owner: let the current stream wait for the last write to this ring. Returns the stream.

        If no receiver has read that message, its slot may be free although its copy has not run.
        """
        stream = runtime().current_stream(self.memory.device)
        if self._last >= 0:
            self.wait_for(self.memory, self._last, stream)
        return stream

    def written(self, slot: int, stream: Any) -> Any:
        """Owner: record the slot's event, which its readers wait for, on the stream of `begin`. Returns the event."""
        event = self.memory.event(slot, b"")
        runtime().record(event, stream)
        self._last = slot
        return event

    @property
    def memory(self) -> shared.SharedMemory:
        """Owner: the memory."""
        if self.hold is None:
            raise ClosedError("the publisher of this memory is closed")
        return self.hold.memory

    # --- readers

    def open(self, index: int, uid: int) -> Hold | None:
        """Reader (index, uid): return its use of the memory, which is mapped at first. None if the owner has freed it.

        Raises `CudaError`.
        """
        hold = self.hold
        if hold is not None:
            return hold
        memory = shared.known(self.key)
        if memory is not None and memory.mine:
            self.hold = hold = Hold(memory, self._words, -1)
            return hold
        words, at = self._words, R_MAPPED + index
        store(words, at, uid)
        try:
            barrier()
            if words[R_FREED]:
                store(words, at, 0)
                return None
            identity = bytes(self._head[IDENTITY_AT:HANDLE_AT]).rstrip(b"\0").decode(errors="replace")
            device = shared.device_called(identity)
            handle = bytes(self._head[HANDLE_AT : HANDLE_AT + HANDLE])
            # crash: device.mapping
            memory = shared.map_memory(self.key, device, self.nbytes, handle)
        except BaseException:
            store(words, at, 0)
            raise
        self.hold = hold = Hold(memory, words, at)
        return hold

    def unmap(self) -> None:
        """Reader: take no more messages from here. The memory stays mapped as long as a view of it lives."""
        self.hold = None

    def text(self, slot: int, length: int) -> bytes:
        """The description of the message that starts at a slot."""
        if length > TEXT:
            raise WireError(f"description of {length} bytes in a device ring, at most {TEXT} fit")
        at = slot * DEVICE_SLOT + HANDLE
        return bytes(self._texts[at : at + length])

    # --- both

    def wait_for(self, memory: shared.SharedMemory, slot: int, stream: Any) -> None:
        """Let a stream wait until the copies into a slot are done."""
        at = slot * DEVICE_SLOT
        runtime().stream_waits(stream, memory.event(slot, bytes(self._texts[at : at + HANDLE])))

    def block(self, slot: int, nbytes: int) -> Block:
        """Owner: the bytes of a slot, to be written after `begin`. It dies with the last view of them."""
        if self.hold is None:
            raise ClosedError("the publisher of this memory is closed")
        return Block(self.hold, slot * self.slot_bytes, nbytes)


class Block:
    """A run of bytes on the device. A tensor's storage keeps it alive, as it would keep an array over host memory."""

    __slots__ = ("__weakref__", "address", "device", "hold", "nbytes")

    def __init__(self, hold: Hold, offset: int, nbytes: int) -> None:
        self.hold, self.device = hold, hold.memory.device
        self.address, self.nbytes = hold.memory.address + offset, nbytes

    def tensor(self) -> Any:
        """The bytes as a torch tensor, uint8 [nbytes], whose storage keeps this block alive."""
        return runtime().tensor_at(self.address, self.nbytes, self.device, self)


class LeasedBlock(Block):
    """The bytes of a message for a reader. Its `token`, which a lease watches, outlives the last view until the device
    is done with them."""

    __slots__ = ("_number", "_slots", "_stream", "_streams", "token")

    def __init__(self, slots: DeviceSlots, hold: Hold, slot: int, nbytes: int, stream: Any) -> None:
        super().__init__(hold, slot * slots.slot_bytes, nbytes)
        self._slots, self._stream = slots, stream
        self._streams: tuple[Any, ...] = ()
        self._number, self.token = keeper.begin()

    def arrive(self, slot: int) -> None:
        """Let the stream wait for the owner's copy. The lease ends only when this stream is done as well."""
        self._slots.wait_for(self.hold.memory, slot, self._stream)
        self._streams = (self._stream,)

    def __del__(self) -> None:
        keeper.end(self._number, self.device, self._streams, self.hold)
