"""The copies of one save that leave a device: on streams of the writer's own, each chunk published after its event.

    caller's stream   ... step |  save                                    | next step ... (ordered: after the wait)
                               '- event -> wait                 event --> wait
    writer's stream                         copy, copy | copy, copy |-----'
                                                chunk's event '-> publish

`save` puts the copies on the stream and takes the first events as they come, to make room; what is left is taken by a
thread that sleeps in the driver until the next event, and ends with the save. Only one of them uses the slots at a
time, and the next save waits for the thread.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..cuda.runtime import runtime
from ..endpoints.loan import Loan


class Streams:
    """One stream per device, kept for all saves of a writer: the memory of gathered views stays with its stream."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}

    def of(self, devices: Sequence[str]) -> list[Any]:
        """The streams of some devices, made at first use."""
        for device in devices:
            if device not in self._streams:
                self._streams[device] = runtime().stream(device)
        return [self._streams[device] for device in devices]


class Offload:
    """The copies of one save.

    keep: whatever must live until the last copy is complete.
    """

    def __init__(self, streams: Sequence[Any], keep: Any) -> None:
        self._runtime = runtime()
        self._streams, self._keep = streams, keep
        self._pending: collections.deque[tuple[Loan, list[Any]]] = collections.deque()
        self._last: list[Any] = []
        for stream in streams:  # after everything that makes the state
            self._runtime.wait_event(stream, self._runtime.record_event(self._runtime.current_stream(stream.device)))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """What is copied and gathered in here runs on the writer's streams."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(self._runtime.on(stream))
            yield

    def note(self, loan: Loan) -> None:
        """The copies into this slot are on the streams."""
        self._last = [self._runtime.record_event(stream) for stream in self._streams]
        self._pending.append((loan, self._last))

    def complete(self, *, wait: bool) -> Iterator[Loan]:
        """Slots whose copies are complete, oldest first; with `wait`, all of them. Raises if a copy has failed."""
        while self._pending:
            loan, events = self._pending[0]
            for event in events:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            self._pending.popleft()
            yield loan

    @property
    def pending(self) -> bool:
        """Whether there are slots whose copies may not be complete."""
        return bool(self._pending)

    def follow(self, stream: Any = None) -> None:
        """Make a stream of the caller's wait for the copies; None: the current one of each device."""
        for event in self._last:
            self._runtime.wait_event(stream or self._runtime.current_stream(event.device), event)

    def abandon(self) -> None:
        """Give the slots back unsent, as soon as no device writes into them any more."""
        for stream in self._streams:
            with contextlib.suppress(Exception):  # a device that failed writes nothing
                stream.synchronize()
        while self._pending:
            self._pending.popleft()[0].discard()
        self.forget()

    def forget(self) -> None:
        """Everything is copied: let go of the state."""
        self._keep = None
