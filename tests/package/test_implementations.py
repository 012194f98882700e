"""That tests of the transport run by both implementations: which files, and that processes follow."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import shmtensor
from shmtensor import native
from shmtensor.codec import decode as reference_decode
from shmtensor.codec import encode as reference_encode
from shmtensor.ring.reader import Counts
from shmtensor.ring.writer import Writer

from .. import implementations
from ..forkservers import stop_forkserver
from ..waiting import PATIENCE

SUBJECTS = sorted(map(implementations.subject_of, Path(__file__).parents[1].rglob("test_*.py")))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_file_runs_by_both_or_says_why_not(subject):
    patterns = [pattern for names in implementations.OTHERS for pattern in names.split()]
    others = [pattern for pattern in patterns if fnmatch(subject, pattern)]
    listed = others + ["TRANSPORT"] * (subject in implementations.TRANSPORT)
    assert len(listed) == 1, f"put it into TRANSPORT or OTHERS of tests/implementations.py: it is in {listed}"


def test_the_lists_name_files_that_exist():
    assert set(SUBJECTS) >= implementations.TRANSPORT
    for names in implementations.OTHERS:
        for pattern in names.split():
            assert any(fnmatch(subject, pattern) for subject in SUBJECTS), pattern


def has_module(pipe) -> None:
    pipe.send(native.module is not None)


@pytest.fixture
def server():
    yield
    stop_forkserver()


@pytest.mark.usefixtures("implementation", "server")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_every_process_follows(implementation):
    is_compiled = implementation == "compiled"
    assert (native.module is not None) == is_compiled
    for method in ("fork", "forkserver", "spawn"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=has_module, args=(theirs,))
        child.start()
        assert ours.recv() == is_compiled, method
        child.join(PATIENCE)
        for each in (ours, theirs, child):
            each.close()
    code = "from shmtensor import native; print(native.module is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(is_compiled)


def test_every_part_follows(channel, implementation, monkeypatch):
    is_compiled = implementation == "compiled"
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)  # redis-py imports it: messages would carry trace contexts

    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(b"1")
        sub.recv(timeout=PATIENCE).release()
        assert (type(pub._writer) is Writer) == (not is_compiled)
        assert (sub._direct is not None) == is_compiled
        assert (type(sub._counts) is Counts) == (not is_compiled)
        assert (pub._describe is reference_encode.encode) == (not is_compiled)
        assert (sub._readers[0].reception.decode is reference_decode.decode) == (not is_compiled)


@pytest.mark.usefixtures("implementation")
@implementations.only("compiled", "by the reference, it is replaced already")
def test_everything_compiled_is_replaced():
    """Wherever the package names something compiled, the reference is put; but for the base of messages."""
    with implementations.chosen("pure"):
        left = {
            f"{getattr(place, '__module__', place.__name__)}.{name}"
            for place in implementations._places()
            for name, value in vars(place).items()
            if "_core" in (getattr(value, "__module__", None) or getattr(type(value), "__module__", ""))
        }
    base = {"shmtensor.ring.implementation.Received", "shmtensor.endpoints.message.Received"}
    assert left == base | {"shmtensor.ring.implementation._Base"}  # where the compiled reader is defined
