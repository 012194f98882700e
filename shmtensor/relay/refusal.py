"""A near relay's state about refusals, kept over all attempts, since each attempt may get as far as a connection."""

from __future__ import annotations

from typing import Final

from .frames import NOBODY, State

_LASTS_S: Final = 2.0
"""Seconds after which an attempt is not refused any more for what it began with: then STATUS was answered twice."""
_RECALL_S: Final = 2.0
_LOST_S: Final = 30.0


class Refusal:
    """Why a far relay takes nothing (the first reason), since when, and whether that is over.

    Used under the lock of its channel.
    """

    def __init__(self) -> None:
        self.why = ""
        """The reason; empty if the last refusal is over."""
        self._received = 0  # the newest item of which that was said
        self._since = self._open_since = self._alone_since = 0.0
        self._is_told = False

    def begin(self, why: str, now: float) -> bool:
        """An attempt is refused. Returns whether that reason is a new one."""
        if not self.why:
            self._since, self._is_told = now, False
        is_new, self.why = self.why != why, why
        return is_new

    def forget_audience(self) -> None:
        """Forget the audience: an attempt has ended without a refusal, so the present audience is unknown."""
        self._alone_since = 0.0

    def begin_attempt(self, received: int, now: float) -> None:
        """An attempt begins, with what the far relay has received."""
        self._received, self._open_since = received, now

    def note_state(self, frame: State, now: float) -> bool:
        """What the far relay says. Returns whether that ends a refusal."""
        self._alone_since = (self._alone_since or now) if frame.audience == NOBODY else 0.0
        is_over = bool(self.why) and (frame.received > self._received or now - self._open_since >= _LASTS_S)
        self._received = max(self._received, frame.received)
        if is_over:
            self.why = ""
        return is_over

    def is_long(self, now: float) -> bool:
        """Whether a queue's messages that could not be sent are to go to others."""
        is_alone = bool(self._alone_since) and now - max(self._since, self._alone_since) >= _RECALL_S
        return bool(self.why) and (is_alone or now - self._since >= _LOST_S)

    def note_told(self) -> bool:
        """Note that it was logged that messages go to others. Returns whether it was not logged before."""
        was_told, self._is_told = self._is_told, True
        return not was_told
