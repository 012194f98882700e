"""Files mapped without a descriptor, fresh pages (huge ones, if there are any), and the C library's heap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Any, Final, TypeVar

import numpy as np

from ..errors import ResourceError
from ..options import format_bytes

HUGE_PAGE: Final = 2 << 20
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, since Linux 5.14: older kernels refuse, pages then fault one by one
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # no memory is reserved for pages that are never written

libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p
FIXED: Final = 0x10  # MAP_FIXED, not in Python's mmap
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


_Self = TypeVar("_Self", bound="FileMap")


class FileMap(mmap.mmap):
    """A mapped part of a file, unmapped when nothing refers to it any more. It has no descriptor.

    Python's `mmap` of a file keeps a descriptor of its own, which a forked child would inherit. So this is one of
    private memory, in whose place the file is mapped: as an owner of addresses, it unmaps whatever lies there, also if
    an exception comes before it does.
    """

    address: int

    @classmethod
    def of(cls: type[_Self], fd: int, offset: int, nbytes: int, *, flags: int, writable: bool) -> _Self:
        """Map `[offset, offset + nbytes)` of a file, with the flags of mmap(2). Raises `OSError`."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        made = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot=protection)
        made.address = int(np.frombuffer(made, np.uint8).__array_interface__["data"][0])
        if libc.mmap(made.address, nbytes, protection, flags | FIXED, fd, offset) != made.address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return made


def map_private(fd: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The first `nbytes` (at least 1) of a file as a writable array, whose changes stay in this process.

    Pages are read when they are first touched. The descriptor may be closed; the array and its views keep the mapping
    alive. If the file is truncated, touching the missing part kills the process (SIGBUS): replace files by a rename.
    Raises `ResourceError` if there is no address space.
    """
    try:
        mapped = FileMap.of(fd, 0, nbytes, flags=mmap.MAP_PRIVATE | _NORESERVE, writable=True)
    except OSError as error:
        code = error.errno or errno.ENOMEM
        raise ResourceError(
            code,
            f"cannot map {format_bytes(nbytes)} of a file: {os.strerror(code)}: raise ulimit -v, or load with "
            "map=False",
        ) from None
    return np.frombuffer(mapped, np.uint8)


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has the page around a byte of a file; nothing is read.

    True as well if that is unknown: the kernel answers only processes that may write to the file.
    """
    try:
        page_at = offset // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(fd, 1, prot=mmap.PROT_READ, offset=page_at) as mapped:  # 1: the last page may not be whole
            page, found = np.frombuffer(mapped, np.uint8), ctypes.c_ubyte(1)
            address = page.__array_interface__["data"][0]
            del page  # which would keep the mapping from being closed
            failed = libc.mincore(address, 1, ctypes.byref(found))
            return bool(failed or found.value & 1)
    except (OSError, ValueError):
        return True


def fresh(nbytes: int, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory of `nbytes` (at least 1), as a writable array; the array and its views keep it alive.

    It begins `offset` bytes (less than a page) after the start of a page. Pages are made when they are first touched;
    huge pages, if there is room for any, take less than half the time. Address space for one more huge page is added,
    so that the first one starts at the array's first page. Raises `ResourceError` if there is no address space.
    """
    extra = HUGE_PAGE if nbytes >= HUGE_PAGE else offset
    try:
        mapped = mmap.mmap(
            -1, nbytes + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if extra >= HUGE_PAGE else 0)
        )
    except OSError as error:
        code = error.errno or errno.ENOMEM
        raise ResourceError(
            code,
            f"cannot get {format_bytes(nbytes)} of memory: {os.strerror(code)}: raise ulimit -v, or load with map=True",
        ) from None
    array = np.frombuffer(mapped, np.uint8)
    if extra < HUGE_PAGE:
        return array[offset:]
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages, another system
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -array.__array_interface__["data"][0] % HUGE_PAGE + offset  # together less than a huge page
    return array[start : start + nbytes]


def not_inherited(nbytes: int) -> memoryview:
    """Fresh writable memory that forked children do not have; the buffer and its views keep it alive.

    For what a device or direct I/O writes or reads meanwhile: after a fork the kernel would copy a page of it, and one
    side would go on with the copy.
    """
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_DONTFORK)
    kind: Any = ctypes.c_char * nbytes
    return memoryview(kind.from_buffer(mapped)).cast("B")


def populate(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Allocate the pages of some memory, as a write would, but keep their contents. Other threads run meanwhile.

    Does nothing if the kernel cannot do it, or has no room: then the first access to each page does it, or fails.
    """
    address = memory.__array_interface__["data"][0]
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc.madvise(start, end - start, POPULATE_WRITE)  # not by Python's `mmap`, whose `madvise` keeps the GIL


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
