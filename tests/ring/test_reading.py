"""Receiving, by both implementations: every kind of value in every mode, damage, misuse, exceptions."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber, native
from shmtensor.codec import implementation as chosen
from shmtensor.codec.copies import ALONE
from shmtensor.endpoints.sender import Sender
from shmtensor.memory.words import store
from shmtensor.wire.record import INLINE_OFFSET, SIZE

from ..faults.interrupts import interrupted, stride
from ..implementations import only

PATIENCE = 30
PATTERNS = {
    "fan-out": (Publisher, Subscriber, {}),
    "latest": (Publisher, Subscriber, {"delivery": "latest"}),
    "work queue": (Producer, Consumer, {}),
}
VALUES: dict[str, Any] = {
    "tensor": torch.arange(12).reshape(3, 4),
    "turned": torch.arange(12).reshape(3, 4).t(),
    "array": np.linspace(0, 1, 7),
    "scalars": [1, -(1 << 80), 2.5, True, None, "text", (), {}],
    "bytes": b"bytes",
    "nested": {"a": [torch.ones(3, dtype=torch.bfloat16), {"b": np.arange(4), 3: (b"x", "y")}], "n": 7},
    "many leaves": [torch.full((n + 1,), n) for n in range(40)],
    "empty": {"none": np.empty((0, 3)), "zero": torch.empty(0)},
    "tied": (lambda t: {"whole": t, "part": t[1:]})(torch.arange(6)),
    "odd": {"sparse": torch.eye(3).to_sparse(), "record": np.zeros(2, [("a", "i4"), ("b", "f8")]), "id": 5},
    "large": {"frame": torch.arange(100_000), "id": 1},
}


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return (
            torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b) and a.dtype == b.dtype
        )
    if isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and type(a) is type(b)


in_every_mode = pytest.mark.parametrize("pattern", PATTERNS)


@contextlib.contextmanager
def ends(channel, pattern):
    make_tx, make_rx, options = PATTERNS[pattern]
    with make_tx(channel, slots=4, slot_bytes=4096, full="grow") as tx, make_rx(channel, **options) as rx:
        yield tx, rx


@in_every_mode
@pytest.mark.parametrize("kind", VALUES)
def test_every_value_in_every_mode(channel, pattern, kind, implementation):
    with ends(channel, pattern) as (tx, rx):
        for meta in (None, {"id": 7, "tags": ["a", 1.5]}, None):
            for before in (torch.zeros(3), VALUES[kind]):
                seq = tx.send(before, meta=meta)
                message = rx.recv(timeout=PATIENCE)
                assert same(message.value, before)
                assert (message.meta, message.seq, message.attempt, message.missed) == (meta, seq, 1, 0)
                message.release()
                del message
        assert rx.statistics().leases == 0
        assert (rx._direct is not None) == (implementation == "compiled")


@in_every_mode
def test_several_senders_take_turns(channel, pattern, implementation):
    make_tx, make_rx, options = PATTERNS[pattern]
    with contextlib.ExitStack() as stack:
        rx = stack.enter_context(make_rx(channel, **options))
        senders = [stack.enter_context(make_tx(channel)) for _ in range(3)]
        for number, tx in enumerate(senders):
            tx.send(number)
            rx.recv(timeout=PATIENCE).release()
        count = 1 if pattern == "latest" else 5
        for turn in range(4):
            for number, tx in enumerate(senders):
                for _ in range(count):
                    tx.send((number, turn))
            found = [rx.recv(timeout=PATIENCE).value for _ in range(3 * count)]
            assert sorted(found) == [(number, turn) for number in range(3) for _ in range(count)]
            for start in range(3 * count - 7):  # not in strict order: looks for the dead come in between
                assert len(set(found[start : start + 7])) == 3
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        assert (rx._direct is not None) == (implementation == "compiled")
        senders[1].close()
        senders[2].send("more")
        assert rx.recv(timeout=PATIENCE).value == "more"


def test_history_and_several_rings(channel):
    with Publisher(channel, slots=8, slot_bytes=256, full="grow", history=5) as tx:
        for number in range(9):
            tx.send({"n": number, "x": torch.full((100 * number + 1,), number)})
        with Subscriber(channel) as early, Subscriber(channel, delivery="latest") as latest:
            assert latest.recv(timeout=PATIENCE).value["n"] == 8
            for number in range(4, 9):
                message = early.recv(timeout=PATIENCE)
                assert (message.value["n"], message.value["x"].sum()) == (number, number * (100 * number + 1))
            tx.send({"n": 9, "x": torch.zeros(1)})
            assert early.recv(timeout=PATIENCE).value["n"] == 9
            tx.send({"n": 10, "x": torch.zeros(1)})
            tx.send({"n": 11, "x": torch.zeros(1)})
            message = latest.recv(timeout=PATIENCE)
            assert (message.value["n"], message.missed) == (11, 2)
            del message
            assert early.statistics().received == 6


@in_every_mode
def test_a_message_is_held_by_any_of_its_leaves(channel, pattern):
    with ends(channel, pattern) as (tx, rx):
        tx.send({"a": torch.ones(4), "b": [np.arange(3)], "c": 1})
        message = rx.recv(timeout=PATIENCE)
        array = message.value["b"][0][1:]
        message.release()
        del message
        assert rx.statistics().leases == 1
        assert array.flags.writeable == isinstance(rx, Consumer)
        rx.close()
        assert array.tolist() == [1, 2]
        assert "views alive" in repr(rx)
        del array
        assert "views alive" not in repr(rx)


DAMAGE = {
    "version": (16, "<u2", 77), "flags": (18, "<u2", 6), "ring": (20, "<u4", 3), "slot": (24, "<u4", 1),
    "span": (28, "<u4", 9), "length": (32, "<u4", 209), "reserved": (36, "<u4", 1), "nbytes": (40, "<u8", 1 << 40),
    "description": (INLINE_OFFSET, "<u8", (1 << 64) - 1), "leaf": (INLINE_OFFSET + 9, "<u1", 255),
}  # fmt: skip


@pytest.mark.parametrize("field", DAMAGE)
@pytest.mark.parametrize("pattern", ["fan-out", "work queue"])
def test_damage_is_told_in_the_same_words(channel, pattern, field, caplog, monkeypatch):
    """By the reference and by the compiled module; the slot comes back, and what follows is received."""
    make_tx, make_rx, _ = PATTERNS[pattern]
    told = []
    at, kind, value = DAMAGE[field]
    for reference in (False, True):
        if reference:
            monkeypatch.setattr(native, "module", None)
        caplog.clear()
        with make_tx(channel, slots=1, full="error") as tx, make_rx(channel) as rx:
            tx.send(torch.ones(4))
            rx.recv(timeout=PATIENCE).release()
            tx.send(torch.ones(4))
            record = np.frombuffer(tx._rings[0].view, np.uint8)[tx._rings[0].records :][:SIZE]
            field_of_record = np.ndarray((), kind, record, at)
            before = int(field_of_record)
            field_of_record[...] = value
            with caplog.at_level(logging.ERROR), pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0)
            field_of_record[...] = before  # a sender writes what it describes like before only once
            del record, field_of_record
            assert rx.statistics().bad_records == 1
            told.append([line.getMessage().partition("passed over: ")[2] for line in caplog.records])
            tx.send(torch.full((4,), 2.0))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value.tolist() == [2.0] * 4
            assert rx.statistics().leases == 0
    assert told[0] == told[1]
    assert len(told[0]) == 1


def test_an_order_entry_that_leads_nowhere(channel):
    with Publisher(channel, slots=8) as tx, Subscriber(channel) as rx:
        tx.send(torch.ones(4))
        rx.recv(timeout=PATIENCE).release()
        for entry in (5 << 32, 9, 1 << 63):
            tx.send(torch.ones(4))
            sequences = tx._sequences
            store(sequences.words, sequences.shape.order + (sequences.published & sequences.mask), entry)
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0)
        assert rx.statistics().bad_records == 3


class Interrupt(BaseException):
    pass


@in_every_mode
@pytest.mark.parametrize("times", [1, 2])
def test_an_exception_that_arrives_while_a_leaf_is_made(channel, pattern, times, monkeypatch, implementation):
    """Once: the message is there for the next call. Again at once: it comes again."""
    with ends(channel, pattern) as (tx, rx):
        raised: list[int] = []
        target = chosen._Message if implementation == "compiled" else type("", (), {"node_at": None})
        if implementation == "pure":
            pytest.skip("the reference's boundaries are enumerated in faults/test_interrupts.py")
        node_at = target.node_at

        def interrupted(self, at):
            if len(raised) < times:
                raised.append(at)
                raise Interrupt
            return node_at(self, at)

        monkeypatch.setattr(target, "node_at", interrupted)
        tx.send(VALUES["odd"])
        with pytest.raises(Interrupt):
            rx.recv(timeout=PATIENCE)
        assert len(raised) == times
        message = rx.recv(timeout=PATIENCE)
        assert same(message.value, VALUES["odd"])
        assert message.attempt == 1
        message.release()
        del message
        gc.collect()
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        assert rx.statistics().leases == 0
        assert rx.statistics().received == 1


@in_every_mode
def test_a_message_that_memory_lacks_for_stays(channel, pattern, monkeypatch, implementation):
    """Its bytes are right: it is not passed over as damaged, and comes first when there is memory."""
    values = [np.bytes_(b"first"), np.bytes_(b"second")]
    with ends(channel, pattern) as (tx, rx), contextlib.ExitStack() as held:
        if pattern == "latest":  # it takes the newest only
            values.pop()
        for value in values:
            tx.send(value)
        with monkeypatch.context() as short:
            short.setattr("shmtensor.codec.decode.compose", lambda *_: bytearray(1 << 62))
            for _ in range(3):
                with pytest.raises(MemoryError):
                    rx.recv(timeout=PATIENCE)
        for value in values:
            message = held.enter_context(rx.recv(timeout=PATIENCE))
            assert (message.value, message.attempt) == (value, 1)
        assert rx.statistics().bad_records == 0


@only("compiled", "the reference decodes with the mutex: no other thread takes a message meanwhile")
@pytest.mark.parametrize("pattern", ["fan-out", "latest"])
@pytest.mark.parametrize("then", ["recv", "close"])
def test_two_exceptions_in_one_decoding_while_another_thread_takes_the_next(channel, pattern, then, monkeypatch):
    """The message comes after that one; newest-only, it counts as missed."""
    sender, receiver, options = PATTERNS[pattern]
    depth = {"depth": 3} if pattern == "latest" else {}
    with sender(channel, slots=4) as tx, receiver(channel, **options, **depth) as rx:
        node_at, times, sent = chosen._Message.node_at, [], []
        entered, go = threading.Event(), threading.Event()

        def interrupted(self, at):
            # the first time this thread alone receives: a locked mutex is its own, and no other could take the next one
            if threading.current_thread() is thread and (len(times) == 1 or not (times or rx._mutex.locked())):
                times.append(at)
                if len(times) == 1:
                    entered.set()
                    go.wait(PATIENCE)
                raise Interrupt
            return node_at(self, at)

        def receive():
            with pytest.raises(Interrupt):
                while True:  # until one is decoded without the mutex: not where the receiver checks who lives
                    sent.append(tx.send(VALUES["odd"]))
                    rx.recv(timeout=PATIENCE).release()

        thread = threading.Thread(target=receive)
        monkeypatch.setattr(chosen._Message, "node_at", interrupted)
        for _ in range(2):
            tx.send(VALUES["odd"])
        thread.start()
        assert entered.wait(PATIENCE)
        first = sent[-1] - 2
        got = [rx.recv(timeout=PATIENCE).seq]
        go.set()
        thread.join(PATIENCE)
        if then == "recv":
            got += [rx.recv(timeout=PATIENCE).seq for _ in range(2 if pattern == "fan-out" else 1)]
            missed = [] if pattern == "fan-out" else [first]
            assert sorted(got + missed) == [first, first + 1, first + 2]
            assert rx.statistics().missed == len(missed)
            gc.collect()
            assert rx.statistics().leases == 0
            for _ in range(8):  # every slot is free again
                tx.send(VALUES["odd"], timeout=PATIENCE)
                rx.recv(timeout=PATIENCE).release()
        rx.close()
        gc.collect()
        assert (rx._state, rx._leases()) == ("closed", 0)


@only("compiled", "the reference has no such call")
def test_neither_an_exception_from_outside_nor_the_item_s_own_error_is_lost(channel, monkeypatch):
    """The one arrives while the value is decoded, the other is raised by what is made of it."""
    with ends(channel, "work queue") as (tx, rx):
        node_at, made, raised = chosen._Message.node_at, [], []

        def interrupted(self, at):
            if not raised:
                raised.append(at)
                raise Interrupt
            return node_at(self, at)

        def fail(value):
            raise ValueError("of the item")

        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        tx.send(VALUES["odd"])
        monkeypatch.setattr(chosen._Message, "node_at", interrupted)
        with pytest.raises(Interrupt) as caught:
            while rx._direct.consume(fail, made, None) is None:  # a look is due first
                pass
        assert str(caught.value.__context__) == "of the item"
        del caught  # its frames refer to the value
        assert (made, rx.statistics().leases) == ([], 0)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.6)  # it is done


@in_every_mode
def test_nothing_is_kept(channel, pattern):
    with ends(channel, pattern) as (tx, rx):
        value = VALUES["nested"]

        def many():
            for _ in range(300):
                tx.send(value, meta={"id": 1})
                rx.recv(timeout=PATIENCE).release()
            gc.collect()
            return [sys.getrefcount(each) for each in (rx._readers[0], rx, rx._undelivered, None, shmtensor.Message)]

        many()
        before = many()
        after = many()
        assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True))


@pytest.mark.slow
@only("compiled", "the reference allocates only what Python counts, as the test above does")
def test_memory_does_not_pile_up(channel):
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as sub:
        value = torch.ones(16)

        def many():
            for _ in range(40_000):
                pub.send(value)
                sub.recv(timeout=PATIENCE)
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        many()
        references = sys.getrefcount(sub._readers[0]), sys.getrefcount(value), sys.getrefcount(pub._rings[0])
        before = many()
        assert many() - before < 4096  # KiB; 40,000 leaked messages would be more
        assert (sys.getrefcount(sub._readers[0]), sys.getrefcount(value), sys.getrefcount(pub._rings[0])) == references


@only("compiled", "the reference sorts its readers")
def test_looking_for_the_oldest_message_of_many_senders_that_have_none(channel):
    """It costs about as much as looking at each of them once."""
    with Producer(channel) as tx, Consumer(channel) as rx:
        tx.send(1)
        rx.recv(timeout=PATIENCE).release()

        def cost(by_age):
            readers, found = native.module.ReaderSet(rx._readers * 200, by_age), []
            for _ in range(300):
                begun = time.perf_counter()
                assert readers.recv(rx, {}, 0) is None
                found.append(time.perf_counter() - begun)
            return min(found)

        assert cost(True) < 10 * cost(False)  # with a look at all for each: 50 times as much


@only("compiled", "the reference's own types trust their callers")
def test_the_compiled_types_refuse_misuse(channel):
    module = native.module
    reader = module.Reader.__new__(module.Reader)  # never made
    for call in (
        lambda: reader.next(), lambda: reader.begin(), lambda: reader.age(), lambda: reader.has_lease(0, 0, 1),
        lambda: reader.add_ring(b"", b"", 1, 1, 1, 1), lambda: reader.set_siblings(()),
        lambda: reader.take_unfinished(None, {}), lambda: reader.take_named(1, None, {}),
        lambda: reader.take(None, [], 0), lambda: reader.take(None, {}), lambda: reader.take(None, {}, "x"),
        lambda: module.ReaderSet(), lambda: module.ReaderSet([], False), lambda: module.ReaderSet([reader], False),
        lambda: module.ReaderSet([1], False), lambda: module.ReaderSet((), False),
        lambda: module.Lease(), lambda: module.Reader(codec=1), lambda: module.Received(1),
        lambda: setattr(reader, "position", -1), lambda: setattr(reader, "position", "x"),
    ):  # fmt: skip
        with pytest.raises((TypeError, RuntimeError, ValueError, OverflowError)):
            call()
    assert reader.take(None, {}, 0) is None
    with Producer(channel, slots=4) as tx, Consumer(channel) as rx:
        tx.send(torch.ones(4))
        message = rx.recv(timeout=PATIENCE)
        made, readers = rx._readers[0], rx._direct
        lease = message._lease
        assert bytes(lease) == torch.ones(4).numpy().tobytes()
        words = np.zeros(8, np.uint64)
        no_ring = SimpleNamespace(
            index=1, slots=1, slot_bytes=0, state=64, row=1, words=np.zeros(99, np.uint64), buffer=bytearray(64)
        )
        for wrong in (
            lambda: made.add_ring(words, words, 4, 64, 8, 0),
            lambda: made.add_ring(words, words, 1 << 60, 1 << 60, 8, 0),
            lambda: made.add_ring(words, words, 0, 0, 0, 0), lambda: made.set_siblings((1 << 40,)),
            lambda: made.__init__(made.reception, made.sequences, made.index, 0, None, None),
            lambda: made.take(None, {}, -1, 2), lambda: readers[rx, {}, 1, 0], lambda: readers[None],
            lambda: readers[None, [], None, 0], lambda: readers[None, {}, None, "x"],
            lambda: readers.recv(None, {}, "x"),
            lambda: readers.consume(None, (), None), lambda: readers.recv(None, [], 0), lambda: readers.recv(),
            lambda: tx._writer.add_ring(no_ring),
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError, AttributeError)):
                wrong()
        for odd in (1, (), (lease,), (lease, None, None, 5), (1, None, None, None)):  # what is in a hand
            assert readers[rx, {}, SimpleNamespace(last=odd), 0] is None
        assert tx._writer.acquire(1 << 63) is tx._writer.acquire((1 << 64) - 1, 0, 1 << 63) is None
        assert not made.has_lease(99, 99, 1)
        assert made.take_named(1, rx, {}) is None  # it is ours already
        message.release()
        lease.acknowledge()
        del message
        assert lease.acknowledged
        del lease
        assert rx.statistics().leases == 0


@only("compiled", "no Python object is made of what goes on there; the reference makes many")
def test_a_chain_of_messages_ends_without_recursion():
    message = None
    for _ in range(300_000):
        message = native.module.Received(message, None, 1, None, 0, 0, 0, 0, None, None, None)
    del message


NO_MEMORY = """
import queue, sys, _testcapi
import shmtensor

def failing(number, call):
    _testcapi.set_nomemory(number, number + 1)
    try:
        return call(), False
    except MemoryError:
        return None, True
    except RuntimeError as error:  # of `threading`: no lock
        return None, True
    finally:
        _testcapi.remove_mem_hooks()

with shmtensor.Publisher(sys.argv[1]) as pub, shmtensor.Subscriber(sys.argv[1]) as sub:
    for warm in range(300):
        pub.send(warm)
        sub.recv(timeout=60).release()
    for number in range(30):
        before = pub.statistics().sent
        _, failed = failing(number, lambda: pub.send("x"))
        assert pub.statistics().sent - before == 1 - failed, number
        while pub.statistics().sent > sub.statistics().received:
            sub.recv(timeout=60).release()
items = shmtensor.Queue()
for warm in range(300):
    items.put(warm)
    items.get(timeout=60)
for number in range(60):
    items.put(number)
    found, failed = failing(number, lambda: items.get(timeout=60))
    assert (items.get(timeout=60) if failed else found) == number
items.close()
"""


@only("compiled", "the reference makes an object at each step, also when the message is published")
def test_one_allocation_that_fails(channel):
    """Whichever it is: what an error comes of was not sent, and not taken."""
    pytest.importorskip("_testcapi")
    done = subprocess.run([sys.executable, "-c", NO_MEMORY, channel], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_a_newest_only_reader_takes_nothing_from_before_it_was_counted(channel, implementation, monkeypatch):
    """It comes between the publisher's look at the members and the publication: that message no lock protects."""
    came = []

    def come(self, *args):
        if not came:
            came.append(held.enter_context(shmtensor.Subscriber(channel, delivery="latest")))
            with pytest.raises(shmtensor.TimedOut):
                came[0].recv(timeout=0)
        return fill(self, *args)

    with contextlib.ExitStack() as held:
        pub = held.enter_context(shmtensor.Publisher(channel, slots=2))
        pub.send(np.zeros(ALONE + 8, np.uint8))
        fill = Sender._fill
        monkeypatch.setattr(Sender, "_fill", come)
        pub.send(np.ones(ALONE + 8, np.uint8))
        with pytest.raises(shmtensor.TimedOut):
            came[0].recv(timeout=0)
        pub.send(np.full(ALONE + 8, 2, np.uint8))
        message = came[0].recv(timeout=PATIENCE)
        for number in range(3, 9):  # its slot is not used again while it is held
            pub.send(np.full(ALONE + 8, number, np.uint8))
            assert (message.value == 2).all()
        message.release()
        del message


@pytest.mark.usefixtures("nothing_is_skipped")
@pytest.mark.parametrize("pattern", ["fan-out", "work queue"])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_rings_that_come_while_exceptions_arrive(channel, pattern, who, implementation):
    """Who is interrupted while it adds or maps a ring: what is sent and received afterwards goes through all rings."""
    make_tx, make_rx, _ = PATTERNS[pattern]
    for at in range(1, 10_000, stride(7 if who == "sender" else 17)):
        with make_tx(channel) as tx, make_rx(channel) as rx:
            tx.wait_for_subscribers(1) if pattern == "fan-out" else tx.wait_for_consumers(1)
            tx.send(np.zeros(8))
            sizes = [8, 600, 9000, 3]
            if who == "sender":
                attempt = interrupted(lambda tx=tx: tx._run(tx._pool.add, 5000), at)
            else:
                attempt = interrupted(lambda rx=rx: rx.recv(timeout=PATIENCE), at)
                if attempt.result is not None:
                    assert attempt.result.value.shape == (sizes.pop(0),)
                    attempt.result.release()
                    attempt.result = None
            for size in (600, 9000, 3):
                tx.send(np.ones(size))
            for size in sizes:
                with rx.recv(timeout=PATIENCE) as message:
                    assert message.value.shape == (size,)
                del message
        if not attempt.reached:
            return
