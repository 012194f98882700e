"""Copying bytes from where a tensor lies to its place in a payload: by which call, so that it is fast for its size."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import memmove

from .. import native
from ..memory import forks
from .libraries import torch_views
from .numpy import Array, address_of

SMALL = 64 << 10  # bytes; up to here each of several copies is made without letting go of the interpreter lock
ALONE = 256 << 10
"""Bytes up to which a single copy is: it takes some ten microseconds, and who lets go of the lock while another thread
computes may get it back after milliseconds."""
LARGE = 1 << 20  # bytes; from here on several of torch's threads copy faster than memmove

FAR = native.module.CACHE_BYTES // 4 if native.module is not None else sys.maxsize
"""Bytes from which a copy had better go past the caches, which the compiled module can: most of what it leaves there is
driven out again before anybody reads it, and room for it would be made by driving out something else."""
move_far: Callable[[int, int, int], object] = memmove if native.module is None else native.module.stream
"""Copies so many bytes from one address to another (to, from, bytes)."""


def _copy_alone() -> None:
    """In a forked child: torch's threads do not survive a fork, and if the parent has computed with them, a copy that
    is shared among them would wait for them for ever (libgomp). Whether it has, nothing tells."""
    global LARGE
    LARGE = sys.maxsize


forks.call_in_child(_copy_alone)

# holds the interpreter lock, unlike ctypes.memmove
move_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def move(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another. More than `ALONE` let other threads of the interpreter run meanwhile."""
    (move_small if nbytes <= ALONE else memmove)(to, source, nbytes)


def mover(total: int) -> Callable[[int, int, int], object]:
    """What copies runs as `move` does, of `total` bytes together: past the caches if that is `FAR` or more."""
    return move if total < FAR else move_far


def goes_by_threads(nbytes: int) -> bool:
    """Whether a copy is one for torch's threads: `LARGE` bytes or more, and there are several of them.

    They are nearly as fast as one that goes past the caches, and more; but they may still be awake afterwards.
    """
    return nbytes >= LARGE and _torch_threads() > 1


def _torch_threads() -> int:
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


def move_large(payload: Array, offset: int, address: int, size: int) -> None:
    """Copy more than `SMALL` bytes to `offset` of a payload, by the way that is fast for so many."""
    if goes_by_threads(size):
        torch_views().copy_run(payload, offset, address, size)
    else:
        (move_far if size >= FAR else memmove)(address_of(payload) + offset, address, size)
