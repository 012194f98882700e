"""Warnings of a sender: messages that are lost when it closes, and a long wait for a slot."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from .producer import Producer

log = logging.getLogger("shmtensor")

SLOW_S: Final = 5.0
"""Seconds of waiting for a slot after which a sender logs who holds the slots."""

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Wait:
    """One wait for a slot. Logs once, after `SLOW_S` seconds, who holds the slots.

    Args:
        full_text: the sender's description of that, for a message of so many bytes.
    """

    __slots__ = ("_due", "_full_text")

    def __init__(self, full_text: Callable[[int], str]) -> None:
        self._full_text = full_text
        self._due = time.monotonic() + SLOW_S

    def check(self, nbytes: int) -> None:
        """Called each time when there is still no slot for a message of so many bytes."""
        if time.monotonic() >= self._due:
            self._due = float("inf")
            log.warning("a send has waited %g s for a slot: %s", SLOW_S, self._full_text(nbytes))


def report_lost(producer: Producer, count: int) -> None:
    """Warn that so many unfinished messages were lost with the last member of a work queue."""
    text = (
        f'channel "{producer.name}": {count} message{"s" if count > 1 else ""} that no consumer has finished '
        f"end{'' if count > 1 else 's'} with this Producer, the last member of the channel: start a Consumer before "
        "close(), and let close(linger=seconds) wait until everything is done (linger=None: for ever)"
    )
    log.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=_depth(), source=producer)


def _depth() -> int:
    """The `stacklevel` of the nearest frame outside this package."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth
