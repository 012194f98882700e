"""`Client.map`: many requests on their way at once, and their replies in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import Call
    from .client import Client


def mapped(
    client: Client, values: Iterable[Any], timeout: float | None, retry: bool, window: int | None
) -> Iterator[Any]:
    """See `Client.map`."""
    waiting: deque[Call] = deque()
    try:
        for value in values:
            while len(waiting) >= (window or client._requests.window):
                yield _first(client, waiting)
            waiting.append(client._call(timeout, retry))
            client._requests.post(waiting[-1], value, None, timeout)
        while waiting:
            yield _first(client, waiting)
    finally:
        client._given_up.extend(waiting)
        client._cancel_given_up()


def _first(client: Client, waiting: deque[Call]) -> Any:
    """The first one's value; until it has one it is among those that wait, for Ctrl-C to find."""
    if not waiting[0].done:
        client._help(waiting[0], None)
    return waiting.popleft().result()
