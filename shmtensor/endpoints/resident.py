"""Fan-out in device memory: what differs at both ends (docs/internals/protocols.md, section 11)."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final

from ..channel import control as ctl
from ..cuda import keeper
from ..cuda.runtime import runtime
from ..errors import CudaError, PeerDied, WireError
from ..memory.segment import unlink
from ..ring.device import LeasedBlock
from ..ring.layout import L_PUBLISHED, MAX_DEVICE_SLOTS, OtherVersion, RingShape
from ..ring.ring import Ring
from ..views import resident as views
from ..views.values import map_leaves
from .asend import AsyncSender
from .base import LEAVING, check_count, lingering, local_members
from .message import Message

if TYPE_CHECKING:
    from ..ring.broadcast import BroadcastFeed
    from ..ring.feed import Found
    from .pubsub import Subscriber

_PAUSE: Final = 0.01  # seconds between two looks of a process that ends


class DeviceSender(AsyncSender):
    """A sender whose rings may lie in device memory: `Publisher(..., device=)`."""

    _local: frozenset[int] = frozenset()  # receivers of this process, once it ends: it does not wait for itself

    def _use_device(self, device: Any, slots: int) -> None:
        check_count("slots (with device=)", slots, 1, MAX_DEVICE_SLOTS)
        self._device = runtime().device(device)
        self._make_ring = functools.partial(_make_ring, self._device)
        self._describe, self._describe_empty, self._decode_empty = views.encode, views.encode_loan, views.decode_loan

    def _is_unmapped(self) -> bool:
        """Let go of the memory of every ring that nobody has mapped; whether that were all."""
        control = self._member.control

        def is_member(index: int, uid: int) -> bool:
            return control.words[ctl.base(index)] == uid and control.is_alive(index)

        freed = [ring.device.free(is_member) for ring in self._pool.rings if ring.device is not None]
        return all(freed)

    def _depart(self) -> None:
        """The memory ends with this process: the publisher stays a member until nobody needs it any more."""
        self._history = self._writer.history = 0
        if self._device is not None and not self._is_settled():
            self._state = LEAVING
            lingering.add(self)
            # crash: device.lent
            self._member.set_leaving()
            self._rouse()
            keeper.add_chore(self)
            return
        super()._depart()

    def look_after(self) -> bool:
        """Closed with readers left: whether they have let go by now. Called four times a second."""
        return self._try_run(self._look_whether_settled) is True

    def _look_whether_settled(self) -> bool:
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
        while not self.look_after():
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
        """A private, writable copy of the value that no lease hangs on, on the same device."""
        value, hold = self.value, self._hold
        if hold is None:  # received ahead: its tensors alone hold the slot
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


def take_from_device(receiver: Subscriber, feed: BroadcastFeed) -> Message | None:
    """The next message of a publisher of device memory, or None. As `Subscriber._take` for host memory.

    Raises `PeerDied` if the publisher is dead, once, and passes over what it had published; `CudaError` if its memory
    cannot be mapped here, each time.
    """
    try:
        return _take_next(receiver, feed)
    except BaseException:
        feed.abandon()
        raise


def _take_next(receiver: Subscriber, feed: BroadcastFeed) -> Message | None:
    while seq := feed.next():
        missed = seq - feed.position - 1
        if not _is_there(receiver, feed):
            _give_up(receiver, feed)
            return None
        found = block = lease = None
        try:
            found = feed.locate(seq)
            if found is not None:
                block = _block(receiver, feed, found)
            if found is not None and block is not None:
                lease = feed.lease(block.token, found, seq)
        except (WireError, FileNotFoundError) as error:
            if feed.is_current(seq):
                if isinstance(error, OtherVersion):
                    receiver._disown(feed, str(error))
                    return None
                receiver._blame(feed, seq, str(error))
                feed.position = seq
                feed.skip(seq)
                continue
        except CudaError:
            if not _is_there(receiver, feed):
                continue  # that is why
            raise
        if found is None or block is None or lease is None:  # not ours: the publisher took it back
            feed.pass_by(seq)
            continue
        # crash: device.taken
        del block.token  # from here on the lease ends with the block and the device's work on it
        try:
            block.arrive(found.slot)
            value, meta = views.decode_loan(found.description, block, readonly=True)
        except (WireError, CudaError) as error:
            is_lost = isinstance(error, CudaError) and not _is_there(receiver, feed)
            feed.taking = None
            if is_lost:  # with the others
                continue
            feed.position = seq
            if isinstance(error, CudaError):
                raise
            receiver._blame(feed, seq, str(error))
            continue
        hold = block, found.description
        message = DeviceMessage(value, meta, seq, found.nbytes, 1, missed, hold, lease, receiver)
        receiver._undelivered[message] = None  # no boundary between these: taken now, or not at all
        feed.position, feed.taking = seq, None
        counts = receiver._counts
        counts.missed += missed
        counts.received += 1
        counts.received_bytes += found.nbytes
        return message
    return None


def _block(receiver: Subscriber, feed: BroadcastFeed, found: Found) -> LeasedBlock | None:
    """What the message's tensors are made from; None if its publisher has let go of the memory."""
    keeper.settle()
    slots = found.ring.device
    if slots is None:
        raise WireError("host ring of a publisher of device memory")
    member = receiver._member
    hold = slots.open(member.index, member.uid)
    if hold is None:
        return None
    runtime().current_stream(hold.memory.device)  # raises before the message is taken, not after it
    keeper.add_chore(feed)
    return LeasedBlock(slots, hold, found.slot, found.nbytes)


def _is_there(receiver: Subscriber, feed: BroadcastFeed) -> bool:
    """Whether the publisher lives: its memory does as long."""
    control = receiver._member.control
    return control.words[ctl.base(feed.index)] == feed.uid and control.is_alive(feed.index)


def _give_up(receiver: Subscriber, feed: BroadcastFeed) -> None:
    """The publisher is gone, and its memory with it."""
    published = feed.words[L_PUBLISHED]
    lost = published - feed.position
    feed.position, feed.gone = published, True
    feed.unmap()
    if feed.ledger.closed and (receiver._latest or not feed.started):
        return  # it has left in good order, and waited for others than us
    raise PeerDied(
        f'channel "{receiver.name}": publisher {feed.uid:016x} died, and the device memory with {lost} messages that '
        "this subscriber had not received died with it (CUDA frees the memory of a process that ends): close a "
        "publisher before its process ends, and it waits for its readers"
    )
