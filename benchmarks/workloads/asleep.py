"""There and back between two processes that sleep until they are woken."""

from __future__ import annotations

from functools import partial

from ..measure import RowSpec, Target
from ..transports import SHMTENSOR, ZMQ
from .base import Case, Workload
from .round_trip import measure

PAUSE = 300e-6
ZMQ_NBYTES = 128
_ZMQ = "pyzmq, 128 B"

WORKLOAD = Workload(
    name="asleep",
    title="Round trip with both sides asleep",
    what=(
        "As round-trip, with spin=0 and a 300 µs time.sleep before each trip, outside the clock: both "
        "sides sleep at each receive. shmtensor moves a 1 KiB tensor; pyzmq, blocking in recv, moves 128 "
        "bytes, about the size of a descriptor. sleeps: how often recv really went to sleep, per trip, on"
        " the side that slept less."
    ),
    counts={"full": 3000, "quick": 600, "tiny": 5},
    cases=(
        Case("shmtensor", SHMTENSOR, partial(measure, SHMTENSOR, awake=False, pause=PAUSE)),
        Case("pyzmq", ZMQ, partial(measure, ZMQ, nbytes=ZMQ_NBYTES, awake=False, pause=PAUSE)),
    ),
    rows=(
        RowSpec("shmtensor, 1 KiB", "shmtensor", "shmtensor", "round trip", "µs", 1e6, _ZMQ, Target("<=", 1.25)),
        RowSpec(_ZMQ, "pyzmq ipc", "pyzmq", "round trip", "µs", 1e6),
        RowSpec("sleeps per trip", "shmtensor", "shmtensor", "sleeps", "", 1, None, Target(">=", 0.95)),
    ),
)
