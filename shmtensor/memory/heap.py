"""The C library's heap: whether memory that was freed stays with the process."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_OWN_LIMIT: Final = 32 << 20
"""Allocations [bytes] from here on are mapped and unmapped each by itself, as glibc does at most."""


def keep_freed(nbytes: int) -> bool:
    """Keep up to `nbytes` of freed memory at the heap's end instead of giving it back to the kernel.

    By default glibc keeps about twice its largest allocation so far. A process that makes and drops a few large objects
    for each call is above that all the time, and the kernel takes, gives and zeroes the same pages again for each.

    Returns whether it was done: not where the user has tuned the heap, or where the C library is another one.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _OWN_LIMIT) and mallopt(_TRIM_THRESHOLD, nbytes))
