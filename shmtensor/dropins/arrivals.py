"""Tensors of a received value, brought to a device: for queues and executors that were made with `device=`.

    slot ---- copy on the arrivals' own stream ---- event ---- current stream of whoever gets the value

The memory on the device belongs to the arrivals' stream, so that a copy need not wait for what the current stream is
computing; the current stream is told of (`record_stream`), or the memory would be used again under its kernels.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..cuda.pending import Pending
from ..cuda.runtime import runtime
from ..endpoints.message import Message
from ..errors import ArgumentError
from ..views.pack import map_leaves
from ..views.walk import is_tensor
from . import pickling

_PIN_LOOP = "_pin_memory_loop"


def number_of(device: Any) -> int | None:
    """The number of the device that `device=` means; `CudaError` if CUDA is missing, `ArgumentError` for another."""
    return None if device is None else runtime().device(device)


class Arrival:
    """Tensors whose copies are under way."""

    def __init__(self, device: int, event: Any, tensors: list[Any]) -> None:
        self._device, self._event, self._tensors = device, event, tensors

    def hand_over(self) -> None:
        """Make them safe on the stream that is current in this thread. The host does not wait."""
        cuda = runtime()
        stream = cuda.current_stream(self._device)
        cuda.stream_waits(stream, self._event)
        for tensor in self._tensors:
            cuda.used_on(tensor, stream)


class Arrivals:
    """Brings values to one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream: Any = None
        self._pending = Pending()

    @classmethod
    def to(cls, device: Any) -> Arrivals | None:
        """For an option `device=`; None: values stay in host memory."""
        number = number_of(device)
        return None if number is None else cls(number)

    def bring(self, value: Any) -> tuple[Any, Arrival | None]:
        """The value with every tensor on the device, copies under way; no arrival if it holds none.

        What the tensors are views of stays leased until the copies are complete and the next value is brought, or
        `finish` is called.
        """
        cuda = runtime()
        sources: list[Any] = []
        tensors: list[Any] = []

        def copy(leaf: Any) -> Any:
            if not is_tensor(leaf):
                return leaf
            sources.append(leaf)
            tensors.append(upload(leaf, self._device, self._stream))
            return tensors[-1]

        with self._lock:
            self._pending.look()
            if self._stream is None:
                self._stream = cuda.new_stream(self._device)
            event = cuda.new_event(self._device)
            try:
                moved = map_leaves(copy, value)
            finally:
                if sources:
                    cuda.record(event, self._stream)
                    self._pending.add(event, sources)
        return moved, Arrival(self._device, event, tensors) if tensors else None

    def finish(self) -> None:
        """Wait until what was brought is there, and let go of the slots."""
        with self._lock:
            self._pending.finish()

    def __del__(self) -> None:
        self._pending.finish()

    def unpack(self, message: Message) -> Any:
        """The object of a queue's item, safe on the current stream."""
        value = message.value
        if pickling.is_stream(value):
            return pickling.unpack(value)
        if getattr(getattr(threading.current_thread(), "_target", None), "__name__", "") == _PIN_LOOP:
            raise ArgumentError(
                "pin_memory=True pins tensors in host memory, but batches of this context arrive on device "
                f"{self._device}: drop pin_memory=True"
            )
        value, arrival = self.bring(value)
        if arrival is not None:
            arrival.hand_over()
        return pickling.unpack(value)


def upload(tensor: Any, device: int, stream: Any) -> Any:
    """A tensor on the device, of the same strides, to be used on `stream`, where its copy is under way."""
    cuda, torch = runtime(), sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        with cuda.on(stream):
            return tensor.to(cuda.torch_device(device), non_blocking=True)
    order = sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis))
    source = tensor.permute(order)  # in C order if it is dense, as all are that arrive
    target = cuda.empty(tuple(source.shape), tensor.dtype, device, stream)
    cuda.copy(target, source, stream)
    return target.permute([order.index(axis) for axis in range(tensor.ndim)])
