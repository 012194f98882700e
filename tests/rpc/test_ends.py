"""Requests and replies by both implementations: the same notes, the same ends, whoever else is at it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from types import SimpleNamespace

import pytest
import torch

import shmtensor
from shmtensor.memory.locks import LockFile
from shmtensor.ring.implementation import Received
from shmtensor.ring.layout import DEADLINE, NOTE
from shmtensor.rpc.calls import Call, RequestFuture
from shmtensor.rpc.endpoints import CANCELLED, ONCE
from shmtensor.rpc.request import record_of

from ..waiting import wait_until
from .services import PATIENCE
from .test_requests import pair, serving  # noqa: F401


def warm(client, server) -> None:
    """Until each end knows the other."""
    for _ in range(3):
        future = client.submit(torch.zeros(4), timeout=PATIENCE)
        req = server.recv(timeout=PATIENCE)
        req.reply(req.value)
        del req
        future.result(timeout=PATIENCE)


def test_the_words_of_a_request(pair):  # noqa: F811
    client, server = pair
    seen = {}
    for how in ("first", "warm"):
        if how == "warm":
            warm(client, server)
        meta = {"by": "Python"} if how == "first" else None
        call = client._in_flight.begin(PATIENCE, False)
        client._requests.post(call, torch.ones(4), meta, PATIENCE)
        assert client._in_flight.calls[call.seq] is call
        req = server.recv(timeout=PATIENCE)
        seen[how] = [
            call.words[call.at + NOTE] - (call.seq << 8), call.words[call.at + DEADLINE] == call.deadline,
            req.seq == call.seq, record_of(req).at == call.at, 0 < req.remaining <= PATIENCE,
        ]  # fmt: skip
        client._requests.cancel(call)
        assert call.words[call.at + NOTE] == call.seq << 8 | ONCE | CANCELLED
        assert req.cancelled
        client._in_flight.give_up(call)
        req.reply(req.value)
        del req
    assert seen["first"] == seen["warm"] == [ONCE, True, True, True, True]


def test_what_a_request_is(pair):  # noqa: F811
    client, server = pair
    seen = []
    for how in ("first", "warm"):
        if how == "warm":
            warm(client, server)
        call = client._in_flight.begin(PATIENCE, True)
        client._requests.post(call, torch.ones(4), {} if how == "first" else None, PATIENCE)
        req = server.recv(timeout=PATIENCE)
        record = record_of(req)
        assert record.words is record.source.words
        assert server._taken.open == {record}
        message = record.message
        seen.append(
            (
                req.value.tolist(), req.attempt, req.meta or None, record_of(req).at == call.at, req.seq == call.seq,
                message.seq == call.seq, message.nbytes, message.missed, message._receiver is server._receiver,
                message._lease is not None, message._lease.seq == call.seq, req.answered, req.cancelled, req.expired,
            )
        )  # fmt: skip
        req.reply(req.value)
        assert (req.answered, server._taken.open) == (True, set())
        kept = Received.__dict__["value"].__get__(message)  # also where its class has another `value`
        assert kept is message._hold is message._lease is message._receiver is None
        for again in (req.reply, req.fail):
            with pytest.raises(shmtensor.ReleasedError):
                again("twice")
        with pytest.raises(shmtensor.ReleasedError):
            assert req.value
        del req, record, message, again
        client._in_flight.wait(call)
    assert seen[0] == seen[1]
    assert server.statistics().replied == 5


def test_requests_that_nobody_waits_for_are_passed_over(pair):  # noqa: F811
    client, server = pair
    warm(client, server)
    calls = [client._in_flight.begin(0.0 if number == 1 else PATIENCE, True) for number in range(3)]
    for number, call in enumerate(calls):
        client._requests.post(call, torch.full((4,), number), None, PATIENCE)
    words, at = calls[0].words, calls[0].at
    words[at + NOTE] |= CANCELLED  # and not withdrawn yet
    req = server.recv(timeout=PATIENCE)
    assert req.value.tolist() == [2] * 4
    statistics = server.statistics()
    assert (statistics.cancelled, statistics.expired, statistics.unfinished) == (1, 1, 1)
    del req  # unanswered
    client._in_flight.wait(calls[2])
    with pytest.raises(shmtensor.RemoteError, match="Unanswered"):
        calls[2].result()
    client._in_flight.calls.clear()


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
    call = client._in_flight.begin(PATIENCE, True)
    client._requests.post(call, torch.ones(4), None, PATIENCE)
    req = server.recv(timeout=PATIENCE)
    client._in_flight.calls.clear()  # its thread was interrupted a moment ago
    req.reply(req.value)
    del req
    with serving(server, torch.neg):
        assert client.request(torch.ones(4), timeout=PATIENCE).tolist() == [-1] * 4
    assert client._answers.statistics().leases == 0
    assert client.statistics().duplicates == 1


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


def test_a_full_ring(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel, slots=2) as client:
        warm(client, server)
        futures = [client.submit(torch.zeros(4)) for _ in range(2)]
        with pytest.raises(shmtensor.RingFull):
            client.submit(torch.zeros(4), timeout=0)
        assert len(client._in_flight.calls) == 2
        with serving(server, torch.neg):
            for future in futures:
                future.result(timeout=PATIENCE)


@pytest.mark.parametrize(
    "ends", [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
)
def test_several_senders(channel, ends):
    """Each one's messages come in order, also when one leaves."""
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
    """Errors and dicts among tensors: none waits for another."""

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


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda client, future: client.close(), shmtensor.ClosedError),
        (lambda client, future: asyncio.run(client.aclose()), shmtensor.ClosedError),
        (lambda client, future: future.cancel(), concurrent.futures.CancelledError),
    ],
    ids=["close", "aclose", "cancel"],
)
def test_a_request_that_a_thread_withdraws_while_another_looks_for_lost_ones(channel, end, error, monkeypatch):
    """It is done, and its call has not ended, when the other one looks."""
    with shmtensor.Server(channel), shmtensor.Client(channel) as client:
        in_flight, withdrawn, looked = client._in_flight, threading.Event(), threading.Event()
        call = in_flight.begin(None, True)
        future = call.future = RequestFuture(in_flight, call)  # no thread of the client's own looks
        client._requests.post(call, torch.zeros(4), None, None)
        cancel, drain = client._requests.cancel, in_flight.drain
        thread = threading.Thread(target=end, args=(client, future))

        def cancel_and_wait(call) -> None:
            cancel(call)
            withdrawn.set()
            assert looked.wait(PATIENCE)

        def withdraw_first() -> None:
            if not withdrawn.is_set():
                thread.start()
                assert withdrawn.wait(PATIENCE)
            drain()

        monkeypatch.setattr(client._requests, "cancel", cancel_and_wait)
        monkeypatch.setattr(in_flight, "drain", withdraw_first)
        in_flight.check_calls()
        looked.set()
        with pytest.raises(error):
            future.result(PATIENCE)
        thread.join(PATIENCE)


def test_a_request_that_a_server_drops_since_its_client_has_closed(channel, monkeypatch):
    """One that began while the client closed, in another thread."""
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        warm(client, server)
        in_flight, futures = client._in_flight, []
        leave, close = client._requests.close, client._answers.close

        def begin() -> None:
            if not futures:
                futures.append(client.submit(torch.zeros(4)))
            leave()

        def look() -> None:
            monkeypatch.undo()
            before = server.statistics().cancelled
            with pytest.raises(shmtensor.TimedOut):
                server.recv(timeout=0)
            assert server.statistics().cancelled == before + 1
            in_flight.check_calls()
            close()

        monkeypatch.setattr(client._requests, "close", begin)
        monkeypatch.setattr(client._answers, "close", look)
        client.close()
        with pytest.raises(shmtensor.ClosedError):
            futures[0].result(PATIENCE)


def test_a_request_that_a_thread_withdraws_while_another_closes_its_sender(channel, monkeypatch):
    """The one that closes waits for the lock on the request to be dropped: its file goes."""
    with shmtensor.Server(channel), shmtensor.Client(channel) as client:
        requests, waits = client._requests, threading.Event()
        future = client.submit(torch.zeros(4))
        lock, try_exclusive = requests._withdrawing, LockFile.try_exclusive
        closing = threading.Thread(target=requests.close)

        class Noticing:
            def __enter__(self) -> None:
                if not lock.acquire(blocking=False):
                    waits.set()
                    lock.acquire()

            def __exit__(self, *_) -> None:
                lock.release()

        def lock_late(self, byte: int) -> bool:
            if self is requests._sequences.locks and not closing.ident:
                closing.start()
                wait_until(lambda: waits.is_set() or not closing.is_alive())
            return try_exclusive(self, byte)

        monkeypatch.setattr(requests, "_withdrawing", Noticing())
        monkeypatch.setattr(LockFile, "try_exclusive", lock_late)
        assert future.cancel()
        closing.join(PATIENCE)
        assert requests.closed


def test_a_callback_has_the_reply_before_its_call_has_ended():
    """As it may, in its own thread, while the one that receives is about to note the end of the call."""
    in_flight = SimpleNamespace(wait=lambda call, timeout: None, notifier=SimpleNamespace(due=[]))
    call, seen = Call(0, 0), []
    future = RequestFuture(in_flight, call)
    future.add_done_callback(lambda future: seen.append((future.result(0), future.exception(0))))
    future._finish(7, None)
    future._source = in_flight, call  # as before the last step of `_finish`
    (notify,) = in_flight.notifier.due
    notify()
    assert seen == [(7, None)]
