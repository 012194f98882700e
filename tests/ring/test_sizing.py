"""How many slots a ring gets if nobody says how many."""

from __future__ import annotations

import random

import numpy as np
import pytest

import shmtensor
from shmtensor import native
from shmtensor.ring.pool import SIZED, Sizing

from ..waiting import PATIENCE

KINDS = [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("nbytes", "slots"), [(64, 1024), (KIB, 1024), (8 * KIB, 128), (64 * KIB, 16), (MIB, 16)])
@pytest.mark.parametrize("kind", [pair[0] for pair in KINDS])
def test_small_messages_get_many_slots(channel, kind, nbytes, slots):
    with kind(channel, slot_bytes=nbytes) as tx:
        assert tx.statistics().slots == slots


@pytest.mark.parametrize("slots", [1, 3, 16, 300])
@pytest.mark.parametrize("kind", [pair[0] for pair in KINDS])
def test_a_number_that_is_asked_for_is_exact(channel, kind, slots):
    with kind(channel, slots=slots, slot_bytes=64) as tx:
        assert tx.statistics().slots == slots
    with kind(channel, slots=slots, slot_bytes=4 * KIB, max_bytes="1MiB") if slots < 64 else kind(channel) as tx:
        assert tx.statistics().slots in (slots, 0)
    with pytest.raises(shmtensor.ResourceError, match="max_bytes"):
        kind(channel, slots=slots, slot_bytes=4 * MIB, max_bytes="1MiB")


@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_the_first_ring_leaves_memory_to_others(channel, kind, receiver):
    with kind(channel, max_bytes=MIB) as tx, receiver(channel) as rx:
        tx.send(np.zeros(64, np.uint8))
        assert tx.statistics().slots >= 16
        assert tx.statistics().ring_bytes <= MIB // 4
        tx.send(np.zeros(512 * KIB, np.uint8))  # fewer than 16, down to one
        assert tx.statistics().rings == 2
        assert [rx.recv(timeout=PATIENCE).nbytes for _ in range(2)] == [64, 512 * KIB]


@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_a_small_message_first_leaves_room_for_several_large_ones(channel, kind, receiver):
    """A ring for the first one's size alone would hold one of the others at a time."""
    with kind(channel) as tx, receiver(channel) as rx:
        tx.send(np.zeros(64, np.uint8))
        assert int(rx.recv(timeout=PATIENCE).value.sum()) == 0
        for _ in range(16):
            tx.send(np.zeros(200 * KIB, np.uint8), timeout=0)
        assert tx.statistics().rings == 2
        for _ in range(16):
            rx.recv(timeout=PATIENCE).release()


@pytest.mark.parametrize("nbytes", [None, 4 * KIB])
@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_rings_grow_by_the_size_of_what_is_sent(channel, kind, receiver, nbytes):
    """Not by the largest message so far."""
    with kind(channel, full="grow", slot_bytes=nbytes) as tx, receiver(channel) as rx:
        tx.send(np.zeros(4 * MIB, np.uint8))
        large = tx.statistics()
        for _ in range(large.slots):
            tx.send(np.zeros(16, np.uint8))
        grown = tx.statistics()
        assert grown.rings == large.rings + 1
        assert grown.ring_bytes - large.ring_bytes < 8 * MIB
        assert [rx.recv(timeout=PATIENCE).nbytes for _ in range(1 + large.slots)] == [4 * MIB] + [16] * large.slots


@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_a_message_of_several_slots_is_sent_by_the_compiled_call_alone(channel, kind, receiver, monkeypatch):
    if native.module is None:
        pytest.skip("nothing is compiled")
    with kind(channel) as tx, receiver(channel) as rx:
        tx.send(np.zeros(64, np.uint8))
        rx.recv(timeout=PATIENCE).release()
        monkeypatch.setattr(kind, "_put", None)  # what is left to the endpoint
        for nbytes in (KIB + 1, 3 * KIB, 128 * KIB):
            tx.send(np.full(nbytes, nbytes % 251, np.uint8))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.nbytes == nbytes
                assert (message.value == nbytes % 251).all()
        monkeypatch.undo()
        assert tx.statistics().rings == 1
        tx.send(np.zeros(129 * KIB, np.uint8))  # fewer than eight of these: a ring of its own
        assert tx.statistics().rings == 2
        rx.recv(timeout=PATIENCE).release()


def test_small_messages_beside_large_ones_that_max_bytes_gives_few_slots(channel, monkeypatch):
    if native.module is None:
        pytest.skip("nothing is compiled")
    with shmtensor.Publisher(channel, max_bytes="8MiB") as tx, shmtensor.Subscriber(channel) as rx:
        tx.send(np.zeros(MIB, np.uint8))
        assert tx.statistics().slots < 8
        rx.recv(timeout=PATIENCE).release()
        monkeypatch.setattr(shmtensor.Publisher, "_put", None)  # what is left to the endpoint
        for number in range(9):
            tx.send(np.full(8, number, np.uint8))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value[0] == number


def test_history_keeps_a_slot_free(channel):
    with shmtensor.Publisher(channel, history=3, max_bytes="64KiB") as pub:
        for number in range(8):
            pub.send(np.full(4 * KIB, number, np.uint8), timeout=PATIENCE)
        assert pub.statistics().slots >= 4


def test_sizes_of_all_kinds_fit_into_the_order_table(channel):
    with shmtensor.Publisher(channel, history=1) as pub:
        for nbytes in range(KIB, 36 * 4 * KIB, 4 * KIB):
            pub.send(np.zeros(nbytes, np.uint8))
        assert pub.statistics().rings > 30


def test_the_rule():
    assert SIZED.slots(1) == 1024
    assert SIZED.slots(1 << 40) == 16
    assert Sizing.exactly(7).slots(1) == Sizing.exactly(7).slots(1 << 40) == 7
    assert Sizing(16, 2, 256 * MIB).slots(100 * MIB) == 2


@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_slots_larger_than_any_are_the_callers_to_change(channel, kind, receiver):
    for nbytes in ((1 << 44) + 1, 1 << 62, 1 << 64, "9" * 100, 10**400):
        with pytest.raises(shmtensor.ResourceError, match=r"at most 16\.0 TiB: pass a smaller slot_bytes"):
            kind(channel, slot_bytes=nbytes)
    for nbytes in (1 << 43, 1 << 44):
        with pytest.raises(shmtensor.ResourceError, match=r"TiB: pass fewer slots \(slots=1048576\)"):
            kind(channel, slots=1 << 20, slot_bytes=nbytes)
    with kind(channel, full="grow") as tx, receiver(channel) as rx:
        for length in ((1 << 44) + 1, 1 << 60):
            for timeout in (None, 0):
                with pytest.raises(shmtensor.ResourceError, match="or a smaller message"):
                    tx.loan(length, "u1", timeout=timeout)
                with pytest.raises(shmtensor.ResourceError, match="or a smaller message"):
                    tx.send(np.broadcast_to(np.zeros(1, "u1"), length), timeout=timeout)
        tx.send(np.zeros(3))
        assert len(rx.recv(timeout=PATIENCE).value) == 3


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "receiver"), KINDS)
def test_a_loop_that_keeps_its_last_message_leaves_room_for_the_next(channel, kind, receiver, slots):
    """`for msg in rx` holds a message until it has the next one: that one must find a place beside it."""
    rng = random.Random(slots)
    sizes = [rng.randint(1, slots) for _ in range(200)]
    with kind(channel, slots=slots, slot_bytes=KIB) as tx, receiver(channel) as rx:
        for size in sizes:
            tx.send(np.full(size * KIB, size, np.uint8), timeout=0)
            kept = rx.recv(timeout=PATIENCE)
            assert int(kept.value[-1]) == size
