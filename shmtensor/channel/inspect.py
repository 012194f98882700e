"""Inspect channels from outside: their members, the messages in their rings, and who holds them. Never joins or writes.

Segments are read with `pread`, not mapped: one that is removed or truncated meanwhile gives a note, not a SIGBUS.
Nothing is locked either: the numbers may be from slightly different moments, but each was true at one of them.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, overload

import numpy as np

from ..errors import WireError
from ..memory import segment as shm
from ..options import reason
from ..ring import layout as lay
from . import control as ctl
from .answers import Answers, Files, Segments, Source
from .control import LOCK, Control
from .info import ChannelInfo, Holder, Holding, MemberInfo, RingInfo
from .names import check_channel, control_name, parse_file, ring_name, sequence_table_name
from .processes import Process, Processes, Ranges, covers
from .published import HEAD, NBYTES, SENT, SEQ, Mask, Messages, Used, Words, age_of

_CHUNK = 4096
_KIND = {lay.FAN_OUT: "fan-out", lay.WORK_QUEUE: "work queue", lay.SERVICE: "service"}
_ROLE = {ctl.SENDER: "sender", ctl.RECEIVER: "receiver", ctl.TRACER: "tracer"}
_REPLIES = re.compile(r"(.+)\.[0-9a-f]{16}")
_ODD: Final = np.uint64(1)
_LOOKS: Final = 8
"""Times that the newest message of a sender is looked for."""
_HEAD_WORDS: Final = 3 * shm.PAGE // 8
"""Of a sequence table or ring: what is read at once. Behind it lies more if there are many slots or members."""
_TABLE_WORDS: Final = lay.L_MEMBERS + 2 * ctl.CAPACITY
_FEW: Final = 16
"""Entries of a table of members that are read with its head. Few channels have more members."""
_FIRST_MEMBER: Final = ctl.base(0)
_MEMBER_WORDS: Final = ctl.base(1) - ctl.base(0)
_LABEL: Final = ctl.label_word(0) - ctl.base(0)
_COUNTERS: Final = ctl.counters_word(0) - ctl.base(0)
COUNTERS: Final = ("waits", "dropped", "sleeps", "late", "missed", "redelivered")
"""The fields of a `MemberInfo` that the member counts in its entry, in the order of `control.C_WAITS` and the rest."""
_T = TypeVar("_T")
_Taken = tuple[int, int, int, int]
"""uid and pid of a holder, uid of a sender, number of a message."""
_HELD: Final = ("leased", "claimed", "done")
"""`how` of messages that a member has taken."""


@overload
def inspect(channel: str, *, messages: bool = False) -> ChannelInfo | None: ...


@overload
def inspect(channel: None = None, *, messages: bool = False) -> list[ChannelInfo]: ...


def inspect(channel: str | None = None, *, messages: bool = False) -> ChannelInfo | list[ChannelInfo] | None:
    """Look at the channels of this machine from outside: for health checks and exporters.

    Only looks: it joins no channel, wakes and holds up no member, writes nothing and cleans nothing up. It reads what
    the members have written to shared memory anyway, so they need not cooperate, and may be stopped or dead.

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

    def channels(self, wanted: Callable[[str], bool] | None = None) -> list[ChannelInfo]:
        """Every channel, or those whose name is wanted. One that vanishes meanwhile is passed over."""
        self._processes.refresh()
        files: dict[str, list[str]] = {}
        for name in shm.listing():
            found = parse_file(name)
            if found and (found[0] in files or wanted is None or wanted(found[0])):
                files.setdefault(found[0], []).append(name)
        known = shm.statuses(name for channel in sorted(files) for name in sorted(files[channel]))
        return self._look({channel: {name: known[name] for name in files[channel]} for channel in sorted(files)})

    def channel(self, channel: str) -> ChannelInfo | None:
        """One channel; None if there is none. What is remembered of others is forgotten."""
        self._processes.refresh()
        found = self._look({channel: _files_of(channel)})
        return found[0] if found else None

    def _look(self, channels: dict[str, Files]) -> list[ChannelInfo]:
        """The channels that have these files, without those that have none any more. All others are forgotten."""
        infos = [info for channel, files in channels.items() if (info := self._channel(channel, files)).files]
        self._processes.forget_all_but({member.uid for info in infos for member in info.members})
        for channel in self._looks.keys() - {info.name for info in infos}:
            del self._looks[channel]
        for name in self._kept.keys() - {f"/{name}" for files in channels.values() for name in files}:
            self._kept.pop(name).close()
        return infos

    def _channel(self, channel: str, files: Files) -> ChannelInfo:
        before, segments = self._looks.get(channel), Segments(self._kept, files)
        if before is not None:
            changed = before.answers.again(segments)
            if changed is None:
                return before.info(files)
            look = _Look(channel, self._processes, self._messages, changed, before.since)
        else:
            look = _Look(channel, self._processes, self._messages, Answers(segments))
        look.read()
        self._looks[channel] = look
        return look.info(files)


def view_of(channel: str) -> ChannelInfo:
    """A snapshot of one channel, with every held message. What cannot be read becomes a note in it."""
    files = _files_of(channel)
    look = _Look(channel, Processes(), True, Answers(Segments({}, files)))
    look.read()
    return look.info(files)


def is_of_replies(channel: str) -> bool:
    """Whether a fan-out of this name has the replies to one client of a service."""
    return _REPLIES.fullmatch(channel) is not None


def _files_of(channel: str) -> Files:
    names = [name for name in shm.listing() if (found := parse_file(name)) and found[0] == channel]
    return shm.statuses(sorted(names))


@dataclass
class _Queue:
    """What one receiver has taken of all senders' messages, and not."""

    received: int = 0
    unread: int = 0
    first: int | None = None
    """When the oldest of the unread was sent, on CLOCK_MONOTONIC, in nanoseconds."""

    def add(self, found: Messages, mask: Mask) -> None:
        """These messages are not taken."""
        self.unread += int(np.count_nonzero(mask))
        self.first = _first(self.first, found.first_sent(mask))


@dataclass
class _Hold:
    """What a holder holds."""

    messages: int
    nbytes: int
    first: int
    """When the oldest was sent."""
    taken: list[_Taken]


@dataclass(frozen=True)
class _Group:
    """A group of subscribers that has living members."""

    index: int
    uid: int
    name: str
    leaving: bool


@dataclass
class _Look:
    """One look at a channel, and what it has found: everything but ages, and whether processes are stopped.

    It stays true for as long as the segments answer what they have answered: see `Answers`. Besides these it depends
    on `processes`, which names the process of a member once, and on nothing else.
    """

    channel: str
    processes: Processes
    messages: bool
    answers: Answers
    since: dict[_Taken, float] = field(default_factory=dict)
    """When it was first seen that a message was taken, on CLOCK_MONOTONIC."""
    kind: int = 0
    locked: bool = False
    members: list[MemberInfo] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    """By the index of a sender: when it sent its newest message, if that is known."""
    queues: dict[int, _Queue] = field(default_factory=dict)
    """By the index of a member, or of a group's entry, that gets every message."""
    waiting: _Queue = field(default_factory=_Queue)
    """Of a work queue."""
    groups: list[_Group] = field(default_factory=list)
    held: list[tuple[int, int, Messages, Used]] = field(default_factory=list)
    """uid of a sender, number of its ring; if each message is wanted."""
    holdings: dict[Holder, _Hold] = field(default_factory=dict)
    depth: int = 0
    first: int | None = None
    """When the oldest message was sent that a receiver has not taken."""
    has_ended: bool = False
    """Whether there was no control segment."""
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def ring_kind(self) -> int:
        return lay.WORK_QUEUE if self.kind == lay.SERVICE else self.kind

    def read(self) -> None:
        """Look at the channel."""
        try:
            _read_control(self, self.answers.open(control_name(self.channel), stays=True))
        except FileNotFoundError:
            self.notes.append("no control segment: these are leftovers, or the channel has just ended")
            self.has_ended = True
        except (OSError, ValueError, LookupError, ArithmeticError) as error:
            self.unread.append(reason(error))
        finally:
            self.answers.close()
        if self.notes or self.unread:
            self.answers.drop()
        for member in self.members:
            queue = self.queues.get(member.index)
            if queue is not None:
                _fill(member, received=queue.received, unread=queue.unread)
        living = {member.index for member in self.members if member.alive and not member.leaving}
        living |= {group.index for group in self.groups}
        behind = [queue for index, queue in self.queues.items() if index in living]
        self.depth = max((queue.unread for queue in behind), default=0) + self.waiting.unread
        for queue in (self.waiting, *behind):
            self.first = _first(self.first, queue.first)
        self.holdings = dict(sorted(self.holdings.items(), key=_by_member))

    def info(self, infos: Files) -> ChannelInfo:
        """What was found, as of now. The channel has these files."""
        now, notes = time.monotonic_ns(), [*self.unread, *self.notes]
        main = infos.get(control_name(self.channel)[1:])
        files, nbytes, owner = [], 0, -1 if main is None else main.st_uid
        if self.has_ended:
            infos = shm.statuses(infos)  # the others may be gone by now
        for name, info in infos.items():
            if info is not None and stat.S_ISREG(info.st_mode):
                if owner not in (-1, info.st_uid):
                    notes.append(f"{shm.path_of(name)} belongs to user {info.st_uid}: not of this channel")
                    continue
                files.append(name)
                nbytes, owner = nbytes + min(info.st_size, 512 * info.st_blocks), info.st_uid  # a trace is sparse
        replies = _REPLIES.fullmatch(self.channel) if self.kind == lay.FAN_OUT else None
        return _made(
            ChannelInfo, name=self.channel, kind=_KIND.get(self.kind, "unknown"),
            service=self.channel if self.kind == lay.SERVICE else replies[1] if replies else "",
            owner=owner, nbytes=nbytes, files=shm.paths_of(files), locked=self.locked,
            members=tuple([self._member_at(now, it) for it in self.members]), holdings=self._holdings_at(now),
            held=tuple([it for sender, ring, found, used in self.held for it in found.held(sender, ring, used, now)]),
            depth=self.depth, oldest_unread=age_of(self.first, now), notes=tuple(notes), readable=not self.unread,
        )  # fmt: skip

    def _member_at(self, now: int, member: MemberInfo) -> MemberInfo:
        newest, queue = self.newest.get(member.index), self.queues.get(member.index)
        return _made(
            MemberInfo,
            **{
                **member.__dict__,
                "newest_age": 0.0 if newest is None else max(1e-9, age_of(newest, now)),
                "oldest_unread": 0.0 if queue is None else age_of(queue.first, now),
                "stopped": member.alive and self.processes.is_stopped(member.host_pid),
            },
        )

    def _holdings_at(self, now: int) -> tuple[Holding, ...]:
        looked, before = time.monotonic(), self.since
        self.since = {what: before.get(what, looked) for it in self.holdings.values() for what in it.taken}
        return tuple([
            _made(
                Holding, uid=holder.uid, pid=holder.pid, alive=holder.alive, how=holder.how, messages=it.messages,
                nbytes=it.nbytes, oldest=age_of(it.first, now),
                held=max([looked - self.since[what] for what in it.taken], default=0.0), group=holder.group,
            )
            for holder, it in self.holdings.items()
        ])  # fmt: skip

    def add(self, holder: Holder, sender: int, found: Messages, mask: Mask) -> None:
        """Add to what a holder holds; a holder without a process stands for messages that no member holds."""
        hold = _Hold(int(np.count_nonzero(mask)), int(found.nbytes.dot(mask)), found.first_sent(mask), [])
        if holder.how in _HELD:
            hold.taken = [(holder.uid, holder.pid, sender, seq) for seq in found.seq[mask].tolist()]
        before = self.holdings.get(holder)
        if before is not None:
            hold.messages, hold.nbytes = hold.messages + before.messages, hold.nbytes + before.nbytes
            hold.first, hold.taken = min(hold.first, before.first), before.taken + hold.taken
        self.holdings[holder] = hold


def _first(one: int | None, other: int | None) -> int | None:
    """The earlier of two times."""
    return min(one, other) if one is not None and other is not None else other if one is None else one


def _by_member(it: tuple[Holder, object]) -> tuple[bool, int, str, str, int]:
    holder = it[0]
    return holder.uid == 0, holder.pid, holder.group, holder.how, holder.uid


def _read_control(seen: _Look, control: Source) -> None:
    nbytes = control.nbytes
    if nbytes != Control.nbytes():
        raise WireError(f"segment {control.name} has {nbytes} bytes: another version's, damaged, or just being made")
    words = control.read_head(_FIRST_MEMBER + _MEMBER_WORDS * _FEW)
    if words[ctl.W_MAGIC] != ctl.MAGIC:
        raise WireError(f"segment {control.name} is no control segment: damaged, or just being made")
    if words[ctl.W_VERSION] != ctl.VERSION or words[ctl.W_CAPACITY] != ctl.CAPACITY:
        raise WireError(
            f"its members cannot be read: layout version {words[ctl.W_VERSION]}, this library reads {ctl.VERSION}"
        )
    if words[ctl.W_USED] > _FEW:
        words = control.read_anew(0, Control.nbytes() // 8)
    seen.kind = words[ctl.W_KIND]
    seen.locked = control.is_locked(LOCK)
    end = _FIRST_MEMBER + _MEMBER_WORDS * min(words[ctl.W_USED], ctl.CAPACITY)
    anew = control.read_anew(_FIRST_MEMBER, end - _FIRST_MEMBER)
    entries = [at for at in range(_FIRST_MEMBER, end, _MEMBER_WORDS) if words[at]]
    entries = [at for at in entries if anew[at - _FIRST_MEMBER] == words[at]]  # not just joining or leaving
    others = [at for at in entries if words[at + ctl.M_ROLE] == ctl.GROUP]
    for group in [_group(words, at) for at in others]:
        if control.is_locked(ctl.LIFE + group.index):
            seen.groups.append(group)
            seen.queues[group.index] = _Queue()
    seen.members += [_member(seen, words, at, control) for at in entries if at not in others]
    for member in seen.members:
        if member.role == "sender":
            _read_sender(seen, member)


def _label(words: memoryview, at: int) -> str:
    if not words[at + _LABEL]:
        return ""
    return ctl.label_of(words[at + _LABEL : at + _LABEL + ctl.LABEL_MAX // 8].tobytes())


def _group(words: memoryview, at: int) -> _Group:
    index = (at - _FIRST_MEMBER) // _MEMBER_WORDS
    return _Group(index, words[at], _label(words, at), words[at + ctl.M_LEAVING] != 0)


def _member(seen: _Look, words: memoryview, at: int, control: Source) -> MemberInfo:
    index = (at - _FIRST_MEMBER) // _MEMBER_WORDS
    role = _ROLE.get(words[at + ctl.M_ROLE], "unknown")
    delivery = ""
    if role == "receiver":
        latest = bool(words[at + ctl.M_FLAGS] & ctl.LATEST)
        shares = seen.ring_kind == lay.WORK_QUEUE or words[at + ctl.M_GROUP] != 0
        delivery = "one" if shares else "latest" if latest else "all"
        if delivery == "all":
            seen.queues[index] = _Queue()
    uid, pid, life = words[at], words[at + ctl.M_PID], ctl.LIFE + index
    alive = control.is_locked(life)
    processes = seen.processes
    process = processes.find(uid, pid, control.segment.info, life) if alive else Process(0, processes.known(uid).name)
    counted = words[at + _COUNTERS : at + _COUNTERS + len(COUNTERS)]
    return _made(
        MemberInfo, index=index, uid=uid, role=role, delivery=delivery, pid=pid, host_pid=process.pid,
        process=process.name, alive=alive, leaving=words[at + ctl.M_LEAVING] != 0,
        asleep=words[at + ctl.M_ASLEEP] % 2 == 1, joined=words[at + ctl.M_JOINED] / 1e9, published=0, rings=(),
        label=_label(words, at), group=_name_of(seen.groups, words[at + ctl.M_GROUP]),
        **dict(zip(COUNTERS, counted, strict=True)),
    )  # fmt: skip


def _name_of(groups: list[_Group], uid: int) -> str:
    return next((group.name for group in groups if group.uid == uid), "") if uid else ""


@dataclass
class _Sender:
    """A sender, and the contents of its sequence table."""

    member: MemberInfo
    table: Source
    shape: lay.SequenceTableShape
    published: int
    history: int
    starts: dict[int, int]
    """Member index -> first message that counts it as a recipient."""
    newest: dict[int, int]
    """Member index -> newest message that it has taken."""


def _made(kind: type[_T], /, **fields: Any) -> _T:
    """A frozen dataclass with these fields, and its defaults.

    Its own constructor sets each field by a call, of a member's 27: that was a tenth of all time here.
    """
    it = object.__new__(kind)
    object.__setattr__(it, "__dict__", fields)
    return it


def _fill(member: MemberInfo, **fields: Any) -> None:
    """Complete a member that nobody else has seen yet."""
    member.__dict__.update(fields)


def _read_sender(seen: _Look, member: MemberInfo) -> None:
    """Add the sender's rings to its info, and their messages to what is seen."""
    who = f"sender {member.uid:016x} (pid {member.pid})"
    rings: list[RingInfo] = []
    newest = None
    try:
        table = seen.answers.open(sequence_table_name(seen.channel, member.uid), stays=True)
        table.read_head(_HEAD_WORDS)
        words = table.read(0, _TABLE_WORDS)
        sender = _sender(seen, member, table, words)
        found: list[_Ring] = []
        try:
            for index in range(min(words[lay.L_RINGS], lay.MAX_RINGS)):
                try:
                    found.append(_Ring(seen, sender, index))
                except (OSError, WireError) as error:
                    seen.notes.append(f"ring {index} of {who}: {reason(error)}")
            wanted = _wanted(seen, sender, found)
            for ring in found:
                try:
                    rings.append(ring.info(wanted))
                except (OSError, WireError) as error:
                    seen.notes.append(f"ring {ring.index} of {who}: {reason(error)}")
            newest = _newest(sender, found)
        finally:
            for ring in found:
                ring.source.segment.close()
    except (OSError, WireError) as error:
        seen.notes.append(f"{who}: {reason(error)}")
        return
    for index, seq in sender.newest.items():
        if index in seen.queues:
            seen.queues[index].received += max(0, min(seq, sender.published) - (sender.starts[index] - 1))
    _fill(member, leaving=words[lay.L_CLOSED] != 0, published=sender.published, rings=tuple(rings))
    if newest is not None:
        nbytes, seen.newest[member.index] = newest
        _fill(member, newest_bytes=nbytes)


def _sender(seen: _Look, member: MemberInfo, table: Source, words: memoryview) -> _Sender:
    shape = lay.table_shape(table.name, words, member.uid)
    published = words[lay.L_PUBLISHED]
    if published >= lay.MOST_MESSAGES:
        raise WireError(f"segment {table.name} is damaged: it says that {published} messages were sent")
    starts = {}
    for peer in seen.members:
        at = lay.L_MEMBERS + 2 * peer.index
        if peer.role == "receiver" and words[at + 1] == peer.uid:
            starts[peer.index] = min(words[at], lay.MOST_MESSAGES)
    for group in seen.groups:
        at = lay.L_MEMBERS + 2 * group.index
        if words[at + 1] == group.uid:
            starts[group.index] = min(words[at], lay.MOST_MESSAGES)
    newest = {index: start - 1 for index, start in starts.items()}
    return _Sender(member, table, shape, published, min(words[lay.L_HISTORY], lay.MAX_SLOTS), starts, newest)


def _newest(sender: _Sender, rings: list[_Ring]) -> tuple[int, int] | None:
    """Bytes of the newest message, and when it was sent; None if there is none, or its record was reused at each look.

    A fast sender reuses it within microseconds: what was sent last is looked up again just before the record is read.
    """
    published, order = sender.published, sender.shape.order
    read_table, fresh = sender.table.read, False
    for _ in range(_LOOKS if published else 0):
        if fresh:
            read_table = sender.table.read_anew
            published = min(read_table(lay.L_PUBLISHED, 1)[0], lay.MOST_MESSAGES)
        entry = read_table(order + published % sender.shape.order_size, 1)[0]
        index, slot = entry >> 32, entry & 0xFFFFFFFF
        for ring in rings:
            if ring.index == index and slot < ring.shape.slots:
                read = ring.source.read_anew if fresh else ring.source.read
                record = read(lay.record_word(slot), HEAD)
                if published <= record[SEQ] <= lay.MOST_MESSAGES:  # it may hold a newer one by now
                    most = ring.shape.slots * ring.shape.slot_bytes
                    return min(record[NBYTES], most), record[SENT]
        fresh = True
    return None


def _wanted(seen: _Look, sender: _Sender, rings: list[_Ring]) -> dict[int, list[int]] | None:
    """The slots of each ring whose messages may be needed; None: any.

    Where every receiver gets every message, its words say what it has leased and what it has taken, so that only the
    records of the others have to be read.
    """
    if (
        seen.kind != lay.FAN_OUT
        or sender.history
        or seen.groups
        or any(peer.delivery == "latest" for peer in seen.members)
    ):
        return None
    found = {ring.index: ring.leased() for ring in rings}
    published, behind = sender.published, sender.published
    for peer in seen.members:
        if peer.index in sender.newest and not peer.leaving:
            behind = min(behind, sender.newest[peer.index])
    size = sender.shape.order_size
    behind = max(behind, published - size)  # entries of older messages are overwritten
    while behind < published:
        at = (behind + 1) % size
        count = min(published - behind, size - at, _CHUNK)
        for entry in sender.table.read(sender.shape.order + at, count):
            if entry >> 32 in found:
                found[entry >> 32].add(entry & 0xFFFFFFFF)
        behind += count
    return {ring.index: sorted(slot for slot in found[ring.index] if slot < ring.shape.slots) for ring in rings}


class _Ring:
    """One ring, opened, and what each receiver of a fan-out has stored about its slots."""

    def __init__(self, seen: _Look, sender: _Sender, index: int) -> None:
        self.seen, self.sender, self.index = seen, sender, index
        self.source = source = seen.answers.open(ring_name(seen.channel, sender.member.uid, index), stays=False)
        source.read_head(_HEAD_WORDS)
        head = source.read(0, lay.R_DEVICE + 1)
        self.shape = shape = lay.ring_shape(source.name, head, sender.member.uid, None, seen.ring_kind)
        nbytes = source.nbytes
        if shape.nbytes != nbytes:
            raise WireError(f"segment {source.name} has {nbytes} bytes, its header says {shape.nbytes}")
        self.rows: list[tuple[MemberInfo, Words]] = []
        self.groups: list[tuple[_Group, Words, list[tuple[MemberInfo, Words]]]] = []
        """A group's row, and those of its members, which show who has what."""
        for peer in seen.members:
            if peer.delivery == "all" and peer.index in sender.starts and peer.index < shape.capacity:
                row = self._row(peer.index)
                sender.newest[peer.index] = max(sender.newest[peer.index], int(row[row.argmax()]) >> 1)
                self.rows.append((peer, row))
        for group in seen.groups:
            if group.index in sender.starts and group.index < shape.capacity:
                mine = [peer for peer in seen.members if peer.group == group.name and peer.index < shape.capacity]
                self.groups.append((group, self._row(group.index), [(peer, self._row(peer.index)) for peer in mine]))

    def _row(self, index: int, *, anew: bool = False) -> Words:
        """The words of one recipient for all slots."""
        read = self.source.read_anew if anew else self.source.read
        return np.frombuffer(read(lay.lease_word(self.shape, index, 0), self.shape.slots), np.uint64)

    def leased(self) -> set[int]:
        """The slots that receivers say they have leased."""
        return {slot for _, row in self.rows for slot in (((row & _ODD) ^ _ODD) * row).nonzero()[0].tolist()}

    def info(self, wanted: dict[int, list[int]] | None) -> RingInfo:
        """Add the messages in wanted slots that are still needed to what is seen."""
        slots = None if wanted is None else wanted[self.index]
        shape, used_slots, used_bytes = self.shape, 0, 0
        found = None
        if slots is None or slots:
            found = Messages.read(shape, self.source, self.sender.published, slots)
        if found is not None:
            used = self._fan_out(found) if self.seen.kind == lay.FAN_OUT else self._work_queue(found)
            needed = None
            for mask, holder, _ in used:
                self.seen.add(holder, self.sender.member.uid, found, mask)
                needed = mask if needed is None else needed | mask
            if self.seen.messages:
                self.seen.held.append((self.sender.member.uid, self.index, found, used))
            if needed is not None:
                used_slots, used_bytes = int(found.span.dot(needed)), int(found.nbytes.dot(needed))
        return _made(
            RingInfo, index=self.index, slots=shape.slots, slot_bytes=shape.slot_bytes, nbytes=shape.nbytes,
            slots_used=used_slots, bytes_used=used_bytes,
        )  # fmt: skip

    def _fan_out(self, found: Messages) -> Used:
        """Which messages of a fan-out are still needed, and by whom."""
        seen, sender = self.seen, self.sender
        used: Used = []
        twice, oldest = 2 * found.seq, int(found.seq[-1])
        for peer, row in self.rows:
            word, start = row[found.slot], sender.starts[peer.index]
            leased, unread = word == twice, word < twice
            if oldest < start:
                owed = found.seq >= np.uint64(start)
                unread &= owed
                if not sender.history:
                    leased &= owed
            if np.count_nonzero(leased):
                used.append((leased, Holder(peer.uid, peer.pid, "leased", peer.alive), None))
            if not peer.leaving and np.count_nonzero(unread):
                used.append((unread, Holder(peer.uid, peer.pid, "unread", peer.alive), None))
                seen.queues[peer.index].add(found, unread)
        for group, row, members in self.groups:
            used += self._group(found, group, row[found.slot], members)
        lockers = [peer for peer in seen.members if peer.delivery == "latest" or (sender.history and peer.delivery)]
        if lockers:
            locked = self._locked(found, np.ones(len(found.seq), np.bool_))
            used += self._held_by(found, locked, lockers, "leased")
        if sender.history:
            kept = found.seq + np.uint64(sender.history) > np.uint64(sender.published)
            for mask, _, _ in used:
                kept &= ~mask
            if kept.any():
                used.append((kept, Holder(0, 0, "history", True), None))
        return used

    def _group(self, found: Messages, group: _Group, word: Words, members: list[tuple[MemberInfo, Words]]) -> Used:
        """As `_fan_out`, of one group: its word for each message is given."""
        owed = found.seq >= np.uint64(self.sender.starts[group.index])
        members = [(peer, row) for peer, row in members if peer.alive]  # what the dead have taken is for another member
        twice, peers = 2 * found.seq, [peer for peer, _ in members]
        had = (word & np.uint64(lay.LEASE) == twice) & (word >> np.uint64(lay.ATTEMPT_SHIFT) != lay.GROUP_DONE)
        for _, row in members:
            had &= row[found.slot] != twice
        locked = self._locked(found, had & owed, group.index + 1 << lay.GROUP_LOCK_SHIFT)
        holders = self._held_by(found, locked, peers, "claimed", group.index + 1 << lay.GROUP_LOCK_SHIFT)
        # after the locks: a message that was finished meanwhile is not taken for one that nobody holds
        word = self._row(group.index, anew=True)[found.slot]
        lease, attempts = word & np.uint64(lay.LEASE), word >> np.uint64(lay.ATTEMPT_SHIFT)
        taken, done = (lease == twice) & owed, attempts == lay.GROUP_DONE
        attempts = np.where(taken, np.where(done, np.uint64(1), attempts), np.uint64(0))
        left = (lease <= twice) & owed & ~(taken & done)
        used: Used = []
        for peer, row in members:
            mine = taken & (row[found.slot] == twice)
            for how, mask in (("claimed", mine & ~done), ("done", mine & done)):
                if mask.any():
                    used.append((mask, Holder(peer.uid, peer.pid, how, peer.alive), attempts))
            left &= ~mine
        used += [(mask & left, holder, attempts) for mask, holder, _ in holders if (mask & left).any()]
        left &= ~locked
        abandoned = left & had & taken
        waiting = left & ~abandoned
        for how, mask in (("abandoned", abandoned), ("waiting", waiting)):
            if mask.any() and not group.leaving:
                used.append((mask, Holder(0, 0, how, True, group.name), attempts))
        if left.any() and not group.leaving:
            self.seen.queues[group.index].add(found, left)
        return used

    def _work_queue(self, found: Messages) -> Used:
        """Which messages of a work queue are still needed, and by whom."""
        seen, states = self.seen, self._states(found)
        claimed = states[:, lay.CLAIMED] == found.seq
        locked = self._locked(found, states[:, lay.RELEASED] != found.seq)
        consumers = [peer for peer in seen.members if peer.role == "receiver"]
        holders = self._held_by(found, locked, consumers, "claimed")
        # after the locks: a message that was finished meanwhile is not taken for one that nobody holds
        states = self._states(found, anew=True)
        newest = states[:, [lay.CLAIMED, lay.DONE, lay.RELEASED]].max(axis=1)  # of a later message in the same slot
        pending = (states[:, lay.RELEASED] != found.seq) & (newest <= found.seq)
        done = states[:, lay.DONE] == found.seq
        counts = states[:, lay.ATTEMPT]
        attempts = np.where(counts >> np.uint64(8) == found.seq, counts & np.uint64(0xFF), np.uint64(0))
        used: Used = [
            (whose, replace(holder, how=how), attempts)
            for how, which in (("done", pending & done), ("claimed", pending & ~done))
            for mask, holder, _ in holders
            if (whose := mask & which).any()
        ]
        free = pending & ~locked & ~done  # done and not locked: its consumer died, the producer reuses the slot
        abandoned = free & claimed & (states[:, lay.CLAIMED] == found.seq)
        for how, mask in (("waiting", free & ~abandoned), ("abandoned", abandoned)):
            if mask.any():
                used.append((mask, Holder(0, 0, how, True), attempts))
        if free.any():
            seen.waiting.add(found, free)
        return used

    def _states(self, found: Messages, *, anew: bool = False) -> Words:
        """The state words of the slots of these messages."""
        read = self.source.read_anew if anew else self.source.read
        words = np.frombuffer(read(self.shape.state, lay.STATE_WORDS * self.shape.slots), np.uint64)
        states: Words = words.reshape(-1, lay.STATE_WORDS)[found.slot]
        return states

    def _locked(self, found: Messages, mask: Mask, base: int = 0) -> Mask:
        """Which of these messages are locked by any process, by the byte `base` plus their number. Few are, so ranges
        are tried."""
        result, numbers = np.zeros(len(mask), np.bool_), mask.nonzero()[0].tolist()
        seqs = found.seq[mask].tolist()
        todo = [(0, len(seqs))]
        while todo:
            begin, end = todo.pop()
            if begin == end or not self.sender.table.is_locked(base + seqs[end - 1], seqs[begin] - seqs[end - 1] + 1):
                continue
            if begin + 1 == end:
                result[numbers[begin]] = True
            else:
                middle = (begin + end) // 2
                todo += [(begin, middle), (middle, end)]
        return result

    def _held_by(self, found: Messages, locked: Mask, peers: list[MemberInfo], how: str, base: int = 0) -> Used:
        """Who of the peers holds the locks on these messages, as far as `/proc/<pid>/fdinfo` may be read."""
        masks: dict[Holder, Mask] = {}
        numbers = locked.nonzero()[0].tolist()
        candidates: list[tuple[Holder, Ranges]] = []
        if numbers:
            self.seen.answers.drop()  # who holds them, `/proc` says
        for pid, host_pid in sorted({(peer.pid, peer.host_pid) for peer in peers if peer.alive}) if numbers else ():
            uids = [peer.uid for peer in peers if peer.pid == pid and peer.alive]
            ranges = self.seen.processes.locked(host_pid, self.sender.table.segment.info)
            candidates.append((Holder(uids[0] if len(uids) == 1 else 0, pid, how, True), ranges))
        for number in numbers:
            byte = base + int(found.seq[number])
            for holder in [who for who, ranges in candidates if covers(ranges, byte)] or [Holder(0, 0, how, True)]:
                masks.setdefault(holder, np.zeros(len(found.seq), np.bool_))[number] = True
        return [(mask, holder, None) for holder, mask in masks.items()]
