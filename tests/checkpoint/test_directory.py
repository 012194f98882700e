"""The directory of checkpoints: the list of saves, which is the newest, names, `latest`, what a failure there means."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor import CheckpointError, CheckpointWriter, load_arrays
from shmtensor.checkpoint import index, names, process_handle
from shmtensor.checkpoint.convert import convert
from shmtensor.checkpoint.directory import Directory, Keep
from shmtensor.checkpoint.formats import FORMATS
from shmtensor.checkpoint.formats.safetensors import INDEX
from shmtensor.checkpoint.load import check
from shmtensor.checkpoint.opening import newest_first, open_path

from ..commands import app
from .state_files import save

PATIENCE = 120.0

pytestmark = pytest.mark.usefixtures("own_channels")


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


def state_of(number: int) -> dict:
    return {"w": np.full(1000, number), "step": number}


# --- states without tensors


@pytest.mark.parametrize("state", [{}, {"step": 1}, [], {"a": {"b": "text"}, "c": [1, (2,)]}, 7], ids=repr)
def test_a_state_without_tensors_in_shards(tmp_path, state):
    path = save(state, tmp_path / "a", max_shard=1000)
    for options in ({}, {"map": False}, {"verify": "all"}, {"map": False, "verify": False}):
        assert load_arrays(path, **options) == state
    opened = open_path(path)
    assert check(opened, readers=2) == []
    again = convert(opened, tmp_path / "b.npz").path
    assert load_arrays(again) == state
    convert(open_path(again), tmp_path / "c", "safetensors", max_shard=1000)
    assert load_arrays(tmp_path / "c") == state
    for command in (["info", str(path)], ["verify", str(path)], ["ls", str(tmp_path)]):
        done = CliRunner().invoke(app, ["checkpoint", *command])
        assert done.exit_code == 0, done.output


def test_a_writer_s_state_without_tensors_in_shards(tmp_path):
    with CheckpointWriter(tmp_path, max_shard="1MiB", keep_last=1) as writer:
        for step in (1, 2):
            path = writer.save({"step": step}).durable.result(PATIENCE).path
    assert load_arrays(path) == load_arrays(tmp_path) == load_arrays(tmp_path / "latest") == {"step": 2}
    assert [entry.name for entry in index.read(str(tmp_path))] == ["step-00000002"]


@pytest.mark.parametrize(
    "index_of_shards",
    [
        {"weight_map": {}}, {"weight_map": {}, "metadata": {}}, {"weight_map": {}, "metadata": {"shmtensor": "{}"}},
        {"weight_map": {}, "metadata": {"shmtensor": "{}", "shmtensor.xxh3": 1}},
        {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": "b"}},
        {}, [], 1, None,
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_hostile_index_of_shards_hides_no_other_checkpoint(tmp_path, index_of_shards):
    save(state_of(1), tmp_path / "good.safetensors")
    os.utime(tmp_path / "good.safetensors", ns=(0, 0))
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / INDEX).write_text(json.dumps(index_of_shards))
    with pytest.raises(CheckpointError):
        load_arrays(tmp_path / "hostile")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load_arrays(tmp_path)["step"] == 1


def test_whatever_is_wrong_with_one_hides_no_other(tmp_path, monkeypatch):
    """Also what nobody has thought of."""
    save(state_of(1), tmp_path / "good.safetensors")
    os.utime(tmp_path / "good.safetensors", ns=(0, 0))
    save(state_of(2), tmp_path / "hostile.npz", "npz")

    def fail(path):
        raise ZeroDivisionError("unthought of")

    monkeypatch.setattr(FORMATS["npz"], "open", fail)
    with pytest.warns(RuntimeWarning, match="passed over: .*unthought of"):
        assert load_arrays(tmp_path)["step"] == 1


# --- the list of saves


def entry(**changes) -> dict:
    plain = {
        "name": "a.safetensors", "writer": "0" * 16, "number": 1, "step": 1, "nbytes": 10, "digest": "0" * 16,
        "files": [["", 10, 5]],
    }  # fmt: skip
    return plain | changes


HOSTILE = {
    "nested": "[" * 200_000,
    "infinity": json.dumps({"version": 1, "saves": [entry(number=1)]}).replace('"number": 1', '"number": 1e999'),
    "long number": json.dumps({"version": 1, "saves": []}).replace("1", "1" + "0" * 5000),
    "no dict": "[]",
    "version": '{"version": 2}',
    "a list of nothing": '{"version": 1, "saves": null}',
    "binary": b"\xff\xfe\x00",
    "large": b'{"version": 1, "saves": [' + b" " * index.MAX_LIST + b"]}",
    "cut off": '{"version": 1, "saves": [',
    **{
        f"entry {change!r:.60}": json.dumps({"version": 1, "saves": [entry(**change)]})
        for change in (
            {"name": "../x"}, {"name": "a\0b"}, {"name": "\ud800"}, {"name": ".shmtensor.lock"}, {"name": ""},
            {"name": 7}, {"name": "x" * 300}, {"writer": "../../../x"}, {"writer": None}, {"number": 1.5},
            {"number": "1"}, {"number": True}, {"step": 10**30}, {"step": None}, {"nbytes": []}, {"digest": {}},
            {"files": []}, {"files": {}}, {"files": [["", 1]]}, {"files": [["x/y", 1, 1]]}, {"files": [[7, 1, 1]]},
            {"files": [["a", 1, 1], ["", 1, 1]]}, {"files": [[["x"], 1, 1]]},
        )
    },
    **{f"no {key}": json.dumps({"version": 1, "saves": [{k: v for k, v in entry().items() if k != key}]})
       for key in entry()},
}  # fmt: skip


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_list_is_no_list(tmp_path, caplog, said):
    """Nothing in it counts as ours, the newest is found by time, and the next save begins it anew."""
    data = HOSTILE[said]
    (tmp_path / index.INDEX).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert index.read(str(tmp_path)) == []
    assert "cannot be read" in caplog.text
    assert index.order(str(tmp_path)) == {}
    save(state_of(3), tmp_path / "a.safetensors")
    assert load_arrays(tmp_path)["step"] == 3
    directory = Directory(str(tmp_path))
    assert directory.retain(Keep(1)) == ([], [])
    directory.record(index.Saved("a.safetensors", "0" * 16, 1, 1, 10, "0" * 16, (("", 10, 5),)))
    assert [each.name for each in index.read(str(tmp_path))] == ["a.safetensors"]


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "link"])
def test_a_list_that_is_no_file(tmp_path, kind):
    path = tmp_path / index.INDEX
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    assert index.read(str(tmp_path)) == []
    save(state_of(3), tmp_path / "a.safetensors")
    assert load_arrays(tmp_path)["step"] == 3


def test_the_list_is_not_written_through_a_link(tmp_path):
    """Another user who may write in the directory could have any file of ours truncated."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / f"{index.INDEX}.tmp").symlink_to(mine)
    index.write(str(tmp_path), [])
    assert mine.read_text() == "precious"
    assert not (tmp_path / f"{index.INDEX}.tmp").is_symlink()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_list_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path, monkeypatch, call):
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    index.write(str(tmp_path), [])
    before = (tmp_path / index.INDEX).read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        index.replace(str(tmp_path / index.INDEX), b"{}")
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == [index.INDEX]
    assert (tmp_path / index.INDEX).read_bytes() == before


def test_a_list_that_becomes_too_long_loses_its_oldest(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(index, "MAX_LIST", 2000)
    directory = Directory(str(tmp_path))
    for number in range(40):
        directory.record(index.Saved(f"s-{number}", "0" * 16, number, number, 10, "0" * 16, (("", 10, 5),)))
    found = [each.number for each in index.read(str(tmp_path))]
    assert found[-1] == 39
    assert found == [*range(found[0], 40)]
    assert 3 < len(found) < 20
    assert (tmp_path / index.INDEX).stat().st_size <= 2000
    assert "kept for ever" in caplog.text


# --- which is the newest


def test_the_newest_is_the_last_of_the_list_whatever_the_times_say(tmp_path):
    """As after a copy of the directory, which gives every file another time."""
    with CheckpointWriter(tmp_path, keep_last=3) as writer:
        for step in (5, 3, 7, 4):  # the run was resumed in between: the last saved counts, not the highest step
            writer.save(state_of(step))
    (tmp_path / "latest").unlink()
    for at, path in enumerate(sorted(tmp_path.glob("step-*"), reverse=True)):
        os.utime(path, ns=(at * 10**9, at * 10**9))
    (tmp_path / "foreign.safetensors").write_bytes((tmp_path / "step-00000003.safetensors").read_bytes())
    assert load_arrays(tmp_path)["step"] == load_arrays(tmp_path / "latest")["step"] == 4
    listed = [path.name for _, path in newest_first(tmp_path)]
    assert listed == [*(f"step-0000000{n}.safetensors" for n in (4, 7, 3)), "foreign.safetensors"]
    done = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), "--json"])
    assert [row["name"] for row in json.loads(done.output)["checkpoints"]] == listed
    (tmp_path / listed[0]).write_bytes(b"torn")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load_arrays(tmp_path)["step"] == 7
    assert shmtensor.load_checkpoint(tmp_path / "step-00000003")["step"] == 3


@pytest.mark.parametrize("first", ["the writer", "another one"])
def test_a_directory_that_was_removed_and_made_again_has_one_writer(tmp_path, first):
    path = tmp_path / "a"
    with CheckpointWriter(path, memory="8MiB", on_error="warn") as writer:
        writer.save({"w": np.ones(10), "step": 1}).durable.result(PATIENCE)
        shutil.rmtree(path)
        with pytest.raises(OSError, match="No such file"):
            writer.save({"w": np.ones(10), "step": 2}).durable.result(PATIENCE)
        assert not path.exists()
        path.mkdir()
        if first == "the writer":
            writer.save({"w": np.ones(10), "step": 3}).durable.result(PATIENCE)
            with pytest.raises(shmtensor.ResourceError, match="another CheckpointWriter is open"):
                CheckpointWriter(path)
        else:
            other = CheckpointWriter(path, memory="8MiB")
            with pytest.raises(shmtensor.ResourceError, match="another CheckpointWriter is open"):
                writer.save({"w": np.ones(10), "step": 3})
            other.close()
            writer.save({"w": np.ones(10), "step": 3}).durable.result(PATIENCE)
    assert load_arrays(path / "latest")["step"] == 3


def test_there_is_no_latest_and_nothing_else(tmp_path):
    for path in (tmp_path / "latest", tmp_path / "none" / "latest"):
        with pytest.raises(FileNotFoundError):
            load_arrays(path)


# --- what fails after a checkpoint has its name


FAILING = """
import errno, os, stat
def failing(name, plain, number, applies):
    def call(*args, **more):
        if os.path.exists({flag!r}) and applies(*args):
            raise OSError(number, os.strerror(number), str(args[0]))
        return plain(*args, **more)
    setattr(os, name, call)
"""
NO_LINKS = "failing('symlink', os.symlink, errno.{number}, lambda *args: True)\n"
NO_REMOVAL = "failing('unlink', os.unlink, errno.EPERM, lambda path, *args: str(path).endswith('latest'))\n"
NO_SYNC = "failing('fsync', os.fsync, errno.{number}, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode))\n"


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Lets calls of the writing process fail as long as the flag exists, which is returned."""
    flag = tmp_path / "flag"
    flag.touch()

    def arrange(code: str) -> Path:
        monkeypatch.setattr(process_handle, "LAUNCH", FAILING.format(flag=str(flag)) + code + process_handle.LAUNCH)
        return flag

    return arrange


def names_in(path: Path) -> set[str]:
    return {each.name for each in path.iterdir() if not each.name.startswith(".")}


def saved(*steps: int) -> set[str]:
    return {f"step-{step:08d}.safetensors" for step in steps}


@pytest.mark.parametrize("number", ["EPERM", "ENOTSUP", "ENOSPC", "EIO"])
def test_without_latest_a_save_is_durable_and_old_ones_are_deleted(tmp_path, failing, caplog, number):
    flag = failing(NO_LINKS.format(number=number))
    path = tmp_path / "a"
    with CheckpointWriter(path, keep_last=2) as writer:
        for step in range(1, 5):
            handle = writer.save(state_of(step))
            assert handle.durable.result(PATIENCE).path == handle.path
            assert handle.status == "durable"
        assert names_in(path) == saved(3, 4)
        assert load_arrays(path)["step"] == load_arrays(path / "latest")["step"] == 4
        assert "a name does not lead to it" in caplog.text
        flag.unlink()
        writer.save(state_of(5)).durable.result(PATIENCE)
    assert os.readlink(path / "latest") == "step-00000005.safetensors"
    counts = writer.statistics()
    assert (counts.durable, counts.complete, counts.failed, counts.deleted) == (5, 0, 0, 3)
    assert not [each for each in os.listdir(path) if each.endswith((".tmp", ".log"))]
    assert ".shmtensor.latest" not in os.listdir(path)


def test_a_latest_that_cannot_be_moved_does_not_lead_to_an_older_one(tmp_path, failing):
    flag = failing(NO_LINKS.format(number="ENOSPC"))
    flag.unlink()
    path = tmp_path / "a"
    with CheckpointWriter(path) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        assert os.readlink(path / "latest") == "step-00000001.safetensors"
        flag.touch()
        writer.save(state_of(2)).durable.result(PATIENCE)
        assert load_arrays(path)["step"] == load_arrays(path / "latest")["step"] == 2


def test_a_latest_that_can_neither_be_moved_nor_removed_is_told(tmp_path, failing, caplog):
    flag = failing(NO_LINKS.format(number="EPERM") + NO_REMOVAL)
    flag.unlink()
    path = tmp_path / "a"
    with CheckpointWriter(path, keep_last=1) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        flag.touch()
        for step in (2, 3):
            writer.save(state_of(step)).durable.result(PATIENCE)
    assert "leads to an older one and cannot be removed" in caplog.text
    assert names_in(path) == saved(1, 3) | {"latest"}  # what latest leads to is never deleted


def test_a_file_of_that_name_is_not_overwritten(tmp_path, caplog):
    (tmp_path / "latest").write_text("mine")
    with CheckpointWriter(tmp_path) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
    assert (tmp_path / "latest").read_text() == "mine"
    assert "somebody's file" in caplog.text


@pytest.mark.parametrize("number", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("max_shard", [None, 4000])
def test_a_save_whose_directory_cannot_be_synced_is_complete_and_says_so(tmp_path, failing, number, max_shard):
    """Not durable, not failed; nothing is deleted for it; the next one that is durable deletes."""
    flag = failing(
        NO_SYNC.format(number=number).replace(
            "stat.S_ISDIR(", f"os.path.samefile({str(tmp_path / 'a')!r}, fd) and stat.S_ISDIR("
        )
    )
    flag.unlink()
    ending = "" if max_shard else ".safetensors"
    path = tmp_path / "a"
    with CheckpointWriter(path, keep_last=1, max_shard=max_shard) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        flag.touch()
        handle = writer.save(state_of(2))
        with pytest.raises(shmtensor.ResourceError, match="complete and can be loaded, but is not known to be durable"):
            handle.durable.result(PATIENCE)
        assert handle.status == "complete"
        assert handle.progress.written == handle.progress.total
        assert names_in(path) - {"latest"} == {f"step-0000000{step}{ending}" for step in (1, 2)}
        assert load_arrays(handle.path, verify="all")["step"] == load_arrays(path)["step"] == 2
        writer.save(state_of(3))
        writer._saves.wait(None)
        with pytest.raises(shmtensor.ResourceError, match="not known to be durable"):  # nobody has asked
            writer.save(state_of(4))
        flag.unlink()
        writer.save(state_of(5)).durable.result(PATIENCE)
        assert names_in(path) - {"latest"} == {f"step-00000005{ending}"}
    counts = writer.statistics()
    assert (counts.durable, counts.complete, counts.failed, counts.deleted) == (2, 2, 0, 3)


@pytest.mark.parametrize("number", ["EINVAL", "ENOTSUP"])
def test_a_file_system_that_cannot_sync_directories(tmp_path, failing, number):
    failing(NO_SYNC.format(number=number))
    with CheckpointWriter(tmp_path / "a", keep_last=1) as writer:
        for step in (1, 2):
            writer.save(state_of(step)).durable.result(PATIENCE)
    assert names_in(tmp_path / "a") == saved(2) | {"latest"}


# --- the directory itself


def test_new_directories_are_synced_with_those_above_them(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "there").mkdir()
    CheckpointWriter(tmp_path / "there" / "a" / "b" / "c").close()
    expected = [tmp_path / "there" / "a" / "b" / "c", tmp_path / "there" / "a" / "b", tmp_path / "there" / "a"]
    assert synced == [*map(str, expected), str(tmp_path / "there")]
    synced.clear()
    CheckpointWriter(tmp_path / "there" / "a" / "b" / "c").close()
    assert synced == []


def test_a_new_directory_that_cannot_be_synced_is_refused(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(shmtensor.ResourceError, match="Input/output error"):
        CheckpointWriter(tmp_path / "a")


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://b", "hdfs://n:8020/a", "file:///tmp/x", "memory://"])
def test_a_url_is_refused_by_name(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shmtensor.ArgumentError, match=r"is a URL, .* mounted file systems only"):
        CheckpointWriter(url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("as_path", [str, Path], ids=["str", "path"])
@pytest.mark.parametrize("url", ["s3://bucket/runs/latest", "gs://b", "file:///tmp/x.pt"])
def test_a_url_is_no_directory_of_a_writer(tmp_path, monkeypatch, url, as_path):
    """Also as a path, which has one slash less."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda path: shmtensor.load_checkpoint(path, from_memory=True), CheckpointWriter):
        with pytest.raises(shmtensor.ArgumentError, match=r"is a URL, .*: pass a local"):
            call(as_path(url))
    assert os.listdir(tmp_path) == []
    (tmp_path / "s3:").mkdir()  # a strange name, and no URL
    with CheckpointWriter("s3:/runs") as writer:
        writer.save({"step": 1}).durable.result(PATIENCE)
    assert shmtensor.load_checkpoint("s3:/runs") == {"step": 1}


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(shmtensor.ArgumentError, match="pass the path of a directory"):
        CheckpointWriter(path)


@pytest.mark.parametrize("digits", [19, 250, 5000])
def test_a_step_of_too_many_digits_is_refused_in_save(tmp_path, digits):
    with CheckpointWriter(tmp_path) as writer:
        for state, meta in (({"step": 10 ** (digits - 1)}, None), ({}, {"step": 10 ** (digits - 1)})):
            with pytest.raises(shmtensor.ArgumentError, match=rf'"step" has {digits} digits|meta is not JSON'):
                writer.save(state, meta=meta)
        assert writer.statistics().saves == 0
        (tmp_path / f"save-{'9' * 230}.safetensors").write_text("somebody's")
        assert writer.save({}).name == "save-00000001.safetensors"
        handle = writer.save({"step": 10**18 - 1})
        assert handle.durable.result(PATIENCE).path.endswith(f"step-{'9' * 18}.safetensors")
    assert [entry.step for entry in index.read(str(tmp_path))] == [1, 10**18 - 1]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_list_that_this_process_cannot_read_now_is_not_begun_anew(tmp_path, monkeypatch, code):
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.save({"step": step}).durable.result(PATIENCE)
    before = (tmp_path / index.INDEX).read_bytes()

    def fails(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(index, "read_regular", fails)
        with pytest.raises(OSError, match=os.strerror(code)):
            Directory(str(tmp_path)).record(index.read(str(tmp_path))[0])
    assert (tmp_path / index.INDEX).read_bytes() == before
    assert [entry.step for entry in index.read(str(tmp_path))] == [1, 2]
