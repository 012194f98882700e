"""`close()` in a signal handler or a finalizer, in the thread that is inside a call of the same client or server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import signal
import threading

import pytest
import torch

import shmtensor
from shmtensor import ClosedError
from shmtensor.rpc.request import TakenRequest

from ..conftest import shared_files
from ..waiting import wait_until
from .services import PATIENCE
from .test_requests import serving

TIMES = 20


@contextlib.contextmanager
def on_alarm(close):
    """In the block, `arm(seconds)` has a signal handler call `close` then; it says when it has returned."""
    closed = threading.Event()

    def handler(number, frame) -> None:
        close()
        closed.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield closed, lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def plain():
    return torch.zeros(4)


def fill(client) -> None:
    for _ in range(3):
        client.request(plain(), timeout=PATIENCE)


WAITING = {
    "request": lambda client: client.request(plain()),
    "request with a deadline": lambda client: client.request(plain(), timeout=PATIENCE),
    "result": lambda client: client.submit(plain()).result(),
    "map": lambda client: list(client.map([plain()] * 5)),
    "no room": lambda client: [client.submit(plain()) for _ in range(3)],
    "wait_for_servers": lambda client: client.wait_for_servers(5),
}


@pytest.mark.parametrize("call", WAITING)
def test_a_client_that_waits_ends_with_closed_error(channel, call):
    """Nobody answers: it waits until its signal handler closes it."""
    with shmtensor.Server(channel), shmtensor.Client(channel, slots=2) as client:
        with on_alarm(client.close) as (closed, arm):
            arm(0.05)
            with pytest.raises(ClosedError):
                WAITING[call](client)
            assert closed.is_set()
        assert client.closed


TAKING = {
    "recv": lambda server: server.recv(),
    "recv in time": lambda server: server.recv(timeout=PATIENCE),
    "iteration": lambda server: list(server),
    "run": lambda server: server.run(torch.neg),
}


@pytest.mark.parametrize("batch", [None, 2], ids=["one", "batch"])
@pytest.mark.parametrize("call", TAKING)
def test_a_server_that_waits_ends(channel, call, batch):
    with shmtensor.Server(channel, max_batch=batch) as server, on_alarm(server.close) as (closed, arm):
        arm(0.05)
        with pytest.raises(ClosedError) if "recv" in call else contextlib.nullcontext():
            TAKING[call](server)
        assert closed.is_set()
        assert server.closed


def test_a_server_may_be_closed_by_its_handler(channel):
    """What it had taken goes to another server."""
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as server:
        future = client.submit(plain(), timeout=PATIENCE)
        server.run(lambda value: server.close())
        assert server.closed
        with shmtensor.Server(channel) as other, serving(other, torch.neg):
            assert future.result(PATIENCE).tolist() == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("call", ["request", "result", "map"])
def test_a_client_closed_at_random_times(channel, call):
    """By a signal handler, wherever its thread is: nothing hangs, and nothing is left."""
    dice = random.Random(3)
    with shmtensor.Server(channel) as server, serving(server, lambda value: value):
        before = sum(channel in name for name in shared_files())
        for _ in range(TIMES):
            client = shmtensor.Client(channel)
            with on_alarm(client.close) as (closed, arm):
                arm(dice.uniform(1e-6, 6e-3))
                with pytest.raises(ClosedError):
                    while True:
                        WAITING[call](client)
            assert closed.is_set()
            assert client.closed
            del client
        wait_until(lambda: sum(channel in name for name in shared_files()) == before)  # when its server has looked


@pytest.mark.slow
def test_a_server_closed_at_random_times(channel):
    """Its requests go to the one that follows it."""
    dice = random.Random(4)
    with shmtensor.Client(channel) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        ended = threading.Event()

        def ask() -> int:
            number = 0
            while not ended.is_set():
                number += 1
                assert client.request(torch.full((4,), number), timeout=PATIENCE).tolist() == [number] * 4
            return number

        asked = threads.submit(ask)
        for _ in range(TIMES):
            server = shmtensor.Server(channel, max_attempts=250)
            with on_alarm(server.close) as (closed, arm):
                arm(dice.uniform(1e-6, 20e-3))
                server.run(lambda value: value)
            assert closed.is_set()
            assert server.closed
        with shmtensor.Server(channel, max_attempts=250) as server, serving(server, lambda value: value):
            ended.set()
            assert asked.result(PATIENCE)


class Closes:
    """An object of a user's whose finalizer closes a client or a server."""

    def __init__(self, close) -> None:
        self.close, self.me = close, self

    def __del__(self) -> None:
        self.close()


@pytest.mark.slow
def test_a_finalizer_that_closes(channel):
    """It runs wherever the garbage collector comes by: here at each allocation, so that it is inside of calls, too."""
    import gc

    threshold = gc.get_threshold()
    with shmtensor.Server(channel) as server, serving(server, lambda value: value):
        for number in range(TIMES):
            client = shmtensor.Client(channel)
            client.request({"a": plain()}, timeout=PATIENCE)
            Closes(client.close)
            gc.set_threshold(1 + number, 1, 1)
            try:
                with pytest.raises(ClosedError):
                    while True:
                        client.request({"a": plain()}, timeout=PATIENCE)
            finally:
                gc.set_threshold(*threshold)
            assert client.closed


def test_a_request_that_waited_for_its_batch_was_not_tried(channel):
    """The server has closed, and has not died: another one gets it, also if it may be tried once only."""
    with shmtensor.Client(channel) as client, shmtensor.Server(channel, max_batch=8, max_wait=PATIENCE) as server:
        future = client.submit(torch.arange(3), timeout=PATIENCE, retry=False)
        thread = threading.Thread(target=list, args=(server,))
        thread.start()
        wait_until(lambda: server.statistics().taken)
        server.close()
        thread.join(PATIENCE)
        with shmtensor.Server(channel) as other:
            request = other.recv(timeout=PATIENCE)
            assert request.attempt == 1
            request.reply(request.value)
            assert future.result(PATIENCE).tolist() == [0, 1, 2]
        del request


def test_a_close_that_was_cut_short_gives_its_request_to_another_server(channel, monkeypatch):
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as server:
        future = client.submit(torch.arange(3), timeout=PATIENCE)
        request = server.recv(timeout=PATIENCE)

        def cut_short(record):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(TakenRequest, "give_back", cut_short)
        with pytest.raises(KeyboardInterrupt):
            server.close()
        server.close()
        with shmtensor.Server(channel) as other:
            again = other.recv(timeout=PATIENCE)
            again.reply(again.value)
            assert future.result(PATIENCE).tolist() == [0, 1, 2]
        del request
