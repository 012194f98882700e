"""Check a state that another library has loaded, each shared object once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ..codec.leaf import is_tensor
from ..errors import CheckpointError
from .limits import MAX_DEPTH

_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


def check_objects(state: Any, label: str) -> int:
    """Count the objects in all containers of a state, each shared container once; takes time linear in that.

    `CheckpointError` if a container contains itself, or containers are nested too deep.
    """
    count = 0
    heights: dict[int, int] = {}  # of the containers that are done
    open_now: set[int] = set()
    stack: list[tuple[Any, Iterator[Any]]] = []
    tallest: list[int] = [0]
    current: Any = (state,)
    while True:
        if current is not None:
            stack.append((current, _children(current)))
            open_now.add(id(current))
            tallest.append(0)
        owner, children = stack[-1]
        current = None
        for child in children:
            count += 1
            if isinstance(child, _CONTAINERS):
                if id(child) in open_now:
                    raise CheckpointError(f"{label}: a {type(child).__name__} in its state contains itself")
                height = heights.get(id(child))
                if height is None:
                    current = child
                    break
                tallest[-1] = max(tallest[-1], height)
            elif is_tensor(child) and child.is_nested:
                _check_nested(child, label)
        if current is not None:
            if len(stack) > MAX_DEPTH + 1:
                raise _too_deep(label)
            continue
        stack.pop()
        open_now.discard(id(owner))
        height = tallest.pop() + 1
        heights[id(owner)] = height
        if not stack:
            return count
        tallest[-1] = max(tallest[-1], height)
        if len(stack) + height > MAX_DEPTH + 2:
            raise _too_deep(label)


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _too_deep(label: str) -> CheckpointError:
    return CheckpointError(f"{label}: the containers of its state are nested more than {MAX_DEPTH} deep")


def _check_nested(tensor: Any, label: str) -> None:
    """Check the parts of a nested tensor: torch does not, it trusts the file."""
    import torch

    if tensor.layout != torch.strided:
        return
    sizes, steps, starts = tensor._nested_tensor_size(), tensor._nested_tensor_strides(), None
    starts = tensor._nested_tensor_storage_offsets()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    rows = zip(sizes.tolist(), steps.tolist(), starts.tolist(), strict=True) if sizes.ndim == 2 else ()
    for shape, strides, start in rows:
        last = start + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
        if min([*shape, *strides, start]) < 0 or (0 not in shape and last >= room):
            raise CheckpointError(f"{label}: a nested tensor in it has a part of shape {shape!r:.80} beyond its buffer")
