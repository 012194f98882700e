"""Requests over a relay: each ends once, as it would locally; nearer servers come first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor
from shmtensor.channel.names import control_name
from shmtensor.relay import endpoints, far_requests, frames, outbound, session
from shmtensor.relay.keys import path_hash
from shmtensor.relay.stream import Stream

from ..waiting import PATIENCE, wait_until
from .hosts import endpoint, is_open, mesh, pair, state_of
from .test_relay import is_equal, values


class Serving:
    """A server in a thread, which answers with `handler(request)`, and notes what it has begun with."""

    def __init__(self, name, handler, **options):
        self.server = shmtensor.Server(name, **options)
        self.begun = []
        self._handler = handler
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for request in self.server:
            self.begun.append(request.value)
            request.reply(self._handler(request))

    def close(self):
        self.server.stop()
        self._thread.join()
        self.server.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def service(channel, **options):
    """A client here, and the relays to a service there; the client waits for a server there."""
    with pair(channel, "service", **options) as (near, far), shmtensor.Client(channel) as client:
        yield client, near, far


def settled(near):
    wait_until(lambda: state_of(near).in_flight == 0)


def test_values_arrive_as_they_do_locally(channel):
    """Of requests and replies, with `meta` of requests."""
    seen = []

    def answer(request):
        seen.append((request.value, request.meta))
        return request.value

    with service(channel) as (client, near, far), Serving(f"{channel}-far", answer) as there:
        client.wait_for_servers(1, timeout=PATIENCE)
        for value, meta in values():
            found = client.request(value, meta, timeout=PATIENCE)
            assert is_equal(found, value), (found, value)
            assert is_equal(seen[-1][0], value)
            assert seen[-1][1] == meta
            seen.clear()
            there.begun.clear()
        settled(near)
        count = len(values())
        assert state_of(near).messages == state_of(near).acknowledged == count
        assert state_of(far).messages == count
        assert state_of(near).bad_frames == state_of(far).bad_frames == 0
        assert client.statistics().replies == count


def test_a_reply_is_ours_to_keep_and_to_write(channel):
    with service(channel) as (client, near, _), Serving(f"{channel}-far", lambda request: request.value):
        kept = [client.request(torch.full((1000,), float(number)), timeout=PATIENCE) for number in range(40)]
        settled(near)
        for number, value in enumerate(kept):
            assert (value == number).all()
            value += 1
    for number, value in enumerate(kept):
        assert (value == number + 1).all()


def test_calls(channel):
    """`map`, `submit` and `arequest`."""

    async def ask(client):
        return await asyncio.gather(*(client.arequest(np.array(number), timeout=PATIENCE) for number in range(20)))

    with service(channel) as (client, near, _), Serving(f"{channel}-far", lambda request: request.value * 2):
        assert [int(it) for it in client.map(map(np.array, range(300)), timeout=PATIENCE)] == list(range(0, 600, 2))
        futures = [client.submit(np.array(number)) for number in range(30)]
        assert [int(it.result(PATIENCE)) for it in futures] == list(range(0, 60, 2))
        assert [int(it) for it in asyncio.run(ask(client))] == list(range(0, 40, 2))
        settled(near)
        assert client.statistics().duplicates == 0


def test_batches(channel):
    """A server there collects requests of several clients for a batch."""
    sizes = []
    with pair(channel, "service"), shmtensor.Server(f"{channel}-far", max_batch=8, max_wait=0.2) as server:

        def serve():
            for batch in server:
                sizes.append(len(batch))
                batch.reply(batch.value.sum(1))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with shmtensor.Client(channel) as one, shmtensor.Client(channel) as two:
            futures = [it.submit(torch.full((3,), float(n)), timeout=PATIENCE) for n in range(30) for it in (one, two)]
            assert [it.result().item() for it in futures] == [3.0 * n for n in range(30) for _ in range(2)]
        assert max(sizes) > 1
        server.stop()
        thread.join()


def test_errors_arrive(channel):
    def fail(request):
        raise LookupError("no such model")

    with service(channel) as (client, _, _), shmtensor.Server(f"{channel}-far") as server:
        thread = threading.Thread(target=server.run, args=(fail,), daemon=True)
        thread.start()
        with pytest.raises(shmtensor.RemoteError, match="no such model") as caught:
            client.request(1, timeout=PATIENCE)
        assert caught.value.type_name == "LookupError"
        assert "in fail" in caught.value.remote_traceback
        server.stop()
        thread.join()
    with service(channel) as (client, _, _), shmtensor.Server(f"{channel}-far") as server:
        future = client.submit(1, timeout=PATIENCE)
        request = server.recv(timeout=PATIENCE)
        del request  # without an answer
        gc.collect()
        with pytest.raises(shmtensor.RemoteError, match="dropped this request without an answer"):
            future.result()


def test_large_replies_flow_through_a_small_window(channel):
    data = np.random.default_rng(1).integers(0, 255, 9 << 20, np.uint8)
    with (
        service(channel, far={"window_bytes": "1MiB"}) as (client, near, _),
        Serving(f"{channel}-far", lambda request: request.value[::-1].copy()),
    ):
        for future in [client.submit(data) for _ in range(3)]:
            assert (future.result(PATIENCE) == data[::-1]).all()
            del future
        settled(near)


# --- who takes a request


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine a server that is idle may not run for a while: it has all the time to take a request."""
    monkeypatch.setattr(endpoints, "_BUSY_S", PATIENCE)
    monkeypatch.setattr(endpoints, "_NEARER_S", PATIENCE)


def test_a_server_here_that_is_idle_comes_first(channel, patient):
    with (
        service(channel) as (client, near, _),
        Serving(f"{channel}-far", lambda request: "there") as there,
        Serving(channel, lambda request: "here") as here,
    ):
        client.wait_for_servers(2, timeout=PATIENCE)
        for number in range(60):
            assert client.request(number, timeout=PATIENCE) == "here"
        assert here.begun == list(range(60))
        assert there.begun == []
        assert state_of(near).messages == 0


def test_an_idle_relay_sleeps(channel):
    """Also beside a server of this host."""
    with service(channel) as (client, _, _), Serving(f"{channel}-far", lambda request: "there"):
        client.wait_for_servers(1, timeout=PATIENCE)
        (relay,) = shmtensor.inspect(channel).receivers
        with Serving(channel, lambda request: "here"):
            client.wait_for_servers(2, timeout=PATIENCE)
            assert client.request(1, timeout=PATIENCE) in ("here", "there")

            def sleeps() -> int:
                return next(it.sleeps for it in shmtensor.inspect(channel).receivers if it.uid == relay.uid)

            before = sleeps()
            wait_until(lambda: sleeps() > before + 2)


def submitted(client, here):
    """A request that the server here has begun, or that was answered there."""
    future = client.submit(0, timeout=PATIENCE)
    wait_until(lambda: here.begun or future.done())
    return future


def test_a_server_there_helps_when_the_one_here_is_busy(channel):
    go = threading.Event()

    def wait(request):
        assert go.wait(PATIENCE)
        return "here"

    with (
        service(channel) as (client, _, _),
        Serving(f"{channel}-far", lambda request: "there"),
        Serving(channel, wait) as here,
    ):
        client.wait_for_servers(2, timeout=PATIENCE)
        first = submitted(client, here)
        while first.done():  # on a busy machine the server here was not idle, or not soon enough
            first = submitted(client, here)
        for number in range(20):
            assert client.request(number, timeout=PATIENCE) == "there"
        go.set()
        assert first.result() == "here"


@pytest.fixture
def steady(monkeypatch):
    """What servers have taken counts for ever, not for a second, in which a busy machine may do nothing."""
    monkeypatch.setattr(far_requests, "_SLICES", 1 << 40)


def test_what_servers_there_cannot_begin_with_waits_here(channel, steady):
    """One runs there; two wait for it, twice as many as it has taken. The rest is left to the first that is idle."""
    go = threading.Event()

    def wait(request):
        assert go.wait(PATIENCE)
        return "there"

    with service(channel) as (client, near, _), Serving(f"{channel}-far", wait) as there:
        futures = [client.submit(number, timeout=PATIENCE) for number in range(10)]
        wait_until(lambda: len(there.begun) == 1 and state_of(near).in_flight == 3)
        with Serving(channel, lambda request: "here") as here:
            wait_until(lambda: sum(it.done() for it in futures) == 7)
            assert len(here.begun) == 7
        assert state_of(near).in_flight == 3
        go.set()
        assert [it.result() for it in futures] == [*["there"] * 3, *["here"] * 7]


def test_a_server_here_that_is_stopped_costs_a_moment(channel):
    """It sleeps, as far as its word says, and takes nothing."""
    with (
        service(channel) as (client, _, _),
        Serving(f"{channel}-far", lambda request: "there"),
        shmtensor.Server(channel) as stopped,
    ):
        client.wait_for_servers(2, timeout=PATIENCE)
        receiver = stopped._receiver
        endpoints.store(receiver._control_words, receiver._asleep, 1)
        assert client.request(1, timeout=PATIENCE) == "there"
        endpoints.store(receiver._control_words, receiver._asleep, 2)


def test_the_relay_is_a_server_while_there_are_servers(channel):
    with service(channel) as (client, near, _):
        with pytest.raises(shmtensor.TimedOut):
            client.wait_for_servers(1, timeout=0.3)
        with pytest.raises(shmtensor.TimedOut, match="no server took it"):
            client.request(1, timeout=0.3)
        assert state_of(near).messages == 0
        future = client.submit(2, timeout=PATIENCE)
        with Serving(f"{channel}-far", lambda request: request.value + 1):
            client.wait_for_servers(1, timeout=PATIENCE)
            assert client.statistics().servers == 1
            assert future.result() == 3
        wait_until(lambda: client.statistics().servers == 0)


def test_what_the_last_server_there_had_not_begun_comes_back(channel, steady):
    """It goes to a server here, and was never tried."""
    with service(channel) as (client, near, _):
        with shmtensor.Server(f"{channel}-far") as there:
            futures = [client.submit(number, timeout=PATIENCE, retry=False) for number in range(3)]
            request = there.recv(timeout=PATIENCE)
            wait_until(lambda: state_of(near).in_flight == 3)
            request.reply("there")
        with Serving(channel, lambda request: request.attempt):
            assert futures[0].result() == "there"
            assert [it.result() for it in futures[1:]] == [1, 1]
        settled(near)


def test_two_directions(channel, patient):
    """Servers on both sides help clients on both sides, and no request goes round."""
    a, b, one, two = f"{channel}-a", f"{channel}-b", endpoint(), endpoint()
    with contextlib.ExitStack() as stack:
        stack.enter_context(shmtensor.Relay(b, listen=one))
        stack.enter_context(shmtensor.Relay(a, listen=two))
        there = stack.enter_context(shmtensor.Relay(a, to=one, remote=b, pattern="service"))
        back = stack.enter_context(shmtensor.Relay(b, to=two, remote=a, pattern="service"))
        there.wait(PATIENCE)
        back.wait(PATIENCE)
        client_a, client_b = (stack.enter_context(shmtensor.Client(name)) for name in (a, b))
        with pytest.raises(shmtensor.TimedOut):
            client_a.request(0, timeout=0.5)
        with Serving(b, lambda request: "b"):
            assert {client.request(1, timeout=PATIENCE) for client in (client_a, client_b)} == {"b"}
            with Serving(a, lambda request: "a"):
                client_a.wait_for_servers(2, timeout=PATIENCE)
                assert client_a.request(1, timeout=PATIENCE) == "a"
                assert client_b.request(1, timeout=PATIENCE) == "b"
        assert is_open(there)
        assert is_open(back)


def test_a_chain(channel):
    """Clients on the first host, servers on the third."""
    names, wheres = [f"{channel}-{host}" for host in "abc"], [endpoint(), endpoint()]
    with contextlib.ExitStack() as stack:
        for at in (0, 1):
            stack.enter_context(shmtensor.Relay(names[at + 1], listen=wheres[at]))
            stack.enter_context(
                shmtensor.Relay(names[at], to=wheres[at], remote=names[at + 1], pattern="service")
            ).wait(PATIENCE)
        client = stack.enter_context(shmtensor.Client(names[0]))
        with Serving(names[2], lambda request: request.value + 1):
            assert list(client.map(range(100), timeout=PATIENCE)) == list(range(1, 101))
        wait_until(lambda: client.statistics().servers == 0)


def test_a_ring(channel):
    """Three hosts, each with a relay to the next: a request goes on to a server, and never comes back to its host."""
    names, wheres = [f"{channel}-{host}" for host in "abc"], [endpoint() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for name, where in zip(names, wheres, strict=True):
            stack.enter_context(shmtensor.Relay(name, listen=where))
        for at in range(3):
            to = (at + 1) % 3
            stack.enter_context(shmtensor.Relay(names[at], to=wheres[to], remote=names[to], pattern="service")).wait(
                PATIENCE
            )
        client = stack.enter_context(shmtensor.Client(names[0]))
        with pytest.raises(shmtensor.TimedOut):
            client.request(0, timeout=0.5)
        with Serving(names[2], lambda request: request.value + 1):
            assert list(client.map(range(50), timeout=PATIENCE)) == list(range(1, 51))
        future = client.submit(1, timeout=PATIENCE)
        with Serving(names[0], lambda request: request.attempt):  # it waits here, not on its way
            assert future.result() == 1


# --- time-outs and cancelling


def test_a_deadline_travels(channel):
    with service(channel) as (client, _, _), shmtensor.Server(f"{channel}-far") as server:
        future = client.submit(1, timeout=PATIENCE)
        request = server.recv(timeout=PATIENCE)
        assert PATIENCE - 5 < request.remaining <= PATIENCE
        assert not request.expired
        request.reply(2)
        assert future.result() == 2
        future = client.submit(1)
        request = server.recv(timeout=PATIENCE)
        assert request.remaining is None
        request.reply(2)
        assert future.result() == 2


def test_what_has_expired_is_not_started(channel):
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        client.wait_for_servers(1, timeout=PATIENCE)
        with pytest.raises(shmtensor.TimedOut, match="a server has it"):
            client.request("late", timeout=0.3)
        time.sleep(1.0)  # its time is up there later than here, by what its frame took
        future = client.submit("in time", timeout=PATIENCE)
        with server.recv(timeout=PATIENCE) as request:
            assert request.value == "in time"
            request.reply(1)
        assert future.result() == 1
        settled(near)
        assert client.statistics().expired == 1
        assert server.statistics().taken - server.statistics().cancelled - server.statistics().expired == 1


def test_a_running_request_sees_that_it_is_cancelled(channel):
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        future = client.submit(1)
        request = server.recv(timeout=PATIENCE)
        assert not request.cancelled
        assert future.cancel()
        wait_until(lambda: request.cancelled)
        request.reply("nobody wants it")
        settled(near)
        other = client.submit(2, timeout=PATIENCE)
        with server.recv(timeout=PATIENCE) as request:
            request.reply(3)
        assert other.result() == 3
        assert client.statistics().duplicates == 0


def test_what_is_cancelled_before_it_began_never_begins(channel):
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        first, second = client.submit(1, timeout=PATIENCE), client.submit(2, timeout=PATIENCE)
        request = server.recv(timeout=PATIENCE)
        wait_until(lambda: state_of(near).in_flight == 2)
        assert second.cancel()
        wait_until(lambda: state_of(near).in_flight == 1)
        request.reply("one")
        assert first.result() == "one"
        with pytest.raises(shmtensor.TimedOut):
            server.recv(timeout=0.3)


def test_a_client_that_leaves(channel):
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        other = shmtensor.Client(channel)
        other.submit(1)
        request = server.recv(timeout=PATIENCE)
        other.close()
        wait_until(lambda: request.cancelled)
        request.reply(1)
        settled(near)
        future = client.submit(2, timeout=PATIENCE)
        with server.recv(timeout=PATIENCE) as request:
            request.reply(3)
        assert future.result() == 3
        wait_until(lambda: len(shmtensor.inspect(f"{channel}-far").senders) == 1)  # it is gone there, too


def test_what_is_cancelled_before_it_is_sent_again(channel, monkeypatch):
    """The connection is begun anew, as its frame was lost; and just then nobody wants the request any more."""
    feed, welcome, lost, futures = Stream.feed, outbound.Outbound._on_welcome, [], []

    def lossy(stream, head, body):
        if not lost and head[13] == frames.ITEMS:
            lost.append(head)
        else:
            feed(stream, head, body)

    def cancelled_at(relay, frame):
        welcome(relay, frame)
        if relay.connections == 2:
            for future in futures:
                future.cancel()
            relay._look_due = 0.0

    monkeypatch.setattr(Stream, "feed", lossy)
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        monkeypatch.setattr(outbound.Outbound, "_on_welcome", cancelled_at)
        futures.append(client.submit(1))
        wait_until(lambda: state_of(near).connections == 2 or state_of(near).state == "failed")
        settled(near)
        near.check()
        other = client.submit("after", timeout=PATIENCE)
        with server.recv(timeout=PATIENCE) as request:
            assert request.value == "after"
            request.reply(request.value)
        assert other.result() == "after"


def test_the_connection_is_begun_anew_while_a_reply_is_confirmed(channel, monkeypatch):
    """The thread of the replies sends by the publisher that the other one has: Zenoh does not let it be withdrawn."""

    def refuse():
        raise RuntimeError("Already borrowed")

    with service(channel) as (client, near, _), Serving(f"{channel}-far", lambda request: request.value):
        assert client.request(1, timeout=PATIENCE) == 1
        relay = near._channels[0]
        monkeypatch.setattr(relay._data, "close", refuse)
        relay._note_gap()
        wait_until(lambda: state_of(near).connections == 2 or state_of(near).state == "failed")
        assert client.request(2, timeout=PATIENCE) == 2
        near.check()


def test_a_cancellation_is_seen_while_a_large_request_is_sent(channel, monkeypatch):
    """And that of the large one itself, of which no more parts are sent then."""
    monkeypatch.setattr(outbound, "_LOOK_S", 0.0)
    monkeypatch.setattr(outbound, "_SILENCE_S", PATIENCE)  # a busy machine ends no attempt
    sent, send, parts, submitted, over = [], session.Sender.send, 40, threading.Event(), threading.Event()

    def watched(sender, head, body=b""):
        if head[13] == frames.PART:
            sent.append(head)
            if len(sent) == 2:
                first.cancel()
            elif len(sent) == 6:
                wait_until(lambda: request.cancelled)
                submitted.wait(PATIENCE)
                large.cancel()
                over.set()
        send(sender, head, body)

    with service(channel) as (client, near, far), shmtensor.Server(f"{channel}-far") as server:
        first = client.submit("first")
        request = server.recv(timeout=PATIENCE)
        second = shmtensor.Server(f"{channel}-far")  # so that there is credit for another one
        monkeypatch.setattr(session.Sender, "send", watched)
        large = client.submit(bytes(parts << 19))
        submitted.set()
        assert over.wait(PATIENCE)
        request.reply("nobody wants it")
        settled(near)
        assert len(sent) < parts
        second.close()
        other = client.submit("other", timeout=PATIENCE)
        with server.recv(timeout=PATIENCE) as request:
            assert request.value == "other"
            request.reply(1)
        assert other.result() == 1
        (stream,) = far._channels[0]._streams.values()
        assert stream._filling is None
        assert state_of(near).connections == 1


def test_a_client_that_leaves_in_the_middle_of_a_large_request(channel, monkeypatch):
    """What lies there of it does not keep its sender there."""
    monkeypatch.setattr(outbound, "_LOOK_S", 0.0)
    sent, send, submitted = [], session.Sender.send, threading.Event()

    def watched(sender, head, body=b""):
        if head[13] == frames.PART:
            sent.append(head)
            if len(sent) == 2:
                submitted.wait(PATIENCE)
                future.cancel()
        send(sender, head, body)

    with service(channel) as (_client, near, _far), shmtensor.Server(f"{channel}-far"):
        monkeypatch.setattr(session.Sender, "send", watched)
        other = shmtensor.Client(channel)
        future = other.submit(bytes(20 << 20))
        submitted.set()
        wait_until(lambda: len(sent) >= 2)
        settled(near)
        assert len(sent) < 40
        wait_until(lambda: len(shmtensor.inspect(f"{channel}-far").senders) == 1)
        other.close()
        wait_until(lambda: not shmtensor.inspect(f"{channel}-far").senders)


def test_servers_are_not_forgotten_while_they_cannot_be_counted(channel, monkeypatch):
    """The far host's segment server is away, or open files are short there."""
    looked, look_at = [], endpoints.shm.look_at

    def refused(name, **options):
        if far_name not in name:
            return look_at(name, **options)
        looked.append(name)
        raise shmtensor.ResourceError(errno.EMFILE, "too many open files")

    with service(channel) as (client, _near, far), Serving(f"{channel}-far", lambda request: request.value):
        client.wait_for_servers(1, timeout=PATIENCE)
        far_name = control_name(f"{channel}-far")
        monkeypatch.setattr(endpoints.shm, "look_at", refused)
        wait_until(lambda: len(looked) > 2)
        assert client.request(1, timeout=PATIENCE) == 1
        assert client.statistics().servers == 1
        (stream,) = far._channels[0]._streams.values()
        assert stream._service.servers == 1


def test_a_relay_that_cannot_become_a_server_tries_again(channel, monkeypatch, caplog):
    short, join = [True], outbound.Outbound._join

    def refused(*arguments, **options):
        if short:
            raise shmtensor.ResourceError(errno.EMFILE, "too many open files")
        return join(*arguments, **options)

    monkeypatch.setattr(outbound.Outbound, "_join", refused)
    with (
        service(channel) as (client, near, _),
        Serving(f"{channel}-far", lambda request: request.value),
    ):
        wait_until(lambda: "too many open files" in state_of(near).reason)
        near.check()
        short.clear()
        assert client.request(1, timeout=PATIENCE) == 1
        wait_until(lambda: not state_of(near).reason)
    assert sum("is held up" in it.message for it in caplog.records) == 1


@pytest.mark.parametrize("size", [10, 400_000, 2 << 20], ids=["whole", "in parts", "too large"])
def test_a_request_without_room_there_fails_alone(channel, size, monkeypatch):
    """By `max_bytes=` of the far relay, or since it lacks something just then: as a client there would be told."""
    short = threading.Event()

    def limited(may):
        def post(*arguments):
            if short.is_set():
                raise shmtensor.ResourceError(errno.ENOSPC, "no room")
            return may(*arguments)

        return post

    for name in ("post_request", "fill_request"):
        monkeypatch.setattr(endpoints.FarRequestSender, name, limited(getattr(endpoints.FarRequestSender, name)))
    with (
        service(channel, far={"max_bytes": "1MiB"}) as (client, near, _),
        shmtensor.Client(channel) as other,
        Serving(f"{channel}-far", lambda request: goes_on.wait(PATIENCE) and request.value) as there,
    ):
        goes_on = threading.Event()
        client.wait_for_servers(1, timeout=PATIENCE)
        before = client.submit("a", timeout=PATIENCE, retry=False)
        wait_until(lambda: there.begun == ["a"])
        if size < 1 << 20:
            short.set()
        with pytest.raises(shmtensor.RemoteError, match="the far host has no room for this request") as caught:
            other.request(np.zeros(size, np.uint8), timeout=PATIENCE)
        assert caught.value.type_name == "NoRoom"
        short.clear()
        goes_on.set()
        assert before.result() == "a"
        assert other.request("b", timeout=PATIENCE) == "b"
        settled(near)
        assert state_of(near).connections == 1
        assert there.begun == ["a", "b"]


def test_a_client_for_which_there_is_no_room_there(channel, monkeypatch):
    """Its requests fail, until there is a place for it."""
    full, join = threading.Event(), endpoints._Onward.__init__

    def refused(end, *arguments, **options):
        if full.is_set():
            raise shmtensor.ResourceError(errno.EMFILE, "the channel has 256 members, which is the limit")
        join(end, *arguments, **options)

    monkeypatch.setattr(endpoints._Onward, "__init__", refused)
    with (
        service(channel) as (client, near, _),
        shmtensor.Client(channel) as other,
        Serving(f"{channel}-far", lambda request: request.value),
    ):
        assert client.request(1, timeout=PATIENCE) == 1
        full.set()
        with pytest.raises(shmtensor.RemoteError, match="256 members"):
            other.request(2, timeout=PATIENCE)
        assert client.request(3, timeout=PATIENCE) == 3
        full.clear()
        assert other.request(4, timeout=PATIENCE) == 4
        assert state_of(near).connections == 1


def test_a_service_that_is_refused_for_a_time_keeps_its_requests(channel, monkeypatch):
    """What a server there has begun with is answered, once."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    look, other = far_requests.FarService.look_for_servers, threading.Event()

    def refused(service):
        if other.is_set():
            raise shmtensor.ArgumentError("is a fan-out, not a service")
        look(service)

    monkeypatch.setattr(far_requests.FarService, "look_for_servers", refused)
    with service(channel) as (client, near, _), shmtensor.Server(f"{channel}-far") as server:
        futures = [client.submit(number, timeout=PATIENCE, retry=not number) for number in range(2)]
        requests = [server.recv(timeout=PATIENCE) for _ in futures]
        other.set()
        wait_until(lambda: state_of(near).connections > 3)
        other.clear()
        for request in requests:
            assert not request.cancelled
            request.reply(request.value)
        requests.clear()
        assert [it.result() for it in futures] == [0, 1]
        settled(near)


def test_a_broken_client_there_is_replaced(channel, monkeypatch):
    """Its error is not told as a lack of room."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    with service(channel) as (client, near, far), Serving(f"{channel}-far", lambda request: request.value):
        assert client.request(1, timeout=PATIENCE) == 1
        settled(near)
        (stream,) = far._channels[0]._streams.values()
        for it in stream._senders.values():
            it.requests.close()
        assert client.request(2, timeout=PATIENCE) == 2
        settled(near)


# --- ends


def test_a_relay_that_ends_gives_back(channel):
    """The near one: another server here has them. The far one: they go back to the ring, and to its successor."""
    where = endpoint()
    with shmtensor.Client(channel) as client, shmtensor.Server(f"{channel}-far") as there:
        far = shmtensor.Relay(f"{channel}-far", listen=where)
        near = shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern="service")
        future, once = client.submit(1, timeout=PATIENCE), client.submit(2, timeout=PATIENCE, retry=False)
        requests = [there.recv(timeout=PATIENCE)]
        wait_until(lambda: state_of(near).in_flight == 2)
        far.close()
        wait_until(lambda: requests[0].cancelled)
        with shmtensor.Relay(f"{channel}-far", listen=where):
            requests.append(there.recv(timeout=PATIENCE))
            assert (requests[1].value, requests[1].attempt) == (1, 2)
            with pytest.raises(shmtensor.PeerDied):
                once.result()
        wait_until(lambda: state_of(near).state == "seeking")
        near.close(linger=0)
        with Serving(channel, lambda request: request.attempt):
            assert future.result() == 3


def test_a_service_is_refused_where_it_cannot_be(channel):
    with pytest.raises(shmtensor.ArgumentError, match="at most 47"):
        shmtensor.Relay("x" * 48, to=endpoint(), pattern="service")
    with pytest.raises(shmtensor.ArgumentError, match="is for a fan-out"):
        shmtensor.Relay(channel, to=endpoint(), pattern="service", delivery="all")
    with shmtensor.Publisher(channel), pytest.raises(shmtensor.ArgumentError, match="is a fan-out, not a service"):
        shmtensor.Relay(channel, to=endpoint(), pattern="service")
    where = endpoint()
    with (
        shmtensor.Client(channel),
        shmtensor.Producer(f"{channel}-far"),
        shmtensor.Relay(f"{channel}-far", listen=where),
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far") as near,
    ):
        wait_until(lambda: state_of(near).state == "refused")
        with pytest.raises(shmtensor.WireError, match="not a service"):
            near.wait(0)


def test_a_mesh(channel):
    """A relay between two other hosts is no server: a request takes the direct way."""
    with mesh(channel, "service") as (names, relays), Serving(names[2], lambda request: int(request.value) + 1):
        for name, far in ((names[0], (0, 2)), (names[1], (1, 2))):
            with shmtensor.Client(name) as client:
                client.wait_for_servers(1, timeout=PATIENCE)
                for number in range(10):
                    assert client.request(number, timeout=PATIENCE) == number + 1
                assert client.statistics().servers == 1
                wait_until(lambda far=far: state_of(relays[far]).messages == 10)
        assert state_of(relays[0, 1]).messages == state_of(relays[1, 0]).messages == 0


def test_labels_of_relays(channel):
    with service(channel) as (client, _, _), Serving(f"{channel}-far", lambda request: 1):
        client.wait_for_servers(1, timeout=PATIENCE)
        assert client.request(0, timeout=PATIENCE) == 1
        (server,) = shmtensor.inspect(channel).receivers
        assert server.label == f"relay to {path_hash(f'{channel}-far'):08x}"
        assert [it.label for it in shmtensor.inspect(f"{channel}-far").senders] == [f" via {path_hash(channel):08x}"]
        assert endpoints.count_servers(f"{channel}-far", ()) == 1
        assert endpoints.count_servers(channel, [(path_hash(f"{channel}-far"),)]) == 0
        assert endpoints.count_servers(channel, [(1, 2, 3, 4, 5)]) == 1
        assert endpoints.count_servers(channel, [(7,), (1, 2, 3, 4, 5, 6)]) == 0  # it came as far as may be
        assert endpoints.count_servers(f"{channel}-none", ()) == 0
