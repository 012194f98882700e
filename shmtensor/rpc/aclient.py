"""What a `Client` offers to an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..endpoints.local import Local

if TYPE_CHECKING:
    from .client import Client

_A = TypeVar("_A", bound="AsyncClient")


class AsyncClient(Local):
    """The calls of `Client` that an event loop can wait for."""

    async def arequest(self, value: Any, meta: Any = None, *, timeout: float | None = None, retry: bool = True) -> Any:
        """`request` for asyncio: other tasks run while this one waits, and no thread is used.

        Any number of tasks may wait for replies at once. A task that is cancelled gives its request up: a server that
        has not started it never will, and the reply of one that has is dropped.

        Arguments and errors are those of `request`; also `LoopError`, if tasks of another event loop wait at this
        client.

        >>> import asyncio, shmtensor, threading, torch
        >>> async def main():
        ...     with shmtensor.Client("doc") as client:
        ...         return await asyncio.gather(*(client.arequest(torch.tensor(n), timeout=5) for n in range(3)))
        >>> with shmtensor.Server("doc") as server:
        ...     threading.Thread(target=server.run, args=(torch.neg,), daemon=True).start()
        ...     asyncio.run(main())
        ...     server.stop()
        [tensor(0), tensor(-1), tensor(-2)]
        """
        from .arequest import arequest

        return await arequest(cast("Client", self), value, meta, timeout, retry)

    async def aclose(self) -> None:
        """`close` for asyncio: other tasks run while threads that are inside a call of this client come out of it."""
        client = cast("Client", self)
        ends = client._requests, client._answers
        client._cancel_all()
        client._driver.stop(wait=False)
        for end in ends:
            end._stop = True
        try:
            for end in ends:
                await end._until_idle()
            await client._driver.ended()
        finally:
            client.close()

    async def __aenter__(self: _A) -> _A:
        return cast(_A, cast("Client", self).__enter__())

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
