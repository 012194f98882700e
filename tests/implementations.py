"""The two implementations of the transport: each test of it runs by the compiled module and by the Python reference.

The tests of the files in `TRANSPORT`, their fixtures and the processes that they start follow the fixture
`implementation` (`tests/conftest.py`), whose value is "compiled" or "pure". A test that makes sense for one of them
alone is marked by `only`, one that would run the same by both by `once`, each with the reason. Every other file of
tests is in `OTHERS`, with the reason.

In the test's process the reference is put wherever the package has chosen something compiled, which leaves one thing
out: messages keep the compiled base (`Received`), as they do with device memory. Processes that are started, not
forked, have `SHMTENSOR_PURE=1`, and nothing compiled at all.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import shmtensor
from shmtensor import native
from shmtensor.ring import implementation as receiving
from shmtensor.ring import received
from shmtensor.views import decode as reference_decode
from shmtensor.views import encode as reference_encode
from shmtensor.views import implementation as coding
from shmtensor.views import moves

from .forkservers import stop_forkserver

NAMES = ("compiled", "pure")

TRANSPORT = set(
    """
arequest aserver asyncio batching bytes channel claims codec context copies dropped dtypes fanout forks handlers hostile
interrupted_members interrupts limits local mapping memory notices pipeline queues reading ringer rpc rpc_closing
rpc_ends rpc_interrupts serve sizing sleep slot_wait spinning stale values
wakeup_interrupts workqueue writer zmtp
""".split()  # noqa: SIM905
)

OTHERS = {
    "checkpoint_*": "no transport; what they share with it is tested there",
    "cuda_*": "over a stand-in for CUDA, or a device: rings of device memory have the reference's reading end",
    "guard": "the compiled module's alone",
    "foreign shortage users": "segments, sockets and members, of which none is compiled; and their errors",
    "protocol models layers docs typing implementations": "the package is not run, or not its transport",
    "spec_fuzz": "each test reads by every implementation",
    "codec_sanitized": "the compiled module's alone",
    "faults deaths slot_reuse_faults kill_soak dropin_faults": "they choose for the processes that they kill",
    "executor executor_interrupts dropin_interrupts cpython_queues other_suites streams": "drop-ins over the queues",
    "children cli demo examples http benchmarks packaging": "programs, as users start them",
}


def only(name: str, reason: str) -> Any:
    """For one implementation: `reason` says why the other has no such test."""
    assert name in NAMES
    assert reason
    return pytest.mark.parametrize("implementation", [name], indirect=True)


def once(reason: str) -> Any:
    """By the implementation that is in use, and no other: `reason` says why both would run the same."""
    assert reason
    return pytest.mark.parametrize("implementation", [NAMES[native.module is None]], indirect=True)


@contextlib.contextmanager
def chosen(name: str) -> Iterator[None]:
    """Within, this process and the ones that it starts use this implementation."""
    if name == "compiled":
        if native.module is None:
            pytest.skip(f"the compiled module is not used: {native.why_not}")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        stop_forkserver()  # its children have its environment
        patch.setenv("SHMTENSOR_PURE", "1")
        if native.module is not None:
            put(patch, coding.encode, reference_encode.encode)
            put(patch, coding.decode, reference_decode.decode)
            put(patch, coding.codec, None)
            put(patch, receiving.Counts, received.Counts)
            put(patch, moves.move_far, moves.memmove)
            patch.setattr(moves, "FAR", sys.maxsize)
            patch.setattr(native, "module", None)
        yield
    stop_forkserver()


def put(patch: pytest.MonkeyPatch, chosen: Any, instead: Any) -> None:
    """Replace what the package has chosen wherever it is named: in its modules, and in the classes of these."""
    for place in _places():
        for name, value in list(vars(place).items()):
            found = value.__func__ if isinstance(value, staticmethod) else value
            if type(found) is type(chosen) and found == chosen:
                patch.setattr(place, name, instead if found is value else staticmethod(instead))


@functools.cache
def _places() -> list[Any]:
    """All are loaded: what was imported while another is chosen would stay with that. And exempt from collections."""
    found: list[Any] = []
    for entry in pkgutil.walk_packages(shmtensor.__path__, "shmtensor."):
        if entry.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # it needs what is not installed
            module = importlib.import_module(entry.name)
            if module is not native.module:
                found.append(module)
                found += [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__
                          and isinstance(each, type)]  # fmt: skip
    gc.collect()
    gc.freeze()
    return found
