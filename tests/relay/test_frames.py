"""The relay's frames: they come back as they were, and nothing damaged comes back at all."""

from __future__ import annotations

import struct

import pytest
import xxhash

from shmtensor.errors import WireError
from shmtensor.relay import frames as fr

IDS = (0x1122334455667788, 0x99AABBCCDDEEFF01, 7)
FRAMES = [
    (fr.Hello(*IDS, fr.FAN_OUT, "someone", 12, 0xABCDEF01), b""),
    (fr.Welcome(*IDS, 256, 32 << 20, 11, True, 5), b""),
    (fr.Refuse(*IDS, "another version"), b"another version"),
    (fr.Items(*IDS, 4, [fr.Item(5, 9, b"describe", b"payload"), fr.Item(8, 9, b"d", b"")]), b"describepayloadd"),
    (fr.Part(*IDS, 4, 5, 9, 0, 100, b"describe", b"first bytes"), b"describefirst bytes"),
    (fr.Part(*IDS, 4, 5, 9, 11, 100, b"", b"more"), b"more"),
    (fr.Status(*IDS, 3, 8, 4096, [fr.Sender(9, 1234, "left camera"), fr.Sender(10, 1, "")]), b""),
    (fr.State(*IDS, 20, 11, 4096, False, fr.LOSSLESS, [(13, 14), (20, 20)]), b""),
    (fr.State(*IDS, 20, 11, 4096, False, fr.NOBODY, [], 3, 7), b""),
    (fr.Bye(*IDS, True), b""),
    (fr.Cancel(*IDS, (4, 9, 1 << 40)), b""),
]
BY_NAME = pytest.mark.parametrize(
    ("frame", "body"), FRAMES, ids=[f"{number} {type(it[0]).__name__}" for number, it in enumerate(FRAMES)]
)


def signed(rest: bytes, body: bytes) -> bytes:
    """A head with the digest of what it has."""
    return xxhash.xxh3_64(rest + body).intdigest().to_bytes(8, "little") + rest


@BY_NAME
def test_round_trip(frame, body):
    if isinstance(frame, fr.Items):
        assert frame.body() == body
    found = fr.parse(frame.head(body), body)
    assert found == frame


@BY_NAME
def test_a_changed_byte_is_noticed(frame, body):
    head = frame.head(body)
    for at in range(len(head)):
        for bit in (0, 3, 7):
            bad = bytearray(head)
            bad[at] ^= 1 << bit
            with pytest.raises(WireError, match="digest"):
                fr.parse(bytes(bad), body)
    for at in range(len(body)):
        bad = bytearray(body)
        bad[at] ^= 0x10
        with pytest.raises(WireError, match="digest"):
            fr.parse(head, bytes(bad))
    for end in range(len(head)):
        with pytest.raises(WireError):
            fr.parse(head[:end], body)
    with pytest.raises(WireError):
        fr.parse(head, body + b"\0")


@BY_NAME
def test_a_hostile_frame_is_a_frame_or_an_error(frame, body):
    """Every byte of the head with every value, signed anew: nothing but `WireError` is raised, and bounds hold."""
    rest = frame.head(body)[8:]
    for at in range(len(rest)):
        for value in range(256):
            bad = bytearray(rest)
            bad[at] = value
            check(signed(bytes(bad), body), body)
    for at in range(len(rest) - 3):
        for value in (0, 1, (1 << 32) - 1):
            bad = bytearray(rest)
            struct.pack_into("<I", bad, at, value)
            check(signed(bytes(bad), body), body)
    for end in range(len(rest)):
        check(signed(rest[:end], body), body)
    for longer in (rest + b"\0", rest + bytes(64)):
        with pytest.raises(WireError):
            fr.parse(signed(longer, body), body)


def check(head: bytes, body: bytes) -> None:
    try:
        found = fr.parse(head, body)
    except WireError:
        return
    assert found.near
    if isinstance(found, fr.Items):
        assert sum(len(it.description) + len(it.payload) for it in found.items) == len(body)
        numbers = [found.after, *(it.number for it in found.items)]
        assert numbers == sorted(set(numbers))
        assert all(it.sender and it.description for it in found.items)
    elif isinstance(found, fr.Part):
        assert found.offset + len(found.payload) <= found.nbytes
        assert (found.offset == 0) == bool(found.description)
    elif isinstance(found, fr.State):
        assert all(first <= last <= found.received for first, last in found.ranges)


def test_notes():
    """They come back as they were, and no other bytes are one."""
    request = fr.RequestNote(5_000_000_000, 1, 2)
    assert fr.request_note(request.pack() + b"description") == request
    assert fr.RequestNote(0, 0, 1000).pack() == fr.RequestNote(0, 0, 255).pack()
    reply, end = fr.ReplyNote(fr.REPLY, 0), fr.ReplyNote(fr.WORN, 4)
    assert fr.reply_note(reply.pack() + b"description") == reply
    assert fr.reply_note(end.pack()) == end
    for bad in (
        b"", request.pack(), request.pack()[:-1], bytes([*request.pack()[:12], 1, 0, 0, 0]) + b"d",
        fr.RequestNote(1 << 63, 0, 0).pack() + b"d", fr.RequestNote(0, 2, 0).pack() + b"d",
    ):  # fmt: skip
        with pytest.raises(WireError):
            fr.request_note(bad)
    for bad in (
        b"", reply.pack(), end.pack() + b"d", end.pack()[:-1], bytes([*end.pack()[:5], 1]) + bytes(10),
        fr.ReplyNote(fr.RETURNED + 1, 0).pack(),
    ):  # fmt: skip
        with pytest.raises(WireError):
            fr.reply_note(bad)


def test_a_reason_can_be_printed():
    """It is logged, and comes from another host."""
    for body, why in (
        (b"no room\n\x1b[31m", "no room\\n\\x1b[31m"),
        (("é" * 3000).encode()[: fr.MOST_TEXT - 1], "é" * 2047 + "\ufffd"),
    ):
        assert fr.parse(fr.Refuse(*IDS, "").head(body), body) == fr.Refuse(*IDS, why)
    with pytest.raises(WireError, match="reason of 4097 bytes"):
        fr.parse(fr.Refuse(*IDS, "").head(bytes(4097)), bytes(4097))


def test_another_version_names_who_asks():
    rest = bytearray(fr.Hello(*IDS, fr.FAN_OUT, "someone", 1, 1).head()[8:])
    rest[4] = 9
    with pytest.raises(fr.OtherProtocol, match="protocol 9") as caught:
        fr.parse(signed(bytes(rest), b""), b"")
    assert (caught.value.near, caught.value.attempt) == (IDS[0], IDS[2])


def test_the_layout():
    head = fr.Bye(1, 2, 3, True).head()
    assert head[8:] == b"SHMR" + bytes([fr.PROTOCOL, 8, 0, 0]) + struct.pack("<QQI", 1, 2, 3) + b"\1"
    assert head[:8] == xxhash.xxh3_64(head[8:]).intdigest().to_bytes(8, "little")
