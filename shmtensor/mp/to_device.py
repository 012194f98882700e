"""Copies of received tensors to a device, for queues and executors that were created with `device=`.

    slot ---- copy on the consumer's own stream ---- event ---- current stream of the thread that gets the value

The memory on the device belongs to the consumer's stream, so that a copy need not wait for the current stream's work.
`record_stream` notes that the current stream uses it too: otherwise torch could reuse it while a kernel reads it.
"""

from __future__ import annotations

import threading
from typing import Any

from ..cuda.runtime import runtime
from ..endpoints.consumer import Consumer
from ..endpoints.message import Message
from ..errors import ArgumentError
from . import pickling

_PIN_LOOP = "_pin_memory_loop"
"""Name of the function of DataLoader's thread that pins batches."""


def number_of(device: Any) -> int | None:
    """The number of the device that `device=` names. `CudaError` if CUDA is missing, `ArgumentError` if it is none."""
    return None if device is None else runtime().device(device)


class DeviceConsumer(Consumer):
    """A consumer whose received values can be copied to a device."""

    def copy_out(self, value: Any, device: int) -> tuple[Any, Any, list[Any]]:
        """Start the copies on this endpoint's own stream: (value on the device, event after the copies, new memory)."""
        self._devices.poll()
        return self._copy_out(value, device)


class Transfer:
    """Device memory whose copies are under way."""

    def __init__(self, device: int, event: Any, memory: list[Any]) -> None:
        self._device, self._event, self._memory = device, event, memory

    def hand_over(self) -> None:
        """Make this thread's current stream wait for the copies. The host does not wait."""
        cuda = runtime()
        stream = cuda.current_stream(self._device)
        cuda.stream_waits(stream, self._event)
        for tensor in self._memory:
            cuda.used_on(tensor, stream)


class Transfers:
    """Copies values to one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()

    @classmethod
    def to(cls, device: Any) -> Transfers | None:
        """The transfers for an option `device=`; None if values stay in host memory."""
        number = number_of(device)
        return None if number is None else cls(number)

    def start(self, value: Any, consumer: DeviceConsumer) -> tuple[Any, Transfer | None]:
        """Start copying the tensors of a value that this consumer got. Returns the value with the tensors on the
        device, and the transfer, or None if it holds no tensor.

        Slots stay leased until their copies are complete and the consumer copies the next value, or closes.
        """
        with self._lock:
            moved, event, memory = consumer.copy_out(value, self._device)
        return moved, Transfer(self._device, event, memory) if memory else None

    def unpack(self, message: Message, consumer: DeviceConsumer) -> Any:
        """The object of a queue's item, its tensors on the device and safe on the current stream."""
        value = message.value
        if pickling.is_stream(value):
            return pickling.unpack(value)
        if getattr(getattr(threading.current_thread(), "_target", None), "__name__", "") == _PIN_LOOP:
            raise ArgumentError(
                "pin_memory=True pins tensors in host memory, but batches of this context arrive on device "
                f"{self._device}: drop pin_memory=True"
            )
        value, transfer = self.start(value, consumer)
        if transfer is not None:
            transfer.hand_over()
        return pickling.unpack(value)
