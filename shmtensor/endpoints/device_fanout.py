"""Fan-out in device memory: where messages lie, and how they are taken (docs/internals/protocols.md, section 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..channel import control as ctl
from ..channel.control import Control
from ..codec import device_values as views
from ..codec.leaf import map_leaves
from ..cuda import keeper
from ..cuda.runtime import runtime
from ..errors import CudaError, DependencyError, PeerDied, WireError
from ..memory.segment import unlink
from ..options import check_count
from ..ring.device import LeasedBlock
from ..ring.layout import L_PUBLISHED, MAX_DEVICE_SLOTS, OtherVersion, RingShape
from ..ring.reader import ALL, LATEST, OTHER, PASSED_OVER, Found, Reader, Reception
from ..ring.reference import BroadcastReader, LatestReader
from ..ring.ring import Ring
from .message import Message

if TYPE_CHECKING:
    from ..channel.membership import Member


class DeviceMemory:
    """The memory of a CUDA device, with the data of a sender's rings: `Publisher(..., device=)`."""

    describe = staticmethod(views.encode)
    describe_empty = staticmethod(views.encode_loan)
    decode_empty = staticmethod(views.decode_loan)

    def __init__(self, device: Any, slots: int) -> None:
        check_count("slots (with device=)", slots, 1, MAX_DEVICE_SLOTS)
        self._device = runtime().device(device)

    def make_ring(self, name: str, uid: int, index: int, shape: RingShape, remedy: str) -> Ring:
        """As `Ring.create`, with its data here."""
        ring = Ring.create(name, uid, index, shape, remedy)
        if ring.device is not None:
            try:
                ring.device.allocate(self._device)
            except BaseException:
                unlink(name)
                raise
        # crash: device.allocated
        return ring

    @staticmethod
    def is_unmapped(rings: Iterable[Ring], control: Control) -> bool:
        """Free the memory of every ring that no member has mapped; whether all is free then."""

        def is_member(index: int, uid: int) -> bool:
            return control.words[ctl.base(index)] == uid and control.is_alive(index)

        freed = [ring.device.free(is_member) for ring in rings if ring.device is not None]
        return all(freed)

    @staticmethod
    def when_unneeded(leave: Callable[[], bool]) -> None:
        """Have a bound method called four times a second until it returns true: the sender has closed."""
        keeper.add_job(leave)


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
            source = block.tensor()
            with used.on(used.current_stream(block.device)):
                payload = used.empty((block.nbytes,), source.dtype, block.device)
                used.copy(payload, source)
        return views.decode(description, payload, block.nbytes, block.device)[0]


class DeviceReader(BroadcastReader):
    """Takes every message of one publisher of device memory."""

    __slots__ = ()

    def take(self, receiver: Any, undelivered: dict[Any, Any], patience: int) -> Any:
        """As for every reader.

        Raises `PeerDied` if the publisher is dead, once, and passes over what it had published; `CudaError` if its
        memory cannot be mapped here, each time.
        """
        while seq := self.next():
            missed = seq - self.position - 1
            if not self._is_there():
                self._give_up()
                return None
            found = block = lease = None
            try:
                found = self.locate(seq)
                if found is not None:
                    block = self._block(found)
                if found is not None and block is not None:
                    lease = self.lease(block.token, found, seq)
            except (WireError, FileNotFoundError) as error:
                if self.is_current(seq):
                    if isinstance(error, OtherVersion):
                        return OTHER, seq, str(error)
                    self.position = seq
                    self.skip(seq)
                    return PASSED_OVER, seq, str(error)
            except CudaError:
                if not self._is_there():
                    continue  # the publisher is gone, and its memory with it: the next turn gives up
                raise
            if found is None or block is None or lease is None:  # not ours: the publisher took it back
                self.pass_by(seq)
                continue
            # crash: device.taken
            del block.token  # from here on the lease ends with the block and the device's work on it
            try:
                block.arrive(found.slot)
                value, meta = views.decode_loan(found.description, block, readonly=True)
            except (WireError, CudaError, DependencyError) as error:
                is_lost = isinstance(error, CudaError) and not self._is_there()
                self.taking = None
                if is_lost:  # with the others
                    continue
                self.position = seq
                if not isinstance(error, WireError):
                    raise
                return PASSED_OVER, seq, str(error)
            hold = block, found.description
            message = DeviceMessage(
                value, meta, seq, self.sender, found.sent_ns, found.nbytes, 1, missed, hold, lease, receiver
            )
            undelivered[message] = None  # no boundary between these: taken now, or not at all
            self.position, self.taking = seq, None
            self.count(found.nbytes, missed=missed)
            return message
        return None

    @property
    def _member(self) -> Member:
        """The subscriber."""
        return self.reception.owner  # type: ignore[no-any-return]

    def _block(self, found: Found) -> LeasedBlock | None:
        """What the message's tensors are made from; None if its publisher has freed the memory."""
        keeper.release_finished()
        slots, member = found.ring.device, self._member
        if slots is None:
            raise WireError("host ring of a publisher of device memory")
        hold = slots.open(member.index, member.uid)
        if hold is None:
            return None
        stream = runtime().current_stream(hold.memory.device)  # raises before the message is taken, not after it
        keeper.add_job(self.unmap_if_unneeded)
        return LeasedBlock(slots, hold, found.slot, found.nbytes, stream)

    def _is_there(self) -> bool:
        """Whether the publisher lives: its memory exists as long."""
        control = self._member.control
        return control.words[ctl.base(self.index)] == self.uid and control.is_alive(self.index)

    def _give_up(self) -> None:
        """Pass over the messages of a publisher that is gone, and its memory with it."""
        published = self.words[L_PUBLISHED]
        lost = published - self.position
        self.position, self.gone = published, True
        self.unmap()
        if self.sequences.closed and not (self.counted and self.start):
            return  # it has closed, and waited for its recipients: this subscriber was not one
        raise PeerDied(
            f'channel "{self._member.channel}": publisher {self.uid:016x} died, and the device memory with {lost} '
            "messages that this subscriber had not received died with it (CUDA frees the memory of a process that "
            "ends): close a publisher before its process ends, and it waits for its readers"
        )


class LatestDeviceReader(DeviceReader, LatestReader):
    """Takes the newest messages of one publisher of device memory."""

    __slots__ = ()


_READERS: dict[int, type[DeviceReader]] = {ALL: DeviceReader, LATEST: LatestDeviceReader}


def make_device_reader(reception: Reception, *args: Any) -> Reader:
    """The reader of a subscriber for a new publisher of device memory; `args` are the rest of those of `Reader`."""
    if reception.mode not in _READERS:
        raise WireError("it sends device memory, which a group does not take: subscribe without group=")
    return _READERS[reception.mode](reception, *args)
