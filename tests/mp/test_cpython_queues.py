"""CPython's own tests of `multiprocessing`'s queues, with this library's queues in their place.

They come with the interpreter (`test._test_multiprocessing`) unless a distribution leaves them out. What differs, and
why, stands in docs/guide/queues.md; `DIFFERENT` names the tests that say otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import unittest
import warnings
from typing import Any

import pytest

import shmtensor

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
}


class Instead:
    """The name `multiprocessing` as CPython's tests see it: everything is the real one's but the queues."""

    def __init__(self, method: str) -> None:
        ours = shmtensor.get_context(method)
        self.Queue, self.JoinableQueue, self.SimpleQueue = ours.Queue, ours.JoinableQueue, ours.SimpleQueue

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
        mine = f"shmtensor.queue-{os.getpid()}-"
        assert [name for name in os.listdir("/dev/shm") if mine in name] == []

    def Queue(self, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(self.method).Queue(*args, **kwargs)

    def JoinableQueue(self, *args: Any, **kwargs: Any) -> Any:
        return shmtensor.get_context(self.method).JoinableQueue(*args, **kwargs)


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


def test_what_is_said_to_differ_exists():
    for name in DIFFERENT:
        assert any(hasattr(kind, name) for kind in (cpython._TestQueue, cpython.TestSimpleQueue))
