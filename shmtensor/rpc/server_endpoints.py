"""A server's endpoints: the consumer of requests, and a publisher of replies for each client."""

from __future__ import annotations

from typing import Any

from ..channel import control as ctl
from ..endpoints.consumer import Consumer
from ..endpoints.pubsub import Publisher
from ..endpoints.spinning import Spin
from ..endpoints.traits import ReceiverTraits, SenderTraits
from ..errors import ClosedError
from ..options import format_bytes
from ..ring.layout import FAN_OUT, SERVICE, WORK_QUEUE
from ..ring.pool import Sizing
from ..ring.reader import Reader
from ..ring.writer import Registration
from .service_endpoint import Posting, ServiceEndpoint
from .sidecar import BUDGET


class Source:
    """A ring of a client, and the publisher of replies to that client once there is one."""

    __slots__ = ("reader", "replies", "words")

    def __init__(self, reader: Reader, words: memoryview) -> None:
        self.reader = reader
        self.words = words  # kept, so that its `id` stays its own
        self.replies: Replies | None = None


class Intake(ServiceEndpoint, Consumer):
    """Takes requests; several may be open at once."""

    _owner = "Server"
    _traits = ReceiverTraits(
        WORK_QUEUE,
        SERVICE,
        keeps_claims=True,
        given_up="service %s: request %d of client %016x dropped after %d servers that did not finish it",
    )

    def __init__(self, service: str, *, max_attempts: int, spin: float) -> None:
        self._sources: dict[int, Source] = {}  # by the id of their rings' words
        super().__init__(service, acknowledge="release", max_attempts=max_attempts, spin=spin)

    def _is_over(self) -> bool:
        if any(reader.gone for reader in self._readers):
            self._retire_drained()
        return False  # another client may come

    @property
    def epoch(self) -> int:
        """Changes when clients have come or gone."""
        return self._epoch

    def source_of(self, words: memoryview) -> Source:
        """The source of a request in the ring of these words."""
        source = self._sources.get(id(words))
        if source is None:
            source = self._sources[id(words)] = Source(self._find(words), words)
        return source

    def forget_sources(self) -> None:
        """Release the rings: their clients may have left."""
        self._sources = {}

    def _acknowledge(self, lease: Any) -> None:
        if not self.is_forked:
            lease.acknowledge()

    def _find(self, words: memoryview) -> Reader:
        for reader in (*self._readers, *self._retired):
            if any(ring.words is words for ring in reader.rings):
                return reader  # type: ignore[no-any-return]
        raise LookupError("a request of an unknown client")

    def has_left(self, reader: Reader) -> bool:
        """Whether a client has left or died. Asks the kernel: while a handler runs, no call checks who lives."""
        if reader.gone or reader.sequences.closed:
            return True
        if self._state:
            return False
        control = self._member.control
        try:
            return control.words[ctl.base(reader.index)] != reader.uid or not control.is_alive(reader.index)
        except ClosedError:  # by another thread
            return False

    def clients(self) -> dict[int, bool]:
        """The uids of the clients that are attached, and whether each has left."""
        return {reader.uid: reader.gone for reader in (*self._readers, *self._retired)}


class Replies(Posting, Publisher):
    """Publishes replies to one client, each with the number of the request that it is for."""

    _owner = "Server"
    _traits = SenderTraits(FAN_OUT, sizing=Sizing(most=8, least=2, nbytes=BUDGET))

    def __init__(self, channel: str, *, slots: int | None, max_bytes: int | str | None) -> None:
        super().__init__(channel, slots=slots, max_bytes=max_bytes)
        # set afterwards, so that the sequence table stays small: more rings are made for a client that keeps replies
        self._full, self._spin = "grow", Spin(0.0)

    @property
    def service(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def _registration(self, seq: int) -> Registration:
        """`seq`: of the request that the reply is for."""
        return seq, 0, None, None

    def _full_text(self, nbytes: int) -> str:
        return (
            f'service "{self.service}": no room for a reply of {format_bytes(nbytes)}: its client keeps earlier ones '
            f"in all {self._pool.slots} slots, and there is no memory for more: let go of replies there, or make the "
            "server with a larger max_bytes="
        )
