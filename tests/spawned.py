"""What processes that tests spawn run. No torch here: they import a function's module, which takes seconds with it."""

from __future__ import annotations

import os
import signal
import sys

import shmtensor
from shmtensor import Subscriber

# --- of endpoints and queues


def echo(wishes, answers):
    for item in iter(wishes.get, None):
        answers.put(item)


def answer(tasks, answers):
    for task in iter(tasks.get, None):
        task["x"] += 1
        answers.put((os.getpid(), task))


def receive_all(pipe, channel):
    with Subscriber(channel) as sub:
        pipe.send("ready")
        pipe.send([int(msg.value[0]) for msg in sub])


def send_labelled(kind, channel, label):
    """Send one message with a label, and die."""
    with getattr(shmtensor, kind)(channel, label=label) as tx:
        tx.send({"number": 1})
        os.kill(os.getpid(), signal.SIGKILL)


# --- roles of the benchmarks


def meet_and_return(meet, value):
    meet()
    return value, os.getpid(), "torch" in sys.modules


def fail(meet):
    raise ValueError("on purpose")


def hang(meet, pipe):
    """Starts a process of its own and waits for ever."""
    child = os.fork()
    if child:
        pipe.send(child)
    signal.pause()


def hold_in_group(pipe, channel, group, take):
    """Take so many messages of a group at a time, and keep them until "again" comes. -1: one that is done, viewed."""
    rx = shmtensor.Subscriber(channel, group=group, acknowledge="release")
    pipe.send("joined")
    try:
        while True:
            messages = [rx.recv() for _ in range(abs(take))]
            views = [message.value for message in messages]
            for message in messages:
                if take < 0:
                    message.release()
            for view in views:
                pipe.send(int(view.flat[0]))
            pipe.recv()
            for message in messages:
                message.release()
            del views
    except (EOFError, shmtensor.EndOfStream):
        rx.close()
