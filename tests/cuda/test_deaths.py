"""Deaths and failures while a device copies: what was not complete is never published, and every slot comes back.

The victim has a stand-in for CUDA of its own whose streams run late, so that its copies are on their way when it dies.
The points in device rings are in tests/cuda/test_ipc.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import shmtensor
from shmtensor.checkpoint import names
from shmtensor.checkpoint.load import load_checkpoint
from shmtensor.checkpoint.writer import CheckpointWriter
from shmtensor.cuda import copies
from shmtensor.memory.segment import PAGE

from ..faults.process import crash_server
from ..package.test_layers import run_isolated
from ..scenes import ROOT
from ..waiting import wait_for_end, wait_until
from .peer import PATIENCE, Peer

COPIES = ["copy.started", "copy.noted"]
POINTS = [*COPIES, "copy.done", "device.queued"]
SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))
ACTIONS = ["kill", "exit", "raise"]
ENDS = {"fanout": ("Publisher", "Subscriber"), "work": ("Producer", "Consumer")}
KINDS = pytest.mark.parametrize("kind", ENDS)


@pytest.fixture(scope="module")
def server():
    with crash_server() as context:
        context.set_forkserver_preload(["tests.faults.cast", "tests.cuda.standin"])  # torch is imported once
        yield context


@pytest.fixture
def victim(server):
    peer = Peer(server, polls=None)
    yield peer
    peer.finish()


def gone(*endpoints) -> None:
    """Wait until closed endpoints have left their channels."""
    gc.collect()
    wait_until(lambda: all("views alive" not in repr(endpoint) for endpoint in endpoints))


def strike(victim, point, action, code) -> None:
    """Let the victim come by a point in something that it does."""
    victim.do(f"points.arm({point!r}, {action!r}, 1)")
    if action == "raise":
        assert victim.fails(code) == ("Crash", point)
    else:
        victim.start(code)
        assert victim.result() is None
        assert victim.is_dead, f"never came by {point}"


# --- a receiver


RECEIVERS = [
    ("fanout", "copy.started", "kill", False), ("work", "copy.noted", "exit", False),
    ("fanout", "copy.noted", "kill", True), ("work", "copy.started", "kill", True),
    ("work", "copy.started", "raise", False), ("fanout", "copy.started", "raise", True),
]  # fmt: skip
SENDERS = [
    ("fanout", "copy.started", "kill", False), ("work", "copy.noted", "exit", False),
    ("fanout", "copy.done", "kill", False), ("work", "copy.done", "kill", True), ("fanout", "copy.noted", "kill", True),
    ("work", "copy.started", "raise", False), ("fanout", "copy.started", "raise", True),
    ("fanout", "copy.done", "raise", False),
]  # fmt: skip


def cases(some, points):
    """Some cases, and in the long form all of them."""
    return list(itertools.product(ENDS, points, ACTIONS, [False, True])) if SOAK else some


@pytest.mark.parametrize(("kind", "point", "action", "ahead"), cases(RECEIVERS, COPIES))
def test_a_receiver_dies_with_a_copy_on_its_way(channel, victim, kind, point, action, ahead):
    """Between the copy's start and its event, or just after it. A job goes to another."""
    sender, receiver = ENDS[kind]
    options = ", device='cuda', prefetch=1" if ahead else ""
    with getattr(shmtensor, sender)(channel, slots=2) as tx:
        victim.do(f"rx = shmtensor.{receiver}({channel!r}{options})")
        for number in (1, 2):
            tx.send(torch.full((1000,), number))
        code = "msg = rx.recv(timeout=60)" if ahead else "rx.recv(timeout=60).to('cuda', non_blocking=True)"
        strike(victim, point, action, code)
        if action == "raise":  # what was started was waited for, since nobody could tell later when it is done
            assert victim.ask("cuda.waiting, rx.statistics().copying, cuda.violations") == (0, 0, [])
            victim.kill()
        with getattr(shmtensor, receiver)(channel) as rx:
            if kind == "work":
                got = {}
                for _ in range(2):
                    with rx.recv(timeout=PATIENCE) as msg:
                        got[int(msg.value[0])] = msg.attempt
                assert set(got) == {1, 2}
                assert max(got.values()) == 2
            for number in (3, 4):  # every slot came back
                tx.send(torch.full((1000,), number), timeout=PATIENCE)
                with rx.recv(timeout=PATIENCE) as msg:
                    assert msg.value.eq(number).all()


@KINDS
def test_a_copy_that_fails_is_told_to_the_receiver_and_its_slot_comes_back(lazy, channel, kind):
    sender, receiver = ENDS[kind]
    with getattr(shmtensor, receiver)(channel) as rx, getattr(shmtensor, sender)(channel, slots=1) as tx:
        tx.send(torch.ones(1000))
        msg = rx.recv(timeout=PATIENCE)
        lazy.fail_copies = 700
        with pytest.raises(shmtensor.CudaError, match="cudaErrorIllegalAddress") as raised:
            msg.to("cuda")
        assert raised.value.number == 700
        del raised
        msg.to("cuda", non_blocking=True)  # nobody waits: torch says it, at the next use
        msg.release()
        del msg
        gc.collect()
        lazy.run_all()
        assert rx.statistics().copying == rx.statistics().leases == 0
        tx.send(torch.zeros(1000), timeout=PATIENCE)
        rx.recv(timeout=PATIENCE).release()


# --- a sender


@pytest.mark.parametrize(("kind", "point", "action", "task"), cases(SENDERS, [*COPIES, "copy.done"]))
def test_a_sender_dies_before_its_copy_is_published(channel, victim, kind, point, action, task):
    """Its message is never seen. One that only failed has its slot back, and its number."""
    sender, receiver = ENDS[kind]
    with getattr(shmtensor, receiver)(channel) as rx:
        victim.do(f"tx = shmtensor.{sender}({channel!r}, slots=1)")
        if task:
            victim.do("import asyncio; cuda.polls = 1; send = lambda n: asyncio.run(tx.asend(filled(n), timeout=60))")
        else:
            victim.do("send = lambda n: tx.send(filled(n), timeout=60)")
        strike(victim, point, action, "send(1)")
        if action == "raise":
            assert victim.ask("cuda.violations") == []
            victim.do("send(2)")
            with rx.recv(timeout=PATIENCE) as msg:
                assert (msg.seq, int(msg.value[0])) == (1, 2)
            victim.do("tx.close()")
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)


@pytest.mark.parametrize("action", ACTIONS if SOAK else ["kill", "raise"])
def test_a_publisher_of_device_memory_dies_before_its_event(standin, channel, victim, action):
    """The copy is queued and its event is not recorded: nobody may read the slot."""
    with shmtensor.Subscriber(channel) as sub:
        victim.do(f"pub = shmtensor.Publisher({channel!r}, device='cuda', slots=1)")
        strike(victim, "device.queued", action, "pub.send(filled(1))")
        if action == "raise":
            victim.do("pub.send(filled(2)); run()")
            msg = sub.recv(timeout=PATIENCE)
            standin.run_all()
            assert (msg.seq, standin.host(msg.value)[0].item()) == (1, 2)
            del msg
            victim.do("pub.close()")
        with pytest.raises(shmtensor.EndOfStream):
            sub.recv(timeout=PATIENCE)
    gone(sub)


# --- a trainer

TRAINER = """
    import os, signal, sys
    prefix, path, point, nth = sys.argv[1:]
    from tests.faults import points
    points.install("shmtensor.checkpoint")
    import torch
    from shmtensor.checkpoint import names, structure
    from shmtensor.checkpoint.writer import CheckpointWriter
    from tests.cuda.standin import DeviceTensor, installed
    names.PREFIX = prefix
    views, take_apart, known = structure._tensor_tools()
    structure._tensor_tools = lambda: (views, take_apart, known | {DeviceTensor})
    with installed(polls=None) as cuda:
        tensor = lambda number: cuda.tensor(torch.full((100_000,), float(number)))
        state = lambda number: {"step": number, "w": [tensor(number) for _ in range(4)]}
        writer = CheckpointWriter(path, memory="4MiB")
        writer.save(state(1)).durable.result(120)
        print(writer.statistics().pid, flush=True)
        points.arm(point, "kill", int(nth))
        writer.save(state(2)).durable.result(120)
"""


@pytest.mark.parametrize(("point", "nth"), [("offload.started", 2), ("offload.copied", 1)])
def test_a_trainer_dies_while_its_state_leaves_the_device(tmp_path, channel, monkeypatch, point, nth):
    """What was not staged to its end is discarded; what was durable is whole; the writing process ends."""
    monkeypatch.setattr(names, "PREFIX", channel)
    path = tmp_path / "a"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINER), channel, str(path), point, str(nth)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    wait_for_end(int(done.stdout))
    with CheckpointWriter(path) as writer:  # sweeps what is left
        writer.start(timeout=PATIENCE)
    assert [name for name in os.listdir(path) if "step" in name] == ["step-00000001.safetensors"]
    assert all(tensor.eq(1).all() for tensor in load_checkpoint(path / "latest", verify="all")["w"])


# --- registrations


@pytest.mark.parametrize("kind", ENDS if SOAK else ["fanout"])
@pytest.mark.parametrize("pin", ["auto", True])
@pytest.mark.parametrize("way", ["send", "to"])
def test_a_registration_that_fails_for_the_second_range_only(lazy, channel, monkeypatch, kind, pin, way):
    """With "auto" the rest is copied pageably and said; with True it is an error, and the slot comes back."""
    monkeypatch.setattr(copies, "PIECE", 4 * PAGE)
    sender, receiver = ENDS[kind]
    register = lazy.register_host

    def first_only(*args, **more):
        lazy.refuse_registration = 2 if lazy.registered else 0
        register(*args, **more)

    monkeypatch.setattr(lazy, "register_host", first_only)
    value = torch.randint(0, 255, (6 * PAGE,), dtype=torch.uint8)
    with (
        getattr(shmtensor, receiver)(channel, pin=pin) as rx,
        getattr(shmtensor, sender)(channel, pin=pin, slots=1, slot_bytes=6 * PAGE) as tx,
    ):
        end = tx if way == "send" else rx
        if way == "send" and pin is True:
            with pytest.raises(shmtensor.CudaError, match=r"pin=True, and ring 0 cannot be pinned.*error 2 "):
                tx.send(lazy.tensor(value))
            lazy.run_all()
            assert tx.statistics().sent == 0
            tx.send(value, timeout=PATIENCE)
        else:
            tx.send(lazy.tensor(value) if way == "send" else value)
        msg = rx.recv(timeout=PATIENCE)
        assert msg.value.equal(value)
        if way == "to" and pin is True:
            with pytest.raises(shmtensor.CudaError, match="pin=True"):
                msg.to("cuda")
        elif way == "to":
            assert lazy.host(msg.to("cuda")).equal(value)
        msg.release()
        del msg
        gc.collect()
        lazy.run_all()
        assert "cudaErrorMemoryAllocation" in end.statistics().pin_failure
        assert end.statistics().pinned_bytes == 4 * PAGE
        assert rx.statistics().leases == 0
        tx.send(value, timeout=PATIENCE)
        rx.recv(timeout=PATIENCE).release()


def test_a_read_only_registration_that_is_refused_all_the_same(lazy, channel):
    """The device says that it can, and cannot: the second mapping is taken."""
    lazy.read_only, lazy.refuse_read_only = True, 1
    with shmtensor.Subscriber(channel) as rx, shmtensor.Publisher(channel) as tx:
        tx.send(torch.arange(5000.0))
        msg = rx.recv(timeout=PATIENCE)
        assert lazy.host(msg.to("cuda")).equal(torch.arange(5000.0))
        assert (lazy.pinned_copies, lazy.pageable_copies) == (1, 0)
        assert rx.statistics().pin_failure == ""
        del msg


def close(tx, rx):
    tx.close()
    rx.close()


def leave(tx, rx):
    for end in (tx, rx):
        with pytest.raises(ZeroDivisionError), end:
            raise ZeroDivisionError


def fork(tx, rx):
    child = os.fork()
    if not child:
        lazy = copies.runtime()
        before = dict(lazy.registered)
        waiting = [copies._inherited] if lazy.waiting else []
        del tx, rx
        gc.collect()
        copies.finish_all()  # as the interpreter does at its end
        os._exit(0 if lazy.registered == before and not lazy.violations and all(waiting) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    close(tx, rx)


@KINDS
@pytest.mark.parametrize("read_only", [False, True], ids=["alias", "read-only"])
@pytest.mark.parametrize("end", [close, leave, fork, None], ids=["close", "exception", "fork", "del"])
def test_memory_is_unregistered_before_it_is_unmapped_however_an_endpoint_ends(lazy, channel, kind, read_only, end):
    """The stand-in notes what was unmapped while it was registered, or copied."""
    lazy.read_only = read_only
    sender, receiver = ENDS[kind]
    rx, tx = getattr(shmtensor, receiver)(channel), getattr(shmtensor, sender)(channel)
    tx.send(lazy.tensor(torch.arange(5000.0)))
    moved = rx.recv(timeout=PATIENCE).to("cuda", non_blocking=True)
    assert len(lazy.registered) == 2
    assert rx.statistics().copying == 1
    if end is not None:
        end(tx, rx)
    del tx, rx
    gc.collect()
    lazy.run_all()
    copies.Pending().poll()  # another endpoint's call: what was dropped with copies on their way is let go
    gc.collect()
    assert lazy.registered == {}
    assert lazy.host(moved).equal(torch.arange(5000.0))


EXIT = """
import atexit, gc, json, sys, torch, shmtensor
from tests.cuda.standin import installed
from shmtensor.cuda.copies import finish_all
how, channel = {how!r}, {channel!r}
installing = installed(polls=None)
stand_in = installing.__enter__()
def tell():
    waiting = stand_in.waiting
    stand_in.run_all()
    print(json.dumps([waiting, len(stand_in.registered), stand_in.violations]))
atexit.unregister(finish_all)
atexit.register(tell)  # runs after it
atexit.register(finish_all)
rx, tx = shmtensor.Subscriber(channel), shmtensor.Publisher(channel)
tx.send(stand_in.tensor(torch.full((9,), 4)))
msg = rx.recv(timeout=60)
moved = msg.to("cuda", non_blocking=True)
if how == "closed":
    rx.close(); tx.close(); del rx, tx
elif how == "dropped":
    del rx, tx, msg
elif how == "raised":
    sys.excepthook = lambda *_: None
    raise SystemExit(0)
"""


@pytest.mark.parametrize("how", ["open", "closed", "dropped", "raised"])
def test_a_process_ends(channel, how):
    """Copies are waited for first, then everything is unregistered, while it is mapped."""
    assert json.loads(run_isolated(EXIT.format(how=how, channel=channel))) == [0, 0, []]


# --- memory on the device


@pytest.mark.filterwarnings("ignore:.*(Sparse|quantize_per|nested tensors)")
def test_the_parts_of_what_is_no_plain_tensor_are_told_to_the_allocator(standin, channel, monkeypatch):
    """They lie in memory of the receiver's own stream, and are used on the caller's."""
    told = []
    used_on = standin.used_on

    def tell(tensor, stream):
        used_on(tensor, stream)
        told.append((tensor.data_ptr(), stream))

    monkeypatch.setattr(standin, "move", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(standin, "used_on", tell)
    sparse = torch.eye(3).to_sparse()
    flat = {
        "quantized": torch.quantize_per_tensor(torch.arange(6.0).view(2, 3), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2).long(), 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "plain": torch.ones(3),
    }
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with shmtensor.Subscriber(channel, device="cuda", prefetch=1) as rx, shmtensor.Publisher(channel) as tx:
        tx.send({"sparse": sparse, "rows": sparse.to_sparse_csr(), "jagged": jagged, **flat})
        value = rx.recv(timeout=PATIENCE).value
        rows, jagged, stream = value["rows"], value["jagged"], standin.current_stream(0)
        parts = [value["sparse"]._indices(), value["sparse"]._values(), jagged.values(), jagged.offsets()]
        parts += [rows.crow_indices(), rows.col_indices(), rows.values(), *(value[name] for name in flat)]
        assert {(part.data_ptr(), stream) for part in parts} == set(told)
        del value, rows, jagged, parts


@pytest.mark.parametrize("call", ["stream_waits", "used_on"])
def test_a_message_that_cannot_be_handed_out_is_not_lost(standin, channel, monkeypatch, call):
    with shmtensor.Subscriber(channel, device="cuda") as rx, shmtensor.Publisher(channel) as tx:
        tx.send(torch.ones(3))
        with monkeypatch.context() as patch:
            patch.setattr(standin, call, failing)
            with pytest.raises(shmtensor.CudaError, match="no such luck"):
                rx.recv(timeout=PATIENCE)
        msg = rx.recv(timeout=PATIENCE)
        standin.run_all()
        assert (msg.seq, standin.host(msg.value).tolist(), rx.statistics().received) == (1, [1, 1, 1], 1)
        del msg


def failing(*_):
    raise shmtensor.CudaError(5, "no such luck")


@KINDS
def test_without_an_event_no_copy_is_started(lazy, channel, monkeypatch, kind):
    """Nobody could tell when it is done, and its slot would be written again under it."""
    sender, receiver = ENDS[kind]
    with getattr(shmtensor, receiver)(channel) as rx, getattr(shmtensor, sender)(channel, slots=1) as tx:
        tx.send(torch.ones(3))
        with rx.recv(timeout=PATIENCE) as msg, monkeypatch.context() as patch:
            patch.setattr(lazy, "new_event", failing)
            with pytest.raises(shmtensor.CudaError, match="no such luck"):
                msg.to("cuda", non_blocking=True)
            assert (lazy.waiting, lazy.flying, rx.statistics().copying) == (0, [], 0)
            assert msg.value.tolist() == [1, 1, 1]


def test_a_forked_child_does_not_touch_what_was_on_its_way(lazy, channel):
    """It keeps the parent's device tensors and events: their destructors would call CUDA, which it must not."""
    gone = []

    class Held:
        def __del__(self):
            gone.append(1)

    stream, event, kept = lazy.new_stream(0), lazy.new_event(0), copies.Pending()
    lazy.record(event, stream)
    kept.add(event, Held())
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(len(gone) + len(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lazy.run_all()
    assert (kept.poll(), len(gone)) == (0, 1)


# --- graphs


def test_while_a_graph_is_captured_nothing_is_queued_and_nothing_is_lost(lazy, channel):
    """A graph is replayed with whatever its slots hold by then."""
    stream = lazy.current_stream(0)
    with (
        shmtensor.Subscriber(channel) as plain,
        shmtensor.Subscriber(channel, device="cuda", prefetch=1) as ahead,
        shmtensor.Publisher(channel, slots=4, slot_bytes=4096) as tx,
    ):
        lazy.capturing.add(stream)
        with pytest.raises(shmtensor.CudaError, match="CUDA graph is being captured"):
            tx.send(lazy.tensor([1]))
        assert tx.statistics().sent == 0
        for number in (2, 3):
            tx.send(torch.full((10,), number))
        msg = plain.recv(timeout=PATIENCE)
        for non_blocking in (False, True):
            with pytest.raises(shmtensor.CudaError, match="CUDA graph is being captured"):
                msg.to("cuda", non_blocking=non_blocking)
        with pytest.raises(shmtensor.CudaError, match="CUDA graph is being captured"):
            ahead.recv(timeout=PATIENCE)
        assert (lazy.waiting, ahead.statistics().copying) == (0, 0)
        lazy.capturing.clear()
        got = [msg.to("cuda"), *(ahead.recv(timeout=PATIENCE).value for _ in range(2))]
        lazy.run_all()
        assert [lazy.host(value)[0].item() for value in got] == [2, 2, 3]
        msg.release()
        del msg


def test_in_device_memory_as_well(standin, channel):
    stream = standin.current_stream(0)
    with shmtensor.Publisher(channel, device="cuda", slots=1) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(standin.tensor(torch.full((256,), 1)))
        standin.run_all()
        standin.capturing.add(stream)
        with pytest.raises(shmtensor.CudaError, match="CUDA graph is being captured"):
            sub.recv(timeout=PATIENCE)
        standin.capturing.clear()
        value = sub.recv(timeout=PATIENCE).value
        standin.capturing.add(stream)
        del value  # a garbage collection in the middle of a capture
        gc.collect()
        with pytest.raises(shmtensor.RingFull):
            pub.send(torch.zeros(4), timeout=0.1)
        assert sub.statistics().leases == 1
        standin.capturing.clear()
        pub.send(standin.tensor(torch.full((256,), 2)), timeout=PATIENCE)
        value = sub.recv(timeout=PATIENCE).value
        standin.run_all()
        assert standin.host(value).eq(2).all()
        del value
        pub.send(standin.tensor(torch.full((256,), 3)), timeout=PATIENCE)
        sub.recv(timeout=PATIENCE).release()
        wait_until(lambda: not sub.statistics().leases)
        standin.capturing.add(stream)
        sends = (lambda: pub.send(standin.tensor([1]), timeout=0), lambda: pub.loan((4,), torch.float32, timeout=0))
        for send in sends:
            with pytest.raises(shmtensor.CudaError, match="CUDA graph is being captured"):
                send()
        standin.capturing.clear()
        assert pub.send(standin.tensor([1]), timeout=PATIENCE) == 4
        sub.recv(timeout=PATIENCE).release()
    gone(pub, sub)
