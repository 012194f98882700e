"""Damaged records, tables and words for the compiled reader under sanitizers: `fuzz_reader.py PACKAGE SEED COUNT`.

Each scene is played twice, with the same messages and the same damage: once received by the compiled reader, once by
the reference, which must say the same of every message.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import sys
import warnings
from pathlib import Path

package, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path[:0] = [package, str(Path(__file__).parents[2])]
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import shmtensor  # noqa: E402
from shmtensor import native  # noqa: E402
from shmtensor.memory.words import store  # noqa: E402
from shmtensor.ring.layout import L_MEMBERS, L_PUBLISHED, L_RINGS, R_RECORDS, RECORD_WORDS  # noqa: E402

PATTERNS = {
    "fan-out": (shmtensor.Publisher, shmtensor.Subscriber, {}, {}),
    "latest": (shmtensor.Publisher, shmtensor.Subscriber, {}, {"delivery": "latest"}),
    "history": (shmtensor.Publisher, shmtensor.Subscriber, {"history": 3}, {}),
    "work queue": (shmtensor.Producer, shmtensor.Consumer, {}, {}),
}
NUMBERS = [0, 1, 2, 3, 4, 5, 63, 64, 255, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES = [np.arange(5), {"a": np.ones(3), "n": 7}, [np.zeros((2, 40)), "x" * 300, None], np.array(3), b"bytes"]


def some(rng: random.Random, before: int) -> int:
    """What a damaged word may hold."""
    return rng.choice(
        [
            rng.choice(NUMBERS),
            before ^ 1 << rng.randrange(64),
            (before + rng.randint(-3, 3)) % 2**64,
            rng.getrandbits(64),
        ]
    )


def damage(tx, rng: random.Random, looked: bool) -> None:
    """Change some words of a sender's segments that a reader goes by."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        ring = rng.choice(tx._rings)
        slot = rng.randrange(ring.slots)
        record = R_RECORDS + slot * RECORD_WORDS
        states = range(ring.state, len(ring.words))
        words, at = rng.choice(
            [
                (ring.words, record),
                (ring.words, record + rng.randrange(2, RECORD_WORDS)),
                (ring.words, record + rng.randrange(2, 8)),
                (ring.words, rng.choice(states)),
                (tx._words, tx._order + rng.randrange(12)),
                (tx._words, L_RINGS if looked else L_PUBLISHED),
                (tx._words, L_RINGS),
                (tx._words, L_MEMBERS + rng.randrange(8)),
            ]
        )
        value = rng.getrandbits(1) << 32 | rng.randrange(9) if rng.random() < 0.2 else some(rng, words[at])
        store(words, at, value)
    if rng.random() < 0.3:  # what is described behind a payload
        ring = rng.choice(tx._rings)
        data = np.frombuffer(ring.buffer, np.uint8)
        for _ in range(4):
            data[rng.randrange(len(data))] = rng.randrange(256)


def bytes_of(value) -> object:
    """What a value is, and each of its bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, bytes_of(each)) for key, each in value.items()]
    return [bytes_of(each) for each in value] if isinstance(value, (list, tuple)) else (type(value), value)


def received(rx) -> list[object]:
    """What it gets, and each error, until there is nothing more."""
    found: list[object] = []
    for _ in range(25):
        try:
            with rx.recv(timeout=0) as msg:
                found.append((msg.seq, msg.attempt, msg.missed, msg.meta, bytes_of(msg.value)))
        except shmtensor.ShmTensorError as error:
            found.append(type(error))
            if found[-2:] == [shmtensor.TimedOut] * 2:
                break
    return found


def scene(channel: str, number: int, compiled: bool) -> list[object]:
    """What a receiver says of damaged messages."""
    rng = random.Random(number)
    make, take, options, wants = PATTERNS[list(PATTERNS)[number % len(PATTERNS)]]
    found: list[object] = []
    with make(channel, slots=4, slot_bytes=512, full="grow", **options) as tx, pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "module", None)
        if rng.random() < 0.3:  # before it comes
            tx.send(np.arange(3), timeout=0)
        with take(channel, **wants) as rx:
            for each in range(rng.randrange(1, 9)):
                tx.send(VALUES[each % len(VALUES)], {"n": each} if each % 2 else None, timeout=0)
            looked = rng.random() < 0.6  # what it knows to be published is then in no word
            if looked:
                with contextlib.suppress(shmtensor.TimedOut):
                    found.append(bytes_of(rx.recv(timeout=0).value))
            saved = [(words, words.tolist()) for words in (tx._words, *(ring.words for ring in tx._rings))]
            damage(tx, rng, looked)
            found += received(rx)
            found.append(rx.statistics().bad_records)
            for words, before in saved:  # so that both leave in peace
                for at, value in enumerate(before):
                    if words[at] != value:
                        store(words, at, value)
    return found


assert shmtensor.__file__.startswith(package)
assert native.module is not None
numbers = itertools.count()
for number in range(seed, seed + count):
    said = [scene(f"fuzz-reader-{os.getpid()}-{next(numbers)}", number, compiled) for compiled in (True, False)]
    assert said[0] == said[1], f"scene {number}: compiled {said[0]}, reference {said[1]}"
print(count)
