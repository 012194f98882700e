"""`Message`, which `recv` returns."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..codec.implementation import copy_value
from ..codec.leaf import is_tensor, map_leaves
from ..codec.libraries import device_views
from ..errors import ReleasedError
from ..memory.words import store
from ..ring.implementation import Received
from ..ring.layout import ATTEMPT, CLAIMED
from .base import Local

if TYPE_CHECKING:
    from .receiver import Receiver


class _Itself(property):
    """`return self` without a Python function: getting it from an object returns something that, called, returns that
    object."""

    def __call__(self, message: Message) -> Message:
        """Called by `contextlib.ExitStack`, which gets `__enter__` from the class."""
        return message


class SenderInfo(NamedTuple):
    """Who sent a message: `Message.sender`. The same object for all messages of a sender that one receiver gets."""

    id: str
    """16 hexadecimal digits, different for each `Publisher` and `Producer` that was ever created."""
    name: str
    """What the sender passed as `label=`; empty if it passed none."""
    pid: int
    """The id of its process, in that process's own pid namespace."""


class Message(Local, Received):
    """A received message: a value whose tensors and arrays are the sender's slot itself.

    The slot stays leased as long as any view of it lives: the value, a slice, a `Parameter`, an autograd graph.
    `release()`, or leaving a `with` block, drops only the message's own reference; on a work queue it also says that
    the message is done.

    Fan-out slots are mapped read-only: NumPy arrays refuse writing, and writing to a tensor ends the process with a
    segmentation fault, after a line on standard error that names the channel and the message. Take `copy()`, or
    `recv(copy=True)`, to change a value.

    >>> import shmtensor, torch
    >>> with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
    ...     seq = pub.send({"x": torch.ones(2), "id": 7}, meta={"ts": 1.5})
    ...     with sub.recv(timeout=5) as msg:
    ...         msg.value["x"].sum().item(), msg.value["id"], msg.meta, msg.seq, msg.nbytes
    (2.0, 7, {'ts': 1.5}, 1, 8)
    """

    __slots__ = ("__weakref__",)

    value: Any
    """What was sent: a tensor, an ndarray, or a dict, list or tuple of these, bytes and JSON scalars. `ReleasedError`
    once the message is released."""
    meta: Any
    """What the sender passed as `meta=`, or None."""
    seq: int
    """The sender's sequence number of this message, from 1."""
    sender: SenderInfo
    """Who sent it."""
    nbytes: int
    """Payload bytes."""
    attempt: int
    """How often the message was delivered, this time included; above 1 only on a work queue and in a group, after a
    receiver died with it or gave it back."""
    missed: int
    """With `delivery="latest"`: how many messages of this sender were passed over since the one before."""
    _sent_ns: int
    _receiver: Receiver
    _lease: Any
    _hold: Any

    @property
    def sent_at(self) -> float:
        """When it was sent, in seconds, on the scale of `time.time()`. If that clock was set since, the value is
        shifted by as much.

        >>> import shmtensor, time
        >>> with shmtensor.Publisher("doc") as pub, shmtensor.Subscriber("doc") as sub:
        ...     seq = pub.send(b"frame")
        ...     msg = sub.recv(timeout=5)
        >>> abs(time.time() - msg.sent_at) < 60, 0 <= time.monotonic() - msg.sent_monotonic < 60
        (True, True)
        """
        return time.time() - time.monotonic() + self.sent_monotonic

    @property
    def sent_monotonic(self) -> float:
        """When it was sent, in seconds, on the scale of `time.monotonic()`: for durations."""
        return self._sent_ns * 1e-9

    def copy(self) -> Any:
        """A private, writable copy of the value, which does not keep the slot."""
        return copy_value(self.value)

    def to(self, device: Any, *, non_blocking: bool = False) -> Any:
        """The value with every tensor copied to `device`. Arrays of NumPy stay what they are: views of the slot.

        To a CUDA device (experimental) the copies are queued on the calling thread's current stream. With
        `non_blocking` this returns before they are done: later work on that stream runs after them, and the slot stays
        leased until they are done, whatever is released meanwhile. Tensors that share memory share it on the device.
        docs/guide/cuda.md

        With a device that the tensors are on already (`"cpu"`) this is the value itself, not a copy.

        Raises:
            CudaError: CUDA is missing, or the device has no memory left; with `pin=True`, the ring cannot be pinned.
        """
        value = self.value
        if device == "cpu" or not device_views().is_cuda(device):
            return map_leaves(lambda leaf: leaf.to(device) if is_tensor(leaf) else leaf, value)
        return self._receiver._to_device(value, device, non_blocking)

    def release(self) -> None:
        """Drop the message's own reference to its slot; on a work queue, acknowledge the message. Idempotent."""
        receiver = self._receiver
        if receiver is not None:
            receiver._acknowledge(self._lease)
            self._empty()

    def _empty(self) -> None:
        """Drop the references. An unacknowledged message is given back once its views here are gone."""
        self.__class__ = Released
        self._receiver = self._hold = self._lease = None  # type: ignore[assignment]
        _set_value(self, None)

    if TYPE_CHECKING:

        def __enter__(self) -> Message: ...
    else:
        # An exception could arrive at the entry of a Python function: after `recv` has returned the message, before the
        # block, whose `__exit__` acknowledges it.
        __enter__ = _Itself(weakref.ref)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()
        elif self._receiver is not None:  # an exception: not done; dropping the references gives the slot back
            self._receiver._reject(self._lease)
            self._empty()

    def _instead(self) -> str:
        return "pass msg.copy(), or the channel's name, for the other process to receive its own"

    def __repr__(self) -> str:
        state = "released" if self._receiver is None else f"{self.nbytes} bytes"
        return f"<Message seq={self.seq} attempt={self.attempt} {state}>"


def drop_all(messages: dict[Message, Any]) -> None:
    """Empty a table of messages that were taken and never returned: their slots are given back, or other receivers get
    them."""
    while messages:
        try:
            message, _ = messages.popitem()  # another thread may remove the last one
        except KeyError:
            return
        message._empty()


def give_back(message: Message) -> None:
    """Release a message without acknowledging it: another receiver gets it."""
    message._empty()


def words_of(message: Message) -> tuple[memoryview, int]:
    """The words of its ring, and the index of the first of those of its slot: docs/internals/core.md, "Reader"."""
    lease = message._lease
    return lease.words, lease.word


def store_attempts(words: memoryview, at: int, seq: int, count: int) -> None:
    """For a claimed message of a work queue: store how many receivers have had it. One less than its `attempt` means
    that this receiver does not count."""
    store(words, at + ATTEMPT, seq << 8 | min(count, 255))
    if not count:
        store(words, at + CLAIMED, 0)


_set_value: Final = Received.__dict__["value"].__set__


class Released(Message):
    """A message that was released, or given back.

    A class of its own, so that reading the value of one that was not needs no check; and whether one was is known
    without a call, at which an exception from outside could arrive.
    """

    __slots__ = ()

    @property
    def value(self) -> Any:
        """Raises `ReleasedError`."""
        raise ReleasedError("this message was released: take msg.value, or msg.copy(), before releasing it")
