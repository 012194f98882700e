"""Saves without a local copy (`local=False`): from the slots to a URL; deaths of everybody at every step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from shmtensor import ArgumentError, CheckpointWriter, ResourceError, list_checkpoints, load_arrays, load_newest
from shmtensor.checkpoint import index, names, process_handle, snapshot, upload
from shmtensor.checkpoint.locations import location

from ..scenes import ROOT
from ..waiting import PATIENCE, wait_for_end, wait_until
from .servers import s3  # noqa: F401
from .test_deaths import DIRECT_POINTS, PRUNE_POINTS, dies, own_channels, state_of  # noqa: F401
from .test_upload import there, url  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


def files_at(url, s3):  # noqa: F811
    """The names of all files at the URL, but for the list."""
    s3.fs.invalidate_cache()
    root = url.removeprefix("s3://")
    return sorted(name.removeprefix(f"{root}/") for name in s3.fs.find(root) if not name.endswith(index.INDEX))


def file(step):
    return f"step-{step:08d}.safetensors"


def hidden(directory):
    """What the directory has besides the lock and the list."""
    return sorted(set(os.listdir(directory)) - {".shmtensor.lock", index.INDEX})


def test_each_save_goes_to_the_url_and_none_to_the_disk(url, s3, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, keep_last=2) as writer:
        for step in range(1, 5):
            metrics, alias = {"loss": step}, "best" if step == 2 else None
            handle = writer.save(state_of(step), metrics=metrics, alias=alias)
            assert handle.path == f"{url}/{file(step)}"
            done = handle.durable.result(PATIENCE)
            assert (done.path, handle.uploaded.result(PATIENCE)) == (handle.path, handle.path)
            assert (load_arrays(done.path)["w"] == step).all()
            assert handle.progress.written == handle.progress.total == done.nbytes
        counts = writer.statistics()
        assert (counts.durable, counts.uploaded, counts.uploading, counts.deleted) == (4, 4, 0, 1)
    assert there(url) == [2, 3, 4]  # `best` stays
    assert files_at(url, s3) == [file(2), file(3), file(4)]
    assert load_arrays(f"{url}/best")["step"] == 2
    assert load_newest(url)["step"] == 4
    assert hidden(tmp_path / "a") == []
    assert {entry.name for entry in index.read(str(tmp_path / "a"))} == {file(2), file(3), file(4)}


@pytest.mark.parametrize("how", ["safetensors", "torch", "npz", "shards"])
def test_the_files_are_those_that_a_disk_would_have(url, s3, tmp_path, how):  # noqa: F811
    options = {"max_shard": 500_000} if how == "shards" else {"format": how}
    state = {"w": np.arange(200_000), "x": [np.full(100_000, 2), np.ones(3)], "step": 7}
    with CheckpointWriter(tmp_path / "a", **options) as writer:
        local = writer.save(state).durable.result(PATIENCE)
    with CheckpointWriter(tmp_path / "b", upload=url, local=False, **options) as writer:
        remote = writer.save(state).durable.result(PATIENCE)
    assert (remote.nbytes, remote.digest) == (local.nbytes, local.digest)
    root = tmp_path / "a"
    expected = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*") if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
    }  # fmt: skip
    found = {name: s3.fs.cat_file(f"{url.removeprefix('s3://')}/{name}") for name in files_at(url, s3)}
    assert found == expected


def test_a_large_file_goes_in_parts(url, s3, tmp_path):  # noqa: F811
    state = {"w": np.random.default_rng(0).integers(0, 256, 3 * upload.PART + 12345, dtype=np.uint8)}
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        path = writer.save(state, name="a").durable.result(PATIENCE).path
    assert np.array_equal(load_arrays(path)["w"], state["w"])
    assert s3.fs.info(f"{url.removeprefix('s3://')}/a.safetensors")["ETag"].strip('"').endswith("-4")  # so many parts


# --- names


def test_names_that_are_taken(url, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        assert [writer.save({"w": np.ones(3)}).name for _ in range(2)] == [
            "save-00000001.safetensors", "save-00000002.safetensors"]  # fmt: skip
        writer.save(state_of(1))
        with pytest.raises(ArgumentError, match="exists"):
            writer.save(state_of(1), name="step-00000001")
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        assert writer.save({"w": np.ones(3)}).name == "save-00000003.safetensors"
        assert writer.save(state_of(1)).name == "step-00000001-2.safetensors"
    with CheckpointWriter(tmp_path / "b", upload=url, local=False) as writer:  # which knows nothing of them
        handle = writer.save(state_of(1))
        assert handle.durable.result(PATIENCE).path == f"{url}/step-00000001-3.safetensors"
        assert handle.name == "step-00000001-3.safetensors"
        with pytest.raises(ResourceError, match="exists"):
            writer.save(state_of(1), name="step-00000001-2").durable.result(PATIENCE)
    assert len(list_checkpoints(url)) == 6


# --- what does not go


def test_a_state_has_to_fit_into_memory(url, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, memory="1MiB") as writer:
        with pytest.raises(ArgumentError, match=r"memory=.*local=False"):
            writer.save({"w": np.ones(1 << 18)})
        assert writer.save({"w": np.ones(1000)}).durable.result(PATIENCE)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"upload": None}, "pass upload="),
        ({"upload_keep_last": 2}, "keep_last="),
        ({"rank": 0, "world_size": 2}, "rank="),
        ({"key": bytes(32)}, "key="),
    ],
)
def test_what_does_not_go_with_it(tmp_path, more, text):
    with pytest.raises(ArgumentError, match=text):
        CheckpointWriter(tmp_path / "a", **({"upload": "s3://bucket/a", "local": False} | more))
    assert not (tmp_path / "a").exists()


class _Broken:
    """A reader whose bytes end with an error."""

    def __init__(self):
        self.parts = 0

    def rewind(self):
        self.parts = 0

    def read(self, nbytes):
        self.parts += 1
        if self.parts == 3:
            raise MemoryError
        return bytes(nbytes)


def test_half_a_file_does_not_appear(url, s3):  # noqa: F811
    target = location(f"{url}/half")
    with pytest.raises(ResourceError, match="MemoryError"):
        upload.put_stream(_Broken(), target, 5 * upload.PART)
    assert files_at(url, s3) == []
    assert not s3.fs.list_multipart_uploads("bucket")


def test_a_save_that_fails_leaves_nothing_and_the_next_goes_on(url, s3, tmp_path, monkeypatch):  # noqa: F811
    """The list cannot be written the first time: what lies there is in no list, and the next save deletes it."""
    code = (
        "from shmtensor.checkpoint import upload\n"
        "add, calls = upload.Target.add_to_list, []\n"
        "def fail(self, *args):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 1: raise OSError(28, 'the server is full')\n"
        "    return add(self, *args)\n"
        "upload.Target.add_to_list = fail\n"
    )
    monkeypatch.setattr(process_handle, "LAUNCH", code + process_handle.LAUNCH)
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, on_error="warn") as writer:
        handle = writer.save(state_of(1))
        with pytest.raises(ResourceError, match="the server is full"):
            handle.durable.result(PATIENCE)
        with pytest.raises(ResourceError, match="the server is full"):
            handle.uploaded.result(PATIENCE)
        assert files_at(url, s3) == [file(1)]
        assert len(hidden(tmp_path / "a")) == 1  # the note
        writer.save(state_of(2)).durable.result(PATIENCE)
    assert there(url) == [2]
    assert files_at(url, s3) == [file(2)]
    assert hidden(tmp_path / "a") == []


def test_saves_go_on_while_a_server_hangs(url, s3, tmp_path):  # noqa: F811
    """The writing process receives while its thread waits: what waits can be replaced."""
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, memory="8MiB", busy="replace") as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        s3.stop()
        try:
            first = writer.save(state_of(2))
            wait_until(lambda: first.status == "writing")
            for step in range(3, 9):
                last = writer.save(state_of(step), timeout=PATIENCE)
            assert not first.durable.done()
        finally:
            s3.go_on()
        assert last.durable.result(PATIENCE)
        assert first.durable.result(PATIENCE)
    assert {1, 2, 8} <= set(there(url))


# --- what dead saves have left, and requests that are carried out late


def launching(monkeypatch, code):
    """Run this in the writing process first."""
    monkeypatch.setattr(process_handle, "LAUNCH", textwrap.dedent(code) + process_handle.LAUNCH)


def leave_note(directory, at, name, *, writer="0" * 16, number=1):
    """The note of a save whose process died."""
    directory.mkdir(exist_ok=True)
    note = snapshot.Note(upload.mark_of(at), name, [""])
    (directory / f".{name}.{writer}-{number}.url").write_text(json.dumps(note._asdict()))


def save_one(directory, url, step, **options):  # noqa: F811
    with CheckpointWriter(directory, upload=url, local=False, **options) as writer:
        return writer.save(state_of(step)).durable.result(PATIENCE)


def test_a_note_is_of_one_url(url, s3, tmp_path):  # noqa: F811
    """Nothing is deleted at another one, and the note stays for the next save to its own."""
    leave_note(tmp_path / "a", f"{url}/one", file(1))
    for each in ("one", "two"):
        s3.fs.pipe_file(f"{url.removeprefix('s3://')}/{each}/{file(1)}", b"x")
    save_one(tmp_path / "a", f"{url}/two", 2)
    assert files_at(f"{url}/one", s3) == [file(1)]
    assert files_at(f"{url}/two", s3) == [file(1), file(2)]
    save_one(tmp_path / "a", f"{url}/one", 3)
    assert files_at(f"{url}/one", s3) == [file(3)]
    assert hidden(tmp_path / "a") == []


def test_a_server_that_refuses_to_delete_fails_no_save(url, s3, tmp_path, monkeypatch):  # noqa: F811
    leave_note(tmp_path / "a", url, file(1))
    s3.fs.pipe_file(f"{url.removeprefix('s3://')}/{file(1)}", b"x")
    launching(monkeypatch, """
        import s3fs
        async def refuse(self, *args, **options): raise PermissionError("access denied")
        s3fs.S3FileSystem._rm_file = refuse
    """)  # fmt: skip
    assert save_one(tmp_path / "a", url, 2).path == f"{url}/{file(2)}"
    assert len(hidden(tmp_path / "a")) == 1


def test_the_only_copy_is_never_swept(url, s3, tmp_path):  # noqa: F811
    """All die before the note is removed, and the list at the URL is damaged."""
    save_one(tmp_path / "a", url, 1)
    entry = index.read(str(tmp_path / "a"))[0]
    leave_note(tmp_path / "a", url, entry.name, writer=entry.writer, number=entry.number)
    s3.fs.pipe_file(f"{url.removeprefix('s3://')}/{index.INDEX}", b"")
    save_one(tmp_path / "a", url, 2)
    assert there(url) == [1, 2]
    assert files_at(url, s3) == [file(1), file(2)]
    assert hidden(tmp_path / "a") == []


def test_a_late_request_undoes_no_save(url, s3, tmp_path):  # noqa: F811
    """A list that was sent before arrives once more: the next save lists again what it lacks."""
    path = f"{url.removeprefix('s3://')}/{index.INDEX}"
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        late = s3.fs.cat_file(path)
        writer.save(state_of(2)).durable.result(PATIENCE)
        s3.fs.pipe_file(path, late)
        writer.save(state_of(3)).durable.result(PATIENCE)
    assert [entry.step for entry in upload.Target(url, lambda: False).read_list()] == [1, 2, 3]
    assert [entry.step for entry in index.read(str(tmp_path / "a"))] == [1, 2, 3]


def test_the_answer_to_the_list_is_lost(url, tmp_path, monkeypatch):  # noqa: F811
    """It was written: the save is durable."""
    launching(monkeypatch, """
        from shmtensor.checkpoint import upload
        add = upload.Target.add_to_list
        def lose(self, *args):
            add(self, *args)
            raise OSError("no answer")
        upload.Target.add_to_list = lose
    """)  # fmt: skip
    save_one(tmp_path / "a", url, 1)
    assert there(url) == [1]


def test_local_checkpoints_of_the_directory_stay_in_its_list(url, s3, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.save(state_of(1), alias="best").durable.result(PATIENCE)
    save_one(tmp_path / "a", url, 2)
    assert [(entry.step, entry.alias) for entry in index.read(str(tmp_path / "a"))] == [(1, "best"), (2, "")]
    assert there(url) == [2]


def test_a_directory_that_is_full_fails_no_save_that_is_at_the_url(url, s3, tmp_path, monkeypatch, caplog):  # noqa: F811
    launching(monkeypatch, """
        from shmtensor.checkpoint import index
        def full(*args): raise OSError(28, "No space left on device")
        index.write = full
    """)  # fmt: skip
    assert save_one(tmp_path / "a", url, 1).path == f"{url}/{file(1)}"
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert len(hidden(tmp_path / "a")) == 1
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        assert writer.save(state_of(1)).durable.result(PATIENCE).path == f"{url}/step-00000001-2.safetensors"
    assert files_at(url, s3) == ["step-00000001-2.safetensors", file(1)]
    assert hidden(tmp_path / "a") == []


def test_a_note_that_was_not_finished_is_removed(url, tmp_path):  # noqa: F811
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f".{file(1)}.{'0' * 16}-1.url.tmp").write_text("{")
    save_one(tmp_path / "a", url, 2)
    assert hidden(tmp_path / "a") == []


def test_a_name_that_no_save_got_is_free(url, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, memory="1MiB") as writer:
        with pytest.raises(ArgumentError, match="has no room"):
            writer.save({"w": np.ones(1 << 18)}, name="best")
        assert writer.save({"w": np.ones(100)}, name="best").durable.result(PATIENCE).path == f"{url}/best.safetensors"
        with pytest.raises(ArgumentError, match=f"checkpoint {url}/best.safetensors exists"):
            writer.save({"w": np.ones(100)}, name="best")


def test_the_process_of_a_dead_trainer_sleeps_while_it_sends(url, tmp_path):  # noqa: F811
    """It waits for its thread, and takes no core."""
    launch = (
        "import os, threading, time\n"
        "from shmtensor.checkpoint.snapshot import UrlSnapshot\n"
        "parent, turns, may_go_on = os.getppid(), [], threading.Event()\n"
        "send = UrlSnapshot._send\n"
        "UrlSnapshot._send = lambda self: (may_go_on.wait(), send(self))\n"
        "def is_sending(self):\n"
        "    if self._sending is not None and os.getppid() != parent:\n"
        "        turns.append(time.monotonic())\n"
        "        if len(turns) == 50:\n"
        f"            open({str(tmp_path / 'turns')!r}, 'w').write(repr(turns[-1] - turns[0]))\n"
        "            may_go_on.set()\n"
        "    return self._sending is not None\n"
        "UrlSnapshot.is_sending = property(is_sending)\n"
    )
    wait_for_end(trainer(tmp_path / "a", url, launch))
    assert float((tmp_path / "turns").read_text()) > 0.25  # it is asked twice a turn
    assert there(url) == [1, 2]


SILENT = """
    from shmtensor.checkpoint import remote
    remote.TIMEOUT, remote.ATTEMPTS, remote._PAUSE = 0.3, 2, 0.01
"""


@pytest.fixture
def silent():
    """The URL of an S3 server that accepts connections and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield server.getsockname()[1]


def test_a_server_that_never_answers_fails_the_save(s3, silent, tmp_path, monkeypatch):  # noqa: F811
    """No call waits for ever, and the directory's next writer is not kept waiting."""
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://127.0.0.1:{silent}")
    launching(monkeypatch, SILENT)
    with CheckpointWriter(tmp_path / "a", upload="s3://bucket/silent", local=False, on_error="warn") as writer:
        handle = writer.save(state_of(1))
        with pytest.raises(ResourceError, match="no answer within"):
            handle.durable.result(PATIENCE)
        pid = writer.statistics().pid
    wait_for_end(pid)


def test_a_writer_says_that_an_earlier_one_is_still_at_work(url, s3, tmp_path, monkeypatch, caplog):  # noqa: F811
    s3.stop()
    try:
        pid = trainer(tmp_path / "a", url)
        launching(monkeypatch, "from shmtensor.checkpoint import writer_process; writer_process._BLOCKED = 0.2\n")
        with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
            handle = writer.save(state_of(3))
            wait_until(lambda: "of an earlier CheckpointWriter" in caplog.text)
            s3.go_on()
            handle.durable.result(PATIENCE)
    finally:
        s3.go_on()
    wait_for_end(pid)
    assert there(url) == [1, 2, 3]


RENAMING = """
    from shmtensor.checkpoint import upload
    upload._RENAMED = (*upload._RENAMED, "s3")
"""


def test_where_files_get_their_name_afterwards(url, s3, tmp_path, monkeypatch):  # noqa: F811
    """What a dead process had written of a file goes with it, and a list that was just being replaced is found."""
    launching(monkeypatch, RENAMING)
    root = url.removeprefix("s3://")
    save_one(tmp_path / "a", url, 1)
    leave_note(tmp_path / "a", url, file(2))
    s3.fs.pipe_file(f"{root}/.{file(2)}.part", b"half")
    s3.fs.mv(f"{root}/{index.INDEX}", f"{root}/.{index.INDEX}.part")
    s3.fs.invalidate_cache()
    save_one(tmp_path / "b", url, 3)
    assert there(url) == [1, 3]
    save_one(tmp_path / "a", url, 4)
    assert there(url) == [1, 3, 4]
    assert files_at(url, s3) == [file(1), file(3), file(4)]


def test_a_swept_name_is_not_given_again_at_once(url, s3, tmp_path):  # noqa: F811
    """The request that deletes it may be carried out once more."""
    leave_note(tmp_path / "a", url, file(1))
    s3.fs.pipe_file(f"{url.removeprefix('s3://')}/{file(1)}", b"half")
    assert save_one(tmp_path / "a", url, 1).path == f"{url}/step-00000001-2.safetensors"
    assert files_at(url, s3) == ["step-00000001-2.safetensors"]


# --- deaths


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", [each for each in DIRECT_POINTS if each != "direct.swept"])
def test_the_writing_process_dies(url, s3, dies, tmp_path, point, nth):  # noqa: F811
    dies(point, "kill", nth)
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, keep_last=2) as writer:
        handles = [writer.save(state_of(step)) for step in (1, 2, 3)]
        for handle in handles:
            assert handle.durable.result(PATIENCE).path == handle.uploaded.result(PATIENCE) == f"{url}/{handle.name}"
        assert writer.statistics().restarts == 1
    assert there(url) == [2, 3]
    assert files_at(url, s3) == [file(2), file(3)]
    assert hidden(tmp_path / "a") == []


@pytest.mark.parametrize("point", ["finish.before", "finish.released", "finish.reported", *PRUNE_POINTS])
def test_it_dies_where_it_dies_with_others(url, dies, tmp_path, point):  # noqa: F811
    dies(point, "kill", 1)
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, keep_last=1) as writer:
        handles = [writer.save(state_of(step)) for step in (1, 2, 3)]
        assert all(handle.uploaded.result(PATIENCE) == f"{url}/{handle.name}" for handle in handles)
        assert writer.statistics().restarts == 1
    assert there(url) == [3]


TRAINER = """
    import os, signal, sys
    prefix, path, url, launch = sys.argv[1:]
    from shmtensor.checkpoint import names, process_handle
    from shmtensor.checkpoint.writer import CheckpointWriter
    from tests.checkpoint.test_deaths import state_of
    names.PREFIX = prefix
    process_handle.LAUNCH = launch + process_handle.LAUNCH
    writer = CheckpointWriter(path, upload=url, local=False)
    writer.start()
    for step in (1, 2):
        writer.save(state_of(step)).staged.result(120)
    print(writer.statistics().pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def trainer(path, url, launch=""):  # noqa: F811
    """Run a trainer that is killed when two saves are staged; the process id of its writing process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINER), names.PREFIX, str(path), url, launch],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout)


def test_the_trainer_dies(url, s3, tmp_path):  # noqa: F811
    """What was staged goes to the URL, although its trainer is dead; the writing process ends."""
    wait_for_end(trainer(tmp_path / "a", url))
    assert there(url) == [1, 2]
    assert files_at(url, s3) == [file(1), file(2)]
    assert hidden(tmp_path / "a") == []


def test_the_trainer_is_dead_and_a_save_is_sent_just_as_the_process_looks(url, s3, tmp_path):  # noqa: F811
    """It has looked whether there is something to do, and the thread ends before it looks whether that is at work."""
    launch = (
        "import os, threading, time\n"
        "from concurrent.futures import wait\n"
        "from shmtensor.checkpoint.snapshot import UrlSnapshot\n"
        "look, send = UrlSnapshot.can_step.fget, UrlSnapshot._send\n"
        "parent, looked, may_end = os.getppid(), [], threading.Event()\n"
        "def can_step(self):\n"
        "    seen = look(self)\n"
        "    if self._sending is not None and not seen:\n"
        "        looked.append(1)\n"
        "        if len(looked) % 2 == 0:\n"  # not when it reckons how long to wait
        "            while os.getppid() == parent: time.sleep(0.001)\n"
        "            may_end.set()\n"
        "            wait([self._sending])\n"
        "            may_end.clear()\n"
        "    return seen\n"
        "UrlSnapshot.can_step = property(can_step)\n"
        "UrlSnapshot._send = lambda self: (may_end.wait(), send(self))\n"
    )
    wait_for_end(trainer(tmp_path / "a", url, launch))
    assert there(url) == [1, 2]
    assert hidden(tmp_path / "a") == []


LISTED = {"direct.listed", "direct.recorded", "direct.done"}


@pytest.mark.parametrize("point", [each for each in DIRECT_POINTS if each != "direct.swept"])
def test_all_die(url, s3, tmp_path, point):  # noqa: F811
    """What was listed is there and whole, the rest is lost, and the next save deletes what is left of it."""
    launch = (
        "from tests.faults import points; points.install('shmtensor.checkpoint'); "
        f"points.arm({point!r}, 'kill', 1); import os, signal, time\n"
        # no other process is started: the trainer is dead before this one comes to that point
        "from shmtensor.checkpoint import snapshot\n"
        "send = snapshot.UrlSnapshot.begin\n"
        "parent = os.getppid()\n"
        "def begin(self, *args):\n"
        "    while os.getppid() == parent: time.sleep(0.001)\n"
        "    return send(self, *args)\n"
        "snapshot.UrlSnapshot.begin = begin\n"
    )
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        writer.save(state_of(0)).durable.result(PATIENCE)
    wait_for_end(trainer(tmp_path / "a", url, launch))
    before = [0, 1] if point in LISTED else [0]
    assert load_arrays(url)["step"] == before[-1]
    assert [entry.step for entry in upload.Target(url, lambda: False).read_list()] == before
    notes = [json.loads((tmp_path / "a" / name).read_text())["name"] for name in hidden(tmp_path / "a")]
    assert set(files_at(url, s3)) <= {*map(file, before), *notes}  # nothing that no note knows of
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        writer.save(state_of(3)).durable.result(PATIENCE)
    assert there(url) == [*before, 3]
    assert files_at(url, s3) == [*map(file, before), file(3)]
    assert hidden(tmp_path / "a") == []


def test_it_dies_while_it_deletes_what_is_left(url, s3, dies, tmp_path):  # noqa: F811
    leave_note(tmp_path / "a", url, file(1))
    s3.fs.pipe_file(f"{url.removeprefix('s3://')}/{file(1)}", b"half a save")
    dies("direct.swept", "kill", 1)
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        writer.save(state_of(2)).durable.result(PATIENCE)
        assert writer.statistics().restarts == 1
    assert files_at(url, s3) == [file(2)]
    assert hidden(tmp_path / "a") == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"at": "", "name": "../a", "files": [""]}', '{"at": "", "name": "a", "files": ["../b"]}']
)
def test_a_note_that_is_damaged_deletes_nothing(url, s3, tmp_path, text):  # noqa: F811
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / (".a." + "0" * 16 + "-1.url")).write_text(text)
    s3.fs.pipe_file(f"{url.removeprefix('s3://')}/a", b"somebody's")
    with CheckpointWriter(tmp_path / "a", upload=url, local=False) as writer:
        writer.save(state_of(2)).durable.result(PATIENCE)
    assert files_at(url, s3) == ["a", file(2)]
