"""`Client.map`: many requests on their way at once, and their replies in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic, monotonic_ns, sleep
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .call import Call
    from .client import Client

LONGEST_S: Final = 0.01
"""Nobody rests for longer: so much later a reply may be seen."""
SHORTEST_S: Final = 500e-6
"""A shorter rest costs about as much as it saves."""
MOST: Final = 4
"""Replies to rest for: of a server's 8 slots for them most stay free."""


def mapped(
    client: Client, values: Iterable[Any], timeout: float | None, retry: bool, window: int | None
) -> Iterator[Any]:
    """See `Client.map`."""
    waiting: deque[Call] = deque()
    pace, answers = Pace(), client._answers
    try:
        for value in values:
            while len(waiting) >= (window or client._requests.window):
                if (pace.rests or answers._in_vain) and not waiting[0].done:
                    _rest(client, waiting, pace)
                yield _first(client, waiting)
                pace.got += 1
            call = client._call(timeout, retry)
            client._post(call, value, None, timeout)
            waiting.append(call)
        while waiting:
            yield _first(client, waiting)
    finally:
        for call in waiting:
            client._drop(call)


def _first(client: Client, waiting: deque[Call]) -> Any:
    """The first one's value; until it has one it is among those that wait, for Ctrl-C to find."""
    if not waiting[0].done:
        client._help(waiting[0], None)
    return waiting.popleft().result()


class Pace:
    """How fast the replies come, and how long their client therefore rests before it lets itself be woken for one.

    Being woken costs the server a doorbell and the client its caches, and while servers are busy with the rest of a
    window nobody waits for the client. So it sleeps while about half of its requests that no server has taken yet are
    answered, as network cards coalesce interrupts (docs/rpc.md).
    """

    def __init__(self) -> None:
        self.got = 0
        """Replies since the last look at the clock."""
        self.rests = False
        """Whether there was a rest when it was last asked for."""
        self._since = 0.0
        self._each = 0.0

    def rest(self, now: float, window: int, queued: int) -> float:
        """Seconds to rest, of `monotonic()` now; 0.0: not at all.

        Of the `window` requests that are on their way, no server has taken `queued` yet.
        """
        if not self._since:
            self._since, self.got = now, 0
        elif self.got >= window:
            self._each = (now - self._since) / self.got
            self._since, self.got = now, 0
        each = self._each
        seconds = min(each * min(queued // 2, MOST), LONGEST_S)
        self.rests = seconds >= SHORTEST_S and 2 * each <= LONGEST_S  # slow ones cost little to be woken for
        return seconds if self.rests else 0.0


def _rest(client: Client, waiting: deque[Call], pace: Pace) -> None:
    """Take the replies that are there; if the first is not among them, sleep a little, and do it again."""
    call = waiting[0]
    _collect(client, len(waiting))
    if call.done:
        return
    queued = sum(not client._requests.was_taken(each) for each in waiting)
    seconds = pace.rest(monotonic(), len(waiting), queued)
    if seconds and not (call.deadline and call.deadline < monotonic_ns() + 2e9 * LONGEST_S):
        sleep(seconds)
        _collect(client, len(waiting))


def _collect(client: Client, most: int) -> None:
    """Hand out the replies that are there, unless another thread receives."""
    answers = client._answers
    if answers._has_news() and client._leading.acquire(False):
        try:
            while most and answers._has_news():
                client._receive(0.0)
                most -= 1
        finally:
            client._stop_leading()
