"""Leases that outlast their views, since work that was queued on the device still uses the memory.

A lease watches a `Token`, which lives in a table here until the bytes are not needed any more: not by the host, whose
last view has died, and not by the device, whose events, recorded at that moment, have happened. The events are polled,
never waited for: at each attempt to take a message from a device, and by one daemon thread of the process, which sleeps
while there is nothing to poll.
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
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import CudaError
from ..memory import lifecycle
from .runtime import runtime

log = logging.getLogger("shmtensor.cuda")

_PAUSE_LEAST: Final = 0.2e-3  # seconds between two polls, doubled up to the most while no lease ends
_PAUSE_MOST: Final = 5e-3
_ROUND: Final = 0.25  # seconds between two rounds of the jobs


class Token:
    """What a lease on device memory watches."""

    __slots__ = ("__weakref__",)


class Ends:
    """The end of what was queued on some streams: events after it. While a CUDA graph is being captured on a stream, no
    event is recorded there, as it would become a part of the graph."""

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
            # If another thread begins a capture right here, the event becomes a part of it, which cannot be prevented.
            # Then CUDA does not say whether it has happened (cudaErrorCapturedEvent), and the slot stays taken.
            used.record(event, stream)
            self._events.append(event)
        self._streams = left

    def are_done(self) -> bool:
        """Whether all has been computed. `CudaError` if CUDA cannot say."""
        if self._streams:
            self._record()
        return not self._streams and all(map(runtime().is_done, self._events))


_numbers = itertools.count(1)
_tokens: dict[int, Token] = {}
_ended: deque[tuple[int, Ends | None, Any]] = deque()
_waiting: deque[tuple[int, Ends | None, Any]] = deque()
_lost: list[tuple[int, Ends | None, Any]] = []
_jobs: set[weakref.WeakMethod[Callable[[], bool]]] = set()
_busy = threading.Lock()
_starting = threading.Lock()
_kicks: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called from a destructor
_thread: threading.Thread | None = None
_pid = 0


def begin() -> tuple[int, Token]:
    """A new number and its token, which lives until `end` was called for the number and the device is done."""
    _start()
    number = next(_numbers)
    token = _tokens[number] = Token()
    return number, token


def end(number: int, device: int, streams: tuple[Any, ...], hold: Any) -> None:
    """Let the token die once all is done that was queued so far on `streams` and on this thread's current stream.

    `hold` lives as long. Called from destructors, after the last view: takes no lock.
    """
    if os.getpid() != _pid:
        return  # a forked child's copy: the lease is its parent's
    try:
        ends = Ends(device, (*streams, runtime().current_stream(device, captured=True)))
    except Exception:
        ends = None  # the end is unknown
    _ended.append((number, ends, hold))
    _kicks.put(None)


def release_finished() -> None:
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
    """Whether all has been computed; None: unknown, and the slot stays taken while the process lives."""
    try:
        if ends is None:
            raise CudaError(errno.EIO, "no event could be recorded")
        return ends.are_done()
    except Exception as error:
        log.error("a slot in device memory stays taken until this process ends: %s", str(error))
        return None


def add_job(job: Callable[[], bool]) -> None:
    """Have a bound method called four times a second until it returns true, or its object is garbage."""
    _start()
    reference = weakref.WeakMethod(job)
    if reference not in _jobs:
        _jobs.add(reference)
        _kicks.put(None)


def _start() -> None:
    """Start the thread if this process has none."""
    global _thread, _pid
    if _thread is not None and _pid == os.getpid():
        return
    with _starting:
        if _thread is None or _pid != os.getpid():
            _pid = os.getpid()
            _thread = threading.Thread(target=_run, name="shmtensor-cuda", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends: its publishers poll for themselves
                _thread.start()


def _run() -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            _kicks.get(timeout=_ROUND if len(_jobs) else None)
        pause = _PAUSE_LEAST
        due = 0.0
        while _ended or _waiting:
            release_finished()
            if time.monotonic() >= due:
                due = time.monotonic() + _ROUND
                _round()
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_MOST)
        _round()


def _round() -> None:
    for reference in list(_jobs):
        job = reference()
        try:
            if job is None or job():
                _jobs.discard(reference)
        except Exception:
            log.exception("%r failed, and is not tried again", job)
            _jobs.discard(reference)


def _forget() -> None:
    """In a forked child: it has neither the thread nor the CUDA context, and the tokens are the parent's."""
    global _thread, _busy, _starting
    _inherited.append((list(_ended), list(_waiting)))  # without running destructors
    _ended.clear()
    _waiting.clear()
    _jobs.clear()
    _thread, _busy, _starting = None, threading.Lock(), threading.Lock()


_inherited: list[Any] = []
lifecycle.call_in_child(_forget)
