"""In what endpoints of one side differ without code of their own: each class has one of these, its bases read it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ring.layout import FAN_OUT
from ..ring.pool import SIZED, Pool, Sizing


@dataclass(frozen=True)
class Traits:
    """What senders and receivers have in common."""

    kind: int
    """Of the rings: `FAN_OUT` or `WORK_QUEUE`."""
    service: int = 0
    """The kind of the channel, if it is not that of the rings."""
    counts_lost: bool = False
    """Whether it tells how many messages end unfinished with it as the last member of its channel."""

    @property
    def channel(self) -> int:
        """The kind of the channel: one of `KINDS`."""
        return self.service or self.kind


@dataclass(frozen=True)
class SenderTraits(Traits):
    """Of a sender."""

    sizing: Sizing = SIZED
    """Of rings for which the caller chose no number of slots."""
    pool: type[Pool] = Pool
    """Decides how many slots of which size a ring gets."""
    widest: int = 0
    """See `make_writer`."""
    carries_context: bool = False
    """Whether the meta of its messages is the user's, so that it may carry a trace context."""
    checks_verdicts: bool = False
    """Whether slots that a server has given back with a verdict wait for `Writer.judge`."""


@dataclass(frozen=True)
class ReceiverTraits(Traits):
    """Of a receiver."""

    is_only_reader: bool = False
    """Whether no other receiver gets the same messages, although it is a fan-out."""
    keeps_claims: bool = False
    """Whether a message of `recv(copy=True)` keeps its claim, to be acknowledged later."""
    raises_unreadable: bool = True
    """Fan-out: whether `recv` raises the error of a message that only a missing package can read. Else it returns the
    message, with the error as its meta."""
    given_up: str = "channel %s: message %d of producer %016x dropped after %d attempts that did not finish it"
    """What is logged of a message that was delivered too often."""

    @property
    def maps_writable(self) -> bool:
        """Whether slots are mapped writable: no other receiver gets the same messages."""
        return self.is_only_reader or self.kind != FAN_OUT
