"""The benchmarks run and give rows of the right shape. Nothing here looks at a time."""

from __future__ import annotations

import json
import math
import multiprocessing

import pytest
from typer.testing import CliRunner

from benchmarks import machine, payloads, processes, report
from benchmarks.measure import Outcome, RowSpec, Target, make_rows, summarize
from benchmarks.processes import NO_TORCH, Role, RoleFailed, run_roles
from benchmarks.run import app
from benchmarks.runner import run_workload
from benchmarks.transports import SHMTENSOR, TRANSPORTS
from benchmarks.workloads import ROUNDS, WORKLOADS, Case, Workload, round_trip

by_name = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
OURS = frozenset({SHMTENSOR.name})


# --- declarations


@by_name
def test_rows_refer_to_cases_and_rows_that_exist(workload):
    cases, rows = [case.name for case in workload.cases], [row.name for row in workload.rows]
    assert len(set(cases)) == len(cases)
    assert len(set(rows)) == len(rows)
    assert {row.case for row in workload.rows} == set(cases)
    assert {row.against for row in workload.rows} - {None} <= set(rows)
    assert set(workload.counts) == set(ROUNDS)
    assert workload.what.endswith(".")


def test_names_are_unique():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    assert len({transport.name for transport in TRANSPORTS}) == len(TRANSPORTS)


def test_the_machine_and_versions_are_json():
    assert json.loads(json.dumps(machine.describe_machine()))["cores"] > 0
    assert json.loads(json.dumps(machine.describe_versions()))["shmtensor"]


# --- arithmetic


SPECS = (
    RowSpec("a", "shmtensor", "A", "trip", "µs", 1e6, "b", Target("<=", 0.75)),
    RowSpec("b", "rival", "B", "trip", "µs", 1e6, "a", Target(">=", 5)),
    RowSpec("share", "shmtensor", "A", "share", "%", 1, None, Target("<=", 1)),
)


def test_ratios_are_taken_round_by_round():
    ours = Outcome([{"trip": [1e-6, 2e-6, 3e-6], "share": [0.5]}, {"trip": [20e-6], "share": [0.7]}])
    rival = Outcome([{"trip": [4e-6]}, {"trip": [40e-6]}])
    a, b, share = make_rows("w", SPECS, {"A": ours, "B": rival})
    assert a.rounds == pytest.approx([2, 20])
    assert (a.samples, a.median) == (4, pytest.approx(2.5))
    assert a.ratio_rounds == pytest.approx([0.5, 0.5])
    assert (a.against, a.target, a.met) == ("b", "≤ 0.75", True)
    assert b.ratio == pytest.approx(2)
    assert b.met is False
    assert share.ratio is None
    assert share.met is True


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Outcome(skipped="rival is not installed"), "rival is not installed"),
        (Outcome(failed="Traceback"), "failed"),
    ],
)
def test_a_rival_without_samples_is_named_and_nothing_is_judged_against_it(outcome, why):
    a, b, _ = make_rows("w", SPECS, {"A": Outcome([{"trip": [1e-6], "share": [2]}]), "B": outcome})
    assert b.skipped == why
    assert (b.median, b.met) == (None, None)
    assert (a.ratio, a.met, a.skipped) == (None, None, None)


def test_summaries():
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.count, summary.least, summary.median, summary.most) == (3, 1, 2, 3)
    numbers = [report.number(value) for value in (None, 1234.5, 12.34, 1.234, 0.0123)]
    assert numbers == ["", "1,234", "12.3", "1.23", "0.012"]


# --- payloads and processes


@pytest.mark.parametrize("form", ["torch", "numpy", "bytes"])
def test_the_payload_check_sees_a_difference(form):
    sent = payloads.make(form, 1024)
    payloads.check(form, payloads.make(form, 1024), sent)
    with pytest.raises(AssertionError, match="other bytes"):
        payloads.check(form, payloads.make(form, 1024, 1), sent)
    with pytest.raises(AssertionError, match="received list"):
        payloads.check(form, [], sent)


def _meet_and_return(meet, value):
    meet()
    return value, multiprocessing.current_process().pid


def _fail(meet):
    raise ValueError("on purpose")


def test_roles_run_in_processes_of_their_own():
    (a, a_pid), (b, b_pid) = run_roles([Role(_meet_and_return, (value,), NO_TORCH) for value in "ab"])
    assert (a, b) == ("a", "b")
    assert len({a_pid, b_pid, multiprocessing.current_process().pid}) == 3


def test_a_role_that_raises_ends_the_run():
    with pytest.raises(RoleFailed, match="on purpose"):
        run_roles([Role(_meet_and_return, (1,), NO_TORCH), Role(_fail, (), NO_TORCH)])
    assert not multiprocessing.active_children()


def test_a_failing_case_is_reported_and_the_others_go_on():
    good = Case("good", SHMTENSOR, lambda count: {"x": [1.0] * count})
    bad = Case("bad", SHMTENSOR, lambda count: run_roles([Role(_fail, (), NO_TORCH)])[0])
    rows = tuple(RowSpec(case, "shmtensor", case, "x", "s") for case in ("good", "bad"))
    workload = Workload("w", "W", "What.", {"tiny": 3}, (bad, good), rows)
    (of_good, of_bad), outcomes = run_workload(workload, "tiny", rounds=2)
    assert (of_good.samples, of_good.rounds) == (6, [1.0, 1.0])
    assert of_bad.skipped == "failed"
    assert "on purpose" in outcomes["bad"].failed


# --- the real thing, a few iterations of it


@pytest.fixture
def own_names(monkeypatch):
    """Channel names that the leak check knows as this run's own."""
    name = processes.fresh_name
    prefix = f"test-{multiprocessing.current_process().pid}-"
    for module in ("round_trip", "large", "fan_out", "idle", "throughput"):
        monkeypatch.setattr(f"benchmarks.workloads.{module}.fresh_name", lambda: prefix + name())


@pytest.mark.slow
@by_name
def test_every_workload_runs_with_shmtensor_alone(workload, own_names):
    rows, outcomes = run_workload(workload, "tiny", transports=OURS)
    assert not [outcome.failed for outcome in outcomes.values() if outcome.failed]
    assert [row.name for row in rows] == [spec.name for spec in workload.rows]
    ours = [row for row, spec in zip(rows, workload.rows, strict=True) if spec.transport == "shmtensor"]
    assert ours
    for row in ours:
        assert row.skipped is None
        assert row.samples > 0
        assert math.isfinite(row.median)
        assert row.p10 <= row.median <= row.p90
        assert row.unit is not None
    for entry in report.summarize_samples(workload.name, outcomes):
        assert entry["count"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
def test_every_transport_carries_a_payload_there_and_back(transport, own_names):
    if reason := transport.skip_reason():
        pytest.skip(reason)
    samples = round_trip.measure(transport, 3)
    assert len(samples["round trip"]) == 3


@pytest.mark.slow
def test_the_command_writes_the_whole_run(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--quick", "--rounds", "1", "--only", "fan-out", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 subscribers" in result.output
    run = json.loads(path.read_text(encoding="utf-8"))
    assert {"schema", "date", "scale", "machine", "versions", "rows", "samples", "failures"} <= set(run)
    assert {row["workload"] for row in run["rows"]} == {"fan-out"}
    assert {entry["metric"] for entry in run["samples"]} == {"wall", "cpu", "I/O thread"}


@pytest.mark.parametrize("option", ["--only", "--transport"])
def test_the_command_names_what_there_is(option):
    result = CliRunner().invoke(app, [option, "nonsense"])
    assert result.exit_code == 2
    assert "there is" in result.output
