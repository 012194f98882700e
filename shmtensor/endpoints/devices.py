"""What endpoints do with CUDA devices: pin their rings, copy messages to a device, and from one into a slot.

Nothing here is reached by a message that stays in host memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..channel import control as ctl
from ..cuda.pending import Pending
from ..cuda.pinning import Part
from ..cuda.runtime import runtime
from ..errors import ArgumentError, CudaError

if TYPE_CHECKING:
    from ..ring.ring import Ring
    from ..views.encode import Encoded
    from .base import Endpoint
    from .receiver import Receiver
    from .sender import Sender

LOOK_S: Final = 0.001
"""Seconds between looks at copies that are on their way, for those who wait for something anyhow."""


def check_pin(pin: object) -> None:
    """`pin=` is True, False or "auto"."""
    if pin is not True and pin is not False and pin != "auto":
        raise ArgumentError(f'pin={pin!r}: choose one of True, False, "auto"')


class Devices:
    """An endpoint's half that deals with CUDA; made at the first copy."""

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
        """The function that tells where bytes of these rings are copied from or to; None: they lie in none of them."""
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
        """A received value on a device: (value, event after the copies, new memory). Its slot waits for the event."""
        from ..views import device as views

        event = runtime().new_event(device)  # before any copy: one that was started must be noted
        held: list[Any] = []
        try:
            moved, blocks = views.copy_out(value, device, stream, self.parts(rings, device), held)
        finally:  # what was started reads its slot, also if the rest cannot be
            self._note(event, stream, held)
        return moved, event, blocks

    def _note(self, event: Any, stream: Any, held: list[Any]) -> None:
        """Copies were put into a stream: record the event that says that they are done, and keep `held` until then."""
        cuda = runtime()
        try:
            # crash: copy.started
            cuda.record(event, stream)
            if held:
                self.pending.add(event, held)
        except BaseException:
            with contextlib.suppress(CudaError):  # nobody could tell later: wait here
                cuda.synchronize(stream)
            held.clear()  # no frame of a traceback may hold the slot
            raise
        # crash: copy.noted

    def send(self, sender: Sender, out: Encoded, ring: Ring, slot: int, *beside: Any) -> Sending:
        """Start the copies of a described value into a free place, after what the caller's streams hold now."""
        array = np.ndarray((max(1, out.total),), np.uint8, ring.buffer, slot * ring.slot_bytes)
        # as a loan: whatever happens, nobody uses the slot again while a device may write to it
        sender._writer.lend(ring.index, slot, weakref.ref(array))
        sending = Sending(ring, slot, out, array, beside)
        del array  # no frame of a traceback may hold the slot
        try:
            out.write(ring.buffer, slot * ring.slot_bytes, False)
            self._start(sending, list(sender._rings))
        except BaseException:
            sending.let_go()
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
    """A message on its way from a device into its slot. Not published: nobody can see it."""

    __slots__ = ("array", "beside", "events", "out", "ring", "slot")

    def __init__(self, ring: Ring, slot: int, out: Encoded, array: Any, beside: Any) -> None:
        self.ring, self.slot, self.out, self.array, self.beside = ring, slot, out, array, beside
        self.events: list[Any] = []

    def wait(self) -> None:
        """Until all copies are done, with the interpreter lock released. `CudaError` if one failed."""
        for event in self.events:
            runtime().wait(event)

    def is_done(self) -> bool:
        """Whether all copies are done. `CudaError` if one failed."""
        return all(map(runtime().is_done, self.events))

    def let_go(self) -> None:
        """Published, or given up: then the slot is free once no copy writes to it any more."""
        self.array = None


def to_device(receiver: Receiver, value: Any, device: Any, non_blocking: bool) -> Any:
    """`Message.to`: the value on a CUDA device, by the thread's current stream."""
    cuda, devices = runtime(), receiver._devices()
    devices.pending.look()
    index = cuda.device(device)
    moved, event, _ = devices.copy_out(value, receiver._mapped_rings(), index, cuda.current_stream(index))
    if not non_blocking:
        cuda.wait(event)
        devices.pending.look()
    return moved


def send(sender: Sender, out: Encoded, ring: Ring, slot: int, *beside: Any) -> int:
    """Copy a described value from its devices into a free place, wait until that is done, publish.

    The caller has the sender's mutex. A copy that fails, or is interrupted, is not published.
    """
    devices = sender._devices()
    sending = devices.send(sender, out, ring, slot, *beside)
    try:
        sending.wait()
        return publish(sender, sending)
    finally:
        sending.let_go()
        devices.pending.look()


def publish(sender: Sender, sending: Sending) -> int:
    """Publish a message whose copies are done, for the members that are there now."""
    # crash: copy.done
    if sender._control_words[ctl.W_EPOCH] != sender._epoch:
        sender._refresh()
    return sender._publish(sending.ring, sending.slot, sending.out, None, *sending.beside)


def pinned(rings: Iterable[Ring]) -> dict[str, Any]:
    """What `statistics()` says of rings."""
    pinnings = [ring.pinning for ring in rings]
    failures = [pinning.failure for pinning in pinnings if pinning.failure]
    return {"pinned_bytes": sum(pinning.nbytes for pinning in pinnings), "pin_failure": failures[0] if failures else ""}
