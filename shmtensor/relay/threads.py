"""The threads of a relay."""

from __future__ import annotations

import contextlib
import threading


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread, unless it was never started, as an exception came first, or is this one."""
    with contextlib.suppress(RuntimeError):
        thread.join()
