"""What the commands share: JSON for programs, tables for people, one line and an exit code for errors.

Commands that look at one channel wait until there is one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ..channel.names import check_channel, control_name
from ..errors import ShmTensorError
from ..memory import segment as shm
from ..options import printable, reason

_F = TypeVar("_F", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
INTERRUPTED = 130
LONGEST_S: Final = 1e6
"""The most seconds for `--interval` and `--seconds`, more than eleven days: `time.sleep` does not take `inf`."""
_WIDE: Final = 200
"""Columns of a table that is not shown on a terminal."""


def console(*, stderr: bool = False) -> Console:
    """A console on the streams as they are now (tests swap them). Tables in files and pipes are wide, unless COLUMNS
    says how wide: what is cut cannot be searched."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=False, emoji=False)  # `a:v:b` is a name
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


def print_json(value: Any) -> None:
    """Print JSON: all that a command with `--json` writes to stdout."""
    typer.echo(_json(value, indent=2))


def print_json_line(value: Any) -> None:
    """Print JSON on one line, at once."""
    print(_json(value, separators=(",", ":"), check_circular=False), flush=True)


def _json(value: Any, **how: Any) -> str:
    """The value as JSON, which has no `nan` and `inf`: they become text."""
    try:
        return json.dumps(value, allow_nan=False, **how)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **how)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def fail(text: str, code: int = 1) -> typer.Exit:
    """Print an error on stderr; raise what this returns."""
    _flush_or_drop()
    console(stderr=True).print(f"[bold red]error:[/] {visible(text)}", soft_wrap=True)
    return typer.Exit(code)


def _flush_or_drop() -> None:
    """Write what stdout has, or drop it: at its end the interpreter would try again, complain, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def visible(text: object) -> str:
    """A name, a path or what else comes from outside, in a text with markup: what cannot be printed, such as escape
    sequences, can be seen."""
    return escape(printable(str(text)))


def prepare_output() -> None:
    """Let stdout and stderr write what their encoding does not have as escapes, in place of an error, and all of it:
    with `PYTHONUNBUFFERED` they have no buffer, and a write that is cut short would count as whole."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if isinstance(stream.buffer, io.RawIOBase) and stream is getattr(sys, f"__{name}__"):
            encoding = stream.encoding
            stream = io.TextIOWrapper(io.BufferedWriter(stream.detach()), encoding, line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        stream.reconfigure(errors="backslashreplace")


def guarded(function: _F) -> _F:
    """Make Ctrl-C exit with code 130, and print library errors and that the output has no room as one line, with exit
    code 1. (Where nobody reads the output any more, typer ends the command quietly.)"""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            console(stderr=True).print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except ShmTensorError as error:
            raise fail(reason(error)) from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise fail(f"cannot write the output: {error.strerror}") from None

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def signals_interrupt(*numbers: int) -> Iterator[None]:
    """Within, the first of these signals is a Ctrl-C, for a regular end. Those that are ignored (nohup) stay so."""
    ended = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt

    with signals_handled(interrupt, not_ignored(*numbers)):
        yield


def not_ignored(*numbers: int) -> list[int]:
    """Those of these signals that are not ignored, as by `nohup`."""
    return [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, Any], object], numbers: Iterable[int]) -> Iterator[None]:
    """Within, these signals have this handler."""
    before = {each: signal.getsignal(each) for each in numbers}
    try:
        for each in before:
            signal.signal(each, handler)
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, previous)


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


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_PAUSE_S = 0.05
_MAKING_S = 2.0
"""Seconds that the creation of a channel may take; it cannot be read before that."""


class Unreadable:
    """How long a channel could not be read."""

    def __init__(self) -> None:
        self._until: float | None = None

    def again(self, channel: str, why: object) -> None:
        """It cannot be read: wait a little, it may just be being made. Ends the command with code 1 if it stays so."""
        self._until = time.monotonic() + _MAKING_S if self._until is None else self._until
        if time.monotonic() > self._until:
            text = reason(why) if isinstance(why, BaseException) else why
            raise fail(f'channel "{channel}" cannot be read: {text}')
        time.sleep(_PAUSE_S)

    def over(self) -> None:
        """It was read."""
        self._until = None


def named(channel: str) -> str:
    """The channel's name. Ends the command with code 2 if no channel can have it."""
    try:
        return check_channel(channel)
    except ShmTensorError as error:
        raise fail(reason(error), 2) from None


def wait_for_channel(channel: str, timeout: float | None) -> None:
    """Wait until there is such a channel, and say so. Ends the command with code 1 after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    said = False
    while shm.status(control_name(channel)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise fail(f'there is no channel "{channel}" after {timeout:g} s: see `shmtensor ls`')
        if not said:
            said = True
            console(stderr=True).print(f'waiting for channel "{escape(channel)}", which no process has made yet')
        time.sleep(_PAUSE_S)
