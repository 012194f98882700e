"""What `block=` and `timeout=` of the standard library's queues mean as a moment."""

from __future__ import annotations

import time


def deadline_of(block: bool, timeout: float | None) -> float | None:
    """The moment, monotonic, until which to wait; None for ever."""
    if not block:
        return 0.0
    return None if timeout is None else time.monotonic() + max(0.0, timeout)


def remaining(deadline: float | None) -> float:
    """For a lock: seconds until then, -1 for ever."""
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())
