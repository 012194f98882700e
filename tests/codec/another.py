"""The codec under test: a module that imports this `implementation` runs by one more codec, as with an older torch."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmtensor.codec import decode as reference_decode
from shmtensor.codec import encode as reference_encode
from shmtensor.codec import implementation as chosen

from .. import implementations

CODECS = {}
"""Compiled codecs by name: the one in use, and one that looks at tensors as it would with a torch that lacks the DLPack
exchange interface (where torch does, both are that)."""
if chosen.codec is not None:
    CODECS = {
        "compiled": chosen.codec,
        "compiled without the exchange interface": chosen.Compiled(exchange=False).codec,
    }
IMPLEMENTATIONS = {name: (codec.encode, codec.decode) for name, codec in CODECS.items()} | {
    "pure": (reference_encode.encode, reference_decode.decode)
}


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within, `encode`, `decode` and `travel`, and the whole transport, are by this implementation."""
    with implementations.chosen("pure" if name == "pure" else "compiled"), pytest.MonkeyPatch.context() as patch:
        if name in CODECS and CODECS[name] is not chosen.codec:
            for kind in ("encode", "decode"):
                implementations.put(patch, getattr(chosen, kind), getattr(CODECS[name], kind))
            implementations.put(patch, chosen.codec, CODECS[name])
        yield


@pytest.fixture(scope="module", params=IMPLEMENTATIONS, autouse=True)
def implementation(request):
    with using(request.param):
        yield request.param


def encode(value: Any, meta: Any = None) -> Any:
    return chosen.encode(value, meta)


def decode(description: bytes, payload: Any, *, readonly: bool = False) -> Any:
    return chosen.decode(description, payload, readonly=readonly)


def payload_of(nbytes: int) -> Any:
    return np.ndarray(nbytes, np.uint8, mmap.mmap(-1, max(nbytes, 1)))


def travel(value: Any, readonly: bool = False, meta: Any = None) -> Any:
    """What arrives of a value."""
    encoded = encode(value, meta)
    payload = payload_of(encoded.nbytes)
    encoded.copy_into(payload)
    return decode(encoded.description, payload, readonly=readonly)[0]
