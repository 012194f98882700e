"""`shmtensor checkpoint`: exit codes, JSON, and what it tells people."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from shmtensor import CheckpointError, CheckpointWriter, load_checkpoint
from shmtensor.checkpoint import convert
from shmtensor.checkpoint.formats import detect
from shmtensor.memory.locks import LockFile

from ..commands import app
from ..faults.interrupts import each_boundary
from ..waiting import PATIENCE
from .state_files import SUFFIX, same, save

ROOT = Path(__file__).parents[2]


def run_and_die(point, *arguments):
    """`shmtensor checkpoint` with these arguments, in a process that is killed at a crash point."""
    code = f"""
        from tests.faults import points
        points.install("shmtensor.checkpoint")
        points.arm({point!r}, "kill")
        from shmtensor.cli.main import make_app
        make_app(["checkpoint"])({["checkpoint", *map(str, arguments)]!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == -9


@pytest.fixture
def run():
    def invoke(*arguments, code=0, columns=200):
        environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env=environment)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    return invoke


@pytest.fixture
def state():
    weight = torch.randn(30, 40)
    return {"model": {"w": weight, "t": weight.t()}, "rng": np.arange(9), "step": 3, "e": torch.empty(0)}


def test_info(run, state, tmp_path):
    path = save(state, tmp_path / "a.safetensors", meta={"run": "x[y]"})
    text = run("info", path)
    assert "safetensors" in text
    assert "4 tensors" in text
    assert "x[y]" in text
    assert any(line.split() == ["model.w", "float32", "[30,", "40]", "4800"] for line in text.splitlines())
    parts = json.loads(run("info", path, "--json"))
    assert parts["native"] is True
    assert parts["meta"] == {"run": "x[y]"}
    assert [each["name"] for each in parts["tensors"]] == ["model.w", "model.t", "rng", "e"]
    assert parts["tensors"][0]["offset"] == parts["tensors"][1]["offset"] == detect(path).open(path).places[0][1]
    safetensors.torch.save_file({f"x{n}": torch.ones(1) for n in range(50)}, tmp_path / "b.safetensors")
    assert "and 10 more: --all" in run("info", tmp_path / "b.safetensors")
    assert "x49" in run("info", tmp_path / "b.safetensors", "--all")
    assert "no such checkpoint" in run("info", tmp_path / "none", code=1)
    (tmp_path / "c.pt").write_bytes(b"PK\x03\x04")
    assert "error: " in run("info", tmp_path / "c.pt", code=1)


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_verify(format, run, state, tmp_path):
    path = save(state, tmp_path / f"a{SUFFIX[format]}", format)
    assert f"ok {path}" in run("verify", path)
    assert json.loads(run("verify", path, "--json"))["checkpoints"][0]["ok"] is True
    offset = detect(path).open(path).places[0][1]
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 1
    path.write_bytes(data)
    text = run("verify", path, code=1)
    assert f'tensor "model.w", "model.t" at offset {offset} is damaged' in text
    (report,) = json.loads(run("verify", path, "--json", "--readers", 3, code=1))["checkpoints"]
    assert (report["ok"], report["error"], report["damaged"][0]["offset"]) == (False, None, offset)
    path.write_bytes(data[:-5000])
    text = run("verify", path, tmp_path / "none", code=1)
    assert f"bad {path}" in text
    assert f"not checked {tmp_path / 'none'}" in text
    assert "there is no such checkpoint" in text


def test_verify_files_of_others(run, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    torch.save({"a": torch.ones(999)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", a=np.ones(999))
    torch.save({"a": torch.ones(999)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "old.pt"):
        assert "no digests: only its structure was checked" in run("verify", tmp_path / name)
    for name in ("a.pt", "a.npz"):  # zip archives
        assert "no digests: its structure and the CRC-32 of members were checked" in run("verify", tmp_path / name)
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:3000] + b"x" + data[3001:])
    assert "bad" in run("verify", tmp_path / "a.npz", code=1)
    run("verify", tmp_path / "a.pt", "--readers", 0, code=2)


@pytest.mark.parametrize("source", sorted(SUFFIX))
def test_convert_keeps_the_state(source, run, state, tmp_path):
    path = save(state, tmp_path / f"a{SUFFIX[source]}", source, meta={"m": 1})
    digests = set()
    for target, suffix in SUFFIX.items():
        made = json.loads(run("convert", path, tmp_path / f"b{suffix}", "--json"))
        digests.add(made["digest"])
        assert os.path.getsize(made["path"]) == made["bytes"]
        opened = detect(tmp_path / f"b{suffix}").open(tmp_path / f"b{suffix}")
        assert (opened.format, opened.plan.meta) == (target, {"m": 1})
        assert same(load_checkpoint(tmp_path / f"b{suffix}", map=False), state)
    assert len(digests) == 1
    run("convert", path, tmp_path / "sharded", "--max-shard", "4KiB")
    assert same(load_checkpoint(tmp_path / "sharded", map=False), state)
    assert json.loads(run("info", tmp_path / "sharded", "--json"))["digest"] in digests
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_convert_files_of_others(run, tmp_path):
    tensors = {"a": torch.randn(5), "b": torch.arange(3)}
    torch.save({"model": tensors, "n": 4}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert same(load_checkpoint(tmp_path / "a.safetensors", map=False), {"model": tensors, "n": 4})
    assert same(safetensors.torch.load_file(tmp_path / "a.safetensors")["model.a"], tensors["a"])


def test_convert_refuses(run, state, tmp_path):
    path = save(state, tmp_path / "a.safetensors")
    before = path.read_bytes()
    assert "exists" in run("convert", path, path, code=1)
    assert "no suffix that says the format" in run("convert", path, tmp_path / "b.bin", code=2)
    assert "is not known" in run("convert", path, tmp_path / "b.bin", "--format", "hdf5", code=2)
    assert "is not a size" in run("convert", path, tmp_path / "b", "--max-shard", "much", code=2)
    assert "a .pt is one file" in run("convert", path, tmp_path / "b.pt", "--max-shard", "1MiB", code=2)
    assert "No such file" in run("convert", path, tmp_path / "no" / "b.pt", code=1)
    data = bytearray(before)
    data[-1] ^= 1
    path.write_bytes(data)
    assert "is damaged" in run("convert", path, tmp_path / "b.pt", code=1)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors"]
    path.write_bytes(before)
    run("convert", path, tmp_path / "b.pt")
    run("convert", path, tmp_path / "b.pt", "--overwrite")
    assert same(load_checkpoint(tmp_path / "b.pt"), state)


def test_convert_never_replaces_a_link_that_a_writer_moves(run, state, tmp_path):
    path = tmp_path / "a"
    with CheckpointWriter(path) as writer:
        file = writer.save(state, alias="b.npz").durable.result(60).path
    for name in ("latest", "b.npz"):
        assert "moves it when it saves" in run("convert", file, path / name, "--format", "npz", "--overwrite", code=2)
        assert (path / name).is_symlink()
    (path / "own.npz").symlink_to(os.path.basename(file))
    run("convert", file, path / "own.npz", "--overwrite")
    assert same(load_checkpoint(path / "own.npz"), state)
    assert sorted(each for each in os.listdir(path) if not each.startswith(".")) == [
        "b.npz", "latest", "own.npz", os.path.basename(file)
    ]  # fmt: skip


def test_ls(run, state, tmp_path):
    assert "no checkpoints" in run("ls", tmp_path)
    for number in (1, 2):
        path = save(state, tmp_path / f"step-{number}.safetensors")
        os.utime(path, ns=(0, number * 10**9))
    (tmp_path / "step-3.npz").write_bytes(b"PK\x03\x04 torn")
    os.utime(tmp_path / "step-3.npz", ns=(0, 3 * 10**9))
    (tmp_path / "latest").symlink_to("step-2.safetensors")
    rows = json.loads(run("ls", tmp_path, "--json"))["checkpoints"]
    assert [row["name"] for row in rows] == ["step-3.npz", "step-2.safetensors", "step-1.safetensors"]
    assert [row["latest"] for row in rows] == [False, True, False]
    assert rows[0]["error"]
    assert (rows[1]["format"], rows[1]["tensors"], rows[1]["error"]) == ("safetensors", 4, None)
    text = run("ls", tmp_path)
    assert "latest" in text.splitlines()[2]
    narrow = run("ls", tmp_path, columns=80).splitlines()
    header, damaged, newest, oldest, *rest = narrow
    for row, name, cells in (
        (damaged, "step-3.npz", ("error",)),
        (newest, "step-2.safetensors", ("safetensors", "4", "latest")),
        (oldest, "step-1.safetensors", ("safetensors", "4")),
    ):
        assert row.startswith(name)
        assert [cell for cell in cells if cell in row.split()] == list(cells)
        assert row.index(cells[0], len(name)) >= header.index("format")
    assert " ".join(rest).split() == ["step-3.npz:", *rows[0]["error"].split()]
    run("ls", tmp_path / "none", code=1)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "step-3.npz")


def test_the_json_has_no_nan_and_names_are_no_emoji(run, tmp_path):
    with CheckpointWriter(tmp_path / "run:100:a") as writer:
        made = writer.save({"attn:v:weight": torch.zeros(3)}, meta={"x": float("nan"), "y": [1, float("inf")]})
        path = made.durable.result(60).path

    def refuse(text: str) -> None:
        raise ValueError(text)

    found = json.loads(run("info", path, "--json"), parse_constant=refuse)
    assert found["meta"] == {"x": "nan", "y": [1, "inf"]}
    text = run("info", path)
    assert "attn:v:weight" in text
    assert "run:100:a" in text


def test_an_empty_path_is_refused(run, state, tmp_path, monkeypatch):
    save(state, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    for command in ("info", "verify", "ls"):
        assert "the path is empty" in run(command, "", code=1)


def test_what_a_dead_conversion_for_a_url_left_is_removed(run, state, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    source = save(state, tmp_path / "a.safetensors")
    for name in ("dead", "alive"):
        (temporary / f"shmtensor-convert-{name}" / "shards").mkdir(parents=True)
        (temporary / f"shmtensor-convert-{name}" / ".lock").touch()
    with contextlib.closing(LockFile(str(temporary / "shmtensor-convert-alive" / ".lock"))) as lock:
        assert lock.try_exclusive(0)
        run("convert", source, f"memory://{tmp_path.name}/b.npz")
        assert os.listdir(temporary) == ["shmtensor-convert-alive"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["scratch.made", "scratch.locked", "convert.begun", "scratch.emptied"])
def test_a_conversion_for_a_url_that_is_killed(run, state, tmp_path, monkeypatch, point):
    """As it makes its temporary directory, while that is there, and as it removes it: the next one removes what is
    left, and the source is as it was."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    source = save(state, tmp_path / "a.safetensors")
    before, target = source.read_bytes(), f"memory://{tmp_path.name}/b"
    arguments = ["convert", source, target, "--max-shard", "4KiB"]
    run_and_die(point, *arguments)
    assert len(os.listdir(tmp_path / "temporary")) == 1
    run(*arguments)
    assert os.listdir(tmp_path / "temporary") == []
    assert same(load_checkpoint(target), state)
    assert source.read_bytes() == before


def test_a_conversion_for_a_url_that_is_interrupted(tmp_path, monkeypatch):
    """At any boundary of what makes and removes its temporary directory: the next one removes what is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def use():
        with convert._scratch() as folder:
            (folder / "shards").mkdir()
            os.mknod(folder / "shards" / "0")  # one call, unlike `touch`

    for _ in each_boundary(use):
        with convert._scratch() as folder:
            assert [tmp_path / name for name in os.listdir(tmp_path)] == [folder]
        assert os.listdir(tmp_path) == []


def test_an_empty_directory_of_a_dead_conversion_is_removed(run, state, tmp_path):
    """It died before it made the first file there, or as it removed the last one."""
    (tmp_path / ".b.convert-1.tmp").mkdir()
    run("convert", save(state, tmp_path / "a.safetensors"), tmp_path / "b", "--max-shard", "4KiB")
    assert {each.name for each in tmp_path.iterdir()} == {"a.safetensors", "b"}


def test_a_temporary_directory_that_another_conversion_takes_for_a_dead_one(run, state, tmp_path, monkeypatch):
    """In the moments before it is locked: then another one is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    source, swept = save(state, tmp_path / "a.safetensors"), []

    def sweep(lock, byte):
        if len(swept) < 2:
            swept.append(byte)
            with convert._scratch():
                pass
        return may(lock, byte)

    def sweep_at_once(*arguments, **options):
        made = make(*arguments, **options)
        if len(swept) == 1:
            with convert._scratch():
                pass
        return made

    may, make = LockFile.try_exclusive, tempfile.mkdtemp
    monkeypatch.setattr(LockFile, "try_exclusive", sweep)
    monkeypatch.setattr(tempfile, "mkdtemp", sweep_at_once)
    run("convert", source, f"memory://{tmp_path.name}/b.npz")
    assert len(swept) == 2
    assert os.listdir(tmp_path / "temporary") == []


def test_names_of_others_reach_no_terminal_as_they_are(run, tmp_path):
    """Those of tensors, of files and in meta: whoever wrote the checkpoint chose them."""
    name = "w\x1b[2J\n[red]x"
    path = tmp_path / f"{name}.safetensors"
    safetensors.torch.save_file({name: torch.zeros(2)}, path, metadata={name: name})
    (tmp_path / "a\x1b]0;b.safetensors").write_bytes(b"damaged")
    for command, code in (("info", 0), ("verify", 0), ("ls", 0)):
        text = run(command, tmp_path if command == "ls" else path, code=code)
        assert "w\\x1b[2J\\n[red]x" in text
        assert all(line.isprintable() for line in text.splitlines())
    text = run("verify", tmp_path / "a\x1b]0;b.safetensors", code=1)
    assert "a\\x1b]0;b" in text
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\udc80" in run("info", tmp_path / os.fsdecode(b"\x80.safetensors"), code=1)
