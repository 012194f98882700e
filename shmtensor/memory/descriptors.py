"""Open files that are closed exactly once, even if their owner is interrupted, and never left open in a forked child.

Between two calls an exception of a signal handler may come. So the same call that opens a descriptor records it:
`FileIO` opens or closes, and records that, within single C calls, and `extend` calls `open` itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from io import FileIO
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple

from . import lifecycle

_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # opening never blocks, whatever the file is


class Found(NamedTuple):
    """The file that a name leads to, for a `Descriptor`."""

    path: str
    flags: int
    leads_to: str
    """The real path, as `/proc/self/fd` shows it."""
    hold: Any
    """Keeps `path` valid, and the segment available to the next segment server, for as long as it lives. None for a
    file."""


class OpenFile:
    """Owns one descriptor that a C function opens, or none yet."""

    __slots__ = ("_file", "fd")

    fd: int
    """-1 while there is none."""

    def __init__(self) -> None:
        self.fd = -1
        # Any and `__new__`: `FileIO(...)` would open a file before it could be recorded
        self._file: Any = FileIO.__new__(FileIO)

    def open(self, call: Callable[..., int], *arguments: Any) -> None:
        """Own the descriptor that `call(*arguments)` returns; `call` is a C function."""
        opened: list[int] = []
        try:
            opened.extend(starmap(call, (arguments,)))
            FileIO.__init__(self._file, opened[0], "r+b")
            self.fd = opened[0]
        except BaseException:
            if self._file.closed:
                for fd in opened:
                    os.close(fd)
            self._file.close()
            raise

    def close(self) -> None:
        """Close it; the kernel drops every lock of this description. Idempotent."""
        self.fd = -1
        self._file.close()

    # called by the interpreter in C, so that it loses no exception of a signal handler in a finalizer
    __del__ = property(attrgetter("_file.close"))


def open_file(path: str, flags: int) -> OpenFile:
    """`os.open`, close-on-exec, as an object that closes the file when nobody refers to it. Raises OSError."""
    file = OpenFile()
    file.open(os.open, path, flags | os.O_CLOEXEC, 0o644)
    return file


def unopened() -> socket.SocketType:
    """A socket without a descriptor, of the C type, whose `__init__` opens or takes one in a single C call.

    The caller holds the socket before that call, so it can close it wherever an exception arrives."""
    return socket.SocketType.__new__(socket.SocketType)


class InheritedFile(OpenFile):
    """One descriptor that forked children keep, with the locks of its description."""

    __slots__ = ("__weakref__",)
    _all = lifecycle.inherited  # at the end of the interpreter modules lose their names before objects die

    def duplicate(self, fd: int) -> InheritedFile:
        """Own another descriptor of the description of `fd`; returns itself."""
        self.open(os.dup, fd)
        return self

    def adopt(self, fd: int) -> InheritedFile:
        """Own `fd` itself, which another process has passed; returns itself."""
        self.open(int, fd)
        os.set_inheritable(fd, False)
        return self

    def open(self, call: Callable[..., int], *arguments: Any) -> None:
        """As for `OpenFile`."""
        super().open(call, *arguments)
        self._all.add(self.fd)

    def close(self) -> None:
        """As for `OpenFile`; forked children keep theirs."""
        self._all.discard(self.fd)
        super().close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


class OwnFile(OpenFile):
    """One descriptor, or none yet, of this process alone: a forked child closes its copy.

    Another thread may fork while this one is in `open_at`: the child then has a descriptor that is not recorded yet.
    `leads_to` is stored before, so that the child finds it.
    """

    __slots__ = ("__weakref__", "_opening")

    def __init__(self) -> None:
        super().__init__()
        self._opening = ""
        lifecycle.track(self, type(self).drop_in_child)

    def open_at(self, path: str, flags: int, leads_to: str, mode: int = 0o600) -> None:
        """Open a file, whose real path is `leads_to`. `mode`: of a new one."""
        self._opening = leads_to
        try:
            self.open(os.open, path, flags, mode)
        finally:
            self._opening = ""

    def drop_in_child(self) -> None:
        """In a forked child: close the copy, since the locks of the parent's description must end with the parent."""
        opening, self._opening = self._opening, ""
        if opening:
            empty_all_of(opening)
        self.close()


class Descriptor(OwnFile):
    """One open file, for reading and writing.

    Args:
        path: the file to open.
        flags: further flags, such as `os.O_CREAT`.
        leads_to: the file's real path if `path` is a link, as those in `/proc` are.
        mode: of a new file.
    """

    __slots__ = ()

    def __init__(self, path: str, flags: int = 0, *, leads_to: str = "", mode: int = 0o600) -> None:
        super().__init__()
        flags |= _OPEN if leads_to else _OPEN | os.O_NOFOLLOW
        self.open_at(path, flags, leads_to or os.path.realpath(path), mode)


def empty_all_of(path: str) -> None:
    """In a forked child: have every descriptor that leads to `path` lead to nothing, except those that children inherit
    on purpose.

    None is closed: one may have an owner, such as a mapping (`mmap` duplicates its descriptor), which closes it when it
    dies. By then, the number would be another file's.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            leads_to = os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")
            if leads_to == path and int(number) not in lifecycle.inherited:
                _empty(int(number))


def _empty(fd: int) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        nothing = os.open(os.devnull, flags)
    except OSError:  # no descriptor is left: then this one is the next that is given out
        os.close(fd)
        os.open(os.devnull, flags)
        return
    os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
