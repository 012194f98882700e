"""A server's endpoints: the consumer of requests, and a publisher of replies for each client."""

from __future__ import annotations

from typing import Any

from ..endpoints.base import FORKED
from ..endpoints.consumer import Consumer
from ..endpoints.pubsub import Publisher
from ..endpoints.spinning import Spin
from ..ring.feed import Feed
from ..ring.layout import SERVICE
from ..ring.pool import Sizing
from ..ring.writer import Beside
from ..units import format_bytes
from .asking import refuse
from .notes import BUDGET
from .posting import Posting


class Source:
    """A ring of a client's, as requests come from it."""

    __slots__ = ("feed", "replies", "words")

    def __init__(self, feed: Feed, words: memoryview) -> None:
        self.feed = feed
        self.words = words  # kept, so that its `id` stays its own
        self.replies: Replies | None = None


class Intake(Consumer):
    """Takes requests, several at once if need be."""

    _counts_lost = False
    _abandoned_text = "service %s: request %d of client %016x dropped after %d servers that did not finish it"

    @property
    def _channel_kind(self) -> int:
        return SERVICE

    def __init__(self, service: str, *, max_attempts: int, spin: float) -> None:
        self._sources: dict[int, Source] = {}  # by the id of their words
        super().__init__(service, acknowledge="release", max_attempts=max_attempts, spin=spin)

    def _is_over(self) -> bool:
        if any(feed.gone for feed in self._feeds):
            self._retire_drained()
        return False  # another client may come

    def source_of(self, lease: Any) -> Source:
        """The client whose request this is."""
        source = self._sources.get(id(lease.words))
        if source is None:
            words = lease.words
            source = self._sources[id(words)] = Source(self._find(words), words)
        return source

    def forget_sources(self) -> None:
        """Clients may have left: let go of their rings."""
        self._sources = {}

    def _acknowledge(self, lease: Any) -> None:
        if self._state != FORKED:
            lease.acknowledge()

    def _find(self, words: memoryview) -> Feed:
        for feed in (*self._feeds, *self._retired):
            if any(ring.words is words for ring in feed.rings):
                return feed  # type: ignore[no-any-return]
        raise LookupError("a request of an unknown client")

    def clients(self) -> dict[int, bool]:
        """The uids of the clients that are attached, and whether each has left."""
        return {feed.uid: feed.gone for feed in (*self._feeds, *self._retired)}

    def _refuse(self) -> None:
        refuse(self, "Server")


class Replies(Posting, Publisher):
    """Publishes replies to one client, each with the number of the request that it is for."""

    def __init__(self, channel: str, *, slots: int | None, max_bytes: int | str | None) -> None:
        self._sizing = Sizing(most=8, least=2, nbytes=BUDGET)
        super().__init__(channel, slots=slots, max_bytes=max_bytes)
        # set afterwards, so that the order table stays small: a client that keeps its replies does not hold us up
        self._full, self._spin = "grow", Spin(0.0)

    def _beside(self, number: int) -> Beside:
        """`number`: of the request that the reply is for."""
        return number, 0, None, None

    def _full_text(self, nbytes: int) -> str:
        service = self.name.rsplit(".", 1)[0]
        return (
            f'service "{service}": no room for a reply of {format_bytes(nbytes)}: its client keeps earlier ones in all '
            f"{self._pool.slots} slots, and there is no memory for more: let go of replies there, or make the server "
            "with a larger max_bytes="
        )
