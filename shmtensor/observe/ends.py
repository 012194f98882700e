"""Wait for the next reading, or for the end of a process that has a member, whichever comes first."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable
from typing import Final

from ..channel.info import ChannelInfo

LEAST_S: Final = 0.1
"""Seconds between two readings, however many processes end."""


class Ends:
    """Descriptors of the processes that were seen last: each becomes readable when its process ends."""

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}

    def watch(self, channels: Iterable[ChannelInfo]) -> None:
        """Wait for the ends of the processes of these channels' living members."""
        pids = {member.host_pid for channel in channels for member in channel.members if member.alive} - {0}
        for pid in self._opened.keys() - pids:
            os.close(self._opened.pop(pid))
        for pid in pids - self._opened.keys():
            with contextlib.suppress(OSError):  # it has ended, or there are too many: then the next reading shows it
                self._opened[pid] = os.pidfd_open(pid)

    def wait(self, seconds: float) -> None:
        """Wait so many seconds, or until a process ends."""
        until = time.monotonic() + seconds
        time.sleep(min(seconds, LEAST_S))
        poll = select.poll()
        for fd in self._opened.values():
            poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1e3)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
