"""`get_context(...).Pool`: the standard library's pool with values through slots; deaths, memory, leftovers.

CPython's own tests of its pool are run by test_cpython_queues.py.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.pool
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.mp import pool as implementation

from ..conftest import left_files
from ..executor.calls import fail_in_a_way
from ..forkservers import preloaded
from ..scenes import few_files, own_shm, play
from ..waiting import complaints, wait_for_end, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]

LONG = 120  # seconds; only bounds a hang
METHODS = ["fork", "forkserver", "spawn"]
LARGE = 1 << 16
"""Elements of an array that arrives as a view."""


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("torch", "numpy", "shmtensor.mp.pool"):
        yield


@pytest.fixture(autouse=True)
def no_pool_is_left():
    yield
    gc.collect()
    assert files() == []


def files() -> list[str]:
    return sorted(left_files("pool"))


def pool(*args, method="fork", **options):
    return shmtensor.get_context(method).Pool(*args, **options)


def double(value):
    return value * 2


def itself(value):
    return value


def remember(value):
    global remembered
    remembered = value


def recall(_):
    return remembered, os.getpid()


def tag(array, name):
    return {"array": array + 1, "name": name, "tensor": torch.from_numpy(array)}


def die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_once(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return os.getpid()
    return os.kill(os.getpid(), signal.SIGKILL)


def leave(_):
    sys.exit(3)


def wait_for(path):
    while not os.path.exists(path):
        pass
    return path


class Odd:
    """An object that unpickles in the process that made it only."""

    def __init__(self, at_home):
        self.home = os.getpid() if at_home else 0

    def __reduce__(self):
        return odd, (self.home,)


def odd(home):
    if home != os.getpid():
        raise LookupError("cannot be rebuilt here")
    return Odd(True)


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_run_tasks(method):
    arrays = [np.full(LARGE, number) for number in range(12)]
    with pool(2, remember, ({"seed": 7},), method=method) as workers:
        for results in (
            workers.map(double, arrays),
            workers.map(double, arrays, chunksize=5),
            list(workers.imap(double, arrays)),
            sorted(workers.imap_unordered(double, iter(arrays), chunksize=2), key=lambda array: array[0]),
            workers.map_async(double, arrays).get(LONG),
            [workers.apply_async(double, (array,)).get(LONG) for array in arrays],
        ):
            assert [int(array[0]) for array in results] == [2 * number for number in range(12)]
            assert all((array == array[0]).all() for array in results)
            results[0] += 1  # writable
        found = workers.starmap(tag, [(arrays[1], "one"), (arrays[2], "two")])
        assert [each["name"] for each in found] == ["one", "two"]
        assert torch.equal(found[1]["tensor"], torch.full((LARGE,), 2))
        assert {seed["seed"] for seed, _ in workers.map(recall, range(8))} == {7}
        workers.close()
        workers.join()
    assert (found[0]["array"] == 2).all(), "results outlive the pool"


def test_tasks_end_a_worker_after_so_many():
    with pool(1, remember, (0,), maxtasksperchild=2) as workers:
        pids = [pid for _, pid in workers.map(recall, range(6), chunksize=1)]
    assert [pids.count(pid) for pid in pids] == [2] * 6


def test_callbacks_and_errors():
    heard = []
    with pool(2) as workers:
        workers.apply_async(double, (2,), callback=heard.append).get(LONG)
        failed = workers.apply_async(double, ({},), error_callback=heard.append)
        with pytest.raises(TypeError) as raised:
            failed.get(LONG)
        assert "double" in str(raised.value.__cause__), "the worker's traceback"
        with pytest.raises(AttributeError, match=r"local object|Can't get local"):
            workers.apply_async(lambda: 1).get(LONG)
        assert workers.apply(double, (3,)) == 6
    assert heard[0] == 4
    assert isinstance(heard[1], TypeError)


def test_what_cannot_be_unpickled_fails_its_task_alone():
    """A standard worker dies of such a call, and the standard result handler of such a result: both hang then."""
    with pool(1) as workers:
        with pytest.raises(LookupError, match="cannot be rebuilt here"):
            workers.apply_async(itself, (Odd(True),)).get(LONG)
        with pytest.raises(LookupError, match="cannot be rebuilt here"):
            workers.apply_async(Odd, (True,)).get(LONG)
        assert workers.apply(double, (3,)) == 6


def test_a_call_that_a_worker_does_not_know_fails_alone(monkeypatch):
    """It was defined after the workers were forked."""
    with pool(1) as workers:
        monkeypatch.setattr(sys.modules[__name__], "later", double, raising=False)
        double.__qualname__ = "later"
        try:
            with pytest.raises(AttributeError, match="later"):
                workers.apply_async(double, (1,)).get(LONG)
        finally:
            double.__qualname__ = "double"
        assert workers.apply(double, (3,)) == 6


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_dies_fails_its_task_alone(method):
    with pool(2, method=method) as workers:
        results = [workers.apply_async(die, (number,)) for number in range(8)]
        for number, result in enumerate(results):
            if number == 3:
                with pytest.raises(
                    shmtensor.PeerDied,
                    match=r"a worker died while it ran this task .*\(pid \d+, SIGKILL\): .*retry_on_death=",
                ):
                    result.get(LONG)
            else:
                assert result.get(LONG) == number
        assert workers.map(double, range(4)) == [0, 2, 4, 6], "the pool goes on"
        with pytest.raises(shmtensor.PeerDied):
            workers.map(die, range(8), chunksize=2)
        workers.close()
        workers.join()


def test_every_way_to_wait_reports_a_death():
    with pool(1) as workers:
        found = workers.imap(die, range(5))
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(shmtensor.PeerDied):
            next(found)
        assert next(found) == 4
        heard = []
        result = workers.apply_async(leave, (1,), error_callback=heard.append)
        workers.close()
        workers.join()  # waits for the worker that replaces it
        assert isinstance(heard[0], shmtensor.PeerDied)
        assert not result.successful()


@pytest.mark.parametrize("method", METHODS)
def test_an_exit_in_a_task_ends_its_worker_in_order(method, capfd):
    with pool(2, method=method) as workers, pytest.raises(shmtensor.PeerDied, match=r"\(pid \d+, exit code 3\)"):
        workers.apply_async(leave, (np.zeros(LARGE),)).get(LONG)
    workers.join()
    assert capfd.readouterr().err == ""


def test_a_task_is_run_again_if_so_wished(tmp_path):
    with pool(2, retry_on_death=1) as workers:
        assert workers.apply_async(die_once, (str(tmp_path / "ran"),)).get(LONG) in {p.pid for p in workers._pool}
        with pytest.raises(shmtensor.PeerDied, match=r"2 workers died .*pid \d+, SIGKILL; pid \d+, SIGKILL\)"):
            workers.apply_async(die, (3,)).get(LONG)


def test_results_that_are_kept_never_fill_the_memory():
    """The caller of `map` cannot drop any before it has all: past half of the memory they are copied."""
    with pool(2, max_bytes="8MiB") as workers:
        found = workers.map(itself, (np.full(LARGE, number) for number in range(64)), chunksize=1)  # 32 MiB
        assert [int(array[0]) for array in found] == list(range(64))
        assert all((array == array[0]).all() for array in found)


def test_what_is_larger_than_the_memory():
    with pool(1, max_bytes="1MiB") as workers:
        with pytest.raises(shmtensor.ResourceError, match=r"a task of 4\.0 MiB is larger than max_bytes=1\.0 MiB"):
            workers.apply_async(itself, (np.zeros(1 << 22, np.uint8),)).get(LONG)
        with pytest.raises(shmtensor.ResourceError, match=r"a result of 4\.0 MiB is larger than max_bytes=1\.0 MiB"):
            workers.apply_async(np.zeros, (1 << 22, np.uint8)).get(LONG)
        assert workers.apply(double, (3,)) == 6


def test_few_tasks_are_in_flight(tmp_path):
    """The others wait in the parent: an endless iterable takes no memory without end."""
    path = tmp_path / "go"
    made = []

    def paths():
        for _ in range(40):
            made.append(1)
            yield str(path)

    with pool(1) as workers:
        found = workers.imap(wait_for, paths())
        wait_until(lambda: len(made) > implementation._PER_WORKER)
        assert len(made) == implementation._PER_WORKER + 1
        path.touch()
        assert len(list(found)) == 40


def test_terminate_while_tasks_wait():
    workers = pool(2)
    result = workers.map_async(wait_for, ["/nowhere"] * 100, chunksize=1)
    workers.terminate()
    workers.join()
    assert not result.ready()


def test_wrong_arguments():
    ctx = shmtensor.get_context("fork")
    with pytest.raises(ValueError, match="at least 1"):
        ctx.Pool(0)
    with pytest.raises(ValueError, match="processes must be <= 250, not 251: use several pools"):
        ctx.Pool(251)
    with pytest.raises(ValueError, match="retry_on_death"):
        ctx.Pool(1, retry_on_death=-1)
    with pytest.raises(ValueError, match="max_bytes"):
        ctx.Pool(1, max_bytes="much")
    with pytest.raises(TypeError, match="initializer must be a callable"):
        ctx.Pool(1, 5)


def test_it_is_a_standard_pool():
    with pool(1) as workers:
        assert isinstance(workers, multiprocessing.pool.Pool)
        assert repr(workers) == "<shmtensor.mp.pool.Pool state=RUN pool_size=1>"


PROGRAM = """
import os, sys, time, numpy as np, shmtensor

def work(seconds):
    time.sleep(seconds)
    return np.ones(100_000)

if __name__ == "__main__":
    pool = shmtensor.get_context(sys.argv[1]).Pool(2)
    pool.map(work, [0, 0])
    print(os.getpid(), *(process.pid for process in pool._pool), flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("end", ["forgets", "killed"])
def test_the_end_of_the_parent_ends_the_pool(tmp_path, method, end):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", path, method, "wait" if end == "killed" else "end"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        parent, *workers = map(int, program.stdout.readline().split())
        if end == "killed":
            program.kill()
        assert (complaints(program.communicate(timeout=LONG)[1]), program.returncode) == (
            "",
            -9 if end == "killed" else 0,
        )
    for worker in workers:
        wait_for_end(worker)
    shmtensor.Queue().close()  # sweeps what a killed one has left
    assert [name for name in os.listdir("/dev/shm") if f"shmtensor.pool-{parent}-" in name] == []


def refuse():
    error = ValueError("not here")
    error.lock = threading.Lock()
    raise error


class Refuses:
    """Its unpickling raises what cannot be pickled."""

    def __reduce__(self):
        return refuse, ()


def test_an_argument_whose_error_cannot_be_pickled_fails_its_task_alone():
    with pool(1) as workers:
        (before,) = workers._pool
        with pytest.raises(multiprocessing.pool.MaybeEncodingError, match="not here"):
            workers.apply(double, (Refuses(),))
        assert workers.apply(double, (2,)) == 4
        assert workers._pool == [before]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("not rebuilt", TypeError), ("no exception", AttributeError),
        ("not pickled", multiprocessing.pool.MaybeEncodingError),
        ("nor what says so", multiprocessing.pool.MaybeEncodingError),
    ],
)  # fmt: skip
def test_the_traceback_of_an_exception_that_does_not_arrive_arrives(kind, error):
    with pool(1) as workers:
        with pytest.raises(error) as caught:
            workers.apply(fail_in_a_way, (kind,))
        assert type(caught.value.__cause__) is multiprocessing.pool.RemoteTraceback
        assert "in fail_in_a_way" in str(caught.value.__cause__)
        assert "the text" in str(caught.value.__cause__)
        assert workers.apply(double, (2,)) == 4


PARENT = """
import os, sys, time, shmtensor
marks, gate = sys.argv[1:]
def work(number):
    with open(marks, "a") as file:
        print(os.getpid(), file=file)
    with open(gate, "rb") as file:
        file.read()
with shmtensor.get_context("fork").Pool(1) as pool:
    pool.map(work, range(6), chunksize=1)
"""


def test_a_worker_of_a_killed_parent_begins_no_further_task(tmp_path):
    """Those that were sent ahead are not run."""
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.touch()
    os.mkfifo(gate)
    with subprocess.Popen([sys.executable, "-c", PARENT, marks, gate]) as parent:
        wait_until(lambda: marks.read_text().endswith("\n"))
        parent.kill()
    worker = int(marks.read_text())
    with open(gate, "wb"):
        pass
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"))
    assert marks.read_text() == f"{worker}\n"
    shmtensor.Publisher(f"test-{os.getpid()}-sweeps").close()


def fill(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_worker_that_finds_no_memory_takes_no_task():
    play(without_memory, mounts=(own_shm("size=32m"),))


def without_memory():
    with shmtensor.get_context("fork").Pool(1, fill, ("/dev/shm/fill",)) as workers:
        (before,) = workers._pool
        result = workers.apply_async(double, (2,))
        with pytest.raises(multiprocessing.TimeoutError):
            result.get(timeout=2)
        assert workers._pool == [before]
        os.unlink("/dev/shm/fill")
        assert result.get(LONG) == 4
        assert workers._pool == [before]
        fill("/dev/shm/fill")  # from now on an error, which has room
        with pytest.raises(shmtensor.ResourceError):
            workers.apply(np.ones, (1 << 20,))
        os.unlink("/dev/shm/fill")
        assert workers.apply(np.ones, (1 << 20,)).sum() == 1 << 20
        assert workers._pool == [before]


@pytest.mark.parametrize("how", ["terminate", "close"])
def test_a_pool_ends_where_there_is_no_memory(how):
    play(end_without_memory, how, mounts=(own_shm("size=32m"),))


def end_without_memory(how):
    with pool(2) as workers:
        # those that have not joined wait for memory
        wait_until(lambda: sum(it.role == "receiver" for each in shmtensor.inspect() for it in each.members) == 3)
        fill("/dev/shm/fill")
        getattr(workers, how)()
        workers.join()
    os.unlink("/dev/shm/fill")
    assert not os.listdir("/dev/shm")


def test_a_parent_that_may_open_no_file_gets_its_results_later(caplog):
    with pool(1) as workers:
        assert workers.apply(double, (2,)) == 4
        with few_files(0):
            result = workers.apply_async(np.ones, (1 << 20,))  # the worker makes another ring
            with pytest.raises(multiprocessing.TimeoutError):
                result.get(timeout=3.5)  # it is tried each second, and said once
        assert result.get(LONG).sum() == 1 << 20
        assert workers.apply(double, (2,)) == 4
    assert sum("goes on when it has what it needs" in line for line in caplog.messages) == 1


STUCK = """
import os, sys, threading, numpy as np, shmtensor

def stall(worker):
    print(worker, flush=True)
    threading.Event().wait()

def work(number):
    return np.full(1 << 18, number)

with shmtensor.get_context("fork").Pool(1, max_bytes="5MiB") as pool:
    pool.apply_async(os.getpid, callback=stall)  # in the thread that receives results
    for number in range(6):
        pool.apply_async(work, (number,))
    sys.stdin.read()
"""


def test_a_worker_that_waits_for_room_ends_with_a_killed_parent():
    """Though the parent has not received its earlier results, and never will."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STUCK],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        worker, prefix = int(parent.stdout.readline()), f"pool-{parent.pid}-"
        wait_until(
            lambda: any(
                member.pid == worker and member.waits
                for channel in shmtensor.inspect()
                if channel.name.startswith(prefix) and channel.name.endswith("results")
                for member in channel.members
            )
        )
        parent.kill()
        wait_for_end(worker)
        assert complaints(parent.communicate(timeout=LONG)[1]) == ""
    shmtensor.Publisher(f"test-{os.getpid()}-sweeps").close()
    assert [name for name in os.listdir("/dev/shm") if prefix in name] == []


LATE = """
import multiprocessing, os, signal, sys
from shmtensor.children import ParentWatch

def watch(parent):
    while os.path.exists(f"/proc/{parent}"):
        pass
    print(ParentWatch().has_ended(), flush=True)

multiprocessing.get_context("fork").Process(target=watch, args=(os.getpid(),)).start()
sibling = os.fork()  # with the parent's end of the pipe by which the other one watches
if not sibling:
    sys.stdin.read()
    os._exit(0)
print(multiprocessing.active_children()[0].pid, sibling, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_parent_that_ended_before_it_was_watched():
    with subprocess.Popen([sys.executable, "-c", LATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        pids = it.stdout.readline().split()
        assert it.wait(LONG) == -signal.SIGKILL
        assert it.stdout.readline() == "True\n"
        it.stdin.close()
        for pid in pids:
            wait_for_end(int(pid))


def test_ended_workers_whose_results_are_kept_take_no_open_files():
    play(many_ended_workers)


def many_ended_workers():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pool(2, maxtasksperchild=1) as workers:
        found = workers.map_async(double, [np.full(LARGE, number) for number in range(40)], chunksize=1).get(LONG)
    assert [int(array[0]) for array in found] == [2 * number for number in range(40)]
    assert all((array == array[0]).all() for array in found)
