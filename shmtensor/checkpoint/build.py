"""Build a state from a plan and the bytes of its regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..codec.libraries import torch_views
from ..codec.numpy import CARRIER, AnyDType, Array, address_of
from ..errors import CheckpointError
from ..wire.spec import OF_ARRAYS
from .plan import Entry, Plan
from .structure import Decoder

# (region) -> its bytes, a uint8 array of exactly its size
BytesOf = Callable[[int], Array]

_FREE = 1 << 20  # bytes that the parts of a composite may have, however few are stored


def build_state(plan: Plan, bytes_of: BytesOf, *, tree: Any = None, arrays: bool = False) -> Any:
    """The state of a plan (or of a part of its tree), over the bytes of its regions: nothing is copied.

    `bytes_of` is called once for each region that is needed; tensors keep its array alive. With `arrays`, everything is
    NumPy, and torch is not imported. Raises `CheckpointError` for an invalid plan.
    """
    builder = _Builder(plan, bytes_of, arrays=arrays)
    decoder = Decoder(builder.leaf, builder.composite, torch=not arrays)
    return decoder.decode(plan.tree if tree is None else tree)


class _Builder:
    def __init__(self, plan: Plan, bytes_of: BytesOf, *, arrays: bool) -> None:
        self._plan, self._bytes_of, self._only_arrays = plan, bytes_of, arrays
        self._arrays: dict[int, Array] = {}
        self._storages: dict[int, Any] = {}
        self._memo: dict[object, Any] = {}

    def leaf(self, number: int, *, part: bool = False) -> Any:
        """The tensor or array of a number. `part`: it is a part of a composite, where quantized types are allowed."""
        if number >= len(self._plan.tensors):
            raise CheckpointError(f"invalid structure: tensor {number} of {len(self._plan.tensors)}")
        entry = self._plan.tensors[number]
        try:
            if not entry.torch:
                return self._array(entry, entry.numpy)
            if self._only_arrays:
                return self._array(entry, array_dtype(entry))
            if entry.row is not None and entry.row.quantized and not part:
                raise CheckpointError(f"tensor {entry.name!r:.80} is quantized, and has no parameters")
            return self._tensor(entry)
        except CheckpointError:
            raise
        except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"tensor {entry.name!r:.80} cannot be made: {error}") from None

    def _region(self, region: int) -> Array:
        if region not in self._arrays:
            data = self._bytes_of(region)
            if address_of(data) % self._plan.regions[region].align:
                aligned = np.empty(data.nbytes, np.uint8)  # in a file of another program
                aligned[:] = data
                data = aligned
            self._arrays[region] = data
        return self._arrays[region]

    def _array(self, entry: Entry, dtype: AnyDType) -> Array:
        if entry.region < 0:
            return np.empty(entry.shape, dtype)
        return np.ndarray(entry.shape, dtype, self._region(entry.region), entry.offset, entry.strides)

    def _tensor(self, entry: Entry) -> Any:
        views = torch_views()
        row: Any = entry.row
        if entry.region < 0:
            return views.empty(row, entry.shape)
        if entry.region not in self._storages:
            from torch import from_numpy

            self._storages[entry.region] = from_numpy(self._region(entry.region)).untyped_storage()
        tensor = views.storage_view(self._storages[entry.region], entry.offset, row, entry.shape, entry.strides)
        dtype = views.view_dtype(row)
        return tensor if dtype is None else tensor.view(dtype)

    def composite(self, kind: str, parameters: tuple[int, ...], scalars: list[Any], numbers: list[int]) -> Any:
        """A sparse, quantized or nested tensor, made of its parts."""
        if kind in OF_ARRAYS:
            raise CheckpointError(f"invalid structure: composite {kind!r}")
        if kind == "meta":
            raise CheckpointError(
                "a tensor is on the device meta, without data: use load_checkpoint, or keys= to leave it out"
            )
        if self._only_arrays:
            name = self._plan.tensors[numbers[0]].name if numbers[0] < len(self._plan.tensors) else ""
            raise CheckpointError(
                f"tensor {name.partition('#')[0]!r:.80} is {kind}, which NumPy lacks: use load_checkpoint, or keys= to "
                "leave it out"
            )
        from ..codec.composites import rebuild

        parts = [self.leaf(number, part=True) for number in numbers]
        entries = [self._plan.tensors[number] for number in numbers]
        held = sum(self._plan.regions[region].nbytes for region in {entry.region for entry in entries} - {-1})
        if sum(entry.nbytes for entry in entries) > 16 * held + _FREE:  # some are copied
            raise CheckpointError(
                f"tensor {entries[0].name!r:.80} ({kind}) repeats the {held} bytes that it has too often"
            )
        try:
            return rebuild(kind, parameters, parts, scalars, self._memo)
        except Exception as error:  # whatever torch objects to comes from the file
            raise CheckpointError(
                f"tensor {self._plan.tensors[numbers[0]].name.partition('#')[0]!r:.80} ({kind}) cannot be made: {error}"
            ) from None


def array_dtype(entry: Entry) -> AnyDType:
    """The NumPy dtype of an array, or of a torch tensor: NumPy's own, or that of `ml_dtypes`."""
    if not entry.torch:
        return entry.numpy
    row: Any = entry.row
    if row.numpy:
        return CARRIER[row.code]
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(
            f"tensor {entry.name!r:.80} is {row.name}, which NumPy lacks: install ml_dtypes, or use load_checkpoint"
        ) from None
    kind = getattr(ml_dtypes, row.name, None)
    if kind is None or np.dtype(kind).itemsize != row.itemsize:
        raise CheckpointError(f"tensor {entry.name!r:.80} is {row.name}, which NumPy lacks: use load_checkpoint")
    found: AnyDType = np.dtype(kind)
    return found


def check_structure(plan: Plan) -> None:
    """`CheckpointError` unless the tree is a valid structure whose tensors exist. Call it before walking the tree."""

    def leaf(number: int) -> Array:
        if number >= len(plan.tensors):
            raise CheckpointError(f"invalid structure: tensor {number} of {len(plan.tensors)}")
        return _NOTHING

    def composite(kind: str, parameters: tuple[int, ...], scalars: list[Any], numbers: list[int]) -> None:
        for number in numbers:
            leaf(number)

    Decoder(leaf, composite, torch=False).decode(plan.tree)


_NOTHING = np.empty(0, np.uint8)


def tensor_numbers(tree: Any, *, only_read: bool = False) -> set[int]:
    """The numbers of all tensors of a tree; with `only_read`, of those whose bytes are read when it is built: long
    `bytes`, parts of composites."""
    found: list[Any] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            for tag, body in node.items():
                if tag == "B" or (tag == "x" and not only_read):
                    found.append(body)
                elif tag == "z" and isinstance(body, list) and len(body) == 4 and isinstance(body[3], list):
                    found += body[3]
                elif tag == "d" and isinstance(body, dict):
                    stack.extend(body.values())
                elif tag in ("k", "o", "c", "t", "m", "a", "e", "E"):
                    stack.append(body)
    return {number for number in found if type(number) is int}


def regions_of(plan: Plan, numbers: Iterable[int]) -> list[int]:
    """The regions of some tensors, in order."""
    found = {plan.tensors[number].region for number in numbers if 0 <= number < len(plan.tensors)}
    return sorted(found - {-1})
