"""Values to device memory and back, for the rings of `Publisher(..., device=)`. torch tensors only, no composites.

What lies where is described as for host memory (`shmtensor.wire.spec`), so that a message looks the same; the copies
are the device's, and are queued on the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cuda.runtime import runtime
from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..ring.device import TEXT, Block, DeviceSlots
from ..wire import spec, tree
from ..wire.spec import LeafSpec
from . import outgoing, pack
from .layout import layout_of, overlaps, tied_of
from .leaf import Refused
from .outgoing import Outgoing
from .unpack import assembler
from .walk import Walk, torch_views

if TYPE_CHECKING:
    from .leaf import Leaf


def describe(value: Any, meta: Any) -> Outgoing:
    """Describe a value that goes to a device ring; raises `ArgumentTypeError` for what cannot be there."""
    walk = Walk()
    try:
        walk.value(value)
    except Refused as refused:
        raise refused.public() from refused.__cause__
    dynamic = tree.encode_dynamic(walk.scalars, meta) if walk.scalars or meta is not None else b""
    leaves = [walk.leaf_at(index) for index in range(len(walk.sources))]
    if any(isinstance(token, tuple) and token[0] in tree.COMPOSITES for token in walk.tokens):
        raise ArgumentTypeError(
            "sparse, nested and quantized tensors and NumPy scalars are not sent in device memory: send their parts, "
            "or use a publisher without device="
        )
    if not all(leaf.torch for leaf in leaves):
        raise ArgumentTypeError(
            "NumPy arrays cannot lie in device memory: send torch.from_numpy(array), or use a publisher without device="
        )
    layout = layout_of(walk)
    static, nbytes = layout.static, layout.nbytes
    starts = [leaf.start for leaf in leaves]
    if len(leaves) > 1 and overlaps(starts, layout.extents):
        tied = tied_of(walk, layout, starts)
        static, nbytes = tied.static, tied.nbytes
    return _outgoing(static, dynamic, nbytes, DevicePacked(static, dynamic, leaves))


def describe_empty(shape: tuple[int, ...], dtype: Any, meta: Any) -> Outgoing:
    """Describe a tensor that is yet to be computed into a slot."""
    if not type(dtype).__module__.startswith("torch"):
        raise ArgumentTypeError(f"dtype={dtype!r}: a loan in device memory has a torch dtype")
    static = pack.single_spec(dtype, (shape,) if isinstance(shape, int) else tuple(shape))
    dynamic = b"" if meta is None else pack.pack(np.empty(0, np.uint8), meta).dynamic
    unpacker = unpacker_of(static)
    return _outgoing(static, dynamic, unpacker.nbytes, DevicePacked(static, dynamic, (), unpacker))


def _outgoing(static: bytes, dynamic: bytes, nbytes: int, packed: DevicePacked) -> Outgoing:
    out = Outgoing(outgoing.DEVICE, static, dynamic, nbytes, packed)
    if out.spilled and len(static) + len(dynamic) > TEXT:
        raise ArgumentError(
            f"description of the value takes {len(static) + len(dynamic)} bytes, in device memory at most {TEXT} are "
            "allowed: stack some tensors, or send several values"
        )
    out.total = nbytes  # the description stays in the segment
    return out


class DevicePacked:
    """A value that is ready to be copied into a slot of a device ring, or to be computed there."""

    __slots__ = ("_leaves", "_text", "_unpacker")

    def __init__(
        self, static: bytes, dynamic: bytes, leaves: Sequence[Leaf], unpacker: DeviceUnpacker | None = None
    ) -> None:
        self._leaves, self._text, self._unpacker = leaves, static + dynamic, unpacker

    def __call__(self, block: Block, dynamic: bytes, *, readonly: bool) -> tuple[Any, Any]:
        """A loan's tensor."""
        unpacker = self._unpacker or unpacker_of(self._text)
        return unpacker(block, dynamic)

    def copy_into(self, slots: DeviceSlots, slot: int, out: Outgoing) -> None:
        """Queue the copies on the current stream, after the last write to this ring; then the slot's event.

        Leaves in host memory are copied before this returns.
        """
        if out.spilled:
            slots.put_text(slot, self._text)
        used = runtime()
        waits = False
        if self._leaves and out.nbytes:
            stream = used.current_stream(slots.memory.device)
            payload = slots.block(slot, out.nbytes).tensor()
            for leaf, entry in zip(self._leaves, entries(out.static), strict=True):
                if leaf.nbytes:
                    target = _view(payload, entry)
                    source = leaf.source
                    if entry.dtype is not None and entry.dtype.name == "bool":
                        target, source = _bytes(target), _bytes(source)  # a bool may be any byte
                    elif source.dtype != target.dtype:
                        source = source.view(target.dtype)
                    used.copy(target, source, stream)
                    waits = waits or used.device_of(leaf.source) < 0
        # crash: device.queued
        event = slots.written(slot)
        if waits:  # the caller may change what lies in host memory as soon as this returns
            used.wait(event)


@functools.lru_cache(maxsize=512)
def entries(static: bytes) -> list[LeafSpec]:
    """The leaf table of a static part."""
    return spec.decode(static)[0]


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8)


def _view(payload: Any, leaf: LeafSpec) -> Any:
    """A tensor of the leaf's carrier over the payload's storage."""
    views = torch_views()
    row: Any = leaf.dtype
    size = row.itemsize
    strides = leaf.strides
    if strides is None:
        step, steps = 1, []
        for length in reversed(leaf.shape):
            steps.append(step)
            step *= length
        strides = tuple(reversed(steps))
    else:
        strides = tuple([stride // size for stride in strides])
    run = runtime().run(payload, payload.storage_offset() + leaf.offset, spec.extent(leaf.shape, leaf.strides, size))
    return run.view(views.carrier(row)).as_strided(leaf.shape, strides)


class DeviceUnpacker:
    """The reader of every message in device memory that has this static part. Raises `WireError`."""

    __slots__ = ("_assemble", "_leaves", "_scalars", "_single", "nbytes")

    def __init__(self, static: bytes) -> None:
        try:
            views = torch_views()
        except ImportError:
            raise WireError("the message has torch tensors, but torch is not installed: pip install torch") from None
        self._leaves, tokens, _ = spec.decode(static)
        node, self._scalars = tree.parse([tree.LEAF] if tokens is None else tokens, len(self._leaves))
        _check_plain(node)
        self.nbytes = 0
        for leaf in self._leaves:
            if not leaf.torch or leaf.dtype is None:
                raise WireError("NumPy leaf in device memory")
            views.view_dtype(leaf.dtype)
            extent = spec.check_extent(leaf, leaf.dtype.itemsize)
            if extent and 0 not in leaf.shape:
                self.nbytes = max(self.nbytes, leaf.offset + extent)
        self._assemble = assembler(node)

    def __call__(self, block: Block, dynamic: bytes) -> tuple[Any, Any]:
        """The value, whose tensors keep the block alive, and the meta."""
        if block.nbytes < self.nbytes:
            raise WireError(f"payload has {block.nbytes} bytes, the message needs {self.nbytes}")
        return self.over(block.tensor() if self.nbytes else None, block.device, dynamic)

    def over(self, payload: Any, device: int, dynamic: bytes) -> tuple[Any, Any]:
        """The same over a uint8 tensor, which is None if the message has no bytes."""
        scalars, meta = tree.decode_dynamic(dynamic, self._scalars)
        try:
            leaves = [self._leaf(leaf, payload, device) for leaf in self._leaves]
            return self._assemble(leaves, scalars, {}), meta
        except WireError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise WireError(f"invalid message: {type(error).__name__}: {error}") from error

    @staticmethod
    def _leaf(leaf: LeafSpec, payload: Any, device: int) -> Any:
        views = torch_views()
        row: Any = leaf.dtype
        dtype = views.view_dtype(row)
        if 0 in leaf.shape:
            used = runtime()
            tensor = used.empty(leaf.shape, views.carrier(row), device, used.current_stream(device))
        else:
            tensor = _view(payload, leaf)
        return tensor if dtype is None else tensor.view(dtype)


def _check_plain(node: tree.Node) -> None:
    if node.kind in tree.COMPOSITES:
        raise WireError(f"composite {node.kind!r} in device memory")
    for child in node.children:
        _check_plain(child)


@functools.lru_cache(maxsize=1024)
def unpacker_of(static: bytes) -> DeviceUnpacker:
    """The reader for a static part."""
    return DeviceUnpacker(static)
