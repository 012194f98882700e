"""Waiting for what another process or thread does, where nothing tells of it: bounded, never for a time."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

PATIENCE = 60.0


def wait_until(holds: Callable[[], object]) -> None:
    """Look again and again until it holds; an error after `PATIENCE` seconds."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        pause.wait(0.005)


def wait_for_end(pid: int) -> None:
    """Wait for the end of any process, be it a child or not."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([descriptor], [], [], PATIENCE)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} does not end"
