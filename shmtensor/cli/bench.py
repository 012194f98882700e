"""`shmtensor bench`: send one tensor between two processes, through shmtensor and through the standard queues."""

from __future__ import annotations

import multiprocessing
import os
import queue
import secrets
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..codec.libraries import import_torch
from ..endpoints.pubsub import Publisher, Subscriber
from ..errors import ArgumentError
from ..options import format_bytes, parse_bytes
from .output import AsJson, console, fail, guarded, print_json

OURS: Final = "shmtensor"
QUEUE: Final = "multiprocessing.Queue"
TORCH_QUEUE: Final = "torch Queue"
NAMES: Final = (OURS, QUEUE, TORCH_QUEUE)
_THERE: Final = 0
_BACK: Final = 1
_ROUNDS: Final = 3
_WARM: Final = 10
_IN_FLIGHT: Final = 16
_IN_FLIGHT_BYTES: Final = 64 << 20
_LEAST: Final = 3
_MOST: Final = 200_000
_PATIENCE: Final = 60.0
_BAD_SIZE: Final = 2

Send = Callable[[Any], object]
Receive = Callable[[], Any]


@dataclass
class Figures:
    """The measurements of one transport."""

    name: str
    trips: list[float] = field(default_factory=list)
    """Seconds of each round trip."""
    rates: list[float] = field(default_factory=list)
    """Messages per second, one way, of each round."""

    def as_dict(self, nbytes: int) -> dict[str, Any]:
        """For `--json`: microseconds, messages and bytes per second."""
        cuts = statistics.quantiles(self.trips, n=10, method="inclusive")
        rate = statistics.median(self.rates)
        return {
            "name": self.name,
            "round_trip_us": {
                "median": statistics.median(self.trips) * 1e6,
                "p10": cuts[0] * 1e6,
                "p90": cuts[-1] * 1e6,
                "count": len(self.trips),
            },
            "one_way": {"messages_per_second": rate, "bytes_per_second": rate * nbytes},
        }


class BenchError(Exception):
    """It cannot be measured: the other process has ended, or does not answer; or there is no memory for the tensor."""


@guarded
def bench(
    size: Annotated[str, typer.Option(metavar="BYTES", help="Bytes of the tensor: a number, or like 64KiB.")] = "1KiB",
    seconds: Annotated[
        float, typer.Option(min=0.01, max=600, help="Seconds to measure, for all transports together.")
    ] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Measure the round trip and the one-way rate of a tensor between two processes, beside the usual queues.

    These are multiprocessing.Queue, which pickles, and torch.multiprocessing.Queue, which gets a clone for each send:
    it would share the tensor once and copy nothing after that. At most 16 messages are in flight; all other options of
    each transport are its defaults. The bytes that arrive are compared outside the timed part. The transports are
    measured in turns. All of the project's benchmarks, with more rivals, are in its source tree.
    """
    try:
        nbytes = parse_bytes(size, "--size")
    except ArgumentError as error:
        raise fail(str(error), _BAD_SIZE) from None
    try:
        figures = _run(nbytes, seconds)
    except BenchError as error:
        raise fail(str(error)) from None
    ours, *rivals = [each.as_dict(nbytes) for each in figures]
    if as_json:
        ratios = {
            rival["name"]: {
                "round_trip": rival["round_trip_us"]["median"] / ours["round_trip_us"]["median"],
                "one_way": ours["one_way"]["messages_per_second"] / rival["one_way"]["messages_per_second"],
            }
            for rival in rivals
        }
        print_json({"tensor_bytes": nbytes, "transports": [ours, *rivals], "times_faster": ratios})
        return
    _show(nbytes, ours, rivals)


def _show(nbytes: int, ours: dict[str, Any], rivals: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"A tensor of {format_bytes(nbytes)} between two processes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    for heading in ("trip, µs", "p10 … p90", "one way, /s", "bytes/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in (ours, *rivals):
        trip, way = each["round_trip_us"], each["one_way"]
        table.add_row(
            each["name"],
            f"{trip['median']:,.1f}",
            f"{trip['p10']:,.0f} … {trip['p90']:,.0f}",
            f"{way['messages_per_second']:,.0f}",
            format_bytes(int(way["bytes_per_second"])),
        )
    out = console()
    out.print(table)
    for rival in rivals:
        trip = rival["round_trip_us"]["median"] / ours["round_trip_us"]["median"]
        way = ours["one_way"]["messages_per_second"] / rival["one_way"]["messages_per_second"]
        out.print(
            f"{OURS} beside {rival['name']}: there and back {trip:.1f} × as fast, one way {way:.1f} ×", soft_wrap=True
        )
    waiting, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if waiting > cores:
        out.print(
            f"Other work keeps this machine's {cores} cores busy (load {waiting:.1f}): who is woken waits for a core, "
            "which these figures include. Measure again when it is idle.",
            soft_wrap=True,
        )


def _run(nbytes: int, seconds: float) -> list[Figures]:
    """Start the other process, measure the transports in turns, end it."""
    import_torch()
    import torch
    import torch.multiprocessing

    context = multiprocessing.get_context("spawn")
    in_flight = max(2, min(_IN_FLIGHT, _IN_FLIGHT_BYTES // nbytes))
    ways: dict[str, Any] = {
        OURS: tuple(f"bench-{os.getpid()}-{secrets.token_hex(3)}-{way}" for way in ("there", "back")),
        QUEUE: (context.Queue(in_flight), context.Queue(in_flight)),
        TORCH_QUEUE: tuple(torch.multiprocessing.get_context("spawn").Queue(in_flight) for _ in range(2)),
    }
    ours, theirs = context.Pipe()
    peer = context.Process(target=_answer, args=(ways, nbytes, in_flight, theirs), daemon=True)
    torch.set_num_threads(1)
    payload = _payload(nbytes)
    figures = {name: Figures(name) for name in NAMES}
    steps = [(name, kind) for _ in range(_ROUNDS) for name in NAMES for kind in ("round trip", "one way")]
    closers: list[Callable[[], object]] = []
    try:
        with _progress(len(steps)) as show:
            show("starting a process", 0)
            peer.start()
            theirs.close()
            _receive(ours)
            ends = {name: _open(name, ways[name], nbytes, in_flight, _THERE, _BACK, closers) for name in NAMES}
            ours.send("open")
            _receive(ours)
            for number, (name, kind) in enumerate(steps):
                show(f"{name}, {kind}", number)
                measure = _trips if kind == "round trip" else _one_way
                measure(figures[name], ours, ends[name], payload, seconds / len(steps))
    finally:
        peer.terminate()
        peer.join()
        for close in closers:  # after its death: the last member to leave removes the channels
            close()
        ours.close()
        for name in (QUEUE, TORCH_QUEUE):
            for one in ways[name]:
                one.cancel_join_thread()
                one.close()
    return [figures[name] for name in NAMES]


def _trips(figures: Figures, pipe: Connection, ends: tuple[Send, Receive], payload: Any, seconds: float) -> None:
    """Round trips for so many seconds."""
    send, recv = ends
    name, clock = figures.name, time.perf_counter

    def many(count: int) -> list[float]:
        times = []
        pipe.send((name, "round trip", count))
        for _ in range(count):
            start = clock()
            send(payload)
            value = recv()
            times.append(clock() - start)
        _compare(value, payload)
        return times

    each = statistics.median(many(_WARM))
    figures.trips += many(max(_LEAST, min(_MOST, int(seconds / each))))


def _one_way(figures: Figures, pipe: Connection, ends: tuple[Send, Receive], payload: Any, seconds: float) -> None:
    """Messages to the other process for about so many seconds; it reports the time between the first and the last."""
    send, _ = ends

    def many(count: int) -> float:
        pipe.send((figures.name, "one way", count))
        for _ in range(count + 1):
            send(payload)
        return float(count / _receive(pipe))

    rate = many(_WARM)
    figures.rates.append(many(max(_LEAST, min(_MOST, int(seconds * rate)))))


def _answer(ways: dict[str, Any], nbytes: int, in_flight: int, pipe: Connection) -> None:
    """The program of the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C, and then ends this process
    import torch

    torch.set_num_threads(1)
    closers: list[Callable[[], object]] = []
    expected = _payload(nbytes)
    subscribed = Subscriber(ways[OURS][_THERE])  # before the command's Publisher sends
    pipe.send("subscribed")
    with suppress(EOFError):
        pipe.recv()
        ends = {name: _open(name, ways[name], nbytes, in_flight, _BACK, _THERE, closers) for name in NAMES[1:]}
        publisher = Publisher(ways[OURS][_BACK], slots=in_flight, slot_bytes=nbytes)
        ends[OURS] = (publisher.send, lambda: subscribed.recv(timeout=_PATIENCE).value)
        pipe.send("open")
        while True:
            name, kind, count = pipe.recv()
            send, recv = ends[name]
            if kind == "round trip":
                for _ in range(count):
                    value = recv()
                    send(value)
            else:
                recv()
                start = time.perf_counter()
                for _ in range(count):
                    value = recv()
                spent = time.perf_counter() - start
                _compare(value, expected)
                pipe.send(spent)
            del value


def _open(
    name: str, ways: Any, nbytes: int, in_flight: int, out: int, back: int, closers: list[Callable[[], object]]
) -> tuple[Send, Receive]:
    """The functions by which this process sends a tensor (or the array over it) and receives one."""
    if name == OURS:
        subscriber = Subscriber(ways[back])
        closers.append(subscriber.close)
        publisher = Publisher(ways[out], slots=in_flight, slot_bytes=nbytes)
        closers.append(publisher.close)
        return publisher.send, lambda: subscriber.recv(timeout=_PATIENCE).value
    put, get = ways[out].put, ways[back].get

    def receive() -> Any:
        try:
            return get(timeout=_PATIENCE)
        except queue.Empty:
            raise BenchError(f"{name}: nothing came for {_PATIENCE:g} s") from None

    if name == QUEUE:
        import torch

        def send(tensor: Any) -> None:
            put(tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor)

        return send, receive
    return lambda tensor: put(tensor.clone()), receive  # without the clone it would be shared once, and never copied


def _payload(nbytes: int) -> Any:
    import torch

    try:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    except (MemoryError, OverflowError, RuntimeError, TypeError):  # of what is more than an int64, too
        raise BenchError(
            f"there is no memory for a tensor of {format_bytes(nbytes)}: choose a smaller --size"
        ) from None


def _compare(value: Any, payload: Any) -> None:
    import torch

    if not torch.equal(torch.as_tensor(value), payload):
        raise BenchError("the tensor that arrived has other bytes than the one that was sent")


def _receive(pipe: Connection) -> Any:
    """Receive from the other process."""
    if not pipe.poll(_PATIENCE):
        raise BenchError(f"the other process has said nothing for {_PATIENCE:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise BenchError("the other process has ended: its error is above") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], object]]:
    """A bar on stderr, if that is a terminal; drawn between measurements only."""
    err = console(stderr=True)
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def show(text: str, done: int) -> None:
            bar.update(task, description=text, completed=done)
            bar.refresh()

        yield show
