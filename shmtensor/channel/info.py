"""What `inspect` returns: the state of a channel, its members, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_new, _set = object.__new__, object.__setattr__


def made(kind: type[_T], fields: dict[str, Any]) -> _T:
    """One of these, which keeps this dict of all its fields.

    Its own constructor sets each field by a call, of a member's 27: that was a tenth of all time of a look.
    """
    it = _new(kind)
    _set(it, "__dict__", fields)
    return it


@dataclass(frozen=True)
class RingInfo:
    """One ring of a sender."""

    index: int
    """Its number among the rings of its sender."""
    slots: int
    """How many slots it has."""
    slot_bytes: int
    """Bytes of one slot."""
    nbytes: int
    """Shared memory of the whole ring, bytes."""
    slots_used: int
    """Slots whose message is still needed."""
    bytes_used: int
    """Payload bytes in them."""


@dataclass(frozen=True)
class MemberInfo:
    """One member of a channel: a sender or a receiver in some process."""

    index: int
    """Its row in the channel's table of members; reused by later members."""
    uid: int
    """Its unique number; `f"{uid:016x}"` is the `id` of a `SenderInfo`."""
    role: str
    """`"sender"` (`Publisher`, `Producer`, `Client`), `"receiver"` (`Subscriber`, `Consumer`, `Server`), or `"tracer"`
    (`shmtensor trace`)."""
    delivery: str
    """`"all"` or `"latest"` of a subscriber; `"one"` of a consumer, or of a subscriber in a group; `""` of a sender."""
    pid: int
    """Its process, in the pid namespace of that process: inside a container, the container's number."""
    host_pid: int
    """The same process in the pid namespace of the process that inspects; 0 if it was not found: dead, or another
    user's."""
    process: str
    """What its process runs: the script or module of a Python program, else the program; `""` if it was not found."""
    alive: bool
    """Whether its life lock is held, which the kernel drops at any death."""
    leaving: bool
    """A receiver that is closed and has living views; a sender that is closed and not yet drained."""
    asleep: bool
    """Whether it waits: a receiver for a message, a sender for a slot."""
    joined: float
    """When it joined: Unix time, seconds."""
    published: int
    """A sender's newest sequence number: how many messages it has sent."""
    rings: tuple[RingInfo, ...]
    """A sender's rings."""
    newest_bytes: int = 0
    """Payload of a sender's newest message, bytes; 0 if it is gone."""
    newest_age: float = 0.0
    """Seconds since a sender sent its newest message; 0 if that message is gone."""
    received: int = 0
    """Of a subscriber with `delivery="all"`: messages that it took from the senders that are members now."""
    unread: int = 0
    """Of a subscriber with `delivery="all"`: messages that were sent to it and not taken so far."""
    oldest_unread: float = 0.0
    """How long the oldest of these has waited, seconds; 0 if there is none."""
    label: str = ""
    """Its label: `label=` of its constructor."""
    group: str = ""
    """Of a subscriber: the group that it is in; `""`: in none."""
    waits: int = 0
    """Of a sender: sends that found no free slot and waited for one. This and all below count from when it joined."""
    dropped: int = 0
    """Of a sender with `full="drop"`: messages that it dropped for lack of a slot."""
    sleeps: int = 0
    """Of a receiver: how often it went to sleep, since no message came while it stayed awake."""
    late: int = 0
    """Of a receiver: messages that it found when a sleep had timed out: their wake-ups were lost."""
    missed: int = 0
    """Of a subscriber with `delivery="latest"`: messages that it passed over."""
    redelivered: int = 0
    """Of a consumer, a server or a member of a group: messages that it got after another, or itself, had them and did
    not finish them."""
    stopped: bool = False
    """Whether its process is stopped, by SIGSTOP or a debugger: it takes no messages, and keeps what it holds."""


@dataclass(frozen=True)
class Holder:
    """A member that still needs a message. `uid`, and perhaps `pid`, are 0 if only a lock shows that the member
    exists."""

    uid: int
    """The member."""
    pid: int
    """Its process, as `MemberInfo.pid`."""
    how: str
    """`"leased"`: the member has views of the message; `"unread"`: it has not received it; `"claimed"`: it works on it;
    `"done"`: it has finished it, and has views."""
    alive: bool
    """Whether it lives. What a dead member holds is freed when the sender needs it."""
    group: str = ""
    """The group of a fan-out that the message waits for, if none of its members has it: `uid` is 0 then, and `how` is
    `"waiting"` or `"abandoned"`."""


@dataclass(frozen=True)
class Holding:
    """The messages that one member holds in one way; or, without a member (`uid` and `pid` 0), that no member holds."""

    uid: int
    """The member; 0 if there is none, or if only a lock shows that there is one."""
    pid: int
    """Its process, as `MemberInfo.pid`."""
    alive: bool
    """Whether the member lives. What a dead member holds is freed when the sender needs it."""
    how: str
    """As in `Holder`; without a member `"waiting"` (for any consumer, or one of a group), `"abandoned"` (its receiver
    died or gave it back: for another), `"history"` (kept for subscribers to come)."""
    messages: int
    """How many messages."""
    nbytes: int
    """Their payload, bytes."""
    oldest: float
    """Seconds since the oldest of them was sent."""
    held: float = 0.0
    """Leased, claimed or done: seconds for which one of them has been held, at least. Members do not record when they
    take a message, so this counts from the first reading that saw it: it is 0 in a single call of `inspect`."""
    group: str = ""
    """As in `Holder`."""


@dataclass(frozen=True)
class HeldMessage:
    """A message whose slots are not free."""

    sender: int
    """The member that sent it."""
    ring: int
    """The number of its ring among those of its sender."""
    slot: int
    """Its first slot."""
    span: int
    """How many slots it takes."""
    seq: int
    """Its sequence number."""
    nbytes: int
    """Its payload, bytes."""
    age: float
    """Seconds since it was sent."""
    state: str
    """Fan-out: `"leased"`, `"unread"`, `"history"`; work queue, and groups of a fan-out: `"waiting"`, `"claimed"`,
    `"done"`, `"abandoned"`."""
    attempt: int
    """How many times it was delivered; 0 if it was not."""
    holders: tuple[Holder, ...]
    """Who holds it."""


@dataclass(frozen=True)
class ChannelInfo:
    """The state of one channel, at one moment."""

    name: str
    """Its name."""
    kind: str
    """`"fan-out"`, `"work queue"`, `"service"`, or `"unknown"` if it could not be read."""
    service: str
    """For a service, its name; for a channel of replies to one client, the name of the service; else `""`."""
    owner: int
    """User id of its files; -1 if they are gone."""
    nbytes: int
    """All its files together, bytes of shared memory."""
    files: tuple[str, ...]
    """Their paths."""
    locked: bool
    """Whether the channel's lock was held at that moment: normal for microseconds."""
    members: tuple[MemberInfo, ...]
    """Its members, the dead that are not cleaned up yet included."""
    holdings: tuple[Holding, ...]
    """Who holds which slots, by member and by how."""
    held: tuple[HeldMessage, ...]
    """Every message that is held; empty unless `inspect` is called with `messages=True`."""
    depth: int
    """Messages that wait: fan-out: of the living receiver, or group, that is furthest behind; else: those that no
    consumer has."""
    oldest_unread: float
    """Seconds for which the oldest message that a receiver has not taken has waited; 0 if there is none."""
    notes: tuple[str, ...]
    """What could not be read, and why."""
    readable: bool = True
    """Whether its members could be read. If not, `notes` says why: it is another user's, for example."""

    @property
    def living(self) -> int:
        """How many of the members that could be read live."""
        return sum(member.alive for member in self.members)

    @property
    def senders(self) -> tuple[MemberInfo, ...]:
        """The members that send and live."""
        return tuple(member for member in self.members if member.role == "sender" and member.alive)

    @property
    def receivers(self) -> tuple[MemberInfo, ...]:
        """The members that receive and live."""
        return tuple(member for member in self.members if member.role == "receiver" and member.alive)
