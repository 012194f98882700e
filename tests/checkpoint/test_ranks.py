"""Checkpoints that several ranks save together: one commit or none, whoever dies; and how they are read."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.checkpoint import handle as handle_module
from shmtensor.checkpoint import index, names, opening, process_handle, ranks, run_record
from shmtensor.checkpoint.directory import Keep
from shmtensor.checkpoint.manifest import MANIFEST
from shmtensor.checkpoint.writer import CheckpointWriter

from ..commands import app
from ..conftest import descriptors
from ..faults.interrupts import each_boundary, interrupted
from ..scenes import ROOT, files
from ..waiting import stop, wait_for_end, wait_until
from .test_deaths import RANK_POINTS, SOAK, STREAM_POINTS, names_in, own_channels  # noqa: F401

PATIENCE = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


def part_of(rank: int, step: int) -> dict:
    return {"w": np.full(20_000, 1000 * step + rank), "again": [np.full(3, rank)], "step": step}


def open_writers(path: Path, count: int, **more) -> list[CheckpointWriter]:
    return [CheckpointWriter(path, rank=rank, world_size=count, **more) for rank in range(count)]


def save_all(writers, step: int, **more) -> list:
    return [writer.save(part_of(rank, step), **more) for rank, writer in enumerate(writers)]


def close_all(writers) -> None:
    for writer in writers:
        writer.close()


def check(path: Path, steps: list[int], count: int, *, swept: bool = True) -> None:
    """These checkpoints are there and no others, each with every rank's part of this step; nothing is left."""
    found = {name for name in names_in(path) if swept or not name.startswith(".")}
    assert found == {f"step-{step:08d}" for step in steps}
    for step in steps:
        check_one(path / f"step-{step:08d}", step, count)
    if steps:
        assert os.readlink(path / "latest") == f"step-{max(steps):08d}"


def check_one(path: Path, step: int, count: int) -> None:
    state = shmtensor.load_arrays(path, verify="all")
    assert list(state) == list(range(count))
    for rank, part in state.items():
        expected = part_of(rank, step)
        assert part["step"] == step
        assert part["w"].tobytes() == expected["w"].tobytes()
        assert part["again"][0].tobytes() == expected["again"][0].tobytes()


# --- saving and loading


def test_all_ranks_make_one_checkpoint(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 3, keep_last=2)
    for step in (1, 2, 3):
        for handle in save_all(writers, step, metrics={"loss": 1 / step}):
            assert handle.durable.result(PATIENCE).path == str(path / f"step-{step:08d}") == handle.path
    close_all(writers)
    check(path, [2, 3], 3)
    (newest, older) = shmtensor.list_checkpoints(path)
    assert (newest.step, newest.metrics, newest.aliases) == (3, {"loss": 1 / 3}, ("latest",))
    assert (older.step, older.error) == (2, None)
    assert {writer.statistics().durable for writer in writers} == {3}
    assert sum(writer.statistics().deleted for writer in writers) == 1


def test_reading_a_part_or_the_whole(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    save_all(writers, 7, meta={"step": 7})
    close_all(writers)
    one = shmtensor.load_arrays(path, rank=1)
    assert one["w"].tobytes() == part_of(1, 7)["w"].tobytes()
    assert shmtensor.load_arrays(path / "latest", rank=0, keys="step") == {"step": 7}
    assert list(shmtensor.load_arrays(path, keys=["1.w"])) == [1]
    some = shmtensor.load_arrays(path, slices={"1.w": np.s_[:2]}, map=False)
    assert some[1]["w"].tolist() == [7001, 7001]
    assert some[0]["w"].tolist() == part_of(0, 7)["w"].tolist()
    with shmtensor.open_checkpoint(path, arrays=True) as opened:
        assert set(opened) == {"0.w", "0.again.0", "1.w", "1.again.0"}
        assert opened["1.w"].read(np.s_[5]) == 7001
    with pytest.raises(shmtensor.ArgumentError, match="2 ranks"):
        shmtensor.load_checkpoint(path, rank=2)
    with pytest.raises(shmtensor.ArgumentTypeError, match="int"):
        shmtensor.load_checkpoint(path, rank="1")
    assert shmtensor.load_newest(path)[1]["step"] == 7
    assert shmtensor.load_newest(path, rank=1, keys="step") == {"step": 7}
    with pytest.raises(shmtensor.ArgumentError, match="2 ranks"):
        shmtensor.load_newest(path, rank=2)


def test_the_commands_take_a_checkpoint_of_several_ranks(tmp_path):
    writers = open_writers(tmp_path, 2)
    for handle in save_all(writers, 3):
        handle.durable.result(PATIENCE)
    close_all(writers)
    latest, single = str(tmp_path / "latest"), str(tmp_path / "single.safetensors")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["checkpoint", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    found = json.loads(run("info", latest, "--json"))
    assert {tensor["name"].partition(".")[0] for tensor in found["tensors"]} == {"0", "1"}
    assert "ok" in run("verify", latest)
    assert "step-00000003" in run("ls", str(tmp_path))
    run("convert", latest, single)
    whole, again = shmtensor.load_checkpoint(latest), shmtensor.load_checkpoint(single)
    assert {key: sorted(part) for key, part in whole.items()} == {int(key): sorted(part) for key, part in again.items()}


def test_a_rank_of_what_one_process_saved_is_refused(tmp_path):
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.save({"w": np.ones(3), "step": 1})
    with pytest.raises(shmtensor.ArgumentError, match="leave out rank="):
        shmtensor.load_checkpoint(tmp_path / "a", rank=0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": 0}, shmtensor.ArgumentTypeError), ({"world_size": 2}, shmtensor.ArgumentTypeError),
        ({"rank": True, "world_size": 2}, shmtensor.ArgumentTypeError),
        ({"rank": 2, "world_size": 2}, shmtensor.ArgumentError),
        ({"rank": -1, "world_size": 2}, shmtensor.ArgumentError),
        ({"rank": 0, "world_size": 1 << 17}, shmtensor.ArgumentError),
        ({"rank": 0, "world_size": 2, "busy": "skip"}, shmtensor.ArgumentError),
        ({"rank": 0, "world_size": 2, "max_shard": 1 << 20}, shmtensor.ArgumentError),
    ],
)  # fmt: skip
def test_what_cannot_be(tmp_path, options, error):
    with pytest.raises(error):
        CheckpointWriter(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_names_are_those_that_all_ranks_agree_on(tmp_path):
    path = tmp_path / "a"
    for _ in range(2):  # a training that goes on from an older step saves some a second time
        writers = open_writers(path, 2)
        for handle in [*save_all(writers, 1), *save_all(writers, 1), *save_all(writers, 2, name="mine")][:4]:
            handle.durable.result(PATIENCE)
        found = [writer.save({"w": np.ones(3)}) for writer in writers]
        assert len({handle.durable.result(PATIENCE).path for handle in found}) == 1
        if _ == 0:
            with pytest.raises(shmtensor.ArgumentError, match="exists"):
                writers[0].save(part_of(0, 3), name="mine")
            close_all(writers)
            (path / "mine").rename(tmp_path / "mine")
        else:
            close_all(writers)
    found = names_in(path)
    assert found == {
        "step-00000001", "step-00000001-2", "step-00000001-3", "step-00000001-2-2", "mine", "save-00000004",
        "save-00000005",
    }  # fmt: skip


RAISING = {
    "state": lambda writer, state: writer.save({**state, "bad": object()}),
    "metrics": lambda writer, state: writer.save(state, metrics={"loss": "low"}),
    "alias": lambda writer, state: writer.save(state, alias="no alias"),
    "timeout": lambda writer, state: writer.save(state, timeout=-1.0),
}


@pytest.mark.filterwarnings("ignore:checkpoint .* was not written:RuntimeWarning")  # a later `save` may know it already
@pytest.mark.parametrize("raises", RAISING.values(), ids=RAISING)
@pytest.mark.parametrize("step", [{}, {"step": 1}], ids=["count", "step"])
def test_parts_of_two_moments_make_no_checkpoint(tmp_path, raises, step):
    """One rank's `save` raises, and its training goes on: other ranks have counted what it has not."""
    path = tmp_path / "a"
    writers = open_writers(path, 2, on_error="warn")

    def at(moment: int) -> dict:
        return {"at": np.full(3, moment), **step}

    for moment in (1, 2):
        for writer in writers:
            writer.save(at(moment))
    alone = writers[1].save(at(3))
    with pytest.raises((shmtensor.ArgumentError, shmtensor.ArgumentTypeError)):
        raises(writers[0], at(3))
    with pytest.raises(shmtensor.ArgumentError, match="parts of two moments"):
        writers[0].save(at(4))
    for handle in [writer.save(at(5), name="five") for writer in writers] + save_all(writers, 6):
        handle.durable.result(PATIENCE)
    with pytest.raises(shmtensor.ArgumentError, match="parts of two moments"):
        writers[0].save(at(7))
    assert re.search(r"rank 0 saved (five|step-00000006), and not ", str(alone.durable.exception(PATIENCE)))
    close_all(writers)
    assert len(names_in(path)) == 4
    for name in names_in(path):
        found = [part.get("at", part.get("again")) for part in shmtensor.load_checkpoint(path / name).values()]
        assert name == "step-00000006" or found[0].tolist() == found[1].tolist()


def test_parts_of_two_moments_make_no_checkpoint_when_a_rank_waits_too_short(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2, on_error="warn")
    first = [writers[0].save({"at": np.full(3, moment)}) for moment in (1, 2)]
    wait_until(lambda: {handle.status for handle in first} == {"voted"})
    with pytest.raises(shmtensor.TimedOut):
        writers[0].save({"at": np.full(3, 3)}, timeout=0)
    for moment in (1, 2, 3):
        last = writers[1].save({"at": np.full(3, moment)})
    for handle in first:
        handle.durable.result(PATIENCE)
    with pytest.raises(shmtensor.ArgumentError, match="save-00000003"):
        writers[0].save({"at": np.full(3, 4)})
    writers[0].close()
    assert "rank 0" in str(last.durable.exception(PATIENCE))
    writers[1].close()
    assert names_in(path) == {"save-00000001", "save-00000002"}


def test_a_save_that_raised_has_not_used_its_name_up(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    for name in (None, "mine"):
        with pytest.raises(shmtensor.ArgumentError, match="alias"):
            writers[0].save(part_of(0, 1), name, alias="no alias")
        for handle in save_all(writers, 1, name=name):
            handle.durable.result(PATIENCE)
    close_all(writers)
    assert names_in(path) == {"step-00000001", "mine"}


# --- who is missing


def test_latest_is_what_all_ranks_have(tmp_path):
    """A rank that is late holds up its own checkpoint and those after it; nothing older is deleted meanwhile."""
    path = tmp_path / "a"
    writers = open_writers(path, 2, keep_last=1)
    for handle in save_all(writers, 1):
        handle.durable.result(PATIENCE)
    pid = writers[1].statistics().pid
    stop(pid)
    try:
        first = save_all(writers, 2)
        second = writers[0].save(part_of(0, 3))
        wait_until(lambda: second.missing == first[0].missing == {1: "late"})
        check(path, [1], 2, swept=False)
        with pytest.raises(shmtensor.TimedOut, match="late: rank 1"):
            writers[0].save(part_of(0, 4), timeout=0.1)
        with pytest.raises(shmtensor.TimedOut, match="late: rank 1"):
            writers[0].close(timeout=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    writers[1].save(part_of(1, 3))
    close_all(writers)
    assert (first[0].status, second.status, second.missing) == ("durable", "durable", {})
    check(path, [3], 2)


def test_a_rank_that_has_not_opened_is_said_to_be_so(tmp_path):
    path = tmp_path / "a"
    with CheckpointWriter(path, rank=1, world_size=2) as one:
        handle = one.save(part_of(1, 1))
        wait_until(lambda: handle.missing == {0: "not open"})
        with CheckpointWriter(path, rank=0, world_size=2) as other:
            other.save(part_of(0, 1))
    check(path, [1], 2)


def test_a_late_rank_is_named_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handle_module, "_LATE", 0.0)
    path = tmp_path / "a"
    with CheckpointWriter(path, rank=0, world_size=2) as one:
        one.save(part_of(0, 1))
        wait_until(lambda: "not open: rank 1" in caplog.text)
        with CheckpointWriter(path, rank=1, world_size=2) as other:
            other.save(part_of(1, 1))


def test_a_rank_that_fails_fails_all(tmp_path, monkeypatch):
    """The others learn why at once; the next checkpoint is whole, and nothing is left of the first."""
    path = tmp_path / "a"
    monkeypatch.chdir(ROOT)
    fails = (
        "from tests.checkpoint.orders import settings\n"
        "from shmtensor.checkpoint.output import Output as O; old = O.finish\n"
        "def finish(self):\n"
        "    if settings['rank'] == 1 and 'step-00000001' in self.path: raise OSError(28, 'no room')\n"
        "    return old(self)\n"
        "O.finish = finish\n"
    )
    monkeypatch.setattr(process_handle, "LAUNCH", fails + process_handle.LAUNCH)
    writers = open_writers(path, 2)
    handles = save_all(writers, 1)
    assert "no room" in str(handles[1].durable.exception(PATIENCE))
    assert "rank 1: " in str(handles[0].durable.exception(PATIENCE))
    assert "no room" in str(handles[0].durable.exception(PATIENCE))
    save_all(writers, 2)
    close_all(writers)
    check(path, [2], 2)


def no_room(flag: Path, *files: str) -> str:
    """Code for the start of each writing process: while the flag is there, these files cannot be replaced."""
    return (
        "import os; from shmtensor.checkpoint import index; old = index.replace\n"
        "def replace(path, data):\n"
        f"    if os.path.exists({str(flag)!r}) and path.endswith({files!r}): raise OSError(28, 'no room')\n"
        "    return old(path, data)\n"
        "index.replace = replace\n"
    )


def test_no_room_at_the_commit(tmp_path, monkeypatch):
    """Nor for the outcome: what has failed stays so when there is room again, and what follows is not held up."""
    path, flag = tmp_path / "a", tmp_path / "full"
    monkeypatch.setattr(process_handle, "LAUNCH", no_room(flag, MANIFEST, run_record.RUN) + process_handle.LAUNCH)
    writers = open_writers(path, 2)
    for handle in save_all(writers, 1):
        handle.durable.result(PATIENCE)
    first = writers[0].save(part_of(0, 2))
    wait_until(lambda: first.status == "voted")
    flag.touch()
    handles = [first, writers[1].save(part_of(1, 2))]
    wait_until(lambda: any(handle.durable.done() for handle in handles))
    flag.unlink()
    for handle in handles:
        assert "no room" in str(handle.durable.exception(PATIENCE))
    later = writers[1].save(part_of(1, 3))
    wait_until(lambda: later.missing == {0: "late"})
    for handle in [later, writers[0].save(part_of(0, 3)), *save_all(writers, 4)]:
        handle.durable.result(PATIENCE)
    close_all(writers)
    check(path, [1, 3, 4], 2)


@pytest.mark.parametrize("size", [20_000, 400_000])
def test_a_writing_process_dies_while_it_takes_its_part_back(dies, tmp_path, monkeypatch, size):
    """Also of one that has streamed: it is not written again."""
    path, flag = tmp_path / "a", tmp_path / "full"
    monkeypatch.setattr(process_handle, "LAUNCH", no_room(flag, MANIFEST) + process_handle.LAUNCH)
    dies("refuse.taken")
    writers = open_writers(path, 2, memory="1MiB")
    flag.touch()
    handles = [writer.save({"w": np.full(size, 1.0), "step": 1}) for writer in writers]
    for handle in handles:
        assert handle.durable.exception(PATIENCE) is not None
    flag.unlink()
    for handle in save_all(writers, 2):
        handle.durable.result(PATIENCE)
    assert sum(writer.statistics().restarts for writer in writers) == 1
    close_all(writers)
    check(path, [2], 2)


def test_an_older_checkpoint_does_not_show_that_a_part_never_comes(tmp_path):
    directory = ranks.RankDirectory(str(tmp_path), 0, 2, "0" * 16)
    directory.own(lambda: False)
    directory.begin()
    own = ranks.Votes(directory, Keep())
    for key, rank, number in (("older", 0, 1), ("older", 1, 1), ("newer", 0, 2)):
        add_vote(own, key, rank, number)
    assert own.poll("newer", alone=False).missing == {1: "not open"}
    directory.close()


def add_vote(own: ranks.Votes, key: str, rank: int, number: int) -> None:
    """Add a part of one byte, and the vote about it."""
    file = own.pending(key) + f"/rank-{rank:05d}.npz"
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(b"x")
    changed = os.stat(file).st_mtime_ns
    own.prepare(key, run_record.Vote(rank, 2, number, os.path.basename(file), 1, changed, "0" * 16, 1, {}, "", False))


def test_a_vote_is_read_again_only_when_it_is_another_one(tmp_path, monkeypatch):
    directory = ranks.RankDirectory(str(tmp_path), 0, 2, "0" * 16)
    own, files, read = ranks.Votes(directory, Keep()), run_record.VoteFiles(), []
    read_vote = run_record.read_vote
    monkeypatch.setattr(run_record, "read_vote", lambda *args: read.append(args[1]) or read_vote(*args))
    for number in (1, 2):
        add_vote(own, "a", 0, number)
        add_vote(own, "a", 1, 1) if number == 1 else None
        for _ in range(3):
            assert {rank: vote.number for rank, vote in files.read(own.pending("a")).items()} == {0: number, 1: 1}
    assert sorted(read) == [0, 0, 1]
    Path(own.pending("a"), "rank-00001.npz").unlink()
    assert list(files.read(own.pending("a"))) == [0]
    files.forget_others(())
    assert list(files.read(own.pending("a"))) == [0]
    assert len(read) == 5


def test_a_checkpoint_that_one_rank_leaves_out_is_given_up(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    alone = writers[0].save(part_of(0, 1))
    save_all(writers, 2)
    why = "rank 1 saved step-00000002, and not step-00000001: all ranks save the same names in the same order"
    assert why in str(alone.durable.exception(PATIENCE))
    close_all(writers)
    check(path, [2], 2)


@pytest.mark.parametrize(
    "names", [["1", "2", "4", "5"], ["1", "3", "2", "5"], ["1", "3", "5"], ["1", "2", "2b", "3", "5"]], ids="-".join
)
@pytest.mark.filterwarnings("ignore:checkpoint :RuntimeWarning")
def test_ranks_that_save_other_names_do_not_wait_for_each_other(tmp_path, names):
    """Two ranks save 1, 2, 3, 5, the third something else: what all have is durable, the rest fails, whoever looks."""
    path = tmp_path / "a"
    usual = ["1", "2", "3", "5"]

    def train(rank: int, writer: CheckpointWriter) -> list:
        with writer:
            return [writer.save(part_of(rank, int(name[0])), name=name) for name in (names if rank == 2 else usual)]

    with ThreadPoolExecutor(3) as pool:
        handles = [
            handle for saved in pool.map(train, range(3), open_writers(path, 3, on_error="warn")) for handle in saved
        ]
    durable = {name for name in names_in(path) if not name.startswith(".")}
    if names == ["1", "3", "2", "5"]:  # in another order: both only if all parts are there when somebody looks
        assert durable in ({"1", "2", "5"}, {"1", "3", "5"}, {"1", "2", "3", "5"})
    else:
        assert durable == set(names).intersection(usual)
    for error in filter(None, (handle.durable.exception(PATIENCE) for handle in handles)):
        assert "all ranks save the same names in the same order" in str(error)


@pytest.mark.filterwarnings("ignore:checkpoint :RuntimeWarning")
def test_a_rank_votes_when_the_others_have_given_the_checkpoint_up(tmp_path, monkeypatch):
    """Its vote finds no directory any more: its error is their reason."""
    path = tmp_path / "a"
    waits = (
        "from tests.checkpoint.orders import settings\n"
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        "from shmtensor.checkpoint import run_record; from tests.waiting import wait_until\n"
        "def wait():\n"
        f"    wait_until(lambda: any(it.key == '2' for it in run_record.read({str(path)!r}).outcomes))\n"
        "if settings.get('rank') == 1: points.arm('vote.begun', wait, 3)\n"  # of 1, 3, 2
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "LAUNCH", waits + process_handle.LAUNCH)
    writers = open_writers(path, 2, on_error="warn")
    handles = [[writer.save(part_of(rank, int(name)), name=name) for name in names]
               for rank, (writer, names) in enumerate(zip(writers, ("123", "132"), strict=True))]  # fmt: skip
    for saved in handles:
        for handle in saved:
            if handle.name == "2":
                with pytest.raises(shmtensor.ResourceError, match="all ranks save the same names in the same order"):
                    handle.durable.result(PATIENCE)
            else:
                handle.durable.result(PATIENCE)
    close_all(writers)


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_save_other_names_and_die(tmp_path, dies):
    """Their writing processes end, also if one dies when it has said so, and the next run waits for nobody."""
    path, launch = tmp_path / "a", once_at("ranks.ended", tmp_path / "flag") if dies else ""
    end = """
for w in writers: w.close()
writers = [CheckpointWriter(path, rank=rank, world_size=2) for rank in range(2)]
writers[0].save(part_of(0, 13))
writers[1].save(part_of(1, 14))
"""
    for pid in trainers(path, end, launch=launch):
        wait_for_end(pid)
    assert (tmp_path / "flag").exists() == dies
    if dies:  # what only the dead one had a part in is left for the next run
        assert len(run_record.read(str(path)).outcomes) == 2
        with CheckpointWriter(path, rank=0, world_size=1) as writer:
            writer.start(timeout=PATIENCE)
        check(path, [1], 2)
        return
    check(path, [1], 2)
    reasons = {each.key: each.reason for each in run_record.read(str(path)).outcomes}
    for rank, step in ((1, 13), (0, 14)):  # one of the two has ended, and the other is gone by then
        assert re.search(rf"will never come \((closed|dead): rank {rank}", reasons[f"step-{step:08d}"])
    with CheckpointWriter(path, rank=0, world_size=1) as writer:
        assert writer.save(part_of(0, 15)).durable.result(PATIENCE).path.endswith("15")


def test_ranks_that_save_other_names_and_close(tmp_path):
    """Neither waits for ever, and they learn what the other one has saved."""
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    handles = [writer.save(part_of(rank, 13 + rank)) for rank, writer in enumerate(writers)]
    wait_until(lambda: "late: rank 1; rank 1 saved step-00000014" in _why_not_over(writers[0]))
    with ThreadPoolExecutor(2) as pool:
        for closed in [pool.submit(writer.close) for writer in writers]:
            assert "will never come (closed: rank" in str(closed.exception(PATIENCE))
    errors = [str(handle.durable.exception(PATIENCE)) for handle in handles]
    assert "rank 1 saved step-00000014" in errors[0] or "rank 0 saved step-00000013" in errors[1]  # who decides first
    check(path, [], 2)


def test_a_rank_that_closes_fails_what_it_has_not_saved(tmp_path):
    """Not what it has saved; and it may go on when its `close` has not ended in time."""
    path = tmp_path / "a"
    writers = open_writers(path, 2)

    def ended() -> set[int]:
        return {rank for _, rank in run_record.read(str(path)).ended}

    first = writers[0].save(part_of(0, 1))
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(writers[0].close, 3.0)
        wait_until(lambda: ended() == {0})
        assert "late: rank 1" in str(closed.exception(PATIENCE))
        assert ended() == set()
        writers[1].save(part_of(1, 1))
        for handle in [first, *save_all(writers, 2)]:
            handle.durable.result(PATIENCE)
        first = writers[0].save(part_of(0, 3))
        closed = pool.submit(writers[0].close)
        wait_until(lambda: ended() == {0})
        lonely = writers[1].save(part_of(1, 0))
        assert "closed: rank 0; rank 0 saved step-00000003" in str(lonely.durable.exception(PATIENCE))
        writers[1].save(part_of(1, 3)).durable.result(PATIENCE)
        closed.result(PATIENCE)
    close_all(writers)
    check(path, [1, 2, 3], 2)


def test_ctrl_c_in_close_takes_the_note_of_the_end_back(tmp_path):
    """A notebook's user who interrupts it may save again, and the other rank has given nothing up."""
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    first = writers[0].save(part_of(0, 1))

    def interrupt() -> None:
        wait_until(lambda: run_record.read(str(path)).ended)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            writers[0].close()
        sent.result(PATIENCE)
    wait_until(lambda: not run_record.read(str(path)).ended)
    for handle in [first, writers[1].save(part_of(1, 1)), *save_all(writers, 2)]:
        handle.durable.result(PATIENCE)
    close_all(writers)
    check(path, [1, 2], 2)


def test_a_note_of_the_end_that_fails_is_tried_again(tmp_path, monkeypatch):
    path, failed, end = tmp_path / "a", [], ranks.RankDirectory.end

    def fails_once(directory):
        if not failed:
            failed.append(1)
            raise OSError(28, "no room")
        end(directory)

    monkeypatch.setattr(ranks.RankDirectory, "end", fails_once)
    writers = open_writers(path, 2)
    for rank, writer in enumerate(writers):
        writer.save(part_of(rank, 13 + rank))
    with ThreadPoolExecutor(2) as pool:
        for closed in [pool.submit(writer.close) for writer in writers]:
            assert "will never come" in str(closed.exception(PATIENCE))
    assert failed


def test_the_next_run_begins_before_ranks_that_saved_other_names_are_over(tmp_path):
    path = tmp_path / "a"
    end = "for w in writers: stop(w.statistics().pid)\nwriters[0].save(part_of(0, 13)); writers[1].save(part_of(1, 14))"
    pids = trainers(path, end)
    writers = open_writers(path, 2)
    handles = save_all(writers, 15)
    wait_until(lambda: all(handle.status == "voted" for handle in handles))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for handle in handles:
        handle.durable.result(PATIENCE)
    close_all(writers)
    for pid in pids:
        wait_for_end(pid)
    check(path, [1, 15], 2)
    assert run_record.read(str(path)).ended == set()


def test_a_name_that_somebody_took(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    first = writers[0].save(part_of(0, 1), name="mine")
    wait_until(lambda: first.status == "voted")
    last = None
    (path / "mine").write_bytes(b"somebody's")
    with contextlib.suppress(shmtensor.ArgumentError):
        last = writers[1].save(part_of(1, 1), name="mine")
    assert last is None
    save_all(writers, 2)
    assert first.durable.exception(PATIENCE) is not None
    close_all(writers)
    assert (path / "mine").read_bytes() == b"somebody's"
    assert names_in(path) == {"mine", "step-00000002"}


@pytest.mark.parametrize("decided", [False, True])
def test_a_name_that_somebody_takes_before_the_commit(dies, tmp_path, decided):
    """Also between the decision and the rename."""
    path = tmp_path / "a"
    if decided:
        dies("ranks.decided")
    writers = open_writers(path, 2)
    for writer in writers:
        writer.start()
    pid = writers[1].statistics().pid
    if not decided:
        stop(pid)
    handles = save_all(writers, 1, name="mine")
    if decided:
        wait_until((tmp_path / "flag").exists)
    (path / "mine").write_bytes(b"somebody's")
    if not decided:
        os.kill(pid, signal.SIGCONT)
    failed = [handle.durable.exception(PATIENCE) for handle in handles]
    if not decided:
        assert all("exists" in str(error) for error in failed)
    save_all(writers, 2)
    close_all(writers)
    assert (path / "mine").read_bytes() == b"somebody's" or not any(failed)
    assert names_in(path) == {"mine", "step-00000002"}


# --- who may open


def test_a_second_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_OPENING", 0.1)
    path = tmp_path / "a"
    with CheckpointWriter(path, rank=0, world_size=2):
        with pytest.raises(shmtensor.ResourceError, match="of rank 0 is open"):
            CheckpointWriter(path, rank=0, world_size=2)
        with pytest.raises(shmtensor.ResourceError, match=r"open \(by rank 0\), and this one has world_size=4"):
            CheckpointWriter(path, rank=2, world_size=4)
        with pytest.raises(shmtensor.ResourceError, match="another CheckpointWriter"):
            CheckpointWriter(path)
    with CheckpointWriter(path), pytest.raises(shmtensor.ResourceError, match="without rank="):
        CheckpointWriter(path, rank=0, world_size=2)


def test_a_rank_that_opens_anew_needs_all_to_do_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_OPENING", 0.1)
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    save_all(writers, 1)
    writers[1].close()
    with pytest.raises(shmtensor.ResourceError, match="All ranks open"):
        CheckpointWriter(path, rank=1, world_size=2)
    writers[0].close()
    writers = open_writers(path, 2)
    save_all(writers, 2)
    close_all(writers)
    check(path, [1, 2], 2)


def test_ranks_that_open_anew_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """Rank 1 waits until rank 0 closes, and rank 0 is back before rank 1 looks again: rank 0 begins a run."""
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    save_all(writers, 1)[0].durable.result(PATIENCE)
    writers[1].close()
    monkeypatch.setattr(ranks, "_PAUSE", 2.0)
    asked, join = [], ranks.RankDirectory._join
    monkeypatch.setattr(ranks.RankDirectory, "_join", lambda *args: asked.append(join(*args)) or asked[-1])
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(CheckpointWriter, path, rank=1, world_size=2)
        wait_until(lambda: asked)
        assert asked == ["a run of 2 ranks is open (by rank 0), which this rank had joined before"]
        writers[0].close()
        writers = [CheckpointWriter(path, rank=0, world_size=2), later.result(PATIENCE)]
    save_all(writers, 2)
    close_all(writers)
    check(path, [1, 2], 2)


def test_a_rank_that_has_saved_nothing_may_open_again(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    writers[1].close()
    writers[1] = CheckpointWriter(path, rank=1, world_size=2)
    save_all(writers, 1)
    close_all(writers)
    check(path, [1], 2)


# --- interrupts


def test_every_boundary_of_a_rank_s_constructor(tmp_path):
    """Nothing is left: neither a lock nor a place in the run."""
    path = tmp_path / "a"
    with CheckpointWriter(path, rank=0, world_size=2):
        before = descriptors()
        for attempt in each_boundary(lambda: CheckpointWriter(path, rank=1, world_size=2)):
            attempt.result = None
            gc.collect()
            assert descriptors() == before
            CheckpointWriter(path, rank=1, world_size=2).close()
        assert attempt.at > 100


def test_boundaries_of_a_rank_s_save(tmp_path):
    """An interrupted save is one of all ranks or of none; the next is whole, and nothing is left."""
    path = tmp_path / "a"
    writers = open_writers(path, 2, keep_last=2, memory="2MiB")
    for handle in save_all(writers, 0):
        handle.durable.result(PATIENCE)
    at, reached = 1, True
    while reached:
        name = f"cut-{at}"
        reached = interrupted(lambda name=name: writers[0].save(part_of(0, at), name=name), at).reached  # noqa: B023
        other = writers[1].save(part_of(1, at), name=name)
        for handle in save_all(writers, at):
            handle.durable.result(PATIENCE)
        if other.durable.exception(PATIENCE) is None and (path / name).exists():
            check_one(path / name, at, 2)
        assert not (path / name).exists() or other.status == "durable"
        at += 1 if SOAK else 7
    assert at > 50
    close_all(writers)
    assert not [name for name in names_in(path) if name.startswith(".")]


# --- deaths


def once_at(point: str, flag: Path, rank: int | None = None, nth: int = 1) -> str:
    """Code for the start of each writing process: the first one that comes by the point so many times dies there."""
    condition = "True" if rank is None else f"settings.get('rank') == {rank}"
    return (
        "import os, signal; from tests.checkpoint.orders import settings\n"
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        "def die():\n"
        f"    try: os.close(os.open({str(flag)!r}, os.O_CREAT | os.O_EXCL))\n"
        "    except FileExistsError: points.hits.clear(); points.hits.update(dict.fromkeys(points.armed, 0)); return\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"if {condition}: points.arm({point!r}, die, {nth})\n"
    )


@pytest.fixture
def dies(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)

    def arrange(point: str, rank: int | None = None, nth: int = 1) -> None:
        code = once_at(point, tmp_path / "flag", rank, nth)
        monkeypatch.setattr(process_handle, "LAUNCH", code + process_handle.LAUNCH)

    return arrange


QUICK = ["vote.written", "vote.added", "ranks.manifest", "ranks.decided", "ranks.cleared", "ranks.renamed"]


@pytest.mark.parametrize("memory", ["8MiB", *["1MiB"] * SOAK])
@pytest.mark.parametrize("point", RANK_POINTS if SOAK else QUICK)
def test_a_writing_process_dies(dies, tmp_path, point, memory):
    """It is started again, or another rank's goes on where it was: every checkpoint is durable all the same."""
    path = tmp_path / "a"
    dies(point)
    writers = open_writers(path, 2, keep_last=2, memory=memory)
    for step in (1, 2, 3):
        for handle in save_all(writers, step):
            handle.durable.result(PATIENCE)
    assert sum(writer.statistics().restarts for writer in writers) == 1
    close_all(writers)
    check(path, [2, 3], 2)


@pytest.mark.parametrize(
    ("point", "nth"),
    [("ranks.decided", 1), ("ranks.renamed", 1), ("latest.made", 1), ("latest.made", 2), ("latest.moved", 2)],
)
def test_a_writing_process_dies_as_aliases_move(dies, tmp_path, point, nth):
    """One rank's alias and the other's, each of a save of its own: both lead where the last save that had them is."""
    path = tmp_path / "a"
    dies(point, nth=nth)
    writers = open_writers(path, 2)
    handles = []
    for step, (first, second) in enumerate([("best", "best"), (None, "mine"), ("best", None)], 1):
        handles += [writer.save(part_of(rank, step), alias=alias)
                    for rank, (writer, alias) in enumerate(zip(writers, (first, second), strict=True))]  # fmt: skip
    for handle in handles:
        handle.durable.result(PATIENCE)
    assert sum(writer.statistics().restarts for writer in writers) == 1
    close_all(writers)
    assert [os.readlink(path / name) for name in ("best", "mine", "latest")] == [
        f"step-{step:08d}" for step in (3, 2, 3)
    ]
    (path / "mine").unlink()
    check(path, [1, 2, 3], 2)


@pytest.mark.parametrize("point", [None, *STREAM_POINTS, "vote.added", "ranks.decided"])
def test_parts_that_are_larger_than_their_memory(dies, tmp_path, point):
    """They stream through it, also where a writing process dies meanwhile."""
    if point:
        dies(point)
    path, parts = tmp_path / "a", [np.arange(400_000) + rank for rank in range(2)]
    writers = open_writers(path, 2, memory="1MiB")
    for step in (1, 2):
        handles = [writer.save({"w": part * step, "step": step}) for writer, part in zip(writers, parts, strict=True)]
        for handle in handles:
            handle.durable.result(PATIENCE)
    assert sum(writer.statistics().restarts for writer in writers) == (point is not None)
    close_all(writers)
    for step in (1, 2):
        found = shmtensor.load_arrays(path / f"step-{step:08d}", verify="all")
        assert [found[rank]["w"].tobytes() for rank in range(2)] == [(part * step).tobytes() for part in parts]


@pytest.mark.parametrize("point", ["giveup.before", "giveup.decided"])
def test_a_writing_process_dies_while_it_gives_a_checkpoint_up(dies, tmp_path, point):
    path = tmp_path / "a"
    dies(point)
    writers = open_writers(path, 2)
    alone = writers[0].save(part_of(0, 1))
    save_all(writers, 2)
    assert alone.durable.exception(PATIENCE) is not None
    close_all(writers)
    check(path, [2], 2)


TRAINERS = """
    import os, signal, sys
    prefix, path, count, launch, end = sys.argv[1:]
    from shmtensor.checkpoint import names, process_handle
    from shmtensor.checkpoint.writer import CheckpointWriter
    from tests.checkpoint.test_ranks import part_of, save_all
    from tests.waiting import stop, wait_until
    names.PREFIX = prefix
    writers = [CheckpointWriter(path, rank=rank, world_size=int(count)) for rank in range(int(count))]
    for handle in save_all(writers, 1):
        handle.durable.result(120)
    process_handle.LAUNCH = launch + process_handle.LAUNCH
    exec(end)
    print(*(writer.statistics().pid for writer in writers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def trainers(path: Path, end: str, *, count: int = 2, launch: str = "") -> list[int]:
    """Run a process that is the trainer of all ranks, and dies; the process ids of the writing processes."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINERS), names.PREFIX, str(path), str(count), launch, end],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [int(pid) for pid in done.stdout.split()]


def test_all_trainers_die_after_save(tmp_path):
    for pid in trainers(tmp_path / "a", "save_all(writers, 2)"):
        wait_for_end(pid)
    check(tmp_path / "a", [1, 2], 2)


def test_a_trainer_dies_and_another_rank_was_never_opened(tmp_path):
    """Its writing process does not wait for ever."""
    path = tmp_path / "a"
    end = """
for w in writers: w.close()
writers = [CheckpointWriter(path, rank=0, world_size=2)]
writers[0].save(part_of(0, 2))
"""
    for pid in trainers(path, end, count=1):
        wait_for_end(pid)
    check(path, [1], 1)
    assert "not open: rank 1" in run_record.read(str(path)).outcomes[-1].reason


def test_a_rank_dies_before_its_part_is_durable(tmp_path):
    """Trainer and writing process of one rank: the others give the checkpoint up; `latest` stays."""
    path = tmp_path / "a"
    kills = "save_all(writers, 2)\nos.kill(writers[1].statistics().pid, signal.SIGKILL)"
    for pid in trainers(path, f"stop(writers[1].statistics().pid)\n{kills}"):
        wait_for_end(pid)
    check(path, [1], 2)
    assert "will never come (dead: rank 1)" in run_record.read(str(path)).outcomes[-1].reason
    with CheckpointWriter(path, rank=0, world_size=1) as writer:  # which removes what both left in shared memory
        writer.start(timeout=PATIENCE)


def test_all_die_and_the_next_run_has_another_world_size(tmp_path):
    """What they left is swept; a checkpoint whose parts were all there is finished."""
    path = tmp_path / "a"
    kill = "\nfor w in writers: os.kill(w.statistics().pid, signal.SIGKILL)"
    for pid in trainers(path, f"stop(writers[1].statistics().pid)\nsave_all(writers, 2){kill}"):
        wait_for_end(pid)
    check(path, [1], 2, swept=False)
    writers = open_writers(path, 3)
    save_all(writers, 5)
    close_all(writers)
    assert names_in(path) == {"step-00000001", "step-00000005"}
    check_one(path / "step-00000001", 1, 2)
    check_one(path / "step-00000005", 5, 3)


@pytest.mark.parametrize("single", [False, *[True] * SOAK])
@pytest.mark.parametrize("point", RANK_POINTS if SOAK else ["vote.added", "ranks.decided", "ranks.renamed"])
def test_all_die(tmp_path, point, single):
    """Every process, at a point of one that decides: what has its name is whole, and the next run finishes the rest."""
    path = tmp_path / "a"
    die = (
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        f"import os, signal, sys, json; points.arm({point!r}, 'kill')\n"
    )
    end = f"""
from shmtensor.checkpoint.writer import CheckpointWriter
for w in writers: w.close()
process_handle.LAUNCH = {die!r} + process_handle.LAUNCH
writers = [CheckpointWriter(path, rank=rank, world_size=2) for rank in range(2)]
for w in writers: w.start()
pids = [w.statistics().pid for w in writers]
for pid in pids: stop(pid)
save_all(writers, 2)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pids = trainers(path, end)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for pid in pids:
        wait_for_end(pid)
    check_one(path / "step-00000001", 1, 2)
    visible = {name for name in names_in(path) if not name.startswith(".")}
    if "step-00000002" in visible:
        check_one(path / "step-00000002", 2, 2)
    if single:
        with CheckpointWriter(path) as writer:
            writer.save({"w": np.ones(3), "step": 5})
        there = names_in(path)
        assert there - {"step-00000002"} == {"step-00000001", "step-00000005.safetensors"}
    else:
        writers = open_writers(path, 2)
        save_all(writers, 5)
        close_all(writers)
        there = names_in(path)
        assert there - {"step-00000002"} == {"step-00000001", "step-00000005"}
        check_one(path / "step-00000005", 5, 2)
        assert os.readlink(path / "latest") == "step-00000005"
    assert visible - {"step-00000005"} <= there
    decided = RANK_POINTS.index(point) >= RANK_POINTS.index("vote.added")
    assert ("step-00000002" in there) == decided


@pytest.mark.parametrize("whole", [False, True])
def test_a_writing_process_dies_while_it_finishes_what_others_left(dies, tmp_path, whole):
    path = tmp_path / "a"
    stopped = "" if whole else "stop(writers[1].statistics().pid)\n"
    kill = "for w in writers: os.kill(w.statistics().pid, signal.SIGKILL)"
    for pid in trainers(path, f"{stopped}save_all(writers, 2)\n{kill}"):
        wait_for_end(pid)
    left = [name for name in names_in(path) if name.endswith(".ranks")]
    dies("finish.older")
    writers = open_writers(path, 2)
    save_all(writers, 3)
    close_all(writers)
    assert sum(writer.statistics().restarts for writer in writers) == bool(left)
    there = names_in(path)
    assert there - {"step-00000002"} == {"step-00000001", "step-00000003"}
    for name in there:
        check_one(path / name, int(name[-8:]), 2)


def test_a_trainer_dies_while_it_begins_a_run(tmp_path):
    path = tmp_path / "a"
    code = (
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        "from shmtensor.checkpoint.writer import CheckpointWriter\n"
        f"points.arm('run.begun', 'kill'); CheckpointWriter({str(path)!r}, rank=0, world_size=2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=PATIENCE)
        assert done.returncode == -signal.SIGKILL
        assert names_in(path) == set()
    writers = open_writers(path, 2)
    save_all(writers, 1)
    close_all(writers)
    check(path, [1], 2)


def _why_not_over(writer: CheckpointWriter) -> str:
    with pytest.raises(shmtensor.TimedOut) as caught:
        writer.close(timeout=0.01)
    return str(caught.value)


def test_the_next_run_waits_for_what_the_one_before_has_to_finish(tmp_path):
    path = tmp_path / "a"
    pids = trainers(path, "for w in writers: stop(w.statistics().pid)\nsave_all(writers, 2)")
    writers = open_writers(path, 2)
    handles = save_all(writers, 3)
    wait_until(lambda: all(handle.status == "voted" for handle in handles))
    with pytest.raises(concurrent.futures.TimeoutError):
        handles[0].durable.result(0.3)
    for pid in pids:
        wait_until(lambda pid=pid: f"pid {pid} (" in _why_not_over(writers[0]))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for handle in handles:
        handle.durable.result(PATIENCE)
    close_all(writers)
    for pid in pids:
        wait_for_end(pid)
    check(path, [1, 2, 3], 2)
    assert [entry.step for entry in index.read(str(path))] == [1, 2, 3]


# --- what others wrote

HOSTILE = [
    b"", b"[]", b"{", b'{"version": 2}', b'{"version": 1, "parts": []}', b"[" * 100_000,
    b'{"version":1,"world_size":1,"step":0,"metrics":{},"alias":"","parts":[["../x",1,"a"]]}',
    b'{"version":1,"world_size":1,"step":0,"metrics":{},"alias":"","parts":[["rank-00001.pt",1,"a"]]}',
    b'{"version":1,"world_size":9,"step":0,"metrics":{},"alias":"","parts":[["rank-00000.pt",1,"a"]]}',
    b'{"version":1,"world_size":1,"step":-1,"metrics":{},"alias":"","parts":[["rank-00000.pt",1,"a"]]}',
    b'{"version":1,"world_size":1,"step":0,"metrics":[],"alias":"","parts":[["rank-00000.pt",1,"a"]]}',
    b'{"version":1,"world_size":1,"step":0,"metrics":{},"alias":"","parts":[["rank-00000.pt",1e99,"a"]]}',
    b'{"version":1,"world_size":1,"step":0,"step":1,"metrics":{},"alias":"","parts":[["rank-00000.pt",1,"a"]]}',
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path, data):
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(shmtensor.CheckpointError):
        shmtensor.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"writers": []}, {"begun": [[]]}, {"ended": [3]}, {"world_size": 1 << 60}, {"outcomes": [[1, "../x", "y", ""]]}],
)
def test_a_hostile_record_of_the_run_is_refused(tmp_path, change):
    run_record.write(str(tmp_path), run_record.Run(5, 2, {0: "ab" * 8}))
    assert run_record.read(str(tmp_path)).number == 5
    document = json.loads((tmp_path / run_record.RUN).read_text())
    (tmp_path / run_record.RUN).write_text(json.dumps(document | change))
    with pytest.raises(OSError, match="is damaged"):
        run_record.read(str(tmp_path))


@pytest.mark.parametrize("alias", ["../x", "/etc", "a/b", ".", "", "best", 3, None])
def test_an_alias_of_a_vote_is_a_name(tmp_path, alias):
    vote = run_record.Vote(0, 1, 1, "rank-00000.pt", 1, 1, "0" * 16, 1, {}, alias, False)
    run_record.write_vote(str(tmp_path), vote)
    assert (run_record.read_vote(str(tmp_path), 0) is not None) == (alias in ("", "best"))


def test_a_large_manifest_is_not_read(tmp_path):
    with open(tmp_path / MANIFEST, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(shmtensor.CheckpointError, match="more than"):
        shmtensor.load_checkpoint(tmp_path)


def test_a_part_that_is_missing_or_changed_is_named(tmp_path):
    path = tmp_path / "a"
    writers = open_writers(path, 2)
    save_all(writers, 1)
    close_all(writers)
    made = path / "step-00000001"
    part = made / "rank-00001.safetensors"
    data = part.read_bytes()
    part.write_bytes(data + b"x")
    with pytest.raises(shmtensor.CheckpointError, match="rank-00001"):
        shmtensor.load_checkpoint(made)
    part.unlink()
    with pytest.raises(shmtensor.CheckpointError, match=r"rank-00001.safetensors is missing"):
        shmtensor.load_checkpoint(made)
    assert shmtensor.load_arrays(made, rank=0)["step"] == 1


def test_a_part_that_names_tensors_of_another_is_damaged():
    moved = opening._shifted({"k": [[["i", "0x0"], {"x": 0}], ["a", {"z": ["s", [], [], [1, 7]]}]]}, 5, 2)
    assert moved == {"k": [[["i", "0x0"], {"x": 5}], ["a", {"z": ["s", [], [], [6, -1]]}]]}
    assert opening._shifted({"x": 2}, 5, 2) == {"x": -1}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rank": 1}', "[" * 100_000, '{"rank":0,"file":"../x"}'])
def test_a_vote_that_cannot_be_read_counts_as_none(tmp_path, text):
    (tmp_path / "rank-00000.vote").write_text(text)
    assert run_record.VoteFiles().read(str(tmp_path)) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 3}', json.dumps({"version": 1, "run": -1})])
def test_a_damaged_run_is_said_to_be_so(tmp_path, text):
    (tmp_path / run_record.RUN).write_text(text)
    with pytest.raises(shmtensor.ResourceError, match="damaged"):
        CheckpointWriter(tmp_path, rank=0, world_size=1)


def test_nothing_is_left_in_shared_memory(tmp_path):
    writers = open_writers(tmp_path / "a", 2)
    save_all(writers, 1)
    close_all(writers)
    assert files(names.PREFIX) == set()
