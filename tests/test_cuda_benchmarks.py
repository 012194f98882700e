"""The workloads of `--only cuda`: they are there, and where there is no GPU they are skipped by name."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu import Gpu
from benchmarks.run import app
from benchmarks.targets import TARGETS
from benchmarks.workloads import SCALES, WORKLOADS, cuda_copies, cuda_prefetch, cuda_saving
from shmtensor.checkpoint import names, structure

from . import cuda_table
from .cuda_standin import DeviceTensor

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


def test_the_table_lists_every_test_that_needs_a_device():
    page = cuda_table.PAGE.read_text()
    assert list(cuda_table.listed(page)) == cuda_table.collected(), "python -m tests.cuda_table"


def test_the_table_keeps_what_was_verified_and_takes_what_has_passed():
    rows = "".join(f"| {name} | `tests/test_x.py::test_{name}` | old |\n" for name in ("a", "gone"))
    page = f"# Title\n\n{cuda_table._HEAD}{rows}\nMore.\n"
    report = (
        '<testsuites><testsuite><testcase classname="tests.test_x" name="test_b[1]"/>'
        '<testcase classname="tests.test_x" name="test_b[2]"/>'
        '<testcase classname="tests.test_x" name="test_c[1]"/>'
        '<testcase classname="tests.test_x" name="test_c[2]"><skipped/></testcase></testsuite></testsuites>'
    )
    good = cuda_table.passed(report)
    assert good == {"tests/test_x.py::test_b"}
    tests = [f"tests/test_x.py::test_{name}" for name in "abc"]
    made = cuda_table.render(page, tests, good, "new")
    assert list(cuda_table.listed(made).values()) == ["old", "new", cuda_table.NOT_YET]
    assert made.endswith("\nMore.\n")
    assert cuda_table.render(made, tests, set(), "") == made
