"""Warnings of a sender: messages that are lost when it closes, and a long wait for a slot."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..channel.membership import Member
    from .producer import Producer

log = logging.getLogger("shmtensor.endpoints")

SLOW_S: Final = 5.0
"""Seconds of waiting for a slot after which a sender logs who holds the slots."""

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Wait:
    """One wait for a slot. Logs once, after `SLOW_S` seconds, who holds the slots.

    Args:
        full_text: the sender's description of what it waits for, for a message of so many bytes.
        sender: who waits.
    """

    __slots__ = ("_due", "_full_text", "_sender")

    def __init__(self, full_text: Callable[[int], str], sender: Member) -> None:
        self._full_text, self._sender = full_text, sender
        self._due = time.monotonic() + SLOW_S

    def check(self, nbytes: int) -> None:
        """Called each time when there is still no slot for a message of so many bytes."""
        if time.monotonic() >= self._due:
            self._due = float("inf")
            holders = holders_text(self._sender.channel, self._sender.uid)
            log.warning("a send has waited %g s for a slot: %s%s", SLOW_S, self._full_text(nbytes), holders)


def holders_text(channel: str, sender: int) -> str:
    """Who holds how many messages of a sender, and how, by what all members have stored; empty if that is unknown."""
    from ..channel.inspect import Inspector

    with contextlib.suppress(OSError, ValueError, LookupError, ArithmeticError):
        info = Inspector(messages=True).channel(channel)
        if info is not None:
            members = {member.uid: member for member in info.members}
            found: dict[str, Counter[str]] = {}
            for message in info.held:
                for it in message.holders if message.sender == sender else ():
                    member = members.get(it.uid)
                    what = filter(None, (member.process, member.label)) if member is not None else ()
                    found.setdefault(" ".join((f"pid {it.pid}", *what)), Counter())[it.how] += 1
            if found:
                texts = [f"{who}: {', '.join(f'{n} {how}' for how, n in hows.items())}" for who, hows in found.items()]
                return f"; held by {'; '.join(texts)}"
    return ""


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
