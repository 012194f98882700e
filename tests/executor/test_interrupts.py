"""Exceptions from outside in every call of `ProcessPoolExecutor`: at each boundary, then by signals at random moments.

After each the pool works at once, what was submitted before ends, and `shutdown` ends and leaves nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import gc
import os
import threading
import weakref
from concurrent.futures import process as standard

import numpy as np
import pytest
import torch

from shmtensor import ProcessPoolExecutor
from shmtensor.errors import ReentrantError
from shmtensor.executor.calls import CallChannels

from ..conftest import left_files
from ..faults.interrupts import Interrupt, each_boundary, interrupted_at_random, random_count, random_signals, stride
from ..waiting import PATIENCE, wait_until

"""Of calls for each of which processes are started."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_skipped")]


def twice(value):
    return value * 2


def wait_at(path):
    with open(path, "rb"):
        return "went on"


def files() -> list[str]:
    return sorted(left_files("executor"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_left(executor) -> list:
    """What an exception has left in the parent."""
    left = [name for name in ("_shutdown_lock", "_starting", "_forgetting") if getattr(executor, name).locked()]
    left += ["gate"] * (not executor._gate.acquire(False) or executor._gate.release() is not None)
    left += ["call"] * len(executor._pending_work_items) + ["attempt"] * len(executor._channels._under_way)
    return left + ["lease"] * executor._channels._consumer.statistics().leases


def nothing(left) -> None:
    """Wait until nothing is left."""

    def none() -> bool:
        if left() == []:
            return True
        gc.collect()
        return False

    wait_until(none, left)


def check(executor, other=None) -> None:
    """It works, and nothing is held but what other calls hold."""
    if other is not None:
        assert other.result(PATIENCE) == 2
    nothing(lambda: works(executor) and is_left(executor))


def works(executor) -> bool:
    """Each result that arrives may end what an exception in a finalizer has kept."""
    return executor.submit(twice, np.ones(20_000)).result(PATIENCE).sum() == 40_000


def ended(executor) -> None:
    """It is shut down, as far as it was not, and everything is gone."""
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(twice, 1)


@pytest.fixture
def pool():
    with ProcessPoolExecutor(1, mp_context="fork") as executor:
        check(executor)
        yield executor


def result_of(executor, value):
    return executor.submit(twice, value).result(PATIENCE)


def cancelled(executor, value):
    return executor.submit(twice, value).cancel()


def waited_in_vain(executor, value):
    with contextlib.suppress(concurrent.futures.TimeoutError):
        executor.submit(twice, value).result(0.0)


CALLS = {
    "submit": lambda executor, value: executor.submit(twice, value),
    "result": result_of,
    "exception": lambda executor, value: executor.submit(twice, value).exception(PATIENCE),
    "map": lambda executor, value: list(executor.map(twice, [value] * 3)),
    "map-chunks": lambda executor, value: list(executor.map(twice, [value] * 3, chunksize=2, timeout=PATIENCE)),
    "cancel": cancelled,
    "timeout": waited_in_vain,
    "done": lambda executor, value: [getattr(executor.submit(twice, value), name)() for name in ("done", "__repr__")],
}
VALUES = {"small": 3, "array": np.ones(20_000)}


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call(pool, call, what):
    """All at each boundary; another call, submitted before, has its result."""
    attempts = 0
    for attempt in each_boundary(lambda: CALLS[call](pool, VALUES[what])):
        attempts += 1
        attempt.result = None
        check(pool, pool.submit(twice, 1))
    assert attempts > 20


def test_the_result_of_one_future(pool):
    """Which is not lost, wherever the one that waits for it is interrupted."""
    futures = [pool.submit(twice, np.ones(20_000))]
    for attempt in each_boundary(lambda: futures[0].result(PATIENCE)):
        attempt.result = None
        assert futures[0].result(PATIENCE).sum() == 40_000, attempt
        futures[0] = pool.submit(twice, np.ones(20_000))  # so that it waits, some of the times
    futures.clear()
    check(pool)


def test_cancel_reaches_all_who_wait(pool, tmp_path):
    """A thread that waits for it, and callbacks, wherever `cancel` is interrupted."""
    os.mkfifo(tmp_path / "gate")
    held = [pool.submit(wait_at, tmp_path / "gate") for _ in range(4)]
    called, ends, last = [], [], []

    def wait_for(future):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
        ends.append(future)

    def submit():
        future = pool.submit(twice, 1)
        future.add_done_callback(called.append)
        threads = [
            threading.Thread(target=wait_for, args=(future,)),
            threading.Thread(target=concurrent.futures.wait, args=([future],)),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: future._condition._waiters and future._waiters)
        last[:] = [future]
        return future, threads

    future, threads = submit()
    for attempt in each_boundary(lambda: last[0].cancel()):
        if not future.cancelled():
            assert attempt.raised
            future.cancel()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), attempt
        assert called in ([future], []), attempt
        assert called or attempt.raised
        called.clear()
        future, threads = submit()
    future.cancel()
    for thread in threads:
        thread.join(PATIENCE)
    with open(tmp_path / "gate", "wb"):
        assert held[0].result(PATIENCE) == "went on"
        assert [each.result(PATIENCE) for each in held[1:]] == ["went on"] * 3
    ends.clear()


def made(method, **options):
    return ProcessPoolExecutor(1, mp_context=method, **options)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("retry_on_death", [0, 2])
def test_making_one(method, retry_on_death):
    ended(made(method, retry_on_death=retry_on_death))
    before = descriptors()
    for attempt in each_boundary(lambda: made(method, retry_on_death=retry_on_death)):
        if attempt.result is not None:
            ended(attempt.result)
            attempt.result = None
        gc.collect()
        nothing(lambda: files() + ["descriptor"] * (descriptors() - before))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_first_call(method):
    """It starts the worker and the thread that serves it."""
    last = [made(method)]
    started = ("socket", "pipe")  # of workers that are alive
    step = stride(37 if method == "fork" else 185)
    for attempt in each_boundary(lambda: last[0].submit(twice, 3), step=step, may_leave=started):
        attempt.result = None
        check(last[0])
        assert len(last[0]._processes) == 1
        ended(last[0])
        last[0] = made(method)
    ended(last.pop())
    assert files() == []


@pytest.mark.parametrize("options", [{}, {"wait": False}, {"cancel_futures": True}], ids=str)
@pytest.mark.parametrize("retry_on_death", [0, 2])
def test_shutdown(options, retry_on_death):
    executors = []

    def make():
        executor = made("fork", retry_on_death=retry_on_death)
        check(executor)
        executors.append((executor, [executor.submit(twice, 1) for _ in range(4)], executor._executor_manager_thread))

    make()
    for attempt in each_boundary(lambda: executors[-1][0].shutdown(**options), step=stride(11)):
        executor, futures, manager = executors.pop()
        ended(executor)
        manager.join(PATIENCE)
        assert not manager.is_alive(), attempt
        done, others = concurrent.futures.wait(futures, PATIENCE)
        assert not others
        assert all(each.cancelled() or each.result() == 2 for each in done)
        assert "cancel_futures" in options or not any(each.cancelled() for each in done)
        del executor, futures, manager, done
        nothing(files)
        make()
    ended(executors.pop()[0])


def test_a_shutdown_that_waits_can_be_interrupted(tmp_path):
    """By Ctrl-C, say, while a call runs; it goes on, and the next one waits for it."""
    os.mkfifo(tmp_path / "gate")
    executor = made("fork")
    future = executor.submit(wait_at, tmp_path / "gate")
    later = [executor.submit(twice, 1) for _ in range(10)]
    wait_until(future.running)
    with random_signals(1, longest=0.1) as arm, pytest.raises(Interrupt):
        arm()
        executor.shutdown()
    shutdown = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True})
    shutdown.start()
    wait_until(lambda: later[-1].cancelled())
    assert not future.done()
    with open(tmp_path / "gate", "wb"):
        assert future.result(PATIENCE) == "went on"
    shutdown.join(PATIENCE)
    assert not shutdown.is_alive()
    ended(executor)


def test_a_management_thread_that_cannot_be_started(monkeypatch):
    """The error is the caller's, and the pool works when there is room for a thread again."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with made("fork") as executor:
        with monkeypatch.context() as patch:
            patch.setattr(standard._ExecutorManagerThread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                executor.submit(twice, 1)
        check(executor)
    with made("fork") as executor, monkeypatch.context() as patch:
        patch.setattr(standard._ExecutorManagerThread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(twice, 1)
    nothing(files)


SETTING = contextvars.ContextVar("SETTING", default="none")


def inherited():
    return SETTING.get(), torch.is_grad_enabled()


def test_forked_workers_inherit_what_belongs_to_the_calling_thread():
    """Although another thread forks them."""
    token = SETTING.set("the caller's")
    try:
        with torch.no_grad(), made("fork") as executor:
            assert executor.submit(inherited).result(PATIENCE) == ("the caller's", False)
    finally:
        SETTING.reset(token)
    with made("fork") as executor:
        assert executor.submit(inherited).result(PATIENCE) == ("none", True)


@pytest.mark.parametrize("options", [{}, {"wait": False}, {"cancel_futures": True}], ids=str)
def test_shutdown_by_a_handler(monkeypatch, options):
    """That interrupts `submit` where it holds all its locks."""
    executor = made("fork")
    check(executor)
    manager, seen = executor._executor_manager_thread, []

    def handler(*_):
        monkeypatch.undo()
        with pytest.raises(ReentrantError):
            executor.submit(twice, 1)
        executor.shutdown(**options)
        seen.append(executor._shutdown_lock.locked())

    monkeypatch.setattr(executor, "_dispatch", handler)
    future = executor.submit(twice, 3)
    assert seen == [True]
    manager.join(PATIENCE)
    assert not manager.is_alive()
    assert future.cancelled() or future.result(PATIENCE) == 6
    ended(executor)


@pytest.mark.parametrize("retry_on_death", [0, 2])
def test_each_shutdown_that_waits_ends_with_the_pools_memory_gone(retry_on_death, monkeypatch):
    """Also one that finds another at the end of its work: a handler's, say, which went on by itself."""
    executor = made("fork", retry_on_death=retry_on_death)
    check(executor)
    channels, entered, goes_on, closed = weakref.ref(executor._channels), threading.Event(), threading.Event(), []
    close = CallChannels.close

    def close_later(self):
        entered.set()
        assert goes_on.wait(PATIENCE)
        close(self)
        closed.append(self.address)

    monkeypatch.setattr(CallChannels, "close", close_later)
    first = threading.Thread(target=executor.shutdown)
    first.start()
    assert entered.wait(PATIENCE)
    threading.Timer(0.05, goes_on.set).start()
    executor.shutdown()
    assert closed
    assert files() == []
    gc.collect()
    assert channels() is None
    first.join(PATIENCE)
    assert not first.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize("retry_on_death", [0, 2])
def test_signals_at_random(retry_on_death):
    """Calls whose futures are kept where they were returned: each of them ends, with its own result."""
    with made("fork", retry_on_death=retry_on_death) as executor, random_signals(1, longest=2e-3) as arm:
        check(executor)
        interrupted = number = 0
        kept = []
        while interrupted < random_count(300):
            number += 1
            argument = np.full(20_000, number) if number % 3 == 0 else number

            def call(number=number, argument=argument):
                future = executor.submit(twice, argument)
                kept.append((number, future))
                future.result()
                list(executor.map(twice, [number]))

            interrupted += interrupted_at_random(arm, call)[0]
            if len(kept) >= 50:
                check_results(kept)
        check_results(kept)
        check(executor)


def check_results(kept) -> None:
    while kept:
        number, future = kept.pop()
        assert np.max(future.result(PATIENCE)) == 2 * number


def test_results_are_let_go_by_shutdown(tmp_path):
    """Also where it cancels: what a future held dies with the future, not with the pool."""
    os.mkfifo(tmp_path / "gate")
    executor = made("fork")
    done = executor.submit(twice, np.ones(20_000))
    done.result()
    futures = [
        done,
        executor.submit(wait_at, tmp_path / "gate"),
        *(executor.submit(twice, np.ones(20_000)) for _ in range(9)),
    ]
    del done
    wait_until(futures[1].running)
    threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}).start()
    wait_until(lambda: futures[-1].cancelled())
    with open(tmp_path / "gate", "wb"):
        executor.shutdown()
    assert not futures[0].cancelled()
    assert files() != []  # its result is alive
    futures.clear()
    nothing(files)


def test_calls_that_shutdown_cancelled_keep_no_memory(tmp_path):
    """Whoever keeps the management thread: the pool's channels end with the pool."""
    os.mkfifo(tmp_path / "gate")
    executor = made("fork")
    futures = [executor.submit(wait_at, tmp_path / "gate"), *(executor.submit(twice, 1) for _ in range(9))]
    manager, channels = executor._executor_manager_thread, weakref.ref(executor._channels)
    wait_until(futures[0].running)
    first = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True})
    first.start()
    wait_until(lambda: futures[-1].cancelled())
    with open(tmp_path / "gate", "wb"):
        executor.shutdown()
    first.join(PATIENCE)
    gc.collect()
    assert channels() is None
    assert not manager.is_alive()
