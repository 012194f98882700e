"""`shmtensor demo`: real frames, every byte checked; a damaged byte or a dead process never goes unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from shmtensor.cli import demo as command
from shmtensor.cli.demo import CORRUPT

from ..commands import app
from ..waiting import wait_until

COMMAND = [sys.executable, "-m", "shmtensor.cli.main", "demo", "--json"]
PATIENCE = 120.0


def start(*args: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, (process.returncode, out, err)
    assert not [name for name in os.listdir("/dev/shm") if f"shmtensor.demo-{process.pid}-" in name]
    return out, err


def demo(*args: str, code: int = 0, **environment: str) -> dict:
    out, _ = finish(start("--seconds", "0.6", *args, **environment), code)
    report = json.loads(out)
    assert report["ok"] is (code == 0)
    return report


@pytest.fixture
def inputs(tmp_path):
    generator = np.random.default_rng(3)
    np.save(tmp_path / "a.npy", generator.normal(size=(50, 60)))
    np.save(tmp_path / "video.npy", generator.integers(0, 255, (3, 40, 50, 3), np.uint8))
    torch.save({"w": torch.randn(3, 5).bfloat16(), "deep": [torch.arange(7), torch.tensor(2.5)]}, tmp_path / "b.pt")
    save_file({"x": torch.randn(4, 4), "half": torch.randn(9).half()}, tmp_path / "c.safetensors")
    Image.fromarray(generator.integers(0, 255, (32, 48, 3), np.uint8)).save(tmp_path / "d.png")
    (tmp_path / "readme.txt").write_text("not a frame")
    return tmp_path


@pytest.mark.slow
def test_sample_images():
    report = demo()
    names = [it["name"] for it in report["transports"]]
    assert names == ["shmtensor", "multiprocessing.Queue", "torch.multiprocessing.Queue"]
    assert "astronaut.png" in report["frames"]
    assert report["readers"] == 2
    for it in report["transports"]:
        assert it["lost"] == it["damaged"] == 0
        assert it["frames"] >= 15
        assert it["checked_bytes"] == 2 * sum(report["frame_bytes"])
        assert 0 < it["p50_ms"] <= it["p99_ms"]
        assert len(it["frames_per_second_of_rounds"]) == 3
    assert set(report["speedups"]) == set(names[1:])


@pytest.mark.slow
def test_own_files(inputs):
    report = demo("--input", str(inputs), "--readers", "1")
    assert len(report["frames"]) == 1 + 3 + 3 + 2 + 1
    for it in report["transports"]:
        assert it["lost"] == it["damaged"] == 0
        assert it["checked_bytes"] == sum(report["frame_bytes"])


@pytest.mark.slow
def test_a_wrong_byte_is_an_error(inputs):
    report = demo("--input", str(inputs), "--readers", "1", code=1, **{CORRUPT: "1"})
    assert [it["damaged"] for it in report["transports"]] == [1, 1, 1]
    assert "wrong bytes" in report["errors"][0]


def test_what_was_lost_or_came_twice_is_an_error():
    result = command.Result("a transport")
    reader = {"received": 4, "bytes": 40, "wrong": [], "latencies": [1], "ended_ns": 2_000_000_000}
    sender = {"sent": 5, "bytes": 50, "begun_ns": 1_000_000_000}
    errors = result.add(command.Round(0, "a transport", 1.0), {"sender": sender, "reader 0": reader})
    assert errors == ["a transport, reader 0: 5 messages were sent, 4 arrived"]
    assert (result.lost, result.frames_per_second) == (1, 5.0)


@pytest.mark.parametrize(("idle", "busy"), [(1.9, False), (1.4, True), (0.0, True)])
def test_a_busy_machine(idle, busy):
    assert command.Load(cpus=2, idle=idle, needed=2).too_busy is busy
    assert command.Load(cpus=64, idle=60 + idle, needed=3).too_busy is False


def children(process: subprocess.Popen, count: int) -> list[psutil.Process]:
    """The running children, once the work has begun."""
    found = []

    def are_there() -> bool:
        if any(f"shmtensor.demo-{process.pid}-" in name for name in os.listdir("/dev/shm")):
            family = psutil.Process(process.pid).children()
            found[:] = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
        return len(found) == count

    wait_until(are_there)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_process_is_an_error(inputs, victim):
    process = start("--seconds", "60", "--input", str(inputs), "--readers", "1")
    family = children(process, 2)
    family[victim].kill()
    _, err = finish(process, 1)
    assert "killed by signal 9" in err
    assert not any(child.is_running() for child in family)


@pytest.mark.slow
def test_interrupt(inputs):
    process = start("--seconds", "60", "--input", str(inputs), "--readers", "1")
    family = children(process, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    _, err = finish(process, 130)
    assert "Traceback" not in err
    assert not any(child.is_running() for child in family)


@pytest.mark.slow
def test_children_follow_a_killed_parent(inputs):
    process = start("--seconds", "60", "--input", str(inputs), "--readers", "1")
    family = children(process, 2)
    process.kill()
    process.communicate(timeout=PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive
    # a child that ends while the kernel closes its parent's descriptors sees a living member: the next user sweeps
    gc = [sys.executable, "-m", "shmtensor.cli.main", "gc"]
    subprocess.run(gc, check=True, capture_output=True, timeout=PATIENCE)
    assert not [name for name in os.listdir("/dev/shm") if f"shmtensor.demo-{process.pid}-" in name]


@pytest.mark.slow
def test_nothing_to_stream(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):  # it is refused before a process is started
        result = CliRunner().invoke(app, ["demo", "--input", str(path)])
        assert result.exit_code == 2
        assert "--input" in result.stderr
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    _, err = finish(start("--input", str(tmp_path)), 2)
    assert "broken.png" in err


def test_without_scikit_image(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(command.InputError, match=r"'\.\[demo\]'"):
        command.paths(None)
