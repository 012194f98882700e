"""A progress bar for saves, drawn by the thread that hears of them."""

from __future__ import annotations

import threading
from typing import Any

from .handle import WAITING, WRITING, SaveHandle


class Bar:
    """A line per save in flight, on standard error, as long as there is one. Does nothing unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._progress: Any = None
        self._tasks: dict[int, Any] = {}

    def update(self, handle: SaveHandle) -> None:
        """Draw how far a save is; its line goes when it is over."""
        if not self._shown:
            return
        with self._lock:
            over = handle.status not in (WAITING, WRITING)
            if not over:
                self._draw(handle)
            elif self._tasks.pop(handle.number, None) is not None and not self._tasks:
                self._stop()

    def close(self) -> None:
        """Remove every line."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def _draw(self, handle: SaveHandle) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._progress.start()
        if handle.number not in self._tasks:
            self._tasks[handle.number] = self._progress.add_task(handle.name, total=handle.progress.total)
        self._progress.update(self._tasks[handle.number], completed=handle.progress.written, refresh=True)

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
