"""`CheckpointWriter`: what a save holds, how memory and the writing process behave, what is kept, how errors arrive."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import shmtensor
from shmtensor.checkpoint import handle as handle_module
from shmtensor.checkpoint import index, names, output, process_handle, slots, staged, writer_process
from shmtensor.checkpoint.directory import Directory, Keep
from shmtensor.checkpoint.formats import FORMATS
from shmtensor.checkpoint.load import load_checkpoint
from shmtensor.checkpoint.slots import Stager
from shmtensor.checkpoint.writer import CheckpointWriter

from ..waiting import once, stop
from .state_files import mixed_state, same

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("own_channels")


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


@pytest.fixture
def make(tmp_path):
    """Writers of a directory `a`, closed in the end; none leaves a process or a temporary file."""
    made = []

    def make_writer(directory="a", **options) -> CheckpointWriter:
        made.append(CheckpointWriter(tmp_path / directory, **options))
        return made[-1]

    yield make_writer
    pids = [writer.statistics().pid for writer in made]
    for writer in made:
        for pid in [writer.statistics().pid] if writer.statistics().pid else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        writer._close(None, quietly=True)
    assert not [pid for pid in pids if pid and psutil.pid_exists(pid)]
    assert not [path for path in tmp_path.rglob(".*") if path.suffix in (".tmp", ".log", ".old")]


@contextlib.contextmanager
def stopped(writer):
    """The writing process does nothing meanwhile, as when the disk is slow."""
    pid = writer.statistics().pid
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def go_on(writer) -> None:
    os.kill(writer.statistics().pid, signal.SIGCONT)


def state_of(number: int, count: int = 6, elements: int = 50_000) -> dict:
    return {"w": [torch.full((elements,), float(number)) for _ in range(count)], "step": number}


def checkpoints(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith(".") and each.name != "latest")


def number_in(path) -> int:
    """The one number that all of a state of `state_of` holds."""
    state = load_checkpoint(path)
    for tensor in state["w"]:
        assert (tensor == state["step"]).all()
    return state["step"]


# --- what a save holds


def test_the_state_comes_back(make, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    state = {
        "model": module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
        "array": np.arange(1000, dtype=">i4"), "nothing": torch.empty(0, 3), "half": torch.randn(5).bfloat16(),
        "rest": {"lr": 1e-3, "name": "x", "list": [1, None, (True, 2.5)]}, 7: "seven",
    }  # fmt: skip
    writer = make()
    handle = writer.save(state, name="all", meta={"note": "n"})
    assert handle.staged.done()
    done = handle.durable.result(PATIENCE)
    assert (done.path, handle.path) == (str(tmp_path / "a" / "all.safetensors"),) * 2
    assert done.nbytes == os.path.getsize(done.path) == handle.progress.total == handle.progress.written
    assert done.seconds > 0
    assert len(done.digest) == 16
    back = load_checkpoint(done.path, verify="all")
    assert set(back) == set(state)
    assert back["rest"] == state["rest"]
    assert back["array"].dtype == ">i4"
    assert (back["array"] == state["array"]).all()
    for key, tensor in state["model"].items():
        assert torch.equal(back["model"][key], tensor)
    torch.optim.Adam(module.parameters()).load_state_dict(back["optimizer"])
    assert torch.equal(back["rng"], state["rng"])
    assert os.readlink(tmp_path / "a" / "latest") == "all.safetensors"


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_format(make, form):
    writer = make(format=form, memory="1MiB")  # so that it streams
    done = writer.save(state_of(3), name="x").durable.result(PATIENCE)
    assert done.path.endswith("x" + FORMATS[form].suffix)
    assert number_in(done.path) == 3


def test_a_module_is_saved_as_its_state_dict(make):
    module = torch.nn.Linear(3, 4)
    back = load_checkpoint(make().save(module).durable.result(PATIENCE).path)
    assert {key: value.shape for key, value in back.items()} == {"weight": (4, 3), "bias": (4,)}


def test_nothing_but_structure(make):
    assert load_checkpoint(make().save({"a": 1, "b": []}).durable.result(PATIENCE).path) == {"a": 1, "b": []}


def test_tied_tensors_are_written_once_and_come_back_tied(make):
    weight = torch.randn(100, 1000)
    done = make().save({"a": weight, "b": weight, "row": weight[3]}).durable.result(PATIENCE)
    assert done.nbytes < 1.5 * weight.nbytes
    back = load_checkpoint(done.path)
    back["a"][3] = 7
    assert (back["b"][3] == 7).all()
    assert (back["row"] == 7).all()


@pytest.mark.parametrize("memory", ["1MiB", "64MiB"])
def test_changes_after_save_do_not_reach_the_file(make, memory):
    """The mutator changes every tensor all the time, but for the moments of `save`."""
    writer = make(memory=memory)
    state = state_of(0, elements=200_000)
    pause, ended = threading.Lock(), threading.Event()

    def mutate() -> None:
        numbers = itertools.count(1)
        while not ended.is_set():
            with pause:
                state["step"] = next(numbers)
                for tensor in state["w"]:
                    tensor.fill_(state["step"])

    mutator = threading.Thread(target=mutate)
    mutator.start()
    try:
        saved = []
        for _ in range(5):
            with pause:
                saved.append((state["step"], writer.save(state)))
        for step, handle in saved:
            assert number_in(handle.durable.result(PATIENCE).path) == step
    finally:
        ended.set()
        mutator.join()


def test_what_cannot_be_saved_is_named_and_nothing_is_staged(make, tmp_path):
    writer = make()
    with pytest.raises(shmtensor.ArgumentTypeError, match=r"a\.b"):
        writer.save({"a": {"b": object()}})
    assert writer.statistics().saves == 0
    assert number_in(writer.save(state_of(1)).durable.result(PATIENCE).path) == 1


def test_shards(make, tmp_path):
    done = make(max_shard=500_000).save(state_of(5), name="s").durable.result(PATIENCE)
    assert done.path == str(tmp_path / "a" / "s")
    found = json.loads((tmp_path / "a" / "s" / "model.safetensors.index.json").read_text())
    assert len(set(found["weight_map"].values())) > 1
    assert number_in(done.path) == 5
    assert number_in(tmp_path / "a" / "latest") == 5


# --- memory, and what happens when it is full


def test_a_state_that_fits_is_staged_at_once_and_a_second_one_beside_it(make):
    writer = make(memory="8MiB")
    writer.start(state_of(0))
    with stopped(writer):
        handles = [writer.save(state_of(number)) for number in (1, 2)]
        assert all(handle.staged.done() for handle in handles)
        assert [handle.status for handle in handles] == ["waiting"] * 2
        assert writer.statistics().memory_bytes <= 8 * MIB
    assert [number_in(handle.durable.result(PATIENCE).path) for handle in handles] == [1, 2]
    assert [handle.status for handle in handles] == ["durable"] * 2


def test_block_waits_for_room_and_says_so(make):
    writer = make(memory="2MiB")
    writer.start(state_of(0))
    with stopped(writer):
        first = writer.save(state_of(1))
        with pytest.raises(shmtensor.TimedOut):
            writer.save(state_of(2), timeout=0.3)
    assert first.durable.result(PATIENCE)
    waits = writer._stager.statistics().waits
    with stopped(writer):
        second = writer.save(state_of(3))
        assert second.waited == 0
        with once(lambda: writer._stager.statistics().waits > waits, lambda: go_on(writer)):
            third = writer.save(state_of(4))
    assert third.waited > 0
    assert [number_in(handle.durable.result(PATIENCE).path) for handle in (second, third)] == [3, 4]
    assert checkpoints(Path(writer.directory)) == [f"step-0000000{n}.safetensors" for n in (1, 3, 4)]


def test_what_is_free_is_not_waited_for(make, monkeypatch):
    """However long it takes to have it, as where the processor is busy."""

    def slow(stager, *args, really=Stager.loan, **options):
        threading.Event().wait(0.005)
        return really(stager, *args, **options)

    writer = make(memory="4MiB")
    monkeypatch.setattr(Stager, "loan", slow)
    handle = writer.save(state_of(1))
    assert handle.waited == 0
    assert handle.durable.result(PATIENCE)


def test_skip_reports(make):
    writer = make(memory="2MiB", busy="skip")
    writer.start(state_of(0))
    with stopped(writer):
        first = writer.save(state_of(1))
        second = writer.save(state_of(2))
        assert (first.status, second.status) == ("waiting", "skipped")
        assert second.staged.cancelled()
        assert second.durable.cancelled()
        assert writer.statistics().skipped == 1
    first.durable.result(PATIENCE)
    assert number_in(writer.save(state_of(3)).durable.result(PATIENCE).path) == 3
    assert checkpoints(Path(writer.directory)) == ["step-00000001.safetensors", "step-00000003.safetensors"]


def test_replace_takes_back_what_is_not_being_written(make):
    writer = make(memory="4MiB", busy="replace")
    writer.start(state_of(0))
    with stopped(writer):
        old = [writer.save(state_of(number)) for number in (1, 2)]
        sent = writer._stager.statistics().sent
        with once(lambda: writer._stager.statistics().sent >= sent + 2, lambda: go_on(writer)):  # two are asked to go
            new = writer.save(state_of(3))
    assert number_in(new.durable.result(PATIENCE).path) == 3
    replaced = [handle.name for handle in old if handle.status == "replaced"]
    assert old[1].name in replaced  # the first one may have been begun
    assert new.replaced == tuple(replaced)
    assert old[1].durable.cancelled()
    assert writer.statistics().replaced == len(replaced)
    assert number_in(Path(writer.directory) / "latest") == 3


@pytest.mark.parametrize("memory", [MIB, 3 * MIB, 20 * MIB])
def test_memory_is_bounded(make, memory):
    writer = make(memory=memory)
    for number in range(4):
        writer.save(state_of(number, elements=300_000))
        files = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"shmtensor.{names.PREFIX}" in name]
        assert sum(os.stat(name).st_size for name in files) <= memory
    handle = writer.save(state_of(9, elements=300_000))
    assert number_in(handle.durable.result(PATIENCE).path) == 9
    assert writer.statistics().memory_bytes <= memory


def test_too_little_memory_is_refused(make):
    with pytest.raises(shmtensor.ArgumentError, match=r"1\.0 MiB"):
        make(memory=1000)


def interrupt(*arguments):
    del arguments  # the frames of an exception hold what they hold
    if threading.current_thread().name == "shmtensor saves":  # not in those that help it
        raise KeyboardInterrupt


def test_a_save_that_is_interrupted_leaves_nothing(make, monkeypatch):
    writer = make()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slots, "move_all", interrupt)
        writer.save(state_of(1))
    assert number_in(writer.save(state_of(2)).durable.result(PATIENCE).path) == 2
    assert checkpoints(Path(writer.directory)) == ["step-00000002.safetensors"]


def test_an_exception_that_is_kept_does_not_keep_the_slots(make, monkeypatch):
    state = state_of(1, count=40)
    writer = make(memory="10MiB")  # room for one
    writer.save(state).durable.result(PATIENCE)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as kept:
        patched.setattr(slots, "_move", interrupt)
        writer.save(state)
    assert writer.save(state, timeout=PATIENCE).durable.result(PATIENCE)
    assert kept.value.__traceback__ is not None


# --- the writing process


def test_the_process_is_warm_polite_one_and_has_no_torch(make, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    writer = make(nice=7)
    assert writer.statistics().pid == 0
    writer.start(2 * MIB, timeout=PATIENCE)
    pid = writer.statistics().pid
    for number in range(5):
        writer.save(state_of(number)).durable.result(PATIENCE)
    assert (writer.statistics().pid, writer.statistics().restarts) == (pid, 0)
    process = psutil.Process(pid)
    assert process.nice() == psutil.Process().nice() + 7
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert not [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path or "cuda" in mapped.path]
    assert os.getsid(pid) != os.getsid(0)
    assert process.environ()["OPENBLAS_NUM_THREADS"] == "1"
    assert [child.pid for child in psutil.Process().children() if "checkpoint" in " ".join(child.cmdline())] == [pid]


def test_a_writer_that_has_saved_nothing_ends_its_process_without_a_reminder(make, monkeypatch):
    monkeypatch.setattr(process_handle, "_REMINDER", 2 * PATIENCE)
    writer = make()
    writer.start(timeout=PATIENCE)
    pid = writer.statistics().pid
    writer.close(timeout=PATIENCE)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_does_not_end_the_writing_process(make, monkeypatch, name):
    """Ctrl-C is for the trainer, and what is sent to all processes of a job, too."""
    often = "from shmtensor.checkpoint import writer_process; writer_process._CHECK_INTERVAL = 0.001\n"
    monkeypatch.setattr(process_handle, "LAUNCH", often + process_handle.LAUNCH)
    writer = make()
    writer.start(timeout=PATIENCE)
    pid = writer.statistics().pid
    os.kill(pid, signal.Signals[name])
    for number in (1, 2, 3):
        assert number_in(writer.save(state_of(number)).durable.result(PATIENCE).path) == number
    assert (writer.statistics().restarts, writer.statistics().pid) == (0, pid)


def test_the_process_is_told_any_amount(make):
    """An argument of a process may have 128 KiB; so many uploads may be pending when it is started again."""
    writer = make()
    told = writer._saves.live_numbers()
    writer._saves.live_numbers = lambda: {**told, "uploading": [(n, f"step-{n:08d}") for n in range(10_000)]}
    writer.start(timeout=PATIENCE)
    assert number_in(writer.save(state_of(1)).durable.result(PATIENCE).path) == 1


def test_ionice(make, monkeypatch):
    with pytest.raises(shmtensor.ArgumentError, match="ionice"):
        make(ionice="fast")
    if process_handle.shutil.which("ionice"):
        writer = make(ionice="idle")
        writer.start(timeout=PATIENCE)
        assert psutil.Process(writer.statistics().pid).ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    monkeypatch.setattr(process_handle.shutil, "which", lambda name: None)
    with pytest.raises(shmtensor.ResourceError, match="not installed"):
        make("b", ionice="low")


def test_one_writer_per_directory(make):
    writer = make()
    with pytest.raises(shmtensor.ResourceError, match="another CheckpointWriter is open"):
        make()
    make("b")
    writer.close()
    make()


def test_progress_grows_and_a_bar_is_drawn(make, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    writer = make(progress=True, memory="2MiB")
    handle = writer.save(state_of(1, count=40))
    seen = [handle.progress]
    while not handle.durable.done():
        seen.append(handle.progress)
    handle.durable.result()
    assert [each.written for each in seen] == sorted(each.written for each in seen)
    assert {each.total for each in seen} == {handle.durable.result().nbytes}
    assert handle.progress.written == handle.progress.total
    writer.close()
    assert handle.name in capfd.readouterr().err


class Gone(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_terminal_that_is_gone_fails_no_save(make, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Gone())
    writer = make(progress=True, memory="2MiB")
    for number in (1, 2):
        handle = writer.save(state_of(number, count=40), timeout=PATIENCE)
        assert number_in(handle.durable.result(PATIENCE).path) == number
    assert writer.statistics().restarts == 0
    writer.close()


def test_it_is_closed_and_says_so(make):
    writer = make()
    handle = writer.save(state_of(1))
    writer.close()
    writer.close()
    assert handle.status == "durable"
    assert "closed" in repr(writer)
    for call in (lambda: writer.save(state_of(2)), writer.start):
        with pytest.raises(shmtensor.ClosedError):
            call()


# --- names, latest, what is kept


def test_names(make, tmp_path):
    writer = make()
    saved = [
        writer.save({"step": 7}), writer.save({"step": 7}), writer.save({"x": 1}), writer.save({"x": 1}),
        writer.save({"x": 1}, meta={"step": 9}), writer.save({"x": 1}, name="best"), writer.save({"step": np.int64(8)}),
    ]  # fmt: skip
    expected = [
        "step-00000007", "step-00000007-2", "save-00000001", "save-00000002", "step-00000009", "best", "step-00000008",
    ]  # fmt: skip
    assert [handle.name for handle in saved] == [f"{name}.safetensors" for name in expected]
    with pytest.raises(shmtensor.ArgumentError, match="exists"):
        writer.save({"x": 2}, name="best")
    for name in ("", "a/b", ".hidden", "latest", "x" * 201, "-x"):
        with pytest.raises(shmtensor.ArgumentError, match="checkpoint name"):
            writer.save({"x": 2}, name=name)
    writer.close()
    again = make()
    assert again.save({"x": 1}).name == "save-00000003.safetensors"
    assert again.save({"step": 7}).name == "step-00000007-3.safetensors"


def test_what_somebody_made_meanwhile_is_not_overwritten(make, tmp_path):
    writer = make()
    writer.start(timeout=PATIENCE)
    with stopped(writer):
        handle = writer.save(state_of(1), name="mine")
        (tmp_path / "a" / "mine.safetensors").write_text("theirs")
    with pytest.raises(shmtensor.ResourceError, match="somebody made it"):
        handle.durable.result(PATIENCE)
    assert (tmp_path / "a" / "mine.safetensors").read_text() == "theirs"


@pytest.mark.parametrize("max_shard", [None, 300_000])
def test_old_ones_are_deleted_but_only_ours(make, tmp_path, max_shard):
    options = {"keep_last": 2, "keep_every": 4, "max_shard": max_shard}
    writer = make(**options)
    kept = writer.save(state_of(1)).durable.result(PATIENCE).path
    foreign = tmp_path / "a" / "step-00000099.safetensors"
    foreign.write_text("not ours")
    changed = min(Path(kept).iterdir()) if max_shard else kept
    os.utime(changed)  # somebody has touched it, or copied it here: it stays, and its step and metrics in the list
    for number in range(2, 6):
        writer.save(state_of(number))
    writer.close()
    assert writer.statistics().deleted == 2
    writer = make(**options)  # another run goes on with the list
    for number in range(6, 9):
        writer.save(state_of(number))
    writer.close()
    ending = "" if max_shard else ".safetensors"
    ours = [f"step-{number:08d}{ending}" for number in (1, 4, 7, 8)]
    assert checkpoints(tmp_path / "a") == sorted([*ours, foreign.name])
    assert [entry.name for entry in index.read(str(tmp_path / "a"))] == ours
    assert number_in(tmp_path / "a" / "latest") == 8


def test_a_damaged_list_deletes_nothing(make, tmp_path, caplog):
    writer = make(keep_last=1)
    writer.save(state_of(1)).durable.result(PATIENCE)
    (tmp_path / "a" / index.INDEX).write_text("{")
    writer.save(state_of(2)).durable.result(PATIENCE)
    writer.save(state_of(3)).durable.result(PATIENCE)
    assert checkpoints(tmp_path / "a") == ["step-00000001.safetensors", "step-00000003.safetensors"]
    (tmp_path / "a" / index.INDEX).write_text(
        json.dumps({"version": 1, "saves": [{"name": "../x", "writer": "", "number": 1, "step": 1, "nbytes": 1,
                                             "digest": "", "files": [["", 1, 1]]}]})
    )  # fmt: skip
    assert index.read(str(tmp_path / "a")) == []
    assert "cannot be read" in caplog.text


LOGGING = """
import logging, warnings
from shmtensor.checkpoint.output import Output
def finish(self, old=Output.finish):
    logging.getLogger("shmtensor.checkpoint").error("full: %s", "s3://user:hush@host/a?key=hush")
    warnings.warn("worn out")
    logging.getLogger("others").error("signed by hush")
    return old(self)
Output.finish = finish
"""


def test_the_trainer_logs_what_the_writing_process_logs(make, monkeypatch, caplog):
    """And its warnings; nothing that may name a secret."""
    monkeypatch.setattr(process_handle, "LAUNCH", LOGGING + process_handle.LAUNCH)
    writer = make()
    assert number_in(writer.save(state_of(1)).durable.result(PATIENCE).path) == 1
    writer.close()
    found = [(each.name, each.levelname, each.getMessage()) for each in caplog.records]
    assert found[0] == ("shmtensor.checkpoint", "ERROR", "full: s3://host/a")
    assert found[1][:2] == ("py.warnings", "WARNING")
    assert "worn out" in found[1][2]
    assert len(found) == 2


def test_records_of_the_writing_process_are_bounded():
    records = writer_process.Records()
    for number in range(300):
        records.handle(logging.makeLogRecord({"name": "a", "levelno": 30, "msg": f"{number} " + "x" * 10_000}))
    taken = list(iter(records.take, None))
    assert [int(each["text"].split()[0]) for each in taken] == list(range(200, 300))
    assert all(len(each["text"]) == 2000 for each in taken)


UNDELETABLE = """
import os
unlink = os.unlink
def refuse(path, *args, **more):
    if "step-00000001" in str(path) and os.path.exists({flag!r}):
        raise PermissionError(1, "Operation not permitted", path)
    unlink(path, *args, **more)
os.unlink = refuse
"""


@pytest.mark.parametrize("max_shard", [None, 300_000])
def test_an_old_one_that_cannot_be_deleted_fails_no_save(make, tmp_path, monkeypatch, caplog, max_shard):
    """What was written is durable all the same; the old one is deleted when that is possible again."""
    flag = tmp_path / "immutable"
    monkeypatch.setattr(process_handle, "LAUNCH", UNDELETABLE.format(flag=str(flag)) + process_handle.LAUNCH)
    writer = make(keep_last=1, max_shard=max_shard)
    for number in (1, 2, 3):
        assert number_in(writer.save(state_of(number)).durable.result(PATIENCE).path) == number
        flag.touch()
    assert number_in(tmp_path / "a" / "latest") == 3
    assert "Operation not permitted" in caplog.text
    assert "step-00000001" in caplog.text
    ending = "" if max_shard else ".safetensors"
    stays = [] if max_shard else ["step-00000001.safetensors"]  # a directory has lost its name by then
    assert checkpoints(tmp_path / "a") == [*stays, f"step-00000003{ending}"]
    flag.unlink()
    writer.save(state_of(4)).durable.result(PATIENCE)
    assert checkpoints(tmp_path / "a") == [f"step-00000004{ending}"]
    writer.close()
    counts = writer.statistics()
    assert (counts.durable, counts.failed, counts.deleted) == (4, 0, 2 if max_shard else 3)


def test_a_list_that_cannot_be_written_after_a_deletion(make, tmp_path, monkeypatch):
    """What is gone is told all the same, and is left out of the list the next time."""
    writer = make()
    for number in (1, 2):
        writer.save(state_of(number)).durable.result(PATIENCE)
    writer.close()
    directory = Directory(str(tmp_path / "a"))
    with monkeypatch.context() as patched:
        patched.setattr(index, "write", full_disk)
        deleted, failed = directory.retain(Keep(1))
    assert deleted == ["step-00000001.safetensors"]
    assert len(failed) == 1
    assert "No space left on device" in failed[0]
    assert [entry.step for entry in index.read(directory.path)] == [1, 2]
    assert directory.retain(Keep(1)) == ([], [])
    assert [entry.step for entry in index.read(directory.path)] == [2]


def full_disk(path, entries):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


# --- errors


def break_directory(path: Path) -> None:
    path.rename(path.with_name("gone"))


def test_an_error_arrives_in_durable(make, tmp_path):
    writer = make()
    writer.start(timeout=PATIENCE)
    break_directory(tmp_path / "a")
    handle = writer.save(state_of(1))
    with pytest.raises(shmtensor.ResourceError, match="No such file") as caught:
        handle.durable.result(PATIENCE)
    assert caught.value.errno == 2
    assert handle.status == "failed"
    (tmp_path / "gone").rename(tmp_path / "a")
    assert number_in(writer.save(state_of(2)).durable.result(PATIENCE).path) == 2  # was told: nothing is raised again
    assert writer.statistics().failed == 1


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(make, tmp_path):
    writer = make()
    writer.start(timeout=PATIENCE)
    break_directory(tmp_path / "a")
    handle = writer.save(state_of(1))
    writer._saves.wait(None)
    with pytest.raises(shmtensor.ResourceError, match="No such file"):
        writer.save(state_of(2))
    assert handle.status == "failed"
    (tmp_path / "gone").rename(tmp_path / "a")
    assert number_in(writer.save(state_of(3)).durable.result(PATIENCE).path) == 3


def test_an_error_that_nobody_asked_for_is_raised_by_close(make, tmp_path):
    writer = make()
    writer.start(timeout=PATIENCE)
    break_directory(tmp_path / "a")
    writer.save(state_of(1))
    with pytest.raises(shmtensor.ResourceError, match="No such file"):
        writer.close()
    assert "closed" in repr(writer)


def test_errors_as_warnings(make, tmp_path):
    writer = make(on_error="warn")
    writer.start(timeout=PATIENCE)
    break_directory(tmp_path / "a")
    writer.save(state_of(1))
    writer._saves.wait(None)
    with pytest.warns(RuntimeWarning, match="No such file"):
        writer.save(state_of(2))
    with pytest.warns(RuntimeWarning, match="No such file"):
        writer.close()


def test_an_exception_in_the_block_is_the_one_that_is_seen(make, tmp_path):
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings(), make() as writer:
        warnings.simplefilter("ignore")
        writer.start(timeout=PATIENCE)
        break_directory(tmp_path / "a")
        writer.save(state_of(1))
        raise ZeroDivisionError


FEW_THREADS = """
import threading
start = threading.Thread.start
def refuse(thread):
    if thread.name.startswith("shmtensor disk"):
        refuse.count += 1
        if refuse.count > {count}:
            raise RuntimeError("can't start new thread")
    start(thread)
refuse.count = 0
threading.Thread.start = refuse
"""


@pytest.mark.parametrize(("count", "memory"), [(0, "1MiB"), (2, "8MiB")])
def test_the_writing_process_may_start_no_threads(make, monkeypatch, count, memory):
    """It writes with those that it has, or by itself."""
    monkeypatch.setattr(process_handle, "LAUNCH", FEW_THREADS.format(count=count) + process_handle.LAUNCH)
    writer = make(memory=memory)
    for number in (1, 2):
        done = writer.save(state_of(number, elements=100_000)).durable.result(PATIENCE)
        assert number_in(done.path) == number
    assert writer.statistics().restarts == 0


def test_an_error_of_a_write_that_is_done_at_once_is_in_its_future(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    alone = output.Disk(4)
    assert alone.threads == 0
    assert alone.submit(lambda: None).result(0) is None
    with pytest.raises(OSError, match="No space left"):
        alone.submit(full_disk, "a", []).result(0)


def refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


def test_a_process_that_cannot_start(make, monkeypatch):
    monkeypatch.setattr(process_handle, "LAUNCH", "raise SystemExit('no such thing')")
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)
    writer = make(memory="2MiB")
    with pytest.raises(shmtensor.PeerDied, match="no such thing"):
        writer.start(timeout=PATIENCE)
    monkeypatch.undo()
    monkeypatch.setattr(names, "PREFIX", "unused")
    assert number_in(writer.save(state_of(1)).durable.result(PATIENCE).path) == 1


@pytest.mark.filterwarnings("ignore:checkpoint :RuntimeWarning")
def test_a_process_that_is_not_watched_any_more_ends(make, caplog):
    """It would keep its slots and the directory; the next save starts another one."""
    caplog.set_level(logging.CRITICAL, "shmtensor.checkpoint")  # a record would keep the traceback, with a message
    writer = make(memory="1MiB")
    writer.start(timeout=PATIENCE)
    first = writer.statistics().pid

    def fail(report):
        raise ZeroDivisionError("unexpected")

    writer._process._on_report = fail
    with pytest.raises(shmtensor.PeerDied, match="not watched any more: unexpected"):
        writer.save(state_of(1)).durable.result(PATIENCE)
    assert number_in(writer.save(state_of(2), timeout=PATIENCE).durable.result(PATIENCE).path) == 2
    assert not psutil.pid_exists(first)


def test_a_process_that_said_it_was_over_and_died(make, monkeypatch):
    """What it said is not taken for what the next one says."""
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)
    writer = make()
    writer.start(timeout=PATIENCE)
    writer._process._over = True
    os.kill(writer.statistics().pid, signal.SIGKILL)
    assert number_in(writer.save(state_of(1)).durable.result(PATIENCE).path) == 1
    assert not writer._process._over


def test_a_save_that_kills_every_writer_is_given_up(make, monkeypatch):
    """The next save goes well: what kills is passed over."""
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)
    arm = "from tests.checkpoint.orders import settings; from tests.faults import points\n"
    arm += "points.install('shmtensor.checkpoint')\n"
    arm += "if settings['live'] or settings['next'] == 1: points.arm('write.headers', 'kill')\n"
    monkeypatch.setattr(process_handle, "LAUNCH", arm + process_handle.LAUNCH)
    monkeypatch.chdir(ROOT)
    writer = make()
    with pytest.raises(shmtensor.PeerDied, match=f"died {handle_module.ATTEMPTS} times"):
        writer.save(state_of(1)).durable.result(PATIENCE)
    assert number_in(writer.save(state_of(2)).durable.result(PATIENCE).path) == 2
    assert checkpoints(Path(writer.directory)) == ["step-00000002.safetensors"]


def test_options(make):
    for options in (
        {"busy": "wait"}, {"on_error": "ignore"}, {"keep_last": 0}, {"keep_every": 3}, {"nice": 20}, {"format": "x"},
        {"memory": "lots"},
    ):  # fmt: skip
        with pytest.raises(shmtensor.ArgumentError):
            make(**options)
    make()


# --- the end of the trainer


def run(source: str, *args: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(source), names.PREFIX, *map(str, args)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


HEAD = """
    import os, sys
    import numpy as np
    from shmtensor.checkpoint import names
    from shmtensor.checkpoint.writer import CheckpointWriter
    names.PREFIX = sys.argv[1]
    def state(number):
        return {"w": np.full(300_000, number), "step": number}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_the_end_of_the_interpreter_drains(tmp_path, end, code):
    run(f"w = CheckpointWriter(sys.argv[2])\nfor n in range(3): w.save(state(n))\n{end}", tmp_path, code=code)
    assert checkpoints(tmp_path) == [f"step-0000000{n}.safetensors" for n in range(3)]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_the_end_of_a_child_of_multiprocessing_drains(tmp_path):
    run(
        """
        import multiprocessing
        def work(path):
            w = CheckpointWriter(path)
            w.save(state(1))
        multiprocessing.set_start_method("fork")
        p = multiprocessing.Process(target=work, args=(sys.argv[2],))
        p.start(); p.join(); sys.exit(p.exitcode)
        """,
        tmp_path,
    )
    assert checkpoints(tmp_path) == ["step-00000001.safetensors"]


def test_a_forked_child_cannot_use_it_and_does_not_end_it(tmp_path):
    run(
        """
        import shmtensor
        w = CheckpointWriter(sys.argv[2])
        w.save(state(1)).durable.result()
        pid = os.fork()
        if not pid:
            try:
                w.save(state(5))
            except shmtensor.ForkedError:
                w.close()
                sys.exit(0)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        w.save(state(2)).durable.result()
        assert w.statistics().restarts == 0
        w.close()
        """,
        tmp_path,
    )
    assert checkpoints(tmp_path) == ["step-00000001.safetensors", "step-00000002.safetensors"]


def test_a_forked_child_is_told_that_it_does_not_see_the_end_of_a_save(tmp_path):
    run(
        """
        import asyncio, shmtensor, signal
        w = CheckpointWriter(sys.argv[2])
        w.start()
        before = w.save(state(1))
        before.durable.result()
        os.kill(w.statistics().pid, signal.SIGSTOP)
        h = w.save(state(2))
        pid = os.fork()
        if not pid:
            signal.alarm(30)  # would wait for ever
            async def wait():
                await asyncio.wrap_future(h.durable)
            asks = [
                h.durable.result, h.durable.exception, lambda: h.durable.result(0),
                lambda: h.durable.add_done_callback(print), lambda: asyncio.run(wait()), lambda: h.status,
                lambda: h.progress, lambda: h.missing,
            ]
            told = 0
            for ask in asks:
                try:
                    ask()
                except shmtensor.ForkedError:
                    told += 1
            assert told == len(asks), told
            assert h.staged.result() > 0 and not h.durable.done() and "waiting" in repr(h)
            assert before.status == "durable" and before.durable.result().path == before.path
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.kill(w.statistics().pid, signal.SIGCONT)
        h.durable.result()
        w.close()
        assert code == 0
        """,
        tmp_path,
    )


def test_numpy_only_imports_no_torch(tmp_path):
    run("with CheckpointWriter(sys.argv[2]) as w: w.save(state(1))\nassert 'torch' not in sys.modules", tmp_path)
    assert checkpoints(tmp_path) == ["step-00000001.safetensors"]


# --- from memory


@pytest.mark.filterwarnings("ignore:.*(Sparse|quantize|nested).*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning")
def test_a_living_trainer_s_staged_state_can_be_read(make):
    """Exactly as it was saved, and with everything that a state may hold."""
    state = mixed_state()
    with make(memory="8MiB") as writer:
        writer.start(timeout=PATIENCE)
        with stopped(writer):
            writer.save(state, name="one")
            assert same(load_checkpoint(writer.directory, from_memory=True), state)
            part = load_checkpoint(writer.directory, keys=["weight", "rows"], from_memory=True)
            assert part["rows"].untyped_storage().data_ptr() == part["weight"].untyped_storage().data_ptr()


def test_a_slot_that_is_used_again_while_it_is_copied_is_noticed(make, monkeypatch):
    """The writing process finishes, and the trainer saves again, in the middle of the copy: an error, not a mixture."""
    writer = make(memory="2MiB")
    writer.start(state_of(1), timeout=PATIENCE)
    pid = writer.statistics().pid
    stop(pid)
    handle = writer.save(state_of(1))
    plain = staged.copy

    def disturbed(target, source):
        if not handle.durable.done():
            os.kill(pid, signal.SIGCONT)
            handle.durable.result(PATIENCE)
            writer.save(state_of(2)).durable.result(PATIENCE)
        plain(target, source)

    monkeypatch.setattr(staged, "copy", disturbed)
    with pytest.raises(FileNotFoundError, match=r"given back while they were copied.*on disk.*step-00000002"):
        load_checkpoint(writer.directory, from_memory=True)


@pytest.mark.parametrize("options", [{"readers": 2}, {"verify": "all"}, {"readers": 0}])
def test_from_memory_takes_no_options_that_it_has_no_use_for(tmp_path, options):
    with pytest.raises(shmtensor.ArgumentError):
        load_checkpoint(tmp_path, from_memory=True, **options)


def test_from_memory_takes_a_directory(tmp_path):
    with pytest.raises(shmtensor.ArgumentError, match="directory of a CheckpointWriter"):
        load_checkpoint(tmp_path / "a.safetensors", from_memory=True)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint either"):
        load_checkpoint(tmp_path, from_memory=True)
