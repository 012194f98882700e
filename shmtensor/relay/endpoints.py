"""The endpoints of a relay in the channels: ordinary members, which pass messages on as bytes, without decoding
them."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
import weakref
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from ..channel import control as ctl
from ..channel.control import Control, Entry
from ..channel.names import control_name
from ..codec import raw
from ..codec.encode import Encoded
from ..endpoints.asyncio import AsyncReceiver, AsyncSender
from ..endpoints.base import LIVENESS_INTERVAL, SenderTraits
from ..endpoints.claims import Claims
from ..endpoints.message import Message
from ..endpoints.pubsub import Publisher, Subscriber
from ..endpoints.workqueue import Consumer, Producer
from ..errors import ArgumentError, RingFull, ShmTensorError, TimedOut, WireError
from ..memory import placement
from ..memory import segment as shm
from ..memory.words import store
from ..ring.layout import ATTEMPT, CLAIMED, DONE, FAN_OUT, KINDS, RELEASED, SERVICE, STATE_WORDS, WORK_QUEUE
from ..ring.reader import Reader, Reception
from ..ring.reference import NOTHING
from ..ring.ring import Ring
from ..rpc.calls import Call
from ..rpc.endpoints import ReplyReceiver, ReplySender, RequestReceiver, RequestSender
from .frames import HELD, LATEST, LOSSLESS, NOBODY, Item, Part
from .frames import Sender as Named

log = logging.getLogger("shmtensor.relay")

_VIA: Final = " via "
_LABEL: Final = 64
_MOST_PASSED: Final = 4 * ctl.CAPACITY
MOST_HOPS: Final = 6
"""Relays that a message passes at most: a label has room for so many."""
_PATH: Final = re.compile(rf"(.*){_VIA}([0-9a-f]{{8}}(?: [0-9a-f]{{8}}){{0,{MOST_HOPS - 1}}})", re.DOTALL)


@functools.lru_cache(1024)
def path_of(label: str) -> tuple[int, ...]:
    """The hashes of the channels that the messages of a relay's sender came through."""
    found = _PATH.fullmatch(label)
    return tuple(int(hop, 16) for hop in found[2].split()) if found else ()


def relayed_label(label: str, path: int) -> str:
    """The label of a far sender: that of the near one, and where it comes from. At most 64 bytes."""
    found = _PATH.fullmatch(label)
    own = found[1] if found else label
    tail = _VIA + " ".join(f"{hop:08x}" for hop in [*path_of(label), path][-MOST_HOPS:])
    return _clipped(own, _LABEL - len(tail)) + tail


def own_label(label: str) -> str:
    """The label of a sender that is no relay's, as a relay passes it on: never one that reads as a path."""
    return _clipped(label, _LABEL - 1) + " " if path_of(label) else label


def _clipped(label: str, nbytes: int) -> str:
    return label.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore")


_T = TypeVar("_T")


class Batches(Generic[_T]):
    """Takes messages in batches."""

    @abstractmethod
    def next(self, timeout: float) -> _T | None:
        """The next message, or None."""

    def at_once(self) -> _T | None:
        """Another message that is there already; `next` finds those that this does not."""
        return self.next(0)

    def take(self, timeout: float, most: int, nbytes: int) -> list[_T]:
        """The next message, if it comes in time, and messages after it, up to `most` of them or a total of `nbytes`."""
        message, found = self.next(timeout), []
        with contextlib.suppress(ShmTensorError):  # what is taken is passed on; the next call meets it again
            while message is not None:
                found.append(message)
                nbytes -= message.nbytes  # type: ignore[attr-defined]
                message = self.at_once() if len(found) < most and nbytes > 0 else None
        return found


class _NearEnd(Batches[Message], AsyncReceiver):
    """Base of a relay's subscriber and consumer. `Message.value` is the payload, `meta` the description."""

    avoided = 0
    """The hash of the far channel: messages that came from there do not go back."""
    transit = True
    """Whether to relay messages that another relay brought to this host."""
    refusal = ""
    """Why this channel cannot be relayed; empty if it can."""
    _flags = ctl.RELAY
    _has_told = False

    def _reception(self) -> Reception:
        return super()._reception()._replace(decode=raw.decode, codec=raw.codec)

    def _attach(self, entry: Entry) -> Reader:
        control = self._member.control
        is_relayed = bool(entry.flags & ctl.RELAY)
        if self._leaves_alone and is_relayed and self.leaves(control.label(entry)):
            raise FileNotFoundError(entry.uid)
        reader = super()._attach(entry)
        if not is_relayed:
            reader.sender = reader.sender._replace(name=own_label(reader.sender.name))
        if reader.device:
            reader.close()
            self.refusal = f"process {entry.pid} publishes in device memory, which a relay does not read"
            raise WireError(self.refusal)
        return reader

    _leaves_alone = False

    def leaves(self, label: str) -> bool:
        """Whether a sender of this label is not this relay's: its messages came through the far channel, through any
        while there is no transit, or through as many as may be."""
        path = path_of(label)
        if self.transit and len(path) == MOST_HOPS and self.avoided not in path and not self._has_told:
            self._has_told = True
            log.warning(
                "relay of channel %s: what sender %r brings came over %d relays, which is the most: it goes no further",
                self.name, label, MOST_HOPS,
            )  # fmt: skip
        return self.avoided in path or len(path) >= MOST_HOPS if self.transit else bool(path)

    def next(self, timeout: float) -> Message | None:
        """The next message, or None."""
        try:
            return self.recv(timeout=timeout)
        except TimedOut:
            return None

    def at_once(self) -> Message | None:
        direct, hands = self._direct, self._hands
        if direct is None:
            return self.next(0)
        return direct[self, self._undelivered, hands and hands.hand, 0]  # type: ignore[no-any-return]

    def readers(self) -> list[Any]:
        """One for each sender that is here, or that left messages which are not taken."""
        return list(self._readers)

    def uids(self) -> list[int]:
        """Of these senders."""
        return [reader.uid for reader in self.readers()]

    def senders(self) -> list[Named]:
        """These senders, but for those whose messages this relay does not take."""
        return [
            Named(reader.uid, reader.sender.pid, reader.sender.name)
            for reader in self.readers()
            if not self.leaves(reader.sender.name)
        ]


class NearSubscriber(_NearEnd, Subscriber):
    """Takes every message of a fan-out, or the newest, as bytes. It gets no messages that came from the far channel:
    their senders see by its label that this relay leads back.

    Args:
        before: what it replaces, as it leads elsewhere: what was sent to that one only is taken from there, first.
        passed: what the one that it replaces has taken, of each sender: the history of a sender has that, too.
    """

    _before: NearSubscriber | None = None

    def __init__(
        self,
        channel: str,
        avoided: int,
        transit: bool,
        before: NearSubscriber | None = None,
        passed: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.avoided, self.transit = avoided, transit
        self._passed = dict(passed or {})
        super().__init__(channel, label=relay_label(avoided, transit), **options)
        self._before = before  # last: one that cannot join leaves it as it is

    def take(self, timeout: float, most: int, nbytes: int) -> list[Message]:
        """As above. None of them was taken before, and none leads back."""
        found, passed, sender = [], self._passed, None
        newest, leaves = 0, False
        for message in super().take(timeout, most, nbytes):
            if message.sender is not sender:
                sender = message.sender
                newest, leaves = passed.get(sender.id, 0), self.leaves(sender.name)
            if leaves or message.seq <= newest:
                message.release()
            else:
                passed[sender.id] = newest = message.seq
                found.append(message)
        if len(passed) > _MOST_PASSED:
            self._passed = self.passed()
        return found

    def passed(self) -> dict[str, int]:
        """The newest message that was taken of each sender that is here."""
        ends = [self] if self._before is None else [self, self._before]
        there = {f"{reader.uid:016x}" for end in ends for reader in end.readers()}
        return {uid: seq for uid, seq in self._passed.items() if uid in there}

    def at_once(self) -> Message | None:
        return super().at_once() if self._before is None else self.next(0)

    def next(self, timeout: float) -> Message | None:
        while self._before is not None:
            message = self._before.next(0)
            if message is None:
                if all(reader.gone or self._start(reader) for reader in self._before.readers()):
                    self._before.close()
                    self._before = None
                break
            if not self._comes_here(message):
                return message
            message.release()
        return super().next(timeout)

    def _start(self, reader: Any) -> int | None:
        """The first message of a sender that comes here; None: it has not sent any since this one joined."""
        return reader.sequences.start(*self._member.recipient)  # type: ignore[no-any-return]

    def _comes_here(self, message: Message) -> bool:
        """Whether a message of the one before comes to this one as well."""
        readers = [] if self._before is None else self._before.readers()
        starts = [self._start(reader) for reader in readers if f"{reader.uid:016x}" == message.sender.id]
        return any(start is not None and start <= message.seq for start in starts)

    def close(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()
        super().close()


class NearConsumer(_NearEnd, Consumer):
    """Takes messages of a work queue as bytes. It leaves those that came from the far channel to others: so `avoided`
    is set before it joins."""

    _leaves_alone = True

    def __init__(self, channel: str, avoided: int, transit: bool, **options: Any) -> None:
        self.avoided, self.transit = avoided, transit
        super().__init__(channel, label=relay_label(avoided, transit), **options)

    is_onward = False

    def show_onward(self, is_there: bool) -> None:
        """Show whether a consumer of the far host takes messages: if not, other relays do not count this one as a
        consumer."""
        self._run(self._counters.put, ctl.C_ONWARD, int(is_there))
        self.is_onward = is_there

    def readers(self) -> list[Any]:
        # while no consumer is there, nothing is taken, which would notice who has come
        self._run(self._refresh_if_stale)
        return super().readers()


_RELAY_TO: Final = "relay to "
_DIRECT: Final = ", no transit"
_NEARER_S: Final = 0.05
"""How long a request waits for a server of this host that sleeps: it is woken for it, unless it is stopped."""
_BUSY_S: Final = 0.001
"""How long it waits for one that is awake: it may be about to take it."""
_PAUSE_S: Final = 0.0005
_MOST_ATTEMPTS: Final = 250


def relay_label(path: int, transit: bool) -> str:
    """The label of a near relay: where it leads to, and whether what relays bring may go there."""
    return f"{_RELAY_TO}{path:08x}{'' if transit else _DIRECT}"


def is_way_back(flags: int, label: str, path: Sequence[int]) -> bool:
    """Whether a member of these flags and this label is a near relay which leaves alone what came through the channels
    of these hashes."""
    if not flags & ctl.RELAY:
        return False
    is_far = len(path) >= MOST_HOPS
    return is_far or label.endswith(_DIRECT) or label in {relay_label(hop, True) for hop in path}


def count_servers(service: str, paths: Collection[Sequence[int]]) -> int | None:
    """How many servers may take requests that came through the channels of these hashes, whichever of these ways:
    living ones, and relays that lead elsewhere. None: that cannot be found out now, as a segment server is away, or
    open files are short. Raises `ArgumentError` if it is a channel of another kind."""
    try:
        with placement.at_once(), shm.look_at(control_name(service)) as segment:
            words = segment.read(0, Control.nbytes() // 8)
            if (words[ctl.W_MAGIC], words[ctl.W_VERSION]) != (ctl.MAGIC, ctl.VERSION):
                return 0  # being made, or another version's
            if words[ctl.W_KIND] != SERVICE:
                raise ArgumentError(f'channel "{service}" is a {KINDS.get(words[ctl.W_KIND])}, not a service')
            return sum(_may_serve(segment, words, index, paths) for index in range(ctl.CAPACITY))
    except FileNotFoundError:
        return 0
    except (WireError, OSError):
        return None


def _may_serve(segment: Any, words: Any, index: int, paths: Collection[Sequence[int]]) -> bool:
    at, start = ctl.base(index), ctl.label_word(index)
    if not words[at + ctl.M_UID] or words[at + ctl.M_ROLE] != ctl.RECEIVER or words[at + ctl.M_LEAVING]:
        return False
    flags, label = words[at + ctl.M_FLAGS], ctl.label_of(words[start : start + ctl.LABEL_MAX // 8].tobytes())
    leads_back = any(is_way_back(flags, label, path) for path in paths)
    return not leads_back and bool(segment.is_locked(ctl.LIFE + index))


class NearRequestReceiver(_NearEnd, RequestReceiver):
    """Takes the requests of a service as bytes, if no server of this host is about to take them."""

    _leaves_alone = True
    _claims: Claims

    def __init__(self, service: str, avoided: int, transit: bool) -> None:
        self.avoided, self.transit = avoided, transit
        self._nearer: list[Any] = []  # of `Peer`: the servers of this host that live
        self._nearer_due = 0.0
        self._is_waiting = False
        super().__init__(service, max_attempts=_MOST_ATTEMPTS, spin=0.0, label=relay_label(avoided, transit))

    def _refresh(self) -> None:
        super()._refresh()
        self._direct = None  # every request goes by `_poll`
        # nearer ones first: `wake_sibling` wakes the first that sleeps
        self._claims.siblings = dict(sorted(self._claims.siblings.items(), key=lambda it: _is_relay(it[1])))
        self._nearer = [peer for peer in self._claims.siblings.values() if not _is_relay(peer)]

    def idle_servers(self) -> int:
        """How many living servers of this host sleep in `recv`."""
        return self._run(self._count_idle)  # type: ignore[no-any-return]

    def _count_idle(self) -> int:
        if self._state:
            return 0
        self._refresh_if_stale()
        control, now = self._member.control, time.monotonic()
        if now >= self._nearer_due:
            self._nearer_due = now + LIVENESS_INTERVAL
            self._nearer = [peer for peer in self._nearer if control.is_alive(peer.index)]
        return sum(self._control_words[peer.asleep] & 1 for peer in self._nearer)

    def _poll(self, patience: int = 0) -> Message | None:
        self._is_waiting = False
        is_idle = self._count_idle() > 0
        if self._nearer:
            ages = [age for age in map(_age, self._readers) if age != NOTHING]
            patience_ns = int((_NEARER_S if is_idle else _BUSY_S) * 1e9)
            if ages and time.monotonic_ns() - min(ages) < patience_ns:
                if is_idle:  # it may be this relay that was woken
                    self._claims.wake_sibling(self._member.uid)
                self._is_waiting = True
                return None
        return super()._poll(patience)

    def _sleep(self, seconds: float) -> bool:
        if not self._is_waiting:
            return super()._sleep(seconds)
        self._inbox.pause(min(seconds, _PAUSE_S))  # not asleep: a server of this host is to be woken
        return True


def _is_relay(peer: Any) -> bool:
    return bool(peer.entry.flags & ctl.RELAY)


def _age(reader: Any) -> int:
    """When its next request was published that nobody has; 0: it cannot be read; `NOTHING`."""
    age: int = reader.age()
    if not age:  # its ring is not mapped
        reader.map_all()
        age = reader.age()
    return age


class NearReplyReceiver(_NearEnd, ReplyReceiver):
    """Receives replies as bytes."""


class Filling:
    """A message that is copied into its slot part by part. Receivers see it only after `finish`."""

    def __init__(self, commit: Any, ring: Ring, slot: int, out: Encoded, array: Any) -> None:
        self._commit, self._ring, self._slot, self._out, self._array = commit, ring, slot, out, array
        self._view = memoryview(array)
        self.filled = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self._out.nbytes

    def add(self, payload: memoryview) -> None:
        """Copy the next bytes of the payload."""
        end = self.filled + len(payload)
        if end > self.nbytes:
            raise WireError(f"{end} bytes for a payload of {self.nbytes}")
        self._view[self.filled : end] = payload
        self.filled = end

    def finish(self) -> int:
        """Publish it. Returns its sequence number."""
        if self.filled != self.nbytes:
            raise WireError(f"{self.filled} of {self.nbytes} bytes of a payload came")
        return self._commit(self._ring, self._slot, self._out, self._array)  # type: ignore[no-any-return]


class _FarEnd(AsyncSender):
    """Base of a relay's senders."""

    _describe: Any = staticmethod(raw.encode)

    def forward(self, item: Item, timeout: float) -> int:
        """Send a whole message as bytes. As `send`."""
        return self.send(item.payload, item.description, timeout=timeout)

    def fill(self, first: Part, timeout: float) -> Filling:
        """A free slot for a message whose payload comes in parts. Raises `RingFull` if there is none in time."""
        return self.fill_with(first.description, first.nbytes, timeout)

    def fill_with(self, description: bytes, nbytes: int, timeout: float, *registration: Any) -> Filling:
        """The same. `registration`: see `Registration`, ring/writer.py."""
        return self._run_within(  # type: ignore[no-any-return]
            timeout, self._too_late, self._fill_inside, description, nbytes, registration
        )

    def _fill_inside(self, timeout: float, description: bytes, nbytes: int, registration: tuple[Any, ...]) -> Filling:
        if self._state or self._stop:
            self._refuse()
        out = Encoded(description, nbytes)
        place = self._place(out.total, timeout)
        if place is None:
            raise RingFull(self._no_loan_text())
        ring, slot = place
        array = ring.block(slot, out.total)
        self._writer.lend(ring.index, slot, weakref.ref(array))

        def commit(*message: Any) -> int:
            return self._run(self._commit_registered, registration, *message)  # type: ignore[no-any-return]

        return Filling(commit, ring, slot, out, array)

    def _commit_registered(self, registration: tuple[Any, ...], ring: Ring, slot: int, out: Encoded, array: Any) -> int:
        if self._state or self._stop:
            self._refuse()
        self._recipients.refresh_if_stale()
        out.write(ring.buffer, slot * ring.slot_bytes)
        guard = weakref.ref(array)
        return self._publish(ring, slot, out, guard, *registration)


class _Onward(_FarEnd):
    """Sends messages that a near relay brings. Its label names the channels that they came through: relays that lead
    back there get nothing, are not waited for, and not woken."""

    _flags = ctl.RELAY

    def __init__(self, channel: str, *, label: str, **options: Any) -> None:
        super().__init__(channel, label=label, **options)
        control, path = self._member.control, path_of(label)
        self._recipients.excludes = lambda entry: is_way_back(entry.flags, control.label(entry), path)


class _WithAudience(_Onward):
    """A sender whose receivers decide what the near relay takes."""

    def audience(self) -> int:
        """Who receives its messages: see frames.py."""
        return self._run(self._audience_inside)  # type: ignore[no-any-return]

    def _audience_inside(self) -> int:
        if self._state or self._stop:
            return NOBODY
        self._recipients.refresh_if_stale()
        self._recipients.drop_dead()
        return self._audience_of(self._recipients.listeners)

    @abstractmethod
    def _audience_of(self, listeners: Sequence[Any]) -> int:
        """Which of these receivers count."""


class FarPublisher(_WithAudience, Publisher):
    """Publishes messages of a fan-out as bytes."""

    _traits = SenderTraits(FAN_OUT)

    def _audience_of(self, listeners: Sequence[Any]) -> int:
        if not listeners:
            return NOBODY
        return LATEST if all(peer.entry.flags & ctl.LATEST for peer in listeners) else LOSSLESS


class FarProducer(_WithAudience, Producer):
    """Sends messages of a work queue as bytes. Messages that are not done on this host are not lost: the near host
    keeps them."""

    _traits = SenderTraits(WORK_QUEUE)

    def __init__(self, channel: str, **options: Any) -> None:
        self._undone: dict[int, tuple[memoryview, int]] = {}  # where it is stored that they are done; or they are
        super().__init__(channel, **options)

    def _audience_of(self, listeners: Sequence[Any]) -> int:
        """A relay counts if somebody is there who takes what it takes. What it has taken it may pass on yet."""
        self._undone = {seq: it for seq, it in self._undone.items() if it[0][it[1]] < seq}
        relays = [peer for peer in listeners if _is_relay(peer)]
        words = self._control_words
        if len(relays) < len(listeners) or any(words[ctl.counters_word(it.index) + ctl.C_ONWARD] for it in relays):
            return LOSSLESS
        locks = self._sequences.locks
        return HELD if relays and any(map(locks.held_by_other, self._undone)) else NOBODY

    def done_word(self, seq: int) -> tuple[memoryview, int]:
        """Where it is stored that message `seq`, just sent, is done: the word is that number then, or a later one."""
        place = self._words[self._order + (seq & self._mask)]
        ring = self._rings[place >> 32]
        found = ring.words, ring.state + STATE_WORDS * (place & 0xFFFFFFFF) + DONE
        self._undone[seq] = found
        return found

    def withdraw(self, words: memoryview, at: int, seq: int) -> bool:
        """Finish the message with this `done_word`, as a consumer would. False if a consumer has it, or it is done."""
        if self._state or words[at] >= seq or not self._sequences.locks.try_exclusive(seq):
            return False
        try:
            if words[at] >= seq:
                return False
            store(words, at, seq)
            store(words, at - DONE + RELEASED, seq)  # this thread is the only one that uses slots again
            return True
        finally:
            self._sequences.locks.unlock(seq)


def was_claimed(words: memoryview, at: int, seq: int) -> bool:
    """Whether a consumer has, or had, the message with this `done_word`."""
    return words[at - DONE + CLAIMED] == seq


class FarCall(Call):
    """A request that a far relay has posted.

    number:       of its item
    attempts:     how many servers had had it before
    is_cancelled: the near relay does not want its reply
    is_returned:  it was withdrawn, as no server is there
    """

    __slots__ = ("attempts", "is_cancelled", "is_returned", "number")

    def __init__(self, number: int, deadline: int, bits: int, attempts: int) -> None:
        super().__init__(deadline, bits)
        self.number, self.attempts = number, attempts
        self.is_cancelled = self.is_returned = False


class FarRequestSender(_Onward, RequestSender):
    """Sends requests of a service as bytes."""

    _traits = replace(RequestSender._traits, carries_context=False)

    def post_request(self, call: FarCall, payload: Any, description: bytes, timeout: float) -> None:
        """As `post`, of a whole request."""
        if not call.attempts:
            self.post(call, payload, description, timeout)
            return
        self.check_open()
        self._post(self._describe(payload, description), timeout, self._registration(call))

    def fill_request(self, call: FarCall, description: bytes, nbytes: int, timeout: float) -> Filling:
        """As `fill`."""
        return self.fill_with(description, nbytes, timeout, *self._registration(call))

    def _publish(self, ring: Ring, slot: int, out: Encoded, guard: Any, *registration: Any) -> int:
        call = registration[3]
        if call.attempts:  # the slot is this sender's until it is published
            at = ring.state + STATE_WORDS * slot + ATTEMPT
            store(ring.words, at, (self._published + 1) << 8 | min(call.attempts, 255))
        return super()._publish(ring, slot, out, guard, *registration)


class NearReplySender(_FarEnd, ReplySender):
    """Publishes replies to a client as bytes."""

    def post_reply(self, seq: int, payload: Any, description: bytes) -> None:
        """As `post`, of a whole reply to request `seq`."""
        self.post(seq, payload, description, 0)

    def fill_reply(self, seq: int, description: bytes, nbytes: int) -> Filling:
        """As `fill`."""
        return self.fill_with(description, nbytes, 0, *self._registration(seq))
