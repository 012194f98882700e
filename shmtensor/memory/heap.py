"""The C library's heap: keep freed memory in the process."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_OWN_LIMIT: Final = 32 << 20
"""Allocations from this size on [bytes] are mapped one by one: the largest value that glibc uses by itself."""


def keep_freed(nbytes: int) -> bool:
    """Keep up to `nbytes` of freed memory at the heap's end instead of returning it to the kernel.

    By default glibc keeps about twice its largest allocation so far. A process that makes and drops a few large objects
    for each call exceeds that, and the kernel takes back, returns and zeroes the same pages for each call.

    Returns False, and does nothing, if the user has tuned the heap or the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _OWN_LIMIT) and mallopt(_TRIM_THRESHOLD, nbytes))
