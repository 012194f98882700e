"""A flat container of plain tensors that looks like one packed before, by the compiled module where there is one.

Dicts of many small tensors are sent over and over: a model's layers, an optimizer's states, a robot's sensors. What the
walk over such a value finds out is known by its keys; that each tensor looks as it did then, and where it lies, is one
call, and so is copying those that are small.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import hot
from .layout import Layout
from .moves import SMALL, move_large
from .numpy import Array, address_of

_MOST_KEYS = 512
_MOST_LOOKS = 4  # of values with the same keys

_groups: dict[tuple[Any, ...], list[Group]] = {}


class Group:
    """What is known of a value: its layout, and the tensors' looks."""

    __slots__ = ("large", "layout", "members")

    def __init__(self, members: Any, layout: Layout) -> None:
        self.members, self.layout = members, layout
        self.large = [
            (index, offset, size)
            for index, (offset, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True))
            if size > SMALL
        ]


class PackedGroup:
    """As `pack.Packed`: a value that is ready to be copied, and whose tensors it keeps alive."""

    __slots__ = ("_addresses", "_group", "_sources", "dynamic", "nbytes", "static")

    device_jobs: Sequence[Any] = ()

    def __init__(self, group: Group, addresses: bytes, sources: Sequence[Any]) -> None:
        self._group, self._addresses, self._sources = group, addresses, sources
        self.static, self.dynamic, self.nbytes = group.layout.static, b"", group.layout.nbytes

    def copy_into(self, payload: Array) -> None:
        """Copy every tensor to its place: see `pack.Packed`. Raises `ValueError` if the payload is too small."""
        group = self._group
        group.members.copy(self._addresses, payload)
        if group.large:
            base, addresses = address_of(payload), memoryview(self._addresses).cast("Q")
            for index, offset, size in group.large:
                move_large(payload, base, offset, addresses[index], size)


def find(value: Any) -> PackedGroup | None:
    """The packed value, if one with the same keys and looks was remembered; None if not, or if its tensors overlap."""
    key = _key(value)
    groups = _groups.get(key) if key is not None else None
    if groups is None:
        return None
    sources = _tensors(value)
    for group in groups:
        addresses = group.members.match(sources)
        if addresses is not None:
            return PackedGroup(group, addresses, sources)
    return None


def remember(value: Any, layout: Layout) -> None:
    """Note what was found out about a value whose leaves are all plain, and do not overlap."""
    module, torch, key = hot.module(), sys.modules.get("torch"), _key(value)
    if module is None or torch is None or key is None:
        return
    groups = _groups.get(key, [])
    sources = _tensors(value)
    if len(groups) >= _MOST_LOOKS or len(sources) < 2 or len(sources) != len(layout.offsets):
        return
    if any(type(source) is not torch.Tensor or source.is_complex() for source in sources):
        return
    if type(value) is dict and any(type(name) is not str for name in value):
        return
    try:
        members = module.Group(sources, layout.offsets, SMALL)
    except ValueError:
        return
    if len(_groups) >= _MOST_KEYS:
        _groups.clear()
    _groups[key] = [*groups, Group(members, layout)]  # a new list, so that another thread never sees one change


def _key(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    if kind is dict:
        return kind, tuple(value)
    if kind is list or kind is tuple:
        return kind, len(value)
    return None


def _tensors(value: Any) -> list[Any]:
    return list(value.values() if type(value) is dict else value)
