"""`shmtensor demo`: send the same frames to the same readers over each transport, and compare the results."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...codec.libraries import import_torch
from ...memory.segment import free_bytes
from ...options import format_bytes
from ..output import console, fail, guarded, print_json
from .frames import InputError, paths
from .processes import Plan, ProcessError, Processes, Report, Round
from .transports import TRANSPORTS

_START: Final = 120.0
_ANSWER: Final = 60.0
_SLOTS: Final = 8
_TURNS: Final = 3
_BAD_INPUT: Final = 2
_LOOK: Final = 0.4
_ENOUGH: Final = 0.75


@dataclass
class Result:
    """The results of one transport."""

    name: str
    frames: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    """Bytes that readers received in the timed rounds: each frame counts once for each reader."""
    checked: int = 0
    """Bytes that readers have compared with the sender's, in untimed rounds."""
    lost: int = 0
    damaged: int = 0
    latencies: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """Frames a second of each timed round."""

    def add(self, order: Round, reports: dict[str, Report]) -> list[str]:
        """Add a round; returns its errors."""
        sent = reports["sender"]["sent"]
        readers = {name: report for name, report in reports.items() if name != "sender"}
        nbytes = sum(report["bytes"] for report in readers.values())
        if order.seconds is None:
            self.checked += nbytes
        else:
            seconds = (max(report["ended_ns"] for report in readers.values()) - reports["sender"]["begun_ns"]) / 1e9
            self.frames, self.seconds, self.nbytes = self.frames + sent, self.seconds + seconds, self.nbytes + nbytes
            self.speeds.append(sent / seconds)
            for report in readers.values():
                self.latencies += report["latencies"]
        errors = []
        for name, report in readers.items():
            if report["wrong"]:
                self.damaged += len(report["wrong"])
                errors.append(f"{self.name}, {name}: wrong bytes, or out of order: messages {report['wrong'][:5]}")
            if report["received"] != sent:
                self.lost += abs(sent - report["received"])
                errors.append(f"{self.name}, {name}: {sent} messages were sent, {report['received']} arrived")
        return errors

    @property
    def frames_per_second(self) -> float:
        """Of the median round."""
        return sorted(self.speeds)[len(self.speeds) // 2]

    @property
    def gigabytes_per_second(self) -> float:
        return self.frames_per_second * self.nbytes / self.frames / 1e9

    def latency_ms(self, percent: float) -> float:
        """Milliseconds from `send` to a reader's `recv`."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1e6

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "frames": self.frames,
            "seconds": self.seconds,
            "frames_per_second": self.frames_per_second,
            "frames_per_second_of_rounds": self.speeds,
            "gb_per_second": self.gigabytes_per_second,
            "p50_ms": self.latency_ms(50),
            "p99_ms": self.latency_ms(99),
            "bytes": self.nbytes,
            "checked_bytes": self.checked,
            "lost": self.lost,
            "damaged": self.damaged,
        }


@dataclass(frozen=True)
class Load:
    """How busy other programs keep the machine."""

    cpus: int
    idle: float
    """CPUs that were idle while the processes of the demo waited: the smaller of before and after the rounds."""
    needed: int
    """One for each process, at most all of them."""

    @property
    def too_busy(self) -> bool:
        return self.idle < _ENOUGH * self.needed


@guarded
def demo(
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="PATH", help="File or directory of images, .npy, .pt or .safetensors. [sample images]"
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Time for the timed rounds of all transports together.")
    ] = 6.0,
    readers: Annotated[int, typer.Option(min=1, max=64, help="Processes that receive every frame.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send real images from one process to several others, check every byte, and compare with the usual queues.

    One process sends frames to all readers: over shmtensor, multiprocessing.Queue and torch.multiprocessing.Queue,
    the same frames to the same processes. First each transport sends every frame once, and readers compare every byte;
    then timed rounds, interleaved, in which they only receive. Says so if other programs keep the machine too busy to
    compare. Exit code 1 if a byte differs, a message is lost or a process dies; 2 if there is nothing to send.
    """
    plan = Plan(f"demo-{os.getpid()}-{secrets.token_hex(2)}", readers, source, _SLOTS)
    out = console(stderr=as_json)
    try:
        paths(source)
        import_torch()
        about, results, errors, load = _run(plan, seconds, out)
    except InputError as error:
        raise fail(str(error), _BAD_INPUT) from None
    except ProcessError as error:
        raise fail(str(error)) from None
    if as_json:
        print_json(
            {
                "ok": not errors,
                "errors": errors,
                "frames": about["frames"],
                "frame_bytes": about["bytes"],
                "readers": readers,
                "transports": [result.as_dict() for result in results],
                "speedups": speedups(results),
                "cpus": load.cpus,
                "idle_cpus": load.idle,
                "too_busy": load.too_busy,
            }
        )
    else:
        _show(out, results)
    if load.too_busy:
        console(stderr=True).print(
            f"[yellow]note:[/] other programs leave {load.idle:.1f} of {load.cpus} CPUs to {readers + 1} processes: "
            "the machine is too busy to compare, run this again when it is quieter",
            soft_wrap=True,
        )
    for text in errors:
        console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    if errors:
        raise typer.Exit(1)
    out.print(f"[green]all {format_bytes(sum(result.checked for result in results))} that were compared are equal[/]")


def _run(plan: Plan, seconds: float, out: Console) -> tuple[Report, list[Result], list[str], Load]:
    """Run all rounds; returns the sender's frames, a result for each transport, errors, and the load of the machine."""
    results = {name: Result(name) for name in TRANSPORTS}
    length = seconds / (_TURNS * len(TRANSPORTS))
    timed = [(name, length) for _ in range(_TURNS) for name in TRANSPORTS]  # in turns: a busy moment affects all
    rounds = [Round(number, *each) for number, each in enumerate([*((name, None) for name in TRANSPORTS), *timed])]
    errors: list[str] = []
    with _progress(len(rounds), f"starting {1 + plan.readers} processes") as tell, Processes(plan) as processes:
        about = processes.gather(_START)["sender"]
        largest = max(about["bytes"])
        if plan.slots * largest > free_bytes():
            raise InputError(
                f"the largest frame has {format_bytes(largest)}, a ring of {plan.slots} slots needs "
                f"{format_bytes(plan.slots * largest)} of /dev/shm and {format_bytes(free_bytes())} are free: pass "
                "smaller files"
            )
        idle = _idle_cpus()
        for order in rounds:
            tell(f"{'checking' if order.seconds is None else 'timing'} {order.transport}", order.number)
            processes.order(order)
            errors += results[order.transport].add(order, processes.gather((order.seconds or 0) + _ANSWER))
        tell("done", len(rounds))
        idle = min(idle, _idle_cpus())
    frames, nbytes = len(about["frames"]), sum(about["bytes"])
    out.print(f"{frames} different frames ({format_bytes(nbytes)}) to each of {plan.readers} readers")
    cpus = len(os.sched_getaffinity(0))
    return about, list(results.values()), errors, Load(cpus, min(idle, cpus), min(cpus, 1 + plan.readers))


def _idle_cpus() -> float:
    """CPUs that are idle while the demo itself does nothing; all of them if that cannot be measured."""

    def idle_seconds() -> float:
        with open("/proc/stat") as lines:
            words = lines.readline().split()
        return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")

    try:
        before, begun = idle_seconds(), time.monotonic()
        time.sleep(_LOOK)
        return (idle_seconds() - before) / (time.monotonic() - begun)
    except (OSError, ValueError, IndexError):
        return float(os.cpu_count() or 1)


def speedups(results: list[Result]) -> dict[str, float]:
    """Our frames per second, divided by those of each other transport."""
    ours, *others = results
    return {other.name: ours.frames_per_second / other.frames_per_second for other in others}


def _show(out: Console, results: list[Result]) -> None:
    table = Table(
        title="the same frames to the same readers", title_justify="left", title_style="bold", box=None,
        padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for number, heading in enumerate(("transport", "frames/s", "GB/s", "p50", "p99", "speed-up")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    times = speedups(results)
    for result in results:
        table.add_row(
            result.name, f"{result.frames_per_second:.0f}", f"{result.gigabytes_per_second:.2f}",
            *(f"{result.latency_ms(percent):.2f} ms" for percent in (50, 99)),
            f"{times[result.name]:.1f} x" if result.name in times else "",
        )  # fmt: skip
    out.print(table)
    out.print(
        "Frames a second of the median round; GB/s is what all readers received. Latency is from send to recv with up "
        f"to {_SLOTS} earlier frames in flight. Readers do not read every byte in the timed rounds.",
        style="dim",
    )


@contextmanager
def _progress(total: int, first: str) -> Iterator[Any]:
    """A bar on stderr, if that is a terminal."""
    err = console(stderr=True)
    columns = (TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(first, total=total)
        yield lambda text, done: bar.update(task, description=text, completed=done)
