"""Publisher and Subscriber: what each option promises, in one process and across processes."""

from __future__ import annotations

import gc
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

import shmtensor
from shmtensor import Publisher, Subscriber

from .conftest import shared_files
from .forkservers import stop_forkserver


def numbers(count: int, start: int = 0) -> list[np.ndarray]:
    return [np.full(4, start + number) for number in range(count)]


def test_every_subscriber_gets_every_message_in_order(channel):
    with Publisher(channel) as pub, Subscriber(channel) as one, Subscriber(channel) as two:
        sent = [pub.send(value) for value in numbers(10)]
        assert sent == list(range(1, 11))
        for sub in (one, two):
            got = [sub.recv(timeout=5) for _ in range(10)]
            assert [int(msg.value[0]) for msg in got] == list(range(10))
            assert [msg.seq for msg in got] == sent


def test_a_subscriber_that_exists_before_send_gets_the_message(channel):
    with Publisher(channel) as pub:
        for number in range(20):
            with Subscriber(channel) as sub:
                pub.send(np.array(number))
                assert int(sub.recv(timeout=5).value) == number


def test_a_subscriber_gets_nothing_from_before_it(channel):
    with Publisher(channel) as pub:
        pub.send(np.array(1))
        with Subscriber(channel) as sub:
            pub.send(np.array(2))
            assert int(sub.recv(timeout=5).value) == 2
            with pytest.raises(shmtensor.TimedOut):
                sub.recv(timeout=0)


def test_subscribers_may_come_first(channel):
    with Subscriber(channel) as sub, Publisher(channel) as pub:
        pub.send(np.array(1))
        assert int(sub.recv(timeout=5).value) == 1


def test_many_publishers_keep_their_own_order(channel):
    with Subscriber(channel) as sub, Publisher(channel) as one, Publisher(channel) as two:
        for value in numbers(5):
            one.send({"from": "one", "n": value})
            two.send({"from": "two", "n": value})
        got = [sub.recv(timeout=5).value for _ in range(10)]
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
        msg = sub.recv(timeout=5)
        assert msg.meta == {"ts": 1.5}
        assert msg.value["boxes"][1][1] == 7
        assert isinstance(msg.value["boxes"][1], tuple)


def test_a_description_larger_than_the_record_travels_in_the_slot(channel):
    value = {f"key-{number}": np.full(3, number) for number in range(300)}
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        for _ in range(40):
            pub.send(value, meta={"long": "x" * 500})
            msg = sub.recv(timeout=5)
            assert list(msg.value) == list(value)
            assert all((msg.value[key] == value[key]).all() for key in value)
            assert msg.meta == {"long": "x" * 500}


def test_values_are_read_only_and_copies_are_not(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.zeros(3))
        pub.send(np.zeros(3))
        msg = sub.recv(timeout=5)
        with pytest.raises(ValueError, match="read-only"):
            msg.value[0] = 1
        copy = msg.copy()
        copy[0] = 1
        assert msg.value[0] == 0
        private = sub.recv(timeout=5, copy=True)
        private.value[0] = 5
        assert sub.statistics().leases == 1


def test_release_drops_only_the_message_s_own_reference(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.arange(4))
        msg = sub.recv(timeout=5)
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
        held = sub.recv(timeout=5)
        done = threading.Event()
        thread = threading.Thread(target=lambda: (pub.send(np.array(2), timeout=30), done.set()))
        thread.start()
        assert not done.is_set()
        del held
        thread.join(30)
        assert done.is_set()
        assert [int(sub.recv(timeout=5).value) for _ in range(2)] == [1, 2]


def test_full_error_drop_and_grow(channel):
    with Publisher(channel, slots=2, full="error") as pub, Subscriber(channel):
        pub.send(np.array(0))
        pub.send(np.array(1))
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.array(2))
    with Publisher(channel, slots=2, full="drop") as pub, Subscriber(channel) as sub:
        assert [pub.send(np.array(number)) for number in range(4)] == [1, 2, 0, 0]
        assert pub.statistics().dropped == 2
        assert [int(sub.recv(timeout=5).value) for _ in range(2)] == [0, 1]
    with Publisher(channel, slots=2, full="grow") as pub, Subscriber(channel) as sub:
        for number in range(11):
            pub.send(np.array(number))
        assert pub.statistics().rings == 6
        assert [int(sub.recv(timeout=5).value) for _ in range(11)] == list(range(11))
    with Publisher(channel, slots=2, full="grow", max_bytes="64KiB") as pub, Subscriber(channel):
        pub.send(np.array(0))
        with pytest.raises(shmtensor.RingFull):
            for _ in range(10):
                pub.send(np.array(0), timeout=0.01)


def test_a_message_takes_as_many_slots_as_it_needs(channel):
    with Publisher(channel, slots=8, slot_bytes=1024) as pub, Subscriber(channel) as sub:
        for size in (10, 1024, 1025, 5000, 3, 8 * 1024, 100):
            pub.send(np.full(size, size % 251, np.uint8))
            msg = sub.recv(timeout=5)
            assert msg.value.shape == (size,)
            assert (msg.value == size % 251).all()
            del msg
        assert pub.statistics().rings == 1
        pub.send(np.ones(9 * 1024, np.uint8))
        assert pub.statistics().rings == 2
        assert sub.recv(timeout=5).value.sum() == 9 * 1024


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
            assert [int(sub.recv(timeout=5).value) for _ in range(3)] == [7, 8, 9]
            pub.send(np.array(10))
            assert int(sub.recv(timeout=5).value) == 10
            for number in range(11, 40):
                pub.send(np.array(number))
                assert int(sub.recv(timeout=5).value) == number


def test_latest_never_holds_a_publisher_back_and_counts_what_it_missed(channel):
    with Publisher(channel, slots=4, full="error") as pub, Subscriber(channel, delivery="latest") as sub:
        held = None
        for number in range(100):
            pub.send(np.array(number))
            if number == 10:
                held = sub.recv(timeout=5)
                assert int(held.value) == 10
                assert held.missed == 10
        msg = sub.recv(timeout=5)
        assert int(msg.value) == 99
        assert msg.missed == 88
        assert int(held.value) == 10
        assert sub.statistics().missed == 98


@pytest.mark.parametrize("full", ["block", "error", "drop"])
def test_a_message_without_room_takes_nothing_from_latest(channel, full):
    """It needs three slots in a row, and the second of four is leased: the newest message stays where it is."""
    with (
        Publisher(channel, slots=4, slot_bytes=4096, full=full) as pub,
        Subscriber(channel, delivery="latest") as sub,
        Subscriber(channel, delivery="latest") as slow,
    ):
        pub.send(np.array(1))
        pub.send(np.array(2))
        held = sub.recv(timeout=5)
        for value in (3, 4):
            pub.send(np.array(value))
        large = np.zeros(3 * 4096, np.uint8)
        if full == "drop":
            assert pub.send(large) == 0
        else:
            with pytest.raises(shmtensor.RingFull):
                pub.send(large, timeout=0)
        assert int(slow.recv(timeout=5).value) == 4
        assert int(held.value) == 2
        del held
        pub.send(large)
        assert slow.recv(timeout=5).nbytes == large.nbytes


def test_lossless_and_latest_mix(channel):
    with (
        Publisher(channel, slots=4) as pub,
        Subscriber(channel) as every,
        Subscriber(channel, delivery="latest") as last,
    ):
        for number in range(50):
            pub.send(np.array(number))
            assert int(every.recv(timeout=5).value) == number
        assert int(last.recv(timeout=5).value) == 49


def test_loan_is_sent_on_leaving_and_discarded_on_an_exception(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        with pub.loan((2, 3), np.float32) as loan:
            loan.array[...] = 4
        assert loan.seq == 1
        assert (sub.recv(timeout=5).value == 4).all()
        for _ in range(5):
            with pytest.raises(KeyError), pub.loan((2,), np.int8):
                raise KeyError
        with pytest.raises(shmtensor.ReleasedError):
            _ = loan.array
        with pub.loan((2,), np.int8, meta={"a": 1}) as loan:
            loan.array[...] = 7
        msg = sub.recv(timeout=5)
        assert msg.meta == {"a": 1}
        assert msg.value.tolist() == [7, 7]


def test_a_kept_loan_view_keeps_its_slot_out_of_use(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        with pub.loan((4,), np.int64) as loan:
            kept = loan.array
            kept[...] = 1
        first = sub.recv(timeout=5)
        del first
        for number in range(10):
            pub.send(np.full(4, number))
            msg = sub.recv(timeout=5)
            kept[...] = -1  # the owner of a stale view can hurt nobody
            assert (msg.value == number).all()
            del msg


def test_close_with_linger_waits_for_receivers(channel):
    pub, sub = Publisher(channel), Subscriber(channel)
    pub.send(np.array(1))
    thread = threading.Thread(target=pub.close, kwargs={"linger": 30})
    thread.start()
    assert int(sub.recv(timeout=5).value) == 1
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(shmtensor.EndOfStream):
        sub.recv(timeout=5)
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
    kept = sub.recv(timeout=5).value
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
    assert not shared_files()


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
    while not pub.statistics().waits or not other.statistics().sleeps:
        pass
    other.close()  # first: without a publisher, its `recv` would rightly say that the stream has ended
    pub.close()
    for thread in threads:
        thread.join(60)
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
        pub.wait_for_subscribers(1, timeout=30)
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
        (lambda: Publisher("x", full="perhaps"), ValueError),
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
        assert int(sub.recv(timeout=5).value) == 1


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
        pub.wait_for_subscribers(2, timeout=60)
        for number in range(100):
            pub.send(np.full(1000, number))
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert out.split() == ["ready", str(sum(range(100)) * 1000)]
        assert child.returncode == 0


def _child_of(pipe, channel):
    with Subscriber(channel) as sub:
        pipe.send("ready")
        pipe.send([int(msg.value[0]) for msg in sub])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods(channel, method):
    context = multiprocessing.get_context(method)
    with Publisher(channel) as pub:
        pipe, theirs = context.Pipe()
        child = context.Process(target=_child_of, args=(theirs, channel))
        child.start()
        assert pipe.recv() == "ready"
        for value in numbers(50):
            pub.send(value, timeout=30)
    assert pipe.recv() == list(range(50))
    child.join(30)
    assert child.exitcode == 0
    pipe.close()
    theirs.close()
    child.close()
    if method == "forkserver":
        stop_forkserver()


def test_an_endpoint_used_in_a_forked_child_raises(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        pub.send(np.array(1))
        msg = sub.recv(timeout=5)
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
    assert int(sub.recv(timeout=10).value) == 5
    with pytest.raises(shmtensor.EndOfStream):
        sub.recv(timeout=10)
    os.close(release)
    sub.close()


def test_statistics_and_repr(channel):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        pub.send(np.zeros(16))
        msg = sub.recv(timeout=5)
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
        other.recv(timeout=5)
        assert child.stdout.readline() == "holds\n"
        os.kill(child.pid, signal.SIGSTOP)
        sent = 0
        for number in range(300):
            if pub.send(np.full(8, number), timeout=10):
                sent += 1
                assert int(other.recv(timeout=5).value[0]) == number
        assert sent == 300 if delivery == "latest" else sent == 3
        assert pub.statistics().dead_receivers == 0
        assert pub.statistics().receivers == 2
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    assert int(out) == (1 if delivery == "latest" else 3)


def test_a_forked_child_may_drop_its_parents_endpoints_and_make_its_own(channel):
    """The child's new ring must not end up where the parent's was mapped, and be unmapped with it."""
    pub, sub = Publisher(channel, slots=4, slot_bytes=1 << 20), Subscriber(channel)
    pub.send(np.arange(5))
    msg = sub.recv(timeout=5)
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
                assert mine.recv(timeout=5).value.sum() == 7000
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
                assert int(first.recv(timeout=5).value) == number
        with Subscriber(channel) as second:
            for number in (3, 4, 5):
                pub.send(np.array(number))
            assert [int(second.recv(timeout=5).value) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_history_never_blocks_a_publisher_without_receivers(channel):
    with Publisher(channel, slots=4, slot_bytes=64, history=3) as pub:
        for _ in range(10):
            pub.send(np.zeros(24), timeout=5)  # three times the slot


def test_a_loan_sent_while_another_thread_waits_for_a_slot(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        pub.send(np.full(4, 1))
        loan = pub.loan((4,), np.int64)
        loan.array[...] = 2
        thread = threading.Thread(target=pub.send, args=(np.full(4, 3),), kwargs={"timeout": 30})
        thread.start()
        while not pub.statistics().waits:
            pass
        sender = threading.Thread(target=loan.send)
        sender.start()
        assert int(sub.recv(timeout=5).value[0]) == 1
        for waiting in (thread, sender):
            waiting.join(30)
        assert sorted(int(sub.recv(timeout=5).value[0]) for _ in range(2)) == [2, 3]


def test_polling_without_sleeping_notices_a_dead_publisher(channel):
    source = (
        "import sys, os, numpy as np, shmtensor\npub = shmtensor.Publisher(sys.argv[1])\npub.wait_for_subscribers(1)\n"
        "pub.send(np.array(1))\nos.kill(os.getpid(), 9)"
    )
    with Subscriber(channel) as sub:
        subprocess.run([sys.executable, "-c", source, channel], timeout=60, check=False)
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
            assert int(rx.recv(timeout=5).value) == 1
            pool = type(tx._pool)
            with monkeypatch.context() as patch:

                def fail(*args):
                    raise MemoryError

                patch.setattr(pool, "write_record", fail)
                with pytest.raises(MemoryError):
                    tx.send({"a": np.array(2)})
            assert tx.send(np.array(3)) == 2
            assert int(rx.recv(timeout=5).value) == 3
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.6)
            assert tx.statistics().slots_busy <= 2


SIZES = pytest.mark.parametrize("count", [16, 80_000], ids=["compiled", "Python code"])  # 80,000: more than moves.ALONE


@SIZES
def test_a_receiver_that_keeps_up_is_sent_everything_in_one_slot(channel, count):
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:
        places = set()
        for number in range(20):
            pub.send(torch.full((count,), number, dtype=torch.int32))
            value = sub.recv(timeout=60).value
            assert value[-1] == number
            places.add(value.data_ptr())
            del value
        assert len(places) == 1
        pub.send(torch.full((count,), 20, dtype=torch.int32))
        kept = sub.recv(timeout=60).value
        pub.send(torch.full((count,), 21, dtype=torch.int32))
        other = sub.recv(timeout=60).value
        assert kept.data_ptr() in places
        assert other.data_ptr() not in places
        assert (kept[-1], other[-1]) == (20, 21)


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
                kept.append((got, into.recv(timeout=60).value))
                got += 1
            elif kept:
                kept.pop(choose.randrange(len(kept)))
            assert all((view[0], view[-1]) == (number, number) for number, view in kept)
        assert sent > 100
        kept.clear()
