"""The threads of a relay, and what may be called by several."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread, unless it was never started, as an exception came first, or is this one."""
    with contextlib.suppress(RuntimeError):
        thread.join()


class Closing:
    """A `close` that takes its time, and may be called again meanwhile: another thread waits until it is over, and a
    signal handler that has interrupted it returns at once. One that an exception cut short is begun anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.is_running = self.is_over = False

    def run(self, end: Callable[[], None]) -> None:
        """Call `end`, once."""
        with self._lock:
            if self.is_over or self.is_running:
                return
            try:
                self.is_running = True
                end()
                self.is_over = True
            finally:
                self.is_running = False
