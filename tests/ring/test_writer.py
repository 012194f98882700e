"""The writer: its two implementations do the same, and the compiled one sends every kind of value in one call."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber, native
from shmtensor.codec.copies import ALONE
from shmtensor.endpoints.sender import Sender
from shmtensor.memory.words import store
from shmtensor.ring.layout import DONE, L_PUBLISHED, R_RECORDS, RECORD_WORDS, RELEASED, STATE_WORDS, VERDICT
from shmtensor.ring.writer import Writer

from ..implementations import only
from ..waiting import PATIENCE

needs_native = only("compiled", "the reference leaves more to the endpoint; or the test drives both")
PATTERNS = pytest.mark.parametrize("pattern", [(Publisher, Subscriber), (Producer, Consumer)], ids=["fan-out", "queue"])

KINDS = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "array": np.arange(5, dtype=np.int16),
    "bool": np.array([True, False]),
    "nothing in it": torch.empty(0, 3),
    "number": np.array(7),
    "scalar": np.float32(2.5),
    "bytes": b"some bytes",
    "text": {"name": "x" * 300, "id": 2**70, "ok": True, "none": None, "f": 0.5},
    "four tensors": {f"t{i}": torch.full((4,), float(i)) for i in range(4)},
    "step": {"obs": np.zeros((4, 4), np.uint8), "reward": 1.0, "done": False, "info": {"lives": 3}},
    "nested": [torch.ones(2), (np.zeros(3), {"deep": [torch.zeros(1), "s"]}), None],
    "spilled": {f"key number {i}": torch.full((1,), float(i)) for i in range(40)},
}


def same(a, b) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(np.all(a == b))


@needs_native
@PATTERNS
@pytest.mark.parametrize("meta", [None, {"id": 7}], ids=["plain", "meta"])
def test_every_kind_of_value_is_sent_in_one_call(channel, pattern, meta, monkeypatch):
    with pattern[0](channel, slots=4, slot_bytes=1 << 14) as tx, pattern[1](channel) as rx:
        tx.send(np.zeros(1))  # reads the table of members
        rx.recv(timeout=PATIENCE).release()
        monkeypatch.setattr(Sender, "_put", lambda *args: pytest.fail("left to the endpoint"))
        for number, value in enumerate(list(KINDS.values()) * 2):
            assert tx.send(value, meta) == number + 2
            msg = rx.recv(timeout=PATIENCE)
            assert same(value, msg.value)
            assert msg.meta == meta
            msg.release()
            del msg
        assert tx.statistics().sent == tx._words[L_PUBLISHED] == 2 * len(KINDS) + 1


@pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning")
@PATTERNS
def test_what_is_left_to_the_endpoint_arrives_as_well(channel, pattern, implementation):
    sparse = torch.eye(3).to_sparse_csr()
    values = [np.zeros(ALONE + 1, np.uint8), sparse, {"s": sparse, "t": torch.ones(2)}, torch.ones(3)]
    with pattern[0](channel) as tx, pattern[1](channel) as rx:
        for value in values:
            tx.send(value)
            with rx.recv(timeout=PATIENCE) as msg:
                got = msg.value["s"] if isinstance(value, dict) else msg.value
            if isinstance(got, torch.Tensor) and got.layout is torch.sparse_csr:
                assert torch.equal(got.to_dense(), torch.eye(3))


def test_a_closed_sender_sends_nothing_by_its_writer(channel, implementation):
    tx = Producer(channel)
    tx.send(torch.ones(1))
    writer = tx._writer
    with pytest.warns(ResourceWarning):
        tx.close()
    assert type(writer.send(torch.ones(1), None, 0)) is not int
    with pytest.raises(shmtensor.ClosedError):
        tx.send(torch.ones(1))


def test_wrong_calls_are_refused(channel, implementation):
    with Publisher(channel, slots=2, slot_bytes=64) as pub:
        writer = pub._writer
        for wrong in (
            lambda: writer.lend(0, 0, weakref.ref(pub)),
            lambda: writer.judge(0, 1),
            lambda: writer.publish(0, 1, b"", 0, False, None),
            lambda: writer.free_slots(3),
            lambda: writer.acquire(None),
        ):
            with pytest.raises((ValueError, TypeError, LookupError)):
                wrong()


def test_full_rings_are_not_searched_for_every_message(channel, monkeypatch):
    """A queue may have thousands of items in many rings, and a put must not look at them all."""
    looks = []
    is_free = Writer._is_free
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(Writer, "_is_free", lambda *args, **look: looks.append(1) or is_free(*args, **look))
    with Publisher(channel, slots=64, slot_bytes=64, full="grow") as pub, Subscriber(channel) as sub:
        for number in range(8 * 64):
            pub.send(number)
        assert pub.statistics().rings == 8
        looks.clear()
        for number in range(8 * 64):
            pub.send(number)
        assert len(looks) < 60 * 8 * 64  # all slots: 768 on average
        for number in (*range(8 * 64), *range(8 * 64)):
            assert sub.recv(timeout=PATIENCE).value == number
        for number in range(16 * 64):  # all of them are found again
            pub.send(number)
        assert pub.statistics().rings == 16


MEMBERS = (3, 77, 200)


class Twin:
    """A sender whose writer is driven by hand, and receivers that are played."""

    def __init__(self, tx, competing: bool) -> None:
        self.tx, self.writer, self.competing = tx, tx._writer, competing
        self.arrays: dict[tuple[int, int], np.ndarray] = {}

    def say(self, seq: int, member: int, taken: bool) -> None:
        """A receiver leases message `seq`, or gives it back (work queue: has done it, or given it back)."""
        place = self.tx._words[self.tx._order + (seq & self.tx._mask)]
        ring, slot = self.tx._rings[place >> 32], place & 0xFFFFFFFF
        if ring.words[R_RECORDS + slot * RECORD_WORDS] != seq:
            return
        if self.competing:
            at = ring.state + STATE_WORDS * slot
            store(ring.words, at + DONE, seq)
            if not taken:
                store(ring.words, at + RELEASED, seq)
            if seq % 5 == 0:
                store(ring.words, at + VERDICT, seq << 8 | 1)
        else:
            store(ring.words, ring.state + member * ring.row + slot, 2 * seq + (not taken))

    def do(self, what: str, a: int, b: int):
        writer, tx = self.writer, self.tx
        place = None
        if what in ("send", "loan"):
            place = writer.acquire(a)
            if place is None:
                return None
            ring, slot = place
            if what == "loan":
                self.arrays[ring.index, slot] = np.zeros(1)
                writer.lend(ring.index, slot, weakref.ref(self.arrays[ring.index, slot]))
                if b % 2:
                    return ring.index, slot
            array = self.arrays.get((ring.index, slot)) if what == "loan" else None
            guard = None if array is None else weakref.ref(array)
            del array
            return ring.index, slot, writer.publish(ring.index, slot, bytes(b % 208), a, False, guard)
        if what == "drop":
            for key in sorted(self.arrays)[: 1 + b % 3]:
                del self.arrays[key]
            return gc.collect(0) >= 0
        if what == "say":
            seq = tx._words[L_PUBLISHED] - a % 12
            return self.say(seq, MEMBERS[b % 3], b % 4 == 0) if seq > 0 else None
        if what == "members":
            leaving = MEMBERS[: b % 2]
            return writer.address(MEMBERS[b % 2 :], leaving, a % 3 == 0 and not self.competing, (), (), (), 1)
        if what == "forget":
            return writer.forget(MEMBERS[b % 3])
        if what == "welcome":
            return writer.welcome(MEMBERS[b % 3], max(1, tx._words[L_PUBLISHED] - 2))
        if what == "judge":
            for ring, slot, seq, _ in writer.messages():
                if self.competing and seq % 5 == 0:
                    writer.judge(ring.index, slot)
            return None
        if what == "reclaim":
            return self.competing and writer.reclaim()
        messages = [(ring.index, *rest) for ring, *rest in writer.messages()]
        return (
            messages, writer.has_room(a), [writer.free_slots(ring.index) for ring in writer.rings],
            writer.is_settled(()), writer.is_settled(MEMBERS[:1]), writer.oldest(), writer.busy, writer.sent_bytes,
        )  # fmt: skip


def drive(channel: str, competing: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls of both implementations find the same slots, and leave the same words."""
    rng = random.Random(seed)
    kind = Producer if competing else Publisher
    options = {} if competing or seed % 3 else {"history": 2}
    monkeypatch.setattr(kind, "_traits", replace(kind._traits, checks_verdicts=seed % 2 == 1))
    monkeypatch.setattr(kind, "_lose", lambda *args: None)
    with kind(channel + "-c", slots=8, slot_bytes=256, **options) as compiled, monkeypatch.context() as patch:
        patch.setattr(native, "module", None)
        with kind(channel + "-r", slots=8, slot_bytes=256, **options) as reference:
            assert type(reference._writer) is Writer
            assert type(compiled._writer) is not Writer
            twins = [Twin(tx, competing) for tx in (compiled, reference)]
            for tx in (compiled, reference):
                for nbytes in (1, 1024, 1024):  # two rings of each size, and one more
                    tx._pool.add(nbytes)
            ops = ["send"] * 8 + ["say"] * 12 + ["loan", "drop", "look", "members", "judge", "reclaim", "look", "look"]
            ops += [] if competing else ["forget", "welcome"]
            for step in range(1500):
                what, a, b = rng.choice(ops), rng.choice((1, 100, 256, 700, 1024, 2000, 3000)), rng.randrange(1000)
                answers = [twin.do(what, a, b) for twin in twins]
                assert answers[0] == answers[1], (step, what, a, b)
            for mine, theirs in zip(compiled._rings, reference._rings, strict=True):
                for slot in range(mine.slots):
                    at = R_RECORDS + slot * RECORD_WORDS
                    kept = [list(ring.words[at + 2 : at + RECORD_WORDS]) for ring in (mine, theirs)]
                    assert mine.words[at] == theirs.words[at]
                    assert mine.words[at] == 0 or kept[0] == kept[1]
            for twin in twins:
                twin.arrays.clear()


@needs_native
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("competing", [False, True], ids=["fan-out", "queue"])
def test_both_writers_do_the_same(channel, competing, seed, monkeypatch):
    drive(channel, competing, seed, monkeypatch)
