"""A progress bar for saves, drawn by the thread that receives the reports."""

from __future__ import annotations

import threading
from typing import Any

from .handle import WAITING, WRITING, Save


class Bar:
    """A line per save in flight, on standard error. Does nothing unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._progress: Any = None
        self._tasks: dict[int, Any] = {}

    def update(self, save: Save) -> None:
        """Draw how far a save is; remove its line when it has ended."""
        if not self._shown:
            return
        with self._lock:
            over = save.status not in (WAITING, WRITING)
            if not over:
                self._draw(save)
            elif self._tasks.pop(save.number, None) is not None and not self._tasks:
                self._stop()

    def close(self) -> None:
        """Remove every line."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def _draw(self, save: Save) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._progress.start()
        if save.number not in self._tasks:
            self._tasks[save.number] = self._progress.add_task(save.name, total=save.total)
        self._progress.update(self._tasks[save.number], completed=save.written, refresh=True)

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
