"""Requests and replies by the compiled module: the same notes, the same ends, whoever else is at it."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch

import shmtensor
from shmtensor import hot
from shmtensor.ring.layout import DEADLINE, NOTE
from shmtensor.rpc.call import Call
from shmtensor.rpc.notes import CANCELLED, ONCE
from shmtensor.rpc.request import Request

from .services import PATIENCE
from .test_rpc import pair, serving  # noqa: F401

pytestmark = pytest.mark.skipif(not hot.BUILT, reason="shmtensor.hot._hot is not built, or SHMTENSOR_PURE is set")


def warm(client, server) -> None:
    """Until both ways are compiled."""
    for _ in range(3):
        future = client.submit(torch.zeros(4), timeout=PATIENCE)
        req = server.recv(timeout=PATIENCE)
        req.reply(req.value)
        del req
        future.result(timeout=PATIENCE)
    assert client._requests._outbox is not None
    assert client._answers._inlet is not None


def test_the_words_are_those_of_the_python_code(pair):  # noqa: F811
    client, server = pair
    seen = {}
    for how in ("Python", "compiled"):
        if how == "compiled":
            warm(client, server)
        meta = {"by": "Python"} if how == "Python" else None  # which the compiled module leaves alone
        call = client._call(PATIENCE, False)
        client._requests.post(call, torch.ones(4), meta, PATIENCE)
        assert client._calls[call.seq] is call
        req = server.recv(timeout=PATIENCE)
        seen[how] = [
            call.words[call.at + NOTE] - (call.seq << 8), call.words[call.at + DEADLINE] == call.deadline,
            req.seq == call.seq, req._at == call.at, 0 < req.remaining <= PATIENCE,
        ]  # fmt: skip
        client._requests.cancel(call)
        assert call.words[call.at + NOTE] == call.seq << 8 | ONCE | CANCELLED
        assert req.cancelled
        client._drop(call)
        req.reply(req.value)
        del req
    assert seen["Python"] == seen["compiled"] == [ONCE, True, True, True, True]


def test_requests_are_those_of_the_python_code(pair):  # noqa: F811
    client, server = pair
    seen = []
    for how in ("Python", "compiled"):
        if how == "compiled":
            warm(client, server)
        call = client._call(PATIENCE, True)
        client._requests.post(call, torch.ones(4), {} if how == "Python" else None, PATIENCE)
        req = server.recv(timeout=PATIENCE)
        assert (req._server, req._words) == (server, req._source.words)
        assert server._open == {id(req): req._message}
        message = req._message
        seen.append(
            (
                req.value.tolist(), req.attempt, req.meta or None, req._at == call.at, req.seq == call.seq,
                message.seq == call.seq, message.nbytes, message.missed, message._receiver is server._intake,
                message._hold is not None, message._lease.seq == call.seq, req.answered, req.cancelled, req.expired,
            )
        )  # fmt: skip
        req.reply(req.value)
        assert (req.answered, server._open) == (True, {})
        kept = shmtensor.Message.__dict__["value"].__get__(message)  # also where its class has another `value`
        assert kept is message._hold is message._lease is message._receiver is None
        for again in (req.reply, req.fail):
            with pytest.raises(shmtensor.ReleasedError):
                again("twice")
        with pytest.raises(shmtensor.ReleasedError):
            assert req.value
        del req, message, again
        client._wait(call)
    assert seen[0] == seen[1]
    assert server.statistics().replied == 5


def test_requests_that_nobody_waits_for_are_passed_over(pair):  # noqa: F811
    client, server = pair
    warm(client, server)
    calls = [client._call(0.0 if number == 1 else PATIENCE, True) for number in range(3)]
    for number, call in enumerate(calls):
        client._requests.post(call, torch.full((4,), number), None, PATIENCE)
    words, at = calls[0].words, calls[0].at
    words[at + NOTE] |= CANCELLED  # and not withdrawn yet
    req = server.recv(timeout=PATIENCE)
    assert req.value.tolist() == [2] * 4
    statistics = server.statistics()
    assert (statistics.cancelled, statistics.expired, statistics.unfinished) == (1, 1, 1)
    del req  # unanswered
    with pytest.raises(shmtensor.RemoteError, match="Unanswered"):
        client._wait(calls[2])
    client._calls.clear()


def test_what_was_not_answered_goes_to_another_server(channel):
    with shmtensor.Server(channel) as one, shmtensor.Client(channel) as client:
        warm(client, one)
        future = client.submit(torch.ones(4), timeout=PATIENCE)
        req = one.recv(timeout=PATIENCE)
        one.close()
        assert req.answered
        del req
        with shmtensor.Server(channel) as other:
            req = other.recv(timeout=PATIENCE)
            assert req.attempt == 2
            req.reply(req.value)
            del req
            assert future.result(timeout=PATIENCE).tolist() == [1] * 4


def test_a_reply_to_nobody_is_dropped(pair):  # noqa: F811
    client, server = pair
    warm(client, server)
    call = client._call(PATIENCE, True)
    client._requests.post(call, torch.ones(4), None, PATIENCE)
    req = server.recv(timeout=PATIENCE)
    client._calls.clear()  # its thread was interrupted a moment ago
    req.reply(req.value)
    del req
    assert client._answers._inlet.answer(client._calls, 0) is False
    assert client._answers.statistics().leases == 0
    with serving(server, torch.neg):
        assert client.request(torch.ones(4), timeout=PATIENCE).tolist() == [-1] * 4


def test_asking_takes_the_reply_that_comes_next(pair):  # noqa: F811
    """Whose it is is told; what has no reply in time is on its way all the same."""
    client, server = pair
    warm(client, server)
    inlet, outbox, calls = client._answers._inlet, client._requests._outbox, client._calls
    first, second, third = (client._call(PATIENCE, True) for _ in range(3))
    assert inlet.ask(outbox, torch.full((4,), 1.0), calls, first, 0) == first.seq
    assert calls == {first.seq: first}
    req = server.recv(timeout=PATIENCE)
    req.reply(req.value)
    assert inlet.ask(outbox, torch.full((4,), 2.0), calls, second, 0) is first
    assert (first.value.tolist(), first.done, calls) == ([1.0] * 4, False, {second.seq: second})
    req = server.recv(timeout=PATIENCE)
    calls.clear()
    req.reply(req.value)
    assert inlet.ask(outbox, torch.full((4,), 3.0), calls, third, 0) is False
    assert inlet.ask(outbox, "no tensor", calls, second, 0) is None
    req = server.recv(timeout=PATIENCE)
    req.reply(req.value)
    del req
    assert inlet.answer(calls, 0) is third


def test_a_reply_that_is_there_first_is_handed_to_its_thread(pair):  # noqa: F811
    """`request` takes the reply of another one's, and waits for its own."""
    client, server = pair
    warm(client, server)
    future = client.submit(torch.full((4,), 1.0), timeout=PATIENCE)
    with client._leading, concurrent.futures.ThreadPoolExecutor(1) as threads:  # who submits receives nothing
        client._answers._in_vain = False
        req = server.recv(timeout=PATIENCE)
        req.reply(req.value)
        del req
        asked = threads.submit(client.request, torch.full((4,), 2.0), timeout=PATIENCE)
        assert concurrent.futures.wait([future], PATIENCE).done
        client._leading.release()
        with serving(server, torch.neg):
            assert asked.result(timeout=PATIENCE).tolist() == [-2.0] * 4
        assert client._leading.acquire(timeout=PATIENCE)
    assert future.result().tolist() == [1.0] * 4


def test_threads_share_a_client_of_plain_tensors(pair):  # noqa: F811
    client, server = pair
    begin = threading.Barrier(6)

    def ask(base: int) -> list[int]:
        begin.wait(PATIENCE)
        return [int(client.request(torch.full((4,), base + step), timeout=PATIENCE)[0]) for step in range(300)]

    with serving(server, torch.neg), concurrent.futures.ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, 1000 * index) for index in range(6)]
        for index, future in enumerate(asked):
            assert future.result() == [-1000 * index - step for step in range(300)]
    statistics = client.statistics()
    assert (statistics.duplicates, statistics.outstanding, statistics.replies) == (0, 0, 1800)


def test_a_full_ring_is_left_to_the_python_code(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel, slots=2) as client:
        warm(client, server)
        futures = [client.submit(torch.zeros(4)) for _ in range(2)]
        with pytest.raises(shmtensor.RingFull):
            client.submit(torch.zeros(4), timeout=0)
        assert len(client._calls) == 2
        with serving(server, torch.neg):
            for future in futures:
                future.result(timeout=PATIENCE)


def test_what_is_no_endpoint_of_theirs_is_refused(pair):  # noqa: F811
    client, server = pair
    warm(client, server)
    outbox, inlet = client._requests._outbox, client._answers._inlet
    value, call = torch.zeros(4), client._call(PATIENCE, True)
    for wrong in (
        lambda: outbox.answer(value, 1), lambda: outbox.ask(value, [], call), lambda: outbox.ask(value),
        lambda: outbox.ask(value, {}, None), lambda: outbox.ask(value, {}, Call(0, "bits")),
        lambda: outbox.ask(value, {}, Call("deadline", 0)), lambda: inlet.answer([], 0), lambda: inlet.answer({}),
        lambda: inlet.ask(inlet, value, {}, call, 0), lambda: inlet.ask(outbox, value, [], call, 0),
        lambda: inlet.ask(outbox, value, {}, call), lambda: server._intake._inlet.ask(outbox, value, {}, call, 0),
        lambda: server._intake._inlet.answer({}, 0), lambda: inlet.serve(Request, None),
        lambda: server._intake._inlet.serve(torch.Tensor(), None), lambda: server._intake._inlet.serve(dict, None),
        lambda: server._intake._inlet.request(server._intake, 0, server, []),
        lambda: server._intake._inlet.request(server._intake, 0, server),
        lambda: server._intake._inlet.respond(None, value), lambda: server._intake._inlet.respond(None, value, []),
    ):  # fmt: skip
        with pytest.raises((TypeError, AttributeError)):  # a dict has none of a request's slots
            wrong()
    assert server._intake._inlet.respond(None, value, {}) is None  # no request
    with pytest.raises(AttributeError):
        outbox.ask(value, {}, object())  # which cannot be told where it is
    with serving(server, torch.neg):
        assert client.request(torch.ones(4), timeout=PATIENCE).tolist() == [-1] * 4


@pytest.mark.parametrize(
    "ends", [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
)
def test_several_senders(channel, ends):
    """Each has an inlet of its own; each one's messages come in order; all are forgotten when one leaves."""
    make_tx, make_rx = ends
    with make_rx(channel) as rx, make_tx(channel) as first, make_tx(channel) as second, make_tx(channel) as third:
        senders = [first, second, third]
        for number in range(40):
            for which, tx in enumerate(senders):
                tx.send(torch.full((3,), 1000 * which + number))
            got = []
            for _ in senders:
                with rx.recv(timeout=PATIENCE) as message:
                    got.append(int(message.value[0]))
                del message
            assert sorted(got) == [1000 * which + number for which in range(3)]
        assert all(feed.inlet is not None for feed in rx._feeds)
        assert rx._inlet is None
        inlets = [feed.inlet for feed in rx._feeds]
        third.close()
        for which, tx in enumerate(senders[:2]):
            for number in range(5):
                tx.send(torch.full((3,), 1000 * which + number))
        got = []
        for _ in range(10):
            with rx.recv(timeout=PATIENCE) as message:
                got.append(int(message.value[0]))
            del message
        assert sorted(got) == [1000 * which + number for which in range(2) for number in range(5)]
        assert [number for number in got if number < 1000] == list(range(5))
        assert not any(feed.inlet in inlets for feed in rx._feeds)
        statistics = rx.statistics()
        assert (statistics.received, statistics.received_bytes, statistics.leases) == (130, 130 * 24, 0)


def test_several_clients_and_servers(channel):
    """Every reply is its request's, whoever takes it."""
    with shmtensor.Server(channel) as one, shmtensor.Server(channel) as other:
        with serving(one, torch.neg), serving(other, torch.neg):

            def ask(base: int) -> list[int]:
                with shmtensor.Client(channel) as client:
                    values = (torch.full((4,), base + step) for step in range(300))
                    return [int(reply[0]) for reply in client.map(values, timeout=PATIENCE)]

            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(ask, 1000 * index) for index in range(4)]
                for index, future in enumerate(asked):
                    assert future.result() == [-1000 * index - step for step in range(300)]
        assert one.statistics().replied + other.statistics().replied == 1200


def test_unusual_replies_of_several_servers(channel):
    """What the compiled module leaves alone waits for nobody, and nobody for it."""

    def answer(value):
        number = int(value[0])
        if number % 7 == 6:
            raise LookupError(number)
        return {"number": number} if number % 3 == 2 else value

    with shmtensor.Server(channel) as one, shmtensor.Server(channel) as other, shmtensor.Client(channel) as client:
        with serving(one, answer), serving(other, answer):
            futures = [client.submit(torch.full((4,), number), timeout=PATIENCE) for number in range(14)]
            for number, future in enumerate(futures):
                if number % 7 == 6:
                    assert isinstance(future.exception(), shmtensor.RemoteError)
                else:
                    assert int(future.result()["number"] if number % 3 == 2 else future.result()[0]) == number
            values = (torch.full((4,), number) for number in range(400) if number % 7 != 6)
            for reply, number in zip(
                client.map(values, timeout=PATIENCE), (number for number in range(400) if number % 7 != 6), strict=True
            ):
                assert int(reply["number"] if number % 3 == 2 else reply[0]) == number
        assert client.statistics().duplicates == 0
