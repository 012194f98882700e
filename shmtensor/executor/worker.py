"""A worker process of the executor: takes a call out of its slot, runs it, and puts the result into a slot of its own.

The standard executor's worker loop does the rest; it calls nothing but `run`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, util
from typing import Any, Final, NamedTuple

from ..errors import ClosedError, ResourceError, ShmTensorError
from ..memory import mapped_file
from ..mp.direct import DirectConsumer, DirectProducer, MessageRef, Patience, inline, take_back, unfold, value_of
from ..mp.pickling import DescribedError, dumps, loads
from ..shielded import OwnThread

INTERRUPTED: Final = 130
"""Exit code of a worker that Ctrl-C ended while it was idle: nothing is retried."""
NOTHING: Final = b""
"""Sent in place of a call that has ended before it was sent, and in place of its result."""
KEPT_MOST: Final = 64 << 20
"""Freed memory [bytes] that a worker keeps for its next call."""

_LOOK: Final = 0.5
_MOST_TEXT: Final = 8 << 10  # characters of a traceback that need no slot

Packed = bytes | MessageRef
"""A pickled value in a socket message: its bytes, or the slot that has it."""


class Raised(NamedTuple):
    """The exception that a call raised: a pickled `mp.pickling.DescribedError`."""

    packed: Packed


class Address(NamedTuple):
    """How a worker finds its pool."""

    calls: str
    """Channel of the calls."""
    results: str
    """Channel of the results."""
    parent: int
    """The parent's index in the table of the channel of calls."""
    max_bytes: int | None


def start(address: Address, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
    """The executor's initializer: join the pool, then run the user's initializer."""
    global _worker
    main = threading.main_thread()
    if isinstance(main, OwnThread):  # which has forked this process; here, other code knows it
        main.__class__ = threading._MainThread  # type: ignore[attr-defined]
        main.name = "MainThread"
    _worker = Worker(address)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if initializer is not None:
        _worker.busy = True
        initializer(*initargs)
        _worker.busy = False


def _interrupt(number: int, frame: object) -> None:
    """Ctrl-C reaches every process of a terminal. It ends the call that runs here. An idle worker ignores it and lets
    the parent end the pool: it might die with a lock of the pool's and block the other workers."""
    if _worker.busy:
        raise KeyboardInterrupt


def run(packed: Packed) -> Packed:
    """Run one call. Any error, also of pickling, fails this call's future only."""
    _worker.busy = True
    try:
        return _worker.run(packed) if packed else NOTHING
    finally:
        _worker.busy = False


def pack(raised: Any) -> Packed:
    """Pack the exception that a call raised, as the standard worker loop passes it, or the reason why it cannot be
    sent."""
    try:
        return _worker.pack(DescribedError.of(raised.exc, raised.tb), "an exception")
    except ResourceError as shortage:
        return _worker.pack(DescribedError.of(shortage, raised.tb[-_MOST_TEXT:]), "an exception")


def named(packed: Packed) -> Packed:
    """Note that the parent gets the result, and so takes it from its slot."""
    if isinstance(packed, MessageRef):
        _worker.newest_named = packed.seq
    return packed


class Worker:
    """The state of a worker process."""

    def __init__(self, address: Address) -> None:
        self.busy = False  # with a call, which Ctrl-C ends
        self._address = address
        self._consumer = DirectConsumer(address.calls)
        self._producer: DirectProducer | None = None
        self.newest_named = 0
        """The newest message that was named to the parent, or taken back."""
        mapped_file.keep_freed(KEPT_MOST)
        util.Finalize(None, _end_quietly, exitpriority=-100)  # after the endpoints have left
        threading.Thread(target=self._exit_with_parent, name="shmtensor parent watch", daemon=True).start()

    def run(self, packed: Packed) -> Packed:
        if isinstance(packed, bytes):
            function, args, kwargs = unfold(packed)
            return self.pack(function(*args, **kwargs), "a result")
        # crash: call.named
        message = self._consumer.take(packed)
        # crash: call.taken
        try:
            function, args, kwargs = loads(value_of(message))
            # crash: call.read
            result = function(*args, **kwargs)
            # crash: call.returned
            return self.pack(result, "a result")
        finally:
            message.release()  # done; its slot comes back when the last view of the arguments dies
            # crash: call.done

    def pack(self, result: object, what: str) -> Packed:
        """Pickle a result, and put it into a slot unless it is small."""
        value = dumps(result)
        packed = inline(value)
        if packed is not None:
            return packed
        if self._producer is None:
            self._producer = DirectProducer(self._address.results, self._address.max_bytes)
        self._take_back(self._producer.newest)
        holder = f"earlier results that process {multiprocessing.parent_process().pid} keeps"  # type: ignore[union-attr]
        ref = self._producer.post(value, Patience(self._producer), what, holder)
        # crash: call.answered
        return ref

    def _take_back(self, newest: MessageRef) -> None:
        """Free the slot of a result that was not named to the parent, since an exception such as Ctrl-C came before: no
        process asks for it."""
        if newest.seq != self.newest_named:
            with contextlib.suppress(ShmTensorError), DirectConsumer(self._address.results) as consumer:
                take_back(consumer, newest)
            self.newest_named = newest.seq

    def _exit_with_parent(self) -> None:
        """Exit when the parent has died: no process would take a result or end this one.

        The parent's life lock decides. Its sentinel is only faster: a forked sibling may hold the other end of it.
        """
        sentinel = multiprocessing.parent_process().sentinel  # type: ignore[union-attr]
        try:
            while not connection.wait([sentinel], _LOOK) and self._consumer.is_alive(self._address.parent):
                pass
        except ClosedError:
            return  # this process is ending
        os._exit(1)


def _end_quietly() -> None:
    """Exit without a traceback if Ctrl-C has ended this idle worker."""
    if sys.exc_info()[0] is KeyboardInterrupt:
        util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(INTERRUPTED)


_worker: Worker
