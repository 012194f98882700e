"""Values of the same look stacked along a new first dimension, and taken apart again.

Stacking copies each leaf once, from where it lies straight into the batch. The look of a value is what must be equal
for that: the structure, every dtype, every shape, and every leaf that is no tensor or array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..views.libraries import is_tensor

Key = Any


def look_of(value: Any) -> Key:
    """A hashable description; values of equal looks can be stacked."""
    if isinstance(value, np.ndarray):
        return "a", value.dtype.str if value.dtype.names is None else str(value.dtype.descr), value.shape
    if is_tensor(value):
        return "T", value.dtype, tuple(value.shape), str(value.layout), bool(value.is_quantized), bool(value.is_nested)
    if isinstance(value, dict):
        return "d", tuple((type(key), key, look_of(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return "l" if isinstance(value, list) else "t", tuple(look_of(child) for child in value)
    return "s", type(value), value if isinstance(value, bytes) else repr(value)


def is_stackable(look: Key) -> bool:
    """Whether torch or NumPy stacks such leaves: sparse, quantized and nested tensors stay alone."""
    kind = look[0]
    if kind == "T":
        return bool(look[3] == "torch.strided" and not look[4] and not look[5])
    if kind == "d":
        return all(is_stackable(child) for _, _, child in look[1])
    if kind in ("l", "t"):
        return all(is_stackable(child) for child in look[1])
    return True


def stack(values: Sequence[Any]) -> Any:
    """One value whose tensors and arrays have a new first dimension; what is no tensor or array stays as it is."""
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
    """The `count` parts of what a handler made of a batch; leaves that are no tensors or arrays go to each of them.

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
