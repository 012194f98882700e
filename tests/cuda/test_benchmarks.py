"""The workloads of `--only cuda`: they are there, and where there is no GPU they are skipped by name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu import Gpu
from benchmarks.run import app
from benchmarks.targets import TARGETS
from benchmarks.workloads import SCALES, WORKLOADS, cuda_copies, cuda_prefetch, cuda_saving
from shmtensor.checkpoint import names, structure

from . import session, table
from .standin import DeviceTensor

ROOT = Path(__file__).parents[2]
CUDA = [workload for workload in WORKLOADS if workload.name.startswith("cuda-")]
by_name = pytest.mark.parametrize("workload", CUDA, ids=lambda workload: workload.name)


def test_one_name_chooses_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.Gpu.lacks", lambda self: "no such device")
    result = CliRunner().invoke(app, ["--only", "cuda", "--quick", "--json", str(tmp_path / "run.json")])
    assert result.exit_code == 0, result.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert list(run["texts"]) == ["cuda-copies", "cuda-handover", "cuda-prefetch", "cuda-saving"]
    assert run["machine"]["gpu"] is None
    assert {row["skipped"] for row in run["rows"]} == {"no such device"}
    assert len(run["targets"]) == len([target for target in TARGETS if target.row[0].startswith("cuda-")]) > 0
    for verdict in run["targets"]:
        assert verdict["met"] is None
        assert verdict["open"].endswith("no such device")


# --- their logic, over the stand-in


class HostGpu(Gpu):
    """A device of the stand-in's."""

    def __init__(self, standin):
        self.standin = standin

    def pinned(self, tensor):
        return tensor.clone()

    def upload(self, tensor):
        return self.standin.tensor(tensor)

    def host(self, tensor):
        self.synchronize()
        return self.standin.host(tensor)

    def random(self, elements):
        return self.standin.tensor(torch.randn(elements))

    def synchronize(self):
        self.standin.run_all()

    def work(self):
        return lambda count, tensor: self.standin.enqueue(lambda: self.standin.host(tensor))


TINY = SCALES["tiny"].effort


@pytest.mark.parametrize("way", [cuda_copies.receive, cuda_copies.send], ids=["receive", "send"])
def test_copies(standin, channel, way):
    samples = way(lambda: None, channel, 64 << 10, TINY, HostGpu(standin))
    assert {len(values) for values in samples.values()} == {TINY.least}
    assert all(value > 0 for values in samples.values() for value in values)
    assert standin.pinned_copies > 0
    assert standin.pageable_copies > 0


def test_prefetch(standin, channel):
    samples = cuda_prefetch.consume(lambda: None, channel, 64 << 10, TINY, HostGpu(standin))
    assert all(value > 0 for values in samples.values() for value in values)
    assert set(samples) == {row.metric for row in cuda_prefetch.WORKLOAD.rows}


def test_saving(standin, channel, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "PREFIX", channel)
    views, take_apart, known = structure._tensor_tools()
    monkeypatch.setattr(structure, "_tensor_tools", lambda: (views, take_apart, known | {DeviceTensor}))
    samples = cuda_saving.save_ours(lambda: None, tmp_path, cuda_saving.TINY, HostGpu(standin))
    assert {len(values) for values in samples.values()} == {cuda_saving.SAVES}
    assert all(0 < stall <= staged for stall, staged in zip(samples["stall"], samples["staged"], strict=True))


# --- the table of what was verified


def test_the_table_is_up_to_date():
    page, keys = table.PAGE.read_text(), [*table.tests(), *table.alone(), *table.rows()]
    assert table.render(page, keys, {}) == page, "python -m tests.cuda.table"
    assert list(table.listed(page)) == keys
    nothing = {table.NOT_YET, table.NO_COUNTERPART} >= set(table.listed(page).values())
    assert ("**Nothing yet.**" in page) == nothing


def test_the_table_lists_every_test_and_row_that_needs_a_device():
    mark = re.compile(r"^ +pytest\.mark\.cuda,$", re.MULTILINE)
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if mark.search(path.read_text())]
    assert sorted(table.FILES) == [path.relative_to(ROOT).as_posix() for path in marked]
    for key in [*table.tests(), *table.alone()]:
        file, _, name = key.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), key
    for text in (*table.FILES.values(), *table.BY_HAND.values()):
        assert all((ROOT / "tests" / name).exists() for name in re.findall(r"`([\w/]+\.py)`", text)), text
    assert {key.partition(": ")[0] for key in table.rows()} == {workload.name for workload in CUDA}
    assert len(table.rows()) == sum(len(workload.rows) for workload in CUDA)
    assert set(table.BY_HAND) <= {key.partition("::")[2] for key in table.tests()}


def test_no_other_page_says_what_was_verified():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path != table.PAGE:
            assert table.NOT_YET not in path.read_text(), path.name


def test_the_table_keeps_what_was_verified_and_takes_what_has_passed():
    def row(key, on):
        return f"| x | `{key}` | no | {on} |\n"

    first, second, gone = (f"tests/cuda/test_device.py::test_{name}" for name in ("a", "b", "gone"))
    speed = "cuda-copies: a copy"
    page = f"# Title\n\n{table._HEAD}{row(first, 'old')}{row(gone, 'old')}{row(speed, 'old')}\nMore.\n"
    tested = table.verified({"passed": [second], "hardware": "new"})
    machine = {"gpu": {"name": "X", "cuda": "13.0"}}
    measured = {
        "machine": machine, "versions": {"torch": "2"}, "date": "2026-01-02T03",
        "rows": [{"workload": "cuda-copies", "name": "a copy", "median": 1.0},
                 {"workload": "cuda-copies", "name": "skipped", "median": None}],
    }  # fmt: skip
    good = tested | table.verified(measured)
    assert good == {second: "new", speed: "X, CUDA 13.0, torch 2, 2026-01-02"}
    assert table.verified(measured | {"machine": {"gpu": None}}) == {}
    made = table.render(page, [first, second, speed, "cuda-copies: skipped"], good)
    assert list(table.listed(made).values()) == ["old", "new", good[speed], table.NOT_YET]
    assert made.endswith("\nMore.\n")
    assert gone not in made


# --- the session on a machine that has a device


TRIAL = """
import pytest
@pytest.mark.parametrize("n", [1, 2])
def test_good(n): pass
@pytest.mark.parametrize("n", [1, 2])
def test_half(n): assert n == 1
@pytest.mark.skip(reason="no")
def test_skipped(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_long(n):
    import signal
    if n == 2:
        signal.raise_signal(signal.{end})
def test_late(): pass
"""
SESSION = """
import sys
from pathlib import Path
from tests.cuda.session import Recorder, run
code = run(sys.argv[2:], ["-q"], 150, Recorder("X", Path(sys.argv[1])))
hit = [name for name in ("xdist", "pytest_timeout", "psutil", "hypothesis") if name in sys.modules]
print(hit or "none of them")
sys.exit(code)
"""


@pytest.mark.parametrize(("end", "code"), [("SIGALRM", 2), ("SIGTERM", -signal.SIGTERM)])
def test_the_session_reports_what_has_passed_also_when_its_time_is_over(tmp_path, end, code):
    """By its own clock, or killed, as what hangs in the driver must be. It has a configuration of its own, and none of
    the plugins of the suite."""
    trial, file = tmp_path / "test_trial.py", tmp_path / "run.json"
    trial.write_text(TRIAL.replace("{end}", end))
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",  # options of plugins among them
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(file), str(trial)], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert [name.rpartition("::")[2] for name in report["passed"]] == ["test_good"]  # of test_long one run had no end
    assert len(report["other"]) == 2
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run.json"]
    assert code < 0 or "none of them" in done.stdout


FIXTURES = """
import pytest, sys
from pathlib import Path
from tests.cuda.session import Recorder, run
from tests.cuda.table import FILES

class Known:  # without a device each test is skipped before a fixture is looked for
    def pytest_collection_finish(self, session):
        names = {(item.nodeid, name) for item in session.items for name in item.fixturenames
                 if name not in item._fixtureinfo.name2fixturedefs and name != "request"
                 and name not in getattr(getattr(item, "callspec", None), "params", {})}
        print(len(session.items), "items, unknown fixtures:", sorted(names), flush=True)

recorder = Recorder("X", Path(sys.argv[1]))
recorder.pytest_collection_finish = Known().pytest_collection_finish
sys.exit(run(list(FILES), ["-q", "-s", "--collect-only"], 150, recorder))
"""


def test_the_session_finds_every_fixture(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-c", FIXTURES, str(tmp_path / "run.json")], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if "unknown fixtures" in line)
    assert int(line.split()[0]) > 30
    assert line.endswith("unknown fixtures: []")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_session_says_so(tmp_path, capsys):
    assert session.main([str(tmp_path / "run.json")]) == 2
    assert "there is no device to test on: torch" in capsys.readouterr().out
    assert not (tmp_path / "run.json").exists()
