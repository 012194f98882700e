"""Messages without encoding and decoding, for relays: the value is the payload, the meta is the description.

`encode` and `decode` are used as those of `implementation.py`, and `codec` is the compiled one, or None: a sender or a
receiver that uses these publishes and takes any message without making its value.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..errors import WireError
from .encode import Encoded
from .implementation import Compiled
from .implementation import codec as values
from .numpy import Array, address_of
from .outline import Outline


def reference_encode(payload: bytes | memoryview, description: bytes) -> Encoded:
    """The message of these bytes, which are copied when it is written into a slot."""
    array: Array = np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
    return Encoded(description, array.nbytes, [(address_of(array), 0, array.nbytes, (0,))], sources=[array])


def reference_decode(description: bytes, payload: Array, *, readonly: bool) -> tuple[memoryview, bytes]:
    """The payload, which lives in the slot as long as the view does, and the description."""
    return memoryview(payload), bytes(description)  # type: ignore[arg-type]


codec: Any = None
encode: Any = reference_encode
decode: Any = reference_decode
if values is not None:
    codec = Compiled().codec
    codec.raw = True
    encode, decode = codec.encode, codec.decode


_KEPT: Final = 1024
_PADDING: Final = 4096
"""Bytes that may lie behind the last leaf."""
_sizes: dict[bytes, int] = {}
"""The least payload of descriptions that were checked: many messages have the same one."""


def check(description: bytes, nbytes: int) -> None:
    """Check a description as `decode` does, without a payload of that many bytes. Raises `WireError`.

    What only torch can check, such as the parts of a sparse tensor, is left to the receiver.
    """
    needed = _sizes.get(description)
    if needed is None:
        needed = Outline(description).nbytes
        if len(description) <= 4096:
            if len(_sizes) >= _KEPT:
                _sizes.clear()
            _sizes[description] = needed
    if needed > nbytes:
        raise WireError(f"payload has {nbytes} bytes, the message needs {needed}")
    if nbytes > needed + _PADDING:
        raise WireError(f"payload has {nbytes} bytes, the message needs {needed} only")
