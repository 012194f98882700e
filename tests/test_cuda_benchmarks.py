"""The workloads of `--only cuda`: they are there, and where there is no GPU they are skipped by name."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.run import app
from benchmarks.targets import TARGETS
from benchmarks.workloads import WORKLOADS

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
