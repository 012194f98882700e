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

from ..endpoints.message import Message
from ..errors import ShmTensorError
from ..memory.descriptors import InheritedFile
from ..options import parse_bytes
from .direct import DirectConsumer, DirectProducer, MessageRef, Patience, inline, unfold, value_of
from .pickling import dumps, loads
from .queue_handle import QueueHandle, default_limit, hold

_NAME: Final = struct.Struct("<BQQ")
_LENGTH: Final = struct.Struct("!i")
_LONG_LENGTH: Final = struct.Struct("!Q")
_LONG: Final = -1
"""A message on the standard library's connections is a length and bytes; of 2 GiB and more `_LONG`, a length, bytes."""
_IN_SLOT: Final = 0
"""First byte of a slot's name. No pickle begins with it."""


class _Sender(DirectProducer):
    """The sending end."""

    named = 0
    """The newest message whose name was sent, or that was taken back. `Connection` stores it."""

    @property
    def newest(self) -> MessageRef:
        """The message that was published last."""
        return MessageRef(self._member.uid, self._published)


class _Slots(QueueHandle):
    """One process's handle of the channel of a pipe: its end of the slots, as far as it has used them."""

    _kind = "pipe"

    def make_putter(self) -> _Sender:
        """Create the sending end."""
        return _Sender(self.name, self.max_bytes)

    @property
    def made_putter(self) -> _Sender | None:
        """This process's sending end, if it has one."""
        return self._putter  # type: ignore[no-any-return]

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

    An exception of a signal handler may end any call. An interrupted `send` has sent the object or not. What an
    interrupted `recv` has taken, the next one returns; but an `Exception`, as opposed to `KeyboardInterrupt`, that
    arrives while the object is unpickled counts as the object's own.
    """

    def __init__(self, descriptor: int, readable: bool, writable: bool, slots: _Slots) -> None:
        super().__init__(descriptor, readable, writable)
        self._slots: _Slots = slots
        self._hold = hold(slots)
        self._frame = b""
        """What is written now: a length and that many bytes."""
        self._written: list[int] = []
        """How much of it, by each write."""
        self._chunks: list[bytes] = []
        """What was read of the message that is received now, with its length."""
        self._message: Message | None = None
        """The message that it names, once that is taken."""
        self._undelivered: list[Any] = []
        """The object, until `recv` returns it."""

    if TYPE_CHECKING:  # the standard library's

        def _check_closed(self) -> None: ...
        def _check_readable(self) -> None: ...
        def _check_writable(self) -> None: ...

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
        try:
            self._settle()
            if packed is None:
                producer: _Sender = self._slots.putter
                holder = "objects that the other end of the pipe keeps"
                packed = _NAME.pack(_IN_SLOT, *producer.post(value, _Waits(self, producer), "an object", holder))
                # crash: pipe.posted
            self._frame = _LENGTH.pack(len(packed)) + packed
            self._write_rest()
        finally:
            self._settle()  # if this is interrupted, the next `send` does it

    def _write_rest(self) -> None:
        while (count := sum(self._written)) < len(self._frame):
            self._written.extend(map(os.write, (self.fileno(),), (self._frame[count:],)))  # one call: written and noted

    def _settle(self) -> None:
        """Finish what a `send` has left: the rest of what it began to write; a message that it has not named."""
        has_begun = bool(self._written)
        if has_begun:
            self._write_rest()
        producer: _Sender | None = self._slots.made_putter
        if producer is not None and producer.newest.seq != producer.named:
            if not has_begun:  # no process will ask for it
                with contextlib.suppress(ShmTensorError):
                    self._slots.getter.take(producer.newest).release()
            producer.named = producer.newest.seq
        self._written.clear()

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
        undelivered = self._undelivered
        if not undelivered:
            self._fetch()
        self._finish()
        item = undelivered[0]  # from here to the return there is no interrupt
        del undelivered[0]
        return item

    def _fetch(self) -> None:
        """Fill `_undelivered`. What an interrupt stops, the next call goes on with."""
        if not self._chunks:
            self._finish()
        data = self._read()
        is_name = len(data) == _NAME.size and data[0] == _IN_SLOT
        if is_name and self._message is None:
            # crash: pipe.named
            try:
                self._message = self._slots.getter.take(MessageRef(*_NAME.unpack(data)[1:]))
            except ShmTensorError:
                self._finish()
                raise
        try:
            value = unfold(data) if self._message is None else loads(value_of(self._message))
        except Exception:  # the object's own, or a signal handler's: they cannot be told apart
            self._finish()
            raise
        self._undelivered.append(value)

    def _finish(self) -> None:
        """The message that was received is done, whether or not it could be read."""
        self._chunks.clear()
        if self._message is not None:
            self._message.release()
            self._message = None

    def _read(self) -> bytes:
        """The bytes of the next message, which stay in `_chunks`; waits for them."""
        head, size = self._lengths()
        self._read_until(head + size)
        return b"".join(self._chunks)[head:]

    def _lengths(self) -> tuple[int, int]:
        """Bytes that the length of the next message takes, and that length; waits for them."""
        head = _LENGTH.size
        self._read_until(head)
        (size,) = _LENGTH.unpack(self._first(head))
        if size == _LONG:
            head += _LONG_LENGTH.size
            self._read_until(head)
            (size,) = _LONG_LENGTH.unpack(self._first(head)[_LENGTH.size :])
        return head, size

    def _first(self, count: int) -> bytes:
        return b"".join(chunk[:count] for chunk in self._chunks[:count])[:count]

    def _read_until(self, count: int) -> None:
        chunks = self._chunks
        while (have := sum(map(len, chunks))) < count:
            chunks.extend(map(os.read, (self.fileno(),), (count - have,)))  # one call: read and noted
            if not chunks[-1]:
                if not have:
                    raise EOFError
                raise OSError("got end of file during message")

    def _recv_bytes(self, maxsize: int | None = None) -> io.BytesIO | None:
        """What `recv_bytes` and `recv_bytes_into` read by: a file at its end."""
        if maxsize is not None and self._lengths()[1] > maxsize:
            return None
        file = io.BytesIO()
        file.write(self._read())
        self._chunks.clear()
        return file

    def _poll(self, timeout: float | None) -> bool:
        """What `poll` asks: an interrupted `recv` may have read what is next, so that nothing is in the socket."""
        return bool(self._undelivered or any(self._chunks)) or super()._poll(timeout)  # type: ignore[misc]

    def close(self) -> None:
        """Close this end in this process. Idempotent; tensors that were received stay valid."""
        super().close()
        self._message = None
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
