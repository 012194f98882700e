"""Awake and asleep: wake-ups, idle processes, and no wake-up that is lost."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import psutil
import pytest

import shmtensor
from shmtensor.channel import control as ctl
from shmtensor.endpoints import receiver
from shmtensor.endpoints.base import LIVENESS_INTERVAL
from shmtensor.memory.words import store

from ..waiting import PATIENCE, wait_for_end, wait_until

PAIRS = [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]


@pytest.fixture
def no_liveness_checks(monkeypatch):
    """Nobody looks around: a wake-up that is lost is a hang."""
    monkeypatch.setattr(receiver, "LIVENESS_INTERVAL", 10 * PATIENCE)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_sleeper_is_woken_by_the_descriptor(channel, pair, no_liveness_checks):
    """The sleeper wakes by its inbox."""
    with pair[0](channel) as tx, pair[1](channel, spin=0) as rx:
        got = []

        def receive():
            for _ in range(50):
                with rx.recv(timeout=PATIENCE) as message:
                    got.append(int(message.value))

        thread = threading.Thread(target=receive)
        thread.start()
        for number in range(50):
            wait_until(lambda: not thread.is_alive() or tx._control_words[rx._asleep] & 1)
            tx.send(np.array(number))
            wait_until(lambda number=number: not thread.is_alive() or rx.statistics().received > number)
        thread.join(PATIENCE)
        assert got == list(range(50))
        assert tx.statistics().doorbells >= 1
        assert rx.statistics().late == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_an_awake_receiver_is_not_rung(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        for number in range(100):
            tx.send(np.array(number))
            assert int(rx.recv(timeout=PATIENCE).value) == number
        assert tx.statistics().doorbells == 0
        assert rx.statistics().sleeps == 0


def test_a_burst_rings_a_sleeper_once(channel):
    with shmtensor.Publisher(channel, slots=64) as tx, shmtensor.Subscriber(channel, spin=0) as rx:
        words = tx._control_words
        tx.send(np.array(-1))
        rx.recv(timeout=PATIENCE).release()
        words_asleep = rx._asleep
        store(words, words_asleep, 2 * 10 + 1)  # as if it slept
        for number in range(50):
            tx.send(np.array(number))
        assert tx.statistics().doorbells == 1
        store(words, words_asleep, 22)
        assert [int(rx.recv(timeout=PATIENCE).value) for _ in range(50)] == list(range(50))


@pytest.mark.parametrize("pair", PAIRS)
def test_timeouts_are_kept(channel, pair):
    with pair[0](channel), pair[1](channel) as rx:
        start = time.monotonic()
        with pytest.raises(shmtensor.TimedOut, match=r"0\.05 s"):
            rx.recv(timeout=0.05)
        assert time.monotonic() - start >= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_random_pauses_lose_no_wake_up(channel, pair, no_liveness_checks):
    """Sender and sleeper race for thousands of sleeps."""
    count = 3000
    tx = pair[0](channel, slots=8)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pair[1](channel, spin=0) as rx:
                got = [int(rx.recv(timeout=PATIENCE).value) for _ in range(count)]
                sleeps, late = rx.statistics().sleeps, rx.statistics().late
            code = 0 if got == list(range(count)) and sleeps > 0 and late == 0 else 2
        finally:
            os._exit(code)
    wait = tx.wait_for_subscribers if hasattr(tx, "wait_for_subscribers") else tx.wait_for_consumers
    # the endpoint was made before the fork and is used in the parent only
    wait(1, timeout=PATIENCE)
    rng = np.random.default_rng(0)
    asleep = next(ctl.asleep_word(entry.index) for entry in tx._member.peers())
    for number in range(count):
        if number % 10 == 0:
            wait_until(lambda: tx._control_words[asleep] & 1)
        tx.send(np.array(number), timeout=PATIENCE)
        for _ in range(int(rng.integers(0, 300))):
            pass
    wait_for_end(child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tx.close()


@pytest.mark.slow
def test_idle_receivers_use_no_cpu(channel):
    """Four idle subscribers: what they use is bounded by their ticks (CPU time, not wall time, is measured).

    Several times, for what has nothing to do with them: their start, and caches that other programs take.
    """
    children = []
    with shmtensor.Publisher(channel) as pub:
        for _ in range(4):
            child = os.fork()
            if child == 0:
                try:
                    with shmtensor.Subscriber(channel) as sub:
                        for _ in sub:
                            pass
                finally:
                    os._exit(0)
            children.append(child)
        pub.wait_for_subscribers(4, timeout=PATIENCE)
        processes = [psutil.Process(child) for child in children]
        for _ in range(10):
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            start = time.monotonic()
            while time.monotonic() - start < 3 * LIVENESS_INTERVAL + 1.5:
                time.sleep(0.1)
            used = sum(sum(process.cpu_times()[:2]) for process in processes) - before
            wall = time.monotonic() - start
            if used < 0.05 * wall:
                break
    for child in children:
        os.waitpid(child, 0)
    assert used < 0.05 * wall


def test_ctrl_c_ends_a_sleeping_recv_at_once(channel):
    import signal
    import subprocess
    import sys

    source = (
        "import sys, shmtensor\nsub = shmtensor.Subscriber(sys.argv[1])\nprint('ready', flush=True)\n"
        "try:\n    sub.recv()\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", source, channel], stdout=subprocess.PIPE, text=True)
    with shmtensor.Publisher(channel) as pub:
        assert child.stdout.readline() == "ready\n"
        pub.wait_for_subscribers(1, timeout=PATIENCE)
        words = pub._control_words
        asleep = next(ctl.asleep_word(entry.index) for entry in pub._member.peers())
        wait_until(lambda: words[asleep] & 1)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=PATIENCE)
        assert out == "interrupted\n"
        assert child.returncode == 0
