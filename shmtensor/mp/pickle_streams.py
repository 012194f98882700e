"""As `pickling.dumps` and `loads`, without a copy of the large bytes in the stream.

`dumps` writes the stream into one array. An object that holds megabytes as `bytes` or `str`, an encoded image say, is
copied into it, into fresh memory that the kernel has to zero first. pickle writes such an object to its file in a call
of its own; the file here keeps the object instead of copying it.

    value[0] of `pickling.dumps`    one uint8 array
    value[0] here                   the same; or, with something large in it, a list of such arrays, in order
"""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any, Final

import numpy as np

from . import pickling

_LARGE: Final = 256 << 10
"""A piece of so many bytes is an object of the caller: pickle's own pieces are less than half as long."""


class _Pieces:
    """A file for a pickler, which keeps large pieces without a copy."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []
        self._small = io.BytesIO()

    def write(self, data: Any) -> int:
        if type(data) is bytes and len(data) >= _LARGE:
            self._cut()
            self._pieces.append(np.frombuffer(data, np.uint8))  # keeps the object alive; bytes never change
            return len(data)
        return self._small.write(data)

    def stream(self) -> Any:
        """Everything that was written: one array, or a list of them."""
        self._cut()
        return self._pieces if len(self._pieces) > 1 else self._pieces[0]

    def _cut(self) -> None:
        self._pieces.append(np.frombuffer(self._small.getbuffer(), np.uint8))
        self._small = io.BytesIO()


class _Joined(io.RawIOBase):
    """Several arrays as one file."""

    def __init__(self, pieces: list[Any]) -> None:
        self._rest = [memoryview(piece) for piece in reversed(pieces)]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._rest and not self._rest[-1].nbytes:
            self._rest.pop()
        if not self._rest:
            return 0
        piece = self._rest[-1]
        count = min(piece.nbytes, len(buffer))
        buffer[:count] = piece[:count]
        self._rest[-1] = piece[count:]
        return count


def dumps(obj: object) -> list[Any]:
    """Pickle an object as a value that a sender takes: `[stream, leaf, leaf, ...]`, to be read by `loads`.

    Tensors, arrays and large bytes are the object's own, no copies. Raises whatever pickling the object raises.

    >>> value = dumps(["a", bytes(1 << 20)])
    >>> len(value[0]), loads(value) == ["a", bytes(1 << 20)]
    (3, True)
    """
    file = _Pieces()
    leaves = pickling.dump(obj, file)
    return [file.stream(), *leaves]


def loads(value: list[Any]) -> Any:
    """The object of a value that `dumps` made; as for `pickling.loads`."""
    stream = value[0]
    if type(stream) is not list:
        return pickling.loads(value)
    # larger than pickle's own pieces; what is larger than the buffer is read straight into its object
    return pickle.load(io.BufferedReader(_Joined(stream), _LARGE // 2), buffers=value[1:])


def nbytes_of(value: list[Any]) -> int:
    """Bytes of everything in a value, but for sparse tensors, which do not say."""
    stream = value[0]
    pieces = stream if type(stream) is list else [stream]
    total = 0
    for part in (*pieces, *value[1:]):
        with contextlib.suppress(RuntimeError):
            total += part.nbytes
    return total
