"""Work queues and the queues on top, by both implementations: claims, redelivery, pickled items, deaths."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import Consumer, Producer
from shmtensor.mp import joinable_queue

from ..conftest import shared_files
from ..faults.interrupts import SOAK
from ..forkservers import Program, preloaded
from ..spawned import echo
from ..waiting import wait_until

PATIENCE = 120


@pytest.fixture(scope="module")
def forks(implementation):
    with preloaded("torch", "numpy", "shmtensor", "shmtensor.endpoints.receiver") as context:
        yield context


@pytest.mark.parametrize("acknowledge", ["next", "release"])
def test_consumers_get_the_same(channel, acknowledge):
    with Producer(channel, slots=4) as tx, Consumer(channel, acknowledge=acknowledge) as rx:
        for number in range(40):
            tx.send(torch.full((3, 5), float(number)))
            msg = rx.recv(timeout=PATIENCE)
            assert msg.value.tolist() == [[float(number)] * 5] * 3
            assert (msg.seq, msg.nbytes, msg.attempt, msg.missed, msg.meta) == (number + 1, 60, 1, 0, None)
            msg.value.add_(1)  # nobody else's
            if acknowledge == "release":
                msg.release()
            del msg
        if acknowledge == "next":
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0)
        assert rx.statistics().received == 40
        assert rx.statistics().leases == 0
        assert tx.statistics().slots_busy <= 4
        tx.close(linger=PATIENCE)  # everything is done


def test_messages_of_many_kinds_by_turns(channel):
    with Producer(channel, slots=64, slot_bytes=4096) as tx, Consumer(channel) as rx:
        for size in range(1, 11):
            for _ in range(3):
                tx.send(torch.full((size,), float(size)))
                assert rx.recv(timeout=PATIENCE).value.tolist() == [float(size)] * size
        for size in range(1, 11):
            tx.send(torch.full((size,), -1.0))
            assert rx.recv(timeout=PATIENCE).value.tolist() == [-1.0] * size
        for size in range(1, 60):  # more looks than are remembered
            for _ in range(2):
                tx.send(torch.full((size,), float(size)))
                assert rx.recv(timeout=PATIENCE).value.tolist() == [float(size)] * size


def test_what_is_not_done_comes_again(channel):
    with Producer(channel, slots=8) as tx, Consumer(channel, acknowledge="release") as rx:
        for number in range(6):
            tx.send(torch.full((4,), float(number)))
            rx.recv(timeout=PATIENCE).release()
        tx.send(torch.full((4,), 6.0))
        with pytest.raises(ZeroDivisionError), rx.recv(timeout=PATIENCE) as msg:
            assert msg.attempt == 1
            raise ZeroDivisionError
        del msg
        again = rx.recv(timeout=PATIENCE)
        assert (again.attempt, again.value.tolist()) == (2, [6.0] * 4)
        again.release()
        assert rx.statistics().redelivered == 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3)),
        st.tuples(st.just("recv"), st.integers(0, 1)),
        st.tuples(st.just("done"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("rejoin"), st.integers(0, 1)),
    ),
    min_size=30,
    max_size=150,
)
_count = itertools.count()


@settings(max_examples=100 if SOAK else 15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_each_message_is_done_once(operations):
    """Two consumers, messages done, failed and given back in any order, consumers that leave: nothing lost or twice."""
    channel = f"test-{os.getpid()}-claims-{next(_count)}"
    done: list[int] = []
    with Producer(channel, slots=6, slot_bytes=256, full="grow") as tx:
        receivers = [Consumer(channel, acknowledge="release", max_attempts=250) for _ in range(2)]
        held: list[tuple[Consumer, shmtensor.Message, int]] = []
        number = 0
        for what, choice in operations:
            if what == "send":
                number += 1
                value = torch.full((1 + choice,), float(number))
                tx.send({"x": value} if choice == 3 else value)
            elif what == "recv":
                try:
                    msg = receivers[choice].recv(timeout=0)
                except shmtensor.TimedOut:
                    continue
                value = msg.value["x"] if isinstance(msg.value, dict) else msg.value
                held.append((receivers[choice], msg, int(value[0])))
                assert set(value.tolist()) == {value[0].item()}
            elif what in ("done", "fail") and held:
                _, msg, got = held.pop(choice % len(held))
                value = None
                if what == "done":
                    msg.release()
                    done.append(got)
                del msg
            elif what == "rejoin":
                held = [entry for entry in held if entry[0] is not receivers[choice]]
                msg = value = None
                receivers[choice].close()
                receivers[choice] = Consumer(channel, acknowledge="release", max_attempts=250)
        while held:
            _, msg, got = held.pop()
            msg.release()
            done.append(got)
        msg = value = None
        while len(done) < number:
            with receivers[0].recv(timeout=PATIENCE) as msg:
                value = msg.value["x"] if isinstance(msg.value, dict) else msg.value
                done.append(int(value[0]))
            value = None
        assert sorted(done) == list(range(1, number + 1))
        for receiver in receivers:
            with pytest.raises(shmtensor.TimedOut):
                receiver.recv(timeout=0)
            receiver.close()


def test_a_forked_child_does_not_say_that_a_message_is_done(channel):
    with Producer(channel, slots=4) as tx, Consumer(channel) as rx:
        for number in range(8):
            tx.send(torch.full((4,), float(number)))
            msg = rx.recv(timeout=PATIENCE)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    rx.recv(timeout=0)
                except shmtensor.ForkedError:
                    code = 0
                del msg
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not msg._lease.acknowledged
        assert msg.value.tolist() == [7.0] * 4
        assert rx.statistics().leases == 1


WORKER = """
import os, sys, torch, shmtensor
rx = shmtensor.Consumer(sys.argv[1], acknowledge="release")
out = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
for count, msg in enumerate(rx):
    number = int(msg.value[0])
    assert msg.value.tolist() == [float(number)] * 16
    os.write(out, number.to_bytes(4, "little"))
    msg.release()
    if count == 100:
        print("going", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_consumers_killed_in_full_flight(forks, channel, tmp_path, attempt):
    """What a killed consumer had not done goes to another: everything is done, and at most that one message twice."""
    log = tmp_path / "log"
    log.touch()
    total = 6000 if SOAK else 1500
    victims = [Program(forks, WORKER, channel, str(log)) for _ in range(2)]
    try:
        with Producer(channel, slots=16) as tx:
            tx.wait_for_consumers(2, timeout=PATIENCE)

            def kill():
                for victim in victims:
                    victim.stdout.readline()
                    victim.kill()
                    victim.wait()

            killer = threading.Thread(target=kill)
            killer.start()
            rest: list[int] = []
            with Consumer(channel, acknowledge="release") as rx:
                sent = 0
                while sent < total or killer.is_alive():
                    try:
                        tx.send(torch.full((16,), float(sent)), timeout=0.001 if killer.is_alive() else 0)
                        sent += 1
                    except shmtensor.RingFull:
                        if killer.is_alive() and sent < total - 100:
                            continue  # the victims work on
                    if killer.is_alive() and sent < total - 100:
                        continue
                    _take(rx, rest)
                tx.close()
                for msg in rx:
                    rest.append(int(msg.value[0]))
                    msg.release()
        done = np.frombuffer(log.read_bytes(), "<u4").tolist() + rest
        assert set(done) == set(range(sent))
        assert len(done) <= sent + len(victims)
    finally:
        for victim in victims:
            victim.kill()
            victim.wait()
            victim.stdin.close()
            victim.stdout.close()
    assert {victim.returncode for victim in victims} == {-signal.SIGKILL}
    Producer(channel).close()
    assert not shared_files()


def _take(rx: Consumer, into: list[int]) -> None:
    try:
        msg = rx.recv(timeout=0)
    except shmtensor.TimedOut:
        return
    into.append(int(msg.value[0]))
    msg.release()


# --- queues


ITEMS = [
    7, None, True, "text", b"bytes", 1.5, 2j, [1, [2]], {"a": (1, 2)}, {"b"}, "x" * 100, "y" * 5000, b"z" * 40000,
    range(3), ValueError("v"), 1 << 200,
]  # fmt: skip


def test_objects_of_any_size_come_as_they_were():
    q = shmtensor.Queue()
    for _ in range(30):
        for item in ITEMS:
            q.put(item)
        for item in ITEMS:
            got = q.get(timeout=PATIENCE)
            assert repr(got) == repr(item)
    getter = q._handle.getter
    assert getter.statistics().received == 30 * len(ITEMS)
    assert getter.statistics().leases == 0
    assert q.qsize() == 0
    q.close()


class Nested:
    """Gets another item of its queue while it is unpickled, or refuses to be."""

    queues: typing.ClassVar[dict[str, typing.Any]] = {}

    def __init__(self, what):
        self.what = what

    def __reduce__(self):
        return _rebuild, (self.what,)


def _rebuild(what):
    if what == "refuse":
        raise LookupError("refused")
    return "outer", Nested.queues["q"].get(timeout=PATIENCE)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kind", [shmtensor.Queue, shmtensor.JoinableQueue])
def test_what_an_interrupted_get_has_left_is_given_back_by_close(kind, released, monkeypatch):
    """Its object was made; its message was released, which counts it as this process's, or not."""

    def cut_short(q, hand):
        if released:
            hand.steps.append(q._steps(hand.steps[0])[0]())
        raise KeyboardInterrupt

    q, (ours, theirs) = kind(ctx="fork"), multiprocessing.Pipe()
    q.put("x")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_pop", lambda q: False)
        patch.setattr(kind, "_complete", cut_short)
        with pytest.raises(KeyboardInterrupt):
            q.get()
    gc.collect()  # the frames of that call
    assert len(q._pending) == 1
    getter = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(q.get(timeout=PATIENCE)))
    getter.start()
    q.close()
    assert ours.poll(PATIENCE)
    assert ours.recv() == "x"
    getter.join(PATIENCE)
    assert getter.exitcode == 0
    ours.close()
    theirs.close()


def test_what_another_thread_gets_meanwhile_is_not_done(monkeypatch):
    """A `get` that has read how many items are unfinished, before the other one was put, gives up none of both."""
    unfinished, read, go_on = joinable_queue._Tasks.unfinished.fget, threading.Event(), threading.Event()

    def slowly(tasks):
        found = unfinished(tasks)
        if threading.current_thread() is first and not read.is_set():
            read.set()
            assert go_on.wait(PATIENCE)
        return found

    with contextlib.closing(shmtensor.JoinableQueue()) as q:
        first = threading.Thread(target=q.get)
        second = threading.Thread(target=lambda: (q.get(), q.get()))  # the first one's object is there for anybody
        monkeypatch.setattr(joinable_queue._Tasks, "unfinished", property(slowly))
        q.put("a")
        first.start()
        assert read.wait(PATIENCE)
        q.put("b")
        second.start()
        wait_until(lambda: len(q._held._messages) == 2)
        q.put("c")
        go_on.set()
        first.join(PATIENCE)
        second.join(PATIENCE)
        assert len(q._held._messages) == 3
        for _ in range(3):
            q.task_done()
        q.join()


@pytest.mark.parametrize("kind", [shmtensor.Queue, shmtensor.JoinableQueue])
def test_unpickling_may_use_the_queue_and_may_fail(kind):
    q = Nested.queues["q"] = kind(maxsize=50)
    try:
        for number in range(20):
            q.put(number)
        assert [q.get(timeout=PATIENCE) for _ in range(20)] == list(range(20))
        q.put(Nested("nest"))
        q.put("inner")
        assert q.get(timeout=PATIENCE) == ("outer", "inner")
        q.put(Nested("refuse"))
        q.put("next")
        with pytest.raises(LookupError, match="refused"):
            q.get(timeout=PATIENCE)
        assert q.get(timeout=PATIENCE) == "next"
        assert (q.qsize(), q.empty()) == (0, True)
        with pytest.raises(queue.Empty):
            q.get_nowait()
        if kind is shmtensor.JoinableQueue:
            for _ in range(24):
                q.task_done()
            q.join()
    finally:
        Nested.queues.clear()
        q.close()


def _fetched(_):
    """Another thread's item, got while this one is unpickled."""
    with ThreadPoolExecutor(1) as pool:
        return "outer", pool.submit(Nested.queues["q"].get, timeout=PATIENCE).result(PATIENCE)


class NestedThread(Nested):
    def __reduce__(self):
        return _fetched, (self.what,)


@pytest.mark.parametrize("kind", [shmtensor.Queue, shmtensor.JoinableQueue])
def test_other_threads_get_while_one_unpickles(kind):
    """`get` of either thread returns what comes first out of its pickle; nothing is lost or doubled."""
    q = Nested.queues["q"] = kind(maxsize=50)
    try:
        q.put(NestedThread("nest"))
        q.put("inner")
        q.put("last")
        assert q.get(timeout=PATIENCE) == ("outer", "inner")
        assert q.get(timeout=PATIENCE) == "last"
        assert (q.qsize(), q.empty()) == (0, True)
    finally:
        Nested.queues.clear()
        q.close()


class _Killer:
    """Kills every process that unpickles it, but one."""

    def __init__(self, spared):
        self.spared = spared

    def __reduce__(self):
        return _kill_unless, (self.spared,)


def _kill_unless(spared):
    if os.getpid() != spared:
        os.kill(os.getpid(), signal.SIGKILL)
    return "spared"


def _get_all(q, pipe):
    while (item := q.get()) is not None:
        pipe.send(item)


def test_a_getter_killed_while_it_unpickles_has_got_nothing():
    """The object is made where it lies, under the claim: the kernel drops that with the getter."""
    q = shmtensor.Queue(maxsize=200)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_get_all, args=(q, theirs))
    process.start()
    theirs.close()
    for number in range(100):
        q.put(number)
        assert ours.recv() == number
    q.put(_Killer(os.getpid()))
    q.put("after")
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert sorted(q.get(timeout=PATIENCE) for _ in range(2)) == ["after", "spared"]
    with pytest.raises(queue.Empty):
        q.get_nowait()
    assert q._handle.getter.statistics().redelivered == 1
    ours.close()
    q.close()


SURE = 3000 if SOAK else 1000
"""Items that a putter has put before it is killed."""


def _put_all(q, pipe):
    number = 0
    while True:
        q.put(number)
        number += 1
        if number == SURE:
            pipe.send("going")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_a_putter_killed_in_full_flight(attempt):
    """What it put before comes, each item once, in order and whole; then nothing."""
    q = shmtensor.SimpleQueue()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_put_all, args=(q, theirs))
    process.start()
    killer = threading.Thread(target=lambda: (ours.recv(), process.kill(), process.join()))
    killer.start()
    got, pause = 0, threading.Event()
    while killer.is_alive() or not q.empty():
        if q.empty():
            pause.wait(0.001)
            continue
        assert q.get() == got
        got += 1
    assert got >= SURE
    assert process.exitcode == -signal.SIGKILL
    for end in (ours, theirs):
        end.close()
    q.close()


def test_unpickling_may_close_the_queue():
    q = shmtensor.Queue()
    for number in range(20):
        q.put(number)
    assert [q.get(timeout=PATIENCE) for _ in range(20)] == list(range(20))
    q.put(_Closer())
    _Closer.target = q
    try:
        assert q.get(timeout=PATIENCE) == "closed"
    finally:
        _Closer.target = None


class _Closer:
    target = None

    def __reduce__(self):
        return _close, ()


def _close():
    _Closer.target.close()
    return "closed"


def test_a_backlog_in_several_rings_keeps_its_order():
    q = shmtensor.Queue()
    for number in range(2000):
        q.put(number if number % 50 else [number] * 200)
    assert len(q._handle.putter._pool.rings) > 2
    for number in range(2000):
        got = q.get(timeout=PATIENCE)
        assert got == (number if number % 50 else [number] * 200)
    q.close()


def test_threads_share_a_queue():
    q = shmtensor.Queue()
    got: list[int] = []

    def take():
        while (item := q.get(timeout=PATIENCE)) is not None:
            got.append(item)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(6000):
        q.put(number)
    for _ in threads:
        q.put(None)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(6000))
    q.close()


def test_an_old_stream_is_not_part_of_a_new_one():
    q = shmtensor.SimpleQueue()
    for number in range(3000):
        item = "a" * (number * 7 % 60)
        q.put(item)
        assert q.get() == item
    q.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_between_processes(method):
    ctx = multiprocessing.get_context(method)
    wishes, answers = shmtensor.Queue(ctx=ctx), shmtensor.Queue(ctx=ctx)
    process = ctx.Process(target=echo, args=(wishes, answers))
    process.start()
    count = 3000 if SOAK else 1000
    for number in range(count):
        wishes.put((number, "x" * (number % 300)))
        if number >= 20:
            assert answers.get(timeout=PATIENCE) == (number - 20, "x" * ((number - 20) % 300))
    wishes.put(None)
    process.join(PATIENCE)
    assert process.exitcode == 0
    for number in range(count - 20, count):
        assert answers.get(timeout=PATIENCE) == (number, "x" * (number % 300))
    assert answers.empty()
    for q in (wishes, answers):
        q.close()


def test_without_torch():
    source = (
        "import sys, shmtensor\nq = shmtensor.Queue()\n"
        "for n in range(500):\n    q.put({'n': n})\n    assert q.get(timeout=60) == {'n': n}\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\nfor n in range(500):\n    q.put([n, torch.ones(3)])\n    assert q.get(timeout=60)[0] == n\n"
        "    q.put(torch.ones(3))\n    assert q.get(timeout=60).sum() == 3\n"
        "q.close()\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=2 * PATIENCE)
