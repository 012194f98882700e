"""Tensors of a received value, brought to a device: for queues and executors that were made with `device=`.

    slot ---- copy on the receiver's own stream ---- event ---- current stream of whoever gets the value

The memory on the device belongs to the receiver's stream, so that a copy need not wait for what the current stream is
computing; the current stream is told of (`record_stream`), or the memory would be used again under its kernels.
"""

from __future__ import annotations

import threading
from typing import Any

from ..cuda.runtime import runtime
from ..endpoints.message import Message
from ..endpoints.receiver import Receiver
from ..errors import ArgumentError
from . import pickling

_PIN_LOOP = "_pin_memory_loop"


def number_of(device: Any) -> int | None:
    """The number of the device that `device=` means; `CudaError` if CUDA is missing, `ArgumentError` for another."""
    return None if device is None else runtime().device(device)


class Arrival:
    """Device memory whose copies are under way."""

    def __init__(self, device: int, event: Any, memory: list[Any]) -> None:
        self._device, self._event, self._memory = device, event, memory

    def hand_over(self) -> None:
        """Make it safe on the stream that is current in this thread. The host does not wait."""
        cuda = runtime()
        stream = cuda.current_stream(self._device)
        cuda.stream_waits(stream, self._event)
        for tensor in self._memory:
            cuda.used_on(tensor, stream)


class Arrivals:
    """Brings values to one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()

    @classmethod
    def to(cls, device: Any) -> Arrivals | None:
        """For an option `device=`; None: values stay in host memory."""
        number = number_of(device)
        return None if number is None else cls(number)

    def bring(self, value: Any, receiver: Receiver) -> tuple[Any, Arrival | None]:
        """A value that this receiver got, with every tensor on the device, copies under way on the receiver's stream;
        no arrival if it holds no tensor.

        Slots stay leased until their copies are complete and the receiver brings the next value, or closes.
        """
        with self._lock:
            devices = receiver._devices()
            devices.pending.look()
            stream = devices.stream(self._device)
            moved, event, memory = devices.copy_out(value, receiver._mapped_rings(), self._device, stream)
        return moved, Arrival(self._device, event, memory) if memory else None

    def unpack(self, message: Message, receiver: Receiver) -> Any:
        """The object of a queue's item, safe on the current stream."""
        value = message.value
        if pickling.is_stream(value):
            return pickling.unpack(value)
        if getattr(getattr(threading.current_thread(), "_target", None), "__name__", "") == _PIN_LOOP:
            raise ArgumentError(
                "pin_memory=True pins tensors in host memory, but batches of this context arrive on device "
                f"{self._device}: drop pin_memory=True"
            )
        value, arrival = self.bring(value, receiver)
        if arrival is not None:
            arrival.hand_over()
        return pickling.unpack(value)
