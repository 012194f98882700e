"""POSIX shared-memory segments. Create, attach and unlink are three functions; attaching never deletes anything."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .. import native
from ..errors import ResourceError, WireError
from ..options import format_bytes
from . import lifecycle, placement, shortage
from .descriptors import Descriptor, Found, OwnFile
from .locks import LockFile, is_locked
from .mapped_file import FIXED, POPULATE_WRITE, FileMap, libc
from .placement import Place
from .shortage import SHM_DIR as SHM_DIR

PAGE: Final = mmap.PAGESIZE
_PROT_NONE = 0
_REPLACE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
libc.mremap.restype = ctypes.c_void_p
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAY_MOVE = 1  # MREMAP_MAYMOVE
_FAILED = ctypes.c_void_p(-1).value
_NO_FILE: Final = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)
_KINDS: Final = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ


class SharedMap(FileMap):
    """A mapped part of a segment."""

    hold: Any
    """With a segment server: keeps the segment available to the next server for as long as this is mapped."""
    _in_child: int

    @classmethod
    def of_segment(cls, fd: int, offset: int, nbytes: int, *, writable: bool, hold: object = None) -> SharedMap:
        """Map `[offset, offset + nbytes)`. Raises `OSError`, and `WireError` if the segment is smaller."""
        if (size := os.fstat(fd).st_size) < offset + nbytes:  # touching more would kill the process (SIGBUS)
            raise WireError(f"a segment ends at byte {size}: it was cut or is damaged")
        made = cls.of(fd, offset, nbytes, flags=mmap.MAP_SHARED, writable=writable)
        made.hold = hold
        return made

    def end_in_children(self, *, values: bool) -> None:
        """Make forked children drop the mapping. `values`: programs have views of it."""
        self._in_child = _PROT_NONE if values else mmap.PROT_READ | mmap.PROT_WRITE
        lifecycle.track(self, type(self).drop_in_child)

    def drop_in_child(self) -> None:
        """In a forked child: make the range inaccessible, since the words and leases are the parent's.

        Words, which no program sees, are replaced by private zeros: code of the child that reads its parent's endpoint
        does no harm. The range is replaced, not unmapped: another mapping of the child must not end up under the
        parent's tensors.
        """
        libc.mmap(self.address, len(self), self._in_child, _REPLACE, -1, 0)


class Mapping:
    """A mapped part of a segment.

    The memory stays mapped as long as anything refers to `buffer`, `words` or this object.

    `words` and `view` are for loads and stores; `buffer` claims to be writable even if the mapping is read-only (torch
    warns about read-only arrays), so that writing through it into a read-only mapping is a segmentation fault, not a
    silent change of another process's tensor.
    """

    __slots__ = ("__weakref__", "address", "buffer", "map", "nbytes", "view", "words")

    def __init__(
        self, fd: int, offset: int, nbytes: int, *, writable: bool, hold: object = None, values: bool = False
    ) -> None:
        """`values`: programs get views of it. In a forked child, touching one is a segmentation fault."""
        try:
            self.map = SharedMap.of_segment(fd, offset, nbytes, writable=writable, hold=hold)
        except OSError as error:
            raise shortage.explain(error, f"cannot map {format_bytes(nbytes)} of shared memory") from None
        self.map.end_in_children(values=values)
        self.nbytes, self.address = nbytes, self.map.address
        slots: Any = type("Slots", (ctypes.c_char * nbytes,), {})
        whole = slots.from_address(self.address)
        whole.mapping = self.map
        self.buffer = memoryview(whole).cast("B")
        self.view = self.buffer if writable else self.buffer.toreadonly()
        self.words = self.view.cast("Q")

    def populate(self, *, write: bool) -> None:
        """Enter every page into this process's page table now, not at first touch. Best effort."""
        with contextlib.suppress(OSError, ValueError):
            self.map.madvise(POPULATE_WRITE if write else _POPULATE_READ)


class Alias:
    """A second, writable mapping of the pages of a read-only shared one, for a device that requires it.

    It needs neither the segment's name nor its descriptor: `mremap(2)` of 0 bytes makes another mapping of the same
    pages. It is unmapped when nothing refers to it or to `buffer` any more. Raises `OSError` if the kernel refuses.
    """

    __slots__ = ("__weakref__", "address", "buffer", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = (nbytes + PAGE - 1) & -PAGE
        found = libc.mremap(address, 0, self.nbytes, _MAY_MOVE)
        if found in (None, _FAILED):
            raise _failed("cannot map shared memory a second time")
        self.address: int = found
        if libc.mprotect(found, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            error = _failed("cannot map shared memory writable")
            libc.munmap(found, self.nbytes)
            raise error
        kind: Any = type("Slots", (ctypes.c_char * nbytes,), {})
        whole = kind.from_address(found)
        weakref.finalize(whole, libc.munmap, found, self.nbytes).atexit = False
        self.buffer = memoryview(whole).cast("B")
        lifecycle.track(self, type(self).drop_in_child)

    def drop_in_child(self) -> None:
        """In a forked child: make the range inaccessible, as that of a `Mapping`."""
        libc.mmap(self.address, self.nbytes, _PROT_NONE, _REPLACE, -1, 0)


class Unreadable(ResourceError):
    """A segment that this user has no permission to open."""


class NameTaken(ResourceError):
    """The name of a segment or semaphore that is to be made is taken: any user can make files in `/dev/shm`."""


def name_taken(what: str, place: Place, name: str) -> NameTaken:
    """The error that names the user who has taken the name of `what`."""
    path = place.path(name)
    try:
        info = place.status(name)
        if info is None:
            raise FileNotFoundError
        found = f"{path} is {kind_of(info.st_mode)} of user {info.st_uid}, you are user {os.geteuid()}"
    except OSError:
        found = f"there was a file {path}"
    return NameTaken(
        errno.EEXIST,
        f"cannot make {what}: {found}: have it removed, or make the endpoint anew: its files get other names",
    )


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return ResourceError(number, f"{what}: {os.strerror(number)}")


class Segment(Descriptor):
    """An open segment: a descriptor to map from. Mappings outlive it."""

    __slots__ = ("_found", "name", "nbytes", "place")

    def __init__(self, name: str, flags: int = 0) -> None:
        self.name, self.place = name, placement.current()
        self._found: Found = self.place.find(name[1:], flags)
        super().__init__(self._found.path, self._found.flags, leads_to=self._found.leads_to)
        self.nbytes = os.fstat(self.fd).st_size

    def map(self, offset: int = 0, nbytes: int | None = None, *, writable: bool, values: bool = False) -> Mapping:
        """Map `[offset, offset + nbytes)`; `offset` is a multiple of the page size. `values`: as for a `Mapping`."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        return Mapping(self.fd, offset, nbytes, writable=writable, hold=self._found.hold, values=values)

    def reserve(self, nbytes: int, remedy: str, start: int = 0) -> None:
        """Reserve every page of `nbytes` from byte `start` on, so that a small `/dev/shm` is an error here and never a
        SIGBUS. The segment grows to their end."""
        try:
            with self.place.room(self.name[1:], self.fd, start, nbytes):
                os.posix_fallocate(self.fd, start, nbytes)
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
                    f"segment {self.name} needs {format_bytes(nbytes)}, {self.place} has "
                    f"{format_bytes(self.place.free_bytes())} free: {remedy}, or {self.place.more_room()}",
                ) from None
            raise
        self.nbytes = max(self.nbytes, start + nbytes)

    def is_still(self, name: str) -> bool:
        """Whether `name` still leads to this segment (it was not unlinked or replaced)."""
        info = self.place.status(name[1:])
        return info is not None and os.path.samestat(info, os.fstat(self.fd))

    def locks(self) -> LockFile:
        """A second open file description of the same segment, for locks alone."""
        try:
            return LockFile(f"/proc/self/fd/{self.fd}", leads_to=self._found.leads_to)
        except OSError as error:
            raise shortage.explain(error, f"cannot open segment {self.name} for its locks") from None

    def read(self, start: int, count: int) -> memoryview:
        """Read `count` words from word `start` on, without mapping them. Raises `WireError` if there are fewer."""
        return _words(self, os.pread(self.fd, 8 * count, 8 * start), start, count)

    def is_sparse(self) -> bool:
        """Whether pages of it were never reserved: touching such a page of a mapping may kill the process (SIGBUS)."""
        info = os.fstat(self.fd)
        return info.st_blocks * 512 < info.st_size

    def is_mine(self) -> bool:
        """Whether it belongs to this user."""
        return os.fstat(self.fd).st_uid == os.geteuid()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(name: str, nbytes: int, remedy: str, *, reserved: int | None = None) -> Segment:
    """Create a new segment, every page reserved and zero. Fails if the name exists; a failure leaves nothing behind.

    `reserved`: reserve only so many bytes at its start; the members that use the rest reserve it.

    An exception of a signal handler may arrive before the caller has the segment: the caller then removes the name.
    """
    segment: Segment | None = None
    try:
        segment = _open(name, os.O_CREAT | os.O_EXCL)
        segment.reserve(nbytes if reserved is None else reserved, remedy)
        if segment.nbytes < nbytes:
            os.ftruncate(segment.fd, nbytes)
            segment.nbytes = nbytes
        return segment
    except BaseException:
        if segment is not None:  # else the name may be another process's
            segment.close()
            unlink(name)
        raise


def open_or_create(name: str) -> Segment:
    """Open this user's segment, or create it with size 0. The caller finds out under a lock which of the two it was."""
    segment = _open(name, os.O_CREAT)
    if not segment.is_mine():
        segment.close()
        raise ResourceError(errno.EACCES, _denied(name))
    return segment


def attach(name: str) -> Segment:
    """Open an existing segment of this user. Raises `FileNotFoundError` if there is none, or it is another user's."""
    info = status(name)
    if info is not None and info.st_uid != os.geteuid():
        raise FileNotFoundError(errno.ENOENT, _denied(name))
    return _open(name, 0)


class Glance(OwnFile):
    """A segment of any user, for reading alone. It is neither mapped nor locked."""

    __slots__ = ("info", "name", "nbytes")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def look(self, place: Place) -> None:
        """Open it, for the first time or again."""
        found = place.find(self.name[1:], os.O_NOFOLLOW, held=False)
        self.open_at(found.path, found.flags | _LOOK, found.leads_to)
        self.info = os.fstat(self.fd)
        self.nbytes = self.info.st_size

    def words(self, data: bytes, start: int, count: int) -> memoryview:
        """What was read as `count` words from word `start` on. Raises `WireError` if there are fewer."""
        return _words(self, data, start, count)

    def read(self, start: int, count: int) -> memoryview:
        """Read `count` words from word `start` on. Raises `WireError` if there are fewer."""
        return _words(self, os.pread(self.fd, 8 * count, 8 * start), start, count)

    def read_into(self, words: memoryview) -> None:
        """Read the first words into reused memory: allocating 70 KB costs more than reading them."""
        nbytes = os.preadv(self.fd, [words], 0)
        if nbytes != words.nbytes:
            raise WireError(f"segment {self.name} ends at byte {nbytes}: it was cut or is damaged")

    def read_bytes(self, start: int, count: int) -> bytes:
        """Read `count` bytes from byte `start` on. Raises `WireError` if there are fewer."""
        data = os.pread(self.fd, count, start)
        if len(data) != count:
            raise WireError(f"segment {self.name} ends at byte {start + len(data)}: it was cut or is damaged")
        return data

    def is_locked(self, byte: int, length: int = 1) -> bool:
        """Whether any process holds a lock within `[byte, byte + length)`."""
        return is_locked(self.fd, byte, length)

    def __enter__(self) -> Glance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _words(segment: Segment | Glance, data: bytes, start: int, count: int) -> memoryview:
    if len(data) != 8 * count:
        raise WireError(f"segment {segment.name} ends at byte {8 * start + len(data)}: it was cut or is damaged")
    return memoryview(data).cast("Q")


def look_at(name: str, *, place: Place | None = None, is_regular: bool = False, closed: Glance | None = None) -> Glance:
    """Open an existing segment of any user for inspection, if the permissions allow it.

    `place`: the current one, from a caller that opens many: finding it takes as long as opening a file.
    `is_regular`: the caller has just found that it is a regular file.
    `closed`: an earlier `Glance` at the same name, which is opened again: that takes half as long.
    """
    if not is_regular:
        _check_kind(name)
    segment = Glance(name) if closed is None else closed
    try:
        segment.look(placement.current() if place is None else place)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, f"there is no segment {name}") from None
    except OSError as error:
        raise _not_opened(name, error, remedy="only that user and root may look at it") from None
    if not stat.S_ISREG(segment.info.st_mode):
        segment.close()
        raise WireError(f"{SHM_DIR}{name} is not a shared-memory segment")
    return segment


def unlink(name: str) -> bool:
    """Remove the name of a segment, or the file of a semaphore. Existing mappings stay valid.

    Does nothing if it is gone already or not ours.

    Returns False if a segment server cannot do so now: the name may still be there.
    """
    return placement.current().unlink(name[1:])


def status(name: str) -> os.stat_result | None:
    """The status of a segment's name, without following a link; None if there is no such name."""
    return placement.current().status(name[1:])


def statuses(files: Iterable[str]) -> dict[str, os.stat_result | None]:
    """The status of each of these names, which are as `listing` returns them."""
    place = placement.current()
    return {file: place.status(file) for file in files}


def exists(name: str) -> bool:
    """Whether there is a segment of that name, as far as that can be found out at once."""
    return placement.current().exists(name[1:])


def is_ours(name: str) -> bool:
    """Whether a name leads to a file of this user."""
    info = status(name)
    return info is not None and info.st_uid == os.geteuid() and stat.S_ISREG(info.st_mode)


def listing() -> list[str]:
    """The names of all files in `/dev/shm`, or of all that a segment server keeps."""
    return placement.current().listing()


def scan() -> Iterator[tuple[str, os.stat_result | None]]:
    """These names with their status; None if the status is unknown."""
    return placement.current().scan()


def free_bytes() -> int:
    """Free bytes of `/dev/shm`, or of what a segment server allows."""
    return placement.current().free_bytes()


def total_bytes() -> int:
    """Bytes that all segments together may take."""
    return placement.current().total_bytes()


def where() -> str:
    """The name of the place of all segments, for errors."""
    return str(placement.current())


def more_room() -> str:
    """How to give it more room, as text for errors."""
    return placement.current().more_room()


def path_of(file: str) -> str:
    """A name from `listing`, as it is shown to people."""
    return placement.current().path(file)


def _open(name: str, flags: int) -> Segment:
    try:
        if not flags & os.O_EXCL:
            _check_kind(name)  # before it is opened: opening a device may have side effects
        segment = Segment(name, flags)
    except FileNotFoundError as error:
        if flags:
            raise shortage.explain(error, f"cannot make segment {name}") from None
        raise FileNotFoundError(errno.ENOENT, f"there is no segment {name}") from None
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise name_taken(f"segment {name}", placement.current(), name[1:]) from None
        raise _not_opened(name, error, make=bool(flags)) from None
    if not stat.S_ISREG(os.fstat(segment.fd).st_mode):
        segment.close()
        raise WireError(f"{SHM_DIR}{name} is not a shared-memory segment")
    return segment


_OTHER_NAME: Final = "use another channel name"


def _not_opened(name: str, error: OSError, *, make: bool = False, remedy: str = _OTHER_NAME) -> Exception:
    """The error that says why a segment cannot be opened. `remedy`: if it is another user's."""
    if isinstance(error, ResourceError):
        return error  # a segment server has said why
    if error.errno in (errno.EACCES, errno.EPERM):
        return (ResourceError if make else Unreadable)(errno.EACCES, _denied(name, remedy))
    if error.errno in _NO_FILE:
        return WireError(f"{SHM_DIR}{name} is not a shared-memory segment")
    return shortage.explain(error, f"cannot {'make' if make else 'open'} segment {name}")


def _check_kind(name: str) -> None:
    info = status(name)
    if info is not None and not stat.S_ISREG(info.st_mode):
        raise WireError(
            f"{SHM_DIR}{name} is {kind_of(info.st_mode)} of user {info.st_uid}, not a shared-memory segment: remove "
            "it, or use another channel name"
        )


def kind_of(mode: int) -> str:
    """What a file is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a file of unknown kind")


def _denied(name: str, remedy: str = _OTHER_NAME) -> str:
    info = status(name)
    if info is None:
        return f"no permission to open segment {name} in {SHM_DIR}"
    if info.st_uid == os.geteuid():
        return f"segment {name} has mode {stat.S_IMODE(info.st_mode):o}: run chmod 600 {SHM_DIR}{name}"
    return f"segment {name} belongs to user {info.st_uid}, you are user {os.geteuid()}: {remedy}"


def guard(data: Mapping, head: Mapping, records: int, slots: int, slot_bytes: int, channel: str) -> None:
    """Explain writes to `data`, the slots of a ring, which are mapped read-only: name channel and message.

    The compiled module does it (`native/faults.c`); without it, the segmentation fault is not explained.
    `records` is the offset of the records in `head`, which from now on stays mapped as long as `data`.
    """
    module = native.module
    if module is None:
        return
    whole: Any = data.buffer.obj
    whole.head = head.map  # keeps it mapped: the handler reads it
    number = module.guard(data.address, data.nbytes, head.address + records, slots, slot_bytes, channel)
    weakref.finalize(whole, module.unguard, number).atexit = False
