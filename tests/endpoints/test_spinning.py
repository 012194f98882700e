"""When waits spin: one policy, with a clock of the test's own, so that nothing here is timed."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor.endpoints import spinning
from shmtensor.endpoints.spinning import BURST_NS, LONG_YIELD_S, LOOK_S, MOST_SKIPPED, Spin

from ..waiting import PATIENCE, wait_until

EACH = 2**-20
"""Seconds that a yield takes, exact in binary."""


class Machine:
    """A clock that only yields move, and something that is found at a time."""

    def __init__(self, count=2, each=EACH):
        self.now, self.count, self.each = 100.0, count, each
        self.yields, self.looks, self.asked = 0, [], 0
        self.there_at = float("inf")

    def spin(self, seconds=100 * EACH):
        return Spin(seconds, clock=lambda: self.now, processors=self._processors, give_way=self._give_way)

    def _processors(self):
        self.asked += 1
        return self.count

    def _give_way(self):
        self.yields += 1
        self.now += self.each

    def look(self, nanoseconds):
        self.looks.append(nanoseconds)
        return "found" if self.now >= self.there_at else None


def test_a_spin_looks_and_yields_by_turns_until_its_time_is_up():
    machine = Machine()
    assert machine.spin(10 * EACH).wait(machine.look) is None
    assert machine.yields == 10
    burst = int(10 * EACH * 1e9)  # no longer than the spin itself
    assert machine.looks == [burst, *[0, burst] * 10]


def test_a_spin_returns_what_it_finds():
    machine = Machine()
    machine.there_at = machine.now + 5 * EACH
    assert machine.spin().wait(machine.look) == "found"
    assert machine.yields == 5


def test_what_is_there_at_once_takes_no_yield():
    machine = Machine()
    machine.there_at = 0
    assert machine.spin().wait(machine.look) == "found"
    assert machine.yields == 0


@pytest.mark.parametrize("most", [0, 50])
def test_a_spin_ends_with_its_callers_time(most):
    machine = Machine()
    assert machine.spin(1.0).wait(machine.look, most * EACH) is None
    assert machine.yields == most


def test_no_spin_is_wanted():
    machine = Machine()
    spin = machine.spin(0)
    assert spin.wait(machine.look) is None
    assert (machine.yields, machine.looks, spin.burst_ns) == (0, [], 0)


@pytest.mark.parametrize("seconds", [100 * EACH, 1.0])
def test_one_processor_is_given_away_once(seconds):
    machine = Machine(count=1)
    spin = machine.spin(seconds)
    assert spin.wait(machine.look) is None
    assert (machine.yields, machine.looks, spin.burst_ns) == (1, [0], 0)


def test_a_processor_that_is_wanted_elsewhere_ends_the_spin():
    machine = Machine(each=2 * LONG_YIELD_S)
    assert machine.spin(1.0).wait(machine.look) is None
    assert machine.yields == 1
    assert machine.looks == [BURST_NS, 0]


def test_a_spin_that_waited_for_its_processor_was_in_vain_whatever_it_found():
    machine = Machine(each=2 * LONG_YIELD_S)
    spin = machine.spin(1.0)
    for _ in range(2):
        machine.there_at = machine.now + LONG_YIELD_S
        assert spin.wait(machine.look) == "found"
        assert spin.burst_ns == 0
    assert spin.wait(machine.look) is None
    assert machine.yields == 2


def test_what_is_there_right_after_a_yield_is_yielded_for_at_once():
    machine = Machine()
    spin = machine.spin()
    for _ in range(3):
        machine.looks.clear()
        machine.there_at = machine.now + EACH
        assert spin.wait(machine.look) == "found"
        assert spin.burst_ns == 0
    assert machine.looks == [0]
    machine.there_at = machine.now + 3 * EACH
    assert spin.wait(machine.look) == "found"
    machine.there_at = 0
    assert spin.wait(machine.look) == "found"
    machine.there_at = machine.now + 2 * EACH
    machine.looks.clear()
    assert spin.wait(lambda most: machine.look(most) if most else None) == "found"  # in a burst, not after the yield
    assert spin.burst_ns == BURST_NS


def test_after_spins_in_vain_more_and_more_waits_sleep_at_once():
    machine = Machine()
    spin, skipped = machine.spin(), []
    for _ in range(10):
        before = machine.yields
        count = -1
        while machine.yields == before:
            assert spin.wait(machine.look) is None
            count += 1
        skipped.append(count)
        assert spin.burst_ns == 0  # the compiled module does not look for longer, either
    assert skipped == [0, 0, 1, 2, 4, 8, 16, 32, MOST_SKIPPED, MOST_SKIPPED]


def test_one_spin_that_finds_something_ends_the_back_off():
    machine = Machine()
    spin = machine.spin()
    for _ in range(20):
        spin.wait(machine.look)
    machine.there_at = 0
    while spin.wait(machine.look) is None:
        pass
    assert spin.burst_ns == BURST_NS
    machine.there_at = float("inf")
    yields = machine.yields
    for _ in range(2):
        spin.wait(machine.look)
    assert machine.yields == yields + 200


def test_the_processors_are_counted_again_now_and_then():
    machine = Machine()
    spin = machine.spin()
    machine.count = 1
    spin.wait(machine.look)
    assert machine.asked == 1
    machine.now += LOOK_S
    spin.wait(machine.look)
    assert machine.asked == 2
    assert spin.burst_ns == 0


# --- how many processors there are

V2 = "0::/a/b\n"
V1 = "4:cpu,cpuacct:/a/b\n3:memory:/elsewhere\n0::/\n"


def groups(tmp_path, own, files):
    (tmp_path / "cgroup").write_text(own)
    for path, text in files.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return spinning.processor_quota(tmp_path / "cgroup", tmp_path / "groups")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        (V2, {"a/b/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2.0),
        (V2, {"a/b/cpu.max": "max 100000\n"}, float("inf")),
        (V2, {}, float("inf")),
        (V2, {"a/b/cpu.max": "nonsense"}, float("inf")),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "100000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 1.0),
        (V1, {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"}, 2.0),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, float("inf")),
        ("", {}, float("inf")),
    ],
)
def test_the_quota_is_the_least_of_the_groups(tmp_path, own, files, expected):
    assert groups(tmp_path, own, files) == expected


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert spinning.processor_quota(tmp_path / "absent", tmp_path) == float("inf")


@pytest.mark.parametrize(
    ("allowed", "quota", "expected"), [(1, 8.0, 1), (8, 1.9, 1), (8, 0.5, 1), (8, 3.0, 3), (4, float("inf"), 4)]
)
def test_usable_processors_are_the_fewer_of_affinity_and_quota(monkeypatch, allowed, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(spinning, "processor_quota", lambda: quota)
    assert spinning.usable_processors() == expected


# --- who uses it


@pytest.fixture
def one_processor():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    "pair", [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
)
def test_a_receiver_on_one_processor_does_not_spin(channel, pair, one_processor):
    """It falls asleep long before the end of its `spin=`."""
    with pair[0](channel) as tx, pair[1](channel, spin=10 * PATIENCE) as rx:
        got = []

        def receive():
            with rx.recv(timeout=PATIENCE) as message:
                got.append(int(message.value))

        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(lambda: not thread.is_alive() or tx._control_words[rx._asleep] & 1)
        tx.send(np.array(3))
        thread.join(PATIENCE)
        assert (got, rx._spin.burst_ns) == ([3], 0)


def test_a_sender_on_one_processor_does_not_spin(channel, one_processor):
    with shmtensor.Publisher(channel, slots=1) as tx, shmtensor.Subscriber(channel):
        tx.send(np.array(1))
        assert tx._spin.burst_ns == 0
        with pytest.raises(shmtensor.RingFull):
            tx.send(np.array(2), timeout=0.01)


def test_a_receiver_whose_spins_find_nothing_sleeps_at_once(channel):
    with shmtensor.Publisher(channel), shmtensor.Subscriber(channel, spin=1e-6) as rx:
        for _ in range(3):
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=1e-3)
        assert rx._spin.burst_ns == 0
