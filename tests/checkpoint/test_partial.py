"""Parts of checkpoints: `slices=`, `open_checkpoint`. What comes is what indexing gives, and little else is read."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import shmtensor
from shmtensor import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClosedError,
    load_arrays,
    load_checkpoint,
    open_checkpoint,
)
from shmtensor.checkpoint import selection
from shmtensor.checkpoint.plan import Entry
from shmtensor.checkpoint.selection import InMemory, Span, narrow, packed, read_part, stored_nbytes

from ..waiting import PATIENCE
from .state_files import SUFFIX, mixed_state, raw, same, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
]
INDEXES = [
    np.s_[:], np.s_[...], np.s_[3:7], np.s_[3], np.s_[-1], np.s_[:, 2:5], np.s_[:, 4], np.s_[::3], np.s_[1::2, ::2],
    np.s_[2:4, ..., 1], np.s_[..., :2], np.s_[5:5], np.s_[100:], np.s_[-3:-1, 1:2], np.s_[2, 3], np.s_[..., ::5],
    np.s_[:9, 1:], np.s_[0, ...],
]  # fmt: skip


def bytes_read() -> int:
    """Bytes that this process has read by system calls, whoever of its threads made them."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def count(function) -> int:
    """Bytes that a call reads; what it imports comes first."""
    function()
    before = bytes_read()
    function()
    return bytes_read() - before


# --- what is read


def foreign(path: Path, tensors: dict, *, packed: bool = False) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path)
    elif path.suffix == ".npz":
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        (np.savez_compressed if packed else np.savez)(path, **arrays)
    else:
        torch.save(tensors, path)
    return path


PERCENT = [np.s_[500:510], np.s_[:, 7:17], np.s_[::100], np.s_[3:13, ...], np.s_[:, ::100]]


@pytest.mark.parametrize("file", ["a.safetensors", "a.npz", "a.pt", "foreign.safetensors", "foreign.npz", "shards"])
def test_a_part_of_one_percent_reads_at_most_two(tmp_path, file):
    """Of the file; what describes it (the header, the table of contents) included, which a file of 4 MB has as well."""
    tensor = torch.arange(1_000_000, dtype=torch.int32).reshape(1000, 1000)
    tensors = {"w": tensor, "v": torch.arange(5000)}
    path = tmp_path / file
    if file.startswith("foreign"):
        foreign(path, tensors)
    else:
        format = {".npz": "npz", ".pt": "torch"}.get(path.suffix, "safetensors")
        save(tensors, path, format, max_shard=1 << 21 if file == "shards" else None)
    total = sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))
    for index in PERCENT:

        def load(index=index) -> None:
            state = load_arrays(path, map=False, keys="w", slices={"w": index})
            assert (state["w"] == tensor.numpy()[index]).all()

        with open_checkpoint(path, arrays=True) as checkpoint:
            assert (checkpoint["w"].read(index) == tensor.numpy()[index]).all()
            read = count(lambda index=index, checkpoint=checkpoint: checkpoint["w"].read(index))
        assert tensor.nbytes / 100 <= read <= total / 50
        assert count(load) <= total / 50 + 40_000


def test_opening_reads_what_describes_the_tensors_only(tmp_path):
    path = foreign(tmp_path / "a.safetensors", {"w": torch.zeros(1 << 22)})
    assert count(lambda: open_checkpoint(path).close()) < 100_000


@pytest.mark.parametrize("map", [True, False])
@pytest.mark.parametrize(
    "file", ["a.safetensors", "a.npz", "a.pt", "shards", "b.safetensors", "b.npz", "p.npz", "b.pt"]
)
def test_a_part_is_what_indexing_gives(tmp_path, file, map):
    tensors = {"w": torch.randn(10, 6, 5), "v": torch.arange(12).reshape(12, 1), "e": torch.empty(0, 3)}
    path, arrays = tmp_path / file, file in ("b.npz", "p.npz")
    if file[0] in "bp":
        foreign(path, tensors, packed=file[0] == "p")
    else:
        format = {".npz": "npz", ".pt": "torch"}.get(path.suffix, "safetensors")
        save(tensors, path, format, max_shard=500 if file == "shards" else None)
    expected = {name: tensor.numpy() if arrays else tensor for name, tensor in tensors.items()}
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == set(tensors)
        for index in INDEXES:
            state = load_checkpoint(path, map=map, slices={"w": index})
            assert same(np.asarray(state["w"]), np.asarray(expected["w"][index]))
            assert type(state["w"]) is type(expected["w"][index]) or arrays
            assert same(state["v"], expected["v"])
            for name, tensor in expected.items():
                if name == "w" or not ((isinstance(index, tuple) and len(index) > 2) or index == np.s_[3]):
                    index = index if name == "w" else ...
                    assert same(np.asarray(checkpoint[name].read(index)), np.asarray(tensor[index]))


def test_every_dtype(tmp_path):
    """Types that torch or NumPy lacks among them, scalars too."""
    names = ["bool", "uint8", "int16", "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex32",
             "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]  # fmt: skip
    state = {}
    for name in names:
        dtype = getattr(torch, name)
        state[name] = torch.randint(0, 2, (12, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    state |= {"big": np.arange(24, dtype=">i4").reshape(6, 4), "date": np.arange(6).astype("datetime64[D]"),
              "pair": np.zeros(7, [("a", "<i4"), ("b", "<f8", 2)]), "zero": torch.tensor(1.5)}  # fmt: skip
    path = save(state, tmp_path / "a.safetensors")
    with open_checkpoint(path) as checkpoint:
        for name, value in state.items():
            handle = checkpoint[name]
            assert (handle.shape, handle.dtype, handle.name) == (tuple(value.shape), value.dtype, name)
            assert handle.nbytes == value.nbytes
            assert same(handle.read(), value)
            if name != "zero":
                index = np.s_[2:5]
                part = value.view(torch.uint8)[index].view(value.dtype) if name in names else value[index]
                assert same(handle.read(index), part)
                assert same(load_checkpoint(path, map=False, keys=[name], slices={name: index})[name], part)


def test_tensors_that_share_memory(tmp_path):
    """Transposed, strided, expanded and overlapping ones; a part of each."""
    weight, line = torch.randn(20, 30), torch.arange(100)
    state = {
        "weight": weight, "t": weight.t(), "rows": weight[5:], "columns": weight[:, ::2],
        "windows": line.unfold(0, 10, 3), "line": line, "expanded": torch.arange(6).reshape(6, 1).expand(6, 1000),
        "repeated": torch.ones(1).expand(9, 9),
    }  # fmt: skip
    path = save(state, tmp_path / "a.safetensors")
    indexes = [np.s_[2:5], np.s_[:, 1:3], np.s_[::2, ::4], np.s_[1], np.s_[:, -1], np.s_[3:4, 2:3], ...]
    with open_checkpoint(path) as checkpoint:
        for name, index in itertools.product(state, indexes):
            if state[name].ndim == 1 and isinstance(index, tuple):
                continue
            part = state[name][index]
            assert same(checkpoint[name].read(index), part)
            for options in ({"map": True}, {"map": False}, {"map": False, "keys": name}):
                assert same(load_checkpoint(path, slices={name: index}, **options)[name], part)


@pytest.mark.filterwarnings(
    "ignore:.*beta state:UserWarning", "ignore:.*quantized:UserWarning", "ignore:.*prototype:UserWarning"
)
def test_parts_of_a_mixed_state(tmp_path):
    path = save(mixed_state(), tmp_path / "a.safetensors")
    full = load_checkpoint(path)
    state = load_checkpoint(path, map=False, slices={"parts.0": np.s_[:3], "a.b": np.s_[:1], "a.b#2": np.s_[2:]})
    assert (state["parts"][0].tolist(), state["a.b"].tolist()) == ([0, 1, 2], [1.0])
    assert same(state["a"]["b"], full["a"]["b"][2:])
    assert same(state["parts"][1], full["parts"][1])
    assert list(map(repr, state)) == list(map(repr, full))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["sparse#0"].shape == (2, 3)
        assert bytes(checkpoint["long bytes"].read(np.s_[1:4])) == b"\1\2\3"
        assert checkpoint["big"].dtype == np.dtype(">i4")
        for name in ("quantized#0", "expanded", "empty", "0-d"):
            assert name in checkpoint
        assert (checkpoint["quantized#0"].dtype, checkpoint["channels#0"].dtype) == (torch.int8, torch.uint8)
        assert torch.equal(checkpoint["quantized#0"].read(np.s_[1:, 2]), full["quantized"].int_repr()[1:, 2])
        assert torch.equal(checkpoint["channels#0"].read(), full["channels"].int_repr())
    with open_checkpoint(path, arrays=True) as checkpoint:
        assert (checkpoint["quantized#0"].read() == full["quantized"].int_repr().numpy()).all()
    for name in ("sparse#0", "long bytes"):
        with pytest.raises(ArgumentError, match="come whole"):
            load_checkpoint(path, slices={name: np.s_[:1]})


def test_a_mapped_part_is_a_view_and_copies_nothing(tmp_path):
    path = save({"w": torch.arange(1 << 20)}, tmp_path / "a.safetensors")
    part = load_checkpoint(path, slices={"w": np.s_[10:20]})["w"]
    assert part.untyped_storage().nbytes() > part.nbytes  # the mapped region
    part += 1
    assert part[0] == 11
    assert load_checkpoint(path)["w"][10] == 10


def test_a_part_in_a_file_of_others_that_is_not_aligned(tmp_path):
    """Mapped, all of it would be copied: so only the part is read."""
    header = json.dumps({
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [1, 4_000_001]},
    }).encode()  # fmt: skip
    values = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" + values.tobytes())
    part = load_checkpoint(path, slices={"w": np.s_[10:20]})["w"]
    assert (part.numpy() == values[10:20]).all()
    assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_read_their_shards_of_another_library_s_file(tmp_path, axis):
    tensors = {"w": torch.randn(64, 48), "b": torch.randn(64)}
    path = foreign(tmp_path / "model.safetensors", tensors)
    size = tensors["w"].shape[axis] // 4
    parts = []
    for rank in range(4):
        index = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)
        parts.append(load_checkpoint(path, map=False, keys="w", slices={"w": index})["w"])
        with safetensors.safe_open(path, "pt") as theirs:
            assert same(parts[-1].contiguous(), theirs.get_slice("w")[index].contiguous())
    assert same(torch.cat(parts, axis), tensors["w"])


def test_fortran_order_and_packed_members(tmp_path):
    array = np.asfortranarray(np.arange(600.0).reshape(20, 30))
    np.savez(tmp_path / "a.npz", f=array)
    np.savez_compressed(tmp_path / "b.npz", f=array, g=np.arange(3))
    for name in ("a.npz", "b.npz"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            for index in (np.s_[3:5], np.s_[:, 2], np.s_[::2, 1:9:3], ...):
                assert same(np.ascontiguousarray(checkpoint["f"].read(index)), np.ascontiguousarray(array[index]))
                part = load_checkpoint(tmp_path / name, slices={"f": index})["f"]
                assert same(np.ascontiguousarray(part), np.ascontiguousarray(array[index]))


# --- what is compared


def test_whole_tensors_are_compared_with_their_digests_and_parts_are_not(tmp_path):
    path = save({"w": torch.ones(1000), "t": torch.zeros(9)}, tmp_path / "a.safetensors")
    data = bytearray(path.read_bytes())
    data[data.index(np.ones(20, np.float32).tobytes()) + 1] ^= 1
    path.write_bytes(data)
    with open_checkpoint(path, verify="all") as checkpoint:
        for index in (..., np.s_[:10], 3):
            with pytest.raises(CheckpointError, match=r'tensor "w" at offset \d+ is damaged'):
                checkpoint["w"].read(index)
        assert len(checkpoint["t"].read(np.s_[:2])) == 2
    with open_checkpoint(path) as checkpoint, open_checkpoint(path, verify=False) as trusting:
        for index in (..., np.s_[:], np.s_[0:1000]):
            with pytest.raises(CheckpointError, match=r'tensor "w" at offset \d+ is damaged'):
                checkpoint["w"].read(index)
            assert len(trusting["w"].read(index)) == 1000
        assert len(checkpoint["w"].read(np.s_[:999])) == 999
        assert len(checkpoint["t"].read()) == 9
    assert len(load_checkpoint(path, map=False, slices={"w": np.s_[:10]})["w"]) == 10
    for options in ({"map": False, "slices": {"w": np.s_[:]}}, {"verify": "all", "slices": {"w": np.s_[:10]}},
                    {"map": False, "verify": "all", "slices": {"w": np.s_[:10]}}):  # fmt: skip
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint(path, **options)


def test_a_packed_member_is_compared_with_its_crc(tmp_path):
    """Whichever byte is wrong: it may unpack to fewer or more bytes, or to others."""
    generator = torch.Generator().manual_seed(0)
    path = foreign(tmp_path / "a.npz", {"w": torch.randn(1000, generator=generator)}, packed=True)
    good = path.read_bytes()
    for at in range(300, 3700, 17):
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError), open_checkpoint(path) as checkpoint:
            checkpoint["w"].read(np.s_[:3])


@pytest.mark.parametrize("file", ["a.pt", "a.npz"])
def test_an_archive_of_others_is_compared_with_its_crcs_if_all_is_to_be(tmp_path, file):
    path = foreign(tmp_path / file, {"w": torch.ones(1000), "t": torch.zeros(9)})
    data = bytearray(path.read_bytes())
    data[data.index(np.ones(20, np.float32).tobytes()) + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC"):
        open_checkpoint(path, verify="all")
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint["t"].read()) == 9


def test_a_file_that_is_truncated_later(tmp_path):
    path = foreign(tmp_path / "a.safetensors", {"w": torch.randn(10_000)})
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 20_000)
        assert checkpoint["w"].read(np.s_[:10]).shape == (10,)
        for index in (..., np.s_[9000:9010], np.s_[::100]):
            with pytest.raises(CheckpointError, match="truncated"):
                checkpoint["w"].read(index)


# --- what is refused


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (np.s_[::-1], ArgumentError, "pass a positive one"), (np.s_[::0], ArgumentError, "zero"),
        (10, ArgumentError, "out of range"), (-11, ArgumentError, "out of range"),
        (1 << 80, ArgumentError, "out of range"),
        (np.s_[0, 0, 0], ArgumentError, "too many"), (np.s_[..., ...], ArgumentError, "too many"),
        (None, ArgumentTypeError, "integers, slices"), ([1, 2], ArgumentTypeError, "integers, slices"),
        (np.array([True] * 10), ArgumentTypeError, "integers, slices"), (True, ArgumentTypeError, "integers, slices"),
        (torch.tensor(True), ArgumentTypeError, "integers, slices"), (np.True_, ArgumentTypeError, "integers, slices"),
        (torch.tensor([1]), ArgumentTypeError, "integers, slices"), (np.array([1]), ArgumentTypeError, "integers, sl"),
        ((torch.tensor([[0]]), 1), ArgumentTypeError, "integers, slices"),
        ("a", ArgumentTypeError, "integers, slices"), (np.s_[1.5:], ArgumentTypeError, "integers, slices"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_index(tmp_path, index, error, text):
    native = save({"w": torch.randn(10, 4)}, tmp_path / "a.safetensors")
    for path in (native, foreign(tmp_path / "a.pt", {"w": torch.randn(10, 4)})):
        with open_checkpoint(path) as checkpoint, pytest.raises(error, match=text):
            checkpoint["w"].read(index)
        for map in (True, False):
            with pytest.raises(error, match=text):
                load_checkpoint(path, map=map, slices={"w": index})


def test_slices_beyond_the_end_are_clipped_as_by_numpy(tmp_path):
    path = save({"w": torch.arange(10)}, tmp_path / "a.safetensors")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["w"].read(np.s_[8 : 1 << 70]).tolist() == [8, 9]
        assert checkpoint["w"].read(np.s_[20:]).shape == (0,)


def test_numbers_of_numpy_and_torch_are_indices(tmp_path):
    w = torch.arange(12).reshape(4, 3)
    native = save({"w": w}, tmp_path / "a.safetensors")
    for path in (native, foreign(tmp_path / "a.pt", {"w": w})):
        for index in (torch.tensor(1), np.int8(1), np.array(1), (torch.tensor(-3),), np.s_[1, :: 1 << 80]):
            expected = w[1, ::100] if isinstance(index, tuple) and len(index) > 1 else w[1]
            with open_checkpoint(path) as checkpoint:
                assert same(checkpoint["w"].read(index), expected)
            for map in (True, False):
                assert same(load_checkpoint(path, map=map, slices={"w": index})["w"], expected)


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize("file", ["a.safetensors", "a.npz", "a.pt", "foreign.pt"])
def test_items_of_lists(tmp_path, file):
    w = torch.arange(12).reshape(4, 3)
    state = {"l": [w, {"a.b": w + 1, 3: (w + 2, "x")}], "t": w + 3, "p": Pair(w + 4, [w + 5])}
    names = {"l.0": 1, "l.1.a.b": np.s_[:2], "l.1.3.0": np.s_[:, 1], "t": np.s_[0, 0], "p.1.0": np.s_[2:]}
    with torch.serialization.safe_globals([Pair]):
        if file == "foreign.pt":
            path = foreign(tmp_path / file, state)
        else:
            path = save(state, tmp_path / file, {"a.npz": "npz", "a.pt": "torch"}.get(file, "safetensors"))
        with open_checkpoint(path) as checkpoint:
            assert set(names) < set(checkpoint)
        for load, key in itertools.product((load_checkpoint, load_arrays), (None, ["l", "p", "t"])):
            found = load(path, slices=names, keys=key)
            assert type(found["p"]) is (Pair if file == "foreign.pt" and load is load_checkpoint else tuple)
            expected = {"l": [w[1], {"a.b": w[:2] + 1, 3: (w[:, 1] + 2, "x")}], "t": w[0, 0] + 3}
            pair = w + 4, [w[2:] + 5]
            if load is load_arrays:
                expected = {"l": [w[1].numpy(), {"a.b": w[:2].numpy() + 1, 3: (w[:, 1].numpy() + 2, "x")}],
                            "t": np.array(3)}  # fmt: skip
                pair = w.numpy() + 4, [w[2:].numpy() + 5]
            assert same(tuple(found.pop("p")), pair)
            assert same(found, expected)
        for name in ("l.2", "l.0.0", "l.1.3.1.x", "p.first"):
            with pytest.raises(ArgumentError, match=f"nothing named '{name}'"):
                load_checkpoint(path, slices={name: 0})


def test_many_parts_take_one_walk(tmp_path, monkeypatch):
    """Not one for each, which would take the square of the time."""
    state = {"l": [{f"w.{number}": torch.ones(2) for number in range(300)} for _ in range(3)], "rest": [{}] * 9}
    path, copies = foreign(tmp_path / "a.pt", state), []

    def counted(value):
        copies.append(len(value))
        return copy.copy(value)

    monkeypatch.setattr(selection, "copy", SimpleNamespace(copy=counted))
    slices = {f"l.{number % 3}.w.{number}": np.s_[:1] for number in range(300)}
    found = load_checkpoint(path, slices=slices)
    assert [sum(tensor.shape[0] for tensor in part.values()) for part in found["l"]] == [500, 500, 500]
    assert sorted(copies) == [2, 300, 300, 300]


@pytest.mark.parametrize("file", ["a.safetensors", "a.pt"])
def test_what_slices_does_not_take(tmp_path, file):
    state = {"model": {"w": torch.ones(3)}, "v": torch.ones(2)}
    path = save(state, tmp_path / file) if file == "a.safetensors" else foreign(tmp_path / file, state)
    with pytest.raises(ArgumentError, match=r"nothing named 'model.x': did you mean model\.w"):
        load_checkpoint(path, slices={"model.x": np.s_[:1]})
    with pytest.raises(ArgumentError):
        load_checkpoint(path, keys="v", slices={"model.w": np.s_[:1]})
    for wrong in ([("w", 1)], {1: 2}, "w"):
        with pytest.raises(ArgumentTypeError, match="takes a dict"):
            load_checkpoint(path, slices=wrong)
    with pytest.raises(ArgumentError):
        load_checkpoint(path, slices={"model": np.s_[:1]})
    with pytest.raises(ArgumentError, match="leave out slices="):
        load_checkpoint(tmp_path, from_memory=True, slices={"v": np.s_[:1]})
    assert load_checkpoint(path, slices={})["v"].tolist() == [1, 1]


def test_a_name_that_has_no_handle(tmp_path):
    path = tmp_path / "a.safetensors"
    save({"model": {"weight": np.ones(2)}, "step": 7}, path)
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(KeyError, match=r"'model.wieght': did you mean model.weight"):
            checkpoint["model.wieght"]
        for name in ("model", "step"):
            with pytest.raises(KeyError, match=rf"'{name}' is not .* load_checkpoint\(path, keys='{name}'\)"):
                checkpoint[name]
        with pytest.raises(KeyError, match="nothing named '7'"):
            checkpoint[7]
        assert checkpoint.get("model.wieght") is checkpoint.get("step") is None
        assert checkpoint.get("step", 3) == 3
        assert checkpoint.get("model.weight").shape == (2,)
    torch.save({"weight": torch.ones(2)}, tmp_path / "b.pt")
    with (
        open_checkpoint(tmp_path / "b.pt") as checkpoint,
        pytest.raises(KeyError, match="nothing named 'wieght': did you mean weight"),
    ):
        checkpoint["wieght"]
    with pytest.raises(KeyError, match="nothing named 'x'"):
        checkpoint["x"]  # also of one that is closed


def test_tensors_that_claim_more_than_the_file_has_take_no_memory(tmp_path):
    """Strides of a description may let a few bytes stand for terabytes: what is read is at most what is there."""
    for shape, strides in (((1 << 20, 1 << 20), (8, 8)), ((1 << 39,), (0,)), ((1 << 10, 1 << 30), (0, 0))):
        entry = Entry("w", True, "int64", shape, strides, 0, 0)
        for index in (..., np.s_[1:], np.s_[..., 5:]):
            part = narrow(entry, index)
            assert stored_nbytes(part) <= 16 << 20
            data = np.zeros(stored_nbytes(part) + part.offset, np.uint8)
            assert read_part(InMemory(data), Span(0, 0, part), 1).nbytes == stored_nbytes(part)
            assert packed(part).shape == part.shape
    expanded = torch.ones(1).expand(1 << 40)
    path = save({"w": expanded}, tmp_path / "a.safetensors")
    torch.save({"w": expanded}, tmp_path / "a.pt")
    for each in (path, tmp_path / "a.pt"):
        with open_checkpoint(each) as checkpoint:
            assert checkpoint["w"].read().shape == (1 << 40,)
            assert checkpoint["w"].read(np.s_[5:]).shape == ((1 << 40) - 5,)
        for map in (True, False):
            assert load_checkpoint(each, map=map, slices={"w": np.s_[5:]})["w"].shape == ((1 << 40) - 5,)


def test_random_strides_against_numpy():
    """Boxes of memory in any order, overlapping or with gaps."""
    random = np.random.default_rng(7)
    data = random.integers(0, 255, 3000, dtype=np.uint8)
    for _ in range(300):
        dimensions = int(random.integers(0, 5))
        shape = tuple(int(n) for n in random.integers(1, 5, dimensions))
        strides = tuple(int(n) for n in random.choice([0, 2, 4, 6, 8, 12, 40, 44, 160], dimensions))
        entry = Entry("w", False, "int16", shape, strides, 0, int(random.integers(0, 100)) * 2)
        plain = np.ndarray(shape, np.int16, data, entry.offset, strides)
        numbers = random.integers(0, 4, (dimensions, 3)).tolist()
        index = tuple(slice(first, first + length, 1 + step) for first, length, step in numbers)
        part = narrow(entry, index)
        expected = plain[index]
        assert part.shape == expected.shape
        if part.region >= 0:
            memory = read_part(InMemory(data), Span(0, 0, part), 1)
            made = packed(part)
            assert memory.nbytes == stored_nbytes(part) <= max(expected.nbytes, 1)
            assert (np.ndarray(made.shape, np.int16, memory, made.offset, made.strides) == expected).all()


# --- the reader as an object


def test_a_reader_is_a_mapping_that_is_closed(tmp_path):
    path = save({"w": torch.ones(3), "n": np.arange(4)}, tmp_path / "a.safetensors", meta={"epoch": 1})
    checkpoint = open_checkpoint(path)
    assert (len(checkpoint), list(checkpoint), "w" in checkpoint, checkpoint.get("x")) == (2, ["w", "n"], True, None)
    assert (checkpoint.format, checkpoint.path, checkpoint.meta) == ("safetensors", str(path), {"epoch": 1})
    handle = checkpoint["w"]
    assert repr(handle) == "<TensorHandle 'w' float32 [3]>"
    assert repr(checkpoint) == f"<CheckpointReader {str(path)!r} safetensors, 2 tensors>"
    for thing in (checkpoint, handle):
        with pytest.raises(ArgumentTypeError, match="path"):
            pickle.dumps(thing)
    path.unlink()
    assert handle.read().tolist() == [1, 1, 1]  # its file is open
    checkpoint.close()
    checkpoint.close()
    assert handle.shape == (3,)
    with pytest.raises(ClosedError, match="is closed"):
        handle.read()
    assert "closed" in repr(checkpoint)


def test_a_reader_that_is_closed_while_it_reads(tmp_path, monkeypatch):
    """The files are closed after the last read."""
    path = save({"w": torch.ones(1000)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(path)
    inside, go_on, found = threading.Event(), threading.Event(), []
    plain = os.preadv

    def slow(*args):
        inside.set()
        go_on.wait(60)
        return plain(*args)

    monkeypatch.setattr(os, "preadv", slow)
    thread = threading.Thread(target=lambda: found.append(checkpoint["w"].read(np.s_[1:5])))
    thread.start()
    assert inside.wait(60)
    checkpoint.close()
    go_on.set()
    thread.join()
    assert found[0].tolist() == [1, 1, 1, 1]
    assert checkpoint._files.closed


def test_a_reader_is_equal_to_itself_only(tmp_path):
    path = save({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    with open_checkpoint(path) as one, open_checkpoint(path) as other:
        assert one == one
        assert one != other
        assert len({one, other}) == 2


def test_a_forked_child_reads_while_threads_of_its_parent_do(tmp_path):
    """It has none of the locks that they hold, and does not wait for them to close."""
    path = save({"w": torch.arange(1000)}, tmp_path / "a.safetensors")
    with open_checkpoint(path) as checkpoint:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with checkpoint._lock, checkpoint._files._lock:
                checkpoint._reading += 1
                held.set()
                over.wait(PATIENCE)
                checkpoint._reading -= 1

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(PATIENCE)
        process = multiprocessing.get_context("fork").Process(target=read_and_close, args=(checkpoint,))
        process.start()
        try:
            process.join(PATIENCE)
            assert process.exitcode == 0
        finally:
            over.set()
            thread.join()
            process.kill()
            process.join()
        assert checkpoint["w"].read(np.s_[5:7]).tolist() == [5, 6]


def read_and_close(checkpoint):
    assert checkpoint["w"].read(np.s_[5:7]).tolist() == [5, 6]
    assert checkpoint["w"].read().tolist() == list(range(1000))
    checkpoint.close()
    assert checkpoint._files.closed


def test_a_reader_that_nobody_closes_leaves_no_descriptor(tmp_path):
    path = save({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    files = open_checkpoint(path)._files  # without any cycle
    assert files.closed


def test_several_threads_read_a_large_part(tmp_path):
    values = torch.arange(4 << 20, dtype=torch.int32).reshape(16, -1)
    path = foreign(tmp_path / "a.safetensors", {"w": values})
    with open_checkpoint(path, readers=3) as checkpoint:
        for index in (np.s_[1:], np.s_[:, 1:-1], np.s_[:, : 200 << 10], np.s_[:, 60 << 10 : 250 << 10]):
            assert torch.equal(checkpoint["w"].read(index), values[index])


@pytest.mark.slow
def test_arrays_come_without_torch(tmp_path):
    path = save({"w": torch.arange(10, dtype=torch.bfloat16), "n": np.arange(4)}, tmp_path / "a.safetensors")
    code = (
        "import sys, shmtensor, numpy as np\n"
        f"with shmtensor.open_checkpoint({str(path)!r}, arrays=True) as c:\n"
        "    print(c['w'].read(np.s_[2:4]), c['w'].dtype, c['n'].dtype, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["[2", "3]", "bfloat16", "int64", "False"], done.stderr
    assert raw(torch.arange(10, dtype=torch.bfloat16)[2:4])  # the same type exists here
    assert SUFFIX["safetensors"] == path.suffix
    assert shmtensor.open_checkpoint is open_checkpoint


def test_few_names_are_compared_with_one_that_is_not_there(monkeypatch):
    compared = []
    monkeypatch.setattr(selection.difflib, "get_close_matches", lambda key, names, most: compared.extend(names) or [])
    names = ["x" * 1000, *(f"n{number}" for number in range(100_000))]
    assert len(str(selection.unknown("y", names))) < 200
    assert len(compared) <= 2000
    assert max(map(len, compared)) <= 200
