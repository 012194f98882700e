"""Output of commands: JSON for programs, tables for people, one line and an exit code for errors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ShmTensorError

_F = TypeVar("_F", bound=Callable[..., Any])

INTERRUPTED = 130


def console(*, stderr: bool = False) -> Console:
    """A console on the streams as they are now (tests swap them)."""
    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """Print JSON: all that a command with `--json` writes to stdout."""
    typer.echo(json.dumps(value, indent=2))


def fail(text: str, code: int = 1) -> typer.Exit:
    """Print an error on stderr; raise what this returns."""
    console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    return typer.Exit(code)


def guarded(function: _F) -> _F:
    """Make Ctrl-C exit with code 130, and print library errors as one line and exit with code 1."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            console(stderr=True).print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except ShmTensorError as error:
            raise fail(str(error)) from None

    return run  # type: ignore[return-value]


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172800 else f"{value / 86400:.0f} days"


OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True)
class Finding:
    """One result of `doctor`: name, status, value, and what that means or what to do about it."""

    name: str
    status: str
    value: str
    meaning: str
