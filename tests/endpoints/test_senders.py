"""What receivers know of their senders: who they are, when they sent, and streams that go on with the next one."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber
from shmtensor.channel.inspect import COUNTERS

from ..forkservers import preloaded
from ..spawned import send_labelled
from ..waiting import PATIENCE, wait_until

PAIRS = {"fan-out": (Publisher, Subscriber), "work queue": (Producer, Consumer)}


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("shmtensor"):
        yield


@pytest.fixture
def spawned():
    """Run a function in a process of its own until that is dead; its process id."""

    def run(function, *args):
        process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
        process.start()
        pid = process.pid
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        return pid

    return run


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


def wait_for_senders(rx, count, timeout):
    wait = rx.wait_for_publishers if isinstance(rx, Subscriber) else rx.wait_for_producers
    wait(count, timeout=timeout)


# --- who, and when


def test_who_sent_a_message(channel, pair):
    with pair[0](channel, label="left camera") as left, pair[0](channel) as right, pair[1](channel) as rx:
        left.send(np.array(1))
        right.send({"x": np.array(2), "text": "some"}, meta={"a": 1})
        left.send(np.array(3))
        got = [rx.recv(timeout=PATIENCE) for _ in range(3)]
        by_name = {name: [msg for msg in got if msg.sender.name == name] for name in ("left camera", "")}
        assert [len(found) for found in by_name.values()] == [2, 1]
        first, second = by_name["left camera"]
        assert first.sender is second.sender
        assert first.sender.pid == by_name[""][0].sender.pid == os.getpid()
        assert first.sender.id != by_name[""][0].sender.id
        assert all(len(msg.sender.id) == 16 and int(msg.sender.id, 16) for msg in got)
        for msg in got:
            msg.release()
        assert first.sender.name == "left camera"  # after the release, too


def test_who_sent_it_after_its_death(channel, pair, spawned):
    """The entry is gone, and another member may have it: the message still says who sent it."""
    with pair[1](channel) as rx:
        pid = spawned(send_labelled, pair[0].__name__, channel, "the late")
        with pair[0](channel, label="another") as tx:
            tx.send(np.array(2))
            got = [rx.recv(timeout=PATIENCE) for _ in range(2)]
            assert sorted((msg.sender.name, msg.sender.pid) for msg in got) == [
                ("another", os.getpid()),
                ("the late", pid),
            ]


def test_when_a_message_was_sent(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        for _ in range(3):
            before = time.monotonic()
            tx.send(np.array(1))
            after = time.monotonic()
            msg = rx.recv(timeout=PATIENCE)
            assert before <= msg.sent_monotonic <= after
            now, monotonic = time.time(), time.monotonic()
            assert abs((now - msg.sent_at) - (monotonic - msg.sent_monotonic)) < PATIENCE
            msg.release()
            assert before <= msg.sent_monotonic <= after


@pytest.mark.parametrize("label", ["x" * 65, "ä" * 33, "a\nb", "a\0b", "\ud800"])
def test_labels_that_cannot_be(channel, pair, label):
    for endpoint in pair:
        with pytest.raises(shmtensor.ArgumentError, match="label"):
            endpoint(channel, label=label)
        with pytest.raises(shmtensor.ArgumentTypeError, match="label"):
            endpoint(channel, label=7)


def test_the_longest_label(channel, pair):
    with pair[0](channel, label="ä" * 32) as tx, pair[1](channel) as rx:
        tx.send(np.array(1))
        assert rx.recv(timeout=PATIENCE).sender.name == "ä" * 32


def test_an_entry_that_is_used_again_has_no_old_label(channel, pair):
    with pair[1](channel) as rx:
        for label in ("long label of the first", None, "b"):
            with pair[0](channel, label=label) as tx:
                tx.send(np.array(1))
                assert rx.recv(timeout=PATIENCE).sender.name == (label or "")


# --- waiting for senders


def test_wait_for_senders(channel, pair):
    with pair[1](channel) as rx:
        wait_for_senders(rx, 0, 0)
        with pytest.raises(shmtensor.TimedOut, match=r"has 0 .* 1 were expected"):
            wait_for_senders(rx, 1, 0)
        with pair[0](channel) as first:
            first.send(np.array(1))  # what is not received yet does not disturb
            wait_for_senders(rx, 1, PATIENCE)
            with pytest.raises(shmtensor.TimedOut, match=r"has 1 .* 2 were expected"):
                wait_for_senders(rx, 2, 0.01)
            made = []
            thread = threading.Thread(target=lambda: made.append(pair[0](channel)))
            thread.start()
            wait_for_senders(rx, 2, PATIENCE)
            thread.join()
            made[0].close()
            assert int(rx.recv(timeout=PATIENCE).value) == 1
            with pytest.raises(shmtensor.TimedOut):
                wait_for_senders(rx, 2, 0)
        for wrong in (-1, True, "1", 1.5):
            with pytest.raises((shmtensor.ArgumentError, shmtensor.ArgumentTypeError)):
                wait_for_senders(rx, wrong, 0)


def test_a_dead_sender_does_not_count(channel, pair, spawned):
    with pair[1](channel) as rx:
        spawned(send_labelled, pair[0].__name__, channel, "x")
        with pytest.raises(shmtensor.TimedOut, match="has 0"):
            wait_for_senders(rx, 1, 0)
        assert rx.recv(timeout=PATIENCE).sender.name == "x"


@pytest.mark.parametrize("how", ["behind", "keeps up", "arecv"])
def test_what_the_dead_left_goes_while_others_keep_a_receiver_awake(channel, pair, spawned, how):
    """A camera crashes and starts again, beside others: its rings must not pile up until all of them rest."""

    def files():
        return {name for name in os.listdir("/dev/shm") if channel in name}

    def receive_until(holds):
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, files()
            if how != "keeps up":
                tx.send(0, timeout=PATIENCE)
            message = loop.run_until_complete(rx.arecv()) if how == "arecv" else rx.recv(timeout=PATIENCE)
            message.release()

    def send_now_and_then():
        while not stop.wait(0.005):
            tx.send(0, timeout=PATIENCE)

    stop, loop, sending = threading.Event(), asyncio.new_event_loop(), threading.Thread(target=send_now_and_then)
    with contextlib.closing(loop), pair[0](channel) as tx, pair[1](channel) as rx:
        if how == "keeps up":
            sending.start()
        else:
            tx.send(0)  # so many are always there
        try:
            receive_until(lambda: rx.statistics().received > 2)
            before = files()
            spawned(send_labelled, pair[0].__name__, channel, "crashed")
            left = files() - before
            assert left
            receive_until(lambda: not files() & left)
        finally:
            stop.set()
            if how == "keeps up":
                sending.join()
        with contextlib.suppress(shmtensor.TimedOut):
            while True:
                rx.recv(timeout=0).release()


def test_what_the_dead_left_goes_in_time_though_few_messages_come(channel, pair, spawned):
    """However few: time decides when a receiver that never waits looks for the dead, not how many it has taken."""
    with pair[0](channel) as tx, pair[1](channel) as rx:
        taken = []

        def receive():
            tx.send(0, timeout=PATIENCE)
            rx.recv(timeout=PATIENCE).release()
            taken.append(0)

        receive()
        spawned(send_labelled, pair[0].__name__, channel, "crashed")
        wait_until(lambda: receive() or rx.statistics().senders == 2)
        rx.recv(timeout=PATIENCE).release()  # one more than were sent here
        taken.clear()
        wait_until(lambda: receive() or rx.statistics().senders == 1)
        assert len(taken) < 150


def test_close_ends_the_wait(channel, pair):
    rx = pair[1](channel)
    closing = threading.Timer(0.05, rx.close)
    closing.start()
    with pytest.raises(shmtensor.ClosedError):
        wait_for_senders(rx, 1, None)
    closing.join()


# --- streams that go on


def test_a_stream_that_goes_on_with_the_next_sender(channel, pair):
    with pair[1](channel, until="closed") as rx:
        for start in (0, 2, 4):
            with pair[0](channel) as tx:
                tx.send(np.array(start))
                tx.send(np.array(start + 1))
                for expected in (start, start + 1):
                    msg = next(rx)
                    assert int(msg.value) == expected
                    msg.release()
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.01)


def test_a_loop_until_closed(channel, pair):
    """It waits, asleep, while no sender is there; `close` ends it."""
    rx, got = pair[1](channel, until="closed"), []

    def loop():
        for msg in rx:
            got.append(int(msg.value))
            del msg

    thread = threading.Thread(target=loop)
    thread.start()
    for number in range(3):
        with pair[0](channel) as tx:
            tx.send(np.array(number))
            wait_until(lambda number=number: len(got) > number)
    sleeps = rx.statistics().sleeps
    wait_until(lambda: rx.statistics().sleeps > sleeps)
    rx.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert got == [0, 1, 2]
    assert list(rx) == []
    with pytest.raises(shmtensor.ClosedError):
        rx.recv(timeout=0)


def test_it_goes_on_while_messages_are_held(channel):
    """Of senders that have left: what this consumer has not finished with is no end."""
    with Consumer(channel, until="closed", acknowledge="release") as rx:
        for number in range(3):
            with Producer(channel) as tx:
                tx.send(np.array(number))
        held = [rx.recv(timeout=PATIENCE) for _ in range(3)]
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.01)
        for message in held:
            message.release()
        with Producer(channel) as tx:
            tx.send(np.array(3))
            assert int(rx.recv(timeout=PATIENCE).value) == 3


def test_an_async_loop_until_closed(channel, pair):
    async def main():
        rx, got = pair[1](channel, until="closed"), []

        async def loop():
            async for msg in rx:
                got.append(int(msg.value))
                msg.release()

        task = asyncio.create_task(loop())
        for number in range(3):
            with pair[0](channel) as tx:
                await tx.asend(np.array(number))
                while len(got) <= number:
                    await asyncio.sleep(0.005)
        with pytest.raises(shmtensor.TimedOut):
            await rx.arecv(timeout=0)
        await rx.aclose()
        await asyncio.wait_for(task, PATIENCE)
        assert got == [0, 1, 2]

    asyncio.run(main())


def test_the_default_ends_when_every_sender_has_left(channel, pair):
    with pair[1](channel) as rx:
        with pair[0](channel) as tx:
            tx.send(np.array(1))
            assert int(next(rx).value) == 1
        assert list(rx) == []
        rx.close()
        with pytest.raises(shmtensor.ClosedError):
            next(rx)
    with pytest.raises(shmtensor.ArgumentError, match="until"):
        pair[1](channel, until="ever")


# --- what other processes see of an endpoint's counters


def counters_of(endpoint):
    return next(it for it in shmtensor.inspect(endpoint.name).members if it.uid == endpoint._member.uid)


def test_what_a_sender_counts_is_seen(channel, pair):
    with pair[0](channel, slots=1, full="drop") as tx, pair[1](channel) as rx:
        tx.send(np.array(1))
        assert [tx.send(np.array(2)) for _ in range(3)] == [0, 0, 0]
        assert counters_of(tx).dropped == tx.statistics().dropped == 3
        assert rx.recv(timeout=PATIENCE).value == 1
    with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
        tx.send(np.array(1))
        with pytest.raises(shmtensor.RingFull):
            tx.send(np.array(2), timeout=0.01)
        assert counters_of(tx).waits == tx.statistics().waits == 1
        assert rx.recv(timeout=PATIENCE).value == 1


def test_what_a_receiver_counts_is_seen(channel, pair):
    with pair[0](channel), pair[1](channel) as rx:
        for _ in range(3):
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.005)
        assert counters_of(rx).sleeps == rx.statistics().sleeps > 0
    with pair[0](channel), pair[1](channel) as next_one:  # of the same entry
        assert [getattr(counters_of(next_one), name) for name in COUNTERS] == [0] * len(COUNTERS)


def test_what_was_missed_is_seen(channel):
    with Publisher(channel, slots=8) as pub, Subscriber(channel, delivery="latest") as sub:
        for number in range(20):
            pub.send(np.array(number))
        assert sub.recv(timeout=PATIENCE).missed == 19
        assert counters_of(sub).missed == sub.statistics().missed == 19


def test_what_is_delivered_again_is_seen(channel):
    with Producer(channel) as tx, Consumer(channel) as rx:
        tx.send(np.array(1))
        with pytest.raises(KeyError), rx.recv(timeout=PATIENCE):
            raise KeyError
        with rx.recv(timeout=PATIENCE) as msg:
            assert msg.attempt == 2
        assert counters_of(rx).redelivered == rx.statistics().redelivered == 1
