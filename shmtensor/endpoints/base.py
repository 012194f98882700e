"""What every endpoint shares: its state, how it closes, and what happens to it in a forked child."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from .. import native
from ..channel import wakeup
from ..channel.control import CAPACITY, LABEL_MAX, Counters
from ..channel.membership import Member, Tracing
from ..channel.wakeup import Inbox
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    ForkedError,
    ReentrantError,
    ShmTensorError,
    TimedOut,
)
from ..memory import lifecycle, words
from ..options import check_count, check_timeout
from ..ring.layout import FAN_OUT
from ..ring.pool import SIZED, Pool, Sizing
from ..shielded import Timed

if TYPE_CHECKING:
    from .devices import Devices


@dataclass(frozen=True)
class Traits:
    """Constants in which endpoint classes of one side differ: each class has one instance, which its base classes
    read."""

    kind: int
    """The kind of the rings: `FAN_OUT` or `WORK_QUEUE`."""
    service: int = 0
    """The kind of the channel, if it is not that of the rings."""
    counts_lost: bool = False
    """Whether it reports how many unfinished messages are lost when it leaves as the last member of its channel."""

    @property
    def channel(self) -> int:
        """The kind of the channel: one of `KINDS`."""
        return self.service or self.kind


@dataclass(frozen=True)
class SenderTraits(Traits):
    """`Traits` of a sender class."""

    sizing: Sizing = SIZED
    """The sizes of rings for which the caller chose no number of slots."""
    pool: type[Pool] = Pool
    """Decides how many slots of which size a ring gets."""
    entries: int = 1024
    """Least size of its sequence table, which is the most slots; `full="grow"` and `slots=` ask for more."""
    widest: int = 0
    """See `make_writer`."""
    carries_context: bool = False
    """Whether the meta of its messages is the user's, so that it may carry a trace context."""
    checks_verdicts: bool = False
    """Whether slots that a server has given back with a verdict wait for `Writer.judge`."""
    full: str = (
        'channel "{0.name}": no room for {nbytes}, all {slots} slots wait for receivers (there: {there}){grown}: '
        'receive faster, release messages, or pass slots=, timeout={grow} or full="drop"'
    )
    """The error text for a message without a free slot, with the sender as `{0}`; `{there}`: all receivers, of which
    some may hold nothing; `{grown}`: what keeps one with `full="grow"` from adding a ring, `{limit}` in short;
    `{grow}`: that option as a remedy for others."""
    full_alone: str = (
        'channel "{0.name}": no room for {nbytes} in {slots} slots, and nobody receives there{grown}: start a '
        'receiver, or pass slots=, timeout={grow} or full="drop"'
    )
    """The same text if there is no receiver."""


@dataclass(frozen=True)
class ReceiverTraits(Traits):
    """`Traits` of a receiver class."""

    is_only_reader: bool = False
    """Whether no other receiver gets the same messages, although it is a fan-out."""
    by_age: bool = False
    """Whether the oldest message of all senders comes first. Else they are read round robin."""
    inbox: Callable[[str, int], Inbox] = Inbox
    """The class of its inbox, called with the socket directory and the receiver's uid."""
    raises_unreadable: bool = True
    """Fan-out: whether `recv` raises the error of a message that only a missing package can read. Else it returns the
    message, with the error as its meta."""
    given_up: str = "channel %s: message %d of producer %016x dropped after %d attempts that did not finish it"
    """The log line for a message that was delivered too often."""

    @property
    def maps_writable(self) -> bool:
        """Whether slots are mapped writable: no other receiver gets the same messages."""
        return self.is_only_reader or self.kind != FAN_OUT


OPEN: Final = ""
CLOSED: Final = "closed"
CLOSING: Final = "closing"
LEAVING: Final = "closed, views alive"
FORKED: Final = "forked"

LIVENESS_INTERVAL: Final = 0.25 if words.HAS_BARRIER else 0.01
"""Seconds that a sleep lasts at most: a dead process cannot announce itself, so the sleeper checks."""

_HANDOVER_S: Final = 0.001
"""Seconds after which a call whose time is up checks again whether the thread that has the mutex is done, or
waiting."""

NOTHING: Final[Any] = object()
"""The result of an attempt that found nothing."""
BUSY: Final[Any] = object()
"""The result of a call that does not wait, while another thread is inside a call of the endpoint."""

_Self = TypeVar("_Self", bound="Endpoint")
_living: weakref.WeakSet[Endpoint] = weakref.WeakSet()
lingering: set[Endpoint] = set()
"""Closed endpoints whose views are alive: kept here, since their leases must end properly."""


class Local:
    """Base of objects that belong to one process. Pickling or copying one raises an error that says what to pass."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"{type(self).__name__} belongs to this process and can be neither copied nor pickled: {self._instead()}"
        )

    def _instead(self) -> str:
        """What to pass to another process instead, as text for the error."""
        name = getattr(self, "name", "")
        return f'pass the channel\'s name, "{name}", and make a {type(self).__name__} of its own in the other process'


class AsleepWord:
    """An endpoint's `asleep` word in the control segment. Used under the mutex, by a thread or for an event loop.

    Args:
        words: the control segment's words.
        at: index of the word: odd while the endpoint sleeps.
        counters: the endpoint's, which count how often a receiver slept.
    """

    __slots__ = ("at", "counters", "has_late_doorbells", "number", "words")

    def __init__(self, words: memoryview, at: int, counters: Counters) -> None:
        self.words, self.at, self.counters = words, at, counters
        self.number = 0
        """What the word holds: another number for each sleep, so that one sleep is woken once by each peer."""
        self.has_late_doorbells = False
        """Whether doorbells for an earlier sleep of a receiver may still come."""


class Endpoint(Local, ABC):
    """Base of everything that joins a channel. Thread-safe: one call at a time, others wait.

    Every call that changes an endpoint runs in `_run`, `_run_within` or `_try_run`, under the mutex, and `_inside`
    names its thread. So a signal handler or a finalizer that interrupts a call in that very thread can be distinguished
    from another thread: its `close()` is carried out when the interrupted call ends; any other call is refused, since
    it would be a deadlock.

    Asynchronous exceptions (Ctrl-C, a signal handler that raises) arrive at the entry of a Python function, after a
    call, and at a jump back, nowhere else. Steps that must not be separated lie between two such points, or in a `try`
    that begins before them: docs/internals/protocols.md, section 12.
    """

    _member: Member
    _traits: Traits
    _devices: Devices
    _flags = 0
    """Further flags of its entry: channel/control.py."""
    _called = '{0.__class__.__name__} of channel "{0.name}"'
    """The name of the endpoint in errors, a format with the endpoint as `{0}`."""

    def __init__(self) -> None:
        native.report_missing()
        self._state = OPEN
        self._stop = False  # another thread wants to close: a call that waits gives up
        self._mutex = threading.Lock()
        self._inside = 0  # the thread that has the mutex
        self._waits = False  # it waits for other processes
        self._entering: set[int] = set()  # the threads that try to get it without waiting
        self._closing: Callable[[], None] | None = None  # a `close` that was called inside a call, run when that ends
        self._pid = os.getpid()
        self._wait_queue: Any = None  # see `AsyncEndpoint`
        self._tracing = Tracing()
        _living.add(self)
        lifecycle.track(self, type(self)._drop_in_child)
        _hook_multiprocessing()

    def _abandon(self) -> None:
        """Undo what the constructor did, however far it came: it has failed or was interrupted."""
        self._state = CLOSED
        with contextlib.suppress(ShmTensorError):
            if hasattr(self, "_member"):
                self._member.leave()
        for name in ("_inbox", "_sleeper", "_sequences"):
            if hasattr(self, name):
                getattr(self, name).close()

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._member.channel

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return self._state != OPEN

    @abstractmethod
    def close(self) -> None:
        """Leave the channel. Idempotent; works while views are alive."""

    @abstractmethod
    def _at_exit(self) -> None:
        """Close because the process ends: acknowledge nothing, and clean up even though views may be alive."""

    def _drop_in_child(self) -> None:
        """In a forked child: mark the endpoint as the parent's."""
        self._state = FORKED
        lingering.discard(self)
        if self._wait_queue is not None:
            self._wait_queue.drop_in_child()
        self._mutex = threading.Lock()
        self._inside, self._waits, self._entering, self._closing = 0, False, set(), None

    def _wait_for_members(self, count: int, timeout: float | None, what: str, look: Callable[[], int]) -> None:
        """Wait until `look()` finds `count` members, which are called `what`.

        Other calls run meanwhile: only each look is under the mutex. It sleeps for a few milliseconds at a time, since
        wake-ups belong to the thread that has the mutex.
        """
        check_count("count", count, 0, CAPACITY)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            here = self._run_within(remaining, self._busy_error, self._look_inside, look)
            if here >= count:
                return
            if remaining == 0:
                raise TimedOut(f'channel "{self.name}" has {here} {what} after {timeout:g} s, {count} were expected')
            time.sleep(wakeup.PAUSE_S if remaining is None else min(wakeup.PAUSE_S, remaining))

    def _look_inside(self, _: float | None, look: Callable[[], int]) -> int:
        if self._state or self._stop:
            self._refuse()
        return look()

    def _busy_error(self, _: float) -> TimedOut:
        return TimedOut(f"{self._called.format(self)}: another thread waits in a call of it")

    # --- one call at a time

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`, called under the mutex."""
        me = threading.get_ident()
        if self._is_inside(me):
            self._refuse_inside()
        try:
            with self._mutex:
                self._inside = me  # no boundary between the two, nor between the reset and the release
                try:
                    return call(*args)
                finally:
                    self._inside, self._waits = 0, False
        finally:
            if self._closing is not None:
                self._finish_close()

    def _run_within(
        self, timeout: float | None, too_late: Callable[[float], Exception], call: Callable[..., Any], *args: Any
    ) -> Any:
        """As `_run`, but return `call(seconds, *args)`, with the seconds that are left of `timeout`.

        Raise `too_late(timeout)` if the time is up and the thread that has the mutex is waiting for other processes. If
        that thread is not waiting, it is done soon, and this call waits for it.
        """
        if timeout is None:
            return self._run(call, None, *args)
        me = threading.get_ident()
        if self._is_inside(me):
            self._refuse_inside()
        deadline: float | None = None
        entered, seconds = False, 0.0
        try:
            while True:
                try:
                    with Timed(self._mutex, seconds):
                        self._inside, entered = me, True  # as in `_run`
                        try:
                            left = timeout if deadline is None else max(0.0, deadline - time.monotonic())
                            return call(left, *args)
                        finally:
                            self._inside, self._waits = 0, False
                except StopIteration:
                    if entered:
                        raise
                if deadline is None:
                    check_timeout(timeout)
                    deadline = time.monotonic() + timeout
                seconds = min(LIVENESS_INTERVAL, deadline - time.monotonic())
                if seconds <= 0 and self._waits:
                    raise too_late(timeout)
                seconds = max(seconds, _HANDOVER_S)
        finally:
            if self._closing is not None:
                self._finish_close()

    def _try_run(self, call: Callable[..., Any], *args: Any) -> Any:
        """As `_run`, but return `BUSY` at once if a thread has the mutex."""
        me = threading.get_ident()
        if self._is_inside(me):
            return BUSY
        held: list[bool] = []
        mutex, entering = self._mutex, self._entering  # a forked child has others
        try:
            entering.add(me)
            held.extend(map(mutex.acquire, (False,)))  # one call takes the mutex and records it
            if not held[0]:
                return BUSY
            self._inside = me
            return call(*args)
        finally:
            try:
                if held and held[0]:
                    self._inside = 0
                    mutex.release()
            finally:
                entering.discard(me)
            if self._closing is not None and held and held[0]:
                self._finish_close()

    def _is_inside(self, me: int) -> bool:
        """Whether this thread is inside a call: then a signal handler or a finalizer is calling."""
        return me == self._inside or me in self._entering

    def _refuse_inside(self) -> None:
        """Raise the error for a call that interrupted another call of the same thread."""
        raise ReentrantError(
            f'{type(self).__name__} of channel "{self.name}": this thread is inside a call of it already, and was '
            "interrupted by a signal handler or a finalizer: only close() may be called from there"
        )

    def _close(self, close: Callable[[], None]) -> None:
        """Run `close` now; from inside a call of this thread, when that call ends."""
        if self._is_inside(threading.get_ident()):
            self._closing = close
        else:
            close()

    def _finish_close(self) -> None:
        """Carry out a `close()` that was called inside the call that ends now."""
        close = self._closing
        if close is None or self._is_inside(threading.get_ident()):
            return
        self._closing = None  # before: `close` is a call as well, and ends here
        try:
            close()
        except BaseException:
            self._closing = close  # every step may be repeated
            raise

    @abstractmethod
    def _outlast(self) -> None:
        """Leave although views are alive, and wait for other processes that need memory which ends with this process.

        Called at exit, when all endpoints of the process are closed, for each that is `lingering`.
        """

    def _refuse(self) -> None:
        """Raise the error of a call on an endpoint that is not open."""
        what = self._called.format(self)
        if self._state == FORKED:
            raise ForkedError(f"{what} belongs to process {self._pid}, which forked this one: create a new one here")
        raise ClosedError(f"{what} is closed")

    def __enter__(self: _Self) -> _Self:
        if self._state:
            self._refuse()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._at_exit()

    def __del__(self) -> None:
        if getattr(self, "_state", CLOSED) in (OPEN, CLOSING) and hasattr(self, "_member"):
            with contextlib.suppress(Exception):
                self._at_exit()

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self._member.channel}" {self._state or "open"}>'


def check_label(label: str | None) -> str:
    """The label of a member as it is stored: empty for None."""
    if label is None:
        return ""
    if not isinstance(label, str):
        raise ArgumentTypeError(f"label is a str, not {type(label).__name__}")
    size = len(label.encode("utf-8", "surrogatepass"))
    if not label.isprintable() or size > LABEL_MAX:
        raise ArgumentError(
            f"label={label[:LABEL_MAX]!r} ({size} bytes of UTF-8): "
            f"a label has printable characters, at most {LABEL_MAX} bytes"
        )
    return label


def local_members() -> frozenset[int]:
    """The uids of all endpoints of this process."""
    return frozenset(endpoint._member.uid for endpoint in list(_living) if hasattr(endpoint, "_member"))


def _hook_multiprocessing() -> None:
    """Close endpoints in a `multiprocessing` child: it ends without `atexit`, but runs finalizers of its own."""
    global _hooked_pid
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _hooked_pid != os.getpid():
        _hooked_pid = os.getpid()
        util.Finalize(None, _close_all, exitpriority=0)


_hooked_pid = 0
_left = 0
"""The id of the process once it has closed its endpoints because it ends."""


def has_left() -> bool:
    """Whether this process has closed its endpoints because it ends: only finalizers run now."""
    return _left == os.getpid()


@atexit.register
def _close_all() -> None:
    global _left
    _left = os.getpid()
    for endpoint in list(_living):
        if endpoint._state in (OPEN, CLOSING, LEAVING):
            with contextlib.suppress(Exception):
                endpoint._at_exit()
    for endpoint in list(lingering):
        with contextlib.suppress(Exception):
            endpoint._outlast()
    wakeup.close_context()
