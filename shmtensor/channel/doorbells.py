"""Doorbells: what a sender writes to the inboxes of receivers that sleep.

A doorbell carries the descriptor of a message. It may arrive after its sleeper woke by itself, twice, or never: the
truth is in shared memory, and a lost doorbell costs one tick.
"""

from __future__ import annotations

import contextlib
from typing import Final

from ..errors import WireError
from .names import socket_path
from .zmtp import Push

_GREETING_S: Final = 0.02
"""The longest that the first doorbell to a receiver waits for its I/O thread, which answers in a fraction of it."""


class Doorbells:
    """Connections to the inboxes of sleepers, opened when one is first rung."""

    __slots__ = ("_directory", "_lines")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lines: dict[int, Push] = {}

    def ring(self, uid: int, bell: bytes) -> Push | None:
        """Send a doorbell; a full inbox wakes its sleeper anyway. Returns where it can be rung from now on, if it can.

        Where it cannot be sent its sleeper wakes at the next tick: what it is rung for is published already.
        """
        try:
            line = self._lines.get(uid)
            if line is None:
                line = self._lines[uid] = Push(socket_path(self._directory, uid))
            return line if line.send(bell, _GREETING_S) else None
        except (OSError, WireError):
            self.forget(uid)  # the next doorbell makes another connection
            return None

    def forget(self, uid: int) -> None:
        """Close the connection to a member that is gone."""
        line = self._lines.pop(uid, None)
        if line is not None:
            line.close()

    def close(self) -> None:
        """Close every connection. Doorbells that were sent still arrive."""
        with contextlib.suppress(KeyError):
            while True:
                self._lines.popitem()[1].close()
