"""Every test checks that it leaves nothing behind: shared memory, semaphores, sockets, descriptors, child processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from shmtensor.channel.control import LOCK
from shmtensor.channel.names import SERVER_FILES, control_name, parse_file
from shmtensor.errors import WireError
from shmtensor.memory import segment

from . import implementations
from .containers.servers import serving
from .faults import interrupts
from .waiting import PATIENCE, wait_until

_count = itertools.count()

SERVED = os.environ.get("SHMTENSOR_TEST_SEGMENTS") == "server"
"""Whether this run's segments are those of a segment server, not files in `/dev/shm`: see tests/containers."""
FILES_ONLY = pytest.mark.skipif(SERVED, reason="it is about files in /dev/shm")


@pytest.fixture(scope="session", autouse=True)
def socket_directory():
    """A socket directory of this test run's own, so that two runs at once stay apart."""
    with tempfile.TemporaryDirectory(prefix="shmt-", dir="/tmp") as path, contextlib.ExitStack() as stack:
        before = os.environ.get("SHMTENSOR_DIR")
        os.environ["SHMTENSOR_DIR"] = path
        if SERVED:
            stack.enter_context(serving(path))
        yield path
        if before is None:
            del os.environ["SHMTENSOR_DIR"]
        else:
            os.environ["SHMTENSOR_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def control_c_works():
    """also in a run that a shell started in the background, which ignores SIGINT as its children do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nothing_is_skipped():
    """For tests that need an interpreter that neither loses what a call returns, nor leaves out a handler."""
    if interrupts.loses_results() or interrupts.skips_handlers():
        pytest.skip("this interpreter lets an exception come between a return and its result, or leaves out a handler")


@pytest.fixture(scope="module", autouse=True)
def loaded_modules_stay():
    """What the imports have made is looked through once, not by every full collection: with PyTorch, 0.15 s each."""
    gc.collect()
    gc.freeze()


def pytest_pycollect_makemodule(module_path, parent):
    """The tests of the transport run with each implementation."""
    module = pytest.Module.from_parent(parent, path=module_path)
    if implementations.subject_of(module_path) in implementations.TRANSPORT:
        module.add_marker(pytest.mark.usefixtures("implementation"))
    return module


@pytest.fixture
def channel() -> str:
    """A channel name that no other test or run uses."""
    return f"test-{os.getpid()}-{next(_count)}"


def shared_files(*kinds: str) -> set[str]:
    """This run's files in /dev/shm, or a segment server's names: of the tests' own channels, or of these kinds, such as
    "queue" and "pipe"."""
    mine = [f"shmtensor.{kind}-{os.getpid()}-" for kind in kinds or ("test",)]
    return {name for name in segment.listing() if any(each in name for each in mine)}


def left_files(*kinds: str) -> set[str]:
    """The same, when clean-ups of these channels by other programs that were under way are over.

    Any program that makes an endpoint sweeps all channels, and passes by a channel that another one is sweeping.
    """
    for channel in {parsed[0] for name in shared_files(*kinds) if (parsed := parse_file(name))}:
        with contextlib.suppress(OSError, WireError), segment.attach(control_name(channel)) as control:
            locks = control.locks()
            try:
                locks.wait_exclusive(LOCK, PATIENCE, channel)
            finally:
                locks.close()
    return shared_files(*kinds)


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


def mappings() -> set[str]:
    """The library's segments that this process has mapped. (A mapping has no descriptor.) Semaphores aside: `posix_ipc`
    keeps the page of one that an interrupted call has just opened."""
    with open("/proc/self/maps") as lines:
        found = (line.split(maxsplit=5) for line in lines if "shmtensor." in line and "sem.shmtensor." not in line)
        return {f"mapped: {fields[5].strip()}" for fields in found}


_reported: set[str] = set()
"""What a failed test has left: the tests after it do not fail of it."""


@pytest.fixture(autouse=True)
def leaves_nothing(socket_directory):
    yield

    def leftovers() -> dict[str, set[str]]:
        found = {
            "shared memory": left_files(),
            "sockets": set(os.listdir(socket_directory)) - SERVER_FILES,
            "descriptors": descriptors(),
            "mappings": mappings(),
            "processes": {child.name for child in multiprocessing.active_children()},
        }
        return {what: names - _reported for what, names in found.items()}

    def over() -> bool:
        gc.collect()  # each time: a thread drops what it has a moment after its `join`, and that may be in a cycle
        return not any(leftovers().values())

    left = leftovers()
    if any(left.values()):  # perhaps of endpoints in reference cycles, or of children or threads that are about to end
        for child in multiprocessing.active_children():
            child.join(PATIENCE)
        with contextlib.suppress(AssertionError):  # what is still there is named below
            wait_until(over, patience=5)  # the segment server's follower drops what it has after a report
        left = leftovers()
    _reported.update(*left.values())
    for name in left["shared memory"]:
        segment.unlink("/" + name)
    for name in left["sockets"]:
        os.unlink(f"{socket_directory}/{name}")
    for child in multiprocessing.active_children():  # one that hangs would keep each test after this one waiting
        child.kill()
        child.join()
    assert not any(left.values()), {what: names for what, names in left.items() if names}


@pytest.fixture(scope="module", params=implementations.NAMES)
def implementation(request):
    """By the compiled module and by the Python reference; so do the processes that a test starts."""
    with implementations.chosen(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def write_counts():
    """With SHMTENSOR_BOUNDARIES=path: calls and their boundaries, for the tables in docs/internals/fault-tests.md."""
    interrupts.counts.clear()
    yield
    path = os.environ.get("SHMTENSOR_BOUNDARIES")
    if path and interrupts.counts:
        before = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
        Path(path).write_text(json.dumps(before | interrupts.counts, indent=1))


@pytest.fixture
def standin():
    """A stand-in for CUDA, see tests/cuda/standin.py; what a device would suffer in silence fails the test.

    Endpoints of device memory leave on a thread of the library, shortly after their last view: that is waited for. A
    subscriber that left in this way is part of a reference cycle, so the collector has to look for it.
    """
    from .cuda import standin

    with standin.installed() as stand_in:
        yield stand_in
        gc.collect()
        stand_in.run_all()
        wait_until(standin.keeper_is_idle)  # views that have died: asked about while there is somebody to ask

        def over():
            gc.collect()
            return not (stand_in.device_memory or (shared_files() | descriptors()) - _reported)

        with contextlib.suppress(AssertionError):  # what is still there then is named below, and by `leaves_nothing`
            wait_until(over)
        stand_in.check()
        left = [path for _, path, _ in stand_in.device_memory.values()]
        assert not left, f"device memory that nobody gave back: {left}"


@pytest.fixture
def lazy():
    """A device that does nothing before somebody waits, or the test says so."""
    from .cuda import standin

    with standin.installed(polls=None) as stand_in:
        yield stand_in
        stand_in.run_all()
        gc.collect()
        stand_in.check()
        assert stand_in.registered == {}, "something is still registered though its endpoint is gone"
