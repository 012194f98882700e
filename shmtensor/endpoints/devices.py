"""What endpoints do with CUDA devices: pin their rings, copy messages to a device, and from one into a slot.

A message that stays in host memory uses nothing of this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..cuda.pending import Pending
from ..cuda.pinning import Part
from ..cuda.runtime import runtime
from ..errors import ArgumentError, CudaError

if TYPE_CHECKING:
    from ..codec.encode import Encoded
    from ..ring.ring import Ring
    from .base import Endpoint

LOOK_S: Final = 0.001
"""Seconds after which a caller that waits checks the copies in progress."""


def check_pin(pin: object) -> None:
    """`pin=` is True, False or "auto"."""
    if pin is not True and pin is not False and pin != "auto":
        raise ArgumentError(f'pin={pin!r}: choose one of True, False, "auto"')


class Devices:
    """The part of an endpoint that deals with CUDA: its streams and its copies in progress."""

    def __init__(self, endpoint: Endpoint, pin: Any) -> None:
        self.pending = Pending(endpoint)
        self._name, self._pin = endpoint.name, pin
        self._streams: dict[int, Any] = {}

    def stream(self, device: int) -> Any:
        """This endpoint's own stream of a device."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = runtime().new_stream(device)
        return stream

    def parts(self, rings: Iterable[Ring], device: int) -> Callable[[int, int], list[Part] | None]:
        """A function that maps (address, bytes) to the parts of these rings that are copied; None if it is in none."""
        rings = list(rings)

        def parts(address: int, nbytes: int) -> list[Part] | None:
            for ring in rings:
                offset = address - ring.address
                if offset >= 0 and offset + nbytes <= ring.buffer.nbytes:
                    if self._pin is False:
                        return [(ring.buffer, offset, nbytes)]
                    found = ring.pinning.parts(ring.buffer, offset, nbytes, device)
                    if self._pin is True and ring.pinning.failure:
                        raise CudaError(
                            12, f'channel "{self._name}": pin=True, and ring {ring.index} cannot be pinned: '
                            f'{ring.pinning.failure}; or pass pin="auto"'
                        )  # fmt: skip
                    return found
            return None

        return parts

    def copy_out(self, value: Any, rings: Iterable[Ring], device: int, stream: Any) -> tuple[Any, Any, Any]:
        """Start to copy a received value to a device, keeping its slot: (value, event after the copies, memory)."""
        from ..codec import device as views

        event = runtime().new_event(device)  # before any copy: every copy that was started must be recorded
        held: list[Any] = []
        try:
            moved, blocks = views.copy_out(value, device, stream, self.parts(rings, device), held)
        finally:  # what was started reads its slot, also if the rest fails
            self._note(event, stream, held)
        return moved, event, blocks

    def to_device(self, value: Any, rings: Iterable[Ring], device: Any, non_blocking: bool) -> Any:
        """`Message.to`: the value on a CUDA device, copied on the thread's current stream."""
        cuda = runtime()
        self.pending.poll()
        index = cuda.device(device)
        moved, event, _ = self.copy_out(value, rings, index, cuda.current_stream(index))
        if not non_blocking:
            cuda.wait(event)
            self.pending.poll()
        return moved

    def _note(self, event: Any, stream: Any, held: list[Any]) -> None:
        """Record the event after the copies that were put into a stream, and keep `held` alive until it happens."""
        cuda = runtime()
        try:
            # crash: copy.started
            cuda.record(event, stream)
            if held:
                self.pending.add(event, held)
        except BaseException:
            with contextlib.suppress(CudaError):  # there is no event to check later: wait here
                cuda.synchronize(stream)
            held.clear()  # no frame of a traceback may hold the slot
            raise
        # crash: copy.noted

    def send(self, writer: Any, rings: list[Ring], out: Encoded, ring: Ring, slot: int, *beside: Any) -> Sending:
        """Start to copy a described value into free slots, after what the caller's streams hold now.

        writer, rings: the sender's; beside: see ring/writer.py
        """
        array = np.ndarray((max(1, out.total),), np.uint8, ring.buffer, slot * ring.slot_bytes)
        # as a loan: whatever happens, the slot is not used again while a device may write to it
        writer.lend(ring.index, slot, weakref.ref(array))
        sending = Sending(ring, slot, out, array, beside)
        del array  # no frame of a traceback may hold the slot
        try:
            out.write(ring.buffer, slot * ring.slot_bytes, False)
            self._start(sending, list(rings))
        except BaseException:
            sending.release()
            raise
        return sending

    def _start(self, sending: Sending, rings: list[Ring]) -> None:
        cuda, out = runtime(), sending.out
        base = sending.ring.address + sending.slot * sending.ring.slot_bytes
        by_device: dict[int, list[Any]] = {}
        for job in out.device_jobs:
            by_device.setdefault(job.device, []).append(job)
        for device, jobs in by_device.items():
            stream, ready, done = self.stream(device), cuda.new_event(device), cuda.new_event(device)
            parts = self.parts(rings, device)
            cuda.record(ready, cuda.current_stream(device))
            cuda.stream_waits(stream, ready)
            held: list[Any] = [sending.array, out]
            try:
                for job in jobs:
                    held.append(job.start(stream, base, parts))
            finally:
                self._note(done, stream, held)
                del held
            sending.events.append(done)


class Sending:
    """A message that a device is copying into its slot. It is not published yet."""

    __slots__ = ("array", "beside", "events", "out", "ring", "slot")

    def __init__(self, ring: Ring, slot: int, out: Encoded, array: Any, beside: Any) -> None:
        self.ring, self.slot, self.out, self.array, self.beside = ring, slot, out, array, beside
        self.events: list[Any] = []

    def wait(self) -> None:
        """Wait until all copies are done, with the interpreter lock released. `CudaError` if one failed."""
        for event in self.events:
            runtime().wait(event)

    def is_done(self) -> bool:
        """Whether all copies are done. `CudaError` if one failed."""
        return all(map(runtime().is_done, self.events))

    def release(self) -> None:
        """End the loan of the slot. If it was not published, it is free when no copy writes to it any more."""
        self.array = None


def pinned(rings: Iterable[Ring]) -> dict[str, Any]:
    """The fields of `statistics()` about pinning."""
    pinnings = [ring.pinning for ring in rings]
    failures = [pinning.failure for pinning in pinnings if pinning.failure]
    return {"pinned_bytes": sum(pinning.nbytes for pinning in pinnings), "pin_failure": failures[0] if failures else ""}
