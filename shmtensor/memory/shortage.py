"""Errors for a resource that has run out: what is missing, how much, and the remedy."""

from __future__ import annotations

import errno
import itertools
import os
from typing import Final

from ..errors import ResourceError
from ..options import format_bytes

SHM_DIR: Final = "/dev/shm"

_REMEDIES: Final = {
    errno.EMFILE: "this process may open no more files: close some, or raise ulimit -n",
    errno.ENFILE: "this machine may open no more files: raise fs.file-max",
    errno.ENOMEM: "no memory or address space is left to map it: raise ulimit -v or vm.max_map_count, or pass fewer "
    "slots or a smaller slot_bytes",
    errno.ENOENT: f"mount a tmpfs at {SHM_DIR}",
    errno.EROFS: f"mount {SHM_DIR} writable, or the directory that containers share",
}


class Unserved(ResourceError):
    """There is no segment server now, or it does not serve yet: the request may succeed later."""


def explain(error: OSError, what: str) -> ResourceError:
    """The `ResourceError` for an error of the kernel."""
    # posix_ipc reports the limit on open files without an errno
    code = error.errno or (errno.ENFILE if may_open(1) else errno.EMFILE)
    remedy = _room() if code == errno.ENOSPC else _REMEDIES.get(code)
    text = f"{what}: {os.strerror(code)}"
    return ResourceError(code, f"{text}: {remedy}" if remedy else text)


def explain_file(error: OSError, path: str, what: str = "cannot open") -> ResourceError:
    """The `ResourceError` for a file, not in `/dev/shm`, that cannot be opened or made."""
    directory = os.path.dirname(path)
    remedies = {
        errno.ENOENT: f"make directory {directory}, with mode 0700",
        errno.ENOSPC: f"the file system of {directory} is full: free room, or files (inodes: df -i), there",
        errno.EROFS: f"mount {directory} writable",
    }
    remedy = remedies.get(error.errno or 0)
    if remedy is None:
        return explain(error, f"{what} {path}")
    return ResourceError(error.errno, f"{what} {path}: {os.strerror(error.errno or 0)}: {remedy}")


def _room() -> str:
    try:
        space = os.statvfs(SHM_DIR)
    except OSError as error:
        return f"{SHM_DIR}: {error.strerror}"
    return (
        f"{SHM_DIR} has {format_bytes(space.f_bavail * space.f_frsize)} and {space.f_favail} of {space.f_files} files "
        "free: shmtensor gc removes what the dead left, or mount it with a larger size= or nr_inodes= (containers: "
        "--shm-size)"
    )


def may_open(count: int) -> bool:
    """Whether this process may open `count` more files now. Tests it by opening them (some 3 µs each)."""
    opened: list[int] = []
    opening = map(os.open, ["/"] * count, itertools.repeat(os.O_PATH | os.O_CLOEXEC))
    closing = map(os.close, opened)  # none yet: it takes what is there when it comes to it
    try:
        opened.extend(opening)  # all are opened, and all closed, by one C call each: no interrupt comes in between
    except OSError:
        return False
    finally:
        any(closing)
    return True


def need_files(count: int, what: str) -> None:
    """Raise `ResourceError` unless this process may open the `count` more files that `what` may need."""
    if not may_open(count):
        raise ResourceError(
            errno.EMFILE,
            f"{what} needs up to {count} more open files, this process may not open so many: close some, or raise "
            "ulimit -n",
        )
