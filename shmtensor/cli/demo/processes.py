"""The child processes of a demo, and the parent's side: start them by spawn, watch them, and end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from ...channel import cleanup
from ...channel.names import socket_dir
from ...errors import ShmTensorError
from .frames import InputError, load
from .transports import TRANSPORTS, Queues, Transport

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
