"""What becomes of a record that was found: the array over its bytes, and the value over the array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import WireError
from ..ring.feed import ARRAY, TENSOR, Found
from ..views.pack import Unpacker
from .sources import _F, Sources

_UNPACKERS_MOST = 1024
_BYTE = np.dtype(np.uint8)
_ndarray = np.ndarray


class Opening(Sources[_F]):
    """The half of a receiver that makes values; descriptions are compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self._unpackers: dict[bytes, Unpacker] = {}
        self._from_numpy: Callable[[Any], Any] | None = None

    def _compile(self, found: Found) -> None:
        """Make out how the array of a record is built; raises `WireError`."""
        unpacker = self._unpackers.get(found.static)
        if unpacker is None:
            if len(self._unpackers) >= _UNPACKERS_MOST:
                self._unpackers.clear()
            unpacker = self._unpackers[found.static] = Unpacker(found.static)
        if unpacker.nbytes > found.nbytes:
            raise WireError(f"payload of {found.nbytes} bytes, its description needs {unpacker.nbytes}")
        if unpacker.single is None or found.dynamic:
            found.arguments = (found.nbytes,), _BYTE, found.ring.buffer, found.offset
        else:
            shape, dtype, strides, found.view_dtype, is_torch = unpacker.single
            found.kind = TENSOR if is_torch else ARRAY
            found.arguments = shape, dtype, found.ring.buffer, found.offset, strides
        found.unpacker = unpacker

    def _array(self, found: Found) -> np.ndarray[Any, Any]:
        """The one array over a message's bytes: its death is the end of the lease. Raises `WireError`."""
        if found.unpacker is None:
            self._compile(found)
        return _ndarray(*found.arguments)

    def _value(self, found: Found, array: np.ndarray[Any, Any], readonly: bool) -> tuple[Any, Any]:
        """(value, meta) over the array of a leased message. Raises `WireError`."""
        kind = found.kind
        if kind == TENSOR:
            tensor = (self._from_numpy or self._import_torch())(array)
            return (tensor if found.view_dtype is None else tensor.view(found.view_dtype)), None
        if kind == ARRAY:
            if readonly:
                array.flags.writeable = False
            return array, None
        return found.unpacker(array, found.dynamic, readonly=readonly)  # type: ignore[no-any-return]

    def _import_torch(self) -> Callable[[Any], Any]:
        import torch

        self._from_numpy = torch.from_numpy
        return self._from_numpy
