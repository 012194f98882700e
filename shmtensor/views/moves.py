"""Copying bytes from where a tensor lies to its place in a payload: by which call, so that it is fast for its size."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import memmove

from . import walk
from .numpy import Array

SMALL = 64 << 10  # bytes; up to here a copy is shorter than letting go of the interpreter lock and getting it back
LARGE = 256 << 10  # bytes; from here on torch's threads copy faster than memmove


def _copy_alone() -> None:
    """In a forked child: torch's threads do not survive a fork, and if the parent has computed with them, a copy that
    is shared among them would wait for them for ever (libgomp). Whether it has, nothing tells."""
    global LARGE
    LARGE = sys.maxsize


os.register_at_fork(after_in_child=_copy_alone)

# holds the interpreter lock, unlike ctypes.memmove
move_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def move(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another. More than `SMALL` let other threads of the interpreter run meanwhile."""
    (move_small if nbytes <= SMALL else memmove)(to, source, nbytes)


def move_large(payload: Array, base: int, offset: int, address: int, size: int) -> None:
    """Copy more than `SMALL` bytes to `offset` of a payload, which lies at `base`."""
    if size >= LARGE and walk.tensor_types:
        walk.torch_views().copy_run(payload, offset, address, size)
    else:
        memmove(base + offset, address, size)
