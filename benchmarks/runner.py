"""Run the cases of a workload in rounds, by turns: A B C, A B C, ..."""

from __future__ import annotations

from collections.abc import Callable

from .measure import Outcome, Row, make_rows
from .processes import RoleFailed
from .workloads import ROUNDS, Workload


def run_workload(
    workload: Workload,
    scale: str,
    *,
    rounds: int | None = None,
    transports: frozenset[str] | None = None,
    step: Callable[[str], object] = lambda text: None,
) -> tuple[list[Row], dict[str, Outcome]]:
    """Measure. A case whose rival is absent is skipped by name, one that fails is not tried again.

    Args:
        workload: what to run.
        scale: `"full"`, `"quick"` or `"tiny"`.
        rounds: instead of the scale's number.
        transports: names of those to run; None: all.
        step: called before each case with what comes next.
    """
    outcomes = {case.name: Outcome(skipped=case.transport.skip_reason()) for case in workload.cases}
    for turn in range(rounds or ROUNDS[scale]):
        for case in workload.cases:
            outcome = outcomes[case.name]
            if transports is not None and case.transport.name not in transports:
                outcome.skipped = "not asked for"
            step(f"{workload.name}: {case.name}, round {turn + 1}")
            if outcome.skipped or outcome.failed:
                continue
            try:
                outcome.rounds.append(case.measure(workload.counts[scale]))
            except (RoleFailed, OSError) as error:
                outcome.failed = str(error)
    return make_rows(workload.name, workload.rows, outcomes), outcomes
