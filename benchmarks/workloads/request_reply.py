"""Requests and replies: the trip of one, servers that are kept busy, batches for a small model."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from multiprocessing.managers import BaseManager
from typing import Any

from .. import payloads
from ..measure import RowSpec, Samples, summarize
from ..processes import CONTEXT, Role, fresh_name, run_roles
from ..sizes import KIB
from ..transports import PICKLE, SHMTENSOR, ZMQ
from . import round_trip
from .base import Case, Effort, Workload

WARM = 20
SPIN = 1.0
CLIENTS, SERVERS, SLEEP = 4, 2, 1e-3
BATCH, IMAGE = 32, (3, 32, 32)

_TRIP = "request, 1 KiB"
_BARE = "bare fan-out round trip, 1 KiB"
_ROUTER = "pyzmq ROUTER/DEALER + torch.save, 1 KiB"
_MANAGER = "multiprocessing manager, 1 KiB"
_BUSY = f"{CLIENTS} clients, {SERVERS} servers, 1 ms"
_BATCHED = "batched server, small convolution"
_LOOP = "loop that batches in one process"


# --- one trip


def _times(effort: Effort, trip: Callable[[], Any]) -> list[float]:
    clock = time.perf_counter

    def run(count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = clock()
            value = trip()  # and the value before it dies here
            times.append(clock() - start)
        del value
        return times

    return run(effort.count(summarize(run(WARM)).median))


def measure_trip(effort: Effort) -> Samples:
    """Seconds of `request`, both sides awake."""
    name = fresh_name()
    return {"trip": run_roles([Role(_ask, (name, effort)), Role(_echo, (name,))])[0]}


def _echo(meet: Callable[[], object], name: str) -> None:
    import shmtensor

    with shmtensor.Server(name, spin=SPIN) as server:
        meet()
        for request in server:
            if request.meta:
                request.reply(None)
                break
            request.reply(request.value)
        meet()


def _ask(meet: Callable[[], object], name: str, effort: Effort) -> list[float]:
    import shmtensor

    payload = payloads.make("torch", KIB)
    with shmtensor.Client(name, spin=SPIN) as client:
        meet()
        times = _times(effort, lambda: client.request(payload, timeout=60.0))
        payloads.check("torch", client.request(payload, timeout=60.0), payload)
        client.request(None, {"end": True}, timeout=60.0)
        meet()
    return times


def measure_bare(effort: Effort) -> Samples:
    """The same tensor through two bare channels, by the workload `round-trip`."""
    return {"trip": round_trip.measure(SHMTENSOR, effort, nbytes=KIB)["round trip"]}


def measure_router(effort: Effort) -> Samples:
    """What people write by hand: a ROUTER that answers, `torch.save` both ways."""
    address = f"ipc://@{fresh_name()}"
    return {"trip": run_roles([Role(_router_ask, (address, effort)), Role(_router_echo, (address,))])[0]}


def _router_echo(meet: Callable[[], object], address: str) -> None:
    import torch
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    meet()
    while True:
        client, data = socket.recv_multipart()
        if not data:
            break
        answer = io.BytesIO()
        torch.save(torch.load(io.BytesIO(data)), answer)
        socket.send_multipart([client, answer.getbuffer()])
    context.destroy(linger=0)


def _router_ask(meet: Callable[[], object], address: str, effort: Effort) -> list[float]:
    import torch
    import zmq

    payload = payloads.make("torch", KIB)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    meet()
    socket.connect(address)

    def trip() -> Any:
        data = io.BytesIO()
        torch.save(payload, data)
        socket.send(data.getbuffer())
        return torch.load(io.BytesIO(socket.recv()))

    times = _times(effort, trip)
    payloads.check("torch", trip(), payload)
    socket.send(b"")
    context.destroy(linger=1000)
    return times


class _Echo:
    def echo(self, value: Any) -> Any:
        return value


class _Manager(BaseManager):
    pass


_Manager.register("Echo", _Echo)


def measure_manager(effort: Effort) -> Samples:
    """A method of an object in a manager's process."""
    return {"trip": run_roles([Role(_manager_ask, (effort,))])[0]}


def _manager_ask(meet: Callable[[], object], effort: Effort) -> list[float]:
    payload = payloads.make("torch", KIB)
    manager = _Manager(ctx=CONTEXT)
    manager.start()
    try:
        remote = manager.Echo()  # type: ignore[attr-defined]
        times = _times(effort, lambda: remote.echo(payload))
        payloads.check("torch", remote.echo(payload), payload)
    finally:
        manager.shutdown()
    return times


# --- servers that are kept busy


def measure_busy(effort: Effort) -> Samples:
    """The share of the servers' time, from the first request to the last reply, that their handlers explain."""
    name, count = fresh_name(), max(5, int(effort.seconds * 1000))
    over = CONTEXT.Semaphore(0)
    results = run_roles(
        [
            *(Role(_client, (name, count, over)) for _ in range(CLIENTS)),
            *(Role(_server, (name, over)) for _ in range(SERVERS)),
        ]
    )
    asked, served = results[:CLIENTS], results[CLIENTS:]
    if sum(handled for handled, _ in served) != CLIENTS * (count + 1):
        raise ValueError(f"{CLIENTS * (count + 1)} requests were sent, {sum(handled for handled, _ in served)} handled")
    wall = max(end for _, end in asked) - min(start for start, _ in asked)
    busy = sum(seconds for _, seconds in served)
    return {"efficiency": [100 * busy / SERVERS / wall], "rate": [CLIENTS * count / wall]}


def _client(meet: Callable[[], object], name: str, count: int, over: Any) -> tuple[float, float]:
    import shmtensor

    payload = payloads.make("torch", KIB)
    with shmtensor.Client(name) as client:
        meet()
        client.request(payload, timeout=60.0)
        meet()
        start = time.perf_counter()
        for _ in range(count):
            client.request(payload, timeout=60.0)
        end = time.perf_counter()
        over.release()
        meet()
    return start, end


def _server(meet: Callable[[], object], name: str, over: Any) -> tuple[int, float]:
    import shmtensor

    handled, seconds = 0, 0.0
    with shmtensor.Server(name) as server:
        meet()
        handled += _serve(server, CLIENTS, 0.5)[0]
        meet()
        while True:
            more, busy = _serve(server, None, 0.05)
            handled, seconds = handled + more, seconds + busy
            if over.get_value() >= CLIENTS:
                break
        meet()
    return handled, seconds


def _serve(server: Any, most: int | None, patience: float) -> tuple[int, float]:
    import shmtensor

    handled, seconds = 0, 0.0
    while most is None or handled < most:
        try:
            request = server.recv(timeout=patience)
        except shmtensor.TimedOut:
            break
        start = time.perf_counter()
        time.sleep(SLEEP)
        seconds += time.perf_counter() - start
        request.reply(request.value)
        handled += 1
    return handled, seconds


# --- batches


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10),
    ).eval()  # fmt: skip


def _images(count: int) -> Any:
    import torch

    torch.manual_seed(1)
    return list(torch.rand(count, *IMAGE))


def _image_count(effort: Effort) -> int:
    return BATCH * max(3, int(effort.seconds * 200))


def measure_loop(effort: Effort) -> Samples:
    """Images per second of a loop that stacks and calls the model."""
    return {"rate": run_roles([Role(_loop, (_image_count(effort),))])[0]}


def _loop(meet: Callable[[], object], count: int) -> list[float]:
    import torch

    model, images = _model(), _images(count)
    with torch.inference_mode():
        model(torch.stack(images[:BATCH]))
        start = time.perf_counter()
        for first in range(0, count, BATCH):
            model(torch.stack(images[first : first + BATCH])).unbind(0)
        return [count / (time.perf_counter() - start)]


def measure_batched(effort: Effort) -> Samples:
    """Images per second of one client that keeps a batching server supplied."""
    name = fresh_name()
    return {"rate": run_roles([Role(_supply, (name, _image_count(effort))), Role(_batches, (name,))])[0]}


def _supply(meet: Callable[[], object], name: str, count: int) -> list[float]:
    import shmtensor

    images, window = _images(count), 3 * BATCH
    with shmtensor.Client(name, slots=window) as client:
        meet()
        for _ in client.map(images[:BATCH], timeout=60.0):
            pass
        start = time.perf_counter()
        for _ in client.map(images, timeout=60.0):
            pass
        rate = count / (time.perf_counter() - start)
        client.request({"end": True}, timeout=60.0)
        meet()
    return [rate]


def _batches(meet: Callable[[], object], name: str) -> None:
    import torch

    import shmtensor

    model = _model()
    with shmtensor.Server(name, max_batch=BATCH, slots=4 * BATCH) as server, torch.inference_mode():
        meet()
        for batch in server:
            if isinstance(batch.value, dict):
                batch.reply(None)
                break
            batch.reply(model(batch.value))
        meet()


WORKLOAD = Workload(
    name="request-reply",
    title="Requests and replies",
    what=(
        "Trips: two processes, both awake, a tensor of 1 KiB that the server sends back; the clock covers the "
        "client's call and the death of the reply before. The bare trip is that of round-trip: two channels, no "
        "request, no time-out. ROUTER/DEALER: torch.save and torch.load on both sides, blocking in recv. Manager: a "
        "method call on an object in a manager's process. Busy servers: each handler sleeps 1 ms; efficiency is the "
        "time inside handlers over 2 servers and the wall time of the clients' loops. Batches: one client maps "
        f"images of 3 x 32 x 32 to a server with max_batch={BATCH}; the loop stacks {BATCH} of its own images and "
        "calls the same model; one torch thread in each process."
    ),
    cases=(
        Case(_TRIP, SHMTENSOR, measure_trip),
        Case(_BARE, SHMTENSOR, measure_bare),
        Case(_ROUTER, ZMQ, measure_router),
        Case(_MANAGER, PICKLE, measure_manager),
        Case(_BUSY, SHMTENSOR, measure_busy),
        Case(_LOOP, SHMTENSOR, measure_loop),
        Case(_BATCHED, SHMTENSOR, measure_batched),
    ),
    rows=(
        RowSpec(_TRIP, SHMTENSOR.name, _TRIP, "trip", "µs", 1e6, _BARE),
        RowSpec(_BARE, SHMTENSOR.name, _BARE, "trip", "µs", 1e6),
        RowSpec(_ROUTER, ZMQ.name, _ROUTER, "trip", "µs", 1e6, _TRIP),
        RowSpec(_MANAGER, PICKLE.name, _MANAGER, "trip", "µs", 1e6, _TRIP),
        RowSpec(f"efficiency, {_BUSY}", SHMTENSOR.name, _BUSY, "efficiency", "%"),
        RowSpec(f"rate, {_BUSY}", SHMTENSOR.name, _BUSY, "rate", "requests/s"),
        RowSpec(_BATCHED, SHMTENSOR.name, _BATCHED, "rate", "images/s", 1.0, _LOOP),
        RowSpec(_LOOP, SHMTENSOR.name, _LOOP, "rate", "images/s"),
    ),
)
