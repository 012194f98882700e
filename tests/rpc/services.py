"""The processes of the tests of request and reply. Started from a fork server that has imported this module."""

from __future__ import annotations

import os
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
