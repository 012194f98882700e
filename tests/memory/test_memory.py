"""Segments, words, locks and semaphores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import shmtensor
from shmtensor.memory import mapped_file, words
from shmtensor.memory import segment as shm
from shmtensor.memory.semaphores import Sleeper, unlink_semaphore

from ..conftest import FILES_ONLY
from ..waiting import PATIENCE


@pytest.fixture
def name(channel):
    name = f"/x-shmtensor.{channel}"  # no channel's name, whose unlocked file any other program would sweep
    yield name
    shm.unlink(name)


def test_create_reserves_zeroed_pages_and_refuses_an_existing_name(name):
    with shm.create(name, 10000, "x") as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 10000
        assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
        mapping = segment.map(writable=True)
        assert bytes(mapping.view[:64]) == bytes(64)
        with pytest.raises(shmtensor.ResourceError):
            shm.create(name, 10000, "x")


@FILES_ONLY
def test_a_small_dev_shm_is_a_clear_error_at_creation(name):
    need = 2 * shm.free_bytes()
    with pytest.raises(shmtensor.ResourceError, match=r"needs .* has .* free: pass less, .*--shm-size"):
        shm.create(name, need, "pass less")
    assert not os.path.exists("/dev/shm" + name)


@FILES_ONLY
def test_attaching_never_creates_or_deletes(name):
    with pytest.raises(FileNotFoundError):
        shm.attach(name)
    shm.create(name, 4096, "x").close()
    shm.attach(name).close()
    assert os.path.exists("/dev/shm" + name)
    shm.unlink(name)
    shm.unlink(name)


def test_a_mapping_outlives_its_segment_and_name(name):
    segment = shm.create(name, 4096, "x")
    mapping = segment.map(writable=True)
    segment.close()
    shm.unlink(name)
    words.store(mapping.words, 3, 2**64 - 1)
    assert mapping.words[3] == 2**64 - 1


def test_what_was_looked_at_is_opened_again_by_its_name(name):
    shm.create(name, 4096, "x").close()
    looked = shm.look_at(name)
    looked.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        looked.read(0, 1)
    shm.unlink(name)
    with pytest.raises(FileNotFoundError, match="there is no segment"):
        shm.look_at(name, closed=looked)
    with shm.create(name, 8192, "x") as new, shm.look_at(name, closed=looked) as again:
        assert again is looked
        assert again.nbytes == 8192
        assert os.path.samestat(again.info, os.fstat(new.fd))


def test_is_still_tells_a_replaced_name(name):
    old = shm.create(name, 4096, "x")
    assert old.is_still(name)
    shm.unlink(name)
    assert not old.is_still(name)
    new = shm.create(name, 4096, "x")
    assert not old.is_still(name)
    assert new.is_still(name)
    old.close()
    new.close()


def test_writing_through_a_read_only_mapping_ends_the_process(name):
    with shm.create(name, 4096, "x"):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            shm.attach(name).map(writable=False).buffer[0] = 1
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_mapping_beyond_the_end_of_a_segment_is_refused(name):
    with shm.create(name, 4096, "x") as segment, pytest.raises(shmtensor.WireError, match="ends at byte 4096"):
        segment.map(4096, 4096, writable=False)


def test_locks_exclude_other_descriptions_and_end_with_them(name):
    with shm.create(name, 4096, "x") as segment:
        one, two = segment.locks(), segment.locks()
    assert one.try_exclusive(7)
    assert one.try_exclusive(7)
    assert not two.try_exclusive(7)
    assert not two.try_shared(7)
    assert two.try_exclusive(8)
    assert two.held_by_other(7)
    assert not one.held_by_other(7)
    assert two.held_by_other(0, 100)
    with pytest.raises(shmtensor.TimedOut, match="thing"):
        two.wait_exclusive(7, 0.01, "thing")
    one.close()
    one.close()
    assert two.try_shared(7)
    with pytest.raises(shmtensor.ClosedError):
        one.try_shared(7)
    one.unlock(7)
    two.close()


def test_shared_locks_share(name):
    with shm.create(name, 4096, "x") as segment:
        readers = [segment.locks() for _ in range(3)]
        writer = segment.locks()
    assert all(reader.try_shared(1 << 61) for reader in readers)
    assert not writer.try_exclusive(1 << 61)
    for reader in readers:
        reader.unlock(1 << 61)
    assert writer.try_exclusive(1 << 61)
    for lock in (*readers, writer):
        lock.close()


def test_a_lock_dies_with_its_process_but_not_by_its_forked_child(name):
    """SIGKILL drops the lock at once, although a child of the dead process lives on."""
    with shm.create(name, 4096, "x") as segment:
        ours = segment.locks()
        ready, tell = os.pipe()
        hold, let_go = os.pipe()
        parent = os.fork()
        if parent == 0:
            with shm.attach(name) as again:
                theirs = again.locks()
            theirs.try_exclusive(1)
            if os.fork() == 0:
                os.write(tell, b"x")  # from here: this closes its copy of the lock before it goes on from os.fork
                os.close(let_go)
                os.read(hold, 1)
                os._exit(0)
            signal.pause()
        os.close(hold)
        os.read(ready, 1)
        assert ours.held_by_other(1)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert not ours.held_by_other(1)
        for fd in (let_go, ready, tell):
            os.close(fd)
        ours.close()


def test_words_are_never_torn(name):
    """A reader sees 0 or all ones, never a mixture, while a writer in another process flips the word."""
    with shm.create(name, 4096, "x") as segment:
        ours = segment.map(writable=True)
        child = os.fork()
        if child == 0:
            theirs = shm.attach(name).map(writable=True).words
            while theirs[8] == 0:
                words.store(theirs, 0, 2**64 - 1)
                words.store(theirs, 0, 0)
            os._exit(0)
    seen = {ours.words[0] for _ in range(200_000)}
    words.store(ours.words, 8, 1)
    os.waitpid(child, 0)
    assert seen <= {0, 2**64 - 1}


def test_barrier_works_here():
    words.register()
    words.barrier()
    words.acquire_fence()
    assert words.HAS_BARRIER in (True, False)


def test_semaphore(channel):
    name = f"/shmtensor.{channel}"
    with pytest.raises(FileNotFoundError):
        Sleeper(name, create=False)
    owner = Sleeper(name, create=True)
    peer = Sleeper(name, create=False)
    assert not owner.wait(0.001)
    peer.post()
    assert owner.wait(PATIENCE)
    peer.post()
    peer.post()
    owner.drain()
    assert not owner.wait(0.001)
    thread = threading.Thread(target=peer.post)
    thread.start()
    assert owner.wait(PATIENCE)
    thread.join()
    unlink_semaphore(name)
    unlink_semaphore(name)
    peer.close()
    owner.close()
    owner.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20), ("1.5kb", 1500), (7, 7), (" 2 G ", 2 << 30), ("9", 9),
        ("1.0009kB", 1000), ("0.1MB", 100_000), (str(2**53 + 1), 2**53 + 1), (str(2**60 + 1), 2**60 + 1),
        ("9007199254740993.5 k", 9007199254740993 * 1024 + 512),
        ("0." + "3" * 50 + "TB", 333_333_333_333), ("9" * 50 + "TB", int("9" * 50) * 10**12),
    ],
)  # fmt: skip
def test_sizes(text, size):
    from shmtensor.options import parse_bytes

    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x", ValueError), ("-1", ValueError), (0, ValueError), (1.5, TypeError), (True, TypeError),
        ("0.1", ValueError),
        pytest.param("9" * 400, ValueError, id="long"), pytest.param("0" * 10_000, ValueError, id="longer"),
        pytest.param("1." + "0" * 10_000, ValueError, id="finer"), ("1e3", ValueError), ("1.", ValueError),
    ],
)  # fmt: skip
def test_wrong_sizes(text, error):
    from shmtensor.options import parse_bytes

    with pytest.raises(error) as caught:
        parse_bytes(text)
    assert isinstance(caught.value, shmtensor.ShmTensorError)
    assert len(str(caught.value)) < 200


COPIER = """
import os, sys, torch, shmtensor
torch.set_num_threads(3)
large = torch.arange(1 << 20)
large.clone().copy_(large)
pid = os.fork()
if not pid:
    with shmtensor.Producer(sys.argv[1]) as tx, shmtensor.Consumer(sys.argv[1]) as rx:
        tx.send(large)
        tx.send({"a": large})
        got = rx.recv(timeout=60).value, rx.recv(timeout=60).value["a"]
        same = [bytes(tensor.numpy()) == bytes(large.numpy()) for tensor in got]  # torch itself would hang here
        del got
    os._exit(0 if same == [True, True] else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_child_copies_although_torchs_threads_are_gone(channel):
    done = subprocess.run([sys.executable, "-c", COPIER, channel], timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "nbytes", [1, 4097, mapped_file.HUGE_PAGE - 1, mapped_file.HUGE_PAGE, 3 * mapped_file.HUGE_PAGE + 5]
)
def test_fresh_memory_is_zeros_and_lives_as_long_as_its_views(nbytes):
    array = mapped_file.fresh(nbytes)
    assert array.shape == (nbytes,)
    assert not array.any()
    if nbytes >= mapped_file.HUGE_PAGE:
        assert array.ctypes.data % mapped_file.HUGE_PAGE == 0
    array[:] = 7
    last = array[-1:]
    del array
    assert last[0] == 7


def test_memory_that_there_is_no_address_space_for():
    with pytest.raises(shmtensor.errors.ResourceError, match="ulimit -v"):
        mapped_file.fresh(1 << 62)
