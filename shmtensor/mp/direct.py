"""Messages from one process to one other, through the rings of a work queue. (A `Pool` sends to any of its workers.)

A work queue gives a message to the consumer that takes it first. In an executor each call is for one worker and each
result for the parent; what is sent into a pipe is for its other end. So no process scans these queues or sleeps on
them: a sender names its message (`MessageRef`) in the socket message that wakes the receiver anyway, and the receiver
claims exactly that one. The rest is as in any work queue: the lock that is the claim, the lease that ends with the last
view, the clean-up after a death.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import queues
from typing import Any, Final, NamedTuple

import numpy as np

from ..channel.control import CAPACITY
from ..endpoints.base import LIVENESS_INTERVAL, SenderTraits
from ..endpoints.message import Message
from ..endpoints.workqueue import Producer
from ..errors import PeerDied, ResourceError, RingFull, ShmTensorError, WireError
from ..memory.segment import PAGE, free_bytes, more_room, where
from ..options import format_bytes
from ..ring.layout import CLAIMED, DONE, R_RECORDS, RECORD_WORDS, WORK_QUEUE, RingShape, round_slot, state_word
from ..ring.pool import Pool, Sizing
from ..ring.reader import ATTACH, GIVEN_UP, UNREADABLE
from .pickling import DeviceConsumer, loads, nbytes_of

MOST_WORKERS: Final = CAPACITY - 6
"""Of a pool or executor: members that a channel can have, less some for workers that replace others."""
INLINE_MOST: Final = 32 << 10
"""Streams of at most so many bytes, without a tensor, are sent in the socket message, which is cheaper than a slot."""
COPY_MOST: Final = 64 << 10
"""Values of at most so many bytes are copied out of their slot on arrival, so that keeping them holds no slots."""

_PATIENCE: Final = 5.0
_RING_BYTES: Final = 8 << 20
"""Size of a sender's first rings; later ones have a quarter of what it has."""
_MOST_SLOTS: Final = 1024


class MessageRef(NamedTuple):
    """Names one message."""

    sender: int
    """The sending endpoint's uid."""
    seq: int


def check_fits(value: list[Any], max_bytes: int | None, what: str) -> None:
    """Raise `ResourceError` for a value that is larger than `max_bytes`."""
    nbytes = nbytes_of(value)
    if max_bytes is not None and nbytes > max_bytes:
        raise ResourceError(
            errno.ENOMEM,
            f"{what} of {format_bytes(nbytes)} is larger than max_bytes={format_bytes(max_bytes)}: "
            "pass a larger max_bytes= or send less at a time",
        )


def inline(value: list[Any]) -> bytes | None:
    """The pickled value for the socket message, if it is small and holds no tensor."""
    stream = value[0]
    if len(value) > 1 or type(stream) is list or stream.nbytes > INLINE_MOST:
        return None
    return stream.tobytes()  # type: ignore[no-any-return]


def unfold(packed: bytes) -> Any:
    """The object of a pickled value that came in the socket message."""
    return loads([np.frombuffer(packed, np.uint8)])


def value_of(message: Message, copies: bool = False) -> Any:
    """A message's pickled value: a copy if it is small or `copies` is set, else views of its slot."""
    return message.copy() if copies or message.nbytes <= COPY_MOST else message.value


class _FittedPool(Pool):
    """Sizes each ring for the message that needed it, so that a few huge messages do not make all slots huge."""

    __slots__ = ()

    def shape(self, nbytes: int) -> RingShape:
        # rounded, so that similar sizes share slots: at most an eighth is wasted
        step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
        slot_bytes = round_slot(nbytes if nbytes <= PAGE // 2 else (nbytes + step - 1) // step * step)
        room = min(max(_RING_BYTES, self.nbytes // 4), free_bytes() // 2)
        if self._max_bytes is not None:
            room = min(room, self._max_bytes - self.nbytes)
        slots = max(1, min(room // slot_bytes, _MOST_SLOTS, self._sequences.mask - self.slots))
        shape = RingShape(self._kind, slots, slot_bytes, self._capacity)
        if slots == 1 and shape.nbytes > room:
            return RingShape(self._kind, 1, round_slot(nbytes), self._capacity)
        while shape.slots > 1 and shape.nbytes > room:
            shape = RingShape(self._kind, shape.slots - (shape.slots + 7) // 8, slot_bytes, self._capacity)
        return shape

    def may_grow(self, nbytes: int) -> bool:
        """Whether a ring may be added: it takes at most half of what is free in `/dev/shm`."""
        return super().may_grow(nbytes) and self.shape(nbytes).nbytes <= free_bytes() // 2

    def add(self, nbytes: int) -> None:
        try:
            super().add(nbytes)
        except ResourceError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise
            used, remedy, limit = "", "send less at a time", "none"
            if self.rings:
                used = f"{format_bytes(self.nbytes)} are in rings for messages of other sizes, and rings never shrink; "
                remedy = "send the largest first"
            if self._max_bytes is not None:
                remedy += ", pass a larger max_bytes="
                limit = format_bytes(self._max_bytes)
            raise ResourceError(
                error.errno,
                f'no ring for a message of {format_bytes(nbytes)} of channel "{self._channel}": {used}'
                f"max_bytes={limit}, {where()} has {format_bytes(free_bytes())} free: {remedy}, or {more_room()}",
            ) from error


class DirectProducer(Producer):
    """Sends each message to one named consumer. Its rings grow up to `max_bytes`, or as far as `/dev/shm` allows."""

    _traits = SenderTraits(WORK_QUEUE, pool=_FittedPool, sizing=Sizing.exactly(1))

    def __init__(
        self, channel: str, max_bytes: int | None, slot_bytes: int | None = None, slots: int | None = None
    ) -> None:
        super().__init__(channel, full="grow", max_bytes=max_bytes, slot_bytes=slot_bytes, slots=slots)

    def post(
        self, value: list[Any], may_get_room: Callable[[], bool], what: str, holder: str, head: tuple[Any, ...] = ()
    ) -> MessageRef:
        """Send a value that `pickling.dumps` made, after the scalars of `head`.

        Waits for room as long as `may_get_room()` is true; then raises `ResourceError`, which says that `what` has no
        room and that `holder` has the memory.
        """
        check_fits(value, self._max_bytes, what)
        while True:
            try:
                return MessageRef(self._member.uid, self.send([*head, *value], timeout=LIVENESS_INTERVAL))
            except RingFull:
                if not may_get_room():
                    raise ResourceError(errno.ENOMEM, self._shortage(nbytes_of(value), what, holder)) from None

    def post_now(self, value: list[Any]) -> MessageRef:
        """As `post`, but raises `RingFull` instead of a wait."""
        return MessageRef(self._member.uid, self.send(value, timeout=0))

    @property
    def newest(self) -> MessageRef:
        """The message that was published last."""
        return MessageRef(self._member.uid, self._published)

    def _shortage(self, nbytes: int, what: str, holder: str) -> str:
        now = self.statistics()
        limit = "none" if self._max_bytes is None else format_bytes(self._max_bytes)
        return (
            f"no room for {what} of {format_bytes(nbytes)}: {now.slots_busy} of {now.slots} slots "
            f"({format_bytes(now.ring_bytes)} of shared memory) are held by {holder}; max_bytes={limit}, {where()} has "
            f"{format_bytes(free_bytes())} free: drop tensors, copy those that you keep, or pass a larger max_bytes="
        )

    def end(self) -> None:
        """Leave at the end of the process."""
        self._at_exit()

    @property
    def index(self) -> int:
        """This member's index in the channel's table, for `DirectConsumer.is_alive`."""
        return self._member.index

    def is_consumed(self) -> bool:
        """Whether every message was taken and marked as done; views of them may be alive."""
        return bool(self._run(self._recipients.is_settled))

    def was_lost(self, ref: MessageRef) -> bool:
        """Whether the process that took the message has died, before or after it marked it as done."""
        place = self._words[self._order + (ref.seq & self._mask)]
        ring, slot = self._rings[place >> 32], place & 0xFFFFFFFF
        words, state = ring.words, state_word(ring, slot)
        if words[R_RECORDS + slot * RECORD_WORDS] != ref.seq or words[state + DONE] == ref.seq:
            return True
        return words[state + CLAIMED] == ref.seq and not self._sequences.locks.held_by_other(ref.seq)


class Patience:
    """Whether a sender without room keeps waiting: while its receiver has not taken everything, and `_PATIENCE` longer.

    The receiver may keep what it took for ever, and may be waiting for the very message that finds no room.
    """

    def __init__(self, producer: DirectProducer) -> None:
        self._producer = producer
        self._since = time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._producer.is_consumed():
            self._since = now
        return now - self._since < _PATIENCE


class _NoInbox:
    """No process sleeps on these queues, so there is no socket for wake-ups."""

    def __init__(self, directory: str, uid: int) -> None:
        """The same parameters as those of `Inbox`."""

    def close(self) -> None:
        """Nothing to close."""


class DirectConsumer(DeviceConsumer):
    """Takes messages by name. Do not call `recv`."""

    _traits = replace(DeviceConsumer._traits, counts_lost=False, inbox=_NoInbox)  # type: ignore[arg-type]

    def __init__(self, channel: str) -> None:
        super().__init__(channel, acknowledge="release")

    def take(self, ref: MessageRef) -> Message:
        """The message that `ref` names. `release()` marks it as done; its slot comes back with the last view's end.

        Raises `PeerDied` if it is not there, `WireError` if its bytes are not valid, `DependencyError` if torch is
        missing that can read it.
        """
        return self._run(self._take_inside, ref)  # type: ignore[no-any-return]

    def _take_inside(self, ref: MessageRef) -> Message:
        if self._state:
            self._refuse()
        if (now := time.monotonic()) >= self._liveness_check_due:  # no thread waits here that would do it
            self._liveness_check_due = now + LIVENESS_INTERVAL
            self._end_dead_leases()
        reader = self._reader(ref.sender)
        if reader is not None:
            try:
                found = self._named(reader, ref.seq)
                if found is not None:
                    self._undelivered.clear()
                    return found
            except BaseException:
                reader.abandon()
                found = None
                self._undelivered.clear()  # it may be taken again
                raise
        raise PeerDied(f'channel "{self.name}": message {ref.seq} of member {ref.sender:016x} is gone')

    def _named(self, reader: Any, seq: int) -> Message | None:
        while type(found := reader.take_named(seq, self, self._undelivered)) is tuple:
            if found[0] == ATTACH:
                reader.ring(found[2])
            elif found[0] in (GIVEN_UP, UNREADABLE):
                self._handle(reader, found)
            else:
                raise WireError(reader.explain(found))
        return found  # type: ignore[no-any-return]

    def _reader(self, sender: int) -> Any:
        reader = next((reader for reader in self._readers if reader.uid == sender), None)
        if reader is None:
            self._refresh()
            reader = next((reader for reader in self._readers if reader.uid == sender), None)
        return reader

    def is_alive(self, index: int) -> bool:
        """Whether the member at an index of the channel's table lives. Callable from any thread."""
        return self._member.control.is_alive(index)

    def end(self) -> None:
        """Leave at the end of the process: clean up, even though views of messages are alive."""
        self._at_exit()


def take_back(consumer: DirectConsumer, ref: MessageRef) -> None:
    """Free the slot of a message that was published and will not be named to any process."""
    with contextlib.suppress(ShmTensorError):  # it is gone, or the channel is
        consumer.take(ref).release()


class ThreadLocks:
    """A context whose locks are those of one process, for queues of the standard library that no other process has.

    The standard pool makes such a queue, and the standard executor two that are replaced at once. With a context as it
    is, each of their locks is a named semaphore: it would stay in `/dev/shm`, under a name of no channel, when the
    process and its resource tracker are killed.
    """

    Lock = staticmethod(threading.Lock)
    BoundedSemaphore = staticmethod(threading.BoundedSemaphore)

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def SimpleQueue(self) -> queues.SimpleQueue[Any]:
        """A standard queue between threads, with a pipe that can be waited for."""
        return queues.SimpleQueue(ctx=self)
