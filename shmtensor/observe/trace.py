"""A trace of a channel: while it lasts, the members write down what they do, and this reads it.

The tracer is a member that neither sends nor receives, so the clean-up of members is that of traces: see ring/events.py
for what lies in its file, and docs/internals/protocols.md, section 14, for why a death at any step leaves nothing on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..channel import control as ctl
from ..channel import membership
from ..channel.info import MemberInfo
from ..channel.inspect import Inspector
from ..channel.membership import Member
from ..channel.names import control_name, sequence_table_name
from ..errors import ArgumentError, ResourceError, WireError
from ..memory import segment as shm
from ..memory.words import acquire_fence, store
from ..ring import events as ev
from ..ring.events import area_at

Events = np.ndarray[Any, np.dtype[np.uint64]]
"""One row for each event: the words of ring/events.py."""

SIZE: Final = 1 << 15
"""Events that an area holds: what a member does in 20 ms fits twice, at the highest rates that there are."""
_LEASE_NS: Final = 5_000_000_000
"""How long members go on writing when the tracer does not renew it."""


@dataclass
class Trace:
    """What was seen."""

    channel: str
    kind: str
    began_ns: int
    """On CLOCK_MONOTONIC, as every time in it."""
    ended_ns: int = 0
    parts: list[Events] = field(default_factory=list)
    members: dict[int, MemberInfo] = field(default_factory=dict)
    """By uid, as far as they were seen in the table of members."""
    lost: int = 0
    """Events that were overwritten before they were read, or skipped by a member's threads that met."""

    @property
    def count(self) -> int:
        """How many events."""
        return sum(map(len, self.parts))

    @property
    def writers(self) -> int:
        """How many members have written any of them."""
        return len(np.unique(np.concatenate([part[:, ev.E_MEMBER] for part in self.parts]))) if self.parts else 0

    def events(self) -> Events:
        """All events, in the order of their ends."""
        found = np.concatenate(self.parts) if self.parts else np.zeros((0, ev.EVENT_WORDS), np.uint64)
        return found[np.argsort(found[:, ev.E_END], kind="stable")]


class Tracer:
    """Traces a channel from when it is made until it is closed.

    Raises `FileNotFoundError` if there is no such channel, `ResourceError` if it is traced already or there is no room.
    """

    def __init__(self, channel: str, *, every: int = 1, size: int = SIZE) -> None:
        if not 1 <= every < 1 << 32:
            raise ArgumentError(f"every={every}: from 1, each message, on")
        with shm.look_at(control_name(channel)) as control:
            kind = control.read(0, 8)[ctl.W_KIND] if control.nbytes >= 64 else 0
        if not kind:
            raise FileNotFoundError(errno.ENOENT, f'channel "{channel}" is just being made, or ends')
        self._every, self._size = every, size
        self._inspector = Inspector()
        self._file: shm.Glance | None = None
        self._member: Member | None = None
        self._epoch = self._until = 0
        self._areas: set[int] = set()
        """Those of members: as long as none comes or goes, only these are looked at."""
        self._positions: dict[int, int] = {}
        """By area: how many of its events were read."""
        self._skipped: dict[int, int] = {}
        self.trace = Trace(channel, "", time.monotonic_ns())
        try:
            membership.join(channel, kind, membership.Part(ctl.TRACER), self._prepare)
            if not any(True for _ in self._joined.peers()):
                raise FileNotFoundError(errno.ENOENT, f'there is no channel "{channel}"')  # it ended meanwhile
            self._look()
        except BaseException:
            self.close()
            raise

    @property
    def _joined(self) -> Member:
        if self._member is None:
            raise ResourceError(errno.EINVAL, "this trace has ended")
        return self._member

    def _prepare(self, member: Member) -> None:
        """Under the channel's lock, before any member sees this one: make the file."""
        control = member.control
        for entry in control.members():
            if entry.role == ctl.TRACER and control.is_alive(entry.index):
                raise ResourceError(
                    errno.EBUSY, f'channel "{member.channel}" is traced by process {entry.pid}: wait for it, or end it'
                )
        self._member = member
        name, pages = sequence_table_name(member.channel, member.uid), shm.PAGE
        nbytes = area_at(control.capacity, self._size)
        with shm.create(name, nbytes, "close other channels", reserved=pages) as segment:
            words = segment.map(0, pages, writable=True).words
            for at, value in (
                (ev.T_VERSION, ev.VERSION), (ev.T_UID, member.uid), (ev.T_CAPACITY, control.capacity),
                (ev.T_SIZE, self._size), (ev.T_EVERY, self._every), (ev.T_MAGIC, ev.MAGIC),
            ):  # fmt: skip
                store(words, at, value)
            self._limits = words
            self._file = shm.look_at(name)
            self._renew()
        # crash: trace.made

    def _renew(self) -> None:
        """Let the members go on. If their time was over, since this process was stopped, they have to be told."""
        now = time.monotonic_ns()
        is_late = 0 < self._until <= now
        if self._until - now < _LEASE_NS - 1_000_000_000:
            self._until = now + _LEASE_NS
            store(self._limits, ev.T_UNTIL, self._until)
        if is_late:
            self._joined.announce()

    def poll(self) -> int:
        """Read what is new. Returns how many events."""
        self._renew()
        return self._read()

    def _look(self) -> None:
        """Who is there?"""
        control = self._joined.control
        self._epoch = control.epoch
        acquire_fence()
        self._areas |= {entry.index for entry in control.members()}
        info = self._inspector.channel(self.trace.channel)
        if info is not None:
            self.trace.kind = info.kind
            self.trace.members.update({member.uid: member for member in info.members})

    def _read(self) -> int:
        control, file, new = self._joined.control, self._file, 0
        if file is None:
            return 0
        areas: Iterable[int] = self._areas
        if control.epoch != self._epoch:  # a member may have come and gone since
            self._look()
            areas = range(control.capacity)
        for index in areas:
            at = area_at(index, self._size)
            written, skipped = file.read(at // 8, 2)
            position = self._positions.get(index, 0)
            if written <= position or written >= 1 << 63:
                continue
            self._positions[index] = written
            self.trace.lost += max(0, skipped - self._skipped.get(index, 0))
            self._skipped[index] = skipped
            first = max(position, written - self._size)
            acquire_fence()
            found = self._copy(file, at + 8 * ev.A_EVENTS, first, written)
            acquire_fence()
            # number k lies where k - size did: what is overwritten now, or was while it was copied, is left out
            whole = min(max(first, file.read(at // 8, 1)[0] - self._size + 1), written)
            self.trace.lost += whole - position
            found = found[whole - first :]
            if len(found):
                self.trace.parts.append(found)
                new += len(found)
        return new

    def _copy(self, file: shm.Glance, at: int, first: int, end: int) -> Events:
        """Events number `first` to `end` - 1 of an area."""
        nbytes, start, stop = 8 * ev.EVENT_WORDS, first % self._size, (end - 1) % self._size + 1
        if start < stop:
            data = file.read_bytes(at + nbytes * start, nbytes * (stop - start))
        else:
            data = file.read_bytes(at + nbytes * start, nbytes * (self._size - start))
            data += file.read_bytes(at, nbytes * stop)
        return np.frombuffer(data, np.uint64).reshape(-1, ev.EVENT_WORDS)

    def close(self) -> int:
        """End the trace, read the rest, and leave. Idempotent. How many messages of a work queue ended unfinished: it
        was the last member."""
        lost: list[int] = []
        member = self._member
        if member is None:
            return 0
        try:
            if self._file is not None and not member.has_left:
                store(self._limits, ev.T_UNTIL, 1)
                self.trace.ended_ns = time.monotonic_ns()
                # crash: trace.over
                self._read()
        except WireError:
            pass  # its file was cut
        finally:
            member.leave(lost=lost.append)
            if self._file is not None:
                self._file.close()
            self._member = self._file = None
        return sum(lost)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
