"""A worker process of the executor: takes a call out of its slot, runs it, and puts the result into a slot of its own.

The standard executor's worker loop does the rest; `run` is all that it ever calls.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, util
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import ClosedError
from ..memory import heap
from .parcels import Inbox, Outbox, Parcel
from .streams import dumps, loads

INTERRUPTED: Final = 130
"""Exit code of a worker that was idle when Ctrl-C came: nobody's fault, and nothing to try again."""
NOTHING: Final = b""
"""What is sent of a call that is over before it was sent, and what comes back."""
INLINE_MOST: Final = 32 << 10
"""Streams [bytes] without a tensor go in the message up to here, which is cheaper than a slot."""
COPY_MOST: Final = 64 << 10
"""Values [bytes] that are copied out of their slot on arrival up to here: whoever keeps many of them holds no slots."""

KEPT_MOST: Final = 64 << 20
"""Freed memory [bytes] that a worker keeps for its next call."""

_PATIENCE: Final = 5.0
_LOOK: Final = 0.5

Packed = bytes | Parcel
"""A pickled value as it goes in a message: itself, or where it is."""


class Address(NamedTuple):
    """What a worker must know of its pool."""

    calls: str
    """Channel of the calls."""
    results: str
    """Channel of the results."""
    parent: int
    """The parent's place on the channel of the calls."""
    max_bytes: int | None


def start(address: Address, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
    """The executor's initializer: join the pool, then run the user's initializer."""
    global _worker
    _worker = Worker(address)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if initializer is not None:
        _worker.busy = True
        initializer(*initargs)
        _worker.busy = False


def _interrupt(number: int, frame: object) -> None:
    """Ctrl-C reaches every process of a terminal. It ends the call that runs here; an idle worker leaves it to its
    parent to end the pool: to die in between, perhaps with a lock of the pool's own, would keep others waiting."""
    if _worker.busy:
        raise KeyboardInterrupt


def run(packed: Packed) -> Packed:
    """Run one call. Everything that fails here, unpickling and pickling included, fails this call's future only."""
    _worker.busy = True
    try:
        return _worker.run(packed) if packed else NOTHING
    except BrokenProcessPool as error:
        error.raised_by_call = True  # type: ignore[attr-defined]
        raise
    finally:
        _worker.busy = False


def raised(error: BrokenProcessPool) -> bool:
    """Whether a call raised this error, as one that uses a pool of its own may, and not the loss of its worker."""
    return getattr(error, "raised_by_call", False)


def inline(value: list[Any]) -> bytes | None:
    """The pickled value for the message, if it holds no tensor and is small."""
    stream = value[0]
    if len(value) > 1 or type(stream) is list or stream.nbytes > INLINE_MOST:
        return None
    return stream.tobytes()  # type: ignore[no-any-return]


def unfold(packed: bytes) -> Any:
    """The object of a pickled value that came in the message."""
    return loads([np.frombuffer(packed, np.uint8)])


class Worker:
    """This process as a member of its pool."""

    def __init__(self, address: Address) -> None:
        self.busy = False  # with something that Ctrl-C should end
        self._address = address
        self._inbox = Inbox(address.calls)
        self._outbox: Outbox | None = None
        heap.keep_freed(KEPT_MOST)
        util.Finalize(None, _end_quietly, exitpriority=-100)  # after the endpoints have left
        threading.Thread(target=self._outlive_nobody, name="shmtensor parent watch", daemon=True).start()

    def run(self, packed: Packed) -> Packed:
        if isinstance(packed, bytes):
            function, args, kwargs = unfold(packed)
            return self._pack(function(*args, **kwargs))
        # crash: call.named
        message = self._inbox.take(packed)
        # crash: call.taken
        try:
            function, args, kwargs = loads(message.copy() if message.nbytes <= COPY_MOST else message.value)
            # crash: call.read
            result = function(*args, **kwargs)
            # crash: call.returned
            return self._pack(result)
        finally:
            message.release()  # done; its slot is given back when the last view of the arguments dies
            # crash: call.done

    def _pack(self, result: object) -> Packed:
        value = dumps(result)
        packed = inline(value)
        if packed is not None:
            return packed
        if self._outbox is None:
            self._outbox = Outbox(self._address.results, self._address.max_bytes)
        holder = f"earlier results that process {multiprocessing.parent_process().pid} keeps"  # type: ignore[union-attr]
        parcel = self._outbox.post(value, _Patience(self._outbox), "a result", holder)
        # crash: call.answered
        return parcel

    def _outlive_nobody(self) -> None:
        """End with the parent, however it ends: nobody could take a result, and nobody else would end this process.

        The parent's life lock decides. Its sentinel is only quicker: a forked sibling may hold the other end of it.
        """
        sentinel = multiprocessing.parent_process().sentinel  # type: ignore[union-attr]
        try:
            while not connection.wait([sentinel], _LOOK) and self._inbox.is_alive(self._address.parent):
                pass
        except ClosedError:
            return  # this process is ending
        os._exit(1)


class _Patience:
    """How long a full worker waits: while its parent has not looked at a result yet, and a little longer.

    The parent may keep results for ever, and may wait for the very result that finds no room.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._since = time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._outbox.is_settled():
            self._since = now
        return now - self._since < _PATIENCE


def _end_quietly() -> None:
    """Ctrl-C reaches idle workers too: end as told, without a traceback from each of them."""
    if sys.exc_info()[0] is KeyboardInterrupt:
        util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(INTERRUPTED)


_worker: Worker
