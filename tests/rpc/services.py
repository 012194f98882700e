"""The processes of the tests of request and reply. Started from a fork server that has imported this module."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np

import shmtensor

from ..waiting import wait_until

PATIENCE = 90.0


def hold(pipe, service: str, options: dict) -> None:
    """A server that takes one request, tells about it, and answers when it is told to; for as long as it lives."""
    with shmtensor.Server(service, **options) as server:
        pipe.send("here")
        while True:
            req = server.recv(timeout=PATIENCE)
            pipe.send((req.seq, req.attempt))
            if pipe.recv() == "reply":
                req.reply(req.value)
            del req


def ask(pipe, service: str, count: int) -> None:
    """A client that sends requests, tells, and waits to be killed."""
    with shmtensor.Client(service) as client:
        pipe.send("here")
        futures = [client.submit(np.full(8, number)) for number in range(count)]
        pipe.send("sent")
        pipe.recv()
        pipe.send([int(future.result(timeout=PATIENCE)[0]) for future in futures])


def ask_many(pipe, service: str, first: int, count: int, step: int) -> None:
    """A client that checks every reply: each is its request's number times two. Tells of every `step` replies."""
    with shmtensor.Client(service) as client:
        pipe.send("here")
        numbers = iter(range(first, first + count))
        wrong = []
        replies = client.map((np.full(8, number) for number in range(first, first + count)), timeout=PATIENCE)
        for got, reply in enumerate(replies, 1):
            number = next(numbers)
            if not (reply == 2 * number).all():
                wrong.append((number, reply.tolist()))
            if got % step == 0:
                pipe.send(got)
        statistics = client.statistics()
        pipe.send((wrong, statistics.requests, statistics.replies, statistics.outstanding))


def double(pipe, service: str, options: dict) -> None:
    """A server that doubles."""
    with shmtensor.Server(service, **options) as server:
        pipe.send("here")
        for req in server:
            req.reply(2 * req.value)


def double_slowly(pipe, service: str, options: dict) -> None:
    """The same, a millisecond each, as one that waits for a device."""
    pause = threading.Event()
    with shmtensor.Server(service, **options) as server:
        pipe.send("here")
        for req in server:
            pause.wait(1e-3)
            req.reply(2 * req.value)


# --- handlers of worker pools


def negate(value):
    return -value


def fragile(value):
    """Ends its process by a zero."""
    if not value:
        os._exit(7)
    return os.getpid()


def fragile_rows(value):
    """Of a batch: ends its process by a zero."""
    if not value.all():
        os._exit(7)
    return np.full(len(value), len(value))


class Model:
    """Made once in each worker."""

    def __init__(self):
        self.pid = os.getpid()

    def __call__(self, value):
        return value + self.pid - os.getpid()


async def later(value):
    return value


class Mute:
    """Its instances cannot be called."""


class Broken:
    """Cannot be made."""

    def __init__(self):
        os._exit(9)

    def __call__(self, value):
        return value


def patient(value):
    """Says that it has begun, and answers when it is let go on."""
    begun, go_on = value["begun"], value["go on"]
    open(begun, "x").close()
    wait_until(lambda: os.path.exists(go_on))
    return os.getpid()


def rows(value):
    """Of a batch: how many there were, for each."""
    return np.full(len(value), len(value))


# --- handlers of worker pools that take a context, and what surrounds them


def tell(value, context):
    """What the handler knows."""
    return {
        "meta": context.meta, "remaining": context.remaining, "cancelled": context.cancelled,
        "attempt": context.attempt, "worker": context.worker, "state": context.state, "pid": os.getpid(),
    }  # fmt: skip


def tell_rows(value, context):
    """The same of a batch, for each."""
    told = np.array([meta["number"] for meta in context.meta])
    assert len(context) == len(value) == len(context.remaining) == len(context.cancelled) == len(context.attempt)
    assert context.worker == 0
    assert context.state is None
    return {"number": told, "late": np.array([left is not None and left <= 0 for left in context.remaining])}


def until_cancelled(value, context):
    """Says that it has begun, works until nobody wants the reply, and says so."""
    open(value["begun"], "x").close()
    wait_until(lambda: context.cancelled)
    open(value["noticed"], "x").close()


def die_once(value, context):
    """Kills its process with the first attempt."""
    if context.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.attempt


def index_of(worker):
    return f"state of {worker}"


def note(path, what=""):
    """Append a line to a file, in one call."""
    with open(path, "a") as file:
        file.write(f"{what}\n")


def raising(path):
    """A setup that raises while there is no such file."""
    if not os.path.exists(path):
        raise LookupError("no weights there")


def raising_if(path):
    if os.path.exists(path):
        raise LookupError("the new weights are bad")


def dying_if(path):
    if os.path.exists(path):
        os._exit(5)


def waiting_if(path, begun):
    """A setup that waits while there is a file, after it has noted its process."""
    if os.path.exists(path):
        note(begun, os.getpid())
        wait_until(lambda: not os.path.exists(path))


def killed_unless(path):
    """Kills its process while there is no such file, which it makes."""
    if not os.path.exists(path):
        note(path)
        os.kill(os.getpid(), signal.SIGKILL)


def endless(path, *_):
    """Notes that it has begun, and does not end."""
    note(path)
    threading.Event().wait()


def killing(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def failing(state):
    raise OSError("cannot let go")


def one_value(value, scale=2):
    return value * scale


def note_state(path, state):
    note(path, state)


def submit_one(pipe, service, value):
    """A client that sends a request, and waits to be killed."""
    with shmtensor.Client(service) as client:
        client.submit(value)
        pipe.recv()


def patient_or_bad(value):
    if isinstance(value, str):
        raise ValueError(value)
    return patient(value)


def patient_at_first(value, context):
    return patient(value) if context.attempt == 1 else context.attempt


def unsendable(value):
    return object()


def leave_a_child(path, context):
    """Kills its process with the first attempt, and leaves a child, whose process it notes."""
    if context.attempt == 1:
        child = os.fork()
        while not child:
            signal.pause()
        note(path, child)
        os.kill(os.getpid(), signal.SIGKILL)
    return context.attempt
