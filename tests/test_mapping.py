"""`Client.map` and busy servers: how long it rests, and that all replies come whatever it does."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.rpc import mapping
from shmtensor.rpc.mapping import LONGEST_S, SHORTEST_S, WARY_MOST, Pace

from . import services

PATIENCE = services.PATIENCE


SPIN = 100e-6


def _told(pace: Pace, each: float, most: int, got: int = 8) -> float:
    """The rest after replies that were waited for so many seconds each, in a window of eight."""
    pace.got += got
    pace.waited += got * each
    return pace.rest(8, most)


def _pace(each: float) -> Pace:
    """After a window of such replies."""
    pace = Pace(SPIN)
    assert pace.rest(8, 8) == _told(pace, each, 8) == 0.0
    return pace


@pytest.mark.parametrize("most", [2, 3, 4, 7, 8])
def test_half_of_what_keeps_the_servers_busy_is_rested_for(most):
    pace = _pace(1e-3)
    assert _told(pace, 1e-3, most) == pytest.approx(most // 2 * 1e-3)
    assert pace.rests


@pytest.mark.parametrize(
    ("each", "most"),
    [(1e-3, 0), (1e-3, 1), (SHORTEST_S * 0.9, 2), (SPIN * 0.9, 100), (LONGEST_S * 0.51, 16)],
    ids=["all taken", "one left", "too short", "awake", "slow"],
)
def test_nobody_rests_where_it_would_gain_nothing(each, most):
    pace = _pace(each)
    assert _told(pace, each, most) == 0.0
    assert not pace.rests


def test_no_rest_is_longer_than_the_limit():
    assert _told(_pace(LONGEST_S * 0.49), LONGEST_S * 0.49, 16) == LONGEST_S


def test_the_pace_is_that_of_the_faster_of_two_windows():
    pace = _pace(2e-3)
    assert _told(pace, 1e-3, 4) == pytest.approx(2 * 1e-3)
    assert _told(pace, 4e-3, 4) == pytest.approx(2 * 1e-3)
    assert _told(pace, 3e-3, 4, got=7) == pytest.approx(2 * 1e-3)  # too few to tell
    assert _told(pace, 3e-3, 4, got=1) == pytest.approx(2 * 3e-3)


def test_after_rests_that_were_too_long_there_are_fewer():
    pace, counts = _pace(1e-3), []
    assert _told(pace, 1e-3, 8)
    for _ in range(8):
        pace.judge(0)
        count = 0
        while not _told(pace, 1e-3, 8):
            count += 1
        counts.append(count)
    assert counts == [0, 2, 6, 14, 30, WARY_MOST - 1, WARY_MOST - 1, WARY_MOST - 1]
    for _ in range(WARY_MOST):
        pace.judge(3)
    pace.judge(0)
    assert _told(pace, 1e-3, 8)


@pytest.fixture
def rests(monkeypatch):
    """How long each rest was, of the clients in this process."""
    seconds = []

    def sleep(each):
        seconds.append(each)
        time.sleep(each)

    monkeypatch.setattr(mapping, "sleep", sleep)
    return seconds


def _tensor(number):
    return torch.full((8,), number)


def _dict(number):
    return {"values": np.full(3, number), "number": number}


def _number(reply):
    return int(reply["values"][2]) if isinstance(reply, dict) else int(reply[7])


@pytest.mark.parametrize("make", [_tensor, _dict])
def test_a_map_is_not_woken_for_each_reply_of_a_busy_server(channel, make, rests):
    count, pause = 300, threading.Event()

    def handler(value):
        pause.wait(1e-3)  # what a device would take
        return value

    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        thread = threading.Thread(target=server.run, args=(handler,))
        thread.start()
        try:
            replies = client.map((make(number) for number in range(count)), timeout=PATIENCE, window=8)
            assert [_number(reply) for reply in replies] == list(range(count))
            sleeps = client._answers.statistics().sleeps
        finally:
            server.stop()
            thread.join(PATIENCE)
        assert rests
        assert sleeps < count
    assert client.statistics().duplicates == 0


def test_a_map_rests_beside_requests_of_other_threads(channel, rests):
    """Whoever waits receives for all: the one that rests holds nothing that they need."""
    pause, done = threading.Event(), []

    def handler(value):
        pause.wait(1e-3)
        return value

    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        thread = threading.Thread(target=server.run, args=(handler,))
        thread.start()

        def ask():
            done.extend(int(client.request(_tensor(number), timeout=PATIENCE)[0]) for number in range(50))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        try:
            for each in asking:
                each.start()
            replies = client.map(map(_tensor, range(200)), timeout=PATIENCE, window=4)
            assert [_number(reply) for reply in replies] == list(range(200))
            for each in asking:
                each.join(PATIENCE)
        finally:
            server.stop()
            thread.join(PATIENCE)
    assert sorted(done) == sorted([*range(50), *range(50)])
    assert rests


def test_a_rest_ends_when_the_client_is_closed_meanwhile(channel, rests):
    pause, taken = threading.Event(), 0

    def handler(value):
        pause.wait(1e-3)
        return value

    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        thread = threading.Thread(target=server.run, args=(handler,))
        thread.start()
        try:
            replies = client.map(map(_tensor, itertools.repeat(1)), timeout=PATIENCE, window=8)
            closing = threading.Timer(0.2, client.close)
            closing.start()
            with pytest.raises(shmtensor.ClosedError):
                for _ in replies:
                    taken += 1
            closing.join(PATIENCE)
        finally:
            server.stop()
            thread.join(PATIENCE)
    assert taken
    assert rests
