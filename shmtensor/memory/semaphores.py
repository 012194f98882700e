"""Semaphores: senders sleep on one until a slot is given back, and the processes of a queue count items by others.

A sender's `asleep` word: bits 0 to 30 count its sleeps (odd: asleep); with `BATCHED`, bits 31 to 61 hold the sequence
number of the first message whose release wakes it; bit 63 is `BY_FIFO`. It is one word, so that a receiver sees all of
it from the same sleep. docs/internals/protocols.md, section 4.

A sender that waits on an event loop is woken by a byte in a FIFO, which, unlike a semaphore, is a descriptor. It makes
its FIFO before it first waits that way, and marks in its `asleep` word (`BY_FIFO`) which of the two it sleeps on. A
`SenderWaker` keeps only the semaphore open: each wake-up opens the FIFO, writes to it and closes it, so that it may
come from any thread, the garbage collector's included.
"""

from __future__ import annotations

import _multiprocessing
import contextlib
import ctypes
import errno
import os
import stat
import time
from multiprocessing import context
from typing import Any, Final

import posix_ipc

from ..errors import PlatformError, ResourceError
from . import placement, shortage
from .descriptors import Descriptor, Found, OpenFile
from .segment import SharedMap, name_taken


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc: Final = ctypes.CDLL(None)
_libc.sem_init.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint)
_libc.sem_open.argtypes, _libc.sem_open.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
_libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
_libc.sem_close.argtypes = (ctypes.c_void_p,)
_quick: Final = ctypes.PyDLL(None)  # what does not wait keeps the GIL: a receiver posts where no thread may come in
_quick.sem_post.argtypes = _quick.sem_trywait.argtypes = (ctypes.c_void_p,)

_PREFIX: Final = "sem."
_LEAST: Final = 16
"""The smallest size in bytes of a semaphore in any C library."""
_NBYTES: Final = max(_LEAST, 4 * ctypes.sizeof(ctypes.c_long))
"""The size of a `sem_t`, in glibc and in musl."""
_SHARED: Final = 1  # `sem_init`: between processes


COUNT: Final = (1 << 31) - 1
"""In a sender's `asleep` word: the bits that count its sleeps."""
BATCHED: Final = 1 << 62
"""In a sender's `asleep` word: it must not be woken before a certain message is released."""
_TARGET: Final = 31


def batched(count: int, target: int) -> int:
    """The word of a sender in its sleep `count` that the release of message `target`, or of a later one, is to end."""
    return count | (target & COUNT) << _TARGET | BATCHED


def is_woken_by(asleep: int, seq: int) -> bool:
    """Whether the release of message `seq` wakes a sender whose word is `asleep`."""
    return not asleep & BATCHED or (seq - (asleep >> _TARGET)) & COUNT <= COUNT >> 1


class MappedSemaphore:
    """A semaphore in the memory that a segment server has passed. Raises `FileNotFoundError` if it is none.

    Forked children have it too: it stays mapped in them.
    """

    __slots__ = ("_map", "address")

    def __init__(self, found: Found) -> None:
        file = Descriptor(found.path, found.flags, leads_to=found.leads_to)
        try:
            if os.fstat(file.fd).st_size < _LEAST:
                raise FileNotFoundError(errno.ENOENT, f"{found.leads_to} is not a semaphore")
            mapped = SharedMap.of_segment(file.fd, 0, _LEAST, writable=True, hold=found.hold)
        finally:
            file.close()
        self._map: SharedMap | None = mapped
        self.address = mapped.address

    def release(self) -> None:
        """Add one. Raises `ValueError` if it is closed."""
        kept = self.memory()
        _quick.sem_post(self.address)
        del kept

    def acquire(self, timeout: int) -> None:
        """Subtract one, without waiting. Raises `posix_ipc.BusyError` if it is 0."""
        kept = self.memory()
        if _quick.sem_trywait(self.address):
            raise posix_ipc.BusyError("it is 0")
        del kept

    def close(self) -> None:
        """Unmap it as soon as no thread uses it any more. Idempotent."""
        self._map = None

    def memory(self) -> SharedMap:
        """Its mapping, which stays for as long as the caller has this. Raises `ValueError` if it is closed."""
        if self._map is None:
            raise ValueError("it is closed")
        return self._map


class Sleeper:
    """A named POSIX semaphore: its owner waits, any process posts. `unlink_semaphore` removes the name."""

    __slots__ = ("_handle", "_semaphore")

    def __init__(self, name: str, *, create: bool) -> None:
        self._handle: int | None = None  # only the owner's, which waits with it
        self._semaphore: Any
        if create:
            create_semaphore(name, 0)
        in_files = placement.current() is placement.FILES
        try:
            if in_files:
                if not create:
                    _check(name)
                self._semaphore = posix_ipc.Semaphore(name)
            else:
                self._semaphore = MappedSemaphore(find_semaphore(name))
        except posix_ipc.ExistentialError as error:
            raise FileNotFoundError(errno.ENOENT, f"semaphore {name}: {error}") from None
        except (posix_ipc.PermissionsError, ValueError) as error:  # posix_ipc's errors for a name that is not a file's
            raise ResourceError(errno.EACCES, f"semaphore {name}: {error}") from None
        except (FileNotFoundError, ResourceError):
            raise
        except OSError as error:
            raise shortage.explain(error, f"cannot open semaphore {name}") from None
        if create and in_files:
            self._handle = _libc.sem_open(os.fsencode(name), 0)  # the same semaphore: the C library counts its users
        elif create:
            self._handle = self._semaphore.address

    def close(self) -> None:
        """Close the semaphore in this process. Idempotent."""
        handle, self._handle = self._handle, None
        if handle and not isinstance(self._semaphore, MappedSemaphore):
            _libc.sem_close(handle)
        with contextlib.suppress(posix_ipc.Error, ValueError):
            self._semaphore.close()

    def post(self) -> None:
        """Wake the owner. Safe in any context; a full counter means that it is awake already."""
        with contextlib.suppress(ValueError, posix_ipc.Error):
            self._semaphore.release()

    def drain(self) -> None:
        """Discard posts that came after their sleep had ended."""
        with contextlib.suppress(posix_ipc.BusyError):
            while True:
                self._semaphore.acquire(0)

    def wait(self, timeout: float) -> bool:
        """Sleep until posted (True) or for `timeout` seconds (False).

        A signal ends the sleep as well, and its handler's exception is raised. (`posix_ipc` runs handlers inside its
        own call, and replaces their exceptions by one of its own.)
        """
        handle, kept = self._handle, None
        if not handle:
            return False  # closed
        if isinstance(self._semaphore, MappedSemaphore):
            kept = self._semaphore.memory()  # while another thread closes this
        until = time.time_ns() + int(timeout * 1e9)
        end = _Timespec(until // 1_000_000_000, until % 1_000_000_000)
        posted = bool(_libc.sem_timedwait(handle, end) == 0)
        del kept
        return posted


def create_semaphore(name: str, value: int) -> None:
    """Create a named semaphore of this user, which counts from `value`. It is not opened.

    Not by `sem_open`: C libraries write a file with a random name there, and link it to the right one. A process that
    is killed in between would leave a file that nobody can attribute to a channel. Here it has its name from the start;
    nobody opens it before the name is published.

    Raises `NameTaken` if there is a file of that name. A failure leaves nothing behind; an exception of a signal
    handler may arrive when it stands: the caller then removes the name.
    """
    initial = ctypes.create_string_buffer(_NBYTES)
    file: Descriptor | None = None
    try:
        if _libc.sem_init(initial, _SHARED, value):
            raise OSError(errno.EINVAL, f"a semaphore cannot count from {value}")
        found = placement.current().find(_file(name), os.O_CREAT | os.O_EXCL)
        file = Descriptor(found.path, found.flags, leads_to=found.leads_to)
        # crash: semaphore.created
        os.write(file.fd, initial)
        # crash: semaphore.written
    except FileExistsError:
        raise name_taken(f"semaphore {name}", placement.current(), _file(name)) from None
    except BaseException as error:
        if file is not None:  # else the name may be another process's
            unlink_semaphore(name)
        if isinstance(error, OSError) and not isinstance(error, ResourceError):
            raise shortage.explain(error, f"cannot make semaphore {name}") from None
        raise
    finally:
        if file is not None:
            file.close()


def find_semaphore(name: str) -> Found:
    """What the name of a semaphore leads to, if a segment server keeps it."""
    try:
        return placement.current().find(_file(name), 0)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, f"there is no semaphore {name}") from None


def _check(name: str) -> None:
    """Raise `FileNotFoundError` unless a name may be a semaphore of this user.

    Opening another file as one may kill the process: `sem_open` maps even an empty file, and reads its first word.
    """
    path = placement.FILES.path(_file(name))
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size < _LEAST:
        raise FileNotFoundError(errno.ENOENT, f"{path} is not a semaphore of user {os.geteuid()}")


def unlink_semaphore(name: str) -> bool:
    """Remove a semaphore's name. Does nothing if it is gone already or not ours. Otherwise as `segment.unlink`."""
    return placement.current().unlink(_file(name))


def semaphore_exists(name: str) -> bool:
    """Whether there is a semaphore of that name, as far as that can be found out at once."""
    return placement.current().exists(_file(name))


def _file(name: str) -> str:
    """The name of a semaphore's file."""
    return _PREFIX + name.lstrip("/")


BY_FIFO: Final = 1 << 63
"""In a sender's `asleep` word: it waits on its FIFO, not on its semaphore."""


class Fifo:
    """The sender's end. Made at first use; a second one of the same path reads from the same FIFO.

    Args:
        path: where receivers find it.
        file: opened here, to read from it; the caller's to close.
    """

    __slots__ = ("_file", "path")

    def __init__(self, path: str, file: OpenFile) -> None:
        self.path, self._file = path, file
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # crash: wait.made
            # for writing too: a FIFO without a writer is at its end, and would always be readable
            file.open(os.open, path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            code = error.errno or errno.EIO
            if code in (errno.EMFILE, errno.ENFILE):
                raise shortage.explain(error, "cannot open a FIFO to wait on") from None
            raise ResourceError(
                code,
                f"cannot make a FIFO in directory {os.path.dirname(path)}: {os.strerror(code)}: make that possible, or "
                "set SHMTENSOR_DIR to another directory",
            ) from None

    def drain(self) -> None:
        """Discard wake-ups that came after their sleep had ended."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._file.fd, 4096)) == 4096:
                pass


class SenderWaker:
    """The receivers' end: wakes a sender that sleeps either way. Raises `FileNotFoundError` if the sender is gone."""

    __slots__ = ("_fifo", "_semaphore")

    def __init__(self, semaphore: str, fifo: str) -> None:
        self._semaphore, self._fifo = Sleeper(semaphore, create=False), fifo

    def wake(self, asleep: int) -> None:
        """Wake the sender whose word is `asleep`. Never waits: a full FIFO wakes its reader anyway.

        If no descriptor is left, or the sender has died, nothing happens; a living sender then finds the free slot at
        its next liveness check.
        """
        if not asleep & BY_FIFO:
            self._semaphore.post()
            return
        file = OpenFile()
        with contextlib.suppress(OSError):
            file.open(os.open, self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.write(file.fd, b"\1")
        file.close()

    def close(self) -> None:
        """Close the semaphore in this process. Idempotent."""
        self._semaphore.close()


MOST: Final[int] = _multiprocessing.SemLock.SEM_VALUE_MAX
_SEMAPHORE: Final = 1  # `multiprocessing.synchronize.SEMAPHORE`


class Counter:
    """A counting semaphore with a limit, which the processes of a queue share.

    It is a POSIX semaphore of `multiprocessing`'s own C type, whose `acquire` and `release` are one C call each and
    handle signals while they wait. Only the name differs: it belongs to the queue's channel, so that the channel's
    clean-up removes it after any death. The name of one that forked children inherit is removed as soon as it is open.

    Args:
        name: its name, one of a channel's.
        value: what it counts from.
        most: `release` beyond this raises `ValueError`.
        named: whether to keep the name, so that spawned processes can open it; forked ones inherit the semaphore.
    """

    __slots__ = ("__weakref__", "_name", "_semaphore", "acquire", "release", "value")

    def __init__(self, name: str, value: int, most: int = MOST, *, named: bool) -> None:
        create_semaphore(name, value)
        made = _open(name, most)
        if not named:
            unlink_semaphore(name)
        self._use(name if named else None, made)

    def _use(self, name: str | None, semaphore: Any) -> None:
        self._name, self._semaphore = name, semaphore
        self.acquire = semaphore.acquire
        """`acquire(block=True, timeout=None)`: one less; False if that would be below 0."""
        self.release = semaphore.release
        """Add one."""
        self.value = semaphore._get_value
        """The current count."""

    def give(self) -> None:
        """`release`, unless the count is at its limit already, which the death of a process may have caused."""
        with contextlib.suppress(ValueError):
            self.release()

    # --- sending it to child processes

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        if self._name is None:
            raise RuntimeError(
                "A SemLock created in a fork context is being shared with a process in a spawn context: "
                "a queue of a fork context cannot be passed to a process that is spawned: make it with "
                'ctx="spawn", or with the context of that process'
            )
        return self._name, self._semaphore.maxvalue

    def __setstate__(self, state: Any) -> None:
        name, most = state
        self._use(name, _open(name, most, ": its queue is gone"))


class _Mapped(_multiprocessing.SemLock):  # type: ignore[misc]
    """A semaphore in memory that a segment server has passed. Bound methods of it keep that memory, too."""

    __slots__ = ("memory",)


def _open(name: str, most: int, cause: str = "") -> Any:
    try:
        if placement.current() is placement.FILES:
            return _multiprocessing.SemLock._rebuild(0, _SEMAPHORE, most, name)
        if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
            raise PlatformError(errno.ENOSYS, "queues whose segments a segment server keeps need glibc")
        memory = MappedSemaphore(find_semaphore(name))
        # without a name, it takes the address of a semaphore; when it dies it has glibc close that, which glibc, not
        # having opened it, refuses
        made = _Mapped._rebuild(memory.address, _SEMAPHORE, most, None)
        made.memory = memory
        return made
    except (ResourceError, PlatformError):
        raise
    except OSError as error:
        raise shortage.explain(error, f"cannot open semaphore {name}{cause}") from None
