"""The messages in the rings of a channel's senders, and who holds which, as seen by a process that is not a member."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..memory import segment as shm
from ..options import reason
from ..ring import layout as lay
from . import control as ctl
from .info import HeldMessage, Holder, RingInfo, made
from .names import ring_name, sequence_table_name
from .processes import Processes, Ranges, covers
from .reads import Reads, Source

_CHUNK: Final = 4096
FEW: Final = 32
"""The most messages that are examined one by one: NumPy takes as long for one as for these."""
_LOOKS: Final = 8
"""How often the newest message of a sender is searched for."""
_HEAD_WORDS: Final = 3 * shm.PAGE // 8
"""Words of a sequence table or ring that are read at once. More is read if there are many slots or members."""
_TABLE_WORDS: Final = lay.L_MEMBERS + 2 * ctl.CAPACITY
_ODD: Final = np.uint64(1)
_HELD: Final = ("leased", "claimed", "done")
"""`how` of messages that a member has taken."""
_NOBODY: Final = ("waiting", "abandoned", "history")
"""`how` of messages that no member holds."""
# word indices in a record (of `_SPAN`, the upper half), and how many words of it are read
_SEQ, _SENT, _SPAN, _NBYTES, _HEAD = 0, 1, 3, 5, 6
_RECORD: Final = struct.Struct("=2Q8xQ8xQ")
"""The same four words."""
_Words = np.ndarray[Any, np.dtype[np.uint64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]
Taken = tuple[int, int, int, int]
"""uid and pid of a holder, uid of a sender, number of a message."""


@dataclass(frozen=True)
class Peer:
    """A member, as far as it matters to what a sender has sent."""

    index: int
    uid: int
    role: str
    delivery: str
    group: str
    pid: int
    host_pid: int
    alive: bool
    leaving: bool


@dataclass(frozen=True)
class Group:
    """A group of subscribers that has living members."""

    index: int
    uid: int
    name: str
    leaving: bool


class Peers(NamedTuple):
    """The members and groups of a channel, and its kind."""

    kind: int
    members: tuple[Peer, ...]
    groups: tuple[Group, ...]


class Held(NamedTuple):
    """What a holder holds in one way."""

    holder: Holder
    messages: int
    nbytes: int
    first: int
    """When the oldest of them was sent, on CLOCK_MONOTONIC, in nanoseconds."""
    taken: list[Taken]
    """Those that it has taken."""

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(
            self.holder, self.messages + other.messages, self.nbytes + other.nbytes, min(self.first, other.first),
            self.taken + other.taken,
        )  # fmt: skip


ANYBODY: Final = -1
"""In place of the index of a receiver: any consumer of a work queue."""


Message = tuple[int, int, int, int, int]
"""A message in a ring: number, first slot, how many slots, bytes, and when it was sent, as `Held.first`."""


class Sent:
    """What one sender has sent, and who still needs it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.fields: dict[str, Any] = {}
        """The fields of its `MemberInfo` that can be told from that."""
        self.newest: int | None = None
        """When its newest message was sent; None if there is none that is known."""
        self.received: dict[int, int] = {}
        """By the index of a member or group that gets every message: how many it has taken."""
        self.unread: list[tuple[int, Held]] = []
        """For each ring, the index of a member or group, or `ANYBODY`, and the messages that it has not taken."""
        self.holdings: list[Held] = []
        """For each ring."""
        self.held: list[HeldMessages] = []
        """If each message is wanted."""
        self.notes: list[str] = []

    def add(self, holder: Holder, seqs: Sequence[int], nbytes: int, first: int, queue: int | None) -> None:
        """Add what a holder still needs; a holder without a process stands for messages that no member holds.

        queue: the receiver, or group, that has not taken them
        """
        taken = [(holder.uid, holder.pid, self.uid, seq) for seq in seqs] if holder.how in _HELD else []
        held = Held(holder, len(seqs), nbytes, first, taken)
        self.holdings.append(held)
        if queue is not None:
            self.unread.append((queue, held))


@dataclass
class HeldMessages:
    """The messages of a ring that are held."""

    sender: int
    """Its uid."""
    ring: int
    by: list[tuple[Message, Holder, int]]
    """And how often each was delivered."""

    def as_of(self, now: int) -> list[HeldMessage]:
        """Each of them, newest first."""
        holders: dict[Message, list[Holder]] = {}
        attempts: dict[int, int] = {}
        for message, holder, attempt in self.by:
            holders.setdefault(message, []).append(holder)
            attempts[message[0]] = attempt
        return [
            HeldMessage(
                self.sender, self.ring, slot, span, seq, nbytes, age_of(sent, now), _state(by),
                attempts[seq], tuple(one for one in by if one.group or one.how not in _NOBODY),
            )
            for (seq, slot, span, nbytes, sent), by in sorted(holders.items(), key=itemgetter(0), reverse=True)
        ]  # fmt: skip


def _state(holders: list[Holder]) -> str:
    hows = [holder.how for holder in holders]
    return next((how for how in ("leased", "unread") if how in hows), hows[0])


def age_of(sent: int | None, now: int) -> float:
    """Seconds since a message was sent; both on CLOCK_MONOTONIC, in nanoseconds. 0 if there is none."""
    return 0.0 if sent is None or sent > now else (now - sent) / 1e9


@dataclass
class _Messages:
    """The published messages of a ring, newest first. One array for each of their properties."""

    seq: Any
    slot: Any
    span: Any
    nbytes: Any
    sent: Any

    @classmethod
    def read(cls, shape: lay.RingShape, source: Source, published: int) -> _Messages | None:
        """Read all of them; None if there are none."""
        records = np.empty((shape.slots, _HEAD), np.uint64)
        for start in range(0, shape.slots, _CHUNK):
            count = min(_CHUNK, shape.slots - start)
            words = source.read(lay.record_word(start), lay.RECORD_WORDS * count)
            part = np.frombuffer(words, np.uint64).reshape(-1, lay.RECORD_WORDS)
            records[start : start + count] = part[:, :_HEAD]
        seq = records[:, _SEQ]
        slots = (seq - 1 < np.uint64(published)).nonzero()[0]  # 0, of one that is being written, wraps around
        if not len(slots):
            return None
        slots = slots[np.argsort(seq[slots])[::-1]]
        records = records[slots]
        span = np.maximum(records[:, _SPAN] >> 32, 1).astype(np.int64)
        if np.count_nonzero(span > 1):
            span = np.minimum(span, shape.slots - slots)
            keep = _uncovered(shape.slots, slots.tolist(), span.tolist())
            records, slots, span = records[keep], slots[keep], span[keep]
        nbytes = np.minimum(records[:, _NBYTES], shape.slots * shape.slot_bytes).astype(np.int64)
        return cls(records[:, _SEQ], slots, span, nbytes, records[:, _SENT])

    def each(self, which: _Mask) -> list[Message]:
        """These, one by one."""
        columns = [it[which].tolist() for it in (self.seq, self.slot, self.span, self.nbytes, self.sent)]
        return list(zip(*columns, strict=True))


def _uncovered(count: int, slots: list[int], spans: list[int]) -> list[int]:
    """Which of these messages, newest first, are not covered by a newer one: a record inside its span is stale."""
    covered = bytearray(count)
    keep = []
    for number, (first, length) in enumerate(zip(slots, spans, strict=True)):
        if not covered[first]:
            covered[first : first + length] = b"\1" * length
            keep.append(number)
    return keep


class _Use(NamedTuple):
    """One holder of some messages of a ring, and how it holds them."""

    which: _Mask
    holder: Holder
    attempts: _Words | None = None
    """How often each was delivered; None: once."""
    queue: int | None = None
    """The index of the receiver, or group, that has not taken them."""


class SenderReader:
    """Reads what the senders of a channel have sent."""

    def __init__(self, channel: str, processes: Processes, messages: bool) -> None:
        self.channel, self.processes, self.messages = channel, processes, messages

    def read(self, reads: Reads, peers: Peers, me: Peer) -> Sent:
        """What one of these members has sent. What cannot be read becomes a note."""
        sent = Sent(me.uid)
        try:
            sender = _Sender(self, reads, peers, sent)
            found: list[_Ring] = []
            infos: list[RingInfo] = []
            for index in range(sender.rings):
                try:
                    found.append(_Ring(sender, index))
                except (OSError, WireError) as error:
                    sent.notes.append(f"ring {index} of {_name_of(me)}: {reason(error)}")
            wanted = _wanted(sender, found)
            for ring in found:
                try:
                    infos.append(ring.info(wanted))
                except (OSError, WireError) as error:
                    sent.notes.append(f"ring {ring.index} of {_name_of(me)}: {reason(error)}")
            newest_bytes, sent.newest = _newest(sender, found)
            for index, seq in sender.newest.items():
                sent.received[index] = max(0, min(seq, sender.published) - (sender.starts[index] - 1))
            sent.fields = {
                "published": sender.published, "leaving": sender.closed, "rings": tuple(infos),
                "newest_bytes": newest_bytes,
            }  # fmt: skip
        except (OSError, WireError) as error:
            sent.notes.append(f"{_name_of(me)}: {reason(error)}")
        if sent.notes:
            reads.drop()
        return sent


def _name_of(sender: Peer) -> str:
    return f"sender {sender.uid:016x} (pid {sender.pid})"


class _Sender:
    """A sender, and the contents of its sequence table."""

    def __init__(self, reader: SenderReader, reads: Reads, peers: Peers, sent: Sent) -> None:
        self.reader, self.reads, self.peers, self.sent, self.uid = reader, reads, peers, sent, sent.uid
        self.table = table = reads.open(sequence_table_name(reader.channel, self.uid), stays=True)
        table.read_head(_HEAD_WORDS)
        words = table.read(0, _TABLE_WORDS)
        self.shape = lay.table_shape(table.name, words, self.uid)
        self.published = words[lay.L_PUBLISHED]
        if self.published >= lay.MOST_MESSAGES:
            raise WireError(f"segment {table.name} is damaged: it says that {self.published} messages were sent")
        self.history = min(words[lay.L_HISTORY], lay.MAX_SLOTS)
        self.closed, self.rings = words[lay.L_CLOSED] != 0, min(words[lay.L_RINGS], lay.MAX_RINGS)
        self.starts: dict[int, int] = {}
        """Index of a receiver or group -> first message that counts it as a recipient."""
        self.newest: dict[int, int] = {}
        """The same index -> newest message that it has taken."""
        recipients: list[Peer | Group] = [it for it in peers.members if it.role == "receiver"]
        for it in (*recipients, *peers.groups):
            at = lay.L_MEMBERS + 2 * it.index
            if words[at + 1] == it.uid:
                start = self.starts[it.index] = min(words[at], lay.MOST_MESSAGES)
                self.newest[it.index] = start - 1


def _newest(sender: _Sender, rings: list[_Ring]) -> tuple[int, int | None]:
    """Bytes of the newest message, and when it was sent; 0 and None if there is none, or its record was reused at each
    look.

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
                record = read(lay.record_word(slot), _HEAD)
                if published <= record[_SEQ] <= lay.MOST_MESSAGES:  # it may hold a newer one by now
                    most = ring.shape.slots * ring.shape.slot_bytes
                    return min(record[_NBYTES], most), record[_SENT]
        fresh = True
    return 0, None


def _wanted(sender: _Sender, rings: list[_Ring]) -> dict[int, set[int]] | None:
    """The slots of each ring whose messages may be needed; None: any, or many.

    Where every receiver gets every message, its words say what it has leased and what it has taken, so that only the
    records of the others have to be read.
    """
    peers = sender.peers
    if peers.kind != lay.FAN_OUT or sender.history or peers.groups:
        return None
    behind = sender.published
    for peer in peers.members:
        if peer.delivery == "latest":
            return None
        if peer.index in sender.newest and not peer.leaving:
            behind = min(behind, sender.newest[peer.index])
    size = sender.shape.order_size
    behind = max(behind, sender.published - size)  # entries of older messages are overwritten
    if sender.published - behind > FEW:
        return None
    found: dict[int, set[int]] = {}
    for ring in rings:
        found[ring.index] = ring.leased
    while behind < sender.published:
        at = (behind + 1) % size
        count = min(sender.published - behind, size - at)
        for entry in sender.table.read(sender.shape.order + at, count):
            if entry >> 32 in found:
                found[entry >> 32].add(entry & 0xFFFFFFFF)
        behind += count
    return found if sum(map(len, found.values())) <= FEW else None


def _taken(row: memoryview) -> tuple[int, list[int]]:
    """By a receiver's words for all slots: the newest message that it has taken, and the slots that it has leased."""
    if len(row) <= FEW:
        words = row.tolist()
        return max(words) >> 1, [slot for slot, word in enumerate(words) if word and not word & 1]
    found = np.frombuffer(row, np.uint64)
    return row[found.argmax()] >> 1, (((found & _ODD) ^ _ODD) * found).nonzero()[0].tolist()


class _Ring:
    """One ring, opened, and what each receiver of a fan-out has stored about its slots."""

    def __init__(self, sender: _Sender, index: int) -> None:
        self.sender, self.index = sender, index
        peers = sender.peers
        name = ring_name(sender.reader.channel, sender.uid, index)
        self.source = source = sender.reads.open(name, stays=False)
        source.read_head(_HEAD_WORDS)
        head = source.read(0, lay.R_DEVICE + 1)
        self.shape = shape = lay.ring_shape(name, head, sender.uid, None, ctl.ring_kind(peers.kind))
        nbytes = source.nbytes
        if shape.nbytes != nbytes:
            raise WireError(f"segment {name} has {nbytes} bytes, its header says {shape.nbytes}")
        self.rows: list[tuple[Peer, memoryview]] = []
        self.leased: set[int] = set()
        """The slots that receivers say they have leased."""
        self.groups: list[tuple[Group, _Words, list[tuple[Peer, _Words]]]] = []
        """A group's row, and those of its members, which show who has what."""
        for peer in peers.members:
            if peer.delivery == "all" and peer.index in sender.starts and peer.index < shape.capacity:
                row = source.read(lay.lease_word(shape, peer.index, 0), shape.slots)
                newest, leased = _taken(row)
                sender.newest[peer.index] = max(sender.newest[peer.index], newest)
                self.leased.update(leased)
                self.rows.append((peer, row))
        for group in peers.groups:
            if group.index in sender.starts and group.index < shape.capacity:
                mine = [peer for peer in peers.members if peer.group == group.name and peer.index < shape.capacity]
                self.groups.append((group, self._row(group.index), [(peer, self._row(peer.index)) for peer in mine]))

    def _row(self, index: int, *, anew: bool = False) -> _Words:
        """The words of one recipient for all slots."""
        read = self.source.read_anew if anew else self.source.read
        return np.frombuffer(read(lay.lease_word(self.shape, index, 0), self.shape.slots), np.uint64)

    def info(self, wanted: dict[int, set[int]] | None) -> RingInfo:
        """Add the messages that are still needed, which are in wanted slots, to what the sender has sent."""
        shape = self.shape
        slots, nbytes = self._add_all() if wanted is None else self._add_few(wanted[self.index])
        return made(
            RingInfo,
            {
                "index": self.index, "slots": shape.slots, "slot_bytes": shape.slot_bytes, "nbytes": shape.nbytes,
                "slots_used": slots, "bytes_used": nbytes,
            },
        )  # fmt: skip

    def _add_few(self, wanted: set[int]) -> tuple[int, int]:
        """Add what is needed of few messages, which all receivers get. Returns the slots and bytes of these."""
        sender, slots = self.sender, self.shape.slots
        published, most = sender.published, slots * self.shape.slot_bytes
        found: list[Message] = []
        are_wide = False
        records = self.source.unpack(_RECORD, lay.R_RECORDS, lay.RECORD_WORDS, wanted)
        for slot, (seq, sent, span, nbytes) in zip(wanted, records, strict=True):
            if 0 < seq <= published:
                span = span >> 32 or 1
                are_wide |= span > 1
                found.append((seq, slot, span, nbytes if nbytes < most else most, sent))
        if are_wide:
            found.sort(reverse=True)
            found = [(seq, slot, min(span, slots - slot), nbytes, sent) for seq, slot, span, nbytes, sent in found]
            keep = _uncovered(slots, [it[1] for it in found], [it[2] for it in found])
            found = [found[number] for number in keep]
        needed: set[Message] = set()
        by: list[tuple[Message, Holder, int]] = []
        for peer, row in self.rows:
            start = sender.starts[peer.index]
            leased: list[Message] = []
            unread: list[Message] = []
            for it in found:
                word, twice = row[it[1]], 2 * it[0]
                if word <= twice and it[0] >= start:
                    (leased if word == twice else unread).append(it)
            for how, these in (("leased", leased), ("unread", [] if peer.leaving else unread)):
                if these:
                    holder = made(
                        Holder, {"uid": peer.uid, "pid": peer.pid, "how": how, "alive": peer.alive, "group": ""}
                    )
                    seqs, _, _, sizes, when = zip(*these, strict=True)
                    sender.sent.add(holder, seqs, sum(sizes), min(when), peer.index if how == "unread" else None)
                    needed.update(these)
                    if sender.reader.messages:
                        by += [(it, holder, 1) for it in these]
        if sender.reader.messages:
            sender.sent.held.append(HeldMessages(sender.uid, self.index, by))
        used = total = 0
        for _, _, span, nbytes, _ in needed:
            used += span
            total += nbytes
        return used, total

    def _add_all(self) -> tuple[int, int]:
        """As `_add_few`, for any number and kind of messages."""
        sender = self.sender
        found = _Messages.read(self.shape, self.source, sender.published)
        if found is None:
            return 0, 0
        needed = np.zeros(len(found.seq), np.bool_)
        by: list[tuple[Message, Holder, int]] = []
        for use in self._fan_out(found) if sender.peers.kind == lay.FAN_OUT else self._work_queue(found):
            needed |= use.which
            seqs, first = found.seq[use.which].tolist(), int(found.sent[use.which][-1])
            sender.sent.add(use.holder, seqs, int(found.nbytes.dot(use.which)), first, use.queue)
            if sender.reader.messages:
                attempts = [1] * len(seqs) if use.attempts is None else use.attempts[use.which].tolist()
                by += [(it, use.holder, attempt) for it, attempt in zip(found.each(use.which), attempts, strict=True)]
        if sender.reader.messages:
            sender.sent.held.append(HeldMessages(sender.uid, self.index, by))
        return int(found.span.dot(needed)), int(found.nbytes.dot(needed))

    def _fan_out(self, found: _Messages) -> list[_Use]:
        """Which messages of a fan-out are still needed, and by whom."""
        sender = self.sender
        used: list[_Use] = []
        twice, oldest = 2 * found.seq, int(found.seq[-1])
        for peer, words in self.rows:
            word, start = np.frombuffer(words, np.uint64)[found.slot], sender.starts[peer.index]
            leased, unread = word == twice, word < twice
            if oldest < start:
                owed = found.seq >= np.uint64(start)
                unread &= owed
                if not sender.history:
                    leased &= owed
            if np.count_nonzero(leased):
                used.append(_Use(leased, Holder(peer.uid, peer.pid, "leased", peer.alive)))
            if not peer.leaving and np.count_nonzero(unread):
                used.append(_Use(unread, Holder(peer.uid, peer.pid, "unread", peer.alive), queue=peer.index))
        for group, row, members in self.groups:
            used += self._group(found, group, row[found.slot], members)
        peers = sender.peers.members
        lockers = [peer for peer in peers if peer.delivery == "latest" or (sender.history and peer.delivery)]
        if lockers:
            locked = self._locked(found, np.ones(len(found.seq), np.bool_))
            used += self._held_by(found, locked, lockers, "leased")
        if sender.history:
            kept = found.seq + np.uint64(sender.history) > np.uint64(sender.published)
            for use in used:
                kept &= ~use.which
            if kept.any():
                used.append(_Use(kept, Holder(0, 0, "history", True)))
        return used

    def _group(self, found: _Messages, group: Group, word: _Words, members: list[tuple[Peer, _Words]]) -> list[_Use]:
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
        used: list[_Use] = []
        for peer, row in members:
            mine = taken & (row[found.slot] == twice)
            for how, which in (("claimed", mine & ~done), ("done", mine & done)):
                if which.any():
                    used.append(_Use(which, Holder(peer.uid, peer.pid, how, peer.alive), attempts))
            left &= ~mine
        used += [_Use(use.which & left, use.holder, attempts) for use in holders if (use.which & left).any()]
        left &= ~locked
        abandoned = left & had & taken
        for how, which in (("abandoned", abandoned), ("waiting", left & ~abandoned)):
            if which.any() and not group.leaving:
                used.append(_Use(which, Holder(0, 0, how, True, group.name), attempts, group.index))
        return used

    def _work_queue(self, found: _Messages) -> list[_Use]:
        """Which messages of a work queue are still needed, and by whom."""
        states = self._states(found)
        claimed = states[:, lay.CLAIMED] == found.seq
        locked = self._locked(found, states[:, lay.RELEASED] != found.seq)
        consumers = [peer for peer in self.sender.peers.members if peer.role == "receiver"]
        holders = self._held_by(found, locked, consumers, "claimed")
        # after the locks: a message that was finished meanwhile is not taken for one that nobody holds
        states = self._states(found, anew=True)
        newest = states[:, [lay.CLAIMED, lay.DONE, lay.RELEASED]].max(axis=1)  # of a later message in the same slot
        pending = (states[:, lay.RELEASED] != found.seq) & (newest <= found.seq)
        done = states[:, lay.DONE] == found.seq
        counts = states[:, lay.ATTEMPT]
        attempts = np.where(counts >> np.uint64(8) == found.seq, counts & np.uint64(0xFF), np.uint64(0))
        used = [
            _Use(whose, replace(use.holder, how=how), attempts)
            for how, which in (("done", pending & done), ("claimed", pending & ~done))
            for use in holders
            if (whose := use.which & which).any()
        ]
        free = pending & ~locked & ~done  # done and not locked: its consumer died, the producer reuses the slot
        abandoned = free & claimed & (states[:, lay.CLAIMED] == found.seq)
        for how, which in (("waiting", free & ~abandoned), ("abandoned", abandoned)):
            if which.any():
                used.append(_Use(which, Holder(0, 0, how, True), attempts, ANYBODY))
        return used

    def _states(self, found: _Messages, *, anew: bool = False) -> _Words:
        """The state words of the slots of these messages."""
        read = self.source.read_anew if anew else self.source.read
        words = np.frombuffer(read(self.shape.state, lay.STATE_WORDS * self.shape.slots), np.uint64)
        states: _Words = words.reshape(-1, lay.STATE_WORDS)[found.slot]
        return states

    def _locked(self, found: _Messages, which: _Mask, base: int = 0) -> _Mask:
        """Which of these messages are locked by any process, by the byte `base` plus their number. Few are, so ranges
        are tried."""
        result, numbers = np.zeros(len(which), np.bool_), which.nonzero()[0].tolist()
        seqs = found.seq[which].tolist()
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

    def _held_by(self, found: _Messages, locked: _Mask, peers: list[Peer], how: str, base: int = 0) -> list[_Use]:
        """The peers that hold the locks on these messages, as far as `/proc/<pid>/fdinfo` may be read."""
        masks: dict[Holder, _Mask] = {}
        numbers = locked.nonzero()[0].tolist()
        candidates: list[tuple[Holder, Ranges]] = []
        if numbers:
            self.sender.reads.drop()  # who holds them, `/proc` says
        for pid, host_pid in sorted({(peer.pid, peer.host_pid) for peer in peers if peer.alive}) if numbers else ():
            uids = [peer.uid for peer in peers if peer.pid == pid and peer.alive]
            ranges = self.sender.reader.processes.locked(host_pid, self.sender.table.segment.info)
            candidates.append((Holder(uids[0] if len(uids) == 1 else 0, pid, how, True), ranges))
        for number in numbers:
            byte = base + int(found.seq[number])
            for holder in [who for who, ranges in candidates if covers(ranges, byte)] or [Holder(0, 0, how, True)]:
                masks.setdefault(holder, np.zeros(len(found.seq), np.bool_))[number] = True
        return [_Use(which, holder) for holder, which in masks.items()]
