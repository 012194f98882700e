"""Frames that have come to a far relay and wait for the thread of their stream."""

from __future__ import annotations

import queue
import threading
from typing import Any, Final

_OF_FRAME: Final = 1024
"""What a frame takes beside its bytes, and what the head of a small one takes at most."""


class FrameQueue:
    """A bounded queue of frames, in order. If a `STATUS` comes right after another one, only the newer one is kept: a
    near relay sends one each second, also while nothing is taken for lack of a slot. (A replayed one is older, and
    dropped.)

    Args:
        nbytes, frames: how many bytes of bodies wait at most, and how many frames.
    """

    def __init__(self, nbytes: int, frames: int) -> None:
        self._most = nbytes + 2 * frames * _OF_FRAME
        self._frames: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._nbytes = 0
        self._last_status: list[Any] | None = None  # the newest frame, if it is a STATUS
        self._place: tuple[int, ...] = ()  # and what it tells of

    def put(self, head: bytes, body: Any, *, status: tuple[int, ...] = ()) -> bool:
        """Append a frame. False: there are too many.

        status: of a `STATUS`: what it tells of, which grows.
        """
        with self._lock:
            if self._nbytes > self._most:
                return False
            last = self._last_status
            if status and last is not None:
                if status >= self._place:
                    self._nbytes += _size(head, body) - _size(*last)
                    last[:], self._place = (head, body), status
                return True
            self._nbytes += _size(head, body)
            frame = [head, body]
            self._last_status, self._place = frame if status else None, status
            self._frames.put(frame)
        return True

    def wake(self) -> None:
        """Let `get` return without a frame."""
        self._frames.put(None)

    def get(self, timeout: float) -> tuple[bytes, Any] | None:
        """The next frame; None if there is none in time. It counts until `note_done`."""
        try:
            frame = self._frames.get(timeout=timeout)
        except queue.Empty:
            return None
        if frame is None:
            return None
        with self._lock:
            if frame is self._last_status:
                self._last_status = None
            head, body = frame
        return head, body

    def note_done(self, head: bytes, body: Any) -> None:
        """Note that a frame that `get` returned is not kept any more."""
        with self._lock:
            self._nbytes -= _size(head, body)

    def empty(self) -> bool:
        """Whether none waits."""
        return self._frames.empty()


def _size(head: bytes, body: Any) -> int:
    return len(head) + len(body) + _OF_FRAME
