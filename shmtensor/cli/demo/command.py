"""`shmtensor demo`: stream real images to inference workers and to a checked fan-out, next to the usual queues."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...memory.segment import free_bytes
from ...units import format_bytes
from ..output import console, fail, guarded, print_json
from .crew import Crew, CrewError
from .frames import InputError, paths
from .plan import Plan
from .roles import Check
from .tables import show
from .tally import Tally, ratios
from .transports import OURS, TRANSPORTS, make_transport

_START: Final = 120.0
_SLOTS: Final = 4
_PAUSE: Final = 0.05
_LOST_AFTER: Final = 5.0
_BAD_INPUT: Final = 2


@guarded
def demo(
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="PATH", help="File or directory of images, .npy, .pt or .safetensors. [sample images]"
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Time for all transports together, start-up excluded.")
    ] = 9.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that run the model.")] = 2,
    subscribers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that check every byte of every frame.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stream real images to inference workers and subscribers, check every byte, and compare with the usual queues.

    One producer sends each frame to one of the workers, which run a small convolutional model and send the result
    back, and to all subscribers. The same work then goes through multiprocessing.Queue and
    torch.multiprocessing.Queue. Exit code 1 if a byte differs, a message is lost or a process dies; 2 if there is
    nothing to stream.
    """
    plan = Plan(f"demo-{os.getpid()}-{secrets.token_hex(2)}", workers, subscribers, source, _SLOTS)
    out = console(stderr=as_json)
    try:
        paths(source)
        about, tallies, errors = _run(plan, seconds, out)
    except InputError as error:
        raise fail(str(error), _BAD_INPUT) from None
    except CrewError as error:
        raise fail(str(error)) from None
    ours, *rivals = tallies
    if as_json:
        print_json(
            {
                "ok": not errors,
                "errors": errors,
                "frames": about["frames"],
                "frame_bytes": about["bytes"],
                "workers": workers,
                "subscribers": subscribers,
                "transports": [tally.as_dict() for tally in tallies],
                "ratios": {rival.name: ratios(ours, rival) for rival in rivals},
            }
        )
    else:
        show(out, tallies, _SLOTS)
    for text in errors:
        console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    if errors:
        raise typer.Exit(1)
    out.print(
        f"[green]every byte of {format_bytes(sum(tally.verified for tally in tallies))} arrived as it was sent[/]"
    )


def _run(plan: Plan, seconds: float, out: Console) -> tuple[dict[str, Any], list[Tally], list[str]]:
    """All rounds: (the producer's frames, a tally per transport, what went wrong)."""
    tallies = {name: Tally(name) for name in TRANSPORTS}
    turns = 2 if seconds >= 3 * len(TRANSPORTS) else 1  # interleaved, so that a busy minute hits everybody
    rounds = [name for _ in range(turns) for name in TRANSPORTS]
    errors: list[str] = []
    processes = 1 + plan.workers + plan.subscribers
    with _progress(len(rounds), f"starting {processes} processes") as tell, Crew(plan) as crew:
        import torch

        torch.set_num_threads(1)
        about = crew.gather(_START)["producer 0"]
        largest = max(about["bytes"])
        need = 2 * plan.slots * largest
        if need > free_bytes():
            raise InputError(
                f"the largest frame has {format_bytes(largest)}, two rings of {plan.slots} slots need "
                f"{format_bytes(need)} of /dev/shm and {format_bytes(free_bytes())} are free: pass smaller files"
            )
        for number, name in enumerate(rounds):
            tell(name, number)
            reports, results = _round(crew, plan, name, number, seconds / len(rounds))
            errors += tallies[name].add_round(reports, results)
        tell("done", len(rounds))
    frames, nbytes = len(about["frames"]), sum(about["bytes"])
    out.print(
        f"{frames} different frames ({format_bytes(nbytes)}), {plan.workers} workers, {plan.subscribers} subscribers"
    )
    return about, [tallies[OURS], *(tally for name, tally in tallies.items() if name != OURS)], errors


def _round(crew: Crew, plan: Plan, name: str, number: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """One round of one transport: everybody's reports, and our own of the results."""
    check, reports = Check("main"), dict[str, Any]()
    with make_transport(name, plan, number, crew.lines).results() as take:
        crew.order(name, number, seconds)
        patience = None
        while True:
            reports.update(crew.reports())
            if len(reports) == len(crew.names):
                if check.messages >= reports["producer 0"]["sent"]:
                    break
                patience = patience or time.monotonic() + _LOST_AFTER
                if time.monotonic() > patience:
                    break
            try:
                received = take(_PAUSE)
            except EOFError:
                reports.update(_rest(crew, reports))
                break
            if received is not None:
                check.arrived(received[1])
                check.look(*received)
                del received
    return reports, check.report()


def _rest(crew: Crew, reports: dict[str, Any]) -> dict[str, Any]:
    """The results have ended; wait for the reports that are still to come."""
    while len(reports) < len(crew.names):
        reports.update(crew.reports(0.2))
    return reports


@contextmanager
def _progress(total: int, first: str) -> Iterator[Any]:
    """A bar on stderr, if that is a terminal."""
    err = console(stderr=True)
    columns = (TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(first, total=total)
        yield lambda text, done: bar.update(task, description=text, completed=done)
