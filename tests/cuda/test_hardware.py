"""The sentences of cuda/test_copies.py, cuda/test_deaths.py and cuda/test_runtime.py on a real device.

`python -m tests.cuda.session` runs them: docs/internals/cuda-verified.md.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading

import pytest
import torch

import shmtensor
from shmtensor.cuda import runtime as cuda

LONG = 120
MIB = 1 << 20

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]
KINDS = pytest.mark.parametrize("kind", ["fanout", "work"])


def pair(channel, kind="fanout", pin="auto", receiver=(), **options):
    ends = {"fanout": ("Publisher", "Subscriber"), "work": ("Producer", "Consumer")}[kind]
    tx, rx = (getattr(shmtensor, end) for end in ends)
    taker = rx(channel, pin=pin, **dict(receiver))
    return tx(channel, pin=pin, **options), taker


def spin(milliseconds=1000):
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_the_runtime_starts():
    found = cuda.runtime()
    assert found.device("cuda") == found.current_device()
    assert found.identity(0)


@KINDS
@pytest.mark.parametrize("pin", [True, False, "auto"])
def test_there_and_back(channel, kind, pin):
    tx, rx = pair(channel, kind, pin)
    with tx, rx:
        value = {"x": torch.randn(3, MIB, device="cuda"), "odd": torch.arange(24.0, device="cuda").view(4, 6)[:, ::2]}
        tx.send({**value, "host": torch.arange(4), "id": 7})
        msg = rx.recv(timeout=LONG)
        assert msg.value["x"].equal(value["x"].cpu())
        moved = msg.to("cuda")
        assert moved["x"].equal(value["x"])
        assert moved["odd"].equal(value["odd"])
        assert moved["host"].tolist() == [0, 1, 2, 3]
        for statistics in (tx.statistics(), rx.statistics()):
            assert (statistics.pinned_bytes > 0) == (pin is not False)
            assert statistics.pin_failure == ""
        del msg
    tx = rx = None
    gc.collect()


@KINDS
def test_a_slot_is_leased_until_the_copy_is_done(channel, kind):
    tx, rx = pair(channel, kind, slots=1)
    with tx, rx:
        tx.send(torch.ones(MIB))
        msg = rx.recv(timeout=LONG)
        msg.to("cuda")  # pinned from here on
        spin()
        moved = msg.to("cuda", non_blocking=True)
        msg.release()
        del msg
        assert rx.statistics().leases == 1
        with pytest.raises(shmtensor.RingFull):
            tx.send(torch.zeros(MIB), timeout=0)
        torch.cuda.synchronize()
        assert rx.statistics().leases == 0
        tx.send(torch.zeros(MIB), timeout=LONG)
        assert moved.eq(1).all()
        rx.recv(timeout=LONG).release()


@KINDS
def test_a_message_is_published_after_the_callers_stream(channel, kind):
    tx, rx = pair(channel, kind)
    with tx, rx, torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(MIB, device="cuda")
        spin()
        tensor.fill_(3)
        tx.send(tensor)
        tensor.fill_(4)
        msg = rx.recv(timeout=LONG)
        assert msg.value.eq(3).all()
        del msg


def test_a_task_sends_without_holding_up_the_loop(channel):
    async def main():
        tx, rx = pair(channel)
        async with tx, rx:
            await tx.asend(torch.zeros(MIB, device="cuda"))  # the ring is there and pinned from here on
            (await rx.arecv(timeout=LONG)).release()
            tensor = torch.ones(MIB, device="cuda")
            spin()
            task, turns = asyncio.create_task(tx.asend(tensor)), 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 3
            msg = await rx.arecv(timeout=LONG)
            assert msg.value.eq(1).all()
            del msg

    asyncio.run(main())


@KINDS
def test_messages_are_copied_ahead(channel, kind):
    tx, rx = pair(channel, kind, receiver={"device": "cuda", "prefetch": 2}, slots=8)
    with tx, rx:
        for number in range(8):
            tx.send({"x": torch.full((MIB,), float(number))})
        sums = [rx.recv(timeout=LONG).value["x"].sum() for _ in range(8)]
        assert [total.item() / MIB for total in sums] == list(range(8))


def test_registrations_end_before_the_mapping(channel):
    """Else the driver would refuse the next mapping that comes to lie there."""
    for size in (1000, 10_000, 1000):
        tx, rx = pair(channel, pin=True)
        with tx, rx:
            tx.send(torch.full((size,), 2.0, device="cuda"))
            msg = rx.recv(timeout=LONG)
            assert msg.to("cuda", non_blocking=True).sum().item() == 2 * size
            del msg
        del tx, rx
        gc.collect()


def test_a_forked_child_is_told(channel):
    torch.zeros(1, device="cuda")
    child = os.fork()
    if not child:
        try:
            cuda.runtime()
        except shmtensor.CudaError as error:
            os._exit(42 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def _share(pipe):
    found = cuda.runtime()
    address = found.allocate(2 * MIB, 0)  # a multiple of 2 MiB, as rings are: CUDA puts less beside other memory
    tensor, event = found.tensor_at(address, 2 * MIB, 0, None), found.new_event(0, interprocess=True)
    tensor.fill_(7)
    found.record(event, found.current_stream(0))
    pipe.send((found.memory_handle(address, 0), found.event_handle(event)))
    pipe.recv()
    del tensor
    found.free(address, 0)


def test_device_memory_and_events_are_shared():
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_share, args=(theirs,))
    process.start()
    assert mine.poll(LONG)
    memory, event = mine.recv()
    found = cuda.runtime()
    address = found.open_memory(memory, 0)
    found.stream_waits(found.current_stream(0), found.open_event(event, 0))
    tensor = found.tensor_at(address, 2 * MIB, 0, None)
    assert tensor.eq(7).all()
    del tensor
    found.close_memory(address, 0)
    mine.send(None)
    process.join(LONG)
    assert process.exitcode == 0
    process.close()


def test_nothing_is_queued_while_a_graph_is_captured(channel):
    """It is said, the capture goes on, and nothing is lost."""
    tx, rx = pair(channel, slots=2)
    with tx, rx:
        tx.send(torch.ones(MIB))
        msg = rx.recv(timeout=LONG)
        msg.to("cuda")
        source, target = torch.full((MIB,), 5.0, device="cuda"), torch.zeros(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(source)
            with pytest.raises(shmtensor.CudaError, match="graph is being captured"):
                msg.to("cuda", non_blocking=True)
            with pytest.raises(shmtensor.CudaError, match="graph is being captured"):
                tx.send(source)
        graph.replay()
        assert target.eq(5).all()
        assert msg.to("cuda").eq(1).all()
        del msg
        tx.send(source, timeout=LONG)
        assert rx.recv(timeout=LONG).value.eq(5).all()


def test_a_capture_does_not_notice_that_another_thread_asks_for_events(channel):
    found = cuda.runtime()
    event, stream, stop, errors = found.new_event(0), found.new_stream(0), threading.Event(), []
    asked = threading.Event()

    def ask():
        try:
            while not stop.is_set():
                found.record(event, stream)
                found.is_done(event)
                found.wait(event)
                asked.set()
        except shmtensor.CudaError as error:
            errors.append(error)
            asked.set()

    target = torch.zeros(MIB, device="cuda")
    found.record(event, stream)
    torch.cuda.synchronize()
    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=ask)
    with torch.cuda.graph(graph):
        thread.start()
        assert asked.wait(LONG)
        target.add_(1)
        stop.set()
        thread.join(LONG)
    assert errors == []
    graph.replay()
    assert target.eq(1).all()


def _take(channel, pipe):
    rx = shmtensor.Consumer(channel, device="cuda", prefetch=1)
    rx.recv(timeout=LONG)
    torch.cuda.synchronize()
    with torch.cuda.stream(rx._devices.stream(0)):  # the receiver's own: its next copy waits behind this
        torch.cuda._sleep(10**10)
    msg = rx.recv(timeout=LONG)
    pipe.send([msg.meta["n"], rx.statistics().copying])
    signal.pause()


def test_a_process_dies_with_a_copy_on_its_way(channel):
    tx = shmtensor.Producer(channel, slots=4)
    for number in range(4):
        tx.send(torch.full((MIB,), float(number)), meta={"n": number})
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_take, args=(channel, theirs))
    process.start()
    assert mine.poll(LONG)
    assert mine.recv() == [1, 1]  # the second is handed out, the copy of the third is on its way
    process.kill()
    process.join()
    process.close()
    with shmtensor.Consumer(channel, device="cuda") as rx:
        got = {}
        for _ in range(3):
            with rx.recv(timeout=LONG) as msg:
                assert msg.value.eq(msg.meta["n"]).all()
                got[msg.meta["n"]] = msg.attempt
        assert got == {1: 2, 2: 2, 3: 1}
    tx.close()


def test_the_doctor_pins_both_kinds_of_mapping():
    from shmtensor.cli import doctor

    found = [(each.status, each.value) for each in doctor.torch() if each.name.startswith("CUDA")]
    assert [status for status, _ in found] == ["ok"] * len(found), found
