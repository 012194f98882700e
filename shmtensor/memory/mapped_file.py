"""Files as memory: private, written to at will, never changed."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

from ..errors import ResourceError
from ..units import format_bytes

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
