"""Checkpoints and deaths: of the writing process, of the trainer, of both; and a disk that fails.

Each scenario looks at what is on disk afterwards: everything under a final name is whole, `latest` leads to what was
durable last, and nothing else is left, neither there nor in `/dev/shm`.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import shmtensor
from shmtensor.channel import cleanup
from shmtensor.checkpoint import index, names, process_handle, writer_process
from shmtensor.checkpoint.directory import LOCK
from shmtensor.checkpoint.load import load_arrays, load_checkpoint
from shmtensor.checkpoint.ranks import RUN
from shmtensor.checkpoint.slots import HEAD, Stager
from shmtensor.checkpoint.writer import CheckpointWriter
from shmtensor.endpoints.workqueue import Consumer

from ..faults import points
from ..scenes import ROOT, files, play, unswept
from ..waiting import once, stop, wait_for_end

PATIENCE = 120.0

SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))

# the points of a save in the writing process, in the order in which a save comes by them
WRITER_POINTS = [
    "worker.ready", "write.begun", "write.created", "write.chunk", "write.finishing", "write.headers", "write.sized",
    "write.synced", "commit.before", "commit.recorded", "commit.renamed", "commit.durable", "latest.made",
    "latest.moved", "alias.before", "retain.before", "retain.renamed", "retain.deleted", "finish.before",
    "finish.reported", "finish.released", "finish.done",
]  # fmt: skip
STREAM_POINTS = ["stream.written", "stream.logged", "stream.released"]
TRAINER_POINTS = ["stage.begun", "stage.copied", "stage.filled", "stage.ended"]
OTHER_POINTS = ["abandon.done", "discard.removed", "ckptsweep.removed", "worker.finished", "worker.over"]
CLOSE_POINTS = ["close.staged", "close.over", "close.left"]
RANK_POINTS = [
    "vote.begun", "vote.written", "vote.added", "vote.durable", "part.before", "part.released", "ranks.counted",
    "ranks.metadata", "ranks.manifest", "ranks.decided", "ranks.recorded", "ranks.cleared", "ranks.renamed",
    "ranks.durable", "part.reported", "part.done",
]  # fmt: skip
"""Those of several ranks' writing processes: checkpoint/test_ranks.py, as the next."""
GIVING_UP_POINTS = ["giveup.before", "giveup.decided", "refuse.taken", "finish.older", "run.begun", "ranks.ended"]
EXCHANGE_POINTS = ["recorded", "renamed", "pointed", "removed"]  # `encrypt --replace`: test_encryption.py
SEAL_POINTS = ["seal.begun", "seal.written", "seal.journal", "seal.described"]  # test_encryption.py
UPLOAD_POINTS = [
    "upload.begun",
    "upload.file",
    "upload.listed",
    "upload.recorded",
    "upload.reported",
    "upload.retained",
]  # test_upload.py
RANK_UPLOAD_POINTS = [
    "upload.own", "upload.file", "upload.part", "upload.manifest", "upload.listed", "upload.noted",
    "upload.recorded", "upload.cleared", "upload.reported", "upload.retained",
]  # fmt: skip
"""Those of several ranks' uploads: test_rank_upload.py."""
PRUNE_POINTS = ["prune.before", "prune.deleted", "prune.listed"]  # test_upload.py
DIRECT_POINTS = [
    "direct.digested", "direct.noted", "direct.file", "direct.listed", "direct.recorded", "direct.done", "direct.swept",
]  # fmt: skip
"""Those of saves without a local copy: test_streamed.py."""
DEVICE_POINTS = ["offload.started", "offload.copied"]  # a trainer's, with a state on a device: cuda/test_deaths.py
CHECKPOINT_POINTS = [
    *WRITER_POINTS, *STREAM_POINTS, *TRAINER_POINTS, *OTHER_POINTS, *CLOSE_POINTS, *DEVICE_POINTS, *SEAL_POINTS,
    *UPLOAD_POINTS, *(point for point in RANK_UPLOAD_POINTS if point not in UPLOAD_POINTS), *PRUNE_POINTS,
    *DIRECT_POINTS, *RANK_POINTS, *GIVING_UP_POINTS, *(f"exchange.{point}" for point in EXCHANGE_POINTS),
    "convert.begun",  # test_encryption.py
    "scratch.made", "scratch.locked", "scratch.emptied",  # test_cli.py
]  # fmt: skip
"""Every point of `shmtensor/checkpoint/`; `faults/test_matrix.py` has those of the rest."""

WHOLE = "8MiB"  # room for two states
LITTLE = "1MiB"  # a state streams
ELEMENTS = 150_000

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


def state_of(number: int) -> dict:
    return {"w": np.full(ELEMENTS, number), "v": np.full(1000, number), "step": number}


def same(state: dict, expected: dict) -> bool:
    """Bit for bit. (Without torch, which the trainers would import.)"""
    pairs = [(state[key], expected[key]) for key in expected]
    return list(state) == list(expected) and all(
        type(a) is type(b) and (a == b if isinstance(a, int) else (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()))
        for a, b in pairs
    )


def names_in(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()} - {LOCK, RUN, index.INDEX, "latest", "best"}


def check(path: Path, numbers: list[int], latest: int | None, *, swept: bool = True) -> None:
    """Exactly these are there, whole; `latest` leads to that one; nothing else is left."""
    found = {name for name in names_in(path) if swept or not name.startswith(".")}
    assert {int(name.split("-")[1].split(".")[0]) for name in found} == set(numbers), found
    assert len(found) == len(numbers)
    for name in found:
        state = load_arrays(path / name, verify="all")
        assert (state["w"] == state["step"]).all()
        assert (state["v"] == state["step"]).all()
    if latest is not None:
        assert load_arrays(path / "latest")["step"] == latest


def arm(point: str, action: str, nth: int, flag: Path) -> str:
    """Code for the start of a process: at its first start it dies at the point."""
    return (
        f"import os; from tests.faults import points; points.install('shmtensor.checkpoint'); flag = {str(flag)!r}; "
        f"os.path.exists(flag) or (os.close(os.open(flag, os.O_CREAT)), points.arm({point!r}, {action!r}, {nth})); "
    )


@pytest.fixture
def dies(monkeypatch, tmp_path):
    """Lets the first writing process die at a point."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)

    def arrange(point: str, action: str = "kill", nth: int = 1) -> None:
        code = arm(point, action, nth, tmp_path / "flag")
        monkeypatch.setattr(process_handle, "LAUNCH", code + process_handle.LAUNCH)

    return arrange


# --- the writing process dies


def writer_cases():
    cases = [(point, WHOLE, 1) for point in ("worker.ready", "write.chunk", "commit.recorded", "latest.moved")]
    cases += [("finish.released", WHOLE, 1), ("stream.written", LITTLE, 3), ("stream.logged", LITTLE, 3)]
    if SOAK:
        cases += [("stream.released", LITTLE, 3)]
        cases += [(point, WHOLE, 1) for point in WRITER_POINTS]
        cases += [(point, LITTLE, nth) for point in (*WRITER_POINTS, *STREAM_POINTS) for nth in (1, 2)]
        cases += [(point, WHOLE, 2) for point in WRITER_POINTS if point != "retain.renamed"]
        cases = sorted({case for case in cases if case[0] != "retain.renamed"})
    return cases


@pytest.mark.parametrize("action", ["kill", "exit"] if SOAK else ["kill"])
@pytest.mark.parametrize(("point", "memory", "nth"), writer_cases())
def test_writer_dies(dies, tmp_path, point, memory, nth, action):
    """It is started again, and every save is durable all the same."""
    path = tmp_path / "a"
    dies(point, action, nth)
    with CheckpointWriter(path, memory=memory, keep_last=2) as writer:
        handles = [writer.save(state_of(number)) for number in range(1, 5)]
        done = [handle.durable.result(PATIENCE) for handle in handles]
        assert writer.statistics().restarts == (1 if point != "worker.ready" or nth == 1 else 0)
    assert [each.nbytes for each in done] == [handle.progress.total for handle in handles]
    check(path, [3, 4], 4)
    assert [entry.step for entry in index.read(str(path))] == [3, 4]


def test_writer_dies_where_ranks_have_saved_before(dies, tmp_path):
    """What it had streamed is its own, though no run of ranks names it."""
    path = tmp_path / "a"
    with CheckpointWriter(path, rank=0, world_size=1) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
    dies("stream.logged", nth=3)
    with CheckpointWriter(path, memory=LITTLE) as writer:
        done = writer.save(state_of(2), timeout=PATIENCE).durable.result(PATIENCE)
        assert writer.statistics().restarts == 1
    assert same(load_arrays(done.path, verify="all"), state_of(2))


def test_writer_dies_and_somebody_truncates_what_it_had_written(dies, tmp_path, monkeypatch):
    """The save fails: zeros in the place of what is lost would have digests that match."""
    path = tmp_path / "a"
    dies("stream.logged", nth=3)
    truncate = (
        f"import glob, os; found = glob.glob({str(path)!r} + '/.*.tmp') if os.path.exists({str(tmp_path / 'flag')!r}) "
        "else []; [os.truncate(each, 4096) for each in found]; "
    )
    monkeypatch.setattr(process_handle, "LAUNCH", truncate + process_handle.LAUNCH)
    with CheckpointWriter(path, memory=LITTLE) as writer:
        with pytest.raises(shmtensor.ResourceError, match="truncated by somebody"):
            writer.save(state_of(1)).durable.result(PATIENCE)
        assert writer.save(state_of(2)).durable.result(PATIENCE)
        assert writer.statistics().restarts == 1
    check(path, [2], 2)


def test_writer_dies_between_the_names_of_a_deletion(dies, tmp_path):
    path = tmp_path / "a"
    dies("retain.renamed")
    with CheckpointWriter(path, keep_last=1, max_shard=400_000) as writer:
        for number in range(1, 4):
            writer.save(state_of(number))
    assert writer.statistics().restarts == 1
    check(path, [3], 3)


def test_writer_dies_while_it_takes_a_save_back(dies, tmp_path, monkeypatch):
    path = tmp_path / "a"
    dies("abandon.done")
    writer = CheckpointWriter(path, memory="3MiB", busy="replace")
    writer.start(state_of(0), timeout=PATIENCE)
    stop(writer.statistics().pid)
    handles = [writer.save(state_of(number)) for number in (1, 2)]
    pid, stager = writer.statistics().pid, writer._stager
    sent = stager.statistics().sent
    with once(lambda: stager.statistics().sent >= sent + 2, lambda: os.kill(pid, signal.SIGCONT)):  # both are to go
        handles.append(writer.save(state_of(3)))
    assert handles[2].durable.result(PATIENCE)
    assert writer.statistics().restarts == 1
    writer.close()
    assert {handle.status for handle in handles} <= {"durable", "replaced"}
    check(path, [n + 1 for n, handle in enumerate(handles) if handle.status == "durable"], 3)


def test_writer_dies_while_it_sweeps(dies, tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    for number in range(3):
        (path / f".step-0000000{number}.safetensors.{'0' * 16}-{number}.tmp").write_bytes(b"left")
    (path / f".shards.{'0' * 16}-1.tmp").mkdir()
    (path / f".shards.{'0' * 16}-1.tmp" / "x").write_bytes(b"left")
    (path / ".somebody.tmp").write_bytes(b"not ours")
    dies("ckptsweep.removed")
    with CheckpointWriter(path) as writer:
        writer.save(state_of(1))
    assert names_in(path) == {".somebody.tmp", "step-00000001.safetensors"}


def test_what_cannot_be_swept_fails_no_save(tmp_path):
    path = tmp_path / "a"
    left = path / f".shards.{'0' * 16}-1.old"
    (left / "somebody's directory").mkdir(parents=True)
    with CheckpointWriter(path) as writer:
        assert writer.save(state_of(1)).durable.result(PATIENCE)
    assert names_in(path) == {left.name, "step-00000001.safetensors"}


@pytest.mark.parametrize("point", ["worker.finished", "worker.over"])
def test_writer_dies_when_all_is_done(dies, tmp_path, point):
    path = tmp_path / "a"
    dies(point)
    with CheckpointWriter(path) as writer:
        writer.save(state_of(1))
    check(path, [1], 1)
    assert files(names.PREFIX) == set()


def test_writer_is_killed_idle_and_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)
    path = tmp_path / "a"
    with CheckpointWriter(path) as writer:
        for number in range(1, 4):
            writer.start(timeout=PATIENCE)
            os.kill(writer.statistics().pid, signal.SIGKILL)
            writer.save(state_of(number)).durable.result(PATIENCE)
    check(path, [1, 2, 3], 3)


def test_a_trainer_that_waits_for_room_notices_the_death(dies, tmp_path):
    """In the middle of a save that streams, and is never started again: an error, not a hang."""
    path = tmp_path / "a"
    writer = CheckpointWriter(path, memory=LITTLE)
    writer.start(timeout=PATIENCE)
    stop(writer.statistics().pid)
    link_of_writer = writer._process
    link_of_writer._spawn = lambda passed_over: (_ for _ in ()).throw(OSError(12, "no memory"))
    pid = writer.statistics().pid
    with once(lambda: writer._stager and writer._stager.statistics().waits, lambda: os.kill(pid, signal.SIGKILL)):
        try:
            handle = writer.save(state_of(1))
        except shmtensor.PeerDied:
            handle = None
    if handle is not None:
        with pytest.raises(shmtensor.PeerDied, match="cannot be started again"):
            handle.durable.result(PATIENCE)
    assert writer.save(state_of(2)).durable.result(PATIENCE)  # by a new one
    writer.close()
    check(path, [2], 2)


# --- names that move, and what stays

ALIAS_CASES = [("alias.before", 2), ("latest.made", 4)]
"""The step of the second save of two that both have the name; of a link's steps `latest` takes every other one."""
ALIAS_MORE = [
    ("commit.recorded", 2), ("commit.renamed", 2), ("commit.durable", 2), ("latest.made", 3), ("latest.moved", 3),
    ("latest.moved", 4), ("finish.before", 2), ("retain.before", 1), ("retain.deleted", 1), ("finish.reported", 2),
]  # fmt: skip


@pytest.mark.parametrize(("point", "nth"), ALIAS_CASES + ALIAS_MORE * SOAK)
def test_writer_dies_while_a_name_moves(dies, tmp_path, point, nth):
    """The next one moves it; what it led to before is an old checkpoint as any other."""
    path = tmp_path / "a"
    dies(point, "kill", nth)
    with CheckpointWriter(path, memory=WHOLE, keep_last=1, keep_best=("loss", "min", 1)) as writer:
        for number in (1, 2, 3):
            writer.save(state_of(number), metrics={"loss": -number % 3}, alias="best" if number < 3 else None)
    assert writer.statistics().restarts == 1
    check(path, [2, 3], 3)
    assert load_arrays(path / "best", verify="all")["step"] == 2
    assert {entry.step: entry.metrics for entry in index.read(str(path))} == {2: {"loss": 1.0}, 3: {"loss": 0.0}}


BOTH_ALIAS = [("latest.made", 4)]
BOTH_ALIAS_MORE = [
    ("commit.recorded", 2), ("commit.renamed", 2), ("latest.made", 3), ("latest.moved", 3), ("alias.before", 2),
    ("latest.moved", 4), ("finish.released", 2), ("retain.before", 1), ("retain.deleted", 1),
]  # fmt: skip


@pytest.mark.parametrize(("point", "nth"), BOTH_ALIAS + BOTH_ALIAS_MORE * SOAK)
def test_both_die_while_a_name_moves(tmp_path, point, nth):
    """At any time it leads to a whole checkpoint, the old or the new; the next save completes what was left."""
    path = tmp_path / "a"
    launch = BOTH.format(point=point, nth=nth).replace("{", "{{").replace("}", "}}")
    first = "w.save(state_of(1), metrics={'loss': 1}, alias='best').durable.result(120)"
    end = "w.save(state_of(4), metrics={'loss': 0.5}, alias='best')\nsignal.pause()"
    keep = "keep_last=1, keep_best=('loss', 'min', 1)"
    wait_for_end(trainer(path, WHOLE, launch=launch, end=end, keep=keep, first=first))
    renamed = point != "commit.recorded"
    moved = (point, nth) == ("latest.moved", 4) or point.startswith(("finish", "retain"))
    assert load_arrays(path / "best", verify="all")["step"] == (4 if moved else 1)
    check(path, [4] if point == "retain.deleted" else [1, 4] if renamed else [1], None, swept=False)
    with CheckpointWriter(path, keep_last=1, keep_best=("loss", "min", 1)) as writer:
        writer.save(state_of(5)).durable.result(PATIENCE)
    best = 4 if renamed else 1
    assert load_arrays(path / "best", verify="all")["step"] == best
    check(path, [best, 5], 5)
    assert [entry.step for entry in index.read(str(path)) if entry.is_there(str(path))] == [best, 5]


# --- the trainer dies

TRAINER = """
    import os, signal, sys, time
    prefix, path, memory, launch, point, nth, end, keep, first = sys.argv[1:]
    from tests.faults import points
    points.install("shmtensor.checkpoint")
    from shmtensor.checkpoint import names, process_handle
    from shmtensor.checkpoint.writer import CheckpointWriter
    from tests.checkpoint.test_deaths import state_of
    from tests.waiting import stop
    names.PREFIX = prefix
    process_handle.LAUNCH = launch + process_handle.LAUNCH
    w = eval(f"CheckpointWriter(path, memory=memory, {keep})")
    exec(first)
    print(w.statistics().pid, flush=True)
    if point:
        points.arm(point, "kill", int(nth))
"""


def trainer(
    path: Path, memory: str, *, launch: str = "", point: str = "", nth: int = 1, end: str = "",
    keep: str = "keep_last=3", first: str = "w.save(state_of(1)).durable.result(120)",
) -> int:  # fmt: skip
    """Run a trainer that dies; the process id of its writing process."""
    code = textwrap.dedent(TRAINER) + textwrap.dedent(end) + "\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", code, names.PREFIX, str(path), memory, launch, point, str(nth), end, keep, first],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout.split()[-1])


INSIDE = [("stage.begun", 1, WHOLE), ("stage.copied", 2, WHOLE), ("stage.filled", 1, LITTLE)]
INSIDE_MORE = [("stage.begun", 1, LITTLE), ("stage.copied", 2, LITTLE), ("stage.filled", 1, WHOLE)]


@pytest.mark.parametrize(("point", "nth", "memory"), INSIDE + INSIDE_MORE * SOAK)
def test_trainer_dies_inside_save(tmp_path, memory, point, nth):
    """What was not staged to its end is discarded, and the writing process ends."""
    wait_for_end(trainer(tmp_path / "a", memory, point=point, nth=nth, end="w.save(state_of(2))"))
    check(tmp_path / "a", [1], 1)


AFTER = [("stage.ended", LITTLE), ("", WHOLE)]
AFTER_MORE = [("stage.ended", WHOLE), ("", LITTLE)]


@pytest.mark.parametrize(("point", "memory"), AFTER + AFTER_MORE * SOAK)
def test_trainer_dies_after_save(tmp_path, memory, point):
    """The writing process finishes it, and ends."""
    wait_for_end(trainer(tmp_path / "a", memory, point=point, end="w.save(state_of(2)); w.save(state_of(3))"))
    check(tmp_path / "a", [1, 2] if point else [1, 2, 3], 2 if point else 3)


COLD = {
    "no process yet": "",
    "a process that died": "w.start(); ended = os.pidfd_open(pid := w.statistics().pid); os.kill(pid, signal.SIGKILL); "
    "select.select([ended], [], [])",  # not `waitid`: a thread of the writer's may have waited for it already
}


@pytest.mark.parametrize("before", COLD)
def test_trainer_dies_after_the_save_that_started_the_writing_process(tmp_path, before):
    """It has joined when `save` returns, so that it finds what is staged."""
    code = f"""
import os, select, signal, sys
from shmtensor import CheckpointWriter
from tests.checkpoint.test_deaths import state_of
w = CheckpointWriter(sys.argv[1])
{COLD[before]}
w.save(state_of(1))
print(w.statistics().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_end(int(done.stdout.split()[-1]))
    check(tmp_path / "a", [1], 1)


@pytest.mark.parametrize("has_saved", [True, False])
@pytest.mark.parametrize("point", CLOSE_POINTS)
def test_trainer_dies_inside_close(tmp_path, point, has_saved):
    """The writing process is the last one on both channels, whatever the trainer has left before, and removes them."""
    first = "w.save(state_of(1)).durable.result(120)" if has_saved else "w.start(timeout=120)"
    wait_for_end(trainer(tmp_path / "a", WHOLE, point=point, end="w.close()", first=first))
    check(tmp_path / "a", [1] * has_saved, 1 if has_saved else None)
    assert files(names.PREFIX) == set()


def test_trainer_dies_and_the_next_one_waits_for_what_it_left(tmp_path):
    """The old writing process is stopped, as by a slow disk; the new one takes its turn."""
    path = tmp_path / "a"
    pid = trainer(path, WHOLE, end=f"{STOP}w.save(state_of(2)); w.save(state_of(3))")
    with CheckpointWriter(path) as writer:
        writer.start(timeout=PATIENCE)
        handle = writer.save(state_of(4))
        with pytest.raises(concurrent.futures.TimeoutError):
            handle.durable.result(0.3)
        os.kill(pid, signal.SIGCONT)
        handle.durable.result(PATIENCE)
    wait_for_end(pid)
    check(path, [1, 2, 3, 4], 4)


def test_trainer_dies_while_a_writer_starts(tmp_path):
    """A writing process that finds no trainer any more does what is to be done, and ends."""
    end = """
        from tests.waiting import wait_until
        wait = "from tests.waiting import wait_for_end\\nwait_for_end(%d)\\n" % os.getpid()
        process_handle.LAUNCH = wait + process_handle.LAUNCH
        stop(w.statistics().pid)
        w.save(state_of(2))
        os.kill(w.statistics().pid, signal.SIGKILL)
        old = w.statistics().pid
        wait_until(lambda: w.statistics().pid != old)
        print(w.statistics().pid, flush=True)
    """
    wait_for_end(trainer(tmp_path / "a", WHOLE, end=end))
    found = names_in(tmp_path / "a")
    assert found in ({"step-00000001.safetensors"}, {"step-00000001.safetensors", "step-00000002.safetensors"})


def scene_of_a_trainer_that_dies_slowly(directory: str, channel: str, first: str) -> None:
    """Its locks go one after the other, as the kernel drops them; the other one while the writing process waits."""
    ends_of_trainer = {"chunks": Stager(channel, 1 << 20), "reports": Consumer(process_handle.results_channel(channel))}
    stager = ends_of_trainer["chunks"]
    stager.provide(100, 1 << 16)
    stager.send_small(HEAD, 1, np.zeros(100, np.uint8), timeout=PATIENCE, name="a", streams=False)
    settings = {
        "directory": directory, "channel": channel, "writer": "0" * 16, "next": 1, "live": [], "uploading": [],
        "upload": None, "local": True, "keep_last": None, "keep_every": None, "keep_best": None,
    }  # fmt: skip
    working = writer_process.Worker(settings, process_handle.Orders(os.memfd_create("orders"), "r+"))
    ends_of_trainer.pop(first)._member.control.locks.close()

    def let_go(seconds: float) -> None:
        for each in ends_of_trainer.values():
            each._member.control.locks.close()

    writer_process.time = SimpleNamespace(monotonic=time.monotonic, sleep=let_go)
    working.run()
    let_go(0)
    assert files(channel) == set()
    os._exit(0)


@pytest.mark.parametrize("first", ["chunks", "reports"])
def test_trainer_dies_on_one_channel_after_the_other(tmp_path, channel, first):
    """The writing process is the last one on both, and leaves nothing."""
    play(scene_of_a_trainer_that_dies_slowly, str(tmp_path), channel, first)


# --- what is still in memory

STOP = "stop(w.statistics().pid)\n"


def test_the_newest_staged_state_comes_from_memory(tmp_path):
    """The writing process has not begun with it, as with a slow disk; what it writes then is the same."""
    path = tmp_path / "a"
    pid = trainer(path, WHOLE, end=f"{STOP}w.save(state_of(2)); w.save(state_of(3))")
    staged = load_checkpoint(path, from_memory=True)
    assert same(staged, state_of(3))
    assert same(load_arrays(path / "latest", from_memory=True, keys=["v", "step"]), {"v": staged["v"], "step": 3})
    assert load_arrays(path)["step"] == 1
    assert same(shmtensor.load_newest(path), staged)
    os.kill(pid, signal.SIGCONT)
    wait_for_end(pid)
    check(path, [1, 2, 3], 3)
    assert same(load_checkpoint(path, verify="all"), staged)
    assert same(shmtensor.load_newest(path, verify="all"), staged)
    with pytest.raises(FileNotFoundError, match=r"anything left to write.*on disk.*step-00000003.safetensors"):
        load_checkpoint(path, from_memory=True)


def test_a_state_that_was_not_staged_to_its_end_is_passed_over(tmp_path):
    path = tmp_path / "a"
    pid = trainer(path, WHOLE, point="stage.filled", nth=2, end=f"{STOP}w.save(state_of(2)); w.save(state_of(3))")
    try:
        assert same(load_checkpoint(path, from_memory=True), state_of(2))
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_end(pid)
    check(path, [1, 2], 2)


@pytest.mark.parametrize(
    ("memory", "reason"), [(WHOLE, "not copied to its end"), (LITTLE, "larger than memory=")], ids=["half", "streams"]
)
def test_what_is_not_in_memory_is_an_error_that_names_what_is_on_disk(tmp_path, memory, reason):
    path = tmp_path / "a"
    pid = trainer(path, memory, point="stage.copied", nth=2, end=f"{STOP}w.save(state_of(2))")
    try:
        with pytest.raises(FileNotFoundError, match=f"step-00000002.*{reason}.*on disk.*step-00000001.safetensors"):
            load_checkpoint(path, from_memory=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_end(pid)
    check(path, [1], 1)


def test_a_staged_state_outlives_both(tmp_path):
    """Until the next user of shared memory removes what the dead have left."""
    path = tmp_path / "a"
    pid = trainer(path, WHOLE, end=f"{STOP}w.save(state_of(2))")
    with unswept(*(name for name in cleanup.channels() if name.startswith(names.channels_of(str(path))))):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        assert same(load_checkpoint(path, from_memory=True), state_of(2))
    with CheckpointWriter(path) as writer:
        writer.start(timeout=PATIENCE)
        with pytest.raises(FileNotFoundError, match="step-00000001"):
            load_checkpoint(path, from_memory=True)


# --- both die

BOTH = (
    "import os, signal; from tests.faults import points; points.install('shmtensor.checkpoint')\n"
    "def both(point):\n"
    "    if point in points.armed and points.hits.__setitem__(point, points.hits[point] + 1) is None "
    "and points.hits[point] == points.armed[point][1]:\n"
    "        os.kill(os.getppid(), signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)\n"
    "points.hit = both; points.arm({point!r}, 'kill', {nth})\n"
)
BOTH_CASES = [("commit.recorded", WHOLE), ("latest.made", WHOLE), ("stream.logged", LITTLE)]
BOTH_POINTS_MORE = [
    "write.created", "write.chunk", "write.headers", "write.synced", "commit.renamed", "commit.durable",
    "latest.moved", "finish.reported",
]  # fmt: skip
BOTH_MORE = [*((point, WHOLE) for point in BOTH_POINTS_MORE), ("write.synced", LITTLE)]


@pytest.mark.parametrize(("point", "memory"), BOTH_CASES + BOTH_MORE * SOAK)
def test_both_die(tmp_path, point, memory):
    """What was durable is intact and `latest` leads to it; the next writer sweeps what is left."""
    path = tmp_path / "a"
    chunk_points = ("write.chunk", "stream.logged")
    launch = BOTH.format(point=point, nth=2 if point not in chunk_points else 20 if memory == LITTLE else 10)
    launch = launch.replace("{", "{{").replace("}", "}}")
    wait_for_end(trainer(path, memory, launch=launch, end="w.save(state_of(2))\nsignal.pause()"))
    renamed = point in ("commit.renamed", "commit.durable", "latest.made", "latest.moved", "finish.reported")
    check(path, [1, 2] if renamed else [1], 2 if point in ("latest.moved", "finish.reported") else 1, swept=False)
    with CheckpointWriter(path, keep_last=3) as writer:
        writer.save(state_of(5)).durable.result(PATIENCE)
    check(path, [1, 2, 5] if renamed else [1, 5], 5)
    assert [entry.step for entry in index.read(str(path)) if entry.is_there(str(path))] == (
        [1, 2, 5] if renamed else [1, 5]
    )


# --- the disk fails


def scene_of_a_full_disk(directory: str, memory: str) -> None:
    with CheckpointWriter(directory, memory=memory, on_error="warn") as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        error = writer.save({"w": np.ones(1 << 20), "step": 2}).durable.exception(PATIENCE)
        assert isinstance(error, shmtensor.ResourceError), "8 MiB fit into 4"
        assert error.errno == 28, error
        assert "No space left" in str(error)
        check(Path(directory), [1], 1)
        writer.save(state_of(3)).durable.result(PATIENCE)
        check(Path(directory), [1, 3], 3)
        assert writer.statistics().restarts == 0


@pytest.mark.parametrize("memory", ["32MiB", *[LITTLE] * SOAK])
def test_the_disk_is_full(tmp_path, memory):
    play(scene_of_a_full_disk, str(tmp_path), memory, mounts=(f"size=4m tmpfs {tmp_path}",))


def scene_of_a_lost_permission(directory: str) -> None:
    with CheckpointWriter(directory) as writer:
        writer.save(state_of(1)).durable.result(PATIENCE)
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        handle = writer.save(state_of(2))
        error = handle.durable.exception(PATIENCE)
        assert isinstance(error, shmtensor.ResourceError), error
        assert error.errno == 30, error
        subprocess.run(["umount", directory], check=True)
        writer.save(state_of(3)).durable.result(PATIENCE)
    check(Path(directory), [1, 3], 3)


def test_the_permission_is_lost(tmp_path):
    play(scene_of_a_lost_permission, str(tmp_path), mounts=(f"size=40m tmpfs {tmp_path}",))


def scene_of_a_small_shm(directory: str) -> None:
    """Less shared memory than `memory=` admits: the state streams, or the error says so."""
    with CheckpointWriter(directory, memory="64MiB") as writer:
        state = {"w": np.arange(2 << 20), "step": 1}  # 16 MiB through 8
        done = writer.save(state).durable.result(PATIENCE)
        assert (load_arrays(done.path)["w"] == state["w"]).all()


def test_dev_shm_is_small(tmp_path):
    play(scene_of_a_small_shm, str(tmp_path), mounts=("mode=1777,size=8m tmpfs /dev/shm",))


def test_every_point_is_in_a_list():
    assert sorted(CHECKPOINT_POINTS) == points.names("checkpoint")
