"""Copies of a tensor's bytes into a payload, each by the call that is fastest for its size."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import memmove

from .. import native
from ..memory import lifecycle
from .libraries import torch_views
from .numpy import Array, address_of

SMALL = 64 << 10  # bytes; up to this size each of several copies is made without releasing the interpreter lock
ALONE = 256 << 10
"""Bytes up to which a single copy keeps the lock: it takes some ten microseconds, and a thread that releases the lock
while another one computes may get it back only after milliseconds."""
LARGE = 1 << 20  # bytes; from here on more than two of torch's threads copy faster than one

FAR = native.module.CACHE_BYTES // 4 if native.module is not None else sys.maxsize
"""Bytes from which a copy uses non-temporal stores, where the compiled module has them: in the caches, most of the copy
would be evicted before it is read, and would evict other data."""
move_far: Callable[[int, int, int], object] = memmove if native.module is None else native.module.stream
"""Copies memory with non-temporal stores: (to, from, bytes)."""


def _copy_alone() -> None:
    """In a forked child: do not copy with torch's threads.

    They do not survive a fork, and if the parent has used them, a copy that is shared among them would wait for ever
    (libgomp). Whether the parent has cannot be found out.
    """
    global LARGE
    LARGE = sys.maxsize


lifecycle.call_in_child(_copy_alone)

# holds the interpreter lock, unlike ctypes.memmove
move_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def move(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another. More than `ALONE` bytes are copied with the interpreter lock released."""
    (move_small if nbytes <= ALONE else memmove)(to, source, nbytes)


def mover(total: int) -> Callable[[int, int, int], object]:
    """The function for copies of `total` bytes together: with non-temporal stores from `FAR` bytes on, else `move`."""
    return move if total < FAR else move_far


def goes_by_threads(nbytes: int) -> bool:
    """Whether to copy with torch's threads: `LARGE` bytes or more, and there are more than two threads.

    Two threads are no faster than one with non-temporal stores, and wait for each other: while other processes keep the
    cores busy, a copy of 3 MiB by two threads takes 6 ms instead of 0.3 ms.
    """
    return nbytes >= LARGE and _torch_threads() > 2


def _torch_threads() -> int:
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


def move_large(payload: Array, offset: int, address: int, size: int) -> None:
    """Copy more than `SMALL` bytes to `offset` of a payload, by the fastest way for that size."""
    if goes_by_threads(size):
        torch_views().copy_run(payload, offset, address, size)
    else:
        (move_far if size >= FAR else memmove)(address_of(payload) + offset, address, size)
