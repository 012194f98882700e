"""What a receiver's messages consist of, and what it counts: the reference of what `native/reader.c` has as well."""

from __future__ import annotations

from typing import Any


class Received:
    """The base of messages."""

    __slots__ = ("_hold", "_lease", "_receiver", "attempt", "meta", "missed", "nbytes", "seq", "value")

    def __init__(
        self, value: Any, meta: Any, seq: int, nbytes: int, attempt: int, missed: int, hold: Any, lease: Any,
        receiver: Any,
    ) -> None:  # fmt: skip
        self.value, self.meta, self.seq, self.nbytes = value, meta, seq, nbytes
        self.attempt, self.missed, self._hold, self._lease, self._receiver = attempt, missed, hold, lease, receiver


class Counts:
    """What a receiver has taken."""

    __slots__ = ("missed", "received", "received_bytes", "redelivered")

    def __init__(self) -> None:
        self.received = self.received_bytes = self.missed = self.redelivered = 0
