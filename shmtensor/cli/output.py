"""Output of commands: JSON for programs, tables for people, one line and an exit code for errors."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
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


def print_json_line(value: Any) -> None:
    """Print JSON on one line, at once."""
    print(json.dumps(value, separators=(",", ":")), flush=True)


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


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Within, Ctrl-C is the regular end: quiet, with exit code 0."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172800 else f"{value / 86400:.0f} days"


def bytes_per_second(value: float) -> str:
    """A rate of bytes for people, in decimal units."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1 if value < 100 * size else 0}f} {unit}"
    return f"{value:.0f} B/s"


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
