"""Every test checks that it leaves nothing behind: shared memory, semaphores, sockets, descriptors, child processes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import tempfile

import pytest

from .waiting import wait_until

_count = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def socket_directory():
    """A socket directory of this test run's own, so that two runs at once stay apart."""
    with tempfile.TemporaryDirectory(prefix="shmt-", dir="/tmp") as path:
        before = os.environ.get("SHMTENSOR_DIR")
        os.environ["SHMTENSOR_DIR"] = path
        yield path
        if before is None:
            del os.environ["SHMTENSOR_DIR"]
        else:
            os.environ["SHMTENSOR_DIR"] = before


@pytest.fixture(scope="module", autouse=True)
def loaded_modules_stay():
    """What the imports have made is looked through once, not by every full collection: with PyTorch, 0.15 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def channel() -> str:
    """A channel name that no other test or run uses."""
    return f"test-{os.getpid()}-{next(_count)}"


def shared_files() -> set[str]:
    """This run's files in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if f"shmtensor.test-{os.getpid()}-" in name}


def descriptors() -> set[str]:
    """What this process's descriptors lead to, of the kinds that the library opens."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "shmtensor." in target:
            found.add(f"{fd} -> {target}")
    return found


@pytest.fixture(autouse=True)
def company(request):
    """Runs at once sweep each other's dead, as any two users do: a test of what the dead leave asks to be alone."""
    how = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with contextlib.ExitStack() as held:  # let go of also where a test's time is over while it waits here
        with contextlib.ExitStack() as entering:
            gate, room = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in ("/tmp", "/dev/shm"))
            entering.callback(os.close, gate)
            held.callback(os.close, room)
            fcntl.flock(gate, how)  # who wants to be alone lets nobody in any more
            fcntl.flock(room, how)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing(socket_directory, company):
    yield
    gc.collect()
    for child in multiprocessing.active_children():
        child.join(10)
    left = {
        "shared memory": shared_files(),
        "sockets": set(os.listdir(socket_directory)),
        "descriptors": descriptors(),
        "processes": {child.name for child in multiprocessing.active_children()},
    }
    for name in left["shared memory"]:
        os.unlink(f"/dev/shm/{name}")
    for name in left["sockets"]:
        os.unlink(f"{socket_directory}/{name}")
    assert not any(left.values()), {what: names for what, names in left.items() if names}


@pytest.fixture
def standin():
    """A stand-in for CUDA, see tests/cuda_standin.py; what a device would suffer in silence fails the test.

    Endpoints of device memory leave on a thread of the library, shortly after their last view: that is waited for. A
    subscriber that left in this way is part of a reference cycle, so the collector has to look for it.
    """
    from . import cuda_standin

    with cuda_standin.installed() as stand_in:
        yield stand_in
        gc.collect()
        stand_in.run_all()
        wait_until(cuda_standin.keeper_is_idle)  # views that have died: asked about while there is somebody to ask

        def over():
            gc.collect()
            return not (stand_in.device_memory or shared_files() or descriptors())

        with contextlib.suppress(AssertionError):  # what is still there then is named below, and by `leaves_nothing`
            wait_until(over)
        stand_in.check()
        left = [path for _, path, _ in stand_in.device_memory.values()]
        assert not left, f"device memory that nobody gave back: {left}"


@pytest.fixture
def lazy():
    """A device that does nothing before somebody waits, or the test says so."""
    from . import cuda_standin

    with cuda_standin.installed(polls=None) as stand_in:
        yield stand_in
        stand_in.run_all()
        gc.collect()
        stand_in.check()
        assert stand_in.registered == {}, "something is still registered though its endpoint is gone"
