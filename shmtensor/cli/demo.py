"""`shmtensor demo`: send the same frames to the same readers over each transport, and compare the results.

- Frames: images that ship with scikit-image, or the user's own files. Nothing is downloaded.
- Transports: three ways to send the same tensors to several processes: this library, and the two standard queues.
  Readers get torch tensors; they use each and drop it before they ask for the next one.
- Processes: the children, and the parent's side: start them by spawn, watch them, and end them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shmtensor

from ..channel import cleanup
from ..channel.names import socket_dir
from ..codec.libraries import import_torch
from ..errors import ShmTensorError
from ..memory.segment import free_bytes, where
from ..options import format_bytes, how_to_install
from .output import AsJson, console, fail, guarded, print_json

_SAMPLES: Final = (
    "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "ihc.png", "camera.png",
    "motorcycle_left.png", "motorcycle_right.png",
)  # fmt: skip
_IMAGES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
SUFFIXES: Final = (*_IMAGES, ".npy", ".pt", ".safetensors")
_MOST_BYTES: Final = 512 << 20

Frame = tuple[str, Any]
"""(name, dense CPU tensor with at least one element)"""


class InputError(Exception):
    """There are no frames; the text says what to do."""


def paths(source: str | None) -> list[Path]:
    """The files that the frames come from; `InputError` if there are none."""
    if source is None:
        spec = importlib.util.find_spec("skimage")
        if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("PIL") is None:
            raise InputError(
                f"the demo streams scikit-image's sample images, and it is not installed: {how_to_install('demo')}, "
                "or pass --input with a file or a directory of images, .npy, .pt or .safetensors"
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / "data"
        found = [folder / name for name in _SAMPLES if (folder / name).is_file()]
        if not found:
            raise InputError(f"this scikit-image ships none of {', '.join(_SAMPLES)} in {folder}: pass --input")
        return found
    path = Path(source)
    if not path.exists():
        raise InputError(f"--input {source}: there is no such file or directory")
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"--input {source}: expected a file of {', '.join(SUFFIXES)}")
        return [path]
    found = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
    if not found:
        raise InputError(f"--input {source}: no file of {', '.join(SUFFIXES)} lies in this directory")
    return found


def load(source: str | None) -> list[Frame]:
    """Every frame, up to 512 MiB of them."""
    frames: list[Frame] = []
    total = 0
    for path in paths(source):
        try:
            for name, tensor in _read(path):
                if total and total + tensor.nbytes > _MOST_BYTES:
                    return frames
                if tensor.numel():
                    frames.append((name, tensor))
                    total += tensor.nbytes
        except Exception as error:
            raise InputError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    if not frames:
        raise InputError(f"{source}: its files hold no dense tensor with an element in it")
    return frames


def _read(path: Path) -> Iterator[Frame]:
    import torch

    suffix = path.suffix.lower()
    if suffix in _IMAGES:
        yield path.name, _image(path)
    elif suffix == ".npy":
        import numpy as np

        array = np.load(path, allow_pickle=False)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        batch = array if array.ndim == 4 and array.shape[-1] in (1, 3, 4) else [array]
        for number, item in enumerate(batch):
            yield f"{path.name}[{number}]", torch.from_numpy(np.array(item, order="C"))
    elif suffix == ".safetensors":
        if importlib.util.find_spec("safetensors") is None:
            raise InputError("pip install safetensors")
        from safetensors.torch import load_file

        for key, tensor in load_file(path).items():
            yield f"{path.name}:{key}", tensor.contiguous()
    else:
        yield from _tensors(path.name, torch.load(path, map_location="cpu", weights_only=True))


def _image(path: Path) -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise InputError("pip install pillow")
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image if image.mode in ("L", "RGB") else image.convert("RGB")))


def _tensors(name: str, value: Any) -> Iterator[Frame]:
    """The dense tensors in a .pt file."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            yield name, value.detach().resolve_conj().resolve_neg().contiguous()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}:{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(f"{name}[{number}]", item)


Meta = dict[str, Any]
Send = Callable[[Any, Meta], None]
Frames = Iterator[tuple[Any, Meta]]
Queues = tuple[Any, ...]
"""A `multiprocessing.Queue` for each reader, made by the main process and inherited by the others."""

_PATIENCE: Final = 60.0


class Transport(Protocol):
    """One transport, for one round. The `meta` of a message has the time at which it was sent as `"t"`."""

    def sender(self, readers: int) -> AbstractContextManager[Send]:
        """The sender's end, which sends to every reader. Leaving it ends their streams."""

    def reader(self, index: int) -> AbstractContextManager[Frames]:
        """A reader's end."""


class ShmTransport:
    """`Publisher` and `Subscriber`."""

    def __init__(self, channel: str, slots: int, queues: Queues) -> None:
        self._channel, self._slots = channel, slots

    @contextmanager
    def sender(self, readers: int) -> Iterator[Send]:
        with shmtensor.Publisher(self._channel, slots=self._slots) as pub:
            pub.wait_for_subscribers(readers, timeout=_PATIENCE)

            def send(frame: Any, meta: Meta) -> None:
                pub.send(frame, stamped(meta), timeout=_PATIENCE)

            yield send

    @contextmanager
    def reader(self, index: int) -> Iterator[Frames]:
        with shmtensor.Subscriber(self._channel) as sub:
            yield _frames(sub)


def _frames(sub: shmtensor.Subscriber) -> Frames:
    for msg in sub:
        yield msg.value, msg.meta
        msg.release()  # before waiting for the next one


class QueueTransport:
    """`multiprocessing.Queue`, one for each reader: a NumPy array is pickled into each."""

    def __init__(self, channel: str, slots: int, queues: Queues) -> None:
        self._queues = queues

    def pack(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        """The object to put for a tensor."""
        import torch

        try:
            return frame.numpy(), meta
        except TypeError:  # bfloat16 and other types that NumPy does not have
            meta = {**meta, "dtype": str(frame.dtype).removeprefix("torch."), "shape": tuple(frame.shape)}
            return frame.reshape(-1).view(torch.uint8).numpy(), meta

    def unpack(self, value: Any, meta: Meta) -> Any:
        """The tensor of an object that was got."""
        import torch

        tensor = torch.from_numpy(value)
        return tensor.view(getattr(torch, meta["dtype"])).reshape(meta["shape"]) if "dtype" in meta else tensor

    @contextmanager
    def sender(self, readers: int) -> Iterator[Send]:
        def send(frame: Any, meta: Meta) -> None:
            value, packed = self.pack(frame, stamped(meta))
            for queue in self._queues:
                queue.put((value, packed), timeout=_PATIENCE)

        yield send
        for queue in self._queues:
            queue.put(None, timeout=_PATIENCE)

    @contextmanager
    def reader(self, index: int) -> Iterator[Frames]:
        yield self._frames(self._queues[index])

    def _frames(self, queue: Any) -> Frames:
        while (item := queue.get()) is not None:
            value, meta = item
            del item
            yield self.unpack(value, meta), meta
            del value


class TorchTransport(QueueTransport):
    """`torch.multiprocessing.Queue`: the tensor is copied into shared memory once, each queue carries its handle."""

    def pack(self, frame: Any, meta: Meta) -> tuple[Any, Meta]:
        import torch

        storage = torch.UntypedStorage._new_shared(frame.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=frame.dtype).set_(storage, 0, frame.shape, frame.stride()).copy_(frame), meta

    def unpack(self, value: Any, meta: Meta) -> Any:
        return value


def stamped(meta: Meta) -> Meta:
    """The meta with the time of sending in it."""
    return {**meta, "t": time.monotonic_ns()}


TRANSPORTS: Final[dict[str, Callable[[str, int, Queues], Transport]]] = {
    "shmtensor": ShmTransport,
    "multiprocessing.Queue": QueueTransport,
    "torch.multiprocessing.Queue": TorchTransport,
}
"""By name; the others are compared with the first."""


CORRUPT: Final = "SHMTENSOR_DEMO_CORRUPT"
"""Environment variable for the tests: if set, a reader gets its third checksum wrong."""

_GRACE = 3.0
_LEAST_FRAMES = 5
"""Frames of a timed round, however short it is."""

Report = dict[str, Any]
Play = Callable[[Transport, "Round"], Report]


@dataclass(frozen=True)
class Plan:
    """The options of a run, for all processes."""

    run: str
    """First part of every channel name."""
    readers: int
    source: str | None
    """Path of the user's files; None: the images that ship with scikit-image."""
    slots: int
    """Messages that may be in flight to each reader: slots of a ring, `maxsize` of a queue."""


@dataclass(frozen=True)
class Round:
    """One round of one transport."""

    number: int
    transport: str
    seconds: float | None
    """How long to send; None: every frame once, and readers check every byte."""


class ProcessError(Exception):
    """A child process failed or died."""


class Processes:
    """The sender and the readers (`"reader 0"`), each with a pipe. Leaving the `with` block ends them all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._context = multiprocessing.get_context("spawn")
        self._queues: Queues = tuple(self._context.Queue(plan.slots) for _ in range(plan.readers))
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection[Any, Any]] = {}

    def __enter__(self) -> Processes:
        try:
            with _no_interrupts():  # inherited: only the main process handles Ctrl-C
                self._start("sender", None)
                for index in range(self.plan.readers):
                    self._start(f"reader {index}", index)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self, name: str, index: int | None) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self.plan, index, self._queues), name=name, daemon=True
        )
        process.start()
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def order(self, order: Round) -> None:
        """Tell every process to run a round."""
        for name, pipe in self._pipes.items():
            try:
                pipe.send(order)
            except OSError:
                raise ProcessError(self._died(name)) from None

    def gather(self, patience: float) -> dict[str, Report]:
        """Wait for one report of every process, by name. Raises as soon as one has failed or died."""
        deadline, reports = time.monotonic() + patience, dict[str, Report]()
        while len(reports) < len(self._processes):
            if time.monotonic() > deadline:
                missing = ", ".join(name for name in self._processes if name not in reports)
                raise ProcessError(f"no answer within {patience:g} s: {missing}")
            reports.update(self._reports(0.2))
        return reports

    def _reports(self, seconds: float) -> dict[str, Report]:
        sentinels = {process.sentinel: name for name, process in self._processes.items()}
        names = {id(pipe): name for name, pipe in self._pipes.items()}
        reports = {}
        ready = wait([*self._pipes.values(), *sentinels], seconds)
        for pipe in ready:
            if isinstance(pipe, Connection):
                name = names[id(pipe)]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    raise ProcessError(self._died(name)) from None
                if kind == "input":
                    raise InputError(value)
                if kind == "error":
                    raise ProcessError(f"{name} (pid {self._processes[name].pid}) failed: {value}")
                reports[name] = value
        for sentinel in ready:
            if isinstance(sentinel, int) and sentinels[sentinel] not in reports:
                raise ProcessError(self._died(sentinels[sentinel]))
        return reports

    def _died(self, name: str) -> str:
        process = self._processes[name]
        process.join(1)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return f"{name} (pid {process.pid}) {how} in the middle of the work"

    def _stop(self) -> None:
        with _no_interrupts():
            for process in self._processes.values():
                process.terminate()
            deadline = time.monotonic() + _GRACE
            for process in self._processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in self._pipes.values():
                pipe.close()
            for queue in self._queues:
                queue.cancel_join_thread()
                queue.close()
            with contextlib.suppress(OSError, ShmTensorError):
                directory = socket_dir()
                for channel in cleanup.channels():
                    if channel.startswith(f"{self.plan.run}-"):
                        cleanup.sweep_channel(channel, directory, patience=1.0)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in a child process


def serve(pipe: Connection[Any, Any], plan: Plan, index: int | None, queues: Queues) -> None:
    """Run rounds, as the sender or as reader `index`. Ends by SIGTERM, or with its parent."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_follow_parent, daemon=True).start()
    for queue in queues:
        queue.cancel_join_thread()  # at the end of this process no reader is left for what is in a queue
    try:
        import torch

        torch.set_num_threads(1)
        play, about = _make_sender(plan) if index is None else _make_reader(index)
        pipe.send(("report", about))
        while True:
            order = pipe.recv()
            transport = TRANSPORTS[order.transport](f"{plan.run}-{order.number}", plan.slots, queues)
            pipe.send(("report", play(transport, order)))
    except InputError as error:
        pipe.send(("input", str(error)))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what runs at the interpreter's end would print its SystemExit


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)  # the exception was raised where Python swallows it, in a destructor; the next user sweeps


def checksum(tensor: Any) -> int:
    """CRC-32 of a dense tensor's bytes."""
    import torch

    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def _make_sender(plan: Plan) -> tuple[Play, Report]:
    """Load the frames; a round sends each once, with its checksum, or one after the other until the time is up."""
    frames = load(plan.source)
    sums = [checksum(tensor) for _, tensor in frames]
    about = {"frames": [name for name, _ in frames], "bytes": [tensor.nbytes for _, tensor in frames]}

    def play(transport: Transport, order: Round) -> Report:
        sent = nbytes = 0
        with transport.sender(plan.readers) as send:
            begun = time.monotonic_ns()
            deadline = begun + int((order.seconds or 0) * 1e9)
            least = len(frames) if order.seconds is None else _LEAST_FRAMES
            while sent < least or time.monotonic_ns() < deadline:
                at = sent % len(frames)
                send(frames[at][1], {"i": sent, "crc": sums[at]})
                sent, nbytes = sent + 1, nbytes + frames[at][1].nbytes
        return {"sent": sent, "bytes": nbytes, "begun_ns": begun}

    return play, about


def _make_reader(index: int) -> tuple[Play, Report]:
    """Receive every frame. An untimed round compares the bytes with the checksum of the message; a timed one reads the
    last element, to use the tensor."""
    import torch

    wrong_at = 2 if os.environ.get(CORRUPT) else -1

    def play(transport: Transport, order: Round) -> Report:
        received = nbytes = 0
        wrong: list[int] = []
        latencies: list[int] = []
        with transport.reader(index) as frames:
            for frame, meta in frames:
                latencies.append(time.monotonic_ns() - meta["t"])
                good = meta["i"] == received  # once, and in order
                if order.seconds is None:
                    good = good and checksum(frame) == meta["crc"] and received != wrong_at
                else:
                    frame.reshape(-1)[-1:].view(torch.uint8).tolist()
                if not good:
                    wrong.append(meta["i"])
                received, nbytes = received + 1, nbytes + frame.nbytes
                del frame
            ended = time.monotonic_ns()
        return {"received": received, "bytes": nbytes, "wrong": wrong, "latencies": latencies, "ended_ns": ended}

    return play, {}


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
        float, typer.Option(min=0.1, max=3600, help="Seconds for the timed rounds of all transports together.")
    ] = 6.0,
    readers: Annotated[int, typer.Option(min=1, max=64, help="Processes that receive every frame.")] = 2,
    as_json: AsJson = False,
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
                f"{format_bytes(plan.slots * largest)} of {where()} and {format_bytes(free_bytes())} are free: pass "
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
    """Frames per second of shmtensor, divided by those of each other transport."""
    ours, *others = results
    return {other.name: ours.frames_per_second / other.frames_per_second for other in others}


def _show(out: Console, results: list[Result]) -> None:
    ours, times = results[0].name, speedups(results)
    faster = " and ".join(f"{factor:.1f} x as fast as {name}" for name, factor in times.items())
    out.print(f"[bold]{ours} is {faster}[/]", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(("transport", "frames/s", "GB/s", "p50", "p99", f"{ours} is")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for result in results:
        table.add_row(
            result.name, f"{result.frames_per_second:.0f}", f"{result.gigabytes_per_second:.2f}",
            *(f"{result.latency_ms(percent):.2f} ms" for percent in (50, 99)),
            f"{times[result.name]:.1f} x as fast" if result.name in times else "",
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
