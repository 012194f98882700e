"""The control segment of a channel: the table of its members.

    0      magic  version  kind  capacity  epoch  senders  dir_device  dir_inode       magic last
    64     used                entries from here on were never taken                   holder of lock byte 0
    128    path of the socket directory, zero padded to 128 bytes
    4096   members: capacity x 256 bytes
           +0    uid      stored last on joining, zeroed first on leaving            holder of lock byte 0
           +8    owner    the uid whose names exist; set before they are made          "
           +16   role     +24 flags    +32 pid    +40 joined (unix ns)                 "
           +48   leaving  1: closed with views alive: no longer a recipient          the member; as uid
                          2: a sender that closed and has left messages to others    as uid
           +56   group    the uid of its group's entry, 0: in none                   as uid
           +64   asleep   odd: asleep in recv, or waiting for a slot;                the member
                          its top bit: a sender waits on its FIFO, not on its semaphore
           +128  label    UTF-8, zero padded to 64 bytes                             as uid
           +192  counters waits, dropped, sleeps, late, missed, redelivered,         the member
                    onward: of a relay's consumer, whether somebody there takes more; 0

Lock bytes of the control file: byte 0 serializes joins, leaves and sweeps; byte 1 + index is held by the member for
as long as it lives (its life lock). `epoch` is advanced, under byte 0, whenever the members or their recipients change.

A group of subscribers has an entry, too: a recipient without a process, inbox or files. Its label is the group's name;
all of its members share its life lock. Its words are written by the holder of byte 0.

The control lock is byte 0 of the segment. A signal handler or a finalizer may need it in a thread that holds it
already: the last view of a closed receiver may die anywhere, and a signal handler may close an endpoint anywhere, also
in a thread that holds a control lock at that moment. Waiting for the lock would be a deadlock. A departure returns
nothing, so it is deferred until the thread holds no lock; all other calls raise `ReentrantError`. Other threads wait.

An exception of a signal handler may arrive between any two calls, also at the entry of a function that undoes a step.
So each `except` clause undoes the step once more; doing it twice changes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from ..errors import ReentrantError, ShmTensorError, WireError
from ..memory import lifecycle
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..memory.words import acquire_fence, store
from ..ring.layout import SERVICE, WORK_QUEUE
from ..ring.ring import Ring, SequenceTable
from .names import control_name, ring_name, sequence_table_name

MAGIC: Final = int.from_bytes(b"SHMTCTRL", "little")
VERSION: Final = 3  # 2: a sender may sleep on a FIFO; 3: groups
CAPACITY: Final = 256

SENDER: Final = 1
RECEIVER: Final = 2
GROUP: Final = 3
TRACER: Final = 4
"""A member that neither sends nor receives, for which the others record events (ring/events.py)."""
KEPT: Final = 2
"""`leaving` of a sender whose entry and files stay for the receivers of its messages."""
LATEST: Final = 1  # flag of a receiver: no recipient, takes the newest under a shared lock
MEMBER: Final = 2  # flag of a receiver: no recipient, its group is
NO_RECIPIENT: Final = LATEST | MEMBER
RELAY: Final = 4
"""Flag of an endpoint of a relay: its label says which way messages came or go. Labels of other members are just
names."""

W_MAGIC, W_VERSION, W_KIND, W_CAPACITY, W_EPOCH, W_SENDERS, W_DEVICE, W_INODE, W_USED = range(9)
M_UID, M_OWNER, M_ROLE, M_FLAGS, M_PID, M_JOINED, M_LEAVING, M_GROUP = range(8)
M_ASLEEP: Final = 8
C_WAITS, C_DROPPED, C_SLEEPS, C_LATE, C_MISSED, C_REDELIVERED, C_ONWARD = range(7)
COUNTERS: Final = 8

_HEADER: Final = 4096
_PATH: Final = 128
_PATH_MAX: Final = 128
_ENTRY: Final = 256
_LABEL: Final = 128
_COUNTERS: Final = 192
LABEL_MAX: Final = 64
LIFE: Final = 1


@dataclass(frozen=True)
class Entry:
    """One member, read consistently. A member is (index, uid): indices are reused."""

    index: int
    uid: int
    role: int
    flags: int
    pid: int
    leaving: bool
    group: int
    """The uid of its group, 0 if it is in none."""

    @property
    def is_recipient(self) -> bool:
        """Whether senders wait until it has given a message back."""
        return self.role in (RECEIVER, GROUP) and not self.flags & NO_RECIPIENT


def ring_kind(kind: int) -> int:
    """The kind of the rings of a channel of this kind."""
    return WORK_QUEUE if kind == SERVICE else kind


def base(index: int) -> int:
    """Word index of a member's entry."""
    return (_HEADER + index * _ENTRY) // 8


def asleep_word(index: int) -> int:
    """Word index of a member's `asleep`."""
    return base(index) + M_ASLEEP


def label_word(index: int) -> int:
    """Word index of a member's label, of `LABEL_MAX` bytes."""
    return base(index) + _LABEL // 8


def counters_word(index: int) -> int:
    """Word index of a member's counters, which fill a cache line."""
    return base(index) + _COUNTERS // 8


def label_of(raw: bytes) -> str:
    """The label in the bytes of an entry, without what cannot be printed."""
    return "".join(c for c in raw.partition(b"\0")[0].decode("utf-8", "replace") if c.isprintable())


class Counters:
    """The counters of a member that cannot be derived from the rings. Kept here, and shown to other processes in the
    member's entry."""

    __slots__ = ("_at", "_values", "_words")

    def __init__(self, words: memoryview, index: int) -> None:
        self._words, self._at, self._values = words, counters_word(index), [0] * COUNTERS

    def __getitem__(self, which: int) -> int:
        return self._values[which]

    def add(self, which: int) -> None:
        """Count one more. Only while the member is in the table: the entry may be another's afterwards."""
        self.put(which, self._values[which] + 1)

    def put(self, which: int, value: int) -> None:
        """Show a value. As `add`."""
        self._values[which] = value
        store(self._words, self._at + which, value)


class Control:
    """A channel's control segment, mapped, with an open file description of its own for locks."""

    __slots__ = ("_view", "capacity", "channel", "locks", "name", "words")

    def __init__(self, channel: str, segment: shm.Segment, locks: LockFile) -> None:
        self.channel, self.name, self.locks = channel, control_name(channel), locks
        mapping = segment.map(writable=True)
        self.words, self._view = mapping.words, mapping.view
        self.capacity = CAPACITY

    @staticmethod
    def nbytes() -> int:
        return _HEADER + CAPACITY * _ENTRY

    @property
    def is_ready(self) -> bool:
        """Whether the segment was initialised completely."""
        return self.words[W_MAGIC] == MAGIC

    @property
    def kind(self) -> int:
        return self.words[W_KIND]

    @property
    def epoch(self) -> int:
        return self.words[W_EPOCH]

    @property
    def senders(self) -> int:
        """How many senders have ever joined."""
        return self.words[W_SENDERS]

    def check(self) -> None:
        """Raise `WireError` unless this is a control segment that this version reads."""
        words = self.words
        if words[W_MAGIC] != MAGIC:
            raise WireError(f"segment {self.name} is not a control segment of this library: use another channel name")
        if words[W_VERSION] != VERSION or words[W_CAPACITY] != CAPACITY:
            raise WireError(
                f'channel "{self.channel}" was made by layout version {words[W_VERSION]}, this library reads '
                f"{VERSION}: use the same version everywhere, or another channel name"
            )

    def initialise(self, kind: int, directory: str) -> None:
        """Under the lock: set every word to that of an empty channel."""
        words, info = self.words, os.stat(directory)
        path = os.fsencode(directory)
        self._view[_PATH : _PATH + _PATH_MAX] = path.ljust(_PATH_MAX, b"\0")
        store(words, W_MAGIC, 0)
        self._view[_HEADER:] = bytes(CAPACITY * _ENTRY)  # no process reads it meanwhile
        for word, value in (
            (W_VERSION, VERSION), (W_KIND, kind), (W_CAPACITY, CAPACITY), (W_EPOCH, words[W_EPOCH] + 1),
            (W_SENDERS, 0), (W_DEVICE, info.st_dev), (W_INODE, info.st_ino), (W_USED, 0), (W_MAGIC, MAGIC),
        ):  # fmt: skip
            store(words, word, value)

    def shares_directory(self, directory: str) -> bool:
        """Whether the channel's sockets lie in this directory (by any path)."""
        info = os.stat(directory)
        return (self.words[W_DEVICE], self.words[W_INODE]) == (info.st_dev, info.st_ino)

    def directory(self, mine: str) -> str:
        """The directory of this channel's sockets: `mine`, if it is that one, else the path its first member wrote."""
        if self.shares_directory(mine):
            return mine
        return os.fsdecode(bytes(self._view[_PATH : _PATH + _PATH_MAX]).partition(b"\0")[0])

    def advance(self) -> None:
        """Under the lock: advance the epoch, so that every member sees that the members changed."""
        store(self.words, W_EPOCH, self.words[W_EPOCH] + 1)

    def members(self) -> Iterator[Entry]:
        """Every member, alive or dead. Needs no lock: an entry is valid if its uid is the same before and after."""
        words = self.words
        for index in range(self.capacity):
            at = base(index)
            uid = words[at]
            if uid:
                acquire_fence()
                entry = Entry(
                    index, uid, words[at + M_ROLE], words[at + M_FLAGS], words[at + M_PID], words[at + M_LEAVING] != 0,
                    words[at + M_GROUP],
                )  # fmt: skip
                acquire_fence()
                if words[at] == uid:
                    yield entry

    def label(self, entry: Entry) -> str:
        """The member's label; empty if it has none, or has left meanwhile."""
        at = _HEADER + entry.index * _ENTRY + _LABEL
        raw = bytes(self._view[at : at + LABEL_MAX])
        acquire_fence()
        if self.words[base(entry.index)] != entry.uid:
            return ""
        return label_of(raw)

    def set_label(self, index: int, label: str) -> None:
        """Under the lock: label a member that is not visible yet."""
        at = _HEADER + index * _ENTRY + _LABEL
        self._view[at : at + LABEL_MAX] = label.encode().ljust(LABEL_MAX, b"\0")

    def sequence_table(self, uid: int) -> SequenceTable:
        """Map a sender's sequence table: see `SequenceTable.attach`."""
        return SequenceTable.attach(sequence_table_name(self.channel, uid), uid, self.capacity)

    def ring(self, uid: int, index: int, *, writable: bool) -> Ring:
        """Map one of a sender's rings: see `Ring.attach`."""
        name = ring_name(self.channel, uid, index)
        return Ring.attach(name, uid, index, kind=ring_kind(self.kind), capacity=self.capacity, writable=writable)

    def owner(self, index: int) -> int:
        """The uid whose files may exist, whether or not the member became visible; 0 if the entry is free."""
        return self.words[base(index) + M_OWNER]

    def owners(self) -> Iterator[int]:
        """Every uid whose files may exist."""
        return (uid for index in range(self.capacity) if (uid := self.owner(index)))

    def is_alive(self, index: int) -> bool:
        """Whether the member's life lock is held, according to the kernel. Not valid for the caller's own index."""
        return self.locks.held_by_other(LIFE + index)

    def anybody_alive(self) -> bool:
        """Ask the kernel whether any other member lives."""
        return self.locks.held_by_other(LIFE, self.capacity)

    def clear(self, index: int) -> None:
        """Under the lock: free an entry whose files are removed."""
        at = base(index)
        store(self.words, at + M_UID, 0)
        for word in (M_OWNER, M_ROLE, M_FLAGS, M_PID, M_JOINED, M_LEAVING, M_GROUP, M_ASLEEP):
            store(self.words, at + word, 0)
        for word in range(COUNTERS):
            store(self.words, counters_word(index) + word, 0)
        self.set_label(index, "")


log = logging.getLogger("shmtensor.channel")

LOCK: Final = 0
"""The control byte of a control segment."""

_T = TypeVar("_T")
_holders: dict[LockFile, tuple[int, str]] = {}
"""Locks that are held or waited for: the thread, and the name of what they lock."""
_deferred: list[Callable[[], None]] = []


def exclusively(locks: LockFile, timeout: float, what: str, action: Callable[[], _T]) -> _T:
    """Run `action` while holding the control byte, and return its result.

    Raises `TimedOut` if another process holds the byte for longer than `timeout` seconds, and `ReentrantError` at once
    if this very thread holds it: then it was interrupted while it did.
    """
    me = threading.get_ident()
    if (me, what) in list(_holders.values()):
        raise ReentrantError(
            f"{what} is locked by this very thread: a signal handler or a finalizer has interrupted it while an "
            "endpoint of that channel was being made or closed; an endpoint may be closed there, but none be made"
        )
    try:
        try:
            _holders[locks] = me, what
            locks.wait_exclusive(LOCK, timeout, what)
            return action()
        finally:
            _release(locks)
    except BaseException:
        _release(locks)
        raise


def _release(locks: LockFile) -> None:
    locks.unlock(LOCK)
    _holders.pop(locks, None)  # None: a child that was forked meanwhile has no entry
    _run_deferred()


def is_held() -> bool:
    """Whether this thread holds a control lock: then a signal handler or a finalizer has called this."""
    me = threading.get_ident()
    return any(thread == me for thread, _ in list(_holders.values()))


def defer(departure: Callable[[], None]) -> bool:
    """Put a departure off until this thread holds no control lock. False if it holds none: then do it now.

    Departures are carried out in order. One that was interrupted is run again: doing it twice must change nothing.
    """
    if not is_held():
        return False
    _deferred.append(departure)
    return True


def _run_deferred() -> None:
    taken: list[Callable[[], None]] = []
    try:
        while _deferred and not is_held():
            try:
                taken.extend(map(_deferred.pop, (0,)))  # one call: another thread has it, or this one
            except IndexError:
                return
            try:
                taken[-1]()
            except ShmTensorError:
                log.exception("a departure that was put off has failed")
            taken.clear()
    except BaseException:
        _deferred.extend(taken)
        raise


def _forget() -> None:
    """In a forked child: forget the parent's locks and departures."""
    _holders.clear()
    _deferred.clear()


lifecycle.call_in_child(_forget)
