"""A reader while a trainer saves: `latest` moves, files are replaced and deleted, and what comes is one checkpoint."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from shmtensor import CheckpointError, list_checkpoints, load_arrays, load_checkpoint, load_into, open_checkpoint
from shmtensor.checkpoint import reading
from shmtensor.checkpoint.directory import Directory, remove
from shmtensor.checkpoint.formats import npz
from shmtensor.checkpoint.formats import safetensors as own_safetensors
from shmtensor.checkpoint.formats import torch as own_torch
from shmtensor.checkpoint.index import Saved
from shmtensor.checkpoint.load import check
from shmtensor.checkpoint.opening import open_path

from .state_files import SUFFIX, save

OLD, NEW = 1, 2


def state_of(step: int) -> dict:
    return {"w": np.full(1000, step), "v": torch.full((700,), float(step)), "step": step}


def commit(path: Path, step: int, format: str = "safetensors", max_shard: int | None = None) -> Path:
    """A save as the writing process commits it, without that process."""
    directory = Directory(str(path))
    name = f"step-{step:08d}" + ("" if max_shard else SUFFIX[format])
    file = save(state_of(step), path / name, format, max_shard=max_shard)
    each = [file] if file.is_file() else sorted(file.iterdir())
    files = tuple((f.name if max_shard else "", f.stat().st_size, f.stat().st_mtime_ns) for f in each)
    directory.record(Saved(name, "0" * 16, step, step, 1, "0" * 16, files, {}, "best"))
    assert directory.point_latest(name) == directory.point_aliases() == ""
    return file


def read_mapped(path: Path) -> tuple:
    state = load_checkpoint(path)
    return state["step"], int(state["w"][0]), int(state["v"][0])


def read_copied(path: Path) -> tuple:
    state = load_checkpoint(path, map=False)
    return state["step"], int(state["w"][0]), int(state["v"][0])


def read_unverified(path: Path) -> tuple:
    state = load_arrays(path, map=False, verify=False)
    return state["step"], int(state["w"][0]), int(state["v"][0])


def read_part(path: Path) -> tuple:
    state = load_checkpoint(path, map=False, slices={"w": np.s_[:4]})
    return state["step"], int(state["w"][0]), int(state["v"][0])


def read_handles(path: Path) -> tuple:
    with open_checkpoint(path) as checkpoint:
        meta = load_checkpoint(checkpoint.path)["step"]
        return meta, int(checkpoint["w"].read(np.s_[0])), int(checkpoint["v"].read()[0])


def read_into(path: Path) -> tuple:
    module = torch.nn.Module()
    module.register_buffer("v", torch.zeros(700))
    load_into(module, path, strict=False)
    return (int(module.v[0]),)


WAYS = [read_mapped, read_copied, read_unverified, read_part, read_handles, read_into]


@pytest.fixture
def meanwhile(monkeypatch):
    """`meanwhile(owner, name, step)`: `step` is done once, just before a function is called."""

    def patch(owner, name: str, step) -> list:
        original, done = getattr(owner, name), []

        def call(*args, **kwargs):
            if not done:
                done.append(None)
                step()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return done

    return patch


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("name", ["latest", "best", ""])
@pytest.mark.parametrize("how", WAYS)
def test_the_link_moves_before_the_data_are_read(tmp_path, meanwhile, how, name, deletes):
    first = commit(tmp_path, OLD)

    def step() -> None:
        commit(tmp_path, NEW)
        if deletes:  # keep_last=1
            first.unlink()

    done = meanwhile(reading.Files, "__init__", step)
    assert set(how(tmp_path / name)) == {NEW if deletes else OLD}
    assert done


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_the_link_leads_to_a_directory_of_shards(tmp_path, meanwhile, how, deletes):
    first = commit(tmp_path, OLD, max_shard=4000)

    def step() -> None:
        commit(tmp_path, NEW, max_shard=4000)
        if deletes:
            remove(str(first))

    done = meanwhile(reading.Files, "__init__", step)
    assert set(how(tmp_path / "latest")) == {NEW if deletes else OLD}
    assert done


@pytest.mark.parametrize("format", ["safetensors", "torch", "npz"])
@pytest.mark.parametrize("how", WAYS)
def test_a_file_is_replaced_before_the_data_are_read(tmp_path, meanwhile, how, format):
    path = save(state_of(OLD), tmp_path / f"a{SUFFIX[format]}", format)
    other = save(state_of(NEW), tmp_path / f"b{SUFFIX[format]}", format)
    assert path.stat().st_size == other.stat().st_size
    done = meanwhile(reading.Files, "__init__", lambda: os.replace(other, path))
    assert set(how(path)) == {NEW}
    assert done


@pytest.mark.parametrize(
    ("format", "module", "name"),
    [
        ("safetensors", own_safetensors, "read_description"), ("torch", own_torch, "locate"), ("npz", npz, "locate"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deletes", [False, True])
def test_the_link_moves_before_the_description_is_read(tmp_path, meanwhile, format, module, name, deletes):
    first = commit(tmp_path, OLD, format)

    def step() -> None:
        commit(tmp_path, NEW, format)
        if deletes:
            first.unlink()

    done = meanwhile(module, name, step)
    assert set(read_mapped(tmp_path)) == {NEW if deletes else OLD}
    assert done


def test_a_file_is_replaced_before_its_description_is_read(tmp_path, meanwhile):
    path, other = save(state_of(OLD), tmp_path / "a.safetensors"), save(state_of(NEW), tmp_path / "b.safetensors")
    done = meanwhile(own_safetensors, "read_description", lambda: os.replace(other, path))
    assert set(read_mapped(path)) == {NEW}
    assert done


def test_a_damaged_file_that_stays_is_damaged(tmp_path, meanwhile):
    path = save(state_of(OLD), tmp_path / "a.safetensors")
    done = meanwhile(reading.Files, "__init__", lambda: os.truncate(path, path.stat().st_size - 1))
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(path)
    assert done


def test_what_torch_opened_is_what_was_checked(tmp_path, meanwhile):
    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"v": torch.zeros(3)}, path)
    torch.save({"v": torch.ones(3)}, other)
    done = meanwhile(torch, "load", lambda: os.replace(other, path))
    with pytest.raises(CheckpointError, match="changed while it was opened"):
        load_checkpoint(path)
    assert done
    assert load_checkpoint(path)["v"][0] == 1


def test_arrays_of_others_are_those_that_were_described(tmp_path):
    path, other = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez_compressed(path, w=np.zeros(3000))
    np.savez_compressed(other, w=np.ones(3000))
    with open_checkpoint(path) as checkpoint:
        os.replace(other, path)
        assert checkpoint["w"].read()[0] == 0
    assert load_checkpoint(path)["w"][0] == 1


def test_a_link_says_which_checkpoint_it_is(tmp_path):
    file = commit(tmp_path, OLD)
    with open_checkpoint(tmp_path / "latest") as checkpoint:
        assert checkpoint.path == str(file)
    assert open_path(tmp_path / "best").main == file


def test_a_link_into_another_directory_keeps_its_name(tmp_path):
    blob = tmp_path / "blobs" / "abc"
    blob.parent.mkdir()
    safetensors.torch.save_file({"v": torch.ones(3)}, blob)
    (tmp_path / "model.safetensors").symlink_to("blobs/abc")
    assert open_path(tmp_path / "model.safetensors").main == tmp_path / "model.safetensors"
    assert load_checkpoint(tmp_path / "model.safetensors")["v"][0] == 1


def test_more_files_than_a_process_may_open(tmp_path):
    state = {f"w{number}": np.full(100, number) for number in range(150)}
    path = save(state, tmp_path / "a", max_shard=800)
    assert len(list(path.iterdir())) == 151
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, fds)) + 100, limits[1]))
    try:
        found = [load_arrays(path), load_arrays(path, map=False, readers=8)]
        with open_checkpoint(path, arrays=True) as checkpoint:
            found += [{name: handle.read() for name, handle in checkpoint.items()} for _ in range(2)]
        assert check(open_path(path), readers=4) == []
        assert [info.error for info in list_checkpoints(tmp_path)] == [None]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all((each[name] == state[name]).all() for each in found for name in state)
    assert len(os.listdir("/proc/self/fd")) == len(fds)
