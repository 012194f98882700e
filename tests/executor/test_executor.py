"""`ProcessPoolExecutor`: the standard executor's behaviour, with tensors in slots, whoever dies or keeps what."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib.util
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import process as standard
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import shmtensor
from shmtensor import ArgumentError, ArgumentTypeError, ProcessPoolExecutor, ResourceError
from shmtensor.executor.calls import CallChannels
from shmtensor.executor.executor import _finish as finish

from ..conftest import descriptors
from ..forkservers import preloaded
from ..waiting import complaints, wait_until
from .calls import (
    NotRebuilt,
    Unpicklable,
    Unreadable,
    append,
    break_a_pool,
    deep,
    describe,
    die_first,
    fail,
    fail_at_length,
    fail_in_a_way,
    fail_to_begin,
    fail_unreadably,
    fail_with,
    fail_with_a_cause,
    first_kept,
    interrupt,
    interrupt_after_the_next_post,
    is_in_a_slot,
    keep,
    keep_and_stay,
    kill_oneself,
    kind_of_process,
    leave,
    meet,
    name_of_main_thread,
    note,
    ones,
    same,
    set_up,
    stay,
    stay_and_drop,
    twice,
    wait_at_the_gate,
)

METHODS = ("fork", "forkserver", "spawn")
LARGE = 1 << 20
PATIENCE = 120
SOAK = os.environ.get("SHMTENSOR_SOAK") == "1"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),  # of fork, since Python 3.12
]


def files_of(pid: int) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if f"shmtensor.executor-{pid}-" in name}


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("torch", "tests.executor.calls", "shmtensor.executor.executor"):
        yield


@pytest.fixture(autouse=True)
def frees_its_slots(leaves_nothing):
    yield
    wait_until(_is_free)


def _is_free() -> bool:
    """A pool that was shut down without waiting ends with its management thread, maybe after a join of that."""
    gc.collect()
    return not files_of(os.getpid()) and not descriptors()


def forking(workers: int = 2, **options) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("fork"), **options)


@pytest.fixture
def fifo(tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


def let_go(fifo):
    with open(fifo, "w"):
        pass


def hear(fifo) -> int:
    with open(fifo) as end:
        return int(end.read())


# --- values


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_values_go_both_ways(method):
    value = {"x": [np.arange(LARGE, dtype=np.float32)], "t": torch.ones(100, 100), "name": "a"}
    with ProcessPoolExecutor(2, mp_context=get_context(method)) as pool:
        result = pool.submit(deep, value, scale=3).result(PATIENCE)
        assert result["sum"] == [value["x"][0].sum().item()]
        scaled, inner = result["y"]
        assert (scaled == value["x"][0] * 3).all()
        assert torch.equal(inner["t"], torch.full((100, 100), 2.0))
        assert result["name"] == "a"
        assert pool.submit(same, 7).result(PATIENCE) == 7


def test_meta_tensors_go_as_themselves():
    """They have no bytes to go through a slot."""
    with forking() as pool:
        result = pool.submit(same, {"t": torch.empty(3, 2, device="meta"), "x": np.ones(LARGE)}).result(PATIENCE)
        assert (result["t"].device.type, result["t"].shape) == ("meta", (3, 2))


class Finalized:
    def __init__(self, noted):
        weakref.finalize(self, noted.append, "died")

    def __reduce__(self):
        return int, (3,)


def test_arguments_that_are_plain_objects_are_not_kept(fifo):
    noted = []
    with forking(1) as pool:
        pool.submit(meet, fifo)
        waiting = pool.submit(same, Finalized(noted))
        assert noted == ["died"]
        assert not waiting.done()
        hear(fifo)
        assert waiting.result(PATIENCE) == 3


def test_results_are_the_slot_and_belong_to_the_caller():
    with forking() as pool:
        array = pool.submit(ones, LARGE).result(PATIENCE)
        assert is_in_a_slot(array)
        array += 1
        part = array[10:20]
    del array
    gc.collect()
    assert part.tolist() == [2] * 10
    assert files_of(os.getpid()) != set()  # a view of a closed pool still holds its slot
    del part
    gc.collect()
    assert files_of(os.getpid()) == set()


def test_arguments_are_a_slot_that_may_be_written():
    with forking() as pool:
        assert pool.submit(describe, np.zeros(LARGE, np.uint8)).result(PATIENCE) == (True, True)
        given = np.zeros(LARGE, np.uint8)
        returned = pool.submit(same, given).result(PATIENCE)
        returned[:] = 1
        assert given.sum() == 0


def test_a_slot_is_not_used_again_while_its_result_lives():
    with forking(1) as pool:
        results = list(pool.map(same, [np.full(LARGE, number, np.uint8) for number in range(40)]))
        assert [int(result[-1]) for result in results] == list(range(40))
        assert all((result == result[0]).all() for result in results)


def test_small_results_hold_no_slots():
    with forking() as pool:
        results = list(pool.map(same, [torch.full((8,), number) for number in range(300)]))
        assert [int(result[0]) for result in results] == list(range(300))
        assert pool._channels._consumer.statistics().leases == 0


def test_a_pool_that_moves_nothing_large_makes_no_ring():
    with forking() as pool:
        assert list(pool.map(same, range(50))) == list(range(50))
        rings = {name for name in files_of(os.getpid()) if name.count(",") == 2}
        assert rings == set()


def test_large_plain_objects_go_through_slots_too():
    with forking() as pool:
        text = b"0123456789abcdef" * LARGE
        assert pool.submit(same, text).result(PATIENCE) == text
        assert pool.submit(same, ["x"] * 100_000).result(PATIENCE) == ["x"] * 100_000
        assert any(name.endswith(",0") for name in files_of(os.getpid()))


def test_one_huge_result_does_not_make_all_slots_huge():
    with forking(1) as pool:
        huge = pool.submit(ones, 64 * LARGE).result(PATIENCE)
        kept = list(pool.map(ones, [LARGE // 4] * 100))
        sizes = sum(os.stat(f"/dev/shm/{name}").st_size for name in files_of(os.getpid()))
        assert huge.nbytes + sum(array.nbytes for array in kept) < sizes < 4 * huge.nbytes


# --- the interface


def test_it_is_a_standard_executor():
    with forking(3) as pool:
        assert isinstance(pool, concurrent.futures.ProcessPoolExecutor)
        assert isinstance(pool, concurrent.futures.Executor)
        assert pool._max_workers == 3
        futures = [pool.submit(twice, number) for number in range(10)]
        assert all(isinstance(future, concurrent.futures.Future) for future in futures)
        assert sum(future.result() for future in concurrent.futures.as_completed(futures, PATIENCE)) == 90
        assert concurrent.futures.wait(futures, PATIENCE).not_done == set()
        heard = []
        last = pool.submit(same, 5)
        last.add_done_callback(lambda future: heard.append(future.result()))
        assert last.result(PATIENCE) == 5
    assert heard == [5]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(same, 1)


@pytest.mark.parametrize("chunksize", [1, 3, 50])
def test_map(chunksize):
    with forking() as pool:
        arrays = [np.full(100_000, number) for number in range(20)]
        results = pool.map(np.add, arrays, range(20), chunksize=chunksize)
        assert [int(result[0]) for result in results] == [2 * number for number in range(20)]
        with pytest.raises(ValueError, match="chunksize"):
            pool.map(same, [1], chunksize=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_method_by_its_name(method):
    with ProcessPoolExecutor(1, mp_context=method) as pool:
        assert pool.submit(kind_of_process).result(PATIENCE).lower() == f"{method}process"


@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_after_shutdown_nothing_is_pickled(retry_on_death):
    pool = forking(retry_on_death=retry_on_death)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, lambda: "does not pickle")


def test_map_waits_no_longer_than_its_timeout(fifo):
    with forking(1) as pool:
        running = pool.submit(stay, fifo, "done")
        results = pool.map(same, range(3), timeout=0)
        with pytest.raises(concurrent.futures.TimeoutError):
            next(results)
        let_go(fifo)
        assert running.result(PATIENCE) == "done"


@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_cancel(fifo, retry_on_death):
    with forking(1, retry_on_death=retry_on_death) as pool:
        running = pool.submit(stay, fifo, "done")
        waiting = [pool.submit(same, np.ones(LARGE)) for _ in range(10)]
        cancelled = [future for future in waiting if future.cancel()]
        assert cancelled  # all but those that stand in the standard queue
        assert all(future.cancelled() and future.cancel() for future in cancelled)
        assert concurrent.futures.wait(cancelled, PATIENCE).not_done == set()
        let_go(fifo)
        assert running.result(PATIENCE) == "done"
        assert not running.cancel()
        assert all(len(future.result(PATIENCE)) == LARGE for future in waiting if future not in cancelled)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_shutdown_cancels_futures(fifo, wait, retry_on_death):
    pool = forking(1, retry_on_death=retry_on_death)
    running = pool.submit(meet, fifo)
    waiting = [pool.submit(same, np.ones(LARGE)) for _ in range(10)]
    if wait:
        hear(fifo)
        pool.shutdown(wait=True, cancel_futures=True)
    else:
        pool.shutdown(wait=False, cancel_futures=True)
        hear(fifo)
    assert running.result(PATIENCE) is None
    assert waiting[-1].cancelled()
    for future in waiting:
        assert future.cancelled() or len(future.result(PATIENCE)) == LARGE
    pool.shutdown(wait=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_initializer(method):
    with ProcessPoolExecutor(1, get_context(method), set_up, (np.arange(5),)) as pool:
        assert pool.submit(first_kept).result(PATIENCE).tolist() == [0, 1, 2, 3, 4]


def test_an_initializer_that_fails_breaks_the_pool(caplog):
    with forking(initializer=fail_to_begin) as pool:
        with pytest.raises(BrokenProcessPool):
            pool.submit(same, 1).result(PATIENCE)
        with pytest.raises(BrokenProcessPool):
            pool.submit(same, 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="max_tasks_per_child needs Python 3.11")
def test_max_tasks_per_child():
    with ProcessPoolExecutor(1, get_context("forkserver"), max_tasks_per_child=2) as pool:
        pids = [pool.submit(os.getpid).result(PATIENCE) for _ in range(5)]
        kept = [pool.submit(ones, LARGE).result(PATIENCE) for _ in range(3)]
    assert len(set(pids)) == 3
    assert all(array.sum() == LARGE for array in kept)  # of workers that are gone


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="works from Python 3.11 on")
def test_max_tasks_per_child_before_it_existed():
    with pytest.raises(ArgumentError, match=r"3\.11"):
        ProcessPoolExecutor(1, max_tasks_per_child=2)


def test_a_number_of_workers_is_any_integer():
    with forking(np.int64(2)) as pool:
        assert pool.submit(same, 1).result(PATIENCE) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_workers": 0}, ValueError),
        ({"max_workers": 1.5}, TypeError),
        ({"mp_context": "no such"}, ArgumentError),
        ({"mp_context": 3}, ArgumentTypeError),
        ({"max_workers": 251}, ArgumentError),
        ({"retry_on_death": -1}, ArgumentError),
        ({"retry_on_death": True}, ArgumentTypeError),
        ({"max_bytes": "much"}, ArgumentError),
        ({"max_bytes": 0}, ArgumentError),
        ({"initializer": 5}, TypeError),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(error):
        ProcessPoolExecutor(**options)


def test_asyncio():
    async def main(pool):
        loop = asyncio.get_running_loop()
        arrays = await asyncio.gather(*(loop.run_in_executor(pool, ones, LARGE) for _ in range(8)))
        return sum(int(array.sum()) for array in arrays)

    with forking() as pool:
        assert asyncio.run(main(pool)) == 8 * LARGE


def test_spdl():
    pytest.importorskip("spdl.pipeline", reason="spdl is not installed")
    from spdl.pipeline import PipelineBuilder

    with forking() as pool:
        pipeline = (
            PipelineBuilder()
            .add_source([LARGE + number for number in range(20)])
            .pipe(ones, executor=pool, concurrency=2)
            .pipe(twice)
            .add_sink(3)
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            sizes = sorted(array.sum() // 2 if array.dtype != np.uint8 else array.size for array in pipeline)
    assert sizes == [LARGE + number for number in range(20)]


# --- what fails


@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_exceptions_come_with_their_traceback(retry_on_death):
    with forking(retry_on_death=retry_on_death) as pool:
        with pytest.raises(LookupError, match="lost") as caught:
            pool.submit(fail, "lost").result(PATIENCE)
        assert "raise LookupError(message)" in str(caught.value.__cause__)
        with pytest.raises(SystemExit):
            pool.submit(leave, 3).result(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(interrupt).result(PATIENCE)
        with pytest.raises(BrokenProcessPool, match="of this call's own"):
            pool.submit(break_a_pool).result(PATIENCE)
        assert pool.submit(same, 1).result(PATIENCE) == 1


def test_what_cannot_be_pickled_raises_at_the_caller():
    with forking() as pool:
        with pytest.raises(pickle.PicklingError, match="not for others"):
            pool.submit(same, [np.ones(LARGE), Unpicklable()])
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pool.submit(lambda: 1)
        assert pool.submit(same, 1).result(PATIENCE) == 1


@pytest.mark.parametrize("retry_on_death", [0, 1])
@pytest.mark.parametrize(("call", "error"), [((Unpicklable,), pickle.PicklingError), ((Unreadable,), LookupError)])
def test_a_bad_result_fails_its_own_future_only(call, error, retry_on_death):
    with forking(1, retry_on_death=retry_on_death) as pool:
        futures = [pool.submit(*call), pool.submit(same, np.ones(LARGE)), pool.submit(*call), pool.submit(same, 1)]
        with pytest.raises(error, match="not "):
            futures[0].result(PATIENCE)
        assert futures[1].result(PATIENCE).sum() == LARGE
        with pytest.raises(error, match="not "):
            futures[2].result(PATIENCE)
        assert futures[3].result(PATIENCE) == 1


def test_an_argument_that_cannot_be_read_fails_its_own_future_only():
    with forking(1) as pool:
        with pytest.raises(LookupError, match="not to be read"):
            pool.submit(same, [Unreadable(), np.ones(LARGE)]).result(PATIENCE)
        assert pool.submit(same, 1).result(PATIENCE) == 1


# --- the way to workers and back


def test_errors_larger_than_a_message():
    """Each comes in pieces, between those of others."""
    with forking() as pool:
        futures = [pool.submit(fail_at_length, number, LARGE) for number in range(8)]
        for number, future in enumerate(futures):
            assert str(future.exception(PATIENCE)) == str(number) * LARGE
        assert pool.submit(same, 1).result(PATIENCE) == 1


def test_more_calls_than_the_socket_holds():
    """The rest waits in the parent, where nobody waits for it, and what comes later does not overtake it."""
    fork = get_context("fork")
    gate = fork.Event()
    with ProcessPoolExecutor(12, mp_context=fork, initializer=set_up, initargs=(gate,)) as pool:
        running = [pool.submit(wait_at_the_gate) for _ in range(12)]
        futures = [pool.submit(same, bytes([number]) * 30000) for number in range(40)]
        line = pool._call_queue
        wait_until(lambda: line._late)
        gate.set()
        assert all(future.result(PATIENCE) for future in running)
        assert [future.result(PATIENCE)[0] for future in futures] == list(range(40))
        wait_until(lambda: not line._late and not line.under_way)


@pytest.mark.parametrize(("size", "max_bytes"), [(LARGE, "3MiB"), (5 * LARGE, None)])
@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_one_worker_begins_calls_in_order(retry_on_death, size, max_bytes):
    """Small and large ones, of which most find no room at first, or are copied by another thread."""
    with forking(1, max_bytes=max_bytes, retry_on_death=retry_on_death) as pool:
        arguments = [(number, np.ones(size, np.uint8)) if number % 3 else (number,) for number in range(40)]
        futures = [pool.submit(note, *each) for each in arguments]
        assert [future.result(PATIENCE)[-1] for future in futures] == list(range(40))
        assert futures[-1].result() == list(range(40))


def test_a_pool_that_breaks_while_calls_wait_for_room(fifo):
    with forking(1, max_bytes="3MiB") as pool:
        running = pool.submit(stay, fifo)
        futures = [pool.submit(same, np.ones(2 * LARGE, np.uint8)) for _ in range(12)]
        line = pool._call_queue
        wait_until(lambda: line._late)
        for pid in pool._processes:
            os.kill(pid, signal.SIGKILL)
        for future in [running, *futures]:
            assert isinstance(future.exception(PATIENCE), BrokenProcessPool)


# --- memory


def test_a_call_larger_than_the_limit():
    with forking(max_bytes="4MiB") as pool:
        with pytest.raises(ResourceError, match=r"a call of 5\.0 MiB.*max_bytes=4\.0 MiB"):
            pool.submit(same, np.zeros(5 * LARGE, np.uint8))
        with pytest.raises(ResourceError, match=r"a result of 5\.0 MiB.*max_bytes=4\.0 MiB"):
            pool.submit(ones, 5 * LARGE).result(PATIENCE)
        for fits in (LARGE, 2 * LARGE, 4 * LARGE - 65536):
            with forking(max_bytes="4MiB") as other:
                assert other.submit(ones, fits).result(PATIENCE).sum() == fits


def test_a_size_for_which_earlier_ones_have_left_no_ring():
    """The error says why, and advises what an executor has."""
    why = r"no ring for a message of 9\.0 MiB.*rings never shrink; max_bytes=10\.0 MiB.*larger max_bytes=, or give"
    with forking(1, max_bytes="10MiB") as pool:
        for run in (lambda size: pool.submit(len, np.zeros(size, np.uint8)), lambda size: pool.submit(ones, size)):
            for size in (LARGE, 6 * LARGE):
                run(size).result(PATIENCE)
            with pytest.raises(ResourceError, match=why):
                run(9 * LARGE).result(PATIENCE)
            run(LARGE).result(PATIENCE)


def test_calls_wait_for_room():
    with forking(max_bytes="5MiB") as pool:
        arrays = [np.full(LARGE, number, np.uint8) for number in range(30)]
        futures = [pool.submit(np.sum, array, dtype=np.int64) for array in arrays]
        assert [int(future.result(PATIENCE)) for future in futures] == [number * LARGE for number in range(30)]


def test_arguments_kept_by_a_worker_are_named():
    with forking(1, max_bytes="5MiB") as pool:
        with pytest.raises(ResourceError, match=r"no room for a call of 1\.0 MiB.*arguments that workers keep"):
            for number in range(10):
                assert pool.submit(keep, np.zeros(LARGE, np.uint8)).result(PATIENCE) == number + 1
        assert pool.submit(same, 1).result(PATIENCE) == 1


@pytest.mark.slow
def test_results_kept_for_ever_are_named():
    kept = []
    with forking(1, max_bytes="5MiB") as pool:
        with pytest.raises(ResourceError, match=rf"no room for a result.*process {os.getpid()} keeps.*max_bytes="):
            for _ in range(10):
                kept.append(pool.submit(ones, LARGE).result(PATIENCE))
        assert len(kept) >= 3
        kept.clear()
        gc.collect()
        assert pool.submit(ones, LARGE).result(PATIENCE).sum() == LARGE


def test_waiting_calls_take_no_slots(fifo):
    with forking(1) as pool:
        running = pool.submit(stay, fifo)
        futures = [pool.submit(np.sum, np.ones(LARGE, np.uint8)) for _ in range(50)]
        large = [name for name in files_of(os.getpid()) if ".calls," in name]
        assert sum(os.stat(f"/dev/shm/{name}").st_size for name in large) < 25 * LARGE
        let_go(fifo)
        running.result(PATIENCE)
        assert sum(int(future.result(PATIENCE)) for future in futures) == 50 * LARGE


# --- death


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_dies_breaks_the_pool(method):
    with ProcessPoolExecutor(2, mp_context=get_context(method)) as pool:
        kept = pool.submit(ones, LARGE).result(PATIENCE)
        with pytest.raises(BrokenProcessPool):
            pool.submit(kill_oneself).result(PATIENCE)
        with pytest.raises(BrokenProcessPool):
            pool.submit(same, 1)
    assert kept.sum() == LARGE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_retry(method, tmp_path):
    path = str(tmp_path / "log")
    with ProcessPoolExecutor(2, mp_context=get_context(method), retry_on_death=2) as pool:
        kept = pool.submit(ones, LARGE).result(PATIENCE)
        futures = [pool.submit(same, np.full(LARGE, number, np.uint8)) for number in range(4)]
        mortal = pool.submit(die_first, path, 2, np.full(LARGE, 7, np.uint8))
        futures += [pool.submit(same, np.full(LARGE, number, np.uint8)) for number in range(4, 8)]
        assert [int(future.result(PATIENCE)[-1]) for future in futures] == list(range(8))
        assert mortal.result(PATIENCE)[-1] == 7
        assert Path(path).stat().st_size == 3
        assert pool.submit(same, 1).result(PATIENCE) == 1
        assert kept.sum() == LARGE


def test_a_call_that_always_kills_fails_alone(tmp_path):
    path = str(tmp_path / "log")
    with forking(retry_on_death=2) as pool:
        futures = [pool.submit(same, number) for number in range(20)]
        poison = pool.submit(die_first, path, 1000, None)
        futures += [pool.submit(same, number) for number in range(20)]
        with pytest.raises(BrokenProcessPool, match=r"each of the 3 workers.*retry_on_death=2"):
            poison.result(PATIENCE)
        assert [future.result(PATIENCE) for future in futures] == 2 * list(range(20))
        assert pool.submit(same, 1).result(PATIENCE) == 1
    assert Path(path).stat().st_size == 3


def test_a_death_counts_only_against_the_call_that_died(fifo, tmp_path):
    """A call that runs beside one that kills its worker is run again as often as need be."""
    path, beside = str(tmp_path / "log"), str(tmp_path / "beside")
    with forking(2, retry_on_death=1) as pool:
        for _ in range(3):
            poison = pool.submit(die_first, path, 1000, None)
            innocent = pool.submit(append, beside, "x")
            with pytest.raises(BrokenProcessPool, match="each of the 2"):
                poison.result(PATIENCE)
            assert innocent.result(PATIENCE) == "x"


def test_an_idle_worker_that_dies_costs_no_call():
    with forking(2, retry_on_death=1) as pool:
        for number in range(3):
            assert pool.submit(same, number).result(PATIENCE) == number
            manager = pool._executor_manager_thread
            os.kill(next(iter(pool._processes)), signal.SIGKILL)
            manager.join(PATIENCE)
            assert not manager.is_alive()
            assert pool.submit(same, number).result(PATIENCE) == number


def test_workers_that_cannot_begin_are_not_tried_for_ever(caplog):
    with (
        forking(retry_on_death=2, initializer=fail_to_begin) as pool,
        pytest.raises(BrokenProcessPool, match="3 times in a row"),
    ):
        pool.submit(same, 1).result(PATIENCE)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_worker_dies_while_another_is_started(retries, monkeypatch, fifo):
    """The pool breaks when the call has been handed over: nothing closes its sockets under the worker that starts."""
    start = ProcessPoolExecutor._adjust_process_count

    def kill_and_start(pool):
        for worker in list(pool._processes.values()):
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        time.sleep(0.3 if pool._processes else 0)  # in which the management thread would close them
        start(pool)

    with ProcessPoolExecutor(2, mp_context=get_context("forkserver"), retry_on_death=retries) as pool:
        running = pool.submit(stay, fifo)
        wait_until(running.running)
        monkeypatch.setattr(ProcessPoolExecutor, "_adjust_process_count", kill_and_start)
        late = pool.submit(same, 1)
        monkeypatch.undo()
        if retries:
            assert late.result(PATIENCE) == 1
            let_go(fifo)
            running.result(PATIENCE)
        else:
            for lost in running, late:
                with pytest.raises(BrokenProcessPool):
                    lost.result(PATIENCE)


@pytest.mark.parametrize("wait", [True, False])
def test_retry_after_shutdown(tmp_path, fifo, wait):
    path = str(tmp_path / "log")
    pool = forking(1, retry_on_death=2)
    first = pool.submit(stay, fifo) if not wait else None
    mortal = pool.submit(die_first, path, 2, "alive")
    pool.shutdown(wait=wait)
    if first is not None:
        let_go(fifo)
        first.result(PATIENCE)
    else:
        assert mortal.done()
    assert mortal.result(PATIENCE) == "alive"
    pool.shutdown(wait=True)


def test_no_retry_after_futures_were_cancelled(fifo):
    pool = forking(1, retry_on_death=2)
    running = pool.submit(meet, fifo)
    waiting = [pool.submit(same, number) for number in range(5)]
    wait_until(running.running)
    worker = next(iter(pool._processes.values()))
    os.kill(worker.pid, signal.SIGSTOP)
    pool.shutdown(wait=False, cancel_futures=True)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(BrokenProcessPool, match="shut down"):
        running.result(PATIENCE)
    for future in waiting:
        assert future.cancelled() or isinstance(future.exception(PATIENCE), BrokenProcessPool)
    pool.shutdown(wait=True)


def test_an_executor_that_is_dropped_ends_its_workers():
    pool = forking()
    future = pool.submit(same, np.ones(LARGE))
    workers = list(pool._processes.values())
    manager = pool._executor_manager_thread
    del pool
    gc.collect()
    manager.join(PATIENCE)
    assert not manager.is_alive()
    assert all(not worker.is_alive() for worker in workers)
    assert future.result(0).sum() == LARGE


# --- whole programs

PROGRAM = """
import os, signal, sys, time
from multiprocessing import get_context
import numpy as np
import shmtensor

def ones(count):
    return np.ones(count, np.uint8)

def sleep():
    os.write(1, b"asleep\\n")
    signal.pause()

def main(pool):
    BODY

if __name__ == "__main__":
    BEGIN
"""


def source_of(method: str, body: str, options: str, context: bool) -> str:
    pool = f"shmtensor.ProcessPoolExecutor(2, mp_context=get_context({method!r}){options})"
    begin = f"with {pool} as pool:\n        main(pool)" if context else f"pool = {pool}\n    main(pool)"
    return PROGRAM.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip()).replace("BEGIN", begin)


@pytest.fixture
def program(tmp_path, socket_directory):
    """Starts a program in a process group of its own; ends it, and whatever is left of its group."""
    begun = []

    def begin(method, body, options="", *, context=False):
        path = tmp_path / "program.py"
        path.write_text(source_of(method, body, options, context))
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        begun.append(process)
        return process

    yield begin
    for process in begun:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def workers_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def sweep():
    """What the next user of any channel does."""
    shmtensor.Consumer(f"test-{os.getpid()}-sweep").close()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_interpreter_ends_without_shutdown(program, method):
    process = program(
        method,
        """
        global kept  # alive at the end
        kept = pool.submit(ones, 1 << 20).result()
        print(int(kept.sum()), flush=True)
        """,
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.strip(), err) == (0, str(LARGE), "")
    assert files_of(process.pid) == set()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("busy", [False, True])
def test_the_parent_is_killed(program, method, busy):
    process = program(
        method,
        """
        kept = pool.submit(ones, 1 << 20).result()
        BUSY
        os.write(1, b"ready\\n")
        signal.pause()
        """.replace("BUSY", "pool.submit(sleep)" if busy else ""),
    )
    lines = {process.stdout.readline().strip() for _ in range(1 + busy)}
    assert "ready" in lines
    workers = workers_of(process)
    assert len(workers) >= (1 if method == "spawn" else 2)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert alive == []
    sweep()
    assert files_of(process.pid) == set()


DEAF = """
import os, signal, threading, time

def fork():
    global child
    child = os.fork()
    if not child:
        until = time.monotonic() + 2
        try:
            os.write(writing, b"x")
            while time.monotonic() < until:
                pass
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)

signal.signal(signal.SIGINT, signal.default_int_handler)
reading, writing = os.pipe()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
os.read(reading, 1)
os.kill(child, signal.SIGINT)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="session")
def forks_notice_signals() -> bool:
    """Whether a child that a thread has forked looks for signals: under CPython 3.13.0 it does not."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DEAF], capture_output=True, text=True, timeout=PATIENCE
    )
    return done.stdout == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", retry_on_death=3"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("busy", [0, 1, 2])
def test_control_c(program, method, busy, options, forks_notice_signals):
    if method == "fork" and busy and not forks_notice_signals:
        pytest.skip("children of this interpreter's threads notice no signal: docs/guide/executor.md")
    process = program(
        method,
        f"""
        kept = pool.submit(ones, 1 << 20).result()
        futures = [pool.submit(sleep) for _ in range({busy})]
        os.write(1, b"ready\\n")
        [future.result() for future in futures]
        signal.pause()
        """,
        options,
        context=True,
    )
    lines = [process.stdout.readline().strip() for _ in range(1 + busy)]
    assert sorted(lines) == ["asleep"] * busy + ["ready"]
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode in (1, -signal.SIGINT), err
    assert "KeyboardInterrupt" in err or "BrokenProcessPool" in err
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert alive == []
    assert files_of(process.pid) == set()


# --- beside the standard library


EXAMPLE = Path(__file__).parents[2] / "examples" / "executor.py"
OURS, THEIRS = "from shmtensor import ProcessPoolExecutor", "from concurrent.futures import ProcessPoolExecutor"


@pytest.mark.slow
def test_the_example_differs_from_the_standard_library_in_one_line(tmp_path, socket_directory):
    source = EXAMPLE.read_text()
    assert source.count(OURS) == 1
    outputs = set()
    for line in (OURS, THEIRS):
        path = tmp_path / "program.py"
        path.write_text(source.replace(OURS, line))
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(path)],
            capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, complaints(done.stderr)) == (0, "")
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert "24 samples" in outputs.pop()


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "executor.md"

CONFORMANCE = """
import concurrent.futures, gc, importlib, json, pkgutil, sys, unittest
import shmtensor
concurrent.futures.ProcessPoolExecutor = shmtensor.ProcessPoolExecutor
import test.test_concurrent_futures as package

name, prefix = sys.argv[1:]

class Result(unittest.TextTestResult):
    def stopTest(self, test):
        super().stopTest(test)
        vars(test).pop("executor", None)  # one that was not shut down would keep the fork server from ending
        gc.collect()

module = importlib.import_module(f"test.test_concurrent_futures.{name}")
suite = unittest.TestSuite(
    unittest.defaultTestLoader.loadTestsFromTestCase(found)
    for found in list(vars(module).values())
    if isinstance(found, type) and issubclass(found, unittest.TestCase) and found.__name__.startswith(prefix)
    and found.__name__.startswith("ProcessPoolForkserver") == (prefix == "ProcessPoolForkserver")
)
if __name__ == "__main__":
    result = unittest.TextTestRunner(verbosity=0, resultclass=Result).run(suite)
    failed = {test._testMethodName for test, _ in (*result.failures, *result.errors)}
    print()
    print(json.dumps([result.testsRun, sorted(failed)]))
"""

PROBE = "import test.test_concurrent_futures as package; print(hasattr(package, '__path__'))"


@pytest.fixture(scope="session")
def standard_tests():
    """Whether this interpreter comes with the standard library's own tests, as a package (Python 3.12 or newer)."""
    if importlib.util.find_spec("test") is None:
        pytest.skip("this Python has no test package")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PATIENCE)
    if done.stdout.strip() != "True":
        pytest.skip("this Python has no package test.test_concurrent_futures")


def listed_differences() -> set[str]:
    """The tests of the standard library that docs/guide/executor.md says are different here."""
    rows = (line for line in PAGE.read_text().splitlines() if line.startswith("| `test_"))
    return {name for row in rows for name in re.findall(r"`(test_\w+)`", row.split("|")[1])}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["as_completed", "deadlock", "init", "process_pool", "shutdown", "wait"])
@pytest.mark.parametrize("method", ["Fork", "Forkserver", "Spawn"])
def test_the_standard_librarys_own_tests(standard_tests, method, module, tmp_path):
    """They pass, but for those that docs/guide/executor.md lists, and those fail."""
    if method != "Fork" and not SOAK:
        pytest.skip("only the first start method without SHMTENSOR_SOAK=1")
    script = tmp_path / "conformance.py"
    script.write_text(CONFORMANCE)
    done = subprocess.run(
        [sys.executable, str(script), f"test_{module}", f"ProcessPool{method}"],
        capture_output=True, text=True, timeout=390, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ran, failed = json.loads(done.stdout.splitlines()[-1])
    assert ran > 0
    assert set(failed) == listed_differences() & set(module_tests(module)), done.stderr


def module_tests(module: str) -> set[str]:
    spec = importlib.util.find_spec(f"test.test_concurrent_futures.test_{module}")
    return set(re.findall(r"def (test_\w+)", Path(spec.origin).read_text()))


def test_differences_are_listed():
    assert len(listed_differences()) == 9


@pytest.mark.parametrize("method", METHODS)
def test_the_default_timeout_of_sockets_is_not_the_pools(method):
    """A worker waits for its next call longer than that."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        with ProcessPoolExecutor(2, mp_context=get_context(method)) as pool:
            for _ in range(3):
                assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
                time.sleep(0.05)
    finally:
        socket.setdefaulttimeout(before)


# --- what a review found


def call_that_finds_no_room(pool, fifo):
    """A worker keeps the arguments of calls until there is no room; returns the first, which runs, and the others."""
    large = np.ones(2 * LARGE, np.uint8)
    running = pool.submit(keep_and_stay, fifo, large)
    waiting = [pool.submit(same, large) for _ in range(4)]
    wait_until(lambda: pool._call_queue._late)
    return running, waiting


def test_shutdown_that_cancels_ends_after_a_call_that_cannot_be_sent(fifo):
    pool = forking(1, max_bytes="3MiB")
    running, waiting = call_that_finds_no_room(pool, fifo)
    shutdown = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    shutdown.start()
    wait_until(waiting[-1].cancelled)
    let_go(fifo)
    shutdown.join(PATIENCE)
    assert not shutdown.is_alive()
    assert running.result(PATIENCE) is None
    assert isinstance(waiting[0].exception(PATIENCE), ResourceError)


def test_a_callback_of_a_call_that_cannot_be_sent_may_shut_down(fifo):
    pool = forking(1, max_bytes="3MiB")
    running, waiting = call_that_finds_no_room(pool, fifo)
    threads = []

    def shut_down(_):
        threads.append(threading.current_thread())
        with pytest.raises(RuntimeError, match="cannot join current thread"):  # as with the standard executor
            pool.shutdown()
        threads.append(None)

    manager = pool._executor_manager_thread
    waiting[0].add_done_callback(shut_down)
    let_go(fifo)
    wait_until(lambda: len(threads) == 2)
    assert threads[0] is manager
    for future in [running, *waiting]:
        future.exception(PATIENCE)
    manager.join(PATIENCE)
    assert not manager.is_alive()


@pytest.mark.parametrize("retry_on_death", [0, 1])
def test_an_exception_that_cannot_be_read_fails_its_own_future_only(retry_on_death, tmp_path):
    path = str(tmp_path / "log")
    with forking(1, retry_on_death=retry_on_death) as pool:
        futures = [pool.submit(fail_unreadably, path), pool.submit(same, 1), pool.submit(fail_with, NotRebuilt(3, "x"))]
        for future in futures[0], futures[2]:
            with pytest.raises(TypeError, match="text"):
                future.result(PATIENCE)
        assert futures[1].result(PATIENCE) == 1
        assert pool.submit(same, 2).result(PATIENCE) == 2
    assert Path(path).stat().st_size == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("not rebuilt", TypeError), ("no exception", AttributeError), ("not pickled", TypeError),
        ("nor what says so", pickle.PicklingError),
    ],
)  # fmt: skip
def test_the_traceback_of_an_exception_that_does_not_arrive_arrives(kind, error):
    with forking(1) as pool:
        futures = [pool.submit(fail_in_a_way, kind) for _ in range(2)]
        for future in futures:
            caught = future.exception(PATIENCE)
            assert type(caught) is error
            assert "in fail_in_a_way" in str(caught.__cause__)
            assert "the text" in str(caught.__cause__)
        assert pool.submit(same, 1).result(PATIENCE) == 1


def test_tensors_in_exceptions_are_in_slots():
    with forking(1) as pool:
        error = pool.submit(fail_with, [torch.ones(LARGE), np.ones(LARGE)]).exception(PATIENCE)
        tensor, array = error.args[0]
        assert is_in_a_slot(tensor.numpy())
        assert is_in_a_slot(array)
        assert "raise LookupError(value)" in str(error.__cause__)
    assert (tensor.sum(), array.sum()) == (LARGE, LARGE)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="max_tasks_per_child needs Python 3.11")
def test_max_tasks_per_child_of_many_calls_at_once():
    """Whose exceptions with tensors outlive the workers that raised them."""
    with ProcessPoolExecutor(2, "forkserver", max_tasks_per_child=2) as pool:
        assert list(pool.map(same, range(12), timeout=PATIENCE)) == list(range(12))
        futures = [pool.submit(fail_with, torch.full((LARGE,), number)) for number in range(3)]
        futures.append(pool.submit(same, 1))
        errors = [future.exception(PATIENCE) for future in futures]
    assert [int(error.args[0][-1]) for error in errors[:3]] == [0, 1, 2]
    assert errors[3] is None


def test_callbacks_of_calls_that_are_given_up_hold_no_lock():
    """One may wait for a thread that submits."""
    inside, submitted = threading.Event(), threading.Event()
    seen = []
    with forking(1, retry_on_death=1) as pool:

        def called(future):
            inside.set()
            seen.append(submitted.wait(PATIENCE))

        poison = pool.submit(kill_oneself)
        poison.add_done_callback(called)
        assert inside.wait(PATIENCE)
        assert pool.submit(same, 1).result(PATIENCE) == 1
        submitted.set()
        with pytest.raises(BrokenProcessPool, match="each of the 2"):
            poison.result(PATIENCE)
    assert seen == [True]


def submit_and_return(method, path, number):
    """The main function of a child whose executor has calls to run when it returns."""
    pool = ProcessPoolExecutor(2, mp_context=method)
    for each in range(number):
        pool.submit(append, path, each)
    _pools.append(pool)


_pools = []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])  # a forked child cannot use its parent's fork server
def test_the_calls_of_a_child_run_after_its_main_function(method, tmp_path):
    path = tmp_path / "log"
    path.touch()
    child = get_context("fork").Process(target=submit_and_return, args=(method, str(path), 20))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert path.stat().st_size == 20
    child.close()


def test_the_management_threads_of_a_child_may_end_meanwhile(monkeypatch):
    """A pool is closed by its thread just when the child's end wakes that."""
    wakeup = standard._ThreadWakeup()
    wake = wakeup.wakeup

    def wake_too_late():
        if not wakeup._closed:
            wakeup._writer.close()
            try:
                wake()
            finally:
                wakeup.close()

    monkeypatch.setattr(wakeup, "wakeup", wake_too_late)
    waited = threading.Thread(target=wait_until, args=(lambda: wakeup._closed,))
    waited.start()
    monkeypatch.setattr(standard, "_threads_wakeups", {waited: wakeup})
    monkeypatch.setattr(standard, "_global_shutdown", False)
    finish()
    assert not waited.is_alive()
    assert wakeup._closed


def leave_a_pool(pool, pipe):
    with pool:
        try:
            pool.submit(same, 1)
        except Exception as error:
            pipe.send(error)
    pool.shutdown()
    try:
        pool.submit(same, 1)
    except Exception as error:
        pipe.send(error)


@pytest.mark.parametrize("retry_on_death", [0, 1])
@pytest.mark.parametrize("used", [False, True])
def test_a_forked_child_leaves_its_parents_pool_alone(used, retry_on_death):
    context = get_context("fork")
    with forking(1, retry_on_death=retry_on_death) as pool:
        if used:
            assert pool.submit(twice, np.ones(LARGE)).result(PATIENCE).sum() == 2 * LARGE
        ours, theirs = context.Pipe()
        child = context.Process(target=leave_a_pool, args=(pool, theirs))
        child.start()
        theirs.close()
        for _ in range(2):
            assert ours.poll(PATIENCE)
            error = ours.recv()
            assert (type(error), str(os.getpid()) in str(error)) == (shmtensor.ForkedError, True)
        child.join(PATIENCE)
        assert child.exitcode == 0
        child.close()
        assert pool.submit(twice, np.ones(LARGE)).result(PATIENCE).sum() == 2 * LARGE


def test_an_error_with_a_cause_keeps_no_arguments():
    """Its own traceback is gone, and the frames of its cause's have them too: the idle worker lets go of both."""
    with forking(1, max_bytes="4MiB") as pool:
        array = np.ones(5 * LARGE // 2, np.uint8)
        for _ in range(3):
            assert isinstance(pool.submit(fail_with_a_cause, array).exception(PATIENCE), RuntimeError)
            assert pool.submit(np.sum, array).result(PATIENCE) == array.size


def test_a_future_that_raised_is_freed_with_its_last_reference():
    with forking(1) as pool:
        future = pool.submit(fail, "no")
        with pytest.raises(LookupError):
            future.result(PATIENCE)
        gc.collect()
        gc.disable()
        try:
            future = pool.submit(fail, "no")
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            assert done.wait(PATIENCE)
            try:
                future.result(PATIENCE)
            except LookupError:
                pass
            freed = weakref.ref(future)
            del future
            wait_until(lambda: freed() is None)  # the management thread has it for a moment more
        finally:
            gc.enable()


def test_a_call_waits_for_room_while_a_small_one_runs(fifo, monkeypatch):
    """Which may free arguments that a worker keeps."""
    asked, may_get_room = [], CallChannels._may_get_room
    monkeypatch.setattr(CallChannels, "_may_get_room", lambda *each: asked.append(may_get_room(*each)) or asked[-1])
    with forking(1, max_bytes="4MiB") as pool:
        array = np.ones(5 * LARGE // 2, np.uint8)
        assert pool.submit(keep, array).result(PATIENCE) == 1
        running = pool.submit(stay_and_drop, fifo)
        waiting = pool.submit(np.sum, array)
        wait_until(lambda: len(asked) > 1 or waiting.done())
        let_go(fifo)
        assert running.result(PATIENCE) is None
        assert waiting.result(PATIENCE) == array.size


def test_an_interrupt_loses_no_slot():
    """Of a result that has a slot and is not sent: the worker would wait for its end."""
    with forking(1, max_bytes="3MiB") as pool:
        assert pool.submit(interrupt_after_the_next_post).result(PATIENCE) is None
        with pytest.raises(KeyboardInterrupt):
            pool.submit(ones, 2 * LARGE).result(PATIENCE)
        for _ in range(2):
            assert pool.submit(ones, 2 * LARGE).result(PATIENCE).sum() == 2 * LARGE


@pytest.mark.parametrize("method", METHODS)
def test_the_main_thread_of_a_worker(method):
    with ProcessPoolExecutor(1, mp_context=method) as pool:
        assert pool.submit(name_of_main_thread).result(PATIENCE) == ("MainThread", "_MainThread")
