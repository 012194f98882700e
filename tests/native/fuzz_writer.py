"""Drives compiled writers at random, beside the reference: python fuzz_writer.py PACKAGE SEED COUNT"""

from __future__ import annotations

import os
import sys
from pathlib import Path

package, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path[:0] = [package, str(Path(__file__).parents[2])]

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import shmtensor  # noqa: E402
from tests.ring import test_writer as writer  # noqa: E402

assert shmtensor.__file__.startswith(package)
assert shmtensor.native.module is not None

for number in range(seed, seed + count):
    channel = f"fuzz-writer-{os.getpid()}-{number}"
    with pytest.MonkeyPatch.context() as patch:
        writer.drive(channel, number % 2 == 0, number, patch)
    with shmtensor.Publisher(channel, slots=4, slot_bytes=1 << 14) as tx, shmtensor.Subscriber(channel) as rx:
        for value in (*writer.KINDS.values(), np.zeros(5)):
            tx.send(value, {"n": number})
            with rx.recv(timeout=writer.PATIENCE) as msg:
                assert writer.same(msg.value, value)
        with tx.loan(3, np.int16) as loan:
            loan.array[:] = number % 100
        assert rx.recv(timeout=writer.PATIENCE).value[1] == number % 100
print(count)
