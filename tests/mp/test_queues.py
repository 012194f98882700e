"""Queue, JoinableQueue, SimpleQueue: the standard library's meaning, values, children, deaths, memory, leftovers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import errno
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import JoinableQueue, Queue, SimpleQueue
from shmtensor.channel.control import exclusively
from shmtensor.endpoints import sender
from shmtensor.memory import placement, segment
from shmtensor.memory.words import store
from shmtensor.mp import queue as implementation
from shmtensor.mp import queue_handle
from shmtensor.ring.layout import L_VERSION
from shmtensor.ring.pool import Pool
from shmtensor.ring.reader import Reader

from ..conftest import FILES_ONLY
from ..forkservers import preloaded
from ..implementations import once
from ..scenes import own_shm, play
from ..spawned import answer
from ..waiting import complaints, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")

LONG = 120  # seconds; only bounds a hang
METHODS = ["fork", "forkserver", "spawn"]
fork = multiprocessing.get_context("fork")


def files_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"shmtensor.queue-{pid}-" in name]


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("torch", "numpy"):
        yield


@pytest.fixture(autouse=True)
def no_queue_is_left():
    yield
    gc.collect()
    assert files_of(os.getpid()) == []


def end(*processes) -> None:
    for process in processes:
        process.join(LONG)
        assert process.exitcode == 0
        process.close()


def same(got, sent) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert got.dtype == sent.dtype
        assert got.requires_grad == sent.requires_grad
        assert got.layout == sent.layout
        got, sent = (got.to_dense(), sent.to_dense()) if sent.layout != torch.strided else (got, sent)
        assert got.detach().as_subclass(torch.Tensor).tolist() == sent.detach().as_subclass(torch.Tensor).tolist()
    elif isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert got.tolist() == sent.tolist()
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            same(one, other)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        same(list(got.values()), list(sent.values()))
    elif dataclasses.is_dataclass(sent):
        same(vars(got), vars(sent))
    else:
        assert got == sent


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    boxes: list
    name: str


class Marked(torch.Tensor):
    pass


def read_only(array):
    array.flags.writeable = False
    return array


VALUES = {
    "none": None,
    "int": 7,
    "text": "ü" * 3000,
    "bytes": bytes(range(256)) * 20,
    "plain": {"a": [1, 2.5, (None, True)], ("k", 1): {3, 4}},
    "tensor": torch.arange(12.0).view(3, 4),
    "scalar tensor": torch.tensor(5),
    "empty tensor": torch.zeros(0, 3),
    "strided tensor": torch.arange(12.0).view(3, 4).t()[1:],
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "requires grad": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "subclass": torch.arange(3.0).as_subclass(Marked),
    "meta": [torch.float32, torch.Size((2, 3)), np.dtype("f4"), slice(1, 2)],
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "bytes array": np.arange(5, dtype=np.uint8),
    "bytes matrix": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "structured": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "a", None], dtype=object),
    "read-only": read_only(np.arange(3)),
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "numpy scalar": np.float32(1.5),
    "dataclass": Sample(torch.ones(2, 2), [np.zeros(2), 3], "x"),
    "deep": {"a": [({"b": [torch.ones(2), np.ones(3)]},)], "state": torch.nn.Linear(2, 2).state_dict()},
    "partial": functools.partial(max, 3),
}


MADE = {"sparse csr": lambda: torch.eye(3).to_sparse_csr(), "matrix": lambda: np.asmatrix(np.eye(2))}


@pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*matrix subclass.*:PendingDeprecationWarning")
@pytest.mark.parametrize("name", [*VALUES, *MADE])
def test_any_object_that_pickles_survives(name):
    q = Queue()
    value = MADE[name]() if name in MADE else VALUES[name]
    with_others = [value, "between", value]
    q.put(value)
    q.put(with_others)
    got = q.get(timeout=LONG)
    if name == "partial":
        assert (got.func, got.args) == (value.func, value.args)
        return
    same(got, value)
    got = q.get(timeout=LONG)
    assert got[0] is got[2]
    same(got, with_others)


def test_quantized_tensors_and_modules_survive():
    q = Queue()
    with warnings.catch_warnings():  # torch warns once per process
        warnings.simplefilter("ignore")
        sent = torch.quantize_per_tensor(torch.tensor([0.1, 0.5]), 0.1, 1, torch.qint8)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    q.put((sent, module))
    got, same_module = q.get(timeout=LONG)
    assert torch.equal(got.int_repr(), sent.int_repr())
    assert got.q_scale() == sent.q_scale()
    x = torch.ones(4, 3)
    assert torch.equal(same_module(x), module(x))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_survive(layout):
    q = Queue()
    parts = [torch.arange(3.0), torch.arange(5.0)]
    q.put(torch.nested.nested_tensor(parts, layout=layout))
    got = q.get(timeout=LONG)
    assert (got.is_nested, got.layout) == (True, layout)
    assert all(map(torch.equal, got.unbind(), parts))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("elements", [0, 3])
def test_storages_survive(elements, monkeypatch):
    def typed(storage):
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)

    q = Queue()
    storage = torch.arange(elements, dtype=torch.float32).untyped_storage()
    q.put([storage, typed(storage)])
    with monkeypatch.context() as patched:  # as if they were on a device
        patched.setattr(torch.UntypedStorage, "device", torch.device("cuda", 0))
        patched.setattr(torch.serialization, "location_tag", lambda _: "cpu")
        q.put([storage, typed(storage)])
    for _ in range(2):
        untyped, other = q.get(timeout=LONG)
        for got in (typed(untyped), other):
            assert got.dtype == torch.float32
            assert list(got) == list(range(elements))


def test_what_shares_memory_in_one_item_shares_it_on_arrival():
    q = Queue()
    base = torch.zeros(6)
    q.put({"base": base, "part": base[2:4], "storage": base.untyped_storage(), "layer": torch.nn.Parameter(base)})
    got = q.get(timeout=LONG)
    got["base"][2] = 9
    assert got["part"].tolist() == [9, 0]
    assert got["layer"].tolist() == [0, 0, 9, 0, 0, 0]
    assert torch.tensor([], dtype=torch.float32).set_(got["storage"]).tolist() == [0, 0, 9, 0, 0, 0]


def test_an_attribute_of_a_tensor_survives():
    q = Queue()
    tensor = torch.ones(2)
    tensor.label = "cat"
    q.put(tensor)
    got = q.get(timeout=LONG)
    assert (got.label, got.tolist()) == ("cat", [1, 1])


def test_what_is_got_is_writable_and_ones_own():
    q = Queue()
    tensor, array = torch.zeros(1000), np.zeros(1000)
    for _ in range(2):
        q.put((tensor, array, read_only(np.zeros(3))))
        q.put(tensor)
    tensor += 7  # it was copied before put returned
    first, alone, second, _ = (q.get(timeout=LONG) for _ in range(4))
    first[0][:] = 1
    first[1][:] = 2
    first[2][:] = 3
    alone[:] = 4
    assert second[0].sum() == 0
    assert second[1].sum() == 0
    del first
    for number in range(200):  # memory that is still in use is not used again
        q.put(torch.full((1000,), float(number)))
        assert q.get(timeout=LONG)[0] == number
    assert alone.tolist() == [4] * 1000


def test_many_items_wait_in_order():
    q = Queue()
    for number in range(1500):
        q.put(number)
    assert q.qsize() == 1500
    assert [q.get(timeout=LONG) for _ in range(1500)] == list(range(1500))
    assert q.empty()


def test_items_of_all_sizes_wait_in_order():
    q = Queue()
    sizes = [1, 1 << 20, 10, 70_000, 3 << 20, 0, 4097, 1, 1 << 20, 12]
    for size in sizes * 3:
        q.put(np.full(size, size % 251, np.uint8))
    for size in sizes * 3:
        got = q.get(timeout=LONG)
        assert got.shape == (size,)
        assert (got == size % 251).all()


# --- the interface


def test_room_and_timeouts():
    q = Queue(2)
    assert (q.qsize(), q.empty(), q.full()) == (0, True, False)
    q.put(1)
    q.put_nowait(2)
    assert (q.qsize(), q.empty(), q.full()) == (2, False, True)
    for arguments in ((False,), (True, 0), (True, 0.01), (True, -1), (False, 5)):
        with pytest.raises(queue.Full):
            q.put(3, *arguments)
    with pytest.raises(queue.Full):
        q.put_nowait(3)
    assert (q.get(), q.get_nowait()) == (1, 2)
    for arguments in ((False,), (True, 0), (True, 0.01), (True, -1), (False, 5)):
        with pytest.raises(queue.Empty):
            q.get(*arguments)
    with pytest.raises(queue.Empty):
        q.get_nowait()
    assert (q.qsize(), q.empty(), q.full()) == (0, True, False)
    with pytest.raises(TypeError):
        Queue("3")


def test_a_put_that_waits_goes_on_when_there_is_room():
    q = Queue(1)
    q.put(1)
    thread = threading.Thread(target=q.put, args=(2,))
    thread.start()
    assert [q.get(timeout=LONG), q.get(timeout=LONG)] == [1, 2]
    thread.join()


@pytest.mark.parametrize("kind", [Queue, JoinableQueue, SimpleQueue])
def test_closing(kind):
    q = kind()
    q.put(torch.ones(3))
    kept = q.get()
    if kind is JoinableQueue:
        q.task_done()
    if kind is not SimpleQueue:
        with pytest.raises(ValueError, match="not closed"):
            q.join_thread()
        q.cancel_join_thread()
    assert "open" in repr(q)
    q.close()
    q.close()
    assert "closed" in repr(q)
    for call in (lambda: q.put(1), q.get, q.empty):
        for standard in (ValueError, OSError):  # of the standard queues: one or the other
            with pytest.raises(standard, match="is closed"):
                call()
    if kind is not SimpleQueue:
        q.join_thread()
    assert kept.tolist() == [1, 1, 1]


def test_closing_ends_a_get_that_waits():
    q = Queue()
    failed = []

    def wait():
        try:
            q.get()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: q._handle._getter is not None)
    q.close()
    thread.join(LONG)
    assert len(failed) == 1


class Calls:
    """Its pickling calls `packed`, its unpickling `unpacked`, which returns the object."""

    def __init__(self, packed, unpacked):
        self.packed, self.unpacked = packed, unpacked

    def __reduce__(self):
        self.packed()
        return self.unpacked, ()


unpacking, is_put_back = threading.Event(), threading.Event()


def slowly():
    unpacking.set()
    assert is_put_back.wait(LONG)
    return "slow"


def test_closing_while_another_thread_gets_gives_each_item_once():
    q = Queue(ctx=fork)
    q.put(Calls(bool, slowly))
    got = []
    thread = threading.Thread(target=lambda: got.append(q.get()))
    child_got, go = fork.SimpleQueue(), fork.Event()

    def get_the_rest():
        assert go.wait(LONG)
        q.put("last")
        for item in iter(q.get, "last"):
            child_got.put(item)

    child = fork.Process(target=get_the_rest)
    child.start()
    thread.start()
    assert unpacking.wait(LONG)

    def let_the_other_get():
        is_put_back.set()
        thread.join(LONG)

    q._undelivered.append(Calls(let_the_other_get, str))  # as an interrupted `get` leaves it
    q.close()
    assert got == ["slow"]
    go.set()
    end(child)
    assert child_got.get() == ""
    assert child_got.empty()
    child_got.close()


class AnyLock:
    """A control lock that nobody else wants."""

    def wait_exclusive(self, *_):
        pass

    def unlock(self, *_):
        pass


def test_closing_while_an_end_joins(monkeypatch):
    """The departure waits until the joining thread has let go of the control lock, and is then that thread's to do."""
    q = Queue()
    make = queue_handle.Getter

    def make_late(*args):
        exclusively(AnyLock(), 0, "a test", q.close)
        return make(*args)

    monkeypatch.setattr(queue_handle, "Getter", make_late)
    with pytest.raises(ValueError, match="closed"):
        q.get()
    with pytest.raises(ValueError, match="closed"):
        q.put(1)


def test_a_thread_that_waits_does_not_hold_up_the_timeouts_of_others():
    q = Queue()
    got = []
    thread = threading.Thread(target=lambda: got.append(q.get()))
    thread.start()
    wait_until(lambda: q._handle._getter is not None)
    with pytest.raises(queue.Empty):
        q.get_nowait()
    with pytest.raises(queue.Empty):
        q.get(timeout=0.01)
    assert q.empty()
    q.put("x")
    thread.join(LONG)
    assert got == ["x"]


def test_threads_put_and_get():
    q = Queue(3)
    got = [[] for _ in range(3)]
    putters = [threading.Thread(target=lambda n=n: [q.put((n, i)) for i in range(100)]) for n in range(3)]
    getters = [threading.Thread(target=lambda n=n: [got[n].append(q.get()) for _ in range(100)]) for n in range(3)]
    for thread in putters + getters:
        thread.start()
    for thread in putters + getters:
        thread.join(LONG)
    assert sorted(itertools.chain(*got)) == [(n, i) for n in range(3) for i in range(100)]
    for each in got:
        for n in range(3):
            assert [i for m, i in each if m == n] == sorted(i for m, i in each if m == n)


def test_it_is_not_pickled_or_copied_outside_of_spawning():
    q = Queue()
    for call in (pickle.dumps, copy.copy, q.put):
        with pytest.raises(RuntimeError, match="inheritance"):
            call(q)
    assert q.qsize() == 0


@pytest.mark.parametrize("kind", [Queue, JoinableQueue, SimpleQueue])
def test_it_is_generic(kind):
    """What a type checker makes of it: `package/test_typing.py`."""
    assert kind[int].__origin__ is kind
    with contextlib.closing(kind[int]()) as q:
        assert type(q) is kind
        q.put(1)
        assert q.get() == 1


# --- what cannot be pickled or unpickled


class Refuses:
    def __reduce__(self):
        raise LookupError("no way")


class RefusesBack:
    def __reduce__(self):
        return int, ("not a number",)


def test_an_unpicklable_object_raises_in_put_and_harms_nothing():
    q = JoinableQueue(1)
    for unpicklable, error in ((Refuses(), LookupError), (lambda: 0, (pickle.PicklingError, AttributeError))):
        with pytest.raises(error):
            q.put({"tensor": torch.ones(3), "bad": unpicklable})
    with pytest.raises(RuntimeError, match="not a leaf"):
        q.put(torch.ones(2, requires_grad=True) * 2)
    assert q.qsize() == 0
    q.put("good")
    assert q.get(timeout=LONG) == "good"
    q.task_done()
    q.join()


def test_an_item_that_does_not_unpickle_raises_in_get_and_is_gone():
    q = Queue(1)
    q.put((torch.ones(3), RefusesBack()))
    with pytest.raises(ValueError, match="not a number"):
        q.get(timeout=LONG)
    q.put("good")
    assert q.get(timeout=LONG) == "good"


# --- children


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue", "SimpleQueue"])
def test_children_of_every_kind(method, kind):
    ctx = shmtensor.get_context(method)
    tasks, answers = getattr(ctx, kind)(), getattr(ctx, kind)()
    spare_torch = method == "spawn" and kind != "Queue"  # one child that imports it is enough
    tasks.put({"x": np.zeros(5) if spare_torch else torch.zeros(5)})  # before there is a getter
    child = ctx.Process(target=answer, args=(tasks, answers), daemon=True)
    child.start()
    tasks.put({"x": np.zeros(50_000)})
    for _ in range(2):
        pid, task = answers.get()
        assert pid == child.pid
        assert task["x"].sum() == len(task["x"])
    tasks.put(None)
    end(child)


def put_all(q, numbers):
    for number in numbers:
        q.put(number)


def test_what_a_putter_left_is_kept_and_comes_in_the_order_of_putting():
    q = Queue()
    for start in (0, 10):
        child = fork.Process(target=put_all, args=(q, range(start, start + 5)), daemon=True)
        child.start()
        end(child)
        put_all(q, range(start + 5, start + 10))
    assert [q.get(timeout=LONG) for _ in range(20)] == list(range(20))


def test_a_putter_whose_ring_is_not_attached_yet_does_not_come_first():
    """`age` is 0 then. Its ring may be made between its joining and the getter's look: 3 of 100 runs under load."""

    class Unattached:
        attached = False

        def age(self):
            return 7 if self.attached else 0

        def map_all(self):
            self.attached = True

    assert Reader.next_sent_ns(Unattached()) == 7


def put_numbered(q, name):
    for number in range(60):
        q.put((name, number, torch.full((100,), number)))


def get_until_none(q, results):
    got = []
    for name, number, tensor in iter(q.get, None):
        assert tensor.tolist() == [number] * 100
        got.append((name, number))
    results.put(got)


@pytest.mark.slow
def test_many_putters_and_getters():
    q, results = Queue(maxsize=10), Queue()
    getters = [fork.Process(target=get_until_none, args=(q, results), daemon=True) for _ in range(3)]
    putters = [fork.Process(target=put_numbered, args=(q, name), daemon=True) for name in "abc"]
    for process in getters + putters:
        process.start()
    end(*putters)
    for _ in getters:
        q.put(None)
    got = [results.get(timeout=LONG) for _ in getters]
    end(*getters)
    assert sorted(itertools.chain(*got)) == [(name, number) for name in "abc" for number in range(60)]
    for each in got:
        for name in "abc":
            numbers = [number for other, number in each if other == name]
            assert numbers == sorted(numbers)


def test_a_queue_of_fork_is_refused_by_spawn():
    q = Queue(ctx=fork)
    child = multiprocessing.get_context("spawn").Process(target=put_all, args=(q, [1]))
    with pytest.raises(RuntimeError, match="queue of a fork context"):
        child.start()


def test_a_forked_child_makes_endpoints_of_its_own():
    q = Queue()
    q.put("before")
    assert q.get(timeout=LONG) == "before"
    assert q.empty()
    child = fork.Process(target=answer_once, args=(q,), daemon=True)
    child.start()
    end(child)
    assert q.get(timeout=LONG) == "from the child"


def answer_once(q):
    q.put("for myself")
    assert q.get(timeout=LONG) == "for myself"
    q.put("from the child")


def put_one(q, item):
    q.put(item)


@pytest.mark.parametrize("kind", [SimpleQueue, Queue, JoinableQueue])
def test_a_living_putter_of_another_version_is_named(kind):
    said = rf"process {os.getpid()} .*layout version 99, this library reads \d"
    with contextlib.closing(kind(ctx=fork)) as q:
        q.put(np.array(1))
        words = q._handle.putter._words
        ours = words[L_VERSION]
        store(words, L_VERSION, 99)
        for _ in range(3):
            with pytest.raises(shmtensor.WireError, match=said):
                q.get()
        child = fork.Process(target=put_one, args=(q, "can be read"))
        child.start()
        end(child)
        assert q.get() == "can be read"
        if kind is JoinableQueue:
            q.task_done()  # else it might come again
        with pytest.raises(shmtensor.WireError, match=said):
            q.get()
        store(words, L_VERSION, ours)
        reader, got = os.pipe()
        child = fork.Process(target=lambda: os.write(got, bytes([int(q.get())])))
        child.start()  # its items stay for who can read them
        end(child)
        assert os.read(reader, 1) == b"\1"
        os.close(reader)
        os.close(got)


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    """torch's threads, with which the parent has copied, do not survive the fork."""
    q = Queue(ctx=fork)
    item = {"array": np.ones(1 << 17), "tensor": torch.ones(1 << 17)}
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(3):
            q.put(item)
            q.get(timeout=LONG)
        child = fork.Process(target=put_one, args=(q, item), daemon=True)
        child.start()
        got = q.get(timeout=LONG)
        end(child)
    finally:
        torch.set_num_threads(threads)
    assert got["array"].sum() + got["tensor"].sum() == 2 << 17


# --- deaths


def die_elsewhere(pid):
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


class Deadly:
    """Kills every process that unpickles it but one."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return die_elsewhere, (self.pid,)


def run_and_die(target, *args):
    child = fork.Process(target=target, args=args, daemon=True)
    child.start()
    child.join(LONG)
    assert child.exitcode == -signal.SIGKILL
    child.close()


def get_one(q):
    q.get()


@pytest.mark.parametrize("kind", [Queue, JoinableQueue, SimpleQueue])
def test_a_getter_that_is_killed_inside_get_gives_the_item_back(kind):
    q = kind(ctx=fork)
    q.put((torch.ones(3), Deadly(os.getpid())))
    run_and_die(get_one, q)
    tensor, said = q.get()
    assert (tensor.tolist(), said) == ([1, 1, 1], "survived")
    if kind is not SimpleQueue:
        assert q.qsize() == 0


@pytest.mark.slow
def test_an_item_that_kills_every_getter_is_dropped(caplog):
    q = JoinableQueue(2, ctx=fork)
    q.put((torch.ones(3), Deadly(0)))
    q.put("good")
    for _ in range(5):
        run_and_die(get_deadly, q)
    assert q.get(timeout=LONG) == "good"
    q.task_done()
    q.join()
    assert "dropped after 5 attempts" in caplog.text


def get_deadly(q):
    for _ in range(2):
        q.get()


def get_and_die(q):
    q.get()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_get_returned_is_not_delivered_again():
    q = Queue(ctx=fork)
    q.put(torch.ones(3))
    q.put("next")
    run_and_die(get_and_die, q)
    assert q.get(timeout=LONG) == "next"
    assert (q.qsize(), q.empty()) == (0, True)


def get_and_leave(q, how):
    q.get()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(0)
    elif how == "close":
        q.close()


@pytest.mark.parametrize("how", ["kill", "exit", "return", "close"])
def test_join_does_not_wait_for_a_worker_that_is_gone(how):
    q = JoinableQueue(1, ctx=fork)
    q.put(torch.ones(3))
    child = fork.Process(target=get_and_leave, args=(q, how), daemon=True)
    child.start()
    child.join(LONG)
    child.close()
    assert q.get(timeout=LONG).tolist() == [1, 1, 1]
    q.task_done()
    q.join()
    with pytest.raises(ValueError, match="too many times"):
        q.task_done()
    q.put("there is room", timeout=LONG)
    assert q.get(timeout=LONG) == "there is room"
    q.task_done()


def test_task_done_is_for_what_the_same_thread_has_got():
    q = JoinableQueue(ctx=fork)
    for name in ("mine", "theirs"):
        q.put(name)
    assert q.get(timeout=LONG) == "mine"

    def work():
        assert q.get(timeout=LONG) == "theirs"
        q.task_done()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    assert [message.value is not None for _, message in q._held._messages] == [True]
    q._held.__init__()  # as if this process were gone: only what was not done comes back
    assert q.get(timeout=LONG) == "mine"
    q.task_done()
    q.join()


def done_for_others(q, count):
    for _ in range(count):
        q.task_done()


def test_task_done_may_be_called_by_another_process():
    q = JoinableQueue(ctx=fork, max_bytes="16MiB")
    for _ in range(24):  # more than the limit, were they held until this process says that they are done
        q.put(torch.zeros(1 << 18), timeout=LONG)
        q.get(timeout=LONG)
        child = fork.Process(target=done_for_others, args=(q, 1), daemon=True)
        child.start()
        end(child)
    q.join()


def test_the_queue_outlives_its_creator():
    script = """
import os, signal, numpy, shmtensor
q, ready, go = shmtensor.Queue(), os.pipe(), os.pipe()
q.put(numpy.ones(3))
print(q._handle.name, flush=True)
if os.fork() == 0:
    os.close(go[1])
    os.write(ready[1], b"x")
    os.read(go[0], 1)  # ends with the creator
    assert q.get(timeout=100).tolist() == [1, 1, 1]
    q.put("mine")
    assert q.get(timeout=100) == "mine"
    print("done", flush=True)
    raise SystemExit
os.read(ready[0], 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=LONG)
    name, said = done.stdout.split()
    assert said == "done"
    assert [file for file in os.listdir("/dev/shm") if name in file] == []


def test_a_finalizer_may_put_when_the_process_has_closed_its_queues():
    """As a DataLoader does whose iterator lives until the end: the item goes nowhere, and nothing is reported."""
    script = """if True:
        import shmtensor
        class AtTheEnd:
            def __init__(self, *queues): self.queues = queues
            def __del__(self, print=print):
                for queue in self.queues: queue.put(None)
                print("put", flush=True)
        used, unused = shmtensor.Queue(), shmtensor.SimpleQueue()
        used.put(1)
        used.get()
        kept = AtTheEnd(used, unused)
        kept.itself = kept
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert (done.stdout, done.stderr, done.returncode) == ("put\n", "", 0)


class UsesItAtTheEnd:
    def __init__(self, q, got):
        self.me, self.q, self.got = self, q, got

    def __del__(self):
        self.q.put("goodbye")
        self.got.append(self.q.get(timeout=LONG))


def test_a_queue_that_is_garbage_serves_every_finalizer():
    got = []
    UsesItAtTheEnd(Queue(), got)
    gc.collect()
    assert got == ["goodbye"]


ENDINGS = {
    "exit": "",
    "exception": "raise SystemExit(0)",
    "views alive": "kept = [q.get() for _ in range(2)]",
    "garbage": "del q; import gc; gc.collect(); assert [f for f in os.listdir('/dev/shm') if name in f] == []",
    "garbage with views": "kept = q.get(); del q",
    "closed with views": "kept = q.get(); q.close()",
    "child killed": """
child = ctx.Process(target=die, args=(q,))
child.start()
child.join()
assert child.exitcode == -9""",
    "child left running": """
pipe, started = ctx.Pipe(False)
child = ctx.Process(target=wait, args=(q, started), daemon=True)
child.start()
assert pipe.recv() == "started"
""",
    "child outlives": """
child = ctx.Process(target=late, args=(q,))
child.start()
while q.get() != "started":
    pass""",
    "half a join": "j = shmtensor.JoinableQueue(ctx=ctx); j.put(1); j.get(); name2 = j._handle.name; print(name2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_however_the_program_ends(ending, method, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"""
import os, signal, numpy, shmtensor

def die(q):
    q.put("from the child")
    kept = q.get()
    os.kill(os.getpid(), signal.SIGKILL)

def wait(q, started):
    started.send("started")  # not by the queue: it might get that itself, and everything else before its parent
    while True:
        q.get()

def late(q):
    q.put("started")
    q.put(numpy.zeros(5000))

if __name__ == "__main__":
    ctx = shmtensor.get_context("{method}")
    q = ctx.Queue()
    name = q._handle.name
    print(name, flush=True)
    for number in range(3):
        q.put({{"array": numpy.zeros(5000), "number": number}})
{chr(10).join("    " + line for line in ENDINGS[ending].splitlines())}
""")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=LONG, cwd=tmp_path
    )
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    for name in done.stdout.split():
        assert [file for file in os.listdir("/dev/shm") if name in file] == []


def test_what_nobody_could_remove_the_next_queue_removes():
    script = """
import os, signal, numpy, shmtensor
q = shmtensor.Queue()
q.put(numpy.zeros(5000))
print(q._handle.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=LONG)
    name = done.stdout.strip()
    assert name
    with contextlib.closing(Queue()):  # or whoever is sweeping that channel just now
        wait_until(lambda: not [file for file in os.listdir("/dev/shm") if name in file])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue", "SimpleQueue"])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_nothing_is_left_of_a_process_group_that_was_killed(kind, method, tmp_path):
    """Also `multiprocessing`'s own tracker of resources is gone then: all names are ones that our clean-up knows."""
    script = tmp_path / "program.py"
    script.write_text(f"""
import os, signal, shmtensor

def child(q):
    assert q.empty()  # it has a getting end, too; were it to get, it might get what it puts
    q.put("started")
    signal.pause()

if __name__ == "__main__":
    ctx = shmtensor.get_context("{method}")
    q = ctx.{kind}()
    ctx.Process(target=child, args=(q,)).start()
    assert q.get() == "started"
    with open("/proc/self/maps") as maps:  # by inode, as the C library makes each under a passing name
        mapped = {{line.split()[4] for line in maps if "/dev/shm/" in line}}
    print(q._handle.name, *mapped, flush=True)
    signal.pause()
""")
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as program:
        name, *inodes = program.stdout.readline().split()
        mapped = files_with(inodes)
        os.killpg(program.pid, signal.SIGKILL)
    semaphores = {file for file in mapped if file.startswith("sem.")}
    assert len(semaphores) == {"SimpleQueue": 1, "Queue": 2, "JoinableQueue": 5}[kind] + 1  # a putter's own
    assert {file for file in semaphores if not file.startswith(f"sem.shmtensor.{name},")} == set()

    def swept():
        with contextlib.closing(SimpleQueue()):
            return not mapped & files_with(inodes)

    wait_until(swept)  # the dead of a group end one after the other


def files_with(inodes) -> set[str]:
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if str(entry.inode()) in inodes}


# --- memory


def test_kept_tensors_never_stop_the_queue_until_the_limit():
    q = Queue(max_bytes="40MiB")
    kept = []
    for number in range(20):
        q.put(torch.full((1 << 18,), float(number)), timeout=LONG)
        kept.append(q.get(timeout=LONG))
    assert [tensor[-1].item() for tensor in kept] == list(range(20))


def test_the_limit_says_what_holds_the_memory(monkeypatch):
    q = Queue(max_bytes="8MiB")
    kept = []
    with pytest.raises(
        queue.Full, match=rf"tensors of \d items that were got hold .* of max_bytes=8.0 MiB.*{os.getpid()}"
    ):
        while True:
            q.put(torch.ones(1 << 18), block=False)
            kept.append(q.get(timeout=LONG))
    assert len(kept) >= 4
    monkeypatch.setattr(queue_handle, "PATIENCE", 0.0)
    with pytest.raises(shmtensor.ResourceError, match="keep clones"):
        q.put(torch.ones(1 << 18))
    assert q.qsize() == 0
    kept.pop()
    q.put(torch.ones(1 << 18), timeout=LONG)
    assert q.get(timeout=LONG).sum() == 1 << 18


def test_unread_items_at_the_limit_are_a_full_queue():
    q = Queue(max_bytes="8MiB")
    with pytest.raises(queue.Full, match="items wait to be got"):
        while True:
            q.put(torch.ones(1 << 18), timeout=0.01)
    count = q.qsize()
    assert count >= 4
    thread = threading.Thread(target=q.put, args=("waits for memory",))
    thread.start()
    for _ in range(count):
        q.get(timeout=LONG)
    assert q.get(timeout=LONG) == "waits for memory"
    thread.join()


def test_a_put_that_waits_for_memory_says_why_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(sender, "SLOW_S", 0.0)
    q = Queue(max_bytes="8MiB")
    with pytest.raises(queue.Full):
        while True:
            q.put(torch.ones(1 << 18), timeout=0.01)
    assert any("has waited" in text and "items wait to be got" in text for text in caplog.messages)


@once("in an interpreter of its own")
def test_putters_share_a_small_shm():
    play(putters_in_a_small_shm, mounts=(own_shm("size=64m"),))


def putters_in_a_small_shm() -> None:
    item, pairs = np.ones(6 << 20, np.uint8), [Queue() for _ in range(4)]
    for q in pairs:
        q.put(item)
    with open("/dev/shm/other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, segment.free_bytes() - (1 << 20))
        late = Queue()
        with pytest.raises(queue.Full, match=r"needs a ring of .* hold the rest until they close"):
            late.put(item, timeout=0.01)
        patience, queue_handle.PATIENCE = queue_handle.PATIENCE, 0.0
        with pytest.raises(shmtensor.ResourceError, match=r"needs a ring of .* hold the rest until they close"):
            late.put(item)
        with pytest.raises(shmtensor.ResourceError, match=r"128\.0 MiB does not fit"):
            late.put(np.ones(128 << 20, np.uint8))
        queue_handle.PATIENCE = patience
        thread = threading.Thread(target=late.put, args=(item,))
        thread.start()
        wait_until(lambda: late._handle.putter._waits)
        other.truncate(0)
        thread.join()
    for q in (*pairs, late):
        assert q.get(timeout=LONG).sum() == item.size
        q.close()


def test_room_that_another_process_takes_first_is_waited_for(monkeypatch):
    """It was free when the ring was sized."""
    refusals, real = [1, 1], Pool.add

    def taken(pool, nbytes):
        if refusals:
            refusals.pop()
            raise shmtensor.ResourceError(errno.ENOSPC, "no room")
        real(pool, nbytes)

    monkeypatch.setattr(Pool, "add", taken)
    q = Queue()
    q.put(np.ones(1 << 20), timeout=LONG)
    assert not refusals
    assert q.get(timeout=LONG).size == 1 << 20


@FILES_ONLY
def test_a_child_that_ends_lists_nothing_for_the_queues_that_it_inherits(monkeypatch):
    queues = [Queue() for _ in range(4)]
    out, into = os.pipe()
    os.set_blocking(out, False)
    real = placement.Files.listing
    monkeypatch.setattr(placement.Files, "listing", lambda self: [os.write(into, b"l"), *real(self)][1:])
    child = fork.Process(target=bool)
    child.start()
    end(child)
    with pytest.raises(BlockingIOError):
        os.read(out, 1)
    queues[0].put(1)
    assert os.read(out, 9) == b"l", "its join does"
    assert queues[0].get(timeout=LONG) == 1
    for each in queues:
        each.close()
    os.close(out)
    os.close(into)


def test_an_item_larger_than_the_limit():
    q = Queue(max_bytes="1MiB")
    with pytest.raises(shmtensor.ResourceError, match=r"item of 4.0 MiB does not fit.*max_bytes=1.0 MiB"):
        q.put(torch.zeros(1 << 20))
    assert q.qsize() == 0
    q.put(torch.zeros(1 << 10))
    with pytest.raises(shmtensor.ResourceError, match=r"item of 4.0 MiB does not fit.*max_bytes=1.0 MiB"):
        q.put(torch.zeros(1 << 20))
    assert q.get(timeout=LONG).shape == (1 << 10,)
    with pytest.raises(ValueError):
        Queue(max_bytes="a lot")


def test_slots_come_back():
    q = Queue()
    for number in range(300):
        q.put(np.full(10_000, number))
        assert q.get(timeout=LONG)[5] == number
    assert q._handle.putter.statistics().rings == 1


def test_plain_objects_import_no_torch():
    script = """
import sys, shmtensor, numpy
q = shmtensor.Queue()
q.put({"a": [1, 2], "b": numpy.arange(3)})
print(q.get(), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert done.stdout == "{'a': [1, 2], 'b': array([0, 1, 2])} False\n", done.stderr


def test_contexts_by_name():
    q = Queue(ctx="spawn")
    q.close()
    with pytest.raises(shmtensor.ArgumentError, match="ctx='no such'"):
        Queue(ctx="no such")
    with pytest.raises(shmtensor.ArgumentTypeError, match="start method"):
        Queue(ctx=7)


# --- puts of several threads


def test_a_put_that_copies_makes_no_queue_full_for_others(monkeypatch):
    """Neither by `put_nowait` nor after the time-out: the other one waits until the item is copied."""
    q, tries = Queue(), []
    q.put("first")
    put, locked = q._handle.putter.put, implementation.locked

    def copy_slowly(*args):
        monkeypatch.setattr(q._handle.putter, "put", put)
        others.extend(executor.submit(q.put, number, timeout=0) for number in range(2))
        others.append(executor.submit(q.put_nowait, 2))
        wait_until(lambda: len(tries) > 6 or any(other.done() for other in others))  # each has tried again
        put(*args)

    def counted(*args):
        tries.append(args)
        return locked(*args)

    monkeypatch.setattr(q._handle.putter, "put", copy_slowly)
    monkeypatch.setattr(implementation, "locked", counted)
    others = []
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        q.put("slow")
        for other in others:
            other.result(LONG)
    assert [q.get(timeout=LONG) for _ in range(2)] == ["first", "slow"]
    assert {q.get(timeout=LONG) for _ in range(3)} == {0, 1, 2}


def test_threads_that_put_at_once_lose_nothing():
    q = Queue()

    def put_many(first):
        for number in range(first, first + 100):
            q.put_nowait((number, np.full(20_000, number)))

    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        list(executor.map(put_many, range(0, 300, 100)))
    found = [q.get(timeout=LONG) for _ in range(300)]
    assert all((array == number).all() for number, array in found)
    assert sorted(number for number, _ in found) == list(range(300))


@pytest.mark.parametrize("what", ["items", "memory"])
def test_a_put_that_waits_for_room_is_a_full_queue_for_others(what):
    q = Queue(1) if what == "items" else Queue(max_bytes="4MiB")
    item = np.zeros(1 << 17)
    with contextlib.suppress(queue.Full):
        while True:
            q.put_nowait(item)
    count = q.qsize()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(q.put, item)
        wait_until(lambda: q._waits_for_room)
        for timeout in (0, 0.01):
            with pytest.raises(queue.Full, match="another thread of this process waits for room"):
                q.put("small", timeout=timeout)
        for _ in range(count):
            q.get(timeout=LONG)
        waiting.result(LONG)
    assert q.get(timeout=LONG).shape == item.shape
    q.put_nowait("small")
    assert q.get(timeout=LONG) == "small"


def test_a_put_of_a_signal_handler_inside_a_put_is_refused(monkeypatch):
    """It would wait for the very put that it interrupts."""
    q, failed = Queue(), []
    q.put("first")
    put = q._handle.putter.put

    def interrupted(*args):
        signal.raise_signal(signal.SIGUSR1)
        put(*args)

    def handle(*_):
        for options in ({"block": False}, {"timeout": 0.01}, {}):
            with pytest.raises(queue.Full, match="interrupted a put of this thread"):
                q.put("from the handler", **options)
            failed.append(options)

    monkeypatch.setattr(q._handle.putter, "put", interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        q.put("second")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(failed) == 3
    assert [q.get(timeout=LONG) for _ in range(2)] == ["first", "second"]
    assert q.empty()


@pytest.mark.parametrize("call", ["get", "put"])
def test_calls_of_a_signal_handler_inside_the_first_call(monkeypatch, call):
    """The interrupted one is creating an endpoint, and would wait for itself."""
    q, seen = Queue(), []
    which = "make_getter" if call == "get" else "make_putter"
    make = getattr(q._handle, which)

    def interrupted():
        signal.raise_signal(signal.SIGUSR1)
        return make()

    def handle(*_):
        seen.append(q.empty())
        for options in ({"block": False}, {"timeout": 0.01}):
            with pytest.raises(queue.Empty):
                q.get(**options)
            with pytest.raises(queue.Full):
                q.put(1, **options)
        with pytest.raises(shmtensor.ReentrantError):
            q.get()

    monkeypatch.setattr(q._handle, which, interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        if call == "put":
            q.put("item")
        else:
            with pytest.raises(queue.Empty):
                q.get_nowait()
            q.put("item")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [True]
    assert q.get(timeout=LONG) == "item"
    assert q.empty()


def test_task_done_of_a_signal_handler_inside_task_done_and_get(monkeypatch):
    """Each call marks one item as done; no other one is released."""
    q, items = JoinableQueue(), []
    for number in range(6):
        q.put(number)
    q.get()
    held = q._held
    release = held._release_counted

    def interrupted():
        monkeypatch.setattr(held, "_release_counted", release)
        signal.raise_signal(signal.SIGUSR1)
        release()

    def handle(*_):
        items.append(q.get_nowait())
        q.task_done()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(held, "_release_counted", interrupted)
        q.task_done()
        assert (q._tasks.unfinished, len(held._messages)) == (4, 0)
        monkeypatch.setattr(held, "_release_counted", interrupted)
        assert q.get() == 3  # the handler took what this call had got
        assert (q._tasks.unfinished, len(held._messages)) == (3, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert items == [1, 2]
    q.task_done()
    assert [q.get_nowait(), q.get_nowait()] == [4, 5]
    q.task_done(), q.task_done()
    with pytest.raises(ValueError, match="too many"):
        q.task_done()
    q.join()


def test_arguments_out_of_range():
    with pytest.raises(shmtensor.errors.ArgumentError, match=r"maxsize must be <= 2147483647, not 2147483648"):
        Queue(2**31)
    with pytest.raises(shmtensor.errors.ArgumentError, match="maxsize"):
        JoinableQueue(2**40)
    with contextlib.closing(Queue()) as q:
        for call in (q.get, lambda **options: q.put(1, **options)):
            with pytest.raises(ValueError, match="timeout must be seconds or None, not nan"):
                call(timeout=float("nan"))


def test_a_child_ends_quietly_whose_parent_keeps_views_of_a_closed_queue():
    """What the parent's views keep is not the child's to end; its own endpoints are."""
    script = """if True:
        import multiprocessing, os, numpy, shmtensor
        context = multiprocessing.get_context("fork")
        queue, over = shmtensor.Queue(ctx=context), context.Event()
        def put():
            queue.put(numpy.arange(20_000))
            over.wait()
        other = context.Process(target=put)
        other.start()
        kept = queue.get()
        queue.close()  # the other process still has it
        def child():
            global views
            own = shmtensor.Queue(ctx=context)
            own.put(numpy.ones(20_000))
            views = own.get()
            own.close()
            shmtensor.Publisher(f"test-{os.getpid()}-child").close()
            print(views.sum(), flush=True)
        process = context.Process(target=child)
        process.start()
        process.join()
        left = [name for name in os.listdir("/dev/shm") if f"-{process.pid}-" in name]
        over.set()
        other.join()
        print(process.exitcode, left, kept.sum())
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert (done.stdout, done.stderr) == ("20000.0\n0 [] 199990000\n", "")
