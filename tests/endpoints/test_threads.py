"""Several threads at one endpoint: one call runs at a time, and none waits longer than it was told to."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import shmtensor
from shmtensor.channel import membership
from shmtensor.endpoints import base, receiver

from ..waiting import PATIENCE, wait_until

PAIRS = {
    "fan-out": (shmtensor.Publisher, shmtensor.Subscriber),
    "work-queue": (shmtensor.Producer, shmtensor.Consumer),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


class Call(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call, *args, **options):
        super().__init__()
        self.call, self.args, self.options = call, args, options
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self.call(*self.args, **self.options)
        except Exception as error:
            self.error = error

    def end(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self


def is_asleep(endpoint):
    return lambda: endpoint._control_words[endpoint._asleep] & 1


@contextmanager
def receiving(rx):
    """Another thread waits in `recv`."""
    call = Call(rx.recv)
    wait_until(is_asleep(rx))
    yield call
    call.end()


@contextmanager
def sending(tx, value):
    """Another thread waits for a slot."""
    call = Call(tx.send, value)
    wait_until(is_asleep(tx))
    yield call
    call.end()


@pytest.fixture
def when_waiting(monkeypatch):
    """`when_waiting(act)`: call `act()` once a call with a time-out has found another thread inside."""

    def install(act):
        check = base.check_timeout

        def checked(timeout, *name):
            monkeypatch.setattr(base, "check_timeout", check)
            act()

        monkeypatch.setattr(base, "check_timeout", checked)

    return install


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_time_out_of_recv_while_another_thread_waits(channel, pair, timeout):
    with pair[1](channel) as rx, pair[0](channel) as tx:
        with receiving(rx) as call:
            with pytest.raises(shmtensor.TimedOut, match=f"no message within {timeout:g} s"):
                rx.recv(timeout=timeout)
            assert call.is_alive()
            tx.send(np.array(1))
        assert int(call.result.value) == 1


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_time_out_of_a_sender_while_another_thread_waits(channel, pair, timeout):
    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        tx.send(np.array(1))
        with sending(tx, np.array(2)) as call:
            for other in (lambda: tx.send(np.array(3), timeout=timeout), lambda: tx.loan(1, np.int8, timeout=timeout)):
                with pytest.raises(shmtensor.RingFull, match="another thread waits for room"):
                    other()
            assert call.is_alive()
            rx.recv(timeout=PATIENCE).release()
        rx.recv(timeout=PATIENCE).release()
        assert tx.send(np.array(4), timeout=PATIENCE) == 3


def test_a_call_without_time_that_finds_a_thread_at_work_waits_for_it(channel, pair, when_waiting):
    """It has what it does done soon, so that there may be a message, or a slot."""
    with pair[1](channel) as rx, pair[0](channel) as tx:
        for endpoint in (rx, tx):
            begun, done = threading.Event(), threading.Event()
            working = Call(endpoint._run, lambda begun=begun, done=done: (begun.set(), done.wait(PATIENCE)))
            assert begun.wait(PATIENCE)
            when_waiting(done.set)
            if endpoint is tx:
                assert tx.send(np.array(2), timeout=0) == 2
            else:
                tx.send(np.array(1))
                assert int(rx.recv(timeout=0).value) == 1
            working.end()


def test_what_is_left_of_a_time_out_is_waited(channel, pair):
    with pair[1](channel) as rx, pair[0](channel) as tx:
        with receiving(rx) as first:
            second = Call(rx.recv, timeout=PATIENCE)
            tx.send(np.array(1))
        wait_until(lambda: is_asleep(rx)() or not second.is_alive())
        tx.send(np.array(2))
        assert sorted(int(call.end().result.value) for call in (first, second)) == [1, 2]


@pytest.mark.parametrize("full", ["block", "grow", "drop", "error"])
def test_other_calls_run_while_a_thread_waits_for_receivers(channel, pair, full):
    with pair[1](channel) as rx:
        tx = pair[0](channel, full=full)
        call = Call(tx._wait_for_receivers, 2, None, "receivers")
        wait_until(lambda: tx._recipients.listeners)
        for number in range(3):
            tx.send(np.full(1 << 10 * number, number, np.uint8))  # the last ones need another ring
            with rx.recv(timeout=PATIENCE) as message:
                assert int(message.value[0]) == number
        assert call.is_alive()
        with pair[1](channel):
            assert call.end().error is None
        call = Call(tx._wait_for_receivers, 2, None, "receivers")
        tx.close()
        assert isinstance(call.end().error, shmtensor.ClosedError)


def test_other_calls_run_while_a_thread_waits_for_senders(channel, pair):
    with pair[0](channel) as tx:
        rx = pair[1](channel)
        call = Call(rx._wait_for_members, 2, None, "senders", rx._count_senders)
        wait_until(lambda: rx._readers)
        for number in range(3):
            tx.send(np.array(number))
            with rx.recv(timeout=0) as message:
                assert int(message.value) == number
        assert call.is_alive()
        with pair[0](channel):
            assert call.end().error is None
        call = Call(rx._wait_for_members, 2, None, "senders", rx._count_senders)
        rx.close()
        assert isinstance(call.end().error, shmtensor.ClosedError)


def test_a_time_out_of_waiting_for_members_while_another_thread_waits(channel, pair):
    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        with receiving(rx) as call:
            with pytest.raises(shmtensor.TimedOut, match="another thread waits"):
                rx._wait_for_members(2, 0.01, "senders", rx._count_senders)
            tx.send(np.array(1))
        call.result.release()
        tx.send(np.array(2))
        with sending(tx, np.array(3)):
            with pytest.raises(shmtensor.TimedOut, match="another thread waits"):
                tx._wait_for_receivers(2, 0.01, "receivers")
            rx.recv(timeout=PATIENCE).release()


def test_close_ends_a_call_that_waits_for_another_thread(channel, pair, when_waiting):
    with pair[0](channel):
        rx = pair[1](channel)
        waits = threading.Event()
        with receiving(rx) as first:
            when_waiting(waits.set)
            second = Call(rx.recv, timeout=PATIENCE)
            assert waits.wait(PATIENCE)
            rx.close()
        assert isinstance(first.error, shmtensor.ClosedError)
        assert isinstance(second.end().error, shmtensor.ClosedError)


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "raises"])
def test_a_handler_that_interrupts_a_call_that_waits_for_another_thread(channel, pair, when_waiting, closes):
    class Enough(Exception):
        pass

    def handle(*_):
        if closes:
            rx.close()
        else:
            raise Enough

    with pair[0](channel) as tx:
        rx = pair[1](channel)
        before = signal.signal(signal.SIGUSR2, handle)
        try:
            with receiving(rx) as call:
                when_waiting(lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2))
                with pytest.raises(shmtensor.ClosedError if closes else Enough):
                    rx.recv(timeout=PATIENCE)
                assert rx.closed == closes
                if not closes:
                    tx.send(np.array(1))
        finally:
            signal.signal(signal.SIGUSR2, before)
        assert isinstance(call.error, shmtensor.ClosedError if closes else type(None))
        rx.close()


def test_a_loan_from_a_sender_that_another_thread_closes(channel, pair):
    with pair[1](channel) as rx:
        tx = pair[0](channel)
        tx.send(np.array(1))
        closing = Call(tx.close, None)
        wait_until(is_asleep(tx))
        with pytest.raises(shmtensor.ClosedError):
            tx.loan(1, np.int8)
        rx.recv(timeout=PATIENCE).release()
        closing.end()


def test_a_loan_is_sent_while_another_thread_waits_for_its_slot(channel, pair):
    with pair[1](channel) as rx, pair[0](channel, slots=2) as tx:
        loans = [tx.loan(1, np.int64), tx.loan(1, np.int64)]
        with sending(tx, np.array([3])) as call:
            for seq, loan in enumerate(loans, 1):
                loan.array[0] = seq
                sent = Call(loan.send).end()
                assert sent.result == loan.seq == seq
                assert call.is_alive()
            with rx.recv(timeout=PATIENCE) as message:
                assert int(message.value[0]) == 1
        assert call.result == 3
        assert [int(rx.recv(timeout=PATIENCE).value[0]) for _ in range(2)] == [2, 3]


def test_a_loan_that_cannot_be_sent_for_another_thread_says_why(channel, pair, monkeypatch):
    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        loan = tx.loan(1, np.int64)
        loan.array[0] = 1
        with sending(tx, np.array([2])) as call:
            commit, tried = tx._commit_inside, threading.Event()

            def fails(*args):
                tried.set()
                raise OSError("on purpose")

            monkeypatch.setattr(tx, "_commit_inside", fails)
            sent = Call(loan.send)
            assert tried.wait(PATIENCE)
            monkeypatch.setattr(tx, "_commit_inside", commit)
            sent.end()
            assert (sent.error, sent.result) == (None, 1)
            assert call.is_alive()
            rx.recv(timeout=PATIENCE).release()
        assert call.result == 2


def test_more_threads_with_loans_than_slots(channel, pair):
    """Some wait for slots that others have on loan."""
    count, each = 6, 50

    def send():
        for _ in range(each):
            with tx.loan(1, np.int64) as loan:
                loan.array[0] = 1

    with pair[1](channel) as rx, pair[0](channel, slots=3) as tx:
        calls = [Call(send) for _ in range(count)]
        seqs = []
        for _ in range(count * each):
            with rx.recv(timeout=PATIENCE) as message:
                seqs.append(message.seq)
        assert seqs == list(range(1, count * each + 1))
        assert [call.end().error for call in calls] == [None] * count


@pytest.mark.parametrize("when", ["before it leaves", "after it has looked"])
def test_the_last_view_dies_in_a_thread_while_another_one_closes(channel, pair, when, monkeypatch):
    """One of the two leaves the channel, and the other does not find it half gone."""
    with pair[0](channel) as tx, pair[1](channel) as rx:
        tx.send(np.ones(64))
        views, leaves, has_left = [rx.recv(timeout=PATIENCE).value], threading.Event(), threading.Event()
        exclusively, unraisable = membership.exclusively, []
        end_dead_leases, wake_senders = rx._end_dead_leases, receiver.wake_senders
        dropping = threading.Thread(target=views.clear)

        def leave_slowly(*args):
            if threading.current_thread() is dropping:
                leaves.set()
                assert has_left.wait(PATIENCE)
            return exclusively(*args)

        def drop() -> None:
            dropping.start()
            wait_until(lambda: leaves.is_set() or not dropping.is_alive())

        monkeypatch.setattr(membership, "exclusively", leave_slowly)
        monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
        if when == "before it leaves":
            monkeypatch.setattr(rx, "_end_dead_leases", lambda: (drop(), end_dead_leases()))
        else:
            monkeypatch.setattr(receiver, "wake_senders", lambda member: (drop(), wake_senders(member)))
        rx.close()
        has_left.set()
        dropping.join(PATIENCE)
        assert [str(it.exc_value) for it in unraisable] == []
        assert rx._member.has_left


def test_a_client_with_several_threads(channel):
    """A request waits for room, or somebody for servers: the time-outs of other requests hold."""
    with shmtensor.Client(channel, slots=1) as client:
        waiting = Call(client.wait_for_servers, 1)
        first = client.submit(1)
        second = Call(client.request, 2)
        wait_until(is_asleep(client._requests))
        for timeout in (0, 0.01):
            with pytest.raises(shmtensor.RingFull, match=f'Client of service "{channel}": another thread waits'):
                client.request(3, timeout=timeout)
        with pytest.raises(shmtensor.TimedOut, match="another thread waits"):
            client.wait_for_servers(1, timeout=0.01)
        assert second.is_alive()
        with shmtensor.Server(channel) as server:
            serving = Call(server.run, lambda value: value)
            assert first.result(PATIENCE) == 1
            assert second.end().result == 2
            assert waiting.end().error is None
            assert client.request(3, timeout=PATIENCE) == 3
            server.stop()
            serving.end()


def test_a_server_with_several_threads(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        waiting = Call(server.recv)
        wait_until(is_asleep(server._receiver))
        for timeout in (0, 0.01):
            with pytest.raises(shmtensor.TimedOut):
                server.recv(timeout=timeout)
        assert waiting.is_alive()
        future = client.submit(1)
        waiting.end().result.reply(2)
        assert future.result(PATIENCE) == 2
