"""What the child processes do in a round: send frames, run the model on them, check every byte of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from .frames import load
from .plan import CORRUPT, Lines, Plan
from .transports import Transport, make_transport

Report = dict[str, Any]
Round = Callable[[Transport, float], Report]

_AT_LEAST = 5
"""Frames of a round, however short it is."""


def make_producer(plan: Plan, index: int) -> tuple[Round, Report]:
    """Loads the frames; sends them in turn until the time is up."""
    from .model import checksum

    frames = load(plan.source)
    sums = [checksum(tensor) for _, tensor in frames]
    about = {"frames": [name for name, _ in frames], "bytes": [tensor.nbytes for _, tensor in frames]}

    def play(transport: Transport, seconds: float) -> Report:
        sent = nbytes = 0
        with transport.producer() as send:
            start = time.monotonic_ns()
            deadline = start + int(seconds * 1e9)
            while sent < _AT_LEAST or time.monotonic_ns() < deadline:
                _, frame = frames[sent % len(frames)]
                send(frame, {"i": sent, "crc": sums[sent % len(frames)]})
                sent, nbytes = sent + 1, nbytes + frame.nbytes
        return {"sent": sent, "bytes": nbytes, "first_ns": start}

    return play, about


class Check:
    """Counts what arrives, checks each byte of it against the checksum that came along, and takes the time."""

    def __init__(self, role: str) -> None:
        self.wrong_at = 2 if os.environ.get(CORRUPT) == role else -1
        self.messages = self.nbytes = self.verified = self.last_ns = 0
        self.latencies: list[int] = []
        self.seen: set[int] = set()
        self.damaged: list[int] = []

    def arrived(self, meta: dict[str, Any]) -> None:
        """Right after a message was received."""
        self.latencies.append(time.monotonic_ns() - meta["t"])

    def look(self, tensor: Any, meta: dict[str, Any]) -> None:
        """Read every byte."""
        from .model import checksum

        crc = checksum(tensor)
        if self.messages == self.wrong_at:
            crc ^= 1
        if crc == meta["crc"] and meta["i"] not in self.seen:
            self.verified += tensor.nbytes
        else:
            self.damaged.append(meta["i"])
        self.seen.add(meta["i"])
        self.messages += 1
        self.nbytes += tensor.nbytes
        self.last_ns = time.monotonic_ns()

    def report(self) -> Report:
        return {
            "messages": self.messages, "bytes": self.nbytes, "verified": self.verified, "latencies": self.latencies,
            "damaged": self.damaged, "last_ns": self.last_ns,
        }  # fmt: skip


def make_worker(plan: Plan, index: int) -> tuple[Round, Report]:
    """Runs the model on the frames it gets off the work queue and sends the results back."""
    import torch

    from .model import as_image, checksum, make_model

    model = make_model()
    with torch.inference_mode():
        model(torch.zeros(1, 3, 96, 96))

    def play(transport: Transport, seconds: float) -> Report:
        check = Check("worker")
        with transport.worker() as (jobs, send), torch.no_grad():
            for frame, meta in jobs:
                check.arrived(meta)
                check.look(frame, meta)
                result = model(as_image(frame))[0]
                del frame
                send(result, {"i": meta["i"], "crc": checksum(result)})
        return check.report()

    return play, {}


def make_subscriber(plan: Plan, index: int) -> tuple[Round, Report]:
    """Gets every frame and checks every byte."""

    def play(transport: Transport, seconds: float) -> Report:
        check = Check("subscriber")
        with transport.subscriber(index) as frames:
            for frame, meta in frames:
                check.arrived(meta)
                check.look(frame, meta)
                del frame
        return check.report()

    return play, {}


ROLES: dict[str, Callable[[Plan, int], tuple[Round, Report]]] = {
    "producer": make_producer,
    "worker": make_worker,
    "subscriber": make_subscriber,
}


def play_round(play: Round, plan: Plan, lines: Lines, name: str, number: int, seconds: float) -> Report:
    """One round in a child process."""
    return play(make_transport(name, plan, number, lines), seconds)
