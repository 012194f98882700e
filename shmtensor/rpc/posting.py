"""What publishes messages with notes: a note and its message go together."""

from __future__ import annotations

import threading
from typing import Any

from ..endpoints.asend import AsyncSender
from ..ring.ring import Ring
from ..views.outgoing import Outgoing


class Posting(AsyncSender):
    """Base of `Requests` and `Replies`: one thread or task at a time is between a note and its message.

    Both have `post`, for threads, with the arguments of `apost`; it raises what `send` raises.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._posting = threading.Lock()
        self._note: Any = None  # what the next message's note is made of
        super().__init__(*args, **options)

    async def apost(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a message with its note, in line if there is no room or a thread is at it."""

        def write(out: Outgoing, ring: Ring, slot: int) -> int:
            self._note = note
            try:
                return self._fill(out, value, ring, slot)
            except BaseException:
                self._withhold(note)
                raise

        await self._with_slot(lambda: self._describe(value, meta), write, timeout)

    def _withhold(self, note: Any) -> None:
        """A message was not published, perhaps."""
        self._note = None

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
