"""The compiled hot path: the same messages as the Python code, whatever comes between, and not there when unwanted."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber, hot
from shmtensor.endpoints.base import lingering
from shmtensor.memory.words import store
from shmtensor.wire.record import INLINE_OFFSET

from .conftest import shared_files

needs_hot = pytest.mark.skipif(not hot.BUILT, reason="shmtensor.hot._hot is not built, or SHMTENSOR_PURE is set")
PATIENCE = 60

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bytes (random booleans)."""
    generator = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.from_numpy(generator.integers(0, 256, (*shape, size), np.uint8))
    return data.view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, with dtype, shape and strides."""
    look = (a.dtype, a.shape, a.stride(), type(a)) == (b.dtype, b.shape, b.stride(), type(b))
    return look and bytes(a.contiguous().view(torch.uint8).numpy()) == bytes(b.contiguous().view(torch.uint8).numpy())


@needs_hot
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (7,), (1, 3, 1), (2, 3, 4, 5)], ids=str)
def test_same_values_as_the_python_code(channel, dtype, shape):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        for seed in range(12):
            value = noise(shape, dtype, seed)
            assert pub.send(value) == seed + 1
            msg = sub.recv(timeout=PATIENCE)
            assert same(msg.value, value)
            assert (msg.seq, msg.nbytes, msg.attempt, msg.missed, msg.meta) == (seed + 1, value.nbytes, 1, 0, None)
            del msg
        assert sub._inlet.received >= 6  # each slot's first message is the Python code's
        if not dtype.is_complex:
            assert pub._outbox.sent_bytes >= 6 * value.nbytes
        seen, sent = sub.statistics(), pub.statistics()
        assert (seen.received, seen.received_bytes, sent.sent_bytes) == (12, 12 * value.nbytes, 12 * value.nbytes)
        assert seen.leases == 0


@needs_hot
def test_a_work_queue_sends_the_same_way(channel):
    with Producer(channel, slots=4) as tx, Consumer(channel) as rx:
        for seed in range(20):
            value = noise((5, 5), torch.float32, seed)
            tx.send(value)
            with rx.recv(timeout=PATIENCE) as msg:
                assert same(msg.value, value)
        assert tx._outbox.sent_bytes >= 10 * value.nbytes


def several(seed: int) -> dict:
    """Tensors of many kinds in one message."""
    image = noise((2, 3, 4, 5), torch.float16, seed).to(memory_format=torch.channels_last)
    parts = {str(dtype): noise((3, 5), dtype, seed) for dtype in DTYPES}
    return {"parts": parts, "image": image, "turned": noise((4, 6), torch.int32, seed).t(), "number": seed}


@needs_hot
@pytest.mark.parametrize("pattern", [(Publisher, Subscriber), (Producer, Consumer)], ids=["fan-out", "work-queue"])
def test_several_tensors_in_a_message(channel, pattern):
    with pattern[0](channel, slots=3) as tx, pattern[1](channel) as rx:
        for seed in range(8):
            sent = several(seed)
            tx.send(sent)
            got = rx.recv(timeout=PATIENCE).value
            assert got["number"] == seed
            assert same(got["image"], sent["image"])
            assert same(got["turned"], sent["turned"])
            assert list(got["parts"]) == list(sent["parts"])
            assert all(same(got["parts"][name], tensor) for name, tensor in sent["parts"].items())
        (batch,) = {unpacker._batch for unpacker in rx._unpackers.values()}
        assert type(batch).__name__ == "Batch"


@needs_hot
def test_one_tensor_of_a_message_keeps_its_slot(channel):
    with Publisher(channel, slots=2, full="error") as pub, Subscriber(channel) as sub:
        for seed in range(4):
            pub.send([noise((5,), torch.float32, seed), noise((6,), torch.int64, seed)])
            value = sub.recv(timeout=PATIENCE).value
        kept, before = value[1], value[1].clone()
        del value
        for _ in range(3):
            pub.send(torch.zeros(11))
            sub.recv(timeout=PATIENCE)
        assert sub.statistics().leases == 1
        assert same(kept, before)
        del kept
        assert sub.statistics().leases == 0


@needs_hot
def test_a_batch_checks_its_payload():
    module = hot.module()
    payload = np.zeros(64, np.uint8)
    inside, outside = torch.from_numpy(payload[:32]), torch.zeros(4)
    batch = module.Batch(payload, [inside, inside[8:16]])
    for wrong in ([outside], ["text"], [None], [torch.empty(0)], [torch.empty(2, device="meta")]):
        with pytest.raises(ValueError):
            module.Batch(payload, wrong)
    with pytest.raises(ValueError):
        batch.make(np.zeros(31, np.uint8))
    with pytest.raises(TypeError):
        batch.make(None)
    made = batch.make(payload)
    payload[:] = np.arange(64)
    assert [tensor.tolist() for tensor in made] == [list(range(32)), list(range(8, 16))]
    references = sys.getrefcount(payload)
    del made
    assert sys.getrefcount(payload) == references - 2


class Twisted(torch.Tensor):
    """A subclass, which is not the usual case."""


class Passing(torch.overrides.TorchFunctionMode):
    """A mode that lets everything through, by way of Python code."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@needs_hot
def test_what_only_looks_usual(channel):
    """Same dtype and shape as what was learned, but not plain."""
    plain = torch.arange(9.0).reshape(3, 3)
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        for _ in range(8):
            pub.send(plain)
            sub.recv(timeout=PATIENCE)
        for odd in (
            plain.t(),
            torch._neg_view(plain),
            plain.clone().requires_grad_(),
            torch.nn.Parameter(plain.clone()),
            torch.arange(18.0).reshape(3, 6)[:, ::2],
            torch.ones(()).expand(3, 3),
            torch.arange(12.0)[2:11].view(3, 3),
        ):
            pub.send(odd)
            assert torch.equal(sub.recv(timeout=PATIENCE).value, odd.detach().resolve_neg())
        for refused in (plain.as_subclass(Twisted), torch.empty(3, 3, device="meta")):
            with pytest.raises(shmtensor.ArgumentTypeError):
                pub.send(refused)
        with Passing():
            pub.send(plain)
        assert torch.equal(sub.recv(timeout=PATIENCE).value, plain)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5)),
        st.tuples(st.just("tree"), st.integers(0, 3)),
        st.tuples(st.just("loan"), st.just(0)),
        st.tuples(st.just("recv"), st.integers(0, 1)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("join"), st.just(0)),
        st.tuples(st.just("leave"), st.just(0)),
    ),
    min_size=20,
    max_size=120,
)
_count = itertools.count()
SHAPES = [(4, 4), (4, 4), (2, 8), (16,), (3,), (200,)]


@needs_hot
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_any_order_of_everything(operations):
    """Usual and unusual messages, loans, joins, views kept for any time: values, order and bytes as a list has them."""
    channel = f"test-{os.getpid()}-hot-{next(_count)}"
    with Publisher(channel, slots=6, slot_bytes=256, full="grow") as pub:
        subs, expected = [Subscriber(channel)], [[]]
        kept, number = [], 0
        for what, choice in operations:
            if what == "send":
                number += 1
                value = torch.full(SHAPES[choice], float(number))
            elif what == "tree":
                number += 1
                value = {"x": torch.full((choice + 1,), float(number)), "id": number}
            if what in ("send", "tree"):
                pub.send(value)
            elif what == "loan":
                number += 1
                value = torch.full((4, 4), float(number))
                with pub.loan((4, 4), torch.float32) as loan:
                    loan.tensor.copy_(value)
            elif what == "recv" and choice < len(subs) and expected[choice]:
                msg = subs[choice].recv(timeout=PATIENCE)
                wanted = expected[choice].pop(0)
                got, want = (msg.value, wanted) if torch.is_tensor(wanted) else (msg.value["x"], wanted["x"])
                assert same(got, want)
                kept.append((got, want))
            elif what == "drop" and kept:
                kept.pop(choice % len(kept))
            elif what == "join" and len(subs) < 2:
                subs.append(Subscriber(channel))
                expected.append([])
            elif what == "leave" and len(subs) == 2:
                subs.pop().close()
                expected.pop()
            if what in ("send", "tree", "loan"):
                for waiting in expected:
                    waiting.append(value)
            assert all(same(got, want) for got, want in kept), "bytes changed under a view"
        for sub, waiting in zip(subs, expected, strict=True):
            for wanted in waiting:
                got = sub.recv(timeout=PATIENCE).value
                assert same(got, wanted) if torch.is_tensor(wanted) else same(got["x"], wanted["x"])
            assert sub.statistics().behind == 0
            sub.close()
        kept.clear()
        got = want = msg = None
        gc.collect()
    assert not [name for name in shared_files() if "-hot" in name]


@needs_hot
@pytest.mark.parametrize("make", [Publisher, Producer])
def test_closed_and_full(channel, make):
    receiver = Subscriber(channel) if make is Publisher else Consumer(channel)
    sender = make(channel, slots=3, full="error")
    value = torch.ones(4)
    for _ in range(2):
        for _ in range(3):
            sender.send(value)
        with pytest.raises(shmtensor.RingFull):
            sender.send(value)
        for _ in range(3):
            receiver.recv(timeout=PATIENCE).release()
    outbox = sender._outbox
    assert outbox is not None
    sender.close()
    assert outbox.send(value, 0) is None
    with pytest.raises(shmtensor.ClosedError):
        sender.send(value)
    receiver.close()
    with pytest.raises(shmtensor.ClosedError):
        receiver.recv()


@needs_hot
def test_a_forked_child_has_no_part_in_it(channel):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        value = torch.ones(4)
        for _ in range(8):
            pub.send(value)
            kept = sub.recv(timeout=PATIENCE).value
        pub.send(value)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for call in (lambda: pub.send(value), sub.recv):
                    try:
                        call()
                    except shmtensor.ForkedError:
                        code += 1
                del kept  # its parent's lease
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert sub.statistics().leases == 1
        assert kept.tolist() == [1.0] * 4
        assert sub.recv(timeout=PATIENCE).value.tolist() == [1.0] * 4


@needs_hot
def test_views_outlive_the_endpoints(channel):
    pub, sub = Publisher(channel, slots=4), Subscriber(channel)
    for number in range(9):
        pub.send(torch.full((4,), float(number)))
        kept = sub.recv(timeout=PATIENCE).value[1:]
    sub.close()
    assert "views alive" in repr(sub)
    for _ in range(20):
        pub.send(torch.full((4,), -1.0))
    pub.close()
    assert kept.tolist() == [8.0] * 3
    assert shared_files()
    thread = threading.Thread(target=lambda views: views.clear(), args=([kept],))
    del kept
    thread.start()
    thread.join()
    gc.collect()
    assert not shared_files()


@needs_hot
def test_dropped_endpoints_are_collected(channel):
    def use():
        pub, sub = Publisher(channel, slots=4), Subscriber(channel)
        for _ in range(8):
            pub.send(torch.ones(4))
            sub.recv(timeout=PATIENCE)
        assert sub._inlet is not None

    use()
    gc.collect()
    assert not shared_files()


@needs_hot
@pytest.mark.parametrize("keep", ["view", "message"])
def test_a_dropped_subscriber_holds_nobody_up_though_views_of_it_live(channel, keep):
    """It leaves when it is collected, even if it refers to its own message; the views keep their bytes."""
    with Publisher(channel, slots=4, full="error") as pub:
        sub = Subscriber(channel)
        for number in range(9):
            pub.send(torch.full((4,), float(number)))
            msg = sub.recv(timeout=PATIENCE)
        sub.own = msg if keep == "message" else msg.value
        kept = msg.value
        del msg, sub
        gc.collect()
        for _ in range(20):
            pub.send(torch.full((4,), -1.0))
        assert kept.tolist() == [8.0] * 4
        (left,) = lingering  # for the sake of the lease, and with it what it refers to
        left.own = None
        del kept
        gc.collect()
        assert not lingering
        del left
    assert not shared_files()


@needs_hot
@pytest.mark.slow
def test_threads_share_endpoints(channel):
    """Four threads send, four receive, on one publisher and one subscriber: every message once."""
    each, got = 400, []
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:

        def send(first):
            for number in range(first, first + each):
                pub.send(torch.full((4,), float(number)), timeout=PATIENCE)

        def recv():
            for msg in sub:
                got.append((msg.seq, int(msg.value[0])))
                if len(got) >= 4 * each:
                    pub.close()

        threads = [threading.Thread(target=send, args=(n * each,)) for n in range(4)]
        threads += [threading.Thread(target=recv) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert sorted(seq for seq, _ in got) == list(range(1, 4 * each + 1))
        assert sorted(number for _, number in got) == list(range(4 * each))
        assert sub.statistics().received == 4 * each


@needs_hot
def test_a_damaged_record_is_the_python_codes_to_report(channel):
    with Publisher(channel, slots=2) as pub, Subscriber(channel) as sub:
        for _ in range(6):
            pub.send(torch.ones(4))
            sub.recv(timeout=PATIENCE)
        pub.send(torch.ones(4))
        ring = pub._rings[0]
        slot = (ring.cursor - 1) % 2
        at = (ring.records + 256 * slot + INLINE_OFFSET) // 8
        before = ring.words[at]
        store(ring.words, at, 2**64 - 1)
        with pytest.raises(shmtensor.TimedOut):
            sub.recv(timeout=0)
        assert sub.statistics().bad_records == 1
        store(ring.words, at, before)
        pub.send(torch.full((4,), 2.0))
        assert sub.recv(timeout=PATIENCE).value.tolist() == [2.0] * 4


@needs_hot
@pytest.mark.slow
def test_nothing_piles_up(channel):
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:
        value = torch.ones(16)

        def many():
            for _ in range(40_000):
                pub.send(value)
                sub.recv(timeout=PATIENCE)
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        many()
        references = sys.getrefcount(sub._feeds[0]), sys.getrefcount(value), sys.getrefcount(pub._rings[0])
        before = many()
        assert many() - before < 4096  # KiB; 40,000 leaked messages would be more
        assert (sys.getrefcount(sub._feeds[0]), sys.getrefcount(value), sys.getrefcount(pub._rings[0])) == references


VICTIM = """
import sys, torch, shmtensor
channel, role = sys.argv[1:]
value = torch.ones(64)
if role == "sender":
    pub = shmtensor.Publisher(channel, slots=4)
    pub.wait_for_subscribers(1, timeout=60)
    while True:
        pub.send(value * pub.statistics().sent)
        if pub.statistics().sent == 500:
            print("going", flush=True)
else:
    sub = shmtensor.Subscriber(channel)
    for msg in sub:
        if msg.seq % 500 == 0:
            print("going", flush=True)
"""


@needs_hot
@pytest.mark.slow
@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize("attempt", range(3))
def test_killed_in_full_flight(channel, role, attempt):
    """Whoever is killed while it sends or receives this way: the others go on, and nothing stays."""
    sub = Subscriber(channel)
    pub = None if role == "sender" else Publisher(channel, slots=4)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, channel, role], stdout=subprocess.PIPE, text=True)
    try:
        if pub:
            pub.wait_for_subscribers(2, timeout=PATIENCE)
            stop = threading.Event()

            def flow():
                while not stop.is_set():
                    pub.send(torch.full((64,), float(pub.statistics().sent)), timeout=PATIENCE)

            thread = threading.Thread(target=flow)
            thread.start()
            told = threading.Thread(target=lambda: (victim.stdout.readline(), victim.kill(), victim.wait()))
            told.start()
            last = 0
            while told.is_alive() or last < 1000:
                msg = sub.recv(timeout=PATIENCE)
                assert msg.seq == last + 1
                assert msg.value.tolist() == [float(last)] * 64
                last = msg.seq
            stop.set()
            while thread.is_alive():
                try:
                    sub.recv(timeout=0.01)
                except shmtensor.TimedOut:
                    pass
            thread.join()
            pub.close()
        else:
            told = threading.Thread(target=lambda: (victim.stdout.readline(), victim.kill(), victim.wait()))
            told.start()
            last = 0
            for msg in sub:
                assert msg.seq == last + 1
                assert msg.value.tolist() == [float(last)] * 64
                last = msg.seq
            told.join()
            assert last >= 500
        del msg
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
        sub.close()
    assert victim.returncode == -signal.SIGKILL
    Publisher(channel).close()
    assert not shared_files()


def test_pure_python_when_asked(channel):
    source = (
        "import sys, torch, shmtensor\nfrom shmtensor import hot\nassert not hot.BUILT\n"
        "pub, sub = shmtensor.Publisher(sys.argv[1]), shmtensor.Subscriber(sys.argv[1])\n"
        "for n in range(40):\n    pub.send(torch.full((3,), float(n)))\n"
        "    assert sub.recv(timeout=60).value.tolist() == [float(n)] * 3\n"
        "assert pub._outbox is None and sub._inlet is None\n"
    )
    environment = {**os.environ, "SHMTENSOR_PURE": "1"}
    subprocess.run([sys.executable, "-c", source, channel], env=environment, check=True, timeout=2 * PATIENCE)


@pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta.*:UserWarning")
def test_tensors_that_share_no_more_than_their_look_with_one_sent_before(channel):
    """A description is known by class, dtype and shape; what has these and is no plain tensor goes its own way."""
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        for _ in range(3):
            pub.send(torch.ones(3, 3))
            sub.recv(timeout=30)
        pub.send(torch.eye(3).to_sparse_csr())
        assert torch.equal(sub.recv(timeout=30).value.to_dense(), torch.eye(3))
        pub.send(torch._efficientzerotensor((3, 3)))
        assert torch.equal(sub.recv(timeout=30).value, torch.zeros(3, 3))
        freed = torch.ones(3, 3)
        freed.untyped_storage().resize_(0)
        for value in (freed, {"a": freed}):
            with pytest.raises(shmtensor.ArgumentError, match="no memory"):
                pub.send(value)
        pub.send(torch.full((3, 3), 7.0))
        assert sub.recv(timeout=30).value[0, 0] == 7


@needs_hot
@pytest.mark.parametrize("kind", [(Publisher, Subscriber), (Producer, Consumer)], ids=["fan-out", "work queue"])
def test_a_slot_that_is_held_is_passed_by(channel, kind):
    """Slots 1 and 2 are a reader's views; messages go by the compiled module all the same, two at a time."""
    value = torch.zeros(64)
    sender, receiver = kind
    with sender(channel, slots=16) as out, receiver(channel) as into:
        for _ in range(2):
            out.send(value)
            assert into.recv(timeout=60).nbytes == value.nbytes
        for _ in range(3):
            out.send(value)
        first, *kept = [into.recv(timeout=60).value for _ in range(3)]
        del first
        before = out._outbox.sent_bytes
        for _ in range(100):
            out.send(value)
            out.send(value)
            pair = [into.recv(timeout=60).value for _ in range(2)]
            assert not {view.data_ptr() for view in pair} & {view.data_ptr() for view in kept}
            del pair
        assert out._outbox.sent_bytes - before == 200 * value.nbytes
        del kept


@needs_hot
def test_what_others_took_is_passed_by_though_its_slot_is_used_again(channel):
    value = torch.zeros(64)
    with Producer(channel, slots=8) as out, Consumer(channel) as one, Consumer(channel) as other:
        for _ in range(4):
            for into in (one, other):
                out.send(value)
                into.recv(timeout=60).release()
        for _ in range(20):
            for _ in range(5):
                out.send(value)
                one.recv(timeout=60).release()
            before = other._inlet.received
            out.send(value)
            other.recv(timeout=60).release()
            assert other._inlet.received == before + 1
