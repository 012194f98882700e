"""Checkpoints that other programs wrote: caches, shards and their indexes, trainers' directories, tied weights."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

from shmtensor import (
    ArgumentError,
    CheckpointError,
    DependencyError,
    load_arrays,
    load_checkpoint,
    load_into,
    open_checkpoint,
)
from shmtensor.checkpoint.convert import convert, encrypt_file
from shmtensor.checkpoint.formats import detect
from shmtensor.checkpoint.formats.base import shard_of
from shmtensor.checkpoint.keys import MasterKey
from shmtensor.checkpoint.opening import candidates, open_path

from .state_files import SUFFIX, raw, same, save

TENSORS = {"a": torch.arange(3.0), "b": torch.ones(2, 2), "c": torch.arange(4)}


def set_time(path, seconds):
    os.utime(path, ns=(0, seconds * 10**9))


def save_shards(folder, pattern="model-{:05}-of-{:05}.safetensors", tensors=None):
    """One tensor in each file; which file each is in."""
    tensors = TENSORS if tensors is None else tensors
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        weight_map[name] = pattern.format(number, len(tensors))
        safetensors.torch.save_file({name: tensor}, folder / weight_map[name])
    return weight_map


def save_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


# --- Hugging Face's cache


@pytest.fixture
def cached(tmp_path):
    """A repository in the cache: `snapshots/<revision>/<name>` are links into `blobs/`."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")

    def put(source):
        blob = repository / "blobs" / f"{len(os.listdir(repository / 'blobs')):064x}"
        shutil.move(source, blob)
        (snapshot / source.name).symlink_to(os.path.relpath(blob, snapshot))

    return tmp_path, repository, snapshot, put


def test_a_file_in_a_cache_is_a_link(cached):
    folder, repository, snapshot, put = cached
    safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
    put(folder / "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    for path in (snapshot, repository, snapshot / "model.safetensors", snapshot / "model"):
        assert same(dict(sorted(load_checkpoint(path).items())), TENSORS), path
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros_like(TENSORS[name])) for name in "ab"})
    load_into(net, snapshot, strict=False)
    assert torch.equal(net["b"], TENSORS["b"])
    (repository / "refs" / "main").write_text("../../..")
    with pytest.raises(FileNotFoundError, match="is not in this cache"):
        load_checkpoint(repository)


def test_shards_in_a_cache_are_links(cached):
    folder, repository, snapshot, put = cached
    save_index(folder / "model.safetensors.index.json", save_shards(folder))
    for path in [*folder.glob("model*-of-*"), folder / "model.safetensors.index.json"]:
        put(path)
    for path in (snapshot, repository, snapshot / "model.safetensors.index.json"):
        assert same(load_checkpoint(path, map=False), TENSORS), path


def test_a_link_whose_file_was_not_downloaded(cached):
    folder, _, snapshot, put = cached
    torch.save(TENSORS, folder / "optimizer.pt")
    put(folder / "optimizer.pt")
    (snapshot / "model.safetensors").symlink_to("../../blobs/missing")
    with pytest.raises(FileNotFoundError, match=r"it is a link to \.\./\.\./blobs/missing, which is not there"):
        load_checkpoint(snapshot / "model.safetensors")


# --- shards


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "model.fp16.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "adapter_model.safetensors.index.json",
        "my.own.net.safetensors.index.json",
    ],
)
def test_any_index(name, tmp_path):
    tmp_path = tmp_path / "a"
    tmp_path.mkdir()
    save_index(tmp_path / name, save_shards(tmp_path, "part{}{}.safetensors"))
    assert same(load_checkpoint(tmp_path), TENSORS)
    assert same(load_checkpoint(tmp_path / name, map=False), TENSORS)
    assert [path.name for path in open_path(tmp_path).files] == [f"part{n}3.safetensors" for n in (1, 2, 3)]
    assert [path for _, path in candidates(tmp_path.parent)] == [tmp_path]


def test_several_indexes(tmp_path):
    weight_map = save_shards(tmp_path)
    save_index(tmp_path / "net.safetensors.index.json", weight_map)
    save_index(tmp_path / "net.safetensors.index.fp16.json", {"a": weight_map["a"]})
    save_index(tmp_path / "net.bf16.safetensors.index.json", {"a": weight_map["a"]})
    (tmp_path / "net.bin.index.json").write_text("{}")
    assert same(load_checkpoint(tmp_path), TENSORS)
    assert list(load_checkpoint(tmp_path / "net.safetensors.index.fp16.json")) == ["a"]
    (tmp_path / "net.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"has 2 indexes of shards \(net\.bf16\..*: name the one that is meant"):
        load_checkpoint(tmp_path)
    save_index(tmp_path / "model.safetensors.index.json", {"b": weight_map["b"]})
    assert list(load_checkpoint(tmp_path)) == ["b"]


@pytest.mark.parametrize(
    "pattern",
    ["model-{:05}-of-{:05}.safetensors", "model.fp16-{:05}-of-{:05}.safetensors", "x-{}-of-{}.safetensors",
     "diffusion_pytorch_model-{:05}-of-{:05}.fp16.safetensors"],
)  # fmt: skip
def test_shards_without_an_index(pattern, tmp_path):
    names = list(save_shards(tmp_path, pattern).values())
    for path in (tmp_path, *(tmp_path / name for name in names)):
        assert same(load_checkpoint(path), TENSORS)
        assert same(load_checkpoint(path, map=False, keys="b"), {"b": TENSORS["b"]})
    assert [path for _, path in candidates(tmp_path)] == [tmp_path / names[0]]
    os.rename(tmp_path / names[1], tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[2]):
        with pytest.raises(CheckpointError, match=f"one of 3 shards, and 1 of them are missing: {names[1]}"):
            load_checkpoint(path)


def test_a_shard_that_an_index_names_is_all_of_them(tmp_path):
    weight_map = save_shards(tmp_path)
    save_index(tmp_path / "model.safetensors.index.json", {name: weight_map[name] for name in "ab"})
    assert same(load_checkpoint(tmp_path / weight_map["a"]), {name: TENSORS[name] for name in "ab"})
    assert same(load_checkpoint(tmp_path / weight_map["c"]), TENSORS)  # which it does not name
    (tmp_path / weight_map["b"]).unlink()
    with pytest.raises(CheckpointError, match=r"shards that are missing: model-00002"):
        load_checkpoint(tmp_path / weight_map["a"])


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    """It is left out, as other readers do, and named in a warning."""
    save_shards(tmp_path, tensors={"a": TENSORS["a"]})
    safetensors.torch.save_file(TENSORS, tmp_path / "model-00001-of-00001.safetensors")
    save_index(tmp_path / "model.safetensors.index.json", dict.fromkeys("ab", "model-00001-of-00001.safetensors"))
    with pytest.warns(RuntimeWarning, match=r"does not name the tensor 'c' in model-00001-of-00001\.safetensors"):
        assert sorted(load_checkpoint(tmp_path)) == ["a", "b"]


def test_shards_that_do_not_belong_together(tmp_path):
    save_shards(tmp_path)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in model-00001-of-00003.* and in model-00002"):
        load_checkpoint(tmp_path)
    assert shard_of("model-00001-of-00003.json") is None
    assert shard_of("a-1-of-b.safetensors") is None


def test_own_shards_need_their_index(tmp_path):
    state = {"list": [torch.ones(9), torch.zeros(9)], "n": 3}
    path = save(state, tmp_path / "a", max_shard=36)
    assert same(load_checkpoint(path / "model-00001-of-00002.safetensors"), state)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"whose structure is in 'model\.safetensors\.index\.json', which is not"):
        load_checkpoint(path / "model-00001-of-00002.safetensors")


# --- a trainer's directory


def test_an_optimizer_beside_a_model_is_not_the_checkpoint(tmp_path):
    for number in (1, 2):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        safetensors.torch.save_file({"n": torch.tensor(number)}, folder / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
            torch.save({"step": number}, folder / name)
            set_time(folder / name, 10**9)
        (folder / "trainer_state.json").write_text("{}")
        (folder / "latest").write_text(f"global_step{number}\n")  # as DeepSpeed does
        set_time(folder / "model.safetensors", number)
        assert load_checkpoint(folder)["n"] == number
    assert load_checkpoint(tmp_path)["n"] == 2  # the newest of its directories
    set_time(tmp_path / "checkpoint-1" / "model.safetensors", 3)
    assert load_checkpoint(tmp_path)["n"] == 1
    (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
    assert load_checkpoint(tmp_path / "checkpoint-1") == {"step": 1}  # the last of the files that are there
    assert load_checkpoint(tmp_path)["n"] == 2


def test_names_of_models(tmp_path):
    safetensors.torch.save_file({"n": torch.tensor(1)}, tmp_path / "model.fp16.safetensors")
    torch.save({"n": 2}, tmp_path / "optimizer.pt")
    assert load_checkpoint(tmp_path)["n"] == 1
    torch.save({"n": 3}, tmp_path / "pytorch_model.bin")
    set_time(tmp_path / "pytorch_model.bin", 1)
    assert load_checkpoint(tmp_path)["n"] == 3
    safetensors.torch.save_file({"n": torch.tensor(4)}, tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path)["n"] == 4
    save_index(tmp_path / "model.safetensors.index.json", save_shards(tmp_path))
    assert same(load_checkpoint(tmp_path), TENSORS)


# --- the header


@pytest.mark.parametrize("before", [b"", b" ", b"\n\t\r  ", b" " * 5000, b" " * 300_000])
@pytest.mark.parametrize("after", [b"", b" \n\t", b" " * 300_000])
def test_white_space_around_the_header(before, after, tmp_path):
    """As safetensors itself reads it."""
    path = tmp_path / "a.safetensors"
    header = b' {"a" : {"dtype":"F32", "shape":[ 2 ],\n"data_offsets" : [0,8]}, "__metadata__":{"x":"y"} } '
    text = before + header + after
    path.write_bytes(len(text).to_bytes(8, "little") + text + torch.ones(2).numpy().tobytes())
    assert same(load_checkpoint(path), {"a": torch.ones(2)})
    assert same(safetensors.torch.load_file(path), {"a": torch.ones(2)})


def test_texts_in_a_header_that_are_large_or_odd(tmp_path):
    """What other programs note there may be long, with every escape that JSON has; it is read in pieces."""
    path = tmp_path / "a.safetensors"
    notes = {"long": '\\"😀\n' * 200_000, "slashes": "\\" * 500_001, "ü": "ü\u0001" * 300_000, "none": ""}
    for shift in range(3):
        safetensors.torch.save_file({"a": torch.ones(2)}, path, {"x" * shift: "", **notes})
        assert same(load_checkpoint(path), {"a": torch.ones(2)})
    state = {"\\" * 100_001 + '"': 1, "texts": ['"\\ü😀' * 100_000, "\ud800" * 9], "a": torch.ones(2)}
    assert same(load_checkpoint(save(state, path)), state)
    sharded = save(state, tmp_path / "b", max_shard=8)
    assert same(load_checkpoint(sharded), state)
    empty = save({"text": '"\\' * 200_000}, tmp_path / "c", max_shard=8)
    assert same(load_checkpoint(empty), {"text": '"\\' * 200_000})


@pytest.mark.parametrize(
    "after", [b"", b"\xff", b"x", b"{}", b'{"a":1,}', b'{"a" 1}', b'{"a":[1,]}', b'{"a":"\n"}', b'{"a":"']
)
def test_an_index_that_is_no_json(after, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(after)
    with pytest.raises(CheckpointError, match=r"invalid JSON|no weight_map"):
        load_checkpoint(path)


NATIVE = {"complex64": "C64", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
          "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4", "float8_e4m3fn": "F8_E4M3",
          "bfloat16": "BF16", "uint16": "U16"}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_dtypes_are_written_as_what_they_are(name, tmp_path):
    state = {"x": torch.arange(96, dtype=torch.uint8).view(getattr(torch, name)).reshape(2, -1)}
    state["e"] = state["x"].new_empty((0, 4)) if name != "float4_e2m1fn_x2" else state["x"][:0]
    path = save(state, tmp_path / "a.safetensors")
    seen = safetensors.torch.load_file(path)
    theirs = tmp_path / "b.safetensors"
    safetensors.torch.save_file(state, theirs)
    for key, tensor in state.items():
        for other in (seen[key], load_checkpoint(path)[key], load_checkpoint(theirs, map=False)[key]):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            assert raw(other) == raw(tensor)
    headers = []
    for each in (path, theirs):
        data = each.read_bytes()
        headers.append(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"])
    assert headers[0]["dtype"] == headers[1]["dtype"] == NATIVE[name]
    assert headers[0]["shape"] == headers[1]["shape"]
    for format, suffix in SUFFIX.items():
        made = convert(open_path(theirs), tmp_path / f"c{suffix}")
        assert detect(made.path).name == format
        assert raw(load_checkpoint(made.path, verify="all")["x"]) == raw(state["x"])
    one = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(())  # that has no last dimension
    assert raw(load_checkpoint(save({"x": one}, tmp_path / "d.safetensors"))["x"]) == b"\0"


# --- tied weights that were left out


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(3)
        self.register_buffer("row", self.embed.weight.detach()[1])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
def test_tied_weights_that_were_left_out(suffix, tmp_path):
    source, path = Tied(), tmp_path / f"a{suffix}"
    torch.nn.init.normal_(source.embed.weight)
    state = {name: tensor.contiguous() for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    del state["row"]
    if suffix == ".safetensors":
        safetensors.torch.save_model(source, path)
        assert len(safetensors.torch.load_file(path)) == 3
    elif suffix == ".pt":
        torch.save(state, path)
    else:
        save(state, path, "npz")
    target = Tied()
    assert not any(load_into(target, path)), "nothing is missing, nothing is unexpected"
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)
    assert target.lm_head.weight is target.embed.weight
    assert torch.equal(target.row, source.embed.weight[1])
    other = Tied().double()  # which copies the buffer: it shares no memory any more
    assert load_into(other, path, strict=False).missing_keys == ["row"]
    assert torch.equal(other.lm_head.weight.float(), source.lm_head.weight)
    theirs = Tied()
    if suffix == ".safetensors":
        assert safetensors.torch.load_model(theirs, path) == (set(), [])
        assert same(dict(theirs.state_dict()), dict(target.state_dict()))


def test_what_is_missing_and_not_tied_is_missing(tmp_path):
    source, path = Tied(), tmp_path / "a.safetensors"
    safetensors.torch.save_model(source, path)
    apart = Tied()
    apart.lm_head.weight = torch.nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"lm_head\.weight\""):
        load_into(apart, path)
    missing, unexpected = load_into(apart, path, strict=False)
    assert missing in (["lm_head.weight"], ["embed.weight"])
    assert unexpected == []
    path.unlink()
    safetensors.torch.save_file({"norm.weight": torch.ones(3), "norm.bias": torch.ones(3)}, path)
    with pytest.raises(RuntimeError, match=r"embed\.weight"):
        load_into(Tied(), path)
    # a part of what the file has is there, but not the whole of which it has a part
    part = Tied()
    safetensors.torch.save_file({"row": torch.ones(3), "norm.weight": torch.ones(3), "norm.bias": torch.ones(3)}, path)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        load_into(part, path)


# --- npz of NumPy


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def pack(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_npz_gives_what_numpy_gives(tmp_path, compression):
    """Arrays, whatever the names of their members are; what is no array is left out, and named."""
    path = tmp_path / "a.npz"
    members = {"a.npy": npy(np.arange(3)), "b": npy(np.arange(4)), "c/": b"", "c/d.bin": npy(np.arange(5.0))}
    pack(path, members, compression)
    with np.load(path) as loaded:
        expected = {name: loaded[name] for name in ("a", "b", "c/d.bin")}
    assert same(load_arrays(path), expected)
    pack(path, {**members, "note.txt": b"hello", "empty": b""}, compression)
    with pytest.warns(RuntimeWarning, match=r"2 members are no arrays, and left out: 'note\.txt', 'empty'"):
        assert same(load_arrays(path), expected)
    pack(path, {"b.npy": npy(np.arange(3)), "b": npy(np.arange(4))}, compression)
    with pytest.raises(CheckpointError, match="two arrays of the name 'b'"):
        load_arrays(path)
    pack(path, {"b.npy": b"hello"}, compression)
    with pytest.raises(CheckpointError, match=r"b\.npy"):
        load_arrays(path)


@pytest.mark.parametrize("name", ["\u0394x", "\U0001f40d", "a\\\u0394'\"", "\xe9"])
def test_names_of_fields_in_any_script(tmp_path, name):
    """NumPy writes version 3 of an npy for them."""
    array = np.array([(1.5, 2), (3.5, 4)], dtype=[(name, "<f4"), ("b", "<i2")])
    path = tmp_path / "a.npz"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.savez(path, a=array)
    assert same(load_arrays(path), {"a": array})


@pytest.mark.parametrize("dtype", ["|S0", "<U0", "|V0"])
def test_items_without_bytes(tmp_path, dtype):
    """As many as the file says take no memory, and have no bytes of others."""
    path, header = tmp_path / "a.npz", io.BytesIO()
    np.lib.format.write_array_header_2_0(header, {"descr": dtype, "fortran_order": False, "shape": (1 << 40,)})
    pack(path, {"a.npy": header.getvalue()})
    found = load_arrays(path)["a"]
    assert (found.dtype.str, found.shape, found.nbytes) == (dtype, (1 << 40,), 0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced"])
def test_an_open_npz_stays_open(tmp_path, save, how):
    """Its arrays are read from the file that was opened, whatever becomes of its name."""
    path = tmp_path / "a.npz"
    save(path, a=np.arange(1000.0), f=np.asfortranarray(np.arange(6).reshape(2, 3)))
    with open_checkpoint(path, arrays=True) as checkpoint:
        if how == "renamed":
            path.rename(tmp_path / "b.npz")
        elif how == "deleted":
            path.unlink()
        else:
            save(tmp_path / "b.npz", a=np.zeros(1000), f=np.zeros((2, 3), int))
            (tmp_path / "b.npz").replace(path)
        assert (checkpoint["a"].read() == np.arange(1000.0)).all()
        assert (checkpoint["a"].read(np.s_[5:7]) == [5, 6]).all()
        assert (checkpoint["f"].read() == np.arange(6).reshape(2, 3)).all()
        opened = set(os.listdir("/proc/self/fd"))
    assert set(os.listdir("/proc/self/fd")) < opened


# --- files of tensorizer


def test_a_file_of_tensorizer(tmp_path):
    """Loaded, listed, converted and encrypted, by its own library."""
    tensorizer, fsspec = pytest.importorskip("tensorizer"), pytest.importorskip("fsspec")
    pytest.importorskip("cryptography")
    expected = {
        "model.w": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), "ids": torch.arange(5),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3.0),
    }  # fmt: skip
    path = tmp_path / "a.tensors"
    serializer = tensorizer.TensorSerializer(str(path))
    serializer.write_state_dict(expected)
    serializer.close()
    assert same(load_checkpoint(path), expected)
    assert list(load_checkpoint(path, keys=["ids"])) == ["ids"]
    convert(open_path(path), tmp_path / "a.safetensors")
    assert same(load_checkpoint(tmp_path / "a.safetensors"), expected)
    key = bytes(range(32))
    sealed = encrypt_file(path, None, MasterKey.of(key))
    assert same(load_checkpoint(sealed, key=key), expected)
    url = "memory://tensorizer/a.tensors"
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/tensorizer/a.tensors", path.read_bytes())
    assert same(load_checkpoint(url), expected)
    fs.rm("/tensorizer", recursive=True)
    module = torch.nn.Linear(3, 2)
    serializer = tensorizer.TensorSerializer(str(tmp_path / "module.tensors"))
    serializer.write_module(module)
    serializer.close()
    torch.nn.Linear(3, 2).load_state_dict(load_checkpoint(tmp_path / "module.tensors"))  # whose names have no dot
    with pytest.raises(ArgumentError, match="not known"):
        convert(open_path(path), tmp_path / "b.tensors", "tensorizer")
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match=r"a\.tensors: tensorizer cannot read it"):
        load_checkpoint(path)


class _Claims:
    """In place of tensorizer's reader: of a file that says more bytes than it has."""

    total_tensor_bytes = 1 << 50

    def __init__(self, path, device, lazy_load):
        assert lazy_load

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_file_of_tensorizer_that_says_more_than_it_has(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorizer", SimpleNamespace(TensorDeserializer=_Claims))
    (tmp_path / "a.tensors").write_bytes(b"|TZR|" + bytes(100))
    with pytest.raises(CheckpointError, match=r"tensors have 1125899906842624 bytes, and has 105 itself"):
        load_checkpoint(tmp_path / "a.tensors")


class _Reads(dict):
    """In place of tensorizer's reader: of a file whose bytes behind the magic are one tensor."""

    total_tensor_bytes = 12

    def __init__(self, path, device, **options):
        super().__init__(w=torch.frombuffer(bytearray(Path(path).read_bytes()[5:]), dtype=torch.float32))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_file_of_tensorizer_is_read_wherever_it_is(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "tensorizer", SimpleNamespace(TensorDeserializer=_Reads))
    data = b"|TZR|" + np.arange(3, dtype=np.float32).tobytes()
    (tmp_path / "a.tensors").write_bytes(data)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/tensorizer/a.tensors", data)
    try:
        for path in (str(tmp_path / "a.tensors"), "memory://tensorizer/a.tensors"):
            assert same(load_checkpoint(path), {"w": torch.arange(3.0)})
            opened = open_path(path)
            assert str(opened.main).endswith("a.tensors")
            convert(opened, tmp_path / "a.safetensors", overwrite=True)
            assert same(load_checkpoint(tmp_path / "a.safetensors"), {"w": torch.arange(3.0)})
    finally:
        fs.rm("/tensorizer", recursive=True)


def test_a_file_of_tensorizer_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    (tmp_path / "a.tensors").write_bytes(b"|TZR|" + bytes(100))
    with pytest.raises(DependencyError, match="pip install tensorizer"):
        load_checkpoint(tmp_path / "a.tensors")
    save({"w": torch.ones(3)}, tmp_path / "step-1.safetensors")
    assert list(load_checkpoint(tmp_path)) == ["w"]  # a directory of checkpoints means those of this library


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_of_torch_s_distributed_checkpoint_is_not_its_first_or_last_tensor(tmp_path, count):
    """A file has an archive per tensor, and looks like one of them."""
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        for _ in range(count):
            data = io.BytesIO()
            torch.save(torch.ones(3), data)
            file.write(data.getvalue())
    for path in (tmp_path, tmp_path / "__0_0.distcp"):
        for load in (load_checkpoint, load_arrays, open_checkpoint):
            with pytest.raises(CheckpointError, match="StorageReader"):
                load(path)
