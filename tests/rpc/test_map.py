"""`Client.map` and busy servers: all replies come, in order, whoever else asks or closes."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.ring.pool import Pool

from ..waiting import wait_until
from . import services

PATIENCE = services.PATIENCE


@contextlib.contextmanager
def _busy_service(channel):
    """A client, and a server that needs a millisecond for each request, as one that waits for a device."""
    pause = threading.Event()

    def handler(value):
        pause.wait(1e-3)
        return value

    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        thread = threading.Thread(target=server.run, args=(handler,))
        thread.start()
        try:
            yield client
        finally:
            server.stop()
            thread.join(PATIENCE)


def _tensor(number):
    return torch.full((8,), number)


def _dict(number):
    return {"values": np.full(3, number), "number": number}


def _number(reply):
    return int(reply["values"][2]) if isinstance(reply, dict) else int(reply[7])


@pytest.mark.parametrize("make", [_tensor, _dict])
def test_all_replies_of_a_busy_server_come_in_order(channel, make):
    count = 300
    with _busy_service(channel) as client:
        replies = client.map((make(number) for number in range(count)), timeout=PATIENCE, window=8)
        assert [_number(reply) for reply in replies] == list(range(count))
        assert client.statistics().duplicates == 0


def test_a_map_runs_beside_requests_of_other_threads(channel):
    """Whoever waits receives for all."""
    done = []
    with _busy_service(channel) as client:

        def ask():
            done.extend(int(client.request(_tensor(number), timeout=PATIENCE)[0]) for number in range(50))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for each in asking:
            each.start()
        replies = client.map(map(_tensor, range(200)), timeout=PATIENCE, window=4)
        assert [_number(reply) for reply in replies] == list(range(200))
        for each in asking:
            each.join(PATIENCE)
    assert sorted(done) == sorted([*range(50), *range(50)])


def test_a_map_ends_when_the_client_is_closed_meanwhile(channel):
    got = []
    with _busy_service(channel) as client:
        closing = threading.Thread(target=lambda: (wait_until(lambda: len(got) > 3), client.close()))
        closing.start()
        replies = client.map(map(_tensor, itertools.repeat(1)), timeout=PATIENCE, window=8)
        with pytest.raises(shmtensor.ClosedError):
            for reply in replies:
                got.append(_number(reply))
        closing.join(PATIENCE)
    assert len(got) > 3


def test_a_map_whose_client_closes_as_it_counts_the_slots(channel, monkeypatch):
    slots = Pool.slots.fget

    def closing(pool):
        client.close()
        return slots(pool)

    with shmtensor.Client(channel) as client:
        future = client.submit(1)
        monkeypatch.setattr(Pool, "slots", property(closing))
        with pytest.raises(shmtensor.ClosedError):
            list(client.map([1, 2]))
        monkeypatch.undo()
        assert isinstance(future.exception(), shmtensor.ClosedError)
