"""A server's endpoints: the consumer of requests, and a publisher of replies for each client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..endpoints.base import FORKED
from ..endpoints.consumer import Consumer
from ..endpoints.message import Message
from ..endpoints.pubsub import Publisher
from ..memory.words import store
from ..ring.competing import CompetingFeed
from ..ring.feed import Found
from ..ring.layout import SERVICE
from ..ring.ring import Ring
from ..units import format_bytes
from ..views.outgoing import Outgoing
from .asking import refuse
from .notes import BUDGET
from .posting import Posting
from .request import Request

if TYPE_CHECKING:
    from .server import Server


class Source:
    """A ring of a client's, as requests come from it."""

    __slots__ = ("feed", "inlet", "replies", "words")

    def __init__(self, feed: CompetingFeed, words: memoryview) -> None:
        self.feed = feed
        self.words = words  # kept, so that its `id` stays its own
        self.replies: Replies | None = None
        self.inlet: Any = None  # of the compiled module, where usual ones come by


class Intake(Consumer):
    """Takes requests, several at once if need be."""

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

    def _find(self, words: memoryview) -> CompetingFeed:
        for feed in (*self._feeds, *self._retired):
            if any(ring.words is words for ring in feed.rings):
                return feed
        raise LookupError("a request of an unknown client")

    def request_soon(self, server: Server, open_: dict[int, Message]) -> Request | Message | None:
        """A usual tensor that is there now (of a single client: very soon), as a request whose message is in `open_`.

        The message itself, if somebody has to look whether it may be started; None if nothing usual is there."""
        inlet = self._inlet
        if inlet is not None:
            if (found := inlet.request(self, self._patience, server, open_)) is not None and inlet.more:
                self._share()
            return found  # type: ignore[no-any-return]
        feeds, turn = self._feeds, self._turn
        for feed in feeds[turn:] + feeds[:turn]:
            inlet = feed.inlet
            if inlet is not None and (found := inlet.request(self, 0, server, open_)) is not None:
                self._turn = turn + 1 if turn < len(feeds) else 0
                words = self._control_words
                for asleep in self._siblings_asleep:
                    if words[asleep] & 1:
                        self._share_others()
                        break
                return found  # type: ignore[no-any-return]
            if feed.behind > 0:  # something unusual, or it is time to look around: the others wait for their turn
                return None
        return None

    def _learn(self, feed: CompetingFeed, found: Found, value: Any) -> None:
        super()._learn(feed, found, value)
        if feed.inlet is not None:
            words = found.ring.words
            source = self._sources.get(id(words))
            if source is None:
                source = self._sources[id(words)] = Source(feed, words)
            feed.inlet.serve(Request, source)
            source.inlet = feed.inlet

    def clients(self) -> dict[int, bool]:
        """The uids of the clients that are attached, and whether each has left."""
        return {feed.uid: feed.gone for feed in (*self._feeds, *self._retired)}

    def _refuse(self) -> None:
        refuse(self, "Server")


class Replies(Posting, Publisher):
    """Publishes replies to one client, each with the number of the request that it is for."""

    def __init__(self, channel: str, *, slots: int | None, max_bytes: int | str | None) -> None:
        self._budget = BUDGET if slots is None else None
        super().__init__(channel, slots=8 if slots is None else slots, max_bytes=max_bytes)
        # set afterwards, so that the order table stays small: a client that keeps its replies does not hold us up
        self._full, self._patience = "grow", 0

    def post(self, note: int, value: Any, meta: Any, timeout: float | None) -> None:
        """Publish a reply to the request of that number; waits for so long where memory is scarce."""
        with self._posting:
            self._note = note
            self._send(value, meta, timeout)

    def _full_text(self, nbytes: int) -> str:
        service = self.name.rsplit(".", 1)[0]
        return (
            f'service "{service}": no room for a reply of {format_bytes(nbytes)}: its client keeps earlier ones in all '
            f"{self._pool.slots} slots, and there is no memory for more: let go of replies there, or make the server "
            "with a larger max_bytes="
        )

    def _publish(self, ring: Ring, slot: int, out: Outgoing, guard: Any) -> int:
        store(ring.words, ring.state + self._member.index * ring.row + slot, self._note)
        # crash: reply.noted
        return super()._publish(ring, slot, out, guard)
