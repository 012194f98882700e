"""Values to device memory and back, for the rings of `Publisher(..., device=)`. torch tensors only, no composites.

Descriptions and layout are those for host memory (`shmtensor.wire.spec`); the device makes the copies, which are queued
on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cuda.runtime import runtime
from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..ring.device import TEXT, Block, DeviceSlots
from ..wire import spec
from ..wire.spec import LeafSpec
from .decode import Tree
from .encode import Encoded, Layout, Walk, encode_empty
from .leaf import Leaf, steps_of
from .libraries import torch_views, without_torch


class ResidentEncoded(Encoded):
    """A value that is ready to be copied into a slot of a device ring, or to be computed there."""

    __slots__ = ("_entries", "_leaves")

    def __init__(self, description: bytes, nbytes: int, leaves: Sequence[Leaf], entries: Sequence[LeafSpec]) -> None:
        super().__init__(description, nbytes, sources=[leaf.source for leaf in leaves])
        self._leaves, self._entries = leaves, entries
        if self.spilled and len(description) > TEXT:
            raise ArgumentError(
                f"description of the value takes {len(description)} bytes, in device memory at most {TEXT} are "
                "allowed: stack some tensors, or send several values"
            )
        self.total = nbytes  # the description stays in the segment

    def write(self, buffer: Any, offset: int, on_device: bool = True) -> None:
        """Queue the copies on the current stream, after the last write to this ring; then the slot's event.

        `buffer` are the slots of a device ring, `offset` counts from the start of its memory. Leaves in host memory
        are copied before this returns.
        """
        slots: DeviceSlots = buffer
        slot = offset // slots.slot_bytes
        if self.spilled:
            slots.put_text(slot, self.description)
        used = runtime()
        waits = False
        stream = slots.begin()  # of a loan as well: other messages may have been written since it was lent
        if self._leaves and self.nbytes:
            with used.on(stream):
                payload = slots.block(slot, self.nbytes).tensor()
                for leaf, entry in zip(self._leaves, self._entries, strict=True):
                    waits = _copy(used, payload, leaf, entry) or waits
        # crash: device.queued
        event = slots.written(slot, stream)
        if waits:  # the caller may change host memory as soon as this returns
            used.wait(event)


def _copy(used: Any, payload: Any, leaf: Any, entry: Any) -> bool:
    """Copy a leaf into the payload; whether it lies in host memory."""
    if not leaf.nbytes:
        return False
    target, source = _view(payload, entry), leaf.source
    if entry.dtype is not None and entry.dtype.name == "bool":
        target, source = _bytes(target), _bytes(source)  # a bool may be any byte
    elif source.dtype != target.dtype:
        source = source.view(target.dtype)
    used.copy(target, source)
    return bool(used.device_of(leaf.source) < 0)


def encode(value: Any, meta: Any) -> ResidentEncoded:
    """Describe a value that goes to a device ring. Raises `ArgumentTypeError` for a type that cannot be sent there."""
    walk = Walk(value, meta)
    if walk.has_composites:
        raise ArgumentTypeError(
            "sparse, nested and quantized tensors, NumPy scalars and bytes are not sent in device memory: send their "
            "parts, or use a publisher without device="
        )
    if not all(leaf.torch for leaf in walk.leaves):
        raise ArgumentTypeError(
            "NumPy arrays cannot lie in device memory: send torch.from_numpy(array), or use a publisher without device="
        )
    layout = Layout(walk.leaves)
    return ResidentEncoded(walk.description(layout), layout.nbytes, walk.leaves, layout.entries)


def encode_loan(shape: int | Sequence[int], dtype: Any, meta: Any) -> ResidentEncoded:
    """Describe a tensor that is yet to be computed into a slot."""
    if not type(dtype).__module__.startswith("torch"):
        raise ArgumentTypeError(f"dtype={dtype!r}: a loan in device memory has a torch dtype")
    empty = encode_empty(shape, dtype, meta)
    return ResidentEncoded(empty.description, empty.nbytes, (), ())


def decode_loan(description: bytes, block: Block, *, readonly: bool) -> tuple[Any, Any]:
    """A loan's tensor."""
    return decode(description, block.tensor() if block.nbytes else None, block.nbytes, block.device)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8)


def _view(payload: Any, leaf: LeafSpec) -> Any:
    """A tensor of the leaf's carrier over the payload's storage."""
    views = torch_views()
    row: Any = leaf.dtype
    extent = spec.extent(leaf.shape, leaf.strides, row.itemsize)
    run = runtime().run(payload, payload.storage_offset() + leaf.offset, extent)
    return run.view(views.carrier(row)).as_strided(leaf.shape, steps_of(leaf.shape, leaf.strides, row.itemsize))


def decode(description: bytes, payload: Any, nbytes: int, device: int) -> tuple[Any, Any]:
    """The value, whose tensors keep the payload's memory alive, and the meta.

    `payload` is a uint8 tensor [>= nbytes], or None if the message has no bytes. Raises `WireError` for anything
    invalid, `DependencyError` where torch is missing.
    """

    def make(leaf: LeafSpec, described: Any, storage: tuple[int, int]) -> Any:
        row = leaf.dtype
        if not leaf.torch or row is None:
            raise WireError("NumPy leaf in device memory")
        try:
            views = torch_views()
        except ImportError:
            raise without_torch() from None
        dtype = views.view_dtype(row)
        extent = spec.check_extent(leaf, row.itemsize)
        if extent and leaf.offset + extent > nbytes:
            raise WireError(f"payload has {nbytes} bytes, the message needs {leaf.offset + extent}")
        if extent and payload is not None:
            tensor = _view(payload, leaf)
        else:
            tensor = runtime().empty(leaf.shape, views.carrier(row), device)
        return tensor if dtype is None else tensor.view(dtype)

    return Tree(description, make, _refuse).read()


def _refuse(kind: str, *_: object) -> None:
    raise WireError(f"composite {kind!r} in device memory")
