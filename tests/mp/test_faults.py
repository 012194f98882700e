"""The fault matrix of the drop-ins: who dies where inside `put`, `get` and an executor's call, and what others see.

As in `faults/test_matrix.py`, whose processes and crash points these are.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

import shmtensor
from shmtensor.mp.pool import Pool

from ..faults import roles
from ..faults.matrix import SOAK, cases
from ..faults.process import Process, crash_servers

COUNT = 8
LONG = 120.0
LARGE = 1 << 15
"""Elements of an array that an executor sends in a slot."""

PUT_POINTS = [
    "join.owned", "join.entered", "join.done", "grow.before", "grow.published", "put.begun", "send.described",
    "send.acquired", "send.copied", "publish.record", "publish.ordered", "publish.published", "put.sent", "put.waits",
    "handle.released", "handle.left",
]  # fmt: skip
ONCE = {"join.owned", "join.entered", "join.done", "grow.before", "grow.published", "put.waits"} | {
    "handle.released", "handle.left", "get.delivered",
}  # fmt: skip
"""A process comes by these once, as far as it is sure, by the others at every item: there the second one is meant."""
GET_POINTS = [
    "join.owned", "join.done", "claim.found", "claim.locked", "claim.stored", "take.delivered", "get.delivered",
    "done.before", "done.stored", "release.ended", "release.stored",
]  # fmt: skip
SEND_POINTS = [
    "join.owned", "join.entered", "join.done", "grow.before", "grow.published", "send.described", "send.acquired",
    "send.copied", "publish.record", "publish.ordered", "publish.published", "pipe.posted", "handle.released",
    "handle.left",
]  # fmt: skip
RECV_POINTS = [
    "join.owned", "join.done", "pipe.named", "claim.locked", "claim.stored", "take.delivered", "done.before",
    "done.stored", "release.ended", "release.stored",
]  # fmt: skip
TASK_POINTS = ["task.taken", "task.read", "task.returned", "task.answered", "task.done"]
CALL_POINTS = ["call.named", "call.taken", "call.read", "call.returned", "call.answered", "call.done"]
POINTS = {
    "put.begun",
    "put.sent",
    "put.waits",
    "get.delivered",
    "handle.made",
    "handle.released",
    "handle.left",
    "pipe.posted",
    "pipe.named",
    *TASK_POINTS,
    *CALL_POINTS,
}
ACTIONS = ["kill", "exit"] if SOAK else ["kill"]


@pytest.fixture(scope="module")
def servers():
    with crash_servers() as of:
        yield of


@pytest.fixture
def server(request, servers):
    return servers(request.param == "compiled")


def matrix(*of_role: str, actions=ACTIONS):
    each = cases(of_role, actions)
    return pytest.mark.parametrize(("server", "point", "action", "nth"), each, indirect=["server"])


def files_of(what: str, pid: int) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if f"shmtensor.{what}-{pid}-" in name}


def nth_of(point: str) -> int:
    return 1 if point in ONCE else 2


def check_died(victim: Process) -> None:
    victim.finish()
    assert victim.died, victim.told[-3:]


def number_of(item) -> int:
    value, number = item
    assert (value == number).all(), "torn item"
    return number


def drain(queue) -> list[int]:
    """What is in a queue that nobody else uses."""
    found = []
    while not queue.empty():
        found.append(number_of(queue.get()))
    return found


def check_nothing_left(queue) -> None:
    queue.close()
    assert files_of("queue", os.getpid()) == set()


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
@matrix(*PUT_POINTS)
def test_a_putter_dies(server, kind, point, action, nth):
    """What `put` returned for is got, once and in order; the item that it died at whole, or not at all."""
    waits = point == "put.waits"
    queue = getattr(shmtensor, kind)(ctx=server, max_bytes="64KiB" if waits else None)
    victim = Process(server, "putter", queue, (point, action, nth_of(point)), 1, 1000 if waits else COUNT)
    check_died(victim)
    put = victim.all("put")
    got = [number_of(queue.get()) for _ in put]
    assert got == put
    assert drain(queue) in ([], [len(put) + 1])
    other = Process(server, "putter", queue, None, 1001, 3)
    other.finish()
    assert not other.died, other.told
    assert [number_of(queue.get()) for _ in range(3)] == [1001, 1002, 1003]
    check_nothing_left(queue)


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
@matrix(*GET_POINTS)
def test_a_getter_dies(server, kind, point, action, nth):
    """The item that it died at goes to another, unless it was done already; nothing else is lost or comes twice."""
    queue = getattr(shmtensor, kind)(ctx=server)
    for number in range(1, COUNT + 1):
        queue.put((np.full(50, number), number))
    victim = Process(server, "getter", queue, (point, action, nth_of(point)), COUNT)
    check_died(victim)
    got = victim.all("got")
    lost = int(point == "done.stored")  # at the end of `get`: it is the victim's, and gone with it
    rest = [number_of(queue.get()) for _ in range(COUNT - len(got) - lost)]
    assert drain(queue) == []
    assert sorted(got + rest) == [number for number in range(1, COUNT + 1) if not lost or number != len(got) + 1]
    check_nothing_left(queue)


@matrix("claim.stored", "take.delivered")
def test_a_worker_of_a_joinable_queue_dies(server, point, action, nth):
    """What it had not said `task_done` for goes to another, and `join` returns when that one has."""
    queue = shmtensor.JoinableQueue(ctx=server)
    for number in range(1, COUNT + 1):
        queue.put((np.full(50, number), number))
    victim = Process(server, "getter", queue, (point, action, 2), COUNT)
    check_died(victim)
    done = victim.all("done")
    assert len(done) == 1
    rest = []
    for _ in range(COUNT - len(done)):
        rest.append(number_of(queue.get()))
        queue.task_done()
    queue.join()
    assert sorted(done + rest) == list(range(1, COUNT + 1))
    check_nothing_left(queue)


@matrix("done.before", actions=["kill"])
def test_a_worker_dies_between_the_counter_and_its_item(server, point, action, nth):
    """In `task_done`: the item comes again, and its second `task_done` is one too many."""
    queue = shmtensor.JoinableQueue(ctx=server)
    for number in range(1, COUNT + 1):
        queue.put((np.full(50, number), number))
    victim = Process(server, "getter", queue, (point, action, nth), COUNT)
    check_died(victim)
    rest = [number_of(queue.get()) for _ in range(COUNT)]
    assert sorted(rest) == list(range(1, COUNT + 1))
    for _ in range(COUNT - 1):
        queue.task_done()
    queue.join()
    with pytest.raises(ValueError, match="too many times"):
        queue.task_done()
    check_nothing_left(queue)


@matrix("semaphore.created", "semaphore.written", "handle.made", "handle.released", "handle.left", actions=["kill"])
def test_the_maker_of_a_queue_dies(server, point, action, nth):
    """What it leaves goes when somebody makes the next queue, here or elsewhere."""
    victim = Process(server, "maker", (point, action, nth))
    pid = victim.process.pid
    check_died(victim)
    shmtensor.Queue(ctx=server).close()
    assert files_of("queue", pid) == set()


@pytest.mark.parametrize("retry_on_death", [0, 1])
@matrix(*CALL_POINTS)
def test_a_worker_of_an_executor_dies(server, tmp_path, point, action, nth, retry_on_death):
    """The pool breaks, or the call is run again: its future has the right result or says so."""
    path = str(tmp_path / "armed")
    pool = shmtensor.ProcessPoolExecutor(
        2, server, roles.arm_one, (path, point, action, 2), retry_on_death=retry_on_death
    )  # fmt: skip
    array = np.arange(LARGE)
    futures = []
    broken = None
    with pool:
        try:
            for number in range(40):
                futures.append(pool.submit(roles.add_after_the_death, array, number))
        except BrokenProcessPool as error:
            broken = error
        for number, future in enumerate(futures):
            error = future.exception(LONG)
            if error is None:
                assert np.array_equal(future.result(), array + number)
            else:
                assert isinstance(error, BrokenProcessPool)
                broken = error
    assert (broken is None) == bool(retry_on_death), "never came by"
    del futures, future
    gc.collect()
    assert files_of("executor", os.getpid()) == set()


def everything_of(reader) -> list[int]:
    """What is left in a pipe whose other end no process has."""
    found = []
    try:
        while True:
            found.append(number_of(reader.recv()))
    except EOFError:
        return found


@matrix(*SEND_POINTS)
def test_a_sender_into_a_pipe_dies(server, point, action, nth):
    """The receiver gets what `send` returned for, perhaps the object that it died at, and `EOFError`."""
    reader, writer = shmtensor.get_context("forkserver").Pipe(False)
    victim = Process(server, "putter", writer, (point, action, nth_of(point)), 1, COUNT)
    writer.close()
    check_died(victim)
    put = victim.all("put")
    assert everything_of(reader) == put
    reader.close()
    assert files_of("pipe", os.getpid()) == set()


@matrix(*RECV_POINTS)
def test_a_receiver_of_a_pipe_dies(server, point, action, nth):
    """The next `send` raises, and nothing is left."""
    reader, writer = shmtensor.get_context("forkserver").Pipe(False)
    for number in range(1, COUNT + 1):
        writer.send((np.full(50, number), number))
    victim = Process(server, "getter", reader, (point, action, nth_of(point)), COUNT)
    reader.close()
    check_died(victim)
    assert victim.all("got") == list(range(1, nth_of(point)))
    with pytest.raises(BrokenPipeError):
        writer.send((np.full(50, 0), 0))
    writer.close()
    assert files_of("pipe", os.getpid()) == set()


@pytest.mark.parametrize("retry_on_death", [0, 1])
@matrix(*TASK_POINTS)
def test_a_worker_of_a_pool_dies(server, tmp_path, point, action, nth, retry_on_death):
    """Its task fails, alone, unless its result was sent; or it is run again. The pool goes on."""
    path = tmp_path / "armed"
    array = np.arange(LARGE)
    with Pool(2, roles.arm_one, (str(path), point, action, 2), context=server, retry_on_death=retry_on_death) as pool:
        before = {process.pid for process in pool._pool}
        results = [pool.apply_async(roles.add_after_the_death, (array, number)) for number in range(40)]
        failed = 0
        for number, result in enumerate(results):
            try:
                assert np.array_equal(result.get(LONG), array + number)
            except shmtensor.PeerDied:
                failed += 1
        assert failed == (not retry_on_death and point in ("task.taken", "task.read", "task.returned"))
        assert [int(found[0]) for found in pool.starmap(roles.add, [(array, number) for number in range(8)])] == [
            *range(8)
        ]
        pool.close()
        pool.join()
        assert before - {process.pid for process in pool._pool}, "never came by"
    del results, result
    gc.collect()
    assert files_of("pool", os.getpid()) == set()
