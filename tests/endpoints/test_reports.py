"""What a sender says unasked: how many messages end with it unseen, and who holds its slots while it waits long."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import shmtensor
from shmtensor import Consumer, Producer, Publisher, Subscriber
from shmtensor.endpoints import sender as sending

from ..scenes import Fellow
from ..waiting import PATIENCE, wait_until


def lost(caplog) -> list[int]:
    """The numbers that the log names."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [int(found[1]) for text in texts if (found := re.search(r"(\d+) messages? that no consumer", text))]


@pytest.mark.parametrize("how", ["close", "with", "left by an exception", "aclose", "async with", "collected"])
def test_messages_that_nobody_will_see_are_told(channel, caplog, how):
    async def use():
        if how == "aclose":
            tx = Producer(channel)
            await fill_async(tx)
            await tx.aclose()
        else:
            async with Producer(channel) as tx:
                await fill_async(tx)

    async def fill_async(tx):
        for number in range(3):
            await tx.asend(np.array(number))

    def fill(tx):
        for number in range(3):
            tx.send(np.array(number))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if how == "close":
            tx = Producer(channel)
            fill(tx)
            tx.close()
            tx.close()
        elif how == "with":
            with Producer(channel) as tx:
                fill(tx)
        elif how == "left by an exception":
            with pytest.raises(KeyError), Producer(channel) as tx:
                fill(tx)
                raise KeyError
        elif how == "collected":
            tx = Producer(channel)
            fill(tx)
            del tx
            gc.collect()
        else:
            asyncio.run(use())
    (warning,) = [each for each in warned if each.category is ResourceWarning]
    assert f'"{channel}": 3 messages that no consumer has finished' in str(warning.message)
    assert "linger=" in str(warning.message)
    if how in ("close", "with"):
        assert warning.filename == __file__
    assert lost(caplog) == [3]


@pytest.mark.parametrize("strict", [False, True], ids=["default", "error"])
def test_the_end_of_the_process_tells_as_well(channel, strict):
    """By the log, which goes to standard error without being set up; `ResourceWarning` is ignored unless asked for."""
    code = (
        "import sys, numpy as np, shmtensor\ntx = shmtensor.Producer(sys.argv[1])\n"
        "tx.send(np.zeros(2)); tx.send(np.ones(2))\n"
    )
    options = ["-W", "error::ResourceWarning"] if strict else []
    done = subprocess.run(
        [sys.executable, *options, "-c", code, channel], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stderr.count("2 messages that no consumer has finished") == 1
    assert "linger=" in done.stderr


def test_nothing_is_said_while_somebody_can_receive_them(channel, caplog):
    with Consumer(channel) as rx:
        with Producer(channel) as tx:
            tx.send(np.array(1))
            tx.send(np.array(2))
        assert [int(msg.value) for msg in rx] == [1, 2]
    with Producer(channel) as tx, Consumer(channel) as rx:
        tx.send(np.array(1))
        rx.recv(timeout=PATIENCE).release()
    assert lost(caplog) == []


def test_the_last_of_several_producers_tells_of_all(channel, caplog):
    """The first one's messages would still have gone to a consumer that came."""
    one, two = Producer(channel), Producer(channel)
    for number in range(2):
        one.send(np.array(number))
    two.send(np.array(2))
    one.close()
    assert lost(caplog) == []
    with pytest.warns(ResourceWarning, match="3 messages that no consumer"):
        two.close()
    assert lost(caplog) == [3]


def test_what_a_consumer_had_not_finished_counts(channel, caplog):
    tx = Producer(channel)
    with Consumer(channel, acknowledge="release") as rx:
        for number in range(3):
            tx.send(np.array(number))
        rx.recv(timeout=PATIENCE).release()
        rx.recv(timeout=PATIENCE)
    with pytest.warns(ResourceWarning, match="2 messages that no consumer"):
        tx.close()


def test_one_message(channel):
    tx = Producer(channel)
    tx.send(np.zeros(1))
    with pytest.warns(ResourceWarning, match="1 message that no consumer has finished ends with"):
        tx.close()


def test_linger_that_was_long_enough_leaves_nothing_to_tell(channel, caplog):
    tx = Producer(channel)
    tx.send(np.zeros(1))
    thread = threading.Thread(target=tx.close, kwargs={"linger": 60})
    thread.start()
    with Consumer(channel) as rx:
        rx.recv(timeout=PATIENCE).release()
        thread.join()
    assert lost(caplog) == []


def test_who_closed_is_silent_in_a_forked_child(channel, caplog):
    with Producer(channel) as tx, Consumer(channel) as rx:
        tx.send(np.zeros(1))
        process = shmtensor.get_context("fork").Process(target=int)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        rx.recv(timeout=PATIENCE).release()
    assert lost(caplog) == []


def test_a_fan_out_says_nothing(channel, caplog):
    """A publisher's messages are for those who are there."""
    with Publisher(channel) as pub:
        pub.send(np.zeros(1))
    assert lost(caplog) == []


def waits(caplog) -> list[str]:
    return [text for record in caplog.records if "has waited" in (text := record.getMessage())]


@pytest.mark.parametrize("kind", ["fan-out", "work queue"])
@pytest.mark.parametrize("how", ["send", "loan", "asend"])
def test_a_long_wait_for_a_slot_says_once_who_holds_it(channel, caplog, monkeypatch, kind, how):
    monkeypatch.setattr(sending, "SLOW_S", 0.3)
    sender, receiver = (Publisher, Subscriber) if kind == "fan-out" else (Producer, Consumer)
    with receiver(channel) as rx, sender(channel, slots=1) as tx:
        tx.send(np.zeros(2))

        def work():
            if how == "send":
                tx.send(np.ones(2))
            elif how == "loan":
                with tx.loan((2,), np.float64) as loan:
                    loan.array[...] = 1
            else:
                asyncio.run(tx.asend(np.ones(2)))

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: waits(caplog))
        ticks = tx.statistics  # the wait goes on for some ticks: nothing more is said
        thread.join(1.0)
        assert thread.is_alive()
        assert ticks().waits == 1
        rx.recv(timeout=PATIENCE).release()
        thread.join(PATIENCE)
        assert rx.recv(timeout=PATIENCE).value.tolist() == [1, 1]
        (text,) = waits(caplog)
    assert f"pid {os.getpid()}" in text
    assert "all 1 slots wait" in text
    assert "receive faster" in text
    if kind == "fan-out":
        assert text.endswith("1 unread")  # who holds it, by what is stored: not only who is there


IDLE = """
import sys, shmtensor
with shmtensor.Subscriber(sys.argv[1]) as sub:
    print("joined", flush=True)
    sub.recv(timeout=120).release()
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_who_holds_nothing_is_not_said_to_be_waited_for(channel, caplog, monkeypatch):
    monkeypatch.setattr(sending, "SLOW_S", 0.3)
    fellow = Fellow(IDLE, channel)
    fellow.listen("joined")
    with Subscriber(channel) as rx, Publisher(channel, slots=1) as tx:
        tx.send(np.zeros(1))
        fellow.listen("done")
        with pytest.raises(shmtensor.RingFull) as caught:
            tx.send(np.zeros(1), timeout=0)
        thread = threading.Thread(target=tx.send, args=(np.zeros(1),))
        thread.start()
        wait_until(lambda: waits(caplog))
        rx.recv(timeout=PATIENCE).release()
        thread.join(PATIENCE)
        rx.recv(timeout=PATIENCE).release()
        fellow.say()
        fellow.end()
    (text,) = waits(caplog)
    said, holders = text.split("; held by ")
    assert (str(os.getpid()) in holders, str(fellow.process.pid) in holders) == (True, False)
    there = set(re.search(r"slots wait for receivers \(there: ([^)]*)\)", said).group(1).split(", "))
    assert there == {f"pid {os.getpid()}", f"pid {fellow.process.pid}"}
    assert "wait for receivers (there: pid " in str(caught.value)


def test_a_short_wait_says_nothing(channel, caplog):
    with Subscriber(channel), Publisher(channel, slots=1) as pub:
        pub.send(np.zeros(1))
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.zeros(1), timeout=0.3)
    assert waits(caplog) == []


def test_a_closed_consumer_whose_last_view_dies_last_says_what_ends_with_it(channel, caplog):
    """Until then a newcomer may still take the messages, so their producer has nothing to say."""
    tx, rx = shmtensor.Producer(channel), shmtensor.Consumer(channel)
    for number in range(3):
        tx.send(np.full(3, number))
    value = rx.recv(timeout=PATIENCE).value
    rx.close()
    tx.close()
    assert "no consumer has finished" not in caplog.text
    assert value.tolist() == [0, 0, 0]
    del value
    assert caplog.text.count("2 messages that no consumer has finished end with this closed Consumer") == 1
