"""Tensors of a received value, brought to a device: for queues and executors that were made with `device=`.

    slot ---- copy on the arrivals' own stream ---- event ---- current stream of whoever gets the value

The memory on the device belongs to the arrivals' stream, so that a copy need not wait for what the current stream is
computing; the current stream is told of (`record_stream`), or the memory would be used again under its kernels.
"""

from __future__ import annotations

import threading
from typing import Any

from ..cuda.runtime import runtime
from ..endpoints.message import Message
from ..errors import ArgumentError
from ..views.pack import map_leaves
from ..views.walk import is_tensor
from . import pickling

_PIN_LOOP = "_pin_memory_loop"


def device_of(device: Any) -> str | None:
    """A device as text with its index; `ResourceError` if CUDA is missing, `ArgumentError` for another device."""
    return None if device is None else runtime().device(device)


class Arrival:
    """Tensors whose copies are under way."""

    def __init__(self, device: str, event: Any, tensors: list[Any]) -> None:
        self._device, self._event, self._tensors = device, event, tensors

    def hand_over(self) -> None:
        """Make them safe on the stream that is current in this thread. The host does not wait."""
        cuda = runtime()
        stream = cuda.current_stream(self._device)
        cuda.wait_event(stream, self._event)
        for tensor in self._tensors:
            cuda.record_stream(tensor, stream)


class Arrivals:
    """Brings values to one device. Thread-safe."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream: Any = None

    @classmethod
    def to(cls, device: Any) -> Arrivals | None:
        """For an option `device=`; None: values stay in host memory."""
        found = device_of(device)
        return None if found is None else cls(found)

    def bring(self, value: Any) -> tuple[Any, Arrival | None]:
        """The value with every tensor on the device, copies under way; no arrival if it holds none.

        What the tensors are views of stays leased until the copies are complete.
        """
        cuda, tensors, sources = runtime(), [], []

        def copy(leaf: Any) -> Any:
            if not is_tensor(leaf):
                return leaf
            sources.append(leaf)
            tensors.append(cuda.to_device(leaf, self._device))
            return tensors[-1]

        with self._lock:
            if self._stream is None:
                self._stream = cuda.stream(self._device)
            with cuda.on(self._stream):
                try:
                    moved = map_leaves(copy, value)
                finally:
                    event = cuda.record_event(self._stream)
                    cuda.hold(event, sources)
        return moved, Arrival(self._device, event, tensors) if tensors else None

    def unpack(self, message: Message) -> Any:
        """The object of a queue's item, safe on the current stream."""
        value = message.value
        if pickling.is_stream(value):
            return pickling.unpack(value)
        if getattr(getattr(threading.current_thread(), "_target", None), "__name__", "") == _PIN_LOOP:
            raise ArgumentError(
                f"pin_memory=True pins tensors in host memory, but batches of this context arrive on {self._device}: "
                "drop pin_memory=True"
            )
        value, arrival = self.bring(value)
        if arrival is not None:
            arrival.hand_over()
        return pickling.unpack(value)
