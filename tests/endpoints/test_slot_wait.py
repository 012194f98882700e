"""A sender that found no slot: woken when there is room for a batch, and by any slot where that takes long."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import shmtensor
from shmtensor.endpoints import sender
from shmtensor.memory.semaphores import BATCHED, BY_FIFO, COUNT, Sleeper, batched, is_woken_by

from ..waiting import PATIENCE, wait_until

PAIRS = [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
EVER = 10 * PATIENCE


@pytest.mark.parametrize("target", [1, 2, 77, 1 << 30, COUNT, COUNT + 1, COUNT + 5, 1 << 40])
@pytest.mark.parametrize("count", [1, 12345, COUNT])
def test_a_word_says_from_which_message_on(count, target):
    word = batched(count, target)
    assert word & COUNT == count
    assert word & 1
    assert word & BATCHED
    assert not word & BY_FIFO
    assert 0 <= word < 1 << 64
    assert [is_woken_by(word, target + step) for step in (-2, -1, 0, 1, 2, 1 << 20)] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("word", [1, COUNT, 5 | BY_FIFO])
def test_another_word_is_woken_by_every_message(word):
    assert all(is_woken_by(word, seq) for seq in (1, COUNT, 1 << 40))


@contextmanager
def full_ring(channel, pair, slots, monkeypatch, messages=None):
    """A sender that waits in a thread of its own, and the messages that its receiver holds."""
    monkeypatch.setattr(sender, "LIVENESS_INTERVAL", EVER)  # nobody looks around
    with pair[0](channel, slots=slots, slot_bytes=64) as tx, pair[1](channel, **options(pair)) as rx:
        tx._spin = sender.Spin(0.0)
        sent = []
        for number in range(slots):
            sent.append(tx.send(torch.tensor(number)))
        held = [rx.recv(timeout=PATIENCE) for _ in range(slots)]
        thread = threading.Thread(target=lambda: sent.append(tx.send(torch.tensor(-1), timeout=PATIENCE)))
        thread.start()
        try:
            yield tx, rx, held, sent
        finally:
            for message in held:
                message.release()
            thread.join(PATIENCE)
            if len(sent) > slots:
                rx.recv(timeout=PATIENCE).release()


def options(pair):
    return {"acknowledge": "release"} if pair[0] is shmtensor.Producer else {}


def word_of(tx):
    return tx._control_words[tx._asleep]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_sender_is_woken_when_there_is_room_for_a_batch(channel, pair, monkeypatch):
    monkeypatch.setattr(sender, "_BATCH_S", EVER)
    asleep, wait = threading.Event(), Sleeper.wait
    monkeypatch.setattr(Sleeper, "wait", lambda sleeper, seconds: (asleep.set(), wait(sleeper, seconds))[1])
    with full_ring(channel, pair, 16, monkeypatch) as (tx, rx, held, sent):
        assert asleep.wait(PATIENCE)  # after its last look for a slot
        for _ in range(3):
            held.pop(0).release()
            assert rx._readers[0]._posted == 0
        assert word_of(tx) & 1
        held.pop(0).release()
        wait_until(lambda: len(sent) == 17)
        assert rx._readers[0]._posted


@pytest.mark.parametrize("pair", PAIRS)
def test_the_last_message_of_all_wakes_in_any_order(channel, pair, monkeypatch):
    monkeypatch.setattr(sender, "_BATCH_S", EVER)
    with full_ring(channel, pair, 16, monkeypatch) as (tx, _, held, sent):
        wait_until(lambda: word_of(tx) & 1)
        held.pop().release()
        wait_until(lambda: len(sent) == 17)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_receiver_that_keeps_its_views_holds_up_no_sender_for_whom_there_is_a_slot(channel, pair, monkeypatch):
    """One slot comes back, and no other for long."""
    with full_ring(channel, pair, 16, monkeypatch) as (tx, _, held, sent):
        wait_until(lambda: word_of(tx) & 1)
        held.pop(0).release()
        wait_until(lambda: len(sent) == 17)
        assert len(held) == 15


@pytest.mark.parametrize("pair", PAIRS)
def test_the_sleep_that_follows_ends_with_any_slot(channel, pair, monkeypatch):
    with full_ring(channel, pair, 16, monkeypatch) as (tx, _, held, sent):
        wait_until(lambda: word_of(tx) & 1 and not word_of(tx) & BATCHED)
        held.pop(7).release()
        wait_until(lambda: len(sent) == 17)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("slots", [1, 7])
def test_few_slots_make_no_batch(channel, pair, slots, monkeypatch):
    monkeypatch.setattr(sender, "_BATCH_S", EVER)
    with full_ring(channel, pair, slots, monkeypatch) as (tx, _, held, sent):
        wait_until(lambda: word_of(tx) & 1)
        assert not word_of(tx) & BATCHED
        held.pop().release()
        wait_until(lambda: len(sent) == slots + 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_end_of_the_time_is_kept(channel, pair):
    with pair[0](channel, slots=16) as tx, pair[1](channel, **options(pair)) as rx:
        for number in range(16):
            tx.send(torch.tensor(number))
        with pytest.raises(shmtensor.RingFull):
            tx.send(torch.tensor(-1), timeout=3 * sender._BATCH_S)
        for _ in range(16):
            rx.recv(timeout=PATIENCE).release()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_loan_that_is_given_up_wakes_the_thread_that_waits_for_its_slot(channel, pair, monkeypatch):
    monkeypatch.setattr(sender, "LIVENESS_INTERVAL", EVER)
    with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
        loan, sent = tx.loan((2,), torch.int64), []
        thread = threading.Thread(target=lambda: sent.append(tx.send(torch.tensor(3))))
        thread.start()
        wait_until(lambda: word_of(tx) & 1)
        loan.discard()
        thread.join(PATIENCE)
        assert sent == [1]
        rx.recv(timeout=PATIENCE).release()
