"""Signal handlers and finalizers that call back: `close()` from inside a call of the same thread, and what else."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor.channel import control as ctl
from shmtensor.channel.cleanup import channels
from shmtensor.channel.inspect import view_of
from shmtensor.errors import ReentrantError

from ..waiting import wait_until

PATIENCE = 120.0
PAIRS = {
    "fan-out": (shmtensor.Publisher, shmtensor.Subscriber),
    "work-queue": (shmtensor.Producer, shmtensor.Consumer),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


@pytest.fixture
def on_signal():
    """Set the handler of SIGUSR2; `alarm(when)` sends it from a thread once `when()` holds."""
    before = signal.getsignal(signal.SIGUSR2)
    threads = []

    def install(handler):
        signal.signal(signal.SIGUSR2, lambda number, frame: handler())

    def alarm(when):
        def send():
            wait_until(when)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    install.alarm = alarm
    yield install
    for thread in threads:
        thread.join(PATIENCE)
    signal.signal(signal.SIGUSR2, before)


def is_asleep(endpoint):
    return lambda: endpoint._control_words[endpoint._asleep] & 1


def has_looked(tx):
    """Whether it waits for receivers, and has found who is there."""
    return lambda: tx._recipients.epoch >= 0


def test_close_in_a_handler_ends_recv(channel, pair, on_signal):
    with pair[0](channel), pair[1](channel) as rx:
        on_signal(rx.close)
        on_signal.alarm(is_asleep(rx))
        with pytest.raises(shmtensor.ClosedError):
            rx.recv()
        assert rx.closed
        assert "closed" in repr(rx)


def test_close_in_a_handler_ends_send(channel, pair, on_signal):
    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        tx.send(np.zeros(3))
        on_signal(tx.close)
        on_signal.alarm(is_asleep(tx))
        with pytest.raises(shmtensor.ClosedError):
            tx.send(np.ones(3))
        assert tx.closed
        with rx.recv(timeout=PATIENCE) as message:  # what was sent stays readable
            assert message.value.tolist() == [0, 0, 0]


@pytest.mark.parametrize("ends", [(0,), (0.05,), (None, 0)])
def test_close_in_a_handler_ends_a_close_that_lingers(channel, pair, on_signal, ends):
    with pair[1](channel) as rx:
        tx = pair[0](channel)
        tx.send(np.zeros(3))
        on_signal(lambda: [tx.close(linger=linger) for linger in ends])
        on_signal.alarm(is_asleep(tx))
        tx.close(linger=None)
        assert f'"{channel}" closed' in repr(tx)
        with rx.recv(timeout=PATIENCE) as message:  # what was sent stays readable
            assert message.value.tolist() == [0, 0, 0]


@pytest.mark.parametrize("ends", [(0,), (0.05,), (None, 0)])
def test_close_by_another_thread_ends_a_close_that_lingers(channel, pair, ends):
    """Each returns when the sender is closed."""
    with pair[1](channel):
        tx = pair[0](channel)
        tx.send(np.zeros(3))
        threads = []
        for linger in (None, *ends):
            threads.append(threading.Thread(target=tx.close, args=(linger,)))
            threads[-1].start()
            if linger is None:
                wait_until(is_asleep(tx))
        for thread in threads:
            thread.join(PATIENCE)
            assert f'"{channel}" closed' in repr(tx)


def test_a_later_end_of_lingering_changes_nothing(channel, pair):
    with pair[1](channel):
        tx = pair[0](channel)
        tx.send(np.zeros(3))
        thread = threading.Thread(target=tx.close, args=(0.05,))
        thread.start()
        tx.close(linger=None)
        thread.join(PATIENCE)
        assert f'"{channel}" closed' in repr(tx)


@pytest.mark.parametrize("call", ["send", "asend"])
def test_what_closes_a_waiting_sender_may_give_it_a_slot_and_nothing_is_sent(channel, pair, on_signal, call):
    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        tx.send(np.zeros(3))

        def close_and_make_room():
            tx.close()
            rx.recv(timeout=PATIENCE).release()

        on_signal(close_and_make_room)
        on_signal.alarm(is_asleep(tx))
        with pytest.raises(shmtensor.ClosedError):
            tx.send(np.ones(3)) if call == "send" else asyncio.run(tx.asend(np.ones(3)))
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)


class Enough(Exception):
    """What a handler raises."""


def test_what_a_handler_raises_ends_a_wait_for_a_slot(channel, pair, on_signal):
    def enough():
        raise Enough

    with pair[1](channel) as rx, pair[0](channel, slots=1) as tx:
        tx.send(np.zeros(3))
        on_signal(enough)
        for call in (
            lambda: tx.send(np.ones(3)),
            lambda: tx.loan(3, np.int8),
        ):
            on_signal.alarm(is_asleep(tx))
            with pytest.raises(Enough):
                call()
        tx._recipients.epoch = -1
        on_signal.alarm(has_looked(tx))
        with pytest.raises(Enough):
            tx._wait_for_receivers(2, None, "receivers")
        on_signal.alarm(is_asleep(rx))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value.tolist() == [0, 0, 0]
        with pytest.raises(Enough):
            rx.recv(timeout=PATIENCE)


def test_close_in_a_handler_ends_waiting_for_receivers(channel, pair, on_signal):
    with pair[0](channel) as tx:
        on_signal(tx.close)
        on_signal.alarm(has_looked(tx))
        with pytest.raises(shmtensor.ClosedError):
            (tx.wait_for_subscribers if pair[0] is shmtensor.Publisher else tx.wait_for_consumers)(1)
        assert tx.closed


def test_close_in_a_handler_of_a_thread_that_is_in_no_call(channel, pair, on_signal):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        on_signal(lambda: (tx.close(), rx.close()))
        on_signal.alarm(lambda: True)
        wait_until(lambda: rx.closed)
        assert tx.closed


def test_close_of_the_other_end_in_a_handler(channel, pair, on_signal):
    """Only what the thread is inside of is put off."""
    with pair[0](channel) as tx, pair[1](channel) as rx:
        tx.send(np.zeros(1))
        with rx.recv(timeout=PATIENCE):
            pass
        on_signal(tx.close)
        on_signal.alarm(is_asleep(rx))
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv()
        assert tx.closed


def test_a_message_that_came_meanwhile_is_not_lost(channel, on_signal):
    """The call in progress has taken a message when `close()` is called: another consumer gets it."""
    with shmtensor.Producer(channel) as tx, shmtensor.Consumer(channel) as other:
        rx = shmtensor.Consumer(channel)
        take = rx._take

        def take_and_close(reader, patience=0):
            message = take(reader, patience)
            if message is not None:
                closing[0]()
            return message

        closing = [rx.close]
        rx._take = take_and_close
        rx._direct = None
        tx.send(np.array([7]))
        with pytest.raises(shmtensor.ClosedError):
            rx.recv(timeout=PATIENCE)
        assert rx.closed
        with other.recv(timeout=PATIENCE) as message:
            assert message.value.tolist() == [7]
        closing.clear()


class Calls:
    """An object of a user's whose finalizer calls something back."""

    def __init__(self, call):
        self.call = call
        self.circle = self

    def __del__(self):
        self.call()


@pytest.mark.filterwarnings("ignore:.*no consumer has finished:ResourceWarning")
def test_a_finalizer_that_closes(channel, pair):
    """The garbage collector may run it anywhere in the library's calls, in the thread that is inside."""
    closed = 0
    for _ in range(30):
        tx, rx = pair[0](channel), pair[1](channel)
        before = gc.get_threshold()
        gc.set_threshold(7)
        try:
            Calls(tx.close)
            Calls(rx.close)
            for number in range(50):
                tx.send({"a": np.array([number])}, timeout=0)
                rx.recv(timeout=PATIENCE)
        except shmtensor.ClosedError:
            closed += 1
        finally:
            gc.set_threshold(*before)
            tx.close()
            rx.close()
            gc.collect()
    assert closed


def test_other_calls_from_inside_are_refused_and_do_not_hang(channel, pair, on_signal):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        errors = []

        def call_back():
            try:
                rx.recv(timeout=PATIENCE)
            except ReentrantError as error:
                errors.append(error)

        on_signal(call_back)
        on_signal.alarm(is_asleep(rx))
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=1)
        assert "signal handler" in str(errors[0])
        tx.send(np.zeros(1))
        with rx.recv(timeout=PATIENCE):
            pass


def test_close_in_a_handler_beside_an_event_loop(channel, pair, on_signal):
    async def main():
        async with pair[0](channel) as tx, pair[1](channel) as rx:
            on_signal(rx.close)
            on_signal.alarm(is_asleep(rx))
            with pytest.raises(shmtensor.ClosedError):
                await rx.arecv()
            assert rx.closed
            del tx

    asyncio.run(main())


def test_close_by_another_thread_waits_until_the_call_has_ended(channel, pair):
    with pair[0](channel), pair[1](channel) as rx:
        errors = []

        def receive():
            try:
                rx.recv()
            except shmtensor.ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(is_asleep(rx))
        rx.close()
        assert rx.closed
        thread.join(PATIENCE)
        assert len(errors) == 1


@pytest.fixture
def while_opening(monkeypatch, on_signal, channel):
    """`while_opening(make, act)`: `make()`, which opens an endpoint, with `act()` in a handler that interrupts it where
    it holds its channel's lock. Returns the endpoint."""

    def go(make, act):
        advance = ctl.Control.advance
        on_signal(act)

        def interrupted(control):
            if control.channel not in (channel, channel + "-b"):  # a dead one that it sweeps on the way
                advance(control)
                return
            monkeypatch.setattr(ctl.Control, "advance", advance)
            signal.raise_signal(signal.SIGUSR2)
            assert ctl.is_held()
            advance(control)

        monkeypatch.setattr(ctl.Control, "advance", interrupted)
        return make()

    return go


def living(channel) -> int:
    return sum(member.alive for member in view_of(channel).members)


@pytest.mark.parametrize("same", [True, False], ids=["same-channel", "another-channel"])
def test_close_in_a_handler_that_interrupts_opening(channel, pair, while_opening, same):
    """It takes effect when the lock is free."""
    tx, rx = pair[0](channel), pair[1](channel)
    with while_opening(lambda: pair[1](channel if same else channel + "-b"), lambda: (tx.close(), rx.close())) as third:
        assert tx.closed
        assert rx.closed
        assert living(third.name) == 1
        assert (channel in channels()) == same


@pytest.mark.parametrize("same", [True, False], ids=["same-channel", "another-channel"])
def test_close_with_live_views_in_a_handler_that_interrupts_opening(channel, pair, while_opening, same):
    with pair[0](channel, slots=2) as tx:
        rx = pair[1](channel)
        tx.send(np.full(3, 7))
        value = rx.recv(timeout=PATIENCE).value
        with while_opening(lambda: pair[1](channel if same else channel + "-b"), rx.close) as third:
            assert "views alive" in repr(rx)
            assert view_of(channel).members  # it stays while its views live
            assert [member.leaving for member in view_of(channel).members if member.uid == rx._member.uid] == [True]
            if same:
                for _ in range(4):  # it is no recipient any more
                    tx.send(np.zeros(3), timeout=PATIENCE)
                    third.recv(timeout=PATIENCE).release()
            assert value.tolist() == [7, 7, 7]
            del value
            assert rx._member.has_left


@pytest.mark.parametrize("same", [True, False], ids=["same-channel", "another-channel"])
def test_messages_that_end_with_a_close_in_a_handler_are_counted(channel, while_opening, same, caplog):
    tx = shmtensor.Producer(channel)
    for number in range(3):
        tx.send(np.array(number))
    if same:  # another member goes on: they are not lost
        with while_opening(lambda: shmtensor.Consumer(channel), tx.close) as rx:
            assert [int(message.value) for message in rx] == [0, 1, 2]
        assert "3 messages" not in caplog.text
        return
    with pytest.warns(ResourceWarning, match=r"3 messages that no consumer has finished"):
        other = while_opening(lambda: shmtensor.Producer(channel + "-b"), tx.close)
    with other:
        assert caplog.text.count("3 messages") == 1
        assert tx.closed


def test_opening_in_a_handler_that_interrupts_opening(channel, pair, while_opening):
    """Of the same channel it is refused at once: the thread would wait for itself. Of another it works."""
    said, worked = [], []

    def open_more():
        with pytest.raises(ReentrantError) as caught:
            pair[0](channel)
        said.append(str(caught.value))
        with pair[0](channel + "-b") as tx, pair[1](channel + "-b") as rx:
            tx.send(np.array(4))
            worked.append(int(rx.recv(timeout=PATIENCE).value))

    with while_opening(lambda: pair[1](channel), open_more) as rx:
        assert "signal handler" in said[0]
        assert channel in said[0]
        assert worked == [4]
        with pair[0](channel) as tx:  # and the one that was interrupted works
            tx.send(np.array(5))
            assert rx.recv(timeout=PATIENCE).value == 5


def test_another_thread_that_opens_does_not_put_a_close_off(channel, pair, monkeypatch):
    """Only the thread that would wait for itself need not wait: after `close()` an endpoint is gone."""
    inside, go_on = threading.Event(), threading.Event()
    tx = pair[0](channel)
    advance = ctl.Control.advance

    def slow(control):
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(PATIENCE)
        advance(control)

    thread = threading.Thread(target=lambda: pair[1](channel + "-b").close())
    monkeypatch.setattr(ctl.Control, "advance", slow)
    thread.start()
    assert inside.wait(PATIENCE)
    tx.close()
    gone = tx._member.has_left
    go_on.set()
    thread.join(PATIENCE)
    assert gone


def test_sigterm_is_not_ignored(channel):
    """What services do: a handler that closes, a loop that ends with it."""
    import os
    import subprocess
    import sys

    code = (
        "import signal, sys, shmtensor\n"
        f"rx = shmtensor.Subscriber({channel!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: rx.close())\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    for message in rx: pass\n"
        "except shmtensor.ClosedError:\n"
        "    sys.exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    with process:
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(PATIENCE) == 7
