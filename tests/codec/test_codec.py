"""The two implementations of `encode` and `decode` do the same: bytes, values, errors, and what they keep alive."""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmtensor import native
from shmtensor.codec import copies
from shmtensor.codec import encode as reference
from shmtensor.codec import implementation as chosen
from shmtensor.codec.decode import decode as reference_decode
from shmtensor.codec.encode import encode as reference_encode
from shmtensor.codec.encode import place_of
from shmtensor.codec.leaf import Refused
from shmtensor.errors import ArgumentError, ArgumentTypeError, WireError
from shmtensor.wire import spec
from shmtensor.wire.dtypes import BY_NAME

from ..waiting import PATIENCE
from ..wire.test_spec_fuzz import looks
from .another import CODECS, decode, encode, implementation, payload_of, travel  # noqa: F401


class Colour(enum.IntEnum):
    RED = 3


class Text(str):
    def encode(self, *args):
        raise AssertionError("its data are sent, not what it says")


class Number(int):
    def __index__(self):
        raise AssertionError("its data are sent, not what it says")


class Reversed(list):
    def __iter__(self):
        return iter(list.__getitem__(self, slice(None, None, -1)))


class Chosen(dict):
    def items(self):
        return [("chosen", 1)]


class TextById(str):
    """A key that is equal to no other one, until its class is gone."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __str__(self):
        raise AssertionError("its data are sent, not what it says")


class NumberById(int):
    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __int__(self):
        raise AssertionError("its data are sent, not what it says")


class FloatById(float):
    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __float__(self):
        raise AssertionError("its data are sent, not what it says")


class Pairs(dict):
    """A dict whose items are others: those that it is made of."""

    def __init__(self, *pairs):
        super().__init__(pairs)
        self.pairs = pairs

    def items(self):
        return self.pairs


NAN = float("nan")
WEIGHT = torch.randn(6, 4)
LARGE = torch.arange(400_000)
ARRAY = np.arange(6)
SPARSE = torch.eye(3).to_sparse()
KINDS = {
    "tensor": lambda: torch.randn(3, 4),
    "0-d": lambda: torch.tensor(1.5),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2)),
    "requires grad": lambda: torch.randn(2, requires_grad=True) * 2,
    "empty": lambda: [torch.zeros(0, 3), np.zeros((2, 0)), torch.ones(1)],
    "transposed": lambda: torch.randn(3, 4).T,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": lambda: torch.randn(8, 8)[::2, 1:5],
    "expanded": lambda: torch.ones(1).expand(3),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "complex": lambda: torch.randn(3, dtype=torch.complex128),
    "zeros": lambda: torch._efficientzerotensor((3,)),
    "view": lambda: torch.arange(10)[3:7],
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": lambda: np.arange(6)[::-1],
    "unaligned": lambda: np.frombuffer(b"\0" * 17, np.uint8)[1:].view("<f8"),
    "long long": lambda: np.zeros(2, np.longlong),
    "readonly": lambda: np.frombuffer(b"abcd", np.uint8),
    "big-endian": lambda: np.arange(3, dtype=">i4"),
    "structured": lambda: np.zeros(2, [("a", "f4"), ("b", "M8[ns]")]),
    "ml dtype": lambda: np.zeros(2, ml_dtypes.bfloat16),
    "scalars of NumPy": lambda: [np.float32(1), np.int64(-1), np.bool_(True), np.str_("a\0"), np.bytes_(b"b\0"), 2.5],
    "more scalars of NumPy": lambda: [np.longdouble(1), np.datetime64("2024-02-29"), np.complex128(1j), np.float64(2)],
    "scalars": lambda: [None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**400, 1.5, "x"],
    "floats": lambda: [float("inf"), float("-inf"), -0.0, 5e-324],
    "texts": lambda: ["", "é", "\U0001f600", "\ud800", "x" * 5000],
    "subclasses": lambda: [Colour.RED, Text("a"), Number(7), collections.OrderedDict(b=1, a=2)],
    "tuples": lambda: collections.namedtuple("Pair", "a b")((), ([], {})),
    "overridden": lambda: [Reversed([1, 2]), Chosen(a=3)],
    "keys": lambda: {"a": 1, 2: 2, None: 3, 2.5: 4, False: 5, 2**70: 6},
    "keys of other classes": lambda: [
        {TextById("a"): 1, TextById("é"): 2, "c": 3, NumberById(4): 4, NumberById(2**70): 5, FloatById(5.5): 6},
        {np.str_("a"): 1, np.float64(2): 2, Colour.RED: 3, NumberById(-1): 4, FloatById(NAN): 5, FloatById(NAN): 6},
        collections.OrderedDict({TextById("a"): 1, "b": 2}), Pairs(("a", 1), ("b", 2)), Pairs((NAN, 1), (NAN, 2)),
    ],
    "bytes": lambda: [b"", b"abc", bytearray(b"x"), memoryview(b"abcd")[::2]],
    "tied": lambda: {"a": WEIGHT, "b": WEIGHT.T, "c": WEIGHT[1:].numpy(), "d": torch.randn(2)},
    "twice": lambda: [WEIGHT, WEIGHT],
    "tied slices": lambda: [torch.randn(2), WEIGHT[::2], {"all": WEIGHT, "a column": WEIGHT[:, 1]}, WEIGHT[5:].numpy()],
    "tied, not all": lambda: [WEIGHT.expand(2, 6, 4), WEIGHT, WEIGHT.expand(2, 6, 4), WEIGHT.numpy()[::-1], WEIGHT[2:]],
    "reversed twice": lambda: [ARRAY[::-1], ARRAY[::-1], ARRAY[::-2], torch.ones(2)],
    "expanded twice": lambda: [WEIGHT[0].expand(3, 4), WEIGHT[0].expand(3, 4), WEIGHT[0].expand(2, 4)],
    "tied in composites": lambda: [b"same" * 9, SPARSE, {"again": SPARSE}, SPARSE._values(), WEIGHT, WEIGHT.T],
    "tied arrays": lambda: [ARRAY, ARRAY[2:4], ARRAY.view("i4"), ARRAY[1:].view(">i8"), torch.from_numpy(ARRAY)[3:]],
    "tied of several dtypes": lambda: [WEIGHT.view(torch.uint8), WEIGHT.view(torch.bfloat16)[1:, 2], WEIGHT],
    "tied and large": lambda: [LARGE, torch.randn(9), LARGE[100_000:].view(-1, 3)[:, ::2], LARGE[7:9]],
    "sparse": lambda: {"x": torch.eye(3).to_sparse(), "id": 7},
    "many": lambda: {f"layer.{i}": torch.randn(i % 5 + 1) for i in range(40)},
    "large": lambda: [torch.randn(400_000), np.zeros(200_000), torch.randn(3)],
    "gymnasium": lambda: {
        "obs": np.ones(4, np.float32), "reward": np.float64(1), "terminated": False, "info": {"lives": np.int32(3)},
    },
}  # fmt: skip
METAS = [None, {}, {"ts": 1.5, "id": 7}, {"a": [1, ("b", None)], "b": {"c": {"d": [True, 2**80, float("inf")]}}}]


def arrives(encoded):
    payload = payload_of(encoded.nbytes)
    encoded.copy_into(payload)
    return payload


@pytest.mark.filterwarnings("ignore:.*Sparse:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("meta", METAS, ids=range(len(METAS)))
def test_both_write_the_same(kind, meta):
    value = KINDS[kind]()
    found, wanted = encode(value, meta), reference_encode(value, meta)
    assert found.description == wanted.description
    for name in ("nbytes", "total", "spilled"):
        assert getattr(found, name) == getattr(wanted, name)
    assert list(found.device_jobs) == list(wanted.device_jobs) == []
    payload = arrives(found)
    got, other = decode(found.description, payload, readonly=True), None
    for readonly in (True, False):
        got = decode(found.description, payload, readonly=readonly)
        other = reference_decode(found.description, payload, readonly=readonly)
        assert looks(got) == looks(other)
    assert got[1] == wanted_meta(meta)


def wanted_meta(meta):
    if isinstance(meta, dict):
        return {key: wanted_meta(child) for key, child in meta.items()}
    return [wanted_meta(child) for child in meta] if isinstance(meta, (list, tuple)) else meta


@pytest.fixture
def codec(implementation):  # noqa: F811
    """The compiled codec under test, which has seen a tensor."""
    if implementation not in CODECS:
        pytest.skip("a test of the compiled ones")
    encode(torch.ones(1))
    return CODECS[implementation]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_asked_for_nothing_as_a_whole(codec, kind):
    """Not only do they do the same: it is the compiled one that does it."""
    before, value = codec.handed_over, KINDS[kind]()
    encoded = encode(value, {"ts": 1})
    decode(encoded.description, arrives(encoded), readonly=True)
    assert codec.handed_over == before
    assert type(encoded) is not type(reference_encode(1))


PLAIN = [
    "tensor", "0-d", "parameter", "requires grad", "transposed", "channels last", "complex", "view", "array", "fortran",
    "long long", "readonly", "scalars", "floats", "texts", "many", "large", "gymnasium",
]  # fmt: skip


BY_LEAF = ["twice", "scalars"]
"""What is read by Python, leaf by leaf: views of one storage; an int of more than 64 bits."""


@pytest.mark.parametrize("kind", [*PLAIN, "twice"])
def test_python_looks_at_no_leaf_that_is_plain(codec, monkeypatch, kind):
    value = KINDS[kind]()
    wanted, before = reference_encode(value).description, codec.handed_over

    def refuse(*args):
        raise AssertionError(args)

    monkeypatch.setattr(chosen, "parts_of", refuse)
    encoded = encode(value)
    assert encoded.description == wanted
    if kind not in BY_LEAF:
        monkeypatch.setattr(chosen._Message, "node_at", refuse)
    decode(encoded.description, arrives(encoded))
    assert codec.handed_over == before  # which it does after an error of those


@pytest.mark.parametrize("name", ["uint8", "bool", "int16", "float16", "bfloat16", "float32", "int64", "complex64",
                                  "complex128", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16",
                                  "uint32", "uint64", "float8_e4m3fnuz", "float64", "int8", "int32", "int1", "int7",
                                  "uint1", "uint4"])  # fmt: skip
def test_tensors_of_every_plain_dtype_are_made_without_python(codec, monkeypatch, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch lacks it")
    for shape in ((), (3,), (2, 5)):
        source = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8)
        if dtype is torch.bool:
            source = source > 99
        source = source.view(dtype).view(shape)
        before = codec.handed_over
        monkeypatch.setattr(chosen, "parts_of", None)
        encoded = encode([source, source.requires_grad])
        payload = arrives(encoded)
        monkeypatch.setattr(chosen._Message, "node_at", None)
        got = decode(encoded.description, payload)[0][0]
        monkeypatch.undo()
        assert codec.handed_over == before  # which it does after an error, in place of the ones above
        assert (got.dtype, got.shape, got.stride(), got.device) == (dtype, source.shape, source.stride(), source.device)
        assert torch.equal(got.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8))
        lease, references = weakref.ref(payload), sys.getrefcount(payload)
        view = got.view(-1)[:1]
        del got
        assert sys.getrefcount(payload) == references
        del payload
        assert lease() is not None
        del view
        assert lease() is None


def test_how_tensors_are_looked_at(codec, implementation):  # noqa: F811
    has_interface = implementation == "compiled" and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert codec.tensors == ("exchange" if has_interface else "methods")


@pytest.mark.parametrize("takes", [False, True])
def test_a_torch_that_makes_no_tensor_leaves_nothing(codec, takes):
    """The memory is the caller's again, whether torch had made the tensor before it failed, or not."""
    codec = chosen.Compiled(exchange=False).codec
    samples = {BY_NAME["float32"].code: torch.ones(1)}
    fails = False

    def from_dlpack(capsule):
        if fails and not takes:
            raise MemoryError
        tensor = torch._C._from_dlpack(capsule)
        if fails:
            raise MemoryError
        return tensor

    codec.use_torch(torch.Tensor, torch.nn.Parameter, samples, torch.strided, None, torch._C._to_dlpack, from_dlpack)
    encoded = codec.encode(torch.ones(3))
    payload = arrives(encoded)
    lease, references, before = weakref.ref(payload), sys.getrefcount(payload), codec.handed_over
    fails = True
    got = codec.decode(encoded.description, payload, readonly=True)  # by the reference
    assert codec.handed_over == before + 1
    del got
    assert sys.getrefcount(payload) == references
    del payload
    assert lease() is None


TREES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=9),
        st.integers(0, 9).map(lambda n: torch.arange(n, dtype=torch.float32)),
        st.integers(0, 9).map(lambda n: np.arange(n, dtype=np.int16)),
        st.integers(0, 9).map(np.float32),
        st.integers(1, 5).map(lambda n: torch.ones(n, 2, dtype=torch.bfloat16).T),
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none() | st.floats(), inner, max_size=4)
    ),
    max_leaves=16,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(TREES, st.sampled_from(METAS))
def test_both_write_the_same_of_any_tree(value, meta):
    found, wanted = encode(value, meta), reference_encode(value, meta)
    assert (found.description, found.nbytes, found.total) == (wanted.description, wanted.nbytes, wanted.total)
    payload = arrives(found)
    assert bytes(payload) == bytes(arrives(wanted)) or found.nbytes > 64  # what lies between leaves is nobody's
    got = decode(found.description, payload, readonly=True)
    assert looks(got) == looks(reference_decode(found.description, payload, readonly=True))


def views(base):
    """Views of one tensor: any slices, in any order of dimensions, some expanded, as other dtypes, as arrays."""
    steps = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 3))
    kinds = st.sampled_from(["", "", "array", "reversed", "expanded", "int32"])

    def view(rows, columns, turned, how):
        found = base[rows[0] : rows[1] : rows[2], columns[0] : columns[1] : columns[2]]
        found = found.T if turned else found
        if how == "array":
            return found.numpy()
        if how == "reversed":
            return found.numpy()[::-1]
        if how == "expanded":
            return found.expand(2, *found.shape)
        return found.view(torch.int32) if how == "int32" else found

    return st.builds(view, steps, steps, st.booleans(), kinds)


BASES = [torch.arange(36, dtype=torch.float32).view(6, 6), torch.arange(37, dtype=torch.int32)[1:].view(6, 6)]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(*map(views, BASES), st.integers()), max_size=7))
def test_both_write_the_same_of_leaves_that_share_memory(value):
    found, wanted = encode(value), reference_encode(value)
    assert (found.description, found.nbytes, found.total) == (wanted.description, wanted.nbytes, wanted.total)
    payload = arrives(found)
    got = decode(found.description, payload, readonly=True)
    assert looks(got) == looks(reference_decode(found.description, arrives(wanted), readonly=True))


# --- copies


def test_a_spilled_description_lies_behind_the_payload():
    value = {f"name {i}": i for i in range(40)} | {"x": torch.ones(5)}
    encoded = encode(value)
    assert encoded.spilled
    assert encoded.total == 64 + len(encoded.description)
    room = bytearray(128 + encoded.total + 1)
    encoded.write(room, 128)
    assert room[128 + 64 : -1] == encoded.description
    assert room[-1] == 0
    for buffer, offset in ((room, 130), (room, -1), (room, 10**9), (bytearray(7), 0)):
        with pytest.raises(ArgumentError):
            encoded.write(buffer, offset)
    with pytest.raises((TypeError, BufferError, ValueError)):
        encoded.write(bytes(encoded.total), 0)


def test_large_leaves_are_copied_by_the_way_for_them(monkeypatch):
    value = [torch.randn(copies.ALONE // 4 + 1), torch.randn(5), np.arange(copies.SMALL, dtype=np.uint8)]
    encoded = encode({"a": value})
    payload = arrives(encoded)
    got = decode(encoded.description, payload)[0]["a"]
    assert torch.equal(got[0], value[0])
    assert torch.equal(got[1], value[1])
    assert np.array_equal(got[2], value[2])


def test_a_leaf_whose_copy_fails(monkeypatch):
    """The error is the caller's; the buffer is released."""
    array = np.zeros(4, [("a", "f4")])[::2]
    encoded = encode([array, torch.ones(2)])

    def fail(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "copyto", fail)
    room = bytearray(encoded.total)
    with pytest.raises(KeyboardInterrupt):
        encoded.write(room, 0)
    room.extend(b"not exported any more")


# --- other code that runs meanwhile


def test_a_value_that_changes_while_it_is_walked(monkeypatch):
    """A leaf that Python looks at may run anything; what was in the container when its turn came is sent."""
    inner = [1, 2, 3]
    value = {"first": np.zeros(2, ">i4"), "inner": inner, "last": torch.ones(3)}

    def meddle(dtype):
        value.clear()
        value.update({i: i for i in range(100)})
        inner.append(4)
        return ">i4"

    monkeypatch.setattr("shmtensor.codec.numpy.describe", lambda dtype, depth=0: meddle(dtype))
    encoded = encode(value)
    got = decode(encoded.description, arrives(encoded))[0]
    assert list(got) == ["first", "inner", "last"]
    assert got["inner"] == [1, 2, 3, 4]
    assert torch.equal(got["last"], torch.ones(3))


class Interrupted(BaseException):
    """As Ctrl-C: no `Exception`."""


@pytest.mark.parametrize("error", [Interrupted, ValueError, MemoryError, Refused])
def test_an_exception_while_a_leaf_is_looked_at(monkeypatch, error):
    leaf = np.zeros(2, ">i4")
    sources = [torch.ones(2), {"a": [leaf]}]
    before = [sys.getrefcount(source) for source in (sources[0], leaf)]

    def fail(dtype, depth=0):
        raise error(ArgumentTypeError, "no") if error is Refused else error

    monkeypatch.setattr("shmtensor.codec.numpy.describe", fail)
    for _ in range(3):
        with pytest.raises(ArgumentTypeError if error is Refused else error) as info:
            encode(sources)
        if error is Refused:
            assert str(info.value) == 'value[1]["a"][0]: no'
    del info
    gc.collect()
    assert [sys.getrefcount(source) for source in (sources[0], leaf)] == before


def test_an_exception_while_a_leaf_is_made(monkeypatch):
    encoded = encode([torch.ones(2), np.zeros(2, ">i4"), {"a": 1}])
    payload = arrives(encoded)
    lease, references = weakref.ref(payload), sys.getrefcount(payload)

    def fail(description, depth=0):
        raise Interrupted

    monkeypatch.setattr("shmtensor.codec.decode.build", fail)
    for _ in range(3):
        with pytest.raises(Interrupted):
            decode(encoded.description, payload)
    gc.collect()
    assert sys.getrefcount(payload) == references
    del payload
    assert lease() is None


def test_modes_of_torch_see_nothing_odd():
    class Passing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Passing():
        encoded = encode({"x": torch.ones(3), "i": 1})
        got = decode(encoded.description, arrives(encoded))[0]
    assert got["x"].tolist() == [1, 1, 1]


# --- what is kept alive


def test_the_last_view_may_die_in_any_thread():
    encoded = encode({"x": torch.ones(3)})
    payload = arrives(encoded)
    lease = weakref.ref(payload)
    held = [decode(encoded.description, payload)[0]["x"]]
    del payload
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(PATIENCE)
    assert lease() is None


def test_nothing_leaks():
    """References of everything that comes by are the same after many messages, also of those that fail."""
    tensor, array, text = torch.randn(4), np.arange(4), "a text of its own"
    value = {"x": tensor, "n": [array, text, np.float32(1), b"bytes", array[::-1]], "again": (tensor[:2],)}
    meta = {"a": [text, {"b": 2**70}]}
    encoded = encode(value, meta)
    payload = arrives(encoded)
    room = bytearray(encoded.total)

    def use():
        encode(value, meta).write(room, 0)
        decode(encoded.description, payload)
        for bad in ([tensor, object()], {(1, 2): tensor}, [array, {1, 2}]):
            with pytest.raises(ArgumentTypeError):
                encode(bad)
        for cut in range(0, len(encoded.description), 7):
            with pytest.raises(Exception):  # noqa: B017
                decode(encoded.description[:cut], payload)

    use()
    gc.collect()
    objects = (tensor, array, text, payload, None, True, meta, encoded.description)
    before, count = [sys.getrefcount(each) for each in objects], len(gc.get_objects())
    for _ in range(50):
        use()
    gc.collect()
    after = [sys.getrefcount(each) for each in objects]
    assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True)), (before, after)
    assert len(gc.get_objects()) - count < 100


def test_sources_are_kept_and_released():
    source = np.arange(3)
    alive = weakref.ref(source)
    encoded = encode([source, 1])
    del source
    gc.collect()
    assert alive() is not None
    del encoded
    assert alive() is None


CHANGES = {
    "other memory": (lambda: torch.ones(1 << 20), lambda source: setattr(source, "data", torch.zeros(1))),
    "no memory": (lambda: torch.ones(1 << 20), lambda source: source.untyped_storage().resize_(0)),
    "strided": (lambda: torch.ones(1 << 10, 1 << 10).T, lambda source: source.untyped_storage().resize_(0)),
    "another shape": (lambda: torch.ones(1 << 20), lambda source: source.resize_(1 << 19)),
    "an array": (lambda: np.ones(1 << 20), lambda source: source.resize(1, refcheck=False)),
    "dates": (lambda: np.ones(1 << 20, "M8[s]"), lambda source: source.resize(1, refcheck=False)),
    "fields": (lambda: np.ones(1 << 20, "i4,f4"), lambda source: source.resize(1, refcheck=False)),
    "big-endian": (lambda: np.ones(1 << 20, ">f8"), lambda source: source.resize(1, refcheck=False)),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1 << 20), torch.ones(2)]),
        lambda source: source.untyped_storage().resize_(0),
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(1 << 20), 0.1, 0, torch.qint8),
        lambda source: source.untyped_storage().resize_(0),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_was_given_other_memory_meanwhile_is_an_error(implementation, change):  # noqa: F811
    """Between `encode` and `write` a sender may wait for a slot. The reference keeps a tensor, with its old memory."""
    make, act = CHANGES[change]
    encode(torch.ones(1))  # a compiled codec has seen a tensor
    source = make()
    encoded = encode({"x": source, "id": 7})
    act(source)
    room = bytearray(encoded.total)
    if implementation == "pure" and change in ("other memory", "another shape"):
        encoded.write(room, 0)
        assert (decode(encoded.description, np.frombuffer(room, np.uint8))[0]["x"] == 1).all()
        return
    with pytest.raises(ArgumentError, match="while it was being sent"):
        encoded.write(room, 0)


@pytest.mark.parametrize("kind", ["array", "dates", "overlapping"])
def test_a_source_that_gets_other_memory_while_others_are_copied_is_an_error(implementation, kind, monkeypatch):  # noqa: F811
    """Copies of many bytes let other threads run, which is when this one would come."""
    first, later = np.ones(1 << 20), np.ones(1 << 20, "M8[s]" if kind == "dates" else np.float64)
    value = [first, first[:10], later, later[:10]] if kind == "overlapping" else [first, later]
    encoded = encode(value)
    copied = []

    def copy(*args):
        copied.append(args)
        for array in (first, later):  # of which one is to be copied yet
            array.resize(1, refcheck=False)

    for name in ("memmove", "move_far"):
        monkeypatch.setattr(copies, name, copy)
    with pytest.raises(ArgumentError, match="while it was being sent"):
        encoded.write(bytearray(encoded.total), 0)
    assert len(copied) == 1


def test_what_was_copied_already_may_change(implementation, monkeypatch):  # noqa: F811
    """Before a copy only the sources of its bytes are looked at: a look at all of them, for each, would take long."""
    small = np.ones(3)
    value = [small, small[:2], *[part for _ in range(2) for part in tied(np.ones(1 << 20))]]
    encoded = encode(value)
    if implementation == "pure":  # copies in order of addresses: count what it looks at
        looked = []
        monkeypatch.setattr(reference, "place_of", lambda source: looked.append(source) or place_of(source))
        encoded.write(bytearray(encoded.total), 0)
        assert len(looked) == 2 * len(value)
        return
    copied = []

    def copy(*args):
        copied.append(args)
        small.resize(1, refcheck=False)

    for name in ("memmove", "move_far"):
        monkeypatch.setattr(copies, name, copy)
    encoded.write(bytearray(encoded.total), 0)
    assert len(copied) == 2


def tied(array):
    return array, array[:10]


ONE_HASH = 2**61 - 1  # two ints whose difference is a multiple of it have the same hash


def test_int_keys_of_one_hash_are_bounded():
    """Anybody can find a million of them, and a dict of these takes minutes to make."""
    apart = {2**70 + i: None for i in range(300)}
    same = {2**70 + i * ONE_HASH: None for i in range(spec.MAX_EQUAL_HASHES)}
    assert travel([apart, same]) == [apart, same]
    for more in (same | {2**80 * ONE_HASH + 2**70: 1}, collections.OrderedDict(same | {2**70 - ONE_HASH: 1})):
        with pytest.raises(ArgumentError, match=r'^value\["a"\]: dict has more than 64 int keys of one hash'):
            encode({"a": more})
    keys = [spec.scalar(2**70 + i * ONE_HASH) for i in range(200_000)]
    for count in (spec.MAX_EQUAL_HASHES + 1, len(keys)):
        nodes = b"".join([key + b"\0" for key in keys[:count]])
        with pytest.raises(WireError, match="of one hash"):
            decode(spec.header() + spec.container(spec.DICT, count) + nodes + b"\0", payload_of(0))


TWICE = {
    "texts": ({TextById("a"): 1, TextById("a"): 2}, "'a'"),
    "a text and a str": ({"b": 0, "é": 1, TextById("é"): 2}, "'é'"),
    "a long text": ({TextById("x" * 9000): 1, TextById("x" * 9000): 2}, "'xxx"),
    "ints": ({NumberById(7): 1, "b": 0, NumberById(7): 2}, "7"),
    "large ints": ({NumberById(2**70): 1, 2**70: 2}, str(2**70)),
    "an int and a float": ({1: 1, FloatById(1.0): 2}, "1.0"),
    "an int and a bool": ({True: 1, NumberById(1): 2}, "1"),
    "floats": ({FloatById(0.0): 1, FloatById(-0.0): 2}, "-0.0"),
    "an ordered dict": (collections.OrderedDict({TextById("a"): 1, TextById("a"): 2}), "'a'"),
    "the items of a subclass": (Pairs(("a", 1), ("a", 2)), "'a'"),
    "None": (Pairs((None, 1), (None, 2)), "None"),
}


@pytest.mark.parametrize("kind", TWICE)
def test_keys_that_arrive_as_one_are_refused(kind):
    """No receiver could make a dict of them: the message would be passed over there."""
    value, name = TWICE[kind]
    with pytest.raises(ArgumentError) as info:
        encode({"x": [value]})
    assert str(info.value).startswith(f'value["x"][0]: dict has two keys that arrive as {name}')
    assert len(str(info.value)) < 200
    if all(isinstance(key, str) for key, _ in value.items()):
        with pytest.raises(ArgumentError) as info:
            encode(1, {"x": [value]})
        assert str(info.value).startswith(f"meta['x'][0]: dict has two keys that arrive as {name}")


def test_keywords_of_copy_into_and_write():
    encoded = encode(torch.ones(3))
    room, other = bytearray(128 + 12), bytearray(128 + 12)
    encoded.copy_into(buffer=room, offset=128, on_device=False)
    encoded.write(offset=128, buffer=other, on_device=True)
    assert room == other == bytes(128) + torch.ones(3).numpy().tobytes()
    for arguments, options in (((), {}), ((room,), {"ofset": 1}), ((room, 0), {"offset": 0}), ((room, "1"), {})):
        for method in (encoded.copy_into, encoded.write):
            with pytest.raises(TypeError):
                method(*arguments, **options)
    with pytest.raises(TypeError):
        encoded.write(room)


def test_two_leaves_of_more_bytes_than_a_size_can_say_are_no_negative_size():
    assert encode([torch.zeros(1).expand(1 << 60)] * 2 + [torch.zeros(1).expand(1 << 60)]).nbytes > 0


def test_read_only_memory_is_never_written():
    with pytest.raises(BufferError):
        encode(np.ones(3)).write(bytes(24), 0)


def test_misuse_is_an_error(codec):
    description = encode(torch.ones(3)).description
    for arguments, options in (((), {}), ((1, 2, 3), {}), ((1,), {"other": 2}), ((1, None), {"meta": None})):
        with pytest.raises(TypeError):
            codec.encode(*arguments, **options)
    for arguments, options in (((description,), {"readonly": True}), ((description, payload_of(12)), {})):
        with pytest.raises(TypeError):
            codec.decode(*arguments, **options)
    for payload in (None, b"", np.zeros(12), np.zeros((3, 4), np.uint8), payload_of(24)[::2]):
        with contextlib.suppress(Exception):  # nothing is read outside, that is all
            codec.decode(description, payload, readonly=True)
    for odd in (None, "text", 3, bytearray(description), memoryview(description)[::2]):
        with contextlib.suppress(Exception):
            codec.decode(odd, np.zeros((3, 4)), readonly=True)
    with pytest.raises(TypeError):
        type(codec)()
    with pytest.raises(TypeError):
        type(codec.encode(1))()
    with pytest.raises(AttributeError):
        codec.encode(1).description = b""


def test_pure_is_the_reference():
    code = (
        "from shmtensor.codec import implementation as chosen, encode; assert chosen.codec is None;"
        "assert chosen.encode is encode.encode"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=PATIENCE, env={"SHMTENSOR_PURE": "1", "PATH": "/usr/bin"}
    )


FREE_THREADED = """
import sys

sys.abiflags += "t"
from shmtensor import native
from shmtensor.cli import doctor
from shmtensor.codec import implementation

assert native.module is None and implementation.codec is None
(finding,) = doctor.codec()
assert (finding.status, finding.value) == ("warn", "not in use") and "free-threaded" in finding.meaning, finding
native.report_missing()
"""


def test_a_python_without_its_lock_uses_the_reference_and_says_so():
    done = subprocess.run(
        [sys.executable, "-c", FREE_THREADED], check=True, timeout=PATIENCE, env={"PATH": "/usr/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "compiled core" in line] == [
        "the compiled core is not used, so that small messages take about forty times longer: this Python has no "
        "global interpreter lock (free-threaded), which keeps its threads apart: use a Python that has the lock"
    ]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_it_is_not_built_for_a_python_without_its_lock():
    source = Path(native.__file__).parent / "decode.c"
    includes = [f"-I{np.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    for flags, works in (([], True), (["-DPy_GIL_DISABLED"], False)):
        done = subprocess.run(
            ["gcc", "-fsyntax-only", *includes, *flags, str(source)], capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode == 0) is works
        assert ("the interpreter lock is what keeps threads apart" in done.stderr) is not works


ENDING = """
import atexit, ctypes, sys

library = ctypes.PyDLL(sys.argv[1])


def at_last():  # runs after what the codec has registered
    library.release_by_a_thread(ctypes.py_object(capsules[0]))


atexit.register(at_last)
import torch

make, made, capsules = torch._C._from_dlpack, None, []


def take(capsule):
    if made is None:
        return make(capsule)
    capsules.append(capsule)  # no tensor has it: torch itself asks the interpreter for one's Python object
    return made


torch._C._from_dlpack = take
from tests.codec import another as codec

with codec.using("compiled without the exchange interface"):
    codec.travel(torch.ones(3))
    made = torch.ones(3)
    codec.travel(made)
"""
LIBRARY = """
#include <Python.h>
#include <pthread.h>
#include <unistd.h>
#include "dlpack.h"

static pthread_t thread;

static void *release(void *legacy) {
    ((DLLegacy *)legacy)->deleter(legacy);
    return legacy;
}

/* The thread starts while the interpreter lock is held: it would wait for it. */
void release_by_a_thread(PyObject *capsule) {
    DLLegacy *legacy = PyCapsule_GetPointer(capsule, "dltensor");
    PyCapsule_SetName(capsule, "used_dltensor");
    if (pthread_create(&thread, NULL, release, legacy)) _exit(7);
}

/* The interpreter has ended. */
__attribute__((destructor)) static void at_end(void) {
    void *result = NULL;
    if (thread && (pthread_join(thread, &result) || !result)) _exit(8);
    if (write(1, "released\\n", 9) != 9) _exit(9);
}
"""


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    directory = tmp_path_factory.mktemp("ending")
    (directory / "ending.c").write_text(LIBRARY)
    includes = [f"-I{Path(native.__file__).parent}", f"-I{sysconfig.get_paths()['include']}"]
    library = directory / "ending.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-pthread", *includes, str(directory / "ending.c"), "-o", str(library)], check=True
    )
    return library


@pytest.mark.slow
def test_a_thread_may_free_memory_while_the_interpreter_ends(codec, ending):
    """The thread comes back, and the process ends as it would have: no wait for a lock that nobody gives any more."""
    done = subprocess.run([sys.executable, "-c", ENDING, str(ending)], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "released\n"), done.stderr


BESIDE_ANOTHER = """
import os, shmtensor, torch
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
interpreters.create()
name = f"sub-{os.getpid()}"
with shmtensor.Publisher(name) as pub, shmtensor.Subscriber(name) as sub:
    for number in range(3):
        pub.send(torch.full((3,), number))
        value = sub.recv(timeout=60).value
        assert value.tolist() == [number] * 3
        del value
"""


def test_memory_is_freed_where_there_is_a_second_interpreter():
    """Once there was one, `PyGILState_Check` says of each thread that it holds the lock."""
    done = subprocess.run([sys.executable, "-c", BESIDE_ANOTHER], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


class Passing(torch.overrides.TorchFunctionMode):
    """A mode that lets everything through, by way of Python code."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_under_a_mode_that_overrides_torchs_functions():
    plain = torch.arange(9.0).reshape(3, 3)
    with Passing():
        assert torch.equal(travel(plain), plain)


class Counting(torch.overrides.TorchFunctionMode):
    """A mode that counts what it lets through."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_the_last_look_before_the_copy_runs_no_code_for_dtypes_that_look_alike(codec):
    """A mode's code could give a tensor that was looked at other memory."""
    if codec.tensors != "exchange":
        pytest.skip("by methods, each is a call")
    calls = {}
    for dtype in (torch.float32, torch.uint8, torch.int8):
        encoded, payload = encode(torch.ones(3).to(dtype)), payload_of(64)
        with Counting() as mode:
            encoded.copy_into(payload, 0)
        calls[dtype] = len(mode.calls)
    assert len(set(calls.values())) == 1, calls


def test_a_tensor_whose_memory_was_freed_is_refused():
    freed = torch.ones(3, 3)
    part = freed[1:]
    freed.untyped_storage().resize_(0)
    for value in (freed, {"a": freed}, part, {"a": part}):
        with pytest.raises(ArgumentError, match="no memory"):
            encode(value)


SHRUNK = {
    "plain": lambda: torch.ones(1 << 20),
    "transposed": lambda: torch.ones(1 << 10, 1 << 10).T,
    "with gaps": lambda: torch.ones(1 << 20)[::2],
    "the end of it": lambda: torch.ones(1 << 20)[1 << 19 :],
    "complex": lambda: torch.ones(1 << 19, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(1 << 19, dtype=torch.complex64).conj(),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(1 << 20)),
    "values of a sparse one": lambda: torch.sparse_coo_tensor(
        torch.arange(1 << 20).unsqueeze(0), torch.ones(1 << 20), (1 << 20,), check_invariants=False
    ),
}


@pytest.mark.parametrize("kind", SHRUNK)
def test_a_tensor_whose_storage_was_made_smaller_is_refused(kind):
    """Its copy would read what the process has given back: it would be killed."""
    shrunk = SHRUNK[kind]()
    held = shrunk._values() if shrunk.is_sparse else shrunk
    held.untyped_storage().resize_(4096)
    for value in (shrunk, {"a": shrunk}):
        with pytest.raises(ArgumentError, match="no memory: its storage was made smaller"):
            encode(value)
    held.untyped_storage().resize_(1 << 22)
    encode(shrunk)


def test_a_tensor_that_torch_only_traces_is_told_from_one_whose_memory_was_freed():
    with pytest.raises(
        ArgumentError, match=r"no memory: .*, or torch only traces it \(functionalize, FakeTensorMode\)"
    ):
        torch.func.functionalize(lambda tensor: encode({"a": tensor}))(torch.ones(3))
