"""Sizes that are measured, and how many messages of each may be in flight."""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20

SIZES = (64, KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB)
HUGE = 64 * MIB
"""From here on one round and 3 samples are enough."""
LARGEST = 256 * MIB
"""Here 2 samples are."""
IN_FLIGHT_BYTES = 64 * MIB


def label(nbytes: int) -> str:
    """`1 KiB`."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def in_flight(nbytes: int, most: int) -> int:
    """So that the messages in flight take 64 MiB together, but 2 to `most` of them."""
    return max(2, min(most, IN_FLIGHT_BYTES // nbytes))
