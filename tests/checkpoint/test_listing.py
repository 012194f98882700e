"""What training loops expect of a directory: a list with metrics, the best ones kept, names that move, resuming."""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shmtensor import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointWriter,
    ResourceError,
    list_checkpoints,
    load_arrays,
    load_checkpoint,
    load_newest,
)
from shmtensor.checkpoint import index, listing, names, opening, process_handle
from shmtensor.checkpoint.directory import Directory, Keep
from shmtensor.checkpoint.index import Saved

from ..commands import app
from .state_files import SUFFIX, save

PATIENCE = 120.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


def state_of(number: int) -> dict:
    return {"w": np.full(1000, number), "step": number}


def put(path: Path, step: int, *, alias: str = "", name: str = "", **metrics: float) -> Saved:
    """A save as the writing process commits it, without that process."""
    directory = Directory(str(path))
    file = save(state_of(step), path / (name or f"step-{step:08d}.safetensors"))
    entry = Saved(
        file.name, "0" * 16, step, step, file.stat().st_size, "0" * 16,
        (("", file.stat().st_size, file.stat().st_mtime_ns),), metrics, alias,
    )  # fmt: skip
    directory.record(entry)
    assert directory.point_latest(file.name) == directory.point_aliases() == ""
    return entry


def steps_in(path: Path) -> list[int]:
    return sorted(int(each.name[5:13]) for each in path.glob("step-*"))


# --- the list


@pytest.mark.slow
def test_a_writer_s_checkpoints_are_listed(tmp_path, own_channels):
    path = tmp_path / "a"
    with CheckpointWriter(path, keep_last=1, keep_best=("loss", "min", 2)) as writer:
        for step, loss in enumerate([0.9, 0.4, math.nan, 0.6, np.float32(0.75), torch.tensor(0.8)]):
            writer.save(state_of(step), metrics={"loss": loss}, alias="best" if step in (0, 1) else None)
        best = path / "best"
        writer.save(state_of(6), metrics={f"{number:0200d}": number for number in range(100)}).durable.result(PATIENCE)
    found = list_checkpoints(path)
    assert [info.step for info in found] == [6, 3, 1]
    assert [info.aliases for info in found] == [("latest",), (), ("best",)]
    assert [info.metrics for info in found][1:] == [{"loss": 0.6}, {"loss": 0.4}]
    assert len(found[0].metrics) == 100
    assert load_arrays(best)["step"] == 1
    for info in found:
        assert (info.format, info.error, info.path) == ("safetensors", None, str(path / info.name))
        assert info.nbytes == os.path.getsize(info.path)
        assert info.time == os.stat(info.path).st_mtime_ns / 1e9
    assert load_newest(path)["step"] == 6


@pytest.mark.slow
def test_another_run_goes_on_with_the_list(tmp_path, own_channels):
    """A name moves from a file to a directory of shards."""
    for step, loss in enumerate([0.6, 0.4, 0.9]):
        put(tmp_path, step, loss=loss, alias="best" if step == 1 else "")
    with CheckpointWriter(tmp_path, keep_last=1, keep_best=("loss", "max", 1), max_shard=4000) as writer:
        handle = writer.save(state_of(9), metrics={"loss": 0.5}, alias="best")
        assert handle.durable.result(PATIENCE)
    assert [info.step for info in list_checkpoints(tmp_path)] == [9, 2]
    assert load_arrays(tmp_path / "best")["step"] == 9
    assert (tmp_path / os.readlink(tmp_path / "best")).is_dir()
    assert writer.statistics().deleted == 2


def test_files_that_nobody_listed_and_damaged_ones(tmp_path):
    put(tmp_path, 3, loss=0.5, top=math.inf)
    save(state_of(7), tmp_path / "copied.safetensors")
    save({"w": np.ones(3)}, tmp_path / "meta.safetensors", meta={"step": 5})
    save(np.ones(3), tmp_path / "bare.npz", "npz")
    torch.save({"w": torch.ones(3)}, tmp_path / "foreign.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    (tmp_path / "index.safetensors").mkdir()
    (tmp_path / "index.safetensors" / "model.safetensors.index.json").write_text("{}")
    found = {info.name: info for info in list_checkpoints(tmp_path)}
    assert {name: info.step for name, info in found.items()} == {
        "step-00000003.safetensors": 3, "copied.safetensors": 7, "meta.safetensors": 5, "bare.npz": None,
        "foreign.pt": None, "torn.safetensors": None, "index.safetensors": None,
    }  # fmt: skip
    assert [name for name, info in found.items() if info.error] == [
        name for name in found if name in ("torn.safetensors", "index.safetensors")
    ]
    assert found["step-00000003.safetensors"].metrics == {"loss": 0.5, "top": math.inf}
    assert found["copied.safetensors"].metrics == {}
    assert next(iter(found)) == "step-00000003.safetensors"  # what is in the list comes first
    done = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), "--json"])
    rows = {row["name"]: row for row in json.loads(done.output, parse_constant=pytest.fail)["checkpoints"]}
    assert rows["step-00000003.safetensors"]["metrics"] == {"loss": 0.5, "top": "inf"}
    assert rows["step-00000003.safetensors"]["aliases"] == ["latest"]
    assert rows["torn.safetensors"]["error"]
    shown = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "loss=0.5, top=inf" in shown
    with pytest.raises(FileNotFoundError):
        list_checkpoints(tmp_path / "none")


def test_a_file_in_place_of_a_listed_one_has_not_its_metrics(tmp_path):
    put(tmp_path, 3, loss=0.5)
    save({"w": np.ones(9), "step": 8}, tmp_path / "step-00000003.safetensors")
    (info,) = list_checkpoints(tmp_path)
    assert (info.step, info.metrics) == (8, {})


def test_a_copied_directory_keeps_its_metrics(tmp_path):
    put(tmp_path, 3, loss=0.5)
    os.utime(tmp_path / "step-00000003.safetensors", ns=(5, 5))
    assert list_checkpoints(tmp_path)[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize(
    "change",
    [{"metrics": []}, {"metrics": {"a": "x"}}, {"metrics": {"a": None}}, {"metrics": {"a": True}},
     {"metrics": {"a": []}},
     {"metrics": {str(number): 1 for number in range(1000)}}, {"alias": "../x"},
     {"alias": ".x"}, {"alias": 7},
     {"alias": None}, {"metrics": {"a": 10**400}}],
    ids=lambda change: f"{change!r:.40}",
)  # fmt: skip
def test_hostile_metrics_and_names_are_no_list(tmp_path, change, caplog):
    put(tmp_path, 3, loss=0.5)
    document = json.loads((tmp_path / index.INDEX).read_text())
    document["saves"][0] |= change
    (tmp_path / index.INDEX).write_text(json.dumps(document))
    assert index.read(str(tmp_path)) == []
    assert "cannot be read" in caplog.text
    assert list_checkpoints(tmp_path)[0].metrics == {}


def test_links_that_lead_nowhere(tmp_path):
    put(tmp_path, 3)
    links = {"a.safetensors": "a.safetensors", "b": "c", "c": "b", "d.npz": "/", "e.pt": "x" * 300, "f": "x" * 300}
    for name, leads_to in links.items():
        (tmp_path / name).symlink_to(leads_to)
    for leads_to in ("x" * 300, "latest", "a.safetensors"):
        (tmp_path / "latest").unlink(missing_ok=True)
        (tmp_path / "latest").symlink_to(leads_to)
        assert [found.step for found in list_checkpoints(tmp_path) if found.error is None] == [3]
        assert load_newest(tmp_path)["step"] == 3
        assert load_checkpoint(tmp_path)["step"] == 3


def test_a_list_of_an_earlier_release(tmp_path):
    """Without metrics and second names."""
    put(tmp_path, 3)
    document = json.loads((tmp_path / index.INDEX).read_text())
    del document["saves"][0]["metrics"], document["saves"][0]["alias"]
    (tmp_path / index.INDEX).write_text(json.dumps(document))
    (entry,) = index.read(str(tmp_path))
    assert (entry.metrics, entry.alias) == ({}, "")


# --- what stays


@pytest.mark.parametrize(
    ("keep_best", "left"),
    [(None, [5, 6]), (("loss", "min", 1), [1, 5, 6]), (("loss", "min", 3), [0, 1, 2, 5, 6]),
     (("loss", "max", 2), [3, 4, 5, 6]), (("other", "max", 2), [5, 6]), (("loss", "min", 100), [0, 1, 2, 3, 4, 5, 6])],
)  # fmt: skip
def test_the_best_stay(tmp_path, keep_best, left):
    """Of equal ones the older (1, not 2); what has no metric, or nan, is never one of them."""
    for step, loss in enumerate([0.5, 0.1, 0.1, 0.9, math.inf, math.nan]):
        put(tmp_path, step, loss=loss)
    put(tmp_path, 6)
    directory = Directory(str(tmp_path))
    deleted, failed = directory.retain(Keep(2, best=keep_best))
    assert (len(deleted), failed) == (7 - len(left), [])
    assert steps_in(tmp_path) == left
    assert [entry.step for entry in index.read(str(tmp_path))] == left
    assert directory.retain(Keep(2, best=keep_best)) == ([], [])


def test_what_a_name_leads_to_stays(tmp_path):
    for step in range(5):
        put(tmp_path, step, alias={0: "first", 1: "best", 2: "best"}.get(step, ""))
    (tmp_path / "first").unlink()  # the list still says whose it is
    Directory(str(tmp_path)).retain(Keep(1))
    assert steps_in(tmp_path) == [0, 2, 4]
    assert load_arrays(tmp_path / "best")["step"] == 2
    assert load_arrays(tmp_path / "first")["step"] == 0
    put(tmp_path, 7, alias="first")
    Directory(str(tmp_path)).retain(Keep(1))
    assert steps_in(tmp_path) == [2, 7]
    assert load_arrays(tmp_path / "first")["step"] == 7


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep_best": ("loss", "min", 3)}, "pass keep_last as well"),
        ({"keep_last": 1, "keep_best": ("loss", "least", 3)}, "pass the name of a metric"),
        ({"keep_last": 1, "keep_best": ("loss", "min", 0)}, "pass the name of a metric"),
        ({"keep_last": 1, "keep_best": ("loss", "min", True)}, "pass the name of a metric"),
        ({"keep_last": 1, "keep_best": ("loss", "min")}, "pass the name of a metric"),
        ({"keep_last": 1, "keep_best": "loss"}, "pass the name of a metric"),
    ],
)
def test_what_keep_best_does_not_take(tmp_path, options, error):
    with pytest.raises(ArgumentError, match=error):
        CheckpointWriter(tmp_path, **options)


def test_one_at_a_time_is_open(tmp_path, monkeypatch):
    """Files of other programs may be in memory as a whole, and long descriptions take much of it."""
    for step in range(3):
        put(tmp_path, step)
        torch.save({"w": torch.ones(3)}, tmp_path / f"{step}.pt")
        np.savez(tmp_path / f"{step}.npz", w=np.ones(3))
    opened: list[weakref.ref] = []
    open_listed = opening.open_listed

    def watched(path, opener):
        assert [each for each in opened if each() is not None] == []
        made = open_listed(path, opener)
        opened.append(weakref.ref(made))
        return made

    monkeypatch.setattr(listing, "open_listed", watched)
    assert len(list_checkpoints(tmp_path)) == len(opened) == 9
    opened.clear()
    done = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), "--json"])
    assert {row["tensors"] for row in json.loads(done.stdout)["checkpoints"]} == {1}
    assert len(opened) == 9


# --- names that move


def test_without_links_the_list_says_what_a_name_means(tmp_path, monkeypatch):
    put(tmp_path, 1, alias="best")
    put(tmp_path, 2)

    def refuse(*args):
        raise PermissionError(1, "no links here", args[1])

    monkeypatch.setattr(os, "symlink", refuse)
    path = save(state_of(3), tmp_path / "step-00000003.safetensors")
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    directory = Directory(str(tmp_path))
    directory.record(Saved(path.name, "0" * 16, 3, 3, size, "0" * 16, (("", size, changed),), {}, "best"))
    assert "no links here" in directory.point_aliases()
    assert not os.path.lexists(tmp_path / "best")  # it led to an older one
    assert load_arrays(tmp_path / "best")["step"] == 3
    assert list_checkpoints(tmp_path)[0].aliases == ("best",)
    monkeypatch.undo()
    put(tmp_path, 4)  # any later save completes what failed
    assert os.readlink(tmp_path / "best") == path.name


def test_a_name_whose_checkpoint_is_gone_means_no_other(tmp_path):
    entry = put(tmp_path, 1, alias="best")
    put(tmp_path, 2)
    (tmp_path / entry.name).unlink()
    with pytest.raises(FileNotFoundError, match="step-00000001"):
        load_arrays(tmp_path / "best")
    assert load_arrays(tmp_path)["step"] == 2
    put(tmp_path, 3, alias="best")
    assert load_arrays(tmp_path / "best")["step"] == 3


CHANGES = {
    "touched": lambda file: os.utime(file),
    "truncated": lambda file: os.truncate(file, 100),
    "deleted": lambda file: file.unlink(),
    "renamed": lambda file: file.rename(file.with_name("mine.safetensors")),
    "withdrawn": lambda file: (file.rename(file.with_name("mine.safetensors")), (file.parent / "best").unlink()),
}


@pytest.mark.parametrize("keep_last", [None, 1, 2])
@pytest.mark.parametrize("how", CHANGES)
def test_a_name_goes_back_to_no_older_checkpoint(tmp_path, how, keep_last):
    """Whatever becomes of the newest one that was given it, and however many saves follow."""
    put(tmp_path, 1, alias="best")
    second = put(tmp_path, 2, alias="best")
    CHANGES[how](tmp_path / second.name)
    for step in (3, 4):
        put(tmp_path, step)
        Directory(str(tmp_path)).retain(Keep(keep_last))
        assert (os.readlink(tmp_path / "best") if how != "withdrawn" else second.name) == second.name
    assert os.path.lexists(tmp_path / "best") == (how != "withdrawn")
    if how == "touched":
        assert load_arrays(tmp_path / "best")["step"] == 2
    else:
        with pytest.raises(CheckpointError if how == "truncated" else FileNotFoundError):
            load_arrays(tmp_path / "best")
    put(tmp_path, 5, alias="best")
    assert load_arrays(tmp_path / "best")["step"] == 5


def test_a_name_of_a_file_that_is_used_again(tmp_path):
    """The checkpoint that had it before had an alias, and has it no more; nor has an older one."""
    put(tmp_path, 1, alias="best")
    (tmp_path / put(tmp_path, 2, alias="best").name).unlink()
    (tmp_path / "best").unlink()
    put(tmp_path, 2)
    assert not os.path.lexists(tmp_path / "best")
    assert [(entry.step, entry.alias) for entry in index.read(str(tmp_path))] == [(1, ""), (2, "")]


@pytest.mark.parametrize("form", ["tmp", "ranks"])
def test_a_save_without_its_name_has_no_other_one(tmp_path, form):
    """Without links, too: while it is unnamed, and when the next writer has removed what it left."""
    put(tmp_path, 1, alias="best")
    (tmp_path / "best").unlink()
    directory = Directory(str(tmp_path))
    name, writer = "step-00000002.safetensors", "1" * 16
    hidden = tmp_path / (f".{name}.{writer}-2.tmp" if form == "tmp" else f".{name}.{writer}.ranks")
    hidden.touch()
    directory.record(Saved(name, writer, 2, 2, 10, "0" * 16, (("", 10, 1),), {}, "best"))
    assert load_arrays(tmp_path / "best")["step"] == 1
    assert [each.aliases for each in list_checkpoints(tmp_path)] == [("best", "latest")[::-1]]
    directory.retain(Keep(1))
    if form == "tmp":
        directory.sweep("2" * 16, lambda number: True)
    else:  # as `Votes` does, when it cannot get its name
        directory.withdraw({(name, writer, 2)})
        hidden.unlink()
    assert [entry.step for entry in index.read(str(tmp_path))] == [1]
    assert load_arrays(tmp_path / "best")["step"] == 1
    put(tmp_path, 3)
    directory.retain(Keep(1))
    assert load_arrays(tmp_path / "best")["step"] == 1


def test_a_name_follows_an_exchange(tmp_path):
    """One save with two names, while a file is replaced by another one: the list says the same after any step."""
    put(tmp_path, 1, alias="best")
    old = put(tmp_path, 2, alias="best")
    (tmp_path / "best").unlink()
    directory, new = Directory(str(tmp_path)), "new.safetensors"
    made = tmp_path / ".new.tmp"
    made.write_bytes((tmp_path / old.name).read_bytes())
    os.utime(made, ns=(old.files[0][2],) * 2)

    def named() -> str:
        return index.aliases(index.read(str(tmp_path)), str(tmp_path))["best"].name

    directory.succeed(old.name, new, str(made), "")
    assert named() == old.name
    made.rename(tmp_path / new)
    assert named() == new
    (tmp_path / old.name).unlink()
    assert named() == new
    directory.retain(Keep(2))
    assert named() == new
    assert [entry.name for entry in index.read(str(tmp_path))] == ["step-00000001.safetensors", new]


def test_a_copy_without_links_and_times_is_as_the_directory(tmp_path):
    """Listed, found by its names, and resumed from: what the list says of it stays, and its files are not deleted."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    put(run, 1, alias="best", loss=0.1)
    put(run, 2, loss=0.5)
    for path in run.iterdir():
        if not path.is_symlink():
            (copy / path.name).write_bytes(path.read_bytes())
    os.utime(copy / "step-00000001.safetensors", ns=(1, 1))
    os.utime(copy / "step-00000002.safetensors", ns=(1, 1))
    assert [info.metrics for info in list_checkpoints(copy)] == [{"loss": 0.5}, {"loss": 0.1}]
    assert list_checkpoints(copy)[1].aliases == ("best",)
    assert load_arrays(copy / "best")["step"] == 1
    for step in (3, 4):
        put(copy, step, loss=step)
        Directory(str(copy)).retain(Keep(1, best=("loss", "min", 1)))
    assert [(info.step, info.metrics["loss"]) for info in list_checkpoints(copy)] == [(4, 4), (2, 0.5), (1, 0.1)]
    assert os.readlink(copy / "best") == "step-00000001.safetensors"


@pytest.mark.slow
def test_a_save_that_fails_has_no_name(tmp_path, own_channels, monkeypatch):
    """What could not get its name is not in the list any more, and the alias stays where it was."""
    monkeypatch.chdir(ROOT)
    taken = str(tmp_path / "step-00000002.safetensors")
    launch = (
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        f"points.arm('commit.recorded', lambda: open({taken!r}, 'x'), 2)\n"
    )
    monkeypatch.setattr(process_handle, "LAUNCH", launch + process_handle.LAUNCH)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(state_of(1), alias="best").durable.result(PATIENCE)
        (tmp_path / "best").unlink()
        with pytest.raises(ResourceError, match="somebody made it"):
            writer.save(state_of(2), alias="best").durable.result(PATIENCE)
    assert [entry.step for entry in index.read(str(tmp_path))] == [1]
    assert load_arrays(tmp_path / "best")["step"] == 1


@pytest.mark.slow
def test_what_save_refuses(tmp_path, own_channels):
    (tmp_path / "mine").write_text("somebody's")
    with CheckpointWriter(tmp_path) as writer:
        writer.save(state_of(1), name="a", alias="best")
        for alias in ("mine", "a.safetensors", "b.safetensors"):
            with pytest.raises(ArgumentError, match="pass another"):
                writer.save(state_of(2), name="b", alias=alias)
        for alias in ("latest", "../x", "", ".x", "x" * 300):
            with pytest.raises(ArgumentError, match="checkpoint alias"):
                writer.save(state_of(2), alias=alias)
        with pytest.raises(ArgumentTypeError, match="alias must be a string"):
            writer.save(state_of(2), alias=7)
        for metrics in ({"a": "0.5"}, {"a": None}, {"a": np.ones(3)}, {1: 2.0}, [("a", 1)], {"a": 1j}, {"a": 10**400}):
            with pytest.raises(ArgumentTypeError, match="metrics"):
                writer.save(state_of(2), metrics=metrics)
        for metrics in ({"x" * 201: 1}, dict.fromkeys(map(str, range(101)), 0.5)):
            with pytest.raises(ArgumentError, match="metrics has"):
                writer.save(state_of(2), metrics=metrics)
        writer.save(state_of(2), alias="c.safetensors")
        with pytest.raises(ArgumentError, match="exists"):  # also while it is no link yet
            writer.save(state_of(3), name="c")
    assert (tmp_path / "mine").read_text() == "somebody's"
    assert load_arrays(tmp_path / "best")["step"] == 1


# --- resuming


def test_there_is_nothing_to_resume_from(tmp_path):
    assert load_newest(tmp_path / "none") is None
    assert load_newest(tmp_path) is None
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".step-1.safetensors.0000000000000000-1.tmp").write_bytes(b"unfinished")
    assert load_newest(tmp_path) is None
    with pytest.raises(ArgumentError, match="is a file"):
        load_newest(tmp_path / "notes.txt")
    with pytest.raises(ArgumentError, match="verify"):
        load_newest(tmp_path, verify="some")


def test_the_newest_complete_one_is_resumed_from(tmp_path):
    """Whatever `latest` leads to; damaged ones are passed over as far as what is read tells."""
    for step in (1, 2, 3):
        put(tmp_path, step)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000001.safetensors")
    assert load_newest(tmp_path)["step"] == 3
    assert list(load_newest(tmp_path, keys="w")) == ["w"]
    data = bytearray((tmp_path / "step-00000003.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000003.safetensors").write_bytes(data)
    for options in ({"map": False}, {"verify": "all"}):
        with pytest.warns(RuntimeWarning, match="passed over: .*is damaged"):
            assert load_newest(tmp_path, **options)["step"] == 2
    (tmp_path / "step-00000003.safetensors").write_bytes(data[:-9])
    (tmp_path / "step-00000002.safetensors").write_bytes(b"torn")
    with pytest.warns(RuntimeWarning, match="passed over") as warned:
        assert load_newest(tmp_path)["step"] == 1
    assert len(warned) == 2
    assert all(each.filename == __file__ for each in warned)
    (tmp_path / "step-00000001.safetensors").unlink()
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load_newest(tmp_path) is None


def test_what_is_deleted_while_it_is_looked_at_is_looked_for_again(tmp_path, monkeypatch):
    from shmtensor.checkpoint import listing

    put(tmp_path, 1)
    put(tmp_path, 2)
    plain, gone = listing.load_checkpoint, []

    def load(path, **options):
        if not options.get("from_memory") and len(gone) < 2:
            gone.append(path)
            put(tmp_path, 9)
            raise FileNotFoundError(2, "deleted by keep_last", str(path))
        return plain(path, **options)

    monkeypatch.setattr(listing, "load_checkpoint", load)
    assert load_newest(tmp_path)["step"] == 9


def test_a_directory_of_shards_is_the_only_one(tmp_path):
    path = save(state_of(4), tmp_path / "a", max_shard=1000)
    assert load_newest(path)["step"] == 4


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("format", ["safetensors", "torch", "npz"])
def test_a_checkpoint_with_the_name_of_a_shard(tmp_path, format, is_listed):
    suffix = SUFFIX[format]
    for step in (1, 2, 3):
        file = save({**state_of(step), f"w{step}": np.ones(3)}, tmp_path / f"epoch-{step}-of-3{suffix}", format)
        os.utime(file, ns=(step * 10**9, step * 10**9))
        if is_listed:
            entry = Saved(
                file.name, "0" * 16, step, step, file.stat().st_size, "0" * 16,
                (("", file.stat().st_size, file.stat().st_mtime_ns),), {}, "",
            )  # fmt: skip
            Directory(str(tmp_path)).record(entry)
        assert load_newest(tmp_path)["step"] == load_checkpoint(tmp_path)["step"] == step
        assert load_checkpoint(file)["step"] == step
        found = list_checkpoints(tmp_path)
        assert [(info.step, info.error) for info in found] == [(number, None) for number in range(step, 0, -1)]
    if is_listed:
        file = tmp_path / f"epoch-1-of-3{suffix}"
        os.truncate(file, 100)
        assert [info.error is None for info in list_checkpoints(tmp_path)] == [True, True, False]


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM])
def test_an_error_of_this_process_is_no_damage(tmp_path, monkeypatch, code):
    for step in (1, 2):
        put(tmp_path, step)

    def refuse(path, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    for owner, name in ((listing, "load_checkpoint"), (index, "read_regular"), (opening, "open_found")):
        with monkeypatch.context() as patched:
            (tmp_path / "latest").unlink(missing_ok=True)
            patched.setattr(owner, name, refuse)
            for load in (load_newest, load_checkpoint) if owner is not listing else (load_newest,):
                if owner is opening and load is load_newest:
                    continue  # it opens each file by itself
                with pytest.raises(OSError, match=os.strerror(code)) as caught:
                    load(tmp_path)
                assert caught.value.errno == code
    assert load_newest(tmp_path)["step"] == 2


def test_what_says_that_a_file_is_damaged(tmp_path, monkeypatch):
    for step in (1, 2):
        put(tmp_path, step)
    load, errors = listing.load_checkpoint, [errno.EIO]

    def fail(path, *args, **kwargs):
        if errors and "from_memory" not in kwargs:
            raise OSError(errors.pop(), "the disk fails")
        return load(path, *args, **kwargs)

    monkeypatch.setattr(listing, "load_checkpoint", fail)
    with pytest.warns(RuntimeWarning, match="passed over: .*the disk fails"):
        assert load_newest(tmp_path)["step"] == 1
