"""Operations on whole values: copy them, map their leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .implementation import decode, encode
from .libraries import is_tensor


def copy_value(value: object) -> object:
    """A deep, private, writable copy of a value, on the CPU; leaves that share memory share it in the copy as well.

    The leaves of a tree are views of one new block of memory, which lives as long as any of them.
    """
    encoded = encode(value)
    block = np.empty(encoded.nbytes + 64, np.uint8)
    skip = -block.__array_interface__["data"][0] % 64
    payload = block[skip : skip + encoded.nbytes]
    encoded.copy_into(payload)
    return decode(encoded.description, payload, readonly=False)[0]


def map_leaves(function: Callable[[Any], Any], value: object) -> object:
    """The value with `function` applied to each tensor and array; an object that occurs twice is mapped once.

    Dicts, lists and tuples are made anew, everything else is kept.
    """
    return _map(function, value, {})


def _map(function: Callable[[Any], Any], node: Any, done: dict[int, Any]) -> Any:
    # no closure: a recursive one is a reference cycle, which would keep leases until the garbage collector runs
    if isinstance(node, dict):
        return {key: _map(function, child, done) for key, child in node.items()}
    if isinstance(node, list):
        return [_map(function, child, done) for child in node]
    if isinstance(node, tuple):
        return tuple([_map(function, child, done) for child in node])
    if isinstance(node, np.ndarray) or is_tensor(node):
        if id(node) not in done:
            done[id(node)] = function(node)
        return done[id(node)]
    return node
