"""The processes of a fault scenario. Preloaded by the fork server; it installs the crash points first."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from . import points

points.install()

import numpy as np  # noqa: E402

import shmtensor  # noqa: E402
from shmtensor.observe.trace import Tracer  # noqa: E402

from ..waiting import wait_for_end  # noqa: E402

PATIENCE = 120.0
WORDS = 50


def payload(number: int) -> np.ndarray:
    return np.full(WORDS, number, np.int64)


def number_of(value: np.ndarray) -> int:
    assert value.shape == (WORDS,), value.shape
    assert (value == value[0]).all(), "torn payload"
    return int(value[0])


def _arm(plan) -> None:
    if plan is not None:
        points.arm(*plan)


def _surviving_a_crash(body, pipe) -> None:
    """Run a victim's body; with the action "raise" it goes on with its life and ends normally."""
    try:
        body()
    except points.Crash as crash:
        pipe.send(("raised", str(crash)))
    pipe.send(("end", dict(points.hits)))


def sender(pipe, pattern: str, channel: str, plan, count: int, receivers: int, options: dict) -> None:
    """Send `count` numbered messages, telling the test each one whose `send` returned.

    `prey` in the options: another member's pid, which dies when this one joins: while this process holds the channel's
    lock, so that no other process can sweep it. The plan begins there: what is swept before is of other channels.
    """
    first, prey = options.pop("first", 1), options.pop("prey", 0)
    if prey:
        points.arm("join.locked", lambda: (os.kill(prey, signal.SIGKILL), wait_for_end(prey), _arm(plan)))
    else:
        _arm(plan)
    make = shmtensor.Producer if pattern == "work-queue" else shmtensor.Publisher

    def body() -> None:
        tx = make(channel, **{"slots": 4, **options})
        try:
            pipe.send(("joined", None))
            if receivers:
                wait = tx.wait_for_consumers if pattern == "work-queue" else tx.wait_for_subscribers
                wait(receivers, timeout=PATIENCE)
            pipe.recv()
            for number in range(first, first + count):
                try:
                    if number % 3 == 0:
                        with tx.loan((WORDS,), np.int64, timeout=PATIENCE) as loan:
                            loan.array[...] = number
                    else:
                        tx.send(payload(number), timeout=PATIENCE)
                except points.Crash as crash:
                    pipe.send(("raised", str(crash)))
                    continue
                pipe.send(("sent", number))
        finally:
            tx.close(linger=PATIENCE if options.get("full") != "grow" else 0)

    _surviving_a_crash(body, pipe)


def receiver(
    pipe, pattern: str, channel: str, plan, stop_after: int | None, keep: int = 0, held: bool = False, **options
) -> None:
    """Receive until the end of the stream (or `stop_after` messages), telling the test each message."""
    _arm(plan)
    make = shmtensor.Consumer if pattern == "work-queue" else shmtensor.Subscriber
    if pattern == "group":
        options["group"] = "them"
    kept = []

    def body() -> None:
        rx = make(channel, **options)
        try:
            pipe.send(("joined", None))
            if held:
                pipe.recv()
            received = 0
            deadline = time.monotonic() + PATIENCE
            while stop_after is None or received < stop_after:
                try:
                    msg = rx.recv(timeout=max(0.0, deadline - time.monotonic()))
                except shmtensor.EndOfStream:
                    break
                except points.Crash as crash:
                    pipe.send(("raised", str(crash)))
                    continue
                received += 1
                pipe.send(("got", (number_of(msg.value), msg.attempt)))
                if len(kept) < keep:
                    kept.append((msg.value, number_of(msg.value)))
                with contextlib.suppress(points.Crash):
                    msg.release()
                del msg
            for value, number in kept:
                assert number_of(value) == number
        finally:
            rx.close()
            for value, number in kept:
                assert number_of(value) == number
            kept.clear()

    _surviving_a_crash(body, pipe)


def tracer(pipe, channel: str, plan) -> None:
    """Trace a channel until told to end."""
    _arm(plan)

    def body() -> None:
        with Tracer(channel, size=1024) as found:
            pipe.send(("traces", None))
            pipe.recv()
            found.poll()

    _surviving_a_crash(body, pipe)


def maker(pipe, plan) -> None:
    """Make a queue and put something into it."""
    _arm(plan)

    def body() -> None:
        queue = shmtensor.Queue()
        queue.put(payload(1))
        queue.close()

    _surviving_a_crash(body, pipe)


def putter(pipe, queue, plan, first: int, count: int) -> None:
    """Put `count` numbered items, or send them into a pipe, telling the test each one whose `put` returned."""
    _arm(plan)
    put = getattr(queue, "put", None) or queue.send

    def body() -> None:
        for number in range(first, first + count):
            put((payload(number), number))
            pipe.send(("put", number))
        queue.close()

    _surviving_a_crash(body, pipe)


def getter(pipe, queue, plan, count: int) -> None:
    """Get `count` items, of a queue or a pipe, telling the test each one that `get` returned and each that is done."""
    _arm(plan)
    get = getattr(queue, "get", None) or queue.recv

    def body() -> None:
        for _ in range(count):
            value, number = get()
            assert number_of(value) == number
            pipe.send(("got", number))
            del value
            if isinstance(queue, shmtensor.JoinableQueue):
                queue.task_done()
                pipe.send(("done", number))
        queue.close()

    _surviving_a_crash(body, pipe)


def client(pipe, service: str, plan, count: int) -> None:
    """Ask for the double of each number, telling the test each reply; some in futures, some cancelled at once."""
    _arm(plan)

    def body() -> None:
        asker = shmtensor.Client(service, slots=4)
        try:
            pipe.send(("joined", None))
            pipe.recv()
            for number in range(1, count + 1):
                while True:
                    try:
                        if number % 3 == 0:
                            asker.submit(payload(number)).cancel()
                        ask = asker.submit(payload(number), timeout=PATIENCE).result if number % 2 else None
                        reply = ask() if ask else asker.request(payload(number), timeout=PATIENCE)
                    except points.Crash as crash:
                        pipe.send(("raised", str(crash)))
                        continue
                    break
                pipe.send(("got", (number, number_of(reply))))
                del reply
        finally:
            asker.close()

    _surviving_a_crash(body, pipe)


def server(pipe, service: str, plan, drop: bool = False) -> None:
    """Answer with the double, until told to end; telling the test each request. Or let go of each."""
    _arm(plan)

    def body() -> None:
        answerer = shmtensor.Server(service)
        try:
            pipe.send(("joined", None))
            while not pipe.poll():
                try:
                    req = answerer.recv(timeout=0.05)
                except shmtensor.TimedOut:
                    continue
                except points.Crash as crash:
                    pipe.send(("raised", str(crash)))
                    continue
                pipe.send(("took", (number_of(req.value), req.attempt)))
                while not drop and not req.answered:
                    try:
                        req.reply(2 * req.value)
                    except points.Crash as crash:
                        pipe.send(("raised", str(crash)))
                del req
        finally:
            answerer.close()

    _surviving_a_crash(body, pipe)
