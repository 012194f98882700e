"""Asynchronous exceptions at every boundary of what a sleeper is woken by: no descriptor is lost, closed twice or left.

What an exception keeps from its owner is closed at once, not by a finalizer that warns of it some time later.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os

import pytest

import shmtensor
from shmtensor.channel.wakeup import Inbox
from shmtensor.channel.zmtp import Push
from shmtensor.endpoints.wait_queue import Waiter

from ..waiting import PATIENCE
from .interrupts import each_boundary

BELL = b"bell" * 8


def open_files() -> set[str]:
    """What this process's descriptors lead to."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing itself
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


@pytest.fixture
def nothing_opened():
    """Whoever uses this leaves as many files open as there were."""
    gc.collect()
    before = open_files()
    yield lambda: open_files() - before
    gc.collect()
    assert open_files() - before == set()


@pytest.fixture
def inbox(tmp_path, nothing_opened):
    made = Inbox(str(tmp_path), 7)
    yield made
    made.close()


def test_connecting(inbox, nothing_opened):
    with_inbox = nothing_opened()
    state = {}

    def connect():
        state["push"] = Push(inbox.path)

    for _ in each_boundary(connect):
        if "push" in state:
            state.pop("push").close()
        assert inbox.drain() == []  # it accepts, and finds that they have hung up
        assert inbox.drain() == []
        assert nothing_opened() == with_inbox


def test_accepting(inbox, nothing_opened):
    """Who was being accepted is heard by the next call, or has been hung up on and calls again."""
    with_inbox = nothing_opened()
    heard = []

    def drain():
        heard.extend(inbox.drain())

    for _ in each_boundary(drain):
        while not heard:
            push = Push(inbox.path)
            push.send(BELL)
            push.close()
            body = inbox.wait(PATIENCE)
            heard.append(body)
        assert set(heard) == {BELL}
        heard.clear()
        inbox.drain()
        inbox.drain()
        assert nothing_opened() == with_inbox
        push = Push(inbox.path)
        push.send(BELL)
        push.close()
    inbox.drain()


@pytest.mark.parametrize("endpoint", [shmtensor.Subscriber, shmtensor.Publisher], ids=["recv", "send"])
def test_a_line_falls_asleep_for_the_first_time(channel, nothing_opened, endpoint):
    loop = asyncio.new_event_loop()
    with endpoint(channel) as made:
        before = nothing_opened()
        state = {}

        def fall_asleep():
            wait_queue = state["wait_queue"] = made._make_wait_queue(loop)
            wait_queue._sleep(Waiter(loop, lambda: None))

        for attempt in each_boundary(fall_asleep):
            wait_queue = state.pop("wait_queue", None)
            if wait_queue is not None:
                assert attempt.raised or wait_queue._asleep
                wait_queue.end()
                del wait_queue
            assert nothing_opened() == before
    loop.close()
