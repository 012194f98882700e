"""There and back between two processes that sleep until they are woken."""

from __future__ import annotations

from ..measure import RowSpec
from ..sizes import KIB, SIZES, label
from ..transports import PAIR, SHMTENSOR, Transport, that_can
from .base import Workload
from .round_trip import GROUP, case_name, make_cases, make_row

PAUSE = 300e-6
SLEEPERS: tuple[Transport, ...] = tuple(each for each in that_can(PAIR) if each.sleeps)

WORKLOAD = Workload(
    name="asleep",
    title="Round trip of one tensor, both sides asleep, µs",
    what=(
        "As round-trip, with spin=0 for shmtensor and a 300 µs time.sleep before each trip, outside the "
        "clock: both sides sleep at each receive. pyzmq is the bare socket: bytes in, bytes out. Transports "
        "that can only poll (iceoryx2's form here, vLLM) have no row. sleeps: how often shmtensor's recv "
        "really went to sleep, per trip, on the side that slept less."
    ),
    cases=make_cases(SLEEPERS, (KIB,), awake=False, pause=PAUSE),
    rows=(
        *(
            make_row(transport, nbytes, GROUP, case_name(transport, nbytes), "round trip")
            for transport in SLEEPERS
            for nbytes in SIZES
        ),
        *(
            RowSpec(
                f"sleeps, {label(nbytes)}", SHMTENSOR.name, case_name(SHMTENSOR, nbytes), "sleeps", "per trip",
                group="sleeps per trip", line=SHMTENSOR.name, column=label(nbytes), x=nbytes,
            )
            for nbytes in SIZES
        ),
    ),
    heading="payload",
)  # fmt: skip
