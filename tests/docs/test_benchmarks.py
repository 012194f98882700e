"""The benchmarks run and give rows of the right shape. Nothing here looks at a time."""

from __future__ import annotations

import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import types
from dataclasses import asdict

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import (
    crossover,
    document,
    instructions,
    machine,
    payloads,
    plots,
    processes,
    report,
    savers,
    states,
    targets,
)
from benchmarks.measure import PERCENTILES, Outcome, Row, RowSpec, make_rows, summarize
from benchmarks.processes import NO_TORCH, Role, RoleFailed, run_roles
from benchmarks.run import app
from benchmarks.runner import run_workload
from benchmarks.sizes import HUGE, KIB, MIB, SIZES, in_flight, label
from benchmarks.targets import Target
from benchmarks.transports import SHMTENSOR, SHMTENSOR_QUEUE, TRANSPORTS, WORK_QUEUE, LinkSettings, Receiver, zmq_pair
from benchmarks.workloads import (
    SCALES,
    WORKLOADS,
    Case,
    Effort,
    Workload,
    executor,
    loading,
    messages,
    mixed_dict,
    pipeline,
    round_trip,
    saving,
    throughput,
)

from ..commands import app as commands
from ..forkservers import preloaded
from ..spawned import fail, hang, meet_and_return

by_name = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
OURS = frozenset({SHMTENSOR.name, SHMTENSOR_QUEUE.name})
TINY = SCALES["tiny"].effort
PATIENCE = 120.0


@pytest.fixture(scope="module", autouse=True)
def server():
    """Other tests have theirs load something else."""
    with preloaded(*processes.PRELOADED):
        yield


# --- declarations


@by_name
def test_rows_refer_to_cases_and_rows_that_exist(workload):
    cases, rows = [case.name for case in workload.cases], [row.name for row in workload.rows]
    assert len(set(cases)) == len(cases)
    assert len(set(rows)) == len(rows)
    assert {row.case for row in workload.rows} == set(cases)
    assert {row.against for row in workload.rows} - {None} <= set(rows)
    assert set(workload.rounds) <= set(SCALES)
    assert workload.what.endswith(".")
    assert any(case.quick for case in workload.cases)
    for row in workload.rows:
        assert (row.group is None) == (row.line is None) == (row.column is None)


def test_names_are_unique():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    assert len({transport.name for transport in TRANSPORTS}) == len(TRANSPORTS)


def test_targets_name_rows_that_exist():
    rows = {(workload.name, row.name) for workload in WORKLOADS for row in workload.rows}
    for target in targets.TARGETS:
        assert target.row in rows
        assert target.against is None or target.against in rows


def template(name):
    return (document.PROJECT / "benchmarks" / name).read_text()


def test_the_tables_ask_for_every_workload_once():
    asked = re.findall(r"^<!-- workload (\S+) -->$", template("tables.md"), re.MULTILINE)
    assert sorted(asked) == sorted(workload.name for workload in WORKLOADS)


def test_the_machine_and_versions_are_json():
    assert json.loads(json.dumps(machine.describe_machine()))["cores"] > 0
    assert json.loads(json.dumps(machine.describe_versions()))["shmtensor"]


# --- arithmetic


SPECS = (
    RowSpec("a", "shmtensor", "A", "trip", "µs", 1e6, "b"),
    RowSpec("b", "rival", "B", "trip", "µs", 1e6, "a"),
    RowSpec("share", "shmtensor", "A", "share", "%"),
)


def test_ratios_are_taken_round_by_round():
    ours = Outcome([{"trip": [1e-6, 2e-6, 3e-6], "share": [0.5]}, {"trip": [20e-6], "share": [0.7]}])
    rival = Outcome([{"trip": [4e-6]}, {"trip": [40e-6]}])
    a, b, share = make_rows("w", SPECS, {"A": ours, "B": rival})
    assert a.rounds == pytest.approx([2, 20])
    assert (a.samples, a.median) == (4, pytest.approx(2.5))
    assert a.ratio_rounds == pytest.approx([0.5, 0.5])
    assert b.ratio == pytest.approx(2)
    assert share.ratio is None
    verdicts = targets.judge(
        (a, b, share),
        (
            Target("less", ("w", "a"), "<=", 0.75, ("w", "b")),
            Target("more", ("w", "b"), ">=", 5, ("w", "a")),
            Target("share", ("w", "share"), "<=", 0.5),
            Target("report", ("w", "share"), None, None),
            Target("not run", ("other", "x"), "<=", 1),
        ),
    )
    assert [(verdict.what, verdict.met) for verdict in verdicts] == [
        ("less", True), ("more", False), ("share", False), ("report", None),
    ]  # fmt: skip
    assert verdicts[0].value == pytest.approx(0.5)
    assert [verdict.target for verdict in verdicts] == ["≤ 0.75 ×", "≥ 5 ×", "≤ 0.5", "report it"]


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
    assert b.median is None
    assert (a.ratio, a.skipped) == (None, None)
    (verdict,) = targets.judge((a, b), (Target("less", ("w", "a"), "<=", 0.75, ("w", "b")),))
    assert verdict.met is None
    assert verdict.open == f"b: {why}"


def test_every_round_counts_where_a_target_says_so():
    def verdict(rates):
        rows = [
            Row("idle", name, "shmtensor", "x", 2.0, rounds=rounds)
            for name, rounds in (("mine", rates), ("other", [1.0] * len(rates)))
        ]
        target = Target("it", ("idle", "mine"), ">=", 1, ("idle", "other"), every=True)
        [found] = targets.judge(rows, [target])
        return found.value, found.met, found.target

    assert verdict([2.0, 0.9, 3.0]) == (0.9, False, "≥ 1 × in every round")
    assert verdict([2.0, 1.1, 3.0])[:2] == (1.1, True)


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds, result=None):
        self.now += seconds
        return result


def far_end(recv, in_flight):
    """A link's receiving end, and what orders messages: the numbers that were asked for."""
    asked = []
    link = types.SimpleNamespace(
        receiver=lambda: Receiver(recv, lambda: None), settings=LinkSettings("", KIB, in_flight=in_flight)
    )
    return link, asked, types.SimpleNamespace(send=asked.append, recv=lambda: 0.0)


def test_messages_are_counted_over_more_than_lies_between_and_compared_outside_the_clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(messages, "time", types.SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(messages, "same", lambda value, expected: clock.spend(1e6, value == expected))
    link, asked, control = far_end(lambda: clock.spend(0.5, "it"), in_flight=100)
    found = messages._receive(lambda: None, link, lambda: ["it"], "tensor", TINY, control)
    assert found["rate"] == [2.0]
    assert asked == [200, 400, 0]


def test_a_stretch_of_one_way_begins_with_nothing_in_flight_and_counts_as_a_whole(monkeypatch):
    clock = Clock()
    clocks = types.SimpleNamespace(perf_counter=clock, process_time=lambda: 0.0)
    monkeypatch.setattr(throughput, "time", clocks)
    link, asked, control = far_end(
        lambda: clock.spend(1 / 1024, payloads.make("torch", KIB, int(asked[-1] == 0))), in_flight=100
    )
    found = throughput.receive(lambda: None, "torch", link, Effort("full", 1.0), [control])
    assert asked == [200, 512, 512, 512, 0]
    assert found["rate"] == [1024.0] * 3


def test_the_length_of_a_stretch_is_chosen_by_warm_ones():
    asked = []

    def take(count):
        asked.append(count)
        return count / (256 if len(asked) < 3 else 4096)

    assert throughput.rates_of(take, Effort("full", 1.0), 1) == [4096.0] * 3
    assert asked == [2, 8, 32, 128, 512, 2048, 2048, 2048]


def test_pyzmq_holds_no_more_jobs_than_may_wait():
    def mark(**settings):
        return zmq_pair.ZmqLink(LinkSettings("", KIB, in_flight=8, **settings)).mark

    assert mark() == 8
    assert mark(pattern=WORK_QUEUE, peers=4) * 2 * 4 == 8
    assert mark(pattern=WORK_QUEUE, peers=8) == 1


def test_summaries():
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.count, summary.least, summary.median, summary.most) == (3, 1, 2, 3)
    assert len(summary.percentiles) == len(PERCENTILES)
    assert [report.number(value) for value in (None, 1234.5, 12.34, 1.234, 0.0123, 0)] == [
        "", "1,234", "12.3", "1.23", "0.012", "0.000",
    ]  # fmt: skip


def test_sizes():
    assert [label(size) for size in (64, KIB, 4 * MIB)] == ["64 B", "1 KiB", "4 MiB"]
    assert in_flight(KIB, 64) == 64
    assert in_flight(SIZES[-1], 64) == 2
    assert HUGE in SIZES


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((2, 3), "shmtensor is faster at every size measured"),
        ((0.5, 3), "the rival is faster up to 64 B"),
        ((2, 0.5), "the rival is faster at 1 KiB"),
        ((0.2, 0.5), "the rival is faster at every size measured"),
    ],
)
def test_crossovers(rates, verdict):
    sizes = {"64 B": 64, "1 KiB": KIB}
    for more in (False, True):
        values = [1 / rate if more else rate for rate in rates]
        rows = [
            Row("w", "x", "rival", "µs", ratio=value, group="g", line="rival", column=column, x=sizes[column])
            for value, column in zip(values, sizes, strict=True)
        ]
        (found,) = crossover.find(rows, "g", more=more)
        assert found.verdict == verdict


# --- payloads and processes


@pytest.mark.parametrize("form", ["torch", "numpy", "bytes"])
def test_the_payload_check_sees_a_difference(form):
    for nbytes in (1024, 3 * payloads.BLOCK):
        sent = payloads.make(form, nbytes)
        payloads.check(form, payloads.make(form, nbytes), sent)
        with pytest.raises(AssertionError, match="other bytes"):
            payloads.check(form, payloads.make(form, nbytes, 1), sent)
        assert payloads.read(form, sent) != payloads.read(form, payloads.make(form, nbytes, 1))
    with pytest.raises(AssertionError, match="received list"):
        payloads.check(form, [], sent)


def test_the_check_of_plain_objects_sees_a_difference():
    sent = payloads.make("objects", 0)
    payloads.check("objects", payloads.make("objects", 0), sent)
    with pytest.raises(AssertionError, match="other bytes"):
        payloads.check("objects", payloads.make("objects", 0, 1), sent)


def test_blocks_of_a_large_payload_differ():
    whole = payloads.make("bytes", 2 * payloads.BLOCK)
    assert whole[: payloads.BLOCK] != whole[payloads.BLOCK :]


def test_the_dict_check_sees_a_difference():
    sent = mixed_dict.make_dict(30)
    mixed_dict.check(mixed_dict.make_dict(30), sent)
    with pytest.raises(AssertionError, match="other keys"):
        mixed_dict.check(mixed_dict.make_dict(29), sent)
    with pytest.raises(AssertionError, match="other values"):
        mixed_dict.check(mixed_dict.make_dict(30, 1), sent)
    with pytest.raises(AssertionError, match="another type"):
        mixed_dict.check({key: tensor.to(torch.float64) for key, tensor in sent.items()}, sent)


def test_roles_run_in_processes_of_their_own():
    roles = [Role(meet_and_return, ("a",), NO_TORCH), Role(meet_and_return, ("b",))]
    (a, a_pid, a_torch), (b, b_pid, b_torch) = run_roles(roles)
    assert (a, b) == ("a", "b")
    assert (a_torch, b_torch) == (False, True)
    assert len({a_pid, b_pid, multiprocessing.current_process().pid}) == 3


def test_a_role_that_raises_ends_the_run():
    with pytest.raises(RoleFailed, match="on purpose"):
        run_roles([Role(meet_and_return, (1,)), Role(fail)])
    assert not multiprocessing.active_children()


def test_a_role_that_hangs_is_killed_with_all_that_it_started():
    run_roles([Role(meet_and_return, (1,))])  # the server that the next ones are forked from is up
    ours, theirs = processes.CONTEXT.Pipe(duplex=False)
    for patience in (2, 10, 50):  # on a busy machine it may not even have started in time
        with pytest.raises(RoleFailed, match="not finished in time: hang"), processes.patience(patience):
            run_roles([Role(hang, (theirs,))])
        if ours.poll(0):
            break
    pid = ours.recv()
    for pipe in (ours, theirs):
        pipe.close()
    deadline = time.monotonic() + PATIENCE
    while _is_running(pid):  # its parent is dead, so that somebody else has to collect it
        assert time.monotonic() < deadline


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_failing_case_is_reported_and_the_others_go_on():
    good = Case("good", SHMTENSOR, lambda effort: {"x": [1.0] * effort.least})
    bad = Case("bad", SHMTENSOR, lambda effort: run_roles([Role(fail)])[0])
    absent = Case("absent", SHMTENSOR, lambda effort: {"x": [1.0]}, needs=lambda: "no such module")
    rows = tuple(RowSpec(case, "shmtensor", case, "x", "s") for case in ("good", "bad", "absent"))
    workload = Workload("w", "W", "What.", (bad, good, absent), rows)
    (of_good, of_bad, of_absent), outcomes = run_workload(workload, "tiny", rounds=2)
    assert (of_good.samples, of_good.rounds) == (6, [1.0, 1.0])
    assert of_bad.skipped == "failed"
    assert of_absent.skipped == "no such module"
    assert "on purpose" in outcomes["bad"].failed


def test_cases_measured_by_turns_are_compared_round_by_round():
    asked = []

    def by_turns(effort, names, rounds):
        asked.append((names, rounds))
        return {
            name: [{"x": [(index + 1.0) * (turn + 1)]} for turn in range(rounds)] for index, name in enumerate(names)
        }

    cases = [Case(name, SHMTENSOR, None) for name in ("a", "b")]
    cases.append(Case("absent", SHMTENSOR, None, needs=lambda: "no such module"))
    rows = tuple(RowSpec(case.name, "shmtensor", case.name, "x", "s", against="a") for case in cases)
    workload = Workload("w", "W", "What.", tuple(cases), rows, by_turns=by_turns)
    (of_a, of_b, of_absent), _ = run_workload(workload, "tiny", rounds=3)
    assert asked == [(["a", "b"], 3)]
    assert (of_a.rounds, of_b.rounds, of_b.ratio_rounds) == ([1, 2, 3], [2, 4, 6], [2, 2, 2])
    assert of_absent.skipped == "no such module"


def test_what_fails_by_turns_has_failed_for_all():
    def by_turns(effort, names, rounds):
        return run_roles([Role(fail)])[0]

    cases = tuple(Case(name, SHMTENSOR, None) for name in ("a", "b"))
    rows = tuple(RowSpec(case.name, "shmtensor", case.name, "x", "s") for case in cases)
    rows, outcomes = run_workload(Workload("w", "W", "What.", cases, rows, by_turns=by_turns), "tiny", rounds=1)
    assert [row.skipped for row in rows] == ["failed", "failed"]
    assert all("on purpose" in outcome.failed for outcome in outcomes.values())


# --- the real thing, a few iterations of it


@pytest.fixture
def own_names(monkeypatch):
    """Channel names that the leak check knows as this run's own."""
    name = processes.fresh_name
    prefix = f"test-{multiprocessing.current_process().pid}-"
    for workload in WORKLOADS:
        module = sys.modules[f"benchmarks.workloads.{_module_of(workload)}"]
        if hasattr(module, "fresh_name"):
            monkeypatch.setattr(module, "fresh_name", lambda: prefix + name())


def _module_of(workload):
    renamed = {"dict": "mixed_dict"}
    return renamed.get(workload.name, workload.name.replace("-", "_"))


@pytest.mark.slow
@by_name
def test_every_workload_runs_with_shmtensor_alone(workload, own_names):
    rows, outcomes = run_workload(workload, "tiny", rounds=1, transports=OURS)
    assert not [outcome.failed for outcome in outcomes.values() if outcome.failed]
    assert [row.name for row in rows] == [spec.name for spec in workload.rows]
    ours = [row for row in rows if row.skipped is None]
    if not ours:
        reasons = {row.skipped for row in rows} - {"not asked for", "full run only"}
        pytest.skip(", ".join(sorted(reasons)))
    for row in ours:
        assert row.samples > 0
        assert math.isfinite(row.median)
        assert row.p10 <= row.median <= row.p90
    for entry in report.summarize_samples(workload.name, outcomes):
        assert entry["count"] > 0


SAVING = {
    "a module with its optimizer": (lambda effort: saving.measure_ours(effort, what=saving.MODEL), "stall durable dd"),
    "through DCP": (lambda effort: saving.measure_dcp(effort, what=saving.MODEL), "stall durable copy"),
    "encrypted": (saving.measure_encrypted, "encrypted plain slice,_encrypted slices,_plain"),
    "training steps": (saving.measure_steps, "alone beside with"),
    "memory": (saving.measure_memory, "all rings processes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVING)
def test_what_only_a_full_run_saves_runs_too(name):
    measure, metrics = SAVING[name]
    samples = measure(TINY)
    assert all(value > 0 for metric in metrics.split() for value in samples[metric.replace("_", " ")])


@pytest.mark.slow
def test_a_rival_saves_a_module_with_its_optimizer():
    for way in (savers.THREADS, f"{savers.THREADS}, stager kept"):
        if savers.SAVERS[way].lacks():
            continue
        samples = saving.measure_rival(TINY, way=way, what=saving.MODEL)
        assert len(samples["stall"]) == 2
        for stall, written, durable in zip(samples["stall"], samples["written"], samples["durable"], strict=True):
            assert 0 < stall <= written <= durable


@pytest.mark.slow
def test_every_way_of_loading_has_its_turn_in_each_round():
    names = [case.name for case in loading.WORKLOAD.cases if not case.needs()]
    found = loading.measure(TINY, names, 2)
    assert list(found) == names
    for name, rounds in found.items():
        expected = {"call, cold"} if name.startswith("dd") else {"call, warm", "call, cold", "used, warm", "used, cold"}
        assert [set(samples) for samples in rounds] == [expected, expected]
        assert all(seconds > 0 for samples in rounds for values in samples.values() for seconds in values)


def test_states_count_each_storage_once():
    model = torch.nn.Linear(4, 4)
    state = {"a": model.weight, "b": [model.weight, {"c": model.bias}], "step": 3}
    assert len(list(states.tensors(state))) == 3
    assert states.size(state) == 4 * (16 + 4)
    assert states.size(states.flat(1 << 20)) == 1 << 20


LINKED = [transport for transport in TRANSPORTS if not transport.own_processes]


@pytest.mark.slow
@pytest.mark.parametrize("transport", LINKED, ids=lambda transport: transport.name)
def test_every_transport_carries_payloads_and_the_payloads_arrive(transport, own_names):
    if reason := transport.skip_reason():
        pytest.skip(reason)
    with processes.patience(PATIENCE):
        samples = round_trip.measure(transport, TINY, nbytes=1024)
        assert len(samples["round trip"]) == TINY.least
        assert throughput.measure(transport, TINY, nbytes=1024)["rate"]


def _fill(number, given):
    if number < 0:
        raise ValueError("on purpose")
    return os.getpid(), np.full(20_000 + number, number), np.frombuffer(given, np.int64) + number


def _call_through_arenas(meet, kind):
    """Many calls of different results through arenas of few units; some results stay alive, every fifth call fails."""
    kept, workers = {}, set()
    with pipeline.make_executor(kind, 2) as executor:
        futures = {}
        for number in range(60):
            given = np.full(10_000, 7 * number).tobytes()
            futures[number] = executor.submit(_fill, number if number % 5 else -1, given)
            if len(futures) == 4:
                _take(futures, kept, workers)
        while futures:
            _take(futures, kept, workers)
        views = [array.flags.writeable and not array.flags.owndata for pair in kept.values() for array in pair]
        kept.clear()  # a pool gives units back in order only: what is kept would stop its worker
        mapped = executor.map(_fill, range(1, 12), itertools.repeat(bytes(80_000)), chunksize=3)
        assert [value[0] for _, value, _ in mapped] == list(range(1, 12))
        del mapped
        gc.collect()
    return len(workers), views


def _take(futures, kept, workers):
    number, future = next(iter(futures.items()))
    del futures[number]
    if number % 5 == 0:
        with pytest.raises(ValueError, match="on purpose"):
            future.result(PATIENCE)
        return
    pid, value, added = future.result(PATIENCE)
    workers.add(pid)
    kept[number] = value, added
    if len(kept) > 2:
        oldest = min(kept)
        value, added = kept.pop(oldest)
        assert value.shape == (20_000 + oldest,)
        assert (value == oldest).all()
        assert (added == 8 * oldest).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pipeline.ONE_WAY, pipeline.TWO_WAY])
def test_an_executor_over_spdls_pools_gives_each_call_its_own_result_as_views(kind):
    if reason := pipeline.no_spdl():
        pytest.skip(reason)
    ((workers, views),) = run_roles([Role(_call_through_arenas, (kind,))])
    assert 1 <= workers <= 2
    assert views == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pipeline.ONE_WAY, pipeline.TWO_WAY])
def test_spdls_pools_carry_the_sample_however_it_is_asked_for(kind):
    if reason := pipeline.no_spdl():
        pytest.skip(reason)
    for way in executor.LOOPS:
        assert executor.measure(kind, way, executor.BYTES, TINY)["rate"]
    assert executor.measure_map(kind, executor.LOOP, executor.BYTES, TINY)["rate"]


def write_run(path, *arguments):
    result = CliRunner().invoke(app, ["--quick", "--rounds", "1", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text(encoding="utf-8")), result.output


@pytest.mark.slow
def test_the_command_writes_the_whole_run_and_the_page_is_made_of_it(tmp_path, own_names):
    run, output = write_run(
        tmp_path / "run.json", "--only", "round-trip", "--only", "loan", "--transport", "shmtensor",
        "--transport", "multiprocessing.Pipe",
    )  # fmt: skip
    assert "Targets" in output
    assert {"schema", "date", "command", "machine", "versions", "rows", "samples", "targets", "failures"} <= set(run)
    assert {row["workload"] for row in run["rows"]} == {"round-trip", "loan"}
    (ours,) = (row for row in run["rows"] if row["name"] == "shmtensor, 1 KiB")
    for page in document.PAGES.values():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "README.md").write_text(f"# before\n{document.BEGIN}old\n{document.END}after\n")
    result = CliRunner().invoke(document.app, [str(tmp_path / "run.json"), "--project", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name, path in document.PAGES.items():
        page = (tmp_path / path).read_text()
        assert run["machine"]["cpu"] in page
        assert report.number(ours["median"]) in page
        assert "<!--" not in page
        assert re.findall(r"^## .*$", page, re.MULTILINE) == re.findall(r"^## .*$", template(name), re.MULTILINE)
    assert "Not part of this run." in page
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith(f"# before\n{document.BEGIN}|  | shmtensor |")
    assert readme.endswith(f"{document.END}after\n")
    assert "old" not in readme


def test_the_page_is_short():
    assert len((document.PROJECT / document.PAGES["document.md"]).read_text().splitlines()) <= 200


def test_the_readme_shows_what_targets_judge():
    said = {(target.what, target.against[1]) for target in targets.TARGETS if target.against}
    assert len({line[0] for line in document.FIGURES}) == len(document.FIGURES)
    for _, what, beside, _ in document.FIGURES:
        assert [other for one, other in said if one == what and other.startswith(beside)], what


def test_a_plot_stands_where_the_page_wants_it():
    run = {"rows": []}
    assert (
        document.render("a\n\n<!-- plot latency -->\n\nb", run, {"latency": "L"}, "f")
        == "a\n\n![L](f/latency.png)\n\nb\n"
    )
    assert document.render("a\n\n<!-- plot latency -->\n\nb", run, {}, "f") == "a\n\nb\n"


def test_the_summary_names_what_was_missed():
    rows = [Row("idle", "4 consumers", "shmtensor", "%", value, rounds=[value]) for value in (0.5, 7.0)]
    met, missed = ([asdict(one) for one in targets.judge([row])] for row in rows)
    assert document.render("<!-- summary -->", {"rows": [], "targets": met}, {}, "") == (
        "1 of the 1 targets that this run could judge are met.\n"
    )
    page = document.render("<!-- summary -->", {"rows": [], "targets": met + missed}, {}, "")
    assert page.startswith("1 of the 2 targets")
    assert page.endswith("- 4 idle consumers together: 7.00, wanted ≤ 1\n")


def test_the_page_refuses_a_part_that_does_not_exist():
    with pytest.raises(ValueError, match="not known"):
        document.render("<!-- nonsense -->", {"rows": []}, {}, "")


def test_one_page_of_two_runs():
    def run(workload, value, **more):
        rows = [Row(workload, name, "shmtensor", "x", value, rounds=[value]) for name in ("cpu, shmtensor, 8", "x")]
        return {
            "machine": {"cpu": "c", "load_average": [value]}, "versions": {}, "scale": "tiny",
            "command": f"run {workload}", "rows": [asdict(row) for row in rows],
            "seconds": {workload: 1.0}, "rounds": {"fan-out": 1, "b": 1},
            "texts": {"fan-out": {}, "b": {}}, "failures": {f"{workload}: x": "broken"},
            "targets": [{"what": "a target of old", "against": None, "measured": value}], **more,
        }  # fmt: skip

    whole = document.joined([run("fan-out", 1), run("b", 2), run("fan-out", 3)])
    assert [(row["workload"], row["median"]) for row in whole["rows"]] == [("b", 2)] * 2 + [("fan-out", 3)] * 2
    judged = {one["what"]: (one["measured"], one["open"]) for one in whole["targets"]}
    assert judged == {
        "fan-out of 6 MiB to 8, CPU": (3, "cpu, shmtensor, 1: not run"),
        "fan-out of 6 MiB to 8, wall time": (None, "not run"),
    }
    assert whole["command"] == "run fan-out` and `run b` and `run fan-out"
    assert whole["seconds"] == {"fan-out": 1.0, "b": 1.0}
    assert set(whole["failures"]) == {"fan-out: x", "b: x"}
    found = [{"torch": "0", "vllm": None}, {"torch": "0", "vllm": "1"}, {"torch": "0", "vllm": None}]
    whole = document.joined([run("b", number, versions=versions) for number, versions in enumerate(found)])
    assert whole["versions"] == {"torch": "0", "vllm": "1"}
    with pytest.raises(ValueError, match="different machines, versions or scales"):
        document.joined([run("fan-out", 1, versions={"torch": "1"}), run("b", 2, versions={"torch": "0"})])


def test_plots_are_drawn_of_what_is_there(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"workload": "round-trip", "group": "median round trip", "line": line, "x": x, "median": x / 64}
        for line in ("shmtensor", "rival")
        for x in (64, 1024)
    ]
    samples = [
        {"workload": "round-trip", "metric": "round trip", "case": "shmtensor, 1 KiB",
         "percentiles": [1e-6] * len(PERCENTILES)},
    ]  # fmt: skip
    drawn = plots.draw({"rows": rows, "samples": samples, "percentiles": PERCENTILES}, tmp_path)
    assert set(drawn) == {"latency", "percentiles"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in drawn for kind in plots.FORMATS}
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--only", "--transport"])
def test_the_command_names_what_there_is(option):
    result = CliRunner().invoke(app, [option, "nonsense"])
    assert result.exit_code == 2
    assert "there is" in result.output


# --- the regression guard


def test_counts_see_what_a_call_does():
    def work():
        return sorted([3, 1, 2])

    once = instructions.count(work)
    assert once["Python calls"] == 1
    assert once["C calls"] == 1
    assert instructions.count(lambda: [work(), work()])["instructions"] > 2 * once["instructions"]
    assert sys.gettrace() is None or "coverage" in sys.modules


def test_growth_is_told():
    stored = {"send": {"instructions": 100, "Python calls": 10, "C calls": 10}}
    assert instructions.exceeding({"send": {"instructions": 110, "Python calls": 11, "C calls": 10}}, stored) == []
    (text,) = instructions.exceeding({"send": {"instructions": 111, "Python calls": 1, "C calls": 1}}, stored)
    assert text == "send: 111 instructions, +11% on the stored 100"


@pytest.mark.slow
@pytest.mark.parametrize("pure", [False, True], ids=["compiled", "pure"])
def test_the_hot_path_has_not_grown(pure):
    # in a process of its own: what other tests have imported, OpenTelemetry for one, changes what a send does
    environment = {name: value for name, value in os.environ.items() if name != "SHMTENSOR_PURE"}
    if pure:
        environment["SHMTENSOR_PURE"] = "1"
    command = [sys.executable, "-m", "benchmarks.instructions"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nif it is meant: {' '.join(command)} --write"


# --- shmtensor bench


@pytest.mark.slow
def test_bench_measures_all_three(monkeypatch):
    result = CliRunner().invoke(commands, ["bench", "--size", "64KiB", "--seconds", "0.05", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tensor_bytes"] == 64 << 10
    assert [each["name"] for each in found["transports"]] == ["shmtensor", "multiprocessing.Queue", "torch Queue"]
    for each in found["transports"]:
        assert each["round_trip_us"]["count"] > 0
        assert 0 < each["round_trip_us"]["p10"] <= each["round_trip_us"]["median"] <= each["round_trip_us"]["p90"]
        assert each["one_way"]["messages_per_second"] > 0
    assert set(found["times_faster"]) == {"multiprocessing.Queue", "torch Queue"}


@pytest.mark.parametrize("size", ["nonsense", "0"])
def test_bench_refuses_a_size(size):
    result = CliRunner().invoke(commands, ["bench", "--size", size])
    assert result.exit_code == 2
    assert "--size" in result.stderr
