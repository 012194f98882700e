"""Request and reply: who answers, what arrives, what ends a request that cannot be answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import ArgumentError, ClosedError, PeerDied, RemoteError, TimedOut, WireError
from shmtensor.channel.names import control_name, reply_channel
from shmtensor.codec import decode
from shmtensor.endpoints.base import SenderTraits
from shmtensor.ring import pool as ring_pool
from shmtensor.ring.layout import SERVICE, WORK_QUEUE
from shmtensor.rpc import client as rpc_client
from shmtensor.rpc.calls import late
from shmtensor.rpc.endpoints import ReplySender
from shmtensor.rpc.request import record_of

from ..conftest import left_files, shared_files
from ..forkservers import preloaded
from ..waiting import complaints, wait_until
from . import services

PATIENCE = services.PATIENCE


@pytest.fixture
def pair(channel):
    """A client and a server in this process; tests take and answer requests by hand."""
    both = [shmtensor.Client(channel), shmtensor.Server(channel)]
    yield both
    for end in both:
        end.close()
    both.clear()  # what pytest keeps refers to nothing
    del end
    gc.collect()  # what refers to itself through an error's traceback ends its leases; its endpoint goes at the next


@contextlib.contextmanager
def serving(server, handler):
    """A thread that answers requests."""
    thread = threading.Thread(target=server.run, args=(handler,))
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def forks():
    with preloaded("tests.rpc.services", "shmtensor.rpc.server", "shmtensor.rpc.client") as context:
        yield context


class Process:
    """A process of `services`, and the pipe to it."""

    def __init__(self, context, role, *args):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=role, args=(theirs, *args))
        self.process.start()
        theirs.close()
        assert self.hear() == "here"

    def hear(self):
        assert self.pipe.poll(PATIENCE), "silent"
        return self.pipe.recv()

    def say(self, what) -> None:
        self.pipe.send(what)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        self.process.close()
        self.pipe.close()
        return code


# --- what arrives


def test_a_request_and_its_reply(pair):
    client, server = pair
    with serving(server, lambda value: value * 2):
        assert client.request(torch.arange(3), timeout=PATIENCE).tolist() == [0, 2, 4]
        assert client.request(np.arange(3), timeout=PATIENCE).tolist() == [0, 2, 4]


def test_values_are_trees_and_meta_travels(pair):
    client, server = pair
    future = client.submit({"x": torch.ones(2), "rest": [np.zeros(3, "i2"), "text", None]}, meta={"k": [1, 2]})
    req = server.recv(timeout=PATIENCE)
    assert req.meta == {"k": [1, 2]}
    assert req.value["rest"][1:] == ["text", None]
    req.reply({"y": (req.value["x"] + 1, 7)})
    y, number = future.result(timeout=PATIENCE)["y"]
    assert y.tolist() == [2, 2]
    assert number == 7


@pytest.mark.parametrize("size", [4, 256, 5000, 100_000])
def test_many_of_one_kind(pair, size):
    """The first goes by the Python code, the others by the compiled module if they are small."""
    client, server = pair
    with serving(server, lambda value: value + 1):
        for number in range(60):
            reply = client.request(torch.full((size,), float(number)), timeout=PATIENCE)
            assert reply.shape == (size,)
            assert (reply == number + 1).all()
    assert client.statistics().duplicates == 0


def test_replies_may_be_written_and_hold_their_slot(pair):
    client, server = pair
    with serving(server, lambda value: value):
        kept = [client.request(np.full(100, number), timeout=PATIENCE) for number in range(40)]
        kept += [client.request(torch.full((100,), number), timeout=PATIENCE) for number in range(40, 80)]
        for number, reply in enumerate(kept):
            assert (reply == number).all()
            reply += 1
        for number, reply in enumerate(kept):
            assert (reply == number + 1).all()


def test_a_reply_outlives_its_client_and_its_server(channel):
    server, client = shmtensor.Server(channel), shmtensor.Client(channel)
    with server, client, serving(server, lambda value: value):
        reply = client.request(np.arange(1000), timeout=PATIENCE)
    assert (reply == np.arange(1000)).all()
    assert shared_files()
    del reply
    assert not left_files()


def test_requests_hold_their_slot_until_their_views_die(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel, slots=1) as client:
        future = client.submit(np.arange(4))
        req = server.recv(timeout=PATIENCE)
        value = req.value
        req.reply(1)
        assert future.result(timeout=PATIENCE) == 1
        with pytest.raises(shmtensor.RingFull):
            client.request(np.arange(4), timeout=0.05)
        assert value.tolist() == [0, 1, 2, 3]
        del value
        with serving(server, lambda value: value):
            assert client.request(np.arange(4), timeout=PATIENCE).tolist() == [0, 1, 2, 3]


def test_map_keeps_the_order(pair):
    client, server = pair
    with serving(server, lambda value: value + 1):
        replies = client.map((np.full(2, number) for number in range(100)), timeout=PATIENCE)
        assert [int(reply[0]) for reply in replies] == list(range(1, 101))


def test_map_gives_up_the_rest_at_an_error(pair):
    client, server = pair

    def handler(value):
        if value[0] == 3:
            raise ValueError("three")
        return value

    with serving(server, handler):
        replies = client.map([np.full(2, number) for number in range(30)], timeout=PATIENCE, window=4)
        with pytest.raises(RemoteError, match="three"):
            list(replies)
    assert client.statistics().outstanding == 0


def test_futures_work_with_the_standard_library(pair):
    client, server = pair
    with serving(server, lambda value: -value):
        futures = {client.submit(np.full(2, number)): number for number in range(1, 30)}
        done, _ = concurrent.futures.wait(futures, timeout=PATIENCE)  # no thread of ours waits here
        assert {int(future.result()[0]) for future in done} == {-number for number in futures.values()}
        called = threading.Event()
        client.submit(np.ones(1)).add_done_callback(lambda future: called.set())
        assert called.wait(PATIENCE)
        assert len(list(concurrent.futures.as_completed([client.submit(1) for _ in range(5)], PATIENCE))) == 5


def test_the_threads_of_a_client_outlive_errors(pair, monkeypatch, caplog):
    """That of a callback, and that of a shortage of descriptors while a reply is received."""
    client, server = pair
    with serving(server, lambda value: value):
        client.submit(1).add_done_callback(lambda _: sys.exit("of a callback"))
        wait_until(lambda: "of a callback" in caplog.text)
        assert concurrent.futures.wait([client.submit(2)], timeout=PATIENCE).done

        def fail(until):
            monkeypatch.undo()
            raise shmtensor.ResourceError(24, "no descriptor is left")

        monkeypatch.setattr(client._in_flight, "receive", fail)
        assert concurrent.futures.wait([client.submit(3)], timeout=PATIENCE).done
        assert "no descriptor is left" in caplog.text


def test_a_reply_before_its_task_waits(pair, monkeypatch):
    """A thread finishes the call between two steps of the task, which is not the first one in the queue."""
    client, server = pair
    begin = rpc_client.wait_queue_of

    def preempted(endpoint):
        queue = begin(endpoint)
        wait_until(lambda: not client._in_flight.calls.keys() - waiting)
        return queue

    async def main():
        first = asyncio.create_task(client.arequest("never", timeout=PATIENCE))
        client.submit("never", timeout=PATIENCE)  # its thread receives
        await asyncio.to_thread(wait_until, lambda: len(taken) == 2)
        waiting.update(client._in_flight.calls)
        monkeypatch.setattr(rpc_client, "wait_queue_of", preempted)
        assert await client.arequest(1, timeout=PATIENCE) == 1
        first.cancel()

    taken, waiting = [], set()

    def serve():
        for req in server:
            if req.value == "never":
                taken.append(req)
            else:
                req.reply(req.value)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        taken.clear()
        server.stop()
        thread.join()


def test_a_callback_may_ask_again(pair):
    client, server = pair
    got: list[int] = []
    ended = threading.Event()

    def ask_again(future):
        try:
            got.append(int(client.request(future.result() + 1, timeout=PATIENCE)))
            got.append(int(client.submit(np.array(7), timeout=PATIENCE).result()))
        finally:
            ended.set()

    with serving(server, lambda value: value):
        client.submit(np.array(1), timeout=PATIENCE).add_done_callback(ask_again)
        assert ended.wait(PATIENCE)  # by the library's thread
        assert got == [2, 7]
        future = client.submit(np.array(4), timeout=PATIENCE)
        future.add_done_callback(ask_again)
        assert int(future.result()) == 4  # by this thread, or that one
        wait_until(lambda: len(got) == 4)
        assert got[2:] == [5, 7]


def test_callbacks_that_ask_do_not_nest(pair):
    """Each may receive the replies of all others, whose callbacks do the same."""
    client, server = pair
    depths, inside = [], threading.local()

    def ask_again(future):
        inside.depth = getattr(inside, "depth", 0) + 1
        client.request(future.result(), timeout=PATIENCE)
        depths.append(inside.depth)
        inside.depth -= 1

    futures = [client.submit(np.array(number), timeout=PATIENCE) for number in range(15)]
    for future in futures:
        future.add_done_callback(ask_again)
    with serving(server, lambda value: value):
        wait_until(lambda: len(depths) == len(futures))
    assert max(depths) == 1


def test_many_threads_share_a_client(pair):
    client, server = pair

    def ask(base: int) -> list[int]:
        return [int(client.request(np.full(4, base + step), timeout=PATIENCE)[0]) for step in range(60)]

    with serving(server, lambda value: value), concurrent.futures.ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, 1000 * index) for index in range(6)]
        for index, future in enumerate(asked):
            assert future.result() == [1000 * index + step for step in range(60)]
    assert client.statistics().duplicates == 0


def test_one_threads_requests_need_no_other_thread(pair):
    client, server = pair
    with serving(server, lambda value: value):
        before = set(threading.enumerate())
        for _ in range(5):
            client.request(np.ones(2), timeout=PATIENCE)
        assert list(client.map([1, 2, 3], timeout=PATIENCE)) == [1, 2, 3]
        assert set(threading.enumerate()) <= before  # one of before may have ended meanwhile


# --- who answers


def test_a_busy_server_gets_nothing(channel):
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as one, shmtensor.Server(channel) as other:
        first, second = client.submit(1), client.submit(2)
        busy = one.recv(timeout=PATIENCE)
        got = other.recv(timeout=PATIENCE)
        third = client.submit(3)
        got.reply(got.value)
        again = other.recv(timeout=PATIENCE)  # `one` is busy: the idle one gets it
        again.reply(again.value)
        assert {busy.value, got.seq, again.seq} == {1, 2, 3}
        busy.reply(busy.value)
        assert [future.result(timeout=PATIENCE) for future in (first, second, third)] == [1, 2, 3]


def test_servers_and_clients_come_and_go(channel):
    with shmtensor.Client(channel) as client:
        futures = [client.submit(number) for number in range(3)]  # nobody is there yet
        for future in futures:
            with shmtensor.Server(channel) as server:
                req = server.recv(timeout=PATIENCE)
                req.reply(req.value)
            assert future.result(timeout=PATIENCE) == futures.index(future)
        with shmtensor.Server(channel) as server, serving(server, lambda value: value):
            for number in range(3):
                with shmtensor.Client(channel) as other:
                    assert other.request(number, timeout=PATIENCE) == number


def test_wait_for_servers(channel):
    with shmtensor.Client(channel) as client:
        with pytest.raises(TimedOut, match="0 servers"):
            client.wait_for_servers(1, timeout=0.01)
        with shmtensor.Server(channel):
            client.wait_for_servers(1, timeout=PATIENCE)


def test_a_server_lets_go_of_clients_that_left(pair):
    client, server = pair
    with shmtensor.Client(server.name) as other:
        future = other.submit(1)
        server.recv(timeout=PATIENCE).reply(2)
        assert future.result(timeout=PATIENCE) == 2
        assert server.statistics().clients == 1
    future = client.submit(3)
    server.recv(timeout=PATIENCE).reply(4)
    assert future.result(timeout=PATIENCE) == 4
    assert server.statistics().clients == 1


# --- errors


def test_an_exception_in_the_handler_reaches_the_client(pair):
    client, server = pair

    def handler(value):
        raise LookupError(f"no {value}")

    with serving(server, handler):
        with pytest.raises(RemoteError, match="LookupError: no thing") as caught:
            client.request("thing", timeout=PATIENCE)
        error = caught.value
        assert (error.type_name, error.text) == ("LookupError", "no thing")
        assert "in handler" in error.remote_traceback
        assert "LookupError: no thing" in error.remote_traceback
        with pytest.raises(RemoteError):
            client.submit("again").result(timeout=PATIENCE)
    assert server.statistics().failed == client.statistics().errors == 2


def test_an_error_of_any_shape_is_text(pair):
    client, server = pair

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    for error, name in ((Odd(), "Odd"), (ValueError("\udc80" + "x" * 200_000), "ValueError"), ("plain", "Failed")):
        future = client.submit(1)
        server.recv(timeout=PATIENCE).fail(error)
        with pytest.raises(RemoteError) as caught:
            future.result(timeout=PATIENCE)
        assert caught.value.type_name.endswith(name)
        assert len(caught.value.text) <= 100_000


def test_leaving_the_block_by_an_exception_answers(pair):
    client, server = pair
    future = client.submit(1)
    with pytest.raises(ZeroDivisionError), server.recv(timeout=PATIENCE) as req:
        req.value / 0
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        future.result(timeout=PATIENCE)


def test_a_forgotten_request_does_not_hang_its_client(pair):
    client, server = pair
    future = client.submit(1)
    server.recv(timeout=PATIENCE)
    with pytest.raises(RemoteError, match="without an answer"):
        future.result(timeout=PATIENCE)
    assert server.statistics().dropped == 1
    future = client.submit(1)
    with server.recv(timeout=PATIENCE):
        pass
    with pytest.raises(RemoteError, match="without an answer"):
        future.result(timeout=PATIENCE)


def test_a_request_that_run_each_is_left_with_fails_at_once(pair):
    """Not when the next one comes."""
    client, server = pair
    thread = threading.Thread(target=server.run_each, args=(lambda request: None,))
    thread.start()
    try:
        with pytest.raises(RemoteError, match="Unanswered"):
            client.request(1, timeout=PATIENCE)
    finally:
        server.stop()
        thread.join(PATIENCE)


def test_an_idle_server_keeps_no_batch(channel):
    seen = []
    with (
        shmtensor.Client(channel) as client,
        shmtensor.Server(channel, max_batch=2) as server,
        serving(server, lambda value: seen.append(weakref.ref(value))),
    ):
        assert client.request(np.ones(4), timeout=PATIENCE) is None
        wait_until(lambda: seen[0]() is None)


def test_a_reply_that_cannot_be_sent_leaves_the_request_open(pair):
    client, server = pair
    future = client.submit(1)
    req = server.recv(timeout=PATIENCE)
    with pytest.raises(shmtensor.ArgumentTypeError):
        req.reply(object())
    req.reply("then this")
    assert future.result(timeout=PATIENCE) == "then this"
    with pytest.raises(shmtensor.ReleasedError):
        req.reply("twice")
    with pytest.raises(shmtensor.ReleasedError):
        _ = req.value
    with serving(server, lambda value: object()), pytest.raises(RemoteError, match="ArgumentTypeError"):
        client.request(1, timeout=PATIENCE)


def test_a_reply_without_room_is_an_error(channel):
    server, client = shmtensor.Server(channel, max_bytes="64KiB", slots=1), shmtensor.Client(channel)
    with server, client, serving(server, lambda value: np.zeros(value, np.uint8)):
        assert client.request(10, timeout=PATIENCE).shape == (10,)
        with pytest.raises(RemoteError, match="max_bytes"):
            client.request(1 << 20, timeout=PATIENCE)
        kept = []
        with pytest.raises(RemoteError, match="NoRoom"):
            while True:
                kept.append(client.request(10, timeout=PATIENCE))


def test_a_map_may_be_wider_than_the_room_for_its_replies(channel):
    """Replies wait for the client to let go of those before them."""
    nbytes = 1 << 20
    server, client = shmtensor.Server(channel, max_bytes=3 * nbytes), shmtensor.Client(channel)
    with server, client, serving(server, lambda value: np.full(nbytes, value, np.uint8)):
        assert client.request(1, timeout=PATIENCE).shape == (nbytes,)
        gate = threading.Event()
        numbers = (number for number in range(40))
        replies = client.map(numbers, timeout=PATIENCE, window=16)
        for number, reply in enumerate(replies):
            assert (reply == number).all()
            del reply
            gate.wait(0.01 if number < 8 else 0)
    assert server.statistics().failed == server.statistics().dropped == 0


def test_what_cannot_be_sent_is_refused(pair):
    client, _ = pair
    with pytest.raises(shmtensor.ArgumentTypeError):
        client.request(object(), timeout=1)
    with pytest.raises(shmtensor.ArgumentTypeError):
        client.submit([object()])
    assert client.statistics().outstanding == 0


@pytest.mark.parametrize("make", [shmtensor.Client, shmtensor.Server])
def test_names(make):
    for name in ("x" * 48, "a/b", ""):
        with pytest.raises(ArgumentError):
            make(name)


def test_arguments(channel):
    with pytest.raises(ArgumentError, match="drop"):
        shmtensor.Client(channel, full="drop")
    with pytest.raises(ArgumentError, match="max_batch"):
        shmtensor.Server(channel, max_batch=0)
    with pytest.raises(shmtensor.ArgumentTypeError):
        shmtensor.Server(channel, max_batch=2, max_wait="long")
    with pytest.raises(ArgumentError, match="needs max_batch="):
        shmtensor.Server(channel, max_wait=0.1)
    with shmtensor.Client(channel) as client, pytest.raises(ArgumentError):
        client.request(1, timeout=-1)
    for end in (shmtensor.Server, shmtensor.Client):
        with pytest.raises(ArgumentError, match="max_bytes='foo' is not a size"):
            end(channel, max_bytes="foo")
        with pytest.raises(ArgumentError, match="slots"):
            end(channel, slots=0)


def test_large_messages_get_fewer_slots(channel):
    value = np.zeros(1 << 20, np.uint8)
    with shmtensor.Server(channel, max_bytes="3MiB") as server, shmtensor.Client(channel, max_bytes="5MiB") as client:
        with serving(server, lambda value: value):
            assert all(client.request(value, timeout=PATIENCE).nbytes == 1 << 20 for _ in range(6))
        assert client._requests.window == 4
        assert [replies._pool.slots for replies in server._taken.replies.values()] == [2]
    with shmtensor.Client(channel, max_bytes="5MiB", slots=16) as client, pytest.raises(shmtensor.ResourceError):
        client.submit(value)  # what is asked for is obeyed


@pytest.mark.parametrize(("mib", "slots"), [(1, 16), (64, 4), (100, 2), (1000, 2)])
def test_default_slots(channel, mib, slots, monkeypatch):
    monkeypatch.setattr(ring_pool, "free_bytes", lambda: 1 << 40)  # a small /dev/shm gets fewer
    with shmtensor.Client(channel) as client:
        assert client._requests._pool.shape(mib * (1 << 20)).slots == slots
    with shmtensor.Client(channel, slots=16) as client:
        assert client._requests._pool.shape(mib * (1 << 20)).slots == 16


def test_options_of_a_request(pair):
    with pytest.raises(shmtensor.ArgumentTypeError, match="retry"):
        pair[0].submit(1, retry="x")
    with pytest.raises(ArgumentError, match="window"):
        pair[0].map([1], window=0)


async def answer_later(value):
    return value


class Later:
    async def __call__(self, value):
        return value


@pytest.mark.parametrize(
    ("handler", "text"),
    [(5, "is a int, which cannot be called"), (answer_later, "asyncio.run"), (Later(), "asyncio.run")],
)
def test_a_handler_that_cannot_answer_is_refused(pair, handler, text):
    with pytest.raises(shmtensor.ArgumentTypeError, match=text):
        pair[1].run(handler)


@pytest.mark.parametrize("end", [shmtensor.Producer, shmtensor.Consumer, shmtensor.Publisher])
def test_a_service_is_no_place_for_others(pair, end):
    with pytest.raises(ArgumentError, match=r"is a service \(Client, Server\), not a"):
        end(pair[0].name)


@pytest.mark.parametrize("end", [shmtensor.Client, shmtensor.Server])
def test_a_work_queue_is_no_service(channel, end):
    with shmtensor.Producer(channel), pytest.raises(ArgumentError, match=r"is a work queue .*, not a service"):
        end(channel)


def test_a_message_of_a_mere_producer_is_not_a_request(pair):
    """Which can only be there if somebody breaks the rules."""

    class Intruder(shmtensor.Producer):
        _traits = SenderTraits(WORK_QUEUE, SERVICE)

    _, server = pair
    with Intruder(server.name) as tx:
        tx.send("hello")
        with pytest.raises(TimedOut):
            server.recv(timeout=0.5)
    assert server.statistics().dropped == 1


# --- time and cancellation


def test_a_request_times_out(pair):
    client, server = pair
    with pytest.raises(TimedOut, match="no server took it"):
        client.request(1, timeout=0.01)
    assert client.statistics().expired == 1
    with pytest.raises(TimedOut):  # and nobody starts it
        server.recv(timeout=0.3)
    req, seconds = None, 0.1
    while req is None:  # on a busy machine its time may be over before it is taken
        seconds *= 3
        future = client.submit(2, timeout=seconds)
        with contextlib.suppress(TimedOut):
            req = server.recv(timeout=seconds)
    assert req.remaining <= seconds
    with pytest.raises(TimedOut, match="a server has it"):
        future.result(timeout=PATIENCE)
    assert req.expired
    assert req.cancelled
    req.reply("too late")
    assert server.statistics().cancelled == 1


@pytest.mark.parametrize("timeout", [float("inf"), 1e30, 10**12])
def test_a_time_out_that_never_comes(pair, timeout):
    client, server = pair
    with serving(server, lambda value: value):
        for value in (np.ones(2), torch.ones(2), torch.ones(2), torch.ones(2)):  # by the compiled module, too
            assert client.request(value, timeout=timeout).sum() == 2
            assert client.submit(value, timeout=timeout).result(PATIENCE).sum() == 2
        assert list(client.map([1, 2], timeout=timeout)) == [1, 2]


def test_an_expired_request_is_not_started(channel):
    """Its client, stopped or slow, has not taken it back."""
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as server:
        call = client._in_flight.begin(0.02, True)
        client._requests.post(call, 1, None, None)
        wait_until(lambda: time.monotonic_ns() >= call.deadline)
        with pytest.raises(TimedOut):
            server.recv(timeout=0.3)
        assert server.statistics().expired == 1


def test_a_request_that_expires_while_its_calls_are_checked_is_late(channel, monkeypatch):
    """Its time is up, and its server finishes it unanswered, after the client has looked for calls that are late."""
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as server:
        in_flight = client._in_flight
        call = in_flight.begin(0.02, True)
        client._requests.post(call, 1, None, None)
        expire = in_flight._expire

        def expire_then_the_time_is_up():
            with monkeypatch.context() as patch:
                patch.setattr("shmtensor.rpc.calls.monotonic_ns", lambda: call.deadline - 1)
                expire()
            wait_until(lambda: time.monotonic_ns() >= call.deadline)
            with pytest.raises(TimedOut):
                server.recv(timeout=0.3)

        monkeypatch.setattr(in_flight, "_expire", expire_then_the_time_is_up)
        in_flight.check_calls()
        assert server.statistics().expired == 1
        with pytest.raises(TimedOut, match="no reply in time"):
            call.result()


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("which", ["request", "reply"])
def test_what_cannot_be_read_is_no_death(pair, which, retry, monkeypatch, caplog):
    """A living server passes such a request over, a client such a reply."""
    client, server = pair
    compose = decode.compose

    def unreadable(kind, *rest):
        if kind == "coo":
            raise WireError("it is damaged")
        return compose(kind, *rest)

    monkeypatch.setattr(decode, "compose", unreadable)
    sparse = torch.eye(2).to_sparse()
    with serving(server, lambda value: 1 if value else sparse):
        with pytest.raises(WireError, match="cannot read this request, or its reply cannot be read here"):
            client.request(sparse if which == "request" else 0, timeout=PATIENCE, retry=retry)
        assert client.request(1, timeout=PATIENCE, retry=retry) == 1
    assert "passed over" in caplog.text


def lateness(client, server, count) -> None:
    """The server has answered; then the time of all calls is up, before this process has looked."""
    wait_until(lambda: server.statistics().replied >= count)
    for call in list(client._in_flight.calls.values()):
        call.deadline = 1


def test_replies_that_are_there_are_in_time(pair):
    """Also where the thread comes late that would have received them."""
    client, server = pair
    in_flight = client._in_flight
    with serving(server, lambda value: value):
        replies = client.map(range(8), timeout=PATIENCE)
        assert next(replies) == 0
        lateness(client, server, 8)
        assert list(replies) == list(range(1, 8))
        call = in_flight.begin(PATIENCE, True)
        client._requests.post(call, 8, None, PATIENCE)
        lateness(client, server, 9)
        in_flight.wait(call, 0)  # as of a future that is polled
        assert call.result() == 8
        with in_flight.leading:  # no thread receives
            futures = [client.submit(number, timeout=PATIENCE) for number in range(8)]
            lateness(client, server, 17)
            in_flight.check_calls()
        assert [future.result(PATIENCE) for future in futures] == list(range(8))
    assert client.statistics().expired == 0


def test_a_signal_handler_does_not_wait_for_its_own_thread(pair):
    """It interrupts the thread that receives: nobody else would take the reply that it waits for."""
    client, server = pair
    raised, futures, over = [], [], threading.Event()

    def handle(*_):
        futures.append(client.submit("future", timeout=PATIENCE))
        for wait in (
            lambda: client.request("request", timeout=5),
            lambda: next(client.map(["map"], timeout=5)),
            lambda: futures[0].result(5),
            lambda: futures[0].exception(5),
        ):
            try:
                wait()
            except Exception as error:
                raised.append(type(error))
        over.set()

    def interrupt():
        with server.recv(timeout=PATIENCE) as request:
            wait_until(client._in_flight.leading.locked)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            assert over.wait(PATIENCE)
            request.reply("first")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert client.request(1, timeout=PATIENCE) == "first"
        thread.join(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised == [shmtensor.ReentrantError] * 4
    with serving(server, lambda value: value):
        assert futures[0].result(PATIENCE) == "future"
        assert client.request(2, timeout=PATIENCE) == 2
    assert (server.statistics().taken, client.statistics().outstanding) == (3, 0)  # those that raised were not started


def test_a_cancelled_request_is_not_started(pair):
    client, server = pair
    first, second = client.submit(1), client.submit(2)
    assert first.cancel()
    assert first.cancelled()
    with pytest.raises(CancelledError):
        first.result()
    req = server.recv(timeout=PATIENCE)
    assert req.value == 2
    req.reply(3)
    assert second.result(timeout=PATIENCE) == 3
    assert not second.cancel()
    assert server.statistics().taken == 1
    assert client.statistics().cancelled == 1


def test_a_handler_sees_that_its_request_was_cancelled(pair):
    client, server = pair
    future = client.submit(1)
    req = server.recv(timeout=PATIENCE)
    assert not req.cancelled
    assert future.cancel()
    assert req.cancelled
    req.reply("in vain")
    later = client.submit(2)
    server.recv(timeout=PATIENCE).reply(4)
    assert later.result(timeout=PATIENCE) == 4
    assert client.statistics().duplicates == 0


def test_cancelled_requests_give_their_slots_back(channel):
    with shmtensor.Client(channel, slots=2) as client, shmtensor.Server(channel) as server:
        for _ in range(20):
            futures = [client.submit(np.ones(3), timeout=PATIENCE) for _ in range(2)]
            assert all(future.cancel() for future in futures)
        with serving(server, lambda value: value):
            assert client.request(np.ones(3), timeout=PATIENCE).tolist() == [1, 1, 1]


def test_a_full_ring_of_requests(channel):
    with shmtensor.Client(channel, slots=2) as client:
        futures = [client.submit(1), client.submit(2)]
        with pytest.raises(shmtensor.RingFull, match=r'service ".*": no room for a request .* \(none is there\)'):
            client.request(3, timeout=0.02)
        with shmtensor.Client(channel, slots=1, full="error") as other:
            other.submit(1)
            with pytest.raises(shmtensor.RingFull):
                other.submit(2)
        with shmtensor.Client(channel, slots=1, full="grow") as other:
            assert len([other.submit(number) for number in range(5)]) == 5
        with shmtensor.Server(channel) as server, serving(server, lambda value: value):
            assert [future.result(timeout=PATIENCE) for future in futures] == [1, 2]
            assert client.request(3, timeout=PATIENCE) == 3


# --- ends


def test_close_with_requests_outstanding(channel):
    client = shmtensor.Client(channel)
    with shmtensor.Server(channel) as server:
        running, waiting = client.submit(1), client.submit(2)
        req = server.recv(timeout=PATIENCE)
        client.close()
        for future in (running, waiting):
            with pytest.raises(ClosedError):
                future.result(timeout=PATIENCE)
        assert req.cancelled
        req.reply("in vain")
        with pytest.raises(TimedOut):
            server.recv(timeout=0.3)
    with pytest.raises(ClosedError, match="Client of service"):
        client.request(1)
    client.close()
    assert client.closed


def test_close_ends_a_waiting_request(channel):
    client = shmtensor.Client(channel)
    with concurrent.futures.ThreadPoolExecutor(2) as threads, shmtensor.Server(channel) as server:
        waiting = [threads.submit(client.request, number) for number in range(2)]
        taken = [server.recv(timeout=PATIENCE) for _ in range(2)]
        client.close()
        for future in waiting:
            with pytest.raises(ClosedError):
                future.result(PATIENCE)
        for req in taken:
            req.reply(0)


def test_a_closing_server_gives_back_what_it_has_not_answered(channel):
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as other:
        server = shmtensor.Server(channel)
        future = client.submit(np.arange(3))
        req = server.recv(timeout=PATIENCE)
        server.close()
        assert req.answered
        with pytest.raises(shmtensor.ReleasedError):
            req.reply(1)
        with pytest.raises(ClosedError):
            server.recv()
        again = other.recv(timeout=PATIENCE)
        assert again.attempt == 2
        again.reply(again.value)
        assert future.result(timeout=PATIENCE).tolist() == [0, 1, 2]
        assert other.statistics().retried == 1


def test_a_stopped_server_finishes_what_it_took(pair):
    client, server = pair
    futures = [client.submit(number) for number in range(2)]
    req = server.recv(timeout=PATIENCE)
    server.stop()
    assert server.stopping
    assert list(server) == []
    req.reply("done")
    assert futures[0].result(timeout=PATIENCE) == "done"
    with shmtensor.Server(server.name) as other:
        other.recv(timeout=PATIENCE).reply("by another")
    assert futures[1].result(timeout=PATIENCE) == "by another"


def test_ctrl_c_gives_the_request_up(pair):
    client, server = pair
    main = threading.main_thread().ident

    def interrupt():
        server.recv(timeout=PATIENCE).reply("first")
        taken.append(server.recv(timeout=PATIENCE))
        signal.pthread_kill(main, signal.SIGINT)

    taken: list = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert client.request(1, timeout=PATIENCE) == "first"
    with pytest.raises(KeyboardInterrupt):
        client.request(2, timeout=PATIENCE)
    thread.join(PATIENCE)
    assert taken[0].cancelled
    taken.clear()
    assert client.statistics().outstanding == 0


def test_a_forked_child_has_no_client_and_no_server(pair):
    client, server = pair
    future = client.submit(1)
    req = server.recv(timeout=PATIENCE)
    wait_until(client._in_flight.leading.locked)  # its thread receives
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            calls = (
                lambda: client.request(1),
                lambda: client.submit(1),
                lambda: server.recv(timeout=0),
                client.statistics,
                lambda: future.result(timeout=PATIENCE),
            )
            refused = 0
            for call in calls:
                try:
                    call()
                except shmtensor.ForkedError:
                    refused += 1
            client.close()
            server.close()
            code = 0 if refused == len(calls) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    req.reply("still mine")
    assert future.result(timeout=PATIENCE) == "still mine"


def test_repr(pair):
    client, server = pair
    future = client.submit(1)
    assert repr(client) == f'<Client "{client.name}" open outstanding=1>'
    req = server.recv(timeout=PATIENCE)
    assert repr(req) == "<Request seq=1 attempt=1 open>"
    req.reply(1)
    assert repr(req) == "<Request seq=1 attempt=1 answered>"
    assert future.result(timeout=PATIENCE) == 1
    assert repr(server) == f'<Server "{server.name}" open taken=1 replied=1>'


# --- deaths


@pytest.mark.slow
def test_a_killed_servers_request_goes_to_another(forks, channel):
    with shmtensor.Client(channel) as client:
        victim = Process(forks, services.hold, channel, {})
        future = client.submit(np.arange(4))
        assert victim.hear() == (1, 1)
        heir = Process(forks, services.hold, channel, {})
        victim.kill()
        assert heir.hear() == (1, 2)
        heir.say("reply")
        assert future.result(timeout=PATIENCE).tolist() == [0, 1, 2, 3]
        heir.kill()


@pytest.mark.slow
def test_a_map_that_rests_loses_nothing_with_a_killed_server(forks, channel):
    processes = [Process(forks, services.double_slowly, channel, {}) for _ in range(2)]
    with shmtensor.Client(channel) as client:
        client.wait_for_servers(2, timeout=PATIENCE)
        got = []
        for reply in client.map((np.full(2, number) for number in range(400)), timeout=PATIENCE, window=8):
            got.append(int(reply[0]))
            if len(got) == 100:
                processes[0].kill()
        assert got == [2 * number for number in range(400)]
        del reply
        processes[1].kill()


@pytest.mark.slow
def test_a_time_out_says_that_the_server_is_dead(forks, channel):
    with shmtensor.Client(channel) as client:
        victim = Process(forks, services.hold, channel, {})
        future = client.submit(1)
        _, call = future._source
        assert victim.hear() == (1, 1)
        assert "a server has it" in str(late(client._requests, call))
        victim.kill()
        assert "died or closed" in str(late(client._requests, call))
        assert future.cancel()


@pytest.mark.slow
def test_statistics_count_the_servers_that_live(forks, channel):
    """For health checks: nobody has sent anything, or swept, since one was killed."""
    with shmtensor.Client(channel) as client, shmtensor.Server(channel):
        assert client.statistics().servers == 1
        victim = Process(forks, services.hold, channel, {})
        assert client.statistics().servers == 2
        victim.kill()
        assert client.statistics().servers == 1
    assert client.statistics().servers == 0


@pytest.mark.slow
@pytest.mark.parametrize(("library", "negate", "pending"), [("numpy", "negative", 0), ("torch", "neg", 16)])
def test_a_daemon_thread_in_run_ends_with_its_interpreter(channel, library, negate, pending):
    program = (
        f"import threading, {library} as library, shmtensor\n"
        f"server, client = shmtensor.Server({channel!r}), shmtensor.Client({channel!r})\n"
        f"threading.Thread(target=server.run, args=(library.{negate},), daemon=True).start()\n"
        f"futures = [client.submit(library.ones(2)) for _ in range({pending})]\n"
        "print(client.request(library.ones(2), timeout=60).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert (done.stdout, complaints(done.stderr)) == ("[-1.0, -1.0]\n", "")


@pytest.mark.slow
def test_without_retry_a_killed_server_fails_the_request(forks, channel):
    """Also when there is no other server, and though the client's thread waits."""
    with shmtensor.Client(channel) as client:
        victim = Process(forks, services.hold, channel, {})
        future = client.submit(1, retry=False)
        assert victim.hear() == (1, 1)
        victim.kill()
        with pytest.raises(PeerDied):
            future.result(timeout=PATIENCE)
        with shmtensor.Server(channel) as server, pytest.raises(TimedOut):
            server.recv(timeout=0.3)


@pytest.mark.slow
def test_without_retry_another_server_does_not_start_it(forks, channel):
    victim = Process(forks, services.hold, channel, {})
    with shmtensor.Client(channel) as client, shmtensor.Server(channel) as other:
        call = client._in_flight.begin(None, False)
        client._requests.post(call, 1, None, None)
        assert victim.hear() == (1, 1)
        victim.kill()
        with pytest.raises(TimedOut):  # the client does not look around meanwhile
            other.recv(timeout=1)
        assert other.statistics().failed == 1
        client._in_flight.wait(call)
        with pytest.raises(PeerDied):
            call.result()


@pytest.mark.slow
def test_a_request_may_not_kill_them_all(forks, channel):
    with shmtensor.Client(channel) as client:
        future = client.submit(1)
        for attempt in (1, 2):
            victim = Process(forks, services.hold, channel, {"max_attempts": 2})
            assert victim.hear() == (1, attempt)
            victim.kill()
        with shmtensor.Server(channel, max_attempts=2) as server, pytest.raises(TimedOut):
            server.recv(timeout=0.5)
        with pytest.raises(PeerDied, match=r"each of the 2 servers .* died \(max_attempts=2\)"):
            future.result(timeout=PATIENCE)


@pytest.mark.slow
def test_one_attempt_is_one_death(forks, channel, caplog):
    with shmtensor.Client(channel) as client:
        future = client.submit(1)
        victim = Process(forks, services.hold, channel, {"max_attempts": 1})
        assert victim.hear() == (1, 1)
        victim.kill()
        with shmtensor.Server(channel, max_attempts=1) as server, pytest.raises(TimedOut):
            server.recv(timeout=0.5)
        with pytest.raises(PeerDied, match=r"the server that had this request died \(max_attempts=1\)"):
            future.result(timeout=PATIENCE)
    assert f'service "{channel}": request 1 of client ' in caplog.text


@pytest.mark.slow
def test_a_killed_clients_requests_and_replies_are_dropped(forks, channel):
    with shmtensor.Server(channel) as server:
        victim = Process(forks, services.ask, channel, 6)
        assert victim.hear() == "sent"
        first, second = (server.recv(timeout=PATIENCE) for _ in range(2))
        first.reply(first.value)
        victim.kill()
        second.reply(second.value)
        deadline = time.monotonic() + PATIENCE
        while server.statistics().clients:
            assert time.monotonic() < deadline
            with contextlib.suppress(TimedOut):
                server.recv(timeout=0.3).reply(0)
        del first, second
        gc.collect()
        with shmtensor.Client(channel) as client, serving(server, lambda value: value):
            assert client.request(1, timeout=PATIENCE) == 1


@pytest.mark.slow
def test_what_a_killed_client_had_is_removed_by_a_server_that_waits(forks, channel):
    """Its channel of replies too, which no server had opened."""
    with shmtensor.Server(channel) as server:
        victim = Process(forks, services.ask, channel, 1)
        assert victim.hear() == "sent"
        request = server.recv(timeout=PATIENCE)
        (client,) = (member.uid for member in shmtensor.inspect(channel).members if member.role == "sender")
        assert control_name(reply_channel(channel, client))[1:] in left_files()
        victim.kill()
        del request
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while any(f"{client:016x}" in name for name in left_files()):
            assert time.monotonic() < deadline
            with pytest.raises(TimedOut):
                server.recv(timeout=0.3)


@pytest.mark.slow
def test_ten_thousand_requests_with_random_kills(forks, channel):
    """4 clients, 3 servers; a random server is killed, and another one started, whenever so many replies have come."""
    clients, count, step, kill_each = 4, 2500, 50, 6
    chance = random.Random(7)
    options = {"max_attempts": 100}
    askers = [Process(forks, services.ask_many, channel, 1 + index * count, count, step) for index in range(clients)]
    servers = [Process(forks, services.double, channel, options) for _ in range(3)]
    results: dict[int, tuple] = {}
    heard = kills = 0
    while len(results) < clients:
        waiting = {asker.pipe: index for index, asker in enumerate(askers) if index not in results}
        ready = multiprocessing.connection.wait(list(waiting), PATIENCE)
        assert ready, "no reply for long"
        for pipe in ready:
            told = pipe.recv()
            if isinstance(told, tuple):
                results[waiting[pipe]] = told
                continue
            heard += 1
            if heard % kill_each == 0:
                victim = chance.randrange(3)
                servers[victim].kill()
                servers[victim] = Process(forks, services.double, channel, options)
                kills += 1
    for process in (*askers, *servers):
        if process in servers:
            process.kill()
        else:
            process.end()
    for wrong, requests, replies, outstanding in results.values():
        assert wrong == []
        assert requests == replies == count
        assert not outstanding
    assert kills >= 20
    shmtensor.Client(channel).close()  # whoever comes next removes what the killed ones left


def test_an_unusual_request_is_not_passed_over(channel):
    """Others always have usual ones, which the compiled module takes."""
    usual = torch.arange(4)
    clients = [shmtensor.Client(channel) for _ in range(3)]
    with shmtensor.Server(channel) as server, clients[0] as one, clients[1] as two, clients[2] as other:
        turns = itertools.cycle((one, two))
        for _ in range(12):
            next(turns).submit(usual)
        for number in range(40):
            if number == 20:
                asked = other.submit({"rare": usual})
            with server.recv(timeout=60) as request:
                rare = isinstance(request.value, dict)
                request.reply(usual)
            if rare:
                break
            next(turns).submit(usual)
        assert 20 <= number < 26
        assert asked.result(60).tolist() == usual.tolist()


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
def test_each_request_that_was_let_go_of_says_so(channel, make):
    """All of them use the same slot, one after the other, before the client has looked why there is no reply."""
    with shmtensor.Server(channel) as server, shmtensor.Client(channel, slots=1) as client:
        for _ in range(5):
            future = client.submit(make(4))
            request = server.recv(timeout=PATIENCE)
            request.reply(request.value)
            del request
            future.result(PATIENCE)
        futures, places = [], set()
        for _ in range(3):
            futures.append(client.submit(make(4)))
            request = server.recv(timeout=PATIENCE)
            places.add(record_of(request).at)
            del request
        for future in futures:
            error = future.exception(PATIENCE)
            assert isinstance(error, RemoteError), error
            assert error.type_name == "Unanswered"
        assert len(places) == 1


def test_a_busy_server_gets_what_a_dead_one_had(channel):
    """There is a next request whenever the server asks; nevertheless it looks for what nobody finished."""
    value = torch.zeros(4)
    with shmtensor.Client(channel, slots=8) as client, shmtensor.Server(channel) as server:

        def serve(by) -> int:
            with by.recv(timeout=PATIENCE) as request:
                request.reply(request.value)
                return request.seq

        with shmtensor.Server(channel) as other:
            for number in range(10):
                future = client.submit(value)
                serve(other if number % 2 else server)
                future.result(PATIENCE)
            lost = client.submit(value)
            request = other.recv(timeout=PATIENCE)
            seq = request.seq
            for _ in range(3):  # by now the server has passed it by
                future = client.submit(value)
                serve(server)
                future.result(PATIENCE)
            # as if the other had died: undone and not held, and nothing of the channel's table has changed
            record = record_of(request)
            other._taken.open.discard(record)
            record.give_back()
            del record, request
            waiting = [client.submit(value) for _ in range(4)]
            until = time.monotonic() + PATIENCE
            while serve(server) != seq:
                assert time.monotonic() < until
                waiting.append(client.submit(value))
                waiting.pop(0).result(PATIENCE)
            lost.result(PATIENCE)
            for _ in waiting:
                serve(server)
            for future in waiting:
                future.result(PATIENCE)


class BadNotes(Exception):
    """Only its type can be told."""

    def __str__(self):
        raise LookupError

    @property
    def __notes__(self):
        raise LookupError


@pytest.mark.parametrize("error", [SyntaxError("bad", ("f", "x", "y", 5)), BadNotes()], ids=["SyntaxError", "BadNotes"])
def test_an_error_without_a_traceback_that_can_be_printed_is_answered(pair, error):
    client, server = pair

    def handler(value):
        raise error

    future = client.submit(1)
    try:
        noted = server.answer(server.recv(timeout=PATIENCE), handler)
    except Exception:  # pytest could not print it either
        noted = None
    assert noted is not None
    assert type(error).__name__ in noted
    with pytest.raises(RemoteError) as caught:
        future.result(timeout=PATIENCE)
    assert caught.value.type_name.endswith(type(error).__name__)
    error.__traceback__ = None  # the parameter outlives the test


def test_replies_without_room_wait_once_till_there_is_room(channel, monkeypatch):
    """Neither the error that is sent in place of a reply waits again, nor do replies to requests that follow: a client
    that keeps its replies would hold up the others for each."""
    waited, patience = [], ReplySender._patience

    def recorded(replies, timeout):
        waited.append(patience(replies, timeout))
        return waited[-1]

    monkeypatch.setattr("shmtensor.rpc.endpoints.ROOM_S", 0.01)
    monkeypatch.setattr(ReplySender, "_patience", recorded)
    kept = []
    with shmtensor.Server(channel, max_bytes="64KiB", slots=1) as server, shmtensor.Client(channel) as client:

        def ask():
            waited.clear()
            future = client.submit(10)
            server.answer(server.recv(timeout=PATIENCE), lambda value: np.zeros(value, np.uint8))
            return future

        while (error := (future := ask()).exception(PATIENCE)) is None:
            kept.append(future.result())
        assert error.type_name == "NoRoom"
        assert "copy what you keep" in str(error)
        first, *others = waited
        assert first > 0
        assert others == [0]
        assert ask().exception(PATIENCE).type_name == "NoRoom"
        assert waited == [0, 0]
        kept.pop()
        del future
        assert (ask().result(PATIENCE) == 0).all()


def test_a_client_may_keep_thousands_of_replies(channel):
    server, client = shmtensor.Server(channel), shmtensor.Client(channel)
    with server, client, serving(server, lambda value: np.full(2, value)):
        kept = list(client.map(range(7_900), timeout=PATIENCE))
        assert [int(reply[1]) for reply in kept] == list(range(7_900))


def test_rings_of_replies_that_are_added_keep_to_max_bytes(channel):
    most = 700 << 10  # for the last ring less is left than it would get
    server, client = shmtensor.Server(channel, max_bytes=most, slots=2), shmtensor.Client(channel)
    with server, client, serving(server, lambda value: np.zeros(value, np.uint8)):
        kept = []
        with pytest.raises(RemoteError, match="NoRoom"):
            while True:
                kept.append(client.request(4 << 10, timeout=PATIENCE))
        (pool,) = (replies._pool for replies in server._taken.replies.values())
        assert pool.slots == len(kept)
        assert most - pool.nbytes < pool.rings[0].nbytes <= pool.nbytes <= most
        assert 2 < pool.rings[-1].slots < pool.rings[-2].slots
