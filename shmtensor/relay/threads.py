"""The threads of a relay, and calls that several of them may make."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread, unless it was never started, as an exception came first, or is this one."""
    with contextlib.suppress(RuntimeError):
        thread.join()


class _Here(threading.local):
    is_own = False


_here: Final = _Here()


@contextlib.contextmanager
def own() -> Iterator[None]:
    """A context manager in which this thread works for a relay, whose end may wait for it."""
    before, _here.is_own = _here.is_own, True
    try:
        yield
    finally:
        _here.is_own = before


def is_own() -> bool:
    """Whether this thread works for a relay, and so must not wait for the end of one: a finalizer may close it here."""
    return _here.is_own


class RelayThread(threading.Thread):
    """A thread that works for a relay, and ends with it."""

    def __init__(self, target: Callable[..., None], name: str, *args: object) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        with own():
            super().run()


class Closing:
    """A `close` that takes its time, and may be called again meanwhile: that call waits until it is over. One that an
    error cut short is begun anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # where no thread can be started, a signal handler may come here again
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
