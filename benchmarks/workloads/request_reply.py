"""Requests and replies: the trip of one, servers that are kept busy, batches for a small model."""

from __future__ import annotations

import io
import itertools
import threading
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
CLIENTS, SERVERS, SLEEP, WINDOW = 4, 2, 1e-3, 4
SUPPLIERS, BATCH, IMAGE = 2, 32, (3, 128, 128)
POOL = 4 * BATCH

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


def _sleep(value: Any) -> Any:
    """The handler of 1 ms; what the timer really takes is measured."""
    time.sleep(SLEEP)
    return value


def measure_busy(effort: Effort) -> Samples:
    """Requests per second of all clients, beside what the same handlers reach in bare loops before and after."""
    name, count = fresh_name(), max(5, int(effort.seconds * 1500))
    results = run_roles(
        [
            *(Role(_client, (name, count)) for _ in range(CLIENTS)),
            *(Role(_server, (name, count)) for _ in range(SERVERS)),
        ]
    )
    asked, served = results[:CLIENTS], results[CLIENTS:]
    sent, answered = CLIENTS * (1 + WARM + count), sum(handled for handled, _ in served)
    if answered != sent:
        raise ValueError(f"{sent} requests were sent, {answered} answered")
    rate = CLIENTS * count / (max(end for _, end in asked) - min(start for start, _ in asked))
    ideal = sum(1 / seconds for _, seconds in served)
    return {"efficiency": [100 * rate / ideal], "rate": [rate], "ideal": [ideal]}


def _client(meet: Callable[[], object], name: str, count: int) -> tuple[float, float]:
    import shmtensor

    payload = payloads.make("torch", KIB)
    meet()
    meet()
    with shmtensor.Client(name) as client:
        client.wait_for_servers(SERVERS, timeout=60.0)
        payloads.check("torch", client.request(payload, timeout=60.0), payload)

        def ask(count: int) -> None:
            for _ in client.map(itertools.repeat(payload, count), timeout=60.0, window=WINDOW):
                pass

        ask(WARM)
        meet()
        start = time.perf_counter()
        ask(count)
        end = time.perf_counter()
        meet()
    meet()
    return start, end


def _server(meet: Callable[[], object], name: str, count: int) -> tuple[int, float]:
    """How many requests were answered, and the seconds of one handler in a bare loop."""
    import shmtensor

    payload = payloads.make("torch", KIB)

    def bare() -> float:
        start = time.perf_counter()
        for _ in range(count):
            _sleep(payload)
        return time.perf_counter() - start

    meet()
    before = bare()
    meet()
    with shmtensor.Server(name) as server:

        def stop() -> None:
            meet()
            meet()
            server.stop()

        waiting = threading.Thread(target=stop)
        waiting.start()
        server.run(_sleep)
        waiting.join()
        replied = server.statistics().replied
    meet()
    return replied, (before + bare()) / (2 * count)


# --- batches


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [torch.nn.Conv2d(before, after, 3, stride=2, padding=1), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(*layers, *head).eval()


def _images(count: int) -> Any:
    """So many images, of a few that come again and again."""
    import torch

    torch.manual_seed(1)
    return itertools.islice(itertools.cycle(list(torch.rand(POOL, *IMAGE))), count)


def _batch_count(effort: Effort) -> int:
    """For each supplier."""
    return max(2, int(effort.seconds * 100))


def measure_loop(effort: Effort) -> Samples:
    """Images per second of a loop that stacks and calls the model, and the ms that the model takes for one of them."""
    rate, seconds = run_roles([Role(_loop, (SUPPLIERS * _batch_count(effort),))])[0]
    return {"rate": [rate], "forward": [seconds]}


def _loop(meet: Callable[[], object], batches: int) -> tuple[float, float]:
    import torch

    model, images, clock = _model(), _images(BATCH * (batches + 1)), time.perf_counter
    with torch.inference_mode():
        for _ in model(torch.stack(list(itertools.islice(images, BATCH)))).unbind(0):
            pass
        start, inside = clock(), 0.0
        for _ in range(batches):
            stacked = torch.stack(list(itertools.islice(images, BATCH)))
            began = clock()
            answers = model(stacked)
            inside += clock() - began
            for _ in answers.unbind(0):
                pass
        return BATCH * batches / (clock() - start), inside / (BATCH * batches)


def measure_batched(effort: Effort) -> Samples:
    """Images per second of clients that keep a batching server supplied, and the images in a batch."""
    name, batches = fresh_name(), _batch_count(effort)
    *asked, (images, calls) = run_roles(
        [*(Role(_supply, (name, batches)) for _ in range(SUPPLIERS)), Role(_batches, (name,))]
    )
    wall = max(end for _, end in asked) - min(start for start, _ in asked)
    return {"rate": [SUPPLIERS * BATCH * batches / wall], "batch": [images / calls]}


def _supply(meet: Callable[[], object], name: str, batches: int) -> tuple[float, float]:
    import shmtensor

    with shmtensor.Client(name, slots=2 * BATCH) as client:
        meet()
        client.wait_for_servers(1, timeout=60.0)
        for _ in client.map(_images(BATCH), timeout=60.0):
            pass
        images = _images(BATCH * batches)
        meet()
        start = time.perf_counter()
        for _ in client.map(images, timeout=60.0):
            pass
        end = time.perf_counter()
        meet()
    return start, end


def _batches(meet: Callable[[], object], name: str) -> tuple[int, int]:
    """How many images the model was called for, and how often."""
    import torch

    import shmtensor

    model, sizes = _model(), list[int]()

    def answer(images: Any) -> Any:
        sizes.append(len(images))
        return model(images)

    with shmtensor.Server(name, max_batch=BATCH, slots=2 * BATCH) as server, torch.inference_mode():

        def stop() -> None:
            for _ in range(3):
                meet()
            server.stop()

        waiting = threading.Thread(target=stop)
        waiting.start()
        server.run(answer)
        waiting.join()
    return sum(sizes), len(sizes)


WORKLOAD = Workload(
    name="request-reply",
    title="Requests and replies",
    what=(
        "Trips: two processes, both awake, a tensor of 1 KiB that the server sends back; the clock covers the "
        "client's call and the death of the reply before. The bare trip is that of round-trip: two channels, no "
        "request, no time-out. ROUTER/DEALER: torch.save and torch.load on both sides, blocking in recv. Manager: a "
        f"method call on an object in a manager's process. Busy servers: each handler sleeps 1 ms, each client keeps "
        f"{WINDOW} requests on their way by map; ideal is what the {SERVERS} servers' handlers reach in bare loops, "
        "both at once, just before and just after (the timer makes more than 1 ms of it); efficiency is the rate of "
        f"the clients' loops, first request to last reply, after {WARM} from each, over that. Batches: {SUPPLIERS} "
        f"clients map images of 3 x 128 x 128 float32, up to {2 * BATCH} on their way from each, to one server with "
        f"max_batch={BATCH}; the loop stacks {BATCH} images of its own and calls the same model (three convolutions of "
        "stride 2, 16, 32 and 32 channels, and a linear layer) on as many; one torch thread in each process, so that "
        "the server's model has one core as the loop's has, and the clients the other ones. The first batches are not "
        "counted."
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
        RowSpec(f"rate, {_BUSY}", SHMTENSOR.name, _BUSY, "rate", "requests/s", 1.0, f"ideal, {_BUSY}"),
        RowSpec(f"ideal, {_BUSY}", SHMTENSOR.name, _BUSY, "ideal", "requests/s"),
        RowSpec(_BATCHED, SHMTENSOR.name, _BATCHED, "rate", "images/s", 1.0, _LOOP),
        RowSpec(_LOOP, SHMTENSOR.name, _LOOP, "rate", "images/s"),
        RowSpec("images in a batch of the server", SHMTENSOR.name, _BATCHED, "batch", "images"),
        RowSpec("the model itself, in the loop, per image", SHMTENSOR.name, _LOOP, "forward", "ms", 1e3),
    ),
)
