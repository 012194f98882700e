"""Transport of calls to a pool's workers and of results back, in place of the standard executor's two queues.

Each direction is a pair of Unix sockets of type SEQPACKET that all workers share: the kernel gives each message, whole,
to one reader, and keeps messages of several writers apart. So there is no lock that a dying process could keep, and no
thread between the executor's management thread and a worker.

    management thread --- calls ---> any worker             at most `2 * workers + 1` calls are queued or running
    management thread <-- results -- all workers

A message is a header and bytes:

    kind u8 | work id u64 | a u64 | b u64 | bytes

    INLINE   a call or a result: the bytes are its stream; no bytes: see `worker.NOTHING`
    IN_SLOT  a call or a result that is in a slot: a, b name it (`MessageRef`)
    RAISED   added to either: it is the exception that the call raised
    EXIT     of a worker that has sent its last result: a: its pid
    END      to one worker: exit
    WAKE     of the feeder thread: see `ResultSocket.fail`

All versions of the standard executor use these methods of their own queues, and find them here: `full`, `put`,
`put_nowait`, `close`, `join_thread`, `_reader`, `_terminate_broken`; `get` and `put` in workers.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import queue
import socket
import struct
import threading
from concurrent.futures import process as standard
from multiprocessing import context, reduction
from typing import Any, Final

from ..mp.direct import INLINE_MOST, MessageRef
from . import worker
from .worker import Packed, Raised

_HEAD: Final = struct.Struct("<BQQQ")
_INLINE, _IN_SLOT, _EXIT, _END, _WAKE = range(5)
_RAISED: Final = 0x80
_MOST: Final = INLINE_MOST + _HEAD.size
"""Bytes of the largest message: a socket's buffer holds several."""
_HUNG_UP: Final = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}


class _End:
    """A socket's descriptor in a spawned worker. A `socket` object made of it would get Python's default time-out, and
    that changes the flags that all workers share."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def recv(self, most: int) -> bytes:
        """Wait for a message; b"" if the other end is closed."""
        return os.read(self._fd, most)

    def send(self, message: bytes) -> None:
        """Send a message; waits for room."""
        os.write(self._fd, message)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _SocketPair:
    """Both sockets of one direction. A worker keeps the one that it needs."""

    _receiver: Any = None
    _sender: Any = None

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._receiver, self._sender):
            end.setblocking(True)  # whatever `socket.setdefaulttimeout` says

    def hang_up(self) -> None:
        """Shut the connection down, which wakes every process that sends or receives."""
        with contextlib.suppress(OSError):  # closed already
            self._receiver.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's ends. Idempotent."""
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()

    def _sent(self, message: bytes, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Send a message; False if there is no room. After `hang_up` messages are dropped."""
        try:
            self._sender.send(message, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _HUNG_UP:
                raise
        return True

    def __del__(self) -> None:
        _SocketPair.close(self)


def _message(work_id: int, packed: Packed, flag: int = 0) -> bytes:
    if isinstance(packed, MessageRef):
        return _HEAD.pack(_IN_SLOT | flag, work_id, *packed)
    return _HEAD.pack(_INLINE | flag, work_id, 0, 0) + packed


def _packed(kind: int, a: int, b: int, message: bytes) -> Packed:
    return MessageRef(a, b) if kind == _IN_SLOT else message[_HEAD.size :]


class CallSocket(_SocketPair):
    """Calls to workers.

    The management thread sends each one itself. If it would have to wait, for room in shared memory or in the socket or
    for a long copy, the feeder thread sends it, and all calls that follow until it has caught up.

    Args:
        workers: how many share the sockets.
        results: where the errors of calls that cannot be sent go.
    """

    def __init__(self, workers: int, results: ResultSocket) -> None:
        super().__init__()
        self._results = results
        self._most = 2 * workers + standard.EXTRA_QUEUED_CALLS
        self.under_way = results.under_way
        self._late: collections.deque[tuple[Any, bytes | None]] = collections.deque()
        self._lateness = threading.Condition(threading.Lock())
        self._feeder: threading.Thread | None = None
        self._over = False

    # --- the management thread's side

    def full(self) -> bool:
        """Whether enough calls are queued: others wait in the executor, where they can be cancelled."""
        return len(self.under_way) >= self._most

    def put(self, item: Any, block: bool = True) -> None:
        """Send a call. Does not wait."""
        self.under_way.add(item.work_id)
        if self._feeder is None:  # in advance: no thread can be started while the interpreter exits
            feeder = threading.Thread(target=self._feed, name="shmtensor feeder", daemon=True)
            feeder.start()
            self._feeder = feeder
        message = None
        if not self._late:  # only this thread adds to it
            with contextlib.suppress(Exception):  # the feeder thread tries again, and reports the error
                message = _message(item.work_id, item.args[0].send(wait=False))
                if self._sent(message):
                    return
        with self._lateness:
            self._late.append((item, message))
            self._lateness.notify()

    def put_nowait(self, item: None) -> None:
        """Tell one worker to exit; `queue.Full` if there is no room to."""
        if not self._sent(_HEAD.pack(_END, 0, 0, 0)):
            raise queue.Full

    def _feed(self) -> None:
        while True:
            with self._lateness:
                self._lateness.wait_for(lambda: self._late or self._over)
                if self._over:
                    return
                item, message = self._late[0]  # it stays in the queue until it is sent: `put` keeps the order
            try:
                if message is None:
                    message = _message(item.work_id, item.args[0].send(wait=True))
                self._sent(message, 0)
            except Exception as error:
                self._results.fail(item.work_id, error)
            self._late.popleft()
            del item, message

    def close(self) -> None:
        """Stop the feeder thread and close the sockets. Idempotent."""
        with self._lateness:
            self._over = True
            self._lateness.notify()
        if self._late:
            self.hang_up()
        if self._feeder is None or not self._feeder.is_alive():
            super().close()

    def join_thread(self) -> None:
        """After `close`: wait for the feeder thread."""
        if self._feeder is not None:
            self._feeder.join()
        super().close()

    @property
    def _reader(self) -> _BreakHook:
        return _BreakHook(self)

    def _terminate_broken(self) -> None:
        self.hang_up()
        self.close()
        self.join_thread()

    # --- a worker's side

    def __getstate__(self) -> dict[str, Any]:
        context.assert_spawning(self)
        return {"_receiver": reduction.DupFd(self._receiver.fileno()), "_sender": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._receiver = _End(state["_receiver"].detach())

    def get(self, block: bool = True) -> Any:
        """Wait for a call; None: exit."""
        if self._sender is not None:  # a forked worker: only the parent keeps this end open
            self._sender.close()
            self._sender = None
        message = self._receiver.recv(_MOST)
        if not message:
            os._exit(1)  # the parent is gone
        kind, work_id, a, b = _HEAD.unpack_from(message)
        if kind == _END:
            return None
        return standard._CallItem(work_id, worker.run, (_packed(kind, a, b, message),), {})


class _BreakHook:
    """The standard executor closes the call queue's reader when its pool breaks: this shuts the connection down."""

    def __init__(self, pair: _SocketPair) -> None:
        self._pair = pair

    def close(self) -> None:
        self._pair.hang_up()


class ResultSocket(_SocketPair):
    """Results of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: set[int] = set()
        """Work ids of calls that were put and whose results have not come back."""
        self._failed: collections.deque[tuple[int, Exception]] = collections.deque()

    def fail(self, work_id: int, error: Exception) -> None:
        """In the parent: hand the error of a call that cannot be sent to the management thread. Does not wait.

        That thread alone knows which calls are pending, and runs all callbacks.
        """
        self._failed.append((work_id, error))
        self._sent(_HEAD.pack(_WAKE, 0, 0, 0))  # if there is no room, another message wakes it

    @property
    def _reader(self) -> ResultSocket:
        return self

    def fileno(self) -> int:
        """Readable when there is a message."""
        return self._receiver.fileno()  # type: ignore[no-any-return]

    def recv(self) -> Any:
        """A result, the exit of a worker as a second result of its last call, or None if there is neither."""
        if self._failed:  # before the message that wakes
            work_id, error = self._failed.popleft()
            self.under_way.discard(work_id)
            return standard._ResultItem(work_id, exception=error)
        message = self._receiver.recv(_MOST)
        kind, work_id, a, b = _HEAD.unpack_from(message)
        if kind == _WAKE:
            return None
        if kind == _EXIT:
            return standard._ResultItem(work_id, exit_pid=a)
        self.under_way.discard(work_id)
        packed = _packed(kind & ~_RAISED, a, b, message)
        return standard._ResultItem(work_id, result=Raised(packed) if kind & _RAISED else packed)

    # --- a worker's side

    def __getstate__(self) -> dict[str, Any]:
        context.assert_spawning(self)
        return {"_receiver": None, "_sender": reduction.DupFd(self._sender.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sender = _End(state["_sender"].detach())

    def put(self, item: Any) -> None:
        """Send a result."""
        if self._receiver is not None:  # a forked worker: only the parent keeps this end open
            self._receiver.close()
            self._receiver = None
        if isinstance(item, int):  # the pid of a worker that was told to exit: the parent reads nothing any more
            return
        if item.exception is None:
            message = _message(item.work_id, worker.named(item.result))
        else:
            try:
                message = _message(item.work_id, worker.named(worker.pack(item.exception)), _RAISED)
            finally:  # the worker loop keeps the item until its next call, and the frames of a traceback the arguments
                item.exception.exc = None
        self._sender.send(message)
        exit_pid = getattr(item, "exit_pid", None)  # Python 3.10 has none
        if exit_pid is not None:
            self._sender.send(_HEAD.pack(_EXIT, item.work_id, exit_pid, 0))


def leave(executor: Any) -> None:
    """In a forked child: close its ends of the queues, which the parent goes on to use."""
    for pair in (executor._call_queue, executor._result_queue):
        if pair is not None:  # it was not shut down before
            _SocketPair.close(pair)


def install(executor: Any) -> None:
    """Replace the queues of a standard executor that has not started a worker."""
    queued, results = executor._call_queue, executor._result_queue
    executor._result_queue = ResultSocket()
    executor._call_queue = CallSocket(executor._max_workers, executor._result_queue)
    queued.close()
    queued._reader.close()
    queued._writer.close()
    results.close()
