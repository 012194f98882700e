"""Values survive: structure, scalars, layouts, ties, composites; their lifetime is the payload's lease."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import math
import weakref
from array import array as standard_array

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmtensor.codec import composites
from shmtensor.codec.implementation import copy_value
from shmtensor.codec.leaf import map_leaves
from shmtensor.errors import ArgumentError, ArgumentTypeError, WireError

from .another import decode, encode, implementation, payload_of, travel  # noqa: F401

pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantize_per|Sparse|nested tensors|ComplexHalf)")]


def same(a, b):
    """Equal in type, structure and bits."""
    if isinstance(a, dict):
        return type(b) is dict and all(map(same, a, b)) and len(a) == len(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, float):
        return type(b) is float and ((a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b))
    return type(a) is type(b) and a == b


ARRAYS = hnp.arrays(
    st.one_of(hnp.scalar_dtypes(), hnp.nested_dtypes(max_itemsize=64)).filter(lambda d: not d.hasobject),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
TENSORS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8, np.complex64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
).map(torch.from_numpy)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
VALUES = st.recursive(
    st.one_of(ARRAYS, TENSORS, TENSORS, SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_value(value):
    back = travel(value)
    assert same(value, back)
    assert same(value, copy_value(back))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_views_of_one_storage_share_storage_on_arrival(data):
    base = torch.arange(120, dtype=torch.float32)
    views = []
    for _ in range(data.draw(st.integers(2, 5))):
        shape = data.draw(st.lists(st.integers(1, 3), max_size=3))
        strides = [data.draw(st.integers(1, 12)) for _ in shape]
        views.append(base.as_strided(shape, strides, data.draw(st.integers(0, 30))))
    views.append(base[40:100].numpy()[::2])
    views.append(base)  # overlaps all of them
    back = travel(views)
    whole = back[-1]
    for source, arrived in zip(views, back, strict=True):
        assert np.array_equal(np.asarray(source), np.asarray(arrived))
        before, after = (np.asarray(x).__array_interface__["data"][0] for x in (source, arrived))
        assert after - whole.data_ptr() == before - base.data_ptr()
        if isinstance(arrived, torch.Tensor):
            assert arrived.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert all(a == b for a, b, n in zip(source.stride(), arrived.stride(), source.shape, strict=True) if n > 1)
    whole.zero_()
    assert not any(np.asarray(x).any() for x in back)


def test_ties_are_copied_once():
    weight = torch.randn(100, 100)
    packed = encode({"a": weight, "b": weight, "c": weight.T, "d": torch.randn(4)})
    assert packed.nbytes < 2 * weight.nbytes
    first, second = (encode([weight, weight.T, weight[1:]]).description for _ in range(2))
    assert first == second
    expanded = torch.ones(3, 1).expand(3, 1000)
    back = travel([expanded, expanded])
    assert back[0].data_ptr() == back[1].data_ptr()
    assert back[0].is_contiguous()


def test_ties_among_bytes_at_odd_addresses():
    block = np.arange(64, dtype=np.uint8)
    packed_struct = np.zeros(5, [("a", "u1"), ("b", "f8")])
    packed_struct["b"] = range(5)
    values = [block[3:40], torch.from_numpy(block[8:24].view(np.float32)), packed_struct, packed_struct["b"]]
    back = travel(values)
    assert all(map(same, values, back))
    back[2]["b"][0] = 7
    assert back[3][0] == 7
    copied = copy_value(back)
    copied[2]["b"][0] = 9
    assert copied[3][0] == 9
    assert back[3][0] == 7


LAYOUTS = {
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "transposed": torch.randn(3, 4).T,
    "permuted": torch.randn(2, 3, 4).permute(1, 2, 0),
    "one_wide": torch.randn(4, 1, 3).transpose(0, 2),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_dense_strides_survive(tensor):
    assert travel(tensor).stride() == tensor.stride()
    assert torch.equal(travel(tensor), tensor)
    array = tensor.numpy()
    assert travel(array).strides == array.strides
    assert np.array_equal(travel(array), array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 6)[:, ::2],
        torch.randn(3).expand(4, 3),
        torch.randn(8, 8)[1:3, 2:4],
        torch.randn(600, 700)[:, 1:],
    ],
    ids=["sliced", "expanded", "window", "large"],
)
def test_other_strides_become_dense(tensor):
    assert torch.equal(travel(tensor), tensor)
    assert travel(tensor).is_contiguous()
    array = tensor.numpy()[::-1]
    assert np.array_equal(travel(array), array)
    assert travel(array).flags.c_contiguous


def test_conj_neg_and_zero_tensors():
    z = torch.tensor([1 + 2j, 3 - 4j])
    zero, negated = torch._efficientzerotensor(3), torch._neg_view(torch.ones(2))
    for tensor in (z.conj(), z.conj().imag, zero, z.conj()[::1], negated):
        assert torch.equal(travel(tensor), tensor.clone())
        assert torch.equal(travel([tensor] * 3)[1], tensor.clone())
        assert not travel(tensor).is_neg()
        assert not travel(tensor).is_conj()


def test_parameters_arrive_detached():
    layer = torch.nn.Linear(3, 2)
    back = travel(layer.state_dict(keep_vars=True))
    assert type(back) is dict
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in back.values())
    assert torch.equal(back["weight"], layer.weight)
    assert torch.equal(travel((layer.weight * 2).T[::2]), (layer.weight * 2).T[::2])
    assert torch.equal(travel(torch.nn.Buffer(torch.ones(2))), torch.ones(2))


def test_many_dimensions():
    tensor = torch.randn([2] + [1] * 62 + [3])
    assert torch.equal(travel(tensor), tensor)
    assert travel(torch.zeros([1] * 64)[None, 0]).ndim == 64
    with pytest.raises(ArgumentError, match="65 dimensions"):
        encode(torch.zeros([1] * 65))


def test_more_dimensions_than_numpy_has(monkeypatch):
    monkeypatch.setattr("shmtensor.codec.torch.NUMPY_MAX_NDIM", 2)
    monkeypatch.setattr("shmtensor.codec.decode.MAX_NDIM", 2)
    for tensor in (torch.randn(2, 3, 4), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(2, 3, 4)[..., ::2]):
        assert torch.equal(travel(tensor), tensor)


def test_structure():
    Pair = collections.namedtuple("Pair", "a b")
    value = collections.OrderedDict(
        [
            ("z", Pair(1, [None, True, 1.5, "x\ud800"])),
            (1, ()),
            (True + 1, {}),
            (None, []),
            (2.5, {False: "f"}),
        ]
    )
    back = travel(value)
    assert back == {"z": (1, [None, True, 1.5, "x\ud800"]), 1: (), 2: {}, None: [], 2.5: {False: "f"}}
    assert list(map(type, back)) == [str, int, int, type(None), float]
    assert type(next(iter(back[2.5]))) is bool
    assert type(back["z"]) is tuple
    numbers = [10**5000, -(10**400), 2**63, float("inf"), -0.0, float("nan")]
    assert same(travel(numbers), numbers)


def test_meta():
    packed = encode(None, {"ts": 1.5, "tags": ("a", None)})
    assert decode(packed.description, payload_of(0)) == (None, {"ts": 1.5, "tags": ["a", None]})
    for meta in ([1], {"a": object()}, {1: 2}, {"a": {(1, 2): 3}}, {"a": np.float32(1)}):
        with pytest.raises(ArgumentTypeError, match="meta"):
            encode(None, meta)
    with pytest.raises(ArgumentError, match="65536"):
        encode(None, {"a": "x" * 70_000})
    loop = {}
    loop["a"] = loop
    with pytest.raises(ArgumentError, match="meta"):
        encode(None, loop)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: int


REFUSED = [
    (object(), "allowed are"),
    ({1, 2}, "send a list of its items"),
    (frozenset(), "send a list of its items"),
    (3 + 4j, r"complex is not sent: send numpy.complex128\(number\)"),
    (Color.RED, r"Color is not sent: send its \.value"),
    (Point(1, 2), r"Point is not sent: send dataclasses.asdict\(object\)"),
    (Point, "allowed are"),
    (standard_array("i", [1]), r"send memoryview\(object\)"),
    (torch.float32, r"send its name, str\(object\)"),
    (torch.device("cpu"), r"send its name, str\(object\)"),
    (np.ma.zeros(3), "mask"),
    (np.rec.array([(1,)], dtype=[("a", "i4")]), "asarray"),
    (torch.empty(3, device="meta"), "meta tensors"),
    (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "as_subclass"),
    ({(1, 2): 3}, "dict key"),
    (torch.ones(3, 3).to_mkldnn() if torch.backends.mkldnn.is_available() else 1j, "is not sent"),
]


@pytest.mark.parametrize(("value", "match"), REFUSED, ids=[type(v).__name__ for v, _ in REFUSED])
def test_refused(value, match):
    with pytest.raises(ArgumentTypeError, match=match) as info:
        encode({"a": [1, 2, 3, value]})
    assert str(info.value).startswith('value["a"][3]: ')


def test_too_deep_or_cyclic():
    loop = []
    loop.append({"again": loop})
    with pytest.raises(ArgumentError, match="contains itself"):
        encode(loop)
    deep = 1
    for _ in range(64):
        deep = [deep]
    assert travel(deep) == deep
    with pytest.raises(ArgumentError, match="64 deep"):
        encode([deep])
    with pytest.raises(ArgumentError, match="too large"):
        encode(torch.zeros(1, dtype=torch.int64).expand(2**60))


def sparse_tensors():
    dense = torch.tensor([[0, 1.0, 0, 2], [3, 0, 0, 0], [0, 0, 0, 4], [5, 6, 0, 0]])
    coo = torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 0]], [1.0, 2.0, 3.0], (2, 3))
    yield from (coo, coo.coalesce(), dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc())
    yield from (dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2)), torch.randn(3, 4, 2).to_sparse(2))
    yield from (
        torch.zeros(3, 4).to_sparse(),
        torch.zeros(3, 4).to_sparse_csr(),
        torch.stack([dense] * 2).to_sparse_csr(),
    )


def test_sparse():
    for tensor in sparse_tensors():
        back = travel([tensor])[0]
        assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
        if tensor.layout == torch.sparse_coo:
            assert back.is_coalesced() == tensor.is_coalesced()
        assert all(map(torch.equal, parts_of(back), parts_of(tensor)))
        assert torch.equal(back.to_dense(), tensor.to_dense())


def parts_of(sparse):
    if sparse.layout == torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def compressed(rows, columns, size=(2, 2), *, layout=torch.sparse_csr, values=None, dtype=torch.int64):
    """A sparse tensor of whatever parts: without `check_invariants`, as torch makes them by default."""
    values = torch.arange(1.0, len(columns) + 1) if values is None else values
    rows, columns = (torch.tensor(part, dtype=dtype) for part in (rows, columns))
    return torch.sparse_compressed_tensor(rows, columns, values, size, layout=layout, check_invariants=False)


def spread(indices):
    """The same indices, every second element in memory."""
    return torch.stack([indices, indices - 1], -1).flatten()[::2]


def coo(indices, size, **options):
    indices = torch.tensor(indices)
    return torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]), size, check_invariants=False, **options)


def product_of_sparse():
    rows = (torch.arange(30.0).reshape(5, 6) % 4).to_sparse_csr()
    return torch.mm(rows, rows.to_dense().t().contiguous().to_sparse_csr())  # torch leaves its columns unsorted


UNUSUAL = {
    "a product": product_of_sparse,
    "unsorted": lambda: compressed([0, 2, 3], [1, 0, 0]),
    "unsorted columns": lambda: compressed([0, 2, 3], [1, 0, 0], layout=torch.sparse_csc),
    "unsorted blocks": lambda: compressed([0, 2], [1, 0], (2, 4), layout=torch.sparse_bsr, values=torch.ones(2, 2, 2)),
    "unsorted columns of blocks": lambda: compressed(
        [0, 2], [1, 0], (4, 2), layout=torch.sparse_bsc, values=torch.ones(2, 2, 2)
    ),
    "a batch of unsorted": lambda: compressed(
        [[0, 2, 3], [0, 0, 3]], [[1, 0, 0], [1, 1, 1]], (2, 2, 2), values=torch.ones(2, 3, 4)[..., 0]
    ),
    "repeated": lambda: compressed([0, 2, 3], [1, 1, 0], dtype=torch.int32),
    "more in a row than columns": lambda: compressed([0, 5], [0, 1, 0, 1, 1], (1, 2)),
    "indices with gaps": lambda: torch.sparse_compressed_tensor(
        spread(torch.tensor([0, 2, 3])), spread(torch.tensor([1, 0, 0])), torch.arange(6.0)[::2], (2, 2),
        layout=torch.sparse_csr, check_invariants=False,
    ),
    "falsely coalesced": lambda: coo([[1, 0, 1], [0, 0, 0]], (2, 2), is_coalesced=True),
    "one element, not coalesced": lambda: coo([[1], [0]], (2, 2))._coalesced_(False),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSUAL)
def test_sparse_tensors_whose_indices_are_unsorted_or_repeated_arrive(kind):
    tensor = UNUSUAL[kind]()
    for back in (travel({"a": tensor, "b": [parts_of(tensor)]})["a"], copy_value(tensor)):
        assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
        assert all(map(torch.equal, parts_of(back), parts_of(tensor)))
        if tensor.layout == torch.sparse_coo:
            assert back.is_coalesced() == tensor.is_coalesced()


def jagged_of(offsets, lengths=None):
    return torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 3), torch.tensor(offsets), lengths=None if lengths is None else torch.tensor(lengths)
    )


BROKEN = {
    "a column beyond the size": (lambda: compressed([0, 2, 3], [1, 2, 0]), "plain indices are not below 2"),
    "a negative column": (lambda: compressed([0, 2, 3], [1, -1, 0]), "plain indices are not below 2"),
    "a block beyond the size": (
        lambda: compressed([0, 1], [2], (2, 4), layout=torch.sparse_bsr, values=torch.ones(1, 2, 2)), "not below 2"),
    "a row that ends before it starts": (lambda: compressed([0, 4, 3], [1, 1, 0]), "do not rise from 0 to 3"),
    "rows that do not start at 0": (lambda: compressed([1, 2, 3], [1, 1, 0]), "do not rise from 0 to 3"),
    "rows beyond the elements": (lambda: compressed([0, 2, 4], [1, 1, 0]), "do not rise from 0 to 3"),
    "rows whose difference overflows": (
        lambda: compressed([0, 2**31 - 1, -(2**31), 3], [1, 1, 0], (3, 2), dtype=torch.int32), "do not rise from 0"),
    "too few rows": (lambda: compressed([0, 3], [1, 1, 0]), "crow_indices"),
    "too few values": (lambda: compressed([0, 2, 3], [1, 1, 0], values=torch.ones(2)), "do not fit each other"),
    "small integers": (lambda: compressed([0, 2, 3], [1, 1, 0], dtype=torch.int16), "must be Int or Long"),
    "an index of COO": (lambda: coo([[1, 5], [0, 0]], (2, 2)), "found index 5"),
    "65 dimensions": (lambda: coo([[0]] * 65, (1,) * 65), "at most 64 dimensions"),
    "65 dimensions, quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros([1] * 65), 0.1, 3, torch.quint8), "65 dimensions"),
    "offsets beyond the values": (lambda: jagged_of([0, 3, 10]), "offsets beyond its values"),
    "offsets that fall": (lambda: jagged_of([0, 5, 3, 9]), "offsets beyond its values"),
    "offsets whose difference overflows": (lambda: jagged_of([0, 2**62, -(2**63), 9]), "offsets beyond its values"),
    "lengths beyond the values": (lambda: jagged_of([0, 5, 9], [1, 5]), "lengths beyond its values"),
    "lengths whose sum overflows": (lambda: jagged_of([0, 5, 9], [1, 2**63 - 1]), "lengths beyond its values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_no_receiver_would_make_is_not_sent(kind):
    make, why = BROKEN[kind]
    broken = make()
    with pytest.raises(ArgumentError, match=why) as info:
        encode({"a": [broken]})
    assert str(info.value).startswith('value["a"][0]: ')


@pytest.mark.parametrize("kind", BROKEN)
def test_what_a_sender_did_not_check_is_checked_on_arrival(kind, monkeypatch):
    """As `test_what_no_receiver_would_make_is_not_sent`, of a sender that goes by other rules."""
    broken = BROKEN[kind][0]()
    with monkeypatch.context() as patch:
        for check in ("_check_compressed", "_check_coo", "_check_jagged"):
            patch.setattr(composites, check, lambda *_: None)
        try:
            encoded = encode([broken])
        except ArgumentError:  # it cannot even be described
            return
    payload = payload_of(encoded.nbytes)
    encoded.copy_into(payload)
    with pytest.raises(WireError):
        decode(encoded.description, payload)


def test_quantized():
    x = torch.randn(3, 4, 5, 6)
    scales, zeros = torch.rand(4, dtype=torch.float64) + 0.1, torch.arange(4)
    tensors = [torch.quantize_per_tensor(x, 0.1, 3, d) for d in (torch.quint8, torch.qint8, torch.qint32)]
    tensors += [torch.quantize_per_channel(x, scales, zeros, 1, d) for d in (torch.quint8, torch.qint8, torch.qint32)]
    packed = torch.quantize_per_channel(x[0, 0], torch.rand(5) + 0.1, torch.rand(5), 0, torch.quint4x2)
    tensors += [tensors[0].permute(1, 0, 2, 3), tensors[0][:, ::2], tensors[3][:2], packed, tensors[0][:0]]
    tensors.append(tensors[1].contiguous(memory_format=torch.channels_last))
    for tensor in tensors:
        for back in (travel(tensor), travel([tensor, tensor])[1]):
            assert (back.dtype, back.shape, back.qscheme()) == (tensor.dtype, tensor.shape, tensor.qscheme())
            assert torch.equal(back.int_repr(), tensor.int_repr())
            assert torch.equal(back.dequantize(), tensor.dequantize())
            if tensor.qscheme() == torch.per_tensor_affine:
                assert (back.q_scale(), back.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())
            else:
                assert torch.equal(back.q_per_channel_scales(), tensor.q_per_channel_scales())
                assert torch.equal(back.q_per_channel_zero_points(), tensor.q_per_channel_zero_points())
    assert travel(tensors[-1]).stride() == tensors[-1].stride()


def test_nested():
    parts = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(0, 3)]
    nested = torch.nested.nested_tensor(parts)
    zero_d = torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])
    for tensor in (nested, nested.transpose(1, 2), torch.nested.nested_tensor([]), zero_d):
        back = travel([tensor])[0]
        assert back.is_nested
        assert len(back.unbind()) == len(tensor.unbind())
        assert all(map(torch.equal, back.unbind(), tensor.unbind()))
    jagged = torch.nested.nested_tensor(parts[:2], layout=torch.jagged)
    holes = torch.nested.nested_tensor_from_jagged(
        torch.randn(10, 3), torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 1])
    )
    for tensor in (jagged, jagged.transpose(1, 2), holes):
        back = travel([tensor])[0]
        assert back.layout == torch.jagged
        assert back._ragged_idx == tensor._ragged_idx
        assert all(map(torch.equal, back.unbind(), tensor.unbind()))
    first, second = travel([jagged, jagged * 2])
    assert torch.equal((first + second).values(), jagged.values() * 3)  # they still have the same shape


MAKERS = {
    "tensor": lambda: torch.randn(3, 4),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "0-d": lambda: torch.tensor(3.0),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "array": lambda: np.arange(12.0).reshape(3, 4),
    "structured": lambda: np.zeros(3, [("a", "f4")]),
    "0-d array": lambda: np.array(1.5),
    "tree": lambda: {"a": torch.ones(3), "b": [np.ones(3), torch.ones(2).bfloat16()]},
    "ties": lambda: (lambda w: [w, w.T, w.numpy()[1:]])(torch.randn(3, 4)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
    "channels": lambda: torch.quantize_per_channel(torch.randn(2, 4), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
}


def pieces(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [p for v in value for p in pieces(v)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_each_leaf_is_the_lease(make):
    source = make()
    packed = encode(source)
    gc.collect()
    gc.disable()
    try:
        for keep in range(len(pieces(source))):
            payload = payload_of(packed.nbytes)
            packed.copy_into(payload)
            value = decode(packed.description, payload, readonly=True)[0]
            lease = weakref.ref(payload)
            del payload
            piece = pieces(value)[keep]
            del value
            assert lease() is not None
            if type(piece) is np.ndarray:
                piece = piece[:1] if piece.ndim else piece.view()
            elif type(piece) is torch.Tensor and piece.layout == torch.strided and not piece.is_nested:
                piece = piece.untyped_storage()
            assert lease() is not None
            del piece
            assert lease() is None
    finally:
        gc.enable()


ARRAY_KINDS = {
    "plain": lambda: np.arange(3.0),
    "0-d": lambda: np.array(1.5),
    "transposed": lambda: np.arange(6.0).reshape(2, 3).T,
    "big-endian": lambda: np.arange(3, dtype=">i4"),
    "structured": lambda: np.zeros(2, [("a", "f4"), ("b", "M8[ns]")]),
    "records": lambda: np.zeros(2, (np.record, [("a", "i8")])),
    "text": lambda: np.array(["a", "bc"]),
    "ml dtype": lambda: np.zeros(2, ml_dtypes.bfloat16),
    "beside tensors": lambda: [np.arange(3), torch.ones(2, dtype=torch.uint16), np.zeros(2, ">c8")],
    "views of a tensor's memory": lambda: (lambda w: [w.numpy(), w, w.T, w.numpy()[1:].view(">f4")])(torch.randn(3, 4)),
}


@pytest.mark.parametrize("make", ARRAY_KINDS.values(), ids=ARRAY_KINDS)
def test_read_only_arrays_cannot_be_made_writable(make):
    for array in pieces([travel(make(), readonly=True)]):
        if isinstance(array, np.ndarray):
            for view in (array, array[...], array.view("V1") if array.ndim and array.flags.c_contiguous else array.T):
                assert not view.flags.writeable
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view.flags.writeable = True
    for array in pieces([travel(make(), readonly=False)]):
        if isinstance(array, np.ndarray):
            assert array.flags.writeable
            array.flags.writeable = False
            array.flags.writeable = True


def test_scalars_and_empty_leaves_hold_no_lease():
    value = [np.float32(3), np.zeros(1, [("a", "f4")])[0], np.bytes_(b"ab"), torch.zeros(0, 3), np.zeros((2, 0))]
    packed = encode([*value, torch.ones(3)])
    payload = payload_of(packed.nbytes)
    packed.copy_into(payload)
    back = decode(packed.description, payload)[0]
    lease = weakref.ref(payload)
    del payload
    back.pop()
    assert lease() is None
    assert list(map(type, back)) == list(map(type, value))


def test_packed_keeps_sources_alive():
    value = {"a": torch.full((4, 4), 7.0), "b": np.full(5, 7.0)}
    packed = encode(value)
    value.clear()
    payload = payload_of(packed.nbytes)
    packed.copy_into(payload)
    back = decode(packed.description, payload)[0]
    assert (back["a"] == 7).all()
    assert (back["b"] == 7).all()


def test_large_and_memmap(tmp_path):
    tensor = torch.randn(300, 400)
    array = np.memmap(tmp_path / "x", np.float32, "w+", shape=(300, 400))
    array[:] = tensor.numpy()
    for value in (tensor, array, array[::2], tensor.T, tensor[:, 1:], [tensor, tensor[1:]]):
        back = travel(value)
        assert all(map(np.array_equal, pieces(back), pieces(value)))
    assert type(travel(array)) is np.ndarray


def test_payload_too_small():
    packed = encode(torch.ones(100))
    with pytest.raises(ArgumentError, match="400"):
        packed.copy_into(payload_of(399))


def test_equal_looking_messages_have_equal_descriptions():
    a, b = ({"x": torch.randn(3), "y": [7, np.full(2, i)]} for i in range(2))
    assert encode(a).description == encode(b).description
    assert encode({"1": 0}).description != encode({1: 0}).description != encode({True: 0}).description
    assert encode({1.0: 0}).description != encode({1: 0}).description
    assert encode([torch.ones(1)]).description != encode((torch.ones(1),)).description
    assert encode(torch.ones(1)).description != encode(np.ones(1, "f4")).description


def test_map_leaves_and_copy_value():
    tensor = torch.ones(3)
    value = {"a": tensor, "b": (tensor, [np.ones(2), 5, np.float32(1)])}
    mapped = map_leaves(lambda leaf: leaf * 2, value)
    assert mapped["a"] is mapped["b"][0]
    assert mapped["b"][1][1:] == [5, np.float32(1)]
    back = travel(value, readonly=True)
    assert not back["b"][1][0].flags.writeable
    copied = copy_value(back)
    copied["a"][0] = 9
    assert copied["b"][0][0] == 9
    assert back["a"][0] == 1
    assert copied["b"][1][0].flags.writeable


def test_mapped_leaves_are_not_kept():
    """Not even until the garbage collector comes by: they may be gigabytes of a device's memory."""
    gc.disable()
    try:
        mapped = map_leaves(lambda tensor: tensor.clone(), {"a": [torch.ones(3)]})
        alive = weakref.ref(mapped["a"][0])
        del mapped
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"cam": {"ts": np.int64(1)}}, r"meta\['cam'\]\['ts'\]: numpy.int64 is not a type of JSON"),
        ({"a": [1, {2: 3}]}, r"meta\['a'\]\[1\]: it has the key 2"),
        (5, "meta is of type int: .* timeout="),
    ],
)
def test_a_refused_meta_says_where(meta, text):
    with pytest.raises(ArgumentTypeError, match=text):
        encode(1, meta)


MATRIX = torch.arange(2000.0).reshape(20, 100)
FIELDS = np.zeros(100, "i8,V1000,f8")
SPREAD = {
    "columns": (lambda m: [m[:, 0], m[:, 1]], 64 * 2 + 80),
    "columns of an array": (lambda m: [m.numpy()[:, 0], m.numpy()[:, 99]], 64 * 2 + 80),
    "a column and its part": (lambda m: [m[:, 0], m[4:, 0]], 64 * 2 + 64),
    "a column many times": (lambda m: [m[:, 7]] * 300, 80),
    "columns many times": (lambda m: [m[:, 7], m[:, 8], m[:, 7].numpy()] * 100, 64 * 4 + 80),
    "wide windows of one place": (lambda m: [m[:, :30], m[:, :30], m[:, 1:3]], 2432 + 160),
    "fields": (lambda m: [FIELDS["f0"], FIELDS["f2"]], 832 + 800),
    "two elements far apart": (lambda m: [m.flatten()[:: 1999], m[10]], 64 + 400),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPREAD)
def test_leaves_that_have_less_than_half_of_the_memory_between_them_are_sent_by_themselves(kind):
    make, nbytes = SPREAD[kind]
    value = make(MATRIX)
    assert encode(value).nbytes <= nbytes
    back = travel(value)
    assert same([copy_of(leaf) for leaf in value], back)
    for leaf in back:
        assert leaf.is_contiguous() if isinstance(leaf, torch.Tensor) else leaf.flags.c_contiguous
    views = [(type(leaf), address(leaf), leaf.shape) for leaf in value]
    for i, view in enumerate(views):  # equal views share memory, others do not
        assert [address(leaf) == address(back[i]) for leaf in back] == [other == view for other in views]


def copy_of(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else np.ascontiguousarray(leaf)


def address(leaf):
    return leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.__array_interface__["data"][0]


FILLED = {
    "a matrix and its column": lambda m: [m, m[:, 3]],
    "all columns": lambda m: list(m.unbind(1)),
    "half of the columns": lambda m: list(m[:, ::2].unbind(1)),
    "parts of each row": lambda m: [m[:, :40], m[:, 40:80]],
    "every second element": lambda m: [m.flatten()[::2], m.flatten()[2:][::2]],
    "real and imaginary": lambda m: [torch.view_as_complex(m.reshape(-1, 2)).real, m.reshape(-1, 2)[:, 1]],
}


@pytest.mark.parametrize("kind", FILLED)
def test_leaves_that_fill_the_memory_between_them_are_sent_as_it_is(kind):
    value = FILLED[kind](MATRIX)
    assert encode(value).nbytes <= MATRIX.nbytes + 16
    back = travel(value)
    for leaf, other in zip(value, back, strict=True):
        assert torch.equal(leaf, other)
        assert leaf.stride() == other.stride()
        assert address(other) - address(back[0]) == address(leaf) - address(value[0])
