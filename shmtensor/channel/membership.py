"""Joining and leaving a channel, and a member's end of a trace.

A tracer joins the channel as a member (observe/trace.py). So the members read the table again, as for any new member,
and find it there. If it dies, the next sweep removes its file and its entry, and the members notice that in the same
way.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from ..errors import ArgumentError, PlatformError, ReentrantError, ResourceError, ShmTensorError, TimedOut, WireError
from ..memory import placement, shortage, words
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..ring.events import EventLog
from ..ring.layout import KINDS, SERVICE
from . import cleanup
from . import control as ctl
from .control import TRACER, Control, Entry, defer, exclusively, is_held
from .names import check_channel, control_name, reply_channel, sequence_table_name, socket_dir

log = logging.getLogger("shmtensor.channel")

_T = TypeVar("_T")

LOCK_TIMEOUT: Final = 10.0
_MOMENT: Final = 0.2
"""Seconds for which a join waits for the lock of another channel in order to sweep it: perhaps no other process does so
soon."""
_FILES: Final = 16
"""More than any endpoint opens while it joins; checked before, so that a failure leaves nothing half-made."""


class Member:
    """One endpoint's entry in the table, and its life lock. Once the lock file is closed, the member counts as dead."""

    __slots__ = ("control", "directory", "group", "index", "is_first", "uid")

    def __init__(self, control: Control, directory: str, index: int, uid: int) -> None:
        self.control, self.directory, self.index, self.uid = control, directory, index, uid
        self.group: tuple[int, int] | None = None  # its entry, as (index, uid)
        self.is_first = True  # of its group

    @property
    def recipient(self) -> tuple[int, int]:
        """(index, uid) of the entry that senders know as the recipient of its messages: its own, or its group's."""
        return self.group or (self.index, self.uid)

    @property
    def channel(self) -> str:
        return self.control.channel

    @property
    def has_left(self) -> bool:
        """Whether it has left, even if an exception interrupted the departure."""
        return self.control.locks.fd < 0

    def peers(self) -> Iterator[Entry]:
        """Every other member, alive or dead."""
        return (entry for entry in self.control.members() if entry.uid != self.uid)

    def reap(self) -> None:
        """Remove the dead members if the control lock is free now; else the next liveness check tries again.

        With a client, the channel of its replies goes: a server may never have opened that.

        It is part of receiving and sending, so it does not wait for a segment server either.
        """
        with contextlib.suppress(TimedOut, ReentrantError), placement.at_once():
            gone = self._exclusively(0, lambda: cleanup.reap(self.control, self.directory, self))
            if self.control.kind == SERVICE:
                for uid in gone:
                    with contextlib.suppress(ShmTensorError, OSError):  # the next sweep does it
                        cleanup.sweep_channel(reply_channel(self.channel, uid), self.directory)

    def set_leaving(self) -> None:
        """Mark the member as closed with views alive: it gets no more messages, but lives and holds leases."""

        def say() -> None:
            words.store(self.control.words, ctl.base(self.index) + ctl.M_LEAVING, 1)
            # crash: leave.said
            self.control.advance()
            cleanup.end_groups(self.control, self)

        if not self.has_left and not defer(self.set_leaving):
            self._exclusively(LOCK_TIMEOUT, say)

    def announce(self) -> None:
        """Let every member read the table of members again."""
        self._exclusively(LOCK_TIMEOUT, self.control.advance)

    def leave(self, *, keep: bool = False, lost: Callable[[int], None] | None = None) -> None:
        """Leave the channel; the last member to leave removes it.

        Safe to call from a signal handler or a finalizer: in a thread that holds a control lock, it is carried out when
        that is free. `keep`: leave the entry and the segments to the receivers that still need them. `lost` is called
        with the number of unfinished messages of a work queue that are lost with the channel, if there are any.

        If it fails or is interrupted, the member counts as dead, and its files are removed as a dead member's are.
        """

        def go() -> int:
            # crash: leave.locked
            return cleanup.leave(self, keep=keep, count=lost is not None)

        try:
            if self.has_left or defer(lambda: self.leave(keep=keep, lost=lost)):
                return
            count = self._exclusively(LOCK_TIMEOUT, go)
            self.control.locks.close()
        except BaseException as error:
            _die(self.control.locks, self.channel, self.directory, error)
            raise
        if count and lost is not None:
            lost(count)

    def _exclusively(self, timeout: float, action: Callable[[], _T]) -> _T:
        return exclusively(self.control.locks, timeout, f'channel "{self.channel}"', action)


def _die(locks: LockFile | None, channel: str, directory: str, error: BaseException) -> None:
    """Undo a join or a departure that was interrupted, as if the process had been killed at that point."""
    if locks is not None:
        locks.close()
    patience = 0.0 if isinstance(error, TimedOut) or is_held() else LOCK_TIMEOUT
    with contextlib.suppress(ShmTensorError, OSError), placement.at_once():  # else the next sweep does it
        cleanup.sweep_channel(channel, directory, patience=patience)


def check_platform() -> None:
    """Raise `PlatformError` if endpoints cannot work on this processor and kernel."""
    if words.WEAKLY_ORDERED and not words.HAS_BARRIER:
        raise PlatformError(
            errno.ENOSYS,
            "this processor reorders memory and this kernel offers no membarrier(2): run a kernel "
            "with CONFIG_MEMBARRIER, or allow the system call in the container's seccomp profile",
        )


@dataclass(frozen=True)
class Part:
    """The role and the properties with which an endpoint joins a channel: see the table in `control.py`."""

    role: int
    flags: int = 0
    label: str = ""
    group: str = ""
    """The name of the group that it is a member of; empty: of none."""


def join(channel: str, kind: int, part: Part, prepare: Callable[[Member], None]) -> Member:
    """Become a member. `prepare(member)` makes its sequence table, semaphore or inbox before others can see it.

    If it fails or is interrupted, nothing is left. An exception that arrives after it has returned may keep the member
    from the caller; so `prepare` should keep it, to be able to leave.
    """
    check_platform()
    check_channel(channel)
    directory = socket_dir()
    placement.check_for_server()
    words.register()
    shortage.need_files(_FILES, f'joining channel "{channel}"')
    cleanup.sweep_all(directory, joined=channel, patience=_MOMENT, most_closed=1)
    held: list[LockFile] = []
    try:
        member = _join(channel, kind, part, directory, prepare, held)
        while True:
            if member is not None:
                # crash: join.done
                return member
            member = _join(channel, kind, part, directory, prepare, held)  # it was swept between opening and locking
    except BaseException as error:
        _die(held[-1] if held else None, channel, directory, error)
        raise


def _join(
    channel: str, kind: int, part: Part, directory: str, prepare: Callable[[Member], None], held: list[LockFile]
) -> Member | None:
    name = control_name(channel)
    with shm.open_or_create(name) as segment:
        locks = segment.locks()
        held.append(locks)
        # crash: join.opened

        def enter() -> Member | None:
            if not segment.is_still(name):
                locks.close()
                return None
            # crash: join.locked
            control = _map(segment, locks, channel)
            _make_ready(control, kind, directory)
            return _enter(control, directory, part, prepare)

        return exclusively(locks, LOCK_TIMEOUT, f'channel "{channel}"', enter)


def _map(segment: shm.Segment, locks: LockFile, channel: str) -> Control:
    """Under the lock: the control segment at its full size, made if it is new."""
    segment.nbytes = os.fstat(segment.fd).st_size
    if segment.nbytes not in (0, Control.nbytes()):
        raise WireError(
            f"segment {segment.name} has {segment.nbytes} bytes, a control segment of this version has "
            f"{Control.nbytes()}: another program or version owns that name; use another channel name"
        )
    segment.reserve(Control.nbytes(), "free some")
    return Control(channel, segment, locks)


def _make_ready(control: Control, kind: int, directory: str) -> None:
    if control.words[ctl.W_MAGIC]:
        control.check()
    if not control.anybody_alive():
        if control.is_ready:
            for uid in control.owners():
                cleanup.unlink_member(control.channel, uid, directory)
        control.initialise(kind, directory)
        # crash: join.initialised
        return
    if control.kind != kind:
        raise ArgumentError(
            f'channel "{control.channel}" is a {KINDS.get(control.kind, "channel of another kind")}, '
            f"not a {KINDS[kind]}: use another name"
        )
    if not control.shares_directory(directory):
        raise ResourceError(
            errno.EINVAL,
            f'the members of channel "{control.channel}" keep their sockets in another directory than {directory}: '
            "set SHMTENSOR_DIR to the same directory in every process",
        )
    cleanup.reap(control, directory, None)


def _enter(control: Control, directory: str, part: Part, prepare: Callable[[Member], None]) -> Member:
    index, uid = _take_entry(control)
    member = Member(control, directory, index, uid)
    # crash: join.owned
    if part.group:
        _enter_group(member, part.group)
    prepare(member)
    # crash: join.prepared
    if member.group is not None and member.is_first:
        _show(control, *member.group, Part(ctl.GROUP, label=part.group), pid=0, group=0)
        # crash: join.grouped
    _show(control, index, uid, part, pid=os.getpid(), group=0 if member.group is None else member.group[1])
    # crash: join.entered
    control.advance()
    if part.role == ctl.SENDER:  # behind the epoch: a receiver that sees it counted reads the table, and it is there
        words.store(control.words, ctl.W_SENDERS, control.senders + 1)
    return member


def _take_entry(control: Control, group: str | None = None) -> tuple[int, int]:
    """(index, uid) of an entry that was free and is this member's now, not visible yet; its life lock is held.

    `group`: the name of the group that the entry is for, whose members share the life lock; the member has its own.
    """
    index = next((index for index in range(control.capacity) if not control.owner(index)), None)
    if index is None:
        dead = sum(not control.is_alive(index) for index in range(control.capacity))
        limit = f"{control.capacity} members, which is the limit"
        if dead:
            limit += f" ({dead} of them have died, and what they sent waits for receivers that live)"
        if group is not None:
            limit = (
                f'{control.capacity - 1} members of {control.capacity} at most, and group "{group}" takes an entry of '
                "its own beside its first member's"
            )
        raise ResourceError(
            errno.EMFILE, f'channel "{control.channel}" has {limit}: close some, or use several channels'
        )
    uid = secrets.randbits(63) | 1
    lock = control.locks.try_exclusive if group is None else control.locks.try_shared
    if not lock(ctl.LIFE + index):
        raise WireError(
            f'member {index} of channel "{control.channel}" is locked but free: the segment was tampered with'
        )
    if index >= control.words[ctl.W_USED]:  # before the uid: who looks at the table sees that
        words.store(control.words, ctl.W_USED, index + 1)
    words.store(control.words, ctl.base(index) + ctl.M_OWNER, uid)
    return index, uid


def _enter_group(member: Member, name: str) -> None:
    """Under the lock, which has just reaped the dead: share the life lock of the group's entry, or of a new one."""
    control = member.control
    for entry in control.members():
        if entry.role == ctl.GROUP and not entry.leaving and control.label(entry) == name:
            if not control.locks.try_shared(ctl.LIFE + entry.index):
                raise WireError(
                    f'group "{name}" of channel "{control.channel}" is locked: the segment was tampered with'
                )
            member.group, member.is_first = (entry.index, entry.uid), False
            return
    member.group = _take_entry(control, name)


def _show(control: Control, index: int, uid: int, part: Part, *, pid: int, group: int) -> None:
    """Make an entry visible: its uid comes last."""
    control.set_label(index, part.label)
    for word, value in (
        (ctl.M_ROLE, part.role), (ctl.M_FLAGS, part.flags), (ctl.M_PID, pid), (ctl.M_JOINED, time.time_ns()),
        (ctl.M_LEAVING, 0), (ctl.M_GROUP, group), (ctl.M_ASLEEP, 0), (ctl.M_UID, uid),
    ):  # fmt: skip
        words.store(control.words, ctl.base(index) + word, value)


class Tracing:
    """One member's state about the tracer of its channel."""

    __slots__ = ("_log", "_tracer")

    def __init__(self) -> None:
        self._tracer = 0
        self._log: EventLog | None = None

    def follow(self, member: Member, entries: Iterable[Entry]) -> EventLog | None:
        """The log of this member, for the tracer among all members; None: there is no tracer, or it cannot be used."""
        tracer = next((entry.uid for entry in entries if entry.role == TRACER), 0)
        if tracer != self._tracer:
            self._log = self._attach(member, tracer) if tracer else None
            # crash: trace.attached
            self._tracer = tracer
        return self._log

    @staticmethod
    def _attach(member: Member, tracer: int) -> EventLog | None:
        try:
            with placement.at_once():
                return EventLog.attach(sequence_table_name(member.channel, tracer), tracer, member.index, member.uid)
        except FileNotFoundError:
            return None  # it is just ending
        except (ResourceError, WireError) as error:
            log.warning('channel "%s" is traced, but for this member: %s', member.channel, str(error))
            return None
