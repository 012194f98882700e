"""A trace of a channel: while it runs, the members record events in shared memory, which this module reads.

The tracer is a member that neither sends nor receives, so the clean-up of members is that of traces: see ring/events.py
for what lies in its file, and docs/internals/protocols.md, section 14, for why a death at any step leaves nothing on.

It is written in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
A process is a process, each of its members a thread. What a member did is a slice (`X`): `send`, within it `wait for a
slot` if it had to; `take`; `release`. A flow (`s`, `t`, `f`) leads from the send to each receiver's take and release.
What a receiver holds between these two is an asynchronous slice (`b`, `e`), as many may be held at once. Times are
microseconds on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import numpy as np

from ..channel import control as ctl
from ..channel import membership
from ..channel.info import ChannelInfo, MemberInfo
from ..channel.inspect import Inspector
from ..channel.membership import Member
from ..channel.names import control_name, sequence_table_name
from ..errors import ArgumentError, ResourceError, WireError
from ..memory import segment as shm
from ..memory.words import acquire_fence, store
from ..ring import events as ev
from ..ring.events import (
    E_BEGIN,
    E_END,
    E_MEMBER,
    E_MIDDLE,
    E_NBYTES,
    E_PID,
    E_SENDER,
    E_WHAT,
    RELEASE,
    SEND,
    TAKE,
    area_at,
)
from .rates import NONE, Rates

Events = np.ndarray[Any, np.dtype[np.uint64]]
"""One row for each event: the words of ring/events.py."""

SIZE: Final = 1 << 15
"""Events that an area holds: twice as many as a member makes in 20 ms at the highest rates."""
_LEASE_NS: Final = 5_000_000_000
"""How long members go on writing when the tracer does not renew it."""
_LOOK_S: Final = 0.1
"""Seconds for which a channel is watched to know its rate."""


@dataclass
class Trace:
    """The events of a trace."""

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
    every: int = 1
    """Only messages whose sequence number is a multiple of it are in it."""

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


def every_that_fits(channel: str, seconds: float, most: int) -> int:
    """The `every=` with which a trace of `seconds` has at most `most` events: 1 unless the channel is too fast.

    Watches the channel for a moment. 1 as well if there is no such channel, or nothing is sent.
    """
    inspector, rates = Inspector(), Rates()
    rates.update(filter(None, [inspector.channel(channel)]), time.monotonic())
    time.sleep(_LOOK_S)
    info = inspector.channel(channel)
    if info is None:
        return 1
    rates.update([info], time.monotonic())
    messages = (rates.of_channel(info) or NONE).messages
    return max(1, math.ceil(seconds * messages * _events_each(info) / most))


def _events_each(info: ChannelInfo) -> int:
    """Events of one message: a send, and a take and a release of each receiver that gets it."""
    if info.kind != "fan-out":
        return 3
    groups = {it.group for it in info.receivers if it.group}
    return 1 + 2 * (len(groups) + sum(not it.group for it in info.receivers))


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
        """The areas of members: only these are read as long as no member comes or goes."""
        self._positions: dict[int, int] = {}
        """By area: how many of its events were read."""
        self._skipped: dict[int, int] = {}
        self.trace = Trace(channel, "", time.monotonic_ns(), every=every)
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
        """Extend the time for which members write events. If it was over, because this process was stopped, they must
        be notified."""
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
        """Read the table of members, to find out who has joined or left."""
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


def write_chrome(trace: Trace, file: TextIO, version: str) -> int:
    """Write the trace as one JSON object. Returns how many messages it has."""
    other = {
        "channel": trace.channel, "kind": trace.kind, "clock": "CLOCK_MONOTONIC", "shmtensor": version,
        "began": _us(trace.began_ns), "ended": _us(trace.ended_ns), "lost": trace.lost, "every": trace.every,
    }  # fmt: skip
    lines = _Lines(trace)
    file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(other)},"traceEvents":[')
    comma = "\n"
    for line in lines.all():
        file.write(comma)
        file.write(line)
        comma = ",\n"
    file.write("\n]}\n")
    return len(lines.messages)


def _us(ns: int) -> float:
    return ns / 1e3


def _time(ns: int) -> str:
    """A time in microseconds as exact text: a float of microseconds since the start of the machine loses precision."""
    return f"{ns // 1000}.{ns % 1000:03}"


class _Lines:
    """The JSON objects of a trace, one after another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lanes: dict[int, tuple[int, int]] = {}
        self._processes: dict[int, tuple[str, int]] = {}
        """What a process runs, and how many members of it there are."""
        self._sent: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        """By message: the lane and a time within the slice of its send."""
        self._held: dict[tuple[int, int, int], tuple[int, int]] = {}
        """By message and receiver: when it was taken, and its payload."""
        self.messages: set[tuple[int, int]] = set()

    def all(self) -> Iterator[str]:
        """The events; then the names of processes and members, and the ends of flows that have no release."""
        events = self._trace.events().tolist()
        for event in events:  # first: a message may be taken in the moment before its send has ended
            if event[E_WHAT] & 0xFF == SEND:
                within = max(event[E_MIDDLE], event[E_END] - 1)
                self._sent[event[E_MEMBER], event[E_WHAT] >> 8] = self._lane(event), within
        for event in events:
            kind, seq = event[E_WHAT] & 0xFF, event[E_WHAT] >> 8
            message = event[E_SENDER], seq
            if kind not in (SEND, TAKE, RELEASE):
                continue
            self.messages.add(message)
            lane = self._lane(event)
            if kind == SEND:
                yield from self._send(event, seq, lane)
            elif kind == TAKE:
                yield from self._take(event, message, lane)
            else:
                yield from self._release(event, message, lane)
        for (sender, seq, receiver), (taken, _) in self._held.items():
            if (sender, seq) in self._sent:  # not given back so far: the flow ends with the take
                yield _flow("f", self._lanes[receiver], taken, _id(sender, seq, receiver))
        yield from self._names()

    def _lane(self, event: list[int]) -> tuple[int, int]:
        """Process and thread of a member."""
        uid = event[E_MEMBER]
        if uid not in self._lanes:
            info = self._trace.members.get(uid)
            pid = (info.host_pid if info is not None else 0) or event[E_PID]
            process = f"{info.process if info is not None else ''} (pid {event[E_PID]})".strip()
            _, count = self._processes.get(pid, ("", 0))
            self._processes[pid] = process, count + 1
            self._lanes[uid] = pid, count + 1
        return self._lanes[uid]

    def _send(self, event: list[int], seq: int, lane: tuple[int, int]) -> Iterator[str]:
        begin, found, end = event[E_BEGIN], event[E_MIDDLE], event[E_END]
        yield _slice("send", lane, begin, end, {"seq": seq, "bytes": event[E_NBYTES], "waited_ns": found - begin})
        if found > begin:
            yield _slice("wait for a slot", lane, begin, found, {})

    def _take(self, event: list[int], message: tuple[int, int], lane: tuple[int, int]) -> Iterator[str]:
        begin, end, receiver = event[E_BEGIN], event[E_END], event[E_MEMBER]
        args = {"seq": message[1], "bytes": event[E_NBYTES], "sender": f"{message[0]:016x}"}
        if event[E_MIDDLE] > 1:
            args["attempt"] = event[E_MIDDLE]
        sent = self._sent.get(message)
        if sent is not None:
            args["after_ns"] = begin - sent[1]
        yield _slice("take", lane, begin, end, args)
        self._held[(*message, receiver)] = begin, event[E_NBYTES]
        if sent is not None:
            yield _flow("s", *sent, _id(*message, receiver))
            yield _flow("t", lane, begin, _id(*message, receiver))

    def _release(self, event: list[int], message: tuple[int, int], lane: tuple[int, int]) -> Iterator[str]:
        at, receiver = event[E_END], event[E_MEMBER]
        name = _id(*message, receiver)
        yield _slice("release", lane, at, at, {"seq": message[1], "sender": f"{message[0]:016x}"})
        taken, nbytes = self._held.pop((*message, receiver), (0, 0))
        if taken:
            for phase, when in (("b", taken), ("e", at)):
                yield _object(
                    "held", phase, lane, when, cat="held", id=name, args={"seq": message[1], "bytes": nbytes}
                )  # fmt: skip
            if message in self._sent:
                yield _flow("f", lane, at, name)

    def _names(self) -> Iterator[str]:
        for pid, (process, _) in self._processes.items():
            yield _meta("process_name", pid, 0, process)
        for uid, (pid, thread) in self._lanes.items():
            yield _meta("thread_name", pid, thread, _name_of(uid, self._trace.members.get(uid)))


def _name_of(uid: int, info: MemberInfo | None) -> str:
    if info is None:
        return f"member {uid:016x}"
    return " ".join(filter(None, (info.role, info.label or f"{uid:016x}")))


def _id(sender: int, seq: int, receiver: int) -> str:
    """Of a flow: one message on its way to one receiver."""
    return f"{sender:016x}.{seq}.{receiver:016x}"


def _object(name: str, phase: str, lane: tuple[int, int], at: int, **more: Any) -> str:
    head = f'{{"name":"{name}","ph":"{phase}","pid":{lane[0]},"tid":{lane[1]},"ts":{_time(at)}'
    return head + "".join(f',"{key}":{json.dumps(value)}' for key, value in more.items()) + "}"


def _slice(name: str, lane: tuple[int, int], begin: int, end: int, args: dict[str, Any]) -> str:
    head = f'{{"name":"{name}","cat":"message","ph":"X","pid":{lane[0]},"tid":{lane[1]},"ts":{_time(begin)}'
    return f'{head},"dur":{_time(max(0, end - begin))},"args":{json.dumps(args)}}}'


def _flow(phase: str, lane: tuple[int, int], at: int, name: str) -> str:
    return _object("message", phase, lane, at, cat="flow", id=name, bp="e")


def _meta(what: str, pid: int, thread: int, name: str) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}})
