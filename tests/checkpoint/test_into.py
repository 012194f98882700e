"""`load_into`: what a module has afterwards is what `load_state_dict` gives it, whatever is read in place."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch

from shmtensor import ArgumentError, load_checkpoint, load_into
from shmtensor.checkpoint import load, reading
from shmtensor.checkpoint.convert import encrypt_file
from shmtensor.checkpoint.keys import MasterKey

from .state_files import SUFFIX, same, save

KEY = b"k" * 32
each_format = pytest.mark.parametrize("format", sorted(SUFFIX))


@pytest.fixture(params=[*sorted(SUFFIX), "encrypted", "foreign", "foreign.pt"])
def written(request, tmp_path):
    """Writes a state; returns its path, and what loads it."""

    def write(state):
        key, kind = None, request.param
        if kind == "foreign":
            path = tmp_path / "a.safetensors"
            safetensors.torch.save_file({name: tensor.clone() for name, tensor in state.items()}, path)
        elif kind == "foreign.pt":
            path = tmp_path / "a.pt"
            torch.save(state, path)
        else:
            format = "safetensors" if kind == "encrypted" else kind
            path = save(state, tmp_path / f"a{SUFFIX[format]}", format)
        if kind == "encrypted":
            path, key = encrypt_file(path, None, MasterKey.of(KEY)), KEY
        return path, key

    return write


def check(written, make, state, **options):
    """Fill two modules, by `load_state_dict` and in place; both have the same, and tell the same."""
    path, key = written(state)
    expected, found = make(), make()
    told = expected.load_state_dict(load_checkpoint(path, key=key, map=False), **options)
    assert load_into(found, path, encryption_key=key, **options) == told
    assert same(dict(found.state_dict()), dict(expected.state_dict()))
    return found


class Layers(torch.nn.Module):
    """Its checkpoints of version 1 had no first layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(4))
        self.norm = torch.nn.LayerNorm(2)


def moved(module, state, prefix="", *_):
    """Make a state of version 2 of one of version 1."""
    if f"{prefix}layers.3.weight" not in state:
        for number in (2, 1, 0):
            state[f"{prefix}layers.{number + 1}.weight"] = state.pop(f"{prefix}layers.{number}.weight")
        state[f"{prefix}layers.0.weight"] = torch.zeros(2, 2)


class ByHook(Layers):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(moved)


class ByMethod(Layers):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        moved(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ByLoading(Layers):
    def load_state_dict(self, state_dict, *rest, **options):
        state_dict = dict(state_dict)
        moved(self, state_dict)
        return super().load_state_dict(state_dict, *rest, **options)


def by_function():
    module, load = Layers(), torch.nn.Module.load_state_dict

    def load_state_dict(state_dict, *rest, **options):
        state_dict = dict(state_dict)
        moved(module, state_dict)
        return load(module, state_dict, *rest, **options)

    module.load_state_dict = load_state_dict
    return module


def below(make):
    return lambda: torch.nn.ModuleDict({"old": make(), "plain": Layers()})


@pytest.mark.parametrize(
    "make",
    [ByHook, ByMethod, ByLoading, by_function, below(ByHook), below(ByMethod)],
    ids=["hook", "method", "load_state_dict", "function", "hook below", "method below"],
)
def test_a_module_that_moves_values_from_name_to_name(written, make):
    state = {f"layers.{number}.weight": torch.full((2, 2), 10.0 + number) for number in range(3)}
    state |= {"norm.weight": torch.full((2,), 3.0), "norm.bias": torch.full((2,), 4.0)}
    if isinstance(make(), torch.nn.ModuleDict):
        plain = {f"plain.{name}": tensor + 1 for name, tensor in state.items()}
        state = {f"old.{name}": tensor for name, tensor in state.items()} | plain
        state["plain.layers.3.weight"] = torch.full((2, 2), 20.0)
    found = check(written, make, state)
    layers = found["old"].layers if isinstance(found, torch.nn.ModuleDict) else found.layers
    assert [layer.weight[0, 0].item() for layer in layers] == [0, 10, 11, 12]


def test_two_names_that_are_exchanged(written):
    def make():
        module = torch.nn.Module()
        module.a, module.b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        module.register_load_state_dict_pre_hook(lambda _, state, *rest: state.update(a=state["b"], b=state["a"]))
        return module

    check(written, make, {"a": torch.full((2,), 1.0), "b": torch.full((2,), 2.0)})


def test_what_a_hook_changes_in_place_changes_no_other_tensor(written):
    """The file has one tensor under two names, the module two."""

    def make():
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
        module["b"].register_load_state_dict_pre_hook(lambda _, state, *rest: state.update(twice(state)))
        return module

    def twice(state):
        return {name: tensor.mul_(2) for name, tensor in state.items() if name == "b.weight"}

    path, key = written({"a.weight": (weight := torch.full((3, 3), 2.0)), "b.weight": weight})
    module = make()
    load_into(module, path, encryption_key=key)
    assert (module["b"].weight == 4).all()
    if path.suffix != ".pt":  # where torch itself gives one tensor
        assert (module["a"].weight == 2).all()


def test_a_state_that_a_module_takes_itself(written):
    """`set_extra_state` sees what the module had, beside what the file has."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.before = torch.zeros(3), None

        def get_extra_state(self):
            return self.scale

        def set_extra_state(self, state):
            self.before, self.scale = self.scale.tolist(), state

    path, key = written({"_extra_state": torch.ones(3)})
    module = Scaled()
    load_into(module, path, encryption_key=key)
    assert (module.before, module.scale.tolist()) == ([0, 0, 0], [1, 1, 1])


# --- tied weights


class Tied(torch.nn.Module):
    def __init__(self, hook=None, row=False):
        super().__init__()
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.embed = torch.nn.Embedding(4, 3)
        self.head.weight = self.embed.weight
        if row:
            self.register_buffer("row", self.embed.weight.detach()[1])
        if hook is not None:
            self.register_load_state_dict_pre_hook(hook)


@pytest.mark.parametrize("other", ["head.weight", "embed.weight", "row"])
def test_one_name_of_tied_weights_in_another_dtype(written, other):
    exact = torch.rand(4, 3)
    state = {"head.weight": exact, "embed.weight": exact.clone()}
    if other == "row":
        state["row"] = torch.rand(3).double()
    else:
        state[other] = exact.half()
    check(written, lambda: Tied(row=other == "row"), state)


@pytest.mark.parametrize("there", ["head.weight", "embed.weight"])
def test_a_hook_that_changes_both_names_of_tied_weights(written, there):
    def twice(_, state, *rest):
        state.update({name: tensor * 2 for name, tensor in state.items()})

    path, key = written({there: torch.full((4, 3), 3.0)})
    module = Tied(twice)
    assert not any(load_into(module, path, encryption_key=key))
    assert (module.head.weight == 6).all()


def test_what_is_read_in_place(tmp_path, monkeypatch):
    """Tied weights that are tied in the file as well, and what lies beside a module with a hook."""
    source, module = Tied(), torch.nn.ModuleDict({"tied": Tied(), "hooked": ByHook(), "norm": torch.nn.BatchNorm1d(3)})
    path = save({"tied": source, "row": torch.ones(2)}, tmp_path / "b.safetensors")
    filled = []

    def read_regions(opened, files, regions, memory_of, **options):
        filled.extend(memory_of(region).ctypes.data for region in regions)
        return reading.read_regions(opened, files, regions, memory_of, **options)

    monkeypatch.setattr(load, "read_regions", read_regions)
    load_into(module["tied"], path, key="tied")
    assert filled == [module["tied"].head.weight.data_ptr()]
    assert torch.equal(module["tied"].embed.weight, source.embed.weight)
    filled.clear()
    load_into(module, save(module.state_dict(), tmp_path / "a.safetensors"))
    direct = [tensor for name, tensor in module.state_dict().items() if not name.startswith("hooked.")]
    assert sorted(filled) == sorted({tensor.data_ptr() for tensor in direct})


# --- NumPy


@pytest.mark.parametrize("kind", ["savez", "savez_compressed", *sorted(SUFFIX)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f4", "<f2"])
def test_arrays_fill_tensors(tmp_path, kind, dtype):
    arrays = {
        "0.weight": np.arange(6, dtype=dtype).reshape(2, 3), "0.bias": np.ones(2, dtype), "1.weight": np.ones(2, dtype),
        "1.bias": np.zeros(2, dtype), "1.running_mean": np.full(2, 7, dtype), "1.running_var": np.ones(2, dtype),
        "1.num_batches_tracked": np.int64(5) if kind in SUFFIX else np.array(5),
    }  # fmt: skip
    if kind in SUFFIX:
        path = save(arrays, tmp_path / f"a{SUFFIX[kind]}", kind)
    else:
        path = tmp_path / "a.npz"
        getattr(np, kind)(path, **arrays)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    assert not any(load_into(module, path))
    for name, tensor in module.state_dict().items():
        assert np.array_equal(tensor.numpy(), arrays[name])


def test_arrays_that_torch_lacks(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, weight=np.array(["a", "b"]))
    with pytest.raises(ArgumentError, match=r"'weight' is an array of <U1, a type that torch lacks"):
        load_into(torch.nn.Linear(2, 2, bias=False), path)
    np.savez(path, weight=np.ones((2, 2)), names=np.array(["a", "b"]))
    module = torch.nn.Linear(2, 2, bias=False)
    assert load_into(module, path, strict=False).unexpected_keys == ["names"]
    assert (module.weight == 1).all()


def test_a_state_that_lies_deeper_is_named(tmp_path):
    module = torch.nn.Linear(2, 2)
    parts = {"model": module.state_dict(), "other": {}, "ema": module.state_dict()}
    path = save({"step": 3, "parts": parts}, tmp_path / "a.pt", "torch")
    assert load_into(torch.nn.Linear(2, 2), path, key="parts.model").missing_keys == []
    with pytest.raises(ArgumentError, match=r"pass key='parts\.model' or key='parts\.ema'$"):
        load_into(torch.nn.Linear(2, 2), path, key="parts")
    with pytest.raises(RuntimeError, match="Missing key"):  # torch's own: it is deeper than one level
        load_into(torch.nn.Linear(2, 2), path)
    assert load_into(torch.nn.Linear(2, 2), path, key="parts", strict=False).missing_keys == ["weight", "bias"]


@each_format
def test_a_key_that_is_no_name(format, tmp_path):
    path = save({"weight": torch.ones(2, 2), "bias": torch.ones(2), 3: 1, "in": {True: 1}}, tmp_path / "a", format)
    with pytest.raises(ArgumentError, match="the one that was found has the key 3"):
        load_into(torch.nn.Linear(2, 2), path, strict=False)
    with pytest.raises(ArgumentError, match="the one that was found has the key True"):
        load_into(torch.nn.Linear(2, 2), path, key="in", strict=False)
