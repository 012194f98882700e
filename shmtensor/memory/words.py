"""Shared 64-bit words and the barriers that order them.

A word is one aligned 8-byte cell of a mapping, reached through `memoryview.cast("Q")`. `store` is the only way the
library writes one: an item store on a cast memoryview is one 8-byte `mov`, while `struct.pack_into` clears the field
first and lets readers see zeros. A load is `words[i]`.

Ordering. On x86-64 stores become visible in program order and loads happen in program order; only a store followed by
a load of another word may be reordered, and the side that goes to sleep prevents that with `barrier()`. On weaker
processors a reader that saw a published word calls `acquire_fence()` before it reads what the word publishes:
`membarrier` makes every other CPU that runs a registered process pass a full barrier, so that what was stored before
the published word is visible afterwards. (Linux `membarrier(2)`, MEMBARRIER_CMD_GLOBAL_EXPEDITED.)
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from operator import setitem as _setitem
from typing import Any, Final, cast

__all__ = ["HAS_BARRIER", "WEAKLY_ORDERED", "acquire_fence", "barrier", "register", "store"]

store: Callable[[memoryview, int, int], None] = cast(Any, _setitem)
"""`store(words, index, value)`: one atomic 64-bit store."""

_MACHINE = platform.machine().lower()
_SYSCALL = {"x86_64": 324, "amd64": 324, "aarch64": 283, "arm64": 283, "riscv64": 283}.get(_MACHINE)
_QUERY, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 0, 2, 4

WEAKLY_ORDERED: Final = _MACHINE not in ("x86_64", "amd64")


def _probe() -> Callable[[int, int, int], int] | None:
    if _SYSCALL is None:
        return None
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return None
    syscall.restype = ctypes.c_long
    number = ctypes.c_long(_SYSCALL)

    def membarrier(command: int, flags: int, cpu: int) -> int:
        return int(syscall(number, command, flags, cpu))

    commands = membarrier(_QUERY, 0, 0)
    if commands < 0 or not commands & _GLOBAL_EXPEDITED:
        return None
    return membarrier


_membarrier = _probe()
HAS_BARRIER: Final = _membarrier is not None
"""False if the kernel has no `membarrier`: a lost wake-up then costs one (shorter) liveness interval."""


def register() -> None:
    """Let other processes' `barrier()` reach this one. Needed once per process and after a fork; cheap to repeat."""
    if _membarrier is not None:
        _membarrier(_REGISTER_GLOBAL_EXPEDITED, 0, 0)


def barrier() -> None:
    """A full memory barrier on this CPU and on every CPU that runs a registered process (0.7 µs)."""
    if _membarrier is not None:
        _membarrier(_GLOBAL_EXPEDITED, 0, 0)


def acquire_fence() -> None:
    """An acquire fence: loads after this call come after the load of the word just read. Free on x86-64."""
    if WEAKLY_ORDERED:
        barrier()
