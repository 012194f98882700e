"""How a relay ends: by `close`, in a signal handler, as it is made, and with its program."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor
from shmtensor.relay import outbound
from shmtensor.relay.relay import open_relays

from ..conftest import descriptors, shared_files
from ..faults.interrupts import each_boundary, interrupted, open_files, stride
from ..waiting import PATIENCE, wait_until
from .hosts import endpoint, pair

MAKERS = {"fan-out": shmtensor.Publisher, "work-queue": shmtensor.Producer, "service": shmtensor.Client}


@contextlib.contextmanager
def unfinished(channel):
    """A near relay with a message that its consumer does not finish: `close` lingers."""
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Consumer(f"{channel}-far", acknowledge="release") as rx,
        pair(channel, "work-queue") as (near, _),
    ):
        tx.send(np.array(0))
        with rx.recv(timeout=PATIENCE):
            yield near
            with shmtensor.Consumer(channel, acknowledge="release") as here, here.recv(timeout=PATIENCE) as message:
                assert message.value == 0


def test_a_second_close_ends_the_lingering(channel):
    with unfinished(channel) as near:
        first = threading.Thread(target=near.close, args=(3600,))
        first.start()
        wait_until(lambda: near._closing.is_running)
        near.close()
        first.join(PATIENCE)
        assert not first.is_alive()
        assert repr(near) == "<Relay near closed>"


def test_a_signal_handler_that_closes_what_is_being_closed(channel, monkeypatch):
    """It returns at once, and the call that it has interrupted does not linger any more."""
    drain, before, said = outbound.Outbound.drain, signal.getsignal(signal.SIGUSR1), []

    def interrupted(relay, deadline):
        if not said:
            signal.raise_signal(signal.SIGUSR1)
        drain(relay, deadline)

    def handler(*_):
        said.append("begins")
        near.close(3600)
        said.append("has ended")

    with unfinished(channel) as near:
        monkeypatch.setattr(outbound.Outbound, "drain", interrupted)
        signal.signal(signal.SIGUSR1, handler)
        try:
            near.close(3600)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert said == ["begins", "has ended"]
        assert repr(near) == "<Relay near closed>"


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue", "service"])
def test_an_exception_while_it_is_made_leaves_nothing(channel, pattern, monkeypatch):
    """As of Ctrl-C: its thread runs already."""
    start, begun = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        if thread.name.startswith(f"shmtensor relay {channel}"):
            begun.append(thread)
            raise KeyboardInterrupt

    where = endpoint()
    with MAKERS[pattern](channel):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            shmtensor.Relay(channel, to=where, pattern=pattern)
        begun[0].join(PATIENCE)
        assert not begun[0].is_alive()
        assert not shmtensor.inspect(channel).receivers
    assert not open_relays


def left():
    """What a relay has beside memory: threads, Zenoh's calls too, sockets, and its ends in the channel."""
    gc.collect()
    return {it.name for it in threading.enumerate()}, open_files()["socket"], shared_files(), descriptors()


def wait_until_nothing_is_left(before):
    wait_until(
        lambda: not open_relays and all(now <= then for now, then in zip(left(), before, strict=True)),
        lambda: (before, left(), list(open_relays)),
    )


SIDES = ["far", "fan-out", "work-queue", "service"]


def make_side(channel, side, where):
    if side == "far":
        return shmtensor.Relay(channel, listen=where)
    return shmtensor.Relay(channel, to=where, pattern=side)


@contextlib.contextmanager
def beside(channel, side):
    """A member of the channel, of which a near relay is one, too; and what there is before a relay is made."""
    with contextlib.ExitStack() as stack:
        if side != "far":
            stack.enter_context(MAKERS[side](channel))
        where = endpoint()
        make_side(channel, side, where).close()  # imports; what stays
        yield where, left()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of the look at the channel: closed as it is said
@pytest.mark.parametrize("side", SIDES)
def test_an_interrupted_constructor_leaves_nothing(channel, side):
    with beside(channel, side) as (where, before):
        for attempt in each_boundary(lambda: make_side(channel, side, where), step=stride(1 if side == "far" else 23)):
            made, attempt.result = attempt.result, None
            if made is not None:
                made.close()
            del made
            wait_until_nothing_is_left(before)
            assert side == "far" or not shmtensor.inspect(channel).receivers, attempt
        assert attempt.at > 60


@pytest.mark.parametrize("side", SIDES)
def test_the_next_close_ends_what_an_interrupted_one_began(channel, side):
    at, reached = 1, True
    with beside(channel, side) as (where, before):
        while reached:
            relay = make_side(channel, side, where)
            attempt = interrupted(relay.close, at)
            at, reached = at + 1, attempt.reached
            relay.close()
            with pytest.raises(shmtensor.ClosedError):
                relay.check()
            del relay
            wait_until_nothing_is_left(before)
    assert at > 30


def test_an_interrupted_close_goes_on_to_its_end(channel):
    """Not by the one who called it, nor by another call."""
    with unfinished(channel) as near:

        def raise_it(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, raise_it)
        me = threading.get_ident()
        other = threading.Thread(
            target=lambda: (
                wait_until(lambda: near._closing.is_running), signal.pthread_kill(me, signal.SIGUSR1)
            )
        )  # fmt: skip
        try:
            other.start()
            with pytest.raises(KeyboardInterrupt):
                near.close(0.5)
        finally:
            other.join()
            signal.signal(signal.SIGUSR1, before)
        wait_until(lambda: repr(near) == "<Relay near closed>")


@pytest.mark.parametrize("call", ["wait", "check", "statistics"])
def test_an_interrupted_call_leaves_nothing_locked(channel, call):
    with shmtensor.Publisher(channel) as tx, shmtensor.Subscriber(f"{channel}-far") as rx, pair(channel) as relays:
        for relay in relays:
            for _ in each_boundary(lambda relay=relay: getattr(relay, call)()):
                other = threading.Thread(target=relay.statistics)
                other.start()
                other.join(PATIENCE)
                assert not other.is_alive()
            tx.send(np.array(1))
            assert rx.recv(timeout=PATIENCE, copy=True).value == 1


def test_a_relay_that_nobody_refers_to_is_closed(channel):
    with beside(channel, "fan-out") as (where, before):
        relay = make_side(channel, "fan-out", where)
        assert left() != before
        del relay
        wait_until_nothing_is_left(before)


def test_a_finalizer_in_a_thread_of_the_relay_closes_it(channel, monkeypatch):
    """It does not wait for what waits for it."""
    look, closed = outbound.Outbound._report, []

    def finalized(relay, now):
        if not closed:
            closed.append(near.close())
        look(relay, now)

    with shmtensor.Publisher(channel), pair(channel) as (near, _):
        monkeypatch.setattr(outbound.Outbound, "_report", finalized)
        wait_until(lambda: repr(near) == "<Relay near closed>")


AT_THE_END = """
import os, sys, numpy as np, shmtensor
channel, where, how = sys.argv[1:]
rx = shmtensor.Subscriber(f"{channel}-far")
far = shmtensor.Relay(f"{channel}-far", listen=where)
tx = shmtensor.Publisher(channel)
near = shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern="fan-out")
near.wait(60)
tx.wait_for_subscribers(1, timeout=60)
if how == "forked":
    child = os.fork()
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
tx.send(np.arange(3))
with rx.recv(timeout=60) as message:
    assert list(message.value) == [0, 1, 2]
print("end")
if how == "raises":
    raise RuntimeError("a bug in the program")
if how == "dropped":
    del near, far
"""


@pytest.mark.parametrize("how", ["returns", "raises", "forked", "dropped"])
def test_a_program_that_does_not_close_its_relays_ends(channel, how):
    """Zenoh's threads are not daemons, and end with its sessions."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END, channel, endpoint(), how], capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.stdout == "end\n", ended.stderr
    assert ended.returncode == (how == "raises")
    assert ("a bug in the program" in ended.stderr) == (how == "raises")
    assert "relay" not in ended.stderr


def test_a_closed_relay_is_kept_by_nothing(channel):
    with shmtensor.Publisher(channel), pair(channel) as (near, far):
        pass
    left = weakref.ref(near), weakref.ref(far)
    del near, far
    gc.collect()
    assert [it() for it in left] == [None, None]
