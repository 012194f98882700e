"""Pickled streams whose large bytes are not copied, and the heap that keeps what a worker frees."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from shmtensor.mp import pickling

LARGE = pickling._LARGE
BYTES = random.Random(0).randbytes(3 * LARGE)


@pytest.mark.parametrize(
    "value",
    [
        BYTES,
        BYTES[: LARGE - 1],
        BYTES[:LARGE],
        ["a", BYTES, {"b": BYTES, "c": [BYTES[1:], 7]}],
        [BYTES[index:] for index in range(20)],
        "é" * LARGE,
        bytearray(BYTES),
        [list(range(100_000)), BYTES, list(range(100_000))],
        b"",
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_object_survives(value):
    pickled = pickling.dumps(value)
    assert pickling.loads(pickled) == value
    assert pickling.nbytes_of(pickled) >= len(value or ())


def test_large_bytes_are_not_copied_and_leaves_go_beside_them():
    array, tensor = np.arange(5), torch.arange(3)
    stream, *leaves = pickling.dumps({"data": BYTES, "array": array, "tensor": tensor})
    before, data, after = stream
    assert data.ctypes.data == np.frombuffer(BYTES, np.uint8).ctypes.data
    assert bytes(data) == BYTES
    assert before.nbytes + after.nbytes < 1000
    assert leaves[0] is array
    assert leaves[1] is tensor
    back = pickling.loads([stream, *leaves])
    assert back["data"] == BYTES
    assert back["array"] is array
    assert back["tensor"] is tensor


def test_what_may_change_is_copied():
    given = bytearray(BYTES)
    pickled = pickling.dumps(given)
    given[:] = bytes(len(given))
    assert pickling.loads(pickled) == BYTES


def test_pickles_own_pieces_are_never_taken_for_an_objects():
    pickled = pickling.dumps([str(number) * 50 for number in range(50_000)] + [BYTES[: LARGE // 4 - 1]] * 3)
    assert type(pickled[0]) is np.ndarray


def test_without_anything_large_it_is_what_a_queue_sends():
    value = {"name": "a", "array": np.arange(3)}
    ours, theirs = pickling.dumps(value), pickling.pack(value)
    assert bytes(ours[0]) == bytes(theirs[0])
    assert ours[1] is theirs[1]


FAULTS = """
import resource
from shmtensor.memory.mapped_file import keep_freed

print(keep_freed(64 << 20))

def make():
    return [bytes(4 << 20) + b"x" for _ in range(5)]  # 20 MiB, each page of it written

make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run_faults(**environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean | environment, capture_output=True, text=True, timeout=400, check=True
    )
    said, faults = done.stdout.split()
    return said, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_stays_with_the_process():
    said, faults = run_faults()
    assert said == "True"
    assert faults < 20 * 5 * 100  # of 1024 pages each


def test_a_heap_that_the_user_has_tuned_is_left_alone():
    assert run_faults(MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert run_faults(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0] == "False"
