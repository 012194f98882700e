"""Ends that wait for the device: a view has died, and what was queued on it has not been computed yet.

A lease watches a `Token`. It lives in a table here until the bytes are not needed any more: not by the host, which
said so when the last view died, and not by the device, which says so by events that were recorded then. They are asked,
never waited for: by every look for a message, and by one daemon thread of the process, which runs while something is
left to be asked and sleeps for good otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ..errors import CudaError
from ..memory import forks
from .runtime import runtime

log = logging.getLogger("shmtensor")

_PAUSE_LEAST: Final = 0.2e-3  # seconds between two questions, doubled up to the most while nothing ends
_PAUSE_MOST: Final = 5e-3
_ROUND: Final = 0.25  # seconds between two rounds of the chores


class Token:
    """What a lease on device memory watches."""

    __slots__ = ("__weakref__",)


class Chore(Protocol):
    """Something to look after from time to time; true: no more."""

    def look_after(self) -> bool: ...


class Ends:
    """What was queued on some streams: the events after it, and streams where none could be recorded yet, since a CUDA
    graph is being captured there: the event would become a part of it."""

    __slots__ = ("_device", "_events", "_streams")

    def __init__(self, device: int, streams: Sequence[Any]) -> None:
        self._device, self._streams = device, streams
        self._events: list[Any] = []
        self._record()

    def _record(self) -> None:
        used, left = runtime(), []
        for stream in self._streams:
            if used.is_capturing(stream):
                left.append(stream)
                continue
            event = used.new_event(self._device)
            # A capture that another thread begins right here takes the event in, and no call could tell before. CUDA
            # refuses to say then whether it has happened (cudaErrorCapturedEvent): the slot stays taken.
            used.record(event, stream)
            self._events.append(event)
        self._streams = left

    def are_done(self) -> bool:
        """Whether all has been computed. `CudaError` if that cannot be told."""
        if self._streams:
            self._record()
        return not self._streams and all(map(runtime().is_done, self._events))


_numbers = itertools.count(1)
_tokens: dict[int, Token] = {}
_ended: deque[tuple[int, Ends | None, Any]] = deque()
_waiting: deque[tuple[int, Ends | None, Any]] = deque()
_lost: list[tuple[int, Ends | None, Any]] = []
_chores: weakref.WeakSet[Any] = weakref.WeakSet()
_busy = threading.Lock()
_starting = threading.Lock()
_kicks: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called from a destructor
_thread: threading.Thread | None = None
_pid = 0


def begin() -> tuple[int, Token]:
    """A new token, alive until `end` was called for its number and the device is done."""
    _start()
    number = next(_numbers)
    token = _tokens[number] = Token()
    return number, token


def end(number: int, device: int, streams: tuple[Any, ...], hold: Any) -> None:
    """The last view is dead: the token dies once everything is done that was queued so far on `streams` and on the
    current stream of this thread. `hold` lives as long. Called from destructors: takes no lock."""
    if os.getpid() != _pid:
        return  # a forked child's copy: the lease is its parent's
    try:
        ends = Ends(device, (*streams, runtime().current_stream(device, captured=True)))
    except Exception:
        ends = None  # nobody can tell
    _ended.append((number, ends, hold))
    _kicks.put(None)


def settle() -> None:
    """Let the tokens die whose device work is done."""
    if not (_ended or _waiting) or not _busy.acquire(blocking=False):
        return
    try:
        while _ended:
            _waiting.append(_ended.popleft())
        for _ in range(len(_waiting)):
            number, ends, hold = _waiting.popleft()
            done = _are_done(ends)
            if done is None:
                _lost.append((number, ends, hold))
            elif not done:
                _waiting.append((number, ends, hold))
            del ends, hold  # unmapped before its member may leave
            if done:
                _tokens.pop(number, None)
    finally:
        _busy.release()


def _are_done(ends: Ends | None) -> bool | None:
    """Whether all has been computed; None: that cannot be told, and the slot stays taken while the process lives."""
    try:
        if ends is None:
            raise CudaError(errno.EIO, "no event could be recorded")
        return ends.are_done()
    except Exception as error:
        log.error("a slot in device memory stays taken until this process ends: %s", str(error))
        return None


def add_chore(chore: Chore) -> None:
    """Have `chore.look_after()` called four times a second until it says that it is done, or is gone."""
    _start()
    _chores.add(chore)
    _kicks.put(None)


def _start() -> None:
    global _thread, _pid
    if _thread is not None and _pid == os.getpid():
        return
    with _starting:
        if _thread is None or _pid != os.getpid():
            _pid = os.getpid()
            _thread = threading.Thread(target=_run, name="shmtensor-cuda", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends: its publishers ask by themselves
                _thread.start()


def _run() -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            _kicks.get(timeout=_ROUND if len(_chores) else None)
        pause = _PAUSE_LEAST
        due = 0.0
        while _ended or _waiting:
            settle()
            if time.monotonic() >= due:
                due = time.monotonic() + _ROUND
                _round()
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_MOST)
        _round()


def _round() -> None:
    for chore in list(_chores):
        try:
            if chore.look_after():
                _chores.discard(chore)
        except Exception:
            log.exception("%r could not be looked after", chore)
            _chores.discard(chore)


def _forget() -> None:
    """In a forked child: no thread, no context; what the parent's device has not done is not ours to ask about."""
    global _thread, _busy, _starting
    _inherited.append((list(_ended), list(_waiting)))  # without running destructors
    _ended.clear()
    _waiting.clear()
    _chores.clear()
    _thread, _busy, _starting = None, threading.Lock(), threading.Lock()


_inherited: list[Any] = []
forks.call_in_child(_forget)
