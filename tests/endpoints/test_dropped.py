"""A receiver that nobody closes and nobody refers to any more, while a view of a message lives. And closed endpoints
that are still referred to: the memory of their rings is returned."""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest
import torch

from shmtensor import Client, Consumer, Producer, Publisher, Queue, RingFull, Server, Subscriber, get_context
from shmtensor.endpoints.base import lingering

from ..conftest import descriptors, left_files, mappings
from ..waiting import PATIENCE

VALUES = {
    "array": np.arange(4),
    "small tensor": torch.arange(4),
    "large tensor": torch.zeros(100_000, dtype=torch.int64),
    "dict": {"a": torch.arange(4)},
}


def _of(value):
    return value["a"] if isinstance(value, dict) else value


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("makes", [(Publisher, Subscriber), (Producer, Consumer)], ids=["fan-out", "work queue"])
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_its_view_stays_intact_and_its_slot_comes_back(channel, name, makes, in_a_cycle):
    value = VALUES[name]
    sender, receiver = makes[0](channel, slots=3, slot_bytes="1MiB", full="error"), makes[1](channel)
    sender.send(value)
    message = receiver.recv(timeout=PATIENCE)
    message.release()  # done; the value below is all that is left of it
    message = None
    sender.send(value)
    message = receiver.recv(timeout=PATIENCE)
    view = _of(message.value)
    if makes[1] is Consumer:
        message.release()
    message = None
    if in_a_cycle:
        ring = [receiver]
        ring.append(ring)
        ring = None
    receiver = None
    gc.collect()

    other = {"a": value["a"] + 1} if isinstance(value, dict) else value + 1
    for _ in range(2 if makes[1] is Consumer else 10):  # nobody is left to take them
        sender.send(other)
    if makes[1] is Consumer:
        with pytest.raises(RingFull):
            sender.send(other)
    assert (np.asarray(view) == np.asarray(_of(value))).all()

    view = None
    gc.collect()  # the receiver goes, too
    gc.collect()
    if makes[1] is Consumer:  # what was not taken waits for another
        with Consumer(channel) as another:
            for _ in range(2):
                another.recv(timeout=PATIENCE).release()
    for _ in range(3):
        sender.send(value)
    assert sender.statistics().receivers == 0
    sender.close()


def test_a_latest_only_reader_keeps_its_message(channel):
    sender, receiver = Publisher(channel, slots=2, slot_bytes=4096), Subscriber(channel, delivery="latest")
    sender.send(np.arange(4))
    view = receiver.recv(timeout=PATIENCE).value
    receiver = None
    gc.collect()
    for _ in range(10):
        sender.send(np.arange(4) + 1)
    assert view.tolist() == [0, 1, 2, 3]
    view = None
    gc.collect()
    gc.collect()
    for _ in range(10):
        sender.send(np.arange(4))
    assert sender.statistics().receivers == 0
    sender.close()


def _one_view(channel, kind):
    """A sender, a receiver, and the view of a message as the only item of a list."""
    sender = (Producer if kind is Consumer else Publisher)(channel)
    receiver = kind(channel)
    sender.send(np.arange(4))
    return sender, receiver, [receiver.recv(timeout=PATIENCE).value]


@pytest.mark.parametrize("kind", [Subscriber, Consumer])
def test_a_closed_receiver_goes_without_the_collector(channel, kind):
    sender, receiver, views = _one_view(channel, kind)
    gc.collect()
    gc.disable()
    try:
        receiver.close()
        there = weakref.ref(receiver)
        receiver = None
        assert there() is not None
        views.clear()
        assert there() is None
    finally:
        gc.enable()
    sender.close()


@pytest.mark.parametrize("kind", [Subscriber, Consumer])
def test_a_dropped_receiver_that_was_alone_is_not_kept(channel, kind):
    sender, receiver, views = _one_view(channel, kind)
    sender.close()
    there, receiver = weakref.ref(receiver), None
    gc.collect()
    gc.collect()
    assert not [endpoint for endpoint in lingering if endpoint.name == channel]
    assert views[0].tolist() == [0, 1, 2, 3]
    views.clear()
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("keep", ["view", "message"])
def test_one_that_refers_to_its_own_message_holds_nobody_up(channel, keep):
    """It leaves when it is collected, even if it refers to its own message; the views keep their bytes."""
    with Publisher(channel, slots=4, full="error") as pub:
        sub = Subscriber(channel)
        for number in range(9):
            pub.send(np.full(4, number))
            msg = sub.recv(timeout=PATIENCE)
        sub.own = msg if keep == "message" else msg.value
        kept = msg.value
        del msg, sub
        gc.collect()
        for _ in range(20):
            pub.send(np.full(4, -1))
        assert kept.tolist() == [8] * 4
        (left,) = lingering  # for the sake of the lease, and with it what it refers to
        left.own = None
        del kept
        gc.collect()
        assert not lingering
        del left
    assert not left_files()


def mapped_rings():
    """The rings of which this process still has memory."""
    gc.collect()
    return {line for line in mappings() | descriptors() if ring_file.search(line)}


ring_file = re.compile(r"/shmtensor\.[^/]*,[0-9a-f]{16},[0-9]+( \(deleted\))?$")


def fan_out(channel):
    sub, latest = Subscriber(channel), Subscriber(channel, delivery="latest")
    pub = Publisher(channel)
    pub.send(np.zeros(10))
    return (sub, latest, pub), [receiver.recv(timeout=PATIENCE) for receiver in (sub, latest)]


def work_queue(channel):
    consumer, producer = Consumer(channel), Producer(channel)
    producer.send(np.zeros(10))
    return (consumer, producer), [consumer.recv(timeout=PATIENCE)]


def service(channel):
    server, client = Server(channel), Client(channel)
    future = client.submit(np.zeros(10), timeout=PATIENCE)
    request = server.recv(timeout=PATIENCE)
    request.reply(request.value)
    return (server, client), [future.result(timeout=PATIENCE)]


def queue(channel):
    queue = Queue()
    queue.put(np.zeros(100_000))
    return (queue,), [queue.get(timeout=PATIENCE)]


def pipe(channel):
    ends = get_context("fork").Pipe()
    ends[0].send(np.zeros(100_000))
    return ends, [ends[1].recv()]


@pytest.mark.parametrize("makes", [fan_out, work_queue, service, queue, pipe])
@pytest.mark.parametrize("views_first", [True, False], ids=["views end first", "views end last"])
def test_a_closed_endpoint_keeps_no_ring(channel, makes, views_first):
    ends, got = makes(channel)
    assert mapped_rings()
    if views_first:
        got.clear()
    for end in ends:
        end.close()
    assert bool(mapped_rings()) is not views_first
    got.clear()
    assert mapped_rings() == set()
    assert left_files() == set()
    for end in ends:
        assert "clos" in repr(end)
        end.close()
