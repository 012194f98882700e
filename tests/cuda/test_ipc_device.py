"""Rings in device memory on a real device: the sentences of tests/cuda/test_ipc.py. `python -m tests.cuda.session`."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import wait

import pytest

import shmtensor

from ..waiting import wait_until

PATIENCE = 120.0
WORDS = 1 << 20
SLEEP = 200_000_000  # cycles: about a tenth of a second, in which what runs too early would be seen

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here: run these on a machine that has one"
    ),
]


def filled(number):
    return torch.full((WORDS,), number, dtype=torch.int64, device="cuda")


def number(tensor):
    low, high = int(tensor.min()), int(tensor.max())
    return low if low == high else (low, high)


def write(pipe, channel, count, slow, options):
    """Publish numbered messages, each computed by a kernel that comes after a slow one; end when told to."""
    pub = shmtensor.Publisher(channel, device="cuda", **options)
    pub.wait_for_subscribers(1, timeout=PATIENCE)
    for n in range(1, count + 1):
        if slow:
            torch.cuda._sleep(SLEEP)
        pub.send(filled(n), timeout=PATIENCE)
    pipe.send("sent")
    pipe.recv()


def read(pipe, channel, count, slow):
    """Take messages and compute on each, late; tell the numbers that the device saw."""
    sub = shmtensor.Subscriber(channel)
    pipe.send("joined")
    sums = []
    for _ in range(count):
        value = sub.recv(timeout=PATIENCE).value
        if slow:
            torch.cuda._sleep(SLEEP)
        sums.append((value.min(), value.max()))
        del value
    pipe.send([(int(low), int(high)) for low, high in sums])
    if pipe.recv() == "hold":
        held = [sub.recv(timeout=PATIENCE).value]
        pipe.send(len(held))
        pipe.recv()


def read_blind(pipe, channel):
    """A process that sees no device: it was started so, since importing this module asks for one."""
    sub = shmtensor.Subscriber(channel)
    pipe.send("joined")
    try:
        sub.recv(timeout=PATIENCE)
    except shmtensor.CudaError as error:
        pipe.send(str(error))


@contextlib.contextmanager
def other(target, *args):
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, mine
    finally:
        with contextlib.suppress(OSError):
            mine.send("end")
        process.join(PATIENCE)
        alive = process.is_alive()
        process.kill()
        process.join()
        mine.close()
        assert not alive, "hangs"


def hear(pipe):
    assert wait([pipe], PATIENCE), "the other process is silent"
    return pipe.recv()


def gone(*endpoints):
    gc.collect()
    wait_until(lambda: all("views alive" not in repr(endpoint) for endpoint in endpoints))


def test_messages_of_another_process_are_read_after_they_are_written(channel):
    with shmtensor.Subscriber(channel) as sub, other(write, channel, 5, True, {"slots": 3}) as (process, pipe):
        got = []
        for _ in range(5):
            value = sub.recv(timeout=PATIENCE).value
            assert value.is_cuda
            got.append((value.min(), value.max()))
            del value
        assert [(int(low), int(high)) for low, high in got] == [(n, n) for n in range(1, 6)]
        assert hear(pipe) == "sent"
        pipe.send("end")
        process.join(PATIENCE)
        assert process.exitcode == 0
    gone(sub)


def test_slots_are_written_again_after_they_were_read(channel):
    pub = shmtensor.Publisher(channel, device="cuda", slots=1)
    with other(read, channel, 5, True) as (_, pipe):
        assert hear(pipe) == "joined"
        for n in range(1, 6):
            pub.send(filled(n), timeout=PATIENCE)
        assert hear(pipe) == [(n, n) for n in range(1, 6)]
    pub.close()
    gone(pub)


def test_in_one_process_tensors_are_the_slot(channel):
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        weight = torch.rand(64, 32, device="cuda")
        pub.send({"a": weight, "b": weight.t(), "c": torch.arange(3), "d": weight.bfloat16()}, meta={"n": 1})
        msg = sub.recv(timeout=PATIENCE)
        assert torch.equal(msg.value["a"], weight)
        assert torch.equal(msg.value["d"], weight.bfloat16())
        assert msg.value["a"].data_ptr() == msg.value["b"].data_ptr()
        assert msg.value["c"].tolist() == [0, 1, 2]
        copied = msg.copy()
        assert copied["a"].is_cuda
        assert copied["a"].data_ptr() != msg.value["a"].data_ptr()
        with pub.loan((WORDS,), torch.int64) as loan:
            loan.tensor.fill_(7)
        assert number(sub.recv(timeout=PATIENCE).value) == 7
        del msg, copied
    gone(pub, sub)


def test_a_dead_readers_slots_come_back(channel):
    pub = shmtensor.Publisher(channel, device="cuda", slots=2)
    with other(read, channel, 1, False) as (process, pipe):
        assert hear(pipe) == "joined"
        pub.send(filled(1))
        pub.send(filled(2))
        assert hear(pipe) == [(1, 1)]
        pipe.send("hold")
        assert hear(pipe) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        with shmtensor.Subscriber(channel) as sub:
            for n in (3, 4, 5):
                pub.send(filled(n), timeout=PATIENCE)
                assert number(sub.recv(timeout=PATIENCE).value) == n
    pub.close()
    gone(pub)


def test_a_dead_publisher_is_said(channel):
    with shmtensor.Subscriber(channel) as sub, other(write, channel, 2, False, {}) as (process, pipe):
        assert hear(pipe) == "sent"
        assert number(sub.recv(timeout=PATIENCE).value) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        with pytest.raises(shmtensor.PeerDied):
            sub.recv(timeout=PATIENCE)
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv(timeout=PATIENCE)
    gone(sub)


def test_a_publishers_process_waits_for_its_readers(channel):
    with shmtensor.Subscriber(channel) as sub, other(write, channel, 1, False, {}) as (process, pipe):
        assert hear(pipe) == "sent"
        value = sub.recv(timeout=PATIENCE).value
        pipe.send("end")
        process.join(2.0)
        assert process.exitcode is None
        assert number(value) == 1
        del value
        process.join(PATIENCE)
        assert process.exitcode == 0
    gone(sub)


def test_a_process_without_the_device_is_told_so(channel, monkeypatch):
    pub = shmtensor.Publisher(channel, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with other(read_blind, channel) as (_, pipe):
        assert hear(pipe) == "joined"
        pub.send(filled(1))
        assert "CUDA" in hear(pipe)
    pub.close()
    gone(pub)
