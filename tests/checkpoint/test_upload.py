"""Uploads of what is durable: order, errors, deaths of everybody at every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shmtensor
from shmtensor import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointWriter,
    DependencyError,
    ResourceError,
    TimedOut,
    list_checkpoints,
    load_arrays,
)
from shmtensor.checkpoint import index, names, process_handle, upload
from shmtensor.checkpoint.directory import Keep
from shmtensor.checkpoint.index import PENDING, UPLOADED, Saved
from shmtensor.checkpoint.manifest import MANIFEST
from shmtensor.checkpoint.remote import open_url

from ..scenes import ROOT
from ..waiting import PATIENCE, wait_for_end, wait_until
from .servers import s3  # noqa: F401
from .test_deaths import PRUNE_POINTS, UPLOAD_POINTS, dies, own_channels, state_of  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


@pytest.fixture
def url(s3, tmp_path):  # noqa: F811
    s3.fs.invalidate_cache()
    return f"s3://bucket/{tmp_path.name}"


def launching(monkeypatch, code):
    """Run code in writing processes that are started from now on."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "LAUNCH", textwrap.dedent(code) + process_handle.LAUNCH)


def there(url):
    """The steps at the URL, by its list, the oldest first; each is read and compared with its digests."""
    for found in list_checkpoints(url):
        assert found.error is None
        state = load_arrays(found.path)
        assert (state["w"] == state["step"]).all()
    return [found.step for found in reversed(list_checkpoints(url))]


def test_each_save_is_uploaded(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url, keep_last=2) as writer:
        handles = [
            writer.save(state_of(step), metrics={"loss": step}, alias="best" if step == 2 else None)
            for step in range(1, 5)
        ]
        assert [handle.uploaded.result(PATIENCE) for handle in handles] == [
            f"{url}/step-{step:08d}.safetensors" for step in range(1, 5)
        ]
        wait_until(lambda: writer.statistics().deleted == 1)  # `best` stays
        counts = writer.statistics()
        assert (counts.uploaded, counts.uploading) == (4, 0)
    assert there(url) == [1, 2, 3, 4]
    assert load_arrays(url)["step"] == 4
    assert load_arrays(f"{url}/best")["step"] == 2
    assert [(found.step, found.uploaded) for found in list_checkpoints(tmp_path / "a")] == [
        (4, True),
        (3, True),
        (2, True),
    ]
    assert {found.metrics["loss"] for found in list_checkpoints(url)} == {1, 2, 3, 4}


def test_close_waits_for_uploads(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        for step in (1, 2):
            handle = writer.save(state_of(step))
    assert handle.uploaded.done()
    assert there(url) == [1, 2]


@pytest.mark.parametrize("how", ["shards", "encrypted", "npz"])
def test_what_is_uploaded(url, tmp_path, how):
    options = {"shards": {"max_shard": 500_000}, "encrypted": {"key": bytes(32)}, "npz": {"format": "npz"}}[how]
    if how == "encrypted":
        pytest.importorskip("cryptography")
    with CheckpointWriter(tmp_path / "a", upload=url, **options) as writer:
        writer.save({"w": np.full(200_000, 1), "x": np.full(100_000, 2)})
    found = load_arrays(url, **({"key": bytes(32)} if how == "encrypted" else {}))
    assert (found["w"] == 1).all()
    assert (found["x"] == 2).all()


def test_in_parts(url, s3, tmp_path, monkeypatch):  # noqa: F811
    """A file of several parts, bit for bit."""
    state = {"w": np.random.default_rng(0).integers(0, 256, 5 * upload.PART + 12345, dtype=np.uint8)}
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        writer.save(state, name="a")
    key = f"{url.removeprefix('s3://')}/a.safetensors"
    assert s3.fs.cat_file(key) == (tmp_path / "a" / "a.safetensors").read_bytes()
    assert s3.fs.info(key)["ETag"].strip('"').endswith("-6")  # so many parts


# --- errors


def test_the_answer_to_the_end_of_an_upload_in_parts_is_lost(url, s3, tmp_path, monkeypatch):  # noqa: F811
    """S3's client aborts it then, and is told that there is no such upload, as it is complete."""
    monkeypatch.setattr(upload, "PART", 5 << 20)  # the least that S3 takes
    data = os.urandom(2 * upload.PART)
    (tmp_path / "x").write_bytes(data)
    target, lost = open_url(f"{url}/x"), []
    call = type(target.fs)._call_s3

    async def lose(self, method, *args, **options):
        answer = await call(self, method, *args, **options)
        if method == "complete_multipart_upload" and not lost:
            lost.append(answer)
            raise OSError("no answer")
        return answer

    monkeypatch.setattr(type(target.fs), "_call_s3", lose)
    upload.put_file(str(tmp_path / "x"), target, len(data))
    assert lost
    assert s3.fs.cat_file(f"{url}/x") == data


def saved(step, name=None):
    name = name or f"step-{step}"
    return Saved(name, "0" * 16, step, step, 5, "0" * 16, (("", 5, 0),), upload=PENDING)


class Memory:
    """What `Target` needs of a path at a URL."""

    def __init__(self, data=None):
        self.fs, self.key, self.data, self.protocols = self, "list", data, ("s3",)

    def __truediv__(self, name):
        return self

    def call(self, what, function):
        if self.data is None and "read" in what:
            raise FileNotFoundError
        return function()

    def invalidate_cache(self):
        pass

    def ask(self, name, *args, nbytes=0, **kwargs):
        return getattr(self, name)(*args, **kwargs)

    def cat_file(self, key):
        return self.data

    def pipe_file(self, key, data):
        self.data = data


def test_it_goes_on_after_an_error(url, s3, tmp_path, caplog):  # noqa: F811
    """What cannot be uploaded is durable, and not deleted; it is uploaded after a later save, in the old order."""
    bucket = f"late-{tmp_path.name[-40:].replace('_', '-').lower().strip('-')}"
    late = f"s3://{bucket}/run"
    with CheckpointWriter(tmp_path / "a", upload=late, keep_last=1) as writer:
        handles = [writer.save(state_of(step)) for step in (1, 2)]
        for handle in handles:
            assert handle.durable.result(PATIENCE)
            with pytest.raises(
                ResourceError, match=r"step-0000000\d.safetensors is durable, and was not uploaded to s3://"
            ):
                handle.uploaded.result(PATIENCE)
        assert "tried again after the next save" in caplog.text
        assert [found.uploaded for found in list_checkpoints(tmp_path / "a")] == [False, False]
        s3.fs.mkdir(bucket)
        assert writer.save(state_of(3)).uploaded.result(PATIENCE)
        wait_until(lambda: writer.statistics().uploaded == 3)
    assert there(late) == [1, 2, 3]
    assert [found.step for found in list_checkpoints(tmp_path / "a")] == [3]


def test_the_next_writer_goes_on(url, s3, tmp_path):  # noqa: F811
    bucket = f"next-{tmp_path.name[-40:].replace('_', '-').lower().strip('-')}"
    late = f"s3://{bucket}/run"
    with CheckpointWriter(tmp_path / "a", upload=late, keep_last=1) as writer:
        for step in (1, 2):
            writer.save(state_of(step))
    assert [found.step for found in list_checkpoints(tmp_path / "a")] == [2, 1]
    s3.fs.mkdir(bucket)
    with CheckpointWriter(tmp_path / "a", upload=late, keep_last=1) as writer:
        writer.start()
        wait_until(lambda: writer.statistics().uploaded == 2)
        wait_until(lambda: writer.statistics().deleted == 1)
    assert there(late) == [1, 2]


def test_without_upload_nothing_is_spared(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload="s3://no-such-bucket/run", keep_last=1) as writer:
        for step in (1, 2):
            writer.save(state_of(step))
    with CheckpointWriter(tmp_path / "a", keep_last=1) as writer:
        handle = writer.save(state_of(3))
        with pytest.raises(ArgumentError, match="uploads nothing: pass upload="):
            handle.uploaded  # noqa: B018
    assert [found.step for found in list_checkpoints(tmp_path / "a")] == [3]


def test_it_is_deleted_before_it_is_uploaded(url, s3, tmp_path):  # noqa: F811
    s3.stop()
    try:
        with CheckpointWriter(tmp_path / "a", upload=url) as writer:
            first, second = writer.save(state_of(1)), writer.save(state_of(2))
            second.durable.result(PATIENCE)
            os.unlink(second.path)
            s3.go_on()
            first.uploaded.result(PATIENCE)
            with pytest.raises(ResourceError, match="deleted or changed before it was uploaded"):
                second.uploaded.result(PATIENCE)
    finally:
        s3.go_on()
    assert there(url) == [1]


def test_a_save_that_fails_is_not_uploaded(url, tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path / "a", upload=url, on_error="warn") as writer:
        writer.start()
        (tmp_path / "a" / "x.safetensors").mkdir()
        monkeypatch.setattr(type(writer._directory), "is_taken", lambda *_: False)
        handle = writer.save(state_of(1), name="x")
        error = handle.durable.exception(PATIENCE)
        assert error is not None
        assert handle.uploaded.exception(PATIENCE) is error


def test_a_name_is_used_again_before_it_is_uploaded(url, s3, tmp_path):  # noqa: F811
    s3.stop()
    try:
        with CheckpointWriter(tmp_path / "a", upload=url) as writer:
            first = writer.save(state_of(1), name="x")
            first.durable.result(PATIENCE)
            os.unlink(first.path)
            second = writer.save(state_of(2), name="x")
            second.durable.result(PATIENCE)
            s3.go_on()
            with pytest.raises(ResourceError, match="deleted or changed"):
                first.uploaded.result(PATIENCE)
            assert second.uploaded.result(PATIENCE) == f"{url}/x.safetensors"
    finally:
        s3.go_on()
    assert there(url) == [2]


def test_metrics_that_are_no_numbers(url, tmp_path):
    """An entry with a NaN equals no other one: it is uploaded once all the same."""
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        writer.save(state_of(1), metrics={"loss": float("nan")}).uploaded.result(PATIENCE)
        assert list_checkpoints(tmp_path / "a")[0].uploaded


def test_an_upload_cannot_be_cancelled(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        handle = writer.save(state_of(1))
        assert not handle.uploaded.cancel()
        assert not handle.staged.cancel()
        assert handle.uploaded.result(PATIENCE)


def test_the_local_list_is_lost(url, tmp_path, monkeypatch):
    """Nobody waits for what is not known any more."""
    lost = str(tmp_path / "a" / index.INDEX)
    code = (
        "import os; from tests.faults import points; points.install('shmtensor.checkpoint'); "
        f"points.arm('finish.done', lambda: os.unlink({lost!r})); "
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "LAUNCH", code + process_handle.LAUNCH)
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        handle = writer.save(state_of(1))
        with pytest.raises(ResourceError, match="deleted or changed before it was uploaded"):
            handle.uploaded.result(PATIENCE)
        assert writer.save(state_of(2)).uploaded.result(PATIENCE)
    assert there(url) == [2]


def test_a_list_that_would_be_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MAX_LIST", 10_000)
    target = upload.Target.__new__(upload.Target)
    target._keep, target._renames = Keep(), False
    target.path = Memory(index._render([saved(step) for step in range(100)]))
    target.add_to_list(saved(100), [saved(100)])
    assert len(target.path.data) <= 10_000
    assert index.parse(target.path.data)[-1].step == 100


def test_large_files_have_larger_parts(monkeypatch):
    calls = []

    def put_file(local, remote, callback, chunksize, max_concurrency):
        calls.append(chunksize)

    for nbytes in (1, 80 << 30, 1 << 40):
        remote = Memory()
        remote.protocols, remote.put_file = ("s3",), put_file
        remote.info = lambda key, nbytes=nbytes: {"size": nbytes}
        upload.put_file("a", remote, nbytes)
        assert calls[-1] * upload._PARTS >= nbytes
    assert calls[0] == upload.PART


def test_another_directory_takes_the_url(url, s3, tmp_path):  # noqa: F811
    """It goes on with the list there, and overwrites nothing, not even when it tries again."""
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        writer.save(state_of(1)).uploaded.result(PATIENCE)
        writer.save(state_of(2), name="final").uploaded.result(PATIENCE)
    with CheckpointWriter(tmp_path / "b", upload=url) as writer:
        for state, name in ((state_of(1), None), (state_of(3), "final")):
            handle = writer.save({**state, "w": np.zeros(3)}, name=name)
            assert handle.durable.result(PATIENCE)
            with pytest.raises(ResourceError, match=r"is another checkpoint of this name, which is not overwritten"):
                handle.uploaded.result(PATIENCE)
        assert writer.save(state_of(4)).uploaded.result(PATIENCE)
    assert there(url) == [1, 2, 4]
    s3.fs.rm_file(f"{url.removeprefix('s3://')}/final.safetensors")  # now the name is free
    with CheckpointWriter(tmp_path / "b", upload=url) as writer:
        writer.save(state_of(5)).uploaded.result(PATIENCE)
        wait_until(lambda: writer.statistics().uploaded == 2)
    assert [entry.step for entry in upload.Target(url, lambda: False).read_list()] == [1, 3, 4, 5]
    assert load_arrays(f"{url}/final.safetensors")["step"] == 3


def test_one_error_is_enough_while_a_server_is_away(url, tmp_path, monkeypatch):
    """All that is pending is not tried, one after the other, with each save."""
    tries = tmp_path / "tries"
    launching(monkeypatch, f"""
        from shmtensor.checkpoint import upload
        def put_file(*args):
            with open({str(tries)!r}, "a") as file:
                file.write("x")
            raise OSError("away")
        upload.put_file, upload.Target.is_away = put_file, lambda self: True
    """)  # fmt: skip
    with CheckpointWriter(tmp_path / "a", upload=url, on_error="warn") as writer:
        for step in range(1, 5):
            handle = writer.save(state_of(step))
            with pytest.raises(ResourceError, match=f"step-0000000{step}.safetensors is durable, and was not .* away"):
                handle.uploaded.result(PATIENCE)
    assert tries.read_text() == "xxxx"


def test_a_timeout_of_close(url, s3, tmp_path):  # noqa: F811
    writer = CheckpointWriter(tmp_path / "a", upload=url)
    s3.stop()
    try:
        writer.save(state_of(1)).durable.result(PATIENCE)
        with pytest.raises(TimedOut, match="1 uploaded"):
            writer.close(timeout=0.2)
    finally:
        s3.go_on()
    writer.close()
    assert there(url) == [1]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (7, ArgumentTypeError, "must be a URL"), ("runs/b", ArgumentError, "is no URL"),
        ("s3:///bucket/b", ArgumentError, "no bucket or host"),
        ("file:///tmp/b", ArgumentError, "a directory of this machine"),
        ("memory://b", ArgumentError, "another process"),
        ("https://me:secret@host/b", ArgumentError, "'https://host/b'"),
        ("quux://b", ArgumentError, "Protocol not known"),
        ("s3://bucket//runs/a", ArgumentError, "two slashes after the bucket"),
        ("s3://bucket/run?x", ArgumentError, r"'\?' is no part of a name"),
        ("dir::s3://bucket/b", ArgumentError, "pass 's3://bucket/b'"),
    ],
)  # fmt: skip
def test_what_is_no_target(tmp_path, given, error, text):
    with pytest.raises(error, match=text) as raised:
        CheckpointWriter(tmp_path / "a", upload=given)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "a").exists()


def test_fsspec_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DependencyError, match=r"'\.\[remote\]'"):
        CheckpointWriter(tmp_path / "a", upload="s3://bucket/a")


def test_the_url_is_in_no_command_line(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        writer.start()
        for file in ("cmdline", "environ"):
            assert url not in Path(f"/proc/{writer.statistics().pid}/{file}").read_text()


# --- the list at the URL


@pytest.mark.parametrize(
    ("there", "order", "new", "expected"),
    [
        (None, [1], 1, [1]), ([1], [1, 2], 2, [1, 2]), ([1, 3], [1, 2, 3], 2, [1, 2, 3]), ([1, 2], [1, 2], 1, [1, 2]),
        ([7, 8], [1], 1, [7, 8, 1]), ([4, 5], [3, 6], 3, [3, 4, 5]), ([1, 4, 5], [3, 5, 6], 3, [1, 3, 4, 5]),
        ([7, 1, 3], [1, 2, 3, 4], 2, [7, 1, 2, 3]),
        (b"{", [1], 1, [1]), (b"[]", [1], 1, [1]),
    ],
)  # fmt: skip
def test_the_order_at_the_url(there, order, new, expected):
    target = upload.Target.__new__(upload.Target)
    target._keep, target._renames = Keep(), False
    target.path = Memory(
        there if there is None or isinstance(there, bytes) else index._render([saved(step) for step in there])
    )
    target.add_to_list(saved(new), [saved(step) for step in order])
    found = index.parse(target.path.data)
    assert [entry.step for entry in found] == expected
    assert found[expected.index(new)].upload == ""


def entry_of(step, writer, at, *, ranks=False):
    """An entry of a writer, whose files are of a time."""
    return replace(saved(step), writer=writer * 16, files=((MANIFEST if ranks else "", 5, at),))


@pytest.mark.parametrize("ranks", [False, True])
def test_the_order_of_what_several_writers_have_saved(ranks):
    """By the times of the files, wherever the local list does not say. The newest here is the newest there."""
    target = upload.Target.__new__(upload.Target)
    target._keep, target._renames = Keep(), False
    old, first, second = (
        entry_of(step, writer, 10 * step, ranks=ranks) for step, writer in ((1, "a"), (5, "b"), (6, "c"))
    )
    ahead = entry_of(9, "d", 1000, ranks=ranks)  # of another machine, whose clock is ahead
    target.path = Memory(index._render([old, second]))
    new = entry_of(7, "c", 70, ranks=ranks)
    target.add_to_list(first, [first, new])
    assert [entry.step for entry in index.parse(target.path.data)] == [1, 5, 6]
    target.path = Memory(index._render([old, ahead]))
    target.add_to_list(new, [first, new])
    assert [entry.step for entry in index.parse(target.path.data)] == [1, 9, 7]


def test_steps_of_ranks_that_go_back():
    """A run that goes back by itself saves a smaller step later."""
    target = upload.Target.__new__(upload.Target)
    target._keep, target._renames = Keep(), False
    target.path = Memory(index._render([entry_of(9, "a", 90, ranks=True)]))
    again = entry_of(4, "a", 91, ranks=True)
    target.add_to_list(again, [again, entry_of(5, "a", 92, ranks=True)])
    assert [entry.step for entry in index.parse(target.path.data)] == [9, 4]


def test_a_name_of_another_save_is_never_listed_as_ours():
    """What is pending here under the name of another one there."""
    target = upload.Target.__new__(upload.Target)
    target._keep, target._renames = Keep(), False
    theirs, ours, new = entry_of(1, "a", 10), entry_of(1, "b", 20), entry_of(2, "b", 30)
    target.path = Memory(index._render([theirs]))
    target.add_to_list(new, [ours, new])
    assert [entry.writer[0] for entry in index.parse(target.path.data)] == ["a", "b"]
    assert [entry.step for entry in index.parse(target.path.data)] == [1, 2]


def test_an_entry_says_whether_it_is_uploaded(tmp_path):
    index.write(str(tmp_path), [saved(1), saved(2)])
    document = json.loads((tmp_path / index.INDEX).read_bytes())
    assert [entry.upload for entry in index.read(str(tmp_path))] == [PENDING, PENDING]
    document["saves"][0]["upload"] = UPLOADED
    del document["saves"][1]["upload"]  # an earlier version's
    (tmp_path / index.INDEX).write_text(json.dumps(document))
    assert [entry.upload for entry in index.read(str(tmp_path))] == [UPLOADED, ""]
    document["saves"][0]["upload"] = "perhaps"
    (tmp_path / index.INDEX).write_text(json.dumps(document))
    assert index.read(str(tmp_path)) == []


# --- deaths


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", UPLOAD_POINTS)
def test_the_writing_process_dies(url, dies, tmp_path, point, nth):  # noqa: F811
    dies(point, "kill", nth)
    with CheckpointWriter(tmp_path / "a", upload=url, keep_last=1) as writer:
        handles = [writer.save(state_of(step)) for step in (1, 2, 3)]
        assert all(handle.uploaded.result(PATIENCE) == f"{url}/{handle.name}" for handle in handles)
        assert writer.statistics().restarts == 1
    assert there(url) == [1, 2, 3]
    assert [(found.step, found.uploaded) for found in list_checkpoints(tmp_path / "a")] == [(3, True)]


TRAINER = """
    import os, signal, sys
    prefix, path, url, launch = sys.argv[1:]
    from shmtensor.checkpoint import names, process_handle
    from shmtensor.checkpoint.writer import CheckpointWriter
    from tests.checkpoint.test_deaths import state_of
    names.PREFIX = prefix
    process_handle.LAUNCH = launch + process_handle.LAUNCH
    writer = CheckpointWriter(path, upload=url)
    for step in (1, 2):
        writer.save(state_of(step)).durable.result(120)
    print(writer.statistics().pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def trainer(path, url, launch=""):
    """Run a trainer that is killed when two saves are durable; the process id of its writing process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINER), names.PREFIX, str(path), url, launch],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout)


def test_the_trainer_dies(url, tmp_path):
    """The writing process uploads what is durable, and ends."""
    wait_for_end(trainer(tmp_path / "a", url))
    assert there(url) == [1, 2]
    assert [found.uploaded for found in list_checkpoints(tmp_path / "a")] == [True, True]


@pytest.mark.parametrize("point", UPLOAD_POINTS)
def test_both_die(url, tmp_path, point):
    """The next writer uploads what is left."""
    launch = "from tests.faults import points; points.install('shmtensor.checkpoint'); "
    wait_for_end(trainer(tmp_path / "a", url, f"{launch}points.arm({point!r}, 'kill', 1); "))
    with CheckpointWriter(tmp_path / "a", upload=url) as writer:
        assert writer.save(state_of(3)).uploaded.result(PATIENCE)
        wait_until(lambda: all(found.uploaded for found in list_checkpoints(tmp_path / "a")))
    assert there(url) == [1, 2, 3]


def test_an_orphan_hands_its_uploads_to_the_next_writer(url, s3, tmp_path):  # noqa: F811
    """A new trainer's saves do not wait for the uploads of a dead one's process."""
    s3.stop()
    try:
        pid = trainer(tmp_path / "a", url)
        time.sleep(0.5)
        assert os.path.exists(f"/proc/{pid}")  # it tries to upload
        with CheckpointWriter(tmp_path / "a", upload=url) as writer:
            assert writer.save(state_of(3)).durable.result(PATIENCE)
            wait_for_end(pid)
            s3.go_on()
            wait_until(lambda: writer.statistics().uploaded == 3)
    finally:
        s3.go_on()
    assert there(url) == [1, 2, 3]


def test_the_trainers_end_waits_for_uploads(url, tmp_path):
    code = (
        f"import shmtensor; from shmtensor.checkpoint import names; names.PREFIX = {names.PREFIX!r}\n"
        f"from tests.checkpoint.test_deaths import state_of\n"
        f"writer = shmtensor.CheckpointWriter({str(tmp_path / 'a')!r}, upload={url!r})\n"
        "writer.save(state_of(1))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=PATIENCE, check=True)
    assert there(url) == [1]
    assert shmtensor.load_arrays(url)["step"] == 1


# --- what stays at the URL


def save_five(path, url, **more):
    """Losses 5, 1, 3, 4, 2 by step; step 1 is also `first`."""
    with CheckpointWriter(path, upload=url, on_error="warn", **more) as writer:
        for step, loss in enumerate([5, 1, 3, 4, 2], 1):
            alias = "first" if step == 1 else None
            writer.save(state_of(step), metrics={"loss": loss}, alias=alias).uploaded.result(PATIENCE)
        return writer.statistics()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upload_keep_last": 1}, [1, 5]), ({"upload_keep_last": 2, "keep_every": 3}, [1, 3, 4, 5]),
        ({"upload_keep_last": 1, "keep_best": ("loss", "min", 1)}, [1, 2, 5]),
        ({"upload_keep_last": 1, "max_shard": 500_000}, [1, 5]), ({"keep_last": 1}, [1, 2, 3, 4, 5]),
    ],
)  # fmt: skip
def test_what_stays_at_the_url(url, s3, tmp_path, options, expected):  # noqa: F811
    save_five(tmp_path / "a", url, **options)
    assert there(url) == expected
    assert load_arrays(f"{url}/first")["step"] == 1
    s3.fs.invalidate_cache()
    names_there = {name.rpartition("/")[2] for name in s3.fs.ls(url.removeprefix("s3://"), detail=False)}
    assert {int(name.split("-")[1].split(".")[0]) for name in names_there - {index.INDEX}} == set(expected)
    kept = [1, 5] if "keep_last" in options else [1, 2, 3, 4, 5]  # on this disk only `keep_last` deletes
    assert sorted(found.step for found in list_checkpoints(tmp_path / "a")) == kept


def test_what_somebody_changed_at_the_url_stays(url, s3, tmp_path, caplog):  # noqa: F811
    key = f"{url.removeprefix('s3://')}/step-00000001.safetensors"
    with CheckpointWriter(tmp_path / "a", upload=url, upload_keep_last=1) as writer:
        writer.save(state_of(1)).uploaded.result(PATIENCE)
        s3.fs.pipe_file(key, b"somebody's")
        writer.save(state_of(2)).uploaded.result(PATIENCE)
    s3.fs.invalidate_cache()
    assert s3.fs.cat_file(key) == b"somebody's"


def test_one_that_failed_is_older_than_those_that_followed(url, tmp_path, monkeypatch):
    """`keep_last` has deleted these here: neither is the older one the newest at the URL, nor kept in their place."""
    fails = tmp_path / "fails"
    fails.touch()
    launching(monkeypatch, f"""
        import os
        from shmtensor.checkpoint import upload
        put = upload.put_file
        def put_file(local, *args):
            if "00000003" in local and os.path.exists({str(fails)!r}):
                raise OSError("not now")
            put(local, *args)
        upload.put_file = put_file
    """)  # fmt: skip
    with CheckpointWriter(tmp_path / "a", upload=url, keep_last=1, upload_keep_last=2, on_error="warn") as writer:
        for step in (3, 4, 5):
            error = writer.save(state_of(step)).uploaded.exception(PATIENCE)
            assert (error is None) == (step != 3)
        wait_until(lambda: writer.statistics().deleted == 1)  # 4, of which no local list knows anything now
        fails.unlink()
        writer.save(state_of(6)).uploaded.result(PATIENCE)
    assert there(url) == [5, 6]


@pytest.mark.parametrize("point", PRUNE_POINTS)
def test_the_writing_process_dies_while_it_deletes_at_the_url(url, dies, tmp_path, point):  # noqa: F811
    dies(point)
    with CheckpointWriter(tmp_path / "a", upload=url, upload_keep_last=1) as writer:
        for step in (1, 2, 3):
            assert writer.save(state_of(step)).uploaded.result(PATIENCE)
        assert writer.statistics().restarts == 1
    assert there(url) == [3]
