"""The window over a network that loses, delays and repeats: every item arrives once and in order, memory is bounded."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from benchmarks import relay_window
from shmtensor.errors import WireError
from shmtensor.relay.window import Gap, Incoming, Outgoing, Unfinished

W, B = 16, 4000


def test_credit():
    window: Outgoing[str] = Outgoing()
    assert not window.may_add()
    assert not window.may_send(1)
    assert window.begin(2, 100, 0) == []
    assert window.add("ab") == [(1, "a"), (2, "b")]
    assert not window.may_add()
    assert window.may_send(1000), "nothing is under way: one of any size"
    window.note_sent(90)
    assert not window.may_send(11)
    assert window.may_send(10)
    assert window.acknowledge(0, [(2, 2)], 0) == ["b"]
    assert window.oldest == 1
    assert window.acknowledge(1, [], 90) == ["a"]
    assert window.oldest == 3
    assert window.may_send(1000)


def test_what_is_sent_and_not_received():
    window: Outgoing[str] = Outgoing()
    window.begin(9, 100, 0)
    window.add("abcde")
    assert [window.count_beyond(number) for number in (0, 2, 5)] == [5, 3, 0]
    window.drop(4)
    assert window.count_beyond(2) == 2
    assert window.get(4) is None
    assert window.get(5) == "e"
    assert window.numbered() == [(1, "a"), (2, "b"), (3, "c"), (5, "e")]


def test_what_cannot_be_true_is_refused():
    window: Outgoing[str] = Outgoing()
    window.begin(2, 100, 0)
    window.add("a")
    for acknowledged, ranges, consumed in ((2, [], 0), (0, [(2, 2)], 0), (0, [], 1)):
        with pytest.raises(WireError):
            window.acknowledge(acknowledged, ranges, consumed)
    with pytest.raises(WireError):
        window.begin(2, 100, 2)
    assert len(window) == 1


def test_numbers_that_nobody_needs_are_skipped():
    there = Incoming()
    there.start_at(5)
    assert there.accept(4, 5)
    there.receive(5)
    with pytest.raises(Gap):
        there.accept(6, 7)
    assert there.accept(5, 9)  # 6 to 8 were acknowledged by a far relay before
    there.receive(9)
    there.acknowledge(5)
    assert there.acknowledged == 8
    assert not there.accept(5, 9)
    there.acknowledge(11)
    there.acknowledge(12)
    there.acknowledge(14)
    assert there.ranges(2) == [(11, 12), (14, 14)]
    there.acknowledge(9)
    assert there.acknowledged == 9


def test_unfinished():
    words = memoryview(bytearray(32)).cast("Q")
    waiting = Unfinished()
    waiting.add(1, words, 0, 7)
    waiting.add(2, words, 1, 8)
    assert list(waiting.done()) == []
    words[1] = 20  # a later message of that slot is done: this one was
    assert list(waiting.done()) == [2]
    assert len(waiting) == 1


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("restarts", [False, True], ids=["cuts", "far restarts"])
def test_every_item_arrives(seed, restarts):
    """A connection that breaks at random, a far side that acknowledges out of order, and perhaps forgets everything."""
    rng = random.Random(seed)
    here: Outgoing[int] = Outgoing()
    there, arrived, buffered = Incoming(), [], []
    there.start_at(1)
    sent, to_send, after, total = 0, [], 0, 300
    while len(set(arrived)) < total or len(here):
        if rng.random() < 0.02:  # a new connection
            here.end()
            buffered.clear()
            if restarts:
                there = Incoming()
                there.start_at(here.oldest)
            there.consumed = 0
            to_send = here.begin(W, B, there.received)
            after = there.received
        if to_send:
            number, item = to_send[0]
            if here.may_send(item % 700):
                here.note_sent(item % 700)
                to_send.pop(0)
                buffered.append((after, number, item))
                after = number
        elif sent < total and here.may_add():
            sent += 1
            to_send += here.add([sent])
        assert sum(item % 700 for _, _, item in buffered) <= B
        assert len(here) <= W
        if buffered and rng.random() < 0.5:
            behind, number, item = buffered.pop(0)
            if there.accept(behind, number):
                there.receive(number)
                arrived.append(item)
            there.consumed += item % 700
        if rng.random() < 0.3:
            for number in rng.sample(range(1, there.received + 1), min(3, there.received)):
                if number > there.acknowledged:
                    there.acknowledge(number)
            if rng.random() < 0.5 and here.messages:
                here.acknowledge(there.acknowledged, there.ranges(64), there.consumed)
    if restarts:
        assert set(arrived) == set(range(1, total + 1))
    else:
        assert arrived == list(range(1, total + 1))
    assert here.oldest == total + 1


def test_runs_that_are_acknowledged_in_any_order():
    """As many as a set of numbers would say; and a jump of any width costs one run."""
    for seed in range(200):
        noise = random.Random(seed)
        incoming, known, received = Incoming(), set(), 0
        for _ in range(60):
            number = received + noise.choice([1, 1, 1, 2, 5])
            assert incoming.accept(received, number)
            known.update(range(received + 1, number))
            incoming.receive(number)
            received = number
            for done in noise.sample(range(1, received + 1), min(received, 2)):
                incoming.acknowledge(done)
                known.add(done)
            runs = [(1, incoming.acknowledged), *incoming.ranges(1 << 20)]
            assert {number for first, last in runs for number in range(first, last + 1)} == known
            assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs))
    incoming = Incoming()
    incoming.accept(0, 1)
    incoming.receive(1)
    incoming.accept(1, 1 << 60)
    incoming.receive(1 << 60)
    assert incoming.ranges(9) == [(2, (1 << 60) - 1)]
    incoming.acknowledge(1)
    incoming.acknowledge(1 << 60)
    assert (incoming.acknowledged, incoming.ranges(9)) == (1 << 60, [])


def test_what_is_passed_over_counts_as_received():
    """STATE says both numbers while the item behind them waits for a slot."""
    incoming = Incoming()
    assert incoming.accept(0, 1000)
    assert incoming.acknowledged == incoming.received == 999


def test_the_page_shows_what_the_simulation_says(capsys):
    """docs/internals/relay.md, "Links with delay": the simulation is exact, so it says the same everywhere."""
    relay_window.main()
    page = (Path(__file__).parents[2] / "docs/internals/relay.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in page
