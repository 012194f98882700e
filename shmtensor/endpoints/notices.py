"""What a sender tells its user unasked: messages that end unseen, and a wait for a slot that lasts."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .producer import Producer
    from .sender import Sender

log = logging.getLogger("shmtensor")

SLOW_S: Final = 5.0
"""Seconds that a sender has waited for a slot when it says who holds them."""

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Wait:
    """One wait for a slot: the first look after `SLOW_S` seconds logs who holds the slots, once."""

    __slots__ = ("_due", "_sender")

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._due = time.monotonic() + SLOW_S

    def look(self, nbytes: int) -> None:
        """There is no slot yet for a message of so many bytes."""
        if time.monotonic() >= self._due:
            self._due = float("inf")
            log.warning("a send has waited %g s for a slot: %s", SLOW_S, self._sender._full_text(nbytes))


def tell_lost(producer: Producer, count: int) -> None:
    """Messages have ended with the last member of a work queue, and nobody has finished them."""
    text = (
        f'channel "{producer.name}": {count} message{"s" if count > 1 else ""} that no consumer has finished '
        f"end{'' if count > 1 else 's'} with this Producer, the last member of the channel: start a Consumer before "
        "close(), and let close(linger=seconds) wait until everything is done (linger=None: for ever)"
    )
    log.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=_depth(), source=producer)


def _depth() -> int:
    """The `stacklevel` of the caller's frame that is the user's."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth
