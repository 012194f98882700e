"""`Pipe`: the two connected ends of `multiprocessing.Pipe`, with tensors and arrays in shared memory.

A connection is the standard library's, with its socket or pipe: all that tells one process of another's end, and
`multiprocessing.connection.wait`, work as ever. What `send` writes into it is the pickled object, as there, or the name
of the slot that has it:

    0x80 ...          the object's pickle: at most `direct.INLINE_MOST` bytes, no tensor or array in it
    0x00 | u64 | u64  the object is in a slot: its `MessageRef`

The slots belong to a channel, whose keeper (`queue_handle.py`) goes wherever one of the ends goes: what was sent stays
until the last process with one of the ends has closed it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import struct
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any, Final

from ..errors import ShmTensorError
from ..memory.descriptors import InheritedFile
from ..options import parse_bytes
from .direct import DirectConsumer, DirectProducer, MessageRef, Patience, inline, unfold, value_of
from .pickle_streams import dumps, loads
from .putter import default_limit
from .queue_handle import QueueHandle, hold

_NAME: Final = struct.Struct("<BQQ")
_IN_SLOT: Final = 0
"""First byte of a slot's name. No pickle begins with it."""


class _Slots(QueueHandle):
    """One process's handle of the channel of a pipe: its end of the slots, as far as it has used them."""

    _kind = "pipe"

    def make_putter(self) -> DirectProducer:
        """Create the sending end."""
        return DirectProducer(self.name, self.max_bytes)

    def make_getter(self) -> DirectConsumer:
        """Create the receiving end."""
        return DirectConsumer(self.name)


class Connection(connection.Connection):
    """One end of a `Pipe`: `multiprocessing.connection.Connection`, whose tensors and arrays go through shared memory.

    `send` copies tensors and arrays, however deep in the object, into a slot before it returns. What `recv` returns are
    writable views of it that belong to the receiver; values of up to 64 KiB are copied out. `poll`, `fileno`,
    `send_bytes`, `recv_bytes`, `recv_bytes_into`, `close`, `closed`, `readable` and `writable` are the standard
    library's own. `recv` reads what `send` has sent; `recv_bytes`, what `send_bytes` has.

    Pass it to a process as an argument, let a forked child inherit it, or send it through another connection or queue.
    As there, one thread at a time may send, and one receive.
    """

    def __init__(self, descriptor: int, readable: bool, writable: bool, slots: QueueHandle) -> None:
        super().__init__(descriptor, readable, writable)
        self._slots = slots
        self._hold = hold(slots)

    if TYPE_CHECKING:  # the standard library's

        def _check_closed(self) -> None: ...
        def _check_readable(self) -> None: ...
        def _check_writable(self) -> None: ...
        def _send_bytes(self, buf: bytes) -> None: ...
        def _recv_bytes(self) -> io.BytesIO: ...

    def send(self, obj: Any) -> None:
        """Send any object that pickles.

        Waits for room while the other end has not received what was sent before.

        Raises:
            Exception: whatever pickling the object raises; nothing is sent.
            BrokenPipeError, ConnectionResetError: no process has the other end any more.
            ResourceError: the object is larger than the pipe's `max_bytes`; or the other end has received everything,
                its tensors fill the memory, and for 5 seconds none of them was dropped.
            OSError: this end is closed, or only receives.
        """
        self._check_closed()
        self._check_writable()
        value = dumps(obj)
        packed = inline(value)
        if packed is not None:
            self._send_bytes(packed)
            return
        producer: DirectProducer = self._slots.putter
        ref = producer.post(value, _Waits(self, producer), "an object", "objects that the other end of the pipe keeps")
        # crash: pipe.posted
        try:
            self._send_bytes(_NAME.pack(_IN_SLOT, *ref))
        except OSError:  # no process will ask for it
            with contextlib.suppress(ShmTensorError):
                self._slots.getter.take(ref).release()
            raise

    def recv(self) -> Any:
        """The next object; waits until there is one.

        Raises:
            EOFError: nothing is left, and no process has the other end any more.
            Exception: whatever unpickling the object raises; it is gone then.
            DependencyError: the object has torch tensors, and torch is not installed here; it is gone.
            OSError: this end is closed, or only sends.
        """
        self._check_closed()
        self._check_readable()
        data = self._recv_bytes().getvalue()
        if len(data) != _NAME.size or data[0] != _IN_SLOT:
            return unfold(data)
        # crash: pipe.named
        message = self._slots.getter.take(MessageRef(*_NAME.unpack(data)[1:]))
        try:
            return loads(value_of(message))
        finally:
            message.release()

    def close(self) -> None:
        """Close this end in this process. Idempotent; tensors that were received stay valid."""
        super().close()
        self._slots.close()

    def parts(self) -> tuple[Any, ...]:
        """What another process needs to have this end, too."""
        slots = self._slots
        descriptors = reduction.DupFd(self.fileno()), slots.keeper_for_child()
        return *descriptors, self.readable, self.writable, slots.name, slots.max_bytes

    def __repr__(self) -> str:
        directions = ("read-write" if self.writable else "read-only") if self.readable else "write-only"
        return f'<Connection "{self._slots.name}" {"closed" if self.closed else directions}>'


class _Waits:
    """Whether a sender without room keeps waiting: see `Patience`; not for an end that no process has."""

    def __init__(self, end: Connection, producer: DirectProducer) -> None:
        self._ends = select.poll()
        self._ends.register(end.fileno(), 0)  # what is always reported: hung up, or no reader
        self._patience = Patience(producer)

    def __call__(self) -> bool:
        if self._ends.poll(0):
            raise BrokenPipeError("no process has the other end of the pipe any more")
        return self._patience()


def _rebuild(
    descriptor: Any, keeper: Any, readable: bool, writable: bool, name: str, max_bytes: int | None
) -> Connection:
    # the thread that sends both has closed its keeper before it sends the other: it never has the channel for longest
    slots = _Slots(name, InheritedFile().adopt(keeper.detach()), max_bytes)
    return Connection(descriptor.detach(), readable, writable, slots)


def _reduce(end: Connection) -> tuple[Any, ...]:
    return _rebuild, end.parts()


reduction.register(Connection, _reduce)


def pipe(duplex: bool, max_bytes: int | str | None) -> tuple[Connection, Connection]:
    """Two connected ends, as `multiprocessing.Pipe` makes them: see `get_context`.

    Args:
        duplex: whether both ends send and receive; else the first one receives, and the second one sends.
        max_bytes: shared memory that each process may use for what it sends; None for half of `/dev/shm`.
    """
    limit = default_limit() if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
    slots, _ = _Slots.create(limit, (), named=False)
    keeper = slots.another_keeper()
    ends = connection.Pipe(duplex)
    with ends[0], ends[1]:
        one, other = (
            Connection(os.dup(end.fileno()), end.readable, end.writable, of)
            for end, of in zip(ends, (slots, _Slots(slots.name, keeper, limit)), strict=True)
        )
    return one, other
