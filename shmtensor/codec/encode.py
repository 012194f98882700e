"""`encode`: from a value and its meta to a description and the copies to make. The reference; `native/` has it in C.

There is no cache here and no special case for common values: the walk makes a `Leaf` of each tensor and array, `Layout`
places them in the payload, and the description is put together (`wire/spec.py`).

Leaves that overlap in memory (the same tensor twice, views of one storage) lie in one group:

    memory    ....|----- weight -----------------|....      one run of bytes, copied once as it is
                       |-- weight[2:].T --|
    payload   |64   |16: group .................|64: next leaf

If that run has more than twice the bytes of the leaves, each leaf is sent by itself, as any leaf with gaps is: two
columns of a matrix are no reason to send all of it. Equal views share one copy in any case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, WireError
from ..wire import spec
from ..wire.dtypes import DType
from ..wire.record import INLINE, padded
from ..wire.spec import LeafSpec
from . import copies
from .leaf import MAX_SPREAD, Leaf, Refused, is_tensor, overlapping
from .libraries import device_job, is_cuda_name, torch_views
from .numpy import ROW, Array, address_of, array_leaf, describe, memory_of

# a copy that NumPy or torch makes: (payload) -> None
Job = Callable[["np.ndarray[Any, Any]"], None]

# a plain copy of memory: address, offset in the payload, bytes, and which sources they are of
Run = tuple[int, int, int, Sequence[int]]


class Layout:
    """Offsets, shared storages, size and copies of the leaves of a value.

    entries:   one per leaf
    storages:  (offset, bytes) of each storage that several tensors share
    nbytes:    bytes of the payload
    runs:      (address, offset, size, numbers of its leaves) of plain copies of memory
    jobs:      the other copies
    """

    __slots__ = ("entries", "jobs", "nbytes", "runs", "storages")

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.runs: list[Run] = []
        self.jobs: list[Job] = []
        self.storages: list[tuple[int, int]] = []
        self.nbytes = 0
        placed: dict[int, LeafSpec] = {}
        for members in _groups(leaves):
            offset, start = self._place_group(leaves, members), leaves[members[0]].start
            if sum(leaves[i].torch for i in members) > 1:
                low = offset - offset % spec.GROUP_ALIGNMENT
                self.storages.append((low, self.nbytes - low))
                storage = len(self.storages)
            else:
                storage = 0
            for i in members:
                leaf = leaves[i]
                strides = None if leaf.address and leaf.strides is None else leaf.raw
                placed[i] = leaf.entry(offset + leaf.start - start, strides, storage if leaf.torch else 0)
        alone: dict[tuple[object, ...], list[int]] = {}
        for i, leaf in enumerate(leaves):
            if i not in placed:
                alone.setdefault(identity(leaf) if leaf.extent else (i,), []).append(i)
        for members in alone.values():
            leaf = leaves[members[0]]
            offset = self._place(leaf, members[:1])
            if leaf.torch and len(members) > 1:
                self.storages.append((offset, leaf.nbytes))
            for i in members:
                placed[i] = leaf.entry(
                    offset, leaf.strides, len(self.storages) if leaf.torch and len(members) > 1 else 0
                )
        self.entries = [placed[i] for i in range(len(leaves))]

    def _place(self, leaf: Leaf, numbers: Sequence[int]) -> int:
        size = leaf.nbytes
        if not size:
            return 0
        offset = -(-self.nbytes // spec.ALIGNMENT) * spec.ALIGNMENT
        self.nbytes = offset + size
        if leaf.address:
            self.runs.append((leaf.address, offset, size, numbers))
        else:
            self.jobs.append(job_of(leaf, offset))
        return offset

    def _place_group(self, leaves: Sequence[Leaf], numbers: Sequence[int]) -> int:
        members = [leaves[i] for i in numbers]
        start, extent = _range_of(members)
        # the same offset modulo 16 as in the source, so that every member stays aligned
        offset = -(-self.nbytes // spec.ALIGNMENT) * spec.ALIGNMENT + start % spec.GROUP_ALIGNMENT
        self.nbytes = offset + extent
        if members[0].device == "cpu":
            self.runs.append((start, offset, extent, numbers))
        else:
            source = members[0].source
            at = start - source.untyped_storage().data_ptr()
            if is_cuda_name(members[0].device):
                self.jobs.append(device_job(source, offset, extent, at))
            else:
                copy = torch_views().device_run(members[0], start, extent)
                self.jobs.append(lambda payload: copy(payload, offset))
        return offset


def job_of(leaf: Leaf, offset: int) -> Job:
    """The copy of a leaf whose bytes do not lie in host memory as they are sent."""
    if is_cuda_name(leaf.device):
        found: Job = device_job(leaf.source, offset, leaf.nbytes)
        return found
    return lambda payload: leaf.copy(leaf, payload, offset)


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups of indices of leaves, each by start, that overlap and are sent as the memory from first to last byte."""
    plain = [index for index, leaf in enumerate(leaves) if leaf.raw is not None and leaf.extent]
    found = overlapping([(leaves[index].device, leaves[index].start, leaves[index].extent) for index in plain])
    groups = [[plain[each] for each in group] for group in found if len(group) > 1]
    return [group for group in groups if _is_filled([leaves[index] for index in group])]


def _is_filled(members: Sequence[Leaf]) -> bool:
    """Whether leaves that overlap are sent as one range of memory: most of it is theirs, and it can be read."""
    first = members[0]
    start, extent = _range_of(members)
    if extent > MAX_SPREAD * sum({identity(leaf): leaf.nbytes for leaf in members}.values()):
        return False
    return first.device == "cpu" or bool(torch_views().reaches(first, start, extent))


def _range_of(members: Sequence[Leaf]) -> tuple[int, int]:
    """Start and bytes of the range of memory from the first to the last byte of some leaves, which are by start."""
    start = members[0].start
    return start, max(leaf.start + leaf.extent for leaf in members) - start


def identity(leaf: Leaf) -> tuple[object, ...]:
    """A key that is equal for equal views, which share one copy."""
    strides = leaf.raw
    if strides is None:  # expanded, reversed
        strides = leaf.source.stride() if leaf.torch else leaf.source.strides
    return (leaf.device, leaf.start, leaf.extent, leaf.shape, strides, leaf.torch, leaf.dtype, str(leaf.description))


_ALLOWED = (
    "allowed are torch tensors, NumPy arrays and scalars, dict, list, tuple, bytes, str, int, float, bool and None"
)
_NO_BYTES = np.empty(0, np.uint8)


class Encoded:
    """A value that is ready to be copied into a slot.

    description: see `shmtensor.wire.spec`
    nbytes:      bytes of the payload, may be 0
    spilled:     whether the description lies behind the payload, because it does not fit the record
    total:       bytes of both in the slots
    device_jobs: copies from CUDA devices, each with a `device`; often empty

    It keeps the value's tensors and arrays alive, and sends the contents that they have when `write` is
    called.
    """

    __slots__ = ("_jobs", "_places", "_runs", "_sources", "description", "device_jobs", "nbytes", "spilled", "total")

    def __init__(
        self,
        description: bytes,
        nbytes: int,
        runs: Sequence[Run] = (),
        jobs: Sequence[Job] = (),
        sources: Sequence[Any] = (),
    ) -> None:
        """`runs`: plain copies; `jobs` copy the rest; `sources` are kept alive, and must stay where they are."""
        self.description, self.nbytes, self._runs, self._sources = description, nbytes, runs, sources
        self._places = [place_of(source) for source in sources]
        self.device_jobs: Sequence[Any] = [job for job in jobs if hasattr(job, "device")]
        self._jobs = [job for job in jobs if not hasattr(job, "device")]
        self.spilled = len(description) > INLINE
        self.total = padded(nbytes) + len(description) if self.spilled else nbytes

    def __repr__(self) -> str:
        return f"<Encoded {len(self._sources)} leaves, {self.nbytes} bytes>"

    def copy_into(self, buffer: Any, offset: int = 0, on_device: bool = True) -> None:
        """Copy every leaf to its place.

        Args:
            buffer: writable memory of `offset + nbytes` bytes at least, of which `offset` is 64-byte aligned.
            on_device: False: leave leaves on a CUDA device to the caller, see `device_jobs`.

        Bytes between the leaves are not changed. Raises `ArgumentError` if the buffer is too small, or if an array or
        tensor has other memory by now.
        """
        payload: Array = np.ndarray((self.nbytes,), np.uint8, self._room(buffer, offset, self.nbytes), offset)
        alone = self.nbytes <= copies.ALONE
        self._check_places(range(len(self._sources)))
        for address, at, size, numbers in self._runs:
            self._check_places(numbers)  # again: while many bytes are copied, other threads run
            if alone or size <= copies.SMALL:
                copies.move_small(address_of(payload) + at, address, size)
            else:
                copies.move_large(payload, at, address, size)
        for job in (*self._jobs, *(self.device_jobs if on_device else ())):
            job(payload)

    def _check_places(self, numbers: Sequence[int]) -> None:
        if any(self._places[i] != place_of(self._sources[i]) for i in numbers):
            raise ArgumentError(
                "a tensor or array of the value was resized, or given other memory, while it was being sent: change it "
                "before or after"
            )

    def in_place(self) -> Array | None:
        """The payload where it lies, if it is one dense piece of memory: it is kept alive, and not copied."""
        if not self.nbytes or self._jobs or self.device_jobs or [it[1:3] for it in self._runs] != [(0, self.nbytes)]:
            return None
        return memory_of(self._runs[0][0], self.nbytes, self)

    def write(self, buffer: Any, offset: int, on_device: bool = True) -> None:
        """As `copy_into`, and write a spilled description behind the payload: `total` bytes in all."""
        view = self._room(buffer, offset, self.total)
        self.copy_into(view, offset, on_device)
        if self.spilled:
            view[offset + padded(self.nbytes) : offset + self.total] = self.description

    @staticmethod
    def _room(buffer: Any, offset: int, needed: int) -> memoryview:
        view = memoryview(buffer)
        if view.readonly:
            raise BufferError("the buffer is read-only")
        if offset < 0 or offset + needed > view.nbytes:
            left = max(0, view.nbytes - offset) if offset >= 0 else 0
            raise ArgumentError(f"{left} bytes from {offset} on in a buffer of {view.nbytes}, the value needs {needed}")
        return view


def place_of(source: Any) -> tuple[int, int] | None:
    """Where the memory of a leaf's source lies, and how much it is. None: it has no memory here."""
    if isinstance(source, np.ndarray):
        return address_of(source), source.nbytes
    return (source.data_ptr(), source.numel()) if source.device.type == "cpu" else None


def encode(value: object, meta: object = None) -> Encoded:
    """Describe a value and its meta for sending; copies nothing yet.

    `value` is a torch tensor, a NumPy array or scalar, bytes, or a dict, list or tuple of these with None, bool, int,
    float and str at the other leaves. `meta` is a dict that JSON can express, or None. Raises `ArgumentTypeError` or
    `ArgumentError` for a part that cannot be sent; its path is in the text.

    >>> import numpy as np
    >>> encode({"x": np.arange(3.0), "id": 7}).nbytes
    24
    """
    walk = Walk(value, meta)
    layout = Layout(walk.leaves)
    description = walk.description(layout)
    return Encoded(description, layout.nbytes, layout.runs, layout.jobs, [leaf.source for leaf in walk.leaves])


class Walk:
    """The result of a walk over a value: the nodes of its description, and leaves that are not placed yet."""

    def __init__(self, value: object, meta: object) -> None:
        """Raises `ArgumentTypeError` or `ArgumentError` for a part that cannot be sent; its path is in the text."""
        self._parts: list[bytes | None] = []  # None: the next leaf
        self._size = 0
        self.leaves: list[Leaf] = []
        self.has_composites = False
        try:
            self._value(value, 0)
        except Refused as refused:
            raise refused.public() from refused.__cause__
        self._add(spec.meta_node(meta))

    def description(self, layout: Layout) -> bytes:
        """The description of the value with its placed leaves. Raises `ArgumentError` if it exceeds the limits."""
        placed = zip(layout.entries, self.leaves, strict=True)
        parts = [spec.header(layout.storages)]
        for part in self._parts:
            if part is None:
                entry, leaf = next(placed)
                try:
                    spec.check_extent(entry, leaf.itemsize)
                except WireError as error:
                    raise ArgumentError(f"value is too large to send: {error}") from None
                part = spec.leaf(entry) + (b"" if entry.dtype is not None else spec.plain(leaf.description))
            parts.append(part)
        description = b"".join(parts)
        if len(description) > spec.MAX_DESCRIPTION:
            raise ArgumentError(_too_large(len(description)))
        return description

    def _add(self, node: bytes) -> None:
        self._size += len(node)
        if self._size > spec.MAX_DESCRIPTION:
            raise Refused(ArgumentError, _too_large(self._size))
        self._parts.append(node)

    def _value(self, value: Any, depth: int) -> None:
        if value is None or type(value) in (bool, int, float, str):
            self._add(spec.scalar(value))
        elif isinstance(value, dict):
            items = tuple(value.items())
            self._enter(spec.DICT, len(items), depth)
            keys, big_keys = spec.Keys(), spec.BigKeys()
            for name, child in items:
                if not big_keys.add(name):
                    raise Refused(
                        ArgumentError,
                        f"dict has more than {spec.MAX_EQUAL_HASHES} int keys of one hash: send them as str",
                    )
                try:
                    self._add(spec.key(name))
                    keys.add(name)
                except (ArgumentTypeError, ArgumentError) as error:
                    raise Refused(type(error), str(error)) from None
                self._child(child, depth, name)
        elif isinstance(value, (list, tuple)):
            values = tuple(value)
            self._enter(spec.LIST if isinstance(value, list) else spec.TUPLE, len(values), depth)
            for number, child in enumerate(values):
                self._child(child, depth, number)
        elif isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
            self._add(spec.scalar(value))
        else:
            kind, parameters, leaves, scalars = parts_of(value)
            if kind is not None:
                self.has_composites = True
                self._add(spec.composite(kind, parameters))
            if len(self.leaves) + len(leaves) > spec.MAX_LEAVES:
                raise Refused(
                    ArgumentError,
                    f"value has more than {spec.MAX_LEAVES} tensors: stack some, or send several values",
                )
            self.leaves += leaves
            self._parts += [None] * len(leaves)
            self._size += 16 * len(leaves)
            for scalar in scalars:
                self._add(spec.scalar(scalar))

    def _enter(self, tag: int, count: int, depth: int) -> None:
        if depth >= spec.MAX_DEPTH:
            raise Refused(
                ArgumentError, f"containers are nested more than {spec.MAX_DEPTH} deep, or one contains itself"
            )
        if self._size + count > spec.MAX_DESCRIPTION:
            raise Refused(ArgumentError, _too_large(self._size + count))
        self._add(spec.container(tag, count))

    def _child(self, child: Any, depth: int, name: Any) -> None:
        try:
            self._value(child, depth + 1)
        except Refused as refused:
            refused.path.append(f'["{name:.60}"]' if isinstance(name, str) else f"[{name!r}]")
            raise


def _too_large(nbytes: int) -> str:
    return (
        f"structure and scalars take {nbytes} bytes or more, at most {spec.MAX_DESCRIPTION} are allowed: send many "
        "numbers as a tensor, long text as numpy.frombuffer(text.encode(), 'u1'), stack tensors, or send several values"
    )


Parts = tuple[str | None, Sequence[int], list[Leaf], Sequence[Any]]
"""Kind of the composite or None, its parameters, its leaves, its scalars."""


def parts_of(value: Any) -> Parts:
    """The parts of any value but a container or a scalar. Raises `Refused` if it cannot be sent."""
    kind = type(value)
    if isinstance(value, np.str_):
        return "str", (), [], [value]  # as text and as bytes: an array would drop zeros at the end
    if isinstance(value, np.bytes_):
        return "bytes", (), [array_leaf(np.frombuffer(bytes(value), np.uint8))], ()
    if isinstance(value, np.generic):
        return "generic", (), [array_leaf(np.array(value))], ()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "data", (), [_data_leaf(value)], ()
    if isinstance(value, np.ndarray):
        if kind is np.ndarray or kind is np.memmap:
            return None, (), [array_leaf(value)], ()
        remedy = (
            "send its .data and .mask in a dict"
            if isinstance(value, np.ma.MaskedArray)
            else "send numpy.asarray(array)"
        )
        raise Refused(ArgumentTypeError, f"array subclass {kind.__module__}.{kind.__qualname__} is not sent: {remedy}")
    if is_tensor(value):
        return _tensor_parts(value)
    what = f"object of type {kind.__module__}.{kind.__qualname__}"
    raise Refused(ArgumentTypeError, f"{what} is not sent: {_remedy(value) or _ALLOWED}")


def _remedy(value: Any) -> str:
    """What to send in place of an object, as text for the error; empty if there is no general advice."""
    if isinstance(value, complex):
        return "send numpy.complex128(number)"
    if isinstance(value, (set, frozenset)):
        return "send a list of its items"
    if isinstance(value, enum.Enum):
        return "send its .value"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "send dataclasses.asdict(object), or a dict of the fields that are needed"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return "send its name, str(object)"
    with contextlib.suppress(TypeError, ValueError, BufferError):  # it has no buffer, or none any more
        memoryview(value).release()
        return "send memoryview(object)"
    return ""


def _tensor_parts(tensor: Any) -> Parts:
    views = torch_views()
    try:
        if type(tensor) not in views.known_types and not views.is_jagged(tensor):
            raise views.refuse(tensor)
        from .composites import take_apart

        apart = take_apart(tensor)
        if apart is None:
            return None, (), [views.tensor_leaf(tensor)], ()
        token, scalars, parts = apart
        leaves = [part if isinstance(part, Leaf) else views.tensor_leaf(part) for part in parts]
        kind: Any = token[0]
        parameters: Any = token[1:]
        return kind, parameters, leaves, scalars
    except (RuntimeError, NotImplementedError) as error:
        raise Refused(ArgumentTypeError, f"tensor cannot be read: {error}") from error


def _data_leaf(value: bytes | bytearray | memoryview) -> Leaf:
    """The bytes of a buffer, as one leaf."""
    try:
        view = memoryview(value)
        if not view.c_contiguous:
            view = memoryview(view.tobytes())
        return array_leaf(np.frombuffer(view, np.uint8) if view.nbytes else _NO_BYTES)
    except (ValueError, BufferError) as error:  # a memoryview that was released
        raise Refused(ArgumentError, f"{type(value).__name__} cannot be read: {error}") from None


# --- loans: tensors and arrays that are computed later


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape as NumPy takes it: an int is one dimension. Raises `ArgumentTypeError` or `ArgumentError`."""
    try:
        lengths = (index(shape),) if hasattr(shape, "__index__") else tuple(map(index, shape))
    except TypeError:
        raise ArgumentTypeError(f"shape={shape!r}: pass an int, or a tuple of ints") from None
    if any(length < 0 for length in lengths):
        raise ArgumentError(f"shape={shape!r}: no length may be negative")
    if len(lengths) > spec.MAX_NDIM:
        raise ArgumentError(f"shape={shape!r}: 0 to {spec.MAX_NDIM} dimensions are allowed")
    return lengths


def encode_empty(shape: int | Sequence[int], dtype: Any, meta: object = None) -> Encoded:
    """Describe a tensor or array that will be computed into a slot.

    `dtype` is torch's or NumPy's. Raises `ArgumentTypeError` or `ArgumentError`.
    """
    row, array_dtype, is_torch = _row(dtype)
    entry = spec.LeafSpec(row, is_torch, shape_of(shape), None, 0)
    described = b""
    if row is None:
        try:
            described = spec.plain(describe(array_dtype))
        except Refused as refused:
            raise refused.public() from None
    try:
        nbytes = spec.check_extent(entry, array_dtype.itemsize if row is None else row.itemsize)
    except WireError as error:
        raise ArgumentError(f"too large to send: {error}") from None
    return Encoded(spec.header() + spec.leaf(entry) + described + spec.meta_node(meta), nbytes)


def _row(dtype: Any) -> tuple[DType | None, Any, bool]:
    """Row of the table or None, NumPy dtype or None, and whether it is torch's."""
    if "torch" in sys.modules and type(dtype).__module__ == "torch":
        row = torch_views().ROW.get(dtype)
        if row is None:
            raise ArgumentTypeError(f"dtype {dtype} is not known here")
        return row, None, True
    try:
        array_dtype = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError(f"dtype={dtype!r} is neither a torch dtype nor a NumPy dtype: {error}") from None
    return ROW.get(array_dtype), array_dtype, False
