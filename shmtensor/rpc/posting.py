"""What publishes messages with notes: a note and its message are one step of the writer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..endpoints.asend import AsyncSender
from ..endpoints.devices import Sending
from ..ring.writer import Beside


class Posting(AsyncSender):
    """Base of `Requests` and `Replies`."""

    @abstractmethod
    def _beside(self, note: Any) -> Beside:
        """What goes beside the message of a note."""

    def post(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a message with its note; raises what `send` raises."""
        if self._state:
            self._refuse()
        beside = self._beside(note)
        sent = self._writer.send(value, meta, 0, *beside)
        if type(sent) is not int:
            self._post(sent, timeout, beside)
        elif sent < 0:
            self._wake_late(-sent)

    def _post(self, out: Any, timeout: float | None, beside: Beside) -> None:
        self._run(self._put, out, timeout, *beside)

    async def apost(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """`post` for an event loop, which waits for no thread."""
        sent = await self._asend(value, meta, timeout, *self._beside(note))
        if isinstance(sent, Sending):
            await self._when_copied(sent)
