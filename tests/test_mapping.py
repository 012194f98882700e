"""`Client.map` and busy servers: how long it rests, and that all replies come whatever it does."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.rpc.mapping import LONGEST_S, MOST, SHORTEST_S, Pace

from . import services

PATIENCE = services.PATIENCE


def _rest(each: float, window: int, queued: int) -> float:
    """After a window's replies that came so many seconds apart."""
    pace = Pace()
    assert pace.rest(100.0, window, queued) == 0.0
    pace.got = window
    return pace.rest(100.0 + window * each, window, queued)


@pytest.mark.parametrize("queued", [2, 3, 4, 7, 16, 1000])
def test_half_of_what_no_server_has_taken_is_rested_for(queued):
    assert _rest(1e-3, max(queued, 4), queued) == pytest.approx(min(queued // 2, MOST) * 1e-3)


@pytest.mark.parametrize(
    ("each", "queued"),
    [(1e-3, 0), (1e-3, 1), (SHORTEST_S * 0.9, 2), (1e-5, 16), (LONGEST_S * 0.51, 16)],
    ids=["all taken", "one left", "too short", "fast", "slow"],
)
def test_nobody_rests_where_it_would_gain_nothing(each, queued):
    assert _rest(each, 16, queued) == 0.0


def test_no_rest_is_longer_than_the_limit():
    assert _rest(LONGEST_S * 0.49, 16, 16) == LONGEST_S


def test_the_pace_is_that_of_a_window():
    pace = Pace()
    pace.rest(1.0, 8, 8)
    pace.got = 7  # what was sent at first waited for others: too few to tell
    assert pace.rest(1.1, 8, 8) == 0.0
    pace.got = 8
    assert pace.rest(1.016, 8, 4) == pytest.approx(2 * 2e-3)
    pace.got = 3  # until there are as many again, the pace is the one before
    assert pace.rest(2.0, 8, 4) == pytest.approx(2 * 2e-3)


def test_servers_that_starve_do_not_make_a_rest_longer():
    """The replies seem slow then; the rests come back to half of what waits all the same."""
    service, window, pace, now = 1e-3, 6, Pace(), 0.0
    rest, left = LONGEST_S, 0.0
    for _ in range(200):
        left += max(rest, service)
        now += max(rest, service)
        answered = min(window, int(left / service))
        left = left % service if answered < window else 0.0
        pace.got += answered
        rest = pace.rest(now, window, window - 1)
    assert service <= rest <= (window - 1) // 2 * service * 1.01


def _tensor(number):
    return torch.full((8,), number)


def _dict(number):
    return {"values": np.full(3, number), "number": number}


def _number(reply):
    return int(reply["values"][2]) if isinstance(reply, dict) else int(reply[7])


@pytest.mark.parametrize("make", [_tensor, _dict])
def test_a_map_is_not_woken_for_each_reply_of_a_busy_server(channel, make):
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
        assert sleeps < count * 0.6
    assert client.statistics().duplicates == 0


def test_a_map_rests_beside_requests_of_other_threads(channel):
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


def test_a_rest_ends_when_the_client_is_closed_meanwhile(channel):
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
