"""Uploads of checkpoints that several ranks save: each its part, the manifest last, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmtensor import ArgumentError, CheckpointWriter, ResourceError, list_checkpoints, load_arrays
from shmtensor.checkpoint import index, names, process_handle, run_record
from shmtensor.checkpoint.directory import Keep
from shmtensor.checkpoint.index import PENDING
from shmtensor.checkpoint.manifest import MANIFEST
from shmtensor.checkpoint.upload import Marks, RankUploads

from ..scenes import ROOT
from ..waiting import wait_for_end, wait_until
from .servers import s3  # noqa: F401
from .test_deaths import RANK_UPLOAD_POINTS, SOAK, own_channels  # noqa: F401
from .test_ranks import PATIENCE, check, close_all, dies, names_in, open_writers, part_of, save_all  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


@pytest.fixture
def url(s3, tmp_path):  # noqa: F811
    s3.fs.invalidate_cache()
    return f"s3://bucket/{tmp_path.name}"


def there(url: str, count: int = 2) -> list[int]:
    """The steps at the URL, by its list, the oldest first; each is read and compared with its digests."""
    listed = list_checkpoints(url)
    for found in listed:
        assert found.error is None
        state = load_arrays(found.path, verify="all")
        assert list(state) == list(range(count))
        for rank, part in state.items():
            assert part["w"].tobytes() == part_of(rank, found.step)["w"].tobytes()
    return [found.step for found in reversed(listed)]


def uploaded(path: Path) -> list[tuple[int, bool]]:
    return [(found.step, found.uploaded) for found in reversed(list_checkpoints(path))]


def all_uploaded(path: Path) -> bool:
    return all(found.uploaded for found in list_checkpoints(path))


def marks(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.endswith(".uploads")]


def test_every_rank_uploads_its_part(url, tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2, upload=url, keep_last=1)
    for step in (1, 2, 3):
        for handle in save_all(writers, step, metrics={"loss": step}, alias="best" if step == 1 else None):
            assert handle.uploaded.result(PATIENCE) == f"{url}/step-{step:08d}"
    assert [writer.statistics().uploaded for writer in writers] == [3, 3]
    close_all(writers)
    assert there(url) == [1, 2, 3]
    assert load_arrays(f"{url}/best", rank=1)["step"] == 1
    assert load_arrays(url, rank=0)["step"] == 3
    assert uploaded(path) == [(1, True), (3, True)]  # keep_last, and the second name
    assert marks(path) == []


def test_the_manifest_is_last(url, s3, tmp_path, monkeypatch):  # noqa: F811
    """While a part is missing at the URL, nothing there names the checkpoint, nor is it deleted here."""
    path = tmp_path / "a"
    monkeypatch.chdir(ROOT)
    stops = (
        "from tests.checkpoint.orders import settings\n"
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        "if settings['rank']: points.arm('upload.own', 'stop', 2)\n"
    )
    monkeypatch.setattr(process_handle, "LAUNCH", stops + process_handle.LAUNCH)
    writers = open_writers(path, 2, upload=url, keep_last=1)
    for handle in save_all(writers, 1):
        handle.uploaded.result(PATIENCE)
    pid = writers[1].statistics().pid
    one, _ = save_all(writers, 2)
    try:
        one.durable.result(PATIENCE)
        key, run = f"{url.removeprefix('s3://')}/step-00000002", f"{run_record.read(str(path)).number:016x}"
        wait_until(lambda: (path / f".step-00000002.{run}.uploads" / "rank-00000.safetensors.done").exists())
        s3.fs.invalidate_cache()
        assert not s3.fs.exists(f"{key}/{MANIFEST}")
        assert load_arrays(url)[0]["step"] == 1
        assert not one.uploaded.done()
        assert [entry.upload for entry in index.read(str(path))][-1] == PENDING
    finally:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        os.kill(pid, signal.SIGCONT)
    close_all(writers)
    assert there(url) == [1, 2]


def test_an_upload_that_fails_fails_for_all_and_goes_on(s3, tmp_path, caplog):  # noqa: F811
    """The next save uploads what is left, in the old order; nothing was deleted meanwhile."""
    bucket = f"late-{tmp_path.name[-40:].replace('_', '-').lower().strip('-')}"
    late, path = f"s3://{bucket}/run", tmp_path / "a"
    writers = open_writers(path, 2, upload=late, keep_last=1)
    for step in (1, 2):
        for handle in save_all(writers, step):
            assert handle.durable.result(PATIENCE)
            with pytest.raises(ResourceError, match=f"step-0000000{step} is durable, and was not uploaded to s3://"):
                handle.uploaded.result(PATIENCE)
    assert uploaded(path) == [(1, False), (2, False)]
    s3.fs.mkdir(bucket)
    for handle in save_all(writers, 3):
        assert handle.uploaded.result(PATIENCE)
    wait_until(lambda: len(list_checkpoints(path)) == 1)
    close_all(writers)
    assert there(late) == [1, 2, 3]
    assert uploaded(path) == [(3, True)]
    assert marks(path) == []


def test_urls_that_differ_make_no_checkpoint(url, tmp_path):
    path = tmp_path / "a"
    writers = [
        CheckpointWriter(path, rank=rank, world_size=2, upload=each, on_error="warn")
        for rank, each in enumerate([url, f"{url}-other"])
    ]
    for handle in save_all(writers, 1):
        assert "upload= is not the same on all ranks" in str(handle.durable.exception(PATIENCE))
        assert handle.uploaded.exception(PATIENCE) is not None
    close_all(writers)
    assert names_in(path) == set()


# --- deaths


@pytest.mark.parametrize("point", RANK_UPLOAD_POINTS)
def test_a_writing_process_dies(url, dies, tmp_path, point):  # noqa: F811
    """It is started again, or another rank's goes on: everything is uploaded all the same."""
    path = tmp_path / "a"
    dies(point)
    writers = open_writers(path, 2, upload=url, keep_last=1)
    for step in (1, 2, 3):
        for handle in save_all(writers, step):
            assert handle.uploaded.result(PATIENCE) == f"{url}/{handle.name}"
    assert sum(writer.statistics().restarts for writer in writers) == 1
    close_all(writers)
    assert there(url) == [1, 2, 3]
    assert uploaded(path)[-1] == (3, True)
    assert all_uploaded(path)


TRAINERS = """
    import os, signal, sys
    prefix, path, url, launch, end = sys.argv[1:]
    from shmtensor.checkpoint import names, process_handle
    from tests.checkpoint.test_ranks import open_writers, save_all
    from tests.waiting import stop
    names.PREFIX = prefix
    process_handle.LAUNCH = launch + process_handle.LAUNCH
    writers = open_writers(path, 2, upload=url)
    for step in (1, 2):
        for handle in save_all(writers, step):
            handle.durable.result(120)
    print(*(writer.statistics().pid for writer in writers), flush=True)
    exec(end)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def trainers(path: Path, url: str, launch: str = "", end: str = "") -> list[int]:
    """Run the trainers of two ranks, which are killed when two checkpoints are durable; their writing processes."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINERS), names.PREFIX, str(path), url, launch, end],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [int(pid) for pid in done.stdout.split()]


def test_all_trainers_die(url, tmp_path):
    """The writing processes upload what is durable, and end."""
    for pid in trainers(tmp_path / "a", url):
        wait_for_end(pid)
    assert there(url) == [1, 2]
    assert all_uploaded(tmp_path / "a")
    assert marks(tmp_path / "a") == []


@pytest.mark.parametrize("count", [2, *[1, 3] * SOAK])
@pytest.mark.parametrize("point", RANK_UPLOAD_POINTS)
def test_all_die(url, tmp_path, point, count):
    """The next run uploads what is left, with whatever world size."""
    path = tmp_path / "a"
    launch = "from tests.faults import points; points.install('shmtensor.checkpoint'); "
    for pid in trainers(path, url, f"{launch}points.arm({point!r}, 'kill', 1); ", "import time; time.sleep(0.2)"):
        wait_for_end(pid)
    writers = open_writers(path, count, upload=url)
    for writer in writers:
        writer.start()
    wait_until(lambda: all_uploaded(path) and not marks(path))
    close_all(writers)
    assert there(url) == [1, 2]


def test_a_process_that_saves_alone_uploads_what_ranks_have_left(url, s3, tmp_path):  # noqa: F811
    path = tmp_path / "a"
    s3.stop()
    try:
        for pid in trainers(path, url):
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
    finally:
        s3.go_on()
    with CheckpointWriter(path, upload=url) as writer:
        writer.start()
        wait_until(lambda: writer.statistics().uploaded == 2)
    assert there(url) == [1, 2]
    assert marks(path) == []


def test_a_rank_dies_after_the_commit(url, s3, tmp_path):  # noqa: F811
    """Trainer and writing process of one rank: another one's process uploads its part."""
    path = tmp_path / "a"
    s3.stop()
    try:
        pids = trainers(path, url)
        os.kill(pids[1], signal.SIGKILL)
        wait_for_end(pids[1])
    finally:
        s3.go_on()
    wait_for_end(pids[0])
    assert there(url) == [1, 2]
    assert all_uploaded(path)
    with CheckpointWriter(path, rank=0, world_size=1) as writer:  # which removes what both left in shared memory
        writer.start(timeout=PATIENCE)


def test_orphans_hand_their_uploads_to_the_next_run(url, s3, tmp_path):  # noqa: F811
    """A new run's checkpoints do not wait for the uploads of dead trainers' processes."""
    path = tmp_path / "a"
    s3.stop()
    try:
        pids = trainers(path, url)
        writers = open_writers(path, 2, upload=url)
        handles = save_all(writers, 3)
        for handle in handles:
            handle.durable.result(PATIENCE)
        for pid in pids:
            wait_for_end(pid)
    finally:
        s3.go_on()
    for handle in handles:
        handle.uploaded.result(PATIENCE)
    wait_until(lambda: all_uploaded(path))
    close_all(writers)
    assert there(url) == [1, 2, 3]


# --- the order


class Listing:
    """What `RankUploads` needs of a `Target`: `names` are those that are listed."""

    def __init__(self):
        self.names = []

    def check_free(self, entry):
        pass

    def is_away(self):
        return False

    def put_file(self, directory, entry, name):
        pass

    def add(self, directory, entry, entries):
        self.names.append(entry.name)


def pending_uploads(path):
    """Two checkpoints of one rank, whose upload is pending, and its `RankUploads`, without a thread."""
    writers = open_writers(path, 1)
    for step in (1, 2):
        save_all(writers, step)
    close_all(writers)
    entries = [replace(entry, upload=PENDING) for entry in index.read(str(path))]
    index.write(str(path), entries)
    directory = SimpleNamespace(
        path=str(path), rank=0, world_size=1, run=1, try_complete=lambda: True, end_complete=lambda: None,
        at=lambda name: str(path / name), is_uploaded=lambda entry: False,
    )  # fmt: skip
    uploads = RankUploads("s3://bucket/run", directory, Keep())
    uploads._thread = object()
    uploads.add(entries)
    return uploads, entries


def test_the_oldest_is_completed_first(tmp_path):
    """Whichever is looked at first."""
    uploads, _ = pending_uploads(tmp_path / "a")
    target, (first, second) = Listing(), uploads._uploads
    for upload in (first, second):
        upload.marks.done("rank-00000.safetensors")
        upload.own.clear()
    uploads._look(second, target)
    assert target.names == []
    uploads._look(first, target)
    uploads.release(uploads.take())
    assert second.next == 0  # it is its turn
    uploads._look(second, target)
    assert target.names == ["step-00000001", "step-00000002"]


def test_one_that_is_tried_again_is_still_the_oldest(tmp_path):
    uploads, entries = pending_uploads(tmp_path / "a")
    target, first = Listing(), uploads._uploads[0]
    uploads._fail(first, OSError(5, "not now"), target)
    assert uploads.take().error is not None
    uploads.add(entries)
    assert [upload.entry.step for upload in uploads._uploads] == [1, 2]


def test_one_error_is_enough_while_a_server_is_away(tmp_path):
    """The others are not asked for one after the other; their parts are marked, for the other ranks."""
    uploads, _ = pending_uploads(tmp_path / "a")
    target, (first, second) = Listing(), uploads._uploads
    target.is_away = lambda: True
    uploads._fail(first, OSError(5, "away"), target)
    assert [uploads.take().entry.step for _ in range(2)] == [1, 2]
    assert not uploads.busy
    assert list(second.marks.failures(second.attempt)) == ["rank-00000.safetensors"]


def test_another_directory_takes_the_url(url, tmp_path):
    """Nothing is overwritten, and every rank is told."""
    for path in (tmp_path / "a", tmp_path / "b"):
        writers = open_writers(path, 2, upload=url)
        handles = save_all(writers, 1)
        if path.name == "a":
            assert all(handle.uploaded.result(PATIENCE) for handle in handles)
        else:
            for handle in handles:
                with pytest.raises(ResourceError, match="is another checkpoint of this name"):
                    handle.uploaded.result(PATIENCE)
        close_all(writers)
    assert there(url) == [1]
    assert uploaded(tmp_path / "b") == [(1, False)]


# --- marks


def entry_of(path: Path) -> index.Saved:
    (found,) = index.read(str(path))
    return found


def test_a_mark_counts_only_for_the_part_that_was_uploaded(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    save_all(writers, 1)
    close_all(writers)
    entry = entry_of(path)
    marked, part = Marks(str(path), entry), "rank-00001.safetensors"
    assert not marked.is_done(part)
    marked.done(part)
    assert marked.is_done(part)
    changed = [(name, nbytes, at + 1) for name, nbytes, at in entry.files]
    assert not Marks(str(path), replace(entry, files=tuple(changed))).is_done(part)
    marked.failed(part, "7 a b", "x" * 5000)
    assert marked.failures("7 a b").keys() == {part}
    assert marked.failures("7 a c") == {}
    marked.begin(part)
    assert marked.failures("7 a b") == {}
    mark = path / marks(path)[0] / f"{part}.done"
    mark.unlink()
    os.mkfifo(mark)
    assert not marked.is_done(part)  # and it does not wait


def test_marks_of_what_is_not_pending_are_removed(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 1)
    save_all(writers, 1)
    close_all(writers)
    Marks(str(path), entry_of(path)).done("rank-00000.safetensors")
    (path / ".x.uploads").mkdir()  # not ours
    with CheckpointWriter(path, rank=0, world_size=1) as writer:
        writer.start()
        wait_until(lambda: marks(path) == [".x.uploads"])


@pytest.mark.parametrize("value", ["x", 7, None, "0" * 17])
def test_a_vote_with_a_wrong_url_counts_as_none(tmp_path, value):
    vote = run_record.Vote(0, 1, 1, "rank-00000.pt", 1, 1, "0" * 16, 1, {}, "", False, "")
    for upload, counts in (("", True), ("0" * 16, True), (value, False)):
        (tmp_path / "rank-00000.vote").write_text(json.dumps({**vote._asdict(), "upload": upload}))
        assert (run_record.read_vote(str(tmp_path), 0) is not None) == counts


def test_upload_keep_last_needs_upload(tmp_path):
    with pytest.raises(ArgumentError, match="pass upload= as well"):
        CheckpointWriter(tmp_path / "a", upload_keep_last=1)


def test_the_run_file_has_nothing_of_the_url(url, tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 1, upload=url)
    save_all(writers, 1)[0].uploaded.result(PATIENCE)
    close_all(writers)
    assert url not in (path / run_record.RUN).read_text()
