"""Asynchronous exceptions in the calls of `Client` and `Server`: at every boundary, and at random times.

After each the endpoint works at once, no other call's reply is lost, a request that was taken is answered, and nothing
is left behind.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import threading

import pytest
import torch

import shmtensor
from shmtensor import TimedOut

from ..conftest import descriptors
from ..faults.interrupts import (
    each_boundary,
    interrupted,
    interrupted_at_random,
    note,
    random_count,
    random_signals,
    stride,
)
from ..waiting import wait_until
from .services import PATIENCE
from .test_requests import pair, serving  # noqa: F401

"""Signals at random times, for each call."""


pytestmark = pytest.mark.usefixtures("nothing_is_skipped", "implementation")


def plain(number: int):
    """What the compiled module sends, if there is one."""
    return torch.full((4,), number)


def tree(number: int):
    """What the Python code sends."""
    return {"number": torch.full((4,), number)}


KINDS = {"tensor": plain, "tree": tree}


def number_of(value) -> int:
    return int((value["number"] if isinstance(value, dict) else value).flatten()[0])


def echo(value):
    return value


def fail(value):
    raise LookupError


ASKED = {
    "request": lambda client, value: client.request(value, timeout=PATIENCE),
    "submit": lambda client, value: client.submit(value, timeout=PATIENCE).result(PATIENCE),
    "exception": lambda client, value: client.submit(value, timeout=PATIENCE).exception(PATIENCE),
    "cancel": lambda client, value: client.submit(value, timeout=PATIENCE).cancel(),
    "map": lambda client, value: list(client.map([value] * 3, timeout=PATIENCE)),
    "expired": lambda client, value: expired(client, value),
    "statistics": lambda client, value: (client.statistics(), client.wait_for_servers(1), repr(client)),
}


def expired(client, value) -> None:
    with contextlib.suppress(TimedOut):
        client.request(value, timeout=0)


def left_of(client) -> list:
    """Requests, replies and locks that are left."""
    in_flight = client._in_flight
    left = [name for name in ("calls", "ended", "given_up", "received", "followers") if getattr(in_flight, name)]
    left += [name for name in ("_requests", "_answers") if getattr(client, name)._mutex.locked()]
    left += ["leading"] if in_flight.leading.locked() else []
    client._answers._run(client._answers._end_dead_leases)  # as its next look does: an exception kept one untold
    return left + ["lease"] * client._answers.statistics().leases


def nothing_is_left(client) -> None:
    """Whatever was given up is gone soon."""
    wait_until(lambda: not left_of(client), lambda: left_of(client))


def assert_idle(server) -> None:
    """No request, and no slot but what the next look gives back: a view's death that an exception kept untold."""
    gc.collect()
    with pytest.raises(TimedOut):
        server.recv(timeout=0.3)
    assert (server.statistics().unfinished, server._receiver.statistics().leases) == (0, 0)


def answer_again(server, batch=None) -> None:
    """Requests that come again: whose reply was sent by a call that an exception ended before it had noted that."""
    with contextlib.suppress(TimedOut):
        while True:
            with server.recv(timeout=0.3) as request:
                assert all(each.attempt > 1 for each in (request if batch else [request]))
                request.reply(request.value)


def works(client, other, value, number) -> None:
    """What was asked before is answered, and what is asked now."""
    assert number_of(other.result(PATIENCE)) == -1
    assert number_of(client.request(value(number), timeout=PATIENCE)) == number


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ASKED)
def test_a_client_at_every_boundary(pair, call, kind):  # noqa: F811
    client, server = pair
    value, asked = KINDS[kind], ASKED[call]
    with serving(server, echo):
        for _ in range(3):
            client.request(value(0), timeout=PATIENCE)
        other = client.submit(value(-1), timeout=PATIENCE)
        for attempt in each_boundary(lambda: asked(client, value(7)), step=stride(7)):
            assert attempt.raised or not attempt.reached or attempt.swallowed
            attempt.result = None
            works(client, other, value, attempt.at)
            note(f"Client.{call} of a {kind}", attempt)
            del other
            nothing_is_left(client)
            other = client.submit(value(-1), timeout=PATIENCE)
        works(client, other, value, 1)
        del other
        assert attempt.at > 10


def taken_by_hand(server) -> None:
    request = server.recv(timeout=PATIENCE)
    request.reply(request.value)


def run(server) -> None:
    def last(value):
        server.stop()
        return value

    try:
        server.run(last)
    finally:
        server._stopping = False


def failed(server) -> None:
    with server.recv(timeout=PATIENCE) as request:
        request.fail("on purpose")


TAKEN = {"recv": lambda server: server.recv(timeout=PATIENCE), "run": run, "reply": None, "fail": None}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, 2], ids=["one", "batch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", TAKEN)
def test_a_server_at_every_boundary(channel, call, kind, batch):
    """Every request is answered with its own value, though each one's server was interrupted with it."""
    value, taken = KINDS[kind], TAKEN[call]
    with shmtensor.Server(channel, max_batch=batch) as server, shmtensor.Client(channel) as client:

        def answer(until) -> None:
            """Whatever there is, by this thread."""
            while not until():
                with contextlib.suppress(TimedOut), server.recv(timeout=0.01) as request:
                    request.reply(request.value)

        def ask() -> list:
            return [client.submit(value(number), timeout=PATIENCE) for number in range(2)]

        for _ in range(3):
            before = ask()
            answer(lambda before=before: all(future.done() for future in before))
        futures, mine = ask(), []
        if call in ("reply", "fail"):
            mine.append(server.recv(timeout=PATIENCE))

            def taken(server):
                mine[0].reply(mine[0].value) if call == "reply" else mine[0].fail("on purpose")

        for attempt in each_boundary(lambda: taken(server), step=stride(11)):
            assert attempt.raised or not attempt.reached or attempt.swallowed
            note(f"Server {call}, {kind}, {'batch' if batch else 'one'}", attempt)
            if call == "recv" and attempt.result is not None:
                attempt.result.reply(attempt.result.value)
            attempt.result = None
            for request in mine:
                for each in request if batch else [request]:
                    if not each.answered:
                        each.reply(each.value)
            request = each = None
            mine.clear()
            answer(lambda futures=futures: all(future.done() for future in futures))
            for number, future in enumerate(futures):
                if call == "fail" and future.exception() is not None:
                    assert future.exception().text == "on purpose"
                else:
                    assert number_of(future.result()) == number
            del future, number
            futures = ask()
            if call in ("reply", "fail"):
                mine.append(server.recv(timeout=PATIENCE))
        for request in mine:
            request.reply(request.value)
        request = None
        mine.clear()
        answer(lambda futures=futures: all(future.done() for future in futures))
        del futures, before
        answer_again(server, batch)
        nothing_is_left(client)
        assert not server._left
        assert not server._unfinished
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["client", "server"])
def test_close(channel, end):
    """What was cut short is finished by the next `close`; the request that is open fails, or is another server's, and
    nothing is left."""
    for at in range(1, 20_000, stride(421)):
        server, client = shmtensor.Server(channel), shmtensor.Client(channel)
        answered = client.submit(plain(0), timeout=PATIENCE)
        taken_by_hand(server)
        assert number_of(answered.result(PATIENCE)) == 0
        future = client.submit(plain(1), timeout=PATIENCE)
        taken = server.recv(timeout=PATIENCE)
        closing = client if end == "client" else server
        attempt = interrupted(closing.close, at)
        note(f"close of a {end}", attempt)
        closing.close()
        assert closing.closed
        if end == "client":
            with pytest.raises(shmtensor.ClosedError):
                future.result(0)
            with pytest.raises(shmtensor.ClosedError):
                client.submit(plain(2))
            taken.reply(taken.value)  # to nobody
            with shmtensor.Client(channel) as other:
                again = other.submit(plain(3), timeout=PATIENCE)
                taken_by_hand(server)
                assert number_of(again.result(PATIENCE)) == 3
            del other, again
        else:
            with pytest.raises(shmtensor.ClosedError):
                server.recv(timeout=0)
            with shmtensor.Server(channel) as other:
                taken_by_hand(other)
                assert number_of(future.result(PATIENCE)) == 1
            del other
        client.close()
        server.close()
        del server, client, closing, answered, future, taken
        gc.collect()
        assert [name for name in os.listdir("/dev/shm") if channel in name] == [], f"at boundary {at}"
        assert descriptors() == set(), f"at boundary {at}"
        if not attempt.reached:
            break
    assert at > 1000


@pytest.mark.slow
@pytest.mark.parametrize("call", ["request", "submit", "map"])
def test_a_client_at_random_times(pair, call):  # noqa: F811
    """Beside two threads that lead and follow: theirs lose no reply."""
    client, server = pair
    begun, ended = threading.Barrier(3), threading.Event()

    def ask(base: int) -> int:
        begun.wait(PATIENCE)
        number = 0
        while not ended.is_set():
            number += 1
            assert number_of(client.request(plain(base + number % 1000), timeout=PATIENCE)) == base + number % 1000
        return number

    with serving(server, echo), concurrent.futures.ThreadPoolExecutor(2) as threads:
        others = [threads.submit(ask, base) for base in (1000, 2000)]
        begun.wait(PATIENCE)
        interrupted = number = 0
        with random_signals(1, 2e-3) as arm:
            while interrupted < random_count(300) and not any(other.done() for other in others):
                number += 1
                value = plain(number % 1000)
                hit, got = interrupted_at_random(arm, lambda value=value: ASKED[call](client, value))
                interrupted += hit
                if not hit:
                    assert number_of(got[0] if call == "map" else got) == number % 1000
        ended.set()
        assert all(other.result(PATIENCE) for other in others)
        assert number_of(client.request(plain(5), timeout=PATIENCE)) == 5
        got = value = None
        nothing_is_left(client)


@pytest.mark.slow
def test_a_server_at_random_times(channel):
    """What `run` is interrupted with is answered all the same, with its own value."""
    with shmtensor.Server(channel, max_attempts=250) as server, shmtensor.Client(channel) as client:
        for value in (plain(0), tree(0)):  # to open the way of the replies takes longer than from alarm to alarm
            future = client.submit(value, timeout=PATIENCE)
            request = server.recv(timeout=PATIENCE)
            request.reply(request.value)
            future.result(PATIENCE)
        future = request = value = None
        ended = threading.Event()

        def ask() -> int:
            number = 0
            try:
                while not ended.is_set():
                    number += 1
                    value = plain(number) if number % 3 else tree(number)
                    assert number_of(client.request(value, timeout=PATIENCE)) == number
                return number
            finally:
                server.stop()

        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask)
            interrupted = 0
            with random_signals(2, 4e-3) as arm:
                while interrupted < random_count(300) // 5 and not asked.done():
                    interrupted += interrupted_at_random(arm, lambda: server.run(echo))[0]
            ended.set()
            server.run(echo)
            assert asked.result(PATIENCE)
        server._stopping = False
        answer_again(server)
        assert_idle(server)


@pytest.mark.parametrize("batch", [None, 2], ids=["one", "batch"])
def test_close_gives_back_what_an_interrupted_recv_had_taken(channel, monkeypatch, batch):
    """It had accepted the request, and could not return it."""
    server = shmtensor.Server(channel, max_batch=batch)
    accept = server._taken.accept

    def interrupted_accept(message, taken):
        accept(message, taken)
        raise KeyboardInterrupt

    with server, shmtensor.Server(channel) as other, shmtensor.Client(channel) as client:
        future = client.submit(plain(1), timeout=PATIENCE, retry=False)  # it was not begun
        monkeypatch.setattr(server._taken, "accept", interrupted_accept)
        with pytest.raises(KeyboardInterrupt):
            server.recv(timeout=PATIENCE)
        server.close()
        taken_by_hand(other)
        assert number_of(future.result(PATIENCE)) == 1


def keeps_it(value) -> None:
    kept = value[1:]
    raise KeyboardInterrupt(len(kept))


@pytest.mark.parametrize("call", ["run", "run_each"])
def test_an_exception_that_is_kept_does_not_keep_its_request(channel, call):
    """Its traceback has the frames of the handler, whose variables are views of the request."""
    with shmtensor.Server(channel) as server, shmtensor.Server(channel) as other, shmtensor.Client(channel) as client:
        future = client.submit(plain(1), timeout=PATIENCE)
        with pytest.raises(KeyboardInterrupt) as caught:
            if call == "run":
                server.run(keeps_it)
            else:
                server.run_each(lambda request: keeps_it(request.value))
        with other.recv(timeout=PATIENCE) as request:
            assert request.attempt == 2
            request.reply(request.value)
        assert number_of(future.result(PATIENCE)) == 1
        assert "keeps_it" in [entry.name for entry in caught.traceback]
