"""The frames of a relay: bytes in, values out. The head is a Zenoh attachment, the body its payload.

| bytes of the head | field | meaning |
|---|---|---|
| 8 | digest | xxh3 (64 bits) of the rest of the head, then of the body |
| 4 | magic | `SHMR` |
| 1 | version | of this protocol |
| 1 | kind | `HELLO` and so on |
| 2 | reserved | 0 |
| 8 | near | the near relay's number |
| 8 | far | the far relay's number, 0: not known yet |
| 4 | attempt | which connection of the two |

The kind's own fields follow: the classes below. Reading any bytes gives a frame or a `WireError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import xxhash

from ..errors import WireError
from ..options import printable
from ..wire import record, spec

PROTOCOL: Final = 2
MAGIC: Final = b"SHMR"
HELLO, WELCOME, REFUSE, ITEMS, PART, STATUS, STATE, BYE, CANCEL = range(1, 10)
NAMES: Final = ("", "HELLO", "WELCOME", "REFUSE", "ITEMS", "PART", "STATUS", "STATE", "BYE", "CANCEL")

FAN_OUT, WORK_QUEUE, SERVICE = range(1, 4)
"""Patterns, as HELLO names them."""
PATTERNS: Final = {"fan-out": FAN_OUT, "work-queue": WORK_QUEUE, "service": SERVICE}
NOBODY, LOSSLESS, LATEST = range(3)
"""Audiences of the far channel: no receiver, or unknown; at least one lossless subscriber or consumer; only `latest`
subscribers."""
HELD: Final = LATEST
"""An audience of a queue: no receiver that would take a message, but a relay that has some messages, and may still pass
them on."""

REPLY, DROPPED, DIED, NO_ROOM, WORN, EXPIRED, RETURNED = range(7)
"""How a request ended there: by a reply; by a verdict of its server (as rpc/endpoints.py numbers them); after as many
servers died with it as may; before a server began it, as its time was up; with no server left that could take it."""

MOST_ITEMS: Final = 1024
MOST_SENDERS: Final = 256
MOST_RANGES: Final = 64
MOST_BODY: Final = 1 << 20
"""Bytes of payload in one frame; an item with more comes in parts."""
NOTE: Final = 16
"""Bytes of the note in front of the description of a request or a reply."""
MOST_FRAME: Final = spec.MAX_DESCRIPTION + MOST_BODY + (256 << 10)
"""Bytes of a frame: of a large item, the first body has all of the description."""
MOST_TEXT: Final = 4096
MOST_CREDIT: Final = (1 << 32) - 1
MOST_PAYLOAD: Final = 1 << 44
_MOST_DESCRIPTION: Final = spec.MAX_DESCRIPTION + NOTE
_LABEL: Final = 64

ONE_VERSION: Final = "run one version of shmtensor on both hosts"
"""The text of a refusal that waiting does not end."""
_DIGEST = struct.Struct("<Q")
_HEAD = struct.Struct("<4sBBHQQI")
_HELLO = struct.Struct("<BBHHHQI")
_WELCOME = struct.Struct("<IQQBI")
_ITEMS = struct.Struct("<QI")
_ITEM = struct.Struct("<QQIQ")
_PART = struct.Struct("<QQQQQI")
_STATUS = struct.Struct("<QQQI")
_SENDER = struct.Struct("<QIB")
_STATE = struct.Struct("<QQQBBIII")
_RANGE = struct.Struct("<QQ")
_BYE = struct.Struct("<B")
_CANCEL = struct.Struct("<I")
_REQUEST = struct.Struct("<QBB6x")
_REPLY = struct.Struct("<BB14x")
_MOST_TIME: Final = 1 << 62

Body = Any
"""Bytes, or a buffer of bytes."""


@dataclass(frozen=True)
class Frame:
    """Base of all frames."""

    KIND: ClassVar[int] = 0

    near: int
    far: int
    attempt: int

    def fields(self) -> bytes:
        """The kind's own fields."""
        return b""

    def head(self, body: Body = b"") -> bytes:
        """The head of this frame with that body."""
        rest = _HEAD.pack(MAGIC, PROTOCOL, self.KIND, 0, self.near, self.far, self.attempt) + self.fields()
        return _digest(rest, body) + rest


@dataclass(frozen=True)
class Hello(Frame):
    """From a near relay that looks for a far one, or begins anew with the one that it has."""

    KIND = HELLO

    pattern: int
    user: str
    oldest: int
    """The number of the first item that a far relay gets which does not know this near one."""
    path: int
    """The hash of the near channel, for labels."""
    record: int = record.VERSION
    description: int = spec.VERSION

    def fields(self) -> bytes:
        user = self.user.encode()
        return _HELLO.pack(self.pattern, 0, self.record, self.description, len(user), self.oldest, self.path) + user


@dataclass(frozen=True)
class Welcome(Frame):
    """From a far relay that accepts a near one: it takes items from `received` + 1 on, with limits for unacknowledged
    messages and for bytes not consumed."""

    KIND = WELCOME

    messages: int
    nbytes: int
    received: int
    knows: bool
    path: int
    """The hash of the far channel, for labels."""

    def fields(self) -> bytes:
        return _WELCOME.pack(self.messages, self.nbytes, self.received, self.knows, self.path)


@dataclass(frozen=True)
class Refuse(Frame):
    """From a far relay that does not accept a near one. The body says why, in printable characters."""

    KIND = REFUSE

    why: str


class Item(NamedTuple):
    """One whole message: its number, its sender's uid, its description and payload."""

    number: int
    sender: int
    description: bytes
    payload: Body


@dataclass(frozen=True)
class Items(Frame):
    """Items in order. The body has the description and the payload of each."""

    KIND = ITEMS

    after: int
    """The number of the item that was sent before the first one: numbers in between are not needed any more."""
    items: Sequence[Item]

    def fields(self) -> bytes:
        table = [
            _ITEM.pack(number, sender, len(description), len(payload))
            for number, sender, description, payload in self.items
        ]
        return _ITEMS.pack(self.after, len(table)) + b"".join(table)

    def body(self) -> bytes:
        return b"".join([each for it in self.items for each in it[2:]])


@dataclass(frozen=True)
class Part(Frame):
    """Bytes of a large item from `offset` on; with offset 0 its description comes first."""

    KIND = PART

    after: int
    """As of `Items`."""
    number: int
    sender: int
    offset: int
    nbytes: int
    description: bytes
    payload: Body

    def fields(self) -> bytes:
        return _PART.pack(self.after, self.number, self.sender, self.offset, self.nbytes, len(self.description))


@dataclass(frozen=True)
class Sender:
    """A sender of the near channel."""

    uid: int
    pid: int
    label: str


@dataclass(frozen=True)
class Status(Frame):
    """What was sent; from a near relay, also which senders there are."""

    KIND = STATUS

    number: int
    """Its number within an attempt, from 1: a replayed one changes nothing about the senders."""
    sent: int
    nbytes: int
    """Bytes of all bodies of this attempt."""
    senders: Sequence[Sender]

    def fields(self) -> bytes:
        parts = [_STATUS.pack(self.number, self.sent, self.nbytes, len(self.senders))]
        for it in self.senders:
            label = it.label.encode("utf-8", "surrogatepass")
            parts.append(_SENDER.pack(it.uid, it.pid, len(label)) + label)
        return b"".join(parts)


@dataclass(frozen=True)
class State(Frame):
    """What a far relay has: the newest item received, the newest up to which all are acknowledged, bytes consumed."""

    KIND = STATE

    received: int
    acknowledged: int
    consumed: int
    gap: bool
    """Whether items are missing, so that the sender must begin anew."""
    audience: int
    ranges: Sequence[tuple[int, int]] = ()
    """First and last number of items that are acknowledged beyond `acknowledged`."""

    servers: int = 0
    """Of a service: how many servers there may take requests."""
    credit: int = 0
    """Of a service: how many requests the near relay may send beyond what is received. Of a queue: how many items
    beyond `acknowledged` include all that a consumer there has begun with."""

    def fields(self) -> bytes:
        return _STATE.pack(
            self.received, self.acknowledged, self.consumed, self.gap, self.audience, len(self.ranges), self.servers,
            self.credit,
        ) + b"".join([_RANGE.pack(*it) for it in self.ranges])  # fmt: skip


@dataclass(frozen=True)
class Bye(Frame):
    """From a side that leaves; `ends`: for good, with its senders."""

    KIND = BYE

    ends: bool

    def fields(self) -> bytes:
        return _BYE.pack(self.ends)


@dataclass(frozen=True)
class Cancel(Frame):
    """The replies to these requests are not wanted any more; or these messages of a queue were taken back."""

    KIND = CANCEL

    numbers: Sequence[int]

    def fields(self) -> bytes:
        return _CANCEL.pack(len(self.numbers)) + struct.pack(f"<{len(self.numbers)}Q", *self.numbers)


@dataclass(frozen=True)
class RequestNote:
    """The properties of a request besides its value: the first bytes of its item's description."""

    remaining: int
    """Nanoseconds until the client's time-out; 0: none."""
    bits: int
    """Of its note: rpc/endpoints.py."""
    attempts: int
    """How many servers have had it before."""

    def pack(self) -> bytes:
        return _REQUEST.pack(self.remaining, self.bits, min(self.attempts, 255))


@dataclass(frozen=True)
class ReplyNote:
    """How a request ended: the first bytes of a reply's description. The item names the request as its sender."""

    end: int
    attempts: int
    """How many servers have had it, those before it came included."""

    def pack(self) -> bytes:
        return _REPLY.pack(self.end, min(self.attempts, 255))


def request_note(description: bytes) -> RequestNote:
    """The note in front of a request's description. Raises `WireError`."""
    if len(description) <= NOTE or any(description[10:NOTE]):
        raise WireError(f"request with a description of {len(description)} bytes")
    note = RequestNote(*_REQUEST.unpack_from(description))
    if note.remaining > _MOST_TIME or note.bits > 1:
        raise WireError(f"request with {note.remaining} ns left and bits {note.bits}")
    return note


def reply_note(description: bytes) -> ReplyNote:
    """The note in front of a reply's description, which is empty unless it is a `REPLY`. Raises `WireError`."""
    if len(description) < NOTE or any(description[2:NOTE]):
        raise WireError(f"reply with a description of {len(description)} bytes")
    note = ReplyNote(*_REPLY.unpack_from(description))
    if note.end > RETURNED or (note.end == REPLY) != (len(description) > NOTE):
        raise WireError(f"reply of kind {note.end} with a description of {len(description)} bytes")
    return note


def _digest(rest: bytes, body: Body) -> bytes:
    found = xxhash.xxh3_64(rest)
    found.update(body)
    return _DIGEST.pack(found.intdigest())


class _Fields:
    """Reads the fields of a head, every byte of it once."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        if self.at + fields.size > len(self.data):
            raise WireError(f"frame ends after {len(self.data)} bytes")
        found = fields.unpack_from(self.data, self.at)
        self.at += fields.size
        return found

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise WireError(f"frame ends after {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def text(self, count: int, most: int) -> str:
        if count > most:
            raise WireError(f"text of {count} bytes, at most {most} are allowed")
        try:
            return self.take(count).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise WireError("text is no UTF-8") from None

    def end(self) -> None:
        if self.at != len(self.data):
            raise WireError(f"{len(self.data) - self.at} bytes too many in a head")


class OtherProtocol(WireError):
    """A frame of another protocol version. `near` and `attempt` are where every version has them."""

    def __init__(self, version: int, near: int, attempt: int) -> None:
        super().__init__(f"relay protocol {version}, this library speaks {PROTOCOL}: {ONE_VERSION}")
        self.version, self.near, self.attempt = version, near, attempt


def parse(head: bytes, body: bytes) -> Frame:
    """The frame of these bytes. Raises `WireError` for anything invalid, `OtherProtocol` for another version."""
    if len(head) < _DIGEST.size + _HEAD.size:
        raise WireError(f"frame with a head of {len(head)} bytes")
    if _digest(memoryview(head)[_DIGEST.size :], body) != head[: _DIGEST.size]:  # type: ignore[arg-type]
        raise WireError("frame with a wrong digest: it was damaged on its way")
    magic, version, kind, reserved, near, far, attempt = _HEAD.unpack_from(head, _DIGEST.size)
    if magic != MAGIC:
        raise WireError(f"frame starts with {magic!r}")
    if version != PROTOCOL:
        raise OtherProtocol(version, near, attempt)
    reader = _READERS.get(kind)
    if reader is None or reserved or not near:
        raise WireError(f"frame of kind {kind}, near relay {near}, reserved {reserved}")
    fields = _Fields(head, _DIGEST.size + _HEAD.size)
    made = reader((near, far, attempt), fields, body)
    fields.end()
    if kind not in (ITEMS, PART, REFUSE) and len(body):
        raise WireError(f"{NAMES[kind]} with a body of {len(body)} bytes")
    return made


_Ids = tuple[int, int, int]


def _flag(value: int) -> bool:
    if value > 1:
        raise WireError(f"flag of value {value}")
    return bool(value)


def _hello(ids: _Ids, fields: _Fields, body: bytes) -> Hello:
    pattern, reserved, its_record, description, length, oldest, path = fields.unpack(_HELLO)
    if pattern not in PATTERNS.values() or reserved or not oldest:
        raise WireError(f"HELLO of pattern {pattern}, reserved {reserved}, from item {oldest} on")
    return Hello(*ids, pattern, fields.text(length, MOST_TEXT), oldest, path, its_record, description)


def _welcome(ids: _Ids, fields: _Fields, body: bytes) -> Welcome:
    messages, nbytes, received, knows, path = fields.unpack(_WELCOME)
    if not messages or not nbytes or not ids[1]:
        raise WireError(f"WELCOME of relay {ids[1]} with a window of {messages} messages, {nbytes} bytes")
    return Welcome(*ids, messages, nbytes, received, _flag(knows), path)


def _refuse(ids: _Ids, fields: _Fields, body: bytes) -> Refuse:
    if len(body) > MOST_TEXT:
        raise WireError(f"reason of {len(body)} bytes")
    return Refuse(*ids, printable(bytes(body).decode("utf-8", "replace")))


def _items(ids: _Ids, fields: _Fields, body: bytes) -> Items:
    after, count = fields.unpack(_ITEMS)
    if not 0 < count <= MOST_ITEMS:
        raise WireError(f"{count} items")
    view, at, found, before = memoryview(body), 0, [], after
    for number, sender, length, nbytes in _ITEM.iter_unpack(fields.take(count * _ITEM.size)):
        start = at + length
        end = start + nbytes
        if not (sender and number > before and length) or length > _MOST_DESCRIPTION or end > len(view):
            raise WireError(
                f"item {number} after {before}, of {sender}: {length} and {nbytes} bytes at {at} of {len(view)}"
            )
        found.append(Item(number, sender, body[at:start], view[start:end]))
        before, at = number, end
    if at != len(view):
        raise WireError(f"items of {at} bytes in a body of {len(view)}")
    return Items(*ids, after, found)


def _part(ids: _Ids, fields: _Fields, body: bytes) -> Part:
    after, number, sender, offset, nbytes, length = fields.unpack(_PART)
    if length > _MOST_DESCRIPTION or nbytes > MOST_PAYLOAD:
        raise WireError(f"item of {length} bytes of description, {nbytes} of payload")
    if number <= after or not sender or (offset == 0) != (length > 0) or length > len(body):
        raise WireError(f"part of item {number} at {offset} with {length} bytes of description")
    if offset + len(body) - length > nbytes or (offset and len(body) == length):
        raise WireError(f"part of {len(body) - length} bytes at {offset} of {nbytes}")
    return Part(*ids, after, number, sender, offset, nbytes, body[:length], memoryview(body)[length:])


def _status(ids: _Ids, fields: _Fields, body: bytes) -> Status:
    number, sent, nbytes, count = fields.unpack(_STATUS)
    if count > MOST_SENDERS:
        raise WireError(f"{count} senders")
    found = []
    for _ in range(count):
        uid, pid, length = fields.unpack(_SENDER)
        if not uid:
            raise WireError("sender 0")
        found.append(Sender(uid, pid, fields.text(length, _LABEL)))
    return Status(*ids, number, sent, nbytes, found)


def _state(ids: _Ids, fields: _Fields, body: bytes) -> State:
    received, acknowledged, consumed, gap, audience, count, servers, credit = fields.unpack(_STATE)
    if count > MOST_RANGES or audience > LATEST or acknowledged > received:
        raise WireError(f"STATE of {count} ranges, audience {audience}, {acknowledged} of {received} acknowledged")
    ranges, before = [], acknowledged
    for _ in range(count):
        first, last = fields.unpack(_RANGE)
        if not before < first <= last <= received:
            raise WireError(f"items {first} to {last} acknowledged beyond {before}, of {received}")
        ranges.append((first, last))
        before = last
    return State(*ids, received, acknowledged, consumed, _flag(gap), audience, ranges, servers, credit)


def _bye(ids: _Ids, fields: _Fields, body: bytes) -> Bye:
    return Bye(*ids, _flag(fields.unpack(_BYE)[0]))


def _cancel(ids: _Ids, fields: _Fields, body: bytes) -> Cancel:
    (count,) = fields.unpack(_CANCEL)
    if not 0 < count <= MOST_ITEMS:
        raise WireError(f"CANCEL of {count} requests")
    return Cancel(*ids, struct.unpack(f"<{count}Q", fields.take(8 * count)))


_READERS: Final = {
    HELLO: _hello, WELCOME: _welcome, REFUSE: _refuse, ITEMS: _items, PART: _part, STATUS: _status, STATE: _state,
    BYE: _bye, CANCEL: _cancel,
}  # fmt: skip
