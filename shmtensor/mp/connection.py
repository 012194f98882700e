"""`Pipe`: the two connected ends of `multiprocessing.Pipe`, with tensors and arrays in shared memory.

A connection is the standard library's, with its socket or pipe: everything that shows a process the end of another, and
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
import threading
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any, Final

from ..endpoints.message import Message
from ..errors import ReentrantError, ShmTensorError
from ..memory.descriptors import InheritedFile
from ..options import parse_bytes
from .direct import DirectConsumer, DirectProducer, MessageRef, Patience, inline, take_back, unfold, value_of
from .pickling import dumps, loads
from .queue_handle import QueueHandle, default_limit, hold

_NAME: Final = struct.Struct("<BQQ")
_LENGTH: Final = struct.Struct("!i")
_LONG_LENGTH: Final = struct.Struct("!Q")
_LONG: Final = -1
"""A message on the standard library's connections is a length and bytes; of 2 GiB and more `_LONG`, a length, bytes."""
_IN_SLOT: Final = 0
"""First byte of a slot's name. No pickle begins with it."""
_INSIDE: Final = (
    "{0!r}: this thread is inside another {1} of it, which a signal handler or a finalizer has interrupted: from there "
    "it may {1} {2}"
)


class _Frame:
    """A message as it is written: a length and that many bytes. `seq` is that of the slot that it names, or 0."""

    __slots__ = ("data", "seq", "written")

    def __init__(self, packed: Any, seq: int = 0) -> None:
        size = len(packed)
        head = _LENGTH.pack(size) if size < 1 << 31 else _LENGTH.pack(_LONG) + _LONG_LENGTH.pack(size)
        self.data = memoryview(b"".join((head, packed)))
        self.seq = seq
        self.written: list[int] = []
        """How much of it, by each write."""


class _Slots(QueueHandle):
    """One process's handle of the channel of a pipe: its endpoints for slots, as far as it has used them; and the state
    of this process's calls, which a forked child drops."""

    _kind = "pipe"

    def start_anew(self) -> None:
        super().start_anew()
        self.sender = self.receiver = 0
        """The thread that sends, and the one that receives."""
        self.frames: list[_Frame] = []
        """What is written, in order. The first one may have been begun."""
        self.may_be_unnamed = False
        """Whether a message may be in its slot whose name is not written."""
        self.named = 0
        """The newest message whose name was written, or that was taken back."""

    def make_putter(self) -> DirectProducer:
        """Create the sending end."""
        return DirectProducer(self.name, self.max_bytes)

    @property
    def made_putter(self) -> DirectProducer | None:
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

    A signal handler, or the finalizer of an object, may interrupt a call and use this end itself. What it sends inside
    another `send` or `send_bytes` of its thread is written by that one, in order, and may not need a slot. It may not
    receive inside another `recv`. Both raise `ReentrantError`, and change nothing.

    An exception of a signal handler may end any call. An interrupted `send` has sent the object or not. What an
    interrupted `recv` has taken, the next one returns; but an `Exception`, as opposed to `KeyboardInterrupt`, that
    arrives while the object is unpickled counts as the object's own.
    """

    def __init__(self, descriptor: int, readable: bool, writable: bool, slots: _Slots) -> None:
        super().__init__(descriptor, readable, writable)
        self._slots: _Slots = slots
        self._hold = hold(slots)
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
        self._transmit(inline(value), value)

    def _send_bytes(self, buf: Any) -> None:
        """Write bytes; called by the standard library's `send_bytes`."""
        self._transmit(buf, [])

    def _transmit(self, packed: Any, value: list[Any]) -> None:
        """Write a message: `packed`, or if that is None the name of a slot with `value`."""
        slots, me = self._slots, threading.get_ident()
        if slots.sender == me:
            if packed is None:
                raise ReentrantError(_INSIDE.format(self, "send", "only small objects without tensors or arrays"))
            slots.frames.append(_Frame(packed))  # the call that this one has interrupted writes it
            return
        self._settle()
        slots.may_be_unnamed, frame = packed is None, None
        try:
            slots.sender = me
            frame = self._post(value) if packed is None else _Frame(packed)
            slots.frames.append(frame)
            self._write()
        finally:
            try:
                if frame in slots.frames and not frame.written:
                    slots.frames.remove(frame)  # not sent
                self._settle()  # if this is interrupted, the next call does it
            finally:
                slots.sender = 0

    def _post(self, value: list[Any]) -> _Frame:
        """Put a value into a slot."""
        producer: DirectProducer = self._slots.putter
        holder = "objects that the other end of the pipe keeps"
        ref = producer.post(value, _Waits(self, producer), "an object", holder)
        # crash: pipe.posted
        return _Frame(_NAME.pack(_IN_SLOT, *ref), ref.seq)

    def _write(self) -> None:
        """Write every frame. Meanwhile handlers that interrupt this may only add frames."""
        slots, frames = self._slots, self._slots.frames
        while frames:
            frame = frames[0]
            while (count := sum(frame.written)) < len(frame.data):
                frame.written.extend(map(os.write, (self.fileno(),), (frame.data[count:],)))  # one call: written, noted
            slots.named = frame.seq or slots.named
            del frames[0]

    def _settle(self) -> None:
        """Finish what interrupted calls have left: frames that are partly written, frames that handlers sent inside
        them, and a message that was not named."""
        slots = self._slots
        while slots.frames or slots.may_be_unnamed:
            try:
                slots.sender = threading.get_ident()
                self._write()
                self._take_back_unnamed()
            finally:
                slots.sender = 0

    def _take_back_unnamed(self) -> None:
        """Free the slot of a message whose `send` was interrupted: no process will ask for it."""
        slots = self._slots
        producer = slots.made_putter
        if producer is not None and producer.newest.seq != slots.named:
            with contextlib.suppress(ShmTensorError):
                take_back(slots.getter, producer.newest)
            slots.named = producer.newest.seq
        slots.may_be_unnamed = False

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
        slots, undelivered = self._slots, self._undelivered
        me = self._refuse_inside()
        try:
            slots.receiver = me
            if not undelivered:
                self._fetch()
            self._finish()
            item = undelivered[0]  # from here to the return there is no interrupt
            del undelivered[0]
            return item
        finally:
            slots.receiver = 0

    def _refuse_inside(self) -> int:
        """Return this thread's id; raise `ReentrantError` if this thread is receiving."""
        me = threading.get_ident()
        if self._slots.receiver == me:
            raise ReentrantError(_INSIDE.format(self, "recv", "nothing"))
        return me

    def _fetch(self) -> None:
        """Fill `_undelivered`. What an interrupt stops, the next call goes on with."""
        if not self._chunks:
            self._finish()
        data = self._read()
        message = self._message
        if message is None and len(data) == _NAME.size and data[0] == _IN_SLOT:
            # crash: pipe.named
            try:
                self._message = message = self._slots.getter.take(MessageRef(*_NAME.unpack(data)[1:]))
            except ReentrantError:  # inside a `send`: it can be taken later
                raise
            except ShmTensorError:
                self._finish()
                raise
        try:
            value = unfold(data) if message is None else loads(value_of(message))
        except Exception:  # the object's own, or a signal handler's: they cannot be told apart
            self._finish()
            raise
        self._undelivered.append(value)

    def _finish(self) -> None:
        """Mark the message that was received as done, whether or not it could be read."""
        self._chunks.clear()
        if (message := self._message) is not None:
            message.release()
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
        """Read a message into a file, which is returned at its end; called by `recv_bytes` and `recv_bytes_into`."""
        slots, me = self._slots, self._refuse_inside()
        try:
            slots.receiver = me
            if maxsize is not None and self._lengths()[1] > maxsize:
                return None
            file = io.BytesIO()
            file.write(self._read())
            self._chunks.clear()
            return file
        finally:
            slots.receiver = 0

    def _poll(self, timeout: float | None) -> bool:
        """Whether there is something to receive; called by `poll`. An interrupted `recv` may have read the next
        message, so that nothing is in the socket."""
        return bool(self._undelivered or any(self._chunks)) or super()._poll(timeout)  # type: ignore[misc]

    def close(self) -> None:
        """Close this end in this process. Idempotent; tensors that were received stay valid."""
        super().close()
        self._message = None
        self._slots.close()

    def parts(self) -> tuple[Any, ...]:
        """The parts that another process needs to use this end, too."""
        slots = self._slots
        descriptors = reduction.DupFd(self.fileno()), slots.keeper_for_child()
        return *descriptors, self.readable, self.writable, slots.name, slots.max_bytes

    def __repr__(self) -> str:
        directions = ("read-write" if self.writable else "read-only") if self.readable else "write-only"
        return f'<Connection "{self._slots.name}" {"closed" if self.closed else directions}>'


class _Waits:
    """Whether a sender without room keeps waiting: see `Patience`; not for an end that no process has.

    What handlers have sent meanwhile is written: the other end may wait for it before it makes room.
    """

    def __init__(self, end: Connection, producer: DirectProducer) -> None:
        self._end = end
        self._ends = select.poll()
        self._ends.register(end.fileno(), 0)  # what is always reported: hung up, or no reader
        self._patience = Patience(producer)

    def __call__(self) -> bool:
        if self._ends.poll(0):
            raise BrokenPipeError("no process has the other end of the pipe any more")
        self._end._write()
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
