"""Endpoints and a CUDA device, with the stand-in: no slot is published, reused or unmapped before its event."""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import multiprocessing
import os
import signal
import weakref

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.cuda import copies
from shmtensor.endpoints import wait_queue
from shmtensor.memory.segment import PAGE

from ..faults.interrupts import interrupted
from ..waiting import once
from .standin import DeviceTensor, installed

LONG = 120


def pair(channel, kind="fanout", **options):
    receiver = {name: options.pop(name) for name in ("device", "prefetch", "acknowledge") if name in options}
    pin = options.get("pin", "auto")
    if kind != "work":
        sub = shmtensor.Subscriber(channel, pin=pin, group="them" if kind == "group" else None, **receiver)
        return shmtensor.Publisher(channel, **options), sub
    rx = shmtensor.Consumer(channel, pin=pin, **receiver)
    return shmtensor.Producer(channel, **options), rx


KINDS = pytest.mark.parametrize("kind", ["fanout", "work"])


# --- to a device


@KINDS
def test_a_slot_is_leased_until_the_copy_is_done(lazy, channel, kind):
    tx, rx = pair(channel, kind, slots=1)
    with tx, rx:
        tx.send(torch.arange(1000.0))
        msg = rx.recv(timeout=LONG)
        moved = msg.to("cuda", non_blocking=True)
        msg.release()
        del msg
        assert lazy.host_waits == 0
        assert rx.statistics().leases == rx.statistics().copying == 1
        with pytest.raises(shmtensor.RingFull):
            tx.send(torch.zeros(1000), timeout=0)
        lazy.run_all()
        assert rx.statistics().leases == rx.statistics().copying == 0
        assert lazy.host(moved).equal(torch.arange(1000.0))
        tx.send(torch.zeros(1000), timeout=0)
        assert lazy.host(moved).equal(torch.arange(1000.0))
        rx.recv(timeout=LONG).release()


def test_a_blocking_copy_is_done_on_return(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(torch.arange(10))
        msg = rx.recv(timeout=LONG)
        moved = msg.to("cuda:0")
        assert moved.device == torch.device("cuda", 0)
        assert lazy.host(moved).equal(torch.arange(10))
        assert rx.statistics().copying == 0
        del msg


def test_a_tree_goes_in_one_call_with_one_event(lazy, channel):
    whole = torch.arange(24.0).view(4, 6)
    value = {
        "a": torch.arange(5, dtype=torch.int16), "tied": [whole, whole[1:3].t()], "n": 7, "none": torch.empty(0, 3),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "flags": torch.tensor([True, False]),
        "array": np.arange(3), "scalar": torch.tensor(2.5),
    }  # fmt: skip
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(value)
        msg = rx.recv(timeout=LONG)
        moved = msg.to("cuda", non_blocking=True)
        assert rx._devices.poll() == 1
        array = moved.pop("array")
        assert isinstance(array, np.ndarray)  # stays a view of the slot
        lazy.run_all()
        assert rx.statistics().leases == 1
        for name in ("a", "last", "flags", "scalar", "none"):
            assert lazy.host(moved[name]).equal(value[name]), name
            assert isinstance(moved[name], DeviceTensor)
            assert moved[name].stride() == value[name].stride()
            assert moved[name].dtype == value[name].dtype
        assert moved["n"] == 7
        first, second = moved["tied"]
        assert lazy.host(second).equal(whole[1:3].t())
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        del msg, array


def test_a_private_message_is_copied_pageably(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send({"x": torch.arange(10), "y": torch.ones(3)})
        msg = rx.recv(timeout=LONG, copy=True)
        moved = msg.to("cuda", non_blocking=True)
        assert lazy.pageable_copies == 2
        assert lazy.host(moved["x"]).equal(torch.arange(10))


def test_a_receiver_that_waits_looks_at_its_copies(standin, channel):
    """The sender has no slot before the receiver, inside `recv`, sees that the copy is done."""
    standin.polls = 5
    tx, rx = pair(channel, slots=1)
    with tx, rx:
        tx.send(torch.ones(8))
        moved = rx.recv(timeout=LONG).to("cuda", non_blocking=True)
        with once(lambda: True, lambda: tx.send(torch.zeros(8), timeout=LONG)):
            rx.recv(timeout=LONG).release()
        assert standin.host(moved).equal(torch.ones(8))


def test_a_task_that_waits_looks_at_its_copies(standin, channel):
    async def main():
        standin.polls = 5
        tx, rx = pair(channel, slots=1)
        async with tx, rx:
            await tx.asend(torch.ones(8))
            moved = (await rx.arecv(timeout=LONG)).to("cuda", non_blocking=True)
            waiting = asyncio.create_task(rx.arecv(timeout=LONG))
            await tx.asend(torch.zeros(8), timeout=LONG)
            (await waiting).release()
            assert standin.host(moved).equal(torch.ones(8))

    asyncio.run(main())


def test_the_time_of_a_task_that_looks_at_its_copies_is_that_of_the_call(lazy, channel, monkeypatch):
    """What remains when it stops looking, because the time is up, is nothing."""
    remaining, attend = [], wait_queue.WaitQueue.attend

    async def noted(self, attempt, look, timeout, waiter=None):
        remaining.append(timeout)
        return await attend(self, attempt, look, timeout, waiter)

    monkeypatch.setattr(wait_queue.WaitQueue, "attend", noted)

    async def main():
        tx, rx = pair(channel)
        async with tx, rx:
            tx.send(torch.ones(8))
            moved = rx.recv(timeout=LONG).to("cuda", non_blocking=True)
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0.05)
            assert remaining == [0]
            lazy.run_all()
            assert lazy.host(moved).equal(torch.ones(8))

    asyncio.run(main())


def test_closing_waits_for_copies(lazy, channel):
    tx, rx = pair(channel)
    tx.send(torch.arange(100))
    moved = rx.recv(timeout=LONG).to("cuda", non_blocking=True)
    rx.close()
    assert lazy.host_waits == 1
    assert lazy.host(moved).equal(torch.arange(100))
    tx.close()


def test_an_endpoint_that_is_dropped_lives_until_its_copies_are_done(lazy, channel):
    tx, rx = pair(channel, slots=1)
    tx.send(torch.arange(100))
    moved, found = rx.recv(timeout=LONG).to("cuda", non_blocking=True), weakref.ref(rx)
    del rx
    gc.collect()
    assert found() is not None
    with pytest.raises(shmtensor.RingFull):
        tx.send(torch.zeros(100), timeout=0)
    lazy.run_all()
    found()._devices.poll()
    gc.collect()
    assert found() is None
    assert lazy.host(moved).equal(torch.arange(100))
    tx.send(torch.zeros(100), timeout=LONG)
    tx.close()


def test_no_memory_on_the_device(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(torch.arange(100))
        msg = rx.recv(timeout=LONG)
        lazy.refuse_memory = 2
        with pytest.raises(shmtensor.CudaError, match="cudaErrorMemoryAllocation"):
            msg.to("cuda")
        lazy.refuse_memory = 0
        assert lazy.host(msg.to("cuda")).equal(torch.arange(100))
        del msg


def test_other_devices_and_nonsense(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send({"t": torch.ones(2), "a": np.ones(2)})
        msg = rx.recv(timeout=LONG)
        assert msg.to("cpu")["t"].data_ptr() == msg.value["t"].data_ptr()
        assert msg.to("meta")["t"].device.type == "meta"
        with pytest.raises(shmtensor.ArgumentError, match="1 CUDA devices"):
            msg.to("cuda:3")
        with pytest.raises(shmtensor.ArgumentTypeError, match="nonsense"):
            msg.to("nonsense")
        del msg


MISSING = "built without CUDA" if torch.version.cuda is None else "no usable CUDA device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_each_call_says_what_is_missing(channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(torch.ones(2))
        msg = rx.recv(timeout=LONG)
        with pytest.raises(shmtensor.CudaError, match=MISSING):
            msg.to("cuda", non_blocking=True)
        del msg
    with pytest.raises(shmtensor.CudaError, match=MISSING):
        shmtensor.Subscriber(channel, device="cuda")


# --- pinning


@KINDS
@pytest.mark.parametrize("read_only", [False, True], ids=["alias", "read-only"])
def test_rings_are_pinned_at_the_first_copy_and_unpinned_before_they_go(lazy, channel, kind, read_only):
    lazy.read_only = read_only
    tx, rx = pair(channel, kind)
    with tx, rx:
        tx.send(torch.arange(5000.0))
        msg = rx.recv(timeout=LONG)
        assert rx.statistics().pinned_bytes == lazy.registrations == 0
        moved = msg.to("cuda")
        assert rx.statistics().pinned_bytes == sum(lazy.registered.values()) > 5000 * 4
        msg.to("cuda")
        assert (lazy.registrations, lazy.pageable_copies) == (1, 0)
        assert lazy.host(moved).equal(torch.arange(5000.0))
        keep = msg.value[3:]
        del msg
    tx = rx = None
    gc.collect()
    assert len(lazy.registered) == 1, "a view keeps its mapping, and a mapping its registration"
    assert keep[0] == 3
    del keep
    gc.collect()
    assert lazy.registered == {}


def test_large_rings_are_pinned_in_pieces_and_copies_cut(lazy, channel, monkeypatch):
    monkeypatch.setattr(copies, "PIECE", 4 * PAGE)
    value = torch.randint(0, 255, (6 * PAGE,), dtype=torch.uint8)
    tx, rx = pair(channel, slots=4, slot_bytes=3 * PAGE)
    with tx, rx:
        tx.send(lazy.tensor(value))
        assert tx.statistics().pinned_bytes == 8 * PAGE
        msg = rx.recv(timeout=LONG)
        assert msg.value.equal(value)
        moved = msg.to("cuda")
        assert lazy.host(moved).equal(value)
        assert rx.statistics().pinned_bytes == 8 * PAGE
        assert set(lazy.registered.values()) == {4 * PAGE}
        assert lazy.pageable_copies == 0
        del msg


def test_a_piece_that_cannot_be_unregistered_keeps_no_other(lazy, channel, monkeypatch):
    monkeypatch.setattr(copies, "PIECE", PAGE)
    unregister, asked = lazy.unregister_host, []

    def unlucky(address, device):
        asked.append(address)
        unregister(address, device)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tx, rx = pair(channel, slot_bytes=3 * PAGE)
    with tx, rx:
        tx.send(lazy.tensor(torch.ones(3 * PAGE, dtype=torch.uint8)))
        assert len(lazy.registered) == 3
        monkeypatch.setattr(lazy, "unregister_host", unlucky)
    del tx, rx
    gc.collect()
    assert (len(asked), lazy.registered) == (3, {})


def test_an_interrupted_release_is_finished_with_the_memory(lazy, monkeypatch):
    """At each boundary: the pieces that are left are unregistered before their memory goes."""
    monkeypatch.setattr(copies, "PIECE", PAGE)
    monkeypatch.setattr(lazy, "unregister_host", lambda address, device: lazy.registered.pop(address, None))
    at, attempt = 1, None
    while attempt is None or attempt.reached:
        memory = mmap.mmap(-1, 3 * PAGE)
        block = np.frombuffer(memory, np.uint8)
        buffer = memoryview(block)
        made = copies.Pinning(buffer, block.ctypes.data, writable=True)
        made.parts(buffer, 0, 3 * PAGE, 0)
        assert len(lazy.registered) == 3
        attempt = interrupted(made.release, at)
        del made, buffer, block
        gc.collect()
        assert lazy.registered == {}, attempt
        memory.close()
        at += 1
    assert at > 10


def test_a_ring_that_is_added_is_pinned_as_well(lazy, channel):
    tx, rx = pair(channel, slots=2)
    with tx, rx:
        for size in (10, 100_000):
            tx.send(lazy.tensor(torch.full((size,), 2.0)))
            msg = rx.recv(timeout=LONG)
            assert lazy.host(msg.to("cuda")).equal(torch.full((size,), 2.0))
            del msg
        assert tx.statistics().rings == 2
        assert len(lazy.registered) == 4
        assert lazy.pageable_copies == 0


def test_a_refused_registration_falls_back_and_is_told(lazy, channel):
    lazy.refuse_registration = 2
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(lazy.tensor([1, 2, 3]))
        msg = rx.recv(timeout=LONG)
        assert lazy.host(msg.to("cuda", non_blocking=True)).tolist() == [1, 2, 3]
        for statistics in (tx.statistics(), rx.statistics()):
            assert statistics.pinned_bytes == 0
            assert "CUDA error 2 (cudaErrorMemoryAllocation)" in statistics.pin_failure
        assert (lazy.pinned_copies, lazy.pageable_copies) == (0, 2)
        del msg


def test_pin_true_is_an_error_and_pin_false_never_tries(lazy, channel):
    lazy.refuse_registration = 2
    tx, rx = pair(channel, pin=True, slots=1)
    with tx, rx:
        with pytest.raises(shmtensor.CudaError, match=r'pin=True, and ring 0 cannot be pinned.*pin="auto"'):
            tx.send(lazy.tensor([1, 2, 3]))
        lazy.run_all()  # what was put into the stream before the failure
        tx.send(torch.tensor([1, 2, 3]), timeout=LONG)  # the slot is free again
        msg = rx.recv(timeout=LONG)
        assert msg.seq == 1
        with pytest.raises(shmtensor.CudaError, match="pin=True"):
            msg.to("cuda")
        del msg
    lazy.refuse_registration = 0
    tx, rx = pair(channel, pin=False)
    with tx, rx:
        tx.send(lazy.tensor([1, 2, 3]))
        msg = rx.recv(timeout=LONG)
        assert lazy.host(msg.to("cuda", non_blocking=True)).tolist() == [1, 2, 3]
        assert (lazy.registrations, lazy.pinned_copies) == (0, 0)
        assert rx.statistics().pin_failure == ""
        del msg
    with pytest.raises(shmtensor.ArgumentError, match="pin='yes'"):
        shmtensor.Publisher(channel, pin="yes")


def test_a_forked_child_unregisters_nothing(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        tx.send(torch.arange(10))
        msg = rx.recv(timeout=LONG)
        moved = msg.to("cuda", non_blocking=True)
        child = os.fork()
        if not child:
            before = dict(lazy.registered)
            del tx, rx, msg
            gc.collect()
            os._exit(lazy.registered != before or bool(lazy.violations))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rx.statistics().copying == 1
        del msg
        lazy.run_all()
        assert rx.statistics().leases == 0
        assert lazy.host(moved).equal(torch.arange(10))


# --- from a device


def later(lazy, size, number):
    """A tensor on the device that the caller's stream is still to fill."""
    tensor = lazy.tensor(torch.zeros(size))
    lazy.enqueue(lambda: tensor.fill_(number))
    return tensor


@KINDS
def test_a_message_is_published_after_the_callers_stream_and_the_copy(lazy, channel, kind):
    tx, rx = pair(channel, kind)
    with tx, rx:
        value = {"x": later(lazy, 1000, 3.0), "host": torch.arange(4), "odd": later(lazy, (4, 6), 5.0)[:, ::2], "id": 7}
        assert tx.send(value, meta={"k": 1}) == 1
        msg = rx.recv(timeout=LONG)
        assert msg.value["x"].eq(3).all()
        assert msg.value["odd"].eq(5).all()
        assert msg.value["odd"].shape == (4, 3)
        assert msg.value["host"].tolist() == [0, 1, 2, 3]
        assert (msg.value["id"], msg.meta) == (7, {"k": 1})
        assert lazy.pageable_copies == 0
        del msg


def test_tied_tensors_of_a_device_stay_tied(lazy, channel):
    tx, rx = pair(channel)
    with tx, rx:
        whole = later(lazy, (4, 6), 2.0)
        tx.send([whole, whole[1:3], whole.t()])
        msg = rx.recv(timeout=LONG)
        a, b, c = msg.value
        assert a.eq(2).all()
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
        assert msg.nbytes == 4 * 24
        del msg, a, b, c


def test_a_failed_copy_is_never_published(lazy, channel):
    tx, rx = pair(channel, slots=1)
    with tx, rx:
        lazy.fail_copies = 700
        with pytest.raises(shmtensor.CudaError, match="cudaErrorIllegalAddress") as raised:
            tx.send(lazy.tensor([1, 2, 3]))
        assert raised.value.number == 700
        assert tx.statistics().sent == 0
        with pytest.raises(TimeoutError):
            rx.recv(timeout=0)
        assert tx.send(torch.ones(3), timeout=LONG) == 1  # its slot came back
        assert rx.recv(timeout=LONG).seq == 1


def test_a_task_sends_without_holding_up_the_loop(standin, channel):
    async def main():
        standin.polls = 20
        tx, rx = pair(channel, slots=4)
        async with tx, rx:
            first = asyncio.create_task(tx.asend({"x": later(standin, 1000, 1.0)}))
            second = asyncio.create_task(tx.asend({"x": later(standin, 10, 2.0)}))
            turns = 0
            while not first.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 3
            assert standin.host_waits == 0
            assert (await first, await second) == (1, 2)
            for number in (1.0, 2.0):
                msg = await rx.arecv(timeout=LONG)
                assert msg.value["x"].eq(number).all()
                del msg

    asyncio.run(main())


def test_a_cancelled_task_sends_nothing_and_its_slot_waits_for_the_device(lazy, channel):
    async def main():
        tx, rx = pair(channel, slots=1)
        async with tx, rx:
            task = asyncio.create_task(tx.asend(later(lazy, 1000, 1.0)))
            while not tx.statistics().copying:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            with pytest.raises(shmtensor.RingFull):
                tx.send(torch.zeros(1000), timeout=0)
            lazy.run_all()
            assert tx.send(torch.zeros(1000), timeout=0) == 1
            msg = await rx.arecv(timeout=LONG)
            assert msg.value.eq(0).all()
            del msg

    asyncio.run(main())


def test_what_a_closed_loop_has_left_holds_up_no_task(lazy, channel):
    tx, rx = pair(channel, slots=4)
    with tx, rx:
        loop = asyncio.new_event_loop()

        async def begun():
            while not tx.statistics().copying:
                await asyncio.sleep(0)

        left = loop.create_task(tx.asend(later(lazy, 100, 1.0)))
        left._log_destroy_pending = False
        loop.run_until_complete(begun())
        loop.close()
        lazy.run_all()

        async def main():
            sending = asyncio.create_task(tx.asend(later(lazy, 100, 2.0)))
            await begun()
            lazy.run_all()
            assert await asyncio.wait_for(sending, LONG) == 1

        asyncio.run(main())
        with rx.recv(timeout=LONG) as message:
            assert message.value.eq(2).all()
        del left, message
        gc.collect()  # the task of the closed loop ends
        assert tx.send(torch.zeros(1), timeout=LONG) == 2


def test_a_failed_copy_of_a_task_is_never_published(standin, channel):
    async def main():
        tx, rx = pair(channel, slots=1)
        async with tx, rx:
            standin.fail_copies = 719
            with pytest.raises(shmtensor.CudaError, match="cudaErrorLaunchFailure"):
                await tx.asend(standin.tensor([1, 2]))
            assert tx.statistics().sent == 0
            assert await tx.asend(torch.ones(2), timeout=LONG) == 1
            (await rx.arecv(timeout=LONG)).release()

    asyncio.run(main())


def test_closing_a_sender_ends_what_is_on_its_way(lazy, channel):
    async def main():
        tx, rx = pair(channel)
        async with tx, rx:
            task = asyncio.create_task(tx.asend(later(lazy, 100, 1.0)))
            while not tx.statistics().copying:
                await asyncio.sleep(0)
            await tx.aclose()
            assert lazy.waiting == 0
            with pytest.raises(shmtensor.ClosedError):
                await task
            with pytest.raises(shmtensor.EndOfStream):
                await rx.arecv(timeout=LONG)

    asyncio.run(main())


# --- ahead


@KINDS
def test_messages_are_copied_ahead(lazy, channel, kind):
    tx, rx = pair(channel, kind, slots=8, device="cuda", prefetch=2)
    with tx, rx:
        for number in range(5):
            tx.send({"x": torch.full((100,), number)})
        done = []
        for number in range(5):
            msg = rx.recv(timeout=LONG)
            x = msg.value["x"]
            lazy.enqueue(lambda x=x: done.append(int(lazy.host(x)[0])))  # the caller's stream comes after the copy
            assert rx.statistics().copying == min(number + 3, 5)
            del msg, x
        assert lazy.host_waits == 0
        lazy.run_all()
        assert done == [0, 1, 2, 3, 4]
        assert rx.statistics().copying == 0


@pytest.mark.parametrize("kind", ["work", "group"])
def test_a_message_on_the_device_is_done_when_it_is_released(lazy, channel, kind):
    tx, rx = pair(channel, kind, slots=8, device="cuda", acknowledge="release")
    with tx, rx:
        for number in range(2):
            tx.send(torch.full((100,), number))
        for number in range(2):
            msg = rx.recv(timeout=LONG)
            lazy.run_all()
            assert (int(lazy.host(msg.value)[0]), msg.attempt) == (number, 1)
            msg.release()
        with pytest.raises(TimeoutError):
            rx.recv(timeout=0)


def test_values_on_the_device_hold_no_slot(lazy, channel):
    tx, rx = pair(channel, slots=1, device="cuda")
    with tx, rx:
        tx.send(torch.arange(6))
        msg = rx.recv(timeout=LONG, copy=True)
        assert isinstance(msg.value, DeviceTensor)
        assert rx.statistics().leases == 1
        lazy.run_all()
        assert rx.statistics().leases == 0
        tx.send(torch.zeros(6, dtype=torch.int64), timeout=0)
        assert lazy.host(msg.value).equal(torch.arange(6))


def test_iterating_and_tasks_receive_on_the_device(standin, channel):
    async def main():
        tx, rx = pair(channel, slots=8, device="cuda", prefetch=1)
        async with rx:
            waiting = asyncio.create_task(rx.arecv(timeout=LONG))
            await asyncio.sleep(0)
            for number in range(4):
                await tx.asend(torch.full((8,), number))
            tx.close()
            values = [(await waiting).value] + [msg.value async for msg in rx]
            standin.run_all()
            assert [int(standin.host(value)[0]) for value in values] == [0, 1, 2, 3]

    asyncio.run(main())


def test_jobs_copied_ahead_and_not_handed_out_go_to_another(lazy, channel):
    tx, rx = pair(channel, "work", slots=8, device="cuda", prefetch=2)
    for number in range(3):
        tx.send(torch.tensor([number]))
    other = shmtensor.Consumer(channel)
    with rx.recv(timeout=LONG) as msg:
        assert lazy.host_waits == 0
        assert msg.attempt == 1
    with pytest.raises(TimeoutError):
        other.recv(timeout=0)  # claimed
    rx.close()
    for number in (1, 2):
        with other.recv(timeout=LONG) as msg:
            assert (msg.value.item(), msg.attempt) == (number, 2)
    for endpoint in (tx, other):
        endpoint.close()


def test_a_message_whose_copy_cannot_start_is_not_lost(lazy, channel):
    tx, rx = pair(channel, device="cuda")
    with tx, rx:
        tx.send(torch.tensor([5]))
        lazy.refuse_memory = 2
        with pytest.raises(shmtensor.CudaError, match="allocate"):
            rx.recv(timeout=LONG)
        lazy.refuse_memory = 0
        assert lazy.host(rx.recv(timeout=LONG).value) is not None
        assert rx.statistics().received == 1


def test_arguments_of_receiving_ahead(lazy, channel):
    with pytest.raises(shmtensor.ArgumentError, match="prefetch=2 copies ahead"):
        shmtensor.Subscriber(channel, prefetch=2)
    with pytest.raises(shmtensor.ArgumentError, match="latest"):
        shmtensor.Subscriber(channel, device="cuda", delivery="latest", prefetch=1)
    with pytest.raises(shmtensor.ArgumentError, match="no CUDA device"):
        shmtensor.Consumer(channel, device="cpu")


# --- death


def victim(channel, pipe, prefetch):
    with installed(polls=None):
        rx = shmtensor.Consumer(channel, device="cuda", prefetch=prefetch)
        msg = rx.recv(timeout=LONG)
        pipe.send([int(msg.meta["n"]), rx.statistics().copying])
        signal.pause()


def test_the_jobs_of_a_process_that_dies_with_copies_on_their_way(channel):
    tx = shmtensor.Producer(channel, slots=3)
    for number in range(3):
        tx.send(torch.tensor([number]), meta={"n": number})
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=victim, args=(channel, theirs, 1))
    process.start()
    assert mine.poll(LONG)
    assert mine.recv() == [0, 2]  # handed out one, copied one ahead
    with shmtensor.Consumer(channel) as rx:
        with rx.recv(timeout=LONG) as msg:
            assert msg.meta["n"] == 2
        process.kill()
        process.join()
        process.close()
        for number in (0, 1):
            with rx.recv(timeout=LONG) as msg:
                assert (msg.meta["n"], msg.attempt) == (number, 2)
        for _ in range(3):  # every slot came back
            tx.send(torch.zeros(1), timeout=LONG)
        for _ in range(3):
            rx.recv(timeout=LONG).release()
    tx.close()


def test_a_process_ends_with_copies_on_their_way(channel, tmp_path):
    """The interpreter waits for them at its end, and unregisters only then."""
    from ..package.test_layers import run_isolated

    source = f"""
import atexit, json, torch, shmtensor
from tests.cuda.standin import installed
from shmtensor.cuda.copies import finish_all
installing = installed(polls=None)
stand_in = installing.__enter__()
def tell():
    stand_in.run_all()
    said = stand_in.host_waits, len(stand_in.registered), stand_in.violations, int(stand_in.host(moved)[0])
    print(json.dumps(said))
atexit.unregister(finish_all)
atexit.register(tell)  # runs after it
atexit.register(finish_all)
tx, rx = shmtensor.Publisher({channel!r}), shmtensor.Subscriber({channel!r})
tx.send(torch.full((9,), 4))
moved = rx.recv(timeout=60).to("cuda", non_blocking=True)
keep = rx
"""
    assert json.loads(run_isolated(source)) == [1, 0, [], 4]


# --- doctor


def test_doctor_tells_about_pinning(standin):
    from shmtensor.cli import doctor

    def found():
        return [(it.status, it.value) for it in doctor.torch() if it.name.startswith("CUDA")]

    assert [status for status, _ in found()] == ["ok", "ok", "ok"]
    standin.refuse_registration = 801
    assert [status for status, _ in found()] == ["ok", "warn", "warn"]
    assert "801" in found()[1][1]
    gc.collect()
    assert standin.registered == {}
