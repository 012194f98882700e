"""CPython's own tests of `multiprocessing`'s queues, pools and pipes, with this library's in their place.

They come with the interpreter (`test._test_multiprocessing`) unless a distribution leaves them out. What differs, and
why, stands in docs/guide/queues.md and docs/guide/pools-and-pipes.md; `DIFFERENT` names the tests that say otherwise.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import multiprocessing.pool
import sys
import types
import unittest
import warnings
from multiprocessing import resource_sharer
from typing import Any

import pytest

import shmtensor
from shmtensor.mp.pool import Pool

from ..conftest import left_files
from ..waiting import PATIENCE

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import test._test_multiprocessing as cpython
except (ImportError, unittest.SkipTest):
    pytest.skip("this Python was installed without its test package", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]

DIFFERENT = {
    "test_queue_feeder_donot_stop_onexc": "put raises what cannot be pickled at its caller",
    "test_queue_feeder_on_queue_feeder_error": "there is no feeder thread, so no hook for its errors",
    "test_closed": "there are no pipes to look at",
    "test_closed_queue_empty_exceptions": "a closed queue is closed, whether it was used or not",
}
NEWER = {"test_closed_queue_empty_exceptions"}
"""Those that came with the last releases of CPython 3.12."""


class Instead:
    """The name `multiprocessing` as CPython's tests see it: everything is the real one's but what this library has."""

    def __init__(self, method: str) -> None:
        ours = shmtensor.get_context(method)
        self.Queue, self.JoinableQueue, self.SimpleQueue = ours.Queue, ours.JoinableQueue, ours.SimpleQueue
        self.Pool, self.Pipe = ours.Pool, ours.Pipe
        self.pool = types.SimpleNamespace(**{**vars(multiprocessing.pool), "Pool": Pool})

    def get_context(self, method: str | None = None) -> Any:
        return shmtensor.get_context(method)

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


class Method:
    """One start method for the time of one test."""

    method: str

    @pytest.fixture(autouse=True)
    def instead(self, monkeypatch, request):
        name = request.function.__name__
        if name in DIFFERENT:
            pytest.skip(f"differs: {DIFFERENT[name]}")
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method(self.method, force=True)
        monkeypatch.setattr(cpython, "multiprocessing", Instead(self.method))
        yield
        multiprocessing.set_start_method(before, force=True)
        gc.collect()
        resource_sharer.stop(PATIENCE)  # its thread may just have sent the last end of a pipe
        assert left_files("queue", "pipe") == set()

    def Queue(self, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(self.method).Queue(*args, **kwargs)

    def JoinableQueue(self, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(self.method).JoinableQueue(*args, **kwargs)

    def Pipe(self, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(self.method).Pipe(*args, **kwargs)

    @classmethod
    def Pool(cls, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(cls.method).Pool(*args, **kwargs)


class TestForkQueue(Method, cpython._TestQueue, cpython.ProcessesMixin, unittest.TestCase):
    method = "fork"
    Process = multiprocessing.get_context("fork").Process
    Event = staticmethod(multiprocessing.get_context("fork").Event)


class TestSpawnQueue(Method, cpython._TestQueue, cpython.ProcessesMixin, unittest.TestCase):
    method = "spawn"
    Process = multiprocessing.get_context("spawn").Process
    Event = staticmethod(multiprocessing.get_context("spawn").Event)


class TestForkSimpleQueue(Method, cpython.TestSimpleQueue):
    method = "fork"


class TestSpawnSimpleQueue(Method, cpython.TestSimpleQueue):
    method = "spawn"


class TestForkNested(Method, cpython.TestStartMethod):
    method = "fork"


class TestSpawnNested(Method, cpython.TestStartMethod):
    method = "spawn"


def _of_both(*suites: type) -> dict[str, type]:
    """The standard library's test cases, for each start method. Children find them by their names in this module."""
    found = {}
    for method, suite in itertools.product(("fork", "spawn"), suites):
        name = f"Test{method.title()}{suite.__name__.removeprefix('_').removeprefix('Test')}"
        bases = (Method, suite, cpython.ProcessesMixin, unittest.TestCase)
        process = multiprocessing.get_context(method).Process
        found[name] = type(name, bases, {"method": method, "Process": process, "__module__": __name__})
    return found


class _TestPool(cpython._TestPool):
    """With a pool for each test, as every test here has to end its processes."""

    setUpClass = tearDownClass = classmethod(lambda cls: None)

    def setUp(self):
        type(self).pool = self.Pool(2)

    def tearDown(self):
        self.pool.terminate()
        self.pool.join()
        type(self).pool = None


POOLS = (_TestPool, cpython._TestPoolWorkerErrors, cpython._TestPoolWorkerLifetime)
PIPES = (cpython._TestConnection, cpython._TestPoll, cpython._TestPicklingConnections)
globals().update(_of_both(*POOLS, *PIPES))


class TestPoolNotLeakOnFailure(Method, cpython.TestPoolNotLeakOnFailure):
    method = "fork"


class TestForkWait(Method, cpython.TestWait):
    method = "fork"


class TestSpawnWait(Method, cpython.TestWait):
    method = "spawn"


def test_no_pool_is_left():
    """After the last of the classes above."""
    assert sorted(left_files("pool")) == []


def test_what_is_said_to_differ_exists():
    names = DIFFERENT.keys() - (NEWER if sys.version_info < (3, 13) else set())
    for name in names:
        assert any(hasattr(kind, name) for kind in (cpython._TestQueue, cpython.TestSimpleQueue))
