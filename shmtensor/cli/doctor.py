"""`shmtensor doctor`: whether this machine has what the library needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from . import machine, software
from .output import FAIL, OK, WARN, Finding, console, guarded, print_json

_COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@guarded
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check shared memory, limits, kernel features and versions. Exit code 1 if something that is needed is missing."""
    findings = examine()
    if as_json:
        print_json({"ok": not any(it.status == FAIL for it in findings), "findings": [asdict(it) for it in findings]})
    else:
        _show(findings)
    if any(finding.status == FAIL for finding in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """All findings, in the order of the report. A check that raises is a failed finding."""
    findings: list[Finding] = []
    for check in (*machine.CHECKS, *software.CHECKS):
        try:
            findings += check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            findings.append(
                Finding(name, FAIL, type(error).__name__, f"{error}; this check broke where it should not have")
            )
    return findings


def _show(findings: list[Finding]) -> None:
    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "what", "value", "meaning"):
        table.add_column(heading, overflow="fold")
    for it in findings:
        table.add_row(f"[{_COLOURS[it.status]}]{it.status}[/]", it.name, escape(it.value), escape(it.meaning))
    out.print(table)
    failed, warned = (sum(it.status == status for it in findings) for status in (FAIL, WARN))
    out.print(f"{len(findings)} checks, {warned} warnings, {failed} failures")
