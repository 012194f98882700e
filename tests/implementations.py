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
from pathlib import Path
from typing import Any

import pytest

import shmtensor
from shmtensor import native
from shmtensor.codec import copies, raw
from shmtensor.codec import decode as reference_decode
from shmtensor.codec import encode as reference_encode
from shmtensor.codec import implementation as coding
from shmtensor.ring import implementation as receiving
from shmtensor.ring import reader

from .forkservers import stop_forkserver

NAMES = ("compiled", "pure")

TRANSPORT = set(
    """
channel/membership channel/notifier channel/zmtp codec/bytes codec/codec codec/copies codec/values docs/pipeline
endpoints/asyncio endpoints/claims endpoints/dropped endpoints/fan_out endpoints/groups endpoints/handlers
endpoints/hostile endpoints/local endpoints/reports endpoints/senders endpoints/sleep endpoints/slot_wait
endpoints/spinning endpoints/stale endpoints/threads endpoints/traceparent endpoints/without_torch endpoints/work_queue
faults/interrupted_members faults/interrupts faults/wakeup_interrupts memory/forks memory/limits memory/memory
mp/context mp/pipes mp/pools mp/queues observe/inspect observe/trace observe/watching ring/reading ring/sizing
ring/states ring/writer rpc/async_requests rpc/async_server rpc/batching rpc/closing rpc/ends rpc/interrupts rpc/map
rpc/pool rpc/requests rpc/workers wire/dtypes
""".split()  # noqa: SIM905
)

OTHERS = {
    "checkpoint/*": "no transport; what they share with it is tested there",
    "cuda/*": "over a stand-in for CUDA, or a device: rings of device memory have the reference's reading end",
    "ray/*": "Ray starts the processes; what they use of this library is tested by both implementations elsewhere",
    "relay/*": "relays run by both implementations in processes of their own; frames and window are Python alone",
    "memory/guard": "the compiled module's alone",
    "channel/foreign memory/shortage channel/users": (
        "segments, sockets and members, of which none is compiled; and their errors"
    ),
    "ring/protocol models/models docs/pages package/layers package/privates package/jumps package/typing "
    "package/implementations": ("the package is not run, or not its transport"),
    "wire/spec_fuzz": "each test reads by every implementation",
    "containers/*": "the places of names, of which none is compiled; the suite that they run has both",
    "codec/sanitized": "the compiled module's alone",
    "faults/matrix faults/deaths faults/slot_reuse faults/kill_soak mp/faults": (
        "they choose for the processes that they kill"
    ),
    "executor/executor executor/interrupts mp/interrupts mp/cpython_queues executor/other_suites mp/pickle_streams": (
        "drop-ins over the queues"
    ),
    "package/children package/logs cli/commands cli/demo docs/examples docs/http docs/benchmarks package/packaging": (
        "programs, as users start them"
    ),
}


def subject_of(path: Path) -> str:
    """What these lists call a file: its folder and its name, such as `rpc/closing`."""
    return f"{path.parent.name}/{path.stem.removeprefix('test_')}"


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
            put(patch, raw.encode, raw.reference_encode)
            put(patch, raw.decode, raw.reference_decode)
            put(patch, raw.codec, None)
            put(patch, receiving.Counts, reader.Counts)
            put(patch, copies.move_far, copies.memmove)
            patch.setattr(copies, "FAR", sys.maxsize)
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
