"""Commands that look at one channel wait until there is one."""

from __future__ import annotations

import time

from rich.markup import escape

from ..channel.names import check_channel, control_name
from ..errors import ShmTensorError
from ..memory import segment as shm
from .output import console, fail

_PAUSE_S = 0.05
_MAKING_S = 2.0
"""Seconds that a channel may take to be made: it cannot be read before."""


class Unreadable:
    """How long a channel could not be read."""

    def __init__(self) -> None:
        self._until: float | None = None

    def again(self, channel: str, why: object) -> None:
        """It cannot be read: wait a little, it may just be being made. Ends the command with code 1 if it stays so."""
        self._until = time.monotonic() + _MAKING_S if self._until is None else self._until
        if time.monotonic() > self._until:
            raise fail(f'channel "{channel}" cannot be read: {why}')
        time.sleep(_PAUSE_S)

    def over(self) -> None:
        """It was read."""
        self._until = None


def named(channel: str) -> str:
    """The channel's name. Ends the command with code 2 if no channel can have it."""
    try:
        return check_channel(channel)
    except ShmTensorError as error:
        raise fail(str(error), 2) from None


def wait_for_channel(channel: str, timeout: float | None) -> None:
    """Wait until there is such a channel, and say so. Ends the command with code 1 after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    said = False
    while shm.status(control_name(channel)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise fail(f'there is no channel "{channel}" after {timeout:g} s: see `shmtensor ls`')
        if not said:
            said = True
            console(stderr=True).print(f'waiting for channel "{escape(channel)}", which no process has made yet')
        time.sleep(_PAUSE_S)
