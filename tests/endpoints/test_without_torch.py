"""A process without torch on a channel that carries tensors: nobody loses what this process cannot read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import Client, Consumer, Producer, Publisher, Server

from ..scenes import HIDDEN, Fellow
from ..waiting import PATIENCE, wait_until

TEXT = "the message has torch tensors, but torch is not installed: pip install '.[torch]' in a checkout of shmtensor"

BEGINNING = (
    HIDDEN.format(name="torch")
    + """
import asyncio, threading
import numpy as np, shmtensor

name, PATIENCE = sys.argv[1], 120.0
kept = []  # a program may keep an error, and with it the frames that it came through

def say(*what):
    print(*what, flush=True)

def attempt(call):
    try:
        message = call()
    except shmtensor.DependencyError as error:
        kept.append(error)
        assert error.name == "torch", error.name
        return str(error).removeprefix(f'channel "{name}": ')
    value = message.value if isinstance(message, shmtensor.Message) else message
    return value.tolist()
"""
)


def without_torch(code: str, *args: object) -> Fellow:
    """A process where torch cannot be imported, once it has said that it is ready."""
    fellow = Fellow(BEGINNING + code, *args)
    fellow.listen("ready")
    return fellow


# --- work queue

CONSUMER = """
rx = shmtensor.Consumer(name)
calls = {
    "recv": lambda: rx.recv(timeout=PATIENCE),
    "arecv": lambda: asyncio.run(rx.arecv(timeout=PATIENCE)),
    "copy": lambda: rx.recv(timeout=PATIENCE, copy=True),
    "iterate": lambda: next(iter(rx)),
}
say("ready")
for line in sys.stdin:
    say(attempt(calls[line.strip()]))
held = rx.statistics()
assert (held.received, held.redelivered, held.bad_records, held.leases) == (1, 0, 0, 1), held  # the array, not yet done
rx.close()
"""


def test_a_tensor_stays_for_a_consumer_that_has_torch(channel):
    with Producer(channel) as tx:
        fellow = without_torch(CONSUMER, channel)
        tx.send(torch.arange(3))
        tx.send(np.arange(4))
        for call in ("recv", "recv", "arecv", "copy", "iterate", "recv", "recv"):  # more often than `max_attempts`
            fellow.say(call)
            fellow.listen(f"message 1: {TEXT}")
        with Consumer(channel) as rx:
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value.tolist() == [0, 1, 2]
                assert message.attempt == 1
            fellow.say("recv")
            fellow.listen("[0, 1, 2, 3]")
            fellow.end()


HESITANT = """
class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not asked:
            asked.append(name)
            say("decodes")
            sys.stdin.readline()

asked = []
sys.meta_path.insert(0, Waits())
rx = shmtensor.Consumer(name)
say("ready")
say(attempt(lambda: rx.recv(timeout=PATIENCE)))
rx.close()
"""


@pytest.mark.parametrize("waits", [False, True], ids=["comes-again", "waits"])
def test_a_consumer_that_has_walked_past_gets_it(channel, waits):
    got = []

    def receive(rx):
        with rx.recv(timeout=PATIENCE) as message:
            got.append((message.value.tolist(), message.attempt))

    with Producer(channel) as tx, Consumer(channel) as rx:
        stopped = without_torch(HESITANT, channel)
        tx.send(torch.arange(3))
        stopped.listen("decodes")
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)  # the other one has it
        thread = threading.Thread(target=receive, args=(rx,))
        if waits:
            thread.start()
            wait_until(lambda: rx.statistics().sleeps >= 2)
        stopped.say()
        stopped.listen(f"message 1: {TEXT}")
        if not waits:
            thread.start()
        thread.join()
        assert got == [([0, 1, 2], 1)]
        stopped.end()


INSISTENT = """
rx = shmtensor.Consumer(name)
say("ready")
while isinstance(text := attempt(lambda: rx.recv(timeout=PATIENCE)), str):
    if len(kept) == 3:
        say("insists")
    del kept[3:]
say(text)
rx.close()
"""


def test_one_that_asks_again_and_again_does_not_keep_it_from_the_others(channel):
    with Producer(channel) as tx:
        fellow = without_torch(INSISTENT, channel)
        tx.send(torch.arange(3))
        fellow.listen("insists")
        with Consumer(channel) as rx, rx.recv(timeout=PATIENCE) as message:
            assert message.value.tolist() == [0, 1, 2]
            tx.send(np.arange(4))
            fellow.listen("[0, 1, 2, 3]")
        fellow.end()


# --- fan-out

SUBSCRIBER = """
sub = shmtensor.Subscriber(name, delivery=sys.argv[2])
calls = {
    "recv": lambda: sub.recv(timeout=PATIENCE),
    "arecv": lambda: asyncio.run(sub.arecv(timeout=PATIENCE)),
    "copy": lambda: sub.recv(timeout=PATIENCE, copy=True),
    "iterate": lambda: next(iter(sub)),
}
say("ready")
for line in sys.stdin:
    said = attempt(calls[line.strip()])
    held = sub.statistics()
    assert held.leases == 0, held
    assert held.bad_records == len(kept), held
    say(said)
sub.close()
"""


@pytest.mark.parametrize("delivery", ["all", "latest"])
def test_a_subscriber_raises_and_goes_on(channel, delivery):
    with Publisher(channel, slots=2, full="error") as pub:
        fellow = without_torch(SUBSCRIBER, channel, delivery)
        for number, call in enumerate(("recv", "arecv", "copy", "iterate", "recv")):
            pub.send({"a": [torch.arange(number + 1)], "b": np.arange(3)}, meta={"number": number})
            fellow.say(call)
            fellow.listen(f"message {2 * number + 1}: {TEXT}")
            pub.send(np.arange(number))
            fellow.say(call)
            fellow.listen(str(list(range(number))))
        fellow.end()


def test_a_subscriber_without_torch_gets_the_history(channel):
    with Publisher(channel, slots=4, history=2) as pub:
        pub.send(torch.arange(3))
        pub.send(np.arange(2))
        fellow = without_torch(SUBSCRIBER, channel, "all")
        for said in (f"message 1: {TEXT}", "[0, 1]"):
            fellow.say("recv")
            fellow.listen(said)
        fellow.end()


# --- request and reply

SERVER = """
server = shmtensor.Server(name)
calls = {"run": lambda: server.run(np.negative), "recv": lambda: server.recv(timeout=PATIENCE)}
say("ready")
for line in sys.stdin:
    say(attempt(calls[line.strip()]))
server.close()
"""


@pytest.mark.parametrize("retry", [True, False])
def test_a_request_with_tensors_waits_for_a_server_that_has_torch(channel, retry):
    with Client(channel) as client:
        fellow = without_torch(SERVER, channel)
        future = client.submit(torch.arange(3), retry=retry)
        for call in ("recv", "run", "recv", "run", "recv"):
            fellow.say(call)
            fellow.listen(f"message 1: {TEXT}")
        fellow.say("run")
        fellow.listen(f"message 1: {TEXT}")
        with Server(channel) as server:
            thread = threading.Thread(target=server.run, args=(torch.neg,))
            thread.start()
            assert future.result(PATIENCE).tolist() == [0, -1, -2]
            fellow.end()
            server.stop()
            thread.join()
            assert server.statistics().retried == 0


CLIENT = """
client = shmtensor.Client(name)
calls = {
    "request": lambda n: client.request(np.arange(n)),
    "submit": lambda n: client.submit(np.arange(n)).result(PATIENCE),
    "map": lambda n: next(client.map([np.arange(n)])),
    "arequest": lambda n: asyncio.run(client.arequest(np.arange(n))),
}
say("ready")
for call in calls.values():
    other = client.submit(np.arange(2))
    callback = threading.Event()
    other.add_done_callback(lambda _: callback.set())  # called where the driver thread does its work
    say(attempt(lambda: call(3)))
    assert callback.wait(PATIENCE)
    assert other.result(PATIENCE).tolist() == [0, 1]
    assert attempt(lambda: call(4)) == [0, 1, 2, 3]
assert client.statistics().errors == len(calls), client.statistics()
del other  # else it leaves with this process, and what is left of it with the next sweep
client.close()
"""


def test_a_call_whose_reply_has_tensors_ends_with_the_error(channel):
    with Server(channel) as server:
        thread = threading.Thread(target=server.run, args=(lambda it: torch.from_numpy(it) if len(it) == 3 else it,))
        thread.start()
        fellow = without_torch(CLIENT, channel)
        for _ in range(4):
            fellow.listen(f"the reply cannot be read: {TEXT}")
        fellow.end()
        server.stop()
        thread.join()


# --- queues


GETTER = """
import multiprocessing

spawn = multiprocessing.get_context("spawn")
queue = shmtensor.Queue(ctx=spawn)
name = queue._handle.getter.name
here, there = spawn.Pipe()
code = '''
import torch
put(torch.arange(3))
put(torch.arange(4).numpy())
pipe.send("put")
pipe.recv()
pipe.send(get().tolist())
'''
process = spawn.Process(target=exec, args=(code, {"put": queue.put, "get": queue.get, "pipe": there}))
process.start()
say("ready")
assert here.poll(PATIENCE)
here.recv()
for _ in range(7):
    say(attempt(queue.get))
here.send(1)
assert here.poll(PATIENCE)
say(here.recv())
process.join()
say(attempt(queue.get))
queue.close()
"""


def test_an_item_with_tensors_stays_in_the_queue(channel):
    fellow = without_torch(GETTER, channel)
    for said in (*[f"message 1: {TEXT}"] * 7, "[0, 1, 2]", "[0, 1, 2, 3]"):
        fellow.listen(said)
    fellow.end()
