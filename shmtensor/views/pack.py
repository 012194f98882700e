"""Values to bytes: `pack`, and what goes with it. Never imports torch by itself.

Walk (tokens, scalars, leaves) -> Layout (static part, offsets) -> Packed (what to copy where)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..wire import spec, tree
from ..wire.dtypes import DType
from . import group
from .group import PackedGroup
from .layout import Job, Layout, layout_of, overlaps, tied_of
from .leaf import Refused, is_dense
from .moves import SMALL, move_large, move_small
from .numpy import ROW, Array, address_of, describe
from .unpack import Unpacker
from .values import copy_value, map_leaves
from .walk import Walk, device_job, is_cuda_name, torch_views

__all__ = ["Packed", "Unpacker", "copy_value", "map_leaves", "pack", "single_spec"]


class Packed:
    """A value that is ready to be copied.

    static:  what equal-looking messages have in common, see `shmtensor.wire.spec`
    dynamic: scalars and meta, see `shmtensor.wire.tree`; often empty
    nbytes:  bytes of the payload, may be 0

    It keeps the value's tensors and arrays alive, but not their contents: what is sent is what they hold when
    `copy_into` is called.
    """

    __slots__ = ("_addresses", "_jobs", "_offsets", "_sizes", "_sources", "device_jobs", "dynamic", "nbytes", "static")

    def __init__(
        self,
        static: bytes,
        dynamic: bytes,
        nbytes: int,
        addresses: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        jobs: Sequence[Job],
        sources: Sequence[Any],
    ) -> None:
        self.static = static
        self.dynamic = dynamic
        self.nbytes = nbytes
        self._addresses = addresses
        self._offsets = offsets
        self._sizes = sizes
        self._jobs = [job for job in jobs if not hasattr(job, "device")] if jobs else ()
        self.device_jobs: Sequence[Any] = [job for job in jobs if hasattr(job, "device")] if jobs else ()
        self._sources = sources

    def __repr__(self) -> str:
        return f"<Packed {len(self._sources)} leaves, {self.nbytes} bytes>"

    def copy_into(self, payload: Array, *, on_device: bool = True) -> None:
        """Copy every leaf to its place. `payload` is a writable uint8 array [>= nbytes], 64-byte aligned.

        Without `on_device`, those that lie on a CUDA device are left to the caller: `device_jobs`.
        Bytes between the leaves are left as they are. Raises `ArgumentError` if the payload is too small.
        """
        if payload.nbytes < self.nbytes:
            raise ArgumentError(f"payload has {payload.nbytes} bytes, the value needs {self.nbytes}")
        base = address_of(payload)
        for address, offset, size in zip(self._addresses, self._offsets, self._sizes, strict=True):
            if size <= SMALL:
                if address:
                    move_small(base + offset, address, size)
            elif address:
                move_large(payload, base, offset, address, size)
        for job in self._jobs:
            job(payload)
        if on_device:
            for job in self.device_jobs:
                job(payload)


def pack(value: object, meta: object = None) -> Packed | PackedGroup:
    """Describe a value and its meta for sending; copies nothing yet.

    `value` is a torch tensor, a NumPy array or scalar, or a dict, list or tuple of these with None, bool, int, float
    and str at the other leaves. `meta` is a dict that JSON can express, or None. Raises `ArgumentTypeError` or
    `ArgumentError`, which name the path of what cannot be sent.

    >>> import numpy as np
    >>> packed = pack({"x": np.arange(3.0), "id": 7})
    >>> packed.nbytes
    24
    """
    if meta is None:
        known = group.find(value)
        if known is not None:
            return known
    walk = Walk()
    try:
        walk.values((value,), 0, _no_label)
        layout = layout_of(walk)
    except Refused as refused:
        raise refused.public() from refused.__cause__
    dynamic = tree.encode_dynamic(walk.scalars, meta) if walk.scalars or meta is not None else b""
    addresses = walk.addresses
    special = walk.special
    if len(addresses) > 1:
        starts = addresses
        if special:
            starts = starts.copy()
            for index, leaf in special.items():
                starts[index] = leaf.start
        if overlaps(starts, layout.extents):
            tied = tied_of(walk, layout, starts)
            where, offsets, sizes = zip(*tied.runs, strict=True) if tied.runs else ((), (), ())
            return Packed(tied.static, dynamic, tied.nbytes, where, offsets, sizes, tied.jobs, walk.sources)
    if not (special or dynamic):
        group.remember(value, layout)
    jobs = _jobs(walk, layout) if special else ()
    return Packed(layout.static, dynamic, layout.nbytes, addresses, layout.offsets, layout.sizes, jobs, walk.sources)


def _no_label(index: int) -> str:
    return ""


def _jobs(walk: Walk, layout: Layout) -> list[Job]:
    def job(index: int) -> Job:
        leaf, offset = walk.special[index], layout.offsets[index]
        if is_cuda_name(leaf.device):
            found: Job = device_job(leaf.source, offset, layout.sizes[index])
            return found
        return lambda payload: leaf.copy(leaf, payload, offset)

    return [job(index) for index, leaf in walk.special.items() if not leaf.address and layout.sizes[index]]


def _row(dtype: Any) -> tuple[DType | None, Any, bool]:
    """Row of the table or None, NumPy dtype or None, and whether it is torch's."""
    if type(dtype).__module__ == "torch":
        row = torch_views().ROW.get(dtype)
        if row is None:
            raise ArgumentTypeError(f"dtype {dtype} is not known here")
        return row, None, True
    try:
        array_dtype = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError(f"dtype {dtype!r} is neither torch's nor NumPy's: {error}") from None
    return ROW.get(array_dtype), array_dtype, False


def single_spec(dtype: Any, shape: Sequence[int], strides: Sequence[int] | None = None) -> bytes:
    """The static part of one torch or NumPy leaf at offset 0.

    `dtype` is torch's or NumPy's. `strides` are None for C order, or those of a dense leaf, in elements for torch and
    in bytes for NumPy. Raises `ArgumentTypeError` or `ArgumentError`.
    """
    row, array_dtype, is_torch = _row(dtype)
    shape = tuple([int(length) for length in shape])
    if len(shape) > spec.MAX_NDIM or min(shape, default=0) < 0:
        raise ArgumentError(f"shape {shape}: 0 to {spec.MAX_NDIM} dimensions of 0 or more are allowed")
    descriptions = []
    if row is None:
        try:
            descriptions = [describe(array_dtype)]
        except Refused as refused:
            raise refused.public() from None
    itemsize = array_dtype.itemsize if row is None else row.itemsize
    steps = None if strides is None else tuple([int(step) * (itemsize if is_torch else 1) for step in strides])
    if steps is not None and (len(steps) != len(shape) or min(steps, default=0) < 0):
        raise ArgumentError(f"strides {strides} do not go with shape {shape}")
    if steps is not None and 0 not in shape and not is_dense(shape, steps, itemsize):
        raise ArgumentError(f"strides {strides} of shape {shape} are not dense")
    leaf = spec.LeafSpec(row, is_torch, shape, None if 0 in shape else steps, 0, 0)
    try:
        spec.check_extent(leaf, itemsize)
    except WireError as error:
        raise ArgumentError(f"too large to send: {error}") from None
    return spec.encode([leaf], None, descriptions)
