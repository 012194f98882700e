"""Fan-out in device memory: what both ends do differently (docs/internals/protocols.md, section 11)."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final

from ..channel import control as ctl
from ..codec import device_values as views
from ..codec.leaf import map_leaves
from ..cuda import keeper
from ..cuda.runtime import runtime
from ..errors import CudaError, DependencyError, PeerDied, WireError
from ..memory.segment import unlink
from ..ring.device import LeasedBlock
from ..ring.layout import L_PUBLISHED, MAX_DEVICE_SLOTS, OtherVersion, RingShape
from ..ring.ring import Ring
from .async_receiver import AsyncReceiver
from .async_sender import AsyncSender
from .base import LEAVING, check_count, lingering, local_members
from .message import Message

if TYPE_CHECKING:
    from ..ring.broadcast import BroadcastReader
    from ..ring.reader import Found

_PAUSE: Final = 0.01  # seconds between two checks of a process that ends


class DeviceSender(AsyncSender):
    """A sender whose rings may lie in device memory: `Publisher(..., device=)`."""

    _local: frozenset[int] = frozenset()  # receivers of this process, once it ends: it does not wait for itself

    def _use_device(self, device: Any, slots: int) -> None:
        """Put the data of the rings in device memory. Called before the constructor of the base."""
        check_count("slots (with device=)", slots, 1, MAX_DEVICE_SLOTS)
        self._device = runtime().device(device)
        self._make_ring = functools.partial(_make_ring, self._device)
        self._describe, self._describe_empty, self._decode_empty = views.encode, views.encode_loan, views.decode_loan

    def _is_unmapped(self) -> bool:
        """Free the memory of every ring that no member has mapped; whether all is free then."""
        control = self._member.control

        def is_member(index: int, uid: int) -> bool:
            return control.words[ctl.base(index)] == uid and control.is_alive(index)

        freed = [ring.device.free(is_member) for ring in self._pool.rings if ring.device is not None]
        return all(freed)

    def _depart(self) -> None:
        """Leave, or stay a member until no subscriber needs the memory, which ends with this process."""
        self._history = self._writer.history = 0
        if self._device is not None and not self._is_settled():
            self._state = LEAVING
            lingering.add(self)
            # crash: device.lent
            self._member.set_leaving()
            self._wake_all()
            keeper.add_job(self._has_left)
            return
        super()._depart()

    def _has_left(self) -> bool:
        """After close, four times a second: leave as soon as no subscriber needs the memory; whether it has left."""
        return self._try_run(self._leave_if_settled) is True

    def _leave_if_settled(self) -> bool:
        if self._state != LEAVING:
            return True
        self._refresh()
        if not self._is_settled() and not (self._drop_dead() and self._is_settled()):
            return False
        super()._depart()
        lingering.discard(self)
        return True

    def _outlast(self) -> None:
        self._local = local_members()
        while not self._has_left():
            time.sleep(_PAUSE)


def _make_ring(device: int, name: str, uid: int, index: int, shape: RingShape, remedy: str) -> Ring:
    ring = Ring.create(name, uid, index, shape, remedy)
    if ring.device is not None:
        try:
            ring.device.allocate(device)
        except BaseException:
            unlink(name)
            raise
    # crash: device.allocated
    return ring


class DeviceMessage(Message):
    """A message in device memory."""

    __slots__ = ()

    def copy(self) -> Any:
        """A private, writable copy of the value on the same device, which does not keep the slot."""
        value, hold = self.value, self._hold
        if hold is None:  # prefetched: its tensors alone keep the slot
            return map_leaves(lambda tensor: tensor.clone(), value)
        block, description = hold
        payload = None
        if block.nbytes:
            used = runtime()
            stream = used.current_stream(block.device)
            source = block.tensor()
            payload = used.empty((block.nbytes,), source.dtype, block.device, stream)
            used.copy(payload, source, stream)
        return views.decode(description, payload, block.nbytes, block.device)[0]


class DeviceReceiver(AsyncReceiver):
    """A receiver whose senders' rings may lie in device memory: `Subscriber`."""

    _latest = False  # whether it takes the newest message only

    def _take(self, reader: Any, patience: int = 0) -> Message | None:
        return self._take_from_device(reader) if reader.device else super()._take(reader, patience)

    def _take_from_device(self, reader: BroadcastReader) -> Message | None:
        """The next message of a publisher of device memory, or None.

        Raises `PeerDied` if the publisher is dead, once, and passes over what it had published; `CudaError` if its
        memory cannot be mapped here, each time.
        """
        try:
            return self._take_next(reader)
        except BaseException:
            reader.abandon()
            raise

    def _take_next(self, reader: BroadcastReader) -> Message | None:
        while seq := reader.next():
            missed = seq - reader.position - 1
            if not self._is_there(reader):
                self._give_up(reader)
                return None
            found = block = lease = None
            try:
                found = reader.locate(seq)
                if found is not None:
                    block = self._block(reader, found)
                if found is not None and block is not None:
                    lease = reader.lease(block.token, found, seq)
            except (WireError, FileNotFoundError) as error:
                if reader.is_current(seq):
                    if isinstance(error, OtherVersion):
                        self._disown(reader, str(error))
                        return None
                    self._blame(reader, seq, str(error))
                    reader.position = seq
                    reader.skip(seq)
                    continue
            except CudaError:
                if not self._is_there(reader):
                    continue  # that is why
                raise
            if found is None or block is None or lease is None:  # not ours: the publisher took it back
                reader.pass_by(seq)
                continue
            # crash: device.taken
            del block.token  # from here on the lease ends with the block and the device's work on it
            try:
                block.arrive(found.slot)
                value, meta = views.decode_loan(found.description, block, readonly=True)
            except (WireError, CudaError, DependencyError) as error:
                is_lost = isinstance(error, CudaError) and not self._is_there(reader)
                reader.taking = None
                if is_lost:  # with the others
                    continue
                reader.position = seq
                if not isinstance(error, WireError):
                    raise
                self._blame(reader, seq, str(error))
                continue
            hold = block, found.description
            message = DeviceMessage(
                value, meta, seq, reader.sender, found.sent_ns, found.nbytes, 1, missed, hold, lease, self
            )
            self._undelivered[message] = None  # no boundary between these: taken now, or not at all
            reader.position, reader.taking = seq, None
            reader.count(found.nbytes, missed=missed)
            return message
        return None

    def _block(self, reader: BroadcastReader, found: Found) -> LeasedBlock | None:
        """What the message's tensors are made from; None if its publisher has freed the memory."""
        keeper.release_finished()
        slots = found.ring.device
        if slots is None:
            raise WireError("host ring of a publisher of device memory")
        hold = slots.open(self._member.index, self._member.uid)
        if hold is None:
            return None
        runtime().current_stream(hold.memory.device)  # raises before the message is taken, not after it
        keeper.add_job(reader.unmap_if_unneeded)
        return LeasedBlock(slots, hold, found.slot, found.nbytes)

    def _is_there(self, reader: BroadcastReader) -> bool:
        """Whether the publisher lives: its memory exists as long."""
        control = self._member.control
        return control.words[ctl.base(reader.index)] == reader.uid and control.is_alive(reader.index)

    def _give_up(self, reader: BroadcastReader) -> None:
        """Pass over the messages of a publisher that is gone, and its memory with it."""
        published = reader.words[L_PUBLISHED]
        lost = published - reader.position
        reader.position, reader.gone = published, True
        reader.unmap()
        if reader.sequences.closed and (self._latest or not reader.started):
            return  # it has closed, and waited for its recipients: this subscriber was not one
        raise PeerDied(
            f'channel "{self.name}": publisher {reader.uid:016x} died, and the device memory with {lost} messages that '
            "this subscriber had not received died with it (CUDA frees the memory of a process that ends): close a "
            "publisher before its process ends, and it waits for its readers"
        )
