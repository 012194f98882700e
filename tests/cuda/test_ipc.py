"""Rings in device memory: `Publisher(..., device="cuda")`, against the stand-in of tests/cuda/standin.py.

Streams run late here, and only when a test or a question makes them: bytes that are read, or written again, too early
are seen as wrong numbers. What needs a real device is in tests/cuda/test_ipc_device.py.
"""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
import torch

import shmtensor

from ..conftest import shared_files
from ..faults.process import crash_server
from ..scenes import unswept
from ..waiting import wait_until
from .peer import PATIENCE, Peer, _filled, _number

POINTS = ["device.allocated", "device.lent", "device.mapping", "device.taken"]
SENDER_POINTS = ["device.allocated", "send.copied", "publish.ordered", "publish.published", "device.lent"]
RECEIVER_POINTS = ["device.mapping", "device.taken", "take.leased"]


@pytest.fixture(scope="module")
def server():
    with crash_server("tests.cuda.standin") as context:
        yield context


@pytest.fixture
def peer(server):
    """Makes processes; those that a test did not kill end in good order."""
    peers = []

    def make(**options):
        peers.append(Peer(server, **options))
        return peers[-1]

    yield make
    for each in peers:
        each.finish()


def filled(cuda, number):
    return cuda.tensor(_filled(number))


def number(cuda, tensor):
    return _number(cuda.host(tensor))


def gone(*endpoints):
    """Wait until closed endpoints have left their channels."""
    gc.collect()
    wait_until(lambda: all("views alive" not in repr(endpoint) for endpoint in endpoints))


# --- one process


VALUES = {
    "plain": lambda on: on(torch.arange(24.0).reshape(2, 3, 4)),
    "0-d": lambda on: on(torch.tensor(7)),
    "bool": lambda on: on(torch.tensor([True, False, True])),
    "bfloat16": lambda on: on(torch.arange(9).to(torch.bfloat16)),
    "uint16": lambda on: on(torch.arange(9).to(torch.uint16)),
    "float8": lambda on: on(torch.arange(9.0).to(torch.float8_e4m3fn)),
    "complex": lambda on: on(torch.arange(4).to(torch.complex64) * 1j),
    "transposed": lambda on: on(torch.arange(12).reshape(3, 4)).t(),
    "not dense": lambda on: on(torch.arange(40).reshape(5, 8))[::2, 1::3],
    "channels last": lambda on: on(torch.rand(2, 3, 4, 5)).contiguous(memory_format=torch.channels_last),
    "empty": lambda on: on(torch.empty(0, 3)),
    "tree": lambda on: {"a": [on(torch.ones(3)), 1.5], "b": (on(torch.zeros(2, 2)), None, "text"), 3: {}},
    "many": lambda on: {f"layer.{i}.weight": on(torch.full((i + 1,), float(i))) for i in range(50)},
    "no tensor": lambda on: {"x": 1},
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_values_arrive_on_the_device_as_they_were(standin, channel, make):
    def on(tensor):
        return standin.tensor(tensor)

    def same(got, sent):
        if isinstance(sent, torch.Tensor):
            assert standin.device_of(got) == 0
            assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
            if sent.numel() and sent.is_contiguous(memory_format=torch.channels_last if sent.ndim == 4 else
                                                   torch.contiguous_format):  # fmt: skip
                assert got.stride() == sent.stride()
            assert torch.equal(*(standin.host(each).contiguous().reshape(-1).view(torch.uint8) for each in (got, sent)))
        elif isinstance(sent, dict):
            assert list(got) == list(sent)
            for key in sent:
                same(got[key], sent[key])
        elif isinstance(sent, (list, tuple)):
            assert type(got) is type(sent)
            for each in zip(got, sent, strict=True):
                same(*each)
        else:
            assert got == sent

    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        value = make(on)
        pub.send(value, meta={"k": [1, 2]})
        pub.send(value)
        for meta in ({"k": [1, 2]}, None):
            msg = sub.recv(timeout=PATIENCE)
            standin.run_all()
            same(msg.value, value)
            assert msg.meta == meta
            private = msg.copy()
            standin.run_all()
            same(private, value)
            del msg
    gone(pub, sub)


def test_tensors_are_the_slot(standin, channel):
    with shmtensor.Publisher(channel, device="cuda", slots=2) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(filled(standin, 1))
        ((start, (nbytes, _, _)),) = standin.device_memory.items()
        msg = sub.recv(timeout=PATIENCE)
        assert start <= msg.value.data_ptr() < start + nbytes
        assert not standin.opened  # a process does not open its own memory
        del msg
    gone(pub, sub)


def test_tied_tensors_share_memory_on_arrival(standin, channel):
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        weight = standin.tensor(torch.arange(12.0).reshape(3, 4))
        pub.send({"in": weight, "out": weight.t(), "row": weight[1]})
        msg = sub.recv(timeout=PATIENCE)
        standin.run_all()
        got = msg.value
        assert got["in"].data_ptr() == got["out"].data_ptr() == got["row"].data_ptr() - 16
        assert torch.equal(standin.host(got["out"]), standin.host(weight).t())
        copied = msg.copy()
        standin.run_all()
        assert copied["in"].data_ptr() == copied["out"].data_ptr() != got["in"].data_ptr()
        del msg, got
    gone(pub, sub)


def test_the_copy_waits_for_the_callers_stream_and_the_reader_for_the_copy(standin, channel):
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        tensor, seen = filled(standin, 1), []
        mine, theirs = standin.new_stream(0), standin.new_stream(0)
        with standin.on(mine):
            standin.enqueue(lambda: torch.Tensor.fill_(tensor.as_subclass(torch.Tensor), 2))
            pub.send(tensor)
        waits = standin.host_waits
        with standin.on(theirs):
            msg = sub.recv(timeout=PATIENCE)
            value = msg.value
            standin.enqueue(lambda value=value: seen.append(number(standin, value)))
        assert standin.host_waits == waits  # published, taken and computed on, and nobody has waited
        assert number(standin, value) != 2
        standin.run_all()
        assert seen == [2]
        del msg, value
    gone(pub, sub)


def test_what_lies_in_host_memory_is_copied_before_send_returns(standin, channel):
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        tensor = _filled(5)
        pub.send({"host": tensor, "device": filled(standin, 6)})
        tensor.fill_(0)
        value = sub.recv(timeout=PATIENCE).value
        standin.run_all()
        assert [number(standin, each) for each in value.values()] == [5, 6]
        del value
    gone(pub, sub)


def test_a_loan_is_a_tensor_on_the_device(standin, channel):
    with shmtensor.Publisher(channel, device="cuda", slots=1) as pub, shmtensor.Subscriber(channel) as sub:
        with pub.loan((256,), torch.int64, meta={"n": 1}) as loan:
            kept = loan.tensor
            target = kept.as_subclass(torch.Tensor)
            standin.enqueue(lambda target=target: target.fill_(9))
            del target
        msg = sub.recv(timeout=PATIENCE)
        standin.run_all()
        assert (number(standin, msg.value), msg.meta) == (9, {"n": 1})
        msg.release()
        wait_until(lambda: not sub.statistics().leases)
        with pytest.raises(shmtensor.RingFull):
            pub.send(filled(standin, 1), timeout=0)  # its writer could still write
        del kept
        gc.collect()
        standin.run_all()
        pub.send(filled(standin, 1), timeout=0)
        with pytest.raises(TypeError, match="torch dtype"):
            pub.loan((3,), np.float32)
        with pytest.raises(shmtensor.RingFull):
            pub.loan((3,), torch.float32, timeout=0)
    gone(pub, sub)


def test_what_cannot_lie_there_is_refused(standin, channel):
    with shmtensor.Publisher(channel, device="cuda") as pub:
        for value, text in (
            (np.zeros(3), "send torch.from_numpy"),
            ({"a": [standin.tensor(torch.ones(2)), np.float32(1)]}, "NumPy scalars"),
            (torch.eye(2).to_sparse(), "sparse"),
            ({"a": object()}, r'value\["a"\]'),
        ):
            with pytest.raises(shmtensor.ArgumentTypeError, match=text):
                pub.send(value)
        deep = {f"{'name' * 40}{i}": standin.tensor(torch.ones(1)) for i in range(500)}
        with pytest.raises(shmtensor.ArgumentError, match="at most 65472 are allowed"):
            pub.send(deep)
        assert pub.statistics().sent == 0
    with pytest.raises(ValueError, match="slots"):
        shmtensor.Publisher(channel, device="cuda", slots=257)
    with pytest.raises(ValueError, match="no CUDA device"):
        shmtensor.Publisher(channel, device="cpu")
    with pytest.raises(shmtensor.ArgumentError, match="Publisher"):
        shmtensor.Producer(channel, device="cuda")


def test_without_cuda_the_error_says_what_is_missing(channel):
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    with pytest.raises(shmtensor.CudaError, match=r"torch|device"):
        shmtensor.Publisher(channel, device="cuda")
    assert shared_files() == set()


def test_no_room_on_the_device_is_an_error_and_leaves_nothing(standin, channel):
    with shmtensor.Publisher(channel, device="cuda", slots=2) as pub, shmtensor.Subscriber(channel) as sub:
        standin.refuse_memory = 2
        before = shared_files()
        tensor = torch.as_tensor(_filled(1)).as_subclass(type(standin.tensor(1)))
        with pytest.raises(shmtensor.CudaError, match="cudaErrorMemoryAllocation"):
            pub.send(tensor)
        assert shared_files() == before
        standin.refuse_memory = 0
        assert pub.send(tensor) == 1
        with pytest.raises(shmtensor.ResourceError, match="max_bytes"):
            shmtensor.Publisher(channel, device="cuda", max_bytes="1MiB", slot_bytes="1MiB")
        assert number(standin, (standin.run_all(), sub.recv(timeout=PATIENCE).value)[1]) == 1
    gone(pub, sub)


def test_a_copy_that_cannot_be_queued_is_not_published(standin, channel, monkeypatch):
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(filled(standin, 1))

        def fail(*args):
            raise shmtensor.CudaError(5, "no")

        with monkeypatch.context() as broken:
            broken.setattr(standin, "copy", fail)
            with pytest.raises(shmtensor.CudaError):
                pub.send(filled(standin, 2))
        pub.send(filled(standin, 3))
        got = [sub.recv(timeout=PATIENCE).value for _ in range(2)]
        standin.run_all()
        assert [number(standin, each) for each in got] == [1, 3]
        del got
    gone(pub, sub)


def test_rings_are_added_and_late_and_latest_readers_get_theirs(standin, channel):
    with (
        shmtensor.Publisher(channel, device="cuda", slots=3, full="grow", history=2) as pub,
        shmtensor.Subscriber(channel) as sub,
        shmtensor.Subscriber(channel, delivery="latest") as latest,
    ):
        held = []
        for n in range(1, 8):
            pub.send(filled(standin, n))
            held.append(sub.recv(timeout=PATIENCE))
        assert pub.statistics().rings > 1
        newest = latest.recv(timeout=PATIENCE)
        with shmtensor.Subscriber(channel) as late:
            pub.send(filled(standin, 8))
            kept = [late.recv(timeout=PATIENCE) for _ in range(3)]
            standin.run_all()
            assert [number(standin, msg.value) for msg in kept] == [6, 7, 8]
            del kept
        assert [number(standin, msg.value) for msg in held] == list(range(1, 8))
        assert (number(standin, newest.value), newest.missed) == (7, 6)
        del held, newest
    gone(pub, sub, latest)


def test_on_an_event_loop(standin, channel):
    async def main():
        async with shmtensor.Publisher(channel, device="cuda", slots=1) as pub, shmtensor.Subscriber(channel) as sub:
            for n in range(1, 6):
                await pub.asend(filled(standin, n), timeout=PATIENCE)
                msg = await sub.arecv(timeout=PATIENCE)
                standin.run_all()
                assert number(standin, msg.value) == n
                del msg
            with await pub.aloan((256,), torch.int64, timeout=PATIENCE) as loan:
                loan.tensor.as_subclass(torch.Tensor).fill_(6)
            msg = await sub.arecv(timeout=PATIENCE, copy=True)
            standin.run_all()
            assert number(standin, msg.value) == 6
        return pub, sub

    gone(*asyncio.run(main()))


def test_a_message_in_a_reference_cycle_keeps_its_slot_until_the_device_is_done(standin, channel):
    """The collector clears weak references in garbage before it runs destructors: the lease must not end by that."""
    standin.polls = None
    with shmtensor.Publisher(channel, device="cuda", slots=1) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(filled(standin, 1))
        cycle = [sub.recv(timeout=PATIENCE)]
        cycle.append(cycle)
        standin.enqueue(lambda: None)
        del cycle
        gc.collect()
        assert sub.statistics().leases == 1
        with pytest.raises(shmtensor.RingFull):
            pub.send(filled(standin, 2), timeout=0.05)
        standin.run_all()
        pub.send(filled(standin, 2), timeout=PATIENCE)
        standin.polls = 2
    gone(pub, sub)


# --- two processes


def test_a_reader_in_another_process_waits_for_the_writers_stream(standin, channel, peer):
    writer = peer()
    with shmtensor.Subscriber(channel) as sub:
        writer.do(f"pub = shmtensor.Publisher({channel!r}, device='cuda'); pub.send(filled(1)); pub.send(filled(2))")
        messages = [sub.recv(timeout=PATIENCE) for _ in range(2)]
        seen = []
        for msg in messages:
            value = msg.value
            standin.enqueue(lambda value=value: seen.append(number(standin, value)))
        standin.run_all()
        assert seen == []  # the writer's device has not copied yet, and so ours has not read
        writer.do("run()")
        standin.run_all()
        assert seen == [1, 2]
        assert len(standin.opened) == 1  # one ring, mapped once
        with shmtensor.Subscriber(channel) as second:
            writer.do("pub.send(filled(3)); run()")
            both = [each.recv(timeout=PATIENCE).value for each in (sub, second)]
            standin.run_all()
            assert [number(standin, each) for each in both] == [3, 3]
            assert both[0].data_ptr() == both[1].data_ptr()
            assert len(standin.opened) == 1
            del both
        writer.do("pub.close()")
        del messages, msg, value
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv(timeout=PATIENCE)
        wait_until(lambda: not standin.opened)
        wait_until(lambda: "views alive" not in writer.ask("repr(pub)"))
        writer.do("del pub; import gc; gc.collect()")
        assert writer.ask("len(cuda.device_memory), cuda.violations") == (0, [])


def test_a_slot_is_not_written_again_before_its_readers_device_is_done(standin, channel, peer):
    reader = peer(polls=None)  # nothing happens there by being asked for
    with shmtensor.Publisher(channel, device="cuda", slots=1) as pub:
        reader.do(f"sub = shmtensor.Subscriber({channel!r})")
        pub.send(filled(standin, 1))
        standin.run_all()
        reader.do("seen = []; msg = sub.recv(timeout=60); value = msg.value")
        reader.do("cuda.enqueue(lambda value=value.detach().as_subclass(torch.Tensor)[:]: seen.append(number(value)))")
        reader.do("msg.release(); del msg, value")
        with pytest.raises(shmtensor.RingFull):
            pub.send(filled(standin, 2), timeout=0.2)
        reader.do("run()")  # the kernel reads, and lets go of its own view
        reader.do("import gc; gc.collect(); run()")
        pub.send(filled(standin, 2), timeout=PATIENCE)  # though the reader's host does nothing with the library
        standin.run_all()
        assert reader.ask("seen") == [1]
        reader.do("msg = sub.recv(timeout=60); run()")
        assert reader.ask("number(msg.value)") == 2
        reader.do("del msg; run(); sub.close()")
    gone(pub)


def test_an_early_write_would_be_seen(standin, channel, peer, monkeypatch):
    """The two tests above can fail: without the reader's wait for its device, the number changes under it."""
    reader = peer(polls=None)
    reader.do("from shmtensor.cuda import keeper; keeper._are_done = lambda events: True")
    with shmtensor.Publisher(channel, device="cuda", slots=1) as pub:
        reader.do(f"sub = shmtensor.Subscriber({channel!r}); seen = []")
        pub.send(filled(standin, 1))
        standin.run_all()
        reader.do("value = sub.recv(timeout=60).value; pointer = value.data_ptr()")
        reader.do("import ctypes; cuda.enqueue(lambda: seen.append(ctypes.c_int64.from_address(pointer).value))")
        reader.do("del value")
        pub.send(filled(standin, 2), timeout=PATIENCE)
        standin.run_all()
        reader.do("run()")
        assert reader.ask("seen") == [2]
        reader.do("sub.close()")
    gone(pub)


def test_a_dead_readers_slots_come_back(standin, channel, peer):
    reader = peer(polls=None)
    with shmtensor.Publisher(channel, device="cuda", slots=2) as pub:
        reader.do(f"sub = shmtensor.Subscriber({channel!r})")
        for n in (1, 2):
            pub.send(filled(standin, n))
        reader.do("held = [sub.recv(timeout=60).value]; dropped = sub.recv(timeout=60).value; del dropped")
        with pytest.raises(shmtensor.RingFull):
            pub.send(filled(standin, 3), timeout=0.1)
        with unswept(channel):  # whoever sweeps notices the death as well
            reader.kill()
            for n in (3, 4):
                pub.send(filled(standin, n), timeout=PATIENCE)
        assert pub.statistics().dead_receivers == 1
    assert "views alive" not in repr(pub)  # what the dead had mapped holds nobody


def test_a_dead_publishers_messages_are_gone_and_that_is_said(standin, channel, peer):
    writer = peer()
    with shmtensor.Subscriber(channel) as sub, shmtensor.Subscriber(channel, delivery="latest") as latest:
        writer.do(f"pub = shmtensor.Publisher({channel!r}, device='cuda')")
        writer.do("for n in (1, 2, 3): pub.send(filled(n)); run()")
        first = sub.recv(timeout=PATIENCE)
        newest = latest.recv(timeout=PATIENCE)
        writer.kill()
        with pytest.raises(shmtensor.PeerDied, match="2 messages"):
            sub.recv(timeout=PATIENCE)
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv(timeout=PATIENCE)
        with pytest.raises(shmtensor.EndOfStream):
            latest.recv(timeout=PATIENCE)
        del first, newest
        gc.collect()
    gone(sub, latest)
    wait_until(lambda: not standin.opened)


def test_others_go_on_when_one_publisher_died(standin, channel, peer):
    writer = peer()
    with shmtensor.Publisher(channel, device="cuda") as pub, shmtensor.Subscriber(channel) as sub:
        writer.do(f"other = shmtensor.Publisher({channel!r}, device='cuda'); other.send(filled(1))")
        writer.kill()
        pub.send(filled(standin, 2))
        errors, got = 0, None
        while got is None or not errors:
            try:
                got = sub.recv(timeout=PATIENCE).value
            except shmtensor.PeerDied:
                errors += 1
        standin.run_all()
        assert (errors, number(standin, got)) == (1, 2)
        del got
    gone(pub, sub)


def test_a_publishers_process_ends_when_its_readers_have_let_go(standin, channel, peer):
    writer = peer()
    with shmtensor.Subscriber(channel) as sub:
        writer.do(f"pub = shmtensor.Publisher({channel!r}, device='cuda')")
        writer.do("for n in (1, 2): pub.send(filled(n)); run()")
        first = sub.recv(timeout=PATIENCE).value
        writer.end()
        writer.process.join(1.0)
        assert writer.process.exitcode is None  # a message that was not taken, and one that is looked at
        second = sub.recv(timeout=PATIENCE).value
        standin.run_all()
        assert (number(standin, first), number(standin, second)) == (1, 2)
        del first
        writer.process.join(0.5)
        assert writer.process.exitcode is None
        del second  # and this reader does not call the library again
        wait_until(lambda: not standin.opened)
        writer.process.join(PATIENCE)
        assert writer.process.exitcode == 0
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv(timeout=PATIENCE)


def test_close_can_wait_until_the_memory_is_free(standin, channel, peer):
    reader = peer()
    pub = shmtensor.Publisher(channel, device="cuda")
    reader.do(f"sub = shmtensor.Subscriber({channel!r})")
    pub.send(filled(standin, 1))
    standin.run_all()
    reader.do("value = sub.recv(timeout=60).value")
    pub.close(linger=0.1)
    assert "closed, views alive" in repr(pub)
    assert standin.device_memory
    reader.do("del value")
    gone(pub)
    del pub
    gc.collect()
    assert not standin.device_memory
    reader.do("sub.close()")


def test_a_process_that_does_not_see_the_device_is_told_so_and_loses_nothing(standin, channel, peer):
    reader = peer()
    with shmtensor.Publisher(channel, device="cuda") as pub:
        reader.do(f"sub = shmtensor.Subscriber({channel!r})")
        pub.send(filled(standin, 4))
        standin.run_all()
        reader.do("known = cuda.identity; cuda.identity = lambda device: 'another'")
        for _ in range(2):
            name, text = reader.fails("sub.recv(timeout=60)")
            assert name == "CudaError"
            assert "stand-in 0" in text
            assert "CUDA_VISIBLE_DEVICES" in text
        reader.do("cuda.identity = known; opens = cuda.open_memory")
        reader.do("def refuse(*args): from shmtensor.cuda.runtime import failure; raise failure('cannot map', 400)")
        reader.do("cuda.open_memory = refuse")
        name, text = reader.fails("sub.recv(timeout=60)")
        assert name == "CudaError"
        assert "cudaErrorInvalidResourceHandle" in text
        reader.do("cuda.open_memory = opens; from shmtensor.cuda import runtime; runtime.substitute(None)")
        if not torch.cuda.is_available():
            name, text = reader.fails("sub.recv(timeout=60)")
            assert name == "CudaError"
            assert "torch" in text
        reader.do("runtime.substitute(cuda)")
        reader.do("value = sub.recv(timeout=60).value; run()")
        assert reader.ask("number(value)") == 4
        reader.do("del value; sub.close()")
    gone(pub)


# --- deaths at every step


@pytest.mark.parametrize("point", SENDER_POINTS)
def test_a_publisher_dies(standin, channel, peer, point):
    """Nobody hangs; what was not published is not seen; what died with its memory is said; nothing is left."""
    writer = peer()
    with shmtensor.Subscriber(channel) as sub:
        writer.do(f"points.arm({point!r}, 'kill', 1)")
        writer.start(
            f"pub = shmtensor.Publisher({channel!r}, device='cuda', slots=2); pub.send(filled(1)); run(); pub.close()"
        )
        assert writer.result() is None
        assert writer.is_dead
        outcome = []
        while not outcome or outcome[-1] != "over":
            try:
                sub.recv(timeout=PATIENCE)
                outcome.append("got")
            except shmtensor.PeerDied:
                outcome.append("died")
            except shmtensor.EndOfStream:
                outcome.append("over")
        published = point in ("publish.published", "device.lent")
        assert outcome == (["died", "over"] if published else ["over"])
    gone(sub)


@pytest.mark.parametrize("point", RECEIVER_POINTS)
def test_a_subscriber_dies(standin, channel, peer, point):
    """Its slots come back, and the publisher's memory is freed."""
    reader = peer()
    pub = shmtensor.Publisher(channel, device="cuda", slots=1)
    reader.do(f"sub = shmtensor.Subscriber({channel!r}); points.arm({point!r}, 'kill', 1)")
    pub.send(filled(standin, 1))
    reader.start("sub.recv(timeout=60)")
    assert reader.result() is None
    assert reader.is_dead
    with shmtensor.Subscriber(channel) as sub:
        pub.send(filled(standin, 2), timeout=PATIENCE)
        value = sub.recv(timeout=PATIENCE).value
        standin.run_all()
        assert number(standin, value) == 2
        del value
    pub.close()
    gone(pub, sub)


def test_a_slot_whose_end_cannot_be_told_stays_taken(standin, channel, peer):
    """A broken context says nothing about its work: the slot comes back with the process, not before."""
    reader = peer()
    pub = shmtensor.Publisher(channel, device="cuda", slots=1)
    reader.do(f"sub = shmtensor.Subscriber({channel!r})")
    pub.send(filled(standin, 1))
    standin.run_all()
    reader.do("value = sub.recv(timeout=60).value; run()")
    reader.do("def broken(event): raise shmtensor.CudaError(5, 'illegal address')")
    reader.do("cuda.is_done = broken; del value")
    reader.do("from shmtensor.cuda import keeper; import time\nwhile not keeper._lost: time.sleep(0.01)")
    with pytest.raises(shmtensor.RingFull):
        pub.send(filled(standin, 2), timeout=0.1)
    reader.kill()
    pub.send(filled(standin, 2), timeout=PATIENCE)
    pub.close()
    gone(pub)


def test_a_subscriber_that_asks_for_the_device_gets_what_is_there_already(standin, channel):
    with (
        shmtensor.Publisher(channel, device="cuda", slots=8) as pub,
        shmtensor.Publisher(channel) as host,
        shmtensor.Subscriber(channel, device="cuda", prefetch=2) as sub,
    ):
        for n in range(1, 5):
            pub.send(filled(standin, n))
            host.send({"n": _filled(10 * n)})
        ((start, (nbytes, _, _)),) = standin.device_memory.items()
        got, copies, at_home = [], [], []
        for _ in range(8):
            msg = sub.recv(timeout=PATIENCE)
            value = msg.value["n"] if isinstance(msg.value, dict) else msg.value
            at_home.append(start <= value.data_ptr() < start + nbytes)
            standin.run_all()
            if at_home[-1]:
                copies.append(msg.copy())
            got.append(number(standin, value))
            del msg, value
        assert sorted(got) == [1, 2, 3, 4, 10, 20, 30, 40]
        assert at_home.count(True) == 4
        assert [number(standin, each) for each in copies] == [1, 2, 3, 4]
    gone(pub, sub)


def test_writes_of_two_streams_are_in_order_though_nobody_reads(standin, channel):
    """A slot that nobody received is free at once, while its copy may not have run."""
    second, first = standin.new_stream(0), standin.new_stream(0)  # the stand-in runs older streams first
    with shmtensor.Publisher(channel, device="cuda", slots=2, history=1) as pub:
        for n, stream in ((1, first), (2, first), (3, second)):
            with standin.on(stream):
                pub.send(filled(standin, n))
        with standin.on(second), pub.loan((256,), torch.int64) as loan:
            lent = loan.tensor.as_subclass(torch.Tensor)
            standin.enqueue(lambda lent=lent: lent.fill_(4))
            del lent
        with shmtensor.Subscriber(channel) as sub:
            value = sub.recv(timeout=PATIENCE).value
            standin.run_all()
            assert number(standin, value) == 4
            del value
    gone(pub, sub)
