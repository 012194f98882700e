"""The copies of one save that leave a device: on streams of the writer's own, each chunk published after its event.

    caller's stream   ... step |  save                                    | next step ... (ordered: after the wait)
                               '- event -> wait                 event --> wait
    writer's stream                         copy, copy | copy, copy |-----'
                                                chunk's event '-> publish

The writer's thread puts the copies on the stream and takes the first events as they come, to make room; then `save`
returns, and the thread sleeps in the driver until the next event, for all that are left. The next save waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cuda.runtime import device_of, runtime
from ..endpoints.devices import Devices
from ..endpoints.loan import Loan
from ..errors import CudaError
from ..ring.ring import Ring
from ..views.numpy import Array
from . import copying
from .plan import Plan


def marks(plan: Plan) -> dict[int, Any]:
    """An event for each device of a plan, after what its current stream has to do; in the caller's thread."""
    found = {}
    for number in map(runtime().device, plan.devices):
        event = found[number] = runtime().new_event(number)
        runtime().record(event, runtime().current_stream(number))
    return found


class Offload:
    """The copies of one save. It keeps the state alive until the last of them is complete.

    devices, rings: of the endpoint that lends the slots; after: the events after which the state is there (`marks`)
    """

    def __init__(self, plan: Plan, devices: Devices, rings: list[Ring], after: dict[int, Any]) -> None:
        self._cuda = runtime()
        numbers = [self._cuda.device(device) for device in plan.devices]
        self._streams = {device: devices.stream(device) for device in numbers}
        self._parts = {device: devices.parts(rings, device) for device in numbers}
        self._plan: Plan | None = plan
        self._pending: collections.deque[tuple[Loan, list[Any]]] = collections.deque()
        self._last: dict[int, Any] = {}
        for device, stream in self._streams.items():  # after everything that makes the state
            self._cuda.stream_waits(stream, after[device])

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Views with gaps that are gathered in here are gathered on the writer's streams."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(self._cuda.on(stream))
            yield

    def copy(self, target: Array, source: Any) -> None:
        """Copy bytes of host memory into a slot; of device memory, put the copy on its stream."""
        if isinstance(source, np.ndarray) or device_of(source) < 0:
            copying.copy(target, source)
        else:
            device, done = device_of(source), 0
            address = target.__array_interface__["data"][0]
            for buffer, offset, nbytes in self._parts[device](address, len(target)) or ():
                host = sys.modules["torch"].from_numpy(np.ndarray((nbytes,), np.uint8, buffer, offset))
                self._cuda.copy(host, source[done : done + nbytes], self._streams[device])
                done += nbytes

    def note(self, loan: Loan) -> None:
        """The copies into this slot are on the streams."""
        # crash: offload.started
        for device, stream in self._streams.items():
            self._last[device] = self._cuda.new_event(device)
            self._cuda.record(self._last[device], stream)
        self._pending.append((loan, list(self._last.values())))

    def hold(self, loan: Loan) -> None:
        """The copies into this slot could not all be started: `abandon` gives it back."""
        self._pending.append((loan, []))

    @property
    def pending(self) -> bool:
        """Whether there are slots whose copies may not be complete."""
        return bool(self._pending)

    def complete(self, *, wait: bool) -> Iterator[Loan]:
        """Slots whose copies are complete, oldest first; with `wait`, all of them. `CudaError` if a copy has failed."""
        while self._pending:
            loan, events = self._pending[0]
            for event in events:
                if wait:
                    self._cuda.wait(event)
                elif not self._cuda.is_done(event):
                    return
            # crash: offload.copied
            self._pending.popleft()
            yield loan

    def follow(self, stream: Any = None) -> None:
        """Make a stream of the caller's wait for the copies; None: the current one of each device."""
        for device, event in self._last.items():
            self._cuda.stream_waits(self._cuda.current_stream(device) if stream is None else stream, event)

    def abandon(self) -> None:
        """Give the slots back unsent, as soon as no device writes into them any more."""
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):  # a device that failed writes nothing
                self._cuda.synchronize(stream)
        while self._pending:
            self._pending.popleft()[0].discard()
        self.forget()

    def forget(self) -> None:
        """Everything is copied: let go of the state."""
        self._plan = None
