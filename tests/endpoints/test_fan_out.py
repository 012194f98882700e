"""Publisher and Subscriber: what each option promises, in one process and across processes."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import Publisher, Subscriber
from shmtensor.codec.copies import ALONE

from ..conftest import left_files, shared_files
from ..faults.interrupts import SOAK
from ..forkservers import preloaded
from ..spawned import receive_all
from ..waiting import PATIENCE, wait_until


@pytest.fixture(scope="module", autouse=True)
def server():
    """Others have theirs load torch."""
    with preloaded("shmtensor"):
        yield


def numbers(count: int, start: int = 0) -> list[np.ndarray]:
    return [np.full(4, start + number) for number in range(count)]


def test_every_subscriber_gets_every_message_in_order(channel):
    with Publisher(channel) as pub, Subscriber(channel) as one, Subscriber(channel) as two:
        sent = [pub.send(value) for value in numbers(10)]
        assert sent == list(range(1, 11))
        for sub in (one, two):
            got = [sub.recv(timeout=PATIENCE) for _ in range(10)]
            assert [int(msg.value[0]) for msg in got] == list(range(10))
            assert [msg.seq for msg in got] == sent


def test_a_subscriber_that_exists_before_send_gets_the_message(channel):
    with Publisher(channel) as pub:
        for number in range(20):
            with Subscriber(channel) as sub:
                pub.send(np.array(number))
                assert int(sub.recv(timeout=PATIENCE).value) == number


def test_a_subscriber_gets_nothing_from_before_it(channel):
    with Publisher(channel) as pub:
        pub.send(np.array(1))
        with Subscriber(channel) as sub:
            pub.send(np.array(2))
            assert int(sub.recv(timeout=PATIENCE).value) == 2
            with pytest.raises(shmtensor.TimedOut):
                sub.recv(timeout=0)


def test_subscribers_may_come_first(channel):
    with Subscriber(channel) as sub, Publisher(channel) as pub:
        pub.send(np.array(1))
        assert int(sub.recv(timeout=PATIENCE).value) == 1


def test_many_publishers_keep_their_own_order(channel):
    with Subscriber(channel) as sub, Publisher(channel) as one, Publisher(channel) as two:
        for value in numbers(5):
            one.send({"from": "one", "n": value})
            two.send({"from": "two", "n": value})
        got = [sub.recv(timeout=PATIENCE).value for _ in range(10)]
        for name in ("one", "two"):
            assert [int(value["n"][0]) for value in got if value["from"] == name] == list(range(5))


def test_iteration_ends_when_every_publisher_has_closed_and_all_is_read(channel):
    with Subscriber(channel) as sub:
        with Publisher(channel) as one, Publisher(channel) as two:
            one.send(np.array(1))
            two.send(np.array(2))
        assert sorted(int(msg.value) for msg in sub) == [1, 2]
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv()


def test_meta_and_trees(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send({"image": np.zeros((2, 3)), "boxes": [np.ones(2), (np.zeros(1), 7)]}, meta={"ts": 1.5})
        msg = sub.recv(timeout=PATIENCE)
        assert msg.meta == {"ts": 1.5}
        assert msg.value["boxes"][1][1] == 7
        assert isinstance(msg.value["boxes"][1], tuple)


def test_a_description_larger_than_the_record_travels_in_the_slot(channel):
    value = {f"key-{number}": np.full(3, number) for number in range(300)}
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        for _ in range(40):
            pub.send(value, meta={"long": "x" * 500})
            msg = sub.recv(timeout=PATIENCE)
            assert list(msg.value) == list(value)
            assert all((msg.value[key] == value[key]).all() for key in value)
            assert msg.meta == {"long": "x" * 500}


@pytest.mark.parametrize("delivery", ["all", "latest"])
def test_no_array_of_a_value_can_be_made_writable(channel, delivery):
    """The slots are mapped read-only: a write would be a segmentation fault."""
    arrays = [np.zeros(3), np.zeros(3, ">i4"), np.zeros(2, [("x", "i4")]), np.array("text"), np.zeros((2, 3))[:, 1:]]
    with Publisher(channel) as pub, Subscriber(channel, delivery=delivery) as sub:
        for value in (arrays, [*arrays, torch.ones(3)], *arrays):
            pub.send(value)
            msg = sub.recv(timeout=PATIENCE)
            for found in msg.value if isinstance(msg.value, list) else [msg.value]:
                if isinstance(found, np.ndarray):
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        found.flags.writeable = True
            del found
            msg.release()


def test_values_are_read_only_and_copies_are_not(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.zeros(3))
        pub.send(np.zeros(3))
        msg = sub.recv(timeout=PATIENCE)
        with pytest.raises(ValueError, match="read-only"):
            msg.value[0] = 1
        copy = msg.copy()
        copy[0] = 1
        assert msg.value[0] == 0
        private = sub.recv(timeout=PATIENCE, copy=True)
        private.value[0] = 5
        assert sub.statistics().leases == 1


def test_release_drops_only_the_message_s_own_reference(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.arange(4))
        msg = sub.recv(timeout=PATIENCE)
        part = msg.value[1:]
        msg.release()
        msg.release()
        with pytest.raises(shmtensor.ReleasedError):
            _ = msg.value
        assert sub.statistics().leases == 1
        assert part.tolist() == [1, 2, 3]
        del part
        assert sub.statistics().leases == 0


def test_full_block_times_out_and_goes_on_when_a_slot_comes_back(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        pub.send(np.array(0))
        pub.send(np.array(1))
        with pytest.raises(shmtensor.RingFull, match="2 slots") as caught:
            pub.send(np.array(2), timeout=0.01)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.array(2), timeout=0)
        held = sub.recv(timeout=PATIENCE)
        done = threading.Event()
        thread = threading.Thread(target=lambda: (pub.send(np.array(2), timeout=PATIENCE), done.set()))
        thread.start()
        assert not done.is_set()
        del held
        thread.join(PATIENCE)
        assert done.is_set()
        assert [int(sub.recv(timeout=PATIENCE).value) for _ in range(2)] == [1, 2]


def test_full_error_drop_and_grow(channel):
    with Publisher(channel, slots=2, full="error") as pub, Subscriber(channel):
        pub.send(np.array(0))
        pub.send(np.array(1))
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.array(2))
    with Publisher(channel, slots=2, full="drop") as pub, Subscriber(channel) as sub:
        assert [pub.send(np.array(number)) for number in range(4)] == [1, 2, 0, 0]
        assert pub.statistics().dropped == 2
        assert [int(sub.recv(timeout=PATIENCE).value) for _ in range(2)] == [0, 1]
    with Publisher(channel, slots=2, full="grow") as pub, Subscriber(channel) as sub:
        for number in range(11):
            pub.send(np.array(number))
        assert pub.statistics().rings == 6
        assert [int(sub.recv(timeout=PATIENCE).value) for _ in range(11)] == list(range(11))
    with Publisher(channel, slots=2, full="grow", max_bytes="64KiB") as pub, Subscriber(channel):
        pub.send(np.array(0))
        with pytest.raises(
            shmtensor.RingFull, match=r'full="grow" has reached max_bytes=64.0 KiB.*timeout= or full="drop"'
        ):
            for _ in range(10):
                pub.send(np.array(0), timeout=0.01)
    with Publisher(channel, slots=70_000, slot_bytes=64, full="grow") as pub, Subscriber(channel):
        pub.send(np.array(0))
        assert pub.statistics().slots == 70_000
    with Publisher(channel, slots=1 << 14, slot_bytes=64, full="grow") as pub, Subscriber(channel):
        for _ in range(3 << 14):
            pub.send(None)
        with pytest.raises(shmtensor.RingFull, match=r'full="grow" has reached the most slots of a sender, 65535:'):
            pub.send(None, timeout=0)


def test_a_message_takes_as_many_slots_as_it_needs(channel):
    with Publisher(channel, slots=8, slot_bytes=1024, max_bytes="60KiB") as pub, Subscriber(channel) as sub:
        for size in (10, 1024, 1025, 5000, 3, 8 * 1024, 100):
            pub.send(np.full(size, size % 251, np.uint8))
            msg = sub.recv(timeout=PATIENCE)
            assert msg.value.shape == (size,)
            assert (msg.value == size % 251).all()
            del msg
        assert pub.statistics().rings == 1
    with Publisher(channel, slots=8, slot_bytes=1024) as pub, Subscriber(channel) as sub:
        for size, rings in ((2 * 1024, 1), (3 * 1024, 2), (5 * 1024, 2), (9 * 1024, 3)):
            pub.send(np.ones(size, np.uint8))
            assert sub.recv(timeout=PATIENCE).value.sum() == size
            assert pub.statistics().rings == rings, size


def test_a_message_larger_than_max_bytes_is_a_clear_error(channel):
    with Publisher(channel, slots=2, max_bytes="1MiB") as pub:
        with pytest.raises(shmtensor.ResourceError, match=r"max_bytes=1.0 MiB") as caught:
            pub.send(np.zeros(1 << 20, np.uint8))
        assert isinstance(caught.value, OSError)
        assert pub.send(np.zeros(8)) == 1


def test_history_is_what_a_late_subscriber_gets_first(channel):
    with Publisher(channel, slots=8, history=3) as pub:
        for number in range(10):
            pub.send(np.array(number))
        with Subscriber(channel) as sub:
            assert [int(sub.recv(timeout=PATIENCE).value) for _ in range(3)] == [7, 8, 9]
            pub.send(np.array(10))
            assert int(sub.recv(timeout=PATIENCE).value) == 10
            for number in range(11, 40):
                pub.send(np.array(number))
                assert int(sub.recv(timeout=PATIENCE).value) == number


def test_latest_never_holds_a_publisher_back_and_counts_what_it_missed(channel):
    with Publisher(channel, slots=4, full="error") as pub, Subscriber(channel, delivery="latest") as sub:
        held = None
        for number in range(100):
            pub.send(np.array(number))
            if number == 10:
                held = sub.recv(timeout=PATIENCE)
                assert int(held.value) == 10
                assert held.missed == 10
        msg = sub.recv(timeout=PATIENCE)
        assert int(msg.value) == 99
        assert msg.missed == 88
        assert int(held.value) == 10
        assert sub.statistics().missed == 98


def test_the_newest_few_come_in_order(channel):
    with (
        Publisher(channel, slots=8, full="error") as pub,
        Subscriber(channel, delivery="latest", depth=3) as sub,
        Subscriber(channel, delivery="latest") as newest,
    ):
        for number in range(100):
            pub.send(np.array(number))
        got = [sub.recv(timeout=PATIENCE) for _ in range(3)]
        assert [(int(msg.value), msg.missed) for msg in got] == [(97, 97), (98, 0), (99, 0)]
        assert int(newest.recv(timeout=PATIENCE).value) == 99
        with pytest.raises(shmtensor.TimedOut):
            sub.recv(timeout=0)
        pub.send(np.array(100))  # the three are leased
        pub.send(np.array(101))
        assert [int(sub.recv(timeout=PATIENCE).value) for _ in range(2)] == [100, 101]
        assert [int(msg.value) for msg in got] == [97, 98, 99]
        assert sub.statistics().missed == 97
        assert sub.statistics().behind == 0


def test_of_the_newest_few_those_that_are_left_come(channel):
    """A ring of four slots, two of them leased by another: at most two of the newest ten are there."""
    with (
        Publisher(channel, slots=4, full="error") as pub,
        Subscriber(channel, delivery="latest", depth=10) as sub,
        Subscriber(channel, delivery="latest") as other,
    ):
        held = []
        for number in range(2):
            pub.send(np.array(number))
            held.append(other.recv(timeout=PATIENCE))
        for number in range(2, 50):
            pub.send(np.array(number))
        got = []
        with pytest.raises(shmtensor.TimedOut):
            while True:
                got.append(sub.recv(timeout=0))
        assert [(int(msg.value), msg.missed) for msg in got] == [(48, 48), (49, 0)]
        del held, got


def test_the_newest_few_of_each_publisher(channel):
    with (
        Publisher(channel, slots=8) as one,
        Publisher(channel, slots=8) as two,
        Subscriber(channel, delivery="latest", depth=2) as sub,
    ):
        for number in range(6):
            one.send(np.array(number))
            two.send(np.array(100 + number))
        got = [int(sub.recv(timeout=PATIENCE).value) for _ in range(4)]
        assert sorted(got) == [4, 5, 104, 105]
        assert [number for number in got if number < 100] == [4, 5]


def test_the_newest_few_while_they_are_sent(channel):
    """Beside a publisher that never waits: in order, whole, and each one received or counted as missed."""
    count = 3000
    with (
        Publisher(channel, slots=8, slot_bytes=4096, full="error") as pub,
        Subscriber(channel, delivery="latest", depth=4) as sub,
    ):

        def send():
            for number in range(count):
                pub.send(np.full(512, number))

        thread = threading.Thread(target=send)
        thread.start()
        last, received = -1, 0
        while last < count - 1:
            msg = sub.recv(timeout=PATIENCE)
            number = int(msg.value[0])
            assert (msg.value == number).all()
            assert number > last + msg.missed
            last, received = number, received + 1
            del msg
        thread.join()
        assert received + sub.statistics().missed == count


def test_depth_goes_with_latest(channel):
    with pytest.raises(shmtensor.ArgumentError, match="latest"):
        Subscriber(channel, depth=2)
    for depth in (0, -1, True, 1.5):
        with pytest.raises((shmtensor.ArgumentError, shmtensor.ArgumentTypeError), match="depth"):
            Subscriber(channel, delivery="latest", depth=depth)


@pytest.mark.parametrize("full", ["block", "error", "drop"])
def test_a_message_without_room_takes_nothing_from_latest(channel, full):
    """It needs three slots in a row, and the second of four is leased: the newest message stays where it is."""
    with (
        Publisher(channel, slots=4, slot_bytes=4096, max_bytes="48KiB", full=full) as pub,
        Subscriber(channel, delivery="latest") as sub,
        Subscriber(channel, delivery="latest") as slow,
    ):
        pub.send(np.array(1))
        pub.send(np.array(2))
        held = sub.recv(timeout=PATIENCE)
        for value in (3, 4):
            pub.send(np.array(value))
        large = np.zeros(3 * 4096, np.uint8)
        if full == "drop":
            assert pub.send(large) == 0
        else:
            with pytest.raises(shmtensor.RingFull):
                pub.send(large, timeout=0)
        assert int(slow.recv(timeout=PATIENCE).value) == 4
        assert int(held.value) == 2
        del held
        pub.send(large)
        assert slow.recv(timeout=PATIENCE).nbytes == large.nbytes


@pytest.mark.parametrize("attached", [False, True], ids=["not attached", "attached"])
@pytest.mark.parametrize("how", ["close", "linger", "kill"])
def test_the_newest_of_a_publisher_that_has_left_is_received(channel, how, attached):
    """Also if it lies in a ring that the subscriber has not seen yet. Then nothing of the publisher is left."""
    with Subscriber(channel, delivery="latest", depth=2) as sub, Subscriber(channel, delivery="latest") as done:
        pipe, theirs = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            pub = Publisher(channel)
            pub.send(np.zeros(4))
            theirs.send("sent")
            theirs.recv()
            for value in (1, 2):
                pub.send(np.full(100_000, value))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            pub.close(linger=None if how == "linger" else 0)
            os._exit(0)
        theirs.close()
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == "sent"
        if attached:
            assert (sub.recv(timeout=PATIENCE).value == 0).all()
        pipe.send("leave")
        os.waitpid(child, 0)
        assert [int(msg.value[0]) for msg in sub] == [1, 2]
        assert int(done.recv(timeout=PATIENCE).value[0]) == 2
        pipe.close()

        def is_gone():
            """It is removed at a later look, if another process has the channel's lock just now."""
            return list(done) == [] and all(it.role == "receiver" for it in shmtensor.inspect(channel).members)

        wait_until(is_gone)


def test_a_newest_only_subscriber_keeps_nothing_that_it_cannot_get(channel):
    """What was sent before it joined, and the rings of a publisher that has sent nothing."""
    with Publisher(channel) as early, Subscriber(channel):
        early.send(np.zeros(4))
        early.close()
        with Subscriber(channel, delivery="latest") as sub, Publisher(channel) as silent:
            silent.wait_for_subscribers(2, timeout=PATIENCE)
            silent.close()
            left = [it for it in shmtensor.inspect(channel).members if it.role == "sender"]
            assert len(left) == 1  # for the other subscriber
            assert list(sub) == []


def test_lossless_and_latest_mix(channel):
    with (
        Publisher(channel, slots=4) as pub,
        Subscriber(channel) as every,
        Subscriber(channel, delivery="latest") as last,
    ):
        for number in range(50):
            pub.send(np.array(number))
            assert int(every.recv(timeout=PATIENCE).value) == number
        assert int(last.recv(timeout=PATIENCE).value) == 49


def test_loan_is_sent_on_leaving_and_discarded_on_an_exception(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        with pub.loan((2, 3), np.float32) as loan:
            loan.array[...] = 4
        assert loan.seq == 1
        assert (sub.recv(timeout=PATIENCE).value == 4).all()
        for _ in range(5):
            with pytest.raises(KeyError), pub.loan((2,), np.int8):
                raise KeyError
        with pytest.raises(shmtensor.ReleasedError):
            _ = loan.array
        with pub.loan((2,), np.int8, meta={"a": 1}) as loan:
            loan.array[...] = 7
        msg = sub.recv(timeout=PATIENCE)
        assert msg.meta == {"a": 1}
        assert msg.value.tolist() == [7, 7]


def test_a_kept_loan_view_keeps_its_slot_out_of_use(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        with pub.loan((4,), np.int64) as loan:
            kept = loan.array
            kept[...] = 1
        first = sub.recv(timeout=PATIENCE)
        del first
        for number in range(10):
            pub.send(np.full(4, number))
            msg = sub.recv(timeout=PATIENCE)
            kept[...] = -1  # the owner of a stale view can hurt nobody
            assert (msg.value == number).all()
            del msg


def test_close_with_linger_waits_for_receivers(channel):
    pub, sub = Publisher(channel), Subscriber(channel)
    pub.send(np.array(1))
    thread = threading.Thread(target=pub.close, kwargs={"linger": PATIENCE})
    thread.start()
    assert int(sub.recv(timeout=PATIENCE).value) == 1
    thread.join(PATIENCE)
    assert not thread.is_alive()
    with pytest.raises(shmtensor.EndOfStream):
        sub.recv(timeout=PATIENCE)
    sub.close()


def test_close_leaves_what_was_sent_to_those_who_are_there(channel):
    sub = Subscriber(channel)
    pub = Publisher(channel)
    for value in numbers(5):
        pub.send(value)
    pub.close()
    assert [int(msg.value[0]) for msg in sub] == list(range(5))
    sub.close()


def test_views_outlive_close_and_the_last_one_cleans_up(channel):
    pub, sub = Publisher(channel, slots=2), Subscriber(channel)
    pub.send(np.arange(4))
    kept = sub.recv(timeout=PATIENCE).value
    sub.close()
    assert "views alive" in repr(sub)
    for value in numbers(50, 100):
        pub.send(value)
    pub.close()
    assert kept.tolist() == [0, 1, 2, 3]
    assert shared_files()
    del kept
    gc.collect()
    assert "views alive" not in repr(sub)
    assert not left_files()


def test_the_last_view_may_die_in_another_thread(channel):
    pub, sub = Publisher(channel, slots=4), Subscriber(channel)
    for number in range(9):
        pub.send(np.full(4, number))
        kept = sub.recv(timeout=PATIENCE).value[1:]
    sub.close()
    assert "views alive" in repr(sub)
    for _ in range(20):
        pub.send(np.full(4, -1))
    pub.close()
    assert kept.tolist() == [8] * 3
    assert shared_files()
    thread = threading.Thread(target=lambda views: views.clear(), args=([kept],))
    del kept
    thread.start()
    thread.join()
    gc.collect()
    assert not left_files()


def test_use_after_close(channel):
    pub, sub = Publisher(channel), Subscriber(channel)
    pub.close()
    pub.close()
    sub.close()
    sub.close()
    with pytest.raises(shmtensor.ClosedError):
        pub.send(np.array(1))
    with pytest.raises(shmtensor.ClosedError):
        sub.recv()
    with pytest.raises(shmtensor.ClosedError), pub:
        pass
    assert "closed" in repr(pub)


def test_close_from_another_thread_ends_a_blocked_call(channel):
    pub, sub = Publisher(channel, slots=1), Subscriber(channel)
    pub.send(np.array(1))
    raised = []

    def blocked(call):
        try:
            call()
        except shmtensor.ClosedError:
            raised.append(True)

    other = Subscriber(channel)
    threads = [
        threading.Thread(target=blocked, args=(lambda: pub.send(np.array(2)),)),
        threading.Thread(target=blocked, args=(other.recv,)),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: pub.statistics().waits and other.statistics().sleeps)
    other.close()  # first: without a publisher, its `recv` would rightly say that the stream has ended
    pub.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert raised == [True, True]
    sub.close()


def test_wait_for_subscribers(channel):
    with Publisher(channel) as pub:
        pub.wait_for_subscribers(0)
        with pytest.raises(shmtensor.TimedOut, match="0 subscribers"):
            pub.wait_for_subscribers(1, timeout=0.01)
        made = []
        thread = threading.Thread(target=lambda: made.append(Subscriber(channel)))
        thread.start()
        pub.wait_for_subscribers(1, timeout=PATIENCE)
        thread.join()
        made[0].close()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Publisher("a/b"), ValueError),
        (lambda: Publisher(""), ValueError),
        (lambda: Publisher("x" * 65), ValueError),
        (lambda: Publisher(7), TypeError),
        (lambda: Publisher("x", slots=0), ValueError),
        (lambda: Publisher("x", slots="3"), TypeError),
        (lambda: Publisher("x", slot_bytes="3 parsecs"), ValueError),
        (lambda: Publisher("x", slot_bytes="9" * 10_000), ValueError),
        (lambda: Publisher("x", full="perhaps"), ValueError),
        (lambda: Publisher("x", full=np.array(["block", "drop"])), ValueError),
        (lambda: Publisher("x", full=["block"]), ValueError),
        (lambda: Subscriber("x", until=np.zeros(2)), ValueError),
        (lambda: Publisher("x", history=16), ValueError),
        (lambda: Subscriber("x", delivery="some"), ValueError),
        (lambda: Subscriber("x", spin=-1), ValueError),
        (lambda: Subscriber("x", spin="fast"), TypeError),
    ],
)
def test_wrong_arguments(make, error):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, shmtensor.ShmTensorError)


def test_wrong_values_and_timeouts(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        with pytest.raises(TypeError, match=r"value\['?\"?a"):
            pub.send({"a": object()})
        with pytest.raises(ValueError, match="timeout"):
            sub.recv(timeout=-1)
        with pytest.raises(TypeError, match="timeout"):
            sub.recv(timeout="1")
        assert pub.send(np.array(1)) == 1
        assert int(sub.recv(timeout=PATIENCE).value) == 1
        wrong = ("1", TypeError), (-1, ValueError), (float("nan"), ValueError), (True, TypeError)
        for timeout, error in wrong:
            with pytest.raises(error, match="timeout"):
                pub.send(np.array(2), timeout=timeout)  # there is room
        assert pub.send(np.array(2)) == 2
        for timeout, error in wrong:
            for copy in (False, True):
                with pytest.raises(error, match="timeout"):
                    sub.recv(timeout=timeout, copy=copy)  # there is a message
        assert int(sub.recv(timeout=0).value) == 2


def test_seconds_that_no_float_holds(channel):
    with Publisher(channel, slots=1) as pub, Subscriber(channel) as sub:
        calls = (
            sub.recv, lambda timeout: pub.send(np.array(2), timeout=timeout),
            lambda timeout: pub.wait_for_subscribers(2, timeout=timeout),
            lambda timeout: sub.wait_for_publishers(2, timeout=timeout), lambda timeout: pub.close(linger=timeout),
        )  # fmt: skip
        assert pub.send(np.array(1)) == 1
        kept = sub.recv(timeout=10**300)
        for call in calls:
            with pytest.raises(shmtensor.ArgumentError, match="for ever"):
                call(timeout=10**400)
            with pytest.raises(shmtensor.ArgumentError, match="0 or more"):
                call(timeout=-(10**400))
        del kept
        assert pub.send(np.array(2), timeout=10**300) == 2


def test_a_name_of_another_kind_is_a_clear_error(channel):
    with Publisher(channel), pytest.raises(ValueError, match="fan-out"):
        shmtensor.Producer(channel)


CHILD = """
import sys, numpy as np, shmtensor
assert "torch" not in sys.modules
sub = shmtensor.Subscriber(sys.argv[1])
print("ready", flush=True)
total = sum(int(msg.value.sum()) for msg in sub)
sub.close()
print(total, flush=True)
"""


def test_unrelated_programs_share_only_the_name(channel):
    with Publisher(channel) as pub:
        children = [
            subprocess.Popen([sys.executable, "-c", CHILD, channel], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        pub.wait_for_subscribers(2, timeout=PATIENCE)
        for number in range(100):
            pub.send(np.full(1000, number))
    for child in children:
        out, _ = child.communicate(timeout=PATIENCE)
        assert out.split() == ["ready", str(sum(range(100)) * 1000)]
        assert child.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods(channel, method):
    context = multiprocessing.get_context(method)
    with Publisher(channel) as pub:
        pipe, theirs = context.Pipe()
        child = context.Process(target=receive_all, args=(theirs, channel))
        child.start()
        assert pipe.recv() == "ready"
        for value in numbers(50):
            pub.send(value, timeout=PATIENCE)
    assert pipe.recv() == list(range(50))
    child.join(PATIENCE)
    assert child.exitcode == 0
    pipe.close()
    theirs.close()
    child.close()


def test_an_endpoint_used_in_a_forked_child_raises(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.array(1))
        msg = sub.recv(timeout=PATIENCE)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pub.send(np.array(2))
            except shmtensor.ForkedError:
                try:
                    sub.recv()
                except shmtensor.ForkedError:
                    msg.release()
                    pub.close()
                    sub.close()
                    code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert int(msg.value) == 1
        assert pub.send(np.array(3)) == 2
        assert sub.statistics().leases == 1


def test_a_forked_child_does_not_keep_a_dead_parent_alive(channel):
    """The parent dies with its endpoint open; its forked child lives on; the survivor must notice the death."""
    ready, release = os.pipe()
    sub = Subscriber(channel)
    parent = os.fork()
    if parent == 0:
        pub = Publisher(channel)
        if os.fork() == 0:
            os.close(release)
            os.read(ready, 1)  # lives until the test lets go
            os._exit(0)
        pub.send(np.array(5))
        os.kill(os.getpid(), 9)
    os.waitpid(parent, 0)
    os.close(ready)
    assert int(sub.recv(timeout=PATIENCE).value) == 5
    with pytest.raises(shmtensor.EndOfStream):
        sub.recv(timeout=PATIENCE)
    os.close(release)
    sub.close()


@pytest.mark.parametrize("options", [{}, {"delivery": "latest"}])
def test_slots_that_are_no_longer_needed_are_not_busy(channel, options):
    """Though the sender has not looked for slots since they were given back."""
    with Publisher(channel, slots=8) as pub, Subscriber(channel, **options) as sub, Subscriber(channel) as other:
        for number in range(40):
            pub.send(np.full(16, number))
            sub.recv(timeout=PATIENCE).release()
            other.recv(timeout=PATIENCE).release()
        assert pub.statistics().slots_busy == 0
        pub.send(np.zeros(16))
        held = other.recv(timeout=PATIENCE)
        assert pub.statistics().slots_busy == 1
        del held
        assert pub.statistics().slots_busy == (0 if options else 1)
        with pub.loan(16, np.float64) as loan:
            assert pub.statistics().slots_busy == (1 if options else 2)
        del loan
        for receiver in (sub, other):
            for _ in range(1 if receiver is other or options else 2):
                receiver.recv(timeout=PATIENCE).release()
        assert pub.statistics().slots_busy == 0


def test_statistics_and_repr(channel):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        pub.send(np.zeros(16))
        msg = sub.recv(timeout=PATIENCE)
        sent, got = pub.statistics(), sub.statistics()
        assert (sent.sent, sent.sent_bytes, sent.rings, sent.slots, sent.slots_busy) == (1, 128, 1, 4, 1)
        assert (got.received, got.received_bytes, got.leases, got.senders) == (1, 128, 1, 1)
        with pytest.raises(AttributeError):
            sent.sent = 2  # frozen
        assert channel in repr(pub)
        assert "leases=1" in repr(sub)
        assert "128 bytes" in repr(msg)


STOPPED = """
import sys, numpy as np, shmtensor
sub = shmtensor.Subscriber(sys.argv[1], delivery=sys.argv[2])
print("ready", flush=True)
held = sub.recv()
first = held.value.copy()
print("holds", flush=True)
sys.stdin.readline()
assert (held.value == first).all()
count = sum(1 for msg in sub if (msg.value == msg.value[0]).all())
assert (held.value == first).all()
sub.close()
print(count, flush=True)
"""


@pytest.mark.parametrize(("delivery", "full"), [("latest", "block"), ("all", "drop")])
def test_a_stopped_subscriber_holds_up_only_itself_and_is_not_dead(channel, delivery, full):
    """SIGSTOP while it holds a view: others get everything, its bytes stay, and it goes on afterwards."""
    with Publisher(channel, slots=4, full=full) as pub, Subscriber(channel) as other:
        child = subprocess.Popen(
            [sys.executable, "-c", STOPPED, channel, delivery], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "ready\n"
        pub.send(np.full(8, -1))
        other.recv(timeout=PATIENCE)
        assert child.stdout.readline() == "holds\n"
        os.kill(child.pid, signal.SIGSTOP)
        sent = 0
        for number in range(300):
            if pub.send(np.full(8, number), timeout=PATIENCE):
                sent += 1
                assert int(other.recv(timeout=PATIENCE).value[0]) == number
        assert sent == 300 if delivery == "latest" else sent == 3
        assert pub.statistics().dead_receivers == 0
        assert pub.statistics().receivers == 2
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
    out, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert int(out) == (1 if delivery == "latest" else 3)


def test_a_forked_child_may_drop_its_parents_endpoints_and_make_its_own(channel):
    """The child's new ring must not end up where the parent's was mapped, and be unmapped with it."""
    pub, sub = Publisher(channel, slots=4, slot_bytes=1 << 20), Subscriber(channel)
    pub.send(np.arange(5))
    msg = sub.recv(timeout=PATIENCE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(shmtensor.ForkedError):
                sub.statistics()
            own = Publisher(channel, slots=4, slot_bytes=1 << 20)
            pub = sub = msg = None
            gc.collect()
            with Subscriber(channel) as mine:
                own.send(np.full(1000, 7))
                assert mine.recv(timeout=PATIENCE).value.sum() == 7000
            own.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert msg.value.tolist() == list(range(5))
    pub.close()
    sub.close()


def test_history_for_a_newcomer_at_the_index_of_a_former_member(channel):
    with Publisher(channel, slots=8, history=2) as pub:
        with Subscriber(channel) as first:
            for number in (1, 2):
                pub.send(np.array(number))
                assert int(first.recv(timeout=PATIENCE).value) == number
        with Subscriber(channel) as second:
            for number in (3, 4, 5):
                pub.send(np.array(number))
            assert [int(second.recv(timeout=PATIENCE).value) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_history_never_blocks_a_publisher_without_receivers(channel):
    with Publisher(channel, slots=4, slot_bytes=64, history=3) as pub:
        for _ in range(10):
            pub.send(np.zeros(24), timeout=PATIENCE)  # three times the slot


def test_a_loan_sent_while_another_thread_waits_for_a_slot(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        pub.send(np.full(4, 1))
        loan = pub.loan((4,), np.int64)
        loan.array[...] = 2
        thread = threading.Thread(target=pub.send, args=(np.full(4, 3),), kwargs={"timeout": PATIENCE})
        thread.start()
        wait_until(lambda: pub.statistics().waits)
        sender = threading.Thread(target=loan.send)
        sender.start()
        assert int(sub.recv(timeout=PATIENCE).value[0]) == 1
        for waiting in (thread, sender):
            waiting.join(PATIENCE)
        assert sorted(int(sub.recv(timeout=PATIENCE).value[0]) for _ in range(2)) == [2, 3]


def test_polling_without_sleeping_notices_a_dead_publisher(channel):
    source = (
        "import sys, os, numpy as np, shmtensor\npub = shmtensor.Publisher(sys.argv[1])\npub.wait_for_subscribers(1)\n"
        "pub.send(np.array(1))\nos.kill(os.getpid(), 9)"
    )
    with Subscriber(channel) as sub:
        subprocess.run([sys.executable, "-c", source, channel], timeout=PATIENCE, check=False)
        got = []
        with pytest.raises(shmtensor.EndOfStream):
            while True:
                try:
                    got.append(int(sub.recv(timeout=0).value))
                except shmtensor.TimedOut:
                    os.sched_yield()
        assert got == [1]


def test_a_failed_publication_is_never_seen(channel, monkeypatch):
    """An exception before `published`: the next message takes the sequence number, and only that is found."""
    for sender, receiver in ((Publisher, Subscriber), (shmtensor.Producer, shmtensor.Consumer)):
        with sender(channel) as tx, receiver(channel) as rx:
            tx.send(np.array(1))
            assert int(rx.recv(timeout=PATIENCE).value) == 1
            with monkeypatch.context() as patch:

                def fail(*args):
                    raise MemoryError

                patch.setattr(sender, "_publish", fail)
                with pytest.raises(MemoryError):
                    tx.send({"a": np.zeros(ALONE)})  # more than goes in one call
            assert tx.send(np.array(3)) == 2
            assert int(rx.recv(timeout=PATIENCE).value) == 3
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.6)
            assert tx.statistics().slots_busy <= 2


SIZES = pytest.mark.parametrize("count", [16, 80_000], ids=["small", "large"])  # 80,000: more than moves.ALONE


@SIZES
def test_a_receiver_that_keeps_up_is_sent_everything_in_one_slot(channel, count):
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:
        places = set()
        for number in range(20):
            pub.send(torch.full((count,), number, dtype=torch.int32))
            value = sub.recv(timeout=PATIENCE).value
            assert value[-1] == number
            places.add(value.data_ptr())
            del value
        assert len(places) == 1
        pub.send(torch.full((count,), 20, dtype=torch.int32))
        kept = sub.recv(timeout=PATIENCE).value
        pub.send(torch.full((count,), 21, dtype=torch.int32))
        other = sub.recv(timeout=PATIENCE).value
        assert kept.data_ptr() in places
        assert other.data_ptr() not in places
        assert (kept[-1], other[-1]) == (20, 21)


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
@SIZES
@pytest.mark.parametrize("pattern", ["fan-out", "work queue"])
def test_no_view_is_written_to_whatever_is_kept(channel, pattern, count):
    """At random: up to 6 of 8 slots are held as views or wait to be received, in any order."""
    sender, receiver = (Publisher, Subscriber) if pattern == "fan-out" else (shmtensor.Producer, shmtensor.Consumer)
    choose = random.Random(count)
    with sender(channel, slots=8) as out, receiver(channel) as into:
        kept: list[tuple[int, torch.Tensor]] = []
        sent = got = 0
        for _ in range(600):
            action = choose.random()
            if action < 0.45 and sent - got + len(kept) < 6:
                out.send(torch.full((count,), sent, dtype=torch.int32))
                sent += 1
            elif action < 0.8 and got < sent:
                kept.append((got, into.recv(timeout=PATIENCE).value))
                got += 1
            elif kept:
                kept.pop(choose.randrange(len(kept)))
            assert all((view[0], view[-1]) == (number, number) for number, view in kept)
        assert sent > 100
        kept.clear()


@pytest.mark.parametrize(
    "kind", [(Publisher, Subscriber), (shmtensor.Producer, shmtensor.Consumer)], ids=["fan-out", "work queue"]
)
def test_a_slot_that_is_held_is_passed_by(channel, kind):
    """Slots 1 and 2 are a reader's views; messages go on, two at a time."""
    value = torch.zeros(64)
    sender, receiver = kind
    with sender(channel, slots=16) as out, receiver(channel) as into:
        for _ in range(2):
            out.send(value)
            assert into.recv(timeout=PATIENCE).nbytes == value.nbytes
        for _ in range(3):
            out.send(value)
        first, *kept = [into.recv(timeout=PATIENCE).value for _ in range(3)]
        del first
        for _ in range(100):
            out.send(value)
            out.send(value)
            pair = [into.recv(timeout=PATIENCE).value for _ in range(2)]
            assert not {view.data_ptr() for view in pair} & {view.data_ptr() for view in kept}
            del pair
        del kept


def test_one_tensor_of_a_message_keeps_its_slot(channel):
    with Publisher(channel, slots=2, full="error") as pub, Subscriber(channel) as sub:
        for seed in range(4):
            pub.send([torch.full((5,), float(seed)), torch.full((6,), seed)])
            value = sub.recv(timeout=PATIENCE).value
        kept, before = value[1], value[1].clone()
        del value
        for _ in range(3):
            pub.send(torch.zeros(11))
            sub.recv(timeout=PATIENCE)
        assert sub.statistics().leases == 1
        assert torch.equal(kept, before)
        del kept
        assert sub.statistics().leases == 0


@pytest.mark.slow
def test_threads_share_endpoints(channel):
    """Four threads send, four receive, on one publisher and one subscriber: every message once."""
    each, got = 400, []
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:

        def send(first):
            for number in range(first, first + each):
                pub.send(torch.full((4,), float(number)), timeout=PATIENCE)

        def recv():
            for msg in sub:
                got.append((msg.seq, int(msg.value[0])))
                if len(got) >= 4 * each:
                    pub.close()

        threads = [threading.Thread(target=send, args=(n * each,)) for n in range(4)]
        threads += [threading.Thread(target=recv) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert sorted(seq for seq, _ in got) == list(range(1, 4 * each + 1))
        assert sorted(number for _, number in got) == list(range(4 * each))
        assert sub.statistics().received == 4 * each


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5)),
        st.tuples(st.just("tree"), st.integers(0, 3)),
        st.tuples(st.just("loan"), st.just(0)),
        st.tuples(st.just("recv"), st.integers(0, 1)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("join"), st.just(0)),
        st.tuples(st.just("leave"), st.just(0)),
    ),
    min_size=20,
    max_size=120,
)
_count = itertools.count()
SHAPES = [(4, 4), (4, 4), (2, 8), (16,), (3,), (200,)]


@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(operations=OPERATIONS)
def test_any_order_of_everything(operations):
    """Plain and nested messages, loans, joins, views kept for any time: values, order and bytes as a list has them."""
    channel = f"test-{os.getpid()}-any-order-{next(_count)}"
    with Publisher(channel, slots=6, slot_bytes=256, full="grow") as pub:
        subs, expected = [Subscriber(channel)], [[]]
        kept, number = [], 0
        for what, choice in operations:
            if what == "send":
                number += 1
                value = torch.full(SHAPES[choice], float(number))
            elif what == "tree":
                number += 1
                value = {"x": torch.full((choice + 1,), float(number)), "id": number}
            if what in ("send", "tree"):
                pub.send(value)
            elif what == "loan":
                number += 1
                value = torch.full((4, 4), float(number))
                with pub.loan((4, 4), torch.float32) as loan:
                    loan.tensor.copy_(value)
            elif what == "recv" and choice < len(subs) and expected[choice]:
                msg = subs[choice].recv(timeout=PATIENCE)
                wanted = expected[choice].pop(0)
                got, want = (msg.value, wanted) if torch.is_tensor(wanted) else (msg.value["x"], wanted["x"])
                assert torch.equal(got, want)
                kept.append((got, want))
            elif what == "drop" and kept:
                kept.pop(choice % len(kept))
            elif what == "join" and len(subs) < 2:
                subs.append(Subscriber(channel))
                expected.append([])
            elif what == "leave" and len(subs) == 2:
                subs.pop().close()
                expected.pop()
            if what in ("send", "tree", "loan"):
                for waiting in expected:
                    waiting.append(value)
            assert all(torch.equal(got, want) for got, want in kept), "bytes changed under a view"
        for sub, waiting in zip(subs, expected, strict=True):
            for wanted in waiting:
                got = sub.recv(timeout=PATIENCE).value
                assert torch.equal(got, wanted) if torch.is_tensor(wanted) else torch.equal(got["x"], wanted["x"])
            assert sub.statistics().behind == 0
            sub.close()
        kept.clear()
        got = want = msg = None
        gc.collect()
    assert not [name for name in shared_files() if "-any-order" in name]


VICTIM = """
import sys, numpy as np, shmtensor
channel, role = sys.argv[1:]
if role == "sender":
    pub = shmtensor.Publisher(channel, slots=4)
    pub.wait_for_subscribers(1, timeout=60)
    while True:
        sent = pub.statistics().sent
        if sent == 500:
            print("going", flush=True)
        pub.send(np.full(64, sent))
else:
    sub = shmtensor.Subscriber(channel)
    for msg in sub:
        if msg.seq == 500:
            print("going", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_killed_in_full_flight(channel, role):
    """Whoever is killed while it sends or receives: the others get every message once, and nothing stays."""
    sub = Subscriber(channel)
    pub = None if role == "sender" else Publisher(channel, slots=4)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, channel, role], stdout=subprocess.PIPE, text=True)
    killer = threading.Thread(target=lambda: (victim.stdout.readline(), victim.kill(), victim.wait()))
    last = 0

    def take() -> None:
        nonlocal last
        with sub.recv(timeout=PATIENCE) as msg:
            assert msg.seq == last + 1
            assert msg.value.tolist() == [last] * 64
            last = msg.seq

    try:
        killer.start()
        if pub is None:
            with pytest.raises(shmtensor.EndOfStream):
                while True:
                    take()
            assert last >= 500
        else:
            pub.wait_for_subscribers(2, timeout=PATIENCE)
            while killer.is_alive() or last < 1000:
                pub.send(np.full(64, last), timeout=PATIENCE)
                take()
            pub.close()
    finally:
        victim.kill()
        killer.join()
        victim.stdout.close()
        sub.close()
    assert victim.returncode == -signal.SIGKILL
    Publisher(channel).close()
    assert not left_files()
