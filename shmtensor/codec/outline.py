"""What a message consists of, without its payload: structure, scalars, dtypes and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import WireError
from ..wire import spec
from ..wire.spec import LeafSpec
from .decode import Tree
from .numpy import CARRIER, AnyDType, build

_MOST: Final = 20
"""Items of a container, and characters of a text times four, that `as_text` shows."""


@dataclass(frozen=True)
class Leaf:
    """A tensor or an array."""

    dtype: str
    shape: tuple[int, ...]
    torch: bool

    def __str__(self) -> str:
        return f"{'torch' if self.torch else 'numpy'}.{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Parts:
    """A value that is made of leaves and scalars, such as a sparse tensor or `bytes`."""

    kind: str
    leaves: tuple[Leaf, ...]
    scalars: tuple[Any, ...]

    def __str__(self) -> str:
        if self.kind == "data":
            return f"bytes{list(self.leaves[0].shape)}"
        return f"{self.kind}({', '.join(map(as_text, (*self.leaves, *self.scalars)))})"


@dataclass
class Scalar:
    """A NumPy scalar. Its value lies in the payload, which an outline does not read."""

    leaf: Leaf
    dtype: AnyDType
    offset: int
    """The offset of its bytes in the payload."""
    value: Any = None
    """The value; None if it is not known."""

    def hold(self, data: bytes) -> None:
        """Set the value from its bytes."""
        self.value = np.frombuffer(data, self.dtype)[0]

    def __str__(self) -> str:
        if self.value is None:
            return f"a numpy.{self.leaf.dtype}"
        if isinstance(self.value, (np.datetime64, np.timedelta64)):
            return f"numpy.{type(self.value).__name__}({repr(self.value).partition('(')[2]}"
        return f"numpy.{type(self.value).__name__}({str(self.value).strip('()')})"

    def plain(self) -> Any:
        """The value as JSON has it, or as text."""
        found = self.value
        if isinstance(found, np.longdouble):
            found = float(found)
        elif isinstance(found, np.generic) and not isinstance(found, (np.datetime64, np.timedelta64)):
            found = found.item()
        return as_json(found) if found is None or isinstance(found, (int, float)) else str(found)


class Outline:
    """What a description says: `value` with a `Leaf`, `Parts` or `Scalar` in place of each array, `meta`, and where the
    bytes lie."""

    __slots__ = ("_extents", "_newest", "meta", "nbytes", "scalars", "value")

    def __init__(self, description: bytes) -> None:
        """Raises `WireError` for anything invalid."""
        self._extents: set[tuple[int, int]] = set()
        self._newest: tuple[AnyDType, int] = np.dtype(np.void), 0
        self.scalars: list[Scalar] = []
        """The NumPy scalars, but for those that may be of any size (`numpy.void`)."""
        self.nbytes = 0
        """Bytes of the payload that the leaves need, and the storages that they share."""
        self.value, self.meta = Tree(description, self._note, self._parts).read()

    def _note(self, leaf: LeafSpec, described: Any, storage: tuple[int, int]) -> Leaf:
        dtype = build(described) if leaf.dtype is None else CARRIER[leaf.dtype.code]
        self._newest = dtype, leaf.offset
        extent = spec.check_extent(leaf, dtype.itemsize)
        if extent:
            end = leaf.offset + extent
            self._extents.add((leaf.offset, end))
            if leaf.storage:
                at, size = storage
                if leaf.offset < at or end > at + size:
                    raise WireError(f"leaf at {leaf.offset} lies outside its shared storage of {size} bytes at {at}")
                end = at + size
            self.nbytes = max(self.nbytes, end)
        return Leaf(str(dtype) if leaf.dtype is None else leaf.dtype.name, leaf.shape, leaf.torch)

    def _parts(self, kind: str, _: Sequence[int], leaves: list[Leaf], scalars: list[Any]) -> Parts | Scalar:
        return self._scalar(leaves[0]) if kind == "generic" else Parts(kind, tuple(leaves), tuple(scalars))

    def _scalar(self, leaf: Leaf) -> Scalar:
        dtype, offset = self._newest
        scalar = Scalar(leaf, dtype, offset)
        if leaf.shape == () and not leaf.torch and not issubclass(dtype.type, np.flexible):
            self.scalars.append(scalar)
        return scalar

    def extents(self) -> list[tuple[int, int]]:
        """(start, end) of the bytes of all leaves in the payload, in order; those that overlap are one."""
        found: list[tuple[int, int]] = []
        for start, end in sorted(self._extents):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return found


def as_text(value: Any) -> str:
    """An outline on one line, long containers and texts cut."""
    if isinstance(value, (list, tuple)):
        inner = _joined(map(as_text, value[:_MOST]), len(value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        items = list(value.items())[:_MOST]
        return f"{{{_joined((f'{as_text(key)}: {as_text(each)}' for key, each in items), len(value))}}}"
    if isinstance(value, (Leaf, Parts, Scalar)):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 4 * _MOST else text[: 4 * _MOST] + "..."


def _joined(texts: Iterable[str], count: int) -> str:
    return ", ".join([*texts, *([f"... {count - _MOST} more"] if count > _MOST else [])])


def as_json(value: Any) -> Any:
    """An outline in JSON types; what JSON cannot express is text. A dict with keys that are not all strings is a list
    of pairs."""
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: as_json(each) for key, each in value.items()}
        return [[as_json(key), as_json(each)] for key, each in value.items()]
    if isinstance(value, Leaf):
        return {"dtype": value.dtype, "shape": list(value.shape), "library": "torch" if value.torch else "numpy"}
    if isinstance(value, Parts):
        return {
            "kind": value.kind, "leaves": [as_json(each) for each in value.leaves],
            "scalars": [as_json(each) for each in value.scalars],
        }  # fmt: skip
    if isinstance(value, Scalar):
        return {"kind": "generic", "leaves": [as_json(value.leaf)], "scalars": [], "value": value.plain()}
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) >> 64):
        return as_text(value)
    return value
