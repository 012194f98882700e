"""Values of the same layout stacked along a new first dimension, and split again.

Stacking copies each leaf once, from where it lies straight into the batch. The layout of a value is what must be equal
for that: the structure, every dtype, every shape, and every leaf that is not a tensor or array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codec.leaf import is_tensor
from ..errors import ArgumentError

Layout = Any


def layout_of(value: Any) -> Layout:
    """A hashable description of a value. Values of equal layouts can be stacked."""
    if isinstance(value, np.ndarray):
        return "a", value.dtype.str if value.dtype.names is None else str(value.dtype.descr), value.shape
    if is_tensor(value):
        return "T", value.dtype, tuple(value.shape), str(value.layout), bool(value.is_quantized), bool(value.is_nested)
    if isinstance(value, dict):
        return "d", tuple((type(key), key, layout_of(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return "l" if isinstance(value, list) else "t", tuple(layout_of(child) for child in value)
    return "s", type(value), value if isinstance(value, bytes) else repr(value)


def is_stackable(layout: Layout) -> bool:
    """Whether torch or NumPy can stack such leaves: not sparse, quantized or nested tensors."""
    kind = layout[0]
    if kind == "T":
        return bool(layout[3] == "torch.strided" and not layout[4] and not layout[5])
    if kind == "d":
        return all(is_stackable(child) for _, _, child in layout[1])
    if kind in ("l", "t"):
        return all(is_stackable(child) for child in layout[1])
    return True


def stack(values: Sequence[Any]) -> Any:
    """One value whose tensors and arrays have a new first dimension. Other leaves are those of the first value."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.stack(values)
    if is_tensor(first):
        return _stack_tensors(values)
    if isinstance(first, dict):
        return {key: stack([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        children = [stack([value[index] for value in values]) for index in range(len(first))]
        return children if isinstance(first, list) else tuple(children)
    return first


def _stack_tensors(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.stack(list(tensors))


def split(value: Any, count: int) -> list[Any]:
    """Split a handler's result for a batch into `count` parts. Leaves that are not tensors or arrays go to each part.

    Raises `ArgumentError` for a leaf whose first dimension is not `count`.
    """
    if isinstance(value, np.ndarray) or is_tensor(value):
        if not len(value.shape) or value.shape[0] != count:
            raise ArgumentError(
                f"reply of shape {tuple(value.shape)} to a batch of {count}: its first dimension must be {count}"
            )
        return [value[index] for index in range(count)] if isinstance(value, np.ndarray) else list(value.unbind(0))
    if isinstance(value, dict):
        parts = {key: split(child, count) for key, child in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(count)]
    if isinstance(value, (list, tuple)):
        children = [split(child, count) for child in value]
        made = [[child[index] for child in children] for index in range(count)]
        return made if isinstance(value, list) else [tuple(each) for each in made]
    return [value] * count
