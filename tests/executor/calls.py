"""What the workers of the tests of the executor run. No torch here: a spawned worker that gets arrays imports none."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

PATIENCE = 120


def is_in_a_slot(array: np.ndarray) -> bool:
    """Whether an array's memory is a mapped ring."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < end:
            return "/dev/shm/shmtensor.executor-" in line
    return False


def same(value):
    return value


def twice(value):
    return value * 2


def ones(count):
    return np.ones(count, np.uint8)


def deep(value, *, scale):
    return {
        "sum": [value["x"][0].sum().item()],
        "y": (value["x"][0] * scale, {"t": value["t"] + 1}),
        "name": value["name"],
    }


def describe(value):
    return is_in_a_slot(value), value.flags.writeable


def fail(message):
    raise LookupError(message)


def leave(code):
    sys.exit(code)


def interrupt():
    raise KeyboardInterrupt


def break_a_pool():
    raise BrokenProcessPool("a pool of this call's own")


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def die_first(path, times, value):
    """Die at the first `times` calls."""
    with open(path, "ab") as log:
        log.write(b"x")
        before = log.tell() - 1
    if before < times:
        kill_oneself()
    return value


def append(path, value):
    with open(path, "ab") as log:
        log.write(b"x")
    return value


def meet(fifo):
    """Wait until the parent opens the other end; tell it who runs."""
    with open(fifo, "w") as end:
        end.write(str(os.getpid()))


def stay(fifo, value=None):
    """Wait until the parent has opened and closed the other end."""
    with open(fifo) as end:
        end.read()
    return value


_kept = []


def kind_of_process():
    return type(multiprocessing.current_process()).__name__


def keep(value):
    _kept.append(value)
    return len(_kept)


def keep_and_stay(fifo, value):
    keep(value)
    return stay(fifo)


def set_up(value):
    _kept.append(value)


def first_kept():
    return _kept[0]


def note(number, large=None):
    _kept.append(number)
    return list(_kept)


def fail_at_length(number, size):
    raise LookupError(str(number) * size)


def wait_at_the_gate():
    return _kept[0].wait(PATIENCE)


def fail_to_begin():
    raise RuntimeError("no licence")


class Unpicklable:
    def __reduce__(self):
        raise pickle.PicklingError("not for others")


class Unreadable:
    def __reduce__(self):
        return fail, ("not to be read",)


class NotRebuilt(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, code, text):
        super().__init__(text)


class NotPickled(Exception):
    def __init__(self, text, failure=None):
        super().__init__(text)
        self.lock, self.failure = threading.Lock(), failure

    def __reduce__(self):
        raise self.failure or TypeError("cannot pickle it")


class NotAnException(Exception):
    """Comes as a number."""

    def __reduce__(self):
        return int, ("7",)


def fail_in_a_way(kind):
    """With an exception that does not reach the caller."""
    text = "the text"
    if kind == "not pickled":
        raise NotPickled(text)
    if kind == "nor what says so":
        raise NotPickled(text, NotPickled("again"))
    if kind == "no exception":
        raise NotAnException(text)
    raise NotRebuilt(3, text)


def fail_unreadably(path=None):
    if path is not None:
        append(path, None)
    raise NotRebuilt(3, "the text")


def fail_with(value):
    raise LookupError(value)


def fail_with_a_cause(value):
    try:
        raise LookupError("the cause")
    except LookupError:
        raise RuntimeError("the error") from None


def stay_and_drop(fifo):
    """Stay; then drop what was kept."""
    stay(fifo)
    _kept.clear()


def name_of_main_thread():
    main = threading.main_thread()
    return main.name, type(main).__name__


def interrupt_after_the_next_post():
    """Ctrl-C when a result has its slot and no process knows of it."""
    from shmtensor.mp.direct import DirectProducer

    post = DirectProducer.post

    def post_and_raise(*args, **options):
        DirectProducer.post = post
        post(*args, **options)
        raise KeyboardInterrupt

    DirectProducer.post = post_and_raise
