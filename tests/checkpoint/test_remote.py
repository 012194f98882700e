"""Checkpoints at URLs: each kind of server, each form of a checkpoint, and servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from shmtensor import (
    AccessDenied,
    ArgumentError,
    CheckpointError,
    CheckpointWriter,
    DependencyError,
    ResourceError,
    list_checkpoints,
    load_arrays,
    load_checkpoint,
    load_into,
    load_newest,
    open_checkpoint,
)
from shmtensor.checkpoint import answers, index, locations, reading, remote, selection
from shmtensor.checkpoint.answers import changed_at, linked
from shmtensor.checkpoint.convert import convert, encrypt_file
from shmtensor.checkpoint.envelope import SUFFIX as ENCRYPTED
from shmtensor.checkpoint.keys import MasterKey
from shmtensor.checkpoint.load import check
from shmtensor.checkpoint.opening import Opener, open_path
from shmtensor.checkpoint.upload import put_file

from ..commands import app
from ..waiting import PATIENCE, wait_until
from . import servers
from .servers import s3  # noqa: F401
from .state_files import SUFFIX, same, save

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

KEY = bytes(range(32))


def state(step=0):
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(400, 300, generator=generator), "bias": torch.randn(5, generator=generator)},
        "array": np.arange(1000), "flags": [True, None, "text"], "step": step,
    }  # fmt: skip


@pytest.fixture(params=["memory", "http", "s3"])
def put(request, tmp_path):
    """`put(path)` makes a file or directory available, and returns its URL."""
    if request.param == "http":
        with servers.Server(tmp_path / "served") as server:

            def serve(path):
                target = tmp_path / "served" / path.name
                if path.is_dir():
                    servers.copy(path, target)
                else:
                    target.parent.mkdir(exist_ok=True)
                    shutil.copy2(path, target)
                return f"{server.url}/{path.name}"

            yield serve
        return
    if request.param == "s3":
        request.getfixturevalue("s3")
    fs = fsspec.filesystem(request.param)
    root = f"bucket/{tmp_path.name}" if request.param == "s3" else f"/{tmp_path.name}"

    def upload(path):
        if path.is_dir():
            servers.put(path, fs, f"{root}/{path.name}")
        else:
            fs.pipe_file(f"{root}/{path.name}", path.read_bytes())
        return f"{request.param}://{root.lstrip('/')}/{path.name}"

    yield upload
    with contextlib.suppress(FileNotFoundError):
        fs.rm(root, recursive=True)


@pytest.fixture
def served(tmp_path):
    """A server of `tmp_path / "served"`, with faults."""
    (tmp_path / "served").mkdir()
    with servers.Server(tmp_path / "served") as server:
        yield server


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.001)


# --- every form of a checkpoint


@pytest.mark.parametrize("format", [*SUFFIX])
def test_a_file_of_each_format(put, tmp_path, format):
    url = put(save(state(), tmp_path / f"a{SUFFIX[format]}", format))
    assert same(load_checkpoint(url), state())
    assert same(load_checkpoint(url, map=False, readers=1), state())
    assert same(load_checkpoint(url, keys="model"), {"model": state()["model"]})
    part = load_checkpoint(url, keys="model.weight", slices={"model.weight": np.s_[3:5, ::7]})
    assert torch.equal(part["model"]["weight"], state()["model"]["weight"][3:5, ::7])
    assert isinstance(load_arrays(url)["model"]["weight"], np.ndarray)


@pytest.mark.parametrize("kind", ["pt", "old pt", "npz", "packed npz", "safetensors"])
def test_a_file_of_another_program(put, tmp_path, kind):
    tensors = {"w": torch.randn(300, 400), "b": torch.arange(5)}
    path = tmp_path / f"a.{kind.split()[-1]}"
    match kind:
        case "pt" | "old pt":
            torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pt")
        case "safetensors":
            safetensors.torch.save_file(tensors, path)
        case _:
            (np.savez if kind == "npz" else np.savez_compressed)(path, **{k: v.numpy() for k, v in tensors.items()})
    url = put(path)
    expected = {k: v.numpy() for k, v in tensors.items()} if "npz" in kind else tensors
    expected = dict(sorted(expected.items())) if kind == "safetensors" else expected
    assert same(load_checkpoint(url), expected)
    with open_checkpoint(url) as found:
        assert found.path.startswith(url.partition(":")[0])
        assert same(found["w"].read(np.s_[1:3]), expected["w"][1:3])


def test_a_directory_of_a_writer(put, tmp_path):
    with CheckpointWriter(tmp_path / "run") as writer:
        for step in range(3):
            writer.save(state(step), metrics={"loss": 1.0 / (step + 1)}, alias="best" if step == 1 else None)
    url = put(tmp_path / "run")
    for name, step in (("", 2), ("/latest", 2), ("/best", 1), ("/step-00000000", 0), ("/step-00000000.safetensors", 0)):
        assert same(load_checkpoint(url + name), state(step)), name
    assert load_newest(url)["step"] == 2
    found = list_checkpoints(url)
    assert [(each.step, each.metrics["loss"], each.error) for each in found] == [
        (2, 1 / 3, None),
        (1, 0.5, None),
        (0, 1.0, None),
    ]
    assert found[1].aliases == ("best",)
    assert all(each.path == f"{found[0].path.rpartition('/')[0]}/{each.name}" for each in found)


def test_shards(put, tmp_path):
    url = put(save(state(), tmp_path / "sharded", max_shard=300_000))
    assert len(os.listdir(tmp_path / "sharded")) > 2
    assert same(load_checkpoint(url), state())
    assert same(load_checkpoint(f"{url}/model.safetensors.index.json"), state())
    other = tmp_path / "other"
    other.mkdir()
    for number, name in enumerate(("a", "b"), 1):
        safetensors.torch.save_file({name: torch.ones(number)}, other / f"model-{number:05}-of-00002.safetensors")
    url = put(other)
    assert (
        load_checkpoint(url).keys() == load_checkpoint(f"{url}/model-00001-of-00002.safetensors").keys() == {"a", "b"}
    )


def test_ranks(put, tmp_path):
    writers = [CheckpointWriter(tmp_path / "run", rank=rank, world_size=2) for rank in range(2)]
    handles = [writer.save({"part": state(rank)}) for rank, writer in enumerate(writers)]
    for handle in handles:
        handle.durable.result(PATIENCE)
    for writer in writers:
        writer.close()
    url = put(tmp_path / "run")
    assert same(load_checkpoint(url), {rank: {"part": state(rank)} for rank in range(2)})
    assert same(load_checkpoint(url, rank=1), {"part": state(1)})
    assert same(load_newest(url, rank=0), {"part": state(0)})


@pytest.mark.parametrize("max_shard", [None, 300_000])
def test_encrypted(put, tmp_path, max_shard):
    pytest.importorskip("cryptography")
    with CheckpointWriter(tmp_path / "run", key=KEY, max_shard=max_shard) as writer:
        writer.save(state())
    url = put(tmp_path / "run")
    assert same(load_checkpoint(url, key=KEY), state())
    with pytest.raises(CheckpointError, match="is encrypted: pass key="):
        load_checkpoint(url)
    with open_checkpoint(url, key=KEY) as found:
        assert torch.equal(found["model.weight"].read(np.s_[7]), state()["model"]["weight"][7])
    assert list_checkpoints(url)[0].name.startswith("step-00000000")
    assert list_checkpoints(url)[0].name.endswith(ENCRYPTED) == (max_shard is None)


def test_into_a_module(put, tmp_path):
    module, other = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    url = put(save(module.state_dict(), tmp_path / "a.safetensors"))
    load_into(other, url)
    assert same(other.state_dict(), module.state_dict())


def test_a_damaged_one_is_passed_over(put, tmp_path):
    with CheckpointWriter(tmp_path / "run") as writer:
        for step in range(2):
            writer.save(state(step))
    newest = tmp_path / "run" / "step-00000001.safetensors"
    newest.write_bytes(newest.read_bytes()[:5000])
    url = put(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load_newest(url)["step"] == 0
    assert list_checkpoints(url)[0].error


def test_what_is_saved_meanwhile_is_found(put, tmp_path):
    with CheckpointWriter(tmp_path / "run") as writer:
        writer.save(state(0)).durable.result(PATIENCE)
        url = put(tmp_path / "run")
        assert load_checkpoint(url)["step"] == 0
        writer.save(state(1)).durable.result(PATIENCE)
        put(tmp_path / "run")
        assert load_checkpoint(url)["step"] == 1


def test_nothing_is_there(put, tmp_path):
    save(state(), tmp_path / "a.npz", "npz")
    url = put(tmp_path / "a.npz").removesuffix("a.npz")
    for load in (load_checkpoint, load_arrays, open_checkpoint, list_checkpoints):
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            load(url + "none")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(url + "none.safetensors")
    assert load_newest(url + "none") is None
    with pytest.raises(ArgumentError, match="is a file"):
        load_newest(url + "a.npz")


def command(*arguments):
    result = CliRunner().invoke(app, ["checkpoint", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_the_command_line(put, tmp_path):
    with CheckpointWriter(tmp_path / "run") as writer:
        writer.save(state(3))
    url = put(tmp_path / "run")
    file = f"{url}/step-00000003.safetensors"
    told = json.loads(command("info", file, "--json"))
    assert told["path"].endswith("/run/step-00000003.safetensors")
    assert {tensor["name"] for tensor in told["tensors"]} == {"model.weight", "model.bias", "array"}
    listed = json.loads(command("ls", url, "--json"))
    assert [each["step"] for each in listed["checkpoints"]] == [3]
    checked = json.loads(command("verify", file, url, "--json"))
    assert [each["ok"] for each in checked["checkpoints"]] == [True, True]
    command("convert", file, str(tmp_path / "b.npz"))
    assert same(load_checkpoint(tmp_path / "b.npz"), state(3))


# --- convert to a URL


def test_a_bucket_that_does_not_exist_is_no_empty_directory(request):
    """A misspelt bucket must not start a training anew."""
    request.getfixturevalue("s3")
    for load in (load_newest, load_checkpoint, list_checkpoints, open_checkpoint):
        with pytest.raises(ResourceError, match="there is no such bucket"):
            load("s3://bukket/run")
    assert load_newest("s3://bucket/no-run") is None
    told = CliRunner().invoke(app, ["checkpoint", "info", "s3://bukket/a.safetensors"], env={"COLUMNS": "200"})
    assert (told.exit_code, "there is no such bucket" in told.stderr) == (1, True)


@pytest.fixture(params=["memory", "s3"])
def bucket(request, tmp_path):
    """The URL of an empty directory that can be written."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    url = f"{request.param}://bucket/{tmp_path.name}-new"
    yield url
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem(request.param).rm(url, recursive=True)


@pytest.mark.parametrize("format", [*SUFFIX])
def test_convert_to_a_url(bucket, tmp_path, format):
    source = save(state(3), tmp_path / "a.safetensors")
    told = json.loads(command("convert", str(source), f"{bucket}/b{SUFFIX[format]}", "--json"))
    assert told["path"].endswith(f"-new/b{SUFFIX[format]}")
    assert same(load_checkpoint(f"{bucket}/b{SUFFIX[format]}"), state(3))
    command("convert", f"{bucket}/b{SUFFIX[format]}", f"{bucket}/c.safetensors")
    assert same(load_checkpoint(f"{bucket}/c.safetensors"), state(3))


def test_convert_to_a_url_that_exists(bucket, tmp_path):
    for step in (3, 4):
        save(state(step), tmp_path / f"{step}.safetensors")
    command("convert", str(tmp_path / "3.safetensors"), f"{bucket}/b.npz")
    refused = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path / "4.safetensors"), f"{bucket}/b.npz"])
    assert refused.exit_code == 1
    assert "b.npz exists" in refused.output.replace("\n", "")
    assert same(load_checkpoint(f"{bucket}/b.npz"), state(3))
    command("convert", str(tmp_path / "4.safetensors"), f"{bucket}/b.npz", "--overwrite")
    assert same(load_checkpoint(f"{bucket}/b.npz"), state(4))


def test_convert_to_shards_at_a_url(bucket, tmp_path):
    source, told = save(state(3), tmp_path / "a.safetensors"), []
    options = {"max_shard": 300_000, "progress": told.append}
    opened = open_path(source, Opener())
    made = convert(opened, f"{bucket}/sharded", **options)
    assert same(load_checkpoint(f"{bucket}/sharded"), state(3))
    assert 2 * opened.plan.nbytes <= sum(told) == opened.plan.nbytes + made.nbytes
    for overwrite in (False, True):
        with pytest.raises(ResourceError, match=r"sharded exists: choose another name"):
            convert(opened, f"{bucket}/sharded", overwrite=overwrite, **options)


def test_an_upload_of_shards_that_fails_leaves_nothing(bucket, tmp_path, monkeypatch):
    """The index of shards comes last: until then they are no checkpoint."""
    opened, names = open_path(save(state(3), tmp_path / "a.safetensors"), Opener()), []

    def fails(local, remote, *rest, **more):
        names.append(remote.name)
        if remote.name.endswith(".json"):
            raise ResourceError(5, "the server is gone")
        return put_file(local, remote, *rest, **more)

    monkeypatch.setattr("shmtensor.checkpoint.convert.put_file", fails)
    with pytest.raises(ResourceError, match="the server is gone"):
        convert(opened, f"{bucket}/sharded", max_shard=300_000)
    assert len(names) > 2
    assert names[-1] == "model.safetensors.index.json"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(f"{bucket}/sharded")
    assert not fsspec.filesystem(bucket.partition(":")[0]).find(f"{bucket}/sharded")


@pytest.mark.parametrize("max_shard", [None, 300_000])
def test_convert_to_an_encrypted_checkpoint_at_a_url(bucket, tmp_path, max_shard):
    pytest.importorskip("cryptography")
    target = f"{bucket}/b" + (".safetensors" + ENCRYPTED if max_shard is None else "")
    opened = open_path(save(state(3), tmp_path / "a.safetensors"), Opener())
    convert(opened, target, max_shard=max_shard, master=MasterKey.of(KEY))
    assert same(load_checkpoint(target, key=KEY), state(3))
    with pytest.raises(CheckpointError, match="is encrypted: pass key="):
        load_checkpoint(target)


def test_convert_to_where_nothing_can_be_written(served, tmp_path):
    opened = open_path(save(state(3), tmp_path / "a.safetensors"), Opener())
    with pytest.raises(ArgumentError, match=r"b\.npz: nothing can be written there"):
        convert(opened, f"{served.url.replace('//', '//me:secret@')}/b.npz")
    assert served.requests == []


# --- what is read


def test_only_what_is_wanted_is_read(served, tmp_path):
    big = {"w": torch.randn(2000, 2000), "x": torch.randn(2000, 2000)}
    save(big, tmp_path / "served" / "a.safetensors")
    with open_checkpoint(f"{served.url}/a.safetensors") as found:
        served.requests.clear()
        assert torch.equal(found["x"].read(np.s_[40:60]), big["x"][40:60])
    read = sum(end - start for method, _, start, end in served.requests if method == "GET")
    assert read <= 20 * 8000 + 2 * remote.BLOCK


def test_small_tensors_come_several_at_a_time(served, tmp_path):
    many = {f"t{number}": torch.randn(50) for number in range(2000)}
    size = save(many, tmp_path / "served" / "a.safetensors").stat().st_size
    assert same(load_checkpoint(f"{served.url}/a.safetensors"), many)
    gets = [end - start for method, _, start, end in served.requests if method == "GET"]
    assert len(gets) <= size // remote.BLOCK + 2
    assert sum(gets) <= size


def test_large_tensors_come_in_chunks_at_once(served, tmp_path):
    big = {"w": torch.randn(3000, 3000)}
    save(big, tmp_path / "served" / "a.safetensors")
    running, most, lock, several = 0, 0, threading.Lock(), threading.Event()

    def count(_handler, _path, start, data):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running > 1:
                several.set()
        if start > 1 << 20:
            several.wait(PATIENCE)
        with lock:
            running -= 1
        return data

    served.fault = count
    told = []
    assert same(load_checkpoint(f"{served.url}/a.safetensors", progress=lambda *now: told.append(now)), big)
    assert most > 1
    assert max(end - start for method, _, start, end in served.requests if method == "GET") <= reading.REQUEST_MAX
    assert sorted(told)[-1] == (36_000_000, 36_000_000)
    assert len(told) >= 36_000_000 // reading.REQUEST_MAX


@pytest.mark.parametrize("view", ["im2col", "overlapping", "transposed"])
def test_a_part_of_a_view_by_url(served, tmp_path, monkeypatch, view):
    """What overlaps, or is in another order than the file, beside the tensor that it is a view of."""
    monkeypatch.setattr(selection, "_STARTS", 7)
    base = torch.arange(3 << 18)
    w, part = {
        "im2col": (base[: 2 * 40 * 4096].reshape(2, 40, 4096).unfold(1, 3, 1).unfold(2, 3, 1), np.s_[:, :, :2]),
        "overlapping": (base.as_strided((2, 2, 2, 4), (1 << 18, 10, 2, 1)), np.s_[:]),
        "transposed": (base.reshape(3, 512, 512).permute(2, 0, 1), np.s_[3:9, :, 5:90]),
    }[view]
    save({"base": base, "w": w}, tmp_path / "served" / "a.safetensors")
    with open_checkpoint(f"{served.url}/a.safetensors") as found:
        assert torch.equal(found["w"].read(part), w[part])


@pytest.mark.parametrize("shape", [(7, 11, 13, 5), (3, 1, 50, 40), (100, 6)])
@pytest.mark.parametrize("gap", [0, 40, 1 << 18])
def test_parts_by_url_at_random(served, tmp_path, monkeypatch, shape, gap):
    monkeypatch.setattr(selection, "_STARTS", 5)
    monkeypatch.setattr(selection, "_BATCH", 3)
    monkeypatch.setattr(selection, "REQUEST_MIN", 900)
    monkeypatch.setattr(selection.read_part, "__defaults__", (gap,))
    w, generator = torch.arange(math.prod(shape)).reshape(shape), np.random.default_rng(gap)
    save({"w": w}, tmp_path / "served" / "a.safetensors")
    with open_checkpoint(f"{served.url}/a.safetensors") as found:
        for _ in range(10):
            ends = [sorted(generator.integers(0, length + 1, 2)) for length in shape]
            part = tuple(slice(int(a), int(b), int(generator.integers(1, 3))) for a, b in ends)
            assert torch.equal(found["w"].read(part), w[part])


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("columns", "share"), [(100_000, 0.011), (1000, 1.1)])
def test_columns_by_url(served, tmp_path, columns, share, sealed):
    """Of rows of more than 256 KiB only the bytes of the part; short rows come whole, in few requests."""
    state = {"w": torch.arange(2_000_000.0).reshape(-1, columns)}
    path, key = save(state, tmp_path / "served" / "a.safetensors"), KEY if sealed else None
    path = encrypt_file(path, None, MasterKey.of(KEY)) if sealed else path
    part = np.s_[:, 7 : 7 + columns // 100]
    for read in (
        lambda where: load_checkpoint(where, slices={"w": part}, key=key)["w"],
        lambda where: open_checkpoint(where, key=key)["w"].read(part),
    ):
        served.requests.clear()
        assert torch.equal(read(f"{served.url}/{path.name}"), state["w"][part])
        gets = [end - start for method, _, start, end in served.requests if method == "GET"]
        if not sealed:  # of an encrypted one whole segments
            assert sum(gets) < share * state["w"].nbytes + (600 << 10)
            assert len(gets) < 10 or columns == 100_000


@pytest.mark.parametrize(("readers", "requests"), [(1, 1), (2, 2), (4, 4), (8, 5)])
def test_a_large_tensor_is_divided_among_the_readers(served, tmp_path, readers, requests):
    """Into equal parts, of 8 MiB or more."""
    path = tmp_path / "served" / "a.safetensors"
    safetensors.torch.save_file({"w": torch.randn(3000, 3000)}, path)
    assert same(load_checkpoint(f"{served.url}/a.safetensors", readers=readers)["w"].shape, torch.Size([3000, 3000]))
    parts = [end - start for method, _, start, end in served.requests if method == "GET" and end - start > 1 << 20]
    assert len(parts) == requests
    assert sum(parts) == 36_000_000
    assert max(parts) - min(parts) < requests


def test_a_server_without_ranges(tmp_path):
    save(state(), tmp_path / "a.safetensors")
    with servers.Server(tmp_path, ranges=False) as server:
        assert same(load_checkpoint(f"{server.url}/a.safetensors"), state())
        assert len([method for method, *_ in server.requests if method == "GET"]) == 1


# --- servers that fail


def failing(times, answer):
    """Let so many GET requests for bytes fail."""
    left, lock = times, threading.Lock()

    def fault(handler, _path, start, data):
        nonlocal left
        with lock:
            if handler.command == "HEAD" or not left:
                return data
            left -= 1
        return answer(handler, start, data)

    return fault


def status(code):
    def answer(handler, _start, _data):
        handler.send_error(code)

    return answer


def cut(handler, _start, data):
    """Say the whole length, send half of it, and close."""
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True


def truncated(_handler, _start, data):
    """Half of what was asked for, with its right length."""
    return data[: len(data) // 2]


def dropped(handler, _start, _data):
    handler.close_connection = True


def silent(handler, _start, _data):
    handler.server.over.wait(PATIENCE)
    handler.close_connection = True


FAULTS = {"500": status(500), "503": status(503), "429": status(429), "cut": cut, "truncated": truncated,
          "dropped": dropped, "silent": silent}  # fmt: skip


def limit_requests(monkeypatch, fault):
    """Let a silent server's requests end soon, whatever they are to bring."""
    if fault == "silent":
        monkeypatch.setattr(remote, "TIMEOUT", 0.5)
        monkeypatch.setattr(remote, "_SLOW", 100_000_000)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(served, tmp_path, quick, monkeypatch, fault):
    save(state(), tmp_path / "served" / "a.safetensors")
    limit_requests(monkeypatch, fault)
    served.fault = failing(2, FAULTS[fault])
    assert same(load_checkpoint(f"{served.url}/a.safetensors"), state())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", ["header", "data"])
def test_a_fault_that_stays(served, tmp_path, quick, monkeypatch, fault, at):
    """An error that names the URL without its secrets, and says what failed and how often it was tried."""
    limit_requests(monkeypatch, fault)
    path = save({"w": torch.zeros(500_000)}, tmp_path / "served" / "a.safetensors")
    answer = FAULTS[fault]

    def stays(handler, _path, start, data):
        if handler.command == "HEAD" or (at == "data" and start + len(data) < path.stat().st_size // 2):
            return data
        return answer(handler, start, data)

    served.fault = stays
    with pytest.raises(
        ResourceError, match=r"a\.safetensors: bytes \d+ to \d+ of \d+ cannot be read, tried 5 times: \w+"
    ) as error:
        load_checkpoint(served.url.replace("//", "//me:secret@") + "/a.safetensors?token=secret", readers=1)
    assert "secret" not in str(error.value)
    assert error.value.__cause__ is error.value.__context__ is None


def test_the_limit_of_a_request_is_by_its_own_bytes(served, tmp_path, quick, monkeypatch):
    """Not by its file's: a silent server would hold up the load of a large one for hours."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.05)
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    path = save({"w": torch.zeros(2_000_000)}, tmp_path / "served" / "a.safetensors")
    monkeypatch.setattr(remote, "_SLOW", path.stat().st_size / 100)  # the whole file would have 100 s
    served.fault = lambda handler, _path, start, data: (
        data if handler.command == "HEAD" else silent(handler, start, data)
    )
    with pytest.raises(ResourceError, match=r"no answer within [0-9] s"):
        load_checkpoint(f"{served.url}/a.safetensors", readers=1)


def test_what_has_come_is_not_asked_for_again(served, tmp_path, quick, monkeypatch):
    """A connection that breaks inside a long request costs nothing of what has come, nor an attempt."""
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    big = {"w": torch.randn(3000, 3000)}
    save(big, tmp_path / "served" / "a.safetensors")
    sent = []

    def breaks(handler, _path, start, data):
        if handler.command == "HEAD" or len(data) < 4 << 20:
            return data
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: 4 << 20])
        handler.close_connection = True
        sent.append(start)
        return None

    served.fault = breaks
    assert same(load_checkpoint(f"{served.url}/a.safetensors", readers=1), big)
    assert len(sent) == 36_000_000 // (4 << 20)
    assert [after - before for before, after in itertools.pairwise(sent)] == [4 << 20] * (len(sent) - 1)


def test_bytes_that_come_too_late_are_not_written():
    """A request that was given up may still run while another one fills the memory, and after its digest was taken."""
    memory = bytearray(6)
    sink = answers.Sink([memoryview(memory)])
    sink.write(b"abc")
    sink.close()
    with pytest.raises(asyncio.CancelledError):
        sink.write(b"def")
    assert memory == b"abc\0\0\0"
    assert sink.count == 3


def test_a_server_that_stops_sending(served, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    path = save({"w": torch.zeros(2_000_000)}, tmp_path / "served" / "a.safetensors")

    def stops(handler, _path, start, data):
        if handler.command == "HEAD" or len(data) < path.stat().st_size // 2:
            return data
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:1000])
        return silent(handler, start, data)

    served.fault = stops
    with pytest.raises(ResourceError, match=r"OSError: (1000 bytes|no answer) within"):
        load_checkpoint(f"{served.url}/a.safetensors", readers=1)


def test_a_server_that_is_slow_may_take_as_long_as_it_sends(served, tmp_path, monkeypatch):
    """Eight MB every ten seconds, by a clock that the server moves: for longer than a silent one may take."""
    big = {"w": torch.randn(3500, 3500)}
    save(big, tmp_path / "served" / "a.safetensors")
    now = [0.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(handler, _path, start, data):
        if handler.command == "HEAD" or len(data) < 10_000_000:
            return data
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        for at in range(0, len(data), 4_000_000):
            handler.wfile.write(data[at : at + 4_000_000])
            now[0] += 10
        return None

    served.fault = slow
    assert same(load_checkpoint(f"{served.url}/a.safetensors", readers=1), big)
    assert now[0] > 2 * remote.TIMEOUT


def test_an_s3_server_that_stops(s3, tmp_path, quick, monkeypatch):  # noqa: F811
    big = {"w": torch.randn(1000, 1000)}
    s3.fs.pipe_file("bucket/stops/a.safetensors", save(big, tmp_path / "a.safetensors").read_bytes())
    with open_checkpoint("s3://bucket/stops/a.safetensors") as found:
        monkeypatch.setattr(remote, "TIMEOUT", 0.2)
        s3.stop()
        try:
            with pytest.raises(ResourceError, match=r"stops/a.safetensors: bytes .*tried 5 times: .* within 0 s"):
                found["w"].read()
        finally:
            s3.go_on()
        monkeypatch.undo()
        assert torch.equal(found["w"].read(), big["w"])


def test_a_server_that_is_killed(tmp_path, quick, monkeypatch):
    """In the middle of a file: an error; if it is back before the last attempt, nothing."""
    monkeypatch.setattr(remote, "_PAUSE", 0.2)
    save(state(), tmp_path / "a.safetensors")
    first = servers.Server(tmp_path)
    port, died = first.server_port, threading.Event()

    def die(handler, _path, start, data):
        if handler.command == "GET" and start:
            died.set()
            return None
        return data

    first.fault = die
    again = []

    def restart():
        died.wait(PATIENCE)
        first.end()
        again.append(servers.Server(tmp_path, port=port))

    helper = threading.Thread(target=restart)
    helper.start()
    try:
        assert same(load_checkpoint(f"{first.url}/a.safetensors"), state())
    finally:
        died.set()
        helper.join()
        again[0].end()
    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    with pytest.raises(ResourceError, match=r"cannot be read|whether it is there"):
        load_checkpoint(f"{first.url}/a.safetensors")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (404, FileNotFoundError), (410, FileNotFoundError), (403, AccessDenied), (401, AccessDenied),
        (400, ResourceError), (405, ResourceError), (416, ResourceError), (451, ResourceError),
    ],
)  # fmt: skip
def test_what_does_not_pass_is_not_tried_again(served, tmp_path, code, kind):
    save(state(), tmp_path / "served" / "a.safetensors")
    served.fault = lambda handler, *_: handler.send_error(code)
    with pytest.raises(kind):
        load_checkpoint(f"{served.url}/a.safetensors")
    assert len(served.requests) <= 2 * len(SUFFIX) * 2 + 4
    if kind is FileNotFoundError:
        assert load_newest(f"{served.url}") is None
    else:  # a training must not begin anew because of it
        with pytest.raises(kind):
            load_newest(f"{served.url}")


def test_a_url_that_nobody_can_ask_for_is_no_empty_place():
    for url in ("http://127.0.0.1:abc/runs", "http://127.0.0.1:99999/runs"):
        with pytest.raises((ResourceError, ArgumentError)):
            load_newest(url)


def test_what_s3_calls_a_bad_request():
    """Credentials that have expired, for example: s3fs makes an error of the machine of it."""
    asked = []

    class ClientError(Exception):
        def __init__(self):
            self.response = {"ResponseMetadata": {"HTTPStatusCode": 400}, "Error": {"Code": "400"}}

    def ask():
        asked.append(None)
        raise OSError(22, "Bad Request") from ClientError()

    with pytest.raises(ResourceError, match="Bad Request: with S3, the credentials have expired, or the bucket is in"):
        remote._call("s3://bucket/x", "it cannot be read", ask)
    assert len(asked) == 1


def test_bytes_that_are_not_those_that_were_saved(served, tmp_path):
    path = save({"w": torch.zeros(500_000)}, tmp_path / "served" / "a.safetensors")
    middle = path.stat().st_size // 2
    served.fault = lambda _handler, _path, start, data: data if start + len(data) < middle else data[:-1] + b"x"
    with pytest.raises(CheckpointError, match=r'a\.safetensors: tensor "w" at offset \d+ is damaged'):
        load_checkpoint(f"{served.url}/a.safetensors")


def test_another_range_than_was_asked_for(served, tmp_path, quick):
    """Of a part there is no digest that would tell."""
    path = save({"w": torch.arange(1_000_000)}, tmp_path / "served" / "a.safetensors")
    data, shifted = path.read_bytes(), [1]

    def shift(handler, _path, start, found):
        if handler.command == "HEAD" or len(found) < 1_000_000 or not shifted[0]:
            return found
        shifted[0] -= 1
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(found)))
        handler.send_header("Content-Range", f"bytes {start - 8}-{start - 9 + len(found)}/{len(data)}")
        handler.end_headers()
        handler.wfile.write(data[start - 8 : start - 8 + len(found)])
        return None

    served.fault = shift
    part = {"w": slice(1000, 900_000)}
    assert load_checkpoint(f"{served.url}/a.safetensors", slices=part)["w"][0] == 1000
    assert shifted == [0]
    shifted[0] = 1 << 30
    with pytest.raises(ResourceError, match=r"tried 5 times: OSError: the server sends 'bytes \d+-"):
        load_checkpoint(f"{served.url}/a.safetensors", slices=part)


def test_what_a_dead_server_has_is_not_said_to_be_damaged(tmp_path, quick):
    with servers.Server(tmp_path) as server:
        url = f"{server.url}/a.safetensors"
    found = CliRunner().invoke(app, ["checkpoint", "verify", url])
    assert (found.exit_code, found.output.startswith(f"not checked {url}")) == (1, True)
    found = CliRunner().invoke(app, ["checkpoint", "verify", url, "--json"])
    assert json.loads(found.output)["checkpoints"][0]["ok"] is None


def test_it_becomes_another_file_while_it_is_read(served, tmp_path):
    """The tag of each answer tells."""
    path = save({"w": torch.zeros(500_000)}, tmp_path / "served" / "a.safetensors")
    with open_checkpoint(f"{served.url}/a.safetensors") as found:
        path.unlink()
        save({"w": torch.ones(500_000)}, path)
        with pytest.raises(CheckpointError, match="was replaced or deleted while it was read: load again"):
            found["w"].read()


def test_it_becomes_a_shorter_file_while_it_is_read(served, tmp_path):
    path = save({"w": torch.zeros(500_000)}, tmp_path / "served" / "a.safetensors")
    with open_checkpoint(f"{served.url}/a.safetensors") as found:
        path.write_bytes(path.read_bytes()[:100])

        def answer(handler, _path, start, data):
            if data:
                return data
            handler.send_error(416)
            return None

        served.fault = answer
        with pytest.raises(CheckpointError, match="was replaced"):
            found["w"].read(np.s_[400_000:])


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("suffix", [".pt", ".old.pt", ".npz", ".safetensors"])
def test_a_file_that_is_replaced_between_two_requests(served, tmp_path, monkeypatch, suffix, at):
    """None is loaded half old and half new."""
    monkeypatch.setattr(locations, "_COPIED", 1 << 18)

    def write(path, value):
        path.parent.mkdir(exist_ok=True)
        state = {f"t{number}": torch.full((100_000,), value) for number in range(4)}
        if suffix == ".npz":
            np.savez(path, **state)
        elif suffix == ".safetensors":
            safetensors.torch.save_file(state, path)
        else:
            torch.save(state, path, _use_new_zipfile_serialization=suffix == ".pt")
        return path

    path, other = write(tmp_path / "served" / f"a{suffix}", 1), write(tmp_path / "b" / f"a{suffix}", 2)
    count = itertools.count(1)

    def replaces(handler, _path, start, data):
        if handler.command != "GET" or next(count) != at:
            return data
        end = start + len(data)
        os.replace(other, path)
        return path.read_bytes()[start:end]

    served.fault = replaces
    with contextlib.suppress(CheckpointError):
        found = load_checkpoint(f"{served.url}/a{suffix}", map=False)
        assert len({int(value) for each in found.values() for value in each}) == 1


def test_a_forked_child_reads_on(put, tmp_path):
    """Also what a thread of its parent was just fetching."""
    url = put(save({"w": torch.arange(500_000)}, tmp_path / "a.safetensors"))
    with open_checkpoint(url) as found:
        assert found["w"].read(np.s_[:2]).tolist() == [0, 1]
        opened = [each for each in gc.get_objects() if isinstance(each, remote.RemoteFile)]
        for each in opened:
            each._lock.acquire()
            each._blocks[7] = Future()
        process = multiprocessing.get_context("fork").Process(target=read_on, args=(found,))
        process.start()
        try:
            for each in opened:
                each._blocks.clear()
                each._lock.release()
            process.join(PATIENCE)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        assert found["w"].read().tolist() == list(range(500_000))


def read_on(found):
    assert found["w"].read(np.s_[250_000:250_002]).tolist() == [250_000, 250_001]
    assert found["w"].read().tolist() == list(range(500_000))


@pytest.mark.parametrize("url", ["s3://bucket//runs/a", "gs://bucket//a", "s3://bucket//"])
@pytest.mark.parametrize("load", [load_newest, load_checkpoint, list_checkpoints])
def test_an_empty_name_after_the_bucket(url, load):
    """S3's library finds nothing there, of what it has written itself."""
    with pytest.raises(ArgumentError, match="two slashes after the bucket"):
        load(url)


# --- which one, while the directory changes and servers fail


def run_of(path, steps, **options):
    with CheckpointWriter(path, **options) as writer:
        for step in steps:
            writer.save(state(step))


def test_the_newest_is_deleted_while_it_is_opened(served, tmp_path):
    """A newer one has come: it is loaded, not None."""
    run = tmp_path / "served" / "run"
    run_of(run, [1], keep_last=1)

    def once(handler, path, _start, data):
        if handler.command == "GET" and path.endswith("step-00000001.safetensors"):
            served.fault = None
            run_of(run, [2], keep_last=1)
            handler.send_error(404)
            return None
        return data

    for load in (load_newest, load_checkpoint):
        served.fault = once
        assert load(f"{served.url}/run")["step"] == 2
        shutil.rmtree(run)
        run_of(run, [1], keep_last=1)


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_the_list_is_replaced_while_it_is_read(served, tmp_path, grows, method):
    """As a whole: either one of the two is read."""
    run = tmp_path / "served" / "run"
    run_of(run, [1], keep_last=2)
    with CheckpointWriter(run) as writer:
        writer.save(state(2), alias="best")
    (run / "best").unlink()  # a link, which a copy does not have
    path = run / ".shmtensor.index"
    full = json.loads(path.read_bytes())
    lists = [json.dumps(full), json.dumps({**full, "saves": [*full["saves"], {**full["saves"][0], "name": "x" * 200}]})]

    def once(handler, asked, _start, data):
        if handler.command == method and asked.endswith(path.name):
            served.fault = None
            (tmp_path / "new").write_text(lists[grows])
            (tmp_path / "new").replace(path)
        return data

    for load in (load_newest, lambda url: load_checkpoint(f"{url}/best")):
        path.write_text(lists[not grows])
        served.fault = once
        assert load(f"{served.url}/run")["step"] == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_the_list_comes_as_a_whole(served, tmp_path, quick, monkeypatch, fault):
    """Half of it does not count as none."""
    run = tmp_path / "served" / "run"
    with CheckpointWriter(run) as writer:
        writer.save(state(2), alias="best")
    (run / "best").unlink()
    limit_requests(monkeypatch, fault)
    left = [1, 2]

    def fails(handler, asked, start, data):
        if handler.command == "GET" and asked.endswith(index.INDEX) and left:
            left.pop()
            return FAULTS[fault](handler, start, data)
        return data

    served.fault = fails
    assert load_checkpoint(f"{served.url}/run/best")["step"] == 2
    assert not left


def test_an_empty_list(put, tmp_path):
    """Servers have no range of an empty file."""
    run = tmp_path / "run"
    run_of(run, [1])
    (run / index.INDEX).write_bytes(b"")
    assert load_checkpoint(put(run))["step"] == 1


def test_a_list_that_is_too_long(served, tmp_path, monkeypatch):
    """It counts for nothing, as one that is damaged does; no more of it is read."""
    run = tmp_path / "served" / "run"
    run_of(run, [1, 2])
    monkeypatch.setattr(index, "MAX_LIST", 100)
    assert [found.aliases for found in list_checkpoints(f"{served.url}/run")] == [(), ()]


@pytest.mark.parametrize("form", ["file", "shards", "ranks"])
def test_as_many_requests_however_many_checkpoints(served, tmp_path, form):
    """For the newest, also by its aliases."""
    run, asked = tmp_path / "served" / "run", []
    options = {"file": {}, "shards": {"max_shard": 100_000}, "ranks": {"rank": 0, "world_size": 1}}[form]
    ways = [
        lambda url: load_checkpoint(url), lambda url: load_newest(url), lambda url: load_checkpoint(f"{url}/best"),
        lambda url: load_checkpoint(f"{url}/latest"),
    ]  # fmt: skip
    for steps in ([1, 2], range(3, 12)):
        with CheckpointWriter(run, **options) as writer:
            for step in steps:
                writer.save(state(step), alias="best")
        for path in run.iterdir():
            if path.is_symlink():
                path.unlink()  # as in a copy
        asked.append([])
        for load in ways:
            served.requests.clear()
            found = load(f"{served.url}/run")
            assert (found[0] if form == "ranks" else found)["step"] == steps[-1]
            asked[-1].append(len(served.requests))
    assert asked[0] == asked[1]


def test_what_the_list_does_not_name_comes_after_it(served, tmp_path):
    run = tmp_path / "served" / "run"
    run_of(run, [1, 2])
    save(state(9), run / "other.safetensors")
    assert load_newest(f"{served.url}/run")["step"] == 2
    for step in (1, 2):
        (run / f"step-0000000{step}.safetensors").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="passed over") as warned:
        assert load_newest(f"{served.url}/run")["step"] == 9
    assert len(warned) == 2
    with pytest.warns(RuntimeWarning, match="passed over") as warned:
        assert load_checkpoint(f"{served.url}/run")["step"] == 9
    assert len(warned) == 2


@pytest.mark.parametrize("code", [503, 403])
@pytest.mark.parametrize("what", [".shmtensor.index", "step-00000011.safetensors", "shmtensor.ranks.json"])
def test_a_server_that_fails_does_not_choose_an_older_one(served, tmp_path, quick, code, what):
    run = tmp_path / "served" / "run"
    if what == "shmtensor.ranks.json":
        for step in (8, 11):
            with CheckpointWriter(run, rank=0, world_size=1) as writer:
                writer.save(state(step))
    else:
        run_of(run, [8, 9, 10, 11])
    for path in run.iterdir():
        if path.name == "latest":
            path.unlink()

    def fault(handler, path, _start, data):
        return handler.send_error(code) if handler.command == "GET" and path.endswith(what) else data

    served.fault = fault
    for load in (load_newest, load_checkpoint):
        with pytest.raises(ResourceError):
            load(f"{served.url}/run")
    served.fault = None
    found = load_newest(f"{served.url}/run")
    assert found.get("step", None) == 11 or found[0]["step"] == 11


def test_copies_of_links_are_passed_by(put, tmp_path):
    """An upload that followed `latest` and `best` made files of them, which do not move."""
    run, copied = tmp_path / "run", tmp_path / "copied" / "run"
    run_of(run, [1])
    with CheckpointWriter(run) as writer:
        writer.save(state(2), alias="best")
    servers.copy(run, copied)
    for name in ("latest", "best"):
        shutil.copy(run / "step-00000001.safetensors", copied / name)
    url = put(copied)
    for name in ("", "/latest", "/best"):
        assert load_checkpoint(url + name)["step"] == 2, name


def test_the_newest_by_time(served, tmp_path):
    for step, changed in ((9, 1_000_000_000), (10, 2_000_000_000)):
        path = tmp_path / "served" / f"step-{step}.safetensors"
        safetensors.torch.save_file({"step": torch.tensor(step)}, path)
        os.utime(path, (changed, changed))
    assert load_newest(served.url + "/")["step"] == 10
    assert [found.time for found in list_checkpoints(served.url + "/")] == [2e9, 1e9]


@pytest.mark.parametrize("link", ["{}", "./{}", "/run/{}", "http://other/{}", "?C=N;O=D", "//[", "../run/{}"])
def test_links_of_a_listing(link):
    page = f'<a href="{link.format("step%3D9%2B1.npz")}">x</a><a href="sub/">x</a><a name=x>'.encode()
    keys = linked("http://host:1/run", page)
    ours = [] if "other" in link or "{}" not in link else ["http://host:1/run/step=9+1.npz"]
    assert keys == [*ours, "http://host:1/run/sub"]


def test_a_listing_is_read_in_linear_time():
    began = time.monotonic()
    for part in (b"<", b"<!", b"</", b"<a ", b"<!--", b"<?", b"<a href='", b"<![", b"<a href=x&", b"href =  ", b"<a/"):
        assert len(linked("http://host/run", part * 100_000)) <= 1
    assert linked("http://host/run", b"<a" + b" " * 1_000_000) == []
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    "found",
    ["", "x", "1 Jan 2000 00:00:00 +999999999999", "0001-01-01T00:00:00", "1 Jan 2000", float("inf"), float("nan"), []],
)
def test_times_that_are_none(found):
    assert changed_at({"Last-Modified": found}) in (0, 946684800 * 10**9)
    assert changed_at({"LastModified": found, "mtime": 2}) in (2 * 10**9, 946684800 * 10**9)


def test_names_that_are_quoted(served, tmp_path):
    with CheckpointWriter(tmp_path / "served" / "run") as writer:
        for name in ("step=9", "step=10", "a+b"):
            writer.save({"name": name}, name=name)
    url = f"{served.url}/run"
    assert load_checkpoint(url) == {"name": "a+b"}
    assert [found.name for found in list_checkpoints(url)] == [
        f"{name}.safetensors" for name in ("a+b", "step=10", "step=9")
    ]
    for name in ("step=9", "step%3D9.safetensors"):
        assert load_checkpoint(f"{url}/{name}") == {"name": "step=9"}


def test_one_bad_entry_of_a_directory(served, tmp_path):
    run = tmp_path / "served" / "run"
    run.mkdir()
    save(state(1), run / "good.safetensors")
    (run / "sub").mkdir()
    for name in ("a", "b"):
        (run / "sub" / f"{name}.safetensors.index.json").write_text("{}")
    assert load_newest(f"{served.url}/run")["step"] == 1
    assert sorted(bool(found.error) for found in list_checkpoints(f"{served.url}/run")) == [False, True]


@pytest.mark.parametrize("way", ["part", "whole"])
def test_a_file_of_another_program_is_replaced(put, tmp_path, way):
    """It has no digests: the server is asked whether it is the same file."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(100_000)}, path)
    url = put(path)
    with open_checkpoint(url) as found:
        assert not found["w"].read().any()
        path.unlink()
        safetensors.torch.save_file({"w": torch.ones(50_000)}, path)
        put(path)
        with pytest.raises((CheckpointError, ResourceError)):
            found["w"].read(np.s_[:10] if way == "part" else ...)


def test_few_requests_for_an_archive(served, tmp_path):
    many = {f"t{number}": torch.full((20_000,), number) for number in range(200)}
    save(many, tmp_path / "served" / "a.pt", "torch")
    with open_checkpoint(f"{served.url}/a.pt") as found:
        read = sum(end - start for method, _, start, end in served.requests if method == "GET")
        assert read < 4 * remote.BLOCK + 200 * 1000
        assert torch.equal(found["t7"].read(), many["t7"])


def test_file_systems_that_are_no_threads_business(tmp_path):
    """Those that are not asynchronous are called by one thread at a time: tar's files share one position."""
    import tarfile

    tensors = {f"t{number}": torch.full((1 << 19,), number) for number in range(8)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.safetensors", "a.safetensors")
    assert same(load_checkpoint(f"tar://a.safetensors::file://{tmp_path}/a.tar", readers=8), tensors)


def test_a_body_that_is_larger_than_asked_for(served, tmp_path, quick):
    """It is not kept: the request ends at once."""
    save(state(), tmp_path / "served" / "a.safetensors")
    sent = []

    def endless(handler, _path, start, data):
        if handler.command == "HEAD":
            return data
        handler.send_response(206)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            sent.append(1)
        return None

    served.fault = endless
    with pytest.raises(ResourceError, match=r"more than \d+ bytes came"):
        load_checkpoint(f"{served.url}/a.safetensors")
    assert len(sent) < 500


def _load_whole(url, module):
    load_checkpoint(url, map=False)


def _load_a_part(url, module):
    load_checkpoint(url, map=False, slices={"weight": np.s_[1:]})


def _load_rows(url, module):
    load_checkpoint(url, map=False, slices={"weight": np.s_[:, 1:2]})


def _verify(url, module):
    check(open_path(url), readers=4)


def _fill(url, module):
    load_into(module, url)


@pytest.fixture
def hanging(monkeypatch):
    """A file system of this machine's files without time-outs, whose reads of many bytes begin when `go` is set."""
    from fsspec.implementations.local import LocalFileSystem

    began, go = threading.Event(), threading.Event()

    class Hanging(LocalFileSystem):
        protocol = "hanging"

        def cat_file(self, path, start=None, end=None, **options):
            if end - start <= remote.BLOCK:
                return super().cat_file(path, start, end, **options)
            began.set()
            assert go.wait(PATIENCE)
            return super().cat_file(path, start, end, **options)

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    monkeypatch.setattr(reading, "REQUEST_MIN", 1 << 20)
    yield began, go
    go.set()


@contextlib.contextmanager
def interrupted_when(event):
    """Ctrl-C when the event is set, which must end what is within."""
    helper = threading.Thread(target=lambda: event.wait(PATIENCE) and os.kill(os.getpid(), signal.SIGINT))
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        event.set()
        helper.join()


LOADS = [_load_whole, _load_a_part, _load_rows, _verify, _fill]


@pytest.mark.parametrize("load", LOADS)
def test_ctrl_c_ends_the_requests(served, tmp_path, load):
    module = torch.nn.Linear(1000, 4000, bias=False)
    save({"weight": torch.zeros(4000, 1000)}, tmp_path / "served" / "a.safetensors")
    began = threading.Event()

    def hang(handler, _path, start, data):
        if start >= 4096 and handler.command == "GET":
            began.set()
            handler.server.over.wait(PATIENCE)
        return data

    served.fault = hang
    with interrupted_when(began):
        load(f"{served.url}/a.safetensors", module)


@pytest.mark.parametrize("load", LOADS)
def test_ctrl_c_does_not_wait_for_a_file_system_without_time_outs(hanging, tmp_path, load):
    """What comes afterwards is written nowhere."""
    began, go = hanging
    module = torch.nn.Linear(1000, 4000, bias=False)
    before = module.weight.detach().clone()
    path = save({"weight": torch.zeros(4000, 1000)}, tmp_path / "a.safetensors")
    with interrupted_when(began):
        load(f"hanging://{path}", module)
    assert not go.is_set()
    go.set()
    wait_until(lambda: not any(each.name.startswith("shmtensor checkpoint") for each in threading.enumerate()))
    assert torch.equal(module.weight, before)


# --- what cannot be


def test_packages_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DependencyError, match=r"pip install '\.\[remote\]'") as error:
        load_checkpoint("https://user:secret@host/a?token=secret")
    assert "secret" not in str(error.value)
    monkeypatch.undo()
    known = {"class": "no_such_package.X", "err": "Install it"}
    monkeypatch.setitem(sys.modules["fsspec.registry"].known_implementations, "nowhere", known)
    with pytest.raises(DependencyError, match="nowhere://bucket/a: Install it"):
        load_checkpoint("nowhere://bucket/a")
    with pytest.raises(ArgumentError, match="Protocol not known"):
        load_checkpoint("quux://bucket/a")
    with pytest.raises(ArgumentError, match="names no bucket or host"):
        load_checkpoint("s3:///bucket/a.safetensors")
    for call in (load_checkpoint, load_newest, lambda url: CheckpointWriter(tmp_path / "a", upload=url)):
        with pytest.raises(ArgumentError, match="has a bucket and no credentials") as raised:
            call("s3://user:secret@bucket/a")
        assert "secret" not in str(raised.value)


def test_a_url_of_this_machine_is_a_path(tmp_path):
    path = save(state(), tmp_path / "a.safetensors")
    assert same(load_checkpoint(f"file://{path}"), state())
    with open_checkpoint(f"file://{path}") as found:
        assert found.path == str(path)


def test_other_file_systems(tmp_path):
    """Whatever is registered, one that wraps another, and one that is not asynchronous."""
    import zipfile

    save(state(), tmp_path / "a.safetensors")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "a.safetensors", "inside/a.safetensors")
    assert same(load_checkpoint(f"zip://inside/a.safetensors::file://{tmp_path}/all.zip"), state())
    assert same(load_checkpoint(f"zip://inside::file://{tmp_path}/all.zip"), state())


def test_a_server_that_says_no_size(monkeypatch, tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/nosize/a.safetensors", save(state(), tmp_path / "a.safetensors").read_bytes())
    monkeypatch.setattr(fs, "info", lambda key: {"name": key, "type": "file", "size": None}, raising=False)
    try:
        with pytest.raises(CheckpointError, match="does not say how many bytes"):
            load_checkpoint("memory://nosize/a.safetensors")
    finally:
        monkeypatch.undo()
        fs.rm("/nosize", recursive=True)


def test_secrets_are_in_no_text(served, tmp_path):
    save(state(), tmp_path / "served" / "a.safetensors")
    url = served.url.replace("//", "//me:secret@") + "/a.safetensors?X-Amz-Signature=secret"
    with open_checkpoint(url) as found:
        assert same(found["model.bias"].read(), state()["model"]["bias"])
        assert found.path == f"{served.url}/a.safetensors"
        assert "secret" not in repr(found)
    for secret in (
        "http://me:p@ss@host/a",
        "http://me:se'cret@host/a?x=1&sig=ab)c",
        "https:/me:secret@host/a",
        "s3://k:s@b",
        "http://me:sec/ret@host/a",
        "http://me:sec?ret@host/a",
        "http://me:sec ret@host/a",
        "http://:s/e@cret@host/a",
    ):
        assert remote.without_secrets(secret).partition(":")[2].lstrip("/") in ("host/a", "b")
    assert remote.without_secrets(f"failed for {url} twice") == f"failed for {served.url}/a.safetensors twice"
    assert remote.without_secrets("zip://a::http://me:sec/ret@host/b") == "zip://a::http://host/b"
    for text in (
        "http://host:80/a@b",
        "http://host: no a@b",
        "s3://arn:aws:s3:us:1:accesspoint/a@b",
        "zip://a::s3://b/k@1",
    ):
        assert remote.without_secrets(text) == text


@pytest.mark.parametrize("call", [load_checkpoint, load_newest, list_checkpoints, open_checkpoint, "upload"])
@pytest.mark.parametrize(
    "url", ["http://me:a1/b2@host/a", "zip://a::http://me:a1?b2@host/a", "redis://:a1 b2@host/0/a"]
)
def test_a_password_that_ends_before_its_end_is_refused(tmp_path, call, url):
    """Its beginning would be taken for a port, and be in the libraries' errors."""
    with pytest.raises(ArgumentError, match="percent-encode") as raised:
        CheckpointWriter(tmp_path / "a", upload=url) if call == "upload" else call(url)
    assert not {"me", "a1", "b2"} & set(re.findall(r"\w+", str(raised.value)))


@pytest.mark.parametrize("load", [lambda url: load_checkpoint(url, from_memory=True), CheckpointWriter])
def test_what_needs_a_directory_of_this_machine(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="is a URL"):
        load("memory://run")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_looks_like_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    save(state(), tmp_path / "s3:" / "a.safetensors")
    assert same(load_checkpoint("s3:/a.safetensors"), state())
