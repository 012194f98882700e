"""A forked child keeps nothing of its parent alive, whenever the fork came; one failing hook stops no other."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor.memory import descriptors, lifecycle

from ..conftest import descriptors as descriptors_of_segments
from ..conftest import left_files
from ..faults.interrupts import Interrupt, interrupted, stride
from ..waiting import PATIENCE, runs, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def child_has(fd: int) -> bool:
    """Whether a child that another thread forks now has the descriptor, and it leads anywhere."""
    found = []

    def fork() -> None:
        pid = os.fork()
        if not pid:
            try:
                os._exit(os.readlink(f"/proc/self/fd/{fd}") != os.devnull)
            except OSError:
                os._exit(0)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return found != [0]


@pytest.mark.parametrize("pair", [("Publisher", "Subscriber"), ("Producer", "Consumer")])
def test_a_fork_while_a_file_is_being_opened(channel, pair, monkeypatch):
    """The descriptor is there, and nobody has heard of it yet."""
    make, take = (getattr(shmtensor, name) for name in pair)
    opened, inherited, real = [], [], os.open

    def open_and_fork(path, flags, *mode):
        fd = real(path, flags, *mode)
        if path.startswith(("/dev/shm/", "/proc/self/fd/")):
            opened.append(path)
            if child_has(fd):
                inherited.append(path)
        return fd

    monkeypatch.setattr(descriptors.os, "open", open_and_fork)
    with make(channel, slots=2, slot_bytes=64) as tx, take(channel) as rx:
        tx.send(np.arange(3))
        assert rx.recv(timeout=60).value.tolist() == [0, 1, 2]
    monkeypatch.undo()
    assert sum(path.startswith("/proc/self/fd/") for path in opened) >= 4, opened  # the locks
    assert not inherited


@pytest.mark.parametrize("pair", [("Publisher", "Subscriber"), ("Producer", "Consumer")])
def test_a_child_has_no_segment_of_its_parent(channel, pair):
    """It would keep the memory, of which no name is left, for as long as it lives."""
    make, take = (getattr(shmtensor, name) for name in pair)
    out, into = os.pipe()
    with make(channel, slots=2, slot_bytes=64) as tx, take(channel) as rx:
        tx.send(np.arange(3))
        message = rx.recv(timeout=60)
        pid = os.fork()
        if not pid:
            try:
                with open("/proc/self/maps") as maps:
                    found = [line.split(maxsplit=5)[-1].strip() for line in maps]
                for fd in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        found.append(os.readlink(f"/proc/self/fd/{fd}"))
                os.write(into, "\n".join(name for name in found if f"shmtensor.{channel}" in name).encode())
                with contextlib.suppress(shmtensor.ForkedError):
                    tx.send(np.arange(3))
                del tx, rx, message
                gc.collect()
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        os.close(into)
        with open(out) as told:
            left = told.read().splitlines()
        # those of the C library, which the parent's threads may be using just now
        assert not [name for name in left if "sem." not in name]
        assert message.value.tolist() == [0, 1, 2]
        del message


def test_a_queue_that_is_there_is_inherited_whoever_else_is_being_opened(monkeypatch):
    queue = shmtensor.SimpleQueue()
    real = os.open

    def open_and_fork(path, flags, *mode):
        fd = real(path, flags, *mode)
        if path.startswith("/proc/self/fd/"):
            assert child_has(queue._handle._keeper.fd)
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(descriptors.os, "open", open_and_fork)
        queue.put(np.arange(3))
    assert queue.get().tolist() == [0, 1, 2]
    queue.close()


def test_what_a_child_drops_keeps_its_number(tmp_path):
    """Python's mmap has a descriptor of its own of the same file, and closes it when it dies: by then, the number must
    not be another file's."""
    path = str(tmp_path / "file")
    with open(path, "w+b") as file:
        file.truncate(4096)
        mapping = mmap.mmap(file.fileno(), 4096)
    (own,) = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == path]
    pid = os.fork()
    if not pid:
        code = 1
        try:
            descriptors.empty_all_of(path)
            assert os.path.realpath(f"/proc/self/fd/{own}") == os.devnull
            others = [os.open("/", os.O_PATH) for _ in range(own + 1)]
            mapping.close()
            for each in others:
                os.fstat(each)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    mapping.close()


class Owner:
    def __init__(self, log, name, failures=0, error=RuntimeError):
        self.log, self.name, self.failures, self.error = log, name, failures, error
        lifecycle.track(self, type(self).drop_in_child)

    def drop_in_child(self):
        if self.failures:
            self.failures -= 1
            raise self.error(self.name)
        os.write(self.log, self.name.encode())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_fails_in_a_child_is_reported_and_the_rest_is_done(error, monkeypatch):
    """What was only interrupted is tried again."""
    out, into = os.pipe()
    monkeypatch.setattr(lifecycle, "_functions", [*lifecycle._functions, lambda: os.write(into, b"f")])
    owners = [Owner(into, str(number)) for number in range(4)]
    owners += [Owner(into, "x", 2, error), Owner(into, "y", 1, error), Owner(into, "z")]

    def failing():
        raise error

    lifecycle.call_in_child(failing)
    report = logging.Handler()
    report.emit = lambda record: os.write(into, b"!")
    lifecycle.log.addHandler(report)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    lifecycle.log.removeHandler(report)
    assert sorted(os.read(out, 100).decode()) == sorted("0123yzf!!")
    lifecycle._functions.remove(failing)
    os.close(out)
    os.close(into)
    assert owners


def left_in_a_child_that_is_interrupted(at, endpoints):
    """Fork, and raise an exception at boundary `at` of what the interpreter calls in the child. Whether there is such a
    boundary, whether it was one of this test's own, and what the child then has of its parent.

    The interpreter forgets the signals that are pending as it forks; so it does not fork here, and calls nothing.
    """
    out, into = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        try:
            attempt = interrupted(call_all, at)
            found = attempt.reached, attempt.raised, descriptors_of_segments(), [it._state for it in endpoints]
            os.write(into, repr(found).encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(pid, 0)
    with os.fdopen(out) as said:
        return eval(said.read())


def call_all():
    """As the interpreter does, which reports what one of them raises."""
    for function in lifecycle.in_child:
        try:
            function()
        except Interrupt:
            pass


@pytest.mark.parametrize("pair", [("Publisher", "Subscriber"), ("Producer", "Consumer")])
def test_an_exception_in_a_child_that_begins_leaves_it_nothing(channel, pair):
    """At any boundary, the first one as well: it keeps no lock of its parent, and has no endpoint of it."""
    make, take = (getattr(shmtensor, each) for each in pair)
    with make(channel) as tx, take(channel) as rx:
        tx.send(np.zeros(3))
        message = rx.recv(timeout=PATIENCE)
        at, reached, before = 1, True, descriptors_of_segments()
        while reached:
            reached, is_own, files, states = left_in_a_child_that_is_interrupted(at, (tx, rx))
            if not is_own:
                assert not {it for it in files & before if channel in it}, at
                assert states == ["forked", "forked"], at
            at += 1 if at < 8 else stride(7)
        assert at > 100
        message.release()


STORM = """
import os, sys, threading, warnings
import numpy as np
import shmtensor
warnings.simplefilter("ignore", DeprecationWarning)
name, pairs = sys.argv[1], [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
children = []

def storm():
    while len(children) < 40:
        pid = os.fork()
        if not pid:
            os.read(0, 1)  # until the test lets go
            os._exit(0)
        children.append(pid)

thread = threading.Thread(target=storm)
thread.start()
number = 0
while thread.is_alive():
    make, take = pairs[number % 2]
    number += 1
    with make(f"{name}-{number % 3}", slots=2, slot_bytes=64) as tx, take(tx.name) as rx:
        tx.send(np.arange(3))
        rx.recv(timeout=60)
living = [cls(f"{name}-last-{at}") for at, pair in enumerate(pairs) for cls in pair]
print(*children, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_children_of_a_storm_of_forks_keep_no_dead_parent_alive(channel):
    """They never exec, and live on when it is killed."""
    parent = subprocess.Popen([sys.executable, "-c", STORM, channel], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 40
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(map(runs, children))
    shmtensor.Publisher(f"{channel}-sweeps").close()
    assert not left_files()
    parent.stdin.close()
    parent.stdout.close()
    wait_until(lambda: not any(map(runs, children)))


@pytest.mark.parametrize("pair", [("Publisher", "Subscriber"), ("Producer", "Consumer")])
def test_a_child_of_a_receiver_whose_views_outlive_it_ends_clean(channel, pair):
    """The receiver is closed and still a member. The child has an endpoint of its own to close, and nothing else."""
    program = (
        "import multiprocessing, sys, numpy, shmtensor\n"
        "tx, rx = (getattr(shmtensor, name)(sys.argv[1]) for name in sys.argv[2:])\n"
        "tx.send(numpy.ones(3))\n"
        "view = rx.recv(timeout=60).value\n"
        "rx.close()\n"
        "def work():\n"
        "    kept.append(shmtensor.Publisher(sys.argv[1] + '-of-child'))\n"
        "kept = []\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join()\n"
        "del view\n"
        "tx.close()\n"
        "print(child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, channel, *pair], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
