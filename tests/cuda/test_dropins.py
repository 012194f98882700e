"""Queues, the DataLoader context and the executor with `device=`, against the stand-in for CUDA."""

from __future__ import annotations

import gc
import multiprocessing
import queue as standard_queue
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shmtensor

from ..conftest import left_files
from .standin import DeviceTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

FORK = multiprocessing.get_context("fork")
LONG = 120.0
ELEMENTS = 30_000  # more than is copied out of its slot on transfer, less than torch shares among threads


@pytest.fixture(autouse=True)
def no_queue_is_left():
    yield
    gc.collect()
    assert sorted(left_files("queue")) == []


def make(number: float, count: int = ELEMENTS) -> torch.Tensor:
    return torch.full((count,), float(number))


def on_device(tensor) -> bool:
    return tensor.device.type == "cuda"


def held(standin, tensor) -> list:
    """What the device holds, after all that the current stream waits for."""
    standin.synchronize(standin.current_stream(0))
    return standin.host(tensor).tolist()


# --- queues


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue", "SimpleQueue"])
def test_tensors_arrive_on_the_device(standin, kind):
    queue = getattr(shmtensor, kind)(ctx=FORK, device="cuda")
    sent = {"x": torch.arange(6).view(2, 3), "deep": [make(2), ("text", 7)], "array": np.arange(3)}
    queue.put(sent)
    got = queue.get()
    assert on_device(got["x"])
    assert on_device(got["deep"][0])
    assert held(standin, got["x"]) == [[0, 1, 2], [3, 4, 5]]
    assert held(standin, got["deep"][0]) == make(2).tolist()
    assert type(got["array"]) is np.ndarray
    assert (got["array"].tolist(), got["deep"][1]) == ([0, 1, 2], ("text", 7))
    queue.put(make(3))  # alone
    alone = queue.get()
    assert held(standin, alone) == make(3).tolist()
    queue.put("no tensor")
    assert queue.get() == "no tensor"
    queue.close()


def test_get_does_not_wait_and_the_current_stream_does(standin):
    queue = shmtensor.Queue(ctx=FORK, device="cuda")
    standin.polls = None
    queue.put(make(1))
    got = queue.get()
    total = []
    standin.enqueue(lambda got=got: total.append(standin.host(got).sum().item()))  # a kernel of the caller's
    del got
    gc.collect()
    assert total == []
    standin.synchronize(standin.current_stream(0))
    assert total == [ELEMENTS]
    queue.close()


def test_the_current_stream_is_that_of_the_caller(standin):
    queue, stream = shmtensor.Queue(ctx=FORK, device="cuda"), standin.new_stream(0)
    queue.put(make(4))
    with standin.on(stream):
        got = queue.get()
        assert held(standin, got) == make(4).tolist()
    assert not standin.defaults[0].queue
    queue.close()


def test_strides_dtypes_and_types_survive(standin):
    sent = {
        "channels": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "turned": torch.arange(6).view(2, 3).t(), "bool": torch.tensor([True, False]),
        "half": torch.ones(3).bfloat16(), "scalar": torch.tensor(5), "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    queue = shmtensor.Queue(ctx=FORK, device="cuda")
    queue.put(sent)
    got = queue.get()
    standin.run_all()
    for name, tensor in sent.items():
        back = got[name]
        assert on_device(back), name
        assert (back.shape, back.dtype, back.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad), name
        assert standin.host(back).tolist() == tensor.tolist(), name
    assert got["channels"].is_contiguous(memory_format=torch.channels_last)
    queue.close()


def test_a_slot_is_leased_until_its_copy_is_complete_and_no_longer(standin):
    queue = shmtensor.SimpleQueue(ctx=FORK, max_bytes="1MiB", device="cuda")
    standin.polls = None
    queue.put(make(1))
    first = queue.get()
    getter = queue._handle.getter
    assert getter.statistics().leases == 1
    standin.run_all()
    queue.put(make(2))
    second = queue.get()  # looks at what is complete
    assert getter.statistics().leases == 1
    standin.run_all()
    assert (held(standin, first)[0], held(standin, second)[0]) == (1, 2)
    del first, second
    for number in range(40):  # far more than there is memory for
        queue.put(make(number))
        got = queue.get()
        standin.run_all()
        assert standin.host(got)[0] == number
    queue.close()


def test_without_room_on_the_device_the_item_is_gone_and_the_queue_goes_on(standin):
    queue = shmtensor.Queue(maxsize=1, ctx=FORK, device="cuda")
    standin.refuse_memory = 2
    queue.put([make(1), make(2)])
    with pytest.raises(shmtensor.CudaError, match="cannot allocate"):
        queue.get()
    standin.refuse_memory = 0
    queue.put(make(3), timeout=LONG)
    assert held(standin, queue.get(timeout=LONG)) == make(3).tolist()
    queue.close()


def _double(inbox, outbox):
    for tensor in iter(inbox.get, None):
        outbox.put((type(tensor), tensor * 2))


def test_only_the_process_that_made_the_queue_touches_cuda(standin):
    """The stand-in raises in any other process."""
    context = shmtensor.get_context("fork", device="cuda")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(inbox, outbox))
    child.start()
    inbox.put(make(2, 100))
    kind, doubled = outbox.get(timeout=LONG)
    assert kind is torch.Tensor
    assert held(standin, doubled) == [4] * 100
    inbox.put(None)
    child.join(LONG)
    assert child.exitcode == 0
    for queue in (inbox, outbox):
        queue.close()


def test_a_spawned_child_gets_host_tensors(standin):
    context = shmtensor.get_context("spawn", device="cuda")
    inbox, outbox = context.Queue(), context.SimpleQueue()
    child = context.Process(target=_double, args=(inbox, outbox))
    child.start()
    inbox.put(make(1))
    kind, doubled = outbox.get()
    assert kind is torch.Tensor
    assert held(standin, doubled) == make(2).tolist()
    inbox.put(None)
    child.join(LONG)
    assert child.exitcode == 0
    for queue in (inbox, outbox):
        queue.close()


# --- the context


def test_contexts_are_one_per_method_and_device(standin):
    plain, ours = shmtensor.get_context("fork"), shmtensor.get_context("fork", device="cuda")
    assert ours is shmtensor.get_context("fork", device="cuda:0")
    assert ours is shmtensor.get_context("fork", device=torch.device("cuda", 0))
    assert ours is not plain
    assert isinstance(ours, type(plain))
    assert (plain.device, ours.device) == (None, 0)
    assert ours.get_context() is ours
    assert ours.get_context("spawn") is shmtensor.get_context("spawn", device="cuda")


class Points(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((40, 1000), float(index)), index, f"n{index}"


def test_batches_arrive_on_the_device(standin):
    context = shmtensor.get_context("fork", device="cuda")
    loader = DataLoader(Points(), batch_size=4, num_workers=2, multiprocessing_context=context, timeout=LONG)
    for _ in range(2):
        seen = []
        for points, indices, names in loader:
            assert isinstance(points, DeviceTensor)
            standin.synchronize(standin.current_stream(0))
            assert (standin.host(points).amin((1, 2)) == standin.host(indices)).all()
            assert list(names) == [f"n{index}" for index in standin.host(indices).tolist()]
            seen += standin.host(indices).tolist()
        assert seen == list(range(24))


def test_batches_that_are_kept(standin):
    context = shmtensor.get_context("fork", device="cuda")
    kept = list(DataLoader(Points(), batch_size=4, num_workers=2, multiprocessing_context=context, timeout=LONG))
    standin.run_all()
    assert [standin.host(points)[0, 0, 0].item() for points, _, _ in kept] == [0, 4, 8, 12, 16, 20]


def test_pin_memory_beside_it_is_an_error_that_says_so(standin, monkeypatch):
    """torch starts its thread only where there is a device: here it is started by hand."""
    from torch.utils.data._utils.pin_memory import _pin_memory_loop

    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    queue, out, over = shmtensor.Queue(ctx=FORK, device="cuda"), standard_queue.Queue(), threading.Event()
    thread = threading.Thread(target=_pin_memory_loop, args=(queue, out, 0, over, "cuda"), daemon=True)
    said = []
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(args.exc_value))
    queue.put((0, make(1)))
    thread.start()
    thread.join(LONG)
    assert isinstance(said[0], shmtensor.ArgumentError)
    assert "drop pin_memory=True" in str(said[0])
    queue.close()


# --- the executor


def work(number, count=ELEMENTS):
    return {"x": make(number, count), "plain": number, "array": np.full(3, number)}


@pytest.mark.parametrize("count", [10, ELEMENTS])
def test_results_arrive_on_the_device(standin, count):
    with shmtensor.ProcessPoolExecutor(2, mp_context=FORK, device="cuda") as pool:
        futures = [pool.submit(work, number, count) for number in range(8)]
        for number, future in enumerate(futures):
            result = future.result(LONG)
            assert on_device(result["x"])
            assert held(standin, result["x"]) == [number] * count
            assert (result["plain"], result["array"].tolist()) == (number, [number] * 3)
        assert list(pool.map(abs, [-1, 2])) == [1, 2]


def test_a_result_is_safe_on_every_stream_on_which_it_is_asked_for(standin):
    standin.polls = None
    with shmtensor.ProcessPoolExecutor(1, mp_context=FORK, device="cuda") as pool:
        future = pool.submit(work, 5)
        for stream in (standin.new_stream(0), standin.new_stream(0)):
            with standin.on(stream):
                tensor, seen = future.result(LONG)["x"], []
                standin.enqueue(lambda tensor=tensor, seen=seen: seen.append(standin.host(tensor)[0].item()))
            assert seen == []
            standin.synchronize(stream)
            assert seen == [5]


def test_a_copy_that_fails_fails_its_own_future(standin):
    with shmtensor.ProcessPoolExecutor(1, mp_context=FORK, device="cuda") as pool:
        standin.refuse_memory = 2
        with pytest.raises(shmtensor.CudaError, match="cannot allocate"):
            pool.submit(work, 1).result(LONG)
        standin.refuse_memory = 0
        assert held(standin, pool.submit(work, 2).result(LONG)["x"])[0] == 2


def test_results_outlive_their_executor(standin):
    standin.polls = None
    with shmtensor.ProcessPoolExecutor(1, mp_context=FORK, device="cuda") as pool:
        result = pool.submit(work, 6).result(LONG)["x"]
    assert held(standin, result) == [6] * ELEMENTS


# --- without CUDA


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "call",
    [
        lambda: shmtensor.get_context("fork", device="cuda"),
        lambda: shmtensor.Queue(device="cuda"),
        lambda: shmtensor.SimpleQueue(device="cuda"),
        lambda: shmtensor.JoinableQueue(device="cuda"),
        lambda: shmtensor.ProcessPoolExecutor(1, device="cuda"),
    ],
)
def test_without_cuda_it_is_said_what_is_missing(call):
    with pytest.raises(shmtensor.CudaError, match="CUDA"):
        call()


def test_another_device_is_refused(standin):
    for device in ("cpu", "cuda:1"):
        with pytest.raises(shmtensor.ArgumentError, match="device="):
            shmtensor.get_context("fork", device=device)
