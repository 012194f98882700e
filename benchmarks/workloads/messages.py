"""What people really send: ten kinds of messages, one way beside `pickle` over ZeroMQ, and beside a plain tensor."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import shmtensor

from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, pipes, run_roles
from ..sizes import KIB
from ..transports import SHMTENSOR, ZMQ, Link, LinkSettings, Receiver, Sender
from .base import Case, Effort, Workload
from .default_arguments import IN_FLIGHT, Bare, Ours
from .throughput import rates_of

Message = tuple[Any, Any]
"""Value and meta."""
SHAPES = 16
"""Of the kind whose shapes change."""
FRAME = "6 MiB frame with meta"
FRAMES = 16
"""Slots of a ring for those. pyzmq's queues would take 12 GB of them."""
TRIPS = 200
"""Messages of a chunk in one process."""
MESSAGE_S, LEAF_S = 1.5e-6, 0.3e-6
"""What a message may cost in one process beside three plain tensors of its bytes; and each of its leaves."""


def _tensor(count: int = 256, dtype: str = "float32") -> Any:
    import torch

    return torch.arange(count).to(getattr(torch, dtype))


def _shapes() -> list[Message]:
    return [(_tensor(16 * (1 + number)).reshape(1 + number, 16), None) for number in range(SHAPES)]


def _step() -> dict[str, Any]:
    return {
        "observation": np.arange(256, dtype=np.float32), "reward": 1.0, "terminated": False, "truncated": False,
        "info": {"episode": 3, "step": 41},
    }  # fmt: skip


def _nested() -> dict[str, Any]:
    return {"a": [_tensor(128), {"b": _tensor(64)}], "c": (_tensor(64), 5)}


def _frame() -> Any:
    import torch

    return torch.zeros((1080, 1920, 3), dtype=torch.uint8)


KINDS: dict[str, Callable[[], list[Message]]] = {
    "tensor": lambda: [(_tensor(), None)],
    "tensor with meta": lambda: [(_tensor(), {"ts": 1.5, "id": 7})],
    "array": lambda: [(np.arange(256, dtype=np.float32), None)],
    "tensor and id": lambda: [({"image": _tensor(), "id": 7}, None)],
    "four tensors": lambda: [({name: _tensor(64) for name in ("a", "b", "c", "d")}, None)],
    "gymnasium step": lambda: [(_step(), None)],
    "nested tree": lambda: [(_nested(), None)],
    "bfloat16 and scalars": lambda: [({"kv": _tensor(512, "bfloat16"), "layer": 3, "pos": 17}, {"req": "r-123"})],
    "changing shapes": _shapes,
    FRAME: lambda: [(_frame(), {"ts": 1.5, "camera": "left", "exposure": 0.01})],
}
"""Name -> the messages that are sent in turn. All but the frame have about 1 KiB of tensors."""


def same(value: Any, expected: Any) -> bool:
    """Whether what arrived is what was sent."""
    if isinstance(expected, dict):
        return list(value) == list(expected) and all(same(value[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return type(value) is type(expected) and len(value) == len(expected) and all(map(same, value, expected))
    if hasattr(expected, "dtype"):
        return (
            type(value) is type(expected) and value.dtype == expected.dtype and value.shape == expected.shape
            and bool((value == expected).all())
        )  # fmt: skip
    return bool(value == expected)


def _tensor_again(array: Any, dtype: str) -> Any:
    import torch

    return torch.from_numpy(array).view(getattr(torch, dtype))


def _reductions() -> dict[Any, Callable[[Any], Any]]:
    """How a pickler takes tensors: as NumPy arrays, since torch's own reduction of a tensor takes ten times as long."""
    import torch

    def reduce(tensor: Any) -> Any:
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return _tensor_again, (plain.numpy(), str(tensor.dtype).removeprefix("torch."))

    return {torch.Tensor: reduce}


class Pickled(Bare):
    """PUSH and PULL; value and meta by `pickle`, protocol 5, in one frame."""

    def sending(self, socket: Any) -> Callable[[Any], object]:
        table = _reductions()

        def send(message: Message) -> None:
            file = io.BytesIO()
            pickler = pickle.Pickler(file, 5)
            pickler.dispatch_table = table
            pickler.dump(message)
            socket.send(file.getbuffer())

        return send

    def receiving(self, socket: Any) -> Callable[[], Any]:
        return lambda: pickle.loads(socket.recv())


class PickledOutOfBand(Bare):
    """PUSH and PULL; `pickle`, protocol 5, with the bytes of each array in a frame of its own, which pyzmq does not
    copy: the caller must leave them alone until they are gone, and the receiver's arrays lie in its frames."""

    def sending(self, socket: Any) -> Callable[[Any], object]:
        table = _reductions()

        def send(message: Message) -> None:
            file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
            pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
            pickler.dispatch_table = table
            pickler.dump(message)
            socket.send_multipart([file.getbuffer(), *(buffer.raw() for buffer in buffers)], copy=False)

        return send

    def receiving(self, socket: Any) -> Callable[[], Any]:
        def receive() -> Any:
            head, *parts = socket.recv_multipart(copy=False)
            return pickle.loads(head.buffer, buffers=[part.buffer for part in parts])

        return receive


class Native(Ours):
    """`send(value, meta)` and `recv()`, with default arguments."""

    def sender(self, index: int = 0) -> Sender:
        publisher = shmtensor.Publisher(self.settings.name)
        send = publisher.send
        return Sender(lambda message: send(*message), publisher.close)

    def receiver(self, index: int = 0) -> Receiver:
        subscriber = shmtensor.Subscriber(self.settings.name)
        recv = subscriber.recv

        def receive() -> Message:
            message = recv()
            return message.value, message.meta

        return Receiver(receive, subscriber.close)


RIVAL, OUT_OF_BAND = "pickle over ZeroMQ", "pickle over ZeroMQ, out of band"
LINKS: dict[str, type[Link]] = {SHMTENSOR.name: Native, RIVAL: Pickled, OUT_OF_BAND: PickledOutOfBand}
CARRIERS = {SHMTENSOR.name: SHMTENSOR, RIVAL: ZMQ, OUT_OF_BAND: ZMQ}


def rivals(kind: str) -> tuple[str, ...]:
    """Out of band is faster where there is much to copy, and slower for all that is small."""
    return (RIVAL, OUT_OF_BAND) if kind == FRAME else (RIVAL,)


def measure_rate(effort: Effort, *, kind: str, way: str) -> Samples:
    """Messages per second at the receiver."""
    link = LINKS[way](LinkSettings(fresh_name(), KIB, FRAMES if kind == FRAME else IN_FLIGHT))
    try:
        return rate_of(link, partial(messages_of, kind), kind, effort)
    finally:
        link.close()


def messages_of(kind: str) -> list[Message]:
    """What is sent, one after the other."""
    return KINDS[kind]()


def rate_of(link: Link, make: Callable[[], list[Any]], kind: str, effort: Effort) -> Samples:
    """Messages, or items, per second at the receiver of a link."""
    with pipes(1) as [(ours, theirs)]:
        roles = [Role(_receive, (link, make, kind, effort, ours)), Role(_send, (link, make, theirs))]
        found: Samples = run_roles(roles)[0]
        return found


def _send(meet: Callable[[], object], link: Link, make: Callable[[], list[Any]], control: Connection) -> None:
    meet()
    sender, messages = link.sender(), make()
    meet()
    send, number = sender.send, 0
    while count := control.recv():
        for _ in range(count):
            send(messages[number % len(messages)])
            number += 1
    meet()
    sender.close()


def _receive(
    meet: Callable[[], object],
    link: Link,
    make: Callable[[], list[Any]],
    kind: str,
    effort: Effort,
    control: Connection,
) -> Samples:
    receiver, messages = link.receiver(), make()
    meet()
    meet()
    recv, clock = receiver.recv, time.perf_counter
    number, received = 0, None

    def take(count: int) -> float:
        nonlocal number, received
        start = clock()
        control.send(count)
        for _ in range(count):
            received = recv()
        seconds = clock() - start
        number += count
        if not same(received, messages[(number - 1) % len(messages)]):
            raise AssertionError(f"{kind}: what arrived is not what was sent")
        return seconds

    rates = rates_of(take, effort, link.settings.in_flight)
    control.send(0)
    received = None
    meet()
    receiver.close()
    return {"rate": rates}


def measure_here(effort: Effort, *, kind: str) -> Samples:
    """In one process: seconds of `send`, `recv` and release of a message, and of a plain tensor of as many bytes."""
    return run_roles([Role(_here, (fresh_name(), fresh_name(), kind, effort))])[0]


def _here(meet: Callable[[], object], name: str, plain_name: str, kind: str, effort: Effort) -> Samples:
    messages = KINDS[kind]()
    clock = time.perf_counter
    samples: Samples = {"message": [], "plain": [], "share": []}
    with (
        shmtensor.Publisher(name) as pub, shmtensor.Subscriber(name) as sub,
        shmtensor.Publisher(plain_name) as plain_pub, shmtensor.Subscriber(plain_name) as plain_sub,
    ):  # fmt: skip
        pub.send(*messages[0])
        with sub.recv() as first:
            nbytes = first.nbytes
        plain = [(_tensor(nbytes, "uint8"), None)]
        leaves = sum(leaves_of(value) + leaves_of(meta) for value, meta in messages) / len(messages)
        end = clock() + effort.seconds
        while len(samples["plain"]) < effort.least or clock() < end:
            for what, sender, receiver, sent in (
                ("message", pub, sub, messages), ("plain", plain_pub, plain_sub, plain),
            ):  # fmt: skip
                send, recv, count = sender.send, receiver.recv, TRIPS if nbytes < 1 << 20 else 5
                start = clock()
                for number in range(count):
                    send(*sent[number % len(sent)])
                    message = recv()
                    message.value, message.meta  # noqa: B018
                    del message
                samples[what].append((clock() - start) / count)
            samples["share"].append(
                samples["message"][-1] / (3 * samples["plain"][-1] + MESSAGE_S + LEAF_S * leaves)
            )  # fmt: skip
    return samples


def leaves_of(value: Any) -> int:
    """How many tensors, arrays and scalars a value has."""
    if isinstance(value, dict):
        return sum(leaves_of(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(leaves_of, value))
    return int(value is not None)


def rate_name(kind: str, way: str) -> str:
    """Of a case and its row."""
    return f"one way, {kind}: {way}"


def here_name(kind: str, what: str) -> str:
    """Of a row."""
    return f"one process, {kind}: {what}"


MESSAGE, PLAIN, SHARE = "the message", "a plain tensor of its bytes", "of what it may cost"

WORKLOAD = Workload(
    name="messages",
    title="Ten kinds of messages that people send",
    what=(
        "Default arguments. One way: two processes, Publisher and Subscriber beside pyzmq PUSH and PULL over ipc with "
        "`pickle`, protocol 5, in one frame, tensors as arrays; messages a second at the receiver, value and meta "
        "read, counted as in the table of one way; the last of each stretch is compared outside the clock. The frame "
        "also with its bytes out of band, in a frame of ZeroMQ's that pyzmq does not copy, so that its caller must "
        "leave it alone; that is slower for the small kinds, and not measured for them. One process: seconds of "
        "`send`, `recv`, value and meta, and release; beside them, in turn, a plain uint8 tensor of as many bytes. "
        "What it may cost: three times that, 1.5 µs, and 0.3 µs for each leaf: a tensor, an array, a number, a string. "
        "All kinds but the frame hold about 1 KiB of tensors or arrays."
    ),
    cases=(
        *(
            Case(rate_name(kind, way), CARRIERS[way], partial(measure_rate, kind=kind, way=way))
            for kind in KINDS
            for way in (SHMTENSOR.name, *rivals(kind))
        ),
        *(Case(f"one process, {kind}", SHMTENSOR, partial(measure_here, kind=kind)) for kind in KINDS),
    ),
    rows=(
        *(
            RowSpec(
                rate_name(kind, way), CARRIERS[way].name, rate_name(kind, way),
                "rate", "k msg/s", 1e-3,
                rate_name(kind, rivals(kind)[-1]) if way == SHMTENSOR.name else None,
            )
            for kind in KINDS
            for way in (*rivals(kind), SHMTENSOR.name)
        ),
        *(
            RowSpec(
                here_name(kind, what), SHMTENSOR.name, f"one process, {kind}", metric, *unit,
                here_name(kind, PLAIN) if what == MESSAGE else None,
            )
            for kind in KINDS
            for what, metric, unit in (
                (PLAIN, "plain", ("µs", 1e6)), (MESSAGE, "message", ("µs", 1e6)), (SHARE, "share", ("×", 1.0)),
            )
        ),
    ),
    rounds={"full": 5, "quick": 2},
)  # fmt: skip
