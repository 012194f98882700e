"""The copies of one save from devices: on streams of the writer's own, each chunk published after its event.

    caller's stream   ... step |  save                                    | next step ... (ordered: after the wait)
                               '- event -> wait                 event --> wait
    writer's stream                         copy, copy | copy, copy |-----'
                                                chunk's event '-> publish

The writer's thread starts the copies and, if it needs room, waits for the first events; then `save` returns, and the
thread waits in the driver for the remaining events. The next save waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..codec.numpy import Array
from ..cuda.runtime import device_of, runtime
from ..endpoints.devices import Devices
from ..endpoints.loan import Loan
from ..errors import CudaError
from ..ring.ring import Ring
from . import transfer
from .plan import Plan


def marks(plan: Plan) -> dict[int, Any]:
    """Record an event on the current stream of each device of a plan. Call it in the caller's thread."""
    found = {}
    for number in map(runtime().device, plan.devices):
        event = found[number] = runtime().new_event(number)
        runtime().record(event, runtime().current_stream(number))
    return found


class Offload:
    """The copies of one save. It keeps the state alive until the last of them is complete.

    devices, rings: of the endpoint that lends the slots
    after:          the events of `marks`, which the copies wait for
    """

    def __init__(self, plan: Plan, devices: Devices, rings: list[Ring], after: dict[int, Any]) -> None:
        self._cuda = runtime()
        numbers = [self._cuda.device(device) for device in plan.devices]
        self._streams = {device: devices.stream(device) for device in numbers}
        self._parts = {device: devices.parts(rings, device) for device in numbers}
        self._plan: Plan | None = plan
        self._pending: collections.deque[tuple[Loan, list[Any]]] = collections.deque()
        self._last: dict[int, Any] = {}
        for device, stream in self._streams.items():  # after the caller's work on the state
            self._cuda.stream_waits(stream, after[device])

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Run what is inside on the writer's streams, such as gathering views with gaps."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(self._cuda.on(stream))
            yield

    def copy(self, target: Array, source: Any) -> None:
        """Copy bytes into a slot: from host memory now, from a device on its stream."""
        if isinstance(source, np.ndarray) or device_of(source) < 0:
            transfer.copy(target, source)
        else:
            device, done = device_of(source), 0
            address = target.__array_interface__["data"][0]
            for buffer, offset, nbytes in self._parts[device](address, len(target)) or ():
                host = sys.modules["torch"].from_numpy(np.ndarray((nbytes,), np.uint8, buffer, offset))
                self._cuda.copy(host, source[done : done + nbytes], self._streams[device])
                done += nbytes

    def note(self, loan: Loan) -> None:
        """Note that all copies into this slot are started."""
        # crash: offload.started
        for device, stream in self._streams.items():
            self._last[device] = self._cuda.new_event(device)
            self._cuda.record(self._last[device], stream)
        self._pending.append((loan, list(self._last.values())))

    def hold(self, loan: Loan) -> None:
        """Keep a slot whose copies could not all be started, for `abandon`."""
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
        """Make a stream of the caller wait for the copies; None: the current one of each device."""
        for device, event in self._last.items():
            self._cuda.stream_waits(self._cuda.current_stream(device) if stream is None else stream, event)

    def abandon(self) -> None:
        """Free the slots without sending them, once no device writes into them."""
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):  # a device that failed writes nothing
                self._cuda.synchronize(stream)
        while self._pending:
            self._pending.popleft()[0].discard()
        self.forget()

    def forget(self) -> None:
        """Drop the reference to the state, when everything is copied."""
        self._plan = None
