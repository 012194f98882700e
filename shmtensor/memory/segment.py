"""POSIX shared-memory segments: create, attach and unlink are three functions, and attaching never deletes anything."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import weakref
from typing import Any, Final

import numpy as np
import posix_ipc

from ..errors import ResourceError, WireError
from ..units import format_bytes
from . import forks, shortage
from .locks import LockFile
from .shortage import SHM_DIR as SHM_DIR

PAGE: Final = mmap.PAGESIZE
_MODE = 0o600
_PROT_NONE = 0
_REPLACE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.restype = ctypes.c_void_p
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAY_MOVE = 1  # MREMAP_MAYMOVE
_FAILED = ctypes.c_void_p(-1).value
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14; older kernels refuse, pages then fault one by one


class Mapping:
    """A mapped part of a segment.

    The memory stays mapped as long as anything refers to `buffer`, `words` or this object.

    `words` and `view` reach the mapping for loads and stores; `buffer` claims to be writable whatever the protection
    is (torch warns about read-only arrays), so that writing through it into a read-only mapping is a segmentation
    fault, not a silent change of somebody else's tensor.
    """

    __slots__ = ("__weakref__", "address", "buffer", "map", "nbytes", "view", "words")

    def __init__(self, fd: int, offset: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        try:
            self.map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection, offset=offset)
        except OSError as error:
            raise shortage.explain(error, f"cannot map {format_bytes(nbytes)} of shared memory") from None
        self.nbytes = nbytes
        self.view = memoryview(self.map)
        self.words = self.view.cast("Q")
        self.address = int(np.frombuffer(self.map, np.uint8).__array_interface__["data"][0])
        kind: Any = type("Slots", (ctypes.c_char * nbytes,), {})
        whole = kind.from_address(self.address)
        whole.mapping = self.map
        self.buffer = memoryview(whole).cast("B")
        forks.track(self)

    def drop_in_child(self) -> None:
        """A forked child must not reach its parent's words, nor slots it has no lease on: touching them fails.

        The range is replaced, not unmapped: another mapping of the child must not end up under the parent's tensors.
        """
        _mmap(self.address, self.nbytes, _PROT_NONE, _REPLACE, -1, 0)

    def populate(self, *, write: bool) -> None:
        """Enter every page into this process's page table now instead of at first touch. Best effort."""
        with contextlib.suppress(OSError, ValueError):
            self.map.madvise(_POPULATE_WRITE if write else _POPULATE_READ)


class Alias:
    """A second, writable mapping of the pages of a shared one that may only be read: for a device that insists on it.

    It needs neither the segment's name nor its descriptor: `mremap(2)` of 0 bytes makes another mapping of the same
    pages. It is unmapped when nothing refers to it or to `buffer` any more. `OSError` where the kernel refuses.
    """

    __slots__ = ("__weakref__", "address", "buffer", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = (nbytes + PAGE - 1) & -PAGE
        found = _libc.mremap(address, 0, self.nbytes, _MAY_MOVE)
        if found in (None, _FAILED):
            raise _failed("cannot map shared memory a second time")
        self.address: int = found
        if _libc.mprotect(found, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            error = _failed("cannot map shared memory writable")
            _libc.munmap(found, self.nbytes)
            raise error
        kind: Any = type("Slots", (ctypes.c_char * nbytes,), {})
        whole = kind.from_address(found)
        weakref.finalize(whole, _libc.munmap, found, self.nbytes).atexit = False
        self.buffer = memoryview(whole).cast("B")
        forks.track(self)

    def drop_in_child(self) -> None:
        """As of a `Mapping`: touching it fails."""
        _mmap(self.address, self.nbytes, _PROT_NONE, _REPLACE, -1, 0)


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return ResourceError(number, f"{what}: {os.strerror(number)}")


class Segment:
    """An open segment: a descriptor to map from. Mappings outlive it."""

    __slots__ = ("fd", "name", "nbytes")

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.fd = name, fd
        self.nbytes = os.fstat(fd).st_size

    def map(self, offset: int = 0, nbytes: int | None = None, *, writable: bool) -> Mapping:
        """Map `[offset, offset + nbytes)`; `offset` is a multiple of the page size."""
        return Mapping(self.fd, offset, self.nbytes - offset if nbytes is None else nbytes, writable=writable)

    def reserve(self, nbytes: int, remedy: str) -> None:
        """Grow to `nbytes` with every page reserved, so that a small `/dev/shm` is an error here and never a SIGBUS."""
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise ResourceError(
                    error.errno,
                    f"segment {self.name} needs {format_bytes(nbytes)}, more than this process may write into one "
                    f"file: {remedy}, or raise ulimit -f",
                ) from None
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise ResourceError(
                    error.errno,
                    f"segment {self.name} needs {format_bytes(nbytes)}, {SHM_DIR} has {format_bytes(free_bytes())} "
                    f"free: {remedy}, or give {SHM_DIR} more room (containers: --shm-size)",
                ) from None
            raise
        self.nbytes = nbytes

    def is_still(self, name: str) -> bool:
        """Whether `name` still leads to this very segment (nobody unlinked or replaced it)."""
        try:
            return os.path.samestat(os.stat(SHM_DIR + name), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def locks(self) -> LockFile:
        """A second open file description of the same segment, for locks alone."""
        try:
            return LockFile(os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise shortage.explain(error, f"cannot open segment {self.name} for its locks") from None

    def is_mine(self) -> bool:
        """Whether it belongs to this user. Only root, or a careless owner, can open what does not."""
        return os.fstat(self.fd).st_uid == os.geteuid()

    def close(self) -> None:
        """Close the descriptor; mappings stay valid. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(name: str, nbytes: int, remedy: str) -> Segment:
    """Create a new segment, every page reserved and zero. Fails if the name exists; a failure leaves nothing behind."""
    segment = _open(name, posix_ipc.O_CREX)
    try:
        segment.reserve(nbytes, remedy)
    except BaseException:
        segment.close()
        unlink(name)
        raise
    return segment


def open_or_create(name: str) -> Segment:
    """Open this user's segment, or create it with size 0. Which of the two it was, the caller decides under a lock."""
    segment = _open(name, posix_ipc.O_CREAT)
    if not segment.is_mine():
        segment.close()
        raise ResourceError(errno.EACCES, _denied(name))
    return segment


def attach(name: str) -> Segment:
    """Open an existing segment. `FileNotFoundError` if there is none."""
    return _open(name, 0)


def unlink(name: str) -> None:
    """Remove a segment's name. Existing mappings stay valid. No error if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SHM_DIR + name)


def listing() -> list[str]:
    """The names of all files in `/dev/shm`."""
    try:
        return os.listdir(SHM_DIR)
    except OSError as error:
        raise shortage.explain(error, f"cannot list {SHM_DIR}") from None


def free_bytes() -> int:
    """Free bytes of `/dev/shm`."""
    space = os.statvfs(SHM_DIR)
    return space.f_bavail * space.f_frsize


def _open(name: str, flags: int) -> Segment:
    try:
        fd = int(posix_ipc.SharedMemory(name, flags, mode=_MODE).fd)
    except posix_ipc.ExistentialError as error:
        if flags:
            raise ResourceError(errno.EEXIST, f"segment {name}: {error}") from None
        raise FileNotFoundError(errno.ENOENT, f"there is no segment {name}") from None
    except posix_ipc.PermissionsError:
        raise ResourceError(errno.EACCES, _denied(name)) from None
    except OSError as error:
        raise shortage.explain(error, f"cannot {'make' if flags else 'open'} segment {name}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise WireError(f"{SHM_DIR}{name} is not a shared-memory segment")
    return Segment(name, fd)


def _denied(name: str) -> str:
    try:
        owner = os.stat(SHM_DIR + name).st_uid
    except OSError:
        return f"no permission to open segment {name} in {SHM_DIR}"
    return f"segment {name} belongs to user {owner}, you are user {os.geteuid()}: use another channel name"
