"""Whatever the bytes are, reading them gives a value or `WireError`: no other error, no warning, no crash.

Both implementations make the same of any bytes: equal values, or an error from each."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmtensor.errors import WireError
from shmtensor.wire import spec

from ..codec.another import IMPLEMENTATIONS, encode, payload_of
from .test_dtypes import bits

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
    yield {"jpeg": bytes(range(200)), "none": b"", "ties": [memoryview(bytearray(9))] * 2, "s": np.bytes_(b"x")}, None
    yield b"top", {"ts": 1}
    yield torch.zeros(0, 3), None
    yield torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), None


SEEDS = []


def load_seeds():
    if not SEEDS:
        for value, meta in seeds():
            encoded = encode(value, meta)
            payload = payload_of(encoded.nbytes)
            encoded.copy_into(payload)
            SEEDS.append((encoded.description, payload.tobytes()))
    return SEEDS


def read(description, data):
    """Read bytes as a receiver does, by every implementation; True if they were a value."""
    found = []
    for _, decode in IMPLEMENTATIONS.values():
        payload = payload_of(len(data))
        payload[:] = np.frombuffer(data, np.uint8)
        try:
            found.append(decode(description, payload, readonly=True))
        except WireError:
            found.append(None)
    assert len({each is None for each in found}) == 1, found
    if found[0] is not None:
        for other in found[1:]:
            assert looks(other) == looks(found[0])
    return found[0] is not None


def looks(value):
    """A value as nested tuples that can be compared; NaN and what torch cannot print are equal to themselves."""
    if isinstance(value, dict):
        return "dict", tuple((repr(key), looks(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(looks, value))
    if isinstance(value, np.ndarray):
        return "array", repr(value.dtype), value.shape, value.strides, value.flags.writeable, value.tobytes()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        storage = value.untyped_storage() if value.is_quantized else None
        data = bits(value) if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)
        return "tensor", value.dtype, value.shape, value.stride(), data.numpy().tobytes()
    return type(value).__name__, re.sub(r"\bj\d+", "j", repr(value))  # jagged dimensions are numbered


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutated(data):
    description, payload = data.draw(st.sampled_from(load_seeds()))
    parts = [bytearray(description), bytearray(payload)]
    for _ in range(data.draw(st.integers(1, 4))):
        part = parts[data.draw(st.sampled_from([0, 0, 0, 1]))]
        at = data.draw(st.integers(0, max(len(part) - 1, 0)))
        match data.draw(st.integers(0, 4)):
            case 0 if part:
                part[at] = data.draw(st.integers(0, 255))
            case 1:
                part[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
            case 2:
                del part[at:]
            case 3 if part:
                part[at] = data.draw(st.integers(0, 12))
            case _ if len(part) >= at + 8:
                big = data.draw(st.sampled_from([0, 1, 2, 63, 64, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
                struct.pack_into("<Q", part, at, big)
    read(*map(bytes, parts))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random(description):
    read(description, b"")
    read(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + description, bytes(1024))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
LEAVES = st.builds(
    lambda code, flags, ndim, storage, offset, words: (
        struct.pack("<BBBBIQ", 10, code, flags, ndim, storage, offset)
        + struct.pack(f"<{len(words)}Q", *words)[: 8 * ndim * (2 if flags & 2 else 1)]
    ),
    st.sampled_from([1, 5, 6, 11, 12, 20, 30, 31, 33, 99, 255]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 8, 16, 64, 4096, 2**63]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 2**40, 2**63]), min_size=6, max_size=6),
)
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
NODES = st.recursive(
    SCALARS.map(spec.scalar) | LEAVES | st.builds(lambda a, b: a + spec.plain(b), LEAVES, DTYPES),
    lambda inner: st.one_of(
        st.builds(
            lambda tag, extra, nodes: spec.container(tag, len(nodes) + extra) + b"".join(nodes),
            st.sampled_from([7, 8, 9]),
            st.sampled_from([0, 0, 0, 1]),
            st.lists(inner, max_size=4),
        ),
        st.lists(st.tuples(st.one_of(SCALARS.map(spec.scalar), inner), inner), max_size=3).map(
            lambda pairs: spec.container(9, len(pairs)) + b"".join(key + node for key, node in pairs)
        ),
        st.builds(
            lambda kind, parameters, nodes: (
                struct.pack("<BBBB", 11, kind, len(parameters), len(nodes))
                + struct.pack(f"<{len(parameters)}q", *parameters)
                + b"".join(nodes)
            ),
            st.sampled_from(sorted(spec.COMPOSITE_OF)),
            st.lists(st.integers(-2, 4), max_size=3),
            st.lists(inner, max_size=3),
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=600, deadline=None)
@given(NODES, st.sampled_from([b"\0", spec.plain({"a": [1, None]}), spec.plain([1]), b""]), st.integers(0, 2))
def test_any_nodes(node, meta, storages):
    read(spec.header([(0, 128), (64, 64)][:storages]) + node + meta, bytes(256))


@settings(max_examples=200, deadline=None)
@given(DTYPES, st.lists(st.sampled_from([0, 1, 2, 2**40, 2**63]), max_size=3))
def test_any_dtype(description, shape):
    leaf = struct.pack("<BBBBIQ", 10, 255, 0, len(shape), 0, 0) + struct.pack(f"<{len(shape)}Q", *shape)
    read(spec.header() + leaf + spec.plain(description) + b"\0", bytes(4096))


def header(storages=0):
    return struct.pack("<B3xI", 2, storages)


def leaf(code=11, flags=1, ndim=1, storage=0, offset=0, words=(4,)):
    head = struct.pack("<BBBBIQ", 10, code, flags, ndim, storage, offset)
    return head + struct.pack(f"<{len(words)}Q", *words)


END = b"\0"
STORAGE = struct.pack("<QQ", 0, 16)
BAD = {
    "empty": b"",
    "version": b"\1" + header()[1:] + leaf() + END,
    "reserved": b"\2\1" + header()[2:] + leaf() + END,
    "truncated": header() + leaf(),
    "nothing": header(),
    "storages": header(2**32 - 1) + leaf() + END,
    "storage beyond": header(1) + struct.pack("<QQ", 0, 2048) + leaf(storage=1) + END,
    "storage unaligned": header(1) + struct.pack("<QQ", 8, 16) + leaf(storage=1, offset=8) + END,
    "storage empty": header(1) + struct.pack("<QQ", 0, 0) + leaf() + END,
    "outside its storage": header(1) + STORAGE + leaf(storage=1, words=(5,)) + END,
    "no such storage": header(1) + STORAGE + leaf(storage=2) + END,
    "array in a storage": header(1) + STORAGE + leaf(storage=1, flags=0) + END,
    "tag": header() + b"\x0c" + END,
    "code": header() + leaf(code=99) + END,
    "torch described": header() + leaf(code=255) + END,
    "numpy bfloat16": header() + leaf(code=20, flags=0) + END,
    "leaf flags": header() + leaf(flags=5) + END,
    "ndim": header() + leaf(ndim=65, words=(1,) * 65) + END,
    "unaligned": header() + leaf(offset=2) + END,
    "offset": header() + leaf(offset=2**64 - 64) + END,
    "overflow": header() + leaf(ndim=3, words=(2**40, 2**40, 2**40)) + END,
    "empty but huge": header() + leaf(ndim=3, words=(0, 2**40, 2**40)) + END,
    "zero stride": header() + leaf(flags=3, words=(4, 0)) + END,
    "odd stride": header() + leaf(flags=3, words=(4, 5)) + END,
    "huge stride": header() + leaf(flags=3, words=(4, 2**63)) + END,
    "left over": header() + leaf() + END + END,
    "list ends early": header() + spec.container(spec.LIST, 3) + END + END,
    "list too long": header() + spec.container(spec.LIST, 2**32 - 1) + END,
    "twice": header() + spec.container(spec.DICT, 2) + 2 * (spec.scalar("a") + spec.scalar(1)) + END,
    "key": header() + spec.container(spec.DICT, 1) + leaf() + spec.scalar(1) + END,
    "deep": header() + spec.container(spec.LIST, 1) * 65 + END + END,
    "not utf-8": header() + spec.container(spec.STR, 1) + b"\xff" + END,
    "meta is a list": header() + END + spec.plain([1]),
    "meta has a tuple": header() + END + spec.container(spec.DICT, 1) + spec.scalar("a") + b"\x08\0\0\0\0",
    "meta has a leaf": header() + END + spec.container(spec.DICT, 1) + spec.scalar("a") + leaf(),
    "meta has the key 1": header() + END + spec.container(spec.DICT, 1) + spec.scalar(1) + END,
    "meta has a key twice": header() + END + spec.container(spec.DICT, 2) + 2 * (spec.scalar("a") + END),
    "meta is large": header() + END + spec.plain({"a": "x" * spec.MAX_META}),
    "meta is deep": header() + END + spec.container(spec.DICT, 1) + spec.scalar("a") + b"\7\1\0\0\0" * 64 + END,
    "too long": header() + spec.scalar("x" * spec.MAX_DESCRIPTION) + END,
}


def test_the_good_one():
    assert read(header() + leaf() + END, bytes(1024))
    assert read(header(1) + STORAGE + leaf(storage=1) + spec.plain({"a": 1}), bytes(1024))


def test_invalid():
    assert [name for name, description in BAD.items() if read(description, bytes(1024))] == []


def test_short_payload():
    for _, decode in IMPLEMENTATIONS.values():
        with pytest.raises(WireError, match="400"):
            decode(encode(torch.ones(100)).description, payload_of(399), readonly=True)


def test_sparse_indices_out_of_bounds():
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        encoded = encode(tensor)
        payload = payload_of(encoded.nbytes)
        encoded.copy_into(payload)
        payload[8:16] = 99
        assert not read(encoded.description, payload.tobytes())


def test_the_documented_example():
    """The byte table in the module's docstring says 49 bytes, in this order."""
    for write, _ in IMPLEMENTATIONS.values():
        encoded = write(torch.zeros(2, 3, 4))
        assert encoded.description == header() + leaf(ndim=3, words=(2, 3, 4)) + END
        assert len(encoded.description) == 49
