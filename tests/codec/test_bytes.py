"""`bytes`, `bytearray` and `memoryview` are values: they arrive as `bytes`, by every way that a message goes."""

from __future__ import annotations

import array
import asyncio
import gc
import mmap
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber
from shmtensor.errors import WireError
from shmtensor.wire import spec
from shmtensor.wire.dtypes import BY_NAME

from .another import decode, encode, payload_of, travel

PATTERNS = pytest.mark.parametrize("pattern", [(Publisher, Subscriber), (Producer, Consumer)], ids=["fan-out", "queue"])


LARGE = bytes(range(256)) * 8192  # 2 MiB: copied by torch's threads
SOURCES = {
    "bytes": b"\0abc\xff",
    "empty": b"",
    "bytearray": bytearray(b"\0\1"),
    "memoryview": memoryview(b"abc"),
    "slice": memoryview(b"abcdef")[1:4],
    "every second": memoryview(b"abcdef")[::2],
    "backwards": memoryview(b"abcdef")[::-1],
    "floats": memoryview(array.array("d", [1.5, -0.0])),
    "matrix": memoryview(np.arange(6, dtype=">i4").reshape(2, 3)),
    "transposed": memoryview(np.arange(6, dtype="u2").reshape(2, 3).T),
    "no rows": memoryview(np.empty((0, 3))),
    "a number": memoryview(np.array(7)),
    "subclass": type("Blob", (bytes,), {})(b"blob"),
    "1 KiB": bytes(1024),
    "large": LARGE,
    "large bytearray": bytearray(LARGE),
}


@pytest.mark.parametrize("source", SOURCES)
@PATTERNS
def test_they_arrive_as_bytes(channel, pattern, source):
    sent = SOURCES[source]
    expected = bytes(sent)
    with pattern[0](channel) as tx, pattern[1](channel) as rx:
        for value in (sent, {"a": sent, "b": torch.ones(2), 3: [sent, (sent, None)]}, [sent]):
            tx.send(value)
            with rx.recv(timeout=100) as msg:
                got = msg.value
                if isinstance(value, dict):
                    assert (got["b"].sum(), got[3][1][1]) == (2, None)
                    got = [got["a"], got[3][0], got[3][1][0]]
                for each in got if isinstance(got, list) else [got]:
                    assert type(each) is bytes
                    assert each == expected
                    assert len(each) == len(expected)
                assert type(msg.nbytes) is int
                assert msg.nbytes >= len(expected)


@PATTERNS
def test_they_hold_no_slot(channel, pattern):
    """They are copies, as NumPy's scalars are: kept for ever, they keep no lease."""
    with pattern[0](channel, slots=2) as tx, pattern[1](channel) as rx:
        kept = []
        for number in range(10):
            tx.send({"jpeg": b"%d" % number * 100, "id": number}, timeout=100)
            with rx.recv(timeout=100) as msg:
                kept.append(msg.value["jpeg"])
        assert kept == [b"%d" % number * 100 for number in range(10)]
        gc.collect()
        assert rx.statistics().leases == 0


def test_what_is_sent_may_change_afterwards(channel):
    with Publisher(channel) as pub, Subscriber(channel) as sub:
        buffer = bytearray(b"before")
        pub.send([buffer, memoryview(buffer)[1:3]])
        buffer[:] = b"afterwards, and longer"  # nothing of it is exported any more
        assert sub.recv(timeout=100).value == [b"before", b"ef"]


def test_a_mapped_file(channel, tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(LARGE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        with Publisher(channel) as pub, Subscriber(channel) as sub:
            pub.send(memoryview(mapped)[4096:])
            assert sub.recv(timeout=100).value == LARGE[4096:]
        gc.collect()


def test_copies_and_devices_leave_them(channel):
    with Publisher(channel, history=1) as pub, Subscriber(channel) as sub:
        pub.send({"a": b"abc", "x": torch.ones(2)})
        msg = sub.recv(timeout=100)
        for made in (msg.copy(), msg.to("cpu"), msg.to("meta")):
            assert made["a"] == b"abc"
            assert type(made["a"]) is bytes
        copied = msg.copy()
        assert copied["x"].add_(1).tolist() == [2, 2]
        del msg, copied
        with Subscriber(channel) as late:
            assert late.recv(timeout=100, copy=True).value["a"] == b"abc"


def test_the_latest(channel):
    with Publisher(channel) as pub, Subscriber(channel, delivery="latest") as sub:
        for number in range(40):
            pub.send(b"%d" % number)
        msg = sub.recv(timeout=100)
        assert msg.value == b"39"


def test_on_an_event_loop(channel):
    async def use():
        async with Producer(channel) as tx, Consumer(channel) as rx:
            await tx.asend({"frame": b"\xff\xd8"})
            return (await rx.arecv(timeout=100)).value

    assert asyncio.run(use()) == {"frame": b"\xff\xd8"}


def test_requests_and_batches(channel):
    """A batch takes requests whose bytes are equal; a reply of bytes goes to each of them."""
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        thread = threading.Thread(
            target=server.run, args=(lambda value: {"echo": value, "length": len(value)},), daemon=True
        )
        thread.start()
        assert client.request(bytearray(b"what"), timeout=100) == {"echo": b"what", "length": 4}
        assert client.request(b"", timeout=100) == {"echo": b"", "length": 0}
        server.stop()
        thread.join(100)
    from shmtensor.rpc.batching import layout_of, split, stack

    one, two = {"x": torch.zeros(2), "key": b"a"}, {"x": torch.ones(2), "key": b"a"}
    other = {"x": torch.ones(2), "key": b"b"}
    assert layout_of(one) == layout_of(two) != layout_of(other)
    assert layout_of(b"a") != layout_of("a")
    assert hash(layout_of(LARGE)) == hash(layout_of(bytes(LARGE)))
    batch = stack([one, two])
    assert batch["key"] == b"a"
    assert batch["x"].tolist() == [[0, 0], [1, 1]]
    assert [part["key"] for part in split({"key": b"same", "x": batch["x"]}, 2)] == [b"same", b"same"]


def test_queues_and_executors_pickle_them_as_before():
    q = shmtensor.Queue()
    q.put([b"abc", bytearray(b"abc"), {"k": b""}])
    got = q.get(timeout=100)
    assert got == [b"abc", bytearray(b"abc"), {"k": b""}]
    assert type(got[1]) is bytearray
    q.close()
    q.join_thread()
    with shmtensor.ProcessPoolExecutor(1) as executor:
        got = executor.submit(bytes.upper, b"abc").result(60)
        assert got == b"ABC"
        assert type(executor.submit(bytearray, b"abc").result(60)) is bytearray


def test_what_is_no_bytes_is_refused_with_its_place(channel):
    released = memoryview(b"abc")
    released.release()
    with Publisher(channel) as pub:
        with pytest.raises(shmtensor.ArgumentError, match=r'value\["x"\]\[1\]: memoryview cannot be read: .*released'):
            pub.send({"x": [1, released]})
        for value in (array.array("d", [1.0]), {b"key": 1}, {1, 2}):
            with pytest.raises(shmtensor.ArgumentTypeError):
                pub.send(value)
        with pytest.raises(shmtensor.ArgumentTypeError):
            pub.send(np.zeros(1), meta={"a": b"x"})


def test_in_device_memory_they_are_refused(channel, standin):
    with (
        Publisher(channel, device="cuda") as pub,
        pytest.raises(shmtensor.ArgumentTypeError, match="bytes are not sent in device memory"),
    ):
        pub.send({"a": b"abc"})


BUFFERS = st.binary(max_size=200) | st.binary(min_size=1000, max_size=70_000)
VALUES = st.recursive(
    BUFFERS
    | st.builds(bytearray, BUFFERS)
    | st.builds(memoryview, BUFFERS)
    | st.builds(lambda data, start, step: memoryview(data)[start::step], BUFFERS, st.integers(0, 9), st.integers(1, 3))
    | st.sampled_from([None, 3, "text", 2.5])
    | st.builds(np.bytes_, BUFFERS)
    | st.integers(0, 9).map(lambda n: np.arange(n, dtype=np.uint8))
    | st.integers(1, 9).map(lambda n: torch.arange(n, dtype=torch.uint8)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(got, sent) -> bool:
    if isinstance(sent, np.bytes_):
        return type(got) is np.bytes_ and got == sent
    if isinstance(sent, (bytes, bytearray, memoryview)):
        return type(got) is bytes and got == bytes(sent)
    if isinstance(sent, (np.ndarray, torch.Tensor)):
        return type(got) is type(sent) and got.tolist() == sent.tolist()
    if isinstance(sent, dict):
        return list(got) == list(sent) and all(same(got[key], sent[key]) for key in sent)
    if isinstance(sent, (list, tuple)):
        return type(got) is type(sent) and len(got) == len(sent) and all(map(same, got, sent))
    return type(got) is type(sent) and got == sent


@settings(max_examples=300, deadline=None)
@given(VALUES, st.none() | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2))
def test_any_value_round_trips(value, meta):
    assert same(travel(value, True, meta), value)
    assert same(travel([value, value])[1], value)  # ties: the same memory twice


@pytest.mark.parametrize(
    ("row", "shape", "is_torch"),
    [
        ("uint8", (2, 2), False), ("uint8", (), False), ("int8", (4,), False), ("float32", (1,), False),
        ("uint8", (4,), True),
    ],
)  # fmt: skip
def test_bytes_that_are_no_bytes_are_a_wire_error(row, shape, is_torch):
    def read(entry, parameters=()):
        node = spec.composite("data", parameters) + spec.leaf(entry)
        return decode(spec.header() + node + b"\0", payload, readonly=True)[0]

    payload = payload_of(4)
    good = spec.LeafSpec(BY_NAME["uint8"], False, (4,), None, 0)
    assert read(good) == payload.tobytes()
    with pytest.raises(WireError):
        read(spec.LeafSpec(BY_NAME[row], is_torch, shape, None, 0))
    with pytest.raises(WireError):
        read(good, (1,))


def test_a_checkpoint_has_its_own(tmp_path):
    """`bytes` in a state were values before; the composite of messages is none of a checkpoint's."""
    from shmtensor.checkpoint.plan import _Builder

    path = tmp_path / "run"
    with shmtensor.CheckpointWriter(path) as writer:
        writer.save({"a": b"abc", "x": torch.ones(2), "step": 1}).durable.result(60)
    assert shmtensor.load_checkpoint(path / "latest")["a"] == b"abc"
    with pytest.raises(shmtensor.CheckpointError, match="data"):
        _Builder.composite(None, "data", (), [], [0])


def test_the_documented_bytes():
    """What docs/internals/wire-format.md shows of a list of three."""
    encoded = encode([b"hello", b"", b"abc"])
    parts = [
        bytes([11, 4, 0, 1, 10, 6, 0, 1, 0, 0, 0, 0]) + struct.pack("<QQ", offset, length)
        for offset, length in ((0, 5), (0, 0), (64, 3))
    ]
    assert encoded.description == bytes([2, 0, 0, 0, 0, 0, 0, 0, 7, 3, 0, 0, 0]) + b"".join(parts) + b"\0"
    payload = payload_of(encoded.nbytes)
    encoded.copy_into(payload)
    assert (payload[:5].tobytes(), payload[64:].tobytes()) == (b"hello", b"abc")
    with open(Path(__file__).parents[2] / "docs" / "internals" / "wire-format.md") as page:
        assert "0b 04 00 01 0a 06 00 01 00 00 00 00" in page.read()
