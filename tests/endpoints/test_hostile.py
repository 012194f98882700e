"""Damaged and hostile bytes: each is a counted, logged error; none crashes or reads outside the segment."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor.channel.names import socket_dir, socket_path
from shmtensor.errors import WireError
from shmtensor.memory.words import store
from shmtensor.ring.layout import L_PUBLISHED, RingShape, SequenceTableShape
from shmtensor.wire import record

from ..waiting import PATIENCE, wait_until

PAIRS = [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]


def damage(ring, slot: int, rng: random.Random) -> None:
    """Change a few bytes of a record, its sequence number excepted."""
    start = ring.records + slot * record.SIZE
    for _ in range(rng.choice([1, 2, 8])):
        at = start + rng.randrange(16, record.SIZE if rng.random() < 0.5 else 100)
        ring.view[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", range(8))
def test_damaged_records_are_passed_over_and_the_stream_goes_on(channel, pair, seed, caplog):
    rng = random.Random(seed)
    values = [np.arange(16.0), {"a": np.arange(5), "b": [np.ones(2), 3]}, np.zeros(0), np.array(3)]
    with pair[0](channel, slots=4, slot_bytes=4096) as tx, pair[1](channel) as rx:
        received = 0
        for number in range(150):
            seq = tx.send(values[number % len(values)], meta={"n": number} if number % 2 else None)
            ring = tx._rings[0]
            slot = tx._words[tx._order + (seq & tx._mask)] & 0xFFFFFFFF
            if number % 3 == 0:
                damage(ring, slot, rng)
            try:
                msg = rx.recv(timeout=0)
            except shmtensor.TimedOut:
                continue
            received += 1
            if number % 3:
                assert msg.seq == seq
            msg.release()
            del msg
        assert received >= 100
        assert rx.statistics().bad_records == 150 - received
        assert rx.statistics().bad_records == caplog.text.count("passed over")
        for _ in range(20):  # and no slot is lost
            tx.send(np.arange(3), timeout=PATIENCE)
            rx.recv(timeout=PATIENCE).release()


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # the one that was damaged
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("entry", [1 << 63, 255 << 32, 7, 2**64 - 1, 1 << 32])
def test_damaged_order_entries(channel, pair, entry):
    with pair[0](channel, slots=4) as tx, pair[1](channel) as rx:
        tx.send(np.array(1))
        rx.recv(timeout=PATIENCE).release()
        tx.send(np.array(2))
        store(tx._words, tx._order + (2 & tx._mask), entry)
        tx.send(np.array(3))
        got = [int(rx.recv(timeout=PATIENCE).value)]
        if got == [2]:  # a consumer's look through all records finds it nevertheless
            assert pair[0] is shmtensor.Producer
            got.append(int(rx.recv(timeout=PATIENCE).value))
        assert got[-1] == 3
        assert rx.statistics().bad_records == 1


def test_published_beyond_everything(channel):
    with shmtensor.Publisher(channel, slots=4) as tx, shmtensor.Subscriber(channel) as rx:
        tx.send(np.array(1))
        rx.recv(timeout=PATIENCE).release()
        store(tx._words, L_PUBLISHED, 50)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.05)
        store(tx._words, L_PUBLISHED, tx._published)


@pytest.mark.parametrize("make", [shmtensor.Subscriber, shmtensor.Consumer])
def test_garbage_in_the_inbox(channel, make):
    rng = random.Random(1)
    with make(channel) as rx:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(f"ipc://{socket_path(socket_dir(), rx._member.uid)}")
        good = record.pack_bell(5, bytes(record.SIZE))
        sent = 0
        for _ in range(200):
            data = rng.choice(
                [
                    rng.randbytes(rng.randrange(0, 400)),
                    good[: rng.randrange(len(good))],
                    rng.randbytes(16) + good[16:],
                    b"",
                ]
            )
            socket.send(data)
            sent += 1

        def are_counted():
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.02)
            return rx.statistics().bad_doorbells >= sent

        wait_until(are_counted)
        assert rx.statistics().bad_doorbells == sent
        socket.close()
        context.term()
        kind = shmtensor.Publisher if make is shmtensor.Subscriber else shmtensor.Producer
        with kind(channel) as tx:
            tx.send(np.array(4))
            assert int(rx.recv(timeout=PATIENCE).value) == 4


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_as_a_doorbell(data):
    try:
        bell = record.parse_bell(data)
    except WireError:
        return
    assert bell.uid


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=8, max_size=8), st.integers(1, 100), st.integers(1, 1 << 20))
def test_any_head_is_refused_or_within_bounds(fields, slots, slot_bytes):
    fields[0], fields[1] = fields[0] % 3, fields[1] % 3
    try:
        record.check_head(tuple(fields), 0, 0, slots, slot_bytes)
    except WireError:
        return
    _, flags, _, slot, span, static, dynamic, nbytes = fields
    assert slot + span <= slots
    assert nbytes <= span * slot_bytes
    assert not flags or record.padded(nbytes) + static + dynamic <= span * slot_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequenceTableShape(0, 16),
        lambda: SequenceTableShape(256, 17),
        lambda: SequenceTableShape(256, 1 << 60),
        lambda: RingShape(3, 1, 64, 1),
        lambda: RingShape(1, 0, 64, 1),
        lambda: RingShape(1, 1, 65, 1),
        lambda: RingShape(1, 1 << 40, 1 << 40, 1),
    ],
)
def test_damaged_headers(make):
    with pytest.raises(WireError):
        make()


def test_a_damaged_segment_of_a_sender_is_counted_and_harms_nobody_else(channel, caplog):
    with shmtensor.Subscriber(channel) as rx, shmtensor.Publisher(channel) as bad, shmtensor.Publisher(channel) as good:
        for word in range(6):
            store(bad._words, word, 2**64 - 1)
        bad.send(np.array(1))
        good.send(np.array(2))
        assert int(rx.recv(timeout=PATIENCE).value) == 2
        assert rx.statistics().bad_records >= 1
        assert "cannot attach" in caplog.text
