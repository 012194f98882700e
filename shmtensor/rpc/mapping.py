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
WARY_MOST: Final = 63
"""Windows without a rest, after rests that were too long."""


def mapped(
    client: Client, values: Iterable[Any], timeout: float | None, retry: bool, window: int | None
) -> Iterator[Any]:
    """See `Client.map`."""
    waiting: deque[Call] = deque()
    answers = client._answers
    pace = Pace(answers._spin)
    try:
        for value in values:
            while len(waiting) >= (window or client._requests.window):
                sleepy = (pace.rests or answers._in_vain) and not waiting[0].done
                yield _first_after_rest(client, waiting, pace) if sleepy else _first(client, waiting)
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
    answered, as network cards coalesce interrupts (docs/rpc.md). A rest after which none is left was too long, perhaps
    since replies do not come evenly: the next ones are left out, for twice as many windows each time.
    """

    def __init__(self, spin: float) -> None:
        self.got, self.waited = 0, 0.0
        """Replies, and the seconds that were waited for them, in the window that is measured."""
        self.rests = False
        """Whether there was time for a rest when it was last asked for."""
        self._spin = spin
        self._before = self._each = 0.0
        self._wary = self._without = 0

    def rest(self, window: int, most: int) -> float:
        """Seconds to rest, with so many requests on their way; 0.0: not at all.

        `most` replies may come meanwhile before a server has to wait for the client.
        """
        if self.got >= window:
            before, self._before = self._before, self.waited / self.got
            self._each = min(before, self._before)  # one slow reply among many is no pace
            self.got, self.waited = 0, 0.0
            self._without = max(0, self._without - 1)
        each = self._each
        seconds = min(each * (most // 2), LONGEST_S)
        is_worth_it = self._spin < each <= LONGEST_S / 2 and seconds >= SHORTEST_S  # to be woken for slow ones is cheap
        self.rests = is_worth_it and not self._without
        return seconds if self.rests else 0.0

    def judge(self, left: int) -> None:
        """After a rest: so many replies may still come before a server has to wait."""
        if left:
            self._wary = max(0, self._wary - 1)
        else:
            self._wary = self._without = min(2 * self._wary + 1, WARY_MOST)


def _first_after_rest(client: Client, waiting: deque[Call], pace: Pace) -> Any:
    """The first one's value: of the replies that are there, or after a rest."""
    began = monotonic()
    _collect(client, len(waiting))
    if not waiting[0].done:
        _rest(client, waiting, pace)
    value = _first(client, waiting)
    pace.waited += monotonic() - began
    return value


def _rest(client: Client, waiting: deque[Call], pace: Pace) -> None:
    """Sleep a little if servers are busy meanwhile, and take the replies that are there then."""
    deadline = waiting[0].deadline
    seconds = pace.rest(len(waiting), _room(client, waiting))
    if seconds and not (deadline and deadline < monotonic_ns() + 2e9 * LONGEST_S):
        sleep(seconds)
        pace.judge(_room(client, waiting))
        _collect(client, len(waiting))


def _room(client: Client, waiting: deque[Call]) -> int:
    """How many replies may come before a server waits: for a request, or for a slot to put its reply into."""
    room = sum(not client._requests.was_taken(call) for call in waiting)
    for feed in client._answers._feeds:
        room = min(room, sum(ring.slots for ring in feed.rings) - len(feed.leases) - max(0, feed.behind))
    return max(0, room)


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
