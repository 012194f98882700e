"""`shmtensor trace`: what every member of a channel does with each message, for Perfetto."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from .. import __version__
from ..errors import ShmTensorError
from ..observe.trace import Tracer, every_that_fits, write_chrome
from .output import LONGEST_S, console, fail, guarded, named, print_json, signals_interrupt, wait_for_channel
from .output import seconds as duration

_POLL_S = 0.02
_SHOW_S = 0.5
_OPEN_END_S = 60.0
"""How long a trace until Ctrl-C is thought to take."""


@guarded
def trace(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; -: to stdout.")] = Path(
        "trace.json"
    ),
    seconds: Annotated[float, typer.Option(help="Seconds to trace; 0: until Ctrl-C.", min=0.0, max=LONGEST_S)] = 5.0,
    every: Annotated[
        int | None,
        typer.Option(
            help="Only messages whose number is a multiple of it; 1: each message.",
            min=1,
            show_default="1; of a fast channel, what makes --seconds fit into --most",
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="End after so many events.", min=1)] = 500_000,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the channel.", min=0.0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was traced as JSON.")] = False,
) -> None:
    """Trace a channel: each send, take and release, with flows between the processes, for ui.perfetto.dev.

    While it lasts, the members of the channel write their events to memory that they share with this command, which
    joins the channel as a member that neither sends nor receives; before and after, they write nothing. A sleeping
    member is traced from its next message on. The file is in the Trace Event Format of Chrome and Perfetto. Ctrl-C,
    SIGTERM and SIGHUP end it early: what was seen is written; a second one writes nothing. Exit code 1 if there is no
    such channel, or it is traced already.
    """
    named(channel)
    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise fail("--json prints to stdout as well: choose another --output", 2)
    with contextlib.nullcontext(sys.stdout) if to_stdout else _written_to(output) as file:
        with signals_interrupt(signal.SIGTERM, signal.SIGHUP):
            wait_for_channel(channel, timeout)
        with until_second_interrupt() as interrupted:
            try:
                tracer = Tracer(channel, every=every or every_that_fits(channel, seconds or _OPEN_END_S, most))
            except FileNotFoundError:
                raise fail(f'there is no channel "{channel}": see `shmtensor ls`') from None
            with tracer:
                end = _record(tracer, seconds, most, interrupted)
                unfinished = tracer.close()
            found = tracer.trace
            messages = write_chrome(found, file, __version__)
    lasted = (found.ended_ns - found.began_ns) / 1e9
    if as_json:
        print_json({
            "channel": channel, "kind": found.kind, "file": str(output), "seconds": lasted, "events": found.count,
            "messages": messages, "members": found.writers,
            "every": found.every, "lost": found.lost, "end": end,
        })  # fmt: skip
    else:
        console(stderr=to_stdout).print(
            f"{'stdout' if to_stdout else output}: {found.count} events of {messages} messages in {duration(lasted)}"
            f", {found.lost} lost"
            + (f"; one of {found.every} messages was traced: see --every" if found.every > 1 else "")
            + (f"; it ended early, after --most {most} events: see --every" if end == "full" else ""),
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    if not found.count:
        console(stderr=True).print(f"no member sent, took or gave back anything: see `shmtensor ls {channel}`")
    if unfinished:
        console(stderr=True).print(f"{unfinished} messages that no consumer has finished ended with the channel")


@contextlib.contextmanager
def until_second_interrupt() -> Iterator[list[int]]:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP is only noted, in this list: whatever it interrupts goes on, to a
    complete file. Those that are ignored (nohup) stay so."""
    found: list[int] = []

    def note(number: int, frame: object) -> None:
        found.append(number)
        if len(found) > 1:
            raise KeyboardInterrupt

    noted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: handler for each in noted if (handler := signal.getsignal(each)) is not signal.SIG_IGN}
    try:
        for each in before:
            signal.signal(each, note)
        yield found
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _record(tracer: Tracer, seconds: float, most: int, interrupted: list[int]) -> str:
    """Read until the time is over, or there are enough events. Why it ended."""
    now = time.monotonic()
    until, shown, count = now + seconds if seconds else float("inf"), now, 0
    out = console(stderr=True)
    with out.status("tracing") if out.is_terminal else contextlib.nullcontext() as status:
        while now < until:
            if interrupted:
                return "interrupted"
            time.sleep(min(_POLL_S, until - now))
            count += tracer.poll()
            if count >= most:
                return "full"
            now = time.monotonic()
            if status is not None and now >= shown:
                shown = now + _SHOW_S
                left = f", {duration(max(0.0, until - now))} left" if seconds else ", Ctrl-C ends it"
                status.update(f"tracing: {count} events, {tracer.trace.lost} lost{left}")
    return "time"


@contextlib.contextmanager
def _written_to(path: Path) -> Iterator[TextIO]:
    """A file beside the one that is wanted, which takes its place when it is complete. Ends the command if there can be
    none. A device or a FIFO is written to, and what a link leads to is replaced."""
    if path.is_dir():
        raise fail(f"cannot write {path}: it is a directory: pass the name of a file", 2)
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            number, name = os.open(path, os.O_WRONLY), ""
        else:
            number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}: choose another --output", 2) from None
    try:
        with open(number, "w", encoding="utf-8") as file:
            yield file
        if name:
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
    except BaseException as error:
        if name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        if isinstance(error, OSError) and not isinstance(error, ShmTensorError):
            raise fail(f"cannot write {path}: {error.strerror}: choose another --output") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
