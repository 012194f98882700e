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
