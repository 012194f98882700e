"""Readings of channels over time: the rates of members between two of them, and the wait for the next one."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from ..channel.info import ChannelInfo, MemberInfo


class Rate(NamedTuple):
    """What a member sends, or takes, each second; of a channel: what its senders send."""

    messages: float
    nbytes: float
    """Bytes of payload: the number of messages times the size of the sender's newest one that is known. 0 for a
    receiver."""


NONE: Final = Rate(0.0, 0.0)


_UNSEEN: Final = -1, None


def has_newest(member: MemberInfo) -> bool:
    """Whether a sender's newest message is known: it has sent one that was not overwritten while it was read."""
    return member.newest_age > 0


class Rates:
    """Compares each reading with the one before."""

    def __init__(self) -> None:
        self._at = 0.0
        self._last: dict[int, tuple[int, int | None]] = {}
        """By the uid of each member: what it had counted then, and the size of its newest message, None if unknown."""
        self._rates: dict[int, Rate] = {}

    def update(self, channels: Iterable[ChannelInfo], now: float) -> None:
        """Take a reading that was made at `now`, on any clock that does not jump."""
        last, self._at, elapsed = self._last, now, now - self._at
        self._last, self._rates = {}, {}
        for channel in channels:
            for member in channel.members:
                uid, count = member.uid, member.published if member.role == "sender" else member.received
                before, known = last.get(uid, _UNSEEN)
                newest = member.newest_bytes if has_newest(member) else known
                self._last[uid] = count, newest
                if 0 <= before <= count and elapsed > 0:
                    each = (count - before) / elapsed
                    size = 0 if newest is None else newest if known is None else (known + newest) / 2
                    self._rates[uid] = Rate(each, each * size)

    def of(self, member: MemberInfo) -> Rate | None:
        """The rate of a member; None if there is no reading of it before the last one, or it cannot be known."""
        return self._rates.get(member.uid) if member.role == "sender" or member.delivery == "all" else None

    def of_channel(self, channel: ChannelInfo) -> Rate | None:
        """What all senders of a channel send together; None if no rate is known."""
        found: Rate | None = None
        for member in channel.members:
            rate = self._rates.get(member.uid) if member.role == "sender" else None
            if rate is not None:
                found = rate if found is None else Rate(found.messages + rate.messages, found.nbytes + rate.nbytes)
        return found


LEAST_S: Final = 0.1
"""Seconds between two readings, however many processes end."""


class Ends:
    """Descriptors of the processes in the last reading: each becomes readable when its process ends."""

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}
        self.unseen: set[int] = set()
        """The living members whose processes cannot be seen to end: those of another pid namespace, for example."""

    def watch(self, channels: Iterable[ChannelInfo]) -> None:
        """Wait for the ends of the processes of these channels' living members."""
        members = [member for channel in channels for member in channel.members if member.alive]
        pids = {member.host_pid for member in members} - {0}
        for pid in self._opened.keys() - pids:
            os.close(self._opened.pop(pid))
        for pid in pids - self._opened.keys():
            with contextlib.suppress(OSError):  # it has ended, or there are too many
                self._opened[pid] = os.pidfd_open(pid)
        self.unseen = {member.uid for member in members if member.host_pid not in self._opened}

    def wait(self, seconds: float, also: Collection[int] = ()) -> set[int]:
        """Wait for `seconds`, or until a process ends, or one of the descriptors `also` is readable.

        Returns the readable descriptors.
        """
        until = time.monotonic() + seconds
        poll = select.poll()
        for fd in also:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(min(seconds, LEAST_S) * 1e3)
        if not ready:
            for fd in self._opened.values():
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1e3)
        return {fd for fd, _ in ready}

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
