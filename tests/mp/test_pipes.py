"""`get_context(...).Pipe`: the standard library's connections with values through slots; deaths, memory, leftovers.

CPython's own tests of its connections are run by test_cpython_queues.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from multiprocessing import connection, resource_sharer

import numpy as np
import pytest
import torch

import shmtensor

from ..conftest import left_files
from ..forkservers import preloaded
from ..implementations import once
from ..scenes import own_shm, play
from ..waiting import wait_until
from .test_queues import VALUES, same

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")

LONG = 120  # seconds; only bounds a hang
METHODS = ["fork", "forkserver", "spawn"]
LARGE = 1 << 16
"""Elements of an array that arrives as a view."""


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("torch", "numpy", "shmtensor.mp.connection"):
        yield


@pytest.fixture(autouse=True)
def no_pipe_is_left():
    yield
    gc.collect()
    assert files() == []


def files() -> list[str]:
    return sorted(left_files("pipe"))


@contextlib.contextmanager
def pipe(duplex=True, method="fork", **options):
    one, other = shmtensor.get_context(method).Pipe(duplex, **options)
    with one, other:
        yield one, other


@pytest.mark.parametrize("name", [name for name in VALUES if name != "partial"])  # which equals itself only
def test_values(name):
    with pipe() as (one, other):
        for sender, receiver in ((one, other), (other, one)):
            sender.send(VALUES[name])
            same(receiver.recv(), VALUES[name])


def test_what_arrives_belongs_to_the_receiver():
    sent = np.arange(LARGE)
    with pipe(False) as (reader, writer):
        writer.send([sent, sent[:10], "name"])
        sent[:] = 0
        whole, part, name = reader.recv()
        assert (whole == np.arange(LARGE)).all()
        whole += 1
        part += 1
        assert name == "name"
        with pytest.raises(OSError, match="read-only"):
            reader.send(1)
        with pytest.raises(OSError, match="write-only"):
            writer.recv()
    assert (whole[10:] == np.arange(LARGE)[10:] + 1).all(), "valid after the end of the pipe"


def test_the_rest_is_the_standard_librarys():
    with pipe() as (one, other):
        assert isinstance(one, connection.Connection)
        assert (one.readable, one.writable, one.closed) == (True, True, False)
        assert "read-write" in repr(one)
        assert not other.poll()
        one.send_bytes(b"some bytes")
        assert other.poll(LONG)
        assert other.recv_bytes() == b"some bytes"
        one.send_bytes(pickle.dumps({"pickled": "elsewhere"}))
        assert other.recv() == {"pickled": "elsewhere"}
        one.send(np.ones(LARGE))
        assert connection.wait([one, other], LONG) == [other]
        assert other.recv().sum() == LARGE
    assert one.closed
    with pytest.raises(OSError, match="closed"):
        one.send(1)
    one.close()


def echo(end, others=()):
    for other in others:
        other.close()
    with contextlib.suppress(EOFError):
        while True:
            end.send(end.recv())
    end.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_to_a_child_and_back(method):
    with pipe(method=method) as (mine, theirs):
        ctx = shmtensor.get_context(method)
        child = ctx.Process(target=echo, args=(theirs, [mine] if method == "fork" else []))
        child.start()
        theirs.close()
        for number in range(20):
            mine.send({"tensor": torch.full((LARGE,), number), "number": number})
            got = mine.recv()
            assert (got["tensor"] == number).all()
            assert got["number"] == number
        mine.close()
        child.join(LONG)
        assert child.exitcode == 0
        del got


def pass_on(end):
    """Answer by the connection that comes first."""
    inner = end.recv()
    inner.send(np.full(LARGE, 5))
    inner.close()
    end.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_connection_through_a_connection(method):
    with pipe(method=method) as (mine, theirs), pipe(False, method=method) as (reader, writer):
        child = shmtensor.get_context(method).Process(target=pass_on, args=(theirs,))
        child.start()
        mine.send(writer)
        writer.close()
        assert (reader.recv() == 5).all()
        child.join(LONG)
        assert child.exitcode == 0


def send_and_end(end, how):
    end.send(np.full(LARGE, 1))
    end.send("last")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ends"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_was_sent_outlives_its_sender(method, how):
    with pipe(False, method=method) as (reader, writer):
        child = shmtensor.get_context(method).Process(target=send_and_end, args=(writer, how))
        child.start()
        writer.close()
        child.join(LONG)
        assert (reader.recv() == 1).all()
        assert reader.recv() == "last"
        with pytest.raises(EOFError):
            reader.recv()


@pytest.mark.parametrize("value", [1, np.zeros(LARGE)], ids=["small", "large"])
def test_no_process_has_the_other_end(value):
    with pipe(False) as (reader, writer):
        reader.close()
        with pytest.raises(BrokenPipeError):
            writer.send(value)
        assert not writer.closed


def test_what_was_refused_holds_no_memory():
    with pipe(False, max_bytes="1MiB") as (reader, writer):
        reader.close()
        for _ in range(20):  # 10 MiB
            with pytest.raises(BrokenPipeError):
                writer.send(np.zeros(LARGE))


def test_a_sender_waits_for_room():
    with pipe(False, max_bytes="1MiB") as (reader, writer):
        sent = threading.Thread(
            target=lambda: [writer.send(np.full(LARGE, number)) for number in range(8)], daemon=True
        )
        sent.start()
        for number in range(8):
            assert (reader.recv() == number).all()
        sent.join(LONG)
        assert not sent.is_alive()


def test_a_sender_that_waits_learns_that_the_receiver_has_gone():
    with pipe(False, max_bytes="1MiB") as (reader, writer):
        raised = []

        def send():
            try:
                while True:
                    writer.send(np.zeros(LARGE))
            except BrokenPipeError as error:
                raised.append(error)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        assert reader.poll(LONG)
        reader.close()
        sender.join(LONG)
        assert len(raised) == 1


@pytest.mark.slow
def test_a_receiver_that_keeps_everything():
    with pipe(False, max_bytes="1MiB") as (reader, writer):
        kept = []
        with pytest.raises(shmtensor.ResourceError, match=r"no room for an object of 512\.1 KiB.*keeps.*max_bytes=1"):
            for _ in range(8):
                writer.send(np.zeros(LARGE))
                kept.append(reader.recv())
        with pytest.raises(shmtensor.ResourceError, match=r"an object of 2\.0 MiB is larger than max_bytes=1\.0 MiB"):
            writer.send(np.zeros(1 << 21, np.uint8))
        kept.clear()
        writer.send(np.ones(LARGE))
        assert reader.recv().sum() == LARGE


@once("in an interpreter of its own")
def test_a_first_object_that_a_small_shm_has_no_room_for():
    play(a_large_object_in_a_small_shm, mounts=(own_shm("size=16m"),))


def a_large_object_in_a_small_shm() -> None:
    with pipe(False, max_bytes="64MiB") as (reader, writer):
        why = r"no ring for a message of 20\.0 MiB of channel \S+ max_bytes=64\.0 MiB, .* free: send less at a time, "
        with pytest.raises(shmtensor.ResourceError, match=why):
            writer.send(np.zeros(20 << 20, np.uint8))
        writer.send(np.zeros(1 << 20, np.uint8))
        with pytest.raises(shmtensor.ResourceError, match=r"\d MiB are in rings .*: send the largest first, "):
            writer.send(np.zeros(20 << 20, np.uint8))
        assert reader.recv().nbytes == 1 << 20


def test_what_cannot_be_pickled_is_not_sent():
    with pipe(False) as (reader, writer):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            writer.send([np.zeros(LARGE), lambda: 1])
        writer.send(3)
        assert reader.recv() == 3


@pytest.mark.parametrize("value", ["outer", np.arange(LARGE)], ids=["small", "large"])
def test_a_send_of_a_signal_handler_inside_a_send(monkeypatch, value):
    """It is written after the message that it interrupts, which may be half written."""
    write, halves = os.write, [3, None]

    def interrupted(fd, data):
        if not halves or fd != writer.fileno():
            return write(fd, data)
        written = write(fd, data[: halves.pop(0)])
        signal.raise_signal(signal.SIGUSR1)
        return written

    def handle(*_):
        writer.send("inside")
        writer.send_bytes(b"bytes")
        with pytest.raises(shmtensor.ReentrantError, match="only small objects"):
            writer.send(np.zeros(3))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pipe(False) as (reader, writer), monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted)
            writer.send(value)
            assert np.array_equal(reader.recv(), value)
            for _ in range(2):
                assert reader.recv() == "inside"
                assert reader.recv_bytes() == b"bytes"
            writer.send(value)
            assert np.array_equal(reader.recv(), value)
            assert not reader.poll()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_calls_of_a_signal_handler_inside_a_recv(monkeypatch):
    read, seen = os.read, []

    def interrupted(fd, count):
        data = read(fd, count)
        signal.raise_signal(signal.SIGUSR1)
        return data

    def handle(*_):
        for receive in (reader.recv, reader.recv_bytes, lambda: reader.recv_bytes_into(bytearray(9))):
            with pytest.raises(shmtensor.ReentrantError, match="inside another recv"):
                receive()
        reader.send("from the handler")
        seen.append(reader.poll())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pipe() as (reader, writer), monkeypatch.context() as patch:
            writer.send("first")
            writer.send("second")
            patch.setattr(os, "read", interrupted)
            assert reader.recv() == "first"
            patch.undo()
            assert reader.recv() == "second"
            assert len(seen) == 2
            for _ in seen:
                assert writer.recv() == "from the handler"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_is_inside_no_call_of_its_parents_threads():
    """A thread of the child may have the identity of one of those."""
    with pipe() as (one, other):
        thread = threading.Thread(target=one.recv, daemon=True)
        thread.start()
        wait_until(lambda: one._slots.receiver)
        child = shmtensor.get_context("fork").Process(target=check_not_inside, args=(one,))
        child.start()
        child.join(LONG)
        assert child.exitcode == 0
        other.send("end")
        thread.join(LONG)


def check_not_inside(end):
    assert not end._slots.receiver


def test_a_connection_that_is_dropped_is_closed():
    reader, writer = shmtensor.get_context("fork").Pipe(False)
    writer.send(np.zeros(LARGE))
    del writer
    assert reader.recv().sum() == 0
    with pytest.raises(EOFError):
        reader.recv()
    reader.close()


def test_an_end_on_its_way_is_gone_when_the_thread_that_sends_it_has_closed_it():
    """`multiprocessing` sends it from a thread, which may be the last that has the keeper's descriptor."""
    with pipe() as (one, _):
        reader, writer = shmtensor.get_context("fork").Pipe(False)
        writer.send(np.arange(LARGE))
        one.send(writer)
        reader.close()
        writer.close()
    assert files() != []  # whoever fetched it would find what was sent
    resource_sharer.stop(LONG)
    assert files() == []


def test_an_end_that_nobody_fetched_is_gone_with_its_process():
    program = """
import shmtensor
one, other = shmtensor.get_context("fork").Pipe()
reader, writer = shmtensor.get_context("fork").Pipe(False)
one.send(writer)
for end in (one, other, reader, writer):
    end.close()
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        assert process.wait(LONG) == 0
    assert [name for name in os.listdir("/dev/shm") if f"shmtensor.pipe-{process.pid}-" in name] == []


def test_a_time_out_of_a_handler_while_the_object_is_taken_loses_nothing(monkeypatch):
    """An `Exception`, as such handlers raise it; the library's own errors end the object."""
    with pipe(False) as (reader, writer):
        writer.send(np.arange(LARGE))

        def interrupted(*_):
            raise TimeoutError("a signal handler's")

        with monkeypatch.context() as patch:
            patch.setattr(reader._slots.getter, "take", interrupted)
            with pytest.raises(TimeoutError, match="handler"):
                reader.recv()
        assert reader.poll()
        assert reader.recv()[-1] == LARGE - 1
