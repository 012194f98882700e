"""What publishes messages with notes: a note and its message go together."""

from __future__ import annotations

import threading

from ..endpoints.asend import AsyncSender


class Posting(AsyncSender):
    """Base of `Requests` and `Replies`: one thread or task at a time is between a note and its message."""

    _posting: threading.Lock

    def drop_in_child(self) -> None:
        super().drop_in_child()
        self._posting = threading.Lock()

    def _try_enter(self) -> bool:
        if not self._posting.acquire(False):
            return False
        if super()._try_enter():
            return True
        self._posting.release()
        return False

    def _exit(self) -> None:
        super()._exit()
        self._posting.release()
