"""Rates of members, from two readings of what they have published and taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..channel.info import ChannelInfo, MemberInfo


@dataclass(frozen=True)
class Rate:
    """What a member sends, or takes, each second; of a channel: what its senders send."""

    messages: float
    nbytes: float
    """Bytes of payload: the number of messages times the size of the sender's newest one. 0 for a receiver."""


NONE: Final = Rate(0.0, 0.0)


@dataclass(frozen=True)
class _Before:
    count: int
    at: float
    nbytes: int


class Rates:
    """Compares each reading with the one before."""

    def __init__(self) -> None:
        self._before: dict[int, _Before] = {}
        self._rates: dict[int, Rate] = {}

    def update(self, channels: Iterable[ChannelInfo], now: float) -> None:
        """Take a reading that was made at `now`, on any clock that does not jump."""
        before, self._before, self._rates = self._before, {}, {}
        for channel in channels:
            for member in channel.members:
                count = member.published if member.role == "sender" else member.received
                self._before[member.uid] = _Before(count, now, member.newest_bytes)
                last = before.get(member.uid)
                if last is not None and now > last.at and count >= last.count:
                    each = (count - last.count) / (now - last.at)
                    size = (last.nbytes + member.newest_bytes) / 2 if last.count else member.newest_bytes
                    self._rates[member.uid] = Rate(each, each * size)

    def of(self, member: MemberInfo) -> Rate | None:
        """The rate of a member; None if there is no reading of it before the last one, or it cannot be known."""
        return self._rates.get(member.uid) if member.role == "sender" or member.delivery == "all" else None

    def of_channel(self, channel: ChannelInfo) -> Rate | None:
        """What all senders of a channel send together; None if no rate is known."""
        known = [rate for member in channel.members if member.role == "sender" and (rate := self.of(member))]
        return Rate(sum(it.messages for it in known), sum(it.nbytes for it in known)) if known else None
