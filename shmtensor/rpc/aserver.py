"""What a `Server` offers to an event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..endpoints.base import FORKED, check_timeout
from ..endpoints.local import Local
from ..errors import ClosedError, TimedOut

if TYPE_CHECKING:
    from .server import Server

_A = TypeVar("_A", bound="AsyncServer")


class AsyncServer(Local):
    """The calls of `Server` that an event loop can wait for. `req.reply` may be used there: it waits for room only."""

    async def arecv(self, *, timeout: float | None = None) -> Any:
        """`recv` for asyncio: other tasks run while this one waits, and no thread is used.

        Several tasks may wait at one server. A task that is cancelled while it waits has taken nothing; what it had put
        aside for a batch is in the next one.

        Arguments and errors are those of `recv`; also `LoopError`, if tasks of another event loop wait at this server.

        >>> import asyncio, shmtensor, torch
        >>> async def main():
        ...     async with shmtensor.Server("doc") as server, shmtensor.Client("doc") as client:
        ...         asking = asyncio.create_task(client.arequest(torch.arange(3), timeout=5))
        ...         req = await server.arecv(timeout=5)
        ...         req.reply(-req.value)
        ...         return await asking
        >>> asyncio.run(main())
        tensor([ 0, -1, -2])
        """
        check_timeout(timeout)
        server = cast("Server", self)
        deadline = None if timeout is None else time.monotonic() + timeout
        taken: list[Any] = []
        try:
            while True:
                try:
                    server._take_left(taken)
                    if not taken:
                        message = await server._intake.arecv(timeout=server._patience(deadline))
                        taken[:] = (message,)
                        del message
                    found = server._give_out(taken)
                except (TimedOut, ClosedError) as error:
                    found = server._nothing_came(error, deadline, taken)
                if found is not None:
                    return found
        except BaseException:
            server._left.extend(taken)
            raise

    def __aiter__(self: _A) -> _A:
        return self

    async def __anext__(self) -> Any:
        server = cast("Server", self)
        try:
            return await self.arecv()
        except ClosedError:
            if server._intake._state == FORKED:
                raise
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """`close` for asyncio: tasks that wait here get a `ClosedError`, and so do threads."""
        server = cast("Server", self)
        server._stopping = server._intake._stop = True
        try:
            await server._intake._until_idle()
        finally:
            server.close()

    async def __aenter__(self: _A) -> _A:
        return cast(_A, cast("Server", self).__enter__())

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
