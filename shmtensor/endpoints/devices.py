"""What endpoints do with CUDA devices: pin their rings, copy messages to a device, and from one into a slot.

The other modules of this folder use CUDA through this one only. Messages that stay in host memory use nothing of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..codec.libraries import device_views
from ..cuda.copies import Part, Pending
from ..cuda.runtime import runtime
from ..errors import ArgumentError, CudaError
from ..options import check_count

if TYPE_CHECKING:
    from ..codec.encode import Encoded
    from ..ring.ring import Ring
    from .base import Endpoint
    from .message import Message

_MOST_AHEAD: Final = 1024
_POLL_S: Final = 0.001
"""Seconds after which a caller that waits checks the copies in progress."""


class Devices:
    """The part of an endpoint that deals with CUDA: its streams and its copies in progress.

    Args:
        endpoint: whose part this is; not kept alive by it.
        pin: True, False or `"auto"`: whether rings are pinned at the first copy.
    """

    __slots__ = ("_endpoint", "_pending", "_pin", "_streams")

    def __init__(self, endpoint: Endpoint, pin: Any) -> None:
        if pin is not True and pin is not False and pin != "auto":
            raise ArgumentError(f'pin={pin!r}: choose one of True, False, "auto"')
        self._endpoint, self._pin = weakref.ref(endpoint), pin
        self._pending: Pending | None = None
        self._streams: dict[int, Any] = {}

    def poll(self) -> int:
        """Release what completed copies held. Returns how many copies from or to a device are in progress."""
        return 0 if self._pending is None else self._pending.poll()

    def finish(self) -> None:
        """Wait for the copies in progress."""
        if self._pending is not None:
            self._pending.finish()

    def interval(self, usual: float) -> float:
        """Seconds that a wait may last, given how long it would if no copy were in progress."""
        return _POLL_S if self.poll() else usual

    @staticmethod
    def check_prefetch(device: Any, prefetch: int, *, latest: bool = False) -> None:
        """Check the arguments `device=` and `prefetch=`."""
        check_count("prefetch", prefetch, 0, _MOST_AHEAD)
        if prefetch and device is None:
            raise ArgumentError(f'prefetch={prefetch} copies ahead to a device: pass device="cuda" as well')
        if prefetch and latest:
            raise ArgumentError(f'prefetch={prefetch} would hand out old messages with delivery="latest": leave it 0')

    def statistics(self, rings: Iterable[Ring]) -> dict[str, Any]:
        """The fields of `statistics()` about copies in progress, and about pinning."""
        pinnings = [ring.pinning for ring in rings]
        failures = [pinning.failure for pinning in pinnings if pinning.failure]
        nbytes = sum(pinning.nbytes for pinning in pinnings)
        return {"copying": self.poll(), "pinned_bytes": nbytes, "pin_failure": failures[0] if failures else ""}

    async def pause(self) -> None:
        """Let an event loop run others until it is time to poll again."""
        import asyncio

        await asyncio.sleep(_POLL_S)

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
                        endpoint = self._endpoint()
                        name = "" if endpoint is None else endpoint.name
                        raise CudaError(
                            12, f'channel "{name}": pin=True, and ring {ring.index} cannot be pinned: '
                            f'{ring.pinning.failure}; or pass pin="auto"'
                        )  # fmt: skip
                    return found
            return None

        return parts

    def copy_out(self, value: Any, rings: Iterable[Ring], device: int, stream: Any = None) -> tuple[Any, Any, Any]:
        """Start to copy a received value to a device, keeping its slot: (value, event after the copies, memory).

        stream: where the copies go; by default the thread's current one
        """
        cuda = runtime()
        within = contextlib.nullcontext() if stream is None else cuda.on(stream)
        if stream is None:
            stream = cuda.current_stream(device)
        event = cuda.new_event(device)  # before any copy: every copy that was started must be recorded
        held: list[Any] = []
        try:
            with within:
                moved, blocks = device_views().copy_out(value, device, self.parts(rings, device), held)
        finally:  # what was started reads its slot, also if the rest fails
            self._note(event, stream, held)
        return moved, event, blocks

    def to_device(self, value: Any, rings: Iterable[Ring], device: Any, non_blocking: bool) -> Any:
        """`Message.to`: the value on a CUDA device, copied on the thread's current stream."""
        cuda = runtime()
        self.poll()
        index = cuda.device(device)
        moved, event, _ = self.copy_out(value, rings, index)
        if not non_blocking:
            cuda.wait(event)
            self.poll()
        return moved

    def _note(self, event: Any, stream: Any, held: list[Any]) -> int:
        """Record the event after the copies that were put into a stream, and keep `held` alive until it happens.

        Returns the number of the copies in `_pending`; -1 if nothing is held.
        """
        cuda, number = runtime(), -1
        try:
            # crash: copy.started
            cuda.record(event, stream)
            if held:
                if self._pending is None:
                    self._pending = Pending(self._endpoint())
                number = self._pending.add(event, held)
        except BaseException:
            with contextlib.suppress(CudaError):  # there is no event to check later: wait here
                cuda.synchronize(stream)
            held.clear()  # no frame of a traceback may hold the slot
            raise
        # crash: copy.noted
        return number

    def wait(self, sending: Sending) -> None:
        """Wait until all copies of a message are done, without the interpreter lock. `CudaError` if one failed."""
        for event, number in sending.copies:
            runtime().wait(event)
            if self._pending is not None:
                self._pending.let_go(number)

    def send(
        self, writer: Any, rings: list[Ring], out: Encoded, ring: Ring, slot: int, *registration: Any, aside: bool
    ) -> Sending:
        """Start to copy a described value into free slots, after what the caller's streams hold now.

        writer, rings: the sender's; registration: see ring/writer.py
        aside: on streams of this endpoint, so that what the caller's streams get meanwhile need not wait for the copies
        """
        array = np.ndarray((max(1, out.total),), np.uint8, ring.buffer, slot * ring.slot_bytes)
        # as a loan: whatever happens, the slot is not used again while a device may write to it
        writer.lend(ring.index, slot, weakref.ref(array))
        sending = Sending(ring, slot, out, array, registration)
        del array  # no frame of a traceback may hold the slot
        try:
            out.write(ring.buffer, slot * ring.slot_bytes, False)
            self._start(sending, list(rings), aside)
        except BaseException:
            sending.release()
            raise
        return sending

    def _start(self, sending: Sending, rings: list[Ring], aside: bool) -> None:
        cuda, out = runtime(), sending.out
        base = sending.ring.address + sending.slot * sending.ring.slot_bytes
        by_device: dict[int, list[Any]] = {}
        for job in out.device_jobs:
            by_device.setdefault(job.device, []).append(job)
        for device, jobs in by_device.items():
            stream, done, parts = cuda.current_stream(device), cuda.new_event(device), self.parts(rings, device)
            within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if aside:
                ready = cuda.new_event(device)
                cuda.record(ready, stream)
                stream = self.stream(device)
                cuda.stream_waits(stream, ready)
                within = cuda.on(stream)
            held: list[Any] = [sending.array, out]
            try:
                with within:
                    for job in jobs:
                        held.append(job.start(base, parts))
            finally:
                number = self._note(done, stream, held)
                del held
            sending.copies.append((done, number))


class Sending:
    """A message that a device is copying into its slot. It is not published yet."""

    __slots__ = ("array", "copies", "out", "registration", "ring", "slot")

    def __init__(self, ring: Ring, slot: int, out: Encoded, array: Any, registration: Any) -> None:
        self.ring, self.slot, self.out, self.array, self.registration = ring, slot, out, array, registration
        self.copies: list[tuple[Any, int]] = []
        """The event after those from each device, and their number: see `Pending`."""

    def is_done(self) -> bool:
        """Whether all copies are done. `CudaError` if one failed."""
        return all(runtime().is_done(event) for event, _ in self.copies)

    def release(self) -> None:
        """End the loan of the slot. If it was not published, it is free when no copy writes to it any more."""
        self.array = None


class Prefetch:
    """Copies the messages of one receiver to a device before they are returned. Used under the receiver's mutex.

    Args:
        device: the CUDA device.
        count: how many messages are copied beside the one that is returned next.
        undelivered: the receiver's messages that are taken and not returned, each with the event after its copies and
            its memory on the device, or None before they are started.
        poll, wait: the receiver's ways to take a message: one that is there or None; one that comes in time.
        copy_out: starts the copies of a value: (value on the device, event, memory).
        keeps_leases: whether a message needs its lease after it was copied: on a work queue, until it is done.
    """

    def __init__(
        self,
        device: Any,
        count: int,
        undelivered: dict[Message, Any],
        *,
        poll: Callable[[], Message | None],
        wait: Callable[[float | None], Message],
        copy_out: Callable[[Any, int], tuple[Any, Any, Any]],
        keeps_leases: bool,
    ) -> None:
        self._device, self._count, self._undelivered = runtime().device(device), count, undelivered
        self._poll, self._wait, self._copy_out, self._keeps_leases = poll, wait, copy_out, keeps_leases

    def next(self, timeout: float | None) -> Message:
        """The next message; waits for it as `recv` does."""
        stream = self._stream()
        while True:
            if not self._is_ready():
                self._start(self._poll() or self._wait(timeout))
            message = self._top_up(stream)
            if message is not None:
                return message

    def poll(self) -> Message | None:
        """The next message if it is there."""
        stream = self._stream()
        if not self._is_ready():
            message = self._poll()
            if message is None:
                return None
            self._start(message)
        return self._top_up(stream)

    def push(self, message: Message) -> Message | None:
        """Copy this message, which was taken while there was none, and return the next."""
        self._start(message)
        return self._top_up(self._stream())

    def _stream(self) -> Any:
        """The caller's stream. Called before anything is taken: it raises while a CUDA graph is captured there."""
        return runtime().current_stream(self._device)

    def _is_ready(self) -> bool:
        """Whether a message is there. Starts again the copies that could not be started."""
        for message, copy in list(self._undelivered.items()):
            if copy is None:
                self._start(message)
        return bool(self._undelivered)

    def _top_up(self, stream: Any) -> Message | None:
        """Take and copy as many messages as wanted; the first of all, usable on `stream`, or None."""
        cuda, undelivered = runtime(), self._undelivered
        while len(undelivered) <= self._count:
            message = self._poll()
            if message is None:
                break
            self._start(message)
        first = next(iter(list(undelivered.items())), None)
        if first is None:
            return None  # another thread has returned it
        message, (event, blocks) = first
        cuda.stream_waits(stream, event)
        for block in blocks:
            cuda.used_on(block, stream)
        return message

    def _start(self, message: Message) -> None:
        value, event, blocks = self._copy_out(message.value, self._device)
        message.value = value
        self._undelivered[message] = event, blocks
        if not self._keeps_leases:
            message._hold = message._lease = None
