"""Private memory: files, written to at will and never changed; and fresh pages, huge ones where the kernel has them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Any, Final

import numpy as np

from ..errors import ResourceError
from ..units import format_bytes

HUGE_PAGE: Final = 2 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # nothing is set aside for pages that nobody writes to


def map_private(fd: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The first `nbytes` (at least 1) of a file as a writable array, whose changes stay in this process.

    Pages are read when they are first touched. The array needs the descriptor no longer; it and its views keep the
    mapping alive. If somebody shortens the file, touching what is gone kills the process (SIGBUS): rename, do not
    truncate. Raises `ResourceError` if there is no address space.
    """
    try:
        mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        code = error.errno or errno.ENOMEM
        raise ResourceError(
            code,
            f"cannot map {format_bytes(nbytes)} of a file: {os.strerror(code)}: raise ulimit -v, or load with "
            "map=False",
        ) from None
    return np.frombuffer(mapped, np.uint8)


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of zeros for `nbytes` (at least 1), as a writable array; the array and its views keep it alive.

    Pages are made when they are first touched, in huge pages if there is room for any, which takes less than half of
    the time: address space for one more is set aside, so that the first one begins where the array does. Raises
    `ResourceError` if there is no address space.
    """
    extra = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    try:
        mapped = mmap.mmap(
            -1, nbytes + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if extra else 0)
        )
    except OSError as error:
        code = error.errno or errno.ENOMEM
        raise ResourceError(
            code,
            f"cannot get {format_bytes(nbytes)} of memory: {os.strerror(code)}: raise ulimit -v, or load with map=True",
        ) from None
    array = np.frombuffer(mapped, np.uint8)
    if not extra:
        return array
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages, another system
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -array.__array_interface__["data"][0] % HUGE_PAGE
    return array[start : start + nbytes]
