"""Run the cases of a workload in rounds, by turns: A B C, A B C, ..."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import processes
from .measure import Outcome, Row, make_rows
from .processes import RoleFailed
from .workloads import SCALES, Workload

FAILURES = (RoleFailed, OSError, RuntimeError, ValueError)


def rounds_of(workload: Workload, scale: str, rounds: int | None = None) -> int:
    """How many rounds a run makes."""
    return rounds or workload.rounds.get(scale, SCALES[scale].rounds)


def run_workload(
    workload: Workload,
    scale: str,
    *,
    rounds: int | None = None,
    transports: frozenset[str] | None = None,
    step: Callable[[str], object] = lambda text: None,
) -> tuple[list[Row], dict[str, Outcome]]:
    """Measure. A case whose rival is absent is skipped by name, one that fails or hangs is not tried again.

    Args:
        workload: what to run.
        scale: `"full"`, `"quick"` or `"tiny"`.
        rounds: instead of the scale's number.
        transports: names of those to run; None: all.
        step: called before each case with what comes next.
    """
    outcomes = {case.name: Outcome(skipped=case.transport.skip_reason() or case.needs()) for case in workload.cases}
    for case in workload.cases:
        if transports is not None and case.transport.name not in transports:
            outcomes[case.name].skipped = "not asked for"
        elif scale != "full" and not case.quick:
            outcomes[case.name].skipped = outcomes[case.name].skipped or "full run only"
    effort = SCALES[scale].effort
    with processes.patience(SCALES[scale].patience):
        if workload.by_turns is not None:
            _run_by_turns(workload, scale, rounds_of(workload, scale, rounds), outcomes, step)
            return make_rows(workload.name, workload.rows, outcomes), outcomes
        for turn in range(rounds_of(workload, scale, rounds)):
            for case in workload.cases:
                outcome = outcomes[case.name]
                if outcome.skipped or outcome.failed or (case.rounds is not None and turn >= case.rounds):
                    continue
                if case.measure is None:
                    raise TypeError(f"{workload.name}: {case.name} cannot be measured alone")
                step(f"{workload.name}: {case.name}, round {turn + 1}")
                start = time.monotonic()
                try:
                    outcome.rounds.append(case.measure(effort))
                except FAILURES as error:
                    outcome.failed = f"{type(error).__name__}: {error}"
                outcome.seconds += time.monotonic() - start
    return make_rows(workload.name, workload.rows, outcomes), outcomes


def _run_by_turns(
    workload: Workload, scale: str, rounds: int, outcomes: dict[str, Outcome], step: Callable[[str], object]
) -> None:
    """Fill the outcomes of a workload that measures its cases together: if one fails, all of them have."""
    names = [name for name, outcome in outcomes.items() if not outcome.skipped]
    if not names or workload.by_turns is None:
        return
    step(f"{workload.name}: all of it, by turns")
    start = time.monotonic()
    found, failed = {}, None
    try:
        found = workload.by_turns(SCALES[scale].effort, names, rounds)
    except FAILURES as error:
        failed = f"{type(error).__name__}: {error}"
    for name in names:
        outcomes[name].rounds = list(found.get(name, ()))
        outcomes[name].failed = failed
        outcomes[name].seconds = (time.monotonic() - start) / len(names)
