"""Inspect channels from outside: their members, the messages in their rings, and who holds them. Never joins or writes.

Segments are read with `pread`, not mapped: one that is removed or truncated meanwhile gives a note, not a SIGBUS.
Nothing is locked either: the numbers may be from slightly different moments, but each was true at one of them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import WireError
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..ring import layout as lay
from ..wire.record import SIZE, unpack_head
from . import control as ctl
from .control import Control
from .control_lock import LOCK
from .names import control_name, parse_file, ring_name, sequence_table_name

_CHUNK = 4096
_KIND = {lay.FAN_OUT: "fan-out", lay.WORK_QUEUE: "work queue", lay.SERVICE: "service"}


@dataclass(frozen=True)
class RingView:
    """One ring of a sender."""

    index: int
    slots: int
    slot_bytes: int
    nbytes: int
    """Shared memory of the whole ring, bytes."""
    slots_used: int
    """Slots whose message is still needed."""
    bytes_used: int
    """Payload bytes in them."""


@dataclass(frozen=True)
class MemberView:
    """One entry of the membership table."""

    index: int
    uid: int
    role: str
    """`"sender"` or `"receiver"`."""
    delivery: str
    """`"all"` or `"latest"` of a subscriber, `"one"` of a consumer, `""` of a sender."""
    pid: int
    """In its own pid namespace."""
    alive: bool
    """Whether its life lock is held."""
    leaving: bool
    """A receiver that is closed and has living views; a sender that is closed and not yet drained."""
    asleep: bool
    joined: float
    """Unix time, seconds."""
    published: int
    """A sender's newest sequence number."""
    rings: tuple[RingView, ...]


@dataclass(frozen=True)
class Holder:
    """A member that still needs a message. `uid`, and perhaps `pid`, are 0 if only a lock shows that there is one."""

    uid: int
    pid: int
    how: str
    """`"leased"`: it has views; `"unread"`: it will read it; `"claimed"`: it works on it; `"done"`: it is finished."""
    alive: bool


@dataclass(frozen=True)
class HeldMessage:
    """A message whose slots are not free."""

    sender: int
    ring: int
    slot: int
    span: int
    seq: int
    nbytes: int
    age: float
    """Seconds since it was sent."""
    state: str
    """Fan-out: `"leased"`, `"unread"`, `"history"`; work queue: `"waiting"`, `"claimed"`, `"done"`, `"abandoned"`."""
    attempt: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class ChannelView:
    """The state of one channel."""

    name: str
    kind: str
    owner: int
    """User id of its files; -1 if they are gone."""
    nbytes: int
    """All its files together."""
    files: tuple[str, ...]
    locked: bool
    """Whether the channel's lock was held at that moment: normal for microseconds."""
    members: tuple[MemberView, ...]
    held: tuple[HeldMessage, ...]
    notes: tuple[str, ...]
    """What could not be read, and why."""
    readable: bool = True
    """Whether its members could be read."""

    @property
    def living(self) -> int:
        """How many of the members that could be read live."""
        return sum(member.alive for member in self.members)


@dataclass
class _Look:
    """The results of one inspection so far."""

    channel: str
    kind: int = 0
    locked: bool = False
    members: list[MemberView] = field(default_factory=list)
    held: list[HeldMessage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def ring_kind(self) -> int:
        return lay.WORK_QUEUE if self.kind == lay.SERVICE else self.kind


def view_of(channel: str) -> ChannelView:
    """A snapshot of one channel. What cannot be read becomes a note in it."""
    seen = _Look(channel)
    main = shm.status(control_name(channel))
    try:
        with shm.look_at(control_name(channel)) as segment:
            _read_control(seen, segment)
    except FileNotFoundError:
        seen.notes.append("no control segment: these are leftovers, or the channel has just ended")
    except (OSError, ValueError) as error:
        seen.unread.append(str(error))
    files, nbytes, owner = [], 0, -1 if main is None else main.st_uid
    for name in sorted(shm.listing()):
        found, info = parse_file(name), shm.status("/" + name)
        if found and found[0] == channel and info is not None and stat.S_ISREG(info.st_mode):
            if owner not in (-1, info.st_uid):
                seen.notes.append(f"{shm.SHM_DIR}/{name} belongs to user {info.st_uid}: not of this channel")
                continue
            files.append(f"{shm.SHM_DIR}/{name}")
            nbytes, owner = nbytes + info.st_size, info.st_uid
    return ChannelView(
        channel, _KIND.get(seen.kind, "unknown"), owner, nbytes, tuple(files), seen.locked, tuple(seen.members),
        tuple(seen.held), (*seen.unread, *seen.notes), not seen.unread,
    )  # fmt: skip


def _read_control(seen: _Look, segment: shm.Segment) -> None:
    if segment.nbytes != Control.nbytes():
        raise WireError(
            f"segment {segment.name} has {segment.nbytes} bytes: another version's, damaged, or just being made"
        )
    first = segment.read(0, Control.nbytes() // 8)
    words = segment.read(0, Control.nbytes() // 8)
    if words[ctl.W_MAGIC] != ctl.MAGIC:
        raise WireError(f"segment {segment.name} is no control segment: damaged, or just being made")
    if words[ctl.W_VERSION] != ctl.VERSION or words[ctl.W_CAPACITY] != ctl.CAPACITY:
        raise WireError(
            f"its members cannot be read: layout version {words[ctl.W_VERSION]}, this library reads {ctl.VERSION}"
        )
    seen.kind = words[ctl.W_KIND]
    locks = segment.locks()
    try:
        seen.locked = locks.held_by_other(LOCK)
        for index in range(ctl.CAPACITY):
            at = ctl.base(index)
            if words[at] and words[at] == first[at]:  # not just joining or leaving
                seen.members.append(_member(seen, index, words, at, locks))
    finally:
        locks.close()
    for number, member in enumerate(seen.members):
        if member.role == "sender":
            seen.members[number] = _read_sender(seen, member)


def _member(seen: _Look, index: int, words: memoryview, at: int, locks: LockFile) -> MemberView:
    role = {ctl.SENDER: "sender", ctl.RECEIVER: "receiver"}.get(words[at + ctl.M_ROLE], "unknown")
    delivery = ""
    if role == "receiver":
        latest = bool(words[at + ctl.M_FLAGS] & ctl.LATEST)
        delivery = "one" if seen.ring_kind == lay.WORK_QUEUE else "latest" if latest else "all"
    return MemberView(
        index, words[at], role, delivery, words[at + ctl.M_PID], locks.held_by_other(ctl.LIFE + index),
        words[at + ctl.M_LEAVING] != 0, words[at + ctl.M_ASLEEP] % 2 == 1, words[at + ctl.M_JOINED] / 1e9, 0, (),
    )  # fmt: skip


@dataclass(frozen=True)
class _Sender:
    """The contents of a sender's sequence table."""

    member: MemberView
    published: int
    history: int
    starts: dict[int, int]
    """Member index -> first message that counts it as a recipient."""
    locks: LockFile
    info: os.stat_result


def _read_sender(seen: _Look, member: MemberView) -> MemberView:
    """The sender's view with its rings; their messages are appended to `seen.held`."""
    who = f"sender {member.uid:016x} (pid {member.pid})"
    try:
        with shm.look_at(sequence_table_name(seen.channel, member.uid)) as segment:
            source = segment
            head = source.read(0, lay.L_MEMBERS)
            if head[lay.L_MAGIC] != lay.SEQUENCE_TABLE_MAGIC or head[lay.L_UID] != member.uid:
                raise WireError(f"segment {segment.name} is not its sequence table")
            lay.check_version(f"sequences {segment.name}", head[lay.L_VERSION])
            rows = source.read(lay.L_MEMBERS, 2 * ctl.CAPACITY)
            starts = {
                peer.index: rows[2 * peer.index]
                for peer in seen.members
                if peer.role == "receiver" and rows[2 * peer.index + 1] == peer.uid
            }
            locks = segment.locks()
            try:
                sender = _Sender(
                    member, head[lay.L_PUBLISHED], head[lay.L_HISTORY], starts, locks, os.fstat(segment.fd)
                )
                rings = []
                for index in range(min(head[lay.L_RINGS], lay.MAX_RINGS)):
                    try:
                        rings.append(_read_ring(seen, sender, index))
                    except (OSError, WireError) as error:
                        seen.notes.append(f"ring {index} of {who}: {error}")
            finally:
                locks.close()
    except (OSError, WireError) as error:
        seen.notes.append(f"{who}: {error}")
        return member
    return MemberView(
        member.index, member.uid, member.role, "", member.pid, member.alive, head[lay.L_CLOSED] != 0, member.asleep,
        member.joined, head[lay.L_PUBLISHED], tuple(rings),
    )  # fmt: skip


def _read_ring(seen: _Look, sender: _Sender, index: int) -> RingView:
    with shm.look_at(ring_name(seen.channel, sender.member.uid, index)) as segment:
        source = segment
        head = source.read(0, lay.R_DEVICE + 1)
        expected = [lay.RING_MAGIC, sender.member.uid, seen.ring_kind]
        if [head[lay.R_MAGIC], head[lay.R_UID], head[lay.R_KIND]] != expected:
            raise WireError(f"segment {segment.name} is not ring {index} of its sender")
        lay.check_version(f"ring {segment.name}", head[lay.R_VERSION])
        shape = lay.RingShape(
            seen.ring_kind, head[lay.R_SLOTS], head[lay.R_SLOT_BYTES], head[lay.R_CAPACITY], head[lay.R_DEVICE] == 1
        )
        if shape.nbytes != segment.nbytes:
            raise WireError(f"segment {segment.name} has {segment.nbytes} bytes, its header says {shape.nbytes}")
        slots = used = 0
        for message in _held(seen, sender, index, shape, source):
            seen.held.append(message)
            slots, used = slots + message.span, used + message.nbytes
    return RingView(index, shape.slots, shape.slot_bytes, shape.nbytes, slots, used)


def _held(seen: _Look, sender: _Sender, index: int, shape: lay.RingShape, source: shm.Segment) -> Iterator[HeldMessage]:
    """Every message in a ring that is still needed, newest first."""
    now = time.monotonic_ns()
    found = []
    for start in range(0, shape.slots, _CHUNK):
        count = min(_CHUNK, shape.slots - start)
        records = source.read(lay.R_RECORDS + start * lay.RECORD_WORDS, count * lay.RECORD_WORDS)
        for slot in range(count):
            if records[slot * lay.RECORD_WORDS]:
                seq, sent_ns, _, _, _, _, span, _, _, nbytes = unpack_head(records.cast("B"), slot * SIZE)
                found.append((seq, start + slot, span, sent_ns, nbytes))
    judge = (
        _FanOut(seen, sender, shape, source) if seen.kind == lay.FAN_OUT else _WorkQueue(seen, sender, shape, source)
    )
    covered = bytearray(shape.slots)  # by a newer message: a record inside its span is stale
    for seq, slot, span, sent_ns, nbytes in sorted(found, reverse=True):
        if covered[slot] or seq > sender.published:
            continue
        span = max(1, min(span, shape.slots - slot))
        covered[slot : slot + span] = b"\1" * span
        verdict = judge(seq, slot)
        if verdict is not None:
            state, attempt, holders = verdict
            age = max(0.0, (now - sent_ns) / 1e9)
            yield HeldMessage(sender.member.uid, index, slot, span, seq, nbytes, age, state, attempt, holders)


class _FanOut:
    """State, attempt and holders of message `seq` in `slot` of a fan-out ring; None if it is no longer needed."""

    def __init__(self, seen: _Look, sender: _Sender, shape: lay.RingShape, source: shm.Segment) -> None:
        self.sender = sender
        self.rows = [
            (peer, sender.starts[peer.index], source.read(shape.state + peer.index * shape.row, shape.slots))
            for peer in seen.members
            if peer.delivery == "all" and peer.index in sender.starts
        ]
        self.lockers = [
            peer for peer in seen.members if peer.delivery == "latest" or (sender.history and peer.delivery)
        ]

    def __call__(self, seq: int, slot: int) -> tuple[str, int, tuple[Holder, ...]] | None:
        holders = []
        for peer, start, row in self.rows:
            word = row[slot]
            if word == 2 * seq:
                holders.append(Holder(peer.uid, peer.pid, "leased", peer.alive))
            elif word < 2 * seq and start <= seq and not peer.leaving:
                holders.append(Holder(peer.uid, peer.pid, "unread", peer.alive))
        if self.lockers and self.sender.locks.held_by_other(seq):
            holders += _lock_holders(self.sender.info, self.lockers, seq, "leased")
        if holders:
            state = "leased" if any(holder.how == "leased" for holder in holders) else "unread"
            return state, 1, tuple(holders)
        if seq > self.sender.published - self.sender.history:
            return "history", 1, ()
        return None


class _WorkQueue:
    """State, attempt and holders of message `seq` in `slot` of a work queue's ring; None if it is no longer needed."""

    def __init__(self, seen: _Look, sender: _Sender, shape: lay.RingShape, source: shm.Segment) -> None:
        self.sender = sender
        self.states = source.read(shape.state, 8 * shape.slots)
        self.consumers = [peer for peer in seen.members if peer.role == "receiver"]

    def __call__(self, seq: int, slot: int) -> tuple[str, int, tuple[Holder, ...]] | None:
        words = self.states[8 * slot : 8 * slot + 4]
        attempts = words[lay.ATTEMPT]
        attempt = attempts & 0xFF if attempts >> 8 == seq else 0
        if words[lay.RELEASED] == seq:
            return None
        done, locked = words[lay.DONE] == seq, self.sender.locks.held_by_other(seq)
        if locked:
            how = "done" if done else "claimed"
            return how, attempt, tuple(_lock_holders(self.sender.info, self.consumers, seq, how))
        if done:
            return None  # its consumer died after finishing it: the producer reuses the slot when it needs it
        return ("abandoned" if words[lay.CLAIMED] == seq else "waiting"), attempt, ()


def _lock_holders(sequences: os.stat_result, peers: list[MemberView], byte: int, how: str) -> list[Holder]:
    """The peers whose processes hold a lock on a byte of a file, as far as `/proc/<pid>/fdinfo` may be read."""
    found = []
    for pid in sorted({peer.pid for peer in peers if peer.alive}):
        if byte in _locked_bytes(sequences, pid):
            uids = [peer.uid for peer in peers if peer.pid == pid and peer.alive]
            found.append(Holder(uids[0] if len(uids) == 1 else 0, pid, how, True))
    return found or [Holder(0, 0, how, True)]


def _locked_bytes(sequences: os.stat_result, pid: int) -> set[int]:
    locked: set[int] = set()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), sequences):
                    with open(f"/proc/{pid}/fdinfo/{fd}") as lines:
                        for parts in (line.split() for line in lines if line.startswith("lock:")):
                            if parts[2] == "OFDLCK":
                                locked.update(range(int(parts[-2]), min(int(parts[-1]), int(parts[-2]) + _CHUNK) + 1))
    return locked
