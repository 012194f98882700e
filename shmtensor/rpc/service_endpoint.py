"""What the endpoints of a client and of a server share: they speak of their service, and send messages with notes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..endpoints.async_endpoint import AsyncEndpoint
from ..endpoints.async_sender import AsyncSender
from ..endpoints.base import FORKED
from ..endpoints.devices import Sending
from ..errors import ClosedError, ForkedError
from ..ring.writer import Registration


class ServiceEndpoint(AsyncEndpoint):
    """Base of the endpoints of a client and of a server."""

    _owner: str
    """What errors call the endpoint's owner: `Client` or `Server`."""
    _stop: bool

    @property
    def service(self) -> str:
        """The service's name."""
        return self.name

    @property
    def state(self) -> str:
        """`open`, or how it has ended."""
        return self._state or "open"

    @property
    def is_forked(self) -> bool:
        """Whether it belongs to this process's parent."""
        return self._state == FORKED

    def check_open(self) -> None:
        """Raise `ClosedError` or `ForkedError` unless it is open."""
        if self._state:
            self._refuse()

    def _refuse(self) -> None:
        what = f'{self._owner} of service "{self.service}"'
        if self._state == FORKED:
            raise ForkedError(f"{what} belongs to process {self._pid}, which forked this one: create a new one here")
        raise ClosedError(f"{what} is closed")

    def refuse_calls(self) -> None:
        """It closes soon: calls that wait, and those that begin, raise `ClosedError`."""
        self._stop = True

    async def until_idle(self) -> None:
        """Wait until no thread is inside a call."""
        await self._until_idle()


class Posting(ServiceEndpoint, AsyncSender):
    """Base of `Requests` and `Replies`: a sender whose messages have notes."""

    @abstractmethod
    def _registration(self, note: Any) -> Registration:
        """The words of a note, as the writer stores them."""

    def post(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a message with its note; raises what `send` raises."""
        if self._state:  # as `check_open`, without a call
            self._refuse()
        registration = self._registration(note)
        sent = self._writer.send(value, meta, 0, *registration)
        if type(sent) is not int:
            self._post(sent, timeout, registration)
        elif sent < 0:
            self._wake_late(-sent)

    def _post(self, out: Any, timeout: float | None, registration: Registration) -> None:
        self._run(self._put, out, timeout, *registration)

    async def apost(self, note: Any, value: Any, meta: Any, timeout: float | None) -> None:
        """`post` for asyncio: other tasks run while this one waits."""
        sent = await self._asend(value, meta, timeout, *self._registration(note))
        if isinstance(sent, Sending):
            await self._when_copied(sent)
