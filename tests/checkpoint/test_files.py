"""Checkpoint files: what goes into them comes out of them, for this library and for others; damage is found."""

from __future__ import annotations

import collections
import doctest
import importlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import ArgumentError, ArgumentTypeError, CheckpointError, load_arrays, load_checkpoint, load_into
from shmtensor.checkpoint import reading
from shmtensor.checkpoint.formats import detect, get_format
from shmtensor.checkpoint.plan import MAX_NAME, Plan, plan, unique_names
from shmtensor.codec import torch as torch_views

from ..waiting import wait_until
from .state_files import SUFFIX, mixed_state, model, raw, same, save, training_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
]
each_format = pytest.mark.parametrize("format", sorted(SUFFIX))
PATIENCE = 100.0
FUZZ = settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))


@pytest.fixture
def path_of(tmp_path):
    return lambda format, name="a": tmp_path / (name + SUFFIX[format])


# --- all of a state


@each_format
@pytest.mark.parametrize("map", [True, False])
def test_a_state_comes_back(format, map, path_of):
    state = mixed_state()
    path = save(state, path_of(format), format, meta={"note": [1, None]})
    back = load_checkpoint(path, map=map, verify="all")
    assert same(state, back), [key for key in state if not same(state[key], back[key])]
    back["weight"][5, 0] = 42
    assert back["transposed"][0, 5] == back["rows"][0, 0] == back["again"][5, 0] == 42
    back["parts"][0][50] = -1
    assert back["parts"][1][10] == -1
    assert same(load_checkpoint(path), state), "writing to what was loaded changed the file"


def parts_of(tensor):
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values(), torch.tensor(tensor.is_coalesced())
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


@each_format
@pytest.mark.parametrize("map", [True, False])
def test_sparse_tensors_whose_indices_are_unsorted_or_repeated_come_back(format, map, path_of):
    """torch's products of sparse matrices are so."""
    values = torch.tensor([1.0, 2.0, 3.0])
    state = {
        "unsorted": torch.sparse_csr_tensor(
            torch.tensor([0, 2, 3]), torch.tensor([1, 0, 0]), values, (2, 2), check_invariants=False
        ),
        "repeated": torch.sparse_csr_tensor(
            torch.tensor([0, 2, 3]), torch.tensor([1, 1, 0]), values, (2, 2), check_invariants=False
        ),
        "falsely coalesced": torch.sparse_coo_tensor(
            torch.tensor([[1, 1, 0], [0, 0, 0]]), values, (2, 2), is_coalesced=True, check_invariants=False
        ),
    }
    back = load_checkpoint(save(state, path_of(format), format), map=map)
    for name, tensor in state.items():
        assert (back[name].layout, back[name].shape) == (tensor.layout, tensor.shape)
        assert all(itertools.starmap(torch.equal, zip(parts_of(back[name]), parts_of(tensor), strict=True)))


@each_format
def test_a_tensor_that_could_not_be_loaded_is_not_saved(format, path_of):
    broken = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([5]), torch.ones(1), (1, 2), check_invariants=False
    )
    with pytest.raises(ArgumentError, match=r"x.*not valid"):
        save({"x": broken}, path_of(format), format)


@each_format
def test_training_goes_on(format, path_of):
    state = training_state()
    back = load_checkpoint(save(state, path_of(format), format))
    assert same({**state, "model": state["model"].state_dict()}, back)
    assert back["model"]._metadata == state["model"].state_dict()._metadata
    net = model()
    net.load_state_dict(back["model"])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    optimizer.load_state_dict(back["optim"])
    torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]).load_state_dict(back["scheduler"])
    random.setstate(back["rng"]["python"])
    torch.set_rng_state(back["rng"]["torch"])
    np.random.set_state(back["rng"]["numpy"])
    np.random.default_rng().bit_generator.state = back["rng"]["generator"]


TORCH_DTYPES = sorted(
    (dtype for dtype, row in torch_views.ROW.items() if not row.quantized), key=lambda dtype: str(dtype)
)


@each_format
def test_every_torch_dtype(format, path_of):
    data = torch.arange(96, dtype=torch.uint8)
    state = {str(dtype): data.view(dtype).reshape(2, -1) if dtype != torch.bool else data > 5 for dtype in TORCH_DTYPES}
    back = load_checkpoint(save(state, path_of(format), format))
    assert list(back) == list(state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype, name
        assert raw(back[name]) == raw(tensor), name


NUMPY_DTYPES = [
    "?", "<i2", ">f8", "<M8[ns]", "<m8[D]", "S5", "<U3", "V7", "<c16", "<f2", np.dtype("g"), ml_dtypes.bfloat16,
    ml_dtypes.int4, np.dtype([("a", "u1"), ("b", "<f8")], align=True), np.dtype([("x", "<i4", (2, 2)), ("y", "S3")]),
    np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 1], "itemsize": 9}), "V0",
    "S0", "U0", np.dtype([("\u0394x", "<f4"), ("\xe9", "<i2")]),
]  # fmt: skip


@each_format
def test_numpy_dtypes(format, path_of):
    state = [
        np.ndarray((2, 3), d, np.resize(np.arange(251, dtype=np.uint8), 6 * np.dtype(d).itemsize).tobytes())
        for d in NUMPY_DTYPES
        if np.dtype(d) != "?"
    ]
    state.append(np.array([True, False]))
    path = save({"arrays": state}, path_of(format), format)
    assert same(load_checkpoint(path)["arrays"], state)
    assert same(load_arrays(path, map=False)["arrays"], state)


def keys():
    return st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))


def leaves():
    dtypes = st.sampled_from([torch.float32, torch.int8, torch.float64, torch.bfloat16, torch.uint16])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    tensors = st.builds(lambda dtype, shape: torch.ones(shape, dtype=dtype), dtypes, shapes)
    arrays = st.builds(lambda shape: np.arange(np.prod(shape, dtype=int), dtype=">i2").reshape(shape), shapes)
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9))
    return st.one_of(tensors, arrays, plain)


states = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys(), inner, max_size=4)
    ),
    max_leaves=12,
)


@FUZZ
@given(state=states, format=st.sampled_from(sorted(SUFFIX)))
def test_any_state_comes_back(state, format, tmp_path_factory):
    path = save(state, tmp_path_factory.mktemp("any") / f"a{SUFFIX[format]}", format)
    assert same(load_checkpoint(path, map=False), state)
    assert detect(path).name == format


# --- the plan


def test_what_cannot_be_saved_is_named():
    with pytest.raises(ArgumentTypeError, match=r"^optim\.state\[3\]\.foo: object of type builtins\.range "):
        plan({"optim": {"state": {3: {"foo": range(1)}}}})
    with pytest.raises(ArgumentTypeError, match=r"^a\[0\]\[1\]: .*generator|^a\[0\]\[1\]: object of type .*Generator"):
        plan({"a": [(1, torch.Generator())]})
    with pytest.raises(ArgumentTypeError, match=r"^state: "):
        plan(object())
    with pytest.raises(ArgumentTypeError, match=r"^x: .*meta tensors"):
        plan({"x": torch.empty(3, device="meta")})
    with pytest.raises(ArgumentTypeError, match=r"^x\.y: dict key of type tuple"):
        plan({"x": {"y": {(1, 2): 3}}})
    with pytest.raises(ArgumentTypeError, match="meta"):
        plan({}, meta={"a": object()})
    text, number = (type("ById", (of,), {"__eq__": object.__eq__, "__hash__": object.__hash__}) for of in (str, int))
    for alike, name in (({text("w"): 1, text("w"): 2}, "'w'"), (collections.OrderedDict({1.0: 1, number(1): 2}), "1")):
        with pytest.raises(ArgumentError, match=rf"^x\[0\]: dict has two keys that arrive as {name}: "):
            plan({"x": [alike]})
    with pytest.raises(ArgumentError, match=r"^meta is not JSON: dict has two keys that arrive as 'w'"):
        plan({}, meta={"a": [{text("w"): 1, "w": 2}]})
    endless: list = []
    endless.append(endless)
    with pytest.raises(ArgumentError, match="contains itself"):
        plan(endless)
    with pytest.raises(ArgumentError, match="meta is not JSON"):
        plan({}, meta={"a": [endless, endless]})
    deep: list = []
    for _ in range(64):
        deep = [deep]
    with pytest.raises(ArgumentError, match="meta is nested more than 64 deep"):
        plan({}, meta={"a": deep})
    assert plan({}, meta={"a": deep[0][0]}).meta is not None


def test_a_view_does_not_drag_its_storage_along():
    huge = torch.zeros(1000, 1000)
    made = plan({"column": huge[:, 3], "corner": huge[:2, :2], "row": huge[5]})
    assert made.nbytes == 4 * (1000 + 4 + 1000)
    # overlapping views with much between them: each alone
    assert plan([huge[:, 0], huge[:, :2]]).nbytes == 4 * 3000
    # the same view twice: once
    assert plan([huge[:, 0], huge[:, 0]]).nbytes == 4 * 1000
    assert plan([torch.zeros(1).expand(10**9), np.broadcast_to(np.float64(1), (10**6, 10**6))]).nbytes == 4 + 8
    assert plan([huge[:600].view(-1), huge[300:]]).nbytes == huge.nbytes


def test_views_that_are_hard_to_read(path_of):
    grid = np.arange(24.0).reshape(4, 6)
    zeros = torch._efficientzerotensor(3)
    line = torch.arange(6, dtype=torch.int32)
    state = {
        "reversed": grid[::-1], "step": grid[:, ::2], "fortran": np.asfortranarray(grid), "zeros": zeros,
        "conj": torch.randn(3, dtype=torch.complex64).conj(), "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "windows": torch.arange(10).unfold(0, 4, 1), "grad": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)), "bytes": line.view(torch.uint8)[4:], "words": line[2:],
        "overlap": [grid[0:3, 1:4], grid[1:4, 2:5]],
    }  # fmt: skip
    back = load_checkpoint(save(state, path_of("safetensors")))
    for key in ("reversed", "step", "fortran"):
        assert np.array_equal(back[key], state[key])
    for key in ("conj", "neg", "channels", "windows", "bytes", "words"):
        assert torch.equal(back[key], state[key]), key
    assert torch.equal(back["zeros"], torch.zeros(3))
    assert torch.equal(back["grad"], torch.ones(3))
    assert not back["grad"].requires_grad
    assert same(back["overlap"], [np.ascontiguousarray(part) for part in state["overlap"]])
    back["words"][0] = -1
    assert back["bytes"][4] == 255


def test_a_description_says_all_of_the_plan():
    made = plan(mixed_state(), meta={"a": 1})
    again = Plan.from_description(made.describe())
    assert again.describe() == made.describe()
    assert (again.tensors, again.nbytes, again.meta) == (made.tensors, made.nbytes, made.meta)
    with pytest.raises(RuntimeError, match="description has no bytes"):
        again.regions[0].bytes()
    for format in SUFFIX:
        a, b = (get_format(format).layout(each) for each in (made, again))
        assert (a.files, a.places, a.fill, [*a.pieces(0)]) == (b.files, b.places, b.fill, [*b.pieces(0)])


def test_names_are_unique_and_printable(path_of):
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), "a.b#2": torch.ones(3), "__metadata__": torch.ones(4),
             "\n\0": torch.ones(5), "x" * 5000: torch.ones(6), "x" * 5000 + "y": torch.ones(7)}  # fmt: skip
    for format in SUFFIX:
        path = save(state, path_of(format), format)
        assert same(load_checkpoint(path), state)
    with safetensors.safe_open(path_of("safetensors"), "pt") as file:
        assert sorted(len(file.get_tensor(name)) for name in file.keys()) == [1, 2, 3, 4, 5, 6, 7]  # noqa: SIM118


def test_many_names_that_agree_are_numbered_in_time_that_grows_with_their_number():
    lines, before = [], sys.gettrace()

    def trace(frame, event, _):
        lines.append(event)
        return trace

    wanted = [*("x" * 500 + f"{number}" for number in range(300)), "x" * MAX_NAME, "y#2", "y", "y"]
    sys.settrace(trace)
    try:
        found = unique_names(wanted)
    finally:
        sys.settrace(before)
    start = "x" * MAX_NAME
    assert found == [start, *(f"{start}#{number}" for number in range(2, 302)), "y#2", "y", "y#3"]
    assert len(lines) < 20 * len(wanted)


# --- what others see


def test_safetensors_readers_see_the_tensors(path_of):
    state = {"model": model().state_dict(), **mixed_state()}
    path = save(state, path_of("safetensors"), meta={"run": 3})
    seen = safetensors.torch.load_file(path)
    for name, tensor in state["model"].items():
        if name != "1.weight":  # tied to 0.weight
            assert same(seen[f"model.{name}"], tensor)
    assert same(seen["weight"], state["weight"])
    assert same(seen["a.b"], state["a.b"])
    assert "transposed" not in seen
    assert same(seen["complex"], state["complex"])
    assert seen["expanded"].shape == (3, 1)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 4096 == 0


def test_shards_and_their_index(tmp_path):
    state = {"layers": [torch.randn(100) for _ in range(7)], "large": torch.randn(1000), "e": torch.empty(0), "n": 3}
    path = save(state, tmp_path / "a", max_shard=1000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert names == [f"model-{n + 1:05}-of-{len(names):05}.safetensors" for n in range(len(names))]
    assert len(names) == 5
    seen = {}
    for name in names:
        part = safetensors.torch.load_file(path / name)
        assert sum(tensor.nbytes for tensor in part.values()) <= 1000 or len(part) == 1
        assert {key for key, file in index["weight_map"].items() if file == name} == set(part)
        seen |= part
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in seen.values()) == 6800
    assert set(seen) == set(index["weight_map"])
    for map in (True, False):
        assert same(load_checkpoint(path, map=map), state)
    assert same(load_checkpoint(path / "model.safetensors.index.json"), state)
    assert same(load_checkpoint(path, keys="large"), {"large": state["large"]})


def test_torch_opens_it(path_of):
    state = training_state() | {"mixed": mixed_state()}
    path = save(state, path_of("torch"), "torch")
    for mmap in (False, True):
        seen = torch.load(path, weights_only=True, mmap=mmap)
        assert same(seen["model"], state["model"].state_dict())
        assert seen["model"]._metadata == state["model"].state_dict()._metadata
        assert seen["model"]["0.weight"].data_ptr() == seen["model"]["1.weight"].data_ptr()
        assert same(seen["optim"], state["optim"])
        assert same(seen["scheduler"], state["scheduler"])
        assert same(seen["rng"]["python"], state["rng"]["python"])
        assert seen["rng"]["generator"] == state["rng"]["generator"]
        mixed = seen["mixed"]
        for key in ("weight", "transposed", "rows", "parts", "expanded", "0-d", "empty", "complex", "a.b", "size"):
            assert same(mixed[key], state["mixed"][key]), key
        assert mixed["transposed"].stride() == (1, 20)
        assert mixed["expanded"].stride() == (1, 0)
        assert mixed["a"]["c/d"] == 3.0
        assert mixed["scalars"][:-1] == pytest.approx(state["mixed"]["scalars"][:-1], nan_ok=True)
        assert mixed["long bytes"].numpy().tobytes() == state["mixed"]["long bytes"]
        assert (mixed["dtype"], mixed["device"]) == (torch.float16, torch.device("cpu"))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_torch_opens_every_dtype(path_of):
    data = torch.arange(96, dtype=torch.uint8)
    known = [d for d in TORCH_DTYPES if "bits" not in str(d)]
    state = {str(dtype): data.view(dtype) if dtype != torch.bool else data > 5 for dtype in known}
    state = {name: (tensor, torch.clone(data)) for name, tensor in state.items()}
    seen = torch.load(save(state, path_of("torch"), "torch"), weights_only=True)
    assert [seen[name][0].dtype for name in state] == [state[name][0].dtype for name in state]
    assert all(raw(seen[name][0]) == raw(state[name][0]) for name in state)


def test_numpy_opens_it(path_of):
    path = save(mixed_state(), path_of("npz"), "npz")
    with np.load(path) as seen:
        arrays = {name: seen[name] for name in seen.files}
    state = mixed_state()
    assert arrays["weight"].shape == (10, 20)
    assert arrays["big"].dtype == ">i4"
    assert same(arrays["big"], state["big"])
    assert arrays["complex"].dtype == np.complex64
    assert arrays["a.b#2"].dtype == np.int16  # bfloat16
    assert json.loads(arrays["shmtensor.json"].partition(b"\n")[2])["plan"]["version"] == 1
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_archives_larger_than_four_gibibytes(tmp_path):
    """Sizes and offsets beyond 32 bits, in a file full of holes."""
    state = {
        "small": np.arange(3, dtype=np.uint8),
        "large": np.zeros(1, np.uint8),
        "last": np.arange(4, dtype=np.uint8),
    }
    parts = json.loads(plan(state).describe())
    parts["tensors"][1][3] = [5 << 30]
    parts["regions"][1][0] = 5 << 30
    large = Plan.from_description(json.dumps(parts).encode())
    for format in ("torch", "npz"):
        layout = get_format(format).layout(large)
        path = tmp_path / f"a{SUFFIX[format]}"
        with path.open("wb") as file:
            file.truncate(layout.files[0].nbytes)
            writes = [*layout.fill, *layout.finish([0] * 3, [0] * 3)]
            for (_, at), data in zip((layout.places[0], layout.places[2]), (b"\0\1\2", b"\0\1\2\3"), strict=True):
                writes.append((0, at, data))
            for _, at, data in writes:
                file.seek(at)
                file.write(data)
        back = load_checkpoint(path)
        assert same((back["small"], back["last"]), (state["small"], state["last"]))
        assert back["large"].shape == (5 << 30,)
        with zipfile.ZipFile(path) as archive:
            sizes = sorted(info.file_size for info in archive.infolist())
        assert sizes[-1] >= 5 << 30
        path.unlink()


@each_format
def test_files_of_others(format, path_of):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(3), "c": torch.ones(2, dtype=torch.bfloat16)}
    arrays = {"x": np.arange(3.0), "y/z": np.array(["a", "bc"]), "t": np.asfortranarray(np.ones((2, 3)))}
    path = path_of(format)
    if format == "safetensors":
        safetensors.torch.save_file(tensors, path)
        expected = tensors
    elif format == "torch":
        torch.save({"model": tensors, "n": [1, (2,)]}, path)
        expected = {"model": tensors, "n": [1, (2,)]}
    else:
        np.savez(path, **arrays)
        expected = arrays
    for map in (True, False):
        back = load_checkpoint(path, map=map, verify="all")
        assert back.keys() == expected.keys()
        assert all(
            np.array_equal(back[k], expected[k]) if format == "npz" else same(back[k], expected[k]) for k in back
        )
    again = load_checkpoint(save(load_checkpoint(path), path_of(format, "b"), format))
    assert same(dict(sorted(again.items())), dict(sorted(back.items())))


def test_old_and_packed_files_of_others(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(load_checkpoint(tmp_path / "old.pt"), {"a": torch.ones(3)})
    np.savez_compressed(tmp_path / "packed.npz", a=np.zeros(10**6))
    assert same(load_arrays(tmp_path / "packed.npz"), {"a": np.zeros(10**6)})
    np.savez(tmp_path / "none.npz")
    assert load_checkpoint(tmp_path / "none.npz") == {}
    odd = tmp_path / "odd.safetensors"  # data that begin at an odd place
    header = b'{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}  '
    odd.write_bytes(len(header).to_bytes(8, "little") + header + np.array([1.0, 2.0]).tobytes())
    assert (8 + len(header)) % 8
    assert same(load_checkpoint(odd), {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)})


# --- parts of it


@each_format
def test_keys(format, path_of):
    state = {"model": {"l1.weight": torch.ones(2), "l1.bias": torch.ones(3), "l2.bias": torch.ones(4)},
             "optim": {"state": {0: {"step": 1}, 1: {"step": 2}}, "groups": [torch.ones(5)]}, "step": 7}  # fmt: skip
    path = save(state, path_of(format), format)
    assert same(load_checkpoint(path, keys="model"), {"model": state["model"]})
    assert same(
        load_checkpoint(path, keys=["model.l1", "optim.state.1", "step"], map=False),
        {"model": {k: v for k, v in state["model"].items() if k[:2] == "l1"}, "optim": {"state": {1: {"step": 2}}},
         "step": 7},
    )  # fmt: skip
    assert same(load_checkpoint(path, keys=[]), {})
    with pytest.raises(ArgumentError, match="nothing named 'modle': did you mean model"):
        load_checkpoint(path, keys=["modle"])
    with pytest.raises(ArgumentError, match=r"optim\.groups\.0"):
        load_checkpoint(path, keys=["optim.groups.0"])
    with pytest.raises(ArgumentTypeError):
        load_checkpoint(path, keys=[3])
    both = load_checkpoint(path, keys=["model", "model.l1.bias", "model.l2", "optim.state", "optim.state.0.step"])
    assert same(both, {"model": state["model"], "optim": {"state": state["optim"]["state"]}})


@each_format
def test_keys_as_they_are_shown(format, path_of):
    """Names of tensors in a file are unique, short and printable."""
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "c": torch.ones(2)}, 0: torch.ones(3), "0": torch.ones(4),
             "x" * 500: {"y": torch.ones(5)}, "new\nline": np.ones(6), "long": {"bytes.2": b"x" * 5000}}  # fmt: skip
    state["long"]["bytes"] = {"2": bytearray(5001)}
    path = save(state, path_of(format), format)
    shown = [entry.name for entry in detect(path).open(path).plan.tensors]
    expected = [
        {"a.b": state["a.b"], "a": {"b": state["a"]["b"]}}, {"a": {"b": state["a"]["b"]}},
        {"a": {"c": state["a"]["c"]}}, {0: state[0], "0": state["0"]}, {"0": state["0"]}, {"x" * 500: state["x" * 500]},
        {"new\nline": state["new\nline"]}, {"long": state["long"]}, {"long": {"bytes": state["long"]["bytes"]}},
    ]  # fmt: skip
    for name, part in zip(shown, expected, strict=True):
        assert same(load_checkpoint(path, keys=name), part)
    assert same(load_checkpoint(path, keys=shown), state)
    with pytest.raises(ArgumentError, match=r"nothing named 'a\.b#3'"):
        load_checkpoint(path, keys=["a.b#2", "a.b#3"])


class Key(str):
    """A key that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        Key.compared += 1
        return str.__eq__(self, other)

    def startswith(self, *rest):
        Key.compared += 1
        return str.startswith(self, *rest)

    __hash__ = str.__hash__


@pytest.mark.parametrize("own", [True, False])
def test_many_keys_are_looked_up(own, path_of):
    """None is compared with each name of the state, which would take the square of the time."""
    state, path = {f"layers.{number}.w": torch.ones(1) for number in range(600)}, path_of("torch")
    if own:
        save(state, path, "torch")
    else:
        torch.save(state, path)
    Key.compared = 0
    assert len(load_checkpoint(path, keys=[Key(f"layers.{number}.w") for number in range(100, 600)])) == 500
    assert Key.compared < 20 * 500


def test_only_the_shards_that_are_needed_are_read(tmp_path):
    path = save({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "a", max_shard=1200)
    opened = detect(path).open(path)
    last = opened.files[opened.places[1][0]]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert same(load_checkpoint(path, keys="a", map=False), {"a": torch.ones(300)})
    with pytest.raises(CheckpointError, match=f'{last.name}: tensor "b" at offset 4096 is damaged'):
        load_checkpoint(path, map=False)


# --- load_into


@each_format
def test_a_module_is_filled_in_place(format, path_of):
    source, target = model(), model()
    torch.nn.init.normal_(source[0].weight)
    path = save({"model": source, "step": 1}, path_of(format), format)
    pointers = [tensor.data_ptr() for tensor in target.state_dict().values()]
    assert not any(load_into(target, path, key="model"))
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert [tensor.data_ptr() for tensor in target.state_dict().values()] == pointers
    assert target[0].weight is target[1].weight
    assert target[0].weight.requires_grad
    with pytest.raises(ArgumentError, match=r"nothing named 'modell': did you mean model"):
        load_into(target, path, key="modell")
    with pytest.raises(ArgumentError, match="pass key="):
        load_into(target, path, key="step")


@each_format
def test_a_part_of_a_module_is_filled(format, path_of):
    """Its names begin with the key, as `load_checkpoint(keys=)` takes it."""
    source, target = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), torch.nn.Linear(2, 1)
    for made, key in (({"model": source.state_dict(), "step": 1}, "model.1"), (source.state_dict(), "1")):
        torch.nn.init.normal_(source[1].weight)
        path = save(made, path_of(format), format)
        assert not any(load_into(target, path, key=key))
        assert same(dict(target.state_dict()), dict(source[1].state_dict()))
        os.unlink(path)
    path = save({"model": source.state_dict()}, path_of(format), format)
    with pytest.raises(ArgumentError, match=r"nothing named 'model\.2'"):
        load_into(target, path, key="model.2")
    with pytest.raises(ArgumentError, match="pass key="):
        load_into(target, path, key="model.1.weight")


@each_format
def test_memory_that_has_other_values_than_its_tensor(format, path_of):
    """Conjugated and negated views."""

    def made() -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_parameter("conj", torch.nn.Parameter(torch.randn(5, dtype=torch.complex64).conj()))
        module.register_buffer("neg", torch._neg_view(torch.randn(5)))
        module.register_buffer("plain", torch.randn(5))
        return module

    source, target = made(), made()
    load_into(target, save(source, path_of(format), format))
    assert all(torch.equal(target.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
    assert target.conj.is_conj()
    assert target.neg.is_neg()


def test_a_module_of_other_types_and_ties(path_of):
    source = model()
    path = save(source, path_of("safetensors"))
    other = model().double()
    load_into(other, path)
    assert torch.equal(other[0].weight.float(), source[0].weight)
    apart = model()
    apart[1].weight = torch.nn.Parameter(torch.zeros(7, 4))
    load_into(apart, path)
    assert torch.equal(apart[1].weight, source[0].weight)
    assert torch.equal(apart[0].weight, source[0].weight)
    # a file with two values for what is one parameter: the later one wins, as with load_state_dict
    state = dict(source.state_dict()) | {"1.weight": torch.full((7, 4), 5.0)}
    target = model()
    load_into(target, save(state, path_of("safetensors", "b")))
    assert (target[0].weight == 5).all()


def test_what_load_state_dict_objects_to(path_of):
    net = torch.nn.Linear(2, 3)
    path = save({"weight": torch.ones(3, 2), "other": torch.ones(1)}, path_of("safetensors"))
    with pytest.raises(RuntimeError, match="Missing key"):
        load_into(net, path)
    missing, unexpected = load_into(net, path, strict=False)
    assert (missing, unexpected) == (["bias"], ["other"])
    assert (net.weight == 1).all()
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_into(torch.nn.Linear(3, 3), path, strict=False)
    with pytest.raises(ArgumentTypeError, match=r"nn\.Module"):
        load_into({}, path)


def test_hooks_run(path_of):
    net = torch.nn.Linear(2, 2, bias=False)
    net.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: state.update(weight=state["weight"] * 2))
    load_into(net, save({"weight": torch.ones(2, 2)}, path_of("safetensors")))
    assert (net.weight == 2).all()


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_module_from_files_of_others(format, path_of):
    source, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    path = path_of(format)
    (safetensors.torch.save_file if format == "safetensors" else torch.save)(source.state_dict(), path)
    load_into(target, path)
    assert same(dict(target.state_dict()), dict(source.state_dict()))


# --- load_arrays


def test_arrays_need_no_torch(path_of):
    state = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16), "s": torch.Size([2]), "d": torch.int8,
             "dev": torch.device("cuda:1"), "sparse": torch.eye(2).to_sparse()}  # fmt: skip
    path = save(state, path_of("safetensors"))
    program = (
        "import sys, shmtensor; keys=['a','b','s','d','dev']\n"
        f"print(shmtensor.load_arrays({str(path)!r}, keys=keys), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400)
    assert done.stdout.strip() == (
        "{'a': array([0, 1, 2]), 'b': array([1, 1], dtype=bfloat16), 's': (2,), 'd': 'torch.int8', 'dev': 'cuda:1'} "
        "False"
    ), done.stderr
    with pytest.raises(CheckpointError, match="'sparse' is coo, which NumPy lacks"):
        load_arrays(path)


# --- which one


def test_latest_and_newest(tmp_path):
    for number in (1, 2, 3):
        save({"n": number}, tmp_path / f"step-{number}.safetensors")
        os.utime(tmp_path / f"step-{number}.safetensors", ns=(0, number * 10**9))
    assert load_checkpoint(tmp_path)["n"] == 3
    assert load_checkpoint(tmp_path / "step-2")["n"] == 2
    (tmp_path / "latest").symlink_to("step-1.safetensors")
    assert load_checkpoint(tmp_path)["n"] == load_checkpoint(tmp_path / "latest")["n"] == 1
    (tmp_path / "step-1.safetensors").unlink()
    assert load_checkpoint(tmp_path)["n"] == load_checkpoint(tmp_path / "latest")["n"] == 3
    data = (tmp_path / "step-3.safetensors").read_bytes()
    (tmp_path / "step-3.safetensors").write_bytes(data[:-1] if len(data) > 4096 else data[:4000])
    os.utime(tmp_path / "step-3.safetensors", ns=(0, 3 * 10**9))
    with pytest.warns(RuntimeWarning, match="passed over: .*step-3"):
        assert load_checkpoint(tmp_path)["n"] == 2
    save({"n": 4, "x": torch.ones(9)}, tmp_path / "sharded", max_shard=16)
    assert load_checkpoint(tmp_path)["n"] == 4
    (tmp_path / ".unfinished.safetensors").write_bytes(b"")
    (tmp_path / "unrelated.txt").write_text("x")
    assert load_checkpoint(tmp_path)["n"] == 4


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint") as found:
        load_checkpoint(tmp_path)
    assert found.type is FileNotFoundError
    (tmp_path / "a.safetensors").write_text("no")
    with pytest.raises(CheckpointError, match="no checkpoint: it begins with b'no'"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("options", [{"readers": 0}, {"readers": 1000}, {"readers": 1.5}, {"verify": "some"}])
def test_options_that_cannot_be(options, path_of):
    path = save({"n": 1}, path_of("safetensors"))
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        load_checkpoint(path, map=False, **options)


def test_many_readers_of_one_large_tensor(path_of):
    state = {"large": torch.arange(5_000_001, dtype=torch.int32), "small": [torch.ones(3) for _ in range(100)]}
    path = save(state, path_of("safetensors"))
    for readers in (1, 2, 7):
        assert same(load_checkpoint(path, map=False, readers=readers), state)


@pytest.mark.parametrize("readers", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "sizes", [[], [0], [1] * 9, [4, 4, 0], [reading.CHUNK * 5 + 1], [3, reading.CHUNK * 4, 0, 7] * 5]
)
def test_readers_share_what_there_is_in_runs_of_whole_regions(sizes, readers):
    offsets = np.cumsum([8, *sizes]).tolist()
    targets = [
        reading._Target(number, size, 0, offset, np.arange(size).astype(np.uint8))
        for number, (size, offset) in enumerate(zip(sizes, offsets, strict=False))
    ]
    runs = reading._cut(targets, readers)
    assert len(runs) <= readers
    jobs = [job for run in runs for jobs in run for job in jobs]
    assert [(job.target.region, job.chunk) for job in jobs] == [
        (number, chunk) for number, target in enumerate(targets) for chunk in range(len(target))
    ]
    for target, offset in zip(targets, offsets, strict=False):
        spans = [target.span(chunk) for chunk in range(len(target))]
        slices = [target.slice(chunk) for chunk in range(len(target))]
        assert all(0 < end - start <= reading.CHUNK for start, end in spans)
        assert all((offset + start) % reading.PAGE == 0 for start, _ in spans[1:])
        assert np.array_equal(np.concatenate([target.memory[:0], *slices]), target.memory)
    regions = [{job.target.region for jobs in run for job in jobs} for run in runs]
    assert sum(map(len, regions)) == len(set().union(*regions))
    share = -(-sum(sizes) // readers)
    assert all(sum(sizes[number] for number in sorted(its)[:-1]) <= share for its in regions)
    taken = []
    for own in runs[::-1]:  # the last reader begins; who has emptied its own run empties the others'
        while (together := reading._next(own, runs)) is not None:
            taken += [(job.target.region, job.chunk) for job in together]
    assert sorted(taken) == [(job.target.region, job.chunk) for job in jobs]


@pytest.mark.parametrize("readers", [1, 3])
def test_one_request_to_a_server_brings_neighbours_that_are_near(readers):
    sizes, gaps = [5, 7, reading.REQUEST_MAX, 3, 4, 2, 6], [0, reading.GAP, 0, 0, 0, reading.GAP + 1, 0]
    share = -(-sum(sizes) // readers)
    targets, offset = [], 8
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        offset += gap
        request = reading._request(size, share)
        file = int(number > 3)
        targets.append(
            reading._Target(number, size, file, offset, reading._NOTHING, size=request, request=True, joins=True)
        )
        offset += size
    together = [jobs for run in reading._cut(targets, readers) for jobs in run]
    assert [(job.target.region, job.chunk) for jobs in together for job in jobs] == [
        (number, chunk) for number, target in enumerate(targets) for chunk in range(len(target))
    ]
    for jobs in together:
        places = [job.places for job in jobs]
        assert places[-1][1] - places[0][0] <= reading.REQUEST_MAX
        assert all(0 <= at - end <= reading.GAP for (_, end), (at, _) in itertools.pairwise(places))
        assert len({job.target.file for job in jobs}) == 1
    regions = [{job.target.region for job in jobs} for jobs in together]
    assert any({0, 1} <= each for each in regions)
    assert not any({3, 4} <= each or {4, 5} <= each for each in regions)
    apart = [reading._Target(n, 4, 0, 8 + 4 * n, reading._NOTHING, size=4, request=True) for n in range(3)]
    assert [len(jobs) for run in reading._cut(apart, 1) for jobs in run] == [1, 1, 1]


def test_readers_stop_when_one_has_failed(path_of, monkeypatch):
    path = save({"large": torch.zeros(16 * reading.CHUNK, dtype=torch.uint8)}, path_of("safetensors"))
    made, filled, calls = [], [], itertools.count()
    cut, fill = reading._cut, reading.Files.fill

    def keep(*args):
        made.append(cut(*args))
        return made[0]

    def fail_once(files, memory, file, offset, names):
        if next(calls) == 0:
            raise CheckpointError("on purpose")
        wait_until(lambda: not any(made[0]))  # the others are in the middle of a chunk until all that is left is taken
        filled.append(offset)
        fill(files, memory, file, offset, names)

    monkeypatch.setattr(reading, "_cut", keep)
    monkeypatch.setattr(reading.Files, "fill", fail_once)
    with pytest.raises(CheckpointError, match="on purpose"):
        load_checkpoint(path, map=False, readers=3)
    assert len(filled) <= 2


# --- for all of it: the documentation of the modules


@pytest.mark.parametrize(
    "name",
    ["plan", "load", "description", "formats.zips"],
)
def test_examples(name):
    module = importlib.import_module(f"shmtensor.checkpoint.{name}")
    done = doctest.testmod(module)
    assert done.attempted
    assert not done.failed


def test_exports():
    assert {"load_checkpoint", "load_arrays", "load_into", "CheckpointError"} <= set(shmtensor.__all__)
    assert pickle.loads(pickle.dumps(CheckpointError("x"))).args == ("x",)
