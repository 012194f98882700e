"""Where each microsecond of one message goes: `python -m benchmarks.steps`, a table for the benchmark notes.

Awake, in one process: a 1 KiB tensor is sent and received by turns, first by the compiled module, then by the Python
code with a clock around each step (less what the clock itself takes). Asleep, in two processes: when each side passes
which point of a round trip, counted from the first `send`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import typer

from .processes import fresh_name

ROUNDS = 4000
TRIPS = 300
PAUSE = 300e-6

app = typer.Typer(add_completion=False)
_now = time.perf_counter_ns


class Clock:
    """Time spent in functions that are wrapped, each without those that it calls and that are wrapped too."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {}
        self._inner: list[int] = [0]
        empty = self.wrap("clock", lambda: None)
        for _ in range(ROUNDS):
            empty()
        self.cost = statistics.median(self.times.pop("clock"))

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        times = self.times.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            start = _now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = _now() - start
                times.append(spent - self._inner.pop())
                self._inner[-1] += spent

        return timed

    def report(self) -> None:
        for name, times in self.times.items():
            typer.echo(f"  {name:44} {max(0.0, statistics.median(times) - self.cost) / 1e3:6.2f}")


def _pair() -> tuple[Any, Any, Any]:
    import torch

    import shmtensor

    torch.set_num_threads(1)
    name = fresh_name()
    return shmtensor.Publisher(name, slots=16), shmtensor.Subscriber(name), torch.randn(16, 16)


def _whole(pub: Any, sub: Any, tensor: Any) -> tuple[float, float, float]:
    """Medians of send, recv and release, nanoseconds, each of ten in a row."""
    times: list[list[float]] = [[], [], []]
    for _ in range(ROUNDS // 10):
        start = _now()
        for _ in range(10):
            pub.send(tensor)
        sent = _now()
        kept = [sub.recv() for _ in range(10)]
        received = _now()
        kept.clear()
        for step, spent in enumerate((sent - start, received - sent, _now() - received)):
            times[step].append(spent / 10)
    send, recv, release = map(statistics.median, times)
    return send, recv, release


@app.command()
def awake() -> None:
    """send, recv and release in one process; with SHMTENSOR_PURE=1 the steps of the Python code too."""
    from shmtensor import native
    from shmtensor.codec.encode import Encoded, encode
    from shmtensor.endpoints import pubsub
    from shmtensor.endpoints.recipients import Subscribers
    from shmtensor.ring.pool import Pool
    from shmtensor.ring.reference import BroadcastReader

    pub, sub, tensor = _pair()
    with pub, sub:
        for _ in range(100):
            pub.send(tensor)
            sub.recv()
        code = "Python code" if native.module is None else "compiled"
        for step, spent in zip(("send", "recv", "release"), _whole(pub, sub, tensor), strict=True):
            typer.echo(f"  {f'{step}, {code}':44} {spent / 1e3:6.2f}")
        if native.module is not None:
            return
        clock = Clock()
        pubsub.Publisher._describe = staticmethod(clock.wrap("send: describe the tensor", encode))
        Encoded.write = clock.wrap("send: copy 1 KiB", Encoded.write)
        for owner, name, step in (
            (Pool, "find", "send: acquire a slot"),
            (pubsub.Publisher, "_publish", "send: record, publish"),
            (Subscribers, "wake", "send: look for sleepers"),
            (BroadcastReader, "next", "recv: look for a message"),
            (BroadcastReader, "locate", "recv: read and check the record"),
            (BroadcastReader, "take", "recv: take the lease"),
            (pubsub.Subscriber, "_take", "recv: message object, and between the steps"),
            (BroadcastReader, "_ended", "release: give the slot back"),
        ):
            setattr(owner, name, clock.wrap(step, getattr(owner, name)))
        send = clock.wrap("send: mutex, and between the steps", pub.send)
        recv = clock.wrap("recv: mutex, poll", sub.recv)
        for _ in range(ROUNDS):
            send(tensor)
            recv()
        clock.report()


def _messages() -> dict[str, tuple[Any, Any]]:
    """What people send: value and meta."""
    import numpy as np
    import torch

    tensor, step = torch.randn(256), np.random.default_rng(0).standard_normal(64).astype("f4")
    info = {"terminated": False, "truncated": False, "info": {"episode": 3, "lives": 2}}
    return {
        "tensor": (tensor, None),
        "tensor and meta": (tensor, {"ts": 1.5, "id": 7}),
        "array": (np.arange(128.0), None),
        "tensor and id": ({"image": tensor, "id": 7}, None),
        "dict of 4 tensors": ({name: torch.randn(64) for name in "abcd"}, None),
        "gymnasium step": ({"obs": step, "reward": np.float64(1), **info}, None),
        "nested, 3 tensors": ({"a": [torch.randn(64), {"b": torch.randn(32)}], "c": ({"d": torch.randn(16)}, 3)}, None),
        "bfloat16, scalars, request id": ({"kv": tensor.bfloat16(), "layer": 3, "pos": 17}, {"req": "r-123"}),
        "bytes and meta": ({"jpeg": bytes(1000)}, {"ts": 1.5}),
        "weight and a view of it, array of it": ({"w": tensor, "part": tensor[8:], "array": tensor.numpy()}, None),
        "300 tensors": ({f"layer.{number}": torch.randn(16) for number in range(300)}, None),
    }


@app.command()
def codec() -> None:
    """encode, write and decode of realistic messages in one process: reference, compiled, and compiled as with
    a torch that lacks the DLPack exchange interface; medians."""
    import numpy as np

    from shmtensor.codec import decode, encode, implementation

    other = implementation.Compiled(exchange=False).codec
    ways = {
        "reference": (encode.encode, decode.decode),
        "compiled": (implementation.encode, implementation.decode),
        "by methods": (other.encode, other.decode),
    }
    room = memoryview(bytearray(1 << 20))
    for name, (value, meta) in _messages().items():
        spent = []
        for way, (to_bytes, to_value) in ways.items():

            def once(to_bytes: Any = to_bytes, to_value: Any = to_value) -> None:
                encoded = to_bytes(value, meta)  # noqa: B023
                encoded.write(room, 0)
                to_value(encoded.description, np.ndarray((encoded.nbytes,), np.uint8, room), readonly=True)

            rounds = []
            for _ in range(ROUNDS // (100 if way == "reference" else 10)):
                start = _now()
                for _ in range(10):
                    once()
                rounds.append((_now() - start) / 10)
            spent.append(statistics.median(rounds))
        typer.echo(f"  {name:44}" + "".join(f" {each / 1e3:8.2f}" for each in spent))


@app.command()
def asleep() -> None:
    """A round trip with both sides asleep: medians of when each side passes each point."""
    import torch

    import shmtensor
    from shmtensor.channel import wakeup

    torch.set_num_threads(1)
    events: list[tuple[str, int]] = []

    def mark(what: str) -> None:
        events.append((what, time.monotonic_ns()))

    def around(owner: Any, name: str, before: str | None, after: str) -> None:
        function = getattr(owner, name)

        def marked(*args: Any) -> Any:
            if before:
                mark(before)
            result = function(*args)
            mark(after)
            return result

        setattr(owner, name, marked)

    around(wakeup.Inbox, "wait", None, "woken")
    around(wakeup.Doorbells, "notify", "about to notify", "notified")
    there, back, tensor = fresh_name(), fresh_name(), torch.randn(16, 16)
    reader, writer = os.pipe()
    child = os.fork()
    me = "B" if child == 0 else "A"
    with (
        shmtensor.Publisher(there if child else back) as pub,
        shmtensor.Subscriber(back if child else there, spin=0.0) as sub,
    ):
        pub.wait_for_subscribers(1, timeout=60)
        for _ in range(TRIPS):
            if child:
                time.sleep(PAUSE)
                mark("send")
                pub.send(tensor)
                sub.recv().release()
                mark("received")
            else:
                msg = sub.recv()
                mark("received")
                pub.send(msg.value)
                del msg
    lines = "".join(f"{me} {what}\t{when}\n" for what, when in events)
    if not child:
        os.write(writer, lines.encode()) if len(lines) < 60_000 else os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        lines += file.read()
    os.waitpid(child, 0)
    merged = sorted((int(when), what) for what, when in (line.split("\t") for line in lines.splitlines()))
    starts = [index for index, (_, what) in enumerate(merged) if what == "A send"]
    points: dict[str, list[float]] = {}
    for first, last in itertools.pairwise(starts[50:]):
        seen: dict[str, float] = {}
        for when, what in merged[first:last]:
            seen.setdefault(what, (when - merged[first][0]) / 1e3)
        for what, spent in seen.items():
            points.setdefault(what, []).append(spent)
    for what, times in sorted(points.items(), key=lambda item: statistics.median(item[1])):
        typer.echo(f"  {what:44} {statistics.median(times):6.1f}")


@app.command(name="all")
def everything() -> None:
    """Both, awake by the compiled module and by the Python code."""
    for title, command, pure in (
        ("awake, µs", "awake", ""),
        ("awake, Python code, µs", "awake", "1"),
        ("asleep, µs since A's send", "asleep", ""),
    ):
        typer.echo(title)
        environment = {**os.environ, "SHMTENSOR_PURE": pure}
        subprocess.run([sys.executable, "-m", __spec__.name, command], env=environment, check=True, timeout=300)


if __name__ == "__main__":
    app()
