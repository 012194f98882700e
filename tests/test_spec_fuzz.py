"""Whatever the bytes are, reading them gives a value or `WireError`: no other error, no warning, no crash."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmtensor.errors import WireError
from shmtensor.views.pack import Unpacker, pack
from shmtensor.wire import spec

from .test_dtypes import payload_of

pytestmark = pytest.mark.filterwarnings("ignore:.*(quantize_per|Sparse|nested tensors):UserWarning")


def seeds():
    weight = torch.randn(3, 4)
    yield weight, None
    yield np.zeros((2, 3), [("a", ">f4"), ("b", "M8[ns]", (2,))]), None
    yield {"a": [1, 2.5, "x", None], 3: torch.ones(2).bfloat16(), None: np.float32(1)}, {"ts": 1}
    yield [weight, weight.T, weight[1:].numpy()], None
    yield [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(4).to_sparse_bsr((2, 2))], None
    yield torch.quantize_per_tensor(weight, 0.1, 3, torch.quint8), None
    yield torch.quantize_per_channel(weight, torch.ones(3), torch.zeros(3), 0, torch.qint8), None
    yield torch.quantize_per_channel(weight, torch.ones(3), torch.zeros(3), 0, torch.quint4x2), None
    yield torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), None
    yield torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged), None
    yield torch.zeros(0, 3), None
    yield torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), None


SEEDS = []


def load_seeds():
    if not SEEDS:
        for value, meta in seeds():
            packed = pack(value, meta)
            payload = payload_of(packed.nbytes)
            packed.copy_into(payload)
            SEEDS.append((packed.static, packed.dynamic, payload.tobytes()))
    return SEEDS


def read(static, dynamic, data):
    """Read bytes as a receiver does; True if they were a value."""
    try:
        unpacker = Unpacker(static)
        payload = payload_of(len(data))
        payload[:] = np.frombuffer(data, np.uint8)
        unpacker(payload, dynamic, readonly=True)
    except WireError:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutated(data):
    static, dynamic, payload = data.draw(st.sampled_from(load_seeds()))
    parts = [bytearray(static), bytearray(dynamic), bytearray(payload)]
    for _ in range(data.draw(st.integers(1, 4))):
        part = parts[data.draw(st.sampled_from([0, 0, 0, 1, 2]))]
        at = data.draw(st.integers(0, max(len(part) - 1, 0)))
        match data.draw(st.integers(0, 3)):
            case 0 if part:
                part[at] = data.draw(st.integers(0, 255))
            case 1:
                part[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
            case 2:
                del part[at:]
            case _ if len(part) >= at + 8:
                big = data.draw(st.sampled_from([0, 1, 2**31, 2**62, 2**63, 2**64 - 1]))
                struct.pack_into("<Q", part, at, big)
    read(*map(bytes, parts))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=50))
def test_random(static, dynamic):
    read(static, dynamic, b"")
    read(b"\1\0\0\0" + static, dynamic, bytes(1024))


ITEMS = st.recursive(
    st.one_of(
        st.sampled_from(
            [0, 0, 1, "l", "t", "d", "a", 2, -1, True, None, 1.5, "coo", "csr", "jagged", "nested", "quantized"]
        ),
        st.integers(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ITEMS, max_size=12), st.lists(ITEMS, max_size=3), st.integers(0, 4), st.one_of(st.none(), ITEMS))
def test_any_tokens(tokens, descriptions, count, dynamic):
    leaf = struct.pack("<BBBBIQQ", 5, 1, 1, 0, 0, 0, 2)
    described = struct.pack("<BBBBIQQ", 255, 0, 1, 0, 0, 0, 2)
    tail = json.dumps([tokens, descriptions]).encode()
    for one in (leaf, described):
        static = struct.pack("<BBHI", 1, 0, 0, count) + one * count + tail
        read(static, json.dumps([dynamic, None]).encode(), bytes(256))


DTYPES = st.recursive(
    st.sampled_from(
        ["<f4", "O", "|O", "<U999999999", "|V0", "|S0", "M8[ns]", "<M8[0s]", {"ml": "bfloat16"}, {"ml": "finfo"}, 3]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"base": inner, "shape": st.lists(st.integers(-1, 2**33), max_size=3)}),
        st.fixed_dictionaries(
            {
                "names": st.lists(st.sampled_from(["a", "b", "", 1]), max_size=3),
                "formats": st.lists(inner, max_size=3),
                "offsets": st.lists(st.integers(-1, 20), max_size=3),
                "itemsize": st.one_of(st.integers(-1, 40), st.just(2**40)),
            },
            optional={
                "aligned": st.integers(-1, 2),
                "record": st.integers(0, 1),
                "titles": st.lists(st.text(), max_size=3),
            },
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(DTYPES, st.lists(st.sampled_from([0, 1, 2, 2**40, 2**63]), max_size=3))
def test_any_dtype(description, shape):
    static = struct.pack("<BBHI", 1, 0, 0, 1) + struct.pack("<BBBBIQ", 255, 0, len(shape), 0, 0, 0)
    static += struct.pack(f"<{len(shape)}Q", *shape) + json.dumps([[0], [description]]).encode()
    read(static, b"", bytes(4096))


def header(count=1):
    return struct.pack("<BBHI", 1, 0, 0, count)


def leaf(code=11, flags=1, ndim=1, reserved=0, extra=0, offset=0, words=(4,)):
    return struct.pack("<BBBBIQ", code, flags, ndim, reserved, extra, offset) + struct.pack(f"<{len(words)}Q", *words)


BAD = {
    "empty": b"",
    "version": b"\2" + header()[1:] + leaf(),
    "flags": b"\1\1" + header()[2:] + leaf(),
    "truncated": header() + leaf()[:-1],
    "count": header(2**32 - 1) + leaf(),
    "no tail": header(0),
    "code": header() + leaf(code=99),
    "torch described": header() + leaf(code=255),
    "numpy bfloat16": header() + leaf(code=20, flags=0),
    "leaf flags": header() + leaf(flags=5),
    "reserved": header() + leaf(reserved=1),
    "extra": header() + leaf(flags=0, extra=1),
    "ndim": header() + leaf(ndim=65, words=(1,) * 65),
    "unaligned": header() + leaf(offset=2),
    "offset": header() + leaf(offset=2**64 - 64),
    "overflow": header() + leaf(ndim=3, words=(2**40, 2**40, 2**40)),
    "empty but huge": header() + leaf(ndim=3, words=(0, 2**40, 2**40)),
    "zero stride": header() + leaf(flags=3, words=(4, 0)),
    "odd stride": header() + leaf(flags=3, words=(4, 5)),
    "huge stride": header() + leaf(flags=3, words=(4, 2**63)),
    "left over": header() + leaf() + b"[[0,0],[]]",
    "no leaf": header() + leaf() + b"[[1],[]]",
    "twice": header() + leaf() + b'[["d",2,"a","a",0,1],[]]',
    "deep json": header() + leaf() + b"[" * 100_000,
    "deep tokens": header(0) + json.dumps([["l", 1] * 65 + [1], []]).encode(),
    "not json": header() + leaf() + b"x",
    "not utf-8": header() + leaf() + b'["\xff"]',
    "long int": header() + leaf() + b"[[" + b"9" * 5000 + b"],[]]",
    "too long": bytes(spec.MAX_STATIC + 1),
}


def test_invalid_static():
    assert [name for name, static in BAD.items() if read(static, b"", bytes(1024))] == []


BAD_DYNAMIC = [
    b"",
    b"x",
    b"[]",
    b"[[],null]",
    b"[[1,2],null]",
    b"[[{}],null]",
    b'[["a"],3]',
    b'[[["0xg"]],null]',
    b"[" * 10**5,
]


def test_invalid_dynamic():
    static = pack(5).static
    assert [dynamic for dynamic in BAD_DYNAMIC if read(static, dynamic, b"")] == []


def test_short_payload():
    with pytest.raises(WireError, match="400"):
        Unpacker(pack(torch.ones(100)).static)(payload_of(399), b"", readonly=True)


def test_sparse_indices_out_of_bounds():
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        packed = pack(tensor)
        payload = payload_of(packed.nbytes)
        packed.copy_into(payload)
        payload[8:16] = 99
        with pytest.raises(WireError):
            Unpacker(packed.static)(payload, b"", readonly=True)


def test_the_documented_example():
    """The byte table in the module's docstring says 48 bytes, in this order."""
    packed = pack(torch.zeros(2, 3, 4))
    assert packed.static == header() + leaf(ndim=3, words=(2, 3, 4))
    assert len(packed.static) == 48
