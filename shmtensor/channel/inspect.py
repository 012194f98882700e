"""Inspect channels from outside: their members, the messages in their rings, and who holds them. Never joins or writes.

Segments are read with `pread`, not mapped: one that is removed or truncated meanwhile gives a note, not a SIGBUS.
Nothing is locked either: the numbers may be from slightly different moments, but each was true at one of them.
"""

from __future__ import annotations

import re
import stat
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, overload

from ..errors import WireError
from ..memory import placement
from ..memory import segment as shm
from ..options import reason
from ..ring import layout as lay
from . import control as ctl
from .control import LOCK, Control
from .info import ChannelInfo, Holding, MemberInfo, made
from .names import check_channel, control_name, files_by_channel
from .processes import Process, Processes
from .published import (
    ANYBODY,
    Group,
    Held,
    HeldMessages,
    Peer,
    Peers,
    SenderReader,
    Sent,
    Taken,
    age_of,
)
from .reads import Kept, Reads, Segments, Source

_KIND = {lay.FAN_OUT: "fan-out", lay.WORK_QUEUE: "work queue", lay.SERVICE: "service"}
_ROLE = {ctl.SENDER: "sender", ctl.RECEIVER: "receiver", ctl.TRACER: "tracer"}
_REPLIES = re.compile(r"(.+)\.[0-9a-f]{16}")
_FEW: Final = 4
"""Entries of a table of members that are read with its head. Most channels have no more members."""
_FIRST_MEMBER: Final = ctl.base(0)
_MEMBER_WORDS: Final = ctl.base(1) - ctl.base(0)
_LABEL: Final = ctl.label_word(0) - ctl.base(0)
_LABEL_WORDS: Final = struct.Struct(f"={ctl.LABEL_MAX // 8}Q")
_COUNTERS: Final = ctl.counters_word(0) - ctl.base(0)
COUNTERS: Final = ("waits", "dropped", "sleeps", "late", "missed", "redelivered")
"""The fields of a `MemberInfo` that the member counts in its entry, in the order of `control.C_WAITS` and the rest."""


@overload
def inspect(channel: str, *, messages: bool = False) -> ChannelInfo | None: ...


@overload
def inspect(channel: None = None, *, messages: bool = False) -> list[ChannelInfo]: ...


def inspect(channel: str | None = None, *, messages: bool = False) -> ChannelInfo | list[ChannelInfo] | None:
    """Read the state of channels of this machine from outside, for health checks and exporters.

    It joins no channel, wakes and delays no member, writes nothing and cleans nothing up. It reads what the members
    have written to shared memory, so they need not cooperate, and may be stopped or dead.

        >>> import numpy as np, shmtensor
        >>> with shmtensor.Publisher("camera") as pub, shmtensor.Subscriber("camera") as sub:
        ...     number = pub.send(np.zeros(100))
        ...     camera = shmtensor.inspect(pub.name)
        >>> camera.kind, len(camera.senders), len(camera.receivers), camera.depth
        ('fan-out', 1, 1, 1)

    Args:
        channel: only this one; by default all that have files in `/dev/shm`, in the order of their names.
        messages: also list each held message in `ChannelInfo.held`.

    Returns:
        A list of all channels; or the one that was named, None if there is none. Another user's channels are listed,
        but only root may read them: `readable` is False for anyone else.

    Raises `ArgumentError` for a name that no channel can have.
    """
    inspector = Inspector(messages=messages)
    return inspector.channels() if channel is None else inspector.channel(check_channel(channel))


class Inspector:
    """Inspects again and again: it remembers what it has found, which process each member belongs to, and who held
    what."""

    def __init__(self, *, messages: bool = False) -> None:
        self._processes, self._messages = Processes(), messages
        self._kept: dict[str, shm.Glance] = {}
        self._looks: dict[str, _Look] = {}

    def channels(self, wanted: Callable[[str], object] | None = None) -> list[ChannelInfo]:
        """Every channel, or those whose name is wanted. One that vanishes meanwhile is passed over."""
        self._processes.refresh()
        return self._look({it: files for it, files in files_by_channel().items() if wanted is None or wanted(it)})

    def channel(self, channel: str) -> ChannelInfo | None:
        """One channel; None if there is none. What is remembered of others is forgotten."""
        self._processes.refresh()
        found = self._look({channel: files_by_channel().get(channel, ())})
        return found[0] if found else None

    def _look(self, files: Mapping[str, Collection[str]]) -> list[ChannelInfo]:
        """The channels that have these files, without those that have none any more. All others are forgotten."""
        place, infos = placement.current(), []
        for channel in sorted(files):
            look = self._looks.get(channel)
            if look is None:
                look = self._looks[channel] = _Look(channel, self._processes, self._messages)
            info = look.info(Segments(self._kept, sorted(files[channel]), place))
            if info.files:
                infos.append(info)
        self._processes.forget_all_but({member.uid for info in infos for member in info.members})
        for channel in self._looks.keys() - {info.name for info in infos}:
            del self._looks[channel]
        names: set[str] = set().union(*files.values())
        for name in [name for name in self._kept if name[1:] not in names]:
            self._kept.pop(name).close()
        return infos


def view_of(channel: str) -> ChannelInfo:
    """A snapshot of one channel, with every held message. What cannot be read becomes a note in it."""
    segments = Segments({}, sorted(files_by_channel().get(channel, ())), placement.current())
    return _Look(channel, Processes(), messages=True).info(segments)


def is_of_replies(channel: str) -> bool:
    """Whether a fan-out of this name has the replies to one client of a service."""
    return _REPLIES.fullmatch(channel) is not None


@dataclass(eq=False)
class _Members:
    """What the control segment says about the members."""

    peers: Peers
    locked: bool
    entries: list[dict[str, Any]]
    """Of each of `peers.members`: the fields of its `MemberInfo` that can be told from its entry."""


_UNKNOWN: Final = _Members(Peers(0, (), ()), False, [])


@dataclass(eq=False)
class _Whole:
    """The members, and what all senders together have sent."""

    members: list[tuple[dict[str, Any], dict[str, Any], int | None, int | None]] = field(default_factory=list)
    """The fields of a `MemberInfo` by its entry, and by what was sent; when the newest message of a sender, and the
    oldest that a receiver has not taken, was sent."""
    depth: int = 0
    first: int | None = None
    """When the oldest message was sent that a receiver has not taken."""
    holdings: list[Held] = field(default_factory=list)
    held: list[HeldMessages] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _MemberReader:
    """Reads the members. It does not refer to its `_Look`, since descriptors would then stay open until a garbage
    collection."""

    def __init__(self, channel: str, processes: Processes) -> None:
        self.channel, self.processes = channel, processes

    def read(self, reads: Reads) -> _Members:
        control = reads.open(control_name(self.channel), stays=True)
        nbytes = control.nbytes
        if nbytes != Control.nbytes():
            raise WireError(
                f"segment {control.name} has {nbytes} bytes: another version's, damaged, or just being made"
            )
        words = control.read_head(_FIRST_MEMBER + _MEMBER_WORDS * _FEW)
        if words[ctl.W_MAGIC] != ctl.MAGIC:
            raise WireError(f"segment {control.name} is no control segment: damaged, or just being made")
        if words[ctl.W_VERSION] != ctl.VERSION or words[ctl.W_CAPACITY] != ctl.CAPACITY:
            raise WireError(
                f"its members cannot be read: layout version {words[ctl.W_VERSION]}, this library reads {ctl.VERSION}"
            )
        used = min(words[ctl.W_USED], ctl.CAPACITY)
        if used > _FEW:
            words = control.read_anew(0, _FIRST_MEMBER + _MEMBER_WORDS * used)
        kind, locked = words[ctl.W_KIND], control.is_locked(LOCK)
        anew = control.read_anew(_FIRST_MEMBER, _MEMBER_WORDS * used)
        entries: list[tuple[int, list[int]]] = []
        for index in range(used):
            at = _MEMBER_WORDS * index
            if anew[at] and anew[at] == words[_FIRST_MEMBER + at]:  # not just joining or leaving
                entries.append((index, words[_FIRST_MEMBER + at : _FIRST_MEMBER + at + _MEMBER_WORDS].tolist()))
        groups = tuple([
            Group(index, entry[ctl.M_UID], _label(entry), entry[ctl.M_LEAVING] != 0)
            for index, entry in entries
            if entry[ctl.M_ROLE] == ctl.GROUP and control.is_locked(ctl.LIFE + index)
        ])  # fmt: skip
        peers, fields = [], []
        for index, entry in entries:
            if entry[ctl.M_ROLE] != ctl.GROUP:
                alive = control.is_locked(ctl.LIFE + index)
                process = self._process(index, entry, control, alive)
                peers.append(_peer(kind, groups, index, entry, alive, process.pid))
                fields.append(_fields(peers[-1], entry, process))
        return _Members(Peers(kind, tuple(peers), groups), locked, fields)

    def _process(self, index: int, entry: list[int], control: Source, alive: bool) -> Process:
        uid, processes = entry[ctl.M_UID], self.processes
        if not alive:
            return Process(0, processes.known(uid).name)
        return processes.find(uid, entry[ctl.M_PID], control.segment.info, ctl.LIFE + index)


class _Look:
    """One channel, and what was found of it: everything but ages, and whether processes are stopped.

    It has parts: the members; what each sender has sent; and both together. A part is computed anew only if its inputs
    have changed: what was read for it (see `Kept`), and other parts. `processes` looks up the process of a member only
    once.
    """

    def __init__(self, channel: str, processes: Processes, messages: bool) -> None:
        self.channel, self.processes = channel, processes
        replies = _REPLIES.fullmatch(channel)
        self._replies_of = replies[1] if replies else ""
        self.members = Kept(_MemberReader(channel, processes).read)
        self.senders: dict[int, Kept[Sent]] = {}
        """By the uid of each."""
        self._reader = SenderReader(channel, processes, messages)
        self._parts: tuple[object, ...] = ()
        self._whole = _Whole()
        self._since: dict[Taken, float] = {}
        """When it was first seen that a message was taken, on CLOCK_MONOTONIC."""

    def info(self, segments: Segments) -> ChannelInfo:
        """Look at the channel."""
        files, place, notes, readable = segments.files, segments.place, [], True
        main = files.get(control_name(self.channel)[1:])
        members, sent = _UNKNOWN, {}
        try:
            members = self.members.found(segments)
            before, self.senders = self.senders, {}
            for peer in members.peers.members:
                if peer.role == "sender":
                    self.senders[peer.uid] = kept = before.get(peer.uid) or Kept(self._reader.read)
                    sent[peer.index] = kept.found(segments, members.peers, peer)
        except FileNotFoundError:
            notes.append("no control segment: these are leftovers, or the channel has just ended")
            files = {name: place.status(name) for name in files}  # the others may be gone by now
        except (OSError, ValueError, LookupError, ArithmeticError) as error:
            notes.append(reason(error))
            readable = False
        parts = members, *sent.values()
        if parts != self._parts:
            self._parts, self._whole = parts, _together(members, sent)
        now, notes = time.monotonic_ns(), notes + self._whole.notes
        paths, nbytes, owner = [], 0, -1 if main is None else main.st_uid
        for name, info in files.items():
            if info is not None and stat.S_ISREG(info.st_mode):
                user, path = info.st_uid, place.path(name)
                if user != owner != -1:
                    notes.append(f"{path} belongs to user {user}: not of this channel")
                    continue
                paths.append(path)
                nbytes += min(info.st_size, 512 * info.st_blocks)  # a trace is sparse
                owner = user
        whole, kind = self._whole, members.peers.kind
        return made(
            ChannelInfo,
            {
                "name": self.channel, "kind": _KIND.get(kind, "unknown"),
                "service": self.channel if kind == lay.SERVICE else self._replies_of if kind == lay.FAN_OUT else "",
                "owner": owner, "nbytes": nbytes, "files": tuple(paths), "locked": members.locked,
                "members": self._members(now),
                "holdings": self._holdings(now),
                "held": tuple([it for ring in whole.held for it in ring.as_of(now)]) if whole.held else (),
                "depth": whole.depth, "oldest_unread": age_of(whole.first, now),
                "notes": tuple(notes), "readable": readable,
            },
        )  # fmt: skip

    def _members(self, now: int) -> tuple[MemberInfo, ...]:
        found, is_stopped = [], self.processes.is_stopped
        for entry, own, newest, unread in self._whole.members:
            fields = {
                **entry,
                **own,
                "newest_age": 0.0 if newest is None else age_of(newest, now) or 1e-9,
                "oldest_unread": age_of(unread, now),
                "stopped": entry["alive"] and is_stopped(entry["host_pid"]),
            }
            found.append(made(MemberInfo, fields))
        return tuple(found)

    def _holdings(self, now: int) -> tuple[Holding, ...]:
        found, looked, before = [], time.monotonic(), self._since
        self._since = since = {}
        for holder, messages, nbytes, first, taken in self._whole.holdings:
            held = 0.0
            for what in taken:
                since[what] = before.get(what, looked)
                held = max(held, looked - since[what])
            more = {"messages": messages, "nbytes": nbytes, "oldest": age_of(first, now), "held": held}
            found.append(made(Holding, {**vars(holder), **more}))
        return tuple(found)


def _peer(kind: int, groups: tuple[Group, ...], index: int, entry: list[int], alive: bool, host_pid: int) -> Peer:
    role, delivery, group = _ROLE.get(entry[ctl.M_ROLE], "unknown"), "", entry[ctl.M_GROUP]
    if role == "receiver":
        shares = kind in (lay.WORK_QUEUE, lay.SERVICE) or group != 0
        delivery = "one" if shares else "latest" if entry[ctl.M_FLAGS] & ctl.LATEST else "all"
    return made(
        Peer,
        {
            "index": index, "uid": entry[ctl.M_UID], "role": role, "delivery": delivery,
            "group": next((it.name for it in groups if it.uid == group), "") if group else "",
            "pid": entry[ctl.M_PID], "host_pid": host_pid, "alive": alive, "leaving": entry[ctl.M_LEAVING] != 0,
        },
    )  # fmt: skip


def _fields(peer: Peer, entry: list[int], process: Process) -> dict[str, Any]:
    """The fields of a `MemberInfo` that its entry determines."""
    return {
        **vars(peer), "process": process.name, "label": _label(entry), "asleep": entry[ctl.M_ASLEEP] % 2 == 1,
        "joined": entry[ctl.M_JOINED] / 1e9, **dict(zip(COUNTERS, entry[_COUNTERS:], strict=False)),
        "published": 0, "rings": (), "newest_bytes": 0, "received": 0, "unread": 0,
    }  # fmt: skip


def _label(entry: list[int]) -> str:
    if not entry[_LABEL]:
        return ""
    return ctl.label_of(_LABEL_WORDS.pack(*entry[_LABEL:_COUNTERS]))


def _together(members: _Members, sent: dict[int, Sent]) -> _Whole:
    """What all senders, by their index, have sent together."""
    found, peers = _Whole(), members.peers
    received: dict[int, int] = {}
    unread: dict[int, Held] = {}
    holdings: list[Held] = []
    for it in sent.values():
        holdings += it.holdings
        found.held += it.held
        found.notes += it.notes
        for index, count in it.received.items():
            received[index] = received.get(index, 0) + count
        for index, held in it.unread:
            unread[index] = held.plus(unread[index]) if index in unread else held
    holdings.sort(key=_by_member)
    for held in holdings:
        if found.holdings and found.holdings[-1].holder == held.holder:
            found.holdings[-1] = found.holdings[-1].plus(held)
        else:
            found.holdings.append(held)
    living = {group.index for group in peers.groups}
    for peer, entry in zip(peers.members, members.entries, strict=True):
        own: dict[str, Any] = {}
        newest = first = None
        if peer.index in sent:
            own, newest = sent[peer.index].fields, sent[peer.index].newest
        elif peer.delivery == "all":
            own = {"received": received.get(peer.index, 0)}
            if peer.index in unread:
                own["unread"], first = unread[peer.index].messages, unread[peer.index].first
            if peer.alive and not peer.leaving:
                living.add(peer.index)
        found.members.append((entry, own, newest, first))
    waiting = 0
    for index, held in unread.items():
        if index == ANYBODY:
            waiting = held.messages
        elif index in living:
            found.depth = max(found.depth, held.messages)
        else:
            continue
        found.first = held.first if found.first is None else min(found.first, held.first)
    found.depth += waiting
    return found


def _by_member(held: Held) -> tuple[bool, int, str, str, int, bool]:
    holder = held.holder
    return holder.uid == 0, holder.pid, holder.group, holder.how, holder.uid, holder.alive
